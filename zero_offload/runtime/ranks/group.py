"""The ranks that train one model: all of them, or those of a device mesh; and their process groups.

A mesh has one dimension, over which the states are divided (with stage 0: over which they are whole), or two,
(replicate, shard): hybrid sharding. Ranks are numbered by their place in the mesh; so the first ones are the shards of
the first replica. Where parameters are DTensors, these ranks hold the same part of the model. They are a column of the
whole run; its other columns hold the other parts and see the same data. Communicates only to make groups.
"""

from __future__ import annotations

import hashlib
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

from zero_offload.base.config import OffloadConfig
from zero_offload.base.host import host_empty
from zero_offload.hardware.device import DeviceChoice, choose_gpus, use_gpu
from zero_offload.plan.partition import Partition
from zero_offload.runtime.ranks.join import launched_ranks
from zero_offload.runtime.ranks.neighbours import Channel, open_channel
from zero_offload.runtime.ranks.sockets import watched_sockets
from zero_offload.runtime.ranks.watch import Notice, RankWatch, time_limit

# torch 2.13 renames them, and warns.
all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

Group = dist.ProcessGroup | None
"""None is every rank of the program."""


def gather_few(every: torch.Tensor, mine: torch.Tensor, *, group: Group) -> None:
    """As `all_gather`, for some words in host memory over gloo: fill `every`, (num_ranks * numel,), by ranks' `mine`.

    gloo's own passes words around a ring, by as many hops as there are other ranks. A hop is a round trip, since the
    receiver has to ask. Here the words that a rank has double with each hop.
    """
    size, index = dist.get_world_size(group), dist.get_rank(group)
    # (size, numel), from this rank's own on.
    words = host_empty(every.numel(), every.dtype).view(size, -1)
    words[0] = mine
    num_here = 1
    while num_here < size:
        count = min(num_here, size - num_here)
        arriving = words[num_here : num_here + count]
        works = [
            dist.irecv(arriving, group=group, group_src=(index + num_here) % size),
            dist.isend(words[:count], group=group, group_dst=(index - num_here) % size),
        ]
        for work in works:
            assert work is not None
            work.wait()
        num_here += count
    every.copy_(words.roll(index, 0).view(-1))


class Course:
    """All that a rank has said, as a number. Bytes between ranks of one course alone meet, since it is their tag."""

    def __init__(self) -> None:
        self.digest = self.num_restarts = 0

    def go(self, text: str) -> None:
        self.digest = zlib.crc32(text.encode(), self.digest)

    def restart(self, number: int) -> None:
        """All ranks begin anew, with one number."""
        self.digest = number
        self.num_restarts += 1


@dataclass(frozen=True)
class Callers:
    """The ranks that call `zo.offload` together, as far as is known before anything is checked."""

    members: tuple[int, ...]
    """The program's ranks, ascending."""
    group: Group
    """A group of its own over gloo, for the control thread; None when this rank is alone."""
    watch: RankWatch

    @classmethod
    def of(cls, mesh: object) -> Callers:
        """Those of `mesh`; all, where it is none. A rank that is not in it is alone with that. Collective."""
        members: tuple[int, ...] = (0,)
        if dist.is_available() and dist.is_initialized():
            members = tuple(range(dist.get_world_size()))
            if isinstance(mesh, DeviceMesh):
                members = tuple(sorted(mesh.mesh.flatten().tolist()))
                members = members if dist.get_rank() in members else (dist.get_rank(),)
        watch = RankWatch(members)
        with watch.waiting(CALL):
            return cls(members, _new_group(members, "gloo") if len(members) > 1 else None, watch)

    def together(self, notice: Notice | None = None) -> AbstractContextManager[None]:
        """As `RankWatch.together`."""
        return self.watch.together(self.group, self.members, CALL, notice)

    @contextmanager
    def together_with(self, tensor_mesh: DeviceMesh | None, notice: Notice) -> Iterator[None]:
        """As `together`; ranks that hold the other parts of a model divided over `tensor_mesh` are told as well."""
        row = None if tensor_mesh is None or tensor_mesh.ndim > 1 else tensor_mesh.get_group()
        members = [] if row is None else dist.get_process_group_ranks(row)
        with self.watch.together(row, members, CALL, notice), self.together(notice):
            yield

    def cut(self, mesh: DeviceMesh | None) -> list[Any]:
        """The members of a mesh that passed `mesh_problems`, in its shape, by their places among all of them."""
        ranks = range(len(self.members)) if mesh is None else map(self.members.index, mesh.mesh.flatten().tolist())
        return list(ranks) if mesh is None or mesh.ndim == 1 else [mesh.size(0), *ranks]

    def take_gpus(self) -> tuple[int, int]:
        """Give each rank a GPU of its own; returns how many ranks this machine has, and the one with the most. Raises
        ConfigError on all where two ranks have one GPU. Collective."""
        with self.together():
            mine = DeviceChoice.here()
        choices = [mine]
        if self.group is not None:
            choices *= len(self.members)
            with self.watch.waiting(CALL):
                dist.all_gather_object(choices, mine, group=self.group)
        place = 0 if self.group is None else dist.get_rank(self.group)
        with self.together():
            use_gpu(mine, choose_gpus(choices, self.members)[place])
        counts = Counter(each.host for each in choices)
        return counts[mine.host], max(counts.values())


