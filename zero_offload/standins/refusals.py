"""The errors of stand-ins for parameters: what an operation needs, where the values rest, what to type."""

from __future__ import annotations

import sys
from types import FrameType
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn

from zero_offload.base.errors import ZeroOffloadError
from zero_offload.base.trees import leaves_in
from zero_offload.plan.quantized import tensors_of
from zero_offload.standins.operations import name_of
from zero_offload.standins.owners import AtRest, dropped_error, owner_of
from zero_offload.standins.sources import Owner


def described(param: nn.Parameter) -> str:
    owner = owner_of_any(param)
    return "of a model that was deleted" if owner is None else owner.places.describe(tensors_of([param])[0])


def name_in_model(param: nn.Parameter) -> str:
    owner = owner_of_any(param)
    return "" if owner is None else owner.places.name_of(tensors_of([param])[0])


def owner_of_any(param: nn.Parameter) -> Owner | None:
    """The runtime that offloads a parameter, or those of which it consists."""
    found = tensors_of([param])
    return owner_of(found[0]) if found else None


def refuse_copy(self: object, *_: Any) -> NoReturn:
    raise ZeroOffloadError(
        "an offloaded parameter cannot be copied or pickled where ranks divide it, where the model is gone, or with "
        "memory that is shared (copy.copy). Its data rests elsewhere. To copy a part of the model on all ranks, as "
        "peft does for modules_to_save, do it in 'with zo.gathered(module):'. To keep the model use "
        "zo.save_checkpoint(model, optimizer, path), or model.state_dict() for the weights"
    )


_WRAPPERS = {
    "torch.nn.parallel": "DistributedDataParallel or DataParallel",
    "torch.distributed.fsdp": "fully_shard or FullyShardedDataParallel",
    "torch.distributed._composable": "replicate",
    "torch.distributed.tensor.parallel": "parallelize_module",
}
"""Names of other wrappers, by the package of their functions."""


def wrapper_of(name: str) -> str | None:
    """The part of torch that a Python module belongs to, if that divides or copies parameters over ranks or devices
    itself.
    """
    return next((what for package, what in _WRAPPERS.items() if f"{name}.".startswith(f"{package}.")), None)


def cannot_wrap(what: str, which: str) -> ZeroOffloadError:
    return ZeroOffloadError(
        f"torch's {what} cannot take {which}: zo.offload itself divides it over the ranks (stage=) and reduces its "
        "gradients. Leave the wrapper out and use the model as it is, with one process per device (torchrun). Tensor "
        "parallelism comes first: parallelize_module, then zo.offload(model, config, mesh=...)"
    )


WRAPPING_PACKAGES = ("torch.distributed.", "torch.nn.parallel.")
"""Where a look at the calling frames is worth its time."""


def check_not_wrapped(caller: FrameType, args: tuple[Any, ...]) -> None:
    """Raise for torch's wrappers, at the first question that one asks: later it has replaced parameters."""
    frame: FrameType | None = caller
    while frame is not None and (name := frame.f_globals.get("__name__", "")).startswith("torch."):
        if (what := wrapper_of(name)) is not None:
            param = next((leaf for leaf in leaves_in(args) if isinstance(leaf, AtRest)), None)
            which = "an offloaded parameter" if param is None else f"parameter {described(cast(nn.Parameter, param))}"
            raise cannot_wrap(what, which)
        frame = frame.f_back


class NeedsDataError(ZeroOffloadError):
    def __init__(self, param: nn.Parameter) -> None:
        super().__init__(str(needs_data("an operation", param)))
        self.param = param


def needs_data(func: object, param: nn.Parameter) -> ZeroOffloadError:
    if converts_module():
        return no_conversion(param)
    if owner_of(param) is None:
        return dropped_error(param)
    if (error := no_step_of_others(described(param), owner_of_any(param))) is not None:
        return error
    return ZeroOffloadError(
        f"{name_of(func)} needs the memory of parameter {described(param)}, or its values on all ranks that divide it, "
        "outside of the model's forward. Read it in 'with zo.gathered(module):', which all ranks enter, or take a copy "
        "(.clone())"
    )


def changes(func: object, param: nn.Parameter, obstacle: str = "") -> ZeroOffloadError:
    """The error for a change that cannot be made where the parameter rests; `obstacle`: a clause that says why."""
    if converts_module() or func is Tensor.share_memory_:
        return no_conversion(param)
    obstacle = obstacle or "the tensor object or a quantized weight would change, and not values"
    return ZeroOffloadError(
        f"{name_of(func)} changes parameter {described(param)}, and {obstacle}: the change would be lost. Change it "
        "between steps, alone or in 'with zo.gathered(module, mode=\"write\"):', or change a copy (.clone())"
    )


def no_conversion(param: nn.Parameter) -> ZeroOffloadError:
    with torch._C.DisableTorchFunctionSubclass():
        now = f"{param.dtype} on {param.device}"
    return ZeroOffloadError(
        f"an offloaded model keeps its dtype, its device and its memory: parameter {described(param)}, is {now} and "
        "stays so. Set the dtype it computes in by OffloadConfig(precision=...) and where it rests by params=... A "
        "conversion by a library comes before zo.offload, such as peft's prepare_model_for_kbit_training. For an "
        "ordinary model build another one, and load_state_dict(model.state_dict()) there"
    )


def converts_module() -> bool:
    """True if `nn.Module.to`, `.half()` or a similar method asks."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code is not nn.Module._apply.__code__:
        frame = frame.f_back  # type: ignore[assignment]
    return frame is not None


_DRAW_BESIDE = frozenset(("orthogonal_", "sparse_", "trunc_normal_", "trunc_normal_tf_"))


def draws_beside() -> bool:
    """True if a function asks that draws into tensors of its own and copies them in, such as these of torch.nn.init."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name not in _DRAW_BESIDE:
        frame = frame.f_back
    return frame is not None


def no_step_of_others(param: str, owner: Owner | None) -> ZeroOffloadError | None:
    """The error for an optimizer that is not ours, if the step of one asks; `param` is a text, `owner` its own."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        optimizer = frame.f_locals.get("self") if frame.f_code.co_name == "step" else None
        if owner is not None and isinstance(optimizer, torch.optim.Optimizer):
            if (ours := owner.instead_of(optimizer)) is None:
                return None
            return ZeroOffloadError(
                f"{type(optimizer).__module__.split('.')[0]}'s {type(optimizer).__name__} cannot step parameter "
                f"{param}: values, gradients and states rest elsewhere. Step with {ours}"
            )
        frame = frame.f_back
    return None
