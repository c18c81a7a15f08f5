#!/bin/sh
# torchdata 0.11.0, StatefulDataLoader(shuffle=True, generator=..., num_workers=0): the epoch that is resumed is right,
# the epochs after it have another order than those of a run that was not stopped.
#
# Each new iterator draws a permutation from the generator (`_StatefulRandomSamplerIterator.__init__`, sampler.py), and
# then a base seed from the same generator (torch's `_BaseDataLoaderIter.__init__`). On a resume `load_state_dict` sets
# the generator back and draws the permutation anew, but not the base seed, so the next epoch begins at another state.
# With workers, or without a `generator`, the orders are equal. The README offers state dicts for checkpoints in the
# middle of an epoch and says nothing of the epochs after it.
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
venv=${FINDINGS_VENV:-$work/venv}
[ -x "$venv/bin/python" ] || python3 -m venv "$venv"
"$venv/bin/pip" install --quiet --disable-pip-version-check \
    torch==2.13.0 numpy==2.4.6 torchdata==0.11.0
cd "$work"
"$venv/bin/python" -W ignore - <<'PY'
import copy, sys, importlib.metadata, torch
from torchdata.stateful_dataloader import StatefulDataLoader

print("torch", torch.__version__, "torchdata", importlib.metadata.version("torchdata"))


def loader(workers, seeded):
    generator = torch.Generator().manual_seed(5) if seeded else None
    return StatefulDataLoader(list(range(8)), batch_size=2, shuffle=True, num_workers=workers, generator=generator)


def epochs(workers, seeded):
    """The rest of the first epoch and the next one, of a run that goes on and of one that is resumed."""
    whole = loader(workers, seeded)
    first = iter(whole)
    next(first)
    state = copy.deepcopy(whole.state_dict())
    on = [[batch.tolist() for batch in first], [batch.tolist() for batch in whole]]
    resumed = loader(workers, seeded)
    resumed.load_state_dict(state)
    return on, [[batch.tolist() for batch in resumed] for _ in range(2)]


equal = {}
for workers, seeded in ((0, True), (2, True), (0, False)):
    on, resumed = epochs(workers, seeded)
    equal[workers, seeded] = tuple(a == b for a, b in zip(on, resumed))
    print(f"workers {workers}, generator {seeded and 'given'}: rest of the epoch equal: {on[0] == resumed[0]}")
    print(f"  next epoch {on[1]}, resumed {resumed[1]}")
holds = equal == {(0, True): (True, False), (2, True): (True, True), (0, False): (True, True)}
print("as described" if holds else "CHANGED")
sys.exit(not holds)
PY
