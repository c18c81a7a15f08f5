"""Connections to other machines that end when the machine is gone, and not at a collective's time-out.

TCP keeps a connection whose other end says nothing. So a rank that waits for a machine without power, or behind a cut
cable, would wait for the half hour of its process group. Here the kernel asks the other kernel, beside whatever the
processes do. A rank that computes, holds the interpreter or is stopped still has a kernel that answers. Options:
Linux's tcp(7). The calls: `watched_sockets` around what connects, and `end_groups` where a rank that will not come was
found in another way.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from zero_offload.base.ends import exit_gate

SILENT_S = 14
"""So long may a machine be silent. A network that is away for 10 s is not noticed: TCP sends again after 12.6 s."""
_IDLE_S, _EVERY_S, _COUNT = 5, 3, 3
_OPTIONS = (
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _IDLE_S),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _EVERY_S),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _COUNT),
    # For bytes that were sent and not acknowledged: without it, some 15 minutes.
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * SILENT_S),
)


_of_groups: set[tuple[int, str]] = set()
"""Connections of process groups, by number and name."""


@contextlib.contextmanager
def watched_sockets(*, of_group: bool) -> Iterator[None]:
    """Connections that are made inside fail `SILENT_S` after the other machine has fallen silent. Those of a process
    group are closed by `end_groups` too."""
    before = _sockets()
    served = {_port(fd, listens=True) for fd, _ in before} if of_group else set()
    yield
    new = _sockets() - before
    if of_group:
        # A store in this process takes others' connections meanwhile, and must answer them to the end. Each of gloo's
        # groups listens on a port of its own.
        _of_groups.update(each for each in new if _port(each[0], listens=False) not in served - {0})
    for each in new:
        _on_tcp(*each, lambda connection: [connection.setsockopt(*option) for option in _OPTIONS])


num_ends = 0
"""How often `end_groups` was called: who waits in another way looks here."""


def end_groups() -> None:
    """Close the connections of all process groups: what waits in them raises."""
    global num_ends
    num_ends += 1
    while _of_groups:
        _on_tcp(*_of_groups.pop(), lambda connection: connection.shutdown(socket.SHUT_RDWR))
    end_device_groups()


def end_device_groups() -> None:
    """Abort the collectives of devices, in all process groups: what waits for one on a device goes on, with any bytes,
    and launches raise. Nothing else ends a collective of NCCL that another rank never joins."""
    device = torch.accelerator.current_accelerator()
    if device is None:
        return
    on_devices: list[tuple[dist.ProcessGroup, Any]] = []
    for group in list(distributed_c10d._world.pg_map):
        with contextlib.suppress(RuntimeError):  # of a group for tensors of CPUs
            on_devices.append((group, group._get_backend(device)))
    # Together, as torch's own abort of all groups does: one alone might wait for another.
    starts = [backend for _, backend in on_devices if hasattr(backend, "_group_start")][:1]
    with exit_gate.inside():
        for backend in starts:
            backend._group_start()
        for group, _ in on_devices:
            with contextlib.suppress(RuntimeError):
                group.abort()
        for backend in starts:
            backend._group_end()


def _on_tcp(fd: int, name: str, act: Callable[[socket.socket], object]) -> None:
    """Call `act` with a socket that is still there, under another number, if it is a TCP connection."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as copy:
        copy.getpeername()  # raises where it listens: gloo aborts the process if that is shut
        is_tcp = copy.family in (socket.AF_INET, socket.AF_INET6) and copy.type == socket.SOCK_STREAM
        if is_tcp and os.readlink(f"/proc/self/fd/{fd}") == name:
            act(copy)


def local_address() -> str:
    """The address of this machine in the network that process groups use; empty where they have no connections."""
    found: set[str] = set()
    for each in sorted(_of_groups):
        _on_tcp(*each, lambda connection: found.add(connection.getsockname()[0]))
    others = [each for each in found if not each.startswith("127.")]
    return min(others or found, default="")


def _port(fd: int, *, listens: bool) -> int:
    """The local port of a TCP socket that listens, or does not; 0 of other sockets."""
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(fd)) as copy:
        is_tcp = copy.family in (socket.AF_INET, socket.AF_INET6) and copy.type == socket.SOCK_STREAM
        if is_tcp and bool(copy.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)) is listens:
            return int(copy.getsockname()[1])
    return 0


def _sockets() -> set[tuple[int, str]]:
    """Open sockets by number and name: a number may be used again."""
    found = set()
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                if (target := os.readlink(f"/proc/self/fd/{name}")).startswith("socket:"):
                    found.add((int(name), target))
    return found
