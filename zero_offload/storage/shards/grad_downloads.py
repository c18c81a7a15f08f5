"""Gradients on their way from a GPU to the host, beside backward. They go straight to where they rest, or into pinned
staging where the host has something to do with them.

The calls: `make_room` before gradients are gathered, then `place` or `stage`. `advance` at each sign of backward;
`land` where a section is wanted; `drain` where all are; or `drop`. A gradient that is never whole on the GPU takes
staging at once (`open`), and leaves in parts (`send`). It is `stage_slices`' then, comes back whole (`upload`), or is
read from there (`read_here`).

Memory that a lane still reads on the GPU is kept here, as much at a time as most sections have
(`plan.memory.leaving_bytes`). Compute waits until the oldest has left before it gathers the next. Its memory goes back
in the order of compute. So the host waits for nothing, however far it is ahead, and gradients never fill the GPU.
Staging is as large as the plan counts it (`plan.memory.grad_staging_bytes`), and larger when a larger section comes;
the host waits where it is full.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from zero_offload.base.errors import CapacityError, ZeroOffloadError
from zero_offload.base.events import Counters
from zero_offload.base.spans import Cause
from zero_offload.hardware.device import Device, Event, Handoff
from zero_offload.hardware.kernels.arguments import CHUNK
from zero_offload.hardware.kernels.grads import launch_sums, total
from zero_offload.hardware.native import GradSum
from zero_offload.plan.memory import leaving_bytes
from zero_offload.storage.memory.arena import Arena, Need, Region
from zero_offload.storage.memory.staging import Staging

_STAGING = Need("gradients on their way from the device")


class _Leaving(NamedTuple):
    """Memory of the GPU that a lane reads."""

    flat: torch.Tensor
    home: Any
    """The stream whose memory it is."""
    read: Event


class _StagedDownload(NamedTuple):
    """Downloads into staging."""

    section: int
    """Its index."""
    land: Callable[[], object]
    leases: Sequence[Region]
    handoffs: Sequence[Handoff]


class StagedGrad:
    """Staging for one gradient, which a GPU makes and sends slice by slice."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, lease: Region) -> None:
        self.lease: Region | None = lease
        """None once the memory is given back."""
        self.values = lease.tensor(dtype, torch.Size(shape).numel()).view(tuple(shape))
        """`shape`, in host memory; slice i of the first dimension is there when its download is over."""
        self.missing = set(range(shape[0]))
        """Slices that nothing was sent to: those of the gradient are zeros."""
        self.last: Handoff | None = None
        """The last copy from or to it: when it is over, all are."""
        self.taken = False
        """True from when a section has taken it: it outlives the backward, and `upload` has no part in it."""

    @property
    def flat(self) -> torch.Tensor:
        """`values`, (numel,)."""
        return self.values.view(-1)


