"""The update on a GPU without one: run by Triton's interpreter on CPU tensors.

The interpreter of Triton 3.9 rounds `fma` once, so its bits are those of the native kernels. Others may round twice.
Then numbers of ordinary size are compared, within some units of their last place. States in other formats, where such a
unit may be a whole code, are not. tests/gpu has the rest.
"""

from __future__ import annotations

import itertools
import sys
import types
import warnings
from collections.abc import Iterator
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import zero_offload as zo
from tests.helpers.device_updates import (
    FLOATS,
    GRADS,
    MODULE,
    SEGMENT,
    VALUES,
    Arrays,
    Kept,
    copies,
    import_triton_update,
    same_bits,
    scales_of,
    tame,
    update_by,
    update_on_host,
    wild,
)
from zero_offload.base.errors import ConfigError
from zero_offload.base.types import StateFormat
from zero_offload.hardware.abi import STATE_BLOCK, Rule
from zero_offload.hardware.kernels import choice
from zero_offload.hardware.kernels.fallback import torch_words as words
from zero_offload.hardware.kernels.fallback.codec import first_bit, make_codec, make_codes, random_key
from zero_offload.hardware.kernels.rules import STATES

SIZES = [0, 1, 7, 257, 1000, 1024, 3001]
codec, signed = make_codec(words), make_codes(words, signed=True)
DTYPES = list(itertools.product(FLOATS, GRADS))
"""Of value and gradient."""
every_rule = pytest.mark.parametrize("rule", Rule, ids=lambda rule: rule.name)
every_format = pytest.mark.parametrize("format", StateFormat, ids=lambda format: format.name)


@pytest.fixture(scope="module")
def triton_update() -> Iterator[ModuleType]:
    """In the interpreter."""
    with pytest.MonkeyPatch.context() as patch:
        yield import_triton_update(patch, "1")


@pytest.fixture(scope="module")
def is_fused(triton_update: ModuleType) -> bool:
    """Whether the interpreter's fma rounds once: (1 + x)^2 - (1 + 2x) is x^2 then, else 0."""
    x = 2.0**-12
    arrays = {name: torch.full((1,), 1 + x) for name in ("value", "momentum_buffer")}
    arrays["grad"] = torch.full((1,), -1 - 2 * x)
    segment = replace(SEGMENT, end=1, beta1=1 + x, beta2=0.0, weight_decay=0.0, grad_scale=1.0)
    update_by(triton_update, Rule.SGD_MOMENTUM, arrays, segment)
    assert arrays["momentum_buffer"].item() in (0.0, x * x)
    return arrays["momentum_buffer"].item() != 0


def check(actual: Arrays, expected: Arrays, is_fused: bool) -> None:
    if is_fused:
        assert same_bits(actual, expected) == []
        return
    actual, expected = ({name: each for name, each in of.items() if name != "residual"} for of in (actual, expected))
    for name, each in expected.items():
        rtol = 2**-7 if each.dtype is torch.bfloat16 else 1e-5
        torch.testing.assert_close(actual[name], each, rtol=rtol, atol=1e-6)


@pytest.fixture
def fused(is_fused: bool) -> None:
    """Skips where bits cannot be compared."""
    if not is_fused:
        pytest.skip("this Triton's interpreter rounds an fma twice")


@every_rule
def test_every_dtype_and_size(triton_update: ModuleType, is_fused: bool, rule: Rule) -> None:
    sizes = itertools.cycle(SIZES)
    for (value_dtype, grad_dtype), _ in itertools.product(DTYPES, range(4)):
        numel = next(sizes)
        expected = tame(rule, numel, value_dtype, grad_dtype)
        actual, before = copies(expected), copies(expected)
        segment = replace(SEGMENT, end=numel)
        update_on_host(rule, expected, segment)
        update_by(triton_update, rule, actual, segment)
        check(actual, expected, is_fused)
        assert numel < 1000 or set(same_bits(actual, before)) >= {"value", *STATES[rule]}


