"""A folder's model that is only read, by `chat` and `evaluate`: weights streamed from their tiers, nothing trained.

Owns the flags that say which folder it is, and where the weights rest. Nothing is written to the folder. Weights on
NVMe are in files without names, which end with the process.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from typing import Any

from torch import nn

from zero_offload.base.config import OffloadConfig
from zero_offload.base.errors import CapacityError
from zero_offload.finetune.choices import CAUSAL
from zero_offload.finetune.identity import check_outputs
from zero_offload.finetune.model.build import build_model
from zero_offload.finetune.model.folder import ModelFolder, open_folder, quiet_libraries
from zero_offload.runs.locate import described


def open_checked(args: argparse.Namespace, task: str = CAUSAL) -> ModelFolder:
    """Open the folder, and print how its parts differ from those of the run that has left it.

    Raises what `open_folder` raises, and ConfigError where numbers would differ.
    """
    quiet_libraries()
    folder = open_folder(args.dir, task, quantize=args.quantize)
    lines = [*check_outputs(folder), *_as_trained(folder, args)]
    for line in lines if os.environ.get("RANK", "0") == "0" else ():
        print(line, file=sys.stderr)
    return folder


def _as_trained(folder: ModelFolder, args: argparse.Namespace) -> Iterator[str]:
    """Flags that a run's adapter was trained with, where others are given."""
    settings = described(folder.adapter).get("identity") if folder.adapter is not None else None
    settings = settings if isinstance(settings, dict) else {}
    precision = settings.get("offload.precision", args.precision)
    precision = precision.get("compute") if isinstance(precision, dict) else precision
    for name, before, now in (
        ("quantize", settings.get("quantize") or args.quantize, args.quantize),
        ("precision", precision, args.precision),
    ):
        if before != now:
            yield f"note: the adapter was trained with --{name} {before}, without which losses are slightly others"


def open_for_reading(folder: ModelFolder, args: argparse.Namespace) -> nn.Module:
    """In eval mode, its weights in memory as far as they fit, and in `--nvme`. Raises what `build_model` raises."""
    if folder.is_quantized and folder.has_experts and os.environ.get("RANK", "0") == "0":
        print(f"note: linear layers are quantized, and experts stay {args.precision}", file=sys.stderr)
    settings: dict[str, Any] = {
        "params": "auto",
        "nvme": args.nvme,
        "cpu_memory": args.cpu_memory,
        "device_memory": args.device_memory,
        "precision": args.precision,
        "durability": "scratch",
    }
    try:
        return build_model(folder, OffloadConfig(**settings), None, trains=False)
    except CapacityError as error:
        if args.nvme is not None:
            raise
        raise CapacityError(f"{error}\nwould fit: weights on a drive, --nvme DIR") from error
