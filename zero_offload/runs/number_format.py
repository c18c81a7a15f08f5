"""Numbers as a tired reader takes them: no powers of ten, no digits that mean nothing.

Pure. Sizes in binary units are `base.types.format_bytes`'.
"""

from __future__ import annotations

_MINUTE, _HOUR, _DAY, _YEAR = 60, 3600, 86400, 365 * 86400


def format_number(value: float) -> str:
    """1,234, 12.3, 0.62, 0.0012: whole from 100 on, else two or three digits that count."""
    if abs(value) >= 99.95 or value == 0:
        return f"{value:,.0f}"
    if abs(value) >= 9.995:
        return f"{value:.1f}"
    if abs(value) >= 0.995:
        return f"{value:.2f}"
    return f"{value:.2g}" if abs(value) >= 1e-4 else f"{value:.6f}".rstrip("0")


def format_duration(seconds: float) -> str:
    """0.84 s, 12.3 s, 3 min 20 s, 5 h 12 min, 3 days 4 h, 2.4 years."""
    if seconds < 1e-3:
        return f"{format_number(seconds * 1e6)} us"
    if seconds < 0.0995:
        return f"{format_number(seconds * 1e3)} ms"
    if seconds < 99.5:
        return f"{format_number(seconds)} s"
    for whole, part, unit, smaller in (
        (_MINUTE, 1, "min", "s"),
        (_HOUR, _MINUTE, "h", "min"),
        (_DAY, _HOUR, "days", "h"),
    ):
        parts = round(seconds / part)
        if parts * part < {"min": _HOUR, "h": _DAY, "days": 100 * _DAY}[unit]:
            count, rest = divmod(parts, whole // part)
            unit = "day" if unit == "days" and count == 1 else unit
            return f"{count} {unit}" + (f" {rest} {smaller}" if rest else "")
    return f"{format_number(seconds / _DAY)} days" if seconds < 2 * _YEAR else f"{format_number(seconds / _YEAR)} years"


def format_written(nbytes: float) -> str:
    """Bytes in the units that drives are sold in: 12.3 GB, 4.5 TB."""
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if nbytes >= 0.9995 * size:
            return f"{format_number(nbytes / size)} {unit}"
    return f"{nbytes / 1e3:,.0f} kB"
