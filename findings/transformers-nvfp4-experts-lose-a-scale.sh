#!/bin/sh
# transformers 5.23.0 with compressed-tensors 0.20.1, from_pretrained of a mixture of experts in NVFP4: the experts'
# weights are not divided by their global scale, thousands times too large, without a message.
#
# `CompressedTensorsDequantize` (transformers/integrations/compressed_tensors.py) builds a module of `weight_packed`,
# `weight_scale` and `weight_shape` for each expert, and has no place for `weight_global_scale`, which the loader did
# read. compressed-tensors takes a missing global scale for one. Experts are fused, so they are dequantized at each
# load, with `dequantize=True` or without. One would expect code x scale / global scale, as for the attention beside
# them.
# Upstream: issue 48371, open.
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
from compressed_tensors.compressors import NVFP4PackedCompressor
from compressed_tensors.quantization import QuantizationConfig, QuantizationScheme
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, CompressedTensorsConfig, Qwen3MoeConfig, Qwen3MoeForCausalLM

print("transformers", transformers.__version__, "compressed-tensors", compressed_tensors.__version__)
torch.manual_seed(0)
config = Qwen3MoeConfig(
    hidden_size=64, moe_intermediate_size=64, num_experts=4, num_experts_per_tok=2, num_hidden_layers=1, vocab_size=64,
    num_attention_heads=4, num_key_value_heads=4, head_dim=16, max_position_embeddings=64,
)
model = Qwen3MoeForCausalLM(config).to(torch.bfloat16)
model.save_pretrained("folder")
weights = dict(num_bits=4, type="float", strategy="tensor_group", group_size=16, symmetric=True)
scheme = QuantizationScheme(
    targets=[r"re:.*_proj$"], weights=weights | {"scale_dtype": torch.float8_e4m3fn}, format="nvfp4-pack-quantized"
)
levels = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.5, -1, -1.5, -2, -3, -4, -6])
tensors, wanted = {}, {}
for name, tensor in load_file("folder/model.safetensors").items():
    module = name.removesuffix(".weight")
    if not module.endswith("_proj"):
        tensors[name] = tensor
        continue
    wanted[name] = (levels[torch.randint(0, 15, tensor.shape)] / 128).to(torch.bfloat16)  # 16 / 2048 = 1 / 128
    parts = {"weight": wanted[name], "weight_global_scale": torch.tensor([2048.0])}
    parts["weight_scale"] = torch.full((tensor.shape[0], tensor.shape[1] // 16), 16.0)
    parts = NVFP4PackedCompressor.compress(parts, scheme)
    tensors |= {f"{module}.{part}": value.contiguous() for part, value in parts.items()}
save_file(tensors, "folder/model.safetensors", metadata={"format": "pt"})
quantization = QuantizationConfig(
    config_groups={"group_0": scheme}, ignore=["lm_head"], quantization_status="compressed", format=scheme.format
)
data = json.load(open("folder/config.json"))
data["quantization_config"] = quantization.model_dump() | {"version": compressed_tensors.__version__}
json.dump(data, open("folder/config.json", "w"))

holds = True
for what, options in (
    ("as it is", {}),
    ("dequantize=True", {"quantization_config": CompressedTensorsConfig(dequantize=True)}),
):
    loaded, info = AutoModelForCausalLM.from_pretrained("folder", **options, output_loading_info=True)
    loaded(torch.arange(8)[None])  # expands the codes of the attention
    state, ratios = loaded.state_dict(), {"attention": set(), "experts": set()}
    for name, weight in wanted.items():
        if expert := re.match(r"(.*experts)\.(\d+)\.(gate|up|down)_proj", name):
            prefix, number, kind = expert.groups()
            fused = state[f"{prefix}.{'down' if kind == 'down' else 'gate_up'}_proj"][int(number)]
            found = fused if kind == "down" else fused.chunk(2)[kind == "up"]
        else:
            found = state[name]
        there = weight != 0
        ratios["experts" if expert else "attention"] |= set((found[there].float() / weight[there].float()).tolist())
    missing = {key: len(info[key]) for key in ("missing_keys", "unexpected_keys", "mismatched_keys")}
    print(f"{what}: loaded / stored weights: attention {ratios['attention']}, experts {ratios['experts']}; {missing}")
    holds &= ratios == {"attention": {1.0}, "experts": {2048.0}}
print("as described" if holds else "CHANGED")
sys.exit(not holds)
PY
