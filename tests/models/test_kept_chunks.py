"""Chunks that lie in two parameters are read once between steps, and never show what was there before."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zero_offload as zo
from tests.helpers.disk import runtime
from tests.helpers.models import TinyLM, build, tokens_of
from tests.helpers.reference import read_masters

WIDTH = 640
"""A matrix has 1.6 times the elements of a chunk: some chunks are in one alone, others in two with vectors between."""


def offloaded(nvme: Path, precision: str = "bf16", width: int = WIDTH, **settings: Any) -> nn.Module:
    config = zo.OffloadConfig(params="nvme", optimizer="nvme", nvme=nvme, precision=precision, **settings)
    return zo.offload(build(partial(TinyLM, width, 2)), config)


def moved(model: nn.Module) -> tuple[float, float]:
    counts = runtime(model).store.counters.snapshot()
    return counts["read.nvme"], counts["written.nvme"]


def train(model: nn.Module, optimizer: Any, step: int) -> None:
    model(tokens_of(step)).backward()
    optimizer.step()
    optimizer.zero_grad()
    runtime(model).drain()


@pytest.mark.parametrize("durability", ["scratch", "process"])
def test_an_average_reads_its_bytes_and_the_students(durability: str, tmp_path: Path) -> None:
    student = offloaded(tmp_path / "student", durability=durability)
    config = zo.OffloadConfig(params="nvme", nvme=tmp_path / "average", precision="fp32", durability=durability)
    average = zo.copy(student, config, kind="frozen")
    expected = read_masters(average)
    nbytes = sum(values.nbytes for values in expected.values())
    optimizer = zo.AdamW(student.parameters(), lr=1e-2)
    for step in range(2):
        train(student, optimizer, step)
        before = [moved(model) for model in (student, average)]
        with torch.no_grad():
            for mine, theirs in zip(average.parameters(), student.parameters(), strict=True):
                mine.lerp_(theirs, 0.25)
        (read, _), (read_here, written) = (
            [now - then for now, then in zip(moved(model), counts, strict=True)]
            for model, counts in zip((student, average), before, strict=True)
        )
        assert read == pytest.approx(nbytes, rel=0.02) and read_here == pytest.approx(nbytes, rel=0.02)
        assert written >= nbytes
        for name, values in read_masters(student).items():
            expected[name].lerp_(values, 0.25)
        assert all(torch.equal(values, expected[name]) for name, values in read_masters(average).items())


def masters_of(model: nn.Module) -> list[torch.Tensor]:
    """Read one by one, so that chunks are kept."""
    return [(param + torch.zeros((), dtype=torch.float32)).detach() for param in model.parameters()]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_what_is_kept_is_not_read_after_a_change(precision: str, tmp_path: Path) -> None:
    """By an update, a write of a neighbour, of a state, of all, and by a load."""
    model = offloaded(tmp_path / "one", precision, width=33)
    optimizer = zo.AdamW(model.parameters(), lr=1e-2)
    zo.save_checkpoint(model, optimizer, tmp_path / "checkpoint")
    first, second = model.blocks[0].up.weight, model.blocks[0].up.bias

    def compare() -> list[torch.Tensor]:
        found = [param.detach().clone() for param in model.parameters()]
        with zo.gathered(model) as params:  # comes from the drive as a whole
            assert all(map(torch.equal, found, (each.detach() for each in params.values())))
        return found

    seen = [compare()]
    train(model, optimizer, 0)
    seen.append(compare())
    model(tokens_of(1)).backward()
    compare()  # no forward comes between this and the update
    optimizer.step()
    optimizer.zero_grad()
    seen.append(compare())
    with torch.no_grad():
        second.mul_(2)
        seen.append(compare())
        first[:2].add_(1)
        seen.append(compare())
    optimizer.state[first]["exp_avg"].mul_(0)
    assert not optimizer.state[first]["exp_avg"].any() and optimizer.state[second]["exp_avg"].any()
    model.load_state_dict({name: values + 1 for name, values in model.state_dict().items()})
    seen.append(compare())
    zo.commit(model, optimizer)
    with torch.no_grad():
        first.mul_(3)  # another slot
    seen.append(compare())
    zo.load_checkpoint(model, optimizer, tmp_path / "checkpoint")
    seen.append(compare())
    assert all(map(torch.equal, seen[0], seen[-1]))
    assert all(not all(map(torch.equal, one, other)) for one, other in zip(seen, seen[1:], strict=False))
    zo.close(model)


def test_a_backward_that_updates(tmp_path: Path) -> None:
    """No forward comes between the read and the update."""
    model = offloaded(tmp_path, width=33, overlap="backward")
    optimizer = zo.AdamW(model.parameters(), lr=1e-2)
    train(model, optimizer, 0)
    loss = model(tokens_of(1))
    before = [param.detach().clone() for param in model.parameters()]
    loss.backward()
    optimizer.step()
    after = [param.detach().clone() for param in model.parameters()]
    with zo.gathered(model) as params:
        assert all(map(torch.equal, after, (each.detach() for each in params.values())))
    assert not any(map(torch.equal, before, after))
    zo.close(model)


def test_states_that_go_and_come_are_read_anew(tmp_path: Path) -> None:
    model = offloaded(tmp_path, width=33)
    optimizer = zo.AdamW(model.parameters(), lr=1e-2)
    weight = model.blocks[0].up.weight
    train(model, optimizer, 0)
    assert optimizer.state[weight]["exp_avg"].any()
    model.blocks.requires_grad_(False)
    for param in model.blocks.parameters():
        optimizer.state.pop(param, None)
    zo.commit(model, optimizer)
    model.blocks.requires_grad_(True)
    model(tokens_of(0)).backward()
    for group in optimizer.param_groups:
        group["betas"] = (1.0 - 1e-9, 0.999)
    optimizer.step()
    assert optimizer.state[weight]["exp_avg"].abs().max() < 1e-6
    zo.close(model)
