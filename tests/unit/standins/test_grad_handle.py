"""Answers of `.grad` of a gradient at rest, compared with the copies that `zo.gathered` gives, and errors."""

from __future__ import annotations

import copy
import io
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero_offload as zo
from tests.helpers.models import TinyLM, build, tokens_of

ORDERS = [2.0, 1.0, 3.0, math.inf, 0.0]


def held(**settings: Any) -> nn.Module:
    model: nn.Module = zo.offload(build(TinyLM), zo.OffloadConfig(**{"precision": "fp32"} | settings))
    model(tokens_of(0)).backward()
    return model


def copies(model: nn.Module) -> dict[str, Tensor]:
    with zo.gathered(model, kind="grads") as grads:
        return dict(grads)


def named(model: nn.Module) -> dict[str, Tensor]:
    found = {name: param.grad for name, param in model.named_parameters()}
    return {name: grad for name, grad in found.items() if grad is not None}


@pytest.mark.parametrize("grads", ["cpu", "nvme"])
def test_norms_are_those_of_the_gradient(grads: str, nvme: Path) -> None:
    model = held(grads=grads, nvme=nvme)
    for order in ORDERS:
        expected = {name: torch.linalg.vector_norm(grad.double(), order) for name, grad in copies(model).items()}
        for name, grad in named(model).items():
            torch.testing.assert_close(torch.linalg.vector_norm(grad, order), expected[name].float(), rtol=2e-7, atol=0)
            assert grad.data.detach().norm(order, dtype=torch.float64).dtype == torch.float64
    zo.close(model)


def test_it_looks_like_the_gradient_of_an_fp32_step() -> None:
    model = held(precision="bf16")
    weight = model.blocks[0].up.weight
    grad = weight.grad
    assert (grad.shape, grad.dtype, grad.device) == (weight.shape, torch.float32, weight.device)
    assert (grad.numel(), grad.layout, grad.is_sparse, grad.requires_grad) == (
        weight.numel(),
        torch.strided,
        False,
        False,
    )
    assert grad.requires_grad_(False) is grad and grad.detach_() is grad and grad.float() is grad
    assert grad.grad_fn is None and "blocks.0.up.weight, offloaded to cpu" in repr(grad) == f"{grad}"


def scale(grad: Tensor) -> None:
    grad.mul_(0.5)
    grad.mul_(torch.tensor(-3.0))
    grad.div_(2)
    grad /= torch.tensor(4.0, dtype=torch.float64)


def clamp(grad: Tensor) -> None:
    grad.mul_(0.3)
    grad.clamp_(-0.01, 0.001)
    grad.clamp_(min=-0.005)
    grad.mul_(-2)
    grad.clamp_max_(0.002)


def by_lists(grad: Tensor) -> None:
    """Functions that torch itself does not call for tensors of another class."""
    torch._foreach_mul_([grad], 0.5)
    torch._foreach_div_([grad, torch.ones(2)], [4.0, 1.0])
    torch._foreach_clamp_min_([grad], -0.002)
    torch._foreach_clamp_max_([grad], torch.tensor(0.001).item())


@pytest.mark.parametrize("change", [scale, clamp, by_lists])
@pytest.mark.parametrize("grads", ["cpu", "nvme"])
def test_changes_are_those_of_the_gradient(grads: str, change: Callable[[Tensor], None], nvme: Path) -> None:
    model = held(grads=grads, nvme=nvme)
    expected = copies(model)
    for grad in (*expected.values(), *named(model).values()):
        change(grad)
    norms = {name: grad.norm() for name, grad in named(model).items()}
    for name, grad in copies(model).items():
        torch.testing.assert_close(grad, expected[name], rtol=3e-7, atol=0)
        torch.testing.assert_close(norms[name], expected[name].double().norm().float(), rtol=2e-7, atol=0)
    zo.close(model)


def test_a_tensor_that_scaled_may_change_afterwards() -> None:
    model, factor = held(), torch.tensor(0.5)
    expected = {name: grad.norm() * 0.5 for name, grad in named(model).items()}
    for grad in named(model).values():
        grad.mul_(factor)
    factor.zero_()
    assert {name: grad.norm() for name, grad in named(model).items()} == expected


