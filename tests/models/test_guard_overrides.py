"""Every function that torch lets a tensor class see, with a parameter at rest at each of its tensor arguments.

A function gives the result of a plain parameter, and leaves the values that it leaves there. A function that torch
refuses for a plain parameter is refused alike. A function that needs an address, or would change the tensor object,
raises one error, which names `zo.gathered`. Nothing else happens, and no unit is fetched.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import get_ignored_functions, get_testing_overrides
from torch.testing._internal.generated.annotated_fn_args import annotated_args
from torch.utils._pytree import tree_leaves, tree_map_only

import zero_offload as zo
from zero_offload.model.api import runtime_of
from zero_offload.standins.away import Away
from zero_offload.standins.operations import changed_by
from zero_offload.standins.owners import AtRest

SIZE = 4
VALUES: dict[str, Any] = {
    "double": 0.5,
    "bool": False,
    "IntArrayRef": [SIZE, SIZE],
    "SymIntArrayRef": [SIZE, SIZE],
    "ScalarType": torch.float32,
    "c10::string_view": "mean",
    "ArrayRef<double>": [0.5, 0.5],
}
"""By the types of arguments; all others are 1."""
EXCEPTIONS = (
    *("register_hook", "register_post_accumulate_grad_hook", "_post_accumulate_grad_hooks", "retain_grad", "backward"),
    *("__reduce_ex__", "__repr__", "__format__", "requires_grad_", "detach_", "share_memory_"),
    *("_cdata", "set_", "as_strided", "native_channel_shuffle", "_native_batch_norm_legit"),
    *("_version", "fbgemm_pack_gemm_matrix_fp16", "_reshape_alias_copy", "module_load", "_lazy_clone"),
    *("resize_", "resize_as_", "apply_", "map_", "map2_"),
)
"""Tested by themselves: hooks, of which an offloaded parameter has its own, gradients, copies, texts. The rest are an
address, and a function without an argument, which torch shows to no class. One function asks how much memory there is.
In torch 2.10 and 2.11 another takes every shape where a tensor has no memory. Another does not check sizes. Two more
give memory as it was found. One copies late, and not from any memory. The last ones torch refuses where a gradient is
required, and a copy requires none.
"""
STALE = ("empty", "lstsq")
"""Parts of names of functions whose values depend on stale memory. Of "empty" torch fills nothing. Of "lstsq" it hands
LAPACK's gelsy pivots that nothing has set (issue 187411 of torch).
"""
ANSWERED = {
    *("shape", "dtype", "device", "layout", "ndim", "itemsize", "nbytes", "requires_grad", "is_leaf", "grad_fn"),
    *("is_cuda", "is_cpu", "is_meta", "is_sparse", "is_quantized", "output_nr", "data", "mT", "T"),
    *("size", "dim", "numel", "nelement", "element_size", "storage_offset", "get_device", "dim_order"),
    *("is_floating_point", "is_complex", "is_contiguous", "is_signed", "is_inference", "is_shared", "is_pinned"),
    *("is_neg", "is_conj", "is_same_size", "is_set_to", "type", "__len__"),
    *("empty_like", "full_like", "ones_like", "zeros_like"),
    *("new_empty", "new_empty_strided", "new_full", "new_ones", "new_zeros"),
    *("to", "cpu", "float", "type_as", "view_as", "expand_as", "reshape_as", "contiguous", "detach", "view", "t"),
}
"""Among others."""
REFUSED = {
    *("data_ptr", "const_data_ptr", "untyped_storage", "storage", "_typed_storage", "storage_type", "as_subclass"),
    *("resize", "resize_as", "resize_", "resize_as_", "t_", "unsqueeze_", "transpose_", "squeeze_", "swapaxes_"),
}
"""Of plain parameters they give an address, or another form."""
TENSOR = object()


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(SIZE, SIZE))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


def arguments(func: Any, override: Any) -> tuple[list[Any], dict[str, Any]]:
    """Some that fit, TENSOR in the place of each tensor."""
    if func not in annotated_args:
        needed = (each for each in inspect.signature(override).parameters.values() if each.default is each.empty)
        return [TENSOR for each in needed if each.kind is each.POSITIONAL_OR_KEYWORD] or [TENSOR], {}
    is_method = str(torch.overrides.resolve_name(func)).startswith("torch.Tensor")
    args, kwargs = [TENSOR] * (is_method and all(each["name"] != "self" for each in annotated_args[func])), {}
    for each in annotated_args[func]:
        kind = each["simple_type"].rstrip("?")
        value = {"Tensor": TENSOR}.get(kind, [TENSOR, TENSOR] if "TensorList" in kind else VALUES.get(kind, 1))
        if each.get("is_kwarg_only") == "True":
            kwargs[each["name"]] = value
        else:
            args.append(value)
    return args, kwargs


def filled(given: Any, places: Iterator[Tensor]) -> Any:
    if isinstance(given, list):
        return [filled(each, places) for each in given]
    return next(places) if given is TENSOR else given


def calls(tensor: Callable[[], Tensor]) -> Iterator[tuple[Any, str, int, list[Any], dict[str, Any]]]:
    """Every function with `tensor()` at each place in turn and ordinary tensors at the others."""
    ignored = dict.fromkeys(func for func in get_ignored_functions() if func in annotated_args)
    for func, override in {**get_testing_overrides(), **ignored}.items():
        args, kwargs = arguments(func, override)
        count = sum(each is TENSOR for each in tree_leaves((args, kwargs)))
        for place in range(count):
            places = iter([tensor() if at == place else torch.ones(SIZE, SIZE) for at in range(count)])
            given = filled(args, places)
            yield (
                func,
                str(torch.overrides.resolve_name(func) or func),
                place,
                given,
                {name: filled(each, places) for name, each in kwargs.items()},
            )


def outcome(func: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    try:
        return func(*args, **kwargs)
    except Exception as error:
        return error


def described(result: Any, *, values: bool) -> str:
    """All there is to know of a result."""

    def leaf(tensor: Tensor) -> str:
        dense = tensor if tensor.layout is torch.strided else tensor.to_dense()
        about = f"{tuple(tensor.shape)} {tensor.dtype} {tensor.device} {dense.stride()} {tensor.requires_grad}"
        about += str(tensor.layout)
        return about + str(dense.tolist() if values and not tensor.is_meta else "")

    return str(tree_map_only(Tensor, leaf, result))


@pytest.fixture
def net(nvme: Path) -> Net:
    return zo.offload(Net(), zo.OffloadConfig(params="nvme", optimizer="nvme", precision="fp32", nvme=nvme))


@pytest.mark.filterwarnings("ignore")
def test_every_function_with_a_parameter_at_rest(net: Net) -> None:
    """Without gradients: what in-place functions say of leaves that require one is torch's."""
    wrong, answered, changed, refused = [], set(), set(), set()
    plain = iter(calls(lambda: nn.Parameter(torch.eye(SIZE))))
    fetched = runtime_of(net).units[0].state
    with torch.no_grad():
        net.weight.copy_(torch.eye(SIZE))
        for func, name, place, args, kwargs in calls(lambda: net.weight):
            _, _, _, plain_args, plain_kwargs = next(plain)
            short = name.split(".")[-2 if name.endswith(("__get__", "__set__")) else -1]
            is_stale = any(part in short for part in STALE)
            if not {short, func.__name__}.isdisjoint(EXCEPTIONS):
                continue
            version = net.weight._version
            found = outcome(func, args, kwargs)
            is_changed = net.weight._version != version or any(
                isinstance(each, AtRest) for each in changed_by(func, tuple(args), kwargs)
            )
            if isinstance(found, zo.ZeroOffloadError):
                refused.add(short)
                if "weight" not in str(found) or not ("zo.gathered" in str(found) or "another shape" in str(found)):
                    wrong.append((name, place, "says", str(found)))
                continue
            expected = outcome(func, plain_args, plain_kwargs)
            if is_changed:
                changed.add(short)
                (param,) = [x for x in tree_leaves((plain_args, plain_kwargs)) if isinstance(x, nn.Parameter)]
                if not is_stale and not torch.equal(net.weight.data.clone().nan_to_num(), param.nan_to_num()):
                    wrong.append((name, place, "leaves", net.weight.tolist(), "not", param.tolist()))
                net.weight.copy_(torch.eye(SIZE))
            if isinstance(found, Exception):
                if type(found) is not type(expected):
                    wrong.append((name, place, "raises", repr(found), "not", repr(expected)[:80]))
                continue
            answered.add(short)
            is_view = any(isinstance(each, AtRest | Away) for each in tree_leaves(found))
            values = not is_view and not is_stale
            if isinstance(expected, Exception):
                wrong.append((name, place, "answers where torch raises", repr(expected)[:80]))
            elif described(found, values=values) != described(expected, values=values):
                wrong.append(
                    (
                        name,
                        place,
                        described(found, values=values)[:150],
                        "not",
                        described(expected, values=values)[:150],
                    )
                )
    assert not wrong
    assert answered >= ANSWERED, ANSWERED - answered
    assert refused <= REFUSED and len(changed) > 100, refused - REFUSED
    assert runtime_of(net).units[0].state is fetched


