"""Gradients where the update runs inside of backward: in memory of a few units' size, which they pass through.

`GradRing` is that memory, and knows whose update still reads its part. `RingGrads` and `RingDriveGrads` are the stores
of sections that lease parts of it. Gradients that no update of their backward takes move to where `HostGrads` and
`DriveGrads` have them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence

import torch

from zero_offload.base.threads import UnitUpdate
from zero_offload.base.types import Tier
from zero_offload.hardware.device import Event
from zero_offload.plan.layout import SectionLayout
from zero_offload.plan.memory import GRAD_RING_UNITS
from zero_offload.storage.memory.arena import Arena, Need, Region
from zero_offload.storage.memory.pool import SpanPool
from zero_offload.storage.shards.drive_grads import AttachBuffer, DriveGrads, DriveRoom
from zero_offload.storage.shards.grad_store import SUMS_ADVICE, GradMemory, HostGrads

LAUNCHED_MAX = GRAD_RING_UNITS - 3
"""Units whose update is launched and not computed, beside those that backward fills."""


class GradRing:
    """A pool that the shards of a model lease parts of. Control thread only.

    The calls: `begin_backward` when an updating backward begins. `lease` for a shard's first gradient waits for the
    oldest update while the ring is full. `passing` when an update has taken a unit's shards. `collect` gives back the
    parts that updates have used; `end_backward` when backward ends.
    """

    def __init__(self, arena: Arena, nbytes: int) -> None:
        self._pool = SpanPool(arena, nbytes, Need("gradients on their way to the update"))
        self._filling: dict[int, dict[int, RingGrads]] = {}
        """By the unit's index: shards with a part that no update has taken, by the section's index."""
        self._launched: deque[tuple[UnitUpdate, Sequence[RingGrads]]] = deque()
        self._in_backward = False

    def begin_backward(self) -> None:
        """Gradients that come from now on are used by this backward."""
        self._in_backward = True

    def end_backward(self) -> None:
        """Gradients that come from now on are held until later, and so are those that no update has taken."""
        self._in_backward = False
        for unit in list(self._filling):
            self.release_unit(unit)

    def lease(self, shard: RingGrads, nbytes: int) -> Region | None:
        """Memory until `release`; None where gradients are to be held elsewhere."""
        if not self._in_backward:
            return None
        while not self._pool.fits(nbytes) and self._launched:
            self._wait_for_oldest()
        # Units that backward completes only at its end, such as those with unused parameters, may fill the ring.
        if not self._pool.fits(nbytes):
            return None
        self._filling.setdefault(shard.layout.unit, {})[shard.layout.index] = shard
        return self._pool.lease(nbytes)

    def release(self, region: Region) -> None:
        self._pool.release(region)

    def release_unit(self, unit: int) -> None:
        """No update of this backward takes the unit's gradients."""
        for shard in self._filling.pop(unit, {}).values():
            shard.release_span()

    def passing(self, update: UnitUpdate, unit: int) -> None:
        """An update is launched that uses the unit's gradients; waits while too many are."""
        self._launched.append((update, tuple(self._filling.pop(unit, {}).values())))
        while self._in_backward and len(self._launched) > LAUNCHED_MAX:
            self._wait_for_oldest()

    def collect(self) -> None:
        """Give back what updates that are computed have used."""
        for _ in range(len(self._launched)):
            update, shards = self._launched.popleft()
            if not update.is_done:
                self._launched.append((update, shards))
                continue
            for shard in shards:
                shard.release_span()

    def _wait_for_oldest(self) -> None:
        update, shards = self._launched.popleft()
        update.wait()
        for shard in shards:
            shard.release_span()


class RingGrads(HostGrads):
    """The gradients of one shard: in the ring, or in host memory of their own."""

    _span: Region | None = None
    """The ring's memory under the array."""

    def __init__(
        self, ring: GradRing, memory: GradMemory, layout: SectionLayout, tier: Tier, unit: str, *, sums_up: bool
    ) -> None:
        super().__init__(memory, layout, tier, unit, sums_up=sums_up)
        self._ring = ring

    def writable_array(self) -> torch.Tensor:
        if self._array is None and not self.held:
            self._span = self._ring.lease(self, self.layout.shard_numel * self.dtype.itemsize)
            if self._span is not None:
                self._array = self._span.tensor(self.dtype, self.layout.shard_numel)
        return super().writable_array()

    def release_span(self) -> None:
        """Give back what was leased, unless an update reads it; gradients that are still held move to memory of their
        own. The ring asks again for what an update has used."""
        if self._lent or self._span is None:
            return
        array = self._complete_array()
        own = self._moved(array) if self.held else None
        self._drop_array()
        self._array = own

    def lend(self, made: Event | None) -> None:
        # The ring is not for the update's thread, which may want to see what is between gradients.
        if not self.on_disk:
            self.writable_array()
        super().lend(made)

    def _moved(self, array: torch.Tensor) -> torch.Tensor | None:
        """An array with the same gradients, or None where they went to a drive."""
        return self._new_array(self.dtype).copy_(array)

    def _need(self, dtype: torch.dtype) -> Need:
        advice = f'with overlap="backward" a plan counts gradients that pass through; here they are held: {SUMS_ADVICE}'
        return Need(f"gradients of {self.unit}", advice, is_planned=False)

    def _widen_array(self) -> None:
        self._widen_in_turn()

    def _drop_array(self) -> None:
        super()._drop_array()
        if self._span is not None:
            self._ring.release(self._span)
        self._span = None

    def _may_keep(self, grad: torch.Tensor) -> bool:
        """False: the ring bounds what there is, and so has all of it."""
        return False


class RingDriveGrads(RingGrads, DriveGrads):
    """The gradients of one shard: in the ring, or on a drive."""

    def __init__(
        self,
        ring: GradRing,
        room: DriveRoom,
        attach: AttachBuffer,
        memory: GradMemory,
        layout: SectionLayout,
        unit: str,
        *,
        sums_up: bool,
    ) -> None:
        DriveGrads.__init__(self, room, attach, memory, layout, unit, sums_up=sums_up)
        self._ring = ring

    def launch_write(self) -> None:
        if self._span is None:
            super().launch_write()

    def end_view(self, changed: Collection[int] = ()) -> None:
        if changed or self._span is None:
            super().end_view(changed)

    def _moved(self, array: torch.Tensor) -> None:
        self._wait_for_writes()
        self._store.disk.write_array(self._extent(array.dtype), array)

    def _may_stream(self, grad: torch.Tensor) -> bool:
        return False
