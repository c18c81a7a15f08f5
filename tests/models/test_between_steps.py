"""A parameter at rest is read and changed like any tensor: on every tier, with the bits of a plain program."""

from __future__ import annotations

import copy
import gc
import io
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize
from torch.optim import swa_utils

import zero_offload as zo
from tests.helpers.between_steps import CHANGES, Offloaded, Pair, Plain, program, run
from tests.helpers.models import NARROW, TinyLM, build, tokens_of
from tests.helpers.pairwise import full, in_turn
from tests.helpers.reference import read_masters
from zero_offload.model.api import runtime_of
from zero_offload.standins.away import Away


def settings_of(tier: str, nvme: Path) -> dict[str, Any]:
    if tier == "nvme":
        return {"params": "nvme", "optimizer": "nvme", "nvme": nvme}
    return {"params": "cpu", "nvme": nvme}


def lm(tier: str, nvme: Path, **settings: Any) -> TinyLM:
    config = zo.OffloadConfig(**{"precision": "fp32", **settings_of(tier, nvme), **settings})
    return zo.offload(build(TinyLM), config)


SEEDS = [0, 1, *(full(seed) for seed in range(2, 30))]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_a_random_program(tier: str, precision: str, seed: int, nvme: Path) -> None:
    calls = program(seed, 12, precision=precision)
    plain = Plain(precision)
    expected = run(plain, calls)
    twin = Offloaded({"precision": precision, **settings_of(tier, nvme)})
    assert run(twin, calls) == expected
    masters, found = plain.masters(), twin.masters()
    assert all(torch.equal(found[name], masters[name]) for name in masters)
    zo.close(twin.model)


@in_turn(tier=["cpu", "nvme"], change=list(CHANGES))
def test_a_change_is_in_the_next_step_and_its_generation(tier: str, change: str, nvme: Path) -> None:
    calls = [("step", 0), ("change", change), ("step", 1), ("change", change), ("resume", 2), ("step", 3), ("read", 0)]
    twin = Offloaded({"precision": "fp32", **settings_of(tier, nvme)})
    assert run(twin, calls) == run(Plain("fp32"), calls)
    zo.close(twin.model)


def test_small_changes_in_16_bits_are_made_on_the_masters(nvme: Path) -> None:
    twin = Offloaded({"precision": "bf16", **settings_of("nvme", nvme)})
    masters = twin.masters()
    with torch.no_grad():
        for _ in range(1000):
            for param in twin.model.student.parameters():
                param.mul_(0.9999)
            for name, master in masters.items():
                master.mul_(0.9999 if "student" in name else 1.0)
        for _ in range(100):
            for t, s in zip(twin.model.teacher.parameters(), twin.model.student.parameters(), strict=True):
                t.lerp_(s, 0.001)
            for name in [name for name in masters if "teacher" in name]:
                masters[name].lerp_(masters[name.replace("teacher", "student")], 0.001)
    found = twin.masters()
    assert all(torch.equal(found[name], masters[name]) for name in masters)
    zo.close(twin.model)


def test_a_frozen_parameter_in_16_bits_rounds_and_one_warning_says_so() -> None:
    config = zo.OffloadConfig(precision="bf16")
    student, teacher = nn.Linear(8, 8), nn.Linear(8, 8).requires_grad_(False)
    expected = teacher.weight.detach().bfloat16()
    zo.offload(student, config)
    zo.offload(teacher, config)
    masters = read_masters(student)["weight"]
    with torch.no_grad():
        teacher.weight.copy_(expected)
        with pytest.warns(UserWarning, match=r"weight is changed in place.*torch.bfloat16.*modules=") as warned:
            for _ in range(3):
                teacher.weight.lerp_(student.weight, 0.01)
                teacher.bias.mul_(0.9)
                expected.copy_(expected.float().lerp_(masters, 0.01))
    assert len(warned) == 1
    assert torch.equal(teacher.weight.clone(), expected)


@pytest.mark.parametrize("is_gathered", [False, True])
@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_a_teacher_follows_a_student_of_another_model(tier: str, is_gathered: bool, nvme: Path, tmp_path: Path) -> None:
    student, teacher = build(TinyLM), build(TinyLM, 1).requires_grad_(False)
    plain_student, plain_teacher = copy.deepcopy(student), copy.deepcopy(teacher)
    zo.offload(student, zo.OffloadConfig(precision="fp32", **settings_of(tier, nvme)))
    zo.offload(teacher, zo.OffloadConfig(precision="fp32", **settings_of(tier, tmp_path / "teacher")))

    def follow(teacher: nn.Module, student: nn.Module) -> None:
        for t, s in zip(teacher.parameters(), student.parameters(), strict=True):
            t.mul_(0.9).add_(s, alpha=0.1)
            t.data.lerp_(s.data, 0.5)
            t.add_(s.detach().clone())

    with torch.no_grad():
        follow(plain_teacher, plain_student)
        if is_gathered:
            with zo.gathered(student), zo.gathered(teacher, mode="write"):
                follow(teacher, student)
        else:
            follow(teacher, student)
    found = read_masters(teacher)
    assert all(torch.equal(found[name], param) for name, param in plain_teacher.named_parameters())
    zo.close(student)
    zo.close(teacher)


