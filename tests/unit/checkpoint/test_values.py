"""Masters and moments in and out of shards, for every number of shards."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.helpers.models import TinyLM, build
from zero_offload.base.types import StateKind, Tier
from zero_offload.checkpoint.values import ComponentSource, FillMaster, fill_from_readers, read_master
from zero_offload.plan.dtypes import ComputeDtypes
from zero_offload.plan.layout import ParamSlice, SectionLayout, ShardLayout, make_layout
from zero_offload.plan.model_spec import ModelSpec
from zero_offload.storage.memory.arena import Arena
from zero_offload.storage.shards.shard import ADAM_STATES, Component
from zero_offload.storage.shards.store import ShardStore

WIDTH = 33


def fill_from(values: torch.Tensor) -> FillMaster:
    """Takes values from (shard_numel,)."""
    return lambda begin, end, out: out.copy_(values[begin:end])


def _layout(dtype: torch.dtype, num_shards: int) -> tuple[dict[str, Tensor], ShardLayout]:
    model = build(lambda: TinyLM(WIDTH))
    params = {name: param.detach() for name, param in model.named_parameters()}
    return params, make_layout(ModelSpec.from_module(model, None), ComputeDtypes(dtype), num_shards)


def _elements(tensor: torch.Tensor, begin: int, end: int) -> torch.Tensor:
    return tensor.detach().reshape(-1)[begin:end]


def _members(section: SectionLayout, params: dict[str, Tensor]) -> dict[ParamSlice, Tensor]:
    return {piece: params[piece.spec.name] for piece in section.params}


def _store(layout: ShardLayout) -> ShardStore:
    """Everything in memory."""
    store = ShardStore(layout, [dict.fromkeys(StateKind, Tier.CPU)] * len(layout.units), Arena(0), None, num_slots=1)
    for shard in store.shards:
        store.place_memory(shard, {})
        store.add_states(shard, ADAM_STATES)
    return store


@pytest.mark.parametrize("num_shards", [1, 2, 3, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_shards_together_are_the_parameters(dtype: torch.dtype, num_shards: int) -> None:
    params, layout = _layout(dtype, num_shards)
    parts: dict[int, list[Tensor]] = {}
    for index in range(num_shards):
        store = _store(layout)
        for shard in store.shards:
            members = _members(shard.layout, params)
            readers = {piece: partial(_elements, tensor) for piece, tensor in members.items()}
            fill = fill_from_readers(shard, index, readers)
            store.write_components(shard, ComponentSource(shard, fill))
            parts.setdefault(shard.layout.index, []).append(read_master(store, shard))
    for section in layout.sections:
        flat = torch.cat(parts[section.index])
        assert flat.dtype == torch.float32 and len(flat) == section.numel
        used = torch.zeros(section.numel, dtype=torch.bool)
        for piece, value in _members(section, params).items():
            assert torch.equal(flat[piece.begin : piece.end].view(value.shape), value)
            used[piece.begin : piece.end] = True
        assert not flat[~used].any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_master_beside_16_bits_is_restored_to_the_bit(dtype: torch.dtype) -> None:
    _, layout = _layout(dtype, 1)
    store = _store(layout)
    shard = store.shards[0]
    values = torch.randn(shard.layout.shard_numel)
    values[:4] = torch.tensor([torch.inf, -torch.inf, -0.0, 1e-40])
    store.write_components(shard, ComponentSource(shard, fill_from(values)))
    assert torch.equal(read_master(store, shard).view(torch.int32), values.view(torch.int32))
    # Ties apart, which these random values do not have, both round to the nearest.
    assert torch.equal(store.read_component(shard, Component.VALUE), values.to(dtype))


def test_moments_are_what_was_given_or_zero() -> None:
    _, layout = _layout(torch.bfloat16, 1)
    store = _store(layout)
    shard = store.shards[0]
    moment = torch.randn(shard.layout.shard_numel)
    fill = fill_from(torch.zeros(shard.layout.shard_numel))
    store.write_components(shard, ComponentSource(shard, fill, {Component.EXP_AVG: moment}))
    assert torch.equal(store.read_component(shard, Component.EXP_AVG), moment)
    assert not store.read_component(shard, Component.EXP_AVG_SQ).any()


def test_a_master_read_is_a_copy(tmp_path: Path) -> None:
    _, layout = _layout(torch.float32, 1)
    store = _store(layout)
    before = read_master(store, store.shards[0])
    before.fill_(7)
    assert not read_master(store, store.shards[0]).any()
