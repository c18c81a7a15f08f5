"""Small models of transformers whose linear layers a library has quantized, with adapters of peft that are trained."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from tests.helpers.tools import VOCAB, llama, transformers

import bitsandbytes as bnb  # isort: skip  # after what keeps tools off the network
import peft  # isort: skip

_SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "use_cache": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen": ("Qwen3", {"head_dim": 16, "num_key_value_heads": 2}),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_key_value_heads": 2}),
    "deepseek": (
        "DeepseekV3",
        {
            "moe_intermediate_size": 32,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 2,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "kv_lora_rank": 16,
            "q_lora_rank": 32,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16,
            "v_head_dim": 16,
        },
    ),
}
SHAPES = ("llama", *_SHAPES)
_ADAPTED = {"deepseek": ["q_b_proj", "kv_b_proj", "o_proj"]}


def _four_bit(kind: str, *, nested: bool) -> Callable[[nn.Linear], nn.Module]:
    def quantized(linear: nn.Linear) -> nn.Module:
        settings: dict[str, Any] = {"quant_type": kind, "compress_statistics": nested}
        made = bnb.nn.Linear4bit(linear.in_features, linear.out_features, linear.bias is not None, **settings)
        made.weight = bnb.nn.Params4bit(linear.weight.detach().clone(), requires_grad=False, module=made, **settings)
        made.bias = linear.bias
        made.support_avx512bf16_for_cpu = False  # as zo.offload sets it
        return made

    return quantized


def _eight_bit(linear: nn.Linear) -> nn.Module:
    made = bnb.nn.Linear8bitLt(linear.in_features, linear.out_features, linear.bias is not None, has_fp16_weights=False)
    made.weight = bnb.nn.Int8Params(linear.weight.detach().clone(), requires_grad=False, has_fp16_weights=False)
    made.bias = linear.bias
    return made


BITSANDBYTES: dict[str, Callable[[nn.Linear], nn.Module]] = {
    "nf4": _four_bit("nf4", nested=False),
    "nf4 nested": _four_bit("nf4", nested=True),
    "fp4": _four_bit("fp4", nested=False),
    "int8": _eight_bit,
}
TORCHAO = ("torchao int8", "torchao fp8")
KINDS = (*BITSANDBYTES, *TORCHAO, "plain")


def quantize_by_torchao(model: nn.Module, kind: str) -> None:
    """The linear layers inside of it, in place."""
    from torchao.quantization import Float8WeightOnlyConfig, Int8WeightOnlyConfig, quantize_

    quantize_(model, Int8WeightOnlyConfig(version=2) if kind == "torchao int8" else Float8WeightOnlyConfig())


def base_model(shape: str, kind: str, dtype: torch.dtype = torch.float32, **changes: Any) -> nn.Module:
    """Frozen, and quantized as `kind` says; always the same values."""
    if shape == "llama":
        model: nn.Module = llama(**changes)
    else:
        torch.manual_seed(0)
        name, words = _SHAPES[shape]
        config = getattr(transformers, f"{name}Config")(**(_SMALL | words | changes))
        model = getattr(transformers, f"{name}ForCausalLM")(config)
    model = model.to(dtype).requires_grad_(False)
    if kind in TORCHAO:
        quantize_by_torchao(model.model.layers, kind)
    elif kind in BITSANDBYTES:
        for parent, name, linear in list(_linears(model.model)):
            setattr(parent, name, BITSANDBYTES[kind](linear))
        model.to("cpu")
    return model.requires_grad_(False)


def adapted_model(
    shape: str, kind: str, dtype: torch.dtype = torch.float32, *, dora: bool = False, **changes: Any
) -> nn.Module:
    """With adapters of LoRA, in the dtype of the model."""
    model = base_model(shape, kind, dtype, **changes)
    torch.manual_seed(1)
    targets = _ADAPTED.get(shape, ["q_proj", "v_proj"])
    words: dict[str, Any] = {"init_lora_weights": False, "task_type": "CAUSAL_LM", "use_dora": dora}
    config = peft.LoraConfig(r=4, target_modules=targets, **words)
    made: nn.Module = peft.get_peft_model(model, config, autocast_adapter_dtype=False)
    for param in made.parameters():
        if param.requires_grad:
            param.data = param.data.to(dtype)
    return made


def _linears(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Linear]]:
    for parent in model.modules():
        for name, child in parent.named_children():
            if type(child) is nn.Linear:
                yield parent, name, child
