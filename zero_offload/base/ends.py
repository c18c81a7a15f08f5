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
import weakref
from collections.abc import Callable
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
