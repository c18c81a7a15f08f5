"""Steps that take some of the parameters, and clipping by value: bit for bit what a plain model does."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero_offload as zo
from tests.helpers.models import TinyLM, build, tokens_of
from tests.helpers.pairwise import full, in_turn
from tests.helpers.ranks import UNEVEN, RankPool, read_params
from tests.helpers.reference import placed
from tests.helpers.scripts import Average, Script, check, clip_norm, run_both, run_offloaded, run_plain
from zero_offload.runtime.grads import section
from zero_offload.storage.shards import grad_store

Rows = Callable[[int], Tensor]
NUM_STEPS = 4
make = partial(TinyLM, UNEVEN)

TIERS: dict[str, dict[str, Any]] = {
    "cpu": {},
    "nvme": {"params": "nvme", "grads": "nvme", "optimizer": "nvme", "device_memory": "10MiB"},
    "mixed": {"params": {"cpu": 0.5, "nvme": 0.5}, "grads": {"device": 0.5, "nvme": 0.5}, "optimizer": "nvme"},
}


@pytest.fixture(params=["cpu", "nvme", full("mixed")])
def settings(request: pytest.FixtureRequest, nvme: Path) -> dict[str, Any]:
    return TIERS[request.param] | {"nvme": nvme}


def adamw(params: Any, lr: float = 1e-2) -> zo.AdamW:
    return zo.AdamW(params, lr=lr, weight_decay=0.1)


def backward(model: nn.Module, rows: Rows, step: int, average: Average) -> float:
    loss = model(rows(step))
    loss.backward()
    average(model)
    return loss.item()


# Clipping by value


def by_value(model: nn.Module, rows: Rows, average: Average) -> Iterator[float]:
    optimizer = adamw(model.parameters())
    for step in range(NUM_STEPS):
        yield backward(model, rows, step, average)
        zo.clip_grad_value_(model, 0.01)
        optimizer.step()
        optimizer.zero_grad()


def by_value_in_part(model: nn.Module, rows: Rows, average: Average) -> Iterator[float]:
    """Some parameters of a section, one alone, and what has no gradient."""
    optimizer = adamw(model.parameters())
    zo.clip_grad_value_(model, 0.1)
    for step in range(NUM_STEPS):
        yield backward(model, rows, step, average)
        zo.clip_grad_value_([model.blocks[0].up.weight, model.blocks[0].norm.bias], 0.003)
        zo.clip_grad_value_(model.norm.weight, 0.001)
        zo.clip_grad_value_(model.blocks[1], 0.002)
        optimizer.step()
        optimizer.zero_grad()


def value_then_backward(model: nn.Module, rows: Rows, average: Average) -> Iterator[float]:
    """Clipped gradients are added to and clipped again."""
    optimizer = adamw(model.parameters())
    for step in range(NUM_STEPS):
        for micro in range(2):
            loss = model(rows(2 * step + micro))
            if micro == 0:
                loss.backward()
                average(model)
                zo.clip_grad_value_(model, 0.002)
            else:
                # Of the plain model only what is new is averaged.
                held = {p: p.grad for p in model.parameters() if _is_plain(p)}
                for param in held:
                    param.grad = None
                loss.backward()
                average(model)
                for param, grad in held.items():
                    param.grad = grad.add_(param.grad) if grad is not None else param.grad
            yield loss.item()
        zo.clip_grad_value_(model, 0.003)
        optimizer.step()
        optimizer.zero_grad()


def _is_plain(param: nn.Parameter) -> bool:
    return type(param) is nn.Parameter


def value_then_norm(model: nn.Module, rows: Rows, average: Average) -> Iterator[float]:
    optimizer = adamw(model.parameters())
    for step in range(NUM_STEPS):
        yield backward(model, rows, step, average)
        zo.clip_grad_value_(model, 0.01)
        yield clip_norm(list(model.parameters()), 0.1, model)
        optimizer.step()
        optimizer.zero_grad()


def norm_then_value(model: nn.Module, rows: Rows, average: Average) -> Iterator[float]:
    optimizer = adamw(model.parameters())
    for step in range(NUM_STEPS):
        yield backward(model, rows, step, average)
        yield clip_norm(list(model.parameters()), 0.1, model)
        zo.clip_grad_value_(model, 0.001)
        yield clip_norm(list(model.parameters()), 1e9, model)
        optimizer.step()
        optimizer.zero_grad()


def norms_of_parts(model: nn.Module, rows: Rows, average: Average) -> Iterator[float]:
    """Parts are clipped apart, and a backward follows before the step."""
    optimizer = adamw(model.parameters())
    for step in range(NUM_STEPS):
        yield backward(model, rows, 2 * step, average)
        for block in model.blocks:
            yield clip_norm(list(block.parameters()), 0.05, model)
        yield backward(model, rows, 2 * step + 1, average)
        optimizer.step()
        optimizer.zero_grad()


def norm_of_the_rest(model: nn.Module, rows: Rows, average: Average) -> Iterator[float]:
    """Of the gradients of a backward, one is dropped, and a step takes others, before the norm of those left."""
    params = list(model.parameters())
    first, others = adamw(params[:3]), adamw(params[3:])
    for step in range(NUM_STEPS):
        yield backward(model, rows, step, average)
        params[-1].grad = None
        yield clip_norm(params[:-1], 1e9, model)
        first.step()
        first.zero_grad()
        yield clip_norm(params[3:-1], 0.1, model)
        others.step()
        others.zero_grad()


CLIPPING: list[Script] = [
    by_value,
    by_value_in_part,
    value_then_backward,
    value_then_norm,
    norm_then_value,
    norms_of_parts,
    norm_of_the_rest,
]


@pytest.mark.parametrize("script", CLIPPING)
def test_clipping_on_one_rank(script: Script, settings: dict[str, Any]) -> None:
    check(run_offloaded(script, make, zo.OffloadConfig(precision="fp32", **settings)), run_plain(script, make))


@in_turn(script=[by_value, by_value_in_part, value_then_backward], stage=[3, 1, 0, 2], tier=["nvme", "cpu", "mixed"])
def test_clipping_by_value_on_two_ranks(script: Script, stage: int, tier: str, pool: RankPool, nvme: Path) -> None:
    for found, expected in pool.succeed(run_both, script, make, TIERS[tier] | {"nvme": nvme, "stage": stage}):
        check(found, expected)


@in_turn(script=[norm_of_the_rest, value_then_norm, norm_then_value], stage=[3, 1, 2, 0])
def test_both_clippings_on_two_ranks(script: Script, stage: int, pool: RankPool, nvme: Path) -> None:
    """Norms are added up over ranks in another order: equal among placements, close to the plain model's."""
    in_memory = pool.succeed(run_both, script, make, {"stage": stage})
    on_disk = pool.succeed(run_both, script, make, {"stage": stage, "nvme": nvme} | TIERS["nvme"])
    for (found, expected), (other, _) in zip(in_memory, on_disk, strict=True):
        check(other, found)
        assert found[0] == pytest.approx(expected[0], rel=1e-5)


