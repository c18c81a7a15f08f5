#!/bin/sh
# litgpt 0.5.13, convert_lit_checkpoint of a Gemma that was fine-tuned whole: the trained head is left out. Gemma 1 to 3
# and CodeGemma have one matrix for embeddings and head.
#
# `litgpt.GPT` makes two matrices, `finetune_full` trains both, each by gradients of its own, and refuses
# `train.tie_embeddings`. `convert_lit_checkpoint` (litgpt/scripts/convert_lit_checkpoint.py) skips `lm_head.weight` of
# these families, whatever it is, and transformers then computes logits by the embeddings. One would expect logits to be
# those of the trained model, or an error where the two matrices differ. Upstream: issue 1762, open, tells of such
# logits.
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
venv=${FINDINGS_VENV:-$work/venv}
[ -x "$venv/bin/python" ] || python3 -m venv "$venv"
"$venv/bin/pip" install --quiet --disable-pip-version-check \
    torch==2.13.0 numpy==2.4.6 transformers==5.23.0 safetensors==0.8.0 lightning==2.6.6 jsonargparse psutil
"$venv/bin/pip" install --quiet --disable-pip-version-check --no-deps litgpt==0.5.13  # asks for an older huggingface-hub
cd "$work"
"$venv/bin/python" -W ignore - 2>"$work/errors" <<'PY' || { tail -5 "$work/errors"; exit 1; }
import contextlib, io, pathlib, sys
from importlib.metadata import version
import litgpt, torch, transformers
from litgpt.scripts.convert_lit_checkpoint import convert_lit_checkpoint
from litgpt.utils import save_config
from transformers import GemmaConfig, GemmaForCausalLM, LlamaConfig, LlamaForCausalLM

print("litgpt", version("litgpt"), "transformers", transformers.__version__, "torch", torch.__version__)
sizes = dict(n_layer=2, n_embd=32, n_head=4, head_size=8, intermediate_size=48, padded_vocab_size=64)
theirs = dict(vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, head_dim=8)
theirs |= dict(intermediate_size=48, attn_implementation="eager")
torch.manual_seed(9)
tokens = torch.randint(64, (4, 12))
holds = True
for name, of_transformers in (
    ("Gemma-7b", lambda: GemmaForCausalLM(GemmaConfig(**theirs, num_key_value_heads=4, rms_norm_eps=1e-5))),
    ("Llama-2-7b-hf", lambda: LlamaForCausalLM(LlamaConfig(**theirs, num_key_value_heads=4, rms_norm_eps=1e-5))),
):
    torch.manual_seed(0)
    config = litgpt.Config.from_name(name, **sizes)
    model = litgpt.GPT(config)
    with torch.no_grad():
        model.lm_head.weight.copy_(model.transformer.wte.weight)  # as a published Gemma begins

    def off():
        folder = pathlib.Path(name)
        folder.mkdir(exist_ok=True)
        torch.save(model.state_dict(), folder / "lit_model.pth")
        save_config(config, folder)
        with contextlib.redirect_stdout(io.StringIO()):
            convert_lit_checkpoint(folder, folder / "hf")
        other = of_transformers().eval()
        found = torch.load(folder / "hf" / "model.pth")
        other.load_state_dict(found, strict=False)
        other.tie_weights()
        return (other(tokens).logits - model.eval()(tokens)).abs().max().item(), "lm_head.weight" in found

    before, _ = off()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(10):
        logits = model(tokens)
        torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    after, has_head = off()
    print(f"{name}: logits off by {before:.1g} before training, {after:.1g} after; a head in the files: {has_head}")
    holds &= before < 1e-4 and (after > 0.1 if name == "Gemma-7b" else after < 1e-4)
print("as described" if holds else "CHANGED")
sys.exit(not holds)
PY
