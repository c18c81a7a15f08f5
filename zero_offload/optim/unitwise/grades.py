"""Which optimizers can be stepped unit by unit: a test of each class on tiny parameters, when it is wanted first.

`grade` runs trials (`trials.py`) with gradients of 1e-6, 1 and 1e3, beyond every period of the optimizer's numbers.
A period is any whole number above 1 in groups or attributes: an interval of refreshes, a warm-up, a delay. Those that
do not fit into the time are said in the verdict. Verdicts are kept per class, version and groups in this process.
`compare_units` is the same check in a run, with copies of two units.
"""

from __future__ import annotations

import enum
import importlib.metadata
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from zero_offload.optim.unitwise.optimizer_copies import NotByUnitsError, check_class
from zero_offload.optim.unitwise.shared_numbers import ATTRIBUTES, NumberTree, changes, told
from zero_offload.optim.unitwise.state_rows import copy_of, packages_of
from zero_offload.optim.unitwise.trials import (
    TrialFailedError,
    UnitTrial,
    difference_of_states,
    random_state,
    set_random_state,
    tinies_of,
)
from zero_offload.optim.unitwise.twin import Numbers, Twin, Unit

SCALES = (1.0, 1e3, 1e-6)
"""Of gradients: some optimizers couple parameters above a norm, or below."""
STEPS_MIN = 16
"""Steps of each trial: the first ones are like no others, and few classes have delays that no number tells."""
SECONDS = 10.0
"""Processor time of one test."""


class Grade(enum.Enum):
    """How an optimizer may be stepped."""

    ELEMENTWISE = "elementwise"
    """Any part of a flat parameter by itself."""
    SEPARABLE = "separable"
    """Any parameter by itself."""
    COUPLED = "coupled"
    """All parameters together."""
    UNPROVEN = "unproven"
    """The test has shown nothing."""


@dataclass(frozen=True)
class Graded:
    """The result of a test of a class."""

    grade: Grade
    reason: str
    """Of a coupled one: entry or parameter, gradients and step. Of an unproven one: why. Of a separable one: why it is
    not elementwise."""
    steps: int
    """Steps that were compared, of each scale."""
    beyond: str = ""
    """A period that is longer than these steps, as `param_groups[0]['gap'] = 5000`; empty if none is."""
    together: bool = True
    """True if steps of all parameters at once are right, whatever the grade."""
    in_order: bool = False
    """Of a coupled one: units in the order of its groups, one after the other, have the same bits. It draws random
    numbers that the program shares, so nothing else may draw meanwhile."""

    grown: int = 0
    """The last step in which a state took more room than before."""

    @property
    def may_walk(self) -> bool:
        """True if nothing has been found against steps by units."""
        return self.grade in (Grade.ELEMENTWISE, Grade.SEPARABLE)

    def describe(self) -> str:
        text = self.grade.value + (f": {self.reason}" if self.reason else "")
        return text + (f"; unproven beyond step {self.steps} ({self.beyond})" if self.beyond else "")


_VERDICTS: dict[Any, Graded] = {}


def grade(optimizer: torch.optim.Optimizer, *, kind: type[Any] | None = None, seconds: float = SECONDS) -> Graded:
    """Test the class of an optimizer, with the numbers that it has. The optimizer itself is not stepped."""
    kind = type(optimizer) if kind is None else kind
    key = _key_of(optimizer, kind, seconds)
    if key not in _VERDICTS:
        begun = random_state()
        try:
            _VERDICTS[key] = _tested(optimizer, kind, seconds)
        finally:
            set_random_state(begun)
    return _VERDICTS[key]


def compare_units(twin: Twin, numbers: Numbers, one: Unit, other: Unit) -> str:
    """Step copies of two units jointly and apart; return what differs, or nothing.

    The given tensors stay as they are.
    """
    joint = _stepped(twin, numbers, [{**one, **other}])
    apart = _stepped(twin, numbers, [other, one])
    for number in (*one, *other):
        shape = tuple((one if number in one else other)[number][0].shape)
        if not torch.equal(joint[0][number], apart[0][number]):
            return f"the weights of a parameter of shape {shape}"
        if place := difference_of_states(joint[1][number], apart[1][number], joint[2].values()):
            return f"{place} of a parameter of shape {shape}"
    return next((told(path) for path in changes(joint[2], apart[2])), "")


def _stepped(twin: Twin, numbers: Numbers, units: list[Unit]) -> tuple[dict[int, Tensor], dict[int, Any], Any]:
    """Values, states and numbers after a step of copies."""
    packages = packages_of(twin.kind)
    values: dict[int, Tensor] = {}
    states: dict[int, Any] = {}
    with twin.step(numbers) as walk:
        for unit in units:
            copies = {
                number: (value.clone(), None if grad is None else grad.clone(), copy_of(state, packages))
                for number, (value, grad, state) in unit.items()
            }
            states.update(walk.unit(copies))
            values.update((number, value) for number, (value, _, _) in copies.items())
    return values, states, walk.changed


def periods_of(optimizer: torch.optim.Optimizer, kind: type[Any]) -> list[tuple[int, str]]:
    """Whole numbers above 1 in groups, attributes and the class, with their names, the smallest first."""
    content: Any = vars(optimizer)
    ids = {id(param) for group in optimizer.param_groups for param in group["params"]}
    # `defaults` are those of a group to come.
    content = {name: value for name, value in content.items() if name != "defaults"}
    values = NumberTree(optimizer.param_groups, content, content.get("state", {}), ids, packages_of(kind)).read()
    for base in kind.__mro__:
        if base.__module__.partition(".")[0] in packages_of(kind) - {"torch"}:
            values.update({(ATTRIBUTES, name): value for name, value in vars(base).items()})
    found = {(number, told(path)) for path, value in values.items() for number in _whole_numbers(value)}
    return sorted(found)


