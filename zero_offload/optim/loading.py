"""What a state dict says of an optimizer's parameters: found by place, checked, and given to who keeps their states.

Owns what a state dict's entries mean. The calls of a load: `fill_group`, `entries_of`, `check_shapes`, before anything
is taken; then `write_offloaded` or `restore_exact` for each parameter.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from zero_offload.base.errors import ConfigError
from zero_offload.hardware.kernels.arguments import Hyper
from zero_offload.storage.shards.registry import owner_of

State = dict[str, Any]
"""What an optimizer keeps of one ordinary parameter, by torch's names."""
STEP = "step"
"""Torch's name for how many updates a parameter has had."""
BESIDE = ("residual", "master")
"""What completes a value to its master; no state of an optimizer's."""


def fill_group(group: dict[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Hyperparameters that there were not when a state dict was saved; an option was off then, as torch has it."""
    for name, default in defaults.items():
        group.setdefault(name, False if isinstance(default, bool) else default)
    return group


def entries_of(params: Iterable[nn.Parameter], given: Mapping[str, Any]) -> dict[nn.Parameter, State]:
    """What a state dict says of each parameter, by its place in the groups. What has made no step yet may be
    anything; torch's Adagrad keeps its initial sum."""
    found = {param: given["state"].get(key, {}) for param, key in zip(params, _keys(given), strict=True)}
    return {param: entry for param, entry in found.items() if entry.get(STEP, 1) != 0}


def ordinary_entries(params: Iterable[nn.Parameter], given: Mapping[str, Any]) -> dict[Any, State]:
    """A state dict's states but for those of offloaded parameters: torch's part of a load."""
    away = {key for param, key in zip(params, _keys(given), strict=True) if owner_of(param) is not None}
    return {key: each for key, each in given["state"].items() if key not in away and each.get(STEP, 1) != 0}


def _keys(given: Mapping[str, Any]) -> list[Any]:
    return [key for group in given["param_groups"] for key in group["params"]]


def check_shapes(param: nn.Parameter, state: State, names: Iterable[str], what: str) -> None:
    """Raise ConfigError for what is kept of a parameter in another shape than its own."""
    for name in names:
        if (kept := state.get(name)) is not None and kept.shape != param.shape:
            raise ConfigError(
                f"{what}: {name} has shape {tuple(kept.shape)}, the parameter {tuple(param.shape)}; load a state dict "
                "of this model, and build a new optimizer for a parameter whose data was replaced"
            )


def write_offloaded(param: nn.Parameter, hyper: Hyper, entry: State) -> None:
    """Give a runtime what a state dict's entry, or an optimizer's own, says of its parameter."""
    owner = owner_of(param)
    assert owner is not None
    states = {name: entry.get(name) for name in hyper.states}
    # torch's SGD counts no steps, and has a buffer of None where it has made none.
    has_stepped = entry and (not states or any(state is not None for state in states.values()))
    beside = {name: entry[name] for name in BESIDE if name in entry}
    owner.states.write(param, int(entry.get(STEP, 1 if has_stepped else 0)), states, beside)


def restore_exact(param: nn.Parameter, state: State, kept: Mapping[str, Tensor], residual: Tensor | None) -> None:
    """Take states and residual bit for bit; torch's state dict has no residual: then the value is the master."""
    for name, values in kept.items():
        state[name] = values.detach().to(param.device, torch.float32, copy=True).contiguous()
    if isinstance(step := state.get(STEP), Tensor):
        state[STEP] = step.cpu()  # torch's fused optimizers count on the device, where each look would wait for it
    if param.dtype == torch.bfloat16:
        if residual is None:
            residual = torch.zeros_like(param, dtype=torch.int16)
        state["residual"] = residual.to(param.device, copy=True)
