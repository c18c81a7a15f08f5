"""State dicts, folders, checkpoints and second calls of models that bitsandbytes has quantized."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import zero_offload as zo
from tests.helpers.quantized_models import BITSANDBYTES, KINDS, adapted_model, base_model
from tests.helpers.ranks import RankPools
from tests.helpers.tools import Tokens, on_ranks, transformers
from zero_offload.plan.quantized import is_wrapper
from zero_offload.standins.owners import owner_of

import peft  # isort: skip

_SETTINGS: dict[str, dict[str, Any]] = {
    "nf4": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"},
    "nf4 nested": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True},
    "fp4": {"load_in_4bit": True, "bnb_4bit_quant_type": "fp4"},
    "int8": {"load_in_8bit": True},
}


def quantized_folder(kind: str, folder: Path) -> tuple[Path, dict[str, Tensor]]:
    """As transformers writes it, and the state dict of its model."""
    base_model("llama", "plain").save_pretrained(folder / "base")
    config = transformers.BitsAndBytesConfig(**_SETTINGS[kind])
    model = loaded(folder / "base", quantization_config=config)
    model.save_pretrained(folder / "quantized")
    return folder / "quantized", {name: tensor.clone() for name, tensor in model.state_dict().items()}


def loaded(folder: Path, **words: Any) -> Any:
    model = transformers.AutoModelForCausalLM
    return model.from_pretrained(folder, device_map={"": "cpu"}, dtype=torch.float32, **words).requires_grad_(False)


def is_same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    assert list(ours) == list(theirs)
    return all(ours[n].dtype == theirs[n].dtype and torch.equal(ours[n], theirs[n]) for n in ours)


def zeroed(model: nn.Module) -> None:
    with zo.gathered(model, mode="write") as values:
        for tensor in values.values():
            tensor.data.zero_()


@pytest.mark.door(
    "bitsandbytes, transformers",
    load="`from_pretrained`; `zo.load_pretrained` after `zo.offload`",
    between="nf4, nf4 nested, fp4, int8",
    save="`zo.export_pretrained`, `state_dict`",
    outcome="right",
)
@pytest.mark.parametrize("kind", BITSANDBYTES)
def test_state_dicts_and_folders(kind: str, tmp_path: Path) -> None:
    folder, state = quantized_folder(kind, tmp_path)
    model = loaded(folder)
    zo.offload(model, zo.OffloadConfig(precision="fp32", params="nvme", nvme=tmp_path / "nvme"))
    assert is_same(model.state_dict(), state)
    zeroed(model)
    assert not is_same(model.state_dict(), state)
    model.load_state_dict(state)
    assert is_same(model.state_dict(), state)
    zeroed(model)
    zo.load_pretrained(model, folder)
    assert is_same(model.state_dict(), state)
    zo.export_pretrained(model, tmp_path / "out")
    zo.close(model)
    files = load_file(folder / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert files[0].keys() == files[1].keys() and all(torch.equal(files[0][name], files[1][name]) for name in files[0])
    assert is_same(loaded(tmp_path / "out").state_dict(), state)


@pytest.mark.door(
    "bitsandbytes, transformers",
    load="`from_pretrained`",
    between="nf4 nested, int8; two ranks",
    save="`zo.export_pretrained`",
    outcome="right",
)
@pytest.mark.parametrize("kind", ["nf4 nested", "int8"])
def test_two_ranks_export(kind: str, tmp_path: Path, pools: RankPools) -> None:
    folder, _ = quantized_folder(kind, tmp_path)
    on_ranks(pools, 2, export, str(folder), str(tmp_path / "out"))
    files = load_file(folder / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert files[0].keys() == files[1].keys() and all(torch.equal(files[0][name], files[1][name]) for name in files[0])


def export(rank: int, world_size: int, folder: str, out: str) -> None:
    model = loaded(Path(folder))
    zo.offload(model, zo.OffloadConfig(precision="fp32"))
    zo.export_pretrained(model, out)
    zo.close(model)


@pytest.mark.door(
    "bitsandbytes, transformers",
    load="`zo.load_pretrained`",
    between="a folder of fp4 into a model of nf4",
    outcome="refused: unknown names",
    instead="the model built from the folder's config",
)
def test_weights_that_are_quantized_in_another_way_are_refused(tmp_path: Path) -> None:
    (mine, state), (other, _) = (quantized_folder(kind, tmp_path / kind) for kind in ("nf4", "fp4"))
    model = loaded(mine)
    zo.offload(model, zo.OffloadConfig(precision="fp32"))
    with pytest.raises(zo.CheckpointError, match="unknown to the model"):
        zo.load_pretrained(model, other)
    name = next(name for name in state if name.endswith("absmax"))
    with pytest.raises(zo.ConfigError, match=f"without {name}"):
        model.load_state_dict({key: tensor for key, tensor in state.items() if key != name})
    assert is_same(model.state_dict(), state)
    zo.close(model)


@pytest.mark.door(
    "bitsandbytes, peft",
    load="`zo.offload`",
    between="LoRA over a quantized base, merged",
    save='`zo.export_pretrained(adapters="merged")`',
    outcome="refused: the merge",
    instead="`merge_and_unload` into a base that is not quantized",
)
@pytest.mark.parametrize("kind", BITSANDBYTES)
def test_adapters_that_come_later_train_and_are_written(kind: str, tmp_path: Path) -> None:
    """A second zo.offload adopts them; a resume makes the same calls."""

    def step(model: nn.Module, optimizer: zo.AdamW) -> float:
        loss = model(**{name: tensor[None] for name, tensor in Tokens()[0].items()}).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss)

    def trained(model: nn.Module) -> zo.AdamW:
        return zo.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-2)

    plain = adapted_model("llama", kind).train()
    optimizer = trained(plain)
    expected = [step(plain, optimizer) for _ in range(4)]

    def start(existing: str) -> nn.Module:
        base = base_model("llama", kind)
        zo.offload(
            base,
            zo.OffloadConfig(
                precision="fp32", params="nvme", optimizer="nvme", nvme=tmp_path / "nvme", existing=existing
            ),
        )
        torch.manual_seed(1)
        config = peft.LoraConfig(
            r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM"
        )
        model = peft.get_peft_model(base, config, autocast_adapter_dtype=False).train()
        zo.offload(model)
        assert all(owner_of(param) is not None for param in model.parameters())
        return model

    model = start("refuse")
    optimizer = trained(model)
    found = [step(model, optimizer) for _ in range(2)]
    zo.commit(model, optimizer)
    zo.close(model)
    model = start("resume")
    optimizer = trained(model)
    assert zo.resume(model, optimizer) is not None
    assert found + [step(model, optimizer) for _ in range(2)] == expected
    zo.export_pretrained(model, tmp_path / "adapter")
    written = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    values = peft.get_peft_model_state_dict(plain)
    assert written.keys() == values.keys() and all(torch.equal(written[name], values[name]) for name in written)
    with pytest.raises(zo.ConfigError, match="not merged into quantized weights"):
        zo.export_pretrained(model, tmp_path / "merged", adapters="merged")
    adapter = peft.PeftModel.from_pretrained(base_model("llama", "plain"), tmp_path / "adapter")
    merged = adapter.merge_and_unload().state_dict()
    own, name = base_model("llama", "plain").state_dict(), "model.layers.0.self_attn.q_proj.weight"
    assert merged.keys() == own.keys() and not torch.equal(merged[name], own[name])
    zo.close(model)


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_model_says_of_itself_stays(kind: str, tmp_path: Path) -> None:
    plain, model = adapted_model("llama", kind), adapted_model("llama", kind)
    zo.offload(model, zo.OffloadConfig(precision="fp32", params="nvme", nvme=tmp_path / "nvme"))

    def facts(model: nn.Module) -> list[Any]:
        params = [(name, tuple(p.shape), p.dtype, p.requires_grad, p.numel()) for name, p in model.named_parameters()]
        buffers = [(name, tuple(buffer.shape), buffer.dtype) for name, buffer in model.named_buffers()]
        state = [(name, tuple(each.shape), each.dtype) for name, each in model.state_dict().items()]
        return [repr(model), params, buffers, state, model.get_nb_trainable_parameters(), model.num_parameters()]

    assert facts(model) == facts(plain)
    expected = dict(plain.named_parameters())
    with zo.gathered(model):
        for name, param in model.named_parameters():
            values, wanted = param.detach(), expected[name].detach()
            if is_wrapper(wanted):
                values, wanted = values.dequantize(), wanted.dequantize()
            assert torch.equal(values, wanted), name
    assert zo.stats(model).step == 0
    zo.close(model)
