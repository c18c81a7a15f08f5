"""The dtypes a user asks for: `Precision`, a setting of `OffloadConfig`, which checks it together with the others.

Owns their names and rules. Call: `precision_problems`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from zero_offload.base.types import StateFormat

ModuleKey = str | type
"""Which modules: a class, or a pattern (as fnmatch's) of their names in `named_modules()`, or else of parameters."""


@dataclass(frozen=True)
class Precision:
    """Dtypes of the forward and backward (`compute`), in which gradients cross the network (`reduce`), of `states`.

    Gradients of several backwards are added in fp32 whatever `reduce` is. `states` is how optimizer states rest:
    "fp32", exact; "bf16"; or "compact": 8 bits with a scale for each 256, and with bf16 compute a master of 24 bits.
    Rounding of states is random, so that it keeps their mean, and the same in every run.
    """

    compute: str = "bf16"
    """Dtype of forward and backward: "bf16", "fp16" or "fp32"."""
    reduce: str = "fp32"
    """Dtype in which gradients cross between ranks."""
    states: str = "fp32"
    """Form of optimizer states at rest: "fp32", "bf16" or "compact"."""
    modules: Mapping[ModuleKey, str] = field(default_factory=dict, hash=False)
    """Other compute dtypes for some modules and all below them: {"*.router": "fp32", nn.LayerNorm: "fp32"}. The
    innermost module that a key matches decides; of several keys for one module, the last. See `plan/dtypes.py`."""
    buffers: Mapping[ModuleKey, str] = field(default_factory=dict, hash=False)
    """Dtypes of floating buffers: {"*.betas": "fp32", NoiseSchedule: "fp32"}. A pattern matches names of buffers, a
    class the modules that hold them; of several keys for one buffer the last counts. Others go with the parameters."""


STATE_FORMATS = {format.name.lower(): format for format in StateFormat}
TORCH_NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
NF4, NF4_DOUBLE, INT8, FP8 = QUANTIZATIONS = ("nf4", "nf4-double", "int8", "fp8")
"""4 bit (NormalFloat), the same with scales that are quantized too, 8 bit integers, 8 bit floats."""


def precision_problems(precision: object) -> Iterator[str]:
    """Problems of the setting, all at once."""
    if isinstance(precision, str):
        precision = Precision(compute=precision)
    if not isinstance(precision, Precision):
        yield f"precision={precision!r} is not a precision; use 'bf16', 'fp16', 'fp32' or a Precision"
        return
    if precision.compute not in tuple(TORCH_NAMES):
        yield f"precision {precision.compute!r} is unknown; use 'bf16', 'fp16' or 'fp32'"
    if precision.reduce not in tuple(TORCH_NAMES):
        yield f"Precision(reduce={precision.reduce!r}) is unknown; use 'fp32', 'bf16' or 'fp16'"
    if precision.states not in tuple(STATE_FORMATS):
        yield f"Precision(states={precision.states!r}) is unknown; use 'fp32', 'bf16' or 'compact'"
    yield from _check_dtypes("modules", precision.modules, "*.router")
    yield from _check_dtypes("buffers", precision.buffers, "*.betas")


def _check_dtypes(name: str, asked: object, example: str) -> Iterator[str]:
    if not isinstance(asked, Mapping) or not all(isinstance(key, str | type) for key in asked):
        yield f"Precision({name}={asked!r}) does not map patterns of names or classes; write {{{example!r}: 'fp32'}}"
        return
    for key, dtype in asked.items():
        if dtype not in tuple(TORCH_NAMES):
            yield f"Precision({name}=) has {dtype!r} for {key!r}, no compute dtype; use 'fp32', 'bf16' or 'fp16'"
