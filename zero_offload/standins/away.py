"""Functions on parameters at rest, and `Away`, the tensor without memory that stands for one whose values are away.

`operate` lets the owner make values readable, and runs the function on them. Where they are away it runs on an `Away`.
No table lists the functions that need data. Questions of shape, dtype and device are answered, and views are views
without memory. At the first operation that would read data the function begins again, on a copy (`brought.py`).

[Note: quantized weights in use]
Libraries keep views of a quantized weight from forward to backward where no hook sees them. Such a view would hold its
unit in memory. So a frozen parameter that keeps its dtype stays guarded while its unit is in use. Views of it have no
memory then either (`Away`). Each operation makes them from the parameter, in forward and in backward, for which the
unit is fetched. A tensor subclass that consists of several parameters (`wraps`) is never plain: each operation gets a
subclass tensor of them as they are now.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Self, cast

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from zero_offload.base.errors import ZeroOffloadError
from zero_offload.base.trees import leaves_in, mapped
from zero_offload.plan.quantized import is_wrapper, is_wrapper_class, library_class, tensors_of
from zero_offload.plan.tensor_parallel import is_dtensor, local_part, replace_part
from zero_offload.standins.brought import check_change, linked, recorded, requires_grad, run_on_copies
from zero_offload.standins.derived import Derived
from zero_offload.standins.operations import (
    ADDRESSES,
    FACTORIES,
    OPERATIONS,
    QUESTIONS,
    VIEWS,
    Kind,
    changed_by,
    kind_of,
    metadata_of_params,
    name_of,
    named,
)
from zero_offload.standins.owners import AtRest, dropped_error, owner_of
from zero_offload.standins.refusals import NeedsDataError, described, no_step_of_others
from zero_offload.standins.sources import Owner, Touched
from zero_offload.standins.views import (
    PLAIN,
    Assignments,
    Lent,
    ReadOnly,
    View,
    WritesLentError,
    changes_views,
    lend,
    read_lent,
    wrap_views,
)

_META = torch.device("meta")
Route = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
"""Runs a function that has met a parameter at rest; see `AtRest`."""


class Away(View):
    """A view of a parameter whose data is away: shape, strides, dtype and device, and no memory.

    To C++ it is on meta, so that no tensor can take its place (`x.data = view` raises), and asks for its device.
    """

    __slots__ = ("born", "param", "_meta")

    param: nn.Parameter
    _meta: Tensor | None

    @property
    def begin(self) -> int:
        with torch._C.DisableTorchFunctionSubclass():
            return int(self.storage_offset())

    @property
    def meta(self) -> Tensor:
        """A plain tensor on meta that lies as this one does, always the same."""
        if self._meta is None:
            with torch._C.DisableTorchFunctionSubclass():
                whole = torch.empty(part_of(self.param).nbytes // self.itemsize, dtype=self.dtype, device="meta")
                self._meta = whole.as_strided(self.size(), self.stride(), self.storage_offset())
        return self._meta

    @property
    def as_param(self) -> bool:
        """True if it lies as the parameter does, or as the part of a DTensor."""
        part = part_of(self.param)
        with torch._C.DisableTorchFunctionSubclass():
            same_place = self.dtype == part.dtype and self.storage_offset() == 0
            return same_place and (self.size(), self.stride()) == (part.size(), part.stride())

    @staticmethod
    def of_param(param: nn.Parameter) -> Away:
        """Stands for the parameter itself, and passes its gradient on."""
        meta = torch.empty_strided(param.size(), param.stride(), dtype=param.dtype, device="meta")
        if not param.requires_grad or torch.is_grad_enabled():
            return cast(Away, linked(param, lambda: Away.made(param, meta, 0)))
        return Away.made(param, meta, 0, requires_grad=True)

    @staticmethod
    def made(param: nn.Parameter, like: Tensor, begin: int, *, requires_grad: bool = False) -> Away:
        """A view that lies as a plain tensor does, from the parameter's element `begin`, in elements of its own."""
        view = Away._without_memory(like, begin, requires_grad=requires_grad)
        view.param, view.born, view._meta = param, Assignments.count, like if like.is_meta else None
        return view

    @classmethod
    def _without_memory(cls, like: Tensor, begin: int, *, requires_grad: bool = False) -> Self:
        make: Any = Tensor._make_wrapper_subclass
        made: Self = make(
            cls,
            like.size(),
            like.stride(),
            begin,
            dtype=like.dtype,
            device=_META,
            requires_grad=requires_grad,
            dispatch_device=True,
        )
        return made

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        Assignments.check((args, kwargs))
        route: Route = routes_of_views().get(func, operate)
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
            if packet.__name__ in FACTORIES:
                return func(*on_meta, **{**names, "device": to})
            if packet.__name__ == "_to_copy" and to.type == "meta":
                return func(*on_meta, **names)
            if packet.__name__ == "_to_copy" and _is_as_it_is(view, kwargs.get("dtype"), to):
                return Away.made(view.param, view.meta, view.meta.storage_offset())
            if not schema.is_mutable and schema.returns and schema.returns[0].alias_info is not None:
                found = func(*on_meta, **names)
                return mapped(Tensor, lambda meta: Away.made(view.param, meta, meta.storage_offset()), found)
        # Collectives write on after they return.
        may_run = (func.namespace == "aten" or kind_of(func) is not Kind.WRITE) and not getattr(_asks, "now", False)
        if may_run and any(is_dtensor(each.param) for each in views):
            # The operator of a DTensor on its part: autograd has seen it already.
            return run_on_copies(func, args, kwargs, _shown)
        raise NeedsDataError(view.param)

    def __copy__(self) -> Tensor:
        return self.detach()

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return self.detach().clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.detach().clone().__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"Tensor(shape={tuple(self.shape)}, dtype={self.dtype}, a view of {described(self.param)})"


