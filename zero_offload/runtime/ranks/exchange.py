"""How tensors of ranks cross: launched here, waited for by calling what the launch returned.

In host memory (`HostExchange`) ranks exchange their parts, and each adds up its own in the order of ranks. That is half
the bytes of gloo's reduce-scatter, which reduces everything everywhere, and the bits do not depend on a ring. Parts
cross between machines by gloo's messages. A part that all ranks need crosses once per machine. A rank there hands it
on to the others, on a thread, since it may be computing or waiting for something else. Inside of a machine parts lie in
pages (`NearBytes`); large ones, and all where pages are forbidden, are messages. Bytes that this rank has sent are
counted, inside of its machine ("sent.near") and to others ("sent.far").

On a GPU (`NativeExchange`) the backend's collectives run on a stream of the group; nothing is counted. Buffers belong
to the exchange from the launch to the end of the wait. The control thread calls.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from zero_offload.base.ends import exit_gate
from zero_offload.base.events import Counters
from zero_offload.plan.memory import NEAR_LARGEST
from zero_offload.runtime.ranks.group import Course, Group, RankGroup, all_gather, reduce_scatter
from zero_offload.runtime.ranks.near_bytes import NearBytes, open_near_bytes

_COURSE_BITS, _TAGS = 20, 1 << 10
"""Of a tag: bits of the course, and how many exchanges are told apart by their number."""
_RESTART_BITS = 32
_OWN, _CARRIED = 0, 1
"""Lanes inside of a machine: a rank's own part, and parts of other machines that it has got for all."""


class Exchange(Protocol):
    """A tensor's part i, of as many as there are ranks, is rank i's."""

    def gather(self, flat: torch.Tensor) -> Callable[[], None]:
        """Fill `flat`, (numel,), of which this rank's part is in place."""

    def spread(self, piece: torch.Tensor, source: int) -> Callable[[], None]:
        """Fill `piece`, (numel,), on all ranks with what rank `source` has in it."""

    def swap(self, sent: Sequence[torch.Tensor], received: Sequence[torch.Tensor]) -> Callable[[], None]:
        """Send `sent[r]`, (n,), to rank r, and fill `received[r]` with what it sends here."""

    def reduce_scatter(self, flat: torch.Tensor, dtype: torch.dtype) -> Callable[[], torch.Tensor]:
        """The wait returns the sum over ranks of this rank's part, (part_numel,) `dtype`; `flat` is overwritten."""

    def all_reduce(self, flat: torch.Tensor, dtype: torch.dtype) -> Callable[[], torch.Tensor]:
        """The wait returns the sum over ranks of `flat`, in `dtype`; `flat` is overwritten."""


class Routes:
    """Which rank gets whose part, where each crosses once per machine. Of the k-th rank of a machine the k-th of
    another one gets it, and leaves it to the rest there."""

    def __init__(self, machines: Sequence[Sequence[int]], index: int) -> None:
        (self.here,) = (ranks for ranks in machines if index in ranks)
        self.near = [rank for rank in self.here if rank != index]
        """Other ranks of this machine."""
        others = [ranks for ranks in machines if ranks is not self.here]
        self.far = sorted(rank for ranks in others for rank in ranks)
        place = self.here.index(index)
        self.carriers = [ranks[place % len(ranks)] for ranks in others]
        """Ranks of other machines that get this rank's part."""
        self.carried = {
            rank: [r for ranks in others for place, r in enumerate(ranks) if place % len(self.here) == k]
            for k, rank in enumerate(self.here)
        }
        """By rank of this machine: the ranks of others whose parts it gets."""


