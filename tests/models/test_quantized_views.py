"""Quantized weights leave between forward and backward, whatever their layers keep of them."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import zero_offload as zo
from tests.helpers.pairwise import in_turn
from tests.helpers.reference import placed
from zero_offload.model.api import runtime_of
from zero_offload.runtime.units.unit import UnitState
from zero_offload.standins.away import Away
from zero_offload.standins.derived import Derived, Step
from zero_offload.standins.owners import AtRest

HIDDEN = 1024
"""A weight of int8 has 1 MiB, half a frame."""


def _quantized(outputs: int, inputs: int) -> tuple[Tensor, Tensor]:
    weight = torch.randn(outputs, inputs) * 0.03
    scale = weight.abs().amax(1, keepdim=True) / 127
    return (weight / scale).round().to(torch.int8), scale


class Dequantized(nn.Module):
    """Autograd saves the values that the layer has made."""

    def __init__(self, outputs: int, inputs: int, dtype: torch.dtype = torch.int8) -> None:
        super().__init__()
        values, scale = _quantized(outputs, inputs)
        self.weight = nn.Parameter(values.to(dtype), requires_grad=False)
        self.scale = nn.Parameter(scale, requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype) * self.scale)


class _KeepsView(torch.autograd.Function):
    """As libraries do: a view and the scale are kept where no hook sees them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, scale: Tensor) -> Tensor:
        ctx.kept = weight.t().view(torch.uint8), scale
        return F.linear(x, weight.to(x.dtype).mul_(scale))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        turned, scale = ctx.kept
        return grads[0] @ turned.view(torch.int8).t().to(grads[0].dtype).mul_(scale), None, None


class Kept(Dequantized):
    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = _KeepsView.apply(x, self.weight, self.scale)
        return found


