"""Numbers that an optimizer keeps beside the states of parameters, by value: of groups, attributes, and `state`.

A `NumberTree` reads them of one object as `Values` by path, and writes `Values` into it or into a copy of it. Paths
lead through dicts, lists, and objects of the optimizer's own packages. Functions, modules and the like are left as they
are. So are entries that name parameters: they are of one parameter, not of all.
"""

from __future__ import annotations

import random
from collections import OrderedDict, defaultdict, deque
from collections.abc import Collection, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from zero_offload.base.errors import ConfigError

Path = tuple[Any, ...]
Values = dict[Path, Any]

GROUPS, ATTRIBUTES, STATE = "groups", "attributes", "state"
"""First items of paths."""
OWN_PREFIX = "_zo_"
"""Attributes of ours on the program's optimizer: not the optimizer's numbers."""

_DICTS = (dict, OrderedDict, defaultdict)
_SEQUENCES = (list, tuple, deque)
_CONTAINERS: dict[str, type] = {kind.__name__: kind for kind in (*_DICTS, *_SEQUENCES)}
_LEAVES = (
    *(bool, int, float, complex, str, bytes, type(None), set, frozenset),
    *(torch.dtype, torch.device, torch.Size, torch.Generator, Tensor),
    *(np.generic, np.ndarray, random.Random),
)
"""Classes of values that are taken as a whole."""
HOOKS = tuple(
    f"_optimizer_{name}_hooks"
    for name in (
        "step_pre",
        "step_post",
        "state_dict_pre",
        "state_dict_post",
        "load_state_dict_pre",
        "load_state_dict_post",
    )
)
NOT_COPIED = frozenset({"state", "param_groups", "step", "zero_grad", *HOOKS})
"""Attributes that are not an optimizer's numbers: schedulers put functions of their own over `step`."""


class _NotThere:
    def __repr__(self) -> str:
        return "nothing"


ABSENT: Any = _NotThere()
"""Value of a path that is not there."""


@dataclass(frozen=True, slots=True)
class _Made:
    """A container at a path: its class, and a sequence's length."""

    kind: type
    length: int = -1


@dataclass(frozen=True, slots=True)
class _Random:
    """State of a random generator."""

    state: Any


def is_own(name: str) -> bool:
    """True for an attribute that a copy of the optimizer does not have."""
    return name in NOT_COPIED or name.startswith(OWN_PREFIX)


