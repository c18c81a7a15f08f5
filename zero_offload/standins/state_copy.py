"""The tensors of `model.state_dict()`: copies of parameters, whose changes reach the parameter.

A plain model's state dict shares memory with its parameters, and programs write to it: torch.distributed.checkpoint
loads into it. A parameter that rests elsewhere has no memory to share, so a copy remembers its parameter. Each
operation that changes the copy, or a view of it, writes the copy to the parameter as load_state_dict would. A copy is
not refreshed: once the parameter has other values, changing it raises. Not seen are writes to an address
(`data_ptr()`, DLPack); NumPy's arrays refuse writes.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import TensorWeakRef

from zero_offload.base.errors import ZeroOffloadError
from zero_offload.plan.quantized import is_wrapper, library_class
from zero_offload.standins.checkpointed import Checkpointed
from zero_offload.standins.operations import Kind, changed_by, is_collective, wait_for, written_by
from zero_offload.standins.owners import owner_of
from zero_offload.standins.part import Part, PlainPart, Put
from zero_offload.standins.staged import StagedSource, for_stager
from zero_offload.standins.standin import StandIn
from zero_offload.standins.views import wrap_views
from zero_offload.storage.shards.store import LazyRead

_SET_DATA: Any = cast(Any, Tensor.data).__set__


class _Source:
    """A parameter, and the copy of it that all views share."""

    def __init__(self, param: nn.Parameter, name: str, values: Tensor, lazy: LazyRead) -> None:
        """`values` has the parameter's shape; host. `lazy` fills it."""
        self._param: Any = TensorWeakRef(param)
        self.name = name
        self.values = values
        self.lazy = lazy
        self.read = lazy.read
        self._version = _version(param)

    def param(self) -> nn.Parameter | None:
        """The parameter, while it has the values that the copy has."""
        param: nn.Parameter | None = self._param()
        return param if param is not None and _version(param) == self._version else None

    def part(self) -> Part:
        """The part that torch.distributed.checkpoint reads and writes: the parameter, without a copy of it in
        memory.
        """
        param: nn.Parameter | None = self._param()
        owner = None if param is None else owner_of(param)
        if param is None or owner is None or self.param() is None:
            self.read()
            return _OldPart(self)
        with torch._C.DisableTorchFunctionSubclass():
            dtype = self.values.dtype
        return _CopyPart(self, owner.parts.of(param, "value", dtype, self))

    @contextmanager
    def following(self) -> Iterator[None]:
        """It has what is written to the parameter inside; what is not read yet is read after that."""
        self.lazy.follows = True
        try:
            yield
        finally:
            self.lazy.follows = False
            self.follow()

    def __deepcopy__(self, memo: dict[int, Any]) -> StagedSource:
        """torch's stager copies attributes of tensors."""
        return StagedSource.of(self.part())

    def write(self) -> None:
        """The copy has changed: write it to the parameter."""
        param: nn.Parameter | None = self._param()
        owner = None if param is None else owner_of(param)
        if param is None or owner is None:
            return  # the model is gone
        self.check_current()
        owner.access.write_param(param, self.values)
        self.follow()

    def check_current(self) -> None:
        """Raise if the parameter has got other values than the copy."""
        if self._param() is not None and self.param() is None:
            raise ZeroOffloadError(
                f"a tensor of model.state_dict() was changed, but parameter {self.name} has had a step or other values "
                "since that state dict was made. The parameter stays as it is. Call model.state_dict() again and "
                "change what it returns; call model.load_state_dict(...) to load other values; or change a copy "
                "(.clone())"
            )

    def follow(self) -> None:
        """The parameter has what was written through the copy."""
        self._version = _version(self._param())


class _OldPart(PlainPart):
    """A copy whose parameter has other values by now."""

    def __init__(self, source: _Source) -> None:
        super().__init__(source.values)
        self._source = source

    def plan_load(self, call: FrameType) -> None:
        self._source.check_current()

    def write(self, begin: int, end: int, values: Tensor, put: Put | None) -> None:
        self._source.check_current()
        super().write(begin, end, values, put)


class _CopyPart:
    """A parameter's part, with the copy that goes with it. Implements `Part`."""

    def __init__(self, source: _Source, part: Part) -> None:
        self._source = source
        self._part = part
        self.dtype, self.boxes, self.span, self.folder = part.dtype, part.boxes, part.span, part.folder

    def read(self, begin: int, end: int) -> Tensor:
        return self._part.read(begin, end)

    def plan_load(self, call: FrameType) -> None:
        self._part.plan_load(call)

    def write(self, begin: int, end: int, values: Tensor, put: Put | None) -> None:
        self._source.check_current()
        self._part.write(begin, end, values, put)
        if self._source.lazy.is_read:
            PlainPart(self._source.values).write(begin, end, values, put)


