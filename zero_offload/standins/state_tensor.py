"""One state of an offloaded parameter where it rests: a tensor without memory, see `StateTensor`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from zero_offload.base.errors import ZeroOffloadError
from zero_offload.standins.checkpointed import Checkpointed
from zero_offload.standins.owners import describe, dropped_error, owner_of
from zero_offload.standins.part import Part, PlainPart
from zero_offload.standins.readers import StateReader
from zero_offload.standins.sources import Owner, StateSource
from zero_offload.standins.staged import for_stager
from zero_offload.standins.standin import WithViews, as_it_is, itself, wrapper
from zero_offload.storage.shards.shard import Component

STEP = "step"
"""Torch's name for how many updates a parameter has had."""

_data: Any = Tensor.data


class _Fields(Tensor):
    """No attributes in a `__dict__`: torch's stager would copy them."""

    __slots__ = ("_is_copy", "_kept", "_owner", "_root", "param", "state_name")

    param: nn.Parameter
    state_name: str
    """As torch names it."""
    _owner: Owner | None
    """The owner for a state dict's entry: it may be read when the program has dropped the model."""
    _root: StateTensor | None
    """The tensor that this is a view of."""
    _is_copy: bool
    """True if changes are its own: what `.to()` of a state dict's gives, which is made when it is read."""
    _kept: Tensor | ZeroOffloadError | None
    """Its values, once they are no longer those on the tier; or why they could not be read."""


class StateTensor(WithViews, Checkpointed, StateReader, _Fields):
    """One state of an offloaded parameter where it rests, or a view of it. Where ranks divide the parameter, a state
    dict of the model has its value as such a tensor too.

    An operation gets a copy in memory. If it changes the copy, the tier gets that. A state of `optimizer.state` shows
    what rests there now, as torch's do. One of a state dict shows what rested there when the state dict was made.
    """

    __slots__ = ()

    @staticmethod
    def __new__(
        cls,
        param: nn.Parameter,
        name: str,
        dtype: torch.dtype,
        *,
        owner: Owner | None = None,
        copy_on: torch.device | None = None,
    ) -> StateTensor:
        """`owner` is the parameter's, for a state of a state dict; `copy_on` a device, for a copy there."""
        shape = torch.Size() if name == STEP else param.shape
        made: StateTensor = wrapper(cls, shape, dtype=dtype, device=copy_on or "cpu")
        made.param, made.state_name, made._owner, made._root, made._kept = param, name, owner, None, None
        made._is_copy = copy_on is not None
        made._states().readers.add(made)
        return made

    @property
    def of_dict(self) -> bool:
        return self._owner is not None

    def rests_at(self, param: nn.Parameter, name: str) -> bool:
        """True if it shows what this state is now."""
        return self._root is None and self._kept is None and self.param is param and self.state_name == name

    def following(self) -> AbstractContextManager[None]:
        """It shows what is there in any case."""
        return nullcontext()

    def shows(self, param: nn.Parameter) -> bool:
        """True if it is the parameter's value as it is now."""
        return self.rests_at(param, Component.VALUE)

    def keep(self) -> None:
        """Take the values into memory: the tier is about to get others, which are not this one's."""
        if self._kept is not None:
            return
        try:
            self._kept = self.read()
        except ZeroOffloadError as error:
            self._kept = error
            if self._owned().parts.is_divided(self.param):
                self._kept = ZeroOffloadError(
                    f"{self.describe()}: the model has had a step or other states since this state dict was made. "
                    "Where ranks divide parameters a state dict keeps none. Call state_dict() again; dcp.async_save "
                    "keeps a copy"
                )

    def plain(self) -> Tensor:
        """A copy, as a plain tensor."""
        root = self.root()
        values = root.read()
        return values if root is self and self._kept is None else self.within(values).clone()

    def part(self) -> Part:
        if isinstance(self._kept, ZeroOffloadError):
            raise self._kept
        if self._root is None and self._kept is None and not self._is_copy:
            return self._owned().parts.of(self.param, self.state_name, self.dtype, self)
        # It is no longer what rests there.
        return PlainPart(self.plain() if self._kept is None else self.within(self._kept))

    def _owned(self) -> Owner:
        owner = self._owner or owner_of(self.param)
        if owner is None:
            raise dropped_error(self.param)
        return owner

    def _states(self) -> StateSource:
        return self._owned().states

    def read(self) -> Tensor:
        """The values that were kept, or a copy of what rests on the tier."""
        if isinstance(self._kept, ZeroOffloadError):
            raise self._kept
        if self._kept is not None:
            return self._kept
        with torch.inference_mode(False), torch.no_grad():
            return self._states().read(self.param, self.state_name).to(self.device)

    def write(self, values: Tensor) -> None:
        """Write the whole state."""
        if self._kept is not None:
            return
        if values.shape != self.shape:
            raise ZeroOffloadError(f"{self.describe()} was to have shape {tuple(values.shape)}; it keeps its own")
        if self._is_copy:
            self._kept = values
            return
        states = self._states()
        states.readers.before_edit(self)
        states.edit(self.param, self.state_name, values)

    def view_at(self, of: Tensor) -> Tensor:
        size, strides, offset = of.size(), of.stride(), of.storage_offset()
        made: StateTensor = wrapper(
            StateTensor, size, strides=strides, storage_offset=offset, dtype=of.dtype, device=of.device
        )
        made.param, made.state_name, made._owner, made._root, made._kept = self.param, self.state_name, None, self, None
        return made

    def at_rest(self) -> bool:
        return self._kept is None

    def _converted(self, convert: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
        """Conversions that need no values: to what it is already, and to a copy of a state dict's of the same dtype."""
        with torch._C.DisableTorchFunctionSubclass():
            like = torch.empty(0, dtype=self.dtype, device=self.device)
            found = convert(like, *args, **kwargs)
        if self._root is not None or self._kept is not None or found.dtype != self.dtype:
            return self if found is like and convert is not Tensor.contiguous else None
        if self.of_dict and convert is not Tensor.contiguous:
            # torch's load_state_dict puts what `.to()` gives into another optimizer, which goes its own way.
            return StateTensor(self.param, self.state_name, self.dtype, owner=self._owner, copy_on=found.device)
        return self if found is like else None

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        copy = memo[id(self)] = self.plain()
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.plain().__reduce_ex__(protocol)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        try:
            return repr(self.plain())
        except ZeroOffloadError:
            return f"StateTensor({self.describe()})"

    def describe(self) -> str:
        return f"{self.state_name} of {describe(self.param)}, shape={tuple(self.shape)}, dtype={self.dtype}"


def _address(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    raise ZeroOffloadError(f"{args[0].describe()} has no address in memory; take a copy of it (.clone())")


def _set_data(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[0] if args[1] is args[0] else args[0].copy_(args[1])


def _convert(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    converted = args[0]._converted(func, args[1:], kwargs)
    return StateTensor.run(func, args, kwargs) if converted is None else converted


_CONVERSIONS = ("cpu", "cuda", "xpu", "contiguous", "float", "double", "half", "bfloat16")
StateTensor.own = {
    **dict.fromkeys((getattr(Tensor, name) for name in _CONVERSIONS), _convert),
    **for_stager(StateTensor.run),
    **for_stager(_convert, Tensor.to),
    **for_stager(_address, Tensor.data_ptr),
    **dict.fromkeys((Tensor.detach, _data.__get__), itself),
    _data.__set__: _set_data,
    Tensor.untyped_storage: as_it_is,
}
