"""`zo.accumulate` leaves the gradients of the loop, bit for bit, whatever the model's graph looks like."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import zero_offload as zo
from tests.helpers.accumulating import (
    assert_as_loop,
    assert_same_grads,
    away,
    batches_of,
    grads_of,
    loop,
    third,
    uses_of,
)
from tests.helpers.architectures import ARCHITECTURES
from tests.helpers.models import NARROW, VOCAB, AttentionBlock, Block, TinyLM, build, tokens_of
from tests.helpers.pairwise import full
from zero_offload.base.errors import ConfigError, ZeroOffloadError

Make = Callable[[], nn.Module]


class Feed(nn.Module):
    """A block without its residual, which uses its input three times."""

    def __init__(self, dim: int = NARROW) -> None:
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(dim, dim), nn.Linear(dim, dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x)) * torch.sigmoid(x)  # type: ignore[no-any-return]


class ResidualOutside(TinyLM):
    """The sum, and what is between it and the next block, belong to no unit."""

    def __init__(self) -> None:
        super().__init__(block=lambda dim: Feed(dim))

    def run_blocks(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


class UnseenResidual(ResidualOutside):
    """The stream itself is given to no module: a function stands between."""

    def run_blocks(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x * 0.5 + block(F.layer_norm(x, x.shape[-1:]))
        return x


class Skips(ResidualOutside):
    """Later blocks take what earlier ones were given; the loss takes all of it."""

    def run_blocks(self, x: Tensor) -> Tensor:
        kept = []
        for block in self.blocks:
            kept.append(x)
            x = x + block(x)
        for block in self.blocks:
            x = x + block(x + kept.pop())
            kept.insert(0, x)
        return torch.stack([x, *kept]).mean(0)


class Transposed(ResidualOutside):
    """Blocks are given views, and the views are used again."""

    def run_blocks(self, x: Tensor) -> Tensor:
        x = x.transpose(0, 1)
        for block in self.blocks:
            x = (x + block(x)).transpose(0, 1)
        return x.transpose(0, 1)


class InPlace(TinyLM):
    """Blocks change what they are given, and their callers change what they return."""

    class Block(Block):
        def forward(self, x: Tensor) -> Tensor:
            return self.down(F.relu_(self.up(x.mul_(0.9))))  # type: ignore[no-any-return]

    def __init__(self) -> None:
        super().__init__(block=self.Block)

    def run_blocks(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            y = block(x)
            y.add_(x)
            y[:, 0] = y[:, 0] * 2
            x = y
        return x


class SharedAndRepeated(TinyLM):
    """One block three times, with another one in between, and the embedding's weight in three places."""

    def run_blocks(self, x: Tensor) -> Tensor:
        for block in (self.blocks[0], self.blocks[1], self.blocks[0], self.blocks[0], self.blocks[2]):
            x = block(x)
            x = x + F.linear(x, self.embedding.weight) @ self.embedding.weight
        return x


class Tangled(ResidualOutside):
    """Values that no block is given cross blocks, and one is made from the other, by a parameter too."""

    def run_blocks(self, x: Tensor) -> Tensor:
        first = torch.tanh(x)
        second = self.between(first) * first + self.norm.weight
        for block in self.blocks:
            x = torch.tanh(block(torch.sin(x)) * first + second.square() + first)
            first, second = second * 0.5, torch.tanh(second + self.norm.weight * x)
        return x + first + second

    def between(self, x: Tensor) -> Tensor:
        return torch.tanh(x)


class _Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        assert grad.any(), "it ran for nothing"
        return grad * 2


class TangledByAFunction(Tangled):
    def between(self, x: Tensor) -> Tensor:
        return _Twice.apply(x)  # type: ignore[no-any-return, no-untyped-call]


