#!/bin/sh
# transformers 5.23.0, Trainer(bf16_full_eval=True): `evaluate()` before `train()` leaves the model in bfloat16, and the
# training that follows is in bfloat16 throughout.
#
# `Trainer.evaluation_loop` (transformers/trainer.py) casts the model in place if it is not called from `train()`, and
# nothing casts it back. A first evaluation for a baseline therefore rounds the weights, and the optimizer then updates
# 16-bit weights: updates below half a unit in the last place are lost, and the saved model is bfloat16. One would
# expect float32 weights afterwards, as without the first evaluation: the documentation of `bf16_full_eval` says "Only
# applies during evaluation". `fp16_full_eval` does the same.
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
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
print("torch", torch.__version__, "transformers", transformers.__version__)
config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2)
ids = [torch.randint(0, 64, (16,), generator=torch.Generator().manual_seed(i)) for i in range(8)]
data = [{"input_ids": row, "labels": row} for row in ids]
changed, saved = {}, {}
for first in (False, True):
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    arguments = TrainingArguments(
        "out", max_steps=4, learning_rate=1e-5, lr_scheduler_type="constant", bf16_full_eval=True, report_to=[],
        use_cpu=True, save_strategy="no", logging_strategy="no", disable_tqdm=True,
    )
    trainer = Trainer(model, arguments, train_dataset=data, eval_dataset=data)
    if first:
        trainer.evaluate()
    before = model.lm_head.weight.detach().clone()
    trainer.train()
    trainer.save_model()
    saved[first] = load_file("out/model.safetensors")["lm_head.weight"].dtype
    changed[first] = (model.lm_head.weight.detach() != before).float().mean().item()
    print(
        f"evaluate() first: {first}: trained in {model.lm_head.weight.dtype}, saved in {saved[first]}, "
        f"{changed[first]:.0%} of the weights changed in 4 steps"
    )
holds = saved == {False: torch.float32, True: torch.bfloat16} and changed[False] > 0.99 and changed[True] < 0.9
print("as described" if holds else "CHANGED")
sys.exit(not holds)
PY
