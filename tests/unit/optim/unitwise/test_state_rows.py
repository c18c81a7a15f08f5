"""A state comes back from its row as it was: values, types, order of memory; and its tensors are the row's memory."""

from __future__ import annotations

import enum
import math
import struct
import zlib
from collections import deque
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import zero_offload as zo
from zero_offload.optim.unitwise.state_rows import pack, packages_of, packed_bytes, unpack

HERE = frozenset({__name__.partition(".")[0], "torch"})


class Projector:
    """As GaLore's: an object in the state."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.ortho: Tensor | None = None

    def refresh(self) -> None:
        self.ortho = torch.arange(12, dtype=torch.float32, device="cpu").view(3, 4)


class Pair(Tensor):
    """A tensor that consists of two, as quantized states do."""

    one: Tensor
    other: Tensor

    @staticmethod
    def __new__(cls, one: Tensor, other: Tensor) -> Pair:
        made: Pair = torch.Tensor._make_wrapper_subclass(
            cls, one.shape, strides=one.stride(), dtype=one.dtype, device=one.device
        )
        made.one, made.other = one, other
        return made

    @classmethod
    def __torch_dispatch__(cls, *_: Any, **__: Any) -> Any:
        raise NotImplementedError

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["one", "other"], ("context", [1, self.one.shape])

    @staticmethod
    def __tensor_unflatten__(parts: dict[str, Tensor], context: Any, size: Any, stride: Any) -> Pair:
        assert context == ("context", [1, size])
        return Pair(parts["one"], parts["other"])


class Mode(enum.IntEnum):
    ONE = 1


class Slotted:
    __slots__ = ("value",)


def row_of(nbytes: int) -> Tensor:
    """An aligned row full of other bytes."""
    memory = torch.full((nbytes + 64,), 0xA5, dtype=torch.uint8, device="cpu")
    begin = -memory.data_ptr() % 64
    return memory[begin : begin + nbytes]


def packed(state: Any) -> Tensor:
    row = row_of(packed_bytes(state))
    pack(state, row)
    return row


def there_and_back(state: Any) -> Any:
    return unpack(packed(state), HERE)


def floats(*shape: int) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(0)
    return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")


VALUES: list[Any] = [
    None,
    True,
    0,
    -(2**200),
    'text with " and \\ and é',
    -0.0,
    5e-324,
    1.7976931348623157e308,
    0.1 + 0.2,
    math.inf,
    -math.inf,
    2 + 3j,
    torch.bfloat16,
    torch.device("cpu"),
    torch.Size([2, 3]),
    (1, (2.0, "x"), [3, None]),
    {},
    {"a": 1, "b": {"c": [{}]}},
    {0: {"x": 1.5}, (1, "k"): 2, None: 3, 1.5: 4},
    [["list", 1], ["tensor"], "dict"],
    {"dict": 1},
    np.float32(0.1),
    np.int64(7),
    {3, 1, "a"},
    frozenset({(1, 2)}),
    Mode.ONE,
    deque([1, (2,)]),
    deque([{"x": 1}], 5),
]


@pytest.mark.parametrize("value", VALUES)
def test_values(value: Any) -> None:
    found = there_and_back(value)
    assert found == value and type(found) is type(value) and sorted(repr(found)) == sorted(repr(value))


def test_nan_and_the_sign_of_zero() -> None:
    assert math.isnan(there_and_back(math.nan))
    assert math.copysign(1, there_and_back(-0.0)) == -1
    assert list(there_and_back({"b": 1, "a": 2})) == ["b", "a"]


TENSORS: dict[str, Tensor] = {
    "contiguous": floats(5, 7),
    "no dimensions": torch.tensor(3.5, dtype=torch.float64, device="cpu"),
    "empty": torch.empty((0, 3), dtype=torch.float32, device="cpu"),
    "transposed": floats(5, 7).t(),
    "channels last": floats(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "repeated": floats(1, 7).expand(5, 7),
    "one element, repeated": floats(1).expand(64, 64),
    "bfloat16": floats(3, 3).bfloat16(),
    "float8": floats(3, 3).to(torch.float8_e4m3fn),
    "bool": floats(9) > 0,
    "int64": torch.arange(5, dtype=torch.int64, device="cpu"),
    "complex": torch.complex(floats(3), floats(3)),
}


@pytest.mark.parametrize("name", TENSORS)
def test_tensors_with_their_order_of_memory(name: str) -> None:
    tensor = TENSORS[name]
    found = there_and_back({"x": tensor})["x"]
    assert (found.dtype, found.shape, found.stride()) == (tensor.dtype, tensor.shape, tensor.stride())
    assert torch.equal(found.contiguous().view(-1).view(torch.uint8), tensor.contiguous().view(-1).view(torch.uint8))


def test_a_repeated_tensor_takes_one_element() -> None:
    assert packed_bytes({"x": TENSORS["one element, repeated"]}) < 1024


def test_gaps_are_left_out_and_the_order_stays() -> None:
    wide, other = floats(100, 1000), floats(100, 1000)
    found = there_and_back({"x": wide[:, :3], "y": other.t()[10:14, ::2]})
    assert torch.equal(found["x"], wide[:, :3]) and found["x"].stride() == (3, 1)
    assert torch.equal(found["y"], other.t()[10:14, ::2]) and found["y"].stride() == (1, 4)
    assert packed_bytes({"x": wide[:, :3]}) < 2048


def test_tensors_that_share_memory_share_it_still() -> None:
    buffer = floats(4, 6)
    found = there_and_back({"whole": buffer, "row": buffer[1], "same": buffer, "columns": buffer[:, 2:4]})
    found["whole"].mul_(2)
    for name, expected in {"row": buffer[1], "same": buffer, "columns": buffer[:, 2:4]}.items():
        assert torch.equal(found[name], 2 * expected)
    assert found["columns"].stride() == (6, 1)


def test_rows_of_one_buffer_are_apart_where_they_do_not_overlap() -> None:
    buffer = floats(2, 6)
    found = there_and_back({"one": buffer[0], "other": buffer[1]})
    found["one"].zero_()
    assert torch.equal(found["other"], buffer[1])


def test_tensors_of_the_result_are_the_rows_memory() -> None:
    state = {"step": torch.tensor(1.0, dtype=torch.float32, device="cpu"), "exp_avg": floats(33, 5).t()}
    row = packed(state)
    found = unpack(row)
    for tensor in found.values():
        assert 0 <= tensor.data_ptr() - row.data_ptr() < row.numel() and tensor.data_ptr() % 64 == 0
    found["step"] += 1
    found["exp_avg"].mul_(3)
    again = unpack(row)
    assert again["step"] == 2 and torch.equal(again["exp_avg"], 3 * state["exp_avg"])


class Copies(TorchDispatchMode):
    """Numbers of elements that operations copy into a tensor."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "copy_" in str(func) or "clone" in str(func):
            self.seen.append(args[0].numel())
        return func(*args, **(kwargs or {}))


