"""Views of parameters that are handed out: for reading only, or without memory (`away.py`).

[Note: views for reading]
Views of parameters that are handed out outside of forward and backward are for reading. A value that is written to such
a view is lost where the parameter only visits memory. Where it rests there, it is one half of an fp32 master. With the
other half of the old master it makes a number that no operation has computed, maybe NaN. So these views have a class
that computes like a plain tensor's, and raises before it changes anything. NumPy's arrays of them refuse writes too.
Addresses (`data_ptr()`, DLPack) are not protected.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from zero_offload.base.errors import ZeroOffloadError
from zero_offload.base.trees import leaves_in, mapped
from zero_offload.standins.derived import Derived
from zero_offload.standins.operations import changed_by, has_operators, name_of

T = TypeVar("T")
PLAIN = frozenset((Tensor, Derived))


def refuse_changes(changed: Iterable[Any], func: object) -> None:
    for each in changed:
        if not isinstance(each, View):
            continue
        if name_of(func).startswith("requires_grad"):
            raise ZeroOffloadError(
                f"a view of parameter {each.of} cannot require a gradient, as nn.Parameter(p) asks for: it has no "
                "memory of its own. Use a copy, nn.Parameter(p.detach().clone()), made in 'with zo.gathered(module):'"
            )
        raise lost_change(func, f"a view of parameter {each.of}")


def lost_change(func: object, what: str) -> ZeroOffloadError:
    return ZeroOffloadError(
        f"{name_of(func)} changes {what}, outside of the model's forward: the change would be lost. Change it in 'with "
        'zo.gathered(module, mode="write"):\', or change a copy (.clone())'
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
        if any(kind not in (cls, Tensor, nn.Parameter) for kind in types):
            return NotImplemented  # a parameter at rest is among the arguments, and has to be asked first
        refuse_changes(changed_by(func, args, kwargs), func)
        views = [(leaf, leaf.of) for leaf in leaves_in((args, kwargs)) if isinstance(leaf, ReadOnly)]
        return read_lent(func, args, kwargs, views)

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return _plain(self).clone()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _plain(self).clone().__reduce_ex__(protocol)


def read_lent(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], lent: Sequence[tuple[Tensor, str]]
) -> Any:
    """A function on parameters and views (with names) that are for reading; so are views of them that it returns."""
    with torch._C.DisableTorchFunctionSubclass():
        if not has_operators(func):
            result = func(*args, **kwargs)
        else:
            with _Watch(func, lent):
                result = func(*args, **kwargs)
        return lend(result, lent)


class _Watch(TorchDispatchMode):
    """Refuses operators that would write to what is lent: a function in Python has no schema, and its operators do."""

    def __init__(self, func: object, lent: Sequence[tuple[Tensor, str]]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._func = func
        storages = ((storage_of(tensor), name) for tensor, name in lent)
        self._names = {storage._cdata: name for storage, name in storages if storage is not None}

    def __torch_dispatch__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        for each in changed_by(func, args, kwargs):
            storage = storage_of(each) if isinstance(each, Tensor) else None
            name = None if storage is None else self._names.get(storage._cdata)
            if name is not None:
                raise lost_change(self._func, f"parameter {name}")
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


def lend(result: Any, sources: Sequence[tuple[Tensor, str]]) -> Any:
    """The result of an operation on `sources` (with names); where it shares memory with them it is for reading only."""
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


def _read_only(tensor: Tensor, name: str) -> Tensor:
    view = tensor.as_subclass(ReadOnly)
    view.of = name
    return view


def _plain(view: ReadOnly) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return view.detach().as_subclass(Tensor)
