#!/bin/sh
# deepspeed 0.19.8, optimizer "Muon" at ZeRO stages 1 and 2: gradient clipping divides the orthogonalized update by its
# norm, also where the config names no clipping.
#
# `gradient_clipping` has a default of 1.0 (runtime/constants.py). The stages orthogonalize gradients as they are
# gathered (`get_flat_partition`, runtime/zero/stage_1_and_2.py), and clip after that. The norm of such an update grows
# with the model and has nothing of the gradient, so each step is the learning rate divided by that norm. At stage 0 the
# clip comes first, and has no effect on the step. One would expect equal steps at stages 0 to 2, and Muon's step to be
# the same with and without a clip, since orthogonalizing removes the scale. Upstream: issue 8439, open.
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
venv=${FINDINGS_VENV:-$work/venv}
[ -x "$venv/bin/python" ] || python3 -m venv "$venv"
"$venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6 setuptools
"$venv/bin/pip" install --quiet --disable-pip-version-check --no-build-isolation deepspeed==0.19.8
cd "$work"
export DS_ACCELERATOR=cpu RANK=0 LOCAL_RANK=0 WORLD_SIZE=1 MASTER_ADDR=127.0.0.1 TORCHDYNAMO_DISABLE=1
MASTER_PORT=$("$venv/bin/python" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
export MASTER_PORT
"$venv/bin/python" -W ignore - 2>"$work/errors" <<'PY' || { tail -5 "$work/errors"; exit 1; }
import logging, sys
import torch, deepspeed

logging.disable(logging.CRITICAL)
print("deepspeed", deepspeed.__version__, "torch", torch.__version__)


def step(width, stage, **settings):
    """The norm of one step of a square matrix at a learning rate of 1."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(width, width, bias=False), torch.nn.Linear(width, 8))
    for param in model.parameters():
        param.use_muon = param.shape == (width, width)
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "Muon", "params": {"lr": 1.0}},
        **settings,
    }
    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
    before = model[0].weight.detach().clone()
    engine.backward(engine(torch.randn(4, width)).square().mean())
    engine.step()
    return (model[0].weight - before).norm().item()


holds = True
for width in (32, 256):
    plain = step(width, 0)
    for stage in (1, 2):
        unnamed, none = step(width, stage), step(width, stage, gradient_clipping=0.0)
        print(f"width {width}: a step of {plain:.2f} at stage 0, {unnamed:.2f} at stage {stage}, {none:.2f} without clip")
        holds &= unnamed < 1.01 < none and abs(none - plain) < 0.05 * plain
print("as described" if holds else "CHANGED")
sys.exit(not holds)
PY
