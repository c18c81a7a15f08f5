"""A clipped step of AdamW on several ranks of this machine (gloo, CPU, fp32), against FSDP2 and DDP.

All in CPU memory, 64 tokens per rank, one thread each. The systems take turns in one run, since a machine is not
the same for two minutes. A ratio is the median of those of the turns, each of two steps that follow on each other.

* Stage 3 over FSDP2 with CPU offload, 4.8M parameters: to reach 0.60 at 2 ranks, 0.52 at 4.
* Stage 1 over DDP: to reach 1.05 at 2 ranks with 4.8M parameters, 1.30 at 4 with 1.2M.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from harness import command
from harness.rows import Row, row, show, write
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.nn import functional

import zero_offload as zo

VOCABULARY, NUM_BLOCKS, BATCH, LENGTH, CLIP, LR = 128, 8, 2, 32, 1.0, 1e-3
WIDTHS = {"4.8M": 256, "1.2M": 128}
WARM_UP = 3
ROWS = [
    (2, "4.8M", "stage 3", "FSDP2, CPU offload", 0.60),
    (4, "4.8M", "stage 3", "FSDP2, CPU offload", 0.52),
    (2, "4.8M", "stage 1", "DDP", 1.05),
    (4, "1.2M", "stage 1", "DDP", 1.30),
]

Step = Callable[[Tensor], None]


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        inner: Tensor = self.down(functional.gelu(self.up(torch.tanh(self.mix(self.norm(x))))))
        return x + inner


class Model(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(VOCABULARY, width), nn.Linear(width, VOCABULARY)
        self.blocks = nn.ModuleList(Block(width) for _ in range(NUM_BLOCKS))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        logits = self.head(x).view(-1, VOCABULARY)
        return functional.cross_entropy(logits, tokens.roll(-1, 1).view(-1))


def ours(width: int, stage: int) -> Step:
    model = Model(width)
    zo.offload(model, zo.OffloadConfig(stage=stage, precision="fp32"))
    return stepping(model, zo.AdamW(model.parameters(), lr=LR), lambda: zo.clip_grad_norm_(model, CLIP))


def ddp(width: int) -> Step:
    return plain(nn.parallel.DistributedDataParallel(Model(width)))


def fsdp2(width: int) -> Step:
    model, mesh = Model(width), dist.init_device_mesh("cpu", (dist.get_world_size(),))
    for module in [*model.blocks, model]:
        fully_shard(module, mesh=mesh, offload_policy=CPUOffloadPolicy(pin_memory=False))
    return plain(model)


def plain(model: nn.Module) -> Step:
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
    return stepping(model, optimizer, lambda: nn.utils.clip_grad_norm_(model.parameters(), CLIP))


def stepping(model: nn.Module, optimizer: torch.optim.Optimizer, clip: Callable[[], object]) -> Step:
    def step(tokens: Tensor) -> None:
        model(tokens).backward()
        clip()
        optimizer.step()
        optimizer.zero_grad()

    return step


def run(rank: int, num_ranks: int, width: int, num_turns: int, folder: str) -> None:
    """The steps of one rank; rank 0 writes the seconds of each system's."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num_ranks)}
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=num_ranks)
    systems = {"stage 3": ours(width, 3), "FSDP2, CPU offload": fsdp2(width)}
    systems |= {"stage 1": ours(width, 1), "DDP": ddp(width)}
    step_s: dict[str, list[float]] = {name: [] for name in systems}
    for turn in range(WARM_UP + num_turns):
        generator = torch.Generator().manual_seed(1000 * turn + rank)
        tokens = torch.randint(0, VOCABULARY, (BATCH, LENGTH), generator=generator)
        for name, step in systems.items():
            dist.barrier()
            begin = time.perf_counter()
            step(tokens)
            dist.barrier()
            step_s[name].append(time.perf_counter() - begin)
    if rank == 0:
        Path(folder, "found.json").write_text(json.dumps({name: each[WARM_UP:] for name, each in step_s.items()}))
    dist.barrier()
    os._exit(0)  # models stay open, whose close would be no part of this


def measure(num_ranks: int, width: int, num_turns: int) -> dict[str, list[float]]:
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(run, (num_ranks, width, num_turns, folder), nprocs=num_ranks)
        found: dict[str, list[float]] = json.loads(Path(folder, "found.json").read_text())
    return found


def main(arguments: Sequence[str]) -> int:
    made = command.parser(__name__, __doc__, "40 turns in the place of 100")
    args = made.parse_args(arguments)
    rows: list[Row] = []
    found = {
        each: measure(each[0], WIDTHS[each[1]], 40 if args.quick else 100) for each in sorted({r[:2] for r in ROWS})
    }
    for num_ranks, size, mine, peer, reach in ROWS:
        step_s = found[num_ranks, size]
        ratio = statistics.median(a / b for a, b in zip(step_s[mine], step_s[peer], strict=True))
        here, there = (1000 * statistics.median(step_s[name]) for name in (mine, peer))
        each = row(f"{num_ranks} ranks, {size} parameters, {mine}", here, "ms", peer, there, reach)
        rows.append(each | {"ratio": ratio, "ok": ratio <= reach})
    show(rows)
    write(rows, args.json)
    return int(any(each["ok"] is False for each in rows))
