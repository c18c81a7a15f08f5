"""Views of parameters that the program holds: the units under them stay in memory until the views are gone.

Reading a view whose unit is away is a fault that Python never sees. Such views are `self.kept = self.up.weight[:2]`,
read by another module, a view in a list, or what a backward saved past our hooks. No guard class is in the way, but
torch counts the tensors on a storage. So before a unit goes, this count is compared with the number of our tensors.
Owns which units are kept, and says so once. Never moves bytes.
"""

from __future__ import annotations

import gc
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from zero_offload.base.errors import ZeroOffloadError
from zero_offload.runtime.saved_tensors.tensors import Saved
from zero_offload.runtime.units.unit import Unit, UnitState
from zero_offload.standins.views import ReadOnly

TRANSPORT_S = 5.0
"""Seconds that the thread of a process group may take to drop its tensors on a busy machine."""


class HeldViews:
    """Which units of one model are kept for the views on them."""

    def __init__(self, units: Sequence[Unit], world_size: int) -> None:
        self._units = units
        self._world_size = world_size
        self._told: set[str] = set()
        self.kept: list[Unit] = []

    def keep_if_viewed(self, unit: Unit) -> bool:
        """True if a unit that could go has to stay. Raises ZeroOffloadError with several ranks, which evict alike."""
        if not unit.lent:
            return False
        if self._world_size > 1:
            # Ranks have to evict alike, and another one may not hold such a view.
            _collect(unit)
            if not _let_go(unit):
                raise ZeroOffloadError(f"{_what_is_held(unit)}, which has to leave memory now. {_INSTEAD}")
            return False
        unit.stays = True
        self.kept.append(unit)
        return True

    def find(self, units: Iterable[Unit]) -> None:
        """The values of these units are about to be replaced: keep those with views, for them to show the new ones."""
        for unit in units:
            if unit.state is UnitState.PRESENT and not unit.stays and unit.lent:
                self._tell(unit)
                self.keep_if_viewed(unit)

    def reset(self) -> None:
        """A cycle begins: look again when a unit is about to go."""
        for unit in self.kept:
            self._tell(unit)
            unit.stays = False
        self.kept.clear()

    def drop_garbage(self) -> bool:
        """Memory is short: collect garbage. True if it was all that viewed some unit."""
        lent = self._lent()
        if lent:
            gc.collect()
        freed = [unit for unit in lent if not unit.lent]
        for unit in freed:
            unit.stays = False
        self.kept = [unit for unit in self.kept if unit.stays]
        return bool(freed)

    def _lent(self) -> list[Unit]:
        return [unit for unit in self._units if unit.state is UnitState.PRESENT and unit.lent]

    def _tell(self, unit: Unit) -> None:
        """Warn about a view that outlives the forward, once per unit."""
        if unit.name in self._told or not unit.lent:
            return
        _collect(unit)
        if unit.lent and self._world_size == 1:
            self._told.add(unit.name)
            warnings.warn(f"{_what_is_held(unit)}: the unit stays in memory. {_INSTEAD}", stacklevel=2)

    def describe(self) -> str:
        """For the message of a CapacityError."""
        return "".join(f"; {_what_is_held(unit)}" for unit in self._lent()[:3])


_INSTEAD = (
    "Keep a copy (.clone()) or the parameter itself, and read it inside of forward or zo.gathered. With zo.checkpoint, "
    "a cache of keys and values holds some: pass use_cache=False"
)


def _collect(unit: Unit) -> None:
    """Views that only garbage holds are gone."""
    if unit.lent:
        gc.collect()


def _let_go(unit: Unit) -> bool:
    """True if the views are gone soon. The thread of a process group drops tensors some time after its work is over."""
    until = time.monotonic() + TRANSPORT_S
    while unit.lent and time.monotonic() < until:
        time.sleep(0.001)
    return not unit.lent


def _what_is_held(unit: Unit) -> str:
    with torch._C.DisableTorchFunctionSubclass():
        names = list(dict.fromkeys(_names_of_views(unit)))
    return f"a view of {' and of '.join(names[:3]) or 'a parameter of unit ' + unit.name} is held"


def _names_of_views(unit: Unit) -> Iterator[str]:
    """The parameters under the views that Python knows; slow."""
    objects = gc.get_objects()
    ours = {id(each.kept) for each in objects if type(each) is Saved}
    for tensor in (each for each in objects if type(each) in (Tensor, ReadOnly) and id(each) not in ours):
        for section in unit.sections:
            if section.holds(tensor):
                yield from section.names_under(tensor)
