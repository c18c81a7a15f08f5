"""`zo.copy` gives an offloaded copy of a model, some chunks at a time; `copy.deepcopy` one in memory, where it fits."""

from __future__ import annotations

import copy
import time
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero_offload as zo
from tests.helpers import bases
from tests.helpers.disk import runtime
from tests.helpers.models import NARROW, WIDE, TinyLM, build, tokens_of
from tests.helpers.pairwise import in_turn
from tests.helpers.ranks import Failure, RankPool, read_params
from tests.helpers.reference import read_masters
from tests.helpers.short_memory import memory_left
from zero_offload.base.types import MIB, Tier
from zero_offload.model import copies
from zero_offload.optim.pipeline import UpdatePipeline
from zero_offload.standins.owners import owner_of

TIERS: dict[str, dict[str, Any]] = {
    "cpu": {"params": "cpu"},
    "nvme": {"params": "nvme", "optimizer": "nvme"},
    "mixed": {"params": {"cpu": 0.5, "nvme": 0.5}, "optimizer": "nvme"},
    "device": {"params": "device"},
}


class Kinds(nn.Module):
    """Ties, buffers, an LSTM's list of weights, a filter in another memory format, frozen and single parameters."""

    def __init__(self, rows: Callable[[int, int], nn.Module] = nn.LSTM) -> None:
        super().__init__()
        self.lm = zo.checkpoint(TinyLM())
        self.conv = nn.Conv2d(2, 4, 3).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm2d(4)
        self.rows = rows(4, 8)
        self.scale = nn.Parameter(torch.tensor(0.5))
        self.listed = [self.scale, next(self.rows.parameters())]
        self.register_buffer("places", torch.arange(7.0), persistent=False)
        self.lm.blocks[0].requires_grad_(False)
        self.lm.blocks[1].up.bias.requires_grad_(False)
        self.lm.blocks[2].eval()
        self.calls: list[int] = []
        self.register_forward_hook(lambda module, args, out: module.calls.append(len(module.calls)))

    def forward(self, tokens: Tensor) -> Tensor:
        image = tokens.view(2, 1, 3, 3).expand(2, 2, 3, 3).to(self.scale.dtype)
        rows = self.rows(self.norm(self.conv(image)).flatten(2).permute(2, 0, 1))
        rows = rows[0] if isinstance(rows, tuple) else rows
        return self.lm(tokens) * self.scale + rows.float().square().mean() + self.places.float().mean()


def of_tier(tier: str, directory: Path, precision: str = "fp32", **more: Any) -> zo.OffloadConfig:
    return zo.OffloadConfig(**{"precision": precision, "nvme": directory, **TIERS[tier], **more})


