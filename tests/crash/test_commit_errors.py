"""A flush or a rename of a commit fails: it is not tried again, the run stops, and the generation before is whole."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

import zero_offload as zo
from tests.helpers.disk import assert_finishes, close_broken, drain, open_model, train

STEPS = 6
CALLS = {"fdatasync": 1, "fsync": 4, "replace": 2}
"""Of one commit, with durability="commit"; fsync and replace: of the rank's manifest, then of the global one."""
PLACES = [(call, nth) for call, count in CALLS.items() for nth in range(1, count + 1)]
CODES = {"fdatasync": errno.EIO, "fsync": errno.ENOSPC, "replace": errno.EACCES}


class _Failing:
    """A call of `os` that fails at its nth use from now on, and counts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, name: str, nth: int, code: int) -> None:
        self._original, self._nth, self._code = getattr(os, name), nth, code
        self.count = 0
        monkeypatch.setattr(os, name, self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.count += 1
        if self.count == self._nth:
            raise OSError(self._code, os.strerror(self._code))
        return self._original(*args, **kwargs)


@pytest.mark.parametrize("settings", [{}, {"params": "cpu", "optimizer": "cpu"}], ids=["on disk", "in memory"])
@pytest.mark.parametrize(("call", "nth"), PLACES)
def test_each_call_of_a_commit(
    call: str, nth: int, settings: dict[str, Any], nvme: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    choices = settings | {"durability": "commit"}
    model, optimizer = open_model(nvme, **choices)
    train(model, optimizer, 0, 2)
    drain(model)
    failing = _Failing(monkeypatch, call, nth, CODES[call])
    with pytest.raises(zo.StorageError) as caught:
        train(model, optimizer, 2, STEPS)
        drain(model)
    assert failing.count == nth, "tried again"
    assert caught.value.exit_code == 4
    assert str(nvme) in str(caught.value) and os.strerror(CODES[call]) in str(caught.value)
    # Nothing that comes later makes it a commit after all.
    with pytest.raises(zo.StorageError) as again:
        zo.close(model)
    assert str(again.value) == str(caught.value) and failing.count == nth
    monkeypatch.undo()
    # Until its last flush a commit may or may not be there: what was renamed is seen by who starts at once.
    is_last = (call, nth) == ("fsync", 4)
    assert assert_finishes(nvme, STEPS, **choices) == (3 if is_last else 2)


@pytest.mark.parametrize("code", [errno.EROFS, errno.EIO, errno.ENOSPC, errno.EDQUOT])
def test_each_reason(code: int, nvme: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without flushes too."""
    model, optimizer = open_model(nvme)
    train(model, optimizer, 0, 2)
    drain(model)
    _Failing(monkeypatch, "replace", 2, code)
    with pytest.raises(zo.StorageError, match=f"generation-[01].json: {os.strerror(code)}"):
        train(model, optimizer, 2, STEPS)
        drain(model)
    close_broken(model)
    monkeypatch.undo()
    assert not list(nvme.glob("*.tmp"))
    assert assert_finishes(nvme, STEPS) == 2
