"""JSON configs of DeepSpeed: their keys as tables, read into settings of `OffloadConfig`.

Owns the names of those keys and the effect of each: a setting, a line of the script, or none. A key is refused where
results would change. Never makes a config: `OffloadConfig.from_deepspeed` does, of what `read_deepspeed` returns. The
config lies below and imports nothing of this: `CONFIG_READERS` has the reader from when the package is imported.

Keys and defaults are those of https://www.deepspeed.ai/docs/config-json and of DeepSpeed 0.19. A key is written here
with its sections, such as "zero_optimization.stage". "auto" stands in files for transformers.Trainer, which puts one of
its arguments there.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zero_offload.base.config import CONFIG_READERS, ConfigSource
from zero_offload.base.errors import ConfigError
from zero_offload.base.precision import TORCH_NAMES, Precision
from zero_offload.base.problems import did_you_mean

_ZERO = "zero_optimization"
SECTIONS = {
    section: tuple(f"{section}.{name}" for name in names.split())
    for section, names in {
        _ZERO: "stage offload_param offload_optimizer cpu_offload cpu_offload_param zenflow leaf_module mics_shard_size"
        " zero_quantized_weights zero_quantized_nontrainable_weights zero_quantized_gradients zeropp_loco_param",
        f"{_ZERO}.offload_param": "device nvme_path",
        f"{_ZERO}.offload_optimizer": "device nvme_path ratio",
        "bf16": "enabled bf16_master_weights_and_grads bf16_optimizer_states",
        "bfloat16": "enabled bf16_master_weights_and_grads bf16_optimizer_states",
        "fp16": "enabled loss_scale initial_scale_power loss_scale_window fp16_master_weights_and_grads",
        "torch_autocast": "enabled dtype",
        "data_types": "",
        "activation_checkpointing": "cpu_checkpointing",
        "aio": "",
        "checkpoint": "",
        "compile": "passes",
        "tensor_parallel": "autotp_size tp_size preset_model tp_overlap_comm vocab_parallel_lm_head partition_config",
    }.items()
}
"""Sections whose keys are known one by one, and those keys that the tables below do not have."""

IGNORED = {
    "a unit of the model moves whole, and gradients are reduced by units": """
        zero_optimization.allgather_partitions zero_optimization.allgather_bucket_size
        zero_optimization.reduce_scatter zero_optimization.reduce_bucket_size zero_optimization.contiguous_gradients
        zero_optimization.use_multi_rank_bucket_allreduce zero_optimization.round_robin_gradients
        zero_optimization.parameter_alignment zero_optimization.stage3_use_all_reduce_for_fetch_params
        zero_optimization.stage3_allgather_sequential zero_optimization.stage3_module_granularity_threshold
        zero_optimization.stage3_partition_stream_chunk_size zero_optimization.legacy_stage1 disable_allgather
        zero_optimization.mics_hierarchical_params_gather""",
    "communication and copies always run beside compute": """
        zero_optimization.overlap_comm zero_optimization.offload_optimizer.pipeline_read
        zero_optimization.offload_optimizer.pipeline_write zero_optimization.offload_optimizer.super_offload""",
    "units are fetched by the order of the last step; device_memory= bounds what a GPU holds": """
        zero_optimization.stage3_max_live_parameters zero_optimization.stage3_max_reuse_distance
        zero_optimization.stage3_prefetch_bucket_size zero_optimization.stage3_param_persistence_threshold
        zero_optimization.stage3_model_persistence_threshold zero_optimization.prefetch_bucket_size
        zero_optimization.param_persistence_threshold zero_optimization.model_persistence_threshold
        zero_optimization.max_live_parameters zero_optimization.max_reuse_distance""",
    "zo.offload(model, config, mesh) with a (replicate, shard) mesh gathers within a node": """
        zero_optimization.zero_hpz_partition_size""",
    "an update works on chunks of 2^20 elements": """
        zero_optimization.sub_group_size zero_optimization.offload_optimizer.convert_grad_on_cpu
        zero_optimization.offload_optimizer.cpuadam_cores_perc""",
    "buffers follow from the model; memory beside a GPU is pinned": """
        zero_optimization.offload_param.pin_memory zero_optimization.offload_optimizer.pin_memory
        zero_optimization.offload_param.buffer_count zero_optimization.offload_param.buffer_size
        zero_optimization.offload_optimizer.buffer_count zero_optimization.offload_optimizer.fast_init
        zero_optimization.cpu_offload_use_pin_memory""",
    "fractions say what rests in memory: params={'cpu': 0.5, 'nvme': 0.5}, or 'auto' within cpu_memory=": """
        zero_optimization.offload_param.max_in_cpu""",
    "the file engine needs no tuning; `zero-offload bench --io DIR` measures it": """
        aio.block_size aio.queue_depth aio.thread_count aio.intra_op_parallelism aio.single_submit aio.overlap_events
        aio.use_gds""",
    "checkpoints and exports have whole fp32 and 16-bit weights and load on any number of ranks": """
        zero_optimization.stage3_gather_16bit_weights_on_model_save zero_optimization.gather_16bit_weights_on_model_save
        zero_optimization.stage3_gather_fp16_weights_on_model_save zero_optimization.load_from_fp32_weights
        zero_optimization.elastic_checkpoint zero_optimization.pipeline_loading_checkpoint checkpoint.tag_validation
        checkpoint.load_universal checkpoint.use_node_local_storage checkpoint.parallel_write checkpoint.writer
        nebula datastates_ckpt datastates""",
    "a parameter without a gradient is never an error, and is not updated": """
        zero_optimization.ignore_unused_parameters""",
    "torch.compile(model) compiles": """
        compile.enabled compile.disable compile.backend compile.kwargs compile.deepcompile compile.free_activation
        compile.free_activation_threshold compile.offload_activation compile.offload_activation_pin_memory
        compile.offload_opt_states compile.offload_parameters compile.double_buffer compile.symmetric_memory
        compile.debug_log compile.sync_before_reduce compile.sync_after_reduce compile.sync_before_allgather
        compile.sync_after_allgather compile.keep_int_input_tensors compile.keep_all_input_tensors""",
    "hooks of DeepSpeed's own": """
        zero_optimization.memory_efficient_linear zero_optimization.override_module_apply
        zero_optimization.log_trace_cache_warnings zero_optimization.enable_sanity_checks
        zero_optimization.compute_grad_norm zero_optimization.save_muon_momentum_buffer_in_memory
        zero_allow_untested_optimizer zero_force_ds_cpu_optimizer managed_gradient_accumulation disable_python_gc
        graph_harvesting hybrid_engine use_data_before_expert_parallelism vocabulary_size""",
    "gradients are added in fp32, and a step whose gradients are not finite is skipped": """
        data_types.grad_accum_dtype bf16.immediate_grad_update bf16.check_grad_overflow
        bfloat16.immediate_grad_update bfloat16.check_grad_overflow prescale_gradients gradient_predivide_factor
        sparse_gradients seq_parallel_comm_data_type""",
    "parameters have the dtype of precision=, buffers their own": """
        data_types.param_dtype data_types.buffer_dtype torch_autocast.lower_precision_safe_modules fp16.auto_cast
        fp16.fused_mode""",
    "each overflow halves the loss scale, and none is too small": """
        fp16.hysteresis fp16.consecutive_hysteresis fp16.min_loss_scale""",
    "zo.checkpoint marks blocks; in tensor parallelism its group= keeps a part of their inputs on each rank": """
        activation_checkpointing.partition_activations activation_checkpointing.contiguous_memory_optimization
        activation_checkpointing.number_checkpoints activation_checkpointing.synchronize_checkpoint_boundary
        activation_checkpointing.profile""",
    "zo.stats and zo.profile have times and bytes, `zero-offload plan` predicts; logging is the script's": """
        steps_per_print wall_clock_breakdown memory_breakdown dump_state flops_profiler autotuning timers log_level
        comms_logger comms_config monitor_config tensorboard wandb comet csv_monitor""",
}
"""Keys without effect here, by the reason."""

REFUSED = {
    f"{_ZERO}.zero_quantized_weights": "parameters are gathered as they are",
    f"{_ZERO}.zero_quantized_nontrainable_weights": "frozen parameters stay as they are; quantize them in the model",
    f"{_ZERO}.zero_quantized_gradients": "gradients are reduced in fp32, or in 16 bits by zo.Precision(reduce='bf16')",
    f"{_ZERO}.zeropp_loco_param": "gradients are not quantized",
    f"{_ZERO}.zenflow": "every step uses its own gradients, none of earlier steps",
    "tensor_parallel.autotp_size": "divide the model by torch's parallelize_module, and give zo.offload the other mesh",
    "expert_parallel": "experts are not divided over ranks; branches='any' trains those that each rank's data asks for",
    "sequence_parallel_size": "sequences are not divided over ranks",
    "sequence_parallel": "sequences are not divided over ranks",
    "fp8": "nothing computes in 8 bits",
    "compile.passes": "no pass divides sequences or matrices over ranks",
    "pipeline": "there are no pipeline stages; a model larger than memory needs none",
    "amp": "Apex is not used; enable bf16 or fp16, or use torch.autocast in the script",
    "sparse_attention": "attention is the model's own",
    "compression_training": "the model is trained as it is; compress it in the script",
    "quantize_training": "the model is trained as it is; quantize it in the script",
    "weight_quantization": "the model is trained as it is; quantize it in the script",
    "progressive_layer_drop": "all layers run; a forward that drops some needs branches='any' on several ranks",
    "eigenvalue": "no eigenvalues are computed",
    "curriculum_learning": "the script chooses the data; shorten the batches there",
    "data_efficiency": "the script chooses the data; sample and drop tokens there",
    "elasticity": "the script chooses the batch size; a generation resumes on any number of ranks",
}
"""Keys that would change results, and what there is instead."""
_LOW_STATES = "masters are fp32; give precision=zo.Precision(states='bf16') for 8 bytes a parameter"
REFUSED_PRECISION = {
    "bf16.bf16_master_weights_and_grads": _LOW_STATES,
    "bf16.bf16_optimizer_states": _LOW_STATES,
    "bfloat16.bf16_master_weights_and_grads": _LOW_STATES,
    "bfloat16.bf16_optimizer_states": _LOW_STATES,
    "fp16.fp16_master_weights_and_grads": _LOW_STATES.replace("states=", "'fp16', states=").replace("8", "10"),
}
"""The same of keys that a `precision=` from the program replaces."""

SCRIPT = {
    "gradient_accumulation_steps": "{} backwards of a loss divided by {} before optimizer.step(), or zo.accumulate",
    "train_batch_size": "ranks x batch size of the DataLoader x backwards before a step is {}",
    "train_micro_batch_size_per_gpu": "DataLoader(..., batch_size={})",
    "dataloader_drop_last": "DataLoader(..., drop_last={})",
    f"{_ZERO}.mics_shard_size": 'zo.offload(model, config, init_device_mesh("cuda", (num_ranks // {0}, {0})))',
    f"{_ZERO}.leaf_module": "zo.offload(model, config, units=[...]) with these classes or names; branches='any' where "
    "the data of a rank chooses experts: {}",
}
"""Keys that a line of the script replaces."""

_ADAM = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0, "amsgrad": False}
_OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "adam": ("AdamW", _ADAM),
    "adamw": ("AdamW", _ADAM),
    "lion": ("Lion", {"lr": 1e-3, "betas": (0.9, 0.99), "weight_decay": 0.0}),
    "adagrad": ("Adagrad", {"lr": 1e-2, "eps": 1e-10, "weight_decay": 0.0}),
    "sgd": ("SGD", {"lr": 1e-3, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.0, "nesterov": False}),
}
"""DeepSpeed's optimizers: our class, and DeepSpeed's defaults."""
_MUON = {"lr": 0.02, "momentum": 0.95, "weight_decay": 0.0}
_ADAM_OF_MUON = {"lr": 3e-4, "betas": (0.9, 0.95), "eps": 1e-10, "weight_decay": 0.0}
_MUON_ARGUMENTS = ("lr", "muon_lr", "adam_lr", "momentum", "betas", "eps", "weight_decay", "ns_method")
"""Of DeepSpeed's files. The last one chooses another loop for the same mathematics."""
_OPTIMIZER_ARGUMENTS = (
    *("adam_w_mode", "bias_correction", "max_grad_norm", "torch_adam"),
    *("adamw_mode", "fp32_optimizer_states", "set_grad_none", "fused", "foreach"),
)
"""Other arguments in DeepSpeed's files. The last five choose another loop for the same mathematics."""
_SCHEDULERS = {
    "WarmupLR": 'transformers.get_scheduler("constant_with_warmup", ...), which warms up linearly',
    "WarmupDecayLR": 'transformers.get_scheduler("linear", ...), which warms up linearly',
    "WarmupCosineLR": 'transformers.get_scheduler("cosine", ...)',
    "OneCycle": "torch.optim.lr_scheduler.OneCycleLR",
    "LRRangeTest": "torch.optim.lr_scheduler.LambdaLR",
}
_TRAINER = {
    "gradient_clipping": "max_grad_norm",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "train_batch_size": "world_size * args.per_device_train_batch_size * args.gradient_accumulation_steps",
    "train_micro_batch_size_per_gpu": "per_device_train_batch_size",
    "dataloader_drop_last": "dataloader_drop_last",
    "lr": "learning_rate",
    "eps": "adam_epsilon",
    "weight_decay": "weight_decay",
    "warmup_max_lr": "learning_rate",
    "warmup_num_steps": "warmup_steps",
    "total_num_steps": "max_steps",
}
"""Arguments of transformers.Trainer that "auto" stands for."""

