"""The base of a peft model as `merge_and_unload` leaves it, one layer at a time; the model itself stays as it is.

peft merges copies of its layers: so it needs the values of one layer, and what it knows of its methods is not said here
again. Moves no bytes: the caller, `pretrained.py`, reads and writes values. The calls: `merged_tensors` once, then
`merge` for each layer.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from zero_offload.base.errors import ConfigError
from zero_offload.integrations.peft import WRAPPED, base_names, is_peft

Named = Iterable[tuple[str, Tensor]]


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
        is_wrapper = hasattr(module, "adapter_layer_names") and any(hasattr(module, each) for each in WRAPPED)
        if is_wrapper and not (outer and path.startswith(f"{outer}.")):
            layers[path], outer = module, path
    path_of = {f"{path}.{name}": path for path, layer in layers.items() for name, _ in named(layer)}
    found: list[tuple[str, Tensor, tuple[str, nn.Module] | None]] = []
    for name, tensor in named(model):
        path = path_of.get(name, "")
        if path in layers:
            place = str(base_name(path)), layers.pop(path)
            found += [(f"{place[0]}.{each}", left, place) for each, left in _left(place[1], named)]
        elif not path and (known_as := base_name(name)) is not None:
            found.append((known_as, tensor, None))
    return found


def _left(layer: nn.Module, named: Callable[[nn.Module], Named]) -> Named:
    """What `unload` leaves of a layer; no values are asked for."""
    stand_ins = {
        id(x): nn.Parameter(torch.empty(x.shape, dtype=x.dtype, device="meta"), requires_grad=False)
        for x in layer.parameters()
    }
    own = {id(stand_ins[id(param)]): param for param in layer.parameters()}
    return [
        (name, own.get(id(tensor), tensor)) for name, tensor in named(_unwrapped(layer, stand_ins, is_merged=False))
    ]


def merge(layer: nn.Module, values: Mapping[int, nn.Parameter]) -> dict[str, Tensor]:
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
    except (NotImplementedError, ValueError) as error:
        raise ConfigError(
            f"peft cannot merge these adapters into weights: {str(error) or type(error).__name__}. Leave "
            'adapters="merged" out: zo.export_pretrained(model, path) writes them for PeftModel.from_pretrained'
        ) from error
