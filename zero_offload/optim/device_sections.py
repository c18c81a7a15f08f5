"""Sections in a GPU's memory while an optimizer of others steps them there: uploads before a step, downloads after it.

Owns the memory of these copies, which is the section's own until the host has waited for its downloads. Masters and
states that rest on the host come from there and go back. Those of a shard that is `on_device` are stepped where they
rest. Runs on the thread that launches compute. Copies of one section run beside the step of another. The calls: `load`,
which launches uploads; `take`, after which the step may be launched; `put`, which splits masters; `download`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from zero_offload.base.host import host_reserved
from zero_offload.hardware.device import Device, Event, Handoff
from zero_offload.hardware.kernels.masters import join_on_device, split_on_device
from zero_offload.optim.unitwise.state_rows import read_host_parts
from zero_offload.plan.layout import CHUNK_NUMEL
from zero_offload.storage.memory.pool import LazyRegion
from zero_offload.storage.shards.grad_store import GradPiece, GradStore
from zero_offload.storage.shards.rows import Rows, read_directory
from zero_offload.storage.shards.shard import Component, Shard
from zero_offload.storage.shards.store import ShardStore

Arrays = Mapping[Component, torch.Tensor]
_PARTS = (Component.MASTER, Component.RESIDUAL, Component.VALUE)


@dataclass
class DeviceSection:
    """A section whose arrays are on the device, or on their way to it."""

    arrays: dict[Component, torch.Tensor]
    """Where they rest, or copies of those on the host."""
    grads: list[GradPiece]
    """In the dtype of their tier until `take`, fp32 then."""
    uploads: list[Handoff]
    master: torch.Tensor | None = None
    """(shard_numel,) fp32, from `take` on."""
    copies: list[Event] = field(default_factory=list)
    """That the host waits for."""

    def take(self) -> torch.Tensor:
        """Let compute launched from now on use it; returns the masters."""
        for upload in self.uploads:
            upload.take()
        self.copies, self.uploads = [upload.ready for upload in self.uploads], []
        arrays = self.arrays
        if Component.RESIDUAL in arrays:
            self.master = torch.empty_like(arrays[Component.VALUE], dtype=torch.float32)
            join_on_device(arrays[Component.VALUE], arrays[Component.RESIDUAL], self.master)
        else:
            self.master = arrays[Component.MASTER if Component.MASTER in arrays else Component.VALUE]
        # Copies: the optimizer may change gradients, and the program may have those in hand that rest here.
        self.grads = [piece._replace(grad=piece.grad.to(torch.float32, copy=True)) for piece in self.grads]
        return self.master

    def put(self) -> None:
        """Write the stepped masters to the section's arrays, and the values that are rounded from them."""
        arrays, master = self.arrays, self.master
        assert master is not None
        if Component.RESIDUAL in arrays:
            split_on_device(master, arrays[Component.VALUE], arrays[Component.RESIDUAL])
        elif Component.MASTER in arrays and Component.VALUE in arrays:
            arrays[Component.VALUE].copy_(master)
        self.grads, self.master = [], None  # nothing is made of them while arrays are on their way back

    def wait_on_host(self) -> None:
        """Return when downloads are in host memory, and uploads are done with theirs."""
        for copy in self.copies:
            copy.synchronize()


