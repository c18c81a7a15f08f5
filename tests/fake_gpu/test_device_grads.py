"""Gradients at rest on a device: what an update gets of them, and whose memory they are."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.fake_gpu import device
from tests.fake_gpu.device import TYPE
from tests.helpers.stores import grad_memory, open_store
from zero_offload.hardware.device import AcceleratorDevice
from zero_offload.plan.dtypes import ComputeDtypes
from zero_offload.plan.layout import make_layout
from zero_offload.plan.model_spec import ModelSpec
from zero_offload.storage.memory.arena import Arena
from zero_offload.storage.shards.device_grads import DeviceGrads
from zero_offload.storage.shards.grad_store import Gathered

pytestmark = pytest.mark.usefixtures("late")

WIDTH = 1100
"""Its weight takes two chunks."""


@contextmanager
def device_shard(
    path: Path, dtype: torch.dtype = torch.bfloat16, num_shards: int = 1, index: int = 0
) -> Iterator[tuple[DeviceGrads, AcceleratorDevice]]:
    model, gpu = nn.Linear(WIDTH, WIDTH), AcceleratorDevice(TYPE)
    with open_store(model, ("cpu", "cpu", "cpu"), path, dtype=dtype) as store:
        layout = make_layout(ModelSpec.from_module(model), ComputeDtypes(dtype), num_shards)
        (section,) = layout.sections
        yield DeviceGrads(grad_memory(store, device=gpu, shard_index=index), section, "unit", sums_up=False), gpu


def fill(shard: DeviceGrads, indices: range, index_of_shard: int = 0) -> torch.Tensor:
    """Gradients of these parameters, each in memory of its own; the whole shard with them, NaN elsewhere."""
    whole = torch.full((shard.layout.shard_numel,), float("nan"), dtype=shard.dtype)
    for index in indices:
        begin, end = shard.layout.in_shard(shard.layout.params[index], index_of_shard)
        whole[begin:end] = torch.randn(end - begin).to(shard.dtype)
        part = {index: slice(0, end - begin)}
        shard.add_shard(Gathered(whole[begin:end].to(TYPE), begin, part, frozenset()))
    return whole


def update_reads(shard: DeviceGrads, gpu: AcceleratorDevice) -> torch.Tensor:
    """The gradients that an update finds, chunk by chunk; NaN where there is no gradient."""
    region = Arena(0, None, gpu).allocate(4 << 20)
    found = []
    for row, (begin, end) in enumerate(shard.layout.chunks()):
        chunk = region.tensor(shard.dtype, end - begin)
        chunk.fill_(float("nan"))
        (piece,), waits = shard.chunks(range(row, row + 1), region)
        assert piece[:2] == (0, end - begin) and piece.grad.data_ptr() == region.address
        assert chunk.isnan().all(), "it has not been waited for"
        for wait in waits:
            wait()
        found.append(chunk.clone())
    return torch.cat(found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("indices", [range(2), range(1), range(1, 2), range(0)], ids=str)
def test_an_update_on_the_host_gets_chunks_by_staging(dtype: torch.dtype, indices: range, nvme: Path) -> None:
    with device_shard(nvme, dtype) as (shard, gpu):
        whole = fill(shard, indices)
        shard.lend(gpu.mark())
        assert torch.equal(update_reads(shard, gpu).nan_to_num(7), whole.nan_to_num(7))


@pytest.mark.parametrize("index", range(3))
def test_a_rank_has_its_part_of_each(index: int, nvme: Path) -> None:
    with device_shard(nvme, torch.float32, 3, index) as (shard, gpu):
        whole = fill(shard, range(2), index)
        shard.lend(gpu.mark())
        assert torch.equal(update_reads(shard, gpu).nan_to_num(7), whole.nan_to_num(7))
        assert shard.device_bytes == 4 * sum(view.numel() for view in (shard.view(0), shard.view(1)))


def test_pieces_are_views_in_order(nvme: Path) -> None:
    with device_shard(nvme) as (shard, _):
        fill(shard, range(1, -1, -1))
        assert [len(shard.chunks(range(row, row + 1))[0]) for row in range(2)] == [1, 2]
        for row, (begin, _) in enumerate(shard.layout.chunks()):
            for piece in shard.chunks(range(row, row + 1))[0]:
                of = 0 if begin + piece.begin < shard.layout.params[1].begin else 1
                at = begin + piece.begin - shard.layout.params[of].begin
                assert piece.grad.data_ptr() == shard.view(of)[at:].data_ptr()
                assert piece.grad.numel() == piece.end - piece.begin


def test_widening_keeps_the_values(nvme: Path) -> None:
    with device_shard(nvme) as (shard, gpu):
        whole = fill(shard, range(2))
        for _ in range(2):
            shard.widen()
            assert shard.dtype == torch.float32
            shard.lend(gpu.mark())
            assert torch.equal(update_reads(shard, gpu).nan_to_num(7), whole.float().nan_to_num(7))


def test_memory_goes_when_it_is_not_wanted(nvme: Path) -> None:
    with device_shard(nvme) as (shard, gpu):
        fill(shard, range(2))
        grad = weakref.ref(shard.view(0))
        shard.drop([0])
        assert grad() is not None, "still held"
        shard.lend(gpu.mark())
        shard.drop()
        assert grad() is not None and shard.device_bytes > 0, "an update takes it"
        shard.release()
        assert grad() is None and shard.device_bytes == 0
        fill(shard, range(2))
        shard.drop()
        assert shard.device_bytes == 0


def test_a_copy_under_way_keeps_what_it_reads(nvme: Path) -> None:
    """As `record_stream` does: the memory goes to the next who asks when the lane has read it."""
    with device_shard(nvme) as (shard, gpu):
        whole = fill(shard, range(1))
        shard.lend(gpu.mark())
        region = Arena(0, None, gpu).allocate(4 << 20)
        _, (wait,) = shard.chunks(range(1), region)
        shard.drop()
        shard.release()
        wait()
        begin, end = shard.layout.chunks()[0]
        assert torch.equal(region.tensor(shard.dtype, end - begin), whole[begin:end])


def test_an_update_does_not_wait_for_later_compute(nvme: Path) -> None:
    """A forward may be launched before the update's thread asks for a chunk."""
    with device_shard(nvme) as (shard, gpu):
        fill(shard, range(2))
        shard.lend(gpu.mark())
        torch.zeros(4, device=TYPE).add_(1)
        before = device.num_queued()
        update_reads(shard, gpu)
        assert 2 <= device.num_queued() < before


def test_neighbours_in_one_memory_move_as_one(nvme: Path) -> None:
    """A section's gradients, gathered: an update gets a chunk by one download, and widening makes one tensor."""
    with device_shard(nvme) as (shard, gpu):
        flat = torch.randn(shard.layout.shard_numel).to(shard.dtype).to(TYPE)
        shard.add_shard(Gathered(flat, 0, shard.parts, frozenset()))
        for dtype in (torch.bfloat16, torch.float32):
            assert shard.dtype == dtype
            assert [len(shard.chunks(range(row, row + 1))[0]) for row in range(2)] == [1, 1]
            assert shard.view(0).untyped_storage().data_ptr() == shard.view(1).untyped_storage().data_ptr()
            shard.lend(gpu.mark())
            with device.counting() as counts:
                found, used = update_reads(shard, gpu), shard.layout.params[1].end
            assert counts["downloads"] == 2
            assert torch.equal(found[:used], flat[:used].to(dtype).cpu())
            shard.widen()
