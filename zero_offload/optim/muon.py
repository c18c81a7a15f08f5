"""Muon: torch's for the matrices of hidden layers, the rule of our AdamW for the rest, in one optimizer.

Owns which parameters are which: each param group is of one kind. Its step is a plain one over whole parameters, by
torch's function and by the kernels of `AdamW`. `unitwise` lets it step offloaded parameters, and keeps its states.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim._muon import muon as torch_muon

from zero_offload.base.errors import ConfigError
from zero_offload.base.host import host_zeros
from zero_offload.base.problems import warn_user
from zero_offload.optim.optimizer import ArgumentError, steps_of, update_dense
from zero_offload.optim.optimizers import AdamW, adam_hyper
from zero_offload.optim.unitwise.grades import STEPS_MIN, Grade, Graded
from zero_offload.optim.unitwise.optimizer import let_step
from zero_offload.standins.owners import owner_of
from zero_offload.standins.sources import Owner

CALL = "zo.Muon"
USE_MUON = "use_muon"
"""The entry of a param group that says its kind."""
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of torch's Newton-Schulz iteration."""
ADAMW_ARGUMENTS = ("lr", "betas", "eps", "weight_decay", "amsgrad", "maximize")
EMBEDDINGS = frozenset({"wte", "wpe"})
"""Names of embeddings, beside those that have "embed" in them."""
OUTPUTS = frozenset(
    {
        *("lm_head", "head", "heads", "output", "output_layer", "embed_out", "proj_out"),
        *("classifier", "score", "qa_outputs", "v_head", "fc"),
    }
)
"""Names of output layers."""

GRADED = Graded(Grade.SEPARABLE, "products of whole matrices", STEPS_MIN, grown=1)
"""As `grade` finds it, which takes seconds of small products."""

Choice = Callable[[str, nn.Parameter], bool]
"""Of a name and a parameter: True for Muon."""


class Muon(torch.optim.Optimizer):
    """Muon (Jordan et al. 2024) for the matrices of hidden layers, AdamW for all else, over offloaded parameters.

        optimizer = zo.Muon(model.parameters(), lr=0.02, adamw={"lr": 3e-4})

    The arguments mean what they mean in torch.optim.Muon, and matrices get the bits of that. `adamw` has arguments of
    `zo.AdamW` for the rest, where they are not its own defaults: lr, betas, eps, weight_decay, amsgrad, maximize.

    AdamW steps each parameter of another shape, the weights of `nn.Embedding`, and output layers with what is tied to
    them. An output layer is what the model's `get_output_embeddings` returns, or has the name of one (lm_head, head,
    classifier), outside of numbered blocks. `use_muon(name, param)` decides on each matrix instead. In a param group
    the entry `use_muon` decides on all of it. Other groups are divided into two, which both get their entries.

    Weights of convolutions and stacked experts have more dimensions. torch's Muon takes matrices alone, so a warning
    names them, and AdamW steps them.

    It is an optimizer as `zo.unitwise` makes it: one object for schedulers, clipping, `zo.GradScaler`, commits and
    checkpoints. A step runs on whole fp32 masters and gradients, once per update, whatever the number of backwards.
    States are `momentum_buffer` of matrices, and `step`, `exp_avg` and `exp_avg_sq` of the rest, all fp32.

    Before `zo.offload` it is built for `zo.plan(optimizer=)` alone, of `model.named_parameters()`.

    Raises ConfigError where parameters are not offloaded, where none is a matrix, for arguments out of range, and
    where `zo.unitwise` does.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = COEFFICIENTS,
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        use_muon: Choice | None = None,
        adamw: Mapping[str, Any] | None = None,
    ) -> None:
        settings = {"lr": lr, "weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov}
        newton = {"ns_coefficients": ns_coefficients, "eps": eps, "ns_steps": ns_steps, "adjust_lr_fn": adjust_lr_fn}
        # Not an attribute that the optimizer's copies have: a choice may hold the model.
        self._zo_groups = _MuonGroups({**settings, **newton}, adamw or {}, use_muon)
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})
        params = [param for group in self.param_groups for param in group["params"]]
        if all(owner_of(param) is None for param in params):
            return  # for a plan
        if not any(group["params"] for group in self.param_groups if group[USE_MUON]):
            raise ConfigError(
                f"{CALL}: none of {len(params)} parameters is a matrix of a hidden layer. Embeddings, output layers "
                f"and vectors are AdamW's; use zo.AdamW, or name matrices: {CALL}([{{'params': matrices, "
                f"'{USE_MUON}': True}}, {{'params': others, '{USE_MUON}': False}}])"
            )
        let_step(CALL, self, known=GRADED)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, or two: of matrices and of the rest."""
        before = len(self.param_groups)
        try:
            for group in self._zo_groups.groups_of(param_group):
                super().add_param_group(group)
        except BaseException:
            del self.param_groups[before:]
            raise

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Step whole parameters that are plain tensors; `Unitwise.step` is that of the program."""
        if hasattr(self, "_zo_groups"):  # no copy of the program's object
            raise ConfigError(
                f"{CALL} was built before zo.offload, for a plan. It steps offloaded parameters: build it anew after "
                "zo.offload(model, config)"
            )
        for group in self.param_groups:
            params = [param for param in group["params"] if param.grad is not None]
            if group[USE_MUON]:
                self._step_matrices(params, group)
            else:
                self._step_rest(params, group)

    def _step_matrices(self, params: list[Tensor], group: Mapping[str, Any]) -> None:
        for param in params:
            if "momentum_buffer" not in self.state[param]:
                self.state[param]["momentum_buffer"] = torch.zeros_like(param)
        torch_muon(
            params,
            [param.grad for param in params if param.grad is not None],
            [self.state[param]["momentum_buffer"] for param in params],
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            momentum=group["momentum"],
            nesterov=group["nesterov"],
            ns_coefficients=group["ns_coefficients"],
            ns_steps=group["ns_steps"],
            eps=group["eps"],
            adjust_lr_fn=group["adjust_lr_fn"],
            has_complex=False,
        )

    def _step_rest(self, params: list[Tensor], group: Mapping[str, Any]) -> None:
        hyper = adam_hyper(group, is_decoupled=True)
        for param in params:
            state = self.state[param]
            state["step"] = steps_of(state) + 1
            for name in hyper.states:
                state[name] = _beside(param, state[name]) if name in state else torch.zeros_like(param)
            states = {name: _flat(state[name]) for name in hyper.states}
            if param.numel() and type(param.data) is Tensor:  # a plan has others, without memory
                update_dense(_flat(param), _flat(_beside(param, param.grad)), states, hyper, int(state["step"]))


def _beside(param: Tensor, values: Tensor | None) -> Tensor:
    """These values, or a copy of them, with the parameter's order of elements in memory."""
    assert values is not None
    return values if values.stride() == param.stride() else torch.empty_like(param).copy_(values)


