"""The device has no memory left when a unit's buffers want it: the step breaks off, nothing is lost, it can be run
again."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import zero_offload as zo
from tests.helpers.models import TinyLM, build, tokens_of
from zero_offload.model.api import runtime_of
from zero_offload.runtime.units.param_loader import DeviceParamLoader
from zero_offload.runtime.units.unit import UnitState

pytestmark = pytest.mark.usefixtures("late")

NUM_STEPS = 2
make = partial(TinyLM, num_blocks=6)


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
                    raise torch.OutOfMemoryError("fakegpu out of memory")
            return resize(storage, nbytes)

        monkeypatch.setattr(torch.UntypedStorage, "resize_", count)


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> ShortOfMemory:
    return ShortOfMemory(monkeypatch)


def leaked(model: Any) -> int:
    """Frames that are counted as taken, less those under buffers."""
    runtime = runtime_of(model)
    for unit in runtime.units:
        here = {s.buffer.attached for s in unit.sections if s.buffer is not None}
        assert here <= {unit.state is not UnitState.AWAY}
    buffers = [s.buffer for unit in runtime.units for s in unit.sections if s.buffer is not None]
    return int(runtime.prefetcher._budget.taken - sum(buffer.num_frames for buffer in buffers if buffer.attached))


def train(short: ShortOfMemory, overlap: str, fails_in: int | None, place: int) -> Iterator[float]:
    """In step `fails_in` the device has no memory for a buffer, the one number `place`."""
    model = zo.offload(build(make), zo.OffloadConfig(overlap=overlap, device_memory="8MiB"))
    optimizer = zo.AdamW(model.parameters(), lr=1e-2)

    def step(number: int) -> float:
        loss = model(tokens_of(number))
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
        yield float(model(tokens_of(99)).item())
    zo.close(model)


@pytest.mark.parametrize(("overlap", "lasts"), [("forward", False), ("none", True)])
def test_a_step_without_memory_can_be_run_again(short: ShortOfMemory, overlap: str, lasts: bool) -> None:
    """Whichever buffer it was for. No step breaks off for what is only ahead."""
    short.lasts = lasts
    expected = list(train(short, overlap, None, 0))
    places = 0
    while True:
        short.failed = False
        with warnings.catch_warnings():
            for words in ("the last backward was left by an exception", "the device ran out of memory"):
                warnings.filterwarnings("ignore", words)
            found = list(train(short, overlap, 1, places))
        assert found == expected, places
        if not short.failed:
            break
        places += 1
    assert places > 5
    assert short.steps_broken > 3 if lasts else short.steps_broken == 0


@pytest.mark.parametrize("error", [KeyboardInterrupt, zo.CapacityError])
def test_a_fetch_that_is_launched_in_part_is_launched_again(
    error: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second section of a unit breaks off."""
    model: Any = build(make)
    model.blocks[1].up.requires_grad_(False)
    zo.offload(model, zo.OffloadConfig(params="nvme", nvme=tmp_path, durability="scratch"))
    expected = model(tokens_of(0)).item()
    unit = next(unit for unit in runtime_of(model).units if len(unit.sections) > 1)
    runtime_of(model).prefetcher.invalidate(unit)
    launch_reads, calls = DeviceParamLoader._launch_reads, []

    def break_off(self: DeviceParamLoader, section: Any, *args: Any) -> Any:
        if section in unit.sections:
            calls.append(section)
            if len(calls) == 2:
                raise error("in a launch")
        return launch_reads(self, section, *args)

    monkeypatch.setattr(DeviceParamLoader, "_launch_reads", break_off)
    with pytest.raises(error, match="in a launch"):
        model(tokens_of(0))
    assert model(tokens_of(0)).item() == expected
    assert len(calls) == 4
    zo.close(model)
