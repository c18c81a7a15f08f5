#!/bin/sh
# ray 2.60.0, ray.train.torch.prepare_data_loader of a DataLoader with batch_sampler=, on two workers or more: pairs of
# tokens and labels come one by one and have no batch dimension, without a word.
#
# The function builds the loader anew with a DistributedSampler, from `batch_size`, `drop_last` and `sampler`. Of a loader
# with a batch sampler the first is None, which turns batching off, and the last is torch's SequentialSampler, so that
# the warning about replaced samplers is left out. A RandomSampler counts as torch's own too: one with `num_samples=` is
# replaced by the whole dataset. One would expect batches of the batch sampler, shared by the workers, or an error;
# accelerate shares them. The documentation says that shuffling is passed on, and nothing of batch samplers.
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
venv=${FINDINGS_VENV:-$work/venv}
[ -x "$venv/bin/python" ] || python3 -m venv "$venv"
"$venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6 "ray[train]==2.60.0"
cd "$work"
cat > program.py <<'PY'
import json
import logging
import os
import sys

import ray
import ray.train.torch
import torch
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler, TensorDataset

TOKENS = torch.arange(16 * 8).view(16, 8)
ROWS = TensorDataset(TOKENS, TOKENS + 1)


def shapes(loader):
    """Of the tokens, and the number of batches; labels have the same."""
    found = [(tuple(tokens.shape), tuple(labels.shape)) for tokens, labels in loader]
    assert all(tokens == labels for tokens, labels in found)
    return sorted({tokens for tokens, _ in found}), len(found)


def see():
    said = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("ray").addHandler(handler)
    batches = DataLoader(ROWS, batch_sampler=BatchSampler(SequentialSampler(ROWS), batch_size=4, drop_last=False))
    few = DataLoader(ROWS, batch_size=4, sampler=RandomSampler(ROWS, num_samples=8))
    seen = {}
    for name, loader in (("batch_sampler", batches), ("num_samples", few)):
        before = shapes(loader)
        seen[name] = before, shapes(ray.train.torch.prepare_data_loader(loader))
    texts = [text for text in said if "Sampler" in text]
    return seen, texts


def train():
    if ray.train.get_context().get_world_rank() == 0:
        seen, texts = see()
        with open(os.environ["SEEN"], "w") as file:
            json.dump((seen, texts), file)
    else:
        see()


path = os.path.abspath("seen.txt")
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, runtime_env={"env_vars": {"SEEN": path}})
ray.train.torch.TorchTrainer(
    train,
    scaling_config=ray.train.ScalingConfig(num_workers=2),
    run_config=ray.train.RunConfig(storage_path=os.path.abspath("storage")),
).fit()
ray.shutdown()
print("torch", torch.__version__, "ray", ray.__version__)
with open(path) as file:
    seen, texts = json.load(file)
for name, (before, after) in seen.items():
    print(f"{name}: before, shapes {before[0]} in {before[1]} batches; of one of two workers {after[0]} in {after[1]}")
print("said about samplers:", texts)
holds = seen["batch_sampler"] == [[[[4, 8]], 4], [[[8]], 8]] and not texts
holds = holds and seen["num_samples"] == [[[[4, 8]], 2], [[[4, 8]], 2]]
print("as described" if holds else "CHANGED")
sys.exit(not holds)
PY
"$venv/bin/python" -W ignore program.py
