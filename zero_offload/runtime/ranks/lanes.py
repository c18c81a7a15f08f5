"""Collectives in two halves: launched now, waited for by calling what the launch returned.

Each lane has a process group of its own, so that what one carries never waits for another's. In host memory ranks
exchange their parts and each adds up its own, in the order of ranks: half the bytes of gloo's reduce-scatter, which
reduces everything everywhere, and bits that depend on no ring. On a GPU the backend's collectives run on the group's
stream. Buffers belong to the lane from the launch to the end of the wait.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from zero_offload.runtime.ranks.group import Group, RankGroup, all_gather, reduce_scatter

_TAGS = 1 << 30


class Lane(Protocol):
    """A tensor's part i, of as many as there are ranks, is rank i's."""

    def gather(self, flat: torch.Tensor) -> Callable[[], None]:
        """Fill `flat`, (numel,), of which this rank's part is in place."""

    def reduce_scatter(self, flat: torch.Tensor, dtype: torch.dtype) -> Callable[[], torch.Tensor]:
        """The wait returns the sum over ranks of this rank's part, (part_numel,) `dtype`; `flat` is overwritten."""

    def all_reduce(self, flat: torch.Tensor, dtype: torch.dtype) -> Callable[[], torch.Tensor]:
        """The wait returns the sum over ranks of `flat`, in `dtype`; `flat` is overwritten."""


class HostLane:
    """Host memory: every rank sends every other its part, over a process group's sockets."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self.num_ranks, self.index = dist.get_world_size(group), dist.get_rank(group)
        self._tag = 0

    def gather(self, flat: torch.Tensor) -> Callable[[], None]:
        parts = flat.tensor_split(self.num_ranks)
        return self._exchange([parts[self.index]] * len(parts), parts)

    def reduce_scatter(self, flat: torch.Tensor, dtype: torch.dtype) -> Callable[[], torch.Tensor]:
        parts = flat.tensor_split(self.num_ranks)
        mine = parts[self.index]
        terms = [mine if rank == self.index else torch.empty_like(mine) for rank in range(len(parts))]
        arrive = self._exchange(parts, terms)

        def wait() -> torch.Tensor:
            arrive()
            total = terms[0].float()
            for term in terms[1:]:
                total += term
            return total.to(dtype)

        return wait

    def all_reduce(self, flat: torch.Tensor, dtype: torch.dtype) -> Callable[[], torch.Tensor]:
        reduce = self.reduce_scatter(flat, dtype)

        def wait() -> torch.Tensor:
            mine = reduce()
            total = flat if flat.dtype == dtype else torch.empty_like(flat, dtype=dtype)
            total.tensor_split(self.num_ranks)[self.index].copy_(mine)
            self.gather(total)()
            return total

        return wait

    def _exchange(self, sent: Sequence[torch.Tensor], received: Sequence[torch.Tensor]) -> Callable[[], None]:
        """Launch: sent[i] goes to rank i, whose part arrives in received[i]."""
        self._tag = (self._tag + 1) % _TAGS
        others = [rank for rank in range(self.num_ranks) if rank != self.index]
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

    def reduce_scatter(self, flat: torch.Tensor, dtype: torch.dtype) -> Callable[[], torch.Tensor]:
        whole = flat.to(dtype)
        mine = torch.empty_like(whole.tensor_split(self._size)[self._index])
        work = reduce_scatter(mine, whole, group=self._group, async_op=True)
        return lambda: _wait(work, mine)

    def all_reduce(self, flat: torch.Tensor, dtype: torch.dtype) -> Callable[[], torch.Tensor]:
        whole = flat.to(dtype)
        work = dist.all_reduce(whole, group=self._group, async_op=True)
        return lambda: _wait(work, whole)


def _wait(work: Any, result: torch.Tensor) -> torch.Tensor:
    work.wait()
    return result


def lane(group: RankGroup, ranks: Group, device: torch.device) -> Lane:
    """A lane of its own between `ranks`, some or all of `group`, for tensors on `device`."""
    return (HostLane if device.type == "cpu" else NativeLane)(group.copy_of(ranks))
