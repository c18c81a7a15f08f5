#!/bin/sh
# peft 0.21.2, convert_to_lora and save_as_lora: an adapter with `use_dora=True` is converted as if it were plain LoRA,
# at any rank. The result is further from the trained model than the base is.
#
# `convert_to_lora` asks each layer `supports_lora_conversion`, which variants of LoRA answer with True unless they say
# otherwise (peft/tuners/lora/layer.py), and DoRA's does not. It then factors `get_delta_weight`, which is B times A
# without the magnitudes. The only word is a warning that the adapter is a LoRA adapter already. One would expect the
# docstring's "as close as possible", which full rank makes exact for LoHa here, or the TypeError that OFT gets.
# Servers that read plain LoRA and no DoRA are the reason for such a conversion.
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
venv=${FINDINGS_VENV:-$work/venv}
[ -x "$venv/bin/python" ] || python3 -m venv "$venv"
"$venv/bin/pip" install --quiet --disable-pip-version-check \
    torch==2.13.0 numpy==2.4.6 peft==0.21.2 transformers==5.23.0 accelerate==1.15.0 safetensors==0.8.0
cd "$work"
"$venv/bin/python" -W ignore - <<'PY'
import sys, peft, torch
from peft import LoHaConfig, LoraConfig, OFTConfig, PeftModel, get_peft_model
from peft.tuners.lora.conversion import save_as_lora

print("torch", torch.__version__, "peft", peft.__version__)


def net():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 32))


torch.manual_seed(9)
x = torch.randn(8, 32)
base = net()(x)
layers = ["0", "2"]
holds = True
for what, config, expected in (
    ("LoHa", LoHaConfig(r=4, target_modules=layers), "right"),
    ("OFT", OFTConfig(oft_block_size=8, target_modules=layers), "TypeError"),
    ("DoRA", LoraConfig(r=4, lora_alpha=32, use_dora=True, target_modules=layers), "wrong"),
):
    model = get_peft_model(net(), config)
    with torch.no_grad():
        for param in model.parameters():
            if param.requires_grad:
                param.add_(torch.randn_like(param), alpha=0.1)
    trained = model(x)
    try:
        save_as_lora(what, model, rank=32)  # full rank
        off = (PeftModel.from_pretrained(net(), what)(x) - trained).abs().max().item()
        moved = (trained - base).abs().max().item()
        found = "right" if off < 1e-4 else "wrong"
        print(f"{what}, converted with full rank: off by {off:.1g}; training had moved outputs by {moved:.1g}")
        holds &= found == "right" or off > moved
    except TypeError as error:
        found = "TypeError"
        print(f"{what}: TypeError {error}")
    holds &= found == expected
print("as described" if holds else "CHANGED")
sys.exit(not holds)
PY
