"""Where one section's gradients rest on this rank between backward and update, and what is known of them.

`GradStore` is what backward, the norm and the update see. `HostGrads` keeps gradients in host memory, `DriveGrads` on a
drive, `DeviceGrads` in a GPU's memory; one is chosen for each section when the model is offloaded. A store owns values,
their sums of squares, and the factors by which the update multiplies them. Values are in the compute dtype while a step
has one micro-batch, and fp32 from the first addition on: this switch is exact. The calls: `add` for each gradient that
backward has made in host memory, or `add_shard` for several that lie in one tensor; `flush` when the section is
complete; then `lend` to an update, which takes `chunks` and calls `release`; or `drop`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from zero_offload.base.types import Tier
from zero_offload.hardware.device import Event, Handoff
from zero_offload.hardware.native import GradSum
from zero_offload.plan.layout import SectionLayout
from zero_offload.storage.shards.device_sums import ComingSum, Sum


class Arrival(Protocol):
    """Gradients on their way to host memory."""

    def wait(self) -> None:
        """Return when they are there."""


@dataclass(frozen=True)
class Downloads:
    """Gradients that a device sends to the host's memory."""

    handoffs: Sequence[Handoff]

    def wait(self) -> None:
        for handoff in self.handoffs:
            handoff.take_on_host()


class GradSource(NamedTuple):
    """Elements [begin, end) of chunks have their gradients at `address`, which is that of element 0 of them."""

    begin: int
    end: int
    address: int


class GradPiece(NamedTuple):
    """The gradients of elements [begin, end) of a chunk, or of several, (end - begin,)."""

    begin: int
    end: int
    grad: torch.Tensor


class Gathered(NamedTuple):
    """Gradients of one section in one tensor, as they lie in its shard."""

    flat: torch.Tensor
    """(numel,) on the compute device, with zeros between gradients."""
    begin: int
    """Where it begins in the shard."""
    parts: Mapping[int, slice]
    """Of `flat`, by the parameter's index."""
    adds: frozenset[int]
    """Parameters whose gradients add to those that the step holds."""