def test_bf16_gradients_are_clipped_as_torch_clips_them(nvme: Path) -> None:
    """0.01 is no bf16 number: elements become the nearest one, as in a plain bf16 model."""

    def script(model: nn.Module, rows: Rows, average: Average) -> Iterator[float]:
        optimizer = adamw(model.parameters())
        for step in range(NUM_STEPS):
            yield backward(model, rows, step, average)
            zo.clip_grad_value_(model, 0.01)
            optimizer.step()
            optimizer.zero_grad()

    def of_bf16_values() -> nn.Module:
        model = make()
        for param in model.parameters():
            param.data = param.data.bfloat16().float()
        return model

    for each in TIERS.values():
        found = run_offloaded(script, of_bf16_values, zo.OffloadConfig(nvme=nvme, existing="discard", **each))
        check(found, run_plain(script, of_bf16_values, dtype=torch.bfloat16))


@pytest.mark.parametrize("script", [by_value, value_then_backward, norm_then_value])
def test_gradients_kept_where_autograd_made_them(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grad_store, "LARGE_BYTES", 0)
    check(run_offloaded(script, make, zo.OffloadConfig(precision="fp32")), run_plain(script, make))


@pytest.mark.parametrize("grads", ["cpu", "device", "nvme"])
def test_torchs_own_function_works_after_ours(grads: str, nvme: Path) -> None:
    def script(model: nn.Module, rows: Rows, average: Average) -> Iterator[float]:
        optimizer = adamw(model.parameters())
        for step in range(NUM_STEPS):
            yield backward(model, rows, step, average)
            yield clip_norm(list(model.parameters()), 0.1, model)
            nn.utils.clip_grad_value_(model.parameters(), 0.001)
            optimizer.step()
            optimizer.zero_grad()

    check(run_offloaded(script, make, placed("fp32", ("cpu", grads, "cpu"), nvme)), run_plain(script, make))


