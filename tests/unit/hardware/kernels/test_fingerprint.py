"""The words by which changes are seen: those of a device, made of tensors on the CPU here."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from zero_offload.hardware.kernels import checksums
from zero_offload.hardware.kernels.checksums import device_fingerprints, fingerprints

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float8_e4m3fn, torch.int8, torch.bool]
SIZES = [(0,), (1,), (3,), (4096,), (4097,), (65, 129), (130, 140)]


def flip_signs(x: Tensor) -> None:
    x.neg_()


def flip_two_signs(x: Tensor) -> None:
    x.view(-1)[1:4:2].neg_()


def scale(x: Tensor) -> None:
    x.mul_(2)


def swap_rows(x: Tensor) -> None:
    x[[0, -1]] = x[[-1, 0]]


def reverse_rows(x: Tensor) -> None:
    x.copy_(x.flip(0))


def transpose(x: Tensor) -> None:
    x.copy_(x.t().clone())


def add_to_one(x: Tensor) -> None:
    x[7, 7] += 1


CHANGES: list[Callable[[Tensor], None]] = [
    flip_signs,
    flip_two_signs,
    scale,
    swap_rows,
    reverse_rows,
    transpose,
    add_to_one,
]


@pytest.fixture(params=[None, (8, 64)], ids=["real sizes", "small pieces"])
def pieces(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Small ones make many levels and pieces of a small tensor."""
    if request.param is not None:
        row, rows = request.param
        monkeypatch.setattr(checksums, "ROW", row)
        monkeypatch.setattr(checksums, "PIECE", row * rows)
        monkeypatch.setattr(checksums, "LEVELS", 12)
        monkeypatch.setattr(checksums, "weights_of", checksums.weights_of.__wrapped__)


@pytest.mark.usefixtures("pieces")
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("values", ["random", "one-hot"])
def test_changes_are_seen(change: Callable[[Tensor], None], dtype: torch.dtype, values: str) -> None:
    draw = torch.Generator().manual_seed(0)
    if values == "random":
        tensor = torch.randn(64, 64, generator=draw).to(dtype)
    else:  # its rows differ in their order alone
        tensor = torch.eye(64, dtype=dtype)[torch.randperm(64, generator=draw)]
    before = device_fingerprints([tensor])
    assert torch.equal(device_fingerprints([tensor.clone()]), before)
    earlier = tensor.clone()
    change(tensor)
    assert not torch.equal(tensor.view(torch.uint8), earlier.view(torch.uint8))
    assert device_fingerprints([tensor]) != before


@pytest.mark.usefixtures("pieces")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("size", SIZES, ids=str)
def test_any_dtype_and_size(dtype: torch.dtype, size: tuple[int, ...]) -> None:
    """Every byte counts, those with the highest bit of an element among them."""
    tensor = torch.zeros(size, dtype=dtype)
    found = device_fingerprints([tensor])
    assert found.shape == (1,) and found.dtype is torch.int64
    words = tensor.view(-1).view(torch.uint8)
    seen = {int(found)}
    places = {0, words.numel() // 2, words.numel() - 1} if words.numel() else set()
    for index in places:
        for bit in (0, 7):
            words[index] = 1 << bit
            seen.add(int(device_fingerprints([tensor])))
            words[index] = 0
    assert len(seen) == 1 + 2 * len(places)


def test_a_million_elements_take_a_bounded_part_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, row_sums = [], checksums.row_sums

    def note(piece: Tensor, weights: Tensor) -> object:
        sizes.append(piece.numel())
        return row_sums(piece, weights)

    monkeypatch.setattr(checksums, "row_sums", note)
    monkeypatch.setattr(checksums, "PIECE", 16 * checksums.ROW)
    device_fingerprints([torch.ones(1 << 20, dtype=torch.bfloat16)])
    assert max(sizes) == 16 * checksums.ROW and len(sizes) == 17


def test_one_word_for_each_tensor_on_host_and_device() -> None:
    tensors = [torch.randn(5, 3), torch.randn(7).bfloat16()]
    for take in (fingerprints, device_fingerprints):
        before = take(tensors)
        tensors[1].neg_()
        assert (take(tensors) != before).tolist() == [False, True]
