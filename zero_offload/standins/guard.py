"""The class of an offloaded parameter while no forward or backward uses it.

A tensor whose storage is away must not be read: on a CPU that is a fault, on a GPU it is freed memory. So at rest a
parameter's class is `GuardedParameter` (switched like torch.nn.UninitializedParameter's, no attribute added), whose
`__torch_function__` asks the owner about every function. No table lists the functions that need data. Where the data is
away, a function runs on an `Away` in the parameter's place: a tensor without memory. What it asks of shape, dtype and
device is answered, views are views without memory, and the first operation that would read data raises. The hooks
switch the class to plain `nn.Parameter` for the time a unit is in use.

[Note: quantized weights in use]
Libraries keep views of a quantized weight from forward to backward where no hook sees them. Such a view would hold its
unit in memory. So a frozen parameter that keeps its dtype stays guarded while its unit is in use. Views of it have no
memory then either (`Away`). Each operation makes them from the parameter, in forward and in backward, for which the
unit is fetched. A tensor subclass that consists of several parameters (`wraps`) is never plain: each operation gets
one that consists of them as they are now.

[Note: views for reading]
Views of parameters that are handed out outside of forward and backward are for reading. What is written to one is lost
where the parameter only visits memory. Where it rests there, it is one half of an fp32 master. With the other half of
the old master it makes a number that no operation has computed, maybe NaN. So these views have a class that computes
like a plain tensor's, and raises before it changes anything. NumPy's arrays of them refuse writes too. Addresses
(`data_ptr()`, DLPack) are not protected.
"""

from __future__ import annotations

import copy
import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import FrameType
from typing import Any, NoReturn, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from zero_offload.base.errors import ZeroOffloadError
from zero_offload.base.trees import leaves_in, mapped
from zero_offload.plan.quantized import is_wrapper, is_wrapper_class, library_class, tensors_of
from zero_offload.plan.tensor_parallel import is_dtensor
from zero_offload.standins.derived import Derived
from zero_offload.standins.owners import Owner, Touched, dropped_error, owner_of

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
    *("is_conj", "is_same_size", "has_names", "register_hook"),
    *("is_pinned", "is_set_to", "dim_order", "retain_grad", "__len__", "__hash__", "__dir__"),
)
_FACTORIES = (
    *("empty_like", "full_like", "ones_like", "rand_like", "randint_like", "randn_like", "zeros_like"),
    *("new_empty", "new_empty_strided", "new_full", "new_ones", "new_zeros"),
)
_QUESTIONS = (
    *("to", "cpu", "cuda", "xpu", "float", "double", "half", "bfloat16", "type", "type_as", "result_type"),
    *("new", "new_tensor", "view_as", "expand_as", "reshape_as", "is_same_size", "is_set_to"),
    *("is_signed", "is_neg", "is_conj"),
)
"""Those that often need no data: they are asked without it before a unit is fetched for them."""
ADDRESSES = (
    *("data_ptr", "const_data_ptr", "untyped_storage", "storage", "_typed_storage", "storage_type"),
    *("numpy", "tolist", "__array__", "__dlpack__", "as_subclass", "resize", "resize_as"),
)
"""What reads memory past torch's operations."""
_VIEWS = ("view", "t", "transpose", "permute", "expand", "unsqueeze", "squeeze")
"""What makes views, of one tensor and of numbers."""


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
    return frozenset(found)


@functools.cache
def named(*names: str) -> frozenset[Any]:
    """Functions and methods of these names."""
    found = (getattr(place, name, None) for place in (torch, Tensor) for name in names)
    return frozenset(each for each in found if each is not None)


@functools.cache
def _addresses() -> frozenset[Any]:
    return named(*ADDRESSES)


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
        Tensor.register_post_accumulate_grad_hook: _register_grad_hook,
        Tensor.detach: _detach,
        Tensor.copy_: _copy_,
        Tensor.clone: _clone,
        Tensor.item: _item,
        data.__set__: _set_data,
        Tensor.detach_: _detach_,
        Tensor.__format__: _format,
        torch._has_compatible_shallow_copy_type: _check_conversion,
    }


_Route = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
"""Runs a function that has met a parameter at rest; see `AtRest`."""


