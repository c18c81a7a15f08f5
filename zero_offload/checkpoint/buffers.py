"""Persistent buffers (running statistics, ...) as JSON, and back: what a state dict has beside parameters.

They are small beside parameters and change without us, so a generation has them in its manifest: of several ranks rank
0's, which all get back. Compressed, since those that are large are masks. The calls: `capture_buffers` when a step is
complete; `check_buffers` before anything is replaced, `restore_buffers` after.
"""

from __future__ import annotations

import base64
import warnings
import zlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from zero_offload.base.errors import CheckpointError
from zero_offload.base.host import host_empty
from zero_offload.checkpoint.format import dtype_of

Saved = Mapping[str, Mapping[str, Any]]
_LEVEL = 1
"""The fastest: `zo.commit` waits for it."""


def persistent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """By the first name that a state dict has for each, but for what torch.compile puts before it."""
    found: dict[int, tuple[str, torch.Tensor]] = {}
    for path, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                found.setdefault(id(buffer), ((f"{path}.{name}" if path else name), buffer))
    return {name.replace("_orig_mod.", ""): buffer for name, buffer in found.values()}


def capture_buffers(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Of those with values of their own, at places of their own: not of meta, distributed and sparse tensors."""
    return {
        name: _encoded(buffer)
        for name, buffer in persistent_buffers(model).items()
        if type(buffer) is torch.Tensor and buffer.layout is torch.strided and not buffer.is_meta
    }


def _encoded(buffer: torch.Tensor) -> dict[str, Any]:
    memory = buffer.detach().cpu().resolve_conj().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    dtype, shape = str(buffer.dtype).removeprefix("torch."), list(buffer.shape)
    return {"dtype": dtype, "shape": shape, "data": base64.b64encode(zlib.compress(memory, _LEVEL)).decode()}


def decoded(saved: Mapping[str, Any]) -> torch.Tensor:
    """One buffer, on the host."""
    try:
        memory = bytearray(zlib.decompress(base64.b64decode(saved["data"])))
    except zlib.error as error:
        raise ValueError(error) from error
    if not memory:
        return host_empty(saved["shape"], dtype_of(saved["dtype"]))
    return torch.frombuffer(memory, dtype=dtype_of(saved["dtype"])).reshape(saved["shape"])


def check_buffers(model: nn.Module, saved: Saved, where: str) -> None:
    """Raise CheckpointError where one has another shape or dtype."""
    for name, buffer in persistent_buffers(model).items():
        if name in saved:
            there = decoded(saved[name])
            if (there.shape, there.dtype) != (buffer.shape, buffer.dtype):
                raise CheckpointError(
                    f"{where} holds another model: its buffer {name!r} is {list(there.shape)} {there.dtype}, this "
                    f"model's {list(buffer.shape)} {buffer.dtype}. Build the same model, or use another directory"
                )


def restore_buffers(model: nn.Module, saved: Saved, where: str) -> None:
    """Give buffers the values that they had. Warns of those that keep their own."""
    buffers = persistent_buffers(model)
    if left := sorted(buffers.keys() - saved.keys()):
        warnings.warn(
            f"{where} does not have the buffers {', '.join(left[:3])}{', ...' if len(left) > 3 else ''}: they keep the "
            "values that they have. It has those of the model as it was at zo.commit or zo.save_checkpoint",
            stacklevel=4,
        )
    with torch.no_grad():
        for name in buffers.keys() & saved.keys():
            buffers[name].copy_(decoded(saved[name]))
