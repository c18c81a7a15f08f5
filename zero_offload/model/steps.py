"""`zo.steps`: the iterations of a training loop, which goes on where it was and ends when it is asked to.

Owns the order of a loop around the program's own body: resume, batch, body, commit, and the end by a signal. Never
computes. Each step is committed when the program asks for the next one. Its record has the place of the batch that it
used.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import nn

from zero_offload.base.errors import ConfigError
from zero_offload.base.host import host_tensor
from zero_offload.base.inputs import check_optimizer
from zero_offload.base.problems import list_problems
from zero_offload.base.types import parse_seconds
from zero_offload.model.api import close, need_runtime
from zero_offload.model.checkpoints import Resumed, check_keeps, keep, own_of, resume
from zero_offload.model.feed import Feed
from zero_offload.model.members import Also, members_of
from zero_offload.model.runtime import ModelRuntime
from zero_offload.optim.grad_scaler import GradScaler
from zero_offload.optim.param_groups import group_records, restore_groups
from zero_offload.runtime.stop import EXIT_CODE, GRACE_S, StoppedBySignal, StopRequest, complain, requested_stop

_CALL = "zo.steps"
_KEY = "zo.steps"
"""Of the loop's record in `extra`."""


def steps(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    total: int,
    *,
    loader: Iterable[Any] | None = None,
    scheduler: Any = None,
    scaler: GradScaler | None = None,
    accumulate: int = 1,
    also: Also = (),
    exit_code: int = EXIT_CODE,
    grace: float | str = GRACE_S,
) -> Iterator[Any]:
    """The steps of a training loop, up to number `total`: a run that was killed goes on with the batch that is next.

        for step, batch in zo.steps(model, optimizer, 1000, loader=loader, scheduler=scheduler):
            loss = model(batch).mean()
            loss.backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()

    The call resumes, as `zo.resume` does; `OffloadConfig(existing="resume")` says that it may. Steps are numbered from
    1. Each is committed, as by `zo.commit`, when the loop asks for the next one: the body calls neither. After a
    `break` or an exception the step under way is not kept, and the next start makes it again. Behind the loop call
    `zo.close`.

    `optimizer`: one, or a list of those that train this model. `scheduler`: one object or a list; anything with
    `state_dict` and `load_state_dict` is kept. `scaler` and `also` are as in `zo.resume` and `zo.commit`. Without
    `loader` the loop gives the step's number alone.

    `loader` begins again at its end, as often as steps need. With `accumulate=n` a batch is a list of n. A loader that
    has a state (torchdata's `StatefulDataLoader`, accelerate's) goes on by that. Of any other iterable batches are
    counted. The order of an epoch then follows from a seed and the epoch's number, and `set_epoch` is called. A torch
    `DataLoader` does not read the data of batches that are done. Another iterable is read from the epoch's beginning.

    A SIGTERM or SIGUSR1 on any rank ends the program on all ranks, behind the commit of the same step. Models are
    closed, and SystemExit is raised with `exit_code`. `grace`, in seconds or as in "2min", is how long the step may
    take after the signal. Then all ranks end at once with this code, and the last generation stands. A second signal
    ends its rank at once. Signals are caught while the loop runs, in the main thread.

    Raises ConfigError for arguments that cannot be used, and what `zo.resume` and `zo.commit` raise.
    """
    return _Loop(model, optimizer, total, also, (scaler, scheduler), (loader, accumulate), (exit_code, grace)).run()


