#!/bin/sh
# safetensors 0.8.0, safetensors.numpy.save_file: an array in Fortran order is saved with its values in other places.
#
# `_flatten` in safetensors/numpy.py hands the array's address and its shape on, and the file then has the bytes in the
# order of memory with a shape that is read in C order. 0.7.0 took `array.tobytes()`, which is in C order. Arrays of
# linear algebra (numpy.linalg, PCA of scikit-learn) and every transposed matrix are in Fortran order. One would expect
# the array, or an error as safetensors.torch gives for a transposed tensor. The documentation asks for contiguous
# tensors, which numpy says such an array is (`flags.f_contiguous`, `flags.forc`). `numpy.save` keeps it. Upstream:
# issue 825, open.
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
venv=${FINDINGS_VENV:-$work/venv}
[ -x "$venv/bin/python" ] || python3 -m venv "$venv"
"$venv/bin/pip" install --quiet --disable-pip-version-check \
    numpy==2.4.6 safetensors==0.8.0
cd "$work"
"$venv/bin/python" -W ignore - <<'PY'
import io, sys, numpy, safetensors
from safetensors.numpy import load_file, save_file

print("numpy", numpy.__version__, "safetensors", safetensors.__version__)
matrix = numpy.arange(6.0).reshape(2, 3)
state = {
    "C order": matrix,
    "Fortran order": numpy.asfortranarray(matrix),
    "transposed": matrix.T,
    "singular vectors": numpy.linalg.svd(matrix)[0].T,
}
save_file(state, "model.safetensors")
loaded = load_file("model.safetensors")
right = {}
for name, value in state.items():
    file = io.BytesIO()
    numpy.save(file, value)
    file.seek(0)
    right[name] = numpy.array_equal(loaded[name], value), numpy.array_equal(numpy.load(file), value)
    print(f"{name}: safetensors keeps it {right[name][0]}, numpy.save {right[name][1]}")
print("saved", state["Fortran order"].tolist(), "loaded", loaded["Fortran order"].tolist())
holds = right["C order"] == (True, True) and right["Fortran order"] == right["transposed"] == (False, True)
print("as described" if holds else "CHANGED")
sys.exit(not holds)
PY