def test_what_is_clipped_is_seen_clipped() -> None:
    """By a second norm, and by a look at the gradients."""
    model, plain = zo.offload(build(make), zo.OffloadConfig(precision="fp32")), build(make)
    for each in (model, plain):
        each(tokens_of(0)).backward()
    for max_norm in (0.1, 0.05, 1.0):
        expected = nn.utils.clip_grad_norm_(plain.parameters(), max_norm).item()
        assert zo.clip_grad_norm_(model, max_norm).item() == pytest.approx(expected, rel=1e-6)
    with zo.gathered(model, kind="grads") as grads:
        for name, param in plain.named_parameters():
            torch.testing.assert_close(grads[name], param.grad, rtol=1e-5, atol=1e-8)


def test_infinite_gradients_clipped_by_norm_first_are_still_skipped() -> None:
    """inf times the factor 0 is NaN in torch; by value alone inf is a number again, as in torch."""
    for clip_first in (True, False):
        model = zo.offload(nn.Linear(4, 4), zo.OffloadConfig(precision="fp32"))
        optimizer = adamw(model.parameters())
        (model(torch.ones(1, 4)) * torch.tensor([1.0, float("inf"), 1.0, 1.0])).sum().backward()
        if clip_first:
            assert zo.clip_grad_norm_(model, 1.0).item() == float("inf")
        zo.clip_grad_value_(model, 1.0)
        with zo.gathered(model, kind="grads") as grads:
            expected = [0.0, float("nan"), 0.0, 0.0] if clip_first else [1.0] * 4
            torch.testing.assert_close(grads["bias"], torch.tensor(expected), equal_nan=True)
        with warnings.catch_warnings(record=True):
            optimizer.step()
        assert zo.stats(model).skipped_steps == clip_first


def test_limits_and_models_are_checked() -> None:
    model, plain = zo.offload(nn.Linear(4, 4), zo.OffloadConfig()), nn.Linear(4, 4)
    for limit, words in ((-1.0, "is negative"), (float("nan"), "nan is not a number")):
        with pytest.raises(zo.ConfigError, match=words):
            zo.clip_grad_value_(model, limit)
    plain(torch.ones(1, 4)).sum().backward()
    zo.clip_grad_value_([*model.parameters(), *plain.parameters()], 0.25)
    assert torch.equal(plain.weight.grad, torch.full((4, 4), 0.25))


# Frozen and thawed between steps


def freezing(model: nn.Module, rows: Rows, average: Average) -> Iterator[float]:
    """From the input on, in whole and in part; one with a gradient that waits; then all again."""
    optimizer = adamw(model.parameters())

    def train(steps: range) -> Iterator[float]:
        for step in steps:
            yield backward(model, rows, step, average)
            optimizer.step()
            optimizer.zero_grad()

    yield from train(range(2))
    model.embedding.requires_grad_(False)
    model.blocks[0].requires_grad_(False)
    yield from train(range(2, 4))
    model.blocks[1].up.weight.requires_grad = False
    model.blocks[2].norm.requires_grad_(False)
    yield from train(range(4, 6))
    yield backward(model, rows, 6, average)
    model.blocks[1].requires_grad_(False)
    optimizer.step()
    optimizer.zero_grad()
    yield from train(range(7, 8))
    model.blocks[0].requires_grad_(True)
    yield from train(range(8, 9))
    model.requires_grad_(True)
    yield from train(range(9, 11))


