"""Up to 1,024 ranks in this process, and what they say to each other in a step: the package's own agreement.

`python -m tests.helpers.agreeing [--json FILE] [--ranks N]` prints the table of docs/choose/scale.md, in some minutes.

`record` takes the calls of two machines that train. `simulate` makes them on any number of ranks, each a thread with an
`Agreement` and `Levels` of its own. In the place of process groups are mailboxes, and of pages a meeting of the ranks
of a machine. Each rank has a clock. A message takes a round trip and its bytes: gloo sends nothing before the receiver
has asked for it. So counts are the code's, and seconds follow from `ROUND_TRIP_S` and `BYTES_PER_S`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import queue
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import zero_offload as zo
from tests.helpers.models import TinyLM, build
from tests.helpers.ranks import RankPools, rows_of
from zero_offload.base.alike import Compared
from zero_offload.base.types import Branches
from zero_offload.runtime.ranks import group as groups
from zero_offload.runtime.ranks import neighbours
from zero_offload.runtime.ranks.agreement import Agreement
from zero_offload.runtime.ranks.group import Course
from zero_offload.runtime.ranks.neighbours import RankProcess, Words
from zero_offload.runtime.ranks.watch import Notice

ROUND_TRIP_S, INSIDE_S, BYTES_PER_S = 100e-6, 20e-6, 1.25e9
"""Between two machines of a local network, gloo's part included; between two processes; 10 Gbit/s."""
NUM_STEPS = 6

Call = tuple[str, tuple[Any, ...], dict[str, Any]]
"""A method of `Agreement`."""

# Calls of a run


def record(rank: int, world_size: int, stage: int, num_blocks: int) -> list[list[Call]]:
    """The calls of each step of a rank that is alone on its machine."""
    calls: list[list[Call]] = [[]]
    depth = [0]

    def recorded(name: str, method: Any) -> Any:
        def call(self: Agreement, *args: Any, **kwargs: Any) -> Any:
            if not depth[0]:
                # Facts that a block finds travel with the words at its end.
                at = len(calls[-1]) - (name == "compare" and calls[-1][-1][0] == "together")
                calls[-1].insert(at, (name, *_plain(name, args, kwargs)))
            depth[0] += 1
            try:
                return method(self, *args, **kwargs)
            finally:
                depth[0] -= 1

        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(neighbours.RankProcess, "here", lambda: RankProcess(f"machine{rank}", "pid:[1]", 1))
        for name in ("begin", "compare", "same", "numbers", "announce", "hear_all", "least", "together"):
            patch.setattr(Agreement, name, recorded(name, getattr(Agreement, name)))
        model = zo.offload(build(lambda: TinyLM(num_blocks=num_blocks)), zo.OffloadConfig(stage=stage))
        optimizer = zo.AdamW(model.parameters(), lr=1e-2)
        for step in range(NUM_STEPS):
            calls.append([])
            model(rows_of(step, rank, world_size)).backward()
            zo.clip_grad_norm_(model, 1.0)
            optimizer.step()
            optimizer.zero_grad()
        calls.append([])
        zo.close(model)
    return calls[1:-1]


