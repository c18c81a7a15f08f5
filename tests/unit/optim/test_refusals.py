"""Values that no update and no load can take are refused before anything changes, on ordinary parameters too."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import zero_offload as zo

MAKERS: list[Callable[[Any], Any]] = [zo.AdamW, zo.Adam, zo.Adagrad, zo.Lion, lambda p: zo.SGD(p, momentum=0.9)]


def with_grad(values: Tensor, grad: Tensor | None = None) -> nn.Parameter:
    param = nn.Parameter(values)
    param.grad = torch.ones_like(values) if grad is None else grad
    return param


def linear(*, away: bool) -> nn.Linear:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    return zo.offload(model, zo.OffloadConfig(precision="fp32")) if away else model


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, 4)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


# Steps


@pytest.mark.parametrize("make", MAKERS)
def test_states_of_another_size_are_not_written_past_their_end(make: Callable[[Any], Any]) -> None:
    first, param = with_grad(torch.zeros(3)), with_grad(torch.zeros(4))
    optimizer = make([first, param])
    optimizer.step()
    before = first.detach().clone()
    param.data = torch.zeros(20000)
    param.grad = torch.ones(20000)
    with pytest.raises(zo.ConfigError, match=r"has shape \(4,\), the parameter \(20000,\)"):
        optimizer.step()
    assert torch.equal(first.detach(), before) and not param.any()


def test_a_gradient_of_another_size() -> None:
    param = with_grad(torch.zeros(4))
    optimizer = zo.SGD([param])
    param.data = torch.zeros(20000)
    with pytest.raises(zo.ConfigError, match=r"gradient has shape \(4,\)"):
        optimizer.step()


def sparse_grad() -> nn.Parameter:
    return with_grad(torch.zeros(2, 2), torch.ones(2, 2).to_sparse())


def double_grad() -> nn.Parameter:
    param = nn.Parameter(torch.zeros(2))
    param.grad_dtype = None  # any
    param.grad = torch.ones(2, dtype=torch.float64)
    return param


@pytest.mark.parametrize(
    ("bad", "words"), [(sparse_grad, "sparse"), (double_grad, "not torch.float64")], ids=["sparse", "float64"]
)
@pytest.mark.parametrize("make", MAKERS)
def test_one_bad_gradient_leaves_every_parameter(
    make: Callable[[Any], Any], bad: Callable[[], nn.Parameter], words: str
) -> None:
    good = with_grad(torch.zeros(3))
    optimizer = make([good, bad()])
    with pytest.raises(zo.ConfigError, match=words):
        optimizer.step()
    assert not good.any() and not optimizer.state


def test_a_step_inside_of_backward_leaves_ordinary_parameters() -> None:
    model, ordinary = linear(away=True), with_grad(torch.zeros(3))
    optimizer = zo.SGD([*model.parameters(), ordinary], lr=1.0)
    x = torch.ones(2, 4, requires_grad=True)
    x.register_hook(lambda _: optimizer.step())
    with pytest.raises(zo.ZeroOffloadError, match="inside of backward"):
        model(x).sum().backward()
    assert not ordinary.any()


@pytest.mark.parametrize("numel", [1, 40])
def test_a_negated_view_is_a_gradient_like_others(numel: int) -> None:
    """torch keeps the sign of such a view beside its memory, which is what a kernel sees."""
    param = with_grad(torch.zeros(numel), torch._neg_view(torch.ones(numel)))
    zo.SGD([param], lr=1.0).step()
    assert torch.equal(param.detach(), torch.ones(numel))


class Conjugated(nn.Module):
    """Its one weight's gradient comes from autograd as a negated view."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, factor: Tensor) -> Tensor:
        y = torch.complex(torch.ones_like(self.weight), self.weight).conj()
        return (torch.view_as_real(y.resolve_conj()) * factor).sum()


def test_a_negated_view_of_an_offloaded_parameter() -> None:
    plain = Conjugated()
    plain(torch.tensor([[0.0, 2.25]])).backward()
    assert plain.weight.grad is not None and plain.weight.grad.is_neg()
    torch.optim.SGD(plain.parameters(), lr=1.0).step()
    model = zo.offload(Conjugated(), zo.OffloadConfig(precision="fp32"))
    optimizer = zo.SGD(model.parameters(), lr=1.0)
    model(torch.tensor([[0.0, 2.25]])).backward()
    optimizer.step()
    with zo.gathered(model) as values:
        assert torch.equal(values["weight"], plain.weight.detach())


def test_lion_without_a_kernel_shows_a_nan() -> None:
    for dtype in (torch.float32, torch.float64):
        param = with_grad(torch.ones(2, dtype=dtype), torch.tensor([torch.nan, 1.0], dtype=dtype))
        zo.Lion([param]).step()
        assert param.isnan().tolist() == [True, False]


