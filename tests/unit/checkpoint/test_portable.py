"""Checkpoints: saved under one placement, loaded under another, never changed, never half believed."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zero_offload as zo
from tests.helpers.disk import SWAP, close_broken, flip_bit, generation_file, open_model, train
from tests.helpers.models import WIDE, TinyLM, build, tokens_of
from tests.helpers.pairwise import in_pairs, in_turn
from tests.helpers.reference import read_masters
from zero_offload.checkpoint.saved_generation import SavedGeneration
from zero_offload.plan.dtypes import ComputeDtypes
from zero_offload.plan.layout import ShardLayout, make_layout
from zero_offload.plan.model_spec import ModelSpec
from zero_offload.runtime.ranks.collectives import CommitGroup
from zero_offload.runtime.ranks.group import RankGroup
from zero_offload.storage.shards.shard import planned_components

IN_MEMORY = {"params": "cpu", "optimizer": "cpu"}
PLACEMENTS: list[dict[str, Any]] = [{}, IN_MEMORY, {"params": {"cpu": 0.5, "nvme": 0.5}, "grads": "nvme"}]


def _partly_frozen() -> nn.Module:
    model = build(lambda: TinyLM(33))
    for param in model.get_submodule("blocks.1").parameters():
        param.requires_grad_(False)
    return model


def _states(model: nn.Module, optimizer: zo.AdamW) -> list[torch.Tensor]:
    found = list(read_masters(model).values())
    for state in optimizer.state_dict()["state"].values():
        found += [state[name] for name in sorted(state)]
    return found


def _equal(mine: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return len(mine) == len(theirs) and all(map(torch.equal, mine, theirs))


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A checkpoint of three steps."""
    model, optimizer = open_model(tmp_path / "run", _partly_frozen())
    train(model, optimizer, 0, 3)
    zo.save_checkpoint(model, optimizer, tmp_path / "saved", extra={"position": 3})
    zo.close(model)
    return tmp_path / "saved"


@in_pairs(before=PLACEMENTS, after=PLACEMENTS, precision=["bf16", "fp16", "fp32"])
def test_across_placements(before: dict[str, Any], after: dict[str, Any], precision: str, tmp_path: Path) -> None:
    model, optimizer = open_model(tmp_path / "a", _partly_frozen(), precision=precision, **before)
    train(model, optimizer, 0, 3)
    zo.save_checkpoint(model, optimizer, tmp_path / "saved", extra=[1, "two"])
    other, its_optimizer = open_model(tmp_path / "b", _partly_frozen(), precision=precision, **after)
    train(other, its_optimizer, 7, 8)
    its_optimizer.param_groups[0]["lr"] = 5.0
    loaded = zo.load_checkpoint(other, its_optimizer, tmp_path / "saved")
    assert (loaded.step, loaded.extra) == (3, [1, "two"])
    assert _equal(_states(model, optimizer), _states(other, its_optimizer))
    assert train(model, optimizer, 3, 6) == train(other, its_optimizer, 3, 6)
    zo.close(model)
    zo.close(other)


def test_a_loaded_checkpoint_is_committed_with_the_next_step(saved: Path, tmp_path: Path) -> None:
    model, optimizer = open_model(tmp_path / "b", _partly_frozen())
    zo.load_checkpoint(model, optimizer, saved)
    losses = train(model, optimizer, 3, 4)
    zo.close(model)
    model, optimizer = open_model(tmp_path / "b", _partly_frozen())
    resumed = zo.resume(model, optimizer)
    assert resumed is not None and resumed.step == 4
    model_again, optimizer_again = open_model(tmp_path / "c", _partly_frozen())
    zo.load_checkpoint(model_again, optimizer_again, saved)
    assert train(model_again, optimizer_again, 3, 4) == losses
    assert _equal(_states(model, optimizer), _states(model_again, optimizer_again))
    zo.close(model)
    zo.close(model_again)


def _moments(optimizer: zo.AdamW) -> list[torch.Tensor]:
    """States that are not in a master, copied."""
    states = optimizer.state_dict()["state"].values()
    return [state[name].clone() for state in states for name in ("step", "exp_avg", "exp_avg_sq")]


