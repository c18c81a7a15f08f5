#!/bin/sh
# peft 0.21.2, OFT and C3A: with two active adapters the merged model is another one than the unmerged.
#
# OFT: `forward` (peft/tuners/oft/layer.py) rotates the input by the first adapter and then by the second, while
# `merge` multiplies the weight by the first rotation first, which is the other order. C3A: `forward`
# (peft/tuners/c3a/layer.py) overwrites its input with the output of the first adapter, so the second adapter gets
# that, while `merge` adds both changes to the weight. One would expect equal outputs, as for LoRA, LoKr, BOFT and HRA
# with the same calls. The documentation of `merge_and_unload(adapter_names=)` names no limit.
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
venv=${FINDINGS_VENV:-$work/venv}
[ -x "$venv/bin/python" ] || python3 -m venv "$venv"
"$venv/bin/pip" install --quiet --disable-pip-version-check \
    torch==2.13.0 numpy==2.4.6 peft==0.21.2 transformers==5.23.0 accelerate==1.15.0 safetensors==0.8.0
cd "$work"
"$venv/bin/python" -W ignore - 2>"$work/messages" <<'PY' || { cat "$work/messages" >&2; exit 1; }
import sys, peft, torch
from peft import BOFTConfig, C3AConfig, HRAConfig, LoKrConfig, LoraConfig, OFTConfig, get_peft_model

print("torch", torch.__version__, "peft", peft.__version__)
rows = torch.randn(8, 32, generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def difference(config, names):
    """The largest difference of outputs by a merge of these adapters, and the largest effect of the adapters."""
    torch.manual_seed(0)
    plain = torch.nn.Sequential(torch.nn.Linear(32, 32)).eval()
    before = plain(rows)
    model = get_peft_model(plain, config(), adapter_name="a").eval()
    model.add_adapter("b", config())
    for name, parameter in model.named_parameters():
        if ".a" in name or ".b" in name:
            parameter.add_(0.1 * torch.randn(parameter.shape))
    model.base_model.set_adapter(names)
    active = model(rows)
    merged = model.merge_and_unload(adapter_names=names)(rows)
    return (merged - active).abs().max().item(), (active - before).abs().max().item()


target = {"target_modules": ["0"]}
methods = {
    "LoRA": lambda: LoraConfig(r=4, init_lora_weights=False, **target),
    "LoKr": lambda: LoKrConfig(r=4, init_weights=False, **target),
    "BOFT": lambda: BOFTConfig(boft_block_size=4, **target),
    "HRA": lambda: HRAConfig(r=4, **target),
    "OFT": lambda: OFTConfig(oft_block_size=8, **target),
    "C3A": lambda: C3AConfig(block_size=8, **target),
}
holds = True
for name, config in methods.items():
    one, _ = difference(config, ["a"])
    two, effect = difference(config, ["a", "b"])
    print(f"{name}: a merge changes outputs by {one:.1g} with one adapter, by {two:.1g} with two (effect {effect:.2g})")
    holds &= one < 1e-4 and effect > 1e-2 and (two > 1e-3 if name in ("OFT", "C3A") else two < 1e-4)
print("as described" if holds else "CHANGED")
sys.exit(not holds)
PY