QUESTIONS: dict[str, Callable[[Tensor], Any]] = {
    "typename": torch.typename,
    "stride": lambda p: p.stride(),
    "result type": lambda p: (torch.result_type(p, 1.0), torch.result_type(torch.ones(1, dtype=torch.float64), p)),
    "random like it": lambda p: [torch.rand_like(p), torch.randn_like(p), torch.randint_like(p, 9)],
    "full, by keyword": lambda p: torch.full_like(input=p, fill_value=2.0, dtype=torch.float64),
    "new": lambda p: [p.new_tensor([1.0]), p.new_zeros(3), p.new_full((2,), 7)],
    "another to it": lambda p: torch.zeros(2, dtype=torch.float64).to(p),
    "another to it, by keyword": lambda p: torch.zeros(2, dtype=torch.float64).to(tensor=p),
    "another as its type": lambda p: torch.zeros(2, dtype=torch.int64).type_as(p),
    "others as its shape": lambda p: [torch.ones(1).expand_as(p), torch.ones(p.numel()).view_as(other=p)],
    "hash": lambda p: hash(p) == id(p),
    "in a set and a list": lambda p: p in {p} and p in [p],
}
VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "data": lambda p: p.data,
    "detached": lambda p: p.detach(),
    "flat": lambda p: p.view(-1),
    "transposed row": lambda p: p.t()[1],
    "like its data": lambda p: torch.zeros_like(p.data, memory_format=torch.preserve_format),
    "on meta": lambda p: p.to("meta"),
}
SAME: dict[str, Callable[[Tensor], Tensor]] = {
    "device": lambda p: p.to("cpu"),
    "device with an index": lambda p: p.to("cpu:0"),
    "device object": lambda p: p.to(torch.device("cpu", 0), torch.float32),
    "dtype": lambda p: p.float().to(torch.float32).type(p.dtype).type_as(torch.ones(1)),
    "another": lambda p: p.to(torch.ones(1)),
    "itself": lambda p: p.to(p),
    "layout": lambda p: p.contiguous(),
}


