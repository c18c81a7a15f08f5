"""In which dtype every parameter is kept and every module computes: the compute dtype, and its exceptions.

Owns what `Precision.modules` means for a model. A module has the dtype of the innermost module, from itself up to the
root, that a key matches, else the compute dtype. Keys match by class, or by name with the wildcards of fnmatch; of
several keys that match one module the last counts. A module with running statistics that no key matches itself has
their dtype: torch computes with both in one dtype, and buffers keep theirs. Its parameters have it too. But a pattern
that matches no module may match parameters by their own names: these have that dtype, and nothing is cast for them.
Where the dtype changes between a module that is called and the one around it, floating inputs and outputs are cast.
Pure; never touches data. The call: `resolve`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from zero_offload.base.config import OffloadConfig
from zero_offload.base.errors import ConfigError
from zero_offload.base.precision import TORCH_NAMES, ModuleKey
from zero_offload.base.types import StateFormat
from zero_offload.plan.model_spec import can_be_called
from zero_offload.plan.quantized import dtype_problem_of, wrappers

_PARAM_DTYPES = frozenset(getattr(torch, name) for name in TORCH_NAMES.values())


@dataclass(frozen=True)
class Cast:
    """Dtypes to which a module's forward casts floating tensors; None leaves them as they are."""

    inputs: torch.dtype | None
    outputs: torch.dtype | None


@dataclass(frozen=True)
class ComputeDtypes:
    """Dtypes of one model."""

    compute: torch.dtype
    params: Mapping[str, torch.dtype] = field(default_factory=dict)
    """Dtypes of the parameters that are kept in another dtype, by each of their names."""
    casts: Mapping[str, Cast] = field(default_factory=dict)
    """By the name of a module; "" is the root, whose outputs are never cast."""
    states: StateFormat = StateFormat.FP32
    """How the optimizer's states rest, whatever a parameter's dtype."""

    def of(self, name: str) -> torch.dtype:
        return self.params.get(name, self.compute)


def resolve(root: nn.Module, config: OffloadConfig, *, strict: bool = True) -> ComputeDtypes:
    """The dtypes of `root` under `config.precision`.

    Raises ConfigError, with all problems at once. A problem is a key that matches nothing, if it is `strict`, or a
    parameter or module with several names that would have several dtypes.
    """
    # Keys name modules; a key without a module may name tensors.
    modules = dict(root.named_modules(remove_duplicate=False))
    asked = {key: getattr(torch, name) for key, name in config.compute_exceptions.items()}
    exceptions = {key: asked[key] for key in asked if any(_matches(key, *item) for item in modules.items())}
    of_tensors = {key: asked[key] for key in asked if key not in exceptions and isinstance(key, str)}
    tensors = [name for name, _ in (*root.named_parameters(remove_duplicate=False), *root.named_buffers())]
    # Buffers keep their dtypes whatever is asked; a list of what a model keeps in fp32 may name them.
    problems = [
        _unmatched(key, modules)
        for key in (asked if strict else ())
        if key not in exceptions and not (key in of_tensors and any(fnmatchcase(name, key) for name in tensors))
    ]
    # Dtypes inside of modules, then of parameters, then the casts at the borders of modules.
    compute = getattr(torch, config.compute_dtype_name)
    inside = {name: _dtype_of(name, modules, exceptions) or compute for name in modules}
    for name, module in modules.items():
        if (own := _statistics_dtype(module)) and not any(_matches(key, name, module) for key in exceptions):
            inside[name] = own
    params = {name: inside[name.rpartition(".")[0]] for name, _ in root.named_parameters(remove_duplicate=False)}
    for key, dtype in of_tensors.items():
        params |= {name: dtype for name in params if fnmatchcase(name, key)}
    casts = {
        name: _cast(name, modules, inside) for name, module in modules.items() if can_be_called(module) or not name
    }
    problems += [
        f"{one} ({_name(params[one])}) and {other} ({_name(params[other])}) are one parameter; let "
        "Precision(modules=) give the modules of both names the same dtype"
        for one, other in _differing(root.named_parameters(remove_duplicate=False), params)
    ]
    problems += [
        f"{one} and {other} are one module, for which Precision(modules=) asks different casts; let keys "
        "match both names, and what is around them, alike"
        for one, other in _differing(((name, modules[name]) for name in casts), casts)
    ]
    problems += [
        f"{name} {problem}" for name, param in wrappers(root) if (problem := dtype_problem_of(param, params[name]))
    ]
    # All problems at once, the first ten in words.
    if problems:
        raise ConfigError("\n".join(problems[:10] + ["..."] * (len(problems) > 10)))
    kept = {name: dtype for name, dtype in params.items() if dtype != compute}
    once = {name: cast for name, _ in root.named_modules() if (cast := casts.get(name)) is not None}
    return ComputeDtypes(compute, kept, once, config.state_format)


def _matches(key: ModuleKey, name: str, module: nn.Module) -> bool:
    return fnmatchcase(name, key) if isinstance(key, str) else isinstance(module, key)


def _dtype_of(
    name: str, modules: Mapping[str, nn.Module], exceptions: Mapping[ModuleKey, torch.dtype]
) -> torch.dtype | None:
    """The dtype of the innermost match around `name`."""
    for around in _outwards(name):
        found = [dtype for key, dtype in exceptions.items() if _matches(key, around, modules[around])]
        if found:
            return found[-1]
    return None


def _statistics_dtype(module: nn.Module) -> torch.dtype | None:
    """The dtype of batch and instance normalization; None where parameters cannot have it."""
    running = module.running_mean if isinstance(module, _NormBase) else None
    return running.dtype if running is not None and running.dtype in _PARAM_DTYPES else None


def _outwards(name: str) -> Iterator[str]:
    """The name, those of the modules around it, and the root's."""
    while name:
        yield name
        name = name.rpartition(".")[0]
    yield ""


def _cast(name: str, modules: Mapping[str, nn.Module], inside: Mapping[str, torch.dtype]) -> Cast | None:
    if name == "":
        # With fp32 nothing is cast: a float64 input stays what it is, as on the plain model.
        return None if inside[""] == torch.float32 else Cast(inside[""], None)
    around = next(each for each in list(_outwards(name))[1:] if each == "" or can_be_called(modules[each]))
    return None if inside[around] == inside[name] else Cast(inside[name], inside[around])


def _differing(named: Iterable[tuple[str, object]], values: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    """Two names of one object that have different values."""
    first: dict[int, str] = {}
    for name, each in named:
        other = first.setdefault(id(each), name)
        if values[name] != values[other]:
            yield other, name


def _unmatched(key: ModuleKey, modules: Mapping[str, nn.Module]) -> str:
    where = f"matches no module of this {type(modules['']).__name__}"
    if not isinstance(key, str):
        classes = sorted({type(module).__name__ for module in modules.values()})
        return f"Precision(modules=): {key.__name__} {where}; its classes are {', '.join(classes)}"
    names = [name for name in modules if name]
    known = dict.fromkeys([*names, *(name.rpartition(".")[2] for name in names)])
    near = difflib.get_close_matches(key.strip("*."), list(known), n=3)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    return f"Precision(modules=): {key!r} {where}; {hint}Names are those of model.named_modules(), or of parameters"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
