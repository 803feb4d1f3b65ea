"""A standard-cell library of a few gates, so that tests need none of a foundry."""

GATES = {
    # name: (area, function, inputs, sense, nanoseconds without a load, nanoseconds per picofarad)
    "INV": (2, "(!A)", "A", "negative_unate", 0.02, 1.5),
    "INV4": (4, "(!A)", "A", "negative_unate", 0.02, 0.5),
    "BUF": (3, "(A)", "A", "positive_unate", 0.06, 1.2),
    "BUF4": (5, "(A)", "A", "positive_unate", 0.06, 0.4),
    "NAND2": (4, "(!(A B))", "AB", "negative_unate", 0.03, 2.0),
    "NAND2_WIDE": (6, "(!(A B))", "AB", "negative_unate", 0.03, 1.0),
    "NOR2": (4, "(!(A+B))", "AB", "negative_unate", 0.04, 2.5),
    "XOR2": (8, "(A^B)", "AB", "non_unate", 0.08, 2.5),
}

LOADS = (0.005, 0.05, 0.5)
SLEWS = (0.05, 0.5, 1.5)


def _table(kind: str, base: float, slope: float) -> str:
    rows = [", ".join(f"{base + slope * load + 0.1 * slew:.4f}" for slew in SLEWS) for load in LOADS]
    values = ", ".join(f'"{row}"' for row in rows)
    indices = "".join(f'index_{number} ("{", ".join(map(str, axis))}");\n' for number, axis in ((1, LOADS), (2, SLEWS)))
    return f"{kind} (grid) {{\n{indices}values ({values});\n}}\n"


def _timing(pin: str, sense: str, base: float, slope: float) -> str:
    tables = "".join(
        _table(f"cell_{edge}", base, slope) + _table(f"{edge}_transition", base, slope) for edge in ("rise", "fall")
    )
    return f'timing () {{\nrelated_pin : "{pin}";\ntiming_sense : {sense};\n{tables}}}\n'


def liberty(name: str = "tiny", *, without: tuple[str, ...] = ()) -> str:
    """The library's text, some gates left out."""
    cells = []
    for gate, (area, function, inputs, sense, base, slope) in GATES.items():
        if gate in without:
            continue
        pins = "".join(
            f"pin ({pin}) {{\ndirection : input;\ncapacitance : {0.04 if '4' in gate else 0.01};\n}}\n"
            for pin in inputs
        )
        timings = "".join(_timing(pin, sense, base, slope) for pin in inputs)
        output = f'pin (Y) {{\ndirection : output;\nfunction : "{function}";\nmax_capacitance : 0.5;\n{timings}}}\n'
        cells.append(f"cell ({gate}) {{\narea : {area};\n{pins}{output}}}\n")
    axes = "".join(f'index_{number} ("1000, 1001, 1002");\n' for number in (1, 2))
    return (
        f"library ({name}) {{\n"
        'delay_model : table_lookup;\ntime_unit : "1ns";\ncapacitive_load_unit (1, pf);\nvoltage_unit : "1V";\n'
        "nom_process : 1;\nnom_temperature : 25;\nnom_voltage : 1.8;\n"
        "lu_table_template (grid) {\nvariable_1 : total_output_net_capacitance;\nvariable_2 : input_net_transition;\n"
        f"{axes}}}\n{''.join(cells)}}}\n"
    )
