#!/bin/sh
# deepspeed 0.19.8 (torch 2.13.0), `engine.load_checkpoint(path, load_module_only=True)` at ZeRO stage 3: no weight is
# loaded, and the call returns the path as after a load that worked.
#
# `DeepSpeedEngine._load_checkpoint` (runtime/engine.py) gathers the weights of stage 3 from the optimizer's files where
# `load_optimizer_states` is False, and the optimizer's load brings them otherwise. `load_module_only` leaves that load
# out and asks for no gathering, so only placeholders are read. One would expect "only the model weights", as the
# docstring says and as stages 1 and 2 do, or an error. `load_optimizer_states=False` does load them.
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

logging.disable(logging.CRITICAL)
print("deepspeed", deepspeed.__version__, "torch", torch.__version__)


def engine(stage, seed):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 8))
    config = {
        "train_micro_batch_size_per_gpu": 4,
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
    }
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


def weights(engine):
    params = list(engine.module.parameters())
    if not hasattr(params[0], "ds_id"):
        return [param.detach().clone() for param in params]
    with deepspeed.zero.GatheredParameters(params):
        return [param.detach().clone() for param in params]


def distance(a, b):
    return max((x - y).abs().max().item() for x, y in zip(a, b))


holds = True
for stage in (1, 2, 3):
    trained = engine(stage, 0)
    for number in range(3):
        torch.manual_seed(number)
        trained.backward(trained(torch.randn(4, 32)).square().mean())
        trained.step()
    trained.save_checkpoint(f"saved{stage}", tag="last")
    for flags in ({"load_module_only": True}, {"load_optimizer_states": False}):
        fresh = engine(stage, 1)
        before = weights(fresh)
        path, _ = fresh.load_checkpoint(f"saved{stage}", tag="last", **flags)
        after = weights(fresh)
        kept, off = distance(before, after) == 0, distance(after, weights(trained))
        print(f"stage {stage}, {flags}: returned {'a path' if path else path}; weights",
              "are those from before the load" if kept else f"changed; distance to the saved ones {off:g}")
        expected_kept = stage == 3 and "load_module_only" in flags
        holds &= bool(path) and kept == expected_kept and (expected_kept or off == 0)
sys.exit(0 if holds else 1)
PY
echo "as described"
