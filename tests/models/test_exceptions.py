"""A step that breaks off leaves nothing behind: training goes on as if it had been skipped."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zero_offload as zo
from tests.helpers.models import WIDE, Block, Fuse, TinyLM, build, tokens_of
from tests.helpers.pairwise import in_pairs
from tests.helpers.reference import read_masters
from tests.helpers.twins import assert_same, train
from zero_offload.model.api import runtime_of


class Explosion(Exception):
    pass


class Fused(TinyLM):
    """Raises inside block 1, on request."""

    class FusedBlock(Block):
        forward_error: type[BaseException] | None = None
        backward_error: type[BaseException] | None = None

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.down(self.up(self.norm(x)))
            if self.forward_error is not None:
                raise self.forward_error("in forward")
            return x + Fuse.apply(hidden, self.backward_error)

    def __init__(self) -> None:
        super().__init__(WIDE, block=self.FusedBlock)


class FusedUnderCheckpoint(Fused):
    """The backward error comes while a segment is recomputed."""

    reentrant = True

    def run_blocks(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


class NotReentrant(FusedUnderCheckpoint):
    reentrant = False


MODELS = [Fused, FusedUnderCheckpoint, NotReentrant]
ERRORS = [Explosion, KeyboardInterrupt]


def broken_step(model: nn.Module, optimizer: zo.AdamW, where: str, error: type[BaseException]) -> None:
    setattr(model.blocks[1], f"{where}_error", error)
    with pytest.raises(error, match=where):
        model(tokens_of(50)).backward()
    setattr(model.blocks[1], f"{where}_error", None)


@pytest.mark.filterwarnings("ignore:the last backward")
@in_pairs(
    fp32_config=["cpu", "nvme"], make=MODELS, where=["forward", "backward"], error=ERRORS, indirect=["fp32_config"]
)
def test_training_goes_on_exactly(
    make: type[nn.Module], where: str, error: type[BaseException], fp32_config: zo.OffloadConfig
) -> None:
    def script(model: nn.Module, optimizer: zo.AdamW) -> Iterator[float]:
        yield from train(model, optimizer, range(3))
        for _ in range(2):
            broken_step(model, optimizer, where, error)
            optimizer.zero_grad()
            yield from train(model, optimizer, range(3, 5))

    # A segment that is recomputed needs both of its units' pages beside a gradient's.
    assert_same(script, make, fp32_config)


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_without_zero_grad_the_broken_gradients_are_dropped(where: str, fp32_config: zo.OffloadConfig) -> None:
    """In plain torch they would stay; here the next forward drops them and says so."""
    twins = []
    for breaks in (True, False):
        model = zo.offload(build(Fused), zo.OffloadConfig.from_dict(fp32_config.to_dict()))
        optimizer = zo.AdamW(model.parameters())
        losses = list(train(model, optimizer, range(2)))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if breaks:
                broken_step(model, optimizer, where, Explosion)
            losses += train(model, optimizer, range(2, 5))
        dropped = [each for each in caught if "gradients are dropped" in str(each.message)]
        assert len(dropped) == (breaks and where == "backward")
        zo.close(model)
        twins.append(losses)
    assert twins[0] == twins[1]


@pytest.mark.filterwarnings("ignore:the last backward")
@in_pairs(fp32_config=["cpu", "nvme"], make=MODELS, error=ERRORS, indirect=["fp32_config"])
def test_a_backward_right_after_a_broken_one_counts(
    make: type[nn.Module], error: type[BaseException], fp32_config: zo.OffloadConfig
) -> None:
    """Its forward came before the one whose backward breaks; the exception is kept, with all frames of it."""

    def script(model: nn.Module, optimizer: zo.AdamW) -> Iterator[float]:
        for seed in (0, 10):
            good = model(tokens_of(seed))
            model.blocks[1].backward_error = error  # read by the forward, and by a forward that is run again
            broken = model(tokens_of(seed + 1))
            with pytest.raises(error, match="backward") as kept:
                broken.backward()
            model.blocks[1].backward_error = None
            optimizer.zero_grad()
            good.backward()
            optimizer.step()
            optimizer.zero_grad()
            yield good.item()
            assert kept.value
            yield from train(model, optimizer, [seed + 2])

    assert_same(script, make, fp32_config)


def test_pages_of_broken_gradients_come_back_unwritten(nvme: Path) -> None:
    """Those of the block whose gradients were half there."""
    model = zo.offload(build(Fused), zo.OffloadConfig(precision="fp32", grads="nvme", nvme=nvme, durability="scratch"))
    optimizer = zo.AdamW(model.parameters())
    list(train(model, optimizer, range(2)))
    runtime = runtime_of(model)
    model.blocks[1].backward_error = Explosion
    loss = model(tokens_of(50))
    with pytest.raises(Explosion):
        loss.backward()
    assert runtime.store.arena.claimed_frames > 0
    written = runtime.store.counters.snapshot()["written.nvme"]
    with pytest.warns(UserWarning, match="its gradients are dropped"):
        optimizer.step()
    runtime_of(model).grads.begin_forward()
    assert runtime.store.arena.claimed_frames == 0
    assert runtime.store.counters.snapshot()["written.nvme"] == written
    zo.close(model)


@pytest.mark.parametrize("clips", [False, True])
def test_a_step_after_a_broken_backward_has_nothing_to_do(clips: bool, fp32_config: zo.OffloadConfig) -> None:
    """Some of its gradients may not be whole."""
    model = zo.offload(build(Fused), fp32_config)
    optimizer = zo.AdamW(model.parameters())
    list(train(model, optimizer, range(2)))
    before = read_masters(model)
    broken_step(model, optimizer, "backward", Explosion)
    with pytest.warns(UserWarning, match="its gradients are dropped"):
        if clips:
            assert zo.clip_grad_norm_(model, 1.0) == 0
        optimizer.step()
    after = read_masters(model)
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert zo.stats(model).step == 2


def test_evaluation_after_a_broken_forward(fp32_config: zo.OffloadConfig) -> None:
    def script(model: nn.Module, optimizer: zo.AdamW) -> Iterator[float]:
        yield from train(model, optimizer, range(2))
        broken_step(model, optimizer, "forward", KeyboardInterrupt)
        with torch.no_grad():
            yield model(tokens_of(9)).item()
        yield from train(model, optimizer, range(2, 4))

    assert_same(script, Fused, fp32_config)


@pytest.mark.parametrize("has_hooks", [False, True])
def test_training_goes_on_after_an_interrupt_in_another_thread(has_hooks: bool, fp32_config: zo.OffloadConfig) -> None:
    """Saving hooks belong to a thread: those that the interrupt has left are not this one's, which may have its own."""
    sizes: list[int] = []

    def note(tensor: Tensor) -> Tensor:
        sizes.append(tensor.numel())
        return tensor

    def script(model: nn.Module, optimizer: zo.AdamW) -> Iterator[float]:
        yield from train(model, optimizer, range(2))
        with ThreadPoolExecutor(1) as pool:
            pool.submit(broken_step, model, optimizer, "forward", KeyboardInterrupt).result()
        sizes.clear()
        with torch.autograd.graph.saved_tensors_hooks(note, note) if has_hooks else contextlib.nullcontext():
            yield from train(model, optimizer, range(2, 4))
            optimizer.zero_grad()
            torch.ones(7, requires_grad=True).square()
        assert (7 in sizes) is has_hooks

    assert_same(script, Fused, fp32_config)


