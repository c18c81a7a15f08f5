"""Answers of `.grad` of a gradient at rest, compared with the copies that `zo.gathered` gives, and errors."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import zero_offload as zo
from tests.helpers.models import TinyLM, build, tokens_of
from zero_offload.runtime.grads.access import GradAccess
from zero_offload.storage.memory.arena import Arena

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
    assert set(named(model)) == set(expected) and not any(grad.any() for grad in named(model).values())
    model(tokens_of(1)).backward()
    weight = model.blocks[0].up.weight
    grad = weight.grad
    for _ in range(2):
        model.zero_grad(set_to_none=False)
    assert grad.mul_(2).clamp_(-1, 0).norm() == 0
    assert nn.utils.clip_grad_norm_(model.parameters(), 1.0) == 0 and len(named(model)) == len(expected)
    model(tokens_of(0)).backward()
    assert grad.norm() == weight.grad.norm() > 0
    assert all(torch.equal(grad, expected[name]) for name, grad in copies(model).items())
    model.zero_grad(set_to_none=False)
    optimizer.zero_grad()
    assert grad.norm() == 0 and weight.grad is None


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


MEMORY: dict[str, Callable[[Any], object]] = {
    "address": lambda grad: grad.data_ptr(),
    "storage": lambda grad: grad[0].untyped_storage(),
    "capsule": lambda grad: grad.__dlpack__(),
    "share": lambda grad: grad.share_memory_(),
    "pin": lambda grad: grad.view(-1).pin_memory(),
    "set": lambda grad: grad.set_(torch.zeros(1)),
    "resize": lambda grad: grad.resize_(1),
    "turn": lambda grad: grad.t_(),
    "data": lambda grad: setattr(grad, "data", torch.zeros(1)),
}


@pytest.mark.parametrize("call", MEMORY.values(), ids=MEMORY)
def test_what_goes_to_memory_raises(call: Callable[[Any], object]) -> None:
    model = held()
    message = r"memory of the gradient of blocks\.0\.up\.weight, which rests on cpu .* param\.grad\.clone\(\)"
    with pytest.raises(zo.ZeroOffloadError, match=message):
        call(model.blocks[0].up.weight.grad)


def test_arrays_of_it_cannot_be_written_to() -> None:
    """A change there would not reach the gradient."""
    model = held()
    weight = model.blocks[0].up.weight
    for array in (weight.grad.numpy(), weight.grad[0].numpy(), np.asarray(weight.grad)):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 0


def test_parameters_at_rest_beside_it() -> None:
    """A penalty by hand: a parameter's values are asked for as anywhere else."""
    model = held()
    weight = model.blocks[0].up.weight
    with zo.gathered(model):
        expected = weight.grad + 0.5 * weight
        weight.grad.add_(weight, alpha=0.5)
    assert torch.equal(weight.grad.clone(), expected.detach())


@pytest.mark.parametrize("add", ["_foreach_add_", "_foreach_mul_"])
def test_lists_of_parameters_at_rest_beside_it(add: str) -> None:
    """With an ordinary gradient among them, whose operation no handle answers: it raises, or has their values."""
    model = held()
    first, second = model.blocks[0].up.weight, model.blocks[1].up.weight
    ordinary, handle = torch.ones(second.shape), first.grad
    values = second.shape, {name: value.clone() for name, value in model.state_dict().items()}
    try:
        getattr(torch, add)([handle, ordinary], [first, second])
    except zo.ZeroOffloadError as error:
        assert "needs the data of parameter" in str(error)
    else:
        expected = torch.ones(values[0])
        getattr(torch, add)([expected], [values[1]["blocks.1.up.weight"]])
        assert torch.equal(ordinary, expected)


def test_lists_bring_one_gradient_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies of all might not fit."""
    model, alive, most = held(), weakref.WeakSet[Tensor](), 0

    def read(access: GradAccess, param: nn.Parameter) -> Tensor:
        nonlocal most
        alive.add(found := whole(access, param))
        most = max(most, len(alive))
        return found

    whole = GradAccess.read
    monkeypatch.setattr(GradAccess, "read", read)
    torch._foreach_add_([*named(model).values()], 1.0)
    torch._foreach_mul_([*named(model).values()], [torch.ones(grad.shape) for grad in named(model).values()])
    assert most == 1


def test_an_edit_in_memory_that_is_missing_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bf16 gradient becomes fp32 first."""
    model = held(precision="bf16")
    expected, weight = copies(model), model.blocks[0].up.weight

    def missing(*_: Any, **__: Any) -> Tensor:
        raise zo.CapacityError("no room")

    with monkeypatch.context() as patched:
        patched.setattr(Arena, "array", missing)
        with pytest.raises(zo.CapacityError):
            weight.grad.add_(1.0)
    assert all(torch.equal(grad, expected[name]) for name, grad in copies(model).items())


@pytest.mark.parametrize("grads", ["cpu", "device"])
def test_assigned_gradients(grads: str) -> None:
    """Of parameters without one, too; a step takes them. Others raise, and change nothing."""
    model = zo.offload(build(TinyLM), zo.OffloadConfig(precision="bf16", grads=grads))
    weight = model.norm.weight
    assert weight.grad is None
    for wrong in (torch.ones(3), torch.ones(weight.shape, dtype=torch.int64), torch.ones(weight.shape).to_sparse()):
        with pytest.raises(zo.ZeroOffloadError, match=r"gradient of .*norm\.weight.* cannot be of"):
            weight.grad = wrong
    weight.grad = torch.full(weight.shape, 0.3)
    assert weight.grad.float().eq(0.3).all()
    zo.SGD(model.parameters(), lr=1.0).step()
    with zo.gathered(model, kind="master") as masters:
        assert masters["norm.weight"].eq(0.7).all()
    zo.close(model)


