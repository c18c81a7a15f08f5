"""Two machines with drives of their own, over a network that is cut."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers import ranks
from tests.helpers.ranks import Case, RankPool
from tests.machines.hosts import Hosts, hosts_of, unsupported

PROGRAM = Path(__file__).with_name("program.py")
MANY = 100_000
START_S, NAMED_S = 120, 25
"""For a start of Python beside other tests; until all ranks have named a machine that is gone, which takes 20 s."""


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    if why := unsupported():
        pytest.skip(why)
    with hosts_of(tmp_path, 2) as made:
        yield made


def test_a_cut_link_is_named_on_both_sides_and_the_run_goes_on(hosts: Hosts, pool: RankPool) -> None:
    expected = pool.succeed(ranks.train, Case({"precision": "fp32"}, num_steps=3, max_norm=1.0))
    programs = hosts.start(PROGRAM, hosts.drive, MANY)
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
    again = hosts.start(PROGRAM, hosts.drive, done + 3)
    assert [program.end(START_S) for program in again] == [0, 0], again[0].said
    firsts = {re.search(r"^first (\d+)", program.said, re.MULTILINE).group(1) for program in again}  # type: ignore[union-attr]
    assert len(firsts) == 1 and done - 1 <= int(firsts.pop()) <= done + 1
    # Each machine has its own rank's files, and no others.
    for rank, host in enumerate(hosts.hosts):
        assert [path.name for path in (host.folder / "run").glob("*.swap")] == [f"rank{rank}.swap"]
