"""A scaled loss on an offloaded model: what the update divides by, what an overflow leaves alone, what is resumed."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zero_offload as zo
from tests.helpers.models import TinyLM, build, tokens_of
from tests.helpers.reference import param_groups, placed, read_masters

PLACEMENTS = [("cpu", "cpu", "cpu"), ("nvme", "cpu", "nvme"), ("device", "device", "cpu"), ("nvme", "nvme", "nvme")]
SMALL = 2.0**10


def offloaded(precision: str = "fp16", **settings: Any) -> tuple[nn.Module, zo.AdamW]:
    model = zo.offload(build(TinyLM), zo.OffloadConfig(precision=precision, **settings))
    return model, zo.AdamW(param_groups(model), lr=1e-2)


def backward(model: nn.Module, scaler: zo.GradScaler, seed: int, factor: float = 1.0) -> float:
    """`factor` infinite is an overflow."""
    loss = model(tokens_of(seed))
    scaler.scale(loss * factor).backward()
    return loss.item()


def states(model: nn.Module, optimizer: zo.AdamW) -> dict[str, torch.Tensor]:
    """Masters, moments and step counts."""
    found = read_masters(model)
    for index, state in optimizer.state_dict()["state"].items():
        found |= {f"{index}.{name}": value for name, value in state.items()}
    return found


def same(mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    return list(mine) == list(theirs) and all(torch.equal(mine[name], theirs[name]) for name in mine)


@pytest.fixture(autouse=True)
def no_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "zo.commit keeps nothing")  # runs that others are compared with
        yield


# The update divides


def scaled(model: nn.Module, optimizer: zo.AdamW, scale: float) -> Iterator[float]:
    scaler = zo.GradScaler(scale, growth_interval=2, enabled=scale != 1)
    for step in range(6):
        for seed in (2 * step, 2 * step + 1):
            yield backward(model, scaler, seed)
        if step % 3:
            scaler.unscale_(optimizer)
            yield zo.clip_grad_norm_(model, 0.5).item()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
def test_a_power_of_two_changes_no_bit(placement: tuple[str, str, str], precision: str, nvme: Path) -> None:
    """Where nothing overflows: norms, clipping, accumulation, and a scale that grows on the way."""

    found = []
    for scale in (1.0, SMALL):
        model = zo.offload(build(TinyLM), placed(precision, placement, nvme))
        optimizer = zo.AdamW(param_groups(model), lr=1e-2)
        found.append((list(scaled(model, optimizer, scale)), states(model, optimizer)))
        zo.close(model)
    assert found[0][0] == found[1][0] and same(found[0][1], found[1][1])


def test_clipping_without_unscaling_clips_the_scaled_norm() -> None:
    norms, found = [], []
    for unscales in (True, False):
        model, optimizer = offloaded("fp32")
        scaler = zo.GradScaler(SMALL)
        backward(model, scaler, 0)
        if unscales:
            scaler.unscale_(optimizer)
        norms.append(zo.clip_grad_norm_(model, 1.0 if unscales else SMALL).item())
        scaler.step(optimizer)
        found.append(read_masters(model))
    assert norms[1] == norms[0] * SMALL > SMALL
    # As torch adds its 1e-6 to a norm that is 1024 times larger, the factors differ by a rounding.
    for name, master in found[0].items():
        torch.testing.assert_close(found[1][name], master, rtol=1e-5, atol=1e-6)


def test_gathered_gradients_are_unscaled_with_unscale() -> None:
    (plain, _), (model, optimizer) = offloaded("fp32"), offloaded("fp32")
    scaler = zo.GradScaler(SMALL)
    plain(tokens_of(0)).backward()
    backward(model, scaler, 0)
    with zo.gathered(plain, kind="grads") as expected, zo.gathered(model, kind="grads") as found:
        assert all(torch.equal(found[name], expected[name] * SMALL) for name in expected)
    scaler.unscale_(optimizer)
    with zo.gathered(model, kind="grads") as found:
        assert same(found, expected)


def test_a_backward_after_unscale_raises_until_the_gradients_are_gone() -> None:
    model, optimizer = offloaded()
    scaler = zo.GradScaler(SMALL)
    backward(model, scaler, 0)
    scaler.unscale_(optimizer)
    with pytest.raises(zo.ZeroOffloadError, match="unscaled.*zero_grad"):
        backward(model, scaler, 1)
    with pytest.warns(UserWarning, match="left behind|broke off|dropped"):
        model(tokens_of(1))
    optimizer.zero_grad()
    scaler.update()
    backward(model, scaler, 1)
    assert zo.clip_grad_norm_(model, 1e9) > SMALL, "nothing is divided yet"


def test_grad_in_memory_is_not_shown_once_the_step_divides() -> None:
    """Then `.grad` stands for what the step makes of it."""
    model, optimizer = offloaded("fp32", grads="device")
    scaler, param = zo.GradScaler(SMALL), next(model.parameters())
    backward(model, scaler, 0)
    before, scaled = param.grad.clone(), param.grad.norm().item()
    scaler.unscale_(optimizer)
    assert param.grad.norm().item() == pytest.approx(scaled / SMALL)
    assert torch.equal(param.grad.clone(), before / SMALL)
    scaler.step(optimizer)
    assert param.grad is None


# Overflows


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
def test_an_overflow_changes_nothing_but_the_scale(placement: tuple[str, str, str], precision: str, nvme: Path) -> None:
    model = zo.offload(build(TinyLM), placed(precision, placement, nvme))
    optimizer, scaler = zo.AdamW(param_groups(model), lr=1e-2), zo.GradScaler(SMALL, growth_interval=100)
    for step, factor in enumerate((1.0, math.inf, math.nan, 1.0)):
        before = states(model, optimizer)
        backward(model, scaler, step, factor)
        scaler.step(optimizer)
        scaler.update()
        assert same(states(model, optimizer), before) == (factor != 1)
    stats = zo.stats(model)
    assert (stats.step, stats.skipped_steps, scaler.get_scale()) == (4, 2, SMALL / 4)


class Mixed(nn.Module):
    """An offloaded body under a head that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 8)


