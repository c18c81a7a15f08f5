"""The public functions that work on an offloaded model. Each finds the model's runtime and asks it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from zero_offload.base.alike import Compared, word_of
from zero_offload.base.errors import ConfigError, NonFiniteError, ZeroOffloadError
from zero_offload.base.host import host_tensor
from zero_offload.base.inputs import check_model, number, params_of
from zero_offload.base.spans import Track
from zero_offload.base.stats import Stats
from zero_offload.model.runtime import ModelRuntime
from zero_offload.model.updates import check_holds_grads
from zero_offload.optim.optimizer import squares_of
from zero_offload.runtime.accumulate.micro_batches import MicroBatches
from zero_offload.runtime.accumulate.relay import Forks, takes_turns
from zero_offload.runtime.hooks import mark_for_recompute
from zero_offload.runtime.pass_tracker import in_backward
from zero_offload.standins.owners import by_owner, check_adopted, owner_of

CLIP_EPS = 1e-6
"""As torch.nn.utils.clip_grad_norm_ adds it to the norm."""
_AFTER_CLOSE = ("zo.stats", "zo.close")
"""Calls that a closed model still answers."""


def runtime_of(model: nn.Module | Iterable[nn.Parameter]) -> ModelRuntime | None:
    """The runtime of the first offloaded parameter, or None."""
    for param in model.parameters() if isinstance(model, nn.Module) else model:
        owner = owner_of(param)
        if isinstance(owner, ModelRuntime):
            return owner
    return None


def need_runtime(model: nn.Module, call: str) -> ModelRuntime:
    check_model(call, model)
    owner = runtime_of(model)
    if owner is None:
        raise ConfigError(f"{call} takes a model that was offloaded; call zo.offload(model, config) first")
    if call not in _AFTER_CLOSE:
        owner.life.check_alive()
    return owner


def accumulate(
    model: nn.Module, micro_batches: Iterable[Any], loss_fn: Callable[[nn.Module, Any], torch.Tensor]
) -> list[torch.Tensor]:
    """Forward and backward of several micro-batches, each unit for all of them before the next one; their losses.

    The gradients are, bit for bit, those of `for batch in micro_batches: loss_fn(model, batch).backward()`. But a unit
    that rests elsewhere comes to the device only twice, however many micro-batches there are. Tensors saved for
    backward are kept for all of them at once. For blocks marked by `zo.checkpoint` that is their inputs alone, which
    rest where `activations=` says. Several ranks each add up their gradients and reduce once, as in that loop with all
    but the last micro-batch in `zo.no_sync`. `loss_fn` is any code that ends in one scalar loss, divided or scaled as
    in the loop. It runs on a thread per micro-batch, one at a time, and runs no backward itself. Where no parameter
    leaves the device, micro-batches run one after the other, with the same bits.

    Where nothing draws random numbers, losses and gradients equal that loop's. Where dropout or other code draws them,
    losses and gradients are the same on every placement for one seed, but not the loop's. The first micro-batch goes on
    with the generators. Each other one has its own, seeded by a number drawn from them at the start. This holds for
    torch's default generators, Python's `random` and `numpy.random`. Afterwards they stand where the first micro-batch
    has left them, and after an error as before the call. Not covered are generator objects that the program holds:
    micro-batches share those, in an order that depends on the placement. Raises ConfigError with overlap="backward".
    """
    owner = need_runtime(model, "zo.accumulate")
    if not isinstance(micro_batches, Iterable) or not callable(loss_fn):
        raise ConfigError(
            "zo.accumulate(model, micro_batches, loss_fn) takes a list of batches, then a function of (model, batch); "
            f"it got {type(micro_batches).__name__}, then {type(loss_fn).__name__}"
        )
    batches = list(micro_batches)
    check_holds_grads(owner.config, "zo.accumulate")
    owner.compare("micro-batches", lambda: Compared.of({"the number of micro-batches of zo.accumulate": len(batches)}))
    if in_backward() or takes_turns():
        raise ZeroOffloadError("zo.accumulate inside of a backward or of its own loss_fn; call it in the training loop")
    forwards = [partial(_loss_of, loss_fn, model, batch) for batch in batches]
    # Alone, one micro-batch has nothing to wait for.
    if len(batches) < 2:
        return [_backward_of(forward()) for forward in forwards]
    with Forks(len(batches)) as forks:
        if not owner.tracker.any_leaves:
            return _one_after_the_other(owner, forwards, forks)
        # Units leave, so each unit comes once for the forwards of all and once for their backwards.
        by_unit = MicroBatches(
            forwards, forks, owner, owner.tracker, owner.prefetcher, owner.grads, owner.activations, owner.device
        )
        losses = by_unit.forward()
        by_unit.backward()
        return losses


def _one_after_the_other(
    owner: ModelRuntime, forwards: Sequence[Callable[[], torch.Tensor]], forks: Forks
) -> list[torch.Tensor]:
    """A loop, whose gradients cross the ranks once."""
    losses = []
    for index, forward in enumerate(forwards):
        is_last = index == len(forwards) - 1
        with forks.turn(index), nullcontext() if is_last else owner.grads.deferring_reduction():
            losses.append(_backward_of(forward()))
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

    As torch.nn.utils.clip_grad_norm_, with one norm over parameters of offloaded models and ordinary ones beside them.
    Ordinary gradients count once if they are the same on every rank. Offloaded gradients are not touched: the next
    `step` multiplies them by the clip factor in its one pass. With them `norm_type` is 2, and `foreach` changes
    nothing. Ordinary parameters alone go to torch's function. With several ranks every rank calls. Raises ConfigError
    for another norm, and for a parameter that an offloaded model has got since zo.offload. Raises ConfigError too for
    ordinary gradients that differ between ranks; NonFiniteError if asked to.
    """
    call = "zo.clip_grad_norm_"
    params = params_of(call, model)
    owners, ordinary = _by_owner(params)
    with _together(call, owners):
        max_norm = number("max_norm", max_norm)
        check_adopted(call, params)
        if owners and not max_norm > 0:
            raise ConfigError(f"max_norm={max_norm} is not positive")
        if owners and number("norm_type", norm_type) != 2:
            raise ConfigError(
                f"norm_type={norm_type}: gradients of an offloaded model have their 2-norm; leave it out, or 2"
            )
        for owner, _ in owners:
            check_holds_grads(owner.config, call)
            owner.tracker.recover()
            clip = {"max_norm": max_norm, "error_if_nonfinite": bool(error_if_nonfinite)}
            owner.compare(call, partial(_clip_compared, clip, owner, params))
        grads = [param.grad for param in ordinary if param.grad is not None]
        squares = squares_of(grads) if owners else 0.0
    if not owners:
        return torch.nn.utils.clip_grad_norm_(params, max_norm, norm_type, error_if_nonfinite, foreach)
    spans = owners[0][0].store.counters.spans
    opened = spans.open(Track.CLIP, "norm")
    if ordinary:
        owners[0][0].check_ordinary(call, lambda: squares)
    # One norm over all of them; offloaded gradients get a factor, and no element of them moves.
    norm = math.sqrt(math.fsum([squares, *(owner.grad_access.squares(members) for owner, members in owners)]))
    if error_if_nonfinite and not math.isfinite(norm):
        raise NonFiniteError(f"the norm of the gradients is {norm}; look for a NaN in the loss or the data")
    factor = min(1.0, max_norm / (norm + CLIP_EPS))
    for owner, members in owners:
        owner.grads.ledger.multiply(factor, members)
    for grad in grads if factor != 1.0 else ():
        grad.detach().mul_(factor)
    spans.close(opened)
    return host_tensor(norm, torch.float32)


