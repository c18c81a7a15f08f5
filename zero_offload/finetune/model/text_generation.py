"""Text that a model writes, by the generation config of its folder."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch

from zero_offload.hardware.accelerators import present_type
from zero_offload.integrations.gate import part_of, read_object, reading

_MEND = "mend it, or delete it: the model's usual values are taken then"


def generation_config(file: Path) -> Any:
    """Its GenerationConfig. Raises ConfigError, which names the field, where transformers does not take it."""
    from transformers import GenerationConfig

    words = read_object(file)
    with reading(str(file), _MEND, lambda: part_of(words, GenerationConfig.from_dict)):
        return GenerationConfig.from_pretrained(file.parent)


def check_generation(file: Path, tokenizer: Any, num_words: int, **settings: Any) -> None:
    """Raise ConfigError, which names the field, where no text can be written, as with contrastive search.

    `generate` alone reads most of the config. So a model of two numbers per word writes two tokens by it, on the device
    that a model would take. `settings` are those of `write_text`.
    """
    from transformers import GenerationConfig, GPT2Config, GPT2LMHeadModel

    words, device = read_object(file), torch.device(present_type() or "cpu")
    ids = torch.zeros((1, 1), dtype=torch.int64, device=device)
    drawn_on = [] if device.type == "cpu" else [torch.accelerator.current_device_index()]

    def trial(words: Any) -> None:
        with torch.random.fork_rng(drawn_on, device_type=device.type), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of lengths, which are the trial's
            with device:
                sizes = GPT2Config(vocab_size=num_words, n_embd=2, n_layer=1, n_head=1, n_positions=8)
                model: Any = GPT2LMHeadModel(sizes)
            model.eval().generation_config = GenerationConfig.from_dict(words)
            write_text(model, tokenizer, ids, max_new_tokens=2, **settings)

    with reading(str(file), _MEND, lambda: part_of(words, trial)):
        trial(words)


def write_text(model: Any, tokenizer: Any, ids: torch.Tensor, **settings: Any) -> torch.Tensor:
    """The tokens, of shape (number,), that follow `ids` of shape (1, length). `settings`: of `model.generate`."""
    # A generation config may ask for several answers and for scores, and its stop_strings are read by a tokenizer.
    given = {"num_return_sequences": 1, "return_dict_in_generate": False, "tokenizer": tokenizer}
    given |= {"attention_mask": torch.ones_like(ids), "pad_token_id": tokenizer.pad_token_id}
    with torch.no_grad():
        found: torch.Tensor = model.generate(input_ids=ids, **given | settings)
    return found[0, ids.shape[1] :]
