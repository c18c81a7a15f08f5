"""`state_dict()` and `load_state_dict()` of an offloaded model, of parts of it and of modules around it, as torch's."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint
from safetensors.torch import save as to_safetensors
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.nn import functional as F

import zero_offload as zo
from tests.helpers.models import NARROW, TinyLM, build, tokens_of
from tests.helpers.reference import placed
from tests.helpers.twins import assert_same, train
from zero_offload.standins.state_copy import StateCopy
from zero_offload.storage.shards.store import ShardStore

WEIGHT = "blocks.1.up.weight"
State = dict[str, Tensor]


@pytest.fixture(params=["cpu", "nvme"])
def tiers(request: pytest.FixtureRequest, nvme: Path) -> zo.OffloadConfig:
    tier = request.param
    return placed("fp32", (tier, tier, tier), nvme if tier == "nvme" else None)


def state_bytes(state: Any) -> bytes:
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def same(found: State, expected: State) -> bool:
    return list(found) == list(expected) and all(torch.equal(found[name], expected[name]) for name in expected)


# Changes of what state_dict() returned


def in_inference_mode(state: State) -> None:
    with torch.inference_mode():
        state[WEIGHT].mul_(3)


def dcp_load(state: State) -> None:
    saved = {name: torch.full_like(value, 0.25) for name, value in state.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        storage: Any = torch.distributed.checkpoint
        path = DCP_PATHS[-1]
        storage.save({"model": saved}, checkpoint_id=path, no_dist=True)
        storage.load({"model": state}, checkpoint_id=path, no_dist=True)


DCP_PATHS: list[Path] = []

CHANGES: dict[str, Callable[[State], Any]] = {
    "zero_": lambda state: state[WEIGHT].zero_(),
    "copy_": lambda state: state[WEIGHT].copy_(torch.ones(4 * NARROW, NARROW)),
    "every": lambda state: [value.mul_(0.5) for value in {id(v): v for v in state.values()}.values()],
    "tied": lambda state: state["head.weight"].add_(1),
    "row": lambda state: state[WEIGHT][3].fill_(2),
    "item": lambda state: state[WEIGHT].__setitem__((slice(2), 0), 7.0),
    "view of view": lambda state: state[WEIGHT].t().reshape(NARROW, 4, -1)[:, 1].neg_(),
    "flat": lambda state: state[WEIGHT].view(-1)[5:9].copy_(torch.arange(4.0)),
    "chunk": lambda state: state[WEIGHT].chunk(2)[1].exp_(),
    "data": lambda state: state[WEIGHT].data.mul_(2),
    "detach": lambda state: state[WEIGHT].detach().mul_(2),
    "shallow copy": lambda state: copy.copy(state[WEIGHT]).mul_(2),
    "operator": lambda state: state[WEIGHT].__iadd__(1),
    "out": lambda state: torch.add(torch.ones(4 * NARROW, NARROW), 1, out=state[WEIGHT]),
    "foreach": lambda state: torch._foreach_mul_([state[WEIGHT], state["norm.weight"]], 3.0),
    "functional": lambda state: F.relu(state[WEIGHT], inplace=True),
    "init": lambda state: nn.init.constant_(state[WEIGHT], 0.5),
    "inference mode": in_inference_mode,
    "twice": lambda state: state[WEIGHT].zero_().add_(3),
    "transposed in place": lambda state: state[WEIGHT].t_().mul_(torch.arange(4.0 * NARROW)),
    "from another": lambda state: state[WEIGHT].copy_(state["blocks.0.up.weight"]),
    "dcp.load": dcp_load,
}


ON_NVME = ("every", "row", "dcp.load")


@pytest.mark.parametrize(
    ("change", "tier"), [*((each, "cpu") for each in CHANGES), *((each, "nvme") for each in ON_NVME)]
)
def test_a_change_reaches_the_parameter(change: str, tier: str, nvme: Path, tmp_path: Path) -> None:
    def script(model: nn.Module, optimizer: zo.AdamW) -> Any:
        yield from train(model, optimizer, range(2))
        DCP_PATHS.append(tmp_path / f"dcp{len(DCP_PATHS)}")
        CHANGES[change](model.state_dict())
        yield from (value.double().sum().item() for value in model.state_dict().values())
        yield from train(model, optimizer, range(2, 4))

    assert_same(script, TinyLM, placed("fp32", (tier,) * 3, nvme if tier == "nvme" else None))


def test_bf16_masters_stay_where_the_copy_is_not_changed() -> None:
    model = zo.offload(build(TinyLM), placed("bf16", ("cpu",) * 3, None))
    list(train(model, zo.AdamW(model.parameters()), range(2)))
    with zo.gathered(model, kind="master") as before:
        pass
    state = model.state_dict()
    state[WEIGHT][0] = 1.5
    state["norm.bias"].copy_(state["norm.bias"].clone())
    before[WEIGHT][0] = 1.5
    with zo.gathered(model, kind="master") as after:
        assert same(after, before)
        assert not torch.equal(after[WEIGHT], after[WEIGHT].bfloat16().float())


def test_a_copy_that_is_older_than_its_parameter_cannot_be_changed(tiers: zo.OffloadConfig) -> None:
    model = zo.offload(build(TinyLM), tiers)
    optimizer, state = zo.AdamW(model.parameters()), model.state_dict()
    list(train(model, optimizer, range(1)))
    new = copy.deepcopy(model.state_dict())
    with pytest.raises(zo.ZeroOffloadError, match=rf"{WEIGHT} has had a step.*model\.state_dict\(\) again"):
        state[WEIGHT].zero_()
    assert same(model.state_dict(), new)
    list(train(model, optimizer, range(1)))


@pytest.mark.parametrize("write", ["load_state_dict", "gathered", "another copy"])
def test_a_copy_is_old_after_other_writes(write: str, tiers: zo.OffloadConfig) -> None:
    model = zo.offload(build(TinyLM), tiers)
    state = model.state_dict()
    if write == "load_state_dict":
        model.load_state_dict(build(TinyLM).state_dict())
    elif write == "gathered":
        with zo.gathered(model.blocks[1], mode="write"), torch.no_grad():
            model.blocks[1].up.weight.add_(1)
    else:
        model.state_dict()[WEIGHT].add_(1)
    with pytest.raises(zo.ZeroOffloadError, match="has had a step or other values"):
        state[WEIGHT].zero_()


def test_a_change_inside_of_gathered_is_kept(tiers: zo.OffloadConfig) -> None:
    model = zo.offload(build(TinyLM), tiers)
    state = model.state_dict()
    with zo.gathered(model, mode="write"):
        state[WEIGHT].zero_()
    with zo.gathered(model.blocks[1]):
        assert not model.blocks[1].up.weight.any()
        bias = model.state_dict()["blocks.1.up.bias"]
        bias.copy_(model.blocks[1].up.bias + 1)
        assert torch.equal(model.blocks[1].up.bias, bias)
    assert not model.state_dict()[WEIGHT].any()


def test_other_memory_is_refused(tiers: zo.OffloadConfig) -> None:
    state = zo.offload(build(TinyLM), tiers).state_dict()
    with pytest.raises(zo.ZeroOffloadError, match=rf"{WEIGHT}, cannot be given other memory.*copy_"):
        state[WEIGHT].data = torch.zeros(4 * NARROW, NARROW)
    with pytest.raises(zo.ZeroOffloadError, match="cannot be given other memory"):
        state[WEIGHT].set_(torch.zeros(4 * NARROW, NARROW))
    for array in (state[WEIGHT].numpy(), np.asarray(state[WEIGHT][1:])):
        with pytest.raises(ValueError, match="read-only"):
            array[:] = 0


def test_copies_outlive_their_model(tiers: zo.OffloadConfig) -> None:
    model = zo.offload(build(TinyLM), tiers)
    state = model.state_dict()
    zo.close(model)
    del model
    assert state[WEIGHT].zero_().sum() == 0


# Other uses of what state_dict() returned


def test_files_are_those_of_the_plain_model(tiers: zo.OffloadConfig) -> None:
    plain, model = build(TinyLM), zo.offload(build(TinyLM), tiers)
    state = model.state_dict()
    assert state_bytes(state) == state_bytes(plain.state_dict())
    assert same(pickle.loads(pickle.dumps(dict(state))), plain.state_dict())
    untied = {name: value for name, value in state.items() if name != "head.weight"}
    assert to_safetensors(untied) == to_safetensors({name: plain.state_dict()[name] for name in untied})
    loaded = torch.load(io.BytesIO(state_bytes(state)), weights_only=True)
    assert (
        same(loaded, plain.state_dict()) and loaded["head.weight"].data_ptr() == loaded["embedding.weight"].data_ptr()
    )
    twin = copy.deepcopy(state)
    assert {type(value) for value in (*loaded.values(), *twin.values())} == {Tensor}
    assert twin["head.weight"].data_ptr() == twin["embedding.weight"].data_ptr()
    assert twin._metadata == plain.state_dict()._metadata


def test_tensors_made_of_them_are_plain_and_apart(tiers: zo.OffloadConfig) -> None:
    model = zo.offload(build(TinyLM), tiers)
    value = model.state_dict()[WEIGHT]
    made = [value.clone(), value + 1, value.double(), value.to(torch.bfloat16), value @ value.t(), torch.stack([value])]
    made += [torch.empty_like(value), value.new_zeros(3), torch.cat([value, value]), value.numpy().copy()]
    assert not any(isinstance(each, StateCopy) for each in made)
    assert (value == value.clone()).all() and bool(torch.allclose(value, value)) and value.tolist()
    for each in made[:6]:
        each.zero_()
    assert same(model.state_dict(), build(TinyLM).state_dict())
    assert isinstance(value.to("cpu"), StateCopy) and value.cpu() is value


@pytest.mark.parametrize("assign", [False, True])
def test_another_model_takes_them(assign: bool, tiers: zo.OffloadConfig) -> None:
    model = zo.offload(build(TinyLM), tiers)
    list(train(model, zo.AdamW(model.parameters()), range(2)))
    before = copy.deepcopy(model.state_dict())
    other = TinyLM()
    other.load_state_dict(model.state_dict(), assign=assign)
    assert {type(param) for param in other.parameters()} == {nn.Parameter}
    assert same(other.state_dict(), before)
    optimizer = torch.optim.SGD(other.parameters(), 0.1)
    other(tokens_of(0)).backward()
    optimizer.step()
    assert not same(other.state_dict(), before) and same(model.state_dict(), before)
    third = zo.offload(TinyLM(), placed("fp32", ("cpu",) * 3, None))
    third.load_state_dict(model.state_dict())
    assert same(third.state_dict(), before)


# Parts of a model


class WithBuffers(TinyLM):
    """A buffer, a frozen parameter, an extra state, and a container without parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[0].register_buffer("seen", torch.arange(3.0))
        self.blocks[0].up.bias.requires_grad_(False)
        self.tail = nn.ModuleDict({"pair": nn.Sequential(nn.Linear(4, 4), nn.Identity())})


