"""`deferred_init()`: modules built inside get their parameters later.

Owns what a recording sees: operations (a dispatch mode), questions about tensors (a function mode), and what
modules register (torch's registration hooks). A parameter that a module registers is replaced by a
`DeferredTensor` on meta. Never decides when values are made: `zo.offload` does, from the recipes that are
left in the registry when the recording ends.
"""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)
from torch.utils._pytree import tree_map, tree_map_only
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from zero_offload.base.errors import ConfigError
from zero_offload.base.host import host_empty, host_tensor
from zero_offload.model.deferred.call import Call
from zero_offload.model.deferred.tracer import Tracer
from zero_offload.storage.shards.registry import keep_recipe

VALUES = ("init", "skip")


@contextlib.contextmanager
def deferred_init(values: str = "init") -> Iterator[None]:
    """Modules built inside have their parameters on meta; `zo.offload` makes the values, unit by unit.

    They are those of a plain build with the same seed, bit for bit: what is done to parameters inside is noted, and
    done again where they rest. The random number generators end up as after a plain build. Buffers and all other
    tensors are real. Inside, parameters may be read and written; after it, only `zo.offload` and `zo.plan` take them.
    In a recording nested in another the outer one rules.

    `values="skip"` leaves the values out: it takes no time, and the model must get weights by `zo.load_pretrained` or
    a checkpoint, else its first use raises. Adapters of PEFT that are added inside get theirs at `zo.load_pretrained`:
    other random numbers than a plain build would draw, the same with the same seed.

    Raises ConfigError where a parameter is put on meta by others, as `from_pretrained` does.
    """
    if values not in VALUES:
        raise ConfigError(f'zo.deferred_init has no values={values!r}; there are "init" and "skip"')
    if current_recorder() is not None:
        yield
        return
    recorder = Recorder(Tracer(leaves_out=values == "skip"))
    registrations: list[tuple[Callable[..., RemovableHandle], Callable[..., Any]]] = [
        (register_module_parameter_registration_hook, recorder.on_parameter),
        (register_module_buffer_registration_hook, recorder.on_buffer),
        (register_module_module_registration_hook, recorder.on_module),
    ]
    handles = [register(hook) for register, hook in registrations]
    try:
        with _Answers(recorder.tracer), recorder:
            yield
    finally:
        for handle in handles:
            handle.remove()
        recorder.end()


def current_recorder() -> Recorder | None:
    """The recording that this thread is in."""
    return next((mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, Recorder)), None)


@contextlib.contextmanager
def _unseen() -> Iterator[None]:
    """Our own tensor calls, which no mode sees."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        yield


class DeferredTensor(Tensor):
    """A tensor whose values are to be made: a parameter, or a view of one.

    Outside of its recording it answers what needs no values. A parameter is one by torch's mark for custom tensors.
    """

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        name, recorder = name_of(func), current_recorder()
        if recorder is None and name not in _HARMLESS:
            raise ConfigError(
                f"{name} needs a parameter of a module that was built in zo.deferred_init, whose values are not made "
                "yet. Call zo.offload(model, config), which makes them, and take parameters (also those that an "
                "optimizer gets) from the model after that"
            )
        with torch._C.DisableTorchFunctionSubclass():
            results = func(*args, **(kwargs or {}))
            return tree_map_only(Tensor, functools.partial(_guarded, recorder, name), results) if recorder else results

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        recorder = current_recorder()
        if recorder is None:
            _refuse_copy()
        if id(self) not in memo:
            copied = self.detach().clone()
            is_param = isinstance(self, nn.Parameter)
            memo[id(self)] = recorder.defer(copied, self.requires_grad) if is_param else copied
        found: Tensor = memo[id(self)]
        return found

    def __reduce_ex__(self, protocol: Any) -> Any:
        _refuse_copy()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        kind = "Parameter" if isinstance(self, nn.Parameter) else "Tensor"
        return f"{kind}(shape={tuple(self.shape)}, dtype={self.dtype}, deferred)"


def _guarded(recorder: Recorder, name: str, result: Tensor) -> Tensor:
    """A view of a parameter is as the parameter."""
    if type(result) is not Tensor or not result.is_meta:
        return result
    if not recorder.tracer.is_face(result):
        raise ConfigError(f"{name} of a parameter inside zo.deferred_init gives a tensor on meta, without values")
    return result.as_subclass(DeferredTensor)


_HARMLESS = frozenset(
    (
        *("shape", "dtype", "device", "layout", "ndim", "itemsize", "nbytes", "requires_grad", "is_leaf", "grad_fn"),
        *("is_meta", "is_cpu", "is_cuda", "is_sparse", "is_quantized", "is_nested", "names", "name", "_version"),
        *("size", "dim", "numel", "nelement", "element_size", "stride", "storage_offset", "untyped_storage"),
        *("is_floating_point", "is_complex", "is_contiguous", "requires_grad_", "retains_grad"),
        *("__len__", "__hash__", "_backward_hooks", "_post_accumulate_grad_hooks"),
    )
)


def _refuse_copy() -> NoReturn:
    raise ConfigError(
        "a parameter of zo.deferred_init cannot be copied or pickled before zo.offload has made its values; "
        "copy the module inside zo.deferred_init"
    )


def name_of(func: Any) -> str:
    """A tensor function's name; properties are functions of a descriptor."""
    return str(getattr(getattr(func, "__self__", None), "__name__", None) or getattr(func, "__name__", func))


