"""The model of a run or checkpoint as a folder that `from_pretrained` loads, without the script that trained it.

Owns where the files beside the weights come from, and the card. Changes nothing in the run, which may be alive. The
call: `export_run`.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from zero_offload.base.errors import CapacityError, ConfigError
from zero_offload.base.types import user_path
from zero_offload.checkpoint.format import Generation
from zero_offload.checkpoint.hf_export import AS_NAMED, FileForm, TensorEntry, export_saved, read_values, saved_buffers
from zero_offload.checkpoint.saved_generation import SavedGeneration, read_generation
from zero_offload.integrations.file_names import file_form
from zero_offload.integrations.generation_models import (
    GenerationValues,
    config_words,
    meta_model,
    write_merged,
    write_separate,
)
from zero_offload.runs.locate import alone, described, find_home, read_object
from zero_offload.storage.files.directory import RunDirectory
from zero_offload.storage.files.engines import open_engine
from zero_offload.storage.files.system import naming_errors

CONFIG_NAME, GENERATION_NAME, CARD = "config.json", "generation_config.json", "README.md"
ADAPTER_CONFIG_NAME = "adapter_config.json"
_TEMPLATES = "additional_chat_templates"
"""Folder of a tokenizer's chat templates but the default one."""
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tekken.json",
    "preprocessor_config.json",
    "processor_config.json",
)
_CLASSIFIER = "ForSequenceClassification"
_WORDS = ("tokenizer.json", "vocab.json", "vocab.txt", "tokenizer.model", "spiece.model", "sentencepiece.bpe.model")
"""One of these is a tokenizer."""


@dataclass(frozen=True)
class Exported:
    """Names of the files that were written."""

    generation: Generation
    user: str
    """The process that had the run meanwhile; empty without one."""
    num_tensors: int
    notes: tuple[str, ...]
    """Things that the folder lacks, a line each."""


def export_run(
    run_dir: Path,
    out: Path,
    number: int | None,
    dtype: torch.dtype | None,
    adapters: str | None,
    max_shard_bytes: int,
) -> Exported:
    """Write the model of a generation, the newest without a `number`, to a folder that is new or empty.

    `dtype` is what masters are rounded to, `adapters` one of `ADAPTERS`. Raises ConfigError where there is no such
    model, and what reading a generation raises.
    """
    write = partial(_write, run_dir=run_dir, out=out, dtype=dtype, adapters=adapters, max_shard_bytes=max_shard_bytes)
    return read_generation(find_home(run_dir), alone(), number, write)


def _write(
    generation: Generation,
    directories: list[RunDirectory],
    cleanup: contextlib.ExitStack,
    *,
    run_dir: Path,
    out: Path,
    dtype: torch.dtype | None,
    adapters: str | None,
    max_shard_bytes: int,
) -> Exported:
    engine = open_engine(num_drives=len(directories))
    cleanup.callback(engine.close)
    saved = SavedGeneration(generation, directories, engine)
    cleanup.callback(saved.close)
    sources = Sources(run_dir, generation)
    about = sources.about
    has_adapters = bool(about.get("adapters"))
    if adapters is not None and not has_adapters:
        raise ConfigError(f"--adapters {adapters} is of a model with adapters of peft, and {generation} has none")
    complete = partial(_complete, sources=sources, is_adapter=has_adapters and adapters != "merged")
    values = GenerationValues(saved, partial(read_values, saved))
    remarks: list[str] = []
    if not has_adapters:
        count = export_saved(saved, out, dtype, max_shard_bytes, complete, _form_of(about, remarks))
    elif adapters == "merged":
        count = write_merged(values, about, saved_buffers(saved), out, dtype, max_shard_bytes, complete)
    else:
        count = write_separate(values, about, saved_buffers(saved), out, dtype, complete)
    return Exported(generation, directories[0].user, count, (*sources.notes, *remarks))


def _form_of(about: Mapping[str, Any], remarks: list[str]) -> FileForm:
    """How transformers has the tensors of a model in files."""
    if about.get("package") != "transformers":
        return AS_NAMED
    try:
        return file_form(meta_model(about))
    except (ConfigError, CapacityError) as error:
        remarks.append(f"tensors have the model's names, which may not be those of transformers' own folders: {error}")
        return AS_NAMED


class Sources:
    """Where the files beside a run's weights come from."""

    def __init__(self, run_dir: Path, generation: Generation) -> None:
        self.generation = generation
        self.notes: list[str] = []
        # RUN may be a run directory, the states in it, or those of a trainer's checkpoint.
        near = [run_dir.absolute(), run_dir.absolute().parent]
        self._described = next((found for each in near if "identity" in (found := described(each))), {})
        identity = self._described.get("identity")
        identity = identity if isinstance(identity, dict) else {}
        base = Path(str(identity["model"])) if "method" in identity and "model" in identity else None
        given = [base] if base is not None and base.is_dir() else []
        given += [below for each in given if (below := _base_of(each)) is not None]
        self.base = given[-1] if given else None
        """The folder of weights of which `finetune` has trained the model, or an adapter that had begun elsewhere."""
        self._folders = [*near, *given]
        self.about: Mapping[str, Any] = generation.about
        if not self.about and base is not None and not identity.get("lora"):
            self.about = self._of_base(base, str(identity["method"]))

    def _of_base(self, base: Path, method: str) -> Mapping[str, Any]:
        """Of a run of `finetune` before generations said what their model is: what its folder says."""
        words = read_object(base / CONFIG_NAME)
        classes = words.get("architectures")
        if method not in ("auto", "sft", "dpo") or not isinstance(classes, list) or len(classes) != 1:
            return {}
        return {"package": "transformers", "class": classes[0], "config": words}

    @property
    def sizes(self) -> Mapping[str, Any] | None:
        """Of the model of `train`."""
        found = self._described.get("gpt")
        return found if isinstance(found, dict) else None

    def tokenizer(self) -> dict[str, Path]:
        """Files of the tokenizer, by name."""
        for folder in self._folders:
            if any((folder / name).is_file() for name in _WORDS):
                named = sorted(f"{_TEMPLATES}/{path.name}" for path in (folder / _TEMPLATES).glob("*.jinja"))
                return {name: folder / name for name in (*TOKENIZER_FILES, *named) if (folder / name).is_file()}
        return {}


