"""States in bf16 and compact ones: the same bits on every tier and cut, near to fp32, kept and converted by files."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zero_offload as zo
from tests.helpers import ranks
from tests.helpers.disk import drain, runtime
from tests.helpers.models import TinyLM, build
from tests.helpers.pairwise import in_turn
from tests.helpers.ranks import RankPool
from tests.parity.test_optimizers import MAKERS, STATES, TIERS, groups_of, masters, train
from zero_offload.storage.shards.shard import shard_bytes

FORMATS = ("bf16", "compact")


def open_run(
    nvme: Path, tiers: str, states: str, name: str = "AdamW", compute: str = "bf16", **settings: Any
) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = build(TinyLM)
    precision = zo.Precision(compute=compute, states=states)
    config = zo.OffloadConfig(nvme=nvme, precision=precision, existing="resume", **{**TIERS[tiers], **settings})
    zo.offload(model, config)
    return model, MAKERS[name](groups_of(model))


def states_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Without what completes values to masters, which is compared as the masters are."""
    entries = optimizer.state_dict()["state"]
    return [entries[key][name] for key in sorted(entries) for name in entries[key] if name != "residual"]


@in_turn(compute=["fp16", "bf16", "fp32"], states=FORMATS)
def test_the_same_bits_on_every_tier(states: str, compute: str, tmp_path: Path) -> None:
    found = []
    for tiers in TIERS:
        model, optimizer = open_run(tmp_path / tiers, tiers, states, compute=compute)
        losses = train(model, optimizer, 0, 4)
        found.append((losses, masters(model), states_of(optimizer)))
        zo.close(model)
    for losses, values, kept in found[1:]:
        assert losses == found[0][0]
        assert all(torch.equal(values[name], found[0][1][name]) for name in values)
        assert all(map(torch.equal, kept, found[0][2]))


@in_turn(name=list(MAKERS), states=FORMATS)
def test_near_to_exact_states(states: str, name: str, tmp_path: Path) -> None:
    losses = {}
    for kept in ("fp32", states):
        model, optimizer = open_run(tmp_path / kept, "memory", kept, name)
        losses[kept] = train(model, optimizer, 0, 12)
        zo.close(model)
    assert losses[states] == pytest.approx(losses["fp32"], rel=0.03)
    assert STATES[name] == 0 or losses[states] != losses["fp32"]


@in_turn(name=["AdamW", "Adam amsgrad", "Adagrad", "SGD momentum"], states=FORMATS)
def test_goes_on_from_its_files_and_from_a_checkpoint(states: str, name: str, tmp_path: Path) -> None:
    model, optimizer = open_run(tmp_path / "whole", "nvme", states, name)
    expected = train(model, optimizer, 0, 4)
    zo.close(model)
    model, optimizer = open_run(tmp_path / "run", "nvme", states, name)
    assert train(model, optimizer, 0, 2) == expected[:2]
    zo.save_checkpoint(model, optimizer, tmp_path / "saved")
    zo.close(model)
    for tiers in ("split", "memory"):
        model, optimizer = open_run(tmp_path / tiers, tiers, states, name)
        zo.load_checkpoint(model, optimizer, tmp_path / "saved")
        before = states_of(optimizer)
        optimizer.load_state_dict(optimizer.state_dict())  # rounding what was rounded changes nothing
        assert all(map(torch.equal, states_of(optimizer), before))
        assert train(model, optimizer, 2, 4) == expected[2:]
        zo.close(model)
    model, optimizer = open_run(tmp_path / "run", "memory", states, name)
    assert zo.resume(model, optimizer) is not None
    assert train(model, optimizer, 2, 4) == expected[2:]
    zo.close(model)


