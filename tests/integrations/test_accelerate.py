"""accelerate's loop around an offloaded model gives what it gives around the plain one."""

from __future__ import annotations

import copy
import importlib.util
import os
import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import accelerate
import pytest
import torch
import transformers
from accelerate.utils import (
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    DistributedType,
    TorchDynamoPlugin,
)
from torch import Tensor
from torch._dynamo.utils import counters
from torch.utils.data import DataLoader

import zero_offload as zo
from tests.helpers.launched import run_program
from tests.helpers.ranks import RankPools
from tests.helpers.tools import Tokens, config, distance, launched, llama, on_ranks, reset_accelerate, values_of
from zero_offload.integrations.accelerate import OffloadAccelerator
from zero_offload.storage.shards.store import ShardStore

CLIPPED = 2e-7
"""How far weights may be from the plain run's after clipping, which multiplies gradients by a factor of other bits."""


@dataclass(frozen=True)
class Loop:
    """A loop of accelerate, by its settings."""

    precision: str = "no"
    backend: str = "no"
    """torch.compile's."""
    clips: str = ""
    kind: type[accelerate.Accelerator] = accelerate.Accelerator
    steps: int = 4

    def accelerator(self) -> accelerate.Accelerator:
        plugin = TorchDynamoPlugin(backend=self.backend) if self.backend != "no" else None
        return self.kind(mixed_precision=self.precision, dynamo_plugin=plugin, gradient_accumulation_steps=2)


@dataclass
class Trained:
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gathered: list[float] = field(default_factory=list)
    values: dict[str, Tensor] = field(default_factory=dict)


def parts(loop: Loop, where: str, folder: Path) -> tuple[Any, ...]:
    """The accelerator and what it prepared: model, optimizer, data, scheduler. `where` is "" for a plain model."""
    model = llama(num_hidden_layers=1 if loop.backend != "no" else 3)
    if where:
        zo.offload(model, config(where, folder))
    optimizer = zo.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
    accelerator = loop.accelerator()
    data = DataLoader(Tokens(), batch_size=2)
    prepared = accelerator.prepare(model, optimizer, data, scheduler)
    assert prepared[0] is model or not where
    return accelerator, *prepared


def run(loop: Loop, made: tuple[Any, ...], steps: range, out: Trained) -> Trained:
    """Two micro-batches for each of these steps."""
    accelerator, model, optimizer, data, scheduler = made
    batches = iter(accelerate.skip_first_batches(data, 2 * steps.start))
    for _ in range(2 * len(steps)):
        with accelerator.accumulate(model):
            result = model(**next(batches))
            assert result.logits.dtype == torch.float32
            accelerator.backward(result.loss)
            if accelerator.sync_gradients and loop.clips == "norm":
                out.norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 1.0)))
            elif accelerator.sync_gradients and loop.clips == "value":
                accelerator.clip_grad_value_(model.parameters(), 0.01)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        out.losses.append(result.loss.item())
        out.gathered += accelerator.gather(result.loss.detach()[None]).tolist()
    out.values = values_of(accelerator.unwrap_model(model, keep_torch_compile=False))
    return out


def train(rank: int, world_size: int, loop: Loop, where: str, folder: Path) -> Trained:
    with launched(rank, world_size):
        made = parts(loop, where, folder)
        counters.clear()
        seen: list[torch.dtype] = []
        head = accelerate.utils.extract_model_from_parallel(made[1], keep_torch_compile=False).lm_head
        if loop.backend == "no":
            head.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
        out = run(loop, made, range(loop.steps), Trained())
        assert set(seen) <= {torch.bfloat16 if loop.precision == "bf16" else torch.float32}
        assert (counters["stats"]["unique_graphs"] > 0) == (loop.backend != "no") == (not seen)
        return out


