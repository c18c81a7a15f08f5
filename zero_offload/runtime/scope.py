"""A forward that runs: what the tracker knows of it, who makes several of them take turns, and how its uses end."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Protocol

from torch.autograd.graph import saved_tensors_hooks

from zero_offload.base.errors import ZeroOffloadError
from zero_offload.base.spans import Lane, Opened
from zero_offload.runtime.units.unit import Section, Unit


@dataclass
class Scope:
    """One running forward of a hooked module."""

    units: tuple[Unit, ...]
    caller: FrameType
    """Runs as long as this forward does."""
    touched: list[Unit] = field(default_factory=list)
    saving: saved_tensors_hooks | None = None
    """Entered because it began under hooks of the user."""
    opened: Opened | None = None
    """Since its units are here, where it is recorded."""

    def name(self, *, whole: bool) -> str:
        """For a trace."""
        return ", ".join([Lane.FORWARD.value] * whole + [unit.name for unit in self.units])


class Round(Protocol):
    """Forwards that take turns, unit by unit, each on a thread of its own: those of `zo.accumulate`."""

    def enter(self, units: tuple[Unit, ...], inputs: Iterable[Any]) -> None:
        """One of them comes to a module with these units; returns when it is its turn to use them.

        Takes itself back if the round was left by an exception."""

    def hold(self, unit: Unit) -> None:
        """A unit is here: it stays until all of them have passed it."""


def end_use(unit: Unit, holds_value: Callable[[Section], bool]) -> list[str]:
    """One forward has used the unit; names of parameters that forwards have changed."""
    unit.forward_uses = max(unit.forward_uses - 1, 0)
    changed: list[str] = []
    if unit.forward_uses == 0:
        changed = unit.changed(holds_value)
        unit.end_replacing()
    unit.close()
    return changed


def changed_in_forward(names: Sequence[str]) -> ZeroOffloadError:
    return ZeroOffloadError(
        f"forward has changed {', '.join(names[:3])}{' and others' * (len(names) > 3)} in place; the change would be "
        "lost: the parameter leaves memory, or its fp32 master does not follow. Change it between steps, in "
        "'with zo.gathered(module, mode=\"write\"):', or compute with a changed copy"
    )
