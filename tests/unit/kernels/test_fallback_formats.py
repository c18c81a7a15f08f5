"""States in bf16 and in codes without the native library: the bits of its scalar kernels, and what it refuses."""

from __future__ import annotations

import contextlib
import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.any_bits import SPECIALS, image
from tests.helpers.state_formats import Shard
from tests.helpers.without_library import without_library
from tests.parity import test_isa_formats as isas
from zero_offload import native
from zero_offload.abi import STATE_BLOCK, Isa, Rule, StateFormat
from zero_offload.errors import ConfigError
from zero_offload.kernels.choice import kernels
from zero_offload.kernels.master import join_master, split_master
from zero_offload.kernels.states import decode_states, encode_states, num_scales, state_dtype
from zero_offload.kernels.update import STATES, Segment, UpdateBuffers, fused_update

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SEGMENT = Segment(0, 600, lr=1e-2, beta1=0.9, beta2=0.99, eps=1e-8, weight_decay=0.1, grad_scale=0.5, step=3)
LARGE = 3 * 16384 + 5

instead = pytest.mark.parametrize("instead", ["numba", "numpy"])
formats = pytest.mark.parametrize("format", [StateFormat.BF16, StateFormat.COMPACT], ids=lambda format: format.name)


@instead
@formats
@pytest.mark.parametrize("rule", Rule, ids=lambda rule: rule.name)
def test_updates(instead: str, format: StateFormat, rule: Rule) -> None:
    """Each value dtype with each gradient dtype; segments that end inside blocks; the turn of the numbers."""
    sizes = itertools.cycle([(31, True), (257, False), (4096 + 3, True), (255, False), (1, True), (4096 + 3, False)])
    for dtypes, threads in itertools.product(isas.DTYPES, (2, 3)):
        numel, ordinary = next(sizes)
        expected = isas.run_update(Isa.SCALAR, rule, format, numel, dtypes, threads, ordinary=ordinary)
        with without_library(instead):
            found = isas.run_update(Isa.SCALAR, rule, format, numel, dtypes, threads, ordinary=ordinary)
        assert found == expected, (dtypes, numel, ordinary)


@instead
@formats
def test_updates_of_several_chunks_on_several_threads(instead: str, format: StateFormat) -> None:
    for ordinary in (True, False):
        expected = isas.run_update(Isa.SCALAR, Rule.ADAMW, format, LARGE, (BF16, BF16), 1, ordinary=ordinary)
        with without_library(instead):
            for threads in (1, 2, 1024):
                found = isas.run_update(Isa.SCALAR, Rule.ADAMW, format, LARGE, (BF16, BF16), threads, ordinary=ordinary)
                assert found == expected, (threads, ordinary)


@instead
@formats
def test_places_far_into_a_section(instead: str, format: StateFormat) -> None:
    """Random words of another turn have another key, whatever elements came before."""
    grain = STATE_BLOCK if format is StateFormat.COMPACT else 1
    for origin in (0, grain, (1 << 32) - 512, 1 << 32, (5 << 32) + 7 * grain, (1 << 62) - 512):
        images = []
        for run in (None, instead):
            with without_library(run) if run else contextlib.nullcontext():
                shard = Shard.of(Rule.LION, format, torch.linspace(-1, 1, 1100), torch.linspace(-3, 1, 1100), BF16)
                shard.update([replace(SEGMENT, end=1100)], seed=(1 << 64) - 3, origin=origin, threads=2)
                images.append(image(shard.arrays))
        assert images[0] == images[1], origin
