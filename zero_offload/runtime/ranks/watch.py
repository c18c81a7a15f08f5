"""Which rank is to blame when another waits in vain: every rank leaves its last words in the program's store.

A collective that fails says that a connection is gone, not whose fault that is. So each rank writes down where it runs,
and, when its end comes, why: its own error, that it ended, or what it waited for. A rank that waited in vain reads
what the others wrote, looks after processes of this machine, and raises one `RankError` that names the culprit. The
calls: `waiting` around every communication, `failed` where a program's error is caught. An uncaught error is found when
the interpreter exits.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from zero_offload.base import errors
from zero_offload.base.alike import Compared, difference, word_of
from zero_offload.base.ends import exit_gate
from zero_offload.base.errors import RankError, ZeroOffloadError
from zero_offload.runtime.ranks import alive
from zero_offload.runtime.ranks.alive import STOPPED_S
from zero_offload.runtime.ranks.sockets import end_device_groups, end_groups, watched_sockets

LISTEN_S = 5.0
"""How long a rank that has waited in vain waits for the last words of others."""
TOLD_S = 2
"""So long a rank that knows why all waits must end lets the others look: the store may end with a rank."""
_SOON_S = 1.0
"""The words of ranks that run have come by then."""
_LOOK_EVERY_S = 0.05
_TEXT_MAX = 2000


class RankProcess(NamedTuple):
    """A process."""

    host: str
    namespace: str
    """Process numbers mean the same inside of one."""
    pid: int

    @classmethod
    def here(cls) -> RankProcess:
        return cls(socket.gethostname(), os.readlink("/proc/self/ns/pid"), os.getpid())

    def state(self) -> str:
        """The state of the process by the system: "gone", "stopped", "running", or "" when it is on another machine."""
        here = RankProcess.here()
        if (self.host, self.namespace) != (here.host, here.namespace):
            return ""
        try:
            letter = Path(f"/proc/{self.pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return "gone"
        except OSError:
            return "running"  # as far as can be seen from here
        return {"Z": "gone", "X": "gone", "T": "stopped"}.get(letter, "running")


class StoppedProcesses:
    """Processes of this machine that do not run, and since when."""

    def __init__(self) -> None:
        self._since: dict[int, float] = {}
        self._looked = 0.0

    def among(self, places: Mapping[int, RankProcess]) -> list[int]:
        """The ranks that have been stopped for `STOPPED_S`; asked each second while this rank waits."""
        now = time.monotonic()
        if now - self._looked > STOPPED_S / 2:
            self._since = {}  # this process was stopped with them, by Ctrl-Z, and goes on first
        self._looked = now
        self._since = {rank: self._since.get(rank, now) for rank, place in places.items() if place.state() == "stopped"}
        return [rank for rank, since in self._since.items() if now - since >= STOPPED_S]


@dataclass
class Witness:
    """Knowledge about another rank."""

    rank: int
    place: RankProcess | None = None
    failed: str = ""
    """Its own error."""
    waits: str = ""
    """The call that it has waited for in vain."""
    ended: str = ""
    """How it left without an error: it ended its program, or closed the model."""
    state: str = ""
    answered: str = ""
    """The state as the process of another machine has answered."""

    @property
    def is_silent(self) -> bool:
        """True if it has left no word."""
        return not (self.failed or self.waits or self.ended)

    @property
    def is_clear(self) -> bool:
        """True if more will not be known."""
        return not self.is_silent or self.state in ("gone", "stopped")

    def look(self, place: str) -> None:
        """Ask the process itself, on another machine, at its address. For a thread."""
        self.answered = alive.state_of(place)

    def __str__(self) -> str:
        if self.place is None:
            return f"rank {self.rank}"
        return f"rank {self.rank} (process {self.place.pid} on {self.place.host})"


@dataclass
class Notice:
    """Words that travel with `together`, without a message of their own."""

    given: bool = False
    """True if this rank says it, and in the end if a rank has said it."""
    compared: list[Compared] = field(default_factory=list)
    """Facts that all ranks must have alike."""
    of_parts: list[Compared] = field(default_factory=list)
    """Facts that ranks with the same part of the model must have alike."""
    flags: list[bool] = field(default_factory=list)
    """Of this rank, and in the end those that a rank with the same part of the model has set."""

    @property
    def word(self) -> int:
        return word_of([each.word for each in self.compared]) if self.compared else 0

    def texts(self) -> dict[str, str]:
        return {name: text for each in self.compared for name, text in each.texts().items()}

    def of_column(self) -> Notice:
        """The notice for ranks with the same part of the model."""
        return replace(self, compared=[*self.compared, *self.of_parts])


class _NoStore:
    """In the place of a store where there is none, or none that answers: calls raise as those of a closed one."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("the store of the process group does not answer")


