#!/bin/sh
# torch 2.13.0, torch.distributed.checkpoint.state_dict.get_optimizer_state_dict (and get_state_dict): to read the
# state of an optimizer that has not stepped yet changes the training that follows.
#
# `_init_optim_state` sets every gradient to zero and the learning rates to 0, calls `optimizer.step()`, and puts only
# the learning rates back. The step that never was stays in the state: step counts begin at 1, momentum buffers exist
# (so SGD's first momentum is damped), Rprop's first direction is zero. One checkpoint at step 0 is enough. The
# documentation says that these functions return a state dict, and that `get_state_dict` of a model that is not
# parallelized "only performs one function", the change of keys. Upstream: pytorch issue 164929, open.
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
venv=${FINDINGS_VENV:-$work/venv}
[ -x "$venv/bin/python" ] || python3 -m venv "$venv"
"$venv/bin/pip" install --quiet --disable-pip-version-check \
    torch==2.13.0 numpy==2.4.6
cd "$work"
"$venv/bin/python" -W ignore - <<'PY'
import sys, torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

print("torch", torch.__version__)
batch = torch.randn(16, 8, generator=torch.Generator().manual_seed(1))


def train(kind, options, read_first):
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8)
    optimizer = kind(model.parameters(), **options)
    if read_first:
        get_optimizer_state_dict(model, optimizer)
    for _ in range(3):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()
    return model.weight.detach(), optimizer.state[model.weight].get("step")


holds = True
cases = [
    (torch.optim.AdamW, {"lr": 1e-2}, True),
    (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9, "dampening": 0.5}, True),
    (torch.optim.Rprop, {"lr": 1e-2}, True),
    (torch.optim.SGD, {"lr": 1e-2}, False),
]
for kind, options, expected in cases:
    plain, step = train(kind, options, read_first=False)
    read, step_read = train(kind, options, read_first=True)
    difference = (plain - read).abs().max().item()
    print(f"{kind.__name__} {options}: after 3 steps weights differ by {difference:.3g}; steps {step} and {step_read}")
    holds &= (difference > 1e-4) is expected
print("as described" if holds else "CHANGED")
sys.exit(not holds)
PY
