"""A training run that can be killed: what it trains, what it records, and how it is started and stopped.

`train` is the script a user would write: DataLoader workers, scheduler, data position, `zo.commit` every step. It
records every step in a file and, at its end, digests of all states. `Run` starts it in a process of its own, forked
from a server that has imported torch already. So a start costs milliseconds; `python -m tests.helpers.trainer SPEC`
does it the slow way.
"""

from __future__ import annotations

import functools
import hashlib
import json
import multiprocessing
import os
import random
import signal
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import zero_offload as zo
from tests.helpers.models import AttentionBlock, TinyLM, build, tokens_of
from tests.helpers.reference import param_groups

zo.offload  # noqa: B018  the first use of a public name imports all: here, and not in each child of the server

DEADLINE_S = 120
NUM_WORKERS = 2


@dataclass(frozen=True)
class Spec:
    """One run; everything is text or a number, so that it fits on a command line."""

    nvme: str
    out: str
    num_steps: int = 12
    params: str = "nvme"
    optimizer: str = "nvme"
    commit_every: int = 1
    durability: str = "process"
    existing: str = "resume"
    generation: int | None = None
    second: str = ""
    """A further directory, over which the files are striped."""
    die_at: str = ""
    """Where the run kills itself: before or after a "rename" or "unlink" of our files, or at a "read" or "write"."""
    die_count: int = 0
    """At which of them."""

    @property
    def records(self) -> Path:
        return Path(self.out) / "records.jsonl"

    @property
    def result(self) -> Path:
        return Path(self.out) / "result.json"


class NoisyLM(TinyLM):
    """Dropout makes the random number generator part of the result."""

    def __init__(self) -> None:
        super().__init__(block=AttentionBlock)

    def run_blocks(self, x: Tensor) -> Tensor:
        return super().run_blocks(nn.functional.dropout(x, 0.1))


class Batches(Dataset[Tensor]):
    """Batches of a run from a position on."""

    def __init__(self, position: int, num_steps: int) -> None:
        self._seeds = range(position, num_steps)

    def __len__(self) -> int:
        return len(self._seeds)

    def __getitem__(self, index: int) -> Tensor:
        return tokens_of(self._seeds[index])


