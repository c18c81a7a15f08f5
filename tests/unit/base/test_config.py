from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from zero_offload.base.config import OffloadConfig, Precision
from zero_offload.base.errors import ConfigError
from zero_offload.base.types import GIB, Durability, StateKind, Tier


def problems_of(**settings: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        OffloadConfig(**settings)
    return str(caught.value)


def test_defaults_are_those_of_the_contract() -> None:
    config = OffloadConfig()
    assert config.stage == 3
    assert {kind: config.placement_of(kind) for kind in StateKind} == {
        StateKind.PARAMS: {Tier.CPU: 1.0},
        StateKind.GRADS: {Tier.CPU: 1.0},
        StateKind.OPTIMIZER: {Tier.CPU: 1.0},
        StateKind.ACTIVATIONS: {Tier.DEVICE: 1.0},
    }
    assert (config.existing, config.durability, config.commit_every) == ("refuse", "process", 1)
    assert config.numerics == Precision(compute="bf16", reduce="fp32", states="fp32")
    assert config.compute_dtype_name == "bfloat16"
    assert [config.budget_bytes(tier) for tier in Tier] == [None, None, None]


def test_settings_are_normalized() -> None:
    config = OffloadConfig(
        params=Tier.NVME, optimizer={"cpu": 0.25, "nvme": 0.75, "device": 0}, nvme="~/run", cpu_memory="48GiB"
    )
    assert config.nvme_dirs == (Path("~/run").expanduser(),)
    assert config.budget_bytes(Tier.CPU) == 48 * GIB
    assert config.placement_of(StateKind.OPTIMIZER) == {Tier.CPU: 0.25, Tier.NVME: 0.75}
    assert str(config) == str(replace(config, optimizer={"nvme": 0.75, "cpu": 0.25}))
    assert config == OffloadConfig(
        params="nvme",
        optimizer={Tier.NVME: 0.75, Tier.CPU: 0.25},
        nvme=[Path("~/run").expanduser()],
        cpu_memory=48 * GIB,
    )


def test_a_callers_dict_is_copied() -> None:
    fractions = {"cpu": 0.5, "nvme": 0.5}
    config = OffloadConfig(optimizer=fractions, nvme="x")
    fractions["cpu"] = 9.0
    assert config.placement_of(StateKind.OPTIMIZER) == {Tier.CPU: 0.5, Tier.NVME: 0.5}


def test_auto_is_left_to_the_planner() -> None:
    assert OffloadConfig(params="auto").placement_of(StateKind.PARAMS) == "auto"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"stage": 4}, "stage=4 does not exist; use 0, 1, 2 or 3"),
        ({"stage": True}, "stage=True is not an integer"),
        ({"stage": "3"}, "stage='3' is not an integer"),
        ({"params": "gpu"}, "params='gpu' is unknown"),
        ({"params": 3}, "params=3 is neither"),
        ({"grads": {"cpu": 0.5}}, "sums to 0.5"),
        ({"grads": {}}, "sums to 0"),
        ({"grads": {"cpu": 1.5, "device": -0.5}}, "outside 0 to 1"),
        ({"grads": {"cpu": float("nan")}}, "outside 0 to 1"),
        ({"grads": {"cpu": True}}, "outside 0 to 1"),
        ({"grads": {"disk": 1.0}}, "unknown tier 'disk'"),
        ({"optimizer": "nvme"}, "optimizer='nvme' needs a directory; add nvme="),
        ({"optimizer": {"cpu": 0.5, "nvme": 0.5}}, "needs a directory"),
        ({"nvme_capacity": "1GiB"}, "limits no directory"),
        ({"existing": "resume"}, "existing='resume' goes on from no directory"),
        ({"durability": "commit", "commit_every": 10}, "durability='commit' has no directory to commit to"),
        ({"nvme": 7}, "nvme=7 is neither"),
        ({"nvme": ""}, "empty path"),
        ({"nvme": ["a", "a"]}, "names a directory twice"),
        ({"activations": "gpu"}, "activations='gpu' is unknown"),
        ({"activations": {"cpu": 0.5, "nvme": 0.5}}, "needs a directory"),
        ({"precision": "int8"}, "precision 'int8' is unknown; use 'bf16', 'fp16' or 'fp32'"),
        ({"precision": 16}, "precision=16 is not a precision"),
        ({"precision": Precision(reduce="fp8")}, "Precision(reduce='fp8') is unknown; use 'fp32', 'bf16' or 'fp16'"),
        ({"precision": Precision(modules=["norm"])}, "Precision(modules=['norm']) does not map patterns"),
        ({"precision": Precision(modules={"*.norm": "fp64"})}, "has 'fp64' for '*.norm', no compute dtype"),
        ({"precision": Precision(modules={3: "fp32"})}, "Precision(modules={3: 'fp32'}) does not map patterns"),
        ({"grad_reduction": "max"}, "grad_reduction='max' is unknown; use one of mean, sum"),
        ({"io_engine": "libaio"}, "io_engine='libaio' is unknown; use one of auto, io_uring, threads, aiofiles"),
        ({"branches": "some"}, "branches='some' is unknown; use one of same, any"),
        (
            {"precision": Precision(states="int8")},
            "Precision(states='int8') is unknown; use 'fp32', 'bf16' or 'compact'",
        ),
        ({"precision": Precision(states=["x"])}, "Precision(states=['x']) is unknown"),  # type: ignore[arg-type]
        ({"optimiser": "cpu"}, "unknown setting optimiser: did you mean optimizer?"),
        ({"cpu_memory": 0}, "cpu_memory=0: a size is positive"),
        ({"cpu_memory": -5}, "a size is positive"),
        ({"device_memory": "much"}, "cannot read 'much' as a size"),
        ({"existing": "keep"}, "existing='keep' is unknown; use one of refuse, resume, discard"),
        ({"durability": "none"}, "durability='none' is unknown"),
        (
            {"overlap": "backward", "precision": "fp16"},
            "overlap='backward' updates before an overflow of fp16 gradients",
        ),
        (
            {"overlap": "backward", "precision": Precision(modules={"*.up": "fp16"})},
            "is known; use overlap='forward', or 'bf16'",
        ),
        (
            {"overlap": "backward", "branches": "any"},
            "overlap='backward' updates before ranks with branches='any' know",
        ),
        ({"overlap": "both"}, "overlap='both' is unknown"),
        *(
            ({"commit_every": value}, f"commit_every={value!r} is neither a number of optimizer steps nor a duration")
            for value in (0, 1.5, True, "", "often", "10", "0s", "-2min", "2 minutes 30", "3 days", "1e3s", None)
        ),
        *(
            ({"publish_every": value}, f"publish_every={value!r} is neither a number of optimizer steps nor a duration")
            for value in (0, True, "auto", "10", None)
        ),
        ({"publish_keep": 0}, "publish_keep=0 is not a number of checkpoints; keep 1 or more"),
        ({"publish": 7, "nvme": "x"}, "publish=7 is neither a directory nor a URL"),
        ({"publish": "", "nvme": "x"}, "publish='' is neither a directory nor a URL"),
        ({"publish": "s3://out"}, "publish='s3://out' publishes generations, and there are none without nvme="),
        (
            {"publish": "out", "nvme": "x", "durability": "scratch"},
            "there are none without nvme= or with durability='scr",
        ),
        ({"commit_every": "5"}, "Give steps (1 or more), a duration such as '30s', '2min' or '1h', or 'auto'"),
    ],
)
def test_each_wrong_setting_is_named(settings: dict[str, Any], words: str) -> None:
    message = problems_of(**settings)
    assert words in message
    assert "has 1 problem:" in message


