from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.helpers.late_writes import make_writes_late
from tests.helpers.stores import close, grads_of, open_store
from zero_offload.base.types import Tier
from zero_offload.storage.memory.arena import Arena, MovableBuffer
from zero_offload.storage.shards import grad_store
from zero_offload.storage.shards.drive_grads import DriveGrads
from zero_offload.storage.shards.grad_store import HostGrads


@contextmanager
def grad_shard(tier: str, path: Path, dtype: torch.dtype = torch.bfloat16) -> Iterator[HostGrads]:
    with open_store(nn.Linear(1100, 1100), ("cpu", tier, "cpu"), path, dtype=dtype) as store:
        yield grads_of(store)


@pytest.mark.parametrize("tier", list(Tier))
def test_values_survive_closing(tier: Tier, nvme: Path) -> None:
    with grad_shard(tier, nvme) as shard:
        for step in range(3):
            shard.writable_array().fill_(step)
            shard.held = True
            close(shard)
            assert shard.on_disk == (tier is Tier.NVME)
            assert torch.all(shard.writable_array() == step)
            close(shard)
            shard.held = False


@pytest.mark.parametrize("tier", list(Tier))
@pytest.mark.parametrize("closed", [True, False])
def test_widening_keeps_what_is_held(closed: bool, tier: Tier, nvme: Path) -> None:
    with grad_shard(tier, nvme) as shard:
        values = torch.randn(shard.layout.shard_numel).bfloat16()
        shard.writable_array().copy_(values)
        shard.held = True
        if closed:
            close(shard)
        shard.widen()
        wide = shard.writable_array()
        assert wide.dtype == shard.dtype == torch.float32 and torch.equal(wide, values.float()) and shard.held
        wide += 1e-6
        expected = wide.clone()
        close(shard)
        shard.widen()
        assert torch.equal(shard.writable_array(), expected)


@pytest.mark.parametrize("tier", list(Tier))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_chunks_for_the_update(dtype: torch.dtype, tier: Tier, nvme: Path) -> None:
    with grad_shard(tier, nvme, dtype) as shard:
        values = torch.randn(shard.layout.shard_numel).to(dtype)
        shard.writable_array().copy_(values)
        shard.held = True
        close(shard)
        staging = Arena(0).allocate((4 << 20) + 4096)
        for row, (begin, end) in enumerate(shard.layout.chunks()):
            (piece,), waits = shard.chunks(range(row, row + 1), staging, 4096)
            for wait in waits:
                wait()
            assert bool(waits) == (tier is Tier.NVME)
            address = staging.address + 4096 if waits else shard.writable_array().data_ptr() + begin * dtype.itemsize
            assert piece[:2] == (0, end - begin) and piece.grad.data_ptr() == address
            assert torch.equal(piece.grad, values[begin:end])


def test_pages_are_taken_only_while_open(nvme: Path) -> None:
    with open_store(nn.Linear(64, 64), ("cpu", "nvme", "cpu"), nvme, num_frames=1) as store:
        attached: list[MovableBuffer] = []

        def attach(buffer: MovableBuffer) -> None:
            attached.append(buffer)
            assert buffer.attach()

        shard = grads_of(store, attach)
        shard.writable_array()
        assert store.arena.free_frames == 0 and len(attached) == 1
        shard.writable_array()
        assert len(attached) == 1
        close(shard)
        close(shard)
        assert store.arena.free_frames == 1


