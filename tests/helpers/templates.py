"""Small chat templates with the habits of those that models have, and what each writes, once more in Python."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerFast

from tests.helpers import folders

Message = dict[str, str]
Segments = list[tuple[str, bool]]
"""Pieces of a text in order, and for each True if the model has to generate it."""

_THINK_OPEN, _THINK_CLOSE = "<think>", "</think>"


@dataclass(frozen=True)
class Habit:
    """A template; `segments` is what it writes of a conversation that ends with the assistant."""

    template: str
    segments: Callable[[Sequence[Message]], Segments]
    takes_system: bool = True

    def tokenizer(self) -> PreTrainedTokenizerFast:
        made = folders.tokenizer(self.template)
        made.add_special_tokens({"additional_special_tokens": list(SPECIAL), "bos_token": "<s>"})
        return made


SPECIAL = (
    *("<s>", "<|head|>", "<|/head|>", "<|eot|>", "<turn>", "</turn>", "<|user|>", "<|assistant|>", "<|end|>"),
    *("[INST]", "[/INST]", "<think>", "</think>"),
)


def _chatml(messages: Sequence[Message]) -> Segments:
    found = []
    for each in messages:
        spoken = each["role"] == "assistant"
        found += [(f"<|im_start|>{each['role']}\n", False), (f"{each['content']}<|im_end|>\n", spoken)]
    return found


def _default_system(messages: Sequence[Message]) -> Segments:
    system = [] if messages[0]["role"] == "system" else [{"role": "system", "content": "You help."}]
    return _chatml([*system, *messages])


def _heads(messages: Sequence[Message]) -> Segments:
    found = [("<s>", False)]
    for each in messages:
        found.append((f"<|head|>{each['role']}<|/head|>\n\n", False))
        found.append((f"{each['content'].strip()}<|eot|>", each["role"] == "assistant"))
    return found


def _brackets(messages: Sequence[Message]) -> Segments:
    found, system = [("<s>", False)], ""
    for each in messages:
        if each["role"] == "system":
            system = each["content"] + "\n\n"
        elif each["role"] == "user":
            found.append((f"[INST] {system}{each['content']} [/INST]", False))
            system = ""
        else:
            found.append((f" {each['content'].strip()}<|im_end|>", True))
    return found


def _turns(messages: Sequence[Message]) -> Segments:
    found = [("<s>", False)]
    for each in messages:
        spoken = each["role"] == "assistant"
        found.append((f"<turn>{'model' if spoken else 'user'}\n", False))
        found.append((f"{each['content'].strip()}</turn>\n", spoken))
    return found


def _ended(messages: Sequence[Message]) -> Segments:
    found = []
    for each in messages:
        found.append((f"<|{each['role']}|>\n", False))
        found.append((f"{each['content']}<|end|>\n", each["role"] == "assistant"))
    return [*found, ("<|im_end|>", True)]


def _words(messages: Sequence[Message]) -> Segments:
    found = []
    for number, each in enumerate(messages):
        if each["role"] == "assistant":
            found += [("A:", False), (f" {each['content'].strip()}", True)]
        else:
            found.append((f"{'' if number == 0 else chr(10)}Q: {each['content'].strip()}\n", False))
    return [*found, ("<|im_end|>", True)]


_ROLE = "{{ m['role'] }}"
HABITS = {
    "plain": Habit(folders.CHATML, _chatml),
    "default system": Habit(
        "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nYou help.<|im_end|>\n{% endif %}" + folders.CHATML,
        _default_system,
    ),
    "trimmed": Habit(
        "{{ bos_token }}{% for m in messages %}<|head|>" + _ROLE + "<|/head|>\n\n{{ m['content'] | trim }}<|eot|>"
        "{% endfor %}{% if add_generation_prompt %}<|head|>assistant<|/head|>\n\n{% endif %}",
        _heads,
    ),
    "system in the question": Habit(
        "{{ bos_token }}{% set ns = namespace(system='') %}{% for m in messages %}"
        "{% if m['role'] == 'system' %}{% set ns.system = m['content'] + '\n\n' %}"
        "{% elif m['role'] == 'user' %}[INST] {{ ns.system + m['content'] }} [/INST]{% set ns.system = '' %}"
        "{% else %} {{ m['content'] | trim }}{{ eos_token }}{% endif %}{% endfor %}",
        _brackets,
    ),
    "no system": Habit(
        "{{ bos_token }}{% for m in messages %}"
        "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles take turns') }}{% endif %}"
        "<turn>{{ 'model' if m['role'] == 'assistant' else 'user' }}\n{{ m['content'] | trim }}</turn>\n{% endfor %}"
        "{% if add_generation_prompt %}<turn>model\n{% endif %}",
        _turns,
        takes_system=False,
    ),
    "an end behind all": Habit(
        "{% for m in messages %}<|" + _ROLE + "|>\n{{ m['content'] }}<|end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}",
        _ended,
        takes_system=False,
    ),
    "no special tokens": Habit(
        "{% for m in messages %}{% if m['role'] == 'assistant' %}A: {{ m['content'] | trim }}"
        "{% else %}{{ '' if loop.first else '\n' }}Q: {{ m['content'] | trim }}\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}A:{% endif %}",
        _words,
        takes_system=False,
    ),
}
"""Those that write an earlier turn as the model has generated it."""

THINKING = (
    "{% set last = messages | map(attribute='role') | list %}{% set ns = namespace(asked=0) %}"
    "{% for m in messages %}{% if m['role'] == 'user' %}{% set ns.asked = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% set words = m['content'].split('</think>')[-1].lstrip('\n') %}"
    "{% if m['role'] == 'assistant' and loop.index0 > ns.asked %}"
    "{% set thought = m['content'].split('</think>')[0].split('<think>')[-1].strip('\n')"
    " if '</think>' in m['content'] else '' %}"
    "<|im_start|>assistant\n<think>\n{{ thought }}\n</think>\n\n{{ words }}<|im_end|>\n"
    "{% elif m['role'] == 'assistant' %}<|im_start|>assistant\n{{ words }}<|im_end|>\n"
    "{% else %}<|im_start|>" + _ROLE + "\n{{ m['content'] }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Drops the thoughts of earlier turns, and puts an empty thought into the last turn that has none."""

OPEN_THOUGHT = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'assistant' %}"
    "<|assistant|>{{ m['content'].split('</think>')[-1] if not loop.last else m['content'] }}<|end|>"
    "{% else %}<|user|>{{ m['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|><think>\n{% endif %}"
)
"""Its prompt begins a thought, whether or not the answer has one."""
