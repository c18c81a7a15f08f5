"""Gradients that rest in the memory of a device: what becomes of them on their way to the step is what becomes of a
plain model's, bit for bit, without a wait for the device before somebody asks for a number."""

from __future__ import annotations

import importlib
import math
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zero_offload as zo
from tests.helpers.late_device import LateDevice
from tests.helpers.models import TinyLM, build, tokens_of
from tests.helpers.reference import param_groups, read_masters
from tests.helpers.scripts import Average, Script, check, clip_norm, run_offloaded, run_plain
from tests.parity.test_partial_steps import CLIPPING, NUM_STEPS, OPTIMIZERS, adamw, backward, freezing, make
from zero_offload.api import runtime_of
from zero_offload.device import Handoff, HostDevice
from zero_offload.runtime.grads import ledger
from zero_offload.runtime.grads.keeper import _own
from zero_offload.shards.device_grad_shard import DeviceGradShard

offload_module = importlib.import_module("zero_offload.offload")

PLACEMENTS: dict[str, dict[str, Any]] = {
    "cpu": {"grads": "device"},
    "nvme": {"params": "nvme", "grads": "device", "optimizer": "nvme", "device_memory": "10MiB"},
    "device": {"params": "device", "grads": "device", "optimizer": "device"},
    "mixed": {"params": "device", "grads": {"device": 0.5, "cpu": 0.25, "nvme": 0.25}, "optimizer": "cpu"},
}

Use = Callable[[object], None]


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch) -> Use:
    def use(device: object) -> None:
        monkeypatch.setattr(offload_module, "compute_device", lambda: device)

    return use


@pytest.fixture(params=PLACEMENTS)
def config(request: pytest.FixtureRequest, nvme: Path) -> zo.OffloadConfig:
    return zo.OffloadConfig(precision="fp32", nvme=nvme, durability="scratch", **PLACEMENTS[request.param])


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


@pytest.mark.parametrize("script", [*CLIPPING, freezing, *OPTIMIZERS, drops])
def test_scripts_give_the_bits_of_plain_tensors(script: Script, config: zo.OffloadConfig, on_device: Use) -> None:
    on_device(LateDevice())
    check(run_offloaded(script, make, config), run_plain(script, make))


def test_grad_is_the_gradient_where_it_rests(on_device: Use) -> None:
    on_device(LateDevice())
    config = zo.OffloadConfig(precision="fp32", grads="device")
    check(run_offloaded(looks_at_grad, make, config), run_plain(looks_at_grad, make))
    model = zo.offload(build(make), config)
    weight = model.blocks[0].up.weight
    assert weight.grad is None
    model(tokens_of(0)).backward()
    assert weight.grad.shape == weight.shape and weight.grad.data_ptr() == weight.grad.data_ptr()
    adamw(model.parameters()).step()
    assert weight.grad is None


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_scaled_losses_and_overflows(precision: str, on_device: Use, nvme: Path) -> None:
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
                    found += [grad.clone() for grad in grads.values()]
                found.append(zo.clip_grad_norm_(model, 0.5))
            scaler.step(optimizer)
            scaler.update()
            found.append(torch.tensor([scaler.get_scale(), zo.stats(model).skipped_steps]))
            found += read_masters(model).values()
        zo.close(model)
        return found

    on_device(HostDevice())
    expected = train()
    assert expected[-1].isfinite().all()
    for settings in PLACEMENTS.values():
        on_device(LateDevice())
        found = train(**settings, nvme=nvme, durability="scratch", existing="discard")
        assert len(found) == len(expected) and all(map(torch.equal, found, expected))


def test_a_skipped_step_names_the_gradients(on_device: Use) -> None:
    on_device(LateDevice())
    model = zo.offload(build(TinyLM), zo.OffloadConfig(grads="device"))
    optimizer = adamw(model.parameters())
    model.norm.weight.register_hook(lambda grad: grad * math.inf)
    model(tokens_of(0)).backward()
    with pytest.warns(UserWarning, match=r"is NaN or infinite \(norm\.weight\); the step is skipped"):
        optimizer.step()
    assert zo.stats(model).resident_bytes["device"] == 0


# When the device is waited for


