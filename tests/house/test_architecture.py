"""The paths of docs/ARCHITECTURE.md are those of the code: a small model takes each, and calls come in its order."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

import zero_offload as zo
from tests.helpers.models import WIDE, TinyLM, build, tokens_of
from tests.helpers.paths import (
    PAGE,
    PATHS,
    calls_in,
    following,
    has_member,
    homes_of,
    named_in,
    out_of_order,
    places_of,
)

ROOT = PAGE.parents[1]


@dataclass
class Run:
    """A model with values and states on a drive, which does not fit its memory."""

    model: nn.Module
    optimizer: zo.AdamW
    seen: list[str]
    path: Path

    def begin(self) -> None:
        """The path begins here."""
        self.seen.clear()

    def loss(self) -> Tensor:
        found: Tensor = self.model(tokens_of(0))
        return found

    def step(self) -> None:
        self.loss().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def forward(run: Run) -> None:
    """The last block is away when its forward begins."""
    run.step()
    last = list(run.model.blocks)[-1]
    last.register_forward_pre_hook(lambda *_: run.begin(), prepend=True)
    with torch.no_grad():
        run.loss()


def gradient(run: Run) -> None:
    run.step()
    loss = run.loss()
    run.begin()
    loss.backward()
    zo.clip_grad_norm_(run.model, 1e-6)
    assert next(run.model.parameters()).grad is not None


def update(run: Run) -> None:
    run.step()
    run.loss().backward()
    run.begin()
    run.optimizer.step()
    run.loss()


def commit(run: Run) -> None:
    run.loss().backward()
    run.begin()
    run.optimizer.step()
    zo.commit(run.model, run.optimizer)
    zo.close(run.model)


def checkpoint(run: Run) -> None:
    run.step()
    state = {"model": run.model.state_dict()}
    run.begin()
    dcp.save(state, checkpoint_id=run.path / "saved", no_dist=True)
    dcp.load(state, checkpoint_id=run.path / "saved", no_dist=True)
    dcp.async_save(state, checkpoint_id=run.path / "again", no_dist=True).result()


PROGRAMS: dict[str, tuple[Callable[[Run], None], dict[str, str]]] = {
    "Forward": (forward, {}),
    "Gradient": (gradient, {}),
    "Update": (update, {}),
    "Commit": (commit, {}),
    "torch.distributed.checkpoint": (checkpoint, {}),
    "Bytes to a drive": (commit, {"params": "cpu", "optimizer": "cpu"}),
}
"""A program for each path, with settings of its own."""
ELSEWHERE = {"A folder is fine-tuned": "tests/integrations/test_finetune.py"}
"""Paths of programs that need tools of others, with the tests that follow them."""


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled", "ignore:step 1 is not made a generation")
@pytest.mark.parametrize("heading", PROGRAMS)
def test_calls_come_in_the_order_of_the_path(heading: str, nvme: Path, tmp_path: Path) -> None:
    program, settings = PROGRAMS[heading]
    given = {"params": "nvme", "optimizer": "nvme", "overlap": "none", "device_memory": "8MiB"}
    config = zo.OffloadConfig.from_dict(
        given | {"precision": "fp32", "durability": "commit", "commit_every": 1, "nvme": nvme} | settings
    )
    names = calls_in(PATHS[heading])
    with following(names) as seen:
        model = zo.offload(build(lambda: TinyLM(WIDE)), config)
        try:
            program(Run(model, zo.AdamW(model.parameters()), seen, tmp_path))
        finally:
            calls = list(seen)
            zo.close(model)
    assert len(names) >= 4
    assert out_of_order(names, calls) == []


def test_every_path_has_a_program() -> None:
    assert set(PATHS) == {*PROGRAMS, *ELSEWHERE}
    for heading, path in ELSEWHERE.items():
        assert f'PATHS["{heading}"]' in (ROOT / path).read_text()


@pytest.mark.parametrize("heading", PATHS)
def test_calls_of_other_cases_exist(heading: str) -> None:
    lacking = [
        name for name in named_in(PATHS[heading]) if not (has_member(name) if "." in name else homes_of(name[:-2]))
    ]
    assert lacking == [], "docs/ARCHITECTURE.md names them, and the package has none"


def test_a_path_that_is_wrong_is_told() -> None:
    path = "hook -> A.one (file.py) -> (several ranks: B.two) -> three() -> zo.four and A.five(x), then A.one\n"
    assert calls_in(path) == ["A.one", "three()", "A.five", "A.one"]
    assert named_in(path) == ["A.one", "B.two", "three()", "A.five", "A.one"]
    names = ["A.one", "three()", "A.five", "A.one"]
    assert out_of_order(names, ["A.one", "three()", "three()", "A.five", "three()", "A.one"]) == []
    assert out_of_order(names, ["A.one", "A.five", "three()", "A.one"]) == ["A.five is called before three()"]
    assert out_of_order(names, ["A.one", "three()", "A.five"]) == ["A.one is not called again"]
    assert out_of_order(names, ["A.one", "A.five", "A.one"]) == ["three() is not called"]
    with pytest.raises(AssertionError, match="PassTracker.entered is in docs/ARCHITECTURE.md and not in the package"):
        places_of("PassTracker.entered")
    with pytest.raises(AssertionError, match="no_such_function"):
        places_of("no_such_function()")


# Names in pages


PAGES = ("docs/ARCHITECTURE.md", "CONTRIBUTING.md")
FILE = r"(?<![\w./-])(?:[\w-]+/)*[\w-]+\.(?:py|cpp|inl|h|js|md|toml)(?![\w*])"
FOREIGN = frozenset({"DeepSpeed", "ExitStack", "MiB"})
"""Names with two capitals of others."""


@pytest.fixture(scope="module")
def files() -> list[str]:
    """Paths of the repository's files, and of its folders, with a slash at the end."""
    listing = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    tracked = subprocess.run(listing, cwd=ROOT, capture_output=True, text=True).stdout.splitlines()
    names = tracked or [str(path.relative_to(ROOT)) for path in ROOT.rglob("*") if ".venv" not in path.parts]
    return [*names, *{f"{folder}/" for name in names for folder in Path(name).parents}]


