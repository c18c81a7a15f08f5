"""`zo.GradScaler` on ordinary parameters is torch's, call by call; what torch only asserts is an error with a cure."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import zero_offload as zo
from tests.helpers.models import TinyLM, build, tokens_of

NUM_STEPS = 24
SETTINGS: dict[str, Any] = {"init_scale": 2.0**10, "growth_factor": 4.0, "backoff_factor": 0.3, "growth_interval": 3}
Scaler = Any


def torch_scaler(enabled: bool = True) -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", **SETTINGS, enabled=enabled)


def optimizers_of(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Of torch's, since their numbers must be equal: matrices and vectors apart."""
    params = list(model.parameters())
    groups = [p for p in params if p.dim() > 1], [p for p in params if p.dim() <= 1]
    return [torch.optim.AdamW(groups[0], lr=1e-2), torch.optim.SGD(groups[1], lr=1e-2)]


def run(scaler: Scaler, unscales: bool) -> list[Any]:
    """Two optimizers; overflows in one, in the other, in both; everything that can be seen after each step."""
    model, seen = build(TinyLM), []
    first, second = optimizers = optimizers_of(model)
    for step in range(NUM_STEPS):
        loss, (twice, _) = model(tokens_of(step)), scaler.scale((torch.ones(2), [torch.ones(1)]))
        scaler.scale(loss).backward()
        for number, optimizer in enumerate(optimizers):
            if step % 5 == number or step in (7, 8, 9):
                optimizer.param_groups[0]["params"][0].grad.view(-1)[3] = (torch.inf, torch.nan)[step % 2]
        if unscales and step % 2:
            scaler.unscale_(first)
            nn.utils.clip_grad_norm_(first.param_groups[0]["params"], 0.1)
        for optimizer in (first, second):
            scaler.step(optimizer)
            optimizer.zero_grad()
        scaler.update(2.0**7 if step == 15 else None)
        params = torch.cat([p.detach().reshape(-1) for p in model.parameters()]).tolist()
        seen.append([loss.item(), twice.tolist(), scaler.get_scale(), scaler.state_dict(), params])
    return seen


@pytest.mark.parametrize("unscales", [False, True])
def test_two_optimizers_train_as_with_torchs(unscales: bool) -> None:
    ours, theirs = run(zo.GradScaler(**SETTINGS), unscales), run(torch_scaler(), unscales)
    assert ours == theirs
    scales = [scale for _, _, scale, _, _ in ours]
    assert any(a < b for a, b in zip(scales, scales[1:], strict=False)) and min(scales) < 64


def test_states_go_both_ways() -> None:
    ours, theirs = zo.GradScaler(), torch_scaler()
    theirs.scale(torch.ones(()))
    ours.load_state_dict(theirs.state_dict())
    assert ours.state_dict() == theirs.state_dict() == json.loads(json.dumps(ours.state_dict()))
    back = torch.amp.GradScaler("cpu")
    back.load_state_dict(ours.state_dict())
    assert back.state_dict() == ours.state_dict()
    assert (ours.get_growth_factor(), ours.get_backoff_factor(), ours.get_growth_interval()) == (4.0, 0.3, 3)


def test_disabled_it_passes_through() -> None:
    scaler, model = zo.GradScaler(enabled=False), nn.Linear(2, 2)
    optimizer = zo.AdamW(model.parameters())
    loss = model(torch.ones(1, 2)).sum()
    assert scaler.scale(loss) is loss and not scaler.is_enabled() and scaler.get_scale() == 1.0
    loss.backward()
    grads = [param.grad for param in model.parameters()]
    scaler.unscale_(optimizer)
    assert scaler.step(optimizer, lambda: 7) == 7  # a closure, which is the optimizer's own affair
    scaler.update()
    assert all(param.grad is grad for param, grad in zip(model.parameters(), grads, strict=True))
    assert scaler.state_dict() == {}
    scaler.load_state_dict({"anything": 1})


