"""Frozen parts of a model that rest in the files of a base: the numbers of a plain load, and no write anywhere."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import stat
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import zero_offload as zo
from tests.helpers.bases import Adapted, base_weights, opened, settings, steps, write_base
from tests.helpers.disk import close_broken, runtime, small_disk
from tests.helpers.experts import experts_lm
from tests.helpers.models import build, tokens_of
from tests.helpers.pretrained import read_folder
from tests.helpers.reference import read_masters
from tests.unit.storage.files.test_base_files import flip
from zero_offload.base.types import Durability
from zero_offload.checkpoint.hf_files import StoredTensor, open_weights
from zero_offload.cli import export
from zero_offload.cli.main import build_parser, main
from zero_offload.hardware.abi import Fault
from zero_offload.integrations.file_names import FileNames, Joined
from zero_offload.integrations.pretrained import load_weights, replace_weights
from zero_offload.standins.owners import keep_recipe
from zero_offload.storage.files.base_files import BaseFiles
from zero_offload.storage.files.directory import RunDirectory
from zero_offload.storage.files.manifest import read_manifest, write_manifest
from zero_offload.storage.shards.shard import Component

TIERS: dict[str, dict[str, Any]] = {
    "nvme": {},
    "all nvme": {"optimizer": "nvme", "grads": "nvme"},
    "cpu": {"params": "cpu"},
    "mixed": {"params": {"cpu": 0.5, "nvme": 0.5}},
    "scratch": {"durability": "scratch"},
    "aiofiles": {"io_engine": "aiofiles"},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_base(tmp_path_factory.mktemp("shared") / "base")


@pytest.fixture
def own(tmp_path: Path) -> Path:
    """A base that a test may spoil."""
    return write_base(tmp_path / "base")


@pytest.fixture(scope="module")
def plain(folder: Path) -> list[float]:
    """Losses of the model in memory, without a base."""
    model = build(Adapted, 0)
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.copy_(base_weights()[name])
    zo.offload(model, settings(None))
    optimizer = zo.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-2)
    losses = steps(model, optimizer, 0, 6, commits=False)
    assert not runtime(model).store.base_files
    zo.close(model)
    return losses


def shards(model: Any) -> list[Any]:
    return [section.shard for unit in runtime(model).units for section in unit.sections]


def frozen(model: Any) -> list[Any]:
    return [shard for shard in shards(model) if not shard.layout.trainable]


@contextlib.contextmanager
def untouched(folder: Path) -> Iterator[None]:
    """Nothing in a folder changes meanwhile, nor could."""

    def look() -> dict[str, Any]:
        files = sorted(folder.iterdir())
        return {p.name: (p.stat().st_mtime_ns, hashlib.sha256(p.read_bytes()).hexdigest()) for p in files}

    before, modes = look(), {path: path.stat().st_mode for path in (folder, *folder.iterdir())}
    for path, mode in modes.items():
        path.chmod(stat.S_IMODE(mode) & ~0o222)
    try:
        yield
        assert look() == before
    finally:
        for path, mode in modes.items():
            path.chmod(stat.S_IMODE(mode))


def swap_bytes(nvme: Path) -> int:
    return sum(path.stat().st_size for path in nvme.glob("*.swap"))


# Room


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """A drive that has room for what is trained, and not for the base."""
    with small_disk(tmp_path / "small", "512K") as path:
        yield path


def deferred(values: str = "skip") -> Adapted:
    torch.manual_seed(0)
    with zo.deferred_init(values=values):
        return Adapted()


@pytest.mark.parametrize("tiers", ["nvme", "all nvme", "cpu"])
@pytest.mark.parametrize("order", ["before", "after"])
def test_a_drive_without_room_for_the_base_will_do(
    order: str, tiers: str, folder: Path, plain: list[float], small: Path
) -> None:
    assert sum(path.stat().st_size for path in folder.glob("*.safetensors")) > 2 << 20
    model, config = deferred(), settings(small / "run", **TIERS[tiers])
    if order == "before":
        zo.load_pretrained(model, folder)
    assert zo.plan(model, config).fits
    zo.offload(model, config)
    if order == "after":
        zo.load_pretrained(model, folder)
    optimizer = zo.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-2)
    assert steps(model, optimizer, 0, 6) == plain
    zo.close(model)


@pytest.mark.parametrize("tiers", ["nvme", "cpu"])
def test_what_has_to_be_copied_has_room_or_nothing_is_written(
    tiers: str, folder: Path, plain: list[float], small: Path, tmp_path: Path
) -> None:
    wide = write_base(tmp_path / "wide", dtype=torch.float32)
    planned = deferred()
    zo.load_pretrained(planned, wide)
    assert not zo.plan(planned, settings(small / "run", **TIERS[tiers])).fits
    with pytest.raises(zo.CapacityError, match="nvme tier"):
        zo.offload(planned, settings(small / "run", **TIERS[tiers]))
    model, optimizer = opened(None, settings(small / "run", **TIERS[tiers]))
    store = runtime(model).store
    before = store.disk.nbytes, store.counters.snapshot().get("written.nvme", 0)
    with pytest.raises(zo.CapacityError, match=r"frozen sections are to be written.*MiB more.*compute dtype"):
        zo.load_pretrained(model, wide)
    assert (store.disk.nbytes, store.counters.snapshot().get("written.nvme", 0)) == before
    assert all(shard.base is None and not shard.slots for shard in frozen(model))
    zo.load_pretrained(model, folder)
    assert steps(model, optimizer, 0, 6) == plain
    zo.close(model)


def test_what_has_to_be_copied_counts_against_the_capacity(tmp_path: Path) -> None:
    wide = write_base(tmp_path / "wide", dtype=torch.float32)
    model, _ = opened(None, settings(tmp_path / "run", nvme_capacity="1MiB"))
    with pytest.raises(zo.CapacityError, match="nvme_capacity leaves"):
        zo.load_pretrained(model, wide)
    assert swap_bytes(tmp_path / "run") < 1 << 20
    zo.close(model)


def test_a_checkpoint_that_has_to_be_copied_has_room_or_changes_nothing(
    folder: Path, plain: list[float], small: Path, tmp_path: Path
) -> None:
    wide = write_base(tmp_path / "wide", dtype=torch.float32)
    model, optimizer = opened(wide, settings(tmp_path / "run"))
    zo.save_checkpoint(model, optimizer, tmp_path / "copy")
    zo.close(model)
    model, optimizer = opened(None, settings(small / "run"))
    with pytest.raises(zo.CapacityError, match="frozen sections are to be written"):
        zo.load_checkpoint(model, optimizer, tmp_path / "copy")
    zo.load_pretrained(model, folder)
    assert steps(model, optimizer, 0, 6) == plain
    zo.close(model)


@pytest.mark.parametrize("skips", [False, True])
def test_what_is_trained_or_built_in_memory_takes_room_as_before(skips: bool, folder: Path, small: Path) -> None:
    model = deferred("skip" if skips else "init").requires_grad_(skips)
    if skips:
        zo.load_pretrained(model, folder)
    with pytest.raises(zo.CapacityError, match="nvme tier"):
        zo.offload(model, settings(small / "run"))


# The same numbers, and no write


@pytest.mark.parametrize("tiers", TIERS)
def test_losses_are_those_without_a_base_and_nothing_of_it_is_written(
    tiers: str, folder: Path, plain: list[float], tmp_path: Path
) -> None:
    with untouched(folder):
        model, optimizer = opened(folder, settings(tmp_path / "run", **TIERS[tiers]))
        assert all(shard.base is not None and not shard.slots for shard in frozen(model))
        trained_bytes = sum(shard.layout.shard_nbytes for shard in shards(model) if shard.layout.trainable)
        assert runtime(model).store.disk.nbytes <= 12 * 2 * trained_bytes
        losses = steps(model, optimizer, 0, 2)
        model.zero_grad()
        runtime(model).drain()
        before = zo.stats(model)
        losses += steps(model, optimizer, 2, 6)
        runtime(model).drain()
        assert losses == plain
        counters = runtime(model).store.counters.snapshot()
        # Values, residual and two moments of what is trained, and gradients.
        assert counters.get("written.nvme", 0) <= 7 * 20 * trained_bytes
        assert zo.stats(model).step == 6 and before.step == 2
        if tiers == "nvme":
            assert zo.stats(model).read_bytes["nvme"] > 0.9 * sum(shard.layout.shard_nbytes for shard in frozen(model))
        zo.close(model)


@pytest.mark.parametrize("tiers", ["nvme", "all nvme", "cpu", "mixed"])
def test_a_run_goes_on_by_itself(tiers: str, folder: Path, plain: list[float], tmp_path: Path) -> None:
    with untouched(folder):
        model, optimizer = opened(folder, settings(tmp_path / "run", **TIERS[tiers]))
        losses = steps(model, optimizer, 0, 3)
        zo.close(model)
        for first in (3, 5):
            model, optimizer = opened(None, settings(tmp_path / "run", existing="resume", **TIERS[tiers]))
            resumed = zo.resume(model, optimizer)
            assert resumed is not None and resumed.step == first
            assert all(file.known.all() for file in runtime(model).store.base_files)
            losses += steps(model, optimizer, first, first + 2)
            zo.close(model)
        assert losses[:6] == plain
    assert swap_bytes(tmp_path / "run") < 1 << 20


def test_a_plain_model_takes_the_base_too(folder: Path, plain: list[float], tmp_path: Path) -> None:
    """Built in memory, it has a slot for its values; a load makes them those of the files."""
    model, optimizer = opened(folder, settings(tmp_path / "run"), skips=False)
    assert all(shard.base is not None for shard in frozen(model))
    assert steps(model, optimizer, 0, 6) == plain
    zo.close(model)
    model, optimizer = opened(None, settings(tmp_path / "run", existing="resume"))
    assert zo.resume(model, optimizer) is not None and all(shard.base is not None for shard in frozen(model))
    zo.close(model)


def test_values_in_memory_stay_in_generations(tmp_path: Path) -> None:
    """Frozen values that no file has are as safe as before."""
    model, optimizer = opened(None, settings(tmp_path / "run"), skips=False)
    losses = steps(model, optimizer, 0, 2)
    values = read_masters(model)
    zo.close(model)
    model, optimizer = opened(None, settings(tmp_path / "run", existing="resume"), skips=False)
    zo.resume(model, optimizer)
    assert not runtime(model).store.base_files and len(losses) == 2
    assert all(torch.equal(values[name], each) for name, each in read_masters(model).items())
    zo.close(model)


def test_what_is_converted_is_written_once(folder: Path, tmp_path: Path) -> None:
    wide = write_base(tmp_path / "wide", dtype=torch.float32)
    model, optimizer = opened(wide, settings(tmp_path / "run"))
    assert all(shard.base is None and len(shard.slots) == 1 for shard in frozen(model))
    written = runtime(model).store.counters.snapshot()["written.nvme"]
    losses = steps(model, optimizer, 0, 3)
    per_step = (runtime(model).store.counters.snapshot()["written.nvme"] - written) / 3
    assert per_step < 0.1 * written
    zo.close(model)
    shutil.rmtree(wide)  # nothing needs it any more
    model, optimizer = opened(None, settings(tmp_path / "run", existing="resume"))
    zo.resume(model, optimizer)
    assert losses + steps(model, optimizer, 3, 6) == plain_losses(tmp_path)
    zo.close(model)


def plain_losses(tmp_path: Path) -> list[float]:
    model, optimizer = opened(write_base(tmp_path / "wide again", dtype=torch.float32), settings(None))
    losses = steps(model, optimizer, 0, 6, commits=False)
    zo.close(model)
    return losses


def test_a_section_of_several_dtypes_in_the_files_is_copied(own: Path, tmp_path: Path) -> None:
    file = own / "model-00001-of-00002.safetensors"
    weights = load_file(file)
    name = next(name for name in weights if name.startswith("blocks.1."))
    save_file(weights | {name: weights[name].float()}, file)
    model, optimizer = opened(own, settings(tmp_path / "run"))
    units = {shard.layout.unit: shard.base is None for shard in frozen(model)}
    assert sorted(units.values()) == [False] * (len(units) - 1) + [True]
    steps(model, optimizer, 0, 1)
    zo.close(model)


def test_tensors_that_files_have_in_parts(folder: Path, plain: list[float], tmp_path: Path) -> None:
    """As experts one by one: a parameter is joined of what lies in several places."""
    weights = base_weights()
    parts, joined, known = dict[str, Tensor](), dict[str, Joined](), dict[str, str]()
    for name, values in weights.items():
        if name.endswith("up.weight"):
            pieces = values.split(values.shape[0] // 4)
            names = tuple(f"{name}.{number}" for number in range(4))
            parts |= {each: piece.clone() for each, piece in zip(names, reversed(pieces), strict=True)}
            joined[name] = Joined(tuple(reversed(names)), None)
        else:
            parts[name], known[name] = values, name
    (tmp_path / "parts").mkdir()
    save_file(parts, tmp_path / "parts" / "model.safetensors")
    model, optimizer = opened(None, settings(tmp_path / "run"))
    load_weights(model, tmp_path / "parts", FileNames(known, made=joined))
    assert all(shard.base is not None for shard in frozen(model))
    assert max(len(shard.base.spans) for shard in frozen(model)) > len(weights) // 4
    assert steps(model, optimizer, 0, 6) == plain
    zo.close(model)


@dataclass(frozen=True)
class FromFile:
    """A recipe of a deferred parameter that files have."""

    source: StoredTensor
    is_skipped: bool = False

    @property
    def value(self) -> object:
        return self.source

    def drawn(self) -> bytes:
        return str(self.source.offset).encode()

    def make(self) -> Tensor:
        return self.source.read(0, self.source.numel).view(self.source.shape)


@pytest.mark.parametrize("tiers", ["nvme", "cpu", "mixed"])
def test_a_load_that_was_planned_before(tiers: str, own: Path, plain: list[float], tmp_path: Path) -> None:
    def started(folder: Path, existing: str) -> tuple[Any, zo.AdamW]:
        with open_weights(folder) as stored:
            with zo.deferred_init(values="skip"):
                model = Adapted()
            for name, param in model.named_parameters():
                keep_recipe(param, FromFile(stored[name]))
            zo.offload(model, settings(tmp_path / "run", existing=existing, **TIERS[tiers]))
        return model, zo.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-2)

    model, optimizer = started(own, "refuse")
    assert all(shard.base is not None and not shard.slots for shard in frozen(model))
    losses = steps(model, optimizer, 0, 3)
    zo.close(model)
    own.rename(tmp_path / "new place")
    model, optimizer = started(tmp_path / "new place", "resume")  # whose recipes say where the base is
    zo.resume(model, optimizer)
    assert losses + steps(model, optimizer, 3, 6) == plain
    zo.close(model)


def test_a_file_that_is_replaced_between_its_plan_and_the_offload(own: Path, tmp_path: Path) -> None:
    with zo.deferred_init(values="skip"):
        model = Adapted()
    zo.load_pretrained(model, own)
    file = sorted(own.glob("*.safetensors"))[0]
    save_file(dict(reversed(load_file(file).items())), tmp_path / "other")
    (tmp_path / "other").rename(file)
    with pytest.raises(zo.IntegrityError, match=f"{file.name} was replaced by another file.*zo.load_pretrained again"):
        zo.offload(model, settings(tmp_path / "run"))


# Files that change


def test_a_block_that_changes_while_a_model_trains(own: Path, tmp_path: Path) -> None:
    model, optimizer = opened(own, settings(tmp_path / "run"))
    steps(model, optimizer, 0, 2)
    file = next(iter(runtime(model).store.base_files)).path
    flip(file, file.stat().st_size - 100)
    with pytest.raises(zo.IntegrityError, match=rf"{file.name}, a file of the base.*other bytes"):
        steps(model, optimizer, 2, 4)
    close_broken(model)
    flip(file, file.stat().st_size - 100)
    model, optimizer = opened(None, settings(tmp_path / "run", existing="resume"))
    assert zo.resume(model, optimizer) is not None
    steps(model, optimizer, 2, 3)
    zo.close(model)


@pytest.mark.parametrize("tiers", ["nvme", "cpu"])
@pytest.mark.parametrize("how", ["a bit", "shorter", "deleted", "another base", "no file"])
def test_what_a_resume_meets(how: str, tiers: str, own: Path, tmp_path: Path) -> None:
    model, optimizer = opened(own, settings(tmp_path / "run", **TIERS[tiers]))
    steps(model, optimizer, 0, 2)
    zo.close(model)
    file = sorted(own.glob("*.safetensors"))[0]
    if how == "a bit":
        flip(file, file.stat().st_size // 3)
    elif how == "shorter":
        os.truncate(file, file.stat().st_size - 10)
    elif how == "deleted":
        shutil.rmtree(own)
    elif how == "another base":
        shutil.rmtree(own)
        write_base(own, seed=2)
    else:
        file.unlink()
        file.mkdir()

    def resume() -> None:
        model, optimizer = opened(None, settings(tmp_path / "run", existing="resume", **TIERS[tiers]))
        try:
            zo.resume(model, optimizer)
            steps(model, optimizer, 2, 3)
        finally:
            close_broken(model)

    with pytest.raises(zo.IntegrityError) as raised:
        resume()
    text = str(raised.value)
    assert file.name in text and ("zo.load_pretrained" in text or "Put the file back" in text)


def test_a_time_of_change_alone_is_no_change(own: Path, plain: list[float], tmp_path: Path) -> None:
    model, optimizer = opened(own, settings(tmp_path / "run"))
    losses = steps(model, optimizer, 0, 3)
    for path in own.iterdir():
        os.utime(path, (1, 1))
    losses += steps(model, optimizer, 3, 4)
    zo.close(model)
    model, optimizer = opened(None, settings(tmp_path / "run", existing="resume"))
    zo.resume(model, optimizer)
    assert losses + steps(model, optimizer, 4, 6) == plain
    zo.close(model)


def test_a_base_that_is_gone_when_a_generation_would_name_it(own: Path, plain: list[float], tmp_path: Path) -> None:
    model, optimizer = opened(own, settings(tmp_path / "run"))
    steps(model, optimizer, 0, 2)
    runtime(model).drain()
    own.rename(tmp_path / "elsewhere")
    with pytest.raises(zo.IntegrityError, match="cannot be found any more"):
        steps(model, optimizer, 2, 3)
        runtime(model).drain()
    close_broken(model)
    (tmp_path / "elsewhere").rename(own)
    model, optimizer = opened(None, settings(tmp_path / "run", existing="resume"))
    resumed = zo.resume(model, optimizer)
    assert resumed is not None and steps(model, optimizer, resumed.step, 6) == plain[resumed.step :]
    zo.close(model)


@pytest.mark.parametrize("tiers", ["nvme", "cpu", "mixed"])
@pytest.mark.parametrize("when", ["before zo.resume", "after zo.resume"])
def test_a_base_that_has_moved(when: str, tiers: str, own: Path, plain: list[float], tmp_path: Path) -> None:
    config = settings(tmp_path / "run", existing="resume", **TIERS[tiers])
    model, optimizer = opened(own, config)
    losses = steps(model, optimizer, 0, 3)
    zo.close(model)
    own.rename(tmp_path / "new place")
    model, optimizer = opened(None, config)
    with pytest.raises(zo.IntegrityError, match=r"cannot be read there.*zo.load_pretrained\(model, "):
        steps(model, optimizer, 3, 4)
    with pytest.raises(zo.IntegrityError, match="is not the base that the generation rests in"):
        zo.load_pretrained(model, write_base(tmp_path / "other", seed=2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if when == "after zo.resume":
            zo.resume(model, optimizer)
        zo.load_pretrained(model, tmp_path / "new place")
        if when == "before zo.resume":
            zo.resume(model, optimizer)
    losses += steps(model, optimizer, 3, 5)
    zo.close(model)
    model, optimizer = opened(None, config)  # the new place is in the generation
    zo.resume(model, optimizer)
    assert losses + steps(model, optimizer, 5, 6) == plain
    zo.close(model)


@pytest.mark.parametrize("tiers", ["nvme", "cpu", "mixed"])
@pytest.mark.parametrize("when", ["before zo.offload", "after zo.offload"])
def test_a_copy_with_other_bytes_in_a_block(
    when: str, tiers: str, own: Path, plain: list[float], tmp_path: Path
) -> None:
    """Neither the header nor the two blocks of the fingerprint tell: a value that is read is another."""
    config = settings(tmp_path / "run", existing="resume", **TIERS[tiers])
    model, optimizer = opened(own, config)
    losses = steps(model, optimizer, 0, 3)
    zo.close(model)
    own.rename(tmp_path / "copy")
    files = sorted((tmp_path / "copy").glob("*.safetensors"))
    flip(files[1], files[1].stat().st_size // 3)
    torch.manual_seed(0)
    with zo.deferred_init(values="skip"):
        model = Adapted()
    if when == "before zo.offload":
        zo.load_pretrained(model, tmp_path / "copy")
    zo.offload(model, config)
    optimizer = zo.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-2)
    zo.resume(model, optimizer)
    for _ in range(2):
        with pytest.raises(zo.IntegrityError, match="other bytes"):
            if when == "after zo.offload":
                zo.load_pretrained(model, tmp_path / "copy")
            steps(model, optimizer, 3, 4)
        if tiers == "nvme":
            break
    close_broken(model)
    flip(files[1], files[1].stat().st_size // 3)
    model, optimizer = opened(None, config)
    zo.load_pretrained(model, tmp_path / "copy")
    zo.resume(model, optimizer)
    assert losses + steps(model, optimizer, 3, 6) == plain
    zo.close(model)


def test_a_copy_may_be_used_though_the_first_place_is_there(own: Path, plain: list[float], tmp_path: Path) -> None:
    config = settings(tmp_path / "run", existing="resume")
    model, optimizer = opened(own, config)
    losses = steps(model, optimizer, 0, 3)
    zo.close(model)
    shutil.copytree(own, tmp_path / "copy")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model, optimizer = opened(tmp_path / "copy", config)
    zo.resume(model, optimizer)
    shutil.rmtree(own)
    assert losses + steps(model, optimizer, 3, 6) == plain
    assert runtime(model).store.base_files[0].path.parent == tmp_path / "copy"
    zo.close(model)
    with pytest.warns(UserWarning, match="is not loaded"):
        model, _ = opened(write_base(tmp_path / "other", seed=2), config)
    zo.close(model)


def test_a_drive_that_fails_keeps_the_last_commit(own: Path, plain: list[float], tmp_path: Path) -> None:
    model, optimizer = opened(own, settings(tmp_path / "run"))
    steps(model, optimizer, 0, 2)
    runtime(model).drain()
    engine: Any = runtime(model).store.base._engine
    engine.inject_fault(Fault.READ_EIO, 2)
    with pytest.raises(zo.StorageError, match=r"safetensors .*Input/output error"):
        steps(model, optimizer, 2, 4)
    close_broken(model)
    model, optimizer = opened(None, settings(tmp_path / "run", existing="resume"))
    resumed = zo.resume(model, optimizer)
    assert resumed is not None and steps(model, optimizer, resumed.step, 6) == plain[resumed.step :]
    zo.close(model)


# Writes


def test_a_write_makes_a_copy_of_our_own(own: Path, tmp_path: Path) -> None:
    with untouched(own):
        model, optimizer = opened(own, settings(tmp_path / "run", existing="resume"))
        steps(model, optimizer, 0, 2)
        with zo.gathered(model.blocks[1].up, mode="write") as values:
            values["blocks.1.up.weight"].mul_(2)
        assert [shard.base is None for shard in frozen(model)].count(True) == 1
        steps(model, optimizer, 2, 3)
        values_now = read_masters(model)
        zo.close(model)
        assert torch.equal(values_now["blocks.1.up.weight"], base_weights()["blocks.1.up.weight"] * 2)
        assert torch.equal(values_now["blocks.1.down.weight"], base_weights()["blocks.1.down.weight"])
        for _ in range(2):
            model, optimizer = opened(None, settings(tmp_path / "run", existing="resume"))
            zo.resume(model, optimizer)
            for name, values in read_masters(model).items():
                assert torch.equal(values, values_now[name]), name
            zo.close(model)


@pytest.mark.parametrize("tiers", ["nvme", "cpu"])
def test_a_state_dict_that_is_loaded_over_it(tiers: str, own: Path, tmp_path: Path) -> None:
    with untouched(own):
        model, optimizer = opened(own, settings(tmp_path / "run", existing="resume", **TIERS[tiers]))
        state = {name: values.clone() for name, values in model.state_dict().items()}
        assert torch.equal(state["blocks.0.up.weight"], base_weights()["blocks.0.up.weight"])
        state["blocks.0.up.weight"] = state["blocks.0.up.weight"] + 1
        model.load_state_dict(state)
        zo.commit(model, optimizer)
        steps(model, optimizer, 0, 1)
        zo.close(model)
        model, optimizer = opened(None, settings(tmp_path / "run", existing="resume", **TIERS[tiers]))
        zo.resume(model, optimizer)
        assert torch.equal(read_masters(model)["blocks.0.up.weight"], state["blocks.0.up.weight"])
        zo.close(model)


def test_a_second_load_leaves_the_first_base(own: Path, tmp_path: Path) -> None:
    model, optimizer = opened(own, settings(tmp_path / "run", existing="resume"))
    zo.load_pretrained(model, write_base(tmp_path / "second", seed=2))
    shutil.rmtree(own)
    losses = steps(model, optimizer, 0, 2)
    zo.close(model)
    model, optimizer = opened(None, settings(tmp_path / "run", existing="resume"))
    zo.resume(model, optimizer)
    expected, other = opened(write_base(tmp_path / "third", seed=2), settings(None))
    assert losses + steps(model, optimizer, 2, 4) == steps(expected, other, 0, 4, commits=False)
    zo.close(model)
    zo.close(expected)


def test_weights_that_a_training_wrote_are_copied(own: Path, tmp_path: Path) -> None:
    model, _ = opened(own, settings(tmp_path / "run"))
    replace_weights(model, write_base(tmp_path / "best", seed=2))
    shutil.rmtree(tmp_path / "best")
    assert all(shard.base is None for shard in frozen(model))
    weights = base_weights(2)
    found = read_masters(model)
    assert all(
        torch.equal(found[shard.layout.params[0].spec.name], weights[shard.layout.params[0].spec.name])
        for shard in frozen(model)
    )
    zo.close(model)


# Checkpoints and commands


def test_a_checkpoint_holds_the_trained_part_alone(folder: Path, plain: list[float], tmp_path: Path) -> None:
    model, optimizer = opened(folder, settings(tmp_path / "run"))
    losses = steps(model, optimizer, 0, 3)
    zo.save_checkpoint(model, optimizer, tmp_path / "ckpt")
    zo.close(model)
    assert swap_bytes(tmp_path / "ckpt") < sum(path.stat().st_size for path in folder.glob("*.safetensors")) / 5
    said = json.loads((tmp_path / "ckpt" / "run.json").read_text())["payload"]["base"]
    assert said["folder"] == str(folder) and len(said["fingerprint"]) == 64
    shutil.copytree(folder, tmp_path / "copy")
    for where, tiers in ((folder, {}), (tmp_path / "copy", {}), (None, {}), (None, {"params": "cpu"})):
        model, optimizer = opened(where, settings(tmp_path / "second", existing="discard", **tiers))
        assert zo.load_checkpoint(model, optimizer, tmp_path / "ckpt").step == 3
        assert all(shard.base is not None for shard in frozen(model))
        assert losses + steps(model, optimizer, 3, 6) == plain
        zo.close(model)
    model, _ = opened(folder, settings(None))
    zo.load_checkpoint(model, None, tmp_path / "ckpt")  # to evaluate
    with torch.no_grad():
        assert model(tokens_of(3)).item() == plain[3]
    zo.close(model)


def test_a_checkpoint_of_another_base(own: Path, tmp_path: Path) -> None:
    model, optimizer = opened(own, settings(tmp_path / "run"))
    steps(model, optimizer, 0, 1)
    zo.save_checkpoint(model, optimizer, tmp_path / "ckpt")
    zo.close(model)
    model, optimizer = opened(write_base(tmp_path / "other", seed=2), settings(None))
    with pytest.raises(zo.CheckpointError, match="is another: their fingerprints differ"):
        zo.load_checkpoint(model, optimizer, tmp_path / "ckpt")
    steps(model, optimizer, 0, 1, commits=False)
    zo.close(model)
    own.rename(tmp_path / "moved")
    model, optimizer = opened(None, settings(None))
    with pytest.raises(zo.CheckpointError, match="holds the trained part only.*zo.load_pretrained"):
        zo.load_checkpoint(model, optimizer, tmp_path / "ckpt")
    zo.load_pretrained(model, tmp_path / "moved")
    zo.load_checkpoint(model, optimizer, tmp_path / "ckpt")
    zo.close(model)


def test_verify_export_and_clean_know_it(own: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with untouched(own):
        model, optimizer = opened(own, settings(tmp_path / "run"))
        steps(model, optimizer, 0, 2)
        weights = {name: values.bfloat16() for name, values in read_masters(model).items()}
        zo.close(model)
        run = str(tmp_path / "run")
        assert main(["verify", run, "--json"]) == 0
        found = json.loads(capsys.readouterr().out)["generations"]
        total = sum(path.stat().st_size for path in own.glob("*.safetensors"))
        assert all(each["whole"] and each["verified_bytes"] > total for each in found)
        assert main(["export", run, str(tmp_path / "out")]) == 0
        exported = read_folder(tmp_path / "out")
        assert exported.keys() == weights.keys() - {"head.weight"}
        assert all(torch.equal(exported[name], weights[name]) for name in exported)
    capsys.readouterr()
    file = sorted(own.glob("*.safetensors"))[1]
    flip(file, file.stat().st_size - 50)
    assert main(["verify", run]) == zo.IntegrityError.exit_code
    said = capsys.readouterr().out
    assert "BAD" in said and file.name in said and "base of" in said
    with pytest.raises(zo.IntegrityError, match=file.name):
        main_raising(["export", run, str(tmp_path / "out2")])
    assert main(["clean", run, "--yes"]) == 0
    assert file.is_file() and not (tmp_path / "run").exists()
    shutil.rmtree(own)


def main_raising(arguments: list[str]) -> None:
    export.run(build_parser().parse_args(arguments))


def test_verify_names_a_base_that_is_gone(own: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, optimizer = opened(own, settings(tmp_path / "run"))
    steps(model, optimizer, 0, 1)
    zo.close(model)
    shutil.rmtree(own)
    assert main(["verify", str(tmp_path / "run")]) == zo.IntegrityError.exit_code
    assert "cannot be read there" in capsys.readouterr().out


def test_two_runs_share_it(folder: Path, plain: list[float], tmp_path: Path) -> None:
    with untouched(folder):
        runs = [opened(folder, settings(tmp_path / f"run{number}")) for number in range(2)]
        losses: list[list[float]] = [[], []]
        for step in range(6):
            for number, (model, optimizer) in enumerate(runs):
                losses[number] += steps(model, optimizer, step, step + 1)
        assert losses == [plain, plain]
        for model, _ in runs:
            zo.close(model)


def test_close_lets_go_of_the_files(folder: Path, tmp_path: Path) -> None:
    def open_ones() -> int:
        return sum(
            os.path.realpath(f"/proc/self/fd/{fd}").startswith(str(folder)) for fd in os.listdir("/proc/self/fd")
        )

    model, optimizer = opened(folder, settings(tmp_path / "run"))
    assert open_ones() == 4
    steps(model, optimizer, 0, 1)
    zo.close(model)
    assert open_ones() == 0


def test_a_load_that_fails_leaves_a_model_to_load_again(own: Path, plain: list[float], tmp_path: Path) -> None:
    model, optimizer = opened(None, settings(tmp_path / "run", params="cpu"))
    with pytest.MonkeyPatch.context() as patched:

        def fail(*_: object) -> None:
            raise zo.StorageError("the drive is gone")

        patched.setattr(BaseFiles, "read", fail)
        with pytest.raises(zo.StorageError, match=r"the drive is gone.*Call zo.load_pretrained again"):
            zo.load_pretrained(model, own)
    zo.load_pretrained(model, own)
    assert steps(model, optimizer, 0, 6) == plain
    zo.close(model)


def test_a_state_dict_reads_it(folder: Path, tmp_path: Path) -> None:
    model, _ = opened(folder, settings(tmp_path / "run"))
    weights = base_weights()
    for name, values in model.state_dict().items():
        if not name.startswith("scales"):
            assert torch.equal(values, weights[name.replace("head.weight", "embedding.weight")]), name
    shard = frozen(model)[0]
    assert torch.equal(
        runtime(model).store.read_component(shard, Component.VALUE)[: shard.layout.params[0].spec.numel],
        weights[shard.layout.params[0].spec.name].flatten(),
    )
    zo.close(model)


FORGED: dict[str, Any] = {
    "a span behind the end": lambda base: base["sections"].update(
        {k: [[0, 100, 0, 1 << 40]] for k in base["sections"]}
    ),
    "a span before the begin": lambda base: base["sections"].update({k: [[-5, 100, 0, 0]] for k in base["sections"]}),
    "no such file": lambda base: base["sections"].update({k: [[0, 100, 99, 0]] for k in base["sections"]}),
    "a file of no size": lambda base: base["files"][0].update(nbytes=0),
    "a huge file": lambda base: base["files"][0].update(nbytes=1 << 60),
    "text for numbers": lambda base: base["files"][0].update(nbytes="many"),
    "a sample of no block": lambda base: base["files"][0].update(samples={"12345": 1}),
    "files that are none": lambda base: base.update(files=None),
    "a folder as a file": lambda base: base["files"][0].update(path="/"),
}


@pytest.mark.parametrize("what", FORGED)
def test_a_record_that_was_forged(what: str, folder: Path, tmp_path: Path) -> None:
    """Under a right digest: refused before anything is read by it."""
    model, optimizer = opened(folder, settings(tmp_path / "run"))
    steps(model, optimizer, 0, 1)
    zo.close(model)
    with RunDirectory.open(tmp_path / "run") as directory:
        (name,) = [name for name in directory.names() if name.startswith("generation")]
        payload = read_manifest(directory, name)
        assert payload is not None
        FORGED[what](payload["base"])
        write_manifest(directory, name, payload, Durability.PROCESS)
    with pytest.raises(zo.IntegrityError):
        model, optimizer = opened(None, settings(tmp_path / "run", existing="resume"))
        try:
            zo.resume(model, optimizer)
            steps(model, optimizer, 1, 2)
        finally:
            close_broken(model)


def test_of_experts_in_groups_just_the_elements_are_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make = partial(experts_lm, dim=36, inner=24, size=1, num_blocks=2)
    weights = {name: param.detach().bfloat16() for name, param in build(make).named_parameters()}
    (tmp_path / "base").mkdir()
    save_file(weights, tmp_path / "base" / "model.safetensors")
    with zo.deferred_init(values="skip"):
        model: Any = make().requires_grad_(False)
    zo.offload(model, settings(tmp_path / "run"))
    zo.load_pretrained(model, tmp_path / "base")
    units = [unit for unit in runtime(model).layout.units if unit.experts is not None]
    names = {f"section {section.index} base" for unit in units for section in unit.sections}
    asked, launch = list[int](), BaseFiles.launch_read

    def noted(files: BaseFiles, name: str, spans: Any, stretches: Any, *rest: Any) -> Any:
        asked.extend([sum(end - begin for begin, end, _ in stretches)] * (name in names))
        return launch(files, name, spans, stretches, *rest)

    monkeypatch.setattr(BaseFiles, "launch_read", noted)
    with torch.no_grad():
        model(tokens_of(0))
        model(tokens_of(0))  # from here on the order is known: the last group is followed by the first one
        asked.clear()
        losses = model(tokens_of(0)).item(), model(tokens_of(0)).item()
    zo.close(model)
    experts = sum(values.nbytes for name, values in weights.items() if ".experts." in name)
    assert sum(asked) == 2 * experts and len(asked) == 2 * 2 * 6  # calls, blocks, experts
    whole: Any = build(partial(make, size=0)).bfloat16()
    assert losses == (whole(tokens_of(0)).item(),) * 2
