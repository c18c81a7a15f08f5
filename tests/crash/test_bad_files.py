"""Files that were damaged, forged or swapped: nothing of them is believed unchecked, and nothing is executed."""

from __future__ import annotations

import ast
import json
import os
import pickle
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import zero_offload as zo
from tests.helpers.disk import SWAP, assert_finishes, close_broken, open_model, train, write_run
from tests.helpers.models import TinyLM, build
from zero_offload.base.types import Durability
from zero_offload.checkpoint.format import Generation
from zero_offload.storage.files.directory import RunDirectory
from zero_offload.storage.files.manifest import read_manifest, write_manifest

STEPS = 4
GENERATION = "generation-0.json"
"""The newest manifest after two steps."""


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory that a run has left after two steps."""
    path = tmp_path_factory.mktemp("whole") / "nvme"
    write_run(path, 2)
    return path


@pytest.fixture
def copy(whole: Path, nvme: Path) -> Path:
    shutil.rmtree(nvme)
    shutil.copytree(whole, nvme)
    return nvme


def _payload(nvme: Path, name: str) -> Any:
    return json.loads((nvme / name).read_text())["payload"]


def _rank_manifest(nvme: Path) -> str:
    return str(_payload(nvme, GENERATION)["ranks"][0]["manifest"])


def _resume(nvme: Path) -> None:
    model, optimizer = open_model(nvme)
    try:
        zo.resume(model, optimizer)
        train(model, optimizer, 2, 3)
    finally:
        close_broken(model)


# Damage


@pytest.mark.full
def test_every_byte_of_every_manifest(copy: Path) -> None:
    """Two bits of each: read as a run does, with the digest that the generation names."""
    generation = _payload(copy, GENERATION)
    digests = {_rank_manifest(copy): generation["ranks"][0]["digest"], GENERATION: None, "run.json": None}
    with RunDirectory.look(copy) as directory:
        for name, digest in digests.items():
            original = (copy / name).read_bytes()
            expected = read_manifest(directory, name, digest)
            for place in range(len(original)):
                for bit in (place % 8, (place + 3) % 8):
                    changed = original[:place] + bytes([original[place] ^ 1 << bit]) + original[place + 1 :]
                    (copy / name).write_bytes(changed)
                    try:
                        found = read_manifest(directory, name, digest)
                    except (zo.IntegrityError, zo.CheckpointError) as error:
                        assert str(copy / name) in str(error)
                    else:  # white space at the end
                        assert found == expected, (name, place, bit)
            (copy / name).write_bytes(original)
    assert assert_finishes(copy, STEPS) == 2


def test_a_swap_file_that_is_longer_serves_as_before(copy: Path) -> None:
    """A run that gave gradients room on disk leaves one; what is read has its place and checksum in the manifest."""
    with (copy / SWAP).open("ab") as file:
        file.write(os.urandom(3 << 20))
    assert assert_finishes(copy, STEPS) == 2


def test_a_swap_file_that_is_shorter_names_both_sizes(copy: Path) -> None:
    size = (copy / SWAP).stat().st_size
    os.truncate(copy / SWAP, size - 4096)
    with pytest.raises(zo.IntegrityError, match=f"truncated: {size - 4096} bytes of {size}") as caught:
        open_model(copy)
    assert caught.value.exit_code == 5 and str(copy / SWAP) in str(caught.value)


# Forgery: the digest is right, the contents are not what we write


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Of every value inside; of long lists the ends."""
    if path:
        yield path
    if isinstance(value, dict):
        for key in value:
            yield from _places(value[key], (*path, key))
    elif isinstance(value, list):
        for index in {0, len(value) - 1} if value else ():
            yield from _places(value[index], (*path, index))


STRANGE: list[Any] = [None, -1, 2**62 - 4096, 2**63, 10**30, 1.5, "../x", "", [], [[]], {}, {"": 0}, True]


def _forge(nvme: Path, name: str, path: tuple[Any, ...], value: Any) -> None:
    """Replace a value, and make all digests right again."""
    payload = _payload(nvme, name)
    inner = payload
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    with RunDirectory.look(nvme) as directory:
        digest = write_manifest(directory, name, payload, Durability.PROCESS)
        if name != GENERATION:
            generation = _payload(nvme, GENERATION)
            generation["ranks"][0]["digest"] = digest
            write_manifest(directory, GENERATION, generation, Durability.PROCESS)


def _check_forgery(nvme: Path, name: str, path: tuple[Any, ...], value: Any) -> None:
    before = {file: (nvme / file).read_bytes() for file in (name, GENERATION)}
    _forge(nvme, name, path, value)
    try:
        model, optimizer = open_model(nvme)
        try:
            zo.resume(model, optimizer)
        finally:
            close_broken(model)
    except zo.ZeroOffloadError as error:
        assert error.exit_code in (2, 3, 4, 5), (path, value, error)
    finally:
        for file, content in before.items():
            (nvme / file).write_bytes(content)


