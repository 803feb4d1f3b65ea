"""The documentation: builds without a warning, and says what the code says."""

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from kvant import cli, reference

ROOT = Path(__file__).parent.parent


def test_configuration_page_is_up_to_date():
    page = (ROOT / "docs" / "configuration.md").read_text(encoding="utf-8")
    assert page == reference.configuration_page(), "run `make reference`"


def test_documentation_builds_without_warnings(tmp_path):
    pytest.importorskip("sphinx")
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", "docs", str(tmp_path)]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_links_of_the_readme_to_files_lead_somewhere():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", readme):
        if "://" not in target:
            assert (ROOT / target).exists(), target


@pytest.mark.parametrize("page", ["README.md", "docs/quickstart.md", "docs/configuration.md"])
def test_command_lines_name_commands_and_options_that_exist(page):
    text = (ROOT / page).read_text(encoding="utf-8")
    lines = re.findall(r"^\$ (?:\. \S+ && )?kvant (.+?)(?:\s+#.*)?$", text, re.MULTILINE)
    assert lines
    for line in lines:
        command = typer.main.get_command(cli.build_app())
        words = shlex.split(line)
        while words and hasattr(command, "commands"):
            assert words[0] in command.commands, f"{page}: kvant {line}"
            command = command.commands[words.pop(0)]
        options = {option for parameter in command.params for option in parameter.opts}
        given = {word for word in words if word.startswith("-")}
        assert given <= options, f"{page}: kvant {line}"


def test_every_package_with_code_is_declared():
    """An editable install finds what a wheel would leave out."""
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    folders = {folder: name for name, folder in project["package-dir"].items()}
    for folder, name in folders.items():
        for file in (ROOT / folder).rglob("*.py"):
            package = ".".join([name, *file.parent.relative_to(ROOT / folder).parts])
            assert package in project["packages"], f"{file.relative_to(ROOT)}: {package} is not in packages"
