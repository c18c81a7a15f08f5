"""States that are read while backward computes: taken where the update begins as the last one did, never in vain
where states were replaced, and the bits of an update that reads them itself."""

from __future__ import annotations

import gc
import math
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zero_offload as zo
from tests.helpers.models import TinyLM, build, tokens_of
from zero_offload.api import runtime_of
from zero_offload.plan.memory import CHUNKS_IN_FLIGHT
from zero_offload.shards import update_staging
from zero_offload.shards.shard import Component, Shard
from zero_offload.shards.update_staging import ChunkAhead, UpdateStaging
from zero_offload.storage.swap_file import Transfer

NUM_UNITS = 5
"""Four blocks, and an embedding tied to the head with a norm: of one chunk each."""
Model = partial(TinyLM, num_blocks=4)
Steps = Callable[[nn.Module, torch.optim.Optimizer, int], None]


class Takes:
    """What updates have found ahead, chunk by chunk."""

    def __init__(self, patches: pytest.MonkeyPatch) -> None:
        self.found: list[bool] = []
        take = UpdateStaging.take

        def noted(staging: UpdateStaging, shard: Shard, rows: range) -> ChunkAhead | None:
            found = take(staging, shard, rows)
            self.found.append(found is not None)
            return found

        patches.setattr(UpdateStaging, "take", noted)

    def of_step(self) -> list[bool]:
        """Of the update that is over."""
        found, self.found = self.found, []
        return found


@pytest.fixture
def takes(monkeypatch: pytest.MonkeyPatch) -> Takes:
    return Takes(monkeypatch)


ALL = [True] * CHUNKS_IN_FLIGHT + [False] * (NUM_UNITS - CHUNKS_IN_FLIGHT)
NONE = [False] * NUM_UNITS


def on_disk(nvme: Path, **changes: Any) -> zo.OffloadConfig:
    return zo.OffloadConfig(**{"params": "nvme", "optimizer": "nvme", "nvme": nvme, **changes})


def backward(model: nn.Module, step: int, scale: float = 1.0) -> None:
    (model(tokens_of(step)) * scale).backward()
    zo.clip_grad_norm_(model, 0.5)


