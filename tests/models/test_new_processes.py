"""An offloaded model among what a new process begins with, as in a data set of a DataLoader: modules without values."""

from __future__ import annotations

import multiprocessing
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.context import set_spawning_popen
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zero_offload as zo
from tests.helpers.models import NARROW, TinyLM, build, tokens_of
from tests.helpers.reference import placed


@contextmanager
def starting() -> Iterator[None]:
    """As while multiprocessing pickles what a process is to begin with."""
    set_spawning_popen(object())
    try:
        yield
    finally:
        set_spawning_popen(None)


def sent(model: Any) -> tuple[Any, int]:
    with starting():
        data = bytes(ForkingPickler.dumps(model))
    return pickle.loads(data), len(data)


class Tied(TinyLM):
    def __init__(self) -> None:
        super().__init__(NARROW)
        self.head.weight = self.embedding.weight
        self.words = "an attribute"


@pytest.mark.parametrize("placement", [("cpu",) * 3, ("nvme",) * 3], ids=["cpu", "nvme"])
def test_modules_arrive_and_no_values(placement: Any, nvme: Path) -> None:
    model = zo.offload(build(Tied), placed("fp32", placement, nvme))
    model.requires_grad_(False).eval().head.requires_grad_(True)
    found, size = sent(model)
    assert size < 20_000 < sum(param.numel() for param in model.parameters())
    assert found.words == "an attribute" and not found.training
    assert found.head.weight is found.embedding.weight
    for (name, here), (same, there) in zip(model.named_parameters(), found.named_parameters(), strict=True):
        assert name == same
        assert (here.shape, here.stride(), here.dtype) == (there.shape, there.stride(), there.dtype)
        assert here.requires_grad == there.requires_grad
    for use in (found.head.weight.norm, found.state_dict, lambda: found(tokens_of(0)), found.head.weight.tolist):
        with pytest.raises(zo.ZeroOffloadError, match="of an offloaded model has no values in this process"):
            use()
    before = [param.detach().clone() for param in build(Tied).parameters()]
    with zo.gathered(model):
        assert all(map(torch.equal, model.parameters(), before))  # what was sent has changed nothing
    zo.close(model)


def test_a_copy_in_this_process_is_refused_or_whole(nvme: Path) -> None:
    model = zo.offload(build(Tied), placed("fp32", ("nvme",) * 3, nvme))
    with pytest.raises(zo.ZeroOffloadError, match="cannot be copied or pickled"):
        pickle.dumps(model)
    zo.close(model)


def look(model: nn.Module, answers: Any) -> None:
    """The new process."""
    try:
        model(tokens_of(0))
    except zo.ZeroOffloadError as error:
        answers.put((sum(param.numel() for param in model.parameters()), str(error)))


def test_a_process_of_a_fork_server(nvme: Path) -> None:
    model = zo.offload(build(Tied), placed("fp32", ("nvme",) * 3, nvme))
    context = multiprocessing.get_context("forkserver")
    answers = context.SimpleQueue()
    process = context.Process(target=look, args=(model, answers))
    process.start()
    process.join()
    assert process.exitcode == 0 and not answers.empty()
    numel, error = answers.get()
    assert numel == sum(param.numel() for param in model.parameters())
    assert "has no values in this process" in error
    model(tokens_of(0)).backward()
    zo.close(model)
