"""The command line of a script: its comparisons are subcommands, and share some options."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

BENCHMARKS = Path(__file__).parent.parent
PEER_MISSING_EXIT_CODE = 3


def run(description: str, package: str, comparisons: Mapping[str, str]) -> int:
    """Run the comparison that the first argument names, or the first of `comparisons` (name -> what it compares).

    `--list` prints their names. A comparison is a module of `harness.PACKAGE` with `main(arguments) -> exit code`. It
    is imported only here, since some import much.
    """
    first, *rest = sys.argv[1:] or [""]
    if first == "--list":
        print(*comparisons)
        return 0
    if first in ("-h", "--help"):
        print(f"{description}\ncomparisons (the first is the default; COMPARISON --help has options and bars):")
        print(*(f"  {name:<13} {what}" for name, what in comparisons.items()), sep="\n")
        return 0
    if first and not first.startswith("-") and first not in comparisons:
        print(f"Unknown comparison {first!r}; choose one of {', '.join(comparisons)}", file=sys.stderr)
        return 2
    name = first if first in comparisons else next(iter(comparisons))
    arguments = rest if first in comparisons else sys.argv[1:]
    code: int = importlib.import_module(f"harness.{package}.{name}").main(arguments)
    return code


def parser(module: str, description: str | None, quick: str) -> argparse.ArgumentParser:
    """Of a comparison's module: with `--quick` and `--json`; `quick` says what is left out."""
    made = argparse.ArgumentParser(
        prog=f"{Path(sys.argv[0]).name} {module.rpartition('.')[2]}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("--quick", action="store_true", help=f"{quick}; some minutes")
    made.add_argument("--json", type=Path, metavar="FILE", help="write the rows here")
    return made


def add_nvme(made: argparse.ArgumentParser) -> None:
    made.add_argument("--nvme", type=Path, metavar="DIR", help="directory on the disk to use (default: this one)")


def add_workers(made: argparse.ArgumentParser) -> None:
    """The options of a comparison whose systems live in processes of their own: see `worker_command`."""
    add_nvme(made)
    made.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    made.add_argument("--worker", help=argparse.SUPPRESS)


def worker_command(
    script: str, comparison: str, worker: str, *options: object, python: str = sys.executable
) -> list[str]:
    """The command of a process that runs `main` of the same comparison with `--worker WORKER` and the options."""
    return [python, str(BENCHMARKS / script), comparison, "--worker", worker, *map(str, options)]


@contextlib.contextmanager
def scratch_directory(parent: Path | None) -> Iterator[Path]:
    """A new directory on the disk to use, by default in the current one; it is deleted at the end."""
    with tempfile.TemporaryDirectory(prefix="zero_offload_bench_", dir=parent or Path.cwd()) as directory:
        yield Path(directory)
