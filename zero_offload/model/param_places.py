"""Where each parameter of one offloaded model is, and what it may be asked wherever that is."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import nn

from zero_offload.base.errors import ConfigError, ZeroOffloadError
from zero_offload.base.types import Tier
from zero_offload.plan.layout import ParamSlice
from zero_offload.runtime.units.unit import Section, Unit


@dataclass(frozen=True)
class Place:
    """Where a parameter is."""

    unit: Unit
    section: Section
    piece: ParamSlice
    param: nn.Parameter = field(compare=False)

    @property
    def name(self) -> str:
        return self.piece.spec.name


class ParamPlaces:
    """Implements `shards.registry.ParamPlaces`."""

    def __init__(self, units: Iterable[Unit]) -> None:
        self._places: dict[int, Place] = {}
        self.grow(units)

    def grow(self, units: Iterable[Unit]) -> None:
        """Know the parameters of further units."""
        self._places |= {
            id(param): Place(unit, section, piece, param)
            for unit in units
            for section, piece, param in unit.placed_params
        }

    def __getitem__(self, param: nn.Parameter) -> Place:
        return self._places[id(param)]

    def __contains__(self, param: nn.Parameter) -> bool:
        return id(param) in self._places

    def all(self) -> list[Place]:
        return list(self._places.values())

    def name_of(self, param: nn.Parameter) -> str:
        return self[param].name

    def describe(self, param: nn.Parameter) -> str:
        """Name and tier, for repr and messages."""
        place, shard = self[param], self[param].section.shard
        return f"{place.name}, offloaded to {(Tier.DEVICE if shard.on_device else shard.placement.params).value}"

    def check_requires_grad(self, param: nn.Parameter, value: object) -> None:
        """What was trained at `zo.offload` may be frozen and thawed; what was frozen then stays so."""
        place = self[param]
        if value and not place.section.layout.trainable:
            raise ConfigError(
                f"{place.name} was frozen when zo.offload was called: it has no optimizer state and cannot be trained "
                "now. Let what is to be trained later require a gradient at zo.offload, and freeze it right after: "
                "requires_grad_(False) then holds until requires_grad_(True)"
            )

    def check_frozen(self, params: Iterable[nn.Parameter]) -> None:
        """The same for parameters that an optimizer steps: they may have been thawed while no guard saw it."""
        for param in params:
            if not self._places[id(param)].section.layout.trainable and param.requires_grad:
                self.check_requires_grad(param, True)


def need_whole(places: Iterable[Place], call: str, instead: str) -> None:
    """Raise where one of these parameters is divided over ranks."""
    if any(place.section.layout.num_shards > 1 or place.piece.spec.division for place in places):
        raise ZeroOffloadError(f"{call} works on one rank; with several use {instead}")
