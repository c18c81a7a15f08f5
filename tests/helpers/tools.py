"""Common parts of the tests of tools: a small Llama, its data, and the environment that a launcher and accelerate leave
in a process.

Import this before transformers or accelerate: it keeps them off the network, the device and the progress bars.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, TypeVar
from unittest import mock

os.environ.update(
    HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", ACCELERATE_USE_CPU="true", TRANSFORMERS_VERBOSITY="error"
)

import torch  # noqa: E402
import transformers  # noqa: E402
import transformers.models.llama.modeling_llama  # noqa: E402
import transformers.trainer  # noqa: E402
from accelerate.state import AcceleratorState, GradientState  # noqa: E402
from torch import Tensor, nn  # noqa: E402
from torch.utils.data import Dataset  # noqa: E402

import zero_offload as zo  # noqa: E402
from tests.helpers.ranks import RankPools  # noqa: E402
from zero_offload.standins.owners import owner_of  # noqa: E402

T = TypeVar("T")
VOCAB = 128
WHERE = ("cpu", "nvme")
"""Where parameters and optimizer states rest."""


def llama(**changes: Any) -> transformers.LlamaForCausalLM:
    """Three blocks of width 64, with the same values in each call."""
    torch.manual_seed(0)
    settings = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "use_cache": False,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**(settings | changes)))


class Tokens(Dataset[dict[str, Tensor]]):
    """Random rows of tokens, which are their own labels."""

    def __init__(self, num_rows: int = 64, length: int = 16, seed: int = 1) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.rows = torch.randint(3, VOCAB, (num_rows, length), generator=generator)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        row = self.rows[index]
        return {"input_ids": row, "labels": row, "attention_mask": torch.ones_like(row)}


def config(where: str, folder: Path | str, **changes: Any) -> zo.OffloadConfig:
    """fp32 with everything on a tier; `folder` holds the files of "nvme"."""
    settings: dict[str, Any] = {"precision": "fp32"}
    if where == "nvme":
        settings |= {"params": "nvme", "optimizer": "nvme", "nvme": str(folder), "existing": "discard"}
    return zo.OffloadConfig(**(settings | changes))


def values_of(model: nn.Module) -> dict[str, Tensor]:
    """Copies of all parameters in fp32 on the host, of an offloaded model one after the other. Collective."""
    found = {}
    for name, param in model.named_parameters():
        with zo.gathered(param) if owner_of(param) is not None else nullcontext():
            found[name] = param.detach().to("cpu", torch.float32, copy=True)
    return found


def distance(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """The largest difference of two values."""
    assert ours.keys() == theirs.keys()
    return max((ours[name] - theirs[name]).abs().max().item() for name in ours)


def reset_accelerate() -> None:
    """Its settings are those of the process: the next test chooses its own."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@contextmanager
def launched(rank: int, world_size: int) -> Iterator[None]:
    """A rank of a `RankPool` finds what torchrun would have set, and leaves nothing of accelerate behind."""
    found = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    env = {name: str(value) for name, value in found.items()} | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}
    with mock.patch.dict(os.environ, env if world_size > 1 else {}):
        reset_accelerate()
        try:
            yield
        finally:
            reset_accelerate()


def on_ranks(pools: RankPools, world_size: int, job: Callable[..., T], *args: Any) -> list[T]:
    """`job(rank, world_size, *args)` on every rank; one rank is this process."""
    return [job(0, 1, *args)] if world_size == 1 else pools.of(world_size).succeed(job, *args)
