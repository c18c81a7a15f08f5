"""`zero-offload report RUN`: the page, the picture and the summary of a run, from its metrics file alone.

Owns the flags and what is printed. Never trains and never changes a metric. `write_reports(run)` is for a run's end.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from zero_offload.base.errors import CapacityError, ConfigError, ZeroOffloadError
from zero_offload.base.types import user_path
from zero_offload.checkpoint.run_dir import METRICS_FILE, PAGE_FILE, PICTURE_FILE, RUN_FILE
from zero_offload.plan.wear import TBW_USUAL
from zero_offload.runs.locate import base_of, base_text
from zero_offload.runs.reader import Run, read_run
from zero_offload.runs.report.page import write_page
from zero_offload.runs.report.picture import write_picture
from zero_offload.runs.report.summary import IN_TABLES, require_rows, summarize, tables
from zero_offload.runs.report.watch import PORT, watch
from zero_offload.storage.files.system import is_not_writable

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
    parser.add_argument("--out", type=Path, metavar="DIR", help="where page and picture go (default: RUN)")
    parser.add_argument("--watch", action="store_true", help="serve the page on this machine until the run has ended")
    parser.add_argument("--port", type=int, metavar="PORT", help=f"of --watch (default: {PORT}, or any that is free)")
    parser.add_argument(
        "--tbw", type=float, default=TBW_USUAL, help="rating of one drive, TB written (default %(default)g)"
    )
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    path = user_path(args.run_dir)
    if not args.tbw > 0:
        raise ConfigError(f"--tbw {args.tbw:g}: give the terabytes that a drive may have written to it, as 600")
    if args.port is not None and not 0 < args.port < 2**16:
        raise ConfigError(f"--port {args.port}: give a number from 1 to 65535")
    if args.watch:
        watch(path, args.tbw, args.port, lambda text: print(text, file=sys.stderr, flush=True))
    found = read_run(path)
    for note in found.notes:
        print(f"note: {note}", file=sys.stderr)
    summary = summarize(found) | ({"base": base} if (base := _base(path)) is not None else {})
    out = path if args.out is None else user_path(args.out)
    pages, failure = _write(found, args.tbw, out, lambda text: print(f"note: {text}", file=sys.stderr))
    if args.json:
        print(json.dumps(summary | pages))
    else:
        _print(found, summary, pages)
    if failure is not None:
        raise failure
    return 0


def _base(path: Path) -> str | None:
    """The files of others that the run reads, and what is wrong with them."""
    try:
        base = base_of(path)
    except ZeroOffloadError:
        return None  # no generation, or one that `verify` tells of
    if base is None or base.problem:
        return None if base is None else base.problem
    return base_text(base) + f"; {base.written} was written since, see zero-offload doctor" * bool(base.written)


def write_reports(path: Path, note: Callable[[str], None]) -> dict[str, str | None]:
    """Write page and picture at a run's end, as far as they can be; `note` gets why one cannot. Paths by name.

    Nothing is written where both are newer than what they show: the run was over already.
    """
    files = {"page": path / PAGE_FILE, "report": path / PICTURE_FILE}
    shown = [each.stat().st_mtime_ns for each in (path / RUN_FILE, path / METRICS_FILE) if each.is_file()]
    if all(each.is_file() and each.stat().st_mtime_ns > max(shown, default=0) for each in files.values()):
        return {name: str(each) for name, each in files.items()}
    try:
        pages, failure = _write(require_rows(read_run(path)), TBW_USUAL, path, note)
    except ZeroOffloadError as error:
        pages, failure = {"page": None, "report": None}, error
    if failure is not None:
        note(f"no report: {failure}")
    return pages


def _write(
    found: Run, tbw: float, out: Path, note: Callable[[str], None]
) -> tuple[dict[str, str | None], ZeroOffloadError | None]:
    """Paths of page and picture in `out`, None where it cannot be written, and the first error.

    That of a run which may only be read is none: its summary is there.
    """
    pages: dict[str, str | None] = {}
    failure: ZeroOffloadError | None = None
    writers: dict[str, Callable[[], Path]] = {
        "page": lambda: write_page(found, tbw, out),
        "report": lambda: write_picture(found, out),
    }
    for name, write in writers.items():
        try:
            pages[name] = str(write())
        except CapacityError as error:  # without matplotlib there is the page
            pages[name] = None
            note(str(error))
        except ZeroOffloadError as error:
            pages[name] = None
            if out == found.path and is_not_writable(error):
                note(f"{error}: give --out DIR")
            else:
                failure = failure or error
    return pages, failure


def _print(run: Run, summary: Mapping[str, Any], pages: Mapping[str, str | None]) -> None:
    figures = {name: value for name, value in {**summary, **pages}.items() if name not in IN_TABLES}
    width = max(map(len, figures))
    for name, value in figures.items():
        print(f"{name:<{width}}  {value:.4g}" if isinstance(value, float) else f"{name:<{width}}  {value}")
    for table in tables(run, summary):
        print()
        for label, *cells in ((table.title, *table.head), *table.rows):
            print(f"{label:<34}" + "".join(f"{cell:>12}" for cell in cells))
        for note in table.notes:
            print(note)
