"""Programs between steps, with the bits of plain loops.

In fp32 the loop has an ordinary model. In 16 bits it has a master for each parameter, an fp32 gradient, and an ordinary
bf16 model of values rounded from masters. It changes masters, and reads values, as the page on parameters between steps
says of an offloaded model.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import swa_utils

import zero_offload as zo
from tests.helpers.models import NARROW, TinyLM, build, tokens_of
from tests.helpers.pairwise import full
from tests.helpers.reference import nearest_bf16, read_masters


class Offloaded:
    """The parameters themselves."""

    def __init__(self, model: nn.Module, settings: dict[str, Any]) -> None:
        self.model = zo.offload(model, zo.OffloadConfig(durability="scratch", **settings))
        self.changed = self.read = dict(model.named_parameters())

    def load(self, values: dict[str, Tensor]) -> None:
        self.model.load_state_dict(values)

    def copy_in(self, name: str, values: Tensor) -> None:
        self.changed[name].data.copy_(values)

    def round(self) -> None:
        """The library does it."""

    def masters(self) -> dict[str, Tensor]:
        return read_masters(self.model)


class WrittenOut:
    """The plain loop."""

    def __init__(self, model: nn.Module) -> None:
        self.changed = {name: nn.Parameter(param.detach().clone()) for name, param in model.named_parameters()}
        self.model = model.bfloat16()
        self.read = dict(model.named_parameters())
        for name, param in self.read.items():
            param.register_post_accumulate_grad_hook(partial(self._widen, self.changed[name]))

    def _widen(self, master: nn.Parameter, value: nn.Parameter) -> None:
        assert value.grad is not None
        grad, value.grad = value.grad.float(), None
        master.grad = grad if master.grad is None else master.grad + grad

    def load(self, values: dict[str, Tensor]) -> None:
        for name, master in self.changed.items():
            master.data.copy_(values[name])

    def copy_in(self, name: str, values: Tensor) -> None:
        """Elements that the parameter has already keep their master."""
        master = self.changed[name]
        master.data.copy_(torch.where(nearest_bf16(master) == values, master.detach(), values.float()))

    def round(self) -> None:
        for name, param in self.read.items():
            param.data.copy_(nearest_bf16(self.changed[name]))
            param.requires_grad_(self.changed[name].requires_grad)

    def masters(self) -> dict[str, Tensor]:
        return {name: master.detach() for name, master in self.changed.items()}


class Plain(Offloaded):
    """The plain loop in fp32."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.changed = self.read = dict(model.named_parameters())

    def masters(self) -> dict[str, Tensor]:
        return {name: param.detach() for name, param in self.changed.items()}


Twin = Offloaded | WrittenOut
Program = Callable[[Twin, zo.AdamW], Iterator[float]]


def _loss(twin: Twin, seed: int) -> Tensor:
    twin.round()
    loss: Tensor = twin.model(tokens_of(seed))
    return loss


def prune_by_magnitude(twin: Twin, optimizer: zo.AdamW) -> Iterator[float]:
    masks: dict[str, Tensor] = {}
    for seed in range(4):
        _loss(twin, seed).backward()
        for name, mask in masks.items():
            grad = twin.changed[name].grad
            assert grad is not None
            grad.mul_(mask)
        optimizer.step()
        optimizer.zero_grad()
        twin.round()
        for name, param in twin.read.items() if seed == 1 else ():
            limit = torch.quantile(param.detach().float().abs().flatten(), 0.3)
            masks[name] = (param.detach().abs() > limit).float()
        with torch.no_grad():
            for name, mask in masks.items():
                twin.changed[name].mul_(mask)
        yield _loss(twin, 9).item()


def flat_vectors(twin: Twin, optimizer: zo.AdamW) -> Iterator[float]:
    """All gradients as one vector, then all values."""
    for seed in range(3):
        _loss(twin, seed).backward()
        grads = [param.grad for param in twin.changed.values()]
        flat = torch.cat([grad.reshape(-1) for grad in grads if grad is not None]).mul_(0.3)
        for grad, part in zip(grads, flat.split([param.numel() for param in twin.changed.values()]), strict=True):
            assert grad is not None
            grad.copy_(part.view(grad.shape))
        optimizer.step()
        optimizer.zero_grad()
        twin.round()
        values = torch.cat([param.detach().reshape(-1) for param in twin.read.values()])
        values.sub_(values.mean() * 0.01)
        for name, part in zip(twin.read, values.split([each.numel() for each in twin.read.values()]), strict=True):
            twin.copy_in(name, part.view(twin.read[name].shape))
        yield _loss(twin, 9).item()