def _plain(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments that another process can read."""
    if name == "compare":
        return (args[0], args[1].word), {}
    if name == "together":
        words = [each.word for each in args[1].compared] if len(args) > 1 and args[1] is not None else []
        return (args[0], words), {"ends_step": kwargs.get("ends_step", False)}
    return args, kwargs


def _repeat(agreement: Agreement, call: Call) -> None:
    name, args, kwargs = call
    if name == "compare":
        agreement.compare(args[0], Compared(args[1], dict))
    elif name == "together":
        with agreement.together(args[0], Notice(compared=[Compared(word, dict) for word in args[1]]), **kwargs):
            pass
    else:
        getattr(agreement, name)(*args, **kwargs)


# The wire


@dataclass(eq=False)
class Rank:
    """One of the program's ranks, a thread."""

    number: int
    machine: int
    now_s: float = 0.0
    messages: int = 0
    nbytes: int = 0
    """Sent to other machines."""
    rounds: int = 0


@dataclass(frozen=True)
class Net:
    """A process group in this process."""

    ranks: Sequence[Rank]
    places: dict[Rank, int]
    boxes: dict[tuple[int, int], queue.SimpleQueue[tuple[torch.Tensor, float]]]
    """By places of sender and receiver."""

    @classmethod
    def of(cls, ranks: Sequence[Rank]) -> Net:
        return cls(ranks, {rank: place for place, rank in enumerate(ranks)}, {})

    def box(self, source: int, target: int) -> queue.SimpleQueue[tuple[torch.Tensor, float]]:
        return self.boxes.setdefault((source, target), queue.SimpleQueue())

    def place(self) -> int:
        return self.places[_here()]


def _here() -> Rank:
    return threading.current_thread().rank  # type: ignore[attr-defined,no-any-return]


class Wire:
    """In the place of torch.distributed."""

    get_world_size = staticmethod(lambda net: len(net.ranks))
    get_rank = staticmethod(Net.place)

    @staticmethod
    def isend(words: torch.Tensor, *, group: Net, group_dst: int) -> Any:
        mine, other = _here(), group.ranks[group_dst]
        away = mine.machine != other.machine
        mine.messages += away
        mine.nbytes += words.nbytes * away
        takes_s = ROUND_TRIP_S + words.nbytes / BYTES_PER_S if away else INSIDE_S
        group.box(group.place(), group_dst).put((words.clone(), mine.now_s + takes_s))
        return SimpleNamespace(wait=lambda: None)

    @staticmethod
    def irecv(words: torch.Tensor, *, group: Net, group_src: int) -> Any:
        box, mine = group.box(group_src, group.place()), _here()

        def wait() -> None:
            sent, at_s = box.get(timeout=600)
            words.copy_(sent)
            mine.now_s = max(mine.now_s, at_s)

        return SimpleNamespace(wait=wait)


class Pages:
    """The channel between ranks of a machine."""

    def __init__(self, ranks: Sequence[Rank]) -> None:
        self._ranks, self._words = ranks, [np.zeros(0, np.int64)] * len(ranks)
        self._meeting, self._read = threading.Barrier(len(ranks), self._meet), threading.Barrier(len(ranks))

    def _meet(self) -> None:
        at_s = max(each.now_s for each in self._ranks) + INSIDE_S
        for each in self._ranks:
            each.now_s = at_s

    def gather(self, mine: Words) -> Words:
        self._words[self._ranks.index(_here())] = mine
        self._meeting.wait()
        found = np.stack(self._words)
        self._read.wait()  # none writes its next words before
        return found

    def of_first(self, words: Words) -> Words:
        return self.gather(words)[0]


class _Watch:
    rank = 0
    waiting = staticmethod(contextlib.nullcontext)
    ask_too = staticmethod(lambda *_, **__: None)


# Many ranks


@dataclass
class Step:
    """A step of all ranks."""

    rounds: int = 0
    """Of the first rank."""
    most_messages: int = 0
    """That one rank sends to other machines."""
    messages: int = 0
    nbytes: int = 0
    """Of all ranks, to other machines."""
    seconds: float = 0.0
    python_s: float = 0.0
    """Of a rank's thread on a core, in the median."""


@dataclass
class _Seen:
    """Of one rank, by step: totals until then."""

    rank: Rank
    totals: list[tuple[int, int, int, float, float]] = field(default_factory=list)

    def note(self) -> None:
        rank = self.rank
        self.totals.append((rank.rounds, rank.messages, rank.nbytes, rank.now_s, time.thread_time()))


def simulate(steps: Sequence[Sequence[Call]], num_ranks: int, per_machine: int) -> list[Step]:
    """These steps on so many ranks, in order on machines of `per_machine`."""
    ranks = [Rank(number, number // per_machine) for number in range(num_ranks)]
    machines = [ranks[begin : begin + per_machine] for begin in range(0, num_ranks, per_machine)]
    everyone, firsts = Net.of(ranks), Net.of([each[0] for each in machines])
    pages = [Pages(each) if len(each) > 1 else None for each in machines]
    seen, errors = [_Seen(rank) for rank in ranks], []

    def work(here: _Seen) -> None:
        rank = here.rank
        is_first = 1 < len(machines) < num_ranks and rank in firsts.places
        stand_in: Any = SimpleNamespace(
            members=range(num_ranks),
            agreement_group=everyone,
            machines=[[each.number for each in machine] for machine in machines],
            firsts=firsts if is_first else None,
            near=pages[rank.machine],
            channel=None,
            course=Course(),
            watch=_Watch(),
        )
        try:
            agreement = Agreement(stand_in, Branches.SAME, on_host=True)
            here.note()
            for calls in steps:
                for call in calls:
                    _repeat(agreement, call)
                here.note()
        except BaseException as error:
            errors.append(error)
            raise

    with _stand_ins(), _small_stacks():
        threads = [threading.Thread(target=work, args=(each,), daemon=True) for each in seen]
        for thread, rank in zip(threads, ranks, strict=True):
            thread.rank = rank  # type: ignore[attr-defined]
            thread.start()
        for thread in threads:
            thread.join()
    assert not errors, errors[0]
    return [_step_of([(each.totals[i], each.totals[i + 1]) for each in seen]) for i in range(len(steps))]


def _step_of(every: Sequence[tuple[Any, Any]]) -> Step:
    spans = [[after - before for before, after in zip(*each, strict=True)] for each in every]
    rounds, messages, nbytes, seconds, python_s = zip(*spans, strict=True)
    return Step(rounds[0], max(messages), sum(messages), sum(nbytes), max(seconds), statistics.median(python_s))


@contextlib.contextmanager
def _stand_ins() -> Iterator[None]:
    def counted(gather: Callable[..., None]) -> Callable[..., None]:
        def call(*args: Any, **kwargs: Any) -> None:
            _here().rounds += 1
            gather(*args, **kwargs)

        return call

    from zero_offload.runtime.ranks import agreement, levels

    with pytest.MonkeyPatch.context() as patch:
        for module in (agreement, levels):
            patch.setattr(module, "gather_few", counted(groups.gather_few))
        patch.setattr(groups, "dist", Wire)
        yield


@contextlib.contextmanager
def _small_stacks() -> Iterator[None]:
    before = threading.stack_size(512 << 10)
    try:
        yield
    finally:
        threading.stack_size(before)


# The page

SIZES = (4, 16, 64, 256, 1024)
PER_MACHINE = (1, 8)
STAGE, NUM_BLOCKS = 3, 8


def known_step(pools: RankPools, num_ranks: int, per_machine: int) -> Step:
    """A clipped step that all ranks expect."""
    steps = pools.of(2).succeed(record, STAGE, NUM_BLOCKS)[0]
    return simulate(steps, num_ranks, per_machine)[-1]


def ring_s(num_ranks: int, per_machine: int, step: Step) -> float:
    """The same step by gloo's own gathers, which pass words around a ring: a round trip for each other machine."""
    inside_s = 2 * INSIDE_S * (per_machine > 1)
    return step.rounds * ((math.ceil(num_ranks / per_machine) - 1) * ROUND_TRIP_S + inside_s)


def line_of(num_ranks: int, per_machine: int, step: Step) -> str:
    """Of the page's table."""
    here_ms, ring_ms = 1e3 * step.seconds, 1e3 * ring_s(num_ranks, per_machine, step)
    figures = (
        f"{step.rounds} | {step.most_messages} | {step.nbytes / num_ranks / 1e3:,.1f} | {here_ms:.1f} | {ring_ms:.1f}"
    )
    return f"| {num_ranks:,} | {per_machine} | {figures} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=SIZES[-1], help="no more than these")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    pools, rows = RankPools(), []
    for num_ranks in SIZES:
        for per_machine in PER_MACHINE:
            if per_machine < num_ranks <= args.ranks:
                step = known_step(pools, num_ranks, per_machine)
                print(line_of(num_ranks, per_machine, step), flush=True)
                rows.append({"ranks": num_ranks, "per_machine": per_machine, **asdict(step)})
    pools.close()
    if args.json is not None:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
