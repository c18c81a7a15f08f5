"""Which units are on the compute device: fetched ahead by the schedule, evicted by next use, within a limit of memory.

`FetchSchedule` predicts which unit is used when. `Evictor` chooses the unit that leaves. `MemoryPool` frees memory for
a use that cannot wait. `ParamPrefetcher` decides what moves, and moves it. All run on the control thread (hooks,
`step`); the transfers that they launch and the update worker run beside them.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from zero_offload.base.checks import DEAR_CHECKS
from zero_offload.base.errors import CapacityError
from zero_offload.base.spans import Cause, Track
from zero_offload.base.types import FRAME, format_bytes
from zero_offload.plan.buffers import UNLIMITED_FRAMES
from zero_offload.plan.memory import BYTES_AHEAD
from zero_offload.runtime.device_limit import DeviceLimit
from zero_offload.runtime.held_views import HeldViews
from zero_offload.runtime.ranks.collectives import Collectives
from zero_offload.runtime.units.gather import Gatherer
from zero_offload.runtime.units.group_reader import GroupReader
from zero_offload.runtime.units.param_loader import DeviceParamLoader, ParamLoader, UnitStreams
from zero_offload.runtime.units.unit import Section, Unit, UnitState
from zero_offload.storage.files.engine import Urgency
from zero_offload.storage.memory.arena import Arena, MovableBuffer
from zero_offload.storage.memory.resizable import FrameAllocator, FrameBudget
from zero_offload.storage.shards.drive_grads import DriveRoom
from zero_offload.storage.shards.shard import Component
from zero_offload.storage.shards.store import ShardStore

NEVER = 1 << 62
"""Position of the next use of a unit that the rest of the cycle does not need."""
UNITS_AHEAD = 2
"""In a cycle that repeats, memory for so many units of a usual size is what prefetch takes from others: one arrives,
one is next. See [Note: what stays between tokens]."""


class FetchSchedule:
    """Follows a cycle as it happens against the last cycle of its kind.

    While the two agree, the next use of every unit is known: fetch what comes next, evict what comes last (Belady
    1966). A use that was not predicted moves nothing; the position catches up at the next agreement.

    Behind a forward without a backward its like is expected: the next token, batch or denoising step. So its prediction
    goes on with the same uses once more.
    """

    def __init__(self) -> None:
        self.uses: tuple[int, ...] = ()
        """The prediction: unit indices, one per use, in order."""
        self.num_of_cycle = 0
        """How many of them are of this cycle; those behind are of the next one."""
        self.position = 0
        """The index of the next use in `uses`."""
        self.next_use: dict[int, int] = {}
        """By unit: the first position from here on that uses it, or `NEVER`; no entry for units not predicted."""
        self.num_departures = 0
        """Uses in this cycle that were not predicted."""
        self._following: list[int] = []
        """By position: the next position that uses the same unit, or `NEVER`."""
        self._recorded: list[int] = []
        self._uses_by_kind: dict[str, tuple[int, ...]] = {}
        self._kind = ""

    @property
    def has_departed(self) -> bool:
        """True if this cycle was predicted, and went another way."""
        return bool(self.uses) and self.num_departures > 0

    def begin_cycle(self, kind: str) -> None:
        """A cycle of this kind starts; the previous one becomes the prediction for its own kind."""
        if self._recorded:
            self._uses_by_kind[self._kind] = tuple(self._recorded)
        self._kind, self._recorded = kind, []
        known = self._uses_by_kind.get(kind, ())
        self.num_of_cycle = len(known)
        self.uses = known * 2 if kind == "no_grad" else known
        self.position = self.num_departures = 0
        self.next_use, self._following = {}, [NEVER] * len(self.uses)
        for position in reversed(range(len(self.uses))):
            unit = self.uses[position]
            self._following[position] = self.next_use.get(unit, NEVER)
            self.next_use[unit] = position

    def used(self, unit: int) -> None:
        """Record a use and move on to behind it."""
        self._recorded.append(unit)
        found = self.next_use.get(unit, NEVER)
        if found >= self.num_of_cycle:
            self.num_departures += 1
            return
        for position in range(self.position, found + 1):
            self.next_use[self.uses[position]] = self._following[position]
        self.position = found + 1

    @property
    def repeats(self) -> bool:
        """True if the same cycle is expected to follow."""
        return len(self.uses) > self.num_of_cycle

    def upcoming(self, *, this_cycle: bool = False) -> Iterator[int]:
        """Units that are predicted from here on, each once, in order of next use; `this_cycle`: without the next."""
        for position in range(self.position, self.num_of_cycle if this_cycle else len(self.uses)):
            if self.next_use[self.uses[position]] == position:
                yield self.uses[position]

    def first_uses(self, kind: str, num_units: int) -> tuple[int, ...]:
        """All units in the order in which a cycle of this kind first needs them; those never used follow."""
        uses = self._uses_by_kind.get(kind, ())
        if self._kind == kind and not uses:
            uses = tuple(self._recorded)
        return tuple(dict.fromkeys((*uses, *range(num_units))))


@dataclass(eq=False)
class Evictor:
    """Chooses the unit that leaves the compute device when another one needs its memory, and takes it away.

    `choose` takes units that are not in use, the one with the furthest next use first. For a use that cannot wait,
    `evict_one` goes on to units that have not arrived; then, on one rank, to units between two operations. A unit under
    a view that the program holds stays; several ranks raise.
    """

    _units: Sequence[Unit]
    _schedule: FetchSchedule
    _held_views: HeldViews
    _loader: ParamLoader
    _streams: UnitStreams | None
    """Streams of a device; None where a CPU computes."""
    _gatherer: Gatherer | None
    """None where this rank has all of every unit."""
    _world_size: int
    num_evictions: int = 0
    _here: dict[int, Unit] = field(default_factory=dict)
    """By index: units that have arrived and not left."""

    def arrived(self, unit: Unit) -> None:
        """The unit's values are here."""
        # First: a Ctrl-C in the midst must not leave a unit that never leaves.
        if not unit.resident:
            self._here[unit.index] = unit
        unit.move_to(UnitState.PRESENT)

    def unused(self) -> list[Unit]:
        """Units that are here, may leave, and are not in use."""
        # Runs at most uses, over as many units as memory holds: plain attributes, since properties are slow.
        return [
            u
            for u in self._here.values()
            if u.state is UnitState.PRESENT
            and not (u.forward_uses or u.backward_uses or u.gathered_uses)
            and not (u.resident or u.stays)
        ]

    def choose(self, later_than: int = -1) -> Unit | None:
        """The unused unit whose next use is the furthest, if that is later than `later_than`."""
        next_use = self._schedule.next_use
        while units := self.unused():
            # Of several that are not needed the first of the model: ranks choose alike.
            unit = max(units, key=lambda each: (next_use.get(each.index, NEVER), -each.index))
            if next_use.get(unit.index, NEVER) <= later_than:
                return None
            if not (unit.lent and self._held_views.keep_if_viewed(unit)):
                return unit
        return None

    def evict_one(self) -> bool:
        """Evict one unit, whatever comes next. False if all that are here are in use or kept."""
        victim = self.choose() or self._last_resort()
        if victim is None:
            return False
        if victim.state is UnitState.PRESENT:
            victim.break_off()  # what uses it fetches it again
        self.evict(victim)
        return True

    def evict(self, unit: Unit) -> None:
        """Give the unit's memory back; an update that was to deliver into it no longer does."""
        if unit.state is UnitState.AWAITING and unit.update is not None and not unit.update.withdraw():
            unit.wait_for_update()
        self.cancel(unit)
        # First: a Ctrl-C in the midst must not leave a unit that seems to be here.
        unit.move_to(UnitState.AWAY)
        self._here.pop(unit.index, None)
        if self._streams is not None:
            self._streams.release(unit)
        unit.detach()
        self.num_evictions += 1

    def cancel(self, unit: Unit) -> None:
        """End the fetch of the unit's values, so that its buffers may go or be filled anew."""
        if self._gatherer is not None:
            self._gatherer.cancel(unit)
        self._loader.cancel(unit)

    def _last_resort(self) -> Unit | None:
        """A unit to evict for a use that cannot wait, when all that is here is in use or kept."""
        arriving = (UnitState.FETCHING, UnitState.AWAITING)
        units = [u for u in self._units if u.state in arriving and u.may_be_evicted]
        if not units and self._world_size == 1:
            # With several ranks a unit must go on all of them, and views are held on some.
            units = [u for u in self._units if u.state is UnitState.PRESENT and u.may_leave_in_use]
        return max(units, key=lambda unit: self._schedule.next_use.get(unit.index, NEVER), default=None)


