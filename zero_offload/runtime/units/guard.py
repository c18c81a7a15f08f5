"""The class of an offloaded parameter while nobody computes with it.

A tensor whose storage is away must not be read: on a CPU that is a fault, on a GPU it is freed memory. So at
rest a parameter's class is `GuardedParameter` (switched like torch.nn.UninitializedParameter's, no attribute
added), whose `__torch_function__` lets harmless questions through and asks the owner about everything else.
The hooks switch the class to plain `nn.Parameter` for the time a unit is in use.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.utils._pytree import tree_leaves, tree_map_only

from zero_offload.errors import ZeroOffloadError
from zero_offload.plan.tensor_parallel import is_dtensor
from zero_offload.runtime.units.read_only import changed_by, lend, refuse_changes
from zero_offload.shards.registry import dropped_error, owner_of

_HARMLESS_PROPERTIES = (
    *("shape", "dtype", "device", "layout", "ndim", "itemsize", "nbytes", "requires_grad", "is_leaf", "grad_fn"),
    *("is_cuda", "is_cpu", "is_meta", "is_sparse", "is_sparse_csr", "is_quantized", "is_nested", "is_mkldnn"),
    *("is_mps", "is_xpu", "is_vulkan", "is_xla", "is_hpu", "is_mtia", "is_ipu", "is_maia"),
    *("_version", "output_nr", "retains_grad", "names", "name", "grad_dtype"),
    *("_backward_hooks", "_post_accumulate_grad_hooks"),
)
_HARMLESS_METHODS = (
    *("size", "dim", "ndimension", "numel", "nelement", "element_size", "stride", "storage_offset", "get_device"),
    *("is_floating_point", "is_complex", "is_contiguous", "is_signed", "is_inference", "is_shared", "is_neg"),
    *("is_conj", "is_same_size", "has_names", "register_hook", "register_post_accumulate_grad_hook"),
    *("__len__", "__hash__", "__dir__"),
)


@functools.cache
def _harmless() -> frozenset[Any]:
    """Functions that read metadata only."""
    found: set[Any] = set()
    for name in _HARMLESS_PROPERTIES:
        descriptor = getattr(Tensor, name, None)
        if descriptor is not None and hasattr(descriptor, "__get__"):
            found.add(descriptor.__get__)
    for name in _HARMLESS_METHODS:
        method = getattr(Tensor, name, None)
        if method is not None:
            found.add(method)
    found.update((torch.is_floating_point, torch.is_complex, torch.numel, torch.is_inference))
    found.add(torch._has_compatible_shallow_copy_type)
    return frozenset(found)


@functools.cache
def _special() -> dict[Any, Callable[..., Any]]:
    """Functions that the owner answers itself."""
    grad: Any = Tensor.grad
    data: Any = Tensor.data
    requires_grad: Any = Tensor.requires_grad
    return {
        grad.__get__: _get_grad,
        grad.__set__: _set_grad,
        grad.__delete__: _set_grad,
        requires_grad.__set__: _set_requires_grad,
        Tensor.requires_grad_: _call_requires_grad_,
        Tensor.detach: _detach,
        Tensor.copy_: _copy_,
        data.__set__: _set_data,
        **{convert: functools.partial(_convert, convert) for convert in _CONVERSIONS},
    }


@functools.cache
def _takes_leaves() -> frozenset[Any]:
    """Functions that need to know where in the graph a parameter is, not what it holds."""
    return frozenset((torch.autograd.grad, torch.autograd.backward, Tensor.backward))


def _as_edges(values: Any) -> Any:
    """Parameters at rest replaced by their places in the graph."""
    with torch._C.DisableTorchFunctionSubclass():
        return tree_map_only(AtRest, get_gradient_edge, values)


def _filled(args: tuple[Any, ...], kwargs: dict[str, Any], found: tuple[Tensor | None, ...]) -> tuple[Tensor, ...]:
    """What `torch.autograd.grad(materialize_grads=True)` gives, which takes no places for inputs."""
    inputs = args[1] if len(args) > 1 else kwargs["inputs"]
    given = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
    with torch._C.DisableTorchFunctionSubclass():
        return tuple(
            torch.zeros(x.shape, dtype=x.dtype, device=x.device) if grad is None else grad
            for x, grad in zip(given, found, strict=True)
        )


def _get_grad(param: nn.Parameter, *_: Any) -> Tensor | None:
    owner = owner_of(param)
    return None if owner is None else owner.access.read_grad(param)


def _set_grad(param: nn.Parameter, grad: Tensor | None = None) -> None:
    owner = owner_of(param)
    if owner is not None:
        owner.access.write_grad(param, grad)


def _set_requires_grad(param: nn.Parameter, value: bool) -> None:
    owner = owner_of(param)
    if owner is not None:
        owner.access.check_requires_grad(param, value)
    with torch._C.DisableTorchFunctionSubclass():
        param.requires_grad = value


def _call_requires_grad_(param: nn.Parameter, requires_grad: bool = True) -> nn.Parameter:
    _set_requires_grad(param, requires_grad)
    return param


def _detach(param: nn.Parameter) -> Tensor:
    """state_dict() detaches every parameter: then it gets a copy."""
    owner = owner_of(param)
    if owner is not None and owner.access.walking:
        return owner.access.copy_out(param)
    return cast(Tensor, _touch_and_call(Tensor.detach, (param,), {}))


def _copy_(target: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
    """load_state_dict() copies into every parameter."""
    owner = owner_of(cast(nn.Parameter, target)) if isinstance(target, AtRest) else None
    if owner is not None and owner.access.walking:
        owner.access.copy_in(cast(nn.Parameter, target), source)
        return target
    return cast(Tensor, _touch_and_call(Tensor.copy_, (target, source, non_blocking), {}))


_CONVERSIONS = (Tensor.to, Tensor.cpu, Tensor.cuda, Tensor.float, Tensor.double, Tensor.half, Tensor.bfloat16)


def _convert(convert: Callable[..., Tensor], param: nn.Parameter, *args: Any, **kwargs: Any) -> Tensor:
    """What a parameter is already, as in `model.to("cpu")`, needs no data."""
    with torch._C.DisableTorchFunctionSubclass():
        like = torch.empty(0, dtype=param.dtype, device=param.device)
    # Elements lie as they lie in their section, whatever the format.
    if convert(like, *args, **{name: value for name, value in kwargs.items() if name != "memory_format"}) is like:
        return param
    return cast(Tensor, _touch_and_call(convert, (param, *args), kwargs))


def _set_data(param: nn.Parameter, values: Tensor) -> None:
    """`model.to("cpu")` assigns what it got from the parameter."""
    if values is not param:
        _touch_and_call(cast(Any, Tensor.data).__set__, (param, values), {})


def refuse_copy(self: object, *_: Any) -> NoReturn:
    raise ZeroOffloadError(
        "an offloaded parameter cannot be copied or pickled: its data rests elsewhere. "
        "Use zo.save_checkpoint(model, optimizer, path), or model.state_dict() for the weights"
    )


def _copy_of(param: nn.Parameter) -> nn.Parameter:
    """An ordinary parameter, where `zo.gathered` has brought the values."""
    owner = owner_of(param)
    if owner is None or not owner.access.is_gathered(param):
        refuse_copy(param)
    with torch.no_grad():
        return nn.Parameter(param.clone(), requires_grad=param.requires_grad)


_WRAPPERS = {
    "torch.nn.parallel": "DistributedDataParallel or DataParallel",
    "torch.distributed.fsdp": "fully_shard or FullyShardedDataParallel",
    "torch.distributed._composable": "replicate",
    "torch.distributed.tensor.parallel": "parallelize_module",
}
"""By the package that they are of."""


def wrapper_of(name: str) -> str | None:
    """What of torch a Python module is a part of, if that divides or copies parameters over ranks or devices itself."""
    return next((what for package, what in _WRAPPERS.items() if f"{name}.".startswith(f"{package}.")), None)


def cannot_wrap(what: str, which: str) -> ZeroOffloadError:
    return ZeroOffloadError(
        f"torch's {what} cannot take {which}: zo.offload itself divides it over the ranks (stage=) and reduces its "
        "gradients. Leave the wrapper out and use the model as it is, with one process per device (torchrun). Tensor "
        "parallelism comes first: parallelize_module, then zo.offload(model, config, mesh=...)"
    )


def _check_not_wrapped(caller: FrameType, args: tuple[Any, ...]) -> None:
    """Raise for torch's wrappers, at the first question that one asks: later it has replaced parameters."""
    frame: FrameType | None = caller
    while frame is not None and (name := frame.f_globals.get("__name__", "")).startswith("torch."):
        if (what := wrapper_of(name)) is not None:
            param = next((leaf for leaf in tree_leaves(args) if isinstance(leaf, AtRest)), None)
            owner = None if param is None else owner_of(cast(nn.Parameter, param))
            named = "" if owner is None else f"parameter {owner.access.describe(cast(nn.Parameter, param))}"
            raise cannot_wrap(what, named or "an offloaded parameter")
        frame = frame.f_back


