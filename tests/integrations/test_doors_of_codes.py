"""Doors of folders whose weights other libraries have quantized: compressed-tensors, torchao, AWQ."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path
from typing import Any

import pytest

import tests.helpers.tools as tools  # before transformers  # isort: skip
import torch
import transformers
from torch import Tensor, nn

import zero_offload as zo
from tests.integrations.test_doors import (
    AUTO,
    BF16,
    BLOCK,
    IDS,
    four_bits,
    in_bf16,
    is_same,
    offloaded,
    packed,
    refused,
    tensors,
    with_words,
    words,
)

pytestmark = pytest.mark.tools
GROUP = 64


def base(place: Path) -> Path:
    tools.llama(num_key_value_heads=4).to(BF16).save_pretrained(place / "base")  # type: ignore[arg-type]
    return place / "base"


# compressed-tensors

SCHEMES = ["W4A16", "FP8_DYNAMIC"]


def compressed(place: Path, scheme: str) -> Path:
    """A folder as llm-compressor writes it, by the library itself."""
    quantization: Any = pytest.importorskip("compressed_tensors.quantization")
    compressors: Any = pytest.importorskip("compressed_tensors.compressors")
    model = in_bf16(base(place))
    args = quantization.preset_name_to_scheme(scheme, ["Linear"])
    if args.weights.group_size:
        args.weights.group_size = GROUP
    groups = {"config_groups": {"group_0": args}, "ignore": ["lm_head"]}
    quantization.apply_quantization_config(model, quantization.QuantizationConfig(**groups))
    for module in model.modules():
        if (found := getattr(module, "quantization_scheme", None)) is not None:
            shape, largest = module.weight_scale.shape, 448 if found.weights.type == "float" else 7
            amount = module.weight.data.float().view(*shape, -1).abs().amax(-1)
            module.weight_scale.data.copy_(amount / largest)
    compressor = compressors.ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(place / "compressed")
    compressor.update_config(str(place / "compressed"))
    return place / "compressed"


def dequantized(folder: Path) -> Any:
    config = transformers.CompressedTensorsConfig(dequantize=True)
    return AUTO.from_pretrained(folder, dtype=BF16, quantization_config=config)


@pytest.mark.door(
    "compressed-tensors, transformers",
    load="`from_pretrained(quantization_config=CompressedTensorsConfig(dequantize=True))`",
    between="int4 in groups, fp8 in rows",
    save="`zo.export_pretrained`, read by `zo.load_pretrained`",
    outcome="right",
)
@pytest.mark.door(
    "compressed-tensors, transformers",
    load="`from_pretrained(quantization_config=CompressedTensorsConfig(dequantize=True))`",
    between="int4 in groups, fp8 in rows",
    save="`save_pretrained`",
    outcome="right",
)
@pytest.mark.parametrize("scheme", SCHEMES)
def test_dequantized_weights(scheme: str, tmp_path: Path) -> None:
    folder = compressed(tmp_path, scheme)
    model = dequantized(folder)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    if scheme == "W4A16":  # 0.20.1 refuses fp8 beside embeddings, whose names have the same end
        convert: Any = pytest.importorskip("compressed_tensors.entrypoints.convert")
        convert.convert_checkpoint(folder, tmp_path / "dense", convert.CompressedTensorsDequantizer(folder))
        assert is_same(in_bf16(tmp_path / "dense").state_dict(), expected)
    model.save_pretrained(tmp_path / "theirs")
    offloaded(model, tmp_path / "nvme")
    zo.export_pretrained(model, tmp_path / "ours")
    zo.close(model)
    for written in ("theirs", "ours"):
        assert "quantization_config" not in words(tmp_path / written)
        assert is_same(tensors(tmp_path / written), tensors(tmp_path / "ours"))
        assert is_same(in_bf16(tmp_path / written).state_dict(), expected)
    with zo.deferred_init(values="skip"):
        again = AUTO.from_config(transformers.AutoConfig.from_pretrained(tmp_path / "ours"))
    zo.load_pretrained(again, tmp_path / "ours")
    assert is_same(dict(offloaded(again, tmp_path / "again").state_dict()), expected)
    zo.close(again)


@pytest.mark.door(
    "compressed-tensors, transformers",
    load="`from_pretrained`",
    between="int4 in groups, fp8 in rows, before and after a forward",
    save="`save_pretrained`",
    outcome="right",
)
@pytest.mark.door(
    "compressed-tensors, transformers",
    load="`from_pretrained`, then `zo.offload`",
    between="int4 in groups, fp8 in rows, before and after a forward",
    outcome="refused: the compressed module",
    instead="`CompressedTensorsConfig(dequantize=True)`",
)
@pytest.mark.parametrize("has_run", [False, True])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_compressed_weights(scheme: str, has_run: bool, tmp_path: Path) -> None:
    """The first forward takes parameters out of modules, and puts others in."""
    model = in_bf16(compressed(tmp_path, scheme)).eval()
    expected = in_bf16(tmp_path / "compressed").eval()(IDS).logits
    if has_run:
        assert torch.equal(model(IDS).logits, expected)
    model.save_pretrained(tmp_path / "theirs")
    assert torch.equal(in_bf16(tmp_path / "theirs").eval()(IDS).logits, expected)
    advice = r"^model\.\S+ is compressed by compressed-tensors.*dequantize=True.*convert_checkpoint"
    with pytest.raises(zo.ConfigError, match=advice):
        offloaded(model, tmp_path / "nvme")


class Compressed(torch.nn.Linear):
    """As compressed-tensors marks one, where it is not installed too."""

    class quantization_status:  # noqa: N801
        value = "compressed"


def test_a_compressed_module_is_refused_by_its_name() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), Compressed(4, 4))
    with pytest.raises(zo.ConfigError, match=r"^1 is compressed by compressed-tensors, which puts other parameters"):
        zo.offload(model, zo.OffloadConfig(precision="fp32"))


# torchao


@pytest.mark.door(
    "torchao, transformers",
    load="`from_pretrained` of a folder of torchao",
    between="int8, fp8",
    save="`save_pretrained`",
    outcome="refused: a NotImplementedError of transformers, without words",
    instead="`save_pretrained(save_original_format=False)`",
)
@pytest.mark.door(
    "torchao, transformers",
    load="`from_pretrained` of a folder of torchao",
    between="int8, fp8",
    save="`save_pretrained(save_original_format=False)`",
    outcome="right",
)
@pytest.mark.parametrize("kind", ["int8", "fp8"])
def test_a_folder_of_torchao_is_written_again(kind: str, tmp_path: Path) -> None:
    from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig

    kinds: dict[str, Any] = {"int8": lambda: Int8WeightOnlyConfig(version=2), "fp8": Float8WeightOnlyConfig}
    config = transformers.TorchAoConfig(quant_type=kinds[kind]())
    model = AUTO.from_pretrained(base(tmp_path), dtype=BF16, quantization_config=config, device_map="cpu")
    model.save_pretrained(tmp_path / "first")
    read = AUTO.from_pretrained(tmp_path / "first", dtype=BF16, device_map="cpu")
    with pytest.raises(NotImplementedError):
        read.save_pretrained(tmp_path / "refused")
    read.save_pretrained(tmp_path / "second", save_original_format=False)
    assert is_same(tensors(tmp_path / "second"), tensors(tmp_path / "first"))
    again = AUTO.from_pretrained(tmp_path / "second", dtype=BF16, device_map="cpu")
    assert torch.equal(again.eval()(IDS).logits, model.eval()(IDS).logits)


# AWQ


@pytest.mark.door(
    "transformers",
    load="`from_pretrained` of a folder of AWQ",
    between="without gptqmodel",
    outcome="refused: an ImportError of transformers",
    instead="the folder that was quantized, with `quantize=`",
)
def test_a_folder_of_awq_needs_gptqmodel(tmp_path: Path) -> None:
    if any(each.metadata["Name"].lower() == "gptqmodel" for each in importlib.metadata.distributions()):
        pytest.skip("gptqmodel is installed")
    folder = base(tmp_path)
    method = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
    (folder / "config.json").write_text(json.dumps(words(folder) | {"quantization_config": method}))
    with pytest.raises(ImportError, match="requires gptqmodel"):
        in_bf16(folder)
    refused(folder, r"\(awq\).*Give the folder of the model that was quantized")


AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Columns of the eight values in an int32."""


