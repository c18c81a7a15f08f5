"""Flags that several commands have, and the settings that they give.

Owns the flags of tiers and storage, those of a folder's run, and their names. Commands have further ones of their own.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from zero_offload.base.config import OffloadConfig
from zero_offload.base.precision import QUANTIZATIONS
from zero_offload.finetune.settings import RECOMPUTE, TASKS, FinetuneConfig
from zero_offload.plan.turns import PERIODS

FOLDER_SETTINGS = (
    *("data", "eval_data", "split", "method", "out", "steps", "epochs", "batch", "seq", "lora", "quantize", "merge"),
    *("packing", "lora_targets", "group_size", "live_blocks", "live_order", "live_every", "live_master"),
    *("optimizer", "lr"),
)
"""Settings of `finetune` whose flags `plan` has for folders alone."""
INTERRUPTED_EXIT_CODE = 130  # 128 + SIGINT, as a shell reports it


def given_flags(args: argparse.Namespace, prefix: str) -> dict[str, Any]:
    """The flags of one table that the user typed."""
    return {
        name.removeprefix(prefix): value
        for name, value in vars(args).items()
        if name.startswith(prefix) and value is not None
    }


# Tiers and storage


def steps_or_duration(text: str) -> int | str:
    """The text of --commit-every or --publish-every; `OffloadConfig` says what is wrong with it."""
    return int(text) if text.isdecimal() else text


def with_states(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings in which `states`, which has a flag of its own, is a part of `precision`."""
    merged = dict(settings)
    if (states := merged.pop("states", None)) is not None:
        precision = merged.get("precision", {})
        table = precision if isinstance(precision, Mapping) else {"compute": precision}
        merged["precision"] = {**table, "states": states}
    return merged


def flag_values(config: OffloadConfig) -> dict[str, Any]:
    """Settings as flags have them: `states` beside `precision`."""
    settings, numerics = config.to_dict(), config.numerics
    return settings | {"precision": numerics.compute, "states": numerics.states}


