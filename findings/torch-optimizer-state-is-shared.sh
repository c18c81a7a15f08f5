#!/bin/sh
# torch 2.13.0, torch.optim.Optimizer.load_state_dict: the optimizer goes on in the caller's tensors.
#
# `Module.load_state_dict` copies values. `Optimizer.load_state_dict` keeps the tensors that it was given where device
# and dtype already fit: `_process_value_according_to_param_policy` in torch/optim/optimizer.py returns
# `value.to(...)`, which copies nothing then, and returns `step` as it is. So a saved state that is loaded twice (a
# roll-back after a bad batch, two runs from one snapshot) is another one the second time: the steps after the first
# load have changed it. The docstring names no such sharing. A deep copy of the dict at each load gives the expected
# result.
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
venv=${FINDINGS_VENV:-$work/venv}
[ -x "$venv/bin/python" ] || python3 -m venv "$venv"
"$venv/bin/pip" install --quiet --disable-pip-version-check \
    torch==2.13.0 numpy==2.4.6
cd "$work"
"$venv/bin/python" -W ignore - <<'PY'
import copy, sys, torch

print("torch", torch.__version__)
batch = torch.randn(16, 8, generator=torch.Generator().manual_seed(1))


def steps(model, optimizer, count):
    for _ in range(count):
        optimizer.zero_grad()
        model(batch).square().mean().backward()
        optimizer.step()


def roll_backs(copied):
    """Four steps from one snapshot, twice: how far the ends differ, and the step count in the snapshot."""
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    steps(model, optimizer, 3)
    weights, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    ends = []
    for _ in range(2):
        model.load_state_dict(weights)
        optimizer.load_state_dict(copy.deepcopy(state) if copied else state)
        steps(model, optimizer, 4)
        ends.append(model.weight.detach().clone())
    return (ends[0] - ends[1]).abs().max().item(), state["state"][0]["step"].item()


difference, step = roll_backs(copied=False)
print(f"the snapshot of step 3 says step {step:.0f} after two loads; the two roll-backs differ by {difference:.3g}")
control, kept = roll_backs(copied=True)
print(f"with a deep copy at each load: step {kept:.0f}, difference {control:.3g}")
holds = difference > 1e-3 and step == 11 and control == 0 and kept == 3
print("as described" if holds else "CHANGED")
sys.exit(not holds)
PY
