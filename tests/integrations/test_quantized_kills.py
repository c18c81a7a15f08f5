"""kill -9, again and again, of adapters that are trained over a base of 4 bits on drives."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import zero_offload as zo
from tests.helpers.disk import drain, runtime
from tests.helpers.quantized_models import adapted_model
from tests.helpers.tools import Tokens
from zero_offload.plan.quantized import slots

NUM_STEPS, NUM_KILLS = 10, 2
SIZES = {"hidden_size": 256, "intermediate_size": 512}


def test_runs_go_on_exactly_and_the_base_is_not_written_again(tmp_path: Path) -> None:
    model = adapted_model("llama", "nf4 nested", **SIZES).train()
    base_nbytes = sum(slot.tensor.nbytes for slot in slots(model) if not slot.tensor.requires_grad)
    expected, optimizer = {}, _optimizer(model)
    for step in range(NUM_STEPS):
        expected[step] = _step(model, optimizer, step).hex()
    job = multiprocessing.get_context("spawn").Process(target=_kill_in_a_loop, args=(str(tmp_path),))
    job.start()
    job.join()
    assert job.exitcode == 0
    lines = [line.split() for line in (tmp_path / "losses").read_text().splitlines()]
    assert {int(step) for step, _ in lines} == set(range(NUM_STEPS))
    assert len(lines) >= NUM_STEPS
    assert all(loss == expected[int(step)] for step, loss in lines)
    written = [list(map(int, line.split())) for line in (tmp_path / "written").read_text().splitlines()]
    # Up to the first commit: once with the base, and then without it.
    assert len(written) >= 2 and all((nbytes > base_nbytes) == (first == 0) for first, nbytes in written)
    found = torch.load(tmp_path / "adapters.pt")
    trained = {name: param for name, param in model.named_parameters() if param.requires_grad}
    assert found.keys() == trained.keys() and all(torch.equal(found[name], trained[name]) for name in found)


def _optimizer(model: nn.Module) -> zo.AdamW:
    return zo.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-2)


def _step(model: nn.Module, optimizer: zo.AdamW, step: int) -> float:
    loss = model(**{name: tensor[None] for name, tensor in Tokens()[step].items()}).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return float(loss.detach())


def _kill_in_a_loop(where: str) -> None:
    """Each child is forked before torch has threads, so libraries are imported once."""
    draw = random.Random(0)
    for number in range(NUM_KILLS + 1):
        if (child := os.fork()) == 0:
            _train(Path(where))
            os._exit(0)
        losses = Path(where, "losses")
        begin = losses.stat().st_size if losses.exists() else 0
        while number < NUM_KILLS and (losses.stat().st_size if losses.exists() else 0) < begin + 40:
            time.sleep(0.005)
        if number < NUM_KILLS:
            time.sleep(draw.random() * 0.1)
            os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        assert status in (0, signal.SIGKILL), status


def _train(where: Path) -> None:
    torch.set_num_threads(1)
    model = adapted_model("llama", "nf4 nested", **SIZES).train()
    tiers: dict[str, Any] = {"params": "nvme", "optimizer": "nvme", "nvme": where / "run"}
    zo.offload(model, zo.OffloadConfig(precision="fp32", existing="resume", **tiers))
    optimizer = _optimizer(model)
    resumed = zo.resume(model, optimizer)
    first = resumed.step if resumed else 0
    with (where / "losses").open("a") as file:
        for step in range(first, NUM_STEPS):
            file.write(f"{step} {_step(model, optimizer, step).hex()}\n")
            file.flush()
            zo.commit(model, optimizer)
            if step == first:
                drain(model)
                with (where / "written").open("a") as counts:
                    counts.write(f"{first} {runtime(model).store.counters.snapshot()['written.nvme']}\n")
    with zo.gathered(model) as values:
        torch.save({name: values[name].detach().clone() for name in values if "lora" in name}, where / "adapters.pt")
    zo.close(model)
