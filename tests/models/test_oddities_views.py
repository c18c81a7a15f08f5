"""Views of parameters that a model keeps, and changes without notice: exact, or one clear error.

Without protection each of these is a segmentation fault, or a wrong number, where parameters leave memory.
"""

from __future__ import annotations

import gc
import threading
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import zero_offload as zo
from tests.helpers.models import WIDE, Block, TinyLM, build, tokens_of
from tests.helpers.reference import placed
from tests.helpers.twins import Script, assert_same, train
from zero_offload.model.api import runtime_of
from zero_offload.runtime.held_views import HeldViews

Model = partial(TinyLM, WIDE)


class Wide(TinyLM):
    """Three blocks of a class of its own."""

    block: Callable[[int], nn.Module] = Block

    def __init__(self) -> None:
        super().__init__(WIDE, 3, type(self).block)


@pytest.fixture
def roomy(nvme: Path) -> zo.OffloadConfig:
    """Values leave memory with every update, and come back to stay."""
    return placed("fp32", ("nvme", "cpu", "nvme"), nvme, "64MiB")


def script(model: nn.Module, optimizer: zo.AdamW) -> Iterator[float]:
    yield from train(model, optimizer, range(4))


class KeepsViews(Wide):
    """A part of each block's parameter, read by the model when the block has ended."""

    class block(Block):
        def part(self) -> Any:
            return self.up.weight[:2]

        def forward(self, x: Tensor) -> Tensor:
            self.kept = self.part()
            return super().forward(x)

    def run_blocks(self, x: Tensor) -> Tensor:
        return super().run_blocks(x) + sum(float(block.kept[0, 0]) for block in self.blocks)


class KeepsAliases(KeepsViews):
    class block(KeepsViews.block):
        def part(self) -> Tensor:
            return self.up.weight.data


class KeepsArrays(KeepsViews):
    """torch's tensor is gone, numpy's view of it holds its memory."""

    class block(KeepsViews.block):
        def part(self) -> Any:
            return self.up.weight.detach().numpy()


class KeepsClosures(Wide):
    """A function over a view, called by the model."""

    class block(Block):
        def forward(self, x: Tensor) -> Any:
            weight = self.up.weight.t()
            return super().forward(x), lambda z: (z @ weight).mean()

    def run_blocks(self, x: Tensor) -> Tensor:
        calls = []
        for block in self.blocks:
            x, call = block(x)
            calls.append(call)
        return x + sum(call(x) for call in calls)


class SavesInside(Wide):
    """The user's hooks on saved tensors hide ours inside a unit's own forward."""

    class block(Block):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autograd.graph.save_on_cpu():
                return super().forward(x)