@pytest.mark.parametrize("overflow", ["head", "body"])
def test_one_optimizer_of_offloaded_and_ordinary_parameters(overflow: str) -> None:
    """A step that overflows in one part is skipped in both; otherwise both learn as they do unscaled."""
    results = []
    for scaler in (zo.GradScaler(SMALL), zo.GradScaler(enabled=False)):
        model = build(Mixed)
        zo.offload(model.body, zo.OffloadConfig(precision="fp32"))
        optimizer = zo.AdamW(model.parameters(), lr=1e-2)
        for step in range(3):
            overflows = step == 1 and scaler.is_enabled()
            hidden = model.body(torch.full((2, 8), 0.1 + step))
            scales = {name: math.inf if overflows and name == overflow else 1.0 for name in ("head", "body")}
            losses = [model.head(hidden.detach()).sum() * scales["head"], (hidden * hidden).sum() * scales["body"]]
            if step == 1 and not scaler.is_enabled():
                continue
            scaler.scale(losses[0]).backward()
            scaler.scale(losses[1]).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        results.append(read_masters(model.body) | {n: p.detach().clone() for n, p in model.head.named_parameters()})
        assert zo.stats(model.body).skipped_steps == scaler.is_enabled()
    assert same(*results)


@pytest.mark.parametrize("overflow", [0, 1])
def test_one_optimizer_of_two_models(overflow: int) -> None:
    models = [zo.offload(build(TinyLM, seed), zo.OffloadConfig(precision="fp32")) for seed in (0, 1)]
    optimizer = zo.AdamW([param for model in models for param in model.parameters()])
    scaler, before = zo.GradScaler(SMALL), [read_masters(model) for model in models]
    for number, model in enumerate(models):
        backward(model, scaler, 0, math.inf if number == overflow else 1.0)
    scaler.step(optimizer)
    scaler.update()
    assert all(same(read_masters(model), old) for model, old in zip(models, before, strict=True))
    assert [zo.stats(model).skipped_steps for model in models] == [1, 1] and scaler.get_scale() == SMALL / 2
    for model in models:
        backward(model, scaler, 0)
    scaler.step(optimizer)
    assert not any(same(read_masters(model), old) for model, old in zip(models, before, strict=True))


