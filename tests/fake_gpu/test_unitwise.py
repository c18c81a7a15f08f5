"""An optimizer of others over a model that a GPU computes has the bits of the host, wherever it steps. States and
masters rest anywhere. Products of matrices, and states in the GPU's memory, are stepped there; all else on the host."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zero_offload as zo
from tests.fake_gpu import device
from tests.fake_gpu.device import LATE, TYPE, Policy
from tests.helpers.disk import close_broken
from tests.helpers.models import WIDE, TinyLM, build, tokens_of
from tests.helpers.reference import read_masters
from zero_offload.base.types import Tier
from zero_offload.hardware.device import read_memory

pytestmark = pytest.mark.usefixtures("late")

Makers = dict[str, Callable[[list[nn.Parameter]], list[torch.optim.Optimizer]]]


def matrices(params: list[nn.Parameter]) -> list[nn.Parameter]:
    return [param for param in params if param.dim() == 2]


def others(params: list[nn.Parameter]) -> list[nn.Parameter]:
    return [param for param in params if param.dim() != 2]


class Growing(torch.optim.Optimizer):
    """Plain SGD that keeps all gradients so far, in device memory and on the host, and multiplies matrices."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is None:
                    continue
                state = self.state[param]
                state["kept"] = [*state.get("kept", ()), param.grad.clone()]
                state["count"] = state.get("count", 0) + 1
                state["norms"] = torch.tensor([each.norm().item() for each in state["kept"]])
                flat = param.view(-1, 1) if param.dim() < 2 else param
                flat.addmm_(state["kept"][-1].view_as(flat), torch.eye(flat.shape[1]).to(flat), alpha=-group["lr"])


MAKERS: Makers = {
    "NAdam": lambda params: [torch.optim.NAdam(params, 1e-2, foreach=True)],
    "AdamW": lambda params: [torch.optim.AdamW(params, 1e-2, amsgrad=True)],
    "AdamW fused": lambda params: [torch.optim.AdamW(params, 1e-2, fused=True)],
    "Adafactor": lambda params: [torch.optim.Adafactor(params, 1e-2)],
    "Adagrad": lambda params: [torch.optim.Adagrad(params, 1e-2)],
    "SGD": lambda params: [torch.optim.SGD(params, 0.1, momentum=0.9)],
    "Muon": lambda params: [
        torch.optim.Muon(matrices(params), 1e-2, momentum=0.9),
        torch.optim.RMSprop(others(params), 1e-3),
    ],
    "zo.Muon": lambda params: [zo.Muon(params, 1e-2, adamw={"lr": 1e-3})],
    "Growing": lambda params: [Growing(params)],
}
ON_DEVICE = ("Muon", "zo.Muon", "Growing")
"""Those that multiply matrices."""
PLACEMENTS: list[tuple[Any, Any, Any]] = [
    ("device", "device", "cpu"),
    ("device", "cpu", "nvme"),
    ("cpu", "device", "cpu"),
    ("cpu", "cpu", {"cpu": 0.5, "nvme": 0.5}),
    ("nvme", "nvme", "nvme"),
]
ON_GPU: list[tuple[Any, Any, Any]] = [
    ("device", "device", "device"),
    ("cpu", "cpu", "device"),
    ("nvme", "nvme", {"device": 0.4, "cpu": 0.3, "nvme": 0.3}),
]


def train(
    config: zo.OffloadConfig, name: str, steps: range = range(4), dim: int = 32
) -> tuple[list[float], dict[str, Any]]:
    model: Any = build(lambda: TinyLM(num_blocks=3, dim=dim))
    model.blocks[1].up.requires_grad_(False)
    zo.offload(model, config)
    optimizers = [zo.unitwise(each) for each in MAKERS[name]([p for p in model.parameters() if p.requires_grad])]
    zo.resume(model, optimizers[0])
    seen = []
    for step in steps:
        for micro in range(1 + step % 2):
            loss = model(tokens_of(10 * step + micro))
            loss.backward()
            seen.append(loss.item())
        seen.append(zo.clip_grad_norm_(model, 0.5).item())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        zo.commit(model, optimizers[0])
    with zo.gathered(model, kind="master") as masters:
        found = {name: value.to("cpu", copy=True) for name, value in masters.items()}
    for number, optimizer in enumerate(optimizers):
        for index, entry in optimizer.state_dict()["state"].items():
            found |= {f"{number} {index} {name}": value for name, value in entry.items()}
    zo.close(model)
    return seen, found


