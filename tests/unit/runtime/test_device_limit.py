"""How far parameters grow into a device's memory, and when they leave it: decisions on figures of an allocator."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from zero_offload.base.types import FRAME, GIB
from zero_offload.hardware.device import DeviceMemory
from zero_offload.plan.memory import margin_bytes
from zero_offload.runtime import device_limit
from zero_offload.runtime.device_limit import DeviceLimit
from zero_offload.storage.memory.resizable import FrameBudget

UNITS, LEAST = 20, 6
TOTAL = 24 * GIB
MARGIN = margin_bytes(TOTAL, 1, is_measured=True)


@dataclass(frozen=True)
class _Unit:
    num_frames: int = 2


@dataclass
class _Others:
    """Ranks beside this one, with a limit of their own."""

    limit: int
    asked: int = 0

    def least(self, number: int, what: str) -> int:
        self.asked += 1
        return min(number, self.limit)


class Machine:
    """An allocator with figures that a test sets, and a limit on it."""

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        others: _Others | None = None,
        *,
        grows: bool = True,
        num_units: int = UNITS,
    ) -> None:
        self.memory = DeviceMemory(TOTAL, TOTAL, 0, 0, 0, 0, 0)
        self.num_resets = 0
        monkeypatch.setattr(device_limit, "read_memory", lambda device: self.memory)
        monkeypatch.setattr(device_limit, "reset_peak", self._reset_peak)
        monkeypatch.setattr(device_limit, "refuse_capture", lambda device: None)
        self.budget = FrameBudget(LEAST, 1 << 40, LEAST)
        units: Any = [_Unit()] * num_units
        agreement: Any = others
        self.limit = DeviceLimit(torch.device("cuda", 0), self.budget, units, agreement, 1, grows=grows)

    def _reset_peak(self, device: torch.device) -> None:
        self.num_resets += 1
        self.memory = self.memory._replace(peak=self.memory.reserved, peak_allocated=self.memory.allocated)

    def begin(self, kind: str = "grad", num_elements: int = 100, *, has_departed: bool = False) -> bool:
        if self.limit.begin(kind, num_elements, has_departed=has_departed):
            self.limit.reset_peaks()
            return True
        return False

    def step(self, spare: int, activations: int = GIB, num_elements: int = 100, *, has_departed: bool = False) -> int:
        """Forward, backward, update, at whose peak so many bytes beyond the margin were free; the frames in it."""
        self.begin(num_elements=num_elements, has_departed=has_departed)
        frames = self.budget.frame_limit
        self.memory = self.memory._replace(
            peak=TOTAL - MARGIN - spare, peak_allocated=self.memory.allocated + activations
        )
        self.limit.stepped()
        return frames


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


@pytest.mark.parametrize("spare", [0, 7 * FRAME, 7 * FRAME + 1, 1000 * FRAME, -5 * FRAME])
def test_the_second_step_has_what_the_first_one_left(machine: Machine, spare: int) -> None:
    assert machine.step(spare) == LEAST
    assert machine.step(0) == min(max(LEAST + spare // FRAME, LEAST), 2 * UNITS)
    assert machine.limit.params.reason == ""


def test_the_limit_does_not_rise_again(machine: Machine) -> None:
    machine.step(4 * FRAME)
    machine.step(100 * FRAME)
    assert [machine.step(100 * FRAME) for _ in range(3)] == [LEAST + 4] * 3


def test_a_forward_without_an_update_is_no_step(machine: Machine) -> None:
    """As with accumulated gradients: the peak is that of the whole step."""
    machine.begin()
    machine.memory = machine.memory._replace(peak=GIB)
    assert not machine.begin() and machine.budget.frame_limit == LEAST
    machine.step(3 * FRAME)
    machine.begin()
    assert machine.budget.frame_limit == LEAST + 3


def test_an_evaluation_is_measured_by_a_forward_and_training_anew(machine: Machine) -> None:
    machine.begin("no_grad")
    machine.memory = machine.memory._replace(peak=GIB)
    machine.begin("no_grad")
    assert machine.budget.frame_limit == 2 * UNITS
    assert machine.begin("grad") and machine.budget.frame_limit == LEAST
    machine.limit.stepped()
    machine.memory = machine.memory._replace(peak=TOTAL - MARGIN - 2 * FRAME)
    machine.begin("no_grad")
    assert machine.budget.frame_limit == LEAST
    machine.begin("grad")
    assert machine.budget.frame_limit == LEAST + 2


def test_larger_inputs_lower_it_before_their_forward(machine: Machine) -> None:
    machine.step(20 * FRAME, activations=100 * FRAME)
    machine.step(0)
    assert machine.step(0, num_elements=101) == LEAST + 20 - 1  # activations of 101 frames
    assert machine.step(0, num_elements=105) == LEAST + 20 - 5
    assert machine.step(0, num_elements=101) == LEAST + 20 - 5
    assert machine.step(0, num_elements=1000) == LEAST
    assert "inputs are larger" in machine.limit.params.reason


def test_larger_inputs_take_what_is_spare_first(machine: Machine) -> None:
    machine.step(20 * FRAME, activations=100 * FRAME)
    machine.step(3 * FRAME)
    assert machine.step(0, num_elements=104) == LEAST + 20 - 1


def test_an_evaluation_on_larger_inputs_keeps_no_activations(machine: Machine) -> None:
    machine.step(20 * FRAME, activations=100 * FRAME)
    machine.step(0)
    assert not machine.begin("no_grad", 200)
    assert machine.budget.frame_limit == LEAST + 20


@pytest.mark.parametrize("share", [0.4, 0.6])
def test_half_of_the_margin_may_be_taken(machine: Machine, share: float) -> None:
    machine.step(1000 * FRAME)
    machine.step(-int(share * MARGIN))
    before, num_resets = machine.budget.frame_limit, machine.num_resets
    taken = -(-int(0.6 * MARGIN) // FRAME)
    assert machine.begin() == (share > 0.5)
    assert machine.budget.frame_limit == (max(before - taken, LEAST) if share > 0.5 else before)
    assert machine.num_resets == num_resets + (share > 0.5)
    assert machine.budget.frame_limit == before or "less memory" in machine.limit.params.reason


def test_what_another_process_takes_lowers_it(machine: Machine) -> None:
    machine.step(1000 * FRAME)
    machine.step(FRAME)
    machine.memory = machine.memory._replace(free=TOTAL - 2 * GIB)
    assert machine.begin() and machine.budget.frame_limit == LEAST


def test_a_departure_takes_half_of_what_was_gained(machine: Machine) -> None:
    machine.step(16 * FRAME)
    machine.step(0)
    limits = [machine.step(0, has_departed=True) - LEAST for _ in range(6)]
    assert limits == [8, 4, 2, 1, 0, 0]
    assert machine.step(100 * FRAME) == LEAST and "departed" in machine.limit.params.reason


def test_a_departure_of_an_evaluation_does_not_count(machine: Machine) -> None:
    machine.step(16 * FRAME)
    machine.step(0)
    machine.begin("no_grad")
    assert machine.step(0, has_departed=True) == LEAST + 16


def test_an_out_of_memory_leaves_what_uses_need_and_says_so_once(machine: Machine) -> None:
    machine.step(16 * FRAME)
    machine.step(0)
    machine.memory = machine.memory._replace(num_ooms=1)
    with pytest.warns(UserWarning, match=r"ran out of memory: parameters keep at most 12 MiB .* not 44 MiB"):
        assert machine.begin()
    assert machine.budget.frame_limit == LEAST
    machine.memory = machine.memory._replace(num_ooms=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert machine.step(1000 * FRAME) == machine.step(1000 * FRAME) == LEAST


def test_an_out_of_memory_in_the_first_step_is_measured_again(machine: Machine) -> None:
    """A program looks for the largest batch that fits."""
    machine.step(-GIB, num_elements=1 << 20)
    machine.memory = machine.memory._replace(num_ooms=1)
    assert machine.begin(num_elements=100)
    machine.limit.stepped()
    machine.memory = machine.memory._replace(peak=TOTAL - MARGIN - 9 * FRAME)
    assert machine.step(0) == LEAST + 9


def test_a_refused_prefetch_makes_the_margin_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    frames = -(-MARGIN // FRAME)
    machine = Machine(monkeypatch, num_units=frames)
    machine.step(2 * frames * FRAME)
    machine.step(0)
    machine.budget.take(frames + 9)
    machine.memory = machine.memory._replace(num_ooms=1)
    with pytest.warns(UserWarning, match="in a prefetch"):
        machine.limit.ran_out()
    assert machine.budget.frame_limit == 9
    machine.budget.release(frames)
    assert machine.step(0) == machine.step(0) == 9, "counted twice"
    machine.limit.ran_out()
    assert machine.budget.frame_limit == LEAST


def test_a_limit_that_was_given_only_falls_with_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch, grows=False)
    machine.budget.raise_limit(10)
    machine.budget.least = LEAST
    assert [machine.step(-GIB, num_elements=1 << i, has_departed=True) for i in range(4)] == [LEAST + 10] * 4
    assert machine.num_resets == 0
    machine.memory = machine.memory._replace(num_ooms=1)
    with pytest.warns(UserWarning):
        assert machine.step(0) == LEAST


def test_ranks_that_gather_have_the_least_of_their_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    others = _Others(LEAST + 5)
    machine = Machine(monkeypatch, others)
    machine.step(16 * FRAME)
    assert machine.step(0) == LEAST + 5 and machine.limit.params.reason == ""
    others.limit = LEAST + 2
    assert machine.step(0) == LEAST + 2 and "another rank" in machine.limit.params.reason
    asked = others.asked
    assert not machine.begin("no_grad") and others.asked == asked, "an evaluation may be one rank's affair"


def test_units_that_are_added_are_measured_anew(machine: Machine) -> None:
    machine.step(4 * FRAME)
    machine.step(0)
    machine.limit.measure()
    assert machine.step(8 * FRAME) == LEAST
    assert machine.step(0) == LEAST + 8


def test_what_cannot_be_measured_stays_as_it_is(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_limit, "read_memory", lambda device: None)
    assert not any(machine.begin() for _ in range(3)) and machine.budget.frame_limit == LEAST
    with pytest.warns(UserWarning):
        machine.budget.raise_limit(3)
        machine.budget.least = LEAST
        machine.limit.ran_out()
    assert machine.budget.frame_limit == LEAST


def test_a_need_raises_what_the_limit_falls_to() -> None:
    budget = FrameBudget(6, 1 << 40)
    budget.take(6)
    budget.raise_limit(4)
    budget.limit_to(0)
    assert budget.frame_limit == 10
