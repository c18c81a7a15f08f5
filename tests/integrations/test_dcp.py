"""torch.distributed.checkpoint of an offloaded model: what is saved is what there was, bit for bit."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import zero_offload as zo
from tests.helpers import bases, ranks
from tests.helpers.launched import run_program
from tests.helpers.models import tokens_of
from tests.helpers.pairwise import in_pairs
from tests.helpers.ranks import Case, Outcome, RankPool, RankPools, wait_until
from zero_offload.model.api import need_runtime
from zero_offload.runtime.ranks import collectives, neighbours, watch

COMPACT = zo.Precision(compute="bf16", states="compact")
BF16 = Case({"precision": "bf16", "stage": 3}, num_steps=2)
FP32 = Case({"precision": "fp32", "stage": 3}, num_steps=2)

State = dict[str, Any]
Trained = tuple[nn.Module, zo.AdamW]


@pytest.fixture
def pool(pools: RankPools) -> RankPool:
    return pools.of(2)


@contextmanager
def trained(case: Case, rank: int = 0, world_size: int = 1, num_steps: int | None = None) -> Iterator[Trained]:
    model, optimizer = ranks.start(case)
    num_steps = case.num_steps if num_steps is None else num_steps
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # commits that keep nothing, processes without a group
            ranks.steps(case, (rank, world_size), model, optimizer, range(num_steps), Outcome())
            yield model, optimizer
    finally:
        zo.close(model)


def go_on(case: Case, rank: int, world_size: int, model: nn.Module, optimizer: zo.AdamW) -> Outcome:
    out = Outcome()
    ranks.steps(case, (rank, world_size), model, optimizer, range(case.num_steps, case.num_steps + 2), out)
    out.params = ranks.read_params(model)
    return out


def plain_states(model: nn.Module, optimizer: zo.AdamW) -> State:
    return {"model": model.state_dict(), "optim": optimizer.state_dict()}


def named_states(model: nn.Module, optimizer: zo.AdamW) -> State:
    """The same by torch's helper: the optimizer's states have parameters' names."""
    found, states = get_state_dict(model, optimizer)
    return {"model": found, "optim": states}


def optimizer_first(model: nn.Module, optimizer: zo.AdamW) -> State:
    """Residuals come before the values that they complete."""
    return {"an optimizer": optimizer.state_dict(), "the model": model.state_dict()}


def take_plain(model: nn.Module, optimizer: zo.AdamW, state: State) -> None:
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optim"])


def take_named(model: nn.Module, optimizer: zo.AdamW, state: State) -> None:
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])


def take_nothing(model: nn.Module, optimizer: zo.AdamW, state: State) -> None:
    pass


WAYS: dict[str, tuple[Callable[..., State], Callable[..., None]]] = {
    "in place": (plain_states, take_nothing),
    "state dicts": (plain_states, take_plain),
    "named": (named_states, take_named),
    "optimizer first": (optimizer_first, take_nothing),
}


def save(rank: int, world_size: int, case: Case, way: str, path: str, is_async: bool = False) -> Outcome:
    """Save after some steps, and go on; two steps are made before a checkpoint in the background is awaited."""
    with trained(case, rank, world_size) as (model, optimizer):
        state = WAYS[way][0](model, optimizer)
        if not is_async:
            dcp.save(state, checkpoint_id=path)
            return go_on(case, rank, world_size, model, optimizer)
        group = dist.new_group(backend="gloo") if world_size > 1 else None
        saved = dcp.async_save(state, checkpoint_id=path, process_group=group)
        del state
        out = go_on(case, rank, world_size, model, optimizer)
        saved.result()
        return out


def load(rank: int, world_size: int, case: Case, way: str, path: str) -> Outcome:
    """Load into a model that has had a step less, and go on."""
    make, take = WAYS[way]
    with trained(case, rank, world_size, case.num_steps - 1) as (model, optimizer):
        state = make(model, optimizer)
        dcp.load(state, checkpoint_id=path)
        take(model, optimizer, state)
        return go_on(case, rank, world_size, model, optimizer)


def case_of(precision: Any, stage: int) -> Case:
    """With fp16 the first steps overflow."""
    return Case({"precision": precision, "stage": stage}, num_steps=8 if precision == "fp16" else 2, num_frozen=1)


def at(where: str, case: Case, path: Path) -> Case:
    path.mkdir(exist_ok=True)
    placed = {"params": where, "optimizer": where, "nvme": path if where == "nvme" else None, "existing": "discard"}
    return replace(case, settings=case.settings | placed)


