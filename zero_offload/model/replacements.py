"""Parameters that come in the place of gone ones of the same name, such as the next adapters of ReLoRA's cycle.

A parameter is gone if no module of the model has it any more. A new one of its name and kind gets its place in memory
and in files, with values and states of its own. So the layout stays, and the directory does not grow: a run is resumed
in any cycle by the same calls. The calls: `Replacements.of`, `write`, `finish`.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from zero_offload.model.move_in import move_to
from zero_offload.model.params import ParamPlace
from zero_offload.model.runtime import ModelRuntime
from zero_offload.plan.model_spec import ModelSpec, ParamSpec
from zero_offload.plan.quantized import offloaded_tensors
from zero_offload.runtime.prefetcher import replaced
from zero_offload.runtime.units.unit import Unit
from zero_offload.standins.guard import GuardedParameter
from zero_offload.standins.owners import note_removed, recipe_of, register


@dataclass(frozen=True)
class Replacements:
    """Those of one call of zo.offload."""

    owner: ModelRuntime
    places: Mapping[str, ParamPlace]
    """The places of gone parameters, by name."""
    tensors: Mapping[str, torch.Tensor]
    points: Mapping[str, Sequence[Unit]]
    """Modules of the root that use the new ones, and their units."""

    @classmethod
    def of(
        cls, owner: ModelRuntime, roots: Iterable[nn.Module], spec: ModelSpec, added: Mapping[str, torch.Tensor]
    ) -> Replacements:
        """Those of the parameters `added`, described by `spec`, that have the name of a gone parameter and can have its
        place; `changes.py` has the others."""
        by_name = {name: place for place in owner.places.listed() for name in names_of(place.piece.spec)}
        here = owner.tensors_of_roots() | {id(each) for root in roots for _, each in offloaded_tensors(root)}
        places = dict[str, ParamPlace]()
        for new in (param for unit in spec.units for param in unit.params):
            for place in [by_name[name] for name in names_of(new) if name in by_name][:1]:
                if _fits(place, new, added[new.name], here):
                    places[new.name] = place
        points = dict[str, Sequence[Unit]]()
        for point in spec.hook_points:
            found = (places.get(param.name) for index in point.units for param in spec.units[index].params)
            if units := dict.fromkeys(place.unit for place in found if place is not None):
                points[point.module] = list(units)
        return cls(owner, places, added, points)

    @property
    def params(self) -> list[nn.Parameter]:
        """The new ones."""
        return [param for _, param in self._pairs()]

    def _pairs(self) -> Iterator[tuple[ParamPlace, nn.Parameter]]:
        for name, place in self.places.items():
            param = self.tensors[name]
            assert isinstance(param, nn.Parameter)
            yield place, param

    def write(self) -> None:
        """Write the new values in the place of the old ones, with states of zeros. Raises StorageError and
        CapacityError; the model has then neither of both in a whole step."""
        if not self.places:
            return
        owner, states = self.owner, self.owner.states
        old = [place.param for place in self.places.values()]
        owner.access.drop_grads(old)
        states.readers.before_replacing(old)
        states.values_replaced(self.places)
        owner.take_room(place.section.shard for place in self.places.values())
        for section in {id(place.section): place.section for place in self.places.values()}.values():
            dtype = torch.float32 if section.layout.has_master_apart else section.layout.dtype
            found = [(at, param.detach().to("cpu", dtype)) for at, param in self._pairs() if at.section is section]
            states.write_masters(found)
        states.blank(self.places.values())

    def finish(self) -> None:
        """Let the new parameters be the model's. Nothing here fails."""
        owner, pairs = self.owner, list(self._pairs())
        replaced(owner.prefetcher, [(place.unit, place.param) for place, _ in pairs])
        for place, new in pairs:
            old = place.param
            with torch._C.DisableTorchFunctionSubclass():
                # A program may have kept the old one: it shows no memory of the new one.
                old.data = torch.empty((), dtype=old.dtype, device=old.device).expand(old.shape)
            note_removed(old)
            move_to(new, place.section.own_view(place.piece))
            place.unit.replace(old, new)
            owner.grads.ledger.replace(old, new)
            owner.places.replace(place, new)
            register(new, owner)
        for unit in {id(place.unit): place.unit for place, _ in pairs}.values():
            unit.seal()
            unit.guard()


def names_of(spec: ParamSpec) -> tuple[str, ...]:
    """All names, the first one first."""
    return spec.name, *spec.aliases


def _fits(place: ParamPlace, new: ParamSpec, tensor: torch.Tensor, here: set[int]) -> bool:
    """True if a new parameter can have the place of one of its name: that is gone, and of the same kind."""
    old, section = place.piece.spec, place.section
    is_plain = type(tensor) is nn.Parameter and type(place.param) is GuardedParameter
    if id(place.param) in here or not is_plain or recipe_of(tensor) is not None:
        return False
    if replace(new, dtype=old.dtype) != old or section.shard.base is not None or place.unit.layout.experts is not None:
        return False
    if place.unit.is_viewed([section]):
        gc.collect()
    return not place.unit.is_viewed([section])
