"""The boxes of a range of elements are disjoint, in order, few, and all of it."""

from __future__ import annotations

import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from zero_offload.plan.boxes import Box, boxes_of

shapes = st.lists(st.integers(1, 5), max_size=4)


@given(shapes, st.data())
def test_boxes_tile_the_range(shape: list[int], data: st.DataObject) -> None:
    numel = math.prod(shape)
    begin = data.draw(st.integers(0, numel))
    end = data.draw(st.integers(begin, numel))
    elements = torch.arange(numel).view(shape)
    boxes = boxes_of(shape, begin, end)
    found = []
    for box in boxes:
        part = elements[tuple(slice(at, at + size) for at, size in zip(box.offsets, box.sizes, strict=True))]
        assert (part.numel(), part.flatten()[0].item()) == (box.numel, box.begin)
        found += part.flatten().tolist()
    assert found == list(range(begin, end))
    assert len(boxes) <= max(2 * len(shape) - 1, 1)


def test_a_matrix_has_three_at_most() -> None:
    assert boxes_of((4, 5), 3, 18) == [Box((0, 3), (1, 2), 3), Box((1, 0), (2, 5), 5), Box((3, 0), (1, 3), 15)]
    assert boxes_of((4, 5), 5, 15) == [Box((1, 0), (2, 5), 5)]
    assert boxes_of((4, 5), 6, 8) == [Box((1, 1), (1, 2), 6)]
    assert boxes_of((4, 5), 7, 7) == []


def test_without_elements_or_dimensions() -> None:
    assert boxes_of((3, 0, 2), 0, 0) == [Box((0, 0, 0), (3, 0, 2), 0)]
    assert boxes_of((), 0, 1) == [Box((), (), 0)]
    assert boxes_of((), 0, 0) == []


def test_a_box_in_a_larger_tensor() -> None:
    assert Box((1, 0), (2, 5), 5).moved(1, 10) == Box((1, 10), (2, 5), 5)
