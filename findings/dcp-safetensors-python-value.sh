#!/bin/sh
# torch 2.13.0 with safetensors 0.8.0, torch.distributed.checkpoint.HuggingFaceStorageWriter: one value that is not a
# tensor makes a checkpoint that is saved without an error and that nothing reads again.
#
# The default planner pickles such a value. `_write_item` in torch/distributed/checkpoint/filesystem.py writes these
# bytes to the stream of the `.safetensors` file, before the tensors' own bytes, where a reader expects the length of
# the header. `HuggingFaceStorageWriter.write_data` (hf_storage.py) lets them through. A step count, a learning rate of
# `param_groups` or a module's extra state is enough; the default FileSystemWriter keeps these. One would expect an
# error at the save, for the documentation says that the writer "writes to storage in the huggingface safetensors
# format". The tensors are whole in the file, behind the pickled bytes.
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
venv=${FINDINGS_VENV:-$work/venv}
[ -x "$venv/bin/python" ] || python3 -m venv "$venv"
"$venv/bin/pip" install --quiet --disable-pip-version-check \
    torch==2.13.0 numpy==2.4.6 safetensors==0.8.0
cd "$work"
"$venv/bin/python" -W ignore - <<'PY'
import glob, logging, sys, torch, safetensors
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.api import CheckpointException

logging.disable(logging.CRITICAL)
print("torch", torch.__version__, "safetensors", safetensors.__version__)
weight = torch.arange(6.0)


def reads(folder):
    """How the folder reads again, by torch and by safetensors."""
    try:
        state = {"weight": torch.zeros(6)}
        dcp.load(state, storage_reader=HuggingFaceStorageReader(folder))
        by_torch = "equal" if torch.equal(state["weight"], weight) else "other values"
    except (Exception, CheckpointException) as error:  # the latter is a BaseException
        by_torch = "raises: " + str(error).strip().splitlines()[-1]
    try:
        (path,) = glob.glob(folder + "/*.safetensors")
        by_safetensors = "equal" if torch.equal(load_file(path)["weight"], weight) else "other values"
    except Exception as error:
        by_safetensors = f"raises: {error}"
    return by_torch, by_safetensors


results = {}
for folder, state in {"tensors": {"weight": weight}, "with_step": {"weight": weight, "step": 5}}.items():
    dcp.save(state, storage_writer=HuggingFaceStorageWriter(folder))
    results[folder] = reads(folder)
    print(f"{folder}: saved; torch {results[folder][0]}; safetensors {results[folder][1]}")
holds = results["tensors"] == ("equal", "equal") and all("raises" in result for result in results["with_step"])
print("as described" if holds else "CHANGED")
sys.exit(not holds)
PY
