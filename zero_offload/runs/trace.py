"""A trace of a few steps of a run, in a file beside its metrics.

The calls: `StepTrace` around the steps; per step `begin_step` and `end_step`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from torch import nn

import zero_offload as zo
from zero_offload.base.errors import StorageError
from zero_offload.model.profile import Profile

_STEPS_BEFORE_TRACE = 2
"""The first of a process records the order of uses, the second is the first to follow it."""


class StepTrace:
    """Records up to `num_steps` steps of this start after its second, and writes them when they are over.

    A trace that cannot be written is noted, and the run goes on.
    """

    def __init__(self, model: nn.Module, path: Path, num_steps: int, note: Callable[[str], None]) -> None:
        self._model = model
        self._path = path
        self._left = num_steps
        self._note = note
        self._num_seen = 0
        self._recording = ExitStack()
        self._profile: Profile | None = None

    def __enter__(self) -> StepTrace:
        return self

    def __exit__(self, *_: object) -> None:
        self._finish()

    def begin_step(self) -> None:
        self._num_seen += 1
        if self._num_seen == _STEPS_BEFORE_TRACE + 1 and self._left:
            self._profile = self._recording.enter_context(zo.profile(self._model))

    def end_step(self) -> None:
        if self._profile is not None:
            self._left -= 1
            if self._left == 0:
                self._finish()

    def _finish(self) -> None:
        profile, self._profile = self._profile, None
        self._recording.close()
        if profile is None:
            return
        try:
            path = profile.export_chrome_trace(self._path)
        except StorageError as error:
            self._note(f"no trace: {error}")
        else:
            self._note(f"trace: {path}; open it in https://ui.perfetto.dev")
