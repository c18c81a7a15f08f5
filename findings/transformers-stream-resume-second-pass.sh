#!/bin/sh
# transformers 5.23.0, Trainer with an IterableDataset and `max_steps`: a checkpoint of the second pass over the data
# resumes at the beginning of the pass, so rows are trained twice and others not at all.
#
# Without a length, `Trainer` takes `max_steps` for the steps of one epoch, so a resume computes epoch 0 and skips as
# many batches as all steps before. The stream ends while these are skipped, and the next pass begins at its first
# row. One would expect the row after the last one that was trained, as for a checkpoint of the first pass, where the
# resume is exact. The documentation of `ignore_data_skip=False`, the default, promises an "exact continuation".
# Upstream: pull request 33544, open.
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
venv=${FINDINGS_VENV:-$work/venv}
[ -x "$venv/bin/python" ] || python3 -m venv "$venv"
"$venv/bin/pip" install --quiet --disable-pip-version-check \
    torch==2.13.0 numpy==2.4.6 transformers==5.23.0 accelerate==1.15.0 safetensors==0.8.0
cd "$work"
"$venv/bin/python" -W ignore - 2>"$work/messages" <<'PY' || { cat "$work/messages" >&2; exit 1; }
import sys, torch, transformers
from transformers import Trainer, TrainingArguments

print("torch", torch.__version__, "transformers", transformers.__version__)


class Rows(torch.utils.data.IterableDataset):
    def __iter__(self):
        return ({"row": torch.tensor([float(number)])} for number in range(8))


class Sized(torch.utils.data.Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, number):
        return {"row": torch.tensor([float(number)])}


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.trained = []

    def forward(self, row):
        self.trained.append(int(row.item()))
        return {"loss": self.layer(row).square().mean()}


def train(rows, checkpoint=None):
    """The rows that are trained, in order."""
    model = Model()
    arguments = TrainingArguments(
        output_dir=type(rows).__name__, max_steps=13, per_device_train_batch_size=1, learning_rate=1e-4,
        save_strategy="steps", save_steps=1, train_sampling_strategy="sequential", use_cpu=True, report_to="none",
        remove_unused_columns=False, disable_tqdm=True,
    )
    resume = checkpoint and f"{type(rows).__name__}/checkpoint-{checkpoint}"
    Trainer(model, arguments, train_dataset=rows).train(resume_from_checkpoint=resume)
    return model.trained


holds = True
for rows in (Sized(), Rows()):
    whole = train(rows)
    print(f"{type(rows).__name__}, uninterrupted: {whole}")
    for step in (4, 10):
        left, found = whole[step:], train(rows, step)
        print(f"{type(rows).__name__}, resumed after step {step}: {found}, left are {left}")
        holds &= found == ([0, 1, 2] if step == 10 and isinstance(rows, Rows) else left)
print("as described" if holds else "CHANGED")
sys.exit(not holds)
PY
