"""The documentation: builds without a warning, and says what the code says."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvant import reference

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


def test_every_package_with_code_is_declared():
    """An editable install finds what a wheel would leave out."""
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]
    folders = {folder: name for name, folder in project["package-dir"].items()}
    for folder, name in folders.items():
        for file in (ROOT / folder).rglob("*.py"):
            package = ".".join([name, *file.parent.relative_to(ROOT / folder).parts])
            assert package in project["packages"], f"{file.relative_to(ROOT)}: {package} is not in packages"
