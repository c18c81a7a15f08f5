"""Whether the process of a rank on another machine runs, which its kernel and its connections do not tell.

A process that is stopped (SIGSTOP, a frozen container) keeps its connections: its kernel answers for it. A store of
torch has a thread in C++ that runs beside whatever the interpreter does. So each rank of a run over several machines
opens one, which holds nothing. To ask is to connect to it and to say at once that nothing follows: the thread closes
its end too. Where the other kernel has taken that word, and the end stays open for `STOPPED_S`, the process is stopped.
A process that computes, or holds the interpreter, answers at once. Nothing of the store's language is used.

Owns the store that answers for this process. The calls: `address` to be asked at, `states_of` to watch a process,
`state_of` for one look.
"""

from __future__ import annotations

import functools
import socket
import time
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

from zero_offload.runtime.ranks.sockets import local_address

STOPPED_S = 10
"""So long is a process stopped (Ctrl-Z, SIGSTOP, a frozen container) before others give it up."""
EACH_S = 1
_TAKEN = 5  # FIN_WAIT2 of Linux: the other kernel has our end of the connection, and keeps its own


@functools.cache
def address() -> str:
    """The address at which other machines ask whether this process runs: "HOST PORT", or empty where they reach it by
    no network."""
    host = local_address()
    return f"{host} {_answering().port}" if host else ""


@functools.cache
def _answering() -> Any:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # type: ignore[attr-defined]


def states_of(place: str) -> Iterator[str]:
    """Ask the process with this `address` each second: "stopped", "gone" for good, or "" as far as is known. For a
    thread of its own."""
    num_refused = 0
    while num_refused < 2:
        try:
            with _asked(place, STOPPED_S) as question:
                num_waits = 0
                while not _is_answered(question, EACH_S):
                    # Waits, and not the clock: this process may have been stopped with the other, by Ctrl-Z.
                    num_waits += 1
                    yield "stopped" if num_waits * EACH_S >= STOPPED_S and _is_taken(question) else ""
            num_refused = 0
        except ConnectionRefusedError:
            num_refused += 1
        except OSError:
            pass  # the network is away, and connections have their own way to tell
        yield ""
        time.sleep(EACH_S)
    yield "gone"


def state_of(place: str, limit_s: float = 2.0) -> str:
    """The state of the process with this `address`: "running", "stopped", "gone", or "" where its machine does not
    answer."""
    try:
        with _asked(place, limit_s) as question:
            return "running" if _is_answered(question, limit_s) else "stopped" if _is_taken(question) else ""
    except ConnectionRefusedError:
        return "gone"
    except OSError:
        return ""


def _asked(place: str, limit_s: float) -> socket.socket:
    host, _, port = place.partition(" ")
    question = socket.create_connection((host, int(port)), timeout=limit_s)
    question.shutdown(socket.SHUT_WR)
    return question


def _is_answered(question: socket.socket, limit_s: float) -> bool:
    question.settimeout(limit_s)
    try:
        return not question.recv(1)
    except TimeoutError:
        return False


def _is_taken(question: socket.socket) -> bool:
    (state,) = question.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)
    return state == _TAKEN