class StateCopy(StandIn, Checkpointed):
    """A copy of a parameter, or a view of one, that hands changes on."""

    source: _Source

    @staticmethod
    def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A function on copies; changed ones are written to their parameters."""
        leaves = tree_leaves((args, kwargs))
        copies = [leaf for leaf in leaves if isinstance(leaf, StateCopy)]
        for each in copies:
            each.source.read()
        if func == _SET_DATA and args[0] is copies[0]:
            copies[0].set_()
        before = [_version(each) for each in copies]
        # Of a collective in Python nothing tells which tensors it writes.
        written = set(map(id, copies if is_collective(func) else written_by(func, args, kwargs)))
        if not any(map(_is_asked_too, leaves)):
            with torch._C.DisableTorchFunctionSubclass():
                result = func(*args, **kwargs)
        else:
            # Others among the arguments, such as parameters at rest, are asked too: they meet plain tensors.
            plain = {id(each): _plain(each) for each in copies}
            originals = {id(plain[id(each)]): each for each in copies}
            args, kwargs = tree_map_only(StateCopy, lambda each: plain[id(each)], (args, kwargs))
            result = func(*args, **kwargs)
            result = tree_map_only(Tensor, lambda tensor: originals.get(id(tensor), tensor), result)
        if is_collective(func):
            wait_for(result)
        sources = {
            id(each.source): each.source
            for each, version in zip(copies, before, strict=True)
            if _version(each) != version or id(each) in written
        }
        for source in sources.values():
            source.write()
        with torch._C.DisableTorchFunctionSubclass():
            return wrap_views(result, [(each, each.source) for each in copies], _view)

    def describe(self) -> str:
        return f"a tensor of model.state_dict(), of parameter {self.source.name}"

    def part(self) -> Part:
        return self.source.part()

    def shows(self, param: nn.Parameter) -> bool:
        """True if it is all of the parameter as it is now."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.source.param() is param and self.is_set_to(self.source.values)

    def set_(self, *_: Any, **__: Any) -> NoReturn:
        """Other memory is not the parameter's, in a plain model's state dict neither: nothing would change."""
        raise ZeroOffloadError(
            f"a tensor of model.state_dict(), of parameter {self.source.name}, cannot be given other memory: the "
            "parameter would keep its values. Write into it (.copy_(values)), or call model.load_state_dict(...)"
        )

    def __copy__(self) -> Tensor:
        return self.detach()

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return copy.deepcopy(_plain(self), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _plain(self).__reduce_ex__(protocol)

    @property
    def _is_param(self) -> bool:
        return False

    @_is_param.setter
    def _is_param(self, _: bool) -> None:
        """`nn.Parameter(tensor)` marks a tensor of another class. It is a parameter of another model: plain."""
        self.source.read()
        del self.source
        self.__class__ = nn.Parameter  # type: ignore[assignment]


class WrapperCopy(StandIn, Checkpointed):
    """A copy of a parameter that consists of others: it consists of their copies.

    An operation of its library meets its parts where `__torch_function__` does not see them, so that they would be
    neither read nor written. It runs on a tensor of plain parts, which takes this one's place.
    """

    @staticmethod
    def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A function on tensors of plain parts; the parts of changed ones are written."""
        wrappers = {id(leaf): leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, WrapperCopy)}
        parts: dict[int, list[StateCopy]] = {key: [] for key in wrappers}
        plain = {key: _of_plain_parts(each, parts[key]) for key, each in wrappers.items()}
        # Versions do not tell: a library's operation counts no change of a part.
        changed = [each for target in changed_by(func, args, kwargs) for each in parts.get(id(target), ())]
        args, kwargs = tree_map_only(WrapperCopy, lambda each: plain[id(each)], (args, kwargs))
        result = func(*args, **kwargs)
        for each in changed:
            each.source.write()
        given = {id(plain[key]): each for key, each in wrappers.items()}
        shown = [each for found in parts.values() for each in found]
        return tree_map_only(Tensor, lambda each: given.get(id(each), _of_copies(each, shown)), result)

    def describe(self) -> str:
        return f"a {type(self).__name__} of model.state_dict()"

    def part(self) -> Part:
        raise ZeroOffloadError(
            f"a tensor of model.state_dict(), {list(self.shape)}, is a {type(self).__name__}: several tensors, which "
            "torch.distributed.checkpoint takes for one. Nothing was saved or loaded. Use zo.save_checkpoint(model, "
            "optimizer, path) and zo.load_checkpoint; or leave frozen weights out of the dictionary that dcp gets"
        )

    @property
    def _is_param(self) -> bool:
        return False

    @_is_param.setter
    def _is_param(self, is_param: bool) -> None:
        """See `StateCopy._is_param`."""
        tensor: Any = self
        for name in tensor.__tensor_flatten__()[0]:
            setattr(tensor, name, _of_plain_parts(getattr(tensor, name), []))
        tensor.__class__ = library_class(tensor)
        tensor._is_param = is_param


def _is_asked_too(leaf: Any) -> bool:
    """True for a tensor of another class that sees functions."""
    kind = type(leaf)
    is_asked = isinstance(leaf, Tensor) and kind not in (Tensor, nn.Parameter, StateCopy)
    return is_asked and kind.__torch_function__ is not torch._C._disabled_torch_function_impl


_RUN = (Kind.ADDRESS, Kind.VIEW, Kind.READ, Kind.WRITE)
StateCopy.answers = dict.fromkeys(_RUN, StateCopy.run)
StateCopy.own = for_stager(StateCopy.run)
WrapperCopy.answers = dict.fromkeys(_RUN, WrapperCopy.run)


def _of_plain_parts(tensor: Any, parts: list[StateCopy]) -> Any:
    """A tensor with the same memory, without the classes of this file; `parts` gets its copies."""
    if isinstance(tensor, StateCopy):
        parts.append(tensor)
        return _plain(tensor)
    if not is_wrapper(tensor):
        # A tensor that ranks divide says why it cannot be read.
        return cast(Tensor, tensor).clone() if isinstance(tensor, Checkpointed) else tensor
    names, context = tensor.__tensor_flatten__()
    inner = {name: _of_plain_parts(getattr(tensor, name), parts) for name in names}
    return library_class(tensor).__tensor_unflatten__(inner, context, tensor.size(), tensor.stride())


def _of_copies(tensor: Any, parts: list[StateCopy]) -> Tensor:
    """A result, whose parts hand changes on if they share memory with one of `parts`."""
    if isinstance(tensor, StateCopy | WrapperCopy) or not is_wrapper(tensor):
        return cast(Tensor, tensor)
    names, context = tensor.__tensor_flatten__()
    with torch._C.DisableTorchFunctionSubclass():
        sources = [(each, each.source) for each in parts]
        inner = {name: wrap_views(getattr(tensor, name), sources, _view) for name in names}
    if not any(isinstance(each, StateCopy) for each in inner.values()):
        return cast(Tensor, tensor)
    return _joined(type(tensor), inner, context, tensor)


def wrapper_copy(param: Any, copy_out: Callable[[Any], Tensor]) -> Tensor:
    """A copy of a parameter that consists of others, of what `copy_out` makes of them."""
    names, context = param.__tensor_flatten__()
    return _joined(library_class(param), {name: copy_out(getattr(param, name)) for name in names}, context, param)


def _joined(kind: Any, inner: dict[str, Tensor], context: Any, like: Tensor) -> Tensor:
    made: Tensor = kind.__tensor_unflatten__(inner, context, like.size(), like.stride())
    made.__class__ = _class_of_copies(kind)
    return made


@functools.cache
def _class_of_copies(kind: type) -> type:
    """The library's class, of its name: libraries compare that."""
    return type(kind.__name__, (WrapperCopy, kind), {"__slots__": ()})


def state_copy(param: nn.Parameter, name: str, values: Tensor, lazy: LazyRead) -> StateCopy:
    """`values`, a copy of the parameter, for a state dict; `lazy` fills it, when something is done with it."""
    return _view(values, _Source(param, name, values, lazy))


def again(copy: StateCopy) -> StateCopy:
    """The same copy under another name."""
    with torch._C.DisableTorchFunctionSubclass():
        return _view(copy.detach(), copy.source)


def _view(tensor: Tensor, source: _Source) -> StateCopy:
    view = tensor.as_subclass(StateCopy)
    view.source = source
    return view


def _plain(state_copy: StateCopy) -> Tensor:
    """The same memory and version, without the class."""
    state_copy.source.read()
    with torch._C.DisableTorchFunctionSubclass():
        return state_copy.detach().as_subclass(Tensor)


def _version(tensor: Tensor) -> int:
    with torch._C.DisableTorchFunctionSubclass():
        return tensor._version
