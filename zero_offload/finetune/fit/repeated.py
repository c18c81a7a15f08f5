"""Blocks of a model that are like others: a rehearsal leaves them out, and counts what one of their kind takes.

Owns which blocks are of one kind, the stand-ins of those that are left out, and the bytes that these would take. Of a
kind the first two blocks run and the last one. The second one's bytes count for those that are left out, if the last
one takes as many. Never guesses: where blocks are joined by more than the values that each hands to the next,
`NotAlike` is raised. The calls: `left_out_of` a model; `CountedBlocks` around its forward and backward, then `peak` and
`saved`.

[Note: bytes of blocks that are left out]
From a block's forward until its backward its growth is alive: what it saves, and what it hands on. So each moment has
the growth of all blocks that are left out and whose backward is still to come. Within a block bytes rise above those at
its begin by as much as in the second one of its kind. The peak is the largest of all moments' bytes.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from zero_offload.finetune.model.build import blocks_of

_MODULE_FIELDS = frozenset(vars(nn.Module()))
_POSITION = re.compile("idx|index|layer_id|layer_number")
"""In names of attributes that say which block of the model it is."""
_VALUES = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device)


class NotAlike(Exception):
    """Blocks of one kind do not take the same, or more than their outputs joins them."""


class Gauge(Protocol):
    """Bytes that are alive."""

    now: int

    def take_peak(self) -> int:
        """The most since the last call."""

    def enter(self, block: str) -> None:
        """Storages that operations make from now on are this block's; those of "" are of none."""

    def hand_on(self, tensor: Tensor) -> None:
        """Let operations outside of its block use it."""

    def end_forward(self) -> None:
        """Let operations use all."""


@dataclass(frozen=True)
class Like:
    """Two blocks that ran, for others of their kind that did not."""

    counted: str
    """Its bytes count."""
    last: str
    """It takes as many."""


def left_out_of(model: nn.Module) -> dict[str, Like]:
    """Blocks that need not run, by name."""
    blocks, found = blocks_of(model), dict[str, Like]()
    lists = [each for config in _configs(model) for each in vars(config).values() if isinstance(each, list | tuple)]
    by_layer = [each for each in lists if len(each) == len(blocks)]
    kinds: dict[object, list[str]] = {}
    for index, (name, block) in enumerate(blocks.items()):
        numbers = re.findall(r"\d+", name, re.ASCII)
        position = int(numbers[-1]) if numbers else index
        told = _value([each[index] for each in by_layer])
        kinds.setdefault((_kind(block, position), told), []).append(name)
    for names in kinds.values():
        if len(names) > 3:
            found |= dict.fromkeys(names[2:-1], Like(names[1], names[-1]))
    return found


def _configs(model: nn.Module) -> list[Any]:
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else None
    return [each for each in (config, text) if hasattr(each, "__dict__")]


def _kind(block: nn.Module, position: int) -> object:
    """Equal for blocks whose modules have the same classes, tensors' shapes, settings and hooks."""
    found = []
    for name, module in block.named_modules():
        tensors = [(own, _value(tensor)) for own, tensor in (*module._parameters.items(), *module._buffers.items())]
        settings = [
            (own, "position" if value == position and _POSITION.search(own) else _value(value, f".{position}."))
            for own, value in vars(module).items()
            if own not in _MODULE_FIELDS
        ]
        hooks = [_value([*each.values()]) for each in (module._forward_pre_hooks, module._forward_hooks)]
        found.append((name, type(module), module.training, tuple(tensors), tuple(settings), tuple(hooks)))
    return tuple(found)


def _value(value: Any, position: str = "") -> Any:
    """Something that is equal for equal settings, and can be hashed. `position`: the part of names that says which
    block of the model it is, as adapters keep them."""
    told = functools.partial(_value, position=position)
    if isinstance(value, str) and position:
        return value.replace(position, "..")
    if isinstance(value, _VALUES):
        return type(value), value
    if isinstance(value, Tensor):
        return tuple(value.shape), value.dtype, value.requires_grad
    if isinstance(value, list | tuple):
        return type(value), tuple(map(told, value))
    if isinstance(value, dict):
        return type(value), tuple((told(key), told(each)) for key, each in value.items())
    if isinstance(value, set | frozenset):
        return type(value), frozenset(map(told, value))
    if isinstance(value, functools.partial):
        return told(value.func), told(value.args), told(value.keywords)
    if isinstance(value, nn.Module):
        return type(value)
    if callable(value):
        return getattr(value, "__qualname__", None) or type(value)
    return id(value)  # a config, which all blocks share


