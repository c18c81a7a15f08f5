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
from zero_offload.runtime.grads.access import GradAccess

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


def drop_one_by_one(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for param in model.parameters():
        param.grad = None


DROPS: dict[str, Callable[[nn.Module, torch.optim.Optimizer], object]] = {
    "None": drop_one_by_one,
    "optimizer": lambda model, optimizer: optimizer.zero_grad(),
    "model": lambda model, optimizer: model.zero_grad(),
    "others": lambda model, optimizer: [
        setattr(param, "grad", torch.ones(param.shape)) for param in model.parameters()
    ],
}


@pytest.mark.parametrize("drop", DROPS)
@pytest.mark.parametrize("grads", ["cpu", "nvme"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_what_the_program_keeps_outlives_the_drop(drop: str, grads: str, precision: str, nvme: Path) -> None:
    """The step that follows is that of other gradients."""
    config = zo.OffloadConfig(precision=precision, grads=grads, nvme=nvme, durability="scratch", overlap="forward")
    model = zo.offload(build(TinyLM), config)
    optimizer = zo.SGD(model.parameters(), lr=0.5)
    model(tokens_of(0)).backward()
    params = list(model.parameters())
    kept, rows = [param.grad.float() for param in params], params[0].grad[1:3]
    zo.clip_grad_norm_(model, 0.5)
    expected = [grad.clone() for grad in kept]
    DROPS[drop](model, optimizer)
    model(tokens_of(1)).backward()
    optimizer.step()
    assert all(map(torch.equal, (grad.clone() for grad in kept), expected))
    assert torch.equal(rows.clone(), expected[0][1:3])
    assert torch.nn.utils.get_total_norm(kept) == torch.nn.utils.get_total_norm(expected)
    rows.add_(1)
    expected[0][1:3].add_(1)
    for each in (kept, expected):
        each[1].mul_(0.5)
        each[2].clamp_(-1e-3, 1e-3)
        each[3].zero_()
        torch._foreach_mul_(each[4:], 0.25)
        each[5].data = each[5] + 1
    assert all(map(torch.equal, (grad.clone() for grad in kept), expected))
    plain = [nn.Parameter(torch.ones(grad.shape)) for grad in expected]
    for param, grad in zip(plain, kept, strict=True):
        param.grad = grad
    torch.optim.SGD(plain, lr=1.0).step()
    assert all(torch.equal(param, 1 - grad) for param, grad in zip(plain, expected, strict=True))
    zo.close(model)
    del model, params, optimizer
    assert all(map(torch.equal, (grad.clone() for grad in kept), expected))


def test_a_drop_reads_what_the_program_has_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model = zo.offload(build(TinyLM), zo.OffloadConfig(precision="fp32", grads="cpu"))
    optimizer, read = zo.SGD(model.parameters(), lr=0.5), list[nn.Parameter]()
    plain_read = GradAccess.read
    monkeypatch.setattr(GradAccess, "read", lambda self, param: read.append(param) or plain_read(self, param))
    model(tokens_of(0)).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for param in model.parameters():
        if param.grad is not None:
            param.grad = None
    model(tokens_of(0)).backward()
    kept = model.head.weight.grad.detach()
    optimizer.zero_grad()
    assert read == [model.head.weight] and kept.shape == model.head.weight.shape
    model(tokens_of(0)).backward()
    used = model.head.weight.grad
    optimizer.step()
    optimizer.zero_grad()
    assert len(read) == 1 and used.shape == kept.shape
    zo.close(model)


@pytest.mark.parametrize("values", [0.5, 0.0])
def test_one_tensor_is_not_the_gradient_of_two(values: float) -> None:
    """In plain torch a change of one gradient would be one of the other."""
    model = zo.offload(build(TinyLM), zo.OffloadConfig(precision="fp32", grads="cpu"))
    first, second = model.norm.weight, model.blocks[0].norm.weight
    one = torch.full((2 * first.numel(),), values)
    first.grad = one[: first.numel()]
    for shared in (one[: first.numel()], one[1 : first.numel() + 1], first.grad.detach()):
        with pytest.raises(zo.ZeroOffloadError, match=r"gradient of (blocks\.0\.)?norm\.weight"):
            second.grad = shared
    second.grad = one[first.numel() :]  # beside it
    first.grad = None
    second.grad = one[: first.numel()]
    first.grad = one[first.numel() :]
    one.mul_(2)
    for param in (first, second):
        with pytest.raises(zo.ZeroOffloadError, match="was changed afterwards"):
            assert param.grad.norm()
    zo.close(model)


def test_a_view_that_was_assigned_and_changes_is_noticed() -> None:
    """Neither the view nor the tensor that it is of has to live."""
    model = zo.offload(build(TinyLM), zo.OffloadConfig(precision="fp32", grads="cpu"))
    weight = model.norm.weight
    for form in (lambda each: each.view(-1), lambda each: each.detach(), lambda each: each[0]):
        given = torch.ones(1, weight.numel())
        weight.grad = form(given).view(weight.shape)
        other = given.view(-1)
        del given
        other.mul_(2)
        with pytest.raises(zo.ZeroOffloadError, match="was changed afterwards"):
            assert weight.grad.norm()
    zo.close(model)