@pytest.mark.parametrize(
    ("where", "world_size", "loop"),
    [
        ("cpu", 1, Loop(backend="eager", clips="value")),
        ("nvme", 1, Loop(clips="norm")),
        ("cpu", 2, Loop(precision="bf16", kind=OffloadAccelerator)),
        ("nvme", 2, Loop(clips="norm", kind=OffloadAccelerator)),
        ("nvme", 2, Loop(clips="value", kind=OffloadAccelerator)),
    ],
    ids=str,
)
def test_the_loop(pools: RankPools, tmp_path: Path, where: str, world_size: int, loop: Loop) -> None:
    plain, ours = (on_ranks(pools, world_size, train, loop, each, tmp_path / "run") for each in ("", where))
    tolerance = CLIPPED if loop.clips == "norm" else 0
    for theirs, mine in zip(plain, ours, strict=True):
        assert distance(mine.values, theirs.values) <= tolerance
        assert mine.losses == (theirs.losses if tolerance == 0 else pytest.approx(theirs.losses, rel=1e-6))
        assert mine.gathered == (theirs.gathered if tolerance == 0 else pytest.approx(theirs.gathered, rel=1e-6))
        assert mine.norms == pytest.approx(theirs.norms, rel=1e-6)


def split(rank: int, world_size: int, loop: Loop, where: str, folder: Path) -> tuple[Trained, Trained]:
    """A run of four steps, saved after two, and a run that goes on from there in a new model and accelerator."""
    state = folder / "state"
    with launched(rank, world_size):
        made = parts(loop, where, folder / "run")
        whole = run(loop, made, range(2), Trained())
        made[0].save_state(state)
        run(loop, made, range(2, 4), whole)
    with launched(rank, world_size):
        if where:
            zo.close(made[1])
        made = parts(loop, where, folder / "run")
        made[0].load_state(state)
        return whole, run(loop, made, range(2, 4), Trained())


@pytest.mark.door(
    "accelerate",
    load="`Accelerator.load_state`",
    between="one and two ranks",
    save="`Accelerator.save_state`",
    outcome="right",
)
@pytest.mark.parametrize(
    ("where", "world_size", "kind"),
    [("nvme", 1, accelerate.Accelerator), ("cpu", 1, OffloadAccelerator), ("nvme", 2, OffloadAccelerator)],
)
def test_save_state_and_load_state(
    pools: RankPools, tmp_path: Path, where: str, world_size: int, kind: type[accelerate.Accelerator]
) -> None:
    for whole, second in on_ranks(pools, world_size, split, Loop(kind=kind), where, tmp_path):
        assert second.losses == whole.losses[4:]
        assert distance(second.values, whole.values) == 0
    assert (tmp_path / "state" / "model.safetensors").exists() == (kind is accelerate.Accelerator)


def test_a_generation_is_that_of_the_optimizer_inside(tmp_path: Path) -> None:
    """The wrapper that `prepare` puts around an optimizer has another name, by which no resume would know it."""
    made = parts(Loop(), "nvme", tmp_path)
    _, model, optimizer, _, scheduler = made
    run(Loop(), made, range(2), Trained())
    zo.commit(model, optimizer, extra=scheduler.state_dict())
    zo.close(model)
    model = zo.offload(llama(), config("nvme", tmp_path, existing="resume"))
    start = zo.resume(model, zo.AdamW(model.parameters(), lr=1.0))
    assert start is not None and start.step == 2 and start.extra["last_epoch"] == 2
    zo.close(model)


def goes_on(rank: int, world_size: int, folder: Path, settings: dict[str, Any]) -> None:
    """A loop of `zo.steps` over what `prepare` returned, ended and begun again, against one in one go."""
    with launched(rank, world_size):
        whole = prepared_steps(folder / "whole", 12, settings)
        seen: dict[int, Any] = {}
        for last in (1, 4, 5, 6, 12):  # 10 or 5 batches are an epoch
            seen |= prepared_steps(folder / "parts", last, settings)
        assert seen == whole and sorted(whole) == list(range(1, 13))


def prepared_steps(folder: Path, last: int, settings: dict[str, Any]) -> dict[int, Any]:
    torch.manual_seed(1)
    reset_accelerate()
    model = zo.offload(llama(), config("nvme", folder, existing="resume"))
    optimizer = zo.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
    data = DataLoader(Tokens(20), batch_size=2, shuffle=True)
    accelerator = accelerate.Accelerator(dataloader_config=accelerate.DataLoaderConfiguration(**settings))
    model, optimizer, data, scheduler = accelerator.prepare(model, optimizer, data, scheduler)
    found: dict[int, Any] = {}
    for step, batch in zo.steps(model, optimizer, last, loader=data, scheduler=scheduler):
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        found[step] = (batch["input_ids"].sum(1).tolist(), loss.item(), scheduler.get_last_lr())
    zo.close(model)
    return found


