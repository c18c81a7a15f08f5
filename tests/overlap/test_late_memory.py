"""A device that has no memory left when a unit's buffers want it: the step breaks off, nothing is lost, it can be run
again."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import zero_offload as zo
from tests.helpers.late_device import LateDevice
from tests.overlap.test_late_lanes import Model
from zero_offload.api import runtime_of
from zero_offload.memory.resizable import FrameBudget, ResizableBuffer
from zero_offload.runtime.units.carrier import DeviceCarrier
from zero_offload.shards.state import UnitState

offload_module: Any = importlib.import_module("zero_offload.offload")
NUM_STEPS = 4


class ShortOfMemory:
    """Storages that grow, of which one cannot, or none from that one on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lasts = False
        self.grown = 0
        self.fails_at: int | None = None
        self.failed = False
        self.steps_broken = 0
        resize = torch.UntypedStorage.resize_

        def count(storage: torch.UntypedStorage, nbytes: int) -> torch.UntypedStorage:
            if nbytes:
                self.grown += 1
                if self.fails_at is not None and self.grown > self.fails_at:
                    self.fails_at, self.failed = self.fails_at if self.lasts else None, True
                    raise torch.OutOfMemoryError("CUDA out of memory")
            return resize(storage, nbytes)

        monkeypatch.setattr(torch.UntypedStorage, "resize_", count)


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> ShortOfMemory:
    monkeypatch.setattr(offload_module, "compute_device", LateDevice)
    return ShortOfMemory(monkeypatch)


def batch(number: int) -> torch.Tensor:
    return torch.randint(0, 50, (4, 16), generator=torch.Generator().manual_seed(number))


def leaked(model: Any) -> int:
    """Frames that are counted as taken, less those under buffers."""
    parts = runtime_of(model).parts
    budget = parts.residency._budget
    buffers = [s.buffer for unit in parts.units for s in unit.sections if s.buffer is not None]
    for unit in parts.units:
        here = {s.buffer.attached for s in unit.sections if s.buffer is not None}
        assert here <= {unit.state is not UnitState.AWAY}
    return int(budget.taken - sum(buffer.num_frames for buffer in buffers if buffer.attached))


def train(short: ShortOfMemory, overlap: str, fails_in: int | None, place: int) -> Iterator[float]:
    """In step `fails_in` the device has no memory for a buffer, the one number `place`."""
    model: Any = zo.offload(Model(), zo.OffloadConfig(overlap=overlap, device_memory="8MiB"))
    optimizer = zo.AdamW(model.parameters(), lr=1e-2)

    def step(number: int) -> float:
        loss = model(batch(number))
        loss.backward()
        zo.clip_grad_norm_(model, 0.5)
        optimizer.step()
        optimizer.zero_grad()
        return float(loss.item())

    for number in range(NUM_STEPS):
        if number == fails_in:
            short.grown, short.fails_at = 0, place
        try:
            loss = step(number)
        except torch.OutOfMemoryError:
            short.fails_at = None
            optimizer.zero_grad()
            short.steps_broken += 1
            assert leaked(model) == 0
            loss = step(number)
        short.fails_at = None
        assert leaked(model) == 0
        yield loss
    with torch.no_grad():
        yield float(model(batch(99)).item())
    zo.close(model)


@pytest.mark.parametrize("lasts", [False, True])
@pytest.mark.parametrize("overlap", ["forward", "none"])
def test_a_step_without_memory_can_be_run_again(short: ShortOfMemory, overlap: str, lasts: bool) -> None:
    """Whichever buffer it was for; units have up to two. No step breaks off for what is only ahead."""
    short.lasts = lasts
    expected = list(train(short, overlap, None, 0))
    places = 0
    while True:
        short.failed = False
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "the last backward was left by an exception")
            found = list(train(short, overlap, 2, places))
        assert found == expected, places
        if not short.failed:
            break
        places += 1
    assert short.steps_broken > 3 if lasts else short.steps_broken == 0


def test_a_buffer_without_memory_takes_no_frames(short: ShortOfMemory) -> None:
    budget = FrameBudget(1, 1)
    tensor = torch.zeros(100)
    buffer = ResizableBuffer(budget, tensor)
    short.fails_at = short.grown
    with pytest.raises(torch.OutOfMemoryError):
        buffer.attach()
    assert budget.free_frames == 1 and not buffer.attached
    assert buffer.attach() and budget.free_frames == 0
    buffer.detach()


def test_what_is_addressable_goes_when_its_use_breaks_off() -> None:
    tensor = torch.zeros(100)
    buffer = ResizableBuffer(FrameBudget(1, 1), tensor)
    with pytest.raises(KeyboardInterrupt), buffer.addressable():
        raise KeyboardInterrupt
    assert tensor.untyped_storage().nbytes() == 0


@pytest.mark.parametrize("error", [KeyboardInterrupt, zo.CapacityError])
def test_a_fetch_that_is_launched_in_part_is_launched_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any, error: type[BaseException]
) -> None:
    """The second section of a unit breaks off."""
    monkeypatch.setattr(offload_module, "compute_device", LateDevice)
    model: Any = zo.offload(Model(), zo.OffloadConfig(params="nvme", nvme=tmp_path, durability="scratch"))
    expected = model(batch(0)).item()
    unit = next(unit for unit in runtime_of(model).parts.units if len(unit.sections) > 1)
    runtime_of(model).parts.residency.forget(unit)
    launch_reads, calls = DeviceCarrier._launch_reads, []

    def break_off(self: DeviceCarrier, section: Any, *args: Any) -> Any:
        if section in unit.sections:
            calls.append(section)
            if len(calls) == 2:
                raise error("in a launch")
        return launch_reads(self, section, *args)

    monkeypatch.setattr(DeviceCarrier, "_launch_reads", break_off)
    with pytest.raises(error, match="in a launch"):
        model(batch(0))
    assert model(batch(0)).item() == expected
    assert len(calls) == 4
    zo.close(model)