_TOP = (*(name for name in SECTIONS if "." not in name), "optimizer", "scheduler", "communication_data_type")
KNOWN = (
    *_TOP,
    "gradient_allreduce_op",
    "gradient_clipping",
    *(key for keys in SECTIONS.values() for key in keys),
    *(key for keys in IGNORED.values() for key in keys.split()),
    *REFUSED,
    *SCRIPT,
)
"""All keys."""


@dataclass
class DeepSpeedReading:
    """The content of a file. Implements `base.config.ForeignConfig`."""

    name: str
    settings: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    script: list[str] = field(default_factory=list)
    """Lines of the script that do it instead."""
    ignored: list[str] = field(default_factory=list)

    def report(self) -> str:
        """A text for the user beside the config. Empty if all of the file is in the config."""
        lines = [
            f"{self.name} is OffloadConfig({', '.join(f'{key}={value!r}' for key, value in self.settings.items())})"
        ]
        if self.script:
            lines += ["to write in the script, except what transformers.Trainer does by its arguments (args):"]
            lines += [f"  - {line}" for line in self.script]
        if self.ignored:
            lines += ["without effect here:", *(f"  - {line}" for line in self.ignored)]
        return "\n".join(lines) if lines[1:] else ""


def read_deepspeed(source: ConfigSource, given: Mapping[str, Any]) -> DeepSpeedReading:
    """The settings that a DeepSpeed config asks for, under those that the program has `given`.

    `source` is a JSON file or the dict of one. All problems of its content are in the result. Raises ConfigError for a
    file that cannot be read.
    """
    name, document = _load(source)
    reading = DeepSpeedReading(name)
    values = dict(_flatten(document, "", reading.problems))
    _read_placement(values, given, reading)
    compute = _read_precision(values, given, reading)
    _read_optimizer(values, reading)
    _read_scheduler(values, reading)
    _read_script(values, reading)
    reading.problems += [
        f"{key} would change results: {why}; remove it" for key, why in REFUSED.items() if _on(values, key)
    ]
    reading.ignored += _ignored(values, compute)
    reading.settings |= given
    return reading


