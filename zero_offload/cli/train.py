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

from zero_offload.base.errors import ConfigError
from zero_offload.base.types import Existing
from zero_offload.cli.flags import INTERRUPTED_EXIT_CODE, given_flags, with_given
from zero_offload.finetune.pretrain.settings import TrainConfig
from zero_offload.finetune.pretrain.train import train
from zero_offload.runs.report.files import write_reports
from zero_offload.runs.settings import read_tables
from zero_offload.runs.stop import Ending


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
