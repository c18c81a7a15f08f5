"""The device's C functions, by ctypes, which lets the GIL go during a call: operations run in some of them."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, c_char_p, c_int, c_int64, c_size_t, c_uint64, c_void_p
from pathlib import Path
from typing import Any

_FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "set_policy": (None, [c_int, c_uint64]),
    "reset": (None, []),
    "num_queued": (c_int64, []),
    "take_races": (c_char_p, []),
    "take_error": (c_char_p, []),
    "num_counts": (c_int, []),
    "count_name": (c_char_p, [c_int]),
    "counted": (c_int64, [c_int]),
    "register_host": (c_int, [c_void_p, c_size_t]),
    "unregister_host": (c_int, [c_void_p]),
    "refuse_registration": (None, [c_int]),
    "set_memory_limit": (None, [c_int, c_size_t]),
    "memory_limit": (c_size_t, [c_int]),
    "memory_stats": (None, [c_int, POINTER(c_int64)]),
    "reset_peak": (None, [c_int]),
    "empty_cache": (None, []),
    "launch_exchange": (c_void_p, [c_int, c_void_p, c_size_t, c_void_p, c_size_t]),
    "exchange_sent": (c_void_p, [c_void_p]),
    "exchange_received": (c_void_p, [c_void_p]),
    "exchange_is_read": (c_int, [c_void_p]),
    "fetch_exchange": (None, [c_void_p]),
    "finish_exchange": (None, [c_void_p]),
    "current_device": (c_int, []),
    "set_current_device": (None, [c_int]),
    "get_random": (None, [c_int, POINTER(c_uint64), POINTER(c_uint64)]),
    "set_random": (None, [c_int, c_uint64, c_uint64]),
}

_functions: dict[str, Any] = {}


def load(path: Path) -> None:
    """Register the device with torch, which is imported already."""
    library = ctypes.CDLL(str(path))
    for name, (result, arguments) in _FUNCTIONS.items():
        function = library[f"fake_gpu_{name}"]
        function.restype, function.argtypes = result, arguments
        _functions[name] = function


def is_loaded() -> bool:
    return bool(_functions)


def call(name: str, *arguments: Any) -> Any:
    assert is_loaded(), "this process has no fake GPU: `device.load()` is the first thing that it must do"
    return _functions[name](*arguments)
