"""The update by torch's operations returns the bits of the native kernels, and no operation waits for a device."""

from __future__ import annotations

import collections
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers.device_formats import (
    BF16,
    FP16,
    FP32,
    Case,
    Make,
    cases,
    copies,
    different,
    each_tensor,
    named,
    tame,
    update_on_host,
    wild,
)
from tests.helpers.device_updates import SEGMENT
from tests.helpers.pairwise import in_pairs, in_turn
from zero_offload.base.errors import ConfigError
from zero_offload.base.types import StateFormat
from zero_offload.hardware.abi import STATE_BLOCK, Rule
from zero_offload.hardware.kernels import torch_update, update
from zero_offload.hardware.kernels.arguments import Segment, UpdateTensors

SIZES = [0, 1, 7, 255, 256, 257, 1000, 3001]
EXTREME = replace(SEGMENT, lr=1e30, beta1=0.0, eps=0.0, weight_decay=0.0, grad_scale=1e30, step=1)
every_rule = pytest.mark.parametrize("rule", Rule, ids=lambda rule: rule.name)
every_format = pytest.mark.parametrize("format", StateFormat, ids=lambda format: format.name)
both_makes = pytest.mark.parametrize("make", [tame, wild])


def grain(format: StateFormat) -> int:
    return STATE_BLOCK if format is StateFormat.COMPACT else 1


def update_both(rule: Rule, tensors: UpdateTensors, segment: Segment) -> UpdateTensors:
    """Returns what the native kernels make of them; `tensors` are updated by torch's operations."""
    expected = copies(tensors)
    update_on_host(rule, expected, segment)
    torch_update.update_on_device(rule, tensors, segment)
    return expected


@in_pairs(rule=list(Rule), format=list(StateFormat), make=[tame, wild])
def test_the_bits_of_the_native_kernels(rule: Rule, format: StateFormat, make: Make) -> None:
    for case in cases(rule, format):
        for numel in SIZES:
            for segment in (SEGMENT, EXTREME) if numel > 1000 else (SEGMENT,):
                tensors = make(case, numel)
                expected = update_both(rule, tensors, replace(segment, end=numel))
                assert different(tensors, expected) == [], (case, numel, segment)


