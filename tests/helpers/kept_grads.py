"""Programs that keep what `.grad` gives while gradients are clipped, unscaled, edited, assigned, dropped and used.

The twin of an offloaded model is a list of plain parameters whose `.grad` is torch's own. Both run the same program,
and each kept tensor is compared with the twin's. A step uses gradients up: the twin drops them there.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import zero_offload as zo
from tests.helpers.reference import read_masters
from zero_offload.model.api import runtime_of

LENGTH = 16
LR = 0.25
SCALE = 2.0**6
BOUND = 2.0**-6
"""A limit for elements, exact in 16 bits."""
ENDS = ("is over", "is from before an assignment to its .data", "was changed afterwards")
"""A stand-in says at its use that it does not follow. Tensors in memory always do."""

Form = Callable[[Tensor], Tensor]
FORMS: tuple[Form, ...] = (
    lambda grad: grad,
    lambda grad: grad,
    lambda grad: grad.view(-1) if grad.is_contiguous() else grad.detach(),
    lambda grad: grad.detach(),
    lambda grad: grad.data,
    lambda grad: grad[:1],
    lambda grad: grad.t() if grad.dim() == 2 else grad,
)
EDITS: tuple[Form, ...] = (
    lambda grad: grad.mul_(0.5),
    lambda grad: grad.add_(1.0),
    lambda grad: grad.zero_(),
    lambda grad: grad[:1].add_(0.5),
    lambda grad: grad.clamp_(-BOUND, BOUND),
)


class FourLayers(nn.Module):
    """Returns the loss. Each layer is a section with two parameters."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(*sizes) for sizes in 2 * ((6, width), (width, 6)))

    def forward(self, x: Tensor) -> Tensor:
        a, b, c, d = self.layers
        x = x.to(a.weight.dtype)
        return d(F.relu(c(b(F.relu(a(x))) + x))).float().square().mean()  # type: ignore[no-any-return]


