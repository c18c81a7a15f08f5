"""One state of an offloaded parameter where it rests: a tensor without memory, see `StateTensor`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from zero_offload.base.errors import ZeroOffloadError
from zero_offload.standins.checkpointed import METADATA, Checkpointed, Part, PlainPart, wrapper
from zero_offload.standins.owners import OptimizerStates, Owner, describe, dropped_error, owner_of
from zero_offload.standins.staged import staging
from zero_offload.storage.shards.shard import Component

STEP = "step"
"""Torch's name for how many updates a parameter has had."""

_CONVERSIONS = frozenset(
    getattr(Tensor, name) for name in ["to", "cpu", "cuda", "xpu", "contiguous", "float", "double", "half", "bfloat16"]
)
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


class StateTensor(Checkpointed, _Fields):
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
            self._kept = self._read()
        except ZeroOffloadError as error:
            self._kept = error
            if self._owned().parts.is_divided(self.param):
                self._kept = ZeroOffloadError(
                    f"{self._describe()}: the model has had a step or other states since this state dict was made, and "
                    "where ranks divide parameters a state dict keeps none. Call state_dict() again; dcp.async_save "
                    "keeps a copy"
                )

    def plain(self) -> Tensor:
        """A copy, as a plain tensor."""
        root = self if self._root is None else self._root
        values = root._read()
        return values if root is self and self._kept is None else self._part(values).clone()

    def part(self) -> Part:
        if isinstance(self._kept, ZeroOffloadError):
            raise self._kept
        if self._root is None and self._kept is None and not self._is_copy:
            return self._owned().parts.of(self.param, self.state_name, self.dtype, self)
        # It is no longer what rests there.
        return PlainPart(self.plain() if self._kept is None else self._part(self._kept))

    def _owned(self) -> Owner:
        owner = self._owner or owner_of(self.param)
        if owner is None:
            raise dropped_error(self.param)
        return owner

    def _states(self) -> OptimizerStates:
        return self._owned().states

    def _read(self) -> Tensor:
        """The values that were kept, or a copy of what rests on the tier."""
        if isinstance(self._kept, ZeroOffloadError):
            raise self._kept
        if self._kept is not None:
            return self._kept
        # A tensor that is made in inference mode does not count its changes.
        with torch.inference_mode(False), torch.no_grad():
            return self._states().read(self.param, self.state_name).to(self.device)

    def _write(self, values: Tensor) -> None:
        """Write the whole state."""
        if self._kept is not None:
            return
        if values.shape != self.shape:
            raise ZeroOffloadError(f"{self._describe()} was to have shape {tuple(values.shape)}; it keeps its own")
        if self._is_copy:
            self._kept = values
            return
        states = self._states()
        states.readers.before_edit(self)
        states.edit(self.param, self.state_name, values)

    def _part(self, values: Tensor) -> Tensor:
        """This view of the whole state's values."""
        if self._root is None:
            return values
        return values.view(-1).view(self.dtype).as_strided(self.size(), self.stride(), self.storage_offset())

    def _view(self, of: Tensor) -> StateTensor:
        """A view of this state that lies in a copy of it as `of` does."""
        size, strides, offset = of.size(), of.stride(), of.storage_offset()
        made: StateTensor = wrapper(
            StateTensor, size, strides=strides, storage_offset=offset, dtype=of.dtype, device=of.device
        )
        made.param, made.state_name, made._owner, made._root, made._kept = self.param, self.state_name, None, self, None
        return made

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if (answer := staging(func, args)) is not None:
            return answer
        if args and isinstance(state := args[0], StateTensor):
            if func in (Tensor.detach, _data.__get__):
                return state
            if func == _data.__set__:
                return state if args[1] is state else state.copy_(args[1])
            if func is Tensor.data_ptr:
                raise ZeroOffloadError(f"{state._describe()} has no address in memory; take a copy of it (.clone())")
            if func in _CONVERSIONS and (converted := state._converted(func, args[1:], kwargs)) is not None:
                return converted
        return _run(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Operations that passed `__torch_function__` by."""
        return _run(func, args, kwargs or {})

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
            return f"StateTensor({self._describe()})"

    def _describe(self) -> str:
        return f"{self.state_name} of {describe(self.param)}, shape={tuple(self.shape)}, dtype={self.dtype}"


def _run(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A function of states on copies of them; those that it has changed are written, and views of them are views."""
    whole: list[tuple[StateTensor, Tensor, int]] = []
    given: list[tuple[StateTensor, Tensor]] = []

    # The operation runs on values that are read for it, each state once.
    def values_of(state: StateTensor) -> Tensor:
        root = state if state._root is None else state._root
        values = next((values for known, values, _ in whole if known is root), None)
        if values is None:
            values = root._read()
            whole.append((root, values, values._version))
        given.append((state, state._part(values)))
        return given[-1][1]

    args, kwargs = tree_map_only(StateTensor, values_of, (args, kwargs))
    result = func(*args, **kwargs)
    # torch's fused updates do not count the changes that they make.
    is_fused = getattr(func, "__name__", "").startswith("_fused_")
    for root, values, version in whole:
        if is_fused or values._version != version:
            root._write(values)
    at_rest = [(root, values) for root, values, _ in whole if root._kept is None]

    # A result that shares memory with the values stands for the state again, since that memory is dropped.
    def wrap(tensor: Tensor) -> Tensor:
        for state, values in given:
            if tensor is values:
                return state
        if type(tensor) is Tensor and tensor.layout is torch.strided and not tensor.is_meta:
            place = tensor.untyped_storage()._cdata
            for root, values in at_rest:
                if values.untyped_storage()._cdata == place:
                    return root._view(tensor)
        return tensor

    if isinstance(result, np.ndarray):
        address = result.__array_interface__["data"][0]
        if any(0 <= address - values.data_ptr() < values.nbytes for _, values in at_rest):
            result.setflags(write=False)
    if isinstance(result, Tensor | tuple | list):
        return tree_map_only(Tensor, wrap, result)
    return map(wrap, result) if isinstance(result, Iterator) else result
