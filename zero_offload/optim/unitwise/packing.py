"""States of parameters, packed into a shard's array of rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from zero_offload.base.host import host_reserved
from zero_offload.optim.unitwise.state_rows import pack, packed_bytes
from zero_offload.storage.shards.rows import Rows, lay, room


def keep_states(rows: Rows | None, states: Mapping[int, tuple[Any, str]]) -> torch.Tensor | None:
    """Let an array of rows have these states, each with its optimizer's class, by the parameter's first element. An
    empty state, or None, has no row.

    Where each of them fits into its row they are written there, and None is returned. Else returns a new array,
    (room of all,) uint8, host, with the other rows as they are; `rows` is left alone.
    """
    before = {} if rows is None else rows.sizes()
    wanted, kept = dict(before), dict[int, Any]()
    for key, (state, kind) in states.items():
        if not state:
            wanted.pop(key, None)
            continue
        kept[key] = state
        nbytes = packed_bytes(state)
        if key not in before or nbytes > before[key][0] or kind != before[key][1]:
            wanted[key] = nbytes, kind
    if wanted == before:
        for key, state in kept.items():
            assert rows is not None
            pack(state, rows[key])
        return None
    laid = lay(host_reserved([room(wanted)], torch.uint8), wanted)
    for key in wanted:
        if key in kept:
            pack(kept[key], laid[key])
        else:
            assert rows is not None
            laid[key].copy_(rows[key])
    return laid.array
