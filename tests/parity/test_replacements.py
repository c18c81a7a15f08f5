"""Parameters in the place of gone ones of the same name: adapters that are merged and made again, bit for bit."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zero_offload as zo
from tests.helpers.models import TinyLM, build
from tests.helpers.ranks import UNEVEN, RankPool, read_params
from tests.helpers.scripts import Average, run_both, run_offloaded, run_plain
from tests.parity.test_adoption import TIERS, Rows, adapt, adopt, one_step, train
from zero_offload.model.api import runtime_of
from zero_offload.standins.owners import owner_of

make = partial(TinyLM, UNEVEN)


def merge(model: nn.Module) -> None:
    """The adapters' products are added to the layers beside them, and they go."""
    is_offloaded = any(owner_of(param) is not None for param in model.parameters())
    for block in model.blocks:
        with zo.gathered(block, mode="write") if is_offloaded else contextlib.nullcontext(), torch.no_grad():
            block.up.base_layer.weight += block.up.scale * (block.up.up.weight @ block.up.down.weight)
            block.up = block.up.base_layer


def cycles(model: nn.Module, rows: Rows, average: Average, *, merges: bool = True) -> Iterator[float]:
    model.requires_grad_(False)
    for cycle in range(3):
        adapters = adapt(model, "up", seed=cycle)
        adopt(model)
        optimizer = zo.AdamW(adapters, lr=3e-2)
        yield from train(model, optimizer, rows, average, range(2 * cycle, 2 * cycle + 2))
        if merges:
            merge(model)
        for block in model.blocks:
            block.up = getattr(block.up, "base_layer", block.up)
    with torch.no_grad():
        yield model(rows(9)).item()


@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_adapters_of_several_cycles(tier: str, nvme: Path) -> None:
    config = zo.OffloadConfig(precision="fp32", nvme=nvme, **TIERS[tier])
    found, expected = run_offloaded(cycles, make, config), run_plain(cycles, make)
    assert found[0] == expected[0]
    assert all(map(torch.equal, found[1].values(), expected[1].values()))


def test_on_two_ranks(nvme: Path, pool: RankPool) -> None:
    """The adapters are dropped: a merge writes parameters, which takes one rank."""
    for found, expected in pool.succeed(
        run_both, partial(cycles, merges=False), make, TIERS["nvme"] | {"nvme": nvme, "stage": 3}
    ):
        assert found[0] == expected[0]
        assert all(map(torch.equal, found[1].values(), expected[1].values()))


class Headed(nn.Module):
    """A body, and a head under a name that changes."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(40, 40)
        self.scale = nn.Parameter(torch.ones(()))

    def put(self, name: str, head: nn.Module) -> None:
        for other in [name for name, _ in self.named_children() if name != "body"]:
            delattr(self, other)
        setattr(self, name, head)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for module in self.children():
            x = module(x)
        return (self.scale * x).square().mean()


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_name_that_comes_back_is_as_a_new_one(precision: str, nvme: Path) -> None:
    """In values, masters, states and step counts."""
    runs = []
    for names in ("aaa", "abc"):
        config = zo.OffloadConfig(precision=precision, nvme=nvme, existing="discard", **TIERS["nvme"])
        model, found = zo.offload(build(Headed), config), []
        for cycle, name in enumerate(names):
            torch.manual_seed(cycle)
            model.put(name, nn.Linear(40, 7))
            zo.offload(model)
            optimizer = zo.AdamW(model.parameters(), lr=1e-2)
            for _ in range(2):
                loss = model(torch.ones(3, 40))
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                found.append(loss.item())
            with zo.gathered(model, kind="master") as masters:
                found += [each.clone() for each in masters.values()]
        runs.append(found)
        zo.close(model)
    assert all(torch.equal(torch.as_tensor(a), torch.as_tensor(b)) for a, b in zip(*runs, strict=True))


def steps_of(nvme: Path, steps: range) -> tuple[list[Any], list[torch.Tensor]]:
    """Of two cycles, of two steps and three, these steps, with a commit after each."""
    model, values, awaits = build(make).requires_grad_(False), [], steps.start > 0
    zo.offload(model, zo.OffloadConfig(precision="fp32", nvme=nvme, existing="resume", **TIERS["nvme"]))
    for cycle, part in enumerate((range(2), range(2, 5))):
        if part.stop < steps.start or steps.stop <= part.start:
            continue
        adapters = adapt(model, "up", seed=cycle)
        zo.offload(model)
        optimizer = zo.AdamW(adapters, lr=3e-2)
        if awaits:
            resumed, awaits = zo.resume(model, optimizer), False
            assert resumed is not None and resumed.extra == {"next": steps.start}
        for step in range(max(steps.start, part.start), min(steps.stop, part.stop)):
            values += one_step(model, optimizer, step)
        if part.stop < steps.stop:
            merge(model)
    params = list(read_params(model).values())
    zo.close(model)
    return values, params


@pytest.mark.parametrize("at", [2, 3])
def test_a_resume(at: int, tmp_path: Path) -> None:
    """At the end of a cycle, whose adapters are then replaced. In a later one it makes the calls of the first: the
    directory has one place for the adapters of all."""
    whole, params = steps_of(tmp_path / "whole", range(5))
    begun, _ = steps_of(tmp_path / "parts", range(at))
    rest, params_of_parts = steps_of(tmp_path / "parts", range(at, 5))
    assert begun + rest == whole
    assert all(map(torch.equal, params, params_of_parts))


def test_room_and_hooks_stay_as_they_are() -> None:
    model = zo.offload(build(Headed), zo.OffloadConfig(precision="fp32"))
    found = []
    for _ in range(3):
        model.put("head", nn.Linear(40, 7))
        zo.offload(model)
        found.append((len(runtime_of(model).layout.sections), len(model._forward_pre_hooks)))
    assert len(set(found)) == 1
    zo.close(model)


def test_the_one_that_is_gone_says_so(nvme: Path) -> None:
    model = zo.offload(build(Headed), zo.OffloadConfig(precision="fp32", nvme=nvme, params="nvme", optimizer="nvme"))
    model.put("head", nn.Linear(40, 7))
    zo.offload(model)
    gone, graph = model.head.weight, model(torch.ones(1, 40))
    model.put("head", nn.Linear(40, 7))
    zo.offload(model)
    with pytest.raises(zo.ZeroOffloadError, match=r"zo\.offload has put another of its name in its place"):
        gone.norm()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        graph.backward()
    model.put("head", nn.Linear(40, 7))
    model.head.weight = gone
    with pytest.raises(zo.ZeroOffloadError):
        zo.offload(model)


def test_what_cannot_have_the_place_gets_one_of_its_own() -> None:
    model = zo.offload(build(Headed), zo.OffloadConfig(precision="fp32"))
    body, sections = model.body, runtime_of(model).layout.sections
    others = [nn.Linear(40, 40).requires_grad_(False), nn.Linear(40, 40)]
    model.body, model.more = others[0], body  # frozen, and the other one stays
    zo.offload(model)
    assert len(runtime_of(model).layout.sections) > len(sections)
    with zo.gathered(model.body):
        view = model.body.weight[:2]
    model.body = others[1]
    with pytest.raises(zo.ConfigError, match=r"body\.weight is in the model no more, .* A view of it is held"):
        zo.offload(model)
    del view
    zo.offload(model)
    model(torch.ones(1, 40)).backward()
    zo.close(model)