@every_format
@both_makes
@pytest.mark.parametrize("rule", [Rule.ADAMW_AMSGRAD, Rule.ADAGRAD, Rule.SGD], ids=lambda rule: rule.name)
def test_a_segment_inside_of_an_array(
    rule: Rule, format: StateFormat, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In several blocks, the last of them shorter."""
    monkeypatch.setattr(torch_update, "BLOCK", 2 * STATE_BLOCK)
    segment = replace(SEGMENT, begin=grain(format) * 3, end=2311)
    for case in cases(rule, format):
        tensors = make(case, 3001)
        before = copies(tensors)
        expected = update_both(rule, tensors, segment)
        assert different(tensors, expected) == [], case
        for (name, now), then in zip(named(tensors).items(), named(before).values(), strict=True):
            per = STATE_BLOCK if name.startswith("scales") else 1
            first, last = segment.begin // per, -(-segment.end // per)
            assert torch.equal(bits(now[:first]), bits(then[:first])), (case, name)
            assert torch.equal(bits(now[last:]), bits(then[last:])), (case, name)
            changes = name != "grad" and not (make is wild and name.startswith("scales"))
            assert not changes or not torch.equal(bits(now), bits(then)), (case, name)


def bits(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(torch.uint8)


@pytest.mark.parametrize("block", [STATE_BLOCK, 1 << 20])
@pytest.mark.parametrize("turn", [1, 5, 1 << 20])
@pytest.mark.parametrize("format", [StateFormat.BF16, StateFormat.COMPACT], ids=lambda format: format.name)
def test_random_words_have_another_key_at_each_turn(
    format: StateFormat, turn: int, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The numbers of elements in a section pass a multiple of 2^32 in the middle of a segment."""
    monkeypatch.setattr(torch_update, "BLOCK", block)
    for value in (FP32, BF16, FP16):
        case = Case(Rule.ADAMW_AMSGRAD, value, BF16, format)
        segment = replace(SEGMENT, begin=STATE_BLOCK, end=2999)
        origin = (turn << 32) - 5 * STATE_BLOCK - (7 if format is StateFormat.BF16 else 0)
        tensors = replace(tame(case, 3001), origin=origin)
        first = replace(copies(tensors), origin=0)
        expected = update_both(case.rule, tensors, segment)
        assert different(tensors, expected) == [], case
        torch_update.update_on_device(case.rule, first, segment)
        assert different(tensors, first) != [], case


@every_rule
@every_format
def test_several_steps(rule: Rule, format: StateFormat) -> None:
    for value in (FP32, BF16, FP16):
        tensors = tame(Case(rule, value, BF16, format), 1000)
        expected = copies(tensors)
        for step in range(1, 6):
            draw = torch.Generator().manual_seed(step)
            for each in (tensors, expected):
                each.grad.copy_(torch.randn(1000, generator=draw.manual_seed(step)))
            segment = replace(SEGMENT, end=1000, step=step)
            update_on_host(rule, expected, segment)
            torch_update.update_on_device(rule, tensors, segment)
            assert different(tensors, expected) == [], (value, step)


@every_format
def test_parameters_of_any_shape(format: StateFormat) -> None:
    """The values of those that require a gradient, too."""
    for value in (FP32, BF16, FP16):
        tensors = tame(Case(Rule.ADAMW, value, FP32, format), 35 * STATE_BLOCK)
        expected = copies(tensors)
        shaped = each_tensor(tensors, lambda tensor: tensor.view(5, -1, 7))
        shaped = replace(shaped, value=nn.Parameter(shaped.value))
        segment = replace(SEGMENT, end=35 * STATE_BLOCK)
        update_on_host(Rule.ADAMW, expected, segment)
        update.update_on_device(Rule.ADAMW, shaped, segment)  # no Triton for a CPU
        assert different(shaped, expected) == [], value
        assert shaped.value.is_leaf and shaped.value.requires_grad


Change = Callable[[UpdateTensors], dict[str, Any]]
WRONG_TENSORS: dict[str, Change] = {
    "value": lambda t: {"value": t.value.double()},
    "gradient of another size": lambda t: {"grad": t.grad[1:]},
    "gradient that is not contiguous": lambda t: {"grad": t.grad.repeat(2)[::2]},
    "gradient elsewhere": lambda t: {"grad": t.grad.to("meta")},
    "gradient of integers": lambda t: {"grad": t.grad.to(torch.int32)},
    "no residual": lambda t: {"residual": None},
    "residual of 16 bits": lambda t: {"residual": torch.zeros(1000, dtype=torch.int16)},
    "a master too many": lambda t: {"master": t.value.float()},
    "a state too few": lambda t: {"states": t.states[:1]},
    "states in fp32": lambda t: {"states": tuple(state.float() for state in t.states)},
    "unsigned codes for signed ones": lambda t: {"states": (t.states[1], t.states[1])},
    "no scales": lambda t: {"scales": ()},
    "scales of another size": lambda t: {"scales": tuple(scale[1:] for scale in t.scales)},
    "another format": lambda t: {"state_format": StateFormat.BF16},
    "an origin inside of a block": lambda t: {"origin": 128},
    "the value as its own gradient": lambda t: {"grad": t.value},
    "one memory for both scales": lambda t: {"scales": (t.scales[0], t.scales[0])},
    "a state that begins in another": lambda t: {"states": _shifted(t.states)},
}


def _shifted(states: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Both in one piece of memory, in which the last element of one is the first of the other."""
    first, second = states
    memory = torch.cat([first, torch.zeros(999, dtype=first.dtype)])
    return memory[:1000], memory[999:].view(second.dtype)


WRONG_SEGMENTS: dict[str, dict[str, Any]] = {
    "begins inside of a block": {"begin": 128},
    "begins before": {"begin": -STATE_BLOCK},
    "ends behind": {"end": 1001},
    "ends before it begins": {"begin": 512, "end": 256},
    "step 0": {"step": 0},
}


@pytest.mark.parametrize("change", WRONG_TENSORS.values(), ids=WRONG_TENSORS.keys())
def test_tensors_that_do_not_fit(change: Change) -> None:
    tensors = tame(Case(Rule.ADAMW, BF16, FP32, StateFormat.COMPACT), 1000)
    refuse(tensors, replace(tensors, **change(tensors)), replace(SEGMENT, end=1000))


@pytest.mark.parametrize("change", WRONG_SEGMENTS.values(), ids=WRONG_SEGMENTS.keys())
def test_segments_that_do_not_fit(change: dict[str, Any]) -> None:
    tensors = tame(Case(Rule.ADAMW, BF16, FP32, StateFormat.COMPACT), 1000)
    refuse(tensors, tensors, replace(replace(SEGMENT, end=1000), **change))


def refuse(tensors: UpdateTensors, wrong: UpdateTensors, segment: Segment) -> None:
    before = copies(tensors)
    with pytest.raises(ConfigError):
        torch_update.update_on_device(Rule.ADAMW, wrong, segment)
    assert different(tensors, before) == []


EXACT = {"add", "sub", "rsub", "mul", "div", "abs", "full"}
"""Operations that round once on every device, or not at all."""
ROOTS = {"sqrt"}
CONVERSIONS = {"_to_copy", "copy_"}
INTEGERS = {"arange", "bitwise_and", "bitwise_or", "bitwise_xor", "__lshift__", "__rshift__", "amax"}
COMPARISONS = {"eq", "ne", "gt", "ge", "lt", "where"}
PLACES = {"view", "slice", "detach", "unsqueeze", "expand", "clone", "_unsafe_view", "constant_pad_nd"}
KNOWN = EXACT | ROOTS | CONVERSIONS | INTEGERS | COMPARISONS | PLACES


class Watched(TorchDispatchMode):
    """Notes each operation. Refuses one which could wait for the device, round twice, or bring a number there."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: collections.Counter[str] = collections.Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        found = func(*args, **(kwargs or {}))
        assert name in KNOWN, f"{func} is not known to round once and to wait for nothing"
        for each in (*args, *(kwargs or {}).values(), found):
            assert not isinstance(each, Tensor) or each.is_meta, f"{func} has a tensor of the host"
        if name == "div":
            assert all(isinstance(each, Tensor) for each in args), "a GPU multiplies with the reciprocal of a number"
        if name == "add":
            assert not kwargs or not found.is_floating_point(), "a factor is one rounding more"
        if name in CONVERSIONS and args[-1].dtype != found.dtype:
            assert found.dtype not in (BF16, FP16), "which NaN comes out of a rounding depends on the device"
        if name in ROOTS:
            assert args[0].dtype is torch.float64
        if name in INTEGERS and isinstance(found, Tensor):
            assert found.dtype in (torch.int64, torch.bool)
        self.counts[name] += 1
        return found


@in_turn(rule=list(Rule), format=list(StateFormat))
def test_no_operation_waits_for_the_device(rule: Rule, format: StateFormat) -> None:
    """On tensors of no memory, which have no numbers to look at."""
    for case in cases(rule, format):
        tensors = copies(tame(case, 1000), "meta")
        with Watched() as watched:
            torch_update.update_on_device(rule, tensors, replace(SEGMENT, end=1000))
        assert watched.counts["copy_"] >= 1, case


def test_what_is_between_two_operations_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """No array has more elements than a block, but views of what is updated."""
    monkeypatch.setattr(torch_update, "BLOCK", STATE_BLOCK)
    tensors = copies(tame(Case(Rule.ADAMW, BF16, BF16, StateFormat.COMPACT), 3001), "meta")
    largest = 0

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            found = func(*args, **(kwargs or {}))
            if func.overloadpacket.__name__ not in ("view", "slice", "copy_"):
                largest = max(largest, found.numel())
            return found

    with Sizes():
        torch_update.update_on_device(Rule.ADAMW, tensors, replace(SEGMENT, end=3001))
    assert largest == STATE_BLOCK
