"""`activations=` changes no number: every placement, with and without recompute, gives what plain torch gives."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import zero_offload as zo
from tests.helpers.activations import make_small
from tests.helpers.models import WIDE, Block, TinyLM, build, tokens_of
from tests.helpers.pairwise import full, in_turn
from tests.helpers.twins import assert_same, run_offloaded, run_plain, train
from zero_offload.finetune.gpt import GPT, next_token_loss
from zero_offload.finetune.gpt_config import GPTConfig

ACTIVATIONS: list[Any] = ["nvme", {"device": 0.4, "nvme": 0.6}, "cpu", "auto"]


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    make_small(monkeypatch)


class DroppingBlock(Block):
    """Saves masks, views, and tensors that are changed in place before they are saved."""

    def forward(self, x: Tensor) -> Tensor:
        up = F.relu_(self.up(self.norm(x)))
        left, right = up.chunk(2, dim=-1)
        mixed = torch.cat([torch.sigmoid(left) * right, right.transpose(0, 1).contiguous().transpose(0, 1)], dim=-1)
        return x + F.dropout(self.down(mixed), 0.1)


def make_model(recompute: str) -> nn.Module:
    model = TinyLM(WIDE, 3, DroppingBlock)
    if recompute != "none":
        zo.checkpoint(model.blocks[:1] if recompute == "some" else model.blocks)
    return model


def script(model: nn.Module, optimizer: zo.AdamW) -> Iterator[float]:
    torch.manual_seed(1)
    yield from train(model, optimizer, range(4))


def configured(nvme: Path, precision: str, activations: Any, params: Any = "cpu", **settings: Any) -> zo.OffloadConfig:
    return zo.OffloadConfig(
        params=params,
        optimizer="nvme" if params == "nvme" else "cpu",
        activations=activations,
        precision=precision,
        nvme=nvme,
        durability="scratch",
        **settings,
    )


@pytest.mark.parametrize("recompute", ["none", full("some"), "all"])
@pytest.mark.parametrize("precision", [full("fp32"), "bf16"])
def test_placements(nvme: Path, precision: str, recompute: str) -> None:
    plain = run_plain(script, partial(make_model, "none"), precision)
    for number, (activations, params) in enumerate(itertools.product(ACTIVATIONS, ["cpu", "nvme"])):
        config = configured(nvme / str(number), precision, activations, params)
        assert run_offloaded(script, partial(make_model, recompute), config) == plain, (activations, params)


# Scripts


def accumulating(model: nn.Module, optimizer: zo.AdamW) -> Iterator[float]:
    for step in range(3):
        for micro in range(2):
            loss = model(tokens_of(2 * step + micro)) / 2
            loss.backward()
            yield loss.item()
        optimizer.step()
        optimizer.zero_grad()


def several_forwards_first(model: nn.Module, optimizer: zo.AdamW) -> Iterator[float]:
    for step in range(3):
        losses = [model(tokens_of(3 * step + i)) for i in range(3)]
        losses[1].backward()
        (losses[0] + losses[2]).backward()
        optimizer.step()
        optimizer.zero_grad()
        yield sum(loss.item() for loss in losses)


def twice_through_one_graph(model: nn.Module, optimizer: zo.AdamW) -> Iterator[float]:
    for step in range(3):
        loss = model(tokens_of(step))
        loss.backward(retain_graph=True)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()


def with_forwards_that_come_to_nothing(model: nn.Module, optimizer: zo.AdamW) -> Iterator[float]:
    for step in range(3):
        kept = model(tokens_of(100 + step))
        model(tokens_of(200 + step))
        with torch.no_grad():
            model(tokens_of(300 + step))
        yield from train(model, optimizer, [step])
        del kept


def parts_of_a_graph(model: nn.Module, optimizer: zo.AdamW) -> Iterator[float]:
    for step in range(3):
        loss = model(tokens_of(step))
        loss.backward(inputs=list(model.blocks[2].parameters()), retain_graph=True)
        loss.backward(inputs=list(model.blocks[0].parameters()))
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()


SCRIPTS = [
    accumulating,
    several_forwards_first,
    twice_through_one_graph,
    with_forwards_that_come_to_nothing,
    parts_of_a_graph,
]


@in_turn(steps=SCRIPTS, recompute=["none", "all"])
def test_what_the_script_does(steps: Callable[..., Iterator[float]], recompute: str, nvme: Path) -> None:
    def make(kind: str) -> nn.Module:
        model = TinyLM(WIDE)
        if kind == "all":
            zo.checkpoint(model.blocks)
        return model

    plain = run_plain(steps, partial(make, "none"), "fp32")
    found = run_offloaded(steps, partial(make, recompute), configured(nvme, "fp32", "nvme", "nvme"))
    assert found == plain


def test_a_backward_through_a_backward(nvme: Path) -> None:
    class Rooted(TinyLM):
        def forward(self, x: Tensor) -> Tensor:
            return self.run_blocks(x)

    def steps(model: nn.Module, optimizer: zo.AdamW) -> Iterator[float]:
        for seed in range(3):
            x = torch.randn(2, 5, WIDE, generator=torch.Generator().manual_seed(seed)).requires_grad_()
            out = model(x)
            (grad,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
            loss = grad.square().mean() + out.mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            yield loss.item()

    assert_same(steps, partial(Rooted, WIDE), configured(nvme, "fp32", "nvme", "nvme"))


def test_frozen_units(nvme: Path) -> None:
    def make() -> nn.Module:
        model = make_model("some")
        model.embedding.requires_grad_(False)
        model.blocks[0].requires_grad_(False)
        model.blocks[2].requires_grad_(False)
        return model

    assert_same(script, make, configured(nvme, "fp32", "nvme", "nvme"))


def test_the_recipes_gpt(nvme: Path) -> None:
    def steps(model: nn.Module, optimizer: zo.AdamW) -> Iterator[float]:
        for seed in range(3):
            tokens = tokens_of(seed, batch=2, length=33)
            loss = next_token_loss(model(tokens[:, :-1]), tokens[:, 1:])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            yield loss.item()

    def make(is_marked: bool) -> nn.Module:
        model = GPT(GPTConfig(num_layers=3, width=64, num_heads=4, vocab_size=64))
        if is_marked:
            zo.checkpoint(model.blocks)
        return model

    for precision in ("fp32", "bf16"):
        plain = run_plain(steps, partial(make, False), precision)
        for is_marked in (False, True):
            config = configured(nvme / f"{precision}-{is_marked}", precision, "nvme")
            assert run_offloaded(steps, partial(make, is_marked), config) == plain


def test_a_change_in_place_after_saving_raises_as_in_torch(nvme: Path) -> None:
    class Spoiling(TinyLM):
        def forward(self, x: Tensor) -> Tensor:
            hidden = self.blocks[0](x)
            out = torch.tanh(hidden)
            out.mul_(2)  # its backward needs what it was
            return out.sum()

    model = zo.offload(build(partial(Spoiling, WIDE)), configured(nvme, "fp32", "nvme"))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        model(torch.ones(2, 8, WIDE)).backward()
    zo.close(model)


class Cells(nn.Module):
    """Cells whose gates are parts of one tensor, each with a version of its own, and changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.GRUCell(8, 32), nn.LSTMCell(32, 32)
        self.rest = nn.Linear(32, 8)

    def forward(self, seed: Tensor) -> Tensor:
        x = torch.randn(64, 8, generator=torch.Generator().manual_seed(int(seed.sum())))
        state, memory = self.first(x), torch.zeros(64, 32)
        for _ in range(2):
            state, memory = self.second(self.first(x, state), (state, memory))
        return self.rest(state).square().sum()


@pytest.mark.parametrize("activations", ACTIVATIONS, ids=str)
def test_parts_that_count_their_versions_apart(activations: Any, nvme: Path) -> None:
    assert_same(script, Cells, configured(nvme, "fp32", activations))
