"""Which units are held when, seen from outside: the order of uses, and that every use ends."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import zero_offload as zo
from tests.helpers.models import WIDE, Block, TinyLM, build, tokens_of
from tests.helpers.reference import placed
from zero_offload.api import runtime_of
from zero_offload.offloaded_model import OffloadedModel
from zero_offload.runtime.guard import GuardedParameter
from zero_offload.runtime.session import InputsWatch
from zero_offload.shards.state import UnitState


def offloaded(nvme: Path, make: object = partial(TinyLM, WIDE)) -> tuple[nn.Module, OffloadedModel]:
    model = zo.offload(build(make), placed("fp32", ("nvme", "cpu", "nvme"), nvme, "8MiB"))
    owner = runtime_of(model)
    assert owner is not None
    return model, owner


def in_use(owner: OffloadedModel) -> list[str]:
    return [unit.name for unit in owner.parts.units if unit.in_use]


def uses(owner: OffloadedModel) -> list[str]:
    """Names in the order of the cycle that just ended."""
    schedule = owner.parts.residency.schedule
    schedule.begin_cycle("grad")
    return [owner.parts.units[i].name for i in schedule.trace.uses]


def test_a_cycle_goes_there_and_back(nvme: Path) -> None:
    model, owner = offloaded(nvme)
    model(tokens_of(0)).backward()
    names = list(dict.fromkeys(uses(owner)))
    order = uses(owner)
    assert names == ["(small)", "blocks.0", "blocks.1", "blocks.2"]
    forward_end = order.index("blocks.2")
    assert [n for n in order[forward_end + 1 :] if n != "(small)"] == ["blocks.2", "blocks.1", "blocks.0"]


def test_nothing_is_in_use_outside_and_all_is_guarded(nvme: Path) -> None:
    model, owner = offloaded(nvme)
    for _ in range(2):
        loss = model(tokens_of(0))
        assert in_use(owner) == [] and all(type(p) is GuardedParameter for p in model.parameters())
        loss.backward()
        assert in_use(owner) == [] and all(type(p) is GuardedParameter for p in model.parameters())


def test_only_the_running_unit_is_open(nvme: Path) -> None:
    model, owner = offloaded(nvme)
    seen: list[tuple[str, ...]] = []
    for block in model.blocks:
        block.down.register_forward_hook(lambda *_: seen.append(tuple(in_use(owner))))
        block.down.weight.register_hook(lambda grad: seen.append(tuple(in_use(owner))))
    model(tokens_of(0)).backward()
    assert [[name for name in names if name != "(small)"] for names in seen] == [
        *(["blocks.0"], ["blocks.1"], ["blocks.2"]),
        *(["blocks.2"], ["blocks.1"], ["blocks.0"]),
    ]


def test_no_more_than_the_budget_is_present(nvme: Path) -> None:
    model, owner = offloaded(nvme)
    arena = owner.parts.store.arena
    for seed in range(3):
        model(tokens_of(seed)).backward()
        present = [unit for unit in owner.parts.units if unit.state is not UnitState.AWAY]
        assert sum(unit.num_frames for unit in present) <= arena.frame_limit == 4
        assert arena.frame_bytes <= arena.frame_limit * (2 << 20)
        owner.grads.drop()


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputed_units_are_let_go_of(reentrant: bool, nvme: Path) -> None:
    class Checkpointed(TinyLM):
        def run_blocks(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=reentrant)
            return x

    model, owner = offloaded(nvme, partial(Checkpointed, WIDE, 3, Block))
    model(tokens_of(0)).backward()
    assert in_use(owner) == []


def test_a_watch_fires_once_per_backward_when_all_are_there() -> None:
    fired: list[int] = []
    a, b = torch.ones(2, requires_grad=True) * 1, torch.ones(2, requires_grad=True) * 1
    watch = InputsWatch(2, lambda: fired.append(1))
    a.register_hook(watch)
    b.register_hook(watch)
    a.sum().backward(retain_graph=True)
    assert fired == []
    for expected in (1, 2):
        (a.sum() + b.sum()).backward(retain_graph=True)
        assert len(fired) == expected


@pytest.mark.parametrize(("tier", "trims"), [("nvme", True), ("cpu", False)])
def test_the_heap_is_trimmed_where_units_leave_memory(
    tier: str, trims: bool, nvme: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once per so many bytes of units that backward is through with, and never beside units that stay."""
    trimmed: list[None] = []
    monkeypatch.setattr("zero_offload.memory.heap.trim_heap", lambda: trimmed.append(None))
    model = zo.offload(build(partial(TinyLM, WIDE)), placed("fp32", (tier, "cpu", "nvme"), nvme, "8MiB"))
    owner = runtime_of(model)
    assert owner is not None
    monkeypatch.setattr("zero_offload.memory.heap.TRIM_BYTES", 2 * owner.parts.units[-2].layout.nbytes)
    for backwards in range(1, 3):
        model(tokens_of(0)).backward()
        assert len(trimmed) == backwards * trims
