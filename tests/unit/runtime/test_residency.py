"""Decisions of `Residency`, on a real store and without a model's hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import zero_offload as zo
from tests.helpers.models import WIDE, Block, build
from tests.helpers.reference import placed
from zero_offload.api import runtime_of
from zero_offload.memory.pages import FRAME
from zero_offload.optim.worker import Worker
from zero_offload.parts import Parts
from zero_offload.shards.state import UnitState
from zero_offload.shards.unit_update import UnitUpdate


@pytest.fixture
def parts(nvme: Path) -> Iterator[Parts]:
    """Four units of two frames; room for two of them."""
    model = zo.offload(
        build(lambda: nn.ModuleList(Block(WIDE) for _ in range(4))),
        placed("fp32", ("nvme", "cpu", "nvme"), nvme, "8MiB"),
    )
    owner = runtime_of(model)
    assert owner is not None
    yield owner.parts
    zo.close(model)


def present(parts: Parts) -> set[int]:
    return {unit.index for unit in parts.units if unit.state is UnitState.PRESENT}


def launch(parts: Parts, units: Iterable[int]) -> dict[int, UnitUpdate]:
    """Updates that no thread computes."""
    updates = {unit: UnitUpdate(parts.errors, parts.store.counters) for unit in units}
    for unit, update in updates.items():
        parts.units[unit].update = update
    return updates


def cycle(parts: Parts, uses: list[int]) -> int:
    """Acquire in order; returns the bytes fetched."""
    before = parts.store.counters.snapshot().get("read.nvme", 0)
    parts.residency.begin_cycle("grad")
    for index in uses:
        unit = parts.units[index]
        unit.forward_uses = 1  # What is in use is not evicted to fetch what comes next.
        parts.residency.acquire(unit)
        assert unit.state is UnitState.PRESENT
        unit.forward_uses = 0
    return int(parts.store.counters.snapshot()["read.nvme"] - before)


def test_an_acquired_unit_holds_its_values(parts: Parts) -> None:
    for unit in parts.units:
        parts.residency.acquire(unit)
        for section, piece, param in unit.placed_params:
            expected = parts.store.read_component(section.shard, next(iter(section.shard.slots[0])))
            assert torch.equal(section.flat[piece.begin : piece.end], expected[piece.begin : piece.end])
            assert param.shape == piece.spec.shape


def test_what_is_used_next_is_kept(parts: Parts) -> None:
    """There and back with room for two: the turn reads nothing twice, nor does the start of the next cycle."""
    uses = [0, 1, 2, 3, 3, 2, 1, 0]
    for _ in range(2):
        cycle(parts, uses)
    assert cycle(parts, uses) == 4 * parts.units[0].layout.nbytes


def test_units_in_use_stay(parts: Parts) -> None:
    first, second, third, _ = parts.units
    for unit in (first, second):
        parts.residency.acquire(unit)
        unit.forward_uses = 1
    with pytest.raises(zo.CapacityError, match=r"2 needs 4 MiB.*in use: 0, 1\. Raise device_memory"):
        parts.residency.acquire(third)
    second.forward_uses = 0
    parts.residency.acquire(third)
    assert present(parts) == {0, 2}
    first.forward_uses = 0


def test_a_known_cycle_is_fetched_ahead(parts: Parts) -> None:
    cycle(parts, [0, 1, 2, 3])
    parts.residency.begin_cycle("grad")
    parts.residency.acquire(parts.units[0])
    assert parts.units[1].state in (UnitState.FETCHING, UnitState.PRESENT)


def test_forgotten_units_are_read_again(parts: Parts) -> None:
    parts.residency.acquire(parts.units[0])
    parts.residency.forget(parts.units[0])
    assert parts.units[0].state is UnitState.AWAY
    parts.residency.forget(parts.units[0])
    assert cycle(parts, [0]) == parts.units[0].layout.nbytes


def test_frames_go_to_the_units_that_are_updated_first(parts: Parts) -> None:
    """Backward ends with the last units away and the first here; a queued update wants them the other way round."""
    cycle(parts, [2, 3])
    assert present(parts) == {2, 3}
    updates = launch(parts, range(4))
    parts.residency.begin_update([0, 1, 2, 3])
    delivered = [unit for unit, update in updates.items() if update.start() is not None]
    assert delivered == [0, 1]


def test_frames_stay_where_the_first_units_are(parts: Parts) -> None:
    cycle(parts, [3, 0])
    launch(parts, range(4))
    parts.residency.begin_update([0, 1, 2, 3])
    states = [unit.state for unit in parts.units]
    assert states == [UnitState.AWAITING, UnitState.AWAITING, UnitState.AWAY, UnitState.AWAY]


def test_frames_of_what_backward_is_done_with_go_to_what_it_needs(parts: Parts) -> None:
    uses = [0, 1, 2, 3, 3, 2, 1, 0]
    for _ in range(2):
        cycle(parts, uses)
    parts.residency.begin_cycle("grad")
    for index in uses[:4]:
        parts.residency.acquire(parts.units[index])
    parts.units[3].backward_uses = 1
    parts.residency.acquire(parts.units[3])
    parts.units[3].backward_uses = 0
    assert parts.units[3].state is UnitState.PRESENT and parts.units[1].state is UnitState.AWAY
    updates = launch(parts, [3])
    parts.residency.begin_update([3], in_backward=True)
    assert parts.units[3].state is UnitState.AWAY
    assert parts.units[1].state in (UnitState.FETCHING, UnitState.PRESENT)
    assert updates[3].start() is None


def test_what_backward_is_done_with_has_its_values_delivered_where_nothing_is_missing(parts: Parts) -> None:
    cycle(parts, [0, 1])
    updates = launch(parts, [1])
    parts.residency.begin_update([1], in_backward=True)
    assert parts.units[1].state is UnitState.AWAITING and updates[1].start() is not None


def test_units_in_use_keep_their_frames(parts: Parts) -> None:
    cycle(parts, [2, 3])
    parts.units[3].gathered_uses = 1
    launch(parts, range(4))
    parts.residency.begin_update([0, 1, 2, 3])
    assert [unit.state for unit in parts.units].count(UnitState.AWAITING) == 2
    assert parts.units[3].state is UnitState.AWAITING and parts.units[0].state is UnitState.AWAITING
    parts.units[3].gathered_uses = 0


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
    before = owner.parts.store.counters.snapshot()["written.nvme"]
    for _ in range(2):
        model(torch.ones(1, 8)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        written.append(zo.stats(model).written_bytes["nvme"])
    zo.close(model)
    assert written[1] > 0
    assert written[0] - before == (0 if overlap == "forward" else written[1])


@pytest.mark.parametrize("num_frames", [3, 4, 6, 8, 10])
@pytest.mark.parametrize("overlap", ["none", "forward"])
def test_a_step_reads_what_the_arithmetic_says(num_frames: int, overlap: str, nvme: Path) -> None:
    """Ten units of one frame, there and back: what has no frame at the turn is read again, the first unit apart, whose
    input wants no gradient. After a serial update forward reads what had no frame then; beside forward, the update
    delivers some of that too. A split that keeps some units for good would read two units more each way: those whose
    frames the others pass through."""
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
