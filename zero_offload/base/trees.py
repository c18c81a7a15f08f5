"""Values in the arguments of torch's functions: in tuples, lists and dicts.

torch's own walk over trees takes longer than most operations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

_CONTAINERS = (tuple, list, dict)


def leaves_in(values: Iterable[Any]) -> list[Any]:
    """The leaves of these containers, in order."""
    found = []
    for value in values:
        if isinstance(value, _CONTAINERS):
            found += leaves_in(value.values() if isinstance(value, dict) else value)
        else:
            found.append(value)
    return found


def mapped(kind: type | tuple[type, ...], replace: Callable[[Any], Any], value: Any) -> Any:
    """`value` with `replace` of each leaf of class `kind` in its place."""
    if isinstance(value, kind):
        return replace(value)
    if not isinstance(value, _CONTAINERS):
        return value
    # Leaves are replaced here: a call for each takes longer than all else.
    values = [
        replace(each)
        if isinstance(each, kind)
        else mapped(kind, replace, each)
        if isinstance(each, _CONTAINERS)
        else each
        for each in (value.values() if isinstance(value, dict) else value)
    ]
    if isinstance(value, dict):
        return dict(zip(value, values, strict=True))
    make = getattr(type(value), "_make", type(value))
    return make(values)