class LocalPart(Away):
    """The part of a DTensor at rest, in the place of its memory.

    torch takes a DTensor's part from the object itself, and asks no class. So each operator that it runs on parts comes
    here, and each view of the DTensor has such a part.

    Its parameter holds it; so it holds that weakly, or a dropped model would stay.
    """

    __slots__ = ("memory", "_holder")

    memory: Tensor
    """The part where its values are when the unit is in use."""
    _holder: weakref.ref[nn.Parameter]

    @classmethod
    def hide(cls, dtensor: Any) -> None:
        """Put one in the place of its memory. Other parameters stay as they are."""
        if not is_dtensor(dtensor):
            return
        memory = local_part(dtensor)
        part = cls._without_memory(memory, 0)
        part.memory, part._holder, part.born, part._meta = memory, weakref.ref(dtensor), 0, None
        replace_part(dtensor, part)

    @staticmethod
    def uncover(dtensor: Any) -> None:
        """Its memory is in its place again."""
        if is_dtensor(dtensor):
            replace_part(dtensor, part_of(dtensor))

    @property
    def param(self) -> nn.Parameter:  # type: ignore[override]
        if (param := self._holder()) is None:
            raise ZeroOffloadError("a DTensor of an offloaded model that was dropped has no values any more")
        return param

    def lasting(self) -> Away:
        """A view of it that keeps the parameter, for the program."""
        return Away.made(self.param, self.meta, 0)


@functools.cache
def routes_of_views() -> dict[Any, Route]:
    """The routes of functions that have met an `Away`."""
    return {**dict.fromkeys(named(*VIEWS), _view), **dict.fromkeys(metadata_of_params(), _as_it_is)}


