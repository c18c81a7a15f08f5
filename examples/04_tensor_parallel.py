"""Two ways to divide at once: torch's tensor parallelism over one dimension of a mesh, our states over the other.

torchrun --nproc-per-node 4 examples/04_tensor_parallel.py [DIRECTORY]
"""

from __future__ import annotations

import sys
import tempfile

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import zero_offload as zo

WIDTH, ROWS = 128, 16


class Block(nn.Module):
    """A feed-forward residual block."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def train(directory: str) -> None:
    computes_on = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    mesh = init_device_mesh(computes_on.type, (dist.get_world_size() // 2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)  # the same weights on every rank
    model = nn.Sequential(*(Block() for _ in range(4)))
    for block in model:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    # Ranks of one "dp" group hold the same part of each matrix and see other data: they share that part's states.
    config = zo.OffloadConfig(stage=3, params="nvme", optimizer="nvme", nvme=directory)
    zo.offload(model, config, mesh["dp"])
    optimizer = zo.AdamW(model.parameters(), lr=1e-3)
    place = mesh["dp"].get_local_rank()
    for step in range(1, 31):
        x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1000 * step + place)).to(zo.device(model))
        loss = (model(x).float() - x.roll(1, dims=1)).square().mean()
        loss.backward()
        zo.clip_grad_norm_(model, 1.0)  # of the whole model: every part counts once
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0 and dist.get_rank() == 0:
            print(f"step {step}: loss {loss.item():.4f}")
    zo.close(model)


def main() -> None:
    dist.init_process_group()
    directory = [sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()]
    dist.broadcast_object_list(directory)
    train(directory[0])
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
