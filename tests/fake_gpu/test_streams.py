"""A program computes on streams of its own: each of them waits for a unit, and memory goes back after its last use.

Launches in the right order for plain tensors are right for offloaded ones, whatever moves in between.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero_offload as zo
from tests.fake_gpu import device
from tests.fake_gpu.device import LATE, TYPE, Policy
from tests.helpers.experts import experts_lm
from tests.helpers.models import Block, TinyLM, build, tokens_of
from tests.helpers.reference import read_masters
from zero_offload.model.api import runtime_of

Step = Callable[[nn.Module, Tensor, list[torch.Stream]], Tensor]
SMALL = {"device_memory": "8MiB"}
"""Units come and go."""
PLACEMENTS: list[dict[str, Any]] = [
    {"params": "cpu", **SMALL},
    {"params": "device"},
    {"params": "nvme", "optimizer": "nvme", **SMALL},
    {"params": "cpu", "grads": "device", **SMALL},
]
make = partial(TinyLM, num_blocks=4)


def join(streams: list[torch.Stream]) -> None:
    """The current stream waits for these."""
    for stream in streams:
        torch.accelerator.current_stream().wait_stream(stream)


def fork(streams: list[torch.Stream]) -> None:
    """These wait for the current stream."""
    for stream in streams:
        stream.wait_stream(torch.accelerator.current_stream())


def evaluate_beside(model: nn.Module, tokens: Tensor, streams: list[torch.Stream]) -> Tensor:
    loss = model(tokens)
    fork(streams[:1])
    with streams[0], torch.no_grad():
        model(tokens)
    loss.backward()
    join(streams[:1])
    return loss


def evaluate_on_two(model: nn.Module, tokens: Tensor, streams: list[torch.Stream]) -> Tensor:
    fork(streams)
    for stream in (streams[1], streams[0], streams[1]):
        with stream, torch.no_grad():
            model(tokens)
    loss = model(tokens)
    loss.backward()
    join(streams)
    return loss


def forward_aside(model: nn.Module, tokens: Tensor, streams: list[torch.Stream]) -> Tensor:
    fork(streams[:1])
    with streams[0]:
        loss = model(tokens)
    join(streams[:1])
    loss.record_stream(torch.accelerator.current_stream())
    loss.backward()
    return loss


def backward_aside(model: nn.Module, tokens: Tensor, streams: list[torch.Stream]) -> Tensor:
    loss = model(tokens)
    fork(streams[1:])
    with streams[1]:
        loss.backward()
    join(streams[1:])
    return loss


def read_aside(model: Any, tokens: Tensor, streams: list[torch.Stream]) -> Tensor:
    loss = model(tokens)
    fork(streams[:1])
    for block in model.blocks:
        with streams[0], zo.gathered(block) as params:
            for param in params.values():
                param.detach().sum()
    loss.backward()
    join(streams[:1])
    return loss


def on_one(model: nn.Module, tokens: Tensor, streams: list[torch.Stream]) -> Tensor:
    loss = model(tokens)
    loss.backward()
    return loss


def train(step: Step, make: Callable[[], nn.Module] = make, **settings: Any) -> list[Any]:
    model = zo.offload(build(make), zo.OffloadConfig(precision="fp32", **settings))
    optimizer = zo.AdamW(model.parameters(), lr=1e-2)
    streams, found = [torch.Stream(device=TYPE) for _ in range(2)], list[Any]()
    for number in range(3):
        found.append(step(model, tokens_of(number).to(TYPE), streams).item())
        found.append(zo.clip_grad_norm_(model, 1.0).item())
        optimizer.step()
        optimizer.zero_grad()
    found.append({name: value.tolist() for name, value in read_masters(model).items()})
    assert not any(unit.in_use for unit in runtime_of(model).units)
    zo.close(model)
    return found


STEPS = [evaluate_beside, evaluate_on_two, forward_aside, backward_aside, read_aside]


@pytest.mark.parametrize(
    ("step", "settings", "policy"),
    [(step, PLACEMENTS[i], LATE[(i + j) % 4]) for j, step in enumerate(STEPS) for i in (j % 4, (j + 1) % 4)],
)
def test_streams_of_the_programs_own(step: Step, settings: dict[str, Any], policy: Policy, nvme: Path) -> None:
    expected = train(on_one)
    device.policy(policy, 1)
    assert train(step, nvme=nvme, durability="scratch", **settings) == expected


@pytest.mark.parametrize("policy", LATE)
def test_a_module_may_change_streams_in_its_forward(policy: Policy) -> None:
    """In training each operation that saves a parameter waits for it on its own stream."""
    side = torch.Stream(device=TYPE)

    class Branched(Block):
        def forward(self, x: Tensor) -> Tensor:
            fork([side])
            with side:
                x.record_stream(side)
                hidden = self.up(self.norm(x))
            join([side])
            hidden.record_stream(torch.accelerator.current_stream())
            return x + self.down(torch.relu(hidden))

    class Straight(Block):
        def forward(self, x: Tensor) -> Tensor:
            return x + self.down(torch.relu(self.up(self.norm(x))))

    expected = train(on_one, partial(make, block=Straight))
    device.policy(policy, 1)
    assert train(on_one, partial(make, block=Branched), **SMALL) == expected


@pytest.mark.parametrize("policy", LATE)
@pytest.mark.parametrize("step", [forward_aside, backward_aside])
def test_slices_of_gradients_leave_streams_of_the_programs_own(step: Step, policy: Policy) -> None:
    grouped = partial(experts_lm, trained=True)
    expected = train(on_one, grouped)
    device.policy(policy, 1)
    assert train(step, grouped, params="cpu", grads="cpu", durability="scratch") == expected
