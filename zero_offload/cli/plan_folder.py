"""`zero-offload plan FOLDER`: the plan of the `finetune` run that the same flags ask for, and its command.

Owns which of the flags of `plan` go with a folder, and what they mean to `finetune`. The calls: `is_of_folder`, then
`run`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zero_offload.base.errors import CapacityError, ConfigError
from zero_offload.cli import measure
from zero_offload.cli.finetune.folder import ModelFolder, need_packages, open_folder
from zero_offload.cli.finetune.settings import TASKS, FinetuneConfig
from zero_offload.cli.folder_plan import FolderJob, plan_job
from zero_offload.cli.folder_text import as_json, as_text, command
from zero_offload.cli.recipes.gpt import PRESETS
from zero_offload.hardware.machines import ONE_DRIVE, Drives
from zero_offload.plan.shapes import SHAPES

if TYPE_CHECKING:
    from zero_offload.cli.finetune.data import Prepared

FLAGS: Mapping[str, str] = {
    "data": "--data",
    "eval_data": "--eval-data",
    "split": "--split",
    "method": "--method",
    "out": "--out",
    "steps": "--steps",
    "epochs": "--epochs",
    "batch": "--batch",
    "seq": "--seq",
    "lora": "--lora",
    "merge": "--merge",
    "packing": "--no-packing",
}
"""Of a run of `finetune` alone."""
_SHARED = {"accumulate": "--accumulate", "recompute": "--recompute"}
_PLACES = {
    "nvme": "--nvme",
    "params": "--params-tier",
    "grads": "--grads-tier",
    "optimizer": "--optimizer-tier",
    "activations": "--activations-tier",
    "stage": "--stage",
    "precision": "--precision",
    "states": "--states",
    "cpu_memory": "--cpu-memory",
    "device_memory": "--device-memory",
    "durability": "--durability",
    "commit_every": "--commit-every",
}
"""Flags of tiers and storage, as both commands have them."""
_OF_MODELS = {"tokens": "--tokens", "sequence": "--sequence", "loop": "--loop", "step_time": "--step-time"}
_WIDTH_MAX = 1024
"""Of the block that is timed on a CPU: some seconds."""
_NO_DATA = "DATA"
"""Stands for data that the user has yet to name."""


def add_flags(group: argparse._ArgumentGroup) -> None:
    """Those of `finetune` alone; defaults are its own."""

    def add(flag: str, help: str, **options: Any) -> None:
        name = flag.removeprefix("--").replace("-", "_")
        default = getattr(FinetuneConfig, name)
        if default and "default" not in help:
            help = f"{help} (default {default})"
        group.add_argument(flag, help=help, **options)

    add("--data", "files, folders or data sets: their tokens are counted", nargs="+", metavar="FILE")
    add("--eval-data", "the same, to evaluate on", nargs="+", metavar="FILE")
    add("--split", "share of the data that is kept for evaluation", type=float)
    add("--method", f"auto (by the data's columns), {', '.join(TASKS)}", metavar="METHOD")
    add("--out", "run directory (default: as finetune)", metavar="OUT")
    add("--steps", "optimizer steps (default: as many as --epochs has)", type=int)
    add("--epochs", "passes over the data", type=float)
    add("--batch", "sequences per micro-batch and rank", type=int)
    add("--seq", "the most tokens of a sequence", type=int)
    add("--lora", "train adapters of this rank (default: all parameters)", type=int, metavar="RANK")
    group.add_argument("--merge", action="store_const", const=True, help="write the merged model too")
    group.add_argument(
        "--no-packing", dest="packing", action="store_const", const=False, help="one sample per sequence, padded"
    )


def folder_of(args: argparse.Namespace) -> Path | None:
    """The folder that the plan is for; None where it is for a model by its name or size. Raises ConfigError where the
    flags do not go with that."""
    if args.folder is not None and args.model is not None:
        raise ConfigError(f"FOLDER {args.folder} and --model {args.model} both say what to plan; give one of them")
    named = args.folder or args.model or ""
    # A name of a model, or a typo of it, is a folder only if there is one.
    is_folder = named not in (*PRESETS, *SHAPES) and (Path(named).expanduser().is_dir() or "/" in named)
    strange = [flag for name, flag in (_OF_MODELS if named and is_folder else FLAGS).items() if _is_given(args, name)]
    if named and is_folder:
        if strange:
            raise ConfigError(f"{', '.join(strange)}: of a folder give --batch, --seq and --accumulate, as to finetune")
        return Path(named).expanduser()
    if strange:
        raise ConfigError(f"{', '.join(strange)}: only of a Hugging Face folder, such as ./Qwen3-8B; this is {named!r}")
    return None


def _is_given(args: argparse.Namespace, name: str) -> bool:
    value = getattr(args, name)
    return value is not None and not (name == "loop" and value is False)


def run(args: argparse.Namespace, folder: Path, drives: Drives | None, places: Mapping[str, Any]) -> int:
    """Print the plan; `places` are the settings of tiers and storage that were given."""
    need_packages()
    job, out, note = _job(args, folder, drives, places)
    plan = plan_job(job, out, tokens=True)
    if args.json:
        print(json.dumps(as_json(plan), indent=2))
    else:
        lines = [*note, as_text(plan)]
        where = " on that machine" if job.is_elsewhere else ""
        lines += [f"the run{where}:", f"  {command(plan)}"] if plan.fits else []
        print("\n".join(lines))
    return 0 if plan.fits else CapacityError.exit_code


def _job(
    args: argparse.Namespace, folder: Path, drives: Drives | None, places: Mapping[str, Any]
) -> tuple[FolderJob, Path | None, list[str]]:
    given = {name: getattr(args, name) for name in (*FLAGS, *_SHARED) if getattr(args, name) is not None}
    is_elsewhere = args.gpu is not None or args.ram is not None or drives is not None
    note = []
    if is_elsewhere and drives is None and args.nvme is None:
        drives = ONE_DRIVE
        note.append("no --nvme is given: one drive of 5 GB/s is planned with, such as --nvme 5GB/s/4GB/s")
    config = FinetuneConfig.from_tables({"model": str(folder.absolute()), "data": _NO_DATA} | given, dict(places))
    config = replace(config, offload=replace(config.offload, nvme_capacity=places.get("nvme_capacity")))
    task = TASKS.get(config.method, TASKS["sft"])
    opened = open_folder(config.model, task, needs_weights=False, needs_tokenizer=args.data is not None)
    if not opened.has_weights:
        note.append(f"{args.folder or args.model} has no weights yet: the plan follows from its config.json")
    if args.measure:
        width = getattr(opened.config.get_text_config(), "hidden_size", _WIDTH_MAX)
        directories = () if is_elsewhere else config.offload.nvme_dirs
        measure.measure(config.offload, directories, min(width, _WIDTH_MAX))
    config, prepared = config.with_length(opened.num_positions), None
    if args.data is not None:
        prepared = _read(config, opened)
        note.append(prepared.note)
    job = replace(
        FolderJob.of(config, opened, prepared, args.ranks),
        nodes=args.nodes,
        words=(args.folder or args.model, *_words(args, drives)),
        gpu=args.gpu,
        ram=args.ram,
        drives=drives,
        tbw=args.tbw,
    )
    return job, None if is_elsewhere else config.out, note


def _read(config: FinetuneConfig, folder: ModelFolder) -> Prepared:
    from zero_offload.cli.finetune.data import prepare  # brings datasets and TRL

    return prepare(
        config.data,
        folder,
        method=config.method,
        seq=config.seq,
        eval_data=config.eval_data,
        split=config.split,
        seed=config.seed,
        packing=config.packing,
    )


def _words(args: argparse.Namespace, drives: Drives | None) -> Iterator[str]:
    """What the command of the run has beside the folder: what was given that `finetune` takes too."""
    for name, flag in {**FLAGS, **_SHARED, **_PLACES}.items():
        value = getattr(args, name)
        if value is None or (name == "nvme" and drives is not None):
            continue
        yield flag
        if name not in ("merge", "packing"):
            yield from map(str, value if isinstance(value, list) else [value])
    if args.data is None:
        yield from ("--data", "chat.jsonl")
