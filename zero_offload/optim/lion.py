"""Lion (Chen et al. 2023, arXiv:2302.06675, algorithm 2)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from zero_offload.hardware.abi import Rule
from zero_offload.hardware.kernels.arguments import Hyper
from zero_offload.optim.loading import State
from zero_offload.optim.optimizer import FusedOptimizer, negatives, not_decays, number


class Lion(FusedOptimizer):
    """Lion: the sign of a moment, which is its only state. Use a tenth of AdamW's lr and ten times its weight decay.

    The step is lr * sign(beta1 * m + (1 - beta1) * g), the decay decoupled, then m = beta2 * m + (1 - beta2) * g.
    Raises as `AdamW`.
    """

    counts_steps = False

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0,
        *,
        maximize: bool = False,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize})

    def _problems(self, group: Mapping[str, Any]) -> Iterator[str]:
        yield from negatives(group, "lr", "weight_decay")
        yield from not_decays(group)

    def _hyper(self, group: Mapping[str, Any]) -> Hyper:
        beta1, beta2 = map(float, group["betas"])
        return Hyper(
            Rule.LION, number(group, "lr"), beta1, beta2, 0.0, number(group, "weight_decay"), group["maximize"]
        )

    def _count_step(self, state: State, is_new: bool) -> int:
        return 1  # no step of Lion depends on its number

    def _torch_update(self, param: nn.Parameter, state: State, group: Mapping[str, Any], is_new: bool) -> None:
        lr, (beta1, beta2), moment = number(group, "lr"), group["betas"], state["exp_avg"]
        assert param.grad is not None
        grad = -param.grad if group["maximize"] else param.grad
        param.mul_(1 - lr * group["weight_decay"])
        update = moment.lerp(grad, 1 - beta1)
        update = torch.where(update.isnan(), update, update.sign())  # of a NaN torch's sign is 0
        param.add_(update, alpha=-lr)
        moment.lerp_(grad, 1 - beta2)
