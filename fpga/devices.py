"""FPGA devices that the flow knows, by the names of ``--device``, and what place and route calls them."""

import difflib
from dataclasses import dataclass, replace

from kvant.fpga.errors import TargetError

FAMILIES = ("ecp5", "ice40")


@dataclass(frozen=True)
class Device:
    """One FPGA in one package.

    Attributes
    ----------
    name : str
        Name in reports.
    part : str
        Manufacturer's name, as amaranth-boards spells it.
    family : str
        ``ecp5`` or ``ice40``.
    option : str
        Option of nextpnr that selects it.
    package : str
        Package, as nextpnr spells it.
    speed : str or None
        Speed grade where nextpnr takes one.
    default_mhz : float
        Clock a bare device is constrained to when none is asked for.
    """

    name: str
    part: str
    family: str
    option: str
    package: str
    speed: str | None
    default_mhz: float

    def with_speed(self, speed: str) -> "Device":
        """The same device in another speed grade.

        Raises
        ------
        TargetError
            If nextpnr knows no such grade for this family.
        """
        if self.family != "ecp5":
            raise TargetError(f"speed = {speed}: {self.name} has one speed grade only; legal for ecp5-*: 6, 7, 8")
        if speed not in {"6", "7", "8"}:
            raise TargetError(f"speed = {speed}: legal is 6, 7 or 8")
        return replace(self, speed=speed)


def _ecp5(size: str, package: str = "CABGA381") -> Device:
    part = f"LFE5U-{size.removesuffix('k')}F"
    return Device(f"ecp5-{size}", part, "ecp5", f"--{size}", package, "6", 100.0)


def _ice40(kind: str, package: str, mhz: float) -> Device:
    return Device(f"ice40-{kind}", f"iCE40{kind.upper()}", "ice40", f"--{kind}", package, None, mhz)


DEVICES: dict[str, Device] = {
    device.name: device
    for device in (
        _ecp5("12k"),
        _ecp5("25k"),
        _ecp5("45k"),
        _ecp5("85k"),
        _ice40("up5k", "sg48", 12.0),
        _ice40("hx1k", "tq144", 48.0),
        _ice40("hx8k", "ct256", 48.0),
        _ice40("lp8k", "cm81", 24.0),
    )
}
"""Bare devices of ``--device``: usual packages, slowest speed grade."""


def find_device(name: str) -> Device:
    """The device of that name (any case).

    Raises
    ------
    TargetError
        If there is none; the text lists all.
    """
    key = name.strip().lower()
    if key not in DEVICES:
        near = difflib.get_close_matches(key, DEVICES, 1)
        hint = f" (did you mean {near[0]}?)" if near else ""
        raise TargetError(f"device = {name!r}: unknown{hint}; legal: {', '.join(DEVICES)}")
    return DEVICES[key]


_NEXTPNR_ECP5 = {
    "LFE5U-12F": "--12k",
    "LFE5U-25F": "--25k",
    "LFE5U-45F": "--45k",
    "LFE5U-85F": "--85k",
    "LFE5UM-25F": "--um-25k",
    "LFE5UM-45F": "--um-45k",
    "LFE5UM-85F": "--um-85k",
    "LFE5UM5G-25F": "--um5g-25k",
    "LFE5UM5G-45F": "--um5g-45k",
    "LFE5UM5G-85F": "--um5g-85k",
}
_NEXTPNR_ICE40 = {
    "iCE40LP1K": ("--lp1k", ""),
    "iCE40LP4K": ("--lp8k", ":4k"),
    "iCE40LP8K": ("--lp8k", ""),
    "iCE40HX1K": ("--hx1k", ""),
    "iCE40HX4K": ("--hx8k", ":4k"),
    "iCE40HX8K": ("--hx8k", ""),
    "iCE40UP5K": ("--up5k", ""),
}
"""Option and package suffix; the 4k parts are 8k dies in a package that says how much of it may be used."""
_PACKAGES_ECP5 = {
    "BG256": "CABGA256",
    "MG285": "CSFBGA285",
    "BG381": "CABGA381",
    "BG554": "CABGA554",
    "BG756": "CABGA756",
}


def device_of_platform(platform, default_mhz: float) -> Device:
    """The device on a board of amaranth-boards.

    Raises
    ------
    TargetError
        If it is of a family that the flow does not build.
    """
    part = platform.device
    if part in _NEXTPNR_ECP5:
        option, package = _NEXTPNR_ECP5[part], _PACKAGES_ECP5[platform.package]
        name = f"{part}-{platform.speed}{platform.package}"
        return Device(name, part, "ecp5", option, package, platform.speed, default_mhz)
    if part in _NEXTPNR_ICE40:
        option, suffix = _NEXTPNR_ICE40[part]
        package = platform.package.lower() + suffix
        return Device(f"{part}-{platform.package}", part, "ice40", option, package, None, default_mhz)
    raise TargetError(f"device = {part!r}: not supported; legal are ECP5 and iCE40 devices")