def _clip_compared(settings: Mapping[str, object], owner: ModelRuntime, params: Sequence[nn.Parameter]) -> Compared:
    """The clipping that ranks do alike: its settings, its parameters."""
    word = word_of((sorted(settings.items()), owner.names.digest(params)))
    return Compared(word, lambda: {**Compared.of(settings).texts(), "what is clipped": owner.names.describe(params)})


@contextmanager
def _together(call: str, owners: Iterable[tuple[ModelRuntime, object]]) -> Iterator[None]:
    """`ModelRuntime.together_and_reduce` of each."""
    with ExitStack() as met:
        for owner, _ in owners:
            met.enter_context(owner.together_and_reduce(call))
        yield


def _by_owner(
    params: Iterable[nn.Parameter],
) -> tuple[list[tuple[ModelRuntime, list[nn.Parameter]]], list[nn.Parameter]]:
    """Offloaded models, each with those of `params` that are its own; and the ordinary ones. Each parameter once."""
    found = by_owner(params)
    ordinary = found.pop(None, [])
    return [(owner, members) for owner, members in found.items() if isinstance(owner, ModelRuntime)], ordinary


def clip_grad_value_(model: nn.Module | Iterable[nn.Parameter], clip_value: float, foreach: bool | None = None) -> None:
    """Clip each element of the gradients of `model`, a part of it, or parameters to [-clip_value, clip_value].

    As torch.nn.utils.clip_grad_value_, on the gradient that the step would use, reduced over ranks and added up over
    backwards. It is one pass over the gradients where they rest. Before or after `clip_grad_norm_`, as in torch.
    Ordinary parameters go to torch's function. With several ranks every rank must call.
    """
    call = "zo.clip_grad_value_"
    params = params_of(call, model)
    owners, ordinary = _by_owner(params)
    with _together(call, owners):
        clip_value = number("clip_value", clip_value)
        if not clip_value >= 0:
            raise ConfigError(
                f"clip_value={clip_value} is negative; gradients are clipped to [-clip_value, clip_value]"
            )
        check_adopted(call, params)
        for owner, _ in owners:
            check_holds_grads(owner.config, call)
            owner.tracker.recover()
            owner.compare(call, partial(_clip_compared, {"clip_value": clip_value}, owner, params))
    for owner, members in owners:
        spans = owner.store.counters.spans
        opened = spans.open(Track.CLIP, "value")
        owner.grad_access.clamp(members, -clip_value, clip_value)
        spans.close(opened)
    if held := [param for param in ordinary if param.grad is not None]:
        torch.nn.utils.clip_grad_value_(held, clip_value, foreach)


@contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Backwards inside only add up gradients on each rank; the next one outside, or the step, reduces the sum once.

    As DistributedDataParallel.no_sync, for gradient accumulation on several ranks; every rank must enter it alike. It
    saves the reductions of stages 0, 2 and 3 and costs whole gradients on the tier of the gradients. On one rank, and
    with stage 1, which always does this, it changes nothing. But with overlap="backward" every backward outside of it
    is a step's last one.
    """
    with need_runtime(model, "zo.no_sync").grads.deferring_reduction():
        yield


def device(model: nn.Module) -> torch.device:
    """Where an offloaded model computes, and its outputs are: `targets.to(zo.device(model))`.

    Inputs of the outermost forward are brought there, as by FSDP2 and DistributedDataParallel: tensors in tuples,
    lists, dicts and dataclasses, wherever they are. Targets that a loss outside of the model compares outputs with are
    moved by hand. On several ranks each has its own device.
    """
    return need_runtime(model, "zo.device").device.torch_device


def stats(model: nn.Module) -> Stats:
    """Figures of the last step, or before the first one since `zo.offload`: bytes per tier, stalls, peak memory."""
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
    the interpreter does the same. With several it may be one rank's failure, so there only work under way is finished.
    """
    need_runtime(model, "zo.close").close()
