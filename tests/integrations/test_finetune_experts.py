"""`zero-offload finetune`, `chat` and `evaluate` of mixtures of experts: what has adapters, what is read and said."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

import tests.helpers.tools as tools  # before transformers  # isort: skip
import peft
import torch
import transformers

import zero_offload as zo
from tests.helpers import folders
from zero_offload.cli.main import main
from zero_offload.finetune.choices import Lora
from zero_offload.finetune.model.build import build_model, meta_model, recompute_blocks
from zero_offload.finetune.model.folder import open_folder
from zero_offload.runtime.experts import GroupedExperts

pytestmark = pytest.mark.tools

SIZES: dict[str, Any] = {
    **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "head_dim": 8, "moe_intermediate_size": 24, "num_experts_per_tok": 2},
    **{"vocab_size": folders.VOCAB, "max_position_embeddings": 256},
    **{"pad_token_id": 0, "bos_token_id": None, "eos_token_id": folders.SPECIAL.index(folders.EOS)},
}
LATENT: dict[str, Any] = {
    **{"num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8},
    **{"v_head_dim": 8, "n_routed_experts": 6, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1},
}
KINDS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 6},
    "mixtral": {"num_local_experts": 6},
    "gpt_oss": {"num_local_experts": 6},
    "deepseek_v3": LATENT,
}


def write_mixture(path: Path, kind: str) -> Path:
    config = transformers.AutoConfig.for_model(kind, **(SIZES | KINDS[kind]))
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).bfloat16()
    model.generation_config = transformers.GenerationConfig(eos_token_id=2, pad_token_id=0, max_new_tokens=32)
    model.save_pretrained(path)
    folders.tokenizer().save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mixtures")
    for kind in KINDS:
        write_mixture(path / kind, kind)
    folders.write_instructions(path / "chat.jsonl", 12)
    return path


def finetune(place: Path, kind: str, out: Path, *flags: object, steps: int = 2) -> int:
    tools.reset_accelerate()
    sizes = ("--batch", 2, "--accumulate", 1, "--seq", 64, "--lr", 1e-2, "--warmup", 0, "--steps", steps)
    given = (place / kind, "--data", place / "chat.jsonl", "--out", out, *sizes, "--lora", 4, *flags)
    return main(["finetune", *map(str, given)])


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(input_ids=torch.arange(5, 25)[None], use_cache=False).logits
    return found


@pytest.mark.parametrize(
    ("kind", "targets", "adapted"),
    [
        (
            "qwen3_moe",
            (),
            "q_proj, k_proj, v_proj, o_proj, experts.gate_up_proj (rank 8), experts.down_proj, gate.weight",
        ),
        ("gpt_oss", ("experts", "router", "v_proj"), "v_proj, router.weight, experts.gate_up_proj, experts.down_proj"),
        ("mixtral", ("down_proj", "embed_tokens"), "embed_tokens, experts.down_proj"),
        ("deepseek_v3", ("experts", "kv_b_proj"), "kv_b_proj, experts.gate_up_proj, experts.down_proj"),
    ],
)
def test_adapters_on_experts_routers_and_embeddings(
    kind: str,
    targets: tuple[str, ...],
    adapted: str,
    place: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """They stream from a drive, and plain peft has the same logits from the folder."""
    out, flags = tmp_path / "out", ("--lora-targets", *targets) if targets else ()
    assert finetune(place, kind, out, "--params-tier", "nvme", *flags) == 0
    printed = capsys.readouterr()
    assert f"adapters on {adapted}\n" in printed.out and "warning" not in printed.err
    base: Any = transformers.AutoModelForCausalLM.from_pretrained(place / kind, dtype=torch.bfloat16)
    base.set_experts_implementation("eager")
    untrained = logits(base)
    plain = peft.PeftModel.from_pretrained(base, str(out), autocast_adapter_dtype=False).eval()
    assert not torch.equal(logits(plain), untrained)
    model = build_model(open_folder(out), zo.OffloadConfig(), None, trains=False)
    assert torch.equal(logits(model), logits(plain))
    zo.close(model)


@pytest.mark.parametrize(
    ("kind", "target", "says"),
    [
        ("mixtral", "down_prj", "nothing of this name.*did you mean down_proj"),
        ("deepseek_v3", "down_proj", "would adapt experts.down_proj instead of these layers"),
        ("qwen3_moe", "shared_experts.down_proj", "nothing of this name.*did you mean experts.down_proj"),
        ("gpt_oss", "gate", "nothing of this name.*router.weight"),
        ("gpt_oss", "lm_head", "output's layer"),
    ],
)
def test_a_name_by_which_nothing_would_be_adapted_is_an_error(kind: str, target: str, says: str, place: Path) -> None:
    with pytest.raises(zo.ConfigError, match=f"(?s){says}"):
        meta_model(open_folder(place / kind), Lora(4, 8.0, targets=("o_proj", target)))


def test_names_of_transformers_4_are_those_of_peft(place: Path) -> None:
    by_name, by_old = (
        meta_model(open_folder(place / "mixtral"), Lora(4, 8.0, targets=targets))
        for targets in (("experts",), ("w1", "w2", "w3"))
    )
    names = [[name for name, param in each.named_parameters() if param.requires_grad] for each in (by_name, by_old)]
    assert names[0] == names[1]


def test_a_step_reads_experts_twice(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of DeepSeek too, whose blocks go on behind them with shared experts."""
    fetch, spans = GroupedExperts.fetch, []

    def noted(self: GroupedExperts, call: Any, span: range, *rest: Any, **names: Any) -> Any:
        spans.append(span)
        return fetch(self, call, span, *rest, **names)

    monkeypatch.setattr(GroupedExperts, "fetch", noted)
    assert finetune(place, "deepseek_v3", tmp_path / "out", "--lora-targets", "o_proj", "--group-size", 6, steps=1) == 0
    assert spans == [range(6), range(6)]  # one layer has them


