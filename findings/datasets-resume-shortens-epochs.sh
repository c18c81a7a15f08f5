#!/bin/sh
# datasets 5.2.0, IterableDataset.load_state_dict: not only the resumed epoch but every later one starts at the saved
# place, so the rows before it are never read again.
#
# `load_state_dict` keeps the state as `_starting_state_dict`, and each new iterator loads it again as long as `epoch`
# is the one of the state (datasets/iterable_dataset.py). Only `set_epoch` moves `epoch`, which a loop without
# shuffling has no reason to call, and which the uninterrupted run does not need. A state of an epoch's end makes all
# later epochs empty. One would expect whole epochs after the resumed one. The documentation of `load_state_dict`
# says that the iteration restarts at the next example, with two exceptions that are others.
# Upstream: issue 7447, closed without a change of this.
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
venv=${FINDINGS_VENV:-$work/venv}
[ -x "$venv/bin/python" ] || python3 -m venv "$venv"
"$venv/bin/pip" install --quiet --disable-pip-version-check datasets==5.2.0 numpy==2.4.6
cd "$work"
HF_HOME="$work" "$venv/bin/python" -W ignore - <<'PY'
import sys, datasets

print("datasets", datasets.__version__)


def stream():
    return datasets.Dataset.from_dict({"row": list(range(6))}).to_iterable_dataset(num_shards=2)


def epochs(dataset, number, set_epoch=False):
    """The rows of the next epochs."""
    read = []
    for epoch in range(number):
        if set_epoch:
            dataset.set_epoch(epoch)
        read.append([example["row"] for example in dataset])
    return read


def state(rows):
    dataset = stream()
    iterator = iter(dataset)
    for _ in range(rows):
        next(iterator)
    return dataset.state_dict()


def resumed(rows, **options):
    dataset = stream()
    dataset.load_state_dict(state(rows))
    return epochs(dataset, 3, **options)


whole = list(range(6))
plain, middle, end, numbered = epochs(stream(), 3), resumed(4), resumed(6), resumed(4, set_epoch=True)
print("three epochs, uninterrupted:             ", plain)
print("resumed after four rows:                 ", middle)
print("resumed after the last row:              ", end)
print("resumed after four rows, with set_epoch: ", numbered)
holds = plain == [whole] * 3 and middle == [[4, 5]] * 3 and end == [[]] * 3 and numbered == [[4, 5], whole, whole]
print("as described" if holds else "CHANGED")
sys.exit(not holds)
PY