CALL = "zo.offload, which all ranks call"


@dataclass(frozen=True)
class RankGroup:
    """Where this rank stands, and with which ranks it shares what."""

    partition: Partition
    rank: int
    members: tuple[int, ...]
    """The program's ranks, by their number here."""
    everyone: Group = None
    sharers: Group = None
    """The ranks that hold the other shards of this rank's copy."""
    twins: Group = None
    """The ranks that hold the same shard."""
    column: int = 0
    columns: tuple[tuple[int, ...], ...] = ()
    """Members of every column; a single column that holds the whole model is `members`."""
    row: Group = None
    """The ranks that hold the other parts of the model."""
    agreement_group: Group = None
    """Over gloo, for agreements of the ranks that hold the same part, from the control thread; None alone."""
    callers_watch: RankWatch | None = None

    @property
    def shard_index(self) -> int:
        return self.rank % self.partition.optimizer_shards

    @cached_property
    def watch(self) -> RankWatch:
        return RankWatch(self.run_members) if self.callers_watch is None or self.columns else self.callers_watch

    @property
    def run_members(self) -> tuple[int, ...]:
        """The program's ranks that train this model, column after column."""
        return tuple(rank for column in self.columns for rank in column) or self.members

    @property
    def run_rank(self) -> int:
        return self.column * len(self.members) + self.rank

    @classmethod
    def of(
        cls,
        config: OffloadConfig,
        mesh: DeviceMesh | None = None,
        tensor_mesh: DeviceMesh | None = None,
        callers: Callers | None = None,
        num_here: int = 1,
    ) -> RankGroup:
        """The group that `mesh`, checked by `mesh_problems`, describes; without one, all ranks.

        `tensor_mesh` is that of the model's DTensors, `num_here` as in `Partition`. Collective.
        """
        callers = callers or Callers.of(mesh)
        made, watch = callers.group, callers.watch
        partition = partition_of(config, mesh, num_here)
        if mesh is None:
            rank = 0 if made is None else dist.get_rank()
            return cls(partition, rank, callers.members, agreement_group=made, callers_watch=watch)
        members = tuple(int(rank) for rank in mesh.mesh.flatten())
        everyone = None if len(members) == dist.get_world_size() else _new_group(members)
        sharers, twins = (everyone, None) if mesh.ndim == 1 else (mesh.get_group(1), mesh.get_group(0))
        place = members.index(dist.get_rank())
        group = cls(partition, place, members, everyone, sharers, twins, agreement_group=made, callers_watch=watch)
        return group if tensor_mesh is None else group._in_columns(tensor_mesh)

    def _in_columns(self, tensor_mesh: DeviceMesh) -> RankGroup:
        row = tensor_mesh.get_group()
        columns: list[Any] = [None] * tensor_mesh.size()
        dist.all_gather_object(columns, self.members, group=row)
        return replace(self, column=tensor_mesh.get_local_rank(), columns=tuple(columns), row=row)

    def copy_of(self, group: Group) -> Group:
        """Another group of the same ranks."""
        return _new_group(self.members if group is None else tuple(dist.get_process_group_ranks(group)))

    def control_group(self) -> Group:
        """A group of its own over gloo, for agreements from another thread; None when this rank is alone."""
        return _new_group(self.run_members, "gloo") if len(self.run_members) > 1 else None

    @cached_property
    def course(self) -> Course:
        """The course of this rank among `members`."""
        return Course()

    @cached_property
    def _neighbours(self) -> tuple[Channel | None, list[list[int]]]:
        if self.agreement_group is None:
            return None, [[*self.members]]
        channel, machines = open_channel(self.agreement_group, sorted(self.members))
        self.watch.ask_machines(machines)
        return channel, machines

    @property
    def machines(self) -> list[list[int]]:
        """The program's ranks among `members`, by machine. All ask for it, as for the rest."""
        return self._neighbours[1]

    @property
    def near(self) -> Channel | None:
        """The channel between members on this machine, if there are several, and they may share pages."""
        return self._neighbours[0]

    @property
    def channel(self) -> Channel | None:
        """The channel between all members, if one machine runs them."""
        return self.near if len(self.machines) == 1 else None

    @cached_property
    def firsts(self) -> Group:
        """Over gloo, the first ranks of machines; None where this rank is not one, or there is one machine."""
        ranks = tuple(sorted(each[0] for each in self.machines))
        is_one = len(ranks) > 1 and dist.get_rank() in ranks
        return _new_group(ranks, "gloo") if is_one and len(ranks) < len(self.members) else None

    def leave(self) -> None:
        """This rank calls no collective of the control thread any more: those that wait for it there learn it."""
        if self.near is not None:
            self.near.leave()


