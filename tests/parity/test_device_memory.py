"""`device_memory` on a CPU: a plan says what the units in use at once need, and with that a step runs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import zero_offload as zo
from tests.helpers.models import WIDE, TinyLM, tokens_of
from zero_offload.base.types import FRAME, MIB
from zero_offload.model.api import need_runtime
from zero_offload.runtime.units.unit import UnitState


class Scaled(nn.Module):
    """Parameters of the root's own, which are in use while its blocks are."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = TinyLM(WIDE)
        self.scale = nn.Parameter(torch.ones(600, 600))

    def forward(self, tokens: Tensor) -> Tensor:
        loss: Tensor = self.inner(tokens) * self.scale.mean()
        return loss


def config_of(nvme: Path, device_memory: int) -> zo.OffloadConfig:
    return zo.OffloadConfig(params="nvme", nvme=nvme, precision="fp32", device_memory=device_memory)


@pytest.mark.parametrize(("build", "num_frames"), [(lambda: TinyLM(WIDE), 2), (Scaled, 3)], ids=["flat", "nested"])
def test_the_least_that_a_plan_says_runs_and_less_does_not(
    build: type[nn.Module], num_frames: int, tmp_path: Path
) -> None:
    """Less is not an error of the plan: heads that work in tiles, and loading and exporting, need only a part."""
    enough = config_of(tmp_path / "nvme", num_frames * FRAME)
    less = config_of(tmp_path / "nvme", (num_frames - 1) * FRAME)
    words = f"device_memory is {num_frames * 2 - 2} MiB, units in use at once take {num_frames * 2} MiB"
    plan = zo.plan(build(), less)
    assert plan.fits and words in plan.table()
    model = zo.offload(build(), less)
    with pytest.raises(zo.CapacityError):
        model(tokens_of(0)).backward()
    zo.close(model)

    plan = zo.plan(build(), enough)
    assert plan.fits and f"device_memory holds the {num_frames * 2} MiB in use at once" in plan.table()
    model = zo.offload(build(), enough)
    optimizer = zo.AdamW(model.parameters())
    for step in range(2):
        model(tokens_of(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    zo.close(model)


def test_what_stays_in_memory_needs_none() -> None:
    assert zo.plan(TinyLM(WIDE), zo.OffloadConfig(device_memory=MIB)).fits


def test_a_step_takes_memory_from_the_units_used_last(nvme: Path) -> None:
    """The next forward begins with units whose memory is there: their values come from the update."""
    model = nn.Sequential(*[nn.Sequential(nn.Linear(1024, 1024, bias=False), nn.Tanh()) for _ in range(8)])
    zo.offload(model, config_of(nvme, 24 * MIB), units=list(model))
    optimizer = zo.AdamW(model.parameters(), lr=1e-2)
    evictor = need_runtime(model, "this test").prefetcher._evictor
    for _ in range(3):
        model(torch.ones(4, 1024)).sum().backward()
        before, evicted = _is_away(model), evictor.num_evictions
        optimizer.step()
        evicted = evictor.num_evictions - evicted
        optimizer.zero_grad()
    assert before == [True, *[False] * 6, True]  # backward has looked ahead
    assert _is_away(model) == [*[False] * 6, True, True] and evicted == 1
    zo.close(model)


def _is_away(model: nn.Module) -> list[bool]:
    """For each unit, in the order of their use, True if it has no memory."""
    return [unit.state is UnitState.AWAY for unit in need_runtime(model, "this test").units]
