"""AdamW, Adam, Adagrad, SGD and Lion: what each asks of its groups, and torch's update where there is no kernel."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adagrad import adagrad as torch_adagrad
from torch.optim.adam import adam as torch_adam
from torch.optim.adamw import adamw as torch_adamw
from torch.optim.sgd import sgd as torch_sgd

from zero_offload.base.errors import ConfigError
from zero_offload.base.host import host_zeros
from zero_offload.hardware.abi import Rule
from zero_offload.hardware.kernels.arguments import Hyper
from zero_offload.optim.optimizer import FusedOptimizer, negatives, not_decays, number, numbers, steps_of
from zero_offload.optim.state import State
from zero_offload.optim.unitwise.optimizer_copies import check_class

_RULES = {
    (False, False): Rule.ADAM,
    (False, True): Rule.ADAM_AMSGRAD,
    (True, False): Rule.ADAMW,
    (True, True): Rule.ADAMW_AMSGRAD,
}
"""Rules by two flags: decoupled decay, and AMSGrad."""


def adam_hyper(group: Mapping[str, Any], *, is_decoupled: bool) -> Hyper:
    """Rule and numbers of a group of Adam, or of AdamW, whose weight decay is not part of the gradient."""
    beta1, beta2 = map(float, group["betas"])
    lr, eps, decay = numbers(group, "lr", "eps", "weight_decay")
    return Hyper(_RULES[is_decoupled, bool(group["amsgrad"])], lr, beta1, beta2, eps, decay, group["maximize"])


class Adam(FusedOptimizer):
    """Adam (Kingma and Ba 2015, arXiv:1412.6980), whose weight decay is added to the gradient (L2).

    The arguments mean what they mean in torch.optim.Adam; `foreach`, `fused`, `capturable` and `differentiable` as
    `FusedOptimizer` says. `amsgrad` keeps the maximum of the second moment (Reddi et
    al. 2018). Raises ConfigError for hyperparameters out of range, and CapacityError where there is no room for the
    states of offloaded parameters.
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
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        decoupled_weight_decay: bool = False,
    ) -> None:
        numbers = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "amsgrad": amsgrad}
        loops = {"foreach": foreach, "capturable": capturable, "differentiable": differentiable, "fused": fused}
        decoupled = {"decoupled_weight_decay": True} if decoupled_weight_decay else {}
        super().__init__(params, {**numbers, "maximize": maximize, **loops, **decoupled})

    def _is_decoupled(self, group: Mapping[str, Any]) -> bool:
        """True if a group's weight decay is not part of the gradient."""
        return bool(group.get("decoupled_weight_decay"))  # torch's Adam follows a state dict that says so

    def _problems(self, group: Mapping[str, Any]) -> Iterator[str]:
        yield from negatives(group, "lr", "eps", "weight_decay")
        yield from not_decays(group)

    def _hyper(self, group: Mapping[str, Any]) -> Hyper:
        return adam_hyper(group, is_decoupled=self._is_decoupled(group))

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