@pytest.mark.parametrize("kwargs", [{}, {"prefix": "a."}, {"keep_vars": True}], ids=str)
def test_the_state_dict_of_each_part(kwargs: dict[str, Any], tiers: zo.OffloadConfig) -> None:
    plain, model = build(WithBuffers), zo.offload(build(WithBuffers), tiers)
    for name, twin in plain.named_modules():
        found, expected = model.get_submodule(name).state_dict(**kwargs), twin.state_dict(**kwargs)
        assert found._metadata == expected._metadata
        if "keep_vars" in kwargs:
            params = dict(model.get_submodule(name).named_parameters(remove_duplicate=False))
            assert list(found) == list(expected) and all(found[each] is params[each] for each in params)
        else:
            assert same(found, expected)


@pytest.mark.parametrize("name", ["", "blocks", "blocks.0.up", "tail", "head"])
def test_each_part_loads(name: str, tiers: zo.OffloadConfig) -> None:
    plain, model = build(WithBuffers), zo.offload(build(WithBuffers), tiers)
    state = {key: value + 1 for key, value in plain.get_submodule(name).state_dict().items()}
    for each in (plain, model):
        assert not any(each.get_submodule(name).load_state_dict(state))
    assert same(model.state_dict(), plain.state_dict())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_parameter_that_is_its_own_value_stays(precision: str) -> None:
    """`set_model_state_dict` gives the parameters themselves for names that a state dict does not have. A tied one gets
    the new values under the one name, and itself under the other. Masters are not rounded by such a value."""
    model = zo.offload(build(TinyLM), zo.OffloadConfig(precision=precision))
    list(train(model, zo.AdamW(model.parameters()), range(2)))
    with zo.gathered(model, kind="master") as masters:
        before = {name: value.clone() for name, value in masters.items()}
    new = torch.full(model.embedding.weight.shape, 0.25)
    options = StateDictOptions(full_state_dict=True, strict=False)
    set_model_state_dict(model, {"embedding.weight": new}, options=options)
    model.load_state_dict({name: param.data for name, param in model.named_parameters()}, strict=False)
    with zo.gathered(model, kind="master") as masters:
        assert all(torch.equal(masters[name], new if name == "embedding.weight" else before[name]) for name in before)


