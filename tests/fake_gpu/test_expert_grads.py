"""Gradients of trained experts leave a device slice by slice, with the bits of whole ones, whatever looks at them."""

from __future__ import annotations

import contextlib
import functools
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero_offload as zo
from tests.fake_gpu import device
from tests.fake_gpu.device import TYPE
from tests.fake_gpu.training import EVERY, Schedule
from tests.helpers.experts import NUM_EXPERTS, ManyExperts, experts_lm
from tests.helpers.models import build, tokens_of
from tests.helpers.pairwise import Row, label, pairwise
from tests.helpers.reference import Recipe, Trajectory, param_groups, read_masters, train_offloaded, train_plain
from zero_offload.base.types import MIB, Tier
from zero_offload.model.api import need_runtime
from zero_offload.standins.sliced_grad import GradSlices
from zero_offload.storage.memory import staging
from zero_offload.storage.memory.arena import Arena
from zero_offload.storage.memory.pool import SpanPool
from zero_offload.storage.shards.grad_downloads import GradDownloads

MATRIX: dict[str, Any] = {
    "params": ["cpu", "nvme"],
    "grads": ["cpu", "nvme"],
    "optimizer": ["cpu", "nvme", "device"],
    "precision": ["fp32", "bf16", "fp16"],
    "size": [1, 2, 4, NUM_EXPERTS],
    "micro_batches": [1, 3],
    "checkpointing": [False, True],
    "max_norm": [None, 0.5],
    "schedule": EVERY,
}


def make(size: int, *, checkpointing: bool = False) -> nn.Module:
    model = experts_lm(size=size, trained=True)
    if checkpointing:
        zo.checkpoint(model.blocks)
    return model


