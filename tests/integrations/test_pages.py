"""The Python of the pages on LoRA, experts, diffusion and inference runs as it stands: a page's blocks, in order."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.helpers.diffusion import DENOISERS, diffusers
from tests.helpers.tools import transformers

DOCS = Path(__file__).parents[2] / "docs"


def llama(path: Path) -> None:
    """A stand-in for a folder of the hub."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 256, "num_attention_heads": 4}
    transformers.LlamaForCausalLM(transformers.LlamaConfig(num_hidden_layers=3, **sizes)).save_pretrained(path)


def qwen3_moe(path: Path) -> None:
    sizes = {"hidden_size": 64, "moe_intermediate_size": 32, "vocab_size": 256, "num_attention_heads": 4}
    config = transformers.Qwen3MoeConfig(num_hidden_layers=2, num_experts=8, num_experts_per_tok=2, **sizes)
    transformers.Qwen3MoeForCausalLM(config).to(torch.bfloat16).save_pretrained(path)


def unet(path: Path) -> None:
    types = {"down_block_types": ("DownBlock2D",) * 2, "up_block_types": ("UpBlock2D",) * 2}
    model = diffusers.UNet2DModel(sample_size=16, block_out_channels=(8, 16), norm_num_groups=4, **types)
    model.save_pretrained(path, variant="fp16" if path.name == "half" else None)


def flux(path: Path) -> None:
    DENOISERS["flux"].build().save_pretrained(path)


FOLDERS: dict[str, dict[str, Callable[[Path], None]]] = {
    "LORA-AND-QUANTIZATION.md": {"llama": llama},
    "MOE.md": {"qwen3-moe": qwen3_moe},
    "DIFFUSION.md": {"unet": unet, "half": unet, "flux": flux},
    "INFERENCE.md": {"llama": llama},
}
"""By page: the folders that its blocks find where they run."""


@pytest.mark.parametrize("page", FOLDERS)
def test_blocks_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, make in FOLDERS[page].items():
        make(Path(name))
    blocks = re.findall(r"^```python\n(.*?)^```$", (DOCS / page).read_text(), re.MULTILINE | re.DOTALL)
    names: dict[str, object] = {"__name__": page}
    for block in blocks:
        exec(compile(block, os.fspath(DOCS / page), "exec"), names)
