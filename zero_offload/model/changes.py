"""Changes of an offloaded model: parameters that no module has any more, and others under new names.

A parameter is the same as long as its object is: a block that moves takes its values and states along. The calls of one
`zo.offload`: `Changes.of`, `layout`, `check` before anything changes, then `apply`, which is told to generations. A
resume lays such a generation out by names (decision 070).
"""

from __future__ import annotations

import gc
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from zero_offload.base.errors import ConfigError
from zero_offload.checkpoint.format import Change
from zero_offload.model.params import ParamPlace, is_within
from zero_offload.model.replacements import Replacements, names_of
from zero_offload.model.runtime import ModelRuntime
from zero_offload.plan.layout import ShardLayout
from zero_offload.plan.quantized import offloaded_tensors
from zero_offload.runtime.units.unit import Section
from zero_offload.standins.owners import note_removed


@dataclass(frozen=True)
class Changes:
    """Those of one call of zo.offload; none where parameters have only been added, or have the places of others."""

    owner: ModelRuntime
    gone: Sequence[ParamPlace]
    """The places of parameters that no module has any more."""
    names: Mapping[str, tuple[str, ...]]
    """All names of the others, by the first name so far."""
    added: Sequence[str]
    """Names of new parameters, in places of their own or in those of others."""
    root: nn.Module
    """The module that names are of."""

    @classmethod
    def of(
        cls,
        owner: ModelRuntime,
        root: nn.Module,
        given: nn.Module,
        added: Mapping[str, torch.Tensor],
        replacements: Replacements,
    ) -> Changes:
        """Compare the model with its places. `root` has the new parameters `added`; `given` is what the program calls
        zo.offload with. Where something has changed, names are those of the first such module that holds all. Raises
        ConfigError where two parameters have one name."""
        taken = {id(place.param) for place in replacements.places.values()}
        roots = {id(each): each for each in (given, root, *owner.live_roots())}.values()
        found = [(each, _names_in(each)) for each in roots]
        listed = [names for _, names in found]
        places = [place for place in owner.places.listed() if id(place.param) not in taken]
        gone = [each for each in places if each.may_go and not any(id(each.param) in names for names in listed)]
        lost = {id(place.param) for place in gone}
        places = [place for place in places if id(place.param) not in lost]
        there = [place for place in places if any(id(place.param) in names for names in listed)]
        if not gone and not _is_moved(owner, there, listed, added, replacements):
            return cls(owner, (), {}, (), root)
        wanted = {id(place.param) for place in there} | {id(each) for each in added.values()}
        found.sort(key=lambda each: not wanted <= each[1].keys())  # stable
        now = dict[int, tuple[str, ...]]()
        for _, names in found:
            now |= {key: every for key, every in names.items() if key in wanted and key not in now}
        holders = dict[str, str]()
        stay = {place.name: (place.name,) for place in places if id(place.param) not in now}
        moved = {place.name: now[id(place.param)] for place in there}
        new = [(name, now[id(each)]) for name, each in added.items()]
        for before, (first, *_) in [*stay.items(), *moved.items(), *new]:
            other = holders.setdefault(first, before)
            if other is not before:
                raise ConfigError(
                    f"zo.offload: {before} and {other} of an offloaded model are both called {first} now, in different "
                    "modules or since one is quantized and gone. Give zo.offload a module that holds all of the model"
                )
        return cls(owner, gone, moved, [now[id(each)][0] for each in added.values()], found[0][0])

    @property
    def any(self) -> bool:
        return bool(self.gone or self.names)

    @property
    def gone_names(self) -> list[str]:
        return [place.name for place in self.gone]

    def layout(self, before: ShardLayout) -> ShardLayout:
        return before.changed(set(self.gone_names), self.names) if self.any else before

    def record(self, step: int) -> Change:
        """For generations."""
        gone, added = dict.fromkeys(self.gone_names), dict.fromkeys(self.added)
        renamed = {before: now for before, (now, *_) in self.names.items() if now != before}
        return Change(
            step,
            renamed,
            [name for name in gone if name not in added],
            [name for name in added if name in gone],
            [name for name in added if name not in gone],
        )

    def text(self) -> str:
        """For ranks to compare."""
        return str(self.record(0)) if self.any else "none"

    def empty_sections(self, layout: ShardLayout) -> list[Section]:
        """Sections that have no parameter in the layout, and have some now."""
        sections = {id(place.section): place.section for place in self.gone}.values()
        return [section for section in sections if not layout.sections[section.layout.index].params]

    def check(self, layout: ShardLayout) -> None:
        """Raise where what is gone cannot go now. Updates and commits are over."""
        if not self.any:
            return
        keeper = self.owner.keeper
        if self.owner.resume_pending and keeper is not None and keeper.found is not None:
            what = "removed" if self.gone else "moved"
            raise ConfigError(
                f"zo.offload: modules were {what} ({_some(self.gone_names or self.record(0).renamed)}) before "
                f"zo.resume has given back {keeper.found}. Build the model as it was then, call zo.offload and "
                "zo.resume, and change it after that"
            )
        if keeper is not None and keeper.awaited:
            raise ConfigError(
                f"zo.offload: modules were removed or moved while {keeper.found} has {len(keeper.awaited)} further "
                f"parameters ({_some(keeper.awaited)}); adopt these first"
            )
        for section in self.empty_sections(layout):
            if section.num_tensors > section.num_own_tensors:
                gc.collect()
            if section.num_tensors > section.num_own_tensors:
                raise ConfigError(
                    f"zo.offload: {section.layout.params[0].spec.name} is in the model no more, and its memory is to "
                    "go. A view of it is held, or of one beside it: by a variable, or by a graph whose backward "
                    "has not run. Let it go (del loss), and call zo.offload again"
                )

    def prepare(self) -> None:
        """The last part that may fail: what reads of old values is still to come, comes. Raises StorageError."""
        if not self.any:
            return
        owner = self.owner
        owner.finish_steps()
        params = [place.param for place in self.gone]
        owner.states.readers.before_replacing(params)
        owner.access.drop_grads(params)
        owner.states.change()

    def apply(self, layout: ShardLayout) -> None:
        """Let the model be this from now on. Nothing here fails."""
        if not self.any:
            return
        owner, empty = self.owner, self.empty_sections(layout)
        units = {id(place.unit): place.unit for place in self.gone}.values()
        for unit in units:
            owner.prefetcher.invalidate(unit)
        with torch._C.DisableTorchFunctionSubclass():
            torch.autograd.graph.increment_version([place.param for place in self.gone])
            for place in self.gone:
                if place.section not in empty:
                    owner.leave_empty(place)
        owner.change(layout, set(self.gone_names), self.names, empty, self.record(owner.step_count))
        for place in self.gone:
            with torch._C.DisableTorchFunctionSubclass():
                # A program may have kept it: it shows no memory.
                place.param.data = torch.empty((), dtype=place.param.dtype, device=place.param.device).expand(
                    place.param.shape
                )
            note_removed(place.param)
        for unit in units:
            unit.guard()


