"""Ranks as threads of which one runs at a time, in an order drawn by a seed; and how they talk.

A rank hands the baton on, or keeps it, at each `turn` (every call of the file system). It also does when it waits for
the others (`Crew.meet`). Nothing else lets another run, so the same seed gives the same run. A rank that ends, by
whatever end, fails those that wait for it.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from zero_offload.base.errors import RankError, StorageError
from zero_offload.runtime.ranks.collectives import CommitGroup

HAND_ON = 0.3
"""How often the others are offered a turn: on a busy machine, waking a thread takes longer than a turn does."""


class Killed(BaseException):
    """The process is no more: no handler for errors may see it."""


class Crew:
    """So many ranks, for one run."""

    def __init__(self, size: int, seed: int) -> None:
        self.size = size
        self._rng = random.Random(seed)
        self._batons = [threading.Semaphore(0) for _ in range(size)]
        self._ready = set(range(size))
        self._said: dict[int, Any] = {}
        self._heard: dict[int, list[Any] | None] = {}
        self._gone: set[int] = set()
        self.rank = 0
        """Who has the baton."""

    def run(self, work: Callable[[int], Any]) -> list[Any]:
        """The results of `work(rank)`, or its errors, on every rank."""
        if len(self._batons) == 1:
            return [_outcome(work, 0)]
        outcomes: list[Any] = [None] * len(self._batons)

        def life(rank: int) -> None:
            self._batons[rank].acquire()
            outcomes[rank] = _outcome(work, rank)
            self._leave(rank)

        threads = [threading.Thread(target=life, args=(rank,)) for rank in range(len(self._batons))]
        for thread in threads:
            thread.start()
        self._pass_on()
        for thread in threads:
            thread.join()
        return outcomes

    def turn(self) -> None:
        """Another rank may go on from here."""
        if len(self._batons) > 1 and self._rng.random() < HAND_ON:
            self._pass_on(self.rank)

    def pass_on(self) -> None:
        """Another one goes on, if there is one: this one waits for it."""
        if not self._ready - {self.rank}:
            raise RankError("all others are gone")
        self._pass_on(self.rank)

    def meet(self, said: Any) -> list[Any]:
        """The words of every rank, once all have spoken. Raises RankError when one is gone."""
        rank, size = self.rank, len(self._batons)
        if self._gone:
            raise RankError(f"rank {min(self._gone)} is gone")
        self._said[rank] = said
        if len(self._said) == size:
            words, self._said = [self._said[each] for each in range(size)], {}
            self._heard = dict.fromkeys(range(size), words)
            self._ready = set(range(size))
            self.turn()
        else:
            self._ready.discard(rank)
            self._pass_on(rank)
        words_heard = self._heard.pop(rank)
        if words_heard is None:
            raise RankError(f"rank {min(self._gone)} is gone")
        return words_heard

    def _pass_on(self, rank: int | None = None) -> None:
        following = self._rng.choice(sorted(self._ready))
        if following == rank:
            return
        self.rank = following
        self._batons[following].release()
        if rank is not None:
            self._batons[rank].acquire()

    def _leave(self, rank: int) -> None:
        self._gone.add(rank)
        self._ready.discard(rank)
        for waiting in self._said:
            self._heard[waiting] = None
            self._ready.add(waiting)
        self._said = {}
        if self._ready:
            self._pass_on()


def _outcome(work: Callable[[int], Any], rank: int) -> Any:
    try:
        return work(rank)
    except BaseException as error:
        return error


class CrewGroup(CommitGroup):
    """Over a crew, not over gloo."""

    def __init__(self, crew: Crew, rank: int = 0) -> None:
        self._crew = crew
        self.rank, self.world_size = rank, crew.size
        self.column, self.num_columns = 0, 1

    def agree(self, text: str, source: int = 0) -> str:
        return str(self._crew.meet(text)[source])

    def gather_digests(self, digest: str) -> list[str]:
        return self._crew.meet(digest)

    def gather(self, word: Any) -> list[Any]:
        return self._crew.meet(word)

    def all_come(self, what: str, *, surely: bool) -> bool:
        try:
            self._crew.meet(None)
        except RankError:
            if surely:
                raise
            return False
        return True

    @contextmanager
    def together(self, what: str = "", notice: object = None) -> Iterator[None]:
        failure: Exception | None = None
        try:
            yield
        except Exception as error:
            failure = error
        failures = [each for each in self._crew.meet(failure) if each is not None]
        if failure is not None:
            raise failure
        if failures:
            raise StorageError(f"another rank: {failures[0]}")
