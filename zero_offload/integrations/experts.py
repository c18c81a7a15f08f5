"""`zo.group_experts`: experts of transformers' models, which are fetched and computed in groups.

transformers 5 keeps all experts of a layer in parameters of three dimensions, and looks up how they are computed in
`ALL_EXPERTS_FUNCTIONS`. A function of ours is registered there. It computes each expert with the bits of the class's
own forward (transformers' "eager" implementation), and adds the experts up in their order.

`_directly` computes an expert from what a class tells transformers of itself: two products, and what is between them.
Where a class does more, `_alone` runs its own forward, on a copy of the module that has this one expert. The host then
waits for a GPU six times, since such a forward looks for the experts that have tokens. Before a class is accepted,
`_check` compares all of this on a few numbers.

Adapters of peft on experts (`target_parameters`) are `ParamWrapper`s, which put the whole adapted parameter in the
place of the base's. They get a class of ours, which leaves the parameter as it is and gives the values to add. Each
expert's values are adapted when they are here.

Imports transformers and peft only when they are needed.
"""

from __future__ import annotations

import functools
import inspect
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from zero_offload.base.errors import ConfigError
from zero_offload.base.types import MIB
from zero_offload.model.runtime import ModelRuntime
from zero_offload.plan.layout import CHUNK_NUMEL
from zero_offload.plan.model_spec import ExpertGroups
from zero_offload.plan.quantized import is_wrapper
from zero_offload.runtime.hooks import experts_of, mark_experts
from zero_offload.runtime.saved_tensors.tensors import untraced
from zero_offload.standins.owners import owner_of

GROUP_BYTES = 256 * MIB
"""A group takes so much at most, if nothing else is said, and one expert at least."""
_NAME = "zero_offload"
"""Of our function among transformers'."""
_DIRECT = "_zero_offload_direct"
"""The attribute of a module of experts that says whether `_directly` computes them."""


class _Adapter(NamedTuple):
    """The change that an active adapter makes to a parameter of experts: each expert gets scaling * lhs @ rhs."""

    module: nn.Module
    name: str
    """The parameter's, in its module."""
    lhs: Tensor
    """(experts, ...), as `rhs`."""
    rhs: Tensor
    scaling: float


_ADAPTERS: ContextVar[tuple[_Adapter, ...]] = ContextVar("adapters", default=())
"""Those of the wrappers whose forward runs."""


def group_experts(model: nn.Module, group_size: int | None = None) -> nn.Module:
    """Let the experts of a transformers model be fetched and computed in groups, instead of all of a layer at once.

    In place, before `zo.offload`; returns the model. It computes what transformers' "eager" implementation computes,
    bit for bit, with or without offload. Memory has two groups of `group_size` experts: one in use, one arriving. By
    default a group takes at most 256 MiB, in the dtype that its parameters have now, and has at least one expert.
    Adapters of peft, on experts too, come before this call.

    Raises ConfigError for a model without such experts, for quantized experts, and for a class of experts that adds up
    in another way. Raises ConfigError too for a group size that is not a number from 1 on; ImportError where
    transformers is missing.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"zo.group_experts takes a module, not a {type(model).__name__}")
    if group_size is not None and (type(group_size) is not int or group_size < 1):
        raise ConfigError(f"group_size={group_size!r}: a group has 1 or more experts, a whole number")
    from transformers import PreTrainedModel
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    # Refusals come first, as far as the model need not be changed for them.
    found = {name: module for name, module in model.named_modules() if _is_experts(module)}
    if not found:
        raise ConfigError(
            f"zo.group_experts: no module of this {type(model).__name__} has experts in parameters of 3 dimensions, "
            "as transformers 5 keeps those of Mixtral, Qwen3-MoE or DeepSeek-V3. Leave the call out: each layer is "
            "fetched whole"
        )
    if any(owner_of(param) is not None for module in found.values() for param in module.parameters()):
        raise ConfigError("zo.group_experts comes before zo.offload, which makes the units; build the model again")
    for name, module in found.items():
        _refuse_quantized(name, module)
    directly = {kind: _check(module) for kind, module in {type(each): each for each in found.values()}.items()}
    # torch.compile would go on into the class's forward, with the values of one expert for those of another.
    ALL_EXPERTS_FUNCTIONS.register(_NAME, untraced(_forward))
    # transformers looks the function up by the name in each config.
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            module.set_experts_implementation(_NAME)
    for name, module in found.items():
        if module.config._experts_implementation != _NAME:
            raise ConfigError(
                f"zo.group_experts: transformers does not let {name} ({type(module).__name__}) have another "
                "implementation of its experts; leave the call out"
            )
        size = _default_size(module) if group_size is None else group_size
        vars(module)[_DIRECT] = directly[type(module)]
        mark_experts(module, ExpertGroups(int(module.num_experts), min(size, int(module.num_experts))))
    # peft's wrappers put the whole adapted parameter in place, so they get a class of ours.
    if "peft" in sys.modules:
        wrapper = _wrapper_class()
        inside: Any
        for inside in model.modules():
            if type(inside) is wrapper.__base__ and any(inside.get_base_layer() is each for each in found.values()):
                inside.__class__ = wrapper
    return model


def _default_size(module: Any) -> int:
    """As many experts as `GROUP_BYTES` has room for. Where that leaves some, a group ends at a whole chunk, which is
    what drives give: so no chunk is read for two groups."""
    values = [param for param in _values_of(module).values() if param.dim() == 3]
    size: int = max(GROUP_BYTES * module.num_experts // max(sum(param.nbytes for param in values), 1), 1)
    numels = [param.numel() // int(module.num_experts) for param in values]
    step = math.lcm(*(CHUNK_NUMEL // math.gcd(CHUNK_NUMEL, numel) for numel in numels))
    return size - size % step if step <= size else size


def _refuse_quantized(name: str, module: Any) -> None:
    for of, param in _values_of(module).items():
        if is_wrapper(param) or param.dtype.itemsize < 2 or not param.dtype.is_floating_point:
            kind = type(param).__name__ if is_wrapper(param) else str(param.dtype).removeprefix("torch.")
            raise ConfigError(
                f"zo.group_experts: {of} of {name} ({type(module).__name__}) is quantized ({kind}), and groups take "
                "experts of float16, bfloat16 or float32. Leave the call out: each layer's experts are fetched whole"
            )


def has_frozen_experts(model: nn.Module) -> bool:
    """True if the model has experts that `group_experts` takes, none of which is trained."""
    values = [param for module in model.modules() if _is_experts(module) for param in _values_of(module).values()]
    return bool(values) and not any(param.requires_grad for param in values)


def _is_experts(module: nn.Module) -> bool:
    """True for what transformers' `use_experts_implementation` decorates, with experts in its own parameters."""
    return (
        hasattr(type(module).forward, "__wrapped__")
        and isinstance(getattr(module, "num_experts", None), int)
        and hasattr(module, "_is_expert_parallel")
        and any(param.dim() == 3 for param in _values_of(module).values())
    )


