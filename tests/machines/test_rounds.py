"""Two machines with two ranks each: rounds of words between them, and a rank that goes another way."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers import ranks
from tests.helpers.pairwise import full
from tests.helpers.ranks import Case, RankPools
from tests.machines.hosts import PORT, Hosts, Program, hosts_of, unsupported

PROGRAM = Path(__file__).with_name("pair.py")
START_S = 180
"""For a start of Python beside other tests."""


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    if why := unsupported():
        pytest.skip(why)
    with hosts_of(tmp_path, 2) as made:
        yield made


def lines_of(program: Program, kind: str) -> dict[tuple[int, int], str]:
    """By rank and step."""
    found = re.findall(rf"^rank (\d+) step (\d+) .*\b{kind} (\S+)", program.said, re.MULTILINE)
    return {(int(rank), int(step)): value for rank, step, value in found}


@pytest.mark.parametrize("stage", [3, full(1)])
def test_four_ranks_of_two_machines_agree_in_few_rounds(stage: int, hosts: Hosts, pools: RankPools) -> None:
    """Two of each: rounds between machines do not grow with units once a step is known, and bits are one machine's."""
    programs = hosts.start(PROGRAM, stage, 6, environment={"MASTER_PORT": str(PORT)})
    assert [program.end(START_S) for program in programs] == [0, 0], programs[0].said
    case = Case({"stage": stage, "precision": "fp32"}, num_steps=6, max_norm=1.0)
    expected = pools.of(4).succeed(ranks.train, case)
    for machine, program in enumerate(programs):
        losses, rounds = lines_of(program, "loss"), lines_of(program, "rounds")
        for rank in (2 * machine, 2 * machine + 1):
            assert [losses[rank, step] for step in range(6)] == [loss.hex() for loss in expected[rank].losses]
        for step in range(3, 6):  # three of the step, and the commit's
            assert int(rounds[2 * machine, step]) <= 4 and int(rounds[2 * machine + 1, step]) == 0
        assert int(rounds[2 * machine, 0]) > 8


def test_a_rank_that_goes_another_way_is_named_on_both_machines(hosts: Hosts) -> None:
    programs = hosts.start(PROGRAM, 3, 20, 6, environment={"MASTER_PORT": str(PORT + 1)})
    for machine, program in enumerate(programs):
        assert program.end(START_S) == 3
        for rank in (2 * machine, 2 * machine + 1):
            found = re.search(rf"^rank {rank} ZeroOffloadError at [\d.]+: (.*)", program.said, re.MULTILINE)
            assert found is not None and "rank 3 is at " in found[1], program.said
            assert "Each rank went its own way through the model" in found[1]