@in_turn(before=PLACEMENTS, after=PLACEMENTS, precision=["bf16", "fp16", "fp32"])
def test_an_evaluation_loads_parameters_alone(
    before: dict[str, Any], after: dict[str, Any], precision: str, tmp_path: Path
) -> None:
    model, optimizer = open_model(tmp_path / "a", _partly_frozen(), precision=precision, **before)
    train(model, optimizer, 0, 3)
    zo.save_checkpoint(model, optimizer, tmp_path / "saved")
    other, its_optimizer = open_model(tmp_path / "b", _partly_frozen(), precision=precision, **after)
    train(other, its_optimizer, 7, 9)
    moments = _moments(its_optimizer)
    its_optimizer.param_groups[0]["lr"] = 5.0
    torch.manual_seed(5)
    generator = torch.get_rng_state()
    assert zo.load_checkpoint(other, None, tmp_path / "saved").step == 3
    assert torch.equal(torch.get_rng_state(), generator) and its_optimizer.param_groups[0]["lr"] == 5.0
    assert _equal(list(read_masters(other).values()), list(read_masters(model).values()))
    assert len(moments) > 3 and _equal(_moments(its_optimizer), moments)
    with torch.no_grad():
        assert torch.equal(other(tokens_of(0)), model(tokens_of(0)))
    train(other, its_optimizer, 9, 10)
    zo.close(model)
    zo.close(other)


def test_an_evaluation_of_a_wide_model(tmp_path: Path) -> None:
    """Shards of several chunks, some of which have states when the parameters are written."""
    settings = {"params": "nvme", "optimizer": "nvme", "precision": "bf16"}
    model, optimizer = open_model(tmp_path / "a", build(lambda: TinyLM(WIDE)), **settings)
    train(model, optimizer, 0, 1)
    zo.save_checkpoint(model, optimizer, tmp_path / "saved")
    masters, moments = read_masters(model), _moments(optimizer)
    for name in ("b", "c"):
        other, its_optimizer = open_model(tmp_path / name, build(lambda: TinyLM(WIDE)), **settings)
        if name == "b":
            zo.load_checkpoint(other, its_optimizer, tmp_path / "saved")
            with torch.no_grad(), zo.gathered(other, mode="write") as params:
                params["embedding.weight"].mul_(2)
        zo.load_checkpoint(other, None, tmp_path / "saved")
        assert _equal(list(read_masters(other).values()), list(masters.values()))
        assert _equal(_moments(its_optimizer), moments if name == "b" else [])
        zo.close(other)
    zo.close(model)


def _layout(num_shards: int) -> ShardLayout:
    return make_layout(ModelSpec.from_module(_partly_frozen(), None), ComputeDtypes(torch.bfloat16), num_shards)


@pytest.mark.parametrize("num_shards", [2, 3, 7])
def test_other_numbers_of_shards_read_the_same_elements(num_shards: int, saved: Path) -> None:
    whole, layout = _layout(1), _layout(num_shards)

    def compare(checkpoint: SavedGeneration) -> None:
        for section, cut in zip(whole.sections, layout.sections, strict=True):
            for component in planned_components(section):
                expected = checkpoint.source(section, 0)(component, 0, section.shard_numel)
                parts = [checkpoint.source(cut, i)(component, 0, cut.shard_numel) for i in range(num_shards)]
                found = torch.cat(parts)
                assert torch.equal(found[: section.used_numel], expected[: section.used_numel])
                assert not found[section.shard_numel :].any()
                # Cut where no border is.
                middle = checkpoint.source(section, 0)(component, 100, 1000)
                assert torch.equal(middle, expected[100:1000])
        assert expected.any()

    SavedGeneration.read_for(saved, whole, CommitGroup(RankGroup.of(zo.OffloadConfig())), compare)


# Refusals


