#!/bin/sh
# peft 0.21.2 (torch 2.13.0), LoRA in torch.nn.TransformerEncoderLayer: `eval()` leaves the adapters out, and an adapter
# of `out_proj` has no effect in `train()` either.
#
# In `eval()` `TransformerEncoderLayer.forward` (torch/nn/modules/transformer.py) takes a fused path, which reads
# `self.linear1.weight` and never calls `self.linear1`. A LoRA layer gives its base's weight under that name
# (`BaseTunerLayer.weight`, peft/tuners/tuners_utils.py). The path is taken with gradients switched on too, for the
# base's parameters are frozen. `MultiheadAttention.forward` reads `self.out_proj.weight` in every mode. So training
# changes the adapters of `linear1` and `linear2`, and every evaluation is of the base model, until a merge. One would
# expect the same output in `eval()` as in `train()` without dropout, or a layer that peft refuses. torch's
# documentation of the path names `eval()` and autograd, and no wrapped layers.
# `torch.backends.mha.set_fastpath_enabled(False)` avoids the path.
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


def effects(targets):
    """How far each output is from the base model's, and the largest gradient of the adapters in `train()`."""
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    encoder = torch.nn.TransformerEncoder(layer, 2)
    text = torch.randn(2, 5, 16)
    base = encoder.eval()(text).detach()
    model = get_peft_model(encoder, LoraConfig(target_modules=targets, r=4, init_lora_weights=False))
    outputs = {"train()": model.train()(text)}
    (outputs["train()"].square().mean() + 0 * sum(value.sum() for value in model.parameters())).backward()
    gradient = max(value.grad.abs().max().item() for value in model.parameters() if value.requires_grad)
    outputs["eval()"] = model.eval()(text)
    with torch.no_grad():
        outputs["eval(), no_grad"] = model(text)
        torch.backends.mha.set_fastpath_enabled(False)
        outputs["eval(), no fast path"] = model(text)
        torch.backends.mha.set_fastpath_enabled(True)
        outputs["merged"] = model.merge_and_unload()(text)
    return {name: (output.detach() - base).abs().max().item() for name, output in outputs.items()}, gradient


holds = True
for targets, without in (
    (["linear1", "linear2"], ["eval()", "eval(), no_grad"]),
    (["out_proj"], ["train()", "eval()", "eval(), no_grad", "eval(), no fast path"]),
):
    effect, gradient = effects(targets)
    print(f"LoRA on {targets}: largest gradient in train() {gradient:.3g}; the output differs from the base's by")
    for name, value in effect.items():
        print(f"  {name}: {value:.3g}")
        holds &= (value < 1e-5) if name in without else (value > 1e-2)
    holds &= (gradient == 0) == ("train()" in without)
print("as described" if holds else "CHANGED")
sys.exit(not holds)
PY
