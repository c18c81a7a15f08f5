#!/bin/sh
# transformers 5.23.0, Trainer(gradient_accumulation_steps=N) with a mixture of experts: the load-balancing loss of the
# routers has N times its weight.
#
# Models such as Mixtral divide the sum of the token losses by `num_items_in_batch`, and add `router_aux_loss_coef`
# times the balancing loss as a mean of each micro-batch (`MixtralForCausalLM.forward`, transformers/models/mixtral).
# `Trainer.training_step` does not divide by N where a model takes `num_items_in_batch`, so N whole balancing losses are
# added up. With more than one process `average_tokens_across_devices` multiplies them once more. One would expect the
# weight that the config says, whatever N is; it is so for N = 1. The logged loss rises with N too. A way around is a
# `router_aux_loss_coef` that is divided by N.
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
from transformers import MixtralConfig, MixtralForCausalLM, Trainer, TrainingArguments

transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
print("torch", torch.__version__, "transformers", transformers.__version__)
tokens = torch.Generator().manual_seed(1)


def row():
    return torch.randint(2, 60, (8,), generator=tokens)


def change(make, rows, batch_size, accumulation):
    """The logged loss, and the change of all weights by one step of SGD with a learning rate of 1: the gradient."""
    torch.manual_seed(0)
    model = make()
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


same = row()
data = [{"input_ids": same, "labels": same} for _ in range(4)]  # each micro-batch has the same balancing loss


def model(weight):
    return lambda: MixtralForCausalLM(
        MixtralConfig(
            vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=2, num_local_experts=4, output_router_logits=True, router_aux_loss_coef=weight,
        )
    )


found = {}
for weight in (0.0, 1.0, 0.25):
    for batch_size, accumulation in ((4, 1), (1, 4)):
        found[weight, accumulation] = change(model(weight), data, batch_size, accumulation)
ratios = []
for accumulation in (1, 4):
    loss = found[1.0, accumulation][0] - found[0.0, accumulation][0]
    gradient = found[1.0, accumulation][1] - found[0.0, accumulation][1]
    print(f"balancing part with {accumulation} micro-batches: loss {loss:.4f}, gradient {gradient.norm():.5f}")
    ratios.append((loss, gradient.norm().item()))
factors = [of_4 / of_1 for of_1, of_4 in zip(*ratios)]
around = torch.allclose(found[0.25, 4][1], found[1.0, 1][1], atol=1e-5)
print(f"times {factors[0]:.3f} and {factors[1]:.3f}; a quarter of the weight gives the gradient of one batch: {around}")
holds = all(abs(factor - 4) < 0.02 for factor in factors) and around
print("as described" if holds else "CHANGED")
sys.exit(not holds)
PY
