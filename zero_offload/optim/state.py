"""`optimizer.state`: torch's mapping, whose entries of offloaded parameters rest on their tiers.

`States` is the mapping, `Entry` what it has of one offloaded parameter, `StateTensor` (`standins/state_tensor.py`) one
state of that parameter. None of them holds values.
"""

from __future__ import annotations

import copy
import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from typing import Any, Protocol

from torch import Tensor, nn

from zero_offload.base.errors import ConfigError
from zero_offload.hardware.kernels.arguments import Hyper
from zero_offload.standins.owners import by_owner, describe, dropped_error, is_dropped, owner_of
from zero_offload.standins.readers import StateReader
from zero_offload.standins.sources import Owner, StateSource
from zero_offload.standins.state_tensor import STEP, StateTensor

State = dict[str, Any]
"""Optimizer state of one ordinary parameter, by torch's names."""
BESIDE = ("residual", "master")
"""Components that complete a value to its master; they are not states of an optimizer."""


class Keeper(Protocol):
    """The optimizer of a mapping, as the mapping uses it."""

    counts_steps: bool
    """True if torch's optimizer of this name keeps `step`."""

    def hyper_of(self, param: nn.Parameter) -> Hyper | None:
        """Hyperparameters of one of its parameters; None for another's."""

    def hypers(self) -> Mapping[nn.Parameter, Hyper]:
        """Hyperparameters of all its parameters that are offloaded."""


class Entry(StateReader, MutableMapping[str, Any]):
    """Optimizer state of one offloaded parameter, as it is now. It has `step`, the states, and the component that
    completes the value to its fp32 master ("residual" of bf16, "master" of fp16).

    An entry that the optimizer has no more has its values in memory, as a plain dict.
    """

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
                f"{type(self._optimizer).__name__} needs {name} of {describe(self.param)} beside "
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


def tensors_of(param: nn.Parameter, hyper: Hyper, owner: Owner | None = None) -> dict[str, StateTensor]:
    """The states of an offloaded parameter; empty before its first step. `owner` is its own for a state dict."""
    kept = _states_of(param).kept(param, hyper.states)
    return {name: StateTensor(param, name, dtype, owner=owner) for name, dtype in kept.items()}


def settled(entry: Mapping[str, Any], param: nn.Parameter) -> dict[str, Any]:
    """`entry` with copies of states that are other parameters': those may change before they are read."""
    return {
        name: value.plain() if isinstance(value, StateTensor) and not value.rests_at(param, name) else value
        for name, value in entry.items()
    }


def assign(optimizer: Keeper, param: nn.Parameter, entry: Mapping[str, Any]) -> None:
    """Carry out `optimizer.state[param] = entry` for an offloaded parameter. Raises ConfigError, and changes nothing,
    for entries that it could not go on with.
    """
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
    what = f"optimizer.state of {describe(param)}"
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
                f"{what}: {name} has shape {tuple(kept.shape)}, the parameter {tuple(param.shape)}. Load a state dict "
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


def _states_of(param: nn.Parameter) -> StateSource:
    owner = owner_of(param)
    assert owner is not None
    return owner.states


def _names(names: Iterable[str]) -> str:
    return ", ".join(names)
