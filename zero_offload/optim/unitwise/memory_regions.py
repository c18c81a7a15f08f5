"""Where the tensors of one state lie in its row: regions, one after the other, at aligned places.

A region is one tensor without its gaps, or all bytes of tensors that overlap. `regions_of` lays them out, and each
region copies its bytes into a row unless they lie there already. `view_of` makes a tensor of bytes of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from zero_offload.base.errors import ConfigError

ALIGNMENT = 64
"""Bytes. Tensors begin at multiples, so that kernels see the alignment that torch's allocator gives."""

Strides = tuple[int, ...]


def aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def has_memory(tensor: Tensor) -> bool:
    return not (tensor.is_meta or isinstance(tensor, FakeTensor))


@dataclass(frozen=True, slots=True)
class RowRegion:
    """Memory that is kept in one piece."""

    source: Tensor
    """The tensor, or the bytes of all of them."""
    at: int
    """Its first byte, from where tensors begin in the row."""
    nbytes: int
    address: int
    strides: Strides
    """Of the source in the row."""

    def lies_in(self, row: Tensor, begin: int) -> bool:
        """True if the values are at their place in the row already."""
        is_there = self.source.device == row.device and self.address == row.data_ptr() + begin + self.at
        return is_there and self.strides == self.source.stride()

    def intersects(self, row: Tensor) -> bool:
        first = row.data_ptr()
        return (
            self.source.device == row.device
            and self.address < first + row.numel()
            and first < self.address + _extent(self.source)
        )

    def bytes(self) -> Tensor:
        """(nbytes,) uint8 of this region, a copy."""
        row = torch.zeros(self.nbytes, dtype=torch.uint8, device=self.source.device)
        self.write(self.source, row, -self.at)
        return row

    def write(self, source: Tensor, row: Tensor, begin: int) -> None:
        """Copy `source`, which has the values of this region, to its place."""
        place = view_of(row, begin + self.at, self.source.dtype, tuple(self.source.shape), self.strides)
        for dim in range(place.dim()):
            # Of a repeated dimension one element has the value.
            if place.size(dim) > 1 and not self.strides[dim]:
                place, source = place.narrow(dim, 0, 1), source.narrow(dim, 0, 1)
        place.copy_(source)


def regions_of(
    tensors: Sequence[Tensor], where: Callable[[int], str]
) -> tuple[list[RowRegion], list[tuple[int, Strides]], int]:
    """Regions of these tensors; each tensor's place and strides in the row; and the length of all.

    `where` names the tensors in errors. Places count from where tensors begin.
    """
    regions: list[RowRegion] = []
    places: list[tuple[int, Strides]] = [(0, _dense_strides(tensor)) for tensor in tensors]
    end = 0
    for number, tensor in enumerate(tensors):
        if tensor.numel() and _overlaps_itself(tensor):
            raise ConfigError(
                f"optimizer state: {where(number)} is a tensor whose elements share memory (shape "
                f"{tuple(tensor.shape)}, strides {tensor.stride()}), which no row can keep; clone it"
            )
    for numbers in _overlapping(tensors):
        first = tensors[numbers[0]]
        at = aligned(end)
        if all(_is_same(first, tensors[number]) for number in numbers):
            strides = _dense_strides(first)
            nbytes = first.nbytes if first.is_contiguous() else _extent(first, strides)
            address = first.data_ptr() if has_memory(first) else -1
            regions.append(RowRegion(first, at, nbytes, address, strides))
            for number in numbers:
                places[number] = at, strides
        else:
            address = first.data_ptr()
            nbytes = max(tensors[number].data_ptr() + _extent(tensors[number]) for number in numbers) - address
            regions.append(RowRegion(_bytes_at(first, address, nbytes), at, nbytes, address, (1,)))
            for number in numbers:
                places[number] = at + tensors[number].data_ptr() - address, tensors[number].stride()
        end = at + nbytes
    return regions, places, end


def view_of(row: Tensor, at: int, dtype: torch.dtype, shape: tuple[int, ...], strides: Strides) -> Tensor:
    """A tensor whose memory is the row's from byte `at` on. Raises ValueError for what ends beyond the row."""
    if min((*shape, *strides, at), default=0) < 0:
        raise ValueError(f"a tensor of shape {shape}, strides {strides}, at {at}")
    if 0 not in shape:
        last = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        if at + (last + 1) * dtype.itemsize > row.numel():
            raise ValueError(f"a tensor of shape {shape} at byte {at} ends beyond the row's {row.numel()}")
    offset, rest = divmod(int(row.storage_offset()) + at, dtype.itemsize)
    if rest:
        raise ValueError(f"a tensor of {dtype} at byte {at} of a row at byte {row.storage_offset()} is not aligned")
    made = torch.empty(0, dtype=dtype, device=row.device)
    return made.set_(row.untyped_storage(), offset, shape, strides)


def _overlapping(tensors: Sequence[Tensor]) -> list[list[int]]:
    """Numbers of tensors that share memory, group by group, in the order of their first; none of empty tensors."""
    found: list[list[int]] = []
    spans = []
    for number, tensor in enumerate(tensors):
        if not tensor.numel():
            continue
        if has_memory(tensor):
            spans.append((str(tensor.device), tensor.data_ptr(), tensor.data_ptr() + _extent(tensor), number))
        else:
            found.append([number])
    end, device = 0, ""
    for where, first, last, number in sorted(spans):
        if where == device and first < end:
            found[-1].append(number)
            end = max(end, last)
        else:
            found.append([number])
            end, device = last, where
    return sorted(found, key=min)


def _is_same(one: Tensor, other: Tensor) -> bool:
    return one is other or (
        has_memory(one)
        and has_memory(other)
        and (one.data_ptr(), one.dtype, one.shape, one.stride())
        == (other.data_ptr(), other.dtype, other.shape, other.stride())
    )


def _extent(tensor: Tensor, strides: Strides | None = None) -> int:
    """Bytes from the first element to the end of the last."""
    if strides is None and tensor.is_contiguous():
        return tensor.nbytes
    steps = tensor.stride() if strides is None else strides
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, steps, strict=True))
    return (last + 1) * tensor.element_size() if tensor.numel() else 0


def _dense_strides(tensor: Tensor) -> Strides:
    """Strides of the same order without gaps. Repeated dimensions stay repeated, and those of one element as they are.

    Without gaps they are the tensor's own.
    """
    shape, steps = tensor.shape, tensor.stride()
    if tensor.is_contiguous() or not tensor.numel():
        return steps
    strides, at = list(steps), 1
    for dim in sorted(range(len(shape)), key=steps.__getitem__):
        if shape[dim] > 1 and steps[dim]:
            strides[dim] = at
            at *= shape[dim]
    return tuple(strides)


def _overlaps_itself(tensor: Tensor) -> bool:
    """True if different indices share memory, apart from repeated dimensions."""
    if tensor.is_contiguous():
        return False
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride:
            if stride <= reach:
                return True
            reach += (size - 1) * stride
    return False


def _bytes_at(tensor: Tensor, address: int, nbytes: int) -> Tensor:
    """The bytes at an address of the tensor's storage."""
    storage = tensor.untyped_storage()
    made = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return made.set_(storage, address - storage.data_ptr(), (nbytes,), (1,))