def train_a_copy(twin: Twin, optimizer: zo.AdamW) -> Iterator[float]:
    """An ordinary copy is trained for a while by torch's optimizer, and loaded back."""
    twin.round()
    model = build(partial(TinyLM, NARROW)).bfloat16()
    model.load_state_dict(copy.deepcopy(twin.model).state_dict())
    its_optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for seed in range(3):
        model(tokens_of(seed)).backward()
        its_optimizer.step()
        its_optimizer.zero_grad()
    twin.load(model.state_dict())
    for seed in range(3, 5):
        loss = _loss(twin, seed)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()


def _step(twin: Twin, optimizer: torch.optim.Optimizer, seed: int) -> None:
    _loss(twin, seed).backward()
    optimizer.step()
    optimizer.zero_grad()


def _values(twin: Twin) -> dict[str, Tensor]:
    """Copies of the values."""
    twin.round()
    return {name: param.detach().clone() for name, param in twin.read.items()}


def _grads(twin: Twin) -> list[Tensor]:
    return [param.grad for param in twin.changed.values() if param.grad is not None]


def swap_an_average_in(twin: Twin, optimizer: zo.AdamW) -> Iterator[float]:
    """For an evaluation, and back: weights of the last steps, and an exponential average."""
    average, last = _values(twin), list[dict[str, Tensor]]()
    for seed in range(3):
        _step(twin, optimizer, seed)
        own = _values(twin)
        last.append(own)
        for name, value in own.items():
            average[name] = 0.9 * average[name] + 0.1 * value
        mean = {name: torch.stack([each[name] for each in last]).mean(0) for name in own}
        for weights in (average, mean):
            for name in own:
                twin.copy_in(name, weights[name])
            yield _loss(twin, 9).item()
        for name in own:
            twin.copy_in(name, own[name])


def perturb_and_restore(twin: Twin, optimizer: zo.AdamW) -> Iterator[float]:
    """Sharpness-aware steps: once the difference is taken back, once a copy comes back."""
    for seed in range(4):
        _loss(twin, seed).backward()
        largest = torch.stack([grad.abs().max() for grad in _grads(twin)]).max()
        edges, before = [grad * (0.05 / largest) for grad in _grads(twin)], _values(twin)
        with torch.no_grad():
            for param, edge in zip(twin.changed.values(), edges, strict=True):
                param.add_(edge)
        optimizer.zero_grad()
        loss = _loss(twin, seed)
        loss.backward()
        with torch.no_grad():
            for (name, param), edge in zip(twin.changed.items(), edges, strict=True):
                param.sub_(edge) if seed % 2 else twin.copy_in(name, before[name])
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()


def project_gradients(twin: Twin, optimizer: zo.AdamW) -> Iterator[float]:
    """Those of two tasks; gradients that were read before are kept over zero_grad."""
    for seed in range(3):
        found = []
        for task in range(2):
            optimizer.zero_grad()
            _loss(twin, 2 * seed + task).backward()
            found.append(_grads(twin))
        one, other = found
        dot = sum(((x * y).sum() for x, y in zip(one, other, strict=True)), torch.zeros(()))
        square = sum(((y * y).sum() for y in other), torch.zeros(()))
        optimizer.zero_grad()
        for param, x, y in zip(twin.changed.values(), one, other, strict=True):
            param.grad = x + y if seed % 2 else x - (dot / square) * y + y
        optimizer.step()
        optimizer.zero_grad()
        yield dot.item()


def edit_gradients(twin: Twin, optimizer: zo.AdamW) -> Iterator[float]:
    noise = torch.Generator().manual_seed(1)
    for seed in range(3):
        for half in range(2):
            (_loss(twin, 2 * seed + half) / 2).backward()
            for grad in _grads(twin) if half == 0 else ():
                grad.add_(torch.randn(grad.shape, generator=noise), alpha=1e-3)
        for grad in _grads(twin):
            if grad.dim() > 1:
                grad -= grad.mean(dim=1, keepdim=True)
        table, matrix, bias = (
            twin.changed[name].grad for name in ("embedding.weight", "blocks.0.up.weight", "norm.bias")
        )
        assert table is not None and matrix is not None and bias is not None
        table[0] = 0
        matrix[:, ::2] *= 0.5
        bias.sign_()
        optimizer.step()
        optimizer.zero_grad()
        yield _loss(twin, 9).item()


