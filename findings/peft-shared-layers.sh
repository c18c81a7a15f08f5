#!/bin/sh
# peft 0.21.2, layers that share a weight, or one layer under two names: the merged model is another one than the
# trained one.
#
# peft gives each layer of `target_modules` its own adapter (`BaseTuner.inject_adapter`, peft/tuners/tuners_utils.py),
# and `merge_and_unload` adds each adapter's matrix to its base's weight in place. Two layers with one weight then both
# have the sum of both matrices. A module under two names is replaced under the first only, for `named_modules` names it
# once: the adapter acts at one place in training, and at both after the merge. One would expect the same outputs before
# and after, or a warning as for tied embeddings: the documentation of weight tying treats `embed_tokens` and `lm_head`
# alone. Models with shared blocks are of this kind.
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
venv=${FINDINGS_VENV:-$work/venv}
[ -x "$venv/bin/python" ] || python3 -m venv "$venv"
"$venv/bin/pip" install --quiet --disable-pip-version-check \
    torch==2.13.0 numpy==2.4.6 peft==0.21.2 transformers==5.23.0 accelerate==1.15.0 safetensors==0.8.0
cd "$work"
"$venv/bin/python" -W ignore - <<'PY'
import sys, warnings, peft, torch
from peft import LoraConfig, get_peft_model

print("torch", torch.__version__, "peft", peft.__version__)


class Model(torch.nn.Module):
    def __init__(self, shared):
        super().__init__()
        self.first, self.second = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
        if shared == "weight":
            self.second.weight = self.first.weight
        elif shared == "module":
            self.second = self.first

    def forward(self, x):
        return self.second(self.first(x).tanh())


holds = True
for shared in ("nothing", "weight", "module"):
    torch.manual_seed(0)
    x, base = torch.randn(4, 8), Model(shared)
    with warnings.catch_warnings(record=True) as seen, torch.no_grad():
        warnings.simplefilter("always")
        model = get_peft_model(base, LoraConfig(target_modules=["first", "second"], r=2, init_lora_weights=False))
        adapted = [name for name, value in base.named_children() if hasattr(value, "lora_A")]
        before = model.eval()(x)
        difference = (before - model.merge_and_unload()(x)).abs().max().item()
    print(f"shared: {shared}: adapters at {adapted}; the merge changes the outputs by {difference:.2g}; "
          f"warnings: {len(seen)}")
    holds &= ((difference < 1e-5) == (shared == "nothing")) and not seen
    holds &= adapted == (["first"] if shared == "module" else ["first", "second"])
print("as described" if holds else "CHANGED")
sys.exit(not holds)
PY
