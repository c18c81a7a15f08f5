"""One unit at run time: its parameters, their flat buffers, and who is using them.

[Note: flat buffers]
Each section has one buffer of constant identity on the compute device; every parameter is a view of it, made
once. Autograd keeps such views, so the buffer is never replaced: away means that its pages (on a CPU) or its
storage (on a GPU) are gone, not the tensor. `Unit` knows states and uses; `Residency` decides when to move.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from zero_offload.memory.resizable import Buffer
from zero_offload.plan.layout import ParamSlice, SectionLayout, UnitLayout
from zero_offload.plan.tensor_parallel import local_part
from zero_offload.runtime.guard import guard, unguard
from zero_offload.shards.shard import Shard
from zero_offload.shards.state import StateTracker, UnitState


class Section:
    """One section's flat buffer, (numel,) on the compute device, and this rank's shard."""

    def __init__(self, shard: Shard, flat: torch.Tensor, buffer: Buffer | None) -> None:
        """`buffer` holds the pages of `flat`; None when they never leave."""
        self.shard = shard
        self.flat = flat
        self.buffer = buffer

    @property
    def layout(self) -> SectionLayout:
        return self.shard.layout


class Unit:
    """Parameters that are fetched, used and released together."""

    def __init__(self, index: int, layout: UnitLayout, sections: Sequence[Section], *, resident: bool) -> None:
        """A `resident` unit, once here, is never evicted."""
        self.index = index
        self.layout = layout
        self.sections = tuple(sections)
        self.params: list[nn.Parameter] = []
        """Section after section, in the order of the layout."""
        self.resident = resident
        self.updates_in_place = all(s.buffer is None and s.layout.num_shards == 1 for s in sections)
        """The buffers are where the whole values rest: an update leaves nothing to fetch."""
        self.tracker = StateTracker(layout.name, UnitState.PRESENT if self.updates_in_place else UnitState.AWAY)
        self.on_host = all(section.flat.device.type == "cpu" for section in sections)
        self.to_read: tuple[Section, ...] = ()
        """Awaiting or fetching: the sections whose values are not here and will not be delivered."""
        self.forward_uses = 0
        """Forwards (of its modules, or around a touch) that are running now."""
        self.backward_uses = 0
        """Backwards through those modules that have begun and not ended."""
        self._versions: list[int] = []
        """Of the parameters, when they were opened."""
        self.gathered_uses = 0
        """`gathered` contexts that hold it; no forward or backward ends these."""

    @property
    def name(self) -> str:
        return self.layout.name

    @property
    def state(self) -> UnitState:
        return self.tracker.state

    @property
    def in_use(self) -> bool:
        return self.runs or self.gathered_uses > 0

    @property
    def runs(self) -> bool:
        """Whether a forward or backward uses it."""
        return self.forward_uses > 0 or self.backward_uses > 0

    @property
    def readable(self) -> bool:
        """Whether its parameters, once updated, can be read at any time without a move."""
        return self.updates_in_place or (self.resident and self.state is UnitState.PRESENT)

    @property
    def num_frames(self) -> int:
        """Frames its buffers need while they are here."""
        return sum(s.buffer.num_frames for s in self.sections if s.buffer is not None)

    def placed_params(self) -> Iterator[tuple[Section, ParamSlice, nn.Parameter]]:
        """Every parameter with its section and its slice of it."""
        params = iter(self.params)
        for section in self.sections:
            for piece in section.layout.params:
                yield section, piece, next(params)

    def attach(self) -> bool:
        """Put pages under all buffers; False, and none attached, when there are too few."""
        attached: list[Buffer] = []
        for section in self.sections:
            if section.buffer is None:
                continue
            if not section.buffer.attach():
                for buffer in attached:
                    buffer.detach()
                return False
            attached.append(section.buffer)
        return True

    def detach(self) -> None:
        for section in self.sections:
            if section.buffer is not None:
                section.buffer.detach()

    def open(self) -> None:
        """Give the parameters plain tensors' speed for a use."""
        unguard(self.params)
        self._versions = [param._version for param in self.params]

    def changed(self) -> list[str]:
        """Names of parameters that were changed since `open`, where what is changed here is lost."""
        names = []
        # Without versions it was never opened: there was no room for it.
        for (section, piece, param), version in zip(self.placed_params(), self._versions, strict=False):
            elsewhere = local_part(param).untyped_storage()._cdata != section.flat.untyped_storage()._cdata
            if elsewhere or (param._version != version and not self.updates_in_place):
                names.append(piece.spec.name)
        return names

    def close(self) -> None:
        """Guard the parameters again, unless someone still uses them."""
        if not self.in_use:
            guard(self.params)
            self._versions = []
