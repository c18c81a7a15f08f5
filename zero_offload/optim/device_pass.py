"""The update of states in a device's memory, launched in the order of compute. Triton takes one launch for each
parameter. torch's operations take a hundred or more, so there small neighbours are updated together.

Owns what gradients pass through on their way up. Runs on the control thread, whose stream compute is launched on, so
that forward finds new values without a wait. Only gradients that rest on the host are moved. `run` returns when those
have been read, and the update is launched.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from zero_offload.base.threads import UnitUpdate
from zero_offload.base.types import StateFormat
from zero_offload.hardware.abi import STATE_BLOCK, Rule
from zero_offload.hardware.device import Device, Event, Handoff
from zero_offload.hardware.kernels.arguments import Segment, UpdateTensors, num_scales, state_dtype
from zero_offload.hardware.kernels.choice import has_device_update
from zero_offload.hardware.kernels.rules import FORMULAS, SIGNED, STATES
from zero_offload.hardware.kernels.update import update_on_device
from zero_offload.optim.pipeline import SectionUpdate, cut_segments
from zero_offload.plan.layout import ALIGN_NUMEL, CHUNK_NUMEL
from zero_offload.plan.memory import DEVICE_CHUNKS_IN_FLIGHT
from zero_offload.storage.memory.pool import LazyRegion
from zero_offload.storage.shards.grad_store import GradPiece
from zero_offload.storage.shards.shard import Component, is_packed
from zero_offload.storage.shards.store import ShardStore

Arrays = Mapping[Component, torch.Tensor]
TOGETHER_NUMEL = 1 << 20
"""Neighbours of up to so many elements are updated together, so the copy of their gradients takes 4 MiB at most."""


class _GradBuffer(NamedTuple):
    """The device's memory for a chunk of gradients, kept, and when the last of them were used."""

    memory: torch.Tensor
    used: Event | None


class DevicePass:
    """Updates sections whose shards are `on_device`."""

    def __init__(self, store: ShardStore, device: Device) -> None:
        self._store = store
        self._device = device
        self._ring: list[_GradBuffer] = []
        self._uploads: deque[Handoff] = deque()
        self._from_disk = LazyRegion(store.arena, CHUNK_NUMEL * 4)
        """Where gradients on a drive come to host memory."""

    def run(self, sections: Sequence[SectionUpdate], updates: Mapping[int, UnitUpdate]) -> None:
        """Update the sections, which are in order of first use, all sections of a unit together.

        `updates`: of each unit, by its index.
        """
        with self._store.counters.timed("update_s"):
            for unit, of_unit in itertools.groupby(sections, key=lambda section: section.unit):
                updates[unit].begin()
                for section in of_unit:
                    self._update(section)
                updates[unit].complete()
            self._store.snapshots.staging.updated()

    def _update(self, section: SectionUpdate) -> None:
        for rows in _runs(section):
            begin, end = section.shard.layout.elements(rows)
            arrays = self._store.open_on_device(section.shard, rows)
            for piece in self._gradients(section, rows):
                first, last = begin + piece.begin, begin + piece.end
                for rule, segments in section.segments.items():
                    tensors = _tensors(section, arrays, STATES[rule], piece, (begin, end))
                    found = [Segment(*row) for row in cut_segments(segments, first, first, last).tolist()]
                    if not has_device_update(piece.grad):
                        found = _joined(rule, found, piece.grad)
                    for each in found:
                        update_on_device(rule, tensors, each)
        self._wait_for_uploads(0)
        self._store.finish_update(section.shard)
        section.grads.release()

    def _gradients(self, section: SectionUpdate, rows: range) -> Iterator[GradPiece]:
        """Gradients of neighbouring chunks, on the device."""
        staging = None
        if section.grads.on_disk:
            self._wait_for_uploads(0)
            staging = self._from_disk.region
        pieces, waits = section.grads.chunks(rows, staging)
        for wait in waits:
            wait()
        if section.grads.on_device:
            yield from _together(pieces)
        else:
            for piece in pieces:
                yield from self._upload(piece)

    def _upload(self, piece: GradPiece) -> Iterator[GradPiece]:
        """Upload from host memory, beside the updates of pieces before it."""
        self._wait_for_uploads(DEVICE_CHUNKS_IN_FLIGHT - 1)
        if not self._ring:
            nbytes, device = CHUNK_NUMEL * 4, self._device.torch_device
            self._ring = [
                _GradBuffer(torch.empty(nbytes, dtype=torch.uint8, device=device), None)
                for _ in range(DEVICE_CHUNKS_IN_FLIGHT)
            ]
        landing = self._ring.pop(0)
        target = landing.memory[: piece.grad.nbytes].view(piece.grad.dtype)
        upload = self._device.upload(target, piece.grad, after=landing.used)
        self._uploads.append(upload)
        yield piece._replace(grad=upload.take())
        # Its reader is launched by now.
        self._ring.append(landing._replace(used=self._device.mark()))

    def _wait_for_uploads(self, count: int) -> None:
        """Return when no more than so many are under way: what they read may change then."""
        while len(self._uploads) > count:
            self._uploads.popleft().ready.synchronize()


