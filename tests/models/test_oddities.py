"""Modules and scripts with habits of their own: the same bits as plain ones, or one clear error that says why not."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import zero_offload as zo
from tests.helpers.models import WIDE, Block, TinyLM, build, tokens_of
from tests.helpers.pairwise import in_turn
from tests.helpers.reference import placed, read_masters
from tests.helpers.twins import Script, assert_same, train

Model = partial(TinyLM, WIDE)


def script(model: nn.Module, optimizer: zo.AdamW) -> Iterator[float]:
    yield from train(model, optimizer, range(4))


def step(loss: Tensor, optimizer: zo.AdamW) -> float:
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def noise(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Wide(TinyLM):
    """Three blocks of a class of its own."""

    block: Callable[[int], nn.Module] = Block

    def __init__(self) -> None:
        super().__init__(WIDE, 3, type(self).block)


# Forwards


class DropsLayers(Wide):
    """Every block runs in one of two steps."""

    def run_blocks(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if torch.rand(()) < 0.5:
                x = block(x)
        return x


class ExitsEarly(Wide):
    """How many blocks run depends on the data."""

    def run_blocks(self, x: Tensor) -> Tensor:
        for block in self.blocks[: 1 + int(x.detach().abs().sum() * 1000) % 3]:
            x = block(x)
        return x


class Routed(Wide):
    """One of the blocks per sequence."""

    def run_blocks(self, x: Tensor) -> Tensor:
        chosen = [int(row.detach().abs().sum() * 1000) % 3 for row in x]
        return torch.stack([self.blocks[i](row[None])[0] for i, row in zip(chosen, x, strict=True)])


class CallsItself(Wide):
    """A module that is called while it runs, and computes with its parameters after that."""

    class block(Block):
        def forward(self, x: Tensor, depth: int = 2) -> Tensor:
            y = self(x * 0.5, depth - 1) if depth else x
            return super().forward(y)


class ReturnsAView(Wide):
    """A module returns a part of its parameter, used while other modules take its memory."""

    class Positions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(1000, WIDE) * 0.1)

        def forward(self, length: int) -> dict[str, Tensor]:
            return {"positions": self.weight[:length]}

    def __init__(self) -> None:
        super().__init__()
        self.positions = self.Positions()

    def run_blocks(self, x: Tensor) -> Tensor:
        positions = self.positions(x.shape[1])["positions"]
        return super().run_blocks(x) + positions


class ChangesItsInput(Wide):
    class block(Block):
        def forward(self, x: Tensor) -> Tensor:
            return x.add_(super().forward(x.clone()))


class SavesElsewhere(Wide):
    """Saved tensors pass through hooks of the user's, here torch's own, inside of forward."""

    def run_blocks(self, x: Tensor) -> Tensor:
        with torch.autograd.graph.save_on_cpu():
            return super().run_blocks(x)


class Lists(Wide):
    """Parameters in containers that are never called; some have no dimension, some no element."""

    def __init__(self) -> None:
        super().__init__()
        self.gains = nn.ParameterList([nn.Parameter(torch.tensor(1.0 + i)) for i in range(3)])
        self.table = nn.ParameterDict({"shift": nn.Parameter(torch.zeros(WIDE)), "empty": nn.Parameter(torch.zeros(0))})

    def run_blocks(self, x: Tensor) -> Tensor:
        for block, gain in zip(self.blocks, self.gains, strict=True):
            x = block(x) * gain + self.table["empty"].sum()
        return x + self.table["shift"]


class ListsOfLists(Wide):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.ModuleList([Block(WIDE), Block(WIDE)]) for _ in range(2))

    def run_blocks(self, x: Tensor) -> Tensor:
        for first, second in self.blocks:
            x = second(first(x))
        return x


@dataclass
class State:
    x: Tensor
    extra: Tensor | None = None


class Dataclasses(Wide):
    """Blocks take and return an object, by keyword."""

    class block(Block):
        def forward(self, *, state: State) -> State:  # type: ignore[override]
            return State(super().forward(state.x), extra=state.x.mean())

    def run_blocks(self, x: Tensor) -> Tensor:
        state = State(x)
        for block in self.blocks:
            state = block(state=state)
        return state.x if state.extra is None else state.x + state.extra


class Pair(NamedTuple):
    x: Tensor
    mean: Tensor


class ReturnsContainers(Wide):
    """The results of a block are packed in turn as a tuple, a list, a dict in a list, and a named tuple."""

    class block(Block):
        def forward(self, x: Tensor, kind: int) -> Any:  # type: ignore[override]
            y = super().forward(x)
            packed: list[Any] = [(y, None), [y, y.mean()], [{"hidden": y}], Pair(y, y.mean())]
            return packed[kind]

    def run_blocks(self, x: Tensor) -> Tensor:
        first, second, third = self.blocks
        x, _ = first(x, 0)
        x, mean = second(x, 1)
        (found,) = third(x + mean, 2)
        return first(found["hidden"], 3).x


class ManyParams(Wide):
    """A unit of a hundred parameters, no two of one size, and one of them larger than the others together."""

    class block(nn.Module):
        def __init__(self, dim: int) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.randn(2 * dim, dim) * 0.1)
            self.gains = nn.ParameterList([nn.Parameter(torch.ones(1 + i)) for i in range(100)])

        def forward(self, x: Tensor) -> Tensor:
            gain = torch.stack([each.sum() / each.numel() for each in self.gains]).mean()
            return x + F.gelu(F.linear(x, self.table))[..., : x.shape[-1]] * gain


def weight_normed() -> nn.Module:
    """Weights computed by a forward pre-hook that was there first."""
    model = TinyLM(WIDE)
    for block in model.blocks:
        nn.utils.weight_norm(block.up)
    return model


MAKERS = [DropsLayers, ExitsEarly, Routed, CallsItself, ReturnsAView, ChangesItsInput, SavesElsewhere]
MAKERS += [Lists, ListsOfLists, Dataclasses, ReturnsContainers, ManyParams, weight_normed]


@in_turn(make=MAKERS, fp32_config=["nvme", "cpu"], indirect=["fp32_config"])
def test_what_forward_does(make: Any, fp32_config: zo.OffloadConfig) -> None:
    def seeded(model: nn.Module, optimizer: zo.AdamW) -> Iterator[float]:
        torch.manual_seed(7)
        yield from script(model, optimizer)

    assert_same(seeded, make, fp32_config)


def test_a_view_of_a_parameter_returned_by_the_outermost_module(nvme_config: zo.OffloadConfig) -> None:
    model, plain = zo.offload(build(ReturnsAView), nvme_config), build(ReturnsAView)
    positions = model.positions(4)["positions"]
    model(tokens_of(0))
    assert torch.equal(positions, plain.positions(4)["positions"])


def test_a_normed_weight_of_the_root_itself(nvme_config: zo.OffloadConfig) -> None:
    def steps(model: nn.Module, optimizer: zo.AdamW) -> Iterator[float]:
        for seed in range(3):
            yield step(model(noise(seed, 2, WIDE)).square().mean(), optimizer)

    assert_same(steps, lambda: nn.utils.weight_norm(nn.Linear(WIDE, WIDE)), nvme_config)


# Scripts


def gradient_penalty(model: nn.Module, optimizer: zo.AdamW) -> Iterator[float]:
    """A backward through a backward, whose nodes save parameters."""
    for seed in range(3):
        x = noise(seed, 2, 5, WIDE).requires_grad_()
        out = model.run_blocks(x)
        (grad,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        yield step(grad.square().mean() + out.mean(), optimizer)


def gradients_of_parameters(model: nn.Module, optimizer: zo.AdamW) -> Iterator[float]:
    for seed in range(3):
        grads = torch.autograd.grad(model(tokens_of(seed)), list(model.parameters()))
        yield sum(grad.sum().item() for grad in grads)
        yield from train(model, optimizer, [seed])


def gradients_of_some_parameters(model: nn.Module, optimizer: zo.AdamW) -> Iterator[float]:
    for seed in range(3):
        loss = model(tokens_of(seed))
        loss.backward(inputs=list(model.blocks[1].parameters()), retain_graph=True)
        torch.autograd.backward(loss * 0.5, inputs=list(model.blocks[2].parameters()))
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()


def autocast(model: nn.Module, optimizer: zo.AdamW) -> Iterator[float]:
    for seed in range(3):
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(tokens_of(seed))
        yield step(loss, optimizer)


def autocast_around_everything(model: nn.Module, optimizer: zo.AdamW) -> Iterator[float]:
    with torch.autocast("cpu", torch.bfloat16):
        for seed in range(3):
            yield step(model(tokens_of(seed)), optimizer)


def a_group_added_later(model: nn.Module, optimizer: zo.AdamW) -> Iterator[float]:
    """Until then its gradients add up, since no optimizer drops them."""
    late = zo.AdamW(model.embedding.parameters(), lr=1e-2)
    for seed in range(5):
        if seed == 2:
            late.add_param_group({"params": list(model.blocks.parameters()), "lr": 1e-3})
        yield step(model(tokens_of(seed)), late)


def two_optimizers_in_turns(model: nn.Module, optimizer: zo.AdamW) -> Iterator[float]:
    first = zo.AdamW(model.blocks[0].parameters(), lr=1e-2)
    second = zo.AdamW([*model.blocks[1].parameters(), *model.blocks[2].parameters()], lr=1e-3)
    for seed in range(6):
        loss = model(tokens_of(seed))
        loss.backward()
        (first, second)[seed % 2].step()
        optimizer.zero_grad()
        yield loss.item()


def other_values_by_functional_call(model: nn.Module, optimizer: zo.AdamW) -> Iterator[float]:
    for seed in range(2):
        weight = noise(seed, 4 * WIDE, WIDE).requires_grad_()
        loss = torch.func.functional_call(model, {"blocks.0.up.weight": weight}, (tokens_of(seed),))
        yield step(loss, optimizer)
        yield weight.grad.sum().item()  # type: ignore[union-attr]


def backward_of_a_tensor(model: nn.Module, optimizer: zo.AdamW) -> Iterator[float]:
    """No loss at all: the user has the gradient of the output."""
    for seed in range(3):
        out = model.run_blocks(noise(seed, 2, 5, WIDE))
        out.backward(noise(seed + 10, *out.shape))
        optimizer.step()
        optimizer.zero_grad()
        yield out.sum().item()


def an_empty_group(model: nn.Module, optimizer: zo.AdamW) -> Iterator[float]:
    empty = zo.AdamW([{"params": []}, {"params": list(model.parameters()), "lr": 1e-2}], lr=1e-3)
    yield from train(model, empty, range(3))


def hooks_of_the_user(model: nn.Module, optimizer: zo.AdamW) -> Iterator[float]:
    """All kinds, in the order they are called in, and what they see of parameters."""
    seen: list[float] = []
    for number, block in enumerate(model.blocks):
        weight = block.up.weight
        block.register_forward_pre_hook(lambda m, x, n=number: seen.append(n + x[0].sum().item()))
        block.register_forward_hook(lambda m, x, y, n=number: seen.append(n + 10 + m.up.weight.sum().item()))
        block.register_full_backward_pre_hook(lambda m, g, n=number: seen.append(n + 20 + g[0].sum().item()))
        block.register_full_backward_hook(lambda m, g, h, n=number: seen.append(n + 30 + m.norm.weight.sum().item()))
        weight.register_hook(lambda g, n=number: seen.append(n + 40 + g.sum().item()))
    yield from train(model, optimizer, range(3))
    yield from seen


def inference_first(model: nn.Module, optimizer: zo.AdamW) -> Iterator[float]:
    for seed in range(2):
        with torch.inference_mode():
            yield model(tokens_of(seed + 10)).item()
        yield from train(model, optimizer, [seed])


def saved_on_cpu(model: nn.Module, optimizer: zo.AdamW) -> Iterator[float]:
    for seed in range(3):
        with torch.autograd.graph.save_on_cpu():
            loss = model(tokens_of(seed))
        yield step(loss, optimizer)


SCRIPTS: list[Script] = [
    gradients_of_parameters,
    gradients_of_some_parameters,
    autocast,
    autocast_around_everything,
    a_group_added_later,
    two_optimizers_in_turns,
    other_values_by_functional_call,
    backward_of_a_tensor,
    an_empty_group,
    hooks_of_the_user,
    inference_first,
    saved_on_cpu,
]


@in_turn(steps=SCRIPTS, fp32_config=["nvme", "cpu"], indirect=["fp32_config"])
def test_what_the_script_does(steps: Script, fp32_config: zo.OffloadConfig) -> None:
    assert_same(steps, Model, fp32_config)


class Energy(Wide):
    """The loss has the gradient of an energy in it, taken inside of forward."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens).detach().requires_grad_()
        energy = self.head(self.norm(self.run_blocks(x))).square().mean()
        (force,) = torch.autograd.grad(energy, x, create_graph=True)
        return energy + force.square().sum() * 10