def awq(place: Path) -> Path:
    """A folder in the form "gemm", as most are published."""
    tools.llama(num_key_value_heads=4).half().save_pretrained(place / "base")
    values: dict[str, Tensor] = {}
    for name, weight in tensors(place / "base").items():
        if "_proj" not in name:
            values[name] = weight
            continue
        (codes, scales, zeros), layer = four_bits(weight), name.removesuffix(".weight")
        values[f"{layer}.qweight"], values[f"{layer}.qzeros"] = packed(codes.T, AWQ_ORDER), packed(zeros.T, AWQ_ORDER)
        values[f"{layer}.scales"] = scales.T.contiguous()
    method = {"quant_method": "awq", "bits": 4, "group_size": BLOCK, "zero_point": True, "version": "gemm"}
    return with_words(place / "base", place / "awq", values, quantization_config=method)


def read_awq(folder: Path, dtype: torch.dtype) -> Any:
    """By the kernel in Python, which trains on a CPU."""
    settings = transformers.AwqConfig(bits=4, group_size=BLOCK, backend="torch_awq")
    return AUTO.from_pretrained(folder, dtype=dtype, device_map="cpu", quantization_config=settings)


@pytest.mark.door(
    "gptqmodel, transformers",
    load="`from_pretrained`, then `zo.offload`",
    between="AWQ, in fp16",
    save="`zo.export_pretrained`",
    outcome="right",
)
@pytest.mark.door(
    "gptqmodel, transformers",
    load="`from_pretrained`",
    between="AWQ, in fp16",
    save="`save_pretrained`",
    outcome="right",
)
def test_a_folder_of_awq_there_and_back(tmp_path: Path) -> None:
    pytest.importorskip("gptqmodel")
    folder = awq(tmp_path)
    model = read_awq(folder, torch.float16).eval()
    expected = model(IDS).logits
    model.save_pretrained(tmp_path / "theirs")
    offloaded(model.requires_grad_(False), tmp_path / "nvme", "fp16")
    assert torch.equal(model(IDS).logits, expected)
    zo.export_pretrained(model, tmp_path / "ours")
    zo.close(model)
    for name in ("theirs", "ours"):
        assert is_same(tensors(tmp_path / name), tensors(folder))
    assert torch.equal(read_awq(tmp_path / "ours", torch.float16).eval()(IDS).logits, expected)