def test_zeros_let_the_next_backward_start_afresh() -> None:
    model = held()
    expected = copies(model)
    optimizer = zo.AdamW(model.parameters())
    optimizer.zero_grad(set_to_none=False)
    model(tokens_of(1)).backward()
    weight = model.blocks[0].up.weight
    grad = weight.grad
    for _ in range(2):
        model.zero_grad(set_to_none=False)
    assert grad.mul_(2).clamp_(-1, 1).norm() == 0
    with pytest.raises(zo.ZeroOffloadError, match="clamping zeros"):
        grad.clamp_(min=0.5)
    assert nn.utils.clip_grad_norm_(model.parameters(), 1.0) == 0 and len(named(model)) == len(expected)
    with pytest.raises(zo.ZeroOffloadError, match="was assigned zeros"):
        optimizer.step()
    model(tokens_of(0)).backward()
    assert grad.norm() == weight.grad.norm() > 0
    assert all(torch.equal(grad, expected[name]) for name, grad in copies(model).items())
    model.zero_grad(set_to_none=False)
    optimizer.zero_grad()
    with pytest.raises(zo.ZeroOffloadError, match="is over"):
        grad.norm()


def test_not_finite_is_seen() -> None:
    model = zo.offload(build(TinyLM), zo.OffloadConfig(precision="fp32"))
    optimizer, scaler = zo.AdamW(model.parameters()), torch.amp.GradScaler("cpu", 4.0)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    scaler.scale(model(tokens_of(0)) * math.inf).backward()
    with pytest.raises(RuntimeError, match="non-finite"):
        nn.utils.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=True)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 2.0
    optimizer.zero_grad()
    model(tokens_of(0)).backward()
    next(iter(named(model).values())).mul_(math.nan)
    with pytest.warns(UserWarning, match=r"NaN or infinite \(embedding.weight\)"):
        optimizer.step()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


ELEMENTS: dict[str, Callable[[Any], object]] = {
    "clone": lambda grad: grad.clone(),
    "deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
    "save": lambda grad: torch.save(grad, io.BytesIO()),
    "add": lambda grad: grad + 1,
    "beside": lambda grad: torch.zeros(grad.shape).add_(grad),
    "isnan": lambda grad: torch.isnan(grad).any(),
    "index": lambda grad: grad[0],
    "view": lambda grad: grad.view(-1),
    "write": lambda grad: grad.copy_(torch.zeros(grad.shape)),
    "mul": lambda grad: grad.mul_(torch.ones(grad.shape)),
    "rows": lambda grad: torch.linalg.vector_norm(grad, dim=-1),
    "negative": lambda grad: torch.linalg.vector_norm(grad, -1),
    "rounds": lambda grad: grad.div_(2, rounding_mode="floor"),
    "half": lambda grad: grad.half(),
    "numpy": lambda grad: grad.numpy(),
    "list": lambda grad: grad.tolist(),
    "address": lambda grad: grad.data_ptr(),
    "storage": lambda grad: grad.untyped_storage(),
    "share": lambda grad: grad.share_memory_(),
    "pin": lambda grad: grad.pin_memory(),
    "set": lambda grad: grad.set_(torch.zeros(1)),
    "foreach": lambda grad: torch._foreach_add_([grad], 1.0),
}


@pytest.mark.parametrize("call", ELEMENTS.values(), ids=ELEMENTS)
def test_what_needs_elements_raises_and_names_the_call_that_copies(call: Callable[[Any], object]) -> None:
    model = held()
    message = r'gradient of blocks\.0\.up\.weight, which rests on cpu .* zo\.gathered\(model, kind="grads"\)'
    with pytest.raises(zo.ZeroOffloadError, match=message):
        call(model.blocks[0].up.weight.grad)


def test_a_gradient_that_is_over_is_not_put_back() -> None:
    """As a program does that sets gradients aside: a plain parameter would have the first one again."""
    model = held()
    weight = model.blocks[0].up.weight
    first, weight.grad = weight.grad, None
    model(tokens_of(1)).backward()
    with pytest.raises(zo.ZeroOffloadError, match=r"gradient of blocks\.0\.up\.weight is over"):
        weight.grad = first


