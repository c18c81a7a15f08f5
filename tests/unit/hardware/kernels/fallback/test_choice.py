"""Which kernels run, what is said of it, and what numba keeps for the next process."""

from __future__ import annotations

import errno
import hashlib
import itertools
import os
import warnings
from collections.abc import Iterator
from pathlib import Path

import numba
import pytest
import torch
from numba.core.bytecode import FunctionIdentity

from tests.helpers.fresh import run_script
from tests.helpers.without_library import clear_choices, without_library
from zero_offload.base.errors import CapacityError, ConfigError
from zero_offload.base.types import StateFormat
from zero_offload.hardware import abi, native
from zero_offload.hardware.abi import Rule
from zero_offload.hardware.kernels import choice, rules
from zero_offload.hardware.kernels.arguments import Segment, state_dtype
from zero_offload.hardware.kernels.fallback import calls, numba_passes, numba_words
from zero_offload.hardware.kernels.formats import convert
from zero_offload.hardware.kernels.update import UpdateBuffers, fused_update


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Nothing is chosen yet; what a test patches is forgotten after it."""
    clear_choices()
    yield monkeypatch
    monkeypatch.undo()
    clear_choices()


def test_the_library_is_used_where_it_is() -> None:
    assert choice.kernels() is native
    assert choice.description() == f"native, for {native.isa().name.lower()}"


def test_numba_runs_instead() -> None:
    with without_library():
        assert choice.kernels() is calls
        assert choice.description().startswith("numba, with the same bits")
    assert choice.kernels() is native


def test_another_version_of_the_library_is_as_good_as_none(fresh: pytest.MonkeyPatch) -> None:
    fresh.setattr(abi, "VERSION", abi.VERSION + 1)
    with pytest.warns(UserWarning, match="is another build.*Rebuild it with 'pip install -e .'.*Until then: numba"):
        assert choice.kernels() is calls


def test_one_warning_says_what_runs_and_what_to_type(fresh: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fresh.setattr(native, "LIBRARY_PATH", tmp_path / "_native.so")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(3):
            convert(torch.empty(4, dtype=torch.float16), torch.ones(4))
    (warning,) = told
    for words in ("_native.so: cannot open", "'make native'", "numba, with the same bits"):
        assert words in str(warning.message)


def test_a_numba_that_does_not_fit_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "numba.py").write_text("raise SystemError('numba needs another numpy')")
    code = (
        "import sys, torch\nsys.path.insert(0, sys.argv[1])\n"
        "from zero_offload.base import errors\nfrom zero_offload.hardware import native\n"
        "from zero_offload.hardware.kernels.formats import convert\n"
        "native.LIBRARY_PATH = native.LIBRARY_PATH.with_name('nowhere.so')\n"
        "for _ in range(2):\n"
        "    try:\n        convert(torch.empty(4, dtype=torch.float16), torch.ones(4))\n"
        "    except errors.ConfigError as error:\n        print(error)\n"
    )
    done = run_script(code, str(tmp_path))
    for line in done.stdout.splitlines():
        assert "nowhere.so" in line and "(SystemError: numba needs another numpy): pip install --upgrade numba" in line
    assert len(done.stdout.splitlines()) == 2 and not done.stderr


def test_a_numba_that_compiles_nothing_is_one_error(fresh: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def refuse(*arguments: object) -> None:
        raise numba.core.errors.LoweringError("no such instruction")

    fresh.setattr(native, "LIBRARY_PATH", tmp_path / "_native.so")
    fresh.setattr(numba_passes, "crc32c", refuse)
    with pytest.raises(ConfigError, match="_native.so.*'make native'.*LoweringError: .*no such instruction"):
        convert(torch.empty(4, dtype=torch.float16), torch.ones(4))


def test_numba_is_imported_only_where_it_runs() -> None:
    code = "import sys, torch, zero_offload; zero_offload.nn; print('numba' in sys.modules)"
    done = run_script(code)
    assert done.stdout.split() == ["False"]


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
    return value[0].item(), state[0].item(), sum(numba_passes.update_of(rule).stats.cache_hits.values())


@pytest.mark.full
def test_the_next_process_finds_what_was_compiled(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each rule its own, though they have the same types, and their symbols the same numbers in two processes."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    results = {Rule.LION: (0.5, 2.0), Rule.SGD_MOMENTUM: (0.0, 2.0)}
    with without_library():
        numba_passes.update_of.cache_clear()
        run_compiled(Rule.SGD_NESTEROV, StateFormat.FP32)  # what all rules share has its numbers now
        for rule, result in results.items():
            # As in a new process, which begins to count anew.
            numba_passes.update_of.cache_clear()
            monkeypatch.setattr(FunctionIdentity, "_unique_ids", itertools.count(1 << 40))
            assert run_compiled(rule, StateFormat.FP32) == (*result, 0)
        numba_passes.update_of.cache_clear()
        for rule, result in results.items():
            for format in (StateFormat.FP32, StateFormat.BF16):
                assert run_compiled(rule, format) == (*result, 1)


def test_what_is_kept_is_of_these_sources() -> None:
    """Numba itself would look at one file only."""
    sources = numba_words.sources()
    for each in (numba_passes.update_of(Rule.SGD), numba_passes.sum_chunks, numba_passes.crc32c):
        assert each.py_func.__qualname__.endswith(sources)
    files = [*sorted(Path(numba_words.__file__).parent.glob("*.py")), Path(rules.__file__)]
    assert sources == hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]
