#!/bin/sh
# lightning 2.6.6, Trainer(devices=2): after SIGTERM to one of two ranks neither ends, whichever it is, and both wait.
#
# `_SignalConnector._sigterm_notifier_fn` (lightning/pytorch/trainer/connectors/signal_connector.py) broadcasts from
# rank 0 inside of the handler, on the rank that has the signal alone. `_TrainingEpochLoop.advance` broadcasts from rank
# 0 before each batch, on all ranks. So one rank has made a broadcast more than the other, and each next one waits in
# vain. `advance` says "prevent deadlocks by syncing all ranks before exit", so one expects both ranks to end.
set -eu
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
venv=${FINDINGS_VENV:-$work/venv}
[ -x "$venv/bin/python" ] || python3 -m venv "$venv"
"$venv/bin/pip" install --quiet --disable-pip-version-check \
    torch==2.13.0 numpy==2.4.6 lightning==2.6.6
cd "$work"
cat > ranks.py <<'PY'
import logging, multiprocessing, os, signal, sys, time
import lightning, torch
from lightning.pytorch.callbacks import Callback

LIMIT_S = 60


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(4, 4)

    def training_step(self, batch, index):
        return self.net(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-2)


class Signalled(Callback):
    def __init__(self, victim):
        self.victim = victim

    def on_train_batch_start(self, trainer, *_):
        if trainer.global_step == 3 and trainer.global_rank == self.victim:
            os.kill(os.getpid(), signal.SIGTERM)


def run(rank, victim):
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_PORT": 29700 + victim}
    names |= {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RUN_ID": "finding"}
    os.environ.update({name: str(value) for name, value in names.items()})
    trainer = lightning.Trainer(
        accelerator="cpu", devices=2, strategy="ddp", max_steps=12, logger=False, callbacks=[Signalled(victim)],
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )
    trainer.fit(Model(), torch.utils.data.DataLoader(torch.randn(64, 4), 2))


if __name__ == "__main__":
    print("torch", torch.__version__, "lightning", lightning.__version__)
    hung = []
    for victim in (0, 1):
        ranks = [multiprocessing.get_context("spawn").Process(target=run, args=(rank, victim)) for rank in (0, 1)]
        for rank in ranks:
            rank.start()
        deadline = time.monotonic() + LIMIT_S
        for rank in ranks:
            rank.join(max(0, deadline - time.monotonic()))
        running = sum(rank.is_alive() for rank in ranks)
        print(f"SIGTERM to rank {victim} in step 4 of 12: {LIMIT_S} s later {running} of 2 ranks run")
        hung.append(running)
        for rank in ranks:
            rank.kill()
    holds = hung == [2, 2]
    print("as described" if holds else "CHANGED")
    sys.exit(not holds)
PY
"$venv/bin/python" -W ignore ranks.py 2>/dev/null