def test_keys_that_miss_and_shapes_that_differ(tiers: zo.OffloadConfig) -> None:
    plain, model = build(WithBuffers), zo.offload(build(WithBuffers), tiers)
    results = []
    for each in (plain, model):
        said: list[Any] = []
        for state in (
            {"up.weight": torch.ones(4 * NARROW, NARROW)},
            {"more": torch.ones(1)},
            {"norm.bias": torch.ones(5)},
        ):
            with pytest.raises(RuntimeError) as caught:
                each.blocks[0].load_state_dict(state)
            said.append(str(caught.value))
        said.append(
            each.blocks[2].load_state_dict({"norm.bias": torch.ones(NARROW), "more": torch.ones(1)}, strict=False)
        )
        results.append(said)
    assert results[0] == results[1]
    assert same(model.state_dict(), plain.state_dict())
    for part in (model, model.blocks[0]):
        with pytest.raises(zo.ZeroOffloadError, match="leave assign out"):
            part.load_state_dict(part.state_dict(), assign=True)


def test_hooks_of_parts_run_once(tiers: zo.OffloadConfig) -> None:
    ran: list[list[str]] = []
    for model in (build(TinyLM), build(TinyLM)):
        ran.append([])
        model.blocks[0].register_state_dict_pre_hook(lambda *_: ran[-1].append("before"))
        if len(ran) == 2:
            zo.offload(model, tiers)
        model.blocks[0].register_state_dict_post_hook(
            lambda module, state, prefix, _: ran[-1].append(str(state[f"{prefix}norm.bias"].add_(1).sum().item()))
        )
        model.blocks[0].register_load_state_dict_pre_hook(lambda *_: ran[-1].append("loads"))
        model.blocks[0].register_load_state_dict_post_hook(lambda *_: ran[-1].append("loaded"))
        for part in (model, model.blocks, model.blocks[0]):
            part.load_state_dict(part.state_dict())
        ran[-1].append(str(model.state_dict()["blocks.0.norm.bias"].sum().item()))
    assert ran[0] == ran[1]


