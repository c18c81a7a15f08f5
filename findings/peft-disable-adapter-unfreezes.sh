#!/bin/sh
# peft 0.21.2, `with model.disable_adapter()`: frozen parameters of the adapter are trainable afterwards.
#
# At the end of the block `BaseTunerLayer.enable_adapters(True)` (peft/tuners/tuners_utils.py) calls `set_adapter`,
# which sets `requires_grad` of all parameters of the active adapters. It was False for an adapter that
# `PeftModel.from_pretrained` loaded (`is_trainable=False`), and may be False for parts that the program froze. One
# comparison with the base model, as for a KL term, is enough, and the next optimizer steps train what was to stay. One
# would expect what a context manager does: all as before. The documentation says "Context manager that disables the
# adapter module. Use this to run inference on the base model". Upstream: issue 3447, closed.
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

print("torch", torch.__version__, "peft", peft.__version__)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.body = torch.nn.Linear(8, 8)
        self.head = torch.nn.Linear(8, 2)

    def forward(self, x):
        return self.head(self.body(x).tanh())


get_peft_model(Model(), LoraConfig(target_modules=["body"], r=2, init_lora_weights=False)).save_pretrained("adapter")
found = {}
for compare in (False, True):
    torch.manual_seed(0)
    model = PeftModel.from_pretrained(Model(), "adapter")  # frozen: only the head is to be trained
    model.base_model.model.head.requires_grad_(True)
    before = {name: value.detach().clone() for name, value in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        x = torch.randn(4, 8)
        if compare:
            with model.disable_adapter(), torch.no_grad():
                model(x)
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    found[compare] = [name for name, value in model.named_parameters() if not torch.equal(value, before[name])]
    print(f"disable_adapter() in each step: {compare}: trained were {found[compare]}")
holds = not any("lora" in name for name in found[False]) and sum("lora" in name for name in found[True]) == 2
print("as described" if holds else "CHANGED")
sys.exit(not holds)
PY
