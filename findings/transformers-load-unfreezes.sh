#!/bin/sh
# transformers 5.23.0, from_pretrained: parameters that a class freezes are trainable after a load.
#
# Whisper, Marian, Pegasus and others set `requires_grad` to False for their sinusoidal tables; ViT-MAE, RoFormer and
# BLT freeze theirs, too. `set_param_for_module` (core_model_loading.py) makes a new parameter of what a file has, with
# `requires_grad=is_floating_point()`. A model that is made of its config keeps the class's flags, the same model out of
# a folder does not: its fine-tuning changes tables that its pretraining did not. One would expect the flags to be those
# of the class, as before 5.0.
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
venv=${FINDINGS_VENV:-$work/venv}
[ -x "$venv/bin/python" ] || python3 -m venv "$venv"
"$venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6 transformers==5.23.0
cd "$work"
"$venv/bin/python" -W ignore - 2>"$work/errors" <<'PY' || { tail -5 "$work/errors"; exit 1; }
import sys, torch, transformers
from transformers import MarianConfig, MarianMTModel, ViTMAEConfig, ViTMAEForPreTraining
from transformers import WhisperConfig, WhisperForConditionalGeneration

print("transformers", transformers.__version__, "torch", torch.__version__)
encoder_decoder = dict(d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2)
encoder_decoder |= dict(decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, vocab_size=64, pad_token_id=0)
special = dict(bos_token_id=1, eos_token_id=2, decoder_start_token_id=1)
images = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, image_size=32, patch_size=8)
images |= dict(decoder_hidden_size=16, decoder_num_hidden_layers=1, decoder_num_attention_heads=2)
holds = True
for cls, config in (
    (WhisperForConditionalGeneration, WhisperConfig(**encoder_decoder, **special)),
    (MarianMTModel, MarianConfig(**encoder_decoder, **special, decoder_vocab_size=64)),
    (ViTMAEForPreTraining, ViTMAEConfig(**images, decoder_intermediate_size=32)),
):
    model = cls(config)
    frozen = [name for name, param in model.named_parameters() if not param.requires_grad]
    model.save_pretrained("folder")
    loaded = dict(cls.from_pretrained("folder").named_parameters())
    thawed = [name for name in frozen if loaded[name].requires_grad]
    print(f"{cls.__name__}: {len(frozen)} frozen by the class, {len(thawed)} trainable after a load: {', '.join(thawed)}")
    holds &= bool(thawed)
print("as described" if holds else "CHANGED")
sys.exit(not holds)
PY