class RankWatch:
    """One rank's view of the others, for the life of the process."""

    _at_exit: ClassVar[Finalize | None] = None

    def __init__(self, members: Sequence[int]) -> None:
        """`members` are the program's ranks that work together."""
        self._others: tuple[int, ...] = ()
        self._store: Any = _NoStore()
        self._words: Any = self._store
        """A connection to the store by which this rank speaks and asks nothing: that never waits for an answer."""
        self._looks = False
        self._waits: dict[int, float] = {}
        """The beginning of each wait, by thread."""
        self._on_device: tuple[float, Callable[[], bool]] | None = None
        """When the device was last told to wait for other ranks, and whether it has done so."""
        self._places: dict[int, RankProcess] = {}
        self._stopped = StoppedProcesses()
        self._elsewhere: dict[int, str] = {}
        """The states of ranks of other machines that this one asks, and that were stopped or gone once."""
        self._over = f"zero_offload/over/{word_of((sorted(members), 0))}"
        """In the store, of these members: "yes" once one of them has waited in vain."""
        self._halted = f"zero_offload/halted/{word_of((sorted(members), 0))}"
        """In the store: "yes" while a rank is stopped or gone that another machine asks."""
        self._is_over = False
        self._heard: list[Witness] = []
        """Words of the others, as the looking thread has heard them after one had waited in vain."""
        self._ask: weakref.WeakMethod[Callable[[], str]] | None = None
        self._asks_always = False
        self._why = ""
        """The answer, once there is one: all waits end then."""
        if len(members) < 2:
            return
        self.rank = dist.get_rank()
        self._others = tuple(member for member in members if member != self.rank)
        # A connection of its own: the default group's may be gone before the last word.
        with watched_sockets(of_group=False):
            self._store, self._words = _Store(), _Store()
        self._say("at", json.dumps(RankProcess.here()))
        for kind in ("failed", "waits", "ended", "seen", "asked"):
            self._say(kind, "")
        for key in (self._over, self._halted):
            self._words.set(key, "")
        self._looks = True
        _start_looking(self)
        # At the end of the interpreter, and of multiprocessing's children, which do not run atexit's functions. Held
        # until then: a model that is gone must not take the last word with it. All watches of a rank write it to the
        # same place, so the latest is enough.
        if RankWatch._at_exit is not None:
            RankWatch._at_exit.cancel()
        RankWatch._at_exit = Finalize(None, self._say_at_exit, exitpriority=0)

    @contextlib.contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Inside is nothing but communication, for `what`. Raises RankError for whatever goes wrong there."""
        began = time.monotonic()
        thread = threading.get_ident()
        self._waits[thread] = began
        try:
            yield
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, ValueError) as error:
            # torch raises ValueError for a group that it does not know any more.
            if self._others and (isinstance(error, ValueError) or not dist.is_initialized()):
                raise _group_is_gone(what) from error
            if isinstance(error, ValueError):
                raise
            waited_s = time.monotonic() - began
            self._say("waits", what)
            self._give_up()
            raise self._explained(what, waited_s, error) from error
        finally:
            self._waits.pop(thread, None)

    def _give_up(self) -> None:
        """Have the others' waits end too, while the store is there to tell them why."""
        # The thread of commits may give up alone, while the training thread waits for a neighbour that waits for it.
        self._looks = threading.current_thread() is not threading.main_thread()
        with contextlib.suppress(RuntimeError):
            self._words.set(self._over, "yes")
        # This rank's streams wait for collectives that no rank will join, and whatever ends its model waits for them.
        end_device_groups()

    @property
    def _is_waiting(self) -> bool:
        """True if this rank, or its device, has waited for a second."""
        began = min(self._waits.copy().values(), default=None)
        if began is not None and time.monotonic() - began >= 1:
            return True
        on_device = self._on_device
        with exit_gate.inside():
            return on_device is not None and time.monotonic() - on_device[0] >= 1 and not on_device[1]()

    def goes_on_after(self, has_passed: Callable[[], bool]) -> None:
        """The device waits for other ranks in what was launched before; any thread may ask whether it goes on."""
        self._on_device = time.monotonic(), has_passed

    def look(self) -> None:
        """See whether another rank has waited in vain; while this one waits, also whether one is stopped, which no
        connection tells.

        All machines learn of it by the store, and this rank's wait ends. For a thread, each second.
        """
        if not self._looks:
            return
        try:
            for rank in self._others if not self._places else ():
                if place := _read(self._store, "at", rank):
                    self._places[rank] = RankProcess(*json.loads(place))
            if (self._is_waiting or self._asks_always) and self._asked():
                time.sleep(TOLD_S)
                end_groups()
                return
            if not self._is_over and bytes(self._store.get(self._over)) == b"yes":
                self._is_over = True
                if self._is_waiting:
                    end_groups()
                # Now, though this rank may compute for long: the store may end with the process of another rank.
                self._heard = [Witness(rank) for rank in self._others]
                _listen(self._store, self._heard)
            if not self._is_waiting:
                return
            if self._is_over or bytes(self._store.get(self._halted)) == b"yes":
                self._looks = not self._is_over
                end_groups()
                return
            found = self._stopped.among(self._places)
            for rank in found:
                self._words.set(_key("seen", rank), "stopped")
            # A connection tells so too, but not a rank that waits for its device.
            found += [rank for rank, place in self._places.items() if place.state() == "gone"]
            if found:
                end_groups()
        except RuntimeError:
            self._looks = False  # the store is gone; torch would write a trace to the log each second

    @contextlib.contextmanager
    def together(
        self, group: dist.ProcessGroup | None, members: Sequence[int], what: str, notice: Notice | None = None
    ) -> Iterator[None]:
        """Every rank's block succeeds, or every rank raises: none is left waiting for a rank that gave up.

        Inside there must be no communication. The first rank's error is raised where nothing went wrong. `members` are
        the ranks' names in the order of `group`, which is None where this rank is alone. At the end `notice` is given
        on all ranks if it was given on one. Raises ConfigError on all where they differ in what it compares.
        """
        notice = notice or Notice()
        failure: Exception | None = None
        try:
            yield
        except Exception as error:
            if group is None:
                raise
            failure = error
        if group is None:
            return
        found: list[Any] = [(None, False, 0)] * len(members)
        try:
            with self.waiting(what):
                dist.all_gather_object(found, (report_of(failure), notice.given, notice.word), group=group)
        except RankError:
            if failure is None:
                raise
        raise_first(failure, zip(members, (theirs for theirs, _, _ in found), strict=True))
        if len({word for _, _, word in found}) > 1:
            texts: list[Any] = [{}] * len(members)
            with self.waiting(what):
                dist.all_gather_object(texts, notice.texts(), group=group)
            differ = difference(what, zip(members, texts, strict=True), alone=True)
            raise differ or ZeroOffloadError(f"{what}: ranks differ")
        notice.given = any(given for _, given, _ in found)

    @contextlib.contextmanager
    def leaving(self) -> Iterator[None]:
        """Inside this rank waits for the others to close the model as well."""
        self._say("ended", "closed the model")
        yield
        self._say("ended", "")  # the program goes on, perhaps with another model

    def ask_too(self, ask: Callable[[], str], *, always: bool = False) -> None:
        """Call `ask`, a method, while this rank waits, or `always`, each second. All waits of its process groups end
        where it says why; so does a wait that fails."""
        self._ask, self._asks_always = weakref.WeakMethod(ask), always

    def _asked(self) -> str:
        ask = None if self._ask is None else self._ask()
        self._why = self._why or ("" if ask is None else ask())
        return self._why

    def add(self, key: str, text: str) -> None:
        """Leave a text for all ranks of the program, one of several under this key."""
        with contextlib.suppress(RuntimeError):
            self.tell(f"{key}/{self._store.add(f'zero_offload/{key}', 1)}", text)

    def tell_first(self, key: str, text: str) -> str:
        """Leave a text, unless a rank has left another one under this key: then that."""
        with contextlib.suppress(RuntimeError):
            return bytes(self._store.compare_set(f"zero_offload/{key}", "", text)).decode(errors="replace") or text
        return text

    def added(self, key: str) -> list[str]:
        """The texts that ranks have left under this key."""
        count = self.told(key)
        found = [self.told(f"{key}/{number}") for number in range(1, int(count or 0) + 1)]
        return [each for each in found if each]

    @property
    def is_alone(self) -> bool:
        return not self._others

    def tell(self, key: str, text: str) -> None:
        """Leave a text for all ranks of the program, which has one of this key."""
        with contextlib.suppress(RuntimeError):
            self._store.set(f"zero_offload/{key}", text)

    def told(self, key: str) -> str:
        """The text that a rank has left under this key; empty where there is none, or no store answers."""
        with contextlib.suppress(RuntimeError):
            if self._store.check([f"zero_offload/{key}"]):
                return bytes(self._store.get(f"zero_offload/{key}")).decode(errors="replace")
        return ""

    def failed(self, error: BaseException) -> None:
        """This rank ends with `error`: others that wait for it will show its text."""
        if isinstance(error, RankError):
            return
        self._say("failed", f"{type(error).__name__}: {error}"[:_TEXT_MAX])

    def _say_at_exit(self) -> None:
        # On its way out of a child's target, or where the interpreter keeps an uncaught error.
        error = sys.exc_info()[1] or getattr(sys, "last_value", None)
        if isinstance(error, SystemExit):
            error = error.__context__  # torch's spawn turns an error into an exit
        if error is None:
            self._say("ended", "ended its program")
        else:
            self.failed(error)

    def _say(self, kind: str, text: str) -> None:
        # Setting does not wait for an answer; a store that is gone is expected: this rank is ending.
        with contextlib.suppress(RuntimeError):
            self._words.set(_key(kind, self.rank), text)

    # Other machines

    def ask_machines(self, machines: Sequence[Sequence[int]]) -> None:
        """Have processes of other machines asked whether they run. All ranks call it, with the ranks of each machine.

        The first rank of a machine asks those of the next one and of the one before: one of two may be late itself. All
        ask the first of all, which may have the store: if it is stopped, no other could tell them.
        """
        if len(machines) < 2:
            return
        self._say("asked", alive.address())
        firsts = [ranks[0] for ranks in machines]
        if self.rank in firsts:
            at = firsts.index(self.rank)
            for rank in {firsts[at - 1], firsts[(at + 1) % len(firsts)], firsts[0]} - {self.rank}:
                store, mine = _Store(), weakref.ref(self)
                threading.Thread(
                    target=_ask, args=(mine, store, rank), name=f"zero_offload-ask-{rank}", daemon=True
                ).start()

    def hear_of(self, rank: int, store: Any, state: str) -> None:
        """The state of a rank of another machine; for the thread that asks it, which has this `store`."""
        if state == "gone" and _read(store, "ended", rank):
            return
        if state or rank in self._elsewhere:
            self._elsewhere[rank] = state
            store.set(_key("seen", rank), state)
            store.set(self._halted, "yes" if state else "")
        if state and self._is_waiting:
            end_groups()

    # Looking for the culprit

    def _explained(self, what: str, waited_s: float, error: Exception) -> ZeroOffloadError:
        """The error to raise for a wait that has failed."""
        witnesses = [Witness(rank) for rank in self._others]
        store, known = self._store, list[str]()

        def listen() -> None:
            if text := self._asked():
                known.append(text)
            else:
                _listen(store, witnesses)

        if not _in_time(listen, LISTEN_S + 1):
            self._store = _NoStore()  # the thread that asked it holds its lock, and exit must not wait for that
            found = (
                f"the store of the process group{_address()} does not answer: its machine or the network to it is "
                "down, or the process that had it has ended (torchrun, or rank 0). The cause is not known here: look "
                "there first"
            )
            # It may have ended with the process of a rank.
            elsewhere = [Witness(rank, self._places.get(rank), state=state) for rank, state in self._elsewhere.items()]
            if any(each.place for each in self._heard):
                found = _verdict(self._heard, what, is_broken=True)
            elif found_so := [each for each in elsewhere if each.state]:
                found = _verdict(found_so, what, is_broken=True)
        elif known:
            return ZeroOffloadError(known[0])
        else:
            found = _verdict(witnesses, what, is_broken=waited_s < time_limit().total_seconds())
        return RankError(
            f"{found}. Rank {self.rank} had waited {waited_s:.1f} s in {what} ({_first_line(error)}). Start all ranks "
            "again when the cause is gone; existing='resume' goes on from the last commit"
        )