@dataclass
class _BlockBytes:
    """Bytes of a block that runs: those alive at the borders of its forward and backward, and the most in between."""

    begin: int = 0
    forward_peak: int = 0
    made: int = 0
    """As its forward returns."""
    end: int | None = None
    """As the next block begins."""
    backward_begin: int = 0
    backward_peak: int = 0
    backward_end: int | None = None

    @property
    def growth(self) -> int:
        return (self.end or 0) - self.begin

    @property
    def freed(self) -> int:
        return self.backward_begin - (self.backward_end or 0)

    @property
    def figures(self) -> tuple[int, ...]:
        """Equal for blocks of which each can count for the other."""
        rises = self.forward_peak - self.begin, self.backward_peak - self.backward_begin
        return self.made - self.begin, self.freed, *rises


@dataclass(frozen=True)
class _Moment:
    """The most bytes between two borders of blocks."""

    nbytes: int
    num_alive: int
    """Of the blocks that are left out, the first ones, whose growth is alive."""
    is_backward: bool
    like: str = ""
    """Within a block that is left out: the block that counts for it. Bytes are then those at its begin."""


class CountedBlocks:
    """The course of bytes in a model of which some blocks are left out."""

    def __init__(self, model: nn.Module, left_out: Mapping[str, Like], gauge: Gauge) -> None:
        self._blocks, self._left_out, self._gauge = blocks_of(model), left_out, gauge
        self._courses = {name: _BlockBytes() for name in self._blocks if name not in left_out}
        self._given: dict[str, _BlockInput] = {}
        self._returned: dict[str, _BlockOutput] = {}
        self._calls: list[str] = []
        self._passed: list[str] = []
        """Blocks that were left out so far."""
        self._num_alive = 0
        self._last: _BlockBytes | None = None
        """The block whose forward, and then backward, has ended last, or runs."""
        self._moments: list[_Moment] = []
        self._is_forward = True

    @contextmanager
    def stand_ins(self) -> Iterator[None]:
        """Let blocks that are left out hand on what they are given. Other hooks are registered inside."""
        hooks = []
        for name, block in self._blocks.items() if self._left_out else ():
            if name in self._left_out:
                # Without modules there is nothing to hook, and nothing to give memory.
                for part in (block._modules, block._parameters, block._forward_pre_hooks, block._forward_hooks):
                    cast("dict[Any, Any]", part).clear()
                block.forward = functools.partial(self._pass_by, name)
            else:
                before, after = functools.partial(self._before, name), functools.partial(self._after, name)
                hooks.append(block.register_forward_pre_hook(before, with_kwargs=True, prepend=True))
                hooks.append(block.register_forward_hook(after))
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def end_forward(self) -> None:
        """Backward is next: forwards that it runs again are no others."""
        self._note()
        self._is_forward, self._last = False, None
        self._gauge.end_forward()

    # Forward

    def _before(self, name: str, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not self._is_forward:
            return
        self._border()
        given = self._look_at(name, args, kwargs)
        course = self._last = self._courses[name]
        course.begin = self._gauge.now
        self._gauge.enter(name)
        if given.requires_grad:
            given.register_hook(lambda _: self._end_backward_of(course))

    def _after(self, name: str, _: nn.Module, args: tuple[Any, ...], made: Any) -> None:
        if not self._is_forward:
            return
        course = self._courses[name]
        course.forward_peak, course.made = self._note(), self._gauge.now
        self._gauge.enter("")
        handed, *others = made if isinstance(made, tuple) else (made,)
        if not isinstance(handed, Tensor) or any(each is not None for each in others):
            raise NotAlike(f"{name} returns more than one tensor")
        self._gauge.hand_on(handed)
        self._returned[name] = _BlockOutput(isinstance(made, tuple), len(others), _value(handed))
        if handed.requires_grad:
            handed.register_hook(lambda _: self._begin_backward_of(course))

    def _pass_by(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Stands for a block's forward."""
        if not self._is_forward:
            raise NotAlike(f"{name} runs again by itself")
        self._border()
        handed, like, index = self._look_at(name, args, kwargs), self._left_out[name].counted, len(self._passed)
        returned = self._returned.get(like)
        if returned is None or not self._given[name].is_like(self._given[like]) or returned.form != _value(handed):
            raise NotAlike(f"{name} is not given what {like} is given")
        self._moments.append(_Moment(self._gauge.now, index, False, like))
        self._passed.append(name)
        self._num_alive = len(self._passed)

        def backward(_: Tensor) -> None:
            # Of blocks in a row hooks run in the order of forward, after that of the block before them.
            self._moments.append(_Moment(self._gauge.now, index + 1, True, like))
            self._num_alive = min(self._num_alive, index)

        if not handed.requires_grad:
            raise NotAlike(f"{name} has no backward")
        handed.register_hook(backward)
        return (handed, *[None] * returned.num_others) if returned.is_tuple else handed

    def _look_at(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """Keep what a block is given; returns the values that the block before hands on."""
        self._calls.append(name)
        first: Any = args[0] if args else kwargs.get("hidden_states")
        if not isinstance(first, Tensor):
            raise NotAlike(f"{name} is given no tensor first")
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        storages = frozenset(each.untyped_storage()._cdata for each in tensors if each is not first)
        self._given[name] = _BlockInput(_value((args, kwargs)), storages)
        return first

    def _border(self) -> None:
        """The next block begins; what the last one needed is free only now."""
        self._note()
        if self._last is not None and self._last.end is None:
            self._last.end = self._gauge.now

    # Backward

    def _begin_backward_of(self, course: _BlockBytes) -> None:
        """Its hook is the first at the border with the next block, since it was registered first."""
        if self._last is not None:
            self._end_backward_of(self._last)
        self._note()
        course.backward_begin, self._last = self._gauge.now, course

    def _end_backward_of(self, course: _BlockBytes) -> None:
        if self._last is course:
            course.backward_peak, course.backward_end = self._note(), self._gauge.now
            self._last = None

    def _note(self) -> int:
        """The most bytes since the last border."""
        found = self._gauge.take_peak()
        self._moments.append(_Moment(found, self._num_alive, not self._is_forward))
        return found

    # Results

    def saved(self, of_units: Mapping[str, int]) -> dict[str, int]:
        """Bytes that each unit saves; `of_units` has none of the blocks that are left out."""
        found = dict(of_units)
        for name in of_units:
            block = next((each for each in self._left_out if f"{name}.".startswith(f"{each}.")), None)
            if block is not None:
                rest, like = name.removeprefix(block), self._left_out[block]
                found[name] = of_units[like.counted + rest]
                if found[name] != of_units[like.last + rest]:
                    raise NotAlike(f"{like.counted}{rest} and {like.last}{rest} save other bytes")
        return found

    def peak(self) -> int:
        """The most bytes at once of the whole model. Raises NotAlike where the blocks that ran do not tell."""
        self._note()
        if self._left_out and self._calls != [*self._blocks]:
            raise NotAlike("blocks run in another order than that of their definition")
        for like in {*self._left_out.values()}:
            own, last = self._courses[like.counted], self._courses[like.last]
            if own.figures != last.figures or own.end is None or None in (own.backward_end, last.backward_end):
                raise NotAlike(f"{like.counted} takes {own}, {like.last} {last}")
        passed = [self._courses[self._left_out[name].counted] for name in self._passed]

        def bytes_at(moment: _Moment) -> tuple[int, int]:
            """And how many of them are of blocks whose backward has ended."""
            alive, ended = passed[: moment.num_alive], passed[moment.num_alive :] if moment.is_backward else []
            kept = sum(each.growth - each.freed for each in ended)
            rise = 0
            if moment.like:
                *_, forward, backward = self._courses[moment.like].figures
                rise = backward if moment.is_backward else forward
            return moment.nbytes + sum(each.growth for each in alive) + kept + rise, kept

        found, kept = max(map(bytes_at, self._moments))
        if kept:
            raise NotAlike("the peak is behind the backward of blocks that were left out, which do not free all")
        return found


@dataclass(frozen=True)
class _BlockInput:
    """The arguments of a block."""

    form: Any
    """Numbers, and shapes of tensors."""
    storages: frozenset[int]
    """Of tensors beside the values that blocks hand on."""

    def is_like(self, other: _BlockInput) -> bool:
        return self.form == other.form and self.storages <= other.storages


@dataclass(frozen=True)
class _BlockOutput:
    is_tuple: bool
    num_others: int
    form: Any
