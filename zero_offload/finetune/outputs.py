"""The outputs of a fine-tuning run in OUT: the weights of the best evaluation, and at the end the model with its card.

Owns OUT/best, the order in which files get their names in OUT, and the text of the model card. A kill at any moment
leaves in OUT the model that was there, the new one, or one without its config, which loads nowhere.

The calls: `Weights.write` at an evaluation or at the end, on every rank; `Weights.publish`, on rank 0; `merge`, on
every rank; `Weights.clear`.
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
from zero_offload.base.problems import warn_user
from zero_offload.checkpoint.run_dir import RUN_FILE, RunDir, read_json
from zero_offload.finetune.choices import CLASSIFY
from zero_offload.finetune.model.build import build_model
from zero_offload.finetune.model.folder import ADAPTER_CONFIG_NAME, CONFIG_NAME, ModelFolder, open_folder
from zero_offload.finetune.settings import FinetuneConfig
from zero_offload.integrations.pretrained import export_pretrained
from zero_offload.integrations.quantize import words_for
from zero_offload.model.about import config_file
from zero_offload.model.api import close, need_runtime
from zero_offload.runs.locate import read_object
from zero_offload.storage.files.directory import RunDirectory
from zero_offload.storage.files.own_files import (
    LIST_NAME,
    MODEL_NAME,
    all_files,
    delete,
    listed,
    move_aside,
    names_in,
    of_kinds,
    read_list,
    write_list,
)
from zero_offload.storage.files.system import naming_errors, replace_file

BEST, MERGED, CARD = "best", "merged", "README.md"
_LISTING = "listing.json"
_CONFIGS = (CONFIG_NAME, ADAPTER_CONFIG_NAME)
"""One of them makes a folder loadable: it is the last to get its name, and the first to lose it."""
_PUBLISHED = "published"
"""The key in run.json of the files that a run has put into OUT for its user."""
_PACKAGES = ("zero_offload", "torch", "transformers", "peft", "trl", "datasets")


@dataclass(frozen=True)
class Weights:
    """The weights that a run keeps in OUT/best, by step."""

    out: Path

    def folder(self, step: int) -> Path:
        return self.out / BEST / f"step-{step}"

    def has(self, step: int) -> bool:
        """True if OUT/best has all of them, or OUT is being given them."""
        place = self.folder(step)
        if names := read_list(place):
            return (place / _LISTING).is_file() or all((place / name).is_file() for name in names)
        return any((place / name).is_file() for name in (*_CONFIGS, _LISTING))  # it got its name when it was whole

    def write(self, model: nn.Module, step: int, also: Iterable[int] = ()) -> None:
        """Write those that the model has now, of an adapter its own; of others only those of `also` stay."""
        owner, stays = need_runtime(model, "finetune"), {f"step-{each}" for each in also}
        with owner.together("finetune"):
            if owner.ranks.rank == 0:
                self.clear(stays)
                _say_aside(move_aside(self.folder(step)))
        export_pretrained(model, self.folder(step))
        with owner.together("finetune"):
            if owner.ranks.rank == 0:
                write_list(self.folder(step))

    def publish(self, step: int, card: str, folder: ModelFolder) -> None:
        """Give the files kept at a step their names in OUT, unless they have them, with the tokenizer's and a card."""
        place = self.folder(step)
        with naming_errors("write", self.out):
            if not place.is_dir():
                return replace_file(self.out / CARD, card.encode())
            if not (place / _LISTING).is_file():
                own = read_list(place) or of_kinds(place, MODEL_NAME)
                others = {*all_files(place)} - {*own}
                _complete(place, folder)
                names = [name for name in all_files(place) if name not in others]
                names = [*(name for name in names if name not in _CONFIGS), *(n for n in names if n in _CONFIGS)]
                write_list(place, [*names, _LISTING])
                replace_file(place / _LISTING, json.dumps(names).encode())
            names = json.loads((place / _LISTING).read_text())
            if all((place / name).exists() for name in names):  # nothing in OUT is of these weights yet
                self.withdraw()
                for name in (CARD, *names):
                    _say_aside(move_aside(self.out / name))
                _note_published(self.out, [CARD, *names])
            replace_file(self.out / CARD, card.encode())
            for name in names:
                if (place / name).exists():
                    (self.out / name).parent.mkdir(exist_ok=True)  # templates by names lie in a folder
                    os.replace(place / name, self.out / name)

    def withdraw(self) -> None:
        """Delete the model that a run has put into OUT, its config first."""
        names = published(self.out)
        first = [name for name in names if Path(name).name in _CONFIGS]
        delete(self.out, [*first, *(name for name in names if name not in first)])
        if (self.out / MERGED).is_dir():
            left = all_files(self.out / MERGED)
            warn_user(f"{self.out / MERGED} keeps files that a run has not written: {', '.join(left) or 'a link'}")

    def clear(self, stays: Set[str] = frozenset()) -> None:
        """Delete what is ours in OUT/best, but the weights in the folders that stay."""
        best = self.out / BEST
        names = [name for name in listed(best) if name.split("/")[0] not in stays]
        # First what makes a folder count as weights: half of them is not taken for the whole.
        names.sort(key=lambda name: (Path(name).name == LIST_NAME, Path(name).name not in (_LISTING, *_CONFIGS)))
        kept = delete(best, names)
        others = [name for name in kept.names if name.split("/")[0] not in stays] if kept else []
        if kept and others:
            warn_user(str(replace(kept, names=tuple(others))))

    def merge(self, offload: OffloadConfig, task: str, *, is_first: bool) -> None:
        """Write OUT/merged: the base with the adapter in OUT merged into it. Every rank calls."""
        folder, place, target = open_folder(self.out, task), self.out / BEST / MERGED, self.out / MERGED
        if is_first:
            delete(place, [name for name in all_files(place) if MODEL_NAME.fullmatch(name)])
            _say_aside(move_aside(place))
        with reading(folder, offload, is_first=is_first) as model:
            export_pretrained(model, place, adapters="merged")
        if is_first:
            with naming_errors("write", target):
                folder.tokenizer.save_pretrained(place)
                names = [f"{MERGED}/{name}" for name in all_files(place)]
                delete(self.out, [name for name in published(self.out) if name.startswith(f"{MERGED}/")])
                _say_aside(move_aside(target))
                _note_published(self.out, [*published(self.out), *names])
                os.replace(place, target)


