"""Sums of squares of gradients that a GPU adds up: launched in backward, and read when a norm or a step asks.

Owns where the sums of chunks come down to on the host, and which download was the last.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from zero_offload.base.events import Counters
from zero_offload.base.spans import Cause
from zero_offload.hardware.device import Device, Event, Handoff
from zero_offload.hardware.kernels.arguments import CHUNK
from zero_offload.hardware.kernels.grads import launch_sums, total
from zero_offload.hardware.native import GradSum
from zero_offload.storage.memory.arena import Arena


class ComingSum(NamedTuple):
    """The sum of squares of a gradient that a GPU has summed up, on its way."""

    chunks: torch.Tensor
    """(chunks,) fp64, on the host when it has arrived."""
    arrival: Handoff
    number: int
    """Of the download: those before it are over when it is."""


Sum = GradSum | ComingSum
"""Of one gradient."""


class DeviceSums:
    """Of one model."""

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
    """In order, together those between which there is no other."""
    run = list[int]()
    for index in sorted(indices):
        if run and index != run[-1] + 1:
            yield run
            run = []
        run.append(index)
    if run:
        yield run
