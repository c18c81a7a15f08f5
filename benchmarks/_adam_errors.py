"""How far AdamW in each format of states is from the same steps in double precision.

Gradients are normal, with a size of their own for each element: e to a normal number with a standard deviation of 1,
so that a block of 256 holds sizes from 1/16 to 16 of the middle one. After one step, and after many.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from zero_offload.base.types import StateFormat
from zero_offload.hardware.abi import Rule
from zero_offload.hardware.kernels.arguments import SIGNED, STATES, Segment, num_scales, state_dtype
from zero_offload.hardware.kernels.formats import decode_states, join_master, split_master
from zero_offload.hardware.kernels.update import UpdateBuffers, fused_update

NUMEL, NUM_STEPS = 1 << 20, 100
LR, BETAS, EPS = 1e-3, (0.9, 0.999), 1e-8
Pair = tuple[float, float]


class _Run:
    """A bf16 value with its residual, and states in one format."""

    def __init__(self, form: StateFormat, master: torch.Tensor) -> None:
        self.form = form
        self.half = torch.empty(NUMEL, dtype=torch.bfloat16)
        self.residual = torch.empty(NUMEL, dtype=torch.int8 if form is StateFormat.COMPACT else torch.int16)
        split_master(master, self.half, self.residual)
        self.states = {
            name: (
                torch.zeros(NUMEL, dtype=state_dtype(form, signed=name in SIGNED)),
                torch.zeros(num_scales(form, NUMEL)) if form is StateFormat.COMPACT else None,
            )
            for name in STATES[Rule.ADAMW]
        }

    def step(self, grad: torch.Tensor, step: int, threads: int) -> None:
        pairs = self.states.values()
        buffers = UpdateBuffers(
            value=self.half.data_ptr(),
            residual=self.residual.data_ptr(),
            master=0,
            states=tuple(state.data_ptr() for state, _ in pairs),
            grad=grad.data_ptr(),
            value_out=0,
            value_dtype=torch.bfloat16,
            grad_dtype=torch.float32,
            scales=tuple(scales.data_ptr() for _, scales in pairs if scales is not None),
            state_format=self.form,
            seed=1,
        )
        fused_update(Rule.ADAMW, buffers, [Segment(0, NUMEL, LR, *BETAS, EPS, 0.0, 1.0, step)], threads)

    def value(self) -> torch.Tensor:
        master = torch.empty(NUMEL)
        join_master(self.half, self.residual, master)
        return master.double()

    def state(self, name: str) -> torch.Tensor:
        states, scales = self.states[name]
        made = torch.empty(NUMEL)
        decode_states(self.form, states, scales, made, signed=name in SIGNED)
        return made.double()


@dataclass
class _Double:
    """The same in double."""

    value: torch.Tensor
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor

    def step(self, grad: torch.Tensor, step: int) -> None:
        beta1, beta2 = BETAS
        self.exp_avg.lerp_(grad.double(), 1 - beta1)
        self.exp_avg_sq.mul_(beta2).addcmul_(grad.double(), grad.double(), value=1 - beta2)
        root = (self.exp_avg_sq / (1 - beta2**step)).sqrt() + EPS
        self.value -= LR / (1 - beta1**step) * self.exp_avg / root


def _max_and_mean(error: torch.Tensor) -> Pair:
    return float(error.max()), float(error.mean())


def _errors(run: _Run, double: _Double) -> dict[str, Pair]:
    """Of the value in units of its fp32 digits (where it is smaller, of those of 1/1024) and of the step size; of a
    state in shares of its block's largest, and of itself."""
    exact = double.value
    error = (run.value() - exact).abs()
    digit = (torch.frexp(exact.abs().clamp(min=1 / 1024))[1] - 24).double().exp2()
    made = {"value, ulps": _max_and_mean(error / digit), "value, in lr": _max_and_mean(error / LR)}
    for name in STATES[Rule.ADAMW]:
        expected = getattr(double, name)
        error = (run.state(name) - expected).abs()
        largest = expected.abs().view(-1, 256).amax(dim=1).repeat_interleave(256)
        made[f"{name}, of largest"] = _max_and_mean(error / largest)
        made[f"{name}, of itself"] = _max_and_mean(error / expected.abs())
    return made


def show_errors(threads: int) -> None:
    """Print the table: the largest and the mean error of every format, after one step and after NUM_STEPS."""
    generator = torch.Generator().manual_seed(0)
    master = torch.randn(NUMEL, generator=generator) * 0.02
    sizes = torch.randn(NUMEL, generator=generator).exp() * 1e-3
    starts = [_Run(form, master) for form in StateFormat]
    doubles = [_Double(run.value(), *(torch.zeros(NUMEL, dtype=torch.float64) for _ in range(2))) for run in starts]
    print(f"\nAdamW, bf16, {NUMEL} elements: error against double, largest (mean)")
    for step in range(1, NUM_STEPS + 1):
        grad = torch.randn(NUMEL, generator=generator) * sizes
        for run, double in zip(starts, doubles, strict=True):
            run.step(grad, step, threads)
            double.step(grad, step)
        if step not in (1, NUM_STEPS):
            continue
        moved = _max_and_mean((doubles[0].value - master.double()).abs() / LR)
        tables = [_errors(run, double) for run, double in zip(starts, doubles, strict=True)]
        print(f"after {step}, the value moved by {moved[0]:.1f} ({moved[1]:.1f}) lr")
        print(f"{'':<28}" + "".join(f"{form.name:>22}" for form in StateFormat))
        for quantity in tables[0]:
            cells = ["{:.1e} ({:.1e})".format(*table[quantity]) for table in tables]
            print(f"  {quantity:<26}" + "".join(f"{cell:>22}" for cell in cells))
