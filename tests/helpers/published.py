"""Published training runs: shares of peak in `hardware` are fitted on one of each card, and checked by the others.

Owns the runs with their conditions and sources. Each is predicted as `zero-offload plan` would. All compute in bf16 and
train every parameter. Calls: `RUNS`, then `predict` or `as_table`.

[LLMQ] arXiv 2512.15306, github.com/IST-DASLab/llmq: benchmarks/4090x1.md, 4090x4.md and H100x1.md at 7f895bd, steps 1
to 5; README.md at db0b17f for L40S and RTX 5090. Master, moments and gradients are bf16. `--recompute-block` is taken
for all of a block but its last product. The README says no tokens per step for the L40S: as many as in benchmarks/.
[SlideFormer] arXiv 2603.16428 (DAC 2026), figures of the authors' torch version in
github.com/flagos-ai/Megatron-LM-FL at ef598d0, docs/user-guide/slideformer_megatron_fl.md. 133 GiB of host memory for
the 8B model; updates run inside backward; nothing is clipped.
[llm-foundry] github.com/mosaicml/llm-foundry at 061f2c7, scripts/train/benchmarking/README.md: MPT models under FSDP
on 8 GPUs of one machine, nothing offloaded. Its torch, before 2.1, runs a checkpointed block again as a whole.

Left out: RoundPipe (arXiv 2604.27085), whose RTX 4090 sums in fp16, at twice the rate, and updates asynchronously.
Further runs in fp8; NVIDIA's own on B200 and H200, which are fp8.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from zero_offload.base.config import OffloadConfig, Precision
from zero_offload.base.types import Tier
from zero_offload.hardware.machines import NO_DRIVES, Cluster, share_of_rank
from zero_offload.plan.memory import PLACED_KINDS, Budget, Placement
from zero_offload.plan.partition import Partition
from zero_offload.plan.shapes import SHAPES, Shape, UnitWork
from zero_offload.plan.step_time import StepBatch, StepWorkload
from zero_offload.plan.step_time import predict as predict_step

_FFN_AGAIN = 0.51
"""Of a block's forward, the first two of its feed-forward part's products in Qwen2.5-14B."""

_QWEN3_8B = Shape(36, 4096, 32, 12288, 151936, kv_heads=8, head_width=128)
_QWEN3_14B = Shape(40, 5120, 40, 17408, 151936, kv_heads=8, head_width=128)
_MPT_7B = Shape(32, 4096, 32, 4 * 4096, 50368, matrices=2, tied=True)
_MPT_13B = Shape(40, 5120, 40, 4 * 5120, 50368, matrices=2, tied=True)


class Rest(NamedTuple):
    """Where states rest."""

    params: Tier
    grads: Tier
    optimizer: Tier


AWAY = Rest(Tier.CPU, Tier.CPU, Tier.CPU)
GRADS_STAY = Rest(Tier.CPU, Tier.DEVICE, Tier.CPU)
OPTIMIZER_AWAY = Rest(Tier.DEVICE, Tier.DEVICE, Tier.CPU)
RESIDENT = Rest(Tier.DEVICE, Tier.DEVICE, Tier.DEVICE)
_WORDS = {
    AWAY: "all states in RAM",
    GRADS_STAY: "parameters and optimizer in RAM",
    OPTIMIZER_AWAY: "optimizer in RAM",
    RESIDENT: "nothing offloaded",
}


@dataclass(frozen=True)
class Run:
    """One published run."""

    model: str
    source: str
    gpu: str
    tokens_per_s: float
    """Of one GPU."""
    shape: Shape
    sequences: int
    """Of a micro-batch."""
    micro_batches: int
    sequence: int = 1024
    gpus: int = 1
    rerun: float | None = None
    """Share of a block's forward that backward runs again; None: as `UnitWork.rerun_share` has it."""
    rest: Rest = AWAY
    activations: Tier = Tier.DEVICE
    in_backward: bool = False
    """True if updates run inside backward."""

    @property
    def conditions(self) -> str:
        """In words, for tables."""
        again = {None: "blocks again", 0.0: "nothing again", 1.0: "whole blocks again"}
        return (
            f"{self.gpus} GPU{'s' * (self.gpus > 1)}, {self.micro_batches} x {self.sequences} x {self.sequence:,}, "
            f"{again.get(self.rerun, 'feed-forward again')}, {_WORDS[self.rest]}"
        )


