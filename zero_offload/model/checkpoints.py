"""Generations and checkpoints: the public functions that keep a run and go on from it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zero_offload.base.errors import ConfigError
from zero_offload.base.inputs import check_optimizer
from zero_offload.base.problems import warn_user
from zero_offload.checkpoint.extras import (
    buffers_in,
    capture_buffers,
    capture_rng,
    check_buffers,
    forms_of,
    from_json,
    restore_buffers,
    restore_rng,
    to_json,
)
from zero_offload.checkpoint.format import Generation, reading
from zero_offload.model.about import about
from zero_offload.model.api import need_runtime
from zero_offload.model.iterations import check_count
from zero_offload.model.members import (
    Also,
    Member,
    check_beside,
    check_keep_alike,
    check_of_one_commit,
    members_of,
    together,
)
from zero_offload.model.runtime import NOT_ALONE, ModelRuntime
from zero_offload.optim.grad_scaler import GradScaler
from zero_offload.optim.optimizer import FusedOptimizer
from zero_offload.optim.param_groups import check_groups, group_records, restore_groups
from zero_offload.runtime.grads.gradients import check_closed
from zero_offload.runtime.ranks.watch import Notice
from zero_offload.standins.owners import is_removed, owner_of


@dataclass(frozen=True)
class Resumed:
    """Where a run goes on."""

    step: int
    """Iterations that are in the states; see `commit`."""
    extra: Any
    """The argument of `commit`; None when the step was committed without it."""
    committed_at: str
    number: int = 0
    """The generation's number, as `OffloadConfig(generation=)` and `zero-offload verify` count them."""


def commit(
    model: nn.Module, optimizer: torch.optim.Optimizer | None = None, extra: Any = None, also: Also = ()
) -> None:
    """End an iteration: let the state after its last `step` become the next generation, when one is due. Returns at
    once.

    However many steps of however many optimizers an iteration has, it counts as one: in `Resumed.step`, in
    `commit_every` and in generations. A program that calls neither this nor `RunLog.step` has an iteration per step of
    its one optimizer. With several it makes no generation, and a warning says so.

    A step that a generation has already becomes a generation again, unless a backward has run since: `extra` may be
    another, or states replaced. Hyperparameters, random number generators, persistent buffers (of several ranks
    rank 0's) and the loss scale are taken now, which is after `scaler.update()`. Warns if the optimizer trains
    parameters that are not offloaded. `extra` is made of numbers, texts, lists and dicts: scheduler state, data
    position, ... Of several ranks it is rank 0's, which all get back. Without a directory for generations this does
    nothing, and warns once unless durability="scratch" says so. A frozen model has no optimizer: leave it out. Each
    call is an iteration then, and keeps what the program has written.

    `also`: further models of the same iteration, each offloaded into a directory of its own. These are frozen ones,
    such as a teacher or an average of weights, and pairs of a trained model and its optimizer. Each gets a generation
    of this step, and all of them count once the last is complete: `resume` with the same `also` goes on with all of
    them or with none. `commit_every` of `model` says when.

    Raises ConfigError when `extra` is of something else, or `optimizer` not this model's. So it does where one of
    `also` makes no generations, or promises less than `model` does (durability).
    """
    keep("zo.commit", model, optimizer, extra, also)


def keep(
    call: str,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    extra: Any,
    also: Also = (),
    own: Any = None,
    notice: Notice | None = None,
) -> None:
    """As `commit`. `own`, JSON, is this rank's, which a resume on as many ranks finds by `own_of`. `notice` travels
    with the agreement of all ranks that they commit."""
    members = members_of(call, model, optimizer, also)
    with together(call, members, notice):
        check_keep_alike(call, members)
        optimizers = [_optimizer_of(call, each.optimizer, each.owner) for each in members]
        for each in members:
            each.owner.check_between_steps(call)
        # A scheduler has changed the learning rate since `step`.
        groups, kept = [_records(each) for each in optimizers], _json(extra)
        for each, its_groups in zip(members, groups, strict=True):
            each.owner.groups = its_groups
    lead, *others = members
    parts = [(each.owner, partial(_capture, each.model, each.owner)) for each in others]
    lead.owner.commit(partial(_capture, lead.model, lead.owner, own), kept, is_frozen=optimizer is None, also=parts)


