#!/bin/sh
# peft 0.21.2, LoraConfig(target_parameters=[...]): `layers_to_transform` and `exclude_modules` have no effect on
# parameters, so every layer gets an adapter, without a message.
#
# `BaseTuner._inject_parameters` (peft/tuners/tuners_utils.py) compares the end of each parameter's name with
# `target_parameters` and asks nothing else. `check_target_module_exists`, which knows both options, is asked for
# modules alone. Experts of a mixture are such parameters: with one config the attention of one layer is trained and
# the experts of all. One would expect one choice of layers for both, or an error as for `use_dora` and `lora_bias`:
# the documentation says that `target_parameters` "behaves similarly to `target_modules`". Full names in
# `target_parameters` (`layers.0.mlp.experts.down_proj`) choose layers.
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
venv=${FINDINGS_VENV:-$work/venv}
[ -x "$venv/bin/python" ] || python3 -m venv "$venv"
"$venv/bin/pip" install --quiet --disable-pip-version-check \
    torch==2.13.0 numpy==2.4.6 peft==0.21.2 transformers==5.23.0 accelerate==1.15.0 safetensors==0.8.0
cd "$work"
"$venv/bin/python" - 2>"$work/errors" <<'PY' || { tail -5 "$work/errors"; exit 1; }
import sys, warnings, peft, torch, transformers
from peft import LoraConfig, get_peft_model
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

print("peft", peft.__version__, "transformers", transformers.__version__, "torch", torch.__version__)
config = Qwen3MoeConfig(
    hidden_size=32, moe_intermediate_size=32, num_experts=4, num_experts_per_tok=2, num_hidden_layers=3, vocab_size=64,
    num_attention_heads=4, num_key_value_heads=4, head_dim=8, max_position_embeddings=64,
)
experts = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
holds = True
for what, options, expected in (
    ("no limit", dict(target_parameters=experts), {"self_attn": [0, 1, 2], "mlp": [0, 1, 2]}),
    ("layers_to_transform=[0]", dict(target_parameters=experts, layers_to_transform=[0]),
     {"self_attn": [0], "mlp": [0, 1, 2]}),
    ("exclude_modules of layers 1 and 2", dict(target_parameters=experts, exclude_modules=r".*layers\.[12]\..*"),
     {"self_attn": [0], "mlp": [0, 1, 2]}),
    ("full names", dict(target_parameters=[f"layers.0.{name}" for name in experts], layers_to_transform=[0]),
     {"self_attn": [0], "mlp": [0]}),
):
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        model = get_peft_model(Qwen3MoeForCausalLM(config), LoraConfig(r=4, target_modules=["q_proj"], **options))
    layers = {"self_attn": set(), "mlp": set()}
    for name, param in model.named_parameters():
        if param.requires_grad:
            parts = name.split(".")
            layers[parts[parts.index("layers") + 2]].add(int(parts[parts.index("layers") + 1]))
    layers = {key: sorted(value) for key, value in layers.items()}
    named = [str(w.message) for w in told if "layers_to_transform" in str(w.message) or "exclude" in str(w.message)]
    print(f"{what}: adapters of q_proj in layers {layers['self_attn']}, of experts in {layers['mlp']}", end="; ")
    print("warnings", named)
    holds &= layers == expected and not named
print("as described" if holds else "CHANGED")
sys.exit(not holds)
PY