def test_all_problems_are_listed_at_once() -> None:
    message = problems_of(stage=5, optimizer="nvme", precision="fp8", commit_every=0, cpu_memory="x")
    assert message.startswith("OffloadConfig has 5 problems:")
    assert message.count("\n  - ") == 5


def test_wrong_names_are_listed_with_wrong_values() -> None:
    message = problems_of(optimiser="cpu", stage=5)
    assert message.startswith("OffloadConfig has 2 problems:") and "stage=5" in message
    with pytest.raises(ConfigError, match=r"by name, such as OffloadConfig\(params='cpu'\)"):
        OffloadConfig("cpu")  # type: ignore[misc]
    with pytest.raises(ConfigError, match="takes a dict of settings, not a NoneType"):
        OffloadConfig.from_dict(None)  # type: ignore[arg-type]
    assert copy.deepcopy(OffloadConfig(stage=2)) == replace(OffloadConfig(), stage=2)


def test_durability_needs_a_directory() -> None:
    assert OffloadConfig().effective_durability is Durability.SCRATCH
    assert OffloadConfig(durability="commit", nvme="x").effective_durability is Durability.COMMIT
    message = problems_of(existing="resume", durability="commit", generation=7)
    assert message.count("\n  - ") == 3 and message.count("add nvme=") == 2