class Program:
    """One program, by its seed."""

    def __init__(
        self, model: nn.Module, seed: int, *, device: str, in_memory: bool, num_ranks: int = 1, defers: bool = False
    ) -> None:
        """`in_memory`: `.grad` is the gradient where it rests, and no stand-in. Of several ranks, which all run the
        same, gradients of micro-batches are added up first; with `defers` those of several backwards too."""
        self._model, self._device, self._in_memory = model, device, in_memory
        self._num_ranks, self._defers = num_ranks, defers
        self._sums: dict[str, Tensor] = {}
        """Gradients that a backward has made, or several, and that are not added to those held yet."""
        self._rng = random.Random(seed)
        self._params = dict(model.named_parameters())
        self._twin = {name: nn.Parameter(master.clone()) for name, master in read_masters(model).items()}
        self._taken: dict[str, Tensor] = {}
        """Gradients that plain torch would still have after a step."""
        self.kept: list[tuple[Any, Tensor]] = []
        self._scaler = zo.GradScaler(SCALE, enabled=self._rng.random() < 0.4)
        self._is_scaled = self._is_unscaled = False
        self._optimizer = zo.SGD(model.parameters(), lr=LR)
        for name in self._twin:
            self._params[name].register_post_accumulate_grad_hook(lambda made, name=name: self._add(name, made))

    def _add(self, name: str, made: nn.Parameter) -> None:
        new = made.grad.detach().to("cpu", torch.float32, copy=True)
        self._sums[name] = new if name not in self._sums else self._sums[name].add_(new)
        if self._num_ranks == 1:
            self._hold()

    def _hold(self) -> None:
        """Add to the gradients held."""
        for name, new in self._sums.items():
            twin = self._twin[name]
            twin.grad = new if twin.grad is None else twin.grad.add_(new)
        self._sums.clear()

    def _look(self) -> None:
        """A look at a gradient first adds up those of all ranks."""
        if self._num_ranks > 1:
            assert next(iter(self._params.values())).grad is None or self._held or self._sums
            self._hold()

    @property
    def _held(self) -> list[Tensor]:
        return [twin.grad for twin in self._twin.values() if twin.grad is not None]

    def run(self) -> list[str]:
        """The operations. Raises AssertionError at the first difference."""
        operations = [self.backward, self.backward, self.keep, self.keep, self.keep, self.edit, self.edit, self.edit]
        operations += [self.clip, self.clip_values, self.assign, self.assign_kept, self.assign_data, self.drop]
        operations += [self.unscale, self.zero_grad, self.step, self.forget, self.micro_batches]
        done = []
        for _ in range(LENGTH):
            operation = self._rng.choice(operations)
            done.append(operation.__name__)
            if operation not in (self.backward, self.micro_batches, self.forget):
                self._look()
            operation(self._rng.choice([*self._twin]))
            if self._rng.random() < 0.5:
                self.check(done)
        self.check(done)
        return done

    def check(self, done: object) -> None:
        self._look()
        with zo.gathered(self._model, kind="grads") as found:
            grads = {name: grad.float().cpu() for name, grad in found.items()}
        for name, twin in self._twin.items():
            if twin.grad is None or name not in grads:  # zeros may be a note
                assert name not in grads and (twin.grad is None or not twin.grad.any()), (name, done)
            else:
                assert torch.equal(grads[name], twin.grad), (name, done)
        for pair in [*self.kept]:
            if self._follows(pair, lambda kept: kept.clone()):
                assert torch.equal(pair[0].detach().clone().cpu(), pair[1]), done

    def _follows(self, pair: tuple[Any, Tensor], use: Form) -> bool:
        """False if the tensor has said that it does not, and is forgotten."""
        try:
            use(pair[0])
        except zo.ZeroOffloadError as error:
            assert any(words in str(error) for words in ENDS), error
            self.kept = [each for each in self.kept if each is not pair]
            return False
        return True

    # Operations

    def backward(self, _: str) -> None:
        if not self._is_unscaled:
            self._taken.clear()
            self._is_scaled = self._scaler.is_enabled()
            self._scaler.scale(self._model(self._input())).backward()
            if not self._defers:
                self._hold()

    def micro_batches(self, _: str) -> None:
        if not self._scaler.is_enabled():
            self._taken.clear()
            for loss in zo.accumulate(self._model, [self._input(), self._input()], lambda model, x: model(x)):
                assert loss.isfinite()
            if not self._defers:
                self._hold()

    def _input(self) -> Tensor:
        return torch.randn(3, 6, generator=torch.Generator().manual_seed(self._rng.randrange(99))).to(self._device)

    def keep(self, name: str) -> None:
        twin, form = self._twin[name].grad, self._rng.choice(FORMS)
        if twin is not None:
            self.kept.append((form(self._params[name].grad), form(twin)))

    def forget(self, _: str) -> None:
        if self.kept:
            self.kept.pop(self._rng.randrange(len(self.kept)))

    def edit(self, _: str) -> None:
        if self.kept:
            pair, edit = self._rng.choice(self.kept), self._rng.choice(EDITS)
            if self._follows(pair, edit):
                edit(pair[1])

    def clip(self, _: str) -> None:
        if self._held and (self._is_unscaled or not self._is_scaled):
            norm = torch.stack([grad.double().norm() for grad in self._held]).norm()
            # A power of two, so that the last bits of the norm do not count.
            factor = self._rng.choice([0.5, 0.125])
            total = zo.clip_grad_norm_(self._model, 1e9)
            assert abs(total.item() - norm.item()) <= 1e-6 * norm.item()
            for grad in self._held:
                grad.mul_(factor)
            runtime_of(self._model).grads.ledger.multiply(factor, [*self._params.values()])

    def clip_values(self, _: str) -> None:
        if self._held and (self._is_unscaled or not self._is_scaled):
            nn.utils.clip_grad_value_(self._model.parameters(), BOUND)
            nn.utils.clip_grad_value_(self._twin.values(), BOUND)

    def assign(self, name: str) -> None:
        seed, twin = self._rng.randrange(99), self._twin[name]
        given = torch.randn(twin.shape, generator=torch.Generator().manual_seed(seed)) * self._rng.choice([0.0, 1.0])
        ours = given.to(self._device, copy=True)
        self._params[name].grad, twin.grad = ours, given
        self._taken.pop(name, None)
        if self._in_memory:
            self.kept.append((ours, given))

    def assign_kept(self, name: str) -> None:
        fitting = [pair for pair in self.kept if pair[1].shape == self._twin[name].shape and pair[1].is_contiguous()]
        if fitting and self._in_memory:
            self._params[name].grad, self._twin[name].grad = self._rng.choice(fitting)
            self._taken.pop(name, None)

    def assign_data(self, name: str) -> None:
        twin, grad = self._twin[name].grad, self._params[name].grad
        if twin is not None:
            grad.data, twin.data = grad.data * 2, twin.data * 2

    def drop(self, name: str) -> None:
        self._params[name].grad = self._twin[name].grad = None
        self._taken.pop(name, None)

    def unscale(self, _: str) -> None:
        if self._is_scaled and not self._is_unscaled and self._held:
            self._scaler.unscale_(self._optimizer)
            self._is_unscaled = True
            for grad in self._held:
                grad.mul_(1 / SCALE)

    def zero_grad(self, _: str) -> None:
        goes = self._is_scaled or self._rng.random() < 0.5
        self._optimizer.zero_grad(set_to_none=goes)
        for name, twin in self._twin.items():
            if goes:
                twin.grad = None
            elif (grad := self._taken.get(name) if twin.grad is None else twin.grad) is not None:
                twin.grad = grad.zero_()
        self._taken.clear()
        if self._is_unscaled:
            self._scaler.update()
        self._is_scaled = self._is_unscaled = False

    def step(self, name: str) -> None:
        if not self._held:
            return
        if self._scaler.is_enabled():
            self.unscale(name) if self._is_scaled else self._unscale_assigned()
        self._scaler.step(self._optimizer)
        self._scaler.update()
        self._is_scaled = self._is_unscaled = False
        zo.SGD(self._twin.values(), lr=LR).step()
        for each, twin in self._twin.items():
            if twin.grad is not None:
                self._taken[each], twin.grad = twin.grad, None
        # An update beside the next forward has what it needs already.
        for pair in [*self.kept] if self._rng.random() < 0.5 else []:
            if self._follows(pair, lambda kept: kept.add_(3.0)):
                pair[1].add_(3.0)
        masters = read_masters(self._model)
        assert all(torch.equal(masters[each], twin.detach()) for each, twin in self._twin.items())

    def _unscale_assigned(self) -> None:
        self._is_scaled = True
        self.unscale("")


WIDTH = 800
"""Each rank of two or three has a part of each section."""


def run_on_ranks(rank: int, world_size: int, seeds: range, settings: dict[str, Any]) -> set[str]:
    """A job of a pool: the operations of these programs, which all ranks run alike."""
    operations = set[str]()
    for seed in seeds:
        torch.manual_seed(1)
        model = zo.offload(FourLayers(WIDTH), zo.OffloadConfig(precision="fp32", **settings))
        defers = settings["stage"] == 1
        operations |= {*Program(model, seed, device="cpu", in_memory=False, num_ranks=world_size, defers=defers).run()}
        zo.close(model)
    return operations