@pytest.mark.parametrize("format", [StateFormat.BF16, StateFormat.COMPACT], ids=lambda format: format.name)
@every_rule
def test_states_in_other_formats(triton_update: ModuleType, fused: None, format: StateFormat, rule: Rule) -> None:
    """Step after step, each with words of its own."""
    kept, sizes = Kept(format), itertools.cycle(SIZES)
    for value_dtype, grad_dtype in DTYPES:
        numel = next(sizes)
        expected = tame(rule, numel, value_dtype, grad_dtype, format)
        actual, before = copies(expected), copies(expected)
        for step in (1, 2):
            segment = replace(SEGMENT, end=numel, step=step)
            update_on_host(rule, expected, segment, kept)
            update_by(triton_update, rule, actual, segment, kept)
        assert same_bits(actual, expected) == [], (value_dtype, grad_dtype, numel)
        assert numel < 1000 or set(same_bits(actual, before)) >= expected.keys() - {"grad"}


@pytest.mark.parametrize("grad_scale", [0.37, -1e39], ids=["small", "infinite"])
@every_format
@every_rule
def test_any_numbers(
    triton_update: ModuleType, fused: None, rule: Rule, format: StateFormat, grad_scale: float
) -> None:
    """NaNs come out as one, infinities and subnormal numbers as on a CPU."""
    kept = Kept(format)
    for value_dtype, grad_dtype in DTYPES[::2]:
        expected = wild(rule, 1000, value_dtype, grad_dtype, format)
        actual = copies(expected)
        segment = replace(SEGMENT, end=1000, grad_scale=grad_scale)
        update_on_host(rule, expected, segment, kept)
        update_by(triton_update, rule, actual, segment, kept)
        assert same_bits(actual, expected) == [], (value_dtype, grad_dtype)


@pytest.mark.parametrize("rule", [Rule.ADAMW_AMSGRAD, Rule.ADAGRAD, Rule.SGD_MOMENTUM], ids=lambda rule: rule.name)
def test_blocks_of_any_magnitude(triton_update: ModuleType, fused: None, rule: Rule) -> None:
    """Codes of zeros, of subnormal numbers, of huge ones, of what lies far apart, and of what is beyond fp32."""
    format, blocks = StateFormat.COMPACT, 14
    arrays = tame(rule, blocks * STATE_BLOCK - 3, torch.float32, torch.float32, format)
    for name in STATES[rule]:
        arrays[name].zero_()
        arrays[scales_of(name)].zero_()
    exponents = torch.tensor([-45.0, -42.0, -38.0, -30.0, -22.0, -20.0, -18.0, -10.0, 0.0, 10.0, 19.0, 38.0, 0.0, 0.0])
    grad = arrays["grad"].double() * 10 ** exponents.repeat_interleave(STATE_BLOCK).double()[:-3]
    grad[12 * STATE_BLOCK :] *= torch.logspace(-30, 0, 2 * STATE_BLOCK - 3)
    arrays["grad"].copy_(grad)
    arrays["grad"][3 * STATE_BLOCK : 4 * STATE_BLOCK] = 0
    arrays["grad"][13 * STATE_BLOCK + 5] = torch.nan
    segment = replace(SEGMENT, end=grad.numel(), beta2=0.0 if rule is Rule.ADAGRAD else 0.5, weight_decay=0.0)
    expected, actual = arrays, copies(arrays)
    for step in (1, 2):
        update_on_host(rule, expected, replace(segment, step=step), Kept(format))
        update_by(triton_update, rule, actual, replace(segment, step=step), Kept(format))
        assert same_bits(actual, expected) == []
    for name in STATES[rule]:
        scales = expected[scales_of(name)]
        assert (scales == 0).any() and scales.isnan().any() and (scales > 0).sum() >= 5