def test_values_at_their_place_are_not_copied() -> None:
    row = packed({"count": 9, "exp_avg": floats(1000)})
    state = unpack(row)
    state["count"] += 1
    state["exp_avg"].add_(1)
    with Copies() as copies:
        pack(state, row)
        in_place = list(copies.seen)
        pack({"count": 10, "exp_avg": floats(1000) + 1}, row)
    assert 1000 not in in_place and 1000 in copies.seen
    assert unpack(row)["count"] == 10 and torch.equal(unpack(row)["exp_avg"], floats(1000) + 1)


def test_values_of_the_row_that_have_changed_places() -> None:
    row = packed({"a": floats(100), "b": floats(100) + 1, "c": floats(100) + 2})
    state = unpack(row)
    state["a"], state["b"], state["c"] = state["c"], state["a"], state["b"]
    pack(state, row)
    found = unpack(row)
    for name, added in {"a": 2, "b": 0, "c": 1}.items():
        assert torch.equal(found[name], floats(100) + added)


def test_a_row_may_take_another_state_of_its_length() -> None:
    row = packed({"a": floats(10), "b": floats(4)})
    pack({"b": unpack(row)["a"]}, row)
    assert torch.equal(unpack(row)["b"], floats(10))


@pytest.mark.parametrize("later", [10, 10**18, -(10**18), False, True])
def test_numbers_that_grow_do_not_change_the_length(later: int) -> None:
    begun: Any = {"step": 0 if type(later) is int else True, "lr": 1.0, "x": floats(3)}
    grown = {"step": later, "lr": 1 / 3 * 1e-300, "x": floats(3)}
    assert packed_bytes(begun) == packed_bytes(grown) == packed_bytes({**grown, "lr": -math.inf})
    row = packed(begun)
    pack(grown, row)
    assert unpack(row)["step"] == later
    assert packed_bytes([begun["step"]] * 50) == packed_bytes([later] * 50)


