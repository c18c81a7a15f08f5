"""What a fine-tuning run leaves in OUT: the weights of the best evaluation, and at the end the model with its card.

Owns OUT/best, the order in which files get their names in OUT, and the text of the model card. A kill at any moment
leaves in OUT either the model that was there, or one without its config, which loads nowhere, or the new one.

The calls: `Weights.keep` at an evaluation or at the end, on every rank; `Weights.publish`, on rank 0; `merge`, on every
rank; `Weights.clear`.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zero_offload.base.config import OffloadConfig
from zero_offload.base.errors import ZeroOffloadError
from zero_offload.cli.finetune.folder import ADAPTER_CONFIG_NAME, CONFIG_NAME, ModelFolder, build_model, open_folder
from zero_offload.cli.finetune.settings import FinetuneConfig
from zero_offload.integrations.pretrained import export_pretrained
from zero_offload.integrations.quantize import words_for
from zero_offload.model.api import close, need_runtime
from zero_offload.storage.files.directory import RunDirectory
from zero_offload.storage.files.system import naming_errors, replace_file

BEST, MERGED, CARD = "best", "merged", "README.md"
_LISTING = "listing.json"
_CONFIGS = (CONFIG_NAME, ADAPTER_CONFIG_NAME)
"""One of them makes a folder one that loads: it is the last to get its name, and the first to lose it."""
_WEIGHTS = ("model.safetensors", "model-*.safetensors", "model.safetensors.index.json", "adapter_model.safetensors")
_PACKAGES = ("zero_offload", "torch", "transformers", "peft", "trl", "datasets")


@dataclass(frozen=True)
class Weights:
    """The weights that a run keeps in OUT/best, by step."""

    out: Path

    def folder(self, step: int) -> Path:
        return self.out / BEST / f"step-{step}"

    def keep(self, model: nn.Module, step: int, also: Iterable[int] = ()) -> None:
        """Write those that the model has now, of an adapter its own; of others only those of `also` stay."""
        place, stays = self.folder(step), {self.folder(each).name for each in also}
        with need_runtime(model, "finetune").together("finetune"):
            if need_runtime(model, "finetune").ranks.rank == 0 and place.parent.is_dir():
                _delete(place.parent, stays)
        export_pretrained(model, place)

    def publish(self, step: int, card: str, folder: ModelFolder) -> None:
        """Give the files kept at a step their names in OUT, unless they have them, with the tokenizer's and a card."""
        place = self.folder(step)
        with naming_errors("write", self.out):
            if not place.is_dir():
                return replace_file(self.out / CARD, card.encode())
            if not (place / _LISTING).is_file():
                _complete(place, folder)
                names = sorted(each.name for each in place.iterdir())
                names = [*(name for name in names if name not in _CONFIGS), *(n for n in names if n in _CONFIGS)]
                replace_file(place / _LISTING, json.dumps(names).encode())
            names = json.loads((place / _LISTING).read_text())
            if all((place / name).exists() for name in names):  # nothing in OUT is of these weights yet
                self.withdraw()
            replace_file(self.out / CARD, card.encode())
            for name in names:
                if (place / name).exists():
                    os.replace(place / name, self.out / name)

    def withdraw(self) -> None:
        """Delete the model that OUT has, its config first."""
        for old in (each for pattern in (*_CONFIGS, *_WEIGHTS) for each in self.out.glob(pattern)):
            old.unlink()
        shutil.rmtree(self.out / MERGED, ignore_errors=True)

    def clear(self) -> None:
        """Delete what is left in OUT/best."""
        if (self.out / BEST).is_dir():
            _delete(self.out / BEST, set())
            shutil.rmtree(self.out / BEST, ignore_errors=True)

    def merge(self, offload: OffloadConfig, *, is_first: bool) -> None:
        """Write OUT/merged: the base with the adapter in OUT merged into it. Every rank calls."""
        folder, place = open_folder(self.out), self.out / BEST / MERGED
        if is_first:
            shutil.rmtree(place, ignore_errors=True)
        with reading(folder, offload, is_first=is_first) as model:
            export_pretrained(model, place, adapters="merged")
        if is_first:
            with naming_errors("write", self.out / MERGED):
                folder.tokenizer.save_pretrained(place)
                shutil.rmtree(self.out / MERGED, ignore_errors=True)
                os.replace(place, self.out / MERGED)


@contextmanager
def reading(folder: ModelFolder, offload: OffloadConfig, *, is_first: bool) -> Iterator[nn.Module]:
    """The folder's model beside the run's: not trained, and on drives if there are any. Every rank calls."""
    places = [path / "read" for path in offload.nvme_dirs]
    config = replace(
        offload, params="nvme" if places else "cpu", grads="cpu", optimizer="cpu", nvme=places, nvme_capacity=None,
        durability="scratch", existing="refuse", generation=None, commit_every=1,
    )  # fmt: skip
    model = build_model(folder, config, None, trains=False)
    try:
        yield model
    finally:
        close(model)
        for place in places if is_first else ():
            with suppress(OSError, ZeroOffloadError), RunDirectory.open(place) as directory:
                directory.close_and_remove()


