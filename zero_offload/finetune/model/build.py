"""The model of a folder, of which no more is in memory than tiers allow.

Owns the one way in which it is built. It is built from its config, and its parameters get the values of the folder's
files when they are offloaded. An adapter's folder names its base; the model has the adapter's values then. The calls:
`meta_model` for a plan, or `build_model`. transformers and peft are imported inside of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from zero_offload.base.config import OffloadConfig
from zero_offload.base.errors import ConfigError
from zero_offload.checkpoint.hf_files import open_weights
from zero_offload.finetune.choices import CAUSAL, CLASSIFY, LiveChoice, Lora
from zero_offload.finetune.model.folder import ADAPTER_CONFIG_NAME, ModelFolder, adapter_file, model_of
from zero_offload.finetune.model.targets import Targets
from zero_offload.finetune.model.text_generation import generation_config
from zero_offload.integrations.adapter_kinds import plain_init
from zero_offload.integrations.experts import group_experts, has_frozen_experts
from zero_offload.integrations.file_names import AdapterFile, FileNames, transformers_names, untie
from zero_offload.integrations.gate import reading
from zero_offload.integrations.peft import adapter_file_names, base_names
from zero_offload.integrations.pretrained import plan_weights, state_names
from zero_offload.integrations.quantize import quantize_layers, stored_layers
from zero_offload.model.api import checkpoint
from zero_offload.model.deferred.recorder import deferred_init
from zero_offload.model.offload import offload as offload_model

_FOR_PEFT = ("is_loaded_in_4bit", "is_loaded_in_8bit")
"""Attributes of a quantized model that peft reads as it makes adapters. TRL would then convert these to bf16, whatever
their dtype.
"""


def meta_model(
    folder: ModelFolder, lora: Lora | None, dtype: torch.dtype | None = None, live: LiveChoice | None = None
) -> nn.Module:
    """The model on meta, with its adapters, and `requires_grad` as in training; it takes no memory. `dtype`: of
    computation with quantized weights. With `live` blocks are frozen, as they are before their turn."""
    with torch.device("meta"):
        built = _assemble(folder, lora, dtype)
    model: nn.Module = built.model
    if live is not None:
        freeze_blocks(model, live, built.names.fresh)
    return model


def drawn_heads(folder: ModelFolder) -> tuple[str, ...]:
    """The modules that a new head consists of: no file has their parameters, so these begin with random numbers."""
    if folder.task == CAUSAL or folder.adapter is not None:
        return ()
    with torch.device("meta"):
        built = _assemble(folder, None)
    drawn = built.names.fresh - set(built.model.all_tied_weights_keys)
    names = [name for name, _ in built.model.named_parameters() if name in drawn]
    return tuple(dict.fromkeys(name.rpartition(".")[0] or name for name in names))


def group_frozen_experts(model: nn.Module, folder: ModelFolder) -> None:
    """Let experts that are not trained be fetched in groups, as the folder says. To be called before `zo.offload`.

    Raises ConfigError where a size is given for a model without such experts.
    """
    if has_frozen_experts(model):
        try:
            group_experts(model, folder.group_size or None)
        except ConfigError:  # of a class that adds up in another way: its experts come whole
            if folder.group_size:
                raise
    elif folder.group_size:
        raise ConfigError(
            f"--group-size {folder.group_size} is of frozen experts, and {folder.path} has none"
            " that stay frozen; leave it out, or train adapters: --lora 16"
        )


def recompute_blocks(model: nn.Module) -> None:
    """Let backward run again what transformers would, by `zo.checkpoint`: experts in groups are read once less.

    Raises ConfigError for a model that transformers does not divide into such blocks.
    """
    if not (blocks := blocks_of(model)):
        raise ConfigError(
            f"transformers has no blocks in {type(model).__name__} that backward could run again; give --recompute none"
        )
    checkpoint(list(blocks.values()))


def blocks_of(model: nn.Module) -> dict[str, nn.Module]:
    """The blocks into which transformers divides a model, in order, by name."""
    from transformers.modeling_layers import GradientCheckpointingLayer

    found = {name: module for name, module in model.named_modules() if isinstance(module, GradientCheckpointingLayer)}
    return {name: module for name, module in found.items() if not any(name.startswith(f"{each}.") for each in found)}


def freeze_blocks(model: nn.Module, live: LiveChoice, fresh: Collection[str]) -> None:
    """Let nothing be trained but what lives in all steps: each block begins with its first turn. `fresh` parameters are
    in no file, and so are trained in any order.

    Raises ConfigError for a model that transformers does not divide into blocks, or of too few.
    """
    if not (blocks := blocks_of(model)):
        raise ConfigError(
            f"--live-blocks: transformers has no blocks in {type(model).__name__} that could take turns; leave it out"
        )
    if live.num_live != "auto":
        live.of(len(blocks))
    if not live.trains_around:
        for name, param in model.named_parameters():
            param.requires_grad_(name in fresh)
    for block in blocks.values():
        block.requires_grad_(False)


def build_model(
    folder: ModelFolder,
    offload: OffloadConfig | None,
    lora: Lora | None,
    seed: int = 0,
    *,
    trains: bool = True,
    live: LiveChoice | None = None,
) -> nn.Module:
    """The folder's model, offloaded as `offload` says, with the folder's weights. Every rank must call.

    Where the directories hold a generation and `existing="resume"`, weights are the generation's; `zo.resume` is the
    caller's. An adapter in `folder` goes on training. With `trains=False` the model is in eval mode, and nothing of it
    is trained. With `live` blocks take turns, and are frozen now. New heads and adapters begin with values drawn by
    `seed`. Raises what `zo.offload` and `zo.load_pretrained` raise, and ConfigError for a `lora` or `live` that does
    not go with the model.
    """
    torch.manual_seed(seed)
    # Heads that are in no file, and peft's copies of them, begin with numbers that are computed from others.
    with deferred_init(values="skip" if folder.task == CAUSAL else "init"):
        built = _assemble(folder, lora, getattr(torch, (offload or OffloadConfig()).compute_dtype_name))
    model: nn.Module = built.model
    if not trains:
        model.requires_grad_(False).eval()
        built.model.config.use_cache = getattr(folder.config, "use_cache", True)
    for module in model.modules() if folder.is_quantized else ():
        for name in _FOR_PEFT:
            vars(module).pop(name, None)
    group_frozen_experts(model, folder)
    if live is not None:
        freeze_blocks(model, live, built.names.fresh)
    is_new = trains and folder.adapter is None
    plan_weights(model, folder.path, built.names if is_new else _without_draws(model, built.names))
    return offload_model(model, offload)


def _without_draws(model: nn.Module, names: FileNames) -> FileNames:
    """For a model that was trained before: no value is drawn, but where the adapter's file has what is used in its
    place."""
    base_name = base_names(model)
    replaced = {base_name(name) for name in names.adapter.known.values()} if names.adapter is not None else set()
    return replace(names, fresh=names.fresh & replaced)


@dataclass(frozen=True)
class _Built:
    """A model without its values, and what the folder's files call its parameters."""

    model: Any
    names: FileNames


