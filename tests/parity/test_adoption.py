"""Parameters that a model has got after `zo.offload`, adopted by a second call: bit for bit what a plain model does."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero_offload as zo
from tests.helpers.failing import fail_at, hooks_of
from tests.helpers.models import TinyLM, build, tokens_of
from tests.helpers.pairwise import full, in_turn
from tests.helpers.ranks import UNEVEN, RankPool, read_params
from tests.helpers.scripts import Average, Result, run_both, run_offloaded, run_plain
from zero_offload.base.errors import CapacityError
from zero_offload.cli.main import main
from zero_offload.standins.owners import owner_of
from zero_offload.storage.shards.store import ShardStore

OFFLOAD = importlib.import_module("zero_offload.model.offload")  # the package's attribute is the function
Rows = Callable[[int], Tensor]
TIERS: dict[str, dict[str, Any]] = {
    "cpu": {},
    "nvme": {"params": "nvme", "grads": "nvme", "optimizer": "nvme", "device_memory": "10MiB"},
    "mixed": {"params": {"cpu": 0.5, "nvme": 0.5}, "grads": {"device": 0.5, "nvme": 0.5}, "optimizer": "nvme"},
    "in order": {"params": "nvme", "optimizer": "cpu", "overlap": "forward"},
}
make = partial(TinyLM, UNEVEN)


@pytest.fixture(params=[tier if tier != "mixed" else full(tier) for tier in TIERS])
def settings(request: pytest.FixtureRequest, nvme: Path) -> dict[str, Any]:
    return TIERS[request.param] | {"nvme": nvme}


class Adapted(nn.Module):
    """A linear layer with low-rank matrices beside it, of which one is trained with the layer frozen or not."""

    def __init__(self, base_layer: nn.Linear, rank: int = 3) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.down = nn.Linear(base_layer.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base_layer.out_features, bias=False)
        self.scale = nn.Parameter(torch.full((1,), 0.5), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.scale * self.up(self.down(x.to(self.down.weight.dtype)))  # type: ignore[no-any-return]


def adapt(model: nn.Module, name: str, seed: int = 7) -> list[nn.Parameter]:
    """Put adapters around `name` of every block; those that are trained."""
    torch.manual_seed(seed)
    for block in model.blocks:
        setattr(block, name, Adapted(getattr(block, name)))
    adapters = [getattr(block, name) for block in model.blocks]
    return [param for each in adapters for param in (*each.down.parameters(), *each.up.parameters())]


def adopt(model: nn.Module, root: nn.Module | None = None) -> None:
    if any(owner_of(param) is not None for param in model.parameters()):
        zo.offload(root or model)


def train(model: nn.Module, optimizer: Any, rows: Rows, average: Average, steps: range) -> Iterator[float]:
    for step in steps:
        loss = model(rows(step))
        loss.backward()
        average(model)
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()


def check(found: Result, expected: Result) -> None:
    """Offloaded parameters keep the names that they had in their call."""
    assert found[0] == expected[0]
    assert len(found[1]) == len(expected[1])
    assert all(map(torch.equal, found[1].values(), expected[1].values()))


def grows_twice(model: nn.Module, rows: Rows, average: Average) -> Iterator[float]:
    """All of a model is trained; then adapters too, by the same optimizer; then others alone, and a further layer."""
    optimizer = zo.AdamW(model.parameters(), lr=1e-2)
    yield from train(model, optimizer, rows, average, range(2))
    adapters = adapt(model, "up")
    adopt(model)
    optimizer.add_param_group({"params": adapters, "lr": 3e-2})
    yield from train(model, optimizer, rows, average, range(2, 4))
    with torch.no_grad():
        yield model(rows(4)).item()
    model.requires_grad_(False)
    others = adapt(model, "down")
    model.norm = nn.Sequential(model.norm, nn.Linear(UNEVEN, UNEVEN))
    adopt(model)
    second = zo.SGD([*others, *model.norm[1].parameters()], lr=1e-2, momentum=0.9)
    yield from train(model, second, rows, average, range(4, 7))


def between_backwards(model: nn.Module, rows: Rows, average: Average) -> Iterator[float]:
    """A gradient that no step has used stays one (one rank), and a graph that is older than the adapters."""
    optimizer = zo.AdamW(model.parameters(), lr=1e-2)
    model(rows(0)).backward()
    older = model(rows(1))
    adapters = adapt(model, "up")
    adopt(model)
    older.backward()
    optimizer.add_param_group({"params": adapters})
    yield from train(model, optimizer, rows, average, range(2, 4))


def test_on_one_rank(settings: dict[str, Any]) -> None:
    config = zo.OffloadConfig(precision="fp32", **settings)
    check(run_offloaded(grows_twice, make, config), run_plain(grows_twice, make))


@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_with_gradients_that_wait(tier: str, nvme: Path) -> None:
    config = zo.OffloadConfig(precision="fp32", nvme=nvme, **TIERS[tier])
    check(run_offloaded(between_backwards, make, config), run_plain(between_backwards, make))


@pytest.mark.parametrize("stage", [3, *map(full, (0, 1, 2))])
@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_on_two_ranks(stage: int, tier: str, nvme: Path, pool: RankPool) -> None:
    given = TIERS[tier] | {"nvme": nvme, "stage": stage}
    for found, expected in pool.succeed(run_both, grows_twice, make, given):
        check(found, expected)


# Whatever is computed with: one call and two are the same


PRECISIONS = ["bf16", "fp16", zo.Precision("bf16", modules={"*norm*": "fp32"})]


def master_of(param: nn.Parameter) -> Tensor:
    with zo.gathered([param], kind="master") as masters:
        return next(iter(masters.values())).clone()


def scaled_loss(scaler: zo.GradScaler, model: nn.Module, tokens: Tensor) -> Tensor:
    return scaler.scale(model(tokens))


@in_turn(precision=PRECISIONS, tier=["cpu", "nvme"])
def test_adopted_is_as_offloaded_at_once(precision: Any, tier: str, nvme: Path) -> None:
    found = []
    for is_adopted in (False, True):
        model = build(TinyLM).requires_grad_(False)
        config = zo.OffloadConfig(precision=precision, nvme=nvme, existing="discard", **TIERS[tier])
        if is_adopted:
            zo.offload(model, config)
        trained = adapt(model, "up")
        zo.offload(model, config)
        optimizer, scaler = zo.AdamW(trained, lr=1e-2), zo.GradScaler(256.0, enabled=precision == "fp16")
        values = []
        for step in range(3):
            losses = zo.accumulate(model, [tokens_of(step), tokens_of(step + 9)], partial(scaled_loss, scaler))
            scaler.unscale_(optimizer)
            values += [*map(float, losses), zo.clip_grad_norm_(model, 0.1).item()]
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        masters = {name: master_of(param) for name, param in model.named_parameters()}
        found.append((values, masters, {name: value.clone() for name, value in model.state_dict().items()}))
        zo.close(model)
    assert found[0][0] == found[1][0]
    for once, twice in zip(found[0][1:], found[1][1:], strict=True):
        assert once.keys() == twice.keys()
        assert all(torch.equal(once[name], twice[name]) for name in once)


class Valued(nn.Module):
    """A head around a model: a call with the whole adopts the head."""

    def __init__(self, model: nn.Module | None = None) -> None:
        super().__init__()
        self.model = TinyLM(UNEVEN) if model is None else model
        self.value = nn.Linear(1, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return (self.value(self.model(tokens).view(1, 1)) ** 2).sum()  # type: ignore[no-any-return]


def around(rank: int, world_size: int, settings: dict[str, Any]) -> tuple[list[float], dict[str, Tensor]]:
    model = build(Valued)
    if "twice" in settings:
        zo.offload(model.model, zo.OffloadConfig(precision="fp32", **settings["twice"]))
        zo.offload(model)
    else:
        zo.offload(model, zo.OffloadConfig(precision="fp32", **settings))
    optimizer = zo.AdamW(model.parameters(), lr=1e-2)
    rows = lambda step: tokens_of(step * world_size + rank)  # noqa: E731
    losses = list(train(model, optimizer, rows, lambda _: None, range(3)))
    params = read_params(model)
    zo.close(model)
    return losses, {name.removeprefix("model."): values for name, values in params.items()}


def test_a_module_around_the_model(nvme: Path, pool: RankPool) -> None:
    given = {"params": "nvme", "optimizer": "nvme", "nvme": nvme, "existing": "discard"}
    check(around(0, 1, {"twice": given}), around(0, 1, given))
    for found, expected in zip(pool.succeed(around, {"twice": {}}), pool.succeed(around, {}), strict=True):
        check(found, expected)


def test_states_of_ordinary_steps_are_in_the_next_generation(nvme: Path) -> None:
    losses = []
    for steps in (range(3), range(3, 5)):
        model = build(Valued)
        zo.offload(model.model, zo.OffloadConfig(precision="fp32", nvme=nvme, existing="resume"))
        optimizer = zo.AdamW(model.parameters(), lr=1e-2)
        if steps.start == 0:
            losses += train(model, optimizer, tokens_of, lambda _: None, steps)
            zo.offload(model)
            zo.commit(model, optimizer)
        else:
            zo.offload(model)
            assert zo.resume(model, optimizer) is not None
            losses += train(model, optimizer, tokens_of, lambda _: None, steps)
        zo.close(model)
    plain = build(Valued)
    optimizer = zo.AdamW(plain.parameters(), lr=1e-2)
    assert losses == list(train(plain, optimizer, tokens_of, lambda _: None, range(5)))


class Regularized(nn.Module):
    """Reads adapters outside of the forward of the model that they are in."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Tensor:
        loss = self.model(tokens)
        return loss + sum((block.up.down.weight @ block.up.down.weight.T).sum() for block in self.model.blocks)  # type: ignore[no-any-return]


