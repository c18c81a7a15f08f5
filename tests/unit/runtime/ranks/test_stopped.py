"""Processes of this machine that are stopped, as a rank that waits sees them."""

from __future__ import annotations

import pytest

from zero_offload.runtime.ranks import watch
from zero_offload.runtime.ranks.watch import STOPPED_S, RankProcess, StoppedProcesses

PLACES = {rank: RankProcess("here", "pid:[1]", 100 + rank) for rank in (1, 2)}


class World:
    """The clock, and the states of processes by rank."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.now, self.states = 100.0, {1: "running", 2: "running"}
        patch.setattr(watch.time, "monotonic", lambda: self.now)
        patch.setattr(RankProcess, "state", lambda process: self.states[process.pid - 100])

    def look(self, stopped: StoppedProcesses, seconds: float) -> list[int]:
        """The answer after so many seconds of looks, one in each."""
        found: list[int] = []
        for _ in range(int(seconds)):
            self.now += 1
            found = stopped.among(PLACES)
        return found


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


def test_a_process_is_given_up_after_some_seconds(world: World) -> None:
    stopped = StoppedProcesses()
    assert world.look(stopped, 20) == []
    world.states[2] = "stopped"
    assert world.look(stopped, STOPPED_S) == []
    assert world.look(stopped, 1) == [2]


def test_one_that_goes_on_meanwhile_is_not(world: World) -> None:
    stopped = StoppedProcesses()
    world.states[1] = "stopped"
    world.look(stopped, STOPPED_S - 1)
    world.states[1] = "running"
    world.look(stopped, 1)
    world.states[1] = "stopped"
    assert world.look(stopped, STOPPED_S) == []


def test_a_program_that_was_stopped_as_a_whole_goes_on(world: World) -> None:
    """Ctrl-Z stops this process a moment after the others, and `fg` lets it go on a moment before them."""
    stopped = StoppedProcesses()
    world.states[1] = "stopped"
    world.look(stopped, 1)
    world.now += 3600
    assert world.look(stopped, 1) == []
