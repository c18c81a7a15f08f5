"""From files of conversations, pairs, text, preferences or labels to datasets of tokens, masked and counted.

[Note: the file of tokens]
Rows are tokenized once, a few at a time, into an Arrow file that `datasets` maps into memory: no data need fit memory.
Its name comes from the data's bytes, the tokenizer and the settings, so a file that is there holds the same tokens, at
each start and on each rank. One process at a time works in the folder, under a lock; the others find the file. It is
renamed when it is whole, and deletes those before it.

[Note: packing]
TRL packs (`pack_dataset`, by best fit), here and not in its trainer: the number of rows is known before there is a
trainer. In a packed row each sample's positions begin anew (`PackedRows`). By them transformers keeps attention within
a sample, if the model is called without a cache, and if its mask and its layers know positions: `PACKED` lists those
that were tried. Others see one sample per row. TRL's own collator would join all rows of a batch into one, whose
attention costs a batch times as much where no varlen kernel is.
"""

from __future__ import annotations

import atexit
import fcntl
import hashlib
import json
import math
import random
import shutil
import statistics
import tempfile
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from zero_offload.base.errors import ConfigError, StorageError
from zero_offload.cli.finetune.folder import CAUSAL, CLASSIFY, MASKED, ModelFolder, check_chat_template
from zero_offload.cli.finetune.rows import (
    CONVERSATIONS,
    LABELLED,
    PAIRS,
    PREFERENCES,
    TEXT,
    BadRow,
    Form,
    form_of,
    messages_of,
    pair_of,
    preference_of,
    text_in,
    tools_of,
)
from zero_offload.cli.finetune.sources import Row, Source, find_sources
from zero_offload.cli.finetune.turns import ChatTemplate, Sample, tokens_of

if TYPE_CHECKING:
    from datasets import Dataset

SFT, DPO, MLM, CLASSES = METHODS = ("sft", "dpo", "mlm", "classify")
_KINDS = {SFT: (CONVERSATIONS, PAIRS, TEXT, LABELLED), DPO: (PREFERENCES,), MLM: (TEXT, LABELLED), CLASSES: (LABELLED,)}
_TASKS = {SFT: CAUSAL, DPO: CAUSAL, MLM: MASKED, CLASSES: CLASSIFY}
_TOKENS_VERSION = 1
"""Of the tokens that this code makes of the same data."""
_BATCH = 1000
"""Rows at once; so many samples does TRL pack at once, too."""

# fmt: off
PACKED = frozenset((
    "arcee", "codegen", "cohere", "cohere2", "ernie4_5", "exaone4", "gemma", "gemma2", "gemma3_text", "glm", "glm4",
    "glm4_moe", "gpt2", "gpt_bigcode", "gpt_neox", "gptj", "granite", "granitemoe", "helium", "hunyuan_v1_dense",
    "llama", "ministral", "mistral", "mixtral", "nemotron", "olmo", "olmo2", "olmoe", "phi", "phi3", "phimoe", "qwen2",
    "qwen2_moe", "qwen3", "qwen3_moe", "seed_oss", "smollm3", "stablelm", "starcoder2",
))
# fmt: on
"""Models, by `model_type`, whose attention stays within a sample of a packed row."""