@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_an_averaged_model_is_an_ordinary_one(tier: str, nvme: Path) -> None:
    averages = []
    for offloaded in (False, True):
        model = lm(tier, nvme) if offloaded else build(TinyLM)
        optimizer = zo.AdamW(model.parameters(), lr=1e-2)
        average = swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9))
        for step in range(3):
            model(tokens_of(step)).backward()
            optimizer.step()
            optimizer.zero_grad()
            average.update_parameters(model)
        averages.append(average)
    plain, found = averages
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), found.parameters(), strict=True))
    assert found(tokens_of(5)).item() == plain(tokens_of(5)).item()
    zo.close(model)


# Reading


@pytest.fixture
def live(monkeypatch: pytest.MonkeyPatch) -> Callable[[nn.Module], list[int]]:
    """Watches a model; a list of how many copies lived at each read."""

    def watch(model: nn.Module) -> list[int]:
        access, counts = runtime_of(model).access, []
        known: list[weakref.ref[Any]] = []
        read = access.read_value

        def counted(*args: Any, **kwargs: Any) -> Tensor:
            values = read(*args, **kwargs)
            known.append(weakref.ref(values.untyped_storage()))
            counts.append(sum(each() is not None for each in known))
            return values

        monkeypatch.setattr(access, "read_value", counted)
        return counts

    return watch


def test_a_loop_holds_one_parameter_at_a_time(live: Callable[[nn.Module], list[int]], nvme: Path) -> None:
    model = lm("nvme", nvme, durability="scratch")
    plain = build(TinyLM)
    counts = live(model)
    params = list(model.parameters())

    def penalty(model: nn.Module) -> Tensor:
        return sum((param.square().sum() + param.norm() for param in model.parameters()), torch.zeros(()))

    assert sum(float(p.detach().sum()) for p in params) == sum(float(p.detach().sum()) for p in plain.parameters())
    with torch.no_grad():
        norms, expected = torch._foreach_norm(params), torch._foreach_norm(list(plain.parameters()))
        assert all(torch.equal(a, b) for a, b in zip(norms, expected, strict=True))
        torch._foreach_mul_(params, 0.5)
        torch._foreach_mul_(list(plain.parameters()), 0.5)
    loss, twin = penalty(model), penalty(plain)
    assert torch.equal(loss, twin)
    before = len(counts)
    loss.backward()
    twin.backward()
    assert len(counts) > before and max(counts) <= 2
    assert all(unit.state.value == "away" for unit in runtime_of(model).units)
    with zo.gathered(model, kind="grads") as grads:
        assert all(torch.equal(grads[name], param.grad) for name, param in plain.named_parameters())
    zo.close(model)


@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_autograd_outside_of_forward_is_torchs(tier: str, nvme: Path) -> None:
    model, plain = lm(tier, nvme), build(TinyLM)
    for each in (model, plain):
        each.blocks[0].up.weight.register_hook(lambda grad: grad * 2)
    found = []
    for each in (model, plain):
        weight, bias = each.blocks[0].up.weight, each.blocks[0].up.bias
        view = weight.t()[1:].reshape(-1, NARROW)
        (first,) = torch.autograd.grad((view.exp() * bias.sum()).sum(), weight, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), [weight])
        loss = F.linear(torch.ones(2, NARROW), weight, bias).sum() + F.normalize(weight, dim=1).tanh().sum()
        loss.backward()
        found.append([first, second, loss])
    with zo.gathered(model, kind="grads") as grads:
        found[0] += [grads["blocks.0.up.weight"], grads["blocks.0.up.bias"]]
    found[1] += [plain.blocks[0].up.weight.grad, plain.blocks[0].up.bias.grad]
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    zo.close(model)


@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_what_autograd_saved_must_be_what_it_was(tier: str, nvme: Path) -> None:
    model = lm(tier, nvme)
    optimizer = zo.SGD(model.parameters(), lr=0.1)
    weight = model.blocks[0].up.weight
    loss = weight.square().sum()
    version = weight._version
    with torch.no_grad():
        weight.mul_(2.0)
    assert weight._version > version
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    loss = weight.square().sum()
    model(tokens_of(0)).backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    zo.close(model)