class GradStore:
    """The gradients of one shard, or of a whole section that no rank has reduced yet."""

    on_device = False
    """True if they are in the compute device's own memory."""
    comes_by_staging = False
    """True if `chunks` may have to bring gradients to staging memory."""

    def __init__(self, layout: SectionLayout, tier: Tier, unit: str, shard_index: int, *, sums_up: bool) -> None:
        """`layout` says how long the array is: a section cut into one shard has it whole. `unit` is the unit's name.
        Without `sums_up` no sums of squares are kept."""
        self.layout, self.tier, self.unit, self.dtype = layout, tier, unit, layout.dtype
        self.sums: dict[int, Sum] = {}
        """Sums of squares by the parameter's index; several ranks: of this rank's part. Some are on their way from a
        GPU until `DeviceSums.read`."""
        self.factors: dict[int, float] = {}
        """By the parameter's index, what its gradient is to be multiplied by; what has none is used as it is."""
        self.held = False
        """True if a step's gradients are inside; their consumer clears it."""
        self.shown = False
        """True if the user has seen gradients that are over, and may have kept them."""
        self._shard_index = shard_index if layout.num_shards > 1 else 0
        self._sums_up = sums_up
        self._adopted: dict[int, torch.Tensor] = {}
        """By the parameter's index: (numel,) `dtype`, a tensor that autograd has made, or a part of one."""
        self._lent = False
        self._made: Event | None = None

    # From backward

    def add(self, index: int, grad: torch.Tensor, *, adds: bool) -> None:
        """Take a parameter's gradient, in host memory: `adds` to the one here, or is the first.

        On return autograd may have `grad` back, unless nothing else is in its memory.
        """
        raise NotImplementedError

    def add_shard(self, new: Gathered) -> None:
        """Take neighbours' gradients, (numel,) in one tensor of the compute device."""
        raise NotImplementedError

    def flush(self) -> None:
        """The section is complete: pages that only backward needs begin to leave."""

    def land(self) -> None:
        """Return when what was added is where it rests: in host memory it is."""

    def cancel(self) -> None:
        """What is on its way is not wanted: into host memory nothing is."""

    def make_wide(self) -> None:
        """Have the pages of fp32 gradients. All ranks do, whether or not they have any."""

    def open_pages(self) -> None:
        """Have the pages of what is held. All ranks do."""

    # To the update

    def lend(self, made: Event | None) -> None:
        """An update is launched that takes gradients. On a GPU they are valid at the mark `made`."""
        self._made, self._lent = made, True

    def chunks(self, rows: range, staging: int) -> tuple[list[GradSource], Sequence[Arrival]]:
        """Where the update finds the gradients of neighbouring chunks, and what to wait for before using them; one
        chunk where they are not in the host's memory."""
        raise NotImplementedError

    def pieces(self, rows: range) -> list[GradPiece]:
        """The gradients of neighbouring chunks where they are in memory, in order, none of them twice."""
        raise NotImplementedError

    def release(self) -> None:
        """The update has used them: what is kept here goes, unless some are still held."""
        self._lent = False
        self.drop()

    def drop(self) -> None:
        """Memory that is not held goes now; what an update takes goes when it calls `release`."""
        # In this order it goes whichever thread comes last: the one that stops holding, or the one that releases.
        if not self.held and not self._lent:
            self._adopted.clear()

    # Where they rest

    @property
    def on_disk(self) -> bool:
        """True if they are on a drive alone."""
        return False

    @property
    def device_bytes(self) -> int:
        """What they take of the compute device's own memory."""
        return 0

    def view(self, index: int) -> torch.Tensor:
        """This shard's part of a parameter's gradient (one shard: all of it) where it is; `dtype`, maybe empty."""
        raise NotImplementedError

    def widen(self) -> None:
        """Switch to fp32, keeping the values, which is exact."""
        raise NotImplementedError

    def leave(self) -> None:
        """What only backward needs of the host's memory begins to leave for where it rests."""

    def settle(self) -> None:
        """What leaves is where it rests, and its pages go back."""

    def close(self, *, changed: bool = True) -> None:
        """Bring what `view` has brought back to rest; it is written only if it has `changed`."""

    def leave_ring(self) -> None:
        """Give back what was leased, unless an update reads it; gradients that are still held move to memory of their
        own. The ring asks again for what an update has used."""

    # Sums and factors

    def measure(self, indices: Iterable[int]) -> None:
        """Sum up gradients where they rest."""
        raise NotImplementedError

    def sums_of(self, indices: Iterable[int]) -> list[GradSum]:
        """The sums of squares of these gradients. Those that a GPU has made have been read (`DeviceSums.read`)."""
        found = [self.sums[index] for index in indices]
        read = [each for each in found if not isinstance(each, ComingSum)]
        assert len(read) == len(found)
        return read

    def apply_factor(self, index: int) -> torch.Tensor:
        """The gradient where it rests, multiplied there; its sum is to be made again."""
        view, factor = self.view(index), self.factors.pop(index, 1.0)
        return view if factor == 1.0 else view.mul_(factor)

    def forget(self, indices: Iterable[int]) -> None:
        """These gradients are consumed: nothing is known of them any more."""
        for index in indices:
            self.sums.pop(index, None)
            self.factors.pop(index, None)

    # Parts of the shard

    def parts(self) -> dict[int, slice]:
        """This rank's part of each parameter."""
        pieces = enumerate(self.layout.params)
        return {index: slice(*self.layout.in_shard(piece, self._shard_index)) for index, piece in pieces}


def is_wider(dtype: torch.dtype, than: torch.dtype) -> bool:
    """True for a sum, or what hooks or `Tensor.grad_dtype` have made: the section has to follow, to lose nothing."""
    return dtype.itemsize > than.itemsize
