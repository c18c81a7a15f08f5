"""Backwards inside of a node's backward: reversible networks, adjoints, reentrant checkpoints.

Units come and go in them as in any other backward, so the largest has to fit and not all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zero_offload as zo
from tests.helpers import ranks
from tests.helpers.models import WIDE, TinyLM, build, tokens_of
from tests.helpers.ranks import RankPool, read_params
from tests.helpers.reference import param_groups, placed
from tests.helpers.twins import assert_same, train
from zero_offload.model.api import runtime_of

NUM_BLOCKS = 6


class Again(torch.autograd.Function):
    """Runs modules without a graph; backward runs each once more, and a backward of its own through it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *modules: Any) -> Tensor:
        ctx.modules, ctx.inputs = modules, []
        for module in modules:
            ctx.inputs.append(x.detach())
            with torch.no_grad():
                x = module(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        for module, given in zip(reversed(ctx.modules), reversed(ctx.inputs), strict=True):
            with torch.enable_grad():
                x = given.detach().requires_grad_()
                y = module(x)
            y.backward(grad)
            assert x.grad is not None
            grad = x.grad
        return grad, *(None for _ in ctx.modules)


class Reversible(TinyLM):
    def __init__(self, dim: int) -> None:
        super().__init__(dim, NUM_BLOCKS)

    def run_blocks(self, x: Tensor) -> Tensor:
        return Again.apply(x, *self.blocks)  # type: ignore[no-any-return]


class Saved(Reversible):
    """Blocks are recomputed once more in the inner backward."""

    def run_blocks(self, x: Tensor) -> Tensor:
        runs = [partial(checkpoint, block, use_reentrant=False) for block in self.blocks]
        return Again.apply(x, *runs)  # type: ignore[no-any-return]


class Reentrant(Reversible):
    """And in a backward inside of the inner one."""

    def run_blocks(self, x: Tensor) -> Tensor:
        runs = [partial(checkpoint, block, use_reentrant=True) for block in self.blocks]
        return Again.apply(x, *runs)  # type: ignore[no-any-return]


class Marked(Reversible):
    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        zo.checkpoint(self.blocks)


class TwoLevels(Reversible):
    def run_blocks(self, x: Tensor) -> Tensor:
        halves = [partial(Again.apply), partial(Again.apply)]
        first, second = ([*self.blocks[:3]], [*self.blocks[3:]])
        runs = [lambda x: halves[0](x, *first), lambda x: halves[1](x, *second)]
        return Again.apply(x, *runs)  # type: ignore[no-any-return]


class Segments(Reversible):
    """One inner backward runs through several blocks."""

    def run_blocks(self, x: Tensor) -> Tensor:
        runs = [nn.Sequential(*self.blocks[:3]), nn.Sequential(*self.blocks[3:], self.blocks[4])]
        return Again.apply(x, *runs)  # type: ignore[no-any-return]


class ReentrantSegment(Reversible):
    def run_blocks(self, x: Tensor) -> Tensor:
        return checkpoint(super(Reversible, self).run_blocks, x, use_reentrant=True)  # type: ignore[no-any-return]


class Touching(Reversible):
    """An inner forward reads a parameter of a module that it does not call."""

    def run_blocks(self, x: Tensor) -> Tensor:
        runs = [partial(self.with_next, number) for number in range(NUM_BLOCKS)]
        return Again.apply(x, *runs)  # type: ignore[no-any-return]

    def with_next(self, number: int, x: Tensor) -> Tensor:
        return self.blocks[number](x) * self.blocks[number - 1].norm.weight  # type: ignore[no-any-return]


class Coupled(TinyLM):
    """A reversible network of couplings: its backward computes inputs from outputs, without a graph."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim, NUM_BLOCKS)

    def run_blocks(self, x: Tensor) -> Tensor:
        return Couplings.apply(x, self.blocks)  # type: ignore[no-any-return]


class Couplings(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, blocks: nn.ModuleList) -> Tensor:
        a = b = x
        with torch.no_grad():
            for block in blocks:
                a, b = b, a + block(b)
        ctx.blocks, ctx.ends = blocks, (a, b)
        return a + b

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (a, b), (grad_a, grad_b) = ctx.ends, (grad, grad)
        for block in reversed(ctx.blocks):
            with torch.no_grad():
                b, a = a, b - block(a)
            with torch.enable_grad():
                x = b.detach().requires_grad_()
                y = block(x)
            y.backward(grad_b)
            assert x.grad is not None
            grad_a, grad_b = grad_b, grad_a + x.grad
        return grad_a + grad_b, None


def script(model: nn.Module, optimizer: zo.AdamW) -> Iterator[float]:
    yield from train(model, optimizer, range(3))


MODELS = [Reversible, Saved, Reentrant, Marked, TwoLevels, Segments, ReentrantSegment, Coupled]


@pytest.mark.parametrize("make", MODELS)
def test_they_need_room_for_one_unit(make: type[nn.Module], nvme_config: zo.OffloadConfig) -> None:
    assert_same(script, partial(make, WIDE), nvme_config)


def test_in_memory_they_are_what_they_were() -> None:
    assert_same(script, partial(Reversible, WIDE), placed("fp32", ("cpu", "cpu", "cpu"), None, None))


def test_one_may_read_other_modules_parameters(nvme: Path) -> None:
    assert_same(script, partial(Touching, WIDE), placed("fp32", ("nvme", "nvme", "nvme"), nvme, "16MiB"))


@pytest.mark.parametrize(("make", "overlap"), [(Reversible, "backward"), (Segments, "forward")])
def test_activations_and_gradients_may_leave_too(make: type[nn.Module], overlap: str, nvme: Path) -> None:
    config = placed("fp32", ("nvme", "nvme", "nvme"), nvme, "16MiB")
    config = zo.OffloadConfig.from_dict(config.to_dict() | {"activations": "nvme", "overlap": overlap})
    assert_same(script, partial(make, WIDE), config)


def frozen(make: type[nn.Module], dim: int) -> nn.Module:
    model = make(dim)
    for block in list(model.children())[1]:
        block.up.requires_grad_(False)
        block.down.requires_grad_(False)
    return model


def test_of_units_that_are_frozen_in_part(nvme_config: zo.OffloadConfig) -> None:
    assert_same(script, partial(frozen, Reversible, WIDE), nvme_config)


class Fails(Reversible):
    """The inner forward of a block raises the first time, and is tried again."""

    def run_blocks(self, x: Tensor) -> Tensor:
        return Again.apply(x, *(Retries(block) for block in self.blocks))  # type: ignore[no-any-return]


class Retries:
    def __init__(self, block: nn.Module) -> None:
        self.block = block

    def __call__(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled():
            with pytest.raises(ArithmeticError):
                self.block(x[..., :3] * self.breaks())
        return self.block(x)  # type: ignore[no-any-return]

    def breaks(self) -> float:
        handle = self.block.up.register_forward_pre_hook(self.fail)
        try:
            self.block(torch.zeros(1, WIDE))
        finally:
            handle.remove()
        raise AssertionError

    @staticmethod
    def fail(*_: Any) -> None:
        raise ArithmeticError


def test_an_inner_forward_may_fail_and_run_again(nvme_config: zo.OffloadConfig) -> None:
    assert_same(script, partial(Fails, WIDE), nvme_config)


def test_nothing_stays_in_use(nvme_config: zo.OffloadConfig) -> None:
    """After each inner backward its unit may leave, and after all of them none is left."""
    model = zo.offload(build(partial(Reversible, WIDE)), nvme_config)
    owner = runtime_of(model)
    assert owner is not None
    most = []
    for block in model.blocks:
        block.norm.weight.register_hook(lambda grad: most.append(sum(unit.in_use for unit in owner.units)))
    model(tokens_of(0)).backward()
    assert most == [1] * NUM_BLOCKS
    assert not any(unit.in_use for unit in owner.units)
    zo.close(model)


# Several ranks


def train_on_ranks(rank: int, world_size: int, make: type[nn.Module], settings: dict[str, Any]) -> Any:
    config = zo.OffloadConfig(precision="fp32", durability="scratch", **settings)
    model = zo.offload(build(partial(make, WIDE)), config)
    optimizer = zo.AdamW(param_groups(model), lr=1e-2)
    try:
        losses = []
        for step in range(2):
            loss = model(ranks.rows_of(step, rank, world_size))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses, read_params(model)
    finally:
        zo.close(model)


@pytest.mark.parametrize(("make", "stage"), [(Reversible, 1), (Saved, 3), (Segments, 3), (ReentrantSegment, 1)])
def test_ranks_run_them_together(make: type[nn.Module], stage: int, pool: RankPool, nvme: Path) -> None:
    expected = pool.succeed(train_on_ranks, make, {"stage": stage})
    tiers = {"params": "nvme", "grads": "nvme", "optimizer": "nvme", "nvme": nvme, "device_memory": "16MiB"}
    found = pool.succeed(train_on_ranks, make, {"stage": stage, **tiers})
    for (losses, params), (other_losses, other_params) in zip(found, expected, strict=True):
        assert losses == other_losses
        assert all(torch.equal(params[name], other_params[name]) for name in other_params)