def differing(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    assert found.keys() == expected.keys()
    return [name for name, value in expected.items() if not is_same(found[name], value)]


def is_same(one: Any, other: Any) -> bool:
    if isinstance(other, list):
        return len(one) == len(other) and all(map(is_same, one, other))
    return torch.equal(one, other) if isinstance(other, torch.Tensor) else bool(one == other)


def check(name: str, precision: Any, placement: Any, policy: Policy, nvme: Path, dim: int = 32) -> None:
    params, grads, optimizer = placement
    with device.on_host():
        expected = train(zo.OffloadConfig(precision=precision), name, dim=dim)
    device.policy(policy, 1)
    config = zo.OffloadConfig(
        params=params, grads=grads, optimizer=optimizer, precision=precision, nvme=nvme, durability="scratch"
    )
    seen, found = train(config, name, dim=dim)
    assert seen == expected[0]
    assert differing(found, expected[1]) == []


@pytest.mark.parametrize(
    ("precision", "placement", "policy"),
    [*zip(itertools.cycle(["fp32", "bf16", "fp16"]), PLACEMENTS * 2, itertools.cycle(LATE))],
    ids=str,
)
def test_the_bits_of_the_host(precision: str, placement: Any, policy: Policy, tmp_path: Path) -> None:
    check("NAdam", precision, placement, policy, tmp_path)


@pytest.mark.parametrize(
    ("name", "placement", "precision", "policy"),
    [
        (*pair, precision, policy)
        for pair, precision, policy in zip(
            [*itertools.product(ON_DEVICE, PLACEMENTS), *itertools.product(MAKERS, ON_GPU)],
            itertools.cycle(["fp32", "bf16", "fp16", zo.Precision(compute="bf16", states="compact")]),
            itertools.cycle([*LATE, LATE[0]]),
        )
    ],
    ids=str,
)
def test_steps_on_the_gpu_have_the_bits_of_the_host(
    name: str, placement: Any, precision: Any, policy: Policy, tmp_path: Path
) -> None:
    check(name, precision, placement, policy, tmp_path)


@pytest.mark.parametrize("placement", [("cpu", "cpu", "cpu"), ("nvme", "nvme", "nvme"), ("cpu", "cpu", "device")])
def test_sections_of_several_chunks(placement: Any, tmp_path: Path) -> None:
    check("Growing", "bf16", placement, LATE[1], tmp_path, dim=WIDE)


@pytest.mark.parametrize("name", ["AdamW", "AdamW fused", "Muon", "Growing"])
def test_a_generation_goes_on_anywhere(name: str, tmp_path: Path) -> None:
    """Committed beside the next step: on the host, in the GPU's memory, on the host, by way of the GPU, there."""
    with device.on_host():
        expected = train(zo.OffloadConfig(precision="bf16"), name, range(6))[1]
    on_host = zo.OffloadConfig(
        params="cpu", precision="bf16", nvme=tmp_path, existing="resume", durability="process", commit_every=1
    )
    in_its_memory = dataclasses.replace(on_host, optimizer="device")
    with device.on_host():
        train(on_host, name, range(1))
    train(in_its_memory, name, range(1, 2))
    train(in_its_memory, name, range(2, 3))
    with device.on_host():
        train(on_host, name, range(3, 4))
    train(on_host, name, range(4, 5))
    assert differing(train(in_its_memory, name, range(5, 6))[1], expected) == []


@pytest.mark.parametrize("placement", ["cpu", "device"])
def test_states_that_the_program_assigns(placement: Any) -> None:
    def run(config: zo.OffloadConfig) -> dict[str, torch.Tensor]:
        model: Any = zo.offload(build(TinyLM), config)
        optimizer = zo.unitwise(Growing(model.parameters()))
        for step in range(4):
            model(tokens_of(step)).backward()
            optimizer.step()
            if step == 1:
                param = model.blocks[0].up.weight
                entry = dict(optimizer.state[param])
                optimizer.state[param] = entry | {"kept": [entry["kept"][0] * 2], "count": 7}
        found = read_masters(model) | {"count": torch.tensor(optimizer.state[model.blocks[0].up.weight]["count"])}
        found |= {f"kept {n}": each for n, each in enumerate(optimizer.state[model.blocks[0].up.weight]["kept"])}
        zo.close(model)
        return {name: value.cpu() for name, value in found.items()}

    with device.on_host():
        expected = run(zo.OffloadConfig())
    assert expected["count"] == 9
    assert differing(run(zo.OffloadConfig(optimizer=placement)), expected) == []


@pytest.mark.parametrize("room", [80 << 20, 32 << 20])
def test_a_step_takes_the_memory_that_there_is(room: int) -> None:
    """Three sections at once have no place in the smaller room."""

    def masters_after_steps(on_device: bool) -> dict[str, torch.Tensor]:
        model: Any = zo.offload(build(lambda: TinyLM(num_blocks=3, dim=WIDE)), zo.OffloadConfig(params="cpu"))
        optimizer = zo.unitwise(torch.optim.Muon(matrices([*model.parameters()]), 1e-2, ns_steps=1))
        for step in range(3):
            model(tokens_of(step)).backward()
            with device.memory_limit(allocated() + room) if on_device else contextlib.nullcontext():
                optimizer.step()
        found = read_masters(model)
        zo.close(model)
        return {name: value.cpu() for name, value in found.items()}

    with device.on_host():
        expected = masters_after_steps(on_device=False)
    assert differing(masters_after_steps(on_device=True), expected) == []


@pytest.mark.parametrize("placement", [("cpu", "cpu", "cpu"), ("cpu", "cpu", "nvme"), ("cpu", "cpu", "device")])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_step_takes_the_memory_of_its_plan(precision: str, placement: Any, tmp_path: Path) -> None:
    params, grads, optimizer = placement
    config = zo.OffloadConfig(
        params=params, grads=grads, optimizer=optimizer, precision=precision, nvme=tmp_path, durability="scratch"
    )

    def muon(model: Any) -> torch.optim.Optimizer:
        return torch.optim.Muon(matrices([*model.parameters()]), 1e-2, ns_steps=1)  # five take five times as long

    model: Any = build(lambda: TinyLM(num_blocks=4, dim=WIDE))
    adamw, plan = zo.plan(model, config), zo.plan(model, config, optimizer=muon(model))
    assert "the GPU makes the step: " in str(plan)
    # Two states fit into so much, and a step of whole sections does not.
    small = dataclasses.replace(config, device_memory=adamw.used_bytes(Tier.DEVICE))
    assert zo.plan(model, small).fits
    assert optimizer == "device" or not zo.plan(model, small, optimizer=muon(model)).fits
    zo.offload(model, config)
    stepper, taken = zo.unitwise(muon(model)), []
    for step in range(3):
        model(tokens_of(step)).backward()
        device.synchronize()
        before, module = allocated(), getattr(torch, TYPE)
        module.reset_peak_memory_stats()
        stepper.step()
        taken.append(module.max_memory_allocated() - before)
    zo.close(model)
    assert max(taken) <= plan.staging_bytes[Tier.DEVICE]
    assert max(taken) > adamw.staging_bytes[Tier.DEVICE] or optimizer == "device"


def test_an_error_has_the_memory_that_a_step_needs() -> None:
    model: Any = zo.offload(build(lambda: TinyLM(num_blocks=3, dim=WIDE)), zo.OffloadConfig(params="cpu"))
    optimizer = zo.unitwise(torch.optim.Muon(matrices([*model.parameters()]), 1e-2))
    model(tokens_of(0)).backward()
    message = r"blocks.0: the optimizer steps on fakegpu:0. .* take 11 MiB there, beside .* smaller device_memory="
    with device.memory_limit(allocated() + (4 << 20)), pytest.raises(zo.CapacityError, match=message):
        optimizer.step()
    close_broken(model)


def allocated() -> int:
    memory = read_memory(torch.device(TYPE, 0))
    assert memory is not None
    return memory.allocated