def regularizes(model: nn.Module, rows: Rows, average: Average) -> Iterator[float]:
    adapters, whole = adapt(model, "up"), Regularized(model)
    adopt(model, whole)
    yield from train(whole, zo.AdamW(adapters, lr=1e-2), rows, average, range(3))


def test_the_module_that_was_given_reads_what_is_inside(nvme: Path) -> None:
    config = zo.OffloadConfig(precision="fp32", nvme=nvme, params="nvme", optimizer="nvme")
    check(run_offloaded(regularizes, make, config), run_plain(regularizes, make))


def differ_on_ranks(rank: int, world_size: int) -> None:
    model = zo.offload(build(TinyLM), zo.OffloadConfig())
    try:
        adapt(model, "up", seed=rank)
        zo.offload(model)
    finally:
        zo.close(model)


def test_ranks_adopt_the_same(pool: RankPool) -> None:
    found = pool.call(differ_on_ranks)
    assert all(each.kind == "ConfigError" and "blocks.0.up.down.weight and" in each.message for each in found)


def test_deferred_parameters_are_made_as_they_are_adopted() -> None:
    models = [zo.offload(build(TinyLM), zo.OffloadConfig(precision="fp32")) for _ in range(2)]
    for model, surroundings in zip(models, (zo.deferred_init, warnings.catch_warnings), strict=True):
        torch.manual_seed(3)
        with surroundings():
            adapt(model, "up")
        zo.offload(model)
    found, expected = map(read_params, models)
    assert all(torch.equal(found[name], values) for name, values in expected.items())
    assert models[0](tokens_of(0)).item() == models[1](tokens_of(0)).item()