@pytest.mark.door(
    "torch",
    load="`dcp.load`",
    between="two ranks, each precision and stage",
    save="`dcp.save`, `dcp.async_save`",
    outcome="right",
)
@in_pairs(
    where=["cpu", "nvme"],
    precision=["bf16", "fp32", "fp16", COMPACT],
    stage=[3, 1, 2, 0],
    way=list(WAYS),
    is_async=[False, True],
)
def test_a_run_goes_on_from_it(
    where: str, precision: Any, stage: int, way: str, is_async: bool, tmp_path: Path, pool: RankPool
) -> None:
    case = case_of(precision, stage)
    path = str(tmp_path / "saved")
    saved = pool.succeed(save, at(where, case, tmp_path / "a"), way, path, is_async)
    loaded = pool.succeed(load, at(where, case, tmp_path / "b"), way, path)
    assert loaded == saved


def test_several_threads_may_write(tmp_path: Path, nvme: Path) -> None:
    """Each reads from the drive."""
    with trained(at("nvme", BF16, nvme)) as (model, optimizer):
        dcp.save(plain_states(model, optimizer), checkpoint_id=tmp_path / "one")
        writer = dcp.FileSystemWriter(tmp_path / "many", single_file_per_rank=False, thread_count=8)
        dcp.save(plain_states(model, optimizer), storage_writer=writer)
    assert same(read_whole(str(tmp_path / "many")), read_whole(str(tmp_path / "one")))


def open_files() -> int:
    """Bytes of files without a name that this process has open."""
    found = 0
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            found += descriptor.stat().st_size * str(descriptor.readlink()).endswith("(deleted)")
    return found


def test_a_stager_that_is_used_again_takes_no_more_room(tmp_path: Path) -> None:
    with trained(FP32) as (model, optimizer):
        writer = dcp.FileSystemWriter(tmp_path / "saved", cache_staged_state_dict=True)
        sizes = []
        for _ in range(6):
            dcp.async_save(plain_states(model, optimizer), storage_writer=writer).result()
            sizes.append(open_files())
    assert max(sizes) <= 2 * sizes[0]


# Other numbers of ranks, and other programs


def on_ranks(rank: int, world_size: int, case: Case, way: str, source: str, target: str) -> None:
    """Load, and save again what was loaded."""
    make, take = WAYS[way]
    with trained(case, rank, world_size, case.num_steps - 1) as (model, optimizer):
        state = make(model, optimizer)
        dcp.load(state, checkpoint_id=source)
        take(model, optimizer, state)
        dcp.save(make(model, optimizer), checkpoint_id=target)


def everything(model: nn.Module, optimizer: zo.AdamW) -> dict[str, Tensor]:
    """Masters, and the optimizer's states, of one rank."""
    names = {param: name for name, param in model.named_parameters()}
    with zo.gathered(model, kind="master") as masters:
        found = {name: values.clone() for name, values in masters.items()}
    for param, entry in optimizer.state.items():
        found |= {f"{names[param]} {name}": state.clone() for name, state in entry.items()}
    return found


@pytest.mark.door(
    "torch", load="`dcp.load`", between="saved on one rank, loaded on two", save="`dcp.save`", outcome="right"
)
@in_pairs(where=["cpu", "nvme"], precision=["bf16", "fp32", "fp16", COMPACT], stage=[3, 1, 0], way=[*WAYS])
def test_ranks_keep_what_one_has_saved(
    where: str, precision: Any, stage: int, way: str, tmp_path: Path, pool: RankPool
) -> None:
    case = at(where, case_of(precision, stage), tmp_path / "a")
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    make, take = WAYS[way]
    with trained(case) as (model, optimizer):
        dcp.save(make(model, optimizer), checkpoint_id=first)
        expected = everything(model, optimizer)
    pool.succeed(on_ranks, at(where, case, tmp_path / "b"), way, first, second)
    with trained(case, num_steps=case.num_steps - 1) as (model, optimizer):
        state = make(model, optimizer)
        dcp.load(state, checkpoint_id=second)
        take(model, optimizer, state)
        found = everything(model, optimizer)
    assert found.keys() == expected.keys() and len(found) > 50
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []


