"""QLoRA of a folder that does not fit memory in 16 bits: quantized while it is read, streamed from NVMe, never trained.

python examples/qlora.py MODEL_DIR RUN_DIR    (needs pip install '.[quantize,peft]')
"""

import sys

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

import zero_offload as zo

folder, run = sys.argv[1:3]
with zo.deferred_init(values="skip"):
    base = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16)
zo.load_pretrained(base, folder, quantize="nf4-double")  # reads nothing yet

torch.manual_seed(0)
model = get_peft_model(base, LoraConfig(r=16, target_modules="all-linear", task_type="CAUSAL_LM"))
zo.checkpoint(base.model.layers)
zo.offload(model, zo.OffloadConfig(params="nvme", optimizer="cpu", nvme=f"{run}/nvme", existing="resume"))
optimizer = zo.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-3)
start = zo.resume(model, optimizer)

ids = torch.arange(64).remainder(base.config.vocab_size)[None]  # in the place of your data
for step in range(start.step if start is not None else 0, 8):
    loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    loss.backward()
    zo.clip_grad_norm_(model, 1.0)
    optimizer.step()
    optimizer.zero_grad()
    zo.commit(model, optimizer)
    print(f"step {step + 1} loss {loss.item():.4f}")
zo.export_pretrained(model, f"{run}/adapter")
zo.close(model)