class NumberTree:
    """The numbers of one optimizer."""

    def __init__(
        self,
        groups: list[dict[str, Any]],
        attributes: MutableMapping[str, Any],
        state: MutableMapping[Any, Any],
        params: Collection[int],
        packages: Collection[str],
    ) -> None:
        """`params` are ids of its parameters; objects of classes of `packages` are looked into, but torch's."""
        self._roots = {GROUPS: groups, ATTRIBUTES: attributes, STATE: state}
        self._params = params
        self._packages = frozenset(packages) - {"torch"}
        self._tensors: dict[Path, Tensor] = {}
        """Tensors of numbers, which stay where a step has put others: those may be tensors of a state too."""
        self._of_params: list[tuple[Any, Any]] = []
        """Containers with keys whose entries name parameters, as `read` has seen them."""
        for path, value in self.read().items():
            if isinstance(value, Tensor):
                self._tensors[path] = self._parent(path)[path[-1]]
        self._kept = {(id(container), key): _text(key, container[key], params) for container, key in self._of_params}

    def read(self) -> Values:
        """All numbers by value."""
        found: Values = {}
        seen: set[int] = set()
        self._of_params = []
        for path, container in self._tops():
            self._read(container, path, found, seen)
        return found

    def write(self, values: Values, now: Values | None = None) -> None:
        """Make the numbers these; `now` is what `read` says, where the caller knows it."""
        now = self.read() if now is None else now
        self.write_changes(changes(now, values))

    def write_changes(self, changed: Values) -> None:
        """Make the numbers at these paths these."""
        for path in sorted((path for path, value in changed.items() if value is ABSENT), key=len, reverse=True):
            self._drop(path)
        for path, value in changed.items():
            if value is not ABSENT:
                self._put(path, value)

    def apart(self, state: Any) -> Any:
        """A state without tensors of numbers: copies stand for those."""
        if isinstance(state, Tensor):
            return state.clone() if any(state is each for each in self._tensors.values()) else state
        if self._tensors and type(state) is dict:
            state.update((key, self.apart(value)) for key, value in list(state.items()))
        elif self._tensors and type(state) is list:
            state[:] = map(self.apart, state)
        return state

    def drop_entries_of_params(self) -> list[tuple[Any, Any]]:
        """Drop entries that name parameters, which `read` has seen and which were not there at first.

        Return their keys and values.
        """
        new = [(container, key) for container, key in self._of_params if (id(container), key) not in self._kept]
        return [(key, container.pop(key)) for container, key in new]

    def entries_of_params(self) -> Iterator[tuple[Any, Any, bool]]:
        """Entries that name parameters and were there at first: key, value, and whether it is another value now."""
        for container, key in self._of_params:
            if (id(container), key) in self._kept:
                text = _text(key, container[key], self._params)
                yield key, container[key], text != self._kept[id(container), key]

    def _tops(self) -> Iterator[tuple[Path, Any]]:
        for number, group in enumerate(self._roots[GROUPS]):
            yield (GROUPS, number), group
        yield (ATTRIBUTES,), self._roots[ATTRIBUTES]
        yield (STATE,), self._roots[STATE]

    def _items(self, container: Any, path: Path) -> Iterator[tuple[Any, Any]]:
        """Entries of a container, as far as they are numbers."""
        if isinstance(container, _SEQUENCES):
            yield from enumerate(container)
            return
        content: Mapping[Any, Any] = container if isinstance(container, Mapping) else vars(container)
        for key, value in list(content.items()):
            if path == (STATE,) and isinstance(key, Tensor):
                continue
            if (len(path) == 2 and path[0] == GROUPS and key == "params") or (path == (ATTRIBUTES,) and is_own(key)):
                continue
            yield key, value

    def _names_param(self, key: Any, value: Any) -> bool:
        if id(key) in self._params or id(value) in self._params:
            return True
        return isinstance(value, list | tuple) and any(id(each) in self._params for each in value)

    def _is_container(self, value: Any) -> bool:
        kind = type(value)
        if kind in _DICTS:
            return True
        if kind in _SEQUENCES:
            return kind is not tuple or not _is_leaf(value)
        return (
            kind.__module__.partition(".")[0] in self._packages
            and hasattr(value, "__dict__")
            and not isinstance(value, type | Tensor | torch.nn.Module)
        )

    def _read(self, container: Any, path: Path, found: Values, seen: set[int]) -> None:
        if id(container) in seen:
            return
        seen.add(id(container))
        for key, value in self._items(container, path):
            where = (*path, key)
            if self._names_param(key, value):
                if not isinstance(container, _SEQUENCES):
                    self._of_params.append((container if isinstance(container, dict) else vars(container), key))
            elif self._is_container(value):
                if id(value) not in seen:
                    found[where] = _Made(type(value), len(value) if isinstance(value, _SEQUENCES) else -1)
                    self._read(value, where, found, seen)
            elif _is_leaf(value):
                found[where] = _kept(value)

    def _parent(self, path: Path) -> Any:
        at: Any = self._roots
        for key in path[:-1]:
            at = at[key] if isinstance(at, Mapping | list | tuple | deque) else vars(at)[key]
        return at if isinstance(at, Mapping | list | tuple | deque) else vars(at)

    def _drop(self, path: Path) -> None:
        try:
            parent = self._parent(path)
        except (LookupError, TypeError):
            return  # its container went with it
        if isinstance(parent, MutableMapping):
            parent.pop(path[-1], None)

    def _put(self, path: Path, value: Any) -> None:
        parent, key = self._parent(path), path[-1]
        old = parent.get(key, ABSENT) if isinstance(parent, Mapping) else parent[key]
        if isinstance(value, _Made):
            self._put_container(parent, key, old, value)
        elif isinstance(value, _Random) and old is not ABSENT:
            _set_random(old, value.state)
        elif isinstance(value, Tensor) and not isinstance(parent, tuple):
            known = self._tensors.get(path)
            if known is None or not _alike(known, value):
                self._tensors[path] = parent[key] = _kept(value)
            else:
                with torch.no_grad():
                    known.copy_(value)
                parent[key] = known
        elif isinstance(old, np.ndarray) and isinstance(value, np.ndarray) and old.shape == value.shape:
            old[...] = value
        elif isinstance(parent, tuple):
            raise ConfigError(f"{told(path)} stands in a tuple beside containers, where no number can be put back")
        else:
            parent[key] = _kept(value)

    def _put_container(self, parent: Any, key: Any, old: Any, made: _Made) -> None:
        if type(old) is not made.kind:
            if made.kind in (*_DICTS, *_SEQUENCES):
                parent[key] = old = made.kind()
            else:
                parent[key] = old = object.__new__(made.kind)
        if made.kind in (list, deque) and len(old) != made.length:
            while len(old) > made.length:
                old.pop()
            old.extend([None] * (made.length - len(old)))


