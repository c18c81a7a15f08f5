"""A machine that ends at each file operation of a commit: the next start goes on, and nothing is lost."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.helpers.pairwise import full
from tests.machines.hosts import Hosts, hosts_of, unsupported

SERVE, PROGRAM = (Path(__file__).with_name(name) for name in ("serve.py", "program.py"))
STRUCK = 2
"""The step whose operations these are: those before it are committed."""
STEPS = STRUCK + 3
START_S = 180
"""For a start of Python beside other tests."""
DIED = 9


@pytest.fixture(autouse=True)
def _allowed() -> None:
    if why := unsupported():
        pytest.skip(why)


@dataclass
class Ended:
    """A rank's program."""

    code: int
    said: str

    @property
    def losses(self) -> dict[int, str]:
        return {int(step): loss for step, loss in re.findall(r"^step (\d+) (\S+)", self.said, re.MULTILINE)}

    def number(self, word: str) -> int:
        """The one behind this word, which begins a line."""
        found = re.search(rf"^{word} (\d+)", self.said, re.MULTILINE)
        assert found is not None, self.said
        return int(found[1])


class Machines:
    """Two machines on which a program starts at once: Python is there, and torch imported."""

    def __init__(self, hosts: Hosts, stage: int) -> None:
        self._hosts, self._stage = hosts, stage
        self._servers = hosts.start(SERVE, PROGRAM, hosts.drive)

    def run(self, steps: int, die_at: str = "-1 -1 0") -> list[Ended]:
        """Each rank, at its end."""
        outs = [self._hosts.drive.parent / f"job{rank}.txt" for rank in (0, 1)]
        codes = [out.with_name(f"{out.name}.code") for out in outs]
        arguments = [str(each) for each in (self._hosts.drive, steps, self._stage)]
        for rank, (host, out, code) in enumerate(zip(self._hosts.hosts, outs, codes, strict=True)):
            code.unlink(missing_ok=True)
            self._wait_for(host.folder / f"jobs{rank}")
            with (host.folder / f"jobs{rank}").open("w") as file:
                file.write(f"{json.dumps([str(out), {'DIE_AT': die_at}, arguments])}\n")
        for code in codes:
            self._wait_for(code)
        return [Ended(int(code.read_text()), out.read_text()) for out, code in zip(outs, codes, strict=True)]

    def _wait_for(self, path: Path) -> None:
        deadline = time.monotonic() + START_S
        while not path.exists():
            assert time.monotonic() < deadline, f"no {path}: {[server.said for server in self._servers]}"
            time.sleep(0.02)

    def clear(self) -> None:
        for host in self._hosts.hosts:
            shutil.rmtree(host.folder / "run", ignore_errors=True)


@pytest.mark.parametrize(
    ("victim", "stage", "drives", "every"),
    [
        (1, 3, "own", 13),
        *(full(*row, 1) for row in ((1, 3, "own"), (0, 3, "own"), (1, 1, "own"), (1, 3, "shared"), (0, 3, "shared"))),
    ],
)
def test_a_machine_that_ends_at_a_file_operation_of_a_commit_loses_nothing(
    victim: int, stage: int, drives: str, every: int, tmp_path: Path, record_property: Callable[..., None]
) -> None:
    """One of `every` operations is struck, and the last one."""
    with hosts_of(tmp_path, 2, is_shared=drives == "shared") as hosts:
        machines = Machines(hosts, stage)
        count = machines.run(STRUCK + 1, f"{victim} {STRUCK} 0")[victim].number("operations")
        machines.clear()
        expected = machines.run(STEPS)
        begins = []
        for operation in reversed(range(count, 0, -every)):
            machines.clear()
            struck = machines.run(STRUCK + 1, f"{victim} {STRUCK} {operation}")
            assert struck[victim].code == DIED, f"operation {operation} of {count}: {struck[victim]}"
            again = machines.run(STEPS)
            assert [each.code for each in again] == [0, 0], f"operation {operation} of {count}: {again}"
            (begin,) = {each.number("first") for each in again}
            begins.append(begin)
            for whole, before, after in zip(expected, struck, again, strict=True):
                assert len(whole.losses) == STEPS
                assert whole.losses == whole.losses | before.losses | after.losses
    record_property("begins", begins)
    # The step is there from the operation on that decides it. In one directory, where nothing is flushed, that is the
    # last one, and a machine that ends before it leaves the step undecided.
    ends = {STRUCK} if drives == "shared" else {STRUCK, STRUCK + 1}
    assert {*begins} == ends and begins == sorted(begins), begins