class Product(torch.autograd.Function):
    """Keeps what backward needs as attributes, past every hook."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.x, ctx.weight, ctx.transposed = x, weight, weight.t()
        return x @ weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        assert torch.equal(ctx.weight.t(), ctx.transposed)
        return grad @ ctx.transposed, ctx.x.flatten(0, 1).t() @ grad.flatten(0, 1)


class KeepsInContext(Wide):
    class block(Block):
        def __init__(self, dim: int) -> None:
            super().__init__(dim)
            self.mix = nn.Parameter(torch.randn(dim, dim) * 0.05)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + Product.apply(x, self.mix)  # type: ignore[no-untyped-call]


HELD = [KeepsViews, KeepsAliases, KeepsArrays, KeepsClosures, SavesInside, KeepsInContext]


@pytest.mark.filterwarnings("ignore:a view of")
@pytest.mark.parametrize("make", HELD)
def test_kept_views_show_what_plain_ones_show(make: Any, roomy: zo.OffloadConfig) -> None:
    assert_same(script, make, roomy)


@pytest.mark.parametrize("make", HELD)
def test_too_many_kept_views_raise_and_are_named(make: Any, nvme_config: zo.OffloadConfig) -> None:
    model = zo.offload(build(make), nvme_config)
    with pytest.raises(zo.CapacityError, match=r"a view of blocks\.\d\.\w+.* is held.*Raise device_memory"):
        model(tokens_of(0)).backward()


def test_kept_views_show_new_values_outside(roomy: zo.OffloadConfig) -> None:
    """As soon as `step` returns; and they are said to cost memory, once."""

    def steps(model: nn.Module, optimizer: zo.AdamW) -> Iterator[float]:
        offloaded = type(model.blocks[0].up.weight) is not nn.Parameter
        kept: list[Tensor] = []
        model.blocks[0].register_forward_hook(lambda m, x, y: kept.append(m.up.weight.detach()[:2]))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for seed in range(3):
                yield from train(model, optimizer, [seed])
                yield kept[0].sum().item()
        said = [str(each.message) for each in caught if "is held" in str(each.message)]
        assert len(said) == offloaded and all("blocks.0.up.weight is held: the unit stays" in text for text in said)

    assert_same(steps, Model, roomy)


def test_kept_views_show_what_load_state_dict_brings(roomy: zo.OffloadConfig) -> None:
    model = zo.offload(build(KeepsViews), roomy)
    model(tokens_of(0))
    state = {name: value * 2 for name, value in model.state_dict().items()}
    model.load_state_dict(state)
    assert torch.equal(model.blocks[1].kept, state["blocks.1.up.weight"][:2])


def test_views_in_garbage_cost_no_memory(nvme_config: zo.OffloadConfig) -> None:
    class LeavesCycles(Wide):
        class block(Block):
            def forward(self, x: Tensor) -> Tensor:
                cycle: list[Any] = [self.up.weight.t()]
                cycle.append(cycle)
                return super().forward(x)

    gc.disable()
    try:
        assert_same(script, LeavesCycles, nvme_config)
    finally:
        gc.enable()


def test_with_several_ranks_a_kept_view_raises(nvme_config: zo.OffloadConfig) -> None:
    """They evict alike, and the others may hold none."""
    model = zo.offload(build(Model), nvme_config)
    with zo.gathered(model.blocks[0]):
        kept = model.blocks[0].up.weight[:2]
        (unit,) = (unit for unit in runtime_of(model).units if unit.name == "blocks.0")
        with pytest.raises(zo.ZeroOffloadError, match=r"a view of blocks\.0\.up\.weight is held.*\.clone\(\)"):
            HeldViews([unit], world_size=2).keep_if_viewed(unit)
        del kept
        assert not HeldViews([unit], world_size=2).keep_if_viewed(unit)


# Units that are in use, and still may go


class PastHooks(Wide):
    """No hook of a block runs: all of them are parameters touched by the model."""

    def run_blocks(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block.forward(x)
        return x


class Borrows(Wide):
    """A block computes with the parameters of its neighbour."""

    def run_blocks(self, x: Tensor) -> Tensor:
        for block, other in zip(self.blocks, [*self.blocks[1:], self.blocks[0]], strict=True):
            x = block(x) + F.linear(F.linear(x, other.up.weight, other.up.bias), other.down.weight) * 0.1
        return x


class Mixes(Wide):
    """One operation needs parameters of two units, another one those of all three."""

    def run_blocks(self, x: Tensor) -> Tensor:
        first, second, third = (block.up.weight for block in self.blocks)
        return super().run_blocks(x) * (first * second + third).mean(0)


@pytest.mark.parametrize("make", [PastHooks, Borrows, Mixes])
def test_touched_parameters_make_room_for_each_other(make: Any, nvme_config: zo.OffloadConfig) -> None:
    assert_same(script, make, nvme_config)


def test_an_operation_on_more_than_there_is_room_for_raises(nvme_config: zo.OffloadConfig) -> None:
    class Stacks(Wide):
        def run_blocks(self, x: Tensor) -> Tensor:
            return x + torch.stack([block.up.weight for block in self.blocks]).mean()

    with pytest.raises(zo.CapacityError, match=r"in use: blocks\.0, blocks\.1, blocks\.2"):
        zo.offload(build(Stacks), nvme_config)(tokens_of(0))


# Changes that torch counts no version for


def changing(change: Callable[[Tensor], object], calls: int) -> type[Wide]:
    class Changes(Wide):
        class block(Block):
            def forward(self, x: Tensor) -> Tensor:
                self.calls = getattr(self, "calls", 0) + 1
                if self.calls > calls:
                    change(self.up.weight.data)
                return super().forward(x)

    return Changes


CHANGES = [lambda w: w.clamp_(-0.03, 0.03), lambda w: w.neg_(), lambda w: w.copy_(w.flip(0)), lambda w: w[7, 7].add_(1)]


@pytest.mark.parametrize("change", CHANGES, ids=["clamp", "negate", "flip", "one"])
def test_parameters_changed_through_data_in_forward_raise(
    change: Callable[[Tensor], object], nvme_config: zo.OffloadConfig
) -> None:
    with pytest.raises(zo.ZeroOffloadError, match=r"forward has changed blocks\.0\.up\.weight in place"):
        zo.offload(build(changing(change, 0)), nvme_config)(tokens_of(0))


def test_a_change_that_starts_later_is_seen_later(nvme_config: zo.OffloadConfig) -> None:
    """Not every forward is looked at, only the first, second, fourth, eighth ..."""
    model = zo.offload(build(changing(CHANGES[0], 4)), nvme_config)
    optimizer = zo.AdamW(model.parameters())
    list(train(model, optimizer, range(4)))
    with pytest.raises(zo.ZeroOffloadError, match="forward has changed"):
        list(train(model, optimizer, range(4)))
    assert 5 < model.blocks[0].calls <= 8


# Surroundings of a model


def test_two_threads_cannot_run_one_model(nvme_config: zo.OffloadConfig) -> None:
    model = zo.offload(build(Model), nvme_config)
    errors: list[Exception] = []

    def other(*_: Any) -> None:
        def run() -> None:
            try:
                model.blocks[0](torch.zeros(1, WIDE))
            except zo.ZeroOffloadError as error:
                errors.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()

    handle = model.blocks[1].down.register_forward_hook(other)
    loss = model(tokens_of(0))
    assert len(errors) == 1 and "one forward at a time" in str(errors[0]).lower()
    assert loss.item() == build(Model)(tokens_of(0)).item()
    handle.remove()
    list(train(model, zo.AdamW(model.parameters()), range(2)))


def test_forward_and_backward_in_threads_of_their_own(nvme_config: zo.OffloadConfig) -> None:
    def in_thread(call: Callable[[], Tensor | None]) -> Any:
        results: list[Any] = []
        thread = threading.Thread(target=lambda: results.append(call()))
        thread.start()
        thread.join()
        return results[0]

    def steps(model: nn.Module, optimizer: zo.AdamW) -> Iterator[float]:
        for seed in range(3):
            loss = in_thread(partial(model, tokens_of(seed)))
            in_thread(loss.backward)
            optimizer.step()
            optimizer.zero_grad()
            yield loss.item()

    assert_same(steps, Model, nvme_config)


class Vjp(Wide):
    """torch.func allows no hooks on saved tensors: it works where none are needed."""

    class block(Block):
        def forward(self, x: Tensor) -> Tensor:
            out, pull = torch.func.vjp(self.norm, x)
            return super().forward(x) + 0.01 * pull(out)[0]


def test_torch_func_inside_of_forward() -> None:
    assert_same(script, Vjp, placed("fp32", ["cpu"] * 3, None))


def moved(model: nn.Module, optimizer: zo.AdamW) -> Iterator[float]:
    """To where and what it is already: scripts do this without thinking."""
    yield from train(model, optimizer, range(2))
    model.to("cpu").cpu().float().to(torch.float32)
    yield from train(model, optimizer, range(2))


def averaged(model: nn.Module, optimizer: zo.AdamW) -> Iterator[float]:
    """A tied parameter is one tensor under two names, as in the plain model's state."""
    shadow = {name: value.clone() for name, value in model.state_dict().items()}
    for seed in range(3):
        yield from train(model, optimizer, [seed])
        state = model.state_dict()
        assert state["head.weight"].data_ptr() == state["embedding.weight"].data_ptr()
        for name, value in state.items():
            shadow[name].lerp_(value, 0.1)
    yield from (value.double().sum().item() for value in shadow.values())


@pytest.mark.parametrize("steps", [moved, averaged], ids=lambda steps: steps.__name__)
def test_what_scripts_do_with_a_model(steps: Script, fp32_config: zo.OffloadConfig) -> None:
    assert_same(steps, Model, fp32_config)


def test_load_state_dict_cannot_replace_parameters(fp32_config: zo.OffloadConfig) -> None:
    model = zo.offload(build(Model), fp32_config)
    with pytest.raises(zo.ZeroOffloadError, match="leave assign out"):
        model.load_state_dict(model.state_dict(), assign=True)
    list(train(model, zo.AdamW(model.parameters()), range(1)))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_an_offloaded_model_cannot_be_traced(nvme_config: zo.OffloadConfig) -> None:
    model = zo.offload(build(Model), nvme_config)
    with pytest.raises(zo.ZeroOffloadError, match="trace the model before"):
        torch.jit.trace(model, (tokens_of(0),), check_trace=False)
    list(train(model, zo.AdamW(model.parameters()), range(1)))
