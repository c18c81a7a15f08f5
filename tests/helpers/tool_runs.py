"""Runs of Trainer in processes of their own, which may be killed: what one is, and what it returns."""

from __future__ import annotations

import os
import pickle
import signal
import tempfile
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import tests.helpers.tools as tools  # before transformers  # isort: skip
import torch
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.models.llama import modeling_llama as modeling_llama  # here, not in each child

import zero_offload as zo
from tests.helpers.ranks import gloo_group
from tests.helpers.trainer import DEADLINE_S, fork_server
from zero_offload.integrations.transformers import OffloadTrainer


@dataclass(frozen=True)
class Spec:
    """A run of a Trainer, of the plain model or of an offloaded one."""

    out: Path
    nvme: Path | None = None
    """None: an offloaded model rests in memory."""
    args: dict[str, Any] = field(default_factory=dict)
    die_at: tuple[str, int] | None = None
    """An event of callbacks and the step at which rank 0 is killed there."""
    stop_after: int | None = None
    """A step after which training stops."""
    asked_at: tuple[str, int, int] | None = None
    """An event of callbacks, a step, and the rank that has SIGUSR1 there; the exit code is `EXIT_CODE`."""
    is_plain: bool = False
    model_init: bool = False


EXIT_CODE = 75


@dataclass
class Outcome:
    logs: list[dict[str, float]]
    """All that Trainer logs, without times."""
    values: dict[str, Tensor]
    ends: list[float] = field(default_factory=list)
    """The mean loss and the number of operations of the whole run."""
    rows: list[int] = field(default_factory=list)
    """Rows that this rank has trained on, in order: sums of their tokens."""

    def __eq__(self, other: object) -> bool:
        """True if logs and weights are the same; the rest differs where a run goes on."""
        assert isinstance(other, Outcome)
        same = self.logs == other.logs and self.values.keys() == other.values.keys()
        return same and all(torch.equal(self.values[name], other.values[name]) for name in self.values)


class Ends(TrainerCallback):
    """Sends the process a signal at an event of a step, or stops the training."""

    def __init__(self, event: str, step: int, number: int = 0) -> None:
        def strike(args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == step and number:
                os.kill(os.getpid(), number)
            control.should_training_stop |= state.global_step == step and not number

        setattr(self, event, strike)


def arguments(out: Path, **changes: Any) -> TrainingArguments:
    settings: dict[str, Any] = {
        "output_dir": str(out),
        "per_device_train_batch_size": 4,
        "max_steps": 6,
        "learning_rate": 1e-3,
        "weight_decay": 0.1,
        "logging_steps": 1,
        "report_to": [],
        "use_cpu": True,
        "save_strategy": "no",
        "seed": 3,
        "disable_tqdm": True,
    }
    if torch.distributed.is_initialized():
        settings["ddp_backend"] = "gloo"
    return TrainingArguments(**(settings | changes))


def make(spec: Spec, model: nn.Module | None = None) -> Any:
    """The Trainer of a run, of a small Llama or the given model."""
    callbacks: list[TrainerCallback] = []
    if spec.die_at is not None and os.environ.get("RANK", "0") == "0":
        callbacks.append(Ends(*spec.die_at, signal.SIGKILL))
    if spec.asked_at is not None and os.environ.get("RANK", "0") == str(spec.asked_at[2]):
        callbacks.append(Ends(*spec.asked_at[:2], signal.SIGUSR1))
    if spec.stop_after is not None:
        callbacks.append(Ends("on_step_end", spec.stop_after))
    make_model = partial(tools.llama, attention_dropout=0.1)
    of = {"model_init": make_model} if spec.model_init else {"model": model or make_model()}
    given = {
        **of,
        "args": arguments(spec.out, **spec.args),
        "train_dataset": tools.Tokens(24),
        "eval_dataset": tools.Tokens(8, seed=2),
        "callbacks": callbacks,
    }
    if spec.is_plain and "optim" in spec.args:
        return Trainer(**given)
    if spec.is_plain:
        return Trainer(optimizer_cls_and_kwargs=(zo.AdamW, {"lr": given["args"].learning_rate}), **given)
    config = tools.config("cpu", "") if spec.nvme is None else tools.config("nvme", spec.nvme, existing="resume")
    return OffloadTrainer(offload=config, exit_code=None if spec.asked_at is None else EXIT_CODE, **given)


def train(spec: Spec, resume: str | Path | bool | None = None, make: Callable[[Spec], Any] = make) -> Outcome:
    trainer, rows = make(spec), list[int]()
    compute_loss = trainer.compute_loss

    def noting(model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        rows.extend(inputs["input_ids"].sum(1).tolist() if model.training else [])
        return compute_loss(model, inputs, *args, **kwargs)

    trainer.compute_loss = noting
    done = trainer.train(resume_from_checkpoint=resume)
    ends = [done.training_loss, trainer.state.total_flos]
    outcome = Outcome(logs_of(trainer), tools.values_of(trainer.model), ends, rows)
    if not spec.is_plain:
        zo.close(trainer.model)
    return outcome


def logs_of(trainer: Any) -> list[dict[str, float]]:
    found = [
        {key: value for key, value in each.items() if not key.endswith(("runtime", "per_second", "total_flos"))}
        for each in trainer.state.log_history
    ]
    return [each for each in found if "train_loss" not in each]


def _child(
    rank: int, world_size: int, store: str, job: Callable[..., Any], args: Sequence[Any], to: Connection
) -> None:
    torch.set_num_threads(1)
    with tools.launched(rank, world_size), gloo_group(rank, world_size, store) if world_size > 1 else nullcontext():
        to.send_bytes(pickle.dumps(job(*args)))  # tensors by value: this process ends


def in_processes(world_size: int, job: Callable[..., Any], *args: Any) -> list[Any]:
    """The result of `job` on each rank; None of a rank that was killed. The first death kills all."""
    with tempfile.TemporaryDirectory() as folder:
        ends, processes = [], []
        for rank in range(world_size):
            mine, theirs = fork_server().Pipe()
            process = fork_server().Process(
                target=_child, args=(rank, world_size, os.path.join(folder, "store"), job, args, theirs)
            )
            process.start()
            theirs.close()
            ends.append(mine)
            processes.append(process)
        results: list[Any] = [None] * world_size
        waiting = dict(zip(ends, range(world_size), strict=True))
        while waiting:
            ready = wait(list(waiting), timeout=DEADLINE_S)
            assert ready, "a run hangs"
            for end in ready:
                rank = waiting.pop(end)
                try:
                    results[rank] = pickle.loads(end.recv_bytes())
                except EOFError:
                    for process in processes:
                        process.kill()
        for process in processes:
            process.join()
        return results


def on_ranks(number: int, job: Callable[..., Any], *args: Any) -> list[Any]:
    """The same for runs that are not killed; one rank is this process."""
    return [job(*args)] if number == 1 else in_processes(number, job, *args)
