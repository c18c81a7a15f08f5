"""The end of this process, and its forks, told to objects that may be gone by then.

`atexit` keeps a place for every callback, even after it was unregistered. `os.register_at_fork` does not take any back.
A program that builds many models would gather them. So each is asked once, and what is told is held weakly here.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import itertools
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

Method = Callable[[], None]
_Methods = dict[int, weakref.WeakMethod[Any]]
_numbers = itertools.count()
_at_exit: _Methods = {}
_in_child: _Methods = {}


def at_exit(method: Method) -> None:
    """Call this bound method when the interpreter of this process ends, the latest first, if its object is still there.

    A forked child calls it, too: the method looks at the process number.
    """
    _register()
    _add(_at_exit, method)


def in_child(method: Method) -> None:
    """Call this bound method in every process that is forked from this one, if its object is still there."""
    _add(_in_child, method)


def _add(methods: _Methods, method: Method) -> None:
    number = next(_numbers)
    methods[number] = weakref.WeakMethod(method, lambda _: methods.pop(number, None))


@functools.cache
def _register() -> None:
    """Register with the first object, so that what the program registers after it ends before it."""
    atexit.register(_call_latest_first, _at_exit)


def _call_latest_first(methods: _Methods) -> None:
    with contextlib.ExitStack() as stack:  # a method that raises stops none of the others
        for reference in list(methods.values()):
            if (method := reference()) is not None:
                stack.callback(method)


os.register_at_fork(after_in_child=functools.partial(_call_latest_first, _in_child))


class ExitGate:
    """The way of daemon threads into C++ code of torch: stores and process groups, which let the interpreter go.

    An interpreter that ends unwinds the stack of a daemon thread that comes back to it. C++ code does not stand that:
    the process aborts, with exit code 134 behind a program that was whole, and launchers start it again. So at the end
    the gate is shut, and the end waits for threads that are inside, `patience_s` at most.
    """

    def __init__(self, patience_s: float = 2.0) -> None:
        self._patience_s = patience_s
        self._lock = threading.Lock()
        self._num_inside = 0
        self._is_shut = self._is_known = False

    @contextlib.contextmanager
    def inside(self) -> Iterator[None]:
        """Inside is C++ code. A daemon thread that comes when the gate is shut never goes on; others just pass."""
        if not threading.current_thread().daemon:
            yield
            return
        with self._lock:
            is_shut = self._is_shut
            self._num_inside += not is_shut
            if not self._is_known:
                at_exit(self.shut)
                in_child(self._open)
                self._is_known = True
        if is_shut:
            threading.Event().wait()
        try:
            yield
        finally:
            with self._lock:
                self._num_inside -= 1

    def shut(self) -> None:
        """Return when no thread is inside, or patience is over."""
        deadline = time.monotonic() + self._patience_s
        with self._lock:
            self._is_shut = True
        while self._num_inside and time.monotonic() < deadline:
            time.sleep(0.001)

    def _open(self) -> None:
        """A forked child has none of the threads."""
        self._lock, self._num_inside, self._is_shut = threading.Lock(), 0, False


exit_gate = ExitGate()
