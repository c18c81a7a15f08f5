"""The public functions that work on an offloaded model. Each finds the model's runtime and asks it."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from zero_offload.backward_updates import check_holds_grads
from zero_offload.checkpoint.extra import from_json, to_json
from zero_offload.checkpoint.format import Generation, reading
from zero_offload.checkpoint.rng import capture_rng, restore_rng
from zero_offload.config import OffloadConfig
from zero_offload.errors import ConfigError, NonFiniteError, ZeroOffloadError
from zero_offload.inputs import check_model, check_optimizer, number, params_of
from zero_offload.offload import plan_memory
from zero_offload.offloaded_model import OffloadedModel
from zero_offload.optim.grad_scaler import GradScaler
from zero_offload.optim.groups import check_groups, group_records, restore_groups
from zero_offload.plan.costs import TOKENS_UNKNOWN
from zero_offload.plan.forecast import Plan
from zero_offload.plan.model_spec import UnitChoice
from zero_offload.runtime.accumulate.micro_batches import MicroBatches, Pieces
from zero_offload.runtime.accumulate.relay import takes_turns
from zero_offload.runtime.grads.ledger import check_closed
from zero_offload.runtime.hooks import mark_for_recompute
from zero_offload.runtime.session import in_backward
from zero_offload.shards.registry import Owner, owner_of
from zero_offload.telemetry.stats import Stats


@dataclass(frozen=True)
class Resumed:
    """Where a run goes on."""

    step: int
    """Optimizer steps that are in the states."""
    extra: Any
    """What `commit` was given; None when the step was committed without it."""
    committed_at: str
    number: int = 0
    """Of the generation, as `OffloadConfig(generation=)` and `zero-offload verify` count them."""


_AFTER_CLOSE = ("zo.stats", "zo.close")
"""What a closed model still answers."""


def runtime_of(model: nn.Module | Iterable[nn.Parameter]) -> OffloadedModel | None:
    """The runtime of the first offloaded parameter, or None."""
    for param in model.parameters() if isinstance(model, nn.Module) else model:
        owner = owner_of(param)
        if isinstance(owner, OffloadedModel):
            return owner
    return None


def need_runtime(model: nn.Module, call: str) -> OffloadedModel:
    check_model(call, model)
    owner = runtime_of(model)
    if owner is None:
        raise ConfigError(f"{call} takes a model that was offloaded; call zo.offload(model, config) first")
    if call not in _AFTER_CLOSE:
        owner.session.check_alive()
    return owner


def accumulate(
    model: nn.Module, micro_batches: Iterable[Any], loss_fn: Callable[[nn.Module, Any], torch.Tensor]
) -> list[torch.Tensor]:
    """Forward and backward of several micro-batches, each unit for all of them before the next one; their losses.

    The gradients are, bit for bit, those of `for batch in micro_batches: loss_fn(model, batch).backward()`, but a unit
    that rests elsewhere comes to the device twice, however many micro-batches there are. What forwards keep for
    backward is kept for all of them at once: mark blocks by `zo.checkpoint`, and it is their inputs, which rest where
    `activations=` says. Several ranks each add up their gradients and reduce once, as in that loop with all but the
    last micro-batch in `zo.no_sync`. `loss_fn` is any code that ends in one scalar loss, divided or scaled as in the
    loop; it runs on a thread per micro-batch, one at a time, and runs no backward itself. Random numbers: the first
    micro-batch goes on with the generators, the others with forks of them, so dropout can be repeated from the same
    seed but is not that of the loop. Where no parameter leaves the device this is the loop. Raises ConfigError with
    overlap="backward".
    """
    owner = need_runtime(model, "zo.accumulate")
    if not isinstance(micro_batches, Iterable) or not callable(loss_fn):
        raise ConfigError(
            "zo.accumulate(model, micro_batches, loss_fn) takes a list of batches, then a function of (model, batch); "
            f"it got {type(micro_batches).__name__}, then {type(loss_fn).__name__}"
        )
    batches = list(micro_batches)
    check_holds_grads(owner.parts.config, "zo.accumulate")
    if in_backward() or takes_turns():
        raise ZeroOffloadError("zo.accumulate inside of a backward or of its own loss_fn; call it in the training loop")
    forwards = [partial(_loss_of, loss_fn, model, batch) for batch in batches]
    if len(batches) < 2 or not owner.session.any_leaves:
        return [_backward_of(forward()) for forward in forwards]
    parts = owner.parts
    pieces = Pieces(owner, owner.session, parts.residency, owner.grads, parts.activations, parts.device)
    by_unit = MicroBatches(pieces, forwards)
    losses = by_unit.forward()
    by_unit.backward()
    return losses


def _loss_of(loss_fn: Callable[[nn.Module, Any], torch.Tensor], model: nn.Module, batch: Any) -> torch.Tensor:
    loss = loss_fn(model, batch)
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.requires_grad:
        what = (
            f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else f"a {type(loss).__name__}"
        )
        without = " without a graph" * (isinstance(loss, torch.Tensor) and not loss.requires_grad)
        raise ConfigError(f"zo.accumulate needs one scalar loss with its graph; loss_fn returned {what}{without}")
    return loss


def _backward_of(loss: torch.Tensor) -> torch.Tensor:
    torch.autograd.backward(loss)
    return loss.detach()


def clip_grad_norm_(
    model: nn.Module | Iterable[nn.Parameter],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Clip the gradients of `model`, a part of it, or parameters by their 2-norm; returns the norm, fp32 scalar.

    As torch.nn.utils.clip_grad_norm_. Offloaded gradients are not touched: the next `step` multiplies them by the clip
    factor in its one pass; their `norm_type` is 2, and there is no loop for `foreach` to choose. What is not offloaded
    goes to torch's function. Raises ConfigError for a mixture and another norm, and NonFiniteError if asked to.
    """
    params, max_norm = params_of("zo.clip_grad_norm_", model), number("max_norm", max_norm)
    owners = {id(owner): owner for owner in map(owner_of, params)}
    if len(owners) > 1:
        raise ConfigError(
            "zo.clip_grad_norm_ takes parameters of one offloaded model, or ordinary ones: of these "
            f"{sum(owner_of(param) is None for param in params)} of {len(params)} are ordinary. Clip them apart"
        )
    owner = next(iter(owners.values()), None)
    if not isinstance(owner, OffloadedModel):
        return torch.nn.utils.clip_grad_norm_(params, max_norm, norm_type, error_if_nonfinite, foreach)
    if not max_norm > 0:
        raise ConfigError(f"max_norm={max_norm} is not positive")
    if number("norm_type", norm_type) != 2:
        raise ConfigError(
            f"norm_type={norm_type}: gradients of an offloaded model have their 2-norm; leave it out, or 2"
        )
    check_holds_grads(owner.parts.config, "zo.clip_grad_norm_")
    owner.session.settle()
    norm = owner.grads.clip_norm(params, max_norm, if_finite=error_if_nonfinite)
    if error_if_nonfinite and not math.isfinite(norm):
        raise NonFiniteError(f"the norm of the gradients is {norm}; look for a NaN in the loss or the data")
    return torch.tensor(norm)


