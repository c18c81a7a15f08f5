"""`zero-offload evaluate DIR --data FILES`: the loss of a folder's model on data, its weights streamed.

Owns the flags, and what a batch is measured by: the model's own loss. Data become tokens as in `finetune`.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from zero_offload.base.errors import ConfigError, NonFiniteError
from zero_offload.cli.parsers import EVALUATE_SEQ
from zero_offload.cli.reading import open_checked, open_for_reading
from zero_offload.finetune.choices import CAUSAL, CLASSIFY
from zero_offload.finetune.model.folder import ModelFolder
from zero_offload.finetune.model.text_generation import write_text
from zero_offload.finetune.scores import NO_LABEL, Score, mean_loss
from zero_offload.finetune.settings import TASKS
from zero_offload.model.api import close, need_runtime
from zero_offload.runs.terminal import printable

_SAMPLE_TOKENS = 128

Row = dict[str, Any]


def run(args: argparse.Namespace) -> int:
    for flag, value, least in (("--batch", args.batch, 1), ("--eval-samples", args.eval_samples, 0)):
        if value < least:
            raise ConfigError(f"{flag} {value} is below {least}")
    folder = open_checked(args, TASKS[args.method])
    from zero_offload.finetune.data.prepare import prepare

    seq = min(EVALUATE_SEQ, folder.num_positions) if args.seq is None else args.seq
    prepared = prepare(args.data, folder, method=args.method, seq=seq, packing=False)
    _check_labels(folder, prepared.labels)
    if args.eval_samples and folder.task == CAUSAL:
        folder.check_generation(do_sample=False)
    model = open_for_reading(folder, args)
    try:
        is_first = not dist.is_initialized() or dist.get_rank() == 0
        if is_first and not args.json:
            print(prepared.note, flush=True)
        torch.manual_seed(args.seed)
        started = time.monotonic()
        collate = prepared.collator or Padded(folder.tokenizer.pad_token_id)
        device = need_runtime(model, "evaluate").device.torch_device
        score = mean_loss(prepared.train, collate, args.batch, partial(_measured, model), device)
        seconds = time.monotonic() - started
        answers = list(_answers(model, folder, prepared.train, args.eval_samples))
    finally:
        close(model)
    _check_finite(args, score)
    if is_first:
        _print(args, score, prepared.counts.to_dict(), seconds, answers)
    return 0


def _check_finite(args: argparse.Namespace, score: Score) -> None:
    """Raise where the data have no loss, or none that is a number."""
    if not score.count:
        raise ConfigError(f"nothing in {' '.join(args.data)} has a loss: the model should write none of its tokens")
    if not math.isfinite(score.loss):
        raise NonFiniteError(
            f"the loss of {args.dir} on {' '.join(args.data)} is {score.loss}, over {score.count:,} that have one. "
            "Weights are not finite, or values overflow in this precision: try --precision fp32"
        )


def _check_labels(folder: ModelFolder, labels: Sequence[str]) -> None:
    known = list(folder.config.id2label.values()) if folder.task == CLASSIFY else []
    if folder.task == CLASSIFY and list(labels) != known:
        raise ConfigError(
            f"the data have the classes {', '.join(labels)}, and the model {', '.join(map(str, known))}; "
            "give data of the model's classes"
        )


class Padded:
    """A collator: rows become a batch as long as its longest."""

    def __init__(self, pad_token_id: int) -> None:
        self._pad = pad_token_id

    def __call__(self, rows: Sequence[Row]) -> dict[str, torch.Tensor]:
        """input_ids, attention_mask and labels: (rows, length of the longest row)."""
        length = max(len(row["input_ids"]) for row in rows)

        def filled(values: Sequence[Sequence[int]], padding: int) -> torch.Tensor:
            padded = [[*each, *[padding] * (length - len(each))] for each in values]
            return torch.tensor(padded, dtype=torch.long, device="cpu")

        ids = [row["input_ids"] for row in rows]
        return {
            "input_ids": filled(ids, self._pad),
            "attention_mask": filled([[1] * len(each) for each in ids], 0),
            "labels": filled([row["labels"] for row in rows], NO_LABEL),
        }


def _measured(model: Any, inputs: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int, int]:
    """The loss of a batch, what has one, and what is right."""
    inputs = {name: value.to(need_runtime(model, "evaluate").device.torch_device) for name, value in inputs.items()}
    with torch.no_grad():
        found = model(**inputs)
    labels, guesses, predicts_next = inputs["labels"], found.logits.argmax(-1), bool(model.can_generate())
    if predicts_next:
        labels, guesses = labels[:, 1:], guesses[:, :-1]
    counts = labels != NO_LABEL
    return found.loss, int(counts.sum()), int((guesses[counts] == labels[counts]).sum())


def _answers(model: Any, folder: ModelFolder, rows: Any, num: int) -> Iterator[tuple[str, str]]:
    """Prompts and what the model answers, of the first rows. Every rank runs each forward."""
    if folder.task != CAUSAL:
        return
    device = need_runtime(model, "evaluate").device.torch_device
    for index in range(min(num, len(rows))):
        row = rows[index]
        learned = next(at for at, label in enumerate(row["labels"]) if label != NO_LABEL)
        ids = torch.tensor([row["input_ids"][: max(learned, 1)]], dtype=torch.long, device=device)
        written = write_text(model, folder.tokenizer, ids, max_new_tokens=_SAMPLE_TOKENS, do_sample=False)
        prompt, answer = (folder.tokenizer.decode(each, skip_special_tokens=True) for each in (ids[0], written))
        yield prompt, answer


def _print(
    args: argparse.Namespace,
    score: Score,
    counts: dict[str, int],
    seconds: float,
    answers: Sequence[tuple[str, str]],
) -> None:
    words: Row = {
        "loss": score.loss,
        "perplexity": score.perplexity,
        "accuracy": score.num_correct / max(score.count, 1),
    }
    if args.json:
        words |= {} if math.isfinite(score.perplexity) else {"perplexity": None}  # JSON has no infinity
        facts = {"dir": str(args.dir), **words, "count": score.count, "seconds": round(seconds, 3), "data": counts}
        said = [{"prompt": prompt, "answer": answer} for prompt, answer in answers]
        print(json.dumps(facts | ({"answers": said} if said else {})))
        return
    for prompt, answer in answers:
        print(f"{printable(prompt).strip()}\n-> {printable(answer).strip()}\n")
    what = "samples" if args.method == "classify" else "tokens"
    figures = f"loss {score.loss:.4f}, perplexity {score.perplexity:.2f}, {100 * words['accuracy']:.1f}% right"
    print(f"{figures}, over {score.count:,} {what} in {seconds:.1f} s")
