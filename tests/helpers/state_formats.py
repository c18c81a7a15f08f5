"""One shard's arrays in any format of states, and the rounding at random that `zero_offload.h` describes, in numpy."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from zero_offload.base.types import StateFormat
from zero_offload.hardware.abi import STATE_BLOCK, Rule
from zero_offload.hardware.kernels.arguments import Segment, num_scales, state_dtype
from zero_offload.hardware.kernels.formats import decode_states, encode_states, join_master, split_master
from zero_offload.hardware.kernels.rules import SIGNED, STATES
from zero_offload.hardware.kernels.update import UpdateBuffers, fused_update

Words = npt.NDArray[np.uint32]
Floats = npt.NDArray[np.float32]
F32, U32 = np.float32, np.uint32


@dataclass
class Shard:
    """Arrays of (numel,) elements: the value and what completes it, the states of a rule, a gradient."""

    rule: Rule
    format: StateFormat
    value: Tensor
    residual: Tensor
    master_beside: Tensor
    grad: Tensor
    states: list[Tensor] = field(default_factory=list)
    scales: list[Tensor] = field(default_factory=list)

    @classmethod
    def of(cls, rule: Rule, format: StateFormat, master: Tensor, grad: Tensor, dtype: torch.dtype) -> Shard:
        """Fresh states. The gradient is kept, not copied."""
        numel = master.numel()
        residual = torch.zeros(numel, dtype=torch.int8 if format is StateFormat.COMPACT else torch.int16)
        shard = cls(rule, format, master.to(dtype), residual, master.clone(), grad)
        if dtype is torch.bfloat16:
            split_master(master, shard.value, residual)
        for name in STATES[rule]:
            shard.states.append(torch.zeros(numel, dtype=state_dtype(format, signed=name in SIGNED)))
            shard.scales.append(torch.zeros(num_scales(format, numel)))
        return shard

    def buffers(
        self, *, seed: int = 0, origin: int = 0, skip: int = 0, value_out: Tensor | None = None
    ) -> UpdateBuffers:
        """From element `skip` of the arrays on, which are the section's from `origin` on."""
        compact = self.format is StateFormat.COMPACT
        return UpdateBuffers(
            value=self.value[skip:].data_ptr(),
            residual=self.residual[skip:].data_ptr() if self.value.dtype is torch.bfloat16 else 0,
            master=self.master_beside[skip:].data_ptr() if self.value.dtype is torch.float16 else 0,
            states=tuple(state[skip:].data_ptr() for state in self.states),
            grad=self.grad[skip:].data_ptr(),
            value_out=0 if value_out is None else value_out[skip:].data_ptr(),
            value_dtype=self.value.dtype,
            grad_dtype=self.grad.dtype,
            scales=tuple(scale[skip // STATE_BLOCK :].data_ptr() for scale in self.scales) if compact else (),
            state_format=self.format,
            seed=seed,
            origin=origin + skip,
        )

    def update(self, segments: list[Segment], *, seed: int = 0, origin: int = 0, threads: int = 1) -> None:
        fused_update(self.rule, self.buffers(seed=seed, origin=origin), segments, threads)

    def set_states(self, values: list[Tensor]) -> None:
        """The nearest to fp32 values."""
        for name, value, state, scales in zip(STATES[self.rule], values, self.states, self.scales, strict=True):
            encode_states(self.format, value, state, self._scales(scales), signed=name in SIGNED)

    def decoded(self) -> list[Tensor]:
        """(numel,) fp32 of each state."""
        made = []
        for name, state, scales in zip(STATES[self.rule], self.states, self.scales, strict=True):
            made.append(torch.empty(state.numel()))
            decode_states(self.format, state, self._scales(scales), made[-1], signed=name in SIGNED)
        return made

    def _scales(self, scales: Tensor) -> Tensor | None:
        return scales if self.format is StateFormat.COMPACT else None

    @property
    def master(self) -> Tensor:
        if self.value.dtype is torch.float32:
            return self.value
        if self.value.dtype is torch.float16:
            return self.master_beside
        master = torch.empty(self.value.numel())
        join_master(self.value, self.residual, master)
        return master

    @property
    def arrays(self) -> list[Tensor]:
        return [self.value, self.residual, self.master_beside, *self.states, *self.scales]


def random_words(seed: int, step: int, index: npt.NDArray[np.uint64]) -> Words:
    """One of 32 bits for each element of a section."""
    mask = (1 << 64) - 1

    def mixed(x: int) -> int:
        x = (x + 0x9E3779B97F4A7C15) & mask
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & mask
        x = (x ^ x >> 27) * 0x94D049BB133111EB & mask
        return x ^ x >> 31

    keys = {turn: mixed(mixed(mixed(seed) ^ step) ^ turn) for turn in map(int, np.unique(index >> np.uint64(32)))}
    key = np.array([keys[int(turn)] for turn in index >> np.uint64(32)], dtype=np.uint64)
    low, high = (key & np.uint64(0xFFFFFFFF)).astype(U32), (key >> np.uint64(32)).astype(U32)
    x = index.astype(U32) ^ low
    x = (x ^ (x >> U32(16))) * U32(0x7FEB352D)
    x = (x ^ (x >> U32(15))) + high
    x = x * U32(0x846CA68B)
    return x ^ (x >> U32(16))


def bf16_of(x: Floats, words: Words, state: int) -> npt.NDArray[np.uint16]:
    """The bits of a state in bf16, rounded by its bits of the words; x is finite."""
    bits = words & U32(0xFFFF) if state == 0 else words >> U32(16)
    return ((x.view(U32) + bits) >> U32(16)).astype(np.uint16)


def short_master_of(x: Floats, words: Words) -> Floats:
    """A master of 24 bits; x is finite."""
    return ((x.view(U32) + (words >> U32(24))) & U32(0xFFFFFF00)).view(F32)


def codes_of(x: Floats, words: Words, state: int, *, signed: bool) -> tuple[npt.NDArray[np.int16], Floats]:
    """The codes and scales of a state, operation by operation in fp32 as the kernels do it; x is finite."""
    codes, scales = np.zeros(len(x), np.int16), []
    twelve = (words >> U32(0 if state == 0 else 12)) & U32(0xFFF)
    edges = (twelve.astype(np.float64) + 0.5) / 4096
    largest = F32(127 if signed else 255)
    for begin in range(0, len(x), STATE_BLOCK):
        part = slice(begin, begin + STATE_BLOCK)
        root = np.sqrt(np.abs(x[part]))
        smallest = U32(0x20000001).view(F32)
        if not root.any() or (signed and root.max() < smallest):
            scales.append(F32(0))
            continue
        scale = max(((root.max() / largest).view(U32) | U32(1)).view(F32), smallest)
        y = root * (F32(1) / scale)
        c = np.floor(y)
        # In double both products are exact: what follows is one rounding, as of an fma.
        edge = (np.float64(c) * (np.float64(c) + 2 * edges[part]) + edges[part]).astype(F32)
        code = c.astype(np.int16) + (y * y >= edge)
        codes[part] = code * np.sign(x[part]).astype(np.int16) if signed else np.maximum(code, root > 0)
        scales.append(scale)
    return codes, np.array(scales, dtype=F32)
