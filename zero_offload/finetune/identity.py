"""The parts that a run and its model are made of: kept in `run.json` as it begins, compared at every start from it.

Owns the record, and the errors that name the first field in which a folder differs from the run's first one. Places of
files are not compared. The calls: `made_of` for what a folder is now; `check_folder` against a run's record, and
`check_outputs` for a folder that a run has left; `version_notes`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from zero_offload.base.errors import ConfigError
from zero_offload.checkpoint.hf_files import files_of
from zero_offload.checkpoint.run_dir import RUN_FILE
from zero_offload.finetune.choices import CAUSAL, Lora
from zero_offload.finetune.data.sources import digests
from zero_offload.finetune.model.folder import (
    ADAPTER_CONFIG_NAME,
    CONFIG_NAME,
    GENERATION_NAME,
    ModelFolder,
    adapter_file,
    class_name,
)
from zero_offload.finetune.model.text_generation import generation_config
from zero_offload.finetune.settings import TASKS, FinetuneConfig
from zero_offload.integrations.gate import reading
from zero_offload.integrations.identity import (
    Difference,
    filled_in,
    first_difference,
    generation_values,
    tokenizer_values,
)
from zero_offload.model.about import adapter_values, config_values
from zero_offload.runs.locate import described
from zero_offload.storage.files.base_file import BaseFile

MADE_OF = "made_of"
"""The entry of `run.json`, and of its outputs."""
CONFIG, ADAPTER, TOKENIZER, GENERATION, WEIGHTS = "config", "adapter", "tokenizer", "generation", "weights"
DATA, EVAL_DATA = "data", "eval_data"
_FROM_BEFORE = (
    "an older version began this run and kept no record of its model. Config, tokenizer and weights of its base are "
    "not compared with those that it began with. Later starts are compared with this one"
)


def made_of(folder: ModelFolder, lora: Lora | None = None) -> dict[str, Any]:
    """All that decides numbers and is in the folder's files, with the adapter that a run of its base begins with.

    Of each file of weights, header and samples are read. Raises StorageError and IntegrityError.
    """
    found: dict[str, Any] = {"class": class_name(folder), CONFIG: config_values(folder.config)}
    if folder.adapter is not None or lora is not None:
        found[ADAPTER] = adapter_values(_adapter_config(folder, lora))
    if folder.tokenizer is not None:
        found[TOKENIZER] = tokenizer_values(folder.tokenizer)
    if folder.task == CAUSAL and folder.generation_file is not None:
        found[GENERATION] = generation_values(generation_config(folder.generation_file))
    files = files_of(folder.path) | ({} if folder.adapter is None else files_of(adapter_file(folder.adapter)))
    return found | {WEIGHTS: {name: _fingerprint(path) for name, path in sorted(files.items())}}


def data_of(config: FinetuneConfig) -> dict[str, Any]:
    """The data of a run, by their bytes; none where they cannot be found, which the run says when it reads them."""
    try:
        return {name: digests(getattr(config, name)) for name in (DATA, EVAL_DATA)}
    except (ConfigError, OSError):
        return {}


def check_ranks(first: Mapping[str, Any], own: Mapping[str, Any], folder: ModelFolder) -> None:
    """Raise ConfigError where this rank's files are not the first one's."""
    if found := first_difference(first, own):
        raise ConfigError(f"ranks train one model: the first rank's began with {_text(found, folder)}; copy its files")


def places_that_may_change(run: Path, made: Mapping[str, Any]) -> tuple[str, ...]:
    """Settings that say where files lie whose contents are compared, for the run in a directory."""
    before = described(run).get(MADE_OF)
    if not isinstance(before, dict):
        return ()
    return ("model", *(name for name in (DATA, EVAL_DATA) if before.get(name) == made.get(name, ())))


def _adapter_config(folder: ModelFolder, lora: Lora | None) -> Any:
    """peft's. Of a new adapter, where it goes is for the run's settings to say."""
    from peft import LoraConfig, PeftConfig

    if folder.adapter is not None:
        with reading(str(folder.adapter / ADAPTER_CONFIG_NAME), "mend it, or save the adapter with peft anew"):
            return PeftConfig.from_pretrained(str(folder.adapter))
    assert lora is not None
    return LoraConfig(r=lora.rank, lora_alpha=lora.alpha, lora_dropout=lora.dropout)  # type: ignore[arg-type]


def _fingerprint(path: Path) -> str:
    file = BaseFile.open(path)
    file.close()
    return file.fingerprint[:16]


def check_folder(run: Path, folder: ModelFolder, now: Mapping[str, Any], *, generates: bool) -> Iterator[str]:
    """Lines to say of the run in a directory that goes on with a folder, which is `now`.

    The generation config counts where the run `generates` text. Raises ConfigError for a folder that is another.
    """
    description = described(run)
    if not isinstance(before := description.get(MADE_OF), dict):
        yield _FROM_BEFORE
    elif found := _difference(before, now, folder, description, () if generates else (GENERATION,)):
        raise ConfigError(
            f"{run} holds a run that began with {_text(found, folder)}; put back what was there, give another --out, "
            "or --discard to start over"
        )
    yield from version_notes(description, "the run was last started")


def check_outputs(folder: ModelFolder, *, trains: bool = False) -> list[str]:
    """Lines to say of a folder that a run has left, on its base as that is now; none of other folders.

    A run that `trains` a whole model may give it another head. Generation configs are the command's matter. Raises
    ConfigError where it is not as the run left it.
    """
    out = folder.adapter or folder.path
    description = {} if (out / RUN_FILE).is_symlink() else described(out)  # a link is of a cache of downloads
    outputs = description.get("outputs")
    before = outputs.get(MADE_OF) if isinstance(outputs, dict) else None
    if not isinstance(before, dict):
        return []
    leaves_out = (GENERATION, *([] if folder.tokenizer is not None else [TOKENIZER]))  # of a plan it may be missing
    leaves_out += ("class",) if trains and folder.adapter is None else ()
    if found := _difference(before, made_of(folder), folder, description, leaves_out):
        settings = description.get("identity")
        method = settings.get("method") if isinstance(settings, dict) else None
        if found.name == "class" and TASKS.get(str(method), folder.task) != folder.task:
            raise ConfigError(
                f"{out} was trained by finetune --method {method} as class={found.before}; as class={found.now} it "
                f"would have a head of random numbers. Evaluate it by --method {method}, or give it another head by "
                "finetune first"
            )
        raise ConfigError(
            f"{out} is what a run left, with {_text(found, folder)}: its numbers would be others. Put back what was "
            f"there; a copy of the folder without {RUN_FILE} is taken as it is"
        )
    return list(version_notes(description, "the model was trained"))


def _difference(
    before: Mapping[str, Any],
    now: Mapping[str, Any],
    folder: ModelFolder,
    description: Mapping[str, Any],
    leaves_out: tuple[str, ...],
) -> Difference | None:
    before, now = ({name: each[name] for name in each if name not in leaves_out} for each in (before, now))
    found = first_difference(before, now)
    versions = description.get("versions")
    if found is None or not isinstance(versions, dict) or versions.get("transformers") == version("transformers"):
        return found
    if isinstance(values := before.get(CONFIG), dict):  # fields come and go with versions, and have defaults
        before = {**before, CONFIG: filled_in(values, folder.config)}
    return first_difference(before, now)


def _text(found: Difference, folder: ModelFolder) -> str:
    """The field, both values, and the file that has the new one."""
    kind, _, field = found.name.partition(".")
    own = folder.adapter or folder.path
    places = {
        CONFIG: folder.path / CONFIG_NAME,
        ADAPTER: own / ADAPTER_CONFIG_NAME,
        GENERATION: own / GENERATION_NAME,
        TOKENIZER: f"the tokenizer in {folder.tokenizer.name_or_path}" if folder.tokenizer is not None else own,
        WEIGHTS: (own if (own / field).is_file() else folder.path) / field,
    }
    if kind == WEIGHTS:
        return f"another {places[WEIGHTS]}: its header and two of its blocks were {found.before}, and are {found.now}"
    if kind in (DATA, EVAL_DATA):
        number = f" file {int(field) + 1} of it" * field.isdecimal()
        return f"other --{kind.replace('_', '-')}:{number} had the digest {found.before}, and now has {found.now}"
    where = places.get(kind, folder.path)
    return f"{field or kind}={found.before}, and {where} now has {field or kind}={found.now}"


def version_notes(description: Mapping[str, Any], when: str) -> Iterator[str]:
    """A line where packages have other versions than a run had: numbers may differ in their last bits."""
    versions = description.get("versions")
    before = {name: each for name, each in versions.items() if name != "python"} if isinstance(versions, dict) else {}
    changed = [
        f"{name} {each} (now {now})" for name, each in before.items() if (now := _version(name)) not in ("", each)
    ]
    if changed:
        yield f"warning: {when} with {', '.join(changed)}; numbers may be others with another version"


def _version(name: str) -> str:
    """Empty where it is not installed."""
    try:
        return version(name)
    except PackageNotFoundError:
        return ""
