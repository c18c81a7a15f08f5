"""`zo.Adam`, `zo.Adagrad` and `zo.SGD` on ordinary parameters are drop-ins for torch's, `zo.Lion` for its paper."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

import zero_offload as zo
from tests.unit.optim.test_adamw import LAYOUTS, steps, twins


class PaperLion(torch.optim.Optimizer):
    """Algorithm 2 of Chen et al. 2023, line by line."""

    def __init__(
        self, params: Any, lr: float = 1e-4, betas: Any = (0.9, 0.99), weight_decay: float = 0.0, maximize: bool = False
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                moment = self.state[param].setdefault("exp_avg", torch.zeros_like(param))
                grad = -param.grad if group["maximize"] else param.grad
                beta1, beta2 = group["betas"]
                update = (beta1 * moment + (1 - beta1) * grad).sign()
                param -= group["lr"] * (update + group["weight_decay"] * param)
                moment.copy_(beta2 * moment + (1 - beta2) * grad)


PAIRS: list[tuple[type[Any], type[Any], dict[str, Any]]] = [
    (zo.Adam, torch.optim.Adam, {}),
    (zo.Adam, torch.optim.Adam, {"lr": 3e-2, "betas": (0.8, 0.99), "eps": 1e-6, "weight_decay": 0.3}),
    (zo.Adam, torch.optim.Adam, {"amsgrad": True, "maximize": True, "lr": torch.tensor(1e-2, dtype=torch.float64)}),
    (zo.Adagrad, torch.optim.Adagrad, {}),
    (zo.Adagrad, torch.optim.Adagrad, {"lr_decay": 0.1, "weight_decay": 0.2, "maximize": True, "eps": 1e-6}),
    (zo.Lion, PaperLion, {}),
    (zo.Lion, PaperLion, {"lr": 1e-2, "betas": (0.95, 0.98), "weight_decay": 0.3, "maximize": True}),
    (zo.SGD, torch.optim.SGD, {}),
    (zo.SGD, torch.optim.SGD, {"lr": torch.tensor(1e-2, dtype=torch.float64), "weight_decay": 0.1, "maximize": True}),
    (zo.SGD, torch.optim.SGD, {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.1}),
    (zo.SGD, torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
]
DTYPES = {torch.float32: 2e-6, torch.float64: 1e-12}


def _named(pair: tuple[type[Any], type[Any], dict[str, Any]]) -> str:
    return f"{pair[0].__name__} {','.join(pair[2]) or 'defaults'}"


@pytest.mark.parametrize("layout", ["contiguous", "transposed", "long", "empty"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("pair", PAIRS, ids=_named)
def test_within_rounding_of_torch(
    pair: tuple[type[Any], type[Any], dict[str, Any]], dtype: torch.dtype, layout: str
) -> None:
    torch.manual_seed(0)
    ours, torchs = twins(LAYOUTS[layout](dtype))
    before = ours.detach().clone()
    mine, theirs, hyper = pair
    steps(mine([ours], **hyper), theirs([torchs], **hyper))
    torch.testing.assert_close(ours, torchs, rtol=DTYPES[dtype], atol=DTYPES[dtype])
    assert not ours.numel() or not torch.equal(ours, before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_adagrad_begins_with_its_initial_value(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    ours, torchs = twins(torch.randn(33, 17).to(dtype))
    hyper = {"initial_accumulator_value": 0.5, "lr": 0.1}
    steps(zo.Adagrad([ours], **hyper), torch.optim.Adagrad([torchs], **hyper))
    torch.testing.assert_close(ours, torchs, rtol=DTYPES[dtype], atol=DTYPES[dtype])


@pytest.mark.parametrize("pair", PAIRS, ids=_named)
def test_states_go_to_torch_and_come_back(pair: tuple[type[Any], type[Any], dict[str, Any]]) -> None:
    """At any step either may go on from the other's state dict, and does as it would have."""
    torch.manual_seed(0)
    mine, theirs, hyper = pair
    values = torch.randn(300)
    (ours, torchs), (to_torch, to_ours) = twins(values), twins(values)
    optimizers = mine([ours], **hyper), theirs([torchs], **hyper)
    others = theirs([to_torch], **hyper), mine([to_ours], **hyper)
    for _ in range(3):
        steps(*optimizers, count=2)
        for optimizer, other, source in zip(optimizers, others, (ours, torchs), strict=True):
            state = copy.deepcopy(optimizer.state_dict())
            if theirs is torch.optim.SGD and not state["state"].get(0):
                state["state"] = {}  # torch keeps a None
            other.load_state_dict(state)
            other.param_groups[0]["params"][0].data.copy_(source.detach())
        steps(*others, count=2)
        steps(*optimizers, count=2)
        torch.testing.assert_close(to_torch, torchs, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(to_ours, ours, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("make", [zo.SGD, torch.optim.SGD])
def test_offloaded_parameters_take_states_that_have_no_buffer_yet(make: type[Any]) -> None:
    """torch's SGD keeps None where it has made none."""
    torch.manual_seed(0)
    source, plain, away = (nn.Linear(8, 8, bias=False) for _ in range(3))
    for model in (plain, away):
        model.load_state_dict(source.state_dict())
    hyper = {"lr": 0.1, "momentum": 0.0, "dampening": 0.5}
    first = make(source.parameters(), **hyper)
    source(torch.ones(1, 8)).sum().backward()
    first.step()
    zo.offload(away, zo.OffloadConfig(precision="fp32"))
    optimizers = torch.optim.SGD(plain.parameters(), **hyper), zo.SGD(away.parameters(), **hyper)
    for model, optimizer in zip((plain, away), optimizers, strict=True):
        optimizer.load_state_dict(first.state_dict())
        for _ in range(2):
            model(torch.ones(1, 8)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    with zo.gathered(away) as values:
        torch.testing.assert_close(values["weight"].detach(), plain.weight.detach())


def test_the_arguments_are_torchs() -> None:
    """In torch's order, with torch's defaults."""
    for name in ("Adam", "AdamW", "Adagrad", "SGD"):
        mine, theirs = (inspect.signature(getattr(of, name)).parameters for of in (zo, torch.optim))
        positional = [key for key, each in theirs.items() if each.kind is each.POSITIONAL_OR_KEYWORD]
        assert [key for key, each in mine.items() if each.kind is each.POSITIONAL_OR_KEYWORD] == positional, name
        assert {key: each.default for key, each in mine.items()} == {
            key: each.default for key, each in theirs.items()
        }, name


def _trained(
    make: Callable[..., torch.optim.Optimizer], *, offloaded: bool, sign: float = 1.0, **settings: Any
) -> Tensor:
    """The weight after three steps."""
    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    if offloaded:
        zo.offload(model, zo.OffloadConfig(precision="fp32"))
    optimizer = make(model.parameters(), lr=0.05, **settings)
    for step in range(3):
        model(torch.arange(16.0).sin().view(2, 8) + step).square().sum().mul(sign).backward()
        optimizer.step()
        optimizer.zero_grad()
    with zo.gathered(model) if offloaded else nullcontext():
        return model.weight.detach().clone()


@pytest.mark.parametrize("offloaded", [False, True])
@pytest.mark.parametrize("kind", ["Adam", "AdamW", "Adagrad", "SGD"])
def test_arguments_of_torchs_loops_change_no_bit(kind: str, offloaded: bool) -> None:
    ours, theirs = getattr(zo, kind), getattr(torch.optim, kind)
    maximized = {"maximize": True, "weight_decay": 0.1}
    expected = _trained(ours, offloaded=offloaded, **maximized)
    loops = ["foreach", "fused", *(["capturable"] if "Adam" in kind else [])]
    for loop in loops:
        assert torch.equal(_trained(ours, offloaded=offloaded, **maximized, **{loop: True}), expected), loop
    assert torch.equal(expected, _trained(ours, offloaded=offloaded, weight_decay=0.1, sign=-1.0))
    plain = _trained(theirs, offloaded=False, **maximized)
    # Torch's own loops differ in the last bit from each other.
    torch.testing.assert_close(expected, plain, rtol=2e-6, atol=1e-7)


@pytest.mark.parametrize("kind", ["Adam", "AdamW", "Adagrad", "SGD"])
@pytest.mark.parametrize(
    "wrong",
    [
        {"lr": -1.0},
        {"lr": torch.ones(2)},
        {"weight_decay": -1.0},
        {"eps": -1.0},
        {"betas": (1.0, 0.5)},
        {"betas": (0.5, -0.1)},
        {"lr_decay": -1.0},
        {"initial_accumulator_value": -1.0},
        {"momentum": -1.0},
        {"nesterov": True},
        {"fused": True, "foreach": True},
        {"fused": True, "differentiable": True},
    ],
    ids=str,
)
def test_arguments_that_torch_refuses_raise_torchs_classes(kind: str, wrong: dict[str, Any]) -> None:
    param = nn.Parameter(torch.ones(2))
    if not {*wrong} <= {*inspect.signature(getattr(torch.optim, kind)).parameters}:
        return
    with pytest.raises((ValueError, RuntimeError)) as theirs:
        getattr(torch.optim, kind)([param], **wrong)
    with pytest.raises(zo.ConfigError) as ours:
        getattr(zo, kind)([param], **wrong)
    assert isinstance(ours.value, theirs.type)


def test_a_differentiable_step_raises_as_torchs() -> None:
    param = nn.Parameter(torch.ones(2))
    param.grad = torch.ones(2)
    for of in (torch.optim, zo):
        optimizer = of.AdamW([param], differentiable=True)
        with pytest.raises(RuntimeError):
            optimizer.step()
    assert torch.equal(param.detach(), torch.ones(2))


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (lambda p: zo.Adam(p, lr=-1, betas=(0.9, 1.5)), ["lr=-1", "betas[1]=1.5"]),
        (
            lambda p: zo.Adagrad(p, lr_decay=-1, initial_accumulator_value=-2, eps=-3),
            ["lr_decay=-1", "initial_accumulator_value=-2", "eps=-3"],
        ),
        (lambda p: zo.Lion(p, betas=(-0.1, 0.9), weight_decay=-1), ["betas[0]=-0.1", "weight_decay=-1"]),
        (lambda p: zo.SGD(p, momentum=-1), ["momentum=-1"]),
        (lambda p: zo.SGD(p, nesterov=True), ["nesterov", "momentum above 0"]),
        (lambda p: zo.SGD(p, momentum=0.9, dampening=0.1, nesterov=True), ["dampening=0"]),
    ],
)
def test_all_bad_hyperparameters_are_named(make: Callable[[Any], Any], names: Iterable[str]) -> None:
    with pytest.raises(zo.ConfigError) as error:
        make([nn.Parameter(torch.ones(1))])
    assert all(name in str(error.value) for name in names)


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [2, 4]),
    "ConstantLR": lambda o: lr_scheduler.ConstantLR(o, 0.5, 3),
    "LinearLR": lambda o: lr_scheduler.LinearLR(o, 0.1, 1.0, 5),
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: lr_scheduler.PolynomialLR(o, 6, 2.0),
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 1e-4, 1e-2, 2, cycle_momentum=False),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 1e-2, 10),
    "ReduceLROnPlateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, patience=1),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.1, 2), lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.1, 2), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
}


