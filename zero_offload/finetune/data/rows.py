"""The kind of a row of data, by its columns; rows of every kind as messages with role and content, or as text."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from zero_offload.base.errors import ConfigError
from zero_offload.integrations.gate import parse

CONVERSATIONS, PAIRS, TEXT, PREFERENCES, LABELLED = (
    "conversations",
    "prompt/completion",
    "text",
    "preferences",
    "labelled text",
)
ROLES = ("system", "developer", "user", "assistant", "tool")
_OTHER_ROLES = {
    "human": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
    "function": "tool",
    "observation": "tool",
    "ipython": "tool",
}

Message = dict[str, Any]


class BadRow(ValueError):
    """The fault of a row; the caller knows where it is."""


@contextmanager
def row_at(place: str) -> Iterator[None]:
    """A BadRow inside is a ConfigError that names the place."""
    try:
        yield
    except BadRow as error:
        raise ConfigError(f"{place}: {error}") from error


@dataclass(frozen=True)
class Form:
    """How the rows of a source are read."""

    kind: str
    columns: tuple[str, ...]
    """Those that make the kind."""
    optional: tuple[str, ...] = ()
    """Those that are used as well, where they are there."""

    def said(self, columns: Sequence[str]) -> str:
        """The kind and the columns of a source that has `columns`."""
        used = [name for name in (*self.columns, *self.optional) if name in columns]
        unused = [name for name in columns if name not in used]
        said = f"{self.kind} (column{'' if len(used) == 1 else 's'} {', '.join(used)})"
        return said + (f"; not used: {', '.join(unused)}" if unused else "")


_FORMS = (
    Form(PREFERENCES, ("chosen", "rejected"), ("prompt",)),
    Form(CONVERSATIONS, ("messages",), ("system", "tools")),
    Form(CONVERSATIONS, ("conversations",), ("system", "tools")),
    Form(PAIRS, ("prompt", "completion"), ("system",)),
    Form(PAIRS, ("prompt", "response"), ("system",)),
    Form(PAIRS, ("instruction", "output"), ("input", "system")),
    Form(PAIRS, ("instruction", "response"), ("context", "system")),
    Form(PAIRS, ("question", "answer"), ("system",)),
    Form(LABELLED, ("text", "label")),
    Form(TEXT, ("text",)),
)
"""The first whose columns are all there is taken."""


COLUMNS = frozenset(name for form in _FORMS for name in (*form.columns, *form.optional))
"""Those that are used, in one form or another."""


def is_row(columns: Collection[str]) -> bool:
    """True if an object with these columns is a row, of one form or another."""
    return any(set(form.columns) <= set(columns) for form in _FORMS)


def form_of(columns: Sequence[str], name: str) -> Form:
    """How rows with these columns are read; `name` is the source's. Raises ConfigError for columns that say nothing."""
    if {"completion", "label"} <= set(columns):
        raise ConfigError(
            f"{name} has completions with a label each, which is not trained here; give pairs, chosen and rejected, or "
            "the good completions without the column label"
        )
    for form in _FORMS:
        if set(form.columns) <= set(columns):
            return form
    known: dict[str, list[str]] = {}
    for form in _FORMS:
        known.setdefault(form.kind, []).append("+".join(form.columns))
    said = "; ".join(f"{kind}: {', '.join(sets)}" for kind, sets in known.items())
    commas = " (CSV has commas between its fields)" if len(columns) == 1 and {*";\t|"} & {*columns[0]} else ""
    raise ConfigError(
        f"{name} has the columns {', '.join(columns)}{commas}, and these names are not known here. Rename them to one "
        f"of: {said}"
    )


# Rows in one form


def messages_of(row: Mapping[str, Any], form: Form) -> tuple[list[Message], int]:
    """The messages of a conversation or of a pair, and from which on the assistant's words are trained."""
    if form.kind == CONVERSATIONS:
        found = _checked(read_messages(row.get(form.columns[0]), form.columns[0]))
        trained_from = 0
    else:
        question, answer = (row.get(name) for name in form.columns)
        found = _asked(question, row.get(form.optional[0]), form)
        trained_from = len(found)
        found = _checked([*found, *_answered(answer, form.columns[1])])
    system = row.get("system")
    if isinstance(system, str) and system and found[0]["role"] != "system":
        return [{"role": "system", "content": _whole(system, "'system'")}, *found], trained_from + (trained_from > 0)
    return found, trained_from


def _asked(question: Any, more: Any, form: Form) -> list[Message]:
    if isinstance(question, list):
        return read_messages(question, form.columns[0])
    asked = text_in(question, form.columns[0])
    if form.optional[0] != "system" and more:
        asked += "\n\n" + text_in(more, form.optional[0])
    return [{"role": "user", "content": asked}]


def _answered(answer: Any, column: str) -> list[Message]:
    if isinstance(answer, list):
        return read_messages(answer, column)
    return [{"role": "assistant", "content": text_in(answer, column)}]


def pair_of(row: Mapping[str, Any], form: Form) -> tuple[str, str]:
    """Question and answer as they are, for a tokenizer without a chat template."""
    question, answer = (text_in(row.get(name), name) for name in form.columns)
    more = [name for name in form.optional if name != "system" and row.get(name)]
    before = [text_in(row["system"], "system")] if row.get("system") else []
    return "\n\n".join([*before, question, *(text_in(row[name], name) for name in more)]), answer


