"""Several ranks on one machine: a pool of processes in one gloo group that runs jobs, and the jobs.

`RankPool.call` runs a function on every rank and returns what each returned or raised. A pool serves all tests that
need so many ranks. A test that passes and leaves ranks out of step breaks the next: that is wanted.
"""

from __future__ import annotations

import datetime
import gc
import json
import math
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import zero_offload as zo
from tests.helpers.models import TinyLM, build, tokens_of
from tests.helpers.reference import new_scaler, param_groups

TIMEOUT_S = 40
ROWS = 4
"""Of a whole batch, over all ranks."""
UNEVEN = 33
"""No tensor of a model of this width fills its shards, and several straddle their border."""


@dataclass(frozen=True)
class Failure:
    """The error of a rank."""

    kind: str
    message: str
    trace: str = field(default="", compare=False)
    """Where it was raised."""

    def __str__(self) -> str:
        return f"{self.kind}: {self.message}\n{self.trace}"


@dataclass(frozen=True)
class Case:
    """The model and settings that every rank trains with."""

    settings: dict[str, Any]
    num_steps: int = 5
    micro_batches: int = 1
    max_norm: float | None = None
    dim: int = UNEVEN
    num_frozen: int = 0
    """How many of the first blocks are frozen."""
    mesh: tuple[Any, ...] | DeviceMesh | None = None
    """Ranks of the program by their place in a device mesh."""
    device_type: str = "cpu"
    """Of that mesh."""
    no_sync: bool = False
    """Reduce gradients with the last micro-batch only."""
    by_unit: bool = False
    """Run micro-batches by `zo.accumulate`."""


@dataclass
class Outcome:
    """The figures that must be equal."""

    losses: list[float] = field(default_factory=list)
    """Of this rank's rows."""
    norms: list[float] = field(default_factory=list)
    params: dict[str, Tensor] = field(default_factory=dict)

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, Outcome)
        same = (self.losses, self.norms, list(self.params)) == (other.losses, other.norms, list(other.params))
        return same and all(torch.equal(self.params[name], other.params[name]) for name in self.params)


# The pool


class RankPool:
    """Ranks that wait for jobs.

    They are started anew now and then. The process groups of a model live as long as the program, with three threads
    each, which take time even when ranks are idle. For 40 models on four ranks that is a third of a core. A start takes
    0.1 s. After a job that left them out of step, `renew` does so.
    """

    JOBS_MAX = 10

    def __init__(self, world_size: int, on_device: bool = False) -> None:
        """With `on_device` ranks compute on the fake GPU, each on one of its own."""
        self._world_size = world_size
        self._on_device = on_device
        self._start()

    def _start(self) -> None:
        from tests.helpers.trainer import fork_server

        context = fork_server()
        self.num_jobs = 0
        self.folder = tempfile.TemporaryDirectory()
        store = os.path.join(self.folder.name, "store")
        self.connections: list[Connection] = []
        self.processes: list[BaseProcess] = []
        for rank in range(self._world_size):
            mine, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, self._world_size, store, theirs, self._on_device))
            process.start()
            theirs.close()
            self.connections.append(mine)
            self.processes.append(process)

    def call(self, job: Callable[..., Any], *args: Any) -> list[Any]:
        """`job(rank, world_size, *args)` on every rank; results and failures by rank."""
        if self.num_jobs >= self.JOBS_MAX:
            self.close()
            self._start()
        self.num_jobs += 1
        for connection in self.connections:
            connection.send((job, args))
        return [self._receive(connection) for connection in self.connections]

    def renew(self) -> None:
        """Let the next job find new ranks."""
        self.num_jobs = self.JOBS_MAX

    def succeed(self, job: Callable[..., Any], *args: Any) -> list[Any]:
        """The same for a job that must not fail."""
        results = self.call(job, *args)
        failed = [f"rank {rank}: {each}" for rank, each in enumerate(results) if isinstance(each, Failure)]
        assert not failed, "\n".join(failed)
        return results

    def _receive(self, connection: Connection) -> Any:
        assert connection.poll(2 * TIMEOUT_S), "a rank hangs"
        return connection.recv()

    def close(self) -> None:
        for connection in self.connections:
            connection.close()
        for process in self.processes:
            # They have nothing to tidy up, and an orderly end takes seconds for hundreds of groups.
            process.kill()
            process.join()
        self.folder.cleanup()


