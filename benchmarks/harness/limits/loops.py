"""Compiles and calls the loops of loops.cpp: an update's memory traffic alone, and its arithmetic alone."""

from __future__ import annotations

import ctypes as C
import runpy
import subprocess
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch

from zero_offload.base.types import StateFormat
from zero_offload.hardware import native
from zero_offload.hardware.abi import ElementType, Isa, Rule

ROOT = Path(__file__).resolve().parents[3]


def compiler_call() -> list[str]:
    """For the instruction set that the kernels use now; what to make and where is to be added."""
    build = runpy.run_path(str(ROOT / "setup.py"), run_name="flags")
    compiler = build["find_compiler"]()
    isa = native.isa().name.lower()
    flags = ["-fopenmp", *build["COMPILE_FLAGS"]]
    flags += build["isa_flags"](Path(f"kernel_{isa}.cpp"), x86=build["is_for_x86"](compiler))
    vec = ["-DVec=ScalarVec"] if native.isa() is Isa.SCALAR else []
    return [compiler, *flags, f'-DVEC_HEADER="simd/vec_{isa}.h"', *vec, str(Path(__file__).with_suffix(".cpp"))]


@cache
def _library() -> C.CDLL:
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "loops.so"
        subprocess.run([*compiler_call(), "-shared", "-o", str(library)], check=True)
        loaded = C.CDLL(str(library))
    loaded.stream.restype = C.c_bool
    return loaded


def stream(
    read: Sequence[torch.Tensor],
    changed: Sequence[torch.Tensor],
    numel: int,
    num_threads: int,
    *,
    written: Sequence[torch.Tensor] = (),
) -> None:
    """Read, rewrite and write, element by element together; `numel` is a multiple of 16, elements have 4 or 2 bytes.

    Those that are rewritten may have 1.
    """
    parts = [(read, (4, 2)), (changed, (4, 2, 1)), (written, (4, 2))]
    kinds = [[[each for each in part if each.element_size() == size] for size in sizes] for part, sizes in parts]
    arrays = [each for part in kinds for group in part for each in group]
    counts = (C.c_uint32 * 7)(*(len(group) for part in kinds for group in part))
    addresses = (C.c_void_p * len(arrays))(*(array.data_ptr() for array in arrays))
    if not _library().stream(counts, addresses, C.c_int64(numel), num_threads):
        raise ValueError(f"no loop for {list(counts)} arrays: add it to loops.cpp")


def arithmetic(
    rule: Rule, value: ElementType, grad: ElementType, states: StateFormat, numel: int, num_threads: int
) -> None:
    """The update of `numel` elements that never leave the first-level cache."""
    _library().arithmetic(int(rule), int(value), int(grad), int(states), C.c_int64(numel), num_threads)
