"""One section's gradients in this step: which have arrived, and what holds them while backward makes them.

`GradSection` is a value that the rest of this folder shares: `Gradients` enters what arrives and ends it. On one rank a
GPU's gradients are in `FreshGrads` until the section is complete, and leave in few copies. Ranks reduce a section's
gradients whole, on the compute device, with zeros where there are none. `HostPartial` copies each gradient as it comes.
`DevicePartial` holds them until the section is complete, and copies them together. Launches cost the host more than
memory. `StagedPartial` is for experts, whose gradients are never whole on a GPU. The calls of a partial sum: `begin`
before a section's first gradient; `put` for each. `add_local` adds sums of earlier backwards, and `fill` writes zeros
when no more come. `pieces` gives the sum to the reduction; `drop` when the sum is at rest.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from zero_offload.base.errors import ZeroOffloadError
from zero_offload.base.types import MIB, Tier
from zero_offload.hardware.device import Device, aliased
from zero_offload.hardware.native import GradSum
from zero_offload.plan.layout import SHARD_NUMEL, SectionLayout
from zero_offload.runtime.units.unit import Section, Unit
from zero_offload.standins.sliced_grad import SlicedGrad
from zero_offload.standins.sources import GradLife
from zero_offload.storage.memory.arena import Arena, MovableBuffer
from zero_offload.storage.shards.drive_grads import AttachBuffer
from zero_offload.storage.shards.grad_downloads import ComingSum, GradDownloads, StagedGrad, neighbours
from zero_offload.storage.shards.grad_store import Gathered, GradStore, Product

BUCKET_BYTES = 1 * MIB
"""Smaller sections share a collective: its start would take longer than its transfer."""


class Factor(NamedTuple):
    """A factor of gradients, in a device's memory until a step reads it."""

    value: torch.Tensor
    """() fp64, of our own."""
    stream: Any
    """The one on which it was made."""
    given: torch.Tensor
    """The program's tensor that it was taken from."""
    version: object
    """The tensor's then."""
    divides: bool
    """True if it is a divisor."""


class Given(NamedTuple):
    """A tensor that the program has assigned to `.grad`, which is a copy of it here."""

    counter: torch.Tensor
    """It counts the changes of that tensor and of its views, and has no memory."""
    version: int
    storage: StorageWeakRef | None
    """The memory, for what has some."""
    begin: int = 0
    end: int = 0
    """Addresses."""

    @classmethod
    def of(cls, grad: torch.Tensor) -> Given:
        if type(grad) not in (torch.Tensor, nn.Parameter) or grad.layout is not torch.strided:
            return cls(grad, grad._version, None)
        with torch.no_grad():
            counter = grad.detach()
            counter.data = grad.new_empty(0)  # of the same device: torch refuses others
        begin, last = (
            grad.data_ptr(),
            sum((n - 1) * stride for n, stride in zip(grad.shape, grad.stride(), strict=True)),
        )
        storage = StorageWeakRef(grad.untyped_storage())
        return cls(counter, counter._version, storage, begin, begin + (last + 1) * grad.itemsize)

    def overlaps(self, other: Given) -> bool:
        """True if both have some memory in common."""
        if self.storage is None or self.storage != other.storage or self.storage.expired():
            return False
        return self.begin < other.end and other.begin < self.end


class Exposed(NamedTuple):
    """A gradient that the program has as an ordinary tensor, over the memory where it rests. That memory has the
    gradient as the program sees it: factors are multiplied there at once."""

    grad: torch.Tensor
    """Of the parameter's shape. Its storage is the program's own, or has no other gradient."""
    address: int


class GradState(Enum):
    """Where a section's gradients are on their way from a backward to a step."""

    EMPTY = "empty"  # there are none
    ARRIVING = "arriving"  # a backward delivers them
    WAITING = "waiting"  # sums of earlier backwards: a later one reduces them, or updates with them
    REDUCING = "reducing"  # ranks add theirs up
    HELD = "held"  # all that the backward delivers is here or on its way to its place; `land` waits for that
    TAKEN = "taken"  # a step has them


GRAD_TRANSITIONS: dict[GradState, frozenset[GradState]] = {
    GradState.EMPTY: frozenset({GradState.ARRIVING, GradState.WAITING, GradState.REDUCING, GradState.HELD}),
    GradState.ARRIVING: frozenset({GradState.EMPTY, GradState.WAITING, GradState.REDUCING, GradState.HELD}),
    GradState.WAITING: frozenset({GradState.EMPTY, GradState.ARRIVING, GradState.REDUCING, GradState.TAKEN}),
    GradState.REDUCING: frozenset({GradState.EMPTY, GradState.ARRIVING, GradState.HELD}),
    GradState.HELD: frozenset(GradState) - {GradState.HELD},
    GradState.TAKEN: frozenset(GradState) - {GradState.TAKEN},
}