def _flat(tensor: Tensor) -> Tensor:
    """(numel,) of the elements in their order in memory, which has no gaps."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


class _MuonGroups:
    """The two kinds of param groups: which parameters are of which, and the arguments of each."""

    def __init__(self, muon: Mapping[str, Any], adamw: Mapping[str, Any], choice: Choice | None) -> None:
        if unknown := [name for name in adamw if name not in ADAMW_ARGUMENTS]:
            raise ArgumentError(f"{CALL}(adamw=...) has {', '.join(unknown)}; use {', '.join(ADAMW_ARGUMENTS)}")
        self._choice = choice
        self._apart: dict[Owner, frozenset[int]] = {}
        """Of each model, ids of embeddings and output layers."""
        self._defaults = {True: dict(muon), False: dict(adamw)}
        self._defaults = {is_muon: self._completed(is_muon, {}) for is_muon in (True, False)}

    def _completed(self, is_muon: bool, given: Mapping[str, Any]) -> dict[str, Any]:
        """The arguments of a group, of which these are given. Raises ArgumentError for one out of range."""
        arguments = {**self._defaults[is_muon], **given}
        try:
            if is_muon:
                _check_newton(arguments)
                return dict(torch.optim.Muon([nn.Parameter(host_zeros((1, 1), torch.float32))], **arguments).defaults)
            found = AdamW([nn.Parameter(host_zeros(1, torch.float32))], **arguments).defaults
            return {name: found[name] for name in ADAMW_ARGUMENTS}
        except ConfigError as error:
            raise ArgumentError(f"{CALL}: {error}") from error
        except ValueError as error:
            raise ArgumentError(f"{CALL}: torch.optim.Muon: {error}") from error

    def groups_of(self, given: Mapping[str, Any]) -> list[dict[str, Any]]:
        """A param group by kind, matrices first, each with its arguments. Warns of what Muon passes over."""
        entries = {key: value for key, value in given.items() if key not in ("params", USE_MUON)}
        members: Any = given["params"]
        members = [members] if isinstance(members, Tensor) else members
        is_muon: bool | None = given.get(USE_MUON)
        if isinstance(members, set) or not (members := list(members)):  # torch has something to say of a set
            return [{**entries, **self._defaults[bool(is_muon)], "params": members, USE_MUON: bool(is_muon)}]
        if is_muon is not None:
            self._check_given(bool(is_muon), entries, members)
            return [self._group(bool(is_muon), entries, members)]
        parts: dict[bool, list[Any]] = {True: [], False: []}
        passed_over = []
        for member in members:
            name, param = _named(member)
            parts[self._is_muon(name, param)].append(member)
            if isinstance(param, nn.Parameter) and sum(length > 1 for length in param.shape) > 2:
                passed_over.append(name or _name_of(param))
        if passed_over:
            some = ", ".join(passed_over[:3]) + (", ..." if len(passed_over) > 3 else "")
            warn_user(
                f"{CALL}: {len(passed_over)} parameters of more than two dimensions are stepped by AdamW ({some}), "
                f"since torch's Muon takes matrices alone. A param group with '{USE_MUON}': False says so without a "
                "warning"
            )
        return [self._group(each, entries, own) for each, own in parts.items() if own]

    def _group(self, is_muon: bool, entries: Mapping[str, Any], members: list[Any]) -> dict[str, Any]:
        """A group with its arguments, of which `entries` may have some, and other entries."""
        arguments, others = self._defaults[is_muon], self._defaults[not is_muon]
        given = {name: value for name, value in entries.items() if name in arguments}
        further = {name: value for name, value in entries.items() if name not in {**arguments, **others}}
        return {**further, **self._completed(is_muon, given), "params": members, USE_MUON: is_muon}

    def _check_given(self, is_muon: bool, entries: Mapping[str, Any], members: list[Any]) -> None:
        """Raise for a group of one kind that has what only the other kind takes."""
        what, kind = f"{CALL}: a param group with {USE_MUON}={is_muon} has", "Muon" if is_muon else "AdamW"
        arguments, others = self._defaults[is_muon], self._defaults[not is_muon]
        if wrong := sorted(name for name in entries if name in others and name not in arguments):
            raise ArgumentError(f"{what} {', '.join(wrong)}, which {kind} does not; use {', '.join(arguments)}")
        for name, param in map(_named, members) if is_muon else ():
            if isinstance(param, nn.Parameter) and param.dim() != 2:
                raise ArgumentError(
                    f"{what} {name or _name_of(param)} of shape {tuple(param.shape)}, and torch's Muon takes matrices "
                    f"alone. Give it a group with {USE_MUON}=False, or leave {USE_MUON} out: the group is then divided"
                )

    def _is_muon(self, name: str, param: Any) -> bool:
        """Decide by the program's choice, or by itself."""
        if not isinstance(param, nn.Parameter) or param.dim() != 2 or not param.is_floating_point():
            return False
        if self._choice is not None:
            return bool(self._choice(name or _name_of(param), param))
        if (owner := owner_of(param)) is None:
            if not name:
                raise ConfigError(
                    f"{CALL} steps offloaded parameters, and one of shape {tuple(param.shape)} is not offloaded. Call "
                    f"zo.offload(model, config) first; for a plan give {CALL}(model.named_parameters())"
                )
            return not _is_apart(name)
        if owner not in self._apart:
            self._apart[owner] = frozenset(_apart_of(owner))
        return id(param) not in self._apart[owner]


