"""Decisions of `ParamPrefetcher`, on a real store and without a model's hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import zero_offload as zo
from tests.helpers.models import WIDE, Block, build
from tests.helpers.pairwise import in_turn
from tests.helpers.reference import placed
from zero_offload.base.threads import UnitUpdate
from zero_offload.model.api import runtime_of
from zero_offload.model.runtime import ModelRuntime
from zero_offload.optim.worker import Worker
from zero_offload.runtime.units.unit import UnitState
from zero_offload.storage.memory.arena import FRAME


@pytest.fixture
def runtime(nvme: Path) -> Iterator[ModelRuntime]:
    """Four units of two frames; room for two of them."""
    model = zo.offload(
        build(lambda: nn.ModuleList(Block(WIDE) for _ in range(4))),
        placed("fp32", ("nvme", "cpu", "nvme"), nvme, "8MiB"),
    )
    owner = runtime_of(model)
    assert owner is not None
    yield owner
    zo.close(model)


def present(runtime: ModelRuntime) -> set[int]:
    return {unit.index for unit in runtime.units if unit.state is UnitState.PRESENT}


def launch(runtime: ModelRuntime, units: Iterable[int]) -> dict[int, UnitUpdate]:
    """Updates that no thread computes."""
    updates = {unit: UnitUpdate(runtime.errors, runtime.store.counters) for unit in units}
    for unit, update in updates.items():
        runtime.units[unit].begin_update(update)
    return updates


def cycle(runtime: ModelRuntime, uses: list[int]) -> int:
    """Acquire in order; returns the bytes fetched."""
    before = runtime.store.counters.snapshot().get("read.nvme", 0)
    runtime.prefetcher.begin_cycle("grad")
    for index in uses:
        unit = runtime.units[index]
        unit.forward_uses = 1  # A unit in use is not evicted to fetch the next unit.
        runtime.prefetcher.acquire(unit)
        assert unit.state is UnitState.PRESENT
        unit.forward_uses = 0
    return int(runtime.store.counters.snapshot()["read.nvme"] - before)


def test_an_acquired_unit_holds_its_values(runtime: ModelRuntime) -> None:
    for unit in runtime.units:
        runtime.prefetcher.acquire(unit)
        for section, piece, param in unit.placed_params:
            expected = runtime.store.read_component(section.shard, next(iter(section.shard.slots[0])))
            assert torch.equal(section.flat[piece.begin : piece.end], expected[piece.begin : piece.end])
            assert param.shape == piece.spec.shape


def test_what_is_used_next_is_kept(runtime: ModelRuntime) -> None:
    """There and back with room for two: the turn reads nothing twice, nor does the start of the next cycle."""
    uses = [0, 1, 2, 3, 3, 2, 1, 0]
    for _ in range(2):
        cycle(runtime, uses)
    assert cycle(runtime, uses) == 4 * runtime.units[0].layout.nbytes


def test_units_in_use_stay(runtime: ModelRuntime) -> None:
    first, second, third, _ = runtime.units
    for unit in (first, second):
        runtime.prefetcher.acquire(unit)
        unit.forward_uses = 1
    with pytest.raises(zo.CapacityError, match=r"2 needs 4 MiB.*in use: 0, 1\. Raise device_memory"):
        runtime.prefetcher.acquire(third)
    second.forward_uses = 0
    runtime.prefetcher.acquire(third)
    assert present(runtime) == {0, 2}
    first.forward_uses = 0


def test_a_known_cycle_is_fetched_ahead(runtime: ModelRuntime) -> None:
    cycle(runtime, [0, 1, 2, 3])
    runtime.prefetcher.begin_cycle("grad")
    runtime.prefetcher.acquire(runtime.units[0])
    assert runtime.units[1].state in (UnitState.FETCHING, UnitState.PRESENT)


def test_forgotten_units_are_read_again(runtime: ModelRuntime) -> None:
    runtime.prefetcher.acquire(runtime.units[0])
    runtime.prefetcher.invalidate(runtime.units[0])
    assert runtime.units[0].state is UnitState.AWAY
    runtime.prefetcher.invalidate(runtime.units[0])
    assert cycle(runtime, [0]) == runtime.units[0].layout.nbytes


def test_frames_go_to_the_units_that_are_updated_first(runtime: ModelRuntime) -> None:
    """Backward ends with the last units away and the first here; a queued update wants them the other way round."""
    cycle(runtime, [2, 3])
    assert present(runtime) == {2, 3}
    updates = launch(runtime, range(4))
    runtime.prefetcher.begin_update([0, 1, 2, 3])
    delivered = [unit for unit, update in updates.items() if update.begin() is not None]
    assert delivered == [0, 1]


def test_frames_stay_where_the_first_units_are(runtime: ModelRuntime) -> None:
    cycle(runtime, [3, 0])
    launch(runtime, range(4))
    runtime.prefetcher.begin_update([0, 1, 2, 3])
    states = [unit.state for unit in runtime.units]
    assert states == [UnitState.AWAITING, UnitState.AWAITING, UnitState.AWAY, UnitState.AWAY]


def test_frames_of_what_backward_is_done_with_go_to_what_it_needs(runtime: ModelRuntime) -> None:
    uses = [0, 1, 2, 3, 3, 2, 1, 0]
    for _ in range(2):
        cycle(runtime, uses)
    runtime.prefetcher.begin_cycle("grad")
    for index in uses[:4]:
        runtime.prefetcher.acquire(runtime.units[index])
    runtime.units[3].backward_uses = 1
    runtime.prefetcher.acquire(runtime.units[3])
    runtime.units[3].backward_uses = 0
    assert runtime.units[3].state is UnitState.PRESENT and runtime.units[1].state is UnitState.AWAY
    updates = launch(runtime, [3])
    runtime.prefetcher.begin_update([3], in_backward=True)
    assert runtime.units[3].state is UnitState.AWAY
    assert runtime.units[1].state in (UnitState.FETCHING, UnitState.PRESENT)
    assert updates[3].begin() is None


def test_what_backward_is_done_with_has_its_values_delivered_where_nothing_is_missing(runtime: ModelRuntime) -> None:
    cycle(runtime, [0, 1])
    updates = launch(runtime, [1])
    runtime.prefetcher.begin_update([1], in_backward=True)
    assert runtime.units[1].state is UnitState.AWAITING and updates[1].begin() is not None


def test_units_in_use_keep_their_frames(runtime: ModelRuntime) -> None:
    cycle(runtime, [2, 3])
    runtime.units[3].gathered_uses = 1
    launch(runtime, range(4))
    runtime.prefetcher.begin_update([0, 1, 2, 3])
    assert [unit.state for unit in runtime.units].count(UnitState.AWAITING) == 2
    assert runtime.units[3].state is UnitState.AWAITING and runtime.units[0].state is UnitState.AWAITING
    runtime.units[3].gathered_uses = 0


@pytest.mark.parametrize("overlap", ["none", "forward"])
def test_an_update_beside_forward_counts_in_the_next_step(
    overlap: str, nvme: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However soon it begins: here it is over before `step` has returned."""
    submit = Worker.submit

    def at_once(worker: Worker, job: Callable[[], None]) -> None:
        submit(worker, job)
        worker.drain()

    monkeypatch.setattr(Worker, "submit", at_once)
    config = zo.OffloadConfig(optimizer="nvme", nvme=nvme, precision="fp32", durability="scratch", overlap=overlap)
    model = zo.offload(build(lambda: nn.Linear(8, 8)), config)
    optimizer, owner, written = zo.AdamW(model.parameters()), runtime_of(model), []
    assert owner is not None
    before = owner.store.counters.snapshot()["written.nvme"]
    for _ in range(2):
        model(torch.ones(1, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        written.append(zo.stats(model).written_bytes["nvme"])
    zo.close(model)
    assert written[1] > 0
    assert written[0] - before == (0 if overlap == "forward" else written[1])


@in_turn(num_frames=[3, 4, 6, 8, 10], overlap=["none", "forward"])
def test_a_step_reads_what_the_arithmetic_says(num_frames: int, overlap: str, nvme: Path) -> None:
    """Ten units of one frame go there and back. Units without a frame at the turn are read again, the first unit apart,
    whose input wants no gradient. After a serial update forward reads what had no frame then; beside forward, the
    update delivers some of that too. A split that keeps some units for good would read two units more each way: those
    whose frames the others pass through.
    """
    num_units, width = 10, 704
    settings = {"precision": "fp32", "durability": "scratch", "overlap": overlap, "device_memory": num_frames * FRAME}
    model = zo.offload(
        build(lambda: nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(num_units)))),
        zo.OffloadConfig(params="nvme", optimizer="nvme", nvme=nvme, **settings),
        units=[nn.Linear],
    )
    optimizer = zo.AdamW(model.parameters())
    for _ in range(3):
        model(torch.ones(1, width)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    stats = zo.stats(model)
    zo.close(model)
    unit_bytes = width * width * 4
    passed_by = num_units - num_frames
    again = max(passed_by - 1, 0)
    assert stats.written_bytes["nvme"] == 3 * num_units * unit_bytes
    fetched = stats.read_bytes["nvme"] - 3 * num_units * unit_bytes
    assert (again + (passed_by if overlap == "none" else 0)) * unit_bytes <= fetched <= (again + passed_by) * unit_bytes
