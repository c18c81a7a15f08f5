"""`deferred_init()`: modules built inside get their parameters later.

A recording sees operations (a dispatch mode), questions about tensors (a function mode), and what modules register
(torch's registration hooks). A parameter that a module registers is replaced by a `DeferredTensor` on meta. `Recorder`
knows modules and parameters; `Tracer` runs every operation on real values and notes how they were made. Neither decides
when values are made: `zo.offload` does, from the recipes that are in the registry when the recording ends.

[Note: faces]
A tensor in a recording is real, or a *face*: a meta tensor. Its storage stands for values that are in memory only while
operations use them. An operation on a face runs on its real values. So it does what it does in a plain program: errors,
random numbers and results that depend on data included. Values that were dropped are replayed first, unless they are
about to be filled.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
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
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only
from torch.utils.hooks import RemovableHandle
from torch.utils.weak import WeakIdKeyDictionary

from zero_offload.base.errors import ConfigError
from zero_offload.base.host import host_empty, host_tensor, host_zeros
from zero_offload.base.types import MIB
from zero_offload.model.deferred.recipe import (
    TEMPORARY_BYTES,
    Node,
    OwnGenerator,
    RecordedRecipe,
    Ref,
    Value,
    blank,
    replay,
)
from zero_offload.standins.operations import name_of
from zero_offload.standins.owners import keep_recipe, recipe_of
from zero_offload.standins.refusals import converts_module
from zero_offload.storage.memory.heap import HeapTrimmer

VALUES = ("init", "skip")


@contextlib.contextmanager
def deferred_init(values: str = "init") -> Iterator[None]:
    """Modules built inside have their parameters on meta; `zo.offload` makes the values, unit by unit.

    They are those of a plain build with the same seed, bit for bit. Operations on parameters inside are noted, and done
    again where the parameters rest. The random number generators end up as after a plain build. Buffers and all other
    tensors are real. Inside, parameters may be read and written; after it, only `zo.offload` and `zo.plan` take them.
    In a recording nested in another the outer one rules.

    `values="skip"` leaves the values out: it takes no time, and the model must get weights by `zo.load_pretrained` or a
    checkpoint, else its first use raises. Adapters of PEFT that are added inside get theirs at `zo.load_pretrained`,
    or, where that came before, at `zo.offload`. Their random numbers are not those of a plain build, but the same with
    the same seed.

    Raises ConfigError where a parameter is put on meta by others, as `from_pretrained` does.
    """
    if values not in VALUES:
        raise ConfigError(f'zo.deferred_init has no values={values!r}; there are "init" and "skip"')
    if current_recorder() is not None:
        yield
        return
    recorder = Recorder(Tracer(skips_values=values == "skip"))
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
def unrecorded() -> Iterator[None]:
    """Inside of a recording, build modules as without one."""
    recorder = current_recorder()
    with recorder.paused() if recorder is not None else contextlib.nullcontext(), _disable_current_modes():
        yield


@contextlib.contextmanager
def _unseen() -> Iterator[None]:
    """Our own tensor calls, which no mode sees."""
    with _disable_current_modes(), torch._C.DisableTorchFunction():
        yield


class DeferredTensor(Tensor):
    """A tensor whose values are to be made: a parameter, or a view of one.

    Outside of its recording it answers what needs no values, and becomes fp32 where a library says
    `param.data = param.data.to(torch.float32)`. A parameter is one by torch's mark for custom tensors.
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
        if name == "device":
            return torch.device("cpu")  # where a plain build has it: libraries put what belongs to it there
        is_planned = bool(args) and isinstance(args[0], DeferredTensor) and recipe_of(args[0]) is not None
        if recorder is not None and not is_planned:
            with torch._C.DisableTorchFunctionSubclass():
                results = func(*args, **(kwargs or {}))
                return tree_map_only(Tensor, functools.partial(_guarded, recorder, name), results)
        if is_planned and (answer := _ANSWERS.get(name)) is not None:
            return answer(*args, **(kwargs or {}))
        if name not in _HARMLESS:
            raise _not_made(name)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        recorder, recipe = current_recorder(), recipe_of(self)
        if recorder is None and recipe is None or recipe is not None and recipe.is_skipped:
            _refuse_copy()
        if id(self) not in memo:
            memo[id(self)] = self._recorded_copy(recorder) if recorder and recipe is None else self._same()
        found: Tensor = memo[id(self)]
        return found

    def _recorded_copy(self, recorder: Recorder) -> Tensor:
        copied = self.detach().clone()
        return recorder.defer(copied, self.requires_grad) if isinstance(self, nn.Parameter) else copied

    def _same(self) -> Tensor:
        """A copy after the recording."""
        if type(self) is not DeferredTensor:
            raise _not_made("a copy")  # it would share what a library keeps of a quantized weight
        made = _made_as(self, self.dtype)
        made.__dict__.update(self.__dict__)  # torch's mark of a parameter too
        return made.requires_grad_(self.requires_grad)

    def __reduce_ex__(self, protocol: Any) -> Any:
        _refuse_copy()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        kind = "Parameter" if isinstance(self, nn.Parameter) else "Tensor"
        return f"{kind}(shape={tuple(self.shape)}, dtype={self.dtype}, deferred)"


