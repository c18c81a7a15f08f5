"""A student that is trained and a teacher that averages it: two offloaded models, kept by one commit.

`plain` is the same on ordinary tensors (`between_steps.Plain`). `die_at` ends the process at a call of the file system
or of a file engine.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import zero_offload as zo
from tests.helpers.between_steps import CHANGES, Pair, Plain
from tests.helpers.models import build
from tests.helpers.reference import read_masters
from zero_offload.hardware.abi import IoOp
from zero_offload.model.api import runtime_of
from zero_offload.storage.files.native_engine import NativeEngine
from zero_offload.storage.files.system import FileSystem

AVERAGE = CHANGES["average by lerp"]
WRITES = ("replace", "write_whole", "unlink", "fsync", "fdatasync", "posix_fallocate")


def die_at(number: int) -> Callable[[], int]:
    """End the process before the call of this number, which changes files. Returns how many there were so far."""
    counter = itertools.count(1)
    last = 0

    def counting(function: Any) -> Any:
        def call(*args: Any) -> Any:
            nonlocal last
            if function is submit and args[1] is not IoOp.WRITE:
                return function(*args)
            last = next(counter)
            if last == number:
                os._exit(9)
            return function(*args)

        return call

    submit = NativeEngine.submit
    for name in WRITES:
        setattr(FileSystem, name, counting(getattr(FileSystem, name)))
    NativeEngine.submit = counting(submit)  # type: ignore[method-assign]
    return lambda: last


def _x(number: int) -> Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(number))


class Two:
    """Both models, open; those that are not the `only` one are ordinary modules."""

    def __init__(
        self, where: Path, precision: str, tier: str, *, only: str = "", out: Path | None = None, **settings: Any
    ) -> None:
        """`out`: where each publishes in a place of its own."""
        pair = build(Pair)
        if precision == "bf16":
            for param in pair.student.parameters():
                param.data = param.data.bfloat16().float()
        tiers = {"params": tier, "existing": "resume"} | settings
        places: list[dict[str, Any]] = [
            {"nvme": where / each} | ({} if out is None else {"publish": out / each}) for each in ("student", "teacher")
        ]
        student = zo.OffloadConfig(precision=precision, optimizer=tier, **places[0], **tiers)
        teacher = zo.OffloadConfig(precision="fp32", **places[1], **tiers)
        self.student = pair.student if only == "teacher" else zo.offload(pair.student, student)
        self.teacher = pair.teacher if only == "student" else zo.offload(pair.teacher, teacher)
        self.optimizer = zo.AdamW(self.student.parameters(), lr=1e-2)

    def resume(self) -> int:
        found = zo.resume(self.student, self.optimizer, also=[self.teacher])
        assert found is None or found.extra == {"next": found.step}
        return 0 if found is None else found.step

    def iterate(self, number: int) -> None:
        """One iteration, without its commit."""
        self.step(number)
        with torch.no_grad():
            if runtime_of(self.teacher):
                AVERAGE(list(self.student.parameters()), list(self.teacher.parameters()))

    def step(self, number: int) -> None:
        x = _x(number).to(next(self.student.parameters()).dtype)
        out = self.student(x)
        with torch.no_grad():
            target = self.teacher(x.float()).to(out.dtype)
        (out - target).float().square().mean().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def commit(self, number: int) -> None:
        zo.commit(self.student, self.optimizer, {"next": number}, also=[self.teacher])

    def masters(self) -> dict[str, Tensor]:
        models: dict[str, nn.Module] = {"student": self.student, "teacher": self.teacher}
        return {
            f"{name}.{each}": values.float()
            for name, model in models.items()
            for each, values in (read_masters(model) if runtime_of(model) else model.state_dict()).items()
        }

    def close(self) -> None:
        zo.close(self.student)
        zo.close(self.teacher)


def run(where: Path, num: int, precision: str, tier: str, **settings: Any) -> tuple[int, dict[str, Tensor]]:
    """Go on until so many iterations are done; where it began, and the masters."""
    two = Two(where, precision, tier, **settings)
    begin = two.resume()
    for number in range(begin, num):
        two.iterate(number)
        two.commit(number + 1)
    found = two.masters()
    two.close()
    return begin, found


def plain(num: int, precision: str) -> dict[str, Tensor]:
    twin = Plain(precision)
    for number in range(num):
        twin.model(_x(number)).backward()
        twin.optimizer.step()
        twin.optimizer.zero_grad()
        twin.change(AVERAGE)
    return twin.masters()
