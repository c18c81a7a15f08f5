"""Losses and norms of a script of two ranks, after its move from DeepSpeed and from FSDP2, against its own run there.

Eight clipped steps of AdamW on a small model, in fp32 and bf16, states in CPU memory. A row has the largest relative
difference of a mean loss, or of a norm. fp32 is to agree to 0.0001%, as sums in another order do. bf16 is not graded:
DeepSpeed adds up gradients in bf16, and FSDP2 rounds two equally near values otherwise. DeepSpeed's own operators need
a compiler, and are left out.
"""

from __future__ import annotations

import importlib
import json
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from harness import command
from harness.rows import Row, missing, row, show, write
from torch import Tensor, nn

import zero_offload as zo

NUM_STEPS, NUM_RANKS, CLIP = 8, 2, 1.0
ADAMW: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}
PEERS = {"fsdp2": "FSDP2", "zero2": "DeepSpeed ZeRO-2, CPU", "zero3": "DeepSpeed ZeRO-3, CPU"}
AGREE = 1e-4
"""Per cent."""

Steps = Iterator[tuple[Tensor, float]]


def build() -> nn.Sequential:
    torch.manual_seed(0)
    blocks = (nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(4))
    return nn.Sequential(nn.Linear(64, 256), *blocks, nn.Linear(256, 64))


def loss_of(model: Callable[[Tensor], Tensor], step: int, dtype: torch.dtype) -> Tensor:
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(1000 * step + dist.get_rank()))
    return (model(x.to(dtype)).float() - x.sin()).square().mean()


def ours(dtype: torch.dtype) -> Steps:
    model = build()
    zo.offload(model, zo.OffloadConfig(precision="bf16" if dtype == torch.bfloat16 else "fp32"))
    optimizer = zo.AdamW(model.parameters(), **ADAMW)
    for step in range(NUM_STEPS):
        loss = loss_of(model, step, dtype)
        loss.backward()
        norm = zo.clip_grad_norm_(model, CLIP)
        optimizer.step()
        optimizer.zero_grad()
        yield loss, float(norm)
    zo.close(model)


def fsdp2(dtype: torch.dtype) -> Steps:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    model, mesh = build(), dist.init_device_mesh("cpu", (NUM_RANKS,))
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for module in [*model, model]:
        fully_shard(module, mesh=mesh, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    for step in range(NUM_STEPS):
        loss = loss_of(model, step, dtype)
        loss.backward()
        norm: Any = nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()
        yield loss, norm.full_tensor().item()


def deepspeed(dtype: torch.dtype, stage: int) -> Steps:
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    # gloo instead of an operator that is compiled; as an attribute of its package the module is hidden by torch
    importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None
    deepspeed.init_distributed(dist_backend="gloo")
    zero = {"stage": stage, "offload_optimizer": {"device": "cpu"}}
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_clipping": CLIP,
        "bf16": {"enabled": dtype == torch.bfloat16},
        "optimizer": {"type": "AdamW", "params": ADAMW | {"betas": [*ADAMW["betas"]], "torch_adam": True}},
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": zero | ({"offload_param": {"device": "cpu"}} if stage == 3 else {}),
    }
    model = build()
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    for step in range(NUM_STEPS):
        loss = loss_of(engine, step, dtype)
        engine.backward(loss)
        engine.step()
        yield loss, float(engine.get_global_grad_norm())


def run(rank: int, name: str, dtype: torch.dtype, folder: str) -> None:
    """The steps of one rank; rank 0 writes mean losses and norms."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(NUM_RANKS)}
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=NUM_RANKS)
    steps = {"ours": ours, "fsdp2": fsdp2}.get(name) or (lambda dtype: deepspeed(dtype, int(name[-1])))
    found = []
    for loss, norm in steps(dtype):
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        found.append((mean.item() / NUM_RANKS, norm))
    if rank == 0:
        Path(folder, "found.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def measure(name: str, dtype: torch.dtype) -> list[tuple[float, float]]:
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(run, (name, dtype, folder), nprocs=NUM_RANKS)
        found: list[tuple[float, float]] = json.loads(Path(folder, "found.json").read_text())
    return found


def main(arguments: Sequence[str]) -> int:
    made = command.parser(__name__, __doc__, "nothing is left out")
    args = made.parse_args(arguments)
    rows: list[Row] = []
    code = 0
    for precision, dtype in {"fp32": torch.float32, "bf16": torch.bfloat16}.items():
        here = measure("ours", dtype)
        for peer, words in PEERS.items():
            try:
                there = measure(peer, dtype)
            except multiprocessing.ProcessRaisedException as error:
                if "No module named 'deepspeed'" not in str(error):
                    raise
                rows.append(missing(f"{precision}: {words}", 0.0, "", "pip install deepspeed==0.19.8", 1.0))
                code = command.PEER_MISSING_EXIT_CODE
                continue
            for column, what in enumerate(("loss", "norm")):
                most = 100 * max(abs(a[column] / b[column] - 1) for a, b in zip(here, there, strict=True))
                made_row = row(f"{precision}: largest difference of a {what}", most, "%", words, AGREE, 1.0)
                rows.append(made_row if precision == "fp32" else made_row | {"ok": None})
    show(rows)
    write(rows, args.json)
    return code or int(any(each["ok"] is False for each in rows))
