"""Scripts of operations in any order, played on an offloaded model and on plain tensors: both report the same.

A script is a list of operations, each the name of a method of `Player` and its arguments. `Player` has what is the same
on both sides; `plain_player` and `offloaded_player` have the rest. An operation that has no meaning where it stands (a
backward without a loss) does nothing, on both sides. So every list of operations is a script.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.helpers.models import TinyLM, tokens_of

Operation = tuple[Any, ...]
Script = Sequence[Operation]

NUM_BLOCKS = 4
FROZEN = "blocks.2.up."
PARTS = ("embedding", "norm", *(f"blocks.{i}" for i in range(NUM_BLOCKS)))
"""The units."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
FIRST_LR = 1e-2


class Explosion(Exception):
    """The error that breaks a forward or a backward."""


class _Fuse(torch.autograd.Function):
    """Identity; its backward raises when it is lit."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, lit: bool) -> Tensor:
        ctx.lit = lit
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        if ctx.lit:
            raise Explosion
        return grad, None


@dataclass(frozen=True)
class Pass:
    """The work of one forward."""

    seed: int
    route: tuple[int, ...] = tuple(range(NUM_BLOCKS))
    """Blocks in order: some left out, some used again."""
    recompute: str = "none"
    """"none", or how torch.utils.checkpoint runs the blocks: "reentrant" or "saved"."""
    length: int = 9


class ScriptedLM(TinyLM):
    """Runs the blocks it is told to; one of them is frozen in part; the only randomness is dropout."""

    def __init__(self, dim: int) -> None:
        super().__init__(dim, NUM_BLOCKS)
        self.breaks: tuple[str, int] | None = None
        """"forward" or "backward", and at which block of the route."""
        for name, param in self.named_parameters():
            param.requires_grad_(not name.startswith(FROZEN))

    def forward(self, tokens: Tensor, route: Sequence[int], recompute: str) -> Tensor:  # type: ignore[override]
        tokens = tokens.to(self.embedding.weight.device)
        x = self.embedding(tokens[:, :-1])
        # Drawn by the CPU's generator, wherever the model computes.
        x = x * F.dropout(torch.ones(x.shape), 0.1, self.training).to(x)
        for place, index in enumerate(route):
            x = self._run(self.blocks[index], x, recompute)
            if self.breaks == ("forward", place):
                raise Explosion
            x = _Fuse.apply(x, self.breaks == ("backward", place))
        logits = self.head(self.norm(x)).float()
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    def _run(self, block: nn.Module, x: Tensor, recompute: str) -> Tensor:
        if recompute == "none" or not torch.is_grad_enabled():
            return block(x)
        return checkpoint(block, x, use_reentrant=recompute == "reentrant")


def digest(tensor: Tensor) -> str:
    """Of the values, whatever floating dtype they have: bf16 is exact in fp32."""
    there = tensor.detach().to("cpu", torch.float32).contiguous()
    return hashlib.sha256(there.numpy().tobytes()).hexdigest()[:16]


def digests(tensors: dict[str, Tensor]) -> list[str]:
    return [f"{name} {digest(tensors[name])}" for name in sorted(tensors)]


NOT_BEFORE_STEP = {
    *("backward", "backward_of_all", "break_backward", "explode", "zero_grad", "set_lr"),
    *("commit", "save", "reopen", "restart"),
}
"""Operations that have no meaning, or raise, between a backward that has updated and its step."""


class Player(ABC):
    """One side. Results of the operations are compared.

    Where the update runs in backward, that of each backward outside of `no_sync`, there is no clipping. Backwards that
    break run inside of it: there they change nothing.
    """

    model: nn.Module

    def __init__(self, stream: int = 0, *, in_backward: bool = False) -> None:
        """Another `stream` is other data."""
        self._stream = stream
        self._in_backward = in_backward
        self._updated = False
        """Whether a backward has made the next step."""
        self._live: list[Tensor] = []
        """Losses whose backward has not run."""
        self._clipped = False
        """Whether a backward would add to clipped gradients."""

    def play(self, script: Script) -> list[list[Any]]:
        torch.manual_seed(1)
        return [self._do(name, arguments) for name, *arguments in script]

    def _do(self, name: str, arguments: Sequence[Any]) -> list[Any]:
        if self._in_backward and name == "clip":
            return []
        if self._updated and (name in NOT_BEFORE_STEP or (name == "read" and arguments[0] == "grads")):
            return []
        found: list[Any] = getattr(self, name)(*arguments)
        return found

    def _end_backward(self) -> None:
        """One outside of `no_sync` is over."""
        if self._in_backward:
            self._updated = True
            self._live.clear()
            self._update_in_backward()

    def _run(self, what: Pass, breaks: tuple[str, int] | None = None) -> Tensor:
        self._before_use()
        self.model.breaks = breaks
        try:
            tokens = tokens_of(1000 * self._stream + what.seed, length=what.length)
            loss: Tensor = self.model(tokens, what.route, what.recompute)
        finally:
            self.model.breaks = None
        return loss

    # Passes

    def forward(self, what: Pass) -> list[Any]:
        loss = self._run(what)
        self._live.append(loss)
        return [loss.item()]

    def backward(self, which: int, weight: float, keep: bool, synced: bool) -> list[Any]:
        """Of one loss; kept, its backward can run again."""
        if self._live and not self._clipped:
            index = which % len(self._live)
            loss = self._live[index] if keep else self._live.pop(index)
            with nullcontext() if synced else self.no_sync():
                (loss * weight).backward(retain_graph=keep)
            if synced:
                self._end_backward()
        return []

    def backward_of_all(self) -> list[Any]:
        """Several forwards, one backward."""
        if self._live and not self._clipped:
            losses, self._live = self._live, []
            sum(loss / (1 + i) for i, loss in enumerate(losses)).backward()
            self._end_backward()
        return []

    def evaluate(self, what: Pass, context: Callable[[], AbstractContextManager[Any]]) -> list[Any]:
        self.model.eval()
        try:
            with context():
                return [self._run(what).item()]
        finally:
            self.model.train()

    def generate(self, what: Pass, count: int) -> list[Any]:
        """Many forwards of growing length."""
        with torch.no_grad():
            return [self._run(replace(what, length=3 + i)).item() for i in range(count)]

    def drop_losses(self) -> list[Any]:
        """As a script that raises between forward and backward."""
        self._live.clear()
        return []

    # Faults

    def break_forward(self, what: Pass, place: int) -> list[Any]:
        try:
            return [self._run(what, ("forward", place)).item()]
        except Explosion:
            return ["broken"]

    def break_backward(self, what: Pass, place: int, drops: bool) -> list[Any]:
        """Without `drops` whatever comes next drops the gradients."""
        if self._clipped:
            return []
        loss = self._run(what, ("backward", place))
        try:
            with self.no_sync() if self._in_backward else nullcontext():
                loss.backward()
        except Explosion:
            self._live.clear()
            if drops:
                self.zero_grad()
            else:
                self._left_broken()
        return [loss.item()]

    def explode(self, what: Pass) -> list[Any]:
        """A step whose gradients are not finite is left out."""
        if not self._clipped:
            if self._in_backward:
                self.zero_grad()  # finite ones, of units that this backward has none of, would be used
            (self._run(what) * float("inf")).backward()
            self._end_backward()
            self.step()
            self.zero_grad()
        return []

    # Parts that differ

    @abstractmethod
    def _update_in_backward(self) -> None:
        """A backward that updates is over."""

    @abstractmethod
    def _before_use(self) -> None:
        """The outermost forward begins, or the gradients are asked for."""

    @abstractmethod
    def _left_broken(self) -> None:
        """A backward broke off, and its gradients are still there: the next call drops them."""

    @abstractmethod
    def no_sync(self) -> AbstractContextManager[None]: ...

    @abstractmethod
    def clip(self, max_norm: float) -> list[Any]: ...

    @abstractmethod
    def step(self) -> list[Any]: ...

    @abstractmethod
    def zero_grad(self) -> list[Any]: ...

    @abstractmethod
    def set_lr(self, lr: float) -> list[Any]: ...

    @abstractmethod
    def commit(self, extra: int) -> list[Any]: ...

    @abstractmethod
    def reopen(self) -> list[Any]:
        """Close, and resume from the generation; does nothing where none are kept."""

    @abstractmethod
    def save(self, slot: int) -> list[Any]: ...

    @abstractmethod
    def load(self, slot: int) -> list[Any]: ...

    @abstractmethod
    def restart(self, dtype: str | None) -> list[Any]:
        """Export the weights, and start another training from them."""

    @abstractmethod
    def read(self, kind: str, part: str) -> list[Any]: ...

    @abstractmethod
    def write(self, kind: str, part: str, factor: float) -> list[Any]: ...

    @abstractmethod
    def read_states(self) -> list[Any]:
        """Both state dicts."""

    @abstractmethod
    def write_states(self, factor: float) -> list[Any]:
        """Both state dicts, changed."""
