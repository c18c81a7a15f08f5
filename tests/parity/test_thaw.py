"""Parameters that were frozen when they were offloaded are trained later: bit for bit what a plain model does."""

from __future__ import annotations

import importlib
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero_offload as zo
from tests.helpers import bases, experts
from tests.helpers.disk import runtime
from tests.helpers.failing import fail_at, hooks_of
from tests.helpers.fresh import run_script
from tests.helpers.models import TinyLM, build, tokens_of
from tests.helpers.pairwise import full, in_turn
from tests.helpers.ranks import RankPool, read_params
from tests.helpers.scripts import Average, check, clip_norm, run_both, run_offloaded, run_plain
from tests.helpers.thawing import SWITCH, TIERS, UNEVEN, frozen, run
from tests.parity.test_adoption import adapt, adopt
from zero_offload.base.errors import CapacityError
from zero_offload.base.types import Tier
from zero_offload.cli.main import main
from zero_offload.standins.owners import owner_of
from zero_offload.storage.shards.store import ShardStore

RUNTIME = importlib.import_module("zero_offload.model.runtime")
Rows = Callable[[int], Tensor]


def train(model: nn.Module, optimizer: Any, rows: Rows, average: Average, steps: range) -> Iterator[float]:
    for step in steps:
        loss = model(rows(step))
        loss.backward()
        average(model)
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()


def thaw(optimizer: Any, *modules: nn.Module) -> None:
    for module in modules:
        module.requires_grad_(True)
        optimizer.add_param_group({"params": list(module.parameters()), "lr": 2e-2})


def gradually(model: nn.Module, rows: Rows, average: Average) -> Iterator[float]:
    """From the output on; then some rest and come back, a tied pair and one bias thaw."""
    optimizer = zo.AdamW(model.norm.parameters(), lr=1e-2)
    yield from train(model, optimizer, rows, average, range(2))
    thaw(optimizer, model.blocks[2])
    yield from train(model, optimizer, rows, average, range(2, 4))
    model.blocks[2].requires_grad_(False)
    thaw(optimizer, model.blocks[1])
    yield from train(model, optimizer, rows, average, range(4, 6))
    model.blocks[2].requires_grad_(True)
    thaw(optimizer, model.head)
    yield from train(model, optimizer, rows, average, range(6, 8))
    bias = model.blocks[0].up.bias
    bias.requires_grad = True
    optimizer.add_param_group({"params": [bias]})
    yield from train(model, optimizer, rows, average, range(8, 10))
    model.blocks[0].down.weight.requires_grad_(True)  # of the same section
    optimizer.add_param_group({"params": [model.blocks[0].down.weight]})
    yield from train(model, optimizer, rows, average, range(10, 12))


def held_at_once(model: nn.Module, rows: Rows, average: Average) -> Iterator[float]:
    """The optimizer has all parameters from the start. Gradients wait while others thaw, a graph is older than that,
    and norms are clipped."""
    optimizer = zo.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    yield from train(model, optimizer, rows, average, range(1))
    model(rows(1)).backward()
    older = model(rows(2))
    model.blocks[0].requires_grad_(True)
    older.backward()  # knows the block as frozen
    assert all(param.grad is None for param in model.blocks[0].parameters())
    optimizer.step()
    optimizer.zero_grad()
    for step in range(3, 6):
        model(rows(step)).backward()
        yield clip_norm([p for p in model.parameters() if p.requires_grad], 0.1, model)
        optimizer.step()
        optimizer.zero_grad()
    yield from train(model, optimizer, rows, average, range(6, 7))


@pytest.mark.parametrize("tier", ["cpu", "nvme", "cached", "states"])
def test_gradual_unfreezing(tier: str, nvme: Path) -> None:
    config = zo.OffloadConfig(precision="fp32", nvme=nvme, **TIERS[tier])
    check(run_offloaded(gradually, frozen, config), run_plain(gradually, frozen))


