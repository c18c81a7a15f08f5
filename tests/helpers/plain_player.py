"""A player of scripts on plain tensors: one `MasterParam` per parameter, and nothing moves."""

from __future__ import annotations

import math
import weakref
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import zero_offload as zo
from tests.helpers.models import build
from tests.helpers.reference import MasterParam, RoundedParam, WholeParam, clip_factor, global_norm
from tests.helpers.schedules import DTYPES, FIRST_LR, Player, Script, ScriptedLM, digests

KINDS = {torch.float32: WholeParam, torch.bfloat16: MasterParam, torch.float16: RoundedParam}


@dataclass(frozen=True)
class State:
    """A copy of everything that training goes on from."""

    values: dict[str, Tensor]
    """Masters; of what is frozen, values."""
    moments: dict[str, tuple[Tensor, Tensor]]
    num_updates: dict[str, int]
    num_steps: int
    lr: float
    rng: Tensor | None = None
    extra: int | None = None


@dataclass
class Keeper:
    """Which states a run directory holds: those of the last step that was due, or that closing found.

    The rule, from what has happened to the states since a generation had them, oldest first ("update", "step",
    "commit", "written", "states", "load"). They are a step's from its end until something else happens, and parameters
    that the program writes meanwhile are a part of it. States that the program replaces, or writes when no step waits,
    are no step's before `commit` says so. An update makes them the next step's.
    """

    commit_every: int
    keeps: bool
    generation: State | None = None
    happened: list[str] = field(default_factory=list)
    known: dict[str, Any] = field(default_factory=dict)
    """Of the last step or commit that happened."""
    due: bool = False
    completes: bool = False
    checkpoints: dict[int, State] = field(default_factory=dict)

    def note(self, event: str, **known: Any) -> None:
        """Events after an update or a load owe nothing to those before."""
        if event in ("update", "load"):
            self.happened.clear()
        self.happened.append(event)
        self.known = known or self.known

    @property
    def has_step(self) -> bool:
        """Whether a step is there that no generation has."""
        return "step" in self.happened or "commit" in self.happened

    @property
    def is_whole(self) -> bool:
        """Whether all states are those of the newest step or generation."""
        parts = {"update", "step", "commit"}
        at = max((index for index, event in enumerate(self.happened) if event in parts), default=-1)
        is_waiting = at >= 0 and self.happened[at] != "update"
        return set(self.happened[at + 1 :]) <= ({"written"} if is_waiting else set())


