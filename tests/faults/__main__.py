"""`python -m tests.faults [WORDS]`: apply each fault whose behaviour has the words, and run the test that must fail.

Each is applied to a copy of the package, one at a time. Without a fault all of these tests pass: that is tried first,
unless `--faults-only`. Exit code 1 when a fault is not caught. `make nightly` names a record by NIGHTLY_RECORD: faults
that it has as caught are left out.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tests.faults.faults import FAULTS, Fault
from tests.nightly.record import Record

ROOT = Path(__file__).resolve().parents[2]
PAGE = Path(__file__).with_name("README.md")
PACKAGE = "zero_offload"
LIMIT_S = 900
PYTEST_ERRORS = range(2, 6)
"""Exit codes of pytest that say nothing about the tests: usage, collection, no test found."""


def page() -> str:
    """The content of README.md."""
    head = """# Faults

The easiest mistakes in offloaded training, and the test that catches each. `make faults` applies each one to a
copy of the package and runs its test, which must fail; `make faults ARGS="clipped norm"` takes those with these words.
The list with its changes is `faults.py`, of which `--page` makes this page.
Faults of streams on a device are in `tests/fake_gpu/test_mutations.py`, faults of drives in `docs/FAULTS.md`.

| what is wrong | caught by |
|---|---|
"""
    return head + "".join(f"| {each.behaviour} | {_named(each.test)} |\n" for each in FAULTS)


def _named(tests: str) -> str:
    return ", ".join(f"`{test}`" for test in tests.split())


def missing_texts(fault: Fault) -> list[str]:
    """Texts of a fault that are not in the source exactly once."""
    return [
        f"{file} has {count} times:\n{text}"
        for file, text, _ in fault.edits
        if (count := (ROOT / PACKAGE / file).read_text().count(text)) != 1
    ]


def copy_to(folder: Path) -> None:
    for name in (PACKAGE, "tests", "docs", "examples", "benchmarks", "csrc"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, folder)


@contextmanager
def applied(fault: Fault, folder: Path, number: int) -> Iterator[None]:
    """The copy in `folder` has the fault. `number`, another each time, tells Python that a file has changed."""
    before = {file: (folder / PACKAGE / file).read_text() for file, _, _ in fault.edits}
    try:
        for file, text, wrong in fault.edits:
            path = folder / PACKAGE / file
            path.write_text(path.read_text().replace(text, wrong))
            os.utime(path, (number, number))
        yield
    finally:
        for file, content in before.items():
            (folder / PACKAGE / file).write_text(content)
            os.utime(folder / PACKAGE / file, (0, 0))


def run_tests(folder: Path, test: str, *flags: str) -> tuple[int, str]:
    """Exit code of pytest in the copy (0: all pass), and what it printed."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--tb=line",
        "-m",
        "not full",
        *flags,
        *test.split(),
    ]
    try:
        done = subprocess.run(
            command,
            cwd=folder,
            env=os.environ | {"PYTHONPATH": str(folder)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LIMIT_S,
        )
    except subprocess.TimeoutExpired:
        return -1, f"it hung for {LIMIT_S} s"
    return done.returncode, done.stdout


def described(code: int, output: str) -> str:
    if code < 0:
        return "the process died" if output else "it hung"
    found = re.search(r"^FAILED (\S+)|^ERROR (\S+)", output, re.MULTILINE)
    return (found[1] or found[2]) if found else ""


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("words", nargs="*", help="only faults whose behaviour has one of these")
    parser.add_argument("--page", action="store_true", help="write README.md and run nothing")
    parser.add_argument("--faults-only", action="store_true", help="do not run the tests without a fault first")
    chosen = parser.parse_args(arguments)
    if chosen.page:
        PAGE.write_text(page())
        return 0
    faults = [each for each in FAULTS if not chosen.words or any(word in each.behaviour for word in chosen.words)]
    if not faults:
        parser.error(f"no fault has any of these words: {' '.join(chosen.words)}")
    problems = [f"{each.behaviour}: {text}" for each in faults for text in missing_texts(each)]
    if problems:
        print("\n\n".join(problems))
        return 2
    record = Record(Path(os.environ["NIGHTLY_RECORD"])) if "NIGHTLY_RECORD" in os.environ else None
    if record is not None:
        record.collect(len(FAULTS))
        faults = [each for each in faults if not record.is_done(each.behaviour)]
    missed = 0
    with tempfile.TemporaryDirectory() as temporary:
        os.chmod(temporary, 0o755)  # some tests run as another user, who reads the copy
        folder = Path(temporary) / "copy"
        copy_to(folder)
        if not chosen.faults_only:
            code, output = run_tests(folder, " ".join(dict.fromkeys(" ".join(each.test for each in faults).split())))
            if code:
                print(f"without a fault tests fail (exit code {code}):\n{output}")
                return 2
        for number, each in enumerate(faults, start=1):
            with applied(each, folder, number):
                code, output = run_tests(folder, each.test, "-x")
            if code in PYTEST_ERRORS:
                print(f"{each.behaviour}: {each.test} did not run (exit code {code}):\n{output}")
            word = "not caught" if code == 0 else "error" if code in PYTEST_ERRORS else "caught"
            missed += word != "caught"
            print(f"{word}: {each.behaviour} [{described(code, output) or each.test}]", flush=True)
            if record is not None:
                record.end(each.behaviour, "passed" if word == "caught" else "failed")
    print(f"{len(faults) - missed} of {len(faults)} faults are caught")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
