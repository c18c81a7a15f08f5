"""The uses of `zo.gathered`: a program reads, and changes the named parameters in mode="write"."""

from __future__ import annotations

import copy
import io
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero_offload as zo
from tests.helpers.models import NARROW, TinyLM, build, tokens_of
from tests.helpers.pairwise import in_turn
from tests.helpers.reference import read_masters
from tests.helpers.twins import train
from zero_offload.model.api import runtime_of

Model = partial(TinyLM, NARROW)
NAME = "blocks.0.up.weight"
WRITES: dict[str, Callable[[nn.Parameter], Any]] = {
    "in place": lambda p: p.zero_(),
    "augmented": lambda p: p.__iadd__(1),
    "item": lambda p: p.__setitem__(0, 1.0),
    "data": lambda p: p.data.normal_(),
    "set data": lambda p: setattr(p, "data", torch.zeros(p.shape, dtype=p.dtype)),
    "detached": lambda p: p.detach().copy_(torch.ones(p.shape)),
    "row": lambda p: p[0].zero_(),
    "view of a view": lambda p: p.view(-1)[3:7].fill_(1.0),
    "one of several": lambda p: p.chunk(2)[1].zero_(),
    "iterated": lambda p: [row.zero_() for row in p],
    "out": lambda p: torch.add(p, 1, out=p),
    "out of a view": lambda p: torch.neg(p, out=p.detach()),
    "foreach": lambda p: torch._foreach_mul_([p.data, p.data[0]], 2.0),
    "init": lambda p: nn.init.normal_(p),
}


def settings_of(place: str, nvme: Path) -> dict[str, Any]:
    if place == "nvme":
        return {"params": "nvme", "optimizer": "nvme", "nvme": nvme, "durability": "scratch"}
    return {"params": place}


def trained(precision: str, **settings: Any) -> tuple[TinyLM, zo.AdamW]:
    model = zo.offload(build(Model), zo.OffloadConfig(precision=precision, **settings))
    assert isinstance(model, TinyLM)
    optimizer = zo.AdamW(model.parameters())
    list(train(model, optimizer, range(2)))
    return model, optimizer


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return all(torch.equal(found[name], expected[name]) for name in expected)


@in_turn(place=["cpu", "nvme"], write=list(WRITES))
def test_a_write_in_a_block_for_reading_is_made_where_the_parameter_rests(place: str, write: str, nvme: Path) -> None:
    model, optimizer = trained("bf16", **settings_of(place, nvme))
    expected = nn.Parameter(read_masters(model)[NAME])
    with zo.gathered(model) as params, torch.no_grad():
        torch.manual_seed(0)
        WRITES[write](model.blocks[0].up.weight)
        torch.manual_seed(0)
        WRITES[write](expected)
        assert torch.equal(params[NAME].clone(), expected.bfloat16())
    assert torch.equal(read_masters(model)[NAME], expected)
    list(train(model, optimizer, [2]))
    again, its_optimizer = trained("bf16")
    with torch.no_grad():
        again.blocks[0].up.weight.copy_(expected)
    list(train(again, its_optimizer, [2]))
    assert same(read_masters(model), read_masters(again))
    zo.close(model)


@pytest.mark.parametrize("write", ["detached", "row", "one of several", "iterated", "out of a view"])
def test_a_view_of_what_is_always_in_memory_changes_the_master(write: str) -> None:
    model, _ = trained("bf16")
    expected = nn.Parameter(read_masters(model)[NAME])
    with torch.no_grad():
        WRITES[write](model.blocks[0].up.weight)
        WRITES[write](expected)
    assert torch.equal(read_masters(model)[NAME], expected)


@pytest.mark.parametrize("place", ["cpu", "nvme"])
def test_an_array_of_a_parameter_is_for_reading(place: str, nvme: Path) -> None:
    model, _ = trained("fp32", **settings_of(place, nvme))
    with zo.gathered(model):
        weight = model.blocks[0].up.weight.detach()
        assert weight.numpy()[0, 0] == weight[0, 0].item()
        for array in (weight.numpy(), weight[1:].numpy(), weight.__array__()):
            with pytest.raises(ValueError, match="read-only"):
                array[0] = 1.0
        weight.clone().numpy()[0] = 1.0
        weight.double().numpy()[0] = 1.0
    zo.close(model)


