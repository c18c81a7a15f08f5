#!/bin/sh
# peft 0.21.2, Lily: only the first adapter of a model shares its matrices between layers. One that `add_adapter` adds
# trains a B of its own in each layer, and gives other outputs after a save and a load.
#
# Lily's layers share one B, and A in blocks. `LilyModel._post_injection_hook` (peft/tuners/lily/model.py) makes them
# share, and `BaseTuner.__init__` (peft/tuners/tuners_utils.py) calls it; `inject_adapter`, by which `add_adapter` and
# `load_adapter` come, does not. `save_pretrained` writes each layer's B under the layer's name. Loaded as the first
# adapter of a model, the layers share again, and the last B that is read is the B of all. One would expect the second
# adapter to be as the first, and outputs to survive a save and a load.
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
from peft import LilyConfig, PeftModel, get_peft_model

print("torch", torch.__version__, "peft", peft.__version__)


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(torch.nn.ModuleDict({"q": torch.nn.Linear(16, 16)}) for _ in range(4))

    def forward(self, x):
        for layer in self.layers:
            x = layer["q"](x).tanh()
        return x


torch.manual_seed(9)
x = torch.randn(4, 16)
model = get_peft_model(Net(), LilyConfig(r=4, target_modules=["q"]), adapter_name="first")
model.add_adapter("second", LilyConfig(r=4, target_modules=["q"]))
found = {}
for name in ("first", "second"):
    model.set_adapter(name)
    with torch.no_grad():
        for param in model.parameters():
            if param.requires_grad:
                param.add_(torch.randn_like(param), alpha=0.1)
    trained = model(x)
    num = len({id(layer["q"].lily_B[name].weight) for layer in model.base_model.model.layers})
    model.save_pretrained("saved", selected_adapters=[name])
    off = (PeftModel.from_pretrained(Net(), f"saved/{name}")(x) - trained).abs().max().item()
    print(f"adapter '{name}': {num} matrices B in 4 layers; after a save and a load outputs are off by {off:.1g}")
    found[name] = num, off > 1e-3
holds = found == {"first": (1, False), "second": (4, True)}
print("as described" if holds else "CHANGED")
sys.exit(not holds)
PY
