"""Which tensors a model offloads: its parameters, and what quantized weights consist of.

A quantized weight is one parameter of the model and several tensors. Libraries keep the further ones beside it. Scales
and code tables are in an object of the library, in attributes of a tensor subclass, or in buffers of the layer. `slots`
finds all of them, and where each stands, so that a parameter can take its place there. Every tensor that is frozen and
quantized keeps its dtype. No library is imported: a model that uses one has imported it.

[Note: quantized weights]
| library | where the tensors are |
|---|---|
| bitsandbytes, 4 bit | `weight`, attributes of `weight.quant_state` and of its `state2` |
| bitsandbytes, 8 bit | `weight`, and `SCB` of the weight, from the first forward on of the layer's `state` |
| torchao, and other classes with `__tensor_flatten__` | attributes of the parameter, which has no memory |
| GPTQ, AWQ | buffers of a module that has a buffer `qweight` |
| integers, fp8 | plain parameters, with their scales beside them |
"""

from __future__ import annotations

import contextlib
import copy
import functools
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from zero_offload.base.errors import ConfigError
from zero_offload.base.host import host_empty, host_tensor, host_zeros
from zero_offload.plan.tensor_parallel import is_dtensor

COMPUTE_DTYPES = frozenset((torch.float32, torch.bfloat16, torch.float16))
"""Those that a compute dtype replaces."""
_PACKED = "qweight"
"""The buffer by which layers of GPTQ and AWQ are known."""
_COMPANIONS = ("scale", "zero")
"""Words in the names of parameters that belong to one of integers or fp8 beside them."""


@dataclass(frozen=True, eq=False)
class TensorBinding:
    """A place where a tensor stands: an entry of a module's parameters or buffers, or an attribute of an object."""

    owner: Any
    key: str

    def put(self, tensor: Tensor) -> None:
        if isinstance(self.owner, dict):
            self.owner[self.key] = tensor
        else:
            setattr(self.owner, self.key, tensor)


@dataclass(frozen=True, eq=False)
class BoundTensor:
    """A tensor that is offloaded, and where it stands."""

    name: str
    """As the state dict says, behind the module's name."""
    tensor: Tensor
    holder: TensorBinding
    keeps_dtype: bool
    """True if the compute dtype does not apply."""
    held_by: str = ""
    """The class of the parameter without memory that it is an attribute of."""

    @property
    def keeps_strides(self) -> bool:
        """True if its elements stay in the order in which they lie, which the library chose for its kernels."""
        return not isinstance(self.holder.owner, dict)

    @property
    def identity(self) -> tuple[int, str]:
        """Equal for the names of a tied parameter. Tables that layers share are not tied: each layer gets its own."""
        owner, key = self.holder.owner, self.holder.key
        return (id(self.tensor), "") if isinstance(owner, dict) else (id(owner), key)


def slots(root: nn.Module, *, remove_duplicate: bool = True) -> Iterator[BoundTensor]:
    """Every tensor that is offloaded, module by module; a tied one in the first of its places only, by default."""
    seen: set[tuple[int, str]] = set()
    for path, module in root.named_modules(remove_duplicate=remove_duplicate):
        for slot in _slots_of(module, f"{path}." if path else ""):
            if not (remove_duplicate and slot.identity in seen):
                seen.add(slot.identity)
                yield slot


def offloaded_tensors(root: nn.Module, *, remove_duplicate: bool = True) -> Iterator[tuple[str, Tensor]]:
    """The tensors of `named_parameters`, and the further tensors of quantized weights."""
    return ((slot.name, slot.tensor) for slot in slots(root, remove_duplicate=remove_duplicate))


