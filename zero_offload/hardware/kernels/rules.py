"""The rule of every optimizer in Python: csrc/optim/rules.inl once more, with the same roundings.

A step is a text over *words*: operations that `fallback/numba_words.py` has for one element, `fallback/torch_words.py`
for a tensor, and `triton_update.py` for a block. `make_rule` binds its names to one of them. A step takes the scalars
of its segment, the scaled gradient, the parameter and three states. It returns the last four, and leaves alone those
that its rule does not have. The formulas and their sources stand in rules.inl.

[Note: a new rule] is a step here and a row in `FORMULAS`, beside its value of `abi.Rule`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import numpy as np

from zero_offload.hardware.abi import Rule

Function = Callable[..., Any]
Word = Any
"""A number, as words have it."""

# Places in a row of scalars.
GRAD_SCALE, DECAY, L2, BETA1, BETA2, ONE_MINUS_BETA1, ONE_MINUS_BETA2 = range(7)
INV_SQRT_BIAS2, EPS, NEG_STEP_SIZE, GRAD_SHARE, FIRST_SUM = range(7, 12)
NUM_SCALARS = 12

# Names that a step gets when it is bound: options of its formula, and words.
DECOUPLED = AMSGRAD = MOMENTUM = NESTEROV = False
fma: Any = None
sqrt: Any = None
divide: Any = None
select: Any = None
sign: Any = None  # -1, 1, or the zero or NaN it was


def adam(c: Word, g: Word, p: Word, m: Word, v: Word, x: Word) -> Word:
    if DECOUPLED:
        p = p * c[DECAY]
    else:
        g = fma(c[L2], p, g)
    m = fma(c[ONE_MINUS_BETA1], g - m, m)
    v = fma(c[BETA2], v, c[ONE_MINUS_BETA2] * (g * g))
    if AMSGRAD:
        x = select(v > x, v, x)
    root = sqrt(x if AMSGRAD else v)
    p = fma(c[NEG_STEP_SIZE], divide(m, fma(root, c[INV_SQRT_BIAS2], c[EPS])), p)
    return p, m, v, x


def adagrad(c: Word, g: Word, p: Word, total: Word, s1: Word, s2: Word) -> Word:
    """The first step adds the initial_accumulator_value, beta2 of its segment, to the sum."""
    g = fma(c[L2], p, g)
    total = fma(g, g, total + c[FIRST_SUM])
    p = fma(c[NEG_STEP_SIZE], divide(g, sqrt(total) + c[EPS]), p)
    return p, total, s1, s2


def lion(c: Word, g: Word, p: Word, m: Word, s1: Word, s2: Word) -> Word:
    apart = g - m
    p = fma(c[NEG_STEP_SIZE], sign(fma(c[ONE_MINUS_BETA1], apart, m)), p * c[DECAY])
    m = fma(c[ONE_MINUS_BETA2], apart, m)
    return p, m, s1, s2


def sgd(c: Word, g: Word, p: Word, b: Word, s1: Word, s2: Word) -> Word:
    g = fma(c[L2], p, g)
    if MOMENTUM:
        b = fma(c[BETA1], b, c[GRAD_SHARE] * g)
        g = fma(c[BETA1], b, g) if NESTEROV else b
    p = fma(c[NEG_STEP_SIZE], g, p)
    return p, b, s1, s2


@dataclass(frozen=True)
class Formula:
    """A rule: its step, and facts for the optimizers above it. Enum zo_rule of zero_offload.h says how a rule without
    betas uses `beta1` and `beta2`."""

    step: Any
    signed: tuple[str, ...] = ()
    """States that may be below 0, by torch's names; the others are means, sums or maxima of squares."""
    unsigned: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    """Names in the step that are True."""
    step_size: Callable[[np.void], np.float64] = lambda segment: segment["lr"]
    """Of a row of `segment_array`, in double."""
    keeps_zeros: Callable[[float], bool] = lambda eps: True
    """True if a value of 0 with states and a gradient of 0 stays as it is with this `eps`."""
    begins_at_beta2: bool = False
    """True if the first step adds beta2 to the state, and later ones do not know it."""
    begins_without_beta2: bool = False
    """True if later steps alone know beta2."""

    @property
    def states(self) -> tuple[str, ...]:
        """In the order of the kernels."""
        return self.signed + self.unsigned


