"""`param.data = values` and its kin: taken where a program may write or where no value changes, else an error."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector, parametrize, prune, vector_to_parameters

import zero_offload as zo
from tests.helpers.models import NARROW, Block, TinyLM, build, tokens_of
from tests.helpers.pairwise import in_turn
from tests.helpers.reference import read_masters
from tests.helpers.twins import assert_same, run_offloaded, train

NAME = "blocks.0.up.weight"
PLACES = ("cpu-fp32", "cpu-bf16", "nvme-fp32", "nvme-bf16")


def config_of(place: str, nvme: Path) -> zo.OffloadConfig:
    tier, precision = place.split("-")
    if tier == "cpu":
        return zo.OffloadConfig(params="cpu", optimizer="cpu", precision=precision)
    kinds = {"params": "nvme", "optimizer": "nvme", "nvme": nvme, "durability": "scratch", "device_memory": "8MiB"}
    return zo.OffloadConfig(precision=precision, **kinds)


def halved(values: Tensor) -> Tensor:
    return values.detach() * 0.5


WRITES: dict[str, Callable[[nn.Parameter], Any]] = {
    "data": lambda p: setattr(p, "data", halved(p)),
    "transposed memory": lambda p: setattr(p, "data", halved(p).t().contiguous().t()),
    "set_": lambda p: p.set_(halved(p)),
    "into data": lambda p: p.data.copy_(halved(p)),
    "vector": lambda p: vector_to_parameters(parameters_to_vector([p]).detach() * 0.5, [p]),
    "twice": lambda p: (setattr(p, "data", halved(p)), p.mul_(1.0)),
}


@in_turn(place=PLACES, write=list(WRITES))
def test_in_a_block_for_writing_it_is_written(place: str, write: str, nvme: Path) -> None:
    def losses_and_masters(write: Callable[[nn.Parameter], Any]) -> tuple[list[float], dict[str, Tensor]]:
        model = zo.offload(build(partial(TinyLM, NARROW)), config_of(place, nvme))
        optimizer = zo.AdamW(model.parameters())
        losses = list(train(model, optimizer, range(2)))
        with zo.gathered(model.blocks[0], mode="write"), torch.no_grad():
            write(model.blocks[0].up.weight)
        losses += train(model, optimizer, range(2, 5))
        masters = read_masters(model)
        zo.close(model)
        return losses, masters

    losses, masters = losses_and_masters(WRITES[write])
    in_place_losses, in_place_masters = losses_and_masters(lambda p: p.mul_(0.5))
    assert losses == in_place_losses
    assert all(torch.equal(masters[name], value) for name, value in in_place_masters.items())


@pytest.mark.parametrize("place", ["cpu-fp32", "nvme-fp32"])
def test_training_goes_on_with_it_as_in_torch(place: str, nvme: Path) -> None:
    def script(model: nn.Module, optimizer: zo.AdamW) -> Iterator[float]:
        yield from train(model, optimizer, range(2))
        weight = model.blocks[0].up.weight
        is_offloaded = type(weight) is not nn.Parameter
        with zo.gathered(model.blocks[0], mode="write") if is_offloaded else contextlib.nullcontext():
            weight.data = weight.data * 0.5
        yield from train(model, optimizer, range(2, 5))

    assert_same(script, partial(TinyLM, NARROW), config_of(place, nvme))


def test_all_bits_of_what_is_assigned_count(nvme: Path) -> None:
    """An fp32 tensor for a bf16 or fp16 parameter is its master."""
    values = torch.rand(4 * NARROW, NARROW)
    for precision in ("bf16", "fp16"):
        model = zo.offload(build(partial(TinyLM, NARROW)), zo.OffloadConfig(precision=precision))
        weight = model.blocks[0].up.weight
        with zo.gathered(model, mode="write"):
            weight.data = values.clone()
        assert torch.equal(read_masters(model)[NAME], values)
        with zo.gathered(model):
            assert torch.equal(weight, values.to(weight.dtype))


@pytest.mark.parametrize("place", PLACES)
def test_a_forward_in_a_block_for_writing_computes_with_it(place: str, nvme: Path) -> None:
    model = zo.offload(build(partial(TinyLM, NARROW)), config_of(place, nvme))
    twin = build(partial(TinyLM, NARROW)).to(model.blocks[0].up.weight.dtype)
    weight = model.blocks[0].up.weight
    with zo.gathered(model, mode="write"), torch.no_grad():
        weight.data = torch.ones(weight.shape, dtype=weight.dtype)
        twin.blocks[0].up.weight.fill_(1.0)
        assert model(tokens_of(0)).item() == twin(tokens_of(0)).item()
    assert model(tokens_of(0)).item() == twin(tokens_of(0)).item()
    assert torch.equal(read_masters(model)[NAME], torch.ones(weight.shape))


@pytest.mark.parametrize("place", ["cpu-bf16", "nvme-fp32"])
def test_values_of_another_shape_are_an_error_and_the_others_are_written(place: str, nvme: Path) -> None:
    model = zo.offload(build(partial(TinyLM, NARROW)), config_of(place, nvme))
    before = read_masters(model)
    block = model.blocks[0]
    raises = pytest.raises(zo.ConfigError, match=r"got \(3,\) for blocks\.0\.up\.weight")
    with raises, zo.gathered(block, mode="write"), torch.no_grad():
        block.up.weight.data = torch.ones(3)
        block.up.bias.fill_(1.0)
    after = read_masters(model)
    assert torch.equal(after[NAME], before[NAME]) and after["blocks.0.up.bias"].eq(1).all()
    list(train(model, zo.AdamW(model.parameters()), range(2)))


@pytest.mark.parametrize("kind", ["params", "master"])
def test_what_the_dict_is_given_is_written(kind: str) -> None:
    model = zo.offload(build(partial(TinyLM, NARROW)), zo.OffloadConfig(precision="bf16"))
    values = torch.rand(4 * NARROW, NARROW)
    with zo.gathered(model, mode="write", kind=kind) as given:
        given[NAME] = values
    assert torch.equal(read_masters(model)[NAME], values)


@pytest.mark.parametrize("place", ["cpu-fp32", "nvme-fp32"])
def test_outside_its_values_are_taken_and_its_own_data_changes_nothing(place: str, nvme: Path) -> None:
    model = zo.offload(build(partial(TinyLM, NARROW)), config_of(place, nvme))
    weight = model.blocks[0].up.weight
    weight.data = torch.ones(weight.shape)
    assert read_masters(model)[NAME].eq(1).all()
    vector = torch.rand(sum(param.numel() for param in model.parameters()))
    vector_to_parameters(vector, model.parameters())
    before = read_masters(model)
    assert torch.equal(nn.utils.parameters_to_vector(before.values()), vector)
    assert torch.equal(nn.utils.parameters_to_vector(model.parameters()), vector)
    weight.data = weight.data
    weight.data = weight.data.to("cpu")
    with torch.no_grad():
        assert weight.set_(weight) is weight
    assert all(torch.equal(value, before[name]) for name, value in read_masters(model).items())
    list(train(model, zo.AdamW(model.parameters()), range(2)))


# In forward


class Delta(nn.Module):
    def __init__(self, delta: Tensor) -> None:
        super().__init__()
        self.delta = delta

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.delta


class ComesAndGoes(Block):
    """A parametrization that a forward registers and removes, from the third forward on."""

    first = 0

    def __init__(self, dim: int) -> None:
        super().__init__(dim)
        self.small = nn.Parameter(torch.full((dim,), 0.01))
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.calls <= self.first:
            return super().forward(x) + self.small
        parametrize.register_parametrization(self.up, "weight", Delta(self.small))
        try:
            return super().forward(x)
        finally:
            parametrize.remove_parametrizations(self.up, "weight", leave_parametrized=False)


class ComesLater(ComesAndGoes):
    first = 4


class SetsEqual(Block):
    """Other memory with the same values, left there."""

    def forward(self, x: Tensor) -> Tensor:
        self.up.weight.data = self.up.weight.data.clone()
        return super().forward(x)


class Borrows(Block):
    """Other values for a moment."""

    def forward(self, x: Tensor) -> Tensor:
        own = self.up.weight.data
        with torch.no_grad():
            self.up.weight.data = own * 0.5
            aside = F.linear(x, self.up.weight).mean()
            self.up.weight.data = own
        return super().forward(x) + aside


IN_FORWARD = [ComesAndGoes, ComesLater, SetsEqual, Borrows]


def seven_steps(model: nn.Module, optimizer: zo.AdamW) -> Iterator[float]:
    yield from train(model, optimizer, range(7))


@pytest.mark.parametrize("block", IN_FORWARD)
@pytest.mark.parametrize("place", ["cpu-fp32", "nvme-fp32"])
def test_in_forward_what_changes_no_value_is_taken(place: str, block: type[Block], nvme: Path) -> None:
    assert_same(seven_steps, partial(TinyLM, NARROW, 2, block), config_of(place, nvme))


@pytest.mark.parametrize("block", [ComesAndGoes, SetsEqual, Borrows])
def test_in_forward_what_changes_no_value_is_taken_in_bf16(block: type[Block], nvme: Path) -> None:
    """On plain parameters zo.AdamW takes a new version for a new value, and the master for lost."""
    make = partial(TinyLM, NARROW, 2, block)
    there, here = (run_offloaded(seven_steps, make, config_of(f"{tier}-bf16", nvme)) for tier in ("nvme", "cpu"))
    assert there == here and there.losses[-1] < there.losses[0]


def test_in_forward_what_cannot_be_told_from_a_change_is_refused_once(nvme: Path) -> None:
    """A bf16 value that is half of its master, in a forward whose values are not looked at."""
    model = zo.offload(build(partial(TinyLM, NARROW, 2, ComesLater)), config_of("cpu-bf16", nvme))
    optimizer = zo.AdamW(model.parameters())
    list(train(model, optimizer, range(4)))
    for _ in range(2):  # each block by itself
        with pytest.raises(zo.ZeroOffloadError, match="forward has changed"):
            model(tokens_of(0))
    list(train(model, optimizer, range(4)))


class Keeps(Block):
    def forward(self, x: Tensor) -> Tensor:
        self.up.weight.data = self.up.weight.data * 0.5
        return super().forward(x)


class Scales(Block):
    first = 2

    def forward(self, x: Tensor) -> Tensor:
        self.calls = getattr(self, "calls", 0) + 1
        if self.calls > self.first:
            with torch.no_grad():
                self.up.weight.mul_(0.5)
        return super().forward(x)


@pytest.mark.parametrize("block", [Keeps, Scales])
@pytest.mark.parametrize("place", ["cpu-bf16", "nvme-fp32"])
def test_in_forward_what_changes_a_value_raises_and_leaves_the_model_whole(
    place: str, block: type[Block], nvme: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = zo.offload(build(partial(TinyLM, NARROW, 1, block)), config_of(place, nvme))
    optimizer = zo.AdamW(model.parameters())
    before = read_masters(model)
    with pytest.raises(zo.ZeroOffloadError, match=r"forward has changed blocks\.0\.up\.weight"):
        list(train(model, optimizer, range(3)))
    if block is Keeps:
        assert all(torch.equal(value, before[name]) for name, value in read_masters(model).items())
    monkeypatch.setattr(block, "forward", Block.forward)
    list(train(model, optimizer, range(2)))


# Other uses of weights by programs


@pytest.mark.parametrize("place", ["cpu-fp32", "nvme-fp32"])
def test_pruned_and_parametrized_in_a_block_for_writing(place: str, nvme: Path) -> None:
    def losses(model: nn.Module, write: Any) -> list[float]:
        optimizer = zo.AdamW(model.parameters())
        before = list(train(model, optimizer, range(2)))
        with write:
            prune.l1_unstructured(model.blocks[0].up, "weight", 0.3)
            parametrize.register_parametrization(model.blocks[1].up, "weight", nn.Tanh())
        return before + list(train(model, optimizer, range(2, 4)))

    model = zo.offload(build(partial(TinyLM, NARROW, 2)), config_of(place, nvme))
    expected = losses(build(partial(TinyLM, NARROW, 2)), contextlib.nullcontext())
    assert losses(model, zo.gathered(model, mode="write")) == expected


def test_functional_call_computes_with_what_it_is_given(nvme: Path) -> None:
    model = zo.offload(build(partial(TinyLM, NARROW)), config_of("nvme-fp32", nvme))
    plain = build(partial(TinyLM, NARROW))
    given = {name: param.detach() * 0.5 for name, param in plain.named_parameters()}
    call = torch.func.functional_call
    assert call(model, given, (tokens_of(0),)).item() == call(plain, given, (tokens_of(0),)).item()
    assert model(tokens_of(0)).item() == plain(tokens_of(0)).item()


def test_an_average_of_weights(nvme: Path) -> None:
    model = zo.offload(build(partial(TinyLM, NARROW)), config_of("nvme-fp32", nvme))
    average = {name: torch.zeros_like(param.data) for name, param in model.named_parameters()}
    with zo.gathered(model) as params, torch.no_grad():
        for name, param in params.items():
            average[name].lerp_(param, 0.1)
        kept = copy.deepcopy(dict(params))
    assert all(torch.equal(average[name], torch.zeros(()).lerp(kept[name], 0.1)) for name in average)


@pytest.mark.parametrize("tier", ["cpu", "nvme"])
@pytest.mark.parametrize("form", [lambda flat: flat, lambda flat: flat.detach().view(-1)], ids=["itself", "a view"])
def test_a_change_of_what_was_assigned_is_not_missed(tier: str, form: Callable[[Tensor], Tensor], nvme: Path) -> None:
    """In plain torch the parameters lie in the flat tensor then, and change with it."""
    model = zo.offload(build(TinyLM), zo.OffloadConfig(precision="fp32", params=tier, optimizer=tier, nvme=nvme))
    optimizer, params = zo.SGD(model.parameters(), lr=1.0), list(model.parameters())
    model(tokens_of(0)).backward()
    flat = nn.utils.parameters_to_vector(model.parameters()).detach()

    def assign() -> None:
        for param, part in zip(params, flat.split([param.numel() for param in params]), strict=True):
            param.data = part.view(param.shape)

    assign()
    assert torch.isfinite(model(tokens_of(0)))
    changed = form(flat)
    uses = (lambda: model(tokens_of(0)), optimizer.step, lambda: params[3].norm(), lambda: params[0].add_(1))
    for use in uses:
        changed.mul_(0.5)
        with torch.no_grad(), pytest.raises(zo.ZeroOffloadError, match=r"assigned to \.data of .* changed afterwards"):
            use()
        assign()
        assert torch.equal(nn.utils.parameters_to_vector(model.parameters()).detach(), flat)
    assert torch.isfinite(model(tokens_of(0)))
    zo.close(model)
