"""overlap="backward": the bits of a step after backward, whatever a program does between backward and step."""

from __future__ import annotations

import gc
import math
import time
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import zero_offload as zo
from tests.helpers import ranks
from tests.helpers.models import NARROW, WIDE, Block, Fuse, TinyLM, build, tokens_of
from tests.helpers.pairwise import Row, all_rows, in_turn, label, pairwise
from tests.helpers.ranks import Case, RankPool
from tests.helpers.reference import Recipe, Trajectory, param_groups, read_masters, set_learning_rate, train_plain
from zero_offload.base.errors import ConfigError, ZeroOffloadError
from zero_offload.base.types import MIB, STAGES, Tier
from zero_offload.model.api import runtime_of
from zero_offload.model.backward_updates import BackwardUpdates
from zero_offload.optim import pipeline
from zero_offload.plan.memory import GRAD_RING_UNITS

TIERS = {"device": "device", "cpu": "cpu", "nvme": "nvme", "mixed": {"cpu": 0.5, "nvme": 0.5}}
NUM_STEPS = 3


class Recomputed(TinyLM):
    """Blocks run again in backward, as torch's checkpoint does it."""

    reentrant = False

    def run_blocks(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


class Reentrant(Recomputed):
    reentrant = True


class Marked(TinyLM):
    def __init__(self, *arguments: int) -> None:
        super().__init__(*arguments)
        zo.checkpoint(self.blocks)


MODELS: dict[str, type[TinyLM]] = {
    "plain": TinyLM,
    "recomputed": Recomputed,
    "reentrant": Reentrant,
    "marked": Marked,
}


def spy_on_launches(patch: pytest.MonkeyPatch, found: list[Any]) -> None:
    """Notes the units that are updated while backward goes on, and after "end" those at its end."""
    launch = BackwardUpdates._launch

    def spy(self: BackwardUpdates, units: list[int], *, in_backward: bool) -> None:
        found.append(tuple(units) if in_backward else ("end", *sorted(units)))
        launch(self, units, in_backward=in_backward)

    patch.setattr(BackwardUpdates, "_launch", spy)


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    found: list[Any] = []
    spy_on_launches(monkeypatch, found)
    return found


def offloaded(make: Callable[[], nn.Module], **settings: Any) -> tuple[nn.Module, zo.AdamW]:
    settings = {"precision": "fp32", "overlap": "backward"} | settings
    model = zo.offload(build(make), zo.OffloadConfig(**settings))
    return model, zo.AdamW(param_groups(model), lr=1e-2, betas=(0.9, 0.95))


def train(recipe: Recipe, config: zo.OffloadConfig) -> Trajectory:
    """As `train_offloaded`, with what the mode wants: hyperparameters before backward, all but the last in no_sync."""
    model = zo.offload(build(recipe.make), config)
    optimizer = zo.AdamW(param_groups(model), lr=1.0, betas=(0.9, 0.95))
    found = Trajectory()
    for step in range(recipe.num_steps):
        set_learning_rate(optimizer, step)
        for micro in range(recipe.micro_batches):
            with zo.no_sync(model) if micro < recipe.micro_batches - 1 else nullcontext():
                loss = model(tokens_of(step * recipe.micro_batches + micro)) / recipe.micro_batches
                loss.backward()
            found.losses.append(loss.item())
        optimizer.step()
        # The update may still run: nothing from here on may reach it.
        set_learning_rate(optimizer, 10**6)
        optimizer.zero_grad()
        found.scales.append(1.0)
    found.params = read_masters(model)
    zo.close(model)
    return found


MATRIX = {
    "params": list(TIERS),
    "grads": list(TIERS),
    "optimizer": list(TIERS),
    "precision": ["fp32", "bf16"],
    "model": list(MODELS),
}
VARIED = {**MATRIX, "micro_batches": [1, 3], "device_memory": ["8MiB", None]}


def check(row: Row, nvme: Path) -> None:
    # Without room for all units, and with several chunks and frames each, where that costs no time.
    dim = WIDE if row["precision"] == "fp32" and row.get("device_memory") else NARROW
    recipe = Recipe(partial(MODELS[row["model"]], dim), row["precision"], NUM_STEPS, row.get("micro_batches", 1))
    tiers = {kind: TIERS[row[kind]] for kind in ("params", "grads", "optimizer")}
    settings = {name: row[name] for name in ("precision", "device_memory") if name in row}
    config = zo.OffloadConfig(nvme=nvme, overlap="backward", **settings, **tiers)
    assert train(recipe, config) == train_plain(recipe)


@pytest.mark.parametrize("row", pairwise(VARIED), ids=label)
def test_the_bits_are_those_of_a_step_after_backward(row: Row, nvme: Path, launched: list[Any]) -> None:
    check(row, nvme)
    # Autograd does not tell the end of the embedding, which is tied to the head.
    assert launched == [(3,), (2,), (1,), ("end", 0)] * NUM_STEPS


@pytest.mark.full
@pytest.mark.parametrize("row", all_rows(MATRIX), ids=label)
def test_every_placement(row: Row, nvme: Path) -> None:
    check(row, nvme)


def ones(**options: Any) -> Tensor:
    return torch.ones(2, WIDE, **options)


def ask_for_the_gradient_of_an_input(block: nn.Module) -> None:
    x = ones(requires_grad=True)
    torch.autograd.grad(block(x).sum(), x)


def run_a_frozen_block(block: nn.Module) -> None:
    block.requires_grad_(False)
    block(ones(requires_grad=True)).sum().backward()
    block.requires_grad_(True)


def break_off(block: nn.Module) -> None:
    """Before anything is updated."""
    with pytest.raises(ArithmeticError), zo.no_sync(block):
        block(Fuse.apply(ones(requires_grad=True), ArithmeticError)).sum().backward()


def do_nothing(block: nn.Module) -> None:
    """Blocks that take turns are enough."""


@in_turn(between=[do_nothing, ask_for_the_gradient_of_an_input, run_a_frozen_block, break_off], tier=["cpu", "nvme"])
@pytest.mark.filterwarnings("ignore:the last backward was left by an exception")
def test_gradients_stay_until_the_update_has_read_them(
    between: Callable[[nn.Module], None], tier: str, nvme: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Backwards that do not use a unit come and go while its update is pending, and want memory for gradients."""
    update = pipeline.fused_update

    def slowly(*arguments: Any) -> None:
        time.sleep(0.02)
        update(*arguments)

    def run(**settings: Any) -> nn.Module:
        model, optimizer = offloaded(partial(TinyLM, WIDE), **settings)
        for step in range(6):
            model.blocks[step % 3](ones() * (step + 1)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            between(model.blocks[(step + 2) % 3])
        return model

    expected = run(overlap="none")
    monkeypatch.setattr(pipeline, "fused_update", slowly)
    assert_same_values(run(params=tier, optimizer=tier, nvme=nvme, durability="scratch"), expected)


# Several ranks


def train_and_list(rank: int, world_size: int, case: Case) -> tuple[ranks.Outcome, list[Any]]:
    """A job of ranks: what was updated when, too."""
    found: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        spy_on_launches(patch, found)
        return ranks.train(rank, world_size, case), found


@in_turn(stage=STAGES, params=["cpu", "nvme"], grads=["cpu", "nvme"], micro_batches=[1, 3])
def test_ranks_update_together(
    stage: int, params: str, grads: str, micro_batches: int, pool: RankPool, nvme: Path
) -> None:
    settings = {"stage": stage, "precision": "fp32", "nvme": nvme, "existing": "discard"}
    case = Case(settings | {"overlap": "none"}, num_steps=2, micro_batches=micro_batches, dim=WIDE, no_sync=True)
    expected = pool.succeed(ranks.train, case)
    tiers = {"params": params, "grads": grads, "optimizer": params}
    case = replace(case, settings=settings | tiers | {"overlap": "backward"})
    for (outcome, launched), each in zip(pool.succeed(train_and_list, case), expected, strict=True):
        assert outcome == each
        # A reduction is waited for when the next one is launched.
        assert launched == [(3,), (2,), ("end", 0, 1)] * 2


def leave_one_out(rank: int, world_size: int, case: Case) -> tuple[list[str], int]:
    """A job of ranks: which parameters stay as they are when one rank has a NaN in one block; skipped steps."""
    model, optimizer = ranks.start(case)
    try:
        before = ranks.read_params(model)
        if rank == 1:
            model.blocks[1].up.bias.register_hook(lambda grad: grad * math.nan)
        model(ranks.rows_of(0, rank, world_size)).backward()
        with pytest.warns(UserWarning, match=r"NaN or infinite \(blocks\.1"):
            optimizer.step()
        after = ranks.read_params(model)
        return [name for name in before if torch.equal(before[name], after[name])], zo.stats(model).skipped_steps
    finally:
        zo.close(model)


@pytest.mark.parametrize("stage", [1, 3])
def test_ranks_leave_out_the_same_unit(stage: int, pool: RankPool) -> None:
    """Though the NaN is in the part of the gradient that one of them updates."""
    case = Case({"precision": "fp32", "stage": stage, "overlap": "backward"}, dim=WIDE)
    names = [f"blocks.1.{name}" for name, _ in Block(NARROW).named_parameters()]
    for unchanged, skipped_steps in pool.succeed(leave_one_out, case):
        assert (sorted(unchanged), skipped_steps) == (sorted(names), 1)


# Hyperparameters


def test_a_scheduler_is_followed() -> None:
    def losses(overlap: str) -> list[float]:
        model, optimizer = offloaded(TinyLM, overlap=overlap)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=NUM_STEPS)
        found = []
        for step in range(NUM_STEPS):
            loss = model(tokens_of(step))
            loss.backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found

    assert losses("backward") == losses("none")


def test_hyperparameters_are_those_that_backward_began_with() -> None:
    model, optimizer = offloaded(TinyLM)
    other, its_optimizer = offloaded(TinyLM, overlap="none")
    for each in (model, other):
        each(tokens_of(0)).backward()
    set_learning_rate(optimizer, 10**6)
    with pytest.warns(UserWarning, match="have changed between backward and step"):
        optimizer.step()
    its_optimizer.step()
    assert_same_values(model, other)


def assert_same_values(model: nn.Module, other: nn.Module) -> None:
    mine, theirs = read_masters(model), read_masters(other)
    assert [name for name in mine if not torch.equal(mine[name], theirs[name])] == []


# Between backward and step


def test_what_reads_before_the_step_sees_new_values() -> None:
    model, optimizer = offloaded(partial(TinyLM, WIDE))
    other, its_optimizer = offloaded(partial(TinyLM, WIDE), overlap="none")
    for step in range(2):
        for each in (model, other):
            each(tokens_of(step)).backward()
        its_optimizer.step()
        with torch.no_grad():
            assert model(tokens_of(9)).item() == other(tokens_of(9)).item()
        assert_same_values(model, other)
        assert all(map(torch.equal, model.state_dict().values(), other.state_dict().values()))
        optimizer.step()
        for each in (optimizer, its_optimizer):
            each.zero_grad()
    assert zo.stats(model).step == 2


REFUSED: dict[str, Callable[[nn.Module, zo.AdamW, Path], Any]] = {
    "grad": lambda model, *_: model.blocks[0].up.weight.grad,
    "torch's clipping": lambda model, *_: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
    "clip_grad_norm_": lambda model, *_: zo.clip_grad_norm_(model, 1.0),
    "clip_grad_value_": lambda model, *_: zo.clip_grad_value_(model, 1.0),
    "gathered": lambda model, *_: zo.gathered(model, kind="grads").__enter__(),
    "zero_grad": lambda model, optimizer, _: optimizer.zero_grad(),
    "scaler": lambda model, optimizer, _: zo.GradScaler().step(optimizer),
    "commit": lambda model, optimizer, _: zo.commit(model, optimizer),
    "save_checkpoint": lambda model, optimizer, path: zo.save_checkpoint(model, optimizer, path / "saved"),
    "backward": lambda model, *_: model(tokens_of(0)).backward(),
    "backward in no_sync": lambda model, *_: no_sync_backward(model),
}


def no_sync_backward(model: nn.Module) -> None:
    with zo.no_sync(model):
        model(tokens_of(0)).backward()


def test_a_look_at_gradients_that_wait_for_a_backward_is_refused() -> None:
    model, optimizer = offloaded(TinyLM)
    no_sync_backward(model)
    with pytest.raises(ConfigError, match=r"gradient of embedding.weight waits for a backward .* overlap='forward'"):
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    model(tokens_of(1)).backward()
    optimizer.step()


@pytest.mark.parametrize("call", REFUSED)
def test_what_wants_gradients_or_the_step_is_refused(call: str, tmp_path: Path) -> None:
    model, optimizer = offloaded(TinyLM)
    other, its_optimizer = offloaded(TinyLM, overlap="none")
    model(tokens_of(0)).backward()
    with pytest.raises((ConfigError, ZeroOffloadError), match="overlap='(backward|forward)'") as error:
        REFUSED[call](model, optimizer, tmp_path)
    assert "backward" not in call or "zo.no_sync(model)" in str(error.value)
    # Nothing has come of it: the step can be closed.
    other(tokens_of(0)).backward()
    for each in (optimizer, its_optimizer):
        each.step()
        each.zero_grad()
    assert_same_values(model, other)


def test_a_step_without_a_backward_is_none() -> None:
    model, optimizer = offloaded(TinyLM)
    optimizer.step()
    with torch.no_grad():
        model(tokens_of(0))
    optimizer.step()
    assert zo.stats(model).step == 0


def test_gradients_that_no_last_backward_followed_are_used_by_the_step() -> None:
    model, optimizer = offloaded(TinyLM)
    other, its_optimizer = offloaded(TinyLM, overlap="none")
    for each in (model, other):
        for micro in range(2):
            with zo.no_sync(each):
                each(tokens_of(micro)).backward()
    with pytest.raises(ConfigError, match="zo.clip_grad_norm_ needs all gradients before the update"):
        zo.clip_grad_norm_(model, 1.0)
    with pytest.raises(ConfigError, match="zo.accumulate needs all gradients before the update"):
        zo.accumulate(model, [tokens_of(0), tokens_of(1)], lambda each, tokens: each(tokens))
    optimizer.step()
    its_optimizer.step()
    assert_same_values(model, other)


# Optimizers


def test_two_optimizers_close_the_step_between_them(nvme: Path) -> None:
    def run(**settings: Any) -> nn.Module:
        model = zo.offload(build(TinyLM), zo.OffloadConfig(precision="fp32", **settings))
        params = list(model.parameters())
        optimizers = [zo.AdamW(params[::2], lr=1e-2), zo.SGD(params[1::2], lr=1e-2, momentum=0.9)]
        for step in range(3):
            model(tokens_of(step)).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            zo.commit(model, optimizers[0])
        return model

    model = run(overlap="backward", nvme=nvme)
    assert_same_values(model, run(overlap="none"))
    assert zo.stats(model).step == 3
    zo.close(model)
    again = zo.offload(build(TinyLM), zo.OffloadConfig(precision="fp32", nvme=nvme, existing="resume"))
    assert_same_values(again, run(overlap="none"))
    assert zo.stats(again).step == 3


def test_an_optimizer_that_is_not_stepped_is_noticed() -> None:
    model = zo.offload(build(TinyLM), zo.OffloadConfig(precision="fp32", overlap="backward"))
    first = zo.AdamW(model.blocks[0].parameters())
    second = zo.AdamW(model.blocks[1].parameters())
    model(tokens_of(0)).backward()
    first.step()
    with pytest.raises(ZeroOffloadError, match=r"has updated blocks\.1\..* and no step\(\) of its optimizer"):
        model(tokens_of(1)).backward()
    second.step()
    model(tokens_of(1)).backward()


def test_a_parameter_of_two_optimizers_is_refused_and_one_that_was_dropped_is_none() -> None:
    model, optimizer = offloaded(TinyLM)
    torch.optim.lr_scheduler.LinearLR(optimizer)  # leaves a cycle
    del optimizer
    optimizer = zo.AdamW(model.parameters())
    model(tokens_of(0)).backward()
    optimizer.step()
    other = zo.AdamW(model.norm.parameters())
    with pytest.raises(ConfigError, match=r"two optimizers have norm\.(weight|bias)"):
        model(tokens_of(0)).backward()
    del other
    gc.collect()
    model(tokens_of(0)).backward()
    optimizer.step()
    assert zo.stats(model).step == 2


def test_what_no_optimizer_has_keeps_its_gradient() -> None:
    model = zo.offload(build(TinyLM), zo.OffloadConfig(precision="fp32", overlap="backward"))
    other = build(TinyLM)
    optimizer, its_optimizer = zo.AdamW(model.blocks[1].parameters()), zo.AdamW(other.blocks[1].parameters())
    for step in range(2):
        for each in (model, other):
            each(tokens_of(step)).backward()
        for each in (optimizer, its_optimizer):
            each.step()
            each.zero_grad()
    with zo.gathered(model, kind="grads") as grads:
        held = {name: param.grad for name, param in other.named_parameters() if param.grad is not None}
        assert grads.keys() == held.keys() and all(torch.equal(grads[name], held[name]) for name in held)
    masters = read_masters(model)
    assert all(torch.equal(masters[name], param) for name, param in other.named_parameters())


# Gradients that are not finite


def test_a_step_whose_gradients_are_all_infinite_changes_nothing() -> None:
    model, optimizer = offloaded(TinyLM)
    before = read_masters(model)
    (model(tokens_of(0)) * math.inf).backward()
    with pytest.warns(UserWarning, match="NaN or infinite .* units with such gradients stay as they are"):
        optimizer.step()
    after = read_masters(model)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert (zo.stats(model).step, zo.stats(model).skipped_steps) == (1, 1)
    assert optimizer.state_dict()["state"] == {}


def test_only_the_unit_of_an_infinite_gradient_is_left_out() -> None:
    def run(overlap: str) -> tuple[nn.Module, dict[str, Tensor]]:
        model, optimizer = offloaded(TinyLM, overlap=overlap)
        before = read_masters(model)
        if overlap == "backward":
            model.blocks[1].up.bias.register_hook(lambda grad: grad * math.nan)
        model(tokens_of(0)).backward()
        if overlap == "backward":
            with pytest.warns(UserWarning, match=r"NaN or infinite \(blocks\.1\.up\.bias\)"):
                optimizer.step()
        else:
            optimizer.step()
        return model, before

    (model, before), (other, _) = run("backward"), run("none")
    mine, theirs = read_masters(model), read_masters(other)
    for name in mine:
        assert torch.equal(mine[name], (before if name.startswith("blocks.1.") else theirs)[name]), name


# A backward that breaks off


class Fused(TinyLM):
    """Its backward raises between two blocks, on request."""

    error: type[BaseException] | None = None
    place = 0

    def run_blocks(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            x = Fuse.apply(block(x), self.error if number == self.place else None)
        return x


def step_once(model: nn.Module, optimizer: zo.AdamW, number: int) -> None:
    model(tokens_of(number)).backward()
    optimizer.step()
    optimizer.zero_grad()
    zo.commit(model, optimizer)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError, KeyboardInterrupt])
def test_half_a_step_is_refused_and_the_last_generation_goes_on(
    error: type[BaseException], nvme: Path, tmp_path: Path
) -> None:
    settings: dict[str, Any] = {"params": "nvme", "optimizer": "nvme", "nvme": nvme}
    model, optimizer = offloaded(Fused, **settings)
    step_once(model, optimizer, 0)
    whole = read_masters(model)
    zo.save_checkpoint(model, optimizer, tmp_path / "saved")
    model.error = error
    with pytest.raises(error):
        model(tokens_of(1)).backward()
    model.error = None
    for use in (
        lambda: model(tokens_of(1)),
        optimizer.step,
        optimizer.zero_grad,
        model.state_dict,
        lambda: zo.commit(model, optimizer),
        lambda: zo.save_checkpoint(model, optimizer, tmp_path / "mix"),
        lambda: zo.gathered(model).__enter__(),
    ):
        with pytest.raises(ZeroOffloadError, match=r"2 of 4 units were updated \(blocks\.1, \.\.\.\).* a mix of two"):
            use()
    zo.close(model)
    again, its_optimizer = offloaded(Fused, **settings, existing="resume")
    resumed = zo.resume(again, its_optimizer)
    assert resumed is not None and resumed.step == 1
    found = read_masters(again)
    assert all(torch.equal(found[name], whole[name]) for name in whole)
    zo.close(again)


def test_a_backward_without_its_step_is_in_no_generation(nvme: Path) -> None:
    """Nor is the step before, whose states it has changed, if that was not due."""
    model, optimizer = offloaded(TinyLM, nvme=nvme, commit_every=2)
    whole: dict[str, Tensor] = {}
    for step in range(3):
        model(tokens_of(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
        whole = read_masters(model) if step == 1 else whole
    model(tokens_of(3)).backward()
    zo.close(model)
    again, its_optimizer = offloaded(TinyLM, nvme=nvme, existing="resume")
    resumed = zo.resume(again, its_optimizer)
    assert resumed is not None and resumed.step == 2
    found = read_masters(again)
    assert all(torch.equal(found[name], whole[name]) for name in whole)
    zo.close(again)


def test_a_checkpoint_replaces_half_a_step(tmp_path: Path) -> None:
    model, optimizer = offloaded(Fused)
    other, its_optimizer = offloaded(Fused, overlap="none")
    for each in ((model, optimizer), (other, its_optimizer)):
        step_once(*each, 0)
    zo.save_checkpoint(model, optimizer, tmp_path / "saved")
    model.error = RuntimeError
    with pytest.raises(RuntimeError, match="in backward"):
        model(tokens_of(1)).backward()
    model.error = None
    zo.load_checkpoint(model, optimizer, tmp_path / "saved")
    for each in ((model, optimizer), (other, its_optimizer)):
        step_once(*each, 1)
    assert_same_values(model, other)


def test_what_breaks_off_before_an_update_changes_nothing() -> None:
    model, optimizer = offloaded(Fused)
    other, its_optimizer = offloaded(Fused, overlap="none")
    model.error, model.place = RuntimeError, 2
    with pytest.raises(RuntimeError, match="in backward"):
        model(tokens_of(1)).backward()
    model.error = None
    with pytest.warns(UserWarning, match="the last backward was left by an exception"):
        step_once(model, optimizer, 0)
    step_once(other, its_optimizer, 0)
    assert_same_values(model, other)


# Units that backward may still read


class Shared(TinyLM):
    """Blocks that are used twice, and a block that another one reads without a gradient."""

    reentrant: bool | None = None

    def run_blocks(self, x: Tensor) -> Tensor:
        for number in (0, 1, 0, 2):
            block = self.blocks[number]
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
            if number == 0:
                x = x + 0.1 * F.linear(x, self.blocks[2].down.weight.detach()[:, : x.shape[-1]])
        return x


class SharedReentrant(Shared):
    reentrant = True


class SharedRecomputed(Shared):
    reentrant = False


@pytest.mark.parametrize("make", [Shared, SharedReentrant, SharedRecomputed])
@pytest.mark.parametrize("params", ["cpu", "nvme"])
def test_a_unit_is_updated_when_nothing_reads_it_any_more(
    make: type[TinyLM], params: str, nvme: Path, launched: list[Any]
) -> None:
    recipe = Recipe(make, num_steps=3)
    config = zo.OffloadConfig(precision="fp32", params=params, nvme=nvme, overlap="backward")
    assert train(recipe, config) == train_plain(recipe)
    # Block 2 (unit 3) is read by the first uses of block 0.
    order = [unit for units in launched[:4] for unit in units]
    assert order.index(3) > order.index(2)


def test_hooks_see_the_values_of_the_forward() -> None:
    """In the gradient's hooks of a unit nothing of it is new yet."""
    model, optimizer = offloaded(partial(TinyLM, WIDE))
    seen: dict[str, Tensor] = {}

    def hook(param: nn.Parameter, name: str) -> None:
        seen[name] = param.detach().clone()

    for name, param in model.named_parameters():
        param.register_post_accumulate_grad_hook(partial(hook, name=name))
    before = read_masters(model)
    model(tokens_of(0)).backward()
    assert seen.keys() == before.keys() and all(torch.equal(seen[name], before[name]) for name in seen)
    optimizer.step()
    model(tokens_of(1)).backward()
    assert not any(torch.equal(seen[name], before[name]) for name in seen)


def test_a_hook_that_reads_what_was_updated_is_refused() -> None:
    model, _ = offloaded(partial(TinyLM, WIDE), params="cpu")
    last = model.blocks[2].up.weight
    model.blocks[0].up.weight.register_hook(lambda grad: grad * float(last.sum() > -math.inf))
    with pytest.raises(ZeroOffloadError, match=r"reads parameters of blocks\.2 after their update"):
        model(tokens_of(0)).backward()


def test_a_unit_that_is_gathered_waits_for_the_end(launched: list[Any]) -> None:
    model, optimizer = offloaded(partial(TinyLM, WIDE))
    other, its_optimizer = offloaded(partial(TinyLM, WIDE), overlap="none")
    with zo.gathered(model.blocks[2]):
        model(tokens_of(0)).backward()
    assert launched == [(2,), (1,), ("end", 0, 3)]
    other(tokens_of(0)).backward()
    for each in (optimizer, its_optimizer):
        each.step()
    assert_same_values(model, other)


def test_a_view_that_is_held_keeps_its_unit_for_the_end(nvme: Path, launched: list[Any]) -> None:
    model, optimizer = offloaded(partial(TinyLM, WIDE), params="nvme", nvme=nvme)
    held: list[Tensor] = []
    model.blocks[2].register_forward_hook(lambda block, *_: held.append(block.up.weight[:2]))
    other, its_optimizer = offloaded(partial(TinyLM, WIDE), overlap="none")
    for each in (model, other):
        each(tokens_of(0)).backward()
    assert launched == [(2,), (1,), ("end", 0, 3)]
    its_optimizer.step()
    assert torch.equal(held[0], other.blocks[2].up.weight[:2])
    held.clear()
    optimizer.step()
    assert_same_values(model, other)


class Sometimes(TinyLM):
    """Leaves a block out, another one in each step."""

    number = 0

    def run_blocks(self, x: Tensor) -> Tensor:
        self.number += 1
        for index, block in enumerate(self.blocks):
            x = x if index == self.number % 3 else block(x)
        return x


def test_units_that_a_forward_leaves_out_stay_as_they_are(nvme: Path) -> None:
    recipe = Recipe(Sometimes, num_steps=6, micro_batches=2)
    config = zo.OffloadConfig(
        precision="fp32", params="nvme", grads="nvme", optimizer="nvme", nvme=nvme, overlap="backward"
    )
    assert train(recipe, config) == train_plain(recipe)


def test_a_backward_inside_of_a_forward_is_refused() -> None:
    class Inner(TinyLM):
        def run_blocks(self, x: Tensor) -> Tensor:
            super().run_blocks(x).sum().backward()
            return super().run_blocks(x.detach())

    model, _ = offloaded(Inner)
    with pytest.raises(ZeroOffloadError, match=r"a backward inside of a forward .* 'with zo.no_sync\(model\):'"):
        model(tokens_of(0))


# Memory


def test_gradients_take_the_memory_of_a_few_units() -> None:
    def peak(overlap: str) -> tuple[int, int]:
        model, optimizer = offloaded(partial(TinyLM, WIDE, 12), overlap=overlap)
        runtime = runtime_of(model)
        assert runtime is not None
        arena, most = runtime.store.arena, 0
        states = arena.allocated_bytes

        def look(grad: Tensor) -> None:
            nonlocal most
            most = max(most, arena.allocated_bytes + arena.frame_bytes)

        for param in model.parameters():
            param.register_hook(look)
        for step in range(3):
            model(tokens_of(step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return most - states, sum(4 * param.numel() for param in model.parameters())

    passing, whole = peak("backward")
    held, _ = peak("none")
    assert held >= whole
    block = sum(4 * param.numel() for param in Block(WIDE).parameters())
    assert 3 * block <= passing <= GRAD_RING_UNITS * block + 4 * MIB
    plans = {
        overlap: zo.plan(TinyLM(WIDE, 12), zo.OffloadConfig(precision="fp32", overlap=overlap))
        for overlap in ("backward", "forward")
    }
    saved = plans["forward"].used_bytes(Tier.CPU) - plans["backward"].used_bytes(Tier.CPU)
    assert whole - GRAD_RING_UNITS * block - 4 * MIB <= saved <= whole - 3 * block


def test_gradients_that_pass_never_reach_the_drive(nvme: Path) -> None:
    model, optimizer = offloaded(partial(TinyLM, WIDE), grads="nvme", nvme=nvme, durability="scratch")
    for step in range(2):
        model(tokens_of(step)).backward()
        optimizer.step()
    assert zo.stats(model).resident_bytes["nvme"] == 0
    with zo.no_sync(model):
        model(tokens_of(2)).backward()
    assert zo.stats(model).resident_bytes["nvme"] > 0


def test_a_dropped_model_leaves_its_memory_at_once() -> None:
    model, optimizer = offloaded(TinyLM)
    model(tokens_of(0)).backward()
    optimizer.step()
    runtime = weakref.ref(runtime_of(model))
    gc.collect()
    gc.disable()
    try:
        del model, optimizer
        deadline = time.monotonic() + 30  # its last update may still run
        while runtime() is not None and time.monotonic() < deadline:
            time.sleep(0.01)
        assert runtime() is None
    finally:
        gc.enable()
