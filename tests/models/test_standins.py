"""The class of a function comes from its schema, and nothing unknown is taken for a read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import handle_torch_function, has_torch_function_unary

import zero_offload as zo
from zero_offload.standins.operations import Kind, changed_by, kind_of, metadata

_data: Any = Tensor.data
KINDS: dict[Any, Kind] = {
    Tensor.size: Kind.METADATA,
    Tensor.data_ptr: Kind.ADDRESS,
    Tensor.view: Kind.VIEW,
    torch.ops.aten.t.default: Kind.VIEW,
    torch.add: Kind.READ,
    torch.sort: Kind.READ,
    F.linear: Kind.READ,
    Tensor.retain_grad: Kind.READ,
    Tensor.add_: Kind.WRITE,
    Tensor.__iadd__: Kind.WRITE,
    Tensor.__setitem__: Kind.WRITE,
    _data.__set__: Kind.WRITE,
    nn.init.normal_: Kind.WRITE,
    torch._fused_adamw_: Kind.WRITE,
    torch.fused_moving_avg_obs_fake_quant: Kind.WRITE,
    torch.ops.higher_order.cond: Kind.UNKNOWN,
}


# Not by `str`: it has addresses, which differ between workers.
@pytest.mark.parametrize("func", KINDS, ids=lambda func: getattr(func, "__qualname__", str(func)))
def test_the_class_of_a_function(func: Any) -> None:
    assert kind_of(func) is KINDS[func]


def test_the_schema_says_which_arguments_change() -> None:
    tensors = [torch.ones(1) for _ in range(7)]
    observed = changed_by(torch.fused_moving_avg_obs_fake_quant, tuple(tensors), {})
    assert [id(each) for each in observed if each is not None] == [id(each) for each in tensors[3:7]]
    assert changed_by(torch.add, tuple(tensors[:2]), {"out": tensors[2]})[-1] is tensors[2]
    assert changed_by(Tensor.mul_, (), {"self": tensors[0], "other": 2})[0] is tensors[0]


class Probe(Tensor):
    """It has no memory, and no operator."""

    __torch_function__: Any = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise AssertionError(f"{func} is an operator")


def test_metadata_takes_no_operator() -> None:
    probe = Tensor._make_wrapper_subclass(Probe, torch.Size([2, 3]), dtype=torch.float32)
    assert len(metadata()) > 30
    for func in metadata():
        assert not isinstance(func(probe), Tensor)


@pytest.fixture(scope="module")
def own_operator() -> Iterator[Any]:
    """An operator of another package, whose writes torch does not count."""
    library = torch.library.Library("standins_of_tests", "DEF")  # noqa: TOR901
    library.define("raised(Tensor x, Tensor(a!) to) -> ()")

    def raised(x: Tensor, to: Tensor) -> None:
        to.numpy()[:] += 1

    library.impl("raised", raised, "CPU")
    yield torch.ops.standins_of_tests.raised
    library._destroy()


def doubled(x: Tensor) -> Tensor:
    """A function of another package that shows itself to tensor classes."""
    if has_torch_function_unary(x):
        return handle_torch_function(doubled, (x,), x)  # type: ignore[no-any-return]
    return x.mul_(2)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(4.0))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


def trained() -> tuple[Net, zo.AdamW]:
    model = zo.offload(Net(), zo.OffloadConfig(params="cpu", optimizer="cpu", precision="fp32"))
    optimizer = zo.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    return model, optimizer


def values(model: Net) -> list[float]:
    found: list[float] = model.state_dict()["weight"].tolist()
    return found


CHANGES: dict[str, Callable[[Tensor, Any], Any]] = {
    "an operator of others": lambda p, own: own(torch.ones(1), p),
    "its overload": lambda p, own: own.default(torch.ones(1), p),
    "a function of others": lambda p, _: doubled(p),
    "in place by an argument": lambda p, _: F.relu(p, inplace=True),
    "rows that are too long": lambda p, _: F.embedding(torch.tensor([0]), p.view(1, 4), max_norm=0.5),
    "a fused update": lambda p, _: torch._fused_adagrad_(
        [p.detach()],
        [torch.ones(4)],
        [torch.ones(4)],
        [torch.ones(())],
        lr=0.1,
        lr_decay=0.0,
        weight_decay=0.0,
        eps=0.0,
        maximize=False,
    ),
}


@pytest.mark.parametrize("is_gathered", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_a_readable_parameter_is_changed_where_it_rests(change: str, is_gathered: bool, own_operator: Any) -> None:
    model, _ = trained()
    before = torch.tensor(values(model))
    # Nothing says that a function of another package changes no memory past operators.
    is_refused = change == "a function of others"
    raises = pytest.raises(zo.ZeroOffloadError, match=r"parameter weight.*zo\.gathered")
    with zo.gathered(model) if is_gathered else nullcontext(), torch.no_grad():
        with raises if is_refused else nullcontext():
            CHANGES[change](model.weight, own_operator)
        if not is_refused:
            CHANGES[change](before, own_operator)
    assert values(model) == before.tolist()


def test_a_function_of_others_reads_a_readable_parameter() -> None:
    def total(x: Tensor) -> Tensor:
        return handle_torch_function(total, (x,), x) if has_torch_function_unary(x) else x.sum()  # type: ignore[no-any-return]

    model, _ = trained()
    assert total(model.weight).item() == torch.tensor(values(model)).sum().item()


def test_a_write_that_torch_does_not_count_reaches_the_values_at_rest(own_operator: Any) -> None:
    model, optimizer = trained()
    state = optimizer.state[model.weight]["exp_avg"]
    expected = (state.clone() + 1).tolist()
    own_operator(torch.ones(1), state)
    assert optimizer.state[model.weight]["exp_avg"].tolist() == expected
    weight = model.state_dict()["weight"]
    expected = (weight.clone() + 1).tolist()
    own_operator(torch.ones(1), weight)
    assert values(model) == expected


def test_unknown_functions_are_refused() -> None:
    model, optimizer = trained()
    state, copied = optimizer.state[model.weight]["exp_avg"], model.state_dict()["weight"]
    for each, what in ((state, "exp_avg of weight"), (copied, r"state_dict\(\), of parameter weight")):
        with pytest.raises(zo.ZeroOffloadError, match=rf"doubled is not torch's and has no schema.*{what}.*clone"):
            doubled(each)
    assert doubled(copied.clone()).tolist() == [2 * each for each in values(model)]


def test_an_operator_of_others_changes_a_gradient(own_operator: Any, nvme: Path) -> None:
    model = zo.offload(
        Net(), zo.OffloadConfig(params="cpu", optimizer="cpu", grads="nvme", precision="fp32", nvme=nvme)
    )
    zo.AdamW(model.parameters())
    model(torch.ones(4)).sum().backward()
    grad = model.weight.grad
    assert grad is not None
    own_operator(torch.ones(1), grad)
    doubled(grad)
    assert grad.tolist() == [4.0] * 4
    assert grad.norm().item() == 8.0