@pytest.mark.parametrize(("steps", "make"), [(gradient_penalty, Model), (script, Energy)], ids=["outside", "inside"])
@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_double_backward(steps: Script, make: Any, tier: str, nvme: Path) -> None:
    # A backward through a backward goes there and back: all three blocks are in use when it turns, one has room.
    config = placed("fp32", (tier, "cpu", tier), nvme, "8MiB") if tier == "nvme" else placed("fp32", ["cpu"] * 3, None)
    assert_same(steps, make, config)


def test_users_hooks_on_saved_tensors_see_all_but_parameters(nvme_config: zo.OffloadConfig) -> None:
    model = zo.offload(build(Model), nvme_config)
    packed: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: packed.append(x) or len(packed) - 1, packed.__getitem__):
        loss = model(tokens_of(0))
    assert any(x.shape == (2, 8, 4 * WIDE) for x in packed) and not any(x.shape == (WIDE, 4 * WIDE) for x in packed)
    loss.backward()


def test_hooks_after_accumulation_see_the_gradient(fp32_config: zo.OffloadConfig) -> None:
    """Those that were there before offload: ours take the gradient after them."""

    def watched() -> nn.Module:
        model = TinyLM(WIDE)
        model.seen = []
        for param in model.parameters():
            param.register_post_accumulate_grad_hook(lambda p: model.seen.append(p.grad.sum().item()))
        return model

    def steps(model: Any, optimizer: zo.AdamW) -> Iterator[float]:
        yield from script(model, optimizer)
        yield from model.seen

    assert_same(steps, watched, fp32_config)


