"""`zo.AdamW` on ordinary parameters is a drop-in for torch.optim.AdamW."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import zero_offload as zo

LAYOUTS = {
    "contiguous": lambda dtype: torch.randn(33, 17).to(dtype),
    "transposed": lambda dtype: torch.randn(17, 33).to(dtype).t(),
    "channels last": lambda dtype: torch.randn(2, 3, 5, 7).to(dtype).contiguous(memory_format=torch.channels_last),
    "scalar": lambda dtype: torch.randn(()).to(dtype),
    "empty": lambda dtype: torch.zeros(0, 3).to(dtype),
    "long": lambda dtype: torch.randn(70_001).to(dtype),
}
HYPERS: list[dict[str, Any]] = [
    {},
    {"lr": 3e-2, "betas": (0.8, 0.99), "eps": 1e-6, "weight_decay": 0.3},
    {"maximize": True},
    {"amsgrad": True},
    {"weight_decay": 0.0, "lr": torch.tensor(1e-2, dtype=torch.float64)},
]
TOLERANCE = {torch.float32: 1e-6, torch.float64: 1e-12, torch.bfloat16: 5e-2, torch.float16: 2e-3}


def twins(values: torch.Tensor) -> tuple[nn.Parameter, nn.Parameter]:
    return nn.Parameter(values.clone()), nn.Parameter(values.clone())


def steps(ours: torch.optim.Optimizer, torchs: torch.optim.Optimizer, count: int = 8) -> None:
    """The same random gradients for both."""
    groups = zip(ours.param_groups, torchs.param_groups, strict=True)
    pairs = [pair for a, b in groups for pair in zip(a["params"], b["params"], strict=True)]
    for seed in range(count):
        generator = torch.Generator().manual_seed(seed)
        for a, b in pairs:
            grad = torch.randn(a.shape, generator=generator).to(a.dtype)
            a.grad, b.grad = torch.empty_like(a).copy_(grad), torch.empty_like(b).copy_(grad)
        ours.step()
        torchs.step()
        ours.zero_grad()
        torchs.zero_grad()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("hyper", HYPERS, ids=lambda hyper: ",".join(hyper) or "defaults")
def test_within_rounding_of_torch(hyper: dict[str, Any], dtype: torch.dtype, layout: str) -> None:
    ours, torchs = twins(LAYOUTS[layout](dtype))
    before = ours.detach().clone()
    steps(zo.AdamW([ours], **hyper), torch.optim.AdamW([torchs], **hyper))
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(ours, torchs, rtol=tolerance, atol=tolerance)
    assert ours.stride() == torchs.stride()
    # A few steps may be too small for bf16 parameters without a master.
    assert not ours.numel() or dtype is torch.bfloat16 or not torch.equal(ours, before)


def test_bf16_parameters_have_a_master() -> None:
    """Updates below the resolution of bf16 add up; torch's stand still."""
    ours, torchs = twins(torch.ones(1000, dtype=torch.bfloat16))
    optimizers = [zo.AdamW([ours], 1e-4, weight_decay=0), torch.optim.AdamW([torchs], 1e-4, weight_decay=0)]
    for _ in range(100):
        for param, optimizer in zip((ours, torchs), optimizers, strict=True):
            param.grad = torch.ones_like(param)
            optimizer.step()
    assert torch.all(torchs == 1) and torch.all((ours.float() - 0.99).abs() < 2**-8)


def test_a_bf16_value_that_was_written_is_its_master() -> None:
    """A residual of the value before would make a NaN of 0."""
    torch.manual_seed(0)
    ours = nn.Parameter(torch.randn(512).bfloat16())
    optimizer = zo.AdamW([ours], lr=1e-3, weight_decay=0.0)
    for written in (torch.zeros(512), torch.ones(512)):
        ours.grad = torch.randn(512).bfloat16()
        optimizer.step()
        assert optimizer.state[ours]["residual"].any()
        with torch.no_grad():
            ours.copy_(written)
        ours.grad = torch.randn(512).bfloat16()
        optimizer.step()
        assert torch.allclose(ours.float(), written, atol=0.01)


