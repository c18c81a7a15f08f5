"""Models of the peft library: which parameters are adapters', what the base's files call the others, adapter folders,
and the base as `merge_and_unload` leaves it.

Knows peft by the structure of its modules, and imports it only to write a folder. It merges copies of single layers by
peft's own methods. So the values of one layer are needed at a time, and the model stays as it is. Moves no bytes: the
caller, `pretrained.py`, reads and writes values. The calls: `base_names` for both ways; `check_adapters` before weights
are loaded; `write_adapters` to export them, or `merged_tensors` once and `merge_layer` for each of them.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zero_offload.base.errors import ConfigError
from zero_offload.storage.files.system import naming_errors

Named = Iterable[tuple[str, Tensor]]
RANDOM_INITS = (True, False, "gaussian", "orthogonal")
"""Values of `init_lora_weights` that do not look at the base's weights."""
_WRAPPED = ("base_layer", "original_module", "token_adapter")
"""Names by which a module of peft has the module in whose place it is, or another wrapper of that."""
_COPIES = ("modules_to_save", "ln_tuning_layers")
"""Names of its trained copies of that module."""
_DERIVED_TYPES = frozenset((
    "ADAMSS", "CPT", "DEFT", "DELORA", "FROD", "OSF", "PSOFT", "SUPERTUNING", "TINYLORA", "TRAINABLE_TOKENS",
))  # fmt: skip
"""Kinds whose first values are computed from the base's."""


def is_peft(model: nn.Module) -> bool:
    """True if it is a `peft.PeftModel`."""
    return isinstance(getattr(model, "peft_config", None), Mapping) and callable(getattr(model, "get_base_model", None))


def kinds_of(model: Any) -> list[str]:
    """Kinds of adapters, by peft's names."""
    return sorted({str(getattr(config.peft_type, "value", "")) for config in model.peft_config.values()})


def has_adapters(model: nn.Module) -> bool:
    """True if its adapters can be written apart: a `peft.PeftModel`, or a model of diffusers after `add_adapter`."""
    return is_peft(model) or (bool(getattr(model, "peft_config", None)) and hasattr(model, "save_lora_adapter"))


def base_names(model: nn.Module) -> Callable[[str], str | None]:
    """The name of a parameter or buffer of `model` in the base model's files; None where it is an adapter's own.

    A module that peft trains whole (`modules_to_save`) has two, the original and the copy, of one name.
    """
    prefix = ""
    if is_peft(model):
        base: Any = model.get_base_model()  # type: ignore[operator]
        prefix = next(name for name, module in model.named_modules() if module is base) + "."

    def base_name(name: str) -> str | None:
        if not name.startswith(prefix):
            return None
        parts = _without_wrappers(model.get_submodule(prefix[:-1]), name.removeprefix(prefix).split("."))
        return None if parts is None else ".".join(parts)

    return base_name


def _without_wrappers(module: nn.Module, parts: list[str]) -> list[str] | None:
    """The path of a tensor as if peft had wrapped nothing."""
    found: list[str] = []
    while parts:
        head, *parts = parts
        if not hasattr(module, "adapter_layer_names"):
            found.append(head)
        elif head in _COPIES:
            module, (head, *parts) = module.get_submodule(head), parts  # one for each adapter
        elif head not in _WRAPPED:
            return None
        module = module._modules.get(head, module) or module
    return found


def check_adapters(model: nn.Module) -> None:
    """Raise ConfigError if adapters were computed from the base's weights, which are about to be replaced."""
    for name, config in (getattr(model, "peft_config", None) or {}).items():
        init, kind = getattr(config, "init_lora_weights", True), str(getattr(config.peft_type, "value", ""))
        derived = {
            "use_dora=True": getattr(config, "use_dora", False),
            "kasa_config": getattr(config, "kasa_config", None),
            f"init_lora_weights={init!r}": init not in RANDOM_INITS,
            "trainable_token_indices": getattr(config, "trainable_token_indices", None),
            "prompt_tuning_init": getattr(config, "prompt_tuning_init", "RANDOM") != "RANDOM",
            kind: kind in _DERIVED_TYPES,
        }
        if found := [what for what, is_so in derived.items() if is_so]:
            raise ConfigError(
                f"adapter {name!r} ({', '.join(found)}) begins with numbers that are computed from the base's weights, "
                "and zo.load_pretrained would replace those weights. Load the base first: zo.load_pretrained(base, "
                "folder); zo.offload(base, config); 'with zo.gathered(base): model = get_peft_model(base, ...)'; "
                "zo.offload(model)"
            )


