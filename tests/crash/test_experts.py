"""kill -9 of a run that trains experts in groups: in forward, in backward, in an update."""

from __future__ import annotations

import os
import signal
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

import zero_offload as zo
from tests.helpers.experts import experts_lm
from tests.helpers.models import build, tokens_of
from tests.helpers.reference import param_groups
from tests.helpers.trainer import DEADLINE_S, fork_server
from zero_offload.runtime.units.group_reader import GroupReader

NUM_STEPS = 4
PER_PASS = 9
"""Groups of a forward, and of a backward: three in each of three blocks."""


def opened(nvme: str | None) -> tuple[Any, zo.AdamW, int]:
    """With the step to begin at."""
    model = build(partial(experts_lm, trained=True))
    tiers = {"params": "nvme", "grads": "nvme", "optimizer": "nvme", "nvme": nvme, "existing": "resume"}
    zo.offload(model, zo.OffloadConfig(precision="bf16", **(tiers if nvme else {"durability": "scratch"})))
    optimizer = zo.AdamW(param_groups(model), lr=1e-2)
    resumed = zo.resume(model, optimizer) if nvme else None
    return model, optimizer, resumed.step if resumed else 0


def steps(model: Any, optimizer: zo.AdamW, first: int) -> list[float]:
    losses = []
    for number in range(first, NUM_STEPS):
        loss = model(tokens_of(number))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        zo.commit(model, optimizer)
        losses.append(loss.item())
    zo.close(model)
    return losses


def die_at(nth: int) -> None:
    """Let this process be killed when a group is asked for the nth time."""
    values, left = GroupReader.values, [nth]

    def dying(*args: Any, **kwargs: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return values(*args, **kwargs)

    GroupReader.values = dying  # type: ignore[method-assign]


def killed(nvme: str, nth: int) -> None:
    die_at(nth)
    model, optimizer, first = opened(nvme)
    steps(model, optimizer, first)


@cache
def whole() -> list[float]:
    model, optimizer, _ = opened(None)
    return steps(model, optimizer, 0)


@pytest.mark.parametrize(
    ("step", "group"), [(0, 5), (0, PER_PASS + 2), (1, 1), (1, PER_PASS + 1), (1, PER_PASS + 5), (2, 2 * PER_PASS)]
)
def test_a_run_that_was_killed_between_two_groups_goes_on(step: int, group: int, tmp_path: Path) -> None:
    process = fork_server().Process(target=killed, args=(str(tmp_path), step * 2 * PER_PASS + group))
    process.start()
    process.join(DEADLINE_S)
    assert process.exitcode == -signal.SIGKILL
    model, optimizer, first = opened(str(tmp_path))
    assert first in (step, max(step - 1, 0))  # the last step's commit runs beside the next forward
    assert steps(model, optimizer, first) == whole()[first:]
