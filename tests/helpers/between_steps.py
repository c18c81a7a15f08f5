"""Things that programs do to weights between steps, and the same on plain lists of fp32 masters.

`Plain` is the reference: an ordinary model with `zo.AdamW`. In 16 bits a change is made on the masters, which the value
and its residual are split from. `Offloaded` makes it on the parameters themselves, and can commit and resume. It may be
one of several ranks, of which `Plain` then runs the backwards one after the other.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

import zero_offload as zo
from tests.helpers.models import build
from tests.helpers.ranks import gloo_group
from tests.helpers.reference import read_masters
from zero_offload.hardware.kernels.formats import join_master, split_master
from zero_offload.model.api import runtime_of

Change = Callable[[list[Any], list[Any]], Any]
"""change(student, teacher): tensors of two modules of the same form; in place."""


WIDTH = 700
"""Each rank has a part of each of the two models, and some parameters lie on two or three."""


class Pair(nn.Module):
    """A student, and a frozen teacher of the same form, in fp32 throughout."""

    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.student = nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 8))
        self.teacher = nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 8)).requires_grad_(False)

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
    student[1][torch.arange(len(student[1]), device=student[1].device) % 3 == 0] = 0.1


def _decay(student: list[Any], teacher: list[Any]) -> None:
    for s in student:
        s.mul_(0.9999)


def _init(student: list[Any], teacher: list[Any]) -> None:
    torch.manual_seed(3 + _rank())  # rank 0's numbers count
    nn.init.kaiming_uniform_(student[2])
    nn.init.uniform_(student[1], -0.1, 0.1)
    nn.init.trunc_normal_(teacher[0], std=0.3)
    nn.init.orthogonal_(teacher[2])
    student[0].mul_(torch.rand((), generator=torch.Generator().manual_seed(4)) + 0.5)
    F.dropout(student[3], 0.5, inplace=True)


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


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def rows_of(seed: int, rank: int, num_ranks: int, precision: str) -> Tensor:
    """A rank's rows. In 16 bits all ranks have the same, so that means of their gradients are the gradients."""
    torch.manual_seed(seed)
    x = torch.randn(4, 8)
    return x[rank::num_ranks] if precision == "fp32" else x


class Plain:
    """See the module's docstring."""

    def __init__(self, precision: str, num_ranks: int = 1, *, width: int = 24, defers: bool = False) -> None:
        """`defers`: ranks add up the gradients of their own backwards first."""
        self._dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
        self._precision, self._num_ranks, self._defers = precision, num_ranks, defers
        self._own: list[list[Tensor | None]] = []
        self.model = build(lambda: Pair(width))
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

    def backward(self, loss_of: Callable[[int], Tensor]) -> list[float]:
        """The backwards of all ranks; their losses, of those that have other rows."""
        params, losses = list(self.model.student.parameters()), []
        before = [param.grad for param in params]
        for rank in range(self._num_ranks):
            for param in params:
                param.grad = None
            loss = loss_of(rank)
            loss.backward()
            losses.append(loss.item())
            self._own.append([param.grad for param in params])
        for param, grad in zip(params, before, strict=True):
            param.grad = grad
        if not self._defers:
            self.reduce()
        return losses if self._precision == "fp32" else losses[:1]

    def reduce(self) -> None:
        """Add the mean over ranks of what they have added up."""
        if not self._own:
            return
        sums = [_added(self._own[rank :: self._num_ranks]) for rank in range(self._num_ranks)]
        self._own = []
        for param, total in zip(self.model.student.parameters(), _added(sums), strict=True):
            if total is not None:
                mean = (total.float() / self._num_ranks).to(param.dtype)
                param.grad = mean if param.grad is None else param.grad + mean

    def loss(self, seed: int) -> Callable[[int], Tensor]:
        return lambda rank: self.model(rows_of(seed, rank, self._num_ranks, self._precision))

    def step(self) -> None:
        self.reduce()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def clip(self) -> None:
        self.reduce()
        nn.utils.clip_grad_value_(self.model.student.parameters(), 0.01)

    def change_gathered(self, change: Change) -> None:
        self.change(change)

    def load(self) -> None:
        with torch.no_grad():
            for t, s in zip(self.model.teacher.parameters(), self.model.student.parameters(), strict=True):
                t.copy_(s)

    def commit(self) -> None:
        """An ordinary program has no generations."""

    def resume(self) -> None:
        """It has nothing to resume either."""


