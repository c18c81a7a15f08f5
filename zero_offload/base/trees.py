"""Values in the arguments of torch's functions: in tuples, lists and dicts.

torch's own walk over trees takes longer than most operations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

_SEQUENCES = (tuple, list)


def leaves_in(values: Iterable[Any]) -> Iterator[Any]:
    """What these containers hold, in order."""
    for value in values:
        if isinstance(value, _SEQUENCES):
            yield from leaves_in(value)
        elif isinstance(value, dict):
            yield from leaves_in(value.values())
        else:
            yield value


def mapped(kind: type | tuple[type, ...], replace: Callable[[Any], Any], value: Any) -> Any:
    """`value` with `replace` of each leaf of class `kind` in its place."""
    if isinstance(value, kind):
        return replace(value)
    if isinstance(value, _SEQUENCES):
        make = getattr(type(value), "_make", type(value))
        return make([mapped(kind, replace, each) for each in value])
    if isinstance(value, dict):
        return {key: mapped(kind, replace, each) for key, each in value.items()}
    return value