@pytest.mark.parametrize("page", PAGES)
def test_files_of_a_page_exist(page: str, files: list[str]) -> None:
    text = (ROOT / page).read_text()
    named = {*re.findall(FILE, text), *re.findall(r"`((?:[\w-]+/)+)`", text)}
    assert len(named) > 10
    assert [each for each in sorted(named) if not any(f"/{file}".endswith(f"/{each}") for file in files)] == []


@pytest.mark.parametrize("page", PAGES)
def test_names_of_a_page_exist(page: str) -> None:
    """Classes, their members, and names with an underscore, of Python and C++."""
    text = re.sub(FILE, "", (ROOT / page).read_text())
    known = set(FOREIGN)
    for path in (path for top in ("zero_offload", "csrc", "tests") for path in (ROOT / top).rglob("*.*")):
        if path.suffix in (".py", ".cpp", ".h", ".inl"):
            known.update(re.findall(r"\w+", path.read_text()))
    named = set(re.findall(r"\b(?:[A-Z][a-z]+[A-Z]\w*|_?[a-z]+_\w+)\b", text))
    assert sorted(named - known) == []
    for name in sorted(set(re.findall(r"\b[A-Z]\w*[a-z]\.[a-z_]\w*", text))):
        assert has_member(name), f"{name} is in {page}, and not in the package"


@pytest.mark.parametrize("page", (*PAGES, "STATUS.md"))
def test_a_page_counts_no_lines_of_code(page: str) -> None:
    """Such a figure is wrong after the next change."""
    assert re.findall(r"\d[\d.,]*(?:k| thousand| million)? lines\b", (ROOT / page).read_text()) == []