# Generations


def run(nvme: Path, steps: range, existing: str = "refuse", **settings: Any) -> tuple[list[Any], list[Tensor]]:
    """Trains the norm for two steps, then adapters too; of that `steps`, with a commit after each."""
    model, values = build(TinyLM), []
    for module in (model.embedding, model.blocks):
        module.requires_grad_(False)
    zo.offload(model, zo.OffloadConfig(precision="fp32", nvme=nvme, existing=existing, **settings))
    optimizer = zo.AdamW(model.parameters(), lr=1e-2)
    if steps.start == 0:
        for step in steps[:2]:
            values += one_step(model, optimizer, step)
    if existing == "resume" and "stage" not in settings:
        with zo.gathered(model.blocks, mode="write"):
            pass  # takes room on disk, and none of what a generation has of the adapters
    optimizer = grown(model)
    if existing == "resume":
        resumed = zo.resume(model, optimizer)
        assert resumed is not None and (resumed.step, resumed.extra) == (steps.start, {"next": steps.start})
    for step in steps[max(2 - steps.start, 0) :]:
        values += one_step(model, optimizer, step)
    params = list(read_params(model).values())
    zo.close(model)
    return values, params


def grown(model: nn.Module) -> zo.AdamW:
    adapters = adapt(model, "up")
    adopt(model)
    return zo.AdamW([{"params": adapters}, {"params": model.norm.parameters()}], lr=3e-2)