_looking: weakref.WeakSet[RankWatch] = weakref.WeakSet()


def _start_looking(watch: RankWatch) -> None:
    """Have one thread of this process look for all of its watches."""
    is_first = not _looking
    _looking.add(watch)
    if is_first:
        threading.Thread(target=_look_each_second, name="zero_offload-look", daemon=True).start()


def _look_each_second() -> None:
    while _looking:
        for watch in list(_looking):
            watch.look()
        time.sleep(1)


def _ask(watch: weakref.ref[RankWatch], store: Any, rank: int) -> None:
    """Ask a rank of another machine whether it runs, and have the watch hear of it."""
    with contextlib.suppress(RuntimeError):
        deadline = time.monotonic() + time_limit().total_seconds()
        while not (place := _read(store, "asked", rank)):
            if watch() is None or time.monotonic() > deadline:
                return
            time.sleep(alive.EACH_S)
        for state in alive.states_of(place):
            if (held := watch()) is None:
                return
            held.hear_of(rank, store, state)
            del held


class _Store:
    """A connection of its own to the program's store, for all threads."""

    def __init__(self) -> None:
        with watched_sockets(of_group=False):
            self._store = distributed_c10d._get_default_store().clone()  # type: ignore[attr-defined]

    def __getattr__(self, name: str) -> Callable[..., Any]:
        call = getattr(self._store, name)

        def gated(*args: Any) -> Any:
            with exit_gate.inside():
                return call(*args)

        return gated


