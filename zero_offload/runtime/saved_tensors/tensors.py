"""Tensors that autograd saves in a model's forward: which are views of parameters, and what is told when they are read.

Owns the saved-tensor hooks. Never moves bytes: before a view of a unit's buffer is given back, its unit is asked for.
The graph knows which object is asked, not this module: a cycle would keep a dropped model until garbage collection.
The user's hooks, around the forward or inside of it, get every other tensor. At the end: which hooks are in place, and
whether the call that entered them still runs.

Tensors made of frozen weights that keep their dtype are made again (see derived.py).

[Note: casts of weights]
torch.autocast casts fp32 weights for an operation, which saves the cast. All of them would stay from forward to
backward, though their units leave. So the parameter is saved in the cast's place, and cast again: the same bits. A cast
of a trained parameter is known by its graph. One of a frozen parameter has none: its values are compared. On a GPU the
host waits for each comparison, in forward alone.
"""

from __future__ import annotations

import functools
import gc
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import checkpoint

from zero_offload.plan.tensor_parallel import PLAIN, is_dtensor, local_part
from zero_offload.runtime.saved_tensors.activations import Activations
from zero_offload.runtime.units.unit import Section, Unit
from zero_offload.standins.brought import changed_in_place
from zero_offload.standins.derived import Derived, Step, plain_of
from zero_offload.standins.owners import AtRest
from zero_offload.standins.views import storage_of

Pack = Callable[[Tensor], Any]
Unpack = Callable[[Any], Tensor]
SavingHooks = tuple[Pack, Unpack]
Use = Callable[[Unit], None]
"""Brings a unit that a backward is about to read."""


_Cast = tuple[torch.dtype, torch.Size, tuple[int, ...], int]
"""Dtype, shape, stride and offset of a view of a whole parameter's cast."""


class Saved:
    """A tensor that autograd saved, and the unit whose buffer it views, if any.

    One is made for every tensor that a forward saves: it has no `__init__`, whose call would cost as much as all else.
    A unit learns of its end by a callback of C. Python drops what a signal's handler raises in a finalizer: a Ctrl-C in
    C++ code that frees a graph would be lost in `__del__`.
    """

    __slots__ = ("kept", "version", "unit", "cast", "__weakref__")

    kept: Tensor
    """Detached: a node that saved its own output would hold itself in memory through it."""
    version: int
    """Its version when it was saved."""
    unit: Unit | None
    cast: _Cast | None
    """How autograd saved the parameter; see [Note: casts of weights]."""