def freezing_within_a_step(model: nn.Module, rows: Rows, average: Average) -> Iterator[float]:
    """Between two backwards of one step (one rank: a second average of the same gradients would be wrong)."""
    optimizer = adamw(model.parameters())
    for step in range(NUM_STEPS):
        yield backward(model, rows, 2 * step, average)
        model.blocks[step % 3].requires_grad_(False)
        yield backward(model, rows, 2 * step + 1, average)
        model.requires_grad_(True)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("script", [freezing, freezing_within_a_step])
def test_freezing_on_one_rank(script: Script, settings: dict[str, Any]) -> None:
    check(run_offloaded(script, make, zo.OffloadConfig(precision="fp32", **settings)), run_plain(script, make))


@pytest.mark.parametrize("stage", [3, *map(full, (0, 1, 2))])
def test_freezing_on_two_ranks(stage: int, settings: dict[str, Any], pool: RankPool) -> None:
    for found, expected in pool.succeed(run_both, freezing, make, settings | {"stage": stage}):
        check(found, expected)


def test_steps_are_counted_by_parameter() -> None:
    model = zo.offload(build(make), zo.OffloadConfig(precision="fp32"))
    optimizer = adamw(model.parameters())
    for step in range(3):
        model.blocks[1].requires_grad_(step != 1)
        model(tokens_of(step)).backward()
        optimizer.step()
    names = [name for name, _ in model.named_parameters()]
    steps = {names[index]: int(entry["step"]) for index, entry in optimizer.state_dict()["state"].items()}
    assert steps == {name: 2 if name.startswith("blocks.1.") else 3 for name in names}


def test_a_section_frozen_in_part_is_still_reduced_as_it_completes(pool: RankPool) -> None:
    for reduced in pool.succeed(count_open_sections):
        assert reduced <= 2, "sections wait for gradients that never come"


def count_open_sections(rank: int, world_size: int) -> int:
    """The most sections that had an fp32 buffer at once, with a reduction for each."""
    from zero_offload.model.api import runtime_of

    section.BUCKET_BYTES = 0  # in this rank's process, which keeps it: bits do not depend on it
    model = zo.offload(build(partial(TinyLM, UNEVEN, 6)), zo.OffloadConfig(precision="fp32"))
    owner = runtime_of(model)
    assert owner is not None
    for block in model.blocks:
        block.norm.requires_grad_(False)
    most = 0

    def look(_: Any) -> None:
        nonlocal most
        most = max(most, sum(grads.partial.sum is not None for grads in owner.grads.ledger.sections))

    for param in model.parameters():
        if param.requires_grad:
            param.register_post_accumulate_grad_hook(look)
    model(tokens_of(rank)).backward()
    zo.close(model)
    return most


def test_a_resumed_run_freezes_again(nvme: Path) -> None:
    def train(model: nn.Module, optimizer: zo.AdamW, steps: range) -> None:
        for step in steps:
            model.blocks[0].requires_grad_(step < 2 or step > 4)
            model(tokens_of(step)).backward()
            optimizer.step()
            optimizer.zero_grad()
            zo.commit(model, optimizer)

    values = []
    for spans in ([range(7)], [range(3), range(3, 7)]):
        for span in spans:
            config = zo.OffloadConfig(nvme=nvme / str(len(spans)), optimizer="nvme", existing="resume")
            model = zo.offload(build(make), config)
            optimizer = adamw(model.parameters())
            zo.resume(model, optimizer)
            train(model, optimizer, span)
            masters = {}
            with zo.gathered(model, kind="master") as found:
                masters = {name: value.clone() for name, value in found.items()}
            zo.close(model)
        values.append(masters)
    assert all(torch.equal(values[0][name], values[1][name]) for name in values[0])


# Parameters of no optimizer, of a later group, of another optimizer


