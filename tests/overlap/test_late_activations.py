"""Activations of a device with memory of its own, on lanes that copy as late as the waits permit."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import zero_offload as zo
from tests.helpers.activations import make_small
from tests.helpers.late_device import LateDevice
from tests.helpers.models import WIDE, TinyLM, build, tokens_of
from zero_offload.device import Handoff, HostDevice
from zero_offload.memory.arena import Arena
from zero_offload.plan.memory import ACTIVATION_BLOCKS_BACK
from zero_offload.runtime.saved import host_tier, tiers
from zero_offload.runtime.saved.host_tier import HostTier
from zero_offload.shards.disk import DiskArrays
from zero_offload.storage.directory import RunDirectory
from zero_offload.storage.engine import open_engine
from zero_offload.storage.swap_file import SwapFile
from zero_offload.telemetry.events import Counters
from zero_offload.types import MIB

offload_module = importlib.import_module("zero_offload.offload")

PLACEMENTS: list[Any] = ["cpu", "nvme", {"device": 0.3, "cpu": 0.3, "nvme": 0.4}]


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch) -> Callable[[object], None]:
    make_small(monkeypatch)

    def use(device: object) -> None:
        monkeypatch.setattr(offload_module, "compute_device", lambda: device)

    return use


def train(config: zo.OffloadConfig, is_marked: bool) -> list[float]:
    model = zo.offload(build(lambda: TinyLM(WIDE, 4)), config)
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
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_late_lanes_give_the_bits_of_the_host(
    tmp_path: Path, on_device: Callable[[object], None], precision: str, is_marked: bool
) -> None:
    on_device(HostDevice())
    expected = train(zo.OffloadConfig(precision=precision), is_marked)
    for number, activations in enumerate(PLACEMENTS):
        device = LateDevice()
        on_device(device)
        config = zo.OffloadConfig(
            activations=activations, precision=precision, nvme=tmp_path / str(number), durability="scratch"
        )
        assert train(config, is_marked) == expected, activations


# The host never reads what rests in its memory.
@pytest.mark.parametrize(("activations", "forgotten"), [("cpu", "take"), ("nvme", "take"), ("nvme", "take_on_host")])
def test_a_missing_wait_is_seen(
    tmp_path: Path,
    on_device: Callable[[object], None],
    monkeypatch: pytest.MonkeyPatch,
    activations: str,
    forgotten: str,
) -> None:
    """In the way of activations alone: the rest keeps its waits."""
    on_device(HostDevice())
    expected = train(zo.OffloadConfig(), False)
    store = importlib.import_module("zero_offload.runtime.saved.activations")

    class Careless(LateDevice):
        """Hands out copies that nobody can wait for."""

        def upload(self, target: torch.Tensor, source: torch.Tensor) -> Handoff:
            return _careless(super().upload(target, source), "take")

        def download(self, target: torch.Tensor, source: torch.Tensor, **named: Any) -> Handoff:
            return _careless(super().download(target, source, **named), "take_on_host")

    class NoWait:
        def __init__(self, event: Any) -> None:
            self.wait = event.wait if forgotten != "take" else lambda: None
            self.synchronize = event.synchronize if forgotten != "take_on_host" else lambda: None
            self.done = lambda: True

    def _careless(handoff: Handoff, kind: str) -> Handoff:
        return Handoff(handoff.tensor, NoWait(handoff.ready)) if forgotten == kind else handoff

    on_device(LateDevice())
    for name, kind in (("HostTier", host_tier.HostTier), ("DiskTier", tiers.DiskTier)):

        def careless(device: Any, *args: Any, kind: Any = kind) -> Any:
            return kind(Careless(), *args)

        monkeypatch.setattr(store, name, careless)
    monkeypatch.setattr(LateDevice, "_check_pinned", lambda self, host: None)
    config = zo.OffloadConfig(activations=activations, nvme=tmp_path / "nvme", durability="scratch")
    with pytest.warns(UserWarning):
        assert train(config, False) != expected


class HostBench:
    """The tier in host memory, without a model."""

    def __init__(self) -> None:
        self.device = LateDevice()
        self.arena = Arena(0, pinner=self.device)
        self.tier = HostTier(self.device, self.arena, Counters())

    @property
    def bytes_out(self) -> int:
        return sum(copy.target.nbytes for copy in self.device.downloads.queue)


def sources(*sizes: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(256, (size,), dtype=torch.uint8, generator=generator) for size in sizes]


def test_downloads_on_their_way_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_tier, "BYTES_OUT", 8 * MIB)
    bench = HostBench()
    there = sources(*[MIB, 3 * MIB + 5, 2 * MIB, 20 * MIB, MIB + 1, 7 * MIB, MIB] * 3)
    stored, most = [], 0
    for source in there:
        stored.append(bench.tier.put(source))
        assert bench.bytes_out <= max(8 * MIB, source.nbytes)
        most = max(most, bench.bytes_out - source.nbytes)
    assert most > 4 * MIB, "a host may launch ahead"
    for source, pieces in reversed([*zip(there, stored, strict=True)]):
        assert torch.equal(bench.tier.arrival(pieces).finish(), source)


def test_an_interrupted_wait_for_room_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_tier, "BYTES_OUT", 4 * MIB)
    bench = HostBench()
    there = sources(3 * MIB, 3 * MIB)
    first = bench.tier.put(there[0])
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(bench.device, "host_waits", _interrupt)
        bench.tier.put(there[1])
    second = bench.tier.put(there[1])
    assert bench.bytes_out == 3 * MIB
    for source, pieces in zip(there, (first, second), strict=True):
        assert torch.equal(bench.tier.arrival(pieces).finish(), source)
    assert bench.arena.num_registrations == 1


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def test_an_interrupt_between_two_copies_gives_the_blocks_back(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = HostBench()
    (source,) = sources(40 * MIB)
    download = bench.device.download
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        first = iter([download])
        patch.setattr(bench.device, "download", lambda *args: next(first, _interrupt)(*args))
        bench.tier.put(source)
    pieces = bench.tier.put(source)
    assert torch.equal(bench.tier.arrival(pieces).finish(), source)
    assert bench.arena.num_registrations == 2


def test_a_copy_per_storage_step_after_step() -> None:
    """Three of them lie in one slab; one is larger than a slab, and so in two."""
    bench = HostBench()
    there = sources(5 * MIB + 1, 2 * MIB, 9 * MIB, 40 * MIB)
    for _ in range(3):
        before = bench.device.downloads.launched
        stored = [bench.tier.put(source) for source in there]
        assert [len(pieces) for pieces in stored] == [1, 1, 1, 2]
        assert bench.device.downloads.launched - before == 5
        for source, pieces in reversed([*zip(there, stored, strict=True)]):
            assert torch.equal(bench.tier.arrival(pieces).finish(), source)
            bench.tier.release(pieces)
        assert bench.arena.num_registrations == 2


def test_blocks_of_what_nobody_read_are_used_again() -> None:
    bench = HostBench()
    (dropped, kept) = sources(3 * MIB, 3 * MIB)
    bench.tier.release(bench.tier.put(dropped))
    pieces = bench.tier.put(kept)
    arrival = bench.tier.arrival(pieces)
    arrival.start()
    arrival.abandon()
    bench.tier.release(pieces)
    pieces = bench.tier.put(dropped)
    assert torch.equal(bench.tier.arrival(pieces).finish(), dropped)
    assert pieces[0].run == range(3) and bench.arena.num_registrations == 1


@pytest.mark.parametrize("again", [True, False])
def test_a_way_back_from_a_drive_that_breaks_off_leaves_no_upload(
    again: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What gets the target's memory next, or the landing blocks', comes after it."""
    device = LateDevice()
    arena = Arena(0, pinner=device)
    with (
        RunDirectory.open(tmp_path / "nvme") as directory,
        contextlib.closing(open_engine()) as engine,
        contextlib.closing(SwapFile([directory], "activations", engine, 1)) as file,
    ):
        file.create_scratch()
        tier = tiers.DiskTier(device, arena, DiskArrays(file, Counters()))
        (source,) = sources(5 * MIB + 1)
        arrival = tier.arrival(tier.put(source))
        upload = device.upload
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            first = iter([upload, upload])
            patch.setattr(device, "upload", lambda *args: next(first, _interrupt)(*args))
            arrival.finish()
        assert len(device.uploads.queue) == 2
        if not again:
            arrival.abandon()
            assert not device.uploads.queue
        assert torch.equal(arrival.finish(), source)
        assert len(tier.landing._free) == ACTIVATION_BLOCKS_BACK
