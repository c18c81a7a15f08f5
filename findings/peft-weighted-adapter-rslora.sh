#!/bin/sh
# peft 0.21.2, add_weighted_adapter: if the first adapter has `use_rslora=True`, the combined adapter is too strong by
# the square root of its rank.
#
# `LoraModel.add_weighted_adapter` (peft/tuners/lora/model.py) copies the config of the first adapter with
# `lora_alpha=new_rank`, which gives a scaling of alpha / r = 1, for the scalings of the sources are already in the new
# matrices. `use_rslora` is copied too, and then the scaling is alpha / sqrt(r) = sqrt(r): 2.8 for two adapters of rank
# 4 by "cat", 4 by "svd" with rank 16. One would expect the weighted sum of the adapters' changes of the weight, as
# without rsLoRA. The documentation of the method names no limit. Upstream: issue 3761, open.
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
from peft import LoraConfig, get_peft_model

print("torch", torch.__version__, "peft", peft.__version__)


def combined(rslora, kind, rank):
    """The combined change of the weight: the multiple of the weighted sum of its sources, and the largest rest."""
    torch.manual_seed(0)
    model = get_peft_model(
        torch.nn.Sequential(torch.nn.Linear(32, 32)),
        LoraConfig(target_modules=["0"], r=4, use_rslora=rslora, init_lora_weights=False),
        adapter_name="a",
    )
    model.add_adapter("b", LoraConfig(target_modules=["0"], r=4, use_rslora=rslora, init_lora_weights=False))
    layer = model.base_model.model[0]
    expected = 0.3 * layer.get_delta_weight("a") + 0.7 * layer.get_delta_weight("b")
    model.base_model.add_weighted_adapter(["a", "b"], [0.3, 0.7], "c", combination_type=kind, svd_rank=rank)
    found = layer.get_delta_weight("c")
    factor = ((found * expected).sum() / expected.square().sum()).item()
    return factor, (found - factor * expected).abs().max().item()


holds = True
for rslora in (False, True):
    for kind, rank, wrong in (("cat", None, 8**0.5), ("svd", 16, 4.0)):
        factor, rest = combined(rslora, kind, rank)
        print(f"use_rslora={rslora}, {kind}: {factor:.4f} times the weighted sum (rest {rest:.1g})")
        holds &= abs(factor - (wrong if rslora else 1.0)) < 1e-3 and rest < 1e-4
print("as described" if holds else "CHANGED")
sys.exit(not holds)
PY
