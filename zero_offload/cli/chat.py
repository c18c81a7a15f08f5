"""`zero-offload chat DIR`: talk to a folder's model in the terminal, its weights streamed from their tiers.

Owns the loop: a line is read, `generate` answers, words are printed as they come. A model of any size answers; each
token reads the weights that are not in memory. Ctrl-C stops an answer, Ctrl-D ends. Without a terminal each line of
stdin is a prompt.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from zero_offload.base.errors import ConfigError
from zero_offload.base.types import format_bytes
from zero_offload.cli.reading import open_checked, open_for_reading
from zero_offload.finetune.data.rendering import Renderer, RenderError
from zero_offload.finetune.model.folder import ModelFolder
from zero_offload.finetune.model.text_generation import write_text
from zero_offload.model.api import close, need_runtime, stats
from zero_offload.runs.terminal import printable

_RESET, _EXIT = "/reset", "/exit"


def run(args: argparse.Namespace) -> int:
    _check(args)
    folder = open_checked(args)
    if args.system is not None and folder.tokenizer.chat_template is None:
        raise ConfigError(f"the tokenizer of {args.dir} has no chat template, so --system has no place; leave it out")
    folder.check_generation(**_sampling(args.temperature))
    model = open_for_reading(folder, args)
    torch.manual_seed(args.seed)
    talk = Conversation(model, folder, args.system, args.max_new_tokens, args.temperature)
    try:
        _loop(talk, folder, args)
    finally:
        close(model)
    return 0


def _check(args: argparse.Namespace) -> None:
    if args.max_new_tokens < 1:
        raise ConfigError(f"--max-new-tokens {args.max_new_tokens} leaves no answer; give 1 or more")
    if args.temperature is not None and not 0 <= args.temperature < float("inf"):
        raise ConfigError(f"--temperature {args.temperature} is not a number from 0 up; give 0 or more")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise ConfigError("chat runs as one process; start it without torchrun")


def _loop(talk: Conversation, folder: ModelFolder, args: argparse.Namespace) -> None:
    is_terminal = sys.stdin.isatty() and not args.json
    if is_terminal:
        import readline  # noqa: F401  `input` edits lines, and remembers them

        print(talk.described(folder), file=sys.stderr)
    while (line := _read_line("> " if is_terminal else "")) is not None:
        if line == _EXIT:
            return
        if line == _RESET:
            talk.reset()
        elif line:
            started = time.monotonic()
            try:
                answer, num_tokens = talk.ask(line, None if args.json else _print_now)
            except ConfigError as error:
                if not is_terminal:
                    raise
                print(f"error: {error}", file=sys.stderr)
                continue
            except KeyboardInterrupt:  # before the model writes: while the template makes its prompt
                if not is_terminal:
                    raise
                print("\n(Ctrl-D or /exit ends)", file=sys.stderr)
                continue
            if args.json:
                seconds = round(time.monotonic() - started, 3)
                print(json.dumps({"prompt": line, "answer": answer, "tokens": num_tokens, "seconds": seconds}))
            else:
                print()
            sys.stdout.flush()
    if is_terminal:
        print()


def _read_line(prompt: str) -> str | None:
    """A line without spaces around it; None at the end."""
    while True:
        try:
            return input(prompt).strip()
        except EOFError:
            return None
        except KeyboardInterrupt:
            if not prompt:
                raise
            print("\n(Ctrl-D or /exit ends)", file=sys.stderr)
        except UnicodeDecodeError as error:
            raise ConfigError(f"stdin is not UTF-8 text: {error}") from error


def _print_now(text: str) -> None:
    print(printable(text), end="", flush=True)


class Conversation:
    """The turns of a conversation, and the model that goes on with it."""

    def __init__(
        self, model: Any, folder: ModelFolder, system: str | None, max_new_tokens: int, temperature: float | None
    ) -> None:
        self._model, self._tokenizer, self._renderer = model, folder.tokenizer, Renderer(folder.tokenizer)
        self._system, self._max_new_tokens = system, max_new_tokens
        self._num_positions = folder.num_positions
        self._settings = _sampling(temperature) | {"eos_token_id": _end_tokens(model, folder.tokenizer)}
        self._device = need_runtime(model, "chat").device.torch_device
        self.reset()

    def described(self, folder: ModelFolder) -> str:
        """The text before the first prompt."""
        numel = sum(param.numel() for param in self._model.parameters())
        places = [f"{format_bytes(size)} on {tier}" for tier, size in stats(self._model).resident_bytes.items() if size]
        name = folder.path.name if folder.adapter is None else f"{folder.adapter.name} on {folder.path.name}"
        how = (
            ""
            if self._tokenizer.chat_template
            else "No chat template: each line is text that the model goes on with.\n"
        )
        return f"{name}: {numel:,} parameters, {', '.join(places)}\n{how}{_RESET} forgets, {_EXIT} or Ctrl-D ends"

    def reset(self) -> None:
        """Forget all but the system's instructions."""
        self._turns = [{"role": "system", "content": self._system}] if self._system is not None else []

    def ask(self, prompt: str, show: Any) -> tuple[str, int]:
        """The answer and its number of tokens; `show` gets its words as they come.

        Raises ConfigError where the model has no room for an answer; the prompt is then not part of the conversation.
        """
        turns = [*self._turns, {"role": "user", "content": prompt}]
        inputs = self._encoded(turns)
        begin = inputs["input_ids"].shape[1]
        room = min(self._max_new_tokens, self._num_positions - begin)
        if room < 1:
            raise ConfigError(
                f"the conversation takes {begin:,} tokens, and the model has {self._num_positions:,} positions; "
                f"begin a new one by {_RESET}"
            )
        has_beams = (self._model.generation_config.num_beams or 1) > 1  # which say no word before the last
        with _interruptible() as stopped:
            tokens = write_text(
                self._model,
                self._tokenizer,
                inputs.pop("input_ids").to(self._device),
                **inputs.to(self._device),
                max_new_tokens=room,
                streamer=None if show is None or has_beams else self._streamer(show),
                stopping_criteria=[_Stop(stopped)],
                **self._settings,
            )
        answer = self._tokenizer.decode(tokens, skip_special_tokens=True)
        if show is not None and has_beams:
            show(answer)
        self._turns = [*turns, {"role": "assistant", "content": answer}]
        return answer, len(tokens)

    def _encoded(self, turns: list[dict[str, str]]) -> Any:
        if self._tokenizer.chat_template is None:
            return self._tokenizer(turns[-1]["content"], return_tensors="pt")
        from transformers import BatchEncoding

        try:
            found = self._renderer.apply(turns, add_generation_prompt=True, return_dict=True)
        except RenderError as error:
            raise ConfigError(f"the chat template does not take this conversation: {error}") from error
        return BatchEncoding({name: [values] for name, values in found.items()}, tensor_type="pt")

    def _streamer(self, show: Any) -> Any:
        from transformers import TextStreamer

        class WordStreamer(TextStreamer):
            def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
                show(text)

        return WordStreamer(self._tokenizer, skip_prompt=True, skip_special_tokens=True)