def fsdp(case: Case) -> tuple[nn.Module, torch.optim.AdamW]:
    model = ranks.make_model(case)
    mesh = DeviceMesh("cpu", [0, 1])
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.AdamW(ranks.param_groups(model), lr=1e-2, weight_decay=0.1)


def whole(state: State, path: str = "") -> dict[str, Tensor]:
    """Whole tensors by path. Collective."""
    found = {}
    for name, value in state.items():
        if isinstance(value, dict):
            found |= whole(value, f"{path}{name}.")
        elif isinstance(value, Tensor):
            found[path + name] = value.full_tensor() if hasattr(value, "full_tensor") else value.clone()
    return found


def save_by_fsdp(rank: int, world_size: int, case: Case, path: str) -> dict[str, Tensor]:
    model, optimizer = fsdp(case)
    for step in range(2):
        model(ranks.rows_of(step, rank, world_size)).backward()
        optimizer.step()
        optimizer.zero_grad()
    states = named_states(model, optimizer)  # type: ignore[arg-type]
    dcp.save(states, checkpoint_id=path)
    return whole(states)


def load_by_fsdp(rank: int, world_size: int, case: Case, path: str) -> dict[str, Tensor]:
    model, optimizer = fsdp(case)
    states = named_states(model, optimizer)  # type: ignore[arg-type]
    dcp.load(states, checkpoint_id=path)
    take_named(model, optimizer, states)  # type: ignore[arg-type]
    return whole(named_states(model, optimizer))  # type: ignore[arg-type]


def read_whole(path: str) -> dict[str, Tensor]:
    """All tensors of a checkpoint, by torch alone."""
    metadata = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    found = {
        name: torch.empty(kept.size, dtype=kept.properties.dtype)
        for name, kept in metadata.items()
        if isinstance(kept, dcp.metadata.TensorStorageMetadata)
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # one process
        dcp.load(found, checkpoint_id=path, planner=dcp.DefaultLoadPlanner(flatten_state_dict=False))
    return found


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.door(
    "torch", load="`dcp.load` of a checkpoint of `fully_shard`", between="and back", save="`dcp.save`", outcome="right"
)
@pytest.mark.parametrize("where", ["cpu", "nvme"])
def test_checkpoints_of_fully_shard_load_and_ours_load_there(where: str, tmp_path: Path, pool: RankPool) -> None:
    case = at(where, FP32, tmp_path / "a")
    theirs, ours = str(tmp_path / "theirs"), str(tmp_path / "ours")
    expected, _ = pool.succeed(save_by_fsdp, case, theirs)
    pool.succeed(on_ranks, case, "named", theirs, ours)
    assert same(read_whole(ours), expected)
    found = pool.succeed(load_by_fsdp, case, ours)
    assert all(same(each, expected) for each in found)


@pytest.mark.door(
    "torch", load="`dcp.load` of a checkpoint of `fully_shard`", between="fp32 values in a bf16 model", outcome="right"
)
def test_fp32_values_become_masters(tmp_path: Path, pool: RankPool) -> None:
    """A checkpoint of fp32 parameters has all bits of a bf16 model's masters, and no residuals."""
    path = str(tmp_path / "saved")
    pool.succeed(save_by_fsdp, FP32, path)
    expected = read_whole(path)
    with trained(BF16, num_steps=1) as (model, optimizer):
        states = named_states(model, optimizer)
        dcp.load(states, checkpoint_id=path, planner=dcp.DefaultLoadPlanner(allow_partial_load=True))
        take_named(model, optimizer, states)
        found = {f"model.{name}": each for name, each in everything(model, optimizer).items() if " " not in name}
        for param, entry in optimizer.state.items():
            name = next(name for name, each in model.named_parameters() if each is param)
            found |= {f"optim.state.{name}.{key}": each for key, each in entry.items() if key != "residual"}
        assert len(found) > 40
        assert [name for name, values in found.items() if not torch.equal(values, expected[name])] == []


def divided(value: float) -> nn.Module:
    """Two layers, each divided in another way, in which every element is another."""
    model = nn.Sequential(nn.Linear(16, 24), nn.Linear(24, 16))
    with torch.no_grad():
        for number, param in enumerate(model.parameters()):
            param.copy_(torch.arange(param.numel()).view(param.shape) + value + 1000 * number)
    mesh = DeviceMesh("cpu", torch.tensor([[0, 1]]), mesh_dim_names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    return zo.offload(model, zo.OffloadConfig(precision="fp32"), mesh["dp"])


def save_divided(rank: int, world_size: int, path: str, again: str) -> None:
    """Save, and save what another model has loaded."""
    model = divided(0.5)
    dcp.save({"model": model.state_dict()}, checkpoint_id=path)
    other = divided(0.25)
    dcp.load({"model": other.state_dict()}, checkpoint_id=path)
    dcp.save({"model": other.state_dict()}, checkpoint_id=again)
    zo.close(model)
    zo.close(other)


@pytest.mark.door("torch", load="`dcp.load`", between="tensor parallel parts", save="`dcp.save`", outcome="right")
def test_tensor_parallel_parts(tmp_path: Path, pool: RankPool) -> None:
    paths = str(tmp_path / "saved"), str(tmp_path / "again")
    pool.succeed(save_divided, *paths)
    expected = {
        f"model.{name}": torch.arange(param.numel()).view(param.shape) + 0.5 + 1000 * number
        for number, (name, param) in enumerate(nn.Sequential(nn.Linear(16, 24), nn.Linear(24, 16)).named_parameters())
    }
    assert all(same(read_whole(path), expected) for path in paths)
    # One rank reads columns into whole matrices, and all bits into bf16 masters.
    model = zo.offload(nn.Sequential(nn.Linear(16, 24), nn.Linear(24, 16)), zo.OffloadConfig(precision="bf16"))
    dcp.load({"model": model.state_dict()}, checkpoint_id=paths[0])
    with zo.gathered(model, kind="master") as masters:
        assert same({f"model.{name}": values for name, values in masters.items()}, expected)
    zo.close(model)


# Values, options, and what raises


def full_states(rank: int, world_size: int, case: Case) -> list[Any]:
    """Whole plain tensors load on every rank, and from rank 0; whole ones are not made."""
    options = StateDictOptions(full_state_dict=True)
    found: list[Any] = []
    with trained(case, rank, world_size) as (model, optimizer):
        whole = {
            name: values.clone() for name, values in ranks.make_model(replace(case, dim=case.dim)).state_dict().items()
        }
        for extra in ({}, {"broadcast_from_rank0": True}):
            whole = {name: values + 1 for name, values in whole.items()}
            given = whole if rank == 0 or not extra else {}
            set_model_state_dict(model, dict(given), options=StateDictOptions(full_state_dict=True, **extra))
            read = ranks.read_params(model)
            found.append(all(torch.equal(values, whole[name]) for name, values in read.items()))
        frozen = {name for name, param in model.named_parameters() if not param.requires_grad}
        kept = get_model_state_dict(model, options=StateDictOptions(ignore_frozen_params=True, cpu_offload=True))
        found.append(bool(frozen) and frozen.isdisjoint(kept))
        flat = get_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))[1]
        found.append("state.embedding.weight.exp_avg" in flat)
        for call in (
            lambda: get_model_state_dict(model, options=options),
            lambda: get_state_dict(model, optimizer, options=options),
        ):
            found.append(message_of(call))
    return found


