"""Gradients that rest in the device's memory have the bits of a plain model. Nothing waits for the device before a
number is asked for.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zero_offload as zo
from tests.fake_gpu import device
from tests.fake_gpu.device import LATE, TYPE, Policy
from tests.helpers.models import TinyLM, build, tokens_of
from tests.helpers.reference import param_groups, read_masters
from tests.helpers.scripts import Average, Script, check, clip_norm, run_offloaded, run_plain
from tests.parity.test_partial_steps import CLIPPING, NUM_STEPS, OPTIMIZERS, adamw, backward, freezing, make
from zero_offload.model.api import runtime_of
from zero_offload.storage.shards.device_grads import DeviceGrads
from zero_offload.storage.shards.grad_downloads import ComingSum, DeviceSums

pytestmark = pytest.mark.usefixtures("late")

PLACEMENTS: dict[str, dict[str, Any]] = {
    "cpu": {"grads": "device"},
    "nvme": {"params": "nvme", "grads": "device", "optimizer": "nvme"},
    "device": {"params": "device", "grads": "device", "optimizer": "device"},
    "mixed": {"params": "device", "grads": {"device": 0.5, "cpu": 0.25, "nvme": 0.25}, "optimizer": "cpu"},
}
ON_DEVICE = zo.OffloadConfig(precision="fp32", grads="device")
SYNCS = ("event_syncs", "stream_syncs", "device_syncs", "items")


def looks_at_grad(model: nn.Module, rows: Any, average: Average) -> Iterator[float]:
    """Torch's own clipping, a change through `.grad`, and a second backward on top."""
    optimizer = adamw(model.parameters())
    for step in range(NUM_STEPS):
        yield backward(model, rows, 2 * step, average)
        nn.utils.clip_grad_value_(model.parameters(), 0.001)
        model.norm.weight.grad.mul_(0.5)
        yield clip_norm(list(model.parameters()), 0.01, model)
        model.norm.bias.grad.mul_(0.5)
        yield backward(model, rows, 2 * step + 1, average)
        optimizer.step()
        model.zero_grad()


def drops(model: nn.Module, rows: Any, average: Average) -> Iterator[float]:
    """Gradients that no step uses, all and some."""
    optimizer = adamw(model.parameters())
    for step in range(NUM_STEPS):
        yield backward(model, rows, 2 * step, average)
        if step % 2:
            optimizer.zero_grad()
        else:
            model.blocks[1].up.weight.grad = None
        yield backward(model, rows, 2 * step + 1, average)
        optimizer.step()
        optimizer.zero_grad()


SCRIPTS: list[Script] = [*CLIPPING, freezing, *OPTIMIZERS, drops]


@pytest.mark.parametrize(
    ("script", "placement", "policy"), list(zip(SCRIPTS, itertools.cycle(PLACEMENTS), itertools.cycle(LATE)))
)
def test_scripts_give_the_bits_of_plain_tensors(script: Script, placement: str, policy: Policy, nvme: Path) -> None:
    device.policy(policy)
    config = zo.OffloadConfig(precision="fp32", nvme=nvme, durability="scratch", **PLACEMENTS[placement])
    check(run_offloaded(script, make, config), run_plain(script, make))


def test_grad_is_the_gradient_where_it_rests() -> None:
    check(run_offloaded(looks_at_grad, make, ON_DEVICE), run_plain(looks_at_grad, make))
    model = zo.offload(build(make), ON_DEVICE)
    weight = model.blocks[0].up.weight
    assert weight.grad is None
    model(tokens_of(0)).backward()
    assert weight.grad.device.type == TYPE
    assert weight.grad.shape == weight.shape and weight.grad.data_ptr() == weight.grad.data_ptr()
    adamw(model.parameters()).step()
    assert weight.grad is None


