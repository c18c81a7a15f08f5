"""A parameter's optimizer state as one row of bytes: `[header][outline][tensors]`.

The outline is JSON: containers, numbers, texts, and where each tensor lies. A tensor keeps its order of memory, because
a product of a transposed matrix rounds otherwise; gaps between its elements are left out. Tensors that overlap keep
their memory as it is. `packed_bytes`, `pack` and `unpack` come in this order; `StateOutline` is the first two at once.
`packages_of` says whose classes a state may have, and `copy_of` goes the whole way. No bytes are run as code, and
nothing here knows where rows rest.

[Note: kinds of outlines]
Numbers, texts, None and dicts whose keys are texts are those of JSON. The rest is a list whose first item is its kind:
`_Reader` has a method for each. Numbers have room for the longest of 64 bits, so that a counter may grow in its place.
"""

from __future__ import annotations

import enum
import importlib
import json
import math
import struct
import zlib
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from zero_offload.base.errors import CheckpointError, ConfigError
from zero_offload.optim.unitwise.memory_regions import ALIGNMENT, aligned, regions_of, view_of
from zero_offload.plan.quantized import is_wrapper, is_wrapper_class

_HEADER = struct.Struct("<8sIIQQ")
"""Magic, version, checksum of the outline, its length, and where the tensors begin."""
_MAGIC, _VERSION = b"zo.state", 1
_NUMBER_CHARS = 24
"""Room of a number in the outline: the longest float has so many characters, the longest of 64 bits 20."""
_DTYPES = {str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
_PLAIN_TENSORS = (Tensor, nn.Parameter, FakeTensor)

Place = tuple[Any, ...]
"""Keys that lead to a value within a state."""


def packages_of(kind: type) -> frozenset[str]:
    """Packages whose classes a state of this optimizer's class may have: those of the class, its bases, and torch."""
    return frozenset({each.__module__.partition(".")[0] for each in kind.__mro__} - {"builtins"} | {"torch"})


def packed_bytes(state: Any) -> int:
    """Length of the state's row, a multiple of 64. Other numbers in the state do not change the length.

    Tensors without memory (meta and fake ones) count as others do. Raises ConfigError for a value that no row can have.
    """
    return StateOutline(state).nbytes


def pack(state: Any, row: Tensor) -> None:
    """Write a state into `row`, which is uint8, at least `packed_bytes` long, and aligned to 64 bytes.

    Tensors that lie at their place in the row are not copied.
    """
    StateOutline(state).write(row)


def unpack(row: Tensor, packages: Iterable[str] = ("torch",)) -> Any:
    """Return the state that a row has. Its tensors are views of the row: a change of them is a change of the row.

    Raises CheckpointError for a row that `pack` did not write, and for a class that is not of `packages`.
    """
    _check_row(row, _HEADER.size)
    begin, outline = _read_outline(row)
    try:
        return _Reader(row, begin, frozenset(packages)).value(outline)
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise _damaged(f"its outline describes no state ({type(error).__name__}: {error})") from error


def copy_of(state: Any, packages: Iterable[str] = ("torch",)) -> Any:
    """A state of the same values in other memory, by way of a row."""
    return unpack(packed(state), packages)


def packed(state: Any) -> Tensor:
    """A new row that has this state."""
    outline = StateOutline(state)
    nbytes = outline.nbytes
    memory = torch.empty(nbytes + ALIGNMENT, dtype=torch.uint8, device="cpu")
    begin = -memory.data_ptr() % ALIGNMENT
    row = memory[begin : begin + nbytes]
    outline.write(row)
    return row


def _read_outline(row: Tensor) -> tuple[int, Any]:
    """Where tensors begin, and the outline as JSON has it."""
    magic, version, checksum, length, begin = _HEADER.unpack(_bytes_of(row[: _HEADER.size]))
    if magic != _MAGIC:
        raise _damaged(f"it begins with {magic!r} instead of {_MAGIC!r}")
    if version != _VERSION:
        raise _damaged(f"its format is {version}, this version reads {_VERSION}")
    if not _HEADER.size + length <= begin <= row.numel() or begin % ALIGNMENT:
        raise _damaged(f"its outline has {length} bytes, its tensors begin at {begin}, and it has {row.numel()}")
    text = _bytes_of(row[_HEADER.size : _HEADER.size + length])
    if (found := zlib.crc32(text)) != checksum:
        raise _damaged(f"its outline has the checksum {found:08x} instead of {checksum:08x}")
    try:
        return begin, json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _damaged(f"its outline is not JSON ({error})") from error


def _damaged(reason: str) -> CheckpointError:
    return CheckpointError(
        f"a row of optimizer states is damaged: {reason}. Go on from another generation, or begin the states anew by "
        "optimizer.state.clear()"
    )


def _check_row(row: Tensor, nbytes: int) -> None:
    if row.dtype != torch.uint8 or row.dim() != 1 or not row.is_contiguous() or row.numel() < nbytes:
        raise ValueError(f"a row of {nbytes} bytes is uint8 and flat, not {row.dtype} of shape {tuple(row.shape)}")
    if row.data_ptr() % ALIGNMENT or row.storage_offset() % 16:
        raise ValueError(f"a row begins at a multiple of {ALIGNMENT} bytes, not at {row.data_ptr():#x}")


def _bytes_of(row: Tensor) -> bytes:
    return row.cpu().numpy().tobytes()


class StateOutline:
    """A state, described: the JSON text, and the regions of its tensors. It saves the second description where both the
    length of a state and its row are wanted."""

    def __init__(self, state: Any) -> None:
        self._tensors: list[Tensor] = []
        self._where: list[Place] = []
        self._nodes: list[list[Any]] = []
        """Of each tensor; its place comes in when all are known."""
        self._seen: set[int] = set()
        self._room = 0
        """Characters by which numbers may grow."""
        try:
            node = self._node(state, ())
        except RecursionError as error:
            raise ConfigError(
                "optimizer state: its containers are nested without end, which no row can keep"
            ) from error
        self._regions, places, nbytes = regions_of(self._tensors, lambda number: _told(self._where[number]))
        for tensor_node, (at, strides) in zip(self._nodes, places, strict=True):
            tensor_node += [self._number(at), list(map(self._number, strides))]
        self._text = json.dumps(node, separators=(",", ":"), allow_nan=False).encode()
        self._begin = aligned(_HEADER.size + len(self._text) + self._room)
        self.nbytes = aligned(self._begin + nbytes)

    @torch.no_grad()
    def write(self, row: Tensor) -> None:
        """Write the state into `row`, as `pack` does."""
        begin = self._begin
        _check_row(row, self.nbytes)
        moved = [region for region in self._regions if not region.lies_in(row, begin)]
        # A place that is written may be the source of another value, so sources within the row are copied first.
        sources = [region.source.clone() if region.intersects(row) else region.source for region in moved]
        at = begin
        for start, nbytes in (*((begin + region.at, region.nbytes) for region in self._regions), (self.nbytes, 0)):
            if start > at:
                row[at:start].zero_()
            at = start + nbytes
        for region, source in zip(moved, sources, strict=True):
            region.write(source, row, begin)
        head = bytearray(begin)
        text = self._text
        _HEADER.pack_into(head, 0, _MAGIC, _VERSION, zlib.crc32(text), len(text), begin)
        head[_HEADER.size : _HEADER.size + len(text)] = text
        row[:begin].copy_(torch.frombuffer(head, dtype=torch.uint8))

    def _number(self, value: float) -> float:
        """A number, with room to grow."""
        length = len(repr(value))
        self._room += _NUMBER_CHARS - length if length <= _NUMBER_CHARS else -length % _NUMBER_CHARS
        return value

    def _node(self, value: Any, where: Place) -> Any:
        kind = type(value)
        if value is None or kind is str:
            return value
        if kind is bool:
            self._room += value  # "true" has four letters, "false" five
            return value
        if kind is int:
            return self._number(value)
        if kind is float:
            return self._float(value)
        if kind in _PLAIN_TENSORS:
            return self._tensor(value, where)
        if kind in _NODES:
            return [_NODES[kind][0], *_NODES[kind][1](value)]
        if isinstance(value, enum.Enum):
            return ["enum", _class_name(value, where), value.name]
        if isinstance(value, np.generic):
            return ["numpy", value.dtype.str, self._node(value.item(), where)]
        if kind in (tuple, torch.Size):
            return [kind.__name__, *(self._node(each, (*where, at)) for at, each in enumerate(value))]
        self._check_single(value, where)
        if kind in (set, frozenset):
            # Sets have no order: the same set has the same bytes.
            return [kind.__name__, *sorted((self._node(each, where) for each in value), key=json.dumps)]
        if kind is deque:
            length = [] if value.maxlen is None else [self._number(value.maxlen)]
            return ["deque", length, *(self._node(each, (*where, at)) for at, each in enumerate(value))]
        if kind is list:
            return ["list", *(self._node(each, (*where, at)) for at, each in enumerate(value))]
        if kind is dict:
            return self._dict(value, where)
        if isinstance(value, Tensor):
            return self._wrapper(value, where)
        return self._object(value, where)

    def _float(self, value: float) -> Any:
        if math.isfinite(value):
            return self._number(value)
        self._room += _NUMBER_CHARS - len('["float","') - len(repr(value)) - len('"]')
        return ["float", repr(value)]

    def _check_single(self, value: Any, where: Place) -> None:
        if id(value) in self._seen:
            raise ConfigError(
                f"optimizer state: {_told(where)} is a {type(value).__name__} that the state has at another place too, "
                "which no row can keep; copy it there"
            )
        self._seen.add(id(value))

    def _dict(self, value: dict[Any, Any], where: Place) -> Any:
        if all(type(key) is str for key in value):
            return {key: self._node(each, (*where, key)) for key, each in value.items()}
        pairs = [[self._node(key, where), self._node(each, (*where, key))] for key, each in value.items()]
        return ["dict", *pairs]

    def _tensor(self, tensor: Tensor, where: Place) -> list[Any]:
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_conj() or tensor.is_neg():
            raise ConfigError(
                f"optimizer state: {_told(where)} is a tensor of layout {tensor.layout} and dtype {tensor.dtype}, "
                "which no row can keep; use dense ones"
            )
        kind = "parameter" if isinstance(tensor, nn.Parameter) else "tensor"
        node = [kind, str(tensor.dtype).removeprefix("torch."), list(map(self._number, tensor.shape))]
        self._tensors.append(tensor)
        self._where.append(where)
        self._nodes.append(node)
        return node

    def _wrapper(self, tensor: Any, where: Place) -> list[Any]:
        if not is_wrapper(tensor):
            raise _unknown(tensor, where)
        names, context = tensor.__tensor_flatten__()
        parts = {name: self._node(getattr(tensor, name), (*where, name)) for name in names}
        shape = [list(map(self._number, sizes)) for sizes in (tensor.shape, tensor.stride())]
        return ["wrapper", _class_name(tensor, where), *shape, parts, self._node(context, where)]

    def _object(self, value: Any, where: Place) -> list[Any]:
        kind = type(value)
        # A class that builds on one in C, or has slots, keeps things beside its attributes.
        if not hasattr(value, "__dict__") or callable(value) or kind.__basicsize__ > _PlainObject.__basicsize__:
            raise _unknown(value, where)
        return ["object", _class_name(value, where), self._dict(vars(value), where)]


class _PlainObject:
    """A class of Python alone."""


def _class_name(value: Any, where: Place) -> str:
    kind = type(value)
    if "<" in kind.__qualname__:
        raise _unknown(value, where)
    return f"{kind.__module__}:{kind.__qualname__}"


def _unknown(value: Any, where: Place) -> ConfigError:
    kind = type(value)
    return ConfigError(
        f"optimizer state: {_told(where)} is a {kind.__module__}.{kind.__qualname__}, which no row can keep. Use "
        "tensors, numbers, texts, enums, dicts, lists, tuples, sets, deques, or objects of module-level classes"
    )


def _told(where: Place) -> str:
    """A place as Python writes it."""
    return "state" + "".join(f".{each}" if str(each).isidentifier() else f"[{each!r}]" for each in where)


_NODES: dict[type, tuple[str, Callable[[Any], list[Any]]]] = {
    torch.dtype: ("dtype", lambda value: [str(value).removeprefix("torch.")]),
    torch.device: ("device", lambda value: [str(value)]),
    complex: ("complex", lambda value: [repr(value)]),
}
"""Types of values that one text describes."""


class _Reader:
    """A state, made of an outline and views of a row."""

    def __init__(self, row: Tensor, begin: int, packages: frozenset[str]) -> None:
        self._row, self._begin, self._packages = row, begin, packages
        self._readers: dict[str, Callable[..., Any]] = {
            "float": lambda text: float(text),
            "complex": lambda text: complex(text),
            "dtype": lambda name: _DTYPES[name],
            "device": lambda name: torch.device(name),
            "numpy": lambda dtype, value: np.dtype(dtype).type(value),
            "list": lambda *items: list(map(self.value, items)),
            "tuple": lambda *items: tuple(map(self.value, items)),
            "deque": lambda length, *items: deque(map(self.value, items), *length),
            "set": lambda *items: set(map(self.value, items)),
            "frozenset": lambda *items: frozenset(map(self.value, items)),
            "enum": lambda name, member: self._class(name, enum.Enum)[member],
            "Size": lambda *items: torch.Size(map(self.value, items)),
            "dict": lambda *items: {self.value(key): self.value(each) for key, each in items},
            "tensor": self._tensor,
            "parameter": lambda *node: nn.Parameter(self._tensor(*node), requires_grad=False),
            "wrapper": self._wrapper,
            "object": self._object,
        }

    def value(self, node: Any) -> Any:
        if type(node) is dict:
            return {key: self.value(each) for key, each in node.items()}
        if type(node) is list:
            return self._readers[node[0]](*node[1:])
        return node

    def _tensor(self, dtype: str, shape: list[int], at: int, strides: list[int]) -> Tensor:
        if at < 0:
            raise ValueError(f"a tensor at {at} bytes")
        return view_of(self._row, self._begin + at, _DTYPES[dtype], tuple(shape), tuple(strides))

    def _wrapper(self, name: str, shape: list[int], strides: list[int], parts: dict[str, Any], context: Any) -> Any:
        kind = self._class(name)
        if not is_wrapper_class(kind):
            raise TypeError(f"{name} has no __tensor_unflatten__")
        return kind.__tensor_unflatten__(self.value(parts), self.value(context), torch.Size(shape), tuple(strides))

    def _object(self, name: str, attributes: Any) -> Any:
        made = object.__new__(self._class(name))
        vars(made).update(self.value(attributes))
        return made

    def _class(self, name: str, base: type[Any] = object) -> Any:
        """A class of the packages, by its module and name."""
        module, _, qualname = name.partition(":")
        if module.partition(".")[0] not in self._packages:
            raise TypeError(f"{name} is of another package than {', '.join(sorted(self._packages))}")
        found: Any = importlib.import_module(module)
        for part in qualname.split("."):
            found = getattr(found, part)
        if (
            not (isinstance(found, type) and issubclass(found, base))
            or found.__module__ != module
            or found.__qualname__ != qualname
        ):
            raise TypeError(f"{name} is not a class of that module")
        return found