def _added(each: list[list[Tensor | None]]) -> list[Tensor | None]:
    """The sum of several lists of gradients, in their order."""
    total = [*each[0]] if each else []
    for grads in each[1:]:
        for index, grad in enumerate(grads):
            before = total[index]
            total[index] = grad if before is None else before if grad is None else before.float() + grad
    return total


class Offloaded:
    """See the module's docstring."""

    def __init__(self, settings: dict[str, Any], rank: int = 0, num_ranks: int = 1, *, width: int = 24) -> None:
        """`settings` may have a "mesh" of ranks, as tuples."""
        mesh = settings.get("mesh")
        self._mesh = None if mesh is None else DeviceMesh("cpu", mesh)
        self._settings = {name: value for name, value in settings.items() if name != "mesh"}
        self._rank, self._num_ranks, self._width = rank, num_ranks, width
        self._open()

    def _open(self) -> None:
        self.model = build(lambda: Pair(self._width))
        precision = zo.Precision(self._settings["precision"], modules={"teacher": "fp32"})
        if precision.compute == "bf16":
            for param in self.model.student.parameters():
                param.data = param.data.bfloat16().float()
        existing = "resume" if "nvme" in self._settings else "refuse"
        config = zo.OffloadConfig(existing=existing, **self._settings | {"precision": precision})
        zo.offload(self.model, config, self._mesh)
        self.optimizer = zo.AdamW(self.model.student.parameters(), lr=1e-2)

    def masters(self) -> dict[str, Tensor]:
        return {name: value.float() for name, value in read_masters(self.model).items()}

    def change(self, change: Change) -> None:
        params = list(self.model.parameters())
        with torch.no_grad():
            change(params[:4], params[4:])

    def change_gathered(self, change: Change) -> None:
        """In a block that writes, whose parameters are plain."""
        with zo.gathered(self.model, mode="write"):
            self.change(change)

    def loss(self, seed: int) -> Callable[[int], Tensor]:
        precision = str(self._settings["precision"])
        device = next(self.model.parameters()).device
        return lambda rank: self.model(rows_of(seed, rank, self._num_ranks, precision).to(device))

    def backward(self, loss_of: Callable[[int], Tensor]) -> list[float]:
        loss = loss_of(self._rank)
        loss.backward()
        losses: list[float] = [loss.item()]
        if self._num_ranks > 1 and self._settings["precision"] == "fp32":
            losses *= self._num_ranks
            dist.all_gather_object(losses, loss.item())
        return losses

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def clip(self) -> None:
        nn.utils.clip_grad_value_(self.model.student.parameters(), 0.01)

    def load(self) -> None:
        """As a target network gets the values of another."""
        self.model.teacher.load_state_dict(self.model.student.state_dict())

    def commit(self) -> None:
        zo.commit(self.model, self.optimizer)

    def resume(self) -> None:
        """Commit, end, and start again from the directory."""
        if self._settings.get("durability") == "scratch" or "nvme" not in self._settings:
            return
        self.commit()
        zo.close(self.model)
        self._open()
        zo.resume(self.model, self.optimizer)


