"""Graphs of a device's work are refused. They run again with the addresses of when they were recorded, and a parameter
moves each time its unit comes.

Owns nothing. A capture is seen at the next use of a unit. Graphs that torch.compile records by itself are seen by its
settings: of the compiled calls around a module, and of the modules inside. Not seen: a compiled function that is called
in a forward, `backend="cudagraphs"`, and a capture in which no unit's use begins.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn

from zero_offload.base.errors import ConfigError
from zero_offload.hardware.device import is_capturing

_SETTING = "triton.cudagraphs"
_INSTEAD = (
    "a graph runs again with the addresses of when it was recorded, and parameters that are offloaded move. Use "
    "torch.compile(model) or mode='max-autotune-no-cudagraphs'"
)


def refuse_capture(device: torch.device) -> None:
    """Raise ConfigError where this thread's launches are recorded for a graph."""
    if is_capturing(device):
        raise ConfigError(f"an offloaded model cannot be captured in a graph (torch.cuda.graph): {_INSTEAD}")


def refuse_graph_modes(module: nn.Module) -> None:
    """Raise ConfigError if torch.compile makes graphs of the forward that runs now, or of a module inside of it."""
    if _is_within_graphs() or any(map(_makes_graphs, module.modules())):
        raise ConfigError(
            "torch.compile is told to make graphs, by mode='reduce-overhead' or 'max-autotune' or by "
            f"{_SETTING}: {_INSTEAD}"
        )


def _is_within_graphs() -> bool:
    """True if a compiled call with that setting is on this thread's stack."""
    frame = sys._getframe()
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_globals.get("__name__") == "torch._dynamo.eval_frame":
            config = getattr(frame.f_locals.get("self"), "compiler_config", None)
            if isinstance(config, dict) and config.get(_SETTING):
                return True
    return False


def _makes_graphs(module: nn.Module) -> bool:
    """True if it was compiled so, by `module.compile(...)` or by `torch.compile(module, ...)`."""
    config: Any = None
    for compiled in (module.__dict__.get("_compiled_call_impl"), module):
        if (describe := getattr(compiled, "__dict__", {}).get("get_compiler_config")) is not None:
            config = config or describe()
    return isinstance(config, dict) and bool(config.get(_SETTING))