@dataclass(frozen=True)
class Counts:
    """What became of the rows of one use, training or evaluation. Tokens are those of one epoch."""

    read: int
    samples: int
    rows: int
    """What a Trainer counts; where packed, a row is several samples."""
    truncated: int
    """Samples that were longer than `seq`, and are cut there."""
    divided: int
    """Texts that were longer than `seq`, and are several samples."""
    unfolded: int
    """Conversations that are several samples; see turns.py."""
    empty: int
    """Rows and samples that are left out: no token of them would be trained."""
    tokens: int
    trained: int
    """Tokens with loss; of mlm, those that may be masked."""
    median: int
    longest: int
    """Of the samples, in tokens."""

    def to_dict(self) -> dict[str, int]:
        """For JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Prepared:
    """Data as a Trainer takes them."""

    method: str
    """"sft", "dpo", "mlm" or "classify"."""
    kind: str
    """What the rows are: one of the kinds of rows.py, or several of them."""
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
    known, left = _read_forms(data)
    chosen = _method_of(known, method, folder.task)
    packing = packing and chosen == SFT and folder.config.model_type in PACKED
    uses = [_Use("train", known, _Part(split, seed, is_kept=False), packing)]
    if split:
        uses.append(_Use("eval", known, _Part(split, seed, is_kept=True), False))
    elif eval_data:
        others, more_left = _read_forms(eval_data)
        left += more_left
        _method_of(others, chosen, folder.task)
        uses.append(_Use("eval", others, _Part(0.0, seed, is_kept=False), False))
    maker = _MAKERS[chosen](folder, seq, known)
    if cache is None:
        cache = Path(tempfile.mkdtemp(prefix="zero_offload-data-"))
        atexit.register(shutil.rmtree, cache, ignore_errors=True)
    files = _TokenFiles(cache, maker, seq)
    made = [files.of(use) for use in uses]
    counts = [each for _, each in made]
    return Prepared(
        method=chosen,
        kind=_kinds(known),
        train=made[0][0],
        evaluation=made[1][0] if len(made) > 1 else None,
        counts=counts[0],
        evaluation_counts=counts[1] if len(made) > 1 else None,
        labels=maker.labels,
        note="\n".join(_said(uses, counts, left, maker, seq)),
        key=files.key(uses[0]),
        collator=PackedRows(folder.tokenizer.pad_token_id) if packing else maker.collator(),
        trainer_settings=maker.trainer_settings(),
    )


def kind_of(data: Sequence[str]) -> str:
    """What the rows are, by the columns of each source's first."""
    return _kinds(_read_forms(data)[0])


class PackedRows:
    """A collator: rows of one sample or several become input_ids, labels and position_ids of one batch.

    There is no attention mask: transformers finds the samples by their positions, which begin at 0. What is behind the
    end of a shorter row goes on with its last sample's positions; nothing before it sees it.
    """

    def __init__(self, pad_token_id: int) -> None:
        self._pad = pad_token_id

    def __call__(self, rows: Sequence[Row]) -> dict[str, torch.Tensor]:
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


# What is there


@dataclass(frozen=True)
class _Known:
    """A source, and how its rows are read."""

    source: Source
    form: Form
    columns: tuple[str, ...]


def _read_forms(words: Sequence[str]) -> tuple[list[_Known], list[str]]:
    sources, left = find_sources(words)
    if not sources:
        raise ConfigError("there are no data; give files, folders of files, or the name of a dataset")
    known = []
    for source in sources:
        _, first = next(source.rows(), (None, None))
        if first is None:
            raise ConfigError(f"{source.name} has no row")
        known.append(_Known(source, form_of(tuple(first), source.name), tuple(first)))
    return known, left


def _kinds(known: Sequence[_Known]) -> str:
    return " and ".join(dict.fromkeys(each.form.kind for each in known))


def _method_of(known: Sequence[_Known], method: str, task: str) -> str:
    """The method that goes with every source. Raises ConfigError where the one that was asked for does not."""
    if method not in ("auto", *METHODS):
        raise ConfigError(f"method={method!r} is none of auto, {', '.join(METHODS)}")
    fitting = [name for name in METHODS if _TASKS[name] == task and method in ("auto", name)]
    for each in known:
        kind = each.form.kind
        fitting = [name for name in fitting if kind in _KINDS[name]]
        if not fitting:
            ways = [name for name in METHODS if kind in _KINDS[name]]
            raise ConfigError(
                f"{each.source.name} holds {kind}, by {', '.join(each.form.columns)}, which "
                f"{'a ' + task + ' model' if method == 'auto' else 'method ' + method} does not take"
                f"{'' if len(known) == 1 else ' beside the other data'}; it goes with --method {' or '.join(ways)}"
            )
    return fitting[0]


def _check_numbers(folder: ModelFolder, seq: int, split: float, eval_data: Sequence[str]) -> None:
    if seq < 2:
        raise ConfigError(f"seq={seq}: a row has at least 2 tokens, one to see and one to say")
    limit = getattr(folder.config.get_text_config(), "max_position_embeddings", None)
    if folder.task != CAUSAL:
        limit = min(limit or folder.tokenizer.model_max_length, folder.tokenizer.model_max_length)
    if limit is not None and 0 < limit < seq:
        raise ConfigError(f"seq={seq}, and {folder.path} has positions for {limit} tokens; give --seq {limit}")
    if not 0 <= split < 1:
        raise ConfigError(f"split={split} is the fraction kept for evaluation: from 0 to below 1")
    if split and eval_data:
        raise ConfigError("data for evaluation are given, and a split of the data as well; leave one of them out")