def partition_of(config: OffloadConfig, mesh: DeviceMesh | None, num_here: int = 1) -> Partition:
    """The partition by the number of ranks alone: no other rank is asked. `num_here` as in `Partition`."""
    if mesh is None:
        return Partition.of(config, launched_ranks()[1], num_here=num_here)
    return Partition.of(config, mesh.size(), mesh.size(0) if mesh.ndim == 2 else 1, num_here)


_num_made: WeakKeyDictionary[dist.ProcessGroup, Counter[tuple[int, ...]]] = WeakKeyDictionary()
"""How many groups of which members there have been, since the program made its group of all ranks."""


def _new_group(members: tuple[int, ...], backend: str | None = None) -> Group:
    """A further group of `members`, called by them alone: others know nothing of this model."""
    # torch counts groups, and names one by the count. Members of different models count differently, would look for
    # each other under different names, and wait until the time-out. So a group is named by its members here, and by a
    # count that they share. The name takes no number of torch's, which counts for all ranks.
    num_made = _num_made.setdefault(distributed_c10d._get_default_group(), Counter())
    num_made[members] += 1
    name = hashlib.sha256(f"zero_offload {members} {num_made[members]}".encode()).hexdigest()
    named = distributed_c10d._process_group_name
    distributed_c10d._process_group_name = lambda *_, **__: name  # type: ignore[assignment]
    try:
        # torch would give it the default time-out, not that of init_process_group.
        within = time_limit()
        with watched_sockets(of_group=True):
            group: Group = dist.new_group(
                list(members), timeout=within, backend=backend, use_local_synchronization=True
            )
    finally:
        distributed_c10d._process_group_name = named
    return group


def mesh_problems(mesh: object, device_type: str, tensor_mesh: DeviceMesh | None = None) -> Iterator[str]:
    """Reasons why `mesh` cannot be used beside the mesh of the model's DTensors."""
    if mesh is None:
        if tensor_mesh is not None:
            yield (
                f"the model has parameters divided over {tensor_mesh}. Say which ranks hold the same parts and see "
                "other data, as mesh=mesh['dp'] of init_device_mesh(..., mesh_dim_names=('dp', 'tp')). That may be "
                "a dimension of one rank"
            )
        return
    if not isinstance(mesh, DeviceMesh):
        yield f"mesh is a {type(mesh).__name__}; use torch.distributed.device_mesh.init_device_mesh"
        return
    if mesh.ndim > 2:
        yield f"mesh has {mesh.ndim} dimensions; give the one or two, (replicate, shard), over which data is parallel"
    if mesh.device_type != device_type:
        yield f"mesh is of {mesh.device_type}, but the model computes on {device_type}; make the mesh for {device_type}"
    if any((mesh.mesh.diff(dim=dim) < 0).any() for dim in range(mesh.ndim)):
        # torch numbers the ranks of a group in ascending order, whatever order they are given in.
        yield f"mesh {mesh.mesh.tolist()} has ranks that do not ascend along a dimension; sort them"
    if mesh.get_coordinate() is None:
        yield f"rank {dist.get_rank()} is not in the mesh; call zo.offload on the ranks of the mesh only"
    elif tensor_mesh is not None and (both := _in_both(mesh, tensor_mesh)) != {dist.get_rank()}:
        yield (
            f"ranks {sorted(both)} are in mesh={mesh} and in the mesh {tensor_mesh} of the model's parameters; give "
            "the dimension over which data is parallel, as mesh['dp']"
        )


def _in_both(mesh: DeviceMesh, other: DeviceMesh) -> set[int]:
    return set(mesh.mesh.flatten().tolist()) & set(other.mesh.flatten().tolist())
