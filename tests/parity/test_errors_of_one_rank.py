"""An error of one rank in a call that all make is raised on all, at once and with its cause; then all go on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import zero_offload as zo
from tests.helpers.models import TinyLM, build, tokens_of
from tests.helpers.ranks import Failure, RankPool
from zero_offload.model.api import runtime_of

Call = Callable[[Any, zo.AdamW, Path, bool], object]
"""call(model, optimizer, folder, whether this is the rank that fails)."""


def load_what_one_lacks(model: Any, optimizer: zo.AdamW, folder: Path, fails: bool) -> None:
    zo.load_checkpoint(model, optimizer, folder / ("nothing" if fails else "saved"))


def load_into_other_groups(model: Any, optimizer: zo.AdamW, folder: Path, fails: bool) -> None:
    params = list(model.parameters())
    other = zo.AdamW([{"params": params[:1]}, {"params": params[1:]}]) if fails else optimizer
    zo.load_checkpoint(model, other, folder / "saved")


def save_where_one_cannot(model: Any, optimizer: zo.AdamW, folder: Path, fails: bool) -> None:
    zo.save_checkpoint(model, optimizer, folder / ("file" if fails else "second"))


def save_what_one_cannot_keep(model: Any, optimizer: zo.AdamW, folder: Path, fails: bool) -> None:
    zo.save_checkpoint(model, optimizer, folder / "third", extra={"seen": object() if fails else 1})


def commit_what_one_cannot_keep(model: Any, optimizer: zo.AdamW, folder: Path, fails: bool) -> None:
    zo.commit(model, optimizer, extra={"seen": object() if fails else 1})


def commit_for_another_optimizer(model: Any, optimizer: zo.AdamW, folder: Path, fails: bool) -> None:
    zo.commit(model, zo.AdamW([torch.nn.Parameter(torch.ones(1))]) if fails else optimizer)


def resume_for_another_optimizer(model: Any, optimizer: zo.AdamW, folder: Path, fails: bool) -> None:
    zo.resume(model, zo.AdamW([torch.nn.Parameter(torch.ones(1))]) if fails else optimizer)


def load_weights_that_one_lacks(model: Any, optimizer: zo.AdamW, folder: Path, fails: bool) -> None:
    zo.load_pretrained(model, folder / ("nothing" if fails else "weights"))


def load_weights_into_a_part(model: Any, optimizer: zo.AdamW, folder: Path, fails: bool) -> None:
    zo.load_pretrained(model.blocks if fails else model, folder / "weights")


def export_what_one_does_not_know(model: Any, optimizer: zo.AdamW, folder: Path, fails: bool) -> None:
    zo.export_pretrained(model, folder / "exported", dtype="int3" if fails else "fp32")


def clip_norm(model: Any, optimizer: zo.AdamW, folder: Path, fails: bool) -> None:
    zo.clip_grad_norm_(model, -1.0 if fails else 1.0)


def clip_value(model: Any, optimizer: zo.AdamW, folder: Path, fails: bool) -> None:
    zo.clip_grad_value_(model, -1.0 if fails else 1.0)


@contextmanager
def half_written(model: Any, fails: bool) -> Iterator[None]:
    """A load has broken off on one rank."""
    life = runtime_of(model).life  # type: ignore[union-attr]
    life.half_written = "a checkpoint" if fails else ""
    try:
        yield
    finally:
        life.half_written = ""


def step(model: Any, optimizer: zo.AdamW, folder: Path, fails: bool) -> None:
    with half_written(model, fails):
        optimizer.step()


def read_parameters(model: Any, optimizer: zo.AdamW, folder: Path, fails: bool) -> None:
    with half_written(model, fails), zo.gathered(model):
        pass


CALLS: list[tuple[Call, str]] = [
    (load_what_one_lacks, "nothing is not a directory"),
    (load_into_other_groups, "group"),
    (save_where_one_cannot, "file"),
    (save_what_one_cannot_keep, "extra= cannot be kept"),
    (commit_what_one_cannot_keep, "extra= cannot be kept"),
    (commit_for_another_optimizer, "none of which is offloaded"),
    (resume_for_another_optimizer, "none of which is offloaded"),
    (load_weights_that_one_lacks, "nothing"),
    (load_weights_into_a_part, "takes the whole model"),
    (export_what_one_does_not_know, "dtype='int3'"),
    (clip_norm, "max_norm=-1.0"),
    (clip_value, "clip_value=-1.0"),
    (step, "a mix of two"),
    (read_parameters, "a mix of two"),
]


def fail_on(rank: int, world_size: int, call: Call, failing: int, stage: int, folder: str) -> tuple[Failure, bool]:
    """The error of the call here, and whether the ranks train on."""
    torch.manual_seed(0)
    place, model = Path(folder), build(TinyLM)
    zo.offload(model, zo.OffloadConfig(stage=stage, precision="fp32", nvme=place / "run", optimizer="cpu"))
    optimizer = zo.AdamW(model.parameters())
    zo.export_pretrained(model, place / "weights")
    zo.save_checkpoint(model, optimizer, place / "saved")
    if rank == 0:
        (place / "file").write_text("in the way")
    model(tokens_of(rank)).backward()
    if call not in (clip_norm, clip_value, step):
        optimizer.zero_grad()
    found = Failure("", "")
    try:
        call(model, optimizer, place, rank == failing)
    except Exception as error:
        found = Failure(type(error).__name__, str(error))
    model(tokens_of(rank)).backward()
    optimizer.step()
    goes_on = runtime_of(model).step_count >= 1  # type: ignore[union-attr]
    zo.close(model)
    return found, goes_on


@pytest.mark.parametrize(("call", "says"), CALLS, ids=lambda each: getattr(each, "__name__", ""))
def test_all_ranks_raise_it_and_go_on(call: Call, says: str, pool: RankPool, tmp_path: Path) -> None:
    (first, goes_on), (second, also) = pool.succeed(fail_on, call, 1, 3, str(tmp_path))
    assert says in second.message
    assert first == Failure(second.kind, f"rank 1: {second.message}")
    assert goes_on and also


def test_it_is_told_where_little_is_divided(pool: RankPool, tmp_path: Path) -> None:
    for stage in (0, 1, 2):
        (first, _), (second, _) = pool.succeed(fail_on, clip_norm, 0, stage, str(tmp_path / str(stage)))
        assert second == Failure(first.kind, f"rank 0: {first.message}")


def offload_otherwise(rank: int, world_size: int, what: str, folder: str) -> None:
    config, units, mesh, model = zo.OffloadConfig(), None, None, build(TinyLM)
    if what == "directory":  # where one machine has a file
        config = zo.OffloadConfig(optimizer="nvme", nvme=Path(folder) / ("file" if rank else "run"))
    elif rank == 1:
        config = {"stage": 3} if what == "config" else config  # type: ignore[assignment]
        units = ["no.such.module"] if what == "units" else None
        mesh = "cpu" if what == "mesh" else None
        model = torch.nn.Linear(2, 2, device="meta") if what == "model" else model
    zo.close(zo.offload(model, config, mesh, units))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("config", "takes an OffloadConfig"),
        ("units", "no.such.module"),
        ("mesh", "mesh is a str"),
        ("model", "is on meta"),
        ("directory", "file"),
    ],
)
def test_what_one_rank_cannot_offload(what: str, says: str, pool: RankPool, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    first, second = pool.call(offload_otherwise, what, str(tmp_path))
    assert says in second.message
    assert first == Failure(second.kind, f"rank 1: {second.message}")