@dataclass(frozen=True)
class _Part:
    """Which rows a use takes: of every 1 / split one is kept for evaluation, which one is drawn."""

    split: float
    seed: int
    is_kept: bool
    """True if the use takes those that are kept."""

    def takes(self) -> Iterator[bool]:
        """Of each row in order, True if the use takes it."""
        if not self.split:
            while True:
                yield True
        draw, begin, block = random.Random(f"split {self.seed}"), 0, 0
        while True:
            block += 1
            end = math.ceil(block / self.split)
            kept = draw.randrange(begin, end)
            for number in range(begin, end):
                yield (number == kept) == self.is_kept
            begin = end


@dataclass(frozen=True)
class _Use:
    name: str
    known: Sequence[_Known]
    part: _Part
    is_packed: bool

    def rows(self) -> Iterator[tuple[str, Row, Form]]:
        takes = self.part.takes()
        for each in self.known:
            for place, row in each.source.rows():
                if next(takes):
                    yield place, row, each.form


@dataclass
class _Tally:
    """Counts on the way."""

    read: int = 0
    rows: int = 0
    truncated: int = 0
    divided: int = 0
    unfolded: int = 0
    empty: int = 0
    trained: int = 0
    lengths: array[int] = field(default_factory=lambda: array("q"))

    def counts(self) -> Counts:
        return Counts(
            read=self.read,
            samples=len(self.lengths),
            rows=self.rows,
            truncated=self.truncated,
            divided=self.divided,
            unfolded=self.unfolded,
            empty=self.empty,
            tokens=sum(self.lengths),
            trained=self.trained,
            median=int(statistics.median(self.lengths)) if self.lengths else 0,
            longest=max(self.lengths, default=0),
        )


# Rows of each method


class _Maker:
    """Makes a method's rows of the data's."""

    trains = "the whole text"
    labels: tuple[str, ...] = ()

    def __init__(self, folder: ModelFolder, seq: int, known: Sequence[_Known]) -> None:
        self.folder, self.tokenizer, self.seq = folder, folder.tokenizer, seq

    def make(self, row: Row, form: Form, tally: _Tally) -> list[Row]:
        """A method's rows of one of the data's. Raises BadRow."""
        raise NotImplementedError

    def collator(self) -> Any:
        """None: the Trainer's own."""
        return None

    def trainer_settings(self) -> dict[str, Any]:
        """Arguments for the Trainer's config."""
        return {}


class _Sft(_Maker):
    def __init__(self, folder: ModelFolder, seq: int, known: Sequence[_Known]) -> None:
        super().__init__(folder, seq, known)
        kinds = {each.form.kind for each in known}
        self._template = None
        if kinds & {CONVERSATIONS, PAIRS} and self.tokenizer.chat_template is not None:
            self._template = ChatTemplate(self.tokenizer)
        self._eos = self.tokenizer.eos_token or ""
        self._adds_eos = self.tokenizer("a")["input_ids"][-1] == self.tokenizer.eos_token_id
        """True if the tokenizer ends each text with it by itself."""
        words = []
        if self._template is not None:
            words.append("the assistant's words in the tokenizer's chat template, the end of each turn included")
        elif PAIRS in kinds:
            words.append("the completions (there is no chat template)")
        if kinds & {TEXT, LABELLED}:
            words.append("the whole text")
        self.trains = " and ".join(words)

    def make(self, row: Row, form: Form, tally: _Tally) -> list[Row]:
        if form.kind in (TEXT, LABELLED):
            return self._text(row, tally)
        if self._template is not None:
            messages, trained_from = messages_of(row, form)
            samples = self._template.samples(messages, tools_of(row), trained_from)
            tally.unfolded += len(samples) > 1
        else:
            check = check_chat_template if form.kind == CONVERSATIONS else None
            if check is not None:
                check(self.folder)
            samples = self._pair(*pair_of(row, form))
        tally.empty += not samples
        return [made for sample in samples for made in self._cut(sample, tally)]

    def _pair(self, before: str, answer: str) -> list[Sample]:
        if not answer.strip():
            return []
        text = self._ended(before + answer)
        sample = tokens_of(self.tokenizer, text, [(len(before), len(text))], add_special_tokens=True)
        sample.trained[-1] = True
        return [sample]

    def _text(self, row: Row, tally: _Tally) -> list[Row]:
        text = text_in(row.get("text"), "text")
        if not text.strip():
            tally.empty += 1
            return []
        ids = list(self.tokenizer(self._ended(text), verbose=False)["input_ids"])
        pieces = [ids[begin : begin + self.seq] for begin in range(0, len(ids), self.seq)]
        pieces = [piece for piece in pieces if len(piece) > 1]
        tally.divided += len(pieces) > 1
        return [made for piece in pieces for made in self._cut(Sample(piece, [True] * len(piece)), tally)]

    def _ended(self, text: str) -> str:
        return text if self._adds_eos or text.endswith(self._eos) else text + self._eos

    def _cut(self, sample: Sample, tally: _Tally) -> list[Row]:
        ids, trained = sample.ids[: self.seq], sample.trained[: self.seq]
        num_trained = sum(trained[1:])  # nothing predicts the first
        if not num_trained:
            tally.empty += 1
            return []
        tally.truncated += len(ids) < len(sample.ids)
        tally.trained += num_trained
        tally.lengths.append(len(ids))
        labels = [token if is_trained else -100 for token, is_trained in zip(ids, trained, strict=True)]
        return [{"input_ids": ids, "labels": labels}]

    def trainer_settings(self) -> dict[str, Any]:
        return {"packing": False, "max_length": self.seq, "dataset_kwargs": {"skip_prepare_dataset": True}}