@dataclass
class GradSection:
    """One section's gradients in this step.

    `state` says where they are. A parameter's gradient may be in three places at once, which add up: the sets say for
    which parameters there is something.
    """

    unit: Unit
    section: Section
    store: GradStore
    """Where they rest; several ranks: this rank's part of their sum."""
    local: GradStore | None
    """Several ranks: this rank's own sums of backwards that were not reduced, over the whole section."""
    fresh: FreshGrads | None
    """On a GPU: what has arrived for the store and has not left; several ranks: for `local`."""
    partial: HostPartial | DevicePartial | StagedPartial
    """Several ranks: this backward's sum on this rank alone."""
    params: list[nn.Parameter] = field(default_factory=list)
    state: GradState = GradState.EMPTY
    waiting: set[int] = field(default_factory=set)
    """Parameters with a gradient in `local`."""
    aside: bool = False
    """True if this backward has left sums in `local`, on one rank at least."""
    joined: set[int] | None = None
    """Those of `waiting` that this backward's reduction took along, while other ranks do not know of them yet. None
    where it has reduced nothing of the section beside such.
    """
    reduced: set[int] = field(default_factory=set)
    """Several ranks: parameters with a gradient in `store`."""
    arrived: set[int] = field(default_factory=set)
    """Parameters that this backward has delivered."""
    num_expected: int = 0
    """How many it will deliver at most."""
    holding: set[int] = field(default_factory=set)
    """Parameters with a gradient that no step has consumed."""
    taken: set[int] = field(default_factory=set)
    """Parameters whose gradient a step has used, and the program has not dropped since: in torch they still have it."""
    exposed: dict[int, Exposed] = field(default_factory=dict)
    """By the parameter's index, gradients that the user has in hand, and may have changed."""
    kept: dict[int, Callable[[], torch.Tensor | None]] = field(default_factory=dict)
    """Exposed gradients that a step has used: while the program has them or, until the next backward, views of them."""
    given: dict[int, Given] = field(default_factory=dict)
    """Tensors that the program has assigned, and of which copies are held."""
    lives: dict[int, weakref.ref[GradLife]] = field(default_factory=dict)
    """Of parameters whose gradient the program has had a handle of, an object that goes with the last of them."""
    factors: dict[int, list[Factor]] = field(default_factory=dict)
    """Factors of gradients held beside those of the store, not read yet."""

    def __post_init__(self) -> None:
        self.layout: SectionLayout = self.section.layout
        self.unreduced: FreshGrads | GradStore = self.fresh or self.local or self.store
        """Takes gradients that are not reduced as they arrive. On a GPU they go by way of `fresh`. Else they go at once
        to `local`, where a sum over ranks follows later, or to `store`.
        """

    # Their way

    def move_to(self, to: GradState) -> None:
        """Change the state. Raises AssertionError for a move that `GRAD_TRANSITIONS` does not have."""
        if to is not self.state:
            assert to in GRAD_TRANSITIONS[self.state], f"{self.unit.name}: {self.state.value} gradients are {to.value}"
            self.state = to

    def begin_backward(self) -> None:
        """Turn held gradients into those of earlier backwards."""
        if self.state is GradState.HELD:
            self.move_to(GradState.WAITING if self.holding else GradState.EMPTY)

    def begin(self) -> None:
        """The first gradient of a backward or micro-batch comes."""
        if self.kept or self.exposed:
            self.kept.clear()
            self.follow_exposed()
        self.num_expected = sum([each.requires_grad for each in self.params])
        self.move_to(GradState.ARRIVING)

    def join_waiting(self) -> None:
        """Note that the sums that waited in `local` are now in the partial sum."""
        self.arrived |= self.waiting
        self.waiting.clear()
        self.aside = False
        self.move_to(GradState.ARRIVING)

    def set_aside(self) -> None:
        """Note that the gradients that have arrived are now in `local`, where they wait for the rest."""
        self.aside = True
        self.waiting |= self.arrived
        self.arrived.clear()
        self.joined = None  # what had joined this sum waits again with the rest
        self.move_to(GradState.WAITING)

    def end_micro_batch(self) -> None:
        """All of one micro-batch has arrived, and others add to it where it lies."""
        self.arrived.clear()

    def complete(self, *, defers: bool) -> None:
        """All that this backward delivers has arrived, for this rank alone. It `defers` what follows to another one."""
        self.arrived.clear()
        if self.state is GradState.ARRIVING:
            self.move_to(GradState.WAITING if defers or self.waiting or self.aside else GradState.HELD)

    def reduce(self) -> None:
        """The partial sum is on its way to the other ranks."""
        self.arrived.clear()
        self.move_to(GradState.REDUCING)

    def reduced_all(self, indices: Iterable[int]) -> None:
        """The sum over ranks of these parameters is where it rests; ranks know of which, unless some `joined`."""
        self.reduced.update(indices)
        if self.joined is None:
            self.move_to(GradState.HELD)

    def agree(self) -> None:
        """All ranks know of which parameters some rank has a gradient."""
        self.joined = None
        self.move_to(GradState.HELD)

    def hold(self, index: int) -> None:
        """The program gives a parameter's gradient, which is where it rests."""
        self.holding.add(index)
        if self.local is not None:
            self.reduced.add(index)
        if self.state is not GradState.WAITING:
            self.move_to(GradState.HELD)

    def reset(self) -> None:
        """A backward broke off."""
        self.arrived.clear()
        self.aside, self.joined = False, None
        self.move_to(GradState.EMPTY)

    def remove(self, indices: Collection[int], to: GradState) -> set[int]:
        """Hold these parameters' gradients no longer; those that were held. The last one leaves the section in `to`."""
        for index in indices if self.lives else ():
            self.lives.pop(index, None)
        gone = self.holding.intersection(indices)
        if to is GradState.TAKEN:
            self.taken |= gone
        elif self.taken:
            self.taken.difference_update(indices)
            for index in indices if self.kept else ():
                self.kept.pop(index, None)
        for each in (self.holding, self.waiting, self.reduced):
            each -= gone
        assert self.exposed.keys().isdisjoint(gone)
        for index in indices if self.given else ():
            self.given.pop(index, None)
        for index in gone if self.factors else ():
            self.factors.pop(index, None)
        if gone and not self.holding and self.state in (GradState.HELD, GradState.WAITING):
            self.move_to(to)
        return gone

    def living(self, index: int) -> GradLife | None:
        """The life of a gradient of which the program has a handle."""
        return self.lives[index]() if index in self.lives else None

    def live(self, index: int) -> GradLife:
        """The same, or a new one."""
        if (life := self.living(index)) is None:
            life = GradLife()
            self.lives[index] = weakref.ref(life)
        return life

    def expose(self, index: int) -> torch.Tensor:
        """A gradient as an ordinary tensor, the same one until it ends."""
        self.follow_exposed()
        place = self.store.view(index, multiplied=True)
        if index not in self.exposed:
            # Of a view of our own: what is kept is found by the count of tensors in a storage.
            shown = aliased(place.view(self.layout.params[index].spec.shape))
            self.exposed[index] = Exposed(shown, place.data_ptr())
            self.store.shown.add(index)
        return self.exposed[index].grad

    def adopt(self, index: int, grad: torch.Tensor) -> None:
        """A tensor of the program is the gradient, and exposed: contiguous, of the store's device and dtype."""
        self.store.adopt(index, grad.detach().view(-1))
        self.exposed[index] = Exposed(grad, grad.data_ptr())
        self.store.shown.add(index)

    def can_adopt(self, grad: torch.Tensor) -> bool:
        """True if the tensor may be a gradient where it is, now or when the store is widened to its dtype."""
        is_plain = type(grad) is torch.Tensor and grad.layout is torch.strided and not grad.is_inference()
        dtypes = (self.store.dtype, torch.float32)
        is_held = is_plain and grad.dtype in dtypes and grad.device == self.store.device
        return is_held and grad.is_contiguous() and not grad.is_neg()

    def follow_exposed(self) -> None:
        """Tensors that the program has put in the place of exposed gradients (`.data =`) are the gradients from now on.
        An exposed gradient whose sum has moved, since it is wider, follows it. Raises where a view of it cannot.
        """
        left_behind = list[str]()
        for index, (grad, address) in list(self.exposed.items()):
            if grad.data_ptr() != address:
                loss_scale = self.store.factors.get(index, 1.0)
                self.store.leave(index, keeps=False)
                if grad.dtype != self.store.dtype and self.can_adopt(grad):
                    self.store.widen()
                self.adopt(index, grad) if self.can_adopt(grad) else self.store.write(index, grad.reshape(-1))
                if loss_scale != 1.0:
                    self.store.factors[index] = loss_scale  # which the step divides out
        for index, (grad, _) in self.exposed.items():
            place = self.store.view(index)
            if grad.data_ptr() != place.data_ptr():
                if is_viewed(grad):
                    left_behind.append(self.layout.params[index].spec.name)
                grad.data = aliased(place.view(grad.shape))
                self.exposed[index] = Exposed(grad, place.data_ptr())
        if left_behind:
            raise ZeroOffloadError(
                f"the gradient of {left_behind[0]} became a sum in fp32, in other memory. The program has a view "
                "of it from before, which would show other values. Drop views of .grad before the next backward or "
                "assignment, or keep copies (.clone())"
            )

    def end_exposed(self, indices: Iterable[int], *, keeps: bool) -> None:
        """Gradients are about to end, and may be in the program's hands: then their memory is the program's. `keeps`:
        a step takes the values, which the program may change meanwhile."""
        for index in self.exposed.keys() & set(indices):
            shown: Callable[[], torch.Tensor | None] = weakref.ref(self.exposed[index].grad)
            if is_viewed(self.exposed[index].grad, self.store.view(index)):
                shown = partial(_itself, self.exposed[index].grad)
            del self.exposed[index]
            self.store.shown.discard(index)
            if shown() is None:
                continue
            self.store.leave(index, keeps=keeps)
            if keeps:
                self.kept[index] = shown

    # Factors

    def counts(self, indices: Sequence[int]) -> list[float]:
        """How many times each of these gradients counts, by its factors that have been read."""
        factors = self.store.factors
        return [factors.get(index, 1.0) for index in indices]

    def multiply(self, indices: Sequence[int], factor: float, *, divides: bool = False) -> None:
        """Let these gradients count `factor` times, or be divided by it."""
        factors = self.store.factors
        for index in indices:
            if index in self.exposed:
                place = self.store.view(index)
                place.div_(factor) if divides else place.mul_(factor)
                continue
            before = factors.get(index, 1.0)
            is_first = before == 1.0 and not divides
            factors[index] = factor if is_first else Product.of(before, factor, divides=divides)

    def land(self) -> None:
        """Return when all that has arrived is where it rests."""
        if self.fresh is not None:
            self.fresh.land()

    def sums(self, indices: Iterable[int]) -> list[GradSum]:
        """The sums of squares of these gradients. Those that a GPU has made have been read (`DeviceSums.read`)."""
        found = [self.store.sums[index] for index in indices]
        read = [each for each in found if not isinstance(each, ComingSum)]
        assert len(read) == len(found)
        return read

    @property
    def device_bytes(self) -> int:
        """Bytes of the compute device's own memory, under gradients at rest."""
        return self.store.device_bytes + (0 if self.local is None else self.local.device_bytes)


