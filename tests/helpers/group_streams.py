"""Units between two streams `i` and `o`, some of them with tables, in Amaranth's simulator."""

from amaranth.hdl import Module
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out

from kvant.hw.kvcache.layouts import TableWrite
from kvant.sim.simulate import simulate
from kvant.sim.streams import Stimulus


class Tabled(wiring.Component):
    """A unit whose tables are written over a stream `cfg`."""

    def __init__(self, unit):
        self.unit = unit
        super().__init__(
            {
                "cfg": In(stream.Signature(data.StructLayout({"data": TableWrite()}))),
                "i": In(stream.Signature(unit.i.payload.shape())),
                "o": Out(stream.Signature(unit.o.payload.shape())),
            }
        )

    def elaborate(self, platform):
        m = Module()
        m.submodules.unit = unit = self.unit
        wiring.connect(m, wiring.flipped(self.i), unit.i)
        wiring.connect(m, unit.o, wiring.flipped(self.o))
        m.d.comb += [
            self.cfg.ready.eq(1),
            unit.write.valid.eq(self.cfg.valid),
            unit.write.data.eq(self.cfg.payload.data),
        ]
        return m


def words(layout, rows):
    """Dicts of a layout's fields as integers."""
    layout = data.Layout.cast(layout)
    return [layout.const(row).as_value().value for row in rows]


def table_words(tables):
    """Transfers of `cfg` that write ``{head: (coefficients, thresholds)}``."""
    rows = []
    for head, (coefficients, thresholds) in tables.items():
        rows += [{"kind": 0, "head": head, "index": k, "value": value} for k, value in enumerate(coefficients)]
        rows += [{"kind": 1, "head": head, "index": k, "value": value} for k, value in enumerate(thresholds)]
    return words(TableWrite(), rows)


def play(factory, rows, *, results=None, tables=None, **options):
    """Feed *rows*; what came out as views of the output's layout, and the trace.

    Parameters
    ----------
    factory : callable
        Makes the unit, which is made once.
    rows : list of dict
        Fields of the transfers of `i`.
    results : int, optional
        How many come out; default: as many as go in.
    tables : dict, optional
        Written first, over `cfg`.
    options
        Of `kvant.sim.simulate.simulate`.
    """
    unit = factory()
    layout_in, layout_out = unit.i.payload.shape(), unit.o.payload.shape()
    inputs = {"i": {"data": words(layout_in, rows)}}
    after = {}
    if tables is not None:
        inputs["cfg"] = {"data": table_words(tables)}
        after["i"] = "cfg", len(inputs["cfg"]["data"])
        unit = Tabled(unit)
    stimulus = Stimulus(inputs, {"o": len(rows) if results is None else results}, after=after)
    trace = simulate(lambda: unit, "unit", stimulus, simulator="amaranth", **options)
    return [data.Layout.cast(layout_out).from_bits(word) for word in trace.transfers["o"]["data"]], trace
