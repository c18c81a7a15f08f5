"""SFTTrainer of TRL over an offloaded model. Kill it and start it again: it goes on at the last step.

python examples/trl_sft.py RUN [MODEL] [DATA]: a folder for the run, a model and a data set of the Hub or local.
"""

import sys

import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer

import zero_offload as zo
from zero_offload.integrations.transformers import OffloadMixin, StatsCallback


class OffloadSFTTrainer(OffloadMixin, SFTTrainer):
    pass


run, name, data = [*sys.argv[1:], "Qwen/Qwen2.5-0.5B", "trl-lib/Capybara"][:3]
trainer = OffloadSFTTrainer(
    model=AutoModelForCausalLM.from_pretrained(name),
    processing_class=AutoTokenizer.from_pretrained(name),
    args=SFTConfig(
        output_dir=f"{run}/out",
        max_steps=20,
        save_steps=10,
        logging_steps=5,
        bf16=False,  # no autocast: the model computes in the precision of OffloadConfig, bf16
        use_cpu=not torch.accelerator.is_available(),
    ),
    train_dataset=load_dataset(data, split="train"),
    offload=zo.OffloadConfig(params="cpu", optimizer="nvme", nvme=f"{run}/nvme", existing="resume"),
    callbacks=[StatsCallback()],
)
trainer.train()
trainer.save_model()
zo.close(trainer.model)
