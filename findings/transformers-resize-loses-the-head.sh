#!/bin/sh
# transformers 5.23.0 (torch 2.13.0), `model.resize_token_embeddings` after an optimizer was made: the optimizer goes on
# with the new embedding, and an untied head is never trained again.
#
# `_get_resized_embeddings` (modeling_utils.py) puts new values into the embedding's own parameter, which stays the same
# object. `_get_resized_lm_head` makes a module anew, whose parameter no optimizer has. One would expect one rule for
# both: each stays, or each is new, as after `nn.Embedding` and `nn.Linear` are replaced. No error and no warning comes.
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
venv=${FINDINGS_VENV:-$work/venv}
[ -x "$venv/bin/python" ] || python3 -m venv "$venv"
"$venv/bin/pip" install --quiet --disable-pip-version-check torch==2.13.0 numpy==2.4.6 transformers==5.23.0
cd "$work"
"$venv/bin/python" -W ignore - <<'PY'
import sys, torch, transformers
from transformers import LlamaConfig, LlamaForCausalLM

print("torch", torch.__version__, "transformers", transformers.__version__)
holds = True
for tied in (True, False):
    for resizes in (False, True):
        torch.manual_seed(0)
        sizes = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2)
        config = LlamaConfig(vocab_size=64, intermediate_size=16, tie_word_embeddings=tied, **sizes)
        model = LlamaForCausalLM(config)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        if resizes:
            model.resize_token_embeddings(70)
        ends = {"embedding": model.get_input_embeddings(), "head": model.get_output_embeddings()}
        before = {name: module.weight.detach().clone() for name, module in ends.items()}
        ids = torch.arange(16).view(2, 8)
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        trained = {name: not torch.equal(before[name], module.weight) for name, module in ends.items()}
        known = {id(param) for group in optimizer.param_groups for param in group["params"]}
        held = {name: id(module.weight) in known for name, module in ends.items()}
        print(f"tied: {tied}, resized: {resizes}; in the optimizer: {held}; changed by a step: {trained}")
        lost = resizes and not tied
        holds &= trained == held == {"embedding": True, "head": not lost}
sys.exit(0 if holds else 1)
PY
echo "as described"
