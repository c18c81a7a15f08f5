"""AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101) and Adam (Kingma and Ba 2015, arXiv:1412.6980)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim.adam import adam as torch_adam
from torch.optim.adamw import adamw as torch_adamw

from zero_offload.hardware.abi import Rule
from zero_offload.hardware.kernels.arguments import Hyper
from zero_offload.optim.loading import State
from zero_offload.optim.optimizer import FusedOptimizer, count_step, negatives, not_decays, number, steps_of

_RULES = {
    (False, False): Rule.ADAM,
    (False, True): Rule.ADAM_AMSGRAD,
    (True, False): Rule.ADAMW,
    (True, True): Rule.ADAMW_AMSGRAD,
}
"""By whether the decay is decoupled, and AMSGrad."""


class _AdamBase(FusedOptimizer):
    @abstractmethod
    def _is_decoupled(self, group: Mapping[str, Any]) -> bool:
        """Whether a group's weight decay is not part of the gradient."""

    def _problems(self, group: Mapping[str, Any]) -> Iterator[str]:
        yield from negatives(group, "lr", "eps", "weight_decay")
        yield from not_decays(group)

    def _hyper(self, group: Mapping[str, Any]) -> Hyper:
        beta1, beta2 = map(float, group["betas"])
        rule = _RULES[self._is_decoupled(group), bool(group["amsgrad"])]
        lr, eps, decay = number(group, "lr"), number(group, "eps"), number(group, "weight_decay")
        return Hyper(rule, lr, beta1, beta2, eps, decay, group["maximize"])

    def _count_step(self, state: State, is_new: bool) -> int:
        return count_step(state)

    def _torch_update(self, param: nn.Parameter, state: State, group: Mapping[str, Any], is_new: bool) -> None:
        assert param.grad is not None
        state["step"] = steps_of(state)
        beta1, beta2 = group["betas"]
        update = torch_adamw if self._is_decoupled(group) else torch_adam
        update(
            [param],
            [param.grad],
            [state["exp_avg"]],
            [state["exp_avg_sq"]],
            [state["max_exp_avg_sq"]] if group["amsgrad"] else [],
            [state["step"]],
            amsgrad=group["amsgrad"],
            beta1=beta1,
            beta2=beta2,
            lr=number(group, "lr"),
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=group["maximize"],
        )


class AdamW(_AdamBase):
    """AdamW with decoupled weight decay; the arguments mean what they mean in torch.optim.AdamW.

    `amsgrad` keeps the maximum of the second moment (Reddi et al. 2018). Raises ConfigError for hyperparameters out of
    range, and CapacityError where there is no room for the states of offloaded parameters.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "amsgrad": amsgrad, "maximize": maximize})

    def _is_decoupled(self, group: Mapping[str, Any]) -> bool:
        return True


class Adam(_AdamBase):
    """Adam, whose weight decay is added to the gradient (L2); the arguments mean what they mean in torch.optim.Adam.

    Raises as `AdamW`.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
    ) -> None:
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}
        super().__init__(params, {**defaults, "amsgrad": amsgrad, "maximize": maximize})

    def _is_decoupled(self, group: Mapping[str, Any]) -> bool:
        return bool(group.get("decoupled_weight_decay"))  # torch's Adam follows a state dict that says so
