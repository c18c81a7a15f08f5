"""Views of parameters that are handed out outside of forward and backward: they are for reading.

What is written to one is lost where the parameter only visits memory. Where it rests there, it is one half of an fp32
master, and with the other half of the old one it makes a number that no operation has computed, maybe NaN. So these
views have a class that computes like a plain tensor's, and raises before it changes anything. NumPy's arrays of them
refuse writes too; addresses (`data_ptr()`, DLPack) are for who knows what he does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from zero_offload.base.errors import ZeroOffloadError

T = TypeVar("T")

_OPERATORS = ("add", "sub", "mul", "truediv", "floordiv", "div", "mod", "pow", "and", "or", "xor", "lshift", "rshift")
_ACCESSORS = ("__get__", "__set__", "__delete__")
_CHANGING = frozenset(("__set__", "__setitem__", "__delete__", *(f"__i{name}__" for name in _OPERATORS)))


def changed_by(func: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """What a tensor function changes: `out=`, and the first argument of one that works in place."""
    name = getattr(func, "__name__", "")
    if name not in _CHANGING and (not name.endswith("_") or name.endswith("__")):
        return tree_leaves(kwargs.get("out"))
    return tree_leaves((args[:1] or tuple(kwargs.values())[:1], kwargs.get("out")))


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
        views = [(leaf, leaf.of) for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, ReadOnly)]
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
    storages = {
        storage._cdata: (storage, tag) for source, tag in sources if (storage := storage_of(source)) is not None
    }

    def wrap(tensor: Tensor) -> Tensor:
        storage = storage_of(tensor) if type(tensor) is Tensor else None
        found = None if storage is None else storages.get(storage._cdata)
        return tensor if found is None else view(tensor, found[1])

    if isinstance(result, Tensor | tuple):
        return tree_map_only(Tensor, wrap, result)
    if isinstance(result, list) and result and isinstance(result[0], Tensor):
        return [wrap(each) for each in result]
    if isinstance(result, Iterator):
        return map(wrap, result)
    if (interface := getattr(result, "__array_interface__", None)) is not None:
        address = interface["data"][0]
        if any(0 <= address - each.data_ptr() < each.nbytes() for each, _ in storages.values()):
            result.setflags(write=False)
    return result


def _read_only(tensor: Tensor, name: str) -> Tensor:
    view = tensor.as_subclass(ReadOnly)
    view.of = name
    return view


def _plain(view: ReadOnly) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return view.detach().as_subclass(Tensor)
