"""Checks of a family: training, tiers, generation, folders and plans of an offloaded tiny model.

A check returns what it has found: `HOLDS`, `LEFT_OUT`, or the first difference in words. Errors of the plain model
begin with "plain: ".
"""

from __future__ import annotations

import copy
import functools
import inspect
import random
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy
import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import zero_offload as zo
from tests.helpers.reference import placed, read_masters
from tests.zoo.families import TRANSFORMERS, Family
from tests.zoo.inputs import Inputs, loss_of
from tests.zoo.libraries import LIBRARIES, Library
from zero_offload.model.first_forward import DtypeWatch, give_dtypes
from zero_offload.model.without_memory import without_memory
from zero_offload.plan.dtypes import resolve

STEPS = 4
MOST_PARAMS = 9_000_000
HOLDS = "holds"
LEFT_OUT = "-"
"""The class has no such thing."""


class NotTrainedError(Exception):
    """No plain model of the family trains here; the message says why, and `errors` for each way of inputs."""

    def __init__(self, message: str, errors: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.errors = errors


@dataclass(frozen=True)
class Subject:
    """A family whose plain model trains on the inputs of one way."""

    family: Family
    way: int
    fed: str
    own_loss: bool
    refused: str
    """Error of the first way that the model did not take, if there is one."""
    params: int

    def build(self) -> Any:
        return build(self.family)

    @property
    def library(self) -> Library:
        return LIBRARIES[self.family.library]

    def batch(self, step: int) -> Inputs:
        """Of a plain model: some inputs are made by calls of it."""
        return copy.deepcopy(_batches(self)[step])


def build(family: Family) -> Any:
    """A tiny model in training mode, always with the same values."""
    seed_all(0)
    return LIBRARIES[family.library].build(family).train()


@functools.cache
def _batches(subject: Subject) -> list[Inputs]:
    model = subject.build()
    ways = [[*subject.library.ways(subject.family, model, step)][subject.way][1] for step in range(STEPS)]
    return [make() for make in ways]


def seed_all(seed: int) -> None:
    """Dropout, layers that are left out, and masks of sounds, which numpy draws."""
    torch.manual_seed(seed)
    random.seed(seed)
    numpy.random.seed(seed)


@functools.cache
def find(family: Family) -> Subject:
    """Raises NotTrainedError where the class is not built, or takes no inputs."""
    try:
        library = LIBRARIES[family.library]
        with torch.device("meta"):
            count = sum(param.numel() for param in library.build(family).parameters())
        if count > MOST_PARAMS:
            raise ValueError(f"it has {count} parameters, and the zoo's most is {MOST_PARAMS}")
        model = build(family)
    except Exception as error:
        raise NotTrainedError(f"not built: {said(error)}") from error
    errors = []
    for way, (fed, make) in enumerate(library.ways(family, model, 0)):
        try:
            seed_all(0)
            outputs = model(**make())
            loss = loss_of(outputs)
            loss.backward()
            if not torch.isfinite(loss):
                raise ValueError(f"the loss is {loss.item()}")
            own = isinstance(outputs, Mapping) and outputs.get("loss") is not None
            return Subject(family, way, fed, own, errors[0] if errors else "", count)
        except Exception as error:
            errors.append(f"{fed}: {said(error)}")
        model.zero_grad()
    first = errors[0] if errors else "nothing known is in the signature of forward"
    raise NotTrainedError(f"not fed: {first}", errors)


def said(error: BaseException) -> str:
    """One line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]


# Training


def train(subject: Subject, model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
    losses = []
    for step in range(STEPS):
        inputs = subject.batch(step)
        seed_all(step)
        loss = loss_of(model(**inputs))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def optimizer_of(model: nn.Module) -> zo.AdamW:
    return zo.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-3)


def state_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in model.named_parameters()} | dict(model.named_buffers())


def masters_of(model: nn.Module) -> dict[str, Tensor]:
    return read_masters(model) | dict(model.named_buffers())


def difference(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> str | None:
    """The first one, in words."""
    if missing := [name for name in expected if name not in found]:
        return f"{len(missing)} missing, the first {missing[0]}"
    if more := [name for name in found if name not in expected]:
        return f"{len(more)} too many, the first {more[0]}"
    for name, values in expected.items():
        if found[name].dtype != values.dtype or found[name].shape != values.shape:
            return f"{name} is {found[name].dtype} {tuple(found[name].shape)}, not {values.dtype} {tuple(values.shape)}"
        if not torch.equal(found[name], values) and not equal_with_nan(found[name], values):
            return f"{name} differs by {(found[name].double() - values.double()).abs().max().item():.3g}"
    return None


def equal_with_nan(found: Tensor, expected: Tensor) -> bool:
    return found.is_floating_point() and torch.equal(found.nan_to_num(0.5), expected.nan_to_num(0.5))


def compared(losses: tuple[list[float], list[float]], states: tuple[dict[str, Tensor], dict[str, Tensor]]) -> str:
    if losses[0] != losses[1]:
        step = next(i for i in range(STEPS) if losses[0][i] != losses[1][i])
        return f"loss of step {step} is {losses[0][step]!r}, not {losses[1][step]!r}"
    return difference(*states) or HOLDS


# Checks: what is found, in words


def inputs(subject: Subject, folder: Path) -> str:
    """Whether a model of images or sounds has some, and not text alone."""
    takes = {*inspect.signature(subject.build().forward).parameters}
    is_blind = subject.fed == "text" and bool(takes & {"pixel_values", "input_features", "input_values"})
    return f"text alone: {subject.refused}" if is_blind else HOLDS


def steps(subject: Subject, folder: Path) -> str:
    """Losses, parameters and buffers are those of the plain model, all on drives, fp32."""
    plain, model = subject.build(), zo.offload(subject.build(), on(subject, "nvme", "fp32", folder))
    try:
        expected, found = (train(subject, each, optimizer_of(each)) for each in (plain, model))
        result = compared((found, expected), (masters_of(model), state_of(plain)))
    finally:
        zo.close(model)
    again = subject.build()
    if result != HOLDS and train(subject, again, optimizer_of(again)) != expected:
        return "plain: two runs differ"
    return result


def bf16(subject: Subject, folder: Path) -> str:
    """Drives against memory."""
    results = []
    for tier in ("cpu", "nvme"):
        model = zo.offload(subject.build(), on(subject, tier, "bf16", folder / tier))
        try:
            results.append((train(subject, model, optimizer_of(model)), masters_of(model)))
        except RuntimeError:
            if (error := error_in_bf16(subject)) is not None:
                return f"plain: {error}"
            raise
        finally:
            zo.close(model)
    (cpu, expected), (nvme, found) = results
    return compared((nvme, cpu), (found, expected))


def error_in_bf16(subject: Subject) -> str | None:
    """Of a plain model in bf16."""
    try:
        first_loss(subject, subject.build().to(torch.bfloat16))
    except RuntimeError as error:
        return said(error)
    return None


def generate(subject: Subject, folder: Path) -> str:
    """Greedy, of the inputs of the first step without labels, parameters on drives."""
    plain = subject.build().eval()
    if not callable(getattr(plain, "can_generate", None)) or not plain.can_generate():
        return LEFT_OUT
    made = subject.batch(0)
    inputs = {key: value for key, value in made.items() if key not in ("labels", "return_loss")}
    options = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False, "num_beams": 1}
    try:
        expected = tokens_of(plain, inputs | options)
    except Exception as error:
        return f"plain: {said(error)}"
    model = zo.offload(subject.build().eval(), on(subject, "nvme", "fp32", folder))
    try:
        found = tokens_of(model, inputs | options)
    finally:
        zo.close(model)
    return HOLDS if torch.equal(found, expected) else f"{found.tolist()}, not {expected.tolist()}"


def tokens_of(model: Any, options: Mapping[str, Any]) -> Tensor:
    seed_all(0)
    made = model.generate(**options)
    return getattr(made, "sequences", made)  # type: ignore[no-any-return]


def export(subject: Subject, folder: Path) -> str:
    """Names and values that the library writes of the plain model, and what it reads of ours."""
    plain, model = subject.build(), zo.offload(subject.build(), on(subject, "nvme", "fp32", folder / "run"))
    try:
        for each in (plain, model):
            train(subject, each, optimizer_of(each))
        try:
            subject.library.save(plain, folder / "plain")
            expected = subject.library.read(subject.family, folder / "plain")
        except Exception as error:
            return f"plain: {said(error)}"
        zo.export_pretrained(model, folder / "exported")
    finally:
        zo.close(model)
    if (found := difference(tensors_in(folder / "exported"), tensors_in(folder / "plain"))) is not None:
        return f"files: {found}"
    loaded = subject.library.read(subject.family, folder / "exported")
    return difference(state_of(loaded), state_of(expected)) or HOLDS


def tensors_in(folder: Path) -> dict[str, Tensor]:
    found = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return found


def load(subject: Subject, folder: Path) -> str:
    """The library's own folder, by a deferred model: parameters as the library reads them."""
    plain = subject.build()
    try:
        subject.library.save(plain, folder / "plain")
        expected = subject.library.read(subject.family, folder / "plain")
    except Exception as error:
        return f"plain: {said(error)}"
    with zo.deferred_init(values="skip"):
        model = subject.build()
    zo.load_pretrained(model, folder / "plain")
    zo.offload(model, on(subject, "nvme", "fp32", folder / "run"))
    try:
        return difference(read_masters(model), dict(expected.named_parameters())) or HOLDS
    finally:
        zo.close(model)


def kept(subject: Subject, folder: Path) -> str:
    """A folder in bf16. Of a class that keeps some in fp32, dtypes and the first loss are those of `from_pretrained`.
    Parameters that the class freezes are frozen."""
    fresh = subject.build()
    is_of_transformers = subject.family.library == TRANSFORMERS
    keeps = is_of_transformers and bool(fresh._keep_in_fp32_modules or fresh._keep_in_fp32_modules_strict)
    flags = {name: param.requires_grad for name, param in fresh.named_parameters()}
    if not keeps and all(flags.values()):
        return LEFT_OUT
    fresh.to(torch.bfloat16).save_pretrained(folder / "plain")
    with zo.deferred_init(values="skip"):
        model = subject.build()
    zo.load_pretrained(model, folder / "plain")
    zo.offload(model, on(subject, "nvme", "bf16", folder / "run"))
    try:
        if {name: param.requires_grad for name, param in model.named_parameters()} != flags:
            return "other parameters are frozen"
        if not keeps:
            return HOLDS
        plain = type(fresh).from_pretrained(folder / "plain", dtype=torch.bfloat16).train()
        found, expected = (
            {name: each.dtype for name, each in state_of(each).items() if each.is_floating_point()}
            for each in (model, plain)
        )
        for name, dtype in found.items():
            if dtype != expected[name]:
                return f"{name} is {dtype}, not {expected[name]}"
        losses = first_loss(subject, model), first_loss(subject, plain)
        return HOLDS if losses[0] == losses[1] else f"loss is {losses[0]!r}, not {losses[1]!r}"
    finally:
        zo.close(model)


def first_loss(subject: Subject, model: nn.Module) -> float:
    """In bf16, with its backward."""
    inputs = in_bf16(subject.batch(0))
    seed_all(0)
    loss = loss_of(model(**inputs))
    loss.backward()
    return loss.item()


def in_bf16(inputs: Inputs) -> Inputs:
    return {
        name: value.bfloat16() if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in inputs.items()
    }


def dtypes(subject: Subject, folder: Path) -> str:
    """A first forward without memory raises for floats of two dtypes where the real one does, and nowhere else."""
    precisions = [zo.Precision()]
    if any(buffer.is_floating_point() for buffer in subject.build().buffers()):
        precisions.append(zo.Precision(buffers={"*": "fp32"}))
    for precision in precisions:
        config = zo.OffloadConfig(precision=precision)
        found = error_without_memory(subject, config)
        if found is None:
            return LEFT_OUT
        real = with_memory(subject, zo.offload(subject.build(), config))
        if bool(found) != bool(real):
            return f"{found or 'no error'} without memory, {real or 'no error'} with it"
    return HOLDS


def error_without_memory(subject: Subject, config: zo.OffloadConfig) -> str | None:
    """The error about dtypes, empty without one; None where the class cannot run without memory."""
    inputs = subject.batch(0)
    try:
        with torch.device("meta"):
            model = subject.library.build(subject.family).train()
        wanted = resolve(model, config)
        give_dtypes(model, wanted)
        with without_memory(model):
            watch = DtypeWatch(model, wanted.compute)
            with Answers(), watch, watch.names():
                loss_of(model(**inputs)).backward()
    except zo.ConfigError as error:
        return said(error)
    except Exception:
        return None
    return ""


class Answers(TorchDispatchMode):
    """A value where a model asks for one, such as whether there is padding, and whether a layer is left out."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten._local_scalar_dense.default:
            return func(*args, **(kwargs or {}))
        return {torch.bool: False}.get(args[0].dtype, 0.5 if args[0].is_floating_point() else 1)


def with_memory(subject: Subject, model: nn.Module) -> str:
    """The error about dtypes, empty without one."""
    try:
        loss_of(model(**subject.batch(0))).backward()
    except (RuntimeError, IndexError) as error:
        return said(error) if re.search("dtype|scalar type|Input type", str(error)) else ""
    finally:
        zo.close(model)
    return ""


def plan(subject: Subject, folder: Path) -> str:
    """Bytes of the model without memory are those of the model itself."""
    with zo.deferred_init():
        deferred = subject.build()
    config = on(subject, "nvme", "fp32", folder)
    found, expected = (dict(zo.plan(model, config).rest_bytes) for model in (deferred, subject.build()))
    return HOLDS if found == expected else f"{found} without memory, {expected} with it"


def on(subject: Subject, tier: str, precision: str, folder: Path) -> zo.OffloadConfig:
    """The larger ones may use all of their units at once."""
    room = f"{8 + subject.params * 8 // 2**20}MiB"
    return placed(precision, (tier,) * 3, folder / "nvme", room)


CHECKS: Mapping[str, Callable[[Subject, Path], str]] = {
    "inputs": inputs,
    "steps": steps,
    "bf16": bf16,
    "generate": generate,
    "load": load,
    "export": export,
    "kept": kept,
    "dtypes": dtypes,
    "plan": plan,
}


def outcome(name: str, subject: Subject, folder: Path) -> str:
    """An error is an outcome, too."""
    try:
        return CHECKS[name](subject, folder)
    except Exception as error:
        return said(error)