def _runs(section: SectionUpdate) -> Iterator[range]:
    """Chunks that are updated together: a launch takes the host longer than a GPU needs for a chunk.

    Each by itself where gradients come up in pieces of this size, or where it has codes and scales of its own.
    """
    count = len(section.shard.layout.chunks())
    together = section.grads.on_device and section.shard.layout.state_format is not StateFormat.COMPACT
    size = max(count, 1) if together else 1
    return (range(row, min(row + size, count)) for row in range(0, count, size))


def _together(pieces: Sequence[GradPiece]) -> Iterator[GradPiece]:
    """Neighbours as one, with anything for the padding between them."""
    group: list[GradPiece] = []
    for piece in pieces:
        if group and not (
            piece.begin - group[-1].end < ALIGN_NUMEL
            and piece.end - group[0].begin <= TOGETHER_NUMEL
            and not has_device_update(piece.grad)
        ):
            yield _as_one(group)
            group = []
        group.append(piece)
    if group:
        yield _as_one(group)


def _as_one(group: Sequence[GradPiece]) -> GradPiece:
    if len(group) == 1:
        return group[0]
    padding = group[0].grad.new_empty(ALIGN_NUMEL)
    parts, end = [], group[0].begin
    for piece in group:
        parts += [padding[: piece.begin - end], piece.grad]
        end = piece.end
    return GradPiece(group[0].begin, end, torch.cat(parts))


def _joined(rule: Rule, segments: Sequence[Segment], grad: torch.Tensor) -> list[Segment]:
    """Neighbours that share their hyperparameters as one, with the padding between them. Values and states are zero in
    the padding. These rules keep them so, since the padding of `grad` becomes zero."""
    found: list[Segment] = []
    for each in segments:
        before = found[-1] if found else None
        keeps_zeros = FORMULAS[rule].keeps_zeros(each.eps)
        if (
            before is not None
            and keeps_zeros
            and each.begin - before.end < ALIGN_NUMEL
            and replace(each, begin=before.begin, end=before.end) == before
        ):
            grad[before.end : each.begin].zero_()
            found[-1] = replace(before, end=each.end)
        else:
            found.append(each)
    return found


def _tensors(
    section: SectionUpdate, arrays: Arrays, states: Sequence[str], piece: GradPiece, of: tuple[int, int]
) -> UpdateTensors:
    """The part of the arrays of chunks, of elements `of`, that has these gradients."""
    layout, part = section.shard.layout, slice(piece.begin, piece.end)
    begin, numel, format = of[0], of[1] - of[0], layout.state_format
    codes, scales = [], []
    for name in states:
        array = arrays[Component(name)]
        if not is_packed(layout, Component(name)):
            codes.append(array[part])
            continue
        # Codes, and scales behind them.
        first, last = piece.begin // STATE_BLOCK, -(-piece.end // STATE_BLOCK)
        codes.append(array[part].view(state_dtype(format, signed=name in SIGNED)))
        scales.append(array[numel : numel + 4 * num_scales(format, numel)].view(torch.float32)[first:last])
    beside = {name: arrays[name][part] for name in (Component.RESIDUAL, Component.MASTER) if name in arrays}
    return UpdateTensors(
        value=arrays[Component.VALUE][part],
        residual=beside.get(Component.RESIDUAL),
        states=tuple(codes),
        grad=piece.grad,
        master=beside.get(Component.MASTER),
        scales=tuple(scales),
        state_format=format,
        seed=layout.index,
        origin=section.origin + begin + piece.begin,
    )