def test_a_part_that_is_copied_is_ordinary(tiers: zo.OffloadConfig) -> None:
    model = zo.offload(build(TinyLM), tiers)
    with zo.gathered(model):
        block, twin = copy.deepcopy((model.blocks[0], model.blocks[0].up))
    x = torch.randn(2, NARROW)
    assert torch.equal(block(x), build(TinyLM).blocks[0](x)) and {type(each) for each in block.parameters()} == {
        nn.Parameter
    }
    twin.load_state_dict({name: value * 0 for name, value in twin.state_dict().items()})
    assert not twin.weight.any() and {type(value) for value in twin.state_dict().values()} == {Tensor}
    assert not pickle.loads(pickle.dumps(twin)).weight.any()
    assert model.state_dict()["blocks.0.up.weight"].any()


# Modules around a model


class Holder(nn.Module):
    """As a trainer's module holds one."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.loss_weight = model, nn.Parameter(torch.ones(1))


AROUND: dict[str, Callable[[nn.Module, nn.Module], nn.Module]] = {
    "torch.compile": lambda first, _: torch.compile(first, backend="eager"),  # type: ignore[dict-item, return-value]
    "Sequential": lambda first, _: nn.Sequential(first),
    "holder": lambda first, _: Holder(first),
    "two of them": lambda first, second: nn.ModuleList([first, second, nn.Linear(2, 2)]),
    "a part": lambda first, second: nn.Sequential(first.blocks[1], second.norm),
}


@pytest.mark.parametrize("around", AROUND)
def test_state_dicts_of_modules_around(around: str, tiers: zo.OffloadConfig) -> None:
    def make(config: zo.OffloadConfig | None) -> nn.Module:
        models = [build(TinyLM), build(partial(TinyLM, num_blocks=2))]
        if config is not None:
            zo.offload(models[0], config)
            zo.offload(models[1], placed("fp32", ("cpu",) * 3, None))
        KEPT.append(models)
        return AROUND[around](*models)

    plain, outer = make(None), make(tiers)
    assert same(outer.state_dict(), plain.state_dict())
    state = {name: value * 2 for name, value in plain.state_dict().items()}
    for each in (plain, outer):
        assert not any(each.load_state_dict(state))
        next(iter(each.state_dict().values())).fill_(3)
    assert same(outer.state_dict(), plain.state_dict())
    assert KEPT[-1][0](tokens_of(0)).item() == KEPT[-2][0](tokens_of(0)).item()
    KEPT.clear()


KEPT: list[list[nn.Module]] = []


# When values are read


def noting_reads(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sections of which a chunk is read from now on."""
    read, real = [], ShardStore.read_chunk

    def read_chunk(store: ShardStore, shard: Any, *where: Any) -> Tensor:
        read.append(shard.layout.index)
        return real(store, shard, *where)

    monkeypatch.setattr(ShardStore, "read_chunk", read_chunk)
    return read