@pytest.mark.door(
    "gptqmodel, transformers",
    load="`from_pretrained`",
    between="AWQ in fp16, a forward in bf16",
    save="`save_pretrained`",
    outcome="lost: bits of the scales, which the forward rounds",
    instead="the folder itself, or `dtype=torch.float16`",
)
@pytest.mark.door(
    "gptqmodel, transformers",
    load="`from_pretrained`, then `zo.offload`",
    between="AWQ in fp16, a forward in bf16",
    save="`zo.export_pretrained`",
    outcome="refused: the tensors that the forward has replaced",
    instead="`dtype=torch.float16`, or a forward before `zo.offload`",
)
def test_scales_of_awq_are_rounded_by_a_forward(tmp_path: Path) -> None:
    pytest.importorskip("gptqmodel")
    folder = awq(tmp_path)
    model = read_awq(folder, BF16).eval()
    expected = model(IDS).logits
    model.save_pretrained(tmp_path / "theirs")
    name = "model.layers.0.self_attn.q_proj.scales"
    assert not torch.equal(tensors(tmp_path / "theirs")[name].float(), tensors(folder)[name].float())
    model = offloaded(read_awq(folder, BF16).eval().requires_grad_(False), tmp_path / "nvme")
    assert torch.equal(model(IDS).logits, expected)
    with pytest.raises(zo.ConfigError, match=r"\d+ tensors of this model replaced.*layers\.0\..*AwqTorchLinear"):
        zo.export_pretrained(model, tmp_path / "ours")
    zo.close(model)


class Converted(nn.Module):
    """A layer of packed weights, whose first forward gives its scales another dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("qweight", torch.ones(4, 4, dtype=torch.int32))
        self.register_buffer("scales", torch.full((4,), 0.1, dtype=torch.float16))

    def forward(self, x: Tensor) -> Tensor:
        if self.scales.dtype != x.dtype:
            self.scales = self.scales.to(x.dtype)
        return x @ (self.qweight * self.scales)


def test_tensors_that_a_forward_replaces_are_named(tmp_path: Path) -> None:
    """Converted before `zo.offload`, they are exported."""
    x = torch.ones(1, 4, dtype=BF16)
    for is_called_before in (False, True):
        model = nn.Sequential(Converted(), nn.Linear(4, 4))
        if is_called_before:
            model[0](x)
        zo.offload(model, zo.OffloadConfig(precision="bf16"))
        expected = model(x)
        if is_called_before:
            zo.export_pretrained(model, tmp_path / "out")
            assert tensors(tmp_path / "out")["0.scales"].dtype == BF16
        else:
            says = r"finds 1 tensors .* first is 0\.scales of Converted\. Call the model once before zo\.offload"
            with pytest.raises(zo.ConfigError, match=says):
                zo.export_pretrained(model, tmp_path / "out")
        assert torch.equal(model(x), expected)
        zo.close(model)
