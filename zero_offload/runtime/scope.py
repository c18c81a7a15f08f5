"""A forward that runs: what the session knows of it, and who makes several of them take turns."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Protocol

from torch.autograd.graph import saved_tensors_hooks

from zero_offload.runtime.units.unit import Unit
from zero_offload.telemetry.spans import Lane


@dataclass
class Scope:
    """One running forward of a hooked module."""

    units: tuple[Unit, ...]
    caller: FrameType
    """Runs as long as this forward does."""
    touched: list[Unit] = field(default_factory=list)
    saving: saved_tensors_hooks | None = None
    """Entered because it began under hooks of the user."""
    begin_ns: int = 0
    """When its units were here; 0 where nobody records."""

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
