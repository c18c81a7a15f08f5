"""Doors where libraries lose something: our folders have all of it, and what theirs have lost is refused by name.

Each fault of a library is shown here too, so that a version that mends it is noticed.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import tests.helpers.tools as tools  # before transformers  # isort: skip
import peft
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import zero_offload as zo
from tests.helpers import folders
from zero_offload.integrations.folder_check import check_folder

pytestmark = pytest.mark.tools
AUTO = transformers.AutoModelForCausalLM
BF16 = torch.bfloat16
IDS = torch.arange(3, 19).view(1, 16)
BLOCK = 64


def tensors(folder: Path) -> dict[str, Tensor]:
    return {name: value for file in sorted(folder.glob("*.safetensors")) for name, value in load_file(file).items()}


def words(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return found


def is_same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    return ours.keys() == theirs.keys() and all(
        ours[name].dtype == theirs[name].dtype and torch.equal(ours[name], theirs[name]) for name in ours
    )


def refused(folder: Path, says: str) -> None:
    with zo.deferred_init(values="skip"):
        model = AUTO.from_config(transformers.AutoConfig.from_pretrained(folder))
    with pytest.raises((zo.CheckpointError, zo.ConfigError), match=says):
        zo.load_pretrained(model, folder)


def in_bf16(folder: Path) -> Any:
    return AUTO.from_pretrained(folder, dtype=BF16)


def offloaded(model: nn.Module, nvme: Path, precision: str = "bf16") -> Any:
    return zo.offload(model, zo.OffloadConfig(precision=precision, params="nvme", optimizer="nvme", nvme=nvme))


# Weights that a load dequantizes


def with_words(base: Path, folder: Path, values: dict[str, Tensor], **changes: Any) -> Path:
    shutil.copytree(base, folder)
    save_file(values, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(words(base) | changes))
    return folder


def _codes(weight: Tensor) -> tuple[Tensor, Tensor]:
    """fp8 of blocks, and their scales."""
    rows, columns = weight.shape
    blocks = weight.float().view(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)
    scales = blocks.abs().amax((1, 3)) / 448
    return (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn).view(rows, columns), scales


def fp8(place: Path, model: nn.Module) -> Path:
    """A folder as models are published in fp8."""
    model.to(BF16).save_pretrained(place / "base")  # type: ignore[operator]
    values: dict[str, Tensor] = {}
    for name, value in tensors(place / "base").items():
        is_code = "_proj" in name
        values[name], scales = _codes(value) if is_code else (value, value)
        values |= {f"{name}_scale_inv": scales} if is_code else {}
    method = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK], "activation_scheme": "dynamic"}
    return with_words(place / "base", place / "fp8", values, quantization_config=method)


def experts() -> Any:
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "moe_intermediate_size": 64, "vocab_size": 128}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16, "num_hidden_layers": 2}
    return transformers.Qwen3MoeForCausalLM(
        transformers.Qwen3MoeConfig(**sizes, **heads, num_experts=4, num_experts_per_tok=2, decoder_sparse_step=1)
    )


def mxfp4(place: Path) -> Path:
    """A folder as GPT-OSS is published."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "vocab_size": 64, "num_hidden_layers": 2, "head_dim": 16}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
    model = transformers.GptOssForCausalLM(transformers.GptOssConfig(**sizes, **heads, pad_token_id=0))
    model.to(BF16).save_pretrained(place / "base")
    values: dict[str, Tensor] = {}
    for name, value in tensors(place / "base").items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            values[name] = value
            continue
        count, rows, columns = value.shape
        shape = (count, columns, rows // 32)
        values[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8)
        values[f"{name}_scales"] = torch.randint(120, 124, shape, dtype=torch.uint8)
    method = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.embed_tokens", "lm_head"]}
    return with_words(place / "base", place / "mxfp4", values, quantization_config=method)


PUBLISHED: dict[str, Callable[[Path], Path]] = {
    "fp8": lambda place: fp8(place, tools.llama(num_key_value_heads=4)),
    "fp8, experts": lambda place: fp8(place, experts()),
    "MXFP4": mxfp4,
}


@pytest.mark.door(
    "transformers",
    load="`from_pretrained`, which dequantizes",
    between="fp8 in blocks, experts in fp8, MXFP4",
    save="`zo.export_pretrained`, read by `zo.load_pretrained`",
    outcome="right",
)
@pytest.mark.parametrize("kind", PUBLISHED)
def test_dequantized_weights_are_written_as_they_are(kind: str, tmp_path: Path) -> None:
    folder = PUBLISHED[kind](tmp_path)
    expected = {name: value.clone() for name, value in in_bf16(folder).state_dict().items()}
    model = offloaded(in_bf16(folder), tmp_path / "nvme")
    zo.export_pretrained(model, tmp_path / "ours")
    zo.close(model)
    # Names are those of a model that was never quantized.
    assert tensors(tmp_path / "ours").keys() == tensors(tmp_path / "base").keys()
    assert "quantization_config" not in words(tmp_path / "ours")
    assert is_same(in_bf16(tmp_path / "ours").state_dict(), expected)
    with zo.deferred_init(values="skip"):
        again = AUTO.from_config(transformers.AutoConfig.from_pretrained(tmp_path / "ours"))
    zo.load_pretrained(again, tmp_path / "ours")
    assert is_same(dict(zo.offload(again, zo.OffloadConfig(precision="bf16")).state_dict()), expected)
    zo.close(again)


@pytest.mark.door(
    "peft, transformers",
    load="`from_pretrained`, which dequantizes",
    between="fp8 in blocks, LoRA, merged",
    save='`zo.export_pretrained(adapters="merged")`',
    outcome="right",
)
def test_adapters_are_merged_into_dequantized_weights(tmp_path: Path) -> None:
    folder = PUBLISHED["fp8"](tmp_path)
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    torch.manual_seed(1)
    plain = peft.get_peft_model(in_bf16(folder), config, autocast_adapter_dtype=False)
    torch.manual_seed(1)
    model = peft.get_peft_model(in_bf16(folder), config, autocast_adapter_dtype=False)
    expected = dict(plain.merge_and_unload().state_dict())
    zo.offload(model, zo.OffloadConfig(precision="bf16"))
    zo.export_pretrained(model, tmp_path / "ours", adapters="merged")
    zo.close(model)
    assert is_same(in_bf16(tmp_path / "ours").state_dict(), expected)


@pytest.mark.door(
    "transformers",
    load="`from_pretrained`, which dequantizes",
    between="fp8 in blocks",
    save="`save_pretrained`",
    outcome="lost: values; codes are written, of the head too, and no `quantization_config`",
    instead="`zo.export_pretrained`",
)
@pytest.mark.door(
    "transformers",
    load="`from_pretrained`, which dequantizes",
    between="MXFP4",
    save="`save_pretrained`",
    outcome="lost: the experts; their values are written under the names of codes",
    instead="`zo.export_pretrained`",
)
@pytest.mark.parametrize("kind", ["fp8", "MXFP4"])
def test_transformers_saves_a_dequantized_model_as_codes(kind: str, tmp_path: Path) -> None:
    model = in_bf16(PUBLISHED[kind](tmp_path))
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    model.save_pretrained(tmp_path / "theirs")
    assert "quantization_config" not in words(tmp_path / "theirs")
    assert not is_same(in_bf16(tmp_path / "theirs").state_dict(), expected)
    _check_refused(tmp_path / "theirs", "a part of a quantized weight.*write it by zo.export_pretrained")


@pytest.mark.door(
    "transformers",
    load="`from_pretrained`, which dequantizes",
    between="experts in fp8",
    save="`save_pretrained`",
    outcome="refused: a ValueError of transformers",
    instead="`zo.export_pretrained`",
)
def test_transformers_does_not_save_dequantized_experts(tmp_path: Path) -> None:
    model = in_bf16(PUBLISHED["fp8, experts"](tmp_path))
    with pytest.raises(ValueError, match="Undefined Operation"):
        model.save_pretrained(tmp_path / "theirs")


@pytest.mark.door(
    "transformers",
    load="`zo.load_pretrained`, `zero-offload verify`",
    between="a dequantized model that transformers has saved",
    outcome="refused: the parts of codes",
    instead="`zo.export_pretrained` of the model, loaded again",
)
@pytest.mark.parametrize(("part", "dtype"), [("weight_scale_inv", torch.float8_e4m3fn), ("weight_blocks", BF16)])
def test_codes_without_words_are_refused(part: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """As the folders above have them, whatever a later version of transformers writes."""
    tools.llama().save_pretrained(tmp_path / "folder")
    values, name = tensors(tmp_path / "folder"), "model.layers.0.mlp.up_proj.weight"
    weight = values.pop(name)
    values |= {f"{name}_blocks": weight} if dtype is BF16 else {name: weight.to(dtype), f"{name}_scale_inv": weight}
    save_file(values, tmp_path / "folder" / "model.safetensors", metadata={"format": "pt"})
    _check_refused(tmp_path / "folder", f"{part} is a part of a quantized weight.*write it by zo.export_pretrained")


def _check_refused(folder: Path, says: str) -> None:
    refused(folder, f"(?s){says}")
    problems = [each for each in check_folder(folder).problems if "tokenizer" not in each]
    assert problems and ("in no file" in problems[0] or "hold codes" in problems[0]), problems


# bitsandbytes


def four_bit(base: Path, *, nested: bool) -> Any:
    config = transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=nested,
        bnb_4bit_compute_dtype=BF16,
    )
    return AUTO.from_pretrained(base, quantization_config=config, device_map="cpu", dtype=BF16)


def repack(model: nn.Module) -> None:
    """As a forward in eval does on a CPU with bf16 instructions."""
    from bitsandbytes.functional import _convert_weight_packed_for_cpu
    from bitsandbytes.nn import Linear4bit

    for layer in model.modules():
        if isinstance(layer, Linear4bit):
            packed, state = _convert_weight_packed_for_cpu(layer.weight.data, layer.weight.quant_state)
            layer.weight.data, layer.weight.quant_state = packed, state


@pytest.mark.door(
    "bitsandbytes, transformers",
    load="`from_pretrained`",
    between="a forward in eval on a CPU with bf16 instructions, and `zo.offload` or a save",
    save="`zo.export_pretrained`",
    outcome="refused: the layer that was repacked",
    instead="`zo.offload` before such a forward",
)
@pytest.mark.door(
    "bitsandbytes, transformers",
    load="`from_pretrained`",
    between="nf4 and nf4-double, a forward in eval on a CPU with bf16 instructions",
    save="`save_pretrained`",
    outcome="lost: scales; they are transposed, or rounded",
    instead="`zo.offload` and `zo.export_pretrained` before such a forward",
)
@pytest.mark.door(
    "bitsandbytes, transformers",
    load="`zo.load_pretrained`; `from_pretrained`, then `zo.offload`",
    between="a folder with such scales",
    outcome="refused: the scales",
    instead="a folder that is quantized anew",
)
@pytest.mark.parametrize("nested", [False, True])
def test_scales_that_were_repacked(nested: bool, tmp_path: Path) -> None:
    tools.llama().to(BF16).save_pretrained(tmp_path / "base")
    model = four_bit(tmp_path / "base", nested=nested)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    repack(model)
    with pytest.raises(zo.ConfigError, match="was repacked by a forward in eval, for this CPU"):
        zo.offload(model, zo.OffloadConfig(precision="bf16"))
    model.save_pretrained(tmp_path / "theirs")
    assert not is_same(tensors(tmp_path / "theirs"), expected)
    # The save has put the weights back, and not their scales.
    with pytest.raises(zo.ConfigError, match="put it back without its scales.*Quantize the model again"):
        zo.offload(model, zo.OffloadConfig(precision="bf16"))
    with pytest.raises(zo.ConfigError, match="put it back without its scales"):
        zo.offload(AUTO.from_pretrained(tmp_path / "theirs", device_map="cpu"), zo.OffloadConfig(precision="bf16"))
    refused(tmp_path / "theirs", "nested_dtype bfloat16, here float32" if nested else "(?s)forward in eval.*again")


@pytest.mark.door(
    "bitsandbytes, transformers",
    load="`from_pretrained`, then `zo.offload`",
    between="nf4 and nf4-double, a forward in eval on any CPU",
    save="`zo.export_pretrained`",
    outcome="right",
)
@pytest.mark.parametrize("nested", [False, True])
def test_an_offloaded_model_keeps_its_scales_in_eval(nested: bool, tmp_path: Path) -> None:
    tools.llama().to(BF16).save_pretrained(tmp_path / "base")
    plain = four_bit(tmp_path / "base", nested=nested)
    plain.save_pretrained(tmp_path / "theirs")
    model = offloaded(plain, tmp_path / "nvme").eval()
    with torch.no_grad():
        model(IDS)
    zo.export_pretrained(model, tmp_path / "ours")
    zo.close(model)
    assert is_same(tensors(tmp_path / "ours"), tensors(tmp_path / "theirs"))


@pytest.mark.door(
    "bitsandbytes, transformers",
    load="`from_pretrained`",
    between="nf4 and nf4-double, `model.dequantize()`",
    save="`zo.export_pretrained`",
    outcome="right",
)
@pytest.mark.parametrize("nested", [False, True])
def test_a_model_that_was_dequantized(nested: bool, tmp_path: Path) -> None:
    tools.llama().to(BF16).save_pretrained(tmp_path / "base")
    model = four_bit(tmp_path / "base", nested=nested).dequantize()
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    offloaded(model, tmp_path / "nvme")
    zo.export_pretrained(model, tmp_path / "ours")
    zo.close(model)
    assert is_same(tensors(tmp_path / "ours"), expected) and "quantization_config" not in words(tmp_path / "ours")


# GPTQ


class Gptq(nn.Module):
    """A layer as gptqmodel has it in memory: zero points in the second form."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("qweight", "qzeros"):
            self.register_buffer(name, torch.full((8, 8), 7, dtype=torch.int32))

    def qzero_format(self) -> int:
        return 2


@pytest.mark.door(
    "transformers",
    load="`zo.load_pretrained` after `zo.offload`",
    between="a folder of GPTQ in the first form, into layers in the second",
    outcome="refused: the form of zero points",
    instead="`from_pretrained`, then `zo.offload`",
)
def test_forms_of_zero_points_are_said_and_compared(tmp_path: Path) -> None:
    model: Any = tools.llama()
    model.model.layers[0].extra = Gptq()
    model.config.quantization_config = {"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq"}
    zo.offload(model, zo.OffloadConfig(precision="fp32"))
    zo.export_pretrained(model, tmp_path / "ours")
    said = words(tmp_path / "ours")["quantization_config"]
    assert said["checkpoint_format"] == said["format"] == "gptq_v2"
    zo.load_pretrained(model, tmp_path / "ours")
    changed = words(tmp_path / "ours") | {"quantization_config": {**said, "checkpoint_format": "gptq"}}
    (tmp_path / "ours" / "config.json").write_text(json.dumps(changed))
    with pytest.raises(zo.ConfigError, match=r"in the form gptq, and .* in the form gptq_v2.*from_pretrained"):
        zo.load_pretrained(model, tmp_path / "ours")
    zo.close(model)


def packed(values: Tensor, order: Sequence[int] = range(8)) -> Tensor:
    """Eight values of four bits in each int32, along the last dimension."""
    parts = values.to(torch.int64).view(*values.shape[:-1], -1, 8)[..., list(order)] << torch.arange(0, 32, 4)
    return parts.sum(-1).to(torch.int32)


def four_bits(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes of a matrix, and the scales and zero points of its groups."""
    groups = weight.float().view(len(weight), -1, BLOCK)
    scales = ((groups.amax(2) - groups.amin(2)) / 15).half()
    zeros = (-groups.amin(2) / scales).round().clamp(1, 15)
    codes = (groups / scales[..., None] + zeros[..., None]).round().clamp(0, 15)
    return codes.view(weight.shape), scales, zeros


def gptq(place: Path) -> Path:
    """A folder of the first form, as most are published."""
    tools.llama(num_key_value_heads=4).half().save_pretrained(place / "base")
    values: dict[str, Tensor] = {}
    for name, weight in tensors(place / "base").items():
        if "_proj" not in name:
            values[name] = weight
            continue
        (codes, scales, zeros), layer = four_bits(weight), name.removesuffix(".weight")
        values[f"{layer}.qweight"] = packed(codes).T.contiguous()
        values[f"{layer}.qzeros"] = packed(zeros.T - 1)
        values[f"{layer}.scales"] = scales.T.contiguous()
        values[f"{layer}.g_idx"] = torch.arange(weight.shape[1], dtype=torch.int32) // BLOCK
    method = {"quant_method": "gptq", "bits": 4, "group_size": BLOCK, "desc_act": False, "sym": False}
    return with_words(place / "base", place / "gptq", values, quantization_config=method | {"format": "gptq"})


@pytest.mark.door(
    "gptqmodel, transformers",
    load="`from_pretrained`, then `zo.offload`",
    between="GPTQ in the first form",
    save="`zo.export_pretrained`",
    outcome="right",
)
@pytest.mark.door(
    "gptqmodel, transformers",
    load="`from_pretrained`",
    between="GPTQ in the first form",
    save="`save_pretrained`",
    outcome="lost: zero points; they are one higher",
    instead="`zo.export_pretrained`, or the folder itself",
)
def test_zero_points_of_gptq(tmp_path: Path) -> None:
    pytest.importorskip("gptqmodel")
    settings = {"quantization_config": transformers.GPTQConfig(bits=4, backend="gptq_torch"), "device_map": "cpu"}

    def read(folder: Path) -> Any:
        return AUTO.from_pretrained(folder, dtype=torch.float16, **settings)

    model = read(gptq(tmp_path))
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    model.save_pretrained(tmp_path / "theirs")
    assert not is_same(read(tmp_path / "theirs").state_dict(), expected)
    offloaded(model.requires_grad_(False), tmp_path / "nvme", "fp16")
    zo.export_pretrained(model, tmp_path / "ours")
    zo.close(model)
    assert is_same(read(tmp_path / "ours").state_dict(), expected)


# Frozen parameters


@pytest.mark.door(
    "deepspeed",
    load="`zo.load_pretrained`",
    between="`zero_to_fp32` of ZeRO-1 with frozen parameters",
    outcome="refused: the frozen parameters",
    instead="the same file with the base's tensors added",
)
def test_a_file_without_frozen_parameters(tmp_path: Path) -> None:
    """As `zero_to_fp32` writes it."""
    model = tools.llama()
    values = {name: value.clone() for name, value in model.state_dict().items()}
    model.save_pretrained(tmp_path / "base")
    frozen = {name for name, _ in model.named_parameters() if "layers.2" not in name}
    save_file({name: value + 1 for name, value in values.items() if name not in frozen}, tmp_path / "file.safetensors")
    for name, param in model.named_parameters():
        param.requires_grad_(name not in frozen)
    zo.offload(model, zo.OffloadConfig(precision="fp32"))
    with pytest.raises(zo.CheckpointError, match=r"(?s)Only frozen parameters.*save_file\(load_file\(BASE\) \| load_"):
        zo.load_pretrained(model, tmp_path / "file.safetensors")
    save_file(tensors(tmp_path / "base") | load_file(tmp_path / "file.safetensors"), tmp_path / "out.safetensors")
    zo.load_pretrained(model, tmp_path / "out.safetensors")
    found = dict(model.state_dict())
    assert all(torch.equal(found[name], value + (name not in frozen)) for name, value in values.items())
    zo.close(model)


# GGUF

NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
SCALING = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}


