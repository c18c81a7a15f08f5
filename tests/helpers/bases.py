"""A model with small trained parts over a frozen base, and folders that hold the base."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import zero_offload as zo
from tests.helpers.models import TinyLM, build, tokens_of

DIM = 320
"""Files of several blocks, whose tensors begin at any byte."""


class Adapted(TinyLM):
    """A frozen model with a trained scale behind each block."""

    def __init__(self, dim: int = DIM) -> None:
        super().__init__(dim, num_blocks=3)
        self.requires_grad_(False)
        self.scales = nn.ParameterList(nn.Parameter(torch.ones(dim)) for _ in self.blocks)

    def run_blocks(self, x: Tensor) -> Tensor:
        for block, scale in zip(self.blocks, self.scales, strict=True):
            x = block(x) * scale.to(x.dtype)
        return x


@functools.cache
def base_weights(seed: int = 1, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    model = build(Adapted, seed)
    return {name: param.detach().to(dtype).clone() for name, param in model.named_parameters()}


def write_base(folder: Path, seed: int = 1, dtype: torch.dtype = torch.bfloat16, num_files: int = 2) -> Path:
    """Tensors of a layer are dealt to several files; a tensor of an odd size makes the others begin anywhere."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = base_weights(seed, dtype)
    names = [f"model-{number + 1:05d}-of-{num_files:05d}.safetensors" for number in range(num_files)]
    where = {name: names[number % num_files] for number, name in enumerate(sorted(weights))}
    for file in names:
        save_file({name: values for name, values in weights.items() if where[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return folder


def settings(nvme: Path | str | None, **more: Any) -> zo.OffloadConfig:
    given = {"params": "nvme", "optimizer": "cpu", "grads": "cpu"} if nvme is not None else {}
    return zo.OffloadConfig(nvme=None if nvme is None else str(nvme), precision="bf16", **given | more)


def opened(folder: Path | None, config: zo.OffloadConfig, *, skips: bool = True) -> tuple[Any, zo.AdamW]:
    """An offloaded model, loaded from a folder if there is one."""
    torch.manual_seed(0)
    with zo.deferred_init(values="skip" if skips else "init"):
        model = Adapted()
    zo.offload(model, config)
    if folder is not None:
        zo.load_pretrained(model, folder)
    return model, zo.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-2)


def steps(model: Any, optimizer: zo.AdamW, first: int, last: int, *, commits: bool = True) -> list[float]:
    losses = []
    for seed in range(first, last):
        loss = model(tokens_of(seed))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if commits:
            zo.commit(model, optimizer, extra={"step": seed})
        losses.append(loss.item())
    return losses


# Jobs of ranks


def train_on_ranks(
    rank: int, world_size: int, folder: str | None, given: dict[str, Any], first: int, last: int
) -> tuple[list[float], int, bool]:
    """Losses, the bytes that this rank has read of a step, and whether all frozen parts rest in the base."""
    from tests.helpers.disk import runtime

    model, optimizer = opened(None, settings(**given))
    try:
        resumed = zo.resume(model, optimizer) if given.get("existing") == "resume" else None
        if folder is not None:
            zo.load_pretrained(model, folder)
        begin = resumed.step if resumed is not None else first
        losses = steps(model, optimizer, begin, last)
        rests = all(shard.base is not None for shard in runtime(model).store.shards if not shard.layout.trainable)
        return losses, zo.stats(model).read_bytes["nvme"], rests
    finally:
        zo.close(model)