@pytest.mark.parametrize(
    "config",
    [
        OffloadConfig(),
        OffloadConfig(nvme=["a", "b"], optimizer={"cpu": 0.5, "nvme": 0.5}, precision="fp32", stage=0),
        OffloadConfig(params="auto", device_memory="1GiB", overlap="backward", commit_every=7),
        OffloadConfig(commit_every="auto"),
        OffloadConfig(commit_every="1.5h"),
        OffloadConfig(nvme="x", publish=Path("out"), publish_every="2 h", publish_keep=1),
        OffloadConfig(precision=Precision(modules={"*.norm": "fp32", "head": "bf16"})),
    ],
)
def test_round_trips(config: OffloadConfig) -> None:
    assert OffloadConfig.from_dict(config.to_dict()) == config
    assert pickle.loads(pickle.dumps(config)) == config


def test_plain_values_name_no_classes() -> None:
    config = OffloadConfig(precision=Precision(modules={Path: "fp32", "norm": "fp32"}))
    assert pickle.loads(pickle.dumps(config)) == config
    with pytest.raises(ConfigError, match=r"precision.modules has Path; .* use patterns of names"):
        config.to_dict()
    with pytest.raises(ConfigError, match=r"precision.modules has Path"):
        OffloadConfig.from_dict({"precision": {"modules": {Path: "fp32"}}})


def test_a_callers_modules_are_copied() -> None:
    modules: dict[Any, str] = {"*.norm": "fp32"}
    config = OffloadConfig(precision=Precision(modules=modules))
    modules["*"] = "fp64"
    assert config.compute_exceptions == {"*.norm": "float32"}


def test_from_dict_offers_the_nearest_name_and_checks_the_rest() -> None:
    with pytest.raises(ConfigError) as caught:
        OffloadConfig.from_dict({"optimiser": "cpu", "zzz": 1, "stage": 7, "precision": {"kompute": "bf16"}})
    message = str(caught.value)
    assert "unknown setting optimiser: did you mean optimizer?" in message
    assert "unknown setting zzz: the settings are stage, params" in message
    assert "unknown setting precision.kompute: did you mean precision.compute?" in message
    assert "stage=7 does not exist" in message


def test_from_toml(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(
        '[offload]\noptimizer = {cpu = 0.5, nvme = 0.5}\nnvme = "/mnt/x"\n'
        '[offload.precision]\ncompute = "bf16"\nmodules = {"*.router" = "fp32"}\n'
    )
    precision = Precision(modules={"*.router": "fp32"})
    expected = OffloadConfig(optimizer={"cpu": 0.5, "nvme": 0.5}, nvme="/mnt/x", precision=precision)
    assert OffloadConfig.from_toml(file) == expected


@pytest.mark.parametrize(
    ("text", "words"),
    [("[offload\n", "not valid TOML"), ("[train]\n", "no table [offload]"), (None, "cannot read")],
)
def test_from_toml_names_what_is_wrong(tmp_path: Path, text: str | None, words: str) -> None:
    file = tmp_path / "run.toml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(ConfigError, match=words.replace("[", r"\[")):
        OffloadConfig.from_toml(file)


def test_a_generation_is_a_number_and_is_resumed() -> None:
    assert OffloadConfig(nvme="/a", existing="resume", generation=7).generation == 7
    for value in (0, -1, True, 1.0, "7"):
        with pytest.raises(ConfigError, match=f"generation={value!r} is not a number"):
            OffloadConfig(nvme="/a", existing="resume", generation=value)  # type: ignore[arg-type]
    for existing in ("refuse", "discard"):
        with pytest.raises(ConfigError, match="generation=7.*add existing='resume'"):
            OffloadConfig(nvme="/a", existing=existing, generation=7)
    for settings in ({}, {"nvme": "/a", "durability": "scratch"}):
        with pytest.raises(ConfigError, match="generation=7 .* nothing is kept"):
            OffloadConfig(existing="resume", generation=7, **settings)  # type: ignore[arg-type]