def _whole_numbers(value: Any) -> Iterator[int]:
    if isinstance(value, tuple | list):
        for each in value:
            yield from _whole_numbers(each)
    elif isinstance(value, int | np.integer) and not isinstance(value, bool) and value > 1:
        yield int(value)


def _key_of(optimizer: torch.optim.Optimizer, kind: type[Any], seconds: float) -> Any:
    """Everything that a verdict depends on."""
    versions = []
    for package in sorted(packages_of(kind)):
        try:
            versions.append(importlib.metadata.version(package))
        except importlib.metadata.PackageNotFoundError:
            versions.append(str(getattr(sys.modules.get(package), "__version__", "")))
    groups = tuple(
        (
            tuple(sorted({param.dim() for param in group["params"]})),
            *((key, repr(value)) for key, value in group.items() if key not in ("params", "param_names")),
        )
        for group in optimizer.param_groups
    )
    has_states = any(isinstance(key, Tensor) for key in vars(optimizer).get("state", ()))
    return kind, tuple(versions), groups, tuple(periods_of(optimizer, kind)), seconds, has_states


def _tested(optimizer: torch.optim.Optimizer, kind: type[Any], seconds: float) -> Graded:
    test = _UnitTest(optimizer, kind, seconds, in_order=False)
    try:
        check_class(kind)
        found = test.run()
        if found.grade is Grade.COUPLED and test.draws:
            test = _UnitTest(optimizer, kind, seconds, in_order=True)
            ordered = test.run()
            if ordered.may_walk:
                return replace(ordered, grade=Grade.COUPLED, reason=found.reason, in_order=True)
        return found
    except NotByUnitsError as error:
        where = f" (step {test.steps + 1})" if test.trials else ""
        return Graded(Grade.COUPLED, error.reason + where, test.steps, together=error.only_together)
    except TrialFailedError as error:
        return Graded(Grade.UNPROVEN, f"its step fails on tiny parameters ({error})", test.steps)


class _UnitTest:
    """Trials of one optimizer, one per scale of gradients, step by step."""

    def __init__(self, optimizer: torch.optim.Optimizer, kind: type[Any], seconds: float, *, in_order: bool) -> None:
        self._optimizer, self._kind, self._seconds, self._in_order = optimizer, kind, seconds, in_order
        self._periods = periods_of(optimizer, kind)
        self._failed: list[str] = []
        self.trials: dict[float, UnitTrial] = {}
        self.steps = 0

    @property
    def draws(self) -> bool:
        return any(trial.outcome.draws for trial in self.trials.values())

    def run(self) -> Graded:
        tinies = tinies_of(self._optimizer)
        if not tinies:
            return Graded(Grade.UNPROVEN, "it has no parameters", 0)
        self.trials = {
            scale: UnitTrial(self._optimizer, self._kind, tinies, scale, in_order=self._in_order) for scale in SCALES
        }
        began, dear_s = time.process_time(), 0.0
        while True:
            if difference := self._step():
                return Graded(Grade.COUPLED, difference, self.steps)
            now = time.process_time()
            if self.steps == _STEPS_DEAR:
                dear_s = now - began
            if self.steps > _STEPS_DEAR:
                step_s = (now - began - dear_s) / (self.steps - _STEPS_DEAR)
                if self.steps >= self._steps_wanted(step_s, self._seconds - (now - began)):
                    break
        moved = set().union(*(trial.outcome.moved for trial in self.trials.values()))
        beyond = next((f"{name} = {value}" for value, name in self._periods if value >= self.steps), "")
        if still := [tiny.shape for number, tiny in enumerate(tinies) if number not in moved]:
            return Graded(Grade.UNPROVEN, f"no weight of shape {still[0]} has moved", self.steps, beyond)
        flat = next(
            (trial.outcome.flat_difference for trial in self.trials.values() if trial.outcome.flat_difference), ""
        )
        if not flat and beyond:
            flat = "only steps within its periods show that parts of parameters are apart"
        reason = "; ".join(filter(None, [flat, *self._failed]))
        grown = max(trial.outcome.grown for trial in self.trials.values())
        return Graded(Grade.SEPARABLE if flat else Grade.ELEMENTWISE, reason, self.steps, beyond, grown=grown)

    def _step(self) -> str:
        """Step all trials; return the first difference."""
        for scale, trial in list(self.trials.items()):
            try:
                trial.step()
            except TrialFailedError as error:
                if len(self.trials) == 1:
                    raise
                del self.trials[scale]
                self._failed.append(f"gradients of {scale:g} fail in step {self.steps + 1} ({error})")
            if trial.outcome.difference:
                return f"{trial.outcome.difference} (gradients of {scale:g}, step {self.steps + 1})"
        self.steps += 1
        return ""

    def _steps_wanted(self, step_s: float, left_s: float) -> int:
        """Steps of the whole test: beyond the longest period that fits into the time, twice where it is short."""
        if left_s <= 0:
            return min(STEPS_MIN, self.steps) if left_s < -2 * self._seconds else STEPS_MIN
        possible = self.steps + int(left_s / max(step_s, 1e-6))
        wanted = [steps for value, _ in self._periods for steps in (value + 2, 2 * value + 2) if steps <= possible]
        short = [steps for steps in wanted if steps <= _TWICE_BELOW]
        past = [value + 2 for value, _ in self._periods if value + 2 <= possible]
        return max([STEPS_MIN, *short, *past])


_STEPS_DEAR = 3
"""First steps, which take longer than others: they compile and make states."""
_TWICE_BELOW = 130
"""Steps. A shorter period is passed twice: the second refresh may differ from the first."""
