"""Bytes of states before there are any: those of real steps, or a word why nothing is known."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from zero_offload.optim.unitwise.state_rows import packed_bytes
from zero_offload.optim.unitwise.state_sizes import state_sizes

SHAPES = ((96, 130), (64, 2), (130,), (), (8, 6, 3, 3))
MAKERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "Adadelta": torch.optim.Adadelta,
    "Adafactor": torch.optim.Adafactor,  # reads numbers from its states
    "Adagrad": lambda params: torch.optim.Adagrad(params, initial_accumulator_value=0.1),  # states of its constructor
    "Adam": lambda params: torch.optim.Adam(params, amsgrad=True),
    "AdamW fused": lambda params: torch.optim.AdamW(params, fused=True),
    "ASGD": torch.optim.ASGD,
    "RAdam": lambda params: torch.optim.RAdam(params, foreach=True),
    "Rprop": torch.optim.Rprop,
    "SGD": lambda params: torch.optim.SGD(params, 0.1),  # none
    "SGD momentum": lambda params: torch.optim.SGD(params, 0.1, momentum=0.9),
}


def params_of(*shapes: tuple[int, ...]) -> list[nn.Parameter]:
    return [nn.Parameter(torch.full(shape, 0.5)) for shape in shapes]


def real_sizes(optimizer: torch.optim.Optimizer, params: list[nn.Parameter]) -> list[int]:
    for _ in range(2):
        for param in params:
            param.grad = torch.ones_like(param)
        optimizer.step()
    return [packed_bytes(optimizer.state[param]) if optimizer.state.get(param) else 0 for param in params]


@pytest.mark.parametrize("name", MAKERS)
def test_they_are_those_of_real_steps(name: str) -> None:
    params = params_of(*SHAPES)
    optimizer = MAKERS[name](params)
    before = [param.clone() for param in params]
    found = state_sizes(optimizer)
    assert not found.unknown
    assert all(map(torch.equal, params, before)), "the optimizer is not stepped"
    assert [found.nbytes[param] for param in params] == real_sizes(optimizer, params)


def test_groups_with_other_numbers_have_other_states() -> None:
    one, other = params_of((40, 24), (40, 24))
    groups = [{"params": [one], "momentum": 0.9}, {"params": [other], "momentum": 0.0}]
    found = state_sizes(torch.optim.SGD(groups, 0.1))
    assert found.nbytes[one] > 40 * 24 * 4 and found.nbytes[other] == 0


def test_large_parameters_take_no_memory() -> None:
    """8 TiB with Adam's states."""
    with torch.device("meta"):
        params = [nn.Parameter(torch.empty(1 << 20, 1 << 20)) for _ in range(3)]
    found = state_sizes(torch.optim.Adam(params))
    assert [found.nbytes[param] >> 40 for param in params] == [8, 8, 8]


class Odd(torch.optim.Optimizer):
    """Keeps what `keep` makes."""

    def __init__(self, params: Any, keep: Callable[[Tensor, Tensor], Any]) -> None:
        self.keep = keep
        super().__init__(params, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                self.state[param]["kept"] = self.keep(param.grad, param)


def test_states_whose_size_depends_on_gradients_are_unknown() -> None:
    found = state_sizes(Odd(params_of((32, 32)), lambda grad, _: grad[grad > 0]))
    assert not found.nbytes and found.unknown.startswith("a step without memory fails (DynamicOutputShapeException")


def test_a_step_that_branches_on_values_is_compared_with_a_real_one() -> None:
    def keep(grad: Tensor, _: Tensor) -> Tensor:
        return grad.new_zeros(1000 if float(grad.abs().sum()) == 1.0 else 10)

    found = state_sizes(Odd(params_of((32, 32)), keep))
    assert not found.nbytes and "bytes, and without memory" in found.unknown


def test_no_address_of_a_tensor_without_memory_is_given_away() -> None:
    """It is 0, and a function in C would write there."""
    seen: list[int] = []

    def keep(grad: Tensor, _: Tensor) -> Tensor:
        seen.append(grad.data_ptr())
        return torch.zeros_like(grad)

    assert "gives the address of a tensor" in state_sizes(Odd(params_of((32, 32)), keep)).unknown
    assert seen and all(seen)


def test_a_class_that_steps_by_a_closure_is_unknown() -> None:
    assert "closure" in state_sizes(torch.optim.LBFGS(params_of((8, 8)))).unknown


def test_random_numbers_of_the_program_go_on() -> None:
    before = torch.get_rng_state()
    state_sizes(Odd(params_of((32, 32)), lambda grad, _: torch.rand_like(grad)))
    assert torch.equal(torch.get_rng_state(), before)
