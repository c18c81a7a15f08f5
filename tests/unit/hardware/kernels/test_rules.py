"""Every rule against torch's optimizers in double precision, 100 steps, option by option; Lion as its paper has it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.helpers.state_formats import Shard
from zero_offload.base.types import StateFormat
from zero_offload.hardware.abi import Rule
from zero_offload.hardware.kernels.arguments import Segment
from zero_offload.hardware.kernels.rules import STATES
from zero_offload.hardware.kernels.update import UpdateBuffers, fused_update

NUMEL, NUM_STEPS, LR = 500, 100, 1e-2


class Lion(torch.optim.Optimizer):
    """Chen et al. 2023, algorithm 2, in plain torch."""

    def __init__(self, params: Any, lr: float, betas: tuple[float, float], weight_decay: float, maximize: bool) -> None:
        super().__init__(params, {})
        self.lr, self.betas, self.weight_decay, self.maximize = lr, betas, weight_decay, maximize

    def step(self) -> None:  # type: ignore[override]
        (param,) = self.param_groups[0]["params"]
        grad = -param.grad if self.maximize else param.grad
        m = self.state[param].setdefault("exp_avg", torch.zeros_like(param))
        direction = torch.sign(self.betas[0] * m + (1 - self.betas[0]) * grad)
        with torch.no_grad():
            param.sub_(self.lr * (direction + self.weight_decay * param))
        m.copy_(self.betas[1] * m + (1 - self.betas[1]) * grad)


@dataclass(frozen=True)
class Case:
    rule: Rule
    theirs: Callable[..., torch.optim.Optimizer]
    options: dict[str, Any] = field(default_factory=dict)
    tolerance: float = 4e-6
    """Largest difference of a parameter of size 1."""

    def __str__(self) -> str:
        return " ".join([self.rule.name, *(f"{name}={value}" for name, value in self.options.items())])

    @property
    def segment(self) -> Segment:
        """The options as the kernels take them."""
        o = self.options
        beta1, beta2 = o.get("betas", (0.0, 0.0))
        return Segment(
            *(0, NUMEL),
            lr=LR,
            beta1=o.get("momentum", o.get("lr_decay", beta1)),
            beta2=o.get("dampening", o.get("initial_accumulator_value", beta2)),
            eps=o.get("eps", 0.0),
            weight_decay=o.get("weight_decay", 0.0),
            grad_scale=-1.0 if o.get("maximize") else 1.0,
            step=1,
        )


ADAM = {"betas": (0.9, 0.99), "eps": 1e-8}
CASES = [
    *(
        Case(rule, theirs, ADAM | {"weight_decay": decay, "maximize": maximize} | more)
        for rule, theirs, more in [
            (Rule.ADAMW, torch.optim.AdamW, {}),
            (Rule.ADAMW_AMSGRAD, torch.optim.AdamW, {"amsgrad": True}),
            (Rule.ADAM, torch.optim.Adam, {}),
            (Rule.ADAM_AMSGRAD, torch.optim.Adam, {"amsgrad": True}),
        ]
        for decay, maximize in [(0.0, False), (0.1, False), (0.1, True)]
    ),
    Case(Rule.ADAMW, torch.optim.AdamW, {"betas": (0.0, 0.5), "eps": 1e-3, "weight_decay": 0.5}),
    Case(Rule.ADAGRAD, torch.optim.Adagrad, {"eps": 1e-10}),
    Case(Rule.ADAGRAD, torch.optim.Adagrad, {"eps": 1e-10, "lr_decay": 0.1, "weight_decay": 0.1}),
    Case(Rule.ADAGRAD, torch.optim.Adagrad, {"eps": 1e-3, "maximize": True}),
    Case(Rule.ADAGRAD, torch.optim.Adagrad, {"eps": 1e-10, "initial_accumulator_value": 0.1}),
    Case(Rule.LION, Lion, {"betas": (0.9, 0.99), "weight_decay": 0.0, "maximize": False}),
    Case(Rule.LION, Lion, {"betas": (0.95, 0.98), "weight_decay": 0.1, "maximize": True}),
    Case(Rule.SGD, torch.optim.SGD),
    Case(Rule.SGD, torch.optim.SGD, {"weight_decay": 0.1, "maximize": True}),
    Case(Rule.SGD_MOMENTUM, torch.optim.SGD, {"momentum": 0.9}),
    Case(Rule.SGD_MOMENTUM, torch.optim.SGD, {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1}),
    Case(Rule.SGD_NESTEROV, torch.optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    Case(Rule.SGD_NESTEROV, torch.optim.SGD, {"momentum": 0.5, "nesterov": True, "maximize": True}),
]


def _grad(step: int, param: Tensor) -> Tensor:
    """(NUMEL,) of many sizes; moves as the parameter does, so that errors would add up."""
    generator = torch.Generator().manual_seed(step)
    noise = torch.randn(NUMEL, generator=generator, dtype=torch.float64)
    return noise * torch.logspace(-6, 1, NUMEL, dtype=torch.float64) + 0.3 * param.double()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_as_torch_in_double(case: Case) -> None:
    initial = torch.randn(NUMEL, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    value = initial.float()
    states = {name: torch.zeros(NUMEL) for name in STATES[case.rule]}
    grad = torch.empty(NUMEL)
    buffers = UpdateBuffers(
        value=value.data_ptr(),
        residual=0,
        master=0,
        states=tuple(state.data_ptr() for state in states.values()),
        grad=grad.data_ptr(),
        value_out=0,
        value_dtype=torch.float32,
        grad_dtype=torch.float32,
    )
    param = nn.Parameter(value.double())
    theirs = case.theirs([param], lr=LR, **case.options)
    for step in range(1, NUM_STEPS + 1):
        grad.copy_(_grad(step, param.detach()))
        param.grad = grad.double()
        fused_update(case.rule, buffers, [replace(case.segment, step=step)], 2)
        theirs.step()
    assert not torch.equal(value, initial.float())
    torch.testing.assert_close(value.double(), param.detach(), rtol=2e-6, atol=case.tolerance)
    for name, state in states.items():
        expected = theirs.state[param][name]
        torch.testing.assert_close(state.double(), expected, rtol=1e-5, atol=1e-6 * float(expected.abs().max()))


MEAN_ERRORS = {StateFormat.BF16: 0.03, StateFormat.COMPACT: 0.2}
"""Of parameters after 100 steps, as a share of what they have moved. Lion's sign has the largest."""
STATE_ERRORS = {StateFormat.BF16: 0.05, StateFormat.COMPACT: 0.1}
"""The largest of any state's elements, as a share of the largest element."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("format", [StateFormat.BF16, StateFormat.COMPACT], ids=lambda format: format.name)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_smaller_states_stay_near_to_torch_in_double(case: Case, format: StateFormat, dtype: torch.dtype) -> None:
    """With gradients of very many sizes in each block; errors keep no direction, or they would add up to more."""
    grad = torch.empty(NUMEL)
    initial = torch.randn(NUMEL, generator=torch.Generator().manual_seed(0))
    shard = Shard.of(case.rule, format, initial, grad, dtype)
    param = nn.Parameter(shard.master.double())
    start = param.detach().clone()
    theirs = case.theirs([param], lr=LR, **case.options)
    for step in range(1, NUM_STEPS + 1):
        grad.copy_(_grad(step, param.detach()))
        param.grad = grad.double()
        shard.update([replace(case.segment, step=step)], seed=1, threads=2)
        theirs.step()
    moved = (param.detach() - start).abs().mean()
    error = (shard.master.double() - param.detach()).abs().mean()
    assert error <= MEAN_ERRORS[format] * moved
    for name, state in zip(STATES[case.rule], shard.decoded(), strict=True):
        expected = theirs.state[param][name]
        assert (state.double() - expected).abs().max() <= STATE_ERRORS[format] * expected.abs().max()


def test_every_rule_is_tried() -> None:
    assert {case.rule for case in CASES} == set(Rule) == set(STATES)
