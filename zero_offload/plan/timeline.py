"""Steps in virtual time: what waits for what, on which lane, in the runtime's order.

Owns the order: units fetched ahead by the schedule as far as frames go (`runtime/residency.py`), gradients out
through a few buffers (`runtime/grads`), the update in order of first use with `CHUNKS_IN_FLIGHT` chunks
(`optim/pipeline.py`), commits behind all of it. Pure: seconds come from `costs`, and what is decided before the first
step is `Policy`.

A lane takes what it is given in the order of the program, and no decision looks at the clock. So each time is a maximum
of sums of durations, and a lane that gets faster never makes a step slower. What this leaves out: transfers that
overtake each other, a unit whose update ends before its pages are attached (it would be read once more), and noise.

The calls: `Run.step`, as often as wanted; then `now`, `exposed_s` and the lanes' `busy_s`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from zero_offload.plan.hardware import Lane
from zero_offload.plan.lane_costs import NO_FETCH, Fetch, UnitCosts
from zero_offload.plan.memory import UNITS_IN_FLIGHT
from zero_offload.plan.passes import GradsOut, Lanes, Updates
from zero_offload.plan.trace import AccessTrace
from zero_offload.telemetry.spans import Cause

UNITS_AHEAD = 4
"""Uses that are looked at ahead, however many frames there are: nothing waits for more."""


@dataclass(frozen=True)
class Policy:
    """What the runtime decides before the first step."""

    uses: tuple[tuple[int, ...], ...]
    """Units that the forward of each one needs, itself last."""
    room_bytes: float
    """Compute memory for units on their way through."""
    overlaps: bool
    in_backward: bool
    num_passes: int
    by_unit: bool
    """A pass is of all micro-batches."""
    gathers_ahead: tuple[bool, ...]
    """Whether a unit's gather may be launched with the use before its own: its part is in memory on every rank."""
    hold_s: float
    """Of activations on their way to drives from a CPU, what need not be written before compute goes on."""
    is_host: bool

    @property
    def delivers_all(self) -> bool:
        """Whether forward comes to each unit while its update is before it: pages are there when new values come."""
        return self.overlaps and not self.in_backward


