"""Several samples in one row, which do not see each other.

TRL packs (`pack_dataset`, by best fit), and in a packed row each sample's positions begin anew (`PackedRows`). By them
transformers keeps attention within a sample, if the model is called without a cache, and if its mask and its layers
know positions: `PACKED` lists those that were tried. Others see one sample per row. TRL's own collator would join all
rows of a batch into one, whose attention costs a batch times as much where no varlen kernel is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

# fmt: off
PACKED = frozenset((
    "arcee", "codegen", "cohere", "cohere2", "ernie4_5", "exaone4", "gemma", "gemma2", "gemma3_text", "glm", "glm4",
    "glm4_moe", "gpt2", "gpt_bigcode", "gpt_neox", "gptj", "granite", "granitemoe", "helium", "hunyuan_v1_dense",
    "llama", "ministral", "mistral", "mixtral", "nemotron", "olmo", "olmo2", "olmoe", "phi", "phi3", "phimoe", "qwen2",
    "qwen2_moe", "qwen3", "qwen3_moe", "seed_oss", "smollm3", "stablelm", "starcoder2",
))
# fmt: on
"""Models, by `model_type`, whose attention stays within a sample of a packed row."""


class PackedRows:
    """A collator: rows of one sample or several become input_ids, labels and position_ids of one batch.

    There is no attention mask: transformers finds the samples by their positions, which begin at 0. Padding behind the
    end of a shorter row goes on with its last sample's positions; nothing before it sees it.
    """

    def __init__(self, pad_token_id: int) -> None:
        self._pad = pad_token_id

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        """Tensors of (rows, length of the longest row)."""
        length = max(len(row["input_ids"]) for row in rows)
        columns: dict[str, list[list[int]]] = {"input_ids": [], "labels": [], "position_ids": []}
        for row in rows:
            num_more = length - len(row["input_ids"])
            positions = [at for samples in row.get("seq_lengths") or [length - num_more] for at in range(samples)]
            # The sample before does not predict the first token of the next.
            labels = [label if at else -100 for at, label in zip(positions, row["labels"], strict=True)]
            columns["input_ids"].append([*row["input_ids"], *[self._pad] * num_more])
            columns["labels"].append([*labels, *[-100] * num_more])
            columns["position_ids"].append([*positions, *range(positions[-1] + 1, positions[-1] + 1 + num_more)])
        return {name: torch.tensor(value, dtype=torch.long, device="cpu") for name, value in columns.items()}


def pack(table: Any, seq: int) -> Any:
    """An Arrow table of samples as rows of up to `seq` tokens, with a column "seq_lengths"."""
    from datasets import Dataset, are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
    from trl.data_utils import pack_dataset

    shows_bars = not are_progress_bars_disabled()
    disable_progress_bars()
    try:
        packed = pack_dataset(Dataset(table), seq, "bfd", {"keep_in_memory": True})
    finally:
        if shows_bars:
            enable_progress_bars()
    return packed.with_format("arrow")[:].select([*table.column_names, "seq_lengths"])
