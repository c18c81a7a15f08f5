#!/bin/sh
# deepspeed 0.19.8 (torch 2.13.0), a change of weights inside `deepspeed.zero.GatheredParameters(params,
# modifier_rank=0)` after `initialize`: forwards see it until the next step, which puts the weights of before back.
#
# The step computes from the optimizer's fp32 copy and writes the result over the weights. The context writes what was
# changed into the model's weights alone, at stage 3 too, where it is the documented way to change them. In fp32 the
# optimizer has a copy as well. One would expect the trained weights to go on from the changed ones, as in plain torch.
# `safe_set_full_fp32_param` changes the copy, which forwards see only after the next step.
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
venv=${FINDINGS_VENV:-$work/venv}
[ -x "$venv/bin/python" ] || python3 -m venv "$venv"
"$venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6 setuptools
"$venv/bin/pip" install --quiet --disable-pip-version-check --no-build-isolation deepspeed==0.19.8
cd "$work"
export DS_ACCELERATOR=cpu RANK=0 LOCAL_RANK=0 WORLD_SIZE=1 MASTER_ADDR=127.0.0.1
MASTER_PORT=$("$venv/bin/python" -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
export MASTER_PORT
"$venv/bin/python" -W ignore - 2>"$work/errors" <<'PY' || { tail -5 "$work/errors"; exit 1; }
import logging, sys
import torch, deepspeed
from deepspeed.utils import safe_set_full_fp32_param

logging.disable(logging.CRITICAL)
print("deepspeed", deepspeed.__version__, "torch", torch.__version__)
STEP = 1e-3  # about what one step of Adam changes


def by_context(weight, value):
    with deepspeed.zero.GatheredParameters([weight], modifier_rank=0), torch.no_grad():
        weight.fill_(value)


def by_call(weight, value):
    safe_set_full_fp32_param(weight, torch.full((8, 8), value))


def seen(weight):
    with deepspeed.zero.GatheredParameters([weight]):
        return weight.detach().float().mean().item()


holds = True
for dtype in ("fp32", "bf16"):
    for stage in (1, 2, 3):
        for change in (by_context, by_call):
            torch.manual_seed(0)
            model = torch.nn.Linear(8, 8, bias=False)
            with torch.no_grad():
                model.weight.fill_(1.0)
            config = {
                "train_micro_batch_size_per_gpu": 4,
                "zero_optimization": {"stage": stage},
                "bf16": {"enabled": dtype == "bf16"},
                "optimizer": {"type": "Adam", "params": {"lr": STEP, "torch_adam": True}},
            }
            engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]
            weight = engine.module.weight

            def step():
                data = torch.ones(4, 8, dtype=torch.bfloat16 if dtype == "bf16" else torch.float32)
                engine.backward(engine(data).float().square().mean())
                engine.step()

            step()
            change(weight, 5.0)
            after_change = seen(weight)
            step()
            after_step = seen(weight)
            print(f"{dtype}, stage {stage}, {change.__name__}: all weights were 1, set to 5;",
                  f"then {after_change:.2f}, after a step {after_step:.2f}")
            expected = (5, 1) if change is by_context else (1, 5)
            holds &= all(abs(value - wanted) < 0.05 for value, wanted in zip((after_change, after_step), expected))
sys.exit(0 if holds else 1)
PY
echo "as described"
