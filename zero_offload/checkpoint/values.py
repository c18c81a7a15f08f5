"""A shard's components as numbers people know: fp32 masters and moments, whatever the compute dtype.

Reads copy out, writes replace whole shards through `ShardStore.write_components`. Host memory only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from zero_offload.base.host import host_empty, host_reserved, host_zeros
from zero_offload.hardware.kernels.formats import convert, join_master, split_master
from zero_offload.plan.layout import CHUNK_NUMEL, ParamSlice, SectionLayout
from zero_offload.storage.shards.rows import Row, Rows, read_directory
from zero_offload.storage.shards.shard import (
    Component,
    Shard,
    array_numel,
    array_range,
    component_dtype,
    decode_array,
    encode_array,
    master_components,
    shard_bytes,
)
from zero_offload.storage.shards.store import ChunkSource, ShardStore

FillMaster = Callable[[int, int, torch.Tensor], None]
"""fill(begin, end, out): write the values of shard elements [begin, end) into `out`, (end - begin,)."""

ReadElements = Callable[[int, int], torch.Tensor]
"""read(begin, end) -> (end - begin,), any dtype, host: elements of one parameter."""


def read_master(store: ShardStore, shard: Shard, span: tuple[int, int] | None = None) -> torch.Tensor:
    """(shard_numel,) fp32 master of a trainable shard, or the value of a frozen one, or of elements `span`; a copy."""
    dtype = torch.float32 if shard.layout.trainable else shard.layout.dtype
    return _gather(shard.layout, span, dtype, lambda row, keeps: read_master_chunk(store, shard, row, keeps=keeps))


def read_values(store: ShardStore, shard: Shard, span: tuple[int, int]) -> torch.Tensor:
    """(end - begin,) of the values of elements `span`, the compute dtype; a copy."""
    layout = shard.layout
    return _gather(
        layout, span, layout.dtype, lambda row, keeps: store.read_chunk(shard, Component.VALUE, row, keeps=keeps)
    )


def read_master_chunk(store: ShardStore, shard: Shard, row: int, *, keeps: bool = False) -> torch.Tensor:
    """(end - begin,) fp32 master, or value of a frozen shard, of chunk `row`; host, valid until the next read. `keeps`
    as in `ShardStore.read_chunk`."""
    return master_of(shard.layout, lambda component: store.read_chunk(shard, component, row, keeps=keeps))


def master_of(layout: SectionLayout, read: Callable[[Component], torch.Tensor]) -> torch.Tensor:
    """(n,) of the master, or of a frozen value, of elements whose components `read` gives: (n,), host, valid until the
    next one is read."""
    components = master_components(layout)
    if Component.MASTER in components:
        return read(Component.MASTER)
    value = read(Component.VALUE)
    if Component.RESIDUAL not in components:
        return value
    half, master = (
        host_reserved([value.numel()], value.dtype).copy_(value),
        host_reserved([value.numel()], torch.float32),
    )
    join_master(half, read(Component.RESIDUAL), master)
    return master


def master_part(layout: SectionLayout) -> dict[str, torch.dtype]:
    """The component that completes a trainable shard's value to the master, and its dtype. It is "residual" beside
    bf16, "master" beside fp16, nothing beside fp32.
    """
    parts: dict[torch.dtype, dict[str, torch.dtype]] = {
        torch.bfloat16: {Component.RESIDUAL: torch.int16},
        torch.float16: {Component.MASTER: torch.float32},
    }
    return parts.get(layout.dtype, {})


def read_master_part(store: ShardStore, shard: Shard, span: tuple[int, int]) -> torch.Tensor:
    """(end - begin,) of it, of elements `span`; a copy."""
    layout = shard.layout
    dtype = master_part(layout)[Component.MASTER if layout.dtype == torch.float16 else Component.RESIDUAL]

    def read(row: int, keeps: bool) -> torch.Tensor:
        master = read_master_chunk(store, shard, row, keeps=keeps)
        if layout.dtype == torch.float16:
            return master
        residual = host_reserved([master.numel()], dtype)
        split_master(master, host_reserved([master.numel()], layout.dtype), residual)
        return residual

    return _gather(layout, span, dtype, read)


def completed(
    store: ShardStore, shard: Shard, part: Mapping[str, torch.Tensor], span: tuple[int, int]
) -> torch.Tensor | None:
    """The fp32 master of elements `span` whose `master_part` was `part`; None where that was of another dtype."""
    dtype = shard.layout.dtype
    if dtype == torch.float16:
        return part.get(Component.MASTER)
    residual = part.get(Component.RESIDUAL)
    if dtype != torch.bfloat16 or residual is None:
        return None
    half = read_values(store, shard, span)
    master, again = host_empty(half.numel(), torch.float32), torch.empty_like(half)
    residual = residual.detach().reshape(-1).contiguous()
    join_master(half, residual, master)
    # A residual of another value may turn a 0 into a NaN: it completes only what it gives back.
    split_master(master, again, torch.empty_like(residual))
    return torch.where(again.view(torch.int16) == half.view(torch.int16), master, half.float())


def residual_alone(layout: SectionLayout, residual: torch.Tensor) -> torch.Tensor:
    """The residual at rest beside values that come from elsewhere, of a residual as `read_master_part` gives it."""
    if component_dtype(layout, Component.RESIDUAL) is not torch.int8:
        return residual
    return ((residual.to(torch.int32) + 128) >> 8).clamp(-128, 127).to(torch.int8)


def read_state(
    store: ShardStore, shard: Shard, component: Component, span: tuple[int, int] | None = None
) -> torch.Tensor:
    """(shard_numel,) fp32 of an optimizer's state, or (end - begin,) of elements `span`; a copy."""
    layout = shard.layout

    def read(row: int, _: bool) -> torch.Tensor:
        begin, end = layout.chunks()[row]
        return decode_array(layout, component, store.read_chunk(shard, component, row), end - begin)

    return _gather(layout, span, torch.float32, read)


