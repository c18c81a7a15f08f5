"""One unit at run time: its parameters, their flat buffers, and the passes that use them.

[Note: flat buffers]
Each section has one buffer of constant identity on the compute device. Every parameter has a storage of its own over
its part of that memory, made once. So `as_strided` and code that asks for a storage find this parameter's values alone.
Autograd keeps views of these storages, so neither they nor the buffer are replaced. Away means that the pages (on a
CPU) or the memory (on a GPU) are gone, not the tensors. The storages are then closed (`access.py`), and while values
are on their way. `Unit` knows states and uses; `ParamPrefetcher` decides when to move.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from enum import Enum
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import nn

from zero_offload.base.errors import ZeroOffloadError
from zero_offload.base.threads import FirstError, UnitUpdate
from zero_offload.hardware.kernels.checksums import fingerprints
from zero_offload.plan.layout import ParamSlice, UnitLayout
from zero_offload.plan.tensor_parallel import is_dtensor
from zero_offload.standins.away import LocalPart, part_of
from zero_offload.standins.guard import GuardedParameter, class_at_rest
from zero_offload.standins.owners import AtRest
from zero_offload.standins.views import storage_of
from zero_offload.storage.memory.access import StorageAccess
from zero_offload.storage.memory.exchange import storage_over
from zero_offload.storage.memory.resizable import Buffer, ResizableBuffer
from zero_offload.storage.shards.shard import Shard


class UnitState(Enum):
    """Where the values of a unit's parameters are, and so what has memory on the compute device."""

    AWAY = "away"  # no memory; the bytes rest on their tier
    AWAITING = "awaiting"  # memory is attached; an update will deliver new values, or their read has not begun
    FETCHING = "fetching"  # memory is attached, reads are in flight
    PRESENT = "present"  # memory is attached and valid


TRANSITIONS: dict[UnitState, frozenset[UnitState]] = {
    UnitState.AWAY: frozenset({UnitState.AWAITING}),
    UnitState.AWAITING: frozenset({UnitState.FETCHING, UnitState.PRESENT, UnitState.AWAY}),
    UnitState.FETCHING: frozenset({UnitState.PRESENT, UnitState.AWAITING, UnitState.AWAY}),
    UnitState.PRESENT: frozenset({UnitState.AWAITING, UnitState.AWAY}),
}


class Section:
    """One section's flat buffer, (numel,) on the compute device, and this rank's shard."""

    def __init__(self, shard: Shard, flat: torch.Tensor, buffer: Buffer | None) -> None:
        """`buffer` holds the pages of `flat`; None when they never leave."""
        self.shard = shard
        self.layout = shard.layout
        self.flat = flat
        self.buffer = buffer
        self._parts = {(piece.begin, piece.end): self._part(piece) for piece in self.layout.params}
        """Of each parameter: the storage that it is in, and the element of that where it begins."""
        self.storages = frozenset(storage._cdata for storage, _ in self._parts.values())
        """Addresses of torch's objects for the parameters' memory, which views of them share."""
        whole = flat.untyped_storage()._cdata
        self.access = StorageAccess(storage for storage, _ in self._parts.values() if storage._cdata != whole)
        """Whether torch may reach the parameters' memory; that of the whole buffer is for us."""
        self.num_own_tensors = 0
        """Tensors on the buffer that stay, once the unit is sealed."""

    def _part(self, piece: ParamSlice) -> tuple[torch.UntypedStorage, int]:
        if isinstance(self.buffer, ResizableBuffer):
            return self.buffer.part(piece.begin, piece.end)
        storage = storage_over(self.flat[piece.begin : piece.end])
        if storage is None:
            return self.flat.untyped_storage(), int(self.flat.storage_offset()) + piece.begin
        return storage, 0

    def holds(self, tensor: torch.Tensor) -> bool:
        """True if the tensor views a parameter's memory."""
        storage = storage_of(tensor)
        return storage is not None and storage._cdata in self.storages

    def names_under(self, view: torch.Tensor) -> list[str]:
        """The parameter in which a view of their memory begins."""
        place, at = view.untyped_storage()._cdata, view.storage_offset() * view.itemsize // self.flat.itemsize
        found = ((piece, *self._parts[piece.begin, piece.end]) for piece in self.layout.params)
        return [
            piece.spec.name
            for piece, storage, begin in found
            if storage._cdata == place and begin <= at < begin + piece.spec.numel
        ]

    @property
    def num_tensors(self) -> int:
        """Tensors on the parameters' memory, and their storages themselves."""
        return sum(map(torch._C._storage_Use_Count, self.storages))

    def own_view(self, piece: ParamSlice) -> torch.Tensor:
        """A parameter's part of the buffer, of its (local) shape; also while the buffer has no memory."""
        storage, begin = self._parts[piece.begin, piece.end]
        # torch checks the bounds of slices against memory that is there, and not those of an alias.
        with torch.inference_mode(False), torch.no_grad(), self.access.opened():
            place = torch.empty(0, dtype=self.flat.dtype, device=self.flat.device)
            place.set_(storage, begin, (0,), (1,))
            view: torch.Tensor = torch.ops.aten._reshape_alias(place, piece.spec.shape, piece.spec.strides)
            return view