CONFIG_READERS["deepspeed"] = read_deepspeed


def _load(source: ConfigSource) -> tuple[str, Mapping[str, Any]]:
    if isinstance(source, Mapping):
        return "the DeepSpeed config", source
    if not isinstance(source, str | os.PathLike):
        raise ConfigError(f"from_deepspeed takes a JSON file or its dict, not a {type(source).__name__}")
    try:
        document = json.loads(Path(source).read_text(encoding="utf-8"), object_pairs_hook=_unique)
    except OSError as error:
        hint = did_you_mean(Path(source).name, _json_beside(Path(source)))
        raise ConfigError(f"cannot read {source}: {error.strerror}; {hint}give a JSON file of DeepSpeed") from error
    except ValueError as error:
        raise ConfigError(f"{source} is not valid JSON: {error}; remove comments and trailing commas") from error
    if not isinstance(document, dict):
        raise ConfigError(f"{source} holds a {type(document).__name__}; a config of DeepSpeed is an object {{...}}")
    return str(source), document


def _json_beside(path: Path) -> list[str]:
    return sorted(each.name for each in path.absolute().parent.glob("*.json"))


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    names = [name for name, _ in pairs]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"{', '.join(sorted(twice))} stands twice in one object")
    return dict(pairs)


def _flatten(section: Mapping[str, Any], prefix: str, problems: list[str]) -> Iterator[tuple[str, Any]]:
    """The known keys that have a value, with their sections; unknown ones and values in place of a section go to
    `problems`."""
    names = [key.removeprefix(prefix) for key in KNOWN if key.startswith(prefix)]
    names = [name for name in names if "." not in name]
    for name, value in section.items():
        if str(name).startswith(("_", "//")):
            continue  # a comment
        key = f"{prefix}{name}"
        if name not in names:
            problems.append(f"unknown key {key}: {did_you_mean(name, names, prefix)}correct or remove it")
        elif key not in SECTIONS:
            if value is not None:
                yield key, value
        elif isinstance(value, Mapping):
            yield key, value
            yield from _flatten(value, f"{key}.", problems)
        elif key == _ZERO and isinstance(value, bool):
            yield f"{_ZERO}.stage", int(value)  # DeepSpeed's oldest spelling
        elif value not in (None, False):
            problems.append(f"{key}={value!r} is not an object of settings; write {{...}} as DeepSpeed does")


