"""torchrun with a range of machines (`--nnodes 1:4`): machines join and leave, and its restarts go on."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import ranks
from tests.helpers.ranks import Case, RankPools
from tests.machines.hosts import Program, hosts_of, unsupported

pytestmark = pytest.mark.full
"""By night: torchrun takes a machine without free cores for gone."""

PROGRAM = Path(__file__).with_name("program.py")
MANY, RESTARTS = 100_000, 20
PAUSE_S = 0.2
START_S = 240
"""For torchrun to notice, and a start of Python, beside other tests."""


@dataclass
class Start:
    """A rank's part in one start."""

    rank: int
    size: int
    first: int
    """The step with which it began."""
    losses: dict[int, str] = field(default_factory=dict)


@pytest.fixture(autouse=True)
def _allowed() -> None:
    if why := unsupported():
        pytest.skip(why)


def starts_of(agent: Program) -> list[Start]:
    """In their order; of a start with several ranks, each."""
    found: list[Start] = []
    of_rank: dict[str, Start] = {}
    for kind, step, rest, rank in re.findall(r"^(first|step) (\d+) (.*) rank (\d+)$", agent.said, re.MULTILINE):
        if kind == "first":
            of_rank[rank] = Start(int(rank), int(rest.removeprefix("of ")), int(step))
            found.append(of_rank[rank])
        else:
            of_rank[rank].losses[int(step)] = rest
    return found


def wait_until(agent: Program, is_so: Callable[[list[Start]], bool]) -> None:
    deadline = time.monotonic() + START_S
    while not is_so(starts_of(agent)):
        assert time.monotonic() < deadline and agent.process.poll() is None, agent.said
        time.sleep(0.2)


def trains_on(size: int) -> Callable[[list[Start]], bool]:
    """The newest start has so many ranks, and has made some steps."""
    return lambda starts: bool(starts) and starts[-1].size == size and len(starts[-1].losses) > 3


def check_losses(agents: Sequence[Program], case: Case, pools: RankPools, meshes: dict[int, Any] | None = None) -> None:
    """Losses of each start are those of ranks of one machine that see one directory, and change their number at the
    same steps. The first machine has a part in all starts."""
    order = [each for each in starts_of(agents[0]) if each.rank == 0]
    ends = [*(each.first for each in order[1:]), max(order[-1].losses) + 1]
    assert len(order) > 1 and ends == sorted(ends)
    for start, end in zip(order, ends, strict=True):
        told = replace(case, num_steps=end, mesh=(meshes or {}).get(start.size))
        expected = pools.of(start.size).succeed(ranks.train, told)
        compared = 0
        for each in (each for agent in agents for each in starts_of(agent)):
            if (each.first, each.size) == (start.first, start.size):
                losses = {step: loss for step, loss in each.losses.items() if step < end}
                plain = dict(enumerate((loss.hex() for loss in expected[each.rank].losses), start.first))
                assert losses == {step: plain[step] for step in losses}
                compared += len(losses)
        assert compared or start.first == end


@pytest.mark.parametrize("most", [3, 4])
def test_machines_join_and_leave_a_run_in_one_directory(most: int, tmp_path: Path, pools: RankPools) -> None:
    agents: list[Program] = []
    with hosts_of(tmp_path, most, is_shared=True) as hosts:

        def launch(number: int) -> None:
            arguments = [PROGRAM, hosts.drive, MANY, 3, PAUSE_S]
            agents.append(hosts.launch(number, f"1:{most}", *arguments, restarts=RESTARTS))

        for number in (0, 1):
            launch(number)
        wait_until(agents[0], trains_on(2))
        for number in range(2, most):
            launch(number)
            wait_until(agents[0], trains_on(number + 1))
        for number in range(1, most):  # the first to leave has a rank in the middle
            agents[number].process.kill()
            wait_until(agents[0], trains_on(most - number))
        agents[0].process.kill()
        agents[0].process.wait()
        sizes = [each.size for each in starts_of(agents[0])]
        assert set(sizes) == {*range(1, most + 1)}
        settings = {"params": "nvme", "optimizer": "nvme", "precision": "fp32", "existing": "resume"}
        check_losses(agents, Case(settings | {"nvme": tmp_path / "plain"}, max_norm=1.0), pools)