class DeviceSections:
    """The ways of sections to the device and back."""

    def __init__(self, store: ShardStore, device: Device) -> None:
        self._store = store
        self._device = device
        self._from_disk = LazyRegion(store.arena, CHUNK_NUMEL * 4)
        """Where gradients on a drive come to host memory."""
        self._known: dict[int, tuple[weakref.ref[torch.Tensor], int, Rows]] = {}
        """Of rows that rest on the device, by section: their array, its version, and what the host has of them."""

    def load(self, shard: Shard, grads: GradStore, host: Arrays) -> DeviceSection:
        """Launch the uploads of a section; of a shard that rests there, `on_device`, those of gradients alone.

        `host` has the arrays of any other shard. Raises torch.OutOfMemoryError.
        """
        uploads = list[Handoff]()
        try:
            if shard.on_device:
                arrays = self._store.open_on_device(shard, range(len(shard.layout.chunks())))
            else:
                masters = [each for each in _PARTS if each in host]
                # An fp16 value is rounded from the master, on the host.
                wanted = masters[:1] if masters[0] is Component.MASTER else masters
                wanted += [each for each in host if each.is_rows]
                arrays = {each: self._upload(host[each], uploads) for each in wanted}
            return DeviceSection(arrays, self._grads(grads, shard, uploads), uploads)
        except torch.OutOfMemoryError:
            for upload in uploads:  # their memory goes, and serves others
                upload.ready.synchronize()
            raise

    def download(self, section: DeviceSection, host: Arrays, rows_begin: int | None) -> None:
        """Launch the downloads of a section that was stepped, to the arrays that it came from. Of rows those from the
        byte `rows_begin` on, behind the directory; None: of no rows."""
        for component, array in section.arrays.items():
            begin = rows_begin if component.is_rows else 0
            if begin is not None:
                section.copies.append(self._device.download(host[component][begin:], array[begin:]).ready)

    def rows_at_rest(self, shard: Shard, arrays: Arrays) -> Rows | None:
        """Rows that rest on the device, as the host has them: the directory, heads, and tensors of the host."""
        component, index = shard.rows, shard.layout.index
        if component is None:
            return None
        array = shard.memory[component]
        known = self._known.get(index)
        if known is not None and known[0]() is array and known[1] == array._version:
            return known[2]
        memory, nbytes = arrays[component], array.numel()
        rows = Rows(host_reserved([nbytes], torch.uint8), read_directory(_reader(memory), nbytes, f"section {index}"))
        for key, row in rows.directory.items():
            read_host_parts(_reader(memory[row.begin : row.begin + row.nbytes]), row.nbytes, rows[key])
        self._known[index] = weakref.ref(array), array._version, rows
        return rows

    def write_rows(self, shard: Shard, rows: Rows, parts: list[tuple[int, torch.Tensor]]) -> None:
        """Write what the host has of rows at rest on the device: bytes at these places, as far as they have changed."""
        component = shard.rows
        assert component is not None
        array = shard.memory[component]
        for begin, part in parts:
            here = rows.array[begin : begin + part.numel()]
            if not torch.equal(here, part):
                here.copy_(part)
                array[begin : begin + part.numel()].copy_(part, non_blocking=True)
        self._known[shard.layout.index] = weakref.ref(array), array._version, rows

    def _upload(self, source: torch.Tensor, uploads: list[Handoff]) -> torch.Tensor:
        target = torch.empty_like(source, device=self._device.torch_device)
        uploads.append(self._device.upload(target, source))
        return target

    def _grads(self, grads: GradStore, shard: Shard, uploads: list[Handoff]) -> list[GradPiece]:
        """Gradients of all chunks, on the device; each parameter's is in one piece."""
        count = len(shard.layout.chunks())
        if not grads.on_disk:
            pieces, waits = grads.chunks(range(count))
            for wait in waits:
                wait()
            if grads.on_device:
                return pieces
            return [piece._replace(grad=self._upload(piece.grad, uploads)) for piece in pieces]
        numel, device = shard.layout.shard_numel, self._device.torch_device
        whole = torch.empty(numel, dtype=grads.dtype, device=device)
        for row in range(count):
            begin, _ = shard.layout.elements(range(row, row + 1))
            pieces, waits = grads.chunks(range(row, row + 1), self._from_disk.region)
            for wait in waits:
                wait()
            for piece in pieces:
                upload = self._device.upload(whole[begin + piece.begin : begin + piece.end], piece.grad)
                upload.ready.synchronize()  # the next chunk comes to the same memory
                uploads.append(upload)
        return [GradPiece(0, numel, whole)]


def _reader(memory: torch.Tensor) -> Callable[[int, int], torch.Tensor]:
    """Reads bytes from one to another of a device's memory, (n,) uint8, host."""
    return lambda begin, end: memory[begin:end].cpu()