def _read_placement(values: Mapping[str, Any], given: Mapping[str, Any], reading: DeepSpeedReading) -> None:
    settings, paths = reading.settings, []
    settings["stage"] = values.get(f"{_ZERO}.stage", 0)
    for section, setting, old in (
        (f"{_ZERO}.offload_param", "params", f"{_ZERO}.cpu_offload_param"),
        (f"{_ZERO}.offload_optimizer", "optimizer", f"{_ZERO}.cpu_offload"),
    ):
        device = "cpu" if values.get(old) is True else "none"
        if values.get(section):
            device = values.get(f"{section}.device", "missing")
        if device not in ("none", "cpu", "nvme"):
            reading.problems.append(f"{section}.device is {device}; write 'none', 'cpu' or 'nvme'")
            continue
        settings[setting] = "device" if device == "none" else device
        path = values.get(f"{section}.nvme_path")
        if device == "nvme" and isinstance(path, str | os.PathLike):
            paths.append(path)
        elif device == "nvme" and path is not None:
            reading.problems.append(f"{section}.nvme_path={path!r} is not a directory; name one, or give nvme=")
        elif path is not None:
            reading.ignored.append(f"{section}.nvme_path: {setting} do not rest there")
    ratio, tier = values.get(f"{_ZERO}.offload_optimizer.ratio", 1), settings.get("optimizer", "device")
    if not isinstance(ratio, int | float) or not 0 <= ratio <= 1:
        reading.problems.append(f"{_ZERO}.offload_optimizer.ratio={ratio!r} is not a number from 0 to 1")
    elif tier != "device":
        settings["grads"] = "cpu"
        settings["optimizer"] = {tier: ratio, "device": 1 - ratio} if ratio < 1 else tier
    else:
        settings["grads"] = "device"
    if paths and "nvme" not in given:
        settings["nvme"] = list(dict.fromkeys(paths))
    if _on(values, "activation_checkpointing.cpu_checkpointing"):
        settings["activations"] = "cpu"
    if (reduction := values.get("gradient_allreduce_op", "auto")) != "auto":
        settings["grad_reduction"] = reduction.lower() if isinstance(reduction, str) else reduction


