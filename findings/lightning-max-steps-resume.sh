#!/bin/sh
# lightning 2.6.6, Trainer(max_steps=...), a checkpoint of the end of an epoch: the resumed run trains one batch too
# many in the finished epoch. With `max_epochs` beside `max_steps` it also leaves out the last epoch.
#
# The setter of `_FitLoop.restarting` (lightning/pytorch/loops/fit_loop.py) says true for every run with `max_steps`,
# whether the saved epoch was finished or not: `restarting and epoch_unfinished or self._iteration_based_training()`.
# The loop then goes on with the finished epoch, trains a batch N + 1 of N, and counts that epoch once more. With
# `max_epochs` alone the same checkpoint resumes right, bit for bit. ModelCheckpoint writes such checkpoints by
# default, and `fit` documents `ckpt_path` as the one "from which training is resumed". Related upstream: issue 19617.
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
venv=${FINDINGS_VENV:-$work/venv}
[ -x "$venv/bin/python" ] || python3 -m venv "$venv"
"$venv/bin/pip" install --quiet --disable-pip-version-check \
    torch==2.13.0 numpy==2.4.6 lightning==2.6.6
cd "$work"
"$venv/bin/python" -W ignore - <<'PY'
import glob, logging, sys, lightning, torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
print("torch", torch.__version__, "lightning", lightning.__version__)


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Linear(8, 4)

    def training_step(self, batch, index):
        return (self.net(batch[0]) - batch[1]).square().mean()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


class Batches(Callback):
    def __init__(self):
        self.seen = []

    def on_train_batch_end(self, trainer, model, outputs, batch, index):
        self.seen.append((trainer.current_epoch, index))


def fit(limits, folder=None, resume=None):
    generator = torch.Generator().manual_seed(1)
    columns = [torch.randn(40, width, generator=generator) for width in (8, 4)]
    data = torch.utils.data.TensorDataset(*columns)
    batches, model = Batches(), Model()
    callbacks = [batches] + ([ModelCheckpoint(folder, filename="{step}", save_top_k=-1)] if folder else [])
    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, logger=False, callbacks=callbacks, enable_progress_bar=False,
        enable_model_summary=False, enable_checkpointing=folder is not None, **limits,
    )
    trainer.fit(model, torch.utils.data.DataLoader(data, 4), ckpt_path=resume)
    return model, trainer.global_step, batches.seen


found = []
for number, limits in enumerate(({"max_steps": 24}, {"max_steps": 24, "max_epochs": 3}, {"max_epochs": 3})):
    model, steps, _ = fit(limits, folder=f"run{number}")
    resumed, resumed_steps, seen = fit(limits, resume=f"run{number}/step=10.ckpt")
    difference = (model.net.weight - resumed.net.weight).abs().max().item()
    print(f"{limits}: the whole run ends at step {steps}. Resumed after epoch 0 (batches 0 to 9), it goes on with")
    print(f"  (epoch, batch) {seen[0]} and ends at step {resumed_steps}; the weights differ by {difference:.3g}")
    found.append((seen[0], resumed_steps, difference > 1e-3))
holds = found == [((0, 10), 24, True), ((0, 10), 21, True), ((1, 0), 30, False)]
print("as described" if holds else "CHANGED")
sys.exit(not holds)
PY
