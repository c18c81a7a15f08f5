"""Which kernels run: native ones, else the same compiled by numba, else the same in numpy. All return the same bits.

Chosen at the first call of a process and kept; what stands in for the native kernels is told once. On a GPU there is
the update alone, where Triton is.
"""

from __future__ import annotations

import functools
import warnings
from dataclasses import dataclass
from typing import Protocol

import torch

from zero_offload import native
from zero_offload.abi import GradMode, Kind
from zero_offload.accelerators import ACCELERATORS


class Kernels(Protocol):
    """The calls of `native` that need no file engine; see there."""

    def update(self, args: native.UpdateArgs) -> None: ...

    def master_split(self, master: int, half: int, residual: int, numel: int, num_threads: int) -> None: ...

    def master_join(self, half: int, residual: int, master: int, numel: int, num_threads: int) -> None: ...

    def short_master_split(self, master: int, half: int, residual: int, numel: int, num_threads: int) -> None: ...

    def short_master_join(self, half: int, residual: int, master: int, numel: int, num_threads: int) -> None: ...

    def states_decode(self, args: native.StateArgs) -> None: ...

    def states_encode(self, args: native.StateArgs) -> None: ...

    def convert(self, dst: int, dst_kind: Kind, src: int, src_kind: Kind, numel: int, num_threads: int) -> None: ...

    def grad_store(
        self, dst_kind: Kind, src_kind: Kind, mode: GradMode, num_threads: int, dst: int, src: int, numel: int
    ) -> native.SumOfSquares: ...

    def sumsq(self, kind: Kind, values: int, numel: int, num_threads: int) -> native.SumOfSquares: ...

    def crc32c(self, seed: int, address: int, nbytes: int) -> int: ...


@dataclass(frozen=True)
class Choice:
    """What runs here."""

    name: str
    """native, numba or numpy."""
    description: str
    """In one line, for people."""
    fix: str = ""
    """What to type for faster ones, other than what builds the native library."""


@functools.cache
def kernels() -> Kernels:
    """What all calls of this process go to. Warns, once, where that is not the native library."""
    found = find()
    if found.name == "native":
        return native
    from zero_offload.kernels.fallback.calls import Passes, PortableKernels

    passes: Passes
    if found.name == "numba":
        from zero_offload.kernels.fallback import numba_passes as passes
    else:
        from zero_offload.kernels.fallback import numpy_passes as passes
    more = f"; {found.fix}" if found.fix else ""
    warnings.warn(f"{native.missing()}. Until then: {found.description}{more}", stacklevel=2)
    return PortableKernels(passes)


def find() -> Choice:
    """The best that is to be had. Raises what `native.missing` does."""
    if native.missing() is None:
        return Choice("native", f"native, for {native.isa().name.lower()}")
    compiled = "with the same bits as the native kernels in 1.5 to 4 times their time, and some seconds of compiling"
    try:
        import numba  # noqa: F401
    except Exception as error:  # one that does not fit the numpy beside it raises what it likes
        return Choice(
            "numpy",
            "numpy, with the same bits as the native kernels in 100 to 200 times their time, since numba cannot be "
            f"imported ({type(error).__name__}: {error})",
            f"pip install numba: its kernels run {compiled}",
        )
    return Choice("numba", f"numba, {compiled}")


def has_device_update(tensor: torch.Tensor) -> bool:
    """Whether `triton_update` updates this tensor: it is on a GPU, and Triton is here and compiles for that one."""
    accelerator = ACCELERATORS.get(tensor.device.type)
    return accelerator is not None and accelerator.has_triton and _triton_compiles_for(tensor.device)


@functools.cache
def _triton_compiles_for(device: torch.device) -> bool:
    """Tried once for each device. Warns where there is a Triton that does not; its absence is no defect."""
    try:
        from zero_offload.kernels.triton_update import try_on
    except Exception:  # no Triton, or one that does not fit what is beside it
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
