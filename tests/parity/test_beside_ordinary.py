"""Parameters that are not offloaded, trained beside those that are: one norm, one loss scale, and what is refused."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zero_offload as zo
from tests.helpers.models import TinyLM, build, tokens_of
from tests.helpers.ranks import Failure, RankPool, read_params

NVME = {"params": "nvme", "grads": "nvme", "optimizer": "nvme"}


class Valued(nn.Module):
    """A model with a value head around it, which is not part of it."""

    def __init__(self, model: nn.Module | None = None) -> None:
        super().__init__()
        self.model = TinyLM() if model is None else model
        self.value = nn.Linear(1, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return (self.value(self.model(tokens).view(1, 1)) ** 2).sum()  # type: ignore[no-any-return]


def valued(**settings: Any) -> Valued:
    model = build(Valued)
    zo.offload(model.model, zo.OffloadConfig(precision="fp32", **settings))
    return model


def train(model: nn.Module, num_steps: int = 3) -> tuple[list[float], dict[str, Tensor]]:
    optimizer = zo.AdamW(model.parameters(), lr=1e-2)
    values = []
    for step in range(num_steps):
        loss = model(tokens_of(step))
        loss.backward()
        values += [loss.item(), zo.clip_grad_norm_(model, 0.5).item()]
        optimizer.step()
        optimizer.zero_grad()
        assert all(param.grad is None for param in model.parameters())
    offloaded = read_params(model.model)
    return values, offloaded | {name: param.detach().clone() for name, param in model.value.named_parameters()}


def test_one_norm_clips_both(nvme: Path) -> None:
    plain = build(Valued)
    expected = train_plainly(plain)
    found = train(valued())
    assert found[0] == pytest.approx(expected, rel=1e-6)
    torch.testing.assert_close(found[1]["weight"], plain.value.weight.detach(), rtol=1e-6, atol=1e-8)
    away = train(valued(nvme=nvme, **NVME))
    assert away[0] == found[0]
    assert all(torch.equal(away[1][name], values) for name, values in found[1].items())


def train_plainly(model: Valued) -> list[float]:
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-2, weight_decay=zo.AdamW([torch.zeros(1)]).defaults["weight_decay"]
    )
    values = []
    for step in range(3):
        loss = model(tokens_of(step))
        loss.backward()
        values += [loss.item(), nn.utils.clip_grad_norm_(model.parameters(), 0.5).item()]
        optimizer.step()
        optimizer.zero_grad()
    return values


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64])
def test_a_norm_over_two_offloaded_models_and_others(dtype: torch.dtype) -> None:
    """In double, whatever their dtype: torch's norm of a bf16 gradient has 8 bits."""
    models = [zo.offload(nn.Linear(4, 4), zo.OffloadConfig(precision="fp32")) for _ in range(2)]
    other, sparse = nn.Parameter(torch.ones(5, 7, dtype=dtype).t()), nn.Embedding(9, 2, sparse=True)
    sum(model(torch.ones(1, 4)).sum() for model in models).backward()  # type: ignore[union-attr]
    other.grad = torch.full_like(other, 3.0)
    sparse(torch.tensor([1, 1, 3])).sum().backward()
    params = [*models[0].parameters(), other, *sparse.parameters(), *models[1].parameters(), other]
    norm = math.sqrt(2 * (16 + 4) + 35 * 9 + 2 * (4 + 1))
    for max_norm in (math.inf, norm / 2):
        assert zo.clip_grad_norm_(iter(params), max_norm).item() == pytest.approx(norm, rel=1e-7)
    torch.testing.assert_close(other.grad, torch.full_like(other, 1.5), rtol=1e-6, atol=0)
    for model in models:
        with zo.gathered(model, kind="grads") as grads:
            torch.testing.assert_close(grads["weight"], torch.full((4, 4), 0.5), rtol=1e-6, atol=0)


def test_a_norm_that_is_not_finite_raises_before_anything_is_clipped() -> None:
    model = valued()
    model(tokens_of(0)).backward()
    assert model.value.bias.grad is not None
    model.value.bias.grad[0] = math.inf
    before = model.value.weight.grad.clone()  # type: ignore[union-attr]
    with pytest.raises(zo.NonFiniteError):
        zo.clip_grad_norm_(model, 1.0, error_if_nonfinite=True)
    assert torch.equal(model.value.weight.grad, before)  # type: ignore[arg-type]


