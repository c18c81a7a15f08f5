"""The settings of JSON configs of DeepSpeed. `tests/unit/base/test_config.py` has the settings themselves."""

from __future__ import annotations

import json
import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import zero_offload as zo
from zero_offload.base.config import OffloadConfig, Precision
from zero_offload.base.errors import ConfigError
from zero_offload.integrations import deepspeed

ZERO2_OFFLOAD = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 8,
    "gradient_clipping": 0.5,
    "fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 12, "loss_scale_window": 500, "hysteresis": 2},
    "zero_optimization": {
        "stage": 2,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "allgather_partitions": True,
        "allgather_bucket_size": 2e8,
        "overlap_comm": True,
        "reduce_scatter": True,
        "reduce_bucket_size": 2e8,
        "contiguous_gradients": True,
        "round_robin_gradients": True,
    },
    "optimizer": {"type": "Adam", "params": {"lr": 3e-5, "betas": [0.8, 0.999], "eps": 1e-8, "adam_w_mode": False}},
    "steps_per_print": 100,
    "tensorboard": {"enabled": True, "output_path": "logs/", "job_name": "bert"},
}
ZERO3_OFFLOAD = {
    "train_batch_size": 64,
    "gradient_clipping": 1.0,
    "bf16": {"enabled": True},
    "zero_optimization": {
        "stage": 3,
        "offload_param": {"device": "cpu", "pin_memory": True, "nvme_path": "/local_nvme"},
        "offload_optimizer": {"device": "cpu", "ratio": 0.3},
        "stage3_param_persistence_threshold": 1e4,
        "zero_hpz_partition_size": 8,
        "zero_quantized_weights": False,
    },
    "activation_checkpointing": {"partition_activations": False, "cpu_checkpointing": True},
    "data_types": {"grad_accum_dtype": "fp32"},
    "zero_allow_untested_optimizer": True,
}
INFINITY = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_clipping": 0,
    "bf16": {"enabled": True},
    "communication_data_type": "bf16",
    "zero_optimization": {
        "stage": 3,
        "offload_param": {
            "device": "nvme",
            "nvme_path": "/mnt/nvme0",
            "buffer_count": 5,
            "buffer_size": 1e8,
            "max_in_cpu": 1e9,
        },
        "offload_optimizer": {"device": "nvme", "nvme_path": "/mnt/nvme0", "pipeline_read": True, "fast_init": False},
        "sub_group_size": 1e9,
    },
    "aio": {"block_size": 1048576, "queue_depth": 8, "thread_count": 1, "single_submit": False, "overlap_events": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "weight_decay": 0.1}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 1e-4, "warmup_num_steps": 1000}},
}
HF_AUTO = {
    "fp16": {"enabled": "auto", "loss_scale": 0, "loss_scale_window": 1000, "hysteresis": 2, "min_loss_scale": 1},
    "bf16": {"enabled": "auto"},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {
            "warmup_min_lr": "auto",
            "warmup_max_lr": "auto",
            "warmup_num_steps": "auto",
            "total_num_steps": "auto",
        },
    },
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": True},
        "offload_param": {"device": "none"},
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_gather_16bit_weights_on_model_save": True,
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "steps_per_print": float("inf"),
    "wall_clock_breakdown": False,
}


