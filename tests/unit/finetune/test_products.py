"""Products by fp32 are bf16's and fp16's, rounded once, whichever way this CPU takes by itself."""

import pytest
import torch
import torch.nn.functional as F
from torch.autograd.graph import saved_tensors_hooks

from zero_offload.finetune import gpt

HALVES = [torch.bfloat16, torch.float16]


@pytest.fixture(params=[False, True], ids=["without instructions", "with"])
def has_products(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(gpt, "has_products", lambda dtype: request.param)
    return bool(request.param)


@pytest.mark.parametrize("dtype", HALVES)
def test_linear_and_its_gradients_are_rounded_once(dtype: torch.dtype, has_products: bool) -> None:
    x = torch.randn(3, 5, 24).to(dtype).requires_grad_()
    weight = torch.randn(7, 24).to(dtype).requires_grad_()
    grad = torch.randn(3, 5, 7).to(dtype)
    exact = [tensor.detach().double().requires_grad_() for tensor in (x, weight)]
    F.linear(*exact).backward(grad.double())
    out = gpt.linear(x, weight)
    out.backward(grad)
    found = (out, x.grad, weight.grad)
    wanted = (F.linear(*exact), exact[0].grad, exact[1].grad)
    for one, other in zip(found, wanted, strict=True):
        assert one is not None and other is not None
        assert one.dtype == dtype
        # Half a step of the dtype, and what sums in fp32 lose.
        assert torch.allclose(one.double(), other, rtol=0.501 * torch.finfo(dtype).eps, atol=1e-5)


@pytest.mark.parametrize("needs", [(True, False), (False, True)])
def test_a_frozen_side_has_no_gradient(needs: tuple[bool, bool], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpt, "has_products", lambda dtype: False)
    sides = [torch.randn(4, 4, dtype=torch.bfloat16, requires_grad=need) for need in needs]
    gpt.linear(*sides).sum().backward()
    assert tuple(side.grad is not None for side in sides) == needs


def test_what_is_widened_is_not_kept_for_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpt, "has_products", lambda dtype: False)
    x, weight = (torch.randn(8, 8, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    kept: list[torch.Tensor] = []
    with saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        gpt.linear(x, weight)
    assert {tensor.data_ptr() for tensor in kept} == {x.data_ptr(), weight.data_ptr()}


@pytest.mark.parametrize("dtype", HALVES)
def test_attention_is_that_of_fp32_rounded(dtype: torch.dtype, has_products: bool) -> None:
    query, key, value = (torch.randn(2, 3, 9, 8).to(dtype) for _ in range(3))
    exact = F.scaled_dot_product_attention(query.double(), key.double(), value.double(), is_causal=True)
    found = gpt.causal_attention(query, key, value)
    assert found.dtype == dtype
    # torch's own way rounds in between.
    steps = 4 if has_products else 1
    assert torch.allclose(found.double(), exact, rtol=steps * torch.finfo(dtype).eps, atol=steps * 4e-3)


def test_fp32_is_left_alone() -> None:
    x, weight = torch.randn(4, 8), torch.randn(3, 8)
    assert torch.equal(gpt.linear(x, weight), F.linear(x, weight))