@in_turn(
    compute=["bf16", "fp16", "fp32"],
    change=[("fp32", "compact"), ("compact", "fp32"), ("fp32", "bf16"), ("bf16", "compact")],
)
def test_files_convert_with_a_notice(change: tuple[str, str], compute: str, tmp_path: Path) -> None:
    """From a checkpoint and from a run's own directory: the nearest that the format has; to fp32 without a change."""
    before, after = change
    model, optimizer = open_run(tmp_path / "run", "nvme", before, compute=compute)
    train(model, optimizer, 0, 3)
    zo.save_checkpoint(model, optimizer, tmp_path / "saved")
    values, kept = masters(model), states_of(optimizer)
    zo.close(model)
    notice = rf"optimizer states are converted from {before} to {after}"
    model, optimizer = open_run(tmp_path / "other", "memory", after, compute=compute)
    with pytest.warns(UserWarning, match=notice):
        zo.load_checkpoint(model, optimizer, tmp_path / "saved")
    found = [(masters(model), states_of(optimizer))]
    losses = [train(model, optimizer, 3, 5)]
    zo.close(model)
    with pytest.warns(UserWarning, match=notice):
        model, optimizer = open_run(tmp_path / "run", "nvme", after, compute=compute)
    zo.resume(model, optimizer)
    found.append((masters(model), states_of(optimizer)))
    losses.append(train(model, optimizer, 3, 5))
    zo.close(model)
    assert losses[0] == losses[1]
    for now, states in found:
        for name, value in values.items():
            tolerance = 2.0**-16 if after == "compact" and compute == "bf16" else 0.0
            torch.testing.assert_close(now[name], value, rtol=tolerance, atol=0.0)
        for mine, theirs in zip(states, kept, strict=True):
            if after == "fp32":
                assert torch.equal(mine, theirs)
            else:
                largest = float(theirs.abs().max())
                torch.testing.assert_close(mine, theirs, rtol=2.0**-8, atol=largest / 100 if after == "compact" else 0)


@pytest.mark.parametrize("states", ["fp32", *FORMATS])
def test_the_plan_counts_what_there_is(states: str, tmp_path: Path) -> None:
    model, optimizer = open_run(tmp_path, "nvme", states)
    train(model, optimizer, 0, 1)
    drain(model)
    layouts = [shard.layout for shard in runtime(model).store.shards]
    counted = sum(shard_bytes(shard.layout, shard.components) for shard in runtime(model).store.shards)
    per_element = {"fp32": 12.0, "bf16": 8.0, "compact": 2 + 1 + 2 * (1 + 1 / 64)}[states]
    numel = sum(layout.shard_numel for layout in layouts)
    # A shard of so few elements has a whole sector of scales for each state.
    assert counted - numel * per_element <= (2 * 4096 * len(layouts) if states == "compact" else 0)
    assert counted >= numel * per_element
    zo.close(model)


def test_a_state_that_overflows_is_seen(tmp_path: Path) -> None:
    """A gradient that is not finite skips the step whatever the states rest in."""
    model, optimizer = open_run(tmp_path, "memory", "compact")
    train(model, optimizer, 0, 1)
    before = states_of(optimizer)
    for param in model.parameters():
        param.register_hook(lambda grad: torch.full_like(grad, torch.inf))
    with pytest.warns(UserWarning, match="skipped"):
        train(model, optimizer, 1, 2)
    assert all(map(torch.equal, states_of(optimizer), before))
    assert zo.stats(model).skipped_steps == 1
    zo.close(model)


# Several ranks


@pytest.mark.parametrize("states", FORMATS)
def test_stages_and_cuts_change_no_bit(states: str, pool: RankPool, tmp_path: Path) -> None:
    """Random rounding depends on where an element is in its section, and on no shard."""
    precision = zo.Precision(compute="bf16", states=states)
    case = ranks.Case({"precision": precision, "stage": 0}, num_steps=3)
    expected = pool.succeed(ranks.train, case)
    for stage in (1, 2, 3):
        settings = {"stage": stage, "nvme": tmp_path / str(stage), "optimizer": "nvme", "params": "nvme"}
        found = pool.succeed(ranks.train, replace(case, settings=case.settings | settings))
        assert found == expected
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*converted")
        alone = ranks.train(0, 1, replace(case, settings=case.settings | settings | {"existing": "resume"}))
    assert all(torch.equal(alone.params[name], value) for name, value in expected[0].params.items())