class _Dpo(_Maker):
    trains = "the chosen answers against the rejected"

    def __init__(self, folder: ModelFolder, seq: int, known: Sequence[_Known]) -> None:
        super().__init__(folder, seq, known)
        self._template = None if self.tokenizer.chat_template is None else ChatTemplate(self.tokenizer)
        self._in_messages: bool | None = None

    def make(self, row: Row, form: Form, tally: _Tally) -> list[Row]:
        prompt, *answers = preference_of(row)
        if isinstance(prompt, str) and row.get("prompt") is not None and self._template is not None:
            prompt = [{"role": "user", "content": prompt}]
            answers = [[{"role": "assistant", "content": answer}] for answer in answers]
        if self._in_messages is None:
            self._in_messages = isinstance(prompt, list)
        if self._in_messages != isinstance(prompt, list):
            raise BadRow("some rows are lists of messages, and others strings; give all as one of both")
        before, *wholes = self._lengths(prompt, answers)
        if answers[0] == answers[1] or before >= self.seq:
            tally.empty += 1
            return []
        cut = [min(whole, self.seq) for whole in wholes]
        tally.truncated += cut != wholes
        tally.trained += sum(cut) - 2 * before
        tally.lengths.append(sum(cut))
        return [{"prompt": prompt, "chosen": answers[0], "rejected": answers[1]}]

    def _lengths(self, prompt: Any, answers: Sequence[Any]) -> list[int]:
        """Tokens of the prompt, and of it with each answer."""
        if isinstance(prompt, list):
            if self._template is None:
                check_chat_template(self.folder)
            assert self._template is not None
            wholes = [self._template.whole([*prompt, *answer]) for answer in answers]
            return [len(self._template.prompt(prompt)), *map(len, wholes)]
        end = self.tokenizer.eos_token or ""
        texts = [prompt, *(prompt + answer + end for answer in answers)]
        return [len(self.tokenizer(text, verbose=False)["input_ids"]) for text in texts]

    def trainer_settings(self) -> dict[str, Any]:
        return {"max_length": self.seq}


class _Mlm(_Maker):
    trains = "tokens that are masked at random"

    def __init__(self, folder: ModelFolder, seq: int, known: Sequence[_Known]) -> None:
        super().__init__(folder, seq, known)
        if self.tokenizer.mask_token is None:
            raise ConfigError(f"the tokenizer of {folder.path} has no mask token, which --method mlm puts over words")

    def make(self, row: Row, form: Form, tally: _Tally) -> list[Row]:
        text = text_in(row.get("text"), "text")
        if not text.strip():
            tally.empty += 1
            return []
        encoded = self.tokenizer(
            text,
            truncation=True,
            max_length=self.seq,
            return_overflowing_tokens=True,
            return_special_tokens_mask=True,
            return_attention_mask=False,
            verbose=False,
        )
        pieces = encoded["input_ids"]
        tally.divided += len(pieces) > 1
        for ids, special in zip(pieces, encoded["special_tokens_mask"], strict=True):
            tally.lengths.append(len(ids))
            tally.trained += len(ids) - sum(special)
        return [{"input_ids": ids} for ids in pieces]

    def collator(self) -> Any:
        from transformers import DataCollatorForLanguageModeling

        return DataCollatorForLanguageModeling(self.tokenizer)


