"""Bytes written to drives: the arithmetic, and the plan's figures against the bytes that a run has written."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zero_offload as zo
from tests.helpers.disk import runtime
from zero_offload.plan.wear import Wear

HALVES = {"cpu": 0.5, "nvme": 0.5}


def test_days_and_steps_of_a_drive() -> None:
    # The 10B model of everyone's arithmetic: 12 B/param.
    wear = Wear(states_bytes=120e9, commit_bytes=0, commit_every=1)
    assert wear.bytes_per_step == 120e9
    assert wear.steps_to(600) == 5000
    assert wear.tb_per_day(60.0) == 172.8
    assert not wear.is_bound


def test_commits_are_spread_over_their_steps() -> None:
    wear = Wear(states_bytes=10.0, commit_bytes=120.0, commit_every=30)
    assert (wear.commit_bytes_per_step, wear.bytes_per_step) == (4.0, 14.0)
    auto = Wear(states_bytes=10.0, commit_bytes=120.0, commit_every="auto")
    assert auto.is_bound and auto.bytes_per_step == 130.0
    assert not Wear(10.0, 0.0, "auto").is_bound


def test_a_duration_between_commits_is_some_number_of_steps() -> None:
    timed = Wear(states_bytes=10.0, commit_bytes=120.0, commit_every="2min")
    assert timed.is_bound and timed.bytes_per_step == 130.0
    assert timed.at(50.0) == replace(timed, commit_every=3) and not timed.at(50.0).is_bound
    assert timed.at(500.0).commit_every == 1
    assert timed.at(None) == timed
    for every in (7, "auto"):
        assert replace(timed, commit_every=every).at(50.0).commit_every == every


def test_ranks_add_up_and_drives_share() -> None:
    assert Wear(10.0, 4.0, 2, 6.0).of_one_drive(num_ranks=4, num_drives=2) == Wear(20.0, 8.0, 2, 12.0)


def test_gradients_leave_with_every_backward() -> None:
    assert Wear(10.0, 4.0, 2, grads_bytes=6.0).of_backwards(3).states_bytes == 22.0
    assert Wear(10.0, 4.0, 2).of_backwards(3) == Wear(10.0, 4.0, 2)


PLACEMENTS: list[dict[str, Any]] = [
    {"params": "nvme", "optimizer": "nvme"},
    {"params": "cpu", "optimizer": "nvme"},
    {"params": "cpu", "optimizer": "cpu"},
    {"params": "nvme", "optimizer": "cpu"},
    {"params": "nvme", "optimizer": "nvme", "grads": "nvme"},
    {"params": HALVES, "optimizer": HALVES},
    {"params": "cpu", "optimizer": "cpu", "durability": "scratch"},
    {"params": "nvme", "optimizer": "nvme", "precision": "fp16"},
    {"params": "cpu", "optimizer": "cpu", "precision": "fp32"},
]


@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
def test_a_run_writes_what_the_plan_says(placement: dict[str, Any], nvme: Path) -> None:
    # Whole sectors and whole alignments: nothing is padded.
    model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(4)))
    config = zo.OffloadConfig(nvme=nvme, commit_every=3, **placement)
    wear = zo.plan(model, config).wear
    zo.offload(model, config)
    optimizer = zo.AdamW(model.parameters(), lr=1e-3)

    def train(num_steps: int) -> float:
        """Bytes written in so many steps."""
        before = runtime(model).store.counters.snapshot().get("written.nvme", 0)
        for _ in range(num_steps):
            model(torch.ones(1, 256)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            zo.commit(model, optimizer)
        runtime(model).drain()
        return runtime(model).store.counters.snapshot().get("written.nvme", 0) - before

    train(3)
    assert train(6) == 6 * wear.states_bytes + 2 * wear.commit_bytes == 6 * wear.bytes_per_step
    zo.close(model)