def on_the_edge(kept: Kept, code: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(STATE_BLOCK,) values of a signed state, and which lie, to the last bit, where `code` begins in step 1."""
    random = codec.random_word(torch.arange(STATE_BLOCK), *random_key(kept.seed, 1, 0))
    edge = codec.random_edge(random, first_bit(0, 12))[:, None]
    inverse = signed.inverse_of(signed.scale_of(words.bits(torch.ones(1))))
    below = torch.full_like(edge, code - 1)
    at_least = words.fma(below, words.fma(2.0, edge, below), edge)
    near = (at_least.double() / inverse.double() ** 2).float()
    x = words.from_bits(words.bits(near) + torch.arange(-40, 40))  # (STATE_BLOCK, 80)
    y = signed.root_of(x) * inverse
    hits = y * y == at_least
    return x[torch.arange(STATE_BLOCK), hits.int().argmax(dim=1)], hits.any(dim=1)


def test_a_code_begins_on_its_edge(triton_update: ModuleType, fused: None) -> None:
    """So seldom that other tests do not see it."""
    kept = Kept(StateFormat.COMPACT)
    expected = tame(Rule.SGD_MOMENTUM, STATE_BLOCK, torch.float32, torch.float32, kept.format)
    expected["momentum_buffer"].zero_()
    values, hits = on_the_edge(kept, 101)
    values[0], hits[0] = 1.0, False  # the largest
    expected["grad"].copy_(values)
    actual = copies(expected)
    segment = replace(SEGMENT, end=STATE_BLOCK, weight_decay=0.0, grad_scale=1.0, step=1)
    update_on_host(Rule.SGD_MOMENTUM, expected, segment, kept)
    update_by(triton_update, Rule.SGD_MOMENTUM, actual, segment, kept)
    assert same_bits(actual, expected) == []
    assert hits.sum() > 20 and (actual["momentum_buffer"][hits] == 101).all()


@pytest.mark.parametrize("rule", [Rule.ADAMW, Rule.ADAGRAD, Rule.LION], ids=lambda rule: rule.name)
@every_format
def test_what_lies_behind_the_end_is_not_looked_at(
    triton_update: ModuleType, fused: None, rule: Rule, format: StateFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU loads anything there, where the interpreter loads zeros."""
    builder = pytest.importorskip("triton.runtime.interpreter").InterpreterBuilder
    load = builder.create_masked_load

    def load_anything(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        loaded = load(self, pointers, mask, *rest)
        items = loaded.data.view(np.uint8).reshape(*loaded.data.shape, -1)
        items[~mask.data] = 0x7E  # huge numbers, large codes
        return loaded

    monkeypatch.setattr(builder, "create_masked_load", load_anything)
    for numel in (3, 300):
        expected = tame(rule, numel, torch.bfloat16, torch.float32, format)
        actual = copies(expected)
        segment = replace(SEGMENT, end=numel)
        update_on_host(rule, expected, segment, Kept(format))
        update_by(triton_update, rule, actual, segment, Kept(format))
        assert same_bits(actual, expected) == []


@every_format
@pytest.mark.parametrize("first", [1 << 31, 1 << 32, 7 << 32], ids=hex)
def test_elements_are_numbered_from_the_origin(
    triton_update: ModuleType, fused: None, first: int, format: StateFormat
) -> None:
    """Random words begin anew, with another key, at 2^32; what lies on both sides is one segment."""
    grain = STATE_BLOCK if format is StateFormat.COMPACT else 1
    numel, begin = 6 * STATE_BLOCK, 256 + 3 // grain
    kept = Kept(format, seed=0xFEDCBA9876543210, origin=first - begin - 2 * STATE_BLOCK)
    expected = tame(Rule.ADAMW, numel, torch.bfloat16, torch.bfloat16, format)
    actual, elsewhere = copies(expected), copies(expected)
    segment = replace(SEGMENT, begin=begin, end=numel - 5)
    update_on_host(Rule.ADAMW, expected, segment, kept)
    update_by(triton_update, Rule.ADAMW, actual, segment, kept)
    assert same_bits(actual, expected) == []
    update_on_host(Rule.ADAMW, elsewhere, segment, replace(kept, origin=0))
    assert bool(same_bits(elsewhere, expected)) == (format is not StateFormat.FP32)


@every_rule
def test_nans_and_infinities(triton_update: ModuleType, rule: Rule) -> None:
    """Whatever the interpreter makes of an fma."""
    for value_dtype in VALUES:
        expected = tame(rule, 40, value_dtype, torch.float32)
        expected["grad"][:20:2] = -torch.tensor(torch.nan)
        expected["grad"][20::2] = torch.inf
        actual = copies(expected)
        update_on_host(rule, expected, replace(SEGMENT, end=40))
        update_by(triton_update, rule, actual, replace(SEGMENT, end=40))
        for name in ("value", *STATES[rule]):
            assert expected[name].isfinite().logical_not()[::2].any() or (rule is Rule.LION and name == "value")
            bad = ~expected[name].isfinite()
            assert same_bits({name: actual[name][bad]}, {name: expected[name][bad]}) == []
            assert actual[name][~bad].isfinite().all()


@pytest.mark.parametrize("step", [1, 2])
@pytest.mark.parametrize("rule", [Rule.ADAGRAD, Rule.SGD_MOMENTUM, Rule.ADAM], ids=lambda rule: rule.name)
def test_the_first_step(triton_update: ModuleType, rule: Rule, step: int) -> None:
    """It has no dampening, adds the initial sum, and corrects the most."""
    arrays = {name: torch.zeros(8) for name in STATES[rule]}
    arrays |= {"value": torch.ones(8), "grad": torch.full((8,), 2.0)}
    segment = replace(SEGMENT, end=8, beta1=0.5, beta2=0.25, weight_decay=0.0, grad_scale=1.0, eps=0.0, step=step)
    update_by(triton_update, rule, arrays, segment)
    first = step == 1
    states = {
        Rule.ADAGRAD: [4.25 if first else 4.0],
        Rule.SGD_MOMENTUM: [2.0 if first else 1.5],
        Rule.ADAM: [1.0, 3.0],
    }[rule]
    assert [arrays[name].unique().tolist() for name in STATES[rule]] == [[state] for state in states]
    expected = {name: torch.zeros(8) for name in STATES[rule]} | {"value": torch.ones(8), "grad": arrays["grad"]}
    update_on_host(rule, expected, segment)
    torch.testing.assert_close(arrays["value"], expected["value"], rtol=1e-6, atol=0)


@every_format
def test_elements_outside_of_the_segment_stay(triton_update: ModuleType, is_fused: bool, format: StateFormat) -> None:
    """Of the block of codes in which it ends, all share the scale."""
    for value_dtype in FLOATS:
        expected = tame(Rule.ADAMW, 3500, value_dtype, torch.bfloat16, format)
        actual, before = copies(expected), copies(expected)
        segment = replace(SEGMENT, begin=256, end=2817)
        if is_fused:
            update_on_host(Rule.ADAMW, expected, segment, Kept(format))
            update_by(triton_update, Rule.ADAMW, actual, segment, Kept(format))
            assert same_bits(actual, expected) == []
        else:
            update_by(triton_update, Rule.ADAMW, actual, segment, Kept(format))
        for array, was in zip(actual.values(), before.values(), strict=True):
            of_blocks = array.numel() < 3500
            for part in (slice(0, 1), slice(12, None)) if of_blocks else (slice(0, 256), slice(2817, None)):
                assert same_bits({"": array[part]}, {"": was[part]}) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"begin": 3, "end": 2}, r"\[3, 2\) of 8 elements"),
        ({"end": 9}, r"\[0, 9\) of 8 elements"),
        ({"step": 0}, "count steps from 1"),
        ({"value": torch.ones(8, dtype=torch.bfloat16)}, "needs a residual"),
        ({"residual": torch.ones(8, dtype=torch.int16)}, "has no residual"),
        ({"value": torch.ones(8, dtype=torch.float16)}, "needs a master"),
        ({"master": torch.ones(8)}, "has no master"),
        ({"scales": (torch.ones(1),)}, "ADAMW keeps 0 scales"),
        ({"state_format": StateFormat.COMPACT}, "ADAMW keeps 2 scales"),
        ({"state_format": StateFormat.COMPACT, "origin": 8}, "multiples of 256"),
        ({"state_format": StateFormat.BF16}, "exp_avg: .*torch.bfloat16.* got 8 of torch.float32"),
        ({"value": torch.ones(8, dtype=torch.float64)}, "value: .*torch.float64"),
        ({"grad": torch.ones(8, dtype=torch.float64)}, "not torch.float64"),
        ({"grad": torch.ones(7)}, "gradient: .* got 7"),
        ({"states": ()}, "ADAMW keeps 2 states"),
        ({"states": (torch.ones(8), torch.ones(8).half())}, "exp_avg_sq: .*torch.float16"),
        ({"states": (torch.ones(8, device="meta"), torch.ones(8))}, "exp_avg: .* on meta. Move a model"),
        ({"states": (torch.ones(16)[::2], torch.ones(8))}, r"exp_avg: .*strides \(2,\)"),
    ],
    ids=str,
)
def test_what_cannot_work_is_refused(triton_update: ModuleType, changes: dict[str, Any], message: str) -> None:
    ours = {name: each for name, each in changes.items() if name in triton_update.UpdateTensors.__dataclass_fields__}
    tensors = triton_update.UpdateTensors(torch.ones(8), None, (torch.ones(8), torch.ones(8)), torch.ones(8))
    segment = replace(SEGMENT, **({"end": 8} | {name: each for name, each in changes.items() if name not in ours}))
    with pytest.raises(ConfigError, match=message):
        triton_update.update_on_device(Rule.ADAMW, replace(tensors, **ours), segment)
    assert (tensors.value == 1).all() and all((state == 1).all() for state in tensors.states)


