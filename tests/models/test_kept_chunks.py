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


def forward(model: nn.Module, optimizer: Any, path: Path) -> None:
    with torch.no_grad():
        assert torch.isfinite(model(tokens_of(0)).float()).all()


def update(model: nn.Module, optimizer: Any, path: Path) -> None:
    if optimizer is None:
        return forward(model, optimizer, path)
    for group in optimizer.param_groups:
        group.update(lr=0.0, weight_decay=0.0)
    train(model, optimizer, 1)


def gather(model: nn.Module, optimizer: Any, path: Path) -> None:
    with zo.gathered(model) as params:
        for name, values in read_masters(model).items():
            assert torch.equal(params[name].detach(), values.to(params[name].dtype))


def save(model: nn.Module, optimizer: Any, path: Path) -> None:
    if optimizer is not None:
        zo.save_checkpoint(model, optimizer, path / f"checkpoint{len(list(path.iterdir()))}")
    zo.export_pretrained(model, path / f"export{len(list(path.iterdir()))}")


def write_all(model: nn.Module, optimizer: Any, path: Path) -> None:
    with zo.gathered(model, mode="write"):
        pass


def edit_states(model: nn.Module, optimizer: Any, path: Path) -> None:
    for param in [] if optimizer is None else model.parameters():
        optimizer.state[param]["exp_avg"].mul_(0.5)


def step_alone(model: nn.Module, optimizer: Any, path: Path) -> None:
    """No forward comes before an update, and it is of one section."""
    if optimizer is None:
        return
    for group in optimizer.param_groups:
        group.update(lr=0.0, weight_decay=0.0)
    weight = model.head.weight
    weight.grad = torch.zeros(weight.shape)
    optimizer.step()
    weight.grad = None


def nothing(model: nn.Module, optimizer: Any, path: Path) -> None:
    """A commit follows."""


USERS = {each.__name__: each for each in (forward, update, gather, save, write_all, edit_states, step_alone, nothing)}


@pytest.mark.parametrize("user", ["forward", "commit", "gathered"])
def test_an_average_reads_and_writes_its_bytes_once(user: str, tmp_path: Path) -> None:
    """After a commit too, which makes all of it go to another slot."""
    student = offloaded(tmp_path / "student")
    average = zo.copy(student, average_on(tmp_path / "average"), kind="frozen")
    expected = read_masters(average)
    nbytes = sum(values.nbytes for values in expected.values())
    optimizer = zo.AdamW(student.parameters(), lr=1e-2)
    for step in range(3):
        train(student, optimizer, step)
        before = [moved(model) for model in (student, average)]
        with torch.no_grad():
            for mine, theirs in zip(average.parameters(), student.parameters(), strict=True):
                mine.lerp_(theirs, 0.25)
        read, read_here = (moved(model)[0] - then[0] for model, then in zip((student, average), before, strict=True))
        assert read == pytest.approx(nbytes, rel=0.02) and read_here == pytest.approx(nbytes, rel=0.02)
        assert moved(average)[1] < before[1][1] + nbytes  # the last chunk waits for a neighbour
        if user == "forward":
            average(tokens_of(step))
        elif user == "gathered":
            with zo.gathered(average) as params:
                assert all(map(torch.isfinite, (each.detach().sum() for each in params.values())))
        else:
            zo.commit(student, optimizer, also=[average])
            runtime(average).drain()
        assert moved(average)[1] - before[1][1] == pytest.approx(nbytes, rel=0.02)
        for name, values in read_masters(student).items():
            expected[name].lerp_(values, 0.25)
        assert all(torch.equal(values, expected[name]) for name, values in read_masters(average).items())
    zo.close(student)
    zo.close(average)


def average_on(path: Path, **settings: Any) -> zo.OffloadConfig:
    return zo.OffloadConfig(params="nvme", nvme=path, precision="fp32", **settings)


@pytest.mark.parametrize("kind", ["frozen", "trainable"])
@pytest.mark.parametrize("user", USERS)
def test_what_waits_is_written_before_it_is_used(user: str, kind: str, tmp_path: Path) -> None:
    """Each second parameter has changed, after a generation that names the slots, and after none."""
    precision, width = ("bf16", 33) if kind == "trainable" else ("fp32", WIDTH)
    settings: dict[str, Any] = {"params": "nvme", "optimizer": "nvme", "precision": precision}
    config = zo.OffloadConfig(nvme=tmp_path / "one", existing="resume", **settings)
    model = zo.offload(build(partial(TinyLM, width, 2)).requires_grad_(kind == "trainable"), config)
    optimizer = zo.AdamW(model.parameters(), lr=1e-2) if kind == "trainable" else None
    if optimizer is not None:
        train(model, optimizer, 0)
    for commits in (0, 1, 2):
        expected = {name: values.clone() for name, values in read_masters(model).items()}
        with torch.no_grad():
            for name, param in list(model.named_parameters())[commits % 2 :: 2]:
                param.mul_(1.5)
                expected[name].mul_(1.5)
        USERS[user](model, optimizer, tmp_path)
        found = read_masters(model)
        assert all(torch.equal(values, expected[name]) for name, values in found.items()), commits
        zo.commit(model, optimizer)
    zo.close(model)
    again = zo.offload(build(partial(TinyLM, width, 2)).requires_grad_(kind == "trainable"), config)
    zo.resume(again, zo.AdamW(again.parameters()) if kind == "trainable" else None)
    assert all(torch.equal(values, expected[name]) for name, values in read_masters(again).items())
    zo.close(again)


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