def _values_of(module: Any) -> dict[str, nn.Parameter]:
    """Its own parameters that have an entry for each expert, by name."""
    own = module.named_parameters(recurse=False)
    return {name: param for name, param in own if param.dim() and param.shape[0] == module.num_experts}


def _forward(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The function that transformers calls in the place of the module's forward."""
    owner = _owner_of(module)
    if owner is None or experts_of(module) is None:  # a model built from the config of a grouped model
        return _eager(module, hidden_states, top_k_index, top_k_weights)
    if hasattr(module, "parametrizations"):
        raise ConfigError(
            f"a parameter of {type(module).__name__} is replaced by a parametrization, as peft does for adapters that "
            "come after zo.group_experts. Call get_peft_model, then zo.group_experts, then zo.offload"
        )
    adapters = [each for each in _ADAPTERS.get() if each.module is module]
    stacks = [stack for adapter in adapters for stack in (adapter.lhs, adapter.rhs)]
    # The graph keeps `expert_fn`: a stack in it would be a view that pins its unit until backward.
    scalings = [(adapter.name, adapter.scaling) for adapter in adapters]

    def expert_fn(values: Mapping[str, Tensor], more: Sequence[Tensor], hidden: Tensor, weights: Tensor) -> Tensor:
        adapted = dict(values)
        for number, (name, scaling) in enumerate(scalings):
            lhs, rhs = more[2 * number : 2 * number + 2]
            # As peft does: in the parameter's dtype.
            with torch.autocast(lhs.device.type, enabled=False):
                adapted[name] = torch.baddbmm(adapted[name], lhs[None], rhs[None], alpha=scaling)
        return (_directly if vars(module)[_DIRECT] else _alone)(module, adapted, hidden, weights)

    unit = owner.places[next(iter(_values_of(module).values()))].unit
    return owner.experts.run(owner, unit, expert_fn, hidden_states, top_k_index, top_k_weights, stacks)


def _owner_of(module: nn.Module) -> ModelRuntime | None:
    owners = map(owner_of, module.parameters())
    return next((owner for owner in owners if isinstance(owner, ModelRuntime)), None)


@functools.cache
def _wrapper_class() -> Any:
    from peft.tuners.lora.layer import ParamWrapper

    class GroupedParamWrapper(ParamWrapper):  # type: ignore[misc, unused-ignore]
        """peft's adapter on a parameter of experts, of which no whole tensor is made."""

        @contextmanager
        def _activate_lora(self, active_adapters: list[str]) -> Iterator[None]:
            module = self.get_base_layer()
            active = [name for name in active_adapters if name in self.lora_A]
            if _owner_of(module) is None or experts_of(module) is None or not active:
                with super()._activate_lora(active_adapters):
                    yield
                return
            if len(active) > 1:
                raise ConfigError(
                    f"{', '.join(active)} are active together on experts in groups, which one adapter may change; "
                    "call model.set_adapter with one name"
                )
            wrapper: Any = self
            adapter = _Adapter(module, self.parameter_name, *wrapper.get_delta_factors(active[0]))
            token = _ADAPTERS.set((*_ADAPTERS.get(), adapter))
            try:
                yield
            finally:
                _ADAPTERS.reset(token)

    return GroupedParamWrapper


def _eager(module: Any, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """The class's own forward, as its author wrote it."""
    output: Tensor = inspect.unwrap(type(module).forward)(module, hidden, index, weights)
    return output


def _with(module: Any, values: Mapping[str, Tensor], num_experts: int) -> Any:
    """The module with so many experts, which have these values, each (num_experts, ...)."""
    made = object.__new__(type(module))
    others = {name: param for name, param in module._parameters.items() if name not in values}
    vars(made).update(vars(module), _parameters=others, num_experts=num_experts, **values)
    return made


def _alone(module: Any, values: Mapping[str, Tensor], hidden: Tensor, weights: Tensor) -> Tensor:
    """The class's own forward of one expert with these values, each (1, ...), which has all rows."""
    index = torch.zeros((len(hidden), 1), dtype=torch.int64, device=hidden.device)
    return _eager(_with(module, values, 1), hidden, index, weights)


def _directly(module: Any, values: Mapping[str, Tensor], hidden: Tensor, weights: Tensor) -> Tensor:
    """The result of `_alone`, for a class that does no more than it tells transformers."""
    before = "gate_up_proj" if module.has_gate else "up_proj"
    inner = _project(module, values, before, hidden)
    inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
    return (_project(module, values, "down_proj", inner) * weights).to(hidden.dtype)


def _project(module: Any, values: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    weight, bias = values[name][0], values[f"{name}_bias"][0] if module.has_bias else None
    if not module.is_transposed:
        return nn.functional.linear(x, weight, bias)
    return x @ weight if bias is None else x @ weight + bias


def _is_direct(module: Any, values: Mapping[str, Tensor], hidden: Tensor, weights: Tensor) -> bool:
    """True if `_directly` has the bits of `_alone`, and so have its gradients; with inputs that a class clamps, too."""
    found = []
    for compute in (_alone, _directly):
        inputs = [each.detach().requires_grad_() for each in (hidden, weights, *values.values())]
        try:
            with torch.enable_grad():
                output = compute(module, dict(zip(values, inputs[2:], strict=True)), *inputs[:2])
            grads = torch.autograd.grad(output, inputs, _waves(tuple(output.shape), 0.5).to(output.dtype))
        except (AttributeError, KeyError, RuntimeError):  # a class of another kind
            return False
        found.append([output, *grads])
    return all(map(torch.equal, *found))


def _check(module: Any) -> bool:
    """Raise for a class whose output is not the sum of its experts', added up in order and in the dtype of its input.
    True if `_directly` computes its experts.

    Two experts with values of no pattern, in bf16: another order or a wider sum shows in the last bits.
    """
    for name, inside in module.named_modules():
        if any(param.requires_grad for param in inside.parameters(recurse=False) if inside is not module):
            raise ConfigError(
                f"zo.group_experts: {type(module).__name__} trains parameters of its {name}, which groups do not; call "
                "requires_grad_(False) on it, or leave the call out"
            )
    params = _values_of(module)
    width = next(param for name, param in params.items() if "down" in name and param.dim() == 3)
    size = width.shape[1] if not module.is_transposed else width.shape[2]
    values = {name: _waves((2, *param.shape[1:]), 0.7) for name, param in params.items()}
    hidden, index = _waves((8, size), 0.3), torch.tensor([[0, 1], [1, 0]], dtype=torch.int64, device="cpu").repeat(4, 1)
    both, is_direct = _with(module, values, 2), True
    for dtype in (torch.bfloat16, torch.float32):
        weights = _waves((8, 2), 0.9).to(dtype)
        with torch.no_grad():
            whole = _eager(both, hidden, index, weights)
            added = torch.zeros_like(hidden)
            rows = torch.arange(8, dtype=torch.int64, device="cpu")
            for expert in range(2):
                mine = weights[index == expert].view(-1, 1)
                own = {name: value[expert : expert + 1] for name, value in values.items()}
                added.index_add_(0, rows, _alone(module, own, hidden, mine).to(added.dtype))
                if expert == 0:  # the other one has the same code
                    is_direct = is_direct and all(_is_direct(module, own, hidden * by, mine) for by in (1, 64))
        if not torch.equal(whole, added):
            raise ConfigError(
                f"zo.group_experts: {type(module).__name__} does not add up its experts one by one in the dtype of its "
                "input, so groups would compute other values. Leave the call out"
            )
    return is_direct


def _waves(shape: tuple[int, ...], step: float) -> Tensor:
    """Values of no pattern, bf16, without a random number."""
    numel = torch.Size(shape).numel()
    return torch.sin(torch.arange(numel, dtype=torch.float32, device="cpu") * step).bfloat16().view(shape)
