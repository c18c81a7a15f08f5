"""The names users see are a decision, not an accident."""

from __future__ import annotations

import inspect
import types

import pytest

import zero_offload
from tests.helpers.fresh import run_script
from zero_offload.base import errors

PUBLIC_NAMES = {
    "Adagrad",
    "Adam",
    "AdamW",
    "CapacityError",
    "CheckpointError",
    "ConfigError",
    "GradScaler",
    "IntegrityError",
    "Lion",
    "LiveBlocks",
    "LockError",
    "Muon",
    "NonFiniteError",
    "OffloadConfig",
    "Precision",
    "RankError",
    "Resumed",
    "RunLog",
    "SGD",
    "Stats",
    "StorageError",
    "ZeroOffloadError",
    "accumulate",
    "checkpoint",
    "clip_grad_norm_",
    "clip_grad_value_",
    "close",
    "commit",
    "copy",
    "deferred_init",
    "device",
    "export_pretrained",
    "gathered",
    "group_experts",
    "join",
    "load_checkpoint",
    "load_pretrained",
    "no_sync",
    "offload",
    "plan",
    "profile",
    "resume",
    "save_checkpoint",
    "stats",
    "steps",
    "unitwise",
}
NN_NAMES = {"TiledLinear", "chunked_cross_entropy"}
"""Of `zo.nn`, which `import *` does not give: it would hide torch's."""
PUBLIC = [(zero_offload, name) for name in sorted(PUBLIC_NAMES)] + [
    (zero_offload.nn, name) for name in sorted(NN_NAMES)
]
MIRRORS_OF_TORCH = {
    "Adagrad": {"maximize", "differentiable"},
    "Adam": {"amsgrad", "maximize", "capturable", "differentiable", "decoupled_weight_decay"},
    "AdamW": {"amsgrad", "maximize", "capturable", "differentiable"},
    "Lion": {"maximize"},
    "Muon": {"nesterov"},
    "SGD": {"maximize", "nesterov", "differentiable"},
    "GradScaler": {"enabled"},
    "TiledLinear": {"bias"},
    "clip_grad_norm_": {"error_if_nonfinite"},
}
"""Drop-in for torch: such bools are torch's spelling, not ours to choose."""


def test_the_public_names_are_these() -> None:
    assert set(zero_offload.__all__) == PUBLIC_NAMES
    assert len(zero_offload.__all__) == len(PUBLIC_NAMES)
    assert sorted(zero_offload.nn.__all__) == sorted(NN_NAMES)


@pytest.mark.parametrize(("module", "name"), PUBLIC)
def test_each_is_there_and_documented(module: types.ModuleType, name: str) -> None:
    value = getattr(module, name)
    assert not isinstance(value, types.ModuleType)
    assert inspect.getdoc(value)


def test_every_error_has_its_own_meaning() -> None:
    kinds = [kind for kind in vars(errors).values() if inspect.isclass(kind)]
    assert {kind.__name__ for kind in kinds} <= PUBLIC_NAMES
    assert all(issubclass(kind, errors.ZeroOffloadError) and kind.exit_code > 0 for kind in kinds)


@pytest.mark.parametrize(("module", "name"), PUBLIC)
def test_no_public_call_takes_a_bool(module: types.ModuleType, name: str) -> None:
    value = getattr(module, name)
    if inspect.isclass(value) and issubclass(value, Exception):
        return
    calls = [value] if inspect.isfunction(value) else [value, *_public_methods(value)]
    bools = {
        parameter.name
        for call in calls
        for parameter in inspect.signature(call).parameters.values()
        if parameter.annotation in (bool, "bool")
    }
    assert bools == MIRRORS_OF_TORCH.get(name, set())


def _public_methods(kind: type) -> list[object]:
    """Functions that the class itself defines, class methods too."""
    return [getattr(kind, key) for key in vars(kind) if key[0] != "_" and inspect.isroutine(getattr(kind, key))]


def test_import_starts_neither_a_device_nor_the_library() -> None:
    code = (
        "import sys, zero_offload, torch;"
        "assert not torch.cuda.is_initialized();"
        "assert '_native.so' not in open('/proc/self/maps').read();"
        "assert 'matplotlib' not in sys.modules;"
        "assert 'torch.distributed.checkpoint' not in sys.modules;"
        "assert 'zero_offload.hardware.kernels.triton_update' not in sys.modules"
    )
    result = run_script(code)
    assert result.returncode == 0, result.stderr
