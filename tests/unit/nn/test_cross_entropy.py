"""`chunked_cross_entropy` against torch's cross entropy of the whole logits."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import zero_offload as zo
from zero_offload.base.errors import ConfigError
from zero_offload.nn import cross_entropy

FEATURES, VOCAB, SHAPE = 48, 301, (3, 13)
ALL_TOKENS = 39
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ROUNDING = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float16: 2**-10}
"""Of a gradient relative to its largest element: sums over tokens are taken in another order."""

Loss = Callable[..., Tensor]


def reference(hidden: Tensor, weight: Tensor, targets: Tensor, *, bias: Tensor | None = None, **options: Any) -> Tensor:
    options.pop("chunk_tokens", None)
    logits = F.linear(hidden, weight, bias)
    wide = logits if logits.dtype == torch.float64 else logits.float()
    losses = F.cross_entropy(wide.flatten(0, -2), targets.flatten(), **options)
    return losses.view(targets.shape) if options.get("reduction") == "none" else losses


def inputs(dtype: torch.dtype = torch.float32, shape: tuple[int, ...] = SHAPE) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)

    def draw(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator).to(dtype).requires_grad_()

    targets = torch.randint(VOCAB, shape, generator=generator)
    return {"hidden": draw(*shape, FEATURES), "weight": draw(VOCAB, FEATURES), "bias": draw(VOCAB), "targets": targets}


def result(loss: Loss, tensors: dict[str, Tensor], **options: Any) -> dict[str, Tensor | None]:
    """The loss, and the gradient of everything that has one, when each token's loss has a weight of its own."""
    value = loss(**tensors, **options)
    weights = torch.linspace(0.5, 2, value.numel(), dtype=value.dtype).view(value.shape)
    if value.requires_grad:
        (value * weights).sum().backward()
    grads = {name: tensor.grad for name, tensor in tensors.items() if tensor.is_floating_point()}
    for tensor in tensors.values():
        tensor.grad = None
    return {"loss": value.detach(), **grads}


def assert_equal(found: dict[str, Tensor | None], expected: dict[str, Tensor | None]) -> None:
    for name, tensor in expected.items():
        other = found[name]
        if tensor is None or other is None:
            assert tensor is other, name
        else:
            assert tensor.dtype == other.dtype and torch.equal(tensor, other), name


def assert_close(found: dict[str, Tensor | None], expected: dict[str, Tensor | None]) -> None:
    for name, tensor in expected.items():
        other = found[name]
        assert tensor is not None and other is not None and tensor.dtype == other.dtype, name
        error = (other.double() - tensor.double()).abs().max() / tensor.double().abs().max()
        assert error <= ROUNDING[tensor.dtype], name


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_chunk_is_torchs_bit_for_bit(dtype: torch.dtype, reduction: str) -> None:
    tensors = inputs(dtype)
    expected = result(reference, tensors, reduction=reduction)
    for chunk_tokens in (None, ALL_TOKENS, 1000):
        found = result(zo.nn.chunked_cross_entropy, tensors, reduction=reduction, chunk_tokens=chunk_tokens)
        assert_equal(found, expected)


@pytest.mark.parametrize("chunk_tokens", [1, 7, 13, 38])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_several_chunks_differ_by_rounding(dtype: torch.dtype, reduction: str, chunk_tokens: int) -> None:
    tensors = inputs(dtype)
    expected = result(reference, tensors, reduction=reduction)
    found = result(zo.nn.chunked_cross_entropy, tensors, reduction=reduction, chunk_tokens=chunk_tokens)
    assert_close(found, expected)


@pytest.mark.parametrize("chunk_tokens", [7, None])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_label_smoothing(reduction: str, chunk_tokens: int | None) -> None:
    tensors = inputs()
    tensors["targets"][1] = -100
    options = {"reduction": reduction, "label_smoothing": 0.1}
    expected = result(reference, tensors, **options)
    assert_close(result(zo.nn.chunked_cross_entropy, tensors, chunk_tokens=chunk_tokens, **options), expected)
    unsmoothed = result(reference, tensors, reduction=reduction)
    assert not torch.allclose(expected["loss"], unsmoothed["loss"])


