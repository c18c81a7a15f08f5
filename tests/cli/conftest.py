"""The end of every run of `train`, made short where a test looks at something else."""

from __future__ import annotations

from typing import Any

import pytest


@pytest.fixture
def quick_endings(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run in this process draws no picture, and its sample is short: both take longer than its steps."""
    from matplotlib.figure import Figure

    from zero_offload.finetune.pretrain import train

    generate = train.generate

    def short(model: Any, prompt: bytes, count: int, **how: Any) -> Any:
        return generate(model, prompt, min(count, 16), **how)

    monkeypatch.setattr(train, "generate", short)
    # As large as a picture: a full disk has no room for it.
    monkeypatch.setattr(
        Figure, "savefig", lambda figure, file, **how: file.write(b"\x89PNG\r\n\x1a\n" + bytes(1 << 17))
    )
