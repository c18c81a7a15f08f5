"""`zo.Muon` over a model that a GPU computes has the bits of the host."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

import zero_offload as zo
from tests.fake_gpu import device
from tests.fake_gpu.device import LATE, Policy
from tests.fake_gpu.test_unitwise import PLACEMENTS
from tests.helpers.models import TinyLM, build, tokens_of
from zero_offload.optim import muon

pytestmark = pytest.mark.usefixtures("late")


def train(config: zo.OffloadConfig) -> tuple[list[float], dict[str, Any]]:
    model: Any = build(TinyLM)
    zo.offload(model, config)
    optimizer: Any = zo.Muon(model.parameters(), lr=0.02, adamw={"lr": 3e-3})
    assert [len(group["params"]) for group in optimizer.param_groups] == [6, 15]
    losses = []
    for step in range(3):
        loss = model(tokens_of(step))
        loss.backward()
        losses.append(loss.item())
        zo.clip_grad_norm_(model, 0.5)
        optimizer.step()
        optimizer.zero_grad()
    with zo.gathered(model, kind="master") as masters:
        found = {name: value.to("cpu", copy=True) for name, value in masters.items()}
    zo.close(model)
    return losses, found


@pytest.mark.parametrize(
    ("precision", "placement", "policy"),
    [*zip(itertools.cycle(["fp32", "bf16", "fp16"]), PLACEMENTS, itertools.cycle(LATE))],
    ids=str,
)
def test_the_bits_of_the_host(precision: str, placement: Any, policy: Policy, tmp_path: Path) -> None:
    params, grads, optimizer = placement
    with device.on_host():
        losses, expected = train(zo.OffloadConfig(precision=precision))
    device.policy(policy, 1)
    places: dict[str, Any] = {"params": params, "grads": grads, "optimizer": optimizer, "nvme": tmp_path}
    found = train(zo.OffloadConfig(precision=precision, durability="scratch", **places))
    assert found[0] == losses
    assert [name for name, value in expected.items() if not torch.equal(found[1][name], value)] == []


def test_all_of_a_step_is_made_on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where parameters and states rest in host memory: a section goes up once for both kinds."""
    model: Any = zo.offload(build(TinyLM), zo.OffloadConfig(params="cpu", optimizer="cpu", precision="fp32"))
    optimizer = zo.Muon(model.parameters())
    seen = []
    for name in ("torch_muon", "update_dense"):
        real = getattr(muon, name)

        def noting(first: Any, *args: Any, real: Any = real, **settings: Any) -> None:
            seen.extend(each.device.type for each in (first if isinstance(first, list) else [first]))
            real(first, *args, **settings)

        monkeypatch.setattr(muon, name, noting)
    model(tokens_of(0)).backward()
    optimizer.step()
    assert seen == [device.TYPE] * 21
    assert optimizer.state[model.norm.weight]["step"].device.type == "cpu", "a count on a GPU would be waited for"
    zo.close(model)
