"""Communication between ranks. One rank is a group of size one: same calls, no communication.

Counts the bytes that ranks gather and reduce. With stage 0 every rank has all shards, and only gradients and flags
travel. Parameters and gradients have an exchange each (`exchange.py`): launched here, waited for by calling what the
launch returned. It has a process group of its own, so that what one carries never waits for another's.

Flags and sums are blocking calls. All are on the control thread, each announced to `Agreement`. Beside them only
`CommitGroup` communicates. It has a process group of its own, because commits have a thread of their own. While they
run the group is lent to that thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist

from zero_offload.base.alike import Compared
from zero_offload.base.config import OffloadConfig
from zero_offload.base.events import Counters
from zero_offload.base.host import host_reserved, host_tensor
from zero_offload.base.problems import warning_after
from zero_offload.base.spans import Track, now
from zero_offload.base.types import Branches, GradReduction, UpdateOverlap
from zero_offload.plan.layout import ParamSlice, SectionLayout
from zero_offload.runtime.ranks.agreement import Agreement
from zero_offload.runtime.ranks.exchange import Exchange, exchange_of
from zero_offload.runtime.ranks.group import Group, RankGroup
from zero_offload.runtime.ranks.watch import Notice, RankWatch, time_limit

T = TypeVar("T")

COME_S = timedelta(seconds=5)
"""How long ranks wait for each other where one may have been left by an exception."""
WARN_S = 10.0
"""How long a rank waits silently in a call that it may have made alone."""
_SHIPPED = "parts of a generation on another machine's drive"


class Collectives:
    """Gathers parameters and reduces gradients."""

    def __init__(
        self,
        group: RankGroup,
        device: torch.device,
        config: OffloadConfig,
        counters: Counters,
    ) -> None:
        mean = config.grad_reduction == GradReduction.MEAN.value
        self._divisor = group.partition.world_size if mean else 1
        self._reduce_dtype: torch.dtype = getattr(torch, config.reduce_dtype_name)
        """The dtype to which gradients are rounded before they cross the network."""
        with group.watch.waiting("zo.offload, which all ranks call"):
            self.agreement = Agreement(
                group,
                Branches(config.branches),
                on_host=device.type == "cpu",
                may_follow=config.overlap != UpdateOverlap.BACKWARD,
            )
        self._device = device
        self._group = group
        self._watch = group.watch
        self._row = group.row if len(group.columns) > 1 else None
        """The ranks that hold the other parts of the model, if there are any."""
        self.partition = group.partition
        self.world_size = self.partition.world_size
        self.num_shards = self.partition.optimizer_shards
        self.shard_index = group.shard_index
        self._gathers = self._reductions = self._twins = None
        if self.num_shards > 1:
            self._gathers = exchange_of(group, group.sharers, device, counters)
            self._reductions = exchange_of(group, group.sharers, device, counters)
            if self.partition.num_replicas > 1:
                self._twins = exchange_of(group, group.twins, device, counters)
        elif self.world_size > 1:
            self._reductions = exchange_of(group, group.everyone, device, counters)
        self._everyone = list(range(self.world_size))
        """Places of ranks among those that agree."""
        self._sharers = self._everyone
        if self.num_shards == 1:
            self._sharers = self.agreement.places_of([group.members[group.rank]])
        elif group.sharers is not None:
            self._sharers = self.agreement.places_of(dist.get_process_group_ranks(group.sharers))
        self.counters = counters
        """"gathered", "reduced": bytes of the buffers that were whole after or before the call."""

    def compare(self, name: str, compared: Callable[[], Compared]) -> None:
        """As `Agreement.compare`, where there are other ranks."""
        if self.is_shared:
            self.agreement.compare(name, compared())

    @contextmanager
    def together(
        self, call: str, notice: Notice | None = None, *, may_be_alone: bool = False, ends_step: bool = False
    ) -> Iterator[None]:
        """As `Agreement.together`; ranks that hold the other parts of the model are told as well. With `may_be_alone`
        some rank easily makes the call alone: a rank that waits warns, and says for which others."""
        notice = notice or Notice()
        members = [] if self._row is None else dist.get_process_group_ranks(self._row)
        with (
            ExitStack() as waiting,
            self._watch.together(self._row, members, call, notice),
            self.agreement.together(call, notice, ends_step=ends_step),
        ):
            try:
                yield
                if self._row is not None:
                    notice.flags = []  # they concern ranks with other parts of the model too
            finally:
                if may_be_alone and self.is_shared:
                    waiting.enter_context(warning_after(WARN_S, lambda: self._waiting_text(call)))

    def _waiting_text(self, call: str) -> str:
        return f"rank {self._watch.rank} has waited {WARN_S:g} s for {self.agreement.awaited()} in {call}"

    @property
    def is_shared(self) -> bool:
        """True if other ranks have the model, or other parts of it."""
        return self._row is not None or self.world_size > 1

    def of_first(self, values: torch.Tensor, what: str, *, is_part: bool) -> torch.Tensor:
        """The values that rank 0 gives, host, on all ranks; of a part of a DTensor the first rank's that holds it."""
        self.agreement.same(what)
        holder = [values]
        with self._watch.waiting(what):
            for group in (self._group.agreement_group, None if is_part else self._row):
                if group is not None:
                    dist.broadcast_object_list(holder, group=group, group_src=0)
        return holder[0]

    def launch_gather(self, flat: torch.Tensor, unit: str) -> Callable[[], None]:
        """Fill `flat`, (numel,), parameters of `unit` of which this rank's part is in place; returns the wait."""
        if self._gathers is None:
            return lambda: None
        self.counters.add("gathered", flat.nbytes)
        what, moved = f"the gather of parameters of {unit}", (Track.GATHER, unit, flat.nbytes)
        opened = self.counters.spans.open(Track.FETCH, f"{Track.GATHER.value} {unit}")
        wait = self._watched(lambda exchange: exchange.gather(flat), self._gathers, what, moved)
        self.counters.spans.close(opened)
        return wait

    def launch_spread(self, pieces: Sequence[tuple[torch.Tensor, int]], what: str) -> Callable[[], None]:
        """Fill each of the pieces, (numel,), on all ranks with what the rank with that shard has; returns the wait. All
        have said before that they do so."""
        if self._gathers is None:
            return lambda: None
        nbytes = sum(piece.nbytes for piece, _ in pieces)
        self.counters.add("gathered", nbytes)

        def launch(exchange: Exchange) -> Callable[[], None]:
            waits = [exchange.spread(piece, source) for piece, source in pieces]
            return lambda: [wait() for wait in waits].clear()

        return self._watched(launch, self._gathers, f"the gather of {what}", (Track.GATHER, what, nbytes))

    def gather_param(self, layout: SectionLayout, piece: ParamSlice, mine: torch.Tensor, what: str) -> torch.Tensor:
        """(numel,) of a parameter, of which this rank's shard has the elements `mine`; on the compute device where
        others have some. All have said before that they do so."""
        if layout.num_shards == 1:
            return mine
        numel, device = piece.spec.numel, self._device
        whole = host_reserved([numel], mine.dtype) if device.type == "cpu" else mine.new_empty(numel, device=device)
        spans = [layout.in_shard(piece, shard) for shard in range(layout.num_shards)]
        parts = whole.split([end - begin for begin, end in spans])
        parts[self.shard_index].copy_(mine)
        self.launch_spread([(part, shard) for shard, part in enumerate(parts) if part.numel()], what)()
        return whole

    def launch_swap(
        self, sent: Sequence[torch.Tensor], received: Sequence[torch.Tensor], what: str
    ) -> Callable[[], None]:
        """Send `sent[i]`, (n,), to the rank with shard i, and fill `received[i]` with what it sends here; returns the
        wait. On a GPU host memory goes by way of it. All have said before that they do so."""
        assert self._gathers is not None
        self.counters.add("gathered", sum(each.nbytes for each in received))
        if self._device.type == "cpu":
            return self._watched(lambda exchange: exchange.swap(sent, received), self._gathers, what)
        there = [each.to(self._device) for each in sent]
        arriving = [each.to(self._device) for each in received]
        wait = self._watched(lambda exchange: exchange.swap(there, arriving), self._gathers, what)

        def finish() -> None:
            wait()
            for target, each in zip(received, arriving, strict=True):
                if target is not each:
                    target.copy_(each)

        return finish

    def gather_rows(self, mine: torch.Tensor, what: str) -> list[torch.Tensor]:
        """The bytes that each rank gives, (n,) uint8, host, by shard. All make the call."""
        if self._gathers is None:
            return [mine]
        every = self.agreement.numbers([float(mine.numel())], what)
        rows = [host_reserved([int(every[place][0])], torch.uint8) for place in self._sharers]
        rows[self.shard_index].copy_(mine)
        there = [row.to(self._device) for row in rows]
        self.launch_spread([(row, shard) for shard, row in enumerate(there) if row.numel()], what)()
        return [row.to("cpu") for row in there]

    def launch_reduce(self, flats: Sequence[torch.Tensor], unit: str) -> Callable[[], list[torch.Tensor]]:
        """Mean (or sum) over ranks of each of `flats`, (numel,); the wait returns this rank's shards, fp32.

        They cross the network as one; the last of them is `unit`'s. Gradients that are 16 bits wide cross so, and are
        added in fp32 all the same. Not called by a rank that is alone.
        """
        assert self._reductions is not None
        what = f"the reduction of gradients of {unit}"
        # Shard by shard, (num_shards, numel of all their shards): what is one rank's lies together.
        rows = [self._rounded(flat).view(self.num_shards, -1) for flat in flats]
        sent = (rows[0] if len(rows) == 1 else torch.cat(rows, dim=1)).view(-1)
        one_shard = self.num_shards == 1
        # An all-reduce is a reduce-scatter and a gather of the sums.
        self.counters.add("reduced", sent.nbytes + sent.numel() * self._reduce_dtype.itemsize * one_shard)
        opened = self.counters.spans.open(Track.GRADS, f"{Track.REDUCE.value} {unit}")
        wait = self._watched(
            lambda exchange: (exchange.all_reduce if one_shard else exchange.reduce_scatter)(sent, self._reduce_dtype),
            self._reductions,
            what,
            (Track.REDUCE, unit, sent.nbytes),
        )
        self.counters.spans.close(opened)

        def finish() -> list[torch.Tensor]:
            shard = wait()
            if self._twins is not None:
                shard = self._watched(lambda exchange: exchange.all_reduce(shard, shard.dtype), self._twins, what)()
            mean = shard.float().div_(self._divisor)
            return list(mean.split([row.shape[1] for row in rows]))

        return finish

    def _rounded(self, flat: torch.Tensor) -> torch.Tensor:
        return flat if self._reduce_dtype == torch.float32 else flat.to(self._reduce_dtype)

    def _watched(
        self,
        launch: Callable[[Exchange], Callable[[], T]],
        exchange: Exchange,
        what: str,
        moved: tuple[Track, str, int] | None = None,
    ) -> Callable[[], T]:
        """Launch `what`; the wait. `moved`, lane, unit and bytes, is drawn as a transfer."""
        spans = self.counters.spans
        begin = now() if spans.on else 0
        said = self.agreement.said
        with self._watch.waiting(what):
            wait = launch(exchange)

        def watched() -> T:
            self.agreement.hear(said, what)
            with self._watch.waiting(what):
                result = wait()
            if self._device.type != "cpu":
                # The stream waits, and this thread, maybe, somewhere behind it: a watch sees how long.
                passed = torch.Event(device=self._device)
                passed.record(torch.accelerator.current_stream(self._device))
                self._watch.goes_on_after(passed.query)
            if begin and moved is not None:
                spans.put(moved[0], moved[1], begin, now(), moved[2])
            return result

        return watched

    def sum_over_shards(self, values: list[float]) -> list[float]:
        """Add numbers over the ranks that hold different shards, of this part of the model and of the others."""
        if not self.divides:
            return values
        return self._all_reduce(values, dist.ReduceOp.SUM, self._sharers, "the gradient norm")

    def most_over_shards(self, values: list[float]) -> list[float]:
        """The largest of each number over the ranks that hold different shards, of this part of the model and of the
        others."""
        if not self.divides:
            return values
        return self._all_reduce(values, dist.ReduceOp.MAX, self._sharers, "the largest elements of gradients")

    def of_one_shard(self, values: torch.Tensor, what: str) -> torch.Tensor:
        """The few values, (numel,), host, that one rank's shard has, on all ranks: the others give zeros."""
        if not self.divides:
            return values
        # Byte by byte: a float64 has each of them, and zeros change none.
        mine = list(map(float, values.view(torch.uint8).tolist()))
        found = self._all_reduce(mine, dist.ReduceOp.MAX, self._sharers, what)
        return host_tensor(list(map(int, found)), torch.uint8).view(values.dtype)

    @property
    def divides(self) -> bool:
        """True if ranks hold different shards, or different parts of the model."""
        return self._row is not None or self.num_shards > 1

    def any_rank(self, flags: Sequence[bool]) -> list[bool]:
        """For each flag, whether it is set on some rank, whatever part of the model that holds."""
        if not self.is_shared:
            return list(flags)
        what = "an agreement about flags"
        if self._row is None:
            return self.agreement.any_of(flags, what)
        found = self._all_reduce(list(map(float, flags)), dist.ReduceOp.MAX, self._everyone, what)
        return [bool(flag) for flag in found]

    def extremes(self, value: float) -> tuple[float, float]:
        """The smallest and the largest of the ranks' numbers, whatever part of the model they hold."""
        if not self.is_shared:
            return value, value
        what = "a comparison of gradients that are not offloaded"
        least, most = self._all_reduce([-value, value], dist.ReduceOp.MAX, self._everyone, what)
        return -least, most

    def _all_reduce(self, values: list[float], op: Any, places: Sequence[int], what: str) -> list[float]:
        """Over the ranks at `places`, in their order, then over the other parts of the model."""
        every = self.agreement.numbers(values, what)
        total = np.array(every[places[0]])
        for place in places[1:]:
            total = total + every[place] if op == dist.ReduceOp.SUM else np.maximum(total, every[place])
        if self._row is None:
            return list(map(float, total))
        numbers = torch.tensor(total, dtype=torch.float64, device=self._device)
        with self._watch.waiting(what):
            dist.all_reduce(numbers, op=op, group=self._row)
        return list(map(float, numbers))


