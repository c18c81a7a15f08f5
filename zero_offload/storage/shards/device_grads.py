"""Gradients at rest in the memory of a GPU.

Owns a tensor for each parameter that has a gradient. It is a part of a tensor that has the neighbours' gradients too,
so that a section is widened, sent and used as one. None outlives the update that uses it, so forward has the memory for
activations. It has no array and no `add`: a GPU's gradients come together, are adopted, and added to where they are. An
update on the host takes a chunk by way of staging memory, beside whatever the device computes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch

from zero_offload.base.types import Tier
from zero_offload.plan.layout import SectionLayout
from zero_offload.storage.memory.arena import Region
from zero_offload.storage.shards.grad_store import Gathered, GradMemory, GradPiece, GradStore, Wait, is_wider


class DeviceGrads(GradStore):
    """The gradients of one shard, on the compute device."""

    on_device = True
    comes_by_staging = True

    def __init__(self, memory: GradMemory, layout: SectionLayout, unit: str, *, sums_up: bool) -> None:
        super().__init__(memory, layout, Tier.DEVICE, unit, sums_up=sums_up)
        assert memory.downloads is not None
        self._device_sums = memory.downloads.sums

    def add_shard(self, new: Gathered) -> None:
        if new.adds or is_wider(new.flat.dtype, self.dtype):
            self.widen()
        for index in new.adds:
            self.view(index, multiplied=True)
        flat = new.flat.to(self.dtype)
        if new.adds:
            held, more = zip(*((self._adopted[index], flat[new.parts[index]]) for index in new.adds), strict=True)
            torch._foreach_add_(list(held), list(more))
        for index, part in new.parts.items():
            if index not in new.adds:
                self._adopted[index] = flat[part]
        self.held = True
        if self._has_sums:
            self._sum_up(new.parts)

    def _sum_up(self, indices: Iterable[int]) -> None:
        if views := {index: self._adopted[index] for index in sorted(indices)}:
            self.sums |= self._device_sums.launch(self.layout.index, self.parts, views)[0]

    @property
    def device_bytes(self) -> int:
        return sum(grad.nbytes for grad in list(self._adopted.values()))

    def write(self, index: int, values: torch.Tensor) -> None:
        if index not in self._adopted:
            part = self.parts[index]
            self._adopted[index] = values.new_empty(
                part.stop - part.start, dtype=self.dtype, device=self._memory.device.torch_device
            )
        super().write(index, values)

    def _place(self, index: int) -> torch.Tensor:
        return self._adopted[index]

    def widen(self) -> None:
        for indices in self._neighbours():
            whole = _together([self._adopted[index] for index in indices])
            wide, origin = whole.float(), whole.storage_offset()
            for index in indices:
                begin = self._adopted[index].storage_offset() - origin
                self._adopted[index] = wide[begin : begin + self._adopted[index].numel()]
        self.dtype = torch.float32

    def chunks(
        self, rows: range, staging: Region | None = None, offset: int = 0
    ) -> tuple[list[GradPiece], Sequence[Wait]]:
        begin, end = self.layout.elements(rows)
        found = []
        for indices in self._neighbours():
            whole, first = _together([self._adopted[index] for index in indices]), self.parts[indices[0]].start
            inside = slice(max(begin - first, 0), max(min(first + whole.numel(), end) - first, 0))
            if inside.start < inside.stop:
                found.append(GradPiece(first + inside.start - begin, first + inside.stop - begin, whole[inside]))
        if staging is None:
            return found, []
        chunk, waits = staging.tensor(self.dtype, end - begin, offset), list[Wait]()
        for piece in found:
            target = chunk[piece.begin : piece.end]
            waits.append(self._memory.device.download(target, piece.grad, after=self._made).take_on_host)
            self._memory.store.counters.read(Tier.DEVICE, target.nbytes)
        return [GradPiece(0, end - begin, chunk)], waits

    def _neighbours(self) -> Iterator[list[int]]:
        """Parameters in order; together those whose gradients lie in one memory as they do in the section."""
        run = list[int]()
        for index, grad in sorted(self._adopted.items()):
            if run:
                last = self._adopted[run[-1]]
                apart = self.parts[index].start - self.parts[run[-1]].start
                same = grad.untyped_storage().data_ptr() == last.untyped_storage().data_ptr()
                if not same or grad.storage_offset() - last.storage_offset() != apart:
                    yield run
                    run = []
            run.append(index)
        if run:
            yield run


def _together(grads: Sequence[torch.Tensor]) -> torch.Tensor:
    """Neighbours in one memory, and what is between them, as one; (numel,)."""
    begin, last = grads[0].storage_offset(), grads[-1]
    return grads[0].as_strided((last.storage_offset() + last.numel() - begin,), (1,), begin)
