"""The table of doors in docs/COMPATIBILITY.md says what the marks of tests say."""

from __future__ import annotations

from pathlib import Path

from tests.helpers import doors


def test_the_table_is_that_of_the_marks() -> None:
    assert doors.PAGE.read_text() == doors.page(), "python -m tests.helpers.doors writes it"


def test_each_row_says_how_it_ends_and_of_which_version() -> None:
    for door in (found := doors.doors()):
        assert {*door.library.split(", ")} <= doors.versions().keys(), door
        assert doors.kind_of(door) in doors.OUTCOMES and door.load, door
        assert (doors.kind_of(door) == doors.RIGHT) == (not door.instead), door
        assert not any("|" in word or "\n" in word for word in vars(door).values()), door
    assert len({*found}) == len(found) > 0


def test_a_mark_that_changes_is_seen(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    mark = '@pytest.mark.door("torch", load="a", save="b", outcome="right")'
    (tmp_path / "tests" / "test_it.py").write_text(f"{mark}\ndef test_it() -> None: ...\n")
    before, doors.ROOT = doors.ROOT, tmp_path
    try:
        assert doors.doors() == [doors.Door("torch", "a", "", "b", "right", "", "tests/test_it.py::test_it")]
    finally:
        doors.ROOT = before
