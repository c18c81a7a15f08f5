"""torch.set_default_dtype, torch.set_default_device and `with torch.device(...)` change no bit, no dtype and no device
of what a run computes, keeps, writes and returns. They are for what the program makes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero_offload as zo
from tests.helpers.disk import runtime
from tests.helpers.models import TinyLM, build, tokens_of
from tests.helpers.pairwise import in_turn
from tests.helpers.ranks import RankPool
from zero_offload.optim.optimizer import FusedOptimizer
from zero_offload.storage.shards.shard import Component

DEFAULTS = ("bfloat16", "float16", "float64", "set_default_device", "torch.device")
TIERS: dict[str, dict[str, Any]] = {
    "cpu": {"params": "cpu", "grads": "cpu", "optimizer": "cpu"},
    "nvme": {"params": "nvme", "grads": "nvme", "optimizer": "nvme", "activations": "nvme", "device_memory": "8MiB"},
    "device": {"params": "device", "grads": "device", "optimizer": {"device": 0.5, "cpu": 0.25, "nvme": 0.25}},
}
PRECISIONS: dict[str, Any] = {
    "fp32": "fp32",
    "bf16": "bf16",
    "fp16": "fp16",
    "compact": zo.Precision(compute="bf16", states="compact"),
}
OPTIMIZERS: dict[str, Callable[[Any], FusedOptimizer]] = {
    "AdamW": lambda params: zo.AdamW(params, lr=1e-2, weight_decay=0.1, amsgrad=True),
    "Adam": lambda params: zo.Adam(params, lr=1e-2),
    "Adagrad": lambda params: zo.Adagrad(params, lr=1e-2, initial_accumulator_value=0.1),
    "Lion": lambda params: zo.Lion(params, lr=1e-3),
    "SGD": lambda params: zo.SGD(params, lr=1e-2, momentum=0.9),
}
Kept = dict[str, Any]
"""By path: dtype, device, shape and bytes of tensors, and what else there is."""


TOGETHER = "bfloat16 set_default_device", "float64 torch.device"
"""A dtype and a device each: what is made without its own dtype, or device, is wrong under either."""


@contextlib.contextmanager
def under(default: str | None) -> Iterator[None]:
    first, _, rest = (default or "").partition(" ")
    if rest:
        with under(first), under(rest):
            yield
    elif default is None:
        yield
    elif default == "torch.device":
        with torch.device("meta"):
            yield
    elif default == "set_default_device":
        torch.set_default_device("meta")
        try:
            yield
        finally:
            torch.set_default_device(None)
    else:
        torch.set_default_dtype(getattr(torch, default))
        try:
            yield
        finally:
            torch.set_default_dtype(torch.float32)


def kept(value: Any, path: str = "") -> Kept:
    if isinstance(value, Tensor):
        raw = value.detach().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)
        return {path: (value.dtype, value.device, value.shape, raw.cpu().numpy().tobytes())}
    if isinstance(value, dict | list):
        pairs = value.items() if isinstance(value, dict) else enumerate(value)
        return {name: each for key, inner in pairs for name, each in kept(inner, f"{path}/{key}").items()}
    return {path: value}


class Trained:
    """A model in training; `seen` is all that it has returned."""

    def __init__(self, model: nn.Module, config: zo.OffloadConfig, make: Callable[[Any], FusedOptimizer]) -> None:
        self.model = zo.offload(model, config)
        self.optimizer = make(model.parameters())
        self.scaler = zo.GradScaler(init_scale=2.0**16)
        self.seen: Kept = {}

    def see(self, **values: Any) -> None:
        for name, value in values.items():
            self.seen |= kept(value, f"{len(self.seen)} {name}")

    def step(self, seed: int) -> None:
        with zo.no_sync(self.model):
            self.scaler.scale(self.model(tokens[seed])).backward()
        losses = zo.accumulate(
            self.model, [tokens[seed + 1], tokens[seed + 2]], lambda model, batch: self.scaler.scale(model(batch))
        )
        self.scaler.unscale_(self.optimizer)
        with zo.gathered(self.model, kind="grads") as grads:
            self.see(grads=dict(grads))
        norm = zo.clip_grad_norm_(self.model, 0.5)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        zo.commit(self.model, self.optimizer)
        self.see(losses=list(losses), norm=norm, scale=self.scaler.get_scale())

    def look(self) -> None:
        self.see(model=self.model.state_dict(), optimizer=self.optimizer.state_dict())
        with zo.gathered(self.model, kind="master") as masters:
            self.see(masters=dict(masters))


tokens = [tokens_of(seed) for seed in range(12)]


def story(default: str | None, folder: Path, tier: str, precision: str, optimizer: str) -> Kept:
    make, choices = OPTIMIZERS[optimizer], TIERS[tier] | {"precision": PRECISIONS[precision]}
    config = zo.OffloadConfig(nvme=folder / "run", existing="resume", **choices)
    again, other = build(TinyLM), build(TinyLM)
    with zo.deferred_init():
        model = build(TinyLM)
    with under(default):
        run = Trained(model, config, make)
        run.step(0)
        run.step(3)
        run.look()
        zo.save_checkpoint(run.model, run.optimizer, folder / "checkpoint", extra={"next": 1.5})
        with zo.gathered(run.model, mode="write"), torch.no_grad():
            run.model.norm.bias.add_(1)
        run.optimizer.load_state_dict(run.optimizer.state_dict())
        run.model.load_state_dict(run.model.state_dict())
        run.step(6)
        run.look()
        zo.load_checkpoint(run.model, run.optimizer, folder / "checkpoint", scaler=run.scaler)
        run.step(6)
        run.look()
        zo.export_pretrained(run.model, folder / "exported")
        zo.close(run.model)
        second = Trained(again, config, make)
        resumed = zo.resume(second.model, second.optimizer, scaler=second.scaler)
        second.see(step=resumed.step if resumed else None)
        second.step(9)
        second.look()
        zo.close(second.model)
        third = Trained(other, zo.OffloadConfig(nvme=folder / "other", **choices), make)
        zo.load_pretrained(third.model, folder / "exported")
        third.look()
        zo.close(third.model)
    return {
        f"{number} {path}": each for number, of in enumerate((run, second, third)) for path, each in of.seen.items()
    }


@in_turn(tier=list(TIERS), precision=list(PRECISIONS), optimizer=list(OPTIMIZERS))
def test_a_run_is_the_same(tier: str, precision: str, optimizer: str, tmp_path: Path) -> None:
    expected = story(None, tmp_path / "none", tier, precision, optimizer)
    for default in TOGETHER:
        actual = story(default, tmp_path / default, tier, precision, optimizer)
        assert actual.keys() == expected.keys()
        assert [path for path, each in expected.items() if actual[path] != each] == [], default


def on_ranks(rank: int, world_size: int, default: str | None, stage: int, folder: str) -> Kept:
    model = build(TinyLM)
    with under(default):
        config = zo.OffloadConfig(stage=stage, precision="bf16", optimizer="nvme", nvme=folder)
        optimizer = zo.AdamW(zo.offload(model, config).parameters(), lr=1e-2)
        model(tokens[rank]).backward()
        norm = zo.clip_grad_norm_(model, 0.5)
        optimizer.step()
        with zo.gathered(model):
            found = kept([norm, {name: param.detach() for name, param in model.named_parameters()}])
        zo.close(model)
    return found


def test_ranks_are_the_same(nvme: Path, pool: RankPool) -> None:
    for stage in (1, 3):
        expected = pool.succeed(on_ranks, None, stage, str(nvme / str(stage)))
        for default in ("bfloat16", "set_default_device"):
            assert pool.succeed(on_ranks, default, stage, str(nvme / f"{stage}{default}")) == expected


# Ordinary parameters


@pytest.mark.parametrize("default", DEFAULTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
def test_ordinary_parameters_are_the_same(optimizer: str, dtype: torch.dtype, default: str) -> None:
    def run(default: str | None) -> Kept:
        params = [nn.Parameter(torch.linspace(-1, 1, 65, dtype=dtype, device="cpu"))]
        with under(default):
            made, scaler = OPTIMIZERS[optimizer](params), zo.GradScaler(init_scale=2.0**16)
            for _ in range(5):
                scaler.scale(params[0].square().sum()).backward()
                scaler.step(made)
                scaler.update()
                made.zero_grad()
            return kept([params, made.state_dict()["state"], scaler.scale(params[0].detach())])

    assert run(default) == run(None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("optimizer", ["AdamW", "Adam", "Adagrad"])
def test_steps_are_counted_past_256(optimizer: str, dtype: torch.dtype) -> None:
    """bf16 has no 257; a state dict that was saved with such a count goes on, too."""
    param = nn.Parameter(torch.ones(3, dtype=dtype))
    with under("bfloat16"):
        made = OPTIMIZERS[optimizer]([param])
        param.grad = torch.ones_like(param)
        made.step()
        saved = made.state_dict()
        saved["state"][0]["step"] = torch.tensor(256.0)
        made.load_state_dict(saved)
        made.step()
    step = made.state[param]["step"]
    assert (step.item(), step.dtype, step.device.type) == (257.0, torch.float32, "cpu")


def test_the_scale_is_fp32() -> None:
    """In fp16 2**16 would be infinite."""
    with under("float16"):
        scaled = zo.GradScaler(init_scale=2.0**16).scale(torch.ones((), dtype=torch.float32))
    assert (scaled.item(), scaled.dtype) == (65536.0, torch.float32)


# The store


@pytest.mark.parametrize("tier", ["cpu", "nvme"])
@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda values: values.to(torch.bfloat16), "torch.bfloat16 on cpu"),
        (lambda values: values[:-1], "elements of torch.float32 on cpu, and was"),
        (lambda values: values.to("meta"), "torch.float32 on meta"),
    ],
)
def test_an_array_of_another_kind_is_not_written(
    wrong: Callable[[Tensor], Tensor], words: str, tier: str, nvme: Path
) -> None:
    model = build(TinyLM)
    zo.offload(model, zo.OffloadConfig(precision="fp32", params="cpu", optimizer=tier, nvme=nvme))
    optimizer = zo.AdamW(model.parameters())
    model(tokens[0]).backward()
    optimizer.step()
    before, store = kept([model.state_dict(), optimizer.state_dict()]), runtime(model).store
    shard = store.shards[0]

    def source(component: Component, begin: int, end: int) -> Tensor:
        values = store.read_component(shard, component)[begin:end].clone()
        return wrong(values) if component is Component.EXP_AVG else values

    with pytest.raises(zo.ZeroOffloadError, match=words):
        store.write_components(shard, source)
    assert kept([model.state_dict(), optimizer.state_dict()]) == before
    zo.close(model)
