"""The words of a generation: what is believed, and what is refused by name."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers.models import TinyLM
from zero_offload.base.errors import CheckpointError, IntegrityError
from zero_offload.checkpoint import format as format_module
from zero_offload.checkpoint.format import Generation, check_fingerprint, dtype_of, fingerprint, rank_manifest_name
from zero_offload.plan.dtypes import ComputeDtypes
from zero_offload.plan.layout import ShardLayout, make_layout
from zero_offload.plan.model_spec import ModelSpec

PAYLOAD: dict[str, Any] = {
    "run_id": "a",
    "number": 3,
    "step": 7,
    "world_size": 2,
    "num_shards": 2,
    "committed_at": "now",
}


def _layout(model: nn.Module | None = None, num_shards: int = 1, dtype: torch.dtype = torch.bfloat16) -> ShardLayout:
    return make_layout(ModelSpec.from_module(model or TinyLM(), None), ComputeDtypes(dtype), num_shards)


def test_a_generation_is_read_back() -> None:
    found = Generation.parse(PAYLOAD | {"param_steps": {"weight": 7}}, "generation-1.json")
    assert {name: getattr(found, name) for name in PAYLOAD} == PAYLOAD


@pytest.mark.parametrize("name", PAYLOAD)
@pytest.mark.parametrize("value", [None, 1.5, [], True, "absent"], ids=repr)
def test_a_field_of_another_type_is_damage(name: str, value: object) -> None:
    payload = PAYLOAD | {"param_steps": {}, name: value}
    if value == "absent":
        del payload[name]
    with pytest.raises(IntegrityError, match=name):
        Generation.parse(payload, "generation-1.json")


def test_manifest_names_alternate() -> None:
    names = [rank_manifest_name(1, number) for number in range(4)]
    assert names[0] == names[2] != names[1] == names[3]
    assert not set(names) & {rank_manifest_name(0, number) for number in range(4)}


@pytest.mark.parametrize("num_shards", [1, 2, 3])
def test_the_fingerprint_does_not_depend_on_the_ranks(num_shards: int) -> None:
    assert fingerprint(_layout(num_shards=num_shards)) == fingerprint(_layout())


def test_the_same_model_passes() -> None:
    check_fingerprint(fingerprint(_layout()), _layout(num_shards=2), "here")


@pytest.mark.parametrize(
    ("key", "value"),
    [("name", "other"), ("shape", [1]), ("dtype", "float32"), ("trainable", False)],
)
def test_the_first_difference_is_named(key: str, value: object) -> None:
    saved = copy.deepcopy(fingerprint(_layout()))
    saved[3][key] = value
    saved[5]["name"] = "a later difference"
    with pytest.raises(CheckpointError, match="here holds another model") as caught:
        check_fingerprint(saved, _layout(), "here")
    assert f"{key}={value!r}" in str(caught.value)
    assert "a later difference" not in str(caught.value)


@pytest.mark.parametrize(("key", "value"), [("order", [1, 0]), ("held_by", "AWrapper"), ("keeps_dtype", True)])
@pytest.mark.parametrize("here", [False, True])
def test_what_most_parameters_lack(key: str, value: object, here: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    saved, mine = copy.deepcopy(fingerprint(_layout())), fingerprint(_layout())
    (mine if here else saved)[3][key] = value
    monkeypatch.setattr(format_module, "fingerprint", lambda layout: mine)
    with pytest.raises(CheckpointError, match=f"here holds another model.*{key}="):
        check_fingerprint(saved, _layout(), "here")


@pytest.mark.parametrize("moved", ["section", "order"])
def test_other_units_of_the_same_model(moved: str) -> None:
    saved = copy.deepcopy(fingerprint(_layout()))
    if moved == "order":
        saved[1], saved[2] = saved[2], saved[1]
    else:
        saved[3] |= {"section": 9}
    with pytest.raises(CheckpointError, match=r"in other units, from .* on\. Pass the units= .* 'zero-offload export'"):
        check_fingerprint(saved, _layout(), "here")


@pytest.mark.parametrize("change", [lambda saved: saved[:-1], lambda saved: [*saved, {"name": "one.more"}]])
def test_another_number_of_parameters(change: Any) -> None:
    saved = change(fingerprint(_layout()))
    with pytest.raises(CheckpointError, match=f"{len(saved)} parameters, this model has {len(fingerprint(_layout()))}"):
        check_fingerprint(saved, _layout(), "here")


@pytest.mark.parametrize("saved", [None, {}, "text", [1, 2], [None]], ids=repr)
def test_a_damaged_list(saved: object) -> None:
    with pytest.raises(IntegrityError, match="here"):
        check_fingerprint(saved, _layout(), "here")


def test_tied_parameters_are_listed_once() -> None:
    names = [entry["name"] for entry in fingerprint(_layout())]
    assert len(names) == len(set(names)) and "head.weight" not in names


def test_dtypes() -> None:
    assert dtype_of("bfloat16") is torch.bfloat16
    for name in ("nn", "load", "bfloat17", "__name__"):
        with pytest.raises(IntegrityError):
            dtype_of(name)


def test_layouts_cut_the_same_elements_in_different_places() -> None:
    one, three = _layout().sections[1], _layout(num_shards=3).sections[1]
    assert one.used_numel == three.used_numel
    assert dataclasses.replace(three, shard_numel=one.shard_numel, num_shards=1) == one
    assert three.shard_numel % 4096 == 0 and three.numel >= one.used_numel