# Through the optimizers


@pytest.fixture
def on_device(triton_update: ModuleType, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """CPU tensors in the memory of those of `on_device` are updated as those of a GPU are."""
    chosen: list[Any] = []

    def has_device_update(tensor: torch.Tensor) -> bool:
        # An empty one has no address, but a storage like others, and so has what is detached.
        return any(tensor.untyped_storage() is each.untyped_storage() for each in chosen)

    monkeypatch.setitem(sys.modules, MODULE, triton_update)
    for module in ("optim.optimizer", "hardware.kernels.update"):
        monkeypatch.setattr(f"zero_offload.{module}.has_device_update", has_device_update)
    return chosen


OPTIMIZERS: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
    (zo.AdamW, {}),
    (zo.AdamW, {"amsgrad": True, "maximize": True}),
    (zo.Adam, {"weight_decay": 0.1, "maximize": True}),
    (zo.Adam, {"amsgrad": True}),
    (zo.Adagrad, {"initial_accumulator_value": 0.5, "lr_decay": 0.1, "maximize": True}),
    (zo.Lion, {"weight_decay": 0.1}),
    (zo.SGD, {"maximize": True}),
    (zo.SGD, {"momentum": 0.9, "dampening": 0.3}),
    (zo.SGD, {"momentum": 0.9, "nesterov": True}),
]
SHAPES: list[tuple[int, ...]] = [(33, 17), (), (0, 3)]


