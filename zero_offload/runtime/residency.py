"""Which units are on the compute device: fetches ahead by the schedule, evicts by next use, within the budget.

Owns the moves between `UnitState`s. Runs on the control thread only (hooks, `step`); the transfers it launches
and the update worker run beside it. The calls: `begin_cycle`; `acquire` before every use; `begin_update` when
`step` has queued an update. `acquire` waits; everything else only launches.
"""

from __future__ import annotations

from collections.abc import Sequence

from zero_offload.errors import CapacityError
from zero_offload.memory.arena import Arena, MovableBuffer
from zero_offload.memory.pages import FRAME
from zero_offload.plan.schedule import FetchSchedule
from zero_offload.runtime.collectives import Collectives
from zero_offload.runtime.unit import Unit
from zero_offload.shards.state import UnitState
from zero_offload.shards.store import ShardStore
from zero_offload.shards.update_board import UpdateBoard
from zero_offload.storage.engine import Urgency
from zero_offload.types import format_bytes


class Residency:
    """Moves units between their tier and the compute device."""

    def __init__(self, units: Sequence[Unit], store: ShardStore, board: UpdateBoard, collectives: Collectives) -> None:
        self._units = units
        self._store = store
        self._board = board
        self._collectives = collectives
        self.schedule = FetchSchedule()

    @property
    def _arena(self) -> Arena:
        return self._store.arena

    def begin_cycle(self, kind: str) -> None:
        """A forward starts; `kind` tells cycles apart that use units differently."""
        self.schedule.begin_cycle(kind)
        self._look_ahead()

    def acquire(self, unit: Unit) -> None:
        """Return when the unit's newest parameters are on the device; records the use."""
        self.bring(unit)
        self.schedule.used(unit.index)
        self._look_ahead()

    def bring(self, unit: Unit) -> None:
        """The same for a use that belongs to no forward or backward."""
        with self._store.counters.timed("stall_s"):
            self._board.wait(unit.index)
            if unit.state is UnitState.AWAY:
                self._make_room(unit.num_frames, unit.name)
                self._reserve(unit)
            if unit.state is UnitState.AWAITING:
                self._resolve(unit, Urgency.URGENT)
            if unit.state is UnitState.FETCHING:
                self._finish(unit)

    def begin_update(self, order: Sequence[int]) -> None:
        """An update is queued: units that it makes stale wait for their new values, first used first."""
        stale = [self._units[i] for i in order if self._board.pending(i) and not self._units[i].resident]
        for unit in stale:
            if unit.state in (UnitState.FETCHING, UnitState.PRESENT):
                self._wait_transfers(unit)
                unit.tracker.advance(UnitState.AWAITING)
                self._offer(unit)
        for unit in stale:
            if unit.state is UnitState.AWAY:
                if unit.num_frames > self._arena.free_frames:
                    break
                self._reserve(unit)

    def attach(self, buffer: MovableBuffer) -> None:
        """Put pages under a buffer that is no unit's. Raises CapacityError."""
        self._make_room(buffer.num_frames, "a gradient buffer")
        assert buffer.attach()

    def forget(self, unit: Unit) -> None:
        """The unit's values were replaced where they rest: the copy on the device goes."""
        if not unit.resident and unit.state is not UnitState.AWAY:
            self._evict(unit)

    # Moves. With several ranks every decision here must be the same on all of them, since `_finish` is a
    # collective: so decisions look at pages and the schedule, never at what happens to be complete.

    def _look_ahead(self) -> None:
        """Attach units in the order of the schedule as far as the budget goes; launch what can be read."""
        for index in self.schedule.upcoming():
            unit = self._units[index]
            if unit.state is UnitState.AWAY:
                if not self._evict_for(unit):
                    return
                self._reserve(unit)
            if unit.state is UnitState.AWAITING and self._readable(unit):
                self._resolve(unit, Urgency.NORMAL)

    def _readable(self, unit: Unit) -> bool:
        """Whether reading the unit would not wait for its update."""
        if self._board.pending(unit.index):
            return False
        return all(write.done() for section in unit.sections for write in section.shard.writes)

    def _evict_for(self, unit: Unit) -> bool:
        """Free frames for a unit, taking only from units whose next use comes after its own."""
        while unit.num_frames > self._arena.free_frames:
            victim = self.schedule.victim(self._evictable(), self.schedule.next_use(unit.index))
            if victim is None:
                return False
            self._evict(self._units[victim])
        return True

    def _make_room(self, num_frames: int, name: str) -> None:
        """Free frames for a use that cannot wait, whatever comes next."""
        while num_frames > self._arena.free_frames:
            victim = self.schedule.victim(self._evictable())
            if victim is None:
                arriving = (UnitState.FETCHING, UnitState.AWAITING)
                victim = self.schedule.victim(u.index for u in self._units if u.state in arriving)
            if victim is None:
                raise self._no_room(num_frames, name)
            self._evict(self._units[victim])

    def _no_room(self, num_frames: int, name: str) -> CapacityError:
        used = [u.name for u in self._units if u.in_use and not u.resident]
        return CapacityError(
            f"{name} needs {format_bytes(num_frames * FRAME)} on the compute device; of "
            f"{format_bytes(self._arena.frame_limit * FRAME)} only "
            f"{format_bytes(self._arena.free_frames * FRAME)} are free while these units are in use: "
            f"{', '.join(used) or 'none'}. Raise device_memory, or name smaller units with units="
        )

    def _evictable(self) -> list[int]:
        return [u.index for u in self._units if u.state is UnitState.PRESENT and not u.in_use and not u.resident]

    def _reserve(self, unit: Unit) -> None:
        """Attach pages for an absent unit; a queued update delivers into them, else they are read into."""
        attached = unit.attach()
        assert attached
        unit.tracker.advance(UnitState.AWAITING)
        self._offer(unit)

    def _offer(self, unit: Unit) -> None:
        """Let the update deliver into the unit's buffers; only a whole section can be delivered into."""
        addresses = tuple(section.address for section in unit.sections)
        unit.delivered = self._collectives.num_shards == 1 and self._board.offer(unit.index, addresses)

    def _resolve(self, unit: Unit, urgency: Urgency) -> None:
        """The unit's update is over: its values are here, or their reads are launched."""
        if unit.delivered:
            unit.tracker.advance(UnitState.PRESENT)
            return
        unit.tracker.advance(UnitState.FETCHING)
        for section in unit.sections:
            offset = self._collectives.shard_index * section.layout.shard_nbytes
            unit.transfers += self._store.launch_fetch(section.shard, section.address + offset, urgency)

    def _finish(self, unit: Unit) -> None:
        self._wait_transfers(unit)
        for section in unit.sections:
            self._collectives.all_gather(section.flat)
        unit.tracker.advance(UnitState.PRESENT)

    def _wait_transfers(self, unit: Unit) -> None:
        for transfer in unit.transfers:
            transfer.wait()
        unit.transfers = []

    def _evict(self, unit: Unit) -> None:
        if unit.state is UnitState.AWAITING:
            self._board.wait(unit.index)
        self._wait_transfers(unit)
        unit.detach()
        unit.tracker.advance(UnitState.AWAY)
