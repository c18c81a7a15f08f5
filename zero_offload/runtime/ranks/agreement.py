"""Calls that the ranks of one model are about to make. They say it before they do it: a few bytes a time, on a way of
its own.

Two ranks that meet in different collectives would hang, or read each other's bytes as something else. So every
collective is said. `same` waits for the others' words, and raises on all ranks where they differ. `announce` waits for
none, where ranks of one machine compute on CPUs: `hear` compares the words when the bytes are needed. Bytes of ranks
that said different things never meet (`Course`).

Where ranks compute on GPUs, or CPU ranks share no pages, as between machines, `announce` is a round too. It says
nothing once all ranks expect the same calls of a step (`Script`). A rank that makes another call tells so in the store,
and begins to announce. Others that wait for its bytes look there each second.

With branches="any" a rank may want a unit that others do not. Then `next_unit` says which unit all ranks gather next.
`next_unit_at` a place that every rank comes to (the end of a forward) returns None when all are there. Control thread
only.
"""

from __future__ import annotations

import json
import secrets
import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum
from functools import reduce
from operator import or_
from typing import NamedTuple

import torch
import torch.distributed as dist

from zero_offload.base.alike import Compared, Texts, by_value, difference, name_ranks
from zero_offload.base.errors import RankError, ZeroOffloadError
from zero_offload.base.host import host_empty, host_tensor
from zero_offload.base.types import Branches
from zero_offload.runtime.ranks.group import RankGroup, gather_few
from zero_offload.runtime.ranks.levels import Levels
from zero_offload.runtime.ranks.neighbours import TURNS_AHEAD
from zero_offload.runtime.ranks.script import Script
from zero_offload.runtime.ranks.sockets import end_device_groups
from zero_offload.runtime.ranks.watch import ErrorReport, Notice, raise_first, report_of


class Intent(IntEnum):
    UNIT = 0  # gather this unit
    PLACE = 1  # wait here, taking part in gathers that others want
    CALL = 2  # a collective that all make together
    ERROR = 3  # this rank has failed before it
    NUMBER = 4  # say a number
    AHEAD = 5  # a collective that all make together; this rank hears the others when it needs their bytes


_START_AGAIN = "Ranks have closed their connections: start all again; existing='resume' goes on from the last commit"
_SAID_KEPT = 256
_FLAGS_OF_NUMBER = 48
"""A float64 has these bits exactly."""
_CRC_BITS = 32
_CRC_MAX = (1 << _CRC_BITS) - 1

Words = Sequence[tuple[int, ...]]
"""Each rank's intent and value."""


class Said(NamedTuple):
    """How much a rank had said when it launched something."""

    turn: int
    num_partings: int


class _Told(NamedTuple):
    """A rank's words in full, where ranks differ."""

    call: str
    report: ErrorReport
    settings: Texts = {}
    said: Sequence[tuple[int, str]] = ()


