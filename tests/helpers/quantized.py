"""Quantized layers without a library: buffers as GPTQ has them, bytes with scales, and a tensor subclass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map_only

from tests.helpers.models import NARROW, Block, TinyLM, build

aten = torch.ops.aten


def _rounded(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Integers of 8 bits and a scale for each row."""
    scales = weight.abs().amax(1, keepdim=True) / 127
    return (weight / scales).round().to(torch.int8), scales


class Packed(nn.Module):
    """A linear layer of packed buffers, four values in each int32."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        values, scales = _rounded(linear.weight.detach())
        self.register_buffer("qweight", values.contiguous().view(torch.int32))
        self.register_buffer("scales", scales.half())
        self.register_buffer("g_idx", torch.arange(values.shape[0], dtype=torch.int32).flip(0))
        self.register_buffer("scratch", torch.zeros(4), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.qweight.view(torch.int8).to(x.dtype) * self.scales.to(x.dtype)
        return F.linear(x, weight[self.g_idx.long()])


class Bytes(nn.Module):
    """A linear layer whose weight is of integers or fp8, with its scales beside it."""

    def __init__(self, linear: nn.Linear, dtype: torch.dtype) -> None:
        super().__init__()
        values, scales = _rounded(linear.weight.detach())
        self.weight = nn.Parameter(values.to(dtype), requires_grad=False)
        self.weight_scale_inv = nn.Parameter(scales, requires_grad=False)
        self.bias = nn.Parameter(torch.full((values.shape[0],), 0.1))

    def forward(self, x: Tensor) -> Tensor:
        assert self.weight_scale_inv.dtype is torch.float32
        return F.linear(x, self.weight.to(x.dtype) * self.weight_scale_inv.to(x.dtype), self.bias)


class Scaled(Tensor):
    """Integers and scales that are a weight of `dtype`. The integers lie column by column."""

    def __new__(cls, values: Tensor, scales: Any, dtype: torch.dtype) -> Scaled:
        make: Any = Tensor._make_wrapper_subclass
        made: Scaled = make(cls, values.shape, dtype=dtype, device=values.device)
        return made

    def __init__(self, values: Tensor, scales: Any, dtype: torch.dtype) -> None:
        self.values_, self.scales_ = values, scales

    @classmethod
    def of(cls, weight: Tensor, inner: Callable[[Tensor], Tensor] = lambda scales: scales) -> Scaled:
        values, scales = _rounded(weight)
        return cls(values.t().contiguous().t(), inner(scales), weight.dtype)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["values_", "scales_"], self.dtype

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], dtype: Any, size: Any, stride: Any) -> Scaled:
        return cls(inner["values_"], inner["scales_"], dtype)

    def dequantized(self) -> Tensor:
        scales = self.scales_.dequantized() if isinstance(self.scales_, Scaled) else self.scales_
        return self.values_.to(self.dtype) * scales.to(self.dtype)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        if func is aten.detach.default:
            each = args[0]
            return cls(each.values_.detach(), each.scales_.detach(), each.dtype)
        if func is aten._to_copy.default and kwargs.get("dtype") in (None, args[0].dtype):
            each, device = args[0], kwargs.get("device")
            return cls(each.values_.to(device, copy=True), each.scales_.to(device, copy=True), each.dtype)
        args, kwargs = tree_map_only(Scaled, lambda each: each.dequantized(), (args, kwargs))
        return func(*args, **kwargs)


def _subclassed(linear: nn.Linear, inner: Callable[[Tensor], Tensor] = lambda scales: scales) -> nn.Linear:
    linear.weight = nn.Parameter(Scaled.of(linear.weight.detach(), inner), requires_grad=False)
    return linear


KINDS: dict[str, Callable[[nn.Linear], nn.Module]] = {
    "buffers": Packed,
    "int8": lambda linear: Bytes(linear, torch.int8),
    "fp8": lambda linear: Bytes(linear, torch.float8_e4m3fn),
    "subclass": _subclassed,
    "nested subclass": lambda linear: _subclassed(linear, Scaled.of),
}


def quantized_lm(kind: str, dim: int = NARROW, num_blocks: int = 3) -> nn.Module:
    """A model whose blocks have frozen quantized weights, and norms that are trained; always the same values."""
    model = build(lambda: TinyLM(dim, num_blocks))
    for block in model.blocks:
        assert isinstance(block, Block)
        block.up, block.down = KINDS[kind](block.up), KINDS[kind](block.down)  # type: ignore[assignment]
    return model


def inner_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Everything that a state dict shows of a model, without subclasses."""
    found: dict[str, Tensor] = {}

    def add(name: str, tensor: Any) -> None:
        if isinstance(tensor, Scaled):
            add(f"{name}.values_", tensor.values_)
            add(f"{name}.scales_", tensor.scales_)
        else:
            found[name] = tensor

    for name, tensor in model.state_dict().items():
        add(name, tensor)
    return found
