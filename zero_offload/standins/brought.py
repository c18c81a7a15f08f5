"""Functions on the values of parameters at rest, outside of forward: each runs on a copy of these parameters alone.

`run_on_copies` reads a parameter for one function, and writes it back where the function has changed it. So a loop over
all parameters holds one at a time. The owner reads and writes (`ParamSource`).

[Note: values for a change]
A 16-bit value is the rounded half of an fp32 master. A small change of it alone would vanish. So a function that
changes parameters gets fp32 masters of all parameters among its arguments, and the value is rounded from the result. A
parameter without a master has its value widened beside those that have one, and beside those in fp32.

[Note: what autograd saves of a parameter at rest]
A saved copy would stay until backward. So the parameter is saved in the place of its copy, with its version. Backward
reads it again, and raises where it was changed in between, as torch does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from zero_offload.base.errors import ZeroOffloadError
from zero_offload.base.trees import leaves_in, mapped
from zero_offload.plan.quantized import is_wrapper, library_class, tensors_of
from zero_offload.standins.operations import (
    ADDRESSES,
    OPERATIONS,
    Kind,
    changed_by,
    has_operators,
    is_collective,
    kind_of,
    name_of,
    named,
    wait_for,
)
from zero_offload.standins.owners import AtRest, dropped_error, owner_of
from zero_offload.standins.refusals import (
    changes,
    converts_module,
    described,
    draws_beside,
    needs_data,
    no_conversion,
    no_step_of_others,
)
from zero_offload.standins.sources import Owner
from zero_offload.standins.views import Assignments, View, Watch, WritesLentError, storage_of, wrap_views

Show = Callable[[Tensor, nn.Parameter], Tensor]
"""show(view, param): what the program gets for a view of a copy of `param`."""

_COPIED = ("numpy", "tolist", "__array__", "__dlpack__")
"""Of the functions that read memory past torch's operations, those that a copy serves."""
_NOT_OF_VALUES = frozenset(("requires_grad_", "detach_", "share_memory_", "rename_", "__setstate__"))
"""Changes of the tensor object: a copy would take them with it."""
_COPIES = frozenset(("clone", "to", "float", "double", "cpu", "cuda", "copy_"))
"""Functions that give the values themselves, as a copy."""
_ACCUMULATES = frozenset(
    ("add", "sub", "mul", "div", "lerp", "addcmul", "addcdiv", "iadd", "isub", "imul", "itruediv", "true_divide")
)
"""Changes that are small beside the value in an average or a decay."""
_HALF = (torch.bfloat16, torch.float16)


def run_on_copies(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], show: Show, changed: frozenset[int] = frozenset()
) -> Any:
    """The function's result, with parameters at rest and views of them among its arguments. `changed`: parameters that
    it changes though nothing says so, by id.
    """
    if (calls := _one_by_one(func, args, kwargs)) is not None:
        results = [func(*each, **names) for each, names in calls]
        return None if results[0] is None else [result for each in results for result in each]
    run = _CallOnCopies(func, args, kwargs, changed)
    given, names = mapped((AtRest, View), run.given, args), mapped((AtRest, View), run.given, kwargs)
    if run.is_wide:
        given, names = mapped(Tensor, run.widened, given), mapped(Tensor, run.widened, names)
    if func in named("__dlpack__"):
        return run.capsule(given, names)
    try:
        with run.saving(), run.drawing(), run.watching():
            result = func(*given, **names)
    except WritesLentError as error:
        # Nothing is written yet: it begins again, with what a change needs.
        return run_on_copies(func, args, kwargs, show, changed | {id(error.param)})
    if is_collective(func):
        wait_for(result)
    run.write()
    return run.shown(result, show)