def two_optimizers(model: nn.Module, scaler: zo.GradScaler, factors: list[float]) -> None:
    """Matrices and vectors, each with an optimizer."""
    optimizers = [zo.AdamW(group["params"], lr=1e-2) for group in param_groups(model)]
    for step, factor in enumerate(factors):
        backward(model, scaler, step, factor)
        if step % 2:
            scaler.unscale_(optimizers[0])
            zo.clip_grad_norm_(model, 0.5)
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()


def test_two_optimizers_of_one_model() -> None:
    """Divided once for both; an overflow anywhere in the model is one skipped step."""
    (one, _), (two, _) = offloaded("fp32"), offloaded("fp32")
    two_optimizers(one, zo.GradScaler(enabled=False), [1.0] * 4)
    two_optimizers(two, zo.GradScaler(SMALL), [1.0] * 4)
    assert same(read_masters(one), read_masters(two))
    before, scaler = read_masters(two), zo.GradScaler(SMALL)
    two_optimizers(two, scaler, [math.inf])
    assert same(read_masters(two), before)
    assert zo.stats(two).skipped_steps == 1 and scaler.get_scale() == SMALL / 2


def test_a_scaler_without_gradients_does_no_step() -> None:
    model, optimizer = offloaded()
    scaler = zo.GradScaler(SMALL)
    scaler.step(optimizer)
    scaler.update()
    assert zo.stats(model).step == 0
    backward(model, scaler, 0)
    assert zo.clip_grad_norm_(model, 1e9) > SMALL, "nothing of the empty step is left"


# torch's own


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("grads", ["cpu", "device", "nvme"])
def test_torchs_scaler_steps_as_ours(grads: str, precision: str, nvme: Path) -> None:
    """Clipping between, an overflow on the way, and a scale that grows. torch's leaves an overflow's step out."""
    if (grads, precision) == ("device", "fp16"):
        pytest.skip("torch's scaler takes no fp16 gradients, and these are the gradients themselves")
    found = []
    for scaler in (torch.amp.GradScaler("cpu", SMALL, growth_interval=2), zo.GradScaler(SMALL, growth_interval=2)):
        model, optimizer = offloaded(precision, grads=grads, nvme=nvme / type(scaler).__module__)
        scales = []
        for step, factor in enumerate((1.0, 1.0, math.inf, 1.0)):
            scaler.scale(model(tokens_of(step)) * factor).backward()
            if step % 2:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_value_(model.parameters(), 0.01)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scales.append(scaler.get_scale())
        found.append((scales, states(model, optimizer)))
        zo.close(model)
    assert found[0][0] == found[1][0] == [SMALL, 2 * SMALL, SMALL, SMALL] and same(found[0][1], found[1][1])


def test_torchs_scaler_without_gradients_raises_as_it_does() -> None:
    _model, optimizer = offloaded()
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    with pytest.raises(AssertionError, match="No inf checks"):
        scaler.step(optimizer)


def test_torchs_scaler_steps_zo_adamw_on_ordinary_parameters() -> None:
    found = []
    for scaler in (torch.amp.GradScaler("cpu", SMALL), zo.GradScaler(SMALL)):
        model = build(TinyLM)
        optimizer = zo.AdamW(model.parameters())
        scaler.scale(model(tokens_of(0))).backward()
        scaler.step(optimizer)
        found.append({name: param.detach() for name, param in model.named_parameters()})
    assert same(*found)


# Saved and resumed


