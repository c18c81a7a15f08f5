"""torch.autocast over fp32 parameters: its casts of weights leave with their units, and no bit changes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import zero_offload as zo
from tests.helpers.models import WIDE, TinyLM, build, tokens_of
from tests.helpers.reference import placed
from tests.helpers.twins import assert_same
from zero_offload.base.types import format_bytes
from zero_offload.runtime import pass_tracker
from zero_offload.runtime.saved_tensors.tensors import SavedTensors


class Shared(TinyLM):
    """A block is used twice; with autocast's cache its gradients add up in bf16."""

    def run_blocks(self, x: Tensor) -> Tensor:
        return super().run_blocks(self.blocks[1](x))


class Recomputed(TinyLM):
    reentrant = False

    def run_blocks(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


class Reentrant(Recomputed):
    reentrant = True


class Frozen(TinyLM):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        for block in self.blocks:
            block.up.weight.requires_grad_(False)


class ByHand(TinyLM):
    """Casts of its own, one of which it changes past torch's versions."""

    def run_blocks(self, x: Tensor) -> Tensor:
        x = super().run_blocks(x)
        weight = self.blocks[1].up.weight.to(torch.bfloat16)
        weight.data.mul_(2)
        return x + F.linear(x.bfloat16(), weight)[..., :WIDE].float() + F.linear(x, 2 * self.blocks[0].up.weight[:WIDE])


class Convolved(TinyLM):
    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self.mix = nn.Conv1d(dim, dim, 3, padding=1, groups=4)

    def run_blocks(self, x: Tensor) -> Tensor:
        return super().run_blocks(self.mix(x.mT).mT)


def script(cache: bool, inside: bool, model: nn.Module, optimizer: zo.AdamW) -> Iterator[float]:
    for seed in range(3):
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=cache):
            loss = model(tokens_of(seed))
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()


@pytest.mark.parametrize("cache", [True, False])
@pytest.mark.parametrize("make", [Shared, Recomputed, Reentrant, Frozen, ByHand, Convolved])
def test_the_bits_are_those_of_a_plain_model(make: type[nn.Module], cache: bool, nvme_config: zo.OffloadConfig) -> None:
    config = zo.OffloadConfig.from_dict(nvme_config.to_dict() | {"device_memory": "16MiB"})
    assert_same(partial(script, cache, cache), partial(make, WIDE), config)


@pytest.fixture
def casts(monkeypatch: pytest.MonkeyPatch) -> list[StorageWeakRef]:
    """Storages that are saved in bf16 and are as large as a weight."""
    found = []
    pack = SavedTensors._pack

    def spy(self: SavedTensors, users: Any, reads: Any, tensor: Tensor) -> Any:
        if tensor.dtype is torch.bfloat16 and tensor.numel() == 4 * WIDE**2:
            found.append(StorageWeakRef(tensor.untyped_storage()))
        return pack(self, users, reads, tensor)

    monkeypatch.setattr(SavedTensors, "_pack", spy)
    return found


@pytest.mark.parametrize("make", [TinyLM, Frozen])
def test_no_cast_lives_from_forward_to_backward(
    make: Callable[[int], nn.Module], casts: list[StorageWeakRef], nvme_config: zo.OffloadConfig
) -> None:
    model = zo.offload(build(partial(make, WIDE)), nvme_config)
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        loss = model(tokens_of(0))
        assert len(casts) == 6 and all(each.expired() for each in casts)
    loss.backward()
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(tokens_of(0))
    assert len(casts) == 12 and all(each.expired() for each in casts)
    zo.close(model)


def test_weights_that_never_leave_are_cast_once(casts: list[StorageWeakRef]) -> None:
    model = zo.offload(build(partial(TinyLM, WIDE)), placed("fp32", ("cpu", "cpu", "cpu"), None, None))
    with torch.autocast("cpu", torch.bfloat16):
        model(tokens_of(0)).backward()
    assert casts == []  # autograd saves as it likes
    zo.close(model)


def test_what_autocasts_cache_keeps_is_said_once(
    nvme_config: zo.OffloadConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pass_tracker, "TOLD_CASTS_BYTES", 1)
    model = zo.offload(build(partial(TinyLM, WIDE)), nvme_config)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            model(tokens_of(0)).backward()
    nbytes = 2 * sum(param.numel() for block in model.blocks for param in (block.up.weight, block.down.weight))
    nbytes += 2 * model.head.weight.numel()
    said = rf"keeps {format_bytes(nbytes)} of casts .* cache_enabled=False"
    with pytest.warns(UserWarning, match=said), torch.autocast("cpu", torch.bfloat16):
        model(tokens_of(0)).backward()
    zo.close(model)


def test_weights_that_change_before_their_backward_are_noticed(nvme_config: zo.OffloadConfig) -> None:
    model = zo.offload(build(partial(TinyLM, WIDE)), nvme_config)
    optimizer = zo.AdamW(model.parameters())
    with torch.autocast("cpu", torch.bfloat16):
        first, second = model(tokens_of(0)), model(tokens_of(1))
    first.backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="An optimizer step between a forward and its backward does this too"):
        second.backward()
    zo.close(model)