def step(optimizers: list[Any], seeds: range, grad_dtype: torch.dtype | None = None) -> None:
    """The same gradients for the parameters of all, some of them transposed."""
    for seed in seeds:
        for optimizer in optimizers:
            draw = torch.Generator().manual_seed(seed)
            for param in optimizer.param_groups[0]["params"]:
                grad = torch.randn(param.shape, generator=draw).to(grad_dtype or param.dtype)
                param.grad = grad.t().contiguous().t() if seed % 2 and grad.dim() == 2 else grad
            with np.errstate(all="ignore"):
                optimizer.step()


def arrays_of(optimizer: torch.optim.Optimizer, param: nn.Parameter) -> Arrays:
    tensors = {name: each for name, each in optimizer.state[param].items() if isinstance(each, torch.Tensor)}
    return {"value": param.detach()} | tensors


@pytest.mark.parametrize("dtype", VALUES, ids=str)
@pytest.mark.parametrize("case", OPTIMIZERS, ids=lambda case: " ".join([case[0].__name__, *case[1]]))
def test_optimizers(on_device: list[Any], is_fused: bool, case: tuple[Any, dict[str, Any]], dtype: torch.dtype) -> None:
    make, options = case
    values = [torch.randn(shape).to(dtype) for shape in SHAPES]
    mine, theirs = ([nn.Parameter(value.clone()) for value in values] for _ in range(2))
    on_device += mine
    optimizers = [make(params, lr=1e-2, **options) for params in (mine, theirs)]
    step(optimizers, range(4))
    for ours, other, value in zip(mine, theirs, values, strict=True):
        check(arrays_of(optimizers[0], ours), arrays_of(optimizers[1], other), is_fused)
        assert value.numel() < 2 or same_bits({"": ours}, {"": value})
        assert ours._version == (4 if value.numel() else 0)  # for a backward that has seen the old values
    again = [nn.Parameter(param.detach().clone()) for param in mine]
    on_device += again
    resumed = make(again, lr=1e-2, **options)
    resumed.load_state_dict(optimizers[0].state_dict())
    step([optimizers[0], resumed], range(4, 6))
    for ours, other in zip(mine[:2], again[:2], strict=True):
        assert same_bits(arrays_of(resumed, other), arrays_of(optimizers[0], ours)) == []


