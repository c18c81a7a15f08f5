#!/bin/sh
# transformers 5.23.0, Trainer(gradient_accumulation_steps=N): for many models the loss and the gradients are N times
# those of the same batch in one piece.
#
# `Trainer.training_step` (transformers/trainer.py) leaves out the division by N where the model's `forward` has
# `**kwargs`, for such a model is taken to divide by `num_items_in_batch` itself. In the model files over 300 classes
# have `**kwargs` and take a plain mean: T5, BART, Whisper, BERT's heads, and the sequence classification of decoders.
# So the effective learning rate grows with N (for SGD; for Adam the clipping by `max_grad_norm` and the logged loss are
# wrong). One would expect that 4 batches of 1 give what 1 batch of 4 gives, as for LlamaForCausalLM. A way around:
# `model.accepts_loss_kwargs = False` before the Trainer is made. Upstream: issue 47688, open.
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
from transformers import BertConfig, BertForSequenceClassification, LlamaConfig, LlamaForCausalLM
from transformers import LlamaForSequenceClassification, T5Config, T5ForConditionalGeneration
from transformers import Trainer, TrainingArguments

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
print("torch", torch.__version__, "transformers", transformers.__version__)
tokens = torch.Generator().manual_seed(1)


def row():
    return torch.randint(2, 60, (8,), generator=tokens)


def change(make, rows, batch_size, accumulation, told=False):
    """The logged loss, and the change of all weights by one step of SGD with a learning rate of 1: the gradient."""
    torch.manual_seed(0)
    model = make()
    if told:
        model.accepts_loss_kwargs = False
    before = torch.cat([value.detach().flatten().clone() for value in model.parameters()])
    arguments = TrainingArguments(
        "out", max_steps=1, per_device_train_batch_size=batch_size, gradient_accumulation_steps=accumulation,
        optim="sgd", learning_rate=1.0, lr_scheduler_type="constant", max_grad_norm=0.0, logging_steps=1,
        report_to=[], use_cpu=True, save_strategy="no", disable_tqdm=True,
    )
    trainer = Trainer(model, arguments, train_dataset=rows)
    trainer.train()
    after = torch.cat([value.detach().flatten() for value in model.parameters()])
    return trainer.state.log_history[0]["loss"], before - after


size = dict(vocab_size=64, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32)
bert = BertConfig(**size, num_labels=3, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
scores = LlamaConfig(**size, num_labels=1, pad_token_id=0)
t5 = T5Config(
    vocab_size=64, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, dropout_rate=0.0, decoder_start_token_id=0
)
rows = [row() for _ in range(4)]
texts = [{"input_ids": ids, "labels": ids} for ids in rows]
classes = [{"input_ids": ids, "labels": torch.tensor(i % 3)} for i, ids in enumerate(rows)]
values = [{"input_ids": ids, "labels": torch.tensor(float(i))} for i, ids in enumerate(rows)]
holds = True
for make, data, wrong in (
    (lambda: LlamaForCausalLM(LlamaConfig(**size)), texts, 1.0),
    (lambda: T5ForConditionalGeneration(t5), texts, 4.0),
    (lambda: BertForSequenceClassification(bert), classes, 4.0),
    (lambda: LlamaForSequenceClassification(scores), values, 4.0),
):
    loss, gradient = change(make, data, 4, 1)
    accumulated_loss, accumulated = change(make, data, 1, 4)
    factor = ((gradient @ accumulated) / (gradient @ gradient)).item()
    told_loss, told = change(make, data, 1, 4, told=True)
    right = torch.allclose(told, gradient, atol=1e-5)
    print(
        f"{type(make()).__name__}: loss {loss:.3f} as 1 batch of 4, {accumulated_loss:.3f} as 4 of 1; gradient times "
        f"{factor:.3f}; with accepts_loss_kwargs=False the same gradient: {right}"
    )
    holds &= abs(factor - wrong) < 1e-3 and abs(accumulated_loss / loss - wrong) < 1e-2 and right
print("as described" if holds else "CHANGED")
sys.exit(not holds)
PY