class _Loop:
    """One call of `steps`."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any,
        total: int,
        also: Also,
        kept: tuple[GradScaler | None, Any],
        data: tuple[Iterable[Any] | None, int],
        end: tuple[int, float | str],
    ) -> None:
        """`kept`: the scaler and schedulers; `data`: the loader and the batches of a step; `end`: the exit code and the
        grace period."""
        (scaler, schedulers), (loader, accumulate) = kept, data
        self._model, self._also, self._total = model, list(also) if isinstance(also, Iterable) else also, total
        self._owner = owner = need_runtime(model, _CALL)
        with owner.together(_CALL):
            self._exit_code, self._grace_s = check_end(_CALL, *end, [*_problems_of_numbers(total, accumulate)])
            self._optimizers = _check_optimizers(optimizer)
            self._schedulers = _check_schedulers(schedulers)
            self._members = members_of(_CALL, model, self._optimizers[0], self._also)
            if loader is None and accumulate > 1:
                raise ConfigError(
                    f"{_CALL}(accumulate={accumulate}) needs loader=, of whose batches a step takes so many"
                )
            self._feed = None if loader is None else Feed(_CALL, loader, accumulate, owner.ranks.world_size)
        self._done = 0
        resumed = resume(model, self._optimizers[0], scaler, also=self._also)
        with owner.together(_CALL):
            if resumed is not None:
                self._restore(resumed)
                self._say_where(resumed)
            elif owner.step_count:
                raise ConfigError(
                    f"{_CALL} begins with step 1, and this model is at step {owner.step_count}. Call it before the "
                    "first step, and once; a checkpoint that was loaded goes on by zo.resume and zo.commit"
                )
        if owner.makes_generations:  # else the first commit warns
            # An exception in the first step must not leave a generation without the loop's record.
            owner.note_completes()

    def _restore(self, resumed: Resumed) -> None:
        found = resumed.extra.get(_KEY) if isinstance(resumed.extra, dict) else None
        where = f"{_CALL}: generation {resumed.number} of step {resumed.step}"
        if found is None:
            if self._feed is not None or self._schedulers or len(self._optimizers) > 1:
                raise ConfigError(
                    f"{where} was not committed by zo.steps, so it does not say where the data and schedulers were. Go "
                    "on by zo.resume and zo.commit, or begin anew with OffloadConfig(existing='discard')"
                )
            self._done = resumed.step
            return
        here = {
            "optimizers": len(self._optimizers) - 1,
            "schedulers": len(self._schedulers),
            "loader": int(self._feed is not None),
        }
        there = {
            "optimizers": len(found["optimizers"]),
            "schedulers": len(found["schedulers"]),
            "loader": int(found["data"] is not None),
        }
        if differ := [name for name in here if here[name] != there[name]]:
            raise ConfigError(
                f"{where} was committed with {_counted(there, differ)}, and now there are {_counted(here, differ)}. "
                "Give those of before, or begin anew with OffloadConfig(existing='discard')"
            )
        self._done = found["step"]
        for optimizer, groups in zip(self._optimizers[1:], found["optimizers"], strict=True):
            restore_groups(optimizer, groups, where)
        for scheduler, state in zip(self._schedulers, found["schedulers"], strict=True):
            scheduler.load_state_dict(state)
        if self._feed is not None:
            self._feed.restore(found["data"], own_of(self._owner))

    def _say_where(self, resumed: Resumed) -> None:
        if self._owner.ranks.rank != 0:
            return
        data = "" if self._feed is None else f", {self._feed}"
        goes_on = f"goes on with step {self._done + 1}" if self._done < self._total else "has no further step"
        complain(
            f"{_CALL} {goes_on} of {self._total}, from generation {resumed.number} of step {resumed.step}, committed "
            f"{resumed.committed_at}{data}"
        )

    # The loop

    def run(self) -> Iterator[Any]:
        with stopping_of(self._owner, self._exit_code, self._grace_s) as stop:
            try:
                while self._done < self._total:
                    step = self._done + 1
                    stop.doing = f"step {step}"
                    if self._feed is None:
                        yield step
                    else:
                        yield step, self._batch(step, stop)
                    self._done = step
                    self._commit(stop)
                    if stop.agreed:
                        end_stopped(stop, [each.model for each in self._members], step)
            finally:
                if self._feed is not None:
                    self._feed.close()

    def _batch(self, step: int, stop: StopRequest) -> Any:
        assert self._feed is not None
        try:
            return self._feed.next_batch(step)
        except (RuntimeError, OSError, EOFError):
            if not stop.requested:
                raise
        # The launcher's signal has ended the loader's workers. Other ranks may be in this step already.
        return self._feed.next_batch(step, again=True)

    def _commit(self, stop: StopRequest) -> None:
        """Let the step become the next generation, and learn whether a rank was asked to stop."""
        for each in self._optimizers[1:]:
            check_keeps(_CALL, each, self._owner)
        said = {
            "step": self._done,
            "optimizers": [group_records(each) for each in self._optimizers[1:]],
            "schedulers": [each.state_dict() for each in self._schedulers],
            "data": None if self._feed is None else self._feed.place,
        }
        own = None if self._feed is None else self._feed.own()
        with stop.agreeing() as notice:
            keep(_CALL, self._model, self._optimizers[0], {_KEY: said}, self._also, own, notice)


@contextmanager
def stopping_of(owner: ModelRuntime, exit_code: int, grace_s: float) -> Iterator[StopRequest]:
    """As `requested_stop`, for the ranks of a model, which all come here."""
    drawn = owner.collectives.of_first(host_tensor(secrets.randbits(60), torch.int64), "a loop", is_part=False)
    token = f"{int(drawn):x}"
    with requested_stop(watch=owner.ranks.watch, token=token, exit_code=exit_code, grace_s=grace_s) as stop:
        yield stop


def end_stopped(stop: StopRequest, models: Sequence[nn.Module], step: int) -> NoReturn:
    """End the program behind the commit of `step`, as all its ranks do. The first model leads."""
    owner = need_runtime(models[0], _CALL)
    for each in models:
        close(each)
    if owner.ranks.rank == 0:
        kept = (
            f"step {step} is committed, and the same command goes on with step {step + 1}"
            if owner.makes_generations
            else f"nothing is kept of {step} steps (no directory for generations, or durability='scratch')"
        )
        ends = "all ranks end" if owner.ranks.world_size > 1 else "the program ends"
        complain(f"stopped by {stop.by} after step {step}: {kept}; {ends} with exit code {stop.exit_code}")
    raise StoppedBySignal(stop.exit_code, stop.by)


def check_end(call: str, exit_code: Any, grace: Any, others: Sequence[str] = ()) -> tuple[int, float]:
    """The exit code of a program that is asked to stop, and the grace period in seconds. `others`: problems of the
    call's other arguments, to be raised together."""
    problems = [*others, *_problems_of_end(exit_code, grace)]
    if problems:
        raise ConfigError(list_problems(f"{call} has", problems))
    return exit_code, parse_seconds(grace) if isinstance(grace, str) else float(grace)


