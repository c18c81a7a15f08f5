"""In which dtype parameters and buffers are kept and modules compute: the compute dtype, and its exceptions.

Owns what `Precision.modules` and `Precision.buffers` mean for a model. A module has the dtype of the innermost module,
from itself up to the root, that a key matches, else the compute dtype. Keys match by class, or by name with the
wildcards of fnmatch; of several keys that match one module the last counts. A module with running statistics that no
key matches itself has their dtype: torch computes with both in one dtype, and statistics keep theirs. Its parameters
have it too. But a pattern that matches no module may match parameters by their own names: these have that dtype, and
nothing is cast for them. Where the dtype changes between a module that is called and the one around it, floating inputs
and outputs are cast. Pure; never touches data. The call: `resolve`.

[Note: kept in fp32] Classes of transformers and diffusers name what `from_pretrained` keeps in fp32 where it loads in
16 bits. Their forwards cast around it. So it is fp32 here as well, without casts of ours, unless a key matches its
module or its name. transformers has two lists of patterns, of which one counts in fp16 alone. diffusers has one, of
parts of names. Other tensors are in fp32 by name of the dtype in a constructor. A second model without memory, built
with 16 bits as torch's default, tells these, as `from_pretrained` builds it.

[Note: buffers] A floating buffer goes with the parameters beside it, as in `module.to(dtype)`: those of the innermost
module that has any. Where it has the dtype that most of them have, it gets that of its module. One of another dtype was
made so on purpose, by a class or by `from_pretrained` in 16 bits, and stays. So do running statistics, tables of rotary
embeddings, whose angles 16 bits would change, and what a class keeps in fp32. A key for the buffer comes before all of
these.
"""

from __future__ import annotations

import copy
import difflib
import re
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from zero_offload.base.config import OffloadConfig
from zero_offload.base.errors import ConfigError
from zero_offload.base.precision import TORCH_NAMES, ModuleKey
from zero_offload.base.types import StateFormat
from zero_offload.plan.model_spec import can_be_called
from zero_offload.plan.quantized import dtype_problem_of, ordinary_buffers_of, wrappers

_ANGLES = re.compile("[Rr]otary|RoPE|Rope")
"""In names of classes that hold tables of rotary embeddings."""
_ADAPTED = re.compile(r"\.(?:base_layer|original_module|modules_to_save\.[^.]+)(?=\.)")
"""Parts that adapters put into the names of layers that they are around."""
_NO_LIST = object()
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
    buffers: Mapping[str, torch.dtype] = field(default_factory=dict)
    """Dtypes of the buffers that change theirs, by their names. See [Note: buffers]."""
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
    asked = _dtypes(config.compute_exceptions)
    exceptions = {key: asked[key] for key in asked if any(_matches(key, *item) for item in modules.items())}
    of_tensors = {key: asked[key] for key in asked if key not in exceptions and isinstance(key, str)}
    buffers = dict(root.named_buffers(remove_duplicate=False))
    tensors = [*(name for name, _ in root.named_parameters(remove_duplicate=False)), *buffers]
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
    is_kept = _kept_in_fp32(modules, compute)
    for names in _names_of_params(root):
        named = any(_dtype_of(name.rpartition(".")[0], modules, exceptions) for name in names)
        if any(map(is_kept, names)) and not named:
            params |= dict.fromkeys(names, torch.float32)
    for key, dtype in of_tensors.items():
        params |= {name: dtype for name in params if fnmatchcase(name, key)}
    of_buffers = _dtypes(config.buffer_exceptions)
    if strict:
        problems += [
            f"Precision(buffers=): {getattr(key, '__name__', repr(key))} matches no floating buffer of this "
            f"{type(root).__name__}; names are those of model.named_buffers()"
            for key in of_buffers
            if not any(_holds(key, name, modules) for name, each in buffers.items() if each.is_floating_point())
        ]
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
    changed = _buffer_dtypes(root, inside, of_tensors, of_buffers, is_kept)
    return ComputeDtypes(compute, kept, changed, once, config.state_format)


def _dtypes(asked: Mapping[ModuleKey, str]) -> dict[ModuleKey, torch.dtype]:
    return {key: getattr(torch, name) for key, name in asked.items()}