def train(spec: Spec) -> None:
    """Train to the end, from wherever the directory's generation stands."""
    torch.set_num_threads(1)
    if spec.die_at:
        arm(spec.die_at, spec.die_count)
    model = build(NoisyLM)
    config = zo.OffloadConfig(
        params=spec.params,
        optimizer=spec.optimizer,
        nvme=[spec.nvme, *filter(None, [spec.second])],
        existing=spec.existing,
        generation=spec.generation,
        commit_every=spec.commit_every,
        durability=spec.durability,
        device_memory="12MiB",
    )
    zo.offload(model, config)
    optimizer = zo.AdamW(param_groups(model), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 100)
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    resumed = zo.resume(model, optimizer)
    if resumed is not None:
        scheduler.load_state_dict(resumed.extra["scheduler"])
    position = 0 if resumed is None else resumed.extra["position"]
    loader = DataLoader(
        Batches(position, spec.num_steps),
        batch_size=None,
        num_workers=NUM_WORKERS,
        generator=torch.Generator(),  # of its own: starting the workers draws from it
        multiprocessing_context="fork",
        worker_init_fn=functools.partial(_end_if_orphaned, os.getpid()),
    )
    with spec.records.open("a") as records:
        for step, tokens in enumerate(loader, position + 1):
            loss = model(tokens)
            loss.backward()
            norm = zo.clip_grad_norm_(model, 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            drawn = [random.random(), float(np.random.rand()), torch.rand(1).item()]
            row = {"step": step, "values": [loss.item(), norm.item(), scheduler.get_last_lr()[0], *drawn]}
            workers = [child.pid for child in multiprocessing.active_children()]
            records.write(json.dumps(row | {"from": position, "workers": workers}) + "\n")
            records.flush()
            zo.commit(model, optimizer, extra={"scheduler": scheduler.state_dict(), "position": step})
    spec.result.write_text(json.dumps(digests(model, optimizer)))
    zo.close(model)


def _end_if_orphaned(trainer: int, _worker: int) -> None:
    """torch's workers notice that their trainer dies, but not that it was dead before they began to look."""
    if os.getppid() != trainer:
        os._exit(0)


def digests(model: nn.Module, optimizer: zo.AdamW) -> dict[str, str]:
    """Of every parameter's master and moments."""
    with zo.gathered(model, kind="master") as masters:
        found = {name: _digest(master) for name, master in masters.items()}
    for index, state in optimizer.state_dict()["state"].items():
        found |= {f"{name} of {index}": _digest(value) for name, value in state.items()}
    return found


def _digest(values: Tensor) -> str:
    return hashlib.sha256(values.contiguous().numpy().tobytes()).hexdigest()


# Death


def arm(place: str, count: int) -> None:
    """Kill this process at the `count`th rename, unlink, or launched read or write."""
    from zero_offload.storage.files.swap_file import SwapFile

    left = iter(range(count - 1, -1, -1))

    def strike() -> None:
        if next(left, None) == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    names = {"rename": "replace", "unlink": "unlink"}
    owner, name = (SwapFile, f"launch_{place}") if place in ("read", "write") else (os, names[place.split()[1]])
    original: Callable[..., Any] = getattr(owner, name)

    @functools.wraps(original)
    def dying(*args: Any, **kwargs: Any) -> Any:
        if not place.startswith("after"):
            strike()
        result = original(*args, **kwargs)
        if place.startswith("after"):
            strike()
        return result

    setattr(owner, name, dying)


# From outside


@functools.cache
def fork_server() -> ForkServerContext:
    """A server that has imported what children need; no thread runs in it."""
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    context = multiprocessing.get_context("forkserver")
    # Tools take seconds to import: children of tests that have them need them too.
    tools = [name for name in ("tests.helpers.tools", "tests.helpers.tool_runs") if name in sys.modules]
    # The last but them is what the first optimizer imports.
    context.set_forkserver_preload([__name__, "tests.helpers.ranks", "torch._dynamo", *tools])
    return context


class Run:
    """`train` in a process of its own."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        Path(spec.out).mkdir(exist_ok=True)
        self.process = fork_server().Process(target=train, args=(spec,))
        self.num_rows_before = len(rows(spec))
        self.process.start()

    @property
    def pid(self) -> int:
        assert self.process.pid is not None
        return self.process.pid

    def wait_for_rows(self, count: int) -> bool:
        """Return when the run has recorded `count` steps of its own; False when it ended before."""
        deadline = time.monotonic() + DEADLINE_S
        while len(rows(self.spec)) < self.num_rows_before + count:
            if self.process.exitcode is not None:
                return False
            assert time.monotonic() < deadline, "the run hangs"
            time.sleep(0.001)
        return True

    def stop(self, number: signal.Signals = signal.SIGKILL) -> None:
        """Send a signal, unless it has ended, and wait for the end."""
        if self.process.exitcode is None:
            os.kill(self.pid, number)
        self.wait()

    def wait(self) -> int:
        self.process.join(DEADLINE_S)
        assert self.process.exitcode is not None, "the run hangs"
        return self.process.exitcode


def rows(spec: Spec) -> list[dict[str, Any]]:
    """Rows recorded so far; a row that a kill has cut short is passed over."""
    if not spec.records.exists():
        return []
    return list(_whole_rows(spec.records.read_text()))


def _whole_rows(text: str) -> Iterator[dict[str, Any]]:
    for line in text.splitlines(keepends=True):
        if line.endswith("\n"):
            yield json.loads(line)


def finish(spec: Spec) -> None:
    """Run to the end in one go."""
    run = Run(spec)
    assert run.wait() == 0


def outcome(spec: Spec) -> tuple[dict[int, list[float]], dict[str, str]]:
    """Values by step, and digests at the end. A step recorded twice must have been the same twice."""
    values: dict[int, list[float]] = {}
    for row in rows(spec):
        assert values.setdefault(row["step"], row["values"]) == row["values"], f"step {row['step']}"
    return values, json.loads(spec.result.read_text())


if __name__ == "__main__":
    train(Spec(**json.loads(sys.argv[1])))


def as_argument(spec: Spec) -> str:
    return json.dumps(asdict(spec))
