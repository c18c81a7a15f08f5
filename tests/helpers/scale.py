"""Scale on paper: bytes of ZeRO's table, and steps on 1 to 1,024 GPUs, as planned.

[ZeRO] Rajbhandari et al. 2020 (arXiv 1910.02054). Table 1 has the bytes of a rank at stages 1 to 3: 4P + 12P/N,
2P + 14P/N and 16P/N, of P parameters and N ranks. Its 400 V100 are 25 groups of 16 that divide each layer; a GPU has
32 GB.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from zero_offload.base.config import OffloadConfig
from zero_offload.base.types import StateKind
from zero_offload.finetune.fit.request import Request, find_work, plan_request
from zero_offload.hardware.machines import Cluster, parse_drives
from zero_offload.plan.forecast import Forecast, forecast
from zero_offload.plan.memory import measure_units
from zero_offload.plan.partition import Partition
from zero_offload.plan.shapes import equal_blocks
from zero_offload.plan.step_time import StepBatch

PAPER: Mapping[int, Callable[[float, int], float]] = {
    1: lambda numel, ranks: 4 * numel + 12 * numel / ranks,
    2: lambda numel, ranks: 2 * numel + 14 * numel / ranks,
    3: lambda numel, ranks: 16 * numel / ranks,
}
"""Bytes of one rank by stage."""
SIZES, RANKS = {"7.5B": 7.5e9, "128B": 128e9, "1T": 1e12}, (1, 4, 16, 64, 256, 1024)
GPUS_OF_PAPER, DIVIDE_LAYERS, GPU_BYTES = 400, 16, 32e9
HIDDEN, FLOPS_OF_GPU, LINK_BYTES = 8192, 38e12, 12.5e9
"""Of its models of 100B: the width, arithmetic where layers are divided inside of machines, and a link between two."""
GPUS = (1, 2, 8, 16, 64, 256, 1024)
TOKENS = (1024, 8192)


def planned_bytes(numel: float, ranks: int, stage: int) -> int:
    """Of one rank, at rest on a GPU."""
    config = OffloadConfig(stage=stage, params="device", grads="device", optimizer="device", durability="scratch")
    work = equal_blocks(int(numel), 96)
    units = measure_units([each.numel for each in work], config, Partition.of(config, ranks), 1)
    return sum(getattr(unit, f"{kind.value}_bytes") for unit in units for kind in StateKind if kind in _RESTING)


_RESTING = (StateKind.PARAMS, StateKind.GRADS, StateKind.OPTIMIZER)


def largest(stage: int) -> float:
    """Parameters whose states fill the paper's GPUs at this stage; every 16 of them divide each layer."""
    some = 16e9
    of_rank = planned_bytes(some / DIVIDE_LAYERS, GPUS_OF_PAPER // DIVIDE_LAYERS, stage)
    return some * GPU_BYTES / of_rank


def times_of_layers_over_machines(numel: float, gpus: int) -> float:
    """Seconds of a step whose layers are divided over `gpus` of several machines, over those of its arithmetic.

    Per token a parameter has 8 FLOPs with recompute. A layer adds up hidden states, of 16 bits, twice in each of two
    forwards and a backward. A ring takes them over the link twice.
    """
    num_layers = numel / (12 * HIDDEN**2)
    compute_s = 8 * numel / (gpus * FLOPS_OF_GPU)
    return 1 + num_layers * 6 * 2 * 2 * HIDDEN / LINK_BYTES / compute_s


def step_of(gpus: int, tokens: int) -> Forecast:
    """A step of 100B parameters on H100s, eight to a machine, with states where the plan puts them."""
    drives = parse_drives(["4x7GB/s"])
    work, vocab, recompute = find_work("100B")
    settings = {
        "params": "auto",
        "grads": "auto",
        "optimizer": "auto",
        "nvme": ["1", "2", "3", "4"],
        "commit_every": 100,
    }
    request = Request(
        model="100B",
        work=work,
        vocab=vocab,
        config=OffloadConfig.from_dict(settings),
        cluster=Cluster(gpus, max(gpus // 8, 1)),
        batch=StepBatch(tokens, 1, min(tokens, 4096), recompute),
        gpu="h100",
        gpu_here=None,
        drives=drives,
    ).with_budgets("2TiB")
    planned = plan_request(request)
    return forecast(planned.workload, planned.placement, planned.machine)


def memory_table() -> Iterator[str]:
    """Bytes of a rank, of the paper and planned, as lines of a Markdown table."""
    yield "| model | ranks | stage 1: paper, planned | stage 2 | stage 3 |"
    yield "|---|---|---|---|---|"
    for name, numel in SIZES.items():
        for ranks in RANKS:
            pairs = (
                f"{paper(numel, ranks) / 1e9:,.1f}, {planned_bytes(numel, ranks, stage) / 1e9:,.1f}"
                for stage, paper in PAPER.items()
            )
            yield f"| {name} | {ranks:,} | {' | '.join(pairs)} |"


def step_table() -> Iterator[str]:
    """Tokens a second of a GPU, and the bound, as lines of a Markdown table."""
    yield (
        "| GPUs | "
        + " | ".join(f"{tokens:,} tokens of a GPU: tokens/s, bound by | busy network" for tokens in TOKENS)
        + " |"
    )
    yield "|---|" + "---|---|" * len(TOKENS)
    for gpus in GPUS:
        cells = []
        for tokens in TOKENS:
            found = step_of(gpus, tokens)
            busy = {key.value: share for key, share in found.prediction.busy.items()}
            cells += [
                f"{found.prediction.tokens_per_s / gpus:,.0f}, {found.bottleneck.title}",
                f"{busy.get('network', 0):.0%}",
            ]
        yield f"| {gpus:,} | {' | '.join(cells)} |"
