"""The states of a unit's parameters on the compute device, and the moves between them.

Each state says what occupies memory. `advance` is the only way to change a state; an illegal move raises,
with the unit's last moves, instead of corrupting a buffer.
"""

from __future__ import annotations

from collections import deque
from enum import Enum


class UnitState(Enum):
    AWAY = "away"  # no pages; the bytes rest on their tier
    AWAITING = "awaiting"  # pages attached; an update will write new values into them, or before they are read
    FETCHING = "fetching"  # pages attached, reads in flight
    PRESENT = "present"  # pages attached and valid


TRANSITIONS: dict[UnitState, frozenset[UnitState]] = {
    UnitState.AWAY: frozenset({UnitState.AWAITING}),
    UnitState.AWAITING: frozenset({UnitState.FETCHING, UnitState.PRESENT, UnitState.AWAY}),
    UnitState.FETCHING: frozenset({UnitState.PRESENT, UnitState.AWAITING, UnitState.AWAY}),
    UnitState.PRESENT: frozenset({UnitState.AWAITING, UnitState.AWAY}),
}


class StateTracker:
    """One unit's state and its history."""

    def __init__(self, name: str, state: UnitState = UnitState.AWAY) -> None:
        self._name = name
        self._history: deque[str] = deque([state.value], maxlen=8)
        self.state = state

    def advance(self, to: UnitState) -> None:
        if to not in TRANSITIONS[self.state]:
            moves = " -> ".join(self._history)
            raise AssertionError(f"unit {self._name}: {self.state.value} cannot become {to.value} ({moves})")
        self.state = to
        self._history.append(to.value)
