"""Copies of a program's optimizer over other parameters, and classes that no copy can stand for.

`check_class` refuses classes whose steps need more than gradients. `copied` copies an object with its numbers, without
its hooks; `first_states` has the states that its constructor made. `plain_step` is a class's step without hooks,
and `names_of_params` finds lists that go with the parameters of a group.
"""

from __future__ import annotations

import copy
import inspect
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zero_offload.base.errors import ConfigError
from zero_offload.optim.unitwise.shared_numbers import HOOKS, is_own

SIZES = {"heavyball": "param_count"}
"""By package: an entry of groups that the first step makes, the elements of all its parameters."""


def copied(optimizer: torch.optim.Optimizer, kind: type[Any], params: Sequence[tuple[Tensor, Tensor]]) -> Any:
    """A copy of class `kind` that has, for the first parameter of each pair, the second; and no parameter's state."""
    made: Any = object.__new__(kind)
    content: Any = vars(optimizer)
    if "state" not in content:
        raise NotByUnitsError(kind, "it has no `state` of its own, as an optimizer around another one")
    state: Any = defaultdict(dict)
    memo: dict[int, Any] = {id(optimizer): made, id(content["state"]): state}
    memo.update({id(param): other for param, other in params})
    for name, value in content.items():
        if name in HOOKS:
            vars(made)[name] = OrderedDict()
        elif not is_own(name):
            _check_attribute(optimizer, kind, name, value)
            vars(made)[name] = _deep_copy(kind, name, value, memo)
    made.param_groups = _deep_copy(kind, "param_groups", optimizer.param_groups, memo)
    made.state = state
    for key, value in content["state"].items():
        if not isinstance(key, Tensor):
            state[key] = _deep_copy(kind, "state", value, memo)
    return made


def first_states(
    optimizer: torch.optim.Optimizer, kind: type[Any], params: Iterable[Tensor] | None = None
) -> dict[Tensor, Any]:
    """States that an optimizer has before its first step, of these parameters or of all.

    A deep copy of one makes its tensors whole.
    """
    content: Any = vars(optimizer)["state"]
    keys = (
        [key for key in content if isinstance(key, Tensor)] if params is None else [p for p in params if p in content]
    )
    return {key: compact(_deep_copy(kind, "state", content[key], {})) for key in keys if content[key]}


def names_of_params(group: dict[str, Any], count: int) -> dict[str, list[str]]:
    """Lists of a group that name its parameters, which are `count`: as many different texts."""
    return {
        key: value
        for key, value in group.items()
        if type(value) is list and len(value) == count and all(type(each) is str for each in value)
        if len(set(value)) == count
    }


def _deep_copy(kind: type[Any], name: str, value: Any, memo: dict[int, Any]) -> Any:
    try:
        return copy.deepcopy(value, memo)
    except Exception as error:
        raise NotByUnitsError(kind, f"its {name} has something that cannot be copied ({error})") from error


def _check_attribute(optimizer: torch.optim.Optimizer, kind: type[Any], name: str, value: Any) -> None:
    if isinstance(value, torch.optim.Optimizer | nn.Module):
        raise NotByUnitsError(
            kind, f"its {name} is a {type(value).__name__}, which has numbers or parameters of its own"
        )
    for cell in getattr(value, "__closure__", None) or ():
        try:
            inner = cell.cell_contents
        except ValueError:
            continue  # not set yet
        if inner is optimizer or getattr(inner, "__self__", None) is optimizer:
            raise NotByUnitsError(
                kind, f"its {name} is a function that holds the optimizer, so a copy would run this one"
            )


class NotByUnitsError(ConfigError):
    """An optimizer that cannot be stepped unit by unit; `reason` has what stands against it."""

    def __init__(self, kind: type, reason: str, *, only_together: bool = False) -> None:
        """`only_together`: all of its parameters at once are right."""
        instead = "zo.unitwise(optimizer, units='all')" if only_together else "one of zero_offload's, such as zo.AdamW"
        super().__init__(
            f"{kind.__module__}.{kind.__qualname__} cannot be stepped unit by unit: {reason}. Use another optimizer, "
            f"or {instead}"
        )
        self.reason, self.only_together = reason, only_together


def check_class(kind: type[Any]) -> None:
    """Raise ConfigError for a class whose steps are not those of gradients alone."""
    if issubclass(kind, torch.optim.SparseAdam):
        raise NotByUnitsError(kind, "it takes sparse gradients alone, and gradients here are dense")
    parameters = list(inspect.signature(plain_step(kind)).parameters.values())[1:]
    for parameter in parameters:
        if parameter.default is parameter.empty and parameter.kind not in (
            parameter.VAR_POSITIONAL,
            parameter.VAR_KEYWORD,
        ):
            raise NotByUnitsError(
                kind, f"its step needs {parameter.name}, as if it were to compute gradients by itself"
            )


def plain_step(kind: type[Any]) -> Any:
    """The step of a class without torch's wrapper, which runs hooks."""
    step = kind.step
    while getattr(step, "hooked", False) and hasattr(step, "__wrapped__"):
        step = step.__wrapped__
    return step


def compact(state: Any) -> Any:
    """A state that is kept for long: a tensor of one value throughout keeps one element."""
    if isinstance(state, dict):
        return {key: compact(value) for key, value in state.items()}
    if (
        type(state) is Tensor
        and state.numel() > 1
        and state.is_contiguous()
        and bool((state == state.view(-1)[0]).all())
    ):
        return Constant(state.view(-1)[:1].clone(), tuple(state.shape))
    return state


class Constant:
    """A tensor of one value; a deep copy of it is that tensor."""

    def __init__(self, value: Tensor, shape: tuple[int, ...]) -> None:
        self.value, self.shape = value, shape

    def __deepcopy__(self, memo: Any) -> Tensor:
        return self.value.expand(self.shape).contiguous()
