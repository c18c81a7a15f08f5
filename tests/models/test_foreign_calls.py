"""torch's own functions on offloaded parameters work or raise; none of them silently does nothing."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import zero_offload as zo
from tests.helpers.models import WIDE, TinyLM, build, tokens_of
from tests.helpers.pairwise import in_pairs, in_turn
from tests.helpers.reference import placed
from tests.helpers.twins import assert_same, train

Model = partial(TinyLM, WIDE)
OPTIMIZERS = [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad, partial(torch.optim.AdamW, foreach=True)]


def name_of(make: object) -> str:
    return getattr(make, "__name__", "foreach")


@in_pairs(params=["cpu", "nvme"], grads=["cpu", "device", "nvme"], optimizer=OPTIMIZERS)
def test_a_foreign_optimizer_raises(params: str, grads: str, optimizer: object, nvme: Path) -> None:
    model = zo.offload(build(Model), placed("fp32", (params, grads, "cpu"), nvme))
    model(tokens_of(0)).backward()
    kind = getattr(optimizer, "func", optimizer).__name__
    message = rf"torch's {kind} cannot step parameter .* Step with zo\.{kind}\(model\.parameters\(\), lr=0\.1[,)]"
    with pytest.raises(zo.ZeroOffloadError, match=message):
        optimizer(model.parameters(), lr=0.1).step()


def test_the_error_of_an_unknown_optimizer_names_the_call_that_takes_it(nvme: Path) -> None:
    model = zo.offload(build(Model), placed("fp32", ("cpu", "cpu", "cpu"), nvme))
    model(tokens_of(0)).backward()
    with pytest.raises(zo.ZeroOffloadError, match=r"torch's Rprop .* Step with zo\.unitwise\(optimizer\)"):
        torch.optim.Rprop(model.parameters()).step()


class OnMasters(torch.optim.Optimizer):
    """Steps fp32 copies of its own, as wrappers for mixed precision and block by block do (BAdam's)."""

    def __init__(self, params: Iterator[nn.Parameter]) -> None:
        super().__init__(params, {})
        self.params = [param for group in self.param_groups for param in group["params"]]
        self.take_masters()

    def take_masters(self) -> None:
        self.masters = [param.clone().float().detach() for param in self.params]
        self.inner = torch.optim.AdamW(self.masters, lr=1e-2)

    def step(self) -> None:
        for param, master in zip(self.params, self.masters, strict=True):
            master.grad = param.grad.float()
            param.grad = None
        self.inner.step()
        for param, master in zip(self.params, self.masters, strict=True):
            param.data.copy_(master.to(param.dtype).data)
        self.take_masters()


@in_pairs(params=["cpu", "nvme"], grads=["cpu", "device", "nvme"])
def test_an_optimizer_that_has_masters_of_its_own(params: str, grads: str, nvme: Path) -> None:
    model, plain = zo.offload(build(Model), placed("fp32", (params, grads, "cpu"), nvme)), build(Model)
    losses: list[list[float]] = []
    for each in (model, plain):
        optimizer = OnMasters(each.parameters())
        losses.append([])
        for seed in range(3):
            loss = each(tokens_of(seed))
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.item())
    assert losses[0] == losses[1]
    assert all(map(torch.equal, (param.detach().clone() for param in model.parameters()), plain.parameters()))


def with_torch_clip(model: nn.Module, optimizer: zo.AdamW) -> Iterator[float]:
    for seed in range(4):
        loss = model(tokens_of(seed))
        loss.backward()
        yield nn.utils.clip_grad_norm_(model.parameters(), 0.1).item()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()


@pytest.mark.parametrize("params", ["device", "cpu", "nvme"])
def test_torch_clipping_works_where_gradients_rest_on_the_device(params: str, nvme: Path) -> None:
    assert_same(with_torch_clip, Model, placed("fp32", (params, "device", "cpu"), nvme))


def test_grad_is_the_gradient_where_it_rests_on_the_device(nvme: Path) -> None:
    model, plain = zo.offload(build(Model), placed("fp32", ("nvme", "device", "nvme"), nvme)), build(Model)
    model(tokens_of(0)).backward()
    plain(tokens_of(0)).backward()
    for param, twin in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(param.grad, twin.grad)
    optimizer = zo.AdamW(model.parameters())
    optimizer.step()
    assert all(param.grad is None for param in model.parameters())


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_gradient_that_is_kept_stays_what_it_is(micro_batches: int, nvme: Path) -> None:
    """As torch's does when the next backward makes another one; the latest is what grows."""
    kept: list[tuple[Tensor, Tensor]] = []

    def script(model: nn.Module, optimizer: zo.AdamW) -> Iterator[float]:
        kept.clear()
        for seed in range(4):
            for number in range(micro_batches):
                model(tokens_of(10 * seed + number)).backward()
                grad = model.blocks[0].up.weight.grad
                yield grad.norm().item()
                assert kept is not None and all(torch.equal(*pair) for pair in kept)
            if seed != 2:
                kept.append((grad, grad.clone()))
            optimizer.step()
            optimizer.zero_grad()
        yield from train(model, optimizer, [50])
        assert all(torch.equal(*pair) for pair in kept)

    assert_same(script, Model, placed("fp32", ("nvme", "device", "nvme"), nvme))


