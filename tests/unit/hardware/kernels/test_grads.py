from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch

from zero_offload.base.errors import ConfigError
from zero_offload.hardware.kernels.grads import accumulate_grad, store_grad, sum_of_squares
from zero_offload.hardware.native import GradSum

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
CHUNK = 16384


def tree_sum(values: npt.NDArray[np.float32]) -> float:
    """The documented tree: lanes in order within a chunk, pairwise over the lanes, chunks in order."""
    total = 0.0
    for begin in range(0, len(values), CHUNK):
        part = values[begin : begin + CHUNK].astype(np.float64)
        rows = np.zeros((-(-len(part) // 16), 16))
        rows.reshape(-1)[: len(part)] = part * part
        lanes = np.cumsum(rows, axis=0)[-1]
        while len(lanes) > 1:
            lanes = lanes[: len(lanes) // 2] + lanes[len(lanes) // 2 :]
        total += float(lanes[0])
    return total


def store(dst: torch.Tensor, src: torch.Tensor) -> GradSum:
    return store_grad(dst.data_ptr(), dst.dtype, src.data_ptr(), src.dtype, dst.numel(), num_threads=2)


@pytest.mark.parametrize("numel", [1, 15, 16, 17, CHUNK, CHUNK + 1, 3 * CHUNK + 5])
@pytest.mark.parametrize("src_dtype", [FP32, BF16, FP16], ids=str)
def test_store_returns_the_tree_sum_of_what_it_wrote(numel: int, src_dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    src = torch.randn(numel).to(src_dtype)
    dst = torch.zeros(numel)
    result = store(dst, src)
    assert torch.equal(dst, src.float())
    assert result == (tree_sum(dst.numpy()), True)
    assert sum_of_squares(dst.data_ptr(), FP32, numel, num_threads=2) == result


def test_accumulate_adds_in_fp32_and_sums_the_total() -> None:
    torch.manual_seed(0)
    first, second = torch.randn(5000), torch.randn(5000).to(BF16)
    dst = first.clone()
    result = accumulate_grad(dst.data_ptr(), second.data_ptr(), BF16, 5000, num_threads=2)
    assert torch.equal(dst, first + second.float())
    assert result == (tree_sum(dst.numpy()), True)


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_16_bits_are_stored_as_they_are_and_summed(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    src = torch.randn(5000).to(dtype)
    dst = torch.zeros(5000, dtype=dtype)
    result = store(dst, src)
    assert torch.equal(dst, src)
    assert result == (tree_sum(dst.float().numpy()), True)


@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
def test_every_bit_pattern_is_copied_but_for_the_nans_of_fp16(dtype: torch.dtype) -> None:
    patterns = torch.from_numpy(np.arange(1 << 16, dtype=np.uint16).view(np.int16)).view(dtype)
    dst = torch.zeros(1 << 16, dtype=dtype)
    assert not store(dst, patterns).finite
    expected = patterns.view(torch.int16).clone()
    if dtype is FP16:
        expected[patterns.isnan()] = 0x7E00
    assert torch.equal(dst.view(torch.int16), expected)


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("place", [0, 15, 16, 999, 1000])
def test_one_value_that_is_not_finite_is_seen(bad: float, place: int) -> None:
    values = torch.ones(1001)
    assert sum_of_squares(values.data_ptr(), FP32, 1001).finite
    values[place] = bad
    result = sum_of_squares(values.data_ptr(), FP32, 1001)
    assert not result.finite
    assert not np.isfinite(result.sumsq)


@pytest.mark.parametrize("dtype", [FP32, FP16], ids=str)
def test_the_largest_finite_values_are_finite(dtype: torch.dtype) -> None:
    values = torch.full((100,), torch.finfo(dtype).max, dtype=dtype)
    result = sum_of_squares(values.data_ptr(), dtype, 100)
    assert result.finite
    assert np.isfinite(result.sumsq)
    values[77] = values[77] * 2
    assert not sum_of_squares(values.data_ptr(), dtype, 100).finite


def test_an_overflow_on_the_way_in_is_seen() -> None:
    dst, src = torch.full((64,), 3e38), torch.full((64,), 3e38)
    assert not accumulate_grad(dst.data_ptr(), src.data_ptr(), FP32, 64).finite


@pytest.mark.parametrize(("dtype", "src_dtype"), [(BF16, FP32), (FP16, FP32), (FP16, BF16), (BF16, FP16)], ids=str)
def test_what_would_round_a_whole_gradient_is_refused(dtype: torch.dtype, src_dtype: torch.dtype) -> None:
    dst, src = torch.zeros(4, dtype=dtype), torch.ones(4, dtype=src_dtype)
    with pytest.raises(ConfigError, match="fp32 dst"):
        store(dst, src)
    assert not dst.any()


def test_refuses_memory_that_overlaps_and_touches_nothing() -> None:
    """A vector would read, or not, what the one before it has written, by its width."""
    memory = torch.ones(300)
    for apart in (-1, 0, 1, 99):
        at = memory[100:].data_ptr()
        with pytest.raises(ConfigError, match="dst and src overlap; give each memory of its own"):
            accumulate_grad(at + 4 * apart, at, FP32, 100)
        with pytest.raises(ConfigError, match="dst and src overlap; give each memory of its own"):
            store_grad(at + 4 * apart, FP32, at, BF16 if apart in (0, 1) else FP32, 100)
    assert (memory == 1).all()
    accumulate_grad(memory.data_ptr(), memory[100:].data_ptr(), FP32, 100)
    assert memory.unique(return_counts=True)[1].tolist() == [200, 100]


@pytest.mark.parametrize("dtype", [FP32, BF16, FP16], ids=str)
def test_a_gradient_is_stored_where_it_is(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    src = torch.randn(5000).to(dtype)
    there, elsewhere = src.clone(), torch.empty_like(src)
    assert store(there, there) == store(elsewhere, src)
    assert torch.equal(there, src) and torch.equal(elsewhere, src)


def test_nothing_is_zero_and_finite() -> None:
    assert sum_of_squares(0, FP32, 0) == (0.0, True)