def trained(model: nn.Module, steps: range, lr: float = 1e-2) -> list[float]:
    optimizer, losses = zo.AdamW([param for param in model.parameters() if param.requires_grad], lr=lr), []
    for step in steps:
        loss = model(tokens_of(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def flags(model: nn.Module) -> list[tuple[str, bool, tuple[int, ...]]]:
    return [(name, param.requires_grad, param.stride()) for name, param in model.named_parameters()]


@in_turn(precision=["fp32", "bf16", "fp16"], source=list(TIERS), tier=list(TIERS), make=[Kinds, lambda: TinyLM(WIDE)])
def test_a_copy_is_the_deep_copy_of_a_plain_model(
    precision: str, source: str, tier: str, make: Callable[[], nn.Module], tmp_path: Path
) -> None:
    model = zo.offload(build(make), of_tier(source, tmp_path / "model", precision))
    trained(model, range(2), 1e-2 if precision != "fp16" else 1e-3)
    plain = copy.deepcopy(model)
    made: Any = zo.copy(model, of_tier(tier, tmp_path / "copy", precision))
    assert type(made) is type(model) and made is not model and flags(made) == flags(model)
    assert [module.training for module in made.modules()] == [module.training for module in model.modules()]
    assert all(owner_of(param) is runtime(made) for param in made.parameters())
    found, expected = read_masters(made), read_masters(model)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert all(torch.equal(a, b) for a, b in zip(made.buffers(), plain.buffers(), strict=True))
    # It goes its own way, as an ordinary offloaded model, and the other one stays what it is.
    twin = zo.offload(build(make), of_tier("cpu", tmp_path / "twin", precision))
    with zo.gathered(twin, kind="master", mode="write") as masters:
        for name in masters:
            masters[name].copy_(expected[name])
    twin.load_state_dict(plain.state_dict() | {}, strict=True) if precision == "fp32" else None
    for a, b in zip(twin.buffers(), made.buffers(), strict=True):
        a.copy_(b)
    assert trained(made, range(2, 5)) == trained(twin, range(2, 5))
    after = read_masters(model)
    assert all(torch.equal(after[name], expected[name]) for name in expected)
    for each in (made, model, twin):
        zo.close(each)


@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_a_copy_in_fp32_has_all_bits_of_the_masters(tier: str, tmp_path: Path) -> None:
    model = zo.offload(build(TinyLM), of_tier(tier, tmp_path / "model", "bf16"))
    trained(model, range(3))
    masters = read_masters(model)
    assert any(not torch.equal(master, master.bfloat16().float()) for master in masters.values())
    teacher = zo.copy(model, of_tier(tier, tmp_path / "copy"), kind="frozen")
    assert not any(param.requires_grad for param in teacher.parameters())
    assert all(param.requires_grad for param in model.parameters())
    found = read_masters(teacher)
    assert all(found[name].dtype == torch.float32 and torch.equal(found[name], masters[name]) for name in masters)
    plain = build(TinyLM)
    plain.load_state_dict(masters, strict=False)
    assert teacher(tokens_of(7)).item() == plain(tokens_of(7)).item()  # nothing is cast to 16 bits any more
    zo.close(model)
    zo.close(teacher)


def test_a_frozen_copy_takes_its_values_and_no_more(tmp_path: Path) -> None:
    model = zo.offload(build(lambda: TinyLM(WIDE, 4)), of_tier("nvme", tmp_path / "model", "bf16"))
    teacher = zo.copy(model, of_tier("nvme", tmp_path / "copy"), kind="frozen")
    nbytes = sum(4 * param.numel() for param in model.parameters())
    files = sum(file.stat().st_blocks * 512 for file in (tmp_path / "copy").rglob("*") if file.is_file())
    assert nbytes <= files < 1.1 * nbytes
    zo.close(model)
    zo.close(teacher)


def test_hooks_of_the_program_are_copied_and_ours_are_not(tmp_path: Path) -> None:
    model: Any = zo.offload(build(Kinds), of_tier("nvme", tmp_path / "model", "bf16"))
    made: Any = zo.copy(model, of_tier("nvme", tmp_path / "copy", "bf16"))
    for one, other in zip(model.modules(), made.modules(), strict=True):
        for name in ("_forward_pre_hooks", "_forward_hooks", "_state_dict_pre_hooks", "_load_state_dict_post_hooks"):
            assert len(getattr(one, name)) == len(getattr(other, name)), (type(one), name)
        assert one._forward_hooks_always_called.keys() <= one._forward_hooks.keys()
        assert other._forward_hooks_always_called.keys() <= other._forward_hooks.keys()
    made(tokens_of(0))
    assert (model.calls, made.calls) == ([], [0])
    assert made.listed[0] is made.scale and made.listed[1] is made.rows.weight_ih_l0
    assert made.lm.head.weight is made.lm.embedding.weight
    zo.close(model)
    zo.close(made)


def test_a_copy_holds_some_chunks_and_reads_each_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = zo.offload(build(lambda: TinyLM(640, 4)), of_tier("nvme", tmp_path / "model"))
    live: list[weakref.ref[Any]] = []
    most = count = 0
    read = copies.read_master_chunk
    elements = copies.RestingTensor.read

    def note(values: Tensor) -> None:
        nonlocal most
        live.append(weakref.ref(values.untyped_storage()))
        most = max(most, sum(each.nbytes() for each in (found() for found in live) if each is not None))

    def chunk(*args: Any) -> Tensor:
        nonlocal count
        count += 1
        values = read(*args).clone()
        note(values)
        return values

    def counted(self: Any, begin: int, end: int) -> Tensor:
        values = elements(self, begin, end)
        note(values)
        return values

    monkeypatch.setattr(copies, "read_master_chunk", chunk)
    monkeypatch.setattr(copies.RestingTensor, "read", counted)
    made = zo.copy(model, of_tier("nvme", tmp_path / "copy"), kind="frozen")
    chunks = sum(len(shard.layout.chunks()) for shard in runtime(model).store.shards)
    assert count == chunks > 8
    largest = max(param.nbytes for param in model.parameters())
    assert 0 < most <= 4 * 4 * MIB < sum(param.nbytes for param in model.parameters()), (most, largest)
    zo.close(model)
    zo.close(made)


def test_an_update_that_is_under_way_is_in_the_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = zo.offload(build(TinyLM), of_tier("nvme", tmp_path / "model"))
    plain = build(TinyLM)
    ours, theirs = (zo.AdamW(each.parameters(), lr=1e-2) for each in (model, plain))
    run = UpdatePipeline.run

    def late(*args: Any, **kwargs: Any) -> Any:
        time.sleep(0.3)
        return run(*args, **kwargs)

    monkeypatch.setattr(UpdatePipeline, "run", late)
    for each, optimizer in ((model, ours), (plain, theirs)):
        each(tokens_of(0)).backward()
        optimizer.step()
    made = zo.copy(model, of_tier("cpu", tmp_path / "copy"))
    found = read_masters(made)
    assert all(torch.equal(found[name], param) for name, param in plain.named_parameters())
    zo.close(model)
    zo.close(made)


def test_an_ordinary_model_a_part_and_a_copy_are_copied(tmp_path: Path) -> None:
    plain = build(TinyLM)
    model = zo.copy(plain, of_tier("nvme", tmp_path / "model", "bf16"))
    again = zo.copy(model, of_tier("cpu", tmp_path / "again"))
    block = zo.copy(model.blocks[1], of_tier("nvme", tmp_path / "block"))
    found, part = read_masters(again), read_masters(block)
    assert all(torch.equal(found[name], param) for name, param in plain.named_parameters())
    assert all(torch.equal(part[name], param) for name, param in plain.blocks[1].named_parameters())
    assert not any(owner_of(param) for param in plain.parameters())
    for each in (model, again, block):
        zo.close(each)


def test_a_copy_has_generations_of_its_own(tmp_path: Path) -> None:
    config = of_tier("nvme", tmp_path / "copy", existing="resume")
    model = zo.offload(build(TinyLM), of_tier("nvme", tmp_path / "model"))
    made = zo.copy(model, config)
    optimizer = zo.AdamW(made.parameters(), lr=1e-2)
    losses = []
    for step in range(4):
        loss = made(tokens_of(step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if step == 1:
            zo.commit(made, optimizer)
            masters = read_masters(made)
            zo.close(made)
            # The directory has a generation: the copy is that, not the original.
            made = zo.copy(model, config)
            optimizer = zo.AdamW(made.parameters(), lr=1.0)
            assert zo.resume(made, optimizer).step == 2
            found = read_masters(made)
            assert all(torch.equal(found[name], masters[name]) for name in masters)
    zo.close(made)
    zo.close(model)
    assert losses == trained(build(TinyLM), range(4))


@pytest.mark.parametrize("changed", [False, True])
@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_frozen_weights_in_files_of_others_are_read_there_by_both(
    precision: str, changed: bool, tmp_path: Path
) -> None:
    folder = bases.write_base(tmp_path / "base")
    model, optimizer = bases.opened(folder, bases.settings(tmp_path / "model", durability="scratch"))
    bases.steps(model, optimizer, 0, 2, commits=False)
    if changed:
        for file in folder.glob("*.safetensors"):
            content = file.read_bytes()
            file.unlink()
            file.write_bytes(content)
    made = zo.copy(model, bases.settings(tmp_path / "copy") if precision == "bf16" else of_tier("nvme", tmp_path / "c"))
    shares = precision == "bf16" and not changed
    own = {file.path for file in runtime(model).store.base_files}
    assert {file.path for file in runtime(made).store.base_files} == (own if shares else set())
    found, expected = read_masters(made), read_masters(model)
    assert all(torch.equal(found[name], expected[name].to(found[name].dtype)) for name in expected)
    if precision == "bf16":
        assert [made(tokens_of(seed)).item() for seed in range(2)] == [
            model(tokens_of(seed)).item() for seed in range(2)
        ]
    zo.close(model)
    zo.close(made)


def test_a_copy_that_fails_leaves_its_original(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = zo.offload(build(TinyLM), of_tier("nvme", tmp_path / "model"))
    with pytest.raises(zo.LockError):
        zo.copy(model, of_tier("nvme", tmp_path / "model"))
    with pytest.raises(zo.CapacityError):
        zo.copy(model, of_tier("nvme", tmp_path / "copy", nvme_capacity="4KiB"))
    calls = 0

    def fail(self: Any, begin: int, end: int) -> Tensor:
        nonlocal calls
        calls += 1
        if calls == 9:
            raise zo.StorageError("a drive")
        return elements(self, begin, end)

    elements = copies.RestingTensor.read
    with monkeypatch.context() as patch, pytest.raises(zo.StorageError, match="a drive"):
        patch.setattr(copies.RestingTensor, "read", fail)
        zo.copy(model, of_tier("nvme", tmp_path / "copy"))
    made = zo.copy(model, of_tier("nvme", tmp_path / "copy"))
    assert trained(made, range(2)) == trained(model, range(2)) == trained(build(TinyLM), range(2))
    zo.close(model)
    zo.close(made)


def test_refusals_name_what_is_wrong(tmp_path: Path) -> None:
    config = zo.OffloadConfig(precision="fp32")
    model = zo.offload(build(TinyLM), of_tier("nvme", tmp_path / "model"))
    with pytest.raises(zo.ConfigError, match="kind='half'"):
        zo.copy(model, config, kind="half")
    with pytest.raises(zo.ConfigError, match=r"zo\.copy takes a torch\.nn\.Module"):
        zo.copy(model.parameters(), config)
    with zo.gathered(model), pytest.raises(zo.ZeroOffloadError, match=r"zo\.copy reads .*zo\.gathered"):
        zo.copy(model, config)
    with zo.deferred_init():
        deferred = TinyLM()
    with pytest.raises(zo.ConfigError, match="has no values yet"):
        zo.copy(deferred, config)
    with pytest.raises(zo.ConfigError, match="has no values yet"):
        zo.copy(TinyLM().to("meta"), config)
    zo.close(model)
    with pytest.raises(zo.ZeroOffloadError, match="close"):
        zo.copy(model, config)


# Deep copies


def test_a_deep_copy_that_does_not_fit_raises_before_it_takes_memory(nvme: Path) -> None:
    model = zo.offload(build(lambda: TinyLM(WIDE, 4)), of_tier("nvme", nvme))
    numel = sum(param.numel() for param in model.parameters())
    reads: list[str] = []
    access, read = runtime(model).access, runtime(model).access.read_value

    def counted(param: nn.Parameter, **kwargs: Any) -> Tensor:
        reads.append(runtime(model).places.name_of(param))
        return read(param, **kwargs)

    access.read_value = counted
    with memory_left(4 * numel - MIB, model):
        with pytest.raises(zo.CapacityError, match=r"copy\.deepcopy makes 27 .*12\.6 MiB .* needed.* left.*zo\.copy\("):
            copy.deepcopy(model)
        with pytest.raises(zo.CapacityError, match=r"copy\.deepcopy"):
            torch.optim.swa_utils.AveragedModel(model)
        assert reads == []
        assert type(copy.deepcopy(model.blocks[0]).up.weight) is nn.Parameter  # a part fits
    with memory_left(4 * numel + MIB, model):
        made = copy.deepcopy(model)
    assert made(tokens_of(0)).item() == model(tokens_of(0)).item()
    zo.close(model)


@pytest.mark.parametrize("fits", [False, True])
def test_a_deep_copy_stays_within_cpu_memory(fits: bool, nvme: Path) -> None:
    def make() -> nn.Module:
        return TinyLM(WIDE, 4)

    plan = zo.plan(make(), of_tier("cpu", nvme))
    nbytes = sum(param.nbytes for param in make().parameters())
    budget = plan.used_bytes(Tier.CPU) + plan.used_bytes(Tier.DEVICE) + nbytes - (not fits)
    model = zo.offload(build(make), of_tier("cpu", nvme, cpu_memory=budget))
    with (
        nullcontext()
        if fits
        else pytest.raises(zo.CapacityError, match=r"copy\.deepcopy .*needed.*left of cpu_memory= .*zo\.copy\(")
    ):
        copy.deepcopy(model)
    zo.close(model)


# Several ranks


def _copied(rank: int, size: int, folder: str, stage: int, other: int, kind: str) -> tuple[bool, float, float]:
    model = zo.offload(build(lambda: TinyLM(NARROW)), of_tier("nvme", Path(folder, "model"), "bf16", stage=stage))
    trained(model, range(2))
    made = zo.copy(model, of_tier("nvme", Path(folder, "copy"), "bf16", stage=other), kind=kind)
    found, expected = read_params(made), read_params(model)
    losses = made(tokens_of(0)).item(), model(tokens_of(0)).item()
    zo.close(made)
    zo.close(model)
    return all(torch.equal(found[name], expected[name]) for name in expected), *losses


@pytest.mark.parametrize("kind", ["same", "frozen"])
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_each_rank_copies_its_own_part(stage: int, kind: str, pool: RankPool, tmp_path: Path) -> None:
    for same, made, original in pool.succeed(_copied, str(tmp_path), stage, stage, kind):
        assert same and made == original


def test_ranks_that_would_need_the_parts_of_others_raise(pool: RankPool, tmp_path: Path) -> None:
    results = pool.call(_copied, str(tmp_path), 3, 0, "same")
    assert all(isinstance(each, Failure) and "zo.copy: a rank has a part of" in each.message for each in results)
