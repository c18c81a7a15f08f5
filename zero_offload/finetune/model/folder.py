"""A local Hugging Face folder, and all that can be wrong with it.

Owns the checks, each of which ends in one error that says what to do. No weights are read. The call: `open_folder`;
build.py makes the model. transformers is imported inside of it.
"""

from __future__ import annotations

import copy
import importlib.util
import logging
import re
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from zero_offload.base.errors import CapacityError, ConfigError
from zero_offload.base.problems import did_you_mean
from zero_offload.base.types import user_path
from zero_offload.checkpoint.hf_files import INDEX_NAME, SINGLE_NAME, open_weights
from zero_offload.finetune.choices import CAUSAL, CLASSIFY, KINDS, MASKED
from zero_offload.finetune.model.text_generation import check_generation
from zero_offload.finetune.model.tokenizer import read_tokenizer
from zero_offload.integrations.adapter_kinds import check_adapter_words, reads_base
from zero_offload.integrations.gate import check_sizes, culprit_of, read_object, reading
from zero_offload.integrations.quantize import need_library, stored_quantization
from zero_offload.plan.hints import Hints
from zero_offload.plan.shapes import EXPERT_COUNTS

CONFIG_NAME, ADAPTER_CONFIG_NAME, GENERATION_NAME = "config.json", "adapter_config.json", "generation_config.json"
_PACKAGES = ("transformers", "trl", "peft", "datasets")
_LOUD = ("torchao", "bitsandbytes", "torch.utils._pytree")
"""Loggers that warn when they are imported."""
_PEFT_SAYS = ("The following (rank|alpha)_pattern keys did not match", "Setting `save_embedding_layers` to `True`")
"""Of ranks of experts, which it looks for among layers alone and uses; and of what an embedding's adapter needs."""
_ONE_CLASS = "single_label_classification"
_TRIAL_TOKENS = 4
"""Of the forward that a config is tried with."""
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True)
class ModelFolder:
    """A folder that has passed the checks."""

    path: Path
    """Where the weights are; of an adapter, where those of its base are."""
    adapter: Path | None
    """The adapter's folder, if that was given."""
    config: Any
    tokenizer: Any
    """None if it is missing and was not needed."""
    task: str
    has_weights: bool = True
    """False if they are missing and were not needed: the model can be planned."""
    quantize: str | None = None
    """The form that its linear layers take while weights are read; see `zo.load_pretrained`."""
    quantization: Mapping[str, Any] | None = None
    """How its weights are quantized already, in the words of its config."""
    group_size: int = 0
    """Experts that are fetched together, where they are frozen; 0 is chosen by their size."""

    @property
    def has_experts(self) -> bool:
        """True of a mixture of experts, by its config."""
        return Hints(self.config).number(*EXPERT_COUNTS) > 0

    @property
    def is_quantized(self) -> bool:
        """True if the linear layers of its model are quantized."""
        return self.quantize is not None or self.quantization is not None

    @property
    def generation_file(self) -> Path | None:
        """The generation config of its adapter, or of its base; None where neither has one."""
        files = [each / GENERATION_NAME for each in (self.adapter, self.path) if each is not None]
        return next((each for each in files if each.is_file()), None)

    def check_generation(self, **settings: Any) -> None:
        """Raise ConfigError where no text can be written by its generation config; see `check_generation`."""
        if self.generation_file is not None:
            num_words = Hints(self.config).number("vocab_size") or len(self.tokenizer)
            check_generation(self.generation_file, self.tokenizer, num_words, **settings)

    def with_labels(self, labels: Sequence[str]) -> ModelFolder:
        """Its head classifies into these."""
        config = copy.deepcopy(self.config)
        config.id2label = dict(enumerate(labels))
        config.label2id = {label: index for index, label in enumerate(labels)}
        return replace(self, config=config)

    @property
    def num_positions(self) -> int:
        """The most tokens that the model takes."""
        limits = [Hints(self.config).number("max_position_embeddings")]
        if self.task != CAUSAL and self.tokenizer is not None:
            limits.append(self.tokenizer.model_max_length)
        return min((each for each in limits if each), default=sys.maxsize)