class Fresh(NamedTuple):
    """A gradient that backward has made on a GPU, and that has not left with its section."""

    grad: torch.Tensor
    stream: Any
    """The one on which it is valid."""
    adds: bool = False
    """True if it adds to what the step holds."""
    is_sum: bool = False
    """True if it is a sum in fp32, in memory of its own."""


class FreshGrads:
    """The way of one section's gradients from a GPU's backward to their store, which takes them together.

    A parameter that gets a second gradient before its section leaves has their sum, in fp32.
    """

    def __init__(self, store: GradStore, device: Device, downloads: GradDownloads) -> None:
        self._store = store
        self._device = device
        self._downloads = downloads
        self._fresh: dict[int, Fresh] = {}
        self._sliced: dict[int, StagedGrad] = {}
        """Gradients that have left already, for their places in staging."""
        self._sliced_adds = set[int]()
        """Those of them that add to what the step holds."""
        self._more_come = False
        """True if the store has slices, and does not know yet that the section is complete."""

    def add(self, index: int, grad: torch.Tensor, *, adds: bool) -> None:
        """Hold a parameter's gradient: it `adds` to the one at rest, or is the first."""
        staged = grad.take_staged() if isinstance(grad, SlicedGrad) else None
        self.free_slices(index)
        if staged is not None and index in self._fresh:
            self._add_to_store(more=True)
        if staged is not None:
            self._sliced[index] = staged
            self._sliced_adds.update([index] * adds)
            return
        if isinstance(grad, SlicedGrad):
            grad = grad.whole()
        stream, before = self._device.stream(), self._fresh.get(index)
        if before is not None and before.adds:
            self._add_to_store()  # its store adds one gradient after the other
            before = None
        if before is None:
            self._fresh[index] = Fresh(grad, stream, adds)
            return
        use(self._device, [before])
        wide = before.grad.to(torch.float32, copy=not before.is_sum).add_(grad)
        self._fresh[index] = Fresh(wide, stream, is_sum=True)

    def free_slices(self, index: int) -> None:
        """A further gradient of this parameter comes, and may need the staging of the one before."""
        if index in self._sliced:
            self._add_to_store(more=True)

    def complete(self) -> None:
        """The section is complete: what has arrived goes to rest."""
        self._add_to_store()
        self._downloads.advance()

    def land(self) -> None:
        """Return when all that has arrived is where it rests."""
        self._add_to_store()
        self._downloads.land(self._store.layout.index)

    def drop(self) -> None:
        """Drop the gradients that have arrived."""
        self._fresh.clear()
        self._sliced.clear()
        self._sliced_adds.clear()
        self._more_come = False

    def _add_to_store(self, *, more: bool = False) -> None:
        fresh, self._fresh = self._fresh, {}
        for indices in neighbours(fresh):
            self._store.add_shard(self._gathered({index: fresh.pop(index) for index in indices}))
        if self._sliced or (self._more_come and not more):
            self._store.add_slices(self._sliced, self._sliced_adds, more=more)
            self._sliced, self._sliced_adds, self._more_come = {}, set(), more

    def _gathered(self, fresh: Mapping[int, Fresh]) -> Gathered:
        """Gradients of neighbours, in the widest of their dtypes and the section's."""
        use(self._device, fresh.values())
        store, layout = self._store, self._store.layout
        dtypes = (store.dtype if store.on_device else layout.dtype, *(each.grad.dtype for each in fresh.values()))
        dtype = functools.reduce(torch.promote_types, dtypes)
        pieces = {index: layout.params[index] for index in fresh}
        origin = next(iter(pieces.values())).begin
        parts = {index: slice(piece.begin - origin, piece.end - origin) for index, piece in pieces.items()}
        numel = max(part.stop for part in parts.values())
        adds = frozenset(index for index, each in fresh.items() if each.adds)
        if not store.on_device:
            self._downloads.make_room(numel * dtype.itemsize)
        first, *more = fresh.values()
        if more:
            flat = side_by_side({index: each.grad for index, each in fresh.items()}, parts, numel).to(dtype)
        elif store.on_device and not adds:
            flat = own(first.grad, dtype)
        else:
            flat = first.grad.reshape(-1).to(dtype)
        return Gathered(flat, origin, parts, adds)


