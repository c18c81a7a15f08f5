"""Ctrl-C at a process, as a user does it."""

from __future__ import annotations

import signal
import subprocess


def interrupt(process: subprocess.Popen[str], times: int = 1, limit_s: float = 60.0) -> tuple[str, str]:
    """Its output until it ended."""
    for _ in range(times):
        process.send_signal(signal.SIGINT)
    return process.communicate(timeout=limit_s)