def start_units_anew(twin: Twin, optimizer: zo.AdamW) -> Iterator[float]:
    """Dead units get new weights, and their rows of moments are zeros; a layer begins again, without states."""
    up, down, bias = (twin.changed[f"blocks.0.{name}"] for name in ("up.weight", "down.weight", "up.bias"))
    layer = twin.changed["blocks.1.up.weight"]
    for seed in range(5):
        _step(twin, optimizer, seed)
        if seed == 1:
            twin.round()
            dead = twin.read["blocks.0.up.weight"].detach().abs().sum(1) < 5
            torch.manual_seed(3)
            with torch.no_grad():
                up[dead] = torch.randn(int(dead.sum()), up.shape[1]) * 0.1
                bias[dead] = 0
                down[:, dead] = 0
            for moment in ("exp_avg", "exp_avg_sq"):
                optimizer.state[up][moment][dead] = 0
        if seed == 2:
            torch.manual_seed(4)
            nn.init.kaiming_uniform_(layer, a=5**0.5)
            optimizer.state.pop(layer)
        if seed == 3:
            with torch.no_grad():
                for param in twin.changed.values():
                    optimizer.state[param]["exp_avg"].mul_(0.5)
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        yield _loss(twin, 9).item()


def shrink_and_perturb(twin: Twin, optimizer: zo.AdamW) -> Iterator[float]:
    noise = torch.Generator().manual_seed(5)
    for seed in range(3):
        _step(twin, optimizer, seed)
        with torch.no_grad():
            for param in twin.changed.values():
                param.mul_(0.9).add_(torch.randn(param.shape, generator=noise), alpha=1e-2)
            torch._foreach_mul_(list(twin.changed.values()), 0.999)
        yield _loss(twin, 9).item()


def freeze_in_turns(twin: Twin, optimizer: zo.AdamW) -> Iterator[float]:
    for seed in range(6):
        for name, param in twin.changed.items():
            param.requires_grad_(not name.startswith(f"blocks.{seed % 3}."))
        _step(twin, optimizer, seed)
        yield _loss(twin, 9).item()


def drop_layers(twin: Twin, optimizer: zo.AdamW) -> Iterator[float]:
    """Blocks that the forward left out have no gradient."""
    model: Any = twin.model
    blocks = model.blocks
    for seed in range(4):
        model.blocks = nn.ModuleList(block for index, block in enumerate(blocks) if index != seed % 3)
        _step(twin, optimizer, seed)
        model.blocks = blocks
        yield _loss(twin, 9).item()


def go_back_to_the_best(twin: Twin, optimizer: zo.AdamW) -> Iterator[float]:
    """A state dict that is kept comes back; then states between two."""
    kept = []
    for seed in range(4):
        _step(twin, optimizer, seed)
        loss = _loss(twin, 9).item()
        kept.append((loss, copy.deepcopy(twin.model.state_dict())))
        yield loss
    best, last = min(kept, key=lambda each: each[0])[1], kept[-1][1]
    for share in (0.25, 1.0):
        twin.load({name: torch.lerp(last[name], best[name], share) for name in best})
        yield _loss(twin, 9).item()
    _step(twin, optimizer, 5)
    yield _loss(twin, 9).item()


def step_in_turns(twin: Twin, optimizer: zo.AdamW) -> Iterator[float]:
    """Two optimizers, of which one steps every second time."""
    ends = [param for name, param in twin.changed.items() if not name.startswith("blocks.")]
    blocks = [param for name, param in twin.changed.items() if name.startswith("blocks.")]
    one, other = zo.AdamW(ends, lr=1e-2), zo.SGD(blocks, lr=1e-2, momentum=0.9)
    for seed in range(4):
        _loss(twin, seed).backward()
        one.step()
        one.zero_grad()
        if seed % 2:
            other.step()
            other.zero_grad()
        yield _loss(twin, 9).item()


