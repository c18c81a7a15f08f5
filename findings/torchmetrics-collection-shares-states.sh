#!/bin/sh
# torchmetrics 1.9.0, MetricCollection: a metric with another `ignore_index` gets the counts of its neighbour for good
# if the first batch holds no ignored label.
#
# After the first `update`, `MetricCollection._merge_compute_groups` (torchmetrics/collections.py) joins all metrics
# whose states are equal at that moment, whatever their arguments. From the second batch on only the first of a group
# is updated, and the others share its states. One would expect of each metric the value it gives alone. The
# documentation of `compute_groups` says that metrics of a group differ "only in their compute step" and names no
# exception. `compute_groups=False` gives the right values, and so does another order of the batches.
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
venv=${FINDINGS_VENV:-$work/venv}
[ -x "$venv/bin/python" ] || python3 -m venv "$venv"
"$venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6 torchmetrics==1.9.0
cd "$work"
"$venv/bin/python" -W ignore - <<'PY'
import sys, torch, torchmetrics
from torchmetrics import MetricCollection
from torchmetrics.classification import MulticlassAccuracy

print("torch", torch.__version__, "torchmetrics", torchmetrics.__version__)


def metrics():
    return {
        "all": MulticlassAccuracy(3, average="micro"),
        "tokens": MulticlassAccuracy(3, average="micro", ignore_index=0),
    }


# predictions and labels; 0 is padding, which only the second batch has
batches = [
    (torch.tensor([1, 2, 2, 1]), torch.tensor([1, 2, 1, 2])),
    (torch.tensor([0, 0, 0, 1]), torch.tensor([0, 0, 0, 2])),
]


def values(batches, **options):
    collection = MetricCollection(metrics(), **options)
    for batch in batches:
        collection.update(*batch)
    return {name: round(value.item(), 4) for name, value in collection.compute().items()}


alone = metrics()
for metric in alone.values():
    for batch in batches:
        metric.update(*batch)
alone = {name: round(metric.compute().item(), 4) for name, metric in alone.items()}
found, apart, turned = values(batches), values(batches, compute_groups=False), values(batches[::-1])
print("each metric alone:      ", alone)
print("collection:             ", found)
print("compute_groups=False:   ", apart)
print("batches in other order: ", turned)
holds = alone == apart == turned == {"all": 0.625, "tokens": 0.4} and found == {"all": 0.625, "tokens": 0.625}
print("as described" if holds else "CHANGED")
sys.exit(not holds)
PY