_OWN = "own"


def own_of(owner: ModelRuntime) -> Any:
    """This rank's part of the generation that the run goes on from; None where another number of ranks made it."""
    rng = None if owner.keeper is None else owner.keeper.rng
    return None if rng is None else rng.get(_OWN)


def _capture(model: nn.Module, owner: ModelRuntime, own: Any = None) -> dict[str, Any]:
    rng = capture_rng() | ({} if own is None else {_OWN: own})
    if owner.ranks.rank != 0:
        return {"rng": rng, "buffers": {}}
    owner.about = about(model)  # a config may have changed since zo.offload
    forms = forms_of(model, owner.built_buffers)
    return {"rng": rng, "buffers": capture_buffers(model), "buffer_forms": forms, "about": owner.about}


def check_keeps(call: str, optimizer: torch.optim.Optimizer, owner: ModelRuntime) -> None:
    """As `commit` checks its optimizer."""
    _check_keeps(optimizer, owner, call)


def _optimizer_of(
    call: str, optimizer: torch.optim.Optimizer | None, owner: ModelRuntime
) -> torch.optim.Optimizer | None:
    """The optimizer whose hyperparameters are kept; None for a frozen model."""
    if optimizer is None:
        _check_frozen(call, owner)
        return None
    optimizer = check_optimizer(call, optimizer)
    _check_keeps(optimizer, owner, call)
    return optimizer


def _check_frozen(call: str, owner: ModelRuntime) -> None:
    if not owner.is_frozen:
        raise ConfigError(
            f"{call} without an optimizer is for frozen models, and parameters of this {owner.class_name} are trained. "
            "Give the optimizer after the model; in also= both as a pair, (model, optimizer)"
        )


def _records(optimizer: torch.optim.Optimizer | None) -> list[dict[str, Any]]:
    return [] if optimizer is None else group_records(optimizer)


def _check_keeps(optimizer: torch.optim.Optimizer, owner: ModelRuntime, call: str) -> None:
    """Warn of parameters that the optimizer trains and the call does not write."""
    _check_trains(optimizer, owner, call)
    if isinstance(optimizer, FusedOptimizer):
        optimizer.hand_over()
    params = [each for group in optimizer.param_groups for each in group["params"] if not is_removed(each)]
    if num_others := sum(owner_of(param) is None for param in params):
        warn_user(
            f"{call} keeps what is offloaded: {num_others} of the {len(params)} parameters that the optimizer trains "
            "are not, and are lost at the program's end. Put their modules into the model before zo.offload, or save "
            "them by yourself",
        )


