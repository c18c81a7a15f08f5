"""Every way to train, on a device that is late: the bits of the plainest way, and no race."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

import zero_offload as zo
from tests.fake_gpu import device
from tests.fake_gpu.device import TYPE, Policy
from tests.fake_gpu.training import EVERY, SOME, Schedule, check_run, four_blocks, plainly, run
from tests.helpers.models import NARROW, WIDE, AttentionBlock, TinyLM, build, tokens_of
from tests.helpers.reference import read_masters
from tests.models.test_autocast import Frozen, casts

__all__ = ["casts"]

PLACEMENTS: list[dict[str, Any]] = [
    {},
    {"params": "nvme", "optimizer": "nvme"},
    {"grads": "device"},
    {"params": "device", "grads": "device", "optimizer": "device", "device_memory": None},
]


def expected(*arguments: Any, **settings: Any) -> list[Tensor]:
    """As everything in CPU memory makes it, at once."""
    device.policy(Policy.EAGER)
    return run(*arguments, **settings)


@pytest.mark.parametrize("placement", PLACEMENTS[:3], ids=str)
def test_updates_in_backward(placement: dict[str, Any]) -> None:
    check_run(expected(), overlap="backward", **placement)


def checkpointed() -> nn.Module:
    model = four_blocks()
    zo.checkpoint(list(model.blocks))  # type: ignore[arg-type]
    return model


@pytest.mark.parametrize("activations", ["device", "cpu", "nvme"])
def test_recomputed_blocks(activations: str) -> None:
    check_run(expected(), plainly, checkpointed, activations=activations)


def by_unit(model: nn.Module, tokens: Tensor, step: int) -> Tensor:
    losses: list[Tensor] = []

    def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
        losses.append(model(batch))
        return losses[-1]

    zo.accumulate(model, list(tokens.chunk(2)), loss_fn)
    return torch.stack([loss.detach() for loss in losses]).sum()


@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
def test_micro_batches_unit_by_unit(placement: dict[str, Any]) -> None:
    check_run(expected(by_unit), by_unit, **placement)


def autocast(model: nn.Module, tokens: Tensor, step: int) -> Tensor:
    with torch.autocast(TYPE, dtype=torch.bfloat16):
        return plainly(model, tokens, step)


@pytest.mark.parametrize("make", [four_blocks, partial(Frozen, NARROW, 4)])
def test_autocast(make: Callable[[], nn.Module]) -> None:
    check_run(expected(autocast, make), autocast, make)


@pytest.mark.parametrize("make", [partial(TinyLM, WIDE), partial(Frozen, WIDE)])
def test_casts_of_weights_leave_with_their_units(make: Callable[[], nn.Module], casts: list[StorageWeakRef]) -> None:
    model = zo.offload(build(make), zo.OffloadConfig(precision="fp32", device_memory="24MiB"))
    with torch.autocast(TYPE, torch.bfloat16, cache_enabled=False):
        loss = model(tokens_of(0))
    assert len(casts) == 6 and all(each.expired() for each in casts)
    loss.backward()
    zo.close(model)


def test_dropout_and_attention() -> None:
    class Noisy(TinyLM):
        def run_blocks(self, x: Tensor) -> Tensor:
            return super().run_blocks(nn.functional.dropout(x, 0.1))

    def make() -> nn.Module:
        torch.manual_seed(1)
        return Noisy(num_blocks=4, block=AttentionBlock)

    check_run(expected(plainly, make), plainly, make, activations="cpu")


def test_a_device_that_cannot_pin() -> None:
    with device.refuse_pinning(), pytest.warns(UserWarning, match="not pinned"):
        check_run(expected(), schedules=SOME[:1])


def test_the_current_device_is_the_second() -> None:
    wanted = expected()

    def body(model: nn.Module, tokens: Tensor, step: int) -> Tensor:
        assert all(param.device.index == 1 for param in model.parameters())
        return plainly(model, tokens, step)

    with device.current(1):
        check_run(wanted, body)
        assert device.counts()["launches"]


@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
@pytest.mark.parametrize("schedule", [EVERY[0], EVERY[3]], ids=str)
def test_commits_and_resume(placement: dict[str, Any], schedule: Schedule, nvme: Path) -> None:
    """A run that ends after two steps, and goes on: the bits of an uninterrupted run."""
    wanted = expected(num_steps=5, precision="bf16", **placement)
    device.policy(*schedule)
    losses: list[Tensor] = []
    for last in (2, 5):
        model = build(four_blocks)
        settings = {"precision": "bf16", "device_memory": "8MiB", "nvme": nvme, "existing": "resume"} | placement
        zo.offload(model, zo.OffloadConfig(**settings))
        optimizer = zo.AdamW(model.parameters(), lr=1e-2)
        resumed = zo.resume(model, optimizer)
        assert (0 if resumed is None else resumed.step) == len(losses)
        for step in range(len(losses), last):
            losses.append(plainly(model, tokens_of(step).to(TYPE), step).detach())
            optimizer.step()
            optimizer.zero_grad()
            zo.commit(model, optimizer)
        found = [value.cpu() for value in read_masters(model).values()]
        zo.close(model)
    assert all(torch.equal(a.cpu(), b) for a, b in zip(losses + found, wanted, strict=True))
