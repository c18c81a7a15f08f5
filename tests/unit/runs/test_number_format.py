from __future__ import annotations

import pytest

from zero_offload.runs.number_format import format_duration, format_number, format_written


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.000012, "0.000012"),
        (0.62, "0.62"),
        (0.999, "1.00"),
        (1.234, "1.23"),
        (9.999, "10.0"),
        (12.34, "12.3"),
        (99.96, "100"),
        (3410.4, "3,410"),
        (1234567, "1,234,567"),
    ],
)
def test_numbers(value: float, text: str) -> None:
    assert format_number(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0000124, "12.4 us"),
        (0.0123, "12.3 ms"),
        (0.84, "0.84 s"),
        (12.34, "12.3 s"),
        (99.6, "1 min 40 s"),
        (3410, "56 min 50 s"),
        (3599.6, "1 h"),
        (18720, "5 h 12 min"),
        (86400 - 20, "1 day"),
        (86400 * 1.5, "1 day 12 h"),
        (86400 * 3 + 4 * 3600, "3 days 4 h"),
        (86400 * 365, "365 days"),
        (86400 * 876, "2.40 years"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(300, "0 kB"), (45_000, "45 kB"), (12.34e9, "12.3 GB"), (999.96e9, "1.00 TB"), (4.5e12, "4.50 TB")],
)
def test_what_is_written_is_in_units_of_drives(nbytes: float, text: str) -> None:
    assert format_written(nbytes) == text
