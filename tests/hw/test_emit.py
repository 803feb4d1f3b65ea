"""Emission: names, ports, determinism, lint, and several designs together."""

import re
import subprocess

import pytest
from amaranth.hdl import Cat, Module, Signal, signed
from amaranth.lib import data, stream, wiring
from amaranth.lib.wiring import In, Out
from stream_components import Accumulator, Ram, Scale
from verilog_checks import lint, yosys

from kvant.hw.emit import Field, emit
from kvant.hw.parameters import ParameterError


def top_ports(verilog, top):
    """Ports of the top module in the order of its header, as (name, direction, width)."""
    body = re.search(rf"^module {top}\((.*?)\);(.*?)^endmodule", verilog, re.MULTILINE | re.DOTALL)
    directions = {
        name: (direction, int(high or 0) + 1)
        for direction, high, name in re.findall(r"^  (input|output) (?:\[(\d+):0\] )?(\w+);", body[2], re.MULTILINE)
    }
    return [(name, *directions.pop(name)) for name in body[1].split(", ")], directions


def modules(verilog):
    return re.findall(r"^module (\w+)", verilog, re.MULTILINE)


def test_ports_have_flat_conventional_names():
    design = emit(Accumulator(lanes=2), "acc")
    assert [(port.name, port.direction, port.width) for port in design.ports] == [
        ("clk", "input", 1),
        ("rst", "input", 1),
        ("s_axis_x_tvalid", "input", 1),
        ("s_axis_x_tready", "output", 1),
        ("s_axis_x_tdata", "input", 16),
        ("s_axis_x_tuser", "input", 4),
        ("s_axis_x_tlast", "input", 1),
        ("m_axis_y_tvalid", "output", 1),
        ("m_axis_y_tready", "input", 1),
        ("m_axis_y_tdata", "output", 32),
        ("m_axis_y_tuser", "output", 4),
        ("m_axis_y_tlast", "output", 1),
        ("packets", "output", 16),
        ("bias", "input", 8),
    ]
    assert design.status == ("packets",)


@pytest.mark.parametrize("component", [Accumulator, Ram], ids=lambda kind: kind.__name__)
def test_case_40_top_module_has_exactly_the_documented_ports(component):
    design = emit(component(), "dut")
    ports, rest = top_ports(design.verilog, "dut")
    assert ports == [(port.name, port.direction, port.width) for port in design.ports]
    assert not rest


def test_case_40_undriven_signal_does_not_become_a_port():
    class Careless(wiring.Component):
        def __init__(self):
            super().__init__({"a": In(8), "o": Out(8)})

        def elaborate(self, platform):
            m = Module()
            forgotten = Signal(8)
            m.d.sync += self.o.eq(self.a + forgotten)
            return m

    design = emit(Careless(), "careless")
    ports, rest = top_ports(design.verilog, "careless")
    assert [name for name, _, _ in ports] == ["clk", "rst", "a", "o"]
    assert not rest


def test_two_generations_are_byte_identical():
    first, second = (emit(Accumulator(), "acc", parameters={"lanes": 4, "depth": 4}) for _ in range(2))
    assert first.verilog == second.verilog
    assert first.rtlil == second.rtlil


def test_head_states_parameters_and_neither_date_nor_path():
    design = emit(Accumulator(), "acc", parameters={"lanes": 4, "a": [1, None]})
    head = design.verilog.split("\nmodule ", 1)[0]
    assert '// parameters: {"a": [1, null], "lanes": 4}' in head
    assert not re.search(r"20\d\d|/home|/root|/tmp|\.py", head)


def test_identical_modules_are_emitted_once_with_readable_names():
    design = emit(Accumulator(lanes=4), "acc")
    assert sorted(modules(design.verilog)) == ["acc", "acc_core", "acc_queue", "acc_scale"]
    assert len(re.findall(r"^  acc_scale scale_\d ", design.verilog, re.MULTILINE)) == 4


