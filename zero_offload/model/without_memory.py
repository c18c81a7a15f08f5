"""A model on tensors without memory, and none of these left in a cache when it is over.

Owns what functions, classes and Python modules keep between forwards: caches of functools, dicts, lists, attributes. A
table that a class keeps of a forward without memory would be found by the real one, which has values. Attributes of
the model object are its own, and go with it; its config may be another's too. The call: `without_memory`, around all
forwards and backwards.
"""

from __future__ import annotations

import functools
import gc
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

_CACHE = type(functools.cache(id))
_BOXES = (dict, list, set, deque)
_LOOKED_INTO = (*_BOXES, tuple, FunctionType, MethodType, CellType, staticmethod, classmethod, property, type, _CACHE)
_DEEPEST = 6
"""Boxes in boxes of one cached value, such as a tuple in a list in an object."""


@contextmanager
def without_memory(model: nn.Module) -> Iterator[None]:
    """Give a model on meta tensors without memory, as operations inside have too."""
    undos = [undo for each in _kept_by_code_of(model) if (undo := _undo_of(each)) is not None]
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):  # those on meta
            model.to_empty(device="cpu")
            yield
    finally:
        for undo in undos:
            undo()


def _kept_by_code_of(model: nn.Module) -> list[Any]:
    """Whatever the packages of its classes reach. Some 30,000 objects of transformers take 0.1 s."""
    packages = {_package(kind.__module__) for module in model.modules() for kind in type(module).__mro__}
    packages -= {"torch", *sys.stdlib_module_names}
    holders = packages | {"collections", "functools", "types", "weakref"}
    modules = {name: module for name, module in [*sys.modules.items()] if isinstance(module, ModuleType)}
    known = {id(vars(module)) for name, module in modules.items() if _package(name) not in packages}
    found: dict[int, Any] = {}
    left: list[Any] = [vars(module) for name, module in modules.items() if _package(name) in packages]
    left += [each for module in model.modules() if (each := vars(module).get("config")) is not None]
    while left:
        each = left.pop()
        # A dict of numbers and text is not tracked, until it has others.
        if id(each) in known or isinstance(each, ModuleType) or not (gc.is_tracked(each) or isinstance(each, dict)):
            continue
        known.add(id(each))
        owner = each if isinstance(each, (type, FunctionType)) else type(each)
        allowed = packages if owner is each else holders
        is_plain = isinstance(each, _LOOKED_INTO) and owner is not each
        if not is_plain and _package(getattr(owner, "__module__", None) or "") not in allowed:
            continue
        found[id(each)] = each
        left += gc.get_referents(each)
        if not isinstance(each, type) and hasattr(each, "__dict__"):
            left.append(vars(each))
    return [*found.values()]


def _package(module: str) -> str:
    return module.partition(".")[0]


def _undo_of(each: Any) -> Callable[[], None] | None:
    """Takes tensors without memory out of it, and puts in what was there. Other changes stay."""
    if isinstance(each, _CACHE):
        return functools.partial(_undo_calls, each, each.cache_info().misses)
    if isinstance(each, type):
        return functools.partial(_undo_attributes, each, dict(vars(each)))
    if isinstance(each, dict):
        # `items` of a subclass may import what it maps to.
        return functools.partial(_undo_items, each, dict.copy(each))
    if isinstance(each, _BOXES):
        return functools.partial(_undo_members, each, [*each])
    return None


def _undo_calls(cache: Any, misses: int) -> None:
    if cache.cache_info().misses != misses and _holds(gc.get_referents(cache)):
        cache.cache_clear()


def _undo_attributes(kind: type, before: dict[str, Any]) -> None:
    for name in _changed(vars(kind), before):
        if name in before:
            setattr(kind, name, before[name])
        else:
            delattr(kind, name)


def _undo_items(box: dict[Any, Any], before: dict[Any, Any]) -> None:
    for key in _changed(dict.copy(box), before):
        if key in before:
            box[key] = before[key]
        else:
            del box[key]


def _undo_members(box: Any, before: list[Any]) -> None:
    known = {id(each) for each in before}
    if _holds(each for each in box if id(each) not in known):
        box.clear()
        (box.update if isinstance(box, set) else box.extend)(before)


def _changed(box: Mapping[Any, Any], before: dict[Any, Any]) -> list[Any]:
    """Keys of new values that hold such a tensor. A box that was there is looked at by itself."""
    new = [(key, value) for key, value in box.items() if key not in before or before[key] is not value]
    return [key for key, value in new if _holds((key, value))]


def _holds(values: Iterable[Any]) -> bool:
    """Whether one of them is a tensor without memory, or has one inside."""
    left, known = [(value, 0) for value in values], set[int]()
    while left:
        each, depth = left.pop()
        if isinstance(each, FakeTensor):
            return True
        if isinstance(each, (ModuleType, type, FunctionType)) or depth == _DEEPEST:
            continue
        if id(each) in known:
            continue
        known.add(id(each))
        left += [(inner, depth + 1) for inner in gc.get_referents(each)]
    return False