@pytest.mark.parametrize("name", [GENERATION, "rank"])
def test_a_forged_value_anywhere_is_an_error_or_does_nothing(name: str, copy: Path) -> None:
    """Never a crash, never another kind of exception. A sample of places and values."""
    name = _rank_manifest(copy) if name == "rank" else name
    drawn = random.Random(0)
    places = list(_places(_payload(copy, name)))
    for path in drawn.sample(places, len(places) // 2):
        _check_forgery(copy, name, path, drawn.choice(STRANGE))


@pytest.mark.full
@pytest.mark.parametrize("name", [GENERATION, "rank"])
def test_every_forged_value(name: str, copy: Path) -> None:
    name = _rank_manifest(copy) if name == "rank" else name
    for path in _places(_payload(copy, name)):
        for value in STRANGE:
            _check_forgery(copy, name, path, value)


FORGED: list[tuple[tuple[Any, ...], Any]] = [
    (("sections", 0, "components", "value", "offset"), [-4096]),
    (("sections", 0, "components", "value", "offset"), [2**62]),
    (("sections", 0, "components", "value", "offset"), [2**64 + 4096]),
    (("sections", 0, "components", "value", "offset"), [1.0]),
    (("sections", 0, "components", "value", "directory"), [1]),
    (("sections", 0, "components", "value", "crc"), ["0"]),
    (("sections", 0, "slot"), 2),
    (("sections", 0, "slot"), -1),
]


@pytest.mark.parametrize(("path", "value"), FORGED, ids=str)
def test_offsets_and_slots_are_range_checked(path: tuple[Any, ...], value: Any, copy: Path) -> None:
    before = (copy / SWAP).read_bytes()
    _forge(copy, _rank_manifest(copy), path, value)
    with pytest.raises(zo.IntegrityError) as caught:
        _resume(copy)
    assert caught.value.exit_code == 5 and "existing='discard'" in str(caught.value)
    assert (copy / SWAP).read_bytes() == before


@pytest.mark.parametrize("name", ["../outside.json", "/etc/hostname", "a/b", ".hidden", "rank0\x00.json", ""])
def test_a_forged_name_leads_nowhere(name: str, copy: Path) -> None:
    (copy.parent / "outside.json").write_text("{}")
    _forge(copy, GENERATION, ("ranks", 0, "manifest"), name)
    with pytest.raises(zo.StorageError, match="is not the name of a file"):
        _resume(copy)


def test_forged_checkpoints_are_refused_before_anything_is_replaced(copy: Path, tmp_path: Path) -> None:
    """The same files, by `zo.load_checkpoint`."""
    model, optimizer = open_model(tmp_path / "run")
    before = model.state_dict()
    rank = _rank_manifest(copy)
    forged = [(GENERATION, key) for key in ("run_id", "ranks", "params", "param_steps")]
    for name, key in [*forged, (rank, "sections")]:
        originals = {file: (copy / file).read_bytes() for file in (rank, GENERATION)}
        _forge(copy, name, (key,), [3])
        with pytest.raises((zo.IntegrityError, zo.CheckpointError)):
            zo.load_checkpoint(model, optimizer, copy)
        for file, content in originals.items():
            (copy / file).write_bytes(content)
    assert all(value.equal(before[name]) for name, value in model.state_dict().items())
    assert zo.load_checkpoint(model, optimizer, copy).step == 2
    close_broken(model)


# Nothing is executed


class _Bomb:
    def __init__(self, fuse: Path) -> None:
        self.fuse = fuse

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.fuse),)


@pytest.mark.parametrize("name", [GENERATION, "rank", SWAP, "run.json", "LOCK"])
def test_a_pickle_among_our_files_is_not_opened(name: str, copy: Path, tmp_path: Path) -> None:
    bomb = pickle.dumps(_Bomb(tmp_path / "exploded"))
    name = _rank_manifest(copy) if name == "rank" else name
    content = bomb * (1 + (copy / name).stat().st_size // len(bomb)) if name == SWAP else bomb
    (copy / name).write_bytes(content)
    for call in (lambda: _resume(copy), lambda: write_run(copy, 1, existing="discard"), lambda: _load(copy, tmp_path)):
        try:
            call()
        except zo.ZeroOffloadError as error:
            assert error.exit_code in (2, 5), error
        assert not (tmp_path / "exploded").exists()


def _load(path: Path, tmp_path: Path) -> None:
    model, optimizer = open_model(tmp_path / "other", build(TinyLM))
    try:
        zo.load_checkpoint(model, optimizer, path)
    finally:
        close_broken(model)


def test_the_package_unpickles_nothing() -> None:
    """No module imports pickle or calls eval or exec. torch.load reads a text of torch's own checkpoints alone, and
    no object."""
    for source in Path(zo.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(source.read_text())):
            names = {alias.name for alias in getattr(node, "names", ()) if isinstance(alias, ast.alias)}
            assert not names & {"pickle", "dill", "cloudpickle", "shelve", "marshal"}, source
            if isinstance(node, ast.Call):
                call = ast.unparse(node)
                assert not call.startswith(("eval(", "exec(")), source
                reads_text = source.name == "published.py" and call == "torch.load(value, weights_only=True)"
                assert reads_text or not call.startswith("torch.load("), source


def test_a_manifest_of_a_later_version_says_what_to_do(copy: Path) -> None:
    document = json.loads((copy / GENERATION).read_text())
    (copy / GENERATION).write_text(json.dumps(document | {"version": 8}))
    with pytest.raises(zo.CheckpointError, match=r"newer zero_offload \(format 8.*pip install --upgrade") as caught:
        open_model(copy)
    assert str(copy / GENERATION) in str(caught.value) and caught.value.exit_code == 2


def test_steps_of_parameters_are_counts() -> None:
    fields = {"run_id": "", "number": 1, "step": 1, "world_size": 1, "num_shards": 1, "committed_at": ""}
    assert Generation.parse(fields | {"param_steps": {"a": 1}}, GENERATION).step == 1
    for steps in (None, [], {"a": -1}, {"a": True}, {"a": 1.0}):
        with pytest.raises(zo.IntegrityError, match="param_steps"):
            Generation.parse(fields | {"param_steps": steps}, GENERATION)