def _one_by_one(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> list[tuple[tuple[Any, ...], dict[str, Any]]] | None:
    """The calls for each element of the lists that a foreach function takes, so that one parameter is here at a time.
    None for other functions, and for lists of one element or of different lengths."""
    if not name_of(func).startswith("_foreach_"):
        return None
    values = (*args, *kwargs.values())
    lengths = {len(each) for each in values if isinstance(each, list | tuple)}
    if len(lengths) != 1 or lengths == {1}:
        return None
    (count,) = lengths

    def element(value: Any, index: int) -> Any:
        if isinstance(value, list | tuple):
            return [value[index]]
        if isinstance(value, Tensor) and value.dim() == 1 and value.numel() == count:
            return value[index : index + 1]  # a number for each
        return value

    return [
        (tuple(element(each, index) for each in args), {name: element(each, index) for name, each in kwargs.items()})
        for index in range(count)
    ]


class Same(torch.autograd.Function):
    """Another tensor in the place of one, with its place in the graph."""

    @staticmethod
    def forward(ctx: Any, source: Tensor, make: Callable[[], Tensor]) -> Tensor:
        return make()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None


def linked(source: Tensor, make: Callable[[], Tensor]) -> Tensor:
    """`make()`, which passes its gradient on to `source` where autograd records."""
    with torch._C.DisableTorchFunctionSubclass():
        if not (torch.is_grad_enabled() and source.requires_grad):
            return make()
        # A mode that raises inside of `apply`, such as FakeTensorMode, would end the process.
        with _disable_current_modes() if torch._C._len_torch_dispatch_stack() else nullcontext():
            return cast(Tensor, Same.apply(source, make))  # type: ignore[no-untyped-call]


class _Brought:
    """The values of one parameter."""

    def __init__(self, param: nn.Parameter, owner: Owner, values: Tensor) -> None:
        self.param = param
        self.owner = owner
        # Not a view, of which torch refuses changes where it was made without autograd.
        self.values = _alias(values)
        self.shape, self.strides, self.dtype = values.shape, values.stride(), values.dtype
        self.storage = values.untyped_storage()._cdata

    def as_leaf(self) -> Tensor:
        """The same memory, as a leaf that requires a gradient."""
        return _alias(self.values).requires_grad_()

    def check(self, func: Any, *, is_detached: bool) -> None:
        """Raise where what the function has left cannot be written. `is_detached`: a view outside of the graph changes,
        of which autograd records the change as it does of any tensor."""
        values = self.values
        what = f"{name_of(func)} of parameter {described(self.param)},"
        if values.requires_grad and not is_detached:
            raise recorded(func, self.param)
        is_same = (values.shape, values.stride(), values.dtype) == (self.shape, self.strides, self.dtype)
        if not is_same or values.untyped_storage()._cdata != self.storage:
            raise ZeroOffloadError(
                f"{what} would give it another shape or other memory: it is not written. A parameter of an offloaded "
                f"model stays {tuple(self.shape)}; change its values (.copy_(values))"
            )


class _Draws(TorchDispatchMode):
    """Notes whether an operator draws random numbers."""

    def __init__(self, *, has_drawn: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.has_drawn = has_drawn

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.has_drawn |= torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))