class _Classify(_Maker):
    trains = "the labels"

    def __init__(self, folder: ModelFolder, seq: int, known: Sequence[_Known]) -> None:
        super().__init__(folder, seq, known)
        is_classifier = any("ForSequenceClassification" in name for name in folder.config.architectures or ())
        if is_classifier:
            names = [folder.config.id2label[number] for number in range(folder.config.num_labels)]
        else:
            names = _names_of({_label(row) for each in known for _, row in each.source.rows()})
        self.labels = tuple(names)
        self._numbers = {name: number for number, name in enumerate(names)}
        if is_classifier:
            self._numbers = {str(number): number for number in range(len(names))} | self._numbers

    def make(self, row: Row, form: Form, tally: _Tally) -> list[Row]:
        text, label = text_in(row.get("text"), "text"), _label(row)
        if label not in self._numbers:
            raise BadRow(f"the label {label!r} is none of {', '.join(self.labels)}")
        if not text.strip():
            tally.empty += 1
            return []
        ids = self.tokenizer(text, truncation=True, max_length=self.seq, verbose=False)["input_ids"]
        tally.truncated += len(ids) == self.seq and len(self.tokenizer(text, verbose=False)["input_ids"]) > self.seq
        tally.lengths.append(len(ids))
        tally.trained += 1
        return [{"input_ids": ids, "labels": self._numbers[label]}]

    def collator(self) -> Any:
        from transformers import DataCollatorWithPadding

        return DataCollatorWithPadding(self.tokenizer)


_MAKERS: dict[str, type[_Maker]] = {SFT: _Sft, DPO: _Dpo, MLM: _Mlm, CLASSES: _Classify}


def _label(row: Row) -> str:
    label = row.get("label")
    if isinstance(label, float) or not isinstance(label, (str, int)) or label == "":
        raise BadRow(f"'label' is {label!r}, not a name or a whole number")
    return str(label)


def _names_of(labels: set[str]) -> list[str]:
    """Numbers count from 0; names are in order."""
    if len(labels) < 2:
        raise ConfigError(f"the data have {len(labels)} label ({', '.join(labels)}); a classifier needs two at least")
    if all(label.isdecimal() for label in labels):
        return [str(number) for number in range(max(map(int, labels)) + 1)]
    return sorted(labels)


# The file of tokens


class _TokenFiles:
    """The folder of such files; see [Note: the file of tokens]."""

    def __init__(self, folder: Path, maker: _Maker, seq: int) -> None:
        self._folder, self._maker, self._seq = folder, maker, seq
        self._words = [_TOKENS_VERSION, type(maker).__name__, seq, maker.labels, _tokenizer_digest(maker.tokenizer)]
        self._digests: dict[Source, str] = {}

    def key(self, use: _Use) -> str:
        """What the file of a use is named by."""
        data = []
        for each in use.known:
            if each.source not in self._digests:
                self._digests[each.source] = each.source.digest()
            data.append([each.form.kind, each.form.columns, self._digests[each.source]])
        words = [*self._words, use.is_packed, asdict(use.part) if use.part.split else None, data]
        return hashlib.sha256(json.dumps(words).encode()).hexdigest()[:16]

    def of(self, use: _Use) -> tuple[Dataset, Counts]:
        """The dataset of a use; its file is made, unless it is there."""
        from datasets import Dataset

        path = self._folder / f"{use.name}-{self.key(use)}.arrow"
        said = path.with_suffix(".json")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with (self._folder / "lock").open("w") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                if not (path.is_file() and said.is_file()):
                    for old in [*self._folder.glob(f"{use.name}-*"), *self._folder.glob("cache-*.arrow")]:
                        old.unlink()  # the latter are TRL's, of the tokens before
                    self._write(path, said, use)
            counts = Counts(**json.loads(said.read_text(encoding="utf-8")))
            return Dataset.from_file(str(path)), counts
        except OSError as error:
            raise StorageError(f"tokens cannot be written to {self._folder}: {error}") from error

    def _write(self, path: Path, said: Path, use: _Use) -> None:
        import pyarrow

        tally, temporary = _Tally(), path.with_suffix(".tmp")
        rows, writer = self._made(use, tally), None
        with temporary.open("wb") as file:
            while batch := list(islice(rows, _BATCH)):
                table = pyarrow.Table.from_pylist(batch, _schema(batch[0]))
                table = _packed(table, self._seq) if use.is_packed else table
                writer = writer or pyarrow.ipc.new_stream(file, table.schema)
                writer.write_table(table)
                tally.rows += len(table)
            if writer is None:
                raise ConfigError(_nothing(use, tally, self._seq))
            writer.close()
        temporary.rename(path)
        temporary.write_text(json.dumps(tally.counts().to_dict()), encoding="utf-8")
        temporary.rename(said)

    def _made(self, use: _Use, tally: _Tally) -> Iterator[Row]:
        for place, row, form in use.rows():
            tally.read += 1
            try:
                yield from self._maker.make(row, form, tally)
            except BadRow as error:
                raise ConfigError(f"{place}: {error}") from error