def wrappers(root: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters that have no memory of their own: their tensors are attributes."""
    return ((name, param) for name, param in root.named_parameters() if is_wrapper(param))


def tensors_of(params: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    """The tensors that these parameters of an offloaded model consist of: most consist of themselves."""
    found: list[Any] = []
    for param in params:
        if is_wrapper_class(type(param)) and is_wrapper(param):
            tensors: Any = param
            found += tensors_of(getattr(param, name) for name in tensors.__tensor_flatten__()[0])
        else:
            found.append(param)
    return found


def is_wrapper(tensor: Tensor) -> bool:
    """True if the tensor's class has `__tensor_flatten__`, which names the tensors that it consists of."""
    return is_wrapper_class(type(tensor)) and not is_dtensor(tensor)


@functools.cache
def is_wrapper_class(kind: type) -> bool:
    """True for classes of such tensors, and for DTensor."""
    return kind is not Tensor and hasattr(kind, "__tensor_flatten__") and hasattr(kind, "__tensor_unflatten__")


def library_class(tensor: object) -> Any:
    """The class that the library has made it of, of a parameter at rest and of a copy in a state dict too."""
    kind: Any = type(tensor)
    while kind.__bases__[0].__module__.startswith("zero_offload."):
        kind = kind.__bases__[1]  # ours are made of two classes: (one of ours, the library's)
    return kind


def ordinary_buffers_of(module: nn.Module) -> list[tuple[str, Tensor]]:
    """The module's own buffers that are not offloaded."""
    offloaded = _packed_buffers(module)
    return [(name, each) for name, each in module.named_buffers(recurse=False) if name not in offloaded]


def _packed_buffers(module: nn.Module) -> list[str]:
    """Names of the module's buffers that are a quantized weight."""
    if _PACKED not in module._buffers or module._buffers[_PACKED] is None:
        return []
    transient = module._non_persistent_buffers_set
    return [name for name, buffer in module._buffers.items() if buffer is not None and name not in transient]


def module_name(root: nn.Module, name: str) -> str:
    """The name of the module that a tensor of this name belongs to."""
    module, found = root, ""
    for part in name.split("."):
        if (inside := module._modules.get(part)) is None:
            break
        module, found = inside, f"{found}.{part}" if found else part
    return found


@dataclass(frozen=True)
class Record:
    """A tensor of a state dict, and of files, that no slot has: words on how a weight is quantized, maybe a number."""

    name: str
    text: str
    """Its words as JSON, with a number of zero; or the number of a format."""
    number: str = ""
    """The name of the tensor that holds the number, or nothing."""
    is_optional: bool = False
    """True if files may lack it."""

    def pack(self, number: float) -> Tensor:
        """The record with this number; host, uint8."""
        words = json.loads(self.text)
        if not isinstance(words, dict):
            return host_tensor(words, torch.uint8)
        if self.number:
            words[_OFFSET] = number
        return host_tensor(list(json.dumps(words).encode()), torch.uint8)

    def unpack(self, record: Tensor) -> Tensor:
        """The number of a record that says what this one does, (1,) fp64. Raises ConfigError for another one."""
        found, own = _words(record), _words(self.pack(0.0))
        number = found.pop(_OFFSET, 0.0)
        own.pop(_OFFSET, None)
        if found != own:
            differ = [
                f"{key} {found.get(key)}, here {own.get(key)}"
                for key in {**own, **found}
                if found.get(key) != own.get(key)
            ]
            raise ConfigError(f"{self.name} says that the weight is quantized in another way ({', '.join(differ)})")
        return host_tensor([number], torch.float64)


_OFFSET = "nested_offset"
"""The key of bitsandbytes' words whose value is a number that each weight has."""


def _words(record: Tensor) -> dict[str, Any]:
    """The content of a record."""
    memory = bytes(record.reshape(-1).tolist())
    if len(memory) == 1:
        return {"format": memory[0]}
    words: dict[str, Any] = json.loads(memory)
    return words


def records(root: nn.Module) -> dict[str, Record]:
    """Those of a model by the names of its weights, of a tied one by each of its names."""
    return {
        weight.name: weight.record
        for path, module in root.named_modules(remove_duplicate=False)
        for weight in _weights_of(module, f"{path}." if path else "")
        if weight.record is not None
    }


def take_state(module: nn.Module, state: dict[str, Any], prefix: str) -> None:
    """Let the tensors of the module's own quantized weights have what a state dict has of them beside the parameter's
    values, and take it out. Their libraries' layers cannot load it into what is quantized already.

    Raises ConfigError where the state dict lacks them for a weight, or has a weight quantized in another way.
    """
    for weight in _weights_of(module, prefix):
        if weight.name not in state:
            continue
        record = weight.record
        number = "" if record is None else record.number
        wanted = [slot.name for slot in weight.inner if slot.name != number]
        wanted += [] if record is None or record.is_optional else [record.name]
        if lacking := [name for name in wanted if name not in state]:
            raise ConfigError(f"the state dict has {weight.name} without {', '.join(lacking)}, which it needs")
        given = {slot.name: state.pop(slot.name) for slot in weight.inner if slot.name != number}
        if record is not None and (found := state.pop(record.name, None)) is not None:
            value = record.unpack(found)
            given |= {number: value.view(())} if number else {}
        for slot in weight.inner:
            if given[slot.name].shape != slot.tensor.shape:
                raise ConfigError(
                    f"the state dict has {slot.name} of shape {list(given[slot.name].shape)}, and the model of "
                    f"{list(slot.tensor.shape)}"
                )
            with torch.no_grad():
                slot.tensor.copy_(given[slot.name])


@dataclass(frozen=True, eq=False)
class _Weight:
    """A quantized parameter that has memory of its own."""

    name: str
    inner: list[BoundTensor]
    record: Record | None


def _weights_of(module: nn.Module, prefix: str) -> Iterator[_Weight]:
    for name, param in module._parameters.items():
        kind = None if param is None else _kind_of(param)
        if kind is not None and kind.has_memory:
            inner = list(kind.inner(module, prefix, prefix + name, param))
            yield _Weight(prefix + name, inner, kind.record(prefix, prefix + name, param))


def problem_of(param: nn.Parameter) -> str | None:
    """Why a parameter of a library's class cannot be offloaded, or None."""
    kind = _kind_of(param)
    if kind is None:
        return f"is a {type(param).__name__}; plain parameters, DTensors and quantized weights can be offloaded"
    if param.requires_grad:
        return (
            f"is a {type(param).__name__} that requires a gradient, and quantized weights are not trained: call "
            "requires_grad_(False) on it and train adapters"
        )
    return kind.problem(param)


def dtype_problem_of(param: nn.Parameter, compute: torch.dtype) -> str | None:
    """Why a quantized weight cannot be computed with in this dtype, or None."""
    if not is_wrapper(param) or param.dtype == compute or library_class(param).__name__ not in _OF_ONE_DTYPE:
        return None
    return (
        f"is a {library_class(param).__name__} of {param.dtype}, and inputs are {compute}, which its library does not "
        "multiply. Build the model in the dtype that precision= names before it is quantized"
    )


_OF_ONE_DTYPE = ("Float8Tensor", "IntxUnpackedToInt8Tensor")
"""Classes of torchao that take inputs of their own dtype alone."""


def prepare(root: nn.Module, undo: contextlib.ExitStack) -> None:
    """Once the tensors stand where they stay: let forwards of libraries' layers leave them there. `undo` makes the
    layers what they were."""
    for module in root.modules():
        for param in module._parameters.values():
            if param is not None and (kind := _kind_of(param)) is not None:
                kind.prepare(module, param, undo)


def _slots_of(module: nn.Module, prefix: str) -> Iterator[BoundTensor]:
    params = [(name, param) for name, param in module._parameters.items() if param is not None]
    companions = _companions({name: param for name, param in params if not param.requires_grad})
    for name, param in params:
        kind = _kind_of(param)
        if kind is None or kind.has_memory:
            keeps = kind is not None or name in companions or param.dtype not in COMPUTE_DTYPES
            yield BoundTensor(prefix + name, param, TensorBinding(module._parameters, name), keeps)
        if kind is not None:
            yield from kind.inner(module, prefix, prefix + name, param)
    for name in _packed_buffers(module):
        tensor: Any = module._buffers[name]
        yield BoundTensor(prefix + name, tensor, TensorBinding(module._buffers, name), keeps_dtype=True)


def _companions(frozen: Mapping[str, Tensor]) -> set[str]:
    """Scales and zero points of a module's fp8, and those of integers that are named as these are (`weight_scale`).

    Others are floating parameters of the program's, which computes with them in the compute dtype.
    """
    quantized = {name: param.dtype for name, param in frozen.items() if param.dtype not in COMPUTE_DTYPES}
    has_fp8 = any(dtype.is_floating_point and dtype.itemsize == 1 for dtype in quantized.values())
    found = {name for name in frozen if any(word in name for word in _COMPANIONS)}
    return {name for name in found if has_fp8 or name.startswith(tuple(f"{each}_" for each in quantized))}


# Libraries


class _QuantizedFormat:
    """Weights of one class of a library."""

    has_memory = True
    """True if the parameter itself is one of its tensors."""

    def inner(self, module: nn.Module, prefix: str, name: str, param: Any) -> Iterator[BoundTensor]:
        """Its further tensors. `prefix` is the module's, `name` the parameter's."""
        raise NotImplementedError

    def record(self, prefix: str, name: str, param: Any) -> Record | None:
        """The record of it in a state dict, beside its tensors."""
        return None

    def problem(self, param: Any) -> str | None:
        """Why it cannot be offloaded as it is."""
        return None

    def prepare(self, module: nn.Module, param: Any, undo: contextlib.ExitStack) -> None:
        """See `prepare`."""


class _FourBit(_QuantizedFormat):
    """bitsandbytes' Params4bit."""

    def inner(self, module: nn.Module, prefix: str, name: str, param: Any) -> Iterator[BoundTensor]:
        state = param.quant_state
        found = [("absmax", state, "absmax"), ("quant_map", state, "code")]
        if state.nested:
            found += [
                ("nested_absmax", state.state2, "absmax"),
                ("nested_quant_map", state.state2, "code"),
                (_OFFSET, state, "offset"),
            ]
        for suffix, holder, key in found:
            yield BoundTensor(f"{name}.{suffix}", getattr(holder, key), TensorBinding(holder, key), keeps_dtype=True)

    def record(self, prefix: str, name: str, param: Any) -> Record | None:
        state, blank = copy.copy(param.quant_state), host_empty(0, torch.float32)
        state.absmax = state.code = blank
        if state.nested:
            state.state2, state.offset = copy.copy(state.state2), host_zeros((), torch.float64)
            state.state2.absmax = state.state2.code = blank
        key = f"quant_state.bitsandbytes__{state.quant_type}"
        text = bytes(state.as_dict(packed=True)[key].tolist()).decode()
        return Record(f"{name}.{key}", text, f"{name}.{_OFFSET}" if state.nested else "")

    def problem(self, param: Any) -> str | None:
        if param.quant_state is None:
            return 'is a Params4bit that is not quantized yet; call model.to("cpu") before zo.offload, which does it'
        if getattr(param.quant_state, "packing_format_for_cpu", False):
            return (
                "was repacked by a forward in eval, for this CPU and without a way back. Build the model again and "
                "call zo.offload before such a forward"
            )
        if _has_lost_scales(param.quant_state):
            return (
                "was repacked by a forward in eval on a CPU, and a save has put it back without its scales. They are "
                "in another order, or rounded. Quantize the model again, and call zo.offload, or save, before such a "
                "forward"
            )
        return None

    def prepare(self, module: nn.Module, param: Any, undo: contextlib.ExitStack) -> None:
        bias, computed = getattr(module, "bias", None), getattr(module, "compute_dtype", None)
        if bias is not None and computed not in (None, bias.dtype):
            # A forward would convert the bias where it stands.
            raise ConfigError(
                f"a {type(module).__name__} computes in {computed} and has a bias of {bias.dtype}. Give the precision "
                "of the one to the other, as bnb_4bit_compute_dtype (of a folder in quantization_config of its "
                "config.json), or as precision="
            )
        # In eval the first forward would put a weight in another format into the place of this one.
        if getattr(module, _REPACKS, False):
            undo.callback(setattr, module, _REPACKS, True)
            setattr(module, _REPACKS, False)


def _has_lost_scales(state: Any) -> bool:
    """True if bitsandbytes has repacked a weight and has put it back, or has saved it so.

    Its way back leaves scales transposed in bf16. Scales that are quantized too are rounded to the compute dtype.
    """
    is_rounded = state.nested and state.state2.dtype not in (None, torch.float32)
    return hasattr(state, "original_qshape") or state.absmax.dim() != 1 or is_rounded


_REPACKS = "support_avx512bf16_for_cpu"
"""bitsandbytes' attribute of a layer that may repack its weight."""


class _EightBit(_QuantizedFormat):
    """bitsandbytes' Int8Params."""

    def inner(self, module: nn.Module, prefix: str, name: str, param: Any) -> Iterator[BoundTensor]:
        # The first forward of a linear layer moves them from the parameter to the layer's state.
        state = getattr(module, "state", None)
        holder = param if param.SCB is not None or state is None else state
        yield BoundTensor(f"{prefix}SCB", holder.SCB, TensorBinding(holder, "SCB"), keeps_dtype=True)

    def record(self, prefix: str, name: str, param: Any) -> Record | None:
        return Record(f"{prefix}weight_format", "0", is_optional=True)

    def problem(self, param: Any) -> str | None:
        if param.dtype != torch.int8:
            return 'is an Int8Params that is not quantized yet; call model.to("cpu") before zo.offload, which does it'
        return None

    def prepare(self, module: nn.Module, param: Any, undo: contextlib.ExitStack) -> None:
        state = getattr(module, "state", None)
        for holder in [param] if state is None else [param, state]:
            undo.callback(vars(holder).update, CB=holder.CB, SCB=holder.SCB)
        param.CB = None  # the same memory once more, which would keep the old storage
        if state is not None:
            state.CB = param
            if param.SCB is not None:
                state.SCB, param.SCB = param.SCB, None


class _Wrapper(_QuantizedFormat):
    """A subclass of Tensor that has no memory."""

    has_memory = False

    def inner(self, module: nn.Module, prefix: str, name: str, param: Any) -> Iterator[BoundTensor]:
        for key in param.__tensor_flatten__()[0]:
            tensor = getattr(param, key)
            if is_wrapper(tensor):
                yield from self.inner(module, prefix, f"{name}.{key}", tensor)
            else:
                held_by = library_class(param).__name__
                yield BoundTensor(f"{name}.{key}", tensor, TensorBinding(param, key), keeps_dtype=True, held_by=held_by)


_BITSANDBYTES: Mapping[str, _QuantizedFormat] = {"Params4bit": _FourBit(), "Int8Params": _EightBit()}
_WRAPPER = _Wrapper()


def _kind_of(param: nn.Parameter) -> _QuantizedFormat | None:
    """The library's kind, of a parameter at rest too; None for plain ones."""
    if type(param) is nn.Parameter:
        return None
    for base in type(param).__mro__:
        if base.__module__.partition(".")[0] == "bitsandbytes":
            return _BITSANDBYTES.get(base.__name__)
    return _WRAPPER if is_wrapper(param) else None
