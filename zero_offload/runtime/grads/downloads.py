"""Gradients on their way from a GPU to the host: beside backward, straight to where they rest, or into pinned staging
where the host has something to do with them.

The calls: `make_room` before gradients are gathered, then `place` or `stage`; `advance` at each sign of
backward; `land` where a section is wanted; `drain` where all are; or `drop`.

What is being read on the GPU is kept here, as much at a time as most sections have (`plan.memory.leaving_bytes`):
compute waits until the oldest has left before it gathers the next, and its memory goes back in the order of compute. So
the host waits for nothing, however far it is ahead, and gradients never fill the GPU. Staging has room for the
`STAGED_SECTIONS` largest sections, as the plan counts them, and for a larger one when it comes; the host waits where it
is full.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from zero_offload.device import Device, Event, Handoff
from zero_offload.memory.arena import Arena, Region
from zero_offload.memory.pool import SpanPool
from zero_offload.plan.memory import STAGED_SECTIONS, leaving_bytes
from zero_offload.runtime.grads.sections import SectionGrads
from zero_offload.shards.grad_shard import GradShard


class Gathered(NamedTuple):
    """Gradients of one section in one tensor, as they lie in its shard."""

    flat: torch.Tensor
    """(numel,), with zeros between gradients."""
    begin: int
    """Where it begins in the shard."""
    parts: Mapping[int, slice]
    """Of `flat`, by the parameter's index."""
    adds: frozenset[int]
    """Parameters whose gradients add to those that the step holds."""


class _Leaving(NamedTuple):
    """What a lane reads."""

    flat: torch.Tensor
    home: Any
    """The stream whose memory it is."""
    read: Event


class _Staged(NamedTuple):
    """A download into staging."""

    grads: SectionGrads
    shard: GradShard
    gathered: Gathered
    region: Region
    handoff: Handoff


Land = Callable[[SectionGrads, GradShard, Gathered, torch.Tensor], None]
"""land(grads, the one of its shards where they rest, what was gathered, the same on the host)."""


class GradDownloads:
    """Of one model."""

    def __init__(self, device: Device, arena: Arena, room: Sequence[int], land: Land) -> None:
        """`room`: bytes of staging that each section takes."""
        self._device = device
        self._arena = arena
        # Weak: the keeper, which lands the gradients, holds this object; a cycle would outlive a dropped model.
        self._land = weakref.WeakMethod(land)
        self._leaving: deque[_Leaving] = deque()
        self._staged: deque[_Staged] = deque()
        self.resize(room)

    def resize(self, room: Sequence[int]) -> None:
        """Sections take so many bytes of staging from now on."""
        self.drain()
        self._pool = SpanPool(self._arena, sum(sorted(room)[-STAGED_SECTIONS:]))
        self._leaving_max = leaving_bytes(room)

    def make_room(self, nbytes: int) -> None:
        """So many bytes may be gathered on the GPU."""
        while self._leaving and nbytes + sum(each.flat.nbytes for each in self._leaving) > self._leaving_max:
            oldest = self._leaving.popleft()
            oldest.read.wait()
            self._device.join([self._device.stream()], into=oldest.home)

    def place(self, shard: GradShard, gathered: Gathered, made: Event) -> None:
        """Launch the download of what is `made` then to where it rests."""
        target = shard.open()[gathered.begin : gathered.begin + gathered.flat.numel()]
        shard.arrives(self._launch(target, gathered.flat, made))

    def stage(self, grads: SectionGrads, shard: GradShard, gathered: Gathered, made: Event) -> None:
        """The same into staging."""
        flat = gathered.flat
        region = self._lease(flat.nbytes)
        handoff = self._launch(region.tensor(flat.dtype, flat.numel()), flat, made)
        # The GPU's memory is not kept until this lands.
        self._staged.append(_Staged(grads, shard, gathered._replace(flat=handoff.tensor), region, handoff))

    def advance(self) -> None:
        """Land what has arrived, and let go of what has left."""
        while self._staged and self._staged[0].handoff.ready.done():
            self._finish()
        while self._leaving and self._leaving[0].read.done():
            self._leaving.popleft()

    def land(self, grads: SectionGrads) -> None:
        """Wait for what is staged of this section, and for what was before it."""
        while any(each.grads is grads for each in self._staged):
            self._finish()

    def drain(self) -> None:
        """Wait for all that is staged."""
        while self._staged:
            self._finish()

    def drop(self) -> None:
        """What is under way is not wanted; when this returns nothing is."""
        while self._staged:
            staged = self._staged.popleft()
            staged.handoff.take_on_host()
            self._pool.release(staged.region)
        while self._leaving:
            self._leaving.popleft().read.synchronize()

    def _launch(self, target: torch.Tensor, source: torch.Tensor, made: Event) -> Handoff:
        handoff = self._device.download(target, source, after=made, keeps_source=True)
        self._leaving.append(_Leaving(source, self._device.stream(), handoff.ready))
        return handoff

    def _lease(self, nbytes: int) -> Region:
        if nbytes > self._pool.nbytes:
            self.drain()
            self._pool = SpanPool(self._arena, nbytes)
        while not self._pool.fits(nbytes):
            self._finish()
        return self._pool.lease(nbytes)

    def _finish(self) -> None:
        land, staged = self._land(), self._staged.popleft()
        assert land is not None
        land(staged.grads, staged.shard, staged.gathered, staged.handoff.take_on_host())
        self._pool.release(staged.region)
