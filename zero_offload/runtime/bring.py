"""Inputs of an outermost forward, brought to the compute device: as the root of torch's FSDP2 and DDP does.

Never copies what is there already, and replaces no container in which nothing moves: a forward may write to it.
"""

from __future__ import annotations

import copy
from collections.abc import MutableMapping
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

T = TypeVar("T")


def bring(value: T, device: torch.device | None) -> T:
    """`value` with each tensor on `device`: of tuples, lists, mappings such as dicts, and dataclasses, of any depth.

    Tensors in other objects stay where they are. A copy is complete as the call returns: the program may overwrite
    what it has given, registered memory too.
    """
    given: Any = value
    if device is None:
        return value
    if isinstance(given, Tensor | PackedSequence):
        at = given.device if isinstance(given, Tensor) else given.data.device
        whole: Any = given
        moved = whole if at == device else whole.to(device)  # the sizes of a packed sequence stay on the host
    elif isinstance(given, tuple | list):
        values = [bring(each, device) for each in given]
        if all(new is old for new, old in zip(values, given, strict=True)):
            return value
        moved = _sequence_like(given, values)
    elif isinstance(given, MutableMapping):
        changed = {key: new for key, old in given.items() if (new := bring(old, device)) is not old}
        if not changed:
            return value
        moved = copy.copy(given)
        for key, new in changed.items():
            moved[key] = new
    elif is_dataclass(given) and not isinstance(given, type):
        held = {field.name: getattr(given, field.name) for field in fields(given) if hasattr(given, field.name)}
        changed = {name: new for name, old in held.items() if (new := bring(old, device)) is not old}
        if not changed:
            return value
        moved = copy.copy(given)
        for name, new in changed.items():
            object.__setattr__(moved, name, new)  # a frozen one too
    else:
        return value
    return moved  # type: ignore[no-any-return]


def _sequence_like(given: Any, values: list[Any]) -> Any:
    """A tuple or list of the class of `given`, whatever that takes to be made, and with its attributes."""
    if isinstance(given, list):
        moved = copy.copy(given)
        moved[:] = values
        return moved
    if hasattr(given, "n_sequence_fields"):  # of torch.return_types, which only their class makes
        return type(given)(values)
    made: Any = tuple.__new__(type(given), values)
    if attributes := getattr(given, "__dict__", None):
        made.__dict__.update(attributes)
    return made