class _CallOnCopies:
    """One function on copies."""

    def __init__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], more_changed: frozenset[int]) -> None:
        """Raises before anything is read where the function may not run."""
        self._func = func
        self._leaves = list(leaves_in((args, kwargs)))
        leaves: list[Any] = [leaf for leaf in leaves_in((args, kwargs)) if isinstance(leaf, AtRest | View)]
        self._params: dict[int, nn.Parameter] = {id(p): p for leaf in leaves for p in tensors_of([root_of(leaf)])}
        changed = changed_by(func, args, kwargs)
        self._kept = {id(each) for each in changed}
        """Tensors that the function itself changes."""
        self._changed = {id(root_of(each)) for each in changed if isinstance(each, AtRest | View)} | more_changed
        self._check(leaves)
        params = list(self._params.values())
        widens = any(self._owner(param).access.keeps_master(param) for param in params) or _are_mixed(params)
        self.is_wide = widens and bool(self._changed) and not any(map(_has_other_dtype, leaves))
        """True if functions get fp32 in the place of 16 bits; see [Note: values for a change]."""
        self._copies: dict[int, _Brought] = {}
        self._given: list[tuple[Any, Tensor]] = []
        self._is_linked = False
        self._draws: _Draws | None = None

    def _owner(self, param: nn.Parameter) -> Owner:
        if (owner := owner_of(param)) is None:
            raise dropped_error(param)
        return owner

    def _check(self, leaves: list[Any]) -> None:
        func, param = self._func, next(iter(self._params.values()))
        name = name_of(func)
        if converts_module() or func is Tensor.share_memory_:
            raise no_conversion(param)
        for each in self._params.values():
            owner = self._owner(each)
            # A step that computes with tensors of its own takes copies here, and writes its result.
            is_copied = name in _COPIES if not self._changed else name == "copy_" and len(self._params) == 1
            if not is_copied and (error := no_step_of_others(described(each), owner)) is not None:
                raise error
        unknown = kind_of(func) is Kind.UNKNOWN or (func in named(*ADDRESSES) and func not in named(*_COPIED))
        if unknown:
            raise needs_data(func, param)
        for root in map(root_of, leaves):
            if id(root) in self._changed:
                check_change(func, root)

    # Copies

    def copy_of(self, param: nn.Parameter) -> _Brought:
        if (found := self._copies.get(id(param))) is None:
            access = self._owner(param).access
            values = access.read_value(param, master=self.is_wide and access.keeps_master(param))
            if self.is_wide and values.dtype in _HALF:
                values = values.float()
            found = self._copies[id(param)] = _Brought(param, self._owner(param), values)
        return found

    def given(self, leaf: Any) -> Tensor:
        """The tensor that the function gets."""
        for known, tensor in self._given:
            if known is leaf:
                return tensor
        tensor = self._made(leaf)
        self._given.append((leaf, tensor))
        return tensor

    def _made(self, leaf: Any) -> Tensor:
        if is_wrapper(leaf):
            names, context = leaf.__tensor_flatten__()
            inner = {name: self._made(getattr(leaf, name)) for name in names}
            whole: Tensor = library_class(leaf).__tensor_unflatten__(inner, context, leaf.size(), leaf.stride())
            return whole
        root = root_of(leaf)
        if isinstance(leaf, View):
            Assignments.check((leaf,))
            leaf.check_recorded()
        copy = self.copy_of(root)
        if id(root) in self._changed:
            # torch itself refuses changes of a leaf, and of its views, while it records.
            return _view_like(leaf, copy.as_leaf() if _records(leaf) else copy.values)
        self._is_linked = self._is_linked or _records(leaf)
        return linked(leaf, lambda: _view_like(leaf, copy.values.detach()))

    def widened(self, tensor: Tensor) -> Tensor:
        """Other operands of 16 bits, exactly: some functions take one dtype alone."""
        is_plain = type(tensor) in (Tensor, nn.Parameter) and tensor.dtype in _HALF
        return tensor.float() if is_plain and id(tensor) not in self._kept else tensor

    # Autograd

    def saving(self) -> AbstractContextManager[Any]:
        """Hooks by which autograd saves the parameter in the place of a copy."""
        autograd: Any = torch._C._autograd
        if not self._is_linked or not autograd._saved_tensors_hooks_is_enabled():
            return nullcontext()
        return saved_tensors_hooks(_AtRestPacker(self._copies.values()), _unpack)

    def drawing(self) -> AbstractContextManager[Any]:
        """Notes whether random numbers are drawn for a change that other ranks make too."""
        changed = (param for key, param in self._params.items() if key in self._changed)
        is_shared = any(self._owner(param).access.is_shared for param in changed)
        self._draws = _Draws(has_drawn=draws_beside()) if is_shared else None
        return self._draws or nullcontext()

    def watching(self) -> AbstractContextManager[Any]:
        """A function in Python says by its operators alone what it changes."""
        unknown = [(copy.values, copy.param) for key, copy in self._copies.items() if key not in self._changed]
        return Watch(unknown) if unknown and has_operators(self._func) else nullcontext()

    # Results

    def write(self) -> None:
        """Changed copies replace the values at rest."""
        changed = [copy for key, copy in self._copies.items() if key in self._changed]
        for copy in changed:
            views = [leaf for leaf, _ in self._given if root_of(leaf) is copy.param and id(leaf) in self._kept]
            copy.check(self._func, is_detached=bool(views) and all(isinstance(leaf, View) for leaf in views))
            if copy.values.requires_grad:
                for leaf in views:
                    leaf.is_recorded = True
        for copy in changed:
            access = copy.owner.access
            if self._accumulates and not access.keeps_master(copy.param):
                access.note_rounding(copy.param)
            is_drawn = self._draws is not None and self._draws.has_drawn
            values, of_16_bits = copy.values.detach(), self._copies_16_bits(copy.param)
            access.write_value(copy.param, values, of_16_bits=of_16_bits, is_drawn=is_drawn)

    def _copies_16_bits(self, param: nn.Parameter) -> bool:
        """True if the function copies plain 16-bit values in."""
        given = [leaf for leaf in self._leaves if isinstance(leaf, Tensor) and root_of(leaf) is not param]
        plain = all(not isinstance(leaf, AtRest | View) and leaf.dtype == _dtype(param) for leaf in given)
        return self.is_wide and name_of(self._func) in ("copy_", "_foreach_copy_") and bool(given) and plain

    @property
    def _accumulates(self) -> bool:
        return name_of(self._func).strip("_").removeprefix("foreach_") in _ACCUMULATES

    def shown(self, result: Any, show: Show) -> Any:
        """The result for the program: what it gave, and views of the parameters, without memory."""
        leaves = {id(tensor): leaf for leaf, tensor in self._given}
        sources = [(copy.values, copy.param) for copy in self._copies.values()]

        def wrap(tensor: Tensor, param: nn.Parameter) -> Tensor:
            if tensor.dtype != _dtype(param) and self.is_wide:
                like = torch.empty_strided(tensor.size(), tensor.stride(), dtype=_dtype(param), device="meta")
                return linked(tensor, lambda: show(like, param))
            return show(tensor, param)

        with torch._C.DisableTorchFunctionSubclass():
            if any(result is tensor for _, tensor in self._given):
                leaf = leaves[id(result)]
                # The change of a detached view is in the graph by its result alone.
                return leaf if not result.requires_grad or requires_grad(leaf) else wrap(result, root_of(leaf))
            own = {id(tensor) for _, tensor in self._given}
            if isinstance(result, tuple | list) and any(id(each) in own for each in result):
                return mapped(Tensor, lambda each: leaves.get(id(each), each), result)
            return wrap_views(result, sources, wrap)

    def capsule(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A capsule that says that its memory is for reading. NumPy makes one; torch's says nothing."""
        tensor = args[0]
        try:
            array = tensor.numpy()
        except TypeError as error:
            raise ZeroOffloadError(
                f"a DLPack capsule of parameter {described(root_of(self._given[0][0]))}, would not refuse writes, "
                f"which would be lost ({error}). Take a copy (.clone())"
            ) from None
        array.setflags(write=False)
        # It is for reading whatever is asked; NumPy has no such argument, torch 2.15 has one.
        kwargs = {name: value for name, value in kwargs.items() if name not in ("stream", "read_only")}
        return array.__dlpack__(*args[1:], **kwargs)


def check_change(func: Any, param: nn.Parameter) -> None:
    """Raise unless the function may change a parameter at rest."""
    is_setter = name_of(func) != getattr(func, "__name__", "") and not isinstance(func, OPERATIONS)
    if is_wrapper(param) or name_of(func) in _NOT_OF_VALUES or is_setter:
        raise changes(func, param)
    if (owner := owner_of(param)) is None:
        raise dropped_error(param)
    if obstacle := owner.access.obstacle_to_writing(param):
        raise changes(func, param, obstacle)


def recorded(func: Any, param: nn.Parameter) -> ZeroOffloadError:
    """The error for a change that autograd records, of a parameter that requires no gradient."""
    return ZeroOffloadError(
        f"{name_of(func)} of parameter {described(param)}, would make it a result that autograd records: it is not "
        "written. Change a parameter in 'with torch.no_grad():'"
    )


def _alias(values: Tensor) -> Tensor:
    with torch.inference_mode(False), torch.no_grad():
        empty = torch.empty(0, dtype=values.dtype, device=values.device)
        return empty.set_(values.untyped_storage(), values.storage_offset(), values.size(), values.stride())


def root_of(leaf: Any) -> nn.Parameter:
    """The parameter that a leaf is, or of which it is a view."""
    return cast(nn.Parameter, leaf.param if isinstance(leaf, View) else leaf)


def requires_grad(tensor: Tensor) -> bool:
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.requires_grad


def _records(leaf: Tensor) -> bool:
    return torch.is_grad_enabled() and requires_grad(leaf)


def _dtype(tensor: Tensor) -> torch.dtype:
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.dtype


def _are_mixed(params: Iterable[nn.Parameter]) -> bool:
    """True if some have fp32 and others 16 bits. Functions that take one dtype alone, such as `lerp_`, refuse them."""
    dtypes = set(map(_dtype, params))
    return torch.float32 in dtypes and not dtypes.isdisjoint(_HALF)


def _has_other_dtype(leaf: Tensor) -> bool:
    return isinstance(leaf, View) and _dtype(leaf) != _dtype(leaf.param)


def _view_like(leaf: Any, values: Tensor) -> Tensor:
    """The elements of a parameter's values that a view of it shows; of another dtype where the values are widened."""
    if not isinstance(leaf, View):
        return values
    with torch._C.DisableTorchFunctionSubclass():
        size, strides, dtype, begin = leaf.size(), leaf.stride(), leaf.dtype, leaf.begin
        own = leaf.param.dtype
    if dtype != own:
        values = values.as_strided((values.numel(),), (1,)).view(dtype)
    return values.as_strided(size, strides, begin)


# Tensors that autograd saves


class _SavedAtRest(NamedTuple):
    """A view of a parameter at rest."""

    param: nn.Parameter
    version: int
    dtype: torch.dtype
    size: torch.Size
    strides: tuple[int, ...]
    begin: int


class _SavedAsItIs(NamedTuple):
    """Another tensor, detached: a node that saved its own output would hold itself in memory through it."""

    tensor: Tensor
    version: int


class _AtRestPacker:
    """Packs what one function saves."""

    def __init__(self, copies: Any) -> None:
        self._params = {copy.storage: copy.param for copy in copies}
        self._users = torch._C._autograd._top_saved_tensors_default_hooks(True)

    def __call__(self, tensor: Tensor) -> Any:
        storage = storage_of(tensor)
        param = None if storage is None else self._params.get(storage._cdata)
        if param is not None:
            begin = int(tensor.storage_offset())
            return _SavedAtRest(param, _version(param), tensor.dtype, tensor.size(), tensor.stride(), begin)
        if self._users is not None:
            return self._users[0](tensor), self._users[1]
        return _SavedAsItIs(tensor.detach(), tensor._version)


def _version(param: nn.Parameter) -> int:
    with torch._C.DisableTorchFunctionSubclass():
        return param._version


def _unpack(packed: Any) -> Tensor:
    if isinstance(packed, _SavedAsItIs):
        if packed.tensor._version != packed.version:
            raise changed_in_place(tuple(packed.tensor.shape), packed.tensor._version, packed.version)
        return packed.tensor
    if not isinstance(packed, _SavedAtRest):
        found, unpack = packed
        return cast(Tensor, unpack(found))
    param, version, dtype, size, strides, begin = packed
    if _version(param) != version:
        raise changed_in_place(tuple(size), _version(param), version)
    if (owner := owner_of(param)) is None:
        raise dropped_error(param)
    values = owner.access.read_value(param)
    if values.dtype != dtype:
        values = values.as_strided((values.numel(),), (1,)).view(dtype)
    return values.as_strided(size, strides, begin)


def changed_in_place(shape: tuple[int, ...], version: int, expected: int) -> RuntimeError:
    """An error in autograd's words; autograd leaves this check to the pack hook."""
    return RuntimeError(
        f"one of the variables needed for gradient computation has been modified by an inplace operation: a tensor "
        f"of shape {shape} is at version {version}, backward expected version {expected}. An optimizer step between "
        "a forward and its backward does this too"
    )
