"""Bytes of an optimizer's states before there are any: steps of tensors without memory, one of each shape.

`state_sizes` copies an optimizer over parameters of the program's shapes, fake ones, and lets its own step make their
states. The same steps of small parameters, with memory and without, must make states of the same size. Else nothing is
known, and the result says why. Numbers that a step reads from tensors are 1 there, which the comparison covers.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from zero_offload.base.errors import ConfigError
from zero_offload.optim.unitwise.optimizer_copies import Constant, plain_step
from zero_offload.optim.unitwise.state_rows import packages_of, packed_bytes
from zero_offload.optim.unitwise.trials import (
    Tiny,
    begun_states,
    copy_over,
    random_state,
    set_random_state,
    shapes_of,
)

_STEPS = 3
"""The first step of some classes makes other states than the next ones."""


@dataclass(frozen=True)
class StateSizes:
    """Bytes of the row of each parameter's state."""

    nbytes: Mapping[Tensor, int]
    """By parameter; 0 where it has no state. Empty where nothing is known."""
    unknown: str = ""
    """Why nothing is known."""


def state_sizes(optimizer: torch.optim.Optimizer, *, kind: type[Any] | None = None) -> StateSizes:
    """Learn the bytes of states of an optimizer, whose parameters may be of any kind. It is not stepped."""
    kind = type(optimizer) if kind is None else kind
    found: dict[tuple[int, torch.Size], Tensor] = {}
    places = [(number, param) for number, group in enumerate(optimizer.param_groups) for param in group["params"]]
    for number, param in places:
        found.setdefault((number, param.shape), param)
    whole = [Tiny(param, number, tuple(shape)) for (number, shape), param in found.items()]
    small = {(number, len(shape)): param for (number, shape), param in found.items()}
    tinies = [Tiny(param, number, shape) for (number, dims), param in small.items() for shape in shapes_of(dims)[:2]]
    begun = random_state()
    try:
        real, fake = _stepped(optimizer, kind, tinies, is_fake=False), _stepped(optimizer, kind, tinies, is_fake=True)
        if real != fake:
            at = next(at for at, pair in enumerate(zip(real, fake, strict=True)) if pair[0] != pair[1])
            return StateSizes({}, f"of shape {tinies[at].shape} it has {real[at]} bytes, and without memory {fake[at]}")
        sizes = dict(zip(found, _stepped(optimizer, kind, whole, is_fake=True), strict=True))
    except Exception as error:  # the optimizer's own code
        return StateSizes({}, f"a step without memory fails ({type(error).__name__}: {error})".split("\n")[0])
    finally:
        set_random_state(begun)
    return StateSizes({param: sizes[number, param.shape] for number, param in places})


def _stepped(optimizer: torch.optim.Optimizer, kind: type[Any], tinies: Sequence[Tiny], *, is_fake: bool) -> list[int]:
    """Bytes of states after steps of parameters of these shapes. Each is alone in a copy: some classes know parameters
    by addresses, and fake ones have none."""
    return [_stepped_alone(optimizer, kind, tiny, is_fake=is_fake) for tiny in tinies]


def _stepped_alone(optimizer: torch.optim.Optimizer, kind: type[Any], tiny: Tiny, *, is_fake: bool) -> int:
    # Copies are made before: a mode would make fake what belongs to the optimizer.
    stand_in = nn.Parameter(torch.empty(0, dtype=torch.float32, device="cpu"))
    made = copy_over(optimizer, kind, [tiny], [stand_in])
    begun = begun_states(optimizer, kind, [tiny], [torch.Size(tiny.shape)])
    with contextlib.ExitStack() as modes:
        # Code that is compiled for other tensors would not see the modes.
        modes.enter_context(torch.compiler.set_stance("force_eager"))
        if is_fake:
            modes.enter_context(_quiet())
            modes.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
            modes.enter_context(cast(Any, _FakeNumbers)())
            modes.enter_context(_NoAddresses(packages_of(kind)))
        param = nn.Parameter(torch.full(tiny.shape, 0.5, dtype=torch.float32, device="cpu"))
        vars(param).update(vars(stand_in))
        made.param_groups[0]["params"] = [param]
        if begun:
            made.state[param] = _copied(begun[0])
        for number in range(_STEPS):
            param.grad = torch.randn_like(param) * (number + 1)
            plain_step(kind)(made)
        state = made.state.get(param)
        return packed_bytes(state) if state else 0


_KEYED_BY_ADDRESS = frozenset({"heavyball"})
"""Packages that know parameters by addresses, and give them to no other code."""


class _NoAddresses(TorchFunctionMode):
    """Raises where code asks for the address of a fake tensor: that is 0, which a function in C would write to."""

    def __init__(self, packages: frozenset[str]) -> None:
        super().__init__()
        self._lets = not packages.isdisjoint(_KEYED_BY_ADDRESS)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.data_ptr and isinstance(args[0], FakeTensor) and not self._lets:
            raise RuntimeError("it gives the address of a tensor to other code")
        return func(*args, **kwargs or {})


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Fake tensors log each error that they raise."""
    logger = logging.getLogger(FakeTensorMode.__module__)
    was, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = was


def _copied(state: Any) -> Any:
    """A state that a constructor made, of the tensors that the mode makes."""
    if isinstance(state, Mapping):
        return {key: _copied(value) for key, value in state.items()}
    if isinstance(state, Constant):
        return torch.empty(state.shape, dtype=state.value.dtype, device="cpu").fill_(state.value.item())
    if isinstance(state, Tensor):
        if state.numel() > 1:
            raise ConfigError(f"a state of shape {tuple(state.shape)} is there before the first step")
        return torch.full(tuple(state.shape), state.item(), dtype=state.dtype, device="cpu")
    return state


class _FakeNumbers(TorchDispatchMode):
    """Numbers that code reads from fake tensors: 1, and True."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        try:
            return func(*args, **kwargs or {})
        except DataDependentOutputException:
            if func is not torch.ops.aten._local_scalar_dense.default:
                raise
            return 1.0 if args[0].is_floating_point() else args[0].dtype is torch.bool or 1
