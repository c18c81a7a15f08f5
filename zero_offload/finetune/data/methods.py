"""The methods of training: which rows each takes, and its rows of tokens of one of them."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence, Set
from typing import Any

from zero_offload.base.errors import ConfigError
from zero_offload.finetune.data.counts import Tally
from zero_offload.finetune.data.rows import (
    CONVERSATIONS,
    LABELLED,
    PAIRS,
    PREFERENCES,
    TEXT,
    BadRow,
    Form,
    messages_of,
    pair_of,
    preference_of,
    row_at,
    text_in,
    tools_of,
)
from zero_offload.finetune.data.sources import Known, Row
from zero_offload.finetune.data.turns import ChatTemplate, Sample, tokens_of
from zero_offload.finetune.model.folder import ModelFolder, check_chat_template, is_classifier
from zero_offload.finetune.settings import TASKS

SFT, DPO, MLM, CLASSES = METHODS = ("sft", "dpo", "mlm", "classify")
_KINDS = {SFT: (CONVERSATIONS, PAIRS, TEXT, LABELLED), DPO: (PREFERENCES,), MLM: (TEXT, LABELLED), CLASSES: (LABELLED,)}
_NUMBER = re.compile("0|[1-9][0-9]*")
_CLASSES_MAX = 100_000
"""Of labels that are numbers: one large number would make a head of as many classes."""


def method_of(known: Sequence[Known], method: str, task: str) -> str:
    """The method that goes with every source. Raises ConfigError where the given method does not go with a source."""
    if method not in ("auto", *METHODS):
        raise ConfigError(f"method={method!r} is unknown; use one of auto, {', '.join(METHODS)}")
    fitting = [name for name in METHODS if TASKS[name] == task and method in ("auto", name)]
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


class Maker:
    """Makes a method's rows of the data's. `known`: what is trained on; `kinds`: of these, and of what evaluates."""

    loss_on = "the whole text"
    labels: tuple[str, ...] = ()

    def __init__(self, folder: ModelFolder, seq: int, known: Sequence[Known], kinds: Set[str]) -> None:
        self.folder, self.tokenizer, self.seq = folder, folder.tokenizer, seq

    def make(self, row: Row, form: Form, tally: Tally) -> list[Row]:
        """A method's rows of one of the data's. Raises BadRow."""
        raise NotImplementedError

    def collator(self) -> Any:
        """None: the Trainer's own."""
        return None

    def trainer_settings(self) -> dict[str, Any]:
        """Arguments for the Trainer's config."""
        return {}


class _Sft(Maker):
    def __init__(self, folder: ModelFolder, seq: int, known: Sequence[Known], kinds: Set[str]) -> None:
        super().__init__(folder, seq, known, kinds)
        if CONVERSATIONS in kinds:
            check_chat_template(folder)
        self._template = None
        if kinds & {CONVERSATIONS, PAIRS} and self.tokenizer.chat_template is not None:
            self._template = ChatTemplate(self.tokenizer)
        self._eos = self.tokenizer.eos_token or ""
        self._adds_eos = self.tokenizer("a")["input_ids"][-1] == self.tokenizer.eos_token_id
        """True if the tokenizer ends each text with it by itself."""
        words = []
        if self._template is not None:
            words.append(f"the assistant's words in the tokenizer's chat template{self._template.remark()}")
        elif PAIRS in kinds:
            words.append("the completions (there is no chat template)")
        if kinds & {TEXT, LABELLED}:
            words.append("the whole text")
        self.loss_on = " and ".join(words)

    def make(self, row: Row, form: Form, tally: Tally) -> list[Row]:
        if form.kind in (TEXT, LABELLED):
            return self._text(row, tally)
        if self._template is not None:
            messages, trained_from = messages_of(row, form)
            samples = self._template.samples(messages, tools_of(row), trained_from)
            tally.unfolded += len(samples) > 1
        else:
            samples = self._pair(*pair_of(row, form))
        tally.empty += not samples
        return [made for sample in samples for made in self._cut(sample, tally)]

    def _pair(self, before: str, answer: str) -> list[Sample]:
        if not answer.strip():
            return []
        text = self._ended(before + answer)
        sample = tokens_of(self.tokenizer, text, [(len(before), len(text))], add_special_tokens=True)
        if not sample.ids:
            return []
        sample.trained[-1] = True
        return [sample]

    def _text(self, row: Row, tally: Tally) -> list[Row]:
        text = text_in(row.get("text"), "text")
        if not text.strip():
            tally.empty += 1
            return []
        ids = list(self.tokenizer(self._ended(text), verbose=False)["input_ids"])
        pieces = [ids[begin : begin + self.seq] for begin in range(0, len(ids), self.seq)]
        tally.cut += sum(len(piece) == 1 for piece in pieces)
        pieces = [piece for piece in pieces if len(piece) > 1]
        tally.divided += len(pieces) > 1
        return [made for piece in pieces for made in self._cut(Sample(piece, [True] * len(piece)), tally)]

    def _ended(self, text: str) -> str:
        return text if self._adds_eos or text.endswith(self._eos) else text + self._eos

    def _cut(self, sample: Sample, tally: Tally) -> list[Row]:
        ids, trained = sample.ids[: self.seq], sample.trained[: self.seq]
        num_trained = sum(trained[1:])  # nothing predicts the first
        tally.cut += len(sample.ids) - (len(ids) if num_trained else 0)
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