def clip_grad_value_(model: nn.Module | Iterable[nn.Parameter], clip_value: float, foreach: bool | None = None) -> None:
    """Clip each element of the gradients of `model`, a part of it, or parameters to [-clip_value, clip_value].

    As torch.nn.utils.clip_grad_value_: of the gradient that the step would use, reduced over ranks and added up over
    backwards; one pass over the gradients where they rest. Before or after `clip_grad_norm_`, as in torch. What is not
    offloaded goes to torch's function. With several ranks every rank must call.
    """
    params, clip_value = params_of("zo.clip_grad_value_", model), number("clip_value", clip_value)
    if not clip_value >= 0:
        raise ConfigError(f"clip_value={clip_value} is negative; gradients are clipped to [-clip_value, clip_value]")
    by_owner: dict[int, tuple[Owner | None, list[nn.Parameter]]] = {}
    for param in params:
        owner = owner_of(param)
        by_owner.setdefault(id(owner), (owner, []))[1].append(param)
    for owner, members in by_owner.values():
        if isinstance(owner, OffloadedModel):
            check_holds_grads(owner.parts.config, "zo.clip_grad_value_")
            owner.session.settle()
            owner.grads.clip_value(members, clip_value)
        elif held := [param for param in members if param.grad is not None]:
            torch.nn.utils.clip_grad_value_(held, clip_value, foreach)


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Backwards inside only add up gradients on each rank; the next one outside, or the step, reduces the sum once.

    As DistributedDataParallel.no_sync, for gradient accumulation on several ranks; every rank must enter it alike. It
    saves the reductions of stages 0, 2 and 3 and costs whole gradients on the tier of the gradients. On one rank, and
    with stage 1, which always does this, it changes nothing; but with overlap="backward" every backward outside of it
    is a step's last one.
    """
    grads = need_runtime(model, "zo.no_sync").grads
    before, grads.defers = grads.defers, True
    try:
        yield
    finally:
        grads.defers = before


def commit(model: nn.Module, optimizer: torch.optim.Optimizer, extra: Any = None) -> None:
    """Let the state after the last `step` become the next generation, when one is due; returns at once.

    Hyperparameters, random number generators and the loss scale are taken now, which is after `scaler.update()`.
    `extra` is made of numbers, texts, lists and dicts: scheduler state, data position, ... Of several ranks it is rank
    0's, which all get back. Without a directory for generations this does nothing, and warns once unless
    durability="scratch" says so. Raises ConfigError when `extra` is of something else, or `optimizer` not this model's.
    """
    owner = need_runtime(model, "zo.commit")
    check_optimizer("zo.commit", optimizer)
    _check_trains(optimizer, owner, "zo.commit")
    # A scheduler has changed the learning rate since `step`.
    owner.groups = group_records(optimizer)
    owner.commit(capture_rng, _json(extra))


def _check_trains(optimizer: torch.optim.Optimizer, owner: OffloadedModel, call: str) -> None:
    """Raise where the hyperparameters are those of something else: no resume could use them."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if not any(owner_of(param) is owner for param in params):
        raise ConfigError(
            f"{call} was given an optimizer ({type(optimizer).__name__}) of {len(params)} parameters, none of which is "
            "offloaded with this model; pass the optimizer that trains it, built after zo.offload: "
            "zo.AdamW(model.parameters(), ...)"
        )