ErrorReport = tuple[str, str] | None
"""An error, as other ranks learn of it: its class and its text."""


def report_of(failure: Exception | None) -> ErrorReport:
    return None if failure is None else (type(failure).__name__, str(failure))


def raise_first(mine: Exception | None, every: Iterable[tuple[int, ErrorReport]]) -> None:
    """Raise this rank's own error, or else that of the first rank that has one."""
    if mine is not None:
        raise mine
    for rank, theirs in sorted(every, key=lambda each: each[0]):
        if theirs is not None:
            raise _error_class(theirs[0])(f"rank {rank}: {theirs[1]}")


def _error_class(name: str) -> type[ZeroOffloadError]:
    found = getattr(errors, name, None)
    return found if isinstance(found, type) and issubclass(found, ZeroOffloadError) else ZeroOffloadError


def _listen(store: Any, witnesses: Sequence[Witness]) -> None:
    """Fill in what the others have said, until all is clear, time is up, or the store ends after it was heard once."""
    began, has_heard, has_looked = time.monotonic(), False, False
    while True:
        try:
            for witness in witnesses:
                _hear(store, witness)
            if not has_looked and time.monotonic() > began + _SOON_S:
                has_looked = True
                for witness in witnesses:
                    if witness.is_silent and not witness.state and (place := _read(store, "asked", witness.rank)):
                        threading.Thread(target=witness.look, args=(place,), daemon=True).start()
        except RuntimeError:
            if has_heard:
                return
            raise
        has_heard = True
        if all(witness.is_clear for witness in witnesses) or time.monotonic() > began + LISTEN_S:
            return
        time.sleep(_LOOK_EVERY_S)


