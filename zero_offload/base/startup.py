"""Ctrl-C while the `zero-offload` command is still importing: the process ends at once, without a traceback.

Owns the handler of SIGINT from the package's first import to the command's begin; a program that imports the package
keeps its own. C code that is imported drops some of the exceptions that Python makes of a Ctrl-C, and the rest are
tracebacks. Calls: `interrupts_end_the_process` by the package, `interrupts_raise` by the command.
"""

from __future__ import annotations

import os
import signal
import sys
import threading


def _is_command() -> bool:
    """True if this process runs the command, by its script or by `python -m zero_offload`."""
    return sys.orig_argv[1:3] == ["-m", "zero_offload"] or os.path.basename(sys.argv[0]) == "zero-offload"


def interrupts_end_the_process() -> None:
    """Use the system's own action from here on, where Python's has not been replaced: `nohup` ignores Ctrl-C."""
    in_main_thread = threading.current_thread() is threading.main_thread()
    if in_main_thread and _is_command() and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def interrupts_raise() -> None:
    """Raise KeyboardInterrupt from here on, as in any program."""
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)


interrupts_end_the_process()
