"""Bytes that a rank holds and sends under each ZeRO stage: predicted by the plan and by the paper, and measured.

Trains a GPT of 30M parameters for three steps of two micro-batches on 1, 2 and 4 ranks (gloo, this machine). All states
are in CPU memory, bf16 with fp32 sums of gradients. Memory is what the arena has given out, frames included; the plan's
figure includes its buffers in flight. Traffic is bytes of whole buffers per parameter. Parameters are bf16, and so are
the gradients of one backward; sums of several (stage 1) are fp32.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from harness import command
from harness.rows import Row, row, write

import zero_offload as zo
from zero_offload.base.types import MIB, STAGES
from zero_offload.finetune.gpt import GPT, next_token_loss
from zero_offload.finetune.gpt_config import GPTConfig, RecomputeMode, num_parameters

MODEL = GPTConfig(num_layers=8, width=512, num_heads=8, vocab_size=8192, seq_max=64, recompute=RecomputeMode.BLOCK)
NUM_STEPS, MICRO_BATCHES = 3, 2
REACH = 1.15


def run(rank: int, world_size: int, stage: int, folder: str) -> None:
    """The steps of one rank; rank 0 writes the measurements."""
    torch.set_num_threads(1)
    if world_size > 1:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size)
    torch.manual_seed(0)
    model, config = GPT(MODEL), zo.OffloadConfig(stage=stage)
    plan = zo.plan(model, config)
    zo.offload(model, config)
    optimizer = zo.AdamW(model.parameters(), lr=1e-4)
    for step in range(NUM_STEPS):
        # The plan is for one micro-batch, and one rank sends nothing.
        for micro in range(MICRO_BATCHES if world_size > 1 else 1):
            generator = torch.Generator().manual_seed(1000 * step + 10 * micro + rank)
            tokens = torch.randint(MODEL.vocab_size, (1, MODEL.seq_max + 1), generator=generator)
            next_token_loss(model(tokens[:, :-1]), tokens[:, 1:]).backward()
        optimizer.step()
        optimizer.zero_grad()
    stats = zo.stats(model)
    if rank == 0:
        found = {"planned": sum(plan.rest_bytes.values()), "in_flight": sum(plan.staging_bytes.values())}
        found |= {"held": stats.resident_bytes["cpu"], **stats.communicated_bytes}
        Path(folder, "found.json").write_text(json.dumps(found))
    zo.close(model)
    if world_size > 1:
        dist.destroy_process_group()


def measure(world_size: int, stage: int) -> dict[str, int]:
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(run, (world_size, stage, folder), nprocs=world_size)
        found: dict[str, int] = json.loads(Path(folder, "found.json").read_text())
    return found


def paper_traffic(stage: int, world_size: int) -> tuple[float, float]:
    """Bytes gathered and reduced per parameter and step; stage 3 at most, since units may be kept."""
    if world_size == 1:
        return 0.0, 0.0
    gathers = {0: 0, 1: 1, 2: 1, 3: 2 * MICRO_BATCHES}
    # Stage 0 gathers the sums, which are fp32, too.
    reductions = {0: (2 + 4) * MICRO_BATCHES, 1: 4}
    return 2 * gathers[stage], reductions.get(stage, 2 * MICRO_BATCHES)


def compare(world_size: int, stage: int, found: dict[str, int]) -> list[Row]:
    numel = num_parameters(MODEL)
    gathered, reduced = found["gathered"] / numel, found["reduced"] / numel
    expected = paper_traffic(stage, world_size)
    print(
        f"| {stage} | {world_size} | {found['planned'] / MIB:.0f} + {found['in_flight'] / MIB:.0f} | "
        f"{found['held'] / MIB:.0f} | {expected[0]:g} | {gathered:.2f} | {expected[1]:g} | {reduced:.2f} |",
        flush=True,
    )
    planned = found["planned"] + found["in_flight"]
    where = f"stage {stage}, {world_size} ranks"
    rows = [row(f"memory, {where}", found["held"] / MIB, "MiB", "plan", planned / MIB, REACH)]
    if world_size > 1:
        rows.append(row(f"traffic, {where}", gathered + reduced, "B/param", "ZeRO paper", sum(expected), REACH))
    return rows


def main(arguments: Sequence[str]) -> int:
    args = command.parser(__name__, __doc__, "1 and 2 ranks only").parse_args(arguments)
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    print("| stage | ranks | planned MiB, rest + flight | held MiB | gathered, paper | ours | reduced, paper | ours |")
    print("|---|---|---|---|---|---|---|---|")
    rows = [
        each
        for world_size in ((1, 2) if args.quick else (1, 2, 4))
        for stage in STAGES
        for each in compare(world_size, stage, measure(world_size, stage))
    ]
    missed = [each["name"] for each in rows if not each["ok"]]
    print(f"within {REACH}x of plan and paper: {len(rows) - len(missed)} of {len(rows)}", *missed, sep="\n  ")
    write(rows, args.json)
    return 0