@functools.cache
def plain(precision: str, micro_batches: int, max_norm: float | None) -> Trajectory:
    """On the CPU, whose kernels the device runs."""
    return train_plain(Recipe(functools.partial(make, 0), precision, 3, micro_batches, max_norm))


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Slices that were sent, and gradients that came back whole."""
    found = Counter[str]()

    def count(kind: Any, name: str) -> None:
        call = getattr(kind, name)

        def noted(self: Any, *args: Any) -> Any:
            found[name] += 1
            return call(self, *args)

        monkeypatch.setattr(kind, name, noted)

    count(GradSlices, "put")
    count(GradDownloads, "upload")
    return found


@pytest.mark.parametrize("row", pairwise(MATRIX), ids=label)
def test_slices_train_to_the_bits_of_plain_tensors(row: Row, nvme: Path, seen: Counter[str]) -> None:
    schedule: Schedule = row["schedule"]
    device.policy(*schedule)
    model = functools.partial(make, row["size"], checkpointing=row["checkpointing"])
    recipe = Recipe(model, row["precision"], 3, row["micro_batches"], row["max_norm"])
    settings = {name: row[name] for name in ("params", "grads", "optimizer", "precision")}
    config = zo.OffloadConfig(nvme=nvme, device_memory="28MiB", durability="scratch", **settings)
    found = train_offloaded(recipe, config)
    assert device.take_races() == []
    assert found == plain(row["precision"], row["micro_batches"], row["max_norm"])
    assert seen["put"] >= row["micro_batches"] * 3 * 3 and not seen["upload"]


# Other looks at gradients

Look = Callable[[nn.Module, "ManyExperts"], None]
"""A backward or several, given the model and the experts of its first block."""


def loss_of(model: nn.Module, step: int = 0) -> Tensor:
    loss: Tensor = model(tokens_of(step).to(TYPE))
    return loss


def experts_in(model: nn.Module) -> ManyExperts:
    return next(each for each in model.modules() if isinstance(each, ManyExperts))


def backward(model: nn.Module, experts: ManyExperts) -> None:
    loss_of(model).backward()


def called_twice(model: nn.Module, experts: ManyExperts) -> None:
    (loss_of(model) + 2 * loss_of(model, 1)).backward()


def used_elsewhere(model: nn.Module, experts: ManyExperts) -> None:
    """Beside its groups the parameter is used whole."""

    def penalty(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        return output + experts.up.square().mean() + experts.down.abs().mean()

    with zo.gathered(experts):
        handle = experts.register_forward_hook(penalty)
        loss_of(model).backward()
        handle.remove()


def kept_graph(model: nn.Module, experts: ManyExperts) -> None:
    loss = loss_of(model)
    loss.backward(retain_graph=True)
    loss.backward()


def hooked(model: nn.Module, experts: ManyExperts) -> None:
    handle = experts.up.register_hook(lambda grad: grad * 3)
    loss_of(model).backward()
    handle.remove()
    loss_of(model, 1).backward()


def hooked_behind(model: nn.Module, experts: ManyExperts) -> None:
    def hook(param: Any) -> None:
        param.grad.mul_(3)

    handle = experts.up.register_post_accumulate_grad_hook(hook)
    loss_of(model).backward()
    handle.remove()
    loss_of(model, 1).backward()


def node_hooked(model: nn.Module, experts: ManyExperts) -> None:
    """A hook that torch puts on the node, and that no look at the parameter finds."""
    with torch._C.DisableTorchFunctionSubclass():
        node: Any = torch.autograd.graph.get_gradient_edge(experts.up).node
    handle = node.register_prehook(lambda grads: (grads[0] * 3,))
    loss_of(model).backward()
    handle.remove()


def of_some(model: nn.Module, experts: ManyExperts) -> None:
    loss_of(model).backward(inputs=[experts.up])


def of_others(model: nn.Module, experts: ManyExperts) -> None:
    (grad,) = torch.autograd.grad(loss_of(model), [next(model.parameters())])
    assert grad.abs().sum().item() > 0
    loss_of(model).backward()


def anomaly(model: nn.Module, experts: ManyExperts) -> None:
    with torch.autograd.detect_anomaly(check_nan=True):
        loss_of(model).backward()


def together(model: nn.Module, experts: ManyExperts) -> None:
    zo.accumulate(model, [0, 1, 2], lambda model, step: loss_of(model, step) / 3)


def twice_in_turns(model: nn.Module, experts: ManyExperts) -> None:
    """The experts' gradients of the first backward are whole, those of the second are not, and so on."""
    for step in range(4):
        handle = experts.up.register_hook(lambda grad: grad) if step % 2 == 0 else None
        loss_of(model, step).backward()
        if handle is not None:
            handle.remove()


LOOKS: dict[str, tuple[Look, bool]] = {
    "backward": (backward, False),
    "called twice": (called_twice, True),
    "used elsewhere": (used_elsewhere, True),
    "retain_graph": (kept_graph, False),
    "hook": (hooked, False),
    "hook behind": (hooked_behind, False),
    "hook of a node": (node_hooked, True),
    "inputs=": (of_some, False),
    "autograd.grad of others": (of_others, False),
    "anomaly": (anomaly, True),
    "zo.accumulate": (together, False),
    "in turns": (twice_in_turns, False),
}
"""Backwards, and whether gradients come back to the device for them."""


def found_after(look: Look, size: int, overlap: str, precision: str, nvme: Path) -> tuple[dict[str, Tensor], float]:
    """Gradients, their norm."""
    model = build(functools.partial(experts_lm, size=size, num_blocks=2, trained=True))
    config = zo.OffloadConfig(params="cpu", grads=overlap, nvme=nvme / str(size), precision=precision)
    zo.offload(model, config)
    look(model, experts_in(model))
    norm = zo.clip_grad_norm_(model, 0.1).item()
    with zo.gathered(model, kind="grads") as grads:
        found = {name: grad.to("cpu", copy=True) for name, grad in grads.items()}
    zo.close(model)
    return found, norm


