#!/bin/sh
# accelerate 1.15.0, Accelerator.save_model of an offloaded model: parameters and buffers that the model itself holds,
# not one of its submodules, are missing from the file, without a word.
#
# `get_state_dict_offloaded_model` in accelerate/utils/modeling.py walks `named_modules()` and skips the empty name,
# the model itself. Its warning about tensors that were not saved names those it saw on the meta device, and it never
# saw these. A class token, a position embedding or a `logit_scale` of a plain torch model is such a parameter. Without
# offload the same call saves the same model whole. The documentation: "Save a model so that it can be re-loaded".
# Upstream: pull request 4208, closed.
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
venv=${FINDINGS_VENV:-$work/venv}
[ -x "$venv/bin/python" ] || python3 -m venv "$venv"
"$venv/bin/pip" install --quiet --disable-pip-version-check \
    torch==2.13.0 numpy==2.4.6 accelerate==1.15.0 safetensors==0.8.0
cd "$work"
"$venv/bin/python" -W ignore - <<'PY'
import logging, sys, accelerate, torch
from accelerate import Accelerator, cpu_offload
from safetensors.torch import load_file

print("torch", torch.__version__, "accelerate", accelerate.__version__)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.class_token = torch.nn.Parameter(torch.randn(1, 8))
        self.register_buffer("mean", torch.randn(8))
        self.body = torch.nn.Linear(8, 8)

    def forward(self, rows):
        return self.body(torch.cat([self.class_token, rows - self.mean]))


said = []
handler = logging.Handler()
handler.emit = lambda record: said.append(record.getMessage())
logging.getLogger().addHandler(handler)
torch.manual_seed(0)
model = Model()
names = set(model.state_dict())
rows = torch.randn(3, 8)
with torch.no_grad():
    expected = model(rows)
Accelerator(cpu=True).save_model(model, "plain")
offloaded = cpu_offload(model, execution_device=torch.device("cpu"))
with torch.no_grad():
    print("the offloaded model computes the same:", torch.equal(offloaded(rows), expected))
Accelerator(cpu=True).save_model(offloaded, "offloaded")
plain = names - set(load_file("plain/model.safetensors"))
lost = names - set(load_file("offloaded/model.safetensors"))
print("missing from the plain model's file:", sorted(plain))
print("missing from the offloaded model's file:", sorted(lost), "- log lines:", said)
holds = not plain and lost == {"class_token", "mean"} and not any("not saved" in line for line in said)
print("as described" if holds else "CHANGED")
sys.exit(not holds)
PY
