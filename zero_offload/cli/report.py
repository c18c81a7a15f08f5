"""`zero-offload report RUN`: the page, the picture and the summary of a run, from its metrics file alone.

Owns the flags and what is printed. Never trains and never changes a metric.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from zero_offload.base.errors import ConfigError, ZeroOffloadError
from zero_offload.base.types import format_bytes, user_path
from zero_offload.runs.locate import base_of, base_text
from zero_offload.runs.reader import Run, read_run
from zero_offload.runs.report.files import write_pages
from zero_offload.runs.report.summary import IN_TABLES, summarize, tables
from zero_offload.runs.report.watch import watch

_WORDS: dict[str, tuple[str, Callable[[Any], str]]] = {
    "steps": ("steps", "{:,}".format),
    "steps_planned": ("steps planned", "{:,}".format),
    "loss": ("training loss", "{:.4g}".format),
    "validation_loss": ("validation loss", "{:.4g}".format),
    "unigram_nats": ("entropy of the data, nats/byte", "{:.4g}".format),
    "step_s": ("seconds per step, median", "{:.4g}".format),
    "tokens_per_s": ("tokens/s, median", "{:,.0f}".format),
    "waited_share": ("waited, of the run's time", "{:.1%}".format),
    "commit_wait_share": ("updates waited for commits", "{:.1%}".format),
    "nvme_read_bytes_per_step": ("read from drives per step", format_bytes),
    "nvme_written_bytes_per_step": ("written to drives per step", format_bytes),
    "peak_rss_bytes": ("peak memory of the process", format_bytes),
    "planned_rss_bytes": ("planned memory of the process", format_bytes),
    "resumes": ("resumes", str),
    "base": ("files of the base", str),
    "page": ("page", str),
    "report": ("picture", str),
}
"""Entries of the summary as they are printed; `--json` has their names."""


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
    pages, failure = write_pages(found, args.tbw, out, lambda text: print(f"note: {text}", file=sys.stderr))
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
        return None  # no generation, or `verify` tells of it
    if base is None or base.problem:
        return None if base is None else base.problem
    return base_text(base) + f"; {base.written} was written since, see zero-offload doctor" * bool(base.written)


def _print(run: Run, summary: Mapping[str, Any], pages: Mapping[str, str | None]) -> None:
    for name, value in {**summary, **pages}.items():
        if name not in IN_TABLES and value is not None:
            words, text = _WORDS[name]
            print(f"{words:<34}{text(value)}")
    for table in tables(run, summary):
        print()
        for label, *cells in ((table.title, *table.head), *table.rows):
            print(f"{label:<34}" + "".join(f"{cell:>12}" for cell in cells))
        for note in table.notes:
            print(note)