class SavedTensors:
    """Packs and unpacks what the forwards of one model save."""

    def __init__(self, units: Sequence[Unit], store: Activations | None, *, always: bool = False) -> None:
        """`store` takes tensors that are not views of parameters, if they may leave. With `always`, reads of
        parameters in backward are noticed even if they never leave."""
        self._store = store
        self._cast_units: list[Unit] = []
        """Those that leave and have fp32 parameters."""
        self._writes_casts = self._writes_derived = self._checks_casts = False
        """True if a program writes to casts; to tensors that it has made of frozen weights; and if this forward
        compares both with repeated ones.
        """
        self.cast_bytes = 0
        """Bytes of casts of trained parameters that this forward has dropped, which autocast may have in its cache."""
        self._cast: set[int] = set()
        self._needed = always or store is not None
        """False where nothing ever leaves: autograd saves as it likes, and torch.func, which refuses hooks, works."""
        self._unit_of_storage: dict[int, Unit] = {}
        self.grow(units)

    def grow(self, units: Sequence[Unit]) -> None:
        """Know further units."""
        self._needed = self._needed or not all(unit.updates_in_place for unit in units)
        leaving = [unit for unit in units if not unit.resident]
        self._cast_units += [u for u in leaving if any(s.layout.dtype == torch.float32 for s in u.sections)]
        # A view shares its base's storage object, whether memory is under it or not.
        self._unit_of_storage |= {each: unit for unit in units for s in unit.sections for each in s.storages}

    def forget(self, sections: Iterable[Section]) -> None:
        """The memory of these goes: others may have its addresses."""
        for storage in (each for section in sections for each in section.storages):
            self._unit_of_storage.pop(storage, None)

    def begin(self, *, checks: bool = False) -> None:
        """An outermost forward; `checks`: what changes tensors past torch's versions is looked for."""
        self._checks_casts = checks
        self.cast_bytes = 0
        self._cast.clear()
        if self._store is not None:
            self._store.begin()

    def hooks(self, use: Use, reads: Use | None) -> saved_tensors_hooks | None:
        """For a forward that begins: entered hooks, unless ours are in place; it may turn gradients on by itself.

        `reads`: called when an operation is about to read a unit that is here, perhaps on a stream of the module's own.
        None where there are no streams.
        """
        hooks = saving_hooks()
        if not self._needed or (hooks is not None and (saver_of(hooks) is self or recomputed_later(hooks))):
            return None
        autograd: Any = torch._C._autograd
        if not autograd._saved_tensors_hooks_is_enabled():
            return None  # inside of torch.func.grad and its kin: what is saved is a view like any that is held
        entered = saved_tensors_hooks(*self._hooks(hooks, use, reads))
        entered.__enter__()
        return entered

    def _hooks(self, users: SavingHooks | None, use: Use, reads: Use | None) -> SavingHooks:
        # C++ calls them from any operation: torch.compile would follow them into the file engine.
        pack, unpack = untraced(SavedTensors._pack), untraced(SavedTensors._unpack)
        return partial(pack, self, users, reads), partial(unpack, self, use)

    def unit_of(self, tensor: Tensor) -> Unit | None:
        """The unit whose buffer the tensor views."""
        plain = tensor if type(tensor) in PLAIN else local_part(tensor)
        try:
            return self._unit_of_storage.get(plain.untyped_storage()._cdata)
        except NotImplementedError:  # not strided, or of torch.func
            storage = storage_of(plain)
            return None if storage is None else self._unit_of_storage.get(storage._cdata)

    def _save_in_backward(self, use: Use) -> None:
        """The node that runs now saves what it uses, for a backward through it (create_graph=True)."""
        hooks = saving_hooks()
        if hooks is None or (saver_of(hooks) is not self and not recomputed_later(hooks)):
            # Never popped: autograd gives every node the hooks of the thread that called backward.
            torch._C._autograd._push_saved_tensors_default_hooks(*self._hooks(hooks, use, None))

    def _pack(self, users: SavingHooks | None, reads: Use | None, tensor: Tensor) -> Saved | Step | tuple[Any, Unpack]:
        """A tuple has what the user's hooks, or the store, made of the tensor, and what gives it back."""
        if isinstance(tensor, AtRest | Derived):
            if type(tensor) is Derived and (step := self._steps_of(tensor, reads)) is not None:
                return step
            tensor = plain_of(tensor)
        try:  # as `unit_of` does, without a call
            units = self._unit_of_storage
            unit = units.get(tensor.untyped_storage()._cdata) if type(tensor) in PLAIN else self.unit_of(tensor)
        except NotImplementedError:
            unit = self.unit_of(tensor)
        cast = None
        if unit is None:
            if self._cast_units and tensor.dtype in _CASTS and (found := self._cast_of(tensor)) is not None:
                tensor, unit, cast = found
            elif users is not None:
                return users[0](tensor), users[1]
            elif self._store is not None and (stored := self._store.pack(tensor)) is not None:
                return stored, self._store.unpack
        saved = Saved()
        saved.kept, saved.version, saved.unit, saved.cast = tensor.detach(), tensor._version, unit, cast
        if unit is not None:
            unit.saved_views.add(weakref.ref(saved, unit.saved_views.discard))
            if reads is not None:
                reads(unit)
        return saved

    def _steps_of(self, tensor: Derived, reads: Use | None) -> Step | None:
        """The step that makes the tensor again, of tensors that are saved themselves; None where the tensor is kept."""
        if tensor.step is None or not tensor.is_known or not tensor.step.is_repeatable or self._writes_derived:
            return None
        if self.unit_of(tensor.plain) is not None:
            return None
        step = tensor.step.replaced(partial(self._pack, None, reads), {})
        if self._checks_casts and not torch.equal(_repeated(step, _kept), tensor.plain):
            self._writes_derived = True  # through `.data`; or an operation gives other values each time
            return None
        return step

    def _cast_of(self, tensor: Tensor) -> tuple[Tensor, Unit, _Cast] | None:
        """For a view of a cast of a parameter that leaves memory: the parameter, its unit and the view."""
        if self._writes_casts or type(tensor) is not Tensor or tensor._version:
            return None
        if torch._C._functorch.is_functorch_wrapped_tensor(tensor) or tensor.layout is not torch.strided:
            return None
        with torch._C.DisableTorchFunctionSubclass():  # a leaf may be another model's parameter, at rest
            storage, param = tensor.untyped_storage(), _param_of_cast(tensor)
            if tensor.grad_fn is None:
                param = self._frozen_like(tensor, storage)
            unit = None if param is None else self.unit_of(param)
            if param is None or unit is None or unit.resident or not _is_whole(param, tensor, storage):
                return None
            if self._checks_casts and not torch.equal(_flat(tensor, storage), _cast(param, tensor.dtype)):
                self._writes_casts = True  # through `.data`
                return None
            if param.requires_grad and id(param) not in self._cast:
                self._cast.add(id(param))
                self.cast_bytes += storage.nbytes()
            form = tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset())
            return param.detach(), unit, form

    def _frozen_like(self, tensor: Tensor, storage: torch.UntypedStorage) -> Tensor | None:
        """The frozen parameter in use whose cast the tensor views."""
        for unit in self._cast_units:
            for param in unit.params if unit.forward_uses else ():
                if not param.requires_grad and _is_whole(param, tensor, storage):
                    flat = _flat(tensor, storage)
                    ends = torch.equal(flat[:_FEW], _cast(param.detach().flatten()[:_FEW], tensor.dtype))
                    if ends and torch.equal(flat, _cast(param, tensor.dtype)):
                        return param
        return None

    def _unpack(self, use: Use, saved: Saved | Step | tuple[Any, Unpack]) -> Tensor:
        if isinstance(saved, tuple):
            packed, unpack = saved
            return unpack(packed)
        if isinstance(saved, Step):
            return _repeated(saved, partial(self._unpack, use))
        kept, unit = saved.kept, saved.unit
        if kept._version != saved.version:
            raise changed_in_place(tuple(kept.shape), kept._version, saved.version)
        if unit is None:
            return kept
        use(unit)
        if torch.is_grad_enabled():
            self._save_in_backward(use)
        # One more tensor on the buffer, for as long as the node needs it: so the unit is seen to be in use.
        if saved.cast is None:
            return kept.detach()
        dtype, shape, stride, offset = saved.cast
        return kept.detach().to(dtype).as_strided(shape, stride, offset)


