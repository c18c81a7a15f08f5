#!/bin/sh
# transformers 5.23.0 with compressed-tensors 0.20.1, from_pretrained(dequantize=True) of a folder whose config groups
# have 4 and 8 bits: the modules of 8 bits get other weights, without a message.
#
# `CompressedTensorsDequantize` (transformers/integrations/compressed_tensors.py) takes one config group for all dense
# modules, the first whose targets do not name experts, and one for all experts; it does not match a module's name to
# the groups' targets. The 8-bit codes are then unpacked as 4-bit ones, of which a row has enough. With the groups the
# other way round the same load raises. One would expect the group whose targets name the module, as without
# `dequantize=True`, where the first forward gives the right weights. The documentation of `dequantize` names no limit.
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
venv=${FINDINGS_VENV:-$work/venv}
[ -x "$venv/bin/python" ] || python3 -m venv "$venv"
"$venv/bin/pip" install --quiet --disable-pip-version-check \
    torch==2.13.0 numpy==2.4.6 transformers==5.23.0 compressed-tensors==0.20.1 safetensors==0.8.0
cd "$work"
"$venv/bin/python" -W ignore - 2>"$work/errors" <<'PY' || { tail -5 "$work/errors"; exit 1; }
import json, re, sys, compressed_tensors, torch, transformers
from compressed_tensors.compressors import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, CompressedTensorsConfig
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

print("transformers", transformers.__version__, "compressed-tensors", compressed_tensors.__version__)
sizes = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=4)
sizes |= dict(vocab_size=64, max_position_embeddings=64)
experts = dict(moe_intermediate_size=64, num_experts=4, num_experts_per_tok=2, head_dim=16)


def folder(model, groups):
    """A folder of weights that are codes times a power of two, so that a dequantization has nothing to round."""
    schemes = {}
    for number, (target, bits) in enumerate(groups):
        weights = dict(num_bits=bits, type="int", strategy="group", group_size=32, symmetric=True)
        schemes[f"group_{number}"] = QuantizationScheme(targets=[target], weights=weights, format="pack-quantized")
    model.to(torch.bfloat16).save_pretrained("folder")
    tensors, wanted = {}, {}
    for name, tensor in load_file("folder/model.safetensors").items():
        module = name.removesuffix(".weight")
        scheme = next((s for s in schemes.values() if re.match(s.targets[0].removeprefix("re:"), module)), None)
        if scheme is None:
            tensors[name] = tensor
            continue
        half = 2 ** (scheme.weights.num_bits - 1)
        scale = torch.full((tensor.shape[0], tensor.shape[1] // 32), 0.25 / half, dtype=torch.bfloat16)
        wanted[name] = torch.randint(-half, half, tensor.shape).to(torch.bfloat16) * (0.25 / half)
        parts = PackedQuantizationCompressor.compress({"weight": wanted[name], "weight_scale": scale}, scheme)
        tensors |= {f"{module}.{part}": value.contiguous() for part, value in parts.items()}
    save_file(tensors, "folder/model.safetensors", metadata={"format": "pt"})
    config = QuantizationConfig(
        config_groups=schemes, ignore=["lm_head"], quantization_status="compressed", format="pack-quantized"
    )
    data = json.load(open("folder/config.json"))
    data["quantization_config"] = config.model_dump() | {"version": compressed_tensors.__version__}
    json.dump(data, open("folder/config.json", "w"))
    return wanted


def off(model, wanted):
    """Names of the projections whose weights are not those of the folder."""
    state, wrong = model.state_dict(), set()
    for name, weight in wanted.items():
        if expert := re.match(r"(.*experts)\.(\d+)\.(gate|up|down)_proj", name):
            prefix, number, kind = expert.groups()
            fused = state[f"{prefix}.{'down' if kind == 'down' else 'gate_up'}_proj"][int(number)]
            found = fused if kind == "down" else fused.chunk(2)[kind == "up"]
        else:
            found = state[name]
        if not torch.equal(found, weight):
            wrong.add(name.split(".")[-2])
    return sorted(wrong)


attention, rest, down = "re:.*self_attn.*_proj$", "re:.*mlp.*_proj$", "re:.*mlp.*down_proj$"
gates = r"re:.*mlp\.experts.*(gate|up)_proj$"
downs = r"re:.*mlp\.experts.*down_proj$"
holds = True
for what, cls, config, groups, expected in (
    ("dense, 4 bits alone", LlamaForCausalLM, LlamaConfig(**sizes), [(attention, 4), (rest, 4)], []),
    ("dense, 4 bits, then 8", LlamaForCausalLM, LlamaConfig(**sizes), [(attention, 4), (rest, 8)],
     ["down_proj", "gate_proj", "up_proj"]),
    ("dense, 8 bits, then 4", LlamaForCausalLM, LlamaConfig(**sizes), [(attention, 8), (rest, 4)], "RuntimeError"),
    ("experts, 4 bits, then 8", Qwen3MoeForCausalLM, Qwen3MoeConfig(**sizes, **experts), [(gates, 4), (downs, 8)],
     ["down_proj"]),
):
    torch.manual_seed(0)
    wanted = folder(cls(config), groups)
    try:
        loaded = AutoModelForCausalLM.from_pretrained(
            "folder", quantization_config=CompressedTensorsConfig(dequantize=True)
        )
        found = off(loaded, wanted)
        print(f"{what}: {', '.join(found) or 'no projection'} with other weights")
    except RuntimeError:
        found = "RuntimeError"
        print(f"{what}: RuntimeError")
    holds &= found == expected
    if cls is LlamaForCausalLM:
        plain = AutoModelForCausalLM.from_pretrained("folder")
        plain(torch.arange(8)[None])  # expands the codes
        holds &= off(plain, wanted) == []
        print(f"  without dequantize=True, after a forward: {len(off(plain, wanted))} with other weights")
print("as described" if holds else "CHANGED")
sys.exit(not holds)
PY
