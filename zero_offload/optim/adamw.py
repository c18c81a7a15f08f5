"""AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101), for offloaded and for ordinary parameters.

Owns hyperparameters (param groups) and the states of ordinary parameters; the states of offloaded ones are
their runtime's. `step` captures hyperparameters by value, so that a scheduler may change them while the update
is still running.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw as torch_adamw

from zero_offload.abi import Rule
from zero_offload.errors import CheckpointError, ConfigError, ZeroOffloadError
from zero_offload.kernels.update import Segment, UpdateBuffers, fused_update
from zero_offload.shards.registry import AdamWHyper, Owner, owner_of


class AdamW(torch.optim.Optimizer):
    """AdamW with decoupled weight decay; the arguments mean what they mean in torch.optim.AdamW.

    On offloaded parameters the master is fp32 (bf16 compute: the bf16 half and a 16-bit residual) and the
    moments are fp32, wherever they rest. On ordinary CPU parameters it is a plain optimizer with one fused
    pass; bf16 parameters get an fp32 master by the same means, kept in `state`.

    Raises ConfigError for hyperparameters out of range and for amsgrad on offloaded parameters.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "amsgrad": amsgrad,
            "maximize": maximize,
        }
        if problems := list(_problems(defaults)):
            raise ConfigError("AdamW: " + "; ".join(problems))
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        problems = list(_problems(group))
        if group["amsgrad"] and any(owner_of(param) for param in group["params"]):
            problems.append("amsgrad is not offered for offloaded parameters; leave it False")
        if problems:
            self.param_groups.pop()
            raise ConfigError("AdamW: " + "; ".join(problems))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every parameter that has a gradient. Offloaded ones may still be updated after it returns."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        by_owner: dict[int, tuple[Owner, dict[nn.Parameter, AdamWHyper]]] = {}
        for group in self.param_groups:
            hyper = _hyper(group)
            for param in group["params"]:
                owner = owner_of(param)
                if owner is not None:
                    by_owner.setdefault(id(owner), (owner, {}))[1][param] = hyper
                elif param.grad is not None:
                    self._update_ordinary(param, hyper, group["amsgrad"])
        if by_owner and torch._C._current_graph_task_id() != -1:
            raise ZeroOffloadError(
                "a step inside of backward finds no gradients of offloaded parameters yet; call step after backward: "
                "gradients are taken off memory as they come, which is what stepping in hooks is for"
            )
        groups = [group_record(group) for group in self.param_groups] if by_owner else []
        for owner, hypers in by_owner.values():
            owner.update(hypers, groups)
        return loss

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """torch.amp.GradScaler asks before it steps: it would see no gradient of an offloaded parameter."""
        if any(owner_of(param) is not None for param in self._params()):
            raise ConfigError(
                "torch.amp.GradScaler cannot see the gradients of offloaded parameters; use zo.GradScaler, which takes "
                "the same calls"
            )
        return False

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop gradients that no step has consumed."""
        ordinary = []
        for param in self._params():
            owner = owner_of(param)
            if owner is not None:
                owner.access.write_grad(param, None)
            elif param.grad is not None:
                ordinary.append(param)
        for param in ordinary:
            if set_to_none:
                param.grad = None
            else:
                assert param.grad is not None
                param.grad.detach_().zero_()

    def state_dict(self) -> dict[str, Any]:
        """As torch.optim.AdamW's, states of offloaded parameters read from their tiers (one rank)."""
        state: dict[str, Any] = super().state_dict()
        for index, param in enumerate(self._params()):
            owner = owner_of(param)
            if owner is not None and (entry := owner.read_optimizer_state(param)):
                state["state"][index] = entry
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take a `state_dict`, this class's or torch.optim.AdamW's."""
        params = list(self._params())
        away = {i: owner for i, param in enumerate(params) if (owner := owner_of(param)) is not None}
        entries = state_dict["state"]
        mine = {key: value for key, value in entries.items() if key not in away}
        super().load_state_dict({**state_dict, "state": mine})
        for index, owner in away.items():
            if index in entries:
                owner.write_optimizer_state(params[index], entries[index])
        amsgrad = [group["amsgrad"] for group in self.param_groups for _ in group["params"]]
        for index in mine:
            if _has_kernel(params[index], amsgrad[index]):
                # torch has cast the states to the parameter's dtype; the kernel's are fp32.
                _restore_exact(params[index], self.state[params[index]], mine[index])

    def _params(self) -> Iterable[nn.Parameter]:
        return (param for group in self.param_groups for param in group["params"])

    def _update_ordinary(self, param: nn.Parameter, hyper: AdamWHyper, amsgrad: bool) -> None:
        grad, state = param.grad, self.state[param]
        assert grad is not None
        if grad.is_sparse:
            raise ConfigError("AdamW takes no sparse gradients; use torch.optim.SparseAdam for them")
        exact = _has_kernel(param, amsgrad)
        if not state:
            _init_state(param, state, exact=exact, amsgrad=amsgrad)
        if not exact:
            _torch_update(param, state, hyper, amsgrad)
            return
        state["step"] += 1
        if param.numel() == 0:
            return
        grad = grad.contiguous()
        buffers = UpdateBuffers(
            value=param.data_ptr(),
            residual=state["residual"].data_ptr() if "residual" in state else 0,
            master=0,
            states=(state["exp_avg"].data_ptr(), state["exp_avg_sq"].data_ptr()),
            grad=grad.data_ptr(),
            value_out=0,
            value_dtype=param.dtype,
            grad_dtype=grad.dtype,
        )
        segment = Segment(
            0,
            param.numel(),
            hyper.lr,
            hyper.beta1,
            hyper.beta2,
            hyper.eps,
            hyper.weight_decay,
            -1.0 if hyper.maximize else 1.0,
            int(state["step"]),
        )
        fused_update(Rule.ADAMW, buffers, [segment], torch.get_num_threads())
        torch.autograd.graph.increment_version(param)


def _problems(group: dict[str, Any]) -> Iterable[str]:
    if not float(group["lr"]) >= 0:
        yield f"lr={group['lr']} is negative; use 0 or more"
    for i, beta in enumerate(group["betas"]):
        if not 0 <= beta < 1:
            yield f"betas[{i}]={beta} is outside [0, 1)"
    for name in ("eps", "weight_decay"):
        if not group[name] >= 0:
            yield f"{name}={group[name]} is negative; use 0 or more"


def _hyper(group: dict[str, Any]) -> AdamWHyper:
    beta1, beta2 = group["betas"]
    return AdamWHyper(float(group["lr"]), beta1, beta2, group["eps"], group["weight_decay"], group["maximize"])


def group_record(group: Mapping[str, Any]) -> dict[str, Any]:
    """A param group as JSON values: hyperparameters, and the names of its parameters."""
    record: dict[str, Any] = {"params": [_name(param) for param in group["params"]]}
    for name, value in group.items():
        if name != "params":
            record[name] = value.item() if isinstance(value, Tensor) else value
    return record


def _name(param: nn.Parameter) -> str:
    owner = owner_of(param)
    return "(not offloaded)" if owner is None else owner.access.name_of(param)


def check_groups(optimizer: torch.optim.Optimizer, records: Sequence[Mapping[str, Any]], where: str) -> None:
    """Raise CheckpointError, naming the first difference, when a generation's groups are not those of `optimizer`."""
    here = [[_name(param) for param in group["params"]] for group in optimizer.param_groups]
    saved = [record.get("params") for record in records]
    counts = [len(names) if isinstance(names, list) else 0 for names in saved]
    if counts != [len(names) for names in here]:
        raise CheckpointError(
            f"{where} was written with param groups of {counts} parameters, this optimizer has "
            f"{[len(names) for names in here]}; build the optimizer with the same groups"
        )
    for number, (mine, theirs) in enumerate(zip(here, saved, strict=True)):
        for name, other in zip(mine, theirs or (), strict=True):
            if name != other:
                raise CheckpointError(
                    f"{where} has {other} in param group {number}, where this optimizer has {name}; "
                    "build the optimizer with the same groups in the same order"
                )