def test_unscaling_what_is_refused_divides_nothing() -> None:
    params = [with_grad(torch.ones(2)), with_grad(torch.ones(2, dtype=torch.float16))]
    scaler, optimizer = zo.GradScaler(4.0), torch.optim.SGD(params)
    for _ in range(2):
        with pytest.raises(zo.ConfigError, match="fp16"):
            scaler.unscale_(optimizer)
        assert all((param.grad == 1).all() for param in params if param.grad is not None)


# State dicts


@pytest.mark.parametrize("away", [False, True], ids=["ordinary", "offloaded"])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda given: given["state"][1].update(exp_avg=torch.ones(2)), r"parameter 1: exp_avg has shape \(2,\)"),
        (lambda given: given["state"][1].update(exp_avg_sq=torch.ones(1)), r"exp_avg_sq has shape \(1,\)"),
        (lambda given: given["state"][0].update(exp_avg=torch.ones(4, 3)), r"parameter 0: exp_avg has shape \(4, 3\)"),
        (lambda given: given["param_groups"][0].update(lr=-1.0), "lr=-1.0 is negative"),
    ],
    ids=["size", "one element", "transposed", "lr"],
)
def test_a_state_dict_that_does_not_fit_is_taken_in_no_part(
    away: bool, change: Callable[[dict[str, Any]], None], words: str
) -> None:
    model = linear(away=away)
    optimizer = zo.AdamW(model.parameters(), lr=0.1)
    train(model, optimizer)
    before = copy.deepcopy(optimizer.state_dict())
    given = copy.deepcopy(before)
    given["param_groups"][0]["lr"] = 0.5
    given["state"][0]["exp_avg"] = torch.full((3, 4), 9.0)
    change(given)
    with pytest.raises(zo.ConfigError, match=words):
        optimizer.load_state_dict(given)
    after = optimizer.state_dict()
    assert after["param_groups"] == before["param_groups"]
    for index, entry in before["state"].items():
        assert all(torch.equal(after["state"][index][name], entry[name]) for name in entry)


@pytest.mark.parametrize("make", [zo.AdamW, lambda p: zo.SGD(p, 0.1, momentum=0.9), zo.Lion])
def test_loading_a_state_without_entries_takes_those_there_away(make: Callable[[Any], Any]) -> None:
    """A dict from before the first step is the beginning, whatever has happened since."""
    results = []
    for away in (False, True):
        model = linear(away=away)
        optimizer = make(model.parameters())
        first = copy.deepcopy(optimizer.state_dict())
        for _ in range(3):
            train(model, optimizer)
        optimizer.load_state_dict(first)
        assert optimizer.state_dict()["state"] == {}
        for _ in range(2):
            train(model, optimizer)
        results.append([value.clone() for value in model.state_dict().values()])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_a_state_that_a_dict_does_not_have_begins_at_zero() -> None:
    model = linear(away=True)
    optimizer = zo.AdamW(model.parameters(), amsgrad=True)
    train(model, optimizer)
    given = optimizer.state_dict()
    for entry in given["state"].values():
        assert entry.pop("max_exp_avg_sq").any()
    optimizer.load_state_dict(given)
    assert not any(entry["max_exp_avg_sq"].any() for entry in optimizer.state_dict()["state"].values())


@pytest.mark.parametrize("away", [False, True], ids=["ordinary", "offloaded"])
def test_options_that_a_dict_does_not_name_were_off(away: bool) -> None:
    """Dicts of older versions of torch, and of other libraries."""
    model = linear(away=away)
    optimizer = zo.AdamW(model.parameters(), amsgrad=True)
    given = zo.AdamW([nn.Parameter(torch.ones(1)), nn.Parameter(torch.ones(1))], lr=0.5).state_dict()
    for name in ("amsgrad", "maximize"):
        del given["param_groups"][0][name]
    optimizer.load_state_dict(given)
    group = optimizer.param_groups[0]
    assert (group["lr"], group["amsgrad"], group["maximize"]) == (0.5, False, False)
    train(model, optimizer)