class _Dpo(Maker):
    loss_on = "the chosen answers against the rejected"

    def __init__(self, folder: ModelFolder, seq: int, known: Sequence[Known], kinds: Set[str]) -> None:
        super().__init__(folder, seq, known, kinds)
        self._template = None if self.tokenizer.chat_template is None else ChatTemplate(self.tokenizer)
        self._in_messages: bool | None = None

    def make(self, row: Row, form: Form, tally: Tally) -> list[Row]:
        prompt, *answers = preference_of(row)
        if isinstance(prompt, str) and row.get("prompt") is not None and self._template is not None:
            prompt = [{"role": "user", "content": prompt}]
            answers = [[{"role": "assistant", "content": answer}] for answer in answers]
        if self._in_messages is None:
            self._in_messages = isinstance(prompt, list)
        if self._in_messages != isinstance(prompt, list):
            raise BadRow("some rows are lists of messages, and others strings; give all as one of both")
        if self._in_messages:
            check_chat_template(self.folder)
        before, *wholes = self._lengths(prompt, answers)
        if answers[0] == answers[1] or before >= self.seq:
            tally.empty += 1
            tally.cut += sum(wholes)
            return []
        cut = [min(whole, self.seq) for whole in wholes]
        tally.truncated += cut != wholes
        tally.cut += sum(wholes) - sum(cut)
        tally.trained += sum(cut) - 2 * before
        tally.lengths.append(sum(cut))
        return [{"prompt": prompt, "chosen": answers[0], "rejected": answers[1]}]

    def _lengths(self, prompt: Any, answers: Sequence[Any]) -> list[int]:
        """Tokens of the prompt, and of it with each answer."""
        if isinstance(prompt, list):
            assert self._template is not None
            wholes = [self._template.whole([*prompt, *answer]) for answer in answers]
            return [len(self._template.prompt(prompt)), *map(len, wholes)]
        end = self.tokenizer.eos_token or ""
        texts = [prompt, *(prompt + answer + end for answer in answers)]
        return [len(self.tokenizer(text, verbose=False)["input_ids"]) for text in texts]

    def trainer_settings(self) -> dict[str, Any]:
        return {"max_length": self.seq}


