"""The address of the GPT of `train` in the cards of exports."""

from zero_offload.finetune.gpt import GPT as GPT
from zero_offload.finetune.gpt import GPTConfig as GPTConfig
