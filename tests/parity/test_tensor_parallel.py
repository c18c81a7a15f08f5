"""A model that torch's tensor parallelism has divided over some ranks, offloaded beside its data-parallel ranks."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F

import zero_offload as zo
from tests.helpers.models import Block, build
from tests.helpers.pairwise import full
from tests.helpers.ranks import Failure, RankPool, RankPools
from tests.helpers.reference import clip_factor
from zero_offload.checkpoint import commit_clock
from zero_offload.checkpoint.format import StepRecord
from zero_offload.checkpoint.generation import GenerationKeeper
from zero_offload.hardware.kernels.grads import sum_of_squares
from zero_offload.model.api import runtime_of

VOCAB, DIM, ROWS = 64, 48, 4
NUM_STEPS = 3


class Model(nn.Module):
    """Embedding, blocks, norm and head, none of them tied: parallelize_module would untie them."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, DIM)
        self.blocks = nn.ModuleList(Block(DIM) for _ in range(3))
        self.norm = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)).float()  # type: ignore[no-any-return]


def sequence_plan() -> dict[str, ParallelStyle]:
    """Everything is a DTensor; between the matrices, activations are divided by position."""
    plan: dict[str, ParallelStyle] = {
        "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    for i in range(3):
        plan[f"blocks.{i}.norm"] = SequenceParallel()
        plan[f"blocks.{i}.up"] = ColwiseParallel(input_layouts=Shard(1))
        plan[f"blocks.{i}.down"] = RowwiseParallel(output_layouts=Shard(1))
    return plan


def matrix_plan() -> dict[str, ParallelStyle]:
    """Only matrices are divided; norms and embedding are plain parameters, the same on all tensor-parallel ranks."""
    plan: dict[str, ParallelStyle] = {}
    for i in range(3):
        plan[f"blocks.{i}.up"] = ColwiseParallel()
        plan[f"blocks.{i}.down"] = RowwiseParallel()
    return plan


def vocabulary_plan() -> dict[str, ParallelStyle]:
    """The embedding and the head too."""
    ends = (RowwiseParallel(input_layouts=Replicate()), ColwiseParallel(output_layouts=Replicate()))
    return matrix_plan() | dict(zip(("embedding", "head"), ends, strict=True))


PLANS = {"sequence": sequence_plan, "matrices": matrix_plan, "vocabulary": vocabulary_plan}


@dataclass(frozen=True)
class Case:
    settings: dict[str, Any]
    plan: str = "sequence"
    shape: tuple[int, ...] = (2, 2)
    """Of the mesh: the dimensions that see other data, and the tensor-parallel one."""
    num_steps: int = NUM_STEPS
    max_norm: float | None = 0.5
    micro_batches: int = 1
    device_type: str = "cpu"


@dataclass
class Outcome:
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    """In double precision."""
    params: dict[str, Tensor] = field(default_factory=dict)
    """Whole."""

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, Outcome)
        same = (self.losses, self.norms, list(self.params)) == (other.losses, other.norms, list(other.params))
        return same and all(torch.equal(self.params[name], other.params[name]) for name in self.params)


@pytest.fixture
def pool(pools: RankPools) -> RankPool:
    return pools.of(4)


def batch_of(step: int, rows: slice) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, VOCAB, (ROWS, 9), generator=torch.Generator().manual_seed(step))[rows]
    return tokens[:, :-1], tokens[:, 1:]


def loss_of(model: nn.Module, step: int, rows: slice) -> Tensor:
    tokens, targets = batch_of(step, rows)
    logits = model(tokens)
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten().to(logits.device))


def divided(case: Case) -> tuple[nn.Module, DeviceMesh, DeviceMesh]:
    """The model, the mesh of ranks that see other data, and all of it."""
    names = ("replicate", "shard", "tp") if len(case.shape) == 3 else ("dp", "tp")
    mesh = init_device_mesh(case.device_type, case.shape, mesh_dim_names=names)
    model = parallelize_module(build(Model), mesh["tp"], PLANS[case.plan](), src_data_rank=None)
    return model, mesh[names[:-1]], mesh


