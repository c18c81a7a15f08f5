"""The process group of the ranks that a launcher has started, each on its own GPU.

A launcher gives a store, and the store of torchrun outlives a start: it keeps addresses of ranks that are dead. torch
reads those, so a start after the first one meets by chance. Here the ranks first agree on a name for their start, and
everything else of them lies in the store under that name.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
import time
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from zero_offload.base.alike import name_ranks
from zero_offload.base.errors import ConfigError
from zero_offload.hardware.device import DeviceChoice, choose_gpus, collectives_of, use_gpu
from zero_offload.runtime.ranks.sockets import watched_sockets

_PREFIX = "zero_offload/join"
_LOOK_EVERY_S = 0.01


def launched_ranks() -> tuple[int, int]:
    """This rank and how many there are: of the process group, else as a launcher's environment says; (0, 1) alone."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    texts = [os.environ.get(name, "") for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR")]
    if not all(texts):
        return 0, 1
    try:
        rank, size = map(int, texts[:2])
    except ValueError:
        raise _cannot_join("RANK and WORLD_SIZE are not both whole numbers") from None
    return (rank, size) if size > 1 else (0, 1)


def join(timeout: timedelta | None = None) -> bool:
    """Make the process group of the ranks that a launcher has started, each on its own GPU, if there is none yet.

    All ranks call it. It takes the place of `torch.distributed.init_process_group`, and meets after each restart of
    torchrun's too. `zo.offload` calls it. Call it yourself before accelerate, Lightning or a DeviceMesh makes a group.
    `timeout` is how long a rank waits for others, by default half an hour.

    Returns True if it made the group, which the program then destroys. Raises ConfigError where ranks do not meet.
    """
    rank, size = launched_ranks()
    if size == 1 or (dist.is_available() and dist.is_initialized()):
        return False
    try:
        _join(timeout)
    except (RuntimeError, ValueError, OSError, ImportError) as error:
        raise _cannot_join(f"{type(error).__name__}: {error}") from error
    return True


def _join(timeout: timedelta | None) -> None:
    from torch.distributed.rendezvous import rendezvous

    within: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
    with watched_sockets(of_group=False):
        store, rank, size = next(rendezvous("env://", **within))
    store = _store_of_this_start(store, rank, size)
    mine, problem = None, ""
    try:
        mine = DeviceChoice.here()
    except RuntimeError as error:
        problem = f"rank {rank}: {error}"
    store.set(f"gpu/{rank}", json.dumps([problem, mine]))
    answers = [json.loads(store.get(f"gpu/{each}")) for each in range(size)]
    if problems := [problem for problem, _ in answers if problem]:
        raise RuntimeError("; ".join(problems))
    choices = [DeviceChoice(host, tuple(gpus), *rest) for _, (host, gpus, *rest) in answers]
    device = use_gpu(choices[rank], choose_gpus(choices, range(size))[rank])
    backend = collectives_of(device)
    with watched_sockets(of_group=True):
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, device_id=device, **within)


def _store_of_this_start(store: Any, rank: int, size: int) -> Any:
    """The part of a launcher's store that ranks of this start have to themselves. All ranks call it.

    Each rank leaves a word that it draws. Rank 0 offers the list of words that it finds, and a rank whose word is in
    it says so. A list that all have said so of has no word of a dead rank, and its digest is the name. torchrun counts
    starts too (TORCHELASTIC_RESTART_COUNT), but hosts differ in that: it counts those of ranks that have failed.
    """
    mine, within_s = secrets.token_hex(8), store.timeout.total_seconds()
    deadline = time.monotonic() + within_s
    store = PrefixStore(_PREFIX, store)
    store.set(f"word/{rank}", mine)
    offered: list[str] = []
    while True:
        if rank == 0:
            offered = [_read(store, f"word/{each}") for each in range(size)]
            store.set("offer", json.dumps(offered))
        else:
            offered = json.loads(_read(store, "offer") or "[]")
        name = hashlib.sha256(json.dumps(offered).encode()).hexdigest()
        missing = [0]
        if len(offered) == size and offered[rank] == mine:
            store.set(f"seen/{rank}", name)
            if rank == 0 and not (missing := [each for each in range(size) if _read(store, f"seen/{each}") != name]):
                store.set(f"met/{name}", "yes")
            if _read(store, f"met/{name}"):
                return PrefixStore(name, store)
        if time.monotonic() > deadline:
            raise RuntimeError(f"{name_ranks(missing)} did not come within {within_s:g} s")
        time.sleep(_LOOK_EVERY_S)


def _read(store: Any, key: str) -> str:
    return bytes(store.get(key)).decode() if store.check([key]) else ""


def _cannot_join(why: str) -> ConfigError:
    said = ", ".join(
        f"{name}={os.environ.get(name, '')}" for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    )
    return ConfigError(
        f"the environment says that this process is one of several ranks ({said}), but they cannot meet: {why}. Start "
        "all of them with torchrun, or call torch.distributed.init_process_group before zo.offload. Where each process "
        "trains a model of its own, set WORLD_SIZE=1 for it"
    )
