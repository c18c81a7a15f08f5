"""Parts of tensors as boxes, and names of published checkpoints."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from zero_offload.checkpoint.published import PublishedName, PublishPlace, begin_of, boxes


@given(st.lists(st.integers(1, 5), max_size=4), st.data())
def test_boxes_have_the_elements_of_a_range_in_order(shape: list[int], data: st.DataObject) -> None:
    numel = math.prod(shape)
    begin = data.draw(st.integers(0, numel - 1))
    end = data.draw(st.integers(begin + 1, numel))
    tensor, found = torch.arange(numel).view(shape), []
    for offsets, sizes in boxes(shape, begin, end):
        box = tensor[tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))]
        values = box.reshape(-1).tolist()
        assert values[0] == begin_of(shape, offsets)
        found += values
    assert found == list(range(begin, end))


def test_names_count_up(tmp_path: Path) -> None:
    place = PublishPlace.of(str(tmp_path / "out"))
    assert place.names() == [] and place.newest() is None
    first, second = PublishedName(9, 400, "0123abcd"), PublishedName(10, 30, "0123abcd")
    assert str(second) == "000010-step-30-0123abcd" and PublishedName.parse(str(second)) == second
    assert PublishedName.parse("notes") is None
    for each in (first, second):
        place.make(each)
    (tmp_path / "out" / "notes").mkdir()
    assert place.names() == [second, first] and place.newest() is None
    (tmp_path / "out" / str(first) / ".metadata").touch()
    assert place.newest() == first
    place.remove(first)
    place.remove(first)
    assert place.names() == [second]
    with pytest.raises(FileExistsError):
        (tmp_path / "out" / "notes").mkdir()
