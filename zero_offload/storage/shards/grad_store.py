"""Where one section's gradients rest on this rank between backward and update, and what is known of them.

A `GradStore` is chosen for each section when the model is offloaded: `HostGrads` (here) in host memory, `DriveGrads` on
a drive, `DeviceGrads` in a GPU's memory. With overlap="backward" the first two have a part of the ring (`ring_grads`).
A store owns values, their sums of squares, and the factors by which the update multiplies them. Values are in the
compute dtype until the first addition of a second micro-batch. From then on they are in fp32, in later steps too: this
switch is exact. The calls: `add` for each gradient that backward has made in host memory (not in `DeviceGrads`).
`add_shard` takes several that lie in one tensor, `add_part` a part of those, `add_slices` those in staging. `flush`
when the section is complete. Then `lend` to an update, which takes `chunks` and calls `release`; or `drop`. Between
them `view` gives gradients where they rest, to be read or changed, and `flush` again ends that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch

from zero_offload.base.host import host_empty
from zero_offload.base.types import KIB, MIB, Tier
from zero_offload.hardware.device import Device, Event, Handoff
from zero_offload.hardware.kernels.grads import accumulate_grad, store_grad, sum_of_squares
from zero_offload.hardware.probe import kernel_threads
from zero_offload.plan.layout import SectionLayout
from zero_offload.storage.memory.arena import Need, Region
from zero_offload.storage.shards.grad_downloads import GradDownloads, StagedGrad, Sum
from zero_offload.storage.shards.store import ShardStore

LARGE_BYTES = 32 * MIB
"""From this size on malloc gives a tensor pages of its own. Keeping a gradient is then cheaper than a copy, and leaves
no hole in the heap when it goes."""

KEPT_MEAN_BYTES = 256 * KIB
"""Each gradient that is kept is an update by itself: a section of many small ones is updated faster as one."""

SUMS_ADVICE = (
    "Sums of micro-batches take 4 bytes per parameter where gradients rest, as do gradients that a program changes by "
    ".grad: zo.plan(model, config, micro_batches=2) counts them. "
    'Let gradients rest on "nvme", or on "device" where the GPU has room (grads=). Or place params= or optimizer= in '
    'part on "nvme". Or take fewer bytes with precision=zo.Precision(states="compact"), or train an adapter (LoRA). '
    "This step's gradients are dropped; generations on disk are whole"
)


class Product(float):
    """A factor that came in several steps, or as a divisor. The update multiplies by it once; a gradient in memory
    takes step by step, as torch rounds."""

    steps: tuple[tuple[float, bool], ...]
    """Numbers, and for each whether it divides."""

    @staticmethod
    def of(before: float, number: float, *, divides: bool) -> Product:
        inverse = 1.0 / number if number else math.copysign(math.inf, number)
        product = Product(before * (inverse if divides else number))
        product.steps = (*steps_of(before), (number, divides))
        return product


def steps_of(factor: float) -> tuple[tuple[float, bool], ...]:
    if isinstance(factor, Product):
        return factor.steps
    return ((factor, False),) if factor != 1.0 else ()


def multiply(values: torch.Tensor, factor: float) -> torch.Tensor:
    """Multiply in place, as torch does for a program that scales gradients."""
    for number, divides in steps_of(factor):
        values = values.div_(number) if divides else values.mul_(number)
    return values


def as_used(values: torch.Tensor, factor: float, loss_scale: float) -> torch.Tensor:
    """Gradients at rest as a step uses them, in place: times their factor, without the loss scale."""
    if loss_scale == 1.0:
        return multiply(values, factor)
    if isinstance(factor, Product):
        return multiply(values, factor).div_(loss_scale)
    return multiply(values, factor / loss_scale)


Wait = Callable[[], object]
"""Returns when gradients on their way to host memory are there."""


@dataclass
class GradMemory:
    """Parts that the gradient stores of one model share."""

    store: ShardStore
    device: Device
    shard_index: int
    downloads: GradDownloads | None
    """The way from a GPU; None where a CPU computes."""
    num_threads: int = field(default_factory=kernel_threads)
    """Threads of the kernels that write gradients: torch's setting, as it was when the last forward began."""
    keeps_small: bool = False
    """True where nothing of the model leaves memory: gradients may leave holes in the heap, for the next forward."""


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
    """Parts of `flat`, by the parameter's index."""
    adds: frozenset[int]
    """Parameters whose gradients add to those that the step holds."""


