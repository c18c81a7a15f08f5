"""`zero-offload report RUN`: draws the report of a run again and prints its summary.

Owns the flags and the printed table. Calls: `add_parser`, then `run`.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "report",
        help="plots and summary of a run",
        description="Draw RUN/report.png from RUN/metrics.jsonl and print a summary; works while RUN trains.",
    )
    parser.add_argument("run_dir", type=Path, metavar="RUN", help="run directory that `train` wrote")
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from zero_offload.recipes.run_dir import read_run
    from zero_offload.telemetry.report import summarize, write_report

    summary = summarize(read_run(args.run_dir))
    summary["report"] = str(write_report(args.run_dir))
    if args.json:
        print(json.dumps(summary))
        return 0
    width = max(map(len, summary))
    for name, value in summary.items():
        print(f"{name:<{width}}  {value:.4g}" if isinstance(value, float) else f"{name:<{width}}  {value}")
    return 0
