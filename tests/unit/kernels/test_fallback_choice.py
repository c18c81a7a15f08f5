"""Which kernels run, what is said of it, and what numba keeps for the next process."""

from __future__ import annotations

import errno
import itertools
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import numba
import pytest
import torch
from numba.core.bytecode import FunctionIdentity

from tests.helpers.without_library import forget_choices, without_library
from zero_offload import abi, native
from zero_offload.abi import Rule, StateFormat
from zero_offload.errors import CapacityError
from zero_offload.kernels import choice
from zero_offload.kernels.fallback import numba_passes, numba_words, numpy_passes
from zero_offload.kernels.fallback.calls import PortableKernels
from zero_offload.kernels.master import convert
from zero_offload.kernels.states import state_dtype
from zero_offload.kernels.update import Segment, UpdateBuffers, fused_update


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Nothing is chosen yet; what a test patches is forgotten after it."""
    forget_choices()
    yield monkeypatch
    monkeypatch.undo()
    forget_choices()


def test_the_library_is_used_where_it_is() -> None:
    assert choice.kernels() is native
    assert choice.find() == choice.Choice("native", f"native, for {native.isa().name.lower()}")


@pytest.mark.parametrize(("instead", "passes"), [("numba", numba_passes), ("numpy", numpy_passes)])
def test_what_runs_instead(instead: str, passes: object) -> None:
    with without_library(instead):
        found = choice.kernels()
        assert isinstance(found, PortableKernels) and found.passes is passes
    assert choice.kernels() is native


def test_another_version_of_the_library_is_as_good_as_none(fresh: pytest.MonkeyPatch) -> None:
    fresh.setattr(abi, "VERSION", abi.VERSION + 1)
    with pytest.warns(UserWarning, match="is another build.*Rebuild it with 'pip install -e .'.*Until then: numba"):
        assert isinstance(choice.kernels(), PortableKernels)


def test_one_warning_says_what_runs_and_what_to_type(fresh: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fresh.setattr(native, "LIBRARY_PATH", tmp_path / "_native.so")
    fresh.setitem(sys.modules, "numba", None)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(3):
            convert(torch.empty(4, dtype=torch.float16), torch.ones(4))
    (warning,) = told
    for words in ("_native.so: cannot open", "'make native'", "numpy, with the same bits", "pip install numba"):
        assert words in str(warning.message)


def test_a_numba_that_does_not_fit_is_not_used(fresh: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "numba.py").write_text("raise SystemError('numba needs another numpy')")
    fresh.setattr(native, "LIBRARY_PATH", tmp_path / "_native.so")
    fresh.syspath_prepend(tmp_path)
    fresh.delitem(sys.modules, "numba")
    found = choice.find()
    assert found.name == "numpy" and "SystemError: numba needs another numpy" in found.description


def test_a_library_that_cannot_be_opened_now_is_not_given_up(fresh: pytest.MonkeyPatch) -> None:
    def refuse(path: str) -> None:
        raise OSError(os.strerror(errno.EMFILE))

    with fresh.context() as patch:
        patch.setattr(native.C, "CDLL", refuse)
        with pytest.raises(CapacityError, match="ulimit -n"):
            choice.kernels()
    assert choice.kernels() is native


def test_where_numba_has_no_place_for_files_it_compiles_each_time() -> None:
    scope: dict[str, object] = {}
    exec("def double(x):\n    return x + x\n", scope)  # of no file, so there is no folder beside it
    assert numba_words.function(scope["double"], cache=True)(21) == 42  # type: ignore[arg-type]


def run_compiled(rule: Rule, format: StateFormat) -> tuple[float, float, int]:
    """The new value, the new state, and how often it was found in a file."""
    value, state, grad = torch.ones(8), torch.ones(8, dtype=state_dtype(format, signed=True)), torch.full((8,), 3.0)
    addresses = (value.data_ptr(), 0, 0, (state.data_ptr(),), grad.data_ptr(), 0)
    segment = Segment(0, 8, 0.5, 0.5, 0.5, 0.0, 0.0, 1.0, 2)
    fused_update(rule, UpdateBuffers(*addresses, value.dtype, grad.dtype, state_format=format), [segment], 1)
    return (
        value[0].item(),
        state[0].item(),
        sum(numba_passes._update_of(rule, format).stats.cache_hits.values()),
    )


def forget_compiled() -> None:
    for each in (numba_passes._update_of, numba_passes._compute_of):
        each.cache_clear()


@pytest.mark.full
def test_the_next_process_finds_what_was_compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each rule and format its own, though they have the same types, and their symbols the same numbers in two
    processes."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    fp32, bf16 = StateFormat.FP32, StateFormat.BF16
    results = {(Rule.LION, fp32): (0.5, 2.0), (Rule.SGD_MOMENTUM, fp32): (0.0, 2.0), (Rule.LION, bf16): (0.5, 2.0)}
    with without_library():
        forget_compiled()
        for format in (fp32, bf16):
            run_compiled(Rule.SGD_NESTEROV, format)  # what all rules share has its numbers now
        for kind, result in results.items():
            # As in a new process, which begins to count anew.
            forget_compiled()
            monkeypatch.setattr(FunctionIdentity, "_unique_ids", itertools.count(1 << 40))
            assert run_compiled(*kind) == (*result, 0)
        forget_compiled()
        for kind, result in results.items():
            assert run_compiled(*kind) == (*result, 1)


def test_what_is_kept_is_of_these_sources() -> None:
    """Numba itself would look at one file only."""
    cells = numba_passes._update_of(Rule.SGD, StateFormat.BF16).py_func.__closure__
    key = f"{numba_words.SOURCES} SGD_BF16"
    assert key in [cell.cell_contents for cell in cells]
    assert numba_words.sources() == numba_words.SOURCES