def _names_in(root: nn.Module) -> dict[int, tuple[str, ...]]:
    found = dict[int, list[str]]()
    for name, tensor in offloaded_tensors(root, remove_duplicate=False):
        found.setdefault(id(tensor), []).append(name)
    return {key: tuple(names) for key, names in found.items()}


def _is_moved(
    owner: ModelRuntime,
    there: Iterable[ParamPlace],
    listed: Sequence[Mapping[int, tuple[str, ...]]],
    added: Mapping[str, torch.Tensor],
    replacements: Replacements,
) -> bool:
    """True if parameters have other names than they had, or names other parameters. Layers that adapters are put around
    keep the names of their call, as long as a resume can make the same calls."""
    holders = dict[str, set[int]]()
    for names in listed:
        for key, found in names.items():
            for name in found:
                holders.setdefault(name, set()).add(key)
    moved = [place for place in there if id(place.param) not in holders.get(place.name, ())]
    new = {name for name in added if name not in replacements.places}
    if any(holders.get(place.name) for place in moved) or not new.isdisjoint(
        name for place in there for name in names_of(place.piece.spec)
    ):
        return True
    if owner.changes or not added:
        return bool(moved)
    names_by_id = {key: found for names in reversed(listed) for key, found in names.items()}
    return not all(is_within(place.name, names_by_id[id(place.param)]) for place in moved)


def _some(names: Collection[str]) -> str:
    return ", ".join([*list(names)[:3], *([f"and {len(names) - 3} more"] if len(names) > 3 else [])])
