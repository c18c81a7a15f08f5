#!/bin/sh
# safetensors 0.8.0 (torch 2.13.0), safetensors.torch.save_file: a conjugate view is saved without its conjugation.
#
# `Tensor.conj()` sets a bit and moves no byte; `is_contiguous()` stays true. `_flatten_as_ptr` in safetensors/torch.py
# checks only that, and `_to_ndarray` reads the bytes at `data_ptr()`, so the imaginary parts keep their old sign in
# the file, without an error. `.contiguous()`, which the library's own message advises, does not help: it returns the
# view. torch.save keeps the values, and `Tensor.numpy()` raises for such a view. The same holds for lazy negation, and
# for torch.distributed.checkpoint's HuggingFaceStorageWriter, which calls safetensors. Upstream: issue 831, open.
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
venv=${FINDINGS_VENV:-$work/venv}
[ -x "$venv/bin/python" ] || python3 -m venv "$venv"
"$venv/bin/pip" install --quiet --disable-pip-version-check \
    torch==2.13.0 numpy==2.4.6 safetensors==0.8.0
cd "$work"
"$venv/bin/python" -W ignore - <<'PY'
import io, sys, torch, safetensors
from safetensors.torch import load_file, save_file

print("torch", torch.__version__, "safetensors", safetensors.__version__)


class Filter(torch.nn.Module):
    """The spectrum of a matched filter, as signal models keep it."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.register_buffer("response", torch.fft.fft(torch.randn(8)).conj())


state = Filter().state_dict()
save_file({name: value.contiguous() for name, value in state.items()}, "model.safetensors")
loaded = load_file("model.safetensors")["response"]
file = io.BytesIO()
torch.save(state, file)
file.seek(0)
by_torch = torch.load(file)["response"]
print("saved ", state["response"][1:4].tolist())
print("loaded", loaded[1:4].tolist())
wrong = not torch.equal(loaded, state["response"]) and torch.equal(loaded, state["response"].conj())
print("loaded value is the conjugate of the saved one:", wrong)
print("torch.save and torch.load keep it:", torch.equal(by_torch, state["response"]))
holds = wrong and torch.equal(by_torch, state["response"])
print("as described" if holds else "CHANGED")
sys.exit(not holds)
PY
