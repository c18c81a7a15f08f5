"""Save and load by torch.distributed.checkpoint, on any number of ranks: each writes and reads what it has.

[torchrun --nproc-per-node 2] python examples/distributed_checkpoint.py [DIRECTORY]
"""

from __future__ import annotations

import os
import sys
import tempfile

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import zero_offload as zo

torch.manual_seed(0)  # the same weights on every rank
model = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(4)))
zo.offload(model, zo.OffloadConfig(stage=3, params="cpu", optimizer="cpu"))
optimizer = zo.AdamW(model.parameters(), lr=1e-3)
directory = sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp()
if os.path.isfile(f"{directory}/.metadata"):  # the checkpoint's last file
    weights, states = get_state_dict(model, optimizer)  # tensors without memory, which dcp.load fills on the tiers
    dcp.load({"model": weights, "optim": states}, checkpoint_id=directory)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=states)  # hyperparameters too
    print("loaded")
x = torch.randn(16, 64).to(zo.device(model))
for _ in range(20):
    loss = (model(x).float() - x.roll(1, dims=1)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print(f"loss {loss.item():.4f}")
weights, states = get_state_dict(model, optimizer)
dcp.save({"model": weights, "optim": states}, checkpoint_id=directory)
zo.close(model)