def rows_of(rank: int, case: Case) -> slice:
    num_data = math.prod(case.shape[:-1])
    each, place = ROWS // num_data, rank // case.shape[-1]
    return slice(place * each, (place + 1) * each)


def start(case: Case) -> tuple[nn.Module, zo.AdamW]:
    model, mesh, _ = divided(case)
    zo.offload(model, zo.OffloadConfig(**case.settings), mesh)
    return model, zo.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


def go_on(rank: int, case: Case, model: nn.Module, optimizer: zo.AdamW, span: range) -> Outcome:
    out, rows, owner = Outcome(), rows_of(rank, case), runtime_of(model)
    assert owner is not None
    for step in span:
        for micro in range(case.micro_batches):
            loss = loss_of(model, step * case.micro_batches + micro, rows) / case.micro_batches
            loss.backward()
            out.losses.append(loss.item())
        if case.max_norm is not None:
            with owner.together_and_reduce("a norm"):
                pass
            norm = math.sqrt(owner.grad_access.squares(list(model.parameters())))
            of_grads = torch.nn.utils.get_total_norm(
                [param.grad for param in model.parameters() if param.grad is not None]
            )
            assert of_grads.item() == pytest.approx(norm, rel=1e-6)
            assert zo.clip_grad_norm_(model, case.max_norm) == torch.tensor(norm)
            out.norms.append(norm)
        optimizer.step()
        optimizer.zero_grad()
        zo.commit(model, optimizer, extra=step + 1)
    out.params = whole_params(model)
    return out


def whole_params(model: nn.Module) -> dict[str, Tensor]:
    with zo.gathered(model) as params:
        return {name: whole(param) for name, param in params.items()}


@torch.no_grad()
def whole(param: Any) -> Tensor:
    values: Tensor = param.full_tensor() if hasattr(param, "full_tensor") else param
    return values.detach().float().to("cpu").clone()


def train(rank: int, world_size: int, case: Case) -> Outcome:
    model, optimizer = start(case)
    try:
        resumed = zo.resume(model, optimizer)
        return go_on(rank, case, model, optimizer, range(0 if resumed is None else resumed.extra, case.num_steps))
    finally:
        zo.close(model)


def train_plain(rank: int, world_size: int, case: Case, norms: list[float]) -> Outcome:
    """The same divided model, not offloaded; `norms` are those that gradients are clipped by."""
    model, _, mesh = divided(case)
    group, out, rows = mesh["dp"].get_group(), Outcome(), rows_of(rank, case)
    params: list[Any] = list(model.parameters())
    parts = [nn.Parameter(getattr(p, "_local_tensor", p).detach()) for p in params]
    optimizer = zo.AdamW(parts, lr=1e-2, weight_decay=0.1)
    for step in range(case.num_steps):
        loss = loss_of(model, step, rows)
        loss.backward()
        out.losses.append(loss.item())
        sumsq = torch.zeros((), dtype=torch.float64)
        for param, part in zip(params, parts, strict=True):
            grad = param.grad
            if hasattr(grad, "to_local"):
                grad = grad.redistribute(placements=param.placements).to_local()
            part.grad = grad.contiguous()
            dist.all_reduce(part.grad, group=group)
            part.grad.div_(mesh["dp"].size())
            copied = not hasattr(param, "placements") or param.placements[0].is_replicate()
            found = sum_of_squares(part.grad.data_ptr(), part.grad.dtype, part.grad.numel()).sumsq
            sumsq += found / (mesh["tp"].size() if copied else 1)
            param.grad = None
        dist.all_reduce(sumsq, group=mesh["tp"].get_group())
        assert sumsq.sqrt().item() == pytest.approx(norms[step], rel=1e-12)
        for part in parts:
            assert part.grad is not None
            part.grad.mul_(clip_factor(norms[step], case.max_norm or math.inf))
        optimizer.step()
    out.norms = norms
    out.params = {name: whole(param) for name, param in model.named_parameters()}
    return out


