"""`zo.accumulate` trains to the bits of the loop: every tier, precision, stage; and moves a unit twice per step."""

from __future__ import annotations

import contextlib
import functools
import gc
import random
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import zero_offload as zo
from tests.helpers import ranks
from tests.helpers.accumulating import LossFn, assert_at_rest, away, batches_of, loop, third
from tests.helpers.activations import make_small
from tests.helpers.models import NARROW, WIDE, AttentionBlock, Block, TinyLM, build, tokens_of
from tests.helpers.pairwise import Row, full, label, pairwise
from tests.helpers.ranks import Case, RankPools
from tests.helpers.reference import new_scaler, param_groups, read_masters
from tests.helpers.twins import Script, run_offloaded
from zero_offload.base.types import STAGES, Tier
from zero_offload.model.api import runtime_of

TIERS = {"cpu": "cpu", "nvme": "nvme", "mixed": {"cpu": 0.5, "nvme": 0.5}}
BLOCKS = {"feed": Block, "attention": AttentionBlock}
MATRIX: dict[str, Any] = {
    "params": ["nvme", "mixed"],
    "grads": ["device", "cpu", "nvme"],
    "optimizer": ["cpu", "nvme"],
    "precision": ["fp32", "bf16"],
    "block": list(BLOCKS),
    "recompute": ["none", "all"],
    "activations": ["device", "nvme"],
    "device_memory": ["8MiB", None],
}


def script_of(accumulates: bool, recompute: str = "none") -> Script:
    def script(model: nn.Module, optimizer: zo.AdamW) -> Iterator[float]:
        if recompute == "all":
            zo.checkpoint(model.blocks)
        for step in range(3):
            run = zo.accumulate if accumulates else loop
            yield from (loss.item() for loss in run(model, batches_of(2 + step, 10 * step), third))
            optimizer.step()
            optimizer.zero_grad()

    return script


def make_model(block: str) -> nn.Module:
    return TinyLM(NARROW, 3, BLOCKS[block])


@functools.cache
def looped(block: str, precision: str) -> Any:
    """In memory, which `test_placements.py` compares with plain tensors: there bf16 gradients are added up in fp32."""
    return run_offloaded(script_of(False), functools.partial(make_model, block), zo.OffloadConfig(precision=precision))