def published_in(place: Path) -> list[Path]:
    return sorted(each.parent for each in place.glob("*/.metadata"))


HYBRID = {2: ((0, 1),), 4: ((0, 1), (2, 3))}


@pytest.mark.parametrize("stage", ["hybrid", "0"])
def test_a_machine_with_its_drive_leaves_and_a_twin_goes_on(stage: str, tmp_path: Path, pools: RankPools) -> None:
    """Another machine comes then, with an empty drive."""
    agents: list[Program] = []
    per_host, meshes = (2, HYBRID) if stage == "hybrid" else (1, None)
    with hosts_of(tmp_path, 3) as hosts:

        def launch(number: int) -> None:
            arguments = [PROGRAM, hosts.drive, MANY, stage, PAUSE_S]
            agents.append(hosts.launch(number, "1:2", *arguments, restarts=RESTARTS, per_host=per_host))

        for number in (0, 1):
            launch(number)
        wait_until(agents[0], trains_on(2 * per_host))
        agents[1].process.kill()
        wait_until(agents[0], trains_on(per_host))
        launch(2)
        wait_until(agents[0], trains_on(2 * per_host))
        agents[0].process.kill()
        agents[0].process.wait()
        settings = {"params": "nvme", "optimizer": "nvme", "precision": "fp32", "existing": "resume"}
        settings |= {"stage": 3 if stage == "hybrid" else int(stage), "nvme": tmp_path / "plain"}
        check_losses(agents, Case(settings, max_norm=1.0), pools, meshes)


def test_a_machine_with_its_drive_leaves_and_the_rest_goes_on_from_what_was_published(
    tmp_path: Path, pools: RankPools
) -> None:
    place = tmp_path / "published"
    with hosts_of(tmp_path, 2) as hosts:
        arguments = [PROGRAM, hosts.drive, MANY, 3, PAUSE_S, place]
        agents = [hosts.launch(number, "1:2", *arguments, restarts=RESTARTS) for number in (0, 1)]
        wait_until(agents[0], lambda starts: trains_on(2)(starts) and len(published_in(place)) > 1)
        agents[1].process.kill()
        wait_until(agents[0], trains_on(1))
        agents[0].process.kill()
        agents[0].process.wait()
        first = starts_of(agents[0])[-1].first
        assert re.search(rf"goes on from .*{place}/\d+-step-{first}-", agents[0].said), agents[0].said
        settings = {"params": "nvme", "optimizer": "nvme", "precision": "fp32", "existing": "resume"}
        check_losses(agents, Case(settings | {"nvme": tmp_path / "plain"}, max_norm=1.0), pools)


def test_a_machine_with_the_only_drive_of_its_shards_leaves_and_one_error_says_so(
    tmp_path: Path, pools: RankPools
) -> None:
    with hosts_of(tmp_path, 2) as hosts:

        def launch() -> list[Program]:
            arguments = [PROGRAM, hosts.drive, MANY, 3, PAUSE_S]
            return [hosts.launch(number, "1:2", *arguments, restarts=1) for number in (0, 1)]

        agents = launch()
        wait_until(agents[0], trains_on(2))
        agents[1].process.kill()
        assert agents[0].end(START_S) != 0
        # The first error is about the other machine, the second is that of the new start.
        errors = re.findall(r"^(\w+) at [\d.]+: (.*)$", agents[0].said, re.MULTILINE)
        assert len(errors) == 2 and f"which were in {hosts.drive / 'run'} on {hosts.hosts[1].name}" in errors[1][1]
        # With that machine all go on.
        agents = launch()
        wait_until(agents[0], lambda starts: len(starts) > 1 and trains_on(2)(starts))
        agents[0].process.kill()
        agents[0].process.wait()
        settings = {"params": "nvme", "optimizer": "nvme", "precision": "fp32", "existing": "resume"}
        check_losses(agents, Case(settings | {"nvme": tmp_path / "plain"}, max_norm=1.0), pools)
