"""`zero-offload report RUN`: draws the report of a run again and prints its summary.

Owns the flags and the printed tables. Calls: `add_parser`, then `run`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from zero_offload.base.errors import ZeroOffloadError
from zero_offload.base.spans import Cause
from zero_offload.base.types import format_bytes
from zero_offload.cli.recipes.report import WAITS, summarize, write_report
from zero_offload.cli.recipes.run_dir import read_run


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
    found = read_run(args.run_dir)
    for note in found.notes:
        print(f"note: {note}", file=sys.stderr)
    summary, failure = summarize(found), None
    try:
        summary["report"] = str(write_report(args.run_dir))
    except ZeroOffloadError as error:
        summary["report"], failure = None, error  # the figures are there all the same
    _print(args, summary, found.description.get("identity", {}).get("ranks", 1))
    if failure is not None:
        raise failure
    return 0


def _print(args: argparse.Namespace, summary: Mapping[str, Any], num_ranks: int) -> None:
    if args.json:
        print(json.dumps(summary))
        return
    tables = ("step_time_s", "bytes_per_step", "memory", "traced_steps", "update_overlap")
    figures = {name: value for name, value in summary.items() if name not in tables}
    width = max(map(len, figures))
    for name, value in figures.items():
        print(f"{name:<{width}}  {value:.4g}" if isinstance(value, float) else f"{name:<{width}}  {value}")
    for line in _tables(summary, " of rank 0" if num_ranks > 1 else ""):
        print(line)


def _tables(summary: Mapping[str, Any], whose: str) -> Iterator[str]:
    """`whose` bytes and memory are."""
    if times := summary["step_time_s"]:
        yield from ("", f"{'where the step went':<34}{'s per step':>12}{'share':>8}")
        yield _time("forward, backward and the rest", times["compute"], times["step"])
        yield from (_time(WAITS[cause][0], times[cause], times["step"]) for cause in Cause if times[cause])
        yield _time("step", times["step"], times["step"])
        if summary["update_overlap"] is not None:
            yield f"{summary['update_overlap']:.1%} of the update was hidden"
    if traced := summary["traced_steps"]:
        yield from ("", f"{'steps {first} to {last}, traced'.format(**traced):<34}{'s per step':>12}{'share':>8}")
        for name in ("forward", "backward", "waited", "other", "step"):
            yield _time(name, traced[f"{name}_s"], traced["step_s"])
        for name, words in (("update", "the update's time,"), ("transfer", "the time of transfers,")):
            seconds, overlap = traced[f"{name}_s"], traced[f"{name}_overlap"]
            yield f"of {words} {seconds:.4g} s per step, {overlap:.1%} lay beside compute"
    yield from ("", f"{'bytes per step' + whose:<34}{'read':>12}{'written':>12}")
    for tier, moved in summary["bytes_per_step"].items():
        if any(moved.values()):
            yield f"{tier:<34}{format_bytes(moved['read']):>12}{format_bytes(moved['written']):>12}"
    yield from ("", f"{'memory' + whose:<34}{'planned':>12}{'at most':>12}{'ratio':>10}")
    for place, each in summary["memory"].items():
        planned, measured = each["planned_bytes"], each["measured_bytes"]
        if planned or measured:
            ratio = f"{measured / planned:.2f}" if planned else "-"
            yield f"{place:<34}{format_bytes(planned):>12}{format_bytes(measured):>12} {ratio:>9}"
    yield "(process: its resident set, activations included, against what it was before the model and the plan)"


def _time(words: str, seconds: float, whole: float) -> str:
    return f"{words:<34}{seconds:>12.4g}{seconds / whole:>8.1%}"
