"""The system of the integration guide: generated, built and run as the page says."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner
from verilog_checks import lint, run, yosys

from kvant.cli import build_app

DOCS = Path(__file__).parent.parent / "docs"
FIELDS = ("rows=4", "cols=4")
SOURCES = ("matvec.sv", "kvant_top.sv")


@pytest.fixture(scope="module")
def system(tmp_path_factory):
    """Everything in one folder."""
    folder = tmp_path_factory.mktemp("system")
    options = [word for field in FIELDS for word in ("--set", field)]
    result = CliRunner().invoke(build_app(), ["generate", "top", *options, "-o", str(folder / "design")])
    assert result.exit_code == 0, result.output
    image = run([sys.executable, DOCS / "integration" / "image.py", ".", *FIELDS], folder)
    assert image.returncode == 0, image.stderr
    for file in (*(DOCS / "integration").glob("*.sv"), folder / "design" / "kvant_top.sv"):
        shutil.copy(file, folder)
    return folder


def play(folder):
    command = ["iverilog", "-g2012", "-s", "bench", "-o", "matvec", "bench.sv", *SOURCES]
    subprocess.run(command, cwd=folder, check=True)
    return run(["vvp", "-n", "matvec"], folder).stdout


def test_the_system_leaves_the_memory_of_the_golden_model(system):
    assert re.search(r"PASS: \d+ cycles, every byte", play(system))


def test_a_wrong_byte_shows(system, tmp_path):
    for file in system.glob("*.*"):
        if file.is_file():
            shutil.copy(file, tmp_path)
    after = (tmp_path / "after.hex").read_text().splitlines()
    place = 0x2000 // 16
    after[place] = f"{int(after[place], 16) ^ 1:032x}"
    (tmp_path / "after.hex").write_text("\n".join(after) + "\n")
    assert "FAIL: 1 words differ" in play(tmp_path)


def test_the_system_passes_the_checks(system):
    assert lint(system, *SOURCES, top="matvec") == ""
    script = f"read_verilog -sv {' '.join(SOURCES)}; hierarchy -check -top matvec; proc; check -assert"
    result = yosys(system, script)
    assert result.returncode == 0, result.stdout + result.stderr