class GradDownloads:
    """The downloads of one model."""

    def __init__(self, device: Device, arena: Arena, counters: Counters) -> None:
        self.sums = DeviceSums(device, arena, counters)
        self._device = device
        self._staging = Staging(arena, _STAGING)
        self._leaving: deque[_Leaving] = deque()
        self._staged: deque[_StagedDownload] = deque()
        self._open = list[StagedGrad]()
        """Those that `stage_slices` was not given yet."""
        self.resize(0, ())

    def resize(self, nbytes: int, sent: Sequence[int]) -> None:
        """From now on there are `nbytes` of staging, and sections send so many bytes each at once."""
        self.drain()
        self._staging.widen(nbytes)
        self._leaving_max = leaving_bytes(sent)

    def make_room(self, nbytes: int) -> None:
        """So many bytes may be gathered on the GPU."""
        while self._leaving and nbytes + sum(each.flat.nbytes for each in self._leaving) > self._leaving_max:
            oldest = self._leaving.popleft()
            oldest.read.wait()
            self._device.join([self._device.stream()], into=oldest.home)

    def place(self, target: torch.Tensor, flat: torch.Tensor, made: Event) -> Handoff:
        """Launch the download of `flat`, which is `made` then, to where it rests."""
        handoff = self._device.download(target, flat, after=made, keeps_source=True)
        self._leaving.append(_Leaving(flat, self._device.stream(), handoff.ready))
        return handoff

    def stage(self, section: int, flat: torch.Tensor, made: Event, land: Callable[[torch.Tensor], None]) -> None:
        """Launch the download of `flat` into staging; `land` gets what has arrived, and holds no GPU memory."""
        lease = self._lease(flat.nbytes)
        target = lease.tensor(flat.dtype, flat.numel())
        handoff = self.place(target, flat, made)
        self._staged.append(_StagedDownload(section, partial(land, target), [lease], [handoff]))

    # Slice by slice

    def open(self, shape: Sequence[int], dtype: torch.dtype) -> StagedGrad:
        """Staging for a gradient that comes in slices of its first dimension."""
        nbytes = torch.Size(shape).numel() * dtype.itemsize
        self._open.append(StagedGrad(shape, dtype, self._lease(nbytes)))
        return self._open[-1]

    def send(self, grad: StagedGrad, begin: int, flat: torch.Tensor) -> None:
        """Launch the download of the elements from `begin` on, (numel,), which compute has made: one slice or more."""
        self.make_room(flat.nbytes)
        grad.last = self.place(grad.flat[begin : begin + flat.numel()], flat, self._device.mark())
        if grad.missing:
            size = max(grad.values[0].numel(), 1)
            grad.missing.difference_update(range(begin // size, (begin + flat.numel()) // size))
        self.advance()

    def read_here(self, grad: StagedGrad) -> torch.Tensor:
        """All of it, (numel,), for what compute launches from now on; and for the host once `last` is over."""
        _fill(grad)
        if grad.last is not None:
            grad.last.take()
        return grad.flat

    def stage_slices(self, section: int, grads: Sequence[StagedGrad], land: Callable[[], object]) -> None:
        """No more of these comes. `land` is called when all has arrived, and their staging is given back."""
        for grad in grads:
            _fill(grad)
        self._open = [each for each in self._open if all(each is not grad for grad in grads)]
        leases = [grad.lease for grad in grads if grad.lease is not None]
        handoffs = [grad.last for grad in grads if grad.last is not None]
        self._staged.append(_StagedDownload(section, land, leases, handoffs))

    def upload(self, grad: StagedGrad) -> torch.Tensor:
        """The gradient, whole, in memory of the device. Its staging is given back."""
        if grad.lease is None or grad.taken:
            raise ZeroOffloadError("this gradient is over: a step's gradients have taken it, or its backward has ended")
        _fill(grad)
        whole = torch.empty(grad.values.shape, dtype=grad.values.dtype, device=self._device.torch_device)
        if grad.last is not None:
            grad.last.take_on_host()
        handoff = self._device.upload(whole, grad.values)
        handoff.take_on_host()
        self._release(grad)
        return handoff.take()

    def drop_untaken(self) -> None:
        """A backward is over: what no section has taken is not wanted."""
        for grad in [each for each in self._open if not each.taken]:
            self._release(grad)

    def _release(self, grad: StagedGrad) -> None:
        if grad.last is not None:
            grad.last.take_on_host()
        self._open = [each for each in self._open if each is not grad]
        if grad.lease is not None:
            self._staging.release(grad.lease)
        grad.lease = None

    def advance(self) -> None:
        """Land what has arrived, and let go of what has left."""
        while self._staged and all(each.ready.done() for each in self._staged[0].handoffs):
            self._finish()
        while self._leaving and self._leaving[0].read.done():
            self._leaving.popleft()

    def land(self, section: int) -> None:
        """Wait for what is staged of the section with this index, and for what was before it."""
        while any(each.section == section for each in self._staged):
            self._finish()

    def drain(self) -> None:
        """Wait for all that is staged."""
        while self._staged:
            self._finish()

    def drop(self) -> None:
        """Drop all gradients and sums under way. On return memory that copies use may go."""
        while self._staged:
            self._end(self._staged.popleft(), land=False)
        while self._open:
            self._release(self._open[-1])
        while self._leaving:
            self._leaving.popleft().read.synchronize()
        self.sums.drop()

    def _lease(self, nbytes: int) -> Region:
        while self._staged and not self._staging.fits(nbytes):
            self._finish()
        return self._staging.lease(nbytes)

    def _finish(self) -> None:
        staged = self._staged.popleft()
        try:
            self._end(staged, land=True)
        except CapacityError:
            # Nothing of it has landed. It may be after backward that it lands: a step without it would be wrong.
            self._staged.appendleft(staged)
            raise

    def _end(self, staged: _StagedDownload, *, land: bool) -> None:
        for handoff in staged.handoffs:
            handoff.take_on_host()
        if land:
            staged.land()
        for lease in staged.leases:
            self._staging.release(lease)


def _fill(grad: StagedGrad) -> None:
    """Of a gradient that is complete, slices that nothing was sent to are zeros."""
    for index in grad.missing:
        grad.values[index].zero_()
    grad.missing.clear()


class ComingSum(NamedTuple):
    """The sum of squares of a gradient that a GPU has summed up, on its way."""

    chunks: torch.Tensor
    """(chunks,) fp64, on the host when it has arrived."""
    arrival: Handoff
    number: int
    """The download's number: those before it are over when it is."""


Sum = GradSum | ComingSum
"""The sum of squares of one gradient."""


class DeviceSums:
    """Sums of squares of one model's gradients that a GPU adds up: launched in backward, and read when a norm or a step
    asks.

    Owns where the sums of chunks come down to on the host, and which download was the last.
    """

    def __init__(self, device: Device, arena: Arena, counters: Counters) -> None:
        self._device = device
        self._arena = arena
        self._counters = counters
        self._places: dict[int, tuple[torch.Tensor, list[slice]]] = {}
        """Where sums of a section's chunks come down, by the section's index: (chunks,) fp64, and each gradient's."""
        self._num_launched = 0
        """Downloads of them."""
        self._last: Handoff | None = None

    def launch(
        self, section: int, parts: Mapping[int, slice], views: Mapping[int, torch.Tensor]
    ) -> tuple[dict[int, Sum], Event]:
        """Launch the sums of gradients, in order of their indices, and their download; and the mark when they are made.

        `parts` has the place in the shard of every parameter of the section with this index, `views` gradients.
        """
        chunks, part_of_chunks = launch_sums(list(views.values()))
        made, part_of = self._device.mark(), dict(zip(views, part_of_chunks, strict=True))
        host, places = self._places_of(section, parts)
        found = dict[int, Sum]()
        for run in neighbours(views):
            source = chunks[part_of[run[0]].start : part_of[run[-1]].stop]
            if not len(source):  # another rank has all of them
                found.update((index, GradSum(0.0, True)) for index in run)
                continue
            target = host[places[run[0]].start : places[run[-1]].stop]
            arrival, self._num_launched = self._device.download(target, source, after=made), self._num_launched + 1
            self._last = arrival
            found.update((index, ComingSum(host[places[index]], arrival, self._num_launched)) for index in run)
        return found, made

    def read(self, sums: Sequence[dict[int, Sum]], unit: str) -> None:
        """Put what has come in the place of what was coming; `unit` is whose are waited for."""
        coming = [(of, index, each) for of in sums for index, each in of.items() if isinstance(each, ComingSum)]
        if coming:
            last = max((each for _, _, each in coming), key=lambda each: each.number)
            with self._counters.waiting(Cause.GRADS, unit):
                last.arrival.take_on_host()
        for of, index, each in coming:
            of[index] = total(each.chunks)

    def drop(self) -> None:
        """They are not wanted; when this returns nothing is under way."""
        if self._last is not None:
            self._last.take_on_host()
            self._last = None

    def _places_of(self, section: int, parts: Mapping[int, slice]) -> tuple[torch.Tensor, list[slice]]:
        if section not in self._places:
            ends = list(itertools.accumulate(-(-(part.stop - part.start) // CHUNK) for part in parts.values()))
            places = [slice(begin, end) for begin, end in itertools.pairwise([0, *ends])]
            self._places[section] = self._arena.array(torch.float64, max(ends[-1], 1)), places
        return self._places[section]


def neighbours(indices: Iterable[int]) -> Iterator[list[int]]:
    """Runs of indices that follow one another, in order."""
    run = list[int]()
    for index in sorted(indices):
        if run and index != run[-1] + 1:
            yield run
            run = []
        run.append(index)
    if run:
        yield run
