"""A model that is only read: part of it stays from one forward to the next, and the next one's first units arrive."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

import zero_offload as zo
from tests.helpers.models import WIDE, TinyLM, tokens_of
from tests.helpers.ranks import RankPool
from zero_offload.base.types import FRAME
from zero_offload.model.api import need_runtime
from zero_offload.runtime.units.unit import UnitState

NUM_BLOCKS, CYCLES = 12, 12


def build() -> nn.Module:
    torch.manual_seed(0)
    return TinyLM(WIDE, NUM_BLOCKS).eval().requires_grad_(False)


def offloaded(nvme: Path, device_memory: str | int | None) -> nn.Module:
    settings = {"params": "nvme", "nvme": nvme, "durability": "scratch", "precision": "fp32"}
    return zo.offload(build(), zo.OffloadConfig(**settings, device_memory=device_memory))


def losses(model: nn.Module, num: int = CYCLES) -> list[float]:
    with torch.no_grad():
        return [model(tokens_of(seed)).item() for seed in range(num)]


def reads_per_forward(model: nn.Module) -> float:
    """Elements of the model that a forward reads, in models; without the first two forwards."""
    losses(model, 2)
    before = zo.stats(model).read_bytes["nvme"]
    losses(model)
    nbytes = sum(param.nbytes for param in model.parameters())
    return (zo.stats(model).read_bytes["nvme"] - before) / CYCLES / nbytes


def frames_of(model: nn.Module) -> list[int]:
    return [unit.num_frames for unit in need_runtime(model, "this test").units]


def test_it_plans_no_states_and_writes_values_once(nvme: Path) -> None:
    model = offloaded(nvme, None)
    nbytes = sum(param.nbytes for param in model.parameters())
    written = zo.stats(model).written_bytes["nvme"]
    assert nbytes <= written < 1.1 * nbytes
    assert losses(model) == losses(build())
    assert zo.stats(model).written_bytes["nvme"] == written
    assert zo.stats(model).read_bytes["nvme"] > nbytes
    zo.close(model)


@pytest.mark.parametrize("share", [0.4, 0.6, 0.8])
def test_what_fits_stays_between_forwards(share: float, nvme: Path) -> None:
    """A cyclic order reads at least what does not fit; prefetch costs two or three units more."""
    model = offloaded(nvme, None)
    frames = frames_of(model)
    zo.close(model)
    fits = int(sum(frames) * share)
    model = offloaded(nvme, fits * FRAME)
    assert losses(model) == losses(build())
    least = 1 - share
    assert least - 0.05 <= reads_per_forward(model) <= least + 3.5 * max(frames) / sum(frames)
    assert need_runtime(model, "this test").prefetcher.pool._budget.frame_limit <= fits
    zo.close(model)


def test_all_of_it_stays_where_all_fits(nvme: Path) -> None:
    model = offloaded(nvme, "1GiB")
    assert losses(model) == losses(build())
    assert reads_per_forward(model) == 0
    zo.close(model)


def test_the_next_forward_s_first_units_are_on_their_way(nvme: Path) -> None:
    model = offloaded(nvme, None)
    losses(model, 2)
    units = need_runtime(model, "this test").units
    order = need_runtime(model, "this test").prefetcher.schedule.uses[:2]
    assert all(units[index].state in (UnitState.FETCHING, UnitState.PRESENT) for index in order)
    assert losses(model) == losses(build())
    zo.close(model)


@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_any_grad_mode(context: Callable[[], torch.no_grad], nvme: Path) -> None:
    model, plain = offloaded(nvme, "16MiB"), build()
    with context():
        found = [[each(tokens_of(seed)).item() for seed in range(4)] for each in (model, plain)]
    assert found[0] == found[1]
    zo.close(model)


def on_a_rank(rank: int, world_size: int, stage: int, nvme: Path) -> None:
    settings = {"params": "nvme", "nvme": nvme, "durability": "scratch", "precision": "fp32"}
    model = zo.offload(build(), zo.OffloadConfig(stage=stage, **settings, device_memory="24MiB"))
    expected = losses(build())
    assert losses(model) == expected
    with zo.gathered(model.blocks[5]):  # between two forwards, of which the second is under way
        assert all(torch.isfinite(param).all() for param in model.blocks[5].parameters())
    assert losses(model, 3) == expected[:3]
    zo.close(model)


@pytest.mark.parametrize("stage", [2, 3])
def test_two_ranks(stage: int, pool: RankPool, nvme: Path) -> None:
    pool.succeed(on_a_rank, stage, nvme)


def test_an_error_says_how_to_read_a_model_that_is_too_large_to_train() -> None:
    nbytes = sum(param.nbytes for param in build().parameters())
    config = zo.OffloadConfig(precision="fp32", cpu_memory=2 * nbytes)
    with pytest.raises(zo.CapacityError, match=r"eval mode: .*call model\.requires_grad_\(False\) before zo\.offload"):
        zo.offload(build().requires_grad_(True), config)
    with pytest.raises(zo.CapacityError) as error:
        zo.offload(build().requires_grad_(True).train(), config)
    assert "requires_grad_" not in str(error.value)
    zo.close(zo.offload(build(), config))
