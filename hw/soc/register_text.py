"""The description of registers and descriptors as texts: C header, Python module, Markdown."""

import ast
import inspect
import itertools
import textwrap
from collections.abc import Iterable
from pathlib import Path

from kvant.hw.soc.descriptors import (
    ATTEND,
    CACHE,
    COMMON_FIELDS,
    DESCRIPTOR_BYTES,
    LINEAR,
    DescriptorField,
    DescriptorKind,
    ErrorCode,
    Flag,
    Opcode,
)
from kvant.hw.soc.registers import Register, RegisterMap

_STRUCTS = {"": LINEAR, "cache_": CACHE, "attend_": ATTEND}
"""C structs, as the start of their names; FENCE and END are written with that of LINEAR."""

_ENUMS = {"OPCODE": Opcode, "FLAG": Flag, "CODE": ErrorCode}


def enum_docs(kind: type) -> dict[str, str]:
    """Of each member of an enumeration the line that documents it, from the class' source."""
    body = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0].body
    docs = {}
    for node, following in itertools.pairwise(body):
        if isinstance(node, ast.Assign) and isinstance(following, ast.Expr):
            docs[node.targets[0].id] = inspect.cleandoc(following.value.value).replace("\n", " ")
    return docs


def _constants(registers: RegisterMap) -> list[tuple[str, int, str]]:
    """Name, value and comment of every number that software needs."""
    constants = []
    for register in registers:
        constants.append((register.name, register.offset, register.doc))
        for field in register.fields:
            name = f"{register.name}_{field.name.upper()}"
            constants.append((f"{name}_MASK", field.mask, f"{field.access.value}: {field.doc}"))
            constants.append((f"{name}_SHIFT", field.lsb, ""))
    for prefix, kind in _ENUMS.items():
        docs = enum_docs(kind)
        constants += [(f"{prefix}_{member.name}", int(member), docs[member.name]) for member in kind]
    constants.append(("DESCRIPTOR_BYTES", DESCRIPTOR_BYTES, "bytes of a descriptor"))
    return constants


def c_header(registers: RegisterMap) -> str:
    """C header: ``KVANT_...`` macros, and structs of the descriptors as the host sees them."""
    prefix = registers.name.upper()
    lines = [
        f"/* {registers.name}: registers and descriptors. Written by kvant from its description of the registers. */",
        f"#ifndef {prefix}_REGISTERS_H",
        f"#define {prefix}_REGISTERS_H",
        "",
        "#include <stdint.h>",
        "",
    ]
    for name, value, comment in _constants(registers):
        number = f"0x{value:08X}u" if name.endswith("_MASK") else f"{value}u" if value < 10 else f"0x{value:02X}u"
        lines.append(f"#define {prefix}_{name} {number}" + (f" /* {comment} */" if comment else ""))
    for start, kind in _STRUCTS.items():
        lines += _c_struct(registers.name, start, kind)
    lines += ["", f"#endif /* {prefix}_REGISTERS_H */", ""]
    return "\n".join(lines)


def _c_struct(name: str, start: str, kind: DescriptorKind) -> list[str]:
    """A descriptor's struct, and the function that makes its bytes."""
    lines = ["", f"struct {name}_{start}descriptor {{"]
    lines += [f"    uint{field.width}_t {field.name}; /* {field.doc} */" for field in kind.all_fields]
    lines += [
        "};",
        "",
        "/* The descriptor's bytes in memory, little endian. */",
        f"static inline void {name}_{start}encode(const struct {name}_{start}descriptor *from, "
        f"uint8_t to[{name.upper()}_DESCRIPTOR_BYTES])",
        "{",
        f"    for (unsigned i = 0; i < {name.upper()}_DESCRIPTOR_BYTES; i++)",
        "        to[i] = 0;",
    ]
    for field in kind.all_fields:
        lines.append(f"    for (unsigned i = 0; i < {field.width // 8}; i++)")
        lines.append(f"        to[{field.offset} + i] = (uint8_t)((uint64_t)from->{field.name} >> (8 * i));")
    return [*lines, "}"]


def c_driver(header: str) -> str:
    """C driver, header only, that includes the registers' header called *header*."""
    text = (Path(__file__).parent / "driver.h").read_text(encoding="utf-8")
    return text.replace("kvant_registers.h", header)


def python_module(registers: RegisterMap) -> str:
    """Python module of the same numbers, which needs nothing."""
    lines = [
        f'"""{registers.name}: registers and descriptors. Written by kvant from its description of the registers."""',
        "",
    ]
    lines += [f"{name} = {value:#x}" + (f"  # {doc}" if doc else "") for name, value, doc in _constants(registers)]
    return "\n".join([*lines, ""])


def _bits(lsb: int, width: int) -> str:
    return str(lsb) if width == 1 else f"{lsb + width - 1}:{lsb}"


def _register_section(register: Register) -> list[str]:
    lines = [f"### {register.name}", "", f"Offset 0x{register.offset:03X}. {register.doc}", ""]
    lines += ["| bits | field | access | reset | |", "|---|---|---|---|---|"]
    for field in register.fields:
        reset = f"{field.reset:#x}" if field.reset > 9 else str(field.reset)
        lines.append(
            f"| {_bits(field.lsb, field.width)} | `{field.name}` | {field.access.value} | {reset} | {field.doc} |"
        )
    return [*lines, ""]


def _field_table(fields: Iterable[DescriptorField]) -> list[str]:
    lines = ["| byte | field | bits | |", "|---|---|---|---|"]
    return lines + [f"| {field.offset} | `{field.name}` | {field.width} | {field.doc} |" for field in fields]


def markdown(registers: RegisterMap) -> str:
    """Page of all registers, descriptor fields, opcodes, flags and error codes."""
    lines = [
        "# Registers",
        "",
        "<!-- Written from the description of the registers (kvant.hw.soc.registers); a test holds it up to date. -->",
        "",
        f"32-bit registers in {1 << registers.address_bits} bytes of AXI4-Lite. Addresses without a register are "
        "answered with SLVERR and change nothing. Byte strobes hold. Bits that are not listed read as 0 and ignore "
        "writes. Constants are those of the default configuration here; a generated design comes with its own page.",
        "",
        "| offset | register | |",
        "|---|---|---|",
    ]
    lines += [f"| 0x{register.offset:03X} | {register.name} | {register.doc} |" for register in registers]
    lines += ["", "## Fields", ""]
    for register in registers:
        lines += _register_section(register)
    lines += [
        "## Descriptors",
        "",
        f"{DESCRIPTOR_BYTES} bytes, little endian; bytes that are not listed are 0. All have the first two fields; "
        "FENCE and END use these alone.",
        "",
        *_field_table(COMMON_FIELDS),
    ]
    for kind in _STRUCTS.values():
        flags = ", ".join(flag.name for flag in kind.flags)
        lines += ["", f"### {kind.opcode.name}", "", f"Flags: {flags}.", "", *_field_table(kind.fields)]
    headings = {"Opcodes": Opcode, "Flags": Flag, "Error codes": ErrorCode}
    for heading, kind in headings.items():
        docs = enum_docs(kind)
        lines += ["", f"## {heading}", "", "| value | name | |", "|---|---|---|"]
        lines += [f"| {int(member)} | {member.name} | {docs[member.name]} |" for member in kind]
    return "\n".join([*lines, ""])
