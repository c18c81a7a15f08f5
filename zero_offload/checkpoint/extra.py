"""What a program adds to a generation, as JSON: what JSON has no form for is wrapped, so that it comes back as it was.

Numbers as keys, as in the milestones of a scheduler, and infinities, as in the best loss of another. Tuples come back
as lists. The calls: `to_json` before writing, `from_json` after reading.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

_PAIRS, _FLOAT = "__pairs__", "__float__"


def to_json(value: Any) -> Any:
    """A copy that later changes cannot reach. Raises TypeError for what is neither JSON nor wrapped here."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {_FLOAT: str(float(value))}
    if isinstance(value, list | tuple):
        return [to_json(each) for each in value]
    if not isinstance(value, Mapping):
        raise TypeError(f"{type(value).__name__} is none of numbers, texts, lists and dicts")
    if all(isinstance(key, str) for key in value) and not {_PAIRS, _FLOAT} & value.keys():
        return {str(key): to_json(each) for key, each in value.items()}
    if not all(key is None or isinstance(key, str | bool | int | float) for key in value):
        raise TypeError("a dict has keys that are neither numbers nor texts")
    return {_PAIRS: [[to_json(key), to_json(each)] for key, each in value.items()]}


def from_json(value: Any) -> Any:
    if isinstance(value, list):
        return [from_json(each) for each in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {_FLOAT}:
        return float(value[_FLOAT])
    if value.keys() == {_PAIRS}:
        return {from_json(key): from_json(each) for key, each in value[_PAIRS]}
    return {key: from_json(each) for key, each in value.items()}