RUNS: tuple[Run, ...] = (
    Run("Qwen2.5-7B", "LLMQ", "rtx4090", 2777, SHAPES["qwen-7b"], 16, 32, rest=GRADS_STAY),
    Run("Qwen2.5-14B", "LLMQ", "rtx4090", 1349, SHAPES["qwen-14b"], 32, 16),
    Run("Qwen3-8B", "SlideFormer", "rtx4090", 2398, _QWEN3_8B, 64, 1, activations=Tier.CPU, in_backward=True),
    Run("Qwen3-14B", "SlideFormer", "rtx4090", 1405, _QWEN3_14B, 64, 1, activations=Tier.CPU, in_backward=True),
    Run("Qwen2.5-3B", "LLMQ", "rtx4090", 7004, SHAPES["qwen-3b"], 4, 128, rerun=0.0, rest=OPTIMIZER_AWAY),
    Run("Qwen2.5-7B", "LLMQ", "rtx4090", 2724, SHAPES["qwen-7b"], 16, 8, gpus=4, rest=GRADS_STAY),
    Run("Qwen2.5-14B", "LLMQ", "rtx4090", 1315, SHAPES["qwen-14b"], 32, 4, gpus=4, rest=GRADS_STAY),
    Run("Qwen2.5-32B", "LLMQ", "rtx4090", 551, SHAPES["qwen-32b"], 32, 4, gpus=4),
    Run("Qwen2.5-7B", "LLMQ", "rtx5090", 3475, SHAPES["qwen-7b"], 8, 8, gpus=4, rest=GRADS_STAY),
    Run("Qwen2.5-7B", "LLMQ", "rtx5090", 3100, SHAPES["qwen-7b"], 8, 8, rest=GRADS_STAY),
    Run("Qwen2.5-3B", "LLMQ", "rtx5090", 8600, SHAPES["qwen-3b"], 8, 8, rest=RESIDENT),
    Run("Qwen2.5-7B", "LLMQ", "l40s", 3900, SHAPES["qwen-7b"], 4, 128, rerun=0.0, rest=OPTIMIZER_AWAY),
    Run("Qwen2.5-3B", "LLMQ", "l40s", 8900, SHAPES["qwen-3b"], 4, 128, rerun=0.0, rest=RESIDENT),
    Run("Qwen2.5-7B", "LLMQ", "h100", 13820, SHAPES["qwen-7b"], 4, 128, rerun=0.0, rest=RESIDENT),
    Run("Qwen2.5-14B", "LLMQ", "h100", 6326, SHAPES["qwen-14b"], 8, 64, rerun=_FFN_AGAIN, rest=OPTIMIZER_AWAY),
    Run("MPT-7B", "llm-foundry", "h100", 10203, _MPT_7B, 64, 2, gpus=8, rerun=1.0, rest=RESIDENT),
    Run("MPT-7B", "llm-foundry", "a100-80", 4357, _MPT_7B, 64, 2, gpus=8, rerun=1.0, rest=RESIDENT),
    Run("MPT-13B", "llm-foundry", "a100-80", 2330, _MPT_13B, 40, 3, gpus=8, rerun=1.0, rest=RESIDENT),
    Run("MPT-7B", "llm-foundry", "a100-80", 4641, _MPT_7B, 6, 2, 2048, 8, rerun=0.0, rest=RESIDENT),
    Run("MPT-7B", "llm-foundry", "a100-40", 3854, _MPT_7B, 24, 4, gpus=8, rerun=1.0, rest=RESIDENT),
    Run("MPT-13B", "llm-foundry", "a100-40", 1727, _MPT_13B, 8, 16, gpus=8, rerun=1.0, rest=RESIDENT),
)
"""By card; each card's share is fitted on its first run."""


def predict(run: Run) -> float:
    """Tokens per second of one GPU under the run's conditions."""
    config = OffloadConfig(
        stage=3,
        params=run.rest.params,
        grads=run.rest.grads,
        optimizer=run.rest.optimizer,
        activations=run.activations,
        precision=Precision("bf16", states="bf16" if run.source == "LLMQ" else "fp32"),
        durability="scratch",
        overlap="backward" if run.in_backward else "auto",
    )
    batch = StepBatch(run.sequences * run.sequence, run.micro_batches, run.sequence, recompute=run.rerun != 0.0)
    work = tuple(_as_published(each, run) for each in run.shape.units())
    job = StepWorkload.of(work, config, Partition.of(config, run.gpus), batch)
    tiers = dict(zip(PLACED_KINDS, run.rest, strict=True))
    placement = Placement(tuple(tiers for _ in work), Budget(0, 0, 0, False))
    machine = share_of_rank(run.gpu, NO_DRIVES, Cluster(run.gpus))
    return predict_step(job, placement, machine).tokens_per_s / run.gpus


def _as_published(work: UnitWork, run: Run) -> UnitWork:
    if run.rerun is None or not work.attention_width:
        return work
    return replace(work, last_numel=(1 - run.rerun) * work.forward_flops(run.sequence) / 2)


def as_table() -> Iterator[str]:
    """The runs, published and predicted, as lines of a Markdown table."""
    yield "| card | model, source | conditions | published | predicted | ratio |"
    yield "|---|---|---|---|---|---|"
    cards: set[str] = set()
    for run in RUNS:
        predicted = predict(run)
        fitted = "" if run.gpu in cards else " (fitted)"
        cards.add(run.gpu)
        columns = (
            run.gpu,
            f"{run.model}, {run.source}",
            run.conditions,
            f"{run.tokens_per_s:,.0f}",
            f"{predicted:,.0f}{fitted}",
            f"{predicted / run.tokens_per_s:.2f}",
        )
        yield f"| {' | '.join(columns)} |"
