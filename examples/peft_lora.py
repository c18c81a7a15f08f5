"""LoRA over a base whose weights never are in memory whole: train, write the adapter and a merged model.

python examples/peft_lora.py  # pip install '.[peft]'
"""

import tempfile

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import zero_offload as zo

LORA = LoraConfig(r=8, target_modules="all-linear", task_type="CAUSAL_LM")
with tempfile.TemporaryDirectory() as folder:
    # A stand-in for a folder from the hub.
    base, sizes = f"{folder}/base", {"hidden_size": 64, "intermediate_size": 128, "vocab_size": 256}
    LlamaForCausalLM(LlamaConfig(num_hidden_layers=4, num_attention_heads=4, **sizes)).save_pretrained(base)

    with zo.deferred_init(values="skip"):
        model = get_peft_model(AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(base)), LORA)
    zo.load_pretrained(model, base)
    zo.offload(model, zo.OffloadConfig(params="nvme", optimizer="cpu", nvme=f"{folder}/run", precision="fp32"))
    optimizer = zo.AdamW([param for param in model.parameters() if param.requires_grad], lr=3e-3)
    tokens = torch.arange(64).view(2, 32)
    for _ in range(20):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print(f"loss after 20 steps: {loss.item():.4f}")
    zo.export_pretrained(model, f"{folder}/adapter")
    zo.export_pretrained(model, f"{folder}/merged", adapters="merged")
    for plain in (
        PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), f"{folder}/adapter"),
        AutoModelForCausalLM.from_pretrained(f"{folder}/merged"),
    ):
        print(f"{type(plain).__name__}: {plain(input_ids=tokens, labels=tokens).loss.item():.4f}")
    zo.close(model)
