"""Fixtures that the tests of all folders share."""

import subprocess
import sys

import pytest


@pytest.fixture
def kvant():
    """Run the program ``kvant`` as a user does: ``kvant("generate", "linear", ...)``.

    Returns
    -------
    callable
        Returns the `subprocess.CompletedProcess`, with text in ``stdout`` and ``stderr``.
    """

    def run(*arguments, timeout=600, **options):
        command = [sys.executable, "-m", "kvant", *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False, **options)

    return run


@pytest.fixture
def assert_one_line_error():
    """Check that a finished ``kvant`` refused bad input: exit code 2, one line, all *words* in it."""

    def check(result, *words, code=2):
        lines = result.stderr.splitlines()
        assert result.returncode == code, result.stderr
        assert len(lines) == 1 and lines[0].startswith("kvant: error: "), result.stderr
        for word in words:
            assert str(word) in lines[0], lines[0]

    return check
