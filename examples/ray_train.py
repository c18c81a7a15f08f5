"""Ray Train starts the ranks, and starts them again when one dies: they go on.

pip install 'ray[train]', then: python examples/ray_train.py [DIRECTORY]
"""

import sys
from pathlib import Path

import ray.train
import torch
from ray.train.torch import TorchTrainer
from torch import nn

import zero_offload as zo

STEPS = 40


def train(settings: dict[str, str]) -> None:
    """One rank. Ray has made the process group, on each start anew."""
    torch.manual_seed(0)  # the same model on every rank
    model = nn.Sequential(*(nn.Linear(128, 128) for _ in range(6)))
    # A directory of the machine that a rank runs on. Ray's storage is for its own records.
    zo.offload(model, zo.OffloadConfig(params="nvme", optimizer="nvme", nvme=settings["nvme"], existing="resume"))
    optimizer = zo.AdamW(model.parameters(), lr=1e-3)
    rank = ray.train.get_context().get_world_rank()
    for step in zo.steps(model, optimizer, STEPS):
        batch = torch.randn(16, 128, generator=torch.Generator().manual_seed(1000 * step + rank))
        loss = (model(batch) - batch.sin().to(zo.device(model))).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"step {step}: loss {loss.item():.4f}", flush=True)
    zo.close(model)


if __name__ == "__main__":
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/ray").absolute()
    trainer = TorchTrainer(
        train,
        train_loop_config={"nvme": str(folder / "tiers")},
        scaling_config=ray.train.ScalingConfig(num_workers=2, use_gpu=torch.cuda.is_available()),
        run_config=ray.train.RunConfig(
            storage_path=str(folder), failure_config=ray.train.FailureConfig(max_failures=3)
        ),
    )
    trainer.fit()