@pytest.mark.parametrize("detaches", [True, False])
def test_values_survive_leaving(detaches: bool, nvme: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their pages go back once their write is over; without `detach_pages` they are still there."""
    make_writes_late(monkeypatch)
    with grad_shard("nvme", nvme) as shard:
        staging = Arena(0).allocate(4 << 20)
        for step in range(3):
            shard.writable_array().fill_(step)
            shard.held = True
            shard.launch_write()
            assert shard.on_disk
            if detaches:
                shard.detach_pages()
            for row, (begin, end) in enumerate(shard.layout.chunks()):
                (piece,), (wait,) = shard.chunks(range(row, row + 1), staging)
                wait()
                assert piece[:2] == (0, end - begin) and torch.all(piece.grad == step)
            assert torch.all(shard.writable_array() == step)
            close(shard)
            shard.held = False


def test_a_section_of_one_parameter_is_streamed(nvme: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_writes_late(monkeypatch)
    monkeypatch.setattr(grad_store, "LARGE_BYTES", 1 << 20)
    attached, streamed = list[int](), list[int]()
    stream = DriveGrads.stream

    def attach(buffer: MovableBuffer) -> None:
        attached.append(buffer.num_frames)
        assert buffer.attach()

    def told_stream(shard: DriveGrads, grad: torch.Tensor) -> None:
        streamed.append(grad.numel())
        stream(shard, grad)

    monkeypatch.setattr(DriveGrads, "stream", told_stream)
    with open_store(nn.Linear(2400, 2400, bias=False), ("cpu", "nvme", "cpu"), nvme, dtype=torch.bfloat16) as store:
        shard, numel = grads_of(store, attach), 2400 * 2400
        for _ in range(2):
            grad = torch.randn(numel).bfloat16()
            shard.add(0, grad, adds=False)
            assert attached.pop() == 4 and streamed.pop() == numel
            assert torch.equal(shard.view(0), grad)
            shard.add(0, -grad, adds=False)
            assert not streamed, "the array is open"
            assert torch.equal(shard.view(0), -grad)
            close(shard)
            shard.held = False
        shard.add(0, grad.float(), adds=False)
        assert not streamed, "it would be rounded"
    with grad_shard("nvme", nvme) as shard:
        shard.add(0, torch.randn(1100 * 1100).bfloat16(), adds=False)
        assert not streamed, "there is a bias"


def adopted(shard: HostGrads, index: int) -> torch.Tensor:
    grad = torch.randn(shard.layout.params[index].spec.numel).to(shard.dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grad_store, "LARGE_BYTES", 0)
        shard.add(index, grad, adds=False)
    assert shard.view(index).data_ptr() == grad.data_ptr()
    return shard.view(index)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_update_finds_adopted_gradients_where_they_are(dtype: torch.dtype, nvme: Path) -> None:
    """A weight over two chunks, adopted; its bias behind it, copied: every element comes in one piece."""
    with grad_shard("cpu", nvme, dtype) as shard:
        weight, bias = (piece.begin for piece in shard.layout.params)
        grad = adopted(shard, 0)
        shard.view(1).fill_(3)
        expected = shard.writable_array().clone()
        expected[weight : weight + grad.numel()] = grad
        found = torch.empty_like(expected)
        for row, (begin, end) in enumerate(shard.layout.chunks()):
            pieces, waits = shard.chunks(range(row, row + 1))
            assert not waits and [p.begin for p in pieces] == [0, *(p.end for p in pieces)][: len(pieces)]
            assert pieces[-1].end == end - begin
            for piece in pieces:
                found[begin + piece.begin : begin + piece.end] = piece.grad
        assert torch.equal(found, expected) and found[bias] == 3
        assert torch.equal(shard.view(0), grad) and torch.all(shard.view(1) == 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_widening_takes_adopted_gradients_in(dtype: torch.dtype, nvme: Path) -> None:
    with grad_shard("cpu", nvme, dtype) as shard:
        grad = adopted(shard, 0)
        piece = shard.layout.params[0]
        shard.widen()
        assert torch.equal(shard.writable_array()[piece.begin : piece.end], grad.float())
        shard.add(0, torch.ones_like(grad), adds=False)
        assert torch.all(shard.view(0) == 1)


def test_adopted_gradients_live_until_released(nvme: Path) -> None:
    with grad_shard("cpu", nvme) as shard:
        grad = weakref.ref(adopted(shard, 0))
        shard.release()
        assert grad() is not None, "still held"
        shard.held = False
        shard.release()
        assert grad() is None
        replaced = weakref.ref(adopted(shard, 0))
        shard.add(0, torch.zeros(shard.layout.params[0].spec.numel).to(shard.dtype), adds=False)
        assert replaced() is None
