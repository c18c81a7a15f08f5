"""The only file that registers hooks on modules and parameters.

Order of a step: `PassTracker.enter` and `exit` around the forwards of hooked modules, `grad_ready` once per parameter
when backward has its gradient. Hooks behind a forward run after an exception too.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from zero_offload.base.errors import ConfigError, ZeroOffloadError
from zero_offload.plan.dtypes import Cast
from zero_offload.plan.model_spec import ExpertGroups
from zero_offload.plan.quantized import take_state
from zero_offload.runtime.pass_tracker import PassTracker
from zero_offload.runtime.saved_tensors.recompute import Group, RecomputedModule
from zero_offload.runtime.saved_tensors.tensors import untraced
from zero_offload.runtime.units.unit import Unit
from zero_offload.standins.checkpointed import INSTEAD, refuse_full, refuse_savers
from zero_offload.standins.grad_hooks import LastHook, ProgramHook
from zero_offload.standins.guard import is_for_new_process
from zero_offload.standins.owners import owner_of
from zero_offload.standins.refusals import refuse_copy
from zero_offload.standins.sources import Owner

GradReady = Callable[[nn.Parameter, Tensor], None]


def install_hooks(
    root: nn.Module,
    points: Mapping[str, Sequence[Unit]],
    params: Iterable[nn.Parameter],
    tracker: PassTracker,
    casts: Mapping[str, Cast],
    grad_ready: GradReady,
    runtime: object,
    undo: contextlib.ExitStack,
) -> None:
    """Hook the modules of `root` that are named in `points`, which may need no unit, and in `casts`; and those of
    `params` that are trained.

    The hooks of modules, and the graphs that forwards make, keep `runtime` alive.
    """
    # First, so that outputs, which may be parameters, are cast while their unit is here.
    for name, cast in casts.items():
        install_cast(root.get_submodule(name), cast, undo)
    for name, needed in points.items():
        units = tuple(needed)
        module = root.get_submodule(name)
        before = _Hook(untraced(PassTracker.enter), tracker, units, runtime)
        after = _Hook(untraced(PassTracker.exit), tracker)
        # Before the user's own: they may read parameters, as those of torch.nn.utils.weight_norm do.
        undo.callback(module.register_forward_pre_hook(before, with_kwargs=True, prepend=True).remove)
        undo.callback(module.register_forward_hook(after, always_call=True).remove)
        _put_mark_around(module)
    for param in params:
        if param.requires_grad:
            hook_grads(param, grad_ready, undo)


def hook_grads(param: nn.Parameter, grad_ready: GradReady, undo: contextlib.ExitStack) -> None:
    """Let `grad_ready` take the gradients of a trained parameter."""
    # A weak reference. The cycle parameter -> hook -> runtime -> parameter passes through C++, where the garbage
    # collector cannot follow. It would keep a dropped model for ever.
    hooks: Any = param._post_accumulate_grad_hooks or {}
    for number, hook in list(hooks.items()):
        hooks[number] = ProgramHook(hook)
        undo.callback(hooks.update, {number: hook})
    register: Any = param.register_post_accumulate_grad_hook
    undo.callback(register(_WeakCall(grad_ready)).remove)


def unhook_grads(param: nn.Parameter) -> None:
    """Undo `hook_grads`: the parameter is an ordinary one again."""
    hooks: Any = param._post_accumulate_grad_hooks or {}
    for number, hook in list(hooks.items()):
        if isinstance(hook, _WeakCall):
            del hooks[number]
        elif isinstance(hook, ProgramHook):
            hooks[number] = hook.hook


class _Hook(functools.partial[Any]):
    """A bound hook. Pickling a module pickles its hooks before its parameters."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        return (_nothing, ()) if is_for_new_process() else refuse_copy(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        """Inside of `zo.gathered` a module can be copied, and has ordinary parameters then."""
        return _do_nothing


def _do_nothing(*_: Any) -> None:
    """A hook of a module that was copied."""


def _nothing() -> Callable[..., None]:
    return _do_nothing


def is_recomputed(module: nn.Module) -> bool:
    """True if the module is marked for recomputation."""
    return any(map(_is_mark, module._forward_pre_hooks.values()))


def _is_mark(hook: object) -> bool:
    return isinstance(getattr(hook, "__self__", None), RecomputedModule)


def _put_mark_around(module: nn.Module) -> None:
    """Order the hooks of a module that was marked before: recompute begins before other hooks and ends after them."""
    hooks: Any
    for hooks, last in ((module._forward_pre_hooks, False), (module._forward_hooks, True)):
        for number in [number for number, hook in hooks.items() if _is_mark(hook)]:
            hooks.move_to_end(number, last=last)


def mark_for_recompute(module: nn.Module, label: str, group: Group | None) -> None:
    """Let backward run the module's forward again. Marked already, it stays as it is."""
    marks = [getattr(hook, "__self__", None) for hook in module._forward_pre_hooks.values()]
    for mark in marks:
        if isinstance(mark, RecomputedModule):
            if mark.group is not group:
                raise ConfigError(f"{label} was given to zo.checkpoint before, with another group; mark it once")
            return
    recompute = RecomputedModule(label, group)
    # The first of all: what other hooks make of the inputs, they make again.
    module.register_forward_pre_hook(recompute.enter, with_kwargs=True, prepend=True)
    module.register_forward_hook(recompute.exit, always_call=True)


class _ExpertsMark:
    """Marks a module whose experts are used in groups, as its first hook. It does nothing."""

    def __init__(self, experts: ExpertGroups) -> None:
        self.experts = experts

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        pass


