"""`gathered()`: look at, or change, the full parameters of a module outside of its forward.

Owns the meaning of its modes; `ParamPrefetcher` fetches units, `ModelStates` writes changes. With several ranks every
rank enters: parameters are gathered from all of them, and all leave the same values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import cast

import torch
from torch import nn

from zero_offload.base.errors import ConfigError, ZeroOffloadError
from zero_offload.base.inputs import params_of
from zero_offload.checkpoint.values import read_master
from zero_offload.model.params import ParamPlace
from zero_offload.model.runtime import ModelRuntime
from zero_offload.plan.quantized import offloaded_tensors, tensors_of
from zero_offload.runtime.grads.gradients import check_not_updated
from zero_offload.standins.guard import unguard
from zero_offload.standins.owners import owner_of
from zero_offload.storage.memory.arena import Need

KINDS = ("params", "master", "grads")
MODES = ("read", "write")

Values = dict[str, torch.Tensor]


@contextmanager
def gathered(module: nn.Module | Iterable[nn.Parameter], mode: str = "read", kind: str = "params") -> Iterator[Values]:
    """Inside, full values of the parameters of `module` are readable; yields them by name, host or device.

    `kind="params"`: the parameters themselves (compute dtype) are read like any tensor, and the dict holds them. A
    write to one of them, or to a view of one, raises before anything changes. `kind="master"`: the dict holds fp32
    masters (frozen: values), copies. `kind="grads"`: the dict holds copies of gradients that no step has consumed,
    fp32. `mode="write"` (not for "grads"): what the dict's tensors hold at the end is written back. They may be changed
    in place, by `param.data = values`, or replaced in the dict. 16-bit values that stay as they were keep their fp32
    master. Moments stay. After an exception "params" are written
    back too, as in plain torch; "master" is not. Several ranks: every rank enters, and with "write" all leave the same
    values, or all raise. Writes to an address (`data_ptr()`, DLPack) are not seen.

    Raises ConfigError for an unknown kind or mode, and when no parameter is offloaded.
    """
    if kind not in KINDS or mode not in MODES or (kind == "grads" and mode == "write"):
        raise ConfigError(
            f"zo.gathered has no kind={kind!r} with mode={mode!r}; kinds are {', '.join(KINDS)}, "
            'modes are "read" and "write" ("grads" only "read")'
        )
    params = tensors_of(params_of("zo.gathered", module))
    if isinstance(module, nn.Module):
        params = [cast(nn.Parameter, tensor) for _, tensor in offloaded_tensors(module)]
    owner = next((o for o in map(owner_of, params) if isinstance(o, ModelRuntime)), None)
    if owner is None:
        raise ConfigError("zo.gathered takes an offloaded module; call zo.offload(model, config) first")
    # With stage 3 they come from all ranks; else mostly from this one.
    is_shared = owner.collectives.partition.param_shards > 1 or mode == "write" or kind == "master"
    call = "zo.gathered" + f'(kind="{kind}", mode="{mode}")' * ((kind, mode) != ("params", "read"))
    with owner.together(call) if is_shared else nullcontext():
        owner.life.check_usable()
        owner.tracker.recover()
        owned = [param for param in params if owner_of(param) is owner]
        places = [owner.places[param] for param in owned]
        if kind != "params" or mode == "write":
            _check_whole(places, call)
        if mode == "write":
            owner.store.read_lazy()
            owner.states.reserve(place.section.shard for place in places)
    read: dict[str, Callable[[ModelRuntime, Sequence[ParamPlace]], Values]] = {
        "master": _masters,
        "grads": _grads,
    }
    # Masters and gradients are copies; parameters are read where they are, or written back at the end.
    _check_room(owner, places, mode, kind)
    if kind in read:
        values = read[kind](owner, places)
        yield values
        if mode == "write":
            _write_back(owner, places, values)
        return
    read_params = _params if mode == "read" else _changed_params
    with read_params(owner, places) as values:
        yield values


def _check_room(owner: ModelRuntime, places: Sequence[ParamPlace], mode: str, kind: str) -> None:
    """Raise where the host has no memory for the copies that are made."""
    if kind == "params" and mode == "read":
        return
    copied = [place for place in places if kind != "grads" or owner.grads.ledger.held(place.param)]
    if kind == "params" and owner.device.is_host:
        copied = [place for place in places if _changes_in_place(place)]  # the rest is read where it is
    nbytes = sum(
        place.piece.spec.numel * (place.section.layout.dtype.itemsize if kind == "params" else 4) for place in copied
    )
    what = f'zo.gathered(kind="{kind}", mode="{mode}") of {len(copied)} parameters'
    owner.store.arena.look(
        nbytes, Need(what, "Look at the model module by module: zo.gathered(module)", is_planned=False)
    )


@contextmanager
def _params(owner: ModelRuntime, places: Sequence[ParamPlace]) -> Iterator[Values]:
    with _present(owner, places):
        # At rest for all that they are here: so they ask the owner, which lets them be read and no more.
        yield {place.name: place.param for place in places}


@contextmanager
def _changed_params(owner: ModelRuntime, places: Sequence[ParamPlace]) -> Iterator[Values]:
    given: Values = {place.name: place.param for place in places}
    values: Values = {}
    before: Values = {}
    wrong: list[str] = []
    is_broken = False
    try:
        with _present(owner, places), _writable(places):
            before = {place.name: place.param.detach().clone() for place in places if _changes_in_place(place)}
            try:
                yield given
            except BaseException:
                is_broken = True
                raise
            finally:
                values, wrong = _taken(places, given)
    finally:
        # After an exception too: what is changed where it rests has lost what it was.
        if values:
            try:
                _write_back(owner, places, values, before, is_broken=is_broken)
            except BaseException:
                if any(place.unit.updates_in_place for place in places):
                    owner.note_written(whole=False)
                    owner.life.half_written = "zo.gathered(mode='write')"  # each rank has what it wrote
                raise
    if wrong:
        raise ConfigError(
            f"zo.gathered(mode='write') got {', '.join(wrong)}: it keeps its value, the others are written. Assign a "
            "tensor of that shape, or change the one that is there in place"
        )


def _taken(places: Sequence[ParamPlace], given: Values) -> tuple[Values, list[str]]:
    """Copies of what a program has left in these parameters, and what is wrong with some.

    Values count as they are, whatever memory they are in: `param.data = values` and `param.set_(values)` replace it.
    They are taken with their dtype, so that an fp32 master has all their bits.
    """
    values, wrong = {}, []
    for place in places:
        value = given.get(place.name, place.param).detach()
        if value.shape == place.piece.spec.shape and not value.is_meta:
            values[place.name] = value.clone()
        else:
            wrong.append(f"{tuple(value.shape)} for {place.name}, which is {tuple(place.piece.spec.shape)}")
    for unit in {place.unit.index: place.unit for place in places}.values():
        unit.restore_views()
    for place in places:
        if place.name not in values:
            values[place.name] = place.param.detach().clone()
    return values, wrong


@contextmanager
def _writable(places: Sequence[ParamPlace]) -> Iterator[None]:
    """These parameters are plain, and no others of their units: what is written to those would be lost."""
    units = {place.unit.index: place.unit for place in places}.values()
    named = [(unit, [place.param for place in places if place.unit is unit]) for unit in units]
    for unit, params in named:
        unguard(params)
        unit.writable.append(params)
    try:
        yield
    finally:
        for unit, params in named:
            unit.writable = [each for each in unit.writable if each is not params]
            unit.guard()


@contextmanager
def _present(owner: ModelRuntime, places: Sequence[ParamPlace]) -> Iterator[None]:
    """The units of these parameters are on the device, and stay."""
    held = []
    try:
        for unit in {place.unit.index: place.unit for place in places}.values():
            unit.gathered_uses += 1
            held.append(unit)
            owner.prefetcher.fetch_for_access(unit)
        owner.prefetcher.meet("zo.gathered")
        yield
    finally:
        for unit in held:
            unit.gathered_uses -= 1
            assert unit.gathered_uses >= 0, unit.name
            unit.guard()


def _masters(owner: ModelRuntime, places: Sequence[ParamPlace]) -> Values:
    values = {}
    for section in {id(place.section): place.section for place in places}.values():
        with owner.together(f"masters of {owner.units[section.layout.unit].name}"):
            owner.units[section.layout.unit].wait_for_update()
            mine = read_master(owner.store, section.shard)
        for place in places:
            if place.section is section:
                begin, end = place.span(owner.collectives.shard_index)
                what = f"the master of {place.name}"
                whole = owner.collectives.gather_param(section.layout, place.piece, mine[begin:end], what)
                values[place.name] = place.piece.spec.view(whole.to("cpu"))
    return {place.name: values[place.name] for place in places}


def _grads(owner: ModelRuntime, places: Sequence[ParamPlace]) -> Values:
    for place in places:
        check_not_updated(owner.grads, place.param, place.name)
        # Of the same section other parameters may have had a step, whose update reads it still.
        place.unit.wait_for_update()
    found = owner.grad_access.copies([place.param for place in places])
    return {place.name: found[place.param] for place in places if place.param in found}


def _check_whole(places: Sequence[ParamPlace], call: str) -> None:
    """Raise where a rank has a part of a parameter that no other rank completes."""
    if name := next((place.name for place in places if place.piece.spec.division), ""):
        raise ZeroOffloadError(
            f"{call}: {name} is a DTensor, which tensor-parallel ranks divide. Without a block its values are read and "
            "changed between steps, as of any DTensor; masters are in what zo.save_checkpoint writes"
        )


def _changes_in_place(place: ParamPlace) -> bool:
    """True if the program changes a 16-bit value where it rests: what it was says which elements keep their master."""
    return place.section.buffer is None and place.section.layout.has_master_apart


def _write_back(
    owner: ModelRuntime,
    places: Sequence[ParamPlace],
    values: Values,
    before: Values | None = None,
    *,
    is_broken: bool = False,
) -> None:
    """Every unit's copy on the device is made again from what was written."""
    for place in places:
        if values[place.name].shape != place.piece.spec.shape:
            raise ConfigError(
                f"zo.gathered(mode='write') got {tuple(values[place.name].shape)} for {place.name}, which is "
                f"{tuple(place.piece.spec.shape)}; nothing is written. Put a tensor of that shape there, or change the "
                "one that is there in place"
            )
    written = [(place, values[place.name]) for place in places]
    owner.states.replace("the end of zo.gathered(mode='write')", written, before, is_broken=is_broken)
