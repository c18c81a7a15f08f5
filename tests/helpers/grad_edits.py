"""Changes and looks of training code at `.grad` between backward and step, and a twin of plain tensors for them.

The twin of an offloaded model has an fp32 master and an fp32 gradient for each parameter. Hooks add
up there what each backward has made. The same edits run on both.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

import zero_offload as zo

Params = Sequence[nn.Parameter]
Edit = Callable[[Params], object]
"""Changes gradients, and returns what it has seen."""
NUM_ROWS = 4


def grad_of(param: nn.Parameter) -> Tensor:
    assert param.grad is not None
    return param.grad


def like(param: nn.Parameter, seed: int = 0) -> Tensor:
    """Noise of the parameter's shape, fp32, on its device, the same for a model and its twin."""
    grad = grad_of(param)
    return torch.randn(grad.shape, generator=torch.Generator().manual_seed(seed)).to(grad.device)


def matrices(params: Params) -> list[nn.Parameter]:
    return [param for param in params if param.dim() == 2]


def add_noise(params: Params) -> None:
    for param in params:
        grad_of(param).add_(like(param), alpha=0.1)


def take_signs(params: Params) -> None:
    for param in params:
        grad_of(param).sign_()


def mask(params: Params) -> None:
    for param in params:
        grad_of(param).mul_((like(param) > 0).float()).masked_fill_(like(param, 1) > 1, 0.25)


def set_rows(params: Params) -> None:
    for param in matrices(params):
        grad_of(param)[1:NUM_ROWS] = 0
        grad_of(param)[0].neg_()
        grad_of(param)[:, 1] += 2.0
        grad_of(param).index_fill_(0, torch.tensor([2], device=grad_of(param).device), 3.0)


def by_views(params: Params) -> None:
    for param in matrices(params):
        flat, turned = grad_of(param).view(-1), grad_of(param).t()
        flat[:3].fill_(1.5)
        turned[1].zero_()
        turned.detach().data[0].mul_(0.5)
        first, *_ = grad_of(param).unbind()
        first.add_(flat[: first.numel()])


def by_values(params: Params) -> None:
    for param in params:
        grad_of(param)[grad_of(param).abs() < 0.01] = 0
        torch.nan_to_num(grad_of(param), out=grad_of(param))


def centralize(params: Params) -> None:
    for param in matrices(params):
        grad_of(param).sub_(grad_of(param).mean(dim=1, keepdim=True))


def assign(params: Params) -> None:
    for param in params:
        param.grad = grad_of(param) * 0.5 + like(param)


def assign_data(params: Params) -> None:
    for param in params:
        grad_of(param).data = grad_of(param).data.clamp(-0.01, 0.02)


def assign_the_next(params: Params) -> None:
    first, *_, last = [param for param in params if param.dim() == 1]
    before = grad_of(first).clone()
    first.grad = grad_of(last).clone() if first.shape == last.shape else before * 2
    last.grad = before if first.shape == last.shape else None


def by_lists(params: Params) -> list[Tensor]:
    grads = [grad_of(param) for param in params]
    averages = [torch.zeros(grad.shape, device=grad.device) for grad in grads]
    torch._foreach_lerp_(averages, grads, 0.25)
    torch._foreach_add_(grads, averages, alpha=2.0)
    torch._foreach_mul_(grads, [like(param) for param in params])
    torch._foreach_addcmul_(grads, averages, averages, 0.5)
    torch._foreach_copy_(grads[:1], averages[:1])
    return [*averages, *torch._foreach_abs(grads)]


def project(params: Params) -> list[Tensor]:
    before = [grad_of(param).detach().clone() for param in params]
    others = [like(param) for param in params]
    for param in params:
        param.grad = None
    for param, each, other in zip(params, before, others, strict=True):
        param.grad = other
        dot = (grad_of(param) * each).sum()
        param.grad -= dot.clamp(max=0) / each.square().sum() * each
    return before


