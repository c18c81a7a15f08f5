"""Ranks that differ in a setting all raise one error that names it; or the setting may differ, and no bit does.

Each field of `OffloadConfig` is in one of the two tables here, and each hyperparameter of each optimizer is changed on
one rank.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero_offload as zo
from tests.helpers.experts import experts_lm
from tests.helpers.models import TinyLM, build, tokens_of
from tests.helpers.ranks import RankPool, RankPools, read_params
from zero_offload.base.alike import OWN
from zero_offload.model.api import runtime_of

Settings = dict[str, Any]

DIFFER: dict[str, tuple[Settings, Settings, str]] = {
    "stage": ({"stage": 2}, {"stage": 3}, "stage is 2 on rank 0 and 3 on rank 1"),
    "stage that divides nothing": ({"stage": 0}, {"stage": 1}, "stage is 0 on rank 0 and 1 on rank 1"),
    "params": ({"params": "cpu"}, {"params": "device"}, "params is 'cpu' on rank 0 and 'device' on rank 1"),
    "grads": ({"grads": {"cpu": 0.5, "device": 0.5}}, {}, "grads is {'device': 0.5, 'cpu': 0.5} on rank 0 and 'cpu'"),
    "optimizer": ({"optimizer": "auto"}, {}, "optimizer is 'auto' on rank 0 and 'cpu' on rank 1"),
    "activations": ({"activations": "cpu"}, {}, "activations is 'cpu' on rank 0 and 'device' on rank 1"),
    "nvme": ({"nvme": "DIR", "existing": "discard"}, {}, "directories in nvme is 1 on rank 0 and 0 on rank 1"),
    "precision": ({"precision": "fp32"}, {}, "precision.compute is 'fp32' on rank 0 and 'bf16' on rank 1"),
    "reduce": ({"precision": zo.Precision(reduce="bf16")}, {}, "precision.reduce is 'bf16' on rank 0 and 'fp32'"),
    "states": ({"precision": zo.Precision(states="compact")}, {}, "precision.states is 'compact' on rank 0 and 'fp32'"),
    "modules": (
        {"precision": zo.Precision(modules={nn.LayerNorm: "fp32"})},
        {"precision": zo.Precision(modules={"*norm*": "fp32"})},
        "precision.modules is {'torch.nn.modules.normalization.LayerNorm': 'fp32'} on rank 0 and {'*norm*': 'fp32'}",
    ),
    "buffers": (
        {"precision": zo.Precision(buffers={"mean": "fp32"})},
        {},
        "precision.buffers is {'mean': 'fp32'} on rank 0 and {} on rank 1",
    ),
    "order of modules": (
        {"precision": zo.Precision(modules={"blocks.*": "fp32", "*.up": "bf16"})},
        {"precision": zo.Precision(modules={"*.up": "bf16", "blocks.*": "fp32"})},
        "precision.modules is {'blocks.*': 'fp32', '*.up': 'bf16'} on rank 0 and {'*.up': 'bf16', ",
    ),
    "durability": ({"durability": "scratch"}, {}, "durability is 'scratch' on rank 0 and 'process' on rank 1"),
    "commit_every": ({"commit_every": 2}, {"commit_every": "30s"}, "commit_every is 2 on rank 0 and '30s' on rank 1"),
    "publish": ({"publish": "one", "nvme": "DIR"}, {"nvme": "DIR"}, "publish is 'one' on rank 0 and None on rank 1"),
    "publish_every": ({"publish_every": 5}, {}, "publish_every is 5 on rank 0 and '30min' on rank 1"),
    "publish_keep": ({"publish_keep": 1}, {}, "publish_keep is 1 on rank 0 and 2 on rank 1"),
    "overlap": ({"overlap": "backward"}, {}, "overlap is 'backward' on rank 0 and 'auto' on rank 1"),
    "grad_reduction": ({"grad_reduction": "sum"}, {}, "grad_reduction is 'sum' on rank 0 and 'mean' on rank 1"),
    "branches": ({"branches": "any"}, {}, "branches is 'any' on rank 0 and 'same' on rank 1"),
    "several": ({"stage": 1, "overlap": "none"}, {}, "stage is 1 on rank 0 and 3 on rank 1; overlap is 'none' on rank"),
}

MAY_DIFFER: dict[str, tuple[Settings, Settings]] = {
    "nvme": ({"nvme": "DIR", "params": "nvme"}, {"nvme": "LINK", "params": "nvme"}),
    "existing": ({"nvme": "DIR", "existing": "resume"}, {"nvme": "DIR", "existing": "discard"}),
    "generation": (
        {"nvme": "DIR", "existing": "resume", "generation": None},
        {"nvme": "DIR", "existing": "resume", "generation": 3},
    ),
    "device_memory": ({"params": "auto", "device_memory": "3MiB"}, {"params": "auto"}),
    "cpu_memory": (
        {"nvme": "DIR", "params": "auto", "optimizer": "auto"},
        {"nvme": "DIR", "params": "auto", "optimizer": "auto", "cpu_memory": "60MiB"},
    ),
    "nvme_capacity": (
        {"nvme": "DIR", "optimizer": "nvme"},
        {"nvme": "DIR", "optimizer": "nvme", "nvme_capacity": "1GiB"},
    ),
    "io_engine": (
        {"nvme": "DIR", "params": "nvme", "optimizer": "nvme", "io_engine": "threads"},
        {"nvme": "DIR", "params": "nvme", "optimizer": "nvme", "io_engine": "aiofiles"},
    ),
}
"""With generation 3 in the directory, where it is resumed."""


def test_each_field_is_compared_or_may_differ() -> None:
    fields = {field.name for field in dataclasses.fields(zo.OffloadConfig)}
    assert set(OWN) == set(MAY_DIFFER)
    assert fields <= set(DIFFER) | set(MAY_DIFFER)
    assert {f"precision.{field.name}" for field in dataclasses.fields(zo.Precision)} == {
        text.split(" is ")[0] for _, _, text in DIFFER.values() if text.startswith("precision.")
    }


def config_of(settings: Settings, folder: str) -> zo.OffloadConfig:
    places = {"DIR": f"{folder}/run", "LINK": f"{folder}/link/run"}
    return zo.OffloadConfig(**{name: places.get(str(value), value) for name, value in settings.items()})


def with_mean() -> nn.Module:
    model = TinyLM()
    model.register_buffer("mean", torch.zeros(2))
    return model


def error_of(call: Callable[[], object]) -> str:
    try:
        call()
    except (zo.ConfigError, zo.ZeroOffloadError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def offload_each(rank: int, world_size: int, folder: str) -> dict[str, str]:
    found = {}
    for name, values in DIFFER.items():
        config = config_of(values[rank], folder)
        found[name] = error_of(lambda config=config: zo.offload(build(with_mean), config))  # type: ignore[misc]
    return found


def test_settings_that_differ(pool: RankPool, tmp_path: Path) -> None:
    pool.renew()
    first, second = pool.succeed(offload_each, str(tmp_path))
    pool.renew()  # each call has made groups of ranks
    assert first == second
    for name, (_, _, says) in DIFFER.items():
        assert first[name].startswith("ConfigError: zo.offload") and says in first[name], first[name]


def train_with(rank: int, world_size: int, settings: tuple[Settings, Settings], folder: str) -> dict[str, Tensor]:
    """Some steps, with an evaluation in between, in which each rank would evict and gather by its own budget."""
    model = build(lambda: TinyLM(128, 6))
    zo.offload(model, config_of(settings[rank], folder))
    optimizer = zo.AdamW(model.parameters(), lr=1e-2)
    zo.resume(model, optimizer)
    for step in range(3):
        model(tokens_of(2 * step + rank)).backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            model(tokens_of(step))
    found = read_params(model)
    zo.close(model)
    return found


@pytest.mark.parametrize("field", MAY_DIFFER)
def test_a_setting_that_may_differ_changes_no_bit(field: str, pool: RankPool, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    (tmp_path / "run").mkdir()
    if field == "generation":
        resumed = MAY_DIFFER[field][0]
        pool.succeed(train_with, (resumed,) * 2, str(tmp_path))
        shutil.copytree(tmp_path / "run", tmp_path / "copy")
        plain = pool.succeed(train_with, (resumed,) * 2, str(tmp_path))
        shutil.rmtree(tmp_path / "run")
        (tmp_path / "copy").rename(tmp_path / "run")
    else:
        plain = _plain(pool)
    other = pool.succeed(train_with, MAY_DIFFER[field], str(tmp_path))
    for each in (*plain, *other):
        assert all(torch.equal(each[name], value) for name, value in plain[0].items())


def _plain(pool: RankPool, known: list[list[dict[str, Tensor]]] = []) -> list[dict[str, Tensor]]:  # noqa: B006
    """Of ranks that are alike; trained once."""
    if not known:
        known.append(pool.succeed(train_with, ({}, {}), ""))
    return known[0]


def test_a_generation_that_ranks_disagree_on(pool: RankPool, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    pool.succeed(train_with, ({"nvme": "DIR"},) * 2, str(tmp_path))
    differ = {"nvme": "DIR", "existing": "resume"}, {"nvme": "DIR", "existing": "discard"}
    first, second = pool.call(train_with, differ, str(tmp_path))
    assert "rank 1 (existing='discard') goes on from no generation, rank 0 from generation 3" in second.message
    assert second.message in first.message


# Of a step


class Run:
    """A model on each rank, after a backward of its rows."""

    def __init__(self, rank: int, make: Callable[..., torch.optim.Optimizer] = zo.AdamW, **settings: Any) -> None:
        self.odd = rank == 1
        self.model: Any = build(TinyLM)
        zo.offload(self.model, zo.OffloadConfig(**{"precision": "fp32", **settings}))
        self.optimizer = make(self.model.parameters())
        self.rows = tokens_of(rank)
        self.backward()

    def backward(self) -> None:
        self.model(self.rows).backward()

    def clip(self, max_norm: float = 1.0, **options: Any) -> None:
        zo.clip_grad_norm_(self.model, max_norm, **options)


OPTIMIZERS = (zo.AdamW, zo.Adam, zo.Adagrad, zo.SGD, zo.Lion)
WITHOUT_EFFECT = ("foreach", "fused", "capturable", "differentiable")


def change(value: Any) -> Any:
    if isinstance(value, tuple):
        return (value[0] - 0.125, *value[1:])
    return not value if isinstance(value, bool) else value + 0.125


def change_numbers(rank: int, world_size: int) -> dict[str, tuple[str, str]]:
    """Per optimizer and hyperparameter: the error where rank 1 has another one, and what it is to say."""
    found = {}
    for stage, kind in enumerate(OPTIMIZERS):
        options = {"momentum": 0.5} if kind is zo.SGD else {}
        run = Run(rank, lambda params, kind=kind, options=options: kind(params, **options), stage=stage % 4)  # type: ignore[misc]
        group = run.optimizer.param_groups[0]
        for name, value in run.optimizer.defaults.items():
            if name in WITHOUT_EFFECT:
                continue
            group[name] = change(value) if run.odd else value
            error, values = error_of(run.optimizer.step), f"{value!r} on rank 0 and {change(value)!r} on rank 1. "
            found[f"{kind.__name__}.{name}"] = (
                error,
                f"{kind.__name__}.step: ranks differ: {name} of group 0 is {values}",
            )
            group[name] = value
        before = runtime_of(run.model).step_count  # type: ignore[union-attr]
        run.optimizer.step()
        assert (before, runtime_of(run.model).step_count) == (0, 1)  # type: ignore[union-attr]
        zo.close(run.model)
    return found


def test_hyperparameters_that_differ(pool: RankPool) -> None:
    first, second = pool.succeed(change_numbers)
    assert first == second and len(first) == 28
    assert not [error for error, says in first.values() if not error.startswith(f"ConfigError: {says}")]


def other_class(run: Run) -> None:
    (zo.SGD if run.odd else zo.AdamW)(run.model.parameters()).step()


def other_number_of_groups(run: Run) -> None:
    params = list(run.model.parameters())
    zo.AdamW([{"params": params[:2]}, {"params": params[2:]}] if run.odd else params).step()


def other_groups(run: Run) -> None:
    params = list(run.model.parameters())
    cut = 3 if run.odd else 2
    zo.AdamW([{"params": params[:cut]}, {"params": params[cut:]}]).step()


def other_order(run: Run) -> None:
    params = list(run.model.parameters())
    zo.AdamW(params[::-1] if run.odd else params).step()


def other_norm(run: Run) -> None:
    run.clip(0.5 if run.odd else 1.0)


def other_end_of_a_clip(run: Run) -> None:
    run.clip(error_if_nonfinite=run.odd)


def other_part_is_clipped(run: Run) -> None:
    zo.clip_grad_norm_(run.model.blocks if run.odd else run.model, 1.0)


def other_value(run: Run) -> None:
    zo.clip_grad_value_(run.model, 0.5 if run.odd else 1.0)


def no_clip(run: Run) -> None:
    if not run.odd:
        run.clip()
    run.optimizer.step()


def other_scale(run: Run) -> None:
    zo.GradScaler(init_scale=4.0 if run.odd else 2.0).step(run.optimizer)


def other_growth(run: Run) -> None:
    zo.GradScaler(init_scale=1.0, growth_interval=1 + run.odd).step(run.optimizer)


def zero_grad_alone(run: Run) -> None:
    if run.odd:
        run.optimizer.zero_grad()
    run.optimizer.step()


def no_sync_alone(run: Run) -> None:
    if run.odd:
        with zo.no_sync(run.model):
            run.backward()
    else:
        run.backward()
    run.optimizer.step()


def other_micro_batches(run: Run) -> None:
    run.optimizer.step()
    zo.accumulate(run.model, [run.rows] * (2 + run.odd), lambda model, rows: model(rows))
    run.optimizer.step()


def accumulated_alone(run: Run) -> None:
    run.optimizer.step()
    if run.odd:
        zo.accumulate(run.model, [run.rows] * 2, lambda model, rows: model(rows))
    else:
        run.backward()


def other_weights(run: Run) -> None:
    run.optimizer.step()
    run.model.load_state_dict({name: torch.full_like(param, 1.0 + run.odd) for name, param in weights(run)})
    run.backward()


def weights_alone(run: Run) -> None:
    run.optimizer.step()
    if run.odd:
        run.model.load_state_dict({name: torch.zeros_like(param) for name, param in weights(run)})
    run.optimizer.step()


def weights(run: Run) -> list[tuple[str, Tensor]]:
    return [(name, torch.empty(param.shape)) for name, param in run.model.named_parameters(remove_duplicate=False)]


def other_export(run: Run) -> None:
    zo.export_pretrained(run.model, "nowhere", dtype="bf16" if run.odd else None)


CALLS: list[tuple[Callable[[Run], None], str]] = [
    (other_class, "the optimizer is AdamW on rank 0 and SGD on rank 1"),
    (other_number_of_groups, "the number of param groups is 1 on rank 0 and 2 on rank 1"),
    (other_groups, "params of group 0 is 2 ("),
    (other_order, "params of group 0 is "),
    (other_norm, "zo.clip_grad_norm_: ranks differ: max_norm is 1.0 on rank 0 and 0.5 on rank 1"),
    (other_end_of_a_clip, "error_if_nonfinite is False on rank 0 and True on rank 1"),
    (other_part_is_clipped, "what is clipped is "),
    (other_value, "zo.clip_grad_value_: ranks differ: clip_value is 1.0 on rank 0 and 0.5 on rank 1"),
    (no_clip, "rank 0 is at zo.clip_grad_norm_, rank 1 at AdamW.step. "),
    (other_scale, "scale of the loss scale is 2.0 on rank 0 and 4.0 on rank 1"),
    (other_growth, "growth_interval of the loss scale is 1 on rank 0 and 2 on rank 1"),
    (zero_grad_alone, "AdamW.step with gradients changed by .grad"),
    (no_sync_alone, "rank 0 is at the reduction of gradients of "),
    (other_micro_batches, "the number of micro-batches of zo.accumulate is 2 on rank 0 and 3 on rank 1"),
    (accumulated_alone, "the number of micro-batches of zo.accumulate is not given on rank 0 and 2 on rank 1"),
    (other_weights, "ranks differ: what was written to norm.weight and 20 other parameters is '"),
    (
        weights_alone,
        "differ: what was written to norm.weight and 20 other parameters is not given on rank 0 and '",
    ),
    (other_export, "dtype is None on rank 0 and 'bf16' on rank 1"),
]


def call_otherwise(rank: int, world_size: int, calls: list[Callable[[Run], None]]) -> dict[str, str]:
    found = {}
    for call in calls:
        run = Run(rank, stage={no_sync_alone: 2, weights_alone: 0}.get(call, 3))
        found[call.__name__] = error_of(lambda run=run, call=call: call(run))  # type: ignore[misc]
        zo.close(run.model)
    return found


def test_calls_that_differ(pool: RankPool) -> None:
    first, second = pool.succeed(call_otherwise, [call for call, _ in CALLS])
    pool.renew()
    assert first == second
    for call, says in CALLS:
        assert says in first[call.__name__], first[call.__name__]


def test_more_ranks_are_grouped_by_what_they_have(pools: RankPools) -> None:
    for each in pools.of(3).succeed(call_otherwise, [other_norm, no_clip]):
        assert "max_norm is 1.0 on ranks 0 and 2 and 0.5 on rank 1" in each["other_norm"]
        assert "ranks 0 and 2 are at zo.clip_grad_norm_, rank 1 at AdamW.step" in each["no_clip"]


class Words:
    """A config as transformers and peft have them."""

    sub_configs: dict[str, type] = {}

    def __init__(self, **words: Any) -> None:
        self.words = words

    def to_dict(self) -> Settings:
        return self.words


class Configured(TinyLM):
    def __init__(self, dropout: float = 0.0, alpha: int = 8, folder: str = "") -> None:
        super().__init__()
        self.config = Words(dropout=dropout, parts={"width": 4}, _name_or_path=folder)
        self.peft_config = {"default": Words(alpha=alpha, base_model_name_or_path=folder)}


BUILT: dict[str, tuple[Callable[[], nn.Module], Callable[[], nn.Module], str]] = {
    "config": (
        Configured,
        lambda: Configured(0.5),
        "differ: config.dropout is 0.0 on rank 0 and 0.5 on rank 1. ",
    ),
    "adapter": (
        lambda: Configured(folder="/a"),
        lambda: Configured(alpha=16, folder="/b"),
        "ranks differ: peft_config.default.alpha is 8 on rank 0 and 16 on rank 1. ",
    ),
    "no config": (TinyLM, Configured, "config.parts.width is not given on rank 0 and 4 on rank 1"),
    "dtype": (TinyLM, lambda: TinyLM().bfloat16(), "dtypes of parameters is ['torch.float32'] on rank 0 and ['torch.b"),
    "deferred": (TinyLM, lambda: deferred(TinyLM), "parameters of zo.deferred_init is 'none' on rank 0 and 'all' on"),
    "groups": (lambda: experts_lm(size=1), lambda: experts_lm(size=2), "experts in a group is [1] of digest "),
}
"""Models that ranks build otherwise, of the same values."""


def deferred(make: Callable[[], nn.Module]) -> nn.Module:
    with zo.deferred_init():
        return make()


def build_each(rank: int, world_size: int) -> dict[str, str]:
    config = zo.OffloadConfig()
    found = {}
    for name, makes in BUILT.items():
        found[name] = error_of(lambda makes=makes: zo.offload(build(makes[rank]), config))  # type: ignore[misc]
    model = build(TinyLM)
    units = list(model.blocks) if rank else list(model.blocks)[:-1]
    found["units"] = error_of(lambda: zo.offload(model, config, units=units))
    alike = build(lambda: Configured(folder=f"/{rank}"))
    zo.offload(alike, config)
    alike.later = nn.Linear(2, 2)
    alike.peft_config["default"].words["alpha"] += rank
    found["later"] = error_of(lambda: zo.offload(alike))
    zo.close(alike)
    return found


def test_models_that_are_built_otherwise(pool: RankPool) -> None:
    pool.renew()
    first, second = pool.succeed(build_each)
    pool.renew()
    assert first == second
    for name, (_, _, says) in BUILT.items():
        assert first[name].startswith("ConfigError: zo.offload") and says in first[name], first[name]
    assert "peft_config.default.alpha is 8 on rank 0 and 9 on rank 1" in first["later"]
    assert "units is " in first["units"] and "(small)" in first["units"]


def clip_in_another_order(rank: int, world_size: int) -> float:
    run = Run(rank)
    params = list(run.model.parameters())
    norm = zo.clip_grad_norm_(params[::-1] if run.odd else params, 1.0)
    run.optimizer.step()
    zo.close(run.model)
    return norm.item()


def test_lists_to_clip_may_be_in_any_order(pool: RankPool) -> None:
    """As those that a program makes of a set."""
    first, second = pool.succeed(clip_in_another_order)
    assert first == second


def update_in_backward(rank: int, world_size: int) -> tuple[str, bool]:
    model = build(TinyLM)
    zo.offload(model, zo.OffloadConfig(precision="fp32", overlap="backward", stage=2))
    before, optimizer = read_params(model), zo.AdamW(model.parameters(), lr=1e-3 * (1 + rank))
    error = error_of(lambda: model(tokens_of(rank)).backward())
    after = read_params(model)
    zo.close(model)
    return error, all(torch.equal(after[name], value) for name, value in before.items()) and optimizer is not None


def test_updates_in_backward_begin_alike(pool: RankPool) -> None:
    first, second = pool.succeed(update_in_backward)
    assert first == second and first[1]
    assert "ranks differ: lr of group 0 is 0.001 on rank 0 and 0.002 on rank 1" in first[0]


def load_another(rank: int, world_size: int, folder: str) -> tuple[str, str]:
    run = Run(rank)
    for name in "ab":
        run.optimizer.step()
        zo.save_checkpoint(run.model, run.optimizer, f"{folder}/{name}")
        zo.export_pretrained(run.model, f"{folder}/weights {name}")
        run.backward()
    load = error_of(lambda: zo.load_checkpoint(run.model, run.optimizer, f"{folder}/{'ab'[rank]}"))
    zo.close(run.model)
    fresh = build(TinyLM)
    zo.offload(fresh, zo.OffloadConfig(precision="fp32"))
    weights = error_of(lambda: zo.load_pretrained(fresh, f"{folder}/weights {'ab'[rank]}"))
    zo.close(fresh)
    return load, weights


def test_files_that_differ(pool: RankPool, tmp_path: Path) -> None:
    first, second = pool.succeed(load_another, str(tmp_path))
    assert first == second
    assert "zo.load_checkpoint: ranks differ: the checkpoint is 'generation 1 (step 1) of run " in first[0]
    assert f"the folder of weights is {tmp_path}/weights a (" in first[1]
