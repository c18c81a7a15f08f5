"""Formats and trainers of other libraries. The import gives `OffloadConfig.from_deepspeed` its reader."""

from zero_offload.integrations import deepspeed as deepspeed
