#!/bin/sh
# transformers 5.23.0, from_pretrained of a sharded folder: model.safetensors.index.json does not say which shard a
# tensor is read from. Where two shards have the name, the shard whose file name sorts last wins.
#
# `get_checkpoint_shard_files` (transformers/utils/hub.py) sorts the file names of the index. `_load_pretrained_model`
# (modeling_utils.py) then puts all names of all these files into one dict, file after file, and never looks at
# "weight_map" again. A shard that is added to mend one tensor, which the index names for it, is in effect only if its
# name sorts behind the old shard. One would expect the tensor of the file that the index maps the name to: that is the
# index's one purpose. `output_loading_info` is empty in both cases. Tensors of a shard that the index does not name are
# read too.
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
venv=${FINDINGS_VENV:-$work/venv}
[ -x "$venv/bin/python" ] || python3 -m venv "$venv"
"$venv/bin/pip" install --quiet --disable-pip-version-check \
    torch==2.13.0 numpy==2.4.6 transformers==5.23.0 accelerate==1.15.0 safetensors==0.8.0
cd "$work"
"$venv/bin/python" -W ignore - <<'PY'
import json, os, sys, torch, transformers
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
print("torch", torch.__version__, "transformers", transformers.__version__)
model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2,
    )
)
model.save_pretrained("model", max_shard_size="16KB")
path = "model/model.safetensors.index.json"
with open(path) as file:
    index = json.load(file)
name = "model.norm.weight"
first = index["weight_map"][name]
print(f"{name} is 1.0 in {first}")
holds = True
for shard, value in (("mended.safetensors", 1.0), ("model-mended.safetensors", 7.0)):
    save_file({name: torch.full((32,), 7.0)}, f"model/{shard}", metadata={"format": "pt"})
    with open(path, "w") as file:
        json.dump({**index, "weight_map": {**index["weight_map"], name: shard}}, file)
    loaded, info = LlamaForCausalLM.from_pretrained("model", output_loading_info=True)
    found = loaded.model.norm.weight[0].item()
    print(f"the index names {shard}, which has 7.0: loaded is {found}; reported: {[k for k, v in info.items() if v]}")
    holds &= found == value and not any(info.values())
    os.remove(f"model/{shard}")
print("as described" if holds else "CHANGED")
sys.exit(not holds)
PY
