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

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from zero_offload.hardware.device import Device, Event, Handoff
from zero_offload.plan.memory import STAGED_SECTIONS, leaving_bytes
from zero_offload.storage.memory.arena import Arena, Region
from zero_offload.storage.memory.pool import SpanPool


class _Leaving(NamedTuple):
    """What a lane reads."""

    flat: torch.Tensor
    home: Any
    """The stream whose memory it is."""
    read: Event


class _Staged(NamedTuple):
    """A download into staging."""

    section: int
    """Its index."""
    land: Callable[[torch.Tensor], None]
    region: Region
    handoff: Handoff


class GradDownloads:
    """Of one model."""

    def __init__(self, device: Device, arena: Arena, room: Sequence[int]) -> None:
        """`room`: bytes of staging that each section takes."""
        self._device = device
        self._arena = arena
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

    def place(self, target: torch.Tensor, flat: torch.Tensor, made: Event) -> Handoff:
        """Launch the download of `flat`, which is `made` then, to where it rests."""
        handoff = self._device.download(target, flat, after=made, keeps_source=True)
        self._leaving.append(_Leaving(flat, self._device.stream(), handoff.ready))
        return handoff

    def stage(self, section: int, flat: torch.Tensor, made: Event, land: Callable[[torch.Tensor], None]) -> None:
        """The same into staging; `land` gets what has arrived. It keeps nothing of the GPU's memory until then."""
        region = self._lease(flat.nbytes)
        handoff = self.place(region.tensor(flat.dtype, flat.numel()), flat, made)
        self._staged.append(_Staged(section, land, region, handoff))

    def advance(self) -> None:
        """Land what has arrived, and let go of what has left."""
        while self._staged and self._staged[0].handoff.ready.done():
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
        """What is under way is not wanted; when this returns nothing is."""
        while self._staged:
            staged = self._staged.popleft()
            staged.handoff.take_on_host()
            self._pool.release(staged.region)
        while self._leaving:
            self._leaving.popleft().read.synchronize()

    def _lease(self, nbytes: int) -> Region:
        if nbytes > self._pool.nbytes:
            self.drain()
            self._pool = SpanPool(self._arena, nbytes)
        while not self._pool.fits(nbytes):
            self._finish()
        return self._pool.lease(nbytes)

    def _finish(self) -> None:
        staged = self._staged.popleft()
        staged.land(staged.handoff.take_on_host())
        self._pool.release(staged.region)
