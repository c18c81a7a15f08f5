"""Safetensors files by hand: what the library writes we read in ranges, and nothing damaged is believed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import zero_offload as zo
from zero_offload.checkpoint.hf_files import (
    DTYPES,
    INDEX_NAME,
    SINGLE_NAME,
    JoinedTensor,
    StoredTensor,
    Wanted,
    match,
    open_weights,
    shard_name,
)
from zero_offload.plan.layout import CHUNK_NUMEL


def _values(dtype: torch.dtype) -> torch.Tensor:
    """(3, 5, 2) of any dtype, all elements different where it has so many."""
    return torch.arange(30).reshape(3, 5, 2).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_every_dtype_and_range(dtype: torch.dtype, tmp_path: Path) -> None:
    values = _values(dtype)
    save_file({"other": torch.ones(7), "values": values, "none": torch.empty(0, 3)}, tmp_path / SINGLE_NAME)
    with open_weights(tmp_path) as tensors:
        stored = tensors["values"]
        assert (stored.dtype, stored.shape, stored.numel) == (dtype, (3, 5, 2), 30)
        for begin, end in ((0, 30), (0, 1), (29, 30), (3, 17), (4, 4)):
            raw = stored.read(begin, end).view(torch.uint8)
            assert torch.equal(raw, values.flatten()[begin:end].view(torch.uint8))
        assert tensors["none"].read(0, 0).numel() == 0


def _write_shards(folder: Path) -> dict[str, torch.Tensor]:
    tensors = {f"t{i}": torch.randn(4, 3) for i in range(3)}
    names = [shard_name(i, 2) for i in (1, 2)]
    save_file({name: tensors[name] for name in ("t0", "t2")}, folder / names[0])
    save_file({"t1": tensors["t1"]}, folder / names[1])
    weight_map = {"t0": names[0], "t1": names[1], "t2": names[0]}
    (folder / INDEX_NAME).write_text(json.dumps({"metadata": {"total_size": 144}, "weight_map": weight_map}))
    return tensors


def test_a_folder_with_an_index(tmp_path: Path) -> None:
    expected = _write_shards(tmp_path)
    with open_weights(tmp_path) as tensors:
        assert set(tensors) == set(expected)
        assert all(torch.equal(tensors[name].read(0, 12).view(4, 3), expected[name]) for name in expected)


def test_one_file_by_its_path(tmp_path: Path) -> None:
    _write_shards(tmp_path)
    with open_weights(tmp_path / shard_name(2, 2)) as tensors:
        assert list(tensors) == ["t1"]


def test_a_scalar(tmp_path: Path) -> None:
    save_file({"scalar": torch.tensor(2.5)}, tmp_path / SINGLE_NAME)
    with open_weights(tmp_path) as tensors:
        assert tensors["scalar"].shape == () and tensors["scalar"].read(0, 1).item() == 2.5


def _fails(path: Path, kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words), open_weights(path):
        pass


def test_nothing_there(tmp_path: Path) -> None:
    _fails(tmp_path / "absent", zo.CheckpointError, "does not exist.*Name a folder")
    _fails(tmp_path, zo.CheckpointError, f"holds neither {SINGLE_NAME} nor")
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    _fails(tmp_path, zo.CheckpointError, "but pytorch_model.bin .pickled weights and GGUF are not loaded")
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    _fails(tmp_path / "model.gguf", zo.CheckpointError, "a GGUF file.*give the folder of safetensors that it was made")


def test_a_shard_is_missing(tmp_path: Path) -> None:
    _write_shards(tmp_path)
    (tmp_path / shard_name(2, 2)).unlink()
    _fails(tmp_path, zo.CheckpointError, "lacks 1 of the 2 files.*model-00002-of-00002")


def test_a_shard_without_its_tensor(tmp_path: Path) -> None:
    _write_shards(tmp_path)
    save_file({"t9": torch.ones(1)}, tmp_path / shard_name(2, 2))
    _fails(tmp_path, zo.CheckpointError, "puts 't1' in model-00002.*does not have it")


@pytest.mark.parametrize("file", ["../t.safetensors", "/etc/passwd", "a/b.safetensors", "x" * 256, 3])
def test_an_index_that_leads_elsewhere(file: Any, tmp_path: Path) -> None:
    (tmp_path / INDEX_NAME).write_text(json.dumps({"weight_map": {"t": file}}))
    _fails(tmp_path, zo.IntegrityError, "not the name of a file beside it")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"weight_map": 3}', "[" * 3000 + "]" * 3000])
def test_a_damaged_index(text: str, tmp_path: Path) -> None:
    (tmp_path / INDEX_NAME).write_text(text)
    _fails(tmp_path, zo.IntegrityError, "no readable weight_map")


Header = dict[str, Any]


def _with_header(change: Callable[[Header], Any]) -> bytes:
    header: Header = {"t": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]}}
    text = json.dumps(change(header) or header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(16)


DAMAGE: dict[str, bytes] = {
    "empty": b"",
    "five bytes": b"\0" * 5,
    "header too long": (1 << 40).to_bytes(8, "little") + b"{}",
    "no json": (4).to_bytes(8, "little") + b"oops",
    "no object": _with_header(lambda header: [1]),
    "no entry": _with_header(lambda header: {"t": 3}),
    "no dtype": _with_header(lambda header: header["t"].pop("dtype") and None),
    "one offset": _with_header(lambda header: header["t"].update(data_offsets=[0])),
    "past the end": _with_header(lambda header: header["t"].update(data_offsets=[16, 32])),
    "backwards": _with_header(lambda header: header["t"].update(data_offsets=[16, 0])),
    "before the data": _with_header(lambda header: header["t"].update(data_offsets=[-16, 0])),
    "text as offset": _with_header(lambda header: header["t"].update(data_offsets=["0", "16"])),
    "true as offset": _with_header(lambda header: header["t"].update(data_offsets=[False, 16])),
    "another size": _with_header(lambda header: header["t"].update(shape=[2, 3])),
    "negative shape": _with_header(lambda header: header["t"].update(shape=[-2, -2])),
    "a fraction": _with_header(lambda header: header["t"].update(shape=[2.0, 2])),
    "cut short": _with_header(lambda header: None)[:-1],
}


@pytest.mark.parametrize("raw", DAMAGE.values(), ids=DAMAGE)
def test_damage_is_refused(raw: bytes, tmp_path: Path) -> None:
    (tmp_path / SINGLE_NAME).write_bytes(raw)
    _fails(tmp_path, zo.IntegrityError, "not a safetensors file, or damaged: .*get it again")


def test_the_undamaged_file_is_read(tmp_path: Path) -> None:
    (tmp_path / SINGLE_NAME).write_bytes(_with_header(lambda header: None))
    with open_weights(tmp_path) as tensors:
        assert torch.equal(tensors["t"].read(0, 4), torch.zeros(4))


def test_a_file_that_shrinks_while_it_is_read(tmp_path: Path) -> None:
    raw = _with_header(lambda header: None)
    (tmp_path / SINGLE_NAME).write_bytes(raw)
    with open_weights(tmp_path) as tensors:
        (tmp_path / SINGLE_NAME).write_bytes(raw[:-8])
        with pytest.raises(zo.StorageError, match=f"ends at offset {len(raw) - 8}"):
            tensors["t"].read(0, 4)


def test_a_file_that_is_cut_short_says_so(tmp_path: Path) -> None:
    raw = _with_header(lambda header: None)
    (tmp_path / SINGLE_NAME).write_bytes(raw[:-1])
    _fails(tmp_path, zo.IntegrityError, f"cut short: it should have {len(raw)} bytes and has {len(raw) - 1}")


def test_an_unknown_dtype_is_listed_but_not_read(tmp_path: Path) -> None:
    raw = _with_header(lambda header: header["t"].update(dtype="F4", shape=[2, 16]))
    (tmp_path / SINGLE_NAME).write_bytes(raw)
    with open_weights(tmp_path) as tensors:
        assert tensors["t"].dtype is None and tensors["t"].dtype_name == "F4"


WHERE = Path("in")


def _stored(**shapes: tuple[int, ...]) -> dict[str, StoredTensor]:
    return {name.replace("__", "."): StoredTensor(WHERE, -1, "F32", shape, 0) for name, shape in shapes.items()}


def _want(*names: str, shape: tuple[int, ...] = (2,), dtype: torch.dtype = torch.float32) -> Wanted:
    return Wanted(torch.empty(shape, dtype=dtype), names)


def _refusal(wanted: list[Wanted], stored: dict[str, StoredTensor], prefix: str = "") -> str:
    with pytest.raises(zo.CheckpointError) as caught:
        match(wanted, stored, prefix, WHERE)
    return str(caught.value)


def test_any_name_of_a_tie(tmp_path: Path) -> None:
    stored = _stored(b=(2,), c=(2,))
    assert match([_want("a", "b"), _want("c")], stored, "", WHERE) == [stored["b"], stored["c"]]


def test_everything_is_listed_at_once() -> None:
    wanted = [_want("a"), _want("b"), _want("c", shape=(3, 1)), _want("d", dtype=torch.int64), _want("e", "f")]
    message = _refusal(wanted, _stored(b=(2,), c=(1, 3), d=(2,), x=(2,), y=()))
    assert message.splitlines() == [
        "in does not fit this model; nothing was changed:",
        "  2 missing in the files: a, e",
        "  2 unknown to the model: x, y",
        "  1 of another shape: c [1, 3] (model: [3, 1])",
        "  1 of a dtype that does not convert: d F32 (model: torch.int64)",
        "Build the model that the files belong to, or name its files",
    ]


def test_ten_names_and_a_count() -> None:
    message = _refusal([_want(f"p{i}") for i in range(12)], _stored())
    assert "12 missing in the files: p0, p1, p2, p3, p4, p5, p6, p7, p8, p9, ..." in message


@pytest.mark.parametrize("name", ["F64", "F32", "BF16", "F16"])
def test_floats_convert(name: str) -> None:
    stored = {"a": StoredTensor(WHERE, -1, name, (2,), 0)}
    assert match([_want("a", dtype=torch.bfloat16)], stored, "", WHERE) == [stored["a"]]


@pytest.mark.parametrize("name", ["F8_E4M3", "I64", "BOOL", "F4"])
def test_the_rest_does_not(name: str) -> None:
    assert f"a {name} (model: torch.float32)" in _refusal([_want("a")], {"a": StoredTensor(WHERE, -1, name, (2,), 0)})


def test_a_buffer_that_no_state_dict_has() -> None:
    wanted = [Wanted(torch.empty(2), ("a",), optional=True)]
    assert match(wanted, _stored(), "", WHERE) == [None]
    assert match(wanted, _stored(a=(2,)), "", WHERE) != [None]
    assert "another shape" in _refusal(wanted, _stored(a=(3,)))


def test_a_prefix() -> None:
    stored = _stored(a__w=(2,), b=(2,))
    wanted = [_want("model.a.w"), _want("model.b", "head")]
    assert match(wanted, stored, "model.", WHERE) == list(stored.values())
    assert 'pass prefix="model."' in _refusal(wanted, stored)
    assert "prefix" not in _refusal(wanted, stored, "other.")
    assert "prefix" not in _refusal(wanted, stored | _stored(c=(2,)))


@pytest.mark.parametrize("changed", [None, 0, CHUNK_NUMEL + 3])
def test_a_tie_that_is_stored_twice(changed: int | None, tmp_path: Path) -> None:
    one = torch.randn(CHUNK_NUMEL + 4)
    other = one.clone()
    if changed is not None:
        other[changed] += 1
    save_file({"a": one, "b": other}, tmp_path / "f.safetensors")
    wanted = [_want("a", "b", shape=(CHUNK_NUMEL + 4,))]
    with open_weights(tmp_path / "f.safetensors") as stored:
        if changed is None:
            assert match(wanted, stored, "", WHERE) == [stored["a"]]
        else:
            assert "tied in the model, with different values in the files: a and b" in _refusal(wanted, stored)


def test_a_tie_in_two_dtypes(tmp_path: Path) -> None:
    values = torch.randn(8).bfloat16()
    save_file({"a": values, "b": values.float()}, tmp_path / "f.safetensors")
    with open_weights(tmp_path / "f.safetensors") as stored:
        assert match([_want("a", "b", shape=(8,))], stored, "", WHERE) == [stored["a"]]


@pytest.mark.parametrize("rows", [(4, 4, 3, 6, 5, 2), (3, 5, 5, 3), (4, 4, 4)])
def test_experts_of_several_sizes_are_refused(rows: tuple[int, ...]) -> None:
    """As many rows in all as of experts alike."""
    parts = [StoredTensor(WHERE, -1, "F32", (count, 2), 0) for count in rows]
    with pytest.raises(zo.CheckpointError, match="experts of several sizes"):
        JoinedTensor.of(parts, 2)
    assert JoinedTensor.of(parts[:2], 2).shape == (1, sum(rows[:2]), 2)
    assert JoinedTensor.of(parts, None).shape == (sum(rows), 2)