class Agreement:
    """The ranks that hold the same part of one model."""

    def __init__(self, group: RankGroup, branches: Branches, *, on_host: bool, may_follow: bool = True) -> None:
        """`on_host`: the ranks compute on CPUs. `may_follow`: nothing that is launched is used before `step()`, where
        all ranks compare."""
        self._members = sorted(group.members)
        """Members in torch's order."""
        self._num_ranks = len(self._members)
        self._group = group.agreement_group
        self._on_host = on_host
        self._levels = Levels(group)
        self._course = group.course
        self._watch = group.watch
        self.branches = branches
        later = branches is Branches.SAME and self._group is not None
        self._hears_later = later and on_host and group.channel is not None
        follows = later and not self._hears_later and (on_host or may_follow)
        self._script = Script() if follows else None
        self._channel = None if follows else group.channel
        self._key = ""
        """Where ranks that depart from the script tell so: no earlier start has left anything there."""
        self._said: deque[tuple[int, str]] = deque(maxlen=_SAID_KEPT)
        """The last turns and their calls, where there is a script."""
        if self._script is not None:
            mine = host_tensor([secrets.randbits(62)], torch.int64)
            every = host_empty(self._num_ranks, torch.int64)
            gather_few(every, mine, group=self._group)
            self._key = f"{int(every[0]):x}"
            # The host of a GPU waits for its device anywhere in the program.
            self._watch.ask_too(self._parted, always=not on_host)
        self._turn = self._heard = 0
        """Turns that this rank has said, and those of which it has compared all ranks' words."""
        self._partings: list[int] = []
        """Turns in which ranks said different things, in their order."""
        self._has_ended = False
        """True if ranks have parted so that their collectives of devices were aborted."""
        self._compared: dict[str, Compared] = {}
        self._error: ZeroOffloadError | None = None
        """The error of this forward or backward; the rest of that pass runs on this rank alone."""

    def awaited(self) -> str:
        """The ranks that this one waits for, as far as it knows. Any thread may ask."""
        late = [] if self._channel is None else self._channel.late()
        return name_ranks(late) if late else "the other ranks"

    def places_of(self, ranks: Sequence[int]) -> list[int]:
        """The places of some of the program's ranks among all that agree, as `numbers` has them."""
        return [self._members.index(rank) for rank in ranks]

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
        self._same(call)

    def _same(self, call: str, numbers: Sequence[float] = ()) -> None:
        if self._group is not None:
            notice = Notice(compared=self._take_compared()) if self._compared else None
            self._exchange(Intent.CALL, self._word(call, notice), call, notice, numbers)

    def numbers(self, mine: Sequence[float], what: str) -> list[list[float]]:
        """Every rank's numbers, as many as this rank's; all say them now for `what`, or all raise."""
        if self._group is None:
            return [list(mine)]
        call = f"{what} ({len(mine)} numbers)"
        if len(mine) <= self._levels.most_numbers:
            self._same(call, mine)
            return self._levels.numbers(len(mine))
        self.same(call)
        with self._watch.waiting(what):
            return self._levels.many(mine)

    def any_of(self, flags: Sequence[bool], what: str) -> list[bool]:
        """For each flag, whether a rank has set it; all say as many now, for `what`, or all raise."""
        call = f"{what} ({len(flags)} flags)"
        return _any(self.numbers(_pack(flags), call), len(flags)) if self._group is not None else list(flags)

    # Words that are compared later

    def announce(self, call: str) -> None:
        """As `same`, for a call whose bytes `hear` is asked for before they are used; it may not wait for the others.

        All ranks hear later, or none does. The next announcements may follow at once.
        """
        is_quiet = self._script is not None and self._script.expects(call)
        if self._compared or not (self._hears_later or is_quiet):
            self.same(call)
            return
        if self._error is not None:
            raise self._error
        self._note(call)
        if self._hears_later:
            self._hear_until(self._turn + 1 - TURNS_AHEAD, call)
        self._say(Intent.AHEAD, self._word(call, None), call)

    @property
    def said(self) -> Said:
        """All that this rank has said."""
        return Said(self._turn, len(self._partings))

    def hear(self, said: Said, what: str) -> None:
        """All ranks have said the same until then, or all raise. `what` is waited for."""
        if self._hears_later or self._script is not None:
            assert not self.is_void(said), f"{what} was launched before ranks parted"
        if self._hears_later and said.num_partings == len(self._partings):
            self._hear_until(said.turn, what)

    def hear_all(self, what: str) -> None:
        """As `hear`, until now: before this rank waits for others in another way."""
        if self._error is None:
            self.hear(self.said, what)

    def is_void(self, said: Said) -> bool:
        """True if ranks had parted before, as all of them know by now: no bytes of what was launched come any more."""
        return said.num_partings < len(self._partings) and said.turn >= self._partings[said.num_partings]

    def _hear_until(self, through: int, what: str) -> None:
        """Compare all ranks' words of the turns until then, in their order."""
        if through <= self._heard:
            return
        assert self._channel is not None
        if isinstance(self._error, RankError):
            raise self._error  # it was waited for once
        for turn in range(self._heard + 1, through + 1):
            try:
                with self._watch.waiting(what):
                    self._channel.wait(turn)  # one by one: a rank that finds a difference says nothing more
            except RankError as error:
                self._error = error
                raise
            self._heard = turn
            if _differ(words := self._channel.words(turn)):
                raise self._mismatch(turn, words, what, in_pass=True)

    # Words that are compared at once

    @contextmanager
    def together(self, call: str, notice: Notice | None = None, *, ends_step: bool = False) -> Iterator[None]:
        """A block at the beginning of `call`, which all ranks make, succeeds on all of them, or all raise.

        The first rank's error is raised where nothing went wrong. Inside there must be no communication. At the end
        `notice` and each of its flags are given on all ranks if they were given on one. It has what `compare` was
        given, too. Raises ConfigError on all where they differ in that. With `ends_step` it is the last call of a step.
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
            if notice.flags:
                call = f"{call} ({len(notice.flags)} flags)"
            packed = _pack(notice.flags)
            rides = len(packed) <= self._levels.most_numbers
            word = self._word(call, notice.of_column()) | notice.given << _CRC_BITS
            self._note(call)
            if ends_step and self._script is not None:
                word |= self._script.forecast() << _CRC_BITS + 1
            heard = self._ask(intent, word, call, packed if rides else (), failure)
            if _differ(heard):
                raise self._mismatch(self._turn, heard, call, failure, notice.of_column())
            notice.given = any(word >> _CRC_BITS & 1 for _, word in heard)
            if ends_step and self._script is not None:
                forecasts = {word >> _CRC_BITS + 1 for _, word in heard}
                self._script.end(alike=len(forecasts) == 1 and 0 not in forecasts)
            if packed and failure is None:
                with self._watch.waiting(call):
                    every = self._levels.numbers(len(packed)) if rides else self._levels.many(packed)
                notice.flags = _any(every, len(notice.flags))
        except ZeroOffloadError:
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

    def _exchange(
        self, intent: Intent, value: int, text: str, notice: Notice | None = None, numbers: Sequence[float] = ()
    ) -> list[int]:
        """Tell and be told; the units that are wanted. All ranks come to the same conclusion."""
        if self._group is None:
            return [value] if intent is Intent.UNIT else []
        if self._error is not None:
            if intent is Intent.PLACE:
                return []
            raise self._error
        self._note(text)
        said = self._ask(intent, value, text, numbers)
        if _differ(said):
            raise self._mismatch(self._turn, said, text, notice=notice, in_pass=True)
        return [value for intent, value in said if intent == Intent.UNIT]

    def least(self, number: int, what: str) -> int:
        """The smallest of the ranks' numbers; all say one now, or all raise."""
        if self._group is None:
            return number
        if self._error is not None:
            raise self._error
        self._note(what)
        said = self._ask(Intent.NUMBER, number, what)
        if _differ(said):
            raise self._mismatch(self._turn, said, what)
        return min(theirs for _, theirs in said)

    def _say(
        self, intent: int, value: int, text: str, numbers: Sequence[float] = (), failure: Exception | None = None
    ) -> None:
        """The next turn's words, for the others to hear."""
        self._turn += 1
        if intent not in (Intent.UNIT, Intent.PLACE):
            self._course.go(text)
        if self._script is not None:
            self._said.append((self._turn, text))
        if self._channel is not None:
            self._channel.post((intent, value), text, numbers, report_of(failure))

    def _ask(
        self,
        intent: int,
        value: int,
        text: str,
        numbers: Sequence[float] = (),
        failure: Exception | None = None,
    ) -> list[tuple[int, ...]]:
        """Every rank's words of this turn. Raises where they differed before."""
        if self._channel is not None:
            self._hear_until(self._turn + 1 - TURNS_AHEAD, text)
        self._say(intent, value, text, numbers, failure)
        if self._channel is not None:
            self._hear_until(self._turn - 1, text)
            with self._watch.waiting(text):
                self._channel.wait(self._turn)
            self._heard = self._turn
            return self._channel.words(self._turn)
        with self._watch.waiting(text):
            return self._levels.tell((intent, value), numbers)

    def _mismatch(
        self,
        turn: int,
        words: Words,
        text: str,
        failure: Exception | None = None,
        notice: Notice | None = None,
        *,
        in_pass: bool = False,
    ) -> Exception:
        """The error to raise where ranks differ: an error of some rank, other settings, or other ways taken."""
        self._partings.append(turn)
        found = self._told(turn, words, text, failure, notice)
        try:
            raise_first(failure, zip(self._members, (each.report for each in found), strict=True))
        except Exception as error:
            return error
        settings = zip(self._members, (each.settings for each in found), strict=True)
        at_one = len({each.call for each in found}) == 1
        if (differ := difference(found[0].call, settings, alone=at_one)) is not None:
            self._error = differ if in_pass else self._error
            return differ
        places = by_value([(rank, each.call) for rank, each in zip(self._members, found, strict=True)])
        (first, ranks), *others = places
        verb = "are" if ranks.startswith("ranks") else "is"
        at = ", ".join([f"{ranks} {verb} at {first}", *(f"{ranks} at {place}" for place, ranks in others)])
        text = f"{at}. {self._remedy}"
        if self._has_ended:
            text = self._watch.tell_first(f"parted/{self._key}", f"{text}. {_START_AGAIN}")
        self._error = ZeroOffloadError(text)
        return self._error

    @property
    def _remedy(self) -> str:
        return (
            "Each rank went its own way through the model (its own experts, dropped layers, early exit, evaluation on "
            "some ranks only). Or ranks ran different numbers of micro-batches, or only some made a call (a clip, "
            "zo.no_sync). Make them alike, or offload with branches='any'"
            if self.branches is Branches.SAME
            else "With branches='any' ranks may use different units. But each runs as many forwards and backwards of "
            "the model as the others, and calls zo's functions in the same order"
        )

    def _told(
        self, turn: int, words: Words, text: str, failure: Exception | None, notice: Notice | None
    ) -> list[_Told]:
        """The call of each rank in a turn in which they differ, its error, and its settings."""
        texts = [] if self._channel is None else self._channel.texts(turn)
        ahead = any(intent == Intent.AHEAD for intent, _ in words)
        if ahead and len({said for said, _ in texts}) > 1:
            # Not all ranks wait here. One may be inside of a collective of the program's, which others never join.
            found = [
                _Told(said, report if intent == Intent.ERROR else None)
                for (intent, _), (said, report) in zip(words, texts, strict=True)
            ]
        else:
            settings = {} if notice is None or failure is not None else notice.texts()
            mine = _Told(text, report_of(failure), settings, [*self._said])
            found = [mine] * self._num_ranks
            with self._watch.waiting(text):
                dist.all_gather_object(found, mine, group=self._group)
            found = self._parted_before(found)
        self._course.restart(self._partings[-1])
        if self._channel is not None:
            # A rank says no more than that before it hears this turn, and so all go on from one number.
            self._turn = self._heard = turn + TURNS_AHEAD
            self._channel.skip_to(self._turn)
        elif self._levels.pages is not None:
            self._levels.pages.begin_numbers()  # some ranks may have told numbers, and others not
        return found

    # Without words before each call

    def _parted_before(self, found: list[_Told]) -> list[_Told]:
        """As `found`, or at the first turn in which ranks said different things, where they said nothing then."""
        if self._script is None:
            return found
        self._script.forget()
        logs = [dict(each.said) for each in found]
        self._turn = max(max(log) for log in logs)
        self._said.clear()
        for turn in sorted({turn for log in logs for turn in log if turn >= max(min(log) for log in logs)}):
            if len({log.get(turn) for log in logs}) > 1:
                self._partings[-1] = turn
                if not self._on_host and turn < self._turn:
                    # A device waits in what its rank has launched since, and others never will.
                    end_device_groups()
                    self._has_ended = True
                if all(turn in log for log in logs):
                    return [
                        each if log[turn] == each.call else _Told(log[turn], each.report)
                        for each, log in zip(found, logs, strict=True)
                    ]
                break
        return found

    def _note(self, call: str) -> None:
        """This rank makes a call. It tells all if that is not what they expect."""
        if self._script is not None:
            place = self._script.place
            if self._script.note(call):
                departed = json.dumps((place.num_calls, self._watch.rank, call))
                self._watch.add(f"departed/{self._key}/{place.step}", departed)

    def _parted(self) -> str:
        """The error, if a rank has departed from what this rank has done. Any thread may ask."""
        assert self._script is not None
        if text := self._watch.told(f"parted/{self._key}"):
            return text
        place = self._script.place
        if not place.follows:
            return ""  # ranks that announce meet in a round
        for number, rank, call in map(json.loads, self._watch.added(f"departed/{self._key}/{place.step}")):
            if number < place.num_calls:
                text = (
                    f"rank {rank} is at {call}, rank {self._watch.rank} at {place.texts[number]}, as in the steps "
                    f"before. {self._remedy}. {_START_AGAIN}"
                )
                return self._watch.tell_first(f"parted/{self._key}", text)
        return ""

    def _word(self, call: str, notice: Notice | None) -> int:
        begin = 0 if notice is None else notice.word
        # With a script a round compares all that ranks have said nothing about.
        return zlib.crc32(call.encode(), begin if self._script is None else begin ^ self._course.digest)


def _pack(flags: Sequence[bool]) -> list[float]:
    return [
        float(sum(flag << place for place, flag in enumerate(flags[begin : begin + _FLAGS_OF_NUMBER])))
        for begin in range(0, len(flags), _FLAGS_OF_NUMBER)
    ]


def _any(every: Sequence[Sequence[float]], count: int) -> list[bool]:
    """Of each of so many flags that ranks have packed, whether it is set on one."""
    words = [reduce(or_, map(int, numbers)) for numbers in zip(*every, strict=True)]
    return [bool(words[i // _FLAGS_OF_NUMBER] >> i % _FLAGS_OF_NUMBER & 1) for i in range(count)]


def _differ(words: Words) -> bool:
    """True if ranks that say this cannot go on together."""
    said = {(intent, 0 if intent == Intent.NUMBER else value & _CRC_MAX) for intent, value in set(words)}
    others = {each for each in said if each[0] != Intent.UNIT}
    wants = len(others) < len(said)
    return len(others) > 1 or (wants and any(intent != Intent.PLACE for intent, _ in others))
