"""Checks of arguments of public functions: a wrong kind is one ConfigError that says what goes there.

Owns the wording. Never looks at what a model or config says, only at what it is.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import nn

from zero_offload.base.config import OffloadConfig
from zero_offload.base.errors import ConfigError


def check_model(call: str, model: object) -> None:
    if not isinstance(model, nn.Module):
        order = f"; write {call}(model, optimizer, ...)" if hasattr(model, "param_groups") else ""
        raise ConfigError(f"{call} takes a torch.nn.Module first, not {_kind(model)}{order}")


def check_config(call: str, config: object) -> OffloadConfig:
    if not isinstance(config, OffloadConfig):
        raise ConfigError(
            f"{call} takes an OffloadConfig, not {_kind(config)}; write zo.OffloadConfig(params='cpu'), or "
            "zo.OffloadConfig.from_dict({...}) for plain values"
        )
    return config


def check_optimizer(call: str, optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer, without the wrappers that accelerate, Lightning and Ray put around it.

    Raises ConfigError for others around one (lookahead, masks of updates): they have steps and numbers of their own.
    """
    if not hasattr(optimizer, "param_groups"):
        raise ConfigError(f"{call} takes the optimizer after the model, not {_kind(optimizer)}")
    while isinstance(inner := getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        name, inside = type(optimizer).__name__, type(inner).__name__
        if type(optimizer).__module__.partition(".")[0] not in _WRAPPERS:
            raise ConfigError(
                f"{call}: {name} is an optimizer around {inside}, and what it does and keeps itself would be left out. "
                f"Train with {inside} alone. Where {name} keeps nothing, give the {inside} inside"
            )
        optimizer = inner
    return cast(torch.optim.Optimizer, optimizer)


_WRAPPERS = frozenset({"accelerate", "lightning", "lightning_fabric", "pytorch_lightning", "ray"})
"""Packages whose optimizers have no states beside those of the one inside."""


def params_of(call: str, given: object) -> list[nn.Parameter]:
    """The parameters of a module, an iterable of parameters, or one parameter."""
    if isinstance(given, nn.Module):
        return list(given.parameters())
    params: list[Any] = [given] if isinstance(given, torch.Tensor) else []
    if not params and isinstance(given, Iterable):
        params = list(given)
    elif not params:
        raise ConfigError(f"{call} takes a module or parameters, not {_kind(given)}")
    for param in params:
        if not isinstance(param, torch.Tensor):
            raise ConfigError(f"{call} takes a module or parameters; among these is {_kind(param)}")
    return params


def number(name: str, value: Any) -> float:
    """A plain number, or a tensor of one."""
    try:
        if not isinstance(value, str) and not math.isnan(found := float(value)):
            return found
    except (TypeError, ValueError, RuntimeError):
        pass  # said below, as of a text and of NaN
    raise ConfigError(f"{name}={value!r} is not a number")


def _kind(value: object) -> str:
    return "None" if value is None else f"a value of type {type(value).__name__}"