class _Carrier:
    """A thread that makes calls in their order. It ends with this object."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[tuple[Callable[[], list[Any]], Future[list[Any]]] | None] = SimpleQueue()
        threading.Thread(target=_carry, args=(self._calls,), name="zero_offload-carrier", daemon=True).start()
        weakref.finalize(self, self._calls.put, None)

    def call(self, call: Callable[[], list[Any]]) -> Future[list[Any]]:
        made: Future[list[Any]] = Future()
        self._calls.put((call, made))
        return made


def _carry(calls: SimpleQueue[tuple[Callable[[], list[Any]], Future[list[Any]]] | None]) -> None:
    while (asked := calls.get()) is not None:
        call, made = asked
        try:
            with exit_gate.inside():
                made.set_result(call())
        except Exception as error:
            made.set_exception(error)
        del asked, call, made  # they hold the exchange


class _Meeting(NamedTuple):
    """One exchange: its number among those of all ranks, and the tag of its bytes."""

    number: int
    tag: int
    flight: object


class HostExchange:
    """Host memory. Parts of ranks whose courses differ do not meet: gloo would end the process for a part of another
    size."""

    def __init__(
        self,
        group: Group,
        course: Course | None = None,
        near: tuple[NearBytes | None, Sequence[Sequence[int]]] | None = None,
        counters: Counters | None = None,
    ) -> None:
        """`near`: pages of this machine, and the ranks of each; without it each rank counts as a machine."""
        self._group = group
        self._course = course or Course()
        self.num_ranks, self.index = dist.get_world_size(group), dist.get_rank(group)
        self._pages, machines = near or (None, [[rank] for rank in range(self.num_ranks)])
        self._routes = Routes(machines, self.index)
        self._mine_carried = self._routes.carried[self.index]
        self._counters = counters or Counters()
        self._number = self._num_restarts = 0
        self._carrier: _Carrier | None = None

    def gather(self, flat: torch.Tensor) -> Callable[[], None]:
        return self._share(flat.tensor_split(self.num_ranks), self._course.digest)

    def spread(self, piece: torch.Tensor, source: int) -> Callable[[], None]:
        nothing = piece[:0]
        parts = [piece if rank == source else nothing for rank in range(self.num_ranks)]
        return self._share(parts, self._course.digest)

    def swap(self, sent: Sequence[torch.Tensor], received: Sequence[torch.Tensor]) -> Callable[[], None]:
        meeting = self._meet(self._course.digest, by_pages=False)
        near, far = ([sent[rank].nbytes for rank in ranks] for ranks in (self._routes.near, self._routes.far))
        self._count(sum(near), sum(far))
        others = [rank for rank in range(self.num_ranks) if rank != self.index]
        works = [self._receive(received[rank].view(torch.uint8), rank, meeting) for rank in others]
        works += [self._send(sent[rank].view(torch.uint8), rank, meeting) for rank in others]
        return lambda: _wait_for(works)

    def reduce_scatter(self, flat: torch.Tensor, dtype: torch.dtype) -> Callable[[], torch.Tensor]:
        routes, by_pages = self._routes, self._by_pages(flat.nbytes)
        meeting = self._meet(self._course.digest, by_pages)
        terms = list(flat.tensor_split(self.num_ranks))
        sent = [term.view(torch.uint8) for term in terms]
        mine = terms[self.index]
        self._count(sum(sent[rank].numel() for rank in routes.near), sum(sent[rank].numel() for rank in routes.far))
        ours = range(self.index, self.num_ranks)
        messages = routes.far if by_pages else [*routes.near, *routes.far]
        for rank in messages:
            terms[rank] = torch.empty_like(mine)
        works = [self._receive(terms[rank].view(torch.uint8), rank, meeting) for rank in messages]
        works += [self._send(sent[rank], rank, meeting) for rank in messages]
        pages = self._pages if by_pages else None
        if pages is not None and not pages.put(meeting.number, _OWN, meeting.tag, [sent[rank] for rank in routes.near]):
            works += [self._send(sent[rank], rank, meeting) for rank in routes.near]

        def wait() -> torch.Tensor:
            for rank in routes.near if pages is not None else ():
                assert pages is not None
                found = pages.take(rank, meeting.number, _OWN, meeting.tag)
                if found is None:
                    terms[rank] = torch.empty_like(mine)
                    works.append(self._receive(terms[rank].view(torch.uint8), rank, meeting))
                else:
                    at = sum(sent[each].numel() for each in routes.here if each not in (rank, *ours))
                    terms[rank] = found[at : at + mine.nbytes].view(mine.dtype)
            _wait_for(works)
            # Another rank reads its page too, and this rank's own part is no longer sent.
            total = terms[0].float() if self.index == 0 or mine.dtype != torch.float32 else terms[0].clone()
            for term in terms[1:]:
                total += term
            if pages is not None:
                pages.end(meeting.number)
            return total.to(dtype)

        return wait

    def all_reduce(self, flat: torch.Tensor, dtype: torch.dtype) -> Callable[[], torch.Tensor]:
        reduce, digest = self.reduce_scatter(flat, dtype), self._course.digest

        def wait() -> torch.Tensor:
            mine = reduce()
            total = flat if flat.dtype == dtype else torch.empty_like(flat, dtype=dtype)
            parts = total.tensor_split(self.num_ranks)
            parts[self.index].copy_(mine)
            self._share(parts, digest)()
            return total

        return wait

    def _share(self, parts: Sequence[torch.Tensor], digest: int) -> Callable[[], None]:
        """Launch: fill parts[i] with rank i's on all ranks; `digest` is that of the course."""
        routes, largest = self._routes, max(part.nbytes for part in parts)
        by_pages = self._by_pages(largest * self.num_ranks)
        meeting = self._meet(digest, by_pages)
        # Bytes, since not every backend sends every dtype.
        flats = [part.view(torch.uint8) for part in parts]
        mine = flats[self.index]
        carried = sum(flats[rank].numel() for rank in self._mine_carried)
        self._count(len(routes.near) * (mine.numel() + carried), len(routes.carriers) * mine.numel())
        arriving = [self._receive(flats[rank], rank, meeting) for rank in self._mine_carried]
        works = [self._send(mine, rank, meeting) for rank in routes.carriers]
        pages = self._pages if by_pages else None

        def receive(rank: int, lane: int) -> None:
            for source in [rank] if lane == _OWN else routes.carried[rank]:
                works.append(self._receive(flats[source], rank, meeting))

        def leave(lane: int) -> list[Any]:
            pieces = [mine] if lane == _OWN else [flats[rank] for rank in self._mine_carried]
            if not routes.near or (pages is not None and pages.put(meeting.number, lane, meeting.tag, pieces)):
                return []
            return [self._send(piece, rank, meeting) for rank in routes.near for piece in pieces]

        def carry() -> list[Any]:
            try:
                _wait_for(arriving)
            except RuntimeError as error:
                if pages is not None:
                    # Control threads here wait in pages, each for its neighbour, and would not look at this call.
                    pages.give_up(str(error))
                raise
            return leave(_CARRIED)

        def take(rank: int, lane: int) -> None:
            assert pages is not None
            found = pages.take(rank, meeting.number, lane, meeting.tag)
            if found is None:
                receive(rank, lane)
                return
            at = 0
            for source in [rank] if lane == _OWN else routes.carried[rank]:
                target = flats[source]
                target.copy_(found[at : at + target.numel()])
                at += target.numel()

        works += leave(_OWN)
        carrying = None
        if self._mine_carried and routes.near:
            self._carrier = self._carrier or _Carrier()
            carrying = self._carrier.call(carry)
        lanes = [(rank, _OWN) for rank in routes.near]
        lanes += [(rank, _CARRIED) for rank in routes.near if routes.carried[rank]]
        if pages is None:
            for rank, lane in lanes:
                receive(rank, lane)

        def wait() -> None:
            for rank, lane in lanes if pages is not None else ():
                take(rank, lane)
            _wait_for(arriving if carrying is None else carrying.result())
            _wait_for(works)
            if pages is not None:
                pages.end(meeting.number)

        return wait

    def _meet(self, digest: int, by_pages: bool) -> _Meeting:
        """The next exchange."""
        if self._num_restarts != self._course.num_restarts:
            self._number, self._num_restarts = 0, self._course.num_restarts  # some ranks had launched more than others
            self._carrier = None  # it may wait for what does not come any more
        self._number += 1
        number = self._num_restarts << _RESTART_BITS | self._number
        tag = self._number % _TAGS << _COURSE_BITS | digest % (1 << _COURSE_BITS)
        flight = self._pages.begin(number) if by_pages and self._pages is not None else None
        return _Meeting(number, tag, flight)

    def _by_pages(self, nbytes: int) -> bool:
        """Whether a buffer of so many bytes crosses in pages inside of a machine. All ranks there say the same."""
        return self._pages is not None and nbytes <= NEAR_LARGEST

    def _receive(self, target: torch.Tensor, rank: int, meeting: _Meeting) -> Any:
        return dist.irecv(target, group=self._group, group_src=rank, tag=meeting.tag) if target.numel() else None

    def _send(self, piece: torch.Tensor, rank: int, meeting: _Meeting) -> Any:
        return dist.isend(piece, group=self._group, group_dst=rank, tag=meeting.tag) if piece.numel() else None

    def _count(self, near: int, far: int) -> None:
        for name, nbytes in (("sent.near", near), ("sent.far", far)):
            if nbytes:
                self._counters.add(name, nbytes)