def _complete(place: Path, folder: ModelFolder) -> None:
    """Beside weights and config: what words are, and how text is generated."""
    folder.tokenizer.save_pretrained(place)
    if (config := place / ADAPTER_CONFIG_NAME).is_file():
        words = json.loads(config.read_text(encoding="utf-8"))
        words["base_model_name_or_path"] = str(folder.path.absolute())
        replace_file(config, json.dumps(words, indent=2).encode())
    if (config := place / CONFIG_NAME).is_file():
        words = json.loads(config.read_text(encoding="utf-8"))
        words["use_cache"] = getattr(folder.config, "use_cache", True)  # training has none
        replace_file(config, json.dumps(words, indent=2).encode())
    (place / CARD).unlink(missing_ok=True)  # peft writes one that says nothing
    generation = folder.path / "generation_config.json"
    if generation.is_file() and not (place / generation.name).is_file():
        shutil.copyfile(generation, place / generation.name)


def _delete(parent: Path, stays: Set[str]) -> None:
    """Delete what is in a folder, but `stays`. Each loses its name first: half of it is not taken for weights."""
    aside = parent / "deleted"
    for each in [aside, *parent.iterdir()]:
        if each.name not in stays and each.is_dir():
            if each != aside:
                os.replace(each, aside)
            shutil.rmtree(aside)


def is_published(out: Path) -> bool:
    """True if OUT has a config, and so all files of a model."""
    return any((out / name).is_file() for name in _CONFIGS)


# The model card


def model_card(
    config: FinetuneConfig, folder: ModelFolder, evaluations: Sequence[Mapping[str, Any]], facts: Mapping[str, Any]
) -> str:
    """README.md of OUT. `facts`: lines of the table of results; `evaluations`: rows with step, loss and perplexity."""
    is_adapter = bool(config.lora) or folder.adapter is not None
    head = {
        "base_model": _base_name(folder),
        "library_name": "peft" if is_adapter else "transformers",
        "pipeline_tag": {"sft": "text-generation", "dpo": "text-generation", "mlm": "fill-mask"}.get(
            config.method, "text-classification"
        ),
        "datasets": [Path(each).name for each in config.data],
        "tags": ["zero_offload", config.method, *(["lora"] if is_adapter else [])],
    }
    words = [f"{key}: {json.dumps(value, ensure_ascii=False)}" for key, value in head.items()]
    settings = {
        name: value for name, value in config.arguments().items() if value not in (None, [], "", 0, False, "auto")
    }
    lines = [
        "---", *words, "---", "",
        f"# {config.out.absolute().name}", "",
        f"{'An adapter (LoRA) of' if is_adapter else 'All parameters of'} `{_base_name(folder)}`, trained by "
        f"`zero-offload finetune` with the method `{config.method}` on {', '.join(head['datasets'])}.", "",
        "## Results", "", "| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in facts.items()), "",
        *_table(evaluations),
        *_on_quantized(config), "## How to load it", "",
        "```python", *_loading(config, folder, is_adapter=is_adapter), "```", "",
        "## Settings", "", "| setting | value |", "|---|---|",
        *(f"| {name} | `{_cell(value)}` |" for name, value in settings.items()), "",
        "## Versions", "", ", ".join(f"{name} {version(name)}" for name in _PACKAGES), "",
    ]  # fmt: skip
    return "\n".join(lines)


def _base_name(folder: ModelFolder) -> str:
    return str(folder.path.absolute())


def _table(evaluations: Sequence[Mapping[str, Any]]) -> list[str]:
    if not evaluations:
        return []
    has_more = "perplexity" in evaluations[0]
    rows = [
        f"| {each['step']} | {each['loss']:.4f} |" + (f" {each['perplexity']:.2f} |" if has_more else "")
        for each in evaluations
    ]
    head = "| step | evaluation loss |" + " perplexity |" * has_more
    return [head, "|---:|---:|" + "---:|" * has_more, *rows, ""]


def _on_quantized(config: FinetuneConfig) -> list[str]:
    if not config.quantize:
        return []
    merged = f" `{MERGED}/` has it merged into the weights before they were quantized." if config.merge else ""
    return [
        f"The base's linear layers were quantized ({config.quantize}) while the adapter was trained. On a base that is "
        f"not, losses are slightly others.{merged} `zero-offload chat` and `evaluate` take "
        f"`--quantize {config.quantize}`.",
        "",
    ]


def _loading(config: FinetuneConfig, folder: ModelFolder, *, is_adapter: bool) -> list[str]:
    """Python that loads OUT. A base that was quantized by the run is quantized in the same way."""
    kind = {"mlm": "MaskedLM", "classify": "SequenceClassification"}.get(config.method, "CausalLM")
    place, base = (
        json.dumps(str(path), ensure_ascii=False) for path in (config.out.absolute(), folder.path.absolute())
    )
    tokenizer = f"tokenizer = AutoTokenizer.from_pretrained({place})"
    if config.quantize:
        dtype = getattr(torch, config.offload.compute_dtype_name)
        imports, words = words_for(config.quantize, dtype)
        labels = f", num_labels={len(folder.config.id2label)}" if config.method == "classify" else ""
        name = f"AutoModelFor{kind}"
        return [
            "import torch", "from peft import PeftModel", *imports, f"from transformers import AutoTokenizer, {name}",
            "", f"config = {words}",
            f"base = {name}.from_pretrained({base}, dtype={dtype}, quantization_config=config{labels})",
            f"model = PeftModel.from_pretrained(base, {place})", tokenizer,
        ]  # fmt: skip
    name, package = (f"AutoPeftModelFor{kind}", "peft") if is_adapter else (f"AutoModelFor{kind}", "transformers")
    if is_adapter and config.method == "mlm":
        name = "AutoPeftModel"
    return [
        f"from {package} import {name}",
        "from transformers import AutoTokenizer",
        "",
        f'model = {name}.from_pretrained({place}, dtype="auto")',
        tokenizer,
    ]


def _cell(value: object) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")
