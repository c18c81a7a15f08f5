"""A deferred build is a plain build: the same values, buffers, names, ties and random numbers; else it is an error."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations

import zero_offload as zo
from tests.helpers.deferred import ODDITIES, Bag, built, kept, made_values, modules
from zero_offload.model.deferred import recorder
from zero_offload.model.deferred.recorder import current_recorder

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")


def _same(found: Tensor, expected: Tensor) -> bool:
    return found.dtype == expected.dtype and torch.equal(found, expected.detach())


@pytest.mark.parametrize("kept_bytes", [0, recorder.KEPT_BYTES], ids=["dropped", "kept"])
@pytest.mark.parametrize("fill", ODDITIES, ids=lambda fill: fill.__name__)
def test_values(fill: Callable[[Any], None], kept_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "KEPT_BYTES", kept_bytes)
    plain, state = built(lambda: Bag(fill), deferred=False)
    model, deferred_state = built(lambda: Bag(fill), deferred=True)
    assert torch.equal(state, deferred_state)
    values = made_values(model)
    assert torch.equal(state, torch.get_rng_state()), "making values draws from the generator"
    assert list(values) == [name for name, _ in plain.named_parameters()]
    assert [name for name, param in plain.named_parameters() if not _same(values[name], param)] == []
    flags = [(n, p.requires_grad) for n, p in plain.named_parameters(remove_duplicate=False)]
    assert [(n, p.requires_grad) for n, p in model.named_parameters(remove_duplicate=False)] == flags
    buffers = dict(model.named_buffers())
    assert list(buffers) == [name for name, _ in plain.named_buffers()]
    assert [name for name, buffer in plain.named_buffers() if not _same(buffers[name], buffer)] == []
    again = made_values(model)
    assert all(torch.equal(again[name], values[name]) for name in values)


def test_ties() -> None:
    model, _ = built(lambda: Bag(kept), deferred=True)
    assert model.p is model.q and model.r is not model.p


def test_a_plain_tensor_is_plain() -> None:
    with zo.deferred_init():
        linear = nn.Linear(3, 3)
        table = torch.zeros(4)
        norm = linear.weight.norm()
    assert type(table) is Tensor and not table.is_meta and not norm.is_meta
    assert not nn.Linear(2, 2).weight.is_meta, "the context is over"


# Questions about a deferred model


def test_questions_are_answered() -> None:
    with zo.deferred_init():
        linear = nn.Linear(3, 4)
    weight = linear.weight
    assert isinstance(weight, nn.Parameter) and weight.device.type == "cpu" and weight.is_meta
    assert (weight.shape, weight.numel(), weight.dtype) == ((4, 3), 12, torch.float32)
    assert "deferred" in repr(weight)
    linear.requires_grad_(False)
    assert not weight.requires_grad


@pytest.mark.parametrize(
    "use",
    [
        lambda linear: linear(torch.ones(2, 3)),
        lambda linear: linear.state_dict(),
        lambda linear: linear.load_state_dict(nn.Linear(3, 4).state_dict()),
        lambda linear: linear.weight.data.abs(),
        lambda linear: setattr(linear.weight, "data", torch.ones(4, 3)),
        lambda linear: linear.weight[0],
        lambda linear: linear.weight.normal_(),
        lambda linear: linear.to(torch.bfloat16),
        lambda linear: linear.weight.grad,
        lambda linear: copy.deepcopy(linear)(torch.ones(2, 3)),
        lambda linear: pickle.dumps(linear.weight),
        lambda linear: linear.weight.register_hook(lambda grad: grad),
        lambda linear: torch.optim.SGD(linear.parameters(), 0.1).step(),
        lambda linear: zo.AdamW(linear.parameters(), 0.1).step(),
        lambda linear: torch.nn.init.zeros_(linear.weight),
    ],
)
def test_values_are_not_there_before_offload(use: Callable[[Any], Any]) -> None:
    with zo.deferred_init():
        linear = nn.Linear(3, 4)
    # load_state_dict puts the message into an error of its own.
    with pytest.raises((zo.ConfigError, RuntimeError), match=r"zo\.offload"):
        use(linear)


@pytest.mark.parametrize(
    "convert",
    [
        lambda linear: linear.float(),
        lambda linear: linear.to("cpu", torch.float32),
        lambda linear: setattr(linear.weight, "data", linear.weight.data.to(torch.float32)),
        lambda linear: setattr(linear.weight, "data", linear.weight.to(torch.float32, copy=True)),
        copy.deepcopy,
    ],
)
def test_conversions_that_round_nothing(convert: Callable[[Any], Any]) -> None:
    """The values are made as before. A parameter that is kept over zo.offload is no longer the model's."""
    torch.manual_seed(0)
    plain = nn.Linear(3, 4, dtype=torch.bfloat16)
    torch.manual_seed(0)
    with zo.deferred_init():
        linear: Any = nn.Linear(3, 4, dtype=torch.bfloat16)
    old = linear.weight
    made = convert(linear) or linear
    assert made.weight.dtype == (torch.bfloat16 if convert is copy.deepcopy else torch.float32)
    zo.offload(made, zo.OffloadConfig(precision="fp32"))
    with zo.gathered(made) as values:
        assert torch.equal(values["weight"], plain.weight.float())
    if made is linear:
        with pytest.raises(zo.ConfigError, match=r"zo\.offload"):
            _ = old.data
    zo.close(made)