def read_rows(store: ShardStore, shard: Shard) -> Rows | None:
    """The rows of a shard, a copy; None where it has none."""
    if shard.rows is None:
        return None
    return Rows.read(_read_bytes(store, shard, 0, shard_bytes(shard.layout, [shard.rows])), _where(shard))


def rows_directory(store: ShardStore, shard: Shard) -> Mapping[int, Row]:
    """The directory of a shard's rows."""
    if shard.rows is None:
        return {}
    nbytes = shard_bytes(shard.layout, [shard.rows])
    return read_directory(lambda begin, end: _read_bytes(store, shard, begin, end), nbytes, _where(shard))


def read_row(store: ShardStore, shard: Shard, key: int) -> torch.Tensor | None:
    """The row of a parameter, by its first element, a copy; None where there is none."""
    row = rows_directory(store, shard).get(key)
    return None if row is None else _read_bytes(store, shard, row.begin, row.begin + row.nbytes)


def _read_bytes(store: ShardStore, shard: Shard, begin: int, end: int) -> torch.Tensor:
    """Bytes [begin, end) of a shard's rows, a copy."""
    rows, out = shard.rows, host_reserved([end - begin], torch.uint8)
    assert rows is not None
    for number in range(begin // rows.chunk_bytes, -(-end // rows.chunk_bytes)):
        first = number * rows.chunk_bytes
        low, high = max(first, begin), min(first + rows.chunk_bytes, end)
        out[low - begin : high - begin] = store.read_chunk(shard, rows, number)[low - first : high - first]
    return out


def _where(shard: Shard) -> str:
    return f"section {shard.layout.index}"


def _gather(
    layout: SectionLayout,
    span: tuple[int, int] | None,
    dtype: torch.dtype,
    read: Callable[[int, bool], torch.Tensor],
) -> torch.Tensor:
    """Elements `span` of a shard, a copy; `read(row, keeps)` has those of a chunk. It keeps a chunk of which a part is
    wanted: a neighbour in memory has the rest, and is often wanted next."""
    first, last = span or (0, layout.shard_numel)
    out = host_reserved([last - first], dtype)  # in the heap, what comes and goes would leave holes of its size
    for row, (begin, end) in enumerate(layout.chunks()):
        low, high = max(begin, first), min(end, last)
        if low < high:
            out[low - first : high - first] = read(row, (low, high) != (begin, end))[low - begin : high - begin]
    return out


READ_NUMEL = 1 << 18
"""Elements asked of a reader at once: enough for a disk's full rate, few beside the chunk they go to."""


class ComponentSource:
    """Feeds `write_components`: values from `fill`, the optimizers' states from `states` or zero.

    The tensor that a call returns is valid until the next call. Buffers are used again: chunks that come and go would
    leave holes of several times their size in the heap.
    """

    def __init__(self, shard: Shard, fill: FillMaster, states: Mapping[Component, torch.Tensor] | None = None) -> None:
        """`states` maps components to (shard_numel,) fp32."""
        self._shard = shard
        self._fill = fill
        self._states = states or {}
        self._range = (-1, -1)
        self._parts: dict[Component, torch.Tensor] = {}
        self._buffers: dict[torch.dtype, torch.Tensor] = {}

    def __call__(self, component: Component, begin: int, end: int) -> torch.Tensor:
        layout, numel = self._shard.layout, end - begin
        if component in self._shard.states:
            if (states := self._states.get(component)) is not None:
                return encode_array(layout, component, states[begin:end])
            zero = host_zeros(1, component_dtype(layout, component))
            return zero.expand(array_numel(layout, component, numel))
        if self._range != (begin, end):
            dtype = torch.float32 if layout.has_master_apart else layout.dtype
            master = self._buffer(numel, dtype).zero_()
            self._fill(begin, end, master)
            self._parts, self._range = master_parts(layout, master, self._buffer), (begin, end)
        return self._parts[component]

    def _buffer(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """(numel,), host; master, value and residual each have a dtype of their own."""
        buffer = self._buffers.get(dtype)
        if buffer is None or buffer.numel() < numel:
            buffer = self._buffers[dtype] = host_empty(numel, dtype)
        return buffer[:numel]


Edits = dict[Component, list[tuple[int, int, torch.Tensor]]]
"""Elements [begin, end) of a shard, and their new values. For a state they are fp32, (end - begin,) or one for all. For
a part of the master they are as the component has them. Rows are replaced whole: all elements, and the new array.
"""


def master_parts(
    layout: SectionLayout, values: torch.Tensor, empty: Callable[[int, torch.dtype], torch.Tensor] = host_empty
) -> dict[Component, torch.Tensor]:
    """The components of a master, or of a frozen value. Each is (values.numel(),), on the host, in memory that `empty`
    gives by number of elements and dtype."""
    values = values.detach().reshape(-1)
    if not layout.has_master_apart:
        return {Component.VALUE: values.to("cpu", layout.dtype)}
    master, value = values.to("cpu", torch.float32).contiguous(), empty(values.numel(), layout.dtype)
    if Component.MASTER in master_components(layout):
        convert(value, master)
        return {Component.VALUE: value, Component.MASTER: master}
    residual = empty(values.numel(), component_dtype(layout, Component.RESIDUAL))
    split_master(master, value, residual)
    return {Component.VALUE: value, Component.RESIDUAL: residual}


class Edited:
    """Feeds `write_components` with what a shard has, but for some elements."""

    def __init__(self, store: ShardStore, shard: Shard, edits: Edits) -> None:
        self._store = store
        self._shard = shard
        self._edits = edits
        self._row = -1
        self._arrays: dict[Component, torch.Tensor] = {}

    @property
    def rows(self) -> list[int]:
        """The chunks that change."""
        spans = [span for component in self._edits for span in self.spans(component)]
        chunks = enumerate(self._shard.layout.chunks())
        return [row for row, (begin, end) in chunks if any(low < end and begin < high for low, high in spans)]

    def spans(self, component: Component) -> list[tuple[int, int]]:
        """The elements of a component that change."""
        return [(begin, end) for begin, end, _ in self._edits.get(component, ())]

    def _array(self, component: Component, begin: int, end: int) -> torch.Tensor:
        """A copy of a chunk's array as it is. Where all of it changes it is memory alone, unless a state is packed."""
        layout, numel = self._shard.layout, array_numel(self._shard.layout, component, end - begin)
        if component.is_rows and component in self._edits:
            ((_, _, rows),) = self._edits[component]
            return rows[array_range(layout, component, begin, end)]
        is_whole = any(low <= begin and end <= high for low, high in self.spans(component))
        if is_whole and numel == end - begin:
            return host_reserved([numel], component_dtype(layout, component))
        keeps = component not in self._shard.states  # a load of all states would keep as much again
        return self._store.read_chunk(self._shard, component, begin // CHUNK_NUMEL, keeps=keeps).clone()

    def __call__(self, component: Component, begin: int, end: int) -> torch.Tensor:
        layout, row = self._shard.layout, begin // CHUNK_NUMEL
        if row != self._row:
            # All at once: the memory that a chunk is read into is that which it is written from.
            self._row = row
            needed = self._edits if self._store.writes_in_place(self._shard, row) else self._shard.components
            self._arrays = {each: self._array(each, begin, end) for each in needed}
        array = self._arrays[component]
        if component.is_rows:
            return array
        for low, high, values in self._edits.get(component, ()):
            first, last = max(low, begin), min(high, end)
            if first < last:
                new = values if values.numel() == 1 else values[first - low : last - low]
                if component in self._shard.states:
                    whole = decode_array(layout, component, array, end - begin)
                    whole[first - begin : last - begin] = new
                    array = encode_array(layout, component, whole)
                else:
                    array[first - begin : last - begin] = new
        return array


def replace_masters(store: ShardStore, shard: Shard, masters: ChunkSource) -> None:
    """Write what `masters` gives of each master, or frozen value; the states of optimizers stay."""
    states: dict[Component, torch.Tensor] = {}
    read_row = -1

    def source(component: Component, begin: int, end: int) -> torch.Tensor:
        nonlocal read_row
        if read_row != (row := begin // CHUNK_NUMEL) and not store.writes_in_place(shard, row):
            # All at once: the memory that a chunk is read into is that which it is written from.
            read_row = row
            states.update({each: store.read_chunk(shard, each, row).clone() for each in shard.states})
        return states[component] if component in shard.states else masters(component, begin, end)

    rows = range(len(shard.layout.chunks()))
    store.write_components(shard, source, (rows, master_components(shard.layout)))


def fill_from_readers(shard: Shard, shard_index: int, readers: Mapping[ParamSlice, ReadElements]) -> FillMaster:
    """A `FillMaster` that asks for the elements of each parameter that lie in the shard, and for no others."""
    offset = shard_index * shard.layout.shard_numel

    def fill(begin: int, end: int, out: torch.Tensor) -> None:
        for piece, read in readers.items():
            low, high = max(piece.begin, begin + offset), min(piece.end, end + offset)
            for first in range(low, high, READ_NUMEL):
                last = min(first + READ_NUMEL, high)
                source = read(first - piece.begin, last - piece.begin)
                out[first - begin - offset : last - begin - offset].copy_(source)

    return fill
