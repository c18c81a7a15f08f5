"""A `ShardStore` of one small model on a real disk, without a runtime around it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from torch import nn

from zero_offload.base.events import Counters
from zero_offload.base.types import StateKind, Tier
from zero_offload.hardware.device import AcceleratorDevice, HostDevice
from zero_offload.plan.dtypes import ComputeDtypes
from zero_offload.plan.layout import make_layout
from zero_offload.plan.model_spec import ModelSpec
from zero_offload.storage.files.directory import RunDirectory
from zero_offload.storage.files.engines import open_engine
from zero_offload.storage.files.swap_file import SwapFile
from zero_offload.storage.memory.arena import Arena, MovableBuffer
from zero_offload.storage.shards.drive_grads import AttachBuffer, DriveGrads, DriveRoom
from zero_offload.storage.shards.grad_downloads import GradDownloads
from zero_offload.storage.shards.grad_store import GradMemory, HostGrads
from zero_offload.storage.shards.ring_grads import GradRing, RingDriveGrads, RingGrads
from zero_offload.storage.shards.shard import ADAM_STATES, Component, Shard, component_dtype
from zero_offload.storage.shards.store import ShardStore


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
        counters = Counters()
        swap = SwapFile([directory], "test.swap", engine, 1, counters=counters)
        stack.callback(swap.close)
        store = ShardStore(
            layout, [placement] * len(layout.units), Arena(num_frames), swap, num_slots, counters=counters
        )
        store.lay_out(store.shards)
        swap.create_scratch()
        for shard in store.shards:
            store.place_memory(shard, {})
            store.add_states(shard, ADAM_STATES)
        yield store


def attach(buffer: MovableBuffer) -> None:
    """Pages of an arena that has some."""
    assert buffer.attach()


def grad_memory(store: ShardStore, device: AcceleratorDevice | None = None, shard_index: int = 0) -> GradMemory:
    """The common parts of gradient stores, where a CPU computes, or a `device`."""
    downloads = None if device is None else GradDownloads(device, store.arena, store.counters)
    return GradMemory(store, device or HostDevice(), shard_index, downloads)


def grads_of(store: ShardStore, attach: AttachBuffer = attach, ring: GradRing | None = None) -> HostGrads:
    """Where gradients of the store's first shard rest, on the host's tier that it was placed on."""
    shard, memory, room = store.shards[0], grad_memory(store), DriveRoom(store.counters, None)
    tier, layout = shard.placement.grads, shard.layout
    if tier is Tier.NVME:
        if ring is not None:
            return RingDriveGrads(ring, room, attach, memory, layout, "unit", sums_up=True)
        return DriveGrads(room, attach, memory, layout, "unit", sums_up=True)
    if ring is not None:
        return RingGrads(ring, memory, layout, tier, "unit", sums_up=True)
    return HostGrads(memory, layout, tier, "unit", sums_up=True)


def close(grads: HostGrads) -> None:
    """Bring what is open to rest, and return when it is there."""
    if isinstance(grads, DriveGrads):
        grads.launch_write()
        grads.detach_pages()


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
