"""The preamble of tensor classes that stand in for values elsewhere, and what they have in common.

A class has two tables: `own`, functions on a tensor of the class, and `answers`, by the class of a function (`Kind`).
A class of functions that is in neither is refused. So nothing unknown is taken for a read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, NoReturn, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from zero_offload.base.errors import ZeroOffloadError
from zero_offload.standins.operations import Kind, is_collective, kind_of, name_of, wait_for, written_by

answering: Any = torch._C._EnableTorchFunction
"""Inside, stand-ins among the arguments of an operator answer: a dispatch has that off, and would read what is absent.
"""

Answer = Callable[..., Any]
"""answer(func, args, kwargs): runs a function that has met a stand-in."""


def as_it_is(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The tensor object answers; operators come to `__torch_dispatch__`, where a class has it."""
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def itself(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """For what makes the same of it, such as `detach`."""
    return args[0]


class StandIn(Tensor):
    """A tensor that answers by the tables of its class."""

    __slots__ = ()
    own: ClassVar[Mapping[Any, Answer]] = {}
    answers: ClassVar[Mapping[Kind, Answer]] = {}
    as_they_are: ClassVar[frozenset[Kind]] = frozenset((Kind.METADATA,))
    """Functions that run as they are: the tensor object answers, and `__torch_dispatch__` the operators."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in cls.own and args and isinstance(args[0], cls):
            own: Answer = cls.own[func]
            return own(func, args, kwargs or {})
        kind = kind_of(func)
        if kind in cls.as_they_are:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        answer: Answer = cls.answers.get(kind, cls.refused)
        return answer(func, args, kwargs or {})

    @classmethod
    def refused(cls, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> NoReturn:
        raise next(each for each in tree_leaves((args, kwargs)) if isinstance(each, cls)).refuse(name_of(func))

    def refuse(self, what: str) -> ZeroOffloadError:
        """The error for a function that has no answer."""
        return ZeroOffloadError(
            f"{what} is not torch's and has no schema, so nothing tells whether it changes {self.describe()}. Give it "
            "a copy (.clone()); register a function in C++ or CUDA by torch.library, with mutates_args"
        )

    def describe(self) -> str:
        """The tensor, for messages."""
        raise NotImplementedError


class Absent(StandIn):
    """A stand-in without memory: what passes `__torch_function__` by is answered too."""

    __slots__ = ()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        answer: Answer = cls.answers.get(kind_of(func), cls.refused)
        return answer(func, args, kwargs)


class OnCopies(Absent):
    """A stand-in whose values can be read and written whole: functions run on copies of them in memory."""

    __slots__ = ()

    def __init_subclass__(cls) -> None:
        """`run` of the class itself, which shows results in a way of its own."""
        super().__init_subclass__()
        cls.answers = dict.fromkeys((Kind.ADDRESS, Kind.VIEW, Kind.READ, Kind.WRITE), cls.run)

    def root(self) -> Any:
        """The stand-in that is read and written; this one may be a view of it."""
        return self

    def read(self) -> Tensor:
        """A copy of the values."""
        raise NotImplementedError

    def write(self, values: Tensor) -> None:
        """Replace the values."""
        raise NotImplementedError

    def within(self, values: Tensor) -> Tensor:
        """The elements of this one in its root's values."""
        return values

    @classmethod
    def shown(cls, result: Any, read: Sequence[tuple[Any, Tensor]], given: Sequence[tuple[Any, Tensor]]) -> Any:
        """The result for the program; `read` has roots with their copies, `given` stand-ins with what ran in their
        place."""
        return result

    @classmethod
    def run(cls, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A function on copies. Changed ones are written: torch's count of changes tells, or the operator's schema."""
        read: list[tuple[Any, Tensor, int]] = []
        given: list[tuple[Any, Tensor]] = []

        def values_of(each: Any) -> Tensor:
            root = each.root()
            values = next((values for known, values, _ in read if known is root), None)
            if values is None:
                # A tensor that is made in inference mode does not count its changes.
                with torch.inference_mode(False), torch.no_grad():
                    values = root.read()
                read.append((root, values, values._version))
            given.append((each, each.within(values)))
            return given[-1][1]

        changed = [each.root() for each in written_by(func, args, kwargs) if isinstance(each, cls)]
        args, kwargs = tree_map_only(cls, values_of, (args, kwargs))
        with answering():
            result = func(*args, **kwargs)
        if is_collective(func):
            wait_for(result)
        # Changed copies replace the values at rest.
        for root, values, version in read:
            if values._version != version or any(each is root for each in changed):
                root.write(values)
        return cls.shown(result, [(root, values) for root, values, _ in read], given)


class WithViews(OnCopies):
    """One of which views may be made: a view reads and writes its root, as a view of a tensor in memory does."""

    __slots__ = ()
    _root: Any
    """The stand-in that this is a view of, or None."""

    def root(self) -> Any:
        return self if self._root is None else self._root

    def view_at(self, of: Tensor) -> Tensor:
        """A view of this root that lies in it as `of` does in a copy of it."""
        raise NotImplementedError

    def at_rest(self) -> bool:
        """True if there is something that views can write to."""
        return True

    def within(self, values: Tensor) -> Tensor:
        if self._root is None:
            return values
        with torch._C.DisableTorchFunctionSubclass():
            at = self.size(), self.stride(), self.storage_offset()
        return values.view(-1).view(self.dtype).as_strided(*at)

    @classmethod
    def shown(cls, result: Any, read: Sequence[tuple[Any, Tensor]], given: Sequence[tuple[Any, Tensor]]) -> Any:
        """Views of a copy are views of the stand-in; arrays of it cannot be written to."""
        roots = [(root, values) for root, values in read if root.at_rest()]

        def wrap(tensor: Tensor) -> Tensor:
            for each, values in given:
                if tensor is values:
                    return cast(Tensor, each)
            if type(tensor) is Tensor and tensor.layout is torch.strided and not tensor.is_meta:
                place = tensor.untyped_storage()._cdata
                for root, values in roots:
                    if values.untyped_storage()._cdata == place:
                        return cast(Tensor, root.view_at(tensor))
            return tensor

        if isinstance(result, np.ndarray):
            address = result.__array_interface__["data"][0]
            if any(0 <= address - values.data_ptr() < values.nbytes for _, values in roots):
                result.setflags(write=False)
        if isinstance(result, Tensor | tuple | list):
            return tree_map_only(Tensor, wrap, result)
        return map(wrap, result) if isinstance(result, Iterator) else result


def wrapper(kind: type[Tensor], size: Iterable[int], **kwargs: Any) -> Any:
    """A tensor without memory."""
    return Tensor._make_wrapper_subclass(kind, torch.Size(size), **kwargs)
