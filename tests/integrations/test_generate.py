"""`generate` on an offloaded model writes the tokens of the model in memory, with every kind of cache."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import zero_offload as zo
from tests.helpers.ranks import RankPools
from tests.helpers.tools import WHERE, config, llama, on_ranks, transformers

LENGTH = 12


def decoder(**changes: Any) -> Any:
    return llama(num_hidden_layers=4, max_position_embeddings=256, use_cache=True, **changes).eval()


def encoder_decoder() -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": 128, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 3, "num_heads": 4}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, decoder_start_token_id=0)).eval()


BUILDS: dict[str, Callable[[], Any]] = {"decoder": decoder, "encoder and decoder": encoder_decoder}
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "top_k": 20, "temperature": 0.8},
    "beams": {"num_beams": 3, "do_sample": False},
    "static cache": {"cache_implementation": "static", "do_sample": False},
    "no cache": {"use_cache": False, "do_sample": False},
    "prefill in chunks": {"prefill_chunk_size": 4, "do_sample": False},
    "many sequences": {"num_return_sequences": 4, "do_sample": True},
}


def prompts(rows: int = 3, length: int = 9) -> Tensor:
    return torch.randint(3, 128, (rows, length), generator=torch.Generator().manual_seed(0))


def written(model: Any, tokens: Tensor, **how: Any) -> list[list[int]]:
    """Tokens, padded on the left in the first row."""
    torch.manual_seed(5)
    mask = torch.ones_like(tokens)
    mask[0, : 2 * (len(tokens) > 1)] = 0
    out: Tensor = model.generate(tokens, attention_mask=mask, min_new_tokens=LENGTH, max_new_tokens=LENGTH, **how)
    return out.tolist()


def read_only(model: Any, where: str, folder: Path, **changes: Any) -> Any:
    """Offloaded, with nothing trained; the budget holds some units of the model."""
    if where == "nvme":
        changes = {"device_memory": "10MiB", "durability": "scratch"} | changes
    return zo.offload(model.requires_grad_(False), config(where, folder, **changes))


def on_a_rank(rank: int, world_size: int, where: str, folder: Path) -> list[list[int]]:
    model = read_only(decoder(), where, folder)
    found = written(model, prompts(), **WAYS["beams"])
    zo.close(model)
    return found


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("build", BUILDS)
def test_tokens_are_those_of_the_model_in_memory(build: str, way: str, tmp_path: Path) -> None:
    expected = written(BUILDS[build](), prompts(), **WAYS[way])
    for where in WHERE:
        model = read_only(BUILDS[build](), where, tmp_path)
        assert written(model, prompts(), **WAYS[way]) == expected
        assert written(model, prompts(), **WAYS[way]) == expected
        zo.close(model)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_long_prompt_and_logits(precision: str, tmp_path: Path) -> None:
    """The values too; in bf16 those of the model in bf16. torch multiplies by trained weights in another way."""
    plain = decoder().requires_grad_(False)
    for param in plain.parameters():
        param.data = param.data.to(torch.bfloat16 if precision == "bf16" else torch.float32)
    model = read_only(decoder(), "nvme", tmp_path, precision=precision)
    how = {"do_sample": False, "return_dict_in_generate": True, "output_logits": True, "max_new_tokens": 6}
    found, expected = (each.generate(prompts(2, 200), **how) for each in (model, plain))
    assert torch.equal(found.sequences, expected.sequences)
    assert all(torch.equal(one, other) for one, other in zip(found.logits, expected.logits, strict=True))
    zo.close(model)


@pytest.mark.parametrize("helper", ["a small model", "the prompt"])
def test_assisted_generation(helper: str, tmp_path: Path) -> None:
    def found(where: str | None) -> list[list[int]]:
        models = [decoder(), llama(num_hidden_layers=1, use_cache=True).eval()]
        if where is not None:
            models = [read_only(each, where, tmp_path / str(index)) for index, each in enumerate(models)]
        assists = {"assistant_model": models[1]} if helper == "a small model" else {"prompt_lookup_num_tokens": 3}
        return written(models[0], prompts(1), do_sample=False, **assists)

    assert found("nvme") == found("cpu") == found(None)


@pytest.mark.parametrize("where", WHERE)
def test_two_ranks(where: str, pools: RankPools, tmp_path: Path) -> None:
    """Each writes the same; parameters are divided over both."""
    expected = written(decoder(), prompts(), **WAYS["beams"])
    assert on_ranks(pools, 2, on_a_rank, where, tmp_path) == [expected, expected]


@pytest.mark.parametrize("where", WHERE)
def test_a_pipeline(where: str, tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()

    def texts(model: Any) -> list[str]:
        pipe = transformers.pipeline("text-generation", model=model, tokenizer=tokenizer, batch_size=2)
        out = pipe(["what is", "a longer one"], max_new_tokens=8, min_new_tokens=8, do_sample=False)
        return [each[0]["generated_text"] for each in out]

    model = read_only(decoder(), where, tmp_path)
    assert texts(model) == texts(decoder())
    zo.close(model)


def byte_tokenizer() -> Any:
    """A token for each ASCII character."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    words = {chr(code): code for code in range(3, 128)} | {"<pad>": 0, "<s>": 1, "</s>": 2}
    made = Tokenizer(models.BPE(vocab=words, merges=[]))
    made.pre_tokenizer, made.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>", padding_side="left"
    )


def test_the_example_writes_and_says_what_a_token_reads(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = Path(__file__).parents[2] / "examples" / "generate.py"
    assert len(script.read_text().splitlines()) <= 40
    decoder().save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    monkeypatch.setattr("sys.argv", ["generate.py", str(tmp_path / "model"), str(tmp_path / "tiers"), "some words"])
    runpy.run_path(str(script), run_name="__main__")
    last = capsys.readouterr().out.splitlines()[-1]
    assert "tokens/s" in last and float(last.split(" MB read")[0].split()[-1]) > 0
