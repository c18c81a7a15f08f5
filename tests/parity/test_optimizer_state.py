"""`optimizer.state` of offloaded parameters reads and edits what rests on their tiers, as a plain optimizer's does."""

from __future__ import annotations

import copy
import re
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

import zero_offload as zo
from tests.helpers.pairwise import in_turn
from zero_offload.storage.shards.store import ShardStore

MAKERS: dict[str, Callable[[Any], Any]] = {
    "AdamW": lambda params: zo.AdamW(params, 1e-2),
    "Adam amsgrad": lambda params: zo.Adam(params, 1e-2, amsgrad=True),
    "Adagrad": lambda params: zo.Adagrad(params, 1e-2, initial_accumulator_value=0.1),
    "Lion": lambda params: zo.Lion(params, 1e-3),
    "SGD momentum": lambda params: zo.SGD(params, 1e-2, momentum=0.9, dampening=0.5),
}
TIERS: dict[str, dict[str, Any]] = {
    "cpu": {"params": "cpu", "optimizer": "cpu"},
    "nvme": {"params": "nvme", "optimizer": "nvme"},
    "states on nvme": {"params": "cpu", "optimizer": "nvme", "grads": "nvme", "commit_every": 3},
    "in backward": {"params": "nvme", "optimizer": "nvme", "overlap": "backward"},
}
pytestmark = pytest.mark.filterwarnings("ignore:.*is not made a generation", "ignore:a resume goes on")
COMPACT = zo.Precision(compute="bf16", states="compact")
X = torch.randn(6, 8, generator=torch.Generator().manual_seed(1))


