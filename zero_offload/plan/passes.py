"""Two passes over a model's units in virtual time: gradients on their way out, and the update.

Owns the lanes and what bounds the passes: buffers, staging, chunks in flight. Seconds come from `costs`; in which order
units come is `timeline`'s. A lane takes what it is given in the order of the program. Pure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from zero_offload.plan.hardware import Lane, Machine
from zero_offload.plan.lane_costs import UnitCosts
from zero_offload.plan.memory import (
    CHUNKS_IN_FLIGHT,
    GRAD_RING_UNITS,
    GRADS_IN_FLIGHT,
    STAGED_SECTIONS,
)


class LaneClock:
    """One thing after the other, in the order given."""

    def __init__(self) -> None:
        self.free_s = self.busy_s = 0.0

    def run(self, ready_s: float, seconds: float) -> float:
        """When it ends. Nothing to do takes no turn."""
        if seconds <= 0:
            return ready_s
        self.free_s = max(self.free_s, ready_s) + seconds
        self.busy_s += seconds
        return self.free_s


class Lanes(dict[Lane, LaneClock]):
    @classmethod
    def of(cls, machine: Machine) -> Lanes:
        lanes = cls({lane: LaneClock() for lane in Lane})
        if machine.drive_takes_turns:
            lanes[Lane.WRITE] = lanes[Lane.READ]
        return lanes


class _Piece(NamedTuple):
    unit: int
    is_last: bool


class Updates:
    """The update pass of one step in virtual time, worked off as far as somebody asks: `UpdatePipeline._run`."""

    def __init__(self, costs: Sequence[UnitCosts], lanes: Lanes, committed_s: Mapping[int, float]) -> None:
        """`committed_s`: when the commit before has written a unit's states, where they rest in memory."""
        self._costs = costs
        self._lanes = lanes
        self._committed_s = committed_s
        self._commit_end_s = max(committed_s.values(), default=0.0)
        self._queue: deque[_Piece] = deque()
        self._reading: deque[tuple[_Piece, float]] = deque()
        self._writes: deque[float] = deque()
        """Ends of those that hold staging."""
        self._staged = 0
        self.ready_s: dict[int, float] = {}
        """When a unit was queued."""
        self.done_s: dict[int, float] = {}
        """When its new values were there."""
        self.written_s: dict[int, float] = {}
        self.now = 0.0

    def queue(self, unit: int, ready_s: float) -> None:
        pieces = self._costs[unit].update.pieces
        self.ready_s[unit] = ready_s
        self._queue.extend(_Piece(unit, index == pieces - 1) for index in range(pieces))

    def until(self, unit: int) -> float:
        """When the unit's update is computed; 0 for one that was not queued."""
        while unit in self.ready_s and unit not in self.done_s:
            self._compute_one()
        return self.done_s.get(unit, 0.0)

    def end(self) -> float:
        """When the last write is complete."""
        while self._queue or self._reading:
            self._compute_one()
        return max([self.now, *self.written_s.values()])

    def _compute_one(self) -> None:
        while self._queue and len(self._reading) < CHUNKS_IN_FLIGHT - 1:
            self._open(self._queue.popleft())
        piece, arrived_s = self._reading.popleft()
        update = self._costs[piece.unit].update
        ready_s = max(self.now, arrived_s, self._committed_s.get(piece.unit, 0.0))
        self.now = self._lanes[Lane.HOST].run(ready_s, update.host_s / update.pieces)
        written_s = self.now
        if update.write_s:
            begin_s = max(self.now, self._commit_end_s)
            written_s = self._lanes[Lane.WRITE].run(begin_s, update.write_s / update.pieces)
        if update.is_staged:
            self._writes.append(written_s)
        if piece.is_last:
            self.done_s[piece.unit] = self.now
            self.written_s[piece.unit] = written_s

    def _open(self, piece: _Piece) -> None:
        update = self._costs[piece.unit].update
        self.now = max(self.now, self.ready_s[piece.unit])
        if update.is_staged:
            if self._staged == CHUNKS_IN_FLIGHT:
                # Of the chunks before, the oldest must be on its drive.
                self.now = max(self.now, self._writes.popleft())
            else:
                self._staged += 1
        read_s = self._lanes[Lane.READ].run(self.now, update.read_s / update.pieces)
        down_s = self._lanes[Lane.DOWNLOAD].run(self.now, update.download_s / update.pieces)
        self._reading.append((piece, max(read_s, down_s)))


class GradsOut:
    """Gradients on their way to where they rest, through a few buffers."""

    def __init__(self, costs: Sequence[UnitCosts], lanes: Lanes) -> None:
        self._costs = costs
        self._lanes = lanes
        self._buffers: deque[float] = deque()
        self._leaving: deque[float] = deque()
        self._staged: deque[float] = deque()
        self._ring: deque[float] = deque()
        self._end_s = 0.0

    def room_s(self) -> float:
        """When the next backward finds buffers."""
        waits = [0.0]
        for ends, count in (
            (self._buffers, GRADS_IN_FLIGHT),
            (self._leaving, GRADS_IN_FLIGHT),
            (self._staged, STAGED_SECTIONS),
            (self._ring, GRAD_RING_UNITS),
        ):
            while len(ends) >= count:
                waits.append(ends.popleft())
        return max(waits)

    def add(self, unit: int, made_s: float, *, adds: bool) -> float:
        """A unit's gradients of one backward; says when they rest."""
        cost, lanes = self._costs[unit], self._lanes
        reduced_s = lanes[Lane.NETWORK].run(made_s, cost.reduce_s)
        down_s = lanes[Lane.DOWNLOAD].run(reduced_s, cost.grad_download_s)
        landed_s = lanes[Lane.HOST].run(down_s, cost.land_s)
        if cost.grad_download_s:
            self._leaving.append(down_s)
        if cost.land_s:
            self._staged.append(landed_s)
        added_s = lanes[Lane.READ].run(landed_s, cost.grad_read_s if adds else 0.0)
        rest_s = lanes[Lane.WRITE].run(added_s, cost.grad_write_s)
        if cost.reduce_s or cost.grad_write_s:
            self._buffers.append(rest_s)
        self._end_s = max(self._end_s, rest_s)
        return rest_s

    def hold(self, until_s: float) -> None:
        """A ring of gradients keeps a unit's until its update."""
        self._ring.append(until_s)

    def end_s(self) -> float:
        return self._end_s

    def forget(self) -> None:
        self._buffers.clear()
        self._leaving.clear()
        self._staged.clear()
        self._ring.clear()