def test_nothing_is_saved_through_us_after_an_interrupt(nvme_config: zo.OffloadConfig) -> None:
    """Parameters touched after Ctrl-C in forward are outside of a forward again, once the model ran."""
    model = zo.offload(build(Fused), nvme_config)
    optimizer = zo.AdamW(model.parameters())
    broken_step(model, optimizer, "forward", KeyboardInterrupt)
    list(train(model, optimizer, range(1)))
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert model.blocks[0].up.weight.sum().item() == read_masters(model)["blocks.0.up.weight"].sum().item()


class TooLarge(TinyLM):
    """Parts of all blocks are needed at once."""

    def __init__(self) -> None:
        super().__init__(WIDE, num_blocks=6)
        self.greedy = False

    def run_blocks(self, x: Tensor) -> Tensor:
        if self.greedy:
            return x * sum(part.mean() for part in [block.up.weight[:2] for block in self.blocks])
        return super().run_blocks(x)


def test_training_goes_on_after_too_little_memory(nvme_config: zo.OffloadConfig) -> None:
    def script(model: nn.Module, optimizer: zo.AdamW) -> Iterator[float]:
        yield from train(model, optimizer, range(2))
        if isinstance(model.blocks[0].up.weight, nn.Parameter) and type(model.blocks[0].up.weight) is not nn.Parameter:
            model.greedy = True
            with pytest.raises(zo.CapacityError, match=r"a view of blocks\.\d.up.weight is held.*device_memory"):
                model(tokens_of(50))
            model.greedy = False
        yield from train(model, optimizer, range(2, 4))

    assert_same(script, TooLarge, nvme_config)


