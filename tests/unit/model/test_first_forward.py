"""A forward without memory finds operations that get floats of two dtypes, and no others."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import zero_offload as zo
from zero_offload.model.first_forward import DtypeWatch, give_dtypes
from zero_offload.model.without_memory import without_memory
from zero_offload.plan.dtypes import resolve

F = nn.functional
WIDTH = 4
ROWS = torch.tensor([0, 1])


class Uses(nn.Module):
    """Calls a function with its input, in the compute dtype, and a buffer, which may have another one."""

    def __init__(self, use: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.use, self.first = use, nn.Linear(WIDTH, WIDTH)
        self.register_buffer("table", torch.ones(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self.first(x), self.table)


def put(x: Tensor, table: Tensor) -> Tensor:
    made = x.clone()
    made[ROWS] = table[ROWS]
    return made


MIXED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mm": lambda x, table: x @ table,
    "linear": lambda x, table: F.linear(x, table),
    "bias": lambda x, table: F.linear(x, x, table[0]),
    "bmm": lambda x, table: torch.bmm(x[None], table[None]),
    "baddbmm": lambda x, table: torch.baddbmm(table, x[None], x[None]),
    "einsum": lambda x, table: torch.einsum("ij,jk->ik", x, table),
    "mv": lambda x, table: torch.mv(x, table[0]),
    "dot": lambda x, table: torch.dot(x[0], table[0]),
    "conv": lambda x, table: F.conv1d(x[None], table[:, :, None]),
    "index_put": put,
    "index_add": lambda x, table: torch.index_add(x, 0, ROWS, table[ROWS]),
    "index_copy": lambda x, table: torch.index_copy(x, 0, ROWS, table[ROWS]),
    "scatter": lambda x, table: torch.scatter(x, 0, ROWS[None], table),
    "masked_scatter": lambda x, table: x.masked_scatter(x > 0, table),
    "lerp": lambda x, table: torch.lerp(x, table, 0.5),
    "layer norm": lambda x, table: F.layer_norm(x + table, (WIDTH,), x[0]),
    "group norm": lambda x, table: F.group_norm((x + table)[None], 2, x[0]),
    "a sum that is wider": lambda x, table: (x + table) @ x,
}
ALIKE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": lambda x, table: x + table,
    "sum in place": lambda x, table: x.clone().add_(table),
    "cat": lambda x, table: torch.cat([x, table]),
    "where": lambda x, table: torch.where(x > 0, x, table),
    "copy": lambda x, table: x + torch.zeros_like(x).copy_(table),
    "layer norm in fp32": lambda x, table: F.layer_norm(x, (WIDTH,), table[0]),
    "all in fp32": lambda x, table: x.float() @ table.float(),
    "cast": lambda x, table: x @ table.to(x.dtype),
    "embedding": lambda x, table: x + F.embedding(ROWS.repeat(2), table),
}
KEPT = zo.OffloadConfig(precision=zo.Precision(buffers={"table": "fp32"}))


def rehearse(make: Callable[[], nn.Module], config: zo.OffloadConfig) -> None:
    with torch.device("meta"):
        model = make()
    dtypes = resolve(model, config)
    give_dtypes(model, dtypes)
    with without_memory(model):
        watch = DtypeWatch(model, dtypes.compute)
        with watch, watch.names():
            model(torch.ones(WIDTH, WIDTH)).float().sum().backward()


def run(make: Callable[[], nn.Module], config: zo.OffloadConfig) -> None:
    model = zo.offload(make(), config)
    try:
        model(torch.ones(WIDTH, WIDTH)).float().sum().backward()
    finally:
        zo.close(model)


@pytest.mark.parametrize("kind", MIXED)
def test_two_dtypes_are_told_before_the_real_forward(kind: str) -> None:
    with pytest.raises((RuntimeError, IndexError)):
        run(lambda: Uses(MIXED[kind]), KEPT)
    with pytest.raises(zo.ConfigError, match=r"the buffer table.*Precision\(buffers=\{'table': 'bf16'\}\)"):
        rehearse(lambda: Uses(MIXED[kind]), KEPT)
    for config in (zo.OffloadConfig(), zo.OffloadConfig(precision="fp32")):
        run(lambda: Uses(MIXED[kind]), config)
        rehearse(lambda: Uses(MIXED[kind]), config)


@pytest.mark.parametrize("kind", ALIKE)
def test_nothing_is_told_where_the_real_forward_runs(kind: str) -> None:
    for config in (KEPT, zo.OffloadConfig()):
        run(lambda: Uses(ALIKE[kind]), config)
        rehearse(lambda: Uses(ALIKE[kind]), config)


class Casts(nn.Module):
    """A block whose code makes fp32 of its input, before a layer that is a module of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Sequential(nn.Linear(WIDTH, WIDTH)), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.inner(x).float())


class Kept(nn.Module):
    _keep_in_fp32_modules_strict = ("scale",)

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.head = nn.Parameter(torch.ones(WIDTH)), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x * self.scale)


def test_functions_that_compare_dtypes_themselves() -> None:
    def make() -> nn.Module:
        return nn.Sequential(Uses(lambda x, table: F.scaled_dot_product_attention(x[None], table[None], x[None])))

    config = zo.OffloadConfig(precision=zo.Precision(buffers={"*.table": "fp32"}))
    with pytest.raises(RuntimeError):
        run(make, config)
    with pytest.raises(zo.ConfigError, match=r"would stop in 0.*query, key.*same dtype.*modules=\{'0"):
        rehearse(make, config)
    rehearse(make, zo.OffloadConfig())


def test_it_says_where_the_dtype_is_from_and_a_way_that_works() -> None:
    with pytest.raises(zo.ConfigError) as told:
        rehearse(Casts, zo.OffloadConfig())
    assert "would stop in head: addmm takes floats of one dtype, and gets bf16 and fp32" in str(told.value)
    assert "fp32 comes from code in the forward of the model; " in str(told.value)
    assert "the parameter head.weight is bf16" in str(told.value)
    assert "Give it one dtype: Precision(modules={'head': 'fp32'})" in str(told.value)
    with pytest.raises(zo.ConfigError, match=r"the parameter scale; .*Precision\(modules=\{'scale': 'bf16'\}\) or"):
        rehearse(Kept, zo.OffloadConfig())
    for make, key, dtype in ((Casts, "head", "fp32"), (Kept, "scale", "bf16"), (Kept, "head", "fp32")):
        config = zo.OffloadConfig(precision=zo.Precision(modules={key: dtype}))
        run(make, config)
        rehearse(make, config)