class CommitGroup:
    """The ranks that train one model, all its parts; agreements about files, on a process group of their own.

    One thread at a time uses it. Two threads of one rank would come in another order than those of another rank, whose
    bytes then meet others. gloo ends a process for bytes of another size.
    """

    _is_lent = False
    _borrower: int | None = None
    """The thread that commits now."""

    def __init__(self, group: RankGroup) -> None:
        self._ranks, self._watch = group, group.watch
        self.rank, self.world_size = group.run_rank, len(group.run_members)
        self.column, self.num_columns = group.column, max(len(group.columns), 1)
        """Parts of the model; ranks are numbered column after column."""
        with self._watch.waiting("zo.offload, which all ranks call"):
            self._made = group.control_group()
        ascending = sorted(group.run_members)
        self._order = [ascending.index(member) for member in group.run_members]
        """torch's number of each of our ranks."""
        self._numbers = [self._order.index(number) for number in range(len(ascending))]
        """Our number of each of torch's ranks."""

    @property
    def watch(self) -> RankWatch:
        return self._watch

    @property
    def _group(self) -> Group:
        is_free = not self._is_lent or self._borrower == threading.get_ident()
        assert is_free, "a commit that may be under way has this group: wait for it (drain), or ask `Collectives`"
        return self._made

    def lend(self) -> None:
        """To the thread of commits, until `take_back`."""
        self._is_lent = True

    def take_back(self) -> None:
        """Commits are over."""
        self._is_lent = False

    @contextmanager
    def borrowed(self) -> Iterator[None]:
        """Inside a commit runs on this thread, and has the group."""
        self._borrower = threading.get_ident()
        try:
            yield
        finally:
            self._borrower = None

    def another(self) -> CommitGroup:
        """The same ranks with a group of their own, for a further thread. Collective."""
        return CommitGroup(self._ranks)

    def column_of(self, world_size: int) -> range:
        """The ranks that hold this part in a run of so many ranks."""
        size = world_size // self.num_columns
        return range(self.column * size, (self.column + 1) * size)

    def agree(self, text: str, source: int = 0) -> str:
        """The text of rank `source`, on every rank."""
        if self._group is None:
            return text
        holder = [text]
        with self._watch.waiting(f"rank {source}'s word"):
            dist.broadcast_object_list(holder, group=self._group, group_src=self._order[source])
        return holder[0]

    def ship(self, wanted: Sequence[tuple[int, torch.Tensor]], sent: Iterable[tuple[int, int, torch.Tensor]]) -> None:
        """Fill `wanted`, bytes, each from a rank, by what that has in `sent`: for which rank, and for which of its
        wanted ones. Each of those is asked for when it is its turn, and may be made then.
        """
        with self._watch.waiting(_SHIPPED):
            works = [
                dist.irecv(target, group=self._group, group_src=self._order[rank], tag=tag)
                for tag, (rank, target) in enumerate(wanted)
            ]
        for rank, tag, piece in sent:
            with self._watch.waiting(_SHIPPED):
                dist.send(piece, group=self._group, group_dst=self._order[rank], tag=tag)
        with self._watch.waiting(_SHIPPED):
            for work in works:
                assert work is not None
                work.wait()

    def gather(self, word: Any) -> list[Any]:
        """Every rank's word, a value of JSON; for words that are few, as at the start."""
        if self._group is None:
            return [word]
        found: list[Any] = [None] * self.world_size
        with self._watch.waiting("zo.offload, which all ranks call"):
            dist.all_gather_object(found, word, group=self._group)
        return [found[number] for number in self._order]

    def smallest(self, numbers: Sequence[int]) -> list[int]:
        """The smallest of each number over the ranks: what all can rely on."""
        values = host_tensor(numbers, torch.int64)
        if self._group is not None:
            with self._watch.waiting("zo.offload, which all ranks call"):
                dist.all_reduce(values, op=dist.ReduceOp.MIN, group=self._group)
        return [int(value) for value in values]

    def gather_digests(self, digest: str) -> list[str]:
        """One word per rank, hexadecimal digits, as many on each."""
        if self._group is None:
            return [digest]
        mine = torch.frombuffer(bytearray(digest.encode()), dtype=torch.uint8)
        every = [torch.empty_like(mine) for _ in self._order]
        with self._watch.waiting("a commit"):
            dist.all_gather(every, mine, group=self._group)
        return [bytes(every[number].tolist()).decode() for number in self._order]

    def all_come(self, what: str, *, surely: bool) -> bool:
        """True if every rank calls this, for `what`, after which it computes no more.

        Not `surely`: this rank has met an error, which may be its own affair, and waits for the others for `COME_S`
        only. After a False the group is of no more use. Else RankError is raised where one does not come.
        """
        if self._group is None:
            return True
        if surely:
            self._ranks.leave()
            with self._watch.waiting(what), self._watch.leaving():
                dist.monitored_barrier(self._group, timeout=time_limit(self._group))
            return True
        try:
            dist.monitored_barrier(self._group, timeout=COME_S, wait_all_ranks=True)
        except (RuntimeError, ValueError):  # of a group that the program has destroyed
            return False
        return True

    def together(
        self, what: str = "a commit or another agreement about files", notice: Notice | None = None
    ) -> AbstractContextManager[None]:
        """As `RankWatch.together`."""
        return self._watch.together(self._group, self._numbers, what, notice)