@functools.cache
def _routes() -> dict[Any, _Route]:
    """The routes of functions for which `_call` is not all."""
    takes_leaves = (torch.autograd.grad, torch.autograd.backward, Tensor.backward)
    return {
        **dict.fromkeys(named(*_FACTORIES, *_QUESTIONS), _ask_first),
        **dict.fromkeys(takes_leaves, _with_edges),
        **dict.fromkeys(_special(), _by_owner),
        **_routes_of_views(),
    }


@functools.cache
def _routes_of_views() -> dict[Any, _Route]:
    """The routes of functions that have met an `Away`."""
    return {**dict.fromkeys(named(*_VIEWS), _view), **dict.fromkeys(_harmless(), _as_it_is)}


def _as_it_is(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def _view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A view of a weight that is in use is made of its shape alone, in a quarter of the time of `_call`."""
    source = args[0] if args else None
    param: Any = source.param if isinstance(source, Away) else source
    if not (_is_in_use(param) and _may_be_made(param)):
        return _call(func, args, kwargs)
    with torch._C.DisableTorchFunctionSubclass():
        away = source if isinstance(source, Away) else Away.of_param(param)
        meta = func(away.meta, *args[1:], **kwargs)
        return Away.made(param, meta, meta.storage_offset())


def _by_owner(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The owner answers for its parameter."""
    if args and isinstance(args[0], AtRest):
        return _special()[func](*args, **kwargs)
    return _call(func, args, kwargs)


def _with_edges(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The function needs to know where in the graph a parameter is, not what it holds."""
    fills = kwargs.pop("materialize_grads", False)
    found = func(*_as_edges(args), **_as_edges(kwargs | ({"allow_unused": True} if fills else {})))
    return _filled(args, kwargs, found) if fills else found


def _ask_first(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The function is asked without data before a unit is fetched for it."""
    if not any(map(_is_in_use, args[:1])):
        try:
            answer = _answer(func, args, kwargs)
        except _NeedsDataError:
            pass
        else:
            if not any(isinstance(leaf, Away) for leaf in leaves_in([answer])):
                return answer
    return _call(func, args, kwargs)


def _as_edges(values: Any) -> Any:
    """Parameters at rest replaced by their places in the graph."""
    with torch._C.DisableTorchFunctionSubclass():
        return mapped(AtRest, get_gradient_edge, values)


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
                    f"a hook of register_post_accumulate_grad_hook has changed the gradient of {_describe(param)}, to "
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


def _register_grad_hook(param: nn.Parameter, hook: Callable[[Tensor], None]) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        watched = hook if isinstance(hook, LastHook) else ProgramHook(hook)
        handle = param.register_post_accumulate_grad_hook(watched)
        hooks: Any = param._post_accumulate_grad_hooks
    for number in [number for number, each in hooks.items() if isinstance(each, LastHook)]:
        hooks[number] = hooks.pop(number)  # C++ calls them as they were put in, whatever `move_to_end` says
    return handle


def _set_requires_grad(param: nn.Parameter, value: bool) -> None:
    owner = owner_of(param)
    if owner is not None:
        owner.places.check_requires_grad(param, value)
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
    return cast(Tensor, _call(Tensor.detach, (param,), {}))


def _clone(param: nn.Parameter, **kwargs: Any) -> Tensor:
    """A library may copy a table for state_dict()."""
    owner = owner_of(param)
    if owner is not None and owner.access.walking:
        return owner.access.copy_out(param)
    return cast(Tensor, _call(Tensor.clone, (param,), kwargs))


def _item(param: nn.Parameter) -> float:
    """A library may write a number into state_dict()."""
    owner = owner_of(param)
    if owner is not None and owner.access.walking:
        return owner.access.read_number(param)
    return cast(float, _call(Tensor.item, (param,), {}))


def _copy_(param: nn.Parameter, source: Tensor, non_blocking: bool = False) -> Tensor:
    """load_state_dict() copies into every parameter."""
    owner = owner_of(param)
    if owner is not None and owner.access.walking:
        _copy_in(param, source, owner)
        return param
    return cast(Tensor, _call(Tensor.copy_, (param, source, non_blocking), {}))


def _copy_in(param: Any, source: Any, owner: Owner) -> None:
    if not is_wrapper(param):
        owner.access.copy_in(param, source)
        return
    names, context = param.__tensor_flatten__()
    kind = library_class(param)
    if not isinstance(source, kind) or source.__tensor_flatten__() != (names, context):
        raise ZeroOffloadError(
            f"parameter {_describe(param)}, is a {kind.__name__} and cannot take the values of a "
            f"{type(source).__name__} that is quantized in another way; quantize them as the model's are"
        )
    for name in names:
        _copy_in(getattr(param, name), getattr(source, name), owner)


def _set_data(param: nn.Parameter, values: Any) -> None:
    """`model.to("cpu")` assigns what it got from the parameter, and so may a program: that changes nothing."""
    if not _is_whole(values, param):
        _call(cast(Any, Tensor.data).__set__, (param, values), {})


def _is_whole(values: Any, param: nn.Parameter) -> bool:
    """True if these are the parameter's values where they are, as `param.data` gives them."""
    if values is param or not isinstance(values, View):
        return values is param
    if isinstance(values, Away):
        return values.param is param and values.as_param
    with torch._C.DisableTorchFunctionSubclass():
        return values.is_set_to(_part_of(param))


def _detach_(param: nn.Parameter) -> nn.Parameter:
    """A leaf is detached, and then requires no gradient."""
    return _call_requires_grad_(param, False)


def _format(param: nn.Parameter, spec: str) -> str:
    return (
        format(repr(param), spec) if not spec or param.dim() else cast(str, _call(Tensor.__format__, (param, spec), {}))
    )


def _check_conversion(param: Tensor, converted: Tensor) -> bool:
    """What `module.to`, `.half()`, `.to_empty` and their kin ask before they put something else in its place."""
    if isinstance(param, AtRest):
        if not _is_whole(converted, cast(nn.Parameter, param)):
            raise _no_conversion(cast(nn.Parameter, param))
        return True
    with torch._C.DisableTorchFunctionSubclass():
        return torch._has_compatible_shallow_copy_type(param, converted)


def refuse_copy(self: object, *_: Any) -> NoReturn:
    raise ZeroOffloadError(
        "an offloaded parameter cannot be copied or pickled: its data rests elsewhere. To copy a part of the model, as "
        "peft does for modules_to_save, do it in 'with zo.gathered(module):'. To keep the model use "
        "zo.save_checkpoint(model, optimizer, path), or model.state_dict() for the weights"
    )


def _copy_of(param: nn.Parameter, memo: dict[int, Any]) -> nn.Parameter:
    """An ordinary parameter, where `zo.gathered` has fetched the values. A quantized one is of its library's class,
    and has copies of what that keeps beside it."""
    owner = owner_of(param)
    if owner is None or not owner.access.is_gathered(param):
        refuse_copy(param)
    kind: Any = library_class(param)
    with torch.no_grad():
        made = memo[id(param)] = nn.Parameter(_cloned(param), requires_grad=param.requires_grad)
    if not is_wrapper(param) and kind is not nn.Parameter:
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


_WRAPPERS = {
    "torch.nn.parallel": "DistributedDataParallel or DataParallel",
    "torch.distributed.fsdp": "fully_shard or FullyShardedDataParallel",
    "torch.distributed._composable": "replicate",
    "torch.distributed.tensor.parallel": "parallelize_module",
}
"""Names of other wrappers, by the package of their functions."""


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
            param = next((leaf for leaf in leaves_in(args) if isinstance(leaf, AtRest)), None)
            which = "an offloaded parameter" if param is None else f"parameter {_describe(cast(nn.Parameter, param))}"
            raise cannot_wrap(what, which)
        frame = frame.f_back


_ASKS_FOR_ITSELF = ("torch.distributed.", "torch.nn.parallel.")
"""Where a look at the calling frames is worth its time."""


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
        route: _Route = _routes().get(func, _call)
        return route(func, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        return _copy_of(cast(nn.Parameter, self), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _copy_of(cast(nn.Parameter, self), {}).__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        param = cast(nn.Parameter, self)
        where = "" if _owner(param) is None else f", {_describe(param)}"
        with torch._C.DisableTorchFunctionSubclass():
            shape, dtype = tuple(param.shape), param.dtype
        return f"Parameter(shape={shape}, dtype={dtype}{where})"


def _needs_other(name: str) -> Callable[[Any, Any], Any]:
    """An operator of two tensors. To None torch itself says a TypeError, which does not tell what is None, or why."""
    operator = getattr(Tensor, name)

    def call(param: nn.Parameter, other: Any) -> Any:
        if other is None:
            raise ZeroOffloadError(
                f"{name} of parameter {_describe(param)}, and None. If that is its .grad: step() uses a gradient up, "
                "where torch keeps it until zero_grad(). Read it before step(), by 'with zo.gathered(model, "
                'kind="grads") as grads:\', which gives copies by name. For code that reads .grad after step(), such '
                "as peft's update_and_allocate, docs/GUIDE.md has the lines"
            )
        return operator(param, other)

    return call


# Not the reflected ones: Python would ask them first for `x / param`, and x times a reciprocal has other bits.
for _name in ("__add__", "__sub__", "__mul__", "__truediv__"):
    setattr(AtRest, _name, _needs_other(_name))


class GuardedParameter(AtRest, nn.Parameter):  # type: ignore[misc]
    """A plain parameter at rest."""


@functools.cache
def class_at_rest(kind: type) -> type:
    """What a parameter of class `kind` has for a class at rest: the library's own, guarded. Nothing is imported."""
    if kind is nn.Parameter:
        return GuardedParameter

    def asking(method: Callable[..., Any]) -> Callable[..., Any]:
        return lambda self, *args, **kwargs: _call(method, (self, *args), kwargs)

    # These read a DTensor's part without passing through __torch_function__.
    names = ("to_local", "full_tensor", "redistribute")
    readers = {name: asking(getattr(kind, name)) for name in names if hasattr(kind, name)}

    def conversion(name: str) -> Callable[..., Any]:
        return lambda self, *args, **kwargs: _convert(getattr(Tensor, name), self, args, kwargs)

    # Libraries convert what they know of the values too: here nothing is converted.
    conversions = {name: conversion(name) for name in ("to", "cpu", "cuda", "xpu")}
    places = {"device": property(_device_of)} if is_wrapper_class(kind) else {}
    # peft dequantizes what has the library's module and name, and takes the packed values of others as they are.
    made = type(kind.__name__, (AtRest, kind), {"__slots__": ()} | readers | conversions | places)
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
        raise _no_conversion(param)
    return view


def _call(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Let each owner make its parameters readable, then run the function on the plain tensors."""
    leaves: list[Any] = [leaf for leaf in leaves_in((*args, kwargs) if kwargs else args) if isinstance(leaf, Tensor)]
    targets = changed_by(func, args, kwargs)
    if targets:
        refuse_changes(targets, func)
    by_owner: dict[int, tuple[Owner, list[nn.Parameter]]] = {}
    lent: list[tuple[Tensor, str]] = []
    is_away = is_guarded = False
    for leaf in leaves:
        param = leaf
        if isinstance(leaf, ReadOnly):
            lent.append((leaf, leaf.of))
            continue
        if isinstance(leaf, Away):
            param = leaf.param
            if not _may_be_made(param):
                is_away = True
                continue
        # Parameters that are in use as well: their units must not go while another one comes.
        if (owner := owner_of(param)) is not None:
            by_owner.setdefault(id(owner), (owner, []))[1].append(param)
        elif isinstance(param, AtRest):
            raise dropped_error(cast(nn.Parameter, param))
    for owner, owned in by_owner.values():
        tensors = tensors_of(owned)
        touched = owner.access.touch(tensors)
        if touched is Touched.OPEN:
            is_guarded = is_guarded or any(isinstance(param, AtRest) for param in owned)
            continue
        for target in targets:
            if owner_of(target) is owner:
                raise _changes(func, target)
        is_away |= touched is Touched.AWAY or any(isinstance(leaf, Away) and leaf.param in owned for leaf in leaves)
        lent += [(_part_of(tensor), owner.places.name_of(tensor)) for tensor in tensors]
    if is_guarded and not is_away:
        # A library makes what consists of others, and has functions for it, which torch.compile would begin with.
        compute = _untraced_compute() if any(map(is_wrapper, leaves)) else _compute
        result = compute(func, args, kwargs)
        return lend(result, lent) if lent else result
    if is_away:
        try:
            return _answer(func, args, kwargs)
        except _NeedsDataError as error:
            raise _needs_data(func, error.param) from None
    with torch._C.DisableTorchFunctionSubclass():
        result = func(*args, **kwargs)
        return lend(result, lent) if lent else result


_PLAIN = frozenset((Tensor, Derived))
_OPERATIONS = (torch._ops.OpOverload, torch._ops.OpOverloadPacket)


def _compute(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the function on what parameters that stay guarded in use hold now; see [Note: quantized weights in use]."""
    made: dict[int, tuple[Tensor, Any]] = {}
    shown: list[tuple[Tensor, nn.Parameter]] = []
    # What reads memory past operations takes no subclass. Neither does an operation of a library under autocast: in
    # Python that a subclass has called, torch casts nothing.
    of_library = isinstance(func, _OPERATIONS) and not str(func).startswith("aten.")
    is_read = func in _addresses() or (of_library and torch._C._is_any_autocast_enabled())
    derives = torch.is_grad_enabled() and not is_read

    def real(leaf: Any) -> Tensor:
        if (found := made.get(id(leaf))) is None:
            found = made[id(leaf)] = _as_it_is_now(leaf, shown, derives=derives), leaf
        return found[0]

    def run() -> Any:
        result = func(*args, **kwargs)
        # A conversion to what a parameter is already gives the parameter, which libraries may assign to the module.
        for tensor, leaf in made.values():
            if tensor is result:
                return leaf
        return wrap_views(result, shown, _away_at)

    with torch._C.DisableTorchFunctionSubclass():
        args, kwargs = mapped((AtRest, Away), real, args), kwargs and mapped((AtRest, Away), real, kwargs)
        if {type(tensor) for tensor, _ in made.values()} <= _PLAIN:
            return run()
    return run()  # what consists of others has functions of its own


@functools.cache
def _untraced_compute() -> Callable[..., Any]:
    disable: Any = torch.compiler.disable
    return cast(Callable[..., Any], disable(_compute))


def _as_it_is_now(leaf: Any, shown: list[tuple[Tensor, nn.Parameter]], *, derives: bool) -> Tensor:
    """A plain tensor, or a `Derived`, in the place of a parameter or of a view; `shown` gets what it shows."""
    view = leaf if isinstance(leaf, Away) else None
    if view is None and is_wrapper(leaf):
        names, context = leaf.__tensor_flatten__()
        inner = {name: _as_it_is_now(getattr(leaf, name), shown, derives=derives) for name in names}
        made: Tensor = library_class(leaf).__tensor_unflatten__(inner, context, leaf.size(), leaf.stride())
        return made
    if view is None and not isinstance(leaf, AtRest):
        plain: Tensor = leaf
        return plain
    param: nn.Parameter = leaf if view is None else view.param
    plain = param.detach()
    shown.append((plain, param))
    if view is not None and not view.as_param:
        in_order = plain.as_strided((plain.numel(),), (1,))
        of_dtype = plain if view.dtype == plain.dtype else in_order.view(view.dtype)
        begin = of_dtype.storage_offset() + view.storage_offset()
        plain = of_dtype.as_strided(view.size(), view.stride(), begin)
    return Derived.made(plain) if derives else plain


def _away_at(view: Tensor, param: nn.Parameter) -> Away:
    """The view of a parameter without its memory."""
    begin = int(view.storage_offset()) - int(param.storage_offset()) * param.itemsize // view.itemsize
    return Away.made(param, view, begin)


def _answer(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The function's result where it needs no data of parameters at rest. Raises _NeedsDataError where it does."""
    stand_ins: dict[int, Away] = {}
    with torch._C.DisableTorchFunctionSubclass():

        def stand_in(param: Any) -> Away:
            if is_dtensor(param):
                raise _NeedsDataError(param)
            return stand_ins.setdefault(id(param), Away.of_param(param))

        if func in named(*_FACTORIES) and is_dtensor(args[0] if args else None):
            return func(*args, **kwargs)
        args, kwargs = mapped(AtRest, stand_in, (args, kwargs))
        if func in _addresses():
            raise _NeedsDataError(next(x.param for x in leaves_in((args, kwargs)) if isinstance(x, Away)))
        if func in named("new", "new_tensor") and args and isinstance(args[0], Away):
            # They take dtype and device past the view's own answers.
            args = (torch.empty(0, dtype=args[0].dtype, device=args[0].device), *args[1:])
        try:
            result = func(*args, **kwargs)
        except RuntimeError as error:
            # Code of C++ that is not an operation has asked for the address.
            if "data is not allocated" in str(error):
                raise _NeedsDataError(next(iter(stand_ins.values())).param) from None
            raise
        params = {id(each.meta): each.param for each in stand_ins.values()}
        return mapped(Away, lambda view: params.get(id(view.meta), view), result)


class _NeedsDataError(ZeroOffloadError):
    def __init__(self, param: nn.Parameter) -> None:
        super().__init__(str(_needs_data("an operation", param)))
        self.param = param


def _needs_data(func: object, param: nn.Parameter) -> ZeroOffloadError:
    if converts_module():
        return _no_conversion(param)
    if owner_of(param) is None:
        return dropped_error(param)
    if (error := no_step_of_others(_describe(param), _owner(param))) is not None:
        return error
    return ZeroOffloadError(
        f"{name_of(func)} needs the data of parameter {_describe(param)}, outside of the model's forward. Use 'with "
        "zo.gathered(module):' to read it, 'with zo.gathered(module, mode=\"write\"):' to change it"
        + _HOW_TO_CONVERT
        * (name_of(func) in _CONVERSIONS)
    )


def _changes(func: object, param: nn.Parameter) -> ZeroOffloadError:
    if converts_module() or func is Tensor.share_memory_:
        return _no_conversion(param)
    if (error := no_step_of_others(_describe(param), _owner(param))) is not None:
        return error
    return ZeroOffloadError(
        f"{name_of(func)} changes parameter {_describe(param)}, outside of the model's forward: the change would be "
        "lost. Change it in 'with zo.gathered(module, mode=\"write\"):', or change a copy (.clone()). Steps are made "
        "by zo.AdamW, zo.SGD, ..., and not by torch.optim's" + _HOW_TO_CONVERT * (name_of(func) in _CONVERSIONS)
    )


_CONVERSIONS = frozenset(("data", "to", "float", "half", "bfloat16", "double"))
_HOW_TO_CONVERT = (
    ". precision= of zo.offload chooses the dtype. What converts parameters itself comes before zo.offload, such as "
    "peft's prepare_model_for_kbit_training"
)


def _no_conversion(param: nn.Parameter) -> ZeroOffloadError:
    with torch._C.DisableTorchFunctionSubclass():
        now = f"{param.dtype} on {param.device}"
    return ZeroOffloadError(
        f"an offloaded model keeps its dtype, its device and its memory: parameter {_describe(param)}, is {now} and "
        "stays so. Set the dtype it computes in by OffloadConfig(precision=...) and where it rests by params=...; for "
        "an ordinary model build another one, and load_state_dict(model.state_dict()) there"
    )


def converts_module() -> bool:
    """True if `nn.Module.to`, `.half()` or a similar method asks."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code is not nn.Module._apply.__code__:
        frame = frame.f_back  # type: ignore[assignment]
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


def _describe(param: nn.Parameter) -> str:
    owner = _owner(param)
    return "of a model that was deleted" if owner is None else owner.places.describe(tensors_of([param])[0])


def _name_of(param: nn.Parameter) -> str:
    owner = _owner(param)
    return "" if owner is None else owner.places.name_of(tensors_of([param])[0])


def _owner(param: nn.Parameter) -> Owner | None:
    """The runtime that offloads a parameter, or those of which it consists."""
    found = tensors_of([param])
    return owner_of(found[0]) if found else None


def _is_in_use(param: object) -> bool:
    """True if a forward or backward uses its unit now."""
    at_rest: Any = param
    owner = owner_of(at_rest) if isinstance(param, AtRest) else None
    return owner is not None and owner.access.is_in_use(at_rest)


# Views for reading, see the note above

T = TypeVar("T")

_OPERATORS = ("add", "sub", "mul", "truediv", "floordiv", "div", "mod", "pow", "and", "or", "xor", "lshift", "rshift")
_ACCESSORS = ("__get__", "__set__", "__delete__")
_CHANGING = frozenset(("__set__", "__setitem__", "__delete__", *(f"__i{name}__" for name in _OPERATORS)))


def changed_by(func: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """What a tensor function changes: `out=`, and the first argument of one that works in place."""
    name = getattr(func, "__name__", "")
    if name not in _CHANGING and (not name.endswith("_") or name.endswith("__")):
        return list(leaves_in([kwargs["out"]])) if "out" in kwargs else []
    return list(leaves_in((args[:1] or tuple(kwargs.values())[:1], kwargs.get("out"))))


def name_of(func: object) -> str:
    """A tensor function's name; properties such as `data` are functions of a descriptor."""
    name = str(getattr(func, "__name__", func))
    return str(getattr(getattr(func, "__self__", None), "__name__", name)) if name in _ACCESSORS else name


def refuse_changes(changed: Iterable[Any], func: object) -> None:
    for each in changed:
        if not isinstance(each, View):
            continue
        if name_of(func).startswith("requires_grad"):
            raise ZeroOffloadError(
                f"a view of parameter {each.of} cannot require a gradient, as nn.Parameter(p) asks for: it has no "
                "memory of its own. Use a copy, nn.Parameter(p.detach().clone()), made in 'with zo.gathered(module):'"
            )
        raise ZeroOffloadError(
            f"{name_of(func)} changes a view of parameter {each.of}, outside of the model's forward: the change would "
            "be lost. Change it in 'with zo.gathered(module, mode=\"write\"):', or change a copy (.clone())"
        )


class View(Tensor):
    """A view of a parameter, handed out where the parameter may not be changed."""

    of: str
    """The parameter's name."""


class ReadOnly(View):
    """A view that refuses changes, and whose views do."""

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if any(kind is not cls for kind in types):
            return NotImplemented  # a parameter at rest is among the arguments, and has to be asked first
        refuse_changes(changed_by(func, args, kwargs), func)
        views = [(leaf, leaf.of) for leaf in leaves_in((args, kwargs)) if isinstance(leaf, ReadOnly)]
        with torch._C.DisableTorchFunctionSubclass():
            return lend(func(*args, **kwargs), views)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return _plain(self).clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _plain(self).clone().__reduce_ex__(protocol)


def storage_of(tensor: Tensor) -> torch.UntypedStorage | None:
    """The memory that a tensor is in, if it is in one; under torch.func's transforms that of the tensor inside."""
    if tensor.layout is not torch.strided:
        return None
    try:
        return tensor.untyped_storage()
    except NotImplementedError:
        wrapped = torch._C._functorch.is_functorch_wrapped_tensor(tensor)
        return storage_of(torch._C._functorch.get_unwrapped(tensor)) if wrapped else None


def lend(result: Any, sources: Sequence[tuple[Tensor, str]]) -> Any:
    """What an operation has made of `sources` (with names); where it shares memory with them it is for reading only."""
    return wrap_views(result, sources, _read_only)


def wrap_views(result: Any, sources: Sequence[tuple[Tensor, T]], view: Callable[[Tensor, T], Tensor]) -> Any:
    """`result` with `view` in the place of each tensor that shares memory with one of `sources`."""
    storages: dict[int, list[tuple[Tensor, T]]] = {}
    for source in sources:
        if (storage := storage_of(source[0])) is not None:
            storages.setdefault(storage._cdata, []).append(source)

    def wrap(tensor: Tensor) -> Tensor:
        storage = storage_of(tensor) if type(tensor) in _PLAIN else None
        found = None if storage is None else storages.get(storage._cdata)
        if found is None:
            return tensor
        return view(tensor, (found[0] if len(found) == 1 else _under(tensor, found))[1])

    if not storages:
        return result
    if isinstance(result, Tensor | tuple):
        return mapped(Tensor, wrap, result)
    if isinstance(result, list) and result and isinstance(result[0], Tensor):
        return [wrap(each) for each in result]
    if isinstance(result, Iterator):
        return map(wrap, result)
    if (interface := getattr(result, "__array_interface__", None)) is not None:
        address = interface["data"][0]
        memory = [storage_of(found[0][0]) for found in storages.values()]
        if any(each is not None and 0 <= address - each.data_ptr() < each.nbytes() for each in memory):
            result.setflags(write=False)
    return result


def _under(view: Tensor, sources: Sequence[tuple[Tensor, T]]) -> tuple[Tensor, T]:
    """Of sources that share one buffer, the one that the view shows: the last that begins before it."""

    def begin(source: tuple[Tensor, T]) -> int:
        return int(source[0].storage_offset()) * source[0].itemsize

    at = int(view.storage_offset()) * view.itemsize
    return max([source for source in sources if begin(source) <= at] or sources, key=begin)


def _read_only(tensor: Tensor, name: str) -> Tensor:
    view = tensor.as_subclass(ReadOnly)
    view.of = name
    return view


def _plain(view: ReadOnly) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return view.detach().as_subclass(Tensor)


# Views of what is away


_META = torch.device("meta")


class Away(View):
    """A view of a parameter whose data is away: shape, strides, dtype and device, and no memory.

    To C++ it is on meta, so that no tensor can take its place (`x.data = view` raises), and asks for its device.
    """

    __slots__ = ("param", "_meta")

    param: nn.Parameter
    _meta: Tensor | None

    @property
    def of(self) -> str:  # type: ignore[override]
        return _name_of(self.param)

    @property
    def meta(self) -> Tensor:
        """A plain tensor on meta that lies as this one does, always the same."""
        if self._meta is None:
            with torch._C.DisableTorchFunctionSubclass():
                whole = torch.empty(self.param.nbytes // self.itemsize, dtype=self.dtype, device="meta")
                self._meta = whole.as_strided(self.size(), self.stride(), self.storage_offset())
        return self._meta

    @property
    def as_param(self) -> bool:
        """True if it lies as the parameter does."""
        param = self.param
        with torch._C.DisableTorchFunctionSubclass():
            same_place = self.dtype == param.dtype and self.storage_offset() == 0
            return same_place and (self.size(), self.stride()) == (param.size(), param.stride())

    @staticmethod
    def of_param(param: nn.Parameter) -> Away:
        """Stands for the parameter itself."""
        meta = torch.empty_strided(param.size(), param.stride(), dtype=param.dtype, device="meta")
        return Away.made(param, meta, 0, requires_grad=param.requires_grad)

    @staticmethod
    def made(param: nn.Parameter, like: Tensor, begin: int, *, requires_grad: bool = False) -> Away:
        """A view that lies as a plain tensor does, from the parameter's element `begin`, in elements of its own."""
        make: Any = Tensor._make_wrapper_subclass
        view: Away = make(
            Away,
            like.size(),
            like.stride(),
            begin,
            dtype=like.dtype,
            device=_META,
            requires_grad=requires_grad,
            dispatch_device=True,
        )
        view.param, view._meta = param, like if like.is_meta else None
        return view

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        route: _Route = _routes_of_views().get(func, _call)
        return route(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        views = [leaf for leaf in leaves_in((args, kwargs)) if isinstance(leaf, Away)]
        view, packet, schema = views[0], func.overloadpacket, func._schema
        device = view.param.device
        if packet is torch.ops.prim.device:
            return device
        if func._can_decompose():  # in inference mode, which does not do so by itself
            return func.decompose(*args, **kwargs)
        on_meta, names = mapped(Away, lambda each: each.meta, (args, kwargs))
        if packet.__name__ == "is_same_size":
            return func(*on_meta, **names)
        if packet.__name__ == "is_pinned":
            return False
        if len(views) == 1 and args and args[0] is view:
            to = kwargs.get("device") or device
            if packet.__name__ in _FACTORIES:
                return func(*on_meta, **{**names, "device": to})
            if packet.__name__ == "_to_copy" and to.type == "meta":
                return func(*on_meta, **names)
            if packet.__name__ == "_to_copy" and _is_as_it_is(view, kwargs.get("dtype"), to):
                return Away.made(view.param, view.meta, view.meta.storage_offset())
            if not schema.is_mutable and schema.returns and schema.returns[0].alias_info is not None:
                found = func(*on_meta, **names)
                return mapped(Tensor, lambda meta: Away.made(view.param, meta, meta.storage_offset()), found)
        raise _NeedsDataError(view.param)

    __deepcopy__ = __reduce_ex__ = refuse_copy

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Tensor(shape={tuple(self.shape)}, dtype={self.dtype}, a view of {_describe(self.param)})"


def _may_be_made(param: nn.Parameter) -> bool:
    """True if an operation may take the parameter's memory in a view's place: no gradient is lost."""
    with torch._C.DisableTorchFunctionSubclass():
        return not param.requires_grad and not is_wrapper_class(type(param))


def plain_of(tensor: Any) -> Tensor:
    """The same memory as a plain tensor, of a parameter that is guarded in use, or of what was made of one."""
    with torch._C.DisableTorchFunctionSubclass():
        return cast(Tensor, tensor.plain if type(tensor) is Derived else tensor.detach())


def _is_as_it_is(view: Away, dtype: torch.dtype | None, device: torch.device) -> bool:
    """True if a conversion changes nothing. Elements lie as they lie in their section, whatever the format."""
    own = view.param.device
    same_place = device.type == own.type and (own.type == "cpu" or device.index == own.index)
    return same_place and dtype in (None, view.dtype)


def _part_of(param: nn.Parameter) -> Tensor:
    """What this rank holds of it; asks no other rank."""
    kind: Any = type(param).__bases__[1] if isinstance(param, AtRest) else type(param)
    return cast(Tensor, kind.to_local(param)) if is_dtensor(param) else param


def unguard(params: Iterable[nn.Parameter]) -> None:
    """Make parameters plain until their unit is closed, or for good. `Unit.open` does it for a use."""
    for param in params:
        if isinstance(param, AtRest):
            param.__class__ = type(param).__bases__[1]
