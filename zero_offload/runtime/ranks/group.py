"""The ranks that train one model: all of them, or those of a device mesh; and their process groups.

A mesh has one dimension, over which the states are divided (with stage 0: over which they are whole), or two,
(replicate, shard): hybrid sharding. Ranks are numbered by their place in the mesh; so the first ones are the shards
of the first replica. Where parameters are DTensors, these ranks hold the same part of the model: a column of the
whole run, whose other columns hold the other parts and see the same data. Communicates only to make groups.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from zero_offload.config import OffloadConfig
from zero_offload.plan.partition import Partition
from zero_offload.runtime.ranks.neighbours import Channel, Neighbourhood
from zero_offload.runtime.ranks.watch import RankWatch, time_limit

# torch 2.13 renames them, and warns.
all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

Group = dist.ProcessGroup | None
"""None is every rank of the program."""


@dataclass(frozen=True)
class RankGroup:
    """Where this rank stands, and with whom it shares what."""

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
    """Members of every column; one that holds the whole model is `members`."""
    row: Group = None
    """The ranks that hold the other parts of the model."""

    @property
    def shard_index(self) -> int:
        return self.rank % self.partition.optimizer_shards

    @cached_property
    def watch(self) -> RankWatch:
        return RankWatch(self.run_members)

    @property
    def run_members(self) -> tuple[int, ...]:
        """The program's ranks that train this model, column after column."""
        return tuple(rank for column in self.columns for rank in column) or self.members

    @property
    def run_rank(self) -> int:
        return self.column * len(self.members) + self.rank

    @classmethod
    def of(
        cls, config: OffloadConfig, mesh: DeviceMesh | None = None, tensor_mesh: DeviceMesh | None = None
    ) -> RankGroup:
        """The group that `mesh`, checked by `mesh_problems`, describes; without one, all ranks.

        `tensor_mesh` is that of the model's DTensors.
        """
        if mesh is None:
            alone = not (dist.is_available() and dist.is_initialized())
            world_size, rank = (1, 0) if alone else (dist.get_world_size(), dist.get_rank())
            return cls(Partition.of(config, world_size), rank, tuple(range(world_size)))
        members = tuple(int(rank) for rank in mesh.mesh.flatten())
        everyone = None if len(members) == dist.get_world_size() else _new_group(members)
        place = members.index(dist.get_rank())
        if mesh.ndim == 1:
            group = cls(Partition.of(config, len(members)), place, members, everyone, everyone)
        else:
            partition = Partition.of(config, len(members), mesh.size(0))
            group = cls(partition, place, members, everyone, mesh.get_group(1), mesh.get_group(0))
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
    def agreement_group(self) -> Group:
        """Another over gloo for the ranks that hold the same part, from the control thread. Collective."""
        return _new_group(self.members, "gloo") if len(self.members) > 1 else None

    @cached_property
    def _neighbourhood(self) -> Neighbourhood:
        assert self.agreement_group is not None
        return Neighbourhood(self.agreement_group, self.members)

    def leave(self) -> None:
        """This rank calls no collective of the control thread any more: those that wait for it there learn it."""
        if len(self.members) > 1:
            self._neighbourhood.leave()

    def channel(self, group: Group, *, reads: bool = False) -> Channel | None:
        """A channel of its own between the ranks of `group`, if they can reach each other's memory. Collective."""
        ranks = self.members if group is None else tuple(dist.get_process_group_ranks(group))
        return self._neighbourhood.channel(ranks, reads=reads)


def _new_group(members: tuple[int, ...], backend: str | None = None) -> Group:
    # Of some ranks only the members call: those outside of the mesh know nothing of this model. torch names such a
    # group by how many groups a rank is in, so they must be in equally many; of all ranks it counts the calls.
    is_part = len(members) < dist.get_world_size()
    # torch would give it the default time-out, not the one that init_process_group was given.
    group: Group = dist.new_group(
        list(members), timeout=time_limit(), backend=backend, use_local_synchronization=is_part
    )
    return group


def mesh_problems(mesh: object, device_type: str, tensor_mesh: DeviceMesh | None = None) -> Iterator[str]:
    """What keeps `mesh` from being used, beside the mesh of the model's DTensors."""
    if mesh is None:
        if tensor_mesh is not None:
            yield (
                f"the model has parameters divided over {tensor_mesh}: say which ranks hold the same parts and see "
                "other data, as mesh=mesh['dp'] of init_device_mesh(..., mesh_dim_names=('dp', 'tp')); that may be "
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