def outer_loops(twin: Twin, optimizer: zo.AdamW) -> Iterator[float]:
    """Of Reptile, whose inner optimizer is a new one each time; and of Lookahead, with slow weights in fp32."""
    slow = {name: value.float() for name, value in _values(twin).items()}
    for outer in range(3):
        before, inner = _values(twin), zo.SGD(twin.changed.values(), lr=0.1)
        for seed in range(2):
            _step(twin, inner, 2 * outer + seed)
        with torch.no_grad():
            for name, param in twin.changed.items():
                param.sub_(before[name]).mul_(0.5).add_(before[name])
        for name, value in _values(twin).items():
            slow[name] += 0.5 * (value.float() - slow[name])
        with torch.no_grad():
            for name, param in twin.changed.items() if outer == 1 else ():
                param.copy_(slow[name])
        yield _loss(twin, 9).item()


def gradients_by_hand(twin: Twin, optimizer: zo.AdamW) -> Iterator[float]:
    """The sum of three batches by torch.autograd.grad, assigned."""
    for seed in range(3):
        sums = {name: torch.zeros(param.shape) for name, param in twin.changed.items()}
        for part in range(3):
            found = torch.autograd.grad(_loss(twin, 3 * seed + part), list(twin.read.values()))
            for name, grad in zip(sums, found, strict=True):
                sums[name] += grad.float() / 3
        for name, param in twin.changed.items():
            param.grad = sums[name].to(twin.read[name].dtype).to(param.dtype)
        optimizer.step()
        optimizer.zero_grad()
        yield _loss(twin, 9).item()


def stay_near(twin: Twin, optimizer: zo.AdamW) -> Iterator[float]:
    """A penalty on the distance from old values, weighted by squares of gradients, beside the loss."""
    old = _values(twin)
    _loss(twin, 7).backward()
    weights = {name: param.grad.square() for name, param in twin.changed.items() if param.grad is not None}
    optimizer.zero_grad()
    for seed in range(3):
        loss = _loss(twin, seed)
        for name, param in twin.read.items():
            loss = loss + 10 * (weights[name] * (param - old[name]).float().square()).sum() + 1e-3 * param.abs().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()


def gradient_penalty(twin: Twin, optimizer: zo.AdamW) -> Iterator[float]:
    for seed in range(2):
        loss = _loss(twin, seed)
        grads = torch.autograd.grad(loss, list(twin.read.values()), create_graph=True)
        loss = loss + 0.1 * torch.stack([grad.float().square().sum() for grad in grads]).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()


def follow_with_targets(twin: Twin, optimizer: zo.AdamW) -> Iterator[float]:
    """An ordinary target network moves a little, and sometimes all the way; the loss has its output."""
    twin.round()
    target: Any = copy.deepcopy(twin.model)
    for seed in range(4):
        with torch.no_grad():
            wanted = target(tokens_of(seed)).float()
        loss = (_loss(twin, seed) - 0.9 * wanted).square()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        twin.round()
        if seed == 2:
            target.load_state_dict(twin.model.state_dict())
        with torch.no_grad():
            for theirs, ours in zip(target.parameters(), twin.model.parameters(), strict=True):
                theirs.mul_(0.9).add_(ours, alpha=0.1)
        yield loss.item()


def merge_an_adapter(twin: Twin, optimizer: zo.AdamW) -> Iterator[float]:
    """Its product is added for an evaluation, and taken away."""
    drawn = torch.Generator().manual_seed(1)
    weight = twin.changed["blocks.0.up.weight"]
    for seed in range(3):
        _step(twin, optimizer, seed)
        delta = torch.randn(weight.shape[0], 2, generator=drawn) @ torch.randn(2, weight.shape[1], generator=drawn)
        weight.data += delta * 0.1
        yield _loss(twin, 9).item()
        weight.data -= delta * 0.1


def index(twin: Twin, optimizer: zo.AdamW) -> Iterator[float]:
    table, matrix = twin.changed["embedding.weight"], twin.changed["blocks.0.up.weight"]
    bias = twin.changed["blocks.0.up.bias"]
    for seed in range(3):
        _step(twin, optimizer, seed)
        twin.round()
        small = twin.read["blocks.0.up.weight"].detach().abs() < 0.02
        rows = twin.read["embedding.weight"].detach()[torch.tensor([3, 4])].to(table.dtype)
        with torch.no_grad():
            table[torch.tensor([1, 2])] = rows
            table.index_add_(0, torch.tensor([0, 5]), torch.ones(2, table.shape[1]) * 0.01)
            matrix.masked_fill_(small, 0.0)
            matrix.T.mul_(0.99)
            matrix.diagonal().add_(0.01)
            bias.view(4, -1)[1] = 0
            bias.data.clamp_(-0.05, 0.05)
        yield _loss(twin, 9).item()