@pytest.mark.parametrize(
    ("precision", "placement"), list(zip(("fp32", "bf16", "fp16", "bf16"), PLACEMENTS, strict=True))
)
def test_scaled_losses_and_overflows(precision: str, placement: str, nvme: Path) -> None:
    """Norms, states, gathered gradients and the scale, step by step; the second step overflows, the fourth is NaN."""

    def train(**settings: Any) -> list[Any]:
        model = zo.offload(build(TinyLM), zo.OffloadConfig(precision=precision, **settings))
        optimizer, scaler = zo.AdamW(param_groups(model), lr=1e-2), zo.GradScaler(2.0**10, growth_interval=2)
        found: list[Any] = []
        for step in range(6):
            factor = {1: math.inf, 3: math.nan}.get(step, 1.0)
            for micro in range(2):
                scaler.scale(model(tokens_of(2 * step + micro)) * (factor if micro == 0 else 1.0)).backward()
            scaler.unscale_(optimizer)
            if factor == 1.0:
                with zo.gathered(model, kind="grads") as grads:
                    found += [grad.to("cpu", copy=True) for grad in grads.values()]
                found.append(zo.clip_grad_norm_(model, 0.5).cpu())
            scaler.step(optimizer)
            scaler.update()
            found.append(torch.tensor([scaler.get_scale(), zo.stats(model).skipped_steps]))
            found += read_masters(model).values()
        zo.close(model)
        return found

    with device.on_host():
        expected = train()
    assert expected[-1].isfinite().all()
    found = train(**PLACEMENTS[placement], nvme=nvme, durability="scratch")
    assert len(found) == len(expected) and all(map(torch.equal, found, expected))


def test_a_skipped_step_names_the_gradients() -> None:
    model = zo.offload(build(TinyLM), zo.OffloadConfig(grads="device"))
    optimizer = adamw(model.parameters())
    model.norm.weight.register_hook(lambda grad: grad * math.inf)
    model(tokens_of(0)).backward()
    with pytest.warns(UserWarning, match=r"is NaN or infinite \(norm\.weight\); the step is skipped"):
        optimizer.step()
    assert zo.stats(model).resident_bytes["device"] == 0


# When the device is waited for


