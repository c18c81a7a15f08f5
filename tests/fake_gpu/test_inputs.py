"""Inputs that a program leaves on the host are brought by the outermost forward: the bits of inputs moved by hand."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import zero_offload as zo
from tests.fake_gpu import device
from tests.fake_gpu.device import TYPE
from tests.fake_gpu.training import check_run, run
from tests.helpers.models import NARROW, VOCAB, Block, build, tokens_of

pytestmark = pytest.mark.usefixtures("late")

THERE = f"{TYPE}:0"


class Scorer(nn.Module):
    """Never asks where its parameters are. Inputs come by name, alone or in containers."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, NARROW)
        self.blocks = nn.ModuleList(Block(NARROW) for _ in range(3))
        self.head = nn.Linear(NARROW, VOCAB, bias=False)

    def forward(self, ids: Tensor, *, batch: dict[str, list[Tensor]]) -> Tensor:
        x = self.embedding(ids) * batch["scales"][0]
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).float().flatten(0, 1), batch["labels"][0].flatten())


def loss_of(model: nn.Module, step: int, move: Callable[[Tensor], Tensor]) -> Tensor:
    tokens = tokens_of(step)
    scales = torch.linspace(0.5, 1.5, NARROW)
    # Rows of other sizes are views: a copy takes their elements alone.
    batch = {"labels": [move(tokens[:, 1:])], "scales": [move(scales)]}
    loss: Tensor = model(move(tokens[:, :-1]), batch=batch)
    return loss


def backward(model: nn.Module, tokens: Tensor, step: int, move: Any, how: Callable[..., Tensor] = loss_of) -> Tensor:
    loss = how(model, step, move)
    loss.backward()
    return loss


def by_hand(tensor: Tensor) -> Tensor:
    return tensor.to(THERE)


def as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def some(tensor: Tensor) -> Tensor:
    """Moves what is a float alone."""
    return tensor.to(THERE) if tensor.is_floating_point() else tensor


@pytest.mark.parametrize("move", [as_it_is, some])
@pytest.mark.parametrize("params", ["cpu", "nvme"])
def test_training(move: Callable[[Tensor], Tensor], params: str) -> None:
    expected = run(partial(backward, move=by_hand), Scorer, params=params)
    check_run(expected, partial(backward, move=move), Scorer, params=params)


def again(model: nn.Module, step: int, move: Any, *, reentrant: bool) -> Tensor:
    """The whole model is run again, from what was given."""
    start = torch.ones((), requires_grad=True)  # a reentrant checkpoint needs one
    call = lambda start: loss_of(model, step, move) * start.to(THERE)  # noqa: E731
    return checkpoint(call, start, use_reentrant=reentrant)  # type: ignore[no-any-return]


def in_autocast(model: nn.Module, step: int, move: Any) -> Tensor:
    with torch.autocast(TYPE, dtype=torch.bfloat16):
        return loss_of(model, step, move)


def accumulated(model: nn.Module, step: int, move: Any) -> Tensor:
    losses = zo.accumulate(model, [2 * step, 2 * step + 1], lambda model, number: loss_of(model, number, move))
    return torch.stack([loss.detach() for loss in losses]).requires_grad_().sum()


def marked() -> Scorer:
    model = Scorer()
    zo.checkpoint(model)
    return model


@pytest.mark.parametrize(
    ("how", "make"),
    [
        (partial(again, reentrant=False), Scorer),
        (partial(again, reentrant=True), Scorer),
        (in_autocast, marked),
        (accumulated, Scorer),
    ],
    ids=["checkpoint", "reentrant", "zo.checkpoint", "accumulate"],
)
def test_forwards_that_run_again_or_in_turns(how: Callable[..., Tensor], make: Callable[[], nn.Module]) -> None:
    room: Any = {"device_memory": "24MiB"}  # a model that runs again as a whole stays as a whole
    expected = run(partial(backward, move=by_hand, how=how), make, **room)
    schedules = [(device.Policy.SIDE_LATE, 0)]
    check_run(expected, partial(backward, move=as_it_is, how=how), make, schedules=schedules, **room)


def offloaded() -> Any:
    return zo.offload(build(Scorer), zo.OffloadConfig(precision="fp32"))


def test_gradients_reach_inputs_where_they_are() -> None:
    model = offloaded()
    found = []
    for x in (torch.ones(2, NARROW), torch.ones(2, NARROW, device=THERE)):
        x.requires_grad_()
        model.blocks[0](x).sum().backward()  # of a part that a program calls by itself
        assert x.grad is not None and x.grad.device == x.device
        found.append(x.grad.cpu())
        model.zero_grad()
    assert torch.equal(*found)
    zo.close(model)


def test_what_is_given_may_be_overwritten_at_once() -> None:
    model = offloaded()
    expected = loss_of(model, 0, by_hand)
    ids = tokens_of(0)[:, :-1].clone()
    batch = {"labels": [tokens_of(0)[:, 1:]], "scales": [torch.linspace(0.5, 1.5, NARROW)]}
    loss = model(ids, batch=batch)
    ids.zero_()
    assert loss.item() == expected.item()
    zo.close(model)


def test_the_answer_is_where_outputs_are() -> None:
    model = offloaded()
    assert zo.device(model) == torch.device(THERE) == model.blocks[0](torch.ones(1, NARROW)).device
    compiled = torch.compile(model.blocks[0], backend="eager")
    assert compiled(torch.ones(1, NARROW)).device == zo.device(model)
    zo.close(model)
    with pytest.raises(zo.ZeroOffloadError, match=r"closed by zo\.close"):
        zo.device(model)
