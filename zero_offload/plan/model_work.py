"""What a token costs in each unit of a module: from its parameters' shapes, without running it.

Owns the guess: every parameter of two dimensions or more multiplies each token once, but for tables of embeddings, of
which a token reads one row. A table that another module multiplies with (a tied head) counts in its own unit. Pure.
"""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from zero_offload.plan.model_spec import ModelSpec, ParamSpec, UnitSpec
from zero_offload.plan.shapes import UnitWork, plain_block
from zero_offload.plan.unit_bytes import UnitNumel


def work_of(model: nn.Module, spec: ModelSpec) -> tuple[UnitWork, ...]:
    """Of each unit of `spec`, which was made from `model`."""
    tables = {name for name, module in model.named_modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag)}
    return tuple(_work_of_unit(unit, tables) for unit in spec.units)


def _work_of_unit(unit: UnitSpec, tables: set[str]) -> UnitWork:
    trained = sum(param.numel for param in unit.params if param.trainable)
    whole = plain_block(UnitNumel(unit.name, trained, unit.numel - trained))
    products = [param.numel for param in unit.params if len(param.shape) > 1 and not _is_table(param, tables)]
    multiplied = sum(products)
    is_block = multiplied > unit.numel // 2 and len(unit.params) > 1
    return replace(
        whole,
        matmul_numel=float(multiplied),
        attention_width=whole.attention_width if is_block else 0,
        last_numel=float(products[-1]) if products else 0.0,
    )


def _is_table(param: ParamSpec, tables: set[str]) -> bool:
    """Whether all modules that hold the parameter look rows up in it."""
    return all(name.rpartition(".")[0] in tables for name in (param.name, *param.aliases))