def _read_precision(values: Mapping[str, Any], given: Mapping[str, Any], reading: DeepSpeedReading) -> object:
    """Returns what forward computes in."""
    enabled = {
        "bf16": values.get("bf16.enabled", values.get("bfloat16.enabled", False)),
        "fp16": values.get("fp16.enabled", False),
        "torch_autocast": values.get("torch_autocast.enabled", False),
    }
    for name, value in enabled.items():
        if not isinstance(value, bool) and value != "auto":
            reading.problems.append(f"{name}.enabled={value!r} is neither true, false nor 'auto'")
    asked = [name for name, value in enabled.items() if value is True]
    if "precision" not in given:
        reading.problems += [
            f"{key} would change results: {why}" for key, why in REFUSED_PRECISION.items() if _on(values, key)
        ]
        compute, reduce = _compute(asked, enabled, reading), values.get("communication_data_type", "auto")
        if isinstance(reduce, str):
            reduce = reduce.lower().replace("auto", "fp32")
        reading.settings["precision"] = compute if reduce == "fp32" else Precision(compute, reduce)
    precision = given.get("precision", reading.settings.get("precision"))
    compute = getattr(precision, "compute", precision)
    if "torch_autocast" in asked:
        dtype = values.get("torch_autocast.dtype", "bfloat16")
        dtype = TORCH_NAMES.get(dtype, str(dtype).removeprefix("torch."))
        reading.script.append(f'torch_autocast: with torch.autocast("cuda", dtype=torch.{dtype}): around forward')
        compute = "fp16" if dtype == "float16" else compute
    if compute == "fp16":
        reading.script.append(f"fp16: scaler = {_scaler(values)}")
    return compute


