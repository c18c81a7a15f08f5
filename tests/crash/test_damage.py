"""Contents of a directory in which a run starts: damage, another model, another run, files of others."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zero_offload as zo
from tests.helpers.disk import (
    SWAP,
    assert_finishes,
    close_broken,
    committed_blocks,
    flip_bit,
    generation_file,
    open_model,
    train,
    write_run,
)
from tests.helpers.models import TinyLM, build
from tests.helpers.trainer import Run, Spec
from zero_offload.base.types import Durability
from zero_offload.storage.files.directory import RunDirectory
from zero_offload.storage.files.manifest import read_manifest, write_manifest

STEPS = 6


def _resume_and_train(nvme: Path, **settings: Any) -> None:
    """Read every byte of the generation, which notices damage at the latest."""
    model, optimizer = open_model(nvme, **settings)
    try:
        zo.resume(model, optimizer)
        train(model, optimizer, 3, 4)
        model.state_dict()
    finally:
        close_broken(model)


def _rank_manifest(nvme: Path) -> Path:
    generation = json.loads(generation_file(nvme).read_text())
    return nvme / str(generation["payload"]["ranks"][0]["manifest"])


# The swap file


@pytest.mark.parametrize("optimizer", ["nvme", "cpu"])
def test_one_flipped_bit_anywhere_is_noticed(optimizer: str, nvme: Path, tmp_path: Path) -> None:
    write_run(nvme, 3)
    blocks = committed_blocks(nvme)
    assert {component for _, component in blocks} == {"value", "residual", "exp_avg", "exp_avg_sq"}
    for number, (offset, component) in enumerate(blocks):
        copy = tmp_path / f"copy{number}"
        shutil.copytree(nvme, copy)
        flip_bit(copy / SWAP, offset + 5, bit=number % 8)
        with pytest.raises(zo.IntegrityError, match="checksum") as caught:
            _resume_and_train(copy, optimizer=optimizer)
        assert f"offset {offset} of {copy / SWAP}" in str(caught.value), component


def test_a_truncated_file(nvme: Path) -> None:
    write_run(nvme, 3)
    whole = (nvme / SWAP).read_bytes()
    (nvme / SWAP).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(zo.IntegrityError, match="truncated") as caught:
        open_model(nvme)
    assert str(nvme / SWAP) in str(caught.value) and "existing='discard'" in str(caught.value)
    (nvme / SWAP).write_bytes(whole)
    assert assert_finishes(nvme, STEPS) == 3


def test_the_file_of_another_run_of_the_same_model(nvme: Path, tmp_path: Path) -> None:
    write_run(nvme, 3)
    model, optimizer = open_model(tmp_path / "other", build(TinyLM, seed=1))
    train(model, optimizer, 0, 3)
    zo.close(model)
    (nvme / SWAP).write_bytes((tmp_path / "other" / SWAP).read_bytes())
    with pytest.raises(zo.IntegrityError) as caught:
        _resume_and_train(nvme)
    assert str(nvme / SWAP) in str(caught.value)


def test_an_older_copy_of_the_same_file(nvme: Path, tmp_path: Path) -> None:
    write_run(nvme, 2)
    stale = (nvme / SWAP).read_bytes()
    model, optimizer = open_model(nvme)
    train(model, optimizer, 2, 4)
    zo.close(model)
    (nvme / SWAP).write_bytes(stale)
    with pytest.raises(zo.IntegrityError):
        _resume_and_train(nvme)


def test_a_missing_file(nvme: Path) -> None:
    write_run(nvme, 3)
    (nvme / SWAP).unlink()
    with pytest.raises(zo.StorageError, match=str(nvme / SWAP)):
        open_model(nvme)


# Manifests


@pytest.mark.parametrize("which", ["generation", "rank"])
def test_a_flipped_bit_in_a_manifest(which: str, nvme: Path) -> None:
    write_run(nvme, 3)
    path = generation_file(nvme) if which == "generation" else _rank_manifest(nvme)
    whole = path.read_bytes()
    places = sorted({*range(0, len(whole), max(1, len(whole) // 23)), *range(12), len(whole) - 2, len(whole) - 1})
    for place in places:
        flip_bit(path, place, bit=place % 7)
        with pytest.raises((zo.IntegrityError, zo.CheckpointError)) as caught:
            open_model(nvme)
        assert str(path) in str(caught.value)
        path.write_bytes(whole)
    assert assert_finishes(nvme, STEPS) == 3


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b"null", b'{"magic":', b"\x00" * 200, b"[" * 10**5], ids=repr)
def test_a_manifest_that_is_none(content: bytes, nvme: Path) -> None:
    write_run(nvme, 1)
    path = generation_file(nvme)
    path.write_bytes(content)
    with pytest.raises((zo.IntegrityError, zo.CheckpointError), match=path.name):
        open_model(nvme)
    assert assert_finishes(nvme, STEPS, existing="discard") == 0


def test_a_missing_rank_manifest(nvme: Path) -> None:
    write_run(nvme, 3)
    path = _rank_manifest(nvme)
    path.unlink()
    with pytest.raises(zo.IntegrityError, match=f"lacks {path.name}"):
        open_model(nvme)


def test_a_rank_manifest_of_another_generation(nvme: Path) -> None:
    write_run(nvme, 3)
    path = _rank_manifest(nvme)
    (other,) = [each for each in nvme.glob("rank0-*.json") if each != path]
    path.write_bytes(other.read_bytes())
    with pytest.raises(zo.IntegrityError, match="the commit names"):
        open_model(nvme)


# Another model, another optimizer


def _renamed() -> nn.Module:
    model = build(TinyLM)
    model.final = model.norm
    del model.norm
    model.run_blocks = lambda x: x  # type: ignore[assignment]
    return model


def _frozen() -> nn.Module:
    model = build(TinyLM)
    model.get_parameter("embedding.weight").requires_grad_(False)
    return model


def _untied() -> nn.Module:
    model = build(TinyLM)
    head = model.get_submodule("head")
    head.weight = nn.Parameter(head.weight.detach().clone())  # type: ignore[assignment]
    return model


def _with_one_more() -> nn.Module:
    model = build(TinyLM)
    model.register_parameter("temperature", nn.Parameter(torch.ones(1)))
    return model


OTHERS: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], str]] = {
    "renamed": (_renamed, {}, "name='norm.weight'"),
    "wider": (lambda: build(lambda: TinyLM(64)), {}, r"embedding.weight.*shape=\[61, 32\].*shape=\[61, 64\]"),
    "deeper": (lambda: build(lambda: TinyLM(num_blocks=4)), {}, "blocks.3"),
    "in fp32": (lambda: build(TinyLM), {"precision": "fp32"}, "dtype='bfloat16'.*dtype='float32'"),
    "untied": (_untied, {}, "head.weight"),
    "with a parameter more": (_with_one_more, {}, "temperature"),
    "partly frozen": (_frozen, {}, "embedding.weight.*trainable=True.*trainable=False"),
}


@pytest.mark.parametrize(("make", "settings", "words"), OTHERS.values(), ids=OTHERS)
def test_the_generation_of_another_model(
    make: Callable[[], nn.Module], settings: dict[str, Any], words: str, nvme: Path
) -> None:
    write_run(nvme, 3)
    with pytest.raises(zo.CheckpointError, match=words) as caught:
        open_model(nvme, make(), **settings)
    assert str(nvme) in str(caught.value)
    assert assert_finishes(nvme, STEPS) == 3


def test_other_units_of_the_same_model(nvme: Path) -> None:
    write_run(nvme, 1)
    model = build(TinyLM)
    with pytest.raises(zo.CheckpointError, match="units"):
        zo.offload(model, zo.OffloadConfig(nvme=nvme, existing="resume"), units=["blocks.0.up"])


def test_an_optimizer_with_other_groups(nvme: Path) -> None:
    write_run(nvme, 3)
    model = build(TinyLM)
    zo.offload(model, zo.OffloadConfig(params="nvme", optimizer="nvme", nvme=nvme, existing="resume"))
    optimizer = zo.AdamW(model.parameters(), lr=1e-2)
    with pytest.raises(zo.CheckpointError, match="param groups"):
        zo.resume(model, optimizer)
    zo.close(model)
    assert assert_finishes(nvme, STEPS) == 3


# Another run, files of others


def test_a_directory_in_use_names_who_uses_it(tmp_path: Path) -> None:
    run = Run(Spec(nvme=str(tmp_path / "nvme"), out=str(tmp_path), num_steps=10**6))
    try:
        assert run.wait_for_rows(1)
        for existing in ("resume", "refuse", "discard"):
            with pytest.raises(zo.LockError, match=f"process {run.pid} ") as caught:
                open_model(tmp_path / "nvme", existing=existing)
            assert str(tmp_path / "nvme") in str(caught.value)
        assert run.process.exitcode is None
    finally:
        run.stop()


def test_refuse_names_the_step(nvme: Path) -> None:
    write_run(nvme, 3)
    with pytest.raises(zo.ConfigError, match="step 3.*existing='resume'"):
        open_model(nvme, existing="refuse")
    assert assert_finishes(nvme, STEPS) == 3


def test_discard_removes_our_files_and_no_others(nvme: Path) -> None:
    foreign = {"notes.txt": b"mine", "rank7.swap": b"not listed", "results.json": b"{}"}
    for name, content in foreign.items():
        (nvme / name).write_bytes(content)
    write_run(nvme, 3)
    before = json.loads((nvme / "run.json").read_text())["payload"]["run_id"]
    assert assert_finishes(nvme, STEPS, existing="discard") == 0
    assert json.loads((nvme / "run.json").read_text())["payload"]["run_id"] != before
    assert {name: (nvme / name).read_bytes() for name in foreign} == foreign


def test_a_foreign_file_with_a_name_of_ours_is_not_overwritten(nvme: Path) -> None:
    (nvme / SWAP).write_bytes(b"precious")
    with pytest.raises(zo.StorageError, match=SWAP):
        open_model(nvme)
    assert (nvme / SWAP).read_bytes() == b"precious"


def test_a_start_that_was_killed_before_its_first_commit(nvme: Path) -> None:
    write_run(nvme, 1)
    for path in (generation_file(nvme), nvme / "rank0-1.json"):
        path.unlink()
    (nvme / f"{path.name}.tmp").write_text("{")
    _unlist_generations(nvme)
    assert assert_finishes(nvme, STEPS, existing="refuse") == 0


def _unlist_generations(nvme: Path) -> None:
    """`run.json` as it is before the first commit."""
    with RunDirectory.open(nvme) as directory:
        payload = read_manifest(directory, "run.json") or {}
        write_manifest(directory, "run.json", payload | {"generations": []}, Durability.PROCESS)


# The same generation elsewhere


PLACEMENTS: list[dict[str, Any]] = [
    {},
    {"params": "cpu"},
    {"optimizer": "cpu"},
    {"params": "cpu", "optimizer": "cpu"},
    {"params": {"cpu": 0.5, "nvme": 0.5}, "optimizer": {"cpu": 0.4, "nvme": 0.6}, "grads": "nvme"},
]


def _changes() -> list[Any]:
    """From each to the next two; the others are marked `full`."""
    steps = itertools.product(range(len(PLACEMENTS)), repeat=2)
    return [
        pytest.param(
            PLACEMENTS[i], PLACEMENTS[j], marks=[] if (j - i) % len(PLACEMENTS) in (1, 2) else pytest.mark.full
        )
        for i, j in steps
    ]


@pytest.mark.parametrize(("before", "after"), _changes(), ids=str)
def test_a_run_goes_on_with_another_placement(before: dict[str, Any], after: dict[str, Any], nvme: Path) -> None:
    write_run(nvme, 2, **before)
    write_run_on(nvme, 2, 3, **after)
    assert assert_finishes(nvme, STEPS, **before) == 3


def write_run_on(nvme: Path, begin: int, end: int, **settings: Any) -> None:
    model, optimizer = open_model(nvme, **settings)
    zo.resume(model, optimizer)
    train(model, optimizer, begin, end)
    zo.close(model)


@pytest.mark.parametrize("settings", [{"grads": "nvme"}, {"optimizer": "cpu"}], ids=str)
def test_files_do_not_grow_from_start_to_start(settings: dict[str, Any], nvme: Path) -> None:
    write_run(nvme, 1, **settings)
    nbytes = (nvme / SWAP).stat().st_size
    for step in range(1, 4):
        write_run_on(nvme, step, step + 1, **settings)
        assert (nvme / SWAP).stat().st_size == nbytes


def test_a_change_of_values_after_a_commit_does_not_reach_into_it(nvme: Path) -> None:
    """`load_state_dict` and `gathered` wait for the commit under way; each commit holds one state."""
    model, optimizer = open_model(nvme, params="cpu", optimizer="cpu")
    train(model, optimizer, 0, 3)
    with zo.gathered(model.get_submodule("embedding"), mode="write"), torch.no_grad():
        model.get_parameter("embedding.weight").zero_()
    model.load_state_dict({name: torch.zeros_like(value) for name, value in model.state_dict().items()})
    zo.close(model)
    assert assert_finishes(nvme, STEPS) == 3
