"""The mean loss over data: each token with a loss counts once, whatever its batch and rank.

Owns which rows come in which batch, so an evaluation by `evaluate` and one while `finetune` trains mask the same words.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

NO_LABEL = -100


@dataclass(frozen=True)
class Score:
    """A mean over all ranks."""

    loss: float
    count: int
    """Tokens with a loss; of classes, samples."""
    num_correct: int
    """Of these, those whose likeliest token or class is the right one."""

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss) if self.loss < 700 else math.inf


def mean_loss(
    rows: Any,
    collate: Callable[[list[Any]], dict[str, torch.Tensor]],
    batch: int,
    measure: Callable[[dict[str, torch.Tensor]], tuple[torch.Tensor, int, int]],
    device: torch.device,
) -> Score:
    """The mean over all of `rows`, a datasets.Dataset. Every rank must call, with the same rows.

    `measure` gives of a batch the mean loss, how many have one, and how many are right. Each rank computes its part,
    `batch` rows at once, longest first. All run as many forwards: where rows run out, a rank repeats one, which does
    not count.
    """
    rank, num_ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    order = sorted(range(len(rows)), key=lambda index: -len(rows[index]["input_ids"]))
    total = torch.zeros(3, dtype=torch.float64, device="cpu")
    for begin in range(0, len(order), batch * num_ranks):
        mine = order[begin : begin + batch * num_ranks][rank::num_ranks]
        inputs = collate([rows[index] for index in mine or order[:1]])
        loss, count, num_correct = measure(inputs)
        if mine and count:
            total += torch.tensor([loss.double().item() * count, count, num_correct], dtype=torch.float64, device="cpu")
    if num_ranks > 1:
        total = total.to(device)
        dist.all_reduce(total)
    loss_sum, num, right = total.tolist()
    return Score(loss_sum / num if num else math.nan, int(num), int(right))


def has_loss(labels: torch.Tensor, *, predicts_next: bool) -> torch.Tensor:
    """True for each label that has a loss: a model that predicts the next token predicts no row's first."""
    return (labels[:, 1:] if predicts_next else labels) != NO_LABEL


def loss_of_labels(outputs: Any, labels: torch.Tensor, num_items_in_batch: torch.Tensor | None = None) -> torch.Tensor:
    """The loss of encoders, for Trainer: the mean over all labels of an optimizer step, or of a batch without one.

    Trainer takes it that models divide by `num_items_in_batch`. Most encoders in transformers ignore it and return the
    batch's mean, so that micro-batches would add up. A batch in which no word is masked has the loss 0.
    """
    logits = outputs["logits"].float()
    total = F.cross_entropy(logits.view(-1, logits.shape[-1]), labels.view(-1), reduction="sum", ignore_index=NO_LABEL)
    count = (labels != NO_LABEL).sum() if num_items_in_batch is None else num_items_in_batch
    return total / count.clamp(min=1)
