"""The weights of a saved generation as a Hugging Face folder, without the model: names and shapes are in its manifest.

Owns which components make a parameter's value in the dtype asked for. Reads a chunk at a time, writes through
`FolderWriter`; the folder appears under its name when it is complete. The call: `export_saved`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch

from zero_offload.base.errors import ConfigError
from zero_offload.base.host import host_empty
from zero_offload.checkpoint.buffers import decoded
from zero_offload.checkpoint.format import reading
from zero_offload.checkpoint.hf_export import FolderWriter, TensorEntry, new_folder, plan_files, written_dtype
from zero_offload.checkpoint.hf_match import adapter_names
from zero_offload.checkpoint.saved import SavedGeneration
from zero_offload.hardware.kernels.formats import join_master
from zero_offload.plan.layout import CHUNK_NUMEL, SectionLayout
from zero_offload.storage.shards.shard import Component, component_dtype, master_components


def export_saved(
    saved: SavedGeneration, path: Path, dtype: torch.dtype | None, max_shard_bytes: int, texts: Mapping[str, str]
) -> int:
    """Write every parameter, and every persistent buffer as it is, to a new folder `path`; returns their number.

    `dtype` is what floating parameters are rounded to, from the fp32 masters; None is the compute dtype. `texts` are
    files by name, written beside the weights. Raises ConfigError, StorageError, and IntegrityError when a block is
    damaged; after an error nothing is left.
    """
    divided = [piece.spec.name for section in saved.sections for piece in section.params if piece.spec.division]
    if divided:
        raise ConfigError(
            f"{saved.generation} is of a tensor-parallel run: each of its ranks has a part of {divided[0]!r} and of "
            f"{len(divided) - 1} more parameters, and how they make up the whole is not in its files. Load it in the "
            "script that trained it, and gather the parameters there"
        )
    if names := adapter_names(piece.spec.name for section in saved.sections for piece in section.params):
        raise ConfigError(
            f"{saved.generation} is of a model with adapters of peft; from_pretrained does not know {len(names)} "
            f"of its names, such as {names[0]!r}. In the script that trained it call zo.export_pretrained(model, "
            "path): that writes a folder for PeftModel.from_pretrained"
        )
    entries = {
        piece: TensorEntry(piece.spec.name, written_dtype(section.dtype, dtype), piece.spec.shape)
        for section in saved.sections
        for piece in section.params
    }
    with reading(str(saved.generation)):
        buffers = {name: decoded(each) for name, each in saved.generation.payload.get("buffers", {}).items()}
    kept = [TensorEntry(name, buffer.dtype, tuple(buffer.shape)) for name, buffer in buffers.items()]
    plans = plan_files([*entries.values(), *kept], max_shard_bytes)
    with new_folder(path) as folder, FolderWriter(folder, plans) as writer:
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")
        for section in saved.sections:
            for piece, entry in ((piece, entries[piece]) for piece in section.params):
                for begin in range(piece.begin, piece.end, CHUNK_NUMEL):
                    values = _values(saved, section, (begin, min(begin + CHUNK_NUMEL, piece.end)), dtype)
                    writer.write(entry.name, begin - piece.begin, values.to(entry.dtype))
        for name, buffer in buffers.items():
            writer.write(name, 0, buffer.reshape(-1))
        writer.finish()
    return len(entries) + len(buffers)


def _values(
    saved: SavedGeneration, section: SectionLayout, span: tuple[int, int], dtype: torch.dtype | None
) -> torch.Tensor:
    """Elements of a section, in the dtype asked for or a wider one."""

    def read(component: Component) -> torch.Tensor:
        out = host_empty(span[1] - span[0], component_dtype(section, component))
        saved.read(0, section.index, component, span[0], out)
        return out

    components = master_components(section)
    if dtype in (None, section.dtype):
        return read(Component.VALUE)
    if Component.MASTER in components:
        return read(Component.MASTER)
    value = read(Component.VALUE)
    if Component.RESIDUAL not in components:
        return value
    master = host_empty(value.numel(), torch.float32)
    join_master(value, read(Component.RESIDUAL), master)
    return master
