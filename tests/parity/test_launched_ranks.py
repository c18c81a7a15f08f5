"""Ranks that a launcher has started: `zo.offload` makes their process group, each rank on a GPU of its own."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import zero_offload as zo
from tests.helpers import ranks
from tests.helpers.launched import free_port, launched
from tests.helpers.models import TinyLM, build
from tests.helpers.ranks import Case, Failure, Outcome, RankPool
from tests.helpers.trainer import fork_server
from zero_offload.base.types import MIB
from zero_offload.hardware import device, probe
from zero_offload.hardware.device import DeviceChoice, choose_gpus
from zero_offload.hardware.probe import MemoryLimit
from zero_offload.model.api import runtime_of
from zero_offload.runs.ranks import joined_ranks
from zero_offload.runtime.ranks import join as joining

CASE = Case({"stage": 3, "precision": "fp32", "durability": "scratch"}, num_steps=2, max_norm=0.5)
GPUS = ("GPU-a", "GPU-b")


def _run(environment: Mapping[str, str], rank: int, job: Callable[[int], Any], told: Any) -> None:
    os.environ.update(environment)
    torch.set_num_threads(1)
    try:
        told.send(job(rank))
    except Exception as error:
        told.send(Failure(type(error).__name__, str(error)))
    told.poll(None)  # tensors are taken from where they are


def start(job: Callable[[int], Any], port: str = "", **changes: str) -> list[Any]:
    """`job(rank)` in two processes with a launcher's environment; results and failures."""
    context, port = fork_server(), port or free_port()
    pipes, processes = [context.Pipe() for _ in range(2)], []
    for rank, (_, theirs) in enumerate(pipes):
        environment = launched(rank, 2, port) | changes
        processes.append(context.Process(target=_run, args=(environment, rank, job, theirs)))
        processes[-1].start()
    try:
        assert all(mine.poll(ranks.TIMEOUT_S) for mine, _ in pipes), "a rank hangs"
        return [mine.recv() for mine, _ in pipes]
    finally:
        for process in processes:
            process.kill()
            process.join()


def train(rank: int) -> tuple[Outcome, int]:
    return ranks.train(rank, 2, CASE), dist.get_world_size()


def ranks_of_model(rank: int) -> tuple[int, bool]:
    model = zo.offload(build(TinyLM), zo.OffloadConfig())
    runtime: Any = runtime_of(model)
    zo.close(model)
    return runtime.ranks.world_size, dist.is_initialized()


def test_ranks_without_a_process_group_train_together(pool: RankPool) -> None:
    expected = pool.succeed(ranks.train, CASE)
    assert start(train) == [(outcome, 2) for outcome in expected]


def test_world_size_1_says_that_processes_train_alone() -> None:
    assert start(ranks_of_model, WORLD_SIZE="1") == [(1, False)] * 2


def fail_on_one(rank: int) -> None:
    zo.offload(build(TinyLM), zo.OffloadConfig() if rank == 0 else {"stage": 3})  # type: ignore[arg-type]


def test_an_error_before_the_group_is_made_reaches_all() -> None:
    first, second = start(fail_on_one)
    assert first == Failure("ConfigError", f"rank 1: {second.message}")
    assert "takes an OffloadConfig" in second.message


