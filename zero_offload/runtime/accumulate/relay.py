"""Forwards of micro-batches that take turns: each has a thread of its own, and only the thread with the turn runs.

`Relay` owns the threads, and whose turn it is. It never knows what is computed. The calls: `run` on the caller's
thread, which gives out the turns and returns when all forwards have; `wait` on the others, which gives the turn back. A
forward that waits names the station it wants to go to. All forwards that want the current station get there before any
of them goes on. `run` leaves no thread behind, whatever ends it. `Surroundings` is what torch keeps for a thread,
`Forks` the random generators of each micro-batch.

[Note: forks]
How forwards and backwards of micro-batches take turns depends on where parameters rest. So each micro-batch has
generators of its own: torch's (the CPU's and those of devices in use), Python's `random` and NumPy's global one. A
generator object that the program holds is the program's. The first micro-batch goes on with the caller's generators,
and each other one starts from a seed that is drawn from them, on every placement. At the end the caller's stand where
the first micro-batch has left them. A generator that no micro-batch has drawn from is as it was. A generator that only
others have drawn from stands after the seeds.
"""

from __future__ import annotations

import contextlib
import contextvars
import random
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils import _python_dispatch as dispatch

from zero_offload.base.host import host_empty
from zero_offload.base.threads import LOOK_S, Bell, start
from zero_offload.hardware.device import Device, this_stream
from zero_offload.runtime.saved_tensors.recompute import Autocast, generators, set_generators
from zero_offload.runtime.saved_tensors.tensors import runs, saving_hooks

Station = tuple[int, ...]
"""The units that a forward needs to go on, as indices."""
_START: Station = ()

_NAME = "zero_offload-micro-batch"


def takes_turns() -> bool:
    """True if this thread runs a forward of a relay."""
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
        """The runner that runs, or ran last."""

    def run(self) -> None:
        """Run until all forwards have returned. Raises what one of them raised."""
        station = _START
        self._caller = sys._getframe()
        try:
            for runner in self._runners:
                self._start(runner)
            while waiting := [runner for runner in self._runners if not runner.done]:
                # Runners that took another way come together again at the first unit that they share.
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
                    # After a Ctrl-C inside of `join`, Python 3.11 takes a running thread for an ended one.
                    while not runner.done:
                        self._back.wait(LOOK_S)
                    runner.thread.join()
                del left[0]
            except BaseException as error:  # Ctrl-C, once more
                interrupt = error
        if interrupt is not None:
            raise interrupt


class Surroundings:
    """State that torch keeps per thread, taken from the thread that makes this object.

    Threads that enter it compute alike. State of the process (default dtype, backends) is the same for all of them.
    """

    def __init__(self, device: Device) -> None:
        self._stream = this_stream()
        self._grad = torch.is_grad_enabled()
        autocasts = [Autocast.of(kind) for kind in sorted({"cpu", device.torch_device.type})]
        # Entered only where it is on: autocast forgets its casts of weights when the outermost context ends.
        self._autocasts = [autocast for autocast in autocasts if autocast.enabled]
        self._hooks = saving_hooks()
        # The default device of `with torch.device(...)` and of torch.set_default_device is a mode, too.
        self._function_modes = _get_current_function_mode_stack()
        self._dispatch_modes = dispatch._get_current_dispatch_mode_stack()

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """Enter the surroundings on another thread."""
        with contextlib.ExitStack() as contexts:
            contexts.enter_context(self._stream())
            for function_mode in self._function_modes:
                _push_mode(function_mode)
                contexts.callback(_pop_mode)
            for dispatch_mode in self._dispatch_modes:
                dispatch._push_mode(dispatch_mode)
                contexts.callback(dispatch._pop_mode)
            for autocast in self._autocasts:
                contexts.enter_context(torch.autocast(*autocast))
            contexts.enter_context(torch.set_grad_enabled(self._grad))
            if self._hooks is not None:
                contexts.enter_context(saved_tensors_hooks(*self._hooks))
            yield


_SEEDS = 2**32
"""As many as NumPy takes."""


class _GeneratorFamily(NamedTuple):
    """Generators that are read, written and seeded together."""

    read: Callable[[], Any]
    write: Callable[[Any], None]
    draw: Callable[[int], Sequence[int]]
    """So many seeds."""
    seed: Callable[[int], Any]


_KINDS = (
    _GeneratorFamily(
        generators,
        set_generators,
        lambda count: host_empty(count, torch.int64).random_(_SEEDS).tolist(),
        torch.manual_seed,
    ),
    _GeneratorFamily(
        random.getstate,
        random.setstate,
        lambda count: [random.randrange(_SEEDS) for _ in range(count)],
        random.seed,
    ),
    _GeneratorFamily(
        np.random.get_state,
        np.random.set_state,
        lambda count: [int(seed) for seed in np.random.randint(_SEEDS, size=count, dtype=np.int64)],
        np.random.seed,
    ),
)


def _equal(one: Any, other: Any) -> bool:
    """True if two states of one kind are alike."""
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return np.array_equal(one, other)
    return all(map(_equal, one, other)) if isinstance(one, tuple | list) else bool(one == other)


class Forks:
    """The generators of `count` micro-batches; after an error they are the caller's again, as they were."""

    def __init__(self, count: int) -> None:
        self._before = [kind.read() for kind in _KINDS]
        self._begins: list[list[Any]] = [self._before]
        """The first states of each micro-batch's generators."""
        seeds = [kind.draw(count - 1) for kind in _KINDS]
        self._drawn = [kind.read() for kind in _KINDS]
        for of_one in zip(*seeds, strict=True):
            for kind, seed in zip(_KINDS, of_one, strict=True):
                kind.seed(seed)
            self._begins.append([kind.read() for kind in _KINDS])
        self._states = list(self._begins)
        self._write(self._before)

    @contextlib.contextmanager
    def turn(self, number: int) -> Iterator[None]:
        """A micro-batch draws inside."""
        self._write(self._states[number])
        try:
            yield
        finally:
            self._states[number] = [kind.read() for kind in _KINDS]

    def __enter__(self) -> Forks:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self._write(self._before if kind is not None else self._ends())

    def _ends(self) -> list[Any]:
        """See [Note: forks]."""
        ends = []
        for index, before in enumerate(self._before):
            drew = [
                not _equal(begin[index], state[index]) for begin, state in zip(self._begins, self._states, strict=True)
            ]
            left = self._drawn[index] if any(drew) else before
            ends.append(self._states[0][index] if drew[0] else left)
        return ends

    @staticmethod
    def _write(states: Sequence[Any]) -> None:
        for kind, state in zip(_KINDS, states, strict=True):
            kind.write(state)
