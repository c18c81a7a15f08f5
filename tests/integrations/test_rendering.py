"""A chat template runs in a process of its own, which ends when it takes too long, makes too much, or has no owner."""

from __future__ import annotations

import fcntl
import gc
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.folders import CHATML, CHATML_MARKED, tokenizer, write_folder
from zero_offload.cli.main import main
from zero_offload.finetune.data import rendering
from zero_offload.finetune.data.rendering import Renderer, RenderError

MESSAGES = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Because."}]


class Slow:
    """A tokenizer whose template takes as long as a conversation says."""

    def apply_chat_template(self, messages: list[Any], **settings: Any) -> str:
        time.sleep(float(messages[0]))
        return str(messages[0])


@pytest.mark.parametrize("template", [CHATML, CHATML_MARKED])
def test_it_makes_what_the_tokenizer_makes(template: str) -> None:
    known = tokenizer(template)
    renderer = Renderer(known)
    for settings in (
        {"tokenize": False},
        {"tokenize": False, "add_generation_prompt": True},
        {"tokenize": True, "return_dict": True},
    ):
        expected = known.apply_chat_template(MESSAGES, **settings)
        assert renderer.apply(MESSAGES, **settings) == (expected if isinstance(expected, str) else dict(expected))


def test_one_that_does_not_end_is_given_up_and_the_next_conversation_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendering, "LIMIT_S", 1.0)
    renderer = Renderer(Slow())
    assert renderer.apply([0.0]) == "0.0"
    with pytest.raises(RenderError, match="has not ended within 1 s"):
        renderer.apply([60.0])
    assert renderer.apply([0.0]) == "0.0"


def test_a_text_that_is_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendering, "MAX_LETTERS", 10)
    with pytest.raises(RenderError, match="letters, and 10 is the most"):
        Renderer(tokenizer(CHATML)).apply(MESSAGES, tokenize=False)


def test_memory_that_is_too_much_is_an_error_of_the_template(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rendering, "_MEMORY_BYTES", 64 << 20)
    template = "{{ messages[0]['content'] * 200000000 }}"
    with pytest.raises(RenderError):
        Renderer(tokenizer(template)).apply(MESSAGES, tokenize=False)


def test_half_of_a_letter_is_an_error_of_the_template() -> None:
    made = tokenizer("{% for message in messages %}{{ message.name }}{{ message.content }}{% endfor %}")
    with pytest.raises(RenderError, match="it writes half of a character, .*which no tokenizer takes"):
        Renderer(made).apply([{**MESSAGES[0], "name": "\ud83d"}], tokenize=False)


def test_what_a_template_raises_is_said() -> None:
    with pytest.raises(RenderError, match="roles alternate"):
        Renderer(tokenizer("{{ raise_exception('roles alternate') }}")).apply(MESSAGES, tokenize=False)


def test_the_process_ends_with_its_owner() -> None:
    renderer = Renderer(Slow())
    renderer.apply([0.0])
    children = set(map(int, Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()))
    del renderer
    gc.collect()
    left = set(map(int, Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()))
    assert len(children - left) == 1


def test_the_process_holds_no_files_of_its_owner(tmp_path: Path) -> None:
    with (tmp_path / "LOCK").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        renderer = Renderer(Slow())
        renderer.apply([0.0])
    with (tmp_path / "LOCK").open("w") as again:
        fcntl.flock(again, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert renderer.apply([0.0]) == "0.0"


def test_a_fork_that_drops_its_copy_leaves_the_process_to_its_owner() -> None:
    renderer = Renderer(Slow())
    assert renderer.apply([0.0]) == "0.0"
    serving = Path(f"/proc/self/task/{os.getpid()}/children").read_text()
    if (pid := os.fork()) == 0:
        renderer.close()
        os._exit(0)
    os.waitpid(pid, 0)
    assert renderer.apply([0.0]) == "0.0"
    assert Path(f"/proc/self/task/{os.getpid()}/children").read_text() == serving, "the same process"


def test_a_command_says_which_conversation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(rendering, "MAX_LETTERS", 400)
    folder = write_folder(tmp_path / "model")
    rows = [{"messages": MESSAGES}, {"messages": [{"role": "user", "content": "Why? " * 200}, MESSAGES[1]]}]
    data = tmp_path / "chat.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    code = main(["finetune", str(folder), "--data", str(data), "--dry-run", "--out", str(tmp_path / "out")])
    said = capsys.readouterr().err
    assert code == 2 and "line 2" in said and "letters" in said and "Traceback" not in said
