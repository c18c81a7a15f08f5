"""The states of a unit's parameters on the compute device, and the moves between them.

Each state says what occupies memory. `Unit.advance` is the only way to change a state; an illegal move raises,
with the unit's last moves, instead of corrupting a buffer.
"""

from __future__ import annotations

from enum import Enum


class UnitState(Enum):
    AWAY = "away"  # no pages; the bytes rest on their tier
    AWAITING = "awaiting"  # pages attached; an update will deliver new values, or their read has not begun
    FETCHING = "fetching"  # pages attached, reads in flight
    PRESENT = "present"  # pages attached and valid


TRANSITIONS: dict[UnitState, frozenset[UnitState]] = {
    UnitState.AWAY: frozenset({UnitState.AWAITING}),
    UnitState.AWAITING: frozenset({UnitState.FETCHING, UnitState.PRESENT, UnitState.AWAY}),
    UnitState.FETCHING: frozenset({UnitState.PRESENT, UnitState.AWAITING, UnitState.AWAY}),
    UnitState.PRESENT: frozenset({UnitState.AWAITING, UnitState.AWAY}),
}