def test_a_gradient_of_another_layout() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        ours, torchs = twins(torch.randn(8, 8).to(dtype))
        optimizers = zo.AdamW([ours]), torch.optim.AdamW([torchs])
        for seed in range(4):
            grad = torch.randn(8, 8, generator=torch.Generator().manual_seed(seed)).to(dtype)
            ours.grad = torchs.grad = grad.t() if seed % 2 else grad
            for optimizer in optimizers:
                optimizer.step()
        torch.testing.assert_close(ours, torchs, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def test_param_groups_and_a_late_one() -> None:
    values = [torch.randn(5, 4) for _ in range(4)]
    pairs = [twins(each) for each in values]
    optimizers = []
    for side, make in ((0, zo.AdamW), (1, torch.optim.AdamW)):
        params = [pair[side] for pair in pairs]
        groups = [{"params": params[:1], "lr": 1e-1}, {"params": params[1:3], "weight_decay": 0.5, "betas": (0.5, 0.6)}]
        optimizer = make(groups, lr=1e-2)
        optimizer.add_param_group({"params": params[3:], "eps": 1e-3})
        optimizers.append(optimizer)
    steps(*optimizers)
    for ours, torchs in pairs:
        torch.testing.assert_close(ours, torchs, rtol=1e-6, atol=1e-6)


def test_learning_rate_schedulers() -> None:
    ours, torchs = twins(torch.randn(50))
    optimizers = [zo.AdamW([ours], lr=0.1), torch.optim.AdamW([torchs], lr=0.1)]
    schedulers = [torch.optim.lr_scheduler.OneCycleLR(each, 0.1, total_steps=20) for each in optimizers]
    for _ in range(10):
        steps(*optimizers, count=1)
        for scheduler in schedulers:
            scheduler.step()
    torch.testing.assert_close(ours, torchs, rtol=1e-6, atol=1e-6)
    assert optimizers[0].param_groups[0]["lr"] == optimizers[1].param_groups[0]["lr"]


def test_parameters_without_a_gradient_stay() -> None:
    moving, still = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))
    optimizer = zo.AdamW([moving, still])
    moving.grad = torch.ones(4)
    optimizer.step()
    assert torch.all(still == 1) and still not in optimizer.state and torch.all(moving < 1)