def _check_newton(arguments: Mapping[str, Any]) -> None:
    """Raise for numbers that torch's Muon refuses in its first step."""
    steps, coefficients = arguments["ns_steps"], arguments["ns_coefficients"]
    if steps >= _NS_STEPS:
        raise ValueError(f"ns_steps={steps} is not below {_NS_STEPS}")
    if len(coefficients) != 3:
        raise ValueError(f"ns_coefficients={coefficients!r} are not 3 numbers")


_NS_STEPS = 100


def _named(member: Any) -> tuple[str, Any]:
    """A name, where the program has given one, and a parameter."""
    return member if isinstance(member, tuple) else ("", member)


def _name_of(param: nn.Parameter) -> str:
    owner = owner_of(param)
    return "a parameter" if owner is None else owner.places.name_of(param)


def _apart_of(owner: Owner) -> Iterator[int]:
    """Ids of parameters that are embeddings, or of output layers."""
    for root in owner.live_roots():
        for path, module in root.named_modules(remove_duplicate=False):
            output = None
            with suppress(Exception):  # models that have none raise what they like
                output = module.get_output_embeddings()
            if isinstance(output, nn.Module):
                yield from map(id, output.parameters())
            for name, param in module._parameters.items():
                if isinstance(module, nn.Embedding | nn.EmbeddingBag) or _is_apart(f"{path}.{name}"):
                    yield id(param)


def _is_apart(path: str) -> bool:
    """True for a name of an embedding or an output layer that stands in no numbered block."""
    for part in path.split("."):
        if part.isdigit():
            return False
        if "embed" in part or part in EMBEDDINGS or part in OUTPUTS:
            return True
    return False