def train_whole(case: Case) -> Outcome:
    """One rank, no mesh, torch's functions."""
    model, out = build(Model), Outcome()
    optimizer = zo.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    for step in range(case.num_steps):
        for micro in range(case.micro_batches):
            loss = loss_of(model, step * case.micro_batches + micro, slice(0, ROWS)) / case.micro_batches
            loss.backward()
            out.losses.append(loss.item())
        assert case.max_norm is not None
        out.norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), case.max_norm).item())
        optimizer.step()
        optimizer.zero_grad()
    out.params = {name: param.detach().clone() for name, param in model.named_parameters()}
    return out


def check_close(whole_run: Outcome, found: list[Outcome], num_tensor_ranks: int = 2) -> None:
    # Sums are made in another order: over parts of a matrix, and over ranks. Where a gradient is nearly zero, Adam
    # divides that noise by itself. An element may then be off by half a percent of a step of the learning rate 1e-2.
    close: dict[str, Any] = {"rtol": 2e-4, "atol": 5e-5}
    mean = torch.tensor([each.losses for each in found[::num_tensor_ranks]]).mean(0)
    torch.testing.assert_close(mean, torch.tensor(whole_run.losses), **close)
    assert found[0].norms == pytest.approx(whole_run.norms, rel=2e-4)
    for each in found:
        assert each.norms == found[0].norms
        for name, param in whole_run.params.items():
            torch.testing.assert_close(each.params[name], param, **close)


FP32 = Case({"precision": "fp32"})


def at(case: Case, **settings: Any) -> Case:
    return replace(case, settings=case.settings | settings)


@pytest.mark.parametrize(
    ("stage", "plan"),
    [
        (3, "sequence"),
        (1, "vocabulary"),
        full(3, "matrices"),
        *(full(stage, "sequence") for stage in (0, 1, 2)),
    ],
)
def test_numbers_are_those_of_the_divided_and_of_the_whole_model(
    stage: int, plan: str, pool: RankPool, nvme: Path
) -> None:
    case = at(replace(FP32, plan=plan), stage=stage)
    found = pool.succeed(train, case)
    assert pool.succeed(train_plain, case, found[0].norms) == found
    check_close(train_whole(case), found)
    disk = at(case, params="nvme", grads="nvme", optimizer="nvme", nvme=nvme, device_memory="8MiB")
    assert pool.succeed(train, disk) == found


@pytest.mark.parametrize(
    ("shape", "stage"),
    [
        ((1, 4), 3),
        ((4, 1), 1),
        ((2, 1, 2), 3),
        *(
            full(shape, stage)
            for shape, stage in [((1, 4), 1), ((4, 1), 3), ((2, 1, 2), 1), ((1, 2, 2), 1), ((1, 2, 2), 3)]
        ),
    ],
    ids=str,
)
def test_other_meshes(stage: int, shape: tuple[int, ...], pool: RankPool) -> None:
    case = replace(at(FP32, stage=stage), shape=shape, micro_batches=2)
    check_close(train_whole(case), pool.succeed(train, case), shape[-1])


@pytest.mark.parametrize("stage", [full(1), 3])
def test_in_bf16_placements_change_nothing(stage: int, pool: RankPool, nvme: Path) -> None:
    case = at(FP32, precision="bf16", stage=stage)
    found = pool.succeed(train, case)
    disk = at(case, params="nvme", grads="nvme", optimizer="nvme", nvme=nvme)
    assert pool.succeed(train, disk) == found
    # 8 bits of precision in every product.
    assert found[0].losses == pytest.approx(pool.succeed(train, at(case, precision="fp32"))[0].losses, rel=2e-2)


@pytest.mark.parametrize("stage", [full(1), 3])
def test_a_generation_has_every_part(stage: int, pool: RankPool, nvme: Path) -> None:
    case = at(FP32, stage=stage, params="nvme", optimizer="nvme", nvme=nvme, existing="resume")
    expected = pool.succeed(train, at(FP32, stage=stage))
    pool.succeed(train, replace(case, num_steps=2))
    for found, whole_run in zip(pool.succeed(train, case), expected, strict=True):
        assert found == Outcome(whole_run.losses[2:], whole_run.norms[2:], whole_run.params)
    for failure in pool.call(train, replace(case, shape=(1, 4))):
        assert isinstance(failure, Failure) and failure.kind == "CheckpointError"
        assert "division='S(0) of 2'" in failure.message or "holds another model" in failure.message