def changes(before: Values, after: Values) -> Values:
    """Values of `after` at paths where they are others than before; ABSENT where they are not there any more."""
    found = {path: value for path, value in after.items() if not is_same(before.get(path, ABSENT), value)}
    found.update({path: ABSENT for path in before if path not in after})
    return found


def is_same(one: Any, other: Any) -> bool:
    """True for values of one type and the same bits; one NaN is like another."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        return _alike(one, other) and bool(torch.equal(_bits(one), _bits(other)))
    if isinstance(one, np.ndarray):
        return bool(one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes())
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(map(is_same, one, other))
    if isinstance(one, _Random):
        return is_same(one.state, other.state)
    return bool(one == other) or (isinstance(one, float | complex | np.generic) and bool(one != one and other != other))


def outlined(values: Values) -> list[Any]:
    """Numbers as `state_rows.pack` takes them: pairs of a path and a value. Values that it does not know are dicts."""
    return [[path, _outlined(value)] for path, value in values.items()]


def _outlined(value: Any) -> Any:
    if isinstance(value, _Made):
        return {"container": value.kind.__name__, "length": value.length}
    if isinstance(value, _Random):
        return {"random": _outlined(value.state)}
    if isinstance(value, bytes):
        return {"bytes": value.hex()}
    if isinstance(value, set | frozenset):
        return {type(value).__name__: list(map(_outlined, value))}
    if isinstance(value, np.ndarray):
        return {"array": torch.from_numpy(value.copy())}
    if type(value) is tuple:
        return tuple(map(_outlined, value))
    return value


def from_outline(pairs: list[Any]) -> Values:
    """The numbers of which `outlined` made these pairs. Objects are left out: an optimizer that is built has them."""
    values = {tuple(path): _read_outline(value) for path, value in pairs}
    return {path: value for path, value in values.items() if value is not ABSENT}


def _read_outline(value: Any) -> Any:
    if type(value) is tuple:
        return tuple(map(_read_outline, value))
    if not isinstance(value, dict):
        return value
    if "container" in value:
        kind = _CONTAINERS.get(value["container"])
        return ABSENT if kind is None else _Made(kind, value["length"])
    ((key, inner),) = value.items()
    match key:
        case "random":
            return _Random(_read_outline(inner))
        case "bytes":
            return bytes.fromhex(inner)
        case "array":
            return inner.numpy()
        case _:
            return (set if key == "set" else frozenset)(map(_read_outline, inner))


def told(path: Path) -> str:
    """A path as Python writes it."""
    if path[0] == GROUPS:
        begin, rest = f"param_groups[{path[1]}]", path[2:]
    elif path[0] == ATTRIBUTES:
        begin, rest = str(path[1]), path[2:]
    else:
        begin, rest = "state", path[1:]
    return begin + "".join(f"[{key!r}]" for key in rest)


def _text(key: Any, value: Any, params: Collection[int]) -> str:
    """A value of one parameter, whose number shows a change; nothing of lists of parameters."""
    return repr(value) if id(key) in params and id(value) not in params else ""


def _is_leaf(value: Any) -> bool:
    """True for a value that is taken as a whole."""
    if isinstance(value, _LEAVES):
        return True
    return isinstance(value, tuple) and all(map(_is_leaf, value))


def _kept(value: Any) -> Any:
    """A copy of a leaf's value."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, np.ndarray | set):
        return value.copy()
    if type(value) is tuple:
        return tuple(map(_kept, value))
    if isinstance(value, torch.Generator):
        return _Random(value.get_state())
    if isinstance(value, random.Random):
        return _Random(value.getstate())
    return value


def _set_random(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    else:
        generator.setstate(state)


def _alike(one: Tensor, other: Tensor) -> bool:
    return type(one) is type(other) and one.dtype == other.dtype and one.shape == other.shape


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)