def _as_it_is(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def _view(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A view of a weight that is in use is made of its shape alone, in a quarter of the time of `operate`."""
    source = args[0] if args else None
    param: Any = source.param if isinstance(source, Away) else source
    if not (is_in_use(param) and may_be_made(param)):
        return operate(func, args, kwargs)
    with torch._C.DisableTorchFunctionSubclass():
        away = source if isinstance(source, Away) else Away.of_param(param)
        meta = func(away.meta, *args[1:], **kwargs)
        return Away.made(param, meta, meta.storage_offset())


def is_in_use(param: object) -> bool:
    """True if a forward or backward uses its unit now."""
    at_rest: Any = param
    owner = owner_of(at_rest) if isinstance(param, AtRest) else None
    return owner is not None and owner.access.is_in_use(at_rest)


def may_be_made(param: nn.Parameter) -> bool:
    """True if an operation may take the parameter's memory in a view's place: no gradient is lost."""
    with torch._C.DisableTorchFunctionSubclass():
        return not param.requires_grad and not is_wrapper_class(type(param))


def _is_as_it_is(view: Away, dtype: torch.dtype | None, device: torch.device) -> bool:
    """True if a conversion changes nothing. Elements lie as they lie in their section, whatever the format."""
    own = view.param.device
    same_place = device.type == own.type and (own.type == "cpu" or device.index == own.index)
    return same_place and dtype in (None, view.dtype)


def part_of(param: nn.Parameter) -> Tensor:
    """This rank's part of it, in the memory of its unit; asks no other rank."""
    part = local_part(param)
    return part.memory if isinstance(part, LocalPart) else part


def operate(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Let each owner make its parameters readable, then run the function on the plain tensors. A parameter that
    is away, or changes, has a copy in its place."""
    leaves: list[Any] = [leaf for leaf in leaves_in((*args, kwargs) if kwargs else args) if isinstance(leaf, Tensor)]
    targets = changed_by(func, args, kwargs)
    is_changed = bool(targets) and changes_views(targets, func)
    # Which parameters and views are among the arguments, by the runtime that owns them.
    by_owner: dict[int, tuple[Owner, list[nn.Parameter]]] = {}
    lent: list[Lent] = []
    is_away = is_guarded = False
    for leaf in leaves:
        param = leaf
        if isinstance(leaf, ReadOnly):
            lent.append((leaf, leaf.param))
            is_changed |= leaf.is_away
            continue
        if isinstance(leaf, Away):
            param = leaf.param
            if not may_be_made(param):
                is_away = True
                continue
        # Parameters that are in use as well: their units must not go while another one comes.
        if (owner := owner_of(param)) is not None:
            by_owner.setdefault(id(owner), (owner, []))[1].append(param)
        elif isinstance(param, AtRest):
            raise dropped_error(cast(nn.Parameter, param))
    # The runtime makes values readable where it can; a write to them is refused.
    for owner, owned in by_owner.values():
        tensors = tensors_of(owned)
        touched = owner.access.touch(tensors)
        if touched is Touched.OPEN:
            is_guarded = is_guarded or any(isinstance(param, AtRest) for param in owned)
            continue
        # A block of zo.gathered has made some plain, for the program to change.
        is_changed |= any(isinstance(each, AtRest) and owner_of(cast(Tensor, each)) is owner for each in targets)
        is_away |= touched is Touched.AWAY or any(isinstance(leaf, Away) and leaf.param in owned for leaf in leaves)
        lent += [(tensor, tensor) for tensor in tensors if isinstance(tensor, AtRest)]
    if any(isinstance(leaf, AtRest) and is_dtensor(leaf) for leaf in leaves):
        return _on_parts(func, args, kwargs, [each for each in targets if isinstance(each, AtRest)])
    if is_changed:
        return run_on_copies(func, args, kwargs, _shown)
    if is_guarded and not is_away:
        # A library makes what consists of others, and has functions for it, which torch.compile would begin with.
        compute = _untraced_compute() if any(map(is_wrapper, leaves)) else _compute
        result = compute(func, args, kwargs)
        return lend(result, lent) if lent else result
    if is_away:
        try:
            return ask(func, args, kwargs)
        except NeedsDataError:
            return run_on_copies(func, args, kwargs, _shown)
    if lent:
        try:
            return read_lent(func, args, kwargs, lent)
        except WritesLentError:
            return run_on_copies(func, args, kwargs, _shown)
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def _on_parts(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], changed: Sequence[Any]) -> Any:
    """A function on DTensors at rest. torch's own dispatch brings its operators to their parts (`LocalPart`), and
    autograd saves DTensors as they are."""
    for param in changed:
        # A step that computes with tensors of its own copies its result in.
        error = no_step_of_others(described(param), owner_of(param)) if name_of(func) != "copy_" else None
        if error is not None:
            raise error
        check_change(func, param)
        others = (leaf for leaf in leaves_in((args, kwargs)) if isinstance(leaf, Tensor) and leaf is not param)
        if torch.is_grad_enabled() and not requires_grad(param) and any(map(requires_grad, others)):
            raise recorded(func, param)

    def given(leaf: Any) -> Any:
        return leaf if is_dtensor(leaf) else Away.of_param(leaf)

    with torch._C.DisableTorchFunctionSubclass():
        result = func(*mapped(AtRest, given, args), **mapped(AtRest, given, kwargs))
    return mapped(LocalPart, LocalPart.lasting, result)


def _compute(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the function on what parameters that stay guarded in use hold now; see [Note: quantized weights in use]."""
    made: dict[int, tuple[Tensor, Any]] = {}
    shown: list[tuple[Tensor, nn.Parameter]] = []
    # A function that reads memory past operations takes no subclass. Neither does an operation of a library under
    # autocast: in Python that a subclass has called, torch casts nothing.
    of_library = isinstance(func, OPERATIONS) and not str(func).startswith("aten.")
    is_read = func in named(*ADDRESSES) or (of_library and torch._C._is_any_autocast_enabled())
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
        if {type(tensor) for tensor, _ in made.values()} <= PLAIN:
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


class _WithoutDraws(TorchDispatchMode):
    """Raises NeedsDataError before random numbers are drawn."""

    def __init__(self, param: nn.Parameter) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._param = param

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise NeedsDataError(self._param)
        return func(*args, **(kwargs or {}))


View.run = operate


_asks = threading.local()


@contextmanager
def _asking() -> Iterator[None]:
    """Inside, views of DTensors' parts raise NeedsDataError like others: the whole function begins again."""
    before = getattr(_asks, "now", False)
    _asks.now = True
    try:
        yield
    finally:
        _asks.now = before


def _shown(view: Tensor, param: nn.Parameter) -> Tensor:
    """The view of a copy without its memory."""
    return linked(view, lambda: Away.made(param, view, int(view.storage_offset())))


def _away_at(view: Tensor, param: nn.Parameter) -> Away:
    """The view of a parameter without its memory."""
    begin = int(view.storage_offset()) - int(param.storage_offset()) * param.itemsize // view.itemsize
    return Away.made(param, view, begin)


def _copies(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """True if `to` is asked for a copy, whatever a parameter is already: its last argument, behind `non_blocking`."""
    return bool(kwargs.get("copy")) or [each for each in args if isinstance(each, bool)][1:] == [True]


def ask(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The function's result where it needs no data of parameters at rest. Raises NeedsDataError where it does."""
    stand_ins: dict[int, Away] = {}
    with torch._C.DisableTorchFunctionSubclass():

        def stand_in(param: Any) -> Away:
            if is_dtensor(param):
                raise NeedsDataError(param)
            return stand_ins.setdefault(id(param), Away.of_param(param))

        if func in named(*FACTORIES) and is_dtensor(args[0] if args else None):
            return func(*args, **kwargs)
        args, kwargs = mapped(AtRest, stand_in, (args, kwargs))
        if func in named(*ADDRESSES) or (func is Tensor.to and _copies(args, kwargs)):
            raise NeedsDataError(next(x.param for x in leaves_in((args, kwargs)) if isinstance(x, Away)))
        if func in named("new", "new_tensor") and args and isinstance(args[0], Away):
            # They take dtype and device past the view's own answers.
            args = (torch.empty(0, dtype=args[0].dtype, device=args[0].device), *args[1:])
        # A function that needs data begins again: before that it may draw nothing.
        may_draw = kind_of(func) is not Kind.READ or func in named(*FACTORIES, *QUESTIONS)
        try:
            draws = may_draw or not stand_ins
            with _asking(), nullcontext() if draws else _WithoutDraws(next(iter(stand_ins.values())).param):
                result = func(*args, **kwargs)
        except RuntimeError as error:
            # Code of C++ that is not an operation has asked for the address.
            if "data is not allocated" in str(error):
                raise NeedsDataError(next(iter(stand_ins.values())).param) from None
            raise
        params = {id(each.meta): each.param for each in stand_ins.values()}
        return mapped(Away, lambda view: params.get(id(view.meta), view), result)
