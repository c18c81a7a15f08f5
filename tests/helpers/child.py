"""A function in a process of its own: for tests that change what a process may do, or who it is."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from tests.helpers.trainer import fork_server

LIMIT_S = 60
NOBODY = 65534


@dataclass(frozen=True)
class Ended:
    """How a child ended."""

    value: Any = None
    error: str = ""
    """The class of what it raised."""
    message: str = ""
    exit_code: int | None = None
    """The exit code of a command line for that."""
    warnings: list[str] = field(default_factory=list)


def run_in_child(job: Callable[..., Any], *args: Any) -> Ended:
    """`job(*args)` in a new process; what it returned, raised and warned of."""
    mine, theirs = fork_server().Pipe(duplex=False)
    process = fork_server().Process(target=_run, args=(theirs, job, args))
    process.start()
    theirs.close()
    try:
        assert mine.poll(LIMIT_S), "the child hangs"
        ended: Ended = mine.recv()
    finally:
        process.join(LIMIT_S)
        assert process.exitcode is not None, "the child hangs"
    return ended


def _run(out: Connection, job: Callable[..., Any], args: tuple[Any, ...]) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            ended = {"value": job(*args)}
        except Exception as error:
            code = getattr(error, "exit_code", None)
            ended = {"error": type(error).__name__, "message": str(error), "exit_code": code}
    out.send(Ended(**ended, warnings=[str(each.message) for each in caught]))


def become_nobody() -> None:
    """For root nothing is forbidden."""
    if os.geteuid() == 0:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
