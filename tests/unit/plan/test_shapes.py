from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from zero_offload.base.errors import ConfigError
from zero_offload.finetune import gpt
from zero_offload.finetune.gpt_config import PRESETS, GPTConfig
from zero_offload.plan.model_spec import ModelSpec
from zero_offload.plan.shapes import SHAPES, Shape, equal_blocks, find_shape, work_of

aten = torch.ops.aten

# As counted in the published checkpoints.
COUNTS = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "llama-1b": 1_235_814_400,
    "llama-3b": 3_212_749_824,
    "llama-7b": 6_738_415_616,
    "llama-8b": 8_030_261_248,
    "llama-13b": 13_015_864_320,
    "llama-70b": 70_553_706_496,
    "llama-405b": 405_853_388_800,
    "qwen-0.5b": 494_032_768,
    "qwen-7b": 7_615_616_512,
    "qwen-72b": 72_706_203_648,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "deepseek-v3": 671_026_404_352,
}


@pytest.mark.parametrize(("name", "count"), COUNTS.items())
def test_parameters_are_those_of_the_published_models(name: str, count: int) -> None:
    assert SHAPES[name].numel == count


@pytest.mark.parametrize(("name", "billions"), [("gpt3-175b", 175), ("mt-nlg-530b", 530), ("gpt-1t", 1008)])
def test_models_without_a_checkpoint_have_the_size_of_their_papers(name: str, billions: float) -> None:
    assert SHAPES[name].numel / 1e9 == pytest.approx(billions, rel=0.003)


def test_arithmetic_is_twice_the_parameters_and_attention() -> None:
    units = SHAPES["llama-8b"].units()
    assert units[0].forward_flops(4096) == 0.0  # rows are looked up
    assert units[-1].forward_flops(4096) == 2 * 128256 * 4096
    matrices = 4096 * 4096 * 2 + 2 * 4096 * 1024 + 3 * 4096 * 14336
    assert units[1].forward_flops(2048) == 2 * matrices + 2 * 4096 * 2048
    assert units[1].numel.trained == matrices + 2 * 4096


def flops(block: nn.Module, *, recompute: bool) -> float:
    """Of a forward and a backward, as torch counts products with matrices. Before 2.15 it counts no CPU attention."""
    inputs, rotation = torch.randn(1, 32, 64, requires_grad=True), gpt.GPT(BLOCK).rotation[:, :32]
    with FlopCounterMode(display=False) as counter:
        out = checkpoint(block, inputs, rotation, use_reentrant=False) if recompute else block(inputs, rotation)
        out.sum().backward()
    counted = counter.get_flop_counts()["Global"]
    return float(sum(count for operation, count in counted.items() if operation in (aten.mm, aten.addmm)))


BLOCK = GPTConfig(num_layers=1, width=64, num_heads=4, seq_max=32)


def test_recompute_leaves_the_last_product_out() -> None:
    """In torch too: nothing that backward needs comes after it."""
    shape = Shape(1, 64, 4, 4 * 64, 256, matrices=2)
    work = shape.units()[1]
    model = gpt.GPT(BLOCK)
    plain = flops(model.blocks[0], recompute=False)
    again = flops(model.blocks[0], recompute=True) - plain
    products = 12 * 64 * 64
    assert (plain, again) == (3 * 32 * 2 * products, 32 * 2 * (products - work.last_numel))
    forward = work.forward_flops(32)
    assert work.rerun_share(32, recompute=True) == pytest.approx(1 - 2 * 64 * 256 / forward)
    assert work.rerun_share(32, recompute=False) == 0
    spec = ModelSpec.from_module(model.blocks)
    assert {each.last_numel for each in work_of(model.blocks, spec).units} == {64 * 256}


def test_a_token_meets_its_experts_only() -> None:
    block = SHAPES["mixtral-8x7b"].units()[1]
    attention = 4096 * 4096 * 2 + 2 * 4096 * 1024
    assert block.matmul_numel == attention + 2 * 3 * 4096 * 14336 + 8 * 4096
    active = sum(unit.matmul_numel for unit in SHAPES["deepseek-v3"].units())
    assert active == pytest.approx(37e9, rel=0.02)  # as its paper says


def test_a_tied_head_reads_the_table() -> None:
    units = SHAPES["gpt2"].units()
    assert units[-1].numel.trained == 2 * 768


@pytest.mark.parametrize(
    ("typed", "near"), [("llama8b", "llama-8b"), ("Qwen-7B", "qwen-7b"), ("mixtral", "mixtral-8x7b")]
)
def test_a_typo_is_offered_what_is_near(typed: str, near: str) -> None:
    with pytest.raises(ConfigError, match=f"did you mean .*{near}"):
        find_shape(typed)


def test_names_of_other_tables_are_offered_too() -> None:
    with pytest.raises(ConfigError, match="did you mean gpt125m"):
        find_shape("gpt125", tuple(PRESETS))


def test_a_size_is_equal_blocks() -> None:
    units = equal_blocks(8 * 10**9, 32)
    assert sum(unit.numel.trained for unit in units) == 8 * 10**9
    assert {unit.matmul_numel for unit in units} == {250e6}
