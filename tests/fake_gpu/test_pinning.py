"""Host memory is registered in pieces, and no copy crosses from one piece to the next: a driver would refuse it."""

from __future__ import annotations

import pytest
import torch

import zero_offload as zo
from tests.fake_gpu import device
from tests.fake_gpu.device import TYPE, Policy
from tests.helpers.models import TinyLM, build, tokens_of
from zero_offload.hardware import device as device_module
from zero_offload.hardware.device import compute_device
from zero_offload.storage.memory.arena import Arena

PIECE = 4096


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_module, "PIN_PIECE_BYTES", PIECE)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.int64], ids=str)
@pytest.mark.parametrize("begin", [0, 8, PIECE - 8, PIECE, 2 * PIECE + 8])
@pytest.mark.parametrize("nbytes", [8, PIECE, PIECE + 8, 3 * PIECE])
def test_a_copy_is_cut_where_pieces_end(begin: int, nbytes: int, dtype: torch.dtype) -> None:
    gpu = compute_device()
    arena = Arena(0, pinner=gpu)
    region = arena.allocate(8 * PIECE)
    numel = nbytes // dtype.itemsize
    host = region.part(begin, 4 * PIECE).tensor(dtype, numel)
    host.copy_(torch.arange(numel) % 100)
    expected = host.clone()
    device.policy(Policy.LATE)
    with device.counting() as counts:
        there = gpu.upload(torch.empty(numel, dtype=dtype, device=TYPE), host).take()
        changed = there + 1
        gpu.download(host, changed).take_on_host()
    assert torch.equal(host, expected + 1)
    assert counts["pageable_copies"] == 0
    crossed = (begin + nbytes - 1) // PIECE - begin // PIECE
    assert counts["uploads"] == counts["downloads"] == 1 + crossed


def test_a_model_over_many_pieces_has_the_bits_of_one_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def train() -> list[float]:
        config = zo.OffloadConfig(precision="fp32", activations="cpu", device_memory="8MiB")
        model = zo.offload(build(TinyLM), config)
        optimizer = zo.AdamW(model.parameters(), lr=1e-2)
        found = []
        for step in range(3):
            loss = model(tokens_of(step).to(TYPE))
            loss.backward()
            found += [loss.item(), zo.clip_grad_norm_(model, 1.0).item()]
            optimizer.step()
            optimizer.zero_grad()
        zo.close(model)
        return found

    device.policy(Policy.LATE)
    in_many = train()
    monkeypatch.setattr(device_module, "PIN_PIECE_BYTES", 1 << 30)
    assert train() == in_many
