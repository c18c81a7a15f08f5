"""Cross entropy of a linear head, without ever holding the logits of all tokens.

Owns the order of the computation: chunk after chunk of tokens, in forward and again in backward. So only one chunk of
the (tokens, vocabulary) logits exists at a time. Keeps no logits from forward to backward: the head's work grows by a
third, and memory holds three times a chunk. Never fetches: an offloaded weight comes because it is touched.

Memory at the peak, beside inputs and outputs, has three chunks of fp32 logits and one slice of a 16-bit product. It
also has the weight's gradient in fp32 where its dtype has 16 bits. `_ChunkSizes` says how large chunks and slices are,
by where the tensors are.

Calls, in order: `chunked_cross_entropy` -> `_TokenLosses` (a loss per token) -> `_reduce`.
"""

from __future__ import annotations

from collections.abc import Iterator
from numbers import Integral
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from zero_offload.base.errors import ConfigError
from zero_offload.base.types import MIB


class _ChunkSizes(NamedTuple):
    """Sizes of the parts that are computed at a time, unless the caller asks for others."""

    chunk_bytes: int
    """Bytes of the fp32 logits of one chunk, at most."""
    product_numel: int
    """Elements of a weight gradient that a 16-bit product gives, at most."""


CPU_SIZES = _ChunkSizes(48 * MIB, 1 << 22)
"""144 MiB of logits at the peak, and slices of 8 MiB: memory is what a CPU saves, and small products are as fast."""
DEVICE_SIZES = _ChunkSizes(256 * MIB, 1 << 28)
"""768 MiB of logits at the peak, and slices of 512 MiB. Each chunk reads and writes the weight's whole gradient, and
each product takes some launches. Take 128k words and 32k tokens: a CPU's sizes make 512 chunks of 126 products, seconds
of a GPU's time. These sizes make 64 chunks of one or two."""
GRAIN = 64
"""Chunks and slices chosen here are multiples of it: kernels like it, and the fp32 products tried then round alike."""

REDUCTIONS = ("mean", "sum", "none")


class _Options(NamedTuple):
    """Settings that a chunk's loss depends on beside its tensors."""

    chunk_tokens: int
    ignore_index: int
    label_smoothing: float


def chunked_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    chunk_tokens: int | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """`F.cross_entropy(F.linear(hidden, weight, bias).float(), targets)` in the memory of one chunk of tokens.

    `hidden` is (..., features), `targets` (...) int64, `weight` (vocabulary, features), `bias` (vocabulary,); the other
    arguments mean what they mean in `F.cross_entropy`. `chunk_tokens=None` takes as many tokens as give 48 MiB of
    logits in fp32 on a CPU, 256 MiB on a GPU. At the peak three times that is in memory. Logits are made in the dtype
    of the inputs (or autocast's) and widened to fp32; fp64 stays fp64.

    With one chunk, loss and gradients are torch's, bit for bit, but for label smoothing, which changes the order of
    some additions. With several, the loss is the same as far as a product of fewer rows rounds alike. On the CPU tried
    it does: bf16 always, fp32 with multiples of 16 tokens. Gradients of `weight` and `bias` are summed over chunks in
    fp32 at least, then rounded to their dtype. Backward makes the logits again; a second derivative raises torch's
    error.

    With an offloaded `weight`, call it inside the model's forward. Inside the forward of a module that holds the
    weight, the weight leaves memory as soon as the backward through that module is over.

    Raises ConfigError when shapes, dtypes or options do not fit together.
    """
    options = _Options(
        _chunk_tokens_for(hidden, weight) if chunk_tokens is None else chunk_tokens, ignore_index, label_smoothing
    )
    if problems := list(_problems(hidden, weight, targets, bias, reduction, options)):
        raise ConfigError("chunked_cross_entropy: " + "; ".join(problems))
    hidden, weight, bias = autocast_inputs(hidden, weight, bias)
    flat = targets.reshape(-1)
    tokens = hidden.reshape(-1, hidden.shape[-1])
    losses: Tensor = _TokenLosses.apply(tokens, weight, bias, flat, options)  # type: ignore[no-untyped-call]
    if reduction == "none":
        return losses.view(targets.shape)
    return _reduce(losses, flat == ignore_index, reduction)


class _TokenLosses(torch.autograd.Function):
    """hidden (tokens, features), weight, bias, targets (tokens,) int64 -> losses (tokens,) in fp32, ignored ones 0.

    A Function, and not torch.utils.checkpoint around each chunk. That would leave the sum of the chunks' weight
    gradients to autograd, which adds them in the weight's dtype and holds two. Everything that backward needs is saved
    by `save_for_backward`. An offloaded model's hooks on saved tensors see the weight there, and fetch its memory
    before backward reads it. They would not see an attribute of `ctx`.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, options: _Options
    ) -> Tensor:
        losses = [
            F.cross_entropy(
                _wide(F.linear(some, weight, bias)),
                wanted,
                reduction="none",
                ignore_index=options.ignore_index,
                label_smoothing=options.label_smoothing,
            )
            for some, wanted in _chunks(options, hidden, targets)
        ]
        ctx.save_for_backward(hidden, weight, bias, targets)
        ctx.options = options
        return torch.cat(losses)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, bias, targets = ctx.saved_tensors
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.empty_like(hidden) if needs_hidden else hidden
        grad_weight: Tensor | None = None
        grad_bias: Tensor | None = None
        ignored = targets == ctx.options.ignore_index
        inputs = (hidden, grad_hidden, grad.masked_fill(ignored, 0.0), targets.masked_fill(ignored, 0))
        # The forward was cast as its autocast said; one around this backward is not asked.
        with torch.autocast(hidden.device.type, enabled=False):
            for some, grad_some, grad_losses, wanted in _chunks(ctx.options, *inputs):
                logits = _wide(F.linear(some, weight, bias))
                grad_logits = _logits_grad(logits, wanted, grad_losses, ctx.options.label_smoothing).to(some.dtype)
                del logits
                if needs_hidden:
                    torch.mm(grad_logits, weight, out=grad_some)
                if needs_weight:
                    grad_weight = _add_product(grad_weight, grad_logits.t(), some)
                if needs_bias:
                    part = _wide(grad_logits.sum(0))
                    grad_bias = part if grad_bias is None else grad_bias.add_(part)
        return (
            grad_hidden if needs_hidden else None,
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            None,
            None,
        )


def _chunks(options: _Options, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The same tokens of each tensor, chunk after chunk; without tokens, one empty chunk."""
    return zip(*(tensor.split(options.chunk_tokens) for tensor in tensors), strict=True)