def _problems_of_end(exit_code: Any, grace: Any) -> Iterator[str]:
    if isinstance(exit_code, bool) or not isinstance(exit_code, int) or not 0 <= exit_code <= 255:
        yield f"exit_code={exit_code!r}: give a whole number from 0 to 255"
    if isinstance(grace, str):
        try:
            parse_seconds(grace)
        except ConfigError as error:
            yield f"grace: {error}"
    elif isinstance(grace, bool) or not isinstance(grace, int | float) or not grace > 0:
        yield f"grace={grace!r}: give seconds above 0, or a duration such as '2min'"


def _problems_of_numbers(total: Any, accumulate: Any) -> Iterator[str]:
    for name, value, least in (("total", total, 0), ("accumulate", accumulate, 1)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            yield f"{name}={value!r}: give a whole number from {least} up"


def _check_optimizers(optimizer: Any) -> list[torch.optim.Optimizer]:
    given = list(optimizer) if isinstance(optimizer, list | tuple) else [optimizer]
    if not given:
        raise ConfigError(f"{_CALL} takes the optimizer after the model, or a list of those that train it; got none")
    return [check_optimizer(_CALL, each) for each in given]


def _check_schedulers(schedulers: Any) -> list[Any]:
    given = [] if schedulers is None else list(schedulers) if isinstance(schedulers, list | tuple) else [schedulers]
    for each in given:
        if not all(callable(getattr(each, name, None)) for name in ("state_dict", "load_state_dict")):
            raise ConfigError(
                f"{_CALL}(scheduler=...) takes objects with state_dict and load_state_dict; a {type(each).__name__} "
                "has not both"
            )
    return given


def _counted(numbers: dict[str, int], names: Sequence[str]) -> str:
    return ", ".join(f"{numbers[name]} {name if name != 'optimizers' else 'further optimizers'}" for name in names)