@pytest.mark.parametrize("where", ["offloaded", "ordinary"])
def test_an_overflow_of_either_kind_skips_both(where: str) -> None:
    model = valued()
    optimizer, scaler = zo.AdamW(model.parameters(), lr=1e-2), zo.GradScaler(1024.0)
    before = read_params(model.model), [param.detach().clone() for param in model.value.parameters()]
    scaler.scale(model(tokens_of(0))).backward()
    if where == "ordinary":
        model.value.weight.grad.fill_(math.inf)  # type: ignore[union-attr]
    else:
        (model.model(tokens_of(0)) * math.inf).backward()
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad()
    assert scaler.get_scale() == 512.0
    after = read_params(model.model)
    assert all(torch.equal(after[name], values) for name, values in before[0].items())
    assert all(torch.equal(*pair) for pair in zip(before[1], model.value.parameters(), strict=True))
    scaler.scale(model(tokens_of(0))).backward()
    norm = zo.clip_grad_norm_(model, math.inf).item()
    scaler.unscale_(optimizer)
    assert zo.clip_grad_norm_(model, math.inf).item() == pytest.approx(norm / 512, rel=1e-6)
    scaler.step(optimizer)
    assert not torch.equal(model.value.weight, before[1][0])


# Several ranks


def norms_of_ranks(rank: int, world_size: int, settings: dict[str, Any], averages: bool) -> list[float]:
    model = valued(**settings)
    optimizer = zo.AdamW(model.parameters(), lr=1e-2)
    norms = []
    try:
        for step in range(2):
            model(tokens_of(2 * step + rank)).backward()
            for param in model.value.parameters() if averages else ():
                dist.all_reduce(param.grad)
                param.grad.div_(world_size)  # type: ignore[union-attr]
            if averages:
                norms.append(zo.clip_grad_norm_(model, 0.5).item())
            optimizer.step()
            optimizer.zero_grad()
        return norms
    finally:
        zo.close(model.model)


def norms_of_one(num_ranks: int) -> list[float]:
    model = build(Valued)
    optimizer = zo.AdamW(model.parameters(), lr=1e-2)
    norms = []
    for step in range(2):
        for rank in range(num_ranks):
            (model(tokens_of(2 * step + rank)) / num_ranks).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
    return norms


@pytest.mark.parametrize("stage", [1, 3])
def test_on_several_ranks_ordinary_gradients_count_once(stage: int, pool: RankPool) -> None:
    found = pool.succeed(norms_of_ranks, {"stage": stage}, True)
    assert found[0] == found[1]
    assert found[0] == pytest.approx(norms_of_one(2), rel=1e-6)


def test_ordinary_gradients_that_no_rank_reduces_are_refused(pool: RankPool) -> None:
    found = pool.call(norms_of_ranks, {}, False)
    assert all(isinstance(each, Failure) and each.kind == "ConfigError" for each in found)
    assert all("AdamW.step" in each.message and "differ between ranks" in each.message for each in found)


# Parameters that the model has got since


def test_a_parameter_that_came_after_offload_is_refused_wherever_it_is_first_seen(tmp_path: Path) -> None:
    model = zo.offload(build(TinyLM), zo.OffloadConfig(nvme=tmp_path / "nvme"))
    optimizer, whole = zo.AdamW(model.parameters()), zo.SGD([torch.zeros(1)], lr=0.1)
    model(tokens_of(0)).backward()
    model.blocks[1].adapter = nn.Linear(3, 3)
    torch_optimizer = torch.optim.SGD(model.blocks[1].adapter.parameters())
    words = r"2 trained parameters .*\(blocks\.1\.adapter\.weight, .*bias\).*zo\.offload\(model\) again"
    for call, see in {
        "AdamW": lambda: zo.AdamW(model.parameters()),
        "SGD": lambda: whole.add_param_group({"params": model.blocks[1].adapter.parameters()}),
        "zo.clip_grad_norm_": lambda: zo.clip_grad_norm_(model.parameters(), 1.0),
        "zo.clip_grad_value_": lambda: zo.clip_grad_value_(model, 1.0),
        "GradScaler.unscale_": lambda: zo.GradScaler().unscale_(torch_optimizer),
        "zo.commit": lambda: zo.commit(model, optimizer),
        "zo.save_checkpoint": lambda: zo.save_checkpoint(model, optimizer, tmp_path / "saved"),
    }.items():
        with pytest.raises(zo.ConfigError, match=f"^{call}: {words}"):
            see()
    assert len(whole.param_groups) == 1
    model.blocks[1].adapter.requires_grad_(False)
    optimizer.step()
    zo.commit(model, optimizer)
    zo.close(model)


def test_one_that_an_optimizer_had_before_it_came_into_the_model_is_refused_at_the_step() -> None:
    model, adapter = zo.offload(build(TinyLM), zo.OffloadConfig()), nn.Linear(3, 3)
    optimizer = zo.AdamW([*model.parameters(), *adapter.parameters()])
    model.blocks[1].adapter = adapter
    adapter(torch.ones(1, 3)).sum().backward()
    with pytest.raises(zo.ConfigError, match=r"^AdamW\.step: 2 trained parameters"):
        optimizer.step()