def test_only_what_is_looked_at_is_read(tiers: zo.OffloadConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who saves an adapter asks for the whole state dict and takes a few tensors of it."""
    model = zo.offload(build(TinyLM), tiers)
    read = noting_reads(model, monkeypatch)
    state = model.state_dict()
    few = {name: tensor for name, tensor in state.items() if name.startswith("norm.")}
    assert read == []
    with zo.gathered(model.norm):
        assert torch.equal(few["norm.weight"].clone(), model.norm.weight)
    assert len(set(read)) == 1


@pytest.mark.parametrize("change", ["step", "gathered", "load", "close", "drop"])
def test_values_are_those_of_the_call(change: str, tiers: zo.OffloadConfig) -> None:
    """Whatever changes parameters, or takes them away, afterwards."""
    model = zo.offload(build(TinyLM), tiers)
    optimizer = zo.AdamW(model.parameters(), lr=1e-2)
    list(train(model, optimizer, range(2)))
    expected = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = model.state_dict()
    if change == "step":
        list(train(model, optimizer, range(2, 3)))
    elif change == "gathered":
        with zo.gathered(model, mode="write"), torch.no_grad():
            model.norm.weight.zero_()
            model.embedding.weight.zero_()
    elif change == "load":
        model.load_state_dict(build(TinyLM, seed=3).state_dict())
    elif change == "close":
        zo.close(model)
    else:
        del model, optimizer
    assert same(state, expected)


def test_a_read_that_fails_fails_again(tiers: zo.OffloadConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    """Zeros are never taken for values."""
    model = zo.offload(build(TinyLM), tiers)
    weight = model.state_dict()["norm.weight"]

    def fail(*_: Any) -> Tensor:
        raise zo.StorageError("the drive is gone")

    monkeypatch.setattr(ShardStore, "read_chunk", fail)
    for _ in range(2):
        with pytest.raises(zo.StorageError, match="the drive is gone"):
            weight.clone()
    monkeypatch.undo()
    assert torch.equal(weight.clone(), torch.ones(NARROW))
