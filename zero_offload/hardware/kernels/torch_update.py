"""The fused updates of all optimizers on tensors of any device, by torch's operations: for where Triton is not.

Owns the passes over the tensors, a block at a time; the mathematics is that of `rules`, over the words of
`torch_words`. Those say what is rounded how, so the bits are those of the native kernels. Nothing waits for the device.
The arrays between the operations, and a launch for each, cost the time.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from zero_offload.base.types import StateFormat
from zero_offload.hardware.abi import STATE_BLOCK, Rule
from zero_offload.hardware.kernels.arguments import Segment, UpdateTensors, check_update, scalars_of
from zero_offload.hardware.kernels.fallback import torch_words as words
from zero_offload.hardware.kernels.fallback.codec import (
    MAGNITUDE,
    first_bit,
    make_codec,
    make_codes,
    make_elements,
    random_key,
    turns,
)
from zero_offload.hardware.kernels.rules import GRAD_SCALE, SIGNED, STATES, make_rule

BLOCK = 1 << 20
"""Elements that the arrays between two operations have: whole blocks of codes. They take some 150 bytes for each."""

_elements, _codec = make_elements(words), make_codec(words)
_codes = {signed: make_codes(words, signed=signed) for signed in (False, True)}
_rule = functools.cache(functools.partial(make_rule, words))


def update_on_device(rule: Rule, tensors: UpdateTensors, segment: Segment) -> None:
    """Launch one step of elements [segment.begin, segment.end) on the current stream of the tensors' device.

    Elements outside are not touched. Raises ConfigError for tensors and segments that do not fit.
    """
    check_update(rule, tensors, segment)
    scalars = scalars_of(rule, segment)
    with torch.no_grad():  # values may be parameters
        for part, turn in _parts(tensors, segment):
            random = None
            if part.state_format is not StateFormat.FP32:
                random = _random_words(part, random_key(part.seed, segment.step, turn))
            _update_block(rule, part, scalars, random)


def _parts(tensors: UpdateTensors, segment: Segment) -> Iterator[tuple[UpdateTensors, int]]:
    """Parts that are updated one at a time, as flat views, each with the turn of its key."""
    for begin, end, turn in turns(tensors.origin, segment.begin, segment.end):
        for at in range(begin, end, BLOCK):
            here = slice(at, min(at + BLOCK, end))
            blocks = slice(at // STATE_BLOCK, -(-here.stop // STATE_BLOCK))
            part = replace(
                tensors,
                value=_flat(tensors.value)[here],
                residual=None if tensors.residual is None else _flat(tensors.residual)[here],
                states=tuple(_flat(state)[here] for state in tensors.states),
                grad=_flat(tensors.grad)[here],
                master=None if tensors.master is None else _flat(tensors.master)[here],
                scales=tuple(_flat(scales)[blocks] for scales in tensors.scales),
                origin=tensors.origin + at,
            )
            yield part, turn


def _update_block(rule: Rule, part: UpdateTensors, scalars: tuple[float, ...], random: Tensor | None) -> None:
    signed = [name in SIGNED for name in STATES[rule]]
    states = [_load_state(part, k, each) for k, each in enumerate(signed)]
    g = part.grad.to(torch.float32) * scalars[GRAD_SCALE]
    p, *new = _rule(rule)(scalars, g, _load_master(part), *(*states, None, None, None)[:3])
    for k, each in enumerate(signed):
        _store_state(part, k, each, _elements.canonical(new[k]), random)
    _store_master(part, _elements.canonical(p), random)


def _random_words(part: UpdateTensors, key: tuple[int, int]) -> Tensor:
    index = torch.arange(part.origin, part.origin + part.value.numel(), dtype=torch.int64, device=part.value.device)
    found: Tensor = _codec.random_word(index, *key)
    return found


def _load_state(part: UpdateTensors, k: int, signed: bool) -> Any:
    state = part.states[k]
    if part.state_format is not StateFormat.COMPACT:
        return state.to(torch.float32)
    scale = part.scales[k][:, None].expand(-1, STATE_BLOCK).reshape(-1)[: state.numel()]
    return _codes[signed].value_of(_bytes_of(state), scale)


def _store_state(part: UpdateTensors, k: int, signed: bool, x: Any, random: Any) -> None:
    """NaNs in `x` are the canonical one."""
    state = part.states[k]
    if part.state_format is StateFormat.FP32:
        state.copy_(x)
    elif part.state_format is StateFormat.BF16:
        state.view(torch.int16).copy_(_codec.random_bf16(x, random, first_bit(k, 16)))
    else:
        made = _codes[signed]
        roots = made.root_of(_in_blocks(x))
        scale = made.scale_of((words.bits(roots) & MAGNITUDE).amax(dim=1))
        edge = _codec.random_edge(_in_blocks(random), first_bit(k, 12))
        codes = made.code_of(roots, made.inverse_of(scale)[:, None], edge)
        state.view(torch.uint8).copy_(codes.reshape(-1)[: state.numel()])
        part.scales[k].copy_(scale)


def _in_blocks(x: Tensor) -> Tensor:
    """(blocks, STATE_BLOCK), with zeros at the end, which change no scale."""
    short = -x.numel() % STATE_BLOCK
    if short:
        x = torch.nn.functional.pad(x, (0, short))
    return x.reshape(-1, STATE_BLOCK)


def _load_master(part: UpdateTensors) -> Any:
    if part.master is not None:
        return part.master
    if part.residual is None:
        return part.value
    join, rests = _codec.join_short, _bytes_of
    if part.residual.dtype is torch.int16:
        join, rests = _elements.join_master, _halves_of
    return words.from_bits(join(_halves_of(part.value), rests(part.residual)))


def _store_master(part: UpdateTensors, p: Any, random: Any) -> None:
    """NaNs in `p` are the canonical one."""
    if part.master is not None:
        part.value.view(torch.int16).copy_(_elements.narrow_fp16(p))
        part.master.copy_(p)
    elif part.residual is None:
        part.value.copy_(p)
    else:
        short = part.residual.dtype is torch.int8
        word = words.bits(_codec.random_24(p, random) if short else p)
        part.value.view(torch.int16).copy_(_elements.half_of(word))
        # Integers of fewer bits take the lower ones.
        part.residual.copy_(_codec.short_residual(word) if short else word)


def _halves_of(x: Tensor) -> Tensor:
    return x.view(torch.int16).to(torch.int64) & 0xFFFF


def _bytes_of(x: Tensor) -> Tensor:
    return x.view(torch.uint8).to(torch.int64)


def _flat(x: Tensor) -> Tensor:
    return x.view(-1)
