"""Conversations in a tokenizer's words, and which tokens of them are the assistant's.

[Note: which tokens are trained]
A template that marks them with `{% generation %}` decides. Any other template is asked twice per turn of the assistant.
It writes the prompt, as the assistant is to speak, and the text up to the end of that turn. The tokens in between are
what the model has to generate, the end of the turn included. A token that lies across the border belongs to the turn,
as with `{% generation %}`.

[Note: earlier turns]
A template may write the last turn in one way, and the same turn later in another: templates of models that think drop
earlier thoughts. A conversation is one sample, with all turns that stay as they were generated. Each other turn ends a
sample of its own, in which it is the last.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from zero_offload.base.errors import ConfigError
from zero_offload.finetune.data.rendering import Renderer, RenderError
from zero_offload.finetune.data.rows import BadRow, Message

_WORD = "b5c1f9"
_QUESTION, _ANSWER = {"role": "user", "content": "u7"}, {"role": "assistant", "content": _WORD}
_WITH_MARKS = {"return_assistant_tokens_mask": True}
_MARK = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True)
class Sample:
    """Tokens, and for each True if it is trained."""

    ids: list[int]
    trained: list[bool]


@dataclass(frozen=True)
class _Turn:
    """A turn of the assistant, at the end of the text that ends with it."""

    text: str
    begin: int
    end: int
    """Where text begins that is written only behind the last turn."""


class ChatTemplate:
    """A tokenizer's chat template.

    Raises ConfigError for a template, and BadRow for a conversation, that leaves open what the assistant's words are.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer, self._renderer = tokenizer, Renderer(tokenizer)
        if isinstance(named := tokenizer.chat_template, dict) and "default" not in named:
            raise ConfigError(
                f"the tokenizer of {tokenizer.name_or_path}: chat_template has the templates {', '.join(named)}, and "
                'none of the name "default"; give one of them that name'
            )
        written = tokenizer.get_chat_template()
        self._has_date = "strftime_now" in written
        self.is_marked = _MARK.search(written) is not None
        """True if the template says which tokens are the assistant's."""
        if not tokenizer.is_fast:
            raise ConfigError(
                f"{type(tokenizer).__name__} does not say which characters a token is; a tokenizer.json does. Save the "
                "tokenizer with one: AutoTokenizer.from_pretrained(DIR, use_fast=True).save_pretrained(DIR)"
            )
        try:
            self._probe()
        except BadRow as error:
            raise ConfigError(
                f"the chat template of {tokenizer.name_or_path} cannot be used: {error}; "
                "copy chat_template.jinja of the model's instruct version there"
            ) from error

    def _probe(self) -> None:
        prompt, text = self._render([_QUESTION], is_prompt=True), self._render([_QUESTION, _ANSWER])
        followed = self._render([_QUESTION, _ANSWER, _QUESTION])
        if _WORD not in text:
            raise BadRow("it does not write what the assistant says")
        self._only_in_prompts = prompt[len(os.path.commonprefix([prompt, text])) :]
        """The end of prompts that answers lack, such as the begin of a thought."""
        tail = text.rpartition(_WORD)[2]
        self._only_behind_last = tail[self._num_shared(tail, followed.rpartition(_WORD)[2]) :]
        ending = self._tokenizer(tail, add_special_tokens=False)["input_ids"]
        special = {*self._tokenizer.get_added_vocab().values()}
        has_end = self.is_marked or special & {*ending}
        self.added_end = "" if has_end else self._tokenizer.eos_token or ""
        """Put behind a sample: the template ends no turn with a token by which a model can stop."""

    def _num_shared(self, one: str, other: str) -> int:
        """How many characters two texts have in common at their begin, in whole tokens."""
        encoded = [
            self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True) for text in (one, other)
        ]
        at = 0
        for pair in zip(
            *(zip(each["input_ids"], each["offset_mapping"], strict=True) for each in encoded), strict=False
        ):
            if pair[0][0] != pair[1][0] or one[: pair[0][1][1]] != other[: pair[0][1][1]]:
                break
            at = pair[0][1][1]
        return at

    def remark(self) -> str:
        """A clause that users should know about the template."""
        return (", which writes today's date" if self._has_date else "") + self._remark_on_ends()

    def _remark_on_ends(self) -> str:
        if self.added_end:
            return f", {self.added_end} behind the last: no turn in it ends with a token by which a model can stop"
        if not self.is_marked:
            return ", the end of each turn included"
        encoded = self._apply([_QUESTION, _ANSWER], None, tokenize=True, return_dict=True, **_WITH_MARKS)
        ids = [token for token, mark in zip(encoded["input_ids"], encoded["assistant_masks"], strict=True) if mark]
        if {*ids} & {*self._tokenizer.get_added_vocab().values()}:
            return " where it has {% generation %}, the end of each turn included"
        return " where it has {% generation %}: the end of a turn is outside, so the model does not learn to stop"

    def samples(
        self, messages: Sequence[Message], tools: Sequence[Any] | None = None, trained_from: int = 0
    ) -> list[Sample]:
        """One sample of a conversation, or several; see [Note: earlier turns]. None if the assistant says nothing.

        A message of weight 0 is not trained.
        """
        spoken = [
            number
            for number, message in enumerate(messages)
            if message["role"] == "assistant" and number >= trained_from and message.get("weight") != 0
        ]
        if not any(messages[number]["content"].strip() or messages[number].get("tool_calls") for number in spoken):
            return []
        if self.is_marked:
            if tools and _MARK.search(self._tokenizer.get_chat_template(tools=tools)) is None:
                raise BadRow(
                    "it has tools, and the chat template for tools lacks {% generation %}, which the default one has; "
                    "put {% generation %} and {% endgeneration %} around the assistant's words there"
                )
            if any(message.get("weight") == 0 for message in messages):
                raise BadRow(
                    "a message has weight 0, and the chat template marks trained words by {% generation %}; use one "
                    "of both"
                )
            return [self._marked(messages[: spoken[-1] + 1], tools, trained_from)]
        turns = [self._turn(messages[:number], messages[number], tools) for number in spoken]
        found = []
        while turns:
            last = turns.pop()
            kept = [turn for turn in turns if last.text.startswith(turn.text[: turn.end])]
            turns = [turn for turn in turns if turn not in kept]
            spans = [(turn.begin, turn.end) for turn in kept] + [(last.begin, len(last.text) + len(self.added_end))]
            found.append(self._tokens(last.text + self.added_end, spans))
        return found[::-1]

    def prompt(self, messages: Sequence[Message]) -> list[int]:
        """Tokens of what the template writes when the assistant is to speak."""
        return self._ids(self._render(messages, is_prompt=True))

    def whole(self, messages: Sequence[Message]) -> list[int]:
        """Tokens of a conversation."""
        return self._ids(self._render(messages))

    def _turn(self, before: Sequence[Message], message: Message, tools: Sequence[Any] | None) -> _Turn:
        prompt, text = self._render(before, tools, is_prompt=True), self._render([*before, message], tools)
        if not text.startswith(prompt):
            prompt = prompt.removesuffix(self._only_in_prompts)
        if not text.startswith(prompt) or not text.endswith(self._only_behind_last):
            raise BadRow(
                f"the chat template writes the text before message {len(before) + 1} differently in a prompt and in "
                "the whole conversation. So the beginning of the assistant's words is not known; put "
                "{% generation %} and {% endgeneration %} around them in the template"
            )
        return _Turn(text, len(prompt), len(text) - len(self._only_behind_last))

    def _marked(self, messages: Sequence[Message], tools: Sequence[Any] | None, trained_from: int) -> Sample:
        encoded = self._apply(messages, tools, tokenize=True, return_dict=True, **_WITH_MARKS)
        ids, trained = list(encoded["input_ids"]), [mark == 1 for mark in encoded["assistant_masks"]]
        if trained_from:
            prompt = self._ids(self._render(messages[:trained_from], tools, is_prompt=True))
            num_shared = len(os.path.commonprefix([prompt, ids]))
            trained[:num_shared] = [False] * num_shared
        return Sample(ids, trained)

    def _render(
        self, messages: Sequence[Message], tools: Sequence[Any] | None = None, *, is_prompt: bool = False
    ) -> str:
        text: str = self._apply(messages, tools, tokenize=False, add_generation_prompt=is_prompt)
        return text

    def _apply(self, messages: Sequence[Message], tools: Sequence[Any] | None, **settings: Any) -> Any:
        try:
            return self._renderer.apply(messages, tools=tools, **settings)
        except RenderError as error:
            raise BadRow(f"the chat template refuses it: {error}") from error

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    def _tokens(self, text: str, spans: Sequence[tuple[int, int]]) -> Sample:
        return tokens_of(self._tokenizer, text, spans, add_special_tokens=False)


def tokens_of(tokenizer: Any, text: str, spans: Sequence[tuple[int, int]], *, add_special_tokens: bool) -> Sample:
    """The tokens of a text; trained are those with a character in `spans`, which are in order and do not overlap."""
    encoded = tokenizer(
        text,
        add_special_tokens=add_special_tokens,
        return_offsets_mapping=True,
        return_attention_mask=False,
        verbose=False,
    )
    ids, trained = list(encoded["input_ids"]), []
    left, seen = list(spans), 0
    for begin, end in encoded["offset_mapping"]:
        # Some tokenizers count no white space to a token; a token of white space alone lies behind those before it.
        first, behind = (begin, end) if end > begin else (seen, seen + 1)
        while left and left[0][1] <= first:
            left.pop(0)
        is_added = begin == end == 0 and add_special_tokens
        trained.append(bool(left) and left[0][0] < behind and not is_added)
        seen = max(seen, end)
    return Sample(ids, trained)
