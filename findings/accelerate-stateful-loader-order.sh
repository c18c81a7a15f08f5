#!/bin/sh
# accelerate 1.15.0 (torchdata 0.11.0), DataLoaderConfiguration(use_stateful_dataloader=True): after `load_state` inside
# of a shuffled epoch, the rest of the epoch repeats samples and leaves others out.
#
# `StatefulDataLoader` gets the batch sampler of the plain DataLoader (accelerate/data_loader.py), which has no state,
# so a checkpoint holds only the number of batches that were read. `load_state` brings back the random numbers of the
# save, and with these the sampler draws a new order, of which so many batches are skipped. One would expect the
# samples that are left, as from torchdata alone and with `use_seedable_sampler=True`. The documentation of the option
# names no such condition. Upstream: issue 4195, open, for several processes.
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
venv=${FINDINGS_VENV:-$work/venv}
[ -x "$venv/bin/python" ] || python3 -m venv "$venv"
"$venv/bin/pip" install --quiet --disable-pip-version-check \
    torch==2.13.0 numpy==2.4.6 accelerate==1.15.0 torchdata==0.11.0 safetensors==0.8.0
cd "$work"
cat >loop.py <<'PY'
"""Two batches and a save, or a load and the rest of the epoch."""
import json, sys, torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import set_seed
from torch.utils.data import DataLoader

action, folder, seedable = sys.argv[1], sys.argv[2], sys.argv[3] == "seedable"
accelerator = Accelerator(
    cpu=True,
    dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True, use_seedable_sampler=seedable),
)
set_seed(5)
loader = accelerator.prepare(DataLoader(list(range(12)), batch_size=2, shuffle=True))
read = []
if action == "load":
    accelerator.load_state(folder)
for batch in loader:
    read += batch.tolist()
    if action == "save" and len(read) == 4:
        accelerator.save_state(folder)
        break
print(json.dumps(read))
PY
"$venv/bin/python" -W ignore - <<'PY'
import json, subprocess, sys, accelerate, torch, torchdata
from torchdata.stateful_dataloader import StatefulDataLoader

print("torch", torch.__version__, "accelerate", accelerate.__version__, "torchdata", torchdata.__version__)


def loop(action, kind):
    command = [sys.executable, "-W", "ignore", "loop.py", action, kind, kind]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])


def report(name, first, rest):
    missing = sorted(set(range(12)) - set(first) - set(rest))
    print(f"{name}: {first} before the save, {rest} after the load, never read: {missing}")
    return missing


def loader():
    return StatefulDataLoader(list(range(12)), batch_size=2, shuffle=True)


saved, first = loader(), []
for batch in saved:
    first += batch.tolist()
    if len(first) == 4:
        break
resumed = loader()
resumed.load_state_dict(saved.state_dict())
missing = [report("torchdata alone", first, [number for batch in resumed for number in batch.tolist()])]
for kind in ("seedable", "default"):
    missing.append(report(f"accelerate, {kind} sampler", loop("save", kind), loop("load", kind)))
holds = missing[0] == missing[1] == [] and len(missing[2]) > 0
print("as described" if holds else "CHANGED")
sys.exit(not holds)
PY
