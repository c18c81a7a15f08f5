"""From files of conversations, pairs, text, preferences or labels to datasets of tokens, masked, packed and counted.

The way of a row: sources.py reads it, and rows.py recognises it. turns.py writes a conversation in the tokenizer's
words and says which are the assistant's. methods.py makes a method's rows of it, packing.py puts several into one, and
token_files.py keeps them on disk.
"""

from __future__ import annotations

import atexit
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zero_offload.base.errors import ConfigError
from zero_offload.finetune.data.counts import Counts
from zero_offload.finetune.data.methods import MAKERS, SFT, Maker, method_of
from zero_offload.finetune.data.packing import PACKED, PackedRows
from zero_offload.finetune.data.sources import Known, kinds_of, read_forms
from zero_offload.finetune.data.token_files import RowSplit, TokenFiles, Use
from zero_offload.finetune.model.folder import ModelFolder

if TYPE_CHECKING:
    from datasets import Dataset


@dataclass(frozen=True)
class Prepared:
    """Data as a Trainer takes them."""

    method: str
    """"sft", "dpo", "mlm" or "classify"."""
    kind: str
    """The kind of the rows: one of the kinds of rows.py, or several of them."""
    train: Dataset
    """sft: input_ids, labels (-100 where there is no loss), and seq_lengths where packed. dpo: prompt, chosen,
    rejected, as TRL takes them. mlm: input_ids. classify: input_ids, labels."""
    evaluation: Dataset | None
    """The same, never packed."""
    counts: Counts
    evaluation_counts: Counts | None
    labels: tuple[str, ...]
    """Names of the classes."""
    note: str
    """For the user: what was recognised, by which columns, and the counts."""
    key: str
    """Changes with the data, the tokenizer, and the settings that make the tokens."""
    collator: Any
    """For the Trainer; None: its own."""
    trainer_settings: dict[str, Any]
    """Arguments for SFTConfig or DPOConfig."""


def prepare(
    data: Sequence[str],
    folder: ModelFolder,
    *,
    method: str = "auto",
    seq: int,
    eval_data: Sequence[str] = (),
    split: float = 0.0,
    seed: int = 0,
    packing: bool = True,
    cache: Path | None = None,
) -> Prepared:
    """Read, recognise, tokenize, mask, pack and count.

    `data`, `eval_data`: files, folders of files, or names of datasets on the hub. `seq`: the longest row, in tokens.
    `split`: the fraction of the rows that is kept for evaluation, drawn by `seed`. `cache`: the folder for the files of
    tokens; without one they are in a temporary folder, deleted at exit.
    Raises ConfigError for data that cannot be used, with file and row, and StorageError when tokens cannot be written.
    """
    _check_numbers(folder, seq, split, eval_data)
    # The data decide the method, and the method decides whether rows may share a sequence.
    known, left = read_forms(data)
    chosen = method_of(known, method, folder.task)
    packs = packing and chosen == SFT and folder.config.model_type in PACKED
    # A use is a share of the rows: training, and evaluation from a split or from data of its own.
    uses = [Use("train", known, RowSplit(split, seed, is_kept=False), packs)]
    others: list[Known] = []
    if split:
        uses.append(Use("eval", known, RowSplit(split, seed, is_kept=True), False))
    elif eval_data:
        others, more_left = read_forms(eval_data)
        left += more_left
        method_of(others, chosen, folder.task)
        uses.append(Use("eval", others, RowSplit(0.0, seed, is_kept=False), False))
    maker = MAKERS[chosen](folder, seq, known, {each.form.kind for each in [*known, *others]})
    if cache is None:
        cache = Path(tempfile.mkdtemp(prefix="zero_offload-data-"))
        atexit.register(shutil.rmtree, cache, ignore_errors=True)
    # Tokens are made once per use, or found in the folder.
    files = TokenFiles(cache, maker, seq)
    made = [files.of(use) for use in uses]
    counts = [each for _, each in made]
    said = [*_said(uses, counts, left, maker, seq)]
    if packing and not packs and chosen == SFT:
        said.append(f"a sequence is one sample: {folder.config.model_type} models are not known to keep several apart")
    return Prepared(
        method=chosen,
        kind=kinds_of(known),
        train=made[0][0],
        evaluation=made[1][0] if len(made) > 1 else None,
        counts=counts[0],
        evaluation_counts=counts[1] if len(made) > 1 else None,
        labels=maker.labels,
        note="\n".join(said),
        key=files.key(uses[0]),
        collator=PackedRows(folder.tokenizer.pad_token_id) if packs else maker.collator(),
        trainer_settings=maker.trainer_settings(),
    )


def _check_numbers(folder: ModelFolder, seq: int, split: float, eval_data: Sequence[str]) -> None:
    if seq < 2:
        raise ConfigError(f"seq={seq}: a row has at least 2 tokens, one to see and one to say")
    if (limit := folder.num_positions) < seq:
        raise ConfigError(f"seq={seq}, and {folder.path} has positions for {limit} tokens; give --seq {limit}")
    if not 0 <= split < 1:
        raise ConfigError(f"split={split} is the fraction kept for evaluation: from 0 to below 1")
    if split and eval_data:
        raise ConfigError("data for evaluation are given, and a split of the data as well; leave one of them out")


def _said(uses: Sequence[Use], counts: Sequence[Counts], left: list[str], maker: Maker, seq: int) -> Iterator[str]:
    for each in dict.fromkeys(each for use in uses for each in use.known):
        yield f"{each.source.name}: {each.form.said(each.columns)}"
    if left:
        yield f"left out, by their names: {', '.join(left)} (--eval-data takes them)"
    yield f"loss on {maker.loss_on}"
    for use, numbers in zip(uses, counts, strict=True):
        first, *more = _numbers(numbers, seq, use.is_packed)
        name = {"train": "training", "eval": "evaluation"}[use.name] if len(uses) > 1 else "data"
        yield f"{name}: {first}"
        yield from (f"  {line}" for line in more)


def _numbers(counts: Counts, seq: int, is_packed: bool) -> Iterator[str]:
    yield f"{_of(counts.read, 'row')}, {_of(counts.tokens, 'token')}, {counts.trained:,} of them with loss"
    samples = f"{_of(counts.samples, 'sample')} of {counts.median:,} (median) to {counts.longest:,} tokens"
    yield samples + (f", packed into {_of(counts.rows, 'sequence')} of up to {seq:,}" if is_packed else "")
    if counts.truncated:
        yield f"{_of(counts.truncated, 'sample')} longer than {seq:,} tokens: cut there (--seq)"
    if counts.divided:
        yield f"{_of(counts.divided, 'text')} longer than {seq:,} tokens: divided"
    if counts.unfolded:
        yield (
            f"{_of(counts.unfolded, 'conversation')} trained turn by turn: the chat template writes earlier turns "
            "otherwise than the model generates them"
        )
    if counts.empty:
        yield f"{counts.empty:,} left out: nothing in them has a loss"


def _of(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
