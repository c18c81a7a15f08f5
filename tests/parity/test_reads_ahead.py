"""States that are read while backward computes: taken where an update begins as the last two did, given up where states
are replaced, and the bits of an update that reads them itself."""

from __future__ import annotations

import gc
import math
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
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
from zero_offload.shards.disk import DiskArrays
from zero_offload.shards.shard import Component, Shard
from zero_offload.shards.update_staging import ChunkAhead, UpdateStaging
from zero_offload.storage.swap_file import Transfer

NUM_STEPS, NUM_UNITS = 6, 5
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


def adamw(model: nn.Module) -> zo.AdamW:
    return zo.AdamW(model.parameters(), lr=1e-2)


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


def nothing(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    pass


@dataclass(frozen=True)
class Run:
    """Six steps, with something in between backward and step, or before backward."""

    between: Steps = nothing
    before: Steps = nothing
    make: Callable[[nn.Module], Any] = adamw
    model: Callable[[], nn.Module] = Model

    def bits(self, config: zo.OffloadConfig) -> dict[str, torch.Tensor]:
        model = zo.offload(build(self.model), config)
        optimizer = self.make(model)
        for step in range(NUM_STEPS):
            self.before(model, optimizer, step)
            backward(model, step)
            self.between(model, optimizer, step)
            finish(model, optimizer)
        found = states_of(model, optimizer)
        zo.close(model)
        return found

    def check(self, nvme: Path, **changes: Any) -> None:
        """Against updates that nothing is read ahead of."""
        found = self.bits(on_disk(nvme / "ahead", **changes))
        expected = self.bits(on_disk(nvme / "alone", **changes, overlap="none"))
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("states", ["fp32", "bf16", "compact"])
@pytest.mark.parametrize(
    "changes", [{}, {"durability": "scratch"}, {"params": "cpu"}, {"grads": "nvme"}, {"params": "device"}], ids=str
)
def test_backward_reads_what_the_update_begins_with(
    nvme: Path, takes: Takes, states: str, changes: dict[str, Any]
) -> None:
    precision = zo.Precision(compute="bf16", states=states)

    def noted(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        of_steps.append(takes.of_step())

    of_steps: list[list[bool]] = []
    Run(noted).check(nvme, precision=precision, **changes)
    assert of_steps[:NUM_STEPS] == [[], NONE, NONE, ALL, ALL, ALL]


def test_nothing_is_read_ahead_of_an_update_in_step_or_in_backward(nvme: Path, takes: Takes) -> None:
    Run().bits(on_disk(nvme / "none", overlap="none"))
    model = zo.offload(build(Model), on_disk(nvme / "backward", overlap="backward"))
    optimizer = adamw(model)
    for step in range(NUM_STEPS):
        model(tokens_of(step)).backward()
        finish(model, optimizer)
    assert takes.found and not any(takes.found)


@pytest.mark.parametrize("by_unit", [False, True])
def test_the_first_of_several_backwards_reads(nvme: Path, takes: Takes, by_unit: bool) -> None:
    model = zo.offload(build(Model), on_disk(nvme))
    optimizer = adamw(model)
    for step in range(4):
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

    def read_bytes(**changes: Any) -> list[int]:
        found: list[int] = []
        before = lambda model, *_: found.append(zo.stats(model).read_bytes["nvme"])  # noqa: E731
        Run(before=before).bits(on_disk(nvme / str(len(changes)), params="cpu", **changes))
        return found

    # What runs beside the next step is counted with that.
    serial, ahead = read_bytes(overlap="none"), read_bytes()
    assert serial[-1] > 0 and ahead[2:] == serial[1:-1]


def test_a_skipped_step_leaves_what_is_ahead(nvme: Path, takes: Takes, monkeypatch: pytest.MonkeyPatch) -> None:
    launch, launched = update_staging.launch_states, list[tuple[Any, ...]]()
    monkeypatch.setattr(update_staging, "launch_states", lambda *a: launched.append(a) or launch(*a))
    model = zo.offload(build(Model), on_disk(nvme))
    optimizer = adamw(model)
    for step in range(5):
        backward(model, step, math.inf if step == 3 else 1.0)
        if step != 3:
            finish(model, optimizer)
            continue
        takes.of_step()
        launched.clear()
        with pytest.warns(UserWarning, match="the step is skipped"):
            finish(model, optimizer)
    assert takes.of_step() == ALL
    assert not launched, "the backward of the step that was skipped has read it"


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


def new_rule(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """A further state of the blocks, then of the first unit, whose chunks are smaller: no larger staging is needed, and
    what it has where that state is read is another chunk's."""
    if step in (2, 4):
        optimizer.param_groups[step == 4]["amsgrad"] = True


def two_groups(model: nn.Module) -> zo.AdamW:
    """Of blocks, and of the unit that is used first."""
    named = list(model.named_parameters())
    blocks = [[param for name, param in named if name.startswith("blocks") == first] for first in (True, False)]
    return zo.AdamW([{"params": params} for params in blocks], lr=1e-2)


@pytest.mark.parametrize("durability", ["process", "scratch"])
@pytest.mark.parametrize("replace", [gathered_write, load_values, load_states, new_rule])
@pytest.mark.parametrize("when", ["between", "before"])
def test_what_is_replaced_is_not_what_was_read(
    nvme: Path, takes: Takes, replace: Steps, durability: str, when: str
) -> None:
    Run(**{when: replace}, make=two_groups).check(nvme, durability=durability)
    assert any(takes.found) == (replace is new_rule or when == "before")


def test_a_checkpoint_that_is_loaded_is_not_what_was_read(nvme: Path, tmp_path: Path) -> None:
    def load(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        path = tmp_path / str(runtime_of(model).parts.config.overlap)
        if step == 1:
            optimizer.zero_grad()
            zo.save_checkpoint(model, optimizer, path)
        if step == 4:
            zo.load_checkpoint(model, optimizer, path)
            backward(model, step)

    Run(load).check(nvme)


class Large(nn.Module):
    """Two weights of two chunks each."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1100, 1100, bias=False) for _ in range(2))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = torch.ones(2, 1100, dtype=self.layers[0].weight.dtype) * tokens.float().mean() / 100
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x.float().square().mean()


def test_chunks_that_outgrow_their_staging_are_not_read(nvme: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """States of a new optimizer come before its first update, and so does a backward."""
    launch, beyond = update_staging.launch_states, list[int]()

    def launched(disk: DiskArrays, shard: Shard, rows: range, address: int) -> list[Transfer]:
        staging = staging_of[0]
        beyond.append(update_staging.bytes_on_disk(shard, rows) - staging._nbytes)
        return launch(disk, shard, rows, address)

    def next_optimizer(model: nn.Module, optimizer: Any, step: int) -> None:
        staging_of[:] = [runtime_of(model).parts.store.update_staging]
        if step == 4:
            optimizer.each = zo.AdamW(model.parameters(), lr=1e-3)

    class Replaced:
        def __init__(self, model: nn.Module) -> None:
            self.each: torch.optim.Optimizer = zo.Lion(model.parameters(), lr=1e-3)
            self.step = lambda: self.each.step()
            self.zero_grad = lambda: self.each.zero_grad()
            self.state_dict = lambda: self.each.state_dict()

    staging_of: list[UpdateStaging] = []
    monkeypatch.setattr(update_staging, "launch_states", launched)
    Run(before=next_optimizer, make=Replaced, model=Large).check(nvme)
    assert beyond and max(beyond) <= 0


def test_an_update_that_begins_otherwise_reads_by_itself(nvme: Path, takes: Takes) -> None:
    """Without a gradient of the first unit."""

    def otherwise(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
        found.append(takes.of_step())
        if step == 3:
            for name, param in model.named_parameters():
                if not name.startswith("blocks"):
                    param.grad = None

    found: list[list[bool]] = []
    Run(otherwise).check(nvme)
    # After it no two updates have begun alike yet.
    assert found[:NUM_STEPS] == [[], NONE, NONE, ALL, [False] * (NUM_UNITS - 1), NONE]


SHARED, APART = ("embedding",), ("blocks.0", "blocks.1")
"""What the first optimizer has: a part of the last unit's section, or two units."""


@pytest.mark.parametrize(
    ("first", "takes_turns", "expected"),
    [
        # Their section is updated twice in a step: what was read before is good for the first time only.
        (SHARED, False, 3 * [[True] + NONE]),
        (SHARED, True, [[True] + NONE, [True], [True] + NONE]),
        (APART, False, 3 * [ALL]),
        (APART, True, [NONE, NONE[:2], NONE]),
    ],
)
def test_optimizers_that_share_a_model(
    nvme: Path, takes: Takes, first: tuple[str, ...], takes_turns: bool, expected: list[list[bool]]
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
            seen.append(self.found[3:])
            return {"state": {f"{i} {name}": of for i, found in enumerate(states) for name, of in found}}

    seen: list[list[list[bool]]] = []
    Run(make=Both).check(nvme)
    assert seen[0] == expected


def test_reads_wait_for_the_update_before(nvme: Path, takes: Takes, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its thread busy there is nothing to read; nor is anything read when that has ended after backward."""
    model = zo.offload(build(Model), on_disk(nvme))
    optimizer = adamw(model)
    for step in range(4):
        if step == 3:
            monkeypatch.setattr(type(runtime_of(model).parts.update_worker), "busy", True)
        backward(model, step)
        if step == 3:
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

    for step in range(5):
        if step == 3:
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
    model, optimizer = ahead(nvme)
    owner = weakref.ref(runtime_of(model))
    optimizer.zero_grad()
    del model, optimizer
    gc.collect()
    assert owner() is None


def test_a_read_that_fails_ends_the_step(nvme: Path) -> None:
    model, optimizer = ahead(nvme, lambda shard: shard.slots[shard.current][Component.EXP_AVG].blocks["crc"].fill(1))
    with pytest.raises(zo.IntegrityError):
        finish(model, optimizer)


def ahead(nvme: Path, before: Callable[[Shard], None] = lambda shard: None) -> tuple[nn.Module, zo.AdamW]:
    """After a backward that has read ahead; something happens before to the shard that it reads first."""
    model = zo.offload(build(Model), on_disk(nvme))
    optimizer = adamw(model)
    staging = runtime_of(model).parts.store.update_staging
    for step in range(2):
        backward(model, step)
        finish(model, optimizer)
    before(next(iter(staging._first.values())))
    backward(model, 2)
    assert len(staging._ahead) == CHUNKS_IN_FLIGHT
    return model, optimizer
