"""Names, shapes and dtypes of a folder against those of a model: all that does not fit is in one message."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import zero_offload as zo
from zero_offload.checkpoint.hf_files import StoredTensor, Wanted, match, open_weights
from zero_offload.plan.layout import CHUNK_NUMEL

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
