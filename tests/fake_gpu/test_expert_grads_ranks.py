"""Gradients of trained experts over two ranks: slices leave each device, and pieces come back to be reduced."""

from __future__ import annotations

import functools
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import zero_offload as zo
from tests.fake_gpu.device import TYPE, Policy
from tests.fake_gpu.test_expert_grads import LOOKS, OF_ONE_BYTES, experts_in, large, peak_bytes
from tests.fake_gpu.test_ranks import SCHEDULES, late, pool  # noqa: F401
from tests.helpers import experts, ranks
from tests.helpers.experts import NUM_EXPERTS, experts_lm
from tests.helpers.models import build
from tests.helpers.pairwise import Row, full, label, pairwise
from tests.helpers.ranks import Case, Outcome, RankPool, read_params, rows_of
from tests.helpers.reference import param_groups
from zero_offload.base.types import Tier
from zero_offload.model.api import need_runtime
from zero_offload.runtime.grads.section import DevicePartial, StagedPartial
from zero_offload.runtime.grads.sections import GradSections
from zero_offload.standins.sliced_grad import GradSlices, SlicedGrad
from zero_offload.storage.shards.grad_store import HostGrads

MATRIX: dict[str, Any] = {
    "stage": [0, 1, 2, 3],
    "params": ["cpu", "nvme"],
    "grads": ["cpu", "nvme"],
    "precision": ["fp32", "bf16", "fp16", "bf16 reduced in bf16"],
    "reduction": ["mean", "sum"],
    "size": [1, 2, 4],
    "schedule": SCHEDULES[1:],
    "job": [(1, None, "plain"), (1, 0.5, "plain"), (3, 0.5, "plain"), (3, None, "no_sync"), (3, 0.5, "by_unit")],
}


make = functools.partial(experts_lm, dim=48, inner=40, num_blocks=2, trained=True)


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Slices that leave, gradients that come back whole, and parts that come to rest."""
    found = Counter[str]()
    with ExitStack() as stack:
        for kind, name in ((GradSlices, "put"), (SlicedGrad, "whole"), (HostGrads, "add_part")):
            stack.enter_context(mock.patch.object(kind, name, _counting(getattr(kind, name), found)))
        yield found


def _counting(call: Callable[..., Any], found: Counter[str]) -> Callable[..., Any]:
    def counting(*args: Any) -> Any:
        found[call.__name__] += 1
        return call(*args)

    return counting


@contextmanager
def whole_gradients() -> Iterator[None]:
    """As if experts' gradients were like others."""

    def new_partial(self: Any, section: Any, experts: Any) -> DevicePartial:
        return DevicePartial(section.layout, self._device)

    with mock.patch.object(GradSections, "_new_partial", new_partial):
        yield


# Training


def case_of(row: Row) -> Case:
    precision: Any = row["precision"]
    if precision == "bf16 reduced in bf16":
        precision = zo.Precision("bf16", reduce="bf16")
    settings = {"stage": row["stage"], "precision": precision, "grad_reduction": row["reduction"]}
    *job, how = row["job"]
    return Case(settings, 3, *job, no_sync=how == "no_sync", by_unit=how == "by_unit")


def train(rank: int, world_size: int, case: Case, size: int, is_whole: bool) -> tuple[Outcome, Counter[str]]:
    model = build(functools.partial(make, size=size))
    with whole_gradients() if is_whole else nullcontext():
        zo.offload(model, zo.OffloadConfig(**case.settings))
    optimizer, out = zo.AdamW(param_groups(model), lr=1e-2, weight_decay=0.1), Outcome()
    with counted() as found:
        ranks.steps(case, (rank, world_size), model, optimizer, range(case.num_steps), out)
    out.params = read_params(model)
    zo.close(model)
    return out, found


def check(pool: RankPool, row: Row, nvme: Path, **settings: Any) -> None:  # noqa: F811
    case = case_of(row)
    placed = {name: row[name] for name in ("params", "grads")}
    # Little memory: units leave, so micro-batches take turns.
    case.settings.update(placed, nvme=str(nvme / "slices"), device_memory="28MiB", **settings)
    found = pool.succeed(late, *row["schedule"], train, case, row["size"], False)
    case = case_of(row)
    case.settings["durability"] = "scratch"
    whole = pool.succeed(late, Policy.EAGER, 0, train, case, row["size"], True)
    assert [out for out, _ in found] == [out for out, _ in whole]
    for _, count in found:
        assert count["put"] >= 3 * 2 * NUM_EXPERTS and count["add_part"] and not count["whole"]


ROWS = pairwise(MATRIX)
FEW = 7
"""Rows after which every value has been met once."""


@pytest.mark.parametrize("row", [*ROWS[:FEW], *map(full, ROWS[FEW:])], ids=label)
def test_slices_train_to_the_bits_of_whole_gradients(pool: RankPool, row: Row, nvme: Path) -> None:  # noqa: F811
    check(pool, row, nvme)


@pytest.mark.parametrize("how", ["plain", "no_sync"])
@pytest.mark.parametrize("grads", ["cpu", "nvme"])
def test_updates_inside_of_backward(pool: RankPool, grads: str, how: str, nvme: Path) -> None:  # noqa: F811
    row = {name: values[-1] for name, values in MATRIX.items()} | {"grads": grads, "size": 1, "precision": "bf16"}
    check(pool, row | {"job": (1 + (how == "no_sync"), None, how)}, nvme, overlap="backward")


# Other looks at gradients