def groups_added_later(model: nn.Module, rows: Rows, average: Average) -> Iterator[float]:
    """Parameters without an optimizer add up their gradients meanwhile."""
    optimizer = adamw(model.blocks[2].parameters())
    optimizer.add_param_group({"params": model.norm.parameters(), "lr": 1e-3})
    for step in range(6):
        if step == 2:
            optimizer.add_param_group({"params": [model.blocks[0].up.weight, model.blocks[1].norm.weight]})
        if step == 4:
            known = {id(p) for group in optimizer.param_groups for p in group["params"]}
            optimizer.add_param_group({"params": [p for p in model.parameters() if id(p) not in known], "lr": 3e-3})
        yield backward_of_sums(model, rows, step, average)
        optimizer.step()
        optimizer.zero_grad()


def backward_of_sums(model: nn.Module, rows: Rows, step: int, average: Average) -> float:
    """As `backward`; gradients that a plain model holds from before are averaged already."""
    held = {p: p.grad for p in model.parameters() if _is_plain(p)}
    for param in held:
        param.grad = None
    loss = backward(model, rows, step, average)
    for param, grad in held.items():
        param.grad = grad if param.grad is None else param.grad if grad is None else grad.add_(param.grad)
    return loss


def two_optimizers(model: nn.Module, rows: Rows, average: Average) -> Iterator[float]:
    """Interleaved in every section, of different pace; some parameters have none."""
    params = list(model.parameters())[:-2]
    fast, slow = adamw(params[::2]), adamw(params[1::2], lr=1e-3)
    for step in range(6):
        yield backward_of_sums(model, rows, step, average)
        fast.step()
        fast.zero_grad()
        if step % 2:
            slow.step()
            slow.zero_grad()


def clipped_in_part(model: nn.Module, rows: Rows, average: Average) -> Iterator[float]:
    """All gradients are clipped together; those of no optimizer stay, clipped, and add up."""
    optimizer = adamw(model.blocks.parameters())
    for step in range(6):
        yield backward_of_sums(model, rows, step, average)
        yield clip_norm(list(model.parameters()), 0.1, model)
        optimizer.step()
        optimizer.zero_grad()


OPTIMIZERS: list[Script] = [groups_added_later, two_optimizers, clipped_in_part]


@pytest.mark.parametrize("script", OPTIMIZERS)
def test_optimizers_on_one_rank(script: Script, settings: dict[str, Any]) -> None:
    check(run_offloaded(script, make, zo.OffloadConfig(precision="fp32", **settings)), run_plain(script, make))


@in_turn(script=OPTIMIZERS[:2], stage=[3, 1, 0, 2], tier=["nvme", "cpu", "mixed"])
def test_optimizers_on_two_ranks(script: Script, stage: int, tier: str, pool: RankPool, nvme: Path) -> None:
    for found, expected in pool.succeed(run_both, script, make, TIERS[tier] | {"nvme": nvme, "stage": stage}):
        check(found, expected)


def test_a_step_is_skipped_for_its_own_gradients_only() -> None:
    """The other optimizer's are NaN: they neither stop this one's step nor are dropped by it."""
    model = zo.offload(nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)}), zo.OffloadConfig(precision="fp32"))
    first, second = adamw(model["a"].parameters()), adamw(model["b"].parameters())
    with zo.gathered(model) as before:
        before = {name: param.detach().clone() for name, param in before.items()}
    model["a"](torch.ones(1, 4)).sum().backward()
    (model["b"](torch.ones(1, 4)) * float("nan")).sum().backward()
    first.step()
    assert zo.stats(model).skipped_steps == 0
    with zo.gathered(model, kind="grads") as grads:
        assert set(grads) == {"b.weight", "b.bias"}
    with pytest.warns(UserWarning, match="NaN or infinite"):
        second.step()
    with zo.gathered(model) as after:
        changed = {name for name, param in after.items() if not torch.equal(param, before[name])}
    assert changed == {"a.weight", "a.bias"}
    with zo.gathered(model, kind="grads") as grads:
        assert not grads