def adapter_file_names(model: nn.Module) -> dict[str, str]:
    """The name in `model`, which is not offloaded yet, of each tensor that the file of its adapter has.

    Raises ConfigError if the file has something else than parameters, as those of prompts have.
    """
    from peft import get_peft_model_state_dict

    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    state = {name: torch.empty(0, dtype=torch.uint8, device="meta") for name in names}
    of_tensor = {id(tensor): name for name, tensor in state.items()}
    found = get_peft_model_state_dict(model, state_dict=dict(state))
    if other := [name for name, tensor in found.items() if id(tensor) not in of_tensor]:
        raise ConfigError(
            f"the adapter's file has {other[0]}, which is computed from parameters; load it by "
            "peft.PeftModel.from_pretrained, in memory, before zo.offload"
        )
    return {name: of_tensor[id(tensor)] for name, tensor in found.items()}


def write_adapters(
    model: nn.Module, values: Mapping[str, Tensor], read: Callable[[str], Tensor], folder: Path | None
) -> None:
    """Write a folder that `PeftModel.from_pretrained` loads, or `load_lora_adapter` of diffusers: every adapter as peft
    or diffusers saves it.

    `values` has an adapter's own parameters, others trained with it, and buffers. `read` gives a parameter of the base,
    where an adapter is saved with one (an embedding that it targets). Without a `folder`, of a rank that writes
    nothing, the same parameters are read.
    """
    from peft import get_peft_model_state_dict

    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    state = {name: torch.empty(0, dtype=torch.uint8, device="meta") for name in names} | dict(values)
    blanks = {id(tensor): name for name, tensor in state.items() if tensor.is_meta}
    # peft asks its modules for state dicts and computes prompts: of the offloaded model all ranks would have to.
    twin: Any = _twin(model, "", state, {})
    for adapter in twin.peft_config:
        found = get_peft_model_state_dict(twin, state_dict=state, adapter_name=adapter)
        state |= {blanks[id(each)]: read(blanks[id(each)]) for each in found.values() if id(each) in blanks}
    if folder is not None:
        with naming_errors("write", folder):
            if is_peft(model):
                twin.save_pretrained(folder, state_dict=state)
                return
            for adapter in twin.peft_config:
                twin.save_lora_adapter(folder if adapter == "default" else folder / adapter, adapter)


def _twin(module: nn.Module, prefix: str, state: Mapping[str, Tensor], made: dict[int, nn.Module]) -> nn.Module:
    """A module with the same attributes, the parameters in `state`, and state dicts that no hook sees."""
    if id(module) not in made:
        twin = made[id(module)] = copy.copy(module)
        params = {
            name: None if param is None else nn.Parameter(state[prefix + name], requires_grad=False)
            for name, param in module._parameters.items()
        }
        children = {
            name: None if child is None else _twin(child, f"{prefix}{name}.", state, made)
            for name, child in module._modules.items()
        }
        hooks = {name: OrderedDict[int, Any]() for name in ("_state_dict_hooks", "_state_dict_pre_hooks")}
        vars(twin).update(hooks, _parameters=params, _modules=children)
    return made[id(module)]


# Merging