def _compute(asked: list[str], enabled: Mapping[str, Any], reading: DeepSpeedReading) -> str:
    """The dtype that forward computes in."""
    if len(asked) > 1:
        reading.problems.append(f"{', '.join(asked)} are all enabled; enable one, or give precision='bf16'")
    compute = asked[0] if asked and asked[0] in TORCH_NAMES else "fp32"
    if not asked and enabled["bf16"] == "auto":
        compute = "bf16"
        reading.script.append("bf16.enabled='auto': bf16 is taken; give precision= where the Trainer has not bf16=True")
    elif not asked and enabled["fp16"] == "auto":
        reading.problems.append("fp16.enabled='auto': give precision='fp16' or 'fp32', as the Trainer's fp16= was")
    return compute


def _scaler(values: Mapping[str, Any]) -> str:
    """The loss scaler that does what fp16's settings say."""
    scale = values.get("fp16.loss_scale", 0)
    if scale and scale != "auto":
        return f"zo.GradScaler(init_scale={scale}, growth_interval=2**31) (an overflow halves it here)"
    power, window = (values.get(f"fp16.{name}", "auto") for name in ("initial_scale_power", "loss_scale_window"))
    power, window = 16 if power == "auto" else power, 1000 if window == "auto" else window
    return f"zo.GradScaler(init_scale=2.0**{power}, growth_interval={window})"


def _read_optimizer(values: Mapping[str, Any], reading: DeepSpeedReading) -> None:
    if (section := _typed("optimizer", values, ("type", "params", "legacy_fusion"), reading)) is None:
        return
    kind, params = section
    if kind.lower() == "muon":
        _read_muon(params, reading)
        return
    if kind.lower() not in _OPTIMIZERS:
        reading.problems.append(
            f"optimizer.type={kind!r} does not exist here; remove the section, and make one of zo.AdamW, zo.Adam, "
            "zo.SGD, zo.Adagrad, zo.Lion and zo.Muon in the script"
        )
        return
    name, arguments = _OPTIMIZERS[kind.lower()]
    _check_arguments(params, [*arguments, *_OPTIMIZER_ARGUMENTS], reading)
    if kind.lower() == "adam" and params.get("adam_w_mode") is False:
        name = "Adam"
    if params.get("bias_correction") is False:
        reading.problems.append("optimizer.params.bias_correction=False: zo.AdamW always corrects; remove it")
    if _is_on(params.get("max_grad_norm"), most_off=0):
        reading.script.append(
            f"optimizer.params.max_grad_norm: zo.clip_grad_norm_(model, {params['max_grad_norm']}) before step()"
        )
    if name == "AdamW" and params.get("torch_adam") is True:
        arguments = arguments | {"weight_decay": 1e-2}  # torch's own default then
    arguments = arguments | {key: params[key] for key in arguments if key in params}
    arguments = {key: value for key, value in arguments.items() if key != "amsgrad" or value is True}
    text = ", ".join(f"{key}={_argument(key, value)}" for key, value in arguments.items())
    reading.script.append(f"optimizer: optimizer = zo.{name}(model.parameters(), {text})")


def _check_arguments(params: Mapping[str, Any], names: list[str], reading: DeepSpeedReading) -> None:
    for unknown in (each for each in params if each not in names):
        hint = did_you_mean(unknown, names, "optimizer.params.")
        reading.problems.append(f"unknown key optimizer.params.{unknown}: {hint}correct or remove it")


