"""Figures of one section of `gpu.py`, in a file after each figure: a section that is killed keeps what it had.

A part that fails is a figure too, `{"error": TRACEBACK}`, and the next part runs. Memory that runs out is an answer,
not a failure: `{"out_of_memory": MESSAGE}`. A part that cannot run on this machine raises `Skip`, with the reason.
"""

from __future__ import annotations

import gc
import json
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

Figures = dict[str, Any]


class Skip(Exception):
    """A section, or a part of one, does not suit this machine; the message says why."""


class Record:
    def __init__(self, path: Path, ends: float) -> None:
        """`ends`: the `time.perf_counter()` at which measuring must be over."""
        self._path, self._ends = path, ends
        self.figures: Figures = {}

    @property
    def left_s(self) -> float:
        return self._ends - time.perf_counter()

    def put(self, name: str, figures: Figures) -> None:
        self.figures[name] = figures
        print(f"  {name}: {_in_short(figures)}", flush=True)
        unfinished = self._path.with_suffix(".part")
        unfinished.write_text(json.dumps(self.figures, indent=1))
        unfinished.replace(self._path)

    def attempt(self, name: str, call: Callable[[], Figures], least_s: float = 0.0) -> Figures | None:
        """Put what `call` returns; None where it failed, or where less than `least_s` is left."""
        if self.left_s < least_s:
            self.put(name, {"skipped": f"it takes {least_s:.0f} s or more, and {max(self.left_s, 0):.0f} s are left"})
            return None
        try:
            figures = call()
        except torch.OutOfMemoryError as error:
            self.put(name, {"out_of_memory": str(error)[:500]})
        except Skip as reason:
            self.put(name, {"skipped": str(reason)})
        except Exception:
            self.put(name, {"error": traceback.format_exc()})
        else:
            self.put(name, figures)
            return figures
        gc.collect()  # frames of the traceback held tensors
        return None


def _in_short(figures: Figures) -> str:
    if "error" in figures:
        return str(figures["error"]).rstrip()
    plain = {key: value for key, value in figures.items() if isinstance(value, int | float | str)}
    shown = (f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in plain.items())
    return ", ".join(text for text in shown if len(text) < 300)
