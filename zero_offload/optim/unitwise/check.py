"""The check of a run: copies of two units are stepped jointly and apart where the test of the class has not come.

`UnitCheck` counts steps and says in which of them it looks: at each double of the test's steps, and at periods that are
longer. It looks in the first step of each start too. Generations have its count, so a resume goes on with it. A
difference stops the run inside of that step, before it is committed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from zero_offload.base.errors import ConfigError
from zero_offload.optim.unitwise.grades import Graded, compare_units, periods_of
from zero_offload.optim.unitwise.state_rows import copy_of, packages_of
from zero_offload.optim.unitwise.twin import Numbers, Twin, Unit


class UnitCheck:
    """The steps of one optimizer in which units are compared."""

    def __init__(self, optimizer: torch.optim.Optimizer, verdict: Graded) -> None:
        self._kind = type(optimizer)
        self._is_proven = not verdict.beyond and verdict.steps >= 2 * verdict.grown
        self._grown = verdict.grown
        self._periods = {value for value, _ in periods_of(optimizer, self._kind) if value >= verdict.steps}
        self._next = verdict.steps if verdict.beyond else 0
        """The next step, by intervals that grow; 0 where the test has passed every period."""
        self._is_first = True
        """True until a step of this start."""
        self.steps = 0
        self._smallest: list[tuple[int, tuple[torch.Size, ...]]] = []
        """Elements and shapes of the two smallest units of different shapes that were seen."""

    def begin(self, make_twin: Callable[[], Twin], numbers: Numbers) -> UnitComparison | None:
        """A step begins; None where nothing is compared in it."""
        self.steps += 1
        is_first, self._is_first = self._is_first, False
        at_period = any(self.steps % period in (0, 1) for period in self._periods)
        if not self._next or (not is_first and self.steps < self._next and not at_period):
            return None
        if self.steps >= self._next:
            self._next = 2 * self.steps
        return UnitComparison(self, make_twin, numbers, self.steps)

    @property
    def is_settled(self) -> bool:
        """True if states take no more room in the step that has begun, by the test of the class."""
        return self._is_proven and self.steps > self._grown

    def is_small(self, unit: Unit) -> bool:
        """True for one of the two smallest units of different shapes seen so far."""
        shapes = tuple(value.shape for value, _, _ in unit.values())
        size = sum(map(torch.Size.numel, shapes)), shapes
        if size not in self._smallest:
            self._smallest = sorted([*self._smallest, size], key=lambda each: each[0])[:2]
        return size in self._smallest

    def refuse(self, difference: str, step: int) -> ConfigError:
        return ConfigError(
            f"step {step} of {self._kind.__name__}: stepped jointly and apart, two units differ in "
            f"{difference}. The step is not committed, and the generation before it is right. Go on from it with "
            "another optimizer, or with zo.unitwise(optimizer, units='all')"
        )


class UnitComparison:
    """One step in which two units are compared."""

    def __init__(self, check: UnitCheck, make_twin: Callable[[], Twin], numbers: Numbers, step: int) -> None:
        self._check, self._make_twin, self._numbers, self._step = check, make_twin, numbers, step
        self._kept: list[dict[int, Any]] = []

    def look(self, unit: Unit) -> None:
        """A unit is about to be stepped. Raises ConfigError where it and another one depend on each other."""
        if not unit or len(self._kept) == 2 or not self._check.is_small(unit):
            return
        twin = self._make_twin()
        packages = packages_of(twin.kind)
        self._kept.append(
            {
                number: (value.clone(), None if grad is None else grad.clone(), copy_of(state, packages))
                for number, (value, grad, state) in unit.items()
            }
        )
        if len(self._kept) == 2 and (difference := compare_units(twin, self._numbers, *self._kept)):
            raise self._check.refuse(difference, self._step)
