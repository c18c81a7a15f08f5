"""Ctrl-C during a backward on a GPU, which runs on a thread of autograd's: it is raised when that backward is over."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import zero_offload as zo
from tests.fake_gpu import device
from tests.fake_gpu.device import TYPE, Policy
from tests.helpers.models import TinyLM, build, tokens_of

PLACEMENTS: dict[str, dict[str, Any]] = {
    "cpu": {},
    "device": {"params": "device", "grads": "device", "optimizer": "device"},
    "nvme": {"params": "nvme", "optimizer": "nvme", "durability": "scratch"},
    "activations": {"activations": "cpu"},
}


class Interrupted(torch.autograd.Function):
    """Sends this process a Ctrl-C in its backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        os.kill(os.getpid(), signal.SIGINT)
        return grad


def train(interrupted: int, then: str, **settings: Any) -> tuple[list[float], list[int]]:
    """Losses, norms and masters; at which steps the interrupt was raised."""
    model = zo.offload(build(TinyLM), zo.OffloadConfig(precision="fp32", **settings))
    optimizer = zo.AdamW(model.parameters(), lr=1e-2)
    middle = model.blocks[1]
    found, raised = [], []
    step = 0
    while step < 4:
        hook = None
        if step == interrupted:
            hook = middle.register_forward_hook(lambda module, inputs, output: Interrupted.apply(output))
        loss = model(tokens_of(step).to(TYPE))
        try:
            loss.backward()
        except KeyboardInterrupt:
            raised.append(step)
            if then == "again":
                optimizer.zero_grad()
                hook.remove()
                interrupted = -1
                continue
        finally:
            if hook is not None:
                hook.remove()
        found += [loss.item(), zo.clip_grad_norm_(model, 1.0).item()]
        optimizer.step()
        optimizer.zero_grad()
        step += 1
    with zo.gathered(model, kind="master") as masters:
        found += [master.double().sum().item() for master in masters.values()]
    zo.close(model)
    return found, raised


@pytest.mark.parametrize("then", ["on", "again"])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_it_is_raised_after_the_backward_whose_gradients_are_whole(placement: str, then: str, tmp_path: Path) -> None:
    """A program that catches it takes the step, or runs it again: the bits are those of a run without it."""
    settings = PLACEMENTS[placement] | ({"nvme": tmp_path} if placement == "nvme" else {})
    expected, _ = train(-1, then, **settings)
    device.policy(Policy.LATE)
    assert train(2, then, **settings) == (expected, [2])
