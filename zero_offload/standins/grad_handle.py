"""`.grad` of a parameter whose gradient rests elsewhere: a tensor without memory that `GradSource` answers for.

It stands for the gradient that the next step uses: reduced, unscaled, fp32. Norms come from the sums that are known;
scaling is a factor that the step multiplies by. So torch's clipping, a loss scaler and loggers of norms work, and no
gradient moves. Clamping changes the gradient where it rests. Any other operation gets a copy of the elements, and what
it changes there is written back. A view is a handle too, and writes to its root. A handle ends with its gradient, where
a step uses it. Where the program drops it, the handle has its values, and is an ordinary tensor from then on.

Where ranks divide a gradient, an operation in place that takes each element by itself runs on this rank's part. Others
get all elements, and are collective.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from zero_offload.base.alike import hash_of
from zero_offload.base.errors import ZeroOffloadError
from zero_offload.standins.operations import Kind, changed_by, kind_of, named
from zero_offload.standins.owners import dropped_error
from zero_offload.standins.sources import GradLife, GradSource
from zero_offload.standins.standin import WithViews, answering, wrapper

_data: Any = Tensor.data


class GradHandle(WithViews):
    """The gradient of `param`, which is held until `life` ends, or a view of it."""

    __slots__ = ("_access", "_born", "_root", "life", "param")

    param: nn.Parameter
    life: GradLife
    _access: weakref.ref[GradSource]
    _root: GradHandle | None
    _born: int | None
    """Of a view, and of a tensor that `detach` gave: how many assignments to `.data` there were before."""

    @staticmethod
    def of(param: nn.Parameter, access: weakref.ref[GradSource], life: GradLife) -> GradHandle:
        make: Any = Tensor._make_wrapper_subclass
        with torch._C.DisableTorchFunctionSubclass():
            # On meta for C++, which then finds no address that it might read; asked for its device it is the
            # parameter's.
            handle: GradHandle = make(
                GradHandle, param.size(), dtype=torch.float32, device="meta", dispatch_device=True
            )
        handle.param, handle.life, handle._access, handle._root = param, life, access, None
        handle._born = None
        return handle

    def view_at(self, of: Tensor) -> Tensor:
        size, strides, offset = of.size(), of.stride(), of.storage_offset()
        made: GradHandle = wrapper(
            GradHandle,
            size,
            strides=strides,
            storage_offset=offset,
            dtype=of.dtype,
            device="meta",
            dispatch_device=True,
        )
        made.param, made.life, made._access, made._root = self.param, self.life, self._access, self
        made._born = self.life.assignments
        return made

    def within(self, values: Tensor) -> Tensor:
        self.check_born()
        return super().within(values)

    def check_born(self) -> None:
        """Raise where this is from before an assignment to `.data`, and would show the old values in plain torch."""
        if self._born is not None and self._born != self.life.assignments:
            raise ZeroOffloadError(
                f"a view of {self.describe()} is from before an assignment to its .data, and the values of that time "
                "are gone. Keep a copy to come back to: before = param.grad.clone()"
            )

    @property
    def kept(self) -> Tensor | None:
        """Its elements, host memory, if the gradient was dropped and this has the values."""
        if self.life.kept is None:
            return None
        return self.within(self.life.kept)

    @property
    def access(self) -> GradSource:
        """Those that hold the gradient. Raises ZeroOffloadError where it is over, or not complete."""
        access = self._access()
        if access is None:
            raise dropped_error(self.param)
        self.check_born()
        access.check_held(self.param, self.life)
        return access

    def read(self) -> Tensor:
        if self.life.kept is not None:
            return self.life.kept.to(_device(self))
        return self.access.read(self.param)

    def write(self, values: Tensor) -> None:
        if values.shape != self.shape:
            raise ZeroOffloadError(
                f"{self.describe()} was to have shape {tuple(values.shape)}; it keeps its own, {tuple(self.shape)}"
            )
        if self.life.kept is not None:
            self.life.kept.copy_(values)
            torch.autograd.graph.increment_version(self.life.kept)  # a dispatch counts none
            return
        self.access.write(self.param, values)

    def refuse(self, what: str) -> ZeroOffloadError:
        """The error for what goes to memory past torch's operations."""
        access = self._access()
        return dropped_error(self.param) if access is None else access.refuse(self.param, what)

    def describe(self) -> str:
        access = self._access()
        return "a gradient" if access is None else f"the gradient of {access.name_of(self.param)}"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name, kwargs, first = func.overloadpacket.__name__, kwargs or {}, args[0] if args else None
        if name in _OF_LISTS:
            return _OF_LISTS[name](func, *args, **kwargs)
        if name in _OF_ONE and isinstance(first, GradHandle) and (first.life.kept is None or name in _OF_ALL):
            answer = _OF_ONE[name](first, *args[1:], **kwargs)
            if answer is not NotImplemented:
                return answer
        if func._can_decompose():  # in inference mode, which does not do so by itself
            return func.decompose(*args, **kwargs)
        if name.startswith("_foreach_"):
            return _one_by_one(func, args, kwargs)
        if torch.Tag.inplace_view in func.tags and isinstance(first, GradHandle):
            raise first.refuse(name)
        if kind_of(func) is Kind.VIEW and isinstance(first, GradHandle):
            return _viewed(func, first, args[1:], kwargs)
        if (root := _takes_each_element(func, args, kwargs)) is not None:
            return _run_on_part(func, root, args, kwargs)
        return cls.run(func, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        copy = memo[id(self)] = self.clone()
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.clone().__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"GradHandle(shape={tuple(self.shape)}, the gradient of {self.param!r})"

    def __format__(self, spec: str) -> str:
        if self.dim() == 0:
            return format(self.item(), spec)
        if spec:
            raise TypeError("unsupported format string passed to Tensor.__format__")  # torch's words
        return repr(self)


def _handles(tree: Any) -> Iterator[GradHandle]:
    return (each for each in tree_leaves(tree) if isinstance(each, GradHandle))


# Elements


def _viewed(func: Any, handle: GradHandle, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The views that an operator makes, of which no element is needed."""
    root = handle.root()
    with torch._C.DisableTorchFunctionSubclass():
        stands_for = handle.within(torch.empty(root.size(), dtype=root.dtype, device="meta"))
    return tree_map_only(Tensor, root.view_at, func(stands_for, *args, **kwargs))


def _takes_each_element(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> GradHandle | None:
    """The gradient that an operator changes element by element, if ranks divide it."""
    if torch.Tag.pointwise not in func.tags and func.overloadpacket.__name__ not in _ELEMENTWISE:
        return None
    changed = [each for each in changed_by(func, args, kwargs) if isinstance(each, Tensor)]
    root = changed[0] if len(changed) == 1 and changed[0] is args[0] else None
    if not isinstance(root, GradHandle) or root._root is not None or root.life.kept is not None:
        return None
    return root if root.access.span(root.param) is not None else None


_ELEMENTWISE = frozenset(
    (
        *("abs_", "copy_", "copysign_", "fill_", "masked_fill_", "threshold_", "zero_"),
        *("eq_", "ne_", "lt_", "le_", "gt_", "ge_"),
    )
)
"""Operators to which torch gives no tag that says so."""


def _run_on_part(func: Any, root: GradHandle, args: tuple[Any, ...], kwargs: dict[str, Any]) -> GradHandle:
    """An operator in place on this rank's elements of a gradient alone."""
    access, span = root.access, root.access.span(root.param)
    assert span is not None
    elements = access.read_part(root.param)

    def part(each: Tensor) -> Tensor:
        if each is root:
            return elements
        values = each.root().read() if isinstance(each, GradHandle) else each
        values = each.within(values) if isinstance(each, GradHandle) else values
        return values if values.dim() == 0 else values.expand(root.shape).reshape(-1)[span]

    with answering():
        func(*tree_map_only(Tensor, part, args), **tree_map_only(Tensor, part, kwargs))
    given = (hash_of(each) if type(each) is Tensor else repr(each) for each in tree_leaves((args[1:], kwargs)))
    access.write_part(root.param, elements, f"{func}({', '.join(given)})")
    return root


def _one_by_one(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An operator on lists, for one of each at a time: copies of all gradients may not fit."""
    num = max(len(each) for each in args if isinstance(each, list | tuple))
    if num <= 1:
        return GradHandle.run(func, args, kwargs)
    scalars = next((place for place, each in enumerate(func._schema.arguments) if each.name == "scalars"), None)
    found = list[Any]()
    for index in range(num):
        mine = [
            each[index : index + 1] if isinstance(each, list | tuple) or place == scalars else each
            for place, each in enumerate(args)
        ]
        with answering():
            found += func(*mine, **kwargs) or ()
    return found if func._schema.returns else None


# One gradient, where no element is needed; NotImplemented where some are


def _device(handle: GradHandle) -> torch.device:
    with torch._C.DisableTorchFunctionSubclass():
        return handle.param.device


def _detach(handle: GradHandle) -> Tensor:
    access = handle._access()
    if access is None and handle.life.kept is None:
        raise dropped_error(handle.param)
    handle.check_born()
    if handle._root is not None:
        with torch._C.DisableTorchFunctionSubclass():
            return handle._root.view_at(handle)
    made = GradHandle.of(handle.param, handle._access, handle.life)
    made._born = handle.life.assignments
    return made


def _norm(
    handle: GradHandle,
    ord: float = 2,
    dim: Any = None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Any:
    whole = dim is None or len(dim) in (0, handle.dim())
    if handle._root is not None or not whole or keepdim or not ord >= 0:
        return NotImplemented
    norm = handle.access.norm(handle.param, float(ord))
    return norm if dtype is None else norm.to(dtype)


def _mul_(handle: GradHandle, factor: Any, *, divides: bool = False) -> Any:
    if handle._root is not None or not (type(factor) is float or _is_number(factor)):
        return NotImplemented
    handle.access.scale(handle.param, factor if isinstance(factor, Tensor) else float(factor), divides=divides)
    return handle


def _div_(handle: GradHandle, divisor: Any, *, rounding_mode: str | None = None) -> Any:
    return _mul_(handle, divisor, divides=True) if rounding_mode is None else NotImplemented


def _is_number(each: Any) -> bool:
    """True for a number, or a tensor that is not a gradient and has one element."""
    if isinstance(each, Tensor):
        return each.numel() == 1 and not isinstance(each, GradHandle) and not each.is_complex()
    return not isinstance(each, complex)


def _clamp_(handle: GradHandle, min: Any = None, max: Any = None) -> Any:
    if handle._root is not None or not all(each is None or _is_number(each) for each in (min, max)):
        return NotImplemented
    access = handle.access
    if access.is_zeroed(handle.param):
        return NotImplemented
    low, high = (None if each is None else float(each) for each in (min, max))
    access.clamp([handle.param], low, high)
    return handle


def _zero_(handle: GradHandle) -> Any:
    if handle._root is not None:
        return NotImplemented
    handle.access.zero([handle.param])
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
_OF_ALL = frozenset(("device", "detach", "is_pinned"))
"""Those that a handle which has its values answers too."""


# Lists of gradients, ordinary ones among them: torch itself passes handles one by one


def _each(name: str, func: Any, grads: list[Tensor], *args: Any, **kwargs: Any) -> Any:
    """`name` of each; further arguments may be lists of one for each."""
    if any(isinstance(each, list | tuple) and isinstance(each[0], Tensor) for each in args):
        return _one_by_one(func, (grads, *args), kwargs)
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
        is_finite = handle.isfinite().all() if handle.life.kept is not None else handle.access.is_finite(handle.param)
        if not is_finite:
            found_inf.fill_(1.0)
            break
    for handle in _handles(grads):
        torch.ops.aten.mul_(handle, inv_scale)


_OF_LISTS: dict[str, Callable[..., Any]] = {
    "_foreach_norm": partial(_each, "linalg_vector_norm"),
    "_foreach_mul_": partial(_each, "mul_"),
    "_foreach_div_": partial(_each, "div_"),
    "_foreach_clamp_min_": partial(_each, "clamp_min_"),
    "_foreach_clamp_max_": partial(_each, "clamp_max_"),
    "_foreach_zero_": partial(_each, "zero_"),
    "_amp_foreach_non_finite_check_and_unscale_": _check_and_unscale_,
}


# Functions on the tensor object


def _set_data(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    handle, values = args
    if handle.shape != values.shape:
        raise handle.refuse(f"a .data of shape {tuple(values.shape)} in place of {tuple(handle.shape)}")
    if handle._born is not None:
        raise handle.refuse("an assignment to the .data of a view")
    if isinstance(values, GradHandle) and values.life is not handle.life and values.life.kept is None:
        raise handle.refuse(f"an assignment of {values.describe()} to .data, which shares it,")
    if values is not handle:
        handle.copy_(values)
        handle.life.assignments += 1
        if not isinstance(values, GradHandle) and handle.life.kept is None:
            handle.access.note_given(handle.param, values)


GradHandle.as_they_are = frozenset(Kind) - {Kind.ADDRESS}
GradHandle.answers = {}
GradHandle.own = {
    **dict.fromkeys(named("share_memory_", "pin_memory", "set_"), GradHandle.refused),
    **dict.fromkeys(named("numpy", "tolist", "__array__"), GradHandle.run),
    _data.__set__: _set_data,
}
"""Those in the first row go to memory past torch's operations, like addresses; arrays and lists get a copy."""