def test_bytes_are_the_states_alone() -> None:
    names = [f"name {number}" for number in range(50)]
    assert torch.equal(packed({"a": set(names)}), packed({"a": {*names[25:], *names[:25]}}))
    state = {"n": 3, "x": floats(5), "y": floats(7, 3)}
    assert torch.equal(packed(state), packed({"n": 3, "x": floats(5).clone(), "y": floats(7, 3).clone()}))
    assert packed_bytes(state) % 64 == 0


def test_tensors_without_memory_are_measured() -> None:
    real = {"step": 1, "x": floats(30, 40), "y": floats(30)}
    mode = FakeTensorMode()
    fake = {"step": 1, "x": mode.from_tensor(floats(30, 40)), "y": mode.from_tensor(floats(30))}
    assert packed_bytes(fake) == packed_bytes(real)
    with mode:
        assert packed_bytes(fake) == packed_bytes(real)
    meta = {"step": 1, "x": torch.empty((30, 40), dtype=torch.float32, device="meta"), "y": floats(30)}
    assert packed_bytes(meta) == packed_bytes(real)


def test_wrapper_subclasses_come_back_as_views() -> None:
    wrapped = Pair(floats(4, 4), floats(4, 4) + 1)
    row = packed({"x": wrapped})
    found = unpack(row, HERE)["x"]
    assert type(found) is Pair and torch.equal(found.one, wrapped.one) and torch.equal(found.other, wrapped.other)
    found.other.zero_()
    assert not unpack(row, HERE)["x"].other.any()


def test_objects_come_back_by_their_attributes() -> None:
    projector = Projector(4)
    assert there_and_back({"projector": projector})["projector"].ortho is None
    projector.refresh()
    row = packed({"projector": projector})
    found = unpack(row, HERE)["projector"]
    assert type(found) is Projector and found.rank == 4 and found.ortho is not None and projector.ortho is not None
    assert torch.equal(found.ortho, projector.ortho)
    found.ortho.zero_()
    assert not unpack(row, HERE)["projector"].ortho.any()


def test_parameters_stay_parameters() -> None:
    found = there_and_back([nn.Parameter(floats(3))])[0]
    assert type(found) is nn.Parameter and torch.equal(found, floats(3))


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ({"a": [lambda: 0]}, r"state.a\[0\] is a builtins.function"),
        ({"a": bytearray(2)}, r"state.a is a builtins.bytearray"),
        ({0: torch.Generator("cpu")}, r"state\[0\] is a torch._C.Generator"),
        (Slotted(), "Slotted"),
        ({"a": floats(4).to_sparse()}, "state.a is a tensor of layout torch.sparse_coo"),
        ({"a": floats(9).as_strided((4, 3), (2, 1))}, "state.a is a tensor whose elements share memory"),
        (type("Local", (), {"__qualname__": "f.<locals>.Local"})(), "Local"),
    ],
)
def test_other_values_are_refused_by_their_place(value: Any, told: str) -> None:
    with pytest.raises(zo.ConfigError, match=told):
        packed_bytes(value)


def test_containers_at_two_places_are_refused() -> None:
    shared = [1]
    with pytest.raises(zo.ConfigError, match="state.b is a list that the state has at another place too"):
        packed_bytes({"a": shared, "b": shared})
    shared.append(shared)  # type: ignore[arg-type]
    with pytest.raises(zo.ConfigError, match="at another place too"):
        packed_bytes(shared)


