"""A process that is stopped, whose kernel goes on; and ranks that are late, who are not to blame."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path

import pytest

from tests.helpers.pairwise import full
from tests.machines.hosts import Program, hosts_of, unsupported

PROGRAM = Path(__file__).with_name("late.py")
MANY = 100_000
START_S = 180
"""For a start of Python beside other tests."""
NAMED_S, LATE_S = 35, 40
"""Until ranks have named another, which takes 20 s, and more beside other tests; and how long a rank is late."""
ERROR = re.compile(r"^RankError at ([\d.]+): (.*)", re.MULTILINE)


@pytest.fixture(autouse=True)
def _allowed() -> None:
    if why := unsupported():
        pytest.skip(why)


def named_by(program: Program, limit_s: float) -> tuple[float, str]:
    """When this rank gave up, and whom it named."""
    assert program.end(limit_s) != 0
    found = ERROR.search(program.said)
    assert found is not None, program.said
    return float(found[1]), found[2]


@pytest.mark.parametrize(("count", "victim"), [(2, 1), full(2, 0), (3, 0), full(3, 1)])
def test_the_only_rank_of_a_machine_that_is_stopped_is_named(count: int, victim: int, tmp_path: Path) -> None:
    """Rank 0 has the store too."""
    with hosts_of(tmp_path, count) as hosts:
        programs = hosts.start(PROGRAM, MANY)
        for program in programs:
            program.wait_for("step 2 ", START_S)
        began_s = time.monotonic()
        os.kill(programs[victim].pid, signal.SIGSTOP)
        for rank, program in enumerate(programs):
            if rank != victim:
                at_s, said = named_by(program, START_S)
                assert at_s - began_s < NAMED_S and said.startswith(f"rank {victim}") and "(stopped)" in said
        programs[victim].process.kill()


def test_a_stop_of_some_seconds_is_waited_for(tmp_path: Path) -> None:
    with hosts_of(tmp_path, 2) as hosts:
        programs = hosts.start(PROGRAM, MANY)
        for program in programs:
            program.wait_for("step 2 ", START_S)
        pid = programs[1].pid
        for _ in range(2):
            os.kill(pid, signal.SIGSTOP)
            at = len(programs[0].said)
            time.sleep(7)
            os.kill(pid, signal.SIGCONT)
            deadline = time.monotonic() + START_S
            while len(programs[0].said) < at + 200:
                assert programs[0].process.poll() is None and time.monotonic() < deadline, programs[0].said
                time.sleep(0.1)
        for program in programs:
            program.process.kill()


@pytest.mark.full
def test_ranks_that_are_late_are_waited_for(tmp_path: Path) -> None:
    """A call that holds the interpreter for 30 s, and a forward of 60 s."""
    with hosts_of(tmp_path, 2) as hosts:
        programs = hosts.start(PROGRAM, 5, "1:2:hold:30", "0:3:compute:60")
        assert [program.end(START_S + 90) for program in programs] == [0, 0], programs[0].said


@pytest.mark.parametrize(("late", "how"), [(0, "compute"), full(0, "hold"), full(1, "compute"), full(1, "hold")])
def test_a_rank_that_is_late_while_a_machine_ends_is_not_blamed(late: int, how: str, tmp_path: Path) -> None:
    """It comes when the others have ended, and rank 0's process, with the store, may be one of them."""
    with hosts_of(tmp_path, 3) as hosts:
        programs = hosts.start(PROGRAM, MANY, f"{late}:3:{how}:{LATE_S}")
        programs[late].wait_for(how, START_S)
        for program in programs:
            program.wait_for("step 2 ", START_S)
        time.sleep(1)
        began_s = time.monotonic()
        programs[2].process.kill()
        at_s, said = named_by(programs[1 - late], START_S)
        assert said.startswith("rank 2 (process ") and at_s - began_s < NAMED_S, said
        assert f"{how} is over" not in programs[late].said
        _, said = named_by(programs[late], START_S)
        if how == "compute" or late == 0:
            assert said.startswith("rank 2 (process "), said
        else:
            assert "the store of the process group" in said  # it could not listen, and the store ended meanwhile
