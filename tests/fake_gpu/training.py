"""Offloaded training on the device, compared with training on plain tensors."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import zero_offload as zo
from tests.fake_gpu import device
from tests.fake_gpu.device import Policy
from tests.helpers.reference import Recipe, Trajectory, train_offloaded, train_plain

Schedule = tuple[Policy, int]
"""A policy and its seed."""

EVERY: tuple[Schedule, ...] = (
    (Policy.LATE, 0),
    (Policy.SIDE_EARLY, 0),
    (Policy.SIDE_LATE, 0),
    (Policy.RANDOM, 1),
    (Policy.RANDOM, 2),
)


@functools.cache
def plain(recipe: Recipe) -> Trajectory:
    """On the CPU, whose kernels the device runs."""
    return train_plain(recipe)


def check(recipe: Recipe, schedules: Iterable[Schedule] = EVERY, **settings: Any) -> None:
    """The bits of plain tensors, and no race, whatever runs late."""
    for policy, seed in schedules:
        device.policy(policy, seed)
        trajectory = train_offloaded(recipe, zo.OffloadConfig(precision=recipe.precision, **settings))
        races = device.take_races()
        assert races == [], (policy, seed)
        assert trajectory == plain(recipe), (policy, seed)
