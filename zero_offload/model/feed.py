"""The batches of a loader, epoch after epoch, and their place in it: a run that goes on sees those that would come.

Owns the place of the batch that was handed out last, whatever the loader has fetched ahead. A loader with a state
(torchdata's `StatefulDataLoader`, and accelerate's around it) says it by itself. Of any other the place is two counts,
the epoch and its batches. The order of an epoch then follows from a seed and the epoch's number alone. Never commits.
The calls: `restore` where a run goes on, `next_batch` per step, `place` and `own` with its commit.

[Note: random numbers of an epoch]
The model draws from the same generators as samplers do, and goes on with those of a generation. So an iteration begins,
and its first batch is fetched, with generators seeded by the epoch; then they are put back. The sampler of torch's
`DataLoader` keeps a stream of its own for the whole epoch. Batches that are done are left out there: their data are not
read. Any other iterable is read from the epoch's beginning. Where data are not read, random numbers that a worker draws
for a sample are others after a resume in the midst of an epoch.

[Note: workers that a signal ends]
A launcher signals all processes of a rank, and torch's workers end by that. The step that is asked for its batch once
more (`next_batch` with `again`) begins the iteration anew, at the same place.
"""

from __future__ import annotations

import base64
import copy
import hashlib
import itertools
import json
import math
import random
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from zero_offload.base.errors import CheckpointError, ConfigError
from zero_offload.base.problems import warn_user

_END = object()


