#!/bin/sh
# lightning 2.6.6, GradientAccumulationScheduler: after a resume in the middle of an epoch that epoch is trained with
# an accumulation of 1, whatever the schedule says.
#
# The callback sets `trainer.accumulate_grad_batches` in `on_train_epoch_start` alone and has no state of its own
# (gradient_accumulation_scheduler.py), and `_FitLoop.on_advance_start` does not call that hook for an epoch that was
# stopped in its middle. So the rest of the epoch takes an optimizer step for every batch, without a warning; the next
# epoch follows the schedule again. The loader here restores its position, so that nothing else differs. The
# documentation: "Change gradient accumulation factor according to scheduling."
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
venv=${FINDINGS_VENV:-$work/venv}
[ -x "$venv/bin/python" ] || python3 -m venv "$venv"
"$venv/bin/pip" install --quiet --disable-pip-version-check \
    torch==2.13.0 numpy==2.4.6 lightning==2.6.6 torchdata==0.11.0
cd "$work"
"$venv/bin/python" -W ignore - <<'PY'
import logging, sys, lightning, torch
from lightning.pytorch.callbacks import Callback, GradientAccumulationScheduler, ModelCheckpoint
from torchdata.stateful_dataloader import StatefulDataLoader

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


class Factors(Callback):
    """The optimizer step and the factor after each batch of the second epoch."""

    def __init__(self):
        self.seen = {}

    def on_train_batch_end(self, trainer, model, outputs, batch, index):
        if trainer.current_epoch == 1:
            self.seen[index] = (trainer.global_step, trainer.accumulate_grad_batches)


def fit(resume=None):
    generator = torch.Generator().manual_seed(1)
    columns = [torch.randn(40, width, generator=generator) for width in (8, 4)]
    data = torch.utils.data.TensorDataset(*columns)
    factors = Factors()
    callbacks = [GradientAccumulationScheduler({0: 1, 1: 2}), factors]
    if resume is None:
        callbacks.append(ModelCheckpoint("run", filename="{step}", save_top_k=-1, every_n_train_steps=1))
    trainer = lightning.Trainer(
        accelerator="cpu", devices=1, logger=False, callbacks=callbacks, enable_progress_bar=False, max_epochs=2,
        enable_model_summary=False, enable_checkpointing=resume is None,
    )
    trainer.fit(Model(), StatefulDataLoader(data, 4), ckpt_path=resume)
    return factors.seen


whole = fit()
resumed = fit("run/step=12.ckpt")
print("schedule: 1 in epoch 0, 2 from epoch 1. Second epoch, batch: (step, factor)")
print("whole  ", whole)
print("resumed", resumed)
holds = {factor for _, factor in whole.values()} == {2} and {factor for _, factor in resumed.values()} == {1}
holds &= max(whole.values())[0] == 15 and max(resumed.values())[0] > 15
print("as described" if holds else "CHANGED")
sys.exit(not holds)
PY