def gguf_file(folder: Path, model: Any) -> Path:
    """A llama in fp32, with the settings of its config."""
    import gguf

    folder.mkdir()
    config = model.config
    writer = gguf.GGUFWriter(folder / "model.gguf", "llama")
    writer.add_vocab_size(config.vocab_size)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if "factor" in config.rope_parameters:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(config.rope_parameters["factor"])
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([f"t{number}" for number in range(config.vocab_size)])
    writer.add_token_types([1] * config.vocab_size)
    writer.add_token_merges([])
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, value in model.state_dict().items():
        module, _, kind = name.rpartition(".")
        if count := heads.get(module.rpartition(".")[2]):  # the format has rotary pairs side by side
            value = value.view(count, 2, -1, *value.shape[1:]).transpose(1, 2).reshape(value.shape)
        block = module.split(".", 3)
        known = NAMES.get(module) or f"blk.{block[2]}.{NAMES[block[3]]}"
        writer.add_tensor(f"{known}.{kind}", value.contiguous().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return folder


@pytest.mark.door(
    "gguf, transformers",
    load="`from_pretrained(gguf_file=)`, then `zo.offload`",
    between="",
    save="`zo.export_pretrained`, read by `zo.load_pretrained`",
    outcome="right",
)
def test_a_model_read_from_gguf_is_written(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    plain = tools.llama()
    model = AUTO.from_pretrained(gguf_file(tmp_path / "in", plain), gguf_file="model.gguf", dtype=torch.float32)
    offloaded(model, tmp_path / "nvme", "fp32")
    zo.export_pretrained(model, tmp_path / "ours")
    zo.close(model)
    assert is_same(tensors(tmp_path / "ours"), dict(plain.state_dict()))
    with zo.deferred_init(values="skip"):
        again = AUTO.from_config(transformers.AutoConfig.from_pretrained(tmp_path / "ours"))
    zo.load_pretrained(again, tmp_path / "ours")
    assert is_same(dict(zo.offload(again, zo.OffloadConfig(precision="fp32")).state_dict()), dict(plain.state_dict()))
    zo.close(again)


def test_words_of_a_quantization_go_with_its_weights(tmp_path: Path) -> None:
    """Where gguf is not installed, too: its reader leaves such a config beside plain weights."""
    model = tools.llama()
    model.config.quantization_config = transformers.GgufConfig()
    zo.offload(model, zo.OffloadConfig(precision="fp32"))
    zo.export_pretrained(model, tmp_path / "ours")
    zo.close(model)
    assert "quantization_config" not in words(tmp_path / "ours")


@pytest.mark.door(
    "gguf, transformers",
    load="`from_pretrained(gguf_file=)`",
    between="a llama with scaled rotary positions, and with biases",
    outcome="lost: the scaling and the biases",
    instead="the folder that the file was made of",
)
def test_transformers_reads_a_part_of_gguf(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    plain = tools.llama(rope_parameters=SCALING, attention_bias=True)
    model = AUTO.from_pretrained(gguf_file(tmp_path / "in", plain), gguf_file="model.gguf", dtype=torch.float32)
    assert model.config.rope_parameters["rope_type"] == "default" and not model.config.attention_bias
    assert {name.rpartition(".")[2] for name in plain.state_dict().keys() - model.state_dict().keys()} == {"bias"}


@pytest.mark.door(
    "gguf, transformers",
    load="`zo.load_pretrained` of a GGUF file",
    outcome="refused: the format",
    instead="the folder that the file was made of",
)
def test_a_gguf_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    tools.llama().config.save_pretrained(tmp_path)
    refused(tmp_path, "but model.gguf .pickled weights and GGUF are not loaded")
    model = zo.offload(tools.llama(), zo.OffloadConfig(precision="fp32"))
    with pytest.raises(zo.CheckpointError, match="give the folder of safetensors that it was made of"):
        zo.load_pretrained(model, tmp_path / "model.gguf")
    zo.close(model)


# Models of other packages


class Wrapped(nn.Module):
    """A model of transformers and a head, which shows the config of the former, as Trainer and others ask for it."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = tools.llama().model
        self.head = nn.Linear(64, 2)
        self.config = self.backbone.config


@pytest.mark.door(
    "transformers",
    load="`zo.load_pretrained`",
    between="a model around one of transformers, with the config of the latter",
    save="`zo.export_pretrained`",
    outcome="right",
)
def test_a_config_of_an_inner_model_is_not_written(tmp_path: Path) -> None:
    """transformers would find none of its names, and draw all weights, with a line in its log."""
    torch.manual_seed(0)
    model = Wrapped()
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    zo.offload(model, zo.OffloadConfig(precision="fp32"))
    with pytest.warns(UserWarning, match="config of this Wrapped is that of its 'backbone', and is not written"):
        zo.export_pretrained(model, tmp_path / "ours")
    assert not (tmp_path / "ours" / "config.json").exists()
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    zo.load_pretrained(model, tmp_path / "ours")
    assert is_same(dict(model.state_dict()), expected)
    zo.close(model)


@pytest.mark.door(
    "sentence-transformers",
    load="`SentenceTransformer`, then `zo.offload`",
    between="pooling, a dense layer and a norm",
    save="`SentenceTransformer.save`, on one rank",
    outcome="right",
)
@pytest.mark.door(
    "sentence-transformers",
    load="`SentenceTransformer` of a folder",
    between="",
    save="`zo.export_pretrained`",
    outcome="refused: no config, and a warning when it is written",
    instead="`SentenceTransformer.save`; `zo.load_pretrained` of the folder",
)
def test_embedding_models(tmp_path: Path) -> None:
    library: Any = pytest.importorskip("sentence_transformers")
    parts: Any = pytest.importorskip("sentence_transformers.models")
    body = parts.Transformer(str(folders.write_folder(tmp_path / "base", "bert")))
    width = transformers.AutoConfig.from_pretrained(tmp_path / "base").hidden_size
    model = library.SentenceTransformer(
        modules=[body, parts.Pooling(width), parts.Dense(width, 16), parts.Normalize()], device="cpu"
    )
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    zo.offload(model, zo.OffloadConfig(precision="fp32"))
    model.save(str(tmp_path / "saved"))
    with pytest.warns(UserWarning, match="config of this SentenceTransformer is that of its .* and is not written"):
        zo.export_pretrained(model, tmp_path / "ours")
    with pytest.raises(Exception, match="ours"):
        library.SentenceTransformer(str(tmp_path / "ours"), device="cpu")
    for param in model.parameters():
        param.data.zero_()
    zo.load_pretrained(model, tmp_path / "ours")
    assert is_same(dict(model.state_dict()), expected)
    zo.close(model)
    assert is_same(library.SentenceTransformer(str(tmp_path / "saved"), device="cpu").state_dict(), expected)


@pytest.mark.door(
    "timm",
    load="`zo.load_pretrained` of a folder by `save_for_hf`",
    save="`zo.export_pretrained`, read by `timm.create_model(checkpoint_path=)`",
    outcome="right",
)
@pytest.mark.door(
    "timm",
    load='`timm.create_model("local-dir:...")`',
    save="`zo.export_pretrained`",
    outcome="refused: a FileNotFoundError of timm; the folder has no config",
    instead="`timm.create_model(checkpoint_path=)`",
)
@pytest.mark.parametrize("name", ["vit_tiny_patch16_224", "resnet18"])
def test_models_of_timm(name: str, tmp_path: Path) -> None:
    timm: Any = pytest.importorskip("timm")
    hub: Any = pytest.importorskip("timm.models._hub")
    plain = timm.create_model(name, num_classes=7)
    expected = dict(plain.state_dict())
    hub.save_for_hf(plain, str(tmp_path / "theirs"), safe_serialization=True)
    with zo.deferred_init(values="skip"):
        model = timm.create_model(name, num_classes=7)
    zo.load_pretrained(model, tmp_path / "theirs")
    offloaded(model, tmp_path / "nvme", "fp32")
    assert is_same(dict(model.state_dict()), expected)
    zo.export_pretrained(model, tmp_path / "ours")
    zo.close(model)
    file = str(tmp_path / "ours" / "model.safetensors")
    assert is_same(timm.create_model(name, num_classes=7, checkpoint_path=file).state_dict(), expected)
    with pytest.raises(FileNotFoundError, match="config"):
        timm.create_model(f"local-dir:{tmp_path / 'ours'}")