def _json(extra: Any) -> Any:
    """A copy of `extra` that later changes cannot reach."""
    try:
        return to_json(extra)
    except (TypeError, RecursionError) as error:
        raise ConfigError(f"extra= cannot be kept: {error}; pass plain numbers, texts, lists and dicts") from error


def save_checkpoint(model: nn.Module, optimizer: torch.optim.Optimizer, path: str | Path, extra: Any = None) -> None:
    """Write an immutable copy of parameters, optimizer states and generators to a new directory `path`.

    It loads with `load_checkpoint` on any number of ranks and any placement. Every rank must call. Raises
    CheckpointError when `path` holds a checkpoint, CapacityError when the disk is too small, StorageError.
    """
    owner = need_runtime(model, "zo.save_checkpoint")
    check_optimizer("zo.save_checkpoint", optimizer)
    _check_trains(optimizer, owner, "zo.save_checkpoint")
    owner.groups = group_records(optimizer)
    owner.save(Path(path), capture_rng, _json(extra))


def load_checkpoint(
    model: nn.Module, optimizer: torch.optim.Optimizer, path: str | Path, scaler: GradScaler | None = None
) -> Resumed:
    """Replace parameters, optimizer states and hyperparameters by a checkpoint's. Every rank must call.

    `path` may also be the NVMe directory of a run that is not running: its newest generation is read. `scaler` gets
    the state of the one that the run had. Generators are restored when the number of ranks is the same. Raises
    CheckpointError naming the first difference when it is another model's, IntegrityError when a byte is not what was
    written, LockError when a run is at work in `path`.
    """
    owner = need_runtime(model, "zo.load_checkpoint")
    check_optimizer("zo.load_checkpoint", optimizer)
    _check_trains(optimizer, owner, "zo.load_checkpoint")
    generation, rng = owner.load(Path(path), lambda found: check_groups(optimizer, _groups(found), str(path)))
    _restore(generation, (optimizer, scaler), rng, str(path))
    return _resumed(generation)


def _restore(
    found: Generation,
    into: tuple[torch.optim.Optimizer, GradScaler | None],
    rng: dict[str, Any] | None,
    where: str,
) -> None:
    """All that a generation has beside tensors."""
    optimizer, scaler = into
    with reading(where):
        restore_groups(optimizer, _groups(found), where)
        _restore_scaler(found, scaler, where)
        if rng is not None:
            restore_rng(rng)


def _groups(generation: Generation) -> list[dict[str, Any]]:
    groups: list[dict[str, Any]] = generation.payload.get("optimizer", [])
    return groups


def _restore_scaler(generation: Generation, scaler: GradScaler | None, where: str) -> None:
    state = generation.payload.get("scaler")
    if state is None:
        return
    if scaler is None:
        warnings.warn(f"{where} has a loss scale of {state['scale']:g}; to go on with it pass scaler=", stacklevel=4)
    else:
        scaler.load_state_dict(state)