@pytest.mark.parametrize("shape", [(), (1,), (5,), (2, 3, 4), (0,), (2, 0)])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_any_leading_shape(shape: tuple[int, ...], reduction: str) -> None:
    tensors = inputs(shape=shape)
    flat = dict(tensors, hidden=tensors["hidden"].reshape(-1, FEATURES), targets=tensors["targets"].reshape(-1))
    expected = reference(**flat, reduction=reduction)
    found = zo.nn.chunked_cross_entropy(**tensors, reduction=reduction)
    assert found.shape == (shape if reduction == "none" else ())
    assert torch.allclose(found, expected.view(found.shape), rtol=0, atol=0, equal_nan=True)
    found.sum().backward()
    assert tensors["hidden"].grad.shape == (*shape, FEATURES)


@pytest.mark.parametrize("ignore_index", [-100, 0, 17])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_ignored_tokens(ignore_index: int, reduction: str) -> None:
    tensors = inputs()
    tensors["targets"][:, ::2] = ignore_index
    options = {"reduction": reduction, "ignore_index": ignore_index}
    assert_equal(result(zo.nn.chunked_cross_entropy, tensors, **options), result(reference, tensors, **options))
    found = result(zo.nn.chunked_cross_entropy, tensors, chunk_tokens=3, **options)
    assert not found["hidden"][:, ::2].any()
    assert_close(found, result(reference, tensors, **options))


@pytest.mark.parametrize("chunk_tokens", [5, None])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.1])
def test_all_tokens_ignored(reduction: str, chunk_tokens: int | None, label_smoothing: float) -> None:
    tensors = inputs()
    tensors["targets"].fill_(-100)
    options = {"reduction": reduction, "label_smoothing": label_smoothing}
    found = result(zo.nn.chunked_cross_entropy, tensors, chunk_tokens=chunk_tokens, **options)
    expected = result(reference, tensors, **options)
    assert bool(found["loss"].isnan().all()) == bool(expected["loss"].isnan().all()) == (reduction == "mean")
    assert not any(found[name].any() for name in ("hidden", "weight", "bias"))
    assert not any(expected[name].any() for name in ("hidden", "weight", "bias"))


@pytest.mark.parametrize("frozen", [("hidden",), ("weight",), ("bias",), ("weight", "bias"), ("hidden", "weight")])
def test_what_needs_no_gradient_gets_none(frozen: tuple[str, ...]) -> None:
    tensors = inputs()
    for name in frozen:
        tensors[name].requires_grad_(False)
    assert_equal(result(zo.nn.chunked_cross_entropy, tensors), result(reference, tensors))


def test_without_any_gradient() -> None:
    tensors = inputs()
    expected = reference(**tensors)
    with torch.no_grad():
        found = zo.nn.chunked_cross_entropy(**tensors)
    assert torch.equal(found, expected) and not found.requires_grad
    with torch.inference_mode():
        assert zo.nn.chunked_cross_entropy(**tensors).item() == expected.item()


def test_without_bias() -> None:
    tensors = inputs()
    del tensors["bias"]
    assert_equal(result(zo.nn.chunked_cross_entropy, tensors), result(reference, tensors))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast(dtype: torch.dtype) -> None:
    tensors = inputs(dtype)

    def under_autocast(loss: Loss) -> Loss:
        def run(**arguments: Any) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return loss(**arguments)

        return run

    expected = result(under_autocast(reference), tensors)
    found = result(under_autocast(zo.nn.chunked_cross_entropy), tensors)
    assert_equal(found, expected)
    with torch.autocast("cpu", torch.bfloat16):
        assert_equal(result(zo.nn.chunked_cross_entropy, tensors), expected)


def test_backward_under_an_autocast_that_forward_had_not() -> None:
    tensors = inputs()
    expected = result(zo.nn.chunked_cross_entropy, tensors, chunk_tokens=5)
    loss = zo.nn.chunked_cross_entropy(**tensors, chunk_tokens=5)
    with torch.autocast("cpu", torch.bfloat16):
        (loss * 0.5).backward()  # what `result` weighs a single loss with
    assert torch.equal(tensors["weight"].grad, expected["weight"])
    assert torch.equal(tensors["hidden"].grad, expected["hidden"])


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_under_checkpoint(use_reentrant: bool) -> None:
    tensors = inputs()

    def checkpointed(**arguments: Any) -> Tensor:
        options = arguments.pop("options")
        names = list(arguments)

        def run(*values: Tensor) -> Tensor:
            return zo.nn.chunked_cross_entropy(**dict(zip(names, values, strict=True)), **options)

        return checkpoint(run, *arguments.values(), use_reentrant=use_reentrant)

    expected = result(zo.nn.chunked_cross_entropy, tensors, chunk_tokens=5)
    assert_equal(result(checkpointed, tensors, options={"chunk_tokens": 5}), expected)