def divide_by_spectral_norms(twin: Twin, optimizer: zo.AdamW) -> Iterator[float]:
    for seed in range(3):
        _step(twin, optimizer, seed)
        values = _values(twin)
        with torch.no_grad():
            for name, param in twin.changed.items():
                if param.dim() > 1:
                    param.div_(torch.linalg.matrix_norm(values[name].float(), 2).clamp(min=0.5))
                    param.data.renorm_(2, 0, 0.5)
        yield _loss(twin, 9).item()


def average_models(twin: Twin, optimizer: zo.AdamW) -> Iterator[float]:
    """torch's own averages."""
    twin.round()
    means = [
        swa_utils.AveragedModel(twin.model),
        swa_utils.AveragedModel(twin.model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.9)),
    ]
    for seed in range(3):
        _step(twin, optimizer, seed)
        twin.round()
        for mean in means:
            mean.update_parameters(twin.model)
            with torch.no_grad():
                yield mean(tokens_of(9)).item()


PROGRAMS = (
    *(prune_by_magnitude, flat_vectors, train_a_copy, swap_an_average_in, perturb_and_restore, project_gradients),
    *(edit_gradients, start_units_anew, shrink_and_perturb, freeze_in_turns, drop_layers, go_back_to_the_best),
    *(step_in_turns, outer_loops, gradients_by_hand, stay_near, gradient_penalty, follow_with_targets),
    *(merge_an_adapter, index, divide_by_spectral_norms, average_models),
)


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize(
    ("precision", "tier"), [("bf16", "cpu"), ("bf16", "nvme"), ("fp32", "nvme"), full("fp32", "cpu")]
)
def test_a_program_has_the_bits_of_a_plain_loop(precision: str, tier: str, program: Program, nvme: Path) -> None:
    settings = {"params": tier, "grads": tier, "optimizer": tier, "nvme": nvme, "precision": precision}
    found = []
    for make in (WrittenOut if precision == "bf16" else Plain, partial(Offloaded, settings=settings)):
        model = build(partial(TinyLM, NARROW))
        for param in model.parameters():
            param.data = param.data.bfloat16().float()
        twin = make(model)
        figures = list(program(twin, zo.AdamW(twin.changed.values(), lr=1e-2)))
        found.append((figures, {name: value.clone() for name, value in twin.masters().items()}))
    zo.close(twin.model)
    (figures, masters), (expected, its_masters) = found[1], found[0]
    assert figures == expected
    assert all(torch.equal(masters[name], value) for name, value in its_masters.items())


@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_a_clip_by_value_has_a_limit_of_the_gradients_dtype(tier: str, nvme: Path) -> None:
    """As in a plain bf16 model. An edit makes the gradient fp32."""
    plain: Any = build(partial(TinyLM, NARROW)).bfloat16()
    settings = {"params": "cpu", "grads": tier, "optimizer": "cpu", "nvme": nvme, "precision": "bf16"}
    model: Any = Offloaded(build(partial(TinyLM, NARROW)), settings).model
    for edit, limit in ((lambda grad: grad, torch.tensor(0.01).bfloat16().item()), (lambda grad: grad.add_(0), 0.01)):
        found = []
        for each in (plain, model):
            each.zero_grad()
            each(tokens_of(0)).backward()
            grad = each.head.weight.grad
            assert grad.abs().max() > 0.011
            if each is model:
                edit(grad)
            nn.utils.clip_grad_value_(each.parameters(), 0.01)
            found.append(each.head.weight.grad.float().clone())
        assert found[1].max() == torch.tensor(limit)
        is_cut = found[0].abs() == torch.tensor(0.01).bfloat16().float()
        assert torch.equal(found[0][~is_cut], found[1][~is_cut])
        assert (found[1].abs()[is_cut] == torch.tensor(limit)).all()
    zo.close(model)
