"""Memory that a model's units take in turns; on a CPU gradients on their way to drives take of it too.

`reserve` asks for it back in a fixed order: units leave; views that only garbage holds go; gradients that leave are
written; then the limit rises, up to the budget. For gradients the limit rises second, up to what is kept for them. Only
here is there a CapacityError for it.

[Note: frames for gradients]
Where one rank computes on a CPU, gradients have as many of the units' frames as they had at once in the backwards
before: in forward units have them all; in backward, which has less need of units fetched far ahead, those are kept.
Where they would be more than half, they come on top. Elsewhere `Arena` keeps frames for gradients at all times.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from zero_offload.base.errors import CapacityError
from zero_offload.base.types import format_bytes
from zero_offload.runtime.eviction import Evictor
from zero_offload.runtime.held_views import HeldViews
from zero_offload.runtime.units.unit import Unit
from zero_offload.storage.memory.arena import Arena, MovableBuffer
from zero_offload.storage.memory.pages import FRAME
from zero_offload.storage.memory.resizable import Budget


class MemoryPool:
    """Of one model."""

    def __init__(
        self, arena: Arena, budget: Budget, units: Sequence[Unit], evictor: Evictor, held_views: HeldViews
    ) -> None:
        """`budget` has the frames of `units`: `arena`, which has those of gradients, or a device's."""
        self._arena = arena
        self._budget = budget
        self._units = units
        self._evictor = evictor
        self._held_views = held_views
        self.is_of_host = budget is arena
        """True if units and gradients share the host's memory."""
        self.flush_grads: Callable[[], bool] = lambda: False
        """Gradients on their way to drives give their frames back when they are written; True if any did."""
        self.measure()

    def measure(self) -> None:
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
            or self.flush_grads()
        )

    def attach(self, buffer: MovableBuffer) -> None:
        """Put pages under a host buffer of gradients. Raises CapacityError."""
        if self.is_of_host:
            self.reserve(buffer.num_frames, "a gradient buffer", for_grads=True)
        if not buffer.attach() and not (self.flush_grads() and buffer.attach()):
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
        """An update or a forward begins: units have all frames."""
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
