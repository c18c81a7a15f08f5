"""The rectangles that a range of a tensor's elements is made of.

A shard is a range of elements in row-major order, and formats of others know tensors by rectangles. A range of a matrix
is up to three: the rest of a row, whole rows, and the beginning of a row. Of n dimensions it is up to 2n - 1. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Box:
    """A rectangle whose elements are neighbours in the tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    begin: int
    """The tensor's element that comes first in it, in row-major order."""

    @cached_property
    def numel(self) -> int:
        return math.prod(self.sizes)

    def moved(self, dim: int, offset: int) -> Box:
        """The same in a larger tensor, of which this one begins at `offset` in `dim`."""
        offsets = tuple(each + offset * (number == dim) for number, each in enumerate(self.offsets))
        return Box(offsets, self.sizes, self.begin)


def boxes_of(shape: Sequence[int], begin: int, end: int) -> list[Box]:
    """The boxes of elements [begin, end) of a tensor, in their order. A tensor without elements is one box."""
    if math.prod(shape) == 0:
        return [Box((0,) * len(shape), tuple(shape), 0)]
    return _split((), tuple(shape), 0, begin, end)


def _split(place: tuple[int, ...], shape: tuple[int, ...], first: int, begin: int, end: int) -> list[Box]:
    """The boxes inside of the part at `place`, which has this shape and begins with element `first`; [begin, end) are
    counted from there."""
    if begin >= end:
        return []
    if not shape:
        return [Box(place, (1,) * len(place), first)]
    row = math.prod(shape[1:])
    whole, last = -(-begin // row), end // row
    if whole > last:  # all of it lies within one row
        inner = begin - last * row, end - last * row
        return _split((*place, last), shape[1:], first + last * row, *inner)
    found = _split((*place, whole - 1), shape[1:], first + (whole - 1) * row, begin - (whole - 1) * row, row)
    if whole < last:
        offsets = (*place, whole, *(0,) * len(shape[1:]))
        found.append(Box(offsets, (*(1,) * len(place), last - whole, *shape[1:]), first + whole * row))
    return found + _split((*place, last), shape[1:], first + last * row, 0, end - last * row)
