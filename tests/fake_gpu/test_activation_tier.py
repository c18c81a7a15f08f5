"""The tiers of activations in host memory and on a drive, without a model: blocks, bounds, and what breaks off."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch

import zero_offload as zo
from tests.fake_gpu import device
from tests.fake_gpu.device import TYPE
from tests.helpers.activations import make_small
from tests.helpers.models import TinyLM, build, tokens_of
from zero_offload.base.events import Counters
from zero_offload.base.types import MIB
from zero_offload.hardware.device import AcceleratorDevice, Handoff
from zero_offload.plan.memory import ACTIVATION_BLOCKS_BACK
from zero_offload.runtime.saved_tensors import tiers
from zero_offload.storage.files.directory import RunDirectory
from zero_offload.storage.files.engines import open_engine
from zero_offload.storage.files.swap_file import SwapFile
from zero_offload.storage.memory.arena import Arena

pytestmark = pytest.mark.usefixtures("late")


class Watched(AcceleratorDevice):
    """Keeps the copies that it has launched."""

    def __init__(self) -> None:
        super().__init__(TYPE)
        self.downloads: list[Handoff] = []
        self.uploads: list[Handoff] = []

    def download(self, *args: Any, **named: Any) -> Handoff:
        self.downloads.append(super().download(*args, **named))
        return self.downloads[-1]

    def upload(self, *args: Any, **named: Any) -> Handoff:
        self.uploads.append(super().upload(*args, **named))
        return self.uploads[-1]

    @property
    def bytes_out(self) -> int:
        return sum(copy.tensor.nbytes for copy in self.downloads if not copy.ready.done())


class Bench:
    """The tier in host memory."""

    def __init__(self) -> None:
        self.device = Watched()
        self.arena = Arena(0, pinner=self.device)
        self.tier = tiers.HostTier(self.device, self.arena, Counters())


def comes_back(stored: tiers.StoredBytes, source: torch.Tensor) -> bool:
    return torch.equal(stored.finish().cpu(), source.cpu())


def sources(*sizes: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(256, (size,), dtype=torch.uint8, generator=generator).to(TYPE) for size in sizes]


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def test_downloads_on_their_way_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiers, "BYTES_OUT", 8 * MIB)
    bench, there = Bench(), sources(*[MIB, 3 * MIB + 5, 2 * MIB, 20 * MIB, MIB + 1, 7 * MIB, MIB] * 2)
    stored, most = [], 0
    for source in there:
        stored.append(bench.tier.put(source))
        out = bench.device.bytes_out
        assert out <= max(8 * MIB, source.nbytes)
        most = max(most, out - source.nbytes)
    assert most > 4 * MIB, "a host may launch ahead"
    assert all(comes_back(away, source) for source, away in reversed([*zip(there, stored, strict=True)]))


def test_an_interrupted_wait_for_room_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiers, "BYTES_OUT", 4 * MIB)
    bench, there = Bench(), sources(3 * MIB, 3 * MIB)
    first = bench.tier.put(there[0])
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(type(bench.device.downloads[0].ready), "synchronize", _interrupt)
        bench.tier.put(there[1])
    second = bench.tier.put(there[1])
    assert bench.device.bytes_out == 3 * MIB
    assert comes_back(first, there[0]) and comes_back(second, there[1])
    assert bench.arena.num_registrations == 1


def test_an_interrupt_between_two_copies_gives_the_blocks_back(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench()
    (source,) = sources(40 * MIB)
    download = bench.device.download
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        first = iter([download])
        patch.setattr(bench.device, "download", lambda *args, **named: next(first, _interrupt)(*args, **named))
        bench.tier.put(source)
    assert comes_back(bench.tier.put(source), source)
    assert bench.arena.num_registrations == 2


def test_a_copy_per_storage_step_after_step() -> None:
    """Three of them lie in one slab; one is larger than a slab, and so in two."""
    bench, there = Bench(), sources(5 * MIB + 1, 2 * MIB, 9 * MIB, 40 * MIB)
    for _ in range(3):
        before = len(bench.device.downloads)
        stored = [bench.tier.put(source) for source in there]
        assert [len(away.pieces) for away in stored] == [1, 1, 1, 2]
        assert len(bench.device.downloads) - before == 5
        for source, away in reversed([*zip(there, stored, strict=True)]):
            assert comes_back(away, source)
            away.release()
        assert bench.arena.num_registrations == 2


def test_blocks_that_were_not_read_are_used_again() -> None:
    bench, (dropped, kept) = Bench(), sources(3 * MIB, 3 * MIB)
    bench.tier.put(dropped).release()
    away = bench.tier.put(kept)
    away.launch()
    away.release()
    away = bench.tier.put(dropped)
    assert comes_back(away, dropped)
    assert away.pieces[0].run == range(3) and bench.arena.num_registrations == 1


@pytest.mark.parametrize("again", [True, False])
def test_a_way_back_from_a_drive_that_breaks_off_leaves_no_upload(
    again: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next user of the target's memory, or of the landing blocks, comes after it."""
    gpu = Watched()
    arena = Arena(0, pinner=gpu)
    with (
        RunDirectory.open(tmp_path / "nvme") as directory,
        contextlib.closing(open_engine()) as engine,
        contextlib.closing(SwapFile([directory], "activations", engine, 1)) as file,
    ):
        file.create_scratch()
        tier = tiers.DiskTier(gpu, arena, file)
        (source,) = sources(5 * MIB + 1)
        away = tier.put(source)
        upload = gpu.upload
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            first = iter([upload, upload])
            patch.setattr(gpu, "upload", lambda *args, **named: next(first, _interrupt)(*args, **named))
            away.finish()
        assert [copy.ready.done() for copy in gpu.uploads] == [False, False]
        if not again:
            away.cancel()
            assert all(copy.ready.done() for copy in gpu.uploads)
        assert torch.equal(away.finish().cpu(), source.cpu())
        assert len(tier.landing) == ACTIVATION_BLOCKS_BACK


def train(config: zo.OffloadConfig, is_marked: bool) -> list[float]:
    """Two losses of a step, of which one is in both backwards."""
    model: Any = zo.offload(build(lambda: TinyLM(num_blocks=4)), config)
    if is_marked:
        zo.checkpoint(model.blocks)
    optimizer = zo.AdamW(model.parameters(), lr=1e-2)
    results, sizes = [], []
    for step in range(3):
        losses = [model(tokens_of(2 * step + i)) for i in range(2)]
        losses[0].backward(retain_graph=True)
        (losses[0] + losses[1]).backward()
        results += [loss.item() for loss in losses] + [zo.clip_grad_norm_(model, 0.5).item()]
        optimizer.step()
        optimizer.zero_grad()
        del losses
        sizes.append(zo.stats(model).resident_bytes)
    assert sizes[1:] == sizes[1:2] * 2
    zo.close(model)
    return results


@pytest.mark.parametrize("is_marked", [True, False])
@pytest.mark.parametrize("activations", ["cpu", "nvme", {"device": 0.3, "cpu": 0.3, "nvme": 0.4}], ids=str)
def test_a_graph_that_is_used_twice(
    activations: Any, is_marked: bool, nvme: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_small(monkeypatch)
    with device.on_host():
        expected = train(zo.OffloadConfig(), is_marked)
    config = zo.OffloadConfig(activations=activations, nvme=nvme, durability="scratch")
    assert train(config, is_marked) == expected