class _Mlm(Maker):
    loss_on = "tokens that are masked at random"

    def __init__(self, folder: ModelFolder, seq: int, known: Sequence[Known], kinds: Set[str]) -> None:
        super().__init__(folder, seq, known, kinds)
        if self.tokenizer.mask_token is None:
            raise ConfigError(f"the tokenizer of {folder.path} has no mask token, which --method mlm puts over words")
        self._room = _room_for_words(folder, seq)

    def make(self, row: Row, form: Form, tally: Tally) -> list[Row]:
        text = text_in(row.get("text"), "text")
        if not text.strip():
            tally.empty += 1
            return []
        pieces = self._pieces(text)
        tally.divided += len(pieces) > 1
        for ids, special in pieces:
            tally.lengths.append(len(ids))
            tally.trained += len(ids) - sum(special)
        tally.empty += not pieces
        return [{"input_ids": ids} for ids, _ in pieces]

    def _pieces(self, text: str) -> list[tuple[list[int], list[int]]]:
        """Rows of at most `seq` tokens, and for each token 1 if the tokenizer puts it around words."""
        if self.tokenizer.is_fast:
            encoded = self.tokenizer(
                text,
                truncation=True,
                max_length=self.seq,
                return_overflowing_tokens=True,
                return_special_tokens_mask=True,
                return_attention_mask=False,
                verbose=False,
            )
            found = zip(encoded["input_ids"], encoded["special_tokens_mask"], strict=True)
            return [(ids, special) for ids, special in found if ids]
        # A tokenizer in Python gives its first row alone.
        words = list(self.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
        pieces = [words[begin : begin + self._room] for begin in range(0, len(words), self._room)]
        return [
            (
                self.tokenizer.build_inputs_with_special_tokens(each),
                self.tokenizer.get_special_tokens_mask(each, None, already_has_special_tokens=False),
            )
            for each in pieces
        ]

    def collator(self) -> Any:
        from transformers import DataCollatorForLanguageModeling

        return DataCollatorForLanguageModeling(self.tokenizer)


class _Classify(Maker):
    loss_on = "the labels"

    def __init__(self, folder: ModelFolder, seq: int, known: Sequence[Known], kinds: Set[str]) -> None:
        super().__init__(folder, seq, known, kinds)
        _room_for_words(folder, seq)
        if has_head := is_classifier(folder.config):
            names = [folder.config.id2label[number] for number in range(folder.config.num_labels)]
        else:
            names = _names_of({*_labels_in(known)})
        self.labels = tuple(names)
        counts = Counter(names)
        self._numbers = {name: number for number, name in enumerate(names) if counts[name] == 1}
        if has_head:
            self._numbers = {str(number): number for number in range(len(names))} | self._numbers

    def make(self, row: Row, form: Form, tally: Tally) -> list[Row]:
        text, label = text_in(row.get("text"), "text"), _label(row)
        if label not in self._numbers:
            raise BadRow(f"the label {label!r} is unknown; the data have {', '.join(self.labels)}")
        if not text.strip():
            tally.empty += 1
            return []
        ids = self.tokenizer(text, truncation=True, max_length=self.seq, verbose=False)["input_ids"]
        if not ids:
            tally.empty += 1
            return []
        if len(ids) == self.seq:
            num_cut = len(self.tokenizer(text, verbose=False)["input_ids"]) - self.seq
            tally.truncated += num_cut > 0
            tally.cut += num_cut
        tally.lengths.append(len(ids))
        tally.trained += 1
        return [{"input_ids": ids, "labels": self._numbers[label]}]

    def collator(self) -> Any:
        from transformers import DataCollatorWithPadding

        return DataCollatorWithPadding(self.tokenizer)


MAKERS: dict[str, type[Maker]] = {SFT: _Sft, DPO: _Dpo, MLM: _Mlm, CLASSES: _Classify}


def _room_for_words(folder: ModelFolder, seq: int) -> int:
    """Tokens of a row beside those that the tokenizer puts around words."""
    num_added = folder.tokenizer.num_special_tokens_to_add()
    if seq <= num_added:
        raise ConfigError(
            f"seq={seq}, and the tokenizer of {folder.path} puts {num_added} tokens around the words of each row; "
            f"give --seq {num_added + 1} or more"
        )
    return seq - int(num_added)


def _labels_in(known: Sequence[Known]) -> Iterator[str]:
    for each in known:
        for place, row in each.source.rows():
            with row_at(place):
                label = _label(row)
            yield label


def _label(row: Row) -> str:
    label = row.get("label")
    if isinstance(label, float) or not isinstance(label, (str, int)) or label == "":
        raise BadRow(f"'label' is {label!r}, not a name or a whole number")
    return text_in(label, "label") if isinstance(label, str) else str(label)


def _names_of(labels: set[str]) -> list[str]:
    """Numbers count from 0; names are in order. Digits behind a 0 are a name, such as 007."""
    if len(labels) < 2:
        raise ConfigError(f"the data have {len(labels)} label ({', '.join(labels)}); a classifier needs two at least")
    if not all(_NUMBER.fullmatch(label) for label in labels):
        return sorted(labels)
    largest = max(labels, key=lambda label: (len(label), label))
    if len(largest) > len(str(_CLASSES_MAX)) or int(largest) >= _CLASSES_MAX:
        raise ConfigError(
            f"the data have the label {largest[:40]}, and numbers count classes from 0: {_CLASSES_MAX:,} classes are "
            "the most; number them from 0, or give them names"
        )
    return [str(number) for number in range(int(largest) + 1)]
