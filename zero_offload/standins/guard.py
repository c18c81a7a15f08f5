"""The class of an offloaded parameter while no forward or backward uses it.

A tensor whose storage is away must not be read: on a CPU that is a fault, on a GPU it is freed memory. So at rest a
parameter's class is `GuardedParameter` (switched like torch.nn.UninitializedParameter's, no attribute added), whose
`__torch_function__` asks the owner about every function. `away.py` runs it: on the values where they are here, else on
a tensor without memory. The hooks switch the class to plain `nn.Parameter` for the time a unit is in use.
"""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable, Iterable
from multiprocessing.context import get_spawning_popen
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from zero_offload.base.errors import ZeroOffloadError
from zero_offload.base.trees import leaves_in, mapped
from zero_offload.plan.quantized import is_wrapper, is_wrapper_class, library_class
from zero_offload.plan.tensor_parallel import is_dtensor, local_part
from zero_offload.standins.away import Away, LocalPart, Route, ask, is_in_use, operate, routes_of_views
from zero_offload.standins.brought import root_of
from zero_offload.standins.derived import Derived
from zero_offload.standins.grad_hooks import register_grad_hook
from zero_offload.standins.operations import FACTORIES, QUESTIONS, named
from zero_offload.standins.owners import AtRest, owner_of
from zero_offload.standins.refusals import (
    WRAPPING_PACKAGES,
    NeedsDataError,
    check_not_wrapped,
    converts_module,
    described,
    no_conversion,
    owner_of_any,
    refuse_copy,
)
from zero_offload.standins.sources import Owner
from zero_offload.standins.views import Assignments, View


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
        Tensor.register_post_accumulate_grad_hook: register_grad_hook,
        Tensor.detach: _detach,
        Tensor.copy_: _copy_,
        Tensor.clone: _clone,
        Tensor.item: _item,
        data.__set__: _set_data,
        Tensor.detach_: _detach_,
        Tensor.__format__: _format,
        torch._has_compatible_shallow_copy_type: _check_conversion,
    }


@functools.cache
def _routes() -> dict[Any, Route]:
    """The routes of functions for which `operate` is not all."""
    takes_leaves = (torch.autograd.grad, torch.autograd.backward, Tensor.backward)
    return {
        **dict.fromkeys(named(*FACTORIES, *QUESTIONS), _ask_first),
        **dict.fromkeys(takes_leaves, _with_edges),
        **dict.fromkeys(_special(), _by_owner),
        **routes_of_views(),
        **dict.fromkeys(named("is_shared", "is_pinned"), _ask_about_memory),
    }