def train_by_time(rank: int, world_size: int, case: Case) -> list[int]:
    """Steps whose commits this rank began. Rank 0's clock moves by 10 s whenever it is read, all others stand still."""
    begun, clock = list[int](), itertools.count(0, 10)
    commit = GenerationKeeper.commit

    def record(keeper: GenerationKeeper, record: StepRecord, *args: Any) -> None:
        begun.append(record.step)
        commit(keeper, record, *args)

    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(commit_clock, "time", SimpleNamespace(monotonic=lambda: 0 if rank else next(clock)))
        patches.setattr(GenerationKeeper, "commit", record)
        train(rank, world_size, case)
    return begun


@pytest.mark.parametrize("shape", [(2, 2), full((1, 4))])
def test_all_parts_commit_by_the_clock_of_rank_0(shape: tuple[int, ...], pool: RankPool, nvme: Path) -> None:
    case = replace(at(FP32, optimizer="nvme", nvme=nvme, commit_every="25s"), shape=shape, num_steps=8)
    first, *others = pool.succeed(train_by_time, case)
    assert len(first) >= 2 and first[0] < 8 and others == [first] * 3


def save(rank: int, world_size: int, case: Case, path: str) -> Outcome:
    model, optimizer = start(case)
    go_on(rank, case, model, optimizer, range(case.num_steps))
    zo.save_checkpoint(model, optimizer, path)
    after = go_on(rank, case, model, optimizer, range(case.num_steps, case.num_steps + 2))
    zo.close(model)
    return after


def load(rank: int, world_size: int, case: Case, path: str) -> Outcome:
    model, optimizer = start(case)
    zo.load_checkpoint(model, optimizer, path)
    after = go_on(rank, case, model, optimizer, range(case.num_steps, case.num_steps + 2))
    zo.close(model)
    return after


def test_a_checkpoint_loads_at_other_stages_and_on_other_data_ranks(
    pool: RankPool, pools: RankPools, tmp_path: Path
) -> None:
    path = str(tmp_path / "saved")
    saved = pool.succeed(save, at(FP32, stage=3), path)
    assert pool.succeed(load, at(FP32, stage=1), path) == saved
    assert pool.succeed(load, at(FP32, stage=3, params="nvme", nvme=tmp_path / "run"), path) == saved
    half = pools.of(2).succeed(load, replace(at(FP32, stage=3), shape=(1, 2)), path)
    for name, param in saved[0].params.items():
        torch.testing.assert_close(half[0].params[name], param, rtol=2e-4, atol=2e-5)


# Refusals


def refusals(rank: int, world_size: int, case: Case) -> list[str]:
    """The errors of a divided model where a plain one would answer."""
    model, optimizer = start(case)
    loss_of(model, 0, rows_of(rank, case)).backward()
    optimizer.step()
    param: Any = model.get_submodule("blocks.0.up").weight
    calls = [
        model.state_dict()["blocks.0.up.weight"].clone,
        optimizer.state_dict()["state"][0]["exp_avg"].clone,
        partial(zo.export_pretrained, model, "nowhere"),
        partial(enter, model, "master"),
    ]
    messages = [message_of(call) for call in calls]
    with zo.gathered(model):
        messages.append(str(tuple(param.to_local().shape)))
    zo.close(model)
    return messages


def enter(model: nn.Module, kind: str) -> None:
    with zo.gathered(model, kind=kind):
        pass


def message_of(call: Any) -> str:
    try:
        call()
    except zo.ZeroOffloadError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize("shape", [(2, 2), (1, 4)])