def published(out: Path) -> list[str]:
    """Files that a run has put into OUT for its user, relative to it; of earlier runs, those that such runs write."""
    described = read_object(out / RUN_FILE)
    if isinstance(names := described.get(_PUBLISHED), list):
        return [name for name in names if isinstance(name, str)]
    if "outputs" not in described:
        return []
    places = [(out, ""), (out / MERGED, f"{MERGED}/")]
    return [f"{at}{name}" for place, at in places for name in names_in(place) if MODEL_NAME.fullmatch(name)]


def strangers(out: Path) -> list[str]:
    """Names of a model's files in OUT that no run has put there."""
    return sorted({name for name in names_in(out) if MODEL_NAME.fullmatch(name)} - {*published(out)})


def _note_published(out: Path, names: Sequence[str]) -> None:
    described = read_json(out / RUN_FILE)
    RunDir(out).write(RUN_FILE, json.dumps(described | {_PUBLISHED: list(dict.fromkeys(names))}, indent=1))


def _say_aside(path: Path | None) -> None:
    if path is not None:
        warn_user(f"{path.with_suffix('')} was there, and no run has made it: it is {path.name} now")


@contextmanager
def reading(folder: ModelFolder, offload: OffloadConfig, *, is_first: bool) -> Iterator[nn.Module]:
    """The folder's model beside the run's: not trained, and on drives if there are any. Every rank calls."""
    places = [path / "read" for path in offload.nvme_dirs]
    config = replace(
        offload, params="nvme" if places else "cpu", grads="cpu", optimizer="cpu", nvme=places, nvme_capacity=None,
        durability="scratch", existing="refuse", generation=None, commit_every=1, publish=None,
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
        if folder.task == CLASSIFY:  # its classes, which the base does not have
            replace_file(place / CONFIG_NAME, json.dumps(config_file(folder.config), indent=2).encode())
    if (config := place / CONFIG_NAME).is_file():
        words = json.loads(config.read_text(encoding="utf-8"))
        words["use_cache"] = getattr(folder.config, "use_cache", True)  # training has none
        replace_file(config, json.dumps(words, indent=2).encode())
    (place / CARD).unlink(missing_ok=True)  # peft writes a card without content
    generation = folder.path / "generation_config.json"
    if generation.is_file() and not (place / generation.name).is_file():
        shutil.copyfile(generation, place / generation.name)


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
    labels = f", id2label={dict(folder.config.id2label)!r}" if is_adapter and config.method == "classify" else ""
    if is_adapter and config.method == "mlm":
        name = "AutoPeftModel"
    return [
        f"from {package} import {name}",
        "from transformers import AutoTokenizer",
        "",
        f'model = {name}.from_pretrained({place}, dtype="auto"{labels})',
        tokenizer,
    ]


def _cell(value: object) -> str:
    return str(value).replace("|", "\\|").replace("\n", " ")
