"""`zero-offload plan FOLDER`: the plan of the `finetune` run that the same flags ask for, and its command.

Owns which of the flags of `plan` go with a folder, and what they mean to `finetune`. The calls: `folder_of`, then
`run`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from zero_offload.base.errors import CapacityError, ConfigError
from zero_offload.base.types import user_path
from zero_offload.cli.flags import FOLDER_SETTINGS, flag_of, tier_flag_of
from zero_offload.finetune.fit import measure
from zero_offload.finetune.fit.job import FolderJob
from zero_offload.finetune.fit.plan import plan_job
from zero_offload.finetune.fit.text import as_json, as_text, command
from zero_offload.finetune.gpt_config import PRESETS
from zero_offload.finetune.identity import check_outputs
from zero_offload.finetune.learning import Learning
from zero_offload.finetune.model.folder import check_training, open_folder, quiet_libraries
from zero_offload.finetune.settings import TASKS, FinetuneConfig
from zero_offload.hardware.machines import ONE_DRIVE, Cluster, Drives, parse_network
from zero_offload.plan.hints import Hints
from zero_offload.plan.shapes import SHAPES

_SHARED = ("accumulate", "recompute")
_PLACES = (
    *("nvme", "params", "grads", "optimizer", "activations", "stage", "precision", "states"),
    *("cpu_memory", "device_memory", "durability", "commit_every"),
)
"""Settings of tiers and storage that both commands have."""
_OF_MODELS = ("tokens", "sequence", "loop", "step_time")
_WIDTH_MAX = 1024
"""Of the block that is timed on a CPU: some seconds."""
_NO_DATA = "DATA"
"""Stands for data that the user has yet to name."""


def folder_of(args: argparse.Namespace) -> Path | None:
    """The folder that the plan is for; None where it is for a model by its name or size. Raises ConfigError where the
    flags do not go with that."""
    if args.folder is not None and args.model is not None:
        raise ConfigError(f"FOLDER {args.folder} and --model {args.model} both say what to plan; give one of them")
    named = args.folder or args.model or ""
    # A name of a model, or a typo of it, is a folder only if there is one.
    is_folder = named not in (*PRESETS, *SHAPES) and (named and user_path(named).is_dir() or "/" in named)
    others = _OF_MODELS if named and is_folder else [name for name in FOLDER_SETTINGS if name != "lora"]
    strange = [flag_of(name) for name in _given(args, others)]
    if named and is_folder:
        if strange:
            raise ConfigError(f"{', '.join(strange)}: of a folder give --batch, --seq and --accumulate, as to finetune")
        return user_path(named)
    if strange:
        raise ConfigError(f"{', '.join(strange)}: only of a Hugging Face folder, such as ./Qwen3-8B; this is {named!r}")
    return None


def _given(args: argparse.Namespace, names: Sequence[str]) -> dict[str, Any]:
    """The values that the user typed."""
    values = {name: vars(args)[f"finetune_{name}" if name in FOLDER_SETTINGS else name] for name in names}
    return {name: value for name, value in values.items() if value is not None}


def run(args: argparse.Namespace, folder: Path, drives: Drives | None, places: Mapping[str, Any]) -> int:
    """Print the plan; `places` are the settings of tiers and storage that were given."""
    quiet_libraries()
    job, out, note, learning = _job(args, folder, drives, places)
    plan = plan_job(job, out, tokens=True)
    if args.json:
        print(json.dumps(as_json(plan) | {"learning": learning and learning.to_dict()}, indent=2))
    else:
        lines = [*note, *(learning.lines() if learning is not None else ()), as_text(plan)]
        where = " on that machine" if job.is_elsewhere else ""
        lines += [f"the run{where}:", f"  {command(plan)}"] if plan.fits else []
        print("\n".join(lines))
    return 0 if plan.fits else CapacityError.exit_code


def cluster_of(args: argparse.Namespace) -> Cluster:
    """The ranks and machines that the flags of `plan` name."""
    network = None if args.network is None else parse_network(args.network)
    return Cluster(args.ranks, args.nodes, network, args.hybrid)


def _job(
    args: argparse.Namespace, folder: Path, drives: Drives | None, places: Mapping[str, Any]
) -> tuple[FolderJob, Path | None, list[str], Learning | None]:
    """The run, where it writes, lines to say first, and what it learns, which data tell."""
    given = _given(args, (*FOLDER_SETTINGS, *_SHARED))
    is_elsewhere = args.gpu is not None or args.ram is not None or drives is not None
    note = []
    if is_elsewhere and drives is None and args.nvme is None:
        drives = ONE_DRIVE
        note.append("no --nvme is given: one drive of 5 GB/s is planned with, such as --nvme 5GB/s/4GB/s")
    config = FinetuneConfig.from_tables({"model": str(folder.absolute()), "data": _NO_DATA} | given, dict(places))
    config = replace(config, offload=replace(config.offload, nvme_capacity=places.get("nvme_capacity")))
    # The folder is opened as for a run, but weights and tokenizer may be missing.
    opened = open_folder(
        config.model,
        TASKS.get(config.method, TASKS["sft"]),
        quantize=config.quantize or None,
        group_size=config.group_size,
        needs_weights=False,
        needs_tokenizer=args.finetune_data is not None,
    )
    has_adapter, in_turns = config.lora > 0 or opened.adapter is not None, bool(config.live_blocks)
    check_training(opened, has_adapter=has_adapter, merge=config.merge, in_turns=in_turns)
    if opened.has_weights:
        note += check_outputs(opened, trains=True)
    else:
        note.append(f"{args.folder or args.model} has no weights yet: the plan follows from its config.json")
    # Measured rates are remembered for the plan that follows.
    if args.measure:
        width = Hints(opened.config).number("hidden_size") or _WIDTH_MAX
        directories = () if is_elsewhere else config.offload.nvme_dirs
        measure.measure(config.offload, directories, min(width, _WIDTH_MAX))
    config, prepared, learning = config.with_length(opened.num_positions), None, None
    # Data tell method and tokens; without data the plan takes the settings.
    if args.finetune_data is not None:
        from zero_offload.finetune.data.prepare import prepare  # brings datasets and TRL

        prepared = prepare(config.data, opened, **config.of_data())
        note.append(prepared.note)
        learning = Learning.of(config.with_method(prepared.method, is_adapter=has_adapter), prepared, args.ranks)
    job = replace(
        FolderJob.of(config, opened, prepared, args.ranks),
        cluster=cluster_of(args),
        words=(args.folder or args.model, *_words(args, drives)),
        gpu=args.gpu,
        ram=args.ram,
        drives=drives,
        tbw=args.tbw,
    )
    return job, None if is_elsewhere else config.out, note, learning


def _words(args: argparse.Namespace, drives: Drives | None) -> Iterator[str]:
    """The arguments of the run's command beside the folder: given flags that `finetune` takes too."""
    given = [(flag_of(name), value) for name, value in _given(args, (*FOLDER_SETTINGS, *_SHARED)).items()]
    given += [(tier_flag_of(name), vars(args)[name]) for name in _PLACES if name != "nvme" or drives is None]
    for flag, value in given:
        if value is None:
            continue
        yield flag
        if not isinstance(value, bool):
            yield from map(str, value if isinstance(value, list) else [value])
    if args.finetune_data is None:
        yield from ("--data", "chat.jsonl")
