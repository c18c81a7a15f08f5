"""A parameter's optimizer state as one row of bytes: `[header][outline][tensors]`.

The outline is JSON: containers, numbers, texts, and where each tensor lies. A tensor keeps its order of memory, because
a product of a transposed matrix rounds otherwise; gaps between its elements are left out. Tensors that overlap keep
their memory as it is. `packed_bytes`, `pack` and `unpack` come in this order; `StateOutline` is the first two at once.
`packages_of` says whose classes a state may have, and `copy_of` goes the whole way. No bytes are run as code, and
nothing here knows where rows rest.

A device may step a state. Its tensors are views of `memory` then, the row in the device's memory. The host has a row
beside it, of which head and tensors of the host count, such as torch's counts of steps. `unpack` takes both, and
`StateOutline.write_beside` writes them. `read_host_parts` brings to the host what it needs of a device's row.

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
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from zero_offload.base.errors import CheckpointError, ConfigError
from zero_offload.optim.unitwise.memory_regions import ALIGNMENT, RowRegion, aligned, regions_of, view_of
from zero_offload.plan.quantized import is_wrapper, is_wrapper_class

_HEADER = struct.Struct("<8sIIQQ")
"""Magic, version, checksum of the outline, its length, and where the tensors begin."""
_MAGIC, _VERSION = b"zo.state", 1
_NUMBER_CHARS = 24
"""Room of a number in the outline: the longest float has so many characters, the longest of 64 bits 20."""
_DTYPES = {str(value).removeprefix("torch."): value for value in vars(torch).values() if isinstance(value, torch.dtype)}
_PLAIN_TENSORS = (Tensor, nn.Parameter, FakeTensor)
_HOST, _DEVICE = "host", "device"
"""Where a tensor is beside a parameter on a device; only states that a device has stepped say so."""
_FIRST_READ = 2048
"""Bytes of a row that are read from a device to know how long its head is: mostly they are all of it."""

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


def unpack(row: Tensor, packages: Iterable[str] = ("torch",), memory: Tensor | None = None) -> Any:
    """Return the state that a row has. Its tensors are views of the row: a change of them is a change of the row.

    `memory`: the row in a device's memory. Tensors are views of that. Those that were on the host when a device stepped
    them are copies there. So is "step" of a state that the host has stepped, as torch's `load_state_dict` has it.

    Raises CheckpointError for a row that `pack` did not write, and for a class that is not of `packages`.
    """
    _check_row(row, _HEADER.size)
    begin, outline = _read_outline(row)
    try:
        return _Reader(row, begin, frozenset(packages), memory).value(outline)
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise _damaged(f"its outline describes no state ({type(error).__name__}: {error})") from error


def copy_of(state: Any, packages: Iterable[str] = ("torch",)) -> Any:
    """A state of the same values in other memory, by way of a row; on the same devices."""
    outline = StateOutline(state)
    row = _new_row(outline)
    return unpack(row, packages, None if outline.device is None else row.to(outline.device))


def read_host_parts(read: Callable[[int, int], Tensor], nbytes: int, row: Tensor) -> None:
    """Bring the head of a row of `nbytes`, and its tensors of the host, to `row`.

    `read` gives bytes from one to another, (n,) uint8, host. Raises CheckpointError as `unpack`."""
    first = min(nbytes, _FIRST_READ)
    row[:first].copy_(read(0, first))
    if first < _HEADER.size:
        raise _damaged(f"it has {nbytes} bytes")
    begin = min(_HEADER.unpack(_bytes_of(row[: _HEADER.size]))[-1], nbytes)
    if begin > first:
        row[first:begin].copy_(read(first, begin))
    begin, outline = _read_outline(row)
    for at, size in _host_parts(outline):
        first, last = begin + at, min(begin + at + size, nbytes)
        row[first:last].copy_(read(first, last))


def _host_parts(node: Any, *, is_step: bool = False) -> Iterator[tuple[int, int]]:
    """Of the tensors of a device's state that are on the host, their places and bytes."""
    if type(node) is dict:
        for key, each in node.items():
            yield from _host_parts(each, is_step=key == "step")
    elif type(node) is not list or not node:
        return
    elif node[0] in ("tensor", "parameter"):
        dtype, shape, at, strides, *place = node[1:]
        if _is_on_host(place, is_step=is_step) and 0 not in shape:
            last = sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
            yield at, (last + 1) * _DTYPES[dtype].itemsize
    elif node[0] == "dict":
        for _, each in node[1:]:
            yield from _host_parts(each, is_step=is_step)
    else:
        for each in node[1:]:
            yield from _host_parts(each, is_step=is_step)


def _is_on_host(place: Sequence[str], *, is_step: bool) -> bool:
    return place[0] == _HOST if place else is_step


