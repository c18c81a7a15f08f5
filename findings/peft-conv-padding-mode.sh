#!/bin/sh
# peft 0.21.2, adapters of convolutions: `padding_mode` (LoRA, LoHa, LoKr) and `dilation` (LoRA) of the layer are not
# used in the adapter's branch, so the merged model is another one than the trained one.
#
# `_ConvNd.update_layer` (peft/tuners/lora/layer.py) makes `lora_A` a convolution with the kernel size, stride and
# padding of its base, no more. The branch pads with zeros where the base pads "circular" or "reflect", and with
# padding="same", which keeps the shapes equal, it has no dilation. `merge_and_unload` adds the matrices to a weight
# that is used with both, and gives other outputs. One would expect equal outputs before and after a merge, as for zero
# padding. Upstream: issue 3697, for LoRA; its change is open.
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
from peft import LoHaConfig, LoKrConfig, LoraConfig, get_peft_model

print("torch", torch.__version__, "peft", peft.__version__)


def difference(config, **options):
    """The largest difference of outputs before and after the merge, as a part of the largest output."""
    torch.manual_seed(0)
    model = get_peft_model(torch.nn.Sequential(torch.nn.Conv2d(8, 8, 3, **options)), config).eval()
    image = torch.randn(2, 8, 10, 10)
    with torch.no_grad():
        before = model(image)
        after = model.merge_and_unload()(image)
    return ((before - after).abs().max() / before.abs().max()).item()


holds = True
for options, wrong in (
    ({"padding": 1}, ""),
    ({"padding": 1, "padding_mode": "circular"}, "LoraConfig LoHaConfig LoKrConfig"),
    ({"padding": 1, "padding_mode": "reflect"}, "LoraConfig LoHaConfig LoKrConfig"),
    ({"padding": "same", "dilation": 2}, "LoraConfig"),
):
    for make in (LoraConfig, LoHaConfig, LoKrConfig):
        start = {"init_lora_weights" if make is LoraConfig else "init_weights": False}
        found = difference(make(target_modules=["0"], r=4, **start), **options)
        print(f"{make.__name__}, {options}: the merged model differs by {found:.2g} of the largest output")
        holds &= (found > 1e-2) if make.__name__ in wrong else (found < 1e-5)
print("as described" if holds else "CHANGED")
sys.exit(not holds)
PY