def restore_groups(optimizer: torch.optim.Optimizer, records: Sequence[Mapping[str, Any]], where: str) -> None:
    """Put a generation's hyperparameters into `optimizer`. Raises CheckpointError when its groups differ."""
    check_groups(optimizer, records, where)
    for group, record in zip(optimizer.param_groups, records, strict=True):
        for name, value in record.items():
            if name == "params":
                continue
            if isinstance(group.get(name), Tensor):
                group[name].fill_(value)
            else:
                group[name] = tuple(value) if isinstance(value, list) else value


def _has_kernel(param: nn.Parameter, amsgrad: bool) -> bool:
    """Whether the fused kernel updates this parameter; its moments are fp32 then."""
    plain = param.device.type == "cpu" and param.is_contiguous() and not amsgrad
    return plain and param.dtype in (torch.float32, torch.bfloat16)


def _restore_exact(param: nn.Parameter, state: dict[str, Any], entry: Mapping[str, Tensor]) -> None:
    """Take moments and residual bit for bit; torch's state dict has no residual: then the value is the master."""
    for name in ("exp_avg", "exp_avg_sq"):
        state[name] = entry[name].detach().to(torch.float32, copy=True).contiguous()
    if param.dtype == torch.bfloat16:
        residual = entry.get("residual")
        state["residual"] = torch.zeros_like(param, dtype=torch.int16) if residual is None else residual.clone()


def _init_state(param: nn.Parameter, state: dict[str, Any], *, exact: bool, amsgrad: bool) -> None:
    moments = torch.float32 if exact else param.dtype
    state["step"] = torch.tensor(0.0)
    for name in ("exp_avg", "exp_avg_sq") + (("max_exp_avg_sq",) if amsgrad else ()):
        state[name] = torch.zeros_like(param, dtype=moments)
    if exact and param.dtype == torch.bfloat16:
        state["residual"] = torch.zeros_like(param, dtype=torch.int16)


def _torch_update(param: nn.Parameter, state: dict[str, Any], hyper: AdamWHyper, amsgrad: bool) -> None:
    """Layouts and dtypes without a kernel of ours go torch's own way."""
    torch_adamw(
        [param],
        [param.grad],  # type: ignore[list-item]
        [state["exp_avg"]],
        [state["exp_avg_sq"]],
        [state["max_exp_avg_sq"]] if amsgrad else [],
        [state["step"]],
        amsgrad=amsgrad,
        beta1=hyper.beta1,
        beta2=hyper.beta2,
        lr=hyper.lr,
        weight_decay=hyper.weight_decay,
        eps=hyper.eps,
        maximize=hyper.maximize,
    )
