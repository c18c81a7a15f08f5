"""`optimizer.state`: torch's mapping, whose entries of offloaded parameters rest on their tiers.

`States` is the mapping, `Entry` what it has of one offloaded parameter, `StateTensor` one state of that parameter. None
of them holds values: an operation on a state reads them, and writes them back if it has changed them. `Readers` knows
the entries and states that the program holds. They take their values into memory where torch's would still have them
after a change.
"""

from __future__ import annotations

import copy
import weakref
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

from zero_offload.base.errors import ConfigError, ZeroOffloadError
from zero_offload.hardware.kernels.arguments import Hyper
from zero_offload.storage.shards.checkpointed import METADATA, Checkpointed, Part, PlainPart, wrapper
from zero_offload.storage.shards.registry import OptimizerStates, Owner, by_owner, dropped_error, is_dropped, owner_of
from zero_offload.storage.shards.shard import Component
from zero_offload.storage.shards.staged import staging

State = dict[str, Any]
"""What an optimizer keeps of one ordinary parameter, by torch's names."""
STEP = "step"
"""Torch's name for how many updates a parameter has had."""
BESIDE = ("residual", "master")
"""What completes a value to its master; no state of an optimizer's."""

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
    """What this is a view of."""
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
        """What passed `__torch_function__` by."""
        return _run(func, args, kwargs or {})

    def _converted(self, convert: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
        """What needs no values: what it is already, and a copy of a state dict's, of the same dtype."""
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
        return f"{self.state_name} of {_where(self.param)}, shape={tuple(self.shape)}, dtype={self.dtype}"


def _run(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A function of states on copies of them; those that it has changed are written, and views of them are views."""
    whole: list[tuple[StateTensor, Tensor, int]] = []
    given: list[tuple[StateTensor, Tensor]] = []

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


class Keeper(Protocol):
    """What a mapping asks of its optimizer."""

    counts_steps: bool
    """True if torch's optimizer of this name keeps `step`."""

    def hyper_of(self, param: nn.Parameter) -> Hyper | None:
        """Hyperparameters of one of its parameters; None for another's."""

    def hypers(self) -> Mapping[nn.Parameter, Hyper]:
        """Hyperparameters of all its parameters that are offloaded."""


class Entry(MutableMapping[str, Any]):
    """What an optimizer keeps of one offloaded parameter, as it is now. It has `step`, the states, and what completes
    the value to its fp32 master ("residual" of bf16, "master" of fp16).

    Where torch's entry would be one that the optimizer has no more, it has its values in memory, as a plain dict.
    """

    of_dict = False
    state_name = ""
    param: nn.Parameter
    _optimizer: Keeper

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._kept: dict[str, Any] | None = dict(*args, **kwargs)

    @classmethod
    def at_rest(cls, optimizer: Keeper, param: nn.Parameter) -> Entry:
        made = cls()
        made._kept, made._optimizer, made.param = None, optimizer, param
        _states_of(param).readers.add(made)
        return made

    def rests_at(self, param: nn.Parameter) -> bool:
        """True if it shows what there is of this parameter now."""
        return self._kept is None and self.param is param

    def keep(self) -> None:
        """Take the values into memory: the optimizer is about to have others."""
        self._kept = self._content()
        for value in self._kept.values():
            if isinstance(value, StateTensor):
                value.keep()

    def _content(self) -> dict[str, Any]:
        if self._kept is not None:
            return self._kept
        hyper = self._optimizer.hyper_of(self.param)
        return {} if hyper is None else dict(tensors_of(self.param, hyper))

    def __getitem__(self, name: str) -> Any:
        return self._content()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._content())

    def __len__(self) -> int:
        return len(self._content())

    def __setitem__(self, name: str, value: Any) -> None:
        if self._kept is not None:
            self._kept[name] = value
        elif not (content := self._content()):
            assign(self._optimizer, self.param, {name: value})
        elif value is None and name in content:
            del self[name]
        elif not (isinstance(value, StateTensor) and value.rests_at(self.param, name)):
            check_assigned(self._optimizer, self.param, {**content, name: value})
            del content  # its holders' values are read before they are replaced
            values = settled({name: value}, self.param)[name]
            states = _states_of(self.param)
            states.readers.before_replacing([self.param], [name])
            states.edit(self.param, name, values)

    def __delitem__(self, name: str) -> None:
        if self._kept is not None:
            del self._kept[name]
            return
        if name not in (content := self._content()):
            raise KeyError(name)
        if self._optimizer.counts_steps or name in (STEP, *BESIDE):
            raise ConfigError(
                f"{type(self._optimizer).__name__} needs {name} of {_where(self.param)} beside "
                f"{_names(set(content) - {name})}; reset all of them by optimizer.state[param].clear(), or zero this "
                f"one by optimizer.state[param][{name!r}].zero_()"
            )
        self.clear()

    def clear(self) -> None:
        if self._kept is not None:
            self._kept.clear()
            return
        states = _states_of(self.param)
        states.readers.discard(self)  # it goes on as the optimizer's entry
        states.reset([self.param])
        states.readers.add(self)

    def copy(self) -> dict[str, Any]:
        return dict(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return {name: copy.deepcopy(value, memo) for name, value in self.items()}

    def __reduce__(self) -> Any:
        return dict, (), None, None, iter(self.items())

    def __repr__(self) -> str:
        return repr(self._content())


class States(defaultdict[Any, Any]):
    """`optimizer.state`. Its own are the entries of ordinary parameters, which are the program's as torch's are."""

    def __init__(self, optimizer: Keeper) -> None:
        defaultdict.__init__(self, dict)
        self._optimizer: weakref.ref[Keeper] | None = weakref.ref(optimizer)

    def _keeper(self, key: Any) -> Keeper | None:
        """The optimizer, where an entry rests elsewhere, or would."""
        if not isinstance(key, nn.Parameter) or dict.__contains__(self, key) or self._optimizer is None:
            return None
        if is_dropped(key):
            raise dropped_error(key)
        return None if owner_of(key) is None else self._optimizer()

    def away(self) -> list[nn.Parameter]:
        """Parameters whose entries rest elsewhere."""
        optimizer = None if self._optimizer is None else self._optimizer()
        if optimizer is None:
            return []
        offloaded = optimizer.hypers()
        return [each for each in offloaded if not dict.__contains__(self, each) and _has_states(each)]

    def keep(self) -> None:
        """The optimizer has another mapping: take the values into memory."""
        for param in self.away():
            entry = self[param]
            entry.keep()
            dict.__setitem__(self, param, entry.copy())
        self._optimizer = None

    # The rest of a mapping by these: dict's own would not see what rests elsewhere.
    keys: Any = MutableMapping.keys
    values: Any = MutableMapping.values
    items: Any = MutableMapping.items
    update: Any = MutableMapping.update
    popitem: Any = MutableMapping.popitem
    __eq__: Any = MutableMapping.__eq__
    __ne__: Any = object.__ne__

    def __missing__(self, key: Any) -> Any:
        optimizer = self._keeper(key)
        return defaultdict.__missing__(self, key) if optimizer is None else Entry.at_rest(optimizer, key)

    def __contains__(self, key: Any) -> bool:
        optimizer = self._keeper(key)
        if optimizer is None:
            return dict.__contains__(self, key)
        return optimizer.hyper_of(key) is not None and _has_states(key)

    def get(self, key: Any, default: Any = None) -> Any:
        if key not in self:
            return default
        return self[key]

    def __iter__(self) -> Iterator[Any]:
        yield from dict.__iter__(self)
        yield from self.away()

    def __len__(self) -> int:
        return dict.__len__(self) + len(self.away())

    def __setitem__(self, key: Any, value: Any) -> None:
        optimizer = self._keeper(key)
        if optimizer is None:
            dict.__setitem__(self, key, value)
        else:
            assign(optimizer, key, value)

    def setdefault(self, key: Any, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]

    def __delitem__(self, key: Any) -> None:
        if self._keeper(key) is None:
            dict.__delitem__(self, key)
        elif key not in self:
            raise KeyError(key)
        else:
            reset([key])

    def pop(self, key: Any, *default: Any) -> Any:
        if key not in self and not default:
            raise KeyError(key)
        if key not in self:
            return default[0]
        found = self[key]
        del self[key]
        return found

    def clear(self) -> None:
        reset(self.away())
        dict.clear(self)

    def copy(self) -> Any:
        return defaultdict(dict, self.items())

    __copy__ = copy

    def __reduce__(self) -> Any:
        return defaultdict, (dict,), None, None, iter(self.items())

    def __repr__(self) -> str:
        return repr(dict(self.items()))


class Readers:
    """Entries and states of one model that the program has in hand."""

    def __init__(self) -> None:
        self._known: Any = WeakIdKeyDictionary()

    def add(self, reader: StateTensor | Entry) -> None:
        self._known[reader] = None

    def discard(self, reader: Entry) -> None:
        self._known.pop(reader, None)

    def before_step(self) -> None:
        """States of any parameter change in place, or go: torch's tensors follow, a state dict stays what it was."""
        self._keep(lambda each: each.of_dict)

    def before_edit(self, state: StateTensor) -> None:
        """The program changes this one in place."""
        param, name = state.param, state.state_name
        self._keep(lambda each: each.of_dict and each is not state and each.param is param and each.state_name == name)

    def before_loading(self, states: Iterable[object]) -> None:
        """A load replaces what these show."""
        loaded = {id(state): state for state in states if isinstance(state, StateTensor)}
        keys = {(id(state.param), state.state_name) for state in loaded.values()}
        self._keep(lambda each: each.of_dict and id(each) not in loaded and (id(each.param), each.state_name) in keys)

    def before_replacing(self, params: Iterable[nn.Parameter], names: Collection[str] | None = None) -> None:
        """The optimizer is to have other entries of these parameters; with `names`, other tensors in them."""
        wanted = set(map(id, params))
        self._keep(lambda each: id(each.param) in wanted and (names is None or each.state_name in names))

    def _keep(self, is_meant: Callable[[StateTensor | Entry], bool]) -> None:
        for each in list(self._known):
            if is_meant(each):
                each.keep()
                self._known.pop(each, None)


def tensors_of(param: nn.Parameter, hyper: Hyper, owner: Owner | None = None) -> dict[str, StateTensor]:
    """What there is of an offloaded parameter; nothing before its first step. `owner` is its own for a state dict."""
    kept = _states_of(param).kept(param, hyper.states)
    return {name: StateTensor(param, name, dtype, owner=owner) for name, dtype in kept.items()}


def settled(entry: Mapping[str, Any], param: nn.Parameter) -> dict[str, Any]:
    """`entry` with copies of states that are other parameters': those may change before they are read."""
    return {
        name: value.plain() if isinstance(value, StateTensor) and not value.rests_at(param, name) else value
        for name, value in entry.items()
    }


def assign(optimizer: Keeper, param: nn.Parameter, entry: Mapping[str, Any]) -> None:
    """What `optimizer.state[param] = entry` does for an offloaded parameter. Raises ConfigError, and changes nothing,
    for what the optimizer could not go on with."""
    if isinstance(entry, Entry) and entry.rests_at(param):
        return
    hyper = check_assigned(optimizer, param, entry)
    if all(value is None for value in entry.values()):
        reset([param])
    else:
        write_offloaded(param, hyper, settled(entry, param))


def write_offloaded(param: nn.Parameter, hyper: Hyper, entry: State) -> None:
    """Give a runtime what a state dict's entry, or an optimizer's own, says of its parameter."""
    owner = owner_of(param)
    assert owner is not None
    states = {name: entry.get(name) for name in hyper.states}
    # torch's SGD counts no steps, and has a buffer of None where it has made none.
    has_stepped = entry and (not states or any(state is not None for state in states.values()))
    beside = {name: entry[name] for name in BESIDE if name in entry}
    owner.states.write(param, int(entry.get(STEP, 1 if has_stepped else 0)), states, beside)


def reset(params: Iterable[nn.Parameter]) -> None:
    """Drop the states of offloaded parameters: the next step is the first."""
    for owner, owned in by_owner(params).items():
        assert owner is not None
        owner.states.reset(owned)


def check_assigned(optimizer: Keeper, param: nn.Parameter, entry: Any) -> Hyper:
    """Hyperparameters of a parameter that may have this entry."""
    kind, hyper = type(optimizer).__name__, optimizer.hyper_of(param)
    what = f"optimizer.state of {_where(param)}"
    if hyper is None:
        raise ConfigError(f"{what} is not this {kind}'s: the parameter is in none of its param groups")
    if not isinstance(entry, Mapping):
        raise ConfigError(f"{what} is to be a {type(entry).__name__}; use a dict of {_names(hyper.states)}")
    needed = (*((STEP,) if optimizer.counts_steps else ()), *hyper.states)
    given = {name for name, value in entry.items() if value is not None}
    if unknown := sorted(map(str, entry.keys() - {STEP, *hyper.states, *BESIDE})):
        raise ConfigError(
            f"{what} has no place for {_names(unknown)}: {kind} keeps {_names((STEP, *hyper.states))} there. Keep "
            "values of your own in a dict of your own"
        )
    if given and (lacking := [name for name in needed if name not in given]):
        raise ConfigError(
            f"{what} would lack {_names(lacking)}, which {kind} needs beside {_names(sorted(given))}; assign "
            f"{_names(needed)} together, or nothing ({{}}) to begin anew"
        )
    for name in given - {STEP}:
        if not isinstance(entry[name], Tensor):
            raise ConfigError(
                f"{what}: {name} is a {type(entry[name]).__name__}; use a tensor of the parameter's shape"
            )
    if STEP in given:
        count_of(entry[STEP], what)
    check_shapes(param, dict(entry), given - {STEP}, what)
    return hyper


def check_shapes(param: nn.Parameter, state: State, names: Iterable[str], what: str) -> None:
    """Raise ConfigError for what is kept of a parameter in another shape than its own."""
    for name in names:
        if (kept := state.get(name)) is not None and kept.shape != param.shape:
            raise ConfigError(
                f"{what}: {name} has shape {tuple(kept.shape)}, the parameter {tuple(param.shape)}; load a state dict "
                "of this model, and build a new optimizer for a parameter whose data was replaced"
            )


def count_of(step: Any, what: str) -> int:
    """A number of steps, from what a program gives as `step`."""
    try:
        count = float(step)
    except (TypeError, ValueError, RuntimeError):
        count = -1.0
    if not (count >= 0 and count.is_integer()):
        raise ConfigError(f"{what}: step is {step!r}; use a number of steps, 0 or more")
    return int(count)


def _has_states(param: nn.Parameter) -> bool:
    return _states_of(param).step_of(param) is not None


def _states_of(param: nn.Parameter) -> OptimizerStates:
    owner = owner_of(param)
    assert owner is not None
    return owner.states


def _where(param: nn.Parameter) -> str:
    owner = owner_of(param)
    return "a parameter" if owner is None else owner.places.describe(param)


def _names(names: Iterable[str]) -> str:
    return ", ".join(names)