def build(name: str, tier: str | None, folder: Path, precision: Any = "fp32") -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8, bias=False), nn.LayerNorm(8))
    if tier is not None:
        settings = TIERS[tier] | ({"nvme": folder} if tier != "cpu" else {})
        zo.offload(model, zo.OffloadConfig(precision=precision, **settings))
    return model, MAKERS[name](model.parameters())


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int, dtype: torch.dtype = torch.float32
) -> Any:
    losses = []
    for _ in range(num_steps):
        loss = (model(X.to(dtype)).float() - X).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def values_of(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    """The states of each parameter, copied; torch's SGD and this package's Lion keep no step."""
    skipped = () if "betas" in optimizer.defaults and "eps" in optimizer.defaults else ("step",)
    params = [param for group in optimizer.param_groups for param in group["params"]]
    return [
        {name: torch.clone(value).tolist() for name, value in optimizer.state[p].items() if name not in skipped}
        if p in optimizer.state
        else {}
        for p in params
    ]


def first_of(optimizer: Any) -> tuple[list[nn.Parameter], str]:
    params = [param for group in optimizer.param_groups for param in group["params"]]
    names = ("exp_avg", "sum", "momentum_buffer")
    return params, next(name for name in names if name in optimizer.state[params[0]])


# Programs


def read_all(optimizer: Any) -> None:
    params, name = first_of(optimizer)
    for param in params:
        assert param in optimizer.state and optimizer.state.get(param) is not None
        assert optimizer.state[param].get(name).shape == param.shape
        assert optimizer.state[param].get("nothing") is None and "nothing" not in optimizer.state[param]
    assert len(optimizer.state) == len(list(optimizer.state)) == len(optimizer.state.keys()) == len(params)
    for _, entry in optimizer.state.items():
        assert all(bool(torch.as_tensor(value).isfinite().all()) for value in entry.values())
    assert all(torch.equal(v[name], optimizer.state[k][name]) for k, v in dict(optimizer.state).items())
    assert name in str(optimizer.state[params[0]]) and len(str(optimizer.state)) > 10
    assert optimizer.state != {}
    torch.stack([torch.linalg.vector_norm(entry[name]) for entry in optimizer.state.values()]).norm().item()
    optimizer.state_dict()


def clear(optimizer: Any) -> None:
    optimizer.state.clear()
    assert not optimizer.state and len(optimizer.state) == 0 and list(optimizer.state.items()) == []
    assert optimizer.state_dict()["state"] == {} == optimizer.state


def new_dict(optimizer: Any) -> None:
    optimizer.state = defaultdict(dict)
    assert len(optimizer.state) == 0


def delete_one(optimizer: Any) -> None:
    (first, second, *_), _ = first_of(optimizer)
    del optimizer.state[first]
    assert first not in optimizer.state and second in optimizer.state
    with pytest.raises(KeyError):
        del optimizer.state[first]
    assert len(optimizer.state[first]) == 0 and optimizer.state.pop(first, None) in (None, {})


def pop_one(optimizer: Any) -> None:
    (_, second, *_), name = first_of(optimizer)
    expected = optimizer.state[second][name].clone()
    entry = optimizer.state.pop(second)
    assert torch.equal(entry[name], expected) and second not in optimizer.state


def empty_entries(optimizer: Any) -> None:
    (first, second, *_), _ = first_of(optimizer)
    optimizer.state[first] = {}
    optimizer.state[second].clear()
    assert optimizer.state[second] == {} == dict(optimizer.state[first])


def assign_entries(optimizer: Any) -> None:
    params, _ = first_of(optimizer)
    for param in params:
        entry = {name: value.clone() for name, value in optimizer.state[param].items()}
        optimizer.state[param] = {name: value + (name == "step") * 2 for name, value in entry.items()}


def assign_tensors(optimizer: Any) -> None:
    params, name = first_of(optimizer)
    for param in params:
        optimizer.state[param][name] = optimizer.state[param][name] * 0.5
    optimizer.state[params[0]].update({name: torch.full((8, 8), 0.25)})


def in_place(optimizer: Any) -> None:
    params, name = first_of(optimizer)
    tensors = [optimizer.state[param][name] for param in params]
    tensors[0].mul_(0.5)
    tensors[1].zero_()
    tensors[2] *= 0.25
    tensors[3].copy_(torch.arange(8.0))
    optimizer.state[params[4]][name] += 0.125
    torch._foreach_mul_(tensors, 0.75)
    torch.add(tensors[0], 0.5, out=tensors[0])
    with torch.inference_mode():
        tensors[1].add_(0.0625)


def in_views(optimizer: Any) -> None:
    params, name = first_of(optimizer)
    moment = optimizer.state[params[0]][name]
    moment[0] = 0.5
    moment[1, 2:5] *= 0.25
    moment[moment.abs() < 0.01] = 0.0
    moment.view(-1)[-3:].fill_(0.125)
    moment.t()[4].mul_(2)
    moment.data[5].zero_()
    moment.detach().add_(0.03125)
    for row in moment.split(3):
        row.mul_(0.5)
    next(iter(moment)).add_(0.25)
    moment.view(torch.int32)[7, 7] = 0
    moment.data = moment.data * 0.5


def prune(optimizer: Any) -> None:
    """As programs that restart low-rank adapters do."""
    params, name = first_of(optimizer)
    for param in params:
        moment = optimizer.state[param][name]
        size = torch.abs(moment)
        moment.mul_((size > torch.quantile(size.flatten(), 0.9)).to(moment.dtype))


def held_entries(optimizer: Any) -> None:
    """Entries that were taken out of the mapping stay as they were."""
    params, name = first_of(optimizer)
    saved, held = dict(optimizer.state), optimizer.state[params[0]][name]
    expected = held.clone()
    optimizer.state.clear()
    assert torch.equal(held, expected) and torch.equal(saved[params[0]][name], expected)
    optimizer.state = saved
    saved = copy.copy(optimizer.state)
    for param in params:
        del optimizer.state[param]
    for param, entry in saved.items():
        optimizer.state[param] = entry
    before = optimizer.state
    optimizer.state = defaultdict(dict)
    assert torch.equal(before[params[0]][name], expected)
    optimizer.state = before


def swap(optimizer: Any) -> None:
    params, name = first_of(optimizer)
    a, b = optimizer.state[params[0]], optimizer.state[params[2]]
    a[name], b[name] = b[name], a[name]
    given = optimizer.state_dict()
    entries = given["state"]
    entries[1][name], entries[3][name] = entries[3][name], entries[1][name]
    optimizer.load_state_dict(given)


EDITS = {
    edit.__name__: edit
    for edit in (
        read_all,
        clear,
        new_dict,
        delete_one,
        pop_one,
        empty_entries,
        assign_entries,
        assign_tensors,
        in_place,
        in_views,
        prune,
        held_entries,
        swap,
    )
}


@in_turn(edit=list(EDITS), name=list(MAKERS))
def test_an_edit_does_what_it_does_to_a_plain_optimizer(name: str, edit: str, tmp_path: Path) -> None:
    found = {}
    for tier in (None, *TIERS):
        model, optimizer = build(name, tier, tmp_path / str(tier))
        losses = train(model, optimizer, 3)
        EDITS[edit](optimizer)
        edited = values_of(optimizer)
        losses += train(model, optimizer, 3)
        found[tier] = losses, edited, values_of(optimizer)
    for tier in TIERS:
        assert found[tier] == found[None], tier


# Entries that are held while states change


@pytest.mark.parametrize(
    ("precision", "tier"), [("fp32", "cpu"), ("fp16", "nvme"), ("bf16", "states on nvme"), (COMPACT, "in backward")]
)
def test_entries_follow_steps_and_state_dicts_do_not(precision: Any, tier: str, tmp_path: Path) -> None:
    model, optimizer = build("AdamW", tier, tmp_path, precision)
    dtype = torch.float32 if precision == "fp32" else torch.float16 if precision == "fp16" else torch.bfloat16
    train(model, optimizer, 2, dtype)
    params, name = first_of(optimizer)
    entry, moment, given = optimizer.state[params[0]], optimizer.state[params[0]][name], optimizer.state_dict()
    before = copy.deepcopy(given)
    assert {key: value.tolist() for key, value in entry.items()} == {
        key: value.tolist() for key, value in before["state"][0].items()
    }
    model.zero_grad()
    loss = model(X.to(dtype)).float().square().mean()
    loss.backward()
    optimizer.step()
    assert float(entry["step"]) == 3 and torch.equal(moment, entry[name])
    assert not torch.equal(moment, before["state"][0][name])
    moment.zero_()
    assert not optimizer.state_dict()["state"][0][name].any()
    zo.close(model)
    for key, kept in before["state"].items():
        assert all(torch.equal(given["state"][key][each], value) for each, value in kept.items())
    with pytest.raises(zo.ZeroOffloadError, match="closed"):
        moment.norm()


@pytest.mark.parametrize("tier", TIERS)
def test_what_goes_back_as_it_came_moves_no_byte(tier: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """accelerate loads an optimizer's own state dict to have it on its device; lightning assigns entries."""
    model, optimizer = build("AdamW", tier, tmp_path)
    expected = train(*build("AdamW", None, tmp_path), 4)
    losses = train(model, optimizer, 2)
    with monkeypatch.context() as patched:
        for call in ("read_chunk", "write_components"):
            patched.setattr(ShardStore, call, lambda *_: pytest.fail("moves values"))
        given = optimizer.state_dict()
        moved = {key: {name: value.to("cpu") for name, value in entry.items()} for key, entry in given["state"].items()}
        optimizer.load_state_dict({**given, "state": moved})
        # A GPU is another device too.
        on_meta = {
            key: {name: value if name == "step" else value.to("meta") for name, value in entry.items()}
            for key, entry in moved.items()
        }
        assert on_meta[0]["exp_avg"].is_meta and on_meta[0]["exp_avg"].shape == (8, 8)
        optimizer.load_state_dict({**given, "state": on_meta})
        for param, entry in optimizer.state.items():
            optimizer.state[param] = entry
            optimizer.state[param] = dict(entry)
            entry["exp_avg"] = entry["exp_avg"].to("cpu").detach().float().contiguous()
        optimizer.state = dict(optimizer.state)
        assert optimizer.state[next(model.parameters())]["exp_avg_sq"].numel() == 64
    assert losses + train(model, optimizer, 2) == expected


@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_a_parameter_is_read_and_written_by_its_own_chunks(
    tier: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a section whose other parameters are larger; once a generation does not name what is overwritten."""
    model = nn.Sequential(nn.Linear(2048, 1536, bias=False), nn.Linear(1536, 8, bias=False))
    settings = TIERS[tier] | ({"nvme": tmp_path, "commit_every": 9} if tier == "nvme" else {})
    zo.offload(model, zo.OffloadConfig(precision="fp32", **settings), units=[model])
    optimizer = zo.AdamW(model.parameters())
    model(torch.ones(1, 2048)).sum().backward()
    optimizer.step()
    rows, read_chunk = [], ShardStore.read_chunk

    def noted(store: ShardStore, shard: Any, *chunk: Any, **settings: Any) -> torch.Tensor:
        rows.append(chunk)
        return read_chunk(store, shard, *chunk, **settings)

    monkeypatch.setattr(ShardStore, "read_chunk", noted)
    last = model[1].weight
    optimizer.state[last]["exp_avg"].norm()
    assert rows == [("exp_avg", 3)]
    optimizer.state[last]["exp_avg"].mul_(0.5)
    optimizer.state[last]["exp_avg_sq"] = torch.ones(8, 1536)
    assert rows == [("exp_avg", 3)] * 2  # what is replaced whole is not read


# Other numbers, other owners


def train_16(model: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int) -> Any:
    return train(model, optimizer, num_steps, torch.bfloat16)


@pytest.mark.parametrize(
    ("states", "edit"),
    [
        ("fp32", "in_place"),
        ("bf16", "assign_entries"),
        ("bf16", "swap"),
        ("compact", "in_views"),
        ("compact", "pop_one"),
    ],
)
def test_an_edit_does_the_same_on_every_tier(states: str, edit: str, tmp_path: Path) -> None:
    found = []
    for tier in TIERS:
        model, optimizer = build("AdamW", tier, tmp_path / tier, zo.Precision(compute="bf16", states=states))
        losses = train_16(model, optimizer, 3)
        EDITS[edit](optimizer)
        found.append((losses + train_16(model, optimizer, 3), values_of(optimizer)))
    assert all(each == found[0] for each in found[1:])


@pytest.mark.parametrize("states", ["bf16", "compact"])
def test_an_edit_leaves_its_neighbours_alone(states: str) -> None:
    """Formats that round would round them again, where they share a chunk."""
    model, optimizer = build("AdamW", "cpu", Path(), zo.Precision(compute="bf16", states=states))
    train_16(model, optimizer, 3)
    before = values_of(optimizer)
    params = list(model.parameters())
    optimizer.state[params[1]]["exp_avg"].zero_()
    del optimizer.state[params[2]]
    after = values_of(optimizer)
    assert after[1] == before[1] | {"exp_avg": [0.0] * 8} and after[2] == {}
    assert [after[i] for i in (0, 3, 4)] == [before[i] for i in (0, 3, 4)]


@pytest.mark.parametrize("tier", TIERS)
def test_masters_keep_their_bits(tier: str, tmp_path: Path) -> None:
    model, optimizer = build("AdamW", tier, tmp_path, "bf16")
    train_16(model, optimizer, 3)
    with zo.gathered(model, kind="master") as masters:
        before = {name: value.clone() for name, value in masters.items()}
    in_place(optimizer)
    pop_one(optimizer)
    for param in model.parameters():
        if param in optimizer.state:
            optimizer.state[param] = {name: value.clone() for name, value in optimizer.state[param].items()}
    clear(optimizer)
    with zo.gathered(model, kind="master") as masters:
        assert all(torch.equal(value, before[name]) for name, value in masters.items())


@pytest.mark.parametrize("tier", [None, *TIERS])
def test_steps_are_counted_from_what_they_are_set_to(tier: str | None, tmp_path: Path) -> None:
    expected = {None: (0.0, 1.0, 6.0, 12.0, 2.0)}
    model, optimizer = build("AdamW", tier, tmp_path)
    train(model, optimizer, 3)
    steps = [optimizer.state[param] for param in model.parameters()]
    steps[0]["step"].zero_()
    steps[1]["step"] = torch.tensor(1.0)
    steps[2]["step"] *= 2
    steps[3]["step"].add_(9)
    steps[4]["step"] -= 1
    assert tuple(float(each["step"]) for each in steps) == expected[None]
    assert all(param in optimizer.state for param in model.parameters())
    train(model, optimizer, 1)
    assert tuple(float(each["step"]) for each in steps) == tuple(each + 1 for each in expected[None])
    if tier is not None:
        with pytest.raises(zo.ConfigError, match=r"step.*use a number of steps, 0 or more"):
            steps[0]["step"].add_(0.5)
        with pytest.raises(zo.ConfigError, match="use a number of steps"):
            steps[0]["step"] = -1


def test_each_optimizer_has_its_own_parameters(tmp_path: Path) -> None:
    """Two over parts of a model, one of them over a parameter that is not offloaded too."""
    found = []
    for tier in (None, "cpu", "nvme"):
        model, _ = build("AdamW", tier, tmp_path / str(tier))
        other = nn.Linear(8, 8, bias=False)
        params = list(model.parameters())
        with torch.no_grad():
            other.weight.fill_(0.25)
        first = zo.AdamW([{"params": params[:2]}, {"params": [other.weight], "lr": 0.5}], 1e-2)
        second = zo.SGD(params[2:], 1e-2, momentum=0.9)
        losses = []
        for step in range(5):
            loss = (model(other(X)) - X).square().mean()
            loss.backward()
            for each in (first, second):
                each.step()
                each.zero_grad()
            losses.append(loss.item())
            assert len(first.state) == 3 and len(second.state) == 3 and set(first.state) == {*params[:2], other.weight}
            assert params[2] not in first.state and params[2] in second.state
            if step == 1:
                del first.state[params[0]]
                first.state[other.weight]["exp_avg"].zero_()
                second.state.clear()
                assert len(first.state) == 2 and len(second.state) == 0
            if step == 3:
                first.state.clear()
                second.state[params[3]]["momentum_buffer"] = None
                second.state.popitem()
        found.append((losses, *(values_of(each) for each in (first, second))))
        if tier is not None:
            with pytest.raises(zo.ConfigError, match="in none of its param groups"):
                first.state[params[2]] = {"momentum_buffer": torch.zeros(8, 8)}
            assert first.state.get(params[2]) is None and len(first.state[params[2]]) == 0
    assert found[0][0] == found[1][0] == found[2][0]
    assert found[1] == found[2]


# Before the first step


@pytest.mark.parametrize(("name", "tier"), [("AdamW", "cpu"), *zip(MAKERS, ["nvme", "in backward"] * 3, strict=False)])
def test_reading_before_the_first_step_makes_nothing(tier: str, name: str, tmp_path: Path) -> None:
    expected = train(*build(name, None, tmp_path), 3)
    model, optimizer = build(name, tier, tmp_path)
    for param in model.parameters():
        assert param not in optimizer.state and optimizer.state.get(param) is None
        assert dict(optimizer.state[param]) == {} and "exp_avg" not in optimizer.state[param]
        with pytest.raises(KeyError):
            optimizer.state[param]["exp_avg"]
    assert not optimizer.state and len(optimizer.state) == 0 and optimizer.state_dict()["state"] == {}
    optimizer.state.clear()
    optimizer.state = defaultdict(dict)
    assert train(model, optimizer, 3) == expected


@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_entries_may_be_set_before_the_first_step(tier: str, tmp_path: Path) -> None:
    found = []
    for each in (None, tier):
        model, optimizer = build("AdamW", each, tmp_path)
        for param in model.parameters():
            optimizer.state[param] = {
                "step": torch.tensor(3.0),
                "exp_avg": torch.full(tuple(param.shape), 0.5),
                "exp_avg_sq": torch.full(tuple(param.shape), 0.25),
            }
        found.append((train(model, optimizer, 2), values_of(optimizer)))
    assert found[0] == found[1]


# Calls of torch.distributed.checkpoint


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(("name", "tier"), [("AdamW", "cpu"), *zip(MAKERS, [*TIERS, "nvme"][1:] * 2, strict=False)])
def test_distributed_checkpoint_changes_no_number(name: str, tier: str, tmp_path: Path) -> None:
    """It makes states by a step with zero gradients, which plain torch counts."""
    expected = train(*build(name, None, tmp_path), 4)
    model, optimizer = build(name, tier, tmp_path / "run")
    template = get_optimizer_state_dict(model, optimizer)["state"]
    assert (
        zo.stats(model).step == 0
        and len(optimizer.state) == 5
        and template.keys() == dict(model.named_parameters()).keys()
    )
    assert not any(float(entry["step"]) for entry in optimizer.state.values())
    initial = 0.1 if name == "Adagrad" else 0.0
    assert all(bool((entry[first_of(optimizer)[1]] == initial).all()) for entry in template.values())
    losses = train(model, optimizer, 2)
    saved = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.save(saved, checkpoint_id=tmp_path / "saved", no_dist=True)
    assert losses + train(model, optimizer, 2) == expected
    zo.close(model)

    model, optimizer = build(name, tier, tmp_path / "other")
    with torch.no_grad(), zo.gathered(model, mode="write"):
        model[0].weight.zero_()
    taken = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.load(taken, checkpoint_id=tmp_path / "saved", no_dist=True)
    set_optimizer_state_dict(model, optimizer, taken["optimizer"])
    assert train(model, optimizer, 2) == expected[2:]
    zo.close(model)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adagrad, torch.optim.SGD])
@pytest.mark.parametrize("grads", ["cpu", "device"])
def test_an_optimizer_of_torchs_is_told_which_one_to_use(kind: Any, grads: str) -> None:
    model = zo.offload(nn.Linear(8, 8), zo.OffloadConfig(precision="fp32", grads=grads))
    optimizer = kind(model.parameters(), lr=0.1, weight_decay=0.5)
    model(X).sum().backward()
    call = re.escape(f"zo.{kind.__name__}(model.parameters(), lr=0.1, weight_decay=0.5)")
    with pytest.raises(zo.ZeroOffloadError, match=f"torch's {kind.__name__} cannot step .* Step with {call}"):
        optimizer.step()


def test_a_state_dict_goes_into_an_optimizer_of_torchs(tmp_path: Path) -> None:
    """Which has copies of its own, made when it needs them."""
    expected = train(*build("AdamW", None, tmp_path), 4)
    model, optimizer = build("AdamW", "nvme", tmp_path)
    losses = train(model, optimizer, 2)
    other, taken = build("AdamW", None, tmp_path)[0], model.state_dict()
    other.load_state_dict(taken)
    torchs = zo.AdamW(other.parameters(), 1e-2)
    torchs.load_state_dict(optimizer.state_dict())
    moment = optimizer.state_dict()["state"][0]["exp_avg"].to("cpu")
    kept = moment.clone()
    moment.mul_(2)
    assert torch.equal(moment, kept * 2) and torch.equal(optimizer.state_dict()["state"][0]["exp_avg"], kept)
    assert train(other, torchs, 2) == expected[2:]
    assert losses + train(model, optimizer, 2) == expected
    assert torch.equal(moment, kept * 2)


# Refusals


def test_entries_that_an_optimizer_cannot_go_on_with_are_refused() -> None:
    model, optimizer = build("AdamW", "cpu", Path())
    train(model, optimizer, 2)
    param = next(model.parameters())
    entry, before = optimizer.state[param], values_of(optimizer)
    moment = torch.zeros(8, 8)
    refused: list[tuple[str, Callable[[], Any]]] = [
        ("0.weight.*no place for ema", lambda: entry.update(ema=moment)),
        ("no place for ema", lambda: optimizer.state[param].setdefault("ema", moment)),
        ("needs exp_avg .*beside", lambda: entry.pop("exp_avg")),
        ("needs step", lambda: entry.__delitem__("step")),
        ("would lack step, exp_avg_sq", lambda: optimizer.state.update({param: {"exp_avg": moment}})),
        ("would lack step", lambda: setattr(optimizer, "state", {param: {"exp_avg": moment, "exp_avg_sq": moment}})),
        (r"exp_avg has shape \(4,\)", lambda: entry.update(exp_avg=torch.zeros(4))),
        ("exp_avg is a float", lambda: entry.update(exp_avg=0.0)),
        ("is to be a list", lambda: optimizer.state.update({param: [1]})),
        ("no address", lambda: entry["exp_avg"].data_ptr()),
    ]
    for message, call in refused:
        with pytest.raises(zo.ZeroOffloadError, match=message):
            call()
    array = entry["exp_avg"].numpy()
    with pytest.raises(ValueError, match="read-only"):
        array[0, 0] = 1.0
    assert values_of(optimizer) == before


def test_a_moment_that_was_reset_is_no_more() -> None:
    model, optimizer = build("AdamW", "cpu", Path())
    train(model, optimizer, 2)
    moment = optimizer.state[next(model.parameters())]["exp_avg"].view(-1)
    expected = moment.tolist()
    optimizer.state.clear()
    assert moment.tolist() == expected
    train(model, optimizer, 1)
    assert moment.tolist() == expected


def test_edits_are_a_part_of_generations(tmp_path: Path) -> None:
    model, optimizer = build("AdamW", "nvme", tmp_path)
    train(model, optimizer, 2)
    optimizer.state[next(model.parameters())]["exp_avg"].fill_(0.5)
    zo.commit(model, optimizer)
    expected = values_of(optimizer)
    zo.close(model)
    model, optimizer = nn.Sequential(*build("AdamW", None, tmp_path)[0]), None
    zo.offload(model, zo.OffloadConfig(precision="fp32", nvme=tmp_path, existing="resume", **TIERS["nvme"]))
    optimizer = zo.AdamW(model.parameters(), 1e-2)
    assert zo.resume(model, optimizer) is not None
    assert values_of(optimizer) == expected


def test_a_plain_optimizer_copies_and_pickles() -> None:
    model, optimizer = build("AdamW", None, Path())
    train(model, optimizer, 2)
    other = copy.deepcopy(optimizer)
    assert values_of(other) == values_of(optimizer) and isinstance(other.state, defaultdict)
    other.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    assert type(copy.copy(optimizer.state)) is type(copy.deepcopy(optimizer.state)) is defaultdict
    optimizer.state["mine"] = 3
    assert optimizer.state["mine"] == 3 and optimizer.state_dict()["state"]["mine"] == 3
    model, optimizer = build("AdamW", "cpu", Path())
    train(model, optimizer, 2)
    optimizer.state["mine"] = 3
    assert len(optimizer.state) == 6 and optimizer.state.pop("mine") == 3 and len(optimizer.state) == 5
    other = copy.deepcopy(optimizer)
    assert other.state.pop("mine", 3) == 3 and values_of(other) == values_of(optimizer)
