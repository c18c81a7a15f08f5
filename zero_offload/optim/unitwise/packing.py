"""States of parameters, packed into a shard's array of rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

from zero_offload.base.host import host_reserved
from zero_offload.optim.unitwise.state_rows import StateOutline
from zero_offload.storage.shards.rows import Rows, lay, room
from zero_offload.storage.shards.shard import Component


class KeptStates(NamedTuple):
    """The result of `keep_states`."""

    array: torch.Tensor | None
    """(room of all, and more,) uint8, host: a new array. None where the rows have the states."""
    beside: list[tuple[int, torch.Tensor]]
    """Of a device's rows, what the host's array is to have: places, and bytes, (n,) uint8, host."""


def keep_states(
    rows: Rows | None,
    states: Mapping[int, tuple[Any, str]],
    memory: torch.Tensor | None = None,
    *,
    is_on_device: bool = False,
    num_chunks: int = 1,
) -> KeptStates:
    """Let an array of rows have these states, each with its optimizer's class, by the parameter's first element. An
    empty state, or None, has no row.

    Where each of them fits into its row they are written there. Else there is a new array, with the other rows as they
    are, and `rows` is left alone. `is_on_device`: a device has stepped them. `memory`: the array in its memory, where
    tensors are written then. A new array has equal parts for so many chunks.
    """
    before = {} if rows is None else rows.sizes()
    wanted, kept = dict(before), dict[int, StateOutline]()
    for key, (state, kind) in states.items():
        if not state:
            wanted.pop(key, None)
            continue
        kept[key] = outline = StateOutline(state, is_on_device=is_on_device)
        if key not in before or outline.nbytes > before[key][0] or kind != before[key][1]:
            wanted[key] = outline.nbytes, kind
    source = None if rows is None else rows if memory is None else Rows(memory, rows.directory)
    if wanted == before:
        beside = list[tuple[int, torch.Tensor]]()
        for key, outline in kept.items():
            assert rows is not None and source is not None
            if memory is None:
                outline.write(rows[key])
            else:
                begin = rows.directory[key].begin
                beside += [(begin + at, part) for at, part in outline.write_beside(source[key])]
        return KeptStates(None, beside)
    chunk_bytes = Component.rows(room(wanted), num_chunks).chunk_bytes
    laid = lay(host_reserved([chunk_bytes * num_chunks], torch.uint8), wanted)
    for key in wanted:
        if key in kept:
            kept[key].write(laid[key])
        else:
            assert source is not None
            laid[key].copy_(source[key])
    return KeptStates(laid.array, [])


def content_of(state: Any) -> Any:
    """By which a later look tells that a state on the host is still what its row has: where tensors lie, and numbers.
    None of a state with other things in it."""
    if type(state) is not dict:
        return None
    found = list[Any]()
    for key, value in state.items():
        if type(value) is torch.Tensor and value.layout is torch.strided:
            found.append((key, value.dtype, value.data_ptr(), value.shape, value.stride(), value.is_conj()))
        elif value is None or type(value) in (bool, int, float, str):
            found.append((key, type(value), value))
        else:
            return None
    return found
