"""Every operation of a recording: runs it on real values, notes how they were made.

Owns which storage is which. A tensor in a recording is real, or a *face*: a meta tensor, whose storage stands for
values that are in memory only while operations use them. An operation on a face runs on its real values, so it does
what it does in a plain program (errors, random numbers and data-dependent results included); values that
were dropped are replayed first, unless they are about to be filled. Never touches modules or parameters: that is
`recorder.py`'s. Calls, in order: `face` makes a tensor deferred; `run` does an operation; `recipe` at the end.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only
from torch.utils.weak import WeakIdKeyDictionary

from zero_offload.base.errors import ConfigError
from zero_offload.base.host import host_zeros
from zero_offload.base.types import MIB
from zero_offload.model.deferred.call import Call, has_storage
from zero_offload.model.deferred.recipe import TEMPORARY_BYTES, Node, OwnGenerator, Recipe, Ref, Value, blank, replay
from zero_offload.storage.memory.heap import HeapTrimmer

KEPT_BYTES = 16 * MIB
"""Real values of faces that stay in memory beside those in use: an initialisation touches neighbours in turn."""


@dataclass(eq=False)
class Slot:
    """One storage of the program."""

    key: int
    nbytes: int
    value: Value
    real: weakref.ref[torch.UntypedStorage] | None
    """Its values, while they are in memory."""
    face: weakref.ref[torch.UntypedStorage] | None = None
    """The meta storage of its faces."""
    unknown: bool = False
    """Its values were left out, or computed from such."""
    can_be_made: bool = True
    """Of an unknown one: `value` says how, without values of other unknown ones."""


class Tracer:
    """Storages of one recording and the operations on them. Used by one thread, outside of its modes."""

    def __init__(self, *, leaves_out: bool) -> None:
        """`leaves_out`: faces have no values, and what fills them is not run."""
        self.leaves_out = leaves_out
        self._slots: WeakIdKeyDictionary = WeakIdKeyDictionary()
        """Storage, real or meta -> slot."""
        self._kept: dict[Slot, torch.UntypedStorage] = {}
        """Real values of faces, the last used last."""
        self._trimmer = HeapTrimmer(TEMPORARY_BYTES)
        self._keys = itertools.count()
        self._orders = itertools.count()

    # Faces

    def is_face(self, tensor: Tensor) -> bool:
        return tensor.is_meta and self._slot(tensor) is not None

    def face(self, tensor: Tensor) -> Tensor:
        """A meta tensor in the place of `tensor`, a real one; its values are what they are now."""
        slot = self._slot(tensor) or self._follow(tensor)
        slot.unknown |= self.leaves_out
        storage = slot.face() if slot.face is not None else None
        if storage is None:
            storage = torch.empty(slot.nbytes, dtype=torch.uint8, device="meta").untyped_storage()
            slot.face = weakref.ref(storage)
            self._slots[storage] = slot
        return Ref.of(tensor, slot.key).on(storage)

    def values(self, face: Tensor) -> Tensor:
        """The values of a face, which are in memory as long as the result."""
        slot = self._slots[face.untyped_storage()]
        return Ref.of(face, slot.key).on(self._storage(slot))

    def is_unknown(self, tensor: Tensor) -> bool:
        slot = self._slot(tensor)
        return slot is not None and slot.unknown

    def forget(self, tensor: Tensor) -> None:
        """A real tensor may change where no operation is seen: from now on its values are what they are."""
        if has_storage(tensor) and not tensor.is_meta:
            self._slots.pop(tensor.untyped_storage(), None)

    def recipe(self, face: Tensor) -> Recipe:
        """How the values of a face are made, as far as the program has come."""
        slot = self._slots[face.untyped_storage()]
        made = slot.value if slot.can_be_made or not slot.unknown else None
        return Recipe(made, Ref.of(face, slot.key), is_skipped=slot.unknown)

    def _slot(self, tensor: Tensor) -> Slot | None:
        slot: Slot | None = self._slots.get(tensor.untyped_storage()) if has_storage(tensor) else None
        return slot

    def _follow(self, tensor: Tensor) -> Slot:
        """Begin with a storage whose values were made elsewhere: they are copied."""
        storage = tensor.untyped_storage()
        key = next(self._keys)
        slot = Slot(key, storage.nbytes(), Value(key, data=storage.clone()), weakref.ref(storage))
        self._slots[storage] = slot
        return slot

    # Operations

    def run(self, call: Call) -> Any:
        """Do an operation, and note it."""
        faces = [tensor for tensor in call.tensors if self.is_face(tensor)]
        if call.only_renames:
            return call.run()
        if faces and len(faces) < sum(tensor.is_meta for tensor in call.tensors):
            raise ConfigError(
                f"{call.name} inside zo.deferred_init mixes a parameter and a tensor on meta without values"
            )
        if faces and call.moves_storage:
            return self._move(call)
        filled = call.filled()
        if faces and call.written and all(t.is_meta and self.is_unknown(t) for t in call.written):
            self._leave_out(call, filled)
            return call.targets
        is_unknown = any(self.is_unknown(t) for t in call.tensors if all(t is not f for f in filled))
        if is_unknown and not call.gives_tensors:
            raise ConfigError(
                f"{call.name} reads values of a parameter, which zo.deferred_init(values='skip') leaves out; "
                "use zo.deferred_init()"
            )
        for tensor in call.written:
            if _is_followed(tensor) and self._slot(tensor) is None:
                self._follow(tensor)
        node = self._node(call, filled) if call.gives_tensors or call.written else None
        reals = self._reals(faces, filled)
        results = call.run(reals)
        if node is not None:
            self._note(node, call, filled, results, is_unknown=is_unknown)
        return self._with_faces(call, faces, reals, results)

    def _leave_out(self, call: Call, filled: Sequence[Tensor]) -> None:
        """Note what would fill unknown values, without doing it: a parameter may turn out to be in no file.

        The program's generator stays as it is. Numbers are drawn from one of each operation's own, seeded by both.
        """
        if filled and len(call.tensors) == 1:
            node, slot = self._node(call, filled), self._slots[filled[0].untyped_storage()]
            if node.generator_state is not None:
                seed = hash((torch.initial_seed(), node.order)) % (1 << 63)
                node = replace(node, generator_state=torch.Generator("cpu").manual_seed(seed).get_state())
            slot.value, slot.can_be_made = Value(slot.key, node), True
            return
        for tensor in call.written:
            self._slots[tensor.untyped_storage()].can_be_made = False

    def _move(self, call: Call) -> Any:
        """A face becomes a face of another storage."""
        target, *sources = call.tensors
        if call.func is not torch.ops.aten.set_.source_Tensor or not self.is_face(target):
            raise ConfigError(f"{call.name} of a parameter inside zo.deferred_init: give it its size when it is made")
        source = sources[0] if self.is_face(sources[0]) else self.face(sources[0])
        return call.func(target, source)

    def _node(self, call: Call, filled: Sequence[Tensor]) -> Node:
        reads = []
        unread = {id(self._slot(tensor)) for tensor in filled}

        def noted(leaf: Any) -> Any:
            if isinstance(leaf, torch.Generator):
                return OwnGenerator()
            if not isinstance(leaf, Tensor) or leaf.is_meta and not self.is_face(leaf):
                return leaf
            slot = self._slot(leaf)
            if slot is None:
                return leaf.detach().clone()
            if id(slot) not in unread:
                reads.append(slot.value)
            return Ref.of(leaf, slot.key)

        args, kwargs = tree_map(noted, call.args), tree_map(noted, call.kwargs)
        dtype = torch.get_default_dtype()
        return Node(next(self._orders), call.func, args, kwargs, call.generator_state(), dtype, tuple(reads), [])

    def _note(self, node: Node, call: Call, filled: Sequence[Tensor], results: Any, *, is_unknown: bool) -> None:
        refilled = {id(self._slot(tensor)) for tensor in filled}
        for tensor in call.written:
            slot = self._slot(tensor)
            if slot is not None:
                slot.value = Value(slot.key, node)
                slot.unknown = is_unknown or (slot.unknown and id(slot) not in refilled)
                slot.can_be_made = not slot.unknown
        # A copy in another dtype is the same parameter still; what is computed from one needs its true values.
        can_be_made = not is_unknown or (
            call.only_casts and all(slot.can_be_made for slot in map(self._slot, call.tensors) if slot is not None)
        )
        of_inputs = {t.untyped_storage()._cdata for t in call.tensors if has_storage(t)}
        for index, leaf in enumerate(tree_leaves(results)):
            if not isinstance(leaf, Tensor) or not _is_followed(leaf) or self._slot(leaf) is not None:
                continue
            storage = leaf.untyped_storage()
            if storage._cdata not in of_inputs:
                self._trimmer.freed(storage.nbytes())
                key = next(self._keys)
                node.makes.append((index, key))
                self._slots[storage] = Slot(
                    key, storage.nbytes(), Value(key, node), weakref.ref(storage), None, is_unknown, can_be_made
                )

    # Values of faces

    def _reals(self, faces: Sequence[Tensor], filled: Sequence[Tensor]) -> dict[int, Tensor]:
        """Real tensors for faces, by id."""
        slots = {id(face): self._slots[face.untyped_storage()] for face in faces}
        self._make_room(set(slots.values()))
        blank = {id(slots[id(tensor)]) for tensor in filled if id(tensor) in slots}
        reals = {}
        for face in faces:
            slot = slots[id(face)]
            storage = self._storage(slot, is_filled=id(slot) in blank)
            self._kept.pop(slot, None)
            self._kept[slot] = storage
            reals[id(face)] = Ref.of(face, slot.key).on(storage)
        return reals

    def _storage(self, slot: Slot, *, is_filled: bool = False) -> torch.UntypedStorage:
        """The values of a slot; `is_filled`: they are not read before they are filled."""
        storage = slot.real() if slot.real is not None else None
        if storage is None:
            storage = blank(slot.nbytes) if is_filled else self._made(slot)
            slot.real = weakref.ref(storage)
            self._slots[storage] = slot
        return storage

    @staticmethod
    def _made(slot: Slot) -> torch.UntypedStorage:
        if slot.unknown:
            return host_zeros(slot.nbytes, torch.uint8).untyped_storage()
        return replay(slot.value, slot.nbytes)

    def _make_room(self, used: set[Slot]) -> None:
        """Drop values of faces that were not used for long."""
        others = [slot for slot in self._kept if slot not in used]
        surplus = sum(slot.nbytes for slot in others) - KEPT_BYTES
        for slot in others:
            if surplus > 0:
                del self._kept[slot]
                surplus -= slot.nbytes

    def _with_faces(self, call: Call, faces: Sequence[Tensor], reals: dict[int, Tensor], results: Any) -> Any:
        """Results with the faces that were given, faces for other views of their values, and else what they are."""
        given = {id(reals[id(face)]): face for face in faces}
        slots = {self._slots[face.untyped_storage()] for face in faces}

        def faced(leaf: Tensor) -> Tensor:
            if id(leaf) in given:
                return given[id(leaf)]
            # A change of dtype (model.half()) makes parameters of parameters.
            return self.face(leaf) if self._slot(leaf) in slots or (faces and call.only_casts) else leaf

        return tree_map_only(Tensor, faced, results)


def _is_followed(tensor: Tensor) -> bool:
    return has_storage(tensor) and tensor.device.type == "cpu"
