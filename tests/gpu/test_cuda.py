"""On a real GPU: placements agree bit for bit, training follows the plain model, memory goes back.

Skipped without CUDA. The same paths run on the CPU with late lanes in tests/overlap.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import zero_offload as zo

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

WIDTH, NUM_BLOCKS, NUM_STEPS = 1024, 6, 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def build() -> nn.Module:
    torch.manual_seed(0)
    # Few rows against wide weights: next to no arithmetic, so that a missing synchronisation has no time to hide.
    return nn.Sequential(*(Block() for _ in range(NUM_BLOCKS)), nn.LayerNorm(WIDTH))


def batches() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(4, WIDTH, generator=generator).cuda() for _ in range(NUM_STEPS)]


def train(config: zo.OffloadConfig) -> list[tuple[float, float]]:
    model = zo.offload(build(), config)
    optimizer = zo.AdamW(model.parameters(), lr=1e-3)
    results = []
    for batch in batches():
        loss = model(batch).float().square().mean() + (model(batch).float() - 1).square().mean()
        loss.backward()
        norm = zo.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        results.append((loss.item(), norm.item()))
    zo.close(model)
    return results


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_placements_agree_bit_for_bit(tmp_path: Path, precision: str) -> None:
    expected = train(zo.OffloadConfig(precision=precision))
    assert train(zo.OffloadConfig(precision=precision, params="device")) == expected
    for i, (params, grads, optimizer) in enumerate([("nvme", "cpu", "nvme"), ("cpu", "nvme", "nvme")]):
        nvme = tmp_path / str(i)
        config = zo.OffloadConfig(
            params=params, grads=grads, optimizer=optimizer, precision=precision, nvme=nvme, durability="scratch"
        )
        assert train(config) == expected


def test_fp32_follows_the_plain_model() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    model = build().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    expected = []
    for batch in batches():
        loss = model(batch).square().mean() + (model(batch) - 1).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        expected.append(loss.item())
    losses = [loss for loss, _ in train(zo.OffloadConfig(precision="fp32"))]
    assert losses == pytest.approx(expected, rel=1e-4)


def test_only_units_in_flight_are_on_the_device() -> None:
    model = zo.offload(build(), zo.OffloadConfig())
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    model(batches()[0]).float().sum().backward()
    block_bytes = 8 * WIDTH * WIDTH * 2
    # Three units in flight and one block's gradients, with room for the allocator's rounding.
    assert torch.cuda.max_memory_allocated() - before < 5 * block_bytes
    zo.close(model)


def test_registered_memory_copies_asynchronously() -> None:
    from zero_offload.device import CudaDevice
    from zero_offload.memory.arena import Arena

    device = CudaDevice()
    arena = Arena(0, None, device)
    host = arena.allocate(64 << 20).tensor(torch.float32, 16 << 20)
    host.normal_()
    target = torch.empty(16 << 20, device="cuda")
    back = arena.allocate(64 << 20).tensor(torch.float32, 16 << 20)
    uploaded = device.upload(target, host)
    device.download(back, uploaded.take()).take_on_host()
    assert torch.equal(host, back)