@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_beside_gradients_that_wait(tier: str, nvme: Path) -> None:
    config = zo.OffloadConfig(precision="fp32", nvme=nvme, **TIERS[tier])
    check(run_offloaded(held_at_once, frozen, config), run_plain(held_at_once, frozen))


@pytest.mark.parametrize("tier", ["cpu", "nvme", "cached"])
def test_masters_of_bf16_begin_as_the_values(tier: str, nvme: Path) -> None:
    config = zo.OffloadConfig(precision="bf16", nvme=nvme, **TIERS[tier])
    check(run_offloaded(gradually, frozen, config), run_plain(gradually, frozen, dtype=torch.bfloat16))


# Generations


@pytest.mark.parametrize("tier", ["nvme", "cached", *map(full, ("cpu", "states"))])
def test_a_resume_trains_what_was_trained(tier: str, tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", range(6), **TIERS[tier])
    values: list[Any] = []
    for at, (begin, end) in enumerate([(0, 1), (1, 2), (2, SWITCH), (SWITCH, 4), (4, 6)]):
        more, params = run(tmp_path / "parts", range(begin, end), "resume" if at else "refuse", **TIERS[tier])
        values += more
    check((values, params), whole)
    assert main(["verify", str(tmp_path / "parts")]) == 0


KILLED = """
import sys
from pathlib import Path
from tests.helpers.thawing import SWITCH, TIERS, killed_at, run
run(Path(sys.argv[1]), range(6), before=killed_at(SWITCH, int(sys.argv[3])), **TIERS[sys.argv[2]])
"""


@pytest.mark.parametrize("num_writes", [2, 20, *map(full, (0, 5, 12))])
@pytest.mark.parametrize("tier", ["nvme", *map(full, ("cpu", "cached", "states"))])
def test_a_kill_in_the_step_that_thaws(tier: str, num_writes: int, tmp_path: Path) -> None:
    """The generation before has the section frozen, in a place of its own."""
    whole = run(tmp_path / "whole", range(6), **TIERS[tier])
    killed = run_script(KILLED, str(tmp_path / "parts"), tier, str(num_writes))
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    found = run(tmp_path / "parts", range(SWITCH, 6), "resume", **TIERS[tier])
    check((whole[0][: -len(found[0])] + found[0], found[1]), whole)
    assert main(["verify", str(tmp_path / "parts")]) == 0


def test_the_room_of_frozen_values_is_free_after_the_next_commit(nvme: Path) -> None:
    """The generation before names it until then."""
    config = zo.OffloadConfig(precision="bf16", params="nvme", optimizer="nvme", nvme=nvme)
    model = zo.offload(build(frozen), config)
    owner, optimizer = runtime(model), zo.AdamW(model.parameters())
    weight, disk = model.blocks[0].up.weight, owner.store.disk
    shard = owner.places[weight].section.shard
    list(train(model, optimizer, tokens_of, lambda _: None, range(1)))
    zo.commit(model, optimizer)
    owner.drain()
    (extent,) = shard.slots[0].values()
    assert shard.committed == 0
    sizes = shard.layout.block_sizes(torch.bfloat16)
    weight.requires_grad_(True)
    assert disk.allocate("now", sizes).spans_in(0) != extent.spans_in(0)
    list(train(model, optimizer, tokens_of, lambda _: None, range(1)))
    zo.commit(model, optimizer)
    zo.close(model)
    assert disk.allocate("then", sizes).spans_in(0) == extent.spans_in(0)


def test_the_room_of_values_that_no_generation_has_is_free_at_once(nvme: Path) -> None:
    model = zo.offload(build(frozen), zo.OffloadConfig(params="nvme", optimizer="nvme", nvme=nvme))
    owner, weight = runtime(model), model.blocks[0].up.weight
    shard = owner.places[weight].section.shard
    (extent,), sizes = shard.slots[0].values(), shard.layout.block_sizes(torch.bfloat16)
    assert shard.committed is None
    weight.requires_grad_(True)
    assert owner.store.disk.allocate("now", sizes).spans_in(0) == extent.spans_in(0)
    zo.close(model)


# Several ranks


@pytest.mark.parametrize("stage", [3, 1, *map(full, (0, 2))])
@pytest.mark.parametrize("tier", ["cpu", "nvme", full("cached")])
def test_on_two_ranks(stage: int, tier: str, nvme: Path, pool: RankPool) -> None:
    given = TIERS[tier] | {"nvme": nvme, "stage": stage}
    for found, expected in pool.succeed(run_both, gradually, frozen, given):
        check(found, expected)


def thaw_otherwise(rank: int, world_size: int, which: str) -> None:
    model = zo.offload(build(frozen), zo.OffloadConfig())
    optimizer = zo.AdamW(model.parameters())
    block = model.blocks[0]
    try:
        if which == "one more":
            block.up.bias.requires_grad_(True)
            if rank == 1:
                block.up.weight.requires_grad_(True)
        elif which == "another":
            (block.up.bias if rank == 0 else model.blocks[1].up.bias).requires_grad_(True)
        elif rank == 1:
            block.up.bias.requires_grad_(True)
        model(tokens_of(0)).backward()
        optimizer.step()
    finally:
        zo.close(model)


@pytest.mark.parametrize("which", ["alone", "one more", "another"])
def test_ranks_that_thaw_differently(which: str, pool: RankPool) -> None:
    found = pool.call(thaw_otherwise, which)
    assert all(
        "rank 0 is at " in each.message and "rank 1 at requires_grad_(True) of" in each.message for each in found
    )


# Refused, and undone


@pytest.mark.parametrize("tier", ["cpu", "nvme", "cached", "states"])
def test_an_error_on_the_way_undoes_it(tier: str, nvme: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, plain = build(frozen), build(frozen)
    zo.offload(model, zo.OffloadConfig(precision="fp32", nvme=nvme, **TIERS[tier]))
    optimizers = [zo.AdamW(each.parameters(), lr=1e-2) for each in (model, plain)]
    num_hooks = len(hooks_of(model))
    for place, name in ((ShardStore, "write_components"), (RUNTIME, "hook_grads")):
        fail_at(monkeypatch, place, name, 1, zo.StorageError("injected"))
        with pytest.raises(zo.StorageError, match="injected"):
            model.blocks[1].requires_grad_(True)
        monkeypatch.undo()
        assert not any(param.requires_grad for param in model.blocks[1].parameters())
        assert len(hooks_of(model)) == num_hooks
    for block in (1, 0):
        for each, optimizer in zip((model, plain), optimizers, strict=True):
            each(tokens_of(0)).backward()
            optimizer.step()
            optimizer.zero_grad()
            each.blocks[block].requires_grad_(True)
    assert all(map(torch.equal, read_params(model).values(), (param.detach() for param in plain.parameters())))


def test_what_cannot_be_trained_now(tmp_path: Path) -> None:
    model = zo.offload(build(frozen), zo.OffloadConfig(nvme=tmp_path / "nvme", optimizer="nvme"))
    words = r"requires_grad_\(True\) of blocks.0.norm.weight, which was frozen .* inside of a forward, .* zo\.gathered"
    with zo.gathered(model.head), pytest.raises(zo.ZeroOffloadError, match=words):
        model.blocks[0].requires_grad_(True)
    optimizer = zo.AdamW(model.parameters())
    with zo.gathered(model.blocks[0].up, mode="write"):
        model.blocks[0].up.bias.requires_grad_(True)  # it is plain here
    model(tokens_of(0)).backward()
    with pytest.raises(zo.ZeroOffloadError, match=r"blocks\.0\.up\.bias was frozen .* Call it between steps"):
        optimizer.step()
    model.blocks[0].up.bias.requires_grad_(False)
    model.blocks[0].up.bias.requires_grad_(True)
    zo.close(model)

    large = nn.Sequential(nn.Linear(8, 8), nn.Linear(1024, 1024).requires_grad_(False))
    zo.offload(large, zo.OffloadConfig(nvme=tmp_path / "few", optimizer="nvme", nvme_capacity="8MiB"))
    with pytest.raises(CapacityError, match=r"states of its section \(1\) do not fit\n.*nvme tier"):
        large[1].requires_grad_(True)
    assert not large[1].weight.requires_grad
    zo.close(large)

    backward = zo.offload(build(frozen), zo.OffloadConfig(overlap="backward"))
    with pytest.raises(zo.ConfigError, match=r"blocks\.0\.norm\.weight .*overlap='backward'"):
        backward.blocks[0].requires_grad_(True)


# Where frozen values rest elsewhere


@pytest.mark.parametrize("params", ["nvme", "cpu"])
def test_a_base_in_files_of_others(params: str, tmp_path: Path) -> None:
    """The file is read, and never written; a resume finds the masters in ours."""
    folder = bases.write_base(tmp_path / "base")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    found = []
    for nvme in (None, tmp_path / "run"):
        config = bases.settings(nvme) if nvme is None else bases.settings(nvme, params=params)
        model, optimizer = bases.opened(folder, config)
        losses = bases.steps(model, optimizer, 0, 2)
        thaw(optimizer, model.blocks[1], model.head)
        losses += bases.steps(model, optimizer, 2, 4)
        if nvme is not None:
            zo.close(model)
            model, optimizer = bases.opened(None, bases.settings(nvme, params=params, existing="resume"))
            assert {name for name, param in model.named_parameters() if param.requires_grad} >= {
                "embedding.weight", "blocks.1.up.bias", "scales.0"
            }  # fmt: skip
            optimizer = zo.AdamW(model.scales, lr=1e-2)
            thaw(optimizer, model.blocks[1], model.head)
            assert zo.resume(model, optimizer) is not None
        losses += bases.steps(model, optimizer, 4, 6)
        found.append((losses, read_params(model)))
        zo.close(model)
    check(*found)
    assert before == {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_checkpoint_from_before(tmp_path: Path) -> None:
    """Its frozen values are masters again; a model that is frozen cannot take a checkpoint from after."""
    models = [zo.offload(build(frozen), zo.OffloadConfig(precision="bf16")) for _ in range(2)]
    optimizers = [zo.AdamW(model.parameters(), lr=1e-2) for model in models]
    list(train(models[0], optimizers[0], tokens_of, lambda _: None, range(2)))
    zo.save_checkpoint(models[0], optimizers[0], tmp_path / "before")
    expected = []
    for _ in range(2):
        models[0].blocks.requires_grad_(True)
        expected.append(list(train(models[0], optimizers[0], tokens_of, lambda _: None, range(2, 5))))
        zo.save_checkpoint(models[0], optimizers[0], tmp_path / f"after {len(expected)}")
        zo.load_checkpoint(models[0], optimizers[0], tmp_path / "before")
    assert expected[0] == expected[1]
    with pytest.raises(zo.CheckpointError, match=r"'blocks\.0\.norm\.weight' was frozen .* requires_grad_\(True\) on"):
        zo.load_checkpoint(models[1], optimizers[1], tmp_path / "after 1")
    models[1].blocks.requires_grad_(True)
    zo.load_checkpoint(models[1], optimizers[1], tmp_path / "after 1")
    zo.load_checkpoint(models[0], optimizers[0], tmp_path / "after 2")
    assert all(map(torch.equal, read_params(models[1]).values(), read_params(models[0]).values()))


def test_experts_in_groups() -> None:
    found = []
    for size in (0, 2):
        model = zo.offload(build(partial(experts.experts_lm, size=size)), zo.OffloadConfig(precision="fp32"))
        optimizer = zo.AdamW(model.parameters(), lr=1e-2)
        losses = list(train(model, optimizer, tokens_of, lambda _: None, range(1)))
        model.blocks[-1].requires_grad_(True)
        losses += train(model, optimizer, tokens_of, lambda _: None, range(1, 4))
        found.append((losses, read_params(model)))
    check(found[1], found[0])


def test_after_an_adoption(tmp_path: Path) -> None:
    """Frozen parameters of both calls."""
    found = []
    for nvme in (None, tmp_path):
        model = zo.offload(build(frozen), zo.OffloadConfig(precision="bf16", nvme=nvme))
        adapters = adapt(model, "up")
        zo.offload(model)
        optimizer = zo.AdamW(model.parameters(), lr=1e-2)
        values: list[float] = []
        for step in range(4):
            if step == 1:
                model.blocks[1].up.scale.requires_grad_(True)
                model.blocks[0].down.requires_grad_(True)
            if step == 3 and nvme is not None:
                zo.commit(model, optimizer)
                zo.close(model)
                config = zo.OffloadConfig(precision="bf16", nvme=nvme, existing="resume")
                model = zo.offload(build(frozen), config)
                adapters = adapt(model, "up")
                zo.offload(model)
                optimizer = zo.AdamW(model.parameters(), lr=1e-2)
                assert zo.resume(model, optimizer) is not None
            values += train(model, optimizer, tokens_of, lambda _: None, range(step, step + 1))
        assert adapters
        found.append((values, read_params(model)))
        zo.close(model)
    check(*found)


def thaws_again(model: nn.Module, rows: Rows, average: Average) -> Iterator[float]:
    """Adapters go and come again, under their names; a scale among them thaws each time."""
    model.requires_grad_(False)
    for cycle in range(2):
        adapters = adapt(model, "up", seed=cycle)
        adopt(model)
        optimizer = zo.AdamW([*adapters, *(block.up.scale for block in model.blocks)], lr=3e-2)
        yield from train(model, optimizer, rows, average, range(3 * cycle, 3 * cycle + 1))
        for block in model.blocks:
            block.up.scale.requires_grad_(True)
        yield from train(model, optimizer, rows, average, range(3 * cycle + 1, 3 * cycle + 3))
        for block in model.blocks:
            block.up = block.up.base_layer


def test_a_parameter_in_the_place_of_one_that_thawed() -> None:
    make = partial(TinyLM, UNEVEN)
    expected = run_plain(thaws_again, make)
    assert run_offloaded(thaws_again, make, zo.OffloadConfig(precision="fp32"))[0] == expected[0]


# States that go


def drop(optimizer: Any, module: nn.Module) -> None:
    module.requires_grad_(False)
    for param in module.parameters():
        forget(optimizer, param)


def forget(optimizer: Any, param: nn.Parameter) -> None:
    """Delete what an optimizer keeps of a parameter, but for what completes a plain bf16 value to its master."""
    entry = optimizer.state.get(param, {})
    if owner_of(param) is None and "residual" in entry:
        for name in entry.keys() - {"residual"}:
            entry[name].zero_()
    else:
        optimizer.state.pop(param, None)


def block_by_block(model: nn.Module, rows: Rows, average: Average) -> Iterator[float]:
    """One block lives at a time. A block comes back with moments of zeros, one is deleted in part, one while it is
    trained, and all are at last."""
    optimizer = zo.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    step = 0
    for live in (2, 0, 1, 0):
        for block in model.blocks:
            drop(optimizer, block)
        model.blocks[live].requires_grad_(True)
        yield from train(model, optimizer, rows, average, range(step, step + 2))
        step += 2
    model.blocks[0].requires_grad_(False)
    forget(optimizer, model.blocks[0].up.weight)
    yield from train(model, optimizer, rows, average, range(step, step + 1))
    model.blocks[0].requires_grad_(True)
    forget(optimizer, model.norm.weight)
    yield from train(model, optimizer, rows, average, range(step + 1, step + 3))
    model.requires_grad_(False)
    drop(optimizer, model)
    model.head.requires_grad_(True)
    yield from train(model, optimizer, rows, average, range(step + 3, step + 5))


def all_trained() -> nn.Module:
    return frozen().requires_grad_(True)


@in_turn(tier=["nvme", "cpu", "cached", "states"], make=[frozen, all_trained], precision=["fp32", "bf16"])
def test_states_that_go(tier: str, make: Any, precision: str, nvme: Path) -> None:
    config = zo.OffloadConfig(precision=precision, nvme=nvme, **TIERS[tier])
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    check(run_offloaded(block_by_block, make, config), run_plain(block_by_block, make, dtype=dtype))


@pytest.mark.parametrize("stage", [3, *map(full, (0, 1, 2))])
@pytest.mark.parametrize("tier", ["nvme", full("cpu")])
def test_states_that_go_on_two_ranks(stage: int, tier: str, nvme: Path, pool: RankPool) -> None:
    given = TIERS[tier] | {"nvme": nvme, "stage": stage}
    for found, expected in pool.succeed(run_both, block_by_block, frozen, given):
        check(found, expected)


@pytest.mark.parametrize("tier", ["nvme", "cached", *map(full, ("cpu", "states"))])
def test_a_resume_has_the_states_of_what_lives(tier: str, tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", range(7), drops=True, **TIERS[tier])
    values: list[Any] = []
    for at, (begin, end) in enumerate([(0, 2), (2, SWITCH), (SWITCH, 4), (4, 7)]):
        more, params = run(
            tmp_path / "parts", range(begin, end), "resume" if at else "refuse", drops=True, **TIERS[tier]
        )
        values += more
    check((values, params), whole)
    assert main(["verify", str(tmp_path / "parts")]) == 0


def test_bytes_are_those_of_the_live_block(nvme: Path) -> None:
    """In memory, in the plan, written, and in files but for the second slot of what has lived."""
    config = partial(zo.OffloadConfig, precision="fp32", nvme=nvme, existing="discard")
    memory, planned, files, written = [], [], [], []
    for optimizer_tier in ("cpu", "nvme"):
        model = zo.offload(build(partial(TinyLM, 320, 6)).requires_grad_(False), config(optimizer=optimizer_tier))
        optimizer = zo.AdamW(model.parameters(), lr=1e-2)
        for before, block in zip([None, *model.blocks], model.blocks, strict=False):
            if before is not None:
                drop(optimizer, before)
            block.requires_grad_(True)
            list(train(model, optimizer, tokens_of, lambda _: None, range(2)))
            zo.commit(model, optimizer)
            runtime(model).drain()
            stats = zo.stats(model)
            if optimizer_tier == "cpu":
                memory.append(stats.resident_bytes["cpu"])
                planned.append(runtime(model).sizes.plan.used_bytes(Tier.CPU))
            else:
                files.append(stats.resident_bytes["nvme"])
                written.append(stats.written_bytes["nvme"])
        zo.close(model)
    block_bytes = sum(4 * param.numel() for param in model.blocks[0].parameters())
    assert len({*memory}) == len({*planned[1:]}) == len({*written[1:]}) == 1
    assert files[-1] - files[1] < 5 * block_bytes  # 4 blocks have a slot more; their states would be 16


@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_states_deleted_behind_a_step_are_zero_in_its_generation(tier: str, nvme: Path) -> None:
    """Of a parameter that is trained, and of a block that rests."""
    found = []
    for resumes in (False, True):
        config = partial(zo.OffloadConfig, precision="bf16", nvme=nvme / str(resumes), **TIERS[tier])
        model = zo.offload(build(all_trained), config())
        optimizer = zo.AdamW(model.parameters(), lr=1e-2)
        values = list(train(model, optimizer, tokens_of, lambda _: None, range(2)))
        del optimizer.state[model.norm.weight]
        drop(optimizer, model.blocks[1])
        zo.commit(model, optimizer)
        if resumes:
            zo.close(model)
            model = build(all_trained)
            model = zo.offload(model, config(existing="resume"))
            model.blocks[1].requires_grad_(False)
            optimizer = zo.AdamW(model.parameters(), lr=1e-2)
            assert zo.resume(model, optimizer) is not None
        assert model.blocks[1].up.weight not in optimizer.state and model.norm.weight not in optimizer.state
        values += train(model, optimizer, tokens_of, lambda _: None, range(2, 4))
        model.blocks[1].requires_grad_(True)
        values += train(model, optimizer, tokens_of, lambda _: None, range(4, 6))
        found.append((values, read_params(model)))
        zo.close(model)
    check(*found)