def run(model: nn.Module, optimizer: zo.AdamW, scaler: zo.GradScaler, span: range) -> list[tuple[float, float, float]]:
    """Starts with overflows, goes on through growth and another one."""
    seen = []
    for step in span:
        loss = backward(model, scaler, step)
        scaler.unscale_(optimizer)
        norm = zo.clip_grad_norm_(model, 0.5).item()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        zo.commit(model, optimizer, extra=step + 1)
        seen.append((loss, norm if math.isfinite(norm) else -1.0, scaler.get_scale()))
    return seen


def new_scaler(scale: float = 2.0**18) -> zo.GradScaler:
    return zo.GradScaler(scale, growth_interval=3)


@pytest.mark.parametrize("optimizer_tier", ["cpu", "nvme"])
@pytest.mark.parametrize("stop", [2, 5, 13])
def test_a_closed_run_resumes_exactly(stop: int, optimizer_tier: str, nvme: Path) -> None:
    settings = {"optimizer": optimizer_tier, "nvme": nvme, "existing": "resume"}
    whole_model, whole_optimizer = offloaded()
    whole = run(whole_model, whole_optimizer, new_scaler(), range(20))
    assert len({scale for _, _, scale in whole}) > 3
    model, optimizer = offloaded(**settings)
    before = run(model, optimizer, new_scaler(), range(stop))
    zo.close(model)
    model, optimizer = offloaded(**settings)
    scaler = zo.GradScaler()
    resumed = zo.resume(model, optimizer, scaler)
    assert resumed is not None and (resumed.step, resumed.extra) == (stop, stop)
    assert before + run(model, optimizer, scaler, range(stop, 20)) == whole
    assert same(states(model, optimizer), states(whole_model, whole_optimizer))
    zo.close(model)


def test_a_checkpoint_carries_the_scale(tmp_path: Path) -> None:
    model, optimizer = offloaded()
    scaler = new_scaler()
    run(model, optimizer, scaler, range(5))
    zo.save_checkpoint(model, optimizer, tmp_path / "saved")
    other, its_optimizer = offloaded(optimizer="nvme", nvme=tmp_path / "nvme")
    its_scaler = zo.GradScaler()
    zo.load_checkpoint(other, its_optimizer, tmp_path / "saved", its_scaler)
    assert its_scaler.state_dict() == scaler.state_dict()
    assert run(model, optimizer, scaler, range(5, 12)) == run(other, its_optimizer, its_scaler, range(5, 12))
    with pytest.warns(UserWarning, match="saved has a loss scale of .*scaler="):
        zo.load_checkpoint(other, its_optimizer, tmp_path / "saved")
    with pytest.warns(UserWarning, match="a resume goes on from the generation committed last"):
        zo.close(other)


def test_a_scale_that_is_not_asked_for_is_named_and_none_is_no_error(nvme: Path) -> None:
    settings = {"nvme": nvme, "existing": "resume"}
    model, optimizer = offloaded("bf16", **settings)
    run(model, optimizer, zo.GradScaler(enabled=False), range(2))
    zo.close(model)
    model, optimizer = offloaded("bf16", **settings)
    scaler = zo.GradScaler(SMALL)
    zo.resume(model, optimizer, scaler)
    assert scaler.get_scale() == SMALL, "the run had none"
    run(model, optimizer, scaler, range(2, 4))
    zo.close(model)
    model, optimizer = offloaded("bf16", **settings)
    with pytest.warns(UserWarning, match="generation of step 4 has a loss scale of 1024.*scaler="):
        zo.resume(model, optimizer)


def test_a_commit_between_step_and_update_raises(tmp_path: Path) -> None:
    model, optimizer = offloaded()
    scaler = zo.GradScaler(SMALL)
    backward(model, scaler, 0)
    scaler.step(optimizer)
    with pytest.raises(zo.ZeroOffloadError, match="call scaler.update.. before zo.commit"):
        zo.commit(model, optimizer)
    with pytest.raises(zo.ZeroOffloadError, match="call scaler.update.. before zo.commit"):
        zo.save_checkpoint(model, optimizer, tmp_path / "saved")
    scaler.update()
    zo.commit(model, optimizer)
