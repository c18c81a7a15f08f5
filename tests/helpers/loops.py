"""A loop around `zo.steps` that kills itself at a line: what it trains, and what it has seen.

`train` is the script that a user would write. It writes each step's samples and numbers into a file, and a step that is
made again must have the same. `Loop` starts it on each rank, in processes of their own.
"""

from __future__ import annotations

import datetime
import json
import os
import signal
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset, get_worker_info

import zero_offload as zo
from tests.helpers.models import build, tokens_of
from tests.helpers.trainer import DEADLINE_S, NoisyLM, fork_server
from zero_offload.model import steps as steps_module

NUM_SAMPLES, BATCH = 11, 2
LINES = ("fetched", "forward", "backward", "first step", "step", "scheduler", "zeroed", "before commit", "committed")
"""Where a loop kills itself, in their order; the last two are inside of `next`."""


@dataclass(frozen=True)
class Spec:
    """One run."""

    folder: str
    num_steps: int
    loader: str = "order"
    workers: int = 0
    tier: str = "nvme"
    accumulate: int = 1
    optimizers: int = 1
    ranks: int = 1
    settings: tuple[tuple[str, Any], ...] = ()
    """Further ones of OffloadConfig, and those of zo.steps under "steps"."""
    die_at: tuple[int, str, int] = (0, "", 0)
    """The step, the line and the rank at which the run kills itself."""
    pause_at: int = 0
    """The step in which each rank waits for a file, `go`; it writes `paused` before."""
    log: str = ""
    """A directory for `zo.RunLog`."""

    def records(self, rank: int) -> Path:
        return Path(self.folder, f"seen{rank}.jsonl")

    def said(self, rank: int) -> Path:
        """Its complaints."""
        return Path(self.folder, f"said{rank}.txt")

    def seen(self) -> list[dict[int, Any]]:
        """By rank, what each step has seen. A step that was made twice has seen the same."""
        found: list[dict[int, Any]] = []
        for rank in range(self.ranks):
            rows: dict[int, Any] = {}
            lines = self.records(rank).read_text().splitlines(keepends=True)
            for step, values in (json.loads(line) for line in lines if line.endswith("\n")):
                assert rows.setdefault(step, values) == values, f"step {step} of rank {rank}"
            found.append(rows)
        return found


