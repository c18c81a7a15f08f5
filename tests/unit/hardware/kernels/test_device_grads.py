"""Sums of squares on a device, on CPU tensors. They have the bits of the native kernels, by torch's operations and by
Triton's interpreter. They are compiled for a GPU without one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from tests.helpers.any_bits import floats, halves
from tests.helpers.device_updates import GRADS, SUMS, import_triton_module
from zero_offload.hardware.kernels import grads as kernel_grads
from zero_offload.hardware.kernels.grads import launch_sums, sum_of_squares, total
from zero_offload.hardware.native import GradSum

SIZES = [1, 15, 16, 17, 1000, 16383, 16384, 16385, 40000, 5 * 16384]


def native(grad: torch.Tensor) -> GradSum:
    return sum_of_squares(grad.data_ptr(), grad.dtype, grad.numel())


def sums_of(grads: list[torch.Tensor]) -> list[GradSum]:
    chunks, parts = launch_sums(grads)
    return [total(chunks[part]) for part in parts]


def same(found: list[GradSum], expected: list[GradSum]) -> bool:
    """Bit for bit."""
    totals = [np.array([each.sumsq for each in sums]).view(np.int64).tolist() for sums in (found, expected)]
    return totals[0] == totals[1] and [s.finite for s in found] == [s.finite for s in expected]


def tame(numel: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(numel + seed)).to(dtype)


def wild(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """All kinds of numbers but those that are not finite."""
    found = floats(numel, 3) if dtype is torch.float32 else halves(numel, 3, dtype)
    return torch.where(found.isfinite(), found, torch.ones_like(found))


@pytest.fixture(params=["scan", "rows"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_grads, "scans_in_order", lambda device: request.param == "scan")


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("dtype", GRADS, ids=str)
def test_torchs_operations_have_the_bits_of_the_kernels(dtype: torch.dtype) -> None:
    grads = [make(numel, dtype) for numel in SIZES for make in (tame, wild)]
    assert same(sums_of(grads), [native(grad) for grad in grads])


def test_the_tree_is_no_plain_sum() -> None:
    """Values of one size would give the same sum in any order."""
    grad = wild(40000, torch.float32)
    assert native(grad).sumsq != grad.double().square().sum().item()
    assert native(tame(40000, torch.float32)).sumsq != tame(40000, torch.float32).double().square().sum().item()


def test_more_than_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_grads, "BLOCK_CHUNKS", 2)
    for numel in (2 * 16384, 2 * 16384 + 1, 6 * 16384, 7 * 16384 + 5):
        grad = tame(numel, torch.float32)
        assert same(sums_of([grad]), [native(grad)])


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan, -math.nan])
def test_what_is_not_finite(bad: float) -> None:
    grads = [tame(40000, torch.float32, seed) for seed in range(3)]
    grads[1][20000] = bad
    found = sums_of(grads)
    assert same(found, [native(grad) for grad in grads])
    assert [each.finite for each in found] == [True, False, True]


def test_the_largest_numbers_do_not_overflow() -> None:
    grad = torch.full((40000,), torch.finfo(torch.float32).max)
    assert same(sums_of([grad]), [native(grad)]) and native(grad).finite


def test_nothing_and_empty_gradients() -> None:
    grads = [torch.empty(0), tame(5, torch.float32), torch.empty(0)]
    assert sums_of(grads) == [(0.0, True), native(grads[1]), (0.0, True)]
    assert sums_of([torch.empty(0)]) == [(0.0, True)]


@pytest.mark.usefixtures("way")
def test_a_launch_does_not_wait_for_the_device() -> None:
    """Tensors on meta have no values to wait for."""
    chunks, parts = launch_sums([torch.empty(40000, device="meta"), torch.empty(5, device="meta")])
    assert chunks.shape == (4,) and parts == [slice(0, 3), slice(3, 4)]


def test_no_scan_with_deterministic_algorithms(monkeypatch: pytest.MonkeyPatch) -> None:
    """On CUDA torch refuses it then."""

    def refuse(*_: object) -> torch.Tensor:
        raise RuntimeError("cumsum_cuda_kernel does not have a deterministic implementation")

    grad = tame(40000, torch.float32)
    monkeypatch.setattr(kernel_grads, "scans_in_order", lambda device: True)
    monkeypatch.setattr(torch.Tensor, "cumsum", refuse)
    torch.use_deterministic_algorithms(True)
    try:
        assert same(sums_of([grad]), [native(grad)])
        assert not kernel_grads.may_scan(grad.device)
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_scan_in_another_order_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cpu")
    assert kernel_grads.scans_in_order.__wrapped__(device)
    monkeypatch.setattr(torch.Tensor, "cumsum", lambda x, dim: x.flip(dim).sum(dim, keepdim=True))
    assert not kernel_grads.scans_in_order.__wrapped__(device)


# By Triton


@pytest.fixture(scope="module")
def triton_sums() -> Iterator[ModuleType]:
    """In the interpreter."""
    with pytest.MonkeyPatch.context() as patch:
        module = import_triton_module(patch, SUMS, "1")
        try:
            module.sum_chunks([torch.ones(1)], torch.zeros(1, dtype=torch.float64))
        except Exception as error:
            # Triton 3.6 beside numpy 2.4; what it compiles is looked at below.
            if "0-dimensional arrays" not in str(error):
                raise
            pytest.skip("this Triton's interpreter makes no bound of a loop with this numpy")
        yield module


@pytest.mark.parametrize("dtype", GRADS, ids=str)
def test_tritons_kernel_has_the_bits_of_the_kernels(triton_sums: ModuleType, dtype: torch.dtype) -> None:
    grads = [make(numel, dtype) for numel, make in ((1, tame), (1000, wild), (16385, tame), (33000, wild))]
    flat = torch.cat([*grads[:2], torch.ones(7).to(dtype), *grads[2:]])
    begins = [0, 1, 1008, 1008 + 16385]
    side_by_side = [flat[begin : begin + grad.numel()] for begin, grad in zip(begins, grads, strict=True)]
    for each in ([*side_by_side, torch.empty(0, dtype=dtype)], grads[::-1], side_by_side[2:0:-1]):
        chunks = torch.full((sum(-(-grad.numel() // 16384) for grad in each),), math.nan, dtype=torch.float64)
        triton_sums.sum_chunks(each, chunks)
        parts = chunks.split([-(-grad.numel() // 16384) for grad in each])
        assert same([total(part) for part in parts], [native(grad) for grad in each])


@pytest.mark.parametrize("kind", ["*fp32", "*i16", "*fp16"])
def test_what_triton_compiles_keeps_every_bit(kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """For an A100: each lane adds its rows in double, one after the other, and subnormal numbers are kept."""
    module = import_triton_module(monkeypatch, SUMS, "0")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    constants = {"IS_BF16": kind == "*i16", "CHUNKS": module.PROGRAM_CHUNKS, "ROWS": module.ROWS_AT_ONCE}
    signature = {"values": kind, "chunks": "*i64", "sums": "*fp64", "num_chunks": "i32"}
    signature |= dict.fromkeys(constants, "constexpr")
    source = ASTSource(fn=module.sum_chunks_kernel, signature=signature, constexprs=constants)
    compiled = compile(source, target=GPUTarget("cuda", 80, 32), options=module.OPTIONS)
    text = compiled.asm["ptx"]
    assert "ftz" not in text and "approx" not in text and "fma" not in text
    adds = len(re.findall(r"\badd(?:\.rn)?\.f64\b", text))
    assert module.ROWS_AT_ONCE <= adds <= module.ROWS_AT_ONCE + 15  # and the lanes with each other
    assert len(re.findall(r"\bmul(?:\.rn)?\.f64\b", text)) == module.ROWS_AT_ONCE
