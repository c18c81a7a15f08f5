"""The models that one `zo.commit` or `zo.resume` is about, and whether they can be kept, and go on, together.

Changes nothing. The calls: `members_of`; `check_keep_alike` before a commit, `check_of_one_commit` before a resume.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import torch
from torch import nn

from zero_offload.base.errors import CheckpointError, ConfigError
from zero_offload.base.problems import warn_user
from zero_offload.base.types import Durability
from zero_offload.checkpoint.format import Generation
from zero_offload.model.api import need_runtime
from zero_offload.model.runtime import ModelRuntime
from zero_offload.runtime.ranks.watch import Notice
from zero_offload.standins.owners import live_owners

Also = Iterable[nn.Module | tuple[nn.Module, torch.optim.Optimizer]]
"""Further models: frozen ones, and trained ones with their optimizers."""


class Member(NamedTuple):
    """One of the models, with its optimizer unless it is frozen."""

    model: nn.Module
    owner: ModelRuntime
    optimizer: torch.optim.Optimizer | None

    def __str__(self) -> str:
        directories = self.owner.config.nvme_dirs
        return (
            f"{self.owner.class_name}{f' in {directories[0]}' if directories else ', which has no directory (nvme=)'}"
        )

    @property
    def found(self) -> Generation | None:
        """The generation that it goes on from."""
        return None if self.owner.keeper is None else self.owner.keeper.found

    @property
    def run_id(self) -> str:
        return "" if self.owner.keeper is None else self.owner.keeper.run_id

    @property
    def published_as(self) -> str:
        """The checkpoint that `found` was published as; empty where drives had it."""
        return "" if self.owner.keeper is None else self.owner.keeper.published_as

    @property
    def token(self) -> str:
        """Of the commit that `found` is of; empty where it was committed alone."""
        joint = None if self.found is None else self.found.joint
        return "" if joint is None else joint.token

    @property
    def state(self) -> str:
        """For messages."""
        return f"{self} goes on from {self.found or 'its begin: it has no generation'}"


def members_of(call: str, model: nn.Module, optimizer: torch.optim.Optimizer | None, also: Also) -> list[Member]:
    """The models of a call, the first one first."""
    if isinstance(also, nn.Module) or not isinstance(also, Iterable):
        raise ConfigError(f"{call}(also=...) takes a list of models, as in also=[teacher]; got {type(also).__name__}")
    pairs = [each if isinstance(each, tuple) and len(each) == 2 else (each, None) for each in also]
    members = [Member(each, need_runtime(each, call), its) for each, its in ((model, optimizer), *pairs)]
    if len({id(each.owner) for each in members}) < len(members):
        raise ConfigError(f"{call}(also=...) was given an offloaded model twice; give each one once")
    return members


@contextmanager
def together(call: str, members: Sequence[Member], notice: Notice | None = None) -> Iterator[None]:
    """`ModelRuntime.together` of each; `notice` travels with that of the first."""
    with ExitStack() as met:
        for each in members:
            met.enter_context(each.owner.together(call, notice=notice if each is members[0] else None))
        yield


def check_keep_alike(call: str, members: Sequence[Member]) -> None:
    """Raise where models could not be kept together."""
    lead, *others = members
    for each in others:
        if (each.owner.keeper is None) != (lead.owner.keeper is None):
            kept, lost = (each, lead) if lead.owner.keeper is None else (lead, each)
            raise ConfigError(
                f"{call}(also=...): {kept} makes generations and {lost} makes none, so a resume could not give back "
                "both. Give each model a directory of its own, by OffloadConfig(nvme=...), and no durability='scratch'"
            )
        if each.owner.keeper is not None and (each.owner.config.publish is None) != (lead.owner.config.publish is None):
            copied, lost = (each, lead) if lead.owner.config.publish is None else (lead, each)
            raise ConfigError(
                f"{call}(also=...): {copied} has publish= and {lost} has none, so a start without drives could not go "
                "on with both. Give each model publish= with a place of its own, or none of them"
            )
        if lead.owner.config.effective_durability is Durability.COMMIT and (
            each.owner.config.effective_durability is not Durability.COMMIT
        ):
            raise ConfigError(
                f"{call}(also=...): {lead} has durability='commit', and {each} has less, which power loss may tear. "
                "Give both durability='commit'"
            )
        ours, theirs = (f"{one.owner.ranks.rank} of {one.owner.ranks.world_size}" for one in (lead, each))
        if ours != theirs:
            raise ConfigError(
                f"{call}(also=...): this process is rank {ours} of {lead}, and rank {theirs} of {each}. Offload both "
                "over the same ranks, in the same order"
            )


def check_of_one_commit(members: Sequence[Member]) -> None:
    """Raise unless all go on from one commit, with all models that it has."""
    lead, *others = members
    for each in members:
        _check_complete(each, members)
    for each in others:
        joint = None if lead.found is None else lead.found.joint
        belonged = joint is not None and any(one.run_id == each.run_id for one in joint.also)
        if each.found is None and not belonged:  # it comes later
            if lead.found is not None:
                warn_user(
                    f"zo.resume(also=...): {lead.state}, and {each} begins anew, with the program's own values: no "
                    "commit has had both"
                )
        elif each.token != lead.token or not each.token or each.found is None:
            raise CheckpointError(
                f"zo.resume(also=...): {lead.state}, and {each.state}: these were not committed together. "
                f"{_remedy(lead, each)}"
            )


def check_beside(member: Member) -> None:
    """Raise where another model of the program goes on from another iteration, which was committed by itself.

    They have to have kept pace until then, or one of them to have lost steps that the other's generation has noted; see
    decision 067.
    """
    owner, found = member.owner, member.found
    for other in live_owners() if found is not None else ():
        if other is owner or not isinstance(other, ModelRuntime) or other.keeper is None or other.life.is_closed:
            continue
        theirs = other.keeper.found
        if theirs is None or {owner.config.generation, other.config.generation} != {None}:
            continue
        assert found is not None
        token = found.joint.token if found.joint is not None else ""
        if token and theirs.joint is not None and theirs.joint.token == token:
            continue
        here, there = (found, found.beside.get(other.keeper.run_id)), (theirs, theirs.beside.get(member.run_id))
        if _differs(here, there):
            where = f"{other.class_name} in {other.config.nvme_dirs[0]}"
            raise CheckpointError(
                f"zo.resume: {member.state}, and {where} goes on from {theirs}: a part of an iteration would be made "
                "twice or left out. zo.commit(model, optimizer, also=[...]) keeps them together from then on. To go on "
                "from these states say so, for one of the models: OffloadConfig(existing='resume', "
                f"generation={found.number}) for {member.owner.class_name}"
            )


def _differs(here: tuple[Generation, int | None], there: tuple[Generation, int | None]) -> bool:
    """True if two models do not go on from one iteration. Each has its generation, and the other's step beside it."""
    (mine, of_other), (theirs, of_mine) = here, there
    if of_other is None or of_mine is None:
        return theirs.step < (of_other or 0) or mine.step < (of_mine or 0)
    keep_pace = abs(mine.step - of_other) <= 1 and abs(theirs.step - of_mine) <= 1
    return theirs.step < of_other or mine.step < of_mine or (keep_pace and mine.step != theirs.step)


