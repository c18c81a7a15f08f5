"""Operations that CUDA has and CPU kernels lack: convolutions of a device out of torch's tree, counts of integers.

Each is a few operations of the device, launched in order. Convolutions have two dimensions and no groups.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

_KEPT: list[torch.library.Library] = []
"""Registrations last as long as this."""


def register() -> None:
    library = torch.library.Library("aten", "IMPL")
    library.impl("convolution_overrideable", convolution, "PrivateUse1")
    library.impl("convolution_backward_overrideable", convolution_backward, "PrivateUse1")
    library.impl("histc", histogram, "PrivateUse1")
    _KEPT.append(library)


def convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Tensor:
    """(N, O, H', W') of (N, C, H, W) and (O, C, h, w)."""
    _check(weight, transposed, groups)
    columns = F.unfold(x, weight.shape[2:], dilation, padding, stride)  # (N, C h w, H' W')
    sizes = zip(x.shape[2:], weight.shape[2:], stride, padding, dilation, strict=True)
    shape = [(size + 2 * pad - step * (kernel - 1) - 1) // each + 1 for size, kernel, each, pad, step in sizes]
    found = (weight.flatten(1) @ columns).unflatten(2, shape)
    return found if bias is None else found + bias.view(1, -1, 1, 1)


def convolution_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    asked: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of the input, the weight and the bias, of those that are asked for."""
    _check(weight, transposed, groups)
    form, rows = (weight.shape[2:], dilation, padding, stride), grad.flatten(2)
    of_x = F.fold(weight.flatten(1).T @ rows, x.shape[2:], *form) if asked[0] else None
    of_weight = (rows @ F.unfold(x, *form).mT).sum(0).view_as(weight) if asked[1] else None
    return of_x, of_weight, grad.sum((0, 2, 3)) if asked[2] else None


def _check(weight: Tensor, transposed: bool, groups: int) -> None:
    if weight.dim() != 4 or transposed or groups != 1:
        raise NotImplementedError("the fake GPU has convolutions of two dimensions alone, without groups")


def histogram(x: Tensor, bins: int = 100, min: float = 0, max: float = 0) -> Tensor:
    """(bins,) counts: transformers counts the tokens of experts so, as integers on a GPU."""
    if min == max:
        min, max = x.min().item(), x.max().item()
    values = x.flatten().double()
    places = ((values - min) * (bins / (max - min))).floor().clamp(0, bins - 1).long()
    counted = ((values >= min) & (values <= max)).double()
    return torch.zeros(bins, dtype=torch.double, device=x.device).scatter_add(0, places, counted).to(x.dtype)
