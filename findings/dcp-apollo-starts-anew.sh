#!/bin/sh
# torch 2.13.0, torch.distributed.checkpoint.state_dict, with apollo-torch 1.0.3: a load of APOLLO's states loads none
# of them, and says nothing. Training goes on with moments of zero from step 0.
#
# `_init_optim_state` makes the states that a load fills by one step with a learning rate of 0, unless `optimizer.state`
# has an entry already. APOLLOAdamW puts a seed for each matrix there when it is built, so the step is left out, and
# `dcp.load` fills the seeds alone. One would expect all states, as AdamW's beside it, or an error: `set_state_dict` is
# strict by default. The same states by `torch.save` and `load_state_dict` go on with equal bits.
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
venv=${FINDINGS_VENV:-$work/venv}
[ -x "$venv/bin/python" ] || python3 -m venv "$venv"
"$venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6 apollo-torch==1.0.3
cd "$work"
"$venv/bin/python" -W ignore - <<'PY'
import sys
from importlib.metadata import version

import torch
import torch.distributed.checkpoint as dcp
from apollo_torch import APOLLOAdamW
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

print("torch", torch.__version__, "apollo-torch", version("apollo-torch"))


def build(kind):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 16))
    if kind == "AdamW":
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)
    matrices = [param for param in model.parameters() if param.ndim == 2]
    others = [param for param in model.parameters() if param.ndim != 2]
    low_rank = {"rank": 4, "proj": "random", "scale_type": "channel", "scale": 1, "update_proj_gap": 10}
    return model, APOLLOAdamW([{"params": others}, {"params": matrices, "proj_type": "std", **low_rank}], lr=1e-2)


def train(model, optimizer, begin, end):
    for step in range(begin, end):
        rows = torch.randn(8, 32, generator=torch.Generator().manual_seed(step))
        model(rows).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def by_checkpoint(kind, model, optimizer):
    saved_model, saved_optimizer = get_state_dict(model, optimizer)
    dcp.save({"model": saved_model, "optimizer": saved_optimizer}, checkpoint_id=kind)
    other, again = build(kind)
    found_model, found_optimizer = get_state_dict(other, again)
    dcp.load({"model": found_model, "optimizer": found_optimizer}, checkpoint_id=kind)
    set_state_dict(other, again, model_state_dict=found_model, optim_state_dict=found_optimizer)
    return other, again


def by_torch_save(kind, model, optimizer):
    torch.save((model.state_dict(), optimizer.state_dict()), f"{kind}.pt")
    other, again = build(kind)
    found_model, found_optimizer = torch.load(f"{kind}.pt", weights_only=False)
    other.load_state_dict(found_model)
    again.load_state_dict(found_optimizer)
    return other, again


def counted(optimizer):
    return sum("exp_avg" in state for state in optimizer.state.values())


equal = {}
for kind in ("AdamW", "APOLLO"):
    for way in (by_torch_save, by_checkpoint):
        undisturbed, optimizer = build(kind)
        train(undisturbed, optimizer, 0, 12)
        model, optimizer = build(kind)
        train(model, optimizer, 0, 6)
        resumed, again = way(kind, model, optimizer)
        kept = counted(again), counted(optimizer)
        train(resumed, again, 6, 12)
        pairs = zip(undisturbed.parameters(), resumed.parameters(), strict=True)
        equal[kind, way.__name__] = all(torch.equal(one, other) for one, other in pairs)
        print(f"{kind} {way.__name__}: exp_avg of {kept[0]} of {kept[1]} parameters loaded,", end=" ")
        print("the run is equal" if equal[kind, way.__name__] else "the run is another one")
lost = ("APOLLO", "by_checkpoint")
holds = not equal[lost] and all(found for key, found in equal.items() if key != lost)
print("as described" if holds else "CHANGED")
sys.exit(not holds)
PY
