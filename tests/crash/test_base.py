"""kill -9 of a run whose frozen parts rest in a base: around the first read of it, a record of it, and a commit."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

import zero_offload as zo
from tests.helpers.bases import opened, settings, steps, write_base
from tests.helpers.trainer import DEADLINE_S, fork_server
from tests.unit.storage.files.test_base_files import flip
from zero_offload.checkpoint import generation
from zero_offload.storage.files.base_files import BaseFiles

NUM_STEPS = 5
PLACES = {
    "before the first read": ("_launch", 1),
    "in the midst of the first reads": ("_launch", 4),
    "before checksums are made": ("_note", 1),
    "when some are made": ("after _note", 2),
    "before the first commit records them": ("base_hashes", 1),
    "before the second commit records them": ("base_hashes", 2),
    "before the first manifest": ("write_manifest", 1),
    "before the first commit point": ("write_manifest", 2),
    "after the first commit point": ("after write_manifest", 2),
    "before the second commit point": ("write_manifest", 4),
}


def dies_at(place: str, nth: int) -> None:
    """Let this process be killed before, or after, it calls this for the nth time."""
    name, left = place.removeprefix("after "), [nth]
    owner: Any = BaseFiles if hasattr(BaseFiles, name) else generation
    call = getattr(owner, name)

    def dying(*args: Any, **kwargs: Any) -> Any:
        left[0] -= 1
        if left[0] == 0 and name == place:
            os.kill(os.getpid(), signal.SIGKILL)
        result = call(*args, **kwargs)
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, name, dying)


def train(folder: Path, nvme: Path, place: str, durability: str) -> None:
    """A run that is killed."""
    dies_at(*PLACES[place])
    model, optimizer = opened(None, settings(nvme, existing="resume", durability=durability))
    resumed = zo.resume(model, optimizer)
    if resumed is None:
        zo.load_pretrained(model, folder)
    steps(model, optimizer, resumed.step if resumed else 0, NUM_STEPS)
    zo.close(model)


def killed(folder: Path, nvme: Path, place: str, durability: str) -> None:
    process = fork_server().Process(target=train, args=(folder, nvme, place, durability))
    process.start()
    process.join(DEADLINE_S)
    assert process.exitcode == -signal.SIGKILL


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_base(tmp_path_factory.mktemp("shared") / "base", num_files=1)


@pytest.fixture(scope="module")
def whole(folder: Path) -> list[float]:
    model, optimizer = opened(folder, settings(None))
    losses = steps(model, optimizer, 0, NUM_STEPS, commits=False)
    zo.close(model)
    return losses


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("durability", ["process", "commit"])
def test_it_goes_on_at_one_step_with_what_it_knew(
    place: str, durability: str, folder: Path, whole: list[float], tmp_path: Path
) -> None:
    killed(folder, tmp_path / "run", place, durability)
    model, optimizer = opened(None, settings(tmp_path / "run", existing="resume", durability=durability))
    resumed = zo.resume(model, optimizer)
    if resumed is None:
        zo.load_pretrained(model, folder)
    first = resumed.step if resumed else 0
    assert steps(model, optimizer, first, NUM_STEPS) == whole[first:]
    zo.close(model)


def test_what_a_committed_step_has_read_is_verified_after_a_kill(folder: Path, tmp_path: Path) -> None:
    base = write_base(tmp_path / "base", num_files=1)
    killed(base, tmp_path / "run", "after the first commit point", "process")
    file = sorted(base.glob("*.safetensors"))[0]
    flip(file, 50_000)
    model, optimizer = opened(None, settings(tmp_path / "run", existing="resume"))
    resumed = zo.resume(model, optimizer)
    assert resumed is not None and resumed.step == 1
    with pytest.raises(zo.IntegrityError, match=f"{file.name}.*other bytes"):
        steps(model, optimizer, 1, 2)
