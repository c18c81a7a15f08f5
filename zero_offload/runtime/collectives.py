"""What ranks tell each other. One rank is a group of size one: same calls, no communication.

Owns the process groups, and counts the bytes that cross them. With stage 0 every rank has all shards, and only
gradients and flags travel. Blocking calls on the control thread; nothing else communicates but `CommitGroup`, which
has a process group of its own because it runs on the update worker's thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist

from zero_offload import errors
from zero_offload.errors import ZeroOffloadError
from zero_offload.plan.partition import Partition
from zero_offload.telemetry.events import Counters


def _group_size() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


class Collectives:
    """Gathers parameters and reduces gradients."""

    def __init__(self, stage: int, device: torch.device) -> None:
        self._device = device
        self.world_size = _group_size()
        self.rank = dist.get_rank() if self.world_size > 1 else 0
        self.partition = Partition(stage, self.world_size)
        self.num_shards = self.partition.optimizer_shards
        self.shard_index = self.rank if self.num_shards > 1 else 0
        self.counters = Counters()
        """"gathered", "reduced": bytes of the buffers that were whole after or before the call."""

    def all_gather(self, flat: torch.Tensor) -> None:
        """Fill `flat`, (numel,), of which this rank's part is in place, from all ranks."""
        if self.num_shards == 1:
            return
        numel = flat.numel() // self.num_shards
        mine = flat[self.shard_index * numel : (self.shard_index + 1) * numel]
        self.counters.add("gathered", flat.nbytes)
        # Bytes, since not every backend gathers every dtype.
        dist.all_gather_into_tensor(flat.view(torch.uint8), mine.view(torch.uint8))

    def reduce_grads(self, flat: torch.Tensor) -> torch.Tensor:
        """Mean over ranks of `flat`, (numel,) fp32; returns this rank's shard, (shard_numel,), maybe a view."""
        if self.world_size == 1:
            return flat
        self.counters.add("reduced", flat.nbytes)
        if self.num_shards == 1:
            dist.all_reduce(flat)
            return flat.div_(self.world_size)
        shard = torch.empty(flat.numel() // self.num_shards, dtype=flat.dtype, device=flat.device)
        dist.reduce_scatter_tensor(shard, flat)
        return shard.div_(self.world_size)

    def sum_over_shards(self, values: list[float]) -> list[float]:
        """Add numbers over the ranks that hold different shards."""
        if self.num_shards == 1:
            return values
        total = torch.tensor(values, dtype=torch.float64, device=self._device)
        dist.all_reduce(total)
        return [float(value) for value in total]

    def any_rank(self, flags: Sequence[bool]) -> list[bool]:
        """For each flag, whether it is set on some rank."""
        if self.world_size == 1:
            return list(flags)
        found = torch.tensor(flags, dtype=torch.int32, device=self._device)
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return [bool(flag) for flag in found.tolist()]

    def barrier(self) -> None:
        if self.world_size > 1:
            dist.barrier()


class CommitGroup:
    """Agreements of ranks about files, on a process group of their own."""

    def __init__(self) -> None:
        self._group = dist.new_group(backend="gloo") if _group_size() > 1 else None

    def agree(self, text: str) -> str:
        """Rank 0's text, on every rank."""
        if self._group is None:
            return text
        holder = [text]
        dist.broadcast_object_list(holder, src=0, group=self._group)
        return holder[0]

    def smallest(self, numbers: Sequence[int]) -> list[int]:
        """The smallest of each number over the ranks: what all can rely on."""
        values = torch.tensor(numbers, dtype=torch.int64)
        if self._group is not None:
            dist.all_reduce(values, op=dist.ReduceOp.MIN, group=self._group)
        return [int(value) for value in values]

    def gather_digests(self, digest: str) -> list[str]:
        """One hex digest (64 characters) per rank."""
        if self._group is None:
            return [digest]
        mine = torch.frombuffer(bytearray(digest.encode()), dtype=torch.uint8)
        every = [torch.empty_like(mine) for _ in range(_group_size())]
        dist.all_gather(every, mine, group=self._group)
        return [bytes(each.tolist()).decode() for each in every]

    @contextmanager
    def together(self) -> Iterator[None]:
        """Every rank's block succeeds, or every rank raises: none is left waiting for one that gave up.

        Inside there must be no communication. The first rank's error is raised where nothing went wrong.
        """
        failure: Exception | None = None
        try:
            yield
        except Exception as error:
            if self._group is None:
                raise
            failure = error
        if self._group is None:
            return
        found: list[tuple[str, str] | None] = [None] * _group_size()
        mine = None if failure is None else (type(failure).__name__, str(failure))
        dist.all_gather_object(found, mine, group=self._group)
        if failure is not None:
            raise failure
        for rank, theirs in enumerate(found):
            if theirs is not None:
                raise _error_class(theirs[0])(f"rank {rank}: {theirs[1]}")


def _error_class(name: str) -> type[ZeroOffloadError]:
    found = getattr(errors, name, None)
    return found if isinstance(found, type) and issubclass(found, ZeroOffloadError) else ZeroOffloadError
