"""`make nightly` takes every test that others leave out, and goes on where it was stopped."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.pairwise import full
from tests.nightly import __main__ as nightly
from tests.nightly.record import RECORDS_OF_RUNS, Record

ROOT = Path(__file__).resolve().parents[2]
THREE = """
import pytest
@pytest.mark.parametrize("n", range(3))
def test_that(n):
    with open({log!r}, "a") as file:
        file.write(str(n))
    assert n != {fails}
"""


def test_the_page_has_a_row_for_each_part() -> None:
    assert re.findall(r"^\| `(\w+)` \| (.*?) \|", RECORDS_OF_RUNS.read_text(), re.M) == [
        (part.name, part.checks) for part in nightly.PARTS
    ]


def test_tests_of_tools_are_those_of_the_makefile() -> None:
    found = re.search(r"^TOOLS_TESTS := (.*?)\n\n?[A-Z]", (ROOT / "Makefile").read_text(), re.M | re.S)
    assert found is not None
    assert tuple(found[1].replace("\\\n", "").split()) == nightly.TOOLS_TESTS


def a_run(folder: Path, record: Record, *flags: str, fails: int) -> tuple[int, str]:
    """Exit code of a part of three tests, of which one fails, and the tests that ran."""
    log = folder / "log"
    log.unlink(missing_ok=True)
    (folder / "test_three.py").write_text(THREE.format(log=str(log), fails=fails))
    command = (sys.executable, "-m", "pytest", "-q", "-p", "tests.nightly.plugin", "-c", "/dev/null", *flags)
    part = nightly.Part("three", "", (*command, "-p", "no:cacheprovider", str(folder)))
    code = nightly.run(part, record, float("inf"))
    return code, log.read_text() if log.exists() else ""


@pytest.mark.parametrize("flags", [full(()), ("-n", "2")])
def test_a_second_start_runs_what_has_not_passed(flags: tuple[str, ...], tmp_path: Path) -> None:
    path = tmp_path / "record.jsonl"
    code, ran = a_run(tmp_path, Record(path), *flags, fails=1)
    assert code == 1 and sorted(ran) == ["0", "1", "2"]
    found = Record(path)
    assert found.is_complete and len(found.failed) == 1 and found.failed[0].endswith("test_three.py::test_that[1]")
    code, ran = a_run(tmp_path, Record(path), *flags, fails=5)
    assert (code, ran) == (0, "1")
    found = Record(path)
    assert found.is_complete and not found.failed and found.summary().startswith("3 passed in ")


def test_a_part_that_is_stopped_is_not_complete(tmp_path: Path) -> None:
    path = tmp_path / "record.jsonl"
    part = nightly.Part("sleep", "", (sys.executable, "-c", "import time; time.sleep(60)"), counts_itself=False)
    assert nightly.run(part, Record(path), until=0.0) == nightly.STOPPED
    assert not Record(path).is_complete


def test_an_unknown_part_is_named() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.nightly", "crsh"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2 and "crsh" in done.stderr and "matrices" in done.stderr
