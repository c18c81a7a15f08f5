"""The words of tensors against the operations of this processor."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.helpers.any_bits import SPECIALS
from zero_offload.hardware.kernels.fallback import numba_words, torch_words

ULP = 2.0**-23
Floats = Any


def same(found: torch.Tensor, expected: Floats) -> bool:
    """The same bits, but for which NaN it is."""
    ours = found.numpy()
    return (
        ours.dtype == expected.dtype
        and np.array_equal(
            np.where(ours != ours, np.uint32(0), ours.view(np.uint32)),
            np.where(expected != expected, np.uint32(0), expected.view(np.uint32)),
        )
        and np.array_equal(ours != ours, expected != expected)
    )


@numba_words.function
def fma_each(a: Floats, b: Floats, c: Floats, out: Floats) -> None:
    for i in range(out.size):
        out[i] = numba_words.fma(a[i], b[i], c[i])


def fma(*numbers: Floats) -> Floats:
    """One instruction for each element."""
    arrays = [np.ascontiguousarray(each) for each in np.broadcast_arrays(*numbers)]
    out = np.empty_like(arrays[0])
    fma_each(*arrays, out)
    return out


def special_triples() -> list[Floats]:
    special = np.array(SPECIALS, dtype=np.uint32).view(np.float32)
    return [each.reshape(-1).copy() for each in np.meshgrid(special, special, special)]


def random_triples(scale: float) -> list[Floats]:
    """Sums that mostly cancel, and what becomes infinite or nothing."""
    rng = np.random.default_rng(0)
    a, b = (rng.standard_normal((2, 100_000)) * scale).astype(np.float32)
    with np.errstate(all="ignore"):
        c = (-a * b * rng.choice(np.array([1, 1 + ULP, 2.0**20, 0], dtype=np.float32), a.size)).astype(np.float32)
    return [a, b, c]


def halfway_triples() -> list[Floats]:
    """Rounded in fp64 and then to fp32, each of them would end a unit off."""
    cases = [(2.0**-24 * (1 - ULP), 1 + ULP, 1 + ULP), (2.0**-24 * (1 + ULP), 1 + ULP, 1.0)]
    cases += [(-(2.0**-24) * (1 - ULP), 1 + ULP, 1 + 3 * ULP), (2.0**-75 * (1 + ULP), 2.0**-75 * (1 + ULP), 2.0**-149)]
    return list(np.array(cases, dtype=np.float32).T.copy())


TRIPLES = [special_triples(), halfway_triples(), *(random_triples(scale) for scale in (1.0, 2.0**-70, 2.0**60))]


@pytest.mark.parametrize("triple", TRIPLES, ids=["special", "halfway", "ordinary", "small", "large"])
def test_a_fused_multiply_add(triple: list[Floats]) -> None:
    with np.errstate(all="ignore"):
        expected = fma(*triple)
        assert same(torch_words.fma(*map(torch.from_numpy, triple)), expected)
        # Scalars of a segment come as numbers, in the place of a, or of b and c.
        a, b, c = triple
        for k in range(0, len(a), len(a) // 4):
            number = float(a[k])
            tensors = torch.from_numpy(b), torch.from_numpy(c)
            assert same(torch_words.fma(number, *tensors), fma(a[k], b, c))
            assert same(torch_words.fma(tensors[0], number, float(c[k])), fma(b, a[k], c[k]))


def some_floats() -> Floats:
    """Any bits, and squares of what has few of them."""
    words = np.random.default_rng(1).integers(0, 1 << 32, 1_000_000, dtype=np.uint32)
    special = np.array(SPECIALS, dtype=np.uint32)
    exact = (np.arange(1, 4097, dtype=np.float32) ** 2).view(np.uint32)
    return np.concatenate([words, special, exact]).view(np.float32)


def test_roots_and_quotients() -> None:
    x = some_floats()
    y = np.random.default_rng(2).permutation(x)
    with np.errstate(all="ignore"):
        assert same(torch_words.sqrt(torch.from_numpy(x)), np.sqrt(x))
        assert same(torch_words.divide(torch.from_numpy(x), torch.from_numpy(y)), x / y)
        for number in (np.float32(127), np.float32(255)):
            assert same(torch_words.divide(torch.from_numpy(x), number), x / number)
            assert same(torch_words.divide(number, torch.from_numpy(x)), number / x)


def test_bits_come_and_go() -> None:
    x = torch.from_numpy(some_floats())
    word = torch_words.bits(x)
    assert word.dtype is torch.int64 and int(word.min()) >= 0 and int(word.max()) > 1 << 31
    assert np.array_equal(word.numpy().astype(np.uint32), x.numpy().view(np.uint32))
    assert torch.equal(torch_words.from_bits(word).view(torch.int32), x.view(torch.int32))
    assert torch.equal(torch_words.from_bits(word + (3 << 32)).view(torch.int32), x.view(torch.int32))
    assert torch_words.from_bits(np.uint32(0x3F800000)) == 1.0


def test_words_wrap() -> None:
    rng = np.random.default_rng(3)
    a, b = rng.integers(0, 1 << 32, (2, 100_000), dtype=np.uint32)
    x, y = (torch.from_numpy(each.astype(np.int64)) for each in (a, b))
    ours = [torch_words.u32(each) for each in (x + y, x - y, x * y, np.uint32(0) - x, x << np.uint32(16))]
    theirs = [a + b, a - b, a * b, np.uint32(0) - a, a << np.uint32(16)]
    for found, expected in zip(ours, theirs, strict=True):
        assert np.array_equal(found.numpy(), expected.astype(np.int64))


def test_numbers_are_selected_beside_tensors() -> None:
    x = torch.tensor([2.0, -0.0, 0.0, -3.0, torch.nan, torch.inf])
    half = np.float32(0.5)
    assert same(torch_words.select(x > half, x, half), np.array([2, 0.5, 0.5, 0.5, 0.5, np.inf], dtype=np.float32))
    assert same(torch_words.select(x > half, half, x), np.array([0.5, -0.0, 0, -3, np.nan, 0.5], dtype=np.float32))
    words = torch_words.select(x > 0, np.uint32(0xFFFFFFFF), np.uint32(0))
    assert words.dtype is torch.int64 and words.tolist() == [0xFFFFFFFF, 0, 0, 0, 0, 0xFFFFFFFF]
    assert torch_words.select(x > 0, 1.5, x).tolist()[:4] == [1.5, 0.0, 0.0, -3.0]
