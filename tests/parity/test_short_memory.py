"""Memory that a model takes after `zo.offload`: an error comes before the kernel kills the process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zero_offload as zo
from tests.helpers.models import WIDE, TinyLM, build, tokens_of
from tests.helpers.short_memory import check_sums_without_memory, memory_left
from zero_offload.base.types import MIB, Tier

PLACES: dict[str, dict[str, Any]] = {
    "in memory": {},
    "streamed": {"params": "nvme", "optimizer": "nvme", "device_memory": "8MiB"},
}


@pytest.mark.parametrize("resumes", [False, True], ids=["again", "resumed"])
@pytest.mark.parametrize("place", PLACES)
def test_sums_of_micro_batches_without_memory_are_one_error(place: str, resumes: bool, tmp_path: Path) -> None:
    check_sums_without_memory(tmp_path, left=MIB, resumes=resumes, **PLACES[place])


def backwards(model: nn.Module, count: int) -> None:
    for number in range(count):
        model(tokens_of(number)).backward()


def test_sums_of_micro_batches_stay_within_cpu_memory() -> None:
    """Memory for a plan of as many micro-batches is enough; memory for a plan of one is not."""
    one, two = (zo.plan(TinyLM(WIDE, 6), zo.OffloadConfig(), micro_batches=count).used_bytes for count in (1, 2))
    enough, less = (used(Tier.CPU) + used(Tier.DEVICE) for used in (two, one))
    model = zo.offload(build(lambda: TinyLM(WIDE, 6)), zo.OffloadConfig(cpu_memory=less))
    optimizer = zo.AdamW(model.parameters())
    backwards(model, 1)
    optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(zo.CapacityError, match=r"fp32 sums .* cpu_memory= allows .*Raise it .*micro_batches=2"):
        backwards(model, 2)
    zo.close(model)
    model = zo.offload(build(lambda: TinyLM(WIDE, 6)), zo.OffloadConfig(cpu_memory=enough))
    optimizer = zo.AdamW(model.parameters())
    for _ in range(2):
        backwards(model, 2)
        optimizer.step()
        optimizer.zero_grad()
    zo.close(model)


def test_gradients_that_an_update_in_backward_does_not_take_are_beyond_its_plan() -> None:
    config = zo.OffloadConfig(overlap="backward")
    plan = zo.plan(TinyLM(WIDE, 6), config)
    model = zo.offload(
        build(lambda: TinyLM(WIDE, 6)), zo.OffloadConfig(overlap="backward", cpu_memory=plan_bytes(plan))
    )
    optimizer = zo.AdamW(model.parameters())
    backwards(model, 1)
    optimizer.step()
    optimizer.zero_grad()
    with zo.no_sync(model), pytest.raises(zo.CapacityError, match="cpu_memory= allows .*overlap="):
        backwards(model, 1)
    zo.close(model)


def plan_bytes(plan: Any) -> int:
    return int(plan.used_bytes(Tier.CPU) + plan.used_bytes(Tier.DEVICE))


def test_states_that_are_not_filled_yet_leave_no_memory_for_gradients() -> None:
    """Before the first update moments are pages that the system counts as free."""
    numel = sum(param.numel() for param in TinyLM(512, 4).parameters())
    model = zo.offload(build(lambda: TinyLM(512, 4)), zo.OffloadConfig())
    zo.AdamW(model.parameters())
    with memory_left(8 * numel, model), pytest.raises(zo.CapacityError, match="for states that are not filled yet"):
        backwards(model, 2)
    zo.close(model)


@pytest.mark.parametrize("kind", ["master", "grads"])
def test_copies_of_a_whole_model_are_refused_where_they_have_no_room(kind: str) -> None:
    model = zo.offload(build(TinyLM), zo.OffloadConfig())
    backwards(model, 1)
    numel = sum(param.numel() for param in TinyLM().parameters())
    with memory_left(4 * numel - 1, model), pytest.raises(zo.CapacityError, match=f'kind="{kind}".* module by module'):
        zo.gathered(model, kind=kind).__enter__()
    with memory_left(4 * numel + MIB, model), zo.gathered(model, kind=kind) as values:
        assert sum(value.numel() for value in values.values()) == numel and all(
            map(torch.isfinite, [values_sum(values)])
        )
    zo.close(model)


def values_sum(values: Any) -> torch.Tensor:
    return sum(value.sum() for value in values.values())  # type: ignore[no-any-return]
