"""Adagrad (Duchi, Hazan and Singer 2011)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adagrad import adagrad as torch_adagrad

from zero_offload.base.host import host_zeros
from zero_offload.hardware.abi import Rule
from zero_offload.hardware.kernels.arguments import Hyper
from zero_offload.optim.loading import State
from zero_offload.optim.optimizer import FusedOptimizer, count_step, negatives, number, steps_of


class Adagrad(FusedOptimizer):
    """Adagrad; the arguments mean what they mean in torch.optim.Adagrad.

    The initial value is added to `sum` by a parameter's first step: before it there is no state. Raises as `AdamW`.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-2,
        lr_decay: float = 0,
        weight_decay: float = 0,
        initial_accumulator_value: float = 0,
        eps: float = 1e-10,
        *,
        maximize: bool = False,
    ) -> None:
        defaults = {"lr": lr, "lr_decay": lr_decay, "eps": eps, "weight_decay": weight_decay}
        initial = {"initial_accumulator_value": initial_accumulator_value, "maximize": maximize}
        super().__init__(params, {**defaults, **initial})

    def _problems(self, group: Mapping[str, Any]) -> Iterator[str]:
        return negatives(group, "lr", "lr_decay", "weight_decay", "initial_accumulator_value", "eps")

    def _hyper(self, group: Mapping[str, Any]) -> Hyper:
        decay, initial = number(group, "lr_decay"), number(group, "initial_accumulator_value")
        lr, eps, weight_decay = number(group, "lr"), number(group, "eps"), number(group, "weight_decay")
        return Hyper(Rule.ADAGRAD, lr, decay, initial, eps, weight_decay, group["maximize"])

    def _count_step(self, state: State, is_new: bool) -> int:
        return count_step(state)

    def _torch_update(self, param: nn.Parameter, state: State, group: Mapping[str, Any], is_new: bool) -> None:
        assert param.grad is not None
        state["step"] = host_zeros((), torch.float32) if is_new else steps_of(state)
        if is_new:
            initial = number(group, "initial_accumulator_value")
            state["sum"] += complex(initial, initial) if param.is_complex() else initial
        torch_adagrad(
            [param],
            [param.grad],
            [state["sum"]],
            [state["step"]],
            lr=number(group, "lr"),
            weight_decay=group["weight_decay"],
            lr_decay=group["lr_decay"],
            eps=group["eps"],
            maximize=group["maximize"],
        )