def message_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except (zo.ZeroOffloadError, dcp.CheckpointException) as error:
        return str(error)
    return "nothing"


def test_options_of_state_dicts(pool: RankPool) -> None:
    for found in pool.succeed(full_states, replace(FP32, num_frozen=1)):
        assert found[:4] == [True] * 4
        assert all("full_state_dict" in message and "dcp.save" in message for message in found[4:])


def ask_for_values(rank: int, world_size: int, path: str) -> list[str]:
    with trained(BF16, rank, world_size) as (model, optimizer):
        value = model.state_dict()["embedding.weight"]
        state = optimizer.state_dict()["state"][0]["exp_avg"]
        assert value.shape == model.get_parameter("embedding.weight").shape
        calls: list[Callable[[], Any]] = [
            *(lambda each=each: each.to(torch.float64) for each in (value, state)),
            *(lambda each=each: each + 1 for each in (value, state)),
            *(lambda each=each: torch.save(each, f"{path}/{rank}.pt") for each in (value, state)),
            *(lambda each=each: each.zero_() for each in (value, state)),
            lambda: value.data_ptr(),
        ]
        found = [message_of(call) for call in calls]
        ranks.steps(BF16, (rank, world_size), model, optimizer, range(2, 3), Outcome())
        return [*found, message_of(lambda: dcp.save({"model": {"weight": value}}, checkpoint_id=path, no_dist=True))]