class Feed:
    """The batches of one rank. Control thread only."""

    def __init__(self, call: str, loader: Any, accumulate: int, num_ranks: int) -> None:
        """A step takes one batch, or a list of `accumulate`."""
        if not hasattr(loader, "__iter__"):
            raise ConfigError(f"{call}(loader=...) takes a DataLoader or a list of batches, not a {_kind(loader)}")
        self._call, self._accumulate, self._num_ranks = call, accumulate, num_ranks
        # accelerate keeps torch's loader inside of its own.
        self._loader, self._source = loader, getattr(loader, "base_dataloader", loader)
        self._is_stateful = _has_state(self._source)
        samplers = _samplers_of(self._source)
        self._parts = [loader, *samplers, getattr(self._source, "dataset", None)]
        """The objects that may be told of an epoch."""
        for each in samplers if self._is_stateful else ():
            # torch's has no state, and draws from the model's generators, behind a number of draws of its loader's.
            if getattr(each, "generator", self) is None and not _has_state(each):
                each.generator = torch.Generator("cpu").manual_seed(torch.initial_seed())
        self._generators = _generators_of([self._source, *samplers])
        self._seeds = [torch.initial_seed(), *(each.initial_seed() for each in self._generators)]
        self._order: _Order | None = None
        if isinstance(loader, DataLoader) and self._has_order():
            self._loader = self._with_order(loader)
        self._epoch = self._num_batches = 0
        """The epoch, and its batches that were handed out."""
        self._before = (0, 0)
        """The same, before the step's."""
        self._state: Any = None
        """The loader's, behind these batches."""
        self._iterator: Iterator[Any] | None = None

    def _has_order(self) -> bool:
        """True if all that a batch takes from the loader are indices of samples."""
        source = self._source
        is_plain = not self._is_stateful and source is self._loader and type(source).__iter__ is DataLoader.__iter__
        return is_plain and not isinstance(source.dataset, IterableDataset)

    def _with_order(self, loader: DataLoader[Any]) -> DataLoader[Any]:
        """A loader of the same settings and of workers of its own."""
        found = copy.copy(loader)
        found._iterator = None
        name = "sampler" if loader.batch_sampler is None else "batch_sampler"
        self._order = found.__dict__[name] = _Order(getattr(loader, name))  # it refuses a change by the usual way
        return found

    # Where it goes on

    def __str__(self) -> str:
        return f"behind batch {self._num_batches} of epoch {self._epoch} of its {_kind(self._source)}"

    @property
    def _kind(self) -> str:
        return "state" if self._is_stateful else "counts"

    @property
    def place(self) -> dict[str, Any]:
        """Where the batch handed out last was. The first rank's counts for another number of ranks."""
        return {"epoch": self._epoch, "batches": self._num_batches, "ranks": self._num_ranks, "kind": self._kind}

    def own(self) -> dict[str, Any]:
        """This rank's part of a commit: as `place`, with seeds and the loader's state."""
        found: dict[str, Any] = self.place | {"seeds": self._seeds}
        if self._is_stateful:
            self._state = self._loader.state_dict()
            found["state"] = _to_text(self._call, self._source, self._state)
        return found

    def restore(self, place: dict[str, Any], own: dict[str, Any] | None) -> None:
        """Go on behind the batch of these. `own` is None where another number of ranks was there."""
        if place["kind"] != self._kind:
            names = {"state": "a loader that keeps its own state", "counts": "one whose batches are counted"}
            raise ConfigError(
                f"{self._call}: the run had {names[place['kind']]}, and loader= ({_kind(self._source)}) is "
                f"{names[self._kind]}. Give the kind of loader that the run began with"
            )
        if own is not None:
            if len(own["seeds"]) != len(self._seeds):
                raise ConfigError(
                    f"{self._call}: the run's loader had {len(own['seeds']) - 1} generators, and loader= "
                    f"({_kind(self._source)}) has {len(self._seeds) - 1}. Give it generator= as before"
                )
            self._epoch, self._num_batches, self._seeds = own["epoch"], own["batches"], own["seeds"]
            self._state = _from_text(own["state"]) if self._is_stateful else None
            if isinstance(self._state, dict) and self._state.get("_iterator_finished"):
                # accelerate says so with the last batch; the next iteration is the next epoch's.
                self._epoch, self._num_batches = self._epoch + 1, 0
            return
        if self._is_stateful:
            raise ConfigError(
                f"{self._call}: {_kind(self._source)} has a state on each rank. The run had {place['ranks']} ranks, "
                f"and now there are {self._num_ranks}. Start as many, or give a torch DataLoader, whose batches are "
                "counted"
            )
        self._epoch, seen = place["epoch"], place["batches"] * place["ranks"]
        self._num_batches = -(-seen // self._num_ranks)
        if left_out := self._num_batches * self._num_ranks - seen:
            warn_user(
                f"{self._call}: {place['ranks']} ranks have had {place['batches']} batches each of epoch "
                f"{self._epoch}. {self._num_ranks} ranks go on behind {self._num_batches} each, which leaves out "
                f"{left_out}"
            )

    # Batches

    def next_batch(self, step: int, *, again: bool = False) -> Any:
        """The batch of a step; of several a list. `again`: the call for this step has failed."""
        if again:
            self._iterator, (self._epoch, self._num_batches) = None, self._before
        self._before = self._epoch, self._num_batches
        batches = [self._fetch(step) for _ in range(self._accumulate)]
        return batches[0] if self._accumulate == 1 else batches

    def close(self) -> None:
        """Workers end."""
        self._iterator = None

    def _fetch(self, step: int) -> Any:
        if self._iterator is None and self._num_batches:
            self._iterator = self._begin_again()
        if self._iterator is not None:
            batch = next(self._iterator, _END)
            if batch is not _END:
                self._num_batches += 1
                return batch
            self._epoch, self._num_batches = self._epoch + 1, 0
        return self._first_batch(step)

    def _first_batch(self, step: int) -> Any:
        """The first batch of an epoch."""
        with self._seeded():
            self._begin_epoch(0)
            self._iterator = iter(self._loader)
            batch = next(self._iterator, _END)
        if batch is _END:
            more = (
                "it is an iterator, which cannot begin again: give a list or a DataLoader, or fewer steps"
                if self._iterator is self._loader
                else "give it data, or look at drop_last and at the length of its sampler"
            )
            raise ConfigError(
                f"{self._call}: loader= ({_kind(self._source)}) has no batch for step {step}, the first of epoch "
                f"{self._epoch}; {more}"
            )
        self._num_batches = 1
        return batch

    def _begin_again(self) -> Iterator[Any]:
        """An iteration in the midst of an epoch, or behind its last batch."""
        with self._seeded():
            self._begin_epoch(self._num_batches)
            if self._is_stateful:
                self._loader.load_state_dict(self._state)
            iterator: Iterator[Any] = iter(self._loader)
            if self._is_stateful and self._loader is not self._source:
                # accelerate's begins with its first batch: in here, where its sampler draws the order of the epoch.
                return itertools.chain([next(iterator, _END)], iterator)
            for _ in range(0 if self._is_stateful or self._order is not None else self._num_batches):
                next(iterator, None)
            return iterator

    def _begin_epoch(self, num_skipped: int) -> None:
        for each in self._parts:
            if callable(set_epoch := getattr(each, "set_epoch", None)):
                set_epoch(self._epoch)
        self._seed_generators()
        if self._order is not None:
            stream = _Stream(_seed_of(self._seeds[0], self._epoch, "order"))
            self._order.begin(stream, num_skipped, self._seed_generators)

    def _seed_generators(self) -> None:
        for generator, seed in zip(self._generators, self._seeds[1:], strict=True):
            generator.manual_seed(_seed_of(seed, self._epoch))

    def _seeded(self) -> _Stream:
        return _Stream(_seed_of(self._seeds[0], self._epoch))


class _Order:
    """The index sampler of a loader, whose first batches of an epoch may be left out."""

    def __init__(self, sampler: Any) -> None:
        self._sampler = sampler
        self._stream, self._num_skipped = _Stream(0), 0
        self._seed: Callable[[], None] = lambda: None

    def begin(self, stream: _Stream, num_skipped: int, seed: Callable[[], None]) -> None:
        """The next iteration is an epoch's; `seed` gives generators of the program the epoch's seeds."""
        self._stream, self._num_skipped, self._seed = stream, num_skipped, seed

    def __iter__(self) -> Iterator[Any]:
        stream = self._stream
        self._seed()  # the loader may have drawn from them: new workers have a seed, workers that stay have not
        with stream:
            indices = iter(self._sampler)
            for _ in range(self._num_skipped):
                next(indices, None)
        while True:
            with stream:
                index = next(indices, _END)
            if index is _END:
                return
            yield index

    def __len__(self) -> int:
        return len(self._sampler) - self._num_skipped


class _Stream:
    """The generators of the host as a state of their own, which counts inside of a `with`."""

    def __init__(self, seed: int) -> None:
        self._seed: int | None = seed
        self._mine: tuple[Any, ...] = ()
        self._theirs: list[tuple[Any, ...]] = []

    def __enter__(self) -> None:
        self._theirs.append(_generators())
        if self._seed is not None:
            random.seed(self._seed)
            np.random.seed(self._seed % 2**32)
            torch.default_generator.manual_seed(self._seed)
            self._seed = None
        else:
            _set_generators(self._mine)

    def __exit__(self, *_: object) -> None:
        self._mine = _generators()
        _set_generators(self._theirs.pop())


def _generators() -> tuple[Any, ...]:
    return random.getstate(), np.random.get_state(), torch.get_rng_state()


def _set_generators(states: tuple[Any, ...]) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])