@pytest.mark.parametrize("names", [("ours", "torchs"), ("torchs", "ours")], ids=" to ".join)
@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_state_dicts_move_between_the_two(dtype: torch.dtype, amsgrad: bool, names: tuple[str, str]) -> None:
    make = {"ours": zo.AdamW, "torchs": torch.optim.AdamW}
    first, second = twins(torch.randn(40).to(dtype))
    source, target = make[names[0]]([first], lr=0.01, amsgrad=amsgrad), make[names[1]]([second], lr=0.5)
    steps(source, make[names[0]]([nn.Parameter(first.detach().clone())], lr=0.01, amsgrad=amsgrad), 3)
    with torch.no_grad():
        second.copy_(first)
    target.load_state_dict(copy.deepcopy(source.state_dict()))
    assert target.param_groups[0]["lr"] == 0.01 and target.param_groups[0]["amsgrad"] == amsgrad
    assert int(target.state[second]["step"]) == 3
    steps(source, target, 5)
    tolerance = max(TOLERANCE[dtype], 1e-6)
    torch.testing.assert_close(first, second, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_its_own_state_dict_restores_every_bit(dtype: torch.dtype) -> None:
    first, second = twins(torch.randn(300).to(dtype))
    source, target = zo.AdamW([first], lr=1e-4), zo.AdamW([second], lr=1e-4)
    steps(source, zo.AdamW([nn.Parameter(first.detach().clone())]), 5)
    with torch.no_grad():
        second.copy_(first)
    target.load_state_dict(copy.deepcopy(source.state_dict()))
    steps(source, target, 20)
    assert torch.equal(first, second)
    for name, value in source.state[first].items():
        assert torch.equal(value, target.state[second][name]) and value.dtype == target.state[second][name].dtype


def test_zero_grad_as_in_torch() -> None:
    param = nn.Parameter(torch.ones(3))
    optimizer = zo.AdamW([param])
    param.grad = torch.ones(3)
    optimizer.zero_grad(set_to_none=False)
    assert torch.all(param.grad == 0)
    optimizer.zero_grad()
    assert param.grad is None


def test_closure() -> None:
    param = nn.Parameter(torch.ones(3))
    optimizer = zo.AdamW([param], lr=0.1)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = param.square().sum()
        loss.backward()
        return loss

    losses = [optimizer.step(closure).item() for _ in range(5)]
    assert losses == sorted(losses, reverse=True)


def test_a_backward_through_changed_weights_raises_as_in_torch() -> None:
    for make in (zo.AdamW, torch.optim.AdamW):
        param = nn.Parameter(torch.ones(3))
        loss = param.square().sum()
        param.grad = torch.ones(3)
        make([param]).step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_sparse_gradients_are_refused() -> None:
    table = nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(zo.ConfigError, match="SparseAdam"):
        zo.AdamW(table.parameters()).step()


def test_all_bad_hyperparameters_are_named() -> None:
    with pytest.raises(zo.ConfigError) as error:
        zo.AdamW([nn.Parameter(torch.ones(1))], lr=-1, betas=(1.0, 0.5), eps=-1, weight_decay=-0.1)
    assert all(name in str(error.value) for name in ("lr=-1", "betas[0]=1.0", "eps=-1", "weight_decay=-0.1"))
    for lr in ("1e-3", float("nan"), float("inf")):
        with pytest.raises(zo.ConfigError, match="not a finite number"):
            zo.AdamW([nn.Parameter(torch.ones(1))], lr=lr)
    optimizer = zo.AdamW([nn.Parameter(torch.ones(1))])
    with pytest.raises(zo.ConfigError, match="lr=-2"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))], "lr": -2})
    assert len(optimizer.param_groups) == 1
    with pytest.raises(ValueError, match="empty"):
        zo.AdamW([])


def test_offloaded_and_ordinary_parameters_in_one_optimizer() -> None:
    torch.manual_seed(0)
    first, second, plain = nn.Linear(4, 4), nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    plain[0].load_state_dict(first.state_dict())
    plain[1].load_state_dict(second.state_dict())
    zo.offload(first, zo.OffloadConfig(precision="fp32"))
    optimizers = [zo.AdamW([*first.parameters(), *second.parameters()]), zo.AdamW(plain.parameters())]
    for seed in range(3):
        x = torch.randn(2, 4, generator=torch.Generator().manual_seed(seed))
        losses = [second(first(x)).square().sum(), plain(x).square().sum()]
        for loss, optimizer in zip(losses, optimizers, strict=True):
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        assert losses[0].item() == losses[1].item()


def test_offloaded_states_move_into_torchs_optimizer() -> None:
    torch.manual_seed(0)
    model, plain = nn.Linear(4, 4), nn.Linear(4, 4)
    plain.load_state_dict(model.state_dict())
    zo.offload(model, zo.OffloadConfig(precision="fp32"))
    ours, torchs = zo.AdamW(model.parameters(), lr=0.1), torch.optim.AdamW(plain.parameters(), lr=0.1)
    x = torch.randn(2, 4)

    def step(module: nn.Module, optimizer: torch.optim.Optimizer) -> float:
        optimizer.zero_grad()
        loss = module(x).square().sum()
        loss.backward()
        optimizer.step()
        return loss.item()

    for _ in range(3):
        assert step(model, ours) == pytest.approx(step(plain, torchs), rel=1e-5)
    torchs.load_state_dict(ours.state_dict())
    ours.load_state_dict(torchs.state_dict())
    for _ in range(3):
        assert step(model, ours) == pytest.approx(step(plain, torchs), rel=1e-5)
