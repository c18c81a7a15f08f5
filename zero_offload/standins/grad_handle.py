"""`.grad` of a parameter whose gradient rests elsewhere: a tensor without memory that `GradSource` answers for.

It stands for the gradient that the next step uses: reduced, unscaled, fp32. Norms come from the sums that are known;
scaling is a factor that the step multiplies by. So torch's clipping, a loss scaler and loggers of norms work, and no
gradient moves. Clamping changes the gradient where it rests. An operation that needs its elements raises, and names the
call that gives a copy. A handle ends with its gradient.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from zero_offload.base.errors import ZeroOffloadError
from zero_offload.standins.operations import Kind, named
from zero_offload.standins.owners import dropped_error, owner_of
from zero_offload.standins.refusals import no_step_of_others
from zero_offload.standins.sources import GradSource
from zero_offload.standins.standin import StandIn


class GradHandle(StandIn):
    """The gradient of `param`, which is held until `life` ends."""

    __slots__ = ("_access", "life", "param")

    param: nn.Parameter
    life: object
    _access: weakref.ref[GradSource]

    @staticmethod
    def of(param: nn.Parameter, access: GradSource, life: object) -> GradHandle:
        make: Any = Tensor._make_wrapper_subclass
        with torch._C.DisableTorchFunctionSubclass():
            # On meta for C++, which then finds no address that it might read; asked for its device it is the
            # parameter's.
            handle: GradHandle = make(
                GradHandle, param.size(), dtype=torch.float32, device="meta", dispatch_device=True
            )
        handle.param, handle.life, handle._access = param, life, weakref.ref(access)
        return handle

    @property
    def access(self) -> GradSource:
        """Those that hold the gradient. Raises ZeroOffloadError where it is over, or not complete."""
        access = self._access()
        if access is None:
            raise dropped_error(self.param)
        access.check_held(self.param, self.life)
        return access

    def refuse(self, what: str) -> ZeroOffloadError:
        """The error for what needs elements."""
        access = self._access()
        if access is None:
            return dropped_error(self.param)
        return no_step_of_others(access.name_of(self.param), owner_of(self.param)) or access.refuse(self.param, what)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name, kwargs = func.overloadpacket.__name__, kwargs or {}
        if name in _OF_LISTS:
            return _OF_LISTS[name](func, *args, **kwargs)
        if name in _OF_ONE and isinstance(args[0], GradHandle):
            return _OF_ONE[name](*args, **kwargs)
        if func._can_decompose():  # in inference mode, which does not do so by itself
            return func.decompose(*args, **kwargs)
        raise next(_handles((args, kwargs))).refuse(name)

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        raise self.refuse("deepcopy")

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise self.refuse("a pickle")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"GradHandle(shape={tuple(self.shape)}, the gradient of {self.param!r})"

    def __format__(self, spec: str) -> str:
        return format(repr(self), spec)


def _handles(tree: Any) -> Iterator[GradHandle]:
    return (each for each in tree_leaves(tree) if isinstance(each, GradHandle))


# One gradient


def _device(handle: GradHandle) -> torch.device:
    with torch._C.DisableTorchFunctionSubclass():
        return handle.param.device


def _detach(handle: GradHandle) -> GradHandle:
    access = handle._access()
    if access is None:
        raise dropped_error(handle.param)
    return GradHandle.of(handle.param, access, handle.life)


def _norm(
    handle: GradHandle,
    ord: float = 2,
    dim: Any = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    whole = dim is None or len(dim) in (0, handle.dim())
    if not whole or keepdim or not ord >= 0:
        raise handle.refuse(f"a norm of order {ord} over dimensions {dim}")
    norm = handle.access.norm(handle.param, float(ord))
    return norm if dtype is None else norm.to(dtype)


def _mul_(handle: GradHandle, factor: Any) -> GradHandle:
    handle.access.scale(handle.param, _factor(handle, factor, "mul_"))
    return handle


def _div_(handle: GradHandle, divisor: Any, *, rounding_mode: str | None = None) -> GradHandle:
    if rounding_mode is not None:
        raise handle.refuse(f"div_(rounding_mode={rounding_mode!r})")
    handle.access.scale(handle.param, _factor(handle, divisor, "div_"), divides=True)
    return handle


def _factor(handle: GradHandle, factor: Any, what: str) -> float | Tensor:
    """A number that scales the whole gradient."""
    is_one = not isinstance(factor, Tensor) or (factor.numel() == 1 and not isinstance(factor, GradHandle))
    if not is_one or isinstance(factor, complex):
        raise handle.refuse(f"{what} by anything but a number")
    found: float | Tensor = factor if isinstance(factor, Tensor) else float(factor)
    return found


def _clamp_(handle: GradHandle, min: Any = None, max: Any = None) -> GradHandle:
    low, high = (None if bound is None else _bound(handle, bound) for bound in (min, max))
    access = handle.access
    if access.is_zeroed(handle.param) and ((low or 0) > 0 or (high or 0) < 0):
        raise handle.refuse(f"clamping zeros to [{low}, {high}]")
    access.clamp([handle.param], low, high)
    return handle


def _bound(handle: GradHandle, bound: Any) -> float:
    if isinstance(bound, Tensor) and bound.numel() != 1:
        raise handle.refuse("clamp_ by anything but numbers")
    return float(bound)


def _zero_(handle: GradHandle) -> GradHandle:
    handle.access.zero(handle.param)
    return handle


_OF_ONE: dict[str, Callable[..., Any]] = {
    "device": _device,
    "detach": _detach,
    "is_pinned": lambda handle, *_: False,
    "linalg_vector_norm": _norm,
    "mul_": _mul_,
    "div_": _div_,
    "clamp_": _clamp_,
    "clamp_min_": lambda handle, min: _clamp_(handle, min=min),
    "clamp_max_": lambda handle, max: _clamp_(handle, max=max),
    "zero_": _zero_,
}
"""Operations by torch's names."""