def test_containers_that_are_too_deep_are_refused() -> None:
    value: Any = []
    for _ in range(100_000):
        value = [value]
    with pytest.raises(zo.ConfigError, match="nested"):
        packed_bytes(value)


def test_classes_of_other_packages_are_not_made() -> None:
    row = packed({"projector": Projector(4)})
    with pytest.raises(zo.CheckpointError, match="of another package than torch"):
        unpack(row)
    with pytest.raises(zo.CheckpointError, match="of another package"):
        unpack(packed({"x": Pair(floats(2), floats(2))}), {"numpy"})


def test_packages_are_those_of_the_class_and_its_bases() -> None:
    class Mine(torch.optim.SGD):
        pass

    assert packages_of(Mine) == HERE and packages_of(torch.optim.Muon) == {"torch"}


def edited(row: Tensor, text: bytes) -> Tensor:
    """A row with another outline, whose checksum is right."""
    head = struct.Struct("<8sIIQQ")
    magic, version, _, _, begin = head.unpack(bytes(row[: head.size].numpy()))
    made = head.pack(magic, version, zlib.crc32(text), len(text), begin) + text
    row[: len(made)] = torch.frombuffer(bytearray(made), dtype=torch.uint8)
    return row


OUTLINES = [
    b"{",
    b"[]",
    b'["unknown"]',
    b'["tensor","float32",[100000],0,[1]]',
    b'["tensor","float32",[2],-64,[1]]',
    b'["tensor","float32",[-2],0,[1]]',
    b'["tensor","float32",[2],1,[1]]',
    b'["tensor","nothing",[2],0,[1]]',
    b'["tensor","float32",[2],0]',
    b'["object","builtins:eval",{}]',
    b'["object","torch:nothing",{}]',
    b'["object","torch:no_grad.__init__",{}]',
    b'["object","torch:os.environ",{}]',
    b'["wrapper","torch:Tensor",[2],[1],{},null]',
    b'["dict",[[],1]]',
    b'["float",[]]',
    b'["enum","torch:Tensor","T"]',
    b"[" * 100_000,
]


@pytest.mark.parametrize("text", OUTLINES, ids=lambda text: text[:40].decode())
def test_damaged_outlines_are_one_clear_error(text: bytes) -> None:
    row = packed({"room": "x" * 100_100, "x": floats(10)})
    with pytest.raises(zo.CheckpointError, match="a row of optimizer states is damaged"):
        unpack(edited(row, text), HERE)


@pytest.mark.parametrize("at", [0, 9, 13, 17, 25, 33, 40])
def test_damaged_bytes_are_one_clear_error(at: int) -> None:
    row = packed({"n": 1, "x": floats(10)})
    row[at] ^= 0x55
    with pytest.raises(zo.CheckpointError, match="a row of optimizer states is damaged"):
        unpack(row)


def test_a_row_that_is_none() -> None:
    with pytest.raises(ValueError, match="a row of 64 bytes"):
        pack({"x": 1}, row_of(32))
    with pytest.raises(ValueError, match="a row begins at a multiple of 64"):
        unpack(row_of(256)[8:])


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.Adafactor, torch.optim.Muon, torch.optim.Rprop])
def test_an_optimizer_goes_on_from_rows_with_the_same_bits(make: Any) -> None:
    plain, ours = nn.Parameter(floats(6, 5)), nn.Parameter(floats(6, 5))
    optimizers = make([plain], lr=1e-2), make([ours], lr=1e-2)
    row = None
    for step in range(4):
        for param in (plain, ours):
            param.grad = floats(6, 5) * (step + 1)
        if row is not None:
            optimizers[1].state[ours] = unpack(row)
        for optimizer in optimizers:
            optimizer.step()
        state = optimizers[1].state.pop(ours)
        if row is None:
            row = row_of(packed_bytes(state))
        pack(state, row)
        assert torch.equal(plain, ours)