def _schema(row: Row) -> Any:
    import pyarrow

    message = pyarrow.struct([("role", pyarrow.string()), ("content", pyarrow.string())])

    def kind(value: Any) -> Any:
        if isinstance(value, list):
            return pyarrow.list_(message if isinstance(value[0], dict) else pyarrow.int32())
        return pyarrow.string() if isinstance(value, str) else pyarrow.int64()

    return pyarrow.schema([(name, kind(value)) for name, value in row.items()])


def _packed(table: Any, seq: int) -> Any:
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


def _tokenizer_digest(tokenizer: Any) -> str:
    words = json.loads(tokenizer.backend_tokenizer.to_str()) if tokenizer.is_fast else tokenizer.get_vocab()
    for setting in ("truncation", "padding"):  # of the last call
        words.pop(setting, None)
    said = [words, tokenizer.chat_template, {name: str(value) for name, value in tokenizer.special_tokens_map.items()}]
    return hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()


# Words for the user


def _nothing(use: _Use, tally: _Tally, seq: int) -> str:
    names = ", ".join(each.source.name for each in use.known)
    if not tally.read:
        return f"split={use.part.split} leaves no row of {names} for evaluation; give a larger one, or --eval-data"
    return (
        f"no row of {names} has a token to train on: all {tally.read} are left out, since they are empty, or since "
        f"what comes before the assistant's words fills seq={seq}"
    )


def _said(uses: Sequence[_Use], counts: Sequence[Counts], left: list[str], maker: _Maker, seq: int) -> Iterator[str]:
    for each in dict.fromkeys(each for use in uses for each in use.known):
        yield f"{each.source.name}: {each.form.said(each.columns)}"
    if left:
        yield f"left out, by their names: {', '.join(left)} (--eval-data takes them)"
    yield f"trained are {maker.trains}"
    for use, numbers in zip(uses, counts, strict=True):
        yield f"{'training' if use.name == 'train' else 'evaluation'}: {_numbers(numbers, seq, use.is_packed)}"


def _numbers(counts: Counts, seq: int, is_packed: bool) -> str:
    parts = [
        f"{_of(counts.read, 'row')}, {_of(counts.samples, 'sample')}, {_of(counts.tokens, 'token')}, "
        f"{counts.trained:,} of them trained; a sample has {counts.median:,} (median) to {counts.longest:,}"
    ]
    if is_packed:
        parts.append(f"packed into {_of(counts.rows, 'row')} of up to {seq:,} tokens")
    if counts.truncated:
        parts.append(f"{_of(counts.truncated, 'sample')} longer than {seq:,} tokens cut there (--seq)")
    if counts.divided:
        parts.append(f"{_of(counts.divided, 'text')} longer than {seq:,} tokens divided")
    if counts.unfolded:
        parts.append(
            f"{_of(counts.unfolded, 'conversation')} trained turn by turn: the template writes earlier turns otherwise "
            "than the model generates them"
        )
    if counts.empty:
        parts.append(f"{counts.empty:,} left out: nothing in them to train on")
    return "; ".join(parts)


def _of(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