class Packed(nn.Module):
    """Four bits in integers, in buffers, as layers of GPTQ have them."""

    def __init__(self, outputs: int, inputs: int) -> None:
        super().__init__()
        values = torch.randint(0, 16, (inputs // 8, 8, outputs), dtype=torch.int32)
        shifts = torch.arange(0, 32, 4, dtype=torch.int32)
        self.register_buffer("qweight", (values << shifts[:, None]).sum(1, dtype=torch.int32))
        self.register_buffer("scales", torch.rand(inputs // 128, outputs) * 0.01)
        self.register_buffer("g_idx", torch.arange(inputs, dtype=torch.int32) // 128)
        self.register_buffer("shifts", shifts, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        spread = self.qweight.unsqueeze(1).expand(-1, 8, -1)
        values = torch.bitwise_right_shift(spread, self.shifts[None, :, None]).to(torch.int16).bitwise_and(15)
        weight = self.scales[self.g_idx.long()] * (values.reshape(-1, self.scales.shape[1]) - 8)
        return x @ weight.to(x.dtype)


class Block(nn.Module):
    def __init__(self, layer: Callable[[int, int], nn.Module]) -> None:
        super().__init__()
        self.base = nn.ModuleList(layer(HIDDEN, HIDDEN) for _ in range(2))
        self.down, self.up = nn.Linear(HIDDEN, 4, bias=False), nn.Linear(4, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.base:
            x = x + F.gelu(layer(x))
        return x + self.up(self.down(x))


class Model(nn.Module):
    def __init__(
        self,
        layer: Callable[[int, int], nn.Module],
        reentrant: bool | None = None,
        block: Callable[[Callable[[int, int], nn.Module]], nn.Module] = Block,
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(block(layer) for _ in range(4))
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        return x


LAYERS: dict[str, Callable[[int, int], nn.Module]] = {
    "int8": Dequantized,
    "fp8": functools.partial(Dequantized, dtype=torch.float8_e4m3fn),
    "kept view": Kept,
    "packed": Packed,
}


def offloaded(model: Model, nvme: Path, device_memory: str = "8MiB") -> Model:
    zo.offload(model, placed("fp32", ("nvme", "cpu", "cpu"), nvme, device_memory))
    return model


def grads_of(model: Model) -> list[Tensor]:
    if runtime_of(model) is None:
        return [param.grad.clone() for param in model.parameters() if param.grad is not None]
    with zo.gathered(model, kind="grads") as grads:
        return [grads[name].clone() for name, param in model.named_parameters() if param.requires_grad]


def train(model: Model, steps: int = 2) -> list[Tensor]:
    """Losses, gradients of the last step, and adapters."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = zo.AdamW(trained, lr=1e-2)
    found: list[Tensor] = []
    grads: list[Tensor] = []
    torch.manual_seed(1)
    for _ in range(steps):
        loss = model(torch.randn(2, 8, HIDDEN, requires_grad=bool(model.reentrant))).square().mean()
        loss.backward()
        grads = grads_of(model)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    assert len(grads) == len(trained)
    return [*found, *grads] + [
        value.clone() for name, value in model.state_dict().items() if ".up." in name or ".down." in name
    ]


@functools.cache
def plain(
    layer: Callable[[int, int], nn.Module], block: Callable[[Callable[[int, int], nn.Module]], nn.Module] = Block
) -> list[Tensor]:
    """Of the model in memory, without checkpointing, which changes no bit."""
    return train(Model(layer, block=block))


def saved_of(loss: Tensor) -> list[Any]:
    """The tensors that the nodes of a graph have saved, as hooks have packed them."""
    found, nodes, left = [], set(), [loss.grad_fn]
    while left:
        node = left.pop()
        if node is None or node in nodes:
            continue
        nodes.add(node)
        names = [name for name in dir(node) if name.startswith("_raw_saved_")]
        raws = [raw for name in names for raw in tree_leaves(getattr(node, name)) if raw is not None]
        found += [raw.data for raw in raws]
        left += [following for following, _ in node.next_functions]
    return found


@pytest.mark.parametrize("reentrant", [None, False, True], ids=["none", "plain", "reentrant"])
@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS.keys())
def test_training_is_exact(layer: Callable[[int, int], nn.Module], reentrant: bool | None, nvme: Path) -> None:
    found = train(offloaded(Model(layer, reentrant), nvme))
    assert all(torch.equal(*pair) for pair in zip(plain(layer), found, strict=True))


@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS.keys())
def test_units_leave_before_backward(layer: Callable[[int, int], nn.Module], nvme: Path) -> None:
    model = offloaded(Model(layer), nvme)
    for _ in range(2):
        loss = model(torch.randn(2, 8, HIDDEN)).square().mean()
        owner = runtime_of(model)
        assert owner is not None
        quantized = [
            unit for unit in owner.units if any(p.dtype.itemsize != 4 or not p.requires_grad for p in unit.params)
        ]
        assert not any(unit.lent for unit in quantized)
        assert sum(unit.state is UnitState.AWAY for unit in quantized) >= 1
        loss.backward()


@pytest.mark.parametrize("layer", [LAYERS["int8"], LAYERS["fp8"], LAYERS["packed"]], ids=["int8", "fp8", "packed"])
def test_values_that_a_layer_makes_are_not_saved(layer: Callable[[int, int], nn.Module], nvme: Path) -> None:
    model = offloaded(Model(layer), nvme)
    saved = saved_of(model(torch.randn(2, 8, HIDDEN)).square().mean())
    assert sum(isinstance(each, Step) for each in saved) == 6  # the first block's input has no gradient
    kept = [each.kept for each in saved if isinstance(getattr(each, "kept", None), Tensor) and each.unit is None]
    assert not any(tensor.numel() >= HIDDEN * HIDDEN for tensor in kept)


@in_turn(name=list(LAYERS), what=["model", "blocks"], backend=["eager", "aot_eager"])
def test_a_compiled_model_trains_exactly(
    name: str, what: str, backend: str, nvme: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The compiler leaves operations on quantized weights alone, and does not try our code again and again."""
    torch._dynamo.reset()
    model = offloaded(Model(LAYERS[name]), nvme)
    with caplog.at_level(logging.WARNING, logger="torch._dynamo"):
        for module in [model] if what == "model" else model.blocks:
            module.compile(backend=backend)
        found = train(model)
    assert all(torch.equal(*pair) for pair in zip(plain(LAYERS[name]), found, strict=True))
    assert not [record for record in caplog.records if "recompile" in record.getMessage()]


class EndsQuantized(nn.Module):
    """Backward begins with the quantized weight: before anything asks for what the block has saved."""

    def __init__(self, layer: Callable[[int, int], nn.Module]) -> None:
        super().__init__()
        self.base = nn.ModuleList(layer(HIDDEN, HIDDEN) for _ in range(2))
        self.down, self.up = nn.Linear(HIDDEN, 4, bias=False), nn.Linear(4, HIDDEN, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        first, last = self.base
        found: Tensor = last(F.gelu(first(x + self.up(self.down(x)))))
        return found


@pytest.mark.parametrize("checkpointing", ["none", "plain", "reentrant", "zo"])
@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS.keys())
def test_a_backward_holds_one_block(layer: Callable[[int, int], nn.Module], checkpointing: str, nvme: Path) -> None:
    def make() -> Model:
        model = Model(layer, {"plain": False, "reentrant": True}.get(checkpointing), EndsQuantized)
        if checkpointing == "zo":
            zo.checkpoint(model.blocks)
        return model

    model = offloaded(make(), nvme, "8MiB")
    owner = runtime_of(model)
    assert owner is not None
    in_use: list[int] = []
    for block in model.blocks:
        block.down.weight.register_hook(lambda grad: in_use.append(sum(unit.backward_uses > 0 for unit in owner.units)))
    found = train(model)
    zo.close(model)
    assert len(in_use) == 8 and max(in_use) <= 4, in_use  # of a block, and of the one before: weights and adapters
    assert all(torch.equal(*pair) for pair in zip(plain(layer, EndsQuantized), found, strict=True))


def _values(layer: Dequantized) -> Tensor:
    return layer.weight.float() * layer.scale


class Probed(Dequantized):
    """Runs a function in its forward."""

    probe: Callable[[Dequantized], Any] = staticmethod(lambda layer: None)
    results: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        Probed.results.append(Probed.probe(self))
        return super().forward(x)


def probe(nvme: Path, function: Callable[[Dequantized], Any]) -> Any:
    model = offloaded(Model(Probed), nvme)
    Probed.probe, Probed.results = staticmethod(function), []
    try:
        with torch.enable_grad():
            model(torch.randn(2, 8, HIDDEN))
        return Probed.results[-1]
    finally:
        Probed.probe, Probed.results = staticmethod(lambda layer: None), []


def test_views_in_forward_have_no_memory(nvme: Path) -> None:
    views = probe(
        nvme, lambda layer: (layer.weight.t(), layer.weight[3:5], layer.weight.data, layer.weight.view(-1, 1))
    )
    assert all(isinstance(view, Away) for view in views)
    assert [tuple(view.shape) for view in views] == [(1024, 1024), (2, 1024), (1024, 1024), (1024 * 1024, 1)]
    assert isinstance(probe(nvme, lambda layer: layer.weight), AtRest)


def test_a_view_of_a_view_is_the_right_part(nvme: Path) -> None:
    def both(layer: Dequantized) -> tuple[Tensor, Tensor]:
        with torch.no_grad():
            view = layer.weight.t()[5:9, ::2].view(torch.uint8)[1:]
            return view + 0, layer.weight.clone().t()[5:9, ::2].view(torch.uint8)[1:]

    assert torch.equal(*probe(nvme, both))


def test_what_draws_random_numbers_or_is_changed_is_saved_itself(nvme: Path) -> None:
    def steps(layer: Dequantized) -> list[bool]:
        made = _values(layer)
        changed = _values(layer).mul_(2)
        written = torch.empty_like(made)
        written.copy_(made)
        return [
            made.step is not None and made.is_known,
            type(changed) is Derived and changed.is_known,
            type(written) is Derived and written.is_known,
            type(written.t() + 0) is Derived,
            type(made.t()[2:].add(1)) is Derived,
            type(F.dropout(made)) is Derived,
            type(torch.rand_like(made)) is Derived,
            type(made + torch.randn(HIDDEN, HIDDEN)) is Derived,
            type(made[:, :2] @ torch.randn(2, 2)) is Derived,
        ]

    assert probe(nvme, steps) == [True, False, False, False, True, False, False, False, False]


def test_a_table_that_is_changed_later_counts_as_it_was(nvme: Path) -> None:
    class Shifted(Dequantized):
        def forward(self, x: Tensor) -> Tensor:
            shift = torch.ones(1)
            found = F.linear(x, self.weight.to(x.dtype) * self.scale * shift)
            shift.zero_()
            return found

    expected, found = train(Model(Shifted)), train(offloaded(Model(Shifted), nvme))
    assert all(torch.equal(*pair) for pair in zip(expected, found, strict=True))


class Signed(Dequantized):
    """A parameter that the model does not have takes part, and changes before its product is used."""

    signs = nn.Parameter(torch.ones(1, HIDDEN), requires_grad=False)
    changes = False

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.to(x.dtype) * self.scale * Signed.signs
        if Signed.changes:
            Signed.signs.neg_()
        return F.linear(x, weight)


def test_a_parameter_that_is_changed_later_counts_as_it_was(nvme: Path) -> None:
    def run(model: Model) -> list[Tensor]:
        found = train(model, 4)
        Signed.changes = True  # in a forward that compares nothing
        try:
            return found + train(model, 1)
        finally:
            Signed.changes = False

    expected, found = run(Model(Signed)), run(offloaded(Model(Signed), nvme))
    assert all(torch.equal(*pair) for pair in zip(expected, found, strict=True))


def test_a_parameter_that_is_changed_before_backward_is_refused(nvme: Path) -> None:
    loss = offloaded(Model(Signed), nvme)(torch.randn(2, 8, HIDDEN)).square().mean()
    Signed.signs.neg_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    Signed.signs.neg_()


def test_a_copy_holds_no_weight(nvme: Path) -> None:
    kept: list[Tensor] = []
    model = offloaded(Model(Probed), nvme)
    Probed.probe = staticmethod(lambda layer: kept.append(layer.weight.clone()) or kept.append(_values(layer).clone()))
    try:
        model(torch.randn(2, 8, HIDDEN)).square().mean().backward()
    finally:
        Probed.probe = staticmethod(lambda layer: None)
    owner = runtime_of(model)
    assert owner is not None
    assert len(kept) == 16 and not any(unit.lent for unit in owner.units)


def test_outputs_and_copies_are_plain(nvme: Path) -> None:
    class Gives(Dequantized):
        def forward(self, x: Tensor) -> Tensor:
            return self.weight.to(x.dtype) * self.scale

    model = zo.offload(
        nn.ModuleList([Gives(HIDDEN, HIDDEN), nn.Linear(HIDDEN, 4)]), placed("fp32", ("nvme", "cpu", "cpu"), nvme)
    )
    assert type(model[0](torch.ones(1))) is Tensor
    zo.close(model)
    found = probe(
        nvme, lambda layer: (_values(layer).numpy()[0, 0], _values(layer).tolist()[0][0], repr(_values(layer)))
    )
    assert found[0] == found[1] and "tensor(" in found[2]


def test_double_backward(nvme: Path) -> None:
    def penalty(model: Model) -> list[Tensor]:
        x = torch.linspace(-1, 1, 2 * HIDDEN).view(2, HIDDEN).requires_grad_()
        (grad,) = torch.autograd.grad(model(x).square().mean(), x, create_graph=True)
        (second,) = torch.autograd.grad(grad.square().sum(), x)
        return [grad.detach(), second]

    expected, found = penalty(Model(Dequantized)), penalty(offloaded(Model(Dequantized), nvme))
    assert all(torch.equal(*pair) for pair in zip(expected, found, strict=True))


def test_autocast(nvme: Path) -> None:
    def run(model: Model) -> list[Tensor]:
        with torch.autocast("cpu", torch.bfloat16):
            return train(model)

    assert all(
        torch.equal(*pair)
        for pair in zip(run(Model(Dequantized)), run(offloaded(Model(Dequantized), nvme)), strict=True)
    )


def test_a_change_in_forward_is_refused(nvme: Path) -> None:
    with pytest.raises(zo.ZeroOffloadError, match="in place"):
        probe(nvme, lambda layer: layer.weight.zero_())


def test_a_view_that_may_be_of_two_parameters_is_of_the_right_one(nvme: Path) -> None:
    """They lie in one buffer."""

    class Two(Dequantized):
        def __init__(self, outputs: int, inputs: int) -> None:
            super().__init__(outputs, inputs)
            self.other = nn.Parameter(_quantized(outputs, inputs)[0], requires_grad=False)

    def both(layer: Dequantized) -> list[bool]:
        weight, other = layer.weight, layer.other
        assert isinstance(other, nn.Parameter)
        views = (*torch.broadcast_tensors(weight, other), weight.view_as(other), other.expand_as(weight))
        with torch.no_grad():
            values = [param.clone() for param in (weight, other, weight, other)]
            return [
                isinstance(view, Away) and torch.equal(view + 0, own) for view, own in zip(views, values, strict=True)
            ]

    class Asks(Two):
        def forward(self, x: Tensor) -> Tensor:
            Probed.results.append(both(self))
            return super().forward(x)

    Probed.results = []
    model = offloaded(Model(Asks), nvme)
    model(torch.randn(2, 8, HIDDEN))
    assert Probed.results and all(all(each) for each in Probed.results)
