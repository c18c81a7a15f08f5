"""The systems that `systems.py` compares: how each is built, and what a worker does.

All train the same GPT from the same values on the same tokens with AdamW and clipping. Ours and plain torch need
nothing else; FSDP2 is torch's own; DeepSpeed is imported by its own worker only.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness.processes import disk_bytes, reset_peak
from torch import Tensor

import zero_offload as zo
from zero_offload.finetune.gpt import GPT, next_token_loss
from zero_offload.finetune.gpt_config import GPTConfig, RecomputeMode
from zero_offload.hardware.probe import peak_resident_bytes

ADAMW: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
CLIP = 1.0
MODELS = {
    "tiny": (4, 64, 2, 257),
    "125m": (12, 768, 12, 50257),
    "350m": (24, 1024, 16, 50257),
}
"""Layers, width, heads, vocabulary."""
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
COMPACT_STATE_BYTES = 1 + 4 / 256
"""An 8-bit code, and a scale for each 256."""


@dataclass(frozen=True)
class Case:
    """The model, settings and place that every system of a comparison trains with."""

    model: str
    seq: int
    dtype: str
    directory: Path
    num_threads: int

    @property
    def gpt(self) -> GPTConfig:
        layers, width, heads, vocab = MODELS[self.model]
        return GPTConfig(layers, width, heads, vocab, seq_max=self.seq, recompute=RecomputeMode.BLOCK)

    @property
    def itemsize(self) -> int:
        """Bytes of a parameter, and of a gradient."""
        return DTYPES[self.dtype].itemsize


@dataclass(frozen=True)
class Ours:
    """One placement of zero_offload."""

    params: str
    optimizer: str
    states: str = "fp32"
    grads: str = "cpu"

    def held_bytes(self, dtype: str) -> float:
        """Bytes per parameter in CPU memory, from the design's table: what rests there, gradients among it."""
        itemsize = DTYPES[dtype].itemsize
        if self.optimizer == "nvme":
            return itemsize * ((self.grads == "cpu") + (self.params == "cpu"))
        # The part that completes the fp32 master of a bf16 value: 16 bits of it, or 8.
        completing = (2 if self.states == "fp32" else 1) if dtype == "bf16" else 0
        return itemsize + itemsize + completing + 2 * (4 if self.states == "fp32" else COMPACT_STATE_BYTES)


OURS = {
    "cpu": Ours("cpu", "cpu"),
    "cpu_compact": Ours("cpu", "cpu", "compact"),
    "disk": Ours("nvme", "nvme"),
    "disk_grads": Ours("nvme", "nvme", grads="nvme"),
    "disk_compact": Ours("nvme", "nvme", "compact"),
    "optimizer_on_disk": Ours("cpu", "nvme"),
    "optimizer_on_disk_compact": Ours("cpu", "nvme", "compact"),
}


@dataclass(frozen=True)
class Peer:
    """Another system: what its own bytes are, by which it can be judged whatever its code does."""

    held_bytes: float
    """Per parameter in CPU memory, bf16: what decides whether all systems fit at once."""
    dram_bytes: int
    """Read and written per parameter and update, at least."""


PEERS = {
    # bf16 and fp32 master, fp32 m and v, fp32 gradients, and a bf16 copy of them: AdamW reads 20 and writes 14.
    "deepspeed_cpu": Peer(22, 34),
    "deepspeed_nvme": Peer(12, 34),
    # fp32 parameters and gradients, m and v: 16 read, 12 written; and the cast to bf16 before each use, 6 at least.
    "fsdp2_cpu": Peer(20, 34),
}
LABELS = {
    "plain": "plain torch",
    "cpu": "ours, CPU memory",
    "cpu_compact": "ours, CPU memory, compact",
    "disk": "ours, on disk",
    "disk_grads": "ours, on disk with gradients",
    "disk_compact": "ours, on disk, compact",
    "optimizer_on_disk": "ours, optimizer on disk",
    "optimizer_on_disk_compact": "ours, optimizer on disk, compact",
    "deepspeed_cpu": "DeepSpeed ZeRO-3, CPU",
    "deepspeed_nvme": "DeepSpeed ZeRO-3, NVMe optimizer",
    "fsdp2_cpu": "FSDP2, CPU offload",
}
INSTALL = (
    "pip install deepspeed==0.19.8 (DS_BUILD_OPS=0, needs g++, ninja and libaio-dev) into an environment of its own, "
    "then name its python: --peer-python PATH"
)

