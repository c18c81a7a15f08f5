"""Machines with drives of their own: a network that is cut, and machines that come in another order, more or fewer."""

from __future__ import annotations

import re
import shutil
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.helpers import ranks
from tests.helpers.ranks import Case, RankPool, RankPools
from tests.machines.hosts import Hosts, Program, hosts_of, unsupported

PROGRAM, LOOP = (Path(__file__).with_name(name) for name in ("program.py", "loop.py"))
MANY = 100_000
PAIR = (0, 1)
START_S, NAMED_S = 120, 25
"""For a start of Python beside other tests; until all ranks have named a machine that is gone, which takes 20 s."""


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    if why := unsupported():
        pytest.skip(why)
    with hosts_of(tmp_path, 4) as made:
        yield made


def test_a_cut_link_is_named_on_both_sides_and_the_run_goes_on(hosts: Hosts, pool: RankPool) -> None:
    expected = pool.succeed(ranks.train, Case({"precision": "fp32"}, num_steps=3, max_norm=1.0))
    programs = hosts.start(PROGRAM, hosts.drive, MANY, order=PAIR)
    for program in programs:
        program.wait_for("step 2 ", START_S)
    hosts.cut(1)
    cut_s = time.monotonic()
    for rank, program in enumerate(programs):
        assert program.end(START_S) != 0
        kind, at = re.search(r"^(\w+) at ([\d.]+): ", program.said, re.MULTILINE).groups()  # type: ignore[union-attr]
        assert kind == "RankError" and float(at) - cut_s < NAMED_S, program.said
        # The store is on the first machine.
        named = f"on {hosts.hosts[1].name}" if rank == 0 else f"on {hosts.hosts[0].address} does not answer"
        assert named in program.said
    losses = [dict(re.findall(r"^step (\d+) (\S+)", program.said, re.MULTILINE)) for program in programs]
    for found, outcome in zip(losses, expected, strict=True):
        assert [found[str(step)] for step in range(3)] == [loss.hex() for loss in outcome.losses]
    hosts.mend(1)
    done = max(map(int, losses[0]))
    again = hosts.start(PROGRAM, hosts.drive, done + 3, order=PAIR)
    assert [program.end(START_S) for program in again] == [0, 0], again[0].said
    firsts = {re.search(r"^first (\d+)", program.said, re.MULTILINE).group(1) for program in again}  # type: ignore[union-attr]
    assert len(firsts) == 1 and done - 1 <= int(firsts.pop()) <= done + 1
    # Each machine has its own rank's files, and no others.
    for rank, host in enumerate(hosts.hosts[:2]):
        assert [path.name for path in (host.folder / "run").glob("*.swap")] == [f"rank{rank}.swap"]


def test_a_run_goes_on_with_other_machines(hosts: Hosts, pools: RankPools) -> None:
    """Two, three in another order, four, and four in another order. Losses are those of ranks of one machine that see
    one directory, and change their number at the same steps."""
    case = Case({"params": "nvme", "optimizer": "nvme", "precision": "fp32", "existing": "resume"}, max_norm=1.0)
    shared = replace(case, settings=case.settings | {"nvme": hosts.drive.parent / "shared"})
    for number, order in enumerate([(0, 1), (2, 1, 0), (3, 0, 1, 2), (1, 2, 3, 0)]):
        programs = hosts.start(PROGRAM, hosts.drive, number + 1, order=order)
        assert [program.end(START_S) for program in programs] == [0] * len(order), programs[0].said
        expected = pools.of(len(order)).succeed(ranks.train, replace(shared, num_steps=number + 1))
        for program, outcome in zip(programs, expected, strict=True):
            assert f"first {number}" in program.said
            losses = dict(re.findall(r"^step (\d+) (\S+)", program.said, re.MULTILINE))
            assert losses == {str(number): outcome.losses[0].hex()}
    # A machine with a drive that was emptied, and no twin: one sentence names it on all.
    shutil.rmtree(hosts.hosts[2].folder / "run")
    for program in hosts.start(PROGRAM, hosts.drive, 5, order=(0, 1, 2, 3)):
        assert program.end(START_S) != 0
        assert f"which were in {hosts.drive / 'run'} on {hosts.hosts[2].name}" in program.said


def _seen(program: Program) -> dict[int, str]:
    return {int(step): seen for step, seen in re.findall(r"^step (\d+) (.*)$", program.said, re.MULTILINE)}


def test_sigterm_on_one_machine_is_a_commit_and_a_code_on_both(hosts: Hosts) -> None:
    code = 75
    programs = hosts.start(LOOP, hosts.drive, MANY, code, "25s", order=PAIR)
    for program in programs:
        program.wait_for("step 2 ", START_S)
    programs[1].send(signal.SIGTERM)
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
    programs[0].send(signal.SIGUSR1)
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
