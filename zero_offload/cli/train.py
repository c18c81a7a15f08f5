"""`zero-offload train`: flags and a TOML file become a `TrainConfig`; the run does the rest.

Owns the flags and what is printed at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zero_offload.base.errors import ConfigError
from zero_offload.base.types import Existing
from zero_offload.cli.flags import INTERRUPTED_EXIT_CODE, add_offload_flags, given_flags, with_given
from zero_offload.finetune.gpt import PRESETS
from zero_offload.finetune.pretrain.settings import TrainConfig
from zero_offload.finetune.pretrain.train import train
from zero_offload.runs.report.files import write_reports
from zero_offload.runs.settings import read_tables
from zero_offload.runs.stop import Ending

_DESCRIPTION = """\
Train a causal language model on text, its ZeRO shards on the tiers you choose.
With no arguments: a small GPT on the Python standard library's sources, parameters and optimizer states on
NVMe. The same command again continues an interrupted run at its last commit. Flags override run.toml, whose
tables are [train] (settings named as the flags here, with _ for -) and [offload] (the fields of OffloadConfig, with
fractions such as params = { cpu = 0.5, nvme = 0.5 })."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "train",
        help="train a language model on text",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", nargs="?", type=Path, metavar="run.toml", help="settings of the run")
    _add_train_flags(parser.add_argument_group("the run"))
    add_offload_flags(parser.add_argument_group("where states rest"), TrainConfig().offload, "RUNDIR")
    parser.add_argument("--discard", action="store_true", help="delete an earlier run in the same place first")
    parser.add_argument("--json", action="store_true", help="print the result as JSON; progress goes to stderr")


def run(args: argparse.Namespace) -> int:
    train_table, offload_table = read_tables(args.file) if args.file else ({}, {})
    given, offload_given = given_flags(args, "train_"), given_flags(args, "offload_")
    _check_file(args.file, [*given.get("data", ()), *offload_given.get("nvme", ())])
    config = TrainConfig.from_tables(train_table | given, with_given(offload_table, offload_given))
    stream = sys.stderr if args.json else sys.stdout
    result = train(config, Existing.DISCARD if args.discard else Existing.RESUME, stream)
    if int(os.environ.get("RANK", "0")) == 0:
        reports = write_reports(result.out, lambda text: print(text, file=sys.stderr))
        if args.json:
            print(json.dumps(vars(result) | {"out": str(result.out)} | reports))
        else:
            files = "metrics and sample" if result.ending is Ending.FINISHED else "metrics"
            print(f"{files}: {result.out}" + (f"; report: {page}" if (page := reports["page"]) else ""))
    return INTERRUPTED_EXIT_CODE if result.ending is Ending.INTERRUPTED else 0


def _check_file(file: Path | None, paths: Sequence[str]) -> None:
    """Flags that take several paths take a run.toml behind them as well."""
    if file is None and (found := next((path for path in paths if path.endswith(".toml")), "")):
        raise ConfigError(f"{found} is read as one of several paths of the flag before it; write it before the flags")


def _add_train_flags(group: argparse._ArgumentGroup) -> None:
    def add(flag: str, help: str, **options: Any) -> None:
        name = flag.removeprefix("--").replace("-", "_")
        default = getattr(TrainConfig, name)
        if default and "default" not in help:
            help = f"{help} (default {default})"
        group.add_argument(flag, dest=f"train_{name}", help=help, **{"metavar": name.upper()} | options)

    add("--model", f"preset: {', '.join(PRESETS)}", metavar="PRESET")
    add("--data", "text to train on (default: the Python standard library)", nargs="+", metavar="FILE_OR_DIR")
    add("--out", "run directory (default: runs/NAME_OF_THE_DATA)", metavar="RUNDIR")
    add("--steps", "optimizer steps", type=int)
    add("--seq", "bytes per sequence", type=int)
    add("--batch", "sequences per micro-batch and rank", type=int)
    add("--accumulate", "micro-batches per step", type=int)
    add("--lr", "peak learning rate", type=float)
    add("--warmup", "steps until the peak", type=int)
    add("--weight-decay", "decay of the matrices", type=float)
    add("--clip", "largest gradient norm", type=float)
    add("--seed", "of the weights and of the data's order", type=int)
    add("--eval-every", "steps between validation losses", type=int)
    add("--trace", "steps to trace, after the second: RUNDIR/trace.json", type=int, metavar="STEPS")
    add(
        "--recompute",
        "activations in backward: none (kept) or block (computed again from the block's inputs, as zo.checkpoint) "
        "(default: as the preset)",
    )