class Lanes(wiring.Component):
    """Lanes of different factors, fed from neighbouring bits, with outputs that not all instances use."""

    def __init__(self, factors):
        self.factors = factors
        super().__init__({"i": In(data.ArrayLayout(signed(8), len(factors))), "o": Out(signed(32)), "zero": Out(1)})

    def elaborate(self, platform):
        m = Module()
        lanes = [Scale(factor) for factor in self.factors]
        for index, lane in enumerate(lanes):
            m.submodules[f"lane_{index}"] = lane
            m.d.comb += lane.i.eq(self.i[index])
        m.d.comb += [self.o.eq(sum(lane.o for lane in lanes)), self.zero.eq(lanes[0].is_zero)]
        return m


def test_modules_that_differ_only_in_used_outputs_are_one(tmp_path):
    design = emit(Lanes([3, 3, 3]), "lanes")
    assert sorted(modules(design.verilog)) == ["lanes", "lanes_core", "lanes_lane"]
    (tmp_path / "lanes.sv").write_text(design.verilog)
    assert lint(tmp_path, "lanes.sv", top="lanes") == ""


def test_modules_of_different_content_keep_different_names():
    design = emit(Lanes([3, 5, 3]), "lanes")
    assert sorted(modules(design.verilog)) == ["lanes", "lanes_core", "lanes_lane", "lanes_lane_1"]
    factors = re.findall(r"^  lanes_lane(\w*) lane_(\d) ", design.verilog, re.MULTILINE)
    assert factors == [("", "0"), ("_1", "1"), ("", "2")]


def test_ports_joined_from_neighbouring_bits_do_not_split_a_kind():
    class Pair(wiring.Component):
        def __init__(self):
            super().__init__({"a": In(4), "b": In(4), "o": Out(4)})

        def elaborate(self, platform):
            m = Module()
            m.d.sync += self.o.eq(self.a ^ self.b)
            return m

    class Pairs(wiring.Component):
        def __init__(self):
            super().__init__({"word": In(12), "o": Out(8)})

        def elaborate(self, platform):
            m = Module()
            m.submodules.pair_0 = near = Pair()
            m.submodules.pair_1 = far = Pair()
            m.d.comb += [near.a.eq(self.word[:4]), near.b.eq(self.word[4:8])]  # one net of 8 bits
            m.d.comb += [far.a.eq(self.word[:4]), far.b.eq(self.word[8:])]
            m.d.comb += [self.o[:4].eq(near.o), self.o[4:].eq(far.o)]
            return m

    design = emit(Pairs(), "pairs")
    assert sorted(modules(design.verilog)) == ["pairs", "pairs_core", "pairs_pair"]
    body = re.search(r"pairs_pair pair_1 \((.*?)\);", design.verilog, re.DOTALL)[1]
    assert ".b(word[11:8])" in body


