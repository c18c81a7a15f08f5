"""One step of an optimizer that `unitwise` has taken, as the update sees it.

Owns the twin's walk from the capture of numbers to their publication. The program's thread steps until all numbers are
known that parameters share. The rest may go on beside the program (`go_on`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from zero_offload.base.errors import ConfigError
from zero_offload.optim.unitwise.check import UnitComparison
from zero_offload.optim.unitwise.state_rows import packages_of, packed, unpack
from zero_offload.optim.unitwise.twin import Numbers, Twin
from zero_offload.standins.sources import ParamTensors, UnitStep

HOST = torch.device("cpu")


def name_of(kind: type) -> str:
    """An optimizer's class as rows name it."""
    return f"{kind.__module__}.{kind.__qualname__}"


class WalkStep(UnitStep):
    """A step of a twin over the parameters of one or more models."""

    def __init__(
        self,
        twin: Twin,
        captured: Numbers,
        params: Sequence[nn.Parameter],
        param_groups: Sequence[Mapping[str, Any]],
        *,
        comparison: UnitComparison | None,
        steps_all: bool,
        may_go_on: bool,
        records: Callable[[], list[dict[str, Any]]],
    ) -> None:
        """`params` by the twin's numbers. `records`: of the program's object, for generations."""
        self.kind, self.packages, self.device = name_of(twin.kind), packages_of(twin.kind), twin.device
        self.steps_all, self.may_go_on = steps_all, may_go_on
        self.is_still = all(not group.get("lr", 1.0) for group in param_groups)
        self.groups = [tuple(group["params"]) for group in param_groups]
        self.grew = False
        """True if a state took more room than before."""
        self._twin, self._params, self._comparison, self._records = twin, params, comparison, records
        self._numbers = {param: number for number, param in enumerate(params)}
        self._counts_there = {
            param
            for group in param_groups
            if group.get("fused") or group.get("capturable")
            for param in group["params"]
        }
        self._goes_on = False
        self._open = ExitStack()
        self._walk = self._open.enter_context(twin.step(captured))

    @property
    def changed(self) -> Mapping[Any, Any]:
        """Numbers that the step has changed so far, by path."""
        return self._walk.changed

    def step(self, given: Mapping[nn.Parameter, ParamTensors]) -> Mapping[nn.Parameter, Any]:
        self._move_counts(given)
        unit = {self._numbers[param]: tuple(each) for param, each in given.items()}
        if self._comparison is not None:
            self._comparison.look(unit)
        states = self._walk.unit(unit)
        return {self._params[number]: state for number, state in states.items()}

    def _move_counts(self, given: Mapping[nn.Parameter, ParamTensors]) -> None:
        """Bring counts of steps that the host has kept to a GPU, for optimizers that count there as torch's do."""
        for param, (_, _, state) in given.items():
            is_counted = isinstance(state, dict) and isinstance(state.get("step"), Tensor)
            if self.device != HOST and param in self._counts_there and is_counted:
                state["step"] = state["step"].to(self.device)

    def records(self) -> list[dict[str, Any]]:
        self._twin.publish(self._walk)
        return self._records()

    def pack_numbers(self) -> Tensor:
        return packed(self._walk.left())

    def merge_numbers(self, rows: Sequence[Tensor]) -> None:
        self._walk.merge(unpack(row, self.packages) for row in rows)

    def note_growth(self) -> None:
        if self._goes_on:
            raise ConfigError(
                f"a state of {self.kind} has grown in a step beside the next forward, where nothing takes room for it. "
                "The step is not committed, and the generation before it is right. Go on from it with "
                "OffloadConfig(overlap='none')"
            )
        self.grew = True

    def go_on(self) -> None:
        self._goes_on = True

    def end(self) -> None:
        self._open.close()

    def close(self) -> None:
        """All models were stepped by this thread, unless the rest goes on beside the program, which has the numbers."""
        if not self._goes_on:
            self.end()
        self._twin.publish(self._walk)

    def give_up(self, error: BaseException) -> None:
        """The step has raised `error` on this thread."""
        if not self._goes_on:
            self._open.__exit__(type(error), error, error.__traceback__)
