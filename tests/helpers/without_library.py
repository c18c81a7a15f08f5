"""This process as it is where the native library is missing, for a test."""

from __future__ import annotations

import contextlib
import gc
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from zero_offload.hardware import native
from zero_offload.hardware.kernels import choice


def clear_choices() -> None:
    """As in a process that has loaded nothing yet."""
    for each in (native.lib, native.missing, choice.kernels):
        each.cache_clear()


@contextlib.contextmanager
def without_library() -> Iterator[None]:
    """Instead of the library's kernels run those of numba; their one warning is not shown."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "LIBRARY_PATH", Path("/nowhere/_native.so"))
        patch.setattr(native, "set_isa", lambda isa: None)  # there is none to choose
        clear_choices()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                assert choice.kernels() is not native
            yield
        finally:
            clear_choices()


@contextlib.contextmanager
def whole_run_without_library() -> Iterator[None]:
    """The same after runs with file engines, which are freed by the library that they are of."""
    gc.collect()
    with without_library():
        yield