class Clock(Wide):
    """An input that needs all 53 bits."""

    def forward(self, tokens: Tensor, time: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(tokens) * (time - 1e6).float()


def test_with_fp32_inputs_keep_their_dtype(fp32_config: zo.OffloadConfig) -> None:
    def steps(model: nn.Module, optimizer: zo.AdamW) -> Iterator[float]:
        for seed in range(2):
            yield step(model(tokens_of(seed), torch.tensor(1e6 + 0.3, dtype=torch.float64)), optimizer)

    assert_same(steps, Clock, fp32_config)


class ReturnsNothing(Wide):
    def forward(self, *, tokens: Tensor) -> None:  # type: ignore[override]
        self.loss = super().forward(tokens)


def test_a_model_that_returns_nothing(fp32_config: zo.OffloadConfig) -> None:
    def steps(model: nn.Module, optimizer: zo.AdamW) -> Iterator[float]:
        for seed in range(3):
            assert model(tokens=tokens_of(seed)) is None
            yield step(model.loss, optimizer)

    assert_same(steps, ReturnsNothing, fp32_config)


@pytest.mark.parametrize("activations", ["device", "nvme"])
@pytest.mark.parametrize(("what", "backend"), [("blocks", "aot_eager"), ("model", "eager")])
def test_compiled(
    what: str,
    backend: str,
    activations: str,
    nvme_config: zo.OffloadConfig,
    monkeypatch: pytest.MonkeyPatch,
    recwarn: pytest.WarningsRecorder,
) -> None:
    monkeypatch.setattr("zero_offload.runtime.saved_tensors.activations.SMALLEST_BYTES", 1)

    def steps(model: nn.Module, optimizer: zo.AdamW) -> Iterator[float]:
        torch._dynamo.reset()
        for module in model.blocks if what == "blocks" else [model]:
            module.compile(backend=backend)
        yield from train(model, optimizer, range(3))

    assert_same(steps, Model, replace(nvme_config, activations=activations))
    assert not [warning for warning in recwarn if "zero_offload" in str(warning.message)], "torch.compile came to us"


def test_compiled_blocks_are_one_graph_each(nvme_config: zo.OffloadConfig) -> None:
    graphs: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(sum(node.op == "call_function" for node in graph.graph.nodes))
        return graph.forward

    def count(model: nn.Module) -> list[int]:
        torch._dynamo.reset()
        graphs.clear()
        for block in model.blocks:
            block.compile(backend=backend)
        for seed in range(2):
            model(tokens_of(seed))
        return list(graphs)

    plain = count(build(Model))
    assert plain and count(zo.offload(build(Model), nvme_config)) == plain


# Refusals


class Clamps(Wide):
    class block(Block):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.up.weight.clamp_(-0.03, 0.03)
            return super().forward(x)


class Replaces(Wide):
    class block(Block):
        def forward(self, x: Tensor) -> Tensor:
            self.up.weight.data = F.normalize(self.up.weight.data)
            return super().forward(x)


class ClampsData(Wide):
    class block(Block):
        def forward(self, x: Tensor) -> Tensor:
            self.up.weight.data.clamp_(-0.03, 0.03)
            return super().forward(x)


@pytest.mark.parametrize("model", [Clamps, ClampsData])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_parameters_changed_in_forward_raise_where_the_change_would_be_lost(
    model: type[Wide], precision: str, nvme_config: zo.OffloadConfig
) -> None:
    """Because they leave, or because there is a master beside them."""
    config = nvme_config if precision == "fp32" else zo.OffloadConfig(precision=precision)
    with pytest.raises(zo.ZeroOffloadError, match=r"forward has changed blocks\.0\.up\.weight in place"):
        zo.offload(build(model), config)(tokens_of(0))


def test_masters_that_rest_in_place_may_be_changed_in_forward() -> None:
    assert_same(script, Clamps, placed("fp32", ("cpu", "cpu", "cpu"), None, None))


def test_parameters_replaced_in_forward_raise(fp32_config: zo.OffloadConfig) -> None:
    with pytest.raises(zo.ZeroOffloadError, match=r"forward has changed blocks\.0\.up\.weight"):
        zo.offload(build(Replaces), fp32_config)(tokens_of(0))


def test_a_step_inside_of_backward_raises(fp32_config: zo.OffloadConfig) -> None:
    model = build(Model)
    weight = model.blocks[0].up.weight
    weight.register_post_accumulate_grad_hook(lambda p: zo.AdamW([p]).step())
    zo.offload(model, fp32_config)
    with pytest.raises(zo.ZeroOffloadError, match="step inside of backward"):
        model(tokens_of(0)).backward()


def test_a_backward_through_weights_that_a_step_has_changed_raises(fp32_config: zo.OffloadConfig) -> None:
    """As in plain torch: its forward has used the old ones."""
    model = zo.offload(build(TinyLM), fp32_config)
    optimizer = zo.AdamW(model.parameters())
    first, second = model(tokens_of(0)), model(tokens_of(1))
    first.backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        second.backward()
    zo.close(model)


def test_two_parameters_in_one_memory_are_refused(fp32_config: zo.OffloadConfig) -> None:
    model = build(Model)
    model.blocks[1].up.weight.data = model.blocks[0].up.weight.data
    with pytest.raises(zo.ConfigError, match=r"blocks\.0\.up\.weight and blocks\.1\.up\.weight are two parameters in"):
        zo.offload(model, fp32_config)
    for block in model.blocks[:2]:
        block.requires_grad_(False)
    zo.offload(model, fp32_config)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_traced_module_is_refused(fp32_config: zo.OffloadConfig) -> None:
    model = build(Model)
    model.blocks[1] = torch.jit.trace(model.blocks[1], torch.randn(2, 8, WIDE))
    with pytest.raises(zo.ConfigError, match=r"blocks\.1\.up is a TracedModule"):
        zo.offload(model, fp32_config)


def test_a_complex_parameter_is_refused(fp32_config: zo.OffloadConfig) -> None:
    model = build(Model)
    model.phase = nn.Parameter(torch.zeros(3, dtype=torch.complex64))
    with pytest.raises(zo.ConfigError, match="phase is complex64"):
        zo.offload(model, fp32_config)


class TurnsGradientsOn(nn.Module):
    """Its blocks save their own weights, not views of them, in a forward that began without gradients."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = (nn.Conv2d(256, 256, 3, padding=1, bias=False) for _ in range(2))

        def forward(self, x: Tensor) -> Tensor:
            with torch.enable_grad():
                return x + self.second(F.gelu(self.first(x)))

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(self.Block() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("place", ["nvme", "cpu"])
def test_a_forward_that_turns_gradients_on(place: str, nvme: Path) -> None:
    def steps(model: nn.Module, optimizer: zo.AdamW) -> Iterator[float]:
        for seed in range(3):
            x = torch.randn(2, 256, 4, 4, generator=torch.Generator().manual_seed(seed))
            with torch.no_grad():
                out = model(x)
            yield step(out.square().mean(), optimizer)

    assert_same(steps, TurnsGradientsOn, placed("fp32", (place, "cpu", place), nvme, "8MiB"))


@pytest.mark.parametrize("place", ["nvme", "cpu"])
def test_a_state_dict_that_breaks_off_is_over(place: str, nvme: Path) -> None:
    """A weight that is read outside of its module is the trained one, not the copy of then."""

    class Reads(TinyLM):
        def run_blocks(self, x: Tensor) -> Tensor:
            return super().run_blocks(x) + F.linear(x, self.blocks[0].up.weight.detach()[:WIDE])

    def breaks(*_: Any) -> None:
        raise ValueError("in a hook")

    def steps(model: nn.Module, optimizer: zo.AdamW) -> Iterator[float]:
        yield from train(model, optimizer, range(2))
        hook = model.norm.register_state_dict_pre_hook(breaks)
        with pytest.raises(ValueError, match="in a hook"):
            model.state_dict()
        hook.remove()
        yield from train(model, optimizer, range(2, 5))

    assert_same(steps, partial(Reads, WIDE), placed("fp32", (place, "cpu", place), nvme))


def test_a_write_after_a_state_dict_that_broke_off_is_one_between_steps(nvme: Path) -> None:
    model = zo.offload(build(Model), placed("fp32", ("nvme", "cpu", "nvme"), nvme))
    model.norm.register_load_state_dict_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model.load_state_dict(build(Model).state_dict())
    with torch.no_grad():
        model.blocks[0].up.weight.copy_(torch.zeros(4 * WIDE, WIDE))
    masters = read_masters(model)
    assert not masters["blocks.0.up.weight"].any() and masters["blocks.0.down.weight"].any()


def test_forwards_that_two_threads_begin_at_once(nvme: Path) -> None:
    """One of them runs, the other raises; none computes with what the other has let go of."""
    model = zo.offload(build(Model), placed("fp32", ("nvme", "cpu", "nvme"), nvme, "8MiB"))
    expected, found = build(Model)(tokens_of(9)).item(), list[float | str]()

    def evaluate() -> None:
        for _ in range(20):
            try:
                with torch.no_grad():
                    found.append(model(tokens_of(9)).item())
            except zo.ZeroOffloadError as error:
                found.append(str(error))

    threads = [threading.Thread(target=evaluate) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    values = [each for each in found if isinstance(each, float)]
    assert values and set(values) == {expected}
    assert all("runs in another thread" in each for each in found if isinstance(each, str))


def test_a_forward_beside_a_backward_of_another_thread_raises(nvme: Path) -> None:
    errors: list[str] = []

    class Beside(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            def evaluate() -> None:
                try:
                    with torch.no_grad():
                        model(tokens_of(9))
                except zo.ZeroOffloadError as error:
                    errors.append(str(error))

            thread = threading.Thread(target=evaluate)
            thread.start()
            thread.join()
            return grad

    class Watched(TinyLM):
        def run_blocks(self, x: Tensor) -> Tensor:
            for number, block in enumerate(self.blocks):
                x = block(Beside.apply(x) if number == 1 and torch.is_grad_enabled() else x)
            return x

    model = zo.offload(build(partial(Watched, WIDE)), placed("fp32", ("nvme", "cpu", "nvme"), nvme))
    optimizer = zo.AdamW(model.parameters(), lr=1e-2)
    plain = build(Model)
    reference = zo.AdamW(plain.parameters(), lr=1e-2)
    assert list(train(model, optimizer, range(3))) == list(train(plain, reference, range(3)))
    assert len(errors) == 3 and all("a backward of this model runs in another thread" in each for each in errors)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_functions_of_torch_func_where_nothing_leaves(precision: str) -> None:
    dtype = torch.bfloat16 if precision == "bf16" else torch.float32
    make = partial(nn.Sequential, nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))
    torch.manual_seed(0)
    plain = make().to(dtype)
    model = zo.offload(copy.deepcopy(plain).float(), placed(precision, ("cpu",) * 3, None, None))
    x = torch.randn(6, generator=torch.Generator().manual_seed(1)).to(dtype)
    expected = torch.func.jacrev(lambda y: plain(y[None])[0])(x)
    for _ in range(4):  # changes are looked for in some forwards, not in others
        assert torch.equal(torch.func.jacrev(lambda y: model(y[None])[0])(x), expected)


@pytest.mark.parametrize("place", ["nvme", "cpu"])
def test_gradients_that_are_not_there_are_made_zeros(place: str, nvme: Path) -> None:
    def steps(model: nn.Module, optimizer: zo.AdamW) -> Iterator[float]:
        x = torch.randn(3, WIDE, generator=torch.Generator().manual_seed(0))
        params = [model.blocks[0].down.weight, model.norm.weight]
        loss = model.blocks[0](x).square().sum()
        found = torch.autograd.grad(loss, params, allow_unused=True, materialize_grads=True)
        yield from (each.norm().item() for each in found)
        assert found[1].shape == params[1].shape and not found[1].any()

    assert_same(steps, Model, placed("fp32", (place, "cpu", place), nvme))


def test_a_memory_format_changes_nothing_that_is_offloaded(nvme: Path) -> None:
    model = zo.offload(nn.Conv2d(4, 4, 3), placed("fp32", ("nvme", "cpu", "nvme"), nvme))
    model.to(memory_format=torch.channels_last)
    assert model(torch.ones(1, 4, 5, 5)).shape == (1, 4, 3, 3)


def test_a_lazy_module_is_offloaded_after_its_first_forward() -> None:
    model = nn.Sequential(nn.LazyLinear(3))
    with pytest.raises(zo.ConfigError, match=r"0\.weight belongs to a lazy module.*run one forward before zo\.offload"):
        zo.offload(model, zo.OffloadConfig(precision="fp32"))
    expected = model(torch.ones(2, 4))
    zo.offload(model, zo.OffloadConfig(precision="fp32"))
    assert torch.equal(model(torch.ones(2, 4)), expected)
    zo.close(model)
