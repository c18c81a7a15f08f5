"""Files that a release is made of agree: versions, what hooks and workflows run, what the source distribution holds."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import version
from pathlib import Path

import pytest

import zero_offload as zo

ROOT = Path(__file__).parents[2]


def test_version_stands_in_one_file_and_the_others_agree() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "version" in project["project"]["dynamic"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "zero_offload.__version__"}
    assert re.findall(r"^version: (.+)$", (ROOT / "CITATION.cff").read_text(), re.M) == [zo.__version__]
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert newest is not None and newest[1] == zo.__version__


def test_type_checkers_find_the_mark() -> None:
    package_data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    assert (ROOT / "zero_offload" / "py.typed").is_file() and "py.typed" in package_data["zero_offload"]


def test_hooks_have_the_versions_that_the_check_has() -> None:
    text = (ROOT / ".pre-commit-config.yaml").read_text()
    hooks = dict(re.findall(r"repo: \S+/(?:mirrors-)?([\w-]+?)(?:-pre-commit)?\n +rev: v(\S+)", text))
    assert hooks == {name: version(name) for name in ("ruff", "clang-format")}


@pytest.mark.parametrize("path", sorted((ROOT / ".github" / "workflows").glob("*.yml")), ids=lambda path: path.name)
def test_workflows_run_what_is_here(path: Path) -> None:
    """A workflow of a forge runs nowhere here: its commands are the Makefile's and `.ci/run`."""
    text = path.read_text()
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    commands = re.findall(r"- run: (.+)", text)
    assert commands
    for command in commands:
        found = re.fullmatch(r"make ([\w-]+)( .*)?", command)
        assert command == ".ci/run" or command.startswith("sudo apt-get ") or (found and found[1] in targets), command
    classifiers = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["classifiers"]
    supported = {each.rpartition(" ")[2] for each in classifiers}
    assert set(re.findall(r'"(3\.\d+)"', text)) <= supported


def test_source_distribution_holds_all_folders() -> None:
    grafted = set(re.findall(r"^graft (\S+)", (ROOT / "MANIFEST.in").read_text(), re.M))
    included = set(re.findall(r"\S+", " ".join(re.findall(r"^include (.+)", (ROOT / "MANIFEST.in").read_text(), re.M))))
    ignored = {"zero_offload", ".git", ".gitignore", "pyproject.toml", "setup.py", "MANIFEST.in"}
    ignored |= {each.strip("/\n") for each in (ROOT / ".gitignore").open()}
    here = {path.name for path in ROOT.iterdir() if path.suffix != ".egg-info" and path.name not in ignored}
    assert here <= grafted | included, here - grafted - included
