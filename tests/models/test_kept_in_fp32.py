"""Parameters that classes of transformers and diffusers keep in fp32, by their lists of names or constructors."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zero_offload as zo
from tests.helpers.models import build
from tests.helpers.reference import placed
from zero_offload.plan import dtypes

WIDTH = 8


class Router(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x.float(), self.weight.float()).softmax(-1).to(x.dtype)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.wo, self.up = Router(), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.up(x) * self.gate(x)
        return x + self.wo(x.to(self.wo.weight.dtype)).to(x.dtype)


class AsTransformers(nn.Module):
    """Two lists of patterns, of which one counts in fp16 alone."""

    _keep_in_fp32_modules_strict = ("0.*gate.weight",)
    _keep_in_fp32_modules = ("wo",)

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block())

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x)


class AsDiffusers(nn.Module):
    """One list, of parts of names."""

    _keep_in_fp32_modules = ("gate", "w")

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Block(), Block())

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x)


class Adapted(nn.Module):
    """A layer in which adapters have wrapped another one."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.base_layer = inner
        self.lora = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.base_layer(x) + self.lora(x)


def adapted() -> nn.Module:
    model = nn.Sequential(AsTransformers())
    model[0].blocks[0].gate = Adapted(model[0].blocks[0].gate)
    return model


def tied() -> nn.Module:
    model = AsTransformers()
    model.blocks[1].gate.weight = model.blocks[0].gate.weight
    return model


STRICT, LOOSE = {"blocks.0.gate.weight"}, {f"blocks.{i}.wo.{name}" for i in (0, 1) for name in ("weight", "bias")}
KINDS: Mapping[str, tuple[Callable[[], nn.Module], str | zo.Precision, set[str]]] = {
    "bf16": (AsTransformers, "bf16", STRICT),
    "fp16": (AsTransformers, "fp16", STRICT | LOOSE),
    "parts of names": (AsDiffusers, "bf16", {"blocks.0.gate.weight", "blocks.1.gate.weight"}),
    "inside of another model": (
        lambda: nn.Sequential(AsTransformers(), Block(), AsTransformers()),
        "bf16",
        {"0.blocks.0.gate.weight", "2.blocks.0.gate.weight"},
    ),
    "adapted": (adapted, "bf16", {"0.blocks.0.gate.base_layer.weight"}),
    "tied": (tied, "bf16", {"blocks.0.gate.weight", "blocks.1.gate.weight"}),
    "a key for the module": (AsTransformers, zo.Precision(modules={"blocks.0": "bf16"}), set()),
    "a key for the parameter": (AsTransformers, zo.Precision(modules={"*.0.gate.weight": "bf16"}), set()),
    "a key for a class": (AsTransformers, zo.Precision(modules={Router: "bf16"}), set()),
    "a key for another module": (AsTransformers, zo.Precision(modules={"blocks.1.up": "bf16"}), STRICT),
}


@pytest.mark.parametrize("kind", KINDS)
def test_dtypes(kind: str) -> None:
    make, precision, expected = KINDS[kind]
    model = zo.offload(build(make), zo.OffloadConfig(precision=precision))
    found = model.named_parameters(remove_duplicate=False)
    assert {name for name, param in found if param.dtype == torch.float32} == expected
    model(torch.ones(4, WIDTH)).float().sum().backward()
    zo.close(model)


@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_as_the_plain_model(tier: str, tmp_path: Path) -> None:
    """A model in bf16 with the router in fp32: the bits of forward and gradients."""
    model = build(AsTransformers).to(torch.bfloat16)
    plain = copy.deepcopy(model)
    plain.blocks[0].gate.float()
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(0)).bfloat16()
    zo.offload(model, placed("bf16", (tier,) * 3, tmp_path if tier == "nvme" else None))
    for each in (plain, model):
        each(x).float().square().sum().backward()
    for name, param in plain.named_parameters():
        grad = model.get_parameter(name).grad
        assert grad is not None and param.grad is not None
        assert grad.norm().item() == pytest.approx(param.grad.float().norm().item(), rel=1e-6)  # sums of squares
    assert torch.equal(model(x), plain(x))
    zo.close(model)