def merged_tensors(
    model: nn.Module, named: Callable[[nn.Module], Named]
) -> list[tuple[str, Tensor, tuple[str, nn.Module] | None]]:
    """The parameters and buffers that `merge_and_unload` leaves of a model, by all names of the base's files.

    With the layer that adapters are merged into, if there is one: what the files call it, and the module. `named` gives
    those of a module. Of a model without adapters these are its own. Raises ConfigError where peft cannot merge.
    """
    if is_peft(model):
        tuner: Any = model.base_model
        with _asking_peft():
            if not hasattr(tuner, "merge_and_unload"):
                raise NotImplementedError("they are further inputs of the model, and change no weight")
            tuner._check_merge_allowed()
    base_name, layers, outer = base_names(model), dict[str, nn.Module](), ""
    for path, module in model.named_modules():
        is_wrapper = hasattr(module, "adapter_layer_names") and any(hasattr(module, each) for each in _WRAPPED)
        if is_wrapper and not (outer and path.startswith(f"{outer}.")):
            layers[path], outer = module, path
    _check_shared(model, layers)
    path_of = {f"{path}.{name}": path for path, layer in layers.items() for name, _ in named(layer)}
    found: list[tuple[str, Tensor, tuple[str, nn.Module] | None]] = []
    for name, tensor in named(model):
        path = path_of.get(name, "")
        if path in layers:
            place = str(base_name(path)), layers.pop(path)
            with _asking_peft():
                found += [(f"{place[0]}.{each}", left, place) for each, left in _left(place[1], named)]
        elif not path and (known_as := base_name(name)) is not None:
            found.append((known_as, tensor, None))
    return found


def _check_shared(model: nn.Module, layers: Mapping[str, nn.Module]) -> None:
    """Raise ConfigError where adapters would be merged into a weight that something else in the model uses too."""
    base_name, names = base_names(model), dict[int, list[str]]()
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), []).append(name)
    for path, layer in layers.items():
        # A copy takes the place of the original; what is merged changes it.
        for own, param in layer.named_parameters() if hasattr(layer, "merge") else ():
            others = [name for name in names[id(param)] if not name.startswith(f"{path}.")]
            if others and base_name(f"{path}.{own}") is not None:
                raise ConfigError(
                    f"adapters of {path} cannot be merged: {others[0]} is the same weight, and would change too. Leave "
                    '--merge and adapters="merged" out: an adapter\'s folder has the model as it is'
                )


def _left(layer: nn.Module, named: Callable[[nn.Module], Named]) -> Named:
    """Tensors of a layer after `unload`; no values are asked for."""
    stand_ins = {
        id(x): nn.Parameter(torch.empty(x.shape, dtype=x.dtype, device="meta"), requires_grad=False)
        for x in layer.parameters()
    }
    own = {id(stand_ins[id(param)]): param for param in layer.parameters()}
    return [
        (name, own.get(id(tensor), tensor)) for name, tensor in named(_unwrapped(layer, stand_ins, is_merged=False))
    ]


def merge_layer(layer: nn.Module, values: Mapping[int, nn.Parameter]) -> dict[str, Tensor]:
    """The parameters of the module that `merge_and_unload` leaves of a layer, by their names; the layer is not changed.

    `values` stand for its parameters, by the ids of those. They are changed: layers that share a parameter are merged
    into the same. Raises ConfigError where peft cannot merge.
    """
    with _asking_peft():
        left = _unwrapped(layer, values, is_merged=True)
    return {name: param.detach() for name, param in left.named_parameters(remove_duplicate=False)}


def _unwrapped(layer: nn.Module, values: Mapping[int, nn.Parameter], *, is_merged: bool) -> nn.Module:
    twin: Any = copy.deepcopy(layer, dict(values))
    if hasattr(twin, "unload_and_optionally_merge_module"):
        left: nn.Module = twin.unload_and_optionally_merge_module(is_merged, safe_merge=False, adapter_names=None)
        return left
    if is_merged:
        twin.merge()
    base: nn.Module = twin.get_base_layer()
    return base


@contextmanager
def _asking_peft() -> Iterator[None]:
    try:
        yield
    except (NotImplementedError, ValueError, RuntimeError) as error:
        if type(error) is RuntimeError and "merge" not in str(error):  # torch's, such as a lack of memory
            raise
        raise ConfigError(
            f"peft cannot merge these adapters into weights: {str(error) or type(error).__name__}. Leave "
            'adapters="merged" out: zo.export_pretrained(model, path) writes them for PeftModel.from_pretrained'
        ) from error