def class_of(tensor: Tensor) -> type:
    """The class of a tensor. For a deferred tensor, the class of the tensor that it stands for."""
    return next(kind for kind in type(tensor).__mro__ if not issubclass(kind, DeferredTensor))


def _not_made(call: str) -> ConfigError:
    return ConfigError(
        f"{call} needs values of a parameter that was built in zo.deferred_init, and they are not made yet. Call "
        "zo.offload(model, config), which makes them, and take parameters (also those that an optimizer gets) from the "
        "model after that. Adapters that read weights (DoRA, OLoRA, trainable tokens) come after it too: "
        "'with zo.gathered(model): model = get_peft_model(model, ...)', then zo.offload(model) once more"
    )


def _data(tensor: DeferredTensor, values: Tensor | None = None) -> Tensor | None:
    """`tensor.data`, and `tensor.data = values`."""
    if values is None:
        return _made_as(tensor, tensor.dtype)
    if not isinstance(values, DeferredTensor) or recipe_of(values) is not recipe_of(tensor):
        raise _not_made("a change of data")
    with torch._C.DisableTorchFunctionSubclass():
        tensor.data = values.detach()
    return None


def _to(tensor: DeferredTensor, *args: Any, copy: bool = False, **kwargs: Any) -> Tensor:
    """Itself, or the same in fp32: that rounds nothing, so the values are made as before."""
    device, dtype, _, _ = torch._C._nn._parse_to(*args, **kwargs)
    if not (device is None or device.type == "cpu") or dtype not in (None, tensor.dtype, torch.float32):
        raise ConfigError(
            f"a parameter that was built in zo.deferred_init has no values yet, which could become {dtype or device}. "
            "Build the model in this dtype (dtype=), or choose it by zo.offload (precision=), which moves it too"
        )
    return tensor if not copy and dtype in (None, tensor.dtype) else _made_as(tensor, dtype or tensor.dtype)


def _made_as(tensor: DeferredTensor, dtype: torch.dtype) -> DeferredTensor:
    """Another one, whose values are made as those of `tensor` are, and then converted."""
    with torch._C.DisableTorchFunctionSubclass():
        made = torch.empty_like(tensor.detach(), dtype=dtype).as_subclass(DeferredTensor)
    recipe = recipe_of(tensor)
    if recipe is not None:
        keep_recipe(made, recipe)
    return made


def _grad(tensor: DeferredTensor, grad: Tensor | None = None) -> None:
    if grad is not None or not converts_module():
        raise _not_made("grad")


_ANSWERS: dict[str, Callable[..., Any]] = {
    "data": _data,
    "grad": _grad,
    "to": _to,
    "cpu": _to,
    "float": lambda tensor: _to(tensor, torch.float32),
    "double": lambda tensor: _to(tensor, torch.float64),
    "half": lambda tensor: _to(tensor, torch.float16),
    "bfloat16": lambda tensor: _to(tensor, torch.bfloat16),
    "_has_compatible_shallow_copy_type": lambda tensor, converted: True,
}
"""Questions to a deferred tensor after its recording: conversions, alone or by `nn.Module.to`."""


def _guarded(recorder: Recorder, name: str, result: Tensor) -> Tensor:
    """A view of a parameter is as the parameter."""
    if type(result) is not Tensor or not result.is_meta:
        return result
    if not recorder.tracer.is_face(result):
        raise _not_made(name)  # a parameter of an earlier recording
    return result.as_subclass(DeferredTensor)


