"""Which kernels run: native ones, else the same compiled by numba, with the same bits.

Chosen at the first call of a process and kept; a warning says once that numba stands in. On a GPU there is the update
alone, where Triton is.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterable
from typing import Protocol

import torch

from zero_offload.base.errors import ConfigError
from zero_offload.base.types import StateFormat
from zero_offload.hardware import native
from zero_offload.hardware.abi import ElementType, GradMode, UpdateArgsStruct
from zero_offload.hardware.accelerators import ACCELERATORS


class Kernels(Protocol):
    """The calls of `native` that need no file engine; see there."""

    def update(self, args: UpdateArgsStruct) -> None: ...

    def master_split(
        self, short: bool, master: int, half: int, residual: int, numel: int, num_threads: int
    ) -> None: ...

    def master_join(self, short: bool, half: int, residual: int, master: int, numel: int, num_threads: int) -> None: ...

    def states_decode(
        self, format: StateFormat, signed: bool, states: int, scales: int, fp32: int, numel: int, num_threads: int
    ) -> None: ...

    def states_encode(
        self, format: StateFormat, signed: bool, states: int, scales: int, fp32: int, numel: int, num_threads: int
    ) -> None: ...

    def convert(
        self, dst: int, dst_kind: ElementType, src: int, src_kind: ElementType, numel: int, num_threads: int
    ) -> None: ...

    def grad_store(
        self,
        dst_kind: ElementType,
        src_kind: ElementType,
        mode: GradMode,
        num_threads: int,
        dst: int,
        src: int,
        numel: int,
    ) -> native.GradSum: ...

    def sumsq(self, kind: ElementType, values: int, numel: int, num_threads: int) -> native.GradSum: ...

    def crc32c(self, seed: int, address: int, nbytes: int) -> int: ...

    def crc32c_each(self, ranges: Iterable[tuple[int, int]]) -> list[int]: ...


@functools.cache
def kernels() -> Kernels:
    """The kernels that all calls of this process go to. Warns, once, where that is not the native library.

    Raises what `native.missing` does, and ConfigError where numba, which stands in for it, does not work.
    """
    if (missing := native.missing()) is None:
        return native
    try:
        from zero_offload.hardware.kernels.fallback import calls

        calls.crc32c(0, 0, 0)  # compiles, or finds, the smallest one
    except Exception as error:  # a numba that does not fit the numpy beside it, or this processor, raises what it likes
        raise ConfigError(
            f"{missing}. Until then kernels would run by numba, which does not work here "
            f"({type(error).__name__}: {error}): pip install --upgrade numba"
        ) from error
    warnings.warn(f"{missing}. Until then: {PORTABLE}", stacklevel=2)
    return calls


PORTABLE = "numba, with the same bits as the native kernels in 1.5 to 4 times their time, and some seconds of compiling"


def description() -> str:
    """Which kernels run, in one line. Raises what `kernels` does."""
    with warnings.catch_warnings(action="ignore"):
        return f"native, for {native.isa().name.lower()}" if kernels() is native else PORTABLE


def has_device_update(tensor: torch.Tensor) -> bool:
    """True if `triton_update` updates this tensor: it is on a GPU, and Triton is here and compiles for that one."""
    accelerator = ACCELERATORS.get(tensor.device.type)
    return accelerator is not None and accelerator.has_triton and triton_compiles_for(tensor.device)


@functools.cache
def triton_compiles_for(device: torch.device) -> bool:
    """True if Triton does; tried once for each device. Warns if a Triton that is there does not."""
    try:
        from zero_offload.hardware.kernels.triton_update import try_on
    except Exception:  # no Triton, or a version that does not fit its surroundings
        return False
    try:
        try_on(device)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # no C compiler, a GPU that it does not know, no folder to write to
        warnings.warn(
            f"Triton compiles nothing for {device} ({type(error).__name__}: {error}); it needs a C compiler, for "
            "example gcc. Until then ordinary parameters there are updated by torch's functions, bf16 ones without an "
            "fp32 master",
            stacklevel=2,
        )
        return False
    return True
