"""Flushes that the order of a commit does not show: names on the way, what a resume believes, what a discard leaves."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.helpers.crash_disk import Sync
from tests.helpers.crash_run import Crash, Plan, Setup, explore, play
from tests.helpers.crashfs import CrashFS
from zero_offload.base.types import Durability

COMMIT = Setup(Durability.COMMIT)
STRIPED = replace(COMMIT, directories=("/a/run", "/b/run"))


def test_power_loss_does_not_take_the_directory_that_a_run_has_made() -> None:
    history = play(CrashFS(), replace(COMMIT, directories=("/mnt/drive/runs/one",)), 1, 0)
    tally = explore(history, Plan(Crash.POWER, range(1), begin=len(history.fs.journal)))
    assert (tally.cases, tally.bad) == (1, 0), tally.first_bad


def test_power_loss_takes_no_file_in_the_second_directory() -> None:
    history = play(CrashFS(), STRIPED, 1, 0)
    tally = explore(history, Plan(Crash.POWER, range(1), begin=len(history.fs.journal)))
    assert (tally.cases, tally.bad) == (1, 0), tally.first_bad


@pytest.mark.parametrize("setup", [COMMIT, STRIPED, replace(COMMIT, world_size=2)], ids=str)
def test_a_resume_flushes_what_it_found_before_it_writes(setup: Setup) -> None:
    """A run is killed between a rename and its flush; the next one believes the rename, and power is lost."""
    history = play(CrashFS(), setup, 2, 0)
    renamed = len(history.fs.journal) - 1
    power = Plan(Crash.POWER, range(5), every=2 * setup.world_size - 1)
    tally = explore(history, Plan(Crash.KILL, range(1), begin=renamed, then=power))
    assert tally.cases > 90
    assert tally.bad == 0, tally.first_bad


@pytest.mark.parametrize("setup", [COMMIT, STRIPED, replace(COMMIT, world_size=2)], ids=str)
def test_a_run_that_promised_less_goes_on_as_one_that_survives_power_loss(setup: Setup) -> None:
    first = play(CrashFS(), replace(setup, durability=Durability.PROCESS), 2, 0)
    assert first.fs.disk().pending, "nothing is left to flush"
    history = play(CrashFS(first.fs.disk()), setup, 1, 0)
    resumed_at, step = history.reported[0]
    assert step == 2
    tally = explore(history, Plan(Crash.POWER, range(5), begin=resumed_at, every=3 * setup.world_size - 2))
    assert tally.bad == 0, tally.first_bad


@pytest.mark.parametrize("setup", [COMMIT, STRIPED, replace(COMMIT, world_size=2)], ids=str)
def test_power_loss_while_a_run_is_discarded(setup: Setup) -> None:
    """The old generation is left or none, and never keeps a run from starting."""
    old = play(CrashFS(), setup, 2, 0)
    history = play(CrashFS(old.fs.disk()), replace(setup, existing="discard"), 0, 0)
    assert history.opened[0][0] == 0
    tally = explore(replace(history, setup=setup), Plan(Crash.POWER, range(8), every=2 * setup.world_size - 1))
    assert tally.bad == 0, tally.first_bad


@pytest.mark.parametrize("setup", [COMMIT, STRIPED], ids=str)
def test_what_a_commit_flushes(setup: Setup) -> None:
    """The swap file in each directory, two manifests, and twice the names; nothing where only kills are survived."""
    history = play(CrashFS(), setup, 3, 0)
    second, third = (at for at, _ in history.reported[-2:])
    flushes = [op for op in history.fs.journal[second:third] if isinstance(op, Sync)]
    assert len(flushes) == len(setup.directories) + 4
    cheap = play(CrashFS(), replace(setup, durability=Durability.PROCESS), 3, 0)
    resumed = play(CrashFS(cheap.fs.disk()), cheap.setup, 1, 0)
    assert not any(isinstance(op, Sync) for op in cheap.fs.journal + resumed.fs.journal)
