from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from zero_offload.base.errors import ConfigError
from zero_offload.plan.dtypes import ComputeDtypes
from zero_offload.plan.layout import ALIGN_NUMEL, CHUNK_NUMEL, SHARD_NUMEL, ShardLayout, make_layout
from zero_offload.plan.model_spec import ModelSpec

SHAPES = st.lists(st.lists(st.integers(0, 60), max_size=3).map(tuple), min_size=1, max_size=12)


def layout_of(model: nn.Module, dtype: torch.dtype = torch.float32, num_shards: int = 1) -> ShardLayout:
    return make_layout(ModelSpec.from_module(model), ComputeDtypes(dtype), num_shards)


@given(SHAPES, st.lists(st.booleans(), min_size=12, max_size=12), st.sampled_from([1, 2, 3, 8]))
def test_parameters_are_aligned_disjoint_and_complete(
    shapes: list[tuple[int, ...]], trainable: list[bool], num_shards: int
) -> None:
    model = nn.Module()
    for i, shape in enumerate(shapes):
        setattr(model, f"p{i}", nn.Parameter(torch.empty(shape), requires_grad=trainable[i]))
    layout = layout_of(model, torch.bfloat16, num_shards)
    placed = [piece for section in layout.sections for piece in section.params]
    assert sorted(piece.spec.name for piece in placed) == sorted(f"p{i}" for i in range(len(shapes)))
    assert [section.index for section in layout.sections] == list(range(len(layout.sections)))
    for section in layout.sections:
        assert section.shard_numel % SHARD_NUMEL == 0 and section.numel == section.shard_numel * num_shards
        assert {piece.spec.trainable for piece in section.params} == {section.trainable}
        end = 0
        for piece in section.params:
            assert piece.begin % ALIGN_NUMEL == 0 and end <= piece.begin
            end = piece.end
        assert end <= section.numel
        assert section.shard_nbytes % 4096 == 0


def test_chunks_cover_a_shard() -> None:
    (section,) = layout_of(nn.Linear(2000, 2000, bias=False)).sections
    bounds = [0, CHUNK_NUMEL, 2 * CHUNK_NUMEL, 3 * CHUNK_NUMEL, section.shard_numel]
    assert section.chunks() == tuple(itertools.pairwise(bounds))
    assert section.used_numel == 4_000_000 and section.nbytes == section.numel * 4


def test_dtypes_and_frozen_parameters_have_sections_of_their_own() -> None:
    model = nn.Linear(3, 3)
    model.frozen = nn.Parameter(torch.empty(5, dtype=torch.float16), requires_grad=False)
    model.table = nn.Parameter(torch.zeros(5, dtype=torch.int64), requires_grad=False)
    sections = layout_of(model, torch.bfloat16).sections
    assert [(s.dtype, s.trainable) for s in sections] == [
        (torch.bfloat16, True),
        (torch.bfloat16, False),
        (torch.int64, False),
    ]


def test_the_same_model_has_the_same_layout_for_any_number_of_shards_up_to_the_cut() -> None:
    one, four = layout_of(nn.Linear(300, 300)), layout_of(nn.Linear(300, 300), num_shards=4)
    for a, b in zip(one.sections, four.sections, strict=True):
        assert [piece.begin for piece in a.params] == [piece.begin for piece in b.params]


def test_all_dtypes_without_a_place_are_named() -> None:
    model = nn.Sequential(nn.Linear(2, 2).double(), nn.Linear(2, 2, dtype=torch.complex64))
    with pytest.raises(ConfigError) as error:
        layout_of(model)
    assert all(name in str(error.value) for name in ("0.weight is float64", "1.weight is complex64", "model.float()"))