_HARMLESS = frozenset(
    (
        *("shape", "dtype", "layout", "ndim", "itemsize", "nbytes", "requires_grad", "is_leaf", "grad_fn"),
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
            return self.tracer.run(DispatchedOp(func, args, kwargs or {}))

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """True if torch wraps this class for its compiler, whose import takes seconds."""
        return False

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Registrations of modules inside are not seen."""
        thread, self._thread = self._thread, -1
        try:
            yield
        finally:
            self._thread = thread

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

    # Registrations of modules

    def on_parameter(self, module: nn.Module, name: str, param: nn.Parameter | None) -> nn.Parameter | None:
        if param is None or threading.get_ident() != self._thread:
            return None
        if torch.get_default_device().type == "meta":
            raise ConfigError(
                f"{name} of {type(module).__name__} is put on meta inside zo.deferred_init, so that it has no values. "
                "from_pretrained does so. To train from the weights of a folder write\n"
                '    with zo.deferred_init(values="skip"): model = AutoModelForCausalLM.from_config(config)\n'
                '    zo.load_pretrained(model, "folder/"); zo.offload(model, ...)'
            )
        return self._in_place_of(param)

    def on_module(self, module: nn.Module, name: str, child: nn.Module | None) -> None:
        """Defer parameters that have come into a module without being registered (torch.nn.utils.skip_init)."""
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
        # Code that kept the old parameter must learn that it is no longer the module's.
        param.__class__ = DeferredTensor
        param._is_param = True
        return replaced


_ESCAPES = frozenset(
    ("numpy", "__array__", "data_ptr", "untyped_storage", "storage", "__dlpack__", "share_memory_", "apply_", "map_")
)
"""Functions that hand out memory, which can then be written while no operation is seen."""


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
                    self._tracer.untrack(args[0])
            elif name == "device":
                return torch.device("cpu")
            elif name == "is_meta":
                # Where values are left out, torch's own initialisations may know it, and do nothing.
                return self._tracer.skips_values
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


# Values

KEPT_BYTES = 16 * MIB
"""Real values of faces that stay in memory beside those in use: an initialisation touches neighbours in turn."""


@dataclass(eq=False)
class _RecordedStorage:
    """One storage of the program."""

    key: int
    nbytes: int
    value: Value
    real: weakref.ref[torch.UntypedStorage] | None
    """Its values, while they are in memory."""
    face: weakref.ref[torch.UntypedStorage] | None = None
    """The meta storage of its faces."""
    unknown: bool = False
    """True if its values were left out, or computed from such."""
    can_be_made: bool = True
    """For an unknown one, True if `value` says how, without values of other unknown ones."""


class Tracer:
    """Storages of one recording and the operations on them. Used by one thread, outside of its modes."""

    def __init__(self, *, skips_values: bool) -> None:
        """`skips_values`: faces have no values, and what fills them is not run."""
        self.skips_values = skips_values
        self._recorded: WeakIdKeyDictionary = WeakIdKeyDictionary()
        """Storage, real or meta -> the recorded one."""
        self._kept: dict[_RecordedStorage, torch.UntypedStorage] = {}
        """Real values of faces, the last used last."""
        self._trimmer = HeapTrimmer(TEMPORARY_BYTES)
        self._keys = itertools.count()
        self._orders = itertools.count()

    # Faces

    def is_face(self, tensor: Tensor) -> bool:
        return tensor.is_meta and self._record_of(tensor) is not None

    def face(self, tensor: Tensor) -> Tensor:
        """A meta tensor in the place of `tensor`, a real one; its values are what they are now."""
        record = self._record_of(tensor) or self._follow(tensor)
        record.unknown |= self.skips_values
        storage = record.face() if record.face is not None else None
        if storage is None:
            storage = torch.empty(record.nbytes, dtype=torch.uint8, device="meta").untyped_storage()
            record.face = weakref.ref(storage)
            self._recorded[storage] = record
        return Ref.of(tensor, record.key).on(storage)

    def values(self, face: Tensor) -> Tensor:
        """The values of a face, which are in memory as long as the result."""
        record = self._recorded[face.untyped_storage()]
        return Ref.of(face, record.key).on(self._storage(record))

    def is_unknown(self, tensor: Tensor) -> bool:
        record = self._record_of(tensor)
        return record is not None and record.unknown

    def untrack(self, tensor: Tensor) -> None:
        """Stop following a real tensor, which may change where no operation is seen: its values are what they are."""
        if has_storage(tensor) and not tensor.is_meta:
            self._recorded.pop(tensor.untyped_storage(), None)

    def recipe(self, face: Tensor) -> RecordedRecipe:
        """How the values of a face are made, as far as the program has come."""
        record = self._recorded[face.untyped_storage()]
        is_known = not record.unknown or (record.can_be_made and not record.value.is_blank)
        made = record.value if is_known else None
        return RecordedRecipe(made, Ref.of(face, record.key), is_skipped=record.unknown)

    def _record_of(self, tensor: Tensor) -> _RecordedStorage | None:
        record: _RecordedStorage | None = self._recorded.get(tensor.untyped_storage()) if has_storage(tensor) else None
        return record

    def _follow(self, tensor: Tensor) -> _RecordedStorage:
        """Begin with a storage whose values were made elsewhere: they are copied."""
        storage = tensor.untyped_storage()
        key = next(self._keys)
        record = _RecordedStorage(key, storage.nbytes(), Value(key, data=storage.clone()), weakref.ref(storage))
        self._recorded[storage] = record
        return record

    # Operations

    def run(self, op: DispatchedOp) -> Any:
        """Do an operation, and note it."""
        faces = [tensor for tensor in op.tensors if self.is_face(tensor)]
        if op.only_renames:
            return op.run()
        if faces and len(faces) < sum(tensor.is_meta for tensor in op.tensors):
            raise ConfigError(
                f"{op.name} inside zo.deferred_init mixes a parameter and a tensor on meta without values"
            )
        if faces and op.moves_storage:
            return self._move(op)
        filled = op.filled()
        if faces and op.written and all(t.is_meta and self.is_unknown(t) for t in op.written):
            self._defer(op, filled)
            return op.targets
        unread = op.tensors if op.reads_forms else filled
        is_unknown = any(self.is_unknown(t) for t in op.tensors if all(t is not f for f in unread))
        if is_unknown and not op.gives_tensors:
            raise ConfigError(
                f"{op.name} reads values of a parameter, which zo.deferred_init(values='skip') leaves out; "
                "use zo.deferred_init()"
            )
        for tensor in op.written:
            if _is_followed(tensor) and self._record_of(tensor) is None:
                self._follow(tensor)
        node = self._node(op, unread) if op.gives_tensors or op.written else None
        reals = self._reals(faces, filled)
        results = op.run(reals)
        if node is not None:
            self._note(node, op, filled, results, is_unknown=is_unknown)
        return self._with_faces(op, faces, reals, results)

    def _defer(self, op: DispatchedOp, filled: Sequence[Tensor]) -> None:
        """Note what would fill unknown values, without doing it: a parameter may turn out to be in no file.

        The program's generator stays as it is. Numbers are drawn from one of each operation's own, seeded by both.
        """
        others = [self._record_of(tensor) for tensor in op.tensors if all(tensor is not each for each in filled)]
        if filled and all(record is not None and not record.unknown for record in others):
            node, record = self._node(op, filled), self._recorded[filled[0].untyped_storage()]
            if node.generator_state is not None:
                seed = hash((torch.initial_seed(), node.order)) % (1 << 63)
                node = replace(node, generator_state=torch.Generator("cpu").manual_seed(seed).get_state())
            record.value, record.can_be_made = Value(record.key, node), True
            return
        for tensor in op.written:
            self._recorded[tensor.untyped_storage()].can_be_made = False

    def _move(self, op: DispatchedOp) -> Any:
        """A face becomes a face of another storage."""
        target, *sources = op.tensors
        if op.func is not torch.ops.aten.set_.source_Tensor or not self.is_face(target):
            raise ConfigError(f"{op.name} of a parameter inside zo.deferred_init: give it its size when it is made")
        source = sources[0] if self.is_face(sources[0]) else self.face(sources[0])
        return op.func(target, source)

    def _node(self, op: DispatchedOp, unread: Sequence[Tensor]) -> Node:
        reads = []
        without = {id(self._record_of(tensor)) for tensor in unread}

        def noted(leaf: Any) -> Any:
            if isinstance(leaf, torch.Generator):
                return OwnGenerator()
            if not isinstance(leaf, Tensor) or leaf.is_meta and not self.is_face(leaf):
                return leaf
            record = self._record_of(leaf)
            if record is None:
                return leaf.detach().clone()
            if id(record) not in without:
                reads.append(record.value)
            return Ref.of(leaf, record.key)

        args, kwargs = tree_map(noted, op.args), tree_map(noted, op.kwargs)
        dtype = torch.get_default_dtype()
        return Node(next(self._orders), op.func, args, kwargs, op.generator_state(), dtype, tuple(reads), [])

    def _note(self, node: Node, op: DispatchedOp, filled: Sequence[Tensor], results: Any, *, is_unknown: bool) -> None:
        refilled = {id(self._record_of(tensor)) for tensor in filled}
        for tensor in op.written:
            record = self._record_of(tensor)
            if record is not None:
                record.value = Value(record.key, node)
                record.unknown = is_unknown or (record.unknown and id(record) not in refilled)
                record.can_be_made = not record.unknown
        # A copy in another dtype is the same parameter still; what is computed from one needs its true values.
        can_be_made = not is_unknown or (
            op.only_casts
            and all(record.can_be_made for record in map(self._record_of, op.tensors) if record is not None)
        )
        of_inputs = {t.untyped_storage()._cdata for t in op.tensors if has_storage(t)}
        for index, leaf in enumerate(tree_leaves(results)):
            if not isinstance(leaf, Tensor) or not _is_followed(leaf) or self._record_of(leaf) is not None:
                continue
            storage = leaf.untyped_storage()
            if storage._cdata not in of_inputs:
                self._trimmer.freed(storage.nbytes())
                key = next(self._keys)
                node.makes.append((index, key))
                self._recorded[storage] = _RecordedStorage(
                    key, storage.nbytes(), Value(key, node), weakref.ref(storage), None, is_unknown, can_be_made
                )

    # Values of faces

    def _reals(self, faces: Sequence[Tensor], filled: Sequence[Tensor]) -> dict[int, Tensor]:
        """Real tensors for faces, by id."""
        recorded = {id(face): self._recorded[face.untyped_storage()] for face in faces}
        self._make_room(set(recorded.values()))
        blank = {id(recorded[id(tensor)]) for tensor in filled if id(tensor) in recorded}
        reals = {}
        for face in faces:
            record = recorded[id(face)]
            storage = self._storage(record, is_filled=id(record) in blank)
            self._kept.pop(record, None)
            self._kept[record] = storage
            reals[id(face)] = Ref.of(face, record.key).on(storage)
        return reals

    def _storage(self, record: _RecordedStorage, *, is_filled: bool = False) -> torch.UntypedStorage:
        """The values of a recorded storage; `is_filled`: they are not read before they are filled."""
        storage = record.real() if record.real is not None else None
        if storage is None:
            if is_filled:
                storage = blank(record.nbytes)
            elif record.unknown:
                storage = host_zeros(record.nbytes, torch.uint8).untyped_storage()
            else:
                storage = replay(record.value, record.nbytes)
            record.real = weakref.ref(storage)
            self._recorded[storage] = record
        return storage

    def _make_room(self, used: set[_RecordedStorage]) -> None:
        """Drop values of faces that were not used for long."""
        others = [record for record in self._kept if record not in used]
        surplus = sum(record.nbytes for record in others) - KEPT_BYTES
        for record in others:
            if surplus > 0:
                del self._kept[record]
                surplus -= record.nbytes

    def _with_faces(self, op: DispatchedOp, faces: Sequence[Tensor], reals: dict[int, Tensor], results: Any) -> Any:
        """Results with the faces that were given, faces for other views of their values, and else what they are."""
        given = {id(reals[id(face)]): face for face in faces}
        recorded = {self._recorded[face.untyped_storage()] for face in faces}

        def faced(leaf: Tensor) -> Tensor:
            if id(leaf) in given:
                return given[id(leaf)]
            # A change of dtype (model.half()) makes parameters of parameters.
            return self.face(leaf) if self._record_of(leaf) in recorded or (faces and op.only_casts) else leaf

        return tree_map_only(Tensor, faced, results)


def _is_followed(tensor: Tensor) -> bool:
    return has_storage(tensor) and tensor.device.type == "cpu"


aten = torch.ops.aten

_FILLS = {
    *(aten.normal_, aten.uniform_, aten.random_, aten.exponential_, aten.cauchy_, aten.log_normal_),
    *(aten.geometric_, aten.zero_, aten.fill_, aten.copy_),
}
"""In-place operations whose result does not depend on what was there."""
_OF_FORMS = {
    *(aten.zeros_like, aten.ones_like, aten.full_like, aten.empty_like, aten.rand_like, aten.randn_like),
    *(aten.randint_like, aten.new_zeros, aten.new_ones, aten.new_full, aten.new_empty, aten.new_empty_strided),
}
"""Operations that make a tensor of another one's form."""


def has_storage(tensor: Tensor) -> bool:
    """True if its elements lie in one storage, by strides."""
    return tensor.layout is torch.strided and not tensor.is_quantized


class DispatchedOp:
    """An operator and its arguments, as torch's dispatcher hands it over: what it reads, writes, draws and returns."""

    def __init__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.func = func
        self.args = args
        self.kwargs = kwargs
        if self.func.overloadpacket is aten._to_copy and str(kwargs.get("device")) == "meta":
            # Asked to be where a deferred tensor is: in a plain program that is the CPU.
            self.kwargs = {key: value for key, value in kwargs.items() if key != "device"}
        self.tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        self.written = self._written()
        """Tensors that it changes."""

    @property
    def name(self) -> str:
        return str(self.func.overloadpacket.__name__)

    def run(self, instead: dict[int, Tensor] | None = None) -> Any:
        """Do it, with other tensors in the place of some, by id."""
        stand_ins = instead or {}

        def real(leaf: Tensor) -> Tensor:
            return stand_ins.get(id(leaf), leaf)

        args, kwargs = tree_map_only(Tensor, real, (self.args, self.kwargs))
        return self.func(*args, **kwargs)

    def _written(self) -> list[Tensor]:
        found = []
        for index, argument in enumerate(self.func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = self.args[index] if index < len(self.args) else self.kwargs.get(argument.name)
                found += [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
        return found

    @property
    def targets(self) -> Any:
        """The result of an operation that returns the tensors it has changed."""
        num_results = len(self.func._schema.returns)
        return (None, *self.written[:1])[num_results] if num_results < 2 else tuple(self.written)

    @property
    def moves_storage(self) -> bool:
        return self.func.overloadpacket in (aten.set_, aten.resize_, aten.resize_as_)

    @property
    def only_renames(self) -> bool:
        """True if it makes a view, or changes nothing but a tensor's shape: no element is read or written."""
        returns = self.func._schema.returns
        is_view = bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)
        return is_view or (torch.Tag.inplace_view in self.func.tags and not self.moves_storage)

    @property
    def only_casts(self) -> bool:
        """True if it is a change of dtype on the same device."""
        return self.func.overloadpacket is aten._to_copy and self.kwargs.get("device") is None

    @property
    def reads_forms(self) -> bool:
        """True if it reads no element of its tensors."""
        return self.func.overloadpacket in _OF_FORMS

    @property
    def gives_tensors(self) -> bool:
        return any("Tensor" in str(result.type) for result in self.func._schema.returns)

    def filled(self) -> list[Tensor]:
        """The tensor whose storage it fills from end to end without reading it, if there is one."""
        if self.func.overloadpacket not in _FILLS:
            return []
        target = self.tensors[0]
        if not has_storage(target) or any(_share(target, other) for other in self.tensors[1:]):
            return []
        is_whole = target.is_contiguous() and target.nbytes == target.untyped_storage().nbytes()
        return [target] if is_whole else []

    def generator_state(self) -> Tensor | None:
        """The state of the generator that it draws from."""
        given = [leaf for leaf in tree_leaves((self.args, self.kwargs)) if isinstance(leaf, torch.Generator)]
        if given:
            return given[0].get_state()
        draws = torch.Tag.nondeterministic_seeded in self.func.tags
        return torch.get_rng_state() if draws else None


def _share(tensor: Tensor, other: Tensor) -> bool:
    return has_storage(other) and tensor.untyped_storage()._cdata == other.untyped_storage()._cdata