@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_a_leaf_is_not_changed_where_autograd_records(tier: str, nvme: Path) -> None:
    model = lm(tier, nvme)
    before = read_masters(model)
    weight = model.blocks[0].up.weight
    for change in (lambda w: w.mul_(2), lambda w: w[0].zero_(), lambda w: w.view(-1).add_(1)):
        with pytest.raises(RuntimeError, match="leaf"):
            change(weight)
    weight.requires_grad_(False)
    with pytest.raises(zo.ZeroOffloadError, match=r"up\.weight.*no_grad"):
        weight.add_(torch.ones(4 * NARROW, NARROW, requires_grad=True))
    found = read_masters(model)
    assert all(torch.equal(found[name], before[name]) for name in before)
    zo.close(model)


@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_a_change_of_a_detached_view_by_what_is_recorded(tier: str, nvme: Path) -> None:
    """As peft merges: `weight.data += delta`, of trained factors."""
    model, plain = lm(tier, nvme), build(TinyLM)
    grads = []
    for each in (model, plain):
        delta = torch.ones(4 * NARROW, NARROW, requires_grad=True)
        weight = each.blocks[0].up.weight
        weight.data += delta
        view = weight.detach()
        view.mul_(delta * 2).sum().backward()
        assert delta.grad is not None
        grads.append(delta.grad)
    assert torch.equal(*grads) and torch.equal(read_masters(model)["blocks.0.up.weight"], weight)
    view = model.blocks[0].up.weight.detach()
    view.mul_(delta)
    with pytest.raises(zo.ZeroOffloadError, match=r"view of parameter blocks\.0\.up\.weight.*no_grad"):
        view.sum()
    with torch.no_grad():
        view.sum()
    zo.close(model)


def test_a_change_of_form_raises_and_changes_nothing(nvme: Path) -> None:
    model = lm("nvme", nvme)
    weight = model.blocks[0].up.weight
    before = weight.detach().clone()
    changes: list[Callable[[Any], Any]] = [
        Tensor.t_,
        lambda w: w.unsqueeze_(0),
        lambda w: w.resize_(3),
        lambda w: setattr(w, "data", torch.zeros(4 * NARROW, NARROW, dtype=torch.float64)),
        lambda w: setattr(w.data, "data", torch.zeros(4 * NARROW, NARROW)),
        lambda w: w.data.requires_grad_(),
        lambda w: w.share_memory_(),
    ]
    for change in changes:
        with torch.no_grad(), pytest.raises(zo.ZeroOffloadError, match=r"blocks\.0\.up\.weight"):
            change(weight)
    assert torch.equal(weight, before) and weight.shape == before.shape
    zo.close(model)


@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_arrays_are_for_reading_and_views_follow(tier: str, nvme: Path) -> None:
    model = lm(tier, nvme)
    optimizer = zo.SGD(model.parameters(), lr=0.1)
    weight = model.blocks[0].up.weight
    views = [weight.data, weight.detach(), weight.data[3:5], weight.detach().t()]
    arrays = [weight.detach().numpy(), np.asarray(weight.data), np.from_dlpack(weight.data), weight.data[1:].numpy()]
    if tier == "cpu":
        arrays.pop(2)  # a view of memory
    for array in arrays:
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1.0
    model(tokens_of(0)).backward()
    optimizer.step()
    with torch.no_grad():
        weight[3] = 0.25
        views[3][:, 4] = 0.5
    now = read_masters(model)["blocks.0.up.weight"]
    assert (now[3] == 0.25).all() and (now[4] == 0.5).all()
    for view, expected in zip(views, (now, now, now[3:5], now.t()), strict=True):
        assert torch.equal(view, expected)
    zo.close(model)