@pytest.mark.parametrize("amsgrad", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_adam_follows_a_dict_whose_decay_is_decoupled(dtype: torch.dtype, amsgrad: bool) -> None:
    params = [with_grad(torch.full((3,), 2.0, dtype=dtype)) for _ in range(4)]
    options: dict[str, Any] = {"weight_decay": 0.5, "lr": 0.1, "amsgrad": amsgrad}
    makers = (torch.optim.AdamW, zo.Adam, torch.optim.Adam, zo.AdamW)
    optimizers = [make([param], **options) for make, param in zip(makers, params, strict=True)]
    for optimizer in optimizers[1:3]:
        optimizer.load_state_dict(optimizers[0].state_dict())
    for optimizer in optimizers:
        optimizer.step()
    for param in params[1:]:
        torch.testing.assert_close(param, params[0], rtol=1e-6, atol=0)


@pytest.mark.parametrize("away", [False, True], ids=["ordinary", "offloaded"])
def test_hooks_change_what_is_loaded(away: bool) -> None:
    model = linear(away=away)
    optimizer = zo.Lion(model.parameters())
    train(model, optimizer)

    def change(_: Any, given: dict[str, Any]) -> dict[str, Any]:
        given = copy.deepcopy(given)
        given["state"][0]["exp_avg"].fill_(42.0)
        return given

    optimizer.register_load_state_dict_pre_hook(change)
    optimizer.load_state_dict(optimizer.state_dict())
    assert (optimizer.state_dict()["state"][0]["exp_avg"] == 42).all()


@pytest.mark.parametrize("away", [False, True], ids=["ordinary", "offloaded"])
def test_parameters_are_known_by_their_place_and_not_by_their_number(away: bool) -> None:
    model = linear(away=away)
    optimizer = zo.Lion(model.parameters())
    train(model, optimizer)
    given = copy.deepcopy(optimizer.state_dict())
    states = {index: entry["exp_avg"].clone() for index, entry in given["state"].items()}
    given["param_groups"][0]["params"] = ["w", "b"]
    given["state"] = {"w": given["state"][0], "b": given["state"][1]}
    train(model, optimizer)
    optimizer.load_state_dict(given)
    after = optimizer.state_dict()["state"]
    assert after.keys() == states.keys() == {0, 1}
    assert all(torch.equal(after[index]["exp_avg"], states[index]) for index in states)


def test_a_refused_optimizer_leaves_the_states_of_the_running_one() -> None:
    model = zo.offload(nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 3)), zo.OffloadConfig(precision="fp32"))
    optimizer = zo.AdamW(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    before = copy.deepcopy(optimizer.state_dict()["state"])
    first, second = ({"params": list(part.parameters())} for part in model)
    with pytest.raises(zo.ConfigError, match="negative"):
        zo.AdamW([first, second | {"lr": -1.0}])
    after = optimizer.state_dict()["state"]
    assert before.keys() == after.keys() != set()
    assert all(torch.equal(after[key]["exp_avg"], before[key]["exp_avg"]) for key in before)


def test_a_step_that_offloaded_parameters_refuse_leaves_ordinary_ones() -> None:
    frozen = nn.Linear(4, 3)
    frozen.bias.requires_grad_(False)
    model = zo.offload(frozen, zo.OffloadConfig(precision="fp32"))
    param = with_grad(torch.ones(3))
    optimizer = zo.AdamW([*model.parameters(), param])
    with torch._C.DisableTorchFunctionSubclass():
        model.bias.requires_grad = True  # where no guard sees it
    with pytest.raises(zo.ConfigError, match="was frozen"):
        optimizer.step()
    assert torch.equal(param, torch.ones(3)) and param not in optimizer.state


@pytest.mark.parametrize("value", [np.float32(1e-2), torch.tensor(1e-2), 1e-2], ids=["numpy", "torch", "python"])
def test_learning_rates_that_are_kept(value: Any, nvme: Path) -> None:
    model = zo.offload(nn.Linear(4, 3), zo.OffloadConfig(precision="fp32", nvme=nvme))
    optimizer = zo.AdamW(model.parameters(), lr=value, betas=(np.float64(0.9), 0.99))
    for _ in range(2):
        train(model, optimizer)
        zo.commit(model, optimizer)
    zo.close(model)


def test_what_no_generation_can_keep_is_said_before_the_step(tmp_path: Path) -> None:
    """Without a directory for generations a group has what the program likes, as in torch."""
    for where, num_steps in (({}, 1), ({"nvme": tmp_path}, 0)):
        model = zo.offload(nn.Linear(4, 3), zo.OffloadConfig(precision="fp32", **where))
        optimizer = zo.AdamW(model.parameters())
        optimizer.param_groups[0]["tags"] = {"a"}
        model(torch.ones(2, 4)).sum().backward()
        with nullcontext() if num_steps else pytest.raises(zo.ConfigError, match="'tags' is a set"):
            optimizer.step()
        assert zo.stats(model).step == num_steps
        with pytest.raises(zo.ConfigError, match="'tags' is a set"):
            zo.save_checkpoint(model, optimizer, tmp_path / "saved")


@pytest.mark.parametrize("away", [False, True])
def test_a_learning_rate_is_a_number_or_a_tensor_with_one_element(away: bool, tmp_path: Path) -> None:
    found = []
    for lr in (0.5, torch.tensor(0.5), torch.tensor([0.5]), torch.tensor([[0.5]])):
        torch.manual_seed(0)
        model = nn.Linear(4, 3)
        if away:
            zo.offload(model, zo.OffloadConfig(precision="fp32", nvme=tmp_path / str(len(found))))
        optimizer = zo.AdamW(model.parameters(), lr=lr)
        for _ in range(2):
            loss = model(torch.ones(2, 4)).sum()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
    assert found == found[:2] * 4
    with pytest.raises(zo.ConfigError, match="lr is a tensor of 2 elements; use"):
        zo.AdamW(model.parameters(), lr=torch.tensor([0.5, 0.25]))
    optimizer.param_groups[0]["lr"] = "fast"
    model(torch.ones(2, 4)).sum().backward()
    with pytest.raises(zo.ConfigError, match="lr is 'fast', not a finite number; use"):
        optimizer.step()


def test_a_complex_sum_begins_as_torchs_does() -> None:
    kinds = zo.Adagrad, torch.optim.Adagrad
    params = [nn.Parameter(torch.tensor([1.0 + 2.0j, -3.0 + 0.5j])) for _ in range(2)]
    optimizers = [kind([p], initial_accumulator_value=0.1) for kind, p in zip(kinds, params, strict=True)]
    for _ in range(2):
        for param, optimizer in zip(params, optimizers, strict=True):
            param.grad = torch.tensor([0.5 - 1.0j, 2.0 + 0.25j])
            optimizer.step()
    assert torch.equal(params[0], params[1])
    assert torch.equal(optimizers[0].state[params[0]]["sum"], optimizers[1].state[params[1]]["sum"])


def test_a_norm_that_is_not_finite_multiplies_nothing_where_it_raises() -> None:
    model, plain = linear(away=True), linear(away=False)
    twins = [(model, zo.AdamW(model.parameters())), (plain, zo.AdamW(plain.parameters()))]
    for each, optimizer in twins:
        each(torch.tensor([[float("inf"), 1.0, 1.0, 1.0]])).sum().backward()
        with pytest.raises((zo.NonFiniteError, RuntimeError)):
            zo.clip_grad_norm_(each, 1.0, error_if_nonfinite=True)
        each.weight.grad = None
        optimizer.step()
    with zo.gathered(model, kind="master") as masters:
        assert torch.equal(masters["bias"], plain.bias)


@pytest.mark.parametrize("params", ["cpu", "nvme"])
def test_a_backward_through_values_that_were_replaced(params: str, nvme: Path) -> None:
    settings = {"params": params, "optimizer": params, "nvme": nvme, "durability": "scratch"}
    model = zo.offload(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 3)), zo.OffloadConfig(precision="fp32", **settings))
    loss = model(torch.ones(2, 4)).square().sum()
    model.load_state_dict(model.state_dict())
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_checkpoint_that_is_refused_leaves_gradients(tmp_path: Path) -> None:
    model = linear(away=True)
    optimizer = zo.AdamW(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    with pytest.raises(zo.CheckpointError):
        zo.load_checkpoint(model, optimizer, tmp_path / "nowhere")
    optimizer.step()
    assert zo.stats(model).step == 1


def test_a_master_of_another_shape_is_not_written() -> None:
    model = zo.offload(nn.Linear(4, 4), zo.OffloadConfig(precision="fp32"))
    with zo.gathered(model, kind="master") as masters:
        before = masters["weight"].clone()
    with (
        pytest.raises(zo.ConfigError, match="nothing is written"),
        zo.gathered(model, mode="write", kind="master") as masters,
    ):
        masters["weight"] = torch.zeros(1)
    with zo.gathered(model, kind="master") as masters:
        assert torch.equal(masters["weight"], before)


def test_fp16_values_follow_loaded_masters_where_they_are_present(nvme: Path) -> None:
    settings = {"params": "nvme", "optimizer": "nvme", "nvme": nvme, "durability": "scratch", "precision": "fp16"}
    model = zo.offload(nn.Linear(4, 3), zo.OffloadConfig(**settings))
    optimizer = zo.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(2, 4).half()).float().sum().backward()
    optimizer.step()
    model(torch.ones(2, 4).half())  # its values are here
    state = optimizer.state_dict()
    state["state"][0]["master"].fill_(2.0)
    optimizer.load_state_dict(state)
    with zo.gathered(model) as values:
        assert torch.equal(values["weight"], torch.full((3, 4), 2.0).half())
    assert torch.equal(
        model(torch.zeros(1, 4).half() + 1)[0].sub(model.state_dict()["bias"]), torch.full((3,), 8.0).half()
    )