def _by_owner(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The owner answers for its parameter."""
    if args and isinstance(args[0], AtRest):
        return _special()[func](*args, **kwargs)
    return operate(func, args, kwargs)


def _ask_about_memory(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """The tensor object does not know of which kind its memory is, where it has none. torch asks that memory for its
    address, and ends the process where it may not. Here it is never pinned, and shared where torch says so of each."""
    with torch._C.DisableTorchFunctionSubclass():
        like = args[0].new_empty(0)
        return cast(bool, func(like, *args[1:], **kwargs))


def _with_edges(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The function needs to know where in the graph a parameter is, not what it holds."""
    fills = kwargs.pop("materialize_grads", False)
    found = func(*_as_edges(args), **_as_edges(kwargs | ({"allow_unused": True} if fills else {})))
    return _filled(args, kwargs, found) if fills else found


def _ask_first(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The function is asked without data before a unit is fetched for it."""
    if not any(map(is_in_use, args[:1])):
        try:
            answer = ask(func, args, kwargs)
        except NeedsDataError:
            pass
        else:
            if not any(isinstance(leaf, Away) for leaf in leaves_in([answer])):
                return answer
    return operate(func, args, kwargs)


def _as_edges(values: Any) -> Any:
    """Parameters at rest replaced by their places in the graph."""
    with torch._C.DisableTorchFunctionSubclass():
        return mapped(AtRest, get_gradient_edge, values)


def _filled(args: tuple[Any, ...], kwargs: dict[str, Any], found: tuple[Tensor | None, ...]) -> tuple[Tensor, ...]:
    """Zeros for missing gradients, as `torch.autograd.grad(materialize_grads=True)` gives. That function takes no
    places for inputs.
    """
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
    if value and owner is not None and owner.places.is_frozen(param):
        owner.thaw(param)
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
    return cast(Tensor, operate(Tensor.detach, (param,), {}))


def _clone(param: nn.Parameter, **kwargs: Any) -> Tensor:
    """A library may copy a table for state_dict()."""
    owner = owner_of(param)
    if owner is not None and owner.access.walking:
        return owner.access.copy_out(param)
    return cast(Tensor, operate(Tensor.clone, (param,), kwargs))


def _item(param: nn.Parameter) -> float:
    """A library may write a number into state_dict()."""
    owner = owner_of(param)
    if owner is not None and owner.access.walking:
        return owner.access.read_number(param)
    return cast(float, operate(Tensor.item, (param,), {}))


def _copy_(param: nn.Parameter, source: Tensor, non_blocking: bool = False) -> Tensor:
    """load_state_dict() copies into every parameter."""
    owner = owner_of(param)
    if owner is not None and owner.access.walking:
        _copy_in(param, source, owner)
        return param
    return cast(Tensor, operate(Tensor.copy_, (param, source, non_blocking), {}))


def _copy_in(param: Any, source: Any, owner: Owner) -> None:
    if _is_whole(source, param):
        # As in torch, whatever another name of the parameter has been given before it.
        torch.autograd.graph.increment_version(param)
        return
    if not is_wrapper(param):
        owner.access.copy_in(param, source)
        return
    names, context = param.__tensor_flatten__()
    kind = library_class(param)
    if not isinstance(source, kind) or source.__tensor_flatten__() != (names, context):
        raise ZeroOffloadError(
            f"parameter {described(param)}, is a {kind.__name__} and cannot take the values of a "
            f"{type(source).__name__} that is quantized in another way; quantize them as the model's are"
        )
    for name in names:
        _copy_in(getattr(param, name), getattr(source, name), owner)


def _set_data(param: nn.Parameter, values: Any) -> None:
    """`model.to("cpu")` assigns what it got from the parameter, and so may a program: that changes nothing. Other
    values are copied in, of the same form: the parameter keeps its memory. Those of another parameter raise, since
    plain torch makes one of both. With another shape it is not the model's any
    more, as after `resize_token_embeddings` of transformers: it is adopted anew."""
    Assignments.check((values,))
    if _is_whole(values, param):
        return
    if is_dtensor(param):
        raise ZeroOffloadError(
            f"values were assigned to .data of parameter {described(param)}, a DTensor. torch's own DTensor keeps its "
            "part then, and ignores them. Copy them in: param.data.copy_(values)"
        )
    if isinstance(values, AtRest | View) and root_of(values) is not param:
        raise ZeroOffloadError(
            f"values of parameter {described(root_of(values))}, were assigned to .data of {described(param)}. In plain "
            "torch both have one memory from then on, and a step of one changes the other; here each has its own. "
            "Assign a copy (.data.clone()), or copy in (param.data.copy_(other)); tie parameters before zo.offload"
        )
    with torch._C.DisableTorchFunctionSubclass():
        fits = (values.dtype, values.device) == (param.dtype, param.device)
        is_resized = values.shape != param.shape
    if not fits or converts_module():
        raise no_conversion(param)
    if is_resized and (owner := owner_of(param)) is not None:
        if isinstance(values, GuardedParameter | View):
            values = values.clone()
        with torch._C.DisableTorchFunctionSubclass():
            owner.release(param, values.detach())
        return
    owner = owner_of(param)
    if owner is not None:
        owner.access.note_assigned(param, None)
    with torch.no_grad():
        operate(Tensor.copy_, (param, values), {})
    Assignments.note(param)
    if owner is not None:
        owner.access.note_assigned(param, values)


def _set_(param: nn.Parameter, *source: Any, **kwargs: Any) -> nn.Parameter:
    """Another tensor's memory becomes the parameter's, as `remove_parametrizations` asks: here its values do. A method,
    since torch shows this function to no class."""
    values = kwargs.get("source", source[0] if len(source) == 1 else None)
    if not isinstance(values, Tensor):
        raise no_conversion(param)
    _set_data(param, values)
    return param


def _is_whole(values: Any, param: nn.Parameter) -> bool:
    """True if these are the parameter's values where they are, as `param.data` gives them."""
    if is_dtensor(values) and values is not param:
        values = local_part(values)
    if values is param or not isinstance(values, View):
        return values is param
    if isinstance(values, Away):
        return values.param is param and values.as_param
    with torch._C.DisableTorchFunctionSubclass():
        return values.is_set_to(param)


def _detach_(param: nn.Parameter) -> nn.Parameter:
    """A leaf is detached, and then requires no gradient."""
    return _call_requires_grad_(param, False)


def _format(param: nn.Parameter, spec: str) -> str:
    if not spec or param.dim():
        return format(repr(param), spec)
    return cast(str, operate(Tensor.__format__, (param, spec), {}))


def _check_conversion(param: Tensor, converted: Tensor) -> bool:
    """The check of `module.to`, `.half()`, `.to_empty` and their kin before they put another tensor in its place."""
    if isinstance(param, AtRest):
        if not _is_whole(converted, cast(nn.Parameter, param)):
            raise no_conversion(cast(nn.Parameter, param))
        return True
    with torch._C.DisableTorchFunctionSubclass():
        return torch._has_compatible_shallow_copy_type(param, converted)


def _copy_of(param: nn.Parameter, memo: dict[int, Any]) -> nn.Parameter:
    """An ordinary parameter. A quantized one is of its library's class, and has copies of what that keeps beside it."""
    owner = owner_of_any(param)
    if owner is None:
        refuse_copy(param)
    kind: Any = library_class(param)
    with torch.no_grad():
        made = memo[id(param)] = nn.Parameter(_cloned(param), requires_grad=param.requires_grad)
    if not is_wrapper(param) and not is_dtensor(param) and kind is not nn.Parameter:
        made.__class__ = kind
        made.__dict__.update({name: copy.deepcopy(value, memo) for name, value in vars(param).items()})
    return made


def _cloned(wrapper: Any) -> Tensor:
    """A copy that consists of plain tensors."""
    if not is_wrapper(wrapper):
        return cast(Tensor, wrapper.clone())
    names, context = wrapper.__tensor_flatten__()
    inner = {name: _cloned(getattr(wrapper, name)) for name in names}
    made: Any = library_class(wrapper).__tensor_unflatten__(inner, context, wrapper.size(), wrapper.stride())
    return cast(Tensor, made)


class _Guard(AtRest):
    """The behaviour of an offloaded parameter at rest, in place of its own class; see the module's docstring."""

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
        if caller.f_globals.get("__name__", "").startswith(WRAPPING_PACKAGES):
            check_not_wrapped(caller, args)
        route: Route = _routes().get(func, operate)
        return route(func, args, kwargs)

    __copy__ = refuse_copy  # it would share memory with the parameter

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        param = cast(nn.Parameter, self)
        if (owner := owner_of_any(param)) is not None:
            owner.check_copies(param, memo)
        return _copy_of(param, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        if is_for_new_process() and is_dtensor(self):
            refuse_copy(self)
        if type(self) is GuardedParameter and is_for_new_process():
            with torch._C.DisableTorchFunctionSubclass():
                return _without_values, (self.size(), self.stride(), self.dtype, self.requires_grad)
        return _copy_of(cast(nn.Parameter, self), {}).__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        param = cast(nn.Parameter, self)
        where = "" if owner_of_any(param) is None else f", {described(param)}"
        with torch._C.DisableTorchFunctionSubclass():
            shape, dtype = tuple(param.shape), param.dtype
        return f"Parameter(shape={shape}, dtype={dtype}{where})"


def _needs_other(name: str) -> Callable[[Any, Any], Any]:
    """An operator of two tensors. To None torch itself says a TypeError, which does not tell what is None, or why."""
    operator = getattr(Tensor, name)

    def call(param: nn.Parameter, other: Any) -> Any:
        if other is None:
            raise ZeroOffloadError(
                f"{name} of parameter {described(param)}, and None. If that is its .grad: step() uses a gradient up, "
                "where torch keeps it until zero_grad(). Read it before step(), by 'with zo.gathered(model, "
                'kind="grads") as grads:\', which gives copies by name. For code that reads .grad after step(), such '
                "as peft's update_and_allocate, docs/use/adapters.md has the lines"
            )
        return operator(param, other)

    return call


setattr(_Guard, "set_", _set_)  # noqa: B010 a type checker knows the methods of Tensor


# Not the reflected ones: Python would ask them first for `x / param`, and x times a reciprocal has other bits.
for _name in ("__add__", "__sub__", "__mul__", "__truediv__"):
    setattr(_Guard, _name, _needs_other(_name))


class GuardedParameter(_Guard, nn.Parameter):  # type: ignore[misc]
    """A plain parameter at rest."""


def is_for_new_process() -> bool:
    """True while what a process is to begin with is pickled, such as the data set of a DataLoader's worker, which may
    hold the model. It gets the modules: values would be copied for each worker, which mostly asks for a config."""
    return get_spawning_popen() is not None


def _without_values(
    size: torch.Size, strides: tuple[int, ...], dtype: torch.dtype, requires_grad: bool
) -> nn.Parameter:
    """In the new process: shape and dtype, and an error for the rest."""
    param = nn.Parameter(torch.empty_strided(size, strides, dtype=dtype, device="meta"), requires_grad)
    param.__class__ = GuardedParameter
    return param


@functools.cache
def class_at_rest(kind: type) -> type:
    """The class at rest of a parameter of class `kind`: the library's own, guarded. Nothing is imported."""
    if kind is nn.Parameter:
        return GuardedParameter

    def asking(method: Callable[..., Any]) -> Callable[..., Any]:
        return lambda self, *args, **kwargs: operate(method, (self, *args), kwargs)

    # These read a DTensor's part without passing through __torch_function__.
    names = ("to_local", "full_tensor", "redistribute")
    readers = {name: asking(getattr(kind, name)) for name in names if hasattr(kind, name)}

    def conversion(name: str) -> Callable[..., Any]:
        return lambda self, *args, **kwargs: _convert(getattr(Tensor, name), self, args, kwargs)

    # Libraries convert what they know of the values too: here nothing is converted.
    conversions = {name: conversion(name) for name in ("to", "cpu", "cuda", "xpu")}
    places = {"device": property(_device_of)} if is_wrapper_class(kind) else {}
    # peft dequantizes what has the library's module and name, and takes the packed values of others as they are.
    made = type(kind.__name__, (_Guard, kind), {"__slots__": ()} | readers | conversions | places)
    made.__module__ = kind.__module__
    return made


def _device_of(param: Any) -> torch.device:
    """Where the tensors of a wrapper are: the wrapper itself does not move."""
    if is_wrapper(param):
        return _device_of(getattr(param, param.__tensor_flatten__()[0][0]))
    with torch._C.DisableTorchFunctionSubclass():
        own_device: Any = Tensor.device
        return cast(torch.device, own_device.__get__(param))


def compile_around(params: Iterable[nn.Parameter]) -> None:
    """Tell torch.compile to run operations on these quantized weights as they are, and to compile what is between. A
    trace of this package would make weights without an owner, and end in errors of the compiler."""
    kinds = {type(param) for param in params if isinstance(param, AtRest)}
    if not kinds:
        return
    compiler: Any = torch._dynamo
    compiler.config.nontraceable_tensor_subclasses.update((*kinds, Away, Derived))
    _leave("zero_offload")
    for kind in kinds:
        if not is_wrapper_class(kind):
            # A library that keeps weights in objects of its own asks those, which no operation shows.
            _leave(kind.__module__.partition(".")[0])


@functools.cache
def _leave(package: str) -> None:
    """Tell torch.compile not to trace a package."""
    compiler: Any = torch._dynamo
    compiler.trace_rules.add(package)


def _convert(method: Callable[..., Any], param: nn.Parameter, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    if not is_wrapper(param) or not converts_module():
        return method(param, *args, **kwargs)
    # torch would put a copy into the place of a tensor subclass. A view without memory it takes for a plain tensor.
    view = method(Away.of_param(param), *args, **kwargs)
    if not _is_whole(view, param):
        raise no_conversion(param)
    return view


def unguard(params: Iterable[nn.Parameter]) -> None:
    """Make parameters plain until their unit is closed, or for good. `Unit.unguard` does it for a use."""
    for param in params:
        if isinstance(param, AtRest):
            kind = param.__class__ = type(param).__bases__[1]
            if kind is not nn.Parameter:
                LocalPart.uncover(param)
