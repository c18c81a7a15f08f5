"""Things that programs do to weights between steps, and the same on plain lists of fp32 masters.

`Plain` is the reference: an ordinary model with `zo.AdamW`. In 16 bits a change is made on the masters, which the value
and its residual are split from. `Offloaded` makes it on the parameters themselves, and can commit and resume.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import zero_offload as zo
from tests.helpers.models import build
from tests.helpers.reference import read_masters
from zero_offload.hardware.kernels.formats import join_master, split_master

Change = Callable[[list[Any], list[Any]], Any]
"""change(student, teacher): tensors of two modules of the same form; in place."""


class Pair(nn.Module):
    """A student, and a frozen teacher of the same form, in fp32 throughout."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 8))
        self.teacher = nn.Sequential(nn.Linear(8, 24), nn.ReLU(), nn.Linear(24, 8)).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(self.student[0].weight)
        out = self.student(x)
        with torch.no_grad():
            target = self.teacher(x.to(self.teacher[0].weight)).to(out.dtype)
        return (out - target).float().square().mean()  # type: ignore[no-any-return]


def _unit_norm(student: list[Any], teacher: list[Any]) -> None:
    student[0].copy_(F.normalize(student[0], dim=1))


def _average(student: list[Any], teacher: list[Any]) -> None:
    for t, s in zip(teacher, student, strict=True):
        t.mul_(0.9).add_(s, alpha=0.1)


def _average_at_once(student: list[Any], teacher: list[Any]) -> None:
    torch._foreach_mul_(teacher, 0.9)
    torch._foreach_add_(teacher, student, alpha=0.1)


def _average_by_lerp(student: list[Any], teacher: list[Any]) -> None:
    torch._foreach_lerp_(teacher, student, 0.25)


def _copy(student: list[Any], teacher: list[Any]) -> None:
    for t, s in zip(teacher, student, strict=True):
        t.copy_(s)


def _clip(student: list[Any], teacher: list[Any]) -> None:
    for s in student:
        s.clamp_(-0.2, 0.2)


def _rows(student: list[Any], teacher: list[Any]) -> None:
    student[0][1] = 0.25
    student[0][:, 2].mul_(1.5)
    student[2].t()[0, 1:3] -= 0.125
    student[1][torch.arange(24, device=student[1].device) % 3 == 0] = 0.1


def _decay(student: list[Any], teacher: list[Any]) -> None:
    for s in student:
        s.mul_(0.9999)


def _init(student: list[Any], teacher: list[Any]) -> None:
    torch.manual_seed(3)
    nn.init.kaiming_uniform_(student[2])
    nn.init.uniform_(student[1], -0.1, 0.1)
    nn.init.trunc_normal_(teacher[0], std=0.3)


def _out(student: list[Any], teacher: list[Any]) -> None:
    torch.add(student[0], 0.5, out=student[0])
    torch.addcmul(student[3], student[3], student[3], value=0.5, out=student[3])


def _relu(student: list[Any], teacher: list[Any]) -> None:
    F.leaky_relu(student[0], 0.5, inplace=True)


CHANGES: dict[str, Change] = {
    "a norm of one": _unit_norm,
    "average": _average,
    "average at once": _average_at_once,
    "average by lerp": _average_by_lerp,
    "copy": _copy,
    "clip": _clip,
    "rows": _rows,
    "decay": _decay,
    "init": _init,
    "out": _out,
    "function in Python": _relu,
}