def _hear(store: Any, witness: Witness) -> None:
    def read(kind: str) -> str:
        return _read(store, kind, witness.rank)

    if witness.place is None and (place := read("at")):
        witness.place = RankProcess(*json.loads(place))
    # In this order: a process that is gone has said all it had to say.
    witness.state = "" if witness.place is None else witness.place.state() or read("seen") or witness.answered
    witness.failed, witness.waits, witness.ended = read("failed"), read("waits"), read("ended")


def _read(store: Any, kind: str, rank: int) -> str:
    key = _key(kind, rank)
    return bytes(store.get(key)).decode(errors="replace") if store.check([key]) else ""


def _key(kind: str, rank: int) -> str:
    return f"zero_offload/{kind}/{rank}"


def _group_is_gone(what: str) -> ZeroOffloadError:
    return ZeroOffloadError(
        f"{what}: torch.distributed.destroy_process_group was called before zo.close(model), and ranks reach each "
        "other no more. Call zo.close on all ranks first: it makes the last step a generation. The last generation is "
        "whole; existing='resume' goes on from there"
    )


def _verdict(witnesses: Sequence[Witness], what: str, *, is_broken: bool) -> str:
    """The first cause that explains the others; `is_broken`: a connection ended before its time was up."""
    if failed := [each for each in witnesses if each.failed]:
        texts = "; ".join(f"{each} has failed: {each.failed}" for each in failed)
        return f"{texts}. This is the cause, and the error here only follows from it"
    if gone := [each for each in witnesses if each.state == "gone" and not each.ended and not each.waits]:
        return (
            f"{_names(gone)} died without a last word: killed (out of memory? see dmesg), or ended by a crash or "
            "os._exit. Its own output is the place to look; the error here only follows from it"
        )
    # A rank that closes its model waits for the others there.
    if ended := [each for each in witnesses if each.ended and each.waits != what]:
        return (
            f"{_names(ended)} {ended[0].ended} before the others, without an uncaught error: has it less data? "
            "All ranks must do the same number of steps"
        )
    silent = [each for each in witnesses if each.is_silent]
    stopped = [each for each in silent if each.state == "stopped"]
    if not stopped and (away := [each for each in silent if is_broken and not each.state]):
        # A rank that is only late keeps its connection.
        return (
            f"the connection to {_names(away)} ended, without a last word: killed (out of memory? see dmesg there), or "
            "its machine or the network is down. Its own output is the place to look; a longer timeout= does not help"
        )
    if stopped:
        return (
            f"{_names(stopped)} did not come to {what} and does not answer (stopped). Ctrl-Z, SIGSTOP and a frozen "
            "container do that. End the process before you start again"
        )
    if silent:
        states = ", ".join(each.state or "on another machine" for each in silent)
        return (
            f"{_names(silent)} did not come to {what} and does not answer ({states}). See where it is with "
            "'py-spy dump --pid PROCESS'; if it only needs longer, give torch.distributed.init_process_group a "
            "longer timeout="
        )
    waits = ", ".join(f"{each} in {each.waits}" for each in witnesses)
    return (
        f"no rank has failed, but they wait for different things or cannot reach each other: {waits}. All ranks must "
        "use the same modules in the same order"
    )


def _names(witnesses: Sequence[Witness]) -> str:
    return " and ".join(map(str, witnesses))


def _first_line(error: Exception) -> str:
    """The transport's own words, without its source file and its advice."""
    return str(error).strip().split("\n")[0].split("] ", 1)[-1].split(". ")[0]


def _address() -> str:
    address = os.environ.get("MASTER_ADDR", "")
    return f" on {address}" if address else ""


def _in_time(job: Callable[[], object], limit_s: float) -> bool:
    """Run `job` on a thread of its own: what waits for a process that hangs would never return."""
    done = threading.Event()

    def run() -> None:
        with contextlib.suppress(RuntimeError):
            job()
            done.set()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(limit_s)
    return done.is_set()


def time_limit(group: dist.ProcessGroup | None = None) -> timedelta:
    """How long a rank waits for others in `group`, by default that of all ranks."""
    group = group or distributed_c10d._get_default_group()
    on_cpu = torch.device("cpu")
    device = on_cpu if on_cpu in group._device_types else group._device_types[0]
    limit: timedelta = group._get_backend(device).options._timeout
    return limit
