from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from zero_offload.base.errors import ConfigError
from zero_offload.base.types import (
    GIB,
    KIB,
    MIB,
    SECTOR,
    format_bytes,
    parse_bytes,
    parse_seconds,
    user_path,
    whole_sectors,
)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("16GiB", 16 * GIB),
        ("1.5 GiB", 3 * GIB // 2),
        ("2gib", 2 * GIB),
        ("4KB", 4000),
        ("4KiB", 4 * KIB),
        ("8589934592", 8 * GIB),
        ("7B", 7),
        ("3MiB", 3 * MIB),
        ("1TB", 10**12),
        (512, 512),
    ],
)
def test_parse_bytes(text: int | str, nbytes: int) -> None:
    assert parse_bytes(text) == nbytes


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "1 XB", "0", "64", " 1.5 ", 0, -1, True, 1.5, None])
def test_parse_bytes_refuses(text: object) -> None:
    with pytest.raises(ConfigError):
        parse_bytes(text)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("30s", 30), (" 2 MIN ", 120), ("1.5h", 5400), ("1 hour", 3600), ("45 Seconds", 45), ("10sec", 10), ("0.5s", 0.5)],
)
def test_parse_seconds(text: str, seconds: float) -> None:
    assert parse_seconds(text) == seconds


@pytest.mark.parametrize("text", ["", "30", "min", "0s", "-1s", "1 day", "5m", "1h30min", "1e3s", "9" * 400 + "s"])
def test_parse_seconds_refuses(text: str) -> None:
    with pytest.raises(ConfigError, match="as a duration; write for example '30s', '2min' or '1h'"):
        parse_seconds(text)


@pytest.mark.parametrize(("nbytes", "text"), [(0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (3 * GIB // 2, "1.5 GiB")])
def test_format_bytes(nbytes: int, text: str) -> None:
    assert format_bytes(nbytes) == text


@given(st.integers(1, 10**15))
@example(1023 * KIB)
def test_what_is_written_can_be_read(nbytes: int) -> None:
    assert parse_bytes(format_bytes(nbytes)) == pytest.approx(nbytes, rel=0.01)


@pytest.mark.parametrize(
    ("nbytes", "sectors"), [(0, 0), (1, 1), (SECTOR, 1), (SECTOR + 1, 2), (GIB - 1, GIB // SECTOR)]
)
def test_whole_sectors(nbytes: int, sectors: int) -> None:
    assert whole_sectors(nbytes) == sectors * SECTOR


@pytest.mark.parametrize(
    "nbytes", [1, 999, 1000, 1023, 1025, 533_824, 5_242_881, 10_485_759, 7 * GIB + 1, 1023 * MIB + 1]
)
def test_a_size_that_is_enough(nbytes: int) -> None:
    enough = parse_bytes(format_bytes(nbytes, at_least=True))
    assert nbytes <= enough <= 1.01 * nbytes + 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is empty; give a path"),
        ("~no-such-user/x", "names the home of a user that this machine does not have"),
        (f"a/{'x' * 256}", "is longer than a file system takes"),
        ("x/" * 2048, "is longer than a file system takes"),
        ("\ud83d", "has half of a character"),
    ],
)
def test_a_path_that_no_file_can_have(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f"a place.*{message}"):
        user_path(text, "a place")


def test_a_users_path() -> None:
    assert user_path("~") == Path.home() and user_path(Path("a/b")) == Path("a/b")
    assert user_path(os.fsdecode(b"a\xff")).name == "a\udcff"  # a name of bytes
