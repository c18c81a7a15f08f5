"""Models of diffusers train to the same bits, offloaded or not, and their folders go both ways."""

from __future__ import annotations

import copy
import json
import runpy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

import zero_offload as zo
from tests.helpers.diffusion import DENOISERS, diffusers
from tests.helpers.pairwise import in_pairs
from tests.helpers.ranks import RankPools
from tests.helpers.reference import placed
from tests.helpers.tools import values_of

from diffusers.training_utils import EMAModel  # isort: skip
from peft import get_peft_model_state_dict  # isort: skip

EXAMPLES = Path(__file__).parents[2] / "examples"


def made(name: str, *, lora: bool, recompute: bool) -> Any:
    model = DENOISERS[name].adapted() if lora else DENOISERS[name].build()
    if recompute:
        model.enable_gradient_checkpointing()
    return model


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [param for param in model.parameters() if param.requires_grad]


def train(model: Any, name: str, steps: int = 3) -> list[float]:
    optimizer, losses = zo.AdamW(trained(model), lr=1e-2), []
    for step in range(steps):
        loss = DENOISERS[name].loss(model, 10 * step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def check_values(model: nn.Module, plain: nn.Module) -> None:
    found, expected = values_of(model), values_of(plain)
    assert found.keys() == expected.keys() and all(torch.equal(found[key], expected[key]) for key in found)


@in_pairs(name=list(DENOISERS), tier=["cpu", "nvme"], lora=[False, True], recompute=[False, True])
def test_training_is_that_of_the_plain_model(name: str, tier: str, lora: bool, recompute: bool, nvme: Path) -> None:
    lora = lora and name != "dit"  # diffusers has no add_adapter for it
    plain = made(name, lora=lora, recompute=recompute)
    expected = train(plain, name)
    assert len(set(expected)) == 3
    model = made(name, lora=lora, recompute=recompute)
    zo.offload(model, placed("fp32", (tier,) * 3, nvme if tier == "nvme" else None))
    assert train(model, name) == expected
    check_values(model, plain)
    zo.close(model)


@pytest.mark.parametrize(("name", "lora"), [("unet", True), ("flux", False), ("wan", True)])
def test_bf16_is_the_same_on_each_tier(name: str, lora: bool, nvme: Path) -> None:
    losses = []
    for tier in ("cpu", "nvme"):
        model = made(name, lora=lora, recompute=True)
        zo.offload(model, placed("bf16", (tier,) * 3, nvme if tier == "nvme" else None))
        losses.append(train(model, name))
        zo.close(model)
    assert losses[0] == losses[1] and len(set(losses[0])) == 3


@pytest.mark.parametrize("name", DENOISERS)
def test_bf16_computes_what_diffusers_computes(name: str, nvme: Path, tmp_path: Path) -> None:
    """With the parameters and buffers in fp32 that `from_pretrained` leaves so."""
    DENOISERS[name].build().save_pretrained(tmp_path / "in")
    plain = getattr(diffusers, DENOISERS[name].kind).from_pretrained(tmp_path / "in", torch_dtype=torch.bfloat16)
    inputs = {
        key: value.bfloat16() if isinstance(value, Tensor) and value.is_floating_point() else value
        for key, value in DENOISERS[name].inputs(0).items()
    }
    model = DENOISERS[name].build()
    tables = [each for each, buffer in plain.named_buffers() if buffer.dtype == torch.float32]
    precision = zo.Precision(buffers=dict.fromkeys(tables, "fp32"))
    zo.offload(model, replace(placed("bf16", ("nvme",) * 3, nvme), precision=precision))
    with torch.no_grad():
        assert torch.equal(model.eval()(**inputs).sample, plain.eval()(**inputs).sample)
    found, expected = ({name: p.dtype for name, p in each.named_parameters()} for each in (model, plain))
    assert found == expected


def on_a_rank(rank: int, world_size: int, name: str, lora: bool, recompute: bool, out: Path) -> list[float]:
    """Ranks have the same batch, so that the mean of their gradients is that of one."""
    model = zo.offload(made(name, lora=lora, recompute=recompute), placed("fp32", ("nvme",) * 3, out / "run"))
    losses = train(model, name)
    zo.export_pretrained(model, out / "exported")
    zo.close(model)
    return losses


@pytest.mark.parametrize(("name", "lora", "recompute"), [("unet", True, False), ("flux", False, True)])
def test_two_ranks(name: str, lora: bool, recompute: bool, pools: RankPools, tmp_path: Path) -> None:
    torch.set_num_threads(1)  # as ranks have: gradients of convolutions depend on it
    plain = made(name, lora=lora, recompute=recompute)
    expected = train(plain, name)
    assert pools.of(2).succeed(on_a_rank, name, lora, recompute, tmp_path) == [expected, expected]
    if lora:
        plain.save_lora_adapter(tmp_path / "plain")
        check_adapter(tmp_path / "exported", tmp_path / "plain")
    else:
        check_values(type(plain).from_pretrained(tmp_path / "exported"), plain)


def check_adapter(found: Path, expected: Path) -> None:
    """The same tensors and settings."""
    files = [folder / "pytorch_lora_weights.safetensors" for folder in (found, expected)]
    ours, theirs = map(load_file, files)
    assert ours.keys() == theirs.keys() != set() and all(torch.equal(ours[key], theirs[key]) for key in ours)
    with safe_open(files[0], "pt") as one, safe_open(files[1], "pt") as other:
        assert one.metadata().keys() == other.metadata().keys()


def built_away(name: str, folder: Path, config: zo.OffloadConfig) -> Any:
    kind: Any = getattr(diffusers, DENOISERS[name].kind)
    with zo.deferred_init(values="skip"):
        model = kind.from_config(kind.load_config(folder))
    return zo.offload(model, config).train()


@pytest.mark.door(
    "diffusers",
    load="`zo.load_pretrained`",
    between="one file, shards, variants",
    save="`zo.export_pretrained`",
    outcome="right",
)
@pytest.mark.parametrize("form", ["one file", "a variant", "shards of a variant", "shards", "a named file"])
def test_folders_are_read_and_written(form: str, nvme: Path, tmp_path: Path) -> None:
    plain = DENOISERS["unet"].build()
    variant = {"variant": "fp16"} if "variant" in form or form == "a named file" else {}
    plain.save_pretrained(tmp_path / "in", **variant, **({"max_shard_size": "20KB"} if "shards" in form else {}))
    source = tmp_path / "in"
    if form == "a named file":
        (source / "diffusion_pytorch_model.ema.safetensors").write_bytes(b"")
        with pytest.raises(zo.CheckpointError, match=r"as diffusion_pytorch_model\.ema\.\w+, .*fp16.*name one"):
            zo.load_pretrained(built_away("unet", source, placed("fp32", ("cpu",) * 3, None)), source)
        source /= "diffusion_pytorch_model.fp16.safetensors"
    model = built_away("unet", tmp_path / "in", placed("fp32", ("nvme",) * 3, nvme))
    zo.load_pretrained(model, source)
    check_values(model, plain)
    if form == "shards":
        assert train(model, "unet", 1) == train(plain, "unet", 1)
    zo.export_pretrained(model, tmp_path / "out", max_shard_size="30KB" if form == "shards" else "5GB")
    assert (tmp_path / "out" / "diffusion_pytorch_model.safetensors.index.json").exists() == (form == "shards")
    loaded = diffusers.UNet2DConditionModel.from_pretrained(tmp_path / "out")
    check_values(loaded, plain)
    expected = json.loads((tmp_path / "in" / "config.json").read_text())
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == expected


@pytest.mark.door(
    "diffusers, peft",
    load="`zo.load_pretrained`",
    between="LoRA by `add_adapter`",
    save="`zo.export_pretrained`, separate and merged; `save_lora_adapter`",
    outcome="right",
)
def test_an_adapter_over_a_folder_is_saved_and_merged_as_diffusers_does(nvme: Path, tmp_path: Path) -> None:
    denoiser = DENOISERS["flux"]
    denoiser.build().save_pretrained(tmp_path / "base")
    kind = diffusers.FluxTransformer2DModel
    plain = denoiser.adapted()
    with zo.deferred_init(values="skip"):
        model = kind.from_config(kind.load_config(tmp_path / "base")).requires_grad_(False)
        torch.manual_seed(0)
        model.add_adapter(copy.deepcopy(plain.peft_config["default"]))
    zo.offload(model, placed("fp32", ("nvme", "cpu", "cpu"), nvme))
    zo.load_pretrained(model, tmp_path / "base")
    model.train()
    train(model, "flux")
    model.save_lora_adapter(tmp_path / "theirs")
    zo.export_pretrained(model, tmp_path / "ours")
    zo.export_pretrained(model, tmp_path / "merged", adapters="merged")
    check_adapter(tmp_path / "ours", tmp_path / "theirs")
    diffusers.FluxPipeline.save_lora_weights(
        tmp_path / "pipeline", transformer_lora_layers=get_peft_model_state_dict(model)
    )
    saved = load_file(tmp_path / "pipeline" / "pytorch_lora_weights.safetensors")
    ours = load_file(tmp_path / "ours" / "pytorch_lora_weights.safetensors")
    assert saved.keys() == {f"transformer.{key}" for key in ours}
    assert all(torch.equal(saved[f"transformer.{key}"], ours[key]) for key in ours)
    adapted = kind.from_pretrained(tmp_path / "base")
    adapted.load_lora_adapter(tmp_path / "ours", prefix=None, use_safetensors=True)
    merged = kind.from_pretrained(tmp_path / "merged")
    with torch.no_grad():
        expected = denoiser.loss(model.eval(), 5).item()
        assert denoiser.loss(adapted.eval(), 5).item() == expected
        assert denoiser.loss(merged.eval(), 5).item() == pytest.approx(expected, rel=1e-6)


def test_adapters_that_read_the_base_are_refused_before_it_is_loaded(tmp_path: Path) -> None:
    DENOISERS["flux"].build().save_pretrained(tmp_path / "base")
    model = DENOISERS["flux"].build().requires_grad_(False)
    config = copy.deepcopy(DENOISERS["flux"].adapted().peft_config["default"])
    config.use_dora = True
    model.add_adapter(config)
    zo.offload(model, placed("fp32", ("cpu",) * 3, None))
    with pytest.raises(zo.ConfigError, match="use_dora=True.*Load the base first"):
        zo.load_pretrained(model, tmp_path / "base")


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_moving_averages_of_masters(lora: bool, nvme: Path) -> None:
    def averages(away: bool) -> list[Tensor]:
        model = made("unet", lora=lora, recompute=False)
        if away:
            zo.offload(model, placed("fp32", ("nvme",) * 3, nvme))

        def masters() -> list[nn.Parameter]:
            if not away:
                return trained(model)
            with zo.gathered(trained(model), kind="master") as values:
                names = [name for name, param in model.named_parameters() if param.requires_grad]
                return [nn.Parameter(values[name]) for name in names]

        average = EMAModel(masters(), decay=0.9)
        for _ in range(3):
            train(model, "unet", 1)
            average.step(masters())
        if away:
            zo.close(model)
        return average.shadow_params

    assert all(torch.equal(one, other) for one, other in zip(averages(True), averages(False), strict=True))


@pytest.mark.door(
    "diffusers",
    load="`EMAModel(model.parameters())`",
    between="moving averages",
    save="`EMAModel.save_pretrained`",
    outcome="right",
)
@pytest.mark.parametrize("foreach", [False, True])
def test_ema_model_takes_an_offloaded_model(foreach: bool, nvme: Path, tmp_path: Path) -> None:
    """Steps, a swap for an evaluation and back, and a folder."""
    seen = []
    for away in (False, True):
        model = made("unet", lora=False, recompute=False)
        if away:
            zo.offload(model, placed("fp32", ("nvme",) * 3, nvme))
        kept = {"model_cls": type(model), "model_config": model.config}
        average = EMAModel(model.parameters(), decay=0.9, foreach=foreach, use_ema_warmup=True, **kept)
        for _ in range(3):
            train(model, "unet", 1)
            average.step(model.parameters())
        average.store(model.parameters())
        average.copy_to(model.parameters())
        swapped = values_of(model)
        average.restore(model.parameters())
        average.save_pretrained(str(tmp_path / f"average-{away}"))
        loaded = EMAModel.from_pretrained(str(tmp_path / f"average-{away}"), type(model))
        seen.append([*average.shadow_params, *swapped.values(), *values_of(model).values(), *loaded.shadow_params])
        if away:
            zo.close(model)
    assert len(seen[0]) == len(seen[1])
    assert all(torch.equal(one.detach(), other.detach()) for one, other in zip(*seen, strict=True))


@pytest.mark.parametrize("name", ["diffusion_full", "diffusion_lora"])
def test_an_example_trains(name: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("sys.argv", [name, str(tmp_path)])
    script = EXAMPLES / f"{name}.py"
    assert len(script.read_text().splitlines()) <= 40
    runpy.run_path(str(script), run_name="__main__")
    losses = [float(line.split()[-1]) for line in capsys.readouterr().out.splitlines() if "loss" in line]
    assert losses[-1] < 0.9 * losses[0]