def mark_experts(module: nn.Module, experts: ExpertGroups) -> None:
    """Let `zo.offload` make the module's parameters, whose entry i is expert i's, a unit that is fetched in groups."""
    for number, hook in list(module._forward_pre_hooks.items()):
        if isinstance(hook, _ExpertsMark):
            del module._forward_pre_hooks[number]
    module.register_forward_pre_hook(_ExpertsMark(experts))


def experts_of(module: nn.Module) -> ExpertGroups | None:
    """How the module's experts are used, if it is marked."""
    marks = (hook.experts for hook in module._forward_pre_hooks.values() if isinstance(hook, _ExpertsMark))
    return next(marks, None)


def experts_in(root: nn.Module) -> dict[str, ExpertGroups]:
    """The modules that are marked, by name."""
    found = {name: experts_of(module) for name, module in root.named_modules()}
    return {name: experts for name, experts in found.items() if experts is not None}


def install_walk_hooks(modules: Iterable[nn.Module], undo: contextlib.ExitStack) -> None:
    """Let `state_dict()` and `load_state_dict()` of each of these modules go over parameters that are away."""
    handles: list[Any] = []
    for module in modules:
        handles += (
            module.register_state_dict_pre_hook(_before_state_dict),
            module.register_state_dict_post_hook(_end_walk),
            module.register_load_state_dict_pre_hook(_before_load),
            module.register_load_state_dict_post_hook(_end_walk),
        )
    for handle in handles:
        undo.callback(handle.remove)


def remove_copied_hooks(root: nn.Module) -> None:
    """Take away what the copy of an offloaded model has of its hooks. Those of the program stay."""
    for module in root.modules():
        for name, hooks in vars(module).items():
            # With the number of a hook go the flags of it, which lie in dicts of their own.
            if name.endswith("_hooks") and isinstance(hooks, dict):
                for number in [number for number, hook in hooks.items() if _is_ours(hook)]:
                    del hooks[number]
                    for flags in (f"{name}_with_kwargs", f"{name}_always_called"):
                        vars(module).get(flags, {}).pop(number, None)


def _is_ours(hook: Any) -> bool:
    function = getattr(hook, "func", getattr(hook, "hook", hook))
    return function in (_do_nothing, _cast_inputs, _cast_output, _before_state_dict, _before_load, _end_walk)


# They know nothing but the module: a copy of one, made in `zo.gathered`, has ordinary parameters, and these hooks too.


def _owner_of(module: nn.Module) -> Owner | None:
    return next((owner for owner in map(owner_of, module.parameters()) if owner is not None), None)


def _before_state_dict(module: nn.Module, *_: Any) -> None:
    if (owner := _owner_of(module)) is not None:
        _begin_walk(owner, module, "state_dict")


def _before_load(module: nn.Module, state: Any, prefix: str, metadata: dict[str, Any], *_: Any) -> None:
    if (owner := _owner_of(module)) is None:
        return
    if metadata.get("assign_to_params_buffers"):
        raise ZeroOffloadError(
            "load_state_dict(assign=True) would put ordinary parameters in the place of offloaded ones; "
            "leave assign out"
        )
    _begin_walk(owner, module, "load_state_dict")
    take_state(module, state, prefix)


def _begin_walk(owner: Owner, module: nn.Module, name: str) -> None:
    access = owner.access
    if access.walking:
        return
    call = _call_of(name)
    if access.is_divided and name == "state_dict":
        refuse_savers("model.state_dict()")
    with owner.together(f"model.{name}()", INSTEAD[name]) if access.is_divided else contextlib.nullcontext():
        if access.is_divided and name == "state_dict":
            refuse_full("model.state_dict()")
        access.begin_walk(module, call)


def _end_walk(module: nn.Module, *_: Any) -> None:
    if (owner := _owner_of(module)) is not None:
        owner.access.end_walk(module)


def _call_of(name: str) -> FrameType:
    """The innermost call of a function with this name; the hook's, if there is none."""
    hook = frame = sys._getframe(1)
    while frame.f_code.co_name != name:
        if frame.f_back is None:
            return hook
        frame = frame.f_back
    return frame


class _WeakCall(LastHook):
    """Calls a bound method with a gradient, which it takes, while its object lives."""

    def __init__(self, method: GradReady) -> None:
        self._method = weakref.WeakMethod(method)

    def __call__(self, param: nn.Parameter) -> None:
        method = self._method()
        # The parameter may be at rest, where it asks its owner about everything.
        with torch._C.DisableTorchFunctionSubclass():
            grad = param.grad
            # A hook of the user's may have taken it.
            if method is not None and grad is not None:
                param.grad = None
                method(param, grad)


def install_cast(module: nn.Module, cast: Cast, undo: contextlib.ExitStack) -> None:
    """Let the module's forward cast floating inputs and outputs."""
    if cast.inputs is not None:
        before = functools.partial(_cast_inputs, cast.inputs)
        undo.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
    if cast.outputs is not None:
        undo.callback(module.register_forward_hook(functools.partial(_cast_output, cast.outputs)).remove)


def _cast_inputs(
    dtype: torch.dtype, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Any, Any]:
    return _cast_floats(dtype, (args, kwargs))  # type: ignore[no-any-return]


def _cast_output(dtype: torch.dtype, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    return _cast_floats(dtype, output)


def _cast_floats(dtype: torch.dtype, tree: Any) -> Any:
    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return tree_map_only(Tensor, cast, tree)