_ASKS_FOR_ITSELF = ("torch.distributed.", "torch.nn.parallel.")
"""Where a look at who called whom is worth its time."""


class AtRest:
    """What an offloaded parameter at rest does instead of its own class; see the module's docstring."""

    __slots__ = ()

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        caller = sys._getframe(1)
        if caller.f_globals.get("__name__", "").startswith(_ASKS_FOR_ITSELF):
            _check_not_wrapped(caller, args)
        if func in _harmless():
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        special = _special().get(func)
        if special is not None:
            return special(*args, **kwargs)
        if func in _takes_leaves():
            fills = kwargs.pop("materialize_grads", False)
            found = func(*_as_edges(args), **_as_edges(kwargs | ({"allow_unused": True} if fills else {})))
            return _filled(args, kwargs, found) if fills else found
        return _touch_and_call(func, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        return _copy_of(cast(nn.Parameter, self))

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _copy_of(cast(nn.Parameter, self)).__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        param = cast(nn.Parameter, self)
        owner = owner_of(param)
        where = "" if owner is None else f", {owner.access.describe(param)}"
        with torch._C.DisableTorchFunctionSubclass():
            shape, dtype = tuple(param.shape), param.dtype
        return f"Parameter(shape={shape}, dtype={dtype}{where})"


class GuardedParameter(AtRest, nn.Parameter):  # type: ignore[misc]
    """A plain parameter at rest."""


@functools.cache
def _class_at_rest(kind: type) -> type:
    """The same for a DTensor, whose class is imported by those who use it."""
    if kind is nn.Parameter:
        return GuardedParameter

    def asking(method: Callable[..., Any]) -> Callable[..., Any]:
        return lambda self, *args, **kwargs: _touch_and_call(method, (self, *args), kwargs)

    # These read its part without passing through __torch_function__.
    readers = {name: asking(getattr(kind, name)) for name in ("to_local", "full_tensor", "redistribute")}
    return type(f"Guarded{kind.__name__}", (AtRest, kind), {"__slots__": ()} | readers)


def _touch_and_call(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Let each owner make its parameters readable, then run the function on the plain tensors."""
    # Those that are in use as well: their units must not go while another one comes.
    params = [
        cast(nn.Parameter, leaf) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, AtRest | nn.Parameter)
    ]
    targets = changed_by(func, args, kwargs)
    refuse_changes(targets, func)
    changed_ids = set(map(id, targets))
    by_owner: dict[int, list[nn.Parameter]] = {}
    for param in params:
        by_owner.setdefault(id(owner_of(param)), []).append(param)
    lent: list[tuple[Tensor, str]] = []
    for owned in by_owner.values():
        owner = owner_of(owned[0])
        if owner is None and any(isinstance(param, AtRest) for param in owned):
            raise dropped_error(owned[0])
        changed = [param for param in owned if id(param) in changed_ids]
        if owner is not None and owner.access.touch(owned, func, changed):
            lent += [(_part_of(param), owner.access.name_of(param)) for param in owned]
    with torch._C.DisableTorchFunctionSubclass():
        result = func(*args, **kwargs)
        return lend(result, lent) if lent else result


def _part_of(param: nn.Parameter) -> Tensor:
    """What this rank holds of it, asking nobody."""
    kind: Any = type(param).__bases__[1] if isinstance(param, AtRest) else type(param)
    return cast(Tensor, kind.to_local(param)) if is_dtensor(param) else param


def guard(params: Iterable[nn.Parameter]) -> None:
    """Switch parameters to rest."""
    for param in params:
        if not isinstance(param, AtRest):
            param.__class__ = _class_at_rest(type(param))


def unguard(params: Iterable[nn.Parameter]) -> None:
    """Switch parameters to use: plain, at plain speed."""
    for param in params:
        if isinstance(param, AtRest):
            # Its class is (AtRest, the class in use).
            param.__class__ = type(param).__bases__[1]