def test_what_was_replaced_raises() -> None:
    with zo.deferred_init():
        param = nn.Parameter(torch.ones(3))
        bag = Bag(lambda bag: bag.register_parameter("p", param))
        view = bag.p.view(-1)
    for stale in (param, view):
        with pytest.raises(zo.ConfigError, match=r"zo\.offload"):
            stale * 2


# Errors inside


def test_a_parameter_on_meta_raises() -> None:
    with zo.deferred_init(), torch.device("meta"), pytest.raises(zo.ConfigError, match="load_pretrained"):
        nn.Linear(2, 2)


@pytest.mark.parametrize(
    "use",
    [
        lambda linear: linear.weight.data.resize_(7),
        lambda linear: linear.weight.data.copy_(torch.empty(4, 3, device="meta")),
        lambda linear: torch.empty_like(linear.weight, device="meta"),
        lambda linear: setattr(linear.weight, "data", torch.empty(4, 3, device="meta")),
        lambda linear: torch.ones(3).set_(linear.weight.data),
    ],
)
def test_what_cannot_be_followed_raises(use: Callable[[Any], Any]) -> None:
    with zo.deferred_init():
        linear = nn.Linear(3, 4)
        with pytest.raises(zo.ConfigError, match=r"zo\.deferred_init"):
            use(linear)


def test_errors_are_those_of_torch() -> None:
    with zo.deferred_init():
        linear = nn.Linear(3, 4)
        with pytest.raises(RuntimeError, match="must match"), torch.no_grad():
            linear.weight.copy_(torch.ones(5, 3))
        with pytest.raises(RuntimeError, match="leaf"):
            linear.weight.zero_()
        with pytest.raises(TypeError, match="numpy"):
            linear.weight.detach().numpy()


def test_unknown_values() -> None:
    with pytest.raises(zo.ConfigError, match="'skip'|\"skip\""), zo.deferred_init(values="none"):
        pass


# Contexts


def test_an_exception_ends_the_recording() -> None:
    with pytest.raises(KeyError), zo.deferred_init():
        linear = nn.Linear(2, 2)
        raise KeyError
    assert current_recorder() is None and not nn.Linear(2, 2).weight.is_meta
    with pytest.raises(zo.ConfigError):
        linear(torch.ones(2))


def test_nested_recordings_are_one() -> None:
    def make() -> nn.Module:
        first = nn.Linear(3, 3)
        with zo.deferred_init():
            second = nn.Linear(3, 3)
        with torch.no_grad():
            second.weight.add_(first.weight)
        return nn.Sequential(first, second, nn.Linear(3, 3))

    def plain() -> nn.Module:
        first, second = nn.Linear(3, 3), nn.Linear(3, 3)
        with torch.no_grad():
            second.weight.add_(first.weight)
        return nn.Sequential(first, second, nn.Linear(3, 3))

    expected, _ = built(plain, deferred=False)
    values = made_values(built(make, deferred=True)[0])
    assert all(torch.equal(values[name], param) for name, param in expected.named_parameters())


def test_other_threads_build_plain_modules() -> None:
    found: list[Any] = []

    def build() -> None:
        found.append(nn.Linear(3, 3))
        try:
            linear.weight.data.zero_()
        except zo.ConfigError as error:
            found.append(error)

    with zo.deferred_init():
        linear = nn.Linear(3, 3)
        thread = threading.Thread(target=build)
        thread.start()
        thread.join()
    plain, error = found
    assert not plain.weight.is_meta and float(plain.weight.detach().abs().sum()) > 0
    assert isinstance(error, zo.ConfigError)


# Values that are left out


def _skipped(make: Callable[[], nn.Module]) -> nn.Module:
    with zo.deferred_init(values="skip"):
        return make()


def test_skipping_draws_no_numbers() -> None:
    torch.manual_seed(0)
    state = torch.get_rng_state()
    model = _skipped(lambda: nn.TransformerEncoderLayer(8, 2))
    assert torch.equal(state, torch.get_rng_state())
    assert all(param.is_meta for param in model.parameters())


@pytest.mark.parametrize("make", [lambda: Bag(modules), lambda: parametrizations.weight_norm(nn.Linear(5, 6))])
def test_skipping_keeps_shapes(make: Callable[[], nn.Module]) -> None:
    expected = [(name, p.shape, p.dtype) for name, p in make().named_parameters()]
    model = _skipped(make)
    assert [(name, p.shape, p.dtype) for name, p in model.named_parameters()] == expected


def test_a_buffer_of_skipped_values_raises() -> None:
    with pytest.raises(zo.ConfigError, match="buffer"):
        _skipped(lambda: parametrizations.spectral_norm(nn.Linear(5, 6)))


def test_what_skipped_values_give_is_no_value() -> None:
    with zo.deferred_init(values="skip"):
        linear = nn.Linear(3, 3)
        norm = linear.weight.detach().norm()
        with pytest.raises(zo.ConfigError, match="skip"):
            norm.item()
        with pytest.raises(zo.ConfigError, match="skip"):
            linear.register_buffer("norm", norm)
        linear.register_buffer("known", torch.ones(3).cumsum(0))
    assert linear.known.tolist() == [1, 2, 3]