class NativeExchange:
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

    def spread(self, piece: torch.Tensor, source: int) -> Callable[[], None]:
        work = dist.broadcast(piece.view(torch.uint8), group=self._group, group_src=source, async_op=True)

        def wait() -> None:
            if work is not None:
                work.wait()

        return wait

    def swap(self, sent: Sequence[torch.Tensor], received: Sequence[torch.Tensor]) -> Callable[[], None]:
        sizes, arriving = [each.numel() for each in sent], [each.numel() for each in received]
        flat, target = torch.cat(list(sent)), received[0].new_empty(sum(arriving))
        work = dist.all_to_all_single(target, flat, arriving, sizes, group=self._group, async_op=True)

        def wait() -> None:
            _wait(work, target)
            for part, come in zip(received, target.split(arriving), strict=True):
                part.copy_(come)

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


def _wait_for(works: Sequence[Any]) -> None:
    for work in works:
        if work is not None:
            work.wait()


def exchange_of(group: RankGroup, ranks: Group, device: torch.device, counters: Counters) -> Exchange:
    """An exchange of its own between `ranks`, some or all of `group`, for tensors on `device`."""
    copy = group.copy_of(ranks)
    if device.type != "cpu":
        return NativeExchange(copy)
    near = open_near_bytes(copy, sorted(dist.get_process_group_ranks(copy)))
    return HostExchange(copy, group.course, near, counters)