@pytest.mark.parametrize("missing", ["RANK", "WORLD_SIZE", "MASTER_ADDR"])
def test_a_part_of_the_variables_means_nothing(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Batch systems set some of them for all that they start."""
    for name, value in launched(1, 4, free_port()).items():
        monkeypatch.setenv(name, value)
    assert joining.launched_ranks() == (1, 4)
    monkeypatch.delenv(missing)
    assert joining.launched_ranks() == (0, 1)
    zo.close(zo.offload(build(TinyLM), zo.OffloadConfig()))
    assert not dist.is_initialized()


def test_a_plan_counts_the_ranks_that_will_be(monkeypatch: pytest.MonkeyPatch) -> None:
    config = zo.OffloadConfig(precision="fp32")
    alone = sum(zo.plan(TinyLM(64), config).rest_bytes.values())
    for name, value in launched(1, 2, free_port()).items():
        monkeypatch.setenv(name, value)
    assert sum(zo.plan(TinyLM(64), config).rest_bytes.values()) == pytest.approx(alone / 2, rel=0.02)  # padding
    assert not dist.is_initialized()


def budgets_of(rank: int) -> tuple[int, int, int]:
    probe.memory_limits = lambda: (MemoryLimit("host", 400 * MIB),)  # type: ignore[assignment]
    probe.nvme_free_bytes = lambda _: 600 * MIB
    planned = zo.plan(TinyLM(64), zo.OffloadConfig()).budget
    runtime: Any = runtime_of(zo.offload(build(TinyLM), zo.OffloadConfig()))
    assert runtime.sizes.hardware.device_memory_bytes == planned.device_bytes
    on_drive = zo.plan(TinyLM(64), zo.OffloadConfig(nvme=Path(__file__).parent)).budget.nvme_bytes
    return planned.cpu_bytes, runtime.sizes.placement.budget.cpu_bytes, on_drive


def test_ranks_of_a_machine_share_its_memory_and_drives() -> None:
    """Each by itself would fit, all of them would not."""
    assert start(budgets_of) == [(200 * MIB, 200 * MIB, 300 * MIB)] * 2


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("MASTER_PORT", None, "MASTER_PORT expected"),
        ("RANK", "first", "RANK and WORLD_SIZE are not both whole numbers"),
    ],
)
def test_what_cannot_be_joined_is_one_error(
    name: str, value: str | None, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for each, text in launched(1, 2, free_port()).items():
        monkeypatch.setenv(each, text)
    monkeypatch.delenv(name)
    if value is not None:
        monkeypatch.setenv(name, value)
    with pytest.raises(zo.ConfigError, match=rf"{says}.*\. .*WORLD_SIZE=1"):
        zo.offload(build(TinyLM), zo.OffloadConfig())
    assert not dist.is_initialized()


# Starts again


def meet(rank: int) -> tuple[float, bool]:
    time.sleep(0 if rank else 0.3)  # the other one finds what is left of the start before
    assert zo.join(timedelta(seconds=20))
    total = torch.ones(1) * (1 + rank)
    dist.all_reduce(total)
    zo.close(zo.offload(build(TinyLM), zo.OffloadConfig()))
    return total.item(), zo.join()


def meet_in_vain(rank: int) -> None:
    if rank == 0:
        zo.join(timedelta(seconds=1))


def test_each_start_meets_on_a_store_that_outlives_it() -> None:
    """torchrun's own is one; each start ends by a kill, some in the midst of meeting."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    kept = {"port": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    for _ in range(2):
        assert [start(meet, **kept) for _ in range(2)] == [[(3.0, False)] * 2] * 2
        failure, _ = start(meet_in_vain, **kept)
        assert failure.kind == "ConfigError" and "rank 1 did not come within 1 s" in failure.message


# GPUs: a stand-in for what this machine sees


class Gpus:
    """Of one process, for its life: what torch is asked about GPUs, and the group that is made."""

    def __init__(self, visible: tuple[str, ...], current: int = 0) -> None:
        self.visible, self.current = visible, current
        self.asked: dict[str, Any] = {}
        device.DeviceChoice.here = self.here  # type: ignore[method-assign]
        torch.accelerator.set_device_index = self.set  # type: ignore[assignment]
        self._init = dist.init_process_group
        dist.init_process_group = self.init

    def here(self) -> DeviceChoice:
        return DeviceChoice("host 1", self.visible, self.current, int(os.environ["LOCAL_RANK"]), True, "cuda")

    def set(self, index: int) -> None:
        self.current = index

    def init(self, backend: str, **settings: Any) -> None:
        self.asked = {"backend": backend} | settings
        self._init("gloo", **(settings | {"device_id": None}))


def join(rank: int) -> tuple[int, str, str]:
    gpus = Gpus(GPUS)
    with joined_ranks():
        return gpus.current, gpus.asked["backend"], str(gpus.asked["device_id"])


def test_each_rank_takes_the_gpu_of_its_local_rank() -> None:
    assert start(join) == [(0, "cpu:gloo,cuda:nccl", "cuda:0"), (1, "cpu:gloo,cuda:nccl", "cuda:1")]


def on_one_gpu(rank: int, world_size: int) -> None:
    before = device.DeviceChoice.here
    device.DeviceChoice.here = lambda: DeviceChoice("host 1", GPUS[:1], 0, rank, True, "cuda")  # type: ignore[method-assign]
    try:
        zo.offload(build(TinyLM), zo.OffloadConfig())
    finally:
        device.DeviceChoice.here = before  # type: ignore[method-assign]


def test_two_ranks_on_one_gpu_are_an_error_on_both(pool: RankPool) -> None:
    for failure in pool.call(on_one_gpu):
        assert failure.kind == "ConfigError" and "ranks 0 and 1 on host compute on the same GPU" in failure.message


def choice(
    host: str, current: int, local_rank: int | None, gpus: tuple[str, ...] = GPUS, *, is_made: bool = True
) -> DeviceChoice:
    return DeviceChoice(host, gpus, current, local_rank, is_made, "cuda")


@pytest.mark.parametrize(
    ("found", "chosen"),
    [
        ([choice("a", 0, 0), choice("a", 0, 1)], [0, 1]),
        ([choice("a", 1, 0), choice("a", 0, 1)], [1, 0]),  # by torch.accelerator.set_device_index
        ([choice("a", 0, 0), choice("a", 1, 1)], [0, 1]),
        ([choice("a", 0, 0, GPUS[:1]), choice("a", 0, 1, GPUS[1:])], [0, 0]),  # by CUDA_VISIBLE_DEVICES
        ([choice("a", 0, 0), choice("b", 0, 0)], [0, 0]),
        ([choice(host, 0, local_rank) for host in "ab" for local_rank in (0, 1)], [0, 1, 0, 1]),
        ([choice("a", 0, 1, is_made=False)], [1]),  # alone, beside others that train their own models
        ([choice("a", 0, 1)], [0]),
        ([choice("a", 0, None)], [0]),
        ([choice("a", 0, rank, ()) for rank in (0, 1)], [0, 0]),  # no GPU
    ],
)
def test_what_the_program_has_chosen_stays(found: list[DeviceChoice], chosen: list[int]) -> None:
    assert choose_gpus(found, range(len(found))) == chosen


@pytest.mark.parametrize(
    "found",
    [
        [choice("a", 0, None), choice("a", 0, None)],
        [choice("a", 0, rank, GPUS[:1]) for rank in (0, 1)],
        [choice("a", 1, 0), choice("a", 1, 1)],
    ],
)
def test_two_ranks_share_no_gpu(found: list[DeviceChoice]) -> None:
    with pytest.raises(zo.ConfigError, match=r"ranks 4 and 6 on a compute on the same GPU .*set_device_index"):
        choose_gpus(found, [4, 6])


def look_at(rank: int, places: Sequence[Path]) -> list[str]:
    places[rank].mkdir(exist_ok=True)
    with joined_ranks() as ranks:
        try:
            ranks.check_shared(places[rank])
        except zo.ConfigError as error:
            return [str(error)]
    return []


def test_ranks_whose_runs_are_in_other_directories_are_told(tmp_path: Path) -> None:
    shared, other = tmp_path / "shared", tmp_path / "other"
    assert start(partial(look_at, places=[shared, shared])) == [[], []]
    first, second = start(partial(look_at, places=[shared, other]))
    assert "rank 1 on " in first[0] and "give --out a directory that all machines see" in first[0]
    assert str(shared) in first[0] and str(other) in second[0]
    assert not [*shared.iterdir(), *other.iterdir()]
