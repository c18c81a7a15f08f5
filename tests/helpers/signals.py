"""Ctrl-C at a process, as a user does it: once more when nothing happens."""

from __future__ import annotations

import signal
import subprocess

_AGAIN_AFTER_S = 5.0


def interrupt(process: subprocess.Popen[str], times: int = 1, limit_s: float = 60.0) -> tuple[str, str]:
    """What it printed until it ended.

    Python drops a KeyboardInterrupt that strikes in a destructor ("Exception ignored in"): then nothing happens.
    """
    for _ in range(int(limit_s / _AGAIN_AFTER_S)):
        for _ in range(times):
            process.send_signal(signal.SIGINT)
        try:
            return process.communicate(timeout=_AGAIN_AFTER_S)
        except subprocess.TimeoutExpired:
            continue
    raise AssertionError(f"the process did not end within {limit_s:g} s of Ctrl-C")
