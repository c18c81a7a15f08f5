#!/bin/sh
# peft 0.21.2, save_pretrained(path_initial_model_for_weight_conversion=): the saved adapter has lora_A and lora_B alone.
# DoRA's magnitudes and modules_to_save, both trained, are not in the folder.
#
# The option turns an adapter that was begun by PiSSA, CorDA or OLoRA into a plain LoRA adapter for the unchanged base.
# `LoraModel.subtract_mutated_init` (peft/tuners/lora/model.py) makes a new state dict of the lora_A and lora_B it
# finds, and the others are left out without a word. One would expect the outputs of the trained model, as the
# docstring promises of the conversion. Loaded, DoRA's magnitudes are those of the base, with a warning of missing keys;
# a trained head is a KeyError of the load. Where the model was not saved the plain way too, these values are gone.
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
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file

print("torch", torch.__version__, "peft", peft.__version__)


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = torch.nn.Linear(32, 32), torch.nn.Linear(32, 4)

    def forward(self, x):
        return self.head(self.body(x).tanh())


torch.manual_seed(9)
x = torch.randn(8, 32)
holds = True
for what, settings, lost in (
    ("LoRA alone", {}, None),
    ("use_dora=True", {"use_dora": True}, "magnitude"),
    ("modules_to_save=['head']", {"modules_to_save": ["head"]}, "head"),
):
    config = LoraConfig(r=4, lora_alpha=8, target_modules=["body"], init_lora_weights="pissa", **settings)
    model = get_peft_model(Net(), config)
    config.init_lora_weights = True  # as the docstring of subtract_mutated_init says
    model.save_pretrained("start")
    config.init_lora_weights = "pissa"
    with torch.no_grad():
        for param in model.parameters():
            if param.requires_grad:
                param.add_(torch.randn_like(param), alpha=0.1)
    expected = model(x)
    model.save_pretrained("plain")
    model.save_pretrained("converted", path_initial_model_for_weight_conversion="start")
    names = [set(load_file(f"{each}/adapter_model.safetensors")) for each in ("plain", "converted")]
    missing = sorted(name.removeprefix("base_model.model.") for name in names[0] - names[1])
    try:
        off = (PeftModel.from_pretrained(Net(), "converted")(x) - expected).abs().max().item()
        loaded = f"outputs off by {off:.1g}"
        is_right = off < 1e-5
    except KeyError as error:
        loaded, is_right = f"KeyError {error}", False
    print(f"{what}: not in the converted adapter: {', '.join(missing) or 'nothing'}; loaded: {loaded}")
    holds &= is_right and not missing if lost is None else not is_right and any(lost in name for name in missing)
print("as described" if holds else "CHANGED")
sys.exit(not holds)
PY
