#!/bin/sh
# torch 2.13.0 (transformers 5.23.0), `Optimizer.load_state_dict` with 16-bit parameters: fp32 states are rounded to the
# parameter's dtype, so a resumed run of NAdam or of transformers' Adafactor is another run.
#
# `Optimizer._process_value_according_to_param_policy` (torch/optim/optimizer.py) casts each floating tensor of a state
# to the dtype of its parameter, but for the key "step". NAdam's running product `mu_product` and Adafactor's
# `exp_avg_sq_row`, `exp_avg_sq_col` and `RMS` are float32 for bfloat16 parameters, and are bfloat16 after a load; NAdam
# goes on to multiply in bfloat16. One would expect the saved values, as for Adam, whose states have the parameter's
# dtype. The documentation of `load_state_dict` names no cast.
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
venv=${FINDINGS_VENV:-$work/venv}
[ -x "$venv/bin/python" ] || python3 -m venv "$venv"
"$venv/bin/pip" install --quiet --disable-pip-version-check \
    torch==2.13.0 numpy==2.4.6 transformers==5.23.0 accelerate==1.15.0 safetensors==0.8.0
cd "$work"
"$venv/bin/python" -W ignore - <<'PY'
import copy, sys, torch, transformers
from transformers.optimization import Adafactor

print("torch", torch.__version__, "transformers", transformers.__version__)


def step(model, optimizer, number):
    generator = torch.Generator().manual_seed(number)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
    optimizer.step()


def difference(make, dtype):
    """The largest difference of weights, three steps after a resume, and the states whose dtype changed."""
    torch.manual_seed(0)
    model = torch.nn.Linear(128, 128).to(dtype)
    optimizer = make(model.parameters())
    for number in range(3):
        step(model, optimizer, number)
    resumed = copy.deepcopy(model)
    again = make(resumed.parameters())
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    first, second = optimizer.state[model.weight], again.state[resumed.weight]
    cast = [name for name, value in first.items() if torch.is_tensor(value) and value.dtype != second[name].dtype]
    for number in range(3, 6):
        step(model, optimizer, number)
        step(resumed, again, number)
    return (model.weight - resumed.weight).abs().max().item(), cast


holds = True
for name, make, dtype, wrong in (
    ("Adam", lambda p: torch.optim.Adam(p, lr=1e-2), torch.bfloat16, []),
    ("NAdam", lambda p: torch.optim.NAdam(p, lr=1e-2), torch.float32, []),
    ("NAdam", lambda p: torch.optim.NAdam(p, lr=1e-2), torch.bfloat16, ["mu_product"]),
    (
        "Adafactor",
        lambda p: Adafactor(p, lr=1e-2, relative_step=False, scale_parameter=False),
        torch.bfloat16,
        ["exp_avg_sq_row", "exp_avg_sq_col", "RMS"],
    ),
):
    found, cast = difference(make, dtype)
    print(f"{name}, {dtype}: weights differ by {found:.2g} after the resume; cast states: {cast}")
    holds &= cast == wrong and (found > 0) == bool(wrong)
print("as described" if holds else "CHANGED")
sys.exit(not holds)
PY