def test_what_needs_whole_parameters_raises(shape: tuple[int, ...], pool: RankPool) -> None:
    for found in pool.succeed(refusals, replace(FP32, shape=shape)):
        assert found[0].startswith("value of blocks.0.up.weight is divided over ranks")
        assert found[1].startswith("exp_avg of embedding.weight is divided over ranks")
        assert "before parallelize_module" in found[2]
        assert "is a DTensor, which tensor-parallel ranks divide" in found[3]
        assert found[4] == str((4 * DIM // shape[1], DIM))


def change_whole_parameters(rank: int, world_size: int, case: Case) -> str:
    """Those that each tensor-parallel rank has whole are changed between steps; the error where ranks differ."""
    model, optimizer = start(case)
    plain = build(Model)
    loss_of(model, 0, rows_of(rank, case)).backward()
    optimizer.zero_grad()
    for each in (model, plain):
        torch.manual_seed(5 + rank * (each is model))
        with torch.no_grad():
            each.norm.weight.normal_()
            each.embedding.weight.clamp_(-0.1, 0.1)[3] = 0.5
            nn.init.orthogonal_(each.head.weight)
    for name in ("norm.weight", "embedding.weight", "head.weight"):
        assert torch.equal(model.get_parameter(name), plain.get_parameter(name)), name
    with torch.no_grad():
        message = message_of(partial(model.norm.bias.fill_, rank))
    assert model.norm.bias.eq(0).all()
    zo.close(model)
    return message


@pytest.mark.parametrize(("shape", "stage"), [((2, 2), 3), full((2, 2), 1), ((1, 4), 3)])
def test_whole_parameters_are_changed_between_steps(shape: tuple[int, ...], stage: int, pool: RankPool) -> None:
    case = replace(at(FP32, stage=stage), shape=shape, plan="matrices")
    for otherwise in pool.succeed(change_whole_parameters, case):
        assert "the checksum of new values of norm.bias is" in otherwise


def offload_with(rank: int, world_size: int, which: str) -> None:
    model, data, mesh = divided(FP32)
    if which == "uneven":
        model = parallelize_module(build(lambda: nn.Sequential(nn.Linear(8, 7))), mesh["tp"], {"0": ColwiseParallel()})
    if which == "hooked":
        next(model.parameters()).register_hook(lambda grad: grad)
    if which == "two meshes":
        other = parallelize_module(build(Model), mesh["dp"], matrix_plan())
        model = nn.ModuleList([model, other])
    zo.offload(model, zo.OffloadConfig(), {"none": None, "tp": mesh["tp"], "both": mesh}.get(which, data))


@pytest.mark.parametrize(
    ("which", "message"),
    [
        ("none", "Say which ranks hold the same parts and see other data, as mesh=mesh"),
        ("tp", "give the dimension over which data is parallel"),
        ("both", "give the dimension over which data is parallel"),
        ("uneven", "dimension 0 of 0.weight has 7 rows, which 2 ranks cannot divide evenly; pad it"),
        ("hooked", "embedding.weight has hooks, which a DTensor loses"),
        ("two meshes", "use one mesh for all of them"),
    ],
)
def test_meshes_and_parameters_that_cannot_be(which: str, message: str, pool: RankPool) -> None:
    for failure in pool.call(offload_with, which):
        assert isinstance(failure, Failure) and failure.kind == "ConfigError"
        assert message in failure.message


def overflow(rank: int, world_size: int) -> tuple[int, bool]:
    """One part of one gradient is infinite, on one rank."""
    case = at(FP32, stage=3)
    model, optimizer = start(case)
    before = whole_params(model)
    loss = loss_of(model, 0, rows_of(rank, case))
    param: Any = model.get_submodule("blocks.1.up").weight
    if rank == 1:
        param.register_hook(spoil)
    loss.backward()
    optimizer.step()
    after = whole_params(model)
    skipped = zo.stats(model).skipped_steps
    zo.close(model)
    return skipped, all(torch.equal(before[name], after[name]) for name in before)


def spoil(grad: Any) -> Any:
    spoiled = grad.clone()
    spoiled.to_local()[0, 0] = math.inf
    return spoiled


def test_all_parts_skip_a_step_together(pool: RankPool) -> None:
    assert pool.succeed(overflow) == [(1, True)] * 4
