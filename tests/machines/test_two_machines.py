"""Machines with drives of their own that come in another order, more or fewer, and that are asked to end."""

from __future__ import annotations

import os
import re
import shutil
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.helpers import ranks
from tests.helpers.ranks import Case, RankPools
from tests.machines.hosts import Hosts, Program, hosts_of, unsupported

PROGRAM, LOOP = (Path(__file__).with_name(name) for name in ("program.py", "loop.py"))
MANY = 100_000
PAIR = (0, 1)
START_S = 180
"""For a start of Python beside other tests."""


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    if why := unsupported():
        pytest.skip(why)
    with hosts_of(tmp_path, 4) as made:
        yield made


def test_a_run_goes_on_with_other_machines(hosts: Hosts, pools: RankPools) -> None:
    """Two, three in another order, four, and four in another order. Losses are those of ranks of one machine that see
    one directory, and change their number at the same steps."""
    case = Case({"params": "nvme", "optimizer": "nvme", "precision": "fp32", "existing": "resume"}, max_norm=1.0)
    shared = replace(case, settings=case.settings | {"nvme": hosts.drive.parent / "shared"})
    for number, order in enumerate([(0, 1), (2, 1, 0), (3, 0, 1, 2), (1, 2, 3, 0)]):
        programs = hosts.start(PROGRAM, hosts.drive, number + 1, 3, order=order)
        assert [program.end(START_S) for program in programs] == [0] * len(order), programs[0].said
        expected = pools.of(len(order)).succeed(ranks.train, replace(shared, num_steps=number + 1))
        for program, outcome in zip(programs, expected, strict=True):
            assert f"first {number}" in program.said
            losses = dict(re.findall(r"^step (\d+) (\S+)", program.said, re.MULTILINE))
            assert losses == {str(number): outcome.losses[0].hex()}
    # A machine with a drive that was emptied, and no twin: one sentence names it on all.
    shutil.rmtree(hosts.hosts[2].folder / "run")
    for program in hosts.start(PROGRAM, hosts.drive, 5, 3, order=(0, 1, 2, 3)):
        assert program.end(START_S) != 0
        assert f"which were in {hosts.drive / 'run'} on {hosts.hosts[2].name}" in program.said


def _seen(program: Program) -> dict[int, str]:
    return {int(step): seen for step, seen in re.findall(r"^step (\d+) (.*)$", program.said, re.MULTILINE)}


def test_sigterm_on_one_machine_is_a_commit_and_a_code_on_both(hosts: Hosts) -> None:
    code = 75
    programs = hosts.start(LOOP, hosts.drive, MANY, code, "25s", order=PAIR)
    for program in programs:
        program.wait_for("step 2 ", START_S)
    os.kill(programs[1].pid, signal.SIGTERM)
    assert [program.end(START_S) for program in programs] == [code, code], programs[0].said
    seen = [_seen(program) for program in programs]
    done = [max(each) for each in seen]
    assert done[0] == done[1]
    assert f"stopped by SIGTERM on rank 1 after step {done[0]}: step {done[0]} is committed" in programs[0].said
    # A step that does not end: both machines end at once, and the step is made again.
    for host in hosts.hosts[:2]:
        (host.folder / "slow").write_text(str(done[0] + 2))
    programs = hosts.start(LOOP, hosts.drive, MANY, code, "2s", order=PAIR)
    for program in programs:
        program.wait_for("slow", START_S)
    began = time.monotonic()
    os.kill(programs[0].pid, signal.SIGUSR1)
    assert [program.end(START_S) for program in programs] == [code, code], programs[1].said
    assert time.monotonic() - began < 10 and "has not ended 2 s after SIGUSR1 on rank 0" in programs[0].said
    assert [min(_seen(program)) for program in programs] == [done[0] + 1] * 2
    for each, program in zip(seen, programs, strict=True):
        each |= _seen(program)
    for host in hosts.hosts[:2]:
        (host.folder / "slow").unlink()
    last = done[0] + 3
    programs = hosts.start(LOOP, hosts.drive, last, code, "25s", order=PAIR)
    assert [program.end(START_S) for program in programs] == [0, 0], programs[0].said
    assert [min(_seen(program)) for program in programs] == [done[0] + 2] * 2
    again = [_seen(program) for program in programs]
    assert [each[done[0] + 2] for each in again] == [each[done[0] + 2] for each in seen]
    for host in hosts.hosts[:2]:
        shutil.rmtree(host.folder / "run")
    whole = hosts.start(LOOP, hosts.drive, last, code, "25s", order=PAIR)
    assert [program.end(START_S) for program in whole] == [0, 0], whole[0].said
    assert [_seen(program) for program in whole] == [old | new for old, new in zip(seen, again, strict=True)]
