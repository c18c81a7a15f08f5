"""Param groups as generations keep them: JSON values, compared and restored when a run goes on."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from zero_offload.base.alike import word_of
from zero_offload.base.errors import CheckpointError, ConfigError
from zero_offload.standins.owners import is_removed, owner_of

_NUMBERS, _CLASS = "numbers", "class"
_NOT_HYPER = ("params", "optimizer", _NUMBERS, _CLASS)


class PackedNumbers:
    """An optimizer whose groups may have values of any kind: a generation has them packed, and those that are plain
    beside, to be read."""

    def packed_numbers(self) -> str:
        """All of its groups' values, and its own numbers."""
        raise NotImplementedError

    def restore_numbers(self, packed: str) -> None:
        """Take what `packed_numbers` gave."""
        raise NotImplementedError


def group_records(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """Every group: the optimizer's class, its hyperparameters, and the names of its parameters."""
    records = [_record(optimizer, group) for group in _groups(optimizer)]
    if isinstance(optimizer, PackedNumbers) and records:
        records[0] |= {_NUMBERS: optimizer.packed_numbers(), _CLASS: _class_of(optimizer)}
    return records


def _class_of(optimizer: torch.optim.Optimizer) -> str:
    """Of ours its name, which programs have; of an optimizer of others the module too."""
    kind = type(optimizer)
    return f"{kind.__module__}.{kind.__qualname__}" if isinstance(optimizer, PackedNumbers) else f"zo.{kind.__name__}"


def _written_class(records: Sequence[Mapping[str, Any]]) -> str:
    """As `_class_of`, of the optimizer that these records are of; without the module where they do not have it."""
    # Once AdamW was the only one, and had no need to be named.
    first: Mapping[str, Any] = records[0] if records else {}
    name = str(first.get("optimizer", "AdamW"))
    return str(first.get(_CLASS, name if _NUMBERS in first else f"zo.{name}"))


def _groups(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """All param groups but those whose parameters their models have no more."""
    groups: list[dict[str, Any]] = optimizer.param_groups
    return [group for group in groups if not group["params"] or not all(map(is_removed, group["params"]))]


def _record(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> dict[str, Any]:
    record: dict[str, Any] = {
        "optimizer": type(optimizer).__name__,
        "params": _names(group),
    }
    for name, value in group.items():
        if name not in _NOT_HYPER:
            # Values of other kinds are among the packed numbers.
            with suppress(ConfigError) if isinstance(optimizer, PackedNumbers) else nullcontext():
                record[name] = plain(name, value)
    return record


def _names(group: Mapping[str, Any]) -> list[str]:
    """Of a group's parameters; not of those that their model has no more."""
    return [name for name in map(_name, group["params"]) if name]


def plain(name: str, value: Any) -> Any:
    """A hyperparameter by value: numbers of torch and numpy are numbers. Raises ConfigError for what no file takes."""
    if isinstance(value, np.generic) or (isinstance(value, Tensor) and value.numel() == 1):
        return value.item()
    if isinstance(value, tuple | list):
        return [plain(name, each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        raise ConfigError(f"param group: {name!r} is {value}, which no generation can keep; use a finite number")
    if value is None or isinstance(value, str | int | float):
        return value
    raise ConfigError(
        f"param group: {name!r} is a {type(value).__name__}, which no generation can keep; use numbers, texts, and "
        "lists of them"
    )


class Names:
    """Lists of parameters by name, as ranks compare them. A list that is as it was is not looked at again."""

    def __init__(self, *, in_order: bool = True) -> None:
        """Not `in_order`: lists of the same parameters are equal."""
        self._in_order = in_order
        self._known: dict[tuple[int, ...], tuple[list[nn.Parameter], int]] = {}
        """By ids, which stay those of the parameters as long as these are held."""

    def digest(self, params: Sequence[nn.Parameter]) -> int:
        """32 bits."""
        key = tuple(map(id, params))
        if (known := self._known.get(key)) is None:
            if len(self._known) >= _LISTS_MAX:
                self._known.clear()
            names = [_told(param) for param in params]
            known = self._known[key] = list(params), word_of(names if self._in_order else sorted(names))
        return known[1]

    def describe(self, params: Sequence[nn.Parameter]) -> str:
        names = [_told(param) for param in params]
        return f"{len(names)} ({', '.join(names[:3])}{', ...' * (len(names) > 3)}; digest {self.digest(params):08x})"


_LISTS_MAX = 256


def _told(param: nn.Parameter) -> str:
    return _name(param) if owner_of(param) is not None else f"not offloaded {tuple(param.shape)}"


def _name(param: nn.Parameter) -> str:
    """Empty for a parameter that its model has no more."""
    owner = owner_of(param)
    if owner is None:
        return "" if is_removed(param) else "(not offloaded)"
    return owner.places.name_of(param)


def check_groups(optimizer: torch.optim.Optimizer, records: Sequence[Mapping[str, Any]], where: str) -> None:
    """Raise CheckpointError, naming the first difference, when a generation's groups are not those of `optimizer`."""
    here = [_names(group) for group in _groups(optimizer)]
    saved = [record.get("params") for record in records]
    counts = [len(names) if isinstance(names, list) else 0 for names in saved]
    if counts != [len(names) for names in here]:
        raise CheckpointError(
            f"{where} was written with param groups of {counts} parameters, this optimizer has "
            f"{[len(names) for names in here]}; build the optimizer with the same groups"
        )
    written, kind = _written_class(records), _class_of(optimizer)
    alike = (kind, type(optimizer).__name__) if isinstance(optimizer, PackedNumbers) else (kind,)
    if records and written not in alike:
        raise CheckpointError(
            f"{where} was written with {written}, whose states are not those of {kind}; build {written} as that run "
            "did, or export its weights and start over from them"
        )
    for number, (mine, theirs) in enumerate(zip(here, saved, strict=True)):
        # In another order after a change of the model: states go by names.
        for name, other in zip(sorted(mine), sorted(theirs or ()), strict=True):
            if name != other:
                raise CheckpointError(
                    f"{where} has {other} in param group {number}, where this optimizer has {name}; "
                    "build the optimizer with the same groups"
                )


def restore_groups(optimizer: torch.optim.Optimizer, records: Sequence[Mapping[str, Any]], where: str) -> None:
    """Put a generation's hyperparameters into `optimizer`. Raises CheckpointError when its groups differ."""
    check_groups(optimizer, records, where)
    if isinstance(optimizer, PackedNumbers) and records:
        optimizer.restore_numbers(records[0][_NUMBERS])
        return
    for group, record in zip(_groups(optimizer), records, strict=True):
        for name, value in record.items():
            if name in _NOT_HYPER:
                continue
            if isinstance(group.get(name), Tensor):
                group[name].fill_(value)
            else:
                group[name] = tuple(value) if isinstance(value, list) else value