@pytest.mark.parametrize("row", pairwise(MATRIX), ids=label)
def test_every_pair_of_settings_trains_as_the_loop(row: Row, nvme: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_small(monkeypatch)
    config = zo.OffloadConfig(
        **{kind: TIERS.get(row[kind], row[kind]) for kind in ("params", "grads", "optimizer", "activations")},
        precision=row["precision"],
        device_memory=row["device_memory"],
        nvme=nvme,
    )
    make = functools.partial(make_model, row["block"])
    assert run_offloaded(script_of(True, row["recompute"]), make, config) == looped(row["block"], row["precision"])


def test_with_a_loss_scaler_and_clipping(nvme: Path) -> None:
    outcomes = []
    for run in (loop, zo.accumulate):
        model = zo.offload(build(TinyLM), away(nvme / run.__name__, precision="fp16", grads="cpu"))
        optimizer, scaler = zo.AdamW(param_groups(model), lr=1e-2), new_scaler("fp16")
        loss_fn: LossFn = lambda model, batch, scaler=scaler: scaler.scale(model(batch) / 3)  # noqa: E731
        outcome: list[Any] = []
        for step in range(4):
            outcome += run(model, batches_of(3, 3 * step), loss_fn)
            scaler.unscale_(optimizer)
            outcome.append(zo.clip_grad_norm_(model, 0.5).nan_to_num(-1))
            scaler.step(optimizer)
            scaler.update()
            outcome.append(scaler.get_scale())
        outcomes.append([*outcome, zo.stats(model).skipped_steps])
        zo.close(model)
    assert outcomes[0] == outcomes[1]


def test_bytes_fetched_are_those_of_one_micro_batch(nvme: Path) -> None:
    """Of parameters alone: states rest in memory."""
    found = {}
    for count in (1, 5):
        model = zo.offload(build(lambda: TinyLM(WIDE, 4)), away(nvme / str(count), device_memory="9MiB"))
        optimizer = zo.AdamW(param_groups(model), lr=1e-2)
        for step in range(3):
            zo.accumulate(model, [tokens_of(5 * step + i) for i in range(count)], third)
            optimizer.step()
            optimizer.zero_grad()
        found[count] = zo.stats(model).read_bytes["nvme"]
        zo.close(model)
    assert found[1] == found[5] > 0


def test_a_loop_fetches_once_more_per_micro_batch(nvme: Path) -> None:
    """The reads that the test above would see if units did not stay for all."""
    model = zo.offload(build(lambda: TinyLM(WIDE, 4)), away(nvme, device_memory="9MiB"))
    optimizer, found = zo.AdamW(param_groups(model), lr=1e-2), []
    for run in (zo.accumulate, zo.accumulate, loop):
        run(model, [tokens_of(i) for i in range(4)], third)
        optimizer.step()
        optimizer.zero_grad()
        found.append(zo.stats(model).read_bytes["nvme"])
    assert found[2] > 2.5 * found[1]
    zo.close(model)


def test_gradients_on_disk_are_written_once(nvme: Path) -> None:
    """They are added up where they lie until the last micro-batch has been at the unit; a loop writes each sum."""
    written = {}
    for count, run in ((2, zo.accumulate), (5, zo.accumulate), (5, loop)):
        config = away(nvme / f"{count}-{run.__name__}", grads="nvme")
        model = zo.offload(build(lambda: TinyLM(WIDE, 4)), config)
        optimizer = zo.AdamW(param_groups(model), lr=1e-2)
        for step in range(3):
            run(model, [tokens_of(5 * step + i) for i in range(count)], third)
            optimizer.step()
            optimizer.zero_grad()
        written[count, run] = zo.stats(model).written_bytes["nvme"]
        zo.close(model)
    assert written[2, zo.accumulate] == written[5, zo.accumulate] > 0
    assert written[5, loop] > 2 * written[5, zo.accumulate]


class Sparing(torch.autograd.Function):
    """x @ weight, whose backward makes no gradient for the weight if told so."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, spares: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.spares = spares
        return x @ weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        return grad @ weight.t(), None if ctx.spares else x.t() @ grad, None


class SparingBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDE, WIDE) / WIDE)

    def forward(self, x: Tensor, spares: bool) -> Tensor:
        return Sparing.apply(x, self.weight, spares)


class SparingLM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(SparingBlock() for _ in range(3))

    def forward(self, batch: tuple[int, bool]) -> Tensor:
        seed, spares = batch
        x = torch.randn(4, WIDE, generator=torch.Generator().manual_seed(seed))
        for block in self.blocks:
            x = block(x, spares)
        return x.square().mean()


@pytest.mark.parametrize("grads", ["nvme", "cpu"])
def test_what_the_last_micro_batch_leaves_out_is_complete_all_the_same(grads: str, nvme: Path) -> None:
    """Nothing of it stays in pages that the next backward takes."""
    outcomes = []
    for run in (zo.accumulate, loop):
        config = away(nvme / run.__name__, grads=grads if run is zo.accumulate else "cpu")
        model = zo.offload(build(SparingLM), config)
        optimizer, found = zo.AdamW(model.parameters(), lr=1e-2), []
        for step in range(3):
            batches = [(10 * step + number, number == 2) for number in range(3)]
            found += [loss.item() for loss in run(model, batches, lambda model, batch: model(batch))]
            shards = [each.store for each in runtime_of(model).grads.ledger.sections]
            assert all(shard.on_disk for shard in shards if shard.tier is Tier.NVME)
            optimizer.step()
            optimizer.zero_grad()
        outcomes.append((found, read_masters(model)))
        zo.close(model)
    assert outcomes[0][0] == outcomes[1][0]
    assert all(torch.equal(value, outcomes[1][1][name]) for name, value in outcomes[0][1].items())


def test_where_nothing_leaves_micro_batches_run_one_after_the_other() -> None:
    """One micro-batch's graph at a time."""
    model = zo.offload(build(TinyLM), zo.OffloadConfig(precision="fp32"))
    alive: list[weakref.ref[torch.Tensor]] = []

    def loss_fn(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        assert not [each for each in alive if each() is not None]
        loss: torch.Tensor = model(batch)
        alive.append(weakref.ref(loss))
        return loss

    zo.accumulate(model, batches_of(3), loss_fn)
    zo.close(model)


def test_a_dropped_model_is_gone_at_once(nvme: Path) -> None:
    model = zo.offload(build(TinyLM), away(nvme))
    owner = weakref.ref(runtime_of(model))  # type: ignore[arg-type]
    gc.collect()
    gc.disable()
    try:
        zo.accumulate(model, batches_of(3), third)
        assert_at_rest(model)
        zo.close(model)
        del model
        assert owner() is None
    finally:
        gc.enable()


# Several ranks


RANKS: dict[str, Any] = {
    "stage": list(STAGES),
    "params": ["nvme", "cpu"],
    "grads": ["cpu", "nvme"],
    "precision": ["bf16", "fp32"],
    "no_sync": [False, True],
    "max_norm": [0.5, None],
    "num_frozen": [0, 1],
}


@pytest.mark.parametrize("row", pairwise(RANKS), ids=label)
def test_ranks_train_as_in_the_loop_that_reduces_once(row: Row, nvme: Path, pools: RankPools) -> None:
    settings = {name: row[name] for name in ("stage", "params", "grads", "precision")}
    case = Case(
        {**settings, "durability": "scratch", "device_memory": "8MiB"},
        3,
        4,
        row["max_norm"],
        num_frozen=row["num_frozen"],
    )
    # In place it is the loop itself, and that reduces each micro-batch.
    once = replace(case, no_sync=row["no_sync"] or row["params"] == "nvme")
    by_unit = replace(case, no_sync=row["no_sync"], by_unit=True)
    expected, found = (
        pools.of(2).succeed(ranks.train, replace(each, settings=case.settings | {"nvme": nvme / str(each.by_unit)}))
        for each in (once, by_unit)
    )
    assert found == expected


def reduced_bytes(rank: int, world_size: int, nvme: Path, count: int, by_unit: bool) -> int:
    """Over ranks, in one step."""
    model = zo.offload(build(TinyLM), away(nvme / f"{count} {by_unit}", grads="cpu", stage=2))
    optimizer = zo.AdamW(param_groups(model), lr=1e-2)
    (zo.accumulate if by_unit else loop)(model, batches_of(count, 10 * rank), third)
    optimizer.step()
    found = zo.stats(model).communicated_bytes["reduced"]
    zo.close(model)
    return found


def test_gradients_cross_ranks_once(nvme: Path, pools: RankPools) -> None:
    one, two, five = (
        pools.of(2).succeed(reduced_bytes, nvme, count, by_unit)
        for count, by_unit in ((1, False), (2, True), (5, True))
    )
    assert two == five == one
    assert pools.of(2).succeed(reduced_bytes, nvme, 5, False) == [5 * each for each in one]


class Shortened(TinyLM):
    """Leaves out the last block, and a part of the unit of what is small, with batches of odd length."""

    def forward(self, tokens: Tensor) -> Tensor:
        is_odd = tokens.shape[1] % 2
        x = self.embedding(tokens[:, :-1])
        for block in self.blocks[: len(self.blocks) - is_odd]:
            x = block(x)
        logits = self.head(x if is_odd else self.norm(x)).float()
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def after_deferred(rank: int, world_size: int, nvme: Path, grads: str, by_unit: bool) -> dict[str, Tensor]:
    """A backward that was not reduced, then micro-batches of which the last does not use all of that."""
    model = zo.offload(build(Shortened), away(nvme / str(by_unit), device_memory="8MiB", grads=grads))
    lengths = [8, 9, 9, 8, 9]
    batches = [tokens_of(10 * rank + i, length=length) for i, length in enumerate(lengths)]
    num_waiting = 1 if by_unit else len(batches) - 1
    with zo.no_sync(model):
        loop(model, batches[:num_waiting], third)
    (zo.accumulate if by_unit else loop)(model, batches[num_waiting:], third)
    owner = runtime_of(model)
    assert owner is not None
    sections = owner.grads.ledger.sections
    found = {f"{s.unit.name} {i}": s.store.view(i).clone() for s in sections for i in sorted(s.holding)}
    zo.close(model)
    return found


@pytest.mark.parametrize("grads", ["cpu", "nvme"])
def test_what_no_sync_has_left_is_reduced_as_in_the_loop(grads: str, nvme: Path, pools: RankPools) -> None:
    expected, found = (pools.of(2).succeed(after_deferred, nvme, grads, by_unit) for by_unit in (False, True))
    assert all(torch.equal(found[0][name], value) for name, value in expected[0].items())


def sparing_batches(rank: int) -> list[tuple[int, bool]]:
    """On rank 1 the last micro-batch gives no gradients."""
    return [(3 * rank + number, rank == 1 and number == 2) for number in range(3)]


def sparing_last(rank: int, world_size: int, nvme: Path) -> list[Tensor]:
    """This rank's part of each block's gradient."""
    model = zo.offload(build(SparingLM), away(nvme, grads="cpu"))
    zo.accumulate(model, sparing_batches(rank), lambda model, batch: model(batch))
    found = [grads.store.view(0).clone() for grads in runtime_of(model).grads.ledger.sections]
    zo.close(model)
    return found


def test_what_the_last_micro_batch_of_one_rank_leaves_out_is_reduced(nvme: Path, pools: RankPools) -> None:
    parts = pools.of(2).succeed(sparing_last, nvme)
    models = [build(SparingLM) for _ in parts]
    for rank, model in enumerate(models):
        loop(model, sparing_batches(rank), lambda model, batch: model(batch))
    for first, second, *params in zip(*parts, *(model.parameters() for model in models), strict=True):
        mean = (params[0].grad + params[1].grad) / 2
        assert torch.equal(torch.cat((first, second))[: mean.numel()].view_as(mean), mean)


# Random numbers


class Noisy(torch.autograd.Function):
    """Draws in its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * (torch.rand(grad.shape) > 0.2)


class DrawingBlock(Block):
    """Dropout, and numbers of Python's and NumPy's generators."""

    def forward(self, x: Tensor) -> Tensor:
        dropped = F.dropout(super().forward(x), 0.3) * (0.5 + random.random())
        return x + Noisy.apply(dropped) * float(1 + np.random.randn() / 10)


DRAWING_TIERS: dict[str, dict[str, Any]] = {
    "memory": {"params": "cpu", "optimizer": "cpu"},
    "states away": {"params": "cpu", "optimizer": "nvme"},
    "away": {"params": "nvme", "grads": "nvme", "optimizer": "nvme", "device_memory": "8MiB"},
    "activations away": {"params": "nvme", "activations": "nvme", "optimizer": "cpu"},
    "mixed": {"params": {"cpu": 0.5, "nvme": 0.5}, "optimizer": "cpu"},
}


def dropping(model: nn.Module, batch: Tensor) -> Tensor:
    """A loss whose own code draws."""
    loss: Tensor = model(batch) * F.dropout(torch.ones(8), 0.5).mean()
    return loss


def draw() -> list[float]:
    return [*torch.rand(2).tolist(), random.random(), float(np.random.rand())]


def drawn(tiers: str, nvme: Path, recompute: str, rank: int = 0, stage: int = 3) -> list[Any]:
    """Losses, norms, what the generators give afterwards, and parameters."""
    block = Block if recompute == "blocks" else DrawingBlock  # who is run again may draw torch's numbers only
    model = build(lambda: TinyLM(NARROW, 3, block))
    for each in model.blocks:
        each.register_forward_pre_hook(lambda module, args: (F.dropout(args[0], 0.1),))
    if recompute == "blocks":
        zo.checkpoint(model.blocks)
    config = zo.OffloadConfig(stage=stage, precision="fp32", nvme=nvme, **DRAWING_TIERS[tiers])
    optimizer = zo.AdamW(zo.offload(model, config).parameters(), lr=1e-2)
    for seed, start in enumerate((torch.manual_seed, random.seed, np.random.seed)):
        start(seed + 10 * rank)
    found: list[Any] = []
    for step in range(2):
        losses = zo.accumulate(model, batches_of(3, 3 * step + 7 * rank), dropping)
        found += [loss.item() for loss in losses] + [zo.clip_grad_norm_(model, 0.5).item(), *draw()]
        optimizer.step()
        optimizer.zero_grad()
    with zo.gathered(model):
        found += [param.tolist() for param in model.parameters()]
    zo.close(model)
    return found


@pytest.mark.parametrize("recompute", ["nothing", "blocks"])
def test_random_numbers_do_not_depend_on_the_placement(recompute: str, nvme: Path) -> None:
    expected = drawn("memory", nvme / "memory", recompute)
    assert len({loss for loss in expected if isinstance(loss, float)}) == 16
    for tiers in [tiers for tiers in DRAWING_TIERS if tiers != "memory"]:
        assert drawn(tiers, nvme / tiers.replace(" ", "-"), recompute) == expected, tiers


def drawn_on_ranks(rank: int, world_size: int, tiers: str, nvme: str, stage: int) -> list[Any]:
    return drawn(tiers, Path(nvme), "nothing", rank, stage)


@pytest.mark.parametrize("stage", [0, 3, *map(full, (1, 2))])
def test_random_numbers_of_ranks_do_not_depend_on_the_placement(stage: int, nvme: Path, pools: RankPools) -> None:
    """Nor do sums over ranks: gradients cross once where nothing leaves, too."""
    pool = pools.of(2)
    expected = pool.succeed(drawn_on_ranks, "memory", str(nvme / "memory"), stage)
    assert expected[0] != expected[1]
    assert pool.succeed(drawn_on_ranks, "away", str(nvme / "away"), stage) == expected


@pytest.mark.parametrize("tiers", ["memory", "away"])
def test_where_the_generators_stand_afterwards(tiers: str, nvme: Path) -> None:
    """Where the first micro-batch left them; as before where nothing drew, and after an error."""
    model = zo.offload(build(TinyLM), zo.OffloadConfig(nvme=nvme, **DRAWING_TIERS[tiers]))
    optimizer = zo.AdamW(model.parameters())

    def after(*numbers: int, error: bool = False) -> list[float]:
        """The numbers drawn after a call in which these micro-batches draw three numbers."""

        def loss_fn(model: nn.Module, batch: tuple[int, Tensor]) -> Tensor:
            loss: Tensor = model(batch[1])
            if batch[0] in numbers:
                draw()
            if error and batch[0] == 1:
                raise ValueError("of the program")
            return loss

        for start in (torch.manual_seed, random.seed, np.random.seed):
            start(5)
        with pytest.raises(ValueError, match="of the program") if error else contextlib.nullcontext():
            zo.accumulate(model, list(enumerate(batches_of(3))), loss_fn)
        optimizer.zero_grad()
        return draw()

    for start in (torch.manual_seed, random.seed, np.random.seed):
        start(5)
    first, second = draw(), draw()
    assert after() == first
    assert after(0) == after(0, 1, 2) == second
    assert after(0, 1, error=True) == first
    assert after(1) not in (first, second)  # the next call's micro-batches draw others
    zo.close(model)


def test_one_micro_batch_draws_as_the_loop(nvme: Path) -> None:
    found = []
    for run in (zo.accumulate, loop):
        model = zo.offload(build(TinyLM), away(nvme / run.__name__))
        torch.manual_seed(3)
        found.append([*run(model, batches_of(1), dropping), *draw()[:2]])
        zo.close(model)
    assert found[0] == found[1]
