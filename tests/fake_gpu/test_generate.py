"""Generation by transformers, and training of models of diffusers, on the fake GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import zero_offload as zo
from tests.fake_gpu import device
from tests.fake_gpu.device import TYPE
from tests.fake_gpu.test_inference import read_only
from tests.fake_gpu.training import SOME, Schedule

pytestmark = pytest.mark.tools


@pytest.mark.parametrize("schedule", SOME, ids=str)
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generation(cache: str, schedule: Schedule, nvme: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tools: Any = pytest.importorskip("tests.helpers.tools")
    how = {"do_sample": False, "min_new_tokens": 8, "max_new_tokens": 8, "cache_implementation": cache}
    tokens = torch.randint(3, 128, (2, 9), generator=torch.Generator().manual_seed(0))

    def build() -> Any:
        return tools.llama(num_hidden_layers=4, use_cache=True, attn_implementation="eager").eval()

    def written(model: Any, tokens: Tensor) -> list[list[int]]:
        found: Tensor = model.generate(tokens, attention_mask=torch.ones_like(tokens), **how)
        return found.tolist()

    expected = written(build(), tokens)
    device.policy(*schedule)
    for where in ("cpu", "nvme"):
        model = read_only(build(), where, nvme, "8MiB")
        assert written(model, tokens.to(TYPE)) == expected
        assert device.take_races() == []
        zo.close(model)


@pytest.mark.parametrize("schedule", SOME, ids=str)
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("name", ["flux", "ltx"])  # the device has no convolutions
def test_models_of_diffusers_train(name: str, lora: bool, schedule: Schedule, nvme: Path) -> None:
    """Parameters that leave the device have the bits of those that stay."""
    denoiser = pytest.importorskip("tests.helpers.diffusion").DENOISERS[name]

    def losses(**settings: Any) -> list[float]:
        model = denoiser.adapted() if lora else denoiser.build()
        model.enable_gradient_checkpointing()
        zo.offload(model, zo.OffloadConfig(precision="fp32", **settings))
        optimizer = zo.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-2)
        found = []
        for step in range(3):
            loss = denoiser.loss(model, 10 * step, TYPE)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.detach())
        zo.close(model)
        return [each.item() for each in found]

    expected = losses(params="device", optimizer="cpu")
    device.policy(*schedule)
    assert losses(params="nvme", optimizer="nvme", nvme=nvme, durability="scratch", device_memory="8MiB") == expected
    assert device.take_races() == [] and len(set(expected)) == 3
