"""Stochastic gradient descent, with momentum and Nesterov's (Sutskever et al. 2013)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim.sgd import sgd as torch_sgd

from zero_offload.hardware.abi import Rule
from zero_offload.hardware.kernels.arguments import Hyper
from zero_offload.optim.loading import State
from zero_offload.optim.optimizer import FusedOptimizer, negatives, number


class SGD(FusedOptimizer):
    """SGD; the arguments mean what they mean in torch.optim.SGD. Without momentum it keeps no state.

    Raises as `AdamW`.
    """

    counts_steps = False

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float = 0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "dampening": dampening, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "nesterov": nesterov, "maximize": maximize})

    def _problems(self, group: Mapping[str, Any]) -> Iterator[str]:
        yield from negatives(group, "lr", "momentum", "weight_decay")
        if group["nesterov"] and (group["momentum"] <= 0 or group["dampening"] != 0):
            yield (
                f"nesterov with momentum={group['momentum']} and dampening={group['dampening']}; "
                "use a momentum above 0 and dampening=0"
            )

    def _hyper(self, group: Mapping[str, Any]) -> Hyper:
        momentum, dampening = number(group, "momentum"), number(group, "dampening")
        rule = (Rule.SGD_NESTEROV if group["nesterov"] else Rule.SGD_MOMENTUM) if momentum else Rule.SGD
        lr, decay = number(group, "lr"), number(group, "weight_decay")
        return Hyper(rule, lr, momentum, dampening, 0.0, decay, group["maximize"])

    def _count_step(self, state: State, is_new: bool) -> int:
        return 1 if is_new else 2  # only the first is unlike the others: without dampening

    def _torch_update(self, param: nn.Parameter, state: State, group: Mapping[str, Any], is_new: bool) -> None:
        assert param.grad is not None
        buffers = [None if is_new else state.get("momentum_buffer")]
        torch_sgd(
            [param],
            [param.grad],
            buffers,
            weight_decay=group["weight_decay"],
            momentum=group["momentum"],
            lr=number(group, "lr"),
            dampening=group["dampening"],
            nesterov=group["nesterov"],
            maximize=group["maximize"],
        )
        if group["momentum"]:
            state["momentum_buffer"] = buffers[0]
