"""How many iterations of a program are in the states, and whether the last one is over.

Owns the one count that generations, `zo.resume`, `zo.stats` and `zo.RunLog` show. A step of a program's one optimizer
is an iteration. A program with several ends an iteration by `zo.commit` or by `RunLog.step`. Moves nothing, and depends
on calls alone, so that ranks count alike. The calls: `start` with states from files, `add_optimizer` where one is
built, `note_step` per step, `end` and `end_row` where the program ends an iteration.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from weakref import WeakKeyDictionary

from zero_offload.base.errors import ConfigError
from zero_offload.checkpoint.format import ENDED_BY_COMMIT, ENDED_BY_ROW, ENDED_BY_STEP, UNENDED
from zero_offload.standins.sources import Trainer

_UNENDED_MAX = 16
"""After so many steps without an end one is not expected any more. Rules that step a critic often take fewer."""


class Iterations:
    """The iterations of one model; used by the control thread."""

    def __init__(self) -> None:
        self.ended_by = ENDED_BY_STEP
        """By what this program ends an iteration, as far as it has shown."""
        self._base = 0
        """The count at the last end."""
        self._steps: Counter[int] = Counter()
        """Steps since then, by the optimizer's number, in the order of their first steps."""
        self._row_base = self._row_steps = 0
        """The count at the last row of a log, and steps of all optimizers since."""
        self._numbers: WeakKeyDictionary[Trainer, int] = WeakKeyDictionary()
        self._num_built = 0
        self._trainers: dict[str, int] = {}
        """The optimizer of each parameter, by number: the one built last. A dropped optimizer counts until others have
        its parameters, since ranks need not collect it at the same time."""
        self._num_trainers = 0
        """So many of them; each step asks several times."""
        self._latest = 0
        """The optimizer that stepped last."""
        self._stepped: set[int] = set()
        self._takes_turns = False
        """True if optimizers step in turns over the same parameters."""

    def start(self, count: int) -> None:
        """The states have so many whole iterations."""
        self._base = self._row_base = count
        self._steps.clear()
        self._row_steps = 0

    @property
    def count(self) -> int:
        """Iterations in the states, with the begun one. Of several optimizers in a program that ends none it is a
        guess, which no generation has: the most steps of one optimizer."""
        if self._is_by_step:
            return self._base + self._steps.total()
        begun = max(self._steps.values(), default=0)
        return self._base + (begun if self.ended_by == ENDED_BY_STEP else min(begun, 1))

    @property
    def shown_by(self) -> str:
        """For records: `ended_by`, or that `count` is a guess."""
        return self.ended_by if self.is_over or self.ended_by != ENDED_BY_STEP else UNENDED

    @property
    def is_over(self) -> bool:
        """True if the last iteration has ended: a generation may be made of it."""
        return self._is_by_step or not self._steps

    @property
    def _is_by_step(self) -> bool:
        return self.ended_by == ENDED_BY_STEP and self.num_optimizers < 2

    @property
    def num_optimizers(self) -> int:
        return self._num_trainers + self._takes_turns

    @property
    def is_unended(self) -> bool:
        """True if several optimizers step, the first of them has begun another turn, and nothing ended an iteration."""
        if self.ended_by != ENDED_BY_STEP or self.is_over:
            return False
        begins_again = len(self._steps) > 1 and self._latest == next(iter(self._steps))
        return begins_again or self._steps.total() > _UNENDED_MAX

    def add_optimizer(self, optimizer: Trainer, names: Iterable[str]) -> None:
        """It trains these parameters from now on."""
        count, was_by_step = self.count, self._is_by_step
        number = self._numbers.setdefault(optimizer, self._num_built)
        self._num_built += number == self._num_built
        self._trainers.update(dict.fromkeys(names, number))
        self._num_trainers = len(set(self._trainers.values()))
        # The first step of all may be the first one of an iteration, whose second optimizer is built behind it.
        if self._is_by_step != was_by_step and self._steps.total() > 1:
            self._base = count
            self._steps.clear()

    def change_names(self, gone: Collection[str], names: Mapping[str, tuple[str, ...]]) -> None:
        """The model has lost some parameters, and has others under the first of new names."""
        kept = {name: number for name, number in self._trainers.items() if name not in gone}
        self._trainers = {names.get(name, (name,))[0]: number for name, number in kept.items()}
        self._num_trainers = len(set(self._trainers.values()))

    def note_step(self, optimizer: Trainer, names: Iterable[str]) -> None:
        """It steps, over these parameters."""
        number = self._numbers.get(optimizer)
        if number is None or number not in self._trainers.values():
            self._takes_turns = self._takes_turns or number in self._stepped
            self.add_optimizer(optimizer, names)
            number = self._numbers[optimizer]
        self._steps[number] += 1
        self._latest = number
        self._stepped.add(number)
        self._row_steps += 1

    def end(self, *, is_frozen: bool = False) -> None:
        """The program ends an iteration by `zo.commit`; nothing changes where it has ended already, and steps of one
        optimizer each are one. A frozen model has no steps, and each call ends one."""
        if is_frozen:
            self._base += 1
        if not self._is_by_step:
            self._end(ENDED_BY_COMMIT, self._base + 1)

    def begin_rows(self) -> None:
        """A log begins: its rows count from here."""
        self._row_base, self._row_steps = self.count if self._is_by_step else self._base, 0

    def end_row(self, num_iterations: int) -> None:
        """The program has written a row that stands for so many iterations. Steps of one optimizer each are one."""
        if not self._is_by_step:
            whole = self._row_base + num_iterations if 1 < num_iterations <= self._row_steps else 0
            by = self.ended_by if self.ended_by == ENDED_BY_COMMIT else ENDED_BY_ROW
            self._end(by, max(self._base + 1, whole))
        self.begin_rows()

    def _end(self, by: str, count: int) -> None:
        if self._steps:
            self._base = count
            self._steps.clear()
        self.ended_by = by


def check_count(call: str, uncounted: str, step: int | None = None) -> None:
    """Raise where it is not known how many iterations the states have, and the program does not say so by `step`."""
    if uncounted and step is None:
        raise ConfigError(
            f"{call}: {uncounted}. Say how many iterations it has: zo.resume(model, optimizer, step=N), or step=N of "
            "zo.load_checkpoint. Or start over with OffloadConfig(existing='discard')"
        )