class _Stop:
    """Ends an answer behind the token that is being made."""

    def __init__(self, stopped: list[bool]) -> None:
        self._stopped = stopped

    def __call__(self, tokens: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        """(sequences,): True for each that ends."""
        return torch.full((tokens.shape[0],), bool(self._stopped), dtype=torch.bool, device=tokens.device)


@contextmanager
def _interruptible() -> Iterator[list[bool]]:
    """Ctrl-C fills the list; a second one raises, since a token may take long."""
    pressed: list[bool] = []

    def note(number: int, frame: Any) -> None:
        if pressed:
            raise KeyboardInterrupt
        pressed.append(True)

    previous = signal.signal(signal.SIGINT, note)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, previous)


def _sampling(temperature: float | None) -> dict[str, Any]:
    """Arguments of `generate`; none where the folder's generation config decides."""
    if temperature is None:
        return {}
    if temperature == 0:
        return {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    return {"do_sample": True, "temperature": temperature}


def _end_tokens(model: Any, tokenizer: Any) -> list[int] | None:
    """Those of the generation config, and the tokenizer's, which a chat template ends a turn with."""
    said = model.generation_config.eos_token_id
    found = {*(said if isinstance(said, list) else [said]), tokenizer.eos_token_id} - {None}
    return sorted(found) or None
