"""Headers with one thing changed: a file opens here if, and only if, the safetensors library opens it."""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError, safe_open

import zero_offload as zo
from zero_offload.checkpoint.hf_files import SINGLE_NAME, open_weights

NBYTES = 48
WHOLE: dict[str, Any] = {
    "__metadata__": {"format": "pt"},
    "a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]},
    "b": {"dtype": "BF16", "shape": [8], "data_offsets": [16, 32]},
    "none": {"dtype": "F32", "shape": [0, 7], "data_offsets": [32, 32]},
    "c": {"dtype": "U8", "shape": [], "data_offsets": [32, 33]},
    "d": {"dtype": "I8", "shape": [3, 5, 1], "data_offsets": [33, 48]},
}
VALUES: list[Any] = [
    *(None, True, False, -1, 0, 1, 2, 8, 15, 16, 17, 32, 47, 48, 49, 2**31, 2**53, 2**63, 2**64, 16.0, 1e300),
    *("", "0", "16", "F32", "f32", "F64", "F4", "F8_E8M0", "F8_E4M3FNUZ", "C64", "BOOL", "Q", "U16", "F16"),
    *([], [0], [0, 16], [16, 0], [16, 32], [0, 16, 32], [2, 2], [4], [1, 4, 1], [2**32, 2**32], [[]], [None]),
    *({}, {"format": 1}, {"x": "y"}, {"F32": None}, ["F32", [2, 2], [0, 16]], ["F32", [0], [0, 0]]),
]


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield from places(inner, (*path, key))


def changed(path: tuple[Any, ...], change: Any) -> dict[str, Any]:
    """The header in which `change(owner, key)` was called at a place."""
    header = copy.deepcopy(WHOLE)
    owner: Any = header
    for key in path[:-1]:
        owner = owner[key]
    change(owner, path[-1])
    return header


def put(owner: Any, key: Any, value: Any) -> None:
    owner[key] = value


def headers() -> Iterator[tuple[str, str]]:
    """The change, and the header's text."""
    for path in list(places(WHOLE))[1:]:
        where = "/".join(map(str, path))
        for value in VALUES:
            yield f"{where} = {value}", json.dumps(changed(path, functools.partial(put, value=value)))
        yield f"{where} left out", json.dumps(changed(path, lambda owner, key: owner.pop(key)))
    for name in ("a", "none", "d"):
        for field in ("note", "shapes", ""):
            yield f"{name} with {field!r}", json.dumps(changed((name, field), functools.partial(put, value=[1])))
    for value in VALUES:
        yield f"all is {value}", json.dumps(value)
        yield f"one more: {value}", json.dumps(WHOLE | {"e": value})
    for order in (sorted(WHOLE), sorted(WHOLE, reverse=True)):
        yield f"order {order}", json.dumps({name: WHOLE[name] for name in order})
    text = json.dumps(WHOLE)
    for name, raw in {
        "spaces before": "  " + text,
        "spaces behind": text + "  " * 7,
        "zeros behind": text + "\0\0",
        "a mark of byte order": "\ufeff" + text,
        "two documents": text + text,
        "a comma too many": text.replace("}}", "},}"),
        "no number": text.replace("48]", "NaN]"),
        "infinity": text.replace("48]", "Infinity]"),
        "leading zero": text.replace("48]", "048]"),
        "plus": text.replace("48]", "+48]"),
        "exponent": text.replace("48]", "48e0]"),
        "escaped name": text.replace('"a"', '"\\u0061"'),
        "half of a surrogate": text.replace('"a"', '"\\ud800"'),
        "nested": text.replace('"shape": [0, 7]', '"shape": ' + "[" * 60 + "]" * 60),
        "nested unknown": text.replace('"shape": [0, 7]', '"x": ' + "[" * 2000 + "]" * 2000 + ', "shape": [0, 7]'),
        "single quotes": text.replace('"', "'"),
    }.items():
        yield name, raw


def library(path: Path) -> dict[str, torch.Tensor] | str:
    """The tensors that it reads, or why it reads none."""
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
    except SafetensorError as error:
        return str(error)


def ours(path: Path) -> dict[str, tuple[str, tuple[int, ...]]] | str:
    try:
        with open_weights(path.parent) as tensors:
            return {name: (each.dtype_name, each.shape) for name, each in tensors.items()}
    except zo.IntegrityError as error:
        return str(error)


def verdicts(raw: bytes, path: Path) -> tuple[Any, Any]:
    path.write_bytes(raw)
    theirs = library(path)
    return ours(path), theirs if isinstance(theirs, str) else {
        name: (each.get_dtype(), tuple(each.get_shape())) for name, each in theirs.items()
    }


def test_a_header_with_one_value_changed(tmp_path: Path) -> None:
    differ, accepted, refused = [], 0, 0
    for what, text in headers():
        header = text.encode("utf-8", "surrogatepass")
        mine, theirs = verdicts(len(header).to_bytes(8, "little") + header + bytes(NBYTES), tmp_path / SINGLE_NAME)
        if isinstance(mine, str) != isinstance(theirs, str) or (isinstance(mine, dict) and mine != theirs):
            differ.append((what, mine, theirs))
        accepted, refused = accepted + isinstance(mine, dict), refused + isinstance(mine, str)
    assert differ == []
    assert accepted > 90 and refused > 1000


@pytest.mark.parametrize("data", [0, NBYTES - 1, NBYTES + 1, 2 * NBYTES])
def test_bytes_that_are_missing_or_that_no_tensor_covers(data: int, tmp_path: Path) -> None:
    header = json.dumps(WHOLE).encode()
    mine, theirs = verdicts(len(header).to_bytes(8, "little") + header + bytes(data), tmp_path / SINGLE_NAME)
    assert isinstance(mine, str) and isinstance(theirs, str)
    assert ("cut short" in mine) == (data < NBYTES)


@pytest.mark.parametrize("length", [0, 1, 2, 10**8, 10**8 + 1, 2**40, 2**63, 2**64 - 1])
def test_lengths_of_a_header(length: int, tmp_path: Path) -> None:
    header = json.dumps(WHOLE).encode()
    mine, theirs = verdicts(length.to_bytes(8, "little") + header + bytes(NBYTES), tmp_path / SINGLE_NAME)
    assert isinstance(mine, str) and isinstance(theirs, str)


@pytest.mark.parametrize(
    "text",
    [
        '{"a":{"dtype":"U8","shape":[48],"data_offsets":[0,48]},"a":{"dtype":"U8","shape":[48],"data_offsets":[0,48]}}',
        '{"__metadata__":{"x":"1","x":"2"},"a":{"dtype":"U8","shape":[48],"data_offsets":[0,48]}}',
        '{"a":{"dtype":"U8","shape":[48],"data_offsets":[0,48],"x":1,"x":2}}',
    ],
)
def test_a_name_twice_is_refused_though_the_library_takes_the_later_one(text: str, tmp_path: Path) -> None:
    header = text.encode()
    mine, theirs = verdicts(len(header).to_bytes(8, "little") + header + bytes(NBYTES), tmp_path / SINGLE_NAME)
    assert isinstance(mine, str) and "twice" in mine and isinstance(theirs, dict)


def test_nothing_is_mapped(tmp_path: Path) -> None:
    header = json.dumps(WHOLE).encode()
    path = tmp_path / SINGLE_NAME
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(NBYTES))
    with open_weights(path):
        assert str(path) not in Path("/proc/self/maps").read_text()