def program(seed: int, length: int, *, precision: str, draws: bool = True, num_ranks: int = 1) -> list[tuple[str, Any]]:
    """Random calls, of which each begins where the one before has left updates and commits under way. In 16 bits
    none adds up gradients of several backwards, or writes what it has computed of values: torch does both in 16 bits.
    Blocks that write would round masters. It `draws` random values, which on a device are others than on the host, and
    in blocks are each rank's own.
    """
    draw = random.Random(seed)
    is_exact = precision == "fp32"
    changes = [name for name in CHANGES if (draws or name != "init") and (is_exact or name != "a norm of one")]
    in_blocks = [name for name in changes if name != "init" or num_ranks == 1]
    calls: list[tuple[str, Any]] = [("step", 0)]
    kinds = ["step", "step", "change", "change", "read", "resume", "commit", "load"]
    kinds += ["backward", "penalty", "clip", "change gathered"] * is_exact + ["state dict"] * (num_ranks == 1)
    for index in range(length):
        kind = draw.choice(kinds)
        names = {"change": changes, "change gathered": in_blocks}.get(kind)
        calls.append((kind, index if names is None else draw.choice(names)))
    return [*calls, ("step", length), ("read", 0)]


def run(twin: Any, calls: list[tuple[str, Any]]) -> list[Any]:
    """Runs a program; its figures."""
    found: list[Any] = []
    for kind, what in calls:
        model = twin.model
        if kind in ("step", "backward", "resume"):
            found += twin.backward(twin.loss(what))
            if kind != "backward":
                twin.step()
            if kind == "resume":
                twin.resume()
        elif kind == "commit":
            twin.commit()
        elif kind == "load":
            twin.load()
        elif kind == "change":
            twin.change(CHANGES[what])
        elif kind == "change gathered":
            twin.change_gathered(CHANGES[what])
        elif kind == "read":
            found += [param.detach().float().norm().item() for param in model.parameters()]
            found += [param.detach().float().cpu().numpy().tobytes() for param in model.parameters()]
        elif kind == "penalty":
            params = list(model.student.parameters())
            found += twin.backward(lambda rank, params=params: sum(param.square().sum() for param in params))
        elif kind == "clip":
            found += twin.backward(twin.loss(what))
            twin.clip()
        elif kind == "state dict":
            values = {name: value.clone() for name, value in model.state_dict().items()}
            found.append([value.float().sum().item() for value in values.values()])
    return found


def run_on_rank(
    rank: int, world_size: int, settings: dict[str, Any], calls: list[tuple[str, Any]]
) -> tuple[list[Any], dict[str, Tensor]]:
    """A job of a pool: the figures, and masters at the end."""
    twin = Offloaded(settings, rank, world_size, width=WIDTH)
    found = run(twin, calls)
    masters = twin.masters()
    zo.close(twin.model)
    return found, masters


def run_and_die(rank: int, store: str, settings: dict[str, Any], calls: list[tuple[str, Any]], last: int) -> None:
    """A process of its own: runs a program on two ranks with a commit behind each call. Rank 1 dies in a change, before
    it writes the parameter with the number `last`."""
    with gloo_group(rank, 2, store):
        twin = Offloaded(settings, rank, 2, width=WIDTH)
        resumed = zo.resume(twin.model, twin.optimizer)
        states, count = runtime_of(twin.model).states, 0
        replace = states.replace

        def replace_or_die(*args: Any, **kwargs: Any) -> None:
            nonlocal count
            count += 1
            if count > last and rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            replace(*args, **kwargs)

        states.replace = replace_or_die  # type: ignore[method-assign]
        with contextlib.suppress(zo.ZeroOffloadError):
            _go_on(twin, calls, 0 if resumed is None else resumed.extra["next"])
        os._exit(0)


def _go_on(twin: Offloaded, calls: list[tuple[str, Any]], begin: int) -> list[Any]:
    found = []
    for index in range(begin, len(calls)):
        found += run(twin, calls[index : index + 1])
        zo.commit(twin.model, twin.optimizer, extra={"next": index + 1})
    return found


def resume_on_rank(
    rank: int, world_size: int, settings: dict[str, Any], calls: list[tuple[str, Any]]
) -> tuple[int, dict[str, Tensor]]:
    """A job of a pool: the calls that were committed before, and masters after the rest of them."""
    twin = Offloaded(settings, rank, world_size, width=WIDTH)
    resumed = zo.resume(twin.model, twin.optimizer)
    begin: int = 0 if resumed is None else resumed.extra["next"]
    _go_on(twin, calls, begin)
    masters = twin.masters()
    zo.close(twin.model)
    return begin, masters