def test_outputs_keep_their_shape_and_dtype() -> None:
    scaler = zo.GradScaler(8.0)
    assert scaler.scale(torch.ones(3, dtype=torch.float16)).tolist() == [8, 8, 8]
    assert scaler.scale(torch.ones(3, dtype=torch.float16)).dtype == torch.float16
    assert scaler.scale([torch.ones(()), (torch.ones(()),)]) == [torch.tensor(8.0), (torch.tensor(8.0),)]

    def outputs() -> Iterator[torch.Tensor]:
        yield from torch.ones(2)

    assert list(scaler.scale(outputs())) == [8, 8]
    with pytest.raises(zo.ConfigError, match="takes tensors, not int"):
        scaler.scale([1])  # type: ignore[list-item]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"init_scale": 0.0}, "init_scale=0.0 is not a positive"),
        ({"init_scale": 1e39}, "init_scale=1e\\+39 is not a positive fp32"),
        ({"growth_factor": 1.0}, "growth_factor=1.0 is not above 1"),
        ({"backoff_factor": 1.0}, "backoff_factor=1.0 is not between"),
        ({"growth_interval": 0}, "growth_interval=0 is not 1 or more"),
    ],
)
def test_settings_out_of_range(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(zo.ConfigError, match=words):
        zo.GradScaler(**settings)


def test_torchs_device_comes_first_or_not_at_all() -> None:
    for scaler in (
        zo.GradScaler("cuda", 4.0),
        zo.GradScaler("cuda", init_scale=4.0),
        zo.GradScaler(device="cuda", init_scale=4.0),
        zo.GradScaler(torch.device("cpu"), 4.0),
        zo.GradScaler(init_scale=4.0),
        zo.GradScaler(4),
    ):
        assert scaler.get_scale() == 4
    assert zo.GradScaler("cuda").get_scale() == torch_scaler_scale() == zo.GradScaler().get_scale()
    with pytest.raises(zo.ConfigError, match=r"GradScaler\(device='four'\)"):
        zo.GradScaler("four")
    with pytest.raises(zo.ConfigError, match=r"two scales; write GradScaler\(init_scale=4.0\)"):
        zo.GradScaler(4.0, 3.0)


def torch_scaler_scale() -> float:
    scale: float = torch.amp.GradScaler("cpu").get_scale()
    return scale


def _step_twice(scaler: zo.GradScaler, optimizer: zo.AdamW) -> None:
    scaler.step(optimizer)
    scaler.step(optimizer)


def _unscale_twice(scaler: zo.GradScaler, optimizer: zo.AdamW) -> None:
    scaler.unscale_(optimizer)
    scaler.unscale_(optimizer)


def _unscale_after_step(scaler: zo.GradScaler, optimizer: zo.AdamW) -> None:
    scaler.step(optimizer)
    scaler.unscale_(optimizer)


def _save_too_early(scaler: zo.GradScaler, optimizer: zo.AdamW) -> None:
    scaler.step(optimizer)
    scaler.state_dict()


MISUSES: list[tuple[Callable[[zo.GradScaler, zo.AdamW], Any], str]] = [
    (_step_twice, "stepped already; call scaler.update"),
    (_unscale_twice, "unscaled already; call scaler.update"),
    (_unscale_after_step, "stepped already; call scaler.update"),
    (_save_too_early, "between scaler.step.. and scaler.update"),
    (lambda scaler, optimizer: scaler.update(), "follows no scaler.step"),
    (lambda scaler, optimizer: scaler.step(optimizer, closure=lambda: 1), "takes no closure"),
    (lambda scaler, optimizer: scaler.step(optimizer, lambda: 1), "takes no closure"),
    (lambda scaler, optimizer: scaler.load_state_dict({}), "state is empty"),
]


@pytest.mark.parametrize(("misuse", "words"), MISUSES, ids=[words for _, words in MISUSES])
def test_what_would_go_wrong_later_raises(misuse: Callable[[zo.GradScaler, zo.AdamW], Any], words: str) -> None:
    param = nn.Parameter(torch.ones(2))
    param.grad = torch.ones(2)
    with pytest.raises(zo.ZeroOffloadError, match=words):
        misuse(zo.GradScaler(), zo.AdamW([param]))


def test_gradients_of_ordinary_fp16_parameters_are_refused() -> None:
    param = nn.Parameter(torch.ones(2, dtype=torch.float16))
    param.grad = torch.ones(2, dtype=torch.float16)
    with pytest.raises(zo.ConfigError, match="ordinary fp16 parameter.*precision='fp16'"):
        zo.GradScaler().step(zo.AdamW([param]))


def test_sparse_gradients_are_unscaled_too() -> None:
    embedding = nn.Embedding(5, 2, sparse=True)
    scaler, optimizer = zo.GradScaler(4.0), torch.optim.SGD(embedding.parameters(), lr=1.0)
    nn.init.zeros_(embedding.weight)
    scaler.scale(embedding(torch.tensor([1, 1, 3])).sum()).backward()
    scaler.step(optimizer)
    assert torch.equal(-embedding.weight, torch.tensor([0.0, 2, 0, 1, 0])[:, None].expand(5, 2))


def test_a_gradient_that_no_scale_helps_ends_the_run() -> None:
    param, scaler = nn.Parameter(torch.ones(2)), zo.GradScaler(2.0**-140)
    optimizer = zo.AdamW([param])
    with pytest.raises(zo.NonFiniteError, match="no scale helps"):
        for _ in range(20):
            param.grad = torch.full((2,), torch.nan)
            scaler.step(optimizer)
            scaler.update()
    assert scaler.get_scale() == 2.0**-149 and torch.equal(param.detach(), torch.ones(2))


def test_the_scale_stops_growing_at_the_largest_number() -> None:
    param, scaler = nn.Parameter(torch.ones(2)), zo.GradScaler(2.0**126, growth_interval=1)
    optimizer = zo.AdamW([param])
    for _ in range(4):
        param.grad = torch.ones(2)
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 2.0**127