STATEFUL = pytest.param(
    {"use_stateful_dataloader": True},
    marks=pytest.mark.skipif(importlib.util.find_spec("torchdata") is None, reason="torchdata is not installed"),
)


@pytest.mark.parametrize("settings", [{}, {"use_seedable_sampler": True}, STATEFUL])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_loop_in_one_line_takes_what_prepare_returns(
    pools: RankPools, tmp_path: Path, world_size: int, settings: dict[str, Any]
) -> None:
    on_ranks(pools, world_size, goes_on, tmp_path, settings)


def prepare_again(rank: int, world_size: int, folder: Path) -> None:
    """With states, of steps and of a generation."""
    with launched(rank, world_size):
        made = parts(Loop(), "nvme", folder)
        run(Loop(), made, range(1), Trained())
        prepare_alone(made[2].optimizer)
        zo.commit(made[1], made[2])
        zo.close(made[1])
        model = zo.offload(llama(), config("nvme", folder, existing="resume"))
        optimizer = zo.AdamW(model.parameters())
        assert zo.resume(model, optimizer) is not None
        prepare_alone(optimizer)
        zo.close(model)


def prepare_alone(optimizer: zo.AdamW) -> None:
    with pytest.MonkeyPatch.context() as patched:
        for call in ("read_chunk", "write_components"):
            patched.setattr(ShardStore, call, lambda *_: pytest.fail("moves values"))
        accelerate.Accelerator().prepare(optimizer)


@pytest.mark.parametrize("world_size", [1, 2])
def test_prepare_moves_no_state(pools: RankPools, tmp_path: Path, world_size: int) -> None:
    """It loads the optimizer's own state dict, which for torch's optimizers copies every state."""
    on_ranks(pools, world_size, prepare_again, tmp_path)


def test_a_copy_of_an_offloaded_model_is_not_prepared() -> None:
    """It is an ordinary model, which accelerate has to move and wrap."""
    model = zo.offload(llama(), config("cpu", ""))
    with zo.gathered(model):
        copied = copy.deepcopy(model)
    assert model._is_accelerate_prepared and not copied._is_accelerate_prepared


def test_what_prepare_cannot_do_is_said() -> None:
    model = zo.offload(llama(), config("cpu", ""))
    accelerator = accelerate.Accelerator(
        dynamo_plugin=TorchDynamoPlugin(backend="eager", use_regional_compilation=True),
        kwargs_handlers=[DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.FP16)],
    )
    with pytest.raises(zo.ConfigError, match="use_regional_compilation.*comm_hook"):
        accelerator.prepare(model)
    accelerator.state.distributed_type = DistributedType.FSDP
    with pytest.raises(zo.ConfigError, match="configured for FSDP.*stage="):
        accelerator.prepare_model(model)


def prepare_without_ranks(rank: int, world_size: int) -> str:
    """accelerate does not look for ranks on a CPU unless it is told to use one."""
    with launched(rank, world_size), mock.patch.dict(os.environ, ACCELERATE_USE_CPU="false"):
        model = zo.offload(llama(), config("cpu", ""))
        with pytest.raises(zo.ConfigError) as raised:
            accelerate.Accelerator().prepare(model)
        reset_accelerate()
        accelerate.Accelerator(cpu=True).prepare(model)  # a refusal leaves the model as it was
        zo.close(model)
        return str(raised.value)


def test_an_accelerator_that_knows_of_no_other_ranks_is_refused(pools: RankPools) -> None:
    """Each rank would train on the same data."""
    for message in on_ranks(pools, 2, prepare_without_ranks):
        assert "number of processes is 1, and 2 ranks train the model" in message and "cpu=True" in message


EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "accelerate_loop.py"


def losses_in(printed: str) -> list[float]:
    return [float(found) for found in re.findall(r"loss ([\d.]+)", printed)]


def test_the_example_on_two_ranks(tmp_path: Path) -> None:
    losses = losses_in(run_program(EXAMPLE, tmp_path, folder=tmp_path, num_ranks=2))
    assert len(losses) > 2 and losses[-1] < losses[0]
    transformers.LlamaForCausalLM.from_pretrained(tmp_path / "model")


def test_accelerate_launch(tmp_path: Path) -> None:
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", str(EXAMPLE), str(tmp_path)]
    done = subprocess.run(launch, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    losses = losses_in(done.stdout)
    assert len(losses) > 2 and losses[-1] < losses[0]
