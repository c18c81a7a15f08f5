"""Inputs of an outermost forward, brought to the compute device: as the root of torch's FSDP2 and DDP does.

Never copies what is there already, and replaces no container in which nothing moves: a forward may write to it.
"""

from __future__ import annotations

import copy
from collections.abc import MutableMapping
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

T = TypeVar("T")


def bring(value: T, device: torch.device | None) -> T:
    """`value` with each tensor on `device`: of tuples, lists, and mappings such as dicts, of whatever depth.

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
        moved = getattr(type(given), "_make", type(given))(values)
    elif isinstance(given, MutableMapping):
        changed = {key: new for key, old in given.items() if (new := bring(old, device)) is not old}
        if not changed:
            return value
        moved = copy.copy(given)
        for key, new in changed.items():
            moved[key] = new
    else:
        return value
    return moved  # type: ignore[no-any-return]
