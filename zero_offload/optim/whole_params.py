"""Whole parameters of a section that ranks divide: gathered on the rank that steps each, and handed back.

A shard ends anywhere in a parameter, and a step of an optimizer of others needs all of it. `SectionLayout.steppers`
says whose rank steps it. The others send it their parts of the gradient and of the fp32 master, and get the new master
back. States never move: they rest with that rank. The calls per section, on all ranks: `gather`, then `hand_back`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from zero_offload.base.host import host_reserved
from zero_offload.plan.layout import ParamSlice, SectionLayout


class Peers(Protocol):
    """The ranks that divide sections."""

    shard_index: int

    def launch_swap(
        self, sent: Sequence[torch.Tensor], received: Sequence[torch.Tensor], what: str
    ) -> Callable[[], None]: ...

    def together(self, call: str) -> AbstractContextManager[None]: ...

    def gather_rows(self, mine: torch.Tensor, what: str) -> list[torch.Tensor]: ...


class _MovedPart(NamedTuple):
    """Elements of a parameter that a rank has, and another one steps."""

    key: int
    """The parameter's first element."""
    shard: int
    """Whose elements they are."""
    stepper: int
    begin: int
    """Within the parameter, as `end`."""
    end: int


@dataclass(frozen=True)
class Whole:
    """A parameter that this rank steps: fp32, (numel,), where the step is made; views where it is whole here."""

    master: torch.Tensor
    grad: torch.Tensor


class WholeParams:
    """Some parameters of one section, in one step."""

    def __init__(self, layout: SectionLayout, pieces: Sequence[ParamSlice], peers: Peers, what: str) -> None:
        """`pieces`: those that are stepped, alike on all ranks. `what` is the unit, for messages."""
        self._layout, self._peers, self._what = layout, peers, what
        self._pieces = {piece.begin: piece for piece in pieces}
        self._index = peers.shard_index if layout.num_shards > 1 else 0
        self._parts = [part for piece in pieces for part in _parts_of(layout, piece)]
        self._whole = dict[int, Whole]()

    def steps(self, piece: ParamSlice) -> bool:
        """True if this rank does."""
        return self._layout.steppers[piece.begin] == self._index

    def gather(self, master: torch.Tensor, grad_of: Callable[[ParamSlice, int, int], torch.Tensor]) -> dict[int, Whole]:
        """The parameters that this rank steps, by their first elements. `master` is (shard_numel,) of this rank;
        `grad_of` gives its elements of a parameter's gradient, from one to another of the shard."""
        found = dict[int, Whole]()
        for key, piece in self._pieces.items():
            if not self.steps(piece):
                continue
            begin, end = self._layout.in_shard(piece, self._index)
            if end - begin == piece.spec.numel:
                found[key] = Whole(master[begin:end], grad_of(piece, begin, end))
                continue
            found[key] = Whole(*(_empty(piece.spec.numel, master.device) for _ in range(2)))
            if begin < end:
                at = self._within(piece, begin, end)
                found[key].master[at] = master[begin:end]
                found[key].grad[at] = grad_of(piece, begin, end)

        sent, received = list[_Move](), list[_Move]()
        for part in self._parts:
            if part.shard == self._index:
                begin, end = self._layout.in_shard(self._pieces[part.key], self._index)
                own = master[begin:end], grad_of(self._pieces[part.key], begin, end)
                sent += [(part.stepper, each) for each in own]
            elif part.stepper == self._index:
                whole, at = found[part.key], slice(part.begin, part.end)
                received += [(part.shard, each[at]) for each in (whole.master, whole.grad)]
        self._swap(sent, received, master.device)
        self._whole = found
        return found

    def hand_back(self, master: torch.Tensor) -> None:
        """Have this rank's elements of `master`, (shard_numel,), as the steps left them."""
        for key, whole in self._whole.items():
            begin, end = self._layout.in_shard(self._pieces[key], self._index)
            if begin < end:
                own = whole.master[self._within(self._pieces[key], begin, end)]
                if own.data_ptr() != master[begin:end].data_ptr():
                    master[begin:end] = own
        sent, received = list[_Move](), list[_Move]()
        for part in self._parts:
            if part.shard == self._index:
                begin, end = self._layout.in_shard(self._pieces[part.key], self._index)
                received.append((part.stepper, master[begin:end]))
            elif part.stepper == self._index:
                sent.append((part.shard, self._whole[part.key].master[part.begin : part.end]))
        self._swap(sent, received, master.device)

    def _within(self, piece: ParamSlice, begin: int, end: int) -> slice:
        """Elements of the shard as a range of the parameter."""
        offset = self._index * self._layout.shard_numel - piece.begin
        return slice(begin + offset, end + offset)

    def _swap(self, sent: Sequence[_Move], received: Sequence[_Move], device: torch.device) -> None:
        """Send and receive these, in the order of parts, which is that of all ranks; nothing where no rank does."""
        if not self._parts:
            return
        leaving, arriving = (
            [[each for rank, each in moves if rank == other] for other in range(self._layout.num_shards)]
            for moves in (sent, received)
        )
        flats, rooms = ([_room(tensors, device) for tensors in each] for each in (leaving, arriving))
        for flat, tensors in zip(flats, leaving, strict=True):
            if tensors:
                torch.cat(tensors, out=flat)
        self._peers.launch_swap(flats, rooms, f"parameters of {self._what} that other ranks step")()
        for room, tensors in zip(rooms, arriving, strict=True):
            for target, come in zip(tensors, room.split([each.numel() for each in tensors]), strict=True):
                target.copy_(come)


_NBYTES = 8
"""Of an element that crosses, or of a parameter that is brought together: its gradient and its master."""

_Move = tuple[int, torch.Tensor]
"""Another rank's shard, and elements that go there, or come from there."""


def gathered_bytes(layout: SectionLayout, pieces: Sequence[ParamSlice], shard: int) -> int:
    """Memory that a rank needs for parameters that are not whole on one rank, and for parts that cross."""
    parts = [part for piece in pieces for part in _parts_of(layout, piece)]
    crossing = sum(part.end - part.begin for part in parts if shard in (part.shard, part.stepper))
    keys = {part.key for part in parts if part.stepper == shard}
    whole = sum(piece.spec.numel for piece in pieces if piece.begin in keys)
    return _NBYTES * (crossing + whole)


def _parts_of(layout: SectionLayout, piece: ParamSlice) -> list[_MovedPart]:
    stepper, found = layout.steppers[piece.begin], []
    for shard in range(layout.num_shards):
        begin, end = layout.in_shard(piece, shard)
        if begin < end and shard != stepper:
            offset = shard * layout.shard_numel - piece.begin
            found.append(_MovedPart(piece.begin, shard, stepper, begin + offset, end + offset))
    return found


def _room(tensors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    return _empty(sum(each.numel() for each in tensors), device)


def _empty(numel: int, device: torch.device) -> torch.Tensor:
    """(numel,) fp32; in host memory pages that are taken when they are touched."""
    if device.type == "cpu":
        return host_reserved([numel], torch.float32)
    return torch.empty(numel, dtype=torch.float32, device=device)