@pytest.mark.parametrize("ask", QUESTIONS)
def test_a_question(ask: str, net: Net) -> None:
    torch.manual_seed(1)
    expected = described(QUESTIONS[ask](nn.Parameter(torch.eye(SIZE))), values=True)
    torch.manual_seed(1)
    assert described(QUESTIONS[ask](net.weight), values=True) == expected


@pytest.mark.parametrize("make", VIEWS)
def test_a_view_without_data(make: str, net: Net) -> None:
    expected = VIEWS[make](param := nn.Parameter(torch.eye(SIZE)))
    with torch.no_grad():
        net.weight.copy_(param)
    view = VIEWS[make](net.weight)
    assert described(view, values=False) == described(expected, values=False)
    assert torch.typename(view) == torch.typename(expected)
    if type(view) is Away:
        assert "weight, offloaded to nvme" in repr(view)
        with torch.no_grad():
            for read in (Tensor.sum, Tensor.numpy, Tensor.tolist, Tensor.clone, copy.copy, copy.deepcopy):
                assert str(read(view)) == str(read(expected.detach())) or read is copy.copy
            for change in (Tensor.exp_, lambda v: v.copy_(torch.ones(())), lambda v: torch.neg(v.clone(), out=v)):
                assert change(view) is view and change(expected) is expected
                assert torch.equal(net.weight.clone(), param) and torch.equal(view.clone(), expected)
        with pytest.raises(zo.ZeroOffloadError, match="weight, offloaded to nvme"):
            view.data_ptr()
        with pytest.raises(RuntimeError, match="incompatible tensor type"):
            torch.ones(SIZE, SIZE).data = view