def _repeated(step: Step, leaf: Callable[[Saved], Tensor]) -> Tensor:
    # Autocast has done its part when the steps were noted.
    with torch.no_grad(), torch._C._DisableAutocast():
        made: Tensor = step.repeat(Saved, leaf, {})
    return made


def _kept(saved: Saved) -> Tensor:
    return saved.kept


_CASTS = (torch.bfloat16, torch.float16)
_VIEWS = frozenset(
    f"{name}Backward{number}"
    for name in ("T", "Transpose", "Permute", "View", "UnsafeView", "ReshapeAlias", "Expand", "Unsqueeze", "Squeeze")
    for number in range(3)
)
"""Nodes of operations that return a view of what they are given."""
_FEW = 64
"""Elements that are compared before all are."""


def _param_of_cast(tensor: Tensor) -> Tensor | None:
    """The leaf of which the tensor is a cast, or a view of one."""
    node = tensor.grad_fn
    while node is not None and node.name() in _VIEWS:
        node = node.next_functions[0][0]
    if node is None or node.name() != "ToCopyBackward0":
        return None
    leaf: Tensor | None = getattr(node.next_functions[0][0], "variable", None)
    return leaf


def _is_whole(param: Tensor, tensor: Tensor, storage: torch.UntypedStorage) -> bool:
    """True if the storage may be that of the parameter's cast, and of nothing else."""
    same = param.dtype == torch.float32 and param.device == tensor.device and not is_dtensor(param)
    return same and param.is_contiguous() and storage.nbytes() == param.numel() * tensor.itemsize