@pytest.mark.parametrize("label_smoothing", [0.0, 0.2])
def test_gradients_are_the_derivatives(label_smoothing: float) -> None:
    tensors = inputs(torch.float64, (4,))
    tensors["targets"][2] = -100

    def loss(hidden: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return zo.nn.chunked_cross_entropy(
            hidden, weight, tensors["targets"], bias=bias, chunk_tokens=3, label_smoothing=label_smoothing
        )

    small = [tensors["hidden"][:, :5], tensors["weight"][:, :5], tensors["bias"]]
    assert torch.autograd.gradcheck(loss, [tensor.detach().requires_grad_() for tensor in small])


def test_a_second_derivative_raises() -> None:
    tensors = inputs()
    loss = zo.nn.chunked_cross_entropy(**tensors)
    (grad,) = torch.autograd.grad(loss, tensors["hidden"], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_a_weight_changed_before_backward_raises() -> None:
    tensors = inputs()
    loss = zo.nn.chunked_cross_entropy(**tensors)
    with torch.no_grad():
        tensors["weight"].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_everything_backward_needs_is_a_saved_tensor() -> None:
    tensors = inputs()
    saved: list[Tensor] = []

    def keep(tensor: Tensor) -> int:
        saved.append(tensor)
        return len(saved) - 1

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda index: saved[index].clone()):
        loss = zo.nn.chunked_cross_entropy(**tensors)
    pointers = {tensor.data_ptr() for tensor in saved}
    assert {tensor.data_ptr() for tensor in tensors.values()} <= pointers
    with torch.no_grad():
        # Backward must see what the hooks hand out (a clone of this), not what forward was given.
        saved[:] = [tensor * 2 if tensor.data_ptr() == tensors["weight"].data_ptr() else tensor for tensor in saved]
    loss.backward()
    doubled = zo.nn.chunked_cross_entropy(**dict(tensors, weight=tensors["weight"].detach() * 2))
    (expected,) = torch.autograd.grad(doubled, tensors["hidden"])
    assert torch.equal(tensors["hidden"].grad, expected)


class LargestResult(TorchDispatchMode):
    """The most elements that any operation's result has."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.numel = max(self.numel, *(leaf.numel() for leaf in tree_leaves(out) if isinstance(leaf, Tensor)), 0)
        return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_whole_logits_never_exist(dtype: torch.dtype) -> None:
    tensors = inputs(dtype, (400,))
    with LargestResult() as plain:
        reference(**tensors).backward()
    with LargestResult() as chunked:
        zo.nn.chunked_cross_entropy(**tensors, chunk_tokens=40).backward()
    assert plain.numel == 400 * VOCAB
    assert chunked.numel == max(40 * VOCAB, VOCAB * FEATURES, 400 * FEATURES)


class Products(TorchDispatchMode):
    """The shape of each product that is a tensor of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.mm.default:
            self.shapes.append(tuple(out.shape))
        return out


@pytest.fixture
def without_autocast(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch lacks autocast for meta tensors. These stand for a GPU's: every device but a CPU has its sizes."""
    monkeypatch.setattr(cross_entropy, "autocast_inputs", lambda *tensors: tensors)
    monkeypatch.setattr(torch, "autocast", lambda device, enabled: nullcontext())


CHUNKS = [("cpu", 1 << 20, 12), ("cpu", 1 << 17, 64), ("cpu", 50257, 192), ("cpu", 1 << 25, 1)]
CHUNKS += [("meta", 1 << 17, 512), ("meta", 32000, 2048), ("meta", 1 << 28, 1)]


@pytest.mark.usefixtures("without_autocast")
@pytest.mark.parametrize(("device", "vocab", "chunk_tokens"), CHUNKS)
def test_the_default_chunk_is_48_mib_of_logits_and_256_on_a_gpu(device: str, vocab: int, chunk_tokens: int) -> None:
    with Products() as products, torch.no_grad(), torch.device(device):
        zo.nn.chunked_cross_entropy(
            torch.zeros(2 * chunk_tokens, 1), torch.zeros(vocab, 1), torch.zeros(2 * chunk_tokens, dtype=torch.int64)
        )
    assert products.shapes == [(chunk_tokens, vocab)] * 2


@pytest.mark.usefixtures("without_autocast")
def test_a_gpu_has_a_few_large_products() -> None:
    """Of the largest heads: 32k tokens, 128k words."""
    tokens, vocab, features = 1 << 15, 128256, 4096
    with Products() as products, torch.device("meta"):
        hidden, weight = (torch.zeros(rows, features, dtype=torch.bfloat16) for rows in (tokens, vocab))
        zo.nn.chunked_cross_entropy(hidden, weight.requires_grad_(), torch.zeros(tokens, dtype=torch.int64)).backward()
    chunk = (512, vocab)  # 250.5 MiB in fp32
    slices = [(65536, features), (vocab - 65536, features)]  # of the weight's gradient, 512 MiB at most
    assert products.shapes == [chunk] * 64 + [chunk, *slices] * 64


@pytest.mark.parametrize("chunk_tokens", [3, 8])
def test_a_weight_gradient_in_several_slices(chunk_tokens: int) -> None:
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(8, 256, generator=generator).bfloat16().requires_grad_()
    weight = (torch.randn(40000, 256, generator=generator) / 16).bfloat16().requires_grad_()
    assert weight.numel() > 2 * (1 << 22)  # two whole slices and a part
    tensors = {"hidden": hidden, "weight": weight, "targets": torch.randint(40000, (8,), generator=generator)}
    assert_close(result(zo.nn.chunked_cross_entropy, tensors, chunk_tokens=chunk_tokens), result(reference, tensors))


def test_weight_gradients_are_summed_in_fp32() -> None:
    """1 + 255 * 2^-9, one token per chunk: a bf16 sum would stay at 1."""
    num_tokens = 256
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    hidden = torch.full((num_tokens, 1), 2.0**-8, dtype=torch.bfloat16)
    hidden[0] = 2.0
    targets = torch.zeros(num_tokens, dtype=torch.int64)  # each token's gradient is half its hidden value
    zo.nn.chunked_cross_entropy(hidden, weight, targets, chunk_tokens=1, reduction="sum").backward()
    expected = torch.tensor(1 + 255 * 2.0**-9).bfloat16()
    assert expected > 1
    assert torch.equal(weight.grad, torch.stack((-expected, expected)).unsqueeze(1))


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "features": ({"weight": torch.zeros(VOCAB, 7)}, r"hidden is \(3, 13, 48\), weight \(301, 7\)"),
    "weight": ({"weight": torch.zeros(FEATURES)}, r"weight \(48,\)"),
    "scalar weight": ({"weight": torch.zeros(())}, r"weight \(\)"),
    "targets": ({"targets": torch.zeros(39, dtype=torch.int64)}, r"targets are \(39,\).*\(3, 13\)"),
    "dtype": ({"targets": torch.zeros(3, 13, dtype=torch.int32)}, r"torch.int32.*targets.long\(\)"),
    "bias": ({"bias": torch.zeros(7)}, r"bias is \(7,\), not \(301,\)"),
    "reduction": ({"reduction": "median"}, "reduction='median'.*mean, sum, none"),
    "chunk": ({"chunk_tokens": 0}, "chunk_tokens=0.*whole number from 1 on"),
    "part of a chunk": ({"chunk_tokens": 2.5}, "chunk_tokens=2.5.*whole number"),
    "part of a class": ({"ignore_index": 0.5}, "ignore_index=0.5 is not a class number"),
    "smoothing": ({"label_smoothing": 1.5}, "label_smoothing=1.5 is outside 0 to 1"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_does_not_fit_is_named(case: str) -> None:
    changed, words = BAD[case]
    with pytest.raises(ConfigError, match=words):
        zo.nn.chunked_cross_entropy(**{**inputs(), **changed})


def test_all_problems_at_once() -> None:
    with pytest.raises(ConfigError, match="targets are.*bias is.*chunk_tokens=-1"):
        targets, bias = torch.zeros(2, dtype=torch.int64), torch.zeros(1)
        zo.nn.chunked_cross_entropy(**dict(inputs(), targets=targets, bias=bias), chunk_tokens=-1)


def test_a_target_out_of_range_is_torchs_error() -> None:
    tensors = inputs()
    tensors["targets"][0, 0] = VOCAB
    with pytest.raises(IndexError, match="out of bounds"):
        zo.nn.chunked_cross_entropy(**tensors)