def test_a_run_of_an_earlier_version_says_how_it_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which gave each parameter the compute dtype."""

    def opened(existing: str, precision: str | zo.Precision = "bf16") -> tuple[nn.Module, zo.AdamW]:
        config = zo.OffloadConfig(params="nvme", nvme=tmp_path, existing=existing, precision=precision)
        model = zo.offload(build(AsTransformers), config)
        return model, zo.AdamW(model.parameters())

    with monkeypatch.context() as patch:
        patch.setattr(dtypes, "_kept_in_fp32", lambda *_: lambda name: False)
        model, optimizer = opened("refuse")
        model(torch.ones(2, WIDTH)).float().sum().backward()
        optimizer.step()
        zo.commit(model, optimizer)
        zo.close(model)
    with pytest.raises(zo.CheckpointError, match=r"Precision\(modules=\{'blocks.0.gate.weight': 'bf16'\}\)"):
        opened("resume")
    model, optimizer = opened("resume", zo.Precision(modules={"blocks.0.gate.weight": "bf16"}))
    state = zo.resume(model, optimizer)
    assert state is not None and state.step == 1
    zo.close(model)


def _tiny(kind: str) -> Any:
    library = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 2, "vocab_size": 32}
    if kind == "HunYuan":
        sizes |= {"head_dim": 8, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
        return library.HunYuanMoEV1ForCausalLM(library.HunYuanMoEV1Config(**sizes, num_experts=2, moe_topk=1))
    if kind == "CodeGen":
        config = library.CodeGenConfig(vocab_size=32, n_embd=16, n_layer=1, n_head=4, rotary_dim=4, n_inner=16)
        return library.CodeGenForCausalLM(config)
    width = {key: sizes[key] for key in sizes if "key_value" not in key}
    return library.DebertaForMaskedLM(library.DebertaConfig(**width, pos_att_type=["c2p"], relative_attention=True))


@pytest.mark.parametrize("kind", ["HunYuan", "CodeGen"])
@pytest.mark.parametrize("compute", ["bf16", "fp16"])
def test_tensors_that_a_constructor_makes_in_fp32(kind: str, compute: str, tmp_path: Path) -> None:
    """Of `from_pretrained` a router and a table of angles are in fp32, whatever the model's dtype."""
    dtype, ids = getattr(torch, {"bf16": "bfloat16", "fp16": "float16"}[compute]), torch.arange(8).view(1, 8)
    _tiny(kind).to(dtype).save_pretrained(tmp_path / "plain")
    plain = type(_tiny(kind)).from_pretrained(tmp_path / "plain", dtype=dtype)
    expected = {name: each.dtype for name, each in (*plain.named_parameters(), *plain.named_buffers())}
    assert {name for name, each in expected.items() if each == torch.float32} - {"model.rotary_emb.inv_freq"}
    before = torch.get_rng_state(), torch.get_default_dtype()
    for load in (lambda: type(plain).from_pretrained(tmp_path / "plain", dtype=torch.float32), lambda: plain):
        model = zo.offload(load(), placed(compute, ("nvme",) * 3, tmp_path / "run"))
        loss = model(input_ids=ids, labels=ids).loss
        found = {name: each.dtype for name, each in (*model.named_parameters(), *model.named_buffers())}
        zo.close(model)
        assert found == expected
        again = type(plain).from_pretrained(tmp_path / "plain", dtype=dtype)
        assert loss.item() == again.train(model.training)(input_ids=ids, labels=ids).loss.item()
    assert torch.equal(torch.get_rng_state(), before[0]) and torch.get_default_dtype() == before[1]


def test_a_class_that_stops_in_16_bits_trains_here() -> None:
    """`from_pretrained` of DeBERTa in bf16 has biases in fp32, at which its forward stops."""
    model, ids = zo.offload(_tiny("DeBERTa"), zo.OffloadConfig()), torch.arange(8).view(1, 8)
    assert {param.dtype for param in model.parameters()} == {torch.bfloat16}
    model(input_ids=ids, labels=ids).loss.backward()
    zo.close(model)


def test_a_key_comes_before_what_a_constructor_says(tmp_path: Path) -> None:
    model = zo.offload(_tiny("HunYuan"), zo.OffloadConfig(precision=zo.Precision(modules={"*.wg": "bf16"})))
    assert {param.dtype for param in model.parameters()} == {torch.bfloat16}
    zo.close(model)