class Samples(Dataset[Tensor]):
    """Rows of tokens; their first one is the sample's number."""

    def __init__(self, shifts: str) -> None:
        self._shifts = shifts
        """As a random change of a sample: drawn here if it is not empty."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> Tensor:
        row = tokens_of(index)[0].clone()
        row[0] = index
        if self._shifts:
            row[1] = torch.randint(0, 8, ()).item()
        return row


class Stream(IterableDataset[Tensor]):
    """The same, as an iterable that draws its order when it begins."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Tensor]:
        worker = get_worker_info()
        order = torch.randperm(NUM_SAMPLES, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        samples = Samples("")
        for index in order[worker.id :: worker.num_workers] if worker else order:
            yield samples[index]


class Stateful:
    """A loader with a state of its own, a tensor among it, which fetches ahead."""

    def __init__(self, rank: int) -> None:
        self._generator = torch.Generator().manual_seed(rank)
        self._begun, self._given, self._loaded = self._generator.get_state(), 0, False

    def state_dict(self) -> dict[str, Any]:
        return {"begun": self._begun, "given": self._given}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._begun, self._given, self._loaded = state["begun"], state["given"], True

    def __iter__(self) -> Iterator[Tensor]:
        if self._loaded:
            self._generator.set_state(self._begun)
        else:
            self._begun, self._given = self._generator.get_state(), 0
        self._loaded = False
        samples = Samples("")
        batches = torch.randperm(NUM_SAMPLES, generator=self._generator)[: NUM_SAMPLES // BATCH * BATCH].view(-1, BATCH)
        ahead = [torch.stack([samples[int(index)] for index in batch]) for batch in batches[self._given :]]
        for batch in ahead:
            self._given += 1
            yield batch


def loader_of(spec: Spec, rank: int) -> Any:
    kind, workers = spec.loader, spec.workers
    samples = Samples("" if workers else "drawn")
    settings: dict[str, Any] = {"batch_size": BATCH, "num_workers": workers}
    if workers:
        settings |= {"multiprocessing_context": "fork", "persistent_workers": kind == "generator"}
    if kind == "list":
        loader = DataLoader(samples, batch_size=BATCH)
        return [batch for _, batch in zip(range(5), loader, strict=False)]
    if kind == "state":
        return Stateful(rank)
    if kind == "torchdata":
        from torchdata.stateful_dataloader import StatefulDataLoader

        return StatefulDataLoader(Samples(""), shuffle=True, **settings)
    if kind == "stream":
        return DataLoader(Stream(), **settings)
    if kind == "distributed":
        sampler: Any = DistributedSampler(samples, spec.ranks, rank, seed=3)
        return DataLoader(samples, sampler=sampler, **settings)
    generator = torch.Generator().manual_seed(5) if kind == "generator" else None
    return DataLoader(samples, shuffle=True, generator=generator, **settings)


def train(rank: int, spec: Spec) -> None:
    """A process of its own: train to the end, from wherever the directory's generation stands."""
    torch.set_num_threads(1)
    os.setpgrp()
    os.dup2(os.open(spec.said(rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    if spec.ranks > 1:
        store = f"file://{spec.folder}/store{spec.die_at[0]}.{spec.num_steps}.{spec.pause_at}"
        limit = datetime.timedelta(seconds=DEADLINE_S)
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=spec.ranks, timeout=limit)
    torch.manual_seed(7)
    model, more = build(NoisyLM), dict(spec.settings)
    of_loop = more.pop("steps", {})
    config = zo.OffloadConfig(
        params=spec.tier, optimizer=spec.tier, nvme=Path(spec.folder, "nvme"), existing="resume", **more
    )
    zo.offload(model, config)
    params = list(model.parameters())
    cut = len(params) // 2 if spec.optimizers > 1 else len(params)
    optimizers = [zo.AdamW(params[:cut], lr=1e-2)]
    optimizers += [zo.AdamW(params[cut:], lr=2e-2)] if spec.optimizers > 1 else []
    schedulers = [torch.optim.lr_scheduler.LambdaLR(each, lambda step: 1 - step / 50) for each in optimizers]
    torch.manual_seed(11 + rank)
    loop = zo.steps(
        model,
        optimizers if spec.optimizers > 1 else optimizers[0],
        spec.num_steps,
        loader=loader_of(spec, rank),
        scheduler=schedulers,
        accumulate=spec.accumulate,
        **of_loop,
    )
    _arm(spec, rank)
    with spec.records(rank).open("a") as file, zo.RunLog(spec.log, model) if spec.log else nullcontext() as log:
        for step, given in loop:
            _strike(spec, rank, step, "fetched")
            batches = given if spec.accumulate > 1 else [given]
            if step == spec.pause_at:
                _pause(spec, rank)
            losses = [model(batch) / spec.accumulate for batch in batches]
            _strike(spec, rank, step, "forward")
            sum(losses).backward()  # type: ignore[union-attr]
            _strike(spec, rank, step, "backward")
            for number, each in enumerate(optimizers):
                each.step()
                _strike(spec, rank, step, "step" if number else "first step")
            for each in schedulers:
                each.step()
                _strike(spec, rank, step, "scheduler")
            for each in optimizers:
                each.zero_grad()
            seen = [batch[:, :2].tolist() for batch in batches]
            rates = [each.get_last_lr()[0] for each in schedulers]
            values = [seen, [loss.item().hex() for loss in losses], rates, torch.rand(1).item()]
            file.write(json.dumps([step, values]) + "\n")
            file.flush()
            if log is not None:
                log.step(step, loss=losses[0])
            _strike(spec, rank, step, "zeroed")
    zo.close(model)
    if spec.ranks > 1:
        dist.destroy_process_group()


def _strike(spec: Spec, rank: int, step: int, line: str) -> None:
    if spec.die_at == (step, line, rank):
        os.kill(os.getpid(), signal.SIGKILL)


def _arm(spec: Spec, rank: int) -> None:
    """Strike around the commit, which `next` makes."""
    keep: Any = steps_module.keep

    def striking(call: str, model: nn.Module, optimizer: Any, extra: Any, *rest: Any) -> None:
        step = extra["zo.steps"]["step"]
        _strike(spec, rank, step, "before commit")
        keep(call, model, optimizer, extra, *rest)
        _strike(spec, rank, step, "committed")

    steps_module.keep = striking


def _pause(spec: Spec, rank: int) -> None:
    Path(spec.folder, f"paused{rank}").touch()
    deadline = time.monotonic() + DEADLINE_S
    while not Path(spec.folder, "go").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


class Loop:
    """The ranks of a run."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        Path(spec.folder).mkdir(exist_ok=True)
        self.processes: list[BaseProcess] = [
            fork_server().Process(target=train, args=(rank, spec)) for rank in range(spec.ranks)
        ]
        for each in self.processes:
            each.start()

    def codes(self) -> list[int | None]:
        """Wait for the ends."""
        for each in self.processes:
            each.join(DEADLINE_S)
        codes = [each.exitcode for each in self.processes]
        for each in self.processes:
            each.kill()
        return codes

    def wait_for_pause(self) -> None:
        deadline = time.monotonic() + DEADLINE_S
        files = [Path(self.spec.folder, f"paused{rank}") for rank in range(self.spec.ranks)]
        while not all(file.exists() for file in files):
            assert time.monotonic() < deadline and all(each.exitcode is None for each in self.processes)
            time.sleep(0.01)

    def send(self, number: signal.Signals, rank: int) -> None:
        os.kill(self._pid(rank), number)

    def send_to_all(self, number: signal.Signals, rank: int) -> None:
        """To the rank and to what it has started, as torchrun does."""
        os.killpg(self._pid(rank), number)

    def _pid(self, rank: int) -> int:
        pid = self.processes[rank].pid
        assert pid is not None
        return pid

    def wait_for_step(self, step: int) -> None:
        deadline, file = time.monotonic() + DEADLINE_S, self.spec.records(0)
        while not file.exists() or f"\n[{step}, " not in f"\n{file.read_text()}":
            assert time.monotonic() < deadline and all(each.exitcode is None for each in self.processes)
            time.sleep(0.01)


def finish(spec: Spec) -> list[dict[int, Any]]:
    """Run to the end in one go; what was seen."""
    assert Loop(replace(spec, die_at=(0, "", 0))).codes() == [0] * spec.ranks
    return spec.seen()
