#!/bin/sh
# transformers 5.23.0 with schedulefree 1.4.1, Trainer(optim="schedule_free_adamw"): a checkpoint that no evaluation
# comes before holds the training point of the weights, not the trained weights.
#
# Schedule-Free keeps the weights at the point y where gradients are taken; `optimizer.eval()` moves them to the
# average x, which is the model. `Trainer` calls it in `evaluation_loop` alone. A save with `eval_strategy="no"`, and
# the end of such a training (`trainer.save_model()`), write y, and a plain load of that folder gives another model
# than the trained one. With an evaluation before each save the folder holds x. The optimizer's README: "The optimizer
# should also be placed in eval mode when storing checkpoints." The Trainer's documentation of `optim` names no such
# step, and the Trainer, which calls `train()` and `eval()` itself, looks complete.
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
venv=${FINDINGS_VENV:-$work/venv}
[ -x "$venv/bin/python" ] || python3 -m venv "$venv"
"$venv/bin/pip" install --quiet --disable-pip-version-check \
    torch==2.13.0 numpy==2.4.6 transformers==5.23.0 accelerate==1.15.0 safetensors==0.8.0 schedulefree==1.4.1
cd "$work"
"$venv/bin/python" -W ignore - <<'PY'
import sys, importlib.metadata, torch, transformers
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
print("torch", torch.__version__, *(f"{p} {importlib.metadata.version(p)}" for p in ("transformers", "schedulefree")))
config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2)
rows = [torch.randint(0, 64, (16,), generator=torch.Generator().manual_seed(i)) for i in range(32)]
data = [{"input_ids": row, "labels": row} for row in rows]
found = {}
for evaluation in ("no", "steps"):
    torch.manual_seed(0)
    model = LlamaForCausalLM(config)
    arguments = TrainingArguments(
        "out_" + evaluation, max_steps=8, optim="schedule_free_adamw", learning_rate=1e-2, report_to=[], use_cpu=True,
        lr_scheduler_type="constant", save_steps=8, per_device_train_batch_size=4, logging_strategy="no",
        disable_tqdm=True, eval_strategy=evaluation, eval_steps=8,
    )
    trainer = Trainer(model, arguments, train_dataset=data, eval_dataset=data[:8])
    trainer.train()
    saved = load_file(f"out_{evaluation}/checkpoint-8/model.safetensors")
    trainer.optimizer.eval()
    trained = model.state_dict()
    found[evaluation] = max((value - trained[name]).abs().max().item() for name, value in saved.items())
    print(f'eval_strategy="{evaluation}": the checkpoint differs from the trained weights by {found[evaluation]:.3g}')
holds = found["no"] > 1e-3 and found["steps"] == 0
print("as described" if holds else "CHANGED")
sys.exit(not holds)
PY