def packed(state: Any) -> Tensor:
    """A new row that has this state."""
    return _new_row(StateOutline(state))


def _new_row(outline: StateOutline) -> Tensor:
    memory = torch.empty(outline.nbytes + ALIGNMENT, dtype=torch.uint8, device="cpu")
    begin = -memory.data_ptr() % ALIGNMENT
    row = memory[begin : begin + outline.nbytes]
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
        return begin, _parsed(text)
    except (ValueError, RecursionError) as error:
        raise _damaged(f"its outline is not JSON ({error})") from error


_parsed = lru_cache(maxsize=1024)(json.loads)
"""Outlines by their texts, which are those of many parameters, step after step; nothing changes one."""


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

    def __init__(self, state: Any, *, is_on_device: bool = False) -> None:
        """`is_on_device`: a device has stepped it, or is to step it, whatever its tensors say."""
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
        away = [tensor.device for tensor in self._tensors if tensor.device.type not in ("cpu", "meta")]
        self.device = away[0] if away else None
        """That of its tensors which are not on the host."""
        for tensor, tensor_node, (at, strides) in zip(self._tensors, self._nodes, places, strict=True):
            tensor_node += [self._number(at), list(map(self._number, strides))]
            place = _HOST if tensor.device.type == "cpu" else _DEVICE
            if is_on_device or away:
                tensor_node.append(place)
            # A state is as long wherever it is stepped.
            self._room += len(f',"{_DEVICE}"') - len(f',"{place}"') * (is_on_device or bool(away))
        self._text = json.dumps(node, separators=(",", ":"), allow_nan=False).encode()
        self._begin = aligned(_HEADER.size + len(self._text) + self._room)
        self.nbytes = aligned(self._begin + nbytes)

    @torch.no_grad()
    def write(self, row: Tensor) -> None:
        """Write the state into `row`, as `pack` does."""
        begin = self._begin
        _check_row(row, self.nbytes)
        moved = [region for region in self._regions if not region.lies_in(row, begin)]
        sources = _apart_from(row, moved)
        at = begin
        for start, nbytes in (*((begin + region.at, region.nbytes) for region in self._regions), (self.nbytes, 0)):
            if start > at:
                row[at:start].zero_()
            at = start + nbytes
        for region, source in zip(moved, sources, strict=True):
            region.write(source, row, begin)
        row[:begin].copy_(self._head())

    @torch.no_grad()
    def write_beside(self, memory: Tensor) -> list[tuple[int, Tensor]]:
        """Write the device's tensors to their places in `memory`, the row in a device's memory, where they are not
        there already. Returns what the host's row has beside them: places, and bytes, (n,) uint8, host; copies."""
        found, begin = [(0, self._head())], self._begin
        there = [region for region in self._regions if region.source.device.type != "cpu"]
        moved = [region for region in there if not region.lies_in(memory, begin)]
        for region, source in zip(moved, _apart_from(memory, moved), strict=True):
            region.write(source, memory, begin)
        found += [(begin + each.at, each.bytes()) for each in self._regions if each.source.device.type == "cpu"]
        return found

    def _head(self) -> Tensor:
        """(begin,) uint8: header, outline and room."""
        head, text = bytearray(self._begin), self._text
        _HEADER.pack_into(head, 0, _MAGIC, _VERSION, zlib.crc32(text), len(text), self._begin)
        head[_HEADER.size : _HEADER.size + len(text)] = text
        return torch.frombuffer(head, dtype=torch.uint8)

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


def _apart_from(row: Tensor, regions: Iterable[RowRegion]) -> list[Tensor]:
    """Their sources. A place that is written may be the source of another value, so those within the row are copied."""
    return [region.source.clone() if region.intersects(row) else region.source for region in regions]


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

    def __init__(self, row: Tensor, begin: int, packages: frozenset[str], memory: Tensor | None) -> None:
        self._row, self._begin, self._packages, self._memory = row, begin, packages, memory
        self._is_step = False
        """True within an entry of that name."""
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
            return {key: self._entry(key, each) for key, each in node.items()}
        if type(node) is list:
            return self._readers[node[0]](*node[1:])
        return node

    def _entry(self, key: str, node: Any) -> Any:
        self._is_step = key == "step"
        return self.value(node)

    def _tensor(self, dtype: str, shape: list[int], at: int, strides: list[int], *place: str) -> Tensor:
        if at < 0:
            raise ValueError(f"a tensor at {at} bytes")
        where = self._begin + at, _DTYPES[dtype], tuple(shape), tuple(strides)
        if self._memory is None:
            return view_of(self._row, *where)
        is_on_host = _is_on_host(place, is_step=self._is_step)
        return view_of(self._row, *where).clone() if is_on_host else view_of(self._memory, *where)

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
