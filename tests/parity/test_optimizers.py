"""Every optimizer computes on offloaded parameters what it does on plain ones, on every tier, and from its files on."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zero_offload as zo
from tests.helpers.disk import SWAP, drain, runtime, small_disk
from tests.helpers.models import TinyLM, build, tokens_of
from zero_offload.model.api import runtime_of
from zero_offload.storage.shards.shard import Component

Make = Callable[[list[dict[str, Any]]], Any]
MAKERS: dict[str, Make] = {
    "AdamW": lambda groups: zo.AdamW(groups, 1e-2),
    "AdamW amsgrad": lambda groups: zo.AdamW(groups, 1e-2, amsgrad=True),
    "Adam": lambda groups: zo.Adam(groups, 1e-2, maximize=True),
    "Adam amsgrad": lambda groups: zo.Adam(groups, 1e-2, amsgrad=True),
    "Adagrad": lambda groups: zo.Adagrad(groups, 1e-2, lr_decay=0.1, initial_accumulator_value=0.1),
    "Lion": lambda groups: zo.Lion(groups, 1e-3),
    "SGD": lambda groups: zo.SGD(groups, 0.1),
    "SGD momentum": lambda groups: zo.SGD(groups, 0.1, momentum=0.9, dampening=0.5),
    "SGD nesterov": lambda groups: zo.SGD(groups, 0.1, momentum=0.9, nesterov=True),
}
STATES = {
    "AdamW": 2,
    "AdamW amsgrad": 3,
    "Adam": 2,
    "Adam amsgrad": 3,
    "Adagrad": 1,
    "Lion": 1,
    "SGD": 0,
    "SGD momentum": 1,
    "SGD nesterov": 1,
}
TIERS = {
    "memory": {"params": "cpu", "optimizer": "cpu"},
    "nvme": {"params": "nvme", "optimizer": "nvme"},
    "split": {"params": "cpu", "optimizer": {"cpu": 0.5, "nvme": 0.5}, "grads": "nvme"},
}


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Matrices decay, the rest does not: two groups in every unit."""
    params = list(model.parameters())
    return [
        {"params": [p for p in params if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in params if p.dim() < 2], "weight_decay": 0.0},
    ]