class MemoryPool:
    """Memory that a model's units take in turns; on a CPU gradients on their way to drives take of it too.

    `reserve` asks for it back in a fixed order. First units leave, then views that only garbage holds. Then gradients
    that leave are written, and at last the limit rises, up to the budget. For gradients the limit rises second, up to
    what is kept for them. Only here is there a CapacityError for it.

    [Note: frames for gradients]
    Where one rank computes on a CPU, gradients have as many of the units' frames as they had at once in the backwards
    before. In forward units have them all. In backward they are kept for gradients: it has less need of units fetched
    far ahead. Where they would be more than half, they come on top. Elsewhere `Arena` keeps frames for gradients at all
    times.
    """

    def __init__(
        self,
        arena: Arena,
        budget: FrameAllocator,
        units: Sequence[Unit],
        evictor: Evictor,
        held_views: HeldViews,
        drive_room: DriveRoom,
    ) -> None:
        """`budget` has the frames of `units`: `arena`, which has those of gradients, or a device's. `drive_room` has
        the pages of gradients that leave for drives, and gives them back."""
        self._arena = arena
        self._budget = budget
        self._units = units
        self._evictor = evictor
        self._held_views = held_views
        self.is_of_host = budget is arena
        """True if units and gradients share the host's memory."""
        self.drive_room = drive_room
        self.restart()

    def restart(self) -> None:
        """Begin anew: the limits were raised for further units."""
        self._keeps_in_backward = self.is_of_host and self._arena.kept_frames == 0
        self._for_units = self._budget.frame_limit
        self._most_for_grads = 0

    def reserve(self, num_frames: int, name: str, *, for_grads: bool = False) -> None:
        """Return when so many frames are free, for a use that cannot wait. Gradients may take those kept for them.

        Raises CapacityError, which names `name`.
        """
        while (missing := num_frames - self._budget.free_frames - self._arena.kept_frames * for_grads) > 0:
            if not self._reclaim_some(missing, for_grads) and not self._budget.raise_limit(missing, claimed=for_grads):
                raise self._no_room(num_frames, name)

    def _reclaim_some(self, missing: int, for_grads: bool) -> bool:
        """Ask one after the other; True if one has given something back."""
        return (
            self._evictor.evict_one()
            or (for_grads and self._keeps_in_backward and self._arena.raise_limit(missing, claimed=True))
            or self._held_views.drop_garbage()
            or self.drive_room.detach_pages()
        )

    def attach(self, buffer: MovableBuffer) -> None:
        """Put frames under a host buffer of gradients. Raises CapacityError."""
        if self.is_of_host:
            self.reserve(buffer.num_frames, "a gradient buffer", for_grads=True)
        if not buffer.attach() and not (self.drive_room.detach_pages() and buffer.attach()):
            raise self._no_room(buffer.num_frames, "a gradient buffer")
        if self._keeps_in_backward:
            self._most_for_grads = max(self._most_for_grads, self._arena.claimed_frames)

    def begin_backward(self) -> None:
        """Units that are fetched ahead leave frames for gradients: see [Note: frames for gradients]."""
        limit = self._arena.frame_limit
        if 2 * self._most_for_grads > limit:
            self._arena.raise_limit(max(self._for_units + self._most_for_grads - limit, 0))
        if self._most_for_grads:
            self._arena.keep(self._most_for_grads)

    def end_backward(self) -> None:
        """Units have all frames again."""
        if self._most_for_grads:
            self._arena.keep(0)

    def _no_room(self, num_frames: int, name: str) -> CapacityError:
        used = [unit.name for unit in self._units if unit.in_use and not unit.resident]
        return CapacityError(
            f"{name} needs {format_bytes(num_frames * FRAME)} on the compute device; of "
            f"{format_bytes(self._budget.frame_limit * FRAME)} only "
            f"{format_bytes(self._budget.free_frames * FRAME)} are free while these units are in use: "
            f"{', '.join(used) or 'none'}{self._held_views.describe()}. Raise device_memory, or name smaller units "
            "with units="
        )