def _flat(tensor: Tensor, storage: torch.UntypedStorage) -> Tensor:
    """(numel,), all of a storage."""
    return torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(storage)


def _cast(param: Tensor, dtype: torch.dtype) -> Tensor:
    """(numel,) of a parameter, as autocast makes it."""
    return param.detach().flatten().to(dtype)


# Hooks, and the calls that have entered them


def _as_it_is(packed: Any) -> Any:
    return packed


KEPT_AS_IT_IS: SavingHooks = (Tensor.detach, _as_it_is)
"""The hooks of a tensor that is saved without hooks."""


def saving_hooks() -> SavingHooks | None:
    """The hooks that saved tensors pass through now."""
    hooks: SavingHooks | None = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks


_RECOMPUTING = (checkpoint.__name__, "zero_offload.runtime.saved_tensors.recompute")
# By name, since `recompute.py` imports this module and torch's hook is a local class: a rename there is one here.
_SECOND_PASSES = ("_recomputation_hook.", "RecomputedForward.refill")


def recomputed_later(hooks: SavingHooks | None) -> bool:
    """True if they belong to a forward that saves nothing and runs again in backward: torch's, or zo.checkpoint's."""
    return hooks is not None and getattr(hooks[0], "__module__", None) in _RECOMPUTING


def runs_again(hooks: SavingHooks | None) -> bool:
    """True if they belong to the second pass of such a forward."""
    name = getattr(hooks[0], "__qualname__", "") if hooks is not None and recomputed_later(hooks) else ""
    return name.startswith(_SECOND_PASSES)


def exit_hooks(entered: saved_tensors_hooks) -> None:
    """Leave them, if saved tensors of this thread pass through them now: each thread has hooks of its own."""
    hooks = saving_hooks()
    if hooks is not None and hooks[0] is entered.pack_hook:
        entered.__exit__()


def saver_of(hooks: SavingHooks) -> SavedTensors | None:
    """The offloaded model's part whose hooks they are; None for all others."""
    given = hooks[0].args if isinstance(hooks[0], partial) else ()
    return given[0] if given and isinstance(given[0], SavedTensors) else None


_COLLECTOR = threading.RLock()


def runs(frame: FrameType) -> bool:
    """True if a frame is one of our callers, or of another thread's: a GPU's backward has a thread of its own."""
    return _calls(frame, sys._getframe()) or any(_calls(frame, top) for top in _current_frames().values())


def _current_frames() -> dict[int, FrameType]:
    """The top frame of each thread. Python before 3.11.9 holds its list of threads locked meanwhile. A garbage
    collection may begin there and let another thread run. If that thread ends meanwhile, the program waits for ever
    (python/cpython#106883)."""
    with _COLLECTOR:
        collects = gc.isenabled()
        try:
            gc.disable()
            return sys._current_frames()
        finally:
            if collects:
                gc.enable()


@functools.cache
def untraced(hook: Callable[..., Any]) -> Callable[..., Any]:
    """`hook`, which torch.compile does not trace: it compiles what a module does between its hooks."""
    disable: Any = torch.compiler.disable
    return disable(hook)  # type: ignore[no-any-return]


def _calls(frame: FrameType, callee: FrameType | None) -> bool:
    while callee is not None and callee is not frame:
        callee = callee.f_back
    return callee is not None
