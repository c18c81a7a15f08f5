"""Runs of several machines to which something happens: who says so, how soon, and that the next start goes on."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.helpers import ranks
from tests.helpers.pairwise import in_turn
from tests.helpers.ranks import Case, RankPools
from tests.machines.hosts import Hosts, Program, hosts_of, unsupported

PROGRAM = Path(__file__).with_name("program.py")
EXIT_CODE, MANY = 75, 100_000
START_S = 180
"""For a start of Python beside other tests."""
NAMED_S, CUT_OFF_S = 45, 60
"""Until ranks have named a machine that is gone, which takes 20 s, and more beside other tests. Ranks of a machine that
hears the others, and cannot answer, may wait until these have given up."""
ROOM = 64 << 20
MORE = 3
"""Steps of the second start."""


def kill_a_rank(hosts: Hosts, programs: list[Program]) -> None:
    os.kill(programs[-1].pid, signal.SIGKILL)


def kill_a_machine(hosts: Hosts, programs: list[Program]) -> None:
    programs[-1].process.kill()


def cut(hosts: Hosts, programs: list[Program]) -> None:
    hosts.cut(len(hosts.hosts) - 1)


def silence(hosts: Hosts, programs: list[Program]) -> None:
    hosts.silence(len(hosts.hosts) - 1)


ENDS: dict[str, Callable[[Hosts, list[Program]], None]] = {
    "kill a rank": kill_a_rank,
    "kill a machine": kill_a_machine,
    "cut": cut,
    "silence": silence,
}
LAYOUTS = {"2": (2, 1), "2x2": (2, 2), "4": (4, 1)}


@pytest.fixture(autouse=True)
def _allowed() -> None:
    if why := unsupported():
        pytest.skip(why)


def losses_of(program: Program) -> dict[int, str]:
    return {int(step): loss for step, loss in re.findall(r"^step (\d+) (\S+)", program.said, re.MULTILINE)}


def first_of(program: Program) -> int:
    found = re.search(r"^first (\d+)", program.said, re.MULTILINE)
    assert found is not None, program.said
    return int(found[1])


def check_goes_on(
    hosts: Hosts, per_host: int, stage: int, done: int, seen: list[dict[int, str]], pools: RankPools
) -> int:
    """The next start goes on from `done`, a step more or less; all losses are those of a run without a mishap."""
    again = hosts.start(PROGRAM, hosts.drive, done + MORE, stage, per_host=per_host)
    assert [program.end(START_S) for program in again] == [0] * len(again), again[0].said
    (first,) = {first_of(program) for program in again}
    assert done - 2 <= first <= done  # a step is committed behind the next one
    settings = {"precision": "fp32", "stage": stage}
    expected = pools.of(len(again)).succeed(ranks.train, Case(settings, num_steps=done + MORE, max_norm=1.0))
    for program, before, outcome in zip(again, seen, expected, strict=True):
        plain = [loss.hex() for loss in outcome.losses]
        assert all(plain[step] == loss for step, loss in (before | losses_of(program)).items())
    return first


@in_turn(mishap=[*ENDS], layout=["2", "2x2", "4"], drives=["own", "shared"], stage=[3, 1, 2, 0])
def test_an_end_is_named_by_all_and_the_run_goes_on(
    mishap: str,
    layout: str,
    drives: str,
    stage: int,
    tmp_path: Path,
    pools: RankPools,
    record_property: Callable[..., None],
) -> None:
    count, per_host = LAYOUTS[layout]
    with hosts_of(tmp_path, count, is_shared=drives == "shared") as hosts:
        programs = hosts.start(PROGRAM, hosts.drive, MANY, stage, per_host=per_host)
        for program in programs:
            program.wait_for("step 2 ", START_S)
        ENDS[mishap](hosts, programs)
        began_s = time.monotonic()
        is_killed = mishap.startswith("kill")
        last = programs[-per_host if mishap == "kill a machine" else -1 :] if is_killed else []
        survivors = programs[: len(programs) - len(last)]
        took_s = []
        for program in survivors:
            assert program.end(START_S) != 0
            found = re.search(r"^(\w+) at ([\d.]+): (.*)", program.said, re.MULTILINE)
            assert found is not None and found[1] == "RankError", program.said
            took_s.append(float(found[2]) - began_s)
        reached = took_s if is_killed else took_s[:-per_host]
        assert max(reached) < NAMED_S and max(took_s) < CUT_OFF_S
        record_property("seconds", max(reached))
        for program in programs:
            program.end(START_S)
        if is_killed:
            for program in survivors:
                named = f"rank {len(programs) - 1}" in program.said or hosts.hosts[-1].name in program.said
                assert named, program.said
        elif mishap == "cut":
            # The store is on the first machine.
            for program in programs[:-per_host]:
                assert f"on {hosts.hosts[-1].name}" in program.said, program.said
            for program in programs[-per_host:]:
                assert f"on {hosts.hosts[0].address} does not answer" in program.said, program.said
            hosts.mend(count - 1)
        else:
            hosts.hear(count - 1)
        seen = [losses_of(program) for program in programs]
        done = max(map(max, (each for each in seen if each)))
        check_goes_on(hosts, per_host, stage, done + 1, seen, pools)
        if drives == "own":
            # Each machine has its own ranks' files, and no others.
            for index, host in enumerate(hosts.hosts):
                own = {f"rank{index * per_host + local}.swap" for local in range(per_host)}
                assert {path.name for path in (host.folder / "run").glob("*.swap")} == own


@in_turn(layout=["2x2", "4"], drives=["own", "shared"], stage=[3, 1])
def test_a_signal_to_one_rank_ends_all_behind_one_step(
    layout: str, drives: str, stage: int, tmp_path: Path, pools: RankPools
) -> None:
    count, per_host = LAYOUTS[layout]
    with hosts_of(tmp_path, count, is_shared=drives == "shared") as hosts:
        programs = hosts.start(PROGRAM, hosts.drive, MANY, stage, per_host=per_host)
        for program in programs:
            program.wait_for("step 2 ", START_S)
        os.kill(programs[-1].pid, signal.SIGTERM)
        assert {program.end(NAMED_S) for program in programs} == {EXIT_CODE}, programs[0].said
        seen = [losses_of(program) for program in programs]
        (done,) = {max(each) + 1 for each in seen}
        assert check_goes_on(hosts, per_host, stage, done, seen, pools) == done


@in_turn(layout=["2", "4"], stage=[3, 1])
def test_a_link_that_is_cut_for_ten_seconds_is_waited_for(
    layout: str, stage: int, tmp_path: Path, pools: RankPools
) -> None:
    count, per_host = LAYOUTS[layout]
    with hosts_of(tmp_path, count) as hosts:
        programs = hosts.start(PROGRAM, hosts.drive, MANY, stage)
        for program in programs:
            program.wait_for("step 2 ", START_S)
        hosts.cut(count - 1)
        time.sleep(10)
        at = max(losses_of(programs[0]))
        hosts.mend(count - 1)
        for program in programs:
            program.wait_for(f"step {at + 3} ", START_S)
        for program in programs:
            program.process.kill()
            program.process.wait()
        seen = [losses_of(program) for program in programs]
        check_goes_on(hosts, per_host, stage, max(map(max, seen)) + 1, seen, pools)


def test_a_delay_of_each_packet(tmp_path: Path, pools: RankPools) -> None:
    with hosts_of(tmp_path, 2, delay_s=0.005) as hosts:
        programs = hosts.start(PROGRAM, hosts.drive, 3, 3)
        assert [program.end(START_S) for program in programs] == [0, 0], programs[0].said
        seen = [losses_of(program) for program in programs]
        check_goes_on(hosts, 1, 3, 3, seen, pools)


@in_turn(drives=["own", "shared"], stage=[3, 0])
def test_a_full_drive_is_named_and_the_run_goes_on(drives: str, stage: int, tmp_path: Path, pools: RankPools) -> None:
    """Slots are laid out before the first step; manifests need room in each commit."""
    with hosts_of(tmp_path, 2, is_shared=drives == "shared", room=ROOM) as hosts:
        programs = hosts.start(PROGRAM, hosts.drive, MANY, stage)
        for program in programs:
            program.wait_for("step 2 ", START_S)
        filler = hosts.hosts[-1].folder / "filler"
        with filler.open("wb", buffering=0) as file:
            try:
                while file.write(bytes(1 << 16)):
                    pass
            except OSError:
                pass
        assert all(program.end(START_S) != 0 for program in programs)
        assert any("No space left" in program.said for program in programs), programs[-1].said
        assert all(re.search(r"^\w+Error at ", program.said, re.MULTILINE) for program in programs), programs[0].said
        filler.unlink()
        seen = [losses_of(program) for program in programs]
        check_goes_on(hosts, 1, stage, max(map(max, seen)) + 1, seen, pools)


def test_a_damaged_shard_of_one_machine_is_named_and_nothing_is_deleted(tmp_path: Path, pools: RankPools) -> None:
    with hosts_of(tmp_path, 2) as hosts:
        programs = hosts.start(PROGRAM, hosts.drive, 3, 3)
        assert [program.end(START_S) for program in programs] == [0, 0], programs[0].said
        seen = [losses_of(program) for program in programs]
        files = {path: path.read_bytes() for host in hosts.hosts for path in host.folder.rglob("*") if path.is_file()}
        shard = hosts.hosts[1].folder / "run" / "rank1.swap"
        whole = shard.read_bytes()
        # All of it: one of the two slots is the generation's.
        shard.write_bytes(bytes(each ^ 0x10 for each in whole))
        again = hosts.start(PROGRAM, hosts.drive, 5, 3)
        assert all(program.end(START_S) != 0 for program in again)
        assert any("rank1.swap" in program.said for program in again), again[1].said
        assert {path for host in hosts.hosts for path in host.folder.rglob("*") if path.is_file()} >= set(files)
        shard.write_bytes(whole)
        check_goes_on(hosts, 1, 3, 3, seen, pools)