def tools_of(row: Mapping[str, Any]) -> list[Any] | None:
    """Schemas of the tools that a conversation may call."""
    tools = row.get("tools")
    if isinstance(tools, str) and tools.strip():
        tools = _parsed(tools, "tools")
    if tools and not isinstance(tools, list):
        raise BadRow(f"'tools' is {_shown(tools)}, not a list of schemas")
    return tools or None


def preference_of(row: Mapping[str, Any]) -> tuple[Any, Any, Any]:
    """Prompt, chosen and rejected: three lists of messages or three strings."""
    prompt, *answers = (_maybe_messages(row.get(name), name) for name in ("prompt", "chosen", "rejected"))
    if len({type(answer) for answer in answers}) > 1:
        raise BadRow("one of 'chosen' and 'rejected' is a string, the other a list of messages")
    if isinstance(answers[0], str):
        if prompt is None:
            prompt = os.path.commonprefix(answers)
            answers = [answer[len(prompt) :] for answer in answers]
        elif isinstance(prompt, list):
            answers = [[{"role": "assistant", "content": answer}] for answer in answers]
    elif not isinstance(prompt, list):
        # Often a whole conversation on both sides: the prompt is what they begin with.
        shared = os.path.commonprefix([answer[:-1] for answer in answers])
        if not shared and prompt is not None:
            shared = [{"role": "user", "content": prompt}]
        else:
            answers = [answer[len(shared) :] for answer in answers]
        prompt = shared
    if isinstance(prompt, list):
        for answer in answers:
            _checked([*prompt, *answer])
            if extra := sorted({key for message in [*prompt, *answer] for key in message} - {"role", "content"}):
                raise BadRow(f"messages have {', '.join(extra)}, which preferences cannot have")
    if not prompt:
        raise BadRow("'chosen' and 'rejected' have no common beginning, and there is no 'prompt'")
    return prompt, answers[0], answers[1]


def _maybe_messages(value: Any, column: str) -> Any:
    if value is None and column == "prompt":
        return None
    return read_messages(value, column) if isinstance(value, list) else text_in(value, column)


def text_in(value: Any, column: str) -> str:
    """A column's text; numbers are what JSON writes for them."""
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        raise BadRow(f"{column!r} is {_shown(value)}, not text")
    return _whole(value, repr(column)) if isinstance(value, str) else json.dumps(value)


def _whole(text: str, what: str) -> str:
    """JSON can say half of a character, which no tokenizer takes."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadRow(f"{what} has half of a character at {error.start}, {text[error.start]!r}") from None
    return text


def read_messages(value: Any, column: str) -> list[Message]:
    """Messages with role and content, of OpenAI's words or ShareGPT's; a string may hold them as JSON."""
    if isinstance(value, str):
        value = _parsed(value, column)
    if not isinstance(value, list) or not value:
        raise BadRow(f"{column!r} is {_shown(value)}, not a list of messages")
    return [_message(each, f"message {number} of {column!r}") for number, each in enumerate(value, 1)]


def _message(value: Any, what: str) -> Message:
    if not isinstance(value, dict):
        raise BadRow(f"{what} is {_shown(value)}, not an object with role and content")
    given = {key: each for key, each in value.items() if each is not None}
    role = given.pop("role", given.pop("from", None))
    role = _OTHER_ROLES.get(str(role).lower(), role)
    if role not in ROLES:
        raise BadRow(f"{what} has the role {role!r}; roles are {', '.join([*ROLES, *_OTHER_ROLES])}")
    content = given.pop("content", given.pop("value", None))
    if isinstance(content, list):
        content = "".join(_part(each, what) for each in content)
    if content is None and "tool_calls" in given:
        content = ""
    if not isinstance(content, str):
        raise BadRow(f"the content of {what} ({role}) is {_shown(content)}, not text")
    _whole(content, f"the content of {what}")
    if "tool_calls" in given:
        if not isinstance(given["tool_calls"], list):
            raise BadRow(f"the tool_calls of {what} are {_shown(given['tool_calls'])}, not a list of calls")
        given["tool_calls"] = [_call(each, what) for each in given["tool_calls"]]
    return {"role": role, "content": content, **given}


def _part(value: Any, what: str) -> str:
    text = value.get("text") if isinstance(value, dict) and value.get("type", "text") == "text" else value
    if not isinstance(text, str):
        raise BadRow(f"the content of {what} has a part that is not text: {_shown(value)}")
    return text


def _call(value: Any, what: str) -> Any:
    """Arguments as an object: templates write them as JSON themselves."""
    function = value.get("function") if isinstance(value, dict) else None
    if isinstance(function, dict) and isinstance(function.get("arguments"), str):
        return {**value, "function": {**function, "arguments": _parsed(function["arguments"], f"a call in {what}")}}
    return value


def _checked(messages: list[Message]) -> list[Message]:
    """The first message that is not the system's is a user's; the chat template checks the rest."""
    first = next((each["role"] for each in messages if each["role"] not in ("system", "developer")), None)
    if first not in (None, "user"):
        raise BadRow(f"the first message is of the role {first}; a conversation begins with a user's")
    return messages


def _parsed(text: str, what: str) -> Any:
    try:
        return parse(text)
    except ValueError as error:
        raise BadRow(f"{what!r} is text that is not JSON: {error}: {_shown(text)}") from None


def _shown(value: Any) -> str:
    if value is None:
        return "missing"
    shown = repr(value)
    return shown if len(shown) <= 60 else shown[:60] + "..."