def test_a_gradient_that_is_not_finite_skips_the_step(fp32_config: zo.OffloadConfig) -> None:
    model = zo.offload(build(partial(TinyLM, WIDE)), fp32_config)
    optimizer = zo.AdamW(model.parameters())
    expected = build(partial(TinyLM, WIDE))(tokens_of(1)).item()
    (model(tokens_of(0)) * float("nan")).backward()
    assert torch.isnan(zo.clip_grad_norm_(model, 1.0))
    with pytest.warns(UserWarning, match="step 1.*NaN"):
        optimizer.step()
    optimizer.zero_grad()
    assert model(tokens_of(1)).item() == expected
    assert zo.stats(model).skipped_steps == 1


def test_the_warning_names_the_parameters(fp32_config: zo.OffloadConfig) -> None:
    model = build(TinyLM)
    model.get_parameter("blocks.1.up.weight").register_hook(lambda grad: grad * float("inf"))
    zo.offload(model, fp32_config)
    optimizer = zo.AdamW(model.parameters())
    model(tokens_of(0)).backward()
    with pytest.warns(UserWarning, match=r"NaN or infinite \(blocks.1.up.weight\); the step is skipped"):
        optimizer.step()
    optimizer.zero_grad()
    with pytest.warns(UserWarning, match=r"NaN or infinite \(.*, .*, .*, and \d+ more\)"):
        other = zo.offload(build(TinyLM), zo.OffloadConfig())
        (other(tokens_of(0)) * float("nan")).backward()
        zo.AdamW(other.parameters()).step()


class FusedAtInput(TinyLM):
    """Raises when block 1 has used its parameters in backward, and has not ended it."""

    class FusedBlock(Block):
        backward_error: type[BaseException] | None = None

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(Fuse.apply(x, self.backward_error))

    def __init__(self) -> None:
        super().__init__(WIDE, block=self.FusedBlock)


@pytest.mark.parametrize("way", ["load_state_dict", "gathered"])
def test_values_written_after_a_step_that_broke_off_are_kept(way: str, nvme: Path) -> None:
    """A unit was in use: values written then do not go to a copy that is dropped."""
    config = zo.OffloadConfig(params="nvme", precision="fp32", nvme=nvme, durability="scratch")
    model = zo.offload(build(FusedAtInput), config)
    optimizer = zo.AdamW(model.parameters())
    before = read_masters(model)
    broken_step(model, optimizer, "backward", Explosion)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*was left by an exception")
        if way == "load_state_dict":
            model.load_state_dict({name: 0.5 * value for name, value in model.state_dict().items()})
        else:
            with torch.no_grad(), zo.gathered(model, mode="write") as params:
                for param in params.values():
                    param.mul_(0.5)
    after = read_masters(model)
    assert [name for name in after if not torch.equal(after[name], 0.5 * before[name])] == []
    zo.close(model)