def test_doctor_and_report_tell_of_the_base(place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its place and size, and what became of it since. The plan's bytes for drives leave it out."""
    out, folder = tmp_path / "out", place / "qwen3_moe"
    assert (
        finetune(place, "qwen3_moe", out, "--params-tier", "nvme", "--lora-targets", "o_proj", "--quantize", "nf4") == 0
    )
    printed = capsys.readouterr().out
    assert "parameters of linear layers are quantized; the other" in printed and f"chat {out} --quantize nf4" in printed

    def base(code: int) -> str:
        capsys.readouterr()
        assert main(["doctor", str(out)]) == code
        return capsys.readouterr().out.partition(" base: ")[2]

    assert base(0).startswith(f"{folder}, 1 file of ") and "fix" not in base(0)
    assert main(["report", str(out), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["base"].startswith(f"{folder}, 1 file of ")
    nvme = found["memory"]["nvme"]
    assert 0 < nvme["planned_bytes"] < 1.5 * nvme["measured_bytes"]
    file = folder / "model.safetensors"
    os.utime(file, ns=(0, 0))
    assert f"{file} was written since" in base(0)
    assert main(["verify", str(out)]) == 0
    folder.rename(place / "moved")
    try:
        assert "cannot be read there" in base(3) and f"ln -s COPY {folder}" in base(3)
        folder.symlink_to(place / "moved")
        assert main(["verify", str(out)]) == 0 and "fix: zero-offload verify" in base(0)
        folder.unlink()
    finally:
        (place / "moved").rename(folder)
    assert main(["evaluate", str(out), "--data", str(place / "chat.jsonl"), "--quantize", "nf4"]) == 0
    assert "experts stay bf16" in capsys.readouterr().err


def test_a_model_without_blocks_cannot_run_them_again() -> None:
    with pytest.raises(zo.ConfigError, match="give --recompute none"):
        recompute_blocks(torch.nn.Linear(2, 2))