@pytest.mark.parametrize("place", ["cpu", "nvme"])
def test_what_is_read_is_computed_with_and_copied_like_any_tensor(place: str, nvme: Path) -> None:
    model, _ = trained("bf16", **settings_of(place, nvme))
    average = torch.zeros(4 * NARROW, NARROW)
    with zo.gathered(model) as params, torch.no_grad():
        weight = params[NAME]
        assert weight is model.blocks[0].up.weight
        average.lerp_(weight.float(), 0.5).add_(weight).mul_(weight.data)
        assert type(weight @ weight.t()) is Tensor and type(weight.t() @ weight) is Tensor
        assert torch.cat(list(weight)).numel() == weight.numel()
        expected = weight.clone()
        file = io.BytesIO()
        torch.save({"param": weight, "view": weight.data[1]}, file)
        copies = [copy.deepcopy(weight), copy.deepcopy(weight.data)]
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    assert isinstance(copies[0], nn.Parameter) and type(copies[0]) is type(saved["param"]) is nn.Parameter
    assert all(torch.equal(each, expected) for each in (*copies, saved["param"]))
    assert type(saved["view"]) is Tensor and torch.equal(saved["view"], expected[1])
    full = expected.float()
    assert torch.equal(average, (full / 2 + full) * full)
    zo.close(model)


@pytest.mark.parametrize("mode", ["read", "write"])
@pytest.mark.parametrize("kind", ["params", "master"])
def test_an_exception_inside_is_the_programs_own(kind: str, mode: str) -> None:
    model, _ = trained("bf16")
    error = RuntimeError("mine")
    with pytest.raises(RuntimeError) as caught, zo.gathered(model, mode=mode, kind=kind):
        raise error
    assert caught.value is error


@pytest.mark.parametrize("place", ["cpu", "nvme"])
def test_what_was_written_before_an_exception_stays_whole(place: str, nvme: Path) -> None:
    model, optimizer = trained("bf16", **settings_of(place, nvme))
    with pytest.raises(RuntimeError, match="mine"), zo.gathered(model, mode="write"), torch.no_grad():
        model.blocks[0].up.weight.fill_(0.3)
        raise RuntimeError("mine")
    assert torch.equal(read_masters(model)[NAME], torch.full((4 * NARROW, NARROW), 0.3).bfloat16().float())
    list(train(model, optimizer, [2]))
    assert all(torch.isfinite(master).all() for master in read_masters(model).values())
    zo.close(model)


def test_half_of_a_change_is_not_committed(nvme: Path) -> None:
    model, optimizer = trained("bf16", nvme=nvme, commit_every=10)
    zo.commit(model, optimizer)
    with pytest.raises(RuntimeError, match="mine"), zo.gathered(model, mode="write"), torch.no_grad():
        model.blocks[0].up.weight.fill_(0.3)
        raise RuntimeError("mine")
    with pytest.warns(UserWarning, match="step 2 is not made a generation"):
        zo.close(model)


@pytest.mark.parametrize("place", ["cpu", "nvme"])
def test_only_what_is_named_can_be_written(place: str, nvme: Path) -> None:
    model, _ = trained("bf16", **settings_of(place, nvme))
    before = read_masters(model)
    weight, bias = model.blocks[0].up.weight, model.blocks[0].up.bias
    with zo.gathered([weight], mode="write"), torch.no_grad():
        weight.zero_()
        with pytest.raises(zo.ZeroOffloadError, match=r"parameter blocks\.0\.up\.bias"):
            bias.zero_()
        with zo.gathered(model):
            assert not weight.any() and bias.any()
        weight.add_(1)
    after = read_masters(model)
    assert torch.equal(after.pop(NAME), torch.ones(4 * NARROW, NARROW))
    assert all(torch.equal(after[name], before[name]) for name in after)
    zo.close(model)


@pytest.mark.parametrize("place", ["cpu", "nvme"])
def test_a_step_inside_is_seen(place: str, nvme: Path) -> None:
    model, optimizer = trained("fp32", **settings_of(place, nvme))
    with zo.gathered(model) as params:
        list(train(model, optimizer, [2]))
        found = {name: param.detach().clone() for name, param in params.items()}
    assert same(found, read_masters(model))
    zo.close(model)