class Functions(ResidualOutside):
    """Blocks are given results of functions of the program, and so is the caller."""

    def forward(self, tokens: Tensor) -> Tensor:
        return _Twice.apply(super().forward(tokens))  # type: ignore[no-any-return, no-untyped-call]

    def run_blocks(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = _Twice.apply(x + block(x))  # type: ignore[no-untyped-call]
        return x


class Decoder(nn.Module):
    """A block that takes an encoder's output twice."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(dim, dim) for _ in range(3))

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:
        scores = self.query(x) @ self.key(memory).transpose(1, 2)
        return x + scores.softmax(-1) @ self.value(memory)  # type: ignore[no-any-return]


class TwoStacks(TinyLM):
    """Every decoder block takes the encoder's output."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = nn.ModuleList(Decoder(NARROW) for _ in range(3))

    def run_blocks(self, x: Tensor) -> Tensor:
        memory, y = super().run_blocks(x), x * 2
        for block in self.decoder:
            y = block(y, memory=memory)
        return y


class Hooked(TwoStacks):
    """Hooks that scale gradients: of what several blocks take, before they take it and after, and of parameters."""

    def __init__(self) -> None:
        super().__init__()
        for param in (self.embedding.weight, self.decoder[1].key.weight):
            param.register_hook(lambda grad: grad * 0.5)

    def run_blocks(self, x: Tensor) -> Tensor:
        memory, y = TinyLM.run_blocks(self, x), x * 2
        memory.register_hook(lambda grad: grad * 0.5)
        y = self.decoder[0](y, memory=memory)
        memory.register_hook(lambda grad: grad * 3)
        y.register_hook(lambda grad: grad * 0.25)
        y.retain_grad()
        for block in self.decoder[1:]:
            y = block(y, memory=memory)
        return y


@dataclass
class Outputs:
    hidden: Tensor
    extra: dict[str, tuple[Tensor, Tensor]]
    count: Tensor


class ManyOutputs(TinyLM):
    """Blocks return a dataclass with containers and integers, and are given one."""

    class Block(Block):
        def forward(self, given: Any) -> Any:
            out = super().forward(given.hidden)
            pair = (out.detach() * 2, given.extra["pair"][1] + out.mean())
            return Outputs(out, {"pair": pair}, given.count + out.shape[1])

    def __init__(self) -> None:
        super().__init__(block=self.Block)

    def run_blocks(self, x: Tensor) -> Tensor:
        state = Outputs(x, {"pair": (x.detach(), x.sum() * 0)}, torch.tensor(0))
        for block in self.blocks:
            state = block(state)
        return state.hidden + state.extra["pair"][1] + state.extra["pair"][0] * state.count


class Adapted(TinyLM):
    """A frozen base with trained adapters; the first block has nothing that is trained."""

    class Block(Block):
        def __init__(self, dim: int) -> None:
            super().__init__(dim)
            self.down_adapter, self.up_adapter = nn.Linear(dim, 2, bias=False), nn.Linear(2, dim, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + self.up_adapter(self.down_adapter(x))  # type: ignore[no-any-return]

    def __init__(self) -> None:
        super().__init__(block=self.Block)
        for name, param in self.named_parameters():
            param.requires_grad_("adapter" in name and not name.startswith("blocks.0"))


class Branching(TinyLM):
    """Micro-batches take different ways: by their length they leave out blocks, or take one of them twice."""

    def __init__(self) -> None:
        super().__init__(num_blocks=4)

    def run_blocks(self, x: Tensor) -> Tensor:
        ways = [(0, 1, 2, 3), (0, 2, 3), (1, 0, 3, 1), (3,), (0, 1, 1, 2)]
        for index in ways[x.shape[1] % len(ways)]:
            x = self.blocks[index](x)
        return x


class Nested(TinyLM):
    """A unit inside of a unit."""

    class Outer(nn.Module):
        def __init__(self, dim: int) -> None:
            super().__init__()
            self.before, self.inner, self.after = nn.Linear(dim, dim), Block(dim), nn.Linear(dim, dim)

        def forward(self, x: Tensor) -> Tensor:
            y = self.before(x)
            return self.after(self.inner(y) + y) + x  # type: ignore[no-any-return]

    def __init__(self) -> None:
        super().__init__(block=self.Outer)


class Checkpointed(TinyLM):
    reentrant = False

    def run_blocks(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


class Reentrant(Checkpointed):
    reentrant = True


class CheckpointedTogether(TinyLM):
    """One region over all blocks."""

    def run_blocks(self, x: Tensor) -> Tensor:
        y: Tensor = checkpoint(super().run_blocks, x, use_reentrant=False)
        return y


def marked(make: Make = TinyLM) -> nn.Module:
    model = make()
    zo.checkpoint(model.blocks)
    return model


MODELS: list[Make] = [
    *(TinyLM, ResidualOutside, UnseenResidual, Skips, Transposed, InPlace, SharedAndRepeated, TwoStacks, ManyOutputs),
    *(Hooked, Tangled, Adapted, Branching, TangledByAFunction, Functions, Checkpointed, CheckpointedTogether),
    marked,
]


@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
def test_gradients_are_those_of_the_loop(make: Make, nvme: Path) -> None:
    assert_as_loop(make, nvme, batches=batches_of(5))


def test_units_inside_of_units(nvme: Path) -> None:
    model = assert_as_loop(Nested, nvme, units=[Nested.Outer, Block])
    names = [name for name, _ in model.named_modules()]
    assert "blocks.0.inner" in names


@pytest.mark.parametrize("make", [AttentionBlock, Feed])
def test_marked_after_offload(make: Callable[[int], nn.Module], nvme: Path) -> None:
    """Then recompute's hooks come before ours."""
    plain, model = (build(lambda: TinyLM(block=make)) for _ in range(2))
    zo.offload(model, away(nvme))
    zo.checkpoint(model.blocks)
    assert zo.accumulate(model, batches_of(4), third) == loop(plain, batches_of(4), third)
    assert_same_grads(model, plain)
    zo.close(model)


def _losses(model: nn.Module, batch: Tensor) -> Tensor:
    """Several forwards, one without a graph, and parameters outside of the model."""
    with torch.no_grad():
        target = model(batch.flip(1))
    return (model(batch) - target).square() + model(batch[:, 1:]) / 3


def test_a_loss_of_several_forwards(nvme: Path) -> None:
    assert_as_loop(TinyLM, nvme, _losses)


class Prompted(TinyLM):
    def forward(self, prompt: Tensor) -> Tensor:
        return self.norm(self.run_blocks(prompt)).square().mean()  # type: ignore[no-any-return]


def test_leaves_of_the_program(nvme: Path) -> None:
    """Ordinary parameters used by every micro-batch, also in several places of one, and hooks on their gradients."""
    outcomes = []
    for accumulates in (False, True):
        model, prompt = build(Prompted), nn.Parameter(torch.randn(1, 3, NARROW, generator=torch.manual_seed(3)))
        seen: list[nn.Parameter] = []
        prompt.register_post_accumulate_grad_hook(seen.append)

        def loss_fn(model: nn.Module, scale: float, prompt: nn.Parameter = prompt) -> Tensor:
            loss: Tensor = model(prompt * scale) + (prompt * scale).square().sum()
            return loss

        if accumulates:
            zo.offload(model, away(nvme))
        run = zo.accumulate if accumulates else loop
        losses = run(model, [0.5, 1.0, 2.0], loss_fn)
        assert prompt.grad is not None and len(seen) == 3
        outcomes.append((losses, prompt.grad, grads_of(model)))
    (losses, grad, grads), (found_losses, found_grad, found) = outcomes
    assert found_losses == losses and torch.equal(found_grad, grad)
    assert all(torch.equal(found[name], grads[name]) for name in grads if grads[name] is not None)
    zo.close(model)


def test_what_cannot_be_parted_raises_before_backward(nvme: Path) -> None:
    model = zo.offload(build(Reentrant), away(nvme))
    with pytest.raises(ZeroOffloadError, match=r"use_reentrant=True.*zo\.checkpoint.*loop of loss_fn"):
        zo.accumulate(model, batches_of(3), third)
    assert all(grad is None for grad in grads_of(model).values())
    plain = build(Reentrant)
    assert loop(model, batches_of(3), third) == loop(plain, batches_of(3), third)
    assert_same_grads(model, plain)
    zo.close(model)


class RetainsLate(TwoStacks):
    def run_blocks(self, x: Tensor) -> Tensor:
        y = self.decoder[0](x, memory=(memory := x * 2))
        memory.retain_grad()
        self.kept = memory
        return self.decoder[1](y, memory=memory)  # type: ignore[no-any-return]


def test_what_is_retained_must_be_whole(nvme: Path) -> None:
    model = zo.offload(build(RetainsLate), away(nvme))
    with pytest.raises(ZeroOffloadError, match=r"in parts.*retain_grad"):
        zo.accumulate(model, batches_of(3), third)
    assert all(grad is None for grad in grads_of(model).values())
    zo.close(model)


def test_each_unit_is_asked_for_twice(nvme: Path) -> None:
    model = zo.offload(build(TinyLM), away(nvme))
    third(model, tokens_of(0)).backward()
    once = uses_of(model)
    zo.accumulate(model, batches_of(6), third)
    assert uses_of(model) == once
    assert once == [0, 1, 2, 3, 0, 3, 2, 1]
    zo.close(model)


def test_other_ways_meet_again(nvme: Path) -> None:
    """Who leaves out a block waits where the others come to."""

    class Shorter(TinyLM):
        def run_blocks(self, x: Tensor) -> Tensor:
            for block in self.blocks[x.shape[0] - 1 :]:
                x = block(x)
            return x

    model = assert_as_loop(Shorter, nvme, batches=[tokens_of(i, batch=1 + i % 2) for i in range(4)])
    assert uses_of(model) == [0, 1, 2, 3, 0, 3, 2, 1]


# Refusals


class Twin(nn.Module):
    def __init__(self, other: nn.Module) -> None:
        super().__init__()
        self.other = other


def test_another_trained_model_is_refused(nvme: Path) -> None:
    model = zo.offload(build(TinyLM), away(nvme / "one"))
    other = zo.offload(build(TinyLM), away(nvme / "two"))
    with pytest.raises(ConfigError, match=r"one offloaded model.*embedding.weight.*another"):
        zo.accumulate(model, batches_of(2), lambda model, batch: model(batch) + other(batch))
    zo.close(model)
    zo.close(other)


def test_a_frozen_other_model_is_used(nvme: Path) -> None:
    """A teacher that rests on disk too; gradients pass through it."""
    outcomes = []
    for accumulates in (False, True):
        model, teacher = build(TinyLM), build(Prompted, 5).requires_grad_(False)
        if accumulates:
            zo.offload(model, away(nvme / "one"))
            zo.offload(teacher, away(nvme / "two"))

        def loss_fn(model: nn.Module, batch: Tensor, teacher: nn.Module = teacher) -> Tensor:
            loss: Tensor = teacher(model(batch) * torch.ones(1, 2, NARROW)) + model(batch)
            return loss

        losses = (zo.accumulate if accumulates else loop)(model, batches_of(3), loss_fn)
        outcomes.append((losses, grads_of(model)))
    assert outcomes[0][0] == outcomes[1][0]
    assert all(torch.equal(grad, outcomes[1][1][name]) for name, grad in outcomes[0][1].items())
    zo.close(model)
    zo.close(teacher)


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        (lambda loss: loss.item(), "a float"),
        (lambda loss: torch.stack([loss, loss]), r"shape \(2,\)"),
        (lambda loss: loss.detach(), "without a graph"),
    ],
)
def test_what_is_no_loss(returned: Callable[[Tensor], Any], words: str, nvme: Path) -> None:
    model = zo.offload(build(TinyLM), away(nvme))
    for batches in (batches_of(1), batches_of(3)):
        with pytest.raises(ConfigError, match=rf"loss_fn returned.*{words}"):
            zo.accumulate(model, batches, lambda model, batch: returned(model(batch)))
    zo.close(model)


def test_a_backward_of_its_own_is_refused(nvme: Path) -> None:
    def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
        loss: Tensor = model(batch)
        loss.backward(retain_graph=True)
        return loss

    model = zo.offload(build(TinyLM), away(nvme))
    with pytest.raises(ZeroOffloadError, match=r"backward inside of zo\.accumulate"):
        zo.accumulate(model, batches_of(3), loss_fn)
    with pytest.warns(UserWarning, match="gradients are dropped"), pytest.raises(ZeroOffloadError, match="own loss_fn"):
        zo.accumulate(model, batches_of(2), lambda model, batch: zo.accumulate(model, [batch], third)[0])
    zo.close(model)


def test_it_takes_an_offloaded_model() -> None:
    with pytest.raises(ConfigError, match=r"zo\.accumulate takes a model that was offloaded"):
        zo.accumulate(TinyLM(), batches_of(2), third)


def test_none_and_one(nvme: Path) -> None:
    model, plain = zo.offload(build(TinyLM), away(nvme)), build(TinyLM)
    assert zo.accumulate(model, [], third) == []
    assert zo.accumulate(model, batches_of(1), third) == loop(plain, batches_of(1), third)
    assert_same_grads(model, plain)
    zo.close(model)


def test_the_vocabulary_is_the_helpers() -> None:
    assert int(torch.cat([batch.flatten() for batch in batches_of(5)]).max()) < VOCAB


# Real architectures


QUICK = ["llama", "t5", "bart", "qwen2_moe", "deberta_v2", "clip"]
"""Two stacks, experts that some micro-batches leave out, parameters that many units use, two towers."""


@pytest.mark.parametrize("name", [each if each in QUICK else full(each) for each in ARCHITECTURES])
def test_architectures(name: str, nvme: Path) -> None:
    pytest.importorskip("transformers")
    architecture = ARCHITECTURES[name]

    def loss_fn(model: nn.Module, batch: dict[str, Any]) -> Tensor:
        loss: Tensor = model(**batch).loss / 3
        return loss

    plain, model = architecture.build(), architecture.build()
    zo.offload(model, away(nvme))
    batches = [architecture.batch(seed) for seed in range(3)]
    assert zo.accumulate(model, batches, loss_fn) == loop(plain, batches, loss_fn)
    assert_same_grads(model, plain)
    zo.close(model)