def _assemble(folder: ModelFolder, lora: Lora | None, dtype: torch.dtype | None = None) -> _Built:
    """`dtype`: what a quantized weight is quantized from, and computes in."""
    base = _from_config(folder)
    with contextlib.ExitStack() as undo:
        if folder.quantization is not None:
            with contextlib.ExitStack() as opened:
                stored = opened.enter_context(open_weights(folder.path)) if folder.has_weights else {}
                stored_layers(base, folder.quantization, stored, undo)
        names = _file_names(folder, base)
        if folder.quantize is not None:
            quantize_layers(base, folder.quantize, undo, dtype)
        undo.pop_all()
    if folder.adapter is None:
        return _Built(base if lora is None else _with_lora(base, folder, lora, names), names)
    if lora is not None:
        raise ConfigError(
            f"{folder.adapter} is an adapter already, which goes on training with its own rank and targets: leave "
            f"lora out. A new one is for its base, {folder.path}, or for a merged folder"
        )
    from peft import PeftConfig, get_peft_model

    with reading(str(folder.adapter / ADAPTER_CONFIG_NAME), "mend it, or save the adapter with peft anew"):
        config: Any = PeftConfig.from_pretrained(str(folder.adapter))
        config.inference_mode = False
        with plain_init(config):
            model = get_peft_model(base, config)
    file = AdapterFile(adapter_file(folder.adapter), adapter_file_names(model))
    return _Built(model, replace(names, adapter=file))