def test_a_gradient_of_another_dtype(on_device: list[Any], is_fused: bool) -> None:
    ours, other = (nn.Parameter(torch.ones(5, dtype=torch.bfloat16)) for _ in range(2))
    on_device.append(ours)
    optimizers = [zo.AdamW([param], lr=1e-2) for param in (ours, other)]
    for param in (ours, other):
        param.grad_dtype = None  # any
    for grad_dtype in (torch.float32, torch.float16):
        step(optimizers, range(2), grad_dtype)
    check(arrays_of(optimizers[0], ours), arrays_of(optimizers[1], other), is_fused)
    for optimizer in optimizers:
        with pytest.raises(ConfigError, match="not torch.float64"):
            step([optimizer], range(1), torch.float64)


def test_what_has_no_kernel_goes_torchs_way(on_device: list[Any]) -> None:
    """Parameters that are not contiguous, and other dtypes; so their states have the parameter's dtype."""
    for value in (torch.randn(4, 6, dtype=torch.bfloat16).t(), torch.ones(3, dtype=torch.float16)):
        ours = nn.Parameter(value.clone(memory_format=torch.preserve_format))
        torchs = nn.Parameter(value.clone(memory_format=torch.preserve_format))
        on_device.append(ours)
        optimizers = [zo.AdamW([ours], lr=0.1), torch.optim.AdamW([torchs], lr=0.1)]
        step(optimizers, range(2))
        assert torch.equal(ours, torchs) and optimizers[0].state[ours]["exp_avg"].dtype is value.dtype


def test_states_that_stayed_behind_are_refused(on_device: list[Any]) -> None:
    """A model that moves after the first step leaves its states, whose addresses mean nothing elsewhere."""
    for is_device in (False, True):
        param = nn.Parameter(torch.ones(4))
        on_device += [param] if is_device else []
        optimizer = zo.Lion([param])
        optimizer.state[param]["exp_avg"] = torch.zeros(4, device="meta")
        param.grad = torch.ones(4)
        with pytest.raises(ConfigError, match="meta"):
            optimizer.step()
        assert (param == 1).all()


def test_steps_are_counted_on_the_host() -> None:
    """Whatever the default device: a count on a GPU would be waited for at each step."""
    for make in (zo.AdamW, zo.Adagrad):
        param = nn.Parameter(torch.ones(4))
        param.grad = torch.ones(4)
        optimizer = make([param])
        with torch.device("meta"):
            optimizer.step()
        assert optimizer.state[param]["step"].item() == 1


# Where there is a kernel


@pytest.fixture
def unasked() -> Iterator[None]:
    """As in a process that has not looked for Triton yet."""
    choice.triton_compiles_for.cache_clear()
    yield
    choice.triton_compiles_for.cache_clear()


def on_gpu(index: int = 0) -> Any:
    return SimpleNamespace(device=torch.device("cuda", index))


def test_only_a_gpu_is_asked(unasked: None) -> None:
    assert not choice.has_device_update(torch.ones(1))
    assert choice.triton_compiles_for.cache_info().currsize == 0


def test_without_triton_there_is_none_and_no_warning(unasked: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, MODULE, None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not choice.has_device_update(on_gpu())


def test_a_device_that_nothing_compiles_for_is_told_once(unasked: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def try_on(device: torch.device) -> None:
        if device.index == 1:
            raise RuntimeError("Failed to find C compiler")

    module = types.ModuleType(MODULE)
    module.try_on = try_on  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, MODULE, module)
    assert choice.has_device_update(on_gpu(0))
    with pytest.warns(UserWarning, match="nothing for cuda:1 .*Failed to find C compiler.*gcc") as found:
        assert not choice.has_device_update(on_gpu(1))
        assert not choice.has_device_update(on_gpu(1))
    assert len(found) == 1
