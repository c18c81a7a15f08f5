"""`chat` and `evaluate` on a machine that lacks what they need, and with flags that they do not have."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from zero_offload.cli.main import main
from zero_offload.runs.terminal import printable


@pytest.mark.parametrize("words", [["chat"], ["evaluate", "--data", "chat.jsonl"]], ids=lambda words: words[0])
def test_without_the_packages(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in ("peft", "trl") else object())
    assert main([words[0], str(tmp_path), *words[1:]]) == 3
    error = capsys.readouterr().err
    assert "needs trl, peft, which are not installed; pip install 'zero_offload[finetune]'" in error


def test_what_would_steer_a_terminal_is_not_printed() -> None:
    assert printable("a\x1b[2Jb\x07\r\n\tü\u3000\u200d\x9b") == "a\ufffd[2Jb\ufffd\ufffd\n\tü\u3000\u200d\ufffd"