class ParamPrefetcher:
    """Moves units between their tier and the compute device.

    In a step: `begin_cycle` as an outermost forward begins; `acquire` before every use; `begin_update` when `step` has
    begun an update, then `refresh_kept`. Beside a step: `fetch_for_access`, `invalidate`, `holds_value`. Where ranks
    use different units: `meet`. `begin_update` only launches; the others may wait for drives, updates or ranks.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        store: ShardStore,
        collectives: Collectives,
        loader: ParamLoader,
        budget: FrameAllocator,
        device_limit: DeviceLimit | None,
        drive_room: DriveRoom,
        groups: GroupReader,
    ) -> None:
        """`budget` is the compute device's memory for units; `loader` fetches values into it. `groups` has the values
        that it reads of units that are not fetched whole. `device_limit` sets the limit of a device's own memory; None
        where a CPU computes.
        """
        self._units = units
        self._store = store
        self.counters = store.counters
        self.spans = store.counters.spans
        self._has_whole_units = collectives.num_shards == 1
        """True if nothing is gathered: one rank, or stages that divide no parameters."""
        self._shard_index = collectives.shard_index
        self.gatherer = Gatherer(collectives, loader)
        self._loader = loader
        self._uploader = loader if isinstance(loader, DeviceParamLoader) else None
        """The loader, where a device computes."""
        self.streams = None if self._uploader is None else self._uploader.streams
        """Told of every use; None where a CPU computes."""
        self._budget = budget
        self._groups = groups
        self.device_limit = device_limit
        self._refused_at = -1
        """Evictions so far when the device last had no memory for a unit."""
        self._complete_at = -1
        """Evictions so far when all units were last seen to be here, if no update has begun since."""
        self.schedule = FetchSchedule()
        self._held_views = HeldViews(units, collectives.world_size)
        gatherer = None if self._has_whole_units else self.gatherer
        self._evictor = Evictor(
            units, self.schedule, self._held_views, loader, self.streams, gatherer, collectives.world_size
        )
        self.pool = MemoryPool(store.arena, budget, units, self._evictor, self._held_views, drive_room)
        self._frames_ahead = self._usual_frames_ahead()

    def _usual_frames_ahead(self) -> int:
        """Frames of `UNITS_AHEAD` units of the size that most of the model's bytes have."""
        sizes = sorted(unit.num_frames for unit in self._units)
        sums = zip(sizes, itertools.accumulate(sizes), strict=True)
        return UNITS_AHEAD * next((size for size, below in sums if 2 * below >= sum(sizes)), 0)

    def grow(self, landing_bytes: int) -> None:
        """The list of units has become longer, and so have the limits of memory."""
        self._complete_at = -1
        if self._uploader is not None:
            self._uploader.make_room(landing_bytes)
        if self.device_limit is not None:
            self.device_limit.measure()
        self.pool.restart()
        self._frames_ahead = self._usual_frames_ahead()

    def begin_cycle(self, kind: str, num_elements: int = 0) -> None:
        """A forward starts, with inputs of so many elements; `kind` tells cycles apart that use units differently."""
        if not self._has_whole_units:
            self.gatherer.agreement.begin()
        self._store.read_lazy()  # a forward may change values where they rest
        self._store.counters.add("departures", self.schedule.num_departures)
        if self._held_views.kept:
            self._held_views.reset()
        for unit in self._units:
            if unit.state is UnitState.AWAY and unit.has_memory:
                unit.detach()  # a Ctrl-C has broken that off
        if DEAR_CHECKS:
            self._check_frames()
        has_departed = self.schedule.has_departed
        self.schedule.begin_cycle(kind)
        self._refused_at = -1
        if self.device_limit is not None and self.device_limit.begin(kind, num_elements, has_departed=has_departed):
            self._shrink()
            self.device_limit.reset_peaks()
        self._look_ahead()

    def _check_frames(self) -> None:
        """Units that are away have no memory, all others have theirs, and the device's budget counts it."""
        placed = [(unit, s.buffer) for unit in self._units for s in unit.sections if s.buffer is not None]
        wrong = [unit.name for unit, buffer in placed if buffer.attached == (unit.state is UnitState.AWAY)]
        assert not wrong, f"states of {', '.join(wrong)} do not tell who has memory"
        if isinstance(self._budget, FrameBudget):
            held = sum(buffer.num_frames for _, buffer in placed if buffer.attached)
            assert held == self._budget.taken, f"units hold {held} frames, and {self._budget.taken} count as taken"

    def acquire(self, unit: Unit) -> None:
        """Return when the unit's newest parameters are on the device; records the use."""
        if self.device_limit is not None:
            self.device_limit.refuse_capture()
        self.fetch_for_access(unit)
        self.schedule.used(unit.index)
        self._look_ahead()
        if not self._has_whole_units:
            self._gather_ahead(unit)

    def _gather_ahead(self, in_use: Unit) -> None:
        """Launch the gathers of the unit that comes next: they run beside the compute of the one in use.

        Where a CPU computes, those of several small units are under way: ranks wait for each other less often.
        """
        self.gatherer.waited_for(in_use)
        if self._complete_at == self._evictor.num_evictions:
            return
        on_host, nbytes = self._uploader is None, 0
        for index in self.schedule.upcoming(this_cycle=True):
            unit = self._units[index]
            if on_host and unit.state is UnitState.PRESENT:
                continue
            if not self.gatherer.has(unit):
                if not self.gatherer.may_run_ahead(unit):
                    return
                if unit.state is UnitState.AWAITING:
                    self._resolve(unit, Urgency.NORMAL)
                if unit.state is not UnitState.FETCHING:
                    return
                with self._loader.ahead(unit):
                    self.gatherer.launch(unit)
            nbytes += sum(section.flat.nbytes for section in unit.sections)
            if not on_host or nbytes >= BYTES_AHEAD:
                return

    def fetch_for_access(self, unit: Unit) -> None:
        """Have the unit here for a use that belongs to no forward or backward; the schedule does not learn of it."""
        if unit.state is UnitState.PRESENT and (unit.update is None or unit.update.is_done):
            unit.wait_for_update()
            if self.streams is not None:
                self.streams.use(unit)
            return
        with self._store.counters.waiting(Cause.PARAMS, unit.name):
            if not self.gatherer.agrees_per_unit or not self.gatherer.needs(unit):
                self._fetch(unit)
            while unit.state is not UnitState.PRESENT or (unit.update is not None and not unit.update.is_done):
                self._fetch(self._units[self.gatherer.agreement.next_unit(unit.index, unit.name)])

    def meet(self, place: str) -> None:
        """Where ranks use different units: take part in what others gather, until all have come to `place`.

        Elsewhere compare what ranks have gathered, before the program waits for others in its own way."""
        if self.gatherer.agrees_per_unit:
            for index in self.gatherer.wanted_units(place):
                self._fetch(self._units[index])
        else:
            self.gatherer.meet(place)

    def _fetch(self, unit: Unit) -> None:
        """Bring the unit here now; where other ranks alone want it, take part in its gather."""
        unit.wait_for_update()
        if unit.state is UnitState.AWAY:
            self._attach_now(unit)
        if unit.state is UnitState.AWAITING:
            self._resolve(unit, Urgency.URGENT)
        if unit.state is UnitState.FETCHING:
            self._finish(unit)
        elif self.gatherer.agrees_per_unit:
            self.gatherer.finish(unit)

    def begin_update(self, order: Sequence[int], *, in_backward: bool = False) -> None:
        """An update is queued: units that it makes stale wait for their new values, first used first.

        `in_backward`: a backward is done with them, and goes on; it has their memory if it needs any.
        """
        self.gatherer.begin_update(order)
        self._complete_at = -1
        if self.device_limit is not None:
            self.device_limit.stepped()
        # Units whose values the update changes, but for those that it updates where forward reads them.
        stale = [unit for unit in (self._units[i] for i in order) if unit.is_updating and not unit.updates_in_place]
        self._held_views.find(stale)
        self._groups.outdate(stale)
        stale = [unit for unit in stale if unit.layout.experts is None or unit.state is not UnitState.AWAY]
        # Frames go to the units that forward needs first. In backward unused units leave, if any unit is still to come.
        if not in_backward:
            self._hand_frames_on(stale)
        elif any(self._units[i].state is UnitState.AWAY for i in self.schedule.upcoming()):
            unused = set(self._evictor.unused())
            for unit in (unit for unit in stale if unit in unused):
                self._evictor.evict(unit)
        for unit in stale:
            _outdate(s for s in unit.sections if s.layout.trainable)
            if unit.state is not UnitState.AWAY:
                self._evictor.cancel(unit)
                # Frozen values that are here stay valid; a fetch that was given up delivered none.
                absent = {UnitState.PRESENT: (), UnitState.AWAITING: unit.to_read}.get(unit.state, unit.sections)
                unit.to_read = tuple(s for s in unit.sections if s.layout.trainable or s in absent)
                if unit.state is not UnitState.AWAITING:
                    unit.move_to(UnitState.AWAITING)
                self._offer(unit)
        # The step is counted: lack of memory for a mere prefetch must not fail it. The next use asks for memory again.
        try:
            if in_backward:
                self._look_ahead()
                return
            for unit in stale:
                if unit.state is UnitState.AWAY:
                    if unit.num_frames > self._budget.free_frames or self._is_refused:
                        break
                    self._attach(unit)
        except torch.OutOfMemoryError:
            self._note_refusal()

    def step_order(self) -> tuple[int, ...]:
        """Units in the order in which the forward of a step first needs them."""
        return self.schedule.first_uses("grad", len(self._units))

    def refresh_kept(self) -> None:
        """The update is launched: views that others hold show the new values when this returns."""
        for unit in self._held_views.kept:
            self.fetch_for_access(unit)

    def _hand_frames_on(self, stale: Sequence[Unit]) -> None:
        """Take frames from the units used last for those used first: what they hold is worth nothing any more."""
        evictable = set(self._evictor.unused())  # those with views are kept, as `begin_update` has found
        holders = deque(unit for unit in stale if unit in evictable)
        missing = 0
        for unit in stale:
            if holders and holders[0] is unit:
                holders.popleft()
            elif unit.state is UnitState.AWAY:
                missing += unit.num_frames
                while holders and missing > self._budget.free_frames:
                    self._evictor.evict(holders.pop())

    def holds_value(self, section: Section) -> bool:
        """True if the section's buffer equals this rank's values at rest, which are read; False if they rest in it."""
        if section.buffer is None:
            return False  # it rests in the buffer
        value = self._store.read_component(section.shard, Component.VALUE)
        begin = self._shard_index * section.layout.shard_numel
        own = section.flat[begin : begin + value.numel()].to(value.device)
        return torch.equal(own.view(torch.int8), value.view(torch.int8))

    def invalidate(self, unit: Unit) -> None:
        """The unit's values were replaced where they rest: the copy on the device goes."""
        self._groups.outdate([unit])
        if not unit.updates_in_place and unit.state is not UnitState.AWAY:
            self._held_views.find([unit])
            self._evictor.evict(unit)
        _outdate(unit.sections)
        if unit.stays:
            self.fetch_for_access(unit)

    # Moves. `_finish` is a collective, and its order must be the same on all ranks. So it follows frames and the
    # schedule, never what happens to be complete. When a local read begins may differ.

    def _look_ahead(self) -> None:
        """Attach units in the order of the schedule as far as the budget goes; launch what can be read.

        [Note: what stays between tokens]
        Where a cycle repeats, the unit just used has the furthest next use of all. Far ahead, prefetch would take its
        memory for a unit that comes late, and every unit would move once per cycle, however many fit. So it takes
        memory of others only for what comes within `UNITS_AHEAD`. Then the others stay from one cycle to the next.
        """
        if self._complete_at == self._evictor.num_evictions:
            return
        ahead, frames_ahead = 0, self._frames_ahead if self.schedule.repeats else UNLIMITED_FRAMES
        for index in self.schedule.upcoming():
            unit = self._units[index]
            if unit.state is UnitState.AWAY:
                # Only units whose next use comes after its own make room for it.
                while unit.num_frames > self._budget.free_frames:
                    if ahead >= frames_ahead:
                        return
                    victim = self._evictor.choose(self.schedule.next_use[index])
                    if victim is None:
                        return
                    self._evictor.evict(victim)
                if self._is_refused:
                    return
                try:
                    self._attach(unit)
                except torch.OutOfMemoryError:
                    if not self._has_whole_units:
                        raise  # the others go on to gather it
                    self._note_refusal()
                    return  # its use asks for memory again
            is_updated = unit.update is None or unit.update.is_done
            if unit.state is UnitState.AWAITING and is_updated and self._is_readable(unit):
                self._resolve(unit, Urgency.NORMAL)
            if unit.state is UnitState.FETCHING and self._uploader is not None:
                self._uploader.advance(unit)
            ahead += unit.num_frames
        if all(unit.state is UnitState.PRESENT for unit in self._units):
            self._complete_at = self._evictor.num_evictions

    def _is_readable(self, unit: Unit) -> bool:
        """True if a read would neither wait for memory to land in nor for writes of the unit's new values."""
        if self._uploader is not None and not self._uploader.ready(unit):
            return False
        return all(write.done() for section in unit.sections for write in section.shard.writes)

    def _attach_now(self, unit: Unit) -> None:
        """Attach for a use that cannot wait: where the device refuses memory, units leave that are not in use."""
        while True:
            self.pool.reserve(unit.num_frames, unit.name)
            try:
                self._attach(unit)
                return
            except torch.OutOfMemoryError:
                self._note_refusal()
                # Where ranks gather, a unit leaves on all of them.
                if not self._has_whole_units or (self._is_refused and not self._evictor.evict_one()):
                    raise

    @property
    def _is_refused(self) -> bool:
        """True if the device had no memory for a unit, and none has left since: to ask again would flush the
        allocator's cache for nothing."""
        return self._refused_at == self._evictor.num_evictions

    def _note_refusal(self) -> None:
        """The device had no memory for a unit: several ranks lower their limits when they next agree."""
        self._refused_at = self._evictor.num_evictions
        if self._has_whole_units and self.device_limit is not None:
            self.device_limit.ran_out()
            self._shrink()

    def _shrink(self) -> None:
        """The limit has fallen: units above it leave, those in use apart."""
        while self._budget.free_frames < 0 and self._evictor.evict_one():
            pass

    def _attach(self, unit: Unit) -> None:
        """Attach frames for an absent unit; a queued update delivers into them, else they are read into."""
        attached = unit.attach()
        assert attached
        if self.streams is not None:
            self.streams.attached(unit)
        unit.to_read = unit.sections
        unit.move_to(UnitState.AWAITING)
        self._offer(unit)

    def _offer(self, unit: Unit) -> None:
        """Let the update deliver into the unit's buffers, if they are host memory and hold whole sections."""
        if not self._has_whole_units or not self.pool.is_of_host:
            return
        if unit.update is not None and unit.update.deliver_to(tuple(s.flat.data_ptr() for s in unit.sections)):
            unit.to_read = tuple(section for section in unit.to_read if not section.layout.trainable)

    def _resolve(self, unit: Unit, urgency: Urgency) -> None:
        """The unit's update is over: its values are here, or their fetch is launched."""
        if not unit.to_read:
            if self.streams is not None:
                self.streams.arrived(unit)
            self._evictor.arrived(unit)
            return
        unit.move_to(UnitState.FETCHING)
        opened = self.spans.open(Track.FETCH, unit.name)
        try:
            self._loader.launch(unit, unit.to_read, urgency)
        except BaseException:
            # Only a part may be on its way: the next use launches all of it.
            self._loader.cancel(unit)
            unit.move_to(UnitState.AWAITING)
            raise
        if opened is not None:
            self.spans.close(opened)

    def _finish(self, unit: Unit) -> None:
        self._loader.finish(unit)
        if not self._has_whole_units:
            self.gatherer.finish(unit)
        if self.streams is not None:
            self.streams.arrived(unit)
        unit.to_read = ()
        self._evictor.arrived(unit)


def replaced(prefetcher: ParamPrefetcher, placed: Iterable[tuple[Unit, nn.Parameter]]) -> None:
    """These have other values: copies on the device go, and so does the use of graphs that read the old ones."""
    found = list(placed)
    for unit in {unit.index: unit for unit, _ in found}.values():
        prefetcher.invalidate(unit)
    torch.autograd.graph.increment_version([param for _, param in found])


def _outdate(sections: Iterable[Section]) -> None:
    """Replicas no longer hold the newest values: the next fetch gathers them."""
    for section in sections:
        if section.shard.replica is not None:
            section.shard.replica.outdate()