class RankPools:
    """A pool per number of ranks. One of them has processes: that which was asked for last."""

    def __init__(self) -> None:
        self._pools: dict[tuple[int, bool], RankPool] = {}

    def of(self, world_size: int, on_device: bool = False) -> RankPool:
        """See `RankPool`."""
        asked = world_size, on_device
        for key, pool in self._pools.items():
            if key != asked:
                pool.close()
                pool.renew()
        if asked not in self._pools:
            self._pools[asked] = RankPool(world_size, on_device)
        return self._pools[asked]

    def renew(self) -> None:
        """A test has failed, maybe in the midst of a job."""
        for pool in self._pools.values():
            pool.renew()

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()


@contextmanager
def gloo_group(rank: int, world_size: int, store: str, backend: str = "gloo") -> Iterator[None]:
    torch.set_num_threads(1)
    timeout = datetime.timedelta(seconds=TIMEOUT_S)
    dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=world_size, timeout=timeout)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _serve(rank: int, world_size: int, store: str, connection: Connection, on_device: bool) -> None:
    gc.freeze()  # what torch's modules hold is not garbage
    backend = "gloo"
    if on_device:
        from tests.fake_gpu import device

        device.load()
        torch.accelerator.set_device_index(rank)
        backend = f"cpu:gloo,{device.TYPE}:{device.TYPE}"
    with gloo_group(rank, world_size, store, backend):
        while True:
            try:
                job, args = connection.recv()
            except EOFError:
                return
            try:
                result = job(rank, world_size, *args)
            except Exception as error:
                result = Failure(type(error).__name__, str(error), traceback.format_exc())
            connection.send(result)


# Jobs


def make_model(case: Case) -> nn.Module:
    model = build(lambda: TinyLM(case.dim))
    for name, param in model.named_parameters():
        if name.startswith(tuple(f"blocks.{i}." for i in range(case.num_frozen))):
            param.requires_grad_(False)
    return model


def rows_of(number: int, rank: int, world_size: int) -> Tensor:
    """This rank's part of a batch."""
    per_rank = ROWS // world_size
    return tokens_of(number, batch=ROWS)[rank * per_rank : (rank + 1) * per_rank]


def start(case: Case) -> tuple[nn.Module, zo.AdamW]:
    model = make_model(case)
    mesh = DeviceMesh(case.device_type, list(case.mesh)) if isinstance(case.mesh, tuple) else case.mesh
    zo.offload(model, zo.OffloadConfig(**case.settings), mesh)
    return model, zo.AdamW(param_groups(model), lr=1e-2, weight_decay=0.1)


def steps(case: Case, ranks: tuple[int, int], model: nn.Module, optimizer: zo.AdamW, span: range, out: Outcome) -> None:
    """Train; each step is committed. With fp16 compute the scaler is as old as the call."""
    scaler = new_scaler(str(case.settings.get("precision")))

    def loss_fn(model: nn.Module, number: int) -> Tensor:
        loss = model(rows_of(number, *ranks)) / case.micro_batches
        out.losses.append(loss.item())
        return scaler.scale(loss)

    for step in span:
        numbers = range(step * case.micro_batches, (step + 1) * case.micro_batches)
        num_waiting = case.micro_batches - 1 if case.no_sync else 0
        with zo.no_sync(model):
            _accumulate(case, model, numbers[:num_waiting], loss_fn)
        _accumulate(case, model, numbers[num_waiting:], loss_fn)
        if case.max_norm is not None:
            scaler.unscale_(optimizer)
            norm = zo.clip_grad_norm_(model, case.max_norm).item()
            out.norms += [norm] if math.isfinite(norm) else []
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        zo.commit(model, optimizer, extra={"next": step + 1})


