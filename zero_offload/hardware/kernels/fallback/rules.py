"""The mathematics of every optimizer, once, over words: csrc/optim/rules.inl in Python, with the same roundings.

A rule takes the scalars of its segment, the scaled gradient, the parameter and three states. It returns the last four,
and leaves alone the states that it does not know. The formulas and their sources stand in rules.inl.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from zero_offload.hardware.abi import Rule
from zero_offload.hardware.kernels.arguments import SEGMENT_DTYPE, Segment, segment_array

# Places in a row of scalars.
GRAD_SCALE, DECAY, L2, BETA1, BETA2, ONE_MINUS_BETA1, ONE_MINUS_BETA2 = range(7)
INV_SQRT_BIAS2, EPS, NEG_STEP_SIZE, GRAD_SHARE, FIRST_SUM = range(7, 12)
NUM_SCALARS = 12

_ZERO, _ONE = np.float32(0), np.float32(1)
_ADAM = (Rule.ADAMW, Rule.ADAMW_AMSGRAD, Rule.ADAM, Rule.ADAM_AMSGRAD)
_AMSGRAD = (Rule.ADAMW_AMSGRAD, Rule.ADAM_AMSGRAD)
_DECOUPLED = (Rule.ADAMW, Rule.ADAMW_AMSGRAD)


def scalars_of(rule: Rule, segment: Segment) -> tuple[float, ...]:
    """Scalars of a segment, which are the same for all elements, rounded to fp32 once."""
    # The same for all parameters that share a step, whatever their sizes.
    return _scalars(rule, segment_array([replace(segment, begin=0, end=0)]).tobytes())


@functools.lru_cache(maxsize=64)
def _scalars(rule: Rule, row: bytes) -> tuple[float, ...]:
    (segment,) = np.frombuffer(row, SEGMENT_DTYPE)
    with np.errstate(over="ignore"):
        return tuple(np.array(scalars_of_row(rule, segment), dtype=np.float32).tolist())


def scalars_of_row(rule: Rule, segment: np.void) -> tuple[float, ...]:
    """The scalars of a rule in double, from a row of `segment_array`."""
    lr, beta1, beta2, decay = (segment[name] for name in ("lr", "beta1", "beta2", "weight_decay"))
    step = np.float64(segment["step"])
    with np.errstate(all="ignore"):  # nonsense gives infinities and NaNs, as it does in C
        step_size = lr
        if rule in _ADAM:
            step_size = lr / (1.0 - beta1**step)
        elif rule is Rule.ADAGRAD:
            step_size = lr / (1.0 + np.float64(segment["step"] - 1) * beta1)
        inverse = 1.0 / np.sqrt(1.0 - beta2**step)
    is_first = segment["step"] == 1
    return (
        *(segment["grad_scale"], 1.0 - lr * decay, decay, beta1, beta2, 1.0 - beta1, 1.0 - beta2),
        *(inverse, segment["eps"], -step_size, 1.0 if is_first else 1.0 - beta2, beta2 if is_first else 0.0),
    )


def make_rule(words: Any, rule: Rule) -> Callable[..., Any]:
    """step(c, g, p, s0, s1, s2) -> (p, s0, s1, s2) over `words`."""
    if rule in _ADAM:
        return _make_adam(words, rule in _DECOUPLED, rule in _AMSGRAD)
    if rule is Rule.ADAGRAD:
        return _make_adagrad(words)
    if rule is Rule.LION:
        return _make_lion(words)
    return _make_sgd(words, rule)


def _make_adam(words: Any, decoupled: bool, amsgrad: bool) -> Callable[..., Any]:
    fma, sqrt, select = words.fma, words.sqrt, words.select

    def step(c: Any, g: Any, p: Any, m: Any, v: Any, x: Any) -> Any:
        if decoupled:
            p = p * c[DECAY]
        else:
            g = fma(c[L2], p, g)
        m = fma(c[ONE_MINUS_BETA1], g - m, m)
        v = fma(c[BETA2], v, c[ONE_MINUS_BETA2] * (g * g))
        if amsgrad:
            x = select(v > x, v, x)
        root = sqrt(x if amsgrad else v)
        p = fma(c[NEG_STEP_SIZE], m / fma(root, c[INV_SQRT_BIAS2], c[EPS]), p)
        return p, m, v, x

    return step


def _make_adagrad(words: Any) -> Callable[..., Any]:
    """The first step adds the initial_accumulator_value, beta2 of its segment, to the sum."""
    fma, sqrt = words.fma, words.sqrt

    def step(c: Any, g: Any, p: Any, total: Any, s1: Any, s2: Any) -> Any:
        g = fma(c[L2], p, g)
        total = fma(g, g, total + c[FIRST_SUM])
        p = fma(c[NEG_STEP_SIZE], g / (sqrt(total) + c[EPS]), p)
        return p, total, s1, s2

    return step


def _make_lion(words: Any) -> Callable[..., Any]:
    fma, select = words.fma, words.select

    def step(c: Any, g: Any, p: Any, m: Any, s1: Any, s2: Any) -> Any:
        apart = g - m
        mixed = fma(c[ONE_MINUS_BETA1], apart, m)
        # -1, 1, or the zero or NaN it was.
        sign = select(mixed > _ZERO, _ONE, select(mixed < _ZERO, -_ONE, mixed))
        p = fma(c[NEG_STEP_SIZE], sign, p * c[DECAY])
        m = fma(c[ONE_MINUS_BETA2], apart, m)
        return p, m, s1, s2

    return step


def _make_sgd(words: Any, rule: Rule) -> Callable[..., Any]:
    fma = words.fma
    has_momentum, nesterov = rule is not Rule.SGD, rule is Rule.SGD_NESTEROV

    def step(c: Any, g: Any, p: Any, b: Any, s1: Any, s2: Any) -> Any:
        g = fma(c[L2], p, g)
        if has_momentum:
            b = fma(c[BETA1], b, c[GRAD_SHARE] * g)
            g = fma(c[BETA1], b, g) if nesterov else b
        p = fma(c[NEG_STEP_SIZE], g, p)
        return p, b, s1, s2

    return step
