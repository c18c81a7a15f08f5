"""docs/VERSIONS.md, pyproject.toml and `zero-offload doctor` name the same versions of Python and torch; and the
first two, with constraints.txt, the same versions of tools."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from zero_offload.cli.doctor import TORCH_MIN

ROOT = Path(__file__).parents[2]


def test_versions_agree() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    rows = re.findall(r"^\| (3)\.(\d+)\.\d+ \| (2)\.(\d+)\.\d+ ", (ROOT / "docs" / "VERSIONS.md").read_text(), re.M)
    pythons, torches = ({tuple(map(int, row[at : at + 2])) for row in rows} for at in (0, 2))
    assert project["classifiers"] == [f"Programming Language :: Python :: {a}.{b}" for a, b in sorted(pythons)]
    assert min(torches) == TORCH_MIN
    assert project["requires-python"] == ">={}.{}".format(*min(pythons))
    assert f"torch>={TORCH_MIN[0]}.{TORCH_MIN[1]}" in project["dependencies"]


def test_versions_of_tools_agree() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    floors = [re.fullmatch(r"(\w+)>=(.+)", each) for name, extra in extras.items() if name != "tools" for each in extra]
    pins = dict(re.findall(r"^(\w+)==(.+)$", (ROOT / "constraints.txt").read_text(), re.M))
    named = {(floor[1], floor[2], pins[floor[1]]) for floor in floors if floor is not None}
    page = (ROOT / "docs" / "VERSIONS.md").read_text().partition("## Tools")[2]
    assert set(re.findall(r"^\| (\w+) \| (\d[\d.]*) \| (\d[\d.]*) \|$", page, re.M)) == named != set()