@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_a_view_from_before_an_assignment_to_data_raises(tier: str, nvme: Path) -> None:
    """In plain torch it keeps the old values, as averages of weights have it that come and go by `.data`."""
    model = lm(tier, nvme)
    weight, other = model.blocks[0].up.weight, model.blocks[1].up.weight
    before, copies = weight.data.clone(), {"view": weight.data, "row": weight.detach()[0]}
    weight.data = torch.zeros(weight.shape)
    for kept in copies.values():
        for use in (torch.sum, lambda kept: kept[0], lambda kept: other.detach().flatten()[0] + kept.flatten()[0]):
            with pytest.raises(zo.ZeroOffloadError, match=r"up\.weight is from before an assignment.*clone"):
                use(kept)
    with pytest.raises(zo.ZeroOffloadError, match="from before an assignment"):
        weight.data = copies["view"]
    view = weight.data
    other.data = torch.ones(weight.shape)
    weight.data = before
    with pytest.raises(zo.ZeroOffloadError, match="from before an assignment"):
        other.data = view
    weight.data = weight.data
    assert torch.equal(weight.data, before)
    zo.close(model)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_values_of_another_parameter_are_no_memory_to_assign(tier: str, precision: str, nvme: Path) -> None:
    """Plain torch makes one parameter of both: a step of one would change the other."""
    model, teacher = (lm(tier, nvme / name, precision=precision) for name in ("student", "teacher"))
    mine, twin = model.blocks[0].up.weight, model.blocks[1].up.weight
    theirs = teacher.blocks[0].up.weight
    before = mine.detach().clone()
    for values in (theirs, theirs.data, theirs.detach(), twin.data, twin.data.t().t()):
        for assign in (lambda p, values: setattr(p, "data", values), lambda p, values: p.set_(values)):
            with pytest.raises(zo.ZeroOffloadError, match=r"one memory.*\.data\.clone\(\)"):
                assign(mine, values)
    assert torch.equal(mine, before)
    mine.data = twin.data.clone()
    assert torch.equal(mine, twin)
    theirs.data.copy_(mine)
    assert torch.equal(theirs, twin)
    mine.data = mine.data.flip(0)
    assert torch.equal(mine, twin.flip(0))
    for each in (model, teacher):
        zo.close(each)


class Halved(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x / 2


@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_a_parametrization_is_removed(tier: str, nvme: Path) -> None:
    """It gives the parameter other memory by `set_`: here other values."""
    layer = nn.Linear(4, 4)
    expected = layer.weight.detach() / 2
    parametrize.register_parametrization(layer, "weight", Halved())
    model = zo.offload(nn.Sequential(layer), zo.OffloadConfig(precision="fp32", **settings_of(tier, nvme)))
    parametrize.remove_parametrizations(layer, "weight")
    assert torch.equal(model.state_dict()["0.weight"], expected)
    with pytest.raises(zo.ZeroOffloadError):
        layer.weight.set_()
    assert torch.equal(model.state_dict()["0.weight"], expected)
    zo.close(model)


def test_a_function_that_draws_draws_once(nvme: Path) -> None:
    model, plain = lm("nvme", nvme), build(TinyLM)
    found = []
    for each in (model, plain):
        weight = each.blocks[0].up.weight
        torch.manual_seed(5)
        with torch.no_grad():
            found.append([F.gumbel_softmax(weight), F.dropout(weight), F.rrelu(weight, training=True), torch.rand(2)])
            F.dropout(weight, inplace=True)
        found[-1].append(weight.detach().clone())
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    zo.close(model)


def test_a_parameter_is_saved_and_copied_by_itself(nvme: Path) -> None:
    model, plain = lm("nvme", nvme), build(TinyLM)
    weight, expected = model.blocks[0].up.weight, plain.blocks[0].up.weight
    file = io.BytesIO()
    torch.save({"param": weight, "view": weight.data[1]}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    assert type(saved["param"]) is nn.Parameter and torch.equal(saved["param"], expected)
    assert torch.equal(saved["view"], expected[1]) and type(saved["view"]) is Tensor
    copied = copy.deepcopy(weight)
    assert type(copied) is nn.Parameter and copied.requires_grad and torch.equal(copied, expected)
    assert isinstance(copy.copy(weight.data), Away) and type(copy.deepcopy(weight.data)) is Tensor
    zo.close(model)


def test_a_change_inside_of_forward_is_refused(nvme: Path) -> None:
    class Changes(Pair):
        def forward(self, x: Tensor) -> Tensor:
            kept.mul_(0.5)
            return super().forward(x)

    model = zo.offload(build(Changes), zo.OffloadConfig(precision="fp32", **settings_of("nvme", nvme)))
    kept = model.teacher[0].weight.data
    before = kept.clone()
    with pytest.raises(zo.ZeroOffloadError, match=r"mul_ changes parameter teacher\.0\.weight.*forward"):
        model(torch.ones(1, 8))
    assert torch.equal(kept, before)
    zo.close(model)


def test_a_copy_goes_with_its_last_user(nvme: Path) -> None:
    model = lm("nvme", nvme)
    runtime = runtime_of(model)
    copies = []
    read = runtime.access.read_value

    def counted(*args: Any, **kwargs: Any) -> Tensor:
        values = read(*args, **kwargs)
        copies.append(weakref.ref(values))
        return values

    runtime.access.read_value = counted  # type: ignore[method-assign]
    gc.disable()
    try:
        result = model.embedding.weight.exp()
        model.embedding.weight.detach().mul_(1.0)
        assert all(each() is None for each in copies) and len(copies) == 2
        array = model.embedding.weight.detach().numpy()
        assert result.requires_grad and array.shape == result.shape
    finally:
        gc.enable()
    zo.close(model)


@pytest.fixture(autouse=True)
def no_leftovers() -> Iterator[None]:
    yield
    gc.collect()
