"""zero_offload: train models that do not fit the device, exactly.

ZeRO partitioning with parameters, gradients and optimizer states on device, CPU memory or NVMe.
    model = zo.offload(model, zo.OffloadConfig(params="nvme", optimizer="nvme", nvme="/mnt/nvme0/run1"))
    optimizer = zo.AdamW(model.parameters(), lr=3e-4)
Everything else is a plain PyTorch loop; README.md shows it.

Names that need torch are imported, all of them, as the first one is used: help of a command need not wait for torch.
"""

from zero_offload.base import startup as startup  # first of all

# isort: split
import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from zero_offload import integrations as integrations  # the reader of from_deepspeed
from zero_offload.base.config import OffloadConfig, Precision
from zero_offload.base.errors import (
    CapacityError,
    CheckpointError,
    ConfigError,
    IntegrityError,
    LockError,
    NonFiniteError,
    RankError,
    StorageError,
    ZeroOffloadError,
)

if TYPE_CHECKING:
    from zero_offload import nn as nn
    from zero_offload.base.stats import Stats
    from zero_offload.integrations.experts import group_experts
    from zero_offload.integrations.pretrained import export_pretrained, load_pretrained
    from zero_offload.model.api import (
        accumulate,
        checkpoint,
        clip_grad_norm_,
        clip_grad_value_,
        close,
        device,
        no_sync,
        stats,
    )
    from zero_offload.model.checkpoints import Resumed, commit, load_checkpoint, resume, save_checkpoint
    from zero_offload.model.copies import copy
    from zero_offload.model.deferred.recorder import deferred_init
    from zero_offload.model.gathered import gathered
    from zero_offload.model.live_blocks import LiveBlocks
    from zero_offload.model.offload import offload, plan
    from zero_offload.model.profile import profile
    from zero_offload.model.run_log import RunLog
    from zero_offload.model.steps import steps
    from zero_offload.optim.grad_scaler import GradScaler
    from zero_offload.optim.muon import Muon
    from zero_offload.optim.optimizers import SGD, Adagrad, Adam, AdamW, Lion
    from zero_offload.optim.unitwise.optimizer import unitwise
    from zero_offload.runtime.ranks.join import join

__version__ = "0.1.0"

__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "CapacityError",
    "CheckpointError",
    "ConfigError",
    "GradScaler",
    "IntegrityError",
    "Lion",
    "LiveBlocks",
    "LockError",
    "Muon",
    "NonFiniteError",
    "OffloadConfig",
    "Precision",
    "RankError",
    "Resumed",
    "RunLog",
    "Stats",
    "StorageError",
    "ZeroOffloadError",
    "accumulate",
    "checkpoint",
    "clip_grad_norm_",
    "clip_grad_value_",
    "close",
    "commit",
    "copy",
    "deferred_init",
    "device",
    "export_pretrained",
    "gathered",
    "group_experts",
    "join",
    "load_checkpoint",
    "load_pretrained",
    "no_sync",
    "offload",
    "plan",
    "profile",
    "resume",
    "save_checkpoint",
    "stats",
    "steps",
    "unitwise",
]

_MODULES = {
    "base.stats": "Stats",
    "integrations.experts": "group_experts",
    "integrations.pretrained": "export_pretrained load_pretrained",
    "model.api": "accumulate checkpoint clip_grad_norm_ clip_grad_value_ close device no_sync stats",
    "model.checkpoints": "Resumed commit load_checkpoint resume save_checkpoint",
    "model.copies": "copy",
    "model.deferred.recorder": "deferred_init",
    "model.gathered": "gathered",
    "model.live_blocks": "LiveBlocks",
    "model.offload": "offload plan",
    "model.profile": "profile",
    "model.run_log": "RunLog",
    "model.steps": "steps",
    "optim.grad_scaler": "GradScaler",
    "optim.muon": "Muon",
    "optim.optimizers": "SGD Adagrad Adam AdamW Lion",
    "optim.unitwise.optimizer": "unitwise",
    "runtime.ranks.join": "join",
}
"""By module, the names that it gives: those that the imports above give a type checker."""
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    """A public name at its first use: Python asks here for what the package does not have yet.

    All come then. A later import, in a run of weeks, might find the files of another version, or no descriptor left.
    """
    if name != "nn" and name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = {"nn": import_module("zero_offload.nn")}
    for each, module in _MODULE_OF.items():
        found[each] = getattr(import_module(f"zero_offload.{module}"), each)
    globals().update(found)
    return found[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "nn"})


class _Package(ModuleType):
    """The type of this module: `plan` and `checkpoint` are functions, and folders of the package have these names."""

    def __setattr__(self, name: str, value: Any) -> None:
        # Python makes each folder that it imports an attribute of its package. That would hide the function.
        if not (name in _MODULE_OF and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
