"""The names users see are a decision, not an accident."""

from __future__ import annotations

import inspect
import subprocess
import sys
import types

import pytest

import zero_offload
from zero_offload import errors

PUBLIC_NAMES = {
    "AdamW",
    "CapacityError",
    "CheckpointError",
    "ConfigError",
    "IntegrityError",
    "LockError",
    "NonFiniteError",
    "OffloadConfig",
    "Precision",
    "Resumed",
    "Stats",
    "StorageError",
    "ZeroOffloadError",
    "clip_grad_norm_",
    "close",
    "commit",
    "export_pretrained",
    "gathered",
    "load_checkpoint",
    "load_pretrained",
    "no_sync",
    "offload",
    "plan",
    "resume",
    "save_checkpoint",
    "stats",
}


def test_the_public_names_are_these() -> None:
    assert set(zero_offload.__all__) == PUBLIC_NAMES
    assert len(zero_offload.__all__) == len(PUBLIC_NAMES)


@pytest.mark.parametrize("name", sorted(PUBLIC_NAMES))
def test_each_is_there_and_documented(name: str) -> None:
    value = getattr(zero_offload, name)
    assert not isinstance(value, types.ModuleType)
    assert inspect.getdoc(value)


def test_every_error_has_its_own_meaning() -> None:
    kinds = [kind for kind in vars(errors).values() if inspect.isclass(kind)]
    assert {kind.__name__ for kind in kinds} <= PUBLIC_NAMES
    assert all(issubclass(kind, errors.ZeroOffloadError) and kind.exit_code > 0 for kind in kinds)


def test_no_public_function_takes_a_bool() -> None:
    for name in sorted(PUBLIC_NAMES):
        value = getattr(zero_offload, name)
        if inspect.isfunction(value):
            for parameter in inspect.signature(value).parameters.values():
                assert parameter.annotation not in (bool, "bool"), f"{name}({parameter})"


def test_import_starts_neither_a_device_nor_the_library() -> None:
    code = (
        "import sys, zero_offload, torch;"
        "assert not torch.cuda.is_initialized();"
        "assert '_native.so' not in open('/proc/self/maps').read();"
        "assert 'matplotlib' not in sys.modules"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
