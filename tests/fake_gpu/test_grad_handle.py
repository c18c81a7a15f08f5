"""`.grad` of a GPU's gradients that rest on the host. torch's clipping waits for the device once, not once for each
parameter, and torch's scaler works.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zero_offload as zo
from tests.fake_gpu import device
from tests.fake_gpu.device import TYPE, Policy
from tests.fake_gpu.test_counts import make, waits
from tests.helpers.models import Branching, TinyLM, build, tokens_of
from tests.helpers.ranks import RankPool, RankPools
from tests.helpers.reference import read_masters

POLICIES = [Policy.LATE, Policy.SIDE_LATE]
SCALE = 2.0**8


def counted_steps(num_blocks: int, **settings: Any) -> Iterator[dict[str, Counter[str]]]:
    model = zo.offload(make()[-num_blocks:], zo.OffloadConfig(precision="fp32", **settings))
    optimizer = zo.AdamW(model.parameters(), lr=1e-2)
    for _ in range(3):
        found: dict[str, Counter[str]] = {}
        model(torch.ones(4, 64, device=TYPE)).square().mean().backward()
        with device.counting() as found["clip"]:
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with device.counting() as found["step"]:
            optimizer.step()
        assert norm.device.type == TYPE and norm.item() > 0
        yield found
    zo.close(model)


@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_clipping_waits_as_often_for_many_parameters_as_for_few(policy: Policy) -> None:
    """For the sums, and for the factor in the step."""
    device.policy(policy, 0)
    *_, few = counted_steps(2)
    *_, many = counted_steps(7)
    assert waits(few["clip"]) == waits(many["clip"]) <= 2
    assert few["clip"]["uploads"] == many["clip"]["uploads"] == 1 and many["clip"]["downloads"] == 0
    # The update waits for each section's gradients by itself.
    assert few["step"]["stream_syncs"] == many["step"]["stream_syncs"] == many["step"]["downloads"] == 1
    assert many["step"]["items"] == 0


def train(scaler: Any, clip: Any, **settings: Any) -> tuple[list[float], list[float], dict[str, torch.Tensor]]:
    model = zo.offload(build(TinyLM), zo.OffloadConfig(existing="discard", **settings))
    optimizer, norms, scales = zo.AdamW(model.parameters(), lr=1e-3), [], []
    for step, factor in enumerate((1.0, 1.0, math.inf, 1.0, 1.0)):
        for micro in range(1 + step % 2):
            scaler.scale(model(tokens_of(2 * step + micro).to(TYPE)) * factor).backward()
        scaler.unscale_(optimizer)
        norm = clip(model.parameters(), 0.5).item()
        norms.append(norm if math.isfinite(norm) else -1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        scales.append(scaler.get_scale())
    masters = read_masters(model)
    zo.close(model)
    return norms, scales, masters


@pytest.mark.parametrize("precision", ["fp16", "fp32"])
@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_torchs_scaler_and_clip_on_every_tier(policy: Policy, precision: str, nvme: Path) -> None:
    """The same bits wherever gradients rest, and with either scaler; our clip to a rounding of its norm."""
    device.policy(policy, 0)
    found = []
    for grads in ("cpu", "nvme"):
        settings = {"precision": precision, "grads": grads, "nvme": nvme, "params": "cpu"}
        for scaler in (torch.amp.GradScaler(TYPE, SCALE, growth_interval=2), zo.GradScaler(SCALE, growth_interval=2)):
            found.append(train(scaler, nn.utils.clip_grad_norm_, **settings))
    (norms, scales, masters), *others = found
    assert scales == [SCALE, 2 * SCALE, SCALE, SCALE, 2 * SCALE]
    for other_norms, other_scales, other in others:
        assert (other_norms, other_scales) == (norms, scales)
        assert all(torch.equal(other[name], master) for name, master in masters.items())
    ours = train(zo.GradScaler(SCALE, growth_interval=2), zo.clip_grad_norm_, **settings)
    assert ours[0] == pytest.approx(norms, rel=1e-6)
    for name, master in masters.items():
        torch.testing.assert_close(ours[2][name].cpu(), master.cpu(), rtol=1.2e-7, atol=2e-7)


def clip_on_ranks(rank: int, world_size: int, stage: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    device.reset(rank)
    device.policy(Policy.SIDE_LATE, 0)
    model = zo.offload(build(TinyLM), zo.OffloadConfig(precision="fp32", stage=stage))
    optimizer, norms = zo.AdamW(model.parameters(), lr=1e-3), []
    for step in range(2):
        model(tokens_of(2 * step + rank).to(TYPE)).backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
        optimizer.step()
        optimizer.zero_grad()
    with zo.gathered(model) as params:
        found = {name: param.detach().cpu().clone() for name, param in params.items()}
    zo.close(model)
    assert device.take_races() == []
    return norms, found


@pytest.mark.parametrize("stage", [1, 3])
def test_ranks_clip_alike(stage: int, pools: RankPools) -> None:
    """The first look at a norm is collective: the host has not waited for sums in backward."""
    pool: RankPool = pools.of(2, on_device=True)
    (norms, params), (other_norms, other) = pool.succeed(clip_on_ranks, stage)
    assert norms == other_norms and all(torch.equal(other[name], value) for name, value in params.items())


@pytest.mark.parametrize("policy", [Policy.SIDE_EARLY, Policy.SIDE_LATE, Policy.RANDOM], ids=str)
def test_clipping_on_one_stream_is_seen_on_another(policy: Policy) -> None:
    """Norms and factors that one stream has made are read by another, and their memory is not given out before."""
    device.policy(policy, 1)
    model = zo.offload(build(TinyLM), zo.OffloadConfig(precision="fp32"))
    optimizer, side = zo.AdamW(model.parameters(), lr=1e-3), torch.Stream(device=TYPE)
    for step in range(2):
        model(tokens_of(step).to(TYPE)).backward()
        before = [param.grad.norm() for param in model.parameters()]
        side.wait_stream(torch.accelerator.current_stream())
        with side:
            total = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        after = torch.stack([param.grad.norm() for param in model.parameters()])
        torch.accelerator.current_stream().wait_stream(side)
        factor = 0.5 / (total.item() + 1e-6)
        torch.testing.assert_close(after, torch.stack(before) * factor, rtol=1e-6, atol=0)
        optimizer.step()
    zo.close(model)


def add_after_a_clip(rank: int, world_size: int) -> dict[str, torch.Tensor]:
    """The second backward reaches a layer on rank 1 alone. Rank 0, which has its elements, has the
    clip's factor on the device still."""
    device.reset(rank)
    device.policy(Policy.EAGER, 0)  # what is sent arrives before the step asks for factors
    model = zo.offload(build(Branching), zo.OffloadConfig(precision="fp32", stage=1, grads="device"))
    optimizer = zo.SGD(model.parameters(), lr=0.1)
    model(torch.ones(2, 8, device=TYPE), both=True).backward()
    nn.utils.clip_grad_norm_(model.layers[1].parameters(), 1e-2)
    model(torch.full((2, 8), 0.5, device=TYPE), both=rank == 1).backward()
    optimizer.step()
    with zo.gathered(model) as params:
        found = {name: param.detach().cpu().clone() for name, param in params.items()}
    zo.close(model)
    return found


def test_a_factor_is_not_that_of_what_another_rank_adds(pools: RankPools) -> None:
    found = pools.of(2, on_device=True).succeed(add_after_a_clip)
    model = build(Branching)
    model(torch.ones(2, 8), both=True).backward()
    nn.utils.clip_grad_norm_(model.layers[1].parameters(), 1e-2)
    for both in (True, False):
        (model(torch.full((2, 8), 0.5), both) / 2).backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    for params in found:
        for name, value in model.state_dict().items():
            torch.testing.assert_close(params[name], value, rtol=1e-5, atol=1e-7)
