"""A `ShardStore` of one small model on a real disk, without a runtime around it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from torch import nn

from zero_offload.memory.arena import Arena
from zero_offload.plan.dtypes import ComputeDtypes
from zero_offload.plan.layout import make_layout
from zero_offload.plan.model_spec import ModelSpec
from zero_offload.shards.shard import ADAM_STATES, Component, Shard, component_dtype
from zero_offload.shards.store import ShardStore
from zero_offload.storage.directory import RunDirectory
from zero_offload.storage.engines import open_engine
from zero_offload.storage.swap_file import SwapFile
from zero_offload.types import StateKind, Tier


@contextmanager
def open_store(
    model: nn.Module,
    tiers: tuple[str, str, str],
    path: Path,
    *,
    dtype: torch.dtype = torch.bfloat16,
    num_slots: int = 2,
    num_frames: int = 16,
) -> Iterator[ShardStore]:
    """`tiers` of params, grads and optimizer, for every unit."""
    layout = make_layout(ModelSpec.from_module(model), ComputeDtypes(dtype), 1)
    placement = dict(zip((StateKind.PARAMS, StateKind.GRADS, StateKind.OPTIMIZER), map(Tier, tiers), strict=True))
    with ExitStack() as stack:
        directory = stack.enter_context(RunDirectory.open(path))
        engine = open_engine()
        stack.callback(engine.close)
        swap = SwapFile([directory], "test.swap", engine, 1)
        stack.callback(swap.close)
        store = ShardStore(layout, [placement] * len(layout.units), Arena(num_frames), swap, num_slots)
        store.places.lay_out(store.shards)
        swap.create_scratch()
        for shard in store.shards:
            store.places.place_memory(shard, {})
            store.add_states(shard, ADAM_STATES)
        yield store


def fill(store: ShardStore, shard: Shard, seed: int) -> dict[Component, torch.Tensor]:
    """Write random components, and return them."""
    generator = torch.Generator().manual_seed(seed)
    values = {
        component: torch.randint(-1000, 1000, (shard.layout.shard_numel,), generator=generator).to(
            component_dtype(shard.layout, component)
        )
        for component in shard.components
    }
    store.write_components(shard, lambda component, begin, end: values[component][begin:end])
    return values
