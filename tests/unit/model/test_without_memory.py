"""Caches of code that a forward without memory fills have nothing of it afterwards."""

from __future__ import annotations

import functools
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

from zero_offload.model.without_memory import without_memory

WIDTH = 4
IN_MODULE: dict[str, Any] = {"counts": [], "fixed": None}
LISTED: list[Tensor] = []
LATEST: deque[Tensor] = deque(maxlen=2)
BY_SIZE: OrderedDict[int, tuple[Tensor, Tensor]] = OrderedDict()
BY_OBJECT: weakref.WeakKeyDictionary[Any, Tensor] = weakref.WeakKeyDictionary()
SPACE = SimpleNamespace(table=None)
NAMED: Tensor | None = None


def made() -> Tensor:
    return torch.arange(WIDTH, dtype=torch.float32)


@functools.lru_cache(maxsize=4)
def of_functools(width: int) -> tuple[Tensor, Tensor]:
    return made(), made()


class Holder:
    """An object that is a key, and keeps values."""

    def __init__(self) -> None:
        self.table: Tensor | None = None

    @functools.cached_property
    def once(self) -> Tensor:
        return made()


KEY = Holder()


def enclosed() -> Callable[[], Tensor]:
    kept: dict[int, Tensor] = {}

    def get() -> Tensor:
        return kept.setdefault(WIDTH, made())

    return get


IN_CLOSURE = enclosed()


def of_a_default(kept: list[Tensor] = []) -> Tensor:  # noqa: B006
    if not kept:
        kept.append(made())
    return kept[0]


def of_a_function() -> Tensor:
    of_a_function.__dict__.setdefault("table", made())
    found: Tensor = of_a_function.__dict__["table"]
    return found


class Cached(nn.Module):
    """Has a cache of its own kind."""

    on_class: ClassVar[Tensor | None] = None
    by_width: ClassVar[dict[int, Tensor]] = {}

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.first = kind, nn.Linear(WIDTH, WIDTH)

    @staticmethod
    @functools.cache
    def of_static_method(width: int) -> Tensor:
        return made()

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x) + KINDS[self.kind]()


def on_class() -> Tensor:
    if Cached.on_class is None:
        Cached.on_class = made()
    return Cached.on_class


def new_on_class() -> Tensor:
    if not hasattr(Cached, "later"):
        Cached.later = made()  # type: ignore[attr-defined]
    found: Tensor = Cached.later  # type: ignore[attr-defined]
    return found


def global_name() -> Tensor:
    global NAMED
    NAMED = made() if NAMED is None else NAMED
    return NAMED


def fixed_key() -> Tensor:
    IN_MODULE["counts"].append(1)
    IN_MODULE["fixed"] = made() if IN_MODULE["fixed"] is None else IN_MODULE["fixed"]
    found: Tensor = IN_MODULE["fixed"]
    return found


def listed() -> Tensor:
    if not LISTED:
        LISTED.append(made())
    return LISTED[0]


def latest() -> Tensor:
    if not LATEST:
        LATEST.append(made())
    return LATEST[0]


def in_space() -> Tensor:
    if SPACE.table is None:
        SPACE.table = made()
    found: Tensor = SPACE.table
    return found


def in_object() -> Tensor:
    KEY.table = made() if KEY.table is None else KEY.table
    return KEY.table


KINDS: dict[str, Callable[[], Tensor]] = {
    "functools": lambda: of_functools(WIDTH)[1],
    "a static method": lambda: Cached.of_static_method(WIDTH),
    "a closure": lambda: IN_CLOSURE(),
    "a default": of_a_default,
    "a function's attribute": of_a_function,
    "a class": on_class,
    "a new name of a class": new_on_class,
    "a dict of a class": lambda: Cached.by_width.setdefault(WIDTH, made()),
    "a name of a module": global_name,
    "a dict of a module": fixed_key,
    "a list": listed,
    "a deque": latest,
    "an ordered dict of tuples": lambda: BY_SIZE.setdefault(WIDTH, (made(), made()))[0],
    "weak keys": lambda: BY_OBJECT.setdefault(KEY, made()),
    "a namespace": in_space,
    "an object": in_object,
    "a property": lambda: KEY.once,
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_real_forward_finds_no_tensor_without_memory(kind: str) -> None:
    with torch.device("meta"):
        model = Cached(kind)
    with without_memory(model):
        model(torch.ones(1, WIDTH)).sum().backward()
        assert KINDS[kind]() is KINDS[kind](), "it is a cache"
    real = Cached(kind)
    found = real(torch.ones(1, WIDTH))
    found.sum().backward()
    assert torch.equal(found, real.first(torch.ones(1, WIDTH)) + made())
    assert torch.equal(KINDS[kind](), made())


def test_other_changes_and_earlier_values_stay() -> None:
    of_functools.cache_clear()
    kept, IN_MODULE["counts"] = of_functools(WIDTH + 1), []
    LISTED[:] = [made()]
    first = LISTED[0]
    with torch.device("meta"):
        model = Cached("a dict of a module")
    with without_memory(model):
        LISTED.append(made())
        model(torch.ones(1, WIDTH))
    assert IN_MODULE["counts"], "what is no tensor"
    assert len(LISTED) == 1 and LISTED[0] is first
    assert of_functools(WIDTH + 1) is kept


def test_a_forward_that_raises_leaves_nothing_either() -> None:
    with torch.device("meta"):
        model = Cached("functools")
    of_functools.cache_clear()
    with pytest.raises(ValueError, match="stopped"), without_memory(model):
        model(torch.ones(1, WIDTH))
        raise ValueError("stopped")
    assert torch.equal(of_functools(WIDTH)[0], made())