def _from_config(folder: ModelFolder) -> Any:
    model = model_of(folder.config, folder.task)
    model.config.use_cache = False  # a cache keeps views of a block's values from one forward to the next
    if model.can_generate() and folder.generation_file is not None:
        model.generation_config = generation_config(folder.generation_file)
    return model


def _with_lora(base: Any, folder: ModelFolder, lora: Lora, names: FileNames) -> Any:
    from peft import LoraConfig, TaskType, get_peft_model
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.constants import SEQ_CLS_HEAD_NAMES

    kinds = {CAUSAL: TaskType.CAUSAL_LM, CLASSIFY: TaskType.SEQ_CLS}
    # A parameter that begins with random numbers is trained whole, and so is in the adapter's file: no other file has
    # it.
    tied = set(base.all_tied_weights_keys)
    heads = sorted({name.rpartition(".")[0] for name in names.fresh - tied if name.endswith(".weight")})
    if folder.task == CLASSIFY:  # peft knows the last part of a classifier
        heads = [name for name in heads if not {*SEQ_CLS_HEAD_NAMES} & {*name.split(".")}]
    targets = Targets.of(base, lora.targets)
    settings: dict[str, Any] = {
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "lora_dropout": lora.dropout,
        "target_modules": targets.modules if lora.targets else "all-linear",
        "target_parameters": targets.parameters or None,
        "modules_to_save": heads or None,
        "exclude_modules": heads or None,
        "task_type": kinds.get(folder.task),
    }
    try:
        model = get_peft_model(base, LoraConfig(**settings))
    except ValueError as error:
        raise ConfigError(
            f"{folder.path} takes no adapter of rank {lora.rank} on {', '.join(lora.targets) or 'its linear layers'}: "
            f"{error}. It has {', '.join(targets.choices)}"
        ) from error
    targets.check(model)
    if folder.task == CAUSAL and isinstance(model.get_output_embeddings(), BaseTunerLayer):
        raise ConfigError(
            f"--lora-targets {' '.join(lora.targets)} has the output's layer among them. The loss takes that layer's "
            "own weight and would never train its adapter; leave the layer out"
        )
    return model


def _file_names(folder: ModelFolder, base: Any) -> FileNames:
    """As transformers renames and joins the tensors of the folder's files.

    Raises CheckpointError where parts are missing, ConfigError for tensors that it makes from others in another way.
    """
    known = dict.fromkeys(state_names(base), True)
    prefix = base.base_model_prefix
    if not folder.has_weights:  # files have what the config says that they are of
        is_whole = type(base).__name__ in (folder.config.architectures or ())
        return FileNames(fresh=frozenset(name for name in known if not (is_whole or name.startswith(f"{prefix}."))))
    with open_weights(folder.path) as stored:
        # Of another head's files: that head, and the pooler before it.
        of_files, made = transformers_names(
            base,
            known,
            stored,
            folder.path,
            lambda new: folder.task != CAUSAL and (not new.startswith(f"{prefix}.") or ".pooler." in new),
        )
        untie(base, of_files, stored, folder.path)
    has = {*of_files.values(), *made}
    # Heads are made for the task; whatever else is missing is an error of the load.
    fresh = [name for name in known if name not in has and not name.startswith(f"{prefix}.")]
    if folder.task == CLASSIFY:
        fresh += [name for name in known if name not in has and ".pooler." in name]
    return FileNames(of_files, frozenset() if folder.task == CAUSAL else frozenset(fresh), made=made)