class Plain(Player):
    """The reference."""

    def __init__(self, dim: int, config: zo.OffloadConfig, stream: int = 0) -> None:
        super().__init__(stream, in_backward=config.overlap == "backward")
        self._dim, self._dtype = dim, DTYPES[config.numerics.compute]
        self._keeper = Keeper(config.commit_every, config.effective_durability.value != "scratch")
        self._start()

    def _start(self) -> None:
        with torch.random.fork_rng():
            self.model = build(partial(ScriptedLM, self._dim))
        self._masters: dict[str, MasterParam] = {}
        news = self._news = set[str]()
        """Parameters that have had gradients since the last call of `step`."""
        for name, param in self.model.named_parameters():
            if param.requires_grad:
                master = self._masters[name] = KINDS[self._dtype](param)
                # Weak: a hook that holds its own parameter keeps it for ever, and there are thousands of scripts.
                take_grad = weakref.WeakMethod(master.take_grad)
                param.register_post_accumulate_grad_hook(lambda _, take_grad=take_grad: take_grad()())
                param.register_post_accumulate_grad_hook(lambda _, name=name: news.add(name))
            else:
                param.data = param.data.to(self._dtype)
        self._num_steps, self._factor, self._lr, self._broken = 0, 1.0, FIRST_LR, False

    def _grads(self) -> dict[str, Tensor]:
        return {name: master.grad for name, master in self._masters.items() if master.grad is not None}

    def _before_use(self) -> None:
        if self._broken:
            self.zero_grad()

    def _left_broken(self) -> None:
        self._broken = True

    def no_sync(self) -> AbstractContextManager[None]:
        return nullcontext()

    def clip(self, max_norm: float) -> list[Any]:
        self._before_use()
        grads = self._grads()
        norm = global_norm(self.model, grads) * self._factor
        if grads and math.isfinite(norm):
            self._factor *= clip_factor(norm, max_norm)
            self._clipped = self._factor != 1.0
        return [torch.tensor(norm).item()]

    def step(self) -> list[Any]:
        self._live.clear()
        if not self._updated:
            self._commit_due()
            self._before_use()
        if self._updated or self._grads():
            self._num_steps += 1
            self._update()
            self._updated = False
            keeper = self._keeper
            keeper.note("step", lr=self._lr, num_steps=self._num_steps)
            keeper.due = keeper.due or self._num_steps % keeper.commit_every == 0
        self._news.clear()
        self._drop()
        return []

    def _update(self) -> None:
        if all(grad.isfinite().all() for grad in self._grads().values()):
            self._keeper.note("update")
            for master in self._masters.values():
                master.update(self._lr, self._factor)

    def _update_in_backward(self) -> None:
        self._commit_due()
        self._update()
        self._drop()

    def zero_grad(self) -> list[Any]:
        self._drop()
        self._broken = False
        return []

    def _drop(self) -> None:
        for master in self._masters.values():
            master.grad = None
        self._factor, self._clipped = 1.0, False

    def set_lr(self, lr: float) -> list[Any]:
        self._lr = lr
        return []

    # Generations and checkpoints

    def _state(self, **known: Any) -> State:
        return State(
            values={name: self._value(name, param) for name, param in self.model.named_parameters()},
            moments={name: (each.exp_avg.clone(), each.exp_avg_sq.clone()) for name, each in self._masters.items()},
            num_updates={name: each.num_updates for name, each in self._masters.items()},
            **({"num_steps": self._num_steps, "lr": self._lr} | known),
        )

    def _value(self, name: str, param: nn.Parameter) -> Tensor:
        return self._masters[name].master() if name in self._masters else param.detach().clone()

    def _restore(self, state: State) -> list[Any]:
        for name, param in self.model.named_parameters():
            self._set(name, param, state.values[name])
        for name, master in self._masters.items():
            master.exp_avg, master.exp_avg_sq = (moment.clone() for moment in state.moments[name])
            master.num_updates = state.num_updates[name]
        self._num_steps, self._lr = state.num_steps, state.lr
        if state.rng is not None:
            torch.set_rng_state(state.rng)
        self._drop()
        self._live.clear()
        self._updated = False
        return [state.num_steps, state.extra, state.lr]

    def _set(self, name: str, param: nn.Parameter, values: Tensor) -> None:
        if name in self._masters:
            self._masters[name].set_master(values.float())
        else:
            param.data.copy_(values)

    def _commit_due(self) -> None:
        if self._keeper.due and self._keeper.is_whole:
            self._commit_latest()

    def _commit_latest(self) -> None:
        keeper = self._keeper
        keeper.due = False
        if keeper.has_step and keeper.keeps:
            keeper.generation = self._state(**keeper.known)
        keeper.happened.clear()

    def commit(self, extra: int) -> list[Any]:
        keeper = self._keeper
        keeper.completes = True
        if not keeper.has_step and self._news and keeper.is_whole:
            return []  # on the way to the next step
        if not keeper.has_step:
            keeper.due = keeper.due or "load" in keeper.happened or self._num_steps % keeper.commit_every == 0
        rng = torch.get_rng_state()
        keeper.note("commit", lr=self._lr, num_steps=self._num_steps, rng=rng, extra=extra)
        self._commit_due()
        return []

    def reopen(self) -> list[Any]:
        keeper = self._keeper
        if not keeper.keeps:
            return []
        if not keeper.is_whole or (keeper.completes and "rng" not in keeper.known):
            keeper.happened.clear()
        self._commit_latest()
        keeper.completes = False
        self._live.clear()
        self._clipped = False
        self._start()
        return ["nothing"] if keeper.generation is None else self._restore(keeper.generation)

    def save(self, slot: int) -> list[Any]:
        if slot not in self._keeper.checkpoints:
            self._keeper.checkpoints[slot] = self._state(rng=torch.get_rng_state(), extra=slot)
        return []

    def load(self, slot: int) -> list[Any]:
        if slot not in self._keeper.checkpoints:
            return []
        found = self._restore(self._keeper.checkpoints[slot])
        self._keeper.note("load")
        self._keeper.due = False
        return found

    def restart(self, dtype: str | None) -> list[Any]:
        exported = {name: self._exported(name, param, dtype) for name, param in self.model.named_parameters()}
        self._keeper = Keeper(self._keeper.commit_every, self._keeper.keeps, checkpoints=self._keeper.checkpoints)
        self._live.clear()
        self._clipped = False
        self._start()
        for name, param in self.model.named_parameters():
            self._set(name, param, exported[name])
        return digests(exported)

    def _exported(self, name: str, param: nn.Parameter, dtype: str | None) -> Tensor:
        # In the compute dtype: what forward uses. torch rounds a master half-way between two bf16 numbers differently.
        same = dtype is None or DTYPES[dtype] is self._dtype
        return param.detach().clone() if same else self._value(name, param).to(DTYPES[dtype])

    # Values

    def _in(self, part: str) -> dict[str, nn.Parameter]:
        return {name: param for name, param in self.model.named_parameters() if name.startswith(part + ".")}

    def read(self, kind: str, part: str) -> list[Any]:
        if kind == "grads":
            return digests({name: g * self._factor for name, g in self._grads().items() if name in self._in(part)})
        values = {name: p if kind == "params" else self._value(name, p) for name, p in self._in(part).items()}
        return digests(values)

    def write(self, kind: str, part: str, factor: float) -> list[Any]:
        self._live.clear()
        for name, param in self._in(part).items():
            values = param.detach() if kind == "params" else self._value(name, param)
            self._set(name, param, values * factor)
        self._keeper.note("written")
        return []

    def read_states(self) -> list[Any]:
        params = dict(self.model.named_parameters())
        moments = {name: torch.cat([each.exp_avg, each.exp_avg_sq]) for name, each in self._masters.items()}
        moments = {name: each for name, each in moments.items() if self._masters[name].num_updates}
        return digests(params) + digests(moments)

    def write_states(self, factor: float) -> list[Any]:
        self._live.clear()
        for name, param in self.model.named_parameters():
            self._set(name, param, param.detach() * factor)
        for master in self._masters.values():
            if master.num_updates:
                master.exp_avg *= factor
                master.num_updates += 1
        self._keeper.note("states")
        return []


def play_plain(
    rank: int, world_size: int, script: Script, dim: int, choices: dict[str, Any], folder: str
) -> list[list[Any]]:
    """A job of ranks that know nothing of each other: with as many threads as ranks that do."""
    return Plain(dim, zo.OffloadConfig(nvme=folder, **choices)).play(script)