def one_step(model: nn.Module, optimizer: Any, step: int) -> list[Any]:
    loss, drawn = model(tokens_of(step)), torch.rand(1)
    loss.backward()
    norm = zo.clip_grad_norm_(model, 0.5)
    optimizer.step()
    optimizer.zero_grad()
    zo.commit(model, optimizer, extra={"next": step + 1})
    return [loss.item(), norm.item(), drawn.item()]


RESUMED = TIERS | {"cached": {"params": "nvme", "optimizer": "cpu"}}


@pytest.mark.parametrize("tier", ["cpu", "nvme", "cached"])
def test_a_resume_makes_the_same_calls(tier: str, tmp_path: Path) -> None:
    whole = run(tmp_path / "whole", range(6), **RESUMED[tier])
    values: list[Any] = []
    for at, (begin, end) in enumerate([(0, 3), (3, 5), (5, 6)]):
        more, params = run(tmp_path / "parts", range(begin, end), "resume" if at else "refuse", **RESUMED[tier])
        values += more
    assert values == whole[0]
    assert all(map(torch.equal, params, whole[1]))
    assert main(["verify", str(tmp_path / "parts")]) == 0


def resumed_on_ranks(rank: int, world_size: int, nvme: Path, settings: dict[str, Any]) -> None:
    whole = run(nvme / "whole", range(5), **settings)[0]
    found = [run(nvme / "parts", range(b, e), "resume" if b else "refuse", **settings)[0] for b, e in ((0, 3), (3, 5))]
    assert found[0] + found[1] == whole


@pytest.mark.parametrize("stage", [full(1), 3])
def test_a_resume_on_two_ranks(stage: int, tmp_path: Path, pool: RankPool) -> None:
    pool.succeed(resumed_on_ranks, tmp_path, {"stage": stage, "params": "nvme", "optimizer": "nvme"})


def params_found(rank: int, world_size: int, nvme: Path | list[Path], settings: dict[str, Any]) -> dict[str, Tensor]:
    """Of a resume, and of the one after it."""
    found = []
    for _ in range(2):
        model = build(TinyLM)
        for module in (model.embedding, model.blocks):
            module.requires_grad_(False)
        zo.offload(model, zo.OffloadConfig(precision="fp32", nvme=nvme, existing="resume", **settings))
        optimizer = grown(model)
        resumed = zo.resume(model, optimizer)
        assert resumed is not None and resumed.step == 3
        found.append(read_params(model))
        zo.close(model)
    assert all(torch.equal(found[1][name], values) for name, values in found[0].items())
    return found[0]