@pytest.mark.parametrize("lanes", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("depth", [3, 4, 17])
def test_case_34_sweep_is_clean_in_every_tool(lanes, depth, tmp_path):
    design = emit(Accumulator(lanes, depth), "acc")
    (tmp_path / "acc.sv").write_text(design.verilog)
    assert lint(tmp_path, "acc.sv", top="acc") == ""
    result = yosys(tmp_path, "read_verilog -sv acc.sv; hierarchy -check -top acc; proc; check -assert")
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""


def test_case_44_two_configurations_live_in_one_design(tmp_path):
    for name, lanes in (("narrow", 2), ("wide", 5)):
        (tmp_path / f"{name}.sv").write_text(emit(Accumulator(lanes), name).verilog)
    (tmp_path / "both.sv").write_text(
        "module both(input clk, input rst, input [15:0] a, input [39:0] b, output c, output d);\n"
        "  narrow first(.clk, .rst, .s_axis_x_tvalid(1'b1), .s_axis_x_tready(), .s_axis_x_tdata(a),\n"
        "    .s_axis_x_tuser(4'd0), .s_axis_x_tlast(1'b1), .m_axis_y_tvalid(c), .m_axis_y_tready(1'b1),\n"
        "    .m_axis_y_tdata(), .m_axis_y_tuser(), .m_axis_y_tlast(), .packets(), .bias(8'd0));\n"
        "  wide second(.clk, .rst, .s_axis_x_tvalid(1'b1), .s_axis_x_tready(), .s_axis_x_tdata(b),\n"
        "    .s_axis_x_tuser(4'd0), .s_axis_x_tlast(1'b1), .m_axis_y_tvalid(d), .m_axis_y_tready(1'b1),\n"
        "    .m_axis_y_tdata(), .m_axis_y_tuser(), .m_axis_y_tlast(), .packets(), .bias(8'd0));\n"
        "endmodule\n"
    )
    files = ("narrow.sv", "wide.sv", "both.sv")
    complaints = [line for line in lint(tmp_path, *files, top="both").splitlines() if line.startswith("%")]
    assert [line for line in complaints if "both.sv" not in line and "Exiting" not in line] == []
    result = yosys(tmp_path, f"read_verilog -sv {' '.join(files)}; hierarchy -check -top both; proc; check -assert")
    assert result.returncode == 0, result.stderr
    names = [name for file in files for name in modules((tmp_path / file).read_text())]
    assert len(names) == len(set(names))


@pytest.mark.parametrize(("width", "zero"), [(8, "8'h00"), (32, "32'd0"), (33, "33'h000000000")])
def test_initial_memory_is_written_as_a_loop(width, zero):
    verilog = emit(Ram(depth=16, width=width), "ram").verilog
    assert f"for (int i = 0; i <= 15; i = i + 1) storage[i] = {zero};" in verilog


def test_zero_width_signals_leave_no_trace(tmp_path):
    class Empty(wiring.Component):
        def __init__(self):
            super().__init__({"a": In(4), "o": Out(4), "nothing": Out(0)})

        def elaborate(self, platform):
            m = Module()
            none = Signal(range(1))
            m.d.sync += [self.o.eq(self.a), none.eq(none + self.a[:0])]
            m.d.comb += self.nothing.eq(none)
            return m

    design = emit(Empty(), "empty")
    assert [port.name for port in design.ports] == ["clk", "rst", "a", "o"]
    (tmp_path / "empty.sv").write_text(design.verilog)
    assert lint(tmp_path, "empty.sv", top="empty") == ""


def test_layout_of_a_port_is_described():
    design = emit(Ram(depth=16, width=8), "ram")
    assert design.port("s_axis_cmd_tdata").fields == (
        Field("write", 0, 1, False),
        Field("address", 1, 4, False),
        Field("value", 5, 8, False),
    )
    lanes = emit(Accumulator(lanes=2), "acc").port("s_axis_x_tdata").fields
    assert lanes == (Field("[0]", 0, 8, True), Field("[1]", 8, 8, True))


def test_nested_members_and_arrays_get_joined_names():
    class Nested(wiring.Component):
        def __init__(self):
            bus = wiring.Signature({"req": Out(stream.Signature(4)), "level": In(3)})
            super().__init__({"bus": In(bus).array(2), "plain": Out(2).array(2)})

        def elaborate(self, platform):
            m = Module()
            for index, bus in enumerate(self.bus):
                m.d.comb += [bus.level.eq(bus.req.payload), bus.req.ready.eq(1), self.plain[index].eq(bus.req.payload)]
            return m

    design = emit(Nested(), "nested")
    names = [port.name for port in design.ports]
    assert names[:4] == ["s_axis_bus_0_req_tvalid", "s_axis_bus_0_req_tready", "s_axis_bus_0_req_tdata", "bus_0_level"]
    assert names[-2:] == ["plain_0", "plain_1"]
    assert design.streams["bus_1_req"].direction == "input"
    assert design.port("bus_1_level").direction == "output"


def test_constant_valid_and_ready_have_no_port():
    class Free(wiring.Component):
        def __init__(self):
            super().__init__({"x": In(stream.Signature(4, always_ready=True, always_valid=True)), "o": Out(4)})

        def elaborate(self, platform):
            m = Module()
            m.d.sync += self.o.eq(self.x.payload)
            return m

    design = emit(Free(), "free")
    assert [port.name for port in design.ports] == ["clk", "rst", "s_axis_x_tdata", "o"]
    assert (design.streams["x"].valid, design.streams["x"].ready) == (None, None)


@pytest.mark.parametrize("name", ["", "1st", "a-b", "a.b", "ä", "a b", "module", "logic"])
def test_illegal_name_is_refused(name):
    component = Ram()
    component._MustUse__silence = True  # it is refused before it is elaborated
    with pytest.raises(ParameterError, match=r"name = .*: legal is a letter"):
        emit(component, name)


class Reserved(wiring.Component):
    """Signals, ports of a part and an instance that are called like reserved words."""

    class Part(wiring.Component):
        def __init__(self):
            super().__init__({"begin": In(4), "case": Out(4)})

        def elaborate(self, platform):
            m = Module()
            logic = Signal(4)
            m.d.sync += logic.eq(self.begin + 1)
            m.d.comb += self.case.eq(logic ^ 3)
            return m

    def __init__(self, port: str = "o"):
        self.port = port
        super().__init__({"a": In(4), "select": In(1), port: Out(4)})

    def elaborate(self, platform):
        m = Module()
        m.submodules.always = part = self.Part()
        begin = Signal(4)
        m.d.comb += [begin.eq(self.a), part.begin.eq(begin), getattr(self, self.port).eq(part.case)]
        with m.If(self.select):
            m.d.comb += begin.eq(3)
        return m


def test_no_name_is_a_reserved_word(tmp_path):
    design = emit(Reserved(), "reserved")
    assert "\\" not in design.verilog  # no escaped identifier
    (tmp_path / "reserved.sv").write_text(design.verilog)
    assert lint(tmp_path, "reserved.sv", top="reserved") == ""
    ports = [port.name for port in emit(Reserved("output"), "reserved").ports]
    assert ports == ["clk", "rst", "a", "select", "output_"]


class BitByBit(wiring.Component):
    """Neighbouring bits that get one constant under a condition."""

    def __init__(self):
        super().__init__({"a": In(1), "o": Out(8)})

    def elaborate(self, platform):
        m = Module()
        with m.If(self.a):
            m.d.comb += [self.o[bit].eq(1) for bit in range(8)]
        return m


def test_only_initial_words_of_a_memory_become_a_loop(tmp_path):
    design = emit(BitByBit(), "bits")
    assert "for (" not in design.verilog
    (tmp_path / "bits.sv").write_text(design.verilog)
    assert lint(tmp_path, "bits.sv", top="bits") == ""


class FalseLoop(wiring.Component):
    """Two signals that depend on bits of each other, while no bit depends on itself."""

    def __init__(self):
        super().__init__({"select": In(1), "x": In(1), "y": Out(2)})

    def elaborate(self, platform):
        m = Module()
        a, b = Signal(2), Signal(2)
        with m.If(self.select):
            m.d.comb += [a.eq(Cat(self.x, b[0])), b.eq(Cat(self.x, a[0]))]
        m.d.comb += self.y.eq(Cat(a[1], b[1]))
        return m


LOOP_BENCH = """
module bench;
  reg select = 0, x = 0;
  wire [1:0] y;
  loop top(.select(select), .x(x), .y(y));
  initial begin
    #1 select = 1; x = 1;
    #1 $display("y = %b", y);
    $finish(0);
  end
endmodule
"""


def test_icarus_does_not_chase_overridden_defaults_round_a_loop_of_whole_signals(tmp_path):
    design = emit(FalseLoop(), "loop")
    (tmp_path / "loop.sv").write_text(design.verilog + LOOP_BENCH)
    subprocess.run(["iverilog", "-g2012", "-s", "bench", "-o", "loop.vvp", "loop.sv"], cwd=tmp_path, check=True)
    run = subprocess.run(
        ["vvp", "-n", "loop.vvp"], cwd=tmp_path, timeout=30, capture_output=True, text=True, check=True
    )
    assert "y = 11" in run.stdout


def test_a_target_that_is_read_is_assigned_once_in_its_block():
    text = emit(FalseLoop(), "loop").verilog
    blocks = re.findall(r"  always_comb begin\n(.*?)\n  end\n", text, re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        *_, last = block.splitlines()
        target = re.fullmatch(r"    (\w+) = \w+_next;", last)[1]
        assert len(re.findall(rf"\b{target} = ", block)) == 1