def test_gradients_on_a_drive_are_read_once_and_not_written(nvme: Path) -> None:
    settings = {"params": "nvme", "grads": "nvme", "optimizer": "nvme", "nvme": nvme, "durability": "scratch"}
    model = zo.offload(build(Model), zo.OffloadConfig(precision="fp32", **settings))
    model(tokens_of(0)).backward()
    runtime = runtime_of(model)
    runtime.grads.begin_forward()  # what leaves is on the drive
    before = runtime.store.counters.snapshot()
    with zo.gathered(model, kind="grads") as grads:
        total = sum(grad.nbytes for grad in grads.values())
    after = runtime.store.counters.snapshot()
    assert after["written.nvme"] == before["written.nvme"]
    # Each section once, with what rounds it up.
    assert total <= after["read.nvme"] - before["read.nvme"] < 2 * total
    plain = build(Model)
    plain(tokens_of(0)).backward()
    assert same(grads, {name: param.grad for name, param in plain.named_parameters() if param.grad is not None})
    zo.close(model)


@pytest.mark.parametrize("kind", ["params", "master"])
def test_names_come_in_the_order_of_the_model(kind: str) -> None:
    model = build(Model)
    for name, param in model.named_parameters():
        param.requires_grad_("bias" not in name)  # frozen ones are sections of their own
    zo.offload(model, zo.OffloadConfig())
    with zo.gathered(model, kind=kind) as values:
        assert list(values) == [name for name, _ in model.named_parameters()]


class Filters(nn.Module):
    """A filter that lies in another order than its dimensions say, beside the model."""

    def __init__(self) -> None:
        super().__init__()
        self.lm = Model()
        self.conv = nn.Conv2d(2, 4, 3).to(memory_format=torch.channels_last)

    def forward(self, tokens: Tensor) -> Tensor:
        loss: Tensor = self.lm(tokens)
        return (
            loss
            + self.conv(tokens.view(2, 1, 3, 3).expand(2, 2, 3, 3).to(self.conv.weight.dtype)).float().square().mean()
        )


@pytest.mark.parametrize("way", ["block", "copied", "assigned"])
@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("place", ["cpu", "nvme"])
def test_values_that_a_write_leaves_as_they_are_keep_their_masters(
    place: str, precision: str, way: str, nvme: Path
) -> None:
    model = zo.offload(build(Filters), zo.OffloadConfig(precision=precision, **settings_of(place, nvme)))
    list(train(model, zo.AdamW(model.parameters(), lr=1e-2 if precision != "fp16" else 1e-4), range(2)))
    before = read_masters(model)
    kept = {name: param.detach().clone() for name, param in model.named_parameters()}
    changed = {"lm.blocks.0.up.weight": 3, "conv.weight": 1, "lm.embedding.weight": 0}
    with torch.no_grad():
        if way == "block":
            with zo.gathered(model, mode="write") as given:
                for name, row in changed.items():
                    given[name][row].fill_(0.37)
                given["lm.blocks.1.norm.bias"].data = kept["lm.blocks.1.norm.bias"].clone()
        for name, param in model.named_parameters() if way != "block" else ():
            if name in changed:
                kept[name][changed[name]] = 0.37
            if way == "copied":
                param.copy_(kept[name])
            else:
                param.data = kept[name]
    after, expected = read_masters(model), before
    for name, row in changed.items():
        expected[name][row] = kept[name].new_full((), 0.37).float()
    assert same(after, expected)
    assert all(
        torch.equal(param.detach().clone(), after[name].to(param.dtype)) for name, param in model.named_parameters()
    )
    list(train(model, zo.AdamW(model.parameters(), lr=1e-4), range(2, 4)))
    zo.close(model)


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_a_swap_and_back_says_what_it_costs(precision: str, nvme: Path) -> None:
    model, _ = trained(precision, **settings_of("nvme", nvme))
    before, stored = read_masters(model), [param.detach().cpu().clone() for param in model.parameters()]

    def swap() -> None:
        with torch.no_grad():
            for param in model.parameters():
                param.data.copy_(torch.zeros(param.shape))
            model(tokens_of(0))
            for param, values in zip(model.parameters(), stored, strict=True):
                param.data.copy_(values)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        swap()
        swap()
    said = [str(each.message) for each in caught if "16-bit values that are not its own" in str(each.message)]
    after = read_masters(model)
    if precision == "fp32":
        assert said == [] and same(after, before)
    else:
        assert len(said) == 1 and "zo.copy(model, config)" in said[0] and "embedding.weight" in said[0]
        assert same(after, {name: value.bfloat16().float() for name, value in before.items()})
    # With masters in the place of values nothing is lost.
    with zo.gathered(model, kind="master") as masters:
        backup = {name: value.clone() for name, value in masters.items()}
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.zero_().copy_(backup[name])
    assert same(read_masters(model), after)
    zo.close(model)