def test_a_generation_is_cut_anew_when_it_is_whole(tmp_path: Path, pool: RankPool) -> None:
    nvme = tmp_path / "nvme"
    expected = run(nvme, range(3))[1]
    (tmp_path / "other").mkdir()
    cuts: list[Callable[[], dict[str, Tensor]]] = [
        lambda: pool.succeed(params_found, nvme, {"stage": 3, "params": "nvme"})[1],
        lambda: params_found(0, 1, nvme, {}),
        lambda: params_found(0, 1, [nvme, tmp_path / "other"], {"optimizer": "nvme"}),
    ]
    for cut in cuts:
        assert all(map(torch.equal, cut().values(), expected))
    assert main(["verify", str(nvme)]) == 0


def test_a_generation_that_is_not_whole_yet_stays_as_it_is(tmp_path: Path) -> None:
    run(tmp_path, range(3), optimizer="nvme")
    files = {path.name: path.read_bytes() for path in tmp_path.iterdir() if path.suffix == ".json"}
    model = build(TinyLM)
    for module in (model.embedding, model.blocks):
        module.requires_grad_(False)
    config = zo.OffloadConfig(precision="fp32", nvme=[tmp_path, tmp_path / "other"], existing="resume")
    zo.offload(model, config)
    optimizer = zo.AdamW(model.norm.parameters())
    assert model(tokens_of(0)).item() > 0
    model(tokens_of(0)).backward()
    words = r"generation 3 \(step 3, .*\) has 9 further parameters \(blocks\.0\.up\.scale, .* and 6 more\)"
    for call, use in {
        "zo.resume": lambda: zo.resume(model, optimizer),
        r"step\(\)": optimizer.step,
        "zo.commit": lambda: zo.commit(model, optimizer),
        "zo.save_checkpoint": lambda: zo.save_checkpoint(model, optimizer, tmp_path / "saved"),
    }.items():
        with pytest.raises(zo.ConfigError, match=f"^{call}: {words}"):
            use()
    adapt(model, "down")
    with pytest.raises(zo.CheckpointError, match=r"'blocks\.0\.up\.scale'.*'blocks\.0\.down\.scale'.*in 2 calls"):
        zo.offload(model)
    zo.close(model)
    assert all((tmp_path / name).read_bytes() == content for name, content in files.items() if name != "run.json")
    once = build(TinyLM)
    adapt(once, "up")
    with pytest.raises(zo.CheckpointError, match=r"in 2 calls: zo\.offload with the first 21 parameters, then"):
        zo.offload(once, zo.OffloadConfig(precision="fp32", nvme=tmp_path, existing="resume"))


def test_a_checkpoint_loads_where_the_same_calls_were_made(tmp_path: Path) -> None:
    models = []
    for settings in ({}, {"params": "nvme", "optimizer": "nvme", "nvme": tmp_path / "nvme"}):
        model = zo.offload(build(TinyLM).requires_grad_(False), zo.OffloadConfig(precision="bf16", **settings))
        models.append((model, grown(model)))
    (model, optimizer), (other, its_optimizer) = models
    one_step(model, optimizer, 0)
    zo.save_checkpoint(model, optimizer, tmp_path / "saved", extra=3)
    assert zo.load_checkpoint(other, its_optimizer, tmp_path / "saved").extra == 3
    assert one_step(model, optimizer, 1)[:2] == one_step(other, its_optimizer, 1)[:2]
    zo.close(other)


# Refused


def test_what_cannot_be_adopted(tmp_path: Path) -> None:
    config = zo.OffloadConfig(nvme=tmp_path / "nvme")
    model, other = zo.offload(build(TinyLM), config), zo.offload(build(TinyLM), zo.OffloadConfig())
    model.norm = nn.Sequential(nn.LayerNorm(32))
    refused: dict[str, Callable[[], Any]] = {
        r"with nvme=.*, not \(\)": lambda: zo.offload(model, zo.OffloadConfig()),
        r"takes an OffloadConfig": lambda: zo.offload(model, "cpu"),  # type: ignore[arg-type]
        r"apart \(0\.embedding\.weight, .* of this ModuleList belong to an offloaded TinyLM \(": lambda: zo.offload(
            nn.ModuleList([model, other, nn.Linear(2, 2)])
        ),
        r"offloaded already and has no new parameter": lambda: zo.offload(other),
        r"norm\.0\.weight is torch\.float64|float64": lambda: zo.offload(model),
    }
    model.norm.double()
    for words, call in refused.items():
        with pytest.raises(zo.ConfigError, match=words):
            call()
    model.norm.float()
    with zo.gathered(model.head), pytest.raises(zo.ZeroOffloadError, match="adopts parameters between steps"):
        zo.offload(model)
    zo.offload(model, zo.OffloadConfig(nvme=tmp_path / "nvme"))
    optimizer = zo.AdamW(model.parameters())
    one_step(model, optimizer, 0)
    zo.close(model)
    model.late = nn.Linear(2, 2)
    with pytest.raises(zo.ConfigError, match="was closed by zo.close"):
        zo.offload(model)


