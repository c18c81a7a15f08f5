"""Which units are on the compute device: fetches ahead by the schedule, evicts by next use, within the budget.

Owns, with `Evictor`, the moves between `UnitState`s. Runs on the control thread only (hooks, `step`); the transfers it
launches and the update worker run beside it. The calls: `begin_cycle`; `acquire` before every use; `begin_update` when
`step` has begun an update. `acquire`, `bring`, `meet` and `refresh_kept` wait; the others only launch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

import torch
from torch import nn

from zero_offload.base.spans import Cause, Lane
from zero_offload.plan.schedule import FetchSchedule
from zero_offload.runtime.eviction import Evictor
from zero_offload.runtime.held_views import HeldViews
from zero_offload.runtime.memory_pool import MemoryPool
from zero_offload.runtime.ranks.collectives import Collectives
from zero_offload.runtime.room import DeviceRoom
from zero_offload.runtime.units.gather import Gatherer
from zero_offload.runtime.units.param_loader import ParamLoader
from zero_offload.runtime.units.unit import Section, Unit
from zero_offload.storage.files.engine import Urgency
from zero_offload.storage.memory.resizable import Budget
from zero_offload.storage.shards.shard import Component
from zero_offload.storage.shards.state import UnitState
from zero_offload.storage.shards.store import ShardStore


class ParamPrefetcher:
    """Moves units between their tier and the compute device."""

    def __init__(
        self,
        units: Sequence[Unit],
        store: ShardStore,
        collectives: Collectives,
        loader: ParamLoader,
        budget: Budget,
        room: DeviceRoom | None,
    ) -> None:
        """`budget` is the compute device's memory for units; `loader` brings values into it. `room` has the limit of a
        device's own memory; None where a CPU computes."""
        self._units = units
        self._store = store
        self.spans = store.counters.spans
        self._is_alone = collectives.num_shards == 1
        self._shard_index = collectives.shard_index
        self.gatherer = Gatherer(collectives, loader)
        self._loader = loader
        self.use = loader.use
        """A unit in use is read once more, maybe on another stream."""
        self._budget = budget
        self.room = room
        self._refused_at = -1
        """Evictions so far when the device last had no memory for a unit."""
        self.schedule = FetchSchedule()
        self._held_views = HeldViews(units, collectives.world_size)
        self._evictor = Evictor(units, self.schedule, self._held_views, self.gatherer, loader, collectives.world_size)
        self.pool = MemoryPool(store.arena, budget, units, self._evictor, self._held_views)

    def grow(self, landing_bytes: int) -> None:
        """The list of units has become longer, and so have the limits of memory."""
        self._evictor.count()
        self._loader.make_room(landing_bytes)
        if self.room is not None:
            self.room.measure()
        self.pool.end_backward()
        self.pool.measure()

    def begin_cycle(self, kind: str, num_elements: int = 0) -> None:
        """A forward starts, with inputs of so many elements; `kind` tells cycles apart that use units differently."""
        self.gatherer.agreement.begin()
        self._store.read_lazy()  # a forward may change values where they rest
        self._store.counters.add("departures", self.schedule.num_departures)
        self._held_views.forget()
        for unit in self._units:
            if unit.state is UnitState.AWAY:
                unit.detach()  # what a Ctrl-C has left of it
        has_departed = self.schedule.has_departed
        self.schedule.begin_cycle(kind)
        self.pool.end_backward()
        self._refused_at = -1
        if self.room is not None and self.room.begin(kind, num_elements, has_departed=has_departed):
            self._shrink()
            self.room.settle()
        self._look_ahead()

    def acquire(self, unit: Unit) -> None:
        """Return when the unit's newest parameters are on the device; records the use."""
        if self.room is not None:
            self.room.refuse_capture()
        self.bring(unit)
        self.schedule.used(unit.index)
        self._look_ahead()
        if not self._is_alone:
            self._gather_ahead(unit)

    def _gather_ahead(self, in_use: Unit) -> None:
        """Launch the gathers of the unit that comes next: they run beside the compute of the one in use."""
        self.gatherer.waited_for(in_use)
        following = next(iter(self.schedule.upcoming()), None) if self._evictor.num_absent else None
        if following is not None and self.gatherer.may_run_ahead(self._units[following]):
            unit = self._units[following]
            if unit.state is UnitState.AWAITING:
                self._resolve(unit, Urgency.NORMAL)
            if unit.state is UnitState.FETCHING:
                with self._loader.ahead(unit):
                    self.gatherer.launch(unit)

    def bring(self, unit: Unit) -> None:
        """The same for a use that belongs to no forward or backward."""
        if unit.state is UnitState.PRESENT and (unit.update is None or unit.update.is_done):
            unit.wait_for_update()
            self._loader.use(unit)
            return
        with self._store.counters.waiting(Cause.PARAMS, unit.name):
            if not self.gatherer.is_agreed or not self.gatherer.needs(unit):
                self._fetch(unit)
            while unit.state is not UnitState.PRESENT or unit.is_updating:
                self._fetch(self._units[self.gatherer.agreement.next_unit(unit.index, unit.name)])

    def meet(self, place: str) -> None:
        """Where ranks use different units: take part in what others gather, until all have come to `place`."""
        for index in self.gatherer.wanted_units(place):
            self._fetch(self._units[index])

    def _fetch(self, unit: Unit) -> None:
        """Bring the unit here now, or, where other ranks want it, send our part of it."""
        unit.wait_for_update()
        if unit.state is UnitState.AWAY:
            self._reserve_now(unit)
        if unit.state is UnitState.AWAITING:
            self._resolve(unit, Urgency.URGENT)
        if unit.state is UnitState.FETCHING:
            self._finish(unit)
        elif self.gatherer.is_agreed:
            self.gatherer.finish(unit)

    def begin_update(self, order: Sequence[int], *, in_backward: bool = False) -> None:
        """An update is queued: units that it makes stale wait for their new values, first used first.

        `in_backward`: a backward is done with them, and goes on; it has their memory if it needs any.
        """
        self.gatherer.begin_update(order)
        if self.room is not None:
            self.room.stepped()
        stale = [unit for unit in (self._units[i] for i in order) if unit.is_updating and not unit.updates_in_place]
        self._held_views.find(stale)
        if not in_backward:
            self.pool.end_backward()
            self._hand_frames_on(stale)
        elif any(self._units[i].state is UnitState.AWAY for i in self.schedule.upcoming()):
            unused = self._evictor.unused()
            for unit in (unit for unit in stale if unit.index in unused):
                self._evictor.evict(unit)
        for unit in stale:
            _outdate(s for s in unit.sections if s.layout.trainable)
            if unit.state is not UnitState.AWAY:
                self.gatherer.abandon(unit)
                # Frozen values that are here stay valid; a fetch that was given up brought none.
                absent = {UnitState.PRESENT: (), UnitState.AWAITING: unit.to_read}.get(unit.state, unit.sections)
                unit.to_read = tuple(s for s in unit.sections if s.layout.trainable or s in absent)
                if unit.state is not UnitState.AWAITING:
                    self._evictor.advance(unit, UnitState.AWAITING)
                self._offer(unit)
        # The step counts by now, and must not break off for what is only ahead: its next use asks for memory again.
        try:
            if in_backward:
                self._look_ahead()
                return
            for unit in stale:
                if unit.state is UnitState.AWAY:
                    if unit.num_frames > self._budget.free_frames or self._is_refused:
                        break
                    self._reserve(unit)
        except torch.OutOfMemoryError:
            self._note_refusal()

    def step_order(self) -> tuple[int, ...]:
        """Units in the order in which the forward of a step first needs them."""
        return self.schedule.first_uses("grad", len(self._units))

    def refresh_kept(self) -> None:
        """The update is launched: views that others hold show the new values when this returns."""
        for unit in self._held_views.kept:
            self.bring(unit)

    def _hand_frames_on(self, stale: Sequence[Unit]) -> None:
        """Take frames from the units used last for those used first: what they hold is worth nothing any more."""
        evictable = set(self._evictor.unused())  # those with views are kept, as `begin_update` has found
        holders = deque(unit for unit in stale if unit.index in evictable)
        missing = 0
        for unit in stale:
            if holders and holders[0] is unit:
                holders.popleft()
            elif unit.state is UnitState.AWAY:
                missing += unit.num_frames
                while holders and missing > self._budget.free_frames:
                    self._evictor.evict(holders.pop())

    def holds_value(self, section: Section) -> bool:
        """Whether a unit's buffer still has this rank's shard as it rests elsewhere, which is read."""
        if section.buffer is None:
            return False  # it rests in the buffer
        value = self._store.read_component(section.shard, Component.VALUE)
        begin = self._shard_index * section.layout.shard_numel
        own = section.flat[begin : begin + value.numel()].to(value.device)
        return torch.equal(own.view(torch.int8), value.view(torch.int8))

    def forget(self, unit: Unit) -> None:
        """The unit's values were replaced where they rest: the copy on the device goes."""
        if not unit.updates_in_place and unit.state is not UnitState.AWAY:
            self._held_views.find([unit])
            self._evictor.evict(unit)
        _outdate(unit.sections)
        if unit.kept:
            self.bring(unit)

    # Moves. With several ranks every decision here must be the same on all of them, since `_finish` is a
    # collective: so decisions look at pages and the schedule, never at what happens to be complete.

    def _look_ahead(self) -> None:
        """Attach units in the order of the schedule as far as the budget goes; launch what can be read."""
        if self._evictor.num_absent == 0:
            return
        for index in self.schedule.upcoming():
            unit = self._units[index]
            if unit.state is UnitState.AWAY:
                if not self._evict_for(unit) or self._is_refused:
                    return
                try:
                    self._reserve(unit)
                except torch.OutOfMemoryError:
                    if not self._is_alone:
                        raise  # the others go on to gather it
                    self._note_refusal()
                    return  # its use asks for memory again
            if unit.state is UnitState.AWAITING and _readable(unit, self._loader):
                self._resolve(unit, Urgency.NORMAL)
            if unit.state is UnitState.FETCHING:
                self._loader.advance(unit)

    def _evict_for(self, unit: Unit) -> bool:
        """Free frames for a unit, taking only from units whose next use comes after its own."""
        while unit.num_frames > self._budget.free_frames:
            victim = self._evictor.choose(self.schedule.next_use(unit.index))
            if victim is None:
                return False
            self._evictor.evict(victim)
        return True

    def _reserve_now(self, unit: Unit) -> None:
        """Reserve for a use that cannot wait: where the device refuses memory, units leave that are not in use."""
        while True:
            self.pool.reserve(unit.num_frames, unit.name)
            try:
                self._reserve(unit)
                return
            except torch.OutOfMemoryError:
                self._note_refusal()
                # With several ranks a unit leaves on all of them.
                if not self._is_alone or (self._is_refused and not self._evictor.evict_one()):
                    raise

    @property
    def _is_refused(self) -> bool:
        """True if the device had no memory for a unit, and none has left since: to ask again would flush the
        allocator's cache for nothing."""
        return self._refused_at == self._evictor.num_evictions

    def _note_refusal(self) -> None:
        """The device had no memory for a unit: several ranks lower their limits when they next agree."""
        self._refused_at = self._evictor.num_evictions
        if self._is_alone and self.room is not None:
            self.room.ran_out()
            self._shrink()

    def _shrink(self) -> None:
        """The limit has fallen: units above it leave, those in use apart."""
        while self._budget.free_frames < 0 and self._evictor.evict_one():
            pass

    def _reserve(self, unit: Unit) -> None:
        """Attach pages for an absent unit; a queued update delivers into them, else they are read into."""
        attached = unit.attach()
        assert attached
        self._loader.attached(unit)
        unit.to_read = unit.sections
        self._evictor.advance(unit, UnitState.AWAITING)
        self._offer(unit)

    def _offer(self, unit: Unit) -> None:
        """Let the update deliver into the unit's buffers, if they are host memory and hold whole sections."""
        if not self._is_alone or not self.pool.is_of_host:
            return
        if unit.update is not None and unit.update.deliver_to(tuple(s.flat.data_ptr() for s in unit.sections)):
            unit.to_read = tuple(section for section in unit.to_read if not section.layout.trainable)

    def _resolve(self, unit: Unit, urgency: Urgency) -> None:
        """The unit's update is over: its values are here, or their fetch is launched."""
        if not unit.to_read:
            self._loader.arrived(unit)
            self._evictor.advance(unit, UnitState.PRESENT)
            return
        self._evictor.advance(unit, UnitState.FETCHING)
        opened = self.spans.open(Lane.FETCH, unit.name)
        try:
            self._loader.launch(unit, unit.to_read, urgency)
        except BaseException:
            # Only a part may be on its way: the next use launches all of it.
            self._loader.abandon(unit)
            self._evictor.advance(unit, UnitState.AWAITING)
            raise
        self.spans.close(opened)

    def _finish(self, unit: Unit) -> None:
        self._loader.finish(unit)
        self.gatherer.finish(unit)
        self._loader.arrived(unit)
        unit.to_read = ()
        self._evictor.advance(unit, UnitState.PRESENT)


def replaced(prefetcher: ParamPrefetcher, placed: Iterable[tuple[Unit, nn.Parameter]]) -> None:
    """These have other values: copies on the device go, and so does the use of graphs that read the old ones."""
    found = list(placed)
    for unit in {unit.index: unit for unit, _ in found}.values():
        prefetcher.forget(unit)
    torch.autograd.graph.increment_version([param for _, param in found])


def _outdate(sections: Iterable[Section]) -> None:
    """Replicas no longer hold the newest values: the next fetch gathers them."""
    for section in sections:
        if section.shard.replica is not None:
            section.shard.replica.fresh = False


def _readable(unit: Unit, loader: ParamLoader) -> bool:
    """Whether reading the unit would not wait for its update."""
    if unit.is_updating or not loader.ready(unit):
        return False
    return all(write.done() for section in unit.sections for write in section.shard.writes)
