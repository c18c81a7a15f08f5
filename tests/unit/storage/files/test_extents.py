"""Where arrays lie: copies behind each other, what a manifest says of one, and the gaps of an earlier run."""

from __future__ import annotations

import itertools

import pytest

from zero_offload.base.errors import IntegrityError
from zero_offload.storage.files.swap_file import Extent, ExtentMap, extent_record

BLOCK = 4096
SIZES = [BLOCK, 3 * BLOCK, BLOCK, 2 * BLOCK]


def spans(extents: list[Extent]) -> list[tuple[int, int, int]]:
    """(directory, begin, end) of every block, sorted."""
    return sorted(
        (int(place), int(block["offset"]), int(block["offset"]) + int(block["nbytes"]))
        for extent in extents
        for place, block in zip(extent.directories, extent.blocks, strict=True)
    )


def assert_apart(extents: list[Extent]) -> None:
    for (place, _, end), (other, begin, _) in itertools.pairwise(spans(extents)):
        assert place != other or end <= begin


@pytest.mark.parametrize("weights", [[1.0], [0.5, 0.5], [0.2, 0.3, 0.5]])
@pytest.mark.parametrize("named", [0, 1])
def test_one_copy_says_where_the_other_is(named: int, weights: list[float]) -> None:
    first = ExtentMap(7, weights)
    first.allocate(["before"], SIZES)
    copies = first.allocate(["a.0", "a.1"], SIZES)
    assert_apart(list(copies))
    second = ExtentMap(7, weights)
    found = second.restore_copies(["a.0", "a.1"], SIZES, named, extent_record(copies[named]))
    assert [spans([each]) for each in found] == [spans([each]) for each in copies]
    assert second.sizes == first.sizes


def test_what_comes_later_goes_into_the_gaps() -> None:
    first = ExtentMap(7, [1.0])
    (unnamed,), named = first.allocate(["cache"], [4 * BLOCK]), first.allocate(["a.0", "a.1"], [BLOCK])
    second = ExtentMap(7, [1.0])
    kept = second.restore_copies(["a.0", "a.1"], [BLOCK], 0, extent_record(named[0]))
    taken = [second.allocate([f"new {i}"], [BLOCK])[0] for i in range(4)]
    assert second.sizes == first.sizes and spans(taken)[-1][2] == spans([unnamed])[-1][2]
    (last,) = second.allocate(["one more"], [BLOCK])
    assert spans([last]) == [(0, first.sizes[0], first.sizes[0] + BLOCK)]
    assert_apart([*kept, *taken, last])


def test_a_copy_cannot_begin_before_its_file() -> None:
    record = {"offset": [0], "crc": [0], "directory": [0]}
    with pytest.raises(IntegrityError, match=r"a\.1 where a\.0 would begin before its file"):
        ExtentMap(7, [1.0]).restore_copies(["a.0", "a.1"], [BLOCK], 1, record)


def test_what_was_never_written_is_told_as_blank() -> None:
    (extent,) = ExtentMap(7, [1.0]).allocate(["a"], SIZES)
    record = extent_record(extent)
    assert record["blank"]
    assert not ExtentMap(7, [1.0]).restore_copies(["a"], SIZES, 0, record)[0].written.any()
    extent.written[:] = True
    assert ExtentMap(7, [1.0]).restore_copies(["a"], SIZES, 0, extent_record(extent))[0].written.all()