def with_given(table: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of `OffloadConfig`: those of a table in a file, and over them those of flags."""
    settings = {**table, **given}
    if isinstance(precision := table.get("precision"), dict) and "precision" in given:
        # The flag is a part of what the table says.
        settings["precision"] = {**precision, "compute": given["precision"]}
    return with_states(settings)


def add_offload_flags(group: argparse._ArgumentGroup, offload: OffloadConfig, out: str) -> None:
    """Flags of tiers and storage; `offload` has the defaults, and `out` is what the command calls its directory."""
    defaults = flag_values(offload)

    def add(flag: str, name: str, help: str, **options: Any) -> None:
        if defaults[name] is not None and "default" not in help:
            help = f"{help} (default {defaults[name]})"
        group.add_argument(flag, dest=f"offload_{name}", help=help, **{"metavar": name.upper()} | options)

    add("--nvme", "nvme", f"directories of the NVMe tier (default: {out}/nvme)", nargs="+", metavar="DIR")
    add("--params-tier", "params", "device, cpu, nvme or auto", metavar="TIER")
    add("--grads-tier", "grads", "the same, for gradients", metavar="TIER")
    add("--optimizer-tier", "optimizer", "the same, for optimizer states", metavar="TIER")
    add(
        "--activations-tier",
        "activations",
        "the same, for what backward needs of forward (auto: device)",
        metavar="TIER",
    )
    add("--stage", "stage", "ZeRO stage: 0, 1, 2 or 3", type=int)
    add("--precision", "precision", "bf16, fp16 (with a dynamic loss scale) or fp32")
    add("--states", "states", "optimizer states: fp32, bf16 or compact (8 bits and scales)")
    add_budget_flags(group, "offload_")
    add("--durability", "durability", "commit (survives power loss), process (kill -9) or scratch")
    add(
        "--generation",
        "generation",
        "go on from this one (default: the newest; `zero-offload verify` lists what is there)",
        type=int,
        metavar="N",
    )
    add(
        "--commit-every",
        "commit_every",
        "between generations: steps, a duration such as 2min, or auto (commits take at most 2%% of the time)",
        type=steps_or_duration,
        metavar="STEPS|DURATION",
    )
    add(
        "--publish",
        "publish",
        "a directory or URL that gets copies of generations, as torch's checkpoints",
        metavar="DIR",
    )
    add(
        "--publish-every",
        "publish_every",
        "between such copies: steps or a duration",
        type=steps_or_duration,
        metavar="STEPS|DURATION",
    )
    add("--publish-keep", "publish_keep", "such copies that stay, the newest ones", type=int, metavar="N")


def add_budget_flags(group: argparse._ArgumentGroup, prefix: str = "") -> None:
    """Flags of memory; `prefix` stands before the names of their values."""
    for name, size in (("cpu", "8GiB"), ("device", "20GiB")):
        help = f"budget, for example {size} (default: what there is)"
        group.add_argument(f"--{name}-memory", dest=f"{prefix}{name}_memory", metavar="SIZE", help=help)


def flag_of(name: str) -> str:
    """The flag of a setting of `finetune`."""
    return "--no-packing" if name == "packing" else f"--{name.replace('_', '-')}"


def tier_flag_of(name: str) -> str:
    """The flag of a setting of tiers and storage."""
    return flag_of(name) + "-tier" * (name in ("params", "grads", "optimizer", "activations"))


# A folder that is only read


def add_folder_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("dir", metavar="DIR", help="a Hugging Face folder, or the folder of an adapter")


def add_tier_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("where the weights rest")
    group.add_argument("--nvme", nargs="+", metavar="DIR", help="directories for what memory has no room for")
    add_budget_flags(group)
    group.add_argument("--precision", default="bf16", help="bf16, fp16 or fp32 (default bf16)")
    group.add_argument(
        "--quantize", metavar="KIND", help=f"make linear layers {', '.join(QUANTIZATIONS)}, as an adapter's base was"
    )


# A folder's run


def _above_zero(kind: Callable[[str], float]) -> Callable[[str], float]:
    """The reader of a flag whose default is to leave it out: 0, which a file has for that, is not typed."""

    def number(text: str) -> float:
        if (value := kind(text)) == 0:
            raise argparse.ArgumentTypeError("0 is not a value of it; give another, or leave it out for the default")
        return value

    return number


def _count_or_auto(text: str) -> float | str:
    return text if text == "auto" else _above_zero(int)(text)


def add_finetune_flags(group: argparse._ArgumentGroup, names: Sequence[str] | None = None) -> None:
    """One for each setting of `finetune`, or for these; `finetune_` stands before the names of their values."""

    def add(flag: str, help: str, name: str = "", **options: Any) -> None:
        name = name or flag.removeprefix("--").replace("-", "_")
        default = getattr(FinetuneConfig, name)
        if default and "default" not in help and "action" not in options:
            help = f"{help} (default {default})"
        if names is None or name in names:
            options = options if "action" in options else {"metavar": name.upper()} | options
            group.add_argument(flag, dest=f"finetune_{name}", help=help, **options)

    # Data and outputs.
    add("--data", "files (JSONL, JSON, Parquet, CSV), folders or names of data sets", nargs="+", metavar="FILE")
    add("--eval-data", "the same, to evaluate on", nargs="+", metavar="FILE")
    add("--split", "share of the data that is kept for evaluation, for example 0.05", type=float)
    add("--method", f"auto (by the data's columns), {', '.join(TASKS)}", metavar="METHOD")
    add(
        "--out",
        "run directory, which gets the model (default: runs/MODEL-DATA, with --lora runs/MODEL-DATA-loraRANK-KIND)",
        metavar="OUT",
    )
    # Length and learning.
    add("--steps", "optimizer steps (default: as many as --epochs has)", type=_above_zero(int))
    add("--epochs", "passes over the data", type=float)
    add("--batch", "sequences per micro-batch and rank", type=int)
    add("--accumulate", "micro-batches per step", type=int)
    add("--seq", "the most tokens of a sequence (default 1024, or what the model takes)", type=_above_zero(int))
    add(
        "--lr",
        "peak learning rate (default: sft 1e-5, with --lora 2e-4; dpo 5e-7, 5e-6; mlm 5e-5, 5e-4; classify 2e-5, 5e-4)",
        type=_above_zero(float),
    )
    add("--warmup", "steps until the peak; below 1 a share of all steps, none if that is less than one", type=float)
    add("--weight-decay", "decay of the matrices (default 0)", type=float)
    add("--optimizer", "the class that steps, such as torch.optim.NAdam or zo.Muon (default: AdamW)", metavar="CLASS")
    add("--clip", "largest gradient norm", type=float)
    add("--seed", "of new weights and of the data's order (default 0)", type=int)
    # The trained part and the frozen one.
    add("--lora", "train adapters of this rank, such as 16 (default: all parameters)", type=int, metavar="RANK")
    add(
        "--lora-alpha",
        "adapters are scaled by ALPHA / RANK (default: twice the rank)",
        type=_above_zero(float),
        metavar="ALPHA",
    )
    add(
        "--lora-targets",
        "ends of names: layers, experts, gate, experts.down_proj (default: all linear layers, and most experts)",
        nargs="+",
        metavar="NAME",
    )
    add(
        "--live-blocks",
        "blocks trained at a time, the others resting without states; auto: as many as fit (default: all)",
        type=_count_or_auto,
        metavar="N",
    )
    orders = ", ".join(f"{order} {steps}" for order, steps in PERIODS.items())
    add("--live-order", f"order of such blocks: {', '.join(PERIODS)}", metavar="ORDER")
    add("--live-every", f"steps until others live (default: {orders})", type=_above_zero(int), metavar="STEPS")
    add("--live-master", "drop: round masters of blocks that rest, and free their room (default: keep)", metavar="WHAT")
    add("--quantize", f"make the frozen linear layers {', '.join(QUANTIZATIONS)}; with --lora", metavar="KIND")
    add("--group-size", "frozen experts fetched together (default: as many as 256 MiB hold)", type=_above_zero(int))
    add("--recompute", f"activations in backward: {' (computed again) or '.join(RECOMPUTE)} (kept)")
    # Evaluation and the end.
    add("--eval-every", "steps between evaluations (default: ten in a run)", type=_above_zero(int), metavar="STEPS")
    add("--patience", "evaluations without a better loss that end the run (default: none do)", type=int, metavar="N")
    add("--samples", "texts that the model writes at each evaluation", type=int, metavar="N")
    merges = "write OUT/merged too: the base with the adapter merged into it"
    add("--merge", merges, action="store_const", const=True)
    add("--no-packing", "one sample per sequence, padded", "packing", action="store_const", const=False)


def add_folder_flags(group: argparse._ArgumentGroup) -> None:
    """Those of `finetune` alone; defaults are its own."""
    add_finetune_flags(group, FOLDER_SETTINGS)