Forward = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class System:
    """The system that a worker steps."""

    forward: Forward
    backward: Callable[[Tensor], None]
    update: Callable[[], None]
    model: torch.nn.Module | None = None
    """Of ours: it has statistics."""


def build_plain(case: Case) -> System:
    """The reference: parameters in the compute dtype, an fp32 master, torch's fused AdamW."""
    model = GPT(case.gpt)
    masters: list[Tensor] = list(model.parameters())
    weights = masters
    if case.dtype == "bf16":
        masters = [weight.detach().clone().requires_grad_() for weight in weights]
        weights = list(model.bfloat16().parameters())
    optimizer = torch.optim.AdamW(masters, fused=True, **ADAMW)

    @torch.no_grad()
    def update() -> None:
        if weights is not masters:
            for master, weight in zip(masters, weights, strict=True):
                assert weight.grad is not None
                master.grad, weight.grad = weight.grad.float(), None
        torch.nn.utils.clip_grad_norm_(masters, CLIP)
        optimizer.step()
        optimizer.zero_grad()
        if weights is not masters:
            torch._foreach_copy_(weights, masters)

    return System(model, Tensor.backward, update)


def build_forward_backward(case: Case) -> System:
    """No optimizer at all: tells the memory that forward and backward need by themselves.

    Gradients stay: they are there at the peak, too, wherever in backward that is.
    """
    model = GPT(case.gpt).to(DTYPES[case.dtype])
    return System(model, Tensor.backward, partial(model.zero_grad, set_to_none=False))


def build_ours(case: Case, placement: Ours) -> System:
    model = GPT(case.gpt)
    # In memory there is no directory and so no generation; on disk a commit is of every step, as by default.
    nvme = case.directory if placement.optimizer == "nvme" else None
    precision = zo.Precision(compute=case.dtype, states=placement.states)
    zo.offload(
        model,
        zo.OffloadConfig(
            params=placement.params,
            grads=placement.grads,
            optimizer=placement.optimizer,
            nvme=nvme,
            precision=precision,
        ),
    )
    optimizer = zo.AdamW(model.parameters(), **ADAMW)

    def update() -> None:
        zo.clip_grad_norm_(model, CLIP)
        optimizer.step()
        optimizer.zero_grad()

    return System(model, Tensor.backward, update, model)


def build_fsdp2(case: Case) -> System:
    """One rank: what its offload costs, without a network."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    dist.init_process_group("gloo", init_method=f"file://{case.directory}/store", rank=0, world_size=1)
    model = GPT(case.gpt)
    settings: dict[str, Any] = {
        "mesh": init_device_mesh("cpu", (1,)),
        "offload_policy": CPUOffloadPolicy(pin_memory=False),
    }
    if case.dtype == "bf16":
        settings["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, **settings)
    fully_shard(model, **settings)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True, **ADAMW)

    def update() -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        optimizer.zero_grad()

    return System(model, Tensor.backward, update)


def deepspeed_config(case: Case, optimizer_tier: str) -> dict[str, Any]:
    """ZeRO-3 with parameters in CPU memory; NVMe transfers of 4 MiB, as large as its kernels like them.

    Not pipelined: that needs 12 buffers, not 4, and took the same time with 1.8 times the memory.
    """
    optimizer: dict[str, Any] = {"device": optimizer_tier, "pin_memory": True}
    if optimizer_tier == "nvme":
        optimizer |= {"nvme_path": str(case.directory), "fast_init": False, "buffer_count": 4}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": CLIP,
        "steps_per_print": 10**9,
        "bf16": {"enabled": case.dtype == "bf16"},
        "optimizer": {"type": "AdamW", "params": ADAMW | {"betas": list(ADAMW["betas"])}},
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {
            "stage": 3,
            "sub_group_size": 50_000_000,
            "overlap_comm": False,  # one rank has nothing to communicate
            "contiguous_gradients": True,
            "stage3_param_persistence_threshold": 10_000,
            "offload_param": {"device": "cpu", "pin_memory": True},
            "offload_optimizer": optimizer,
        },
        "aio": {
            "block_size": 4 << 20,
            "queue_depth": 16,
            "intra_op_parallelism": 1,
            "single_submit": False,
            "overlap_events": True,
        },
    }


def join_alone() -> None:
    """Set the environment of a launcher for the only rank."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_SIZE": "1"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def build_deepspeed(case: Case, optimizer_tier: str) -> System:
    join_alone()
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    deepspeed.init_distributed(dist_backend="gloo")
    model = GPT(case.gpt)
    engine, *_ = deepspeed.initialize(
        model=model, model_parameters=model.parameters(), config=deepspeed_config(case, optimizer_tier)
    )
    engine.train()
    return System(engine, engine.backward, engine.step)


