"""Entries of a generation beside shards, as JSON, and back: persistent buffers, generators, the program's values.

Buffers (running statistics, ...) are what a state dict has beside parameters. They are small and change without us, so
a generation has them in its manifest: of several ranks rank 0's, which all get back. They are compressed, since those
that are large are masks. A program may change a buffer's shape (a queue, a replay memory). So a generation has, too,
the form in which each was offloaded: two models are the same if these are. Generators are Python's, numpy's, torch's
and the devices'.

Values that JSON has no form for are wrapped, so that they come back as they were. Schedulers have such: numbers and
tuples as keys (milestones), infinities (a best loss), tensors of one number (learning rates). Tuples and NumPy's
numbers are wrapped too. Values that come back equal those that were given. A class derived from dict, list, tuple, text
or number comes back as the plain one.

The calls: `note_forms` of a model that was just offloaded. `forms_of`, `capture_buffers`, `capture_rng`, `to_json` when
a step is complete. `check_buffers` before anything is replaced, `restore_buffers`, `restore_rng`, `from_json` after.
"""

from __future__ import annotations

import base64
import math
import random
import zlib
from collections.abc import Mapping, MutableMapping
from typing import Any

import numpy as np
import torch
from torch import nn

from zero_offload.base.errors import CheckpointError
from zero_offload.base.host import host_empty, host_tensor
from zero_offload.base.problems import warn_user
from zero_offload.checkpoint.format import Generation, dtype_of
from zero_offload.hardware.device import device_rng_states, set_device_rng_states
from zero_offload.plan.quantized import ordinary_buffers_of

Saved = Mapping[str, Mapping[str, Any]]
Form = tuple[str, list[int]]
"""The dtype and shape of a buffer."""

Forms = Mapping[str, Form]
NotedForms = MutableMapping[nn.Module, Forms]
"""By module and by the names of its own buffers."""
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
    return {
        name: module.get_buffer(own)
        for name, (module, own) in _holders(model).items()
        if own not in module._non_persistent_buffers_set
    }


def _holders(model: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    """Of each such buffer its module, and its name there. A persistent holder and another one count apart."""
    found: dict[tuple[int, bool], tuple[str, tuple[nn.Module, str]]] = {}
    for path, module in model.named_modules():
        for own, buffer in ordinary_buffers_of(module):
            is_persistent = own not in module._non_persistent_buffers_set
            found.setdefault((id(buffer), is_persistent), (f"{path}.{own}" if path else own, (module, own)))
    return {name.replace("_orig_mod.", ""): holder for name, holder in found.values()}


def note_forms(model: nn.Module, noted: NotedForms) -> None:
    """Note the forms that the buffers of modules without a note have now."""
    for module in model.modules():
        noted.setdefault(module, {own: _form_of(buffer) for own, buffer in ordinary_buffers_of(module)})


def forms_of(model: nn.Module, noted: NotedForms) -> dict[str, Form]:
    """The noted form of each buffer, or the present one."""
    return {
        name: noted.get(module, {}).get(own, _form_of(module.get_buffer(own)))
        for name, (module, own) in _holders(model).items()
    }


def _form_of(buffer: torch.Tensor) -> Form:
    return _name_of(buffer.dtype), list(buffer.shape)


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def capture_buffers(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Buffers with values and places of their own; not meta, distributed and sparse tensors."""
    return {
        name: _encoded(buffer)
        for name, buffer in persistent_buffers(model).items()
        if type(buffer) is torch.Tensor and buffer.layout is torch.strided and not buffer.is_meta
    }


def _encoded(buffer: torch.Tensor) -> dict[str, Any]:
    memory = buffer.detach().cpu().resolve_conj().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    data = base64.b64encode(zlib.compress(memory, _LEVEL)).decode()
    dtype, shape = _form_of(buffer)
    return {"dtype": dtype, "shape": shape, "data": data}


def decoded(saved: Mapping[str, Any]) -> torch.Tensor:
    """One buffer, on the host."""
    try:
        memory = bytearray(zlib.decompress(base64.b64decode(saved["data"])))
    except zlib.error as error:
        raise ValueError(error) from error
    if not memory:
        return host_empty(saved["shape"], dtype_of(saved["dtype"]))
    return torch.frombuffer(memory, dtype=dtype_of(saved["dtype"])).reshape(saved["shape"])


def check_buffers(model: nn.Module, forms: Forms, found: Generation, where: str) -> None:
    """Raise CheckpointError where one was offloaded in another form than `forms` has, or is damaged."""
    saved, then = buffers_in(found), found.buffer_forms or {}
    for name in persistent_buffers(model).keys() & saved.keys():
        there, here = then.get(name, _form_of(decoded(saved[name]))), forms[name]
        # Before a generation had forms, floating buffers kept their dtype: such a run goes on so.
        is_older = name not in then and all(dtype_of(dtype).is_floating_point for dtype, _ in (there, here))
        if list(there) != list(here) and not (is_older and there[1] == here[1]):
            raise CheckpointError(
                f"{where} holds another model: its buffer {name!r} is {there[1]} torch.{there[0]}, this model's "
                f"{here[1]} torch.{here[0]}. Build the same model, or use another directory"
            )


def buffers_in(found: Generation) -> Saved:
    buffers: Saved = found.payload.get("buffers", {})
    return buffers


def restore_buffers(model: nn.Module, saved: Saved, where: str, device: torch.device) -> None:
    """Give buffers the values, shapes and dtypes that they had; also those that are None until a forward makes them.
    Warns of those that keep their own, and of those that the model does not have."""
    buffers = persistent_buffers(model)
    if left := sorted(buffers.keys() - saved.keys()):
        warn_user(
            f"{where} does not have the buffers {', '.join(left[:3])}{', ...' if len(left) > 3 else ''}: they keep the "
            "values that they have now. zo.commit and zo.save_checkpoint write the buffers that a model has then"
        )
    modules, lost = {path.replace("_orig_mod.", ""): module for path, module in model.named_modules()}, []
    with torch.no_grad():
        for name in sorted(saved):
            value, (path, _, own) = decoded(saved[name]), name.rpartition(".")
            if name in buffers:
                buffer = buffers[name]
                if _form_of(buffer) == _form_of(value):
                    buffer.copy_(value)
                else:
                    buffer.data = value.to(buffer.device)
            elif path in modules and own in modules[path]._buffers:
                setattr(modules[path], own, value.to(device))
            else:
                lost.append(name)
    if lost:
        warn_user(
            f"{where} has the buffers {', '.join(lost[:3])}{', ...' if len(lost) > 3 else ''}, which this model does "
            "not have: their values are not restored. Register them before zo.resume, with None where a forward "
            "makes them"
        )


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
