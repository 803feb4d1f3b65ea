"""Tools of the flow as programs: how they end."""

import stat

from kvant.fpga.tools import run_tool


def program(folder, text):
    """A shell script that counts its runs in ``runs``."""
    path = folder / "tool"
    path.write_text(f"#!/bin/sh\necho run >> runs\n{text}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_a_tool_that_fails_is_not_run_again(tmp_path, monkeypatch):
    monkeypatch.setenv("YOSYS", program(tmp_path, "echo ERROR: no; exit 3"))
    outcome = run_tool("yosys", [], tmp_path)
    assert outcome.code == 3 and outcome.log == "ERROR: no\n"
    assert (tmp_path / "runs").read_text() == "run\n"


def test_a_tool_that_dies_of_a_signal_is_run_once_more(tmp_path, monkeypatch):
    monkeypatch.setenv("YOSYS", program(tmp_path, "if [ $(wc -l < runs) -eq 1 ]; then kill -SEGV $$; fi; echo done"))
    outcome = run_tool("yosys", [], tmp_path)
    assert outcome.code == 0 and outcome.log == "done\n"


def test_a_tool_that_dies_twice_says_so(tmp_path, monkeypatch):
    monkeypatch.setenv("YOSYS", program(tmp_path, "kill -SEGV $$"))
    outcome = run_tool("yosys", [], tmp_path)
    assert outcome.code == -11 and outcome.log.endswith("ERROR: stopped by signal 11\n")
    assert (tmp_path / "runs").read_text() == "run\nrun\n"
