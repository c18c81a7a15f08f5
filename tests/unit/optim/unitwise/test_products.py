"""Which optimizers multiply matrices: a GPU steps these."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from zero_offload.optim.unitwise.products import multiplies_matrices


class Refreshing(torch.optim.Optimizer):
    """SGD whose state is a factorization, from the second step on."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for param in self.param_groups[0]["params"]:
            if param.grad is not None:
                state = self.state[param]
                if "seen" in state:
                    state["factor"] = torch.linalg.qr(param.grad).R
                state["seen"] = True
                param.add_(param.grad, alpha=-0.1)


MAKERS: dict[str, tuple[Callable[[Any], torch.optim.Optimizer], bool]] = {
    "Muon": (lambda params: torch.optim.Muon(params, 1e-2), True),
    "a factorization": (Refreshing, True),
    "Adafactor": (lambda params: torch.optim.Adafactor(params, 1e-2), False),
    "AdamW": (lambda params: torch.optim.AdamW(params, 1e-2), False),
    "SGD": (lambda params: torch.optim.SGD(params, 1e-2), False),
}


@pytest.mark.parametrize("name", MAKERS)
def test_products(name: str) -> None:
    make, expected = MAKERS[name]
    params = [nn.Parameter(torch.randn(300, 200)), nn.Parameter(torch.randn(200, 300))]
    before, seed = [param.detach().clone() for param in params], torch.get_rng_state()
    optimizer = make(params)
    assert multiplies_matrices(optimizer) is expected
    assert all(map(torch.equal, before, params))
    assert not optimizer.state
    assert torch.equal(torch.get_rng_state(), seed)
