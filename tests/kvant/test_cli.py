"""The command line: help, exit codes, and errors of one line without a traceback."""

import signal
import subprocess
import sys

import pytest
import typer

from kvant import cli
from kvant.errors import ComparisonError, InputError
from kvant.golden.errors import TensorError
from kvant.golden.models.errors import ModelError
from kvant.hw.emit import EmitError
from kvant.hw.parameters import ParameterError


@pytest.fixture
def run_raising(monkeypatch, capsys):
    """Run `main` of a program whose only command raises *error*; returns (exit code, stdout, stderr)."""

    def run(error):
        app = typer.Typer(add_completion=False)

        @app.command()
        def command():
            raise error

        monkeypatch.setattr(cli, "build_app", lambda: app)
        monkeypatch.setattr(sys, "argv", ["kvant"])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        return caught.value.code, *capsys.readouterr()

    return run


def test_help_lists_the_commands(kvant):
    result = kvant("--help")
    assert result.returncode == 0 and result.stderr == ""
    assert "doctor" in result.stdout and "demo" in result.stdout


def test_no_arguments_show_the_help(kvant):
    assert kvant().stdout == kvant("--help").stdout


def test_version_is_printed(kvant):
    assert kvant("--version").stdout.startswith("kvant ")


def test_help_imports_nothing_heavy():
    heavy = ["torch", "numpy", "amaranth", "cocotb", "matplotlib", "transformers"]
    program = f"import sys, kvant.cli; kvant.cli.build_app(); print([m for m in {heavy} if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


@pytest.mark.parametrize("arguments", [["--nonsense"], ["nonsense"], ["doctor", "nonsense"], ["doctor", "--nonsense"]])
def test_usage_error_is_one_line_and_exit_code_2(kvant, assert_one_line_error, arguments):
    assert_one_line_error(kvant(*arguments), "nonsense")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InputError("rows = 0: legal is 1 to 64"), 2),
        (ParameterError("rows = 0: legal is 1 to 64"), 2),
        (TensorError("w: not finite"), 2),
        (ModelError("m.gguf: not a whole GGUF file"), 2),
        (EmitError("Yosys not found"), 2),
        (FileNotFoundError(2, "No such file or directory", "in.npz"), 2),
        (PermissionError(13, "Permission denied", "out.npz"), 2),
        (ComparisonError("y[0, 1] = 1.0, expected 2.0"), 1),
        (ModuleNotFoundError("No module named 'torch'", name="torch"), 2),
    ],
)
def test_error_is_one_line_with_its_exit_code(run_raising, error, code):
    got, out, err = run_raising(error)
    assert (got, out) == (code, "")
    assert err.startswith("kvant: error: ") and err.count("\n") == 1


def test_message_of_several_lines_is_joined(run_raising):
    assert run_raising(InputError("first\n  second\tthird"))[2] == "kvant: error: first second third\n"


def test_missing_file_is_named(run_raising):
    error = FileNotFoundError(2, "No such file or directory", "in.npz")
    assert run_raising(error)[2] == "kvant: error: in.npz: No such file or directory\n"


def test_absent_extra_is_named(run_raising):
    _, _, err = run_raising(ModuleNotFoundError("No module named 'gguf'", name="gguf"))
    assert "gguf" in err and ".[llm]" in err


def test_defect_is_told_apart_from_bad_input_and_shows_no_traceback(run_raising):
    code, _, err = run_raising(ZeroDivisionError("division by zero"))
    assert code == 70
    assert "internal error" in err and "ZeroDivisionError: division by zero" in err and err.count("\n") == 1


def test_defect_shows_its_traceback_on_request(run_raising, monkeypatch):
    monkeypatch.setenv("KVANT_TRACEBACK", "1")
    with pytest.raises(ZeroDivisionError):
        run_raising(ZeroDivisionError("division by zero"))


def test_interrupt_ends_with_130_and_one_line(run_raising):
    assert run_raising(KeyboardInterrupt()) == (130, "", "kvant: interrupted\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_run_that_is_told_to_end_leaves_neither_files_nor_simulators(number, tmp_path):
    program = """
import subprocess
import sys
import tempfile
import typer
from kvant import cli
app = typer.Typer()
folder = sys.argv.pop()
@app.command()
def command():
    with tempfile.TemporaryDirectory(dir=folder):
        subprocess.run([sys.executable, "-c", "import time; print('ready', flush=True); time.sleep(60)"])
cli.build_app = lambda: app
cli.main()
"""
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", program, tmp_path], stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        process.send_signal(number)
        # Both pipes end only when the program that it runs has ended as well.
        assert process.communicate(timeout=30) == ("", "kvant: interrupted\n")
    assert process.returncode == 130
    assert not list(tmp_path.iterdir())


def test_error_amid_the_making_of_hardware_leaves_one_line():
    program = """
import sys
import typer
from amaranth.hdl import Elaboratable
from kvant import cli
from kvant.errors import InputError
class Half(Elaboratable):
    def elaborate(self, platform):
        raise NotImplementedError
app = typer.Typer()
@app.command()
def command():
    half = Half()
    raise InputError("rows = 0")
cli.build_app = lambda: app
sys.argv = ["kvant"]
cli.main()
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (2, "kvant: error: rows = 0\n")


def test_closed_pipe_is_no_error():
    command = f"{sys.executable} -m kvant --help | true"
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")
