"""Small runs whose files are kept, so that later versions prove that they still read them.

`python -m tests.formats.runs` trains every run of `RUNS` with the code that stands here. It writes COMMIT.tar.xz, their
directories, and COMMIT.json, what each must give when it goes on. The files of a commit are never written again: a new
format, or a run that is added, gets a further pair.

The numbers must not depend on the processor. So the model has products and sums of single elements only: no matrix
product, whose order the BLAS chooses, and no sum over elements. The update and the norm are the library's own kernels.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import subprocess
import tarfile
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import zero_offload as zo
from tests.helpers.ranks import RankPools
from tests.helpers.reference import read_masters

FOLDER = Path(__file__).parent
SHAPE = (12, 25)
"""300 elements are not a multiple of 256, so two ranks cut sections inside of parameters."""
NUM_BLOCKS = 4
FIRST_STEPS, MORE_STEPS = 4, 3


class Block(nn.Module):
    """A product and a sum, element by element; the vector is in the parameter group without weight decay."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(1 + torch.randint(-16, 17, SHAPE) / 64)
        self.bias = nn.Parameter(torch.randint(-16, 17, (SHAPE[0] * SHAPE[1],)) / 64)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight + self.bias.view(SHAPE)


class Elementwise(nn.Module):
    """Blocks, of which the first is frozen and two share a weight, and a buffer that changes what they are given."""

    num_forwards: Tensor

    def __init__(self, num_blocks: int = NUM_BLOCKS) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.blocks[0].requires_grad_(False)
        self.blocks[2].weight = self.blocks[1].weight
        self.register_buffer("num_forwards", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        self.num_forwards += 1
        x = x * (1 + self.num_forwards / 64)
        for block in self.blocks:
            x = block(x)
        return x


Groups = list[dict[str, Any]]


@dataclass(frozen=True)
class Run:
    """One directory."""

    precision: zo.Precision
    tiers: dict[str, Any]
    world_size: int = 1
    make: Callable[[Groups], torch.optim.Optimizer] = lambda groups: zo.AdamW(groups, lr=2e-2)
    num_directories: int = 1
    settings: dict[str, Any] = field(default_factory=dict)
    grows: bool = False
    """True if the last block is added by a second call of zo.offload."""
    saves: bool = False
    """True if the run writes a checkpoint beside its directory."""


NVME = {"params": "nvme", "optimizer": "nvme", "grads": "nvme"}
SPLIT = {"params": "cpu", "optimizer": "nvme"}
CPU = {"params": "cpu", "optimizer": "cpu"}

RUNS = {
    "nvme-fp32": Run(zo.Precision("fp32"), NVME, saves=True),
    "nvme-bf16": Run(zo.Precision("bf16"), NVME, saves=True),
    "nvme-fp16": Run(zo.Precision("fp16"), NVME, saves=True),
    "nvme-compact": Run(zo.Precision("bf16", states="compact"), NVME, saves=True),
    "nvme-bf16-states": Run(zo.Precision("fp32", states="bf16"), NVME),
    "cpu-fp32": Run(zo.Precision("fp32"), CPU),
    "cpu-bf16": Run(zo.Precision("bf16"), CPU, settings={"durability": "commit"}),
    "split-compact": Run(zo.Precision("fp32", states="compact"), SPLIT),
    "mixed-bf16": Run(zo.Precision("bf16", modules={"blocks.3": "fp32"}), {"optimizer": {"cpu": 0.5, "nvme": 0.5}}),
    "amsgrad": Run(zo.Precision("bf16"), SPLIT, make=lambda groups: zo.Adam(groups, lr=2e-2, amsgrad=True)),
    "momentum": Run(zo.Precision("fp16"), CPU, make=lambda groups: zo.SGD(groups, lr=0.1, momentum=0.9)),
    "striped": Run(zo.Precision("bf16"), NVME, num_directories=2),
    "grown": Run(zo.Precision("bf16"), NVME, grows=True),
    "two-ranks-bf16": Run(zo.Precision("bf16"), NVME, world_size=2, saves=True),
    "two-ranks-fp32": Run(zo.Precision("fp32"), CPU, world_size=2),
    "two-ranks-compact": Run(zo.Precision("bf16", states="compact"), SPLIT, world_size=2, settings={"stage": 1}),
}


@dataclass(frozen=True)
class Way:
    """How files are gone on from."""

    run: str
    tiers: dict[str, Any]
    world_size: int
    from_checkpoint: bool

    @property
    def name(self) -> str:
        place = "checkpoint" if self.from_checkpoint else "run"
        return f"{self.run} {place} on {self.world_size} {self.tiers['optimizer']}"


def ways() -> list[Way]:
    """Every directory on its own tiers and ranks, those of two ranks on one, too, and each checkpoint in memory."""
    found = []
    for name, run in RUNS.items():
        found += [Way(name, run.tiers, size, False) for size in {run.world_size, 1}]
        found += [Way(name, CPU, size, True) for size in {run.world_size, 1} if run.saves]
    return found


def directories_of(folder: Path, name: str) -> list[Path]:
    return [folder / name / f"nvme{i}" for i in range(RUNS[name].num_directories)]


def checkpoint_of(folder: Path, name: str) -> Path:
    return folder / name / "checkpoint"


def start(rank: int, run: Run, tiers: dict[str, Any], nvme: list[Path]) -> tuple[nn.Module, Any, zo.GradScaler]:
    torch.manual_seed(0)
    model = Elementwise()
    last = model.blocks[-1]
    if run.grows:
        del model.blocks[-1]
    kept = {"nvme": nvme, "existing": "resume"} | run.settings if nvme else {"durability": "scratch"}
    zo.offload(model, zo.OffloadConfig(precision=run.precision, **tiers, **kept))
    if run.grows:
        model.blocks.append(last)
        zo.offload(model)
    params = list(model.parameters())
    groups: Groups = [
        {"params": [param for param in params if param.dim() > 1], "weight_decay": 0.1},
        {"params": [param for param in params if param.dim() == 1], "weight_decay": 0.0},
    ]
    torch.manual_seed(1 + rank)
    scaler = zo.GradScaler(2.0**15, growth_interval=2, enabled=run.precision.compute == "fp16")
    return model, run.make(groups), scaler


def train(model: nn.Module, optimizer: Any, scaler: zo.GradScaler, steps: range) -> dict[str, Any]:
    """Two micro-batches a step, clipped and committed. Returns what must be equal: exact sums of outputs, and norms."""
    sums, norms = [], []
    for step in steps:
        for _ in range(2):
            x, wanted = (torch.randint(-8, 9, SHAPE) / 8 for _ in range(2))
            out = model(x).float()
            scaler.scale(out).backward(wanted)
            sums.append(math.fsum(out.double().flatten().tolist()).hex())
        scaler.unscale_(optimizer)
        norms.append(float(zo.clip_grad_norm_(model, 5.0)).hex())
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        optimizer.param_groups[0]["lr"] *= 0.9
        zo.commit(model, optimizer, extra={"next": step + 1, "words": ["ä", None, (1, 2.5)]})
    return {"sums": sums, "norms": norms, "scale": scaler.get_scale()}


def digests(tensors: dict[str, Tensor]) -> dict[str, str]:
    """Of values in fp32, whatever they rest in."""
    values = {name: value.detach().float().numpy().tobytes() for name, value in tensors.items()}
    return {name: hashlib.sha256(value).hexdigest()[:16] for name, value in values.items()}


def masters_of(model: nn.Module, world_size: int) -> dict[str, str]:
    """Digests of the fp32 masters; on several ranks of the values in the compute dtype, which all can gather."""
    if world_size == 1:
        return digests(read_masters(model))
    with zo.gathered(model) as params:
        return digests({name: param.detach().clone() for name, param in params.items()})


def first_steps(rank: int, world_size: int, name: str, folder: Path) -> None:
    """Write a directory, and the checkpoint."""
    run = RUNS[name]
    model, optimizer, scaler = start(rank, run, run.tiers, directories_of(folder, name))
    train(model, optimizer, scaler, range(FIRST_STEPS))
    if run.saves:
        zo.save_checkpoint(model, optimizer, checkpoint_of(folder, name), extra={"saved": True})
    zo.close(model)


def go_on(rank: int, world_size: int, way: Way, folder: Path) -> dict[str, Any]:
    """The states in the files, and those after three steps more."""
    run = RUNS[way.run]
    nvme = [] if way.from_checkpoint else directories_of(folder, way.run)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*random number generators of 2 ranks")
        model, optimizer, scaler = start(rank, run, way.tiers, nvme)
        if way.from_checkpoint:
            found = zo.load_checkpoint(model, optimizer, checkpoint_of(folder, way.run), scaler)
        else:
            resumed = zo.resume(model, optimizer, scaler)
            assert resumed is not None
            found = resumed
        held = masters_of(model, world_size)
        trained = train(model, optimizer, scaler, range(found.step, found.step + MORE_STEPS))
        result = {
            "step": found.step,
            "extra": repr(found.extra),
            "held": held,
            "buffer": int(model.num_forwards),
            "trained": trained,
            "after": masters_of(model, world_size),
        }
        zo.close(model)
    return result


def main() -> None:
    commit = subprocess.check_output(["git", "rev-parse", "--short=7", "HEAD"], text=True).strip()
    target = FOLDER / f"{commit}.tar.xz"
    assert not target.exists(), f"{target} is there already; files of a commit are never written again"
    with contextlib.closing(RankPools()) as pools, tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "runs"
        for name, run in RUNS.items():
            (folder / name).mkdir(parents=True)
            if run.world_size == 1:
                first_steps(0, 1, name, folder)
            else:
                pools.of(run.world_size).succeed(first_steps, name, folder)
        with tarfile.open(target, "w:xz", preset=9) as archive:
            archive.add(folder, arcname=".")
        expected = {}
        for i, way in enumerate(ways()):
            copied = Path(temporary) / str(i)
            unpack(commit, copied)
            expected[way.name] = outcome(way, copied, pools)
    (FOLDER / f"{commit}.json").write_text(json.dumps(expected, indent=1) + "\n")


def outcome(way: Way, folder: Path, pools: RankPools | None) -> list[dict[str, Any]]:
    """Of each rank. `pools` is not needed for one."""
    if pools is None or way.world_size == 1:
        return [go_on(0, 1, way, folder)]
    found: list[dict[str, Any]] = pools.of(way.world_size).succeed(go_on, way, folder)
    return found


def unpack(commit: str, folder: Path) -> None:
    with tarfile.open(FOLDER / f"{commit}.tar.xz") as archive:
        archive.extractall(folder, filter="data")


if __name__ == "__main__":
    from tests.formats import runs

    runs.main()  # of the module by its own name, under which other processes find its functions
