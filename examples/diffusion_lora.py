"""LoRA of a diffusion transformer over weights that stay on disk: only the adapter and its states are in memory.

pip install '.[peft]' diffusers, then: python examples/diffusion_lora.py [DIRECTORY]
"""

import sys
from pathlib import Path

import torch
from diffusers import SD3Transformer2DModel
from peft import LoraConfig

import zero_offload as zo

folder = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/diffusion_lora")
sizes = {"num_layers": 4, "attention_head_dim": 32, "num_attention_heads": 4, "caption_projection_dim": 128}
texts = {"joint_attention_dim": 32, "pooled_projection_dim": 32}
SD3Transformer2DModel(sample_size=8, in_channels=4, out_channels=4, **sizes, **texts).save_pretrained(folder / "base")

with zo.deferred_init(values="skip"):  # shapes alone: the weights go from the files to the tiers
    model = SD3Transformer2DModel.from_config(SD3Transformer2DModel.load_config(folder / "base"))
    model.requires_grad_(False)
    model.add_adapter(LoraConfig(r=8, lora_alpha=8, target_modules=["to_q", "to_k", "to_v", "to_out.0", "net.2"]))
zo.load_pretrained(model, folder / "base")
zo.offload(model, zo.OffloadConfig(params="nvme", optimizer="cpu", nvme=folder / "tiers", durability="scratch"))
optimizer = zo.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-2)
# Stands for latents; text embeddings are zero.
target = torch.linspace(0, 9, 8).sin().expand(4, 4, 8, 8).to(zo.device(model))
words = {"encoder_hidden_states": torch.zeros(4, 6, 32), "pooled_projections": torch.zeros(4, 32)}
for step in range(31):
    noise, times = torch.randn_like(target), torch.rand(4, device=target.device)
    noisy = torch.lerp(target, noise, times.view(4, 1, 1, 1))  # the path of rectified flow
    velocity = model(hidden_states=noisy, timestep=1000 * times, **words).sample.float()
    loss = (velocity - (noise - target)).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 10 == 0:
        print(f"step {step}: loss {loss.item():.3f}")
zo.export_pretrained(model, folder / "adapter")  # pytorch_lora_weights.safetensors