def _adam(*options: str) -> Formula:
    return Formula(
        adam,
        signed=("exp_avg",),
        unsigned=("exp_avg_sq", "max_exp_avg_sq") if "AMSGRAD" in options else ("exp_avg_sq",),
        options=options,
        step_size=lambda segment: segment["lr"] / (1.0 - segment["beta1"] ** np.float64(segment["step"])),
        keeps_zeros=lambda eps: eps > 0,
    )


def _momentum(*options: str) -> Formula:
    return Formula(sgd, signed=("momentum_buffer",), options=("MOMENTUM", *options), begins_without_beta2=True)


FORMULAS = {
    Rule.ADAMW: _adam("DECOUPLED"),
    Rule.ADAMW_AMSGRAD: _adam("DECOUPLED", "AMSGRAD"),
    Rule.ADAM: _adam(),
    Rule.ADAM_AMSGRAD: _adam("AMSGRAD"),
    Rule.ADAGRAD: Formula(
        adagrad,
        unsigned=("sum",),
        step_size=lambda segment: segment["lr"] / (1.0 + np.float64(segment["step"] - 1) * segment["beta1"]),
        keeps_zeros=lambda eps: False,
        begins_at_beta2=True,
    ),
    Rule.LION: Formula(lion, signed=("exp_avg",)),
    Rule.SGD: Formula(sgd),
    Rule.SGD_MOMENTUM: _momentum(),
    Rule.SGD_NESTEROV: _momentum("NESTEROV"),
}

STATES = {rule: formula.states for rule, formula in FORMULAS.items()}
"""States of a rule, by torch's names, in the order of the kernels."""
SIGNED = frozenset(name for formula in FORMULAS.values() for name in formula.signed)


def scalars_of_row(rule: Rule, segment: np.void) -> tuple[float, ...]:
    """The scalars of a rule in double, from a row of `segment_array`."""
    lr, beta1, beta2, decay = (segment[name] for name in ("lr", "beta1", "beta2", "weight_decay"))
    with np.errstate(all="ignore"):  # nonsense gives infinities and NaNs, as it does in C
        step_size = FORMULAS[rule].step_size(segment)
        inverse = 1.0 / np.sqrt(1.0 - beta2 ** np.float64(segment["step"]))
    is_first = segment["step"] == 1
    return (
        *(segment["grad_scale"], 1.0 - lr * decay, decay, beta1, beta2, 1.0 - beta1, 1.0 - beta2),
        *(inverse, segment["eps"], -step_size, 1.0 if is_first else 1.0 - beta2, beta2 if is_first else 0.0),
    )


def make_rule(words: Any, rule: Rule, constant: Function = lambda known: known) -> Function:
    """step(c, g, p, s0, s1, s2) -> (p, s0, s1, s2) over `words`. `constant` makes places and options a compiler's."""
    formula = FORMULAS[rule]
    known = globals() | dict.fromkeys(formula.options, True)
    used = formula.step.__code__.co_names
    assert set(formula.options) <= set(used), f"{rule.name}: {formula.options}, of names in its step"
    return bound(
        formula.step, {name: constant(known[name]) if name.isupper() else getattr(words, name) for name in used}
    )


def bound(body: Any, names: Mapping[str, Any]) -> Function:
    """The function with these names among its globals. A compiler's cache does not find functions in closures again in
    the next process."""
    copy = FunctionType(body.__code__, body.__globals__ | names, None, body.__defaults__, body.__closure__)
    copy.__annotations__ = body.__annotations__
    return copy