class Unit:
    """Parameters that are fetched, used and released together."""

    def __init__(
        self, index: int, layout: UnitLayout, sections: Sequence[Section], errors: FirstError, *, resident: bool
    ) -> None:
        """A `resident` unit, once here, is never evicted. A wait for its update raises what `errors` has."""
        self.index = index
        self.layout = layout
        self.name = layout.name
        self.sections = tuple(sections)
        self.params: list[nn.Parameter] = []
        """Section after section, in the order of the layout."""
        self.resident = resident
        self.update: UnitUpdate | None = None
        """The last update that was launched; None once the control thread knows that it is done."""
        self._errors = errors
        self.updates_in_place = all(s.buffer is None and s.layout.num_shards == 1 for s in sections)
        """The buffers are where the whole values rest: an update leaves nothing to fetch."""
        self.num_frames = sum(s.buffer.num_frames for s in sections if s.buffer is not None)
        """Frames its buffers need while they are here."""
        self.has_memory = False
        """True from the beginning of an `attach` to the end of a `detach`, which a Ctrl-C may break off."""
        self.state = UnitState.PRESENT if self.updates_in_place else UnitState.AWAY
        self._moves: deque[str] = deque([self.state.value], maxlen=8)
        self.on_host = all(section.flat.device.type == "cpu" for section in sections)
        self.to_read: tuple[Section, ...] = ()
        """Awaiting or fetching: the sections whose values are not here and will not be delivered."""
        self.forward_uses = 0
        """Forwards (of its modules, or around a touch) that are running now."""
        self.broken_uses = 0
        """Further forwards that are running: the unit had to leave in the midst of them."""
        self.backward_uses = 0
        """Backwards through those modules that have begun and not ended."""
        self.num_uses = 0
        """Uses by forwards since the last backward ended."""
        self.used_by_operations = False
        """True if single operations use it, outside of its modules or in backward: between two of them it may go."""
        self.saved_views: set[weakref.ref[Any]] = set()
        """Tensors on its buffers that are saved for a backward, which fetches the unit before it reads them."""
        self.stays = False
        """True if the program holds a view of its buffers: it stays, and is looked at again when a cycle begins."""
        self._versions: list[int] = []
        """Versions of the parameters, when they were opened."""
        self._fingerprints: torch.Tensor | None = None
        """Fingerprints of their values, (params,) where they are; None in most uses."""
        self._is_replaced = False
        """True if at the end of the last use some parameter was in other memory."""
        self.compares_values = False
        """True once a parameter had another version after a use and the same value, as where a parametrization sets it
        to itself. From then on its values are compared in every use."""
        self.gathered_uses = 0
        """`gathered` contexts that hold it; no forward or backward ends these."""
        self.writable: list[Sequence[nn.Parameter]] = []
        """For each `gathered` context that writes: the parameters that it may change, plain until it ends."""

    def move_to(self, to: UnitState) -> None:
        """Change the state. Raises AssertionError for a move that `TRANSITIONS` does not have."""
        if to not in TRANSITIONS[self.state]:
            moves = " -> ".join(self._moves)
            raise AssertionError(f"unit {self.name}: {self.state.value} cannot become {to.value} ({moves})")
        self.state = to
        self._moves.append(to.value)
        self.set_access()

    def set_access(self) -> None:
        """Let torch reach the parameters' memory while it has their newest values, and at no other time."""
        is_open = self.state is UnitState.PRESENT and self.update is None
        for section in self.sections:
            if is_open:
                section.access.open()
            else:
                section.access.close()

    def begin_update(self, update: UnitUpdate) -> None:
        """New values are on their way."""
        self.update = update
        self.set_access()

    @property
    def is_updating(self) -> bool:
        """True if an update was launched whose values are not computed yet."""
        return self.update is not None and not self.update.is_done

    def wait_for_update(self) -> None:
        """Return when the newest values are computed. Raises the first error of the model's work."""
        if self.update is not None and not self.update.is_done:
            self.update.wait()
        if self._errors.error is not None:
            self._errors.check()
        if self.update is not None:
            self.update = None
            self.set_access()

    @property
    def in_use(self) -> bool:
        return self.runs or self.gathered_uses > 0

    @property
    def runs(self) -> bool:
        """True if a forward or backward uses it."""
        return self.forward_uses > 0 or self.backward_uses > 0

    @property
    def readable(self) -> bool:
        """True if its parameters, once updated, can be read at any time without a move."""
        return self.updates_in_place or (self.resident and self.state is UnitState.PRESENT)

    @cached_property
    def placed_params(self) -> tuple[tuple[Section, ParamSlice, nn.Parameter], ...]:
        """Every parameter with its section and its slice of it; asked for once all of them are made."""
        places = ((section, piece) for section in self.sections for piece in section.layout.params)
        return tuple((*place, param) for place, param in zip(places, self.params, strict=True))

    def replace(self, old: nn.Parameter, new: nn.Parameter) -> None:
        """Another parameter has the place of one; it is a view of the same memory."""
        self.params = [new if param is old else param for param in self.params]
        for name in ("placed_params", "_unguarded"):
            self.__dict__.pop(name, None)

    def attach(self) -> bool:
        """Put pages under all buffers. None of them has any where there are too few, which is a False or an error."""
        self.has_memory, is_complete = True, False
        try:
            is_complete = all(section.buffer is None or section.buffer.attach() for section in self.sections)
        finally:
            if not is_complete:
                self.detach()
            self.set_access()
        return is_complete

    def detach(self) -> None:
        """Take the pages of all buffers away. A call that a Ctrl-C breaks off is made again before `attach`."""
        for section in self.sections:
            if section.buffer is not None and section.buffer.attached:
                section.buffer.detach()
        self.has_memory = False
        self.set_access()  # a device has exchanged memory under the storages

    def unguard(self) -> None:
        """Give the parameters plain tensors' speed for a use."""
        for param in self._unguarded:
            if isinstance(param, AtRest):
                kind = param.__class__ = type(param).__bases__[1]  # its class is (AtRest, the class in use)
                if kind is not nn.Parameter:
                    LocalPart.uncover(param)
        if self.writable:
            self._adopt_replaced()
        with torch._C.DisableTorchFunctionSubclass():
            self._versions = [param._version for param in self.params]

    @cached_property
    def _unguarded(self) -> tuple[nn.Parameter, ...]:
        """The parameters that are plain in a use: not quantized weights, unless the unit never leaves and torch's own
        class is theirs. See [Note: quantized weights in use] in guard.py."""
        return tuple(
            p
            for section, piece, p in self.placed_params
            if not stays_guarded(section, piece)
            or (self.resident and (isinstance(p, GuardedParameter) or type(p) is nn.Parameter))
        )

    def watch(self) -> None:
        """After `unguard`: see changes in this use that torch counts no version for, too, made through `.data`.

        A pass over the parameters, and one more in `changed`, which on a GPU is the first to wait.
        """
        if not self.updates_in_place or any(section.layout.has_master_apart for section in self.sections):
            self._fingerprints = self._take_fingerprints()

    def _take_fingerprints(self) -> torch.Tensor:
        with torch._C._DisableFuncTorch():  # its tensors have no storage
            return fingerprints([s.flat[piece.begin : piece.end] for s in self.sections for piece in s.layout.params])

    def _loses(self, section: Section) -> bool:
        """True if what forward changes there does not last: the value leaves, or its master is not made from it."""
        return not self.updates_in_place or section.layout.has_master_apart

    def end_use(self, holds_value: Callable[[Section], bool]) -> list[str]:
        """One forward has used the unit; names of parameters that forwards have changed."""
        if self.forward_uses > 0:
            self.forward_uses -= 1
        else:
            assert self.broken_uses > 0, f"unit {self.name}: a use has ended twice"
            self.broken_uses -= 1
        changed: list[str] = []
        if self.forward_uses == 0:
            changed = self.changed(holds_value)
            if self._is_replaced and not self.writable:  # a program may write those now
                self.restore_views()
        self.guard()
        return changed

    def changed(self, holds_value: Callable[[Section], bool] = lambda section: False) -> list[str]:
        """Names of parameters that were changed since `unguard`, where what is changed here is lost.

        A change of the value counts. A new version says that a write is possible; without fingerprints of this use
        `holds_value` says whether a buffer still holds what rests elsewhere.
        """
        doubtful = []
        # Without versions it was never opened: there was no room for it.
        misplaced = self._misplaced() if self._versions else []
        self._is_replaced = bool(misplaced)
        with torch._C.DisableTorchFunctionSubclass():
            names = [p.spec.name for s, p, param in misplaced if not _equal(part_of(param), s.own_view(p))]
        elsewhere = {id(param) for _, _, param in misplaced}
        with torch._C.DisableTorchFunctionSubclass():
            for (section, piece, param), version in zip(self.placed_params, self._versions, strict=False):
                if param._version != version and id(param) not in elsewhere and self._loses(section):
                    doubtful.append((section, piece.spec.name))
        if self._fingerprints is not None:
            differ = (self._take_fingerprints() != self._fingerprints).tolist()
            names += [
                piece.spec.name
                for (section, piece, _), differs in zip(self.placed_params, differ, strict=True)
                if differs and self._loses(section)
            ]
        else:
            kept = {id(section): holds_value(section) for section in dict.fromkeys(section for section, _ in doubtful)}
            names += [name for section, name in doubtful if not kept[id(section)]]
        self.compares_values |= bool(doubtful)
        return names

    def _misplaced(self) -> list[tuple[Section, ParamSlice, nn.Parameter]]:
        """Parameters that are not their part of the buffers, which are here. Asked for after each use."""
        found = []
        with torch._C.DisableTorchFunctionSubclass():  # some may be at rest
            for place in self.placed_params:
                section, piece, param = place
                part = param if type(param) is nn.Parameter else part_of(param)
                address = section.flat.data_ptr() + piece.begin * section.flat.itemsize
                is_there = part.data_ptr() == address or part.numel() == 0
                fits, order = is_there and part.shape == piece.spec.shape, piece.spec.order
                # In the parameter's order its elements lie one after the other, as those of the buffer do.
                if not (fits and (part.permute(order) if order else part).is_contiguous()):
                    found.append(place)
        return found

    def restore_views(self) -> None:
        """Make parameters views of the buffers again, with the values that were there, if the program has given them
        other memory, as by `param.data = values`. To be called while the unit is here."""
        self._is_replaced = False
        with torch._C.DisableTorchFunctionSubclass():
            for section, piece, param in self._misplaced():
                if not is_dtensor(param):
                    param.data = section.own_view(piece)
            moved = [piece.spec.name for _, piece, param in self._misplaced() if not is_dtensor(param)]
        if moved:
            raise ZeroOffloadError(
                f"the memory of {', '.join(moved[:3])}{' and others' * (len(moved) > 3)} was exchanged under the "
                "parameter, as share_memory_() does: its tier's values would go elsewhere. Share a copy (.clone())"
            )

    def _adopt_replaced(self) -> None:
        """Make parameters views of the buffers again, with the values that the program gave them."""
        with torch._C.DisableTorchFunctionSubclass():
            for section, piece, param in self._misplaced():
                if param.shape == piece.spec.shape:
                    section.own_view(piece).copy_(param.detach())
        self.restore_views()

    def guard(self) -> None:
        """Guard the parameters again, unless a forward or backward uses them or a program may change them."""
        if self.forward_uses > 0 or self.backward_uses > 0:
            return
        open_ids = {id(param) for params in self.writable for param in params}
        for param in self.params:
            if not isinstance(param, AtRest) and id(param) not in open_ids:
                kind = type(param)
                param.__class__ = class_at_rest(kind)
                if kind is not nn.Parameter:
                    LocalPart.hide(param)
        self.used_by_operations = False
        self._versions, self._fingerprints = [], None

    # Views that others hold. Touching one while the unit is away is a fault, not an exception.

    def lay_anew(self, layout: UnitLayout) -> None:
        """Some sections are trained from now on, or frozen again, and their shards say so already."""
        self.layout = layout
        for section in self.sections:
            section.layout = section.shard.layout

    def change(self, layout: UnitLayout) -> None:
        """The model has changed, and shards say so already: some parameters have other names or places in the model.
        Sections without a parameter go; they have no memory. Without any the unit is empty, and always here."""
        kept = [(at, param) for at, _, param in self.placed_params if at.shard.layout.params]
        self.layout, self.name = layout, layout.name
        self.sections = tuple(section for section in self.sections if section.shard.layout.params)
        self.params = [param for _, param in kept]
        for section in self.sections:
            section.layout = section.shard.layout
        self.num_frames = sum(s.buffer.num_frames for s in self.sections if s.buffer is not None)
        if not self.sections:
            self.resident = self.updates_in_place = True
            self.stays, self.state = False, UnitState.PRESENT
        for name in ("placed_params", "_unguarded"):
            self.__dict__.pop(name, None)

    def seal(self) -> None:
        """Every tensor that is to stay on the buffers is made, and no other one lives."""
        for section in self.sections:
            section.num_own_tensors = section.num_tensors
        self.set_access()

    @property
    def lent(self) -> bool:
        """True if the program holds a view of buffers that may go. Not a backward's views: it asks for the unit."""
        return self.is_viewed(section for section in self.sections if section.buffer is not None)

    def is_viewed(self, sections: Iterable[Section]) -> bool:
        """True if the program holds a view of these sections: an update changes what such a view shows."""
        return sum(section.num_tensors - section.num_own_tensors for section in sections) > len(self.saved_views)

    @property
    def may_be_evicted(self) -> bool:
        return not self.resident and not self.stays

    @property
    def may_leave_in_use(self) -> bool:
        """True if a unit in use can go all the same: no module of its own runs, and no operation reads it."""
        free = self.used_by_operations and self.may_be_evicted and not self.gathered_uses
        return free and not self.lent and not self.changed()

    def break_off(self) -> None:
        """It has to go in the middle of a use: whatever reads it next asks for it again."""
        self.broken_uses += self.forward_uses
        self.forward_uses = self.backward_uses = 0
        self.guard()

    def drop_uses(self) -> None:
        """Forwards that used it run no more, and their ends do not come."""
        self.forward_uses = self.broken_uses = 0


def stays_guarded(section: Section, piece: ParamSlice) -> bool:
    """True for a quantized weight, and for what belongs to one."""
    return not section.layout.trainable and piece.spec.keeps_dtype


def _equal(values: torch.Tensor, own: torch.Tensor) -> bool:
    same_kind = (values.shape, values.dtype, values.device) == (own.shape, own.dtype, own.device)
    return same_kind and torch.equal(values.detach(), own)


class UpdatesInBackward(Protocol):
    """Updates units in the backward that makes their gradients. It is told where that backward is."""

    def before_use(self, unit: Unit) -> None:
        """Backward is about to read parameters of this unit."""

    def advance(self, beside: Unit | None = None) -> None:
        """Backward is elsewhere, or in the unit `beside`: update what it is done with."""

    def end(self) -> None:
        """Backward is over."""

    def cancel(self) -> None:
        """An exception has ended a backward: make no update of it, if none was launched."""
