"""Training on several machines, each with drives of its own. Kill a rank or a machine, start again: it goes on.

On each machine: torchrun --nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint node1:29500 \\
    --rdzv-id mine examples/several_machines.py [DIRECTORY]
examples/slurm.sh starts it under SLURM.
"""

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, DistributedSampler

import zero_offload as zo

STEPS, PAUSE_S = 60, 0.1

zo.join()  # the process group of the ranks that a launcher has started
rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
rows = torch.tensor(list(Path(__file__).read_bytes())).unfold(0, 33, 1)
loader = DataLoader(rows, batch_size=8, sampler=DistributedSampler(rows, size, rank))

torch.manual_seed(0)  # the same model on every rank
layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
model = nn.Sequential(nn.Embedding(256, 64), nn.TransformerEncoder(layer, 3), nn.Linear(64, 256))
folder = sys.argv[1] if len(sys.argv) > 1 else "runs/machines"
zo.offload(model, zo.OffloadConfig(params="nvme", optimizer="nvme", nvme=folder, existing="resume"))
optimizer = zo.AdamW(model.parameters(), lr=1e-3)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)

# SIGTERM to a rank, as by SLURM before a machine is taken away, ends all behind one commit.
for step, batch in zo.steps(model, optimizer, STEPS, loader=loader, scheduler=scheduler):
    logits = model(batch[:, :-1])
    loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten().to(logits.device))
    loss.backward()
    zo.clip_grad_norm_(model, 1.0)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    print(f"rank {rank}, step {step}: loss {loss.item():.4f}", flush=True)
    time.sleep(PAUSE_S)  # a larger model takes longer
zo.close(model)
if dist.is_initialized():
    dist.destroy_process_group()