def read(source: Any, **settings: Any) -> tuple[OffloadConfig, str]:
    """The config and the one warning."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        config = OffloadConfig.from_deepspeed(source, **settings)
    assert len(caught) <= 1 and all(each.filename == __file__ for each in caught)
    return config, str(caught[0].message) if caught else ""


def problems(source: Any, **settings: Any) -> list[str]:
    with warnings.catch_warnings(), pytest.raises(ConfigError) as caught:
        warnings.simplefilter("error")  # what raises does not warn too
        OffloadConfig.from_deepspeed(source, **settings)
    return str(caught.value).split("\n  - ")[1:]


def line_of(report: str, start: str) -> str:
    (line,) = [line for line in report.splitlines() if line.startswith(f"  - {start}")]
    return line.removeprefix("  - ")


def keys_of(document: dict[str, Any], prefix: str = "") -> set[str]:
    """Keys with their sections, as far as the tables know sections."""
    found = set()
    for name, value in document.items():
        section = f"{prefix}{name}"
        found |= keys_of(value, f"{section}.") if section in deepspeed.SECTIONS else {section}
    return found


def test_zero_2_with_its_optimizer_in_cpu_memory() -> None:
    config, report = read(ZERO2_OFFLOAD)
    assert config == OffloadConfig(stage=2, params="device", grads="cpu", optimizer="cpu", precision="fp16")
    assert line_of(report, "fp16:") == "fp16: scaler = zo.GradScaler(init_scale=2.0**12, growth_interval=500)"
    assert "zo.Adam(model.parameters(), lr=3e-05, betas=(0.8, 0.999), eps=1e-08, weight_decay=0.0)" in report
    assert "zo.clip_grad_norm_(model, 0.5)" in report and "batch_size=4" in report and "8 backwards" in report
    assert "each overflow halves" in line_of(report, "fp16.hysteresis")


def test_zero_3_in_cpu_memory() -> None:
    config, report = read(ZERO3_OFFLOAD)
    optimizer = {"cpu": 0.3, "device": 0.7}
    assert config == OffloadConfig(stage=3, params="cpu", grads="cpu", optimizer=optimizer, activations="cpu")
    assert config.nvme_dirs == ()
    assert "zo.checkpoint(model.blocks)" in report and "is 64" in line_of(report, "train_batch_size")
    assert "params do not rest there" in line_of(report, "zero_optimization.offload_param.nvme_path")


def test_zero_infinity() -> None:
    config, report = read(INFINITY)
    precision = Precision("bf16", reduce="bf16")
    assert config == OffloadConfig(params="nvme", grads="cpu", optimizer="nvme", nvme="/mnt/nvme0", precision=precision)
    assert "clip" not in report
    assert "zo.AdamW(model.parameters(), lr=0.0001, betas=(0.9, 0.999), eps=1e-08, weight_decay=0.1)" in report
    assert "constant_with_warmup" in line_of(report, "scheduler") and "warmup_num_steps=1000" in report
    assert "bench --io" in line_of(report, "aio.block_size, aio.queue_depth")
    assert read(INFINITY, nvme="/other", params="auto")[0] == OffloadConfig(
        params="auto", grads="cpu", optimizer="nvme", nvme="/other", precision=precision
    )


def test_auto_is_the_trainers_argument() -> None:
    config, report = read(HF_AUTO)
    assert config == OffloadConfig(params="device")
    assert "betas=(args.adam_beta1, args.adam_beta2), eps=args.adam_epsilon, weight_decay=args.weight_decay" in report
    assert "args.max_grad_norm" in line_of(report, "gradient_clipping")
    assert "batch_size=args.per_device_train_batch_size" in report and "total_num_steps=args.max_steps" in report
    assert "bf16 is taken" in line_of(report, "bf16.enabled") and "fp16." not in report
    config, report = read(HF_AUTO, precision="fp16")
    assert config.compute_dtype_name == "float16" and "bf16 is taken" not in report
    assert line_of(report, "fp16:") == "fp16: scaler = zo.GradScaler(init_scale=2.0**16, growth_interval=1000)"


@pytest.mark.parametrize("document", [ZERO2_OFFLOAD, ZERO3_OFFLOAD, INFINITY, HF_AUTO])
def test_every_key_is_in_the_config_or_in_the_report(document: dict[str, Any]) -> None:
    """Those that the config takes are few; the rest is named."""
    _, report = read(document)
    taken = re.compile(
        r".*\.(stage|device|ratio|enabled|cpu_checkpointing)|nvme_path|communication_data_type|fp16\..*"
        r"|zero_optimization\.zero_quantized_weights|gradient_clipping|zero_optimization.offload_\w+\.nvme_path"
    )
    left = {key for key in keys_of(document) if not taken.fullmatch(key)}
    assert {key for key in left if key not in report} == set()


def test_every_key_has_one_meaning() -> None:
    known = [*deepspeed.KNOWN, *deepspeed.REFUSED_PRECISION]
    ignored = {key for keys in deepspeed.IGNORED.values() for key in keys.split()}
    others = {*deepspeed.REFUSED, *deepspeed.REFUSED_PRECISION, *deepspeed.SCRIPT}
    assert ignored & others == set()
    assert sum(len(keys.split()) for keys in deepspeed.IGNORED.values()) == len(ignored)
    sections = {key.rpartition(".")[0] for key in known} - {""}
    assert sections <= set(deepspeed.SECTIONS)


@pytest.mark.parametrize("key", [*deepspeed.REFUSED, *deepspeed.REFUSED_PRECISION])
def test_what_would_change_results_is_refused(key: str) -> None:
    section, _, name = key.rpartition(".")
    for value, refused in ((4, True), ({"enabled": True}, True), (False, False), ({"enabled": False}, False)):
        if isinstance(value, dict) and section:
            continue
        inner: dict[str, Any] = {name: value}
        for part in reversed(section.split(".") if section else []):
            inner = {part: inner}
        if refused:
            (problem,) = problems(inner | {"gradient_clipping": 0})
            assert problem.startswith(f"{key} would change results: ")
        else:
            assert read(inner | {"gradient_clipping": 0})[1] == ""


def test_states_of_few_bits_need_a_precision() -> None:
    document = {"bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}}
    assert len(problems(document)) == 2
    assert read(document, precision=Precision(states="bf16"))[0].numerics.states == "bf16"


@pytest.mark.parametrize(
    ("document", "precision"),
    [
        ({}, "fp32"),
        ({"bf16": {"enabled": False}, "fp16": {"enabled": False}}, "fp32"),
        ({"bfloat16": {"enabled": True}}, "bf16"),
        ({"fp16": {"enabled": True}}, "fp16"),
        ({"torch_autocast": {"enabled": True, "dtype": "bf16"}}, "fp32"),
        ({"fp16": {"enabled": "auto"}}, None),
        ({"bf16": {"enabled": "auto"}, "fp16": {"enabled": True}}, "fp16"),
        ({"bf16": {"enabled": True}, "fp16": {"enabled": True}}, None),
        ({"bf16": {"enabled": True}, "torch_autocast": {"enabled": True}}, None),
        ({"bf16": {"enabled": 1}}, None),
        ({"bf16": {"enabled": True}, "communication_data_type": 16}, None),
    ],
)
def test_precision(document: dict[str, Any], precision: str | None) -> None:
    if precision is None:
        assert len(problems(document)) == 1
    else:
        config, report = read(document)
        assert config.numerics.compute == precision
        assert ("torch.autocast(" in report and "dtype=torch.bfloat16" in report) == ("torch_autocast" in document)


def test_small_numbers_ask_for_something_too() -> None:
    document = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1, "gradient_clipping": 0}
    _, report = read(document | {"optimizer": {"type": "AdamW", "params": {"max_grad_norm": 1.0}}})
    assert "batch_size=1)" in report and "backwards" not in report
    assert "zo.clip_grad_norm_(model, 1.0)" in line_of(report, "optimizer.params.max_grad_norm")


def test_comments_are_none_of_the_keys() -> None:
    assert (
        read({"_comment": "ours", "//": "too", "gradient_clipping": 0, "bf16": {"_note": 1, "enabled": True}})[1] == ""
    )


def test_nothing_offloaded_is_on_the_device() -> None:
    assert read({"zero_optimization": True})[0] == OffloadConfig(
        stage=1, params="device", grads="device", optimizer="device", precision="fp32"
    )
    old = {"zero_optimization": {"stage": 3, "cpu_offload": True, "cpu_offload_param": True}}
    assert read(old)[0] == OffloadConfig(precision="fp32")
    two = {
        "zero_optimization": {
            "stage": 3,
            "offload_param": {"device": "nvme", "nvme_path": "/a"},
            "offload_optimizer": {"device": "nvme", "nvme_path": "/b", "ratio": 0},
        },
    }
    config, _ = read(two)
    assert config.nvme_dirs == (Path("/a"), Path("/b")) and config.optimizer == "device"


def test_sums_of_gradients_stay_sums() -> None:
    assert read({"gradient_allreduce_op": "SUM"})[0].grad_reduction == "sum"
    assert problems({"gradient_allreduce_op": "max"}) == ["grad_reduction='max' is unknown; use one of mean, sum"]


def test_clipping_that_is_not_set_is_named() -> None:
    assert "newer versions of DeepSpeed clip to 1.0" in read({})[1]
    assert read({"gradient_clipping": 0.0})[1] == ""


@pytest.mark.parametrize(
    ("params", "call"),
    [
        ({"type": "AdamW", "params": {"torch_adam": True}}, "zo.AdamW(params, lr=1e-3, weight_decay=1e-2)"),
        ({"type": "Adam", "params": {"amsgrad": True}}, "zo.AdamW(params, weight_decay=0, amsgrad=True)"),
        ({"type": "Lion", "params": {"lr": 1e-5}}, "zo.Lion(params, lr=1e-5)"),
        ({"type": "Adagrad"}, "zo.Adagrad(params)"),
        (
            {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9, "nesterov": True}},
            "zo.SGD(params, 0.1, 0.9, 0, 0, True)",
        ),
    ],
)
def test_the_line_of_the_optimizer_runs(params: dict[str, Any], call: str) -> None:
    _, report = read({"optimizer": params})
    line = line_of(report, "optimizer: optimizer = ").removeprefix("optimizer: optimizer = ")
    names = {"zo": zo, "model": torch.nn.Linear(2, 2), "params": torch.nn.Linear(2, 2).parameters()}
    made, expected = eval(line, names), eval(call, names)
    assert type(made) is type(expected) and made.defaults == expected.defaults


@pytest.mark.parametrize(
    ("params", "rates"), [({}, (0.02, 3e-4)), ({"lr": 0.1}, (0.1, 0.1)), ({"lr": 0.1, "adam_lr": 0.2}, (0.1, 0.2))]
)
def test_the_line_of_muon_runs(params: dict[str, Any], rates: tuple[float, float]) -> None:
    _, report = read({"optimizer": {"type": "Muon", "params": {**params, "weight_decay": 0.3, "ns_method": "gram"}}})
    line = line_of(report, "optimizer: optimizer = ").removeprefix("optimizer: optimizer = ").partition("; ")[0]
    model = zo.offload(torch.nn.Sequential(torch.nn.Linear(2, 2)), OffloadConfig())
    matrices, rest = eval(line, {"zo": zo, "model": model}).param_groups
    assert (matrices["lr"], rest["lr"]) == rates
    assert (matrices["momentum"], rest["betas"], rest["eps"]) == (0.95, (0.9, 0.95), 1e-10)
    assert matrices["weight_decay"] == rest["weight_decay"] == 0.3
    assert matrices["use_muon"] and not rest["use_muon"]
    zo.close(model)
    with pytest.raises(zo.ConfigError, match=r"unknown key optimizer\.params\.muon_rate: did you mean .*muon_lr"):
        read({"optimizer": {"type": "muon", "params": {"muon_rate": 0.1}}})


def test_the_lines_of_the_loss_scale_run() -> None:
    for section in (
        {"enabled": True, "loss_scale": 128.0},
        {"enabled": True, "initial_scale_power": 7},
        {"enabled": True, "initial_scale_power": "auto", "loss_scale_window": "auto"},
    ):
        line = line_of(read({"fp16": section})[1], "fp16: scaler = ").split("scaler = ")[1].split(" (")[0]
        scaler = eval(line, {"zo": zo})
        assert scaler.get_scale() == (65536 if section.get("initial_scale_power") == "auto" else 128)


def test_all_problems_come_at_once() -> None:
    document = {
        "zero_optimization": {
            "stge": 3,
            "stage": 7,
            "offload_param": {"device": "nvme", "nvme_path": 5},
            "offload_optimizer": {"pin_memory": True, "ratio": 2},
            "zenflow": {"topk_ratio": 0.1},
        },
        "gradient_cliping": 1.0,
        "fp16": "yes",
        "optimizer": {"type": "OneBitAdam", "params": {"freeze_step": 10}},
        "scheduler": {"params": {}},
    }
    found = problems(document, exsting="resume")
    for start in (
        "unknown setting exsting: did you mean existing?",
        "unknown key zero_optimization.stge: did you mean zero_optimization.stage?",
        "unknown key gradient_cliping: did you mean gradient_clipping?",
        "fp16='yes' is not an object",
        "zero_optimization.offload_param.nvme_path=5 is not a directory",
        "zero_optimization.offload_optimizer.device is missing",
        "zero_optimization.offload_optimizer.ratio=2 is not a number",
        "optimizer.type='OneBitAdam' does not exist here",
        "scheduler has no type",
        "zero_optimization.zenflow would change results",
        "stage=7 does not exist",
        "params='nvme' needs a directory",
    ):
        assert sum(each.startswith(start) for each in found) == 1, start
    assert len(found) == 12


@pytest.mark.parametrize(
    ("section", "start"),
    [
        (
            {"type": "AdamW", "params": {"lrr": 1}},
            "unknown key optimizer.params.lrr: did you mean optimizer.params.lr?",
        ),
        ({"type": "AdamW", "parms": {}}, "unknown key optimizer.parms: did you mean optimizer.params?"),
        ({"type": "AdamW", "params": [1]}, "optimizer.params=[1] is not an object"),
        ({"type": "AdamW", "params": {"bias_correction": False}}, "optimizer.params.bias_correction=False"),
    ],
)
def test_problems_of_an_optimizer(section: dict[str, Any], start: str) -> None:
    (problem,) = problems({"optimizer": section})
    assert problem.startswith(start)


def test_a_file_is_read_as_its_dict(tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(INFINITY))
    config, report = read(path)
    assert config == read(str(path))[0] == read(INFINITY)[0] and report.startswith(f"{path} is OffloadConfig(stage=3")


def test_a_file_of_almost_this_name_is_offered(tmp_path: Path) -> None:
    (tmp_path / "ds_config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"cannot read .*ds_confg.json: No such file.*did you mean ds_config.json\?"):
        OffloadConfig.from_deepspeed(tmp_path / "ds_confg.json")
    (tmp_path / "ds_config.json").unlink()
    with pytest.raises(ConfigError, match="directory; give a JSON file"):
        OffloadConfig.from_deepspeed(tmp_path / "ds_confg.json")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot read .*ds.json: No such file"),
        ('{"bf16": {"enabled": true},}', "not valid JSON: .*line 1"),
        ('{"bf16": {}, "bf16": {}}', "bf16 stands twice"),
        ("[1]", "holds a list"),
    ],
)
def test_files_that_cannot_be_read(text: str | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "ds.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        OffloadConfig.from_deepspeed(path)
    with pytest.raises(ConfigError, match="a JSON file or its dict, not a int"):
        OffloadConfig.from_deepspeed(5)  # type: ignore[arg-type]