@pytest.mark.parametrize("call", SAME)
@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_what_it_is_already_is_the_parameter_itself(tier: str, call: str, nvme: Path) -> None:
    config = zo.OffloadConfig(params=tier, optimizer=tier, precision="fp32", nvme=nvme if tier == "nvme" else None)
    model = zo.offload(Net(), config)
    assert SAME[call](model.weight) is model.weight


def test_a_question_in_forward_fetches_nothing(nvme: Path) -> None:
    class Asks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Net(), Net()

        def forward(self, x: Tensor) -> Tensor:
            weight = self.second.weight
            x = x.to(weight) + torch.zeros_like(weight) + weight.new_zeros(1)
            assert weight.float() is weight and type(weight) is not nn.Parameter
            return self.second(self.first(x))

    def settings() -> dict[str, Any]:
        return {"params": "nvme", "optimizer": "nvme", "nvme": nvme, "precision": "fp32", "device_memory": "4MiB"}

    model = zo.offload(Asks(), zo.OffloadConfig(**settings()), units=["first", "second"])
    out = model(torch.eye(SIZE, dtype=torch.float64))
    with zo.gathered(model):
        assert torch.equal(out, model.first.weight @ model.second.weight)


def test_texts_of_a_model(net: Net) -> None:
    net.more = nn.ParameterDict({"one": net.weight})
    assert "one" in repr(net) and "weight, offloaded to nvme" in f"{net.weight}" and "FloatTensor" in repr(net.more)


CONVERSIONS: dict[str, Callable[[nn.Module], Any]] = {
    "meta": lambda m: m.to("meta"),
    "half": lambda m: m.half(),
    "double": lambda m: m.to(torch.float64),
    "to_empty": lambda m: m.to_empty(device="cpu"),
    "share_memory": lambda m: m.share_memory(),
    "type": lambda m: m.type(torch.float16),
}


@pytest.mark.parametrize("convert", CONVERSIONS)
@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_a_conversion_of_the_model_is_refused_before_it_begins(tier: str, convert: str, nvme: Path) -> None:
    config = zo.OffloadConfig(params=tier, optimizer=tier, precision="fp32", nvme=nvme if tier == "nvme" else None)
    model = zo.offload(nn.Sequential(nn.BatchNorm1d(SIZE), Net()), config)
    params = list(model.parameters())
    with pytest.raises(zo.ZeroOffloadError, match=r"parameter 0\.weight.* keeps|keeps its dtype.*0\.weight.*precision"):
        CONVERSIONS[convert](model)
    assert all(one is other for one, other in zip(model.parameters(), params, strict=True))
    assert {(each.dtype, each.device.type) for each in params} == {(torch.float32, "cpu")}
    model.to("cpu:0").cpu().float().to(torch.device("cpu", 0))
    model(torch.ones(2, SIZE)).sum().backward()


def test_a_parameter_made_of_one_is_refused(net: Net) -> None:
    with pytest.raises(zo.ZeroOffloadError, match=r"view of parameter weight cannot require a gradient.*clone"):
        nn.Parameter(net.weight)
