"""`zero-offload clean RUNDIR`: delete a run's files, and nothing else, once the user has seen which and said yes.

Owns the flags, the question and what is printed.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from zero_offload.base.errors import ConfigError
from zero_offload.base.types import format_bytes, user_path
from zero_offload.runs.clean import Cleaned, clean


def run(args: argparse.Namespace) -> int:
    run_dir = user_path(args.run_dir)
    if args.dry_run or not args.yes:
        planned = clean(run_dir, dry_run=True)
        if not args.json or not args.dry_run:
            print("\n".join(_lines(planned, dry_run=True)), file=sys.stderr if args.json else sys.stdout)
        if not args.dry_run and not _agreed(run_dir, planned):
            print("nothing was deleted", file=sys.stderr)
            return ConfigError.exit_code
    results = planned if args.dry_run else clean(run_dir)
    if args.json:
        print(json.dumps({"directories": [asdict(result) for result in results]}, indent=2))
    elif not args.dry_run:
        print("\n".join(_lines(results, dry_run=False)))
    return 0


def _agreed(run_dir: Path, planned: Sequence[Cleaned]) -> bool:
    """True if the user says yes. Raises ConfigError where there is no terminal to ask at."""
    count, nbytes = sum(len(each.deleted) for each in planned), sum(each.freed_bytes for each in planned)
    what = f"{count} files ({format_bytes(nbytes)}) of {run_dir}"
    if not sys.stdin.isatty():
        raise ConfigError(
            f"clean would delete {what}, and there is no terminal to ask at; nothing was deleted. Add --yes to delete "
            "them, or --dry-run to see them only"
        )
    sys.stderr.write(f"Delete these {what}? They cannot be restored. [y/N] ")
    sys.stderr.flush()
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _lines(results: Sequence[Cleaned], *, dry_run: bool) -> Iterator[str]:
    freed, left, deleted = ("would free", "would leave", "would delete") if dry_run else ("freed", "left", "deleted")
    for result in results:
        yield f"{result.path}: {freed} {format_bytes(result.freed_bytes)} in {len(result.deleted)} files"
        for name in result.left:
            yield f"  {left} {name}: no manifest names it"
        for name in result.deleted:
            what = f", {result.generations[name]}" if name in result.generations else ""
            yield f"  {deleted} {name}: {format_bytes(result.file_bytes[name])}{what}"
        if result.is_gone:
            yield f"  {deleted} the directory, with nothing else in it"