@pytest.mark.parametrize("call", ["model", "optimizer", "param", "delete"])
def test_gradients_can_be_dropped(call: str, fp32_config: zo.OffloadConfig) -> None:
    model = zo.offload(build(Model), fp32_config)
    optimizer = zo.AdamW(model.parameters())
    expected = build(Model)(tokens_of(1)).item()
    model(tokens_of(0)).backward()
    if call == "model":
        model.zero_grad()
    for param in model.parameters():
        if call == "delete":
            del param.grad
        elif call == "param":
            param.grad = None
    if call == "optimizer":
        optimizer.zero_grad()
    assert all(param.grad is None for param in model.parameters())
    optimizer.step()
    assert model(tokens_of(1)).item() == expected


class ModifiesActivation(TinyLM):
    def run_blocks(self, x: Tensor) -> Tensor:
        x = super().run_blocks(x)
        y = x.exp()
        y.mul_(2)
        return y


class ModifiesWeight(TinyLM):
    factor = 1.5

    def run_blocks(self, x: Tensor) -> Tensor:
        x = super().run_blocks(x)
        with torch.no_grad():
            self.blocks[0].up.weight.mul_(self.factor)
        return x


class TouchesWeight(ModifiesWeight):
    """The value stays: forward takes that, and backward raises as torch's does."""

    factor = 1.0


@pytest.mark.parametrize("model", [ModifiesActivation, ModifiesWeight, TouchesWeight])
def test_in_place_changes_of_saved_tensors_raise_as_in_torch(model: type[TinyLM], config: zo.OffloadConfig) -> None:
    # Where a changed weight would leave memory, or its fp32 master would not follow, forward itself says so.
    lost = model is ModifiesWeight and (bool(config.nvme_dirs) or config.compute_dtype_name != "float32")
    error, match = (zo.ZeroOffloadError, "forward has changed") if lost else (RuntimeError, "modified by an inplace")
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        build(partial(model, WIDE))(tokens_of(0)).backward()
    with pytest.raises(error, match=match):
        zo.offload(build(partial(model, WIDE)), config)(tokens_of(0)).backward()


def test_a_step_between_forward_and_backward_raises_as_in_torch(config: zo.OffloadConfig) -> None:
    for twin in (build(Model), zo.offload(build(Model), config)):
        optimizer = zo.AdamW(twin.parameters())
        first, second = twin(tokens_of(0)), twin(tokens_of(1))
        first.backward()
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            second.backward()
        optimizer.zero_grad()
        assert len(list(train(twin, optimizer, range(2)))) == 2


def with_two_optimizers(model: nn.Module, optimizer: zo.AdamW) -> Iterator[float]:
    """Each steps its own half; a unit is updated in two parts."""
    params = list(model.parameters())
    halves = [zo.AdamW(params[::2], lr=1e-2), zo.AdamW(params[1::2], lr=1e-3)]
    for seed in range(4):
        loss = model(tokens_of(seed))
        loss.backward()
        for half in halves:
            half.step()
        for half in halves:
            half.zero_grad()
        yield loss.item()


def with_closure(model: nn.Module, optimizer: zo.AdamW) -> Iterator[float]:
    for seed in range(3):

        def closure(seed: int = seed) -> Tensor:
            optimizer.zero_grad()
            loss = model(tokens_of(seed))
            loss.backward()
            return loss

        yield optimizer.step(closure).item()


def with_scheduler(model: nn.Module, optimizer: zo.AdamW) -> Iterator[float]:
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=8)
    for seed in range(6):
        yield from train(model, optimizer, [seed])
        scheduler.step()


def clip_then_drop(model: nn.Module, optimizer: zo.AdamW) -> Iterator[float]:
    """A clip belongs to the gradients it was asked for, not to those of the next backward."""
    for seed in range(4):
        model(tokens_of(seed + 20)).backward()
        zo.clip_grad_norm_(model, 1e-3)
        optimizer.zero_grad()
        yield from train(model, optimizer, [seed])


def frozen_by_the_optimizer(model: nn.Module, optimizer: zo.AdamW) -> Iterator[float]:
    """Parameters that no optimizer has keep their gradients from step to step, as in torch; these are dropped."""
    some = zo.AdamW(list(model.blocks[0].parameters()) + [model.norm.weight], lr=1e-2)
    for seed in range(4):
        loss = model(tokens_of(seed))
        loss.backward()
        some.step()
        optimizer.zero_grad()
        yield loss.item()


SCRIPTS = [with_two_optimizers, with_closure, with_scheduler, clip_then_drop, frozen_by_the_optimizer]


@in_turn(script=SCRIPTS, fp32_config=["nvme", "cpu"], indirect=["fp32_config"])
def test_optimizer_uses_that_work(script: object, fp32_config: zo.OffloadConfig) -> None:
    assert_same(script, Model, fp32_config)