def finish(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()
    optimizer.zero_grad()
    runtime_of(model).drain()


def states_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    values = {name: value.clone() for name, value in model.state_dict().items()}
    states = optimizer.state_dict()["state"]
    return values | {f"{index} {name}": value for index, of in states.items() for name, value in of.items()}


def bits_of(config: zo.OffloadConfig, between: Steps, make: Callable[[nn.Module], Any]) -> dict[str, torch.Tensor]:
    """After five steps, with something in between backward and step."""
    model = zo.offload(build(Model), config)
    optimizer = make(model)
    for step in range(5):
        backward(model, step)
        between(model, optimizer, step)
        finish(model, optimizer)
    found = states_of(model, optimizer)
    zo.close(model)
    return found


def adamw(model: nn.Module) -> zo.AdamW:
    return zo.AdamW(model.parameters(), lr=1e-2)


def check_bits(nvme: Path, between: Steps, make: Callable[[nn.Module], Any] = adamw, **changes: Any) -> None:
    found = bits_of(on_disk(nvme / "ahead", **changes), between, make)
    expected = bits_of(on_disk(nvme / "alone", **changes, overlap="none"), between, make)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def nothing(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    pass


@pytest.mark.parametrize("states", ["fp32", "bf16", "compact"])
@pytest.mark.parametrize(
    "changes", [{}, {"durability": "scratch"}, {"params": "cpu"}, {"grads": "nvme"}, {"params": "device"}], ids=str
)
def test_backward_reads_what_the_update_begins_with(
    nvme: Path, takes: Takes, states: str, changes: dict[str, Any]
) -> None:
    precision = zo.Precision(compute="bf16", states=states)

    def noted(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        assert takes.of_step() == [[], NONE, ALL, ALL, ALL][step]

    found = bits_of(on_disk(nvme / "ahead", precision=precision, **changes), noted, adamw)
    expected = bits_of(on_disk(nvme / "alone", precision=precision, overlap="none", **changes), nothing, adamw)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_nothing_is_read_ahead_of_an_update_in_step_or_in_backward(nvme: Path, takes: Takes) -> None:
    bits_of(on_disk(nvme / "none", overlap="none"), nothing, adamw)
    model = zo.offload(build(Model), on_disk(nvme / "backward", overlap="backward"))
    optimizer = adamw(model)
    for step in range(3):
        model(tokens_of(step)).backward()
        finish(model, optimizer)
    assert takes.found and not any(takes.found)


@pytest.mark.parametrize("by_unit", [False, True])
def test_the_first_of_several_backwards_reads(nvme: Path, takes: Takes, by_unit: bool) -> None:
    model = zo.offload(build(Model), on_disk(nvme))
    optimizer = adamw(model)
    for step in range(3):
        micro_batches = [tokens_of(3 * step + number) for number in range(3)]
        takes.of_step()
        if by_unit:
            zo.accumulate(model, micro_batches, lambda model, batch: model(batch))
        else:
            for each in micro_batches:
                model(each).backward()
        finish(model, optimizer)
    assert takes.of_step() == ALL


def test_a_step_counts_what_its_update_reads(nvme: Path) -> None:
    """Whenever that was; of parameters nothing is read."""
    model = zo.offload(build(Model), on_disk(nvme, params="cpu"))
    optimizer = adamw(model)
    read = []
    for step in range(6):
        backward(model, step)
        optimizer.step()
        read.append(zo.stats(model).read_bytes["nvme"])
        optimizer.zero_grad()
    assert read[2] > 0 and len(set(read[2:])) == 1


def test_a_skipped_step_leaves_what_is_ahead(nvme: Path, takes: Takes, monkeypatch: pytest.MonkeyPatch) -> None:
    launched = []
    launch = update_staging.launch_states
    monkeypatch.setattr(update_staging, "launch_states", lambda *a: launched.append(a) or launch(*a))
    model = zo.offload(build(Model), on_disk(nvme))
    optimizer = adamw(model)
    for step in range(4):
        backward(model, step, math.inf if step == 2 else 1.0)
        if step == 2:
            takes.of_step()
            launched.clear()
            with pytest.warns(UserWarning, match="the step is skipped"):
                finish(model, optimizer)
        else:
            finish(model, optimizer)
    assert takes.of_step() == ALL
    assert not launched, "the third backward has read it"


def gathered_write(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    with torch.no_grad(), zo.gathered(model.blocks[0], mode="write"):
        model.blocks[0].up.weight += 0.5


def load_values(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    state = {name: value + 0.25 for name, value in model.state_dict().items()}
    model.load_state_dict(state)


def load_states(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    found = optimizer.state_dict()
    for of_param in found["state"].values():
        of_param["exp_avg"] += 0.125
    optimizer.load_state_dict(found)


def further_states(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    if step == 2:
        optimizer.param_groups[0]["amsgrad"] = True


@pytest.mark.parametrize("durability", ["process", "scratch"])
@pytest.mark.parametrize("replace", [gathered_write, load_values, load_states, further_states])
def test_what_is_replaced_is_not_what_was_read(nvme: Path, takes: Takes, replace: Steps, durability: str) -> None:
    check_bits(nvme, replace, durability=durability)
    assert replace is further_states or not any(takes.found)


def test_a_checkpoint_that_is_loaded_is_not_what_was_read(nvme: Path, tmp_path: Path) -> None:
    def load(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        if step == 1:
            optimizer.zero_grad()
            zo.save_checkpoint(model, optimizer, tmp_path / str(runtime_of(model).parts.config.overlap))
        if step == 3:
            zo.load_checkpoint(model, optimizer, tmp_path / str(runtime_of(model).parts.config.overlap))
            backward(model, step)

    check_bits(nvme, load)


def test_an_update_that_begins_otherwise_reads_by_itself(nvme: Path, takes: Takes) -> None:
    """Without a gradient of the first unit."""

    def otherwise(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        found.append(takes.of_step())
        if step == 2:
            for name, param in model.named_parameters():
                if not name.startswith("blocks"):
                    param.grad = None

    found: list[list[bool]] = []
    check_bits(nvme, otherwise)
    # The step after it begins with the first unit again.
    assert found[:5] == [[], NONE, ALL, [False] * (NUM_UNITS - 1), NONE]


SHARED, APART = ("embedding",), ("blocks.0", "blocks.1")
"""What the first optimizer has: a part of the last unit's section, or two units."""


@pytest.mark.parametrize(
    ("first", "takes_turns", "expected"),
    [
        # Their section is updated twice in a step: what was read before is good for the first time only.
        (SHARED, False, [True] + [False] * NUM_UNITS),
        (SHARED, True, []),
        (APART, False, ALL),
        (APART, True, []),
    ],
)
def test_optimizers_that_share_a_model(
    nvme: Path, takes: Takes, first: tuple[str, ...], takes_turns: bool, expected: list[bool]
) -> None:
    """One after the other, or the second of them in every other step."""

    class Both:
        def __init__(self, model: nn.Module) -> None:
            named = list(model.named_parameters())
            self.each = (
                zo.Lion([param for name, param in named if name.startswith(first)], lr=1e-3),
                zo.AdamW([param for name, param in named if not name.startswith(first)], lr=1e-2),
            )
            self.steps = 0
            self.found: list[list[bool]] = []

        def step(self) -> None:
            self.steps += 1
            self.found.append(takes.of_step())
            for optimizer in self.each[: 1 + (not takes_turns or self.steps % 2)]:
                optimizer.step()

        def zero_grad(self) -> None:
            for optimizer in self.each:
                optimizer.zero_grad()

        def state_dict(self) -> dict[str, Any]:
            states = [optimizer.state_dict()["state"].items() for optimizer in self.each]
            seen.append(self.found[2:])
            return {"state": {f"{i} {name}": of for i, found in enumerate(states) for name, of in found}}

    seen: list[list[list[bool]]] = []
    check_bits(nvme, nothing, Both)
    assert takes_turns or seen[0] == [expected] * 3


def test_reads_wait_for_the_update_before(nvme: Path, takes: Takes, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its thread busy there is nothing to read; nor is anything read when that has ended after backward."""
    model = zo.offload(build(Model), on_disk(nvme))
    optimizer = adamw(model)
    for step in range(3):
        if step == 2:
            monkeypatch.setattr(type(runtime_of(model).worker), "busy", True)
        backward(model, step)
        if step == 2:
            monkeypatch.undo()
            assert not runtime_of(model).parts.store.update_staging._ahead
        finish(model, optimizer)


def test_a_ctrl_c_in_the_launch_costs_one_region(nvme: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = zo.offload(build(Model), on_disk(nvme))
    optimizer = adamw(model)
    launch, calls = update_staging.launch_states, deque([False, True])

    def struck(*args: Any) -> list[Transfer]:
        reads = launch(*args)
        if calls.popleft():
            raise KeyboardInterrupt
        return reads

    for step in range(4):
        if step == 2:
            monkeypatch.setattr(update_staging, "launch_states", struck)
            with pytest.raises(KeyboardInterrupt):
                backward(model, step)
            monkeypatch.undo()
            optimizer.zero_grad()
        backward(model, step)
        finish(model, optimizer)
    staging = runtime_of(model).parts.store.update_staging
    assert len(staging._lost) == 1 and len(staging.free) == CHUNKS_IN_FLIGHT


def test_a_model_is_dropped_with_reads_under_way(nvme: Path) -> None:
    model = zo.offload(build(Model), on_disk(nvme))
    optimizer = adamw(model)
    for step in range(2):
        backward(model, step)
        if step == 0:
            finish(model, optimizer)
    assert runtime_of(model).parts.store.update_staging._ahead
    owner = weakref.ref(runtime_of(model))
    optimizer.zero_grad()
    del model, optimizer
    gc.collect()
    assert owner() is None


@pytest.fixture(autouse=True)
def closed() -> Iterator[None]:
    yield
    gc.collect()


def test_a_read_that_fails_ends_the_step(nvme: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = zo.offload(build(Model), on_disk(nvme))
    optimizer = adamw(model)
    backward(model, 0)
    finish(model, optimizer)
    shard = runtime_of(model).parts.store.shards[0]
    extent = shard.slots[shard.current][Component.EXP_AVG]
    extent.blocks["crc"] += 1
    backward(model, 1)
    with pytest.raises(zo.IntegrityError):
        finish(model, optimizer)
