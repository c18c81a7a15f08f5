"""Parts of a model that get adapters: names as a user gives them, as peft takes them, and as peft has adapted them.

peft adapts layers by `target_modules`. By `target_parameters` it adapts matrices of other modules: transformers 5 keeps
the experts of a layer, and routers, in such. For some mixtures peft takes names of layers ("down_proj", "all-linear")
for those of experts, as they were in transformers 4. Layers of these names then have no adapters. The calls:
`Targets.of` before `get_peft_model`, `check` behind it; `adapted` for a text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from zero_offload.base.errors import ConfigError
from zero_offload.base.problems import did_you_mean
from zero_offload.integrations.peft import is_peft


@dataclass(frozen=True)
class Targets:
    """Names that a user gives. Each is the end of a layer's name ("q_proj", "embed_tokens"), of a parameter's in
    another module ("down_proj"), or of such a module's ("experts", "router").
    """

    names: Sequence[str]
    layers: Sequence[str]
    """Whole names of what peft adapts as layers."""
    matrices: Sequence[str]
    """Whole names of parameters in other modules that peft adapts."""

    @classmethod
    def of(cls, base: nn.Module, names: Sequence[str]) -> Targets:
        """`base` has no adapters yet."""
        output: Any = base
        output = output.get_output_embeddings()  # its adapter would not be trained
        layers = [name for name, module in base.named_modules() if _is_layer(module) and module is not output]
        others = ((name, module) for name, module in base.named_modules() if not _is_layer(module))
        return cls(names, layers, [f"{name}.{leaf}" for name, module in others for leaf in _matrices_in(module)])

    @property
    def modules(self) -> list[str]:
        """Those for `target_modules`: peft knows more names than this model has."""
        return [name for name in self.names if _any_ends(self.layers, name) or not self._parameters(name)]

    @property
    def parameters(self) -> list[str]:
        """The names that stand for the others in `target_parameters`."""
        return sorted({found for name in self.names for found in self._parameters(name)})

    def _parameters(self, name: str) -> list[str]:
        if _any_ends(self.matrices, name):
            return [name]
        owned = (each.rpartition(".") for each in self.matrices)
        return list(dict.fromkeys(f"{name}.{leaf}" for owner, _, leaf in owned if _ends(owner, name)))

    @property
    def choices(self) -> list[str]:
        """Names that may be given."""
        return sorted({each.rpartition(".")[2] for each in self.layers} | set(map(_short, self.matrices)))

    def check(self, model: Any) -> None:
        """Raise ConfigError for a name by which peft has adapted nothing, or something else."""
        tuner, left = model.base_model, model.peft_config["default"].target_modules
        for name in self.names:
            if _any_ends(self.layers, name) and not _any_ends(tuner.targeted_module_names, name):
                experts = sorted(set(map(_short, tuner.targeted_parameter_names)))
                raise ConfigError(
                    f"--lora-targets {name}: of this model peft takes the name for that of experts, and would adapt "
                    f"{', '.join(experts)} instead of these layers. Leave it out, or name what it would adapt"
                )
            is_taken = _any_ends(tuner.targeted_module_names, name) or self._parameters(name)
            # A name of transformers 4 that peft has translated is not left among the modules.
            if not is_taken and (name in left or "." in name):
                hint = did_you_mean(name, [*self.choices, *(each.rpartition(".")[2] for each in self.matrices)])
                raise ConfigError(
                    f"--lora-targets {name}: the model has nothing of this name that takes an adapter; {hint}it has "
                    f"{', '.join(self.choices)}"
                )


def adapted(model: Any) -> tuple[str, ...]:
    """Names of a model's layers and parameters with adapters of peft, without the parts that tell blocks apart. The
    rank follows where it is not the adapter's. Empty without adapters, and of those that change no weights.
    """
    if not is_peft(model):
        return ()
    tuner, config = model.base_model, next(iter(model.peft_config.values()))
    short = {name: name.rpartition(".")[2] for name in getattr(tuner, "targeted_module_names", ())}
    short |= {name: _short(name) for name in getattr(tuner, "targeted_parameter_names", ())}
    ranks = getattr(config, "rank_pattern", None) or {}
    found = {}
    for whole, name in short.items():
        rank = next((rank for pattern, rank in ranks.items() if re.match(rf"(.*\.)?({pattern})$", whole)), None)
        found[name if rank is None else f"{name} (rank {rank})"] = True
    return tuple(found)


def not_adapted(model: Any) -> tuple[str, ...]:
    """The linear layers of such a model, but the output's, that have none."""
    if not is_peft(model):
        return ()
    output, inside = model.get_output_embeddings(), set[int]()
    for module in model.modules():
        if hasattr(module, "adapter_layer_names"):
            inside |= set(map(id, module.modules()))
    layers = (name for name, each in model.named_modules() if isinstance(each, nn.Linear) and id(each) not in inside)
    short = (name.rpartition(".")[2] for name in layers if model.get_submodule(name) is not output)
    return tuple(dict.fromkeys(short))


def _is_layer(module: nn.Module) -> bool:
    from transformers.pytorch_utils import Conv1D

    return isinstance(module, nn.Linear | nn.Embedding | nn.Conv1d | nn.Conv2d | Conv1D)


def _matrices_in(module: nn.Module) -> Iterator[str]:
    """Of experts, which have three dimensions, the biases have two."""
    dims = {name: param.dim() for name, param in module.named_parameters(recurse=False)}
    most = max(dims.values(), default=0)
    return (name for name, dim in dims.items() if dim == most and dim in (2, 3))


def _any_ends(wholes: Iterable[str], name: str) -> bool:
    return any(_ends(whole, name) for whole in wholes)


def _ends(whole: str, name: str) -> bool:
    return whole == name or whole.endswith(f".{name}")


def _short(parameter: str) -> str:
    """With its module's name."""
    return ".".join(parameter.split(".")[-2:])
