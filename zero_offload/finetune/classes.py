"""The optimizer of a run by the name of its class: one of ours, or of a library, which steps section by section.

Owns what a class has to be for `finetune`; which names there are is of settings.py. The calls: `optimizer_class` and
`arguments_of` for Trainer; `planned_optimizer` for a plan, of a model that has no memory.
"""

from __future__ import annotations

import difflib
import importlib
from typing import Any

import torch
from torch import nn

import zero_offload as zo
from zero_offload.base.errors import ConfigError
from zero_offload.finetune.settings import LIBRARIES
from zero_offload.optim.optimizer import FusedOptimizer
from zero_offload.optim.unitwise.grades import grade
from zero_offload.optim.unitwise.optimizer import MODES

_BY_GROUPS = ("GaLore", "APOLLO", "Fira")
"""Classes of pytorch_optimizer that are AdamW unless a param group has a rank."""


def optimizer_class(name: str) -> type[torch.optim.Optimizer]:
    """The class of this name. Raises ConfigError where it is not there, or not for `finetune`."""
    module, _, kind = name.rpartition(".")
    if module == "zo":
        ours: type[torch.optim.Optimizer] = getattr(zo, kind)
        return ours
    try:
        found = importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"--optimizer {name}: {module} cannot be imported ({error}); pip install {LIBRARIES[module]}"
        ) from error
    made = getattr(found, kind, None)
    if not (isinstance(made, type) and issubclass(made, torch.optim.Optimizer)):
        near = difflib.get_close_matches(kind, [each for each in dir(found) if each[:1].isupper()], n=3)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        raise ConfigError(f"--optimizer {name}: {module} has no optimizer of that name{hint}")
    if any(callable(getattr(made, mode, None)) for mode in MODES):
        raise ConfigError(
            f"--optimizer {name}: weights of training and of evaluation are two kinds there ({kind}.train() and "
            "eval()), and finetune writes one. Take another class, or zo.unitwise in a program"
        )
    if kind in _BY_GROUPS:
        raise ConfigError(
            f"--optimizer {name} is AdamW without a rank in its param groups, which finetune does not give. Take "
            "another class, or zo.unitwise in a program"
        )
    return made


def arguments_of(name: str, lr: float) -> dict[str, Any]:
    """Its arguments. One learning rate is for all parameters, so in Muon matrices take one of AdamW's size."""
    return {"lr": lr} | ({"adjust_lr_fn": "match_rms_adamw"} if optimizer_class(name) is zo.Muon else {})


def planned_optimizer(name: str, model: nn.Module, lr: float, weight_decay: float) -> torch.optim.Optimizer:
    """An optimizer of what is trained of a model, which makes no step. Raises ConfigError for a class that cannot train
    it section by section; the test of a class of others takes seconds."""
    kind: Any = optimizer_class(name)
    named = [(path, param) for path, param in model.named_parameters() if param.requires_grad]
    params = named if kind is zo.Muon else [param for _, param in named]
    try:
        made: torch.optim.Optimizer = kind([{"params": params, "weight_decay": weight_decay}], **arguments_of(name, lr))
    except Exception as error:  # the class's own code
        raise ConfigError(f"--optimizer {name} cannot be built for this model: {error}") from error
    if weight_decay and "weight_decay" not in made.defaults:
        raise ConfigError(f"--optimizer {name} has no weight decay; leave --weight-decay {weight_decay:g} out")
    if not isinstance(made, FusedOptimizer | zo.Muon) and not (verdict := grade(made)).may_walk:
        raise ConfigError(
            f"--optimizer {name} cannot step one section of a model after the other: {verdict.describe()}. Take a "
            "class that docs/OPTIMIZERS.md has as elementwise or separable"
        )
    return made
