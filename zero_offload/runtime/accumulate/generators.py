"""Random numbers of micro-batches: each has generators of its own, so its numbers depend on no order.

Owns the generators' states of one call of `zo.accumulate`: torch's (the CPU's and those of devices in use), Python's
`random` and NumPy's global one. A generator object that the program holds is the program's. The calls: `with forks:`
around all of them, and `with forks.turn(number):` around each piece of a micro-batch's forward and backward.

[Note: forks]
How forwards and backwards of micro-batches take turns depends on where parameters rest. So the first micro-batch goes
on with the caller's generators, and each other one starts from a seed that is drawn from them, on every placement. At
the end the caller's stand where the first micro-batch has left them. One that no micro-batch has drawn from is as it
was; one that only others have drawn from stands after the seeds.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from zero_offload.base.host import host_empty
from zero_offload.runtime.saved.recompute import Generators, generators, set_generators

_SEEDS = 2**32
"""As many as NumPy takes."""


class _Kind(NamedTuple):
    """Generators that are read, written and seeded together."""

    read: Callable[[], Any]
    write: Callable[[Any], None]
    equal: Callable[[Any, Any], bool]
    draw: Callable[[int], Sequence[int]]
    """So many seeds."""
    seed: Callable[[int], Any]


def _equal_torch(one: Generators, other: Generators) -> bool:
    pairs = zip((one[0], *one[1]), (other[0], *other[1]), strict=True)
    return all(torch.equal(state, other) for state, other in pairs)


def _equal_numpy(one: Any, other: Any) -> bool:
    return one[0] == other[0] and np.array_equal(one[1], other[1]) and one[2:] == other[2:]


_KINDS = (
    _Kind(
        generators,
        set_generators,
        _equal_torch,
        lambda count: host_empty(count, torch.int64).random_(_SEEDS).tolist(),
        torch.manual_seed,
    ),
    _Kind(
        random.getstate,
        random.setstate,
        lambda one, other: bool(one == other),
        lambda count: [random.randrange(_SEEDS) for _ in range(count)],
        random.seed,
    ),
    _Kind(
        np.random.get_state,
        np.random.set_state,
        _equal_numpy,
        lambda count: [int(seed) for seed in np.random.randint(_SEEDS, size=count, dtype=np.int64)],
        np.random.seed,
    ),
)


class Forks:
    """The generators of `count` micro-batches; after an error they are the caller's again, as they were."""

    def __init__(self, count: int) -> None:
        self._before = [kind.read() for kind in _KINDS]
        self._begins: list[list[Any]] = [self._before]
        """Of each micro-batch, its generators' first states."""
        seeds = [kind.draw(count - 1) for kind in _KINDS]
        self._drawn = [kind.read() for kind in _KINDS]
        for of_one in zip(*seeds, strict=True):
            for kind, seed in zip(_KINDS, of_one, strict=True):
                kind.seed(seed)
            self._begins.append([kind.read() for kind in _KINDS])
        self._states = list(self._begins)
        self._write(self._before)

    @contextlib.contextmanager
    def turn(self, number: int) -> Iterator[None]:
        """A micro-batch draws inside."""
        self._write(self._states[number])
        try:
            yield
        finally:
            self._states[number] = [kind.read() for kind in _KINDS]

    def __enter__(self) -> Forks:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self._write(self._before if kind is not None else self._ends())

    def _ends(self) -> list[Any]:
        """See [Note: forks]."""
        ends = []
        for index, kind in enumerate(_KINDS):
            drew = [
                not kind.equal(begin[index], state[index])
                for begin, state in zip(self._begins, self._states, strict=True)
            ]
            others = self._drawn if any(drew) else self._before
            ends.append(self._states[0][index] if drew[0] else others[index])
        return ends

    @staticmethod
    def _write(states: Sequence[Any]) -> None:
        for kind, state in zip(_KINDS, states, strict=True):
            kind.write(state)
