"""The batches of a loader that begins again behind any of them are those that would have come."""

from __future__ import annotations

import importlib.util
import os
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, Sampler, WeightedRandomSampler

import zero_offload as zo
from tests.helpers.loops import BATCH, NUM_SAMPLES, Samples, Spec, loader_of
from zero_offload.checkpoint.extras import capture_rng, from_json, restore_rng, to_json
from zero_offload.model.feed import Feed

NUM_STEPS = 14


class Drawn(Sampler[int]):
    """Draws each number when it is asked for it, from generators that the model has too."""

    def __init__(self, draw: Callable[[], float]) -> None:
        self._draw = draw

    def __iter__(self) -> Iterator[int]:
        return (int(self._draw() * NUM_SAMPLES) for _ in range(NUM_SAMPLES))

    def __len__(self) -> int:
        return NUM_SAMPLES


def _sampled(sampler: Any, **settings: Any) -> DataLoader[Tensor]:
    return DataLoader(Samples("drawn"), **({"sampler": sampler, "batch_size": BATCH} | settings))


LOADERS: dict[str, Callable[[], Any]] = {
    **{
        f"{kind} {workers}": lambda kind=kind, workers=workers: loader_of(Spec("", 0, kind, workers), 0)
        for kind in ("order", "generator", "distributed", "list", "stream", "state")
        for workers in ((0, 2) if kind == "order" else (0,))
    },
    "one sample": lambda: DataLoader(Samples("drawn"), shuffle=True, batch_size=None),
    "batch sampler": lambda: DataLoader(
        Samples("drawn"), batch_sampler=BatchSampler(RandomSampler(range(NUM_SAMPLES)), 3, drop_last=True)
    ),
    "replacement": lambda: _sampled(RandomSampler(range(NUM_SAMPLES), replacement=True, num_samples=40)),
    "weighted": lambda: _sampled(WeightedRandomSampler([1.0] * NUM_SAMPLES, NUM_SAMPLES)),
    "drawn by torch": lambda: _sampled(Drawn(lambda: torch.rand(()).item())),
    "drawn by numpy": lambda: _sampled(Drawn(np.random.rand)),
    "drawn by python": lambda: _sampled(Drawn(random.random)),
    "function": lambda: Function(),
}


class Function:
    """An iterable that draws its order when it begins."""

    def __iter__(self) -> Iterator[Tensor]:
        for index in torch.randperm(NUM_SAMPLES):
            yield torch.stack([index, torch.randint(0, 99, ())])


def _feed(make: Callable[[], Any], accumulate: int = 1) -> Feed:
    torch.manual_seed(3), random.seed(3), np.random.seed(3)
    return Feed("zo.steps", make(), accumulate, 1)


def _step(feed: Feed, step: int) -> list[Any]:
    """A step's batch, and numbers that its model draws."""
    given = feed.next_batch(step)
    batches = given if isinstance(given, list) else [given]
    return [[each.tolist() for each in batches], torch.rand(()).item(), random.random(), np.random.rand()]


@pytest.mark.parametrize("name", LOADERS)
@pytest.mark.parametrize("accumulate", [1, 4])
def test_it_goes_on_behind_each_batch(name: str, accumulate: int) -> None:
    make = LOADERS[name]
    feed, seen, commits = _feed(make, accumulate), [], []
    for step in range(1, NUM_STEPS + 1):
        seen.append(_step(feed, step))
        commits.append((to_json(feed.place), to_json(feed.own()), capture_rng()))
    feed.close()
    epochs = [place["epoch"] for place, _, _ in commits]
    assert epochs[-1] > 0 or name == "replacement"
    # A start of workers takes a while: in an epoch, and at its end.
    for done in range(1, NUM_STEPS) if not name.endswith("2") else (1, 6):
        place, own, rng = commits[done - 1]
        feed = _feed(make, accumulate)
        feed.restore(from_json(place), from_json(own))
        restore_rng(rng)
        assert [_step(feed, step) for step in range(done + 1, NUM_STEPS + 1)] == seen[done:], done
        feed.close()


@pytest.mark.parametrize("name", ["one sample", "order 0", "generator 0", "distributed 0"])
def test_epochs_have_different_orders(name: str) -> None:
    feed = _feed(LOADERS[name])
    orders: dict[int, list[float]] = {}
    while len(orders) < 4:
        batch = feed.next_batch(0)
        orders.setdefault(feed.place["epoch"], []).extend(batch.view(-1, batch.shape[-1])[:, 0].tolist())
    found = [orders[epoch] for epoch in range(3)]
    assert all(sorted(order) == sorted(found[0]) for order in found) and len(set(found[0])) == len(found[0])
    assert len({tuple(order) for order in found}) == 3


def test_batches_that_are_done_are_not_read_again() -> None:
    class Counted(Samples):
        num_read = 0

        def __getitem__(self, index: int) -> Tensor:
            Counted.num_read += 1
            return super().__getitem__(index)

    feed = _feed(lambda: DataLoader(Counted(""), shuffle=True, batch_size=BATCH))
    for step in range(4):
        feed.next_batch(step)
    place, own = feed.place, feed.own()
    feed = _feed(lambda: DataLoader(Counted(""), shuffle=True, batch_size=BATCH))
    feed.restore(place, own)
    Counted.num_read = 0
    feed.next_batch(5)
    assert Counted.num_read == BATCH