def test_every_scheduler_is_listed() -> None:
    classes = {
        name
        for name, each in vars(lr_scheduler).items()
        if inspect.isclass(each) and issubclass(each, lr_scheduler.LRScheduler) and not name.startswith("_")
    }
    assert classes - {"LRScheduler"} == set(SCHEDULERS)


@pytest.mark.parametrize("is_tensor", [False, True], ids=["float", "tensor"])
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_schedulers_do_what_they_do_to_torch(scheduler: str, is_tensor: bool) -> None:
    """On offloaded parameters too: `step` takes the learning rate of its moment."""
    torch.manual_seed(0)
    first, plain = nn.Linear(8, 8), nn.Linear(8, 8)
    plain.load_state_dict(first.state_dict())
    zo.offload(first, zo.OffloadConfig(precision="fp32"))
    lr: Any = torch.tensor(1e-2) if is_tensor else 1e-2
    optimizers = zo.AdamW(first.parameters(), lr), torch.optim.AdamW(plain.parameters(), copy.deepcopy(lr))
    schedulers = [SCHEDULERS[scheduler](optimizer) for optimizer in optimizers]
    for seed in range(8):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))
        for model, optimizer, each in zip((first, plain), optimizers, schedulers, strict=True):
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            each.step(*([loss.detach()] if scheduler == "ReduceLROnPlateau" else []))
        assert float(optimizers[0].param_groups[0]["lr"]) == float(optimizers[1].param_groups[0]["lr"])
    with zo.gathered(first) as values:
        torch.testing.assert_close(values["weight"].detach(), plain.weight.detach(), rtol=1e-5, atol=1e-6)
