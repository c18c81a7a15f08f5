"""Each step of the device code that keeps streams in order is taken out once: a race or other numbers must follow."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.fake_gpu import device
from tests.fake_gpu.device import TYPE, Policy
from tests.fake_gpu.training import EVERY, Schedule, muon, plainly, run
from zero_offload.hardware.device import AcceleratorDevice, Event, Handoff
from zero_offload.optim.device_sections import DeviceSection
from zero_offload.runtime.units.param_loader import UnitStreams

Program = Callable[[], list[Tensor]]


# Programs: what they return must not depend on the policy


def on_two_streams(model: nn.Module, tokens: Tensor, step: int) -> Tensor:
    """Odd steps on a stream of the program's, ordered as a program must."""
    if step % 2 == 0:
        return plainly(model, tokens, step)
    here, side = torch.accelerator.current_stream(), torch.Stream(device=TYPE)
    side.wait_stream(here)
    with side:
        loss = plainly(model, tokens, step)
    here.wait_stream(side)
    loss.record_stream(here)
    return loss


def evaluated_beside(model: nn.Module, tokens: Tensor, step: int) -> Tensor:
    """Between forward and backward an evaluation on another stream."""
    loss: Tensor = model(tokens)
    here, side = torch.accelerator.current_stream(), torch.Stream(device=TYPE)
    side.wait_stream(here)
    with side, torch.no_grad():
        model(tokens)
    loss.backward()
    here.wait_stream(side)
    return loss


of = functools.partial

PROGRAMS: dict[str, Program] = {
    "cpu": of(run, plainly),
    "drive": of(run, plainly, params="nvme", optimizer="nvme"),
    "gradients on the device": of(run, plainly, grads="device"),
    "activations": of(run, plainly, activations="cpu"),
    "two streams": of(run, on_two_streams),
    "evaluated beside": of(run, evaluated_beside),
    "stepped there": of(run, plainly, step_with=muon),
    "stepped there, on a drive": of(run, plainly, step_with=muon, optimizer="nvme", grads="nvme"),
    "stepped and at rest there": of(run, plainly, step_with=muon, optimizer="device", device_memory=None),
}


# Mutations


def nothing(*args: Any, **kwargs: Any) -> None:
    """In the place of a call whose result is not used."""


def take_without_wait(self: Handoff) -> Tensor:
    return self.tensor


def early_end(copy: Callable[..., Any]) -> Callable[..., Any]:
    """The event of a copy is recorded before it."""

    def mutated(self: Any, lane: Any, target: Tensor, source: Tensor, after: Any) -> Any:
        before = self._recorded(self._uploads if target.device.type == TYPE else self._downloads)
        copy(self, lane, target, source, after)
        return Event(before, self)

    return mutated


def without_mark(copy: Callable[..., Any], is_upload: bool) -> Callable[..., Any]:
    """Copies in one direction do not wait for compute."""

    def mutated(self: Any, lane: Any, target: Tensor, source: Tensor, after: Any) -> Any:
        if (target.device.type == TYPE) == is_upload:
            after = Event(torch.Event(device=TYPE), self)
        return copy(self, lane, target, source, after)

    return mutated


def on_one_stream(copy: Callable[..., Any]) -> Callable[..., Any]:
    """Copies are launched on the stream that computes, and their events recorded where they are not."""

    def mutated(self: Any, lane: Any, target: Tensor, source: Tensor, after: Any) -> Any:
        target.copy_(source, non_blocking=True)
        return Event(self._recorded(self._uploads), self)

    return mutated


MUTATIONS: dict[str, tuple[type, str, Any, str]] = {
    "a download's source is not marked": (Tensor, "record_stream", nothing, "activations"),
    "compute takes without a wait": (Handoff, "take", take_without_wait, "cpu"),
    "the host takes without a wait": (Handoff, "take_on_host", take_without_wait, "cpu"),
    "no wait of a stream": (Event, "let_wait", nothing, "cpu"),
    "no wait of the host": (Event, "synchronize", nothing, "cpu"),
    "uploads begin too early": (AcceleratorDevice, "_copy", functools.partial(without_mark, is_upload=True), "cpu"),
    "downloads begin too early": (AcceleratorDevice, "_copy", functools.partial(without_mark, is_upload=False), "cpu"),
    "a copy's event comes before it": (AcceleratorDevice, "_copy", early_end, "cpu"),
    "copies on the stream that computes": (AcceleratorDevice, "_copy", on_one_stream, "cpu"),
    "a unit in memory is used without a wait": (UnitStreams, "use", nothing, "evaluated beside"),
    "a unit leaves streams that still use it": (UnitStreams, "release", nothing, "evaluated beside"),
    "an optimizer of others takes without a wait": (Handoff, "take", take_without_wait, "stepped there"),
    "it goes on before its downloads have ended": (DeviceSection, "wait_on_host", nothing, "stepped there"),
    "the next gradients come to memory that goes up": (Event, "synchronize", nothing, "stepped there, on a drive"),
}
WRAPPED = (early_end, on_one_stream)


def is_wrapper(replacement: Any) -> bool:
    return isinstance(replacement, functools.partial) or replacement in WRAPPED


def wrong(program: Program, expected: list[Tensor], schedule: Schedule) -> list[str]:
    """Problems under a schedule."""
    device.policy(*schedule)
    found = []
    try:
        same = all(torch.equal(a, b) for a, b in zip(program(), expected, strict=True))
        found += [] if same else ["other numbers"]
    except Exception as error:
        found.append(f"{type(error).__name__}: {error}")
    return found + device.take_races()


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_are_right_as_they_are(name: str) -> None:
    device.policy(Policy.EAGER)
    expected = PROGRAMS[name]()
    assert [wrong(PROGRAMS[name], expected, schedule) for schedule in EVERY[::2]] == [[]] * 3


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_mutation_is_seen(mutation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, method, replacement, name = MUTATIONS[mutation]
    device.policy(Policy.EAGER)
    expected = PROGRAMS[name]()
    new = replacement(getattr(owner, method)) if is_wrapper(replacement) else replacement
    monkeypatch.setattr(owner, method, new)
    found = any(wrong(PROGRAMS[name], expected, schedule) for schedule in EVERY)
    monkeypatch.undo()
    assert found