def test_the_gradient_of_another_parameter_is_assigned_as_a_copy() -> None:
    """Plain torch makes one tensor of both, which a clip scales twice."""
    model = held()
    weight, other = model.blocks[0].up.weight, model.blocks[1].up.weight
    for grad in (other.grad, other.grad.view(-1).view_as(weight), other.grad.detach()):
        before = weight.grad.clone()
        with pytest.raises(zo.ZeroOffloadError, match=r"gradient of blocks\.1\.up\.weight was assigned to"):
            weight.grad = grad
        with pytest.raises(zo.ZeroOffloadError, match=r"gradient of blocks\.1\.up\.weight to \.data, which shares it"):
            weight.grad.data = grad
        assert torch.equal(weight.grad, before)
    weight.grad = other.grad.clone()
    assert torch.equal(weight.grad, other.grad)
    weight.grad, other.grad = other.grad.clone(), before
    assert torch.equal(other.grad, before) and not torch.equal(weight.grad, before)


def test_a_gradient_that_was_set_aside_is_put_back() -> None:
    model = held()
    weight = model.blocks[0].up.weight
    expected = weight.grad.clone()
    first, weight.grad = weight.grad, None
    model(tokens_of(1)).backward()
    assert not torch.equal(weight.grad, expected)
    weight.grad = first
    assert torch.equal(weight.grad, expected)
    first.mul_(2)
    with pytest.raises(zo.ZeroOffloadError, match="was changed afterwards"):
        weight.grad.norm()


def test_a_gradient_that_a_step_has_used_is_not_put_back() -> None:
    model = held()
    weight = model.blocks[0].up.weight
    first = weight.grad
    zo.SGD(model.parameters(), lr=1.0).step()
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
    last = model.blocks[1].up.weight.grad
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


def test_a_hook_may_assign_another_gradient() -> None:
    """Where its unit rests, too."""

    def halves(param: nn.Parameter) -> None:
        param.grad = param.grad * 0.5

    model = zo.offload(build(TinyLM), zo.OffloadConfig(precision="fp32"))
    for param in model.parameters():
        param.register_post_accumulate_grad_hook(halves)
    model(tokens_of(0)).backward()
    found, expected = copies(model), copies(held())
    assert all(torch.equal(found[name], grad * 0.5) for name, grad in expected.items())


class Centralized(torch.optim.Optimizer):
    """An optimizer of others around one of ours: it changes gradients in its step."""

    def __init__(self, base: torch.optim.Optimizer) -> None:
        super().__init__(base.param_groups, {})
        self.base = base

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.dim() > 1:
                    param.grad.sub_(param.grad.mean(dim=1, keepdim=True))
        self.base.step()


def test_an_optimizer_around_ours_changes_gradients() -> None:
    found = []
    for is_offloaded in (True, False):
        model = build(TinyLM)
        if is_offloaded:
            zo.offload(model, zo.OffloadConfig(precision="fp32"))
        optimizer = Centralized(zo.SGD(model.parameters(), lr=0.5))
        model(tokens_of(0)).backward()
        optimizer.step()
        found.append({name: value.clone() for name, value in model.state_dict().items()})
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())


def test_gradients_at_rest_are_not_changed_inside_of_a_backward() -> None:
    model = held()
    weight, before = model.norm.weight, copies(model)
    other = torch.ones(2, requires_grad=True)
    other.register_hook(lambda _: weight.grad.add_(1.0))
    with pytest.raises(zo.ZeroOffloadError, match="not complete while backward runs"):
        other.sum().backward()

    def assigns(_: Tensor) -> None:
        weight.grad = torch.ones(weight.shape)

    other = torch.ones(2, requires_grad=True)
    other.register_hook(assigns)
    with pytest.raises(zo.ZeroOffloadError, match="not complete while backward runs"):
        other.sum().backward()
    assert all(torch.equal(grad, before[name]) for name, grad in copies(model).items())


def test_updates_in_backward_leave_no_gradient_to_change() -> None:
    model = zo.offload(build(TinyLM), zo.OffloadConfig(precision="fp32", overlap="backward"))
    zo.SGD(model.parameters(), lr=0.5)
    with pytest.raises(zo.ConfigError, match="assigned with overlap='backward'"):
        model.norm.weight.grad = torch.ones(model.norm.weight.shape)
    with zo.no_sync(model):
        model(tokens_of(0)).backward()
    with pytest.raises(zo.ConfigError, match="needs overlap='forward'"):
        model.norm.weight.grad.add_(1.0)


def test_numbers_of_a_gradient_are_formatted_as_torchs() -> None:
    model = held()
    grad, plain = model.norm.weight.grad, copies(model)["norm.weight"]
    for one in (grad[0], grad.norm()):
        assert f"{one:.3e}" == f"{one.item():.3e}" and f"{one}" != ""
    assert f"{grad[0]}" == f"{plain[0].item()}" and "norm.weight" in f"{grad}"
    with pytest.raises(TypeError, match="unsupported format string"):
        f"{grad:.2f}"


@pytest.mark.parametrize("value", [1.0, "1", [1.0]])
def test_a_gradient_that_is_no_tensor_raises_torchs_error(value: Any) -> None:
    model = held()
    expected = copies(model)["norm.weight"]
    with pytest.raises(TypeError, match="assigned grad expected to be a Tensor or None but got grad of type"):
        model.norm.weight.grad = value
    assert torch.equal(copies(model)["norm.weight"], expected)
