"""A player of scripts on an offloaded model, through the public calls alone."""

from __future__ import annotations

import math
import warnings
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

import zero_offload as zo
from tests.helpers.models import build
from tests.helpers.pretrained import read_folder
from tests.helpers.reference import BETAS, EPS, param_groups
from tests.helpers.schedules import FIRST_LR, Player, Script, ScriptedLM, digests

EXPECTED = [
    "the last backward was left",
    "a gradient is NaN or infinite",
    "is not made a generation",
    "a resume goes on from the generation committed last",
    "replaces the fp32 master of",
    "zo.commit keeps nothing",
]
"""Warnings that scripts ask for."""


class Offloaded(Player):
    """One model after the other, in one run directory; checkpoints and exports go to a folder."""

    def __init__(self, dim: int, config: zo.OffloadConfig, folder: Path, stream: int = 0) -> None:
        super().__init__(stream, in_backward=config.overlap == "backward")
        self._dim, self._config, self._folder = dim, config, folder
        self._num_exports = 0
        self._saved: set[int] = set()
        self._start("discard")

    def _start(self, existing: str) -> None:
        with torch.random.fork_rng():
            self.model = build(partial(ScriptedLM, self._dim))
            zo.offload(self.model, replace(self._config, existing=existing))
        self._optimizer = zo.AdamW(param_groups(self.model), lr=FIRST_LR, betas=BETAS, eps=EPS)

    def play(self, script: Script) -> list[list[Any]]:
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            for words in EXPECTED:
                warnings.filterwarnings("ignore", f".*{words}")
            return super().play(script)

    def close(self) -> None:
        zo.close(self.model)

    def _before_use(self) -> None:
        """The library knows."""

    def _update_in_backward(self) -> None:
        """The library has done it."""

    def _left_broken(self) -> None:
        """The library notices."""

    def no_sync(self) -> AbstractContextManager[None]:
        return zo.no_sync(self.model)

    def clip(self, max_norm: float) -> list[Any]:
        norm = zo.clip_grad_norm_(self.model, max_norm).item()
        self._clipped = self._clipped or (math.isfinite(norm) and norm + 1e-6 > max_norm)
        return [norm]

    def step(self) -> list[Any]:
        self._live.clear()
        self._optimizer.step()
        self._clipped = self._updated = False
        return []

    def zero_grad(self) -> list[Any]:
        self._optimizer.zero_grad()
        self._clipped = False
        return []

    def set_lr(self, lr: float) -> list[Any]:
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        return []

    # Generations and checkpoints

    def commit(self, extra: int) -> list[Any]:
        zo.commit(self.model, self._optimizer, extra)
        return []

    def reopen(self) -> list[Any]:
        if self._config.effective_durability.value == "scratch":
            return []
        self.close()
        self._start("resume")
        return self._restored(zo.resume(self.model, self._optimizer))

    def _restored(self, found: zo.Resumed | None) -> list[Any]:
        self._live.clear()
        self._clipped = self._updated = False
        return ["nothing"] if found is None else [found.step, found.extra, self._optimizer.param_groups[0]["lr"]]

    def save(self, slot: int) -> list[Any]:
        if slot not in self._saved:
            self._saved.add(slot)
            zo.save_checkpoint(self.model, self._optimizer, self._folder / f"saved{slot}", extra=slot)
        return []

    def load(self, slot: int) -> list[Any]:
        if slot not in self._saved:
            return []
        return self._restored(zo.load_checkpoint(self.model, self._optimizer, self._folder / f"saved{slot}"))

    def restart(self, dtype: str | None) -> list[Any]:
        path = self._folder / f"export{self._num_exports}"
        self._num_exports += 1
        zo.export_pretrained(self.model, path, dtype=dtype)
        self.close()
        self._live.clear()
        self._clipped = False
        self._start("discard")
        zo.load_pretrained(self.model, path)
        return digests(read_folder(path))

    # Values

    def read(self, kind: str, part: str) -> list[Any]:
        with zo.gathered(self.model.get_submodule(part), kind=kind) as values:
            return digests(values)

    def write(self, kind: str, part: str, factor: float) -> list[Any]:
        self._live.clear()
        with zo.gathered(self.model.get_submodule(part), mode="write", kind=kind) as values, torch.no_grad():
            for value in values.values():
                value.mul_(factor)
        return []

    def read_states(self) -> list[Any]:
        named = dict(self.model.named_parameters())
        params = {name: value for name, value in self.model.state_dict().items() if name in named}
        states = self._optimizer.state_dict()["state"]
        names = self._names()
        moments = {names[i]: torch.cat([each["exp_avg"], each["exp_avg_sq"]]) for i, each in states.items()}
        return digests(params) + digests(moments)

    def write_states(self, factor: float) -> list[Any]:
        self._live.clear()
        self.model.load_state_dict({name: value * factor for name, value in self.model.state_dict().items()})
        states = self._optimizer.state_dict()
        for each in states["state"].values():
            each["exp_avg"] *= factor
            each["step"] += 1
        self._optimizer.load_state_dict(states)
        return []

    def _names(self) -> list[str]:
        """Of the optimizer's parameters, in its order."""
        name_of = {id(param): name for name, param in self.model.named_parameters()}
        return [name_of[id(param)] for group in self._optimizer.param_groups for param in group["params"]]


def play_on_ranks(
    rank: int, world_size: int, script: Script, dim: int, choices: dict[str, Any], folder: str, streams: int
) -> list[list[Any]]:
    """A job of ranks: `choices` are the configuration's; the ranks have as many different `streams` of data."""
    config = zo.OffloadConfig(nvme=Path(folder, "nvme"), **choices)
    player = Offloaded(dim, config, Path(folder), stream=rank % streams)
    try:
        return player.play(script)
    finally:
        player.close()