def look(rank: int, world_size: int, name: str, precision: str, is_whole: bool) -> tuple[Any, Counter[str]]:
    """A backward or several, and a step of the gradients: parameters and norm."""
    model = build(functools.partial(make, size=1))
    config = zo.OffloadConfig(params="cpu", grads="cpu", precision=precision, durability="scratch")
    with whole_gradients() if is_whole else nullcontext():
        zo.offload(model, config)
    optimizer = zo.SGD(param_groups(model), lr=1.0)
    with counted() as found:
        LOOKS[name][0](model, experts_in(model))
    norm = zo.clip_grad_norm_(model, 0.1).item()
    optimizer.step()
    params = read_params(model)
    zo.close(model)
    return Outcome([], [norm], params), found


@pytest.mark.parametrize("name", LOOKS)
def test_whatever_looks_at_gradients(pool: RankPool, name: str) -> None:  # noqa: F811
    whole = pool.succeed(late, Policy.LATE, 0, look, name, "bf16", True)
    found = pool.succeed(late, Policy.LATE, 0, look, name, "bf16", False)
    assert [out for out, _ in found] == [out for out, _ in whole]
    for _, count in found:
        assert count["put"] and bool(count["whole"]) == LOOKS[name][1]


# Memory


def peaks(rank: int, world_size: int, settings: dict[str, Any], how: str, is_whole: bool) -> tuple[int, int, int, int]:
    """Bytes of the device that backward takes, and that are planned for it; of the host."""
    model = build(functools.partial(large, 1))
    with whole_gradients() if is_whole else nullcontext():
        zo.offload(model, zo.OffloadConfig(precision="fp32", durability="scratch", **settings))
    optimizer, peak = zo.SGD(param_groups(model), lr=1e-2), 0

    def loss_of(model: nn.Module, step: int) -> torch.Tensor:
        loss: torch.Tensor = model(rows_of(step, rank, world_size).to(TYPE))
        return loss

    for _ in range(2):  # the first takes memory for groups
        peak = 0
        if how == "by_unit":
            peak = peak_bytes(lambda: zo.accumulate(model, range(3), loss_of))
        else:
            with zo.no_sync(model) if how == "no_sync" else nullcontext():
                peak = peak_bytes(loss_of(model, 0).backward)
            peak = max(peak, peak_bytes(loss_of(model, 1).backward))
        peak = max(peak, peak_bytes(optimizer.step))
        optimizer.zero_grad()
    plan = need_runtime(model, "a test").sizes.plan
    host = zo.stats(model).resident_bytes["cpu"]
    zo.close(model)
    return peak, plan.staging_bytes[Tier.DEVICE], host, plan.used_bytes(Tier.CPU)


@pytest.mark.parametrize(
    ("stage", "grads", "how"),
    [full(3, "cpu", "plain"), full(3, "nvme", "by_unit"), full(2, "cpu", "no_sync"), (1, "nvme", "plain")],
)
def test_backward_takes_a_few_experts_of_the_device_and_no_layer(
    pool: RankPool,  # noqa: F811
    stage: int,
    grads: str,
    how: str,
    nvme: Path,
) -> None:
    settings = {"stage": stage, "params": "cpu", "grads": grads, "nvme": str(nvme), "device_memory": "256MiB"}
    for peak, planned, host, planned_host in pool.succeed(late, Policy.LATE, 0, peaks, settings, how, False):
        assert peak < min(7 * OF_ONE_BYTES, planned)
        assert how != "plain" or host <= planned_host
    for peak, *_ in pool.succeed(late, Policy.LATE, 0, peaks, settings, how, True):
        assert peak > 2 * NUM_EXPERTS * OF_ONE_BYTES


# A rank that meets no expert


@pytest.mark.parametrize("how", ["plain", "by_unit", "no_sync"])
@pytest.mark.parametrize("stage", [0, 1, 3])
def test_a_rank_that_meets_no_expert_adds_zeros(pool: RankPool, stage: int, how: str) -> None:  # noqa: F811
    settings = {"stage": stage, "params": "cpu", "grads": "cpu", "durability": "scratch"}
    grouped = functools.partial(make, size=1)
    expected, _ = pool.succeed(experts.plain_beside_none, functools.partial(make, size=0), 1, how)
    for found in pool.succeed(late, Policy.RANDOM, 1, experts.train_beside_none, grouped, settings, 1, how):
        assert [name for name in expected if not torch.equal(found[name], expected[name])] == []


# Early ends


def broken_off(rank: int, world_size: int) -> tuple[list[int], bool]:
    """Staging after backwards that end in the middle of a layer and of a step; whether the next is like the first."""
    model = build(functools.partial(make, size=1))
    zo.offload(model, zo.OffloadConfig(params="cpu", grads="cpu", precision="fp32", durability="scratch"))
    arena, found = need_runtime(model, "a test").store.arena, list[int]()
    optimizer, norms = zo.SGD(model.parameters(), lr=0.1), list[float]()

    def backward() -> None:
        model(rows_of(0, rank, world_size).to(TYPE)).backward()

    for breaks in (False, True, True, True, False):
        calls, put = Counter[str](), StagedPartial.put

        def counting(self: Any, *args: Any, put: Any = put, calls: Counter[str] = calls, **names: Any) -> None:
            calls["put"] += 1
            if calls["put"] == 2:
                raise RuntimeError("in the middle of a section")
            put(self, *args, **names)

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if breaks:
                with mock.patch.object(StagedPartial, "put", counting), pytest.raises(RuntimeError, match="middle"):
                    backward()
                continue
            backward()
        norms.append(zo.clip_grad_norm_(model, 1.0).item())
        optimizer.zero_grad()
        found.append(arena.allocated_bytes)
    zo.close(model)
    return found, norms[0] == norms[1]


def test_gradients_of_a_backward_that_breaks_off_are_dropped(pool: RankPool) -> None:  # noqa: F811
    for (before, after), is_same in pool.succeed(late, Policy.LATE, 0, broken_off):
        assert before == after and is_same