def _read_muon(params: Mapping[str, Any], reading: DeepSpeedReading) -> None:
    """DeepSpeed marks parameters by `use_muon`; one rate may be that of both kinds."""
    _check_arguments(params, list(_MUON_ARGUMENTS), reading)
    texts = []
    for rate, arguments in (("muon_lr", _MUON), ("adam_lr", _ADAM_OF_MUON)):
        given = {**params, "lr": params.get(rate, params.get("lr", arguments["lr"]))}
        texts.append([(key, _argument(key, given.get(key, default))) for key, default in arguments.items()])
    muon = ", ".join(f"{key}={text}" for key, text in texts[0])
    adamw = ", ".join(f'"{key}": {text}' for key, text in texts[1])
    reading.script.append(
        f"optimizer: optimizer = zo.Muon(model.parameters(), {muon}, adamw={{{adamw}}}); where parameters are marked "
        "otherwise than by name, with use_muon=lambda name, param: param.use_muon"
    )


def _read_scheduler(values: Mapping[str, Any], reading: DeepSpeedReading) -> None:
    if (section := _typed("scheduler", values, ("type", "params"), reading)) is None:
        return
    kind, params = section
    instead = _SCHEDULERS.get(kind, "one of torch.optim.lr_scheduler")
    reading.script.append(
        f"scheduler: scheduler.step() after optimizer.step(), with {instead}, in place of {kind}("
        + ", ".join(f"{key}={_argument(key, value)}" for key, value in params.items())
        + ")"
    )


def _typed(
    section: str, values: Mapping[str, Any], names: Iterable[str], reading: DeepSpeedReading
) -> tuple[str, Mapping[str, Any]] | None:
    """The type and the arguments of a section such as "optimizer"; None without one."""
    if not (content := values.get(section)):
        return None
    known = list(names)
    if not isinstance(content, Mapping) or not isinstance(content.get("type"), str):
        reading.problems.append(f'{section} has no type; write {{"type": ..., "params": {{...}}}}, or remove it')
        return None
    for unknown in (each for each in content if each not in known):
        hint = did_you_mean(unknown, known, f"{section}.")
        reading.problems.append(f"unknown key {section}.{unknown}: {hint}correct or remove it")
    params = content.get("params") or {}
    if not isinstance(params, Mapping):
        reading.problems.append(f"{section}.params={params!r} is not an object of arguments; write {{...}}")
        return None
    return content["type"], params


def _argument(key: str, value: object) -> str:
    """An argument as Python writes it; "auto" as the Trainer's argument."""
    if value != "auto":
        return repr(tuple(value) if isinstance(value, list) else value)
    if key == "betas":
        return "(args.adam_beta1, args.adam_beta2)"
    return f"args.{_TRAINER[key]}" if key in _TRAINER else repr(value)


def _read_script(values: Mapping[str, Any], reading: DeepSpeedReading) -> None:
    for key, text in SCRIPT.items():
        if _is_on(values.get(key), most_off=key == "gradient_accumulation_steps"):
            shown = _argument(key, values[key])
            reading.script.append(f"{key}: {text.format(shown, shown)}")
    clip = values.get("gradient_clipping", "missing")
    line = f"zo.clip_grad_norm_(model, {_argument('gradient_clipping', clip)}) before optimizer.step()"
    if clip == "missing":
        line = "newer versions of DeepSpeed clip to 1.0 without it: zo.clip_grad_norm_(model, 1.0)"
    if clip != 0:
        reading.script.append(f"gradient_clipping: {line}")
    if _on(values, "activation_checkpointing.cpu_checkpointing"):
        reading.script.append(
            "activation_checkpointing: zo.checkpoint(model.blocks) in place of deepspeed.checkpointing.checkpoint"
        )


def _ignored(values: Mapping[str, Any], compute: object) -> Iterator[str]:
    for reason, keys in IGNORED.items():
        found = [key for key in keys.split() if key in values and (compute == "fp16" or not key.startswith("fp16."))]
        if found:
            yield f"{', '.join(found)}: {reason}"


def _on(values: Mapping[str, Any], key: str) -> bool:
    """True if a key asks for something."""
    return _is_on(values.get(key))


def _is_on(value: object, most_off: int = 1) -> bool:
    """`most_off` is the largest number that asks for nothing, such as 1 for a number of parts."""
    if isinstance(value, bool):
        return value
    if isinstance(value, int | float):
        return value > most_off
    if isinstance(value, Mapping):
        return bool(value.get("enabled", bool(value)))
    return bool(value)