def test_a_step_without_gradients_of_its_own_is_none() -> None:
    model = zo.offload(build(make), zo.OffloadConfig())
    idle, busy = adamw(model.blocks[0].parameters()), adamw(model.blocks[1].parameters())
    model.blocks[0].requires_grad_(False)
    model(tokens_of(0)).backward()
    idle.step()
    assert zo.stats(model).step == 0
    busy.step()
    assert zo.stats(model).step == 1


def test_the_models_zero_grad_drops_what_no_optimizer_has() -> None:
    model = zo.offload(build(make), zo.OffloadConfig())
    optimizer = adamw(model.blocks.parameters())
    model(tokens_of(0)).backward()
    optimizer.zero_grad()
    assert model.norm.weight.grad is not None and all(param.grad is None for param in model.blocks.parameters())
    model.zero_grad()
    assert all(param.grad is None for param in model.parameters())


def test_generations_of_two_optimizers_hold_whole_steps(nvme: Path) -> None:
    """No generation is made between the two steps of one backward, whichever of them is due."""

    def train(model: nn.Module, last: int, crash: bool) -> None:
        first, second = adamw(model.blocks.parameters()), adamw([*model.norm.parameters(), model.embedding.weight])
        start = zo.resume(model, second)
        for step in range(0 if start is None else start.extra["next"], last):
            model(tokens_of(step)).backward()
            first.step()
            if crash and step == last - 1:
                raise KeyboardInterrupt
            second.step()
            first.zero_grad()
            second.zero_grad()
            zo.commit(model, second, extra={"next": step + 1})

    values = []
    for lasts in ((6,), (4, 6)):
        for last in lasts:
            config = zo.OffloadConfig(nvme=nvme / str(len(lasts)), optimizer="nvme", commit_every=3, existing="resume")
            model = zo.offload(build(make), config)
            try:
                train(model, last, crash=last == 4)
            except KeyboardInterrupt:
                zo.close(model)
        with zo.gathered(model, kind="master") as masters:
            values.append({name: value.clone() for name, value in masters.items()})
        zo.close(model)
    assert all(torch.equal(values[0][name], values[1][name]) for name in values[0])


# With a loss scaler


def test_clipping_by_value_after_unscaling(nvme: Path) -> None:
    """A power of two changes no bit, before and after the norm; without `unscale_` scaled gradients are clipped."""

    def train(
        scale: float, unscales: bool, limit: float, each: dict[str, Any]
    ) -> tuple[list[float], dict[str, Tensor]]:
        model = zo.offload(build(make), zo.OffloadConfig(precision="fp32", nvme=nvme, existing="discard", **each))
        optimizer, scaler = adamw(model.parameters()), zo.GradScaler(scale, enabled=scale != 1.0)
        norms = []
        for step in range(NUM_STEPS):
            scaler.scale(model(tokens_of(step))).backward()
            if unscales:
                scaler.unscale_(optimizer)
                norms.append(zo.clip_grad_norm_(model, 0.1).item())
            zo.clip_grad_value_(model, limit)
            if unscales:
                norms.append(zo.clip_grad_norm_(model, 0.05).item())
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        params = read_params(model)
        zo.close(model)
        return norms, params

    for each in TIERS.values():
        check(train(1024.0, True, 0.003, each), train(1.0, True, 0.003, each))
        check(train(1024.0, False, 1.024, each), train(1.0, False, 0.001, each))


def test_a_limit_beyond_fp16_changes_nothing() -> None:
    model = zo.offload(build(make), zo.OffloadConfig(precision="fp16"))
    optimizer, scaler = adamw(model.parameters()), zo.GradScaler(2.0**10)
    scaler.scale(model(tokens_of(0))).backward()
    scaler.unscale_(optimizer)
    with zo.gathered(model, kind="grads") as before:
        before = {name: grad.clone() for name, grad in before.items()}
    zo.clip_grad_value_(model, 1e6)
    with zo.gathered(model, kind="grads") as after:
        assert all(torch.equal(after[name], grad) for name, grad in before.items())
