"""`zero-offload finetune`: flags and a TOML file become a `FinetuneConfig`; the run does the rest.

Owns the flags and what is printed at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from zero_offload.base.errors import CapacityError, ConfigError
from zero_offload.base.types import Existing
from zero_offload.checkpoint.run_dir import METRICS_FILE
from zero_offload.cli.flags import (
    INTERRUPTED_EXIT_CODE,
    given_flags,
    with_given,
)
from zero_offload.finetune.model.folder import quiet_libraries
from zero_offload.finetune.settings import TABLE, FinetuneConfig
from zero_offload.runs.report.files import write_reports
from zero_offload.runs.settings import read_tables
from zero_offload.runs.stop import Ending


def run(args: argparse.Namespace) -> int:
    named = args.finetune_model or ""
    if named.endswith(".toml") and not os.path.isdir(named):
        raise ConfigError(f"{named} is read as the model's folder; settings are given by --config {named}")
    table, offload = read_tables(args.config, TABLE) if args.config else ({}, {})
    given, offload_given = given_flags(args, "finetune_"), given_flags(args, "offload_")
    config = FinetuneConfig.from_tables(table | given, with_given(offload, offload_given))
    quiet_libraries()
    from zero_offload.finetune.run import finetune  # brings transformers and trl

    existing = Existing.DISCARD if args.discard else Existing.RESUME
    result = finetune(config, existing, sys.stderr if args.json else sys.stdout, dry_run=args.dry_run)
    if int(os.environ.get("RANK", "0")) == 0:
        has_run = not args.dry_run and (result.out / METRICS_FILE).is_file()
        reports = write_reports(result.out, lambda text: print(text, file=sys.stderr)) if has_run else {}
        if args.json:
            print(json.dumps(vars(result) | {"out": str(result.out)} | reports))
        elif result.ending is Ending.FINISHED:
            print("\n".join(_where(result.out, config.method, config.quantize)))
        if page := not args.json and reports.get("page"):
            print(f"report: {page}")
    if result.plan is not None and not result.plan["fits"]:
        return CapacityError.exit_code
    return INTERRUPTED_EXIT_CODE if result.ending is Ending.INTERRUPTED else 0


def _where(out: Path, asked: str, quantize: str) -> Iterator[str]:
    as_trained = f" --quantize {quantize}" if quantize else ""
    if asked in ("mlm", "classify"):  # "auto" is for models that write text
        as_trained += f" --method {asked}"
    else:
        yield f"talk to it: zero-offload chat {out}{as_trained}"
    yield f"measure it: zero-offload evaluate {out} --data FILES{as_trained}"
