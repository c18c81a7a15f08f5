"""Every instruction set returns the bits of the scalar kernels, for any number of threads."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.helpers.any_bits import floats, halves, image, random_segments
from zero_offload.hardware import abi, native
from zero_offload.hardware.abi import Rule
from zero_offload.hardware.kernels.checksums import crc32c_of_tensor
from zero_offload.hardware.kernels.formats import convert, join_master, split_master
from zero_offload.hardware.kernels.grads import accumulate_grad, store_grad, sum_of_squares
from zero_offload.hardware.kernels.rules import STATES
from zero_offload.hardware.kernels.update import UpdateBuffers, fused_update
from zero_offload.hardware.native import GradSum

SIZES = [0, 1, 7, 31, 255, 4096 + 3, 100001]
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.fixture(params=[isa for isa in native.supported_isas() if isa is not abi.Isa.SCALAR], ids=str)
def isa(request: pytest.FixtureRequest) -> abi.Isa:
    return request.param


def run_update(
    isa: abi.Isa, rule: Rule, numel: int, dtypes: tuple[torch.dtype, torch.dtype], copy: str, threads: int
) -> list[bytes]:
    native.set_isa(isa)
    value_dtype, grad_dtype = dtypes
    value = floats(numel, 1) if value_dtype is FP32 else halves(numel, 1, value_dtype)
    residual, master = halves(numel, 2), floats(numel, 7)
    states = [floats(numel, 3, 1e-3), floats(numel, 4, 1e-3).abs(), floats(numel, 8, 1e-3).abs()]
    if rule is Rule.ADAGRAD:
        states[0] = states[1]
    grad = floats(numel, 5) if grad_dtype is FP32 else halves(numel, 5, grad_dtype)
    value_out = torch.zeros(numel, dtype=value_dtype)
    buffers = UpdateBuffers(
        value=value.data_ptr(),
        residual=residual.data_ptr() if value_dtype is BF16 else 0,
        master=master.data_ptr() if value_dtype is FP16 else 0,
        states=tuple(state.data_ptr() for state in states[: len(STATES[rule])]),
        grad=grad.data_ptr(),
        value_out=value_out.data_ptr() if copy == "copy" else 0,
        value_dtype=value_dtype,
        grad_dtype=grad_dtype,
    )
    if numel > 0:
        fused_update(rule, buffers, random_segments(numel, 6), threads)
    return image([value, residual, master, *states, value_out])


@pytest.mark.parametrize("numel", SIZES)
@pytest.mark.parametrize("copy", ["copy", "in place"])
@pytest.mark.parametrize("dtypes", [(v, g) for v in (FP32, BF16, FP16) for g in (FP32, BF16, FP16)], ids=str)
def test_adamw(isa: abi.Isa, dtypes: tuple[torch.dtype, torch.dtype], copy: str, numel: int) -> None:
    expected = run_update(abi.Isa.SCALAR, Rule.ADAMW, numel, dtypes, copy, 1)
    for threads in (1, 2, 3):
        assert run_update(isa, Rule.ADAMW, numel, dtypes, copy, threads) == expected


@pytest.mark.parametrize("rule", [rule for rule in Rule if rule is not Rule.ADAMW], ids=lambda rule: rule.name)
def test_rules(isa: abi.Isa, rule: Rule) -> None:
    for dtypes in [(v, g) for v in (FP32, BF16, FP16) for g in (FP32, BF16, FP16)]:
        for numel in (31, 4096 + 3):
            expected = run_update(abi.Isa.SCALAR, rule, numel, dtypes, "copy", 1)
            assert run_update(isa, rule, numel, dtypes, "copy", 2) == expected, (dtypes, numel)


def run_grads(isa: abi.Isa, numel: int, threads: int) -> list[object]:
    """Every kind of store and accumulate, with the sums each returns."""
    native.set_isa(isa)
    results: list[object] = []

    def keep(dst: torch.Tensor, returned: GradSum) -> None:
        again = sum_of_squares(dst.data_ptr(), dst.dtype, numel, num_threads=threads)
        assert bits_of(again) == bits_of(returned)
        results.extend([*image([dst]), bits_of(returned)])

    sources = [
        *(floats(numel, 1), halves(numel, 2), halves(numel, 3, FP16)),
        *(floats(numel, 1).nan_to_num(0.0, 1.0, -1.0), halves(numel, 3, FP16).nan_to_num(0.0, 1.0, -1.0)),
    ]
    for src in sources:
        for dst_dtype in dict.fromkeys((FP32, src.dtype)):
            dst = torch.full((numel,), 0.25, dtype=dst_dtype)
            keep(dst, store_grad(dst.data_ptr(), dst_dtype, src.data_ptr(), src.dtype, numel, num_threads=threads))
        for dst in (floats(numel, 4), floats(numel, 4).nan_to_num(0.0, 1.0, -1.0)):
            keep(dst, accumulate_grad(dst.data_ptr(), src.data_ptr(), src.dtype, numel, num_threads=threads))
    return results


def bits_of(result: GradSum) -> tuple[bytes, bool]:
    return np.float64(result.sumsq).tobytes(), result.finite


@pytest.mark.parametrize("numel", SIZES)
def test_gradients(isa: abi.Isa, numel: int) -> None:
    expected = run_grads(abi.Isa.SCALAR, numel, 1)
    for threads in (1, 2, 3):
        assert run_grads(isa, numel, threads) == expected


def run_conversions(isa: abi.Isa, numel: int, threads: int) -> list[bytes]:
    native.set_isa(isa)
    master, half, small = floats(numel, 1), halves(numel, 2), halves(numel, 3, FP16)
    to_half, residual = torch.zeros(numel, dtype=BF16), torch.zeros(numel, dtype=torch.int16)
    back, narrowed, widened = torch.zeros(numel), torch.zeros(numel, dtype=BF16), torch.zeros(numel)
    split_master(master, to_half, residual, num_threads=threads)
    join_master(half, residual, back, num_threads=threads)
    convert(narrowed, master, num_threads=threads)
    convert(widened, half, num_threads=threads)
    fp16, from_fp16 = torch.zeros(numel, dtype=FP16), torch.zeros(numel)
    convert(fp16, floats(numel, 1, 1e-4), num_threads=threads)
    convert(from_fp16, small, num_threads=threads)
    return image([to_half, residual, back, narrowed, widened, fp16, from_fp16])


@pytest.mark.parametrize("numel", SIZES)
def test_conversions(isa: abi.Isa, numel: int) -> None:
    expected = run_conversions(abi.Isa.SCALAR, numel, 1)
    for threads in (1, 2, 3):
        assert run_conversions(isa, numel, threads) == expected


@pytest.mark.parametrize("nbytes", [0, 1, 7, 8, 767, 768, 769, 12287, 12288, 12289, 99991])
def test_crc32c(isa: abi.Isa, nbytes: int) -> None:
    """The instruction in three streams against the tables, at every alignment."""
    data = torch.from_numpy(np.random.default_rng(nbytes).integers(0, 256, nbytes + 8, dtype=np.uint8))
    for offset in range(8):
        part = data[offset : offset + nbytes]
        native.set_isa(abi.Isa.SCALAR)
        expected = crc32c_of_tensor(part, seed=offset)
        native.set_isa(isa)
        assert crc32c_of_tensor(part, seed=offset) == expected
