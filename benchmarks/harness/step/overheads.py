"""The cost of the runtime itself: hooks per unit, ranks against FSDP2, the import.

* Hooks: forward and backward of 48 units that never move, against the same model without us.
* Two ranks (gloo, CPU): a step of a 30M GPT under stage 3, all in CPU memory, against FSDP2 without and with its CPU
  offload. bf16 compute, gradients reduced in fp32, recomputed activations, clipping. FSDP2 has fp32 parameters, cast
  for compute, and torch's fused AdamW. The three step in turns in the same two processes.
* Units on a drive: steps of 1,000 layers of 64 x 64, everything on the drive of the temporary directory.
* Import: all public names, after `import torch`, in fresh processes.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from harness import command
from harness.rows import row, show, write
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

import zero_offload as zo
from zero_offload.finetune.gpt import GPT, next_token_loss
from zero_offload.finetune.gpt_config import GPTConfig, RecomputeMode

NUM_UNITS = 48
MODEL = GPTConfig(num_layers=8, width=512, num_heads=8, vocab_size=8192, seq_max=128, recompute=RecomputeMode.BLOCK)
RANKS, THREADS_PER_RANK = 2, 1
REACH_HOOKS_US, REACH_FSDP, REACH_FSDP_OFFLOAD, REACH_IMPORT_S, REACH_UNIT_MS = 50.0, 1.0, 0.7, 0.3, 1.0
HYPER = {"lr": 1e-4, "weight_decay": 0.01}

Step = Callable[[], None]


def hooks_us(num_rounds: int) -> float:
    """Microseconds per unit and step that our model takes longer than the plain one; medians of rounds in turn."""
    torch.set_num_threads(1)
    plain, ours = (nn.Sequential(*(nn.Linear(8, 8) for _ in range(NUM_UNITS))) for _ in range(2))
    zo.offload(ours, zo.OffloadConfig(precision="fp32"), units=list(ours))
    x = torch.ones(1, 8)
    seconds: dict[nn.Module, list[float]] = {plain: [], ours: []}
    for _ in range(num_rounds):
        for model, times in seconds.items():
            start = time.perf_counter()
            model(x).sum().backward()
            times.append(time.perf_counter() - start)
            for param in model.parameters():
                param.grad = None
    medians = [statistics.median(times) for times in seconds.values()]
    return (medians[1] - medians[0]) / NUM_UNITS * 1e6


def unit_ms(num_units: int) -> float:
    """Milliseconds of the control thread's processor time per unit and step; the median of three steps."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        tiers: dict[str, Any] = dict.fromkeys(("params", "grads", "optimizer"), "nvme")
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(num_units)))
        zo.offload(model, zo.OffloadConfig(precision="fp32", nvme=folder, **tiers), units=list(model))
        optimizer = zo.AdamW(model.parameters(), lr=1e-3)
        seconds = []
        for _ in range(5):
            start = time.thread_time()
            model(torch.ones(1, 64)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            seconds.append(time.thread_time() - start)
        zo.close(model)
    return statistics.median(seconds[2:]) / num_units * 1e3


def build_ours() -> tuple[GPT, Step]:
    model = GPT(MODEL)
    zo.offload(model, zo.OffloadConfig(stage=3))
    optimizer = zo.AdamW(model.parameters(), **HYPER)

    def update() -> None:
        zo.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return model, update


def build_fsdp(offload: OffloadPolicy) -> tuple[GPT, Step]:
    model = GPT(MODEL)
    policy: dict[str, Any] = {
        "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        "offload_policy": offload,
    }
    for block in model.blocks:
        fully_shard(block, **policy)
    fully_shard(model, **policy)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **HYPER)

    def update() -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return model, update


def run_rank(rank: int, folder: str, num_rounds: int) -> None:
    """One of the two ranks; rank 0 writes the median step of each system."""
    torch.set_num_threads(THREADS_PER_RANK)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    torch.manual_seed(0)
    systems = {
        "ours": build_ours(),
        "fsdp": build_fsdp(OffloadPolicy()),
        "fsdp_offload": build_fsdp(CPUOffloadPolicy(pin_memory=False)),
    }
    tokens = torch.randint(MODEL.vocab_size, (1, MODEL.seq_max + 1), generator=torch.Generator().manual_seed(rank))
    seconds: dict[str, list[float]] = {name: [] for name in systems}
    for number in range(num_rounds + 2):
        for name, (model, update) in systems.items():
            dist.barrier()
            start = time.perf_counter()
            next_token_loss(model(tokens[:, :-1]), tokens[:, 1:]).backward()
            update()
            if number >= 2:  # the first ones record, and fill pools
                seconds[name].append(time.perf_counter() - start)
    if rank == 0:
        Path(folder, "found.json").write_text(json.dumps({k: statistics.median(v) for k, v in seconds.items()}))
    zo.close(systems["ours"][0])
    dist.destroy_process_group()


def ranks_s(num_rounds: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(run_rank, (folder, num_rounds), nprocs=RANKS)
        found: dict[str, float] = json.loads(Path(folder, "found.json").read_text())
    return found


def import_s(num_rounds: int) -> float:
    code = "import torch, time; t = time.perf_counter(); from zero_offload import *; print(time.perf_counter() - t)"
    # As installed: the first import leaves compiled files, and the others find them.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    outputs = (subprocess.check_output([sys.executable, "-c", code], env=environment) for _ in range(num_rounds + 1))
    return statistics.median(list(map(float, outputs))[1:])


def main(arguments: Sequence[str]) -> int:
    args = command.parser(__name__, __doc__, "fewer rounds").parse_args(arguments)
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    step_s = ranks_s(8 if args.quick else 20)
    rows = [
        row("hooks per unit and step", hooks_us(300), "us", "1 us", 1.0, REACH_HOOKS_US),
        row("on a drive, per unit and step", unit_ms(200 if args.quick else 1000), "ms", "1 ms", 1.0, REACH_UNIT_MS),
        row("2 ranks, stage 3", step_s["ours"], "s", "FSDP2", step_s["fsdp"], REACH_FSDP),
        row("2 ranks, stage 3", step_s["ours"], "s", "FSDP2, CPU offload", step_s["fsdp_offload"], REACH_FSDP_OFFLOAD),
        row("import", import_s(5), "s", "1 s", 1.0, REACH_IMPORT_S),
    ]
    show(rows)
    write(rows, args.json)
    return 0
