"""Models of the peft library: which parameters are adapters', what the base's files call the others, adapter folders.

Knows peft by the structure of its modules, and imports it only to write a folder. Moves no bytes: the caller,
`pretrained.py`, reads values. The calls: `base_names` for both ways; `check_adapters` before weights are loaded;
`write_adapters` to export them. What merges them into the base is `peft_merge.py`.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zero_offload.base.errors import ConfigError

_RANDOM_INITS = (True, False, "gaussian", "orthogonal")
"""Values of `init_lora_weights` that do not look at the base's weights."""
WRAPPED = ("base_layer", "original_module", "token_adapter")
"""What a module of peft calls the one in whose place it is, or another wrapper of that."""
_COPIES = ("modules_to_save", "ln_tuning_layers")
"""What it calls copies of that, which it trains instead."""
_DERIVED_TYPES = ("TRAINABLE_TOKENS", "OSF", "DELORA", "PSOFT")


def is_peft(model: nn.Module) -> bool:
    """True if it is a `peft.PeftModel`."""
    return isinstance(getattr(model, "peft_config", None), Mapping) and callable(getattr(model, "get_base_model", None))


def base_names(model: nn.Module) -> Callable[[str], str | None]:
    """What the base model's files call a parameter or buffer of `model`; None where it is an adapter's own.

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
        elif head not in WRAPPED:
            return None
        module = module._modules.get(head, module) or module
    return found


def check_adapters(model: nn.Module) -> None:
    """Raise ConfigError if adapters were computed from the base's weights, which are about to be replaced."""
    configs = getattr(model, "peft_config", {}) if is_peft(model) else {}
    for name, config in configs.items():
        init, kind = getattr(config, "init_lora_weights", True), str(getattr(config.peft_type, "value", ""))
        derived = {
            "use_dora=True": getattr(config, "use_dora", False),
            f"init_lora_weights={init!r}": init not in _RANDOM_INITS,
            "trainable_token_indices": getattr(config, "trainable_token_indices", None),
            "prompt_tuning_init": getattr(config, "prompt_tuning_init", "RANDOM") != "RANDOM",
            kind: kind in _DERIVED_TYPES,
        }
        if found := [what for what, is_so in derived.items() if is_so]:
            raise ConfigError(
                f"adapter {name!r} ({', '.join(found)}) begins with numbers that are computed from the base's weights, "
                "and zo.load_pretrained would replace those weights. Load the base first: zo.offload(base, config); "
                "zo.load_pretrained(base, folder); 'with zo.gathered(base): model = get_peft_model(base, ...)'; "
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
    """Write a folder that `PeftModel.from_pretrained` loads: every adapter as peft saves it.

    `values` has what is an adapter's own or trained with it, and buffers; `read` gives a parameter of the base, where
    an adapter is saved with one (an embedding that it targets). Without a `folder`, of a rank that writes nothing,
    the same parameters are read.
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
        twin.save_pretrained(folder, state_dict=state)


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