def need_packages() -> None:
    """Raise CapacityError if a package of the extra is not installed."""
    if missing := [name for name in _PACKAGES if importlib.util.find_spec(name) is None]:
        raise CapacityError(
            f"this command needs {', '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not installed; "
            "pip install 'zero_offload[finetune]'"
        )


def quiet_libraries() -> None:
    """Keep away from what a command prints what its user can do nothing about: bars, advice, names that will change.

    Other warnings stay. Call it before models are built: transformers then imports torchao, which warns of kernels for
    other machines. Raises CapacityError if a package of the extra is not installed.
    """
    need_packages()
    import datasets
    from transformers.utils import logging as transformers_logging

    for name in _LOUD:
        logging.getLogger(name).setLevel(logging.ERROR)
    words: Any = transformers_logging
    words.set_verbosity_error()
    words.disable_progress_bar()
    datasets.logging.set_verbosity_error()
    datasets.disable_progress_bars()
    for kind in (FutureWarning, DeprecationWarning, PendingDeprecationWarning):
        warnings.filterwarnings("ignore", category=kind)
    for message in _PEFT_SAYS:
        warnings.filterwarnings("ignore", message)


# The folder


def open_folder(
    path: str | Path,
    task: str = CAUSAL,
    *,
    quantize: str | None = None,
    group_size: int = 0,
    needs_weights: bool = True,
    needs_tokenizer: bool = True,
) -> ModelFolder:
    """Check a folder of weights, or of an adapter, and read its config and tokenizer; no weights are read.

    `task` is "causal", "masked" or "classify"; see `ModelFolder` for `quantize` and `group_size`. For a plan the
    model's weights and the tokenizer may be missing; what is there is checked. Raises ConfigError, CheckpointError or
    IntegrityError for what is wrong, and CapacityError if a package is not installed.
    """
    need_packages()
    if quantize is not None:
        need_library(quantize)
    given = user_path(path, "the name of a model's folder").absolute()
    _check_is_folder(given, str(path))
    adapter = given if (given / ADAPTER_CONFIG_NAME).is_file() else None
    folder = given if adapter is None else _base_of(given)
    has_weights = _check_files(folder, needs_weights)
    quantization = stored_quantization(folder)
    if adapter is not None:
        _check_adapter(adapter, folder, quantize or ("bitsandbytes" if quantization else None))
    if quantize is not None and quantization is not None:
        raise ConfigError(f"{folder} is quantized already, by bitsandbytes; leave --quantize {quantize} out")
    config = _read_config(folder, task)
    # A file that is missing or cut short is an error here, before anything takes time.
    for weights in (*((folder,) if has_weights else ()), *(() if adapter is None else (adapter_file(adapter),))):
        with open_weights(weights):
            pass
    tokenizer = read_tokenizer([each for each in (adapter, folder) if each is not None], config, needs_tokenizer)
    if task == CLASSIFY and config.pad_token_id is None and tokenizer is not None:
        config.pad_token_id = tokenizer.pad_token_id
    found = ModelFolder(folder, adapter, config, tokenizer, task, has_weights, quantize, quantization, group_size)
    labels = _labels_of(adapter) if adapter is not None and task == CLASSIFY else []
    return found.with_labels(labels) if labels else found


def _labels_of(adapter: Path) -> list[str]:
    """The classes that an adapter's folder names: its base has other ones. Empty where it names none."""
    file = adapter / CONFIG_NAME
    return _class_names(read_object(file) if file.is_file() else {}, file)


def _class_names(words: Mapping[str, Any], file: Path) -> list[str]:
    """The classes that a config names. Empty where it names none."""
    named = words.get("id2label")
    if named is None:
        return []
    numbers = [str(number) for number in range(len(named))] if isinstance(named, dict) else []
    if not numbers or {*named} != {*numbers} or not all(isinstance(label, str) for label in named.values()):
        raise ConfigError(f"{file}: id2label={named!r} does not name classes by the numbers from 0 on; mend it")
    return [named[number] for number in numbers]


