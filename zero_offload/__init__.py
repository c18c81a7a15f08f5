"""zero_offload: train models that do not fit the device, exactly.

ZeRO partitioning with parameters, gradients and optimizer states on device, CPU memory or NVMe.
    model = zo.offload(model, zo.OffloadConfig(params="nvme", optimizer="nvme", nvme="/mnt/nvme0/run1"))
    optimizer = zo.AdamW(model.parameters(), lr=3e-4)
Everything else is a plain PyTorch loop; README.md shows it.
"""

from zero_offload import startup as startup  # first of all

# isort: split
from zero_offload import nn as nn
from zero_offload.api import (
    accumulate,
    checkpoint,
    clip_grad_norm_,
    clip_grad_value_,
    close,
    no_sync,
    plan,
    stats,
)
from zero_offload.config import OffloadConfig, Precision
from zero_offload.deferred.recorder import deferred_init
from zero_offload.errors import (
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
from zero_offload.gathered import gathered
from zero_offload.offload import offload
from zero_offload.optim.adagrad import Adagrad
from zero_offload.optim.adam import Adam, AdamW
from zero_offload.optim.grad_scaler import GradScaler
from zero_offload.optim.lion import Lion
from zero_offload.optim.sgd import SGD
from zero_offload.pretrained import export_pretrained, load_pretrained
from zero_offload.saving import Resumed, commit, load_checkpoint, resume, save_checkpoint
from zero_offload.telemetry.profile import profile
from zero_offload.telemetry.stats import Stats

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
    "LockError",
    "NonFiniteError",
    "OffloadConfig",
    "Precision",
    "RankError",
    "Resumed",
    "Stats",
    "StorageError",
    "ZeroOffloadError",
    "accumulate",
    "checkpoint",
    "clip_grad_norm_",
    "clip_grad_value_",
    "close",
    "commit",
    "deferred_init",
    "export_pretrained",
    "gathered",
    "load_checkpoint",
    "load_pretrained",
    "no_sync",
    "offload",
    "plan",
    "profile",
    "resume",
    "save_checkpoint",
    "stats",
]