def test_a_model_that_shares_a_block_with_another_is_told_which() -> None:
    model = zo.offload(build(TinyLM), zo.OffloadConfig())
    other = nn.ModuleDict({"trunk": model.blocks[0], "norm": nn.LayerNorm(32)})
    whose = r"[^\n]*\ntrunk\.norm\.weight, .*\.\.\. of this ModuleDict belong to an offloaded TinyLM \(the one with "
    for config, what in (
        (zo.OffloadConfig(precision="fp32"), "with precision="),
        (None, r"norm\.weight and norm\.weight of an offloaded model are both called norm\.weight now"),
    ):
        with pytest.raises(zo.ConfigError, match=what + whose):
            zo.offload(other, config)


@pytest.mark.parametrize(
    ("place", "name", "nth"),
    [
        (ShardStore, "write_components", 4),
        (OFFLOAD, "register", 2),
        (OFFLOAD, "install_hooks", 1),
        (OFFLOAD, "install_walk_hooks", 1),
        (OFFLOAD, "_hook", 2),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_an_error_on_the_way_undoes_an_adoption(
    place: Any, name: str, nth: int, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The adapters are plain again, the model trains on, and the next call adopts them."""
    model, plain = build(make), build(make)
    zo.offload(model, zo.OffloadConfig(precision="fp32", **settings))
    optimizers = [zo.AdamW(each.parameters(), lr=1e-2) for each in (model, plain)]
    adapters = [adapt(each, "up") for each in (model, plain)]
    num_hooks = len(hooks_of(model))
    given = nn.Sequential(model)  # around the model: it gets hooks of its own, last
    fail_at(monkeypatch, place, name, nth, zo.StorageError("injected"))
    with pytest.raises(zo.StorageError, match="injected"):
        zo.offload(given)
    monkeypatch.undo()
    assert len(hooks_of(model)) == num_hooks and hooks_of(given) == hooks_of(model)
    assert all(owner_of(param) is None for param in adapters[0])
    assert all(map(torch.equal, *adapters))
    for (mine, theirs), is_adopted in zip([(model, plain)] * 2, (False, True), strict=True):
        if is_adopted:
            zo.offload(given)
            for optimizer, params in zip(optimizers, adapters, strict=True):
                optimizer.add_param_group({"params": params})
        losses = [
            next(train(m, o, tokens_of, lambda _: None, range(1)))
            for m, o in zip((mine, theirs), optimizers, strict=True)
        ]
        assert losses[0] == losses[1]
        plain.zero_grad()
        model.zero_grad()
    assert all(map(torch.equal, read_params(model).values(), (param.detach() for param in plain.parameters())))


def test_what_does_not_fit_is_refused_before_anything_moves(nvme: Path) -> None:
    model = zo.offload(build(TinyLM), zo.OffloadConfig(nvme=nvme, optimizer="nvme", nvme_capacity="8MiB"))
    model.large = nn.Linear(1024, 2048)
    with pytest.raises(CapacityError, match=r"the new parameters do not fit beside the model\n.*nvme tier"):
        zo.offload(model)
    assert owner_of(model.large.weight) is None
    model.large = nn.Linear(2, 2)
    zo.offload(model)
    zo.close(model)
