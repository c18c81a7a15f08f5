"""Which units are held when, seen from outside: the order of uses, and that every use ends."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import zero_offload as zo
from tests.helpers.models import WIDE, Block, TinyLM, build, tokens_of
from tests.helpers.reference import placed
from zero_offload.model.api import runtime_of
from zero_offload.model.runtime import ModelRuntime
from zero_offload.runtime.pass_tracker import InputsWatch
from zero_offload.runtime.units.unit import UnitState
from zero_offload.standins.guard import GuardedParameter


def offloaded(nvme: Path, make: object = partial(TinyLM, WIDE)) -> tuple[nn.Module, ModelRuntime]:
    model = zo.offload(build(make), placed("fp32", ("nvme", "cpu", "nvme"), nvme, "8MiB"))
    owner = runtime_of(model)
    assert owner is not None
    return model, owner


def in_use(owner: ModelRuntime) -> list[str]:
    return [unit.name for unit in owner.units if unit.in_use]


def uses(owner: ModelRuntime) -> list[str]:
    """Names in the order of the cycle that just ended."""
    schedule = owner.prefetcher.schedule
    schedule.begin_cycle("grad")
    return [owner.units[i].name for i in schedule.uses]


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
    arena = owner.store.arena
    for seed in range(3):
        model(tokens_of(seed)).backward()
        present = [unit for unit in owner.units if unit.state is not UnitState.AWAY]
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


def test_a_watch_fires_once_per_backward_at_the_first_gradient() -> None:
    fired: list[int] = []
    a, b = torch.ones(2, requires_grad=True) * 1, torch.ones(2, requires_grad=True) * 1
    watch = InputsWatch(lambda: fired.append(1))
    a.register_hook(watch)
    b.register_hook(watch)
    for expected, loss in enumerate((a.sum(), a.sum() + b.sum(), b.sum()), start=1):
        loss.backward(retain_graph=True)
        assert len(fired) == expected


class Attending(Block):
    """Takes what all blocks take, in an object that says nothing of the tensors in it."""

    def forward(self, x: torch.Tensor, context: SimpleNamespace) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x + context.memory)


class SharesAnInput(TinyLM):
    """One tensor with a gradient goes into all blocks, as an encoder's output into a decoder."""

    def __init__(self) -> None:
        super().__init__(WIDE, 3, Attending)
        self.encoder = nn.Linear(WIDE, WIDE)

    def run_blocks(self, x: torch.Tensor) -> torch.Tensor:
        context = SimpleNamespace(memory=self.encoder(x))
        for block in self.blocks:
            x = block(x, context)
        return x


class OnlyObjects(TinyLM):
    """Blocks whose one input is an object."""

    class Block(Block):
        def forward(self, state: SimpleNamespace) -> SimpleNamespace:  # type: ignore[override]
            return SimpleNamespace(x=super().forward(state.x))

    def __init__(self) -> None:
        super().__init__(WIDE, 3, self.Block)

    def run_blocks(self, x: torch.Tensor) -> torch.Tensor:
        state = SimpleNamespace(x=x)
        for block in self.blocks:
            state = block(state)
        return state.x


@pytest.mark.parametrize("make", [SharesAnInput, OnlyObjects])
def test_backward_lets_go_of_a_block_before_the_next(make: type[TinyLM], nvme: Path) -> None:
    model, owner = offloaded(nvme, make)
    seen: list[list[str]] = []
    for block in model.blocks:
        block.down.weight.register_hook(lambda grad: seen.append(in_use(owner)))
    model(tokens_of(0)).backward()
    assert [[name for name in names if "blocks" in name] for names in seen] == [
        ["blocks.2"],
        ["blocks.1"],
        ["blocks.0"],
    ]


@pytest.mark.parametrize(("tier", "trims"), [("nvme", True), ("cpu", False)])
def test_the_heap_is_trimmed_where_units_leave_memory(
    tier: str, trims: bool, nvme: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once per so many bytes of units that backward is through with, and never beside units that stay."""
    trimmed: list[None] = []
    monkeypatch.setattr("zero_offload.storage.memory.heap.trim_heap", lambda: trimmed.append(None))
    model = zo.offload(build(partial(TinyLM, WIDE)), placed("fp32", (tier, "cpu", "nvme"), nvme, "8MiB"))
    owner = runtime_of(model)
    assert owner is not None
    monkeypatch.setattr("zero_offload.storage.memory.heap.TRIM_BYTES", 2 * owner.units[-2].layout.nbytes)
    for backwards in range(1, 3):
        model(tokens_of(0)).backward()
        assert len(trimmed) == backwards * trims
