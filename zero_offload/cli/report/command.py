"""`zero-offload report RUN`: the page, the picture and the summary of a run, from its metrics file alone.

Owns the flags and what is printed. Never trains and never changes a metric. `write_reports(run)` is for a run's end.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from zero_offload.base.errors import CapacityError, ConfigError, ZeroOffloadError
from zero_offload.base.spans import Cause
from zero_offload.base.types import format_bytes
from zero_offload.checkpoint.run_dir import METRICS_FILE, PAGE_FILE, PICTURE_FILE, RUN_FILE
from zero_offload.cli.recipes.run_dir import Run, read_run
from zero_offload.cli.report.page import write_page
from zero_offload.cli.report.picture import write_picture
from zero_offload.cli.report.summary import WAITS, require_rows, summarize
from zero_offload.cli.report.watch import PORT, watch
from zero_offload.plan.wear import TBW_USUAL

_DESCRIPTION = """\
Draw RUN/report.html, a page with plots to hover and zoom that needs no other file, and RUN/report.png; print a summary.
Works while RUN trains; with --watch the page follows it."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "report",
        help="plots and summary of a run",
        description=_DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run_dir", type=Path, metavar="RUN", help="run directory of a command, or of zo.RunLog")
    parser.add_argument("--watch", action="store_true", help="serve the page on this machine until the run has ended")
    parser.add_argument("--port", type=int, metavar="PORT", help=f"of --watch (default: {PORT}, or any that is free)")
    parser.add_argument(
        "--tbw", type=float, default=TBW_USUAL, help="rating of one drive, TB written (default %(default)g)"
    )
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    path = args.run_dir.expanduser()
    if not args.tbw > 0:
        raise ConfigError(f"--tbw {args.tbw:g}: give the terabytes that a drive may have written to it, as 600")
    if args.port is not None and not 0 < args.port < 2**16:
        raise ConfigError(f"--port {args.port}: give a number from 1 to 65535")
    if args.watch:
        watch(path, args.tbw, args.port, lambda text: print(text, file=sys.stderr, flush=True))
    found = read_run(path)
    for note in found.notes:
        print(f"note: {note}", file=sys.stderr)
    summary = summarize(found)
    pages, failure = _write(found, args.tbw, lambda text: print(f"note: {text}", file=sys.stderr))
    _print(args, summary | pages, found.description["identity"].get("ranks", 1))
    if failure is not None:
        raise failure
    return 0


def write_reports(path: Path, note: Callable[[str], None]) -> dict[str, str | None]:
    """Write page and picture at a run's end, as far as they can be; `note` gets why one cannot. Paths by name.

    Nothing is written where both are newer than what they show: the run was over already.
    """
    files = {"page": path / PAGE_FILE, "report": path / PICTURE_FILE}
    shown = [each.stat().st_mtime_ns for each in (path / RUN_FILE, path / METRICS_FILE) if each.is_file()]
    if all(each.is_file() and each.stat().st_mtime_ns > max(shown, default=0) for each in files.values()):
        return {name: str(each) for name, each in files.items()}
    try:
        pages, failure = _write(require_rows(read_run(path)), TBW_USUAL, note)
    except ZeroOffloadError as error:
        pages, failure = {"page": None, "report": None}, error
    if failure is not None:
        note(f"no report: {failure}")
    return pages


def _write(
    found: Run, tbw: float, note: Callable[[str], None]
) -> tuple[dict[str, str | None], ZeroOffloadError | None]:
    """Paths of page and picture, None where it cannot be written, and the first error."""
    pages: dict[str, str | None] = {}
    failure: ZeroOffloadError | None = None
    writers: dict[str, Callable[[], Path]] = {
        "page": lambda: write_page(found, tbw),
        "report": lambda: write_picture(found),
    }
    for name, write in writers.items():
        try:
            pages[name] = str(write())
        except CapacityError as error:  # without matplotlib there is the page
            pages[name] = None
            note(str(error))
        except ZeroOffloadError as error:
            pages[name] = None
            failure = failure or error
    return pages, failure


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


def _tables(summary: Mapping[str, Any], of_rank: str) -> Iterator[str]:
    """`of_rank` stands behind the titles of bytes and memory."""
    if times := summary["step_time_s"]:
        yield from ("", f"{'where the step went':<34}{'s per step':>12}{'share':>8}")
        yield _time_line("forward, backward and the rest", times["compute"], times["step"])
        yield from (_time_line(WAITS[cause], times[cause], times["step"]) for cause in Cause if times[cause])
        yield _time_line("step", times["step"], times["step"])
        if summary["update_overlap"] is not None:
            yield f"{summary['update_overlap']:.1%} of the update was hidden"
    if traced := summary["traced_steps"]:
        yield from ("", f"{'steps {first} to {last}, traced'.format(**traced):<34}{'s per step':>12}{'share':>8}")
        for name in ("forward", "backward", "waited", "other", "step"):
            yield _time_line(name, traced[f"{name}_s"], traced["step_s"])
        for name, words in (("update", "the update's time,"), ("transfer", "the time of transfers,")):
            seconds, overlap = traced[f"{name}_s"], traced[f"{name}_overlap"]
            yield f"of {words} {seconds:.4g} s per step, {overlap:.1%} lay beside compute"
    yield from ("", f"{'bytes per step' + of_rank:<34}{'read':>12}{'written':>12}")
    for tier, moved in summary["bytes_per_step"].items():
        if any(moved.values()):
            yield f"{tier:<34}{format_bytes(moved['read']):>12}{format_bytes(moved['written']):>12}"
    yield from ("", f"{'memory' + of_rank:<34}{'planned':>12}{'at most':>12}{'ratio':>10}")
    for place, each in summary["memory"].items():
        planned, measured = each["planned_bytes"], each["measured_bytes"]
        if planned or measured:
            ratio = f"{measured / planned:.2f}" if planned else "-"
            yield f"{place:<34}{format_bytes(planned):>12}{format_bytes(measured):>12} {ratio:>9}"
    yield "(process: its resident set, activations included, against what it was before the model and the plan)"


def _time_line(words: str, seconds: float, whole: float) -> str:
    return f"{words:<34}{seconds:>12.4g}{seconds / whole:>8.1%}"
