"""The benchmark of a GPU, rehearsed: every line of every section runs at toy size, on the fake GPU, all late."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.pairwise import full

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "gpu.py"
MAY_BE_SKIPPED = {"deepspeed", "transformers"}
"""Parts that need not be installed."""
ALIKE = {"13b-24g", "kernel-tests", "2b-nvme"}
"""Their lines are those of other sections, at other sizes."""


@pytest.mark.parametrize("is_alike", [False, full(True)])
def test_every_section_runs(is_alike: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    from harness.gpu.sections import SECTIONS

    names, file = [name for name in SECTIONS if (name in ALIKE) is is_alike], tmp_path / "gpu.json"
    arguments = ["--rehearse", "--sections", ",".join(names), "--nvme", tmp_path, "--json", file]
    done = subprocess.run(
        [sys.executable, SCRIPT, *map(str, arguments)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode in (0, 3), done.stdout + done.stderr
    written = json.loads(file.read_text())
    assert written["rehearsal"] and written["hardware"]["gpu"] == "fake GPU" and written["versions"]["torch"]
    assert list(written["sections"]) == names
    for name, section in written["sections"].items():
        broken = [each["error"] for each in section["figures"].values() if "error" in each]
        assert section["status"] in ("ok", "skipped") and not broken, (name, *broken, section.get("stderr"))
        assert section["status"] == "ok" or name in MAY_BE_SKIPPED
        skipped = {part: each["skipped"] for part, each in section["figures"].items() if "skipped" in each}
        assert not skipped or name in MAY_BE_SKIPPED, skipped
    for row in written["rows"]:
        assert row["name"].startswith("rehearsal, ")
        counts_mistakes = row["reach"] == 0.0
        assert row["ok"] is (True if counts_mistakes else None), row
    assert list(tmp_path.iterdir()) == [file], "what was written to the disk is gone"
