"""Collectives in two halves: launched now, waited for by calling what the launch returned.

Each lane has a process group of its own, so that what one carries never waits for another's. In host memory ranks
exchange their parts directly and each adds up its own, in the order of ranks: half the bytes of gloo's reduce-scatter,
which reduces everything everywhere, and bits that depend on no ring. On a GPU the backend's collectives run on the
group's stream. Buffers belong to the lane from the launch to the end of the wait.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from zero_offload.runtime.ranks.group import Group, all_gather, reduce_scatter

_TAGS = 1 << 30


class Lane(Protocol):
    """A tensor's part i, of as many as there are ranks, is rank i's."""

    def gather(self, flat: torch.Tensor) -> Callable[[], None]:
        """Fill `flat`, (numel,), of which this rank's part is in place."""

    def reduce_scatter(self, flat: torch.Tensor) -> Callable[[], torch.Tensor]:
        """The wait returns the sum over ranks of this rank's part, (part_numel,) in `flat`'s dtype."""

    def all_reduce(self, flat: torch.Tensor) -> Callable[[], torch.Tensor]:
        """The wait returns the sum over ranks of `flat`, which is overwritten."""


class DirectLane:
    """Host memory: every rank sends every other its part."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._size, self._index = dist.get_world_size(group), dist.get_rank(group)
        self._tag = 0

    def gather(self, flat: torch.Tensor) -> Callable[[], None]:
        parts = flat.tensor_split(self._size)
        return self._exchange([parts[self._index]] * self._size, parts)

    def reduce_scatter(self, flat: torch.Tensor) -> Callable[[], torch.Tensor]:
        parts = flat.tensor_split(self._size)
        mine = parts[self._index]
        terms = [mine if rank == self._index else torch.empty_like(mine) for rank in range(self._size)]
        arrive = self._exchange(parts, terms)

        def wait() -> torch.Tensor:
            arrive()
            total = terms[0].float() + terms[1].float()
            for term in terms[2:]:
                total += term.float()
            return total.to(flat.dtype)

        return wait

    def all_reduce(self, flat: torch.Tensor) -> Callable[[], torch.Tensor]:
        reduce = self.reduce_scatter(flat)

        def wait() -> torch.Tensor:
            flat.tensor_split(self._size)[self._index].copy_(reduce())
            self.gather(flat)()
            return flat

        return wait

    def _exchange(self, sent: Sequence[torch.Tensor], received: Sequence[torch.Tensor]) -> Callable[[], None]:
        """Launch: sent[i] goes to rank i, whose part arrives in received[i]."""
        self._tag = (self._tag + 1) % _TAGS
        others = [rank for rank in range(self._size) if rank != self._index]
        # Bytes, since not every backend sends every dtype.
        works = [
            dist.irecv(received[rank].view(torch.uint8), group=self._group, group_src=rank, tag=self._tag)
            for rank in others
        ]
        works += [
            dist.isend(sent[rank].view(torch.uint8), group=self._group, group_dst=rank, tag=self._tag)
            for rank in others
        ]

        def wait() -> None:
            for work in works:
                assert work is not None
                work.wait()

        return wait


class NativeLane:
    """The backend's own collectives: on a GPU they run on a stream of the group, and a wait is one of streams."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._size, self._index = dist.get_world_size(group), dist.get_rank(group)

    def gather(self, flat: torch.Tensor) -> Callable[[], None]:
        mine = flat.tensor_split(self._size)[self._index]
        # Bytes, since not every backend gathers every dtype.
        work = all_gather(flat.view(torch.uint8), mine.view(torch.uint8), group=self._group, async_op=True)

        def wait() -> None:
            work.wait()

        return wait

    def reduce_scatter(self, flat: torch.Tensor) -> Callable[[], torch.Tensor]:
        mine = torch.empty_like(flat.tensor_split(self._size)[self._index])
        work = reduce_scatter(mine, flat, group=self._group, async_op=True)
        return lambda: _wait(work, mine)

    def all_reduce(self, flat: torch.Tensor) -> Callable[[], torch.Tensor]:
        work = dist.all_reduce(flat, group=self._group, async_op=True)
        return lambda: _wait(work, flat)


def _wait(work: Any, result: torch.Tensor) -> torch.Tensor:
    work.wait()
    return result


def lane(group: Group, device: torch.device) -> Lane:
    """A lane for tensors on `device`; `group` is used by nobody else."""
    return DirectLane(group) if device.type == "cpu" else NativeLane(group)
