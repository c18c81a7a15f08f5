"""docs/VERSIONS.md, pyproject.toml and `zero-offload doctor` name the same versions of Python and torch."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from zero_offload.cli.doctor import PYTHON_MIN, TORCH_MIN

ROOT = Path(__file__).parents[2]


def test_versions_agree() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    rows = re.findall(r"^\| (3)\.(\d+)\.\d+ \| (2)\.(\d+)\.\d+ ", (ROOT / "docs" / "VERSIONS.md").read_text(), re.M)
    pythons, torches = ({tuple(map(int, row[at : at + 2])) for row in rows} for at in (0, 2))
    assert project["classifiers"] == [f"Programming Language :: Python :: {a}.{b}" for a, b in sorted(pythons)]
    assert (min(pythons), min(torches)) == (PYTHON_MIN, TORCH_MIN)
    assert project["requires-python"] == f">={PYTHON_MIN[0]}.{PYTHON_MIN[1]}"
    assert f"torch>={TORCH_MIN[0]}.{TORCH_MIN[1]}" in project["dependencies"]