def _accumulate(case: Case, model: nn.Module, numbers: range, loss_fn: Callable[[nn.Module, int], Tensor]) -> None:
    if case.by_unit:
        zo.accumulate(model, numbers, loss_fn)
        return
    for number in numbers:
        loss_fn(model, number).backward()


def read_params(model: nn.Module) -> dict[str, Tensor]:
    """One by one: the device need not hold all of them at once."""
    found = {}
    for each in model.parameters():
        with zo.gathered([each]) as params:
            found |= {name: param.detach().float().to("cpu", copy=True) for name, param in params.items()}
    return found


def train(rank: int, world_size: int, case: Case) -> Outcome:
    """Train from the start, or from the generation found, and close."""
    model, optimizer = start(case)
    try:
        out, resumed = Outcome(), zo.resume(model, optimizer)
        begin = 0 if resumed is None else resumed.extra["next"]
        steps(case, (rank, world_size), model, optimizer, range(begin, case.num_steps), out)
        out.params = read_params(model)
        return out
    finally:
        zo.close(model)


def save(rank: int, world_size: int, case: Case, path: str) -> Outcome:
    """Train, save a checkpoint, and train two steps more."""
    model, optimizer = start(case)
    out = Outcome()
    steps(case, (rank, world_size), model, optimizer, range(case.num_steps), out)
    zo.save_checkpoint(model, optimizer, path, extra={"saved": case.num_steps})
    return _go_on(case, (rank, world_size), model, optimizer)


def load(rank: int, world_size: int, case: Case, path: str) -> Outcome:
    """Load a checkpoint and train two steps."""
    model, optimizer = start(case)
    loaded = zo.load_checkpoint(model, optimizer, path)
    assert (loaded.step, loaded.extra) == (case.num_steps, {"saved": case.num_steps})
    return _go_on(case, (rank, world_size), model, optimizer)


def _go_on(case: Case, ranks: tuple[int, int], model: nn.Module, optimizer: zo.AdamW) -> Outcome:
    out = Outcome(params=read_params(model))
    steps(case, ranks, model, optimizer, range(case.num_steps, case.num_steps + 2), out)
    zo.close(model)
    return out


def save_twice(rank: int, world_size: int, case: Case, path: str) -> None:
    model, optimizer = start(case)
    try:
        zo.save_checkpoint(model, optimizer, path)
        zo.save_checkpoint(model, optimizer, path)
    finally:
        zo.close(model)


def fail_alone(rank: int, world_size: int, case: Case) -> None:
    """The last rank stops after two steps, by exception; the others go on as if it did not."""
    model, optimizer = start(case)
    steps(case, (rank, world_size), model, optimizer, range(2), Outcome())
    if rank == world_size - 1:
        os._exit(3)
    steps(case, (rank, world_size), model, optimizer, range(2, 50), Outcome())


def train_and_record(rank: int, world_size: int, store: str, case: Case, out: str) -> None:
    """A job of its own, to be killed: rank 0 records every step."""
    with gloo_group(rank, world_size, store):
        model, optimizer = start(case)
        resumed = zo.resume(model, optimizer)
        begin = 0 if resumed is None else resumed.extra["next"]
        for step in range(begin, case.num_steps):
            done = Outcome()
            steps(case, (rank, world_size), model, optimizer, range(step, step + 1), done)
            if rank == 0:
                with Path(out, "records.jsonl").open("a") as file:
                    file.write(json.dumps([step, done.losses, done.norms]) + "\n")
        params = read_params(model)
        if rank == 0:
            torch.save(params, Path(out, "params.pt"))
        zo.close(model)


def wait_until(condition: Callable[[], bool], limit_s: float = 150) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "the ranks hang"
        time.sleep(0.002)
