"""The bytes of states that a program's optimizers will keep, for `zo.plan`: section by section, before there are any.

States of our own classes are arrays of known sizes. Those of others are rows, whose lengths a step without memory tells
(`optim/unitwise/state_sizes.py`). Where that fails, two fp32 states are counted, and a note says so. Never moves a
byte. The call: `planned_states`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from zero_offload.base.errors import ConfigError
from zero_offload.optim.optimizer import FusedOptimizer
from zero_offload.optim.unitwise.products import multiplies_matrices
from zero_offload.optim.unitwise.state_sizes import state_sizes
from zero_offload.optim.whole_params import gathered_bytes
from zero_offload.plan.layout import ShardLayout
from zero_offload.plan.memory import WalkBytes, copied_bytes
from zero_offload.storage.shards.rows import room
from zero_offload.storage.shards.shard import ADAM_STATES, Component, master_components, shard_bytes

Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]


@dataclass(frozen=True)
class PlannedStates:
    """States of a layout's sections. Of those that ranks divide, as if all kept as much as the rank with the most."""

    nbytes: Mapping[int, int]
    """Of each trained section, without its masters; by its index."""
    walks: Mapping[int, WalkBytes]
    """Of sections that an optimizer of others steps."""
    notes: tuple[str, ...]


def planned_states(
    layout: ShardLayout, params: Mapping[str, nn.Parameter], given: Optimizers, *, has_gpu: bool
) -> PlannedStates:
    """Count the states of these optimizers; `params` are the model's, by name. `has_gpu`: one computes the model, and
    makes the steps of classes that multiply matrices. Raises ConfigError for a parameter that is not the model's, or
    that two of them have."""
    optimizers = [given] if isinstance(given, torch.optim.Optimizer) else list(given)
    _check(optimizers, params.values())
    names = {id(param): name for name, param in params.items()}
    arrays: dict[str, tuple[str, ...]] = {}
    rows: dict[str, tuple[int, str]] = {}
    unknown, by_products = set[str](), set[str]()
    notes: list[str] = []
    for optimizer in optimizers:
        own = [param for group in optimizer.param_groups for param in group["params"]]
        if isinstance(optimizer, FusedOptimizer):
            for param in own:
                hyper = optimizer.hyper_of(param)
                arrays[names[id(param)]] = () if hyper is None else hyper.states
            continue
        if has_gpu and multiplies_matrices(optimizer):
            by_products.update(names[id(param)] for param in own)
        kind = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
        sizes = state_sizes(optimizer)
        if sizes.unknown:
            unknown.update(names[id(param)] for param in own)
            notes.append(
                f"bytes of states of {kind} are unknown: {sizes.unknown}. Two fp32 states of each parameter are counted"
            )
        for param, nbytes in sizes.nbytes.items():
            rows[names[id(param)]] = nbytes, kind
    found, walks, shard = dict[int, int](), dict[int, WalkBytes](), _busiest(layout, rows)
    for section in layout.sections:
        if section.trainable:
            named = {piece.spec.name: piece.begin for piece in section.params}
            components = {Component(each) for name in named for each in arrays.get(name, ())}
            if not unknown.isdisjoint(named):
                components.update(ADAM_STATES)
            mine = {name: begin for name, begin in named.items() if section.steppers[begin] == shard}
            if of_section := {begin: rows[name] for name, begin in mine.items() if rows.get(name, (0,))[0]}:
                components.add(Component.rows(room(of_section), len(section.chunks())))
            nbytes = shard_bytes(section, components)
            found[section.index] = nbytes * section.num_shards
            if any(name in rows or name in unknown for name in named):
                is_alone = arrays.keys().isdisjoint(named)
                walked = [piece for piece in section.params if piece.spec.name in rows]
                gathered = gathered_bytes(section, walked, shard)
                rows_bytes = shard_bytes(section, [each for each in components if each.is_rows])
                walks[section.index] = WalkBytes(
                    rest_bytes=shard_bytes(section, master_components(section)) + nbytes,
                    grad_bytes=section.shard_numel * 4,
                    grads_are_wide=section.dtype == torch.float32,
                    copied_bytes=section.shard_numel * 4 * (section.dtype == torch.bfloat16) + gathered,
                    is_alone=is_alone,
                    has_products=not by_products.isdisjoint(named),
                    gpu_bytes=copied_bytes(section, 4, rows_bytes, on_device=False) + gathered,
                    brought_bytes=section.shard_numel * 4 + rows_bytes,
                )
    return PlannedStates(found, walks, tuple(notes))


def _busiest(layout: ShardLayout, rows: Mapping[str, tuple[int, str]]) -> int:
    """The shard whose rank keeps the most bytes of rows: of whole parameters each has some."""
    kept = [0] * layout.num_shards
    for section in layout.sections:
        for piece in section.params if section.trainable else ():
            kept[section.steppers[piece.begin]] += rows.get(piece.spec.name, (0,))[0]
    return kept.index(max(kept))


def _check(optimizers: Sequence[torch.optim.Optimizer], params: Iterable[nn.Parameter]) -> None:
    ids, seen = set(map(id, params)), defaultdict[int, list[str]](list)
    for optimizer in optimizers:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ConfigError(f"zo.plan(optimizer=) is a {type(optimizer).__name__}; give an optimizer, or several")
        name = type(optimizer).__name__
        for group in optimizer.param_groups:
            for param in group["params"]:
                if id(param) not in ids:
                    raise ConfigError(
                        f"zo.plan(optimizer=): {name} has a parameter of shape {tuple(param.shape)} that is not of "
                        "this model; build it with parameters of the model that is planned"
                    )
                seen[id(param)].append(name)
    for names in seen.values():
        if len(names) > 1:
            raise ConfigError(f"zo.plan(optimizer=): {' and '.join(names)} have the same parameter; give it to one")