def check_training(folder: ModelFolder, *, has_adapter: bool, merge: bool, in_turns: bool) -> None:
    """Raise ConfigError where nothing would be trained, or nothing could be merged. `in_turns`: blocks are trained
    so."""
    if in_turns and folder.adapter is not None:
        raise ConfigError(
            f"--live-blocks trains the blocks of a model, and {folder.adapter} is an adapter, whose base is frozen; "
            f"give the base, {folder.path}, or leave it out"
        )
    if merge and not has_adapter:
        raise ConfigError("--merge writes the base with an adapter merged into it; add --lora RANK, or leave it out")
    if merge and folder.quantization is not None:
        raise ConfigError(
            f"--merge writes the base with an adapter merged into it, and the weights of {folder.path} are quantized. "
            "Give the folder of the model that was quantized with --quantize nf4, or leave --merge out"
        )
    if folder.is_quantized and not has_adapter:
        what = f"--quantize {folder.quantize}" if folder.quantize else f"{folder.path} is quantized, which"
        raise ConfigError(
            f"{what} freezes the weights that are quantized, and nothing would be trained; add --lora RANK, such as "
            f"--lora 16{', or leave it out' if folder.quantize else ''}"
        )


def check_chat_template(folder: ModelFolder) -> None:
    """Raise ConfigError if the tokenizer cannot write conversations."""
    if folder.tokenizer.chat_template is None:
        raise ConfigError(
            f"the tokenizer of {folder.path} has no chat template, so conversations cannot be written in its words. "
            f"Copy chat_template.jinja, or tokenizer_config.json, of the model's instruct version to {folder.path}; "
            "or give prompt/completion pairs or text as data"
        )


def _check_is_folder(path: Path, given: str) -> None:
    if path.is_dir():
        return
    if path.suffix == ".gguf":
        raise _gguf(path)
    if path.exists():
        raise ConfigError(
            f"{path} is a file; give the folder with {CONFIG_NAME} and *.safetensors, here perhaps {path.parent}"
        )
    how = f"{given} does not exist"
    beside = [each.name for each in path.parent.iterdir() if each.is_dir()] if path.parent.is_dir() else []
    if hint := did_you_mean(path.name, beside, f"{given.removesuffix(path.name)}"):
        raise ConfigError(f"{how}; {hint.strip()}")
    if _HUB_NAME.fullmatch(given) and not path.parent.exists():
        raise ConfigError(f"{how} here. {_of_hub(given)}")
    raise ConfigError(f"{how}; give a folder with {CONFIG_NAME} and *.safetensors")


def _of_hub(name: str) -> str:
    """How a model of the hub becomes a folder here."""
    here = Path(name.split("/")[-1])
    if here.is_dir():
        return f"Give ./{here}, if that is where it was downloaded to"
    return f"Download the model from huggingface.co: hf download {name} --local-dir ./{here}; then give ./{here}"


def _gguf(path: Path) -> ConfigError:
    return ConfigError(
        f"{path} is a GGUF file: quantized weights for inference, which cannot be trained. Give the folder of "
        "safetensors that it was made of: hf download ORG/NAME --local-dir ./NAME (without -GGUF in the name)"
    )


