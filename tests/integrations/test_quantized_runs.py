"""Runs of quantized models as the command sees them: exported, verified and cleaned without the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import zero_offload as zo
from tests.helpers.disk import SWAP, committed_blocks, flip_bit
from tests.helpers.quantized_models import BITSANDBYTES, TORCHAO, base_model
from tests.helpers.tools import Tokens
from zero_offload.cli.main import main

Capture = pytest.CaptureFixture[str]


def trained(kind: str, run: Path, precision: str = "fp32", **settings: Any) -> nn.Module:
    """A model whose norms are trained for a step, committed to a run."""
    model = base_model("llama", kind, torch.float32)
    for module in model.modules():
        if "Norm" in type(module).__name__:
            module.requires_grad_(True)
    given: dict[str, Any] = {"params": "nvme", "optimizer": "nvme", "nvme": run} | settings
    zo.offload(model, zo.OffloadConfig(precision=precision, **given))
    optimizer = zo.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-2)
    model(**{name: tensor[None] for name, tensor in Tokens()[0].items()}).loss.backward()
    optimizer.step()
    zo.commit(model, optimizer)
    return model


@pytest.mark.door(
    "bitsandbytes, transformers",
    load="generation of a run",
    between="nf4, nf4 nested, fp4, int8",
    save="`zero-offload export`",
    outcome="right",
)
@pytest.mark.parametrize("dtype", [None, "bf16"])
@pytest.mark.parametrize("kind", BITSANDBYTES)
def test_export_writes_what_export_pretrained_does(kind: str, dtype: str | None, tmp_path: Path) -> None:
    model = trained(kind, tmp_path / "run")
    zo.export_pretrained(model, tmp_path / "ours", dtype=dtype)
    zo.close(model)
    flags = [] if dtype is None else ["--dtype", dtype]
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out"), *flags]) == 0
    found, expected = (load_file(tmp_path / name / "model.safetensors") for name in ("out", "ours"))
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


@pytest.mark.door(
    "torchao, transformers",
    load="`from_pretrained`, then `zo.offload`",
    between="torchao int8, fp8",
    save="`zo.export_pretrained`, `zero-offload export`",
    outcome="refused: the weights",
    instead="`torch.save(model.state_dict(), FILE)`",
)
@pytest.mark.parametrize("kind", TORCHAO)
def test_weights_of_torchao_are_one_error_that_names_what_works(kind: str, tmp_path: Path, capsys: Capture) -> None:
    model = trained(kind, tmp_path / "run")
    with pytest.raises(zo.ConfigError, match=r"q_proj.weight is a \w+Tensor.*torch.save"):
        zo.export_pretrained(model, tmp_path / "ours")
    torch.save(model.state_dict(), tmp_path / "state.pt")
    values = model(**{name: tensor[None] for name, tensor in Tokens()[0].items()}).logits
    zo.close(model)
    assert main(["export", str(tmp_path / "run"), str(tmp_path / "out")]) != 0
    assert "torch.save(model.state_dict(), FILE)" in capsys.readouterr().err
    assert not (tmp_path / "ours").exists() and not (tmp_path / "out").exists()
    plain = base_model("llama", kind, torch.float32)
    plain.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=False))
    assert torch.equal(plain(**{name: tensor[None] for name, tensor in Tokens()[0].items()}).logits, values)


@pytest.mark.door(
    "torchao, transformers",
    load="`zo.load_pretrained`",
    between="into weights of torchao",
    outcome="refused: the weights",
    instead="`from_pretrained`, then `zo.offload`",
)
def test_folders_are_not_read_into_weights_of_torchao(tmp_path: Path) -> None:
    base_model("llama", "plain").save_pretrained(tmp_path / "base")
    model = base_model("llama", "torchao fp8")
    zo.offload(model, zo.OffloadConfig(precision="fp32"))
    with pytest.raises(zo.CheckpointError, match="q_proj.weight, a Float8Tensor.*from_pretrained.*zo.offload then"):
        zo.load_pretrained(model, tmp_path / "base")
    zo.close(model)


def test_a_generation_of_another_quantization_is_refused(tmp_path: Path) -> None:
    """nf4 and fp4 differ in no shape."""
    zo.close(trained("nf4", tmp_path / "run"))
    with pytest.raises(zo.CheckpointError, match="holds another model.*record=.*nf4.*record=.*fp4"):
        trained("fp4", tmp_path / "run", existing="resume")


@pytest.mark.parametrize("kind", ["nf4 nested", "torchao int8"])
def test_verify_sees_each_byte_and_clean_removes_all(kind: str, tmp_path: Path, capsys: Capture) -> None:
    run = tmp_path / "run"
    zo.close(trained(kind, run))
    assert main(["verify", str(run)]) == 0
    assert "whole" in capsys.readouterr().out
    for offset, component in committed_blocks(run):
        flip_bit(run / SWAP, offset)
        assert main(["verify", str(run)]) != 0
        found = capsys.readouterr().out
        assert "BAD" in found and f"{component} of" in found
        flip_bit(run / SWAP, offset)
    assert main(["verify", str(run)]) == 0
    assert main(["clean", str(run), "--yes"]) == 0
    assert not list(run.glob("*"))
