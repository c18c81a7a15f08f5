#!/bin/sh
# transformers 5.23.0, packed rows (`DataCollatorWithFlattening`, `position_ids` that start again): with
# `use_cache=True`, the default of `forward`, the documents of a row see each other.
#
# `_preprocess_mask_arguments` (transformers/masking_utils.py) finds the borders in `position_ids` only if
# `past_key_values` is None. `LlamaModel.forward` and its like make an empty `DynamicCache` before they ask for the
# mask, so the row has the mask of one long text, in "eager" and in "sdpa", in `train()` too. Gradient checkpointing
# switches the cache off, and with it the borders come back: the same loop has another loss with it. `Trainer` sets
# `config.use_cache` to False; a loop of one's own, accelerate and Lightning do not. One would expect each document's
# logits to be those of the document alone, for an empty cache has nothing to be seen. The collator's documentation says
# "Make sure your attention computation is able to handle it!", and nothing of a cache.
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
venv=${FINDINGS_VENV:-$work/venv}
[ -x "$venv/bin/python" ] || python3 -m venv "$venv"
"$venv/bin/pip" install --quiet --disable-pip-version-check \
    torch==2.13.0 numpy==2.4.6 transformers==5.23.0 accelerate==1.15.0 safetensors==0.8.0
cd "$work"
"$venv/bin/python" -W ignore - <<'PY'
import sys, torch, transformers
from transformers import DataCollatorWithFlattening, LlamaConfig, LlamaForCausalLM

transformers.logging.set_verbosity_error()
print("torch", torch.__version__, "transformers", transformers.__version__)
texts = [torch.randint(0, 64, (n,), generator=torch.Generator().manual_seed(n)).tolist() for n in (5, 6)]
batch = DataCollatorWithFlattening()([{"input_ids": text, "labels": text} for text in texts])
print("position_ids", batch["position_ids"][0].tolist())
found = {}
for attention in ("eager", "sdpa"):
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=2, attn_implementation=attention,
        )
    ).train()
    alone = model(input_ids=torch.tensor(texts[1:])).logits[0]
    for name, settings in (("default", {}), ("use_cache=False", {"use_cache": False}), ("checkpointing", {})):
        if name == "checkpointing":
            model.gradient_checkpointing_enable()
        output = model(**batch, **settings)
        found[attention, name] = (output.logits[0, 5:] - alone).abs().max().item()
        print(
            f"{attention}, {name}: loss {output.loss.item():.4f}; the second text's logits differ from those alone by "
            f"{found[attention, name]:.2g}"
        )
holds = all((value > 1e-2) if name == "default" else (value < 1e-5) for (_, name), value in found.items())
print("as described" if holds else "CHANGED")
sys.exit(not holds)
PY