def test_a_checkpoint_is_never_overwritten(saved: Path, tmp_path: Path) -> None:
    before = {path.name: path.read_bytes() for path in saved.iterdir()}
    model, optimizer = open_model(tmp_path / "b", _partly_frozen())
    with pytest.raises(zo.CheckpointError, match="holds a checkpoint already"):
        zo.save_checkpoint(model, optimizer, saved)
    assert {path.name: path.read_bytes() for path in saved.iterdir() if path.name != "LOCK"} == {
        name: content for name, content in before.items() if name != "LOCK"
    }
    zo.close(model)


def test_a_half_written_checkpoint_is_refused_and_can_be_written_again(saved: Path, tmp_path: Path) -> None:
    generation_file(saved).unlink()
    (saved / "mine.txt").write_text("stays")
    model, optimizer = open_model(tmp_path / "b", _partly_frozen())
    with pytest.raises(zo.CheckpointError, match="is not a checkpoint"):
        zo.load_checkpoint(model, optimizer, saved)
    zo.save_checkpoint(model, optimizer, saved)
    assert zo.load_checkpoint(model, optimizer, saved).step == 0
    assert (saved / "mine.txt").read_text() == "stays"
    zo.close(model)


def test_no_checkpoint_at_all(tmp_path: Path) -> None:
    model, optimizer = open_model(tmp_path / "b")
    with pytest.raises(zo.CheckpointError, match="is not a directory"):
        zo.load_checkpoint(model, optimizer, tmp_path / "nowhere")
    zo.close(model)


OTHERS: dict[str, tuple[Any, dict[str, Any], str]] = {
    "precision": (_partly_frozen, {"precision": "fp32"}, "dtype='bfloat16'"),
    "fp16": (_partly_frozen, {"precision": "fp16"}, "dtype='bfloat16'.*dtype='float16'.*the same precision"),
    "shape": (lambda: build(lambda: TinyLM(34)), {}, "shape"),
    "frozen": (lambda: build(lambda: TinyLM(33)), {}, "blocks.1"),
}


@pytest.mark.parametrize(("make", "settings", "words"), OTHERS.values(), ids=OTHERS)
def test_another_model(make: Any, settings: dict[str, Any], words: str, saved: Path, tmp_path: Path) -> None:
    model, optimizer = open_model(tmp_path / "b", make(), **settings)
    before = _states(model, optimizer)
    with pytest.raises(zo.CheckpointError, match=words):
        zo.load_checkpoint(model, optimizer, saved)
    assert _equal(_states(model, optimizer), before)
    zo.close(model)


def test_other_param_groups_are_refused_before_anything_is_replaced(saved: Path, tmp_path: Path) -> None:
    model, _ = open_model(tmp_path / "b", _partly_frozen())
    optimizer = zo.AdamW(model.parameters(), lr=1e-2)
    before = _states(model, optimizer)
    with pytest.raises(zo.CheckpointError, match="param groups"):
        zo.load_checkpoint(model, optimizer, saved)
    assert _equal(_states(model, optimizer), before)
    zo.close(model)


def test_damage_is_noticed(saved: Path, tmp_path: Path) -> None:
    for number, (name, offset) in enumerate([(SWAP, 10), ("generation-1.json", 300), ("rank0-1.json", 300)]):
        copy = tmp_path / f"copy{number}"
        shutil.copytree(saved, copy)
        flip_bit(copy / name, offset)
        model, optimizer = open_model(tmp_path / f"run{number}", _partly_frozen())
        with pytest.raises(zo.IntegrityError, match=str(copy / name)):
            zo.load_checkpoint(model, optimizer, copy)
        close_broken(model)


def test_a_checkpoint_without_a_directory_of_generations(tmp_path: Path) -> None:
    model = build(TinyLM)
    zo.offload(model, zo.OffloadConfig())
    optimizer = zo.AdamW(model.parameters(), lr=1e-2)
    train(model, optimizer, 0, 2)
    zo.save_checkpoint(model, optimizer, tmp_path / "saved")
    assert zo.load_checkpoint(model, optimizer, tmp_path / "saved").step == 2
    zo.close(model)