def _base_of(adapter: Path) -> Path:
    """The folder of an adapter's base."""
    words = read_object(adapter / ADAPTER_CONFIG_NAME)
    name = words.get("base_model_name_or_path")
    if not isinstance(name, str) or not name:
        raise ConfigError(
            f"{adapter / ADAPTER_CONFIG_NAME} does not name the model that the adapter belongs to; write its folder "
            'there as "base_model_name_or_path"'
        )
    found = [user_path(name, f"{adapter / ADAPTER_CONFIG_NAME}: base_model_name_or_path"), adapter / name]
    for path in found:
        if path.is_dir():
            if not (path / CONFIG_NAME).is_file() and (path / ADAPTER_CONFIG_NAME).is_file():
                raise ConfigError(
                    f"{adapter} is an adapter of {path}, which is an adapter itself. Merge that one first, by "
                    "zero-offload finetune --merge or peft's merge_and_unload, and write the merged folder into "
                    f'{adapter / ADAPTER_CONFIG_NAME}, "base_model_name_or_path"'
                )
            return path
    what = f"{adapter} is an adapter of {name}, which is not a folder here"
    if _HUB_NAME.fullmatch(name):
        raise ConfigError(f"{what}; download it: hf download {name} --local-dir {name}")
    raise ConfigError(
        f'{what}; put it there, or write where it is into {adapter / ADAPTER_CONFIG_NAME}, "base_model_name_or_path"'
    )


def _check_adapter(adapter: Path, base: Path, quantized: str | None) -> None:
    """Raise ConfigError for an adapter that is not loaded here, or not over such weights."""
    file = adapter / ADAPTER_CONFIG_NAME
    words = read_object(file)
    check_adapter_words(words, file)
    if quantized and reads_base(words):
        raise ConfigError(
            f"{file}: init_lora_weights={words['init_lora_weights']!r} takes a part out of the base's weights. That "
            f"needs weights that are not quantized ({quantized}); leave --quantize out, and give a base in 16 or 32 "
            f"bits ({base})"
        )


def adapter_file(adapter: Path) -> Path:
    """The weights of an adapter."""
    file = adapter / "adapter_model.safetensors"
    if not file.is_file() and (adapter / "adapter_model.bin").is_file():
        raise ConfigError(
            f"{adapter} has its values as adapter_model.bin, which is pickled: loading it runs code. Convert it once: "
            'python -c "import torch; from safetensors.torch import save_file; save_file(torch.load('
            f"'{adapter / 'adapter_model.bin'}', weights_only=True), '{file}')\""
        )
    if not file.is_file():
        raise ConfigError(
            f"{adapter} has an {ADAPTER_CONFIG_NAME} and no {file.name}; get it, or save it with peft anew"
        )
    return file


def _check_files(folder: Path, needs_weights: bool) -> bool:
    """True if a folder has weights. Raises ConfigError if it has no config, or weights in another format."""
    names = sorted(entry.name for entry in folder.iterdir())

    def having(*ends: str) -> list[str]:
        return [name for name in names if name.endswith(ends)]

    # Other formats and kinds of folders first: their remedies say more than a missing file.
    safetensors, pickled, gguf = having(".safetensors"), having(".bin", ".pth", ".pt", ".ckpt"), having(".gguf")
    if gguf and not safetensors:
        raise _gguf(folder / gguf[0])
    if not names:
        raise ConfigError(f"{folder} is empty; give a folder with {CONFIG_NAME} and *.safetensors")
    if snapshots := sorted(folder.glob("snapshots/*/")):
        raise ConfigError(f"{folder} is a cache of downloads; give the folder in it: {snapshots[-1]}")
    if CONFIG_NAME not in names and {"run.toml", "metrics.jsonl"} <= {*names}:
        raise ConfigError(
            f"{folder} has no model yet: it is a run without its end. It goes on by zero-offload finetune --config "
            f"{folder / 'run.toml'}"
        )
    # Without a config, a folder inside may be the model.
    if CONFIG_NAME not in names:
        inner = [
            path.parent for name in (CONFIG_NAME, ADAPTER_CONFIG_NAME) for path in sorted(folder.glob(f"*/{name}"))
        ]
        hint = f"; give {inner[0]}" if inner else "; get it from where the weights are from"
        raise ConfigError(f"{folder} has no {CONFIG_NAME}, so its kind of model is not known{hint}")
    # Weights in files that can be read without running code.
    if pickled and not safetensors:
        raise ConfigError(
            f"{folder} has its weights as {pickled[0]}, which is pickled: loading it runs code. Convert it once, where "
            f'memory holds the model: python -c "from transformers import AutoModel; AutoModel.from_pretrained('
            f"'{folder}').save_pretrained('{folder}-safetensors')\"; then copy the tokenizer's files there"
        )
    if not safetensors:
        if not needs_weights:
            return False
        raise ConfigError(
            f"{folder} has a {CONFIG_NAME} and no *.safetensors: no weights; get them: "
            f"hf download ORG/NAME --local-dir {folder}"
        )
    if not {SINGLE_NAME, INDEX_NAME} & set(names):
        raise ConfigError(
            f"{folder} has {', '.join(safetensors[:3])}, and neither {SINGLE_NAME} nor {INDEX_NAME}, which says what "
            "is in which file; get it from where the weights are from"
        )
    return True