def resume(model: nn.Module, optimizer: torch.optim.Optimizer, scaler: GradScaler | None = None) -> Resumed | None:
    """Go on from the generation that `zo.offload(existing="resume")` found; None when there was none.

    Tensors are the generation's since `zo.offload`; this restores the optimizer's hyperparameters and the random
    number generators and the state of `scaler`, and returns the step and `extra`. Raises CheckpointError when the
    optimizer differs, ConfigError when steps were taken since.
    """
    owner = need_runtime(model, "zo.resume")
    check_optimizer("zo.resume", optimizer)
    _check_trains(optimizer, owner, "zo.resume")
    keeper = owner.parts.keeper
    if keeper is None or keeper.found is None:
        return None
    found = keeper.found
    if owner.step_count != found.step:
        raise ConfigError(
            f"zo.resume goes on from the generation of step {found.step}, but this model is at step "
            f"{owner.step_count}: steps were taken, or a checkpoint was loaded, since zo.offload. Call zo.resume "
            "before the first step; to go back, start again with OffloadConfig(existing='resume')"
        )
    check_closed(owner.grads.ledger, "zo.resume")
    owner.resume_pending = False
    where = f"the generation of step {found.step}"
    _restore(found, (optimizer, scaler), keeper.rng, where)
    if keeper.rng is None and found.world_size != owner.parts.ranks.world_size and owner.parts.ranks.rank == 0:
        warnings.warn(
            f"{where} has the random number generators of {found.world_size} ranks, this run has "
            f"{owner.parts.ranks.world_size}: they are not restored. Parameters, optimizer states and "
            "hyperparameters are; seed the generators of each rank as for a new run",
            stacklevel=2,
        )
    return _resumed(found)


def _resumed(found: Generation) -> Resumed:
    return Resumed(found.step, from_json(found.payload.get("extra")), found.committed_at, found.number)


def stats(model: nn.Module) -> Stats:
    """Figures of the last step: bytes per tier, stalls, peak memory."""
    return need_runtime(model, "zo.stats").stats()


def checkpoint(
    modules: nn.Module | Iterable[nn.Module], group: DeviceMesh | dist.ProcessGroup | None = None
) -> nn.Module | Iterable[nn.Module]:
    """Mark modules, such as `model.blocks`, so that training keeps only their inputs and backward runs them again.

    In place, before or after `zo.offload`, or without it; returns what it was given. Losses and gradients stay what
    they are, bit for bit; eval mode and no_grad change nothing. The inputs rest where `activations=` says; without
    offload where they are. `group`: ranks whose inputs are equal, as with tensor parallelism; each keeps a part of
    them, and backward gathers them.
    """
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ConfigError(f"the mesh of zo.checkpoint has {group.ndim} dimensions; give one, as in mesh['tp']")
        group = group.get_group()
    single = isinstance(modules, nn.Module) and not isinstance(modules, nn.ModuleList)
    marked = [modules] if single else modules
    if not isinstance(marked, Iterable):
        raise ConfigError(f"zo.checkpoint takes modules, not a {type(modules).__name__}")
    for index, module in enumerate(cast("list[Any]", marked)):
        if not isinstance(module, nn.Module):
            raise ConfigError(f"zo.checkpoint takes modules, not a {type(module).__name__}")
        kind = type(module).__name__
        mark_for_recompute(module, kind if single else f"{kind} {index}", group)
    return modules


def close(model: nn.Module) -> None:
    """Finish updates, make the last step a generation, and release files and locks.

    The model is then of no use: `zo.stats` and a further `zo.close` work, all other calls raise. On one rank an exit of
    the interpreter does the same; with several it may be one rank's failure, so there only what is under way is
    finished.
    """
    need_runtime(model, "zo.close").close()


def plan(
    model: nn.Module,
    config: OffloadConfig,
    units: UnitChoice | None = None,
    tokens: int = TOKENS_UNKNOWN,
    mesh: DeviceMesh | None = None,
) -> Plan:
    """Bytes of a rank that `offload(model, config, mesh, units)` would use, by tier and kind of state, and whether they
    fit; meta models too. Not collective: budgets are those of this rank.

    `print(zo.plan(model, config).table())` shows it; `.fits` and `.reasons` say whether and why not.
    `.predicted_step_s` and `.bottleneck` are a simulation's, for a step of `tokens` on each rank: of a machine as it is
    known by the name of its GPU, not measured; `zero-offload plan` measures.
    """
    if not isinstance(tokens, int) or tokens < 1:
        raise ConfigError(f"tokens={tokens!r}: a step has 1 or more, a whole number")
    return plan_memory(model, config, units, tokens, mesh)
