"""Products of bf16 and fp16 matrices on a CPU that has no instructions for them.

torch multiplies these by a plain loop there, up to a hundred times slower than fp32. Here both sides are widened, which
is exact, multiplied in fp32, and the result is rounded once: what the loop computes, up to the order of its sums.
Saved for backward is what was given, not what was widened. Elsewhere these are torch's own functions.

Calls: `linear(x, weight)` and `causal_attention(query, key, value)`.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """(..., num_in) times the transpose of (num_out, num_in): (..., num_out)."""
    if not _is_slow(x):
        return F.linear(x, weight)
    out: Tensor = _WideLinear.apply(x, weight)  # type: ignore[no-untyped-call]
    return out


def causal_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Scaled dot products over (batch, heads, seq, head width); each position sees itself and those before it."""
    if not _is_slow(query):
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)
    wide = F.scaled_dot_product_attention(query.float(), key.float(), value.float(), is_causal=True)
    return wide.to(query.dtype)


def _is_slow(x: Tensor) -> bool:
    return x.device.type == "cpu" and x.dtype in (torch.bfloat16, torch.float16) and not has_products(x.dtype)


@cache
def has_products(dtype: torch.dtype) -> bool:
    """Whether torch multiplies matrices of this dtype by more than a loop on this CPU."""
    ops = torch.ops.mkldnn
    return bool(ops._is_mkldnn_bf16_supported() if dtype is torch.bfloat16 else ops._is_mkldnn_fp16_supported())


class _WideLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return F.linear(x.float(), weight.float()).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        wide = grad.float()
        grad_x = (wide @ weight.float()).to(x.dtype) if ctx.needs_input_grad[0] else None
        if not ctx.needs_input_grad[1]:
            return grad_x, None
        return grad_x, (wide.flatten(0, -2).T @ x.float().flatten(0, -2)).to(weight.dtype)
