"""Calls that the ranks of one model are about to make. They say it before they do it: a few bytes a time, on a way of
its own.

Two ranks that meet in different collectives would hang, or read each other's bytes as something else. So every
collective is announced by `same`, which raises on all ranks where they differ. With branches="any" a rank may want a
unit that others do not. Then `next_unit` says which unit all ranks gather next. `next_unit_at` a place that every rank
comes to (the end of a forward) returns None when all are there. Control thread only; blocking.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum

import torch
import torch.distributed as dist

from zero_offload.base.alike import Compared, Texts, by_value, difference, name_ranks
from zero_offload.base.errors import RankError, ZeroOffloadError
from zero_offload.base.host import host_empty, host_tensor
from zero_offload.base.types import Branches
from zero_offload.runtime.ranks.group import RankGroup, all_gather
from zero_offload.runtime.ranks.watch import ErrorReport, Notice, raise_first, report_of


class Intent(IntEnum):
    UNIT = 0  # gather this unit
    PLACE = 1  # wait here, taking part in gathers that others want
    CALL = 2  # a collective that all make together
    ERROR = 3  # this rank has failed before it
    NUMBER = 4  # say a number


_CRC_BITS = 32


class Agreement:
    """The ranks that hold the same part of one model."""

    def __init__(self, group: RankGroup, branches: Branches) -> None:
        self._members = sorted(group.members)
        """Members in torch's order."""
        self._num_ranks = len(self._members)
        self._group = group.agreement_group
        self._channel = group.channel
        self._watch = group.watch
        self.branches = branches
        self._compared: dict[str, Compared] = {}
        self._error: ZeroOffloadError | None = None
        """The error of this forward or backward; the rest of that pass runs on this rank alone."""

    def awaited(self) -> str:
        """The ranks that this one waits for, as far as it knows. Any thread may ask."""
        late = [] if self._channel is None else self._channel.late()
        return name_ranks(late) if late else "the other ranks"

    def begin(self) -> None:
        """A forward starts on all ranks; whatever went wrong before is over."""
        self._error = None

    def compare(self, name: str, compared: Compared) -> None:
        """The next call that all ranks make compares this too; it takes the place of what had its name."""
        self._compared[name] = compared

    def _take_compared(self) -> list[Compared]:
        taken, self._compared = list(self._compared.values()), {}
        return taken

    def same(self, call: str) -> None:
        """Every rank makes the same call now, with what `compare` was given, or all raise."""
        if self._group is not None:
            notice = Notice(compared=self._take_compared()) if self._compared else None
            self._exchange(Intent.CALL, _word(call, notice), call, notice)

    @contextmanager
    def together(self, call: str, notice: Notice | None = None) -> Iterator[None]:
        """A block at the beginning of `call`, which all ranks make, succeeds on all of them, or all raise.

        The first rank's error is raised where nothing went wrong. Inside there must be no communication. At the end
        `notice` is given on all ranks if it was given on one, and has what `compare` was given. Raises ConfigError on
        all where they differ in that.
        """
        notice = notice or Notice()
        if self._group is None:
            yield
            notice.compared += self._take_compared()
            return
        failure: Exception | None = None
        try:
            yield
        except RankError:
            raise
        except Exception as error:
            failure = error
        try:
            intent = Intent.CALL if failure is None else Intent.ERROR
            notice.compared += self._take_compared()
            with self._watch.waiting(call):
                heard = self._tell(intent, _word(call, notice.of_column()) | notice.given << _CRC_BITS)
            if len({(intent, word % (1 << _CRC_BITS)) for intent, word in heard}) > 1:
                raise self._mismatch(call, failure, notice.of_column())
            notice.given = any(word >> _CRC_BITS for _, word in heard)
        except RankError:
            if failure is None:
                raise
        if failure is not None:
            raise failure

    def next_unit(self, wish: int, name: str) -> int:
        """The unit that all ranks gather now, of those that some rank wants: this one wants `wish`."""
        return min(self._exchange(Intent.UNIT, wish, f"the gather of parameters of {name}"))

    def next_unit_at(self, place: str) -> int | None:
        """The unit that all ranks gather now, though this rank wants none; None once all have come to `place`."""
        return min(self._exchange(Intent.PLACE, zlib.crc32(place.encode()), place), default=None)

    def _exchange(self, intent: Intent, value: int, text: str, notice: Notice | None = None) -> list[int]:
        """Tell and be told; the units that are wanted. All ranks come to the same conclusion."""
        if self._group is None:
            return [value] if intent is Intent.UNIT else []
        if self._error is not None:
            if intent is Intent.PLACE:
                return []
            raise self._error
        with self._watch.waiting(text):
            said = set(self._tell(intent, value))
        wanted = [value for intent, value in said if intent == Intent.UNIT]
        others = {each for each in said if each[0] != Intent.UNIT}
        if len(others) > 1 or (wanted and any(intent != Intent.PLACE for intent, _ in others)):
            raise self._mismatch(text, notice=notice, in_pass=True)
        return wanted

    def least(self, number: int, what: str) -> int:
        """The smallest of the ranks' numbers; all say one now, or all raise."""
        if self._group is None:
            return number
        if self._error is not None:
            raise self._error
        with self._watch.waiting(what):
            said = self._tell(Intent.NUMBER, number)
        if any(intent != Intent.NUMBER for intent, _ in said):
            raise self._mismatch(what)
        return min(theirs for _, theirs in said)

    def _tell(self, intent: int, value: int) -> list[tuple[int, ...]]:
        if self._channel is not None:
            return self._channel.tell((intent, value))
        mine = host_tensor([intent, value], torch.int64)
        every = host_empty(self._num_ranks * 2, torch.int64)
        all_gather(every, mine, group=self._group)
        return [tuple(pair) for pair in every.view(-1, 2).tolist()]

    def _mismatch(
        self, text: str, failure: Exception | None = None, notice: Notice | None = None, *, in_pass: bool = False
    ) -> Exception:
        """The error to raise where ranks differ: an error of some rank, other settings, or other ways taken."""
        mine = (text, report_of(failure), {} if notice is None or failure is not None else notice.texts())
        found: list[tuple[str, ErrorReport, Texts]] = [mine] * self._num_ranks
        with self._watch.waiting(text):
            dist.all_gather_object(found, mine, group=self._group)
        try:
            raise_first(failure, zip(self._members, (theirs for _, theirs, _ in found), strict=True))
        except Exception as error:
            return error
        settings = zip(self._members, (texts for _, _, texts in found), strict=True)
        at_one = len({where for where, _, _ in found}) == 1
        if (differ := difference(found[0][0], settings, alone=at_one)) is not None:
            self._error = differ if in_pass else self._error
            return differ
        remedy = (
            "Each rank went its own way through the model (its own experts, dropped layers, early exit, evaluation on "
            "some ranks only). Or ranks ran different numbers of micro-batches, or only some made a call (a clip, "
            "zo.no_sync). Make them alike, or offload with branches='any'"
            if self.branches is Branches.SAME
            else "With branches='any' ranks may use different units. But each runs as many forwards and backwards of "
            "the model as the others, and calls zo's functions in the same order"
        )
        places = by_value([(rank, each) for rank, (each, _, _) in zip(self._members, found, strict=True)])
        (first, ranks), *others = places
        verb = "are" if ranks.startswith("ranks") else "is"
        at = ", ".join([f"{ranks} {verb} at {first}", *(f"{ranks} at {place}" for place, ranks in others)])
        self._error = ZeroOffloadError(f"{at}. {remedy}")
        return self._error


def _word(call: str, notice: Notice | None) -> int:
    return zlib.crc32(call.encode(), 0 if notice is None else notice.word)