def _check_complete(member: Member, members: Sequence[Member]) -> None:
    """Raise where a generation belongs to models that are not among these; not where the program names it alone."""
    found = member.found
    joint = None if found is None else found.joint
    if joint is None or (len(members) == 1 and member.owner.config.generation is not None):
        return
    given = {each.run_id for each in members}
    needed = joint.also if joint.lead is None else [joint.lead]
    if absent := [each for each in needed if each.run_id not in given]:
        named = " and ".join(f"generation {each.number} of {each.model}" for each in absent)
        raise CheckpointError(
            f"zo.resume: {member.state}, which was committed together with {named}. Offload and resume them together, "
            "as they were given to zo.commit: zo.resume(model, optimizer, also=[...]). To go on with "
            f"{member.owner.class_name} alone, say so by OffloadConfig(existing='resume', "
            f"generation={'' if found is None else found.number})"
        )


def _remedy(lead: Member, other: Member) -> str:
    pairs = ((lead, other), (other, lead))
    for one, there in pairs:
        if one.published_as and there.found is not None and not there.published_as:
            return (
                f"{one.owner.class_name} goes on from {one.published_as}, since no drive has a whole generation of it. "
                f"To go on with both from there, give {there.owner.class_name} an empty directory in nvme="
            )
    for one, there in pairs:
        joint = None if one.found is None else one.found.joint
        partners = [] if joint is None else [*joint.also, *([joint.lead] if joint.lead is not None else [])]
        numbers = [each.number for each in partners if each.run_id == there.run_id]
        if numbers and (there.found is None or there.found.number != numbers[0]):
            return (
                f"Generation {numbers[0]} of {there} belongs to it, if it is still there: OffloadConfig("
                f"existing='resume', generation={numbers[0]})"
            )
    return (
        "Where these are the states to go on from, call zo.resume for each model by itself, and zo.commit with also= "
        "from then on. To begin anew, offload both with existing='discard'"
    )