def test_a_handle_ends_with_its_gradient() -> None:
    model = held()
    weight = model.blocks[0].up.weight
    first = weight.grad
    weight.grad = first  # as `p.grad = p.grad.detach()` does
    assert weight.grad is not None
    zo.AdamW(model.parameters()).step()
    assert weight.grad is None
    model(tokens_of(1)).backward()
    with pytest.raises(zo.ZeroOffloadError, match=r"gradient of blocks\.0\.up\.weight is over"):
        first.norm()
    with pytest.raises(zo.ZeroOffloadError, match="cannot be assigned"):
        weight.grad = model.blocks[1].up.weight.grad
    last = weight.grad
    del model
    with pytest.raises(zo.ZeroOffloadError, match="was dropped"):
        last.norm()


@pytest.mark.parametrize("is_late", [False, True])
def test_hooks_see_the_gradient_whenever_they_are_registered(is_late: bool) -> None:
    """They may change it, and take it away."""

    def looks(param: nn.Parameter) -> None:
        seen.append(param.grad.sum().item())
        param.grad.mul_(0.5)

    def takes(param: nn.Parameter) -> None:
        param.grad = None

    found = []
    for is_offloaded in (False, True):
        model, seen = build(TinyLM), list[float]()
        if is_offloaded and is_late:
            zo.offload(model, zo.OffloadConfig(precision="fp32"))
        for param in model.parameters():
            param.register_post_accumulate_grad_hook(looks)
        model.norm.weight.register_post_accumulate_grad_hook(takes)
        if is_offloaded and not is_late:
            zo.offload(model, zo.OffloadConfig(precision="fp32"))
        model(tokens_of(0)).backward()
        assert model.norm.weight.grad is None
        found.append((seen, copies(model) if is_offloaded else named(model)))
    (seen, grads), (same_seen, same_grads) = found
    assert same_seen == seen and list(same_grads) == list(grads)
    assert all(torch.equal(same_grads[name], grad) for name, grad in grads.items())


def _scales(param: nn.Parameter) -> None:
    param.grad.mul_(0.5)


def _drops(param: nn.Parameter) -> None:
    param.grad = None


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("change", [_scales, _drops])
def test_a_hook_that_changes_what_is_added_to_earlier_gradients_raises(
    change: Callable[[nn.Parameter], None], is_late: bool
) -> None:
    """In torch it would change their sum. A hook that only looks may stay."""
    model, armed = build(TinyLM), list[bool]()
    weight = model.norm.weight

    def hook(param: nn.Parameter) -> None:
        assert param.grad.isfinite().all()
        if armed:
            change(param)

    if not is_late:
        weight.register_post_accumulate_grad_hook(hook)
    zo.offload(model, zo.OffloadConfig(precision="fp32"))
    if is_late:
        weight.register_post_accumulate_grad_hook(hook)
    model(tokens_of(0)).backward()
    model(tokens_of(0)).backward()
    armed.append(True)
    with pytest.raises(zo.ZeroOffloadError, match=r"has changed the gradient of .*norm\.weight"):
        model(tokens_of(0)).backward()
    model.zero_grad()
    model(tokens_of(0)).backward()
    assert (weight.grad is None) == (change is _drops)


def test_a_hook_that_raises_leaves_no_gradient() -> None:
    model, ends = zo.offload(build(TinyLM), zo.OffloadConfig(precision="fp32")), [True]

    def hook(param: nn.Parameter) -> None:
        if ends:
            raise ValueError("a hook's own error")

    model.norm.weight.register_post_accumulate_grad_hook(hook)
    with pytest.raises(ValueError, match="own error"):
        model(tokens_of(1)).backward()
    ends.clear()
    model(tokens_of(0)).backward()
    found, expected = copies(model), copies(held())
    assert all(torch.equal(found[name], grad) for name, grad in expected.items())


def test_elsewhere_in_backward_it_says_when_to_read() -> None:
    model = zo.offload(build(TinyLM), zo.OffloadConfig(precision="fp32"))
    last = list(model.parameters())[-1]
    model.embedding.weight.register_post_accumulate_grad_hook(lambda _: last.grad.norm())
    with pytest.raises(zo.ZeroOffloadError, match="not complete while backward runs"):
        model(tokens_of(0)).backward()
