"""Entries and states of `optimizer.state` that the program has in hand.

They show the values at rest. Where torch's would still have the values after a change, they take them into memory.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

from torch import nn
from torch.utils.weak import WeakIdKeyDictionary


class StateReader:
    """Shows a state of a parameter, or all of them."""

    __slots__ = ()
    param: nn.Parameter
    state_name: str
    """As torch names it; "" for all."""

    @property
    def of_dict(self) -> bool:
        """True if it is of a state dict."""
        return False

    def keep(self) -> None:
        """Take the values into memory: others are about to replace them at rest."""
        raise NotImplementedError


class Readers:
    """Entries and states of one model that the program has in hand."""

    def __init__(self) -> None:
        self._known: Any = WeakIdKeyDictionary()

    def add(self, reader: StateReader) -> None:
        self._known[reader] = None

    def discard(self, reader: StateReader) -> None:
        self._known.pop(reader, None)

    def before_step(self) -> None:
        """States of any parameter change in place, or go: torch's tensors follow, a state dict stays what it was."""
        self._keep(lambda each: each.of_dict)

    def before_edit(self, state: StateReader) -> None:
        """The program changes this one in place."""
        param, name = state.param, state.state_name
        self._keep(lambda each: each.of_dict and each is not state and each.param is param and each.state_name == name)

    def before_changing(self, params: Iterable[nn.Parameter], names: Collection[str]) -> None:
        """The program changes these of these parameters, past the optimizer's entries."""
        wanted = set(map(id, params))
        self._keep(lambda each: each.of_dict and id(each.param) in wanted and each.state_name in names)

    def before_loading(self, states: Iterable[object]) -> None:
        """A load replaces what these show."""
        loaded = {id(state): state for state in states if isinstance(state, StateReader)}
        keys = {(id(state.param), state.state_name) for state in loaded.values()}
        self._keep(lambda each: each.of_dict and id(each) not in loaded and (id(each.param), each.state_name) in keys)

    def before_replacing(self, params: Iterable[nn.Parameter], names: Collection[str] | None = None) -> None:
        """The optimizer is to have other entries of these parameters; with `names`, other tensors in them."""
        wanted = set(map(id, params))
        self._keep(lambda each: id(each.param) in wanted and (names is None or each.state_name in names))

    def _keep(self, is_meant: Callable[[StateReader], bool]) -> None:
        for each in list(self._known):
            if is_meant(each):
                each.keep()
                self._known.pop(each, None)
