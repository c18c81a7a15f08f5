"""Forwards that take turns: each on a thread of its own, and only the one that has the turn runs.

Owns the threads, and whose turn it is. Never knows what is computed, nor from which generators. The calls: `run` on
the caller's thread, which gives out the turns and returns when all forwards have; `wait` on the others, which gives
the turn back. A forward that waits says which station it wants to go to; all who want the one where the others are go
there before one of them goes on. `run` leaves no thread behind, whatever ends it.
"""

from __future__ import annotations

import contextvars
import sys
import threading
from collections.abc import Callable, Sequence
from types import FrameType

import torch

from zero_offload.base.threads import LOOK_S, Bell, start
from zero_offload.runtime.accumulate.generators import Forks
from zero_offload.runtime.accumulate.surroundings import Surroundings
from zero_offload.runtime.saved.tensors import runs

Station = tuple[int, ...]
"""What a forward needs to go on: indices of units."""
_START: Station = ()

_NAME = "zero_offload-micro-batch"


def takes_turns() -> bool:
    """Whether this thread runs a forward of a relay."""
    return threading.current_thread().name.startswith(_NAME)


class _Stopped(BaseException):
    """Raised in forwards that are not to go on, so that they leave what they have entered."""


class Runner:
    """One forward."""

    def __init__(self, number: int, work: Callable[[], None]) -> None:
        self.number = number
        self.work = work
        self.wants = _START
        self.go = Bell()
        self.done = False
        self.error: BaseException | None = None
        self.thread: threading.Thread


class Relay:
    """The forwards of one call."""

    def __init__(
        self,
        works: Sequence[Callable[[], None]],
        surroundings: Surroundings,
        forks: Forks,
        begin_station: Callable[[], None],
        begin_turn: Callable[[Runner], None],
    ) -> None:
        """`begin_station` is called when all have passed a station, `begin_turn` before each turn, both by `run`."""
        self._runners = [Runner(number, work) for number, work in enumerate(works)]
        self._surroundings = surroundings
        self._forks = forks
        self._begin_station = begin_station
        self._begin_turn = begin_turn
        self._back = Bell()
        self._stopping = False
        self._caller: FrameType | None = None
        self.turn = self._runners[0]
        """Who runs, or ran last."""

    def run(self) -> None:
        """Until all forwards have returned. Raises what one of them raised."""
        station = _START
        self._caller = sys._getframe()
        try:
            for runner in self._runners:
                self._start(runner)
            while waiting := [runner for runner in self._runners if not runner.done]:
                # Those who took another way come together again at the first unit that they share.
                runner = min(waiting, key=lambda each: (each.wants != station, each.wants, each.number))
                if runner.wants != station:
                    station = runner.wants
                    self._begin_station()
                self._give_turn(runner)
        finally:
            self._join()
            self._caller = None  # a frame keeps what it worked on

    @property
    def is_running(self) -> bool:
        return self._caller is not None and runs(self._caller)

    def wait(self, station: Station) -> None:
        """Called by the forward that has the turn: give it back, until it may go to `station`."""
        if self._stopping:
            raise _Stopped  # once more, from what the forward does as the first one unwinds it
        runner = self.turn
        runner.wants = station
        self._back.ring()
        if not self._has_turn(runner):
            raise _Stopped

    def _has_turn(self, runner: Runner) -> bool:
        """Wait for it; False when none comes."""
        while not runner.go.wait(LOOK_S):
            if not self.is_running:
                return False  # Ctrl-C has struck before `run` could see to it
        return not self._stopping

    def _start(self, runner: Runner) -> None:
        context = contextvars.copy_context()
        name = f"{_NAME}-{runner.number}"
        runner.thread = threading.Thread(target=context.run, args=(self._forward, runner), name=name, daemon=True)
        start(runner.thread)

    def _forward(self, runner: Runner) -> None:
        try:
            if self._has_turn(runner):
                with self._surroundings.entered():
                    runner.work()
        except _Stopped:
            pass
        except BaseException as error:  # it is the caller's
            runner.error = error
        finally:
            runner.done = True
            self._back.ring()

    def _give_turn(self, runner: Runner) -> None:
        self.turn = runner
        self._begin_turn(runner)
        # Casts of weights that autocast has kept belong to another one's graph.
        torch.clear_autocast_cache()
        with self._forks.turn(runner.number):
            runner.go.ring()
            self._back.wait()
        error, runner.error = runner.error, None
        if error is not None:
            try:
                raise error
            finally:
                del error  # whose traceback has this frame

    def _join(self) -> None:
        """Let all threads end, one after the other: each may have contexts to leave."""
        self._stopping = True
        interrupt: BaseException | None = None
        left = [self.turn, *(runner for runner in self._runners if runner is not self.turn)]
        while left:
            try:
                runner = self.turn = left[0]
                runner.go.ring()
                if hasattr(runner, "thread") and runner.thread.ident is not None:
                    # A Ctrl-C inside of `join` makes Python 3.11 take a thread that runs for one that has ended.
                    while not runner.done:
                        self._back.wait(LOOK_S)
                    runner.thread.join()
                del left[0]
            except BaseException as error:  # Ctrl-C, once more
                interrupt = error
        if interrupt is not None:
            raise interrupt