def _check_trains(optimizer: torch.optim.Optimizer, owner: ModelRuntime, call: str) -> None:
    """Raise where the hyperparameters are those of something else: no resume could use them."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if not any(owner_of(param) is owner for param in params):
        raise ConfigError(
            f"{call} was given an optimizer ({type(optimizer).__name__}) of {len(params)} parameters, none of which is "
            "offloaded with this model. Pass the optimizer that trains it, built after zo.offload: "
            "zo.AdamW(model.parameters(), ...)"
        )


def _json(extra: Any) -> Any:
    """A copy of `extra` that later changes cannot reach."""
    try:
        return to_json(extra, "extra")
    except (TypeError, RecursionError) as error:
        raise ConfigError(f"extra= cannot be kept: {error}; pass numbers, texts, tuples, lists and dicts") from error


def save_checkpoint(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, path: str | Path, extra: Any = None
) -> None:
    """Write an immutable copy of parameters, optimizer states, buffers and generators to a new directory `path`.

    It loads with `load_checkpoint` on any number of ranks and any placement. Every rank must call. For a frozen model
    `optimizer` is None. Raises
    CheckpointError when `path` holds a checkpoint, CapacityError when the disk is too small, StorageError.
    """
    owner = need_runtime(model, "zo.save_checkpoint")
    with owner.together("zo.save_checkpoint", NOT_ALONE):
        optimizer = _optimizer_of("zo.save_checkpoint", optimizer, owner)
        owner.check_between_steps("zo.save_checkpoint")
        owner.groups, kept, target = _records(optimizer), _json(extra), Path(path)
        owner.drain()
    owner.save(target, partial(_capture, model, owner), kept)


def load_checkpoint(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    path: str | Path,
    scaler: GradScaler | None = None,
    step: int | None = None,
) -> Resumed:
    """Replace parameters, optimizer states, buffers and hyperparameters by a checkpoint's. Every rank must call.

    `path` may also be the NVMe directory of a run: its newest generation is read, and nothing there is written. Beside
    a run that is alive a warning says so. `scaler` gets the state of the run's scaler. Generators are restored when the
    number of ranks is the same. To evaluate, pass None for `optimizer`: parameters and buffers are replaced, and
    everything else stays. `step` is as in `resume`. Raises CheckpointError, naming the first difference, when it is
    another model's. Raises IntegrityError when a byte is not as it was written. Raises LockError when a model of
    this process has `path`, or when a run writes over its generations faster than they are read.
    """
    owner = need_runtime(model, "zo.load_checkpoint")
    with owner.together("zo.load_checkpoint"):
        _check_step("zo.load_checkpoint", step)
        if optimizer is not None:
            optimizer = check_optimizer("zo.load_checkpoint", optimizer)
            _check_trains(optimizer, owner, "zo.load_checkpoint")
        source = Path(path)
        owner.drain()

    def check(found: Generation) -> None:
        if optimizer is not None:
            check_count("zo.load_checkpoint", found.uncounted, step)
            check_groups(optimizer, _groups(found), str(path))
        check_buffers(model, forms_of(model, owner.built_buffers), found, str(path))

    generation, rng = owner.load(source, check, masters_only=optimizer is None)
    with owner.together("zo.load_checkpoint"):
        if optimizer is not None:
            if step is not None:
                owner.recount(step)
            _restore(generation, model, optimizer, scaler, rng, str(path))
        else:
            restore_buffers(model, buffers_in(generation), str(path), owner.device.torch_device)
    return _resumed(generation, step)


def _restore(
    found: Generation,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    scaler: GradScaler | None,
    rng: dict[str, Any] | None,
    where: str,
) -> None:
    """All that a generation has beside tensors."""
    with reading(where):
        if optimizer is not None:
            restore_groups(optimizer, _groups(found), where)
        loss_scale = found.payload.get("scaler")
        if loss_scale is not None and scaler is not None:
            scaler.load_state_dict(loss_scale)
        elif loss_scale is not None:
            warn_user(f"{where} has a loss scale of {loss_scale['scale']:g}; to go on with it pass scaler=")
        device = need_runtime(model, "zo.resume").device.torch_device
        restore_buffers(model, buffers_in(found), where, device)
        if rng is not None:
            restore_rng(rng)


def _groups(generation: Generation) -> list[dict[str, Any]]:
    groups: list[dict[str, Any]] = generation.payload.get("optimizer", [])
    return groups


def resume(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    scaler: GradScaler | None = None,
    step: int | None = None,
    also: Also = (),
) -> Resumed | None:
    """Go on from the generation that `zo.offload(existing="resume")` found; None when there was none.

    Tensors are the generation's since `zo.offload`. This call restores the optimizer's hyperparameters and the random
    number generators, persistent buffers and the state of `scaler`. It returns the step and `extra`. `step` says
    how many iterations a generation of an earlier version has, where an error asks for that. `also` are the models that
    `commit` was given: all go on from one commit, or none does.

    Raises CheckpointError when the optimizer differs or a buffer has another shape, ConfigError when steps were taken
    since. Raises CheckpointError where models are not of one commit, or one of them is missing. A model alone goes on
    from such a generation where `OffloadConfig(generation=)` names it.
    """
    call = "zo.resume"
    members = members_of(call, model, optimizer, also)
    with together(call, members):
        for each in members:
            if each.optimizer is None:
                _check_frozen(call, each.owner)
            else:
                _check_trains(check_optimizer(call, each.optimizer), each.owner, call)
        check_of_one_commit(members)
        for each in members if len(members) > 1 else ():
            each.owner.note_completes()
        if members[0].found is None:
            return None
        _check_step(call, step)
        steps = [step, *(None for _ in members[1:])]
        for each, its_step in zip(members, steps, strict=True):
            _check_resumable(call, each, its_step)
        # Generators of all are those of one moment.
        for each, its_step in zip(members, steps, strict=True):
            _resume(each, scaler if each is members[0] else None, its_step)
        return _resumed(members[0].found, step)


def _check_resumable(call: str, member: Member, step: int | None) -> None:
    owner, found = member.owner, member.found
    if found is None:
        return
    owner.check_whole(call)
    check_count(call, owner.uncounted, step)
    if owner.step_count not in (found.step, step):
        raise ConfigError(
            f"zo.resume goes on from the generation of step {found.step}, but this model is at step "
            f"{owner.step_count}. Steps were taken, or a checkpoint was loaded, since zo.offload. Call zo.resume "
            "before the first step; to go back, start again with OffloadConfig(existing='resume')"
        )
    check_closed(owner.grads, call)
    check_beside(member)
    where = f"the generation of step {found.step}"
    with reading(where):
        check_buffers(member.model, forms_of(member.model, owner.built_buffers), found, where)


def _resume(member: Member, scaler: GradScaler | None, step: int | None) -> None:
    owner, found = member.owner, member.found
    if found is None or owner.keeper is None:
        return
    where, optimizer = f"the generation of step {found.step}", member.optimizer
    owner.resume_pending = False
    if step is not None:
        owner.recount(step)
    if optimizer is not None:
        optimizer = check_optimizer("zo.resume", optimizer)
    rng = owner.keeper.rng
    _restore(found, member.model, optimizer, scaler, rng, where)
    _warn_of_dtypes(member.model, owner, found, where)
    if rng is None and found.world_size != owner.ranks.world_size and owner.ranks.rank == 0:
        warn_user(
            f"{where} has the random number generators of {found.world_size} ranks, this run has "
            f"{owner.ranks.world_size}: they are not restored. Parameters, optimizer states and "
            "hyperparameters are; seed the generators of each rank as for a new run"
        )


def _warn_of_dtypes(model: nn.Module, owner: ModelRuntime, found: Generation, where: str) -> None:
    """Warn of buffers that have another dtype than in the run before; those that `found` has came back in theirs."""
    forms, then = forms_of(model, owner.built_buffers), found.buffer_forms
    others = owner.cast_buffers
    if then is not None:
        with reading(where):
            others = frozenset(name for name in forms.keys() & then if forms[name][0] != then[name][0])
    if changed := sorted(others - buffers_in(found).keys()):
        warn_user(
            f"{', '.join(changed[:3])}{', ...' if len(changed) > 3 else ''}: buffers of another dtype than in the "
            f"run of {where}, so numbers may differ from here on. Precision(buffers=) gives them the one of before"
        )


def _check_step(call: str, step: object) -> None:
    if step is not None and (not isinstance(step, int) or step < 0):
        raise ConfigError(f"{call}(step={step!r}): give the number of iterations, a whole number from 0 up")


def _resumed(found: Generation, step: int | None = None) -> Resumed:
    return Resumed(
        found.step if step is None else step, from_json(found.payload.get("extra")), found.committed_at, found.number
    )
