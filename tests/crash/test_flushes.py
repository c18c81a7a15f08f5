"""Flushes that the order of a commit does not show: names on the way, what a resume believes, what a discard leaves."""

from __future__ import annotations

from dataclasses import replace

from tests.helpers.crash_run import Crash, Plan, Setup, explore, play
from tests.helpers.crashfs import CrashFS
from zero_offload.config import Durability

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