def _base_of(adapter: Path) -> Path | None:
    """The folder of the base of an adapter's folder; None of another folder, and where it is not here."""
    name = read_object(adapter / ADAPTER_CONFIG_NAME).get("base_model_name_or_path")
    if not isinstance(name, str) or not name:
        return None
    places = [user_path(name, f"{adapter / ADAPTER_CONFIG_NAME}: base_model_name_or_path"), adapter / name]
    return next((place for place in places if place.is_dir()), None)


def _complete(folder: Path, entries: Sequence[TensorEntry], *, sources: Sources, is_adapter: bool) -> None:
    """Write what belongs beside the weights."""
    about = sources.about
    sources.notes.clear()
    with naming_errors("write", folder):
        if sources.sizes is not None:
            _put(folder / CONFIG_NAME, sources.sizes)
            sources.notes.append(_NO_CLASS)
        elif not about:
            sources.notes.append(_NO_CONFIG)
        elif not is_adapter:
            _put(folder / CONFIG_NAME, config_words(about, entries))
        elif sources.base is not None:
            words = read_object(folder / ADAPTER_CONFIG_NAME)
            _put(folder / ADAPTER_CONFIG_NAME, words | {"base_model_name_or_path": str(sources.base.absolute())})
        if is_adapter and str(about.get("class")).endswith(_CLASSIFIER):  # its classes, which the base does not have
            _put(folder / CONFIG_NAME, config_words(about, entries))
        if "generation_config" in about:
            _put(folder / GENERATION_NAME, about["generation_config"])
        if about:
            for name, path in (words := sources.tokenizer()).items():
                (folder / name).parent.mkdir(exist_ok=True)
                shutil.copyfile(path, folder / name)
            if not words and "vocab_size" in about["config"].get("text_config", about["config"]):
                sources.notes.append(_NO_TOKENIZER)
        (folder / CARD).write_text(_card(sources, entries, is_adapter=is_adapter), encoding="utf-8")


_NO_CLASS = (
    f"from_pretrained does not load it: transformers has no class for the model of `zero-offload train`, whose sizes "
    f"are in {CONFIG_NAME}. {CARD} has the lines that load it"
)
_NO_CONFIG = (
    f"there is no {CONFIG_NAME}: the model had no config that its generation could keep. Save it beside the weights "
    "before from_pretrained, or load them into the model by zo.load_pretrained(model, OUT)"
)
_NO_TOKENIZER = "no tokenizer was found beside the run; save it there too: tokenizer.save_pretrained(OUT)"


def _put(path: Path, words: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(words, indent=2) + "\n", encoding="utf-8")


def _card(sources: Sources, entries: Sequence[TensorEntry], *, is_adapter: bool) -> str:
    """README.md: what the folder has and how it is loaded, with no path of this machine."""
    about, generation = sources.about, sources.generation
    library = "peft" if is_adapter else "transformers" if about else "zero_offload"
    dtypes = ", ".join(sorted({str(entry.dtype).removeprefix("torch.") for entry in entries}))
    what = "Adapters" if is_adapter else f"{len(entries)} tensors ({dtypes})"
    of = f" of a `{about['class']}`" if about else ""
    lines = [
        "---", f"library_name: {library}", 'tags: ["zero_offload"]', "---", "", "# Exported weights", "",
        f"{what}{of} after {generation.step:,} optimizer steps, written by `zero-offload export`.", "",
        "## How to load it", "", "```python", *_loading(sources, is_adapter=is_adapter), "```", "",
    ]  # fmt: skip
    return "\n".join(lines)


def _loading(sources: Sources, *, is_adapter: bool) -> list[str]:
    about = sources.about
    if sources.sizes is not None:
        return [
            "import json", "import zero_offload as zo", "from zero_offload.cli.recipes.gpt import GPT, GPTConfig", "",
            'model = GPT(GPTConfig(**json.load(open("config.json"))))',
            "zo.offload(model, zo.OffloadConfig())", 'zo.load_pretrained(model, ".")',
        ]  # fmt: skip
    if not about:
        return ["import zero_offload as zo", "", 'zo.load_pretrained(model, ".")  # after zo.offload(model, config)']
    if is_adapter:
        named = about["config"].get("id2label") if str(about["class"]).endswith(_CLASSIFIER) else None
        labels = f", id2label={ ({int(number): each for number, each in named.items()})!r}" if named else ""
        return [
            "from peft import PeftModel", f"from transformers import {about['class']}", "",
            f'base = {about["class"]}.from_pretrained("path/to/the/base", dtype="auto"{labels})',
            'model = PeftModel.from_pretrained(base, ".")',
        ]  # fmt: skip
    return [
        f"from {about['package']} import {about['class']}", "",
        f'model = {about["class"]}.from_pretrained(".", dtype="auto")',
    ]  # fmt: skip