class Plain:
    """See the module's docstring."""

    def __init__(self, precision: str) -> None:
        self._dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
        self.model = build(Pair)
        for param in self.model.student.parameters():
            param.data = param.data.to(self._dtype)
        self.optimizer = zo.AdamW(self.model.student.parameters(), lr=1e-2)

    def masters(self) -> dict[str, Tensor]:
        found = {}
        for name, param in self.model.named_parameters():
            residual = self.optimizer.state[param].get("residual") if param in self.optimizer.state else None
            found[name] = param.detach().float()
            if residual is not None:
                join_master(param.detach(), residual, found[name])
        return found

    def change(self, change: Change) -> None:
        params, masters = list(self.model.parameters()), list(self.masters().values())
        with torch.no_grad():
            change(masters[:4], masters[4:])
            for param, master in zip(params, masters, strict=True):
                residual = self.optimizer.state[param].get("residual") if param in self.optimizer.state else None
                if residual is None:
                    param.copy_(master)
                else:
                    split_master(master, param.data, residual)

    def resume(self) -> None:
        """An ordinary program has nothing to resume."""


class Offloaded:
    """See the module's docstring."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self._settings = settings
        self._open()

    def _open(self) -> None:
        self.model = build(Pair)
        precision = zo.Precision(self._settings["precision"], modules={"teacher": "fp32"})
        if precision.compute == "bf16":
            for param in self.model.student.parameters():
                param.data = param.data.bfloat16().float()
        zo.offload(self.model, zo.OffloadConfig(existing="resume", **self._settings | {"precision": precision}))
        self.optimizer = zo.AdamW(self.model.student.parameters(), lr=1e-2)

    def masters(self) -> dict[str, Tensor]:
        return {name: value.float() for name, value in read_masters(self.model).items()}

    def change(self, change: Change) -> None:
        params = list(self.model.parameters())
        with torch.no_grad():
            change(params[:4], params[4:])

    def resume(self) -> None:
        """Commit, end, and start again from the directory."""
        if self._settings.get("durability") == "scratch" or "nvme" not in self._settings:
            return
        zo.commit(self.model, self.optimizer)
        zo.close(self.model)
        self._open()
        zo.resume(self.model, self.optimizer)


def program(seed: int, length: int, *, precision: str, draws: bool = True) -> list[tuple[str, Any]]:
    """Random calls, of which each begins where the one before has left updates and commits under way. In bf16
    none adds up gradients of several backwards, or writes what it has computed of values: torch does both in bf16. It
    `draws` random values, which on a device are others than on the host.
    """
    draw = random.Random(seed)
    is_exact = precision == "fp32"
    changes = [name for name in CHANGES if (draws or name != "init") and (is_exact or name != "a norm of one")]
    calls: list[tuple[str, Any]] = [("step", 0)]
    kinds = ["step", "step", "change", "change", "read", "resume", "state dict"]
    kinds += ["backward", "penalty", "clip"] * is_exact
    for index in range(length):
        kind = draw.choice(kinds)
        calls.append((kind, draw.choice(changes) if kind == "change" else index))
    return [*calls, ("step", length), ("read", 0)]


def run(twin: Any, calls: list[tuple[str, Any]]) -> list[Any]:
    """Runs a program; its figures."""
    found: list[Any] = []
    for kind, what in calls:
        model, optimizer = twin.model, twin.optimizer
        if kind in ("step", "backward", "resume"):
            torch.manual_seed(what)
            loss = model(torch.randn(4, 8))
            loss.backward()
            found.append(loss.item())
            if kind != "backward":
                optimizer.step()
                optimizer.zero_grad()
            if kind == "resume":
                twin.resume()
        elif kind == "change":
            twin.change(CHANGES[what])
        elif kind == "read":
            found += [float(param.detach().float().norm()) for param in model.parameters()]
            found += [param.detach().float().cpu().numpy().copy().tolist() for param in model.parameters()]
        elif kind == "penalty":
            penalty = sum(param.square().sum() for param in model.student.parameters())
            penalty.backward()
            found.append(penalty.item())
        elif kind == "clip":
            torch.manual_seed(what)
            model(torch.randn(4, 8)).backward()
            nn.utils.clip_grad_value_(model.student.parameters(), 0.01)
        elif kind == "state dict":
            values = {name: value.clone() for name, value in model.state_dict().items()}
            found.append([value.float().sum().item() for value in values.values()])
    return found
