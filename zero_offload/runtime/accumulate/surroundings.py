"""What torch keeps for each thread, taken from one and entered on another, so that both compute alike.

Owns nothing. What torch keeps for the process (generators, default dtype, backends) needs no care.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import _get_current_function_mode_stack, _pop_mode, _push_mode
from torch.utils import _python_dispatch as dispatch

from zero_offload.hardware.device import Device, this_stream
from zero_offload.runtime.saved.recompute import Autocast
from zero_offload.runtime.saved.tensors import saving_hooks


class Surroundings:
    """Those of the thread that makes this object."""

    def __init__(self, device: Device) -> None:
        self._stream = this_stream()
        self._grad = torch.is_grad_enabled()
        autocasts = [Autocast.of(kind) for kind in sorted({"cpu", device.torch_device.type})]
        # Entered only where it is on: autocast forgets its casts of weights when the outermost context ends.
        self._autocasts = [autocast for autocast in autocasts if autocast.enabled]
        self._hooks = saving_hooks()
        # The default device of `with torch.device(...)` and of torch.set_default_device is a mode, too.
        self._function_modes = _get_current_function_mode_stack()
        self._dispatch_modes = dispatch._get_current_dispatch_mode_stack()

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """On another thread."""
        with contextlib.ExitStack() as contexts:
            contexts.enter_context(self._stream())
            for function_mode in self._function_modes:
                _push_mode(function_mode)
                contexts.callback(_pop_mode)
            for dispatch_mode in self._dispatch_modes:
                dispatch._push_mode(dispatch_mode)
                contexts.callback(dispatch._pop_mode)
            for autocast in self._autocasts:
                contexts.enter_context(torch.autocast(*autocast))
            contexts.enter_context(torch.set_grad_enabled(self._grad))
            if self._hooks is not None:
                contexts.enter_context(saved_tensors_hooks(*self._hooks))
            yield
