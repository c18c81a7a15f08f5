"""`make nightly [ARGS="PART ..."]`: what takes too long for each change. A second start goes on where the first ended.

A check counts for one state of the source: an edit begins all anew. The result of each part's last run becomes its row
of docs/TEST-ALL.md. Exit code 1 when a check fails, 3 when a part cannot run here or has not ended.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date

from tests.nightly.record import RECORDS_OF_RUNS, ROOT, Record

TOOLS_TESTS = (
    "tests/integrations",
    "tests/fake_gpu/test_tools.py",
    "tests/fake_gpu/test_distributed_checkpoint.py",
    "tests/fake_gpu/test_generate.py",
    "tests/fake_gpu/test_programs_of_tools.py",
    "tests/zoo",
)
"""As in the Makefile."""
LONG = ("-o", "faulthandler_timeout=3600")
"""Hundreds of random programs, one test, take minutes, and more beside other work."""
PYTEST = (sys.executable, "-m", "pytest", "-q", "-p", "tests.nightly.plugin", "--no-loadscope-reorder", *LONG)
NO_TEST_LEFT = 5
"""An exit code of pytest."""
GRACE_S = 60
STOPPED = 130


@dataclass(frozen=True)
class Part:
    """`counts_itself`: the command notes each check as it ends; else the command is one check."""

    name: str
    checks: str
    command: tuple[str, ...]
    counts_itself: bool = True
    needs: tuple[str, ...] = ()

    def missing(self) -> list[str]:
        return [program for program in self.needs if shutil.which(program) is None]


PARTS = (
    Part("sanitizers", "native driver under the address and undefined-behaviour sanitizers", ("make", "asan"), False),
    Part("threads", "native driver under the thread sanitizer", ("make", "tsan"), False),
    Part(
        "arm64",
        "native driver and kernels on arm64, in an emulator",
        ("make", "neon"),
        False,
        ("aarch64-linux-gnu-g++", "qemu-aarch64-static"),
    ),
    Part(
        "tools",
        "`full` of `make test-tools`",
        (*PYTEST, "-n", "3", "--dist", "loadfile", "-m", "full", *TOOLS_TESTS),
    ),
    Part(
        "crash",
        "`full` of tests/crash: every crash point, missing barriers, kills",
        (*PYTEST, "-n", "3", "--dist", "load", "-m", "full and not tools", "tests/crash"),
    ),
    Part("faults", "each fault of tests/faults is caught by its test", (sys.executable, "-m", "tests.faults")),
    Part(
        "matrices",
        "`full` of the rest: whole matrices, random programs, exhaustive loops, programs of the docs",
        (*PYTEST, "-n", "3", "--dist", "loadfile", "-m", "full and not tools", "--ignore=tests/crash", "tests"),
    ),
)


def run(part: Part, record: Record, until: float) -> int:
    """Exit code of the command, or STOPPED where time was up or Ctrl-C came."""
    begun = time.monotonic()
    process = subprocess.Popen(
        part.command,
        cwd=ROOT,
        env=os.environ | {"NIGHTLY_RECORD": str(record.path), "PYTHONPATH": str(ROOT)},
        start_new_session=True,
    )
    try:
        code = process.wait(max(0.0, until - begun))
    except (subprocess.TimeoutExpired, KeyboardInterrupt):
        _stop(process)
        code = STOPPED
    record.spend(round(time.monotonic() - begun, 1))
    if not part.counts_itself and code != STOPPED:
        record.collect(1)
        record.end(part.name, "failed" if code else "passed")
    return code


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Ctrl-C to the whole group; what does not end by that is killed."""
    os.killpg(process.pid, signal.SIGINT)
    try:
        process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def commit() -> str:
    """Short name of the commit, with "changed" where a file differs from it, but for the page that this writes."""

    def git(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)

    name = git("rev-parse", "--short", "HEAD").stdout.strip()
    page = RECORDS_OF_RUNS.relative_to(ROOT)
    is_changed = git("diff", "--quiet", "HEAD", "--", ".", f":!{page}").returncode != 0
    return f"{name or 'no commit'}{' (changed)' if name and is_changed else ''}"


def write_row(part: Part, said: str) -> None:
    """The part's row of docs/TEST-ALL.md."""
    row = f"| `{part.name}` | {part.checks} | {date.today()}, {commit()} | {said} |"
    lines = RECORDS_OF_RUNS.read_text().splitlines()
    for number, line in enumerate(lines):
        if line.startswith(f"| `{part.name}` |"):
            lines[number] = row
            break
    else:
        raise SystemExit(f"{RECORDS_OF_RUNS} has no row that begins with | `{part.name}` |: add one")
    RECORDS_OF_RUNS.write_text("\n".join(lines) + "\n")


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.nightly", description=__doc__)
    names = [part.name for part in PARTS]
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(names)}; without any: all")
    parser.add_argument(
        "--minutes", type=float, default=float("inf"), help="stop after as many; the next start goes on"
    )
    chosen = parser.parse_args(arguments)
    if unknown := [name for name in chosen.parts if name not in names]:
        parser.error(f"no part has the name {', '.join(unknown)}; parts are {', '.join(names)}")
    until, results = time.monotonic() + chosen.minutes * 60, []
    for part in PARTS:
        if chosen.parts and part.name not in chosen.parts:
            continue
        result, said = _result(part, until)
        results.append(result)
        print(f"{part.name}: {said}", flush=True)
    return max(results, key=(0, 3, 1).index)


def _result(part: Part, until: float) -> tuple[int, str]:
    """Runs what is left of a part: 0, 1 or 3, and a line about it."""
    if missing := part.missing():
        return 3, f"not run: install {', '.join(missing)}"
    record = Record.of(part.name)
    code = 0
    if not record.is_complete or record.failed:
        if time.monotonic() >= until:
            return 3, f"no time left: {record.summary()}"
        code = run(part, record, until)
        record = Record.of(part.name)
        write_row(part, record.summary())
    if record.failed:
        return 1, "\n  ".join([record.summary(), *record.failed])
    if code not in (0, NO_TEST_LEFT) or not record.is_complete:
        return 3, f"stopped: {record.summary()}; the same command goes on" if code == STOPPED else f"exit code {code}"
    return 0, record.summary()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