@pytest.mark.parametrize("overlap", ["forward", "none"])
def test_all_sums_are_read_at_once_and_only_when_asked_for(
    overlap: str, on_device: Use, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_device(LateDevice())
    model = zo.offload(build(TinyLM), zo.OffloadConfig(grads="device", overlap=overlap))
    optimizer = adamw(model.parameters())
    reads: list[int] = []

    def read_sums(launched: Any) -> Any:
        reads.extend([len(launched)] if launched else [])
        return read_before(launched)

    read_before = ledger.read_sums
    monkeypatch.setattr(ledger, "read_sums", read_sums)
    num_params = len(list(model.parameters()))
    for clips in (True, False):
        for _ in range(2):
            model(tokens_of(0)).backward()
        assert not reads, "backward does not wait for sums"
        if clips:
            zo.clip_grad_norm_(model, 0.1)
            assert reads == [num_params]
        optimizer.step()
        assert reads == [num_params]
        optimizer.zero_grad()
        reads.clear()
    model(tokens_of(0)).backward()
    optimizer.zero_grad()
    assert zo.clip_grad_norm_(model, 0.1) == 0 and not reads, "nothing is left to read"


def test_gradients_leave_the_device_with_the_update_only(on_device: Use) -> None:
    device = LateDevice()
    on_device(device)
    model = zo.offload(build(TinyLM), zo.OffloadConfig(grads="device"))
    optimizer = adamw(model.parameters())
    nbytes = sum(2 * param.numel() for param in model.parameters())
    for step in range(2):
        before = device.downloads.launched
        model(tokens_of(step)).backward()
        zo.clip_grad_norm_(model, 0.1)
        assert device.downloads.launched == before
        assert zo.stats(model).resident_bytes["device"] == nbytes
        optimizer.step()
        optimizer.zero_grad()
        runtime_of(model).drain()
        assert device.downloads.launched > before
        assert zo.stats(model).resident_bytes["device"] == 0
    assert runtime_of(model).parts.store.counters.snapshot()["read.device"] == 2 * nbytes
    model(tokens_of(3)).backward()
    optimizer.zero_grad()
    assert zo.stats(model).resident_bytes["device"] == 0


@pytest.mark.parametrize("missing", ["wait", "mark"])
def test_a_missing_wait_is_seen(missing: str, on_device: Use, monkeypatch: pytest.MonkeyPatch) -> None:
    on_device(HostDevice())
    config = zo.OffloadConfig(precision="fp32", grads="device", overlap="forward")
    script = CLIPPING[0]
    expected = run_offloaded(script, make, config)
    on_device(LateDevice())
    if missing == "wait":
        take = Handoff.take_on_host
        monkeypatch.setattr(Handoff, "take_on_host", lambda self: self.tensor)
        found = run_offloaded(script, make, config)
        assert take is not Handoff.take_on_host
        assert not all(torch.equal(found[1][name], values) for name, values in expected[1].items())
    else:
        lend = DeviceGradShard.lend
        monkeypatch.setattr(DeviceGradShard, "lend", lambda self, made: lend(self, None))
        with pytest.raises(AssertionError, match="comes after no compute"):
            run_offloaded(script, make, config)


def test_what_is_dropped_beside_an_update_is_not_taken_from_it(on_device: Use, monkeypatch: pytest.MonkeyPatch) -> None:
    """An optimizer of some parameters steps; those of the others in the section go while its update has not begun."""
    go = threading.Event()
    opens = DeviceGradShard.open_chunks

    def open_chunks(self: DeviceGradShard, rows: range, staging: int) -> Any:
        assert go.wait(20)
        return opens(self, rows, staging)

    on_device(LateDevice())
    monkeypatch.setattr(DeviceGradShard, "open_chunks", open_chunks)
    model, plain = zo.offload(build(make), zo.OffloadConfig(precision="fp32", grads="device")), build(make)
    for each in (model, plain):
        optimizer = adamw([each.blocks[0].up.weight])
        each(tokens_of(0)).backward()
        optimizer.step()
        each.zero_grad()
    go.set()
    runtime_of(model).drain()
    assert zo.stats(model).resident_bytes["device"] == 0
    masters = read_masters(model)
    assert all(torch.equal(masters[name], param) for name, param in plain.named_parameters())


# Whose memory it is


def test_only_what_is_nobody_elses_is_kept() -> None:
    whole = torch.randn(4, 6)
    for shared in (whole[:2], whole.view(6, 4), whole.t()):
        assert _own(shared, torch.float32).untyped_storage().data_ptr() != whole.data_ptr()
    grad = torch.randn(4, 6)
    kept = _own(grad, torch.float32)
    assert kept.shape == (24,) and kept.data_ptr() == grad.data_ptr()
    wide = _own(torch.ones(3, dtype=torch.bfloat16), torch.float32)
    assert wide.dtype == torch.float32
    assert torch.equal(_own(torch.ones(()).expand(3, 2), torch.float32), torch.ones(6))


class Joined(nn.Module):
    """Autograd gives its parameters gradients in one memory."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(8, 4)), nn.Parameter(torch.ones(8, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (torch.cat([self.a, self.b]) @ x).square().sum()


def test_gradients_in_one_memory_become_two(on_device: Use) -> None:
    def script(model: nn.Module, rows: Any, average: Average) -> Iterator[float]:
        optimizer = adamw(model.parameters())
        for step in range(NUM_STEPS):
            for micro in range(2):
                loss = model(torch.arange(4.0) + step + micro)
                loss.backward()
                yield loss.item()
            optimizer.step()
            optimizer.zero_grad()

    on_device(LateDevice())
    config = zo.OffloadConfig(precision="fp32", grads="device")
    check(run_offloaded(script, Joined, config), run_plain(script, Joined))


def test_a_gradient_is_kept_without_a_copy(on_device: Use) -> None:
    on_device(LateDevice())
    model = zo.offload(build(make), zo.OffloadConfig(precision="fp32", grads="device"))
    made: dict[str, int] = {}
    for name, param in model.named_parameters():
        param.register_hook(lambda grad, name=name: made.update({name: grad.data_ptr()}))
    model(tokens_of(0)).backward()
    same = [name for name, param in model.named_parameters() if param.grad.data_ptr() == made[name]]
    assert len(same) > len(made) // 2


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


@pytest.mark.parametrize("grads", ["cpu", "device", "nvme"])
@pytest.mark.parametrize("device", [HostDevice, LateDevice])
def test_gradients_wider_than_their_parameter_lose_nothing(
    device: Callable[[], object], grads: str, on_device: Use, nvme: Path
) -> None:
    """Torch takes them, with `grad_dtype`."""
    on_device(device())
    model = Widened()
    model.wide.weight.grad_dtype = None
    zo.offload(model, zo.OffloadConfig(precision="bf16", grads=grads, nvme=nvme, durability="scratch"))
    optimizer = zo.AdamW(model.parameters())
    for _ in range(2):
        WideGrad.made.clear()
        for count in (1, 2):
            model(torch.randn(3, 40)).backward()
            with zo.gathered(model, kind="grads") as found:
                assert torch.equal(found["wide.weight"], sum(WideGrad.made))
                assert len(WideGrad.made) == count and found["narrow.weight"].any()
        optimizer.step()


class Forgetting(LateDevice):
    """Keeps no download's source, as a GPU's lane does not: what autograd does with memory that nobody else holds."""

    def __init__(self) -> None:
        super().__init__()
        self.read: list[int] = []  # addresses, in order

    def download(self, target: torch.Tensor, source: torch.Tensor, **_: Any) -> Handoff:
        self.read.append(source.data_ptr())
        target.copy_(source)
        return Handoff(target, super().mark())


class Noted(torch.autograd.Function):
    """Notes where its gradient is made, and forgets what has been read before."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, made: list[int], read: list[int]) -> torch.Tensor:
        ctx.made, ctx.read = made, read
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        grad = grad * 2
        ctx.made.append(grad.data_ptr())
        ctx.read.clear()
        return grad, None, None


class SharedGrads(nn.Module):
    """The gradient of `offset` is a view of that of `x`, to which another one is added later."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.offset = nn.Parameter(torch.randn(4, 8))
        self.made: list[int] = []
        self.read: list[int] = []
        self.added: list[tuple[int, list[int]]] = []

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        x = self.first(rows)
        earlier = x * 3
        x.register_hook(lambda grad: self.added.append((grad.data_ptr(), list(self.read))))
        return (Noted.apply(x + self.offset.unsqueeze(0), self.made, self.read) * earlier).sum()


def test_memory_that_a_download_reads_is_not_added_to(on_device: Use) -> None:
    device = Forgetting()
    on_device(device)
    model = zo.offload(build(SharedGrads), zo.OffloadConfig(precision="fp32", grads="cpu"))
    model.read = device.read
    model(torch.ones(1, 4, 8)).backward()
    [made], [(added, read)] = model.made, model.added
    assert read and not (added == made and made in read)
    zo.close(model)


@pytest.mark.parametrize("device", [LateDevice, Forgetting])
def test_gradients_with_a_graph_of_their_own(device: type[LateDevice], on_device: Use) -> None:
    """`create_graph=True`: where they rest they are no part of it."""
    on_device(device())
    model = zo.offload(build(lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))), zo.OffloadConfig())
    optimizer, losses = zo.AdamW(model.parameters(), lr=1e-2), []
    for _ in range(3):
        loss = model(torch.ones(4, 8)).sum()
        loss.backward(create_graph=True)
        zo.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[0] > losses[1] > losses[2]
    zo.close(model)
