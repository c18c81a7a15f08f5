"""zero_offload: train models that do not fit the device, exactly.

ZeRO partitioning with parameters, gradients and optimizer states on device, CPU memory or NVMe.
    model = zo.offload(model, zo.OffloadConfig(params="nvme", optimizer="nvme", nvme="/mnt/nvme0/run1"))
    optimizer = zo.AdamW(model.parameters(), lr=3e-4)
Everything else is a plain PyTorch loop; README.md shows it.
"""

from zero_offload.base import startup as startup  # first of all

# isort: split
from zero_offload import nn as nn
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