def test_values_on_several_ranks_raise_one_error(tmp_path: Path, pool: RankPool) -> None:
    for found in pool.succeed(ask_for_values, str(tmp_path)):
        *found, pointer, stale = found
        assert len(found) == 8
        for message in found:
            assert all(name in message for name in ("dcp.save", "save_checkpoint", "export_pretrained", "zo.gathered"))
        assert "has no address" in pointer
        assert "had a step" in stale


def ask_alone(rank: int, world_size: int, what: str) -> str:
    """Rank 0 asks for a state dict, the other goes on training."""
    with trained(FP32, rank, world_size) as (model, optimizer):
        asked = model if what == "model" else optimizer
        call = asked.state_dict if rank == 0 else lambda: model(tokens_of(0))
        return message_of(call)


@pytest.mark.parametrize("what", ["model", "optimizer"])
def test_a_rank_that_asks_alone_raises(what: str, pool: RankPool) -> None:
    messages = pool.succeed(ask_alone, what)
    pool.renew()
    assert all(f"rank 0 is at {what}.state_dict(), which all ranks call" in each for each in messages)
    assert all("zo.export_pretrained" in each for each in messages)


def wait_alone(rank: int, world_size: int, what: str, done: Path) -> list[str]:
    """Rank 0 saves, the other makes no further call: rank 0's warning and its error."""
    limits = (
        mock.patch.object(neighbours, "time_limit", lambda: timedelta(seconds=2)),
        mock.patch.object(watch, "LISTEN_S", 0.5),
        mock.patch.object(collectives, "WARN_S", 0.25),
    )
    with limits[0], limits[1], limits[2], trained(FP32, rank, world_size) as (model, optimizer):
        if rank > 0:
            wait_until(done.exists)
            return []
        folder = done.with_name("saved")
        saves = what == "zo.save_checkpoint"
        call = (lambda: zo.save_checkpoint(model, optimizer, folder)) if saves else model.state_dict
        with pytest.warns(UserWarning) as warned:
            error = message_of(call)
        done.touch()
        return [*(str(each.message) for each in warned), error]


@pytest.mark.parametrize(
    ("what", "instead"),
    [
        ("model.state_dict()", ["zo.export_pretrained", "torch.distributed.checkpoint.save"]),
        ("zo.save_checkpoint", ["if rank == 0:"]),
    ],
)
def test_a_rank_that_waits_alone_says_so(what: str, instead: list[str], pool: RankPool, tmp_path: Path) -> None:
    (warning, error), _ = pool.succeed(wait_alone, what, tmp_path / "done")
    pool.renew()
    assert "rank 0 has waited 0.25 s for rank 1 in " in warning
    assert "rank 1 (process " in error and "did not come to" in error and "timed out after 2 s" in error
    for text in (warning, error):
        assert f"{what}, which all ranks call" in text and all(each in text for each in instead)


def test_a_load_that_ends_too_early_leaves_nothing_to_use(tmp_path: Path) -> None:
    """As long as the rest is not loaded."""
    path = tmp_path / "saved"
    with trained(FP32) as (model, optimizer):
        dcp.save(plain_states(model, optimizer), checkpoint_id=path)
        expected = everything(model, optimizer)
    reads: list[int] = []

    class Failing(dcp.DefaultLoadPlanner):
        def commit_tensor(self, read_item: Any, tensor: Tensor) -> None:
            reads.append(0)
            if len(reads) == 9:
                raise OSError("the disk has failed")

    with trained(FP32, num_steps=1) as (model, optimizer):
        states = plain_states(model, optimizer)
        with pytest.raises(dcp.CheckpointException, match="the disk has failed"):
            dcp.load(states, checkpoint_id=path, planner=Failing())
        for call in (lambda: model(tokens_of(0)), model.state_dict, optimizer.step):
            assert "torch.distributed.checkpoint.load failed half-way" in message_of(call)
        with pytest.raises(dcp.CheckpointException, match="Missing key"):  # before anything is written
            dcp.load(states | {"other": torch.zeros(1)}, checkpoint_id=path)
        dcp.load({"model": states["model"]}, checkpoint_id=path)
        assert "failed half-way" in message_of(model.state_dict)
        dcp.load(states, checkpoint_id=path)
        assert same(everything(model, optimizer), expected)