@pytest.mark.parametrize("overlap", ["forward", "none"])
def test_all_sums_are_read_at_once_and_only_when_asked_for(overlap: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = zo.offload(build(TinyLM), zo.OffloadConfig(params="device", grads="device", overlap=overlap))
    optimizer = adamw(model.parameters())
    reads: list[int] = []

    read_before = DeviceSums.read

    def read(self: DeviceSums, sums: Any, unit: str) -> None:
        coming = sum(isinstance(each, ComingSum) for of in sums for each in of.values())
        reads.extend([coming] if coming else [])
        read_before(self, sums, unit)

    monkeypatch.setattr(DeviceSums, "read", read)
    num_params = len(list(model.parameters()))
    for _ in range(2):  # the first ones learn the order of units, and upload constants
        model(tokens_of(0)).backward()
    optimizer.zero_grad()
    for clips in (True, False):
        for _ in range(2):
            loss = model(tokens_of(0))
            with device.counting() as counts:
                loss.backward()
            assert not any(counts[each] for each in SYNCS), "backward waits"
        assert not reads
        if clips:
            with device.counting() as counts:
                zo.clip_grad_norm_(model, 0.1)
            assert reads == [num_params] and sum(counts[each] for each in SYNCS) == 1
        optimizer.step()
        assert reads == [num_params]
        optimizer.zero_grad()
        reads.clear()
    model(tokens_of(0)).backward()
    optimizer.zero_grad()
    assert zo.clip_grad_norm_(model, 0.1) == 0 and not reads, "nothing is left to read"


def test_gradients_leave_the_device_with_the_update_only() -> None:
    model = zo.offload(build(TinyLM), zo.OffloadConfig(grads="device"))
    optimizer = adamw(model.parameters())
    nbytes = sum(2 * param.numel() for param in model.parameters())
    sent = sum(2 * grads.layout.params[-1].end for grads in runtime_of(model).grads.ledger.sections)
    for step in range(2):
        loss = model(tokens_of(step))
        with device.counting() as counts:
            loss.backward()
        assert counts["downloads"] == len(runtime_of(model).grads.ledger.sections), "the sums"
        zo.clip_grad_norm_(model, 0.1)
        assert zo.stats(model).resident_bytes["device"] == nbytes
        with device.counting() as counts:
            optimizer.step()
            optimizer.zero_grad()
            runtime_of(model).drain()
        assert counts["download_bytes"] == sent
        assert zo.stats(model).resident_bytes["device"] == 0
    assert runtime_of(model).store.counters.snapshot()["read.device"] == 2 * sent
    model(tokens_of(3)).backward()
    optimizer.zero_grad()
    assert zo.stats(model).resident_bytes["device"] == 0


def test_what_is_dropped_beside_an_update_is_not_taken_from_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """An optimizer of some parameters steps; those of the others in the section go while its update has not begun. The
    program has them in hand by then, so the call waits for the update."""
    go = threading.Event()
    opens = DeviceGrads.chunks

    def chunks(self: DeviceGrads, rows: range, *staging: Any) -> Any:
        assert go.wait(20)
        return opens(self, rows, *staging)

    monkeypatch.setattr(DeviceGrads, "chunks", chunks)
    model, plain = zo.offload(build(make), ON_DEVICE), build(make)
    for each in (model, plain):
        optimizer = adamw([each.blocks[0].up.weight])
        each(tokens_of(0)).backward()
        optimizer.step()
        release = threading.Timer(0.5, go.set)
        release.start()
        each.zero_grad()
    release.join()
    runtime_of(model).drain()
    assert zo.stats(model).resident_bytes["device"] == 0
    masters = read_masters(model)
    assert all(torch.equal(masters[name], param) for name, param in plain.named_parameters())


# Whose memory it is


class Joined(nn.Module):
    """Autograd gives its parameters gradients in one memory."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(8, 4)), nn.Parameter(torch.ones(8, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (torch.cat([self.a, self.b]) @ x.to(self.a.device)).square().sum()


class SharedGrads(nn.Module):
    """The gradient of `offset` is a view of that of `x`, to which another one is added later."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.offset = nn.Parameter(torch.randn(1, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x.to(self.offset.device).view(1, 4))
        earlier = x * 3
        return ((x + self.offset) * 2 * earlier).sum()


@pytest.mark.parametrize("grads", ["cpu", "device"])
@pytest.mark.parametrize("make", [Joined, SharedGrads])
def test_gradients_that_share_memory(make: type[nn.Module], grads: Any) -> None:
    def script(model: nn.Module, rows: Any, average: Average) -> Iterator[float]:
        optimizer = adamw(model.parameters())
        for step in range(NUM_STEPS):
            for micro in range(2):
                loss = model(torch.arange(4.0) + step + micro)
                loss.backward()
                yield loss.item()
            optimizer.step()
            optimizer.zero_grad()

    config = zo.OffloadConfig(precision="fp32", grads=grads)
    check(run_offloaded(script, make, config), run_plain(script, make))


class Scaled(nn.Module):
    """Torch makes the gradient as its parameter lies in memory."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(16, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.scale * x.to(self.scale.device)


def test_the_only_gradient_of_a_section_is_kept_without_a_copy() -> None:
    model = zo.offload(nn.Sequential(*(Scaled() for _ in range(3))), ON_DEVICE)
    made: list[int] = []
    for param in model.parameters():
        param.register_hook(lambda grad: made.append(grad.data_ptr()))
    model(torch.ones(16, 16)).sum().backward()
    assert len(made) == 3 and {param.grad.data_ptr() for param in model.parameters()} == set(made)


class WideGrad(torch.autograd.Function):
    """Its gradient is fp32, and not of half precision."""

    made: list[torch.Tensor] = []

    @staticmethod
    def forward(ctx: Any, weight: torch.Tensor) -> torch.Tensor:
        return weight.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        WideGrad.made.append(grad.float() * 1.1)
        return WideGrad.made[-1]


class Widened(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(40, 40, bias=False), nn.Linear(40, 40)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.narrow(nn.functional.linear(x, WideGrad.apply(self.wide.weight))).square().mean()


@pytest.mark.parametrize(("grads", "on"), [("cpu", TYPE), ("device", TYPE), ("nvme", TYPE), ("cpu", "cpu")])
def test_gradients_wider_than_their_parameter_lose_nothing(grads: str, on: str, nvme: Path) -> None:
    """Torch takes them, with `grad_dtype`."""
    model = Widened()
    model.wide.weight.grad_dtype = None
    with device.on_host() if on == "cpu" else device.current(0):
        zo.offload(model, zo.OffloadConfig(precision="bf16", grads=grads, nvme=nvme, durability="scratch"))
    optimizer = zo.AdamW(model.parameters())
    for _ in range(2):
        WideGrad.made.clear()
        for count in (1, 2):
            model(torch.randn(3, 40).to(on)).backward()
            with zo.gathered(model, kind="grads") as found:
                assert torch.equal(found["wide.weight"].cpu(), sum(WideGrad.made).cpu())
                assert len(WideGrad.made) == count and found["narrow.weight"].any()
        optimizer.step()
    zo.close(model)


@pytest.mark.parametrize("grads", ["cpu", "device"])
def test_gradients_with_a_graph_of_their_own(grads: Any) -> None:
    """`create_graph=True`: where they rest they are no part of it."""
    make = partial(nn.Sequential, nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
    model = zo.offload(build(make), zo.OffloadConfig(grads=grads))
    optimizer, losses = zo.AdamW(model.parameters(), lr=1e-2), []
    for _ in range(3):
        loss = model(torch.ones(4, 8, device=TYPE)).sum()
        loss.backward(create_graph=True)
        zo.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[0] > losses[1] > losses[2]
    zo.close(model)
