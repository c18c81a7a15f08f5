"""A loop of accelerate around a model whose parameters and optimizer states rest on disk.

pip install '.[transformers]', then: torchrun --nproc-per-node 2 examples/accelerate_loop.py
"""

import sys
from pathlib import Path

import torch
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

import zero_offload as zo
from zero_offload.integrations.accelerate import OffloadAccelerator

folder = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/accelerate")
rows = torch.tensor(list(Path(__file__).read_bytes())).unfold(0, 64, 8)

accelerator = OffloadAccelerator(cpu=not torch.accelerator.is_available(), gradient_accumulation_steps=2)
torch.manual_seed(0)  # the same model on every rank
model = LlamaForCausalLM(LlamaConfig(vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=4))
zo.offload(model, zo.OffloadConfig(params="nvme", optimizer="nvme", nvme=folder / "tiers", durability="scratch"))
optimizer = zo.AdamW(model.parameters(), lr=3e-3)
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(rows, batch_size=4, shuffle=True))

for number, batch in enumerate(loader):
    with accelerator.accumulate(model):
        loss = model(input_ids=batch, labels=batch).loss
        accelerator.backward(loss)
        if accelerator.sync_gradients:
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    if number % 10 == 0:
        accelerator.print(f"batch {number}: loss {accelerator.gather(loss).mean().item():.3f}")
zo.export_pretrained(model, folder / "model")  # on all ranks
