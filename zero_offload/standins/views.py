"""Views of parameters that are handed out: for reading only, or without memory (`away.py`).

[Note: views for reading]
Views of parameters that are handed out outside of forward and backward are for reading. A value that is written to such
a view is lost where the parameter only visits memory. Where it rests there, it is one half of an fp32 master. With the
other half of the old master it makes a number that no operation has computed, maybe NaN. So these views have a class
that computes like a plain tensor's. A change of one is made where the parameter rests (`brought.py`). NumPy's arrays
refuse writes. Addresses (`data_ptr()`, DLPack of a view that is in memory) are not protected.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from zero_offload.base.errors import ZeroOffloadError
from zero_offload.base.trees import leaves_in, mapped
from zero_offload.hardware.device import device_rng_states, set_device_rng_states
from zero_offload.standins.derived import Derived
from zero_offload.standins.operations import Kind, changed_by, has_operators, kind_of, name_of
from zero_offload.standins.owners import owner_of
from zero_offload.standins.refusals import name_in_model
from zero_offload.standins.sources import Touched

T = TypeVar("T")
PLAIN = frozenset((Tensor, Derived))


Lent = tuple[Tensor, nn.Parameter]
"""Memory of a parameter, and the parameter."""


def changes_views(changed: Iterable[Any], func: object) -> bool:
    """True if some of what a function changes are views. Raises for what a view cannot become."""
    views = [each for each in changed if isinstance(each, View)]
    if views and name_of(func).startswith("requires_grad"):
        raise ZeroOffloadError(
            f"a view of parameter {name_in_model(views[0].param)} cannot require a gradient, as nn.Parameter(p) asks "
            "for: it has no memory of its own. Use a copy, nn.Parameter(p.detach().clone()). nn.utils.weight_norm and "
            "other functions that make a parameter of it are for before zo.offload"
        )
    return bool(views)


class WritesLentError(ZeroOffloadError):
    """An operator of a function in Python would write to memory of a parameter that is for reading. Nothing is written
    yet."""

    def __init__(self, param: nn.Parameter) -> None:
        super().__init__(f"a function in Python changes parameter {name_in_model(param)}")
        self.param = param


class Assignments:
    """Of `.data`, by which plain torch gives a parameter other memory: views from before keep the old values there.
    Here they have no memory, so a later use of them raises."""

    count: ClassVar[int] = 0
    last: ClassVar[Any] = WeakIdKeyDictionary()
    """By parameter, the number of its last one."""

    @classmethod
    def note(cls, param: nn.Parameter) -> None:
        cls.count += 1
        cls.last[param] = cls.count

    @classmethod
    def check(cls, values: Any) -> None:
        """Raise where views among `values` are from before an assignment."""
        for view in leaves_in(values) if cls.count else ():
            if isinstance(view, View) and cls.last.get(view.param, 0) > view.born:
                name = name_in_model(view.param)
                raise ZeroOffloadError(
                    f"a view of parameter {name} is from before an assignment to its .data, and the values of that "
                    "time are gone. Keep a copy to come back to: backup = param.data.clone()"
                )


class View(Tensor):
    """A view of a parameter, handed out where its memory may not be changed."""

    param: nn.Parameter
    born: int
    """`Assignments.count` when it was made."""
    is_recorded = False
    """True if autograd has recorded a change of this view, which has no place in the graph."""
    run: ClassVar[Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]]
    """Runs a function that has met parameters at rest or views; set in `away.py`."""

    @property
    def begin(self) -> int:
        """The element of the parameter, in elements of the view, at which it begins."""
        raise NotImplementedError

    def check_recorded(self) -> None:
        """Raise where autograd records a use of it, and would miss the change before."""
        if self.is_recorded and torch.is_grad_enabled():
            raise ZeroOffloadError(
                f"a view of parameter {name_in_model(self.param)} was changed by tensors that require a gradient, and "
                "is used where autograd records. The gradient of that change would be lost. Use the result of the "
                "change, or make the change in 'with torch.no_grad():'"
            )


class ReadOnly(View):
    """A view of memory that is here, for reading; so are its views."""

    @property
    def begin(self) -> int:
        with torch._C.DisableTorchFunctionSubclass():
            before = int(self.param.storage_offset()) * self.param.itemsize // self.itemsize
            return int(self.storage_offset()) - before

    @property
    def is_away(self) -> bool:
        """True if its memory has not the parameter's values any more: ranks have written others, and each its own."""
        owner = owner_of(self.param)
        return owner is not None and owner.access.touch([self.param]) is Touched.AWAY

    @classmethod
    def __torch_function__(
        cls,
        func: Any,
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if any(kind not in (cls, Tensor, nn.Parameter) for kind in types):
            return NotImplemented  # a parameter at rest is among the arguments, and has to be asked first
        Assignments.check((args, kwargs))
        if changes_views(changed_by(func, args, kwargs), func):
            return View.run(func, args, kwargs)
        views = [(leaf, leaf.param) for leaf in leaves_in((args, kwargs)) if isinstance(leaf, ReadOnly)]
        needs_data = kind_of(func) is not Kind.METADATA
        for view, _ in views:
            if view.is_recorded:
                view.check_recorded()
            if needs_data and view.is_away:
                return View.run(func, args, kwargs)
        try:
            return read_lent(func, args, kwargs, views)
        except WritesLentError:
            return View.run(func, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return _plain(self).clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _plain(self).clone().__reduce_ex__(protocol)


def read_lent(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], lent: Sequence[Lent]) -> Any:
    """A function on parameters and views that are for reading; so are views of them that it returns. Raises
    WritesLentError before it writes to one."""
    with torch._C.DisableTorchFunctionSubclass():
        if not has_operators(func):
            result = func(*args, **kwargs)
        else:
            with Watch(lent):
                result = func(*args, **kwargs)
        return lend(result, lent)


class Watch(TorchDispatchMode):
    """Raises WritesLentError before an operator writes to what is lent: a function in Python has no schema, and its
    operators do. Generators are then as they were, since the function begins again."""

    def __init__(self, lent: Sequence[Lent]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._generators = torch.get_rng_state(), device_rng_states()
        self._params = {s._cdata: param for tensor, param in lent if (s := storage_of(tensor)) is not None}

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        for each in changed_by(func, args, kwargs):
            storage = storage_of(each) if isinstance(each, Tensor) else None
            if storage is not None and (param := self._params.get(storage._cdata)) is not None:
                torch.set_rng_state(self._generators[0])
                set_device_rng_states(self._generators[1])
                raise WritesLentError(param)
        return func(*args, **kwargs)


def storage_of(tensor: Tensor) -> torch.UntypedStorage | None:
    """The memory that a tensor is in, if it is in one; under torch.func's transforms that of the tensor inside."""
    if tensor.layout is not torch.strided:
        return None
    try:
        return tensor.untyped_storage()
    except NotImplementedError:
        wrapped = torch._C._functorch.is_functorch_wrapped_tensor(tensor)
        return storage_of(torch._C._functorch.get_unwrapped(tensor)) if wrapped else None


def lend(result: Any, sources: Sequence[Lent]) -> Any:
    """The result of an operation on `sources`; where it shares memory with them it is for reading only."""
    return wrap_views(result, sources, _read_only)


def wrap_views(result: Any, sources: Sequence[tuple[Tensor, T]], view: Callable[[Tensor, T], Tensor]) -> Any:
    """`result` with `view` in the place of each tensor that shares memory with one of `sources`."""
    storages: dict[int, list[tuple[Tensor, T]]] = {}
    for source in sources:
        if (storage := storage_of(source[0])) is not None:
            storages.setdefault(storage._cdata, []).append(source)

    def wrap(tensor: Tensor) -> Tensor:
        storage = storage_of(tensor) if type(tensor) in PLAIN else None
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
    """Of sources that share one buffer, the source that the view shows: the last that begins before it."""

    def begin(source: tuple[Tensor, T]) -> int:
        return int(source[0].storage_offset()) * source[0].itemsize

    at = int(view.storage_offset()) * view.itemsize
    return max([source for source in sources if begin(source) <= at] or sources, key=begin)


def _read_only(tensor: Tensor, param: nn.Parameter) -> Tensor:
    view = tensor.as_subclass(ReadOnly)
    view.param, view.born = param, Assignments.count
    return view


def _plain(view: ReadOnly) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return view.detach().as_subclass(Tensor)
