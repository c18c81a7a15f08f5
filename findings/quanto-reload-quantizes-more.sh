#!/bin/sh
# optimum-quanto 0.2.7, requantize (and quantize + load_state_dict): a model with quantized activations gives other
# outputs after a reload than before the save.
#
# `Calibration` leaves outputs alone that an operation without a quantized form consumes: `calibrate_output` in
# optimum/quanto/calibrate.py calls `disable_output_quantization`, which takes a hook off the module (nn/qmodule.py).
# Neither the state dict nor `quantization_map` says that this hook is gone, so the reloaded modules quantize all of
# their outputs, without a message. With `Calibration(streamline=False)`, or weights alone, a reload is exact. The
# README says that a quantized model "can be reloaded from a `state_dict` and a `quantization_map`".
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
venv=${FINDINGS_VENV:-$work/venv}
[ -x "$venv/bin/python" ] || python3 -m venv "$venv"
"$venv/bin/pip" install --quiet --disable-pip-version-check \
    torch==2.13.0 numpy==2.4.6 optimum-quanto==0.2.7 safetensors==0.8.0
cd "$work"
"$venv/bin/python" -W ignore - <<'PY'
import sys, importlib.metadata, torch
from optimum.quanto import Calibration, freeze, qint8, quantization_map, quantize, requantize

print("torch", torch.__version__, "optimum-quanto", importlib.metadata.version("optimum-quanto"))


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = torch.nn.Linear(64, 128), torch.nn.Linear(128, 64)

    def forward(self, rows):
        return self.down(torch.nn.functional.silu(self.up(rows)))


rows = torch.randn(8, 64, generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def errors(streamline):
    """Largest error by quantization, and largest difference of the reloaded model from the quantized one."""
    exact = Model()(rows)
    model = Model()
    quantize(model, weights=qint8, activations=qint8)
    with Calibration(streamline=streamline):
        model(rows)
    freeze(model)
    quantized = model(rows)
    reloaded = Model()
    requantize(reloaded, model.state_dict(), quantization_map(model))
    return (quantized - exact).abs().max().item(), (reloaded(rows) - quantized).abs().max().item()


found = {}
for streamline in (True, False):
    error, found[streamline] = errors(streamline)
    print(f"streamline={streamline}: error by quantization {error:.2g}, more by a reload {found[streamline]:.2g}")
holds = found[True] > 1e-4 and found[False] == 0
print("as described" if holds else "CHANGED")
sys.exit(not holds)
PY
