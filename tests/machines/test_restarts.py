"""Commands under `torchrun --max-restarts` on two machines: a rank is killed in each start, and the next one meets."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.helpers.pairwise import full
from tests.machines.hosts import Hosts, Program, hosts_of, unsupported

START_S = 300
"""For torchrun to notice, and a start of Python, beside other tests."""
STEPS = "100000"
COMMON = ("--steps", STEPS, "--commit-every", "1", "--batch", "2")
RESUMED = "resuming from "

Row = tuple[int, float]


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    if why := unsupported():
        pytest.skip(why)
    with hosts_of(tmp_path, 2) as made:
        yield made


def words_of(command: str, folder: Path) -> list[object]:
    """The command, of a small model, and data in the folder."""
    if command == "train":
        data = folder / "text.txt"
        data.write_text("".join(f"{number} and {number * 7 % 91} are numbers.\n" for number in range(3000)))
        return ["train", "--model", "tiny", "--seq", 32, "--data", data, "--eval-every", STEPS, *COMMON]
    pytest.importorskip("transformers")
    import tests.helpers.tools  # noqa: F401  # before transformers
    from tests.helpers import folders

    model, data = folders.write_folder(folder / "model"), folders.write_instructions(folder / "chat.jsonl", 60)
    return ["finetune", model, "--data", data, "--seq", 96, "--lora", 4, "--precision", "fp32", *COMMON]


def rows_of(out: Path) -> list[Row]:
    """Steps and losses; a last line that is still in writing is left out."""
    file = out / "metrics.jsonl"
    lines = file.read_text().splitlines(keepends=True) if file.exists() else []
    rows = [json.loads(line) for line in lines if line.endswith("\n")]
    return [(row["step"], row["loss"]) for row in rows]


def wait_until(agent: Program, is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + START_S
    while not is_so():
        assert time.monotonic() < deadline and agent.process.poll() is None, agent.said
        time.sleep(0.1)


@pytest.mark.parametrize(
    ("command", "restarts"), [("train", 1), full("train", 20), full("finetune", 20)], ids=lambda each: str(each)
)
def test_killed_ranks_meet_again(
    command: str, restarts: int, hosts: Hosts, tmp_path: Path, record_property: Callable[..., None]
) -> None:
    """By night all rows are those of a run that is not killed."""
    words = words_of(command, tmp_path)

    def launch(name: str) -> list[Program]:
        places = ["--out", tmp_path / name, "--nvme", hosts.drive / name]
        command = ["-m", "zero_offload", *words, *places]
        return [hosts.launch(number, "2", *command, restarts=restarts) for number in (0, 1)]

    def end(agents: list[Program]) -> None:
        for agent in agents:
            agent.process.kill()
            agent.process.wait()

    killed, whole = tmp_path / "killed", tmp_path / "whole"
    agents = launch("killed")
    for met in range(restarts + 1):
        seen = len(rows_of(killed))
        wait_until(agents[0], lambda: agents[0].said.count(RESUMED) == met and len(rows_of(killed)) > seen + 1)  # noqa: B023
        record_property("met", met)
        if met < restarts:
            (rank,) = agents[met % 2].ranks()
            os.kill(rank, signal.SIGKILL)
    end(agents)
    rows = rows_of(killed)
    assert [step for step, _ in rows] == list(range(1, len(rows) + 1))
    if restarts > 1:
        agents = launch("whole")
        wait_until(agents[0], lambda: len(rows_of(whole)) >= len(rows))
        end(agents)
        assert rows_of(whole)[: len(rows)] == rows
