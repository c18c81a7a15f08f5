"""`zo.plan(optimizer=)`: the bytes of an optimizer's own states, and budgets that they exceed."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zero_offload as zo
from tests.helpers.disk import runtime
from tests.helpers.models import TinyLM, tokens_of
from zero_offload.base.types import StateKind, Tier
from zero_offload.storage.shards.shard import shard_bytes

Optimizers = list[torch.optim.Optimizer]
WIDE = 192
MAKERS: dict[str, Callable[[nn.Module], Optimizers]] = {
    "Adafactor": lambda model: [torch.optim.Adafactor(model.parameters())],
    "AdamW": lambda model: [torch.optim.AdamW(model.parameters(), amsgrad=True)],
    "SGD": lambda model: [torch.optim.SGD(model.parameters(), 0.1)],
    "zo.SGD": lambda model: [zo.SGD(model.parameters(), 0.1)],
    "zo.AdamW": lambda model: [zo.AdamW(model.parameters(), amsgrad=True)],
    "Muon, AdamW": lambda model: [
        torch.optim.Muon(of_dims(model, 2)),
        torch.optim.AdamW([*of_dims(model, 1), *of_dims(model, 0)]),
    ],
    "zo.Muon": lambda model: [zo.Muon(model.named_parameters())],
    "Muon, zo.AdamW": lambda model: [
        torch.optim.Muon(of_dims(model, 2)),
        zo.AdamW([*of_dims(model, 1), *of_dims(model, 0)]),
    ],
}


SMALLER = ("Adafactor", "SGD", "zo.SGD", "Muon, AdamW", "zo.Muon")
"""Than the two states per parameter that a plan counts without an optimizer."""


def of_dims(model: nn.Module, dims: int) -> list[nn.Parameter]:
    return [param for param in model.parameters() if param.dim() == dims]


def step(model: nn.Module, optimizers: Optimizers) -> None:
    model(tokens_of(0)).backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("tier", ["cpu", "nvme"])
@pytest.mark.parametrize("name", MAKERS)
def test_a_plan_has_the_bytes_that_rest_after_a_step(name: str, tier: str, precision: str, tmp_path: Path) -> None:
    config = zo.OffloadConfig(
        params=tier, optimizer=tier, precision=precision, nvme=tmp_path / "run", durability="scratch"
    )
    model = TinyLM(WIDE)
    planned = zo.plan(model, config, optimizer=MAKERS[name](model))
    zo.offload(model, config)
    optimizers = MAKERS[name](model)
    step(
        model, [each if name.startswith("zo.") or type(each) is zo.AdamW else zo.unitwise(each) for each in optimizers]
    )
    held = sum(shard_bytes(shard.layout, shard.components) for shard in runtime(model).store.shards)
    rests = {kind: planned.rest_bytes[Tier(tier), kind] for kind in (StateKind.PARAMS, StateKind.OPTIMIZER)}
    assert sum(rests.values()) == pytest.approx(held, rel=0.01), "of our own arrays padding is not counted"
    counted = zo.plan(TinyLM(WIDE), config).rest_bytes[Tier(tier), StateKind.OPTIMIZER]
    assert (rests[StateKind.OPTIMIZER] < counted) == (name in SMALLER)


def test_it_tells_the_memory_of_a_step(tmp_path: Path) -> None:
    """Three sections of large matrices, with a gradient as fp32."""
    model = nn.Sequential(*(nn.Linear(1024, 1024, bias=False) for _ in range(6)))
    config = zo.OffloadConfig(params="nvme", grads="nvme", optimizer="nvme", precision="bf16", nvme=tmp_path)
    planned = zo.plan(model, config, optimizer=torch.optim.AdamW(model.parameters()))
    without = zo.plan(model, config)
    numel = 1 << 20
    ours = 4 * numel * (12 + 4)  # chunks of our own optimizers
    walk = 3 * numel * 12 + 2 * numel * 4 + numel * 4  # gradients and masters as fp32; what is read of gradients
    assert planned.staging_bytes[Tier.CPU] - without.staging_bytes[Tier.CPU] == pytest.approx(walk - ours, abs=1 << 16)
    assert "values, masters and states of 3 sections in memory at once; the largest is of" in str(planned)
    assert "sections" not in str(without)


def test_bytes_that_no_step_tells_are_unknown() -> None:
    model = TinyLM(WIDE)
    planned = zo.plan(model, zo.OffloadConfig(), optimizer=torch.optim.LBFGS(model.parameters()))
    assert "bytes of states of torch.optim.lbfgs.LBFGS are unknown: a step without memory fails" in str(planned)
    assert "Two fp32 states of each parameter are counted" in str(planned)


def test_it_fits_only_where_an_offload_does() -> None:
    """`zo.offload` knows no optimizer, and counts two states of each parameter."""
    model = TinyLM(WIDE)
    config = zo.OffloadConfig(precision="fp32")
    with_states, none = (
        sum(zo.plan(model, config, optimizer=make(model)).used_bytes(tier) for tier in (Tier.CPU, Tier.DEVICE))
        for make in (MAKERS["zo.AdamW"], MAKERS["SGD"])
    )
    config = zo.OffloadConfig(precision="fp32", cpu_memory=(with_states + none) // 2)
    planned = zo.plan(model, config, optimizer=torch.optim.SGD(model.parameters(), 0.1))
    assert not planned.fits
    assert planned.reasons[0].startswith("zo.offload, with two states of each parameter: memory")
    with pytest.raises(zo.CapacityError):
        zo.offload(model, config)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        (lambda model: "adamw", "is a str; give an optimizer, or several"),
        (lambda model: torch.optim.SGD(nn.Linear(3, 5).parameters(), 0.1), r"shape \(5, 3\) that is not of this model"),
        (lambda model: [zo.SGD(model.parameters(), 0.1)] * 2, "SGD and SGD have the same parameter"),
    ],
    ids=["text", "another model", "twice"],
)
def test_what_is_no_optimizer_of_the_model_is_refused(given: Callable[[nn.Module], Any], words: str) -> None:
    model = TinyLM(WIDE)
    with pytest.raises(zo.ConfigError, match=words):
        zo.plan(model, zo.OffloadConfig(), optimizer=given(model))


@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_a_budget_is_exceeded_when_the_optimizer_is_built(tier: str, tmp_path: Path) -> None:
    """Three states: as many bytes as zo.AdamW's with amsgrad, and a number for each parameter."""
    settings: dict[str, Any] = {"params": tier, "optimizer": tier, "precision": "fp32"}
    if tier == "nvme":
        settings["nvme"] = tmp_path
    limit = {"cpu": "cpu_memory", "nvme": "nvme_capacity"}[tier]
    model = TinyLM(WIDE)
    planned = zo.plan(model, zo.OffloadConfig(**settings), optimizer=MAKERS["AdamW"](model)[0])
    tiers = (Tier.CPU, Tier.DEVICE) if tier == "cpu" else (Tier.NVME,)
    used = sum(planned.used_bytes(each) for each in tiers)
    for room, fits in ((-(2**20), False), (2**18, True)):
        config = zo.OffloadConfig(**settings, **{limit: used + room}, existing="discard")
        assert zo.plan(TinyLM(WIDE), config).fits
        model = zo.offload(TinyLM(WIDE), config)
        (optimizer,) = MAKERS["AdamW"](model)
        if not fits:
            with pytest.raises(zo.CapacityError, match=rf"{tier} tier they take .* Raise {limit}=.*zo.plan\(model"):
                zo.unitwise(optimizer)
            assert type(optimizer) is torch.optim.AdamW, "it is as it was"
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
        step(model, [zo.unitwise(optimizer)])
        zo.close(model)


def test_a_budget_is_exceeded_by_the_memory_of_a_step(tmp_path: Path) -> None:
    """Everything rests on a drive, and one section with its states is larger than the budget."""

    model = nn.Sequential(nn.Embedding(4096, 1024), nn.Linear(1024, 8))
    settings: dict[str, Any] = {"params": "nvme", "grads": "nvme", "optimizer": "nvme", "precision": "fp32"}
    config = zo.OffloadConfig(**settings, nvme=tmp_path)
    ours, theirs = (
        sum(
            zo.plan(model, config, optimizer=kind(model.parameters())).used_bytes(tier)
            for tier in (Tier.CPU, Tier.DEVICE)
        )
        for kind in (zo.AdamW, torch.optim.AdamW)
    )
    zo.offload(model, zo.OffloadConfig(**settings, nvme=tmp_path, cpu_memory=(ours + theirs) // 2))
    with pytest.raises(zo.CapacityError, match="for a step of whole parameters"):
        zo.unitwise(torch.optim.AdamW(model.parameters()))
    zo.close(model)
