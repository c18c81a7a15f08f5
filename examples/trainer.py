"""transformers' Trainer as it is, around a model whose parameters and optimizer states rest on disk.

pip install '.[transformers]', then: python examples/trainer.py [DIRECTORY]
"""

import sys
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import zero_offload as zo

folder = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/trainer")
text = torch.tensor(list(Path(__file__).read_bytes())).unfold(0, 64, 8)  # rows of 64 bytes
data = [{"input_ids": row, "labels": row} for row in text]

with zo.deferred_init():  # of a pretrained model: from_config here, and then zo.load_pretrained
    model = LlamaForCausalLM(LlamaConfig(vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=4))
zo.offload(model, zo.OffloadConfig(params="nvme", optimizer="nvme", nvme=folder / "tiers", durability="scratch"))

trainer = Trainer(
    model,
    TrainingArguments(
        folder,
        max_steps=10,
        gradient_accumulation_steps=2,
        logging_steps=5,
        save_strategy="no",
    ),
    train_dataset=data,
    optimizer_cls_and_kwargs=(zo.AdamW, {"lr": 3e-3}),
)
trainer.train()
zo.export_pretrained(model, folder / "model")