def _logits_grad(logits: Tensor, targets: Tensor, grad_losses: Tensor, label_smoothing: float) -> Tensor:
    """(tokens, vocabulary) in the dtype of `logits`, whose memory is overwritten; an ignored token has gradient 0."""
    log_probs = F.log_softmax(logits, -1)
    # torch's own kernel ends it, so that one chunk gives torch's bits; what that needs goes where the logits were.
    grad_log_probs = logits.copy_((grad_losses * (-label_smoothing / logits.shape[1])).unsqueeze(1))
    tokens = torch.arange(len(targets), dtype=torch.int64, device=targets.device)
    grad_log_probs[tokens, targets] -= (1 - label_smoothing) * grad_losses
    return torch._log_softmax_backward_data(grad_log_probs, log_probs, -1, log_probs.dtype)


def _add_product(total: Tensor | None, left: Tensor, right: Tensor) -> Tensor:
    """`total + left @ right`, the sum in fp32 at least; `total` is overwritten."""
    if left.dtype == torch.promote_types(left.dtype, torch.float32):
        return left @ right if total is None else total.addmm_(left, right)
    if total is None:
        total = torch.zeros(left.shape[0], right.shape[1], dtype=torch.float32, device=left.device)
    # 16-bit products are tensors of their own before they are added, and a CPU's kernels take fp32 scratch of the same
    # size. So they are made some rows at a time.
    num_rows = max(GRAIN, _sizes_for(left).product_numel // max(1, right.shape[1]) // GRAIN * GRAIN)
    for some_total, some_left in zip(total.split(num_rows), left.split(num_rows), strict=True):
        some_total.add_(some_left @ right)
    return total


def _reduce(losses: Tensor, ignored: Tensor, reduction: str) -> Tensor:
    # nll_loss of one class per token is the sum or mean of the tokens that count. It adds them in the order of torch's
    # cross entropy: losses.sum() would differ in the last bits.
    return F.nll_loss(-losses.unsqueeze(1), -ignored.long(), ignore_index=-1, reduction=reduction)


def _wide(tensor: Tensor) -> Tensor:
    """The tensor in fp32, or as it is where that would lose bits."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def autocast_inputs(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """The casts that F.linear would make; here, since autocast does not reach into a Function's backward."""
    device = hidden.device.type
    if not torch.is_autocast_enabled(device):
        return hidden, weight, bias
    dtype = torch.get_autocast_dtype(device)

    def cast(tensor: Tensor) -> Tensor:
        return tensor if tensor.dtype == torch.float64 else tensor.to(dtype)

    return cast(hidden), cast(weight), None if bias is None else cast(bias)


def _sizes_for(tensor: Tensor) -> _ChunkSizes:
    return CPU_SIZES if tensor.device.type == "cpu" else DEVICE_SIZES


def _chunk_tokens_for(hidden: Tensor, weight: Tensor) -> int:
    most = _sizes_for(hidden).chunk_bytes // (4 * max(1, weight.shape[:1].numel()))
    return most // GRAIN * GRAIN or max(1, most)


def _problems(
    hidden: Tensor, weight: Tensor, targets: Tensor, bias: Tensor | None, reduction: str, options: _Options
) -> Iterator[str]:
    shape, vocabulary = tuple(hidden.shape), tuple(weight.shape[:1])
    if weight.dim() != 2 or shape[-1:] != tuple(weight.shape[1:]):
        yield f"hidden is {shape}, weight {tuple(weight.shape)}; pass (..., features) and (vocabulary, features)"
    if tuple(targets.shape) != shape[:-1]:
        yield f"targets are {tuple(targets.shape)} for hidden {shape}; pass one target per token, {shape[:-1]}"
    if targets.dtype != torch.int64:
        yield f"targets are {targets.dtype}, not class numbers in torch.int64; pass targets.long()"
    if bias is not None and tuple(bias.shape) != vocabulary:
        yield f"bias is {tuple(bias.shape)}, not {vocabulary}, the vocabulary of the weight"
    if reduction not in REDUCTIONS:
        yield f"reduction={reduction!r} is unknown; use one of {', '.join(REDUCTIONS)}"
    if not isinstance(options.chunk_tokens, Integral) or options.chunk_tokens < 1:
        yield f"chunk_tokens={options.chunk_tokens!r} is not a number of tokens; use a whole number from 1 on, or None"
    if not isinstance(options.ignore_index, Integral):
        yield f"ignore_index={options.ignore_index!r} is not a class number; use a whole number"
    if not 0.0 <= options.label_smoothing <= 1.0:
        yield f"label_smoothing={options.label_smoothing} is outside 0 to 1"
