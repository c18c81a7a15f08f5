#!/bin/sh
# transformers 5.23.0, from_pretrained of ChineseCLIP, Funnel and Youtu: the embedding of the padding token comes back as
# zeros, whatever the folder has.
#
# A load ends with `_init_weights`, whose functions leave tensors alone that carry the mark of a loaded one. These classes
# write zeros to a slice, `weight[padding_idx]`, which has no mark; `PreTrainedModel` itself asks for the mark of the
# weight first, and says why. Nothing in `loading_info` or in a warning tells of it. Where head and embeddings are one
# matrix, the logit of the padding token changes with it. One would expect the values of the file, as BERT's are here.
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
venv=${FINDINGS_VENV:-$work/venv}
[ -x "$venv/bin/python" ] || python3 -m venv "$venv"
"$venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6 transformers==5.23.0
cd "$work"
"$venv/bin/python" -W ignore - 2>"$work/errors" <<'PY' || { tail -5 "$work/errors"; exit 1; }
import sys, torch, transformers
from transformers import BertConfig, BertForMaskedLM, ChineseCLIPConfig, ChineseCLIPModel, FunnelConfig, FunnelForMaskedLM

print("transformers", transformers.__version__, "torch", torch.__version__)
text = dict(vocab_size=64, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
text |= dict(pad_token_id=0)
vision = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, image_size=32, patch_size=8)
funnel = dict(vocab_size=64, d_model=16, n_head=2, d_head=8, d_inner=32, block_sizes=[1], num_decoder_layers=1)
holds = True
for cls, config, name, is_lost in (
    (BertForMaskedLM, BertConfig(**text), "bert.embeddings.word_embeddings", False),
    (FunnelForMaskedLM, FunnelConfig(**funnel, pad_token_id=0), "funnel.embeddings.word_embeddings", True),
    (
        ChineseCLIPModel,
        ChineseCLIPConfig(text_config=text, vision_config=vision, projection_dim=8),
        "text_model.embeddings.word_embeddings",
        True,
    ),
):
    model = cls(config)
    with torch.no_grad():
        model.get_submodule(name).weight[0] = 0.5  # as training leaves it, which gives the row gradients by a tied head
    model.save_pretrained("folder")
    loaded, info = cls.from_pretrained("folder", output_loading_info=True)
    before, after = (each.get_submodule(name).weight[0].abs().max().item() for each in (model, loaded))
    told = {key: value for key, value in info.items() if value}
    print(f"{cls.__name__}: the row of the padding token is {before} in the folder, {after} after a load; told: {told}")
    holds &= (after == 0) is is_lost and not told
print("as described" if holds else "CHANGED")
sys.exit(not holds)
PY