@pytest.mark.usefixtures("late")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("grads", ["cpu", "nvme"])
@pytest.mark.parametrize("look", LOOKS)
def test_whatever_looks_at_gradients(look: str, grads: str, precision: str, nvme: Path, seen: Counter[str]) -> None:
    body, comes_back = LOOKS[look]
    whole, norm = found_after(body, 0, grads, precision, nvme)
    assert not seen
    found, found_norm = found_after(body, 2, grads, precision, nvme)
    assert seen["put"] and bool(seen["upload"]) == comes_back
    assert found_norm == norm and set(found) == set(whole)
    assert [name for name in whole if not torch.equal(found[name], whole[name])] == []


# Memory


def large(size: int, *, num_blocks: int = 2) -> nn.Module:
    return experts_lm(dim=64, inner=4000, size=size, num_blocks=num_blocks, trained=True)


OF_ONE_BYTES = 3 * 64 * 4000 * 4
"""Of one expert's matrices, fp32."""


def peak_bytes(body: Callable[[], object]) -> int:
    """Bytes that the device has more at once while `body` runs."""
    module: Any = torch.get_device_module(TYPE)
    before = module.memory_allocated()
    module.reset_peak_memory_stats()
    body()
    return int(module.max_memory_allocated() - before)


@pytest.mark.usefixtures("late")
@pytest.mark.parametrize(
    ("size", "grads", "num_micro_batches", "together"),
    [(1, "cpu", 1, False), (1, "cpu", 3, True), (2, "nvme", 3, False), (1, "device", 1, False)],
)
def test_backward_takes_a_few_experts_of_the_device_and_no_layer(
    size: int, grads: str, num_micro_batches: int, nvme: Path, *, together: bool
) -> None:
    model = build(functools.partial(large, size))
    settings = {"precision": "fp32", "durability": "scratch", "device_memory": "256MiB"}
    zo.offload(model, zo.OffloadConfig(params="cpu", grads=grads, nvme=nvme, **settings))
    optimizer = zo.SGD(param_groups(model), lr=1e-2)
    for _ in range(2):  # the first takes memory for groups
        peak, steps = 0, range(num_micro_batches)
        if together:
            peak = peak_bytes(lambda steps=steps: zo.accumulate(model, steps, loss_of))
        else:
            for step in steps:
                peak = max(peak, peak_bytes(loss_of(model, step).backward))
        optimizer.step()
        optimizer.zero_grad()
    plan = need_runtime(model, "a test").sizes.plan
    planned = plan.staging_bytes[Tier.DEVICE]
    assert zo.stats(model).resident_bytes["cpu"] <= plan.used_bytes(Tier.CPU)
    zo.close(model)
    if grads == "device":
        assert peak > 2 * NUM_EXPERTS * OF_ONE_BYTES  # of two layers
    else:
        assert peak < min(4 * OF_ONE_BYTES, planned)


