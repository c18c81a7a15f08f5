"""Collectives of the program that take lists: `dist.all_gather([a.data, b.data], x)`.

Functions of `torch.distributed` ask the class of one tensor, never those of a list's elements. The process group, which
is C++, then writes to memory past every class. A 16-bit value would change, and the rest of its fp32 master would not.
So the group's methods are wrapped: a stand-in gives a copy, which is copied back when the collective has ended.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zero_offload.base.trees import leaves_in, mapped
from zero_offload.standins.owners import AtRest
from zero_offload.standins.standin import StandIn
from zero_offload.standins.views import View

_STAND_INS = (AtRest, View, StandIn)
_RESULTS_FIRST = (
    "allgather",
    "allgather_coalesced",
    "allreduce",
    "allreduce_coalesced",
    "alltoall",
    "broadcast",
    "gather",
    "recv",
    "recv_anysource",
    "reduce",
    "reduce_scatter",
    "scatter",
)
"""Methods of a process group whose first argument has the tensors that it writes, in lists."""


@cache
def answer_in_lists() -> None:
    """From now on stand-ins in lists of tensors that a collective takes are read and written where they rest."""
    if dist.is_available():
        for name in _RESULTS_FIRST:
            setattr(dist.ProcessGroup, name, _on_copies(getattr(dist.ProcessGroup, name)))


def _on_copies(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def run(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
        if not any(isinstance(leaf, _STAND_INS) for leaf in leaves_in((args, kwargs))):
            return method(group, *args, **kwargs)
        copies: dict[int, tuple[Tensor, Tensor]] = {}

        def copy_of(stand_in: Tensor) -> Tensor:
            if id(stand_in) not in copies:
                copies[id(stand_in)] = stand_in, stand_in.clone(memory_format=torch.contiguous_format)
            return copies[id(stand_in)][1]

        with torch.no_grad():
            work = method(group, *mapped(_STAND_INS, copy_of, args), **mapped(_STAND_INS, copy_of, kwargs))
            work.wait()
            for stand_in, copy in copies.values():
                if any(each is stand_in for each in leaves_in(args[:1] or kwargs.values())):
                    stand_in.copy_(copy)
        return work

    return run