def _read_config(folder: Path, task: str) -> Any:
    import transformers
    from transformers import AutoConfig

    file = folder / CONFIG_NAME
    words = read_object(file)
    check_sizes(file, words)
    kind, classes = words.get("model_type"), words.get("architectures")
    if classes is not None and not (isinstance(classes, list) and all(isinstance(each, str) for each in classes)):
        raise ConfigError(f"{file}: architectures is {classes!r}, not a list of names of classes; mend it")
    if not isinstance(kind, str) or kind not in transformers.CONFIG_MAPPING:
        raise ConfigError(_unknown_kind(file, kind, words, transformers.__version__))
    with reading(str(file), "mend it, or get it again", lambda: culprit_of(words, _usual(kind), _config_of)):
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    _check_task(folder, config, task)
    if task == CLASSIFY:
        _check_classes(file, words, config)
    _check_model(folder, words, config, task)
    return config


def _unknown_kind(file: Path, kind: Any, words: Mapping[str, Any], version: str) -> str:
    if kind is None:
        return f"{file} has no model_type, so its kind is unknown; get the folder again"
    if "auto_map" in words:
        return (
            f"{file.parent} brings its own code for {kind!r} models, which is not run; transformers {version} has no "
            "class for it. Use a version of the model that transformers knows (pip install -U transformers may "
            "have it)"
        )
    return (
        f"{file.parent} is a {kind!r} model, which transformers {version} does not know; pip install -U transformers, "
        "or give another model"
    )


def _config_of(words: Mapping[str, Any]) -> Any:
    from transformers import AutoConfig

    return AutoConfig.for_model(**words)


def _usual(kind: str) -> dict[str, Any]:
    """Values of a config's fields without a file."""
    import transformers

    found: dict[str, Any] = transformers.CONFIG_MAPPING[kind]().to_dict()
    return found


def _check_model(folder: Path, words: Mapping[str, Any], config: Any, task: str) -> None:
    """Raise ConfigError where a config's values make no model, or none that computes: a trial without memory.

    A model that asks for values cannot be tried so: torch then says that meta has none. Of all else that is raised the
    config is at fault if one usual value mends it.
    """
    file, kind = folder / CONFIG_NAME, str(words["model_type"])

    def trial(given: Mapping[str, Any]) -> None:
        with torch.device("meta"):
            _forward(model_of(_config_of(given), task))

    def culprit() -> str:
        return culprit_of(words, _usual(kind), trial)

    with reading(str(file), "mend it, or get it again", culprit), torch.device("meta"):
        model = model_of(config, task)
    try:
        _forward(model)
    except Exception as error:  # of any model's code
        is_about_meta = "meta" in str(error).lower()
        if not is_about_meta and (name := culprit()):
            said = " ".join(str(error).split())[:300]
            raise ConfigError(f"{file}, {name}: {said} ({type(error).__name__}); mend it, or get it again") from error


