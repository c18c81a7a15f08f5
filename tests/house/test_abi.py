"""The header is the contract: zero_offload/hardware/abi.py declares exactly what it says."""

from __future__ import annotations

import ctypes
import re
from enum import IntEnum
from pathlib import Path

import pytest

from zero_offload.base.types import StateFormat
from zero_offload.hardware import abi, native
from zero_offload.storage.files.engine import BLOCK_DTYPE

ROOT = Path(__file__).resolve().parents[2]
HEADER = re.sub(r"/\*.*?\*/", "", (ROOT / "csrc/include/zero_offload.h").read_text(), flags=re.DOTALL)

C_TYPES = {
    "uint32_t": ctypes.c_uint32,
    "int32_t": ctypes.c_int32,
    "uint64_t": ctypes.c_uint64,
    "int64_t": ctypes.c_int64,
    "double": ctypes.c_double,
    "float": ctypes.c_float,
    "int": ctypes.c_int,
}
ENUMS: dict[str, type[IntEnum]] = {
    "zo_isa_kind": abi.Isa,
    "zo_kind": abi.ElementType,
    "zo_rule": abi.Rule,
    "zo_state_format": StateFormat,
    "zo_grad_mode": abi.GradMode,
    "zo_io_kind": abi.IoKind,
    "zo_io_op": abi.IoOp,
    "zo_io_status": abi.IoStatus,
    "zo_io_fault_kind": abi.Fault,
}


def header_structs() -> dict[str, list[tuple[str, str]]]:
    """Name -> (C type, field) in order."""
    found = {}
    for body, name in re.findall(r"typedef struct \{(.*?)\} (\w+);", HEADER, flags=re.DOTALL):
        fields = [re.fullmatch(r"(.*?)(\w+)(\[\d+\])?", part.strip()) for part in body.split(";") if part.strip()]
        found[name] = [(match[1].strip() + (match[3] or ""), match[2]) for match in fields if match]
    return found


def header_functions() -> dict[str, tuple[str, list[str]]]:
    """Name -> (C result type, C argument types)."""
    found = {}
    for result, name, arguments in re.findall(r"ZO_API ([^;(]*?)(\w+)\(([^)]*)\);", HEADER, flags=re.DOTALL):
        parts = [" ".join(part.split()) for part in arguments.split(",")]
        types = [] if parts == ["void"] else [re.sub(r"\w+$", "", part).strip() for part in parts]
        found[name] = (result.strip(), types)
    return found


def matches(c_type: str, declared: object) -> bool:
    """Whether a ctypes declaration stands for this C type."""
    if array := re.fullmatch(r"(.*)\[(\d+)\]", c_type):
        each = getattr(declared, "_type_", None)
        return getattr(declared, "_length_", None) == int(array[2]) and matches(array[1], each)
    base = c_type.removeprefix("const ").removesuffix("*").strip()
    if not c_type.endswith("*"):
        return declared is C_TYPES[base]
    if c_type == "const char *":
        return declared is ctypes.c_char_p
    if declared is ctypes.c_void_p:  # an address: of a buffer, of rows, of the engine
        return True
    pointee = abi.STRUCTS.get(base, C_TYPES.get(base, ctypes.c_void_p))
    return declared is ctypes.POINTER(pointee)


def test_the_parser_sees_the_whole_header() -> None:
    assert len(header_structs()) == HEADER.count("typedef struct {") == 8
    assert len(header_functions()) == HEADER.count("ZO_API") - 1 == 30


@pytest.mark.parametrize("name", sorted(header_structs()))
def test_struct(name: str) -> None:
    declared = list(abi.STRUCTS[name]._fields_)
    expected = header_structs()[name]
    assert [field[0] for field in declared] == [field for _, field in expected]
    for (c_type, field), (_, ctype) in zip(expected, declared, strict=True):
        assert matches(c_type, ctype), f"{name}.{field} is {c_type} in the header, {ctype} in native.py"


def test_no_struct_or_function_is_missing() -> None:
    assert set(abi.STRUCTS) == set(header_structs())
    assert set(abi.SIGNATURES) == set(header_functions())


@pytest.mark.parametrize("name", sorted(header_functions()))
def test_function(name: str) -> None:
    result, arguments = header_functions()[name]
    declared_result, declared = abi.SIGNATURES[name]
    assert matches(result, declared_result)
    assert len(arguments) == len(declared)
    for c_type, ctype in zip(arguments, declared, strict=True):
        assert matches(c_type, ctype), f"{name}: {c_type} in the header, {ctype} in native.py"


@pytest.mark.parametrize("name", sorted(ENUMS))
def test_enum(name: str) -> None:
    body = re.search(rf"enum {name} \{{(.*?)\}}", HEADER, flags=re.DOTALL)
    assert body is not None
    values = {key: int(value) for key, value in re.findall(r"(\w+) = (-?\d+)", body[1])}
    assert sorted(values.values()) == [member.value for member in ENUMS[name]]
    for member in ENUMS[name]:
        spelled = next(key for key, value in values.items() if value == member.value)
        assert spelled.endswith(member.name)


def test_every_status_has_an_exception() -> None:
    body = re.search(r"enum zo_status \{(.*?)\}", HEADER, flags=re.DOTALL)
    assert body is not None
    values = {key: int(value) for key, value in re.findall(r"(\w+) = (-?\d+)", body[1])}
    assert set(native._ERRORS) == set(values.values()) - {values["ZO_OK"], values["ZO_INTERNAL"]}


def test_version_and_sizes() -> None:
    version = re.search(r"#define ZO_ABI_VERSION (\d+)", HEADER)
    assert version is not None
    assert int(version[1]) == abi.VERSION
    fields = [name for name, _ in abi.AbiInfo._fields_ if name.startswith("sizeof_")]
    assert fields == list(abi.SIZED_STRUCTS)
    native.lib()  # compares the sizes with those the compiler chose


def test_block_table_rows_are_zo_io_block() -> None:
    struct = abi.IoBlockStruct
    assert BLOCK_DTYPE.itemsize == ctypes.sizeof(struct)
    assert BLOCK_DTYPE.names == tuple(name for name, _ in struct._fields_)
    for name in BLOCK_DTYPE.names:
        assert BLOCK_DTYPE.fields is not None
        assert BLOCK_DTYPE.fields[name][1] == getattr(struct, name).offset