def _seed_of(seed: int, epoch: int, use: str = "") -> int:
    digest = hashlib.blake2b(f"{seed} {epoch} {use}".encode(), digest_size=8).digest()
    return int.from_bytes(digest) >> 1


def _has_state(loader: Any) -> bool:
    return all(callable(getattr(loader, name, None)) for name in ("state_dict", "load_state_dict"))


def _samplers_of(loader: Any) -> list[Any]:
    """The samplers of a loader, and those inside of them, each once."""
    found: list[Any] = []
    waiting = [getattr(loader, name, None) for name in ("sampler", "batch_sampler")]
    while waiting:
        each = waiting.pop(0)
        if each is not None and not any(each is one for one in found):
            found.append(each)
            waiting += [getattr(each, name, None) for name in ("sampler", "batch_sampler")]
    return found


def _generators_of(parts: Sequence[Any]) -> list[torch.Generator]:
    found: list[torch.Generator] = []
    for each in parts:
        generator = getattr(each, "generator", None)
        if isinstance(generator, torch.Generator) and not any(generator is one for one in found):
            found.append(generator)
    return found


def _to_text(call: str, loader: Any, state: Any) -> str:
    try:
        written = json.dumps(_as_json(state)).encode()
    except TypeError as error:
        raise ConfigError(
            f"{call}: the state_dict of {_kind(loader)} has objects that no file of tensors and plain values holds: "
            f"{error}. Return numbers, texts, lists, dicts and tensors there"
        ) from error
    return base64.b64encode(zlib.compress(written, 1)).decode()


def _from_text(text: str) -> Any:
    try:
        return _of_json(json.loads(zlib.decompress(base64.b64decode(text))))
    except (ValueError, TypeError, RuntimeError, AttributeError, zlib.error) as error:
        raise CheckpointError(f"the loader's state in the generation is damaged: {error}") from error


def _as_json(value: Any) -> Any:
    """A value that JSON has, else a list of its kind and its content. TypeError for an object."""
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else ["float", repr(value)]
    if type(value) in (list, tuple):
        return [type(value).__name__, [_as_json(each) for each in value]]
    if type(value) in (dict, OrderedDict):
        return ["dict", [[_as_json(key), _as_json(each)] for key, each in value.items()]]
    if type(value) is bytes:
        return ["bytes", base64.b64encode(value).decode()]
    if type(value) is Tensor:
        content = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        dtype = str(value.dtype).removeprefix("torch.")
        return ["tensor", [dtype, list(value.shape), base64.b64encode(content).decode()]]
    raise TypeError(f"a {type(value).__module__}.{type(value).__qualname__}")


def _of_json(found: Any) -> Any:
    if not isinstance(found, list):
        return found
    kind, content = found
    if kind == "float":
        return float(content)
    if kind == "dict":
        return {_of_json(key): _of_json(each) for key, each in content}
    if kind == "bytes":
        return base64.b64decode(content)
    if kind == "tensor":
        dtype, shape, text = content
        values = torch.empty(shape, dtype=getattr(torch, dtype), device="cpu")
        values.view(-1).view(torch.uint8).numpy()[:] = np.frombuffer(base64.b64decode(text), np.uint8)
        return values
    return (tuple if kind == "tuple" else list)(_of_json(each) for each in content)


def _kind(value: object) -> str:
    return type(value).__name__