def _forward(model: Any) -> None:
    model.config.get_text_config().use_cache = True  # without a cache some look at values, of which there are none
    with torch.device("meta"), torch.no_grad():
        # On meta experts multiply in bf16 alone.
        model.to("meta", torch.bfloat16)(input_ids=torch.zeros((1, _TRIAL_TOKENS), dtype=torch.int64, device="meta"))


def model_of(config: Any, task: str) -> Any:
    """The model that a config is of, for a task, with values as it draws them; in a context of meta it has none."""
    import transformers

    auto: Any = {
        CAUSAL: transformers.AutoModelForCausalLM,
        MASKED: transformers.AutoModelForMaskedLM,
        CLASSIFY: transformers.AutoModelForSequenceClassification,
    }[task]
    # Heads and adapters are drawn in fp32; values of the files become what `offload` computes with.
    return auto.from_config(copy.deepcopy(config), dtype=torch.float32)


OWN_LOSS = frozenset((
    "bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "cpmant", "marian", "mbart", "musicgen",
    "musicgen_melody", "mvp", "pegasus", "plbart", "prophetnet", "trocr", "whisper", "xlm", "xlnet",
))  # fmt: skip
"""Causal models, by `model_type`, that do not divide their loss by the number of labels that Trainer gives them."""


def _check_task(folder: Path, config: Any, task: str) -> None:
    if task not in KINDS:
        raise ConfigError(f"task={task!r} is unknown; use one of {', '.join(KINDS)}")
    known, kind, classes = _mapping(task), config.model_type, config.architectures or []
    causal = any("CausalLM" in name or "LMHead" in name for name in classes)
    if getattr(config, "is_encoder_decoder", False) and task != CLASSIFY:
        raise ConfigError(f"{folder} is a {kind!r} model, an encoder and a decoder; only one of both is trained here")
    is_encoder = type(config) in _mapping(MASKED) and not causal and not getattr(config, "is_decoder", False)
    if task == CAUSAL and is_encoder:
        raise ConfigError(
            f"{folder} is a {kind!r} encoder ({', '.join(classes) or 'no architectures'}), which does not write text. "
            "Give a causal model, or train the encoder: --method mlm on text, --method classify on labelled text"
        )
    if task == CAUSAL and kind in OWN_LOSS:
        raise ConfigError(
            f"{folder} is a {kind!r} model. Its class in transformers averages the loss within a batch by itself, so "
            "micro-batches would add up to a wrong loss; give another causal model"
        )
    if type(config) not in known:
        hint = "give another folder" if type(config) not in _mapping(CAUSAL) else "a causal model takes sft or dpo"
        raise ConfigError(f"transformers has no {task} model of {kind!r}, which {folder} is; {hint}")


def _check_classes(file: Path, words: Mapping[str, Any], config: Any) -> None:
    """Raise ConfigError for a classifier whose rows do not have one class each, of several."""
    _class_names(words, file)
    if config.problem_type not in (None, _ONE_CLASS):
        raise ConfigError(
            f"{file}: problem_type is {config.problem_type!r}, and a row has exactly one class here; write "
            f"{_ONE_CLASS!r}, or leave it out"
        )
    if config.num_labels < 2 and is_classifier(config):
        raise ConfigError(f"{file}: the model has {config.num_labels} class, and a classifier has two or more")


def is_classifier(config: Any) -> bool:
    """True if its folder has a head that classifies."""
    return any("ForSequenceClassification" in name for name in config.architectures or ())


def _mapping(task: str) -> Any:
    import transformers

    return {
        CAUSAL: transformers.MODEL_FOR_CAUSAL_LM_MAPPING,
        MASKED: transformers.MODEL_FOR_MASKED_LM_MAPPING,
        CLASSIFY: transformers.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING,
    }[task]


def class_name(folder: ModelFolder) -> str:
    """The class of its model; of several for a config, as transformers chooses."""
    found = _mapping(folder.task)[type(folder.config)]
    names: list[str] = [each.__name__ for each in (found if isinstance(found, list | tuple) else (found,))]
    return next((name for name in folder.config.architectures or () if name in names), names[0])