class AdamW(Adam):
    """AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101), with decoupled weight decay.

    The arguments mean what they mean in torch.optim.AdamW; those of torch's loops as in `Adam`. Raises as `Adam`.
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
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
    ) -> None:
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            maximize=maximize,
            foreach=foreach,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
        )

    def _is_decoupled(self, group: Mapping[str, Any]) -> bool:
        return True


class Adagrad(FusedOptimizer):
    """Adagrad (Duchi, Hazan and Singer 2011); the arguments mean what they mean in torch.optim.Adagrad.

    Those of torch's loops are as in `Adam`. The initial value is added to `sum` by a parameter's first step: before it
    there is no state. Raises as `Adam`.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-2,
        lr_decay: float = 0,
        weight_decay: float = 0,
        initial_accumulator_value: float = 0,
        eps: float = 1e-10,
        foreach: bool | None = None,
        *,
        maximize: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
    ) -> None:
        defaults = {"lr": lr, "lr_decay": lr_decay, "eps": eps, "weight_decay": weight_decay}
        initial = {"initial_accumulator_value": initial_accumulator_value, "maximize": maximize}
        loops = {"foreach": foreach, "differentiable": differentiable, "fused": fused}
        super().__init__(params, {**defaults, **initial, **loops})

    def _problems(self, group: Mapping[str, Any]) -> Iterator[str]:
        return negatives(group, "lr", "lr_decay", "weight_decay", "initial_accumulator_value", "eps")

    def _hyper(self, group: Mapping[str, Any]) -> Hyper:
        lr, decay, initial = numbers(group, "lr", "lr_decay", "initial_accumulator_value")
        eps, weight_decay = numbers(group, "eps", "weight_decay")
        return Hyper(Rule.ADAGRAD, lr, decay, initial, eps, weight_decay, group["maximize"])

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


class SGD(FusedOptimizer):
    """SGD, with momentum and Nesterov's (Sutskever et al. 2013). Without momentum it keeps no state.

    The arguments mean what they mean in torch.optim.SGD; those of torch's loops as in `Adam`. Raises as `Adam`.
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
        foreach: bool | None = None,
        differentiable: bool = False,
        fused: bool | None = None,
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "dampening": dampening, "weight_decay": weight_decay}
        loops = {"foreach": foreach, "differentiable": differentiable, "fused": fused}
        super().__init__(params, {**defaults, "nesterov": nesterov, "maximize": maximize, **loops})

    def _problems(self, group: Mapping[str, Any]) -> Iterator[str]:
        yield from negatives(group, "lr", "momentum", "weight_decay")
        if group["nesterov"] and (group["momentum"] <= 0 or group["dampening"] != 0):
            yield (
                f"nesterov with momentum={group['momentum']} and dampening={group['dampening']}; "
                "use a momentum above 0 and dampening=0"
            )

    def _hyper(self, group: Mapping[str, Any]) -> Hyper:
        lr, momentum, dampening, decay = numbers(group, "lr", "momentum", "dampening", "weight_decay")
        rule = (Rule.SGD_NESTEROV if group["nesterov"] else Rule.SGD_MOMENTUM) if momentum else Rule.SGD
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


class Lion(FusedOptimizer):
    """Lion (Chen et al. 2023, arXiv:2302.06675, algorithm 2): the sign of a moment, which is its only state.

    Use a tenth of AdamW's lr and ten times its weight decay.
    The step is lr * sign(beta1 * m + (1 - beta1) * g), the decay decoupled, then m = beta2 * m + (1 - beta2) * g.
    Raises as `Adam`.
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
        lr, decay = numbers(group, "lr", "weight_decay")
        return Hyper(Rule.LION, lr, beta1, beta2, 0.0, decay, group["maximize"])

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


def ours_for(optimizer: torch.optim.Optimizer) -> str:
    """The call that makes our optimizer of the same kind with the same arguments, or lets this one step."""
    ours = {each.__name__: each for each in (AdamW, Adam, Adagrad, SGD, Lion)}
    given: dict[str, Any] = optimizer.defaults
    name = "AdamW" if given.get("decoupled_weight_decay") else type(optimizer).__name__
    if name not in ours:
        try:
            check_class(type(optimizer))
        except ConfigError:
            return "zo.AdamW(model.parameters()), or another one of zero_offload"
        of_all = "zo.Muon(model.parameters()), which steps the rest of the model too, or let this one: "
        return (of_all if isinstance(optimizer, torch.optim.Muon) else "") + "zo.unitwise(optimizer)"
    own = inspect.signature(ours[name]).parameters.items()
    arguments = [f"{key}={given[key]!r}" for key, each in own if key in given and given[key] != each.default]
    return f"zo.{name}({', '.join(['model.parameters()', *arguments])}), or let this one: zo.unitwise(optimizer)"