def test_values_that_replace_completed_masters_are_told(tmp_path: Path) -> None:
    """The optimizer's states come first, in a call of their own."""
    path = tmp_path / "saved"
    with trained(BF16) as (model, optimizer):
        dcp.save(plain_states(model, optimizer), checkpoint_id=path)
    with trained(BF16, num_steps=1) as (model, optimizer):
        dcp.load({"optim": optimizer.state_dict()}, checkpoint_id=path)
        with pytest.warns(UserWarning, match=r"replaces the fp32 master of embedding\.weight"):
            dcp.load({"model": model.state_dict()}, checkpoint_id=path)


def test_a_load_that_ends_after_a_number_of_steps_leaves_nothing_to_use(tmp_path: Path) -> None:
    """Moments of other steps would be corrected for this number."""
    path = tmp_path / "saved"
    with trained(FP32) as (model, optimizer):
        dcp.save({"optim": optimizer.state_dict()}, checkpoint_id=path)
        expected = everything(model, optimizer)

    class Failing(dcp.DefaultLoadPlanner):
        def commit_tensor(self, read_item: Any, tensor: Tensor) -> None:
            raise OSError(f"the disk has failed after {read_item.dest_index.fqn}")

    with trained(FP32, num_steps=1) as (model, optimizer):
        states, before = {"optim": optimizer.state_dict()}, optimizer.state_dict()
        with pytest.raises(dcp.CheckpointException, match=r"failed after optim\.state\.0\.step"):
            dcp.load(states, checkpoint_id=path, planner=Failing())
        assert before["state"][0]["step"] == 1
        assert "torch.distributed.checkpoint.load failed half-way" in message_of(optimizer.step)
        dcp.load(states, checkpoint_id=path)
        found = everything(model, optimizer)
        assert all(torch.equal(found[name], expected[name]) for name in found if " " in name)


def test_a_value_alone_is_the_master(tmp_path: Path) -> None:
    """Whatever the master was, and whatever a load before has planned."""
    path = tmp_path / "saved"
    with trained(BF16) as (model, optimizer):
        dcp.save({"model": model.state_dict()}, checkpoint_id=path)
        expected = {name: values.float() for name, values in model.state_dict().items()}
    with trained(BF16, num_steps=1) as (model, optimizer):
        states = plain_states(model, optimizer)
        with pytest.raises(dcp.CheckpointException, match="Missing key"):
            dcp.load(states, checkpoint_id=path)
        dcp.load({"model": states["model"]}, checkpoint_id=path)
        with zo.gathered(model, kind="master") as masters:
            assert all(torch.equal(values, expected[name]) for name, values in masters.items())


def test_the_example_goes_on_on_another_number_of_ranks(tmp_path: Path) -> None:
    script = Path(__file__).resolve().parents[2] / "examples" / "distributed_checkpoint.py"
    first = run_program(script, tmp_path / "saved", folder=tmp_path, num_ranks=2).split()
    second = run_program(script, tmp_path / "saved", folder=tmp_path).split()
    assert (first[0], second[0]) == ("loss", "loaded")
    assert float(second[2]) < float(first[1])


# A base in its files


@pytest.mark.door(
    "torch", load="`dcp.load`", between="a frozen base that rests in its files", save="`dcp.save`", outcome="right"
)
@pytest.mark.parametrize("params", ["nvme", "cpu"])
def test_a_load_over_a_base_makes_a_copy_of_our_own(params: str, tmp_path: Path) -> None:
    folder = bases.write_base(tmp_path / "base")
    files = {path: path.read_bytes() for path in folder.iterdir()}
    make, take = WAYS["state dicts"]
    model, optimizer = bases.opened(bases.write_base(tmp_path / "other", seed=2), bases.settings(None))
    bases.steps(model, optimizer, 0, 2, commits=False)
    dcp.save(make(model, optimizer), checkpoint_id=tmp_path / "saved")
    expected = everything(model, optimizer) | {
        "losses": torch.tensor(bases.steps(model, optimizer, 2, 4, commits=False))
    }
    zo.close(model)
    model, optimizer = bases.opened(folder, bases.settings(tmp_path / "run", params=params))
    bases.steps(model, optimizer, 5, 7)
    state = make(model, optimizer)
    dcp.load(state, checkpoint_id=tmp_path / "saved")
    take(model, optimizer, state)
    assert not any(shard.base for shard in need_runtime(model, "this").store.shards)
    found = everything(model, optimizer) | {"losses": torch.tensor(bases.steps(model, optimizer, 2, 4))}
    zo.close(model)
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []
    assert {path: path.read_bytes() for path in folder.iterdir()} == files
