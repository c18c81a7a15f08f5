"""All weights of a U-Net of diffusers learn to denoise; weights, gradients and states rest on disk.

pip install '.[peft]' diffusers, then: python examples/diffusion_full.py [DIRECTORY]
"""

import sys
from pathlib import Path

import torch
from diffusers import DDPMScheduler, UNet2DModel

import zero_offload as zo

folder = Path(sys.argv[1] if len(sys.argv) > 1 else "runs/diffusion")
torch.manual_seed(0)
with zo.deferred_init():  # of a pretrained one: from_config(load_config(...)) here, then zo.load_pretrained
    types = {"down_block_types": ("DownBlock2D",) * 2, "up_block_types": ("UpBlock2D",) * 2}
    model = UNet2DModel(sample_size=16, block_out_channels=(32, 64), norm_num_groups=8, **types)
model.enable_gradient_checkpointing()
tiers = zo.OffloadConfig(params="nvme", grads="nvme", optimizer="nvme", nvme=folder / "tiers", durability="scratch")
zo.offload(model, tiers)
optimizer = zo.AdamW(model.parameters(), lr=2e-3)
scheduler = DDPMScheduler()
stripes = torch.linspace(0, 9, 16).sin().expand(8, 3, 16, 16).to(zo.device(model))  # stands for images

for step in range(21):
    noise = torch.randn_like(stripes)
    times = torch.randint(0, scheduler.config.num_train_timesteps, (len(stripes),), device=stripes.device)
    guess = model(scheduler.add_noise(stripes, noise, times), times).sample
    loss = (guess.float() - noise).square().mean()
    loss.backward()
    zo.clip_grad_norm_(model, 1.0)
    optimizer.step()
    optimizer.zero_grad()
    if step % 10 == 0:
        print(f"step {step}: loss {loss.item():.3f}")
zo.export_pretrained(model, folder / "unet")  # for UNet2DModel.from_pretrained
zo.close(model)
