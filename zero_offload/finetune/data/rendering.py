"""A tokenizer's chat template, run in a process of its own: it is a program of others, and may not end.

Owns that process, which is a fork, so that it has the tokenizer. It is made by the first call, and ended with its
owner, or when a call takes too long or makes too much. The call: `Renderer.apply`.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import warnings
import weakref
from collections.abc import Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

from zero_offload.base.types import GIB, MIB

LIMIT_S = 15.0
"""For one conversation; published templates take about a millisecond."""
MAX_LETTERS = 64 * MIB
"""Of the text of one conversation, some 16 million tokens."""
_MEMORY_BYTES = 4 * GIB
"""Memory that the process may take beyond that which it begins with."""


class RenderError(ValueError):
    """Why a template made nothing of a conversation."""


class Renderer:
    """One tokenizer's template."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._connection: Connection | None = None
        self._end: Any = None

    def apply(self, messages: Sequence[Any], **settings: Any) -> Any:
        """The result of `tokenizer.apply_chat_template`: a text, or lists of numbers by name. Raises RenderError."""
        if self._connection is None:
            self._start()
        assert self._connection is not None
        try:
            self._connection.send((list(messages), settings))
            if not self._connection.poll(LIMIT_S):
                raise RenderError(f"it has not ended within {LIMIT_S:g} s")
            found, problem = self._connection.recv()
        except (EOFError, OSError):
            self.close()
            raise RenderError(
                f"its process has ended; it may have taken more than {_MEMORY_BYTES // GIB} GiB"
            ) from None
        except BaseException:  # Ctrl-C too: what comes later would be taken for the next answer
            self.close()
            raise
        if problem is not None:
            raise RenderError(problem)
        return found

    def close(self) -> None:
        """End the process; a later call makes another."""
        if self._end is not None:
            self._end()
        self._connection = self._end = None

    def _start(self) -> None:
        self._connection, theirs = Pipe()
        with warnings.catch_warnings():
            # Python warns of forks beside threads: the child takes no lock of theirs, it renders text.
            warnings.simplefilter("ignore", DeprecationWarning)
            pid = os.fork()
        if pid == 0:
            self._connection.close()
            _serve(self._tokenizer, theirs)
        theirs.close()
        self._end = weakref.finalize(self, _end, self._connection, pid, os.getpid())


def _end(connection: Connection, pid: int, owner: int) -> None:
    connection.close()
    if os.getpid() != owner:  # a worker of a loader, which has a copy of the renderer: the process is not its own
        return
    os.kill(pid, signal.SIGKILL)
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, 0)


def _serve(tokenizer: Any, connection: Connection) -> None:
    """Answer until the other end is closed; never returns."""
    try:
        _close_all_but(connection.fileno())
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the process that asks
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        _limit_memory()
        while True:
            answer: tuple[Any, str | None]
            messages, settings = connection.recv()
            try:
                answer = _plain(tokenizer.apply_chat_template(messages, **settings)), None
            except Exception as error:  # a template raises what it likes
                answer = None, " ".join(str(error).split())[:500] or type(error).__name__
            connection.send(answer)
    except BaseException:  # the other end is gone
        pass
    finally:
        os._exit(0)


def _close_all_but(kept: int) -> None:
    """Files of the process that asks: a lock on a run's directory would outlive that process."""
    for fd in map(int, os.listdir("/proc/self/fd")):
        if fd > 2 and fd != kept:
            with contextlib.suppress(OSError):
                os.close(fd)


def _plain(found: Any) -> Any:
    if isinstance(found, str):
        if len(found) > MAX_LETTERS:
            raise ValueError(
                f"it makes a text of {len(found):,} letters, and {MAX_LETTERS:,} is the most that is taken"
            )
        try:
            found.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"it writes half of a character, {found[error.start]!r}, which no tokenizer takes"
            ) from error
        return found
    return {name: list(values) for name, values in found.items()}


def _limit_memory() -> None:
    with open("/proc/self/statm") as file:
        now = int(file.read().split()[5]) * resource.getpagesize()
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    most = now + _MEMORY_BYTES if hard == resource.RLIM_INFINITY else min(now + _MEMORY_BYTES, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (most, hard))