def open_run(
    make: Make, nvme: Path, tiers: str, precision: str = "fp32", **settings: Any
) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = build(TinyLM)
    choices = {**TIERS[tiers], "existing": "resume", "precision": precision, **settings}
    zo.offload(model, zo.OffloadConfig(nvme=nvme, **choices))
    return model, make(groups_of(model))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, begin: int, end: int) -> list[float]:
    losses = []
    for step in range(begin, end):
        loss = model(tokens_of(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if runtime_of(model) is not None:
            zo.commit(model, optimizer)
    return losses


def masters(model: nn.Module) -> dict[str, torch.Tensor]:
    with zo.gathered(model, kind="master") as values:
        return {name: value.clone() for name, value in values.items()}


@pytest.mark.parametrize("tiers", TIERS)
@pytest.mark.parametrize("name", MAKERS)
def test_the_same_bits_as_on_plain_parameters(name: str, tiers: str, tmp_path: Path) -> None:
    plain = build(TinyLM)
    expected = train(plain, MAKERS[name](groups_of(plain)), 0, 4)
    model, optimizer = open_run(MAKERS[name], tmp_path, tiers)
    assert train(model, optimizer, 0, 4) == expected
    found = masters(model)
    assert all(torch.equal(found[key], param.detach()) for key, param in plain.named_parameters())
    zo.close(model)


@pytest.mark.parametrize(
    ("name", "precision"), list(zip(MAKERS, itertools.cycle(["bf16", "fp16", "fp32"]), strict=False))
)
def test_goes_on_from_its_files_and_from_a_checkpoint(name: str, precision: str, tmp_path: Path) -> None:
    """Killed after two steps: the next two are those of a run that was not."""
    make = MAKERS[name]
    model, optimizer = open_run(make, tmp_path / "whole", "nvme", precision)
    expected = train(model, optimizer, 0, 4)
    states = optimizer.state_dict()["state"]
    zo.close(model)
    model, optimizer = open_run(make, tmp_path / "run", "nvme", precision)
    assert train(model, optimizer, 0, 2) == expected[:2]
    zo.save_checkpoint(model, optimizer, tmp_path / "saved")
    zo.close(model)
    for tiers in ("split", "memory"):
        model, optimizer = open_run(make, tmp_path / tiers, tiers, precision)
        zo.load_checkpoint(model, optimizer, tmp_path / "saved")
        assert train(model, optimizer, 2, 4) == expected[2:]
        zo.close(model)
    model, optimizer = open_run(make, tmp_path / "run", "memory", precision)
    assert zo.resume(model, optimizer) is not None
    assert train(model, optimizer, 2, 4) == expected[2:]
    for key, entry in optimizer.state_dict()["state"].items():
        assert entry.keys() == states[key].keys()
        assert all(torch.equal(entry[each], states[key][each]) for each in entry)
    zo.close(model)


@pytest.mark.parametrize("name", MAKERS)
def test_a_shard_has_what_its_optimizer_keeps_and_no_more(name: str, tmp_path: Path) -> None:
    model, optimizer = open_run(MAKERS[name], tmp_path, "nvme")
    train(model, optimizer, 0, 2)
    drain(model)
    shards = runtime(model).store.shards
    assert {len(shard.states) for shard in shards} == {STATES[name]}
    in_slots = 2 * (1 + STATES[name]) * 4 * sum(shard.layout.shard_numel for shard in shards)
    assert (tmp_path / SWAP).stat().st_size == in_slots
    zo.close(model)
    before = (tmp_path / SWAP).stat().st_size
    model, optimizer = open_run(MAKERS[name], tmp_path, "nvme")
    zo.resume(model, optimizer)
    train(model, optimizer, 2, 3)
    zo.close(model)
    assert (tmp_path / SWAP).stat().st_size == before


def test_before_an_optimizer_is_built_there_are_no_states(tmp_path: Path) -> None:
    model = build(TinyLM)
    zo.offload(model, zo.OffloadConfig(nvme=tmp_path, **TIERS["nvme"]))
    assert all(shard.states == () for shard in runtime(model).store.shards)
    before = (tmp_path / SWAP).stat().st_size
    zo.Lion(model.parameters())
    assert all(shard.states == (Component.EXP_AVG,) for shard in runtime(model).store.shards)
    assert (tmp_path / SWAP).stat().st_size > before
    zo.close(model)


@pytest.mark.parametrize("tiers", ["memory", "nvme"])
def test_two_optimizers_share_sections(tiers: str, tmp_path: Path) -> None:
    """A section keeps what both need; each steps with its own."""

    def make(model: nn.Module) -> list[torch.optim.Optimizer]:
        decayed, rest = groups_of(model)
        return [zo.AdamW([decayed], 1e-2), zo.SGD([rest], 0.1, momentum=0.9)]

    def run(model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> list[float]:
        losses = []
        for step in range(4):
            loss = model(tokens_of(step))
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    plain = build(TinyLM)
    expected = run(plain, make(plain))
    model = build(TinyLM)
    zo.offload(model, zo.OffloadConfig(nvme=tmp_path, precision="fp32", **TIERS[tiers]))
    assert run(model, make(model)) == expected
    kept = {Component.EXP_AVG, Component.EXP_AVG_SQ, Component.MOMENTUM_BUFFER}
    assert kept in [set(shard.states) for shard in runtime(model).store.shards]
    zo.close(model)


@pytest.mark.parametrize("tiers", ["memory", "nvme"])
def test_hyperparameters_that_change_the_rule(tiers: str, tmp_path: Path) -> None:
    """Momentum and AMSGrad may be switched on later: their state begins at zero, as in torch."""

    def run(model: nn.Module) -> list[float]:
        optimizers = [zo.SGD([groups_of(model)[0]], 0.1), zo.Adam([groups_of(model)[1]], 1e-2)]
        losses = []
        for step in range(5):
            if step == 2:
                optimizers[0].param_groups[0]["momentum"] = 0.9
                optimizers[1].param_groups[0]["amsgrad"] = True
            loss = model(tokens_of(step))
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
        return losses

    plain = build(TinyLM)
    expected = run(plain)
    model = build(TinyLM)
    zo.offload(model, zo.OffloadConfig(nvme=tmp_path, precision="fp32", **TIERS[tiers]))
    assert run(model) == expected
    zo.close(model)


def test_another_optimizer_is_refused(tmp_path: Path) -> None:
    model, optimizer = open_run(MAKERS["AdamW"], tmp_path / "run", "nvme")
    train(model, optimizer, 0, 1)
    zo.save_checkpoint(model, optimizer, tmp_path / "saved")
    zo.close(model)
    model, optimizer = open_run(MAKERS["Lion"], tmp_path / "run", "nvme")
    with pytest.raises(
        zo.CheckpointError, match=r"written with zo.AdamW, whose states are not those of zo.Lion; build zo.Ad"
    ):
        zo.resume(model, optimizer)
    with pytest.raises(zo.CheckpointError, match="written with zo.AdamW"):
        zo.load_checkpoint(model, optimizer, tmp_path / "saved")
    zo.close(model)


def test_no_room_for_states_is_said_when_the_optimizer_is_built(tmp_path: Path) -> None:
    """Nothing is lost: a leaner optimizer may follow."""
    with small_disk(tmp_path / "disk", "1m") as disk:
        model = nn.Linear(128, 128, bias=False)
        config = zo.OffloadConfig(nvme=disk / "run", optimizer="nvme", params="cpu", precision="fp32")
        zo.offload(model, config)  # 128 KiB of masters in two slots
        (disk / "filler").write_bytes(bytes(700 << 10))
        with pytest.raises(zo.CapacityError, match="needs .* more"):
            zo.AdamW(model.parameters())
        optimizer = zo.SGD(model.parameters(), 0.1)
        model(torch.ones(2, 128)).sum().backward()
        optimizer.step()
        zo.close(model)