class GradStore:
    """The gradients of one shard, or of a whole section that no rank has reduced yet."""

    on_device = False
    """True if they are in the compute device's own memory."""
    comes_by_staging = False
    """True if `chunks` may have to copy gradients to staging memory."""

    @property
    def may_change(self) -> bool:
        """True if they are in host memory that nothing else sees: an update that uses them up may change them."""
        return False

    def __init__(self, memory: GradMemory, layout: SectionLayout, tier: Tier, unit: str, *, sums_up: bool) -> None:
        """`layout` says how long the array is: a section cut into one shard has it whole. `unit` is the unit's name.
        Without `sums_up` no sums of squares are kept."""
        self.layout, self.tier, self.unit, self.dtype = layout, tier, unit, layout.dtype
        index = memory.shard_index if layout.num_shards > 1 else 0
        self.parts = {i: slice(*layout.in_shard(piece, index)) for i, piece in enumerate(layout.params)}
        """Where this rank's part of each parameter is in the shard, by the parameter's index."""
        self.sums: dict[int, Sum] = {}
        """Sums of squares by the parameter's index; several ranks: of this rank's part. Some are on their way from a
        GPU until `DeviceSums.read`."""
        self.factors: dict[int, float] = {}
        """By the parameter's index, what its gradient is to be multiplied by; what has none is used as it is."""
        self.held = False
        """True if a step's gradients are inside."""
        self.shown: set[int] = set()
        """Parameters whose gradient the program has in hand where it rests: it stays there while `dtype` does."""
        self._memory = memory
        self._has_sums = sums_up
        self._adopted: dict[int, torch.Tensor] = {}
        """By the parameter's index: (numel,) `dtype`, a tensor that autograd has made, or a part of one."""
        self._lent = False
        self._made: Event | None = None

    # From backward

    def add(self, index: int, grad: torch.Tensor, *, adds: bool) -> None:
        """Take a parameter's gradient, in host memory: `adds` to the one here, or is the first.

        The store may keep `grad` itself if it fills its storage; else it copies, and autograd may reuse the memory.
        """
        raise NotImplementedError

    def add_shard(self, new: Gathered) -> None:
        """Take neighbours' gradients, (numel,) in one tensor of the compute device."""
        raise NotImplementedError

    def add_part(self, begin: int, flat: torch.Tensor, adds: frozenset[int]) -> None:
        """Take the elements from `begin` on of all gradients, (numel,) on a GPU. Parts come in order; the last one
        completes the section."""
        raise NotImplementedError

    def add_slices(self, new: Mapping[int, StagedGrad], adds: Collection[int], *, more: bool) -> None:
        """Take gradients that a GPU has sent slice by slice, by the parameter's index; those of `adds` add to what is
        here. With `more` the section is not complete: further ones come."""
        raise NotImplementedError

    def take_pages(self) -> None:
        """Take the pages of fp32 gradients, where they come and go. All ranks do, with or without gradients."""

    def complete(self) -> None:
        """All that this backward delivers is here: its writes are launched, if gradients rest elsewhere."""

    def end_view(self, changed: Collection[int] = ()) -> None:
        """The caller is done with what `view` has fetched: pages that only that needs go.

        Of what was `changed` meanwhile sums are made again. It is written first, if gradients rest elsewhere.
        """
        if changed:
            self._sum_up(changed)

    # To the update

    def lend(self, made: Event | None) -> None:
        """An update is launched that takes gradients. On a GPU they are valid at the mark `made`."""
        self._made, self._lent = made, True

    def chunks(
        self, rows: range, staging: Region | None = None, offset: int = 0
    ) -> tuple[list[GradPiece], Sequence[Wait]]:
        """The gradients of neighbouring chunks, in order, none of them twice, and what to call before they are used.

        With `staging`, at the byte `offset`, they are in host memory: one chunk, where they rest elsewhere. Without it
        they are where they rest, or in pages of their own instead of on a drive.
        """
        raise NotImplementedError

    def release(self) -> None:
        """The update has used them: what is kept here goes, unless some are still held."""
        self._lent = False
        self._let_go()

    def drop(self, indices: Iterable[int] | None = None) -> None:
        """These gradients (None: all) are consumed, or not wanted: nothing is known of them any more.

        With the last their memory goes: now, or when the update that takes it calls `release`.
        """
        if indices is not None:
            for index in indices:
                self.sums.pop(index, None)
                self.factors.pop(index, None)
            return
        self.sums.clear()
        self.factors.clear()
        self.held = False
        self._let_go()

    def drop_room(self) -> None:
        """None is held, and none will come for long: what is kept for the next ones goes."""

    def _let_go(self) -> None:
        # `held` and `_lent` are set before: memory goes with the last thread, which may drop gradients or release them.
        if not self.held and not self._lent:
            self._adopted.clear()

    # Where they rest

    @property
    def on_disk(self) -> bool:
        """True if they are on a drive alone."""
        return False

    @property
    def device_bytes(self) -> int:
        """Bytes of the compute device's own memory that they take."""
        return 0

    def view(self, index: int, *, multiplied: bool = False) -> torch.Tensor:
        """This shard's part of a parameter's gradient (one shard: all of it) where it is; `dtype`, maybe empty.

        With `multiplied` it is multiplied by its factor there, which ends, and it counts as changed.
        """
        view, factor = self._place(index), self.factors.pop(index, 1.0) if multiplied else 1.0
        return multiply(view, factor)

    def write(self, index: int, values: torch.Tensor) -> None:
        """Replace this shard's part of a parameter's gradient by `values`, (numel,) or (1,), of any device. It counts
        as changed; its factor ends. A wider dtype makes the section fp32, so that nothing is rounded."""
        if is_wider(values.dtype, self.dtype):
            self.widen()
        self.factors.pop(index, None)
        self._place(index).copy_(values)
        self.held = True

    @property
    def device(self) -> torch.device:
        """Where `view` is."""
        return self._memory.device.torch_device if self.on_device else torch.device("cpu")

    def adopt(self, index: int, flat: torch.Tensor) -> None:
        """Take a gradient of the program, (numel,) `dtype`, as it is. It counts as changed; its factor ends."""
        self.factors.pop(index, None)
        self._adopted[index] = flat
        self.held = True

    def leave(self, index: int, *, keeps: bool) -> None:
        """The memory of a parameter's gradient is the program's from now on. With `keeps` its values stay, in other
        memory."""
        before = self._adopted.pop(index)
        if keeps:
            self._adopted[index] = before.clone()

    def widen(self) -> None:
        """Switch to fp32, keeping the values, which is exact."""
        raise NotImplementedError

    def _place(self, index: int) -> torch.Tensor:
        raise NotImplementedError

    def _sum_up(self, indices: Iterable[int]) -> None:
        """Make the sums of squares of these gradients."""
        raise NotImplementedError