# Lists of gradients, ordinary ones among them: torch itself passes handles one by one


def _each(name: str, func: Any, grads: list[Tensor], *args: Any, **kwargs: Any) -> Any:
    """`name` of each; further arguments may be lists of one for each."""
    call = getattr(torch.ops.aten, name)
    found = []
    for index, grad in enumerate(grads):
        mine = [each[index] if isinstance(each, list | tuple) else each for each in args]
        found.append(call(grad, *mine, **kwargs))
    return found if func._schema.returns else None


def _check_and_unscale_(func: Any, grads: list[Tensor], found_inf: Tensor, inv_scale: Tensor) -> None:
    """Unscale gradients as torch.amp.GradScaler does."""
    if plain := [grad for grad in grads if not isinstance(grad, GradHandle)]:
        func(plain, found_inf, inv_scale)
    for handle in _handles(grads):
        if not handle.access.is_finite(handle.param):
            found_inf.fill_(1.0)
            break
    for handle in _handles(grads):
        _mul_(handle, inv_scale)


_OF_LISTS: dict[str, Callable[..., Any]] = {
    "_foreach_norm": partial(_each, "linalg_vector_norm"),
    "_foreach_mul_": partial(_each, "mul_"),
    "_foreach_div_": partial(_each, "div_"),
    "_foreach_clamp_min_": partial(_each, "clamp_min_"),
    "_foreach_clamp_max_": partial(_each, "clamp_max_"),
    "_foreach_zero_": partial(_each, "zero_"),
    "_amp_foreach_non_finite_check_and_unscale_": _check_and_unscale_,
}


GradHandle.as_they_are = frozenset(Kind) - {Kind.ADDRESS}
GradHandle.own = dict.fromkeys(named("share_memory_", "pin_memory", "set_"), GradHandle.refused)
"""Like addresses, these go to memory past torch's operations."""
