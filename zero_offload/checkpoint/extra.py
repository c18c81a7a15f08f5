"""What a program adds to a generation, as JSON: what JSON has no form for is wrapped, so that it comes back as it was.

Numbers and tuples as keys, as in the milestones of a scheduler, infinities, as in the best loss of another, tuples,
NumPy's numbers, and tensors of one number, as in the rates of schedulers whose optimizer has such a learning rate. What
comes back equals what was given; of a class derived from dict, list, tuple, text or number it is the plain one. The
calls: `to_json` before writing, `from_json` after reading.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from zero_offload.base.host import host_tensor

_PAIRS, _FLOAT, _TENSOR, _TUPLE, _NUMPY = "__pairs__", "__float__", "__tensor__", "__tuple__", "__numpy__"
_WRAPS = frozenset({_PAIRS, _FLOAT, _TENSOR, _TUPLE, _NUMPY})
_NUMPY_KINDS = {np.dtype(code).name: np.dtype(code).type for code in "?bBhHiIlLqQefd"}
"""Those whose numbers JSON holds."""

_KEYS = (str, bool, int, float, tuple, np.generic)


def to_json(value: Any, where: str = "") -> Any:
    """A copy that later changes cannot reach.

    Raises TypeError for what is neither JSON nor wrapped here; it names the place, of which `where` is the beginning.
    """
    if isinstance(value, np.generic) and value.dtype.name in _NUMPY_KINDS:
        return {_NUMPY: [value.dtype.name, to_json(value.item())]}
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {_FLOAT: str(float(value))}
    if isinstance(value, list | tuple):
        found = [to_json(each, f"{where}[{number}]") for number, each in enumerate(value)]
        return {_TUPLE: found} if isinstance(value, tuple) else found
    if isinstance(value, torch.Tensor) and value.ndim == 0 and not value.is_complex():
        return {_TENSOR: [str(value.dtype).removeprefix("torch."), to_json(value.item())]}
    if not isinstance(value, Mapping):
        raise TypeError(f"{where or 'it'} is of type {_kind(value)}, none of numbers, texts, lists and dicts")
    if wrong := [key for key in value if not (key is None or isinstance(key, _KEYS))]:
        raise TypeError(f"{where or 'it'} is a dict with a key of type {_kind(wrong[0])}, no number, text or tuple")
    pairs = [(key, to_json(each, f"{where}[{key!r}]")) for key, each in value.items()]
    if all(isinstance(key, str) for key in value) and not _WRAPS & value.keys():
        return {str(key): each for key, each in pairs}
    return {_PAIRS: [[to_json(key, f"a key of {where or 'it'}"), each] for key, each in pairs]}


def _kind(value: Any) -> str:
    shape = f" of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else ""
    return type(value).__name__ + shape


def from_json(value: Any) -> Any:
    if isinstance(value, list):
        return [from_json(each) for each in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {_FLOAT}:
        return float(value[_FLOAT])
    if value.keys() == {_TENSOR}:
        dtype, number = value[_TENSOR]
        return host_tensor(from_json(number), getattr(torch, dtype))
    if value.keys() == {_TUPLE}:
        return tuple(from_json(each) for each in value[_TUPLE])
    if value.keys() == {_NUMPY}:
        name, number = value[_NUMPY]
        return _NUMPY_KINDS[name](from_json(number))
    if value.keys() == {_PAIRS}:
        return {from_json(key): from_json(each) for key, each in value[_PAIRS]}
    return {key: from_json(each) for key, each in value.items()}
