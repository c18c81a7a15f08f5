"""How problems are reported. Problems of settings come all at once, unknown names with the nearest known one, and
warnings at the program's line that led to them.

Owns the wording that `OffloadConfig` and the recipes share. Never knows a setting.
"""

from __future__ import annotations

import difflib
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

_PACKAGE = f"{Path(__file__).parents[1]}/"


def warn_user(message: str) -> None:
    """Warn, as of the innermost line outside of this package."""
    frame: FrameType | None = sys._getframe(1)
    level = 2
    while frame is not None and frame.f_code.co_filename.startswith(_PACKAGE):
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)


@contextmanager
def warning_after(seconds: float, message: Callable[[], str]) -> Iterator[None]:
    """Warn, from another thread, if the block takes longer."""
    timer = threading.Timer(seconds, lambda: warnings.warn(message(), stacklevel=2))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def list_problems(subject: str, problems: Sequence[str]) -> str:
    """One message; `subject` ends in its verb, as "the settings have"."""
    noun = "problem" if len(problems) == 1 else "problems"
    return "\n".join([f"{subject} {len(problems)} {noun}:", *(f"  - {line}" for line in problems)])


def unknown_names(given: Iterable[str], names: Sequence[str], prefix: str = "") -> list[str]:
    """A line for each name that is not among `names`."""
    found = []
    for key in (key for key in given if key not in names):
        hint = did_you_mean(key, names, prefix)
        found.append(f"unknown setting {prefix}{key}: {hint}the settings are {', '.join(names)}")
    return found


def did_you_mean(key: str, names: Sequence[str], prefix: str = "") -> str:
    """A question that offers the setting that other tools call so or nearly so, else the nearest of `names`. It ends
    with a space, and is empty if there is neither. Names may be of settings ("cpu_memory") or flags ("--cpu-memory").
    """
    spelled = {_plain(name): name for name in names}
    for their, ours in _OTHERS.items():
        meant = next((spelled[each] for each in ours if each in spelled), None)
        spelled |= {} if meant is None else {their: spelled.get(their, meant)}
    found = difflib.get_close_matches(_plain(key), spelled, n=1, cutoff=_ALIKE)
    near = [spelled[each] for each in found] or difflib.get_close_matches(str(key), names, n=1)
    return f"did you mean {prefix}{near[0]}? " if near else ""


def _plain(name: object) -> str:
    return str(name).partition("=")[0].lstrip("-").replace("-", "_").lower()


_ALIKE = 0.8
"""Of two words for the same, as difflib counts: a letter or two differ."""
_SYNONYMS = {
    "lr": "learning_rate lr_rate learning-rate peak_lr max_lr",
    "batch": "batch_size train_batch_size micro_batch_size micro_batch train_micro_batch_size_per_gpu "
    "per_device_train_batch_size per_device_batch_size device_batch_size bs",
    "accumulate": "gradient_accumulation_steps gradient_accumulation grad_accumulation grad_accum accumulation_steps "
    "accumulate_grad_batches grad_accum_steps micro_batches",
    "epochs": "num_train_epochs num_epochs epoch max_epochs train_epochs",
    "steps": "max_steps num_steps max_train_steps train_steps max_iters num_train_steps iterations",
    "out": "output_dir output output_path out_dir outdir save_dir save_path default_root_dir run_dir",
    "lora": "lora_r lora_rank lora_dim use_lora r rank adapter peft use_peft",
    "lora_alpha": "alpha",
    "lora_targets": "lora_target_modules target_modules lora_target lora_modules",
    "seq": "max_seq_length max_seq_len max_length sequence_len sequence_length seq_len seq_length cutoff_len "
    "model_max_length block_size context_length max_len",
    "sequence": "seq seq_len sequence_length max_seq_length",
    "tokens": "num_tokens batch_tokens",
    "warmup": "warmup_steps warmup_ratio num_warmup_steps warmup_iters lr_warmup_steps",
    "weight_decay": "wd decay",
    "clip": "max_grad_norm gradient_clipping gradient_clip_val grad_clip clip_grad clip_grad_norm max_norm",
    "seed": "random_seed data_seed manual_seed",
    "eval_every": "eval_steps evaluation_steps eval_interval eval_freq val_check_interval evals_per_epoch",
    "patience": "early_stopping_patience early_stopping",
    "samples": "num_samples generate_samples",
    "split": "val_set_size val_size test_size validation_split eval_split validation_split_percentage",
    "eval_data": "eval_dataset eval_file validation_file val_data valid_data validation_data test_datasets",
    "data": "dataset datasets dataset_name train_file train_data data_path data_dir train_dataset dataset_path",
    "model": "model_name_or_path base_model model_path pretrained_model model_name model_id",
    "quantize": "load_in_4bit load_in_8bit quantization bits quant use_4bit quantization_bit",
    "recompute": "gradient_checkpointing activation_checkpointing checkpoint_activations",
    "precision": "bf16 fp16 mixed_precision dtype torch_dtype amp compute_dtype",
    "nvme": "nvme_path nvme_dir offload_dir offload_folder offload_path swap_dir disk nvme_offload_dir",
    "nvme_capacity": "max_disk disk_size nvme_size nvme_memory",
    "stage": "zero_stage zero sharding_strategy fsdp zero3",
    "params": "offload_param offload_params offload_param_device param_offload cpu_offload offload_parameters",
    "grads": "offload_gradients offload_grads gradients grad_offload",
    "optimizer": "offload_optimizer offload_optimizer_device optimizer_offload offload_optimizer_states optim",
    "activations": "offload_activations activation_offload activation_offloading activation_cpu_offload",
    "device_memory": "gpu_memory max_gpu_memory max_memory vram gpu_memory_limit",
    "cpu_memory": "ram host_memory max_cpu_memory cpu_ram memory",
    "ram": "cpu_ram host_memory system_memory",
    "commit_every": "save_steps save_every checkpoint_every save_interval checkpointing_steps",
    "discard": "overwrite_output_dir overwrite force",
    "ranks": "num_gpus world_size nproc_per_node num_processes gpus",
    "nodes": "nnodes num_nodes num_machines",
    "grad_reduction": "reduce_op loss_reduction",
    "overlap": "overlap_comm",
    "io_engine": "aio engine",
    "existing": "resume resume_from_checkpoint auto_resume",
}
"""Names of a setting in DeepSpeed, accelerate, transformers, TRL, PEFT, axolotl, Lightning and LLaMA-Factory."""
_OTHERS: dict[str, list[str]] = {}
"""By such a name, ours; where a flag has its tier's name, that."""
for _ours, _theirs in _SYNONYMS.items():
    for _name in _theirs.split():
        _OTHERS.setdefault(_plain(_name), []).extend((_ours, f"{_ours}_tier"))
