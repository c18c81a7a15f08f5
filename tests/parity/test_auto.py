"""Tiers that a simulation chose train as any others, and `zo.plan` says how fast."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import zero_offload as zo
from tests.helpers.models import VOCAB, TinyLM

TOKENS = torch.arange(2 * 9).reshape(2, 9) * 5 % VOCAB


def trained(**settings: Any) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = TinyLM()
    zo.offload(model, zo.OffloadConfig(precision="fp32", **settings))
    optimizer = zo.AdamW(model.parameters(), lr=1e-2)
    for _ in range(3):
        model(TOKENS).backward()
        zo.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    values = [value.clone() for value in model.state_dict().values()]
    zo.close(model)
    return values


AUTO = {"params": "auto", "grads": "auto", "optimizer": "auto"}


def test_less_than_anything_needs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(zo.CapacityError, match="would fit: cpu_memory of at least 459 KiB"):
        trained(nvme=tmp_path, cpu_memory="100KiB", **AUTO)


@pytest.mark.parametrize("budget", ["1MiB", "80MiB", None])
def test_what_auto_chooses_trains_with_the_same_bits(tmp_path: Path, budget: str | None) -> None:
    """1 MiB holds the model, and not the buffers of an update on a drive."""
    room = {} if budget is None else {"cpu_memory": budget}
    for mine, plain in zip(trained(nvme=tmp_path, **AUTO, **room), trained(), strict=True):
        assert torch.equal(mine, plain)


def test_a_plan_predicts_a_step_of_models_on_meta_too(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = TinyLM(num_blocks=6)
    config = zo.OffloadConfig(params="nvme", optimizer="nvme", nvme=tmp_path)
    few, many = (zo.plan(model, config, tokens=tokens) for tokens in (256, 65536))
    assert 0 < few.predicted_step_s < many.predicted_step_s
    assert many.bottleneck == "compute"
    assert f"predicted step: {many.predicted_step_s:.3g} s, bound by compute\nrates: defaults for a CPU" in many.table()
    with pytest.raises(zo.ConfigError, match="tokens=0"):
        zo.plan(model, config, tokens=0)


def test_what_recompute_costs_is_in_the_plan() -> None:
    model, marked = TinyLM(), TinyLM()
    zo.checkpoint(marked.blocks)
    plain, recomputed = (zo.plan(each, zo.OffloadConfig(), tokens=65536) for each in (model, marked))
    assert 1.1 < recomputed.predicted_step_s / plain.predicted_step_s < 4 / 3