def build(name: str, case: Case) -> System:
    builders: dict[str, Callable[[], System]] = {
        "plain": lambda: build_plain(case),
        "forward_backward": lambda: build_forward_backward(case),
        "fsdp2_cpu": lambda: build_fsdp2(case),
        "deepspeed_cpu": lambda: build_deepspeed(case, "cpu"),
        "deepspeed_nvme": lambda: build_deepspeed(case, "nvme"),
    }
    return build_ours(case, OURS[name]) if name in OURS else builders[name]()


def serve(name: str, case: Case) -> None:
    """The loop of a worker: read a number of steps, make them, answer with one line of JSON."""
    torch.set_num_threads(case.num_threads)
    system = build(name, case)
    tokens = torch.randint(case.gpt.vocab_size, (1, case.seq + 1), generator=torch.Generator().manual_seed(0))
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    # From here on the peak counts: building the model in fp32 is the same for all systems, and not a step.
    reset_peak()
    settled: dict[str, int] = {}
    num_steps = 0
    for line in sys.stdin:
        steps: list[dict[str, float]] = []
        # A step pays for the update of the one before; the first of a turn has none to pay for, so it does not count.
        for _ in range(1 + int(line)):
            moved, worked, start = disk_bytes(), time.process_time(), time.perf_counter()
            loss = next_token_loss(system.forward(inputs), targets)
            forwarded = time.perf_counter()
            system.backward(loss)
            computed = time.perf_counter()
            system.update()
            ended, moved_then = time.perf_counter(), disk_bytes()
            step = {"step_s": ended - start, "forward_s": forwarded - start, "backward_s": computed - forwarded}
            step |= {"loss": loss.item(), "cores_s": time.process_time() - worked}
            step |= {"read_bytes": moved_then[0] - moved[0], "written_bytes": moved_then[1] - moved[1]}
            steps.append(step | _ours(system))
            num_steps += 1
            if num_steps == 2:
                settled = _taken(system)
        with torch.no_grad():
            system.forward(inputs)  # waits for the last update, which must not run in the next one's turn
        grown = {f"{key}_growth": now - settled[key] for key, now in _taken(system).items()}
        print(json.dumps({"steps": steps[1:], "peak_rss_bytes": peak_resident_bytes(), **grown}), flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()


def _ours(system: System) -> dict[str, float]:
    """Of the last step: bytes as they are counted, and the time that compute waited for the update."""
    if system.model is None:
        return {}
    stats = zo.stats(system.model)
    moved = {"read_bytes": stats.read_bytes["nvme"], "written_bytes": stats.written_bytes["nvme"]}
    return {"exposed_s": stats.exposed_s["update"], **moved}


def _taken(system: System) -> dict[str, int]:
    if system.model is None:
        return {}
    stats = zo.stats(system.model)
    return {"arena": stats.resident_bytes["cpu"], "mappings": stats.num_mappings + stats.num_registrations}