def _buffer_dtypes(
    root: nn.Module,
    inside: Mapping[str, torch.dtype],
    of_tensors: Mapping[str, torch.dtype],
    of_buffers: Mapping[ModuleKey, torch.dtype],
    is_kept: Callable[[str], bool],
) -> dict[str, torch.dtype]:
    """Dtypes of the buffers that change theirs. See [Note: buffers]."""
    modules, numels = dict(root.named_modules()), defaultdict[str, Counter[torch.dtype]](Counter)
    for name, param in root.named_parameters():
        for around in _outwards(name.rpartition(".")[0]) if param.is_floating_point() else ():
            numels[around][param.dtype] += param.numel()
    found: dict[str, torch.dtype] = {}
    for path, module in modules.items():
        beside = next((numels[around] for around in _outwards(path) if around in numels), Counter[torch.dtype]())
        for own, buffer in ordinary_buffers_of(module):
            name = f"{path}.{own}" if path else own
            named = [dtype for key, dtype in of_tensors.items() if fnmatchcase(name, key)]
            named += [dtype for key, dtype in of_buffers.items() if _holds(key, name, modules)]
            stays = (
                [(buffer.dtype, beside[buffer.dtype])] != beside.most_common(1)
                or isinstance(module, _NormBase)
                or _ANGLES.search(type(module).__name__) is not None
                or own.endswith("inv_freq")
                or is_kept(name)
            )
            dtype = named[-1] if named else buffer.dtype if stays else inside[path]
            if buffer.is_floating_point() and dtype != buffer.dtype:
                found[name] = dtype
    return found


def _kept_in_fp32(modules: Mapping[str, nn.Module], compute: torch.dtype) -> Callable[[str], bool]:
    """Whether the class of a module around a tensor keeps it in fp32. See [Note: kept in fp32]."""
    lists, made = {}, dict[str, frozenset[str]]()
    for path, module in modules.items() if compute != torch.float32 else ():
        if not any(around in made for around in _outwards(path)) and hasattr(type(module), "_from_config"):
            made[path] = _made_in_fp32(module, compute)
        names = {*(getattr(module, "_keep_in_fp32_modules", None) or ())}
        strict: Any = getattr(module, "_keep_in_fp32_modules_strict", _NO_LIST)
        if strict is not _NO_LIST:
            names = {*(names if compute == torch.float16 else ()), *(strict or ())}
            parts = (name.replace("*", ".*") for name in names)
        else:
            parts = (rf"(?:^|\.){re.escape(name)}(?:\.|$)" for name in names)
        if names:
            lists[path] = re.compile("|".join(sorted(parts)))

    def is_kept(name: str) -> bool:
        inside = {path: name if path == "" else name.removeprefix(f"{path}.") for path in _outwards(name)}
        known = {path: _ADAPTED.sub("", own) for path, own in inside.items()}
        return any(
            (path in lists and lists[path].search(own)) or (path in made and own in made[path])
            for path, own in known.items()
        )

    return is_kept


_STOP_IN_16_BITS = ("deberta", "xlnet")
"""Model types whose forwards multiply such tensors by 16-bit ones, so that those of `from_pretrained` stop in bf16."""
_MADE: weakref.WeakKeyDictionary[nn.Module, dict[torch.dtype, frozenset[str]]] = weakref.WeakKeyDictionary()


def _made_in_fp32(model: Any, compute: torch.dtype) -> frozenset[str]:
    """Tensors to which the constructor of a model of transformers gives fp32, where the default is `compute`."""
    known = _MADE.setdefault(model, {})
    if compute not in known:
        stops = getattr(model.config, "model_type", None) in _STOP_IN_16_BITS
        known[compute] = frozenset() if stops else _fp32_of_twin(model, compute)
    return known[compute]


def _fp32_of_twin(model: Any, compute: torch.dtype) -> frozenset[str]:
    config, default = copy.deepcopy(model.config), torch.get_default_dtype()
    _give_dtype(config, compute)
    try:
        torch.set_default_dtype(compute)
        with torch.device("meta"), torch.random.fork_rng(devices=[]):
            twin = type(model)(config)
    except Exception:  # a class that is not built from its config alone
        return frozenset()
    finally:
        torch.set_default_dtype(default)
    tensors = [*twin.named_parameters(remove_duplicate=False), *twin.named_buffers(remove_duplicate=False)]
    return frozenset(name for name, tensor in tensors if tensor.dtype == torch.float32)


def _give_dtype(config: Any, dtype: torch.dtype) -> None:
    """Parts may be built in the dtype of their own config."""
    config.dtype = dtype
    for name in getattr(config, "sub_configs", ()):
        if (inner := getattr(config, name, None)) is not None:
            _give_dtype(inner, dtype)


def _names_of_params(root: nn.Module) -> Iterable[list[str]]:
    """All names of each parameter."""
    names = defaultdict[int, list[str]](list)
    for name, param in root.named_parameters(remove_duplicate=False):
        names[id(param)].append(name)
    return names.values()


def _holds(key: ModuleKey, name: str, modules: Mapping[str, nn.Module]) -> bool:
    """True if a key of `Precision.buffers` is for the buffer `name`."""
    return fnmatchcase(name, key) if isinstance(key, str) else isinstance(modules[name.rpartition(".")[0]], key)


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