def test_the_loader_of_the_program_stays_as_it_is() -> None:
    loader = loader_of(Spec("", 0, "order"), 0)
    before = dict(vars(loader))
    feed = _feed(lambda: loader)
    feed.next_batch(1)
    assert vars(loader) == before


@pytest.mark.parametrize(("before", "now", "batches", "left_out"), [(2, 4, 3, 2), (4, 2, 4, 0), (1, 2, 2, 1)])
def test_on_other_ranks_counts_are_of_all(
    before: int, now: int, batches: int, left_out: int, recwarn: pytest.WarningsRecorder
) -> None:
    feed = Feed("zo.steps", loader_of(Spec("", 0, "distributed"), 0), 1, now)
    done = {(2, 4): 5, (4, 2): 2, (1, 2): 3}[before, now]
    feed.restore({"kind": "counts", "epoch": 4, "batches": done, "ranks": before}, None)
    assert feed.place == {"kind": "counts", "epoch": 4, "batches": batches, "ranks": now}
    assert [f"leaves out {left_out}" in str(each.message) for each in recwarn] == [True] * bool(left_out)


def test_a_workers_end_begins_the_iteration_anew() -> None:
    make = LOADERS["order 2"]
    feed = _feed(make)
    expected = [_step(feed, step) for step in range(1, 9)]
    feed.close()
    feed = _feed(make)
    assert [_step(feed, step) for step in range(1, 5)] == expected[:4]
    feed.own()
    with pytest.raises(RuntimeError, match="broken"):
        _break(feed).next_batch(5)
    again = feed.next_batch(5, again=True)
    assert again.tolist() == expected[4][0][0]
    torch.rand(()), random.random(), np.random.rand()
    assert [_step(feed, step) for step in range(6, 9)] == expected[5:]
    feed.close()


def _break(feed: Feed) -> Feed:
    class Broken:
        def __next__(self) -> Any:
            raise RuntimeError("broken")

    vars(feed)["_iterator"] = Broken()
    return feed


@pytest.mark.parametrize(
    ("loader", "text"),
    [
        (7, "takes a DataLoader or a list of batches, not a int"),
        ([], r"\(list\) has no batch for step 1, the first of epoch 0; give it data"),
        (iter([]), "it is an iterator, which cannot begin again"),
    ],
)
def test_loaders_without_batches_are_errors(loader: Any, text: str) -> None:
    with pytest.raises(zo.ConfigError, match=text):
        Feed("zo.steps", loader, 1, 1).next_batch(1)


def test_an_iterator_that_ends_says_at_which_step() -> None:
    feed = Feed("zo.steps", iter([1, 2]), 1, 1)
    assert [feed.next_batch(1), feed.next_batch(2)] == [1, 2]
    with pytest.raises(zo.ConfigError, match="no batch for step 3, the first of epoch 1; it is an iterator"):
        feed.next_batch(3)


def test_a_run_of_another_kind_of_loader_is_an_error() -> None:
    feed = _feed(LOADERS["state 0"])
    feed.next_batch(1)
    other = _feed(LOADERS["order 0"])
    with pytest.raises(zo.ConfigError, match=r"loader= \(DataLoader\) is one whose batches are counted"):
        other.restore(feed.place, feed.own())
    with pytest.raises(zo.ConfigError, match="The run had 4 ranks, and now there are 1"):
        _feed(LOADERS["state 0"]).restore(feed.place | {"ranks": 4}, None)


def test_a_state_of_other_objects_is_an_error() -> None:
    class Odd:
        def state_dict(self) -> dict[str, Any]:
            return {"file": os.stat_result(range(10))}

        def load_state_dict(self, state: object) -> None: ...

        def __iter__(self) -> Iterator[int]:
            return iter([1])

    feed = Feed("zo.steps", Odd(), 1, 1)
    feed.next_batch(1)
    with pytest.raises(zo.ConfigError, match="the state_dict of Odd has objects"):
        feed.own()


@pytest.mark.skipif(importlib.util.find_spec("torchdata") is None, reason="torchdata is not installed")
@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_of_torchdata_goes_on_by_its_state(workers: int) -> None:
    def make() -> Any:
        return loader_of(Spec("", 0, "torchdata", workers), 0)

    feed, seen, commits = _feed(make), [], []
    for step in range(1, NUM_STEPS + 1):
        seen.append(_step(feed, step))
        commits.append((feed.place, feed.own(), capture_rng()))
    feed.close()
    for done in range(1, NUM_STEPS):
        place, own, rng = commits[done - 1]
        feed = _feed(make)
        feed.restore(place, own)
        restore_rng(rng)
        assert [_step(feed, step) for step in range(done + 1, NUM_STEPS + 1)] == seen[done:], done
        feed.close()
