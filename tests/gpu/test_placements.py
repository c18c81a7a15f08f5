"""On the GPU here, the fake one too: placements agree bit for bit, training follows the plain model, memory goes back.
Skipped without any.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zero_offload as zo
from tests.helpers.accelerator import IS_FAKE, TYPE, module, on_gpu, with_triton
from zero_offload.base.spans import Track
from zero_offload.hardware.device import compute_device
from zero_offload.hardware.kernels import grads as kernel_grads
from zero_offload.hardware.kernels.checksums import device_fingerprints, fingerprints
from zero_offload.hardware.kernels.grads import sum_of_squares
from zero_offload.model.api import runtime_of
from zero_offload.storage.memory.arena import Arena

pytestmark = on_gpu

# The fake one shows that these tests run: tests/fake_gpu has every pair of settings.
WIDTH, NUM_BLOCKS, NUM_STEPS = (64, 3, 6) if IS_FAKE else (1024, 6, 8)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


with_real_sizes = pytest.mark.skipif(IS_FAKE, reason="the model is too small to tell its memory from the rest")


def build() -> nn.Module:
    torch.manual_seed(0)
    # Few rows against wide weights: next to no arithmetic, so that a missing synchronisation has no time to hide.
    return nn.Sequential(*(Block() for _ in range(NUM_BLOCKS)), nn.LayerNorm(WIDTH))


def batches() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(4, WIDTH, generator=generator).to(TYPE) for _ in range(NUM_STEPS)]


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
    placements = [
        ("nvme", "cpu", "nvme"),
        ("cpu", "nvme", "nvme"),
        ("cpu", "device", "cpu"),
        ("nvme", "device", "nvme"),
        ("device", {"device": 0.5, "cpu": 0.5}, "cpu"),
        ("device", "device", "device"),
        ("cpu", "cpu", "device"),
        ("nvme", "nvme", {"device": 0.4, "cpu": 0.3, "nvme": 0.3}),
    ]
    for i, (params, grads, optimizer) in enumerate(placements[::4] if IS_FAKE else placements):
        nvme = tmp_path / str(i)
        config = zo.OffloadConfig(
            params=params, grads=grads, optimizer=optimizer, precision=precision, nvme=nvme, durability="scratch"
        )
        assert train(config) == expected


def train_with_everything(config: zo.OffloadConfig) -> list[Any]:
    """Micro-batches, a scaled loss that overflows once, clipping by value and by norm, gradients read and dropped."""
    model = zo.offload(build(), config)
    optimizer, scaler = zo.AdamW(model.parameters(), lr=1e-3), zo.GradScaler(2.0**10)
    results: list[Any] = []
    for step, batch in enumerate(batches()):
        for micro in range(1 + step % 2):
            factor = float("inf") if step == 3 and micro == 0 else 1.0
            scaler.scale((model(batch).float() - micro).square().mean() * factor).backward()
        if step == 5:
            optimizer.zero_grad()
            scaler.scale(model(batch).float().square().mean()).backward()
        scaler.unscale_(optimizer)
        zo.clip_grad_value_(model, 1e-3)
        results.append(zo.clip_grad_norm_(model, 0.1).item())
        with zo.gathered(model[0], kind="grads") as grads:
            results += [grad.nan_to_num().double().square().sum().item() for grad in grads.values()]
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    with zo.gathered(model, kind="master") as masters:
        results += [master.double().sum().item() for master in masters.values()]
    results.append(zo.stats(model).skipped_steps)
    zo.close(model)
    return results


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_gradients_on_the_device_have_the_bits_of_those_on_the_host(tmp_path: Path, precision: str) -> None:
    expected = train_with_everything(zo.OffloadConfig(precision=precision))
    assert expected[-1] == 1
    for optimizer in ("device",) if IS_FAKE else ("cpu", "nvme", "device"):
        config = zo.OffloadConfig(
            precision=precision, grads="device", optimizer=optimizer, nvme=tmp_path / optimizer, durability="scratch"
        )
        assert str(train_with_everything(config)) == str(expected)  # text, in which NaNs are equal


@pytest.mark.parametrize("states", ["fp32", "bf16", "compact"])
def test_states_on_the_device_go_through_generations(tmp_path: Path, states: Any) -> None:
    """Committed every step, beside the next one, with updates by Triton and by torch's operations in turn; resumed
    there, on the host, and there again."""
    precision = zo.Precision(compute="bf16", states=states)

    def go_on(numbers: range, **settings: Any) -> list[float]:
        model = zo.offload(build(), zo.OffloadConfig(params="device", precision=precision, **settings))
        optimizer = zo.AdamW(model.parameters(), lr=1e-3)
        zo.resume(model, optimizer)
        for number in numbers:
            model(batches()[number]).float().square().mean().backward()
            zo.clip_grad_norm_(model, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            zo.commit(model, optimizer)
        with zo.gathered(model, kind="master") as masters:
            found = [master.double().sum().item() for master in masters.values()]
        zo.close(model)
        return found

    expected = go_on(range(NUM_STEPS), optimizer="cpu")
    kept = {"nvme": tmp_path, "existing": "resume"}
    go_on(range(0, 3), optimizer="device", grads="device", **kept)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("zero_offload.hardware.kernels.update.has_device_update", lambda tensor: False)
        go_on(range(3, 5), optimizer="device", **kept)
    go_on(range(5, 6), optimizer="cpu", **kept)
    assert go_on(range(6, NUM_STEPS), optimizer="device", grads="device", **kept) == expected


@pytest.mark.parametrize("way", [pytest.param("triton", marks=with_triton), "scan", "rows"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_sums_of_squares_have_the_bits_of_the_kernels(
    dtype: torch.dtype, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if way != "triton":
        monkeypatch.setattr(kernel_grads, "has_device_update", lambda grad: False)
        monkeypatch.setattr(kernel_grads, "scans_in_order", lambda device: way == "scan")
    else:
        pytest.importorskip("triton")
    draw = torch.Generator().manual_seed(0)
    grads = [
        (torch.randn(numel, generator=draw) * 10.0 ** (torch.rand(numel, generator=draw) * 8 - 6)).to(dtype)
        for numel in (1, 17, 16383, 16384, 16385, 100_000, 5_000_001)
    ]
    grads[2][100], grads[3][200] = float("inf"), float("nan")
    chunks, parts = kernel_grads.launch_sums([grad.to(TYPE) for grad in grads])
    found = [kernel_grads.total(chunks.cpu()[part]) for part in parts]
    expected = [sum_of_squares(grad.data_ptr(), dtype, grad.numel()) for grad in grads]
    assert str(found) == str(expected)
    # One rank's parts of parameters, the first and the last of which others have whole.
    borders = [0, 0, 17, 17, 100_000, 100_000]
    host, there = (
        [flat[begin:end] for begin, end in itertools.pairwise(borders)] for flat in (grads[-2], grads[-2].to(TYPE))
    )
    chunks, parts = kernel_grads.launch_sums(there)
    found = [kernel_grads.total(chunks.cpu()[part]) for part in parts]
    assert found == [sum_of_squares(view.data_ptr(), dtype, view.numel()) for view in host]


def test_a_scan_over_rows_adds_in_order() -> None:
    """If not, sums without Triton take a thousand launches each: slow, and no wrong bits."""
    assert kernel_grads.scans_in_order(torch.device(TYPE, torch.accelerator.current_device_index()))


@with_real_sizes
def test_gradients_on_the_device_go_with_their_update() -> None:
    model = zo.offload(build(), zo.OffloadConfig(grads="device"))
    optimizer = zo.AdamW(model.parameters(), lr=1e-3)
    grad_bytes = sum(2 * param.numel() for param in model.parameters())
    # The thread of backward takes its workspace for products with its first one.
    warm = torch.ones(8, 8, device=TYPE, requires_grad=True)
    (warm @ warm).sum().backward()
    for batch in batches()[:3]:
        loss = model(batch).float().square().mean()
        before = module().memory_allocated()
        loss.backward()
        assert zo.stats(model).resident_bytes["device"] == grad_bytes
        assert module().memory_allocated() - before > 0.5 * grad_bytes
        optimizer.step()
        optimizer.zero_grad()
        runtime_of(model).drain()
        torch.accelerator.synchronize()
        assert zo.stats(model).resident_bytes["device"] == 0
        assert module().memory_allocated() - before < 0.2 * grad_bytes
    zo.close(model)


def test_fp32_follows_the_plain_model() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    model = build().to(TYPE)
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


@with_real_sizes
def test_only_units_in_flight_are_on_the_device() -> None:
    model = zo.offload(build(), zo.OffloadConfig())
    for batch in batches()[:2]:  # in which values are looked at for changes that torch does not tell of
        model(batch).float().sum().backward()
    module().reset_peak_memory_stats()
    before = module().memory_allocated()
    model(batches()[2]).float().sum().backward()
    block_bytes = 8 * WIDTH * WIDTH * 2
    # Three units in flight and one block's gradients, with room for the allocator's rounding.
    assert module().max_memory_allocated() - before < 5 * block_bytes
    zo.close(model)


def test_registered_memory_copies_asynchronously() -> None:
    device = compute_device()
    arena = Arena(0, None, device)
    host = arena.allocate(64 << 20).tensor(torch.float32, 16 << 20)
    host.normal_()
    target = torch.empty(16 << 20, device=TYPE)
    back = arena.allocate(64 << 20).tensor(torch.float32, 16 << 20)
    uploaded = device.upload(target, host)
    device.download(back, uploaded.take()).take_on_host()
    assert torch.equal(host, back)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn], ids=str)
def test_fingerprints_are_the_same_numbers_everywhere(dtype: torch.dtype) -> None:
    """And take a bounded part of the device's memory: sums and products of integers have 8 bytes a word."""
    tensors = [torch.randn(numel).to(dtype) for numel in (1, 4097, 5_000_001)]
    assert torch.equal(fingerprints([tensor.to(TYPE) for tensor in tensors]).cpu(), device_fingerprints(tensors))
    large = torch.zeros(1 << 26, dtype=dtype, device=TYPE)
    module().reset_peak_memory_stats()
    before = module().memory_allocated()
    fingerprints([large])
    assert module().max_memory_allocated() - before < 80 << 20


def test_a_trace_has_copies_with_their_times(tmp_path: Path) -> None:
    model = zo.offload(build(), zo.OffloadConfig())
    with zo.profile(model, tmp_path / "trace.json") as recorded:
        model(batches()[0]).float().sum().backward()
        torch.accelerator.synchronize()
    zo.close(model)
    (forward,) = [span for span in recorded.spans() if span.track is Track.FORWARD and span.name == "forward"]
    for track in (Track.UPLOAD, Track.DOWNLOAD):
        copies = [span for span in recorded.spans() if span.track is track]
        assert copies and all(span.nbytes > 0 and span.begin_ns < span.end_ns for span in copies)
        # Both clocks agree within a millisecond.
        assert all(span.begin_ns > forward.begin_ns - 10**6 for span in copies)