class Run:
    """Steps, one after the other; `now` is the end of the last one."""

    def __init__(self, costs: Sequence[UnitCosts], lanes: Lanes, policy: Policy) -> None:
        self._costs = costs
        self._lanes = lanes
        self._policy = policy
        order = [unit for units in policy.uses for unit in units]
        self._trace = AccessTrace((*order, *(unit for units in reversed(policy.uses) for unit in units)))
        self._order = tuple(dict.fromkeys(self._trace.uses))
        """Units by their first use."""
        self._position = 0
        self._attached: dict[int, None] = {}
        self._free_bytes = policy.room_bytes
        self._loaded_s: dict[int, float] = {}
        """When a unit's own part was where compute, or a gather, takes it."""
        self._gathered_s: dict[int, float] = {}
        self._stale: set[int] = set()
        """Updated and not fetched since."""
        self._offered: set[int] = set()
        """Units in whose pages the update delivers."""
        self._landed_s: deque[float] = deque()
        """Ends of uploads that hold a landing region."""
        self._updates = Updates(costs, lanes, {})
        self._commits: deque[int] = deque()
        self._committed_s: dict[int, float] = {}
        self._grads_out = GradsOut(costs, lanes)
        self.exposed_s: dict[Cause, float] = {}
        self.now = 0.0

    def forget_times(self) -> None:
        """What is counted begins here."""
        self.exposed_s.clear()
        for lane in self._lanes.values():
            lane.busy_s = 0.0

    def step(self) -> None:
        for number in range(self._policy.num_passes):
            self._forward()
            is_last = number == self._policy.num_passes - 1
            self._backward(adds=number > 0 or self._policy.by_unit, is_last=is_last)
        self._update()

    def _wait(self, until_s: float, cause: Cause) -> None:
        if until_s > self.now:
            self.exposed_s[cause] = self.exposed_s.get(cause, 0.0) + until_s - self.now
            self.now = until_s

    # Forward and backward

    def _forward(self) -> None:
        self._position = 0
        self._look_ahead(())
        for unit, needed in enumerate(self._policy.uses):
            self._begin(needed)
            cost = self._costs[unit]
            self.now = self._lanes[Lane.COMPUTE].run(self.now, cost.forward_s)
            self._save(cost.saved_out)
            self._commit_some(len(self._trace.uses) - self._position + 1)

    def _save(self, saved: Fetch) -> None:
        """Activations leave. A CPU copies them to a few blocks, which drives must empty."""
        away_s = self._lanes[Lane.DOWNLOAD].run(self.now, saved.keep_download_s)
        written_s = self._lanes[Lane.WRITE].run(away_s, saved.keep_write_s)
        if saved.keep_write_s and self._policy.is_host:
            self._wait(written_s - min(self._policy.hold_s, saved.keep_write_s), Cause.ACTIVATIONS)

    def _restore(self, unit: int) -> float:
        """Launch the way back of a unit's activations, while the unit behind it is in backward."""
        saved = self._costs[unit].saved_out if unit >= 0 else NO_FETCH
        read_s = self._lanes[Lane.READ].run(self.now, saved.read_s)
        return self._lanes[Lane.UPLOAD].run(read_s, saved.upload_s)

    def _backward(self, *, adds: bool, is_last: bool) -> None:
        saved_s = self._restore(len(self._costs) - 1)
        for unit in reversed(range(len(self._costs))):
            cost = self._costs[unit]
            self._wait(self._grads_out.room_s(), Cause.GRADS)
            self._begin(self._policy.uses[unit])
            self._wait(saved_s, Cause.ACTIVATIONS)
            saved_s = self._restore(unit - 1)
            self.now = self._lanes[Lane.COMPUTE].run(self.now, cost.backward_s)
            resting_s = self._grads_out.add(unit, self.now, adds=adds)
            self._commit_some(len(self._trace.uses) - self._position + 1)
            if is_last and self._policy.in_backward and cost.update.pieces:
                self._grads_out.hold(self._queue_update(unit, resting_s))

    def _begin(self, needed: Iterable[int]) -> None:
        """Wait until the units are there; what comes next is launched then."""
        for unit in needed:
            self._attach_now(unit)
            updated_s = self._updates.until(unit)
            launch_s = self.now
            self._wait(updated_s, Cause.UPDATE)
            self._wait(self._gather(unit, self._load(unit, launch_s)), Cause.PARAMS)
            self._position += 1
        self._look_ahead(needed)

    def _look_ahead(self, in_use: Iterable[int]) -> None:
        """`Residency._look_ahead`: attach what comes next as far as frames go, and launch its fetch."""
        following = self._trace.uses[self._position : self._position + UNITS_AHEAD]
        for unit in following:
            if unit not in self._loaded_s:
                if not self._attach(unit, in_use):
                    break
                self._load(unit, self.now)
        first = following[0] if following else -1
        # Some rank may still be updating what this one has not used since: no gather of that runs ahead.
        updating = first in self._stale and self._policy.overlaps and first in self._updates.ready_s
        if first in self._loaded_s and self._policy.gathers_ahead[first] and not updating:
            self._gather(first, self._loaded_s[first])

    def _attach(self, unit: int, in_use: Iterable[int]) -> bool:
        """Frames for a unit, from those whose next use comes after its own."""
        need = self._costs[unit].buffer_bytes
        if unit in self._attached or need == 0:
            return True
        next_use = self._trace.next_use(unit, self._position)
        kept = set(in_use)
        while need > self._free_bytes:
            others = (each for each in self._attached if each not in kept)
            victim = max(others, key=lambda each: self._trace.next_use(each, self._position), default=None)
            if victim is None or self._trace.next_use(victim, self._position) <= next_use:
                return False
            self._evict(victim)
        self._attached[unit] = None
        self._free_bytes -= need
        return True

    def _attach_now(self, unit: int) -> None:
        """For a use that cannot wait, whatever comes next."""
        need = self._costs[unit].buffer_bytes
        while unit not in self._attached and need > self._free_bytes and self._attached:
            self._evict(max(self._attached, key=lambda each: self._trace.next_use(each, self._position)))
        if need and unit not in self._attached:
            self._attached[unit] = None
            self._free_bytes -= need

    def _evict(self, unit: int) -> None:
        del self._attached[unit]
        self._free_bytes += self._costs[unit].buffer_bytes
        self._loaded_s.pop(unit, None)
        self._gathered_s.pop(unit, None)

    def _load(self, unit: int, at_s: float) -> float:
        """Launch a unit's fetch unless that is done; says when its own part is there."""
        if unit in self._loaded_s:
            return self._loaded_s[unit]
        cost, updated_s = self._costs[unit], self._updates.until(unit)
        fetch = cost.first if unit in self._stale else cost.again
        if unit in self._stale and cost.delivered and (self._policy.delivers_all or unit in self._offered):
            self._loaded_s[unit] = updated_s
            self._stale.discard(unit)
            return updated_s
        ready_s = max(at_s, updated_s)
        if fetch.read_s:
            # What was written must have landed, and landing regions are few.
            ready_s = max(ready_s, self._updates.written_s.get(unit, 0.0))
            if fetch.upload_s and len(self._landed_s) == UNITS_IN_FLIGHT:
                ready_s = max(ready_s, self._landed_s.popleft())
        end_s = self._lanes[Lane.READ].run(ready_s, fetch.read_s)
        end_s = self._lanes[Lane.UPLOAD].run(end_s, fetch.upload_s)
        if fetch.read_s and fetch.upload_s:
            self._landed_s.append(end_s)
        self._loaded_s[unit] = end_s
        return end_s

    def _gather(self, unit: int, loaded_s: float) -> float:
        """Launch the gather of a unit unless that is done; says when its whole values are there."""
        if unit in self._gathered_s:
            return self._gathered_s[unit]
        cost = self._costs[unit]
        fetch = cost.first if unit in self._stale else cost.again
        end_s = self._lanes[Lane.NETWORK].run(max(loaded_s, self.now) if fetch.gather_s else loaded_s, fetch.gather_s)
        kept_s = self._lanes[Lane.DOWNLOAD].run(end_s, fetch.keep_download_s)
        self._lanes[Lane.WRITE].run(kept_s, fetch.keep_write_s)
        self._gathered_s[unit] = end_s
        self._stale.discard(unit)
        return end_s

    # The step

    def _queue_update(self, unit: int, ready_s: float) -> float:
        """In backward, once the unit's gradients rest: its new values are for the next forward."""
        if len(self._updates.ready_s) == sum(each.update.pieces > 0 for each in self._costs):
            self._updates.end()
            self._updates = Updates(self._costs, self._lanes, dict(self._committed_s))
        self._updates.queue(unit, ready_s)
        return self._updates.until(unit)

    def _update(self) -> None:
        self._wait(self._grads_out.end_s(), Cause.GRADS)
        self._grads_out.forget()
        late_s = self.now
        for cost in self._costs:
            late_s = self._lanes[Lane.NETWORK].run(late_s, cost.late_reduce_s)
        self._wait(late_s, Cause.GRADS)
        updated = [unit for unit in self._order if _is_updated(self._costs[unit])]
        if not self._policy.in_backward:
            begin_s = max(self.now, self._updates.end())
            self._updates = Updates(self._costs, self._lanes, dict(self._committed_s))
            for unit in updated:
                if self._costs[unit].update.pieces:
                    self._updates.queue(unit, begin_s)
        self._hand_frames_on(updated)
        self._offered = set(self._attached)
        if not self._policy.overlaps:
            self._wait(self._updates.end(), Cause.UPDATE)
        self._update_on_device(updated)
        self._commits = deque(unit for unit in self._order if self._costs[unit].commit_s > 0)

    def _update_on_device(self, order: Sequence[int]) -> None:
        """Launched on the stream of compute; gradients come up first."""
        for unit in order:
            update = self._costs[unit].update
            if update.device_s:
                read_s = self._lanes[Lane.READ].run(self.now, update.device_read_s)
                up_s = self._lanes[Lane.UPLOAD].run(read_s, update.device_upload_s)
                self._wait(max(up_s, self._committed_s.get(unit, 0.0)), Cause.UPDATE)
                self.now = self._lanes[Lane.COMPUTE].run(self.now, update.device_s)

    def _hand_frames_on(self, updated: Sequence[int]) -> None:
        """`Residency.begin_update`: what is here is stale, and frames go to the units that come first."""
        self._position = 0
        for unit in updated:
            self._loaded_s.pop(unit, None)
            self._gathered_s.pop(unit, None)
        self._stale.update(updated)
        for unit in updated:
            if not self._attach(unit, ()):
                break

    def _commit_some(self, hooks_left: int) -> None:
        """A commit begins when the update is over, and is spread over what is left of the step."""
        if not self._commits or len(self._updates.done_s) < len(self._updates.ready_s):
            return
        for _ in range(-(-len(self._commits) // hooks_left)):
            unit = self._commits.popleft()
            begin_s = self._updates.end()
            self._committed_s[unit] = self._lanes[Lane.WRITE].run(begin_s, self._costs[unit].commit_s)


def _is_updated(cost: UnitCosts) -> bool:
    return cost.update.pieces > 0 or cost.update.device_s > 0
