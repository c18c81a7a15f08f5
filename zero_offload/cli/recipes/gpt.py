"""The address of the GPT of `train`, which the cards of exports name: folders that were written before still load."""

from zero_offload.finetune.gpt import GPT as GPT
from zero_offload.finetune.gpt_config import GPTConfig as GPTConfig
