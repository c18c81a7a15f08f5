"""How the values of a tensor were made, and making them again.

Owns the graph of operations behind a storage. A `Value` is what a storage holds after a write. Its `Node` is the
operation that wrote it, with what that read. Never runs beside a recording: `Tracer` builds the graph, `replay` walks
it. A replay runs the operations that the value depends on, and no others. They run in the order of the program, with
the random generators as they were. Each storage is dropped after its last use.
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from zero_offload.base.types import MIB
from zero_offload.storage.memory.heap import HeapTrimmer

TEMPORARY_BYTES = 16 * MIB
"""Results of operations between two trims of the heap, which does not return their pages by itself."""


def blank(nbytes: int) -> torch.UntypedStorage:
    """A storage of whatever was in memory.

    A large one has pages of its own, which go back when it is freed: the C library's heap would keep them.
    """
    if nbytes < MIB:
        return torch.UntypedStorage(nbytes, device="cpu")
    return torch.frombuffer(mmap.mmap(-1, nbytes), dtype=torch.uint8).untyped_storage()


_EMPTY = frozenset(getattr(torch.ops.aten, name) for name in ("empty", "empty_like", "empty_strided", "new_empty"))
"""Operations that give memory as it is."""


@dataclass(frozen=True, eq=False)
class Value:
    """The content of the storage `key` after a write."""

    key: int
    node: Node | None = None
    """None at the beginning: `data`, or, without it, whatever was in memory."""
    data: torch.UntypedStorage | None = None

    @property
    def is_blank(self) -> bool:
        """True of memory that nothing has filled."""
        return self.data is None if self.node is None else self.node.func.overloadpacket in _EMPTY


@dataclass(frozen=True)
class Ref:
    """A tensor among the arguments of a node: a view of a storage."""

    key: int
    nbytes: int
    """Size of the storage."""
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int

    @classmethod
    def of(cls, tensor: Tensor, key: int) -> Ref:
        nbytes = tensor.untyped_storage().nbytes()
        return cls(key, nbytes, tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()))

    def on(self, storage: torch.UntypedStorage) -> Tensor:
        """The same view of another storage."""
        empty = torch.empty(0, dtype=self.dtype, device=storage.device)
        return empty.set_(storage, self.offset, self.size, self.stride)


@dataclass(frozen=True)
class OwnGenerator:
    """Stands for a generator among the arguments; its state is the node's."""


@dataclass(frozen=True, eq=False)
class Node:
    """One operation."""

    order: int
    func: Any
    args: Any
    """The arguments, with `Ref` for each tensor of the program; other tensors are copies of what was read."""
    kwargs: Any
    generator_state: Tensor | None
    """The state of the generator it draws from, before it did."""
    default_dtype: torch.dtype
    reads: tuple[Value, ...]
    """The content of its storages before; not of those that it fills without reading."""
    makes: list[tuple[int, int]]
    """Storages that it returns: (place among the results, key)."""

    def run(self, storages: dict[int, torch.UntypedStorage]) -> None:
        """Do it again on `storages`, adding what it makes."""

        def real(leaf: Any) -> Any:
            if isinstance(leaf, Ref):
                if leaf.key not in storages:
                    storages[leaf.key] = blank(leaf.nbytes)
                return leaf.on(storages[leaf.key])
            if isinstance(leaf, OwnGenerator):
                generator = torch.Generator("cpu")
                generator.set_state(self.generator_state)  # type: ignore[arg-type]
                return generator
            return leaf

        args, kwargs = tree_map(real, self.args), tree_map(real, self.kwargs)
        if self.generator_state is not None:
            torch.set_rng_state(self.generator_state)
        torch.set_default_dtype(self.default_dtype)
        results = tree_leaves(self.func(*args, **kwargs))
        for index, key in self.makes:
            storages[key] = results[index].untyped_storage()

    def storages(self) -> Iterator[int]:
        """Storages that it works on."""
        yield from (leaf.key for leaf in tree_leaves((self.args, self.kwargs)) if isinstance(leaf, Ref))
        yield from (key for _, key in self.makes)


def replay(value: Value, nbytes: int) -> torch.UntypedStorage:
    """A new storage with this value, of `nbytes`, on the host."""
    nodes, beginnings = _needed(value)
    last_uses = {key: node.order for node in nodes for key in node.storages()}
    storages: dict[int, torch.UntypedStorage] = {}
    trimmer = HeapTrimmer(TEMPORARY_BYTES)
    with _kept_state():
        for node in nodes:
            for key in node.storages():
                if key in beginnings:
                    storages[key] = _copy(beginnings.pop(key))
            node.run(storages)
            for key in [key for key in storages if last_uses[key] <= node.order and key != value.key]:
                trimmer.freed(storages.pop(key).nbytes())
    if value.key in beginnings:
        return _copy(beginnings[value.key])
    return storages[value.key] if value.key in storages else blank(nbytes)


def _copy(storage: torch.UntypedStorage) -> torch.UntypedStorage:
    copied: torch.UntypedStorage = storage.clone()
    return copied


def _needed(value: Value) -> tuple[list[Node], dict[int, torch.UntypedStorage]]:
    """The operations behind a value in the order of the program, and data that storages began with."""
    nodes: dict[int, Node] = {}
    beginnings: dict[int, torch.UntypedStorage] = {}
    waiting = [value]
    while waiting:
        each = waiting.pop()
        if each.node is None:
            if each.data is not None:
                beginnings[each.key] = each.data
        elif each.node.order not in nodes:
            nodes[each.node.order] = each.node
            waiting.extend(each.node.reads)
    return [nodes[order] for order in sorted(nodes)], beginnings


@contextlib.contextmanager
def _kept_state() -> Iterator[None]:
    """Give operations the surroundings of a recording, and put back the state that a replay sets."""
    state, dtype = torch.get_rng_state(), torch.get_default_dtype()
    try:
        with torch.no_grad(), torch.autocast("cpu", enabled=False):
            yield
    finally:
        torch.set_rng_state(state)
        torch.set_default_dtype(dtype)


@dataclass(frozen=True, eq=False)
class RecordedRecipe:
    """How the values of one parameter are made."""

    value: Value | None
    """None where they follow from other parameters whose values were left out, or where they were left out and the
    program gives none."""
    view: Ref
    is_skipped: bool = False
    """True if they were left out; with a `value` they can be made all the same, if no file has them."""

    @property
    def source(self) -> None:
        """They are in no file."""

    def drawn(self) -> bytes:
        """Digests of the generators that the values are drawn from: with the program they determine the values."""
        nodes = [] if self.value is None else _needed(self.value)[0]
        states = [node.generator_state for node in nodes if node.generator_state is not None]
        return b"".join(hashlib.sha256(state.numpy().tobytes()).digest() for state in states)

    def make(self) -> Tensor:
        """The parameter's values, a new tensor on the host."""
        assert self.value is not None
        return self.view.on(replay(self.value, self.view.nbytes))
