"""The program keeps what `.grad` gives: that is torch's gradient, or says at its use that it is not."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import zero_offload as zo
from tests.helpers.kept_grads import FourLayers, Program, run_on_ranks
from tests.helpers.models import TinyLM, build, tokens_of
from tests.helpers.pairwise import full, in_turn
from tests.helpers.ranks import RankPool

SETTINGS = [
    {"grads": "device"},
    {"grads": "device", "overlap": "forward"},
    {"grads": "cpu"},
    {"grads": "nvme", "overlap": "forward"},
]


def offloaded(nvme: Path, **settings: str) -> nn.Module:
    torch.manual_seed(1)
    return zo.offload(FourLayers(), zo.OffloadConfig(precision="fp32", nvme=nvme, durability="scratch", **settings))


@pytest.mark.parametrize("seed", [0, full(100), full(200), full(300)])
@pytest.mark.parametrize("settings", SETTINGS, ids=lambda settings: "-".join(settings.values()))
def test_programs_find_the_gradients_of_plain_torch(settings: dict[str, str], seed: int, nvme: Path) -> None:
    operations = set[str]()
    for each in range(seed, seed + 15):
        model = offloaded(nvme, **settings)
        operations |= {*Program(model, each, device="cpu", in_memory=settings["grads"] == "device").run()}
        zo.close(model)
    assert len(operations) == 14


@in_turn(
    stage=[3, 2, 1, 0, 3],
    settings=[{"grads": "device"}, {"grads": "cpu"}, {"grads": "nvme", "overlap": "forward"}],
    seed=[400, 500, 600],
)
def test_two_ranks_find_the_gradients_of_plain_torch(
    stage: int, settings: dict[str, str], seed: int, nvme: Path, pool: RankPool
) -> None:
    given = {"stage": stage, "nvme": nvme, "durability": "scratch", **settings}
    for operations in pool.succeed(run_on_ranks, range(seed, seed + 8), given):
        assert len(operations) >= 13


@pytest.mark.parametrize("grads", ["cpu", "device"])
def test_an_assigned_tensor_that_changes_is_the_gradient_or_raises(grads: str) -> None:
    """On the compute device the gradient is the tensor; elsewhere .grad has a copy, and says so before it is used."""
    model = zo.offload(build(TinyLM), zo.OffloadConfig(precision="fp32", grads=grads))
    optimizer, weight = zo.SGD(model.parameters(), lr=1.0), model.norm.weight
    for values in (0.5, 0.0):
        given = torch.full(weight.shape, values)
        weight.grad = given
        given += 0.25
        uses = (lambda: weight.grad.norm(), lambda: zo.clip_grad_norm_(model, 1e9), optimizer.step)
        if grads == "device":
            assert weight.grad is given
        for use in uses if grads == "cpu" else ():
            with pytest.raises(zo.ZeroOffloadError, match=r"assigned to the gradient of norm\.weight was changed"):
                use()
        weight.grad = given  # after the last change
        optimizer.step()
        given.add_(7)
    with zo.gathered(model, kind="master") as masters:
        assert masters["norm.weight"].eq(1 - 0.75 - 0.25).all()
    zo.close(model)


def test_a_view_of_what_becomes_a_sum_raises() -> None:
    """A 16-bit gradient moves where it becomes fp32. A tensor follows; a view cannot."""
    model = zo.offload(build(TinyLM), zo.OffloadConfig(precision="bf16", grads="device"))
    model(tokens_of(0)).backward()
    kept = model.norm.bias.grad
    view = model.norm.weight.grad.view(-1)
    with pytest.raises(zo.ZeroOffloadError, match=r"gradient of norm\.weight became a sum in fp32"):
        model(tokens_of(0)).backward()
    assert view.any() and kept.dtype == torch.float32


def test_what_a_handle_gave_before_an_assignment_raises() -> None:
    model = zo.offload(build(TinyLM), zo.OffloadConfig(precision="fp32", grads="cpu"))
    model(tokens_of(0)).backward()
    grad = model.norm.weight.grad
    before, view = grad.detach(), grad[:2]
    expected = grad.clone() * 2
    grad.data = grad.data * 2
    assert torch.equal(grad.clone(), expected) and torch.equal(model.norm.weight.grad.detach().clone(), expected)
    for stale in (before, view):
        for use in (Tensor.sum, Tensor.zero_, Tensor.detach, lambda stale: stale[:1]):
            with pytest.raises(zo.ZeroOffloadError, match="from before an assignment"):
                use(stale)
    with pytest.raises(zo.ZeroOffloadError, match=r"an assignment to the \.data of a view"):
        grad[:2].data = torch.zeros(2)
    zo.close(model)


@pytest.mark.parametrize("keep", [lambda grad: grad, lambda grad: grad.view(-1)], ids=["itself", "a view"])
def test_a_dropped_gradient_keeps_its_memory(keep: Callable[[Tensor], Tensor]) -> None:
    model = zo.offload(build(TinyLM), zo.OffloadConfig(precision="fp32", grads="device"))
    model(tokens_of(0)).backward()
    weight = model.norm.weight
    kept = keep(weight.grad)
    expected = kept.clone()
    weight.grad = None
    model(tokens_of(1)).backward()
    assert torch.equal(kept, expected) and not torch.equal(weight.grad, expected)
    kept.zero_()
    assert weight.grad.any()
    zo.close(model)