class Recorder(TorchDispatchMode):
    """One recording."""

    def __init__(self, tracer: Tracer) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.tracer = tracer
        self._thread = threading.get_ident()
        self._deferred: WeakIdKeyDictionary = WeakIdKeyDictionary()
        """Every deferred parameter -> None."""
        self._replaced: WeakIdKeyDictionary = WeakIdKeyDictionary()
        """Parameter -> the deferred one in its place."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunction():
            return self.tracer.run(Call(func, args, kwargs or {}))

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Whether torch wraps this class for its compiler, whose import takes seconds."""
        return False

    def defer(self, tensor: Tensor, requires_grad: bool) -> nn.Parameter:
        """A parameter on meta in the place of a tensor."""
        with _unseen():
            face = tensor if tensor.is_meta else self.tracer.face(tensor.detach())
            param: Any = Tensor._make_subclass(DeferredTensor, face.detach(), requires_grad)
            param._is_param = True
            self._deferred[param] = None
        deferred: nn.Parameter = param
        return deferred

    def end(self) -> None:
        """Leave the recipes for `offload`, which makes the values."""
        for param in self._deferred:
            with _unseen():
                recipe = self.tracer.recipe(param)
            keep_recipe(param, recipe)

    # What modules register

    def on_parameter(self, module: nn.Module, name: str, param: nn.Parameter | None) -> nn.Parameter | None:
        if param is None or threading.get_ident() != self._thread:
            return None
        if torch.get_default_device().type == "meta":
            raise ConfigError(
                f"{name} of {type(module).__name__} is put on meta inside zo.deferred_init, so that it has no values. "
                "from_pretrained does so. To train from the weights of a folder write\n"
                '    with zo.deferred_init(values="skip"): model = AutoModelForCausalLM.from_config(config)\n'
                '    zo.offload(model, ...); zo.load_pretrained(model, "folder/")'
            )
        return self._in_place_of(param)

    def on_module(self, module: nn.Module, name: str, child: nn.Module | None) -> None:
        """What has come into a module without being registered (torch.nn.utils.skip_init) is deferred now."""
        if child is None or threading.get_ident() != self._thread:
            return
        for part in child.modules():
            for key, param in part._parameters.items():
                replaced = None if param is None else self._in_place_of(param)
                if replaced is not None:
                    part._parameters[key] = replaced

    def on_buffer(self, module: nn.Module, name: str, buffer: Tensor | None) -> Tensor | None:
        if buffer is None or threading.get_ident() != self._thread:
            return None
        with _unseen():
            if self.tracer.is_unknown(buffer):
                raise ConfigError(
                    f"buffer {name} of {type(module).__name__} is computed from values of parameters, which "
                    "zo.deferred_init(values='skip') leaves out; use zo.deferred_init()"
                )
            return self.tracer.values(buffer) if self.tracer.is_face(buffer) else None

    def _in_place_of(self, param: Any) -> nn.Parameter | None:
        """The deferred parameter for a plain one on the CPU; None for others, which stay."""
        replaced: nn.Parameter | None = self._replaced.get(param)
        if replaced is not None:
            return replaced
        with _unseen():
            is_face = self.tracer.is_face(param)
            if is_face and type(param) is DeferredTensor:
                self._deferred[param] = None
                return None
            is_ours = type(param) is nn.Parameter and param.layout is torch.strided
            if not is_ours or not (is_face or param.device.type == "cpu"):
                return None
            replaced = self.defer(param, param.requires_grad)
        replaced.__dict__.update(param.__dict__)
        self._replaced[param] = replaced
        # Who kept it must learn that it is no longer the module's.
        param.__class__ = DeferredTensor
        param._is_param = True
        return replaced


_ESCAPES = frozenset(
    ("numpy", "__array__", "data_ptr", "untyped_storage", "storage", "__dlpack__", "share_memory_", "apply_", "map_")
)
"""What hands out memory that can be written where no operation is seen."""


def _as_face(where: Any) -> Any:
    """An argument of `to`, for a face: the CPU is where it says that it is."""
    is_device = isinstance(where, torch.device) or where == "cpu"
    return torch.device("meta") if is_device and torch.device(where).type == "cpu" else where


class _Answers(TorchFunctionMode):
    """Inside a recording, faces say that they are on the CPU, where a plain build has them."""

    def __init__(self, tracer: Tracer) -> None:
        super().__init__()
        self._tracer = tracer

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if not args or not isinstance(args[0], Tensor):
            return func(*args, **kwargs)
        name = name_of(func)
        with _unseen():
            if not self._tracer.is_face(args[0]):
                if name in _ESCAPES:
                    self._tracer.forget(args[0])
            elif name == "device":
                return torch.device("cpu")
            elif name == "is_meta":
                # Where values are left out, torch's own initialisations may know it, and do nothing.
                return self._tracer.leaves_out
            elif name == "is_cpu":
                return True
            elif name == "cpu":
                return args[0]
            else:
                args, kwargs = self._redirected(func, args, kwargs)
        return func(*args, **kwargs)

    def _redirected(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Arguments that give a face what a tensor on the CPU gets of values from Python, devices and other tensors."""
        name, (face, *rest) = name_of(func), args
        if name in ("new_tensor", "new"):
            face = host_empty(0, face.dtype)
        elif name == "__setitem__" and not isinstance(rest[1], Tensor):
            rest[1] = host_tensor(rest[1], face.dtype)
        elif name == "to":
            rest, kwargs = tree_map(_as_face, rest), tree_map(_as_face, kwargs)
        elif name == "data" and func.__name__ == "__set__" and not self._tracer.is_face(rest[0]):
            if rest[0].is_meta:
                raise ConfigError(
                    "data of a parameter inside zo.deferred_init is set to a tensor on meta without values"
                )
            rest[0] = self._tracer.face(rest[0].detach())
        return (face, *rest), kwargs
