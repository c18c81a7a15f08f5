"""Tensors that leave memory, tensors that stay, and that everything comes back to where it was taken from."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import zero_offload as zo
from tests.helpers.activations import make_small
from tests.helpers.models import WIDE, Block, TinyLM, build, tokens_of
from zero_offload.base.events import Counters
from zero_offload.base.types import MIB, Tier
from zero_offload.hardware.device import HostDevice
from zero_offload.model.api import runtime_of
from zero_offload.runtime.saved_tensors.activations import Activations, OffloadedActivation
from zero_offload.runtime.saved_tensors.tiers import LANDING_SLAB_BYTES, DiskTier
from zero_offload.storage.files.directory import RunDirectory
from zero_offload.storage.files.engines import open_engine
from zero_offload.storage.files.native_engine import NativeEngine
from zero_offload.storage.files.swap_file import Extent, SwapFile, Transfer
from zero_offload.storage.memory.arena import Arena


class NotedFile(SwapFile):
    """Knows the writes to it."""

    def launch_write(self, extent: Extent, rows: slice, address: int) -> Transfer:
        made = super().launch_write(extent, rows, address)
        self.writes = [*getattr(self, "writes", []), made]
        self.fd = int(extent.blocks["fd"][0])
        return made


class Bench:
    """A store on a disk, without a model."""

    def __init__(self, path: Path, fractions: dict[Tier, float]) -> None:
        self.directory = RunDirectory.open(path)
        engine = open_engine()
        assert isinstance(engine, NativeEngine)
        self.engine = engine
        self.arena, self.counters = Arena(0), Counters()
        self.file = NotedFile([self.directory], "activations", engine, 1, counters=self.counters)
        self.file.create_scratch()
        self.tier = DiskTier(HostDevice(), self.arena, self.file)
        self.buffer = torch.zeros(MIB)
        self.store = Activations(fractions, {Tier.NVME: self.tier}, self.counters, [self.buffer], "cpu")

    def pack(self, tensor: Tensor) -> OffloadedActivation:
        away = self.store.pack(tensor)
        assert away is not None
        return away

    def close(self) -> None:
        self.engine.close()
        self.file.close()
        self.directory.close()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path / "nvme", {Tier.NVME: 1.0})
    yield made
    made.close()


def noise(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("numel", [MIB // 4, MIB // 4 + 1, 3 * MIB + 5, 24 * MIB])
def test_bytes_come_back(bench: Bench, numel: int) -> None:
    tensor = noise(numel)
    away = bench.pack(tensor)
    assert torch.equal(bench.store.unpack(away), tensor)
    assert torch.equal(bench.store.unpack(away), tensor)  # as with retain_graph


def test_views_of_one_storage_are_stored_once(bench: Bench) -> None:
    base = noise(6, MIB // 4)
    views = [base, base.t(), base[2:4], base[:, ::3], base.view(2, 3, -1).permute(2, 0, 1), base[1, 5:9].expand(3, 4)]
    aways = [bench.pack(view) for view in views]
    assert len({id(away.stored) for away in aways}) == 1
    assert bench.counters.snapshot()["written.nvme"] == base.nbytes
    for view, away in zip(views, aways, strict=True):
        found = bench.store.unpack(away)
        assert torch.equal(found, view) and found.stride() == view.stride()
    # Read once, since all who saved it asked in turn.
    assert bench.counters.snapshot()["read.nvme"] == base.nbytes


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.int64, torch.bool, torch.complex64])
def test_dtypes(bench: Bench, dtype: torch.dtype) -> None:
    tensor = (noise(2, MIB) * 3).to(dtype)
    assert torch.equal(bench.store.unpack(bench.pack(tensor)), tensor)


def test_a_storage_that_was_changed_is_another(bench: Bench) -> None:
    tensor = noise(MIB)
    first = bench.pack(tensor)
    expected = tensor.clone().mul_(2)
    tensor.mul_(2)
    second = bench.pack(tensor)
    assert torch.equal(bench.store.unpack(second), expected)
    with pytest.raises(RuntimeError, match="is at version 1, backward expected version 0"):
        bench.store.unpack(first)


def test_a_new_storage_at_the_address_of_an_old_one_is_not_taken_for_it(bench: Bench) -> None:
    aways, values = [], []
    for value in range(20):
        tensor = torch.full((MIB,), float(value))
        aways.append(bench.pack(tensor))
        values.append(value)
        del tensor
    assert [bench.store.unpack(away)[7].item() for away in aways] == values


def test_what_stays(bench: Bench) -> None:
    small, leaf = noise(MIB // 4 - 1), noise(MIB).requires_grad_()
    for tensor in (small, leaf, bench.buffer, nn.Parameter(noise(MIB)), noise(MIB, 2).view(torch.complex64).conj()):
        assert bench.store.pack(tensor) is None
    assert bench.store.pack(torch.empty(MIB, device="meta")) is None  # not where the model computes


def test_fractions_are_met_in_bytes(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "nvme", {Tier.DEVICE: 0.25, Tier.NVME: 0.75})
    tensors = [noise(MIB) for _ in range(16)]
    bench.store.begin()
    aways = [bench.store.pack(tensor) for tensor in tensors]
    assert sum(away is not None for away in aways) == 12
    # Saved again, a tensor goes nowhere else.
    assert [bench.store.pack(tensor) is None for tensor in tensors] == [away is None for away in aways]
    assert bench.counters.snapshot()["activations.nvme"] == 12 * 4 * MIB
    assert bench.counters.snapshot()["activations.device"] == 4 * 4 * MIB
    bench.close()


def test_memory_and_file_do_not_grow(bench: Bench) -> None:
    def step() -> tuple[int, int]:
        aways = [bench.pack(noise(5 * MIB // 4)) for _ in range(12)]
        for away in reversed(aways):
            bench.store.unpack(away)
        return bench.arena.allocated_bytes, bench.file.nbytes

    first = step()
    assert [step() for _ in range(3)] == [first] * 3
    assert first == (16 * MIB + 3 * LANDING_SLAB_BYTES, 60 * MIB)  # seven are ahead of one, and three lie in a slab


def test_only_what_is_wanted_is_in_memory(bench: Bench) -> None:
    """Neither the tensors that were packed nor those that were read are kept by the store."""
    packed, aways = [], []
    for _ in range(6):
        tensor = noise(MIB)
        packed.append(StorageWeakRef(tensor.untyped_storage()))
        aways.append(bench.pack(tensor))
        del tensor
    assert all(reference.expired() for reference in packed)
    read = [StorageWeakRef(bench.store.unpack(away).untyped_storage()) for away in reversed(aways)]
    assert all(reference.expired() for reference in read)


def test_an_unused_activation_gives_its_blocks_back(bench: Bench) -> None:
    for _ in range(5):
        aways = [bench.pack(noise(8 * MIB)) for _ in range(2)]
        bench.store.unpack(aways[1])  # fetches the other one ahead
        del aways
        bench.store.begin()
    assert bench.file.nbytes == 64 * MIB
    assert bench.tier.arrivals == []


def test_a_flipped_byte_is_seen(bench: Bench) -> None:
    away = bench.pack(noise(MIB))
    for write in bench.file.writes:
        write.wait()
    with open(f"/proc/self/fd/{bench.file.fd}", "r+b") as file:
        file.seek(2 * MIB + 17)
        byte = file.read(1)
        file.seek(2 * MIB + 17)
        file.write(bytes([byte[0] ^ 1]))
    with pytest.raises(zo.IntegrityError, match="checksum"):
        bench.store.unpack(away)


def test_a_full_disk_is_named(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(name: str, sizes: object) -> None:
        raise zo.CapacityError("disk space: there is none")

    monkeypatch.setattr(bench.file, "allocate", full)
    with pytest.raises(zo.StorageError, match="no room for activations on the NVMe tier: disk space: there is none"):
        bench.store.pack(noise(MIB))


# In a model


def offloaded(nvme: Path, make: object = partial(TinyLM, WIDE), **settings: object) -> nn.Module:
    config = zo.OffloadConfig(activations="nvme", precision="fp32", nvme=nvme, **settings)
    return zo.offload(build(make), config)


def test_stats_count_what_moved(nvme: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_small(monkeypatch)
    model = offloaded(nvme, durability="scratch")
    zo.checkpoint(model.blocks)
    optimizer = zo.AdamW(model.parameters(), lr=1e-3)
    for step in range(3):
        model(tokens_of(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    stats = zo.stats(model)
    hidden = 2 * 8 * WIDE * 4
    # The inputs of three blocks and of the norm, and of the head.
    assert stats.activation_bytes == {"device": 0, "cpu": 0, "nvme": 5 * hidden}
    assert stats.written_bytes["nvme"] == stats.read_bytes["nvme"] == stats.activation_bytes["nvme"]
    zo.close(model)


def test_of_no_generation_and_gone_with_the_model(nvme: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_small(monkeypatch)
    model = offloaded(nvme)
    optimizer = zo.AdamW(model.parameters(), lr=1e-3)
    names = set(os.listdir(nvme))
    model(tokens_of(0)).backward()
    optimizer.step()
    sizes = {path.name: path.stat().st_size for path in nvme.glob("*swap*")}
    for step in range(2):
        model(tokens_of(step))
        zo.commit(model, optimizer)
    assert {path.name: path.stat().st_size for path in nvme.glob("*swap*")} == sizes
    zo.close(model)
    generation = {name for name in os.listdir(nvme) if name.startswith(("generation", "rank"))}
    assert set(os.listdir(nvme)) - generation <= names


class Failing(Block):
    """Raises in forward or backward."""

    fails = ""

    def forward(self, x: Tensor) -> Tensor:
        if self.fails == "forward":
            raise ValueError("on purpose")
        out = super().forward(x)
        if self.fails == "backward":
            out.register_hook(self.stop)
        return out

    def stop(self, grad: Tensor) -> Tensor:
        raise ValueError("on purpose")


@pytest.mark.parametrize("is_marked", [True, False])
def test_after_exceptions_nothing_is_lost(nvme: Path, monkeypatch: pytest.MonkeyPatch, is_marked: bool) -> None:
    make_small(monkeypatch)
    model = offloaded(nvme, lambda: TinyLM(WIDE, 4, Failing), durability="scratch")
    if is_marked:
        zo.checkpoint(model.blocks)
    model(tokens_of(0)).backward()
    runtime = runtime_of(model)
    assert runtime is not None
    before, allocate = zo.stats(model).resident_bytes, SwapFile.allocate
    allocated: list[str] = []
    monkeypatch.setattr(
        SwapFile, "allocate", lambda disk, name, sizes: (allocated.append(name), allocate(disk, name, sizes))[1]
    )
    for where in 2 * ("forward", "backward"):
        model.blocks[1].fails = where
        with pytest.raises(ValueError, match="on purpose"):
            model(tokens_of(1)).backward()
        model.blocks[1].fails = ""
        gc.collect()
        with pytest.warns(UserWarning, match="dropped") if where == "backward" else nullcontext():
            model(tokens_of(2)).backward()
    assert zo.stats(model).resident_bytes == before
    assert allocated == [], "blocks of the passes that were left are used again"
    zo.close(model)


def test_a_deep_model_needs_less_memory(nvme: Path) -> None:
    """The peak of what torch's allocator holds, counted as storages that are alive."""

    def peak_bytes(activations: str) -> int:
        model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.Tanh()) for _ in range(24)))
        config = zo.OffloadConfig(
            activations=activations, precision="fp32", nvme=nvme / activations, durability="scratch"
        )
        zo.offload(model, config)
        x = noise(4096, 256)  # 4 MiB; 24 of them are saved by tanh, which are the inputs of linear too
        with torch.profiler.profile(profile_memory=True) as profile:
            model(x).sum().backward()
        zo.close(model)
        total = peak = 0
        for event in profile.profiler.kineto_results.events():  # type: ignore[union-attr]
            if event.name() == "[memory]":
                total += event.nbytes()
                peak = max(peak, total)
        return peak

    kept, stored = peak_bytes("device"), peak_bytes("nvme")
    saved = 24 * 4 * MIB
    # One is being made, one is on its way in, one gradient more or less.
    assert kept >= saved
    assert kept - stored >= saved - 3 * 4 * MIB