@pytest.mark.usefixtures("late")
def test_micro_batches_that_take_turns_share_the_staging_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient of one leaves staging before that of the next one needs it."""
    model = build(functools.partial(large, 1, num_blocks=3))
    config = zo.OffloadConfig(params="cpu", precision="fp32", durability="scratch", device_memory="256MiB")
    zo.offload(model, config)
    made = list[int]()

    def noted(arena: Arena, nbytes: int, *what: Any) -> SpanPool:
        made.append(nbytes)
        return SpanPool(arena, nbytes, *what)

    monkeypatch.setattr(staging, "SpanPool", noted)
    zo.accumulate(model, range(4), loss_of)
    zo.close(model)
    assert made == []


@pytest.mark.usefixtures("late")
def test_experts_of_which_the_device_cannot_hold_one_layers_gradients_are_trained(nvme: Path) -> None:
    losses, masters = list[float](), list[dict[str, Tensor]]()
    module: Any = torch.get_device_module(TYPE)
    for size in (0, 1):
        model = build(functools.partial(experts_lm, dim=64, inner=20_000, size=size, num_blocks=1, trained=True))
        config = zo.OffloadConfig(nvme=nvme / str(size), params="cpu", precision="fp32", durability="scratch")
        zo.offload(model, config)
        nbytes = NUM_EXPERTS * 3 * 64 * 20_000 * 4
        limit = module.memory_reserved() + nbytes - 4 * MIB
        with device.memory_limit(limit) if size else contextlib.nullcontext():
            loss = loss_of(model)
            loss.backward()
            zo.SGD(param_groups(model), lr=1e-2).step()
        losses.append(loss.item())
        masters.append(read_masters(model))
        zo.close(model)
        module.empty_cache()
    assert losses[0] == losses[1]
    assert [name for name in masters[0] if not torch.equal(masters[0][name], masters[1][name])] == []


@pytest.mark.usefixtures("late")
def test_gradients_that_nothing_takes_are_not_made(seen: Counter[str]) -> None:
    model = build(functools.partial(large, 1))
    zo.offload(model, zo.OffloadConfig(params="cpu", precision="fp32", durability="scratch"))
    experts, first = experts_in(model), next(model.parameters())
    loss_of(model).backward(inputs=[first])  # takes memory for groups
    assert not seen
    loss = loss_of(model)
    peak = peak_bytes(lambda: torch.autograd.grad(loss, [first]))
    assert peak < OF_ONE_BYTES and not seen
    with zo.gathered(model, kind="grads") as grads:
        assert set(grads) == {"embedding.weight"}
    loss_of(model).backward(inputs=[experts.down])
    assert 0 < seen["put"] <= NUM_EXPERTS
    with zo.gathered(model, kind="grads") as grads:
        assert set(grads) == {"embedding.weight", "blocks.0.experts.down"}
    zo.close(model)


# Early ends


@pytest.mark.usefixtures("late")
def test_gradients_of_a_backward_that_breaks_off_are_dropped_and_their_staging_is_free(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = build(functools.partial(make, 2))
    zo.offload(model, zo.OffloadConfig(params="cpu", precision="fp32", durability="scratch"))
    put, calls = GradSlices.put, Counter[str]()

    def breaks(self: Any, *args: Any) -> None:
        calls["put"] += 1
        if calls["put"] == 7:
            raise RuntimeError("in the middle of a layer")
        put(self, *args)

    arena = need_runtime(model, "a test").store.arena
    loss_of(model).backward()  # takes what staging there is
    optimizer = zo.SGD(model.parameters(), lr=0.1)
    optimizer.zero_grad()
    before = arena.allocated_bytes
    for _ in range(5):
        calls.clear()
        with monkeypatch.context() as patch:
            patch.setattr(GradSlices, "put", breaks)
            with pytest.raises(RuntimeError, match="in the middle of a layer"):
                loss_of(model).backward()
        with pytest.warns(UserWarning, match="its gradients are dropped"):
            loss = loss_of(model)
        assert arena.allocated_bytes == before
    loss.backward()
    with zo.gathered(model, kind="grads") as grads:
        found = {name: grad.to("cpu", copy=True) for name, grad in grads.items()}
    zo.close(model)
    plain_model = build(functools.partial(make, 0))
    plain_model(tokens_of(0)).backward()
    assert [name for name, param in plain_model.named_parameters() if not torch.equal(found[name], param.grad)] == []


@pytest.mark.usefixtures("late")
@pytest.mark.parametrize("in_backward", [False, True])
def test_a_pass_of_the_model_inside_of_one_expert_is_an_error(*, in_backward: bool) -> None:
    """It overwrites the values that the expert computes with."""
    model = build(functools.partial(make, 2))
    zo.offload(model, zo.OffloadConfig(params="cpu", precision="fp32", durability="scratch"))
    experts, num_calls = experts_in(model), Counter[str]()

    def another(*_: object) -> None:
        num_calls["another"] += 1
        if num_calls["another"] == 1:
            with torch.enable_grad():
                loss_of(model, 3).backward()

    def one(*args: Any) -> Tensor:
        output = ManyExperts.one(*args)
        if not in_backward:
            another()
        elif output.requires_grad:
            output.register_hook(another)
        return output

    experts.one = one  # type: ignore[method-assign]
    loss = loss_of(model) if in_backward else None
    with pytest.raises(zo.ZeroOffloadError, match=r"another forward or backward of this model ran while an expert of"):
        loss_of(model) if loss is None else loss.backward()
    zo.close(model)


@pytest.mark.usefixtures("late")
def test_autograd_grad_gives_ordinary_tensors() -> None:
    found = list[tuple[Tensor, ...]]()
    for size in (0, 2):
        model = build(functools.partial(make, size))
        zo.offload(model, zo.OffloadConfig(params="cpu", precision="fp32", durability="scratch"))
        experts = experts_in(model)
        grads = torch.autograd.grad(loss_of(model), [experts.up, experts.down])
        assert all(type(grad) is Tensor for grad in grads)
        found.append(tuple(grad.cpu() for grad in grads))
        zo.close(model)
    assert all(map(torch.equal, *found))


@pytest.mark.usefixtures("late")
def test_a_hook_may_keep_a_gradient_no_longer_than_its_backward() -> None:
    """One on the node, which no look at the parameter finds."""
    model = build(functools.partial(make, 2))
    zo.offload(model, zo.OffloadConfig(params="cpu", precision="fp32", durability="scratch"))
    with torch._C.DisableTorchFunctionSubclass():
        node: Any = torch.autograd.graph.get_gradient_edge(experts_in(model).up).node
    kept = list[Tensor]()
    node.register_prehook(lambda grads: kept.append(grads[0].detach()))
    loss_of(model).backward()
    with pytest.raises(zo.ZeroOffloadError, match="this gradient is over"):
        kept[0].sum()
    zo.close(model)


@pytest.mark.usefixtures("late")
@pytest.mark.parametrize("num_tokens", [1, 2])
def test_experts_without_tokens_have_zeros(num_tokens: int) -> None:
    """Also where staging had other values before."""
    plain_model, model = build(functools.partial(make, 0)), build(functools.partial(make, 2))
    zo.offload(model, zo.OffloadConfig(params="cpu", precision="fp32", durability="scratch"))
    loss_of(model, 5).backward()
    zo.SGD(model.parameters(), lr=0.1).zero_grad()
    tokens = tokens_of(0)[:1, : num_tokens + 1]
    model(tokens.to(TYPE)).backward()
    plain_model(tokens).backward()
    with zo.gathered(model, kind="grads") as grads:
        found = {name: grad.to("cpu", copy=True) for name, grad in grads.items()}
    zo.close(model)
    expected = {name: param.grad for name, param in plain_model.named_parameters() if param.grad is not None}
    assert set(found) == set(expected)
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []
    assert any((found[name] == 0).flatten(1).all(1).any() for name in found if name.endswith(".up"))


@pytest.mark.parametrize("schedule", EVERY)
@pytest.mark.parametrize("grads", ["cpu", "nvme"])
def test_updates_inside_of_backward_take_slices(grads: str, schedule: Schedule, nvme: Path, seen: Counter[str]) -> None:
    device.policy(*schedule)
    model = build(functools.partial(make, 2))
    settings = {"precision": "fp32", "durability": "scratch", "overlap": "backward"}
    zo.offload(model, zo.OffloadConfig(params="cpu", grads=grads, nvme=nvme, **settings))
    optimizer, losses = zo.AdamW(param_groups(model), lr=1e-2), list[Tensor]()
    for step in range(4):
        losses.append(loss_of(model, step).detach())
        if step % 2 == 0:
            with zo.no_sync(model):
                loss_of(model, step + 7).backward()
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    masters = read_masters(model)
    zo.close(model)
    assert seen["put"] and not seen["upload"]
    whole = build(functools.partial(make, 0))
    optimizer = zo.AdamW(param_groups(whole), lr=1e-2)
    for step in range(4):
        if step % 2 == 0:
            whole(tokens_of(step + 7)).backward()
        loss = whole(tokens_of(step))
        loss.backward()
        assert loss.item() == losses[step].item()
        optimizer.step()
        optimizer.zero_grad()
    assert [name for name, param in whole.named_parameters() if not torch.equal(param, masters[name])] == []
