"""Hooks of the program on gradients of offloaded parameters, and the hook that takes the gradient away behind them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from zero_offload.base.errors import ZeroOffloadError
from zero_offload.standins.owners import owner_of
from zero_offload.standins.refusals import described


class LastHook:
    """A hook on a gradient that takes it away: the program's hooks run before, whenever they are registered."""


class ProgramHook:
    """A hook of the program on a gradient, which may change it unless earlier ones are held.

    Torch's would change the sum. Here it finds what this backward adds, and the sum is elsewhere.
    """

    def __init__(self, hook: Callable[[Tensor], None]) -> None:
        self.hook = hook

    def __call__(self, param: nn.Parameter) -> None:
        owner = owner_of(param)
        is_first = owner is None or not owner.access.holds_grad(param)
        with torch._C.DisableTorchFunctionSubclass():
            before: Any = param.grad
            version = None if before is None else before._version
        try:
            self.hook(param)
            with torch._C.DisableTorchFunctionSubclass():
                is_same = param.grad is before and (before is None or before._version == version)
            if not (is_first or is_same):
                raise ZeroOffloadError(
                    f"a hook of register_post_accumulate_grad_hook has changed the gradient of {described(param)}, to "
                    "which an earlier backward or micro-batch has added. The hook finds what this backward adds, and "
                    "torch's would change the sum. Change gradients after the last backward (param.grad.mul_(factor), "
                    "zo.clip_grad_norm_)"
                )
        except BaseException:
            with torch._C.DisableTorchFunctionSubclass():
                param.grad = None  # no hook takes it now, and the next backward would add to it
            raise


def has_hooks(param: nn.Parameter) -> bool:
    """True if a hook of the program sees the parameter's gradients."""
    with torch._C.DisableTorchFunctionSubclass():
        after: Any = param._post_accumulate_grad_hooks or {}
        return bool(param._backward_hooks) or not all(isinstance(hook, LastHook) for hook in after.values())


def register_grad_hook(param: nn.Parameter, hook: Callable[[Tensor], None]) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        watched = hook if isinstance(hook, LastHook) else ProgramHook(hook)
        handle = param.register_post_accumulate_grad_hook(watched)
        hooks: Any = param._post_accumulate_grad_hooks
    for number in [number for number, each in hooks.items() if isinstance(each, LastHook)]:
        hooks[number] = hooks.pop(number)  # C++ calls them as they were put in, whatever `move_to_end` says
    return handle
