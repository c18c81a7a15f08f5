"""Dynamic loss scaling, for fp16: `torch.amp.GradScaler`'s calls, over offloaded and ordinary parameters.

Owns the scale and how it grows and backs off; host numbers, the same on every rank. Never divides the gradients of an
offloaded model: `unscale_` tells its owner the scale, and the update divides in its one pass; those of ordinary
parameters are divided in place. The calls of a step: `scale` the loss, backward, `unscale_` to clip, `step`, `update`.

[Note: skipped steps] A step is skipped when, on any rank, a gradient of the optimizer is not finite, or any gradient of
a model that it updates. The owner counts it and drops the gradients; no state changes. `update` then backs off.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast, overload

import numpy as np
import torch
from torch import Tensor

from zero_offload.base.errors import ConfigError, NonFiniteError, ZeroOffloadError
from zero_offload.optim.param_groups import group_records
from zero_offload.standins.owners import by_owner, check_adopted
from zero_offload.standins.sources import Owner, Trainer

INIT_SCALE = 2.0**16


@dataclass
class _ScalerRecord:
    """An optimizer between two calls of `update`."""

    overflowed: bool
    stepped: bool = False


class GradScaler:
    """Multiplies losses by a scale that is halved after an overflow and doubled after `growth_interval` steps without.

    Arguments, calls and `state_dict` are torch.amp.GradScaler's. The scale is a number of the host, so `device` changes
    nothing and may be left out: a number that comes first is `init_scale`. With offloaded parameters `zo.commit` and
    `zo.save_checkpoint` save the state too; pass `scaler=` to `zo.resume` and `zo.load_checkpoint`. Raises ConfigError
    for arguments out of range, and NonFiniteError when no scale is left that does not overflow.
    """

    def __init__(
        self,
        device: str | torch.device | float | None = None,
        init_scale: float = INIT_SCALE,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        if isinstance(device, int | float):
            if init_scale != INIT_SCALE:
                raise ConfigError(
                    f"GradScaler({device}, {init_scale}) has two scales; write GradScaler(init_scale={device})"
                )
            init_scale = device
        elif device is not None:
            _check_device(device)
        self._enabled = enabled
        self._growth_tracker = 0
        """Steps without an overflow since the scale last changed."""
        self._progress: dict[int, _ScalerRecord] = {}
        """Progress by the optimizer's id."""
        self._scale = _positive("init_scale", init_scale)
        self.set_growth_factor(growth_factor)
        self.set_backoff_factor(backoff_factor)
        self.set_growth_interval(growth_interval)

    # A step

    @overload
    def scale(self, outputs: Tensor) -> Tensor: ...

    @overload
    def scale(self, outputs: Iterable[Tensor]) -> Iterable[Tensor]: ...

    def scale(self, outputs: Tensor | Iterable[Tensor]) -> Tensor | Iterable[Tensor]:
        """The outputs times the scale: a tensor, or tensors in a list, a tuple or an iterable, nested or not."""
        if not self._enabled:
            return outputs
        if isinstance(outputs, Tensor):
            return outputs * torch.full((), self._scale, dtype=torch.float32, device=outputs.device)
        if not isinstance(outputs, Iterable):
            raise ConfigError(f"GradScaler.scale takes tensors, not {type(outputs).__name__}")
        scaled = map(self.scale, outputs)
        return type(outputs)(scaled) if isinstance(outputs, list | tuple) else scaled

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients by the scale and see whether they are finite; `step` does it if you do not. Collective.

        Call it once per step, after the last backward. On an offloaded model it concerns all gradients, and the update
        divides: `zo.clip_grad_norm_` and `zo.gathered(kind="grads")` see them divided, memory does not.
        """
        if not self._enabled:
            return
        progress = self._progress.get(id(optimizer))
        if progress is not None:
            done = "stepped" if progress.stepped else "unscaled"
            raise ZeroOffloadError(f"the optimizer was {done} already; call scaler.update() before its next unscale_()")
        check_adopted("GradScaler.unscale_", _params(optimizer))
        overflowed, owners = self._unscale_ordinary(optimizer), _owners(optimizer)
        # The second round tells the first ones what the last one found.
        for owner in owners + owners[:-1]:
            overflowed = owner.unscale(self, overflowed)
        self._progress[id(optimizer)] = _ScalerRecord(overflowed)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        """Unscale if that was not done, then `optimizer.step(*args, **kwargs)`, unless a gradient is not finite."""
        if not self._enabled:
            return optimizer.step(*args, **kwargs)
        if args or "closure" in kwargs:
            raise ConfigError("GradScaler.step takes no closure; run the forward and backward before it")
        if id(optimizer) not in self._progress:
            self.unscale_(optimizer)
        progress = self._progress[id(optimizer)]
        if progress.stepped:
            raise ZeroOffloadError("the optimizer was stepped already; call scaler.update() before its next step()")
        progress.stepped = True
        if not progress.overflowed:
            return optimizer.step(**kwargs)
        for owner in _owners(optimizer):
            owner.check_step()
            records = group_records(optimizer) if owner.makes_generations else []
            owner.update({}, records, cast(Trainer, optimizer))  # counts the step and drops its gradients
        return None

    def update(self, new_scale: float | Tensor | None = None) -> None:
        """End the iteration: adapt the scale to what the steps found, or take `new_scale`."""
        if not self._enabled:
            return
        if new_scale is not None:
            self._scale = _positive("new_scale", float(new_scale))
        elif not self._progress:
            raise ZeroOffloadError("scaler.update() follows no scaler.step(optimizer); call that first")
        elif any(progress.overflowed for progress in self._progress.values()):
            self._back_off()
        else:
            self._grow()
        self._progress.clear()

    def _back_off(self) -> None:
        self._growth_tracker = 0
        smaller = float(np.float32(self._scale * self._backoff_factor))
        if smaller == 0:
            raise NonFiniteError(
                f"gradients are not finite at a loss scale of {self._scale:g}, the smallest there is: no scale helps. "
                "Look for a NaN in the loss or the data; a smaller learning rate or precision='bf16' may help"
            )
        self._scale = smaller

    def _grow(self) -> None:
        self._growth_tracker += 1
        if self._growth_tracker < self._growth_interval:
            return
        self._growth_tracker = 0
        with np.errstate(over="ignore"):
            larger = float(np.float32(self._scale * self._growth_factor))
        if math.isfinite(larger):
            self._scale = larger

    def _unscale_ordinary(self, optimizer: torch.optim.Optimizer) -> bool:
        """Divide the gradients of parameters that are not offloaded; says whether one of them is not finite."""
        inverse, overflowed = 1 / self._scale, False
        ordinary = by_owner(_params(optimizer)).get(None, ())
        found = [(param, param.grad) for param in ordinary if param.grad is not None]
        if any(grad.dtype == torch.float16 for _, grad in found):
            raise ConfigError(
                "a gradient of an ordinary fp16 parameter would lose its small values when it is unscaled. "
                "Offload the model with precision='fp16', or keep the parameter in fp32"
            )
        for param, grad in found:
            grad = grad.coalesce() if grad.is_sparse else grad
            values = grad._values() if grad.is_sparse else grad
            overflowed |= not torch.isfinite(values).all().item()
            values.mul_(inverse)
            param.grad = grad
        return overflowed

    # The scale

    def get_scale(self) -> float:
        """The scale; 1 when disabled."""
        return self._scale if self._enabled else 1.0

    def is_enabled(self) -> bool:
        return self._enabled

    def get_growth_factor(self) -> float:
        return self._growth_factor

    def set_growth_factor(self, new_factor: float) -> None:
        if not 1 < new_factor < math.inf:
            raise ConfigError(f"growth_factor={new_factor} is not above 1")
        self._growth_factor = float(new_factor)

    def get_backoff_factor(self) -> float:
        return self._backoff_factor

    def set_backoff_factor(self, new_factor: float) -> None:
        if not 0 < new_factor < 1:
            raise ConfigError(f"backoff_factor={new_factor} is not between 0 and 1")
        self._backoff_factor = float(new_factor)

    def get_growth_interval(self) -> int:
        return self._growth_interval

    def set_growth_interval(self, new_interval: int) -> None:
        if new_interval < 1:
            raise ConfigError(f"growth_interval={new_interval} is not 1 or more")
        self._growth_interval = int(new_interval)

    def state_dict(self) -> dict[str, Any]:
        """As torch.amp.GradScaler's; empty when disabled. Raises between `step` and `update`, where it is not whole."""
        if not self._enabled:
            return {}
        if any(progress.stepped for progress in self._progress.values()):
            raise ZeroOffloadError(
                "the loss scale is saved between scaler.step() and scaler.update(), which may change it; "
                "call scaler.update() before zo.commit, zo.save_checkpoint and scaler.state_dict()"
            )
        return self.settings()

    def settings(self) -> dict[str, Any]:
        """The same numbers at any moment."""
        return {
            "scale": self._scale,
            "growth_factor": self._growth_factor,
            "backoff_factor": self._backoff_factor,
            "growth_interval": self._growth_interval,
            "_growth_tracker": self._growth_tracker,
        }

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take a `state_dict`, this class's or torch's; nothing when disabled."""
        if not self._enabled:
            return
        if not state_dict:
            raise ConfigError("the scaler's state is empty, as a disabled scaler's is; build it with enabled=False")
        self._scale = _positive("scale", state_dict["scale"])
        self.set_growth_factor(state_dict["growth_factor"])
        self.set_backoff_factor(state_dict["backoff_factor"])
        self.set_growth_interval(state_dict["growth_interval"])
        self._growth_tracker = int(state_dict["_growth_tracker"])


def _check_device(device: str | torch.device) -> None:
    try:
        torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"GradScaler(device={device!r}): {str(error).splitlines()[0]}") from error


def _positive(name: str, value: float) -> float:
    """A scale as fp32, which losses are multiplied by."""
    with np.errstate(over="ignore"):
        scale = float(np.float32(value))
    if not 0 < scale < math.inf:
        raise ConfigError(f"{name}={value} is not a positive fp32 number")
    return scale


def _params(optimizer: torch.optim.Optimizer) -> Iterable[torch.nn.Parameter]:
    return (param for group in optimizer.param_groups for param in group["params"])


def _owners(optimizer: torch.optim.Optimizer) -> list[Owner]:
    """The offloaded models that an optimizer updates, in the order of its parameters: the same on every rank."""
    return [owner for owner in by_owner(_params(optimizer)) if owner is not None]