def is_small(numel: int) -> bool:
    """True if a section of so many elements shares its reduction with others."""
    return numel * 4 < BUCKET_BYTES


class HostPartial:
    """A section's sum in host memory: in the section's dtype, as backward makes it, and fp32 once it is added up.

    Large sections have pages only while they are filled and reduced.
    """

    def __init__(self, layout: SectionLayout, arena: Arena, attach: AttachBuffer) -> None:
        self._layout = layout
        self._arena = arena
        self._attach = attach
        self._pages: MovableBuffer | None = None
        self.takes_pages = not is_small(layout.numel)
        """True if as many at once may be open as the plan counts."""
        self.has_begun = False
        """True from this backward's first gradient until the sum over ranks is at rest."""
        self.sum: torch.Tensor | None = None
        """(numel,), on this rank alone."""

    def begin(self) -> None:
        """Gradients are gathered from now on. Raises CapacityError."""
        numel, dtype = self._layout.numel, self._layout.dtype
        if self.takes_pages:
            self._pages = self._pages or MovableBuffer(self._arena, numel * 4, claims=True)
            self._attach(self._pages)
            self.sum = self._pages.region.tensor(dtype, numel)
        else:
            self.sum = torch.empty(numel, dtype=dtype, device="cpu")
        self.has_begun = True

    def here(self) -> torch.Tensor:
        """The sum, (numel,), for what is launched from now on: gradients may be made on several streams."""
        assert self.sum is not None
        return self.sum

    def put(self, index: int, grad: torch.Tensor, *, again: bool) -> None:
        """A parameter's gradient has arrived, or one more of them in the same backward."""
        partial, piece = self.here(), self._layout.params[index]
        wide = self.widen() if again or grad.dtype != partial.dtype else partial
        place = wide[piece.begin : piece.end]
        place.add_(grad.reshape(-1)) if again else place.copy_(grad.reshape(-1))

    def add_local(self, local: GradStore, waiting: Set[int], arrived: Set[int]) -> None:
        """Add the gradients of `waiting`, which are in `local`, to those that have arrived."""
        partial = self.widen()
        for index in sorted(waiting):
            piece = self._layout.params[index]
            place = partial[piece.begin : piece.end]
            place.add_(local.view(index)) if index in arrived else place.copy_(local.view(index))

    def fill(self, arrived: Collection[int]) -> None:
        """No more come: what has no gradient takes part as zeros."""
        partial = self.here()
        for begin, end in _holes(self._layout, arrived):
            partial[begin:end].zero_()

    def pieces(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Pieces of the sum to reduce, one after the other. Each is the place where it begins in every shard, and
        (numel,), shard after shard.
        """
        yield 0, self.here()

    def widen(self) -> torch.Tensor:
        """Switch to fp32, keeping the values, which is exact."""
        partial = self.here()
        if partial.dtype == torch.float32:
            return partial
        if self._pages is None:
            self.sum = partial.float()
        else:
            narrow = partial.clone()  # both begin at the same page
            self.sum = self._pages.region.tensor(torch.float32, self._layout.numel).copy_(narrow)
        return self.sum

    @property
    def is_wide(self) -> bool:
        """True if the sum has another dtype than the section."""
        return self.here().dtype != self._layout.dtype

    def drop(self) -> None:
        """The sum is of no use any more, if there is one."""
        self.sum, self.has_begun = None, False
        if self._pages is not None and self._pages.attached:
            self._pages.detach()


class DevicePartial:
    """A section's sum in a GPU's memory: made when the section is complete, or when a parameter's second gradient
    comes.

    All is fp32, since collectives of a GPU add in the dtype that they are given. The calls are those of `HostPartial`.
    """

    takes_pages = False

    def __init__(self, layout: SectionLayout, device: Device) -> None:
        self._layout = layout
        self._device = device
        self._fresh: dict[int, Fresh] = {}
        """Gradients that are not in the sum yet."""
        self._summed: set[int] = set()
        """Parameters with a gradient in the sum; others have zeros there."""
        self._home: Any = None
        """The stream whose memory the sum is."""
        self._last: Any = None
        """The stream that used it last."""
        self.has_begun = False
        self.sum: torch.Tensor | None = None

    def begin(self) -> None:
        self.has_begun = True

    def here(self) -> torch.Tensor:
        assert self.sum is not None
        self._device.join([self._last])
        self._last = self._device.stream()
        return self.sum

    def put(self, index: int, grad: torch.Tensor, *, again: bool) -> None:
        if index in self._fresh:
            self._sum_up()  # one after the other, as in a loop over backwards
        self._fresh[index] = Fresh(grad, self._device.stream())

    def add_local(self, local: GradStore, waiting: Set[int], arrived: Set[int]) -> None:
        brought = self._brought(local)
        if self.sum is not None:
            self._sum_up()
            self._merge({index: brought[self._place(index)] for index in waiting})
            return
        if holes := [brought[begin:end] for begin, end in _holes(self._layout, waiting)]:
            torch._foreach_zero_(holes)
        self._adopt(brought, waiting)
        self._sum_up()

    def fill(self, arrived: Collection[int]) -> None:
        self._sum_up()
        if self.sum is None:
            self._adopt(torch.zeros(self._layout.numel, dtype=torch.float32, device=self._device.torch_device), ())

    def pieces(self) -> Iterator[tuple[int, torch.Tensor]]:
        yield 0, self.here()

    def widen(self) -> None:
        """It is fp32."""

    @property
    def is_wide(self) -> bool:
        return self._layout.dtype != torch.float32

    def drop(self) -> None:
        if self.sum is not None:
            self._device.join([self._last, self._device.stream()], into=self._home)
        self._fresh.clear()
        self._summed.clear()
        self._home = self._last = self.sum = None
        self.has_begun = False

    def _sum_up(self) -> None:
        """Bring what has arrived since the last call into the sum."""
        if not self._fresh:
            return
        use(self._device, self._fresh.values())
        new = {index: each.grad for index, each in self._fresh.items()}
        self._fresh.clear()
        if self.sum is not None:
            self._merge(new)
            return
        indices = set(new)
        flat = side_by_side(new, {index: self._place(index) for index in sorted(new)}, self._layout.numel)
        new.clear()  # this memory is there for the wide sum
        self._adopt(flat.float(), indices)

    def _merge(self, new: Mapping[int, torch.Tensor]) -> None:
        """Add these to the sum, or copy them to where it has zeros: one launch for all neighbours of a kind."""
        partial, summed = self.here(), self._summed
        for indices in (*neighbours(new.keys() & summed), *neighbours(new.keys() - summed)):
            first, last = self._place(indices[0]).start, self._place(indices[-1]).stop
            place, parts = partial[first:last], {index: self._place(index, first) for index in indices}
            flat = side_by_side({index: new[index] for index in indices}, parts, last - first)
            place.add_(flat) if indices[0] in summed else place.copy_(flat)
        summed |= new.keys()

    def _brought(self, local: GradStore) -> torch.Tensor:
        """The values in `local`, (numel,) fp32, on the device; between gradients they are undefined."""
        flat = torch.empty(self._layout.numel, dtype=local.dtype, device=self._device.torch_device)
        pieces, waits = local.chunks(range(len(local.layout.chunks())))
        for wait in waits:
            wait()
        for begin, end, held in pieces:
            if local.tier is Tier.NVME or local.on_device:
                flat[begin:end].copy_(held)  # pages that come and go are not pinned: no asynchronous copy
            else:
                self._device.upload(flat[begin:end], held).take()
        return flat.float()

    def _adopt(self, flat: torch.Tensor, indices: Collection[int]) -> None:
        """`flat`, (numel,) fp32, of this thread's stream, is the sum, and has the gradients of `indices`."""
        self.sum = flat
        self._home = self._last = self._device.stream()
        self._summed.update(indices)

    def _place(self, index: int, origin: int = 0) -> slice:
        """The place of a parameter in the section, counted from element `origin`."""
        piece = self._layout.params[index]
        return slice(piece.begin - origin, piece.end - origin)


class StagedPartial:
    """A section's sum in staging, of experts' gradients that have left a GPU slice by slice. It comes back piece by
    piece to be reduced, in fp32.

    A parameter's gradient is staged in the dtype that backward has made. Once something is added to it, it is fp32. The
    host adds one after the other, as in `DevicePartial`. The calls are those of `HostPartial`.
    """

    takes_pages = False

    def __init__(self, layout: SectionLayout, device: Device, downloads: GradDownloads, piece_numel: int) -> None:
        """`piece_numel`: elements of a piece, over all shards."""
        self._layout = layout
        self._device = device
        self._downloads = downloads
        self._piece_numel = max(piece_numel // layout.num_shards // SHARD_NUMEL, 1) * SHARD_NUMEL
        """Of each shard."""
        self._sums: dict[int, StagedGrad] = {}
        """By the parameter's index."""
        self.has_begun = False

    def begin(self) -> None:
        self.has_begun = True

    def free_slices(self, index: int) -> None:
        """A further gradient of this parameter comes, and may need the staging of the one before."""
        if index in self._sums:
            self._widened(index)

    def put(self, index: int, grad: torch.Tensor, *, again: bool) -> None:
        staged = grad.take_staged() if isinstance(grad, SlicedGrad) else None
        if staged is None:  # the program has looked at it
            whole = (grad.whole() if isinstance(grad, SlicedGrad) else grad).reshape(-1)
            staged = self._take_room(whole.numel(), whole.dtype)
            self._downloads.send(staged, 0, whole)
        if index not in self._sums:
            self._sums[index] = staged
            return
        self._widened(index).add_(self._on_host(staged))
        self._downloads.stage_slices(self._layout.index, [staged], _nothing)

    def add_local(self, local: GradStore, waiting: Set[int], arrived: Set[int]) -> None:
        for index in sorted(waiting):
            held = local.view(index)
            if index in self._sums:
                self._widened(index).add_(held)
            else:
                self._sums[index] = self._take_room(held.numel(), torch.float32)
                self._on_host(self._sums[index]).copy_(held)

    def fill(self, arrived: Collection[int]) -> None:
        """Pieces have zeros where nothing is."""

    def pieces(self) -> Iterator[tuple[int, torch.Tensor]]:
        values = {index: self._downloads.read_here(staged) for index, staged in sorted(self._sums.items())}
        for begin in range(0, self._layout.shard_numel, self._piece_numel):
            yield begin, self._piece(begin, min(begin + self._piece_numel, self._layout.shard_numel), values)
        self._free()

    def _piece(self, begin: int, end: int, values: Mapping[int, torch.Tensor]) -> torch.Tensor:
        """Elements [begin, end) of each shard; they come from the host before what compute does next."""
        layout, device = self._layout, self._device.torch_device
        whole = torch.zeros((layout.num_shards, end - begin), dtype=torch.float32, device=device)
        for shard, part in enumerate(whole):
            first = shard * layout.shard_numel + begin
            for index, held in values.items():
                piece = layout.params[index]
                low, high = max(piece.begin, first), min(piece.end, first + len(part))
                if low >= high:
                    continue
                source = held[low - piece.begin : high - piece.begin]
                handoff = self._device.upload(torch.empty_like(source, device=device), source)
                self._sums[index].last = handoff
                part[low - first : high - first] = handoff.take()
        return whole.view(-1)

    def widen(self) -> None:
        """Pieces are fp32."""

    @property
    def is_wide(self) -> bool:
        return self._layout.dtype != torch.float32

    def drop(self) -> None:
        self._free()
        self.has_begun = False

    def _free(self) -> None:
        """Give staging back when no copy uses it any more."""
        if self._sums:
            self._downloads.stage_slices(self._layout.index, [*self._sums.values()], _nothing)
            self._sums.clear()

    def _take_room(self, numel: int, dtype: torch.dtype) -> StagedGrad:
        staged = self._downloads.open((1, numel), dtype)
        staged.taken = True
        staged.missing.clear()  # all of it is written
        return staged

    def _widened(self, index: int) -> torch.Tensor:
        """A parameter's sum on the host, (numel,) fp32."""
        before = self._sums[index]
        if before.values.dtype != torch.float32:
            self._sums[index] = self._take_room(before.values.numel(), torch.float32)
            self._on_host(self._sums[index]).copy_(self._on_host(before))
            self._downloads.stage_slices(self._layout.index, [before], _nothing)
        return self._on_host(self._sums[index])

    def _on_host(self, staged: StagedGrad) -> torch.Tensor:
        values = self._downloads.read_here(staged)
        if staged.last is not None:
            staged.last.take_on_host()
        return values


def _nothing() -> None:
    """The landing of staging that is only given back."""


def _holes(layout: SectionLayout, present: Collection[int]) -> Iterator[tuple[int, int]]:
    """Elements [begin, end) of a section that are of none of these parameters."""
    pieces = [layout.params[index] for index in sorted(present)]
    begins: Iterable[int] = [0, *(piece.end for piece in pieces)]
    ends: Iterable[int] = [*(piece.begin for piece in pieces), layout.numel]
    return ((begin, end) for begin, end in zip(begins, ends, strict=True) if begin < end)


def use(device: Device, fresh: Iterable[Fresh]) -> None:
    """This thread's stream computes with these."""
    here = device.stream()
    for each in fresh:
        if each.stream != here:
            device.join([each.stream])
            device.use_here(each.grad)


def side_by_side(grads: Mapping[int, torch.Tensor], parts: Mapping[int, slice], numel: int) -> torch.Tensor:
    """One tensor, (numel,), in the widest of the gradients' dtypes: each lies at its part, with zeros between them.

    `parts` are in order. This is one launch, and one for the zeros. On a GPU a copy of each gradient by itself would
    cost the host more than the bytes cost the device.
    """
    found, gaps, at = list[torch.Tensor | int](), [0], 0
    for index, part in [*parts.items(), (-1, slice(numel, numel))]:
        if at < part.start:
            gaps.append(part.start - at)
            found.append(gaps[-1])
        if index >= 0:
            found.append(grads[index].reshape(-1))
        at = part.stop
    narrowest = min(grads.values(), key=lambda grad: grad.dtype.itemsize)
    zeros = narrowest.new_zeros(max(gaps)) if max(gaps) else narrowest
    return torch.cat([zeros[:each] if isinstance(each, int) else each for each in found])


def own(grad: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A gradient that autograd has made, (numel,) `dtype`: itself if nothing else is in its memory, else a copy."""
    alone = grad.nbytes == grad.untyped_storage().nbytes() and not _is_shared(grad)
    return grad.detach().reshape(-1).to(dtype, copy=not alone)


def _itself(grad: torch.Tensor) -> torch.Tensor:
    return grad


def is_viewed(grad: torch.Tensor, ours: torch.Tensor | None = None) -> bool:
    """True if there are views of an exposed gradient, or a graph has it. `ours` is a view of our own, maybe of it."""
    storage = grad.untyped_storage()
    num_ours = 2 + (ours is not None and ours.untyped_storage()._cdata == storage._cdata)
    handle: Any = grad
    return handle._use_count() > 1 or torch._C._storage_Use_Count(storage._cdata) > num_ours


def _is_shared(grad: torch.Tensor) -> bool:
    """True if another tensor is in its memory."""
    storage = grad.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) > 2  # the gradient and `storage`
