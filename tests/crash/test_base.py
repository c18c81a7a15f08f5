"""kill -9 of a run whose frozen parts rest in a base: around the first read of it, a record of it, and a commit."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import zero_offload as zo
from tests.helpers.bases import opened, settings, steps, write_base
from tests.unit.storage.files.test_base_files import flip

NUM_STEPS = 5
CHILD = """
import os, signal, sys
from pathlib import Path
import zero_offload as zo
from tests.helpers.bases import opened, settings, steps
from zero_offload.checkpoint import generation
from zero_offload.storage.files import base_files

folder, nvme, place, nth, durability = Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4]), sys.argv[5]

def dying(owner, name, after):
    call, left = getattr(owner, name), [nth]
    def wrapped(*args, **kwargs):
        left[0] -= 1
        if left[0] == 0 and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        result = call(*args, **kwargs)
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return result
    setattr(owner, name, wrapped)

owner = {"_launch": base_files.BaseFiles, "_note": base_files.BaseFiles, "base_hashes": generation}.get(
    place.removeprefix("after "), generation)
dying(owner, place.removeprefix("after "), place.startswith("after "))
model, optimizer = opened(None, settings(nvme, existing="resume", durability=durability))
resumed = zo.resume(model, optimizer)
if resumed is None:
    zo.load_pretrained(model, folder)
steps(model, optimizer, resumed.step if resumed else 0, NUM_STEPS)
zo.close(model)
""".replace("NUM_STEPS", str(NUM_STEPS))
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
    name, nth = PLACES[place]
    arguments = [str(folder), str(tmp_path / "run"), name, str(nth), durability]
    ended = subprocess.run([sys.executable, "-c", CHILD, *arguments], env=os.environ, timeout=120, check=False)
    assert ended.returncode == -signal.SIGKILL
    model, optimizer = opened(None, settings(tmp_path / "run", existing="resume", durability=durability))
    resumed = zo.resume(model, optimizer)
    if resumed is None:
        zo.load_pretrained(model, folder)
    first = resumed.step if resumed else 0
    assert steps(model, optimizer, first, NUM_STEPS) == whole[first:]
    zo.close(model)


def test_what_a_committed_step_has_read_is_verified_after_a_kill(folder: Path, tmp_path: Path) -> None:
    base = write_base(tmp_path / "base", num_files=1)
    arguments = [str(base), str(tmp_path / "run"), "after write_manifest", "2", "process"]
    ended = subprocess.run([sys.executable, "-c", CHILD, *arguments], env=os.environ, timeout=120, check=False)
    assert ended.returncode == -signal.SIGKILL
    file = sorted(base.glob("*.safetensors"))[0]
    flip(file, 50_000)
    model, optimizer = opened(None, settings(tmp_path / "run", existing="resume"))
    resumed = zo.resume(model, optimizer)
    assert resumed is not None and resumed.step == 1
    with pytest.raises(zo.IntegrityError, match=f"{file.name}.*other bytes"):
        steps(model, optimizer, 1, 2)
