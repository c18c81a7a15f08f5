"""Entries of a generation beside shards, as JSON, and back: persistent buffers, generators, the program's values.

Buffers (running statistics, ...) are what a state dict has beside parameters. They are small and change without us, so
a generation has them in its manifest: of several ranks rank 0's, which all get back. They are compressed, since those
that are large are masks. Generators are Python's, numpy's, torch's and the devices'.

Values that JSON has no form for are wrapped, so that they come back as they were. Schedulers have such: numbers and
tuples as keys (milestones), infinities (a best loss), tensors of one number (learning rates). Tuples and NumPy's
numbers are wrapped too. Values that come back equal those that were given. A class derived from dict, list, tuple, text
or number comes back as the plain one. The calls: `capture_buffers`, `capture_rng`, `to_json` when a step is complete;
`check_buffers` before anything is replaced, `restore_buffers`, `restore_rng`, `from_json` after.
"""

from __future__ import annotations

import base64
import math
import random
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from zero_offload.base.errors import CheckpointError
from zero_offload.base.host import host_empty, host_tensor
from zero_offload.base.problems import warn_user
from zero_offload.checkpoint.format import dtype_of
from zero_offload.hardware.device import device_rng_states, set_device_rng_states
from zero_offload.plan.quantized import ordinary_buffers_of

Saved = Mapping[str, Mapping[str, Any]]
_LEVEL = 1
"""The fastest: `zo.commit` waits for it."""

_PAIRS, _FLOAT, _TENSOR, _TUPLE, _NUMPY = "__pairs__", "__float__", "__tensor__", "__tuple__", "__numpy__"
_WRAPS = frozenset({_PAIRS, _FLOAT, _TENSOR, _TUPLE, _NUMPY})
_NUMPY_KINDS = {np.dtype(code).name: np.dtype(code).type for code in "?bBhHiIlLqQefd"}
"""Those whose numbers JSON holds."""

_KEYS = (str, bool, int, float, tuple, np.generic)


def persistent_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Those that are not offloaded, by the first name that a state dict has for each, without what torch.compile puts
    before it."""
    found: dict[int, tuple[str, torch.Tensor]] = {}
    for path, module in model.named_modules():
        for name, buffer in ordinary_buffers_of(module):
            if name not in module._non_persistent_buffers_set:
                found.setdefault(id(buffer), ((f"{path}.{name}" if path else name), buffer))
    return {name.replace("_orig_mod.", ""): buffer for name, buffer in found.values()}


def capture_buffers(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Buffers with values and places of their own; not meta, distributed and sparse tensors."""
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
        warn_user(
            f"{where} does not have the buffers {', '.join(left[:3])}{', ...' if len(left) > 3 else ''}: they keep the "
            "values that they have now. zo.commit and zo.save_checkpoint write the buffers that a model has then"
        )
    with torch.no_grad():
        for name in buffers.keys() & saved.keys():
            buffers[name].copy_(decoded(saved[name]))


def _text_of(state: torch.Tensor) -> str:
    return base64.b64encode(bytes(state.numpy())).decode()


def _state_of(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)


def capture_rng() -> dict[str, Any]:
    """The state of every generator of this process."""
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    return {
        "python": [version, list(words), gauss],
        "numpy": [name, [int(key) for key in keys], int(position), int(has_gauss), float(cached)],
        "torch": _text_of(torch.get_rng_state()),
        "devices": [_text_of(state) for state in device_rng_states()],
    }


def restore_rng(saved: dict[str, Any]) -> None:
    """Put every generator where `capture_rng` found it."""
    version, words, gauss = saved["python"]
    random.setstate((version, tuple(words), gauss))
    name, keys, *rest = saved["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(_state_of(saved["torch"]))
    set_device_rng_states([_state_of(state) for state in saved["devices"]])


def to_json(value: Any, where: str = "") -> Any:
    """A copy that later changes cannot reach.

    Raises TypeError for what is neither JSON nor wrapped here; it names the place, of which `where` is the beginning.
    """
    if isinstance(value, np.generic) and value.dtype.name in _NUMPY_KINDS:
        return {_NUMPY: [value.dtype.name, to_json(value.item())]}
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {_FLOAT: str(float(value))}
    if isinstance(value, list | tuple):
        found = [to_json(each, f"{where}[{number}]") for number, each in enumerate(value)]
        return {_TUPLE: found} if isinstance(value, tuple) else found
    if isinstance(value, torch.Tensor) and value.ndim == 0 and not value.is_complex():
        return {_TENSOR: [str(value.dtype).removeprefix("torch."), to_json(value.item())]}
    if not isinstance(value, Mapping):
        raise TypeError(f"{where or 'it'} is of type {_kind(value)}, and numbers, texts, lists and dicts are kept")
    if wrong := [key for key in value if not (key is None or isinstance(key, _KEYS))]:
        raise TypeError(
            f"{where or 'it'} is a dict with a key of type {_kind(wrong[0])}; keys are numbers, texts and tuples"
        )
    pairs = [(key, to_json(each, f"{where}[{key!r}]")) for key, each in value.items()]
    if all(isinstance(key, str) for key in value) and not _WRAPS & value.keys():
        return {str(key): each for key, each in pairs}
    return {_PAIRS: [[to_json(key, f"a key of {where or 'it'}"), each] for key, each in pairs]}


def _kind(value: Any) -> str:
    shape = f" of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else ""
    return type(value).__name__ + shape


def from_json(value: Any) -> Any:
    if isinstance(value, list):
        return [from_json(each) for each in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {_FLOAT}:
        return float(value[_FLOAT])
    if value.keys() == {_TENSOR}:
        dtype, number = value[_TENSOR]
        return host_tensor(from_json(number), getattr(torch, dtype))
    if value.keys() == {_TUPLE}:
        return tuple(from_json(each) for each in value[_TUPLE])
    if value.keys() == {_NUMPY}:
        name, number = value[_NUMPY]
        return _NUMPY_KINDS[name](from_json(number))
    if value.keys() == {_PAIRS}:
        return {from_json(key): from_json(each) for key, each in value[_PAIRS]}
    return {key: from_json(each) for key, each in value.items()}