class HostGrads(GradStore):
    """The gradients of one shard, in host memory.

    One array has them. A large gradient that autograd has computed in host memory is kept as it is, others are copied
    to their places. Where nothing leaves memory most are kept, and what they leave in the heap serves the next forward.
    """

    def __init__(self, memory: GradMemory, layout: SectionLayout, tier: Tier, unit: str, *, sums_up: bool) -> None:
        super().__init__(memory, layout, tier, unit, sums_up=sums_up)
        self._store = memory.store
        self._array: torch.Tensor | None = None
        self._views: dict[int, torch.Tensor] = {}
        """Into the open array, by the parameter's index: making one takes longer than writing a small gradient."""
        self._left: set[int] = set()
        """Parameters whose place in the array is the program's. Their gradients are beside it, in `_adopted`."""
        self._coming: StagedGrad | None = None
        """Where parts of all gradients gather."""
        self._arriving: Handoff | None = None
        """The last download into the array: when it is over, all are. The host waits where it reads or writes."""
        self._mean_bytes = layout.nbytes // len(layout.params)

    # From backward

    def add(self, index: int, grad: torch.Tensor, *, adds: bool) -> None:
        grad = grad.contiguous()
        large = grad.nbytes >= LARGE_BYTES or (self._memory.keeps_small and self._mean_bytes >= KEPT_MEAN_BYTES)
        if adds or not large or not self._may_keep(grad):
            self._write(index, grad, adds=adds)
            return
        self._adopted[index] = grad.detach().view(-1)
        self.held = True
        if self._has_sums:
            self._sum_up([index])

    def add_shard(self, new: Gathered) -> None:
        downloads = self._memory.downloads
        if downloads is None:
            self._store_flat(new.parts, new.adds, new.flat)
            return
        if is_wider(new.flat.dtype, self.dtype) and not self.held:
            self.widen()  # nothing moves
        if new.adds or new.flat.dtype != self.dtype:
            self._stage(downloads, new)
            return
        if self._has_sums:
            views = {index: new.flat[part] for index, part in new.parts.items()}
            sums, made = downloads.sums.launch(self.layout.index, self.parts, views)
            self.sums |= sums
        else:
            made = self._memory.device.mark()
        target = self.writable_array()[new.begin : new.begin + new.flat.numel()]
        self._arriving, self.held = downloads.place(target, new.flat, made), True

    def add_part(self, begin: int, flat: torch.Tensor, adds: frozenset[int]) -> None:
        downloads, numel = self._memory.downloads, self.layout.shard_numel
        assert downloads is not None
        if begin == 0:
            self._coming = downloads.open((1, numel), flat.dtype)
        assert self._coming is not None
        downloads.send(self._coming, begin, flat)
        if begin + flat.numel() == numel:
            land = partial(self._store_flat, self.parts, adds, self._coming.flat)
            downloads.stage_slices(self.layout.index, [self._coming], land)
            self._coming = None

    def add_slices(self, new: Mapping[int, StagedGrad], adds: Collection[int], *, more: bool) -> None:
        downloads = self._memory.downloads
        assert downloads is not None
        values = {index: grad.flat for index, grad in sorted(new.items())}
        land = partial(self._store_each, values, adds, more=more)
        downloads.stage_slices(self.layout.index, [*new.values()], land)

    def _stage(self, downloads: GradDownloads, new: Gathered) -> None:
        """By way of staging: the host adds these gradients, converts them or writes them to a drive."""
        downloads.stage(
            self.layout.index, new.flat, self._memory.device.mark(), partial(self._store_flat, new.parts, new.adds)
        )

    def _store_flat(self, parts: Mapping[int, slice], adds: Container[int], flat: torch.Tensor) -> None:
        """Write gradients that lie in one tensor of the host to their places, or add them."""
        self._store_each({index: flat[part] for index, part in parts.items()}, adds)

    def _store_each(self, grads: Mapping[int, torch.Tensor], adds: Container[int], *, more: bool = False) -> None:
        for index, grad in grads.items():
            self._write(index, grad, adds=index in adds)
        if not more:
            self.complete()

    def write(self, index: int, values: torch.Tensor) -> None:
        if self._left and not self.held:
            self._detach_left_array()
        super().write(index, values)

    @property
    def may_change(self) -> bool:
        return not (self.shown or self._left)  # each gradient that autograd has accumulated has memory of its own

    def leave(self, index: int, *, keeps: bool) -> None:
        if index in self._adopted:
            super().leave(index, keeps=keeps)
            return
        if keeps:
            self._adopted[index] = self._in_array(index).clone()
        self._views.pop(index, None)
        self._left.add(index)

    def _may_keep(self, grad: torch.Tensor) -> bool:
        """True if a gradient may stay as autograd has made it."""
        return grad.nbytes == grad.untyped_storage().nbytes() and grad.dtype == self.dtype

    def _write(self, index: int, grad: torch.Tensor, *, adds: bool) -> None:
        """Write a gradient to its place, or add it to what a step would make of the one there."""
        if adds or grad.dtype.itemsize > self.dtype.itemsize:
            self.widen()
        if self._left and not self.held:
            self._detach_left_array()
        if self._adopted and not (index in self._left or (adds and index in self.shown)):
            self._adopted.pop(index, None)
        # In the first place, so that a gradient costs no call for it.
        place = self._views.get(index)
        if place is None or self._arriving is not None or self._adopted:
            place = self._place(index)
        factor, threads = self.factors.pop(index, 1.0), self._memory.num_threads
        if adds:
            assert place.dtype == torch.float32
            if factor != 1.0:
                multiply(place, factor)
            found = accumulate_grad(place.data_ptr(), grad.data_ptr(), grad.dtype, grad.numel(), num_threads=threads)
        else:
            found = store_grad(
                place.data_ptr(), place.dtype, grad.data_ptr(), grad.dtype, grad.numel(), num_threads=threads
            )
        if self._has_sums:
            self.sums[index] = found
        self.held = True

    def _detach_left_array(self) -> None:
        """Leave an array of which the user has views to those; the next gradients get another."""
        self._left.clear()
        if self._array is not None and _has_more_views(self._array, len(self._views)):
            self._drop_array()

    # The array

    def writable_array(self) -> torch.Tensor:
        """The array, (shard_numel,) `dtype`, with the gradients it holds; what a device sends is there after
        `_wait_for_arrival`."""
        if self._array is None:
            self._array = self._fetch_array()
        return self._array

    def _fetch_array(self) -> torch.Tensor:
        """An array with the gradients that are held."""
        return self._new_array(self.dtype)

    def _new_array(self, dtype: torch.dtype) -> torch.Tensor:
        """A new array of zeros, which takes the place of the array that is there."""
        replaced_bytes = 0 if self._array is None else self._array.nbytes
        return self._store.arena.array(dtype, self.layout.shard_numel, self._need(dtype), replaced_bytes=replaced_bytes)

    def _need(self, dtype: torch.dtype) -> Need:
        if is_wider(dtype, self.layout.dtype):
            return Need(f"fp32 sums of the gradients of {self.unit}", SUMS_ADVICE, is_planned=False)
        return Need(f"gradients of {self.unit}")

    def _place(self, index: int) -> torch.Tensor:
        if index in self._left and index not in self._adopted:
            part = self.parts[index]
            self._adopted[index] = host_empty(part.stop - part.start, self.dtype)
        return self._adopted[index] if index in self._adopted else self._in_array(index)

    def _in_array(self, index: int) -> torch.Tensor:
        """A gradient's place in the array, which is complete."""
        array = self.writable_array()
        self._wait_for_arrival()
        if index not in self._views:
            self._views[index] = array[self.parts[index]]
        return self._views[index]

    def widen(self) -> None:
        """As there; all are in the array then, except those that the program has in hand, or whose place it has."""
        if self.dtype != torch.float32:
            self._widen_array()
            moving = self._adopted.keys() - self._left
        else:
            moving = self._adopted.keys() - self._left - self.shown
        if moving:
            self.writable_array()  # where there is no memory for it, they stay
        for index in moving:
            self._in_array(index).copy_(self._adopted.pop(index))

    def _widen_array(self) -> None:
        """Switch to fp32. The wide array is taken before the narrow one goes: without memory for it nothing changes."""
        wide = None
        if self.held and self._array is not None:
            wide = self._new_array(torch.float32).copy_(self._complete_array())
        self._drop_array()
        self._array, self.dtype = wide, torch.float32

    def _widen_in_turn(self) -> None:
        """The same where the array's own memory goes first: it may be what the wide one gets."""
        narrow = self._complete_array().clone() if self.held else None
        self._drop_array()
        self._begin_wide()
        if narrow is not None:
            self.writable_array().copy_(narrow)
            self.held = True

    def _begin_wide(self) -> None:
        """The next array is fp32, and nothing is in it."""
        self.dtype, self.held = torch.float32, False

    def _complete_array(self) -> torch.Tensor:
        array = self.writable_array()
        self._wait_for_arrival()
        return array

    def _wait_for_arrival(self) -> None:
        """Wait until the gradients that a device sends are here."""
        if self._arriving is not None:
            self._arriving.take_on_host()
            self._arriving = None

    def drop_room(self) -> None:
        self._drop_array()

    def _drop_array(self) -> None:
        self._wait_for_arrival()
        self._array = None
        self._views.clear()
        self._left.clear()

    def _sum_up(self, indices: Iterable[int]) -> None:
        for index in indices:
            view, threads = self._place(index), self._memory.num_threads
            self.sums[index] = sum_of_squares(view.data_ptr(), view.dtype, view.numel(), num_threads=threads)

    # To the update

    def chunks(
        self, rows: range, staging: Region | None = None, offset: int = 0
    ) -> tuple[list[GradPiece], Sequence[Wait]]:
        begin, end = self.layout.elements(rows)

        def in_array(first: int, last: int) -> list[GradPiece]:
            """Where there are no elements, no array is made for them."""
            return [GradPiece(first - begin, last - begin, self.writable_array()[first:last])] if first < last else []

        found, at, arriving = list[GradPiece](), begin, self._arriving
        for index, grad in sorted(self._adopted.items()):
            piece = self.layout.params[index]
            first, last = max(piece.begin, at), min(piece.end, end)
            if first < last:
                kept = GradPiece(first - begin, last - begin, grad[first - piece.begin : last - piece.begin])
                found += [*in_array(at, first), kept]
                at = last
        return [*found, *in_array(at, end)], [] if arriving is None else [arriving.take_on_host]


def _has_more_views(array: torch.Tensor, num_views: int) -> bool:
    """True if there are views of the array beside our own."""
    storage = array.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) > num_views + 2  # with the array and `storage`


def is_wider(dtype: torch.dtype, than: torch.dtype) -> bool:
    """True for a sum, or what hooks or `Tensor.grad_dtype` have made: the section has to follow, to lose nothing."""
    return dtype.itemsize > than.itemsize