def keep_largest(params: Params) -> None:
    for param in params:
        flat = grad_of(param).flatten()
        grad_of(param)[grad_of(param).abs() < flat.abs().topk(flat.numel() // 2 + 1).values[-1]] = 0


def scale_rows(params: Params) -> None:
    for param in matrices(params):
        norms = grad_of(param).norm(dim=1, keepdim=True)
        grad_of(param).copy_(torch.where(norms > 0.01, grad_of(param) * (0.01 / norms), grad_of(param)))


def scale_and_add(params: Params) -> None:
    for param in params:
        grad_of(param).mul_(0.3)
        grad_of(param).add_(0.01)
        grad_of(param).mul_(torch.tensor(0.7)).div_(3)
        grad_of(param).clamp_(-0.02, 0.03)


def zero_and_add(params: Params) -> None:
    first, second, *_ = params
    grad_of(first).zero_()
    grad_of(first).add_(like(first))
    grad_of(second).zero_()
    grad_of(second).clamp_(min=0.5)


def look(params: Params) -> list[Tensor]:
    seen = []
    for param in params:
        grad = grad_of(param)
        assert grad.isfinite().all() and not grad.isnan().any() and grad.numel() == param.numel()
        seen += [
            grad.mean(),
            grad.std(unbiased=False),
            grad.abs().max(),
            (grad == 0).sum(),
            torch.histc(grad, 7, -1, 1),
        ]
        seen += [torch.tensor(grad.cpu().numpy()), torch.tensor(grad.tolist()), grad.half(), grad.double().norm()]
        seen += [grad.detach().cpu().clone(), grad + 1, 2 / (grad.square() + 1), grad.reshape(-1)[:3].sum()]
    seen.append(torch.cat([grad_of(param).flatten() for param in params]).norm())
    seen.append(nn.utils.parameters_to_vector(grad_of(param) for param in params))
    return seen


def take_copies(params: Params) -> list[Tensor]:
    grads = [grad_of(param) for param in params]
    torch.save(grads, file := io.BytesIO())
    file.seek(0)
    return [*copy.deepcopy(grads), *torch.load(file), *pickle.loads(pickle.dumps(grads[:2]))]


EDITS: dict[str, Edit] = {
    each.__name__: each
    for each in (
        *(add_noise, take_signs, mask, set_rows, by_views, by_values, centralize, assign, assign_data),
        *(assign_the_next, by_lists, project, keep_largest, scale_rows, scale_and_add, zero_and_add, look, take_copies),
    )
}
BY_ELEMENT = ("add_noise", "take_signs", "mask", "scale_and_add", "zero_and_add", "assign")
"""Those that ranks run without each other, where they divide gradients."""


class Twin:
    """Plain tensors for a model that is offloaded already."""

    def __init__(self, model: nn.Module, masters: dict[str, Tensor]) -> None:
        self.params = [nn.Parameter(master.clone()) for master in masters.values()]
        self.names = list(masters)
        by_name = dict(model.named_parameters())
        for name, param in zip(masters, self.params, strict=True):
            by_name[name].register_post_accumulate_grad_hook(lambda made, of=param: self._add(of, made))

    def _add(self, param: nn.Parameter, made: nn.Parameter) -> None:
        grad = grad_of(made).detach().to("cpu", torch.float32, copy=True)
        param.grad = grad if param.grad is None else param.grad + grad

    def step(self, kind: type[zo.AdamW] | type[zo.SGD] = zo.SGD) -> dict[str, Tensor]:
        kind(self.params, lr=0.5).step()
        return {name: param.detach() for name, param in zip(self.names, self.params, strict=True)}


def same(found: object, expected: object) -> bool:
    """True if two edits have seen the same."""
    if not isinstance(found, list) or not isinstance(expected, list):
        return found is expected is None
    return len(found) == len(expected) and all(
        type(one) is Tensor and one.dtype == other.dtype and torch.equal(one.cpu(), other)
        for one, other in zip(found, expected, strict=True)
    )
