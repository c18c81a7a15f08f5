"""What a GPU does in a second: products of matrices, training of a block, its memory, copies from and to the host.

Owns how each is timed. Copies go the runtime's way: through the two copy lanes, from host memory that it registers.
Sizes grow until a call takes `CALL_S`, so that launches do not count, up to those of a large model. The calls:
`device_rates` for all of a GPU; `block_flops` and `median_s` serve `measure` too.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import torch

from zero_offload.cli.recipes.gpt import GPT, GPTConfig
from zero_offload.hardware.device import Device
from zero_offload.hardware.rates import Table
from zero_offload.storage.memory.arena import Arena

ROUNDS = 5
CALL_S = 0.01
PRODUCT_MAX = 8192
"""Rows and columns of the matrices."""
WIDTH_MAX, HEAD_WIDTH = 4096, 64
SEQUENCE, SEQUENCES_MAX = 1024, 4
_DTYPES = ("bfloat16", "float16", "float32")
_TF32 = "tf32"


def device_rates(device: Device, nbytes: int) -> Table:
    """Of a GPU, with copies of so many bytes.

    `matmul_flops` by dtype and "tf32"; `training_flops` by the model's dtype: forward and backward of one block, with
    its attention, norms and launches; `memory_bytes_per_s`; `upload_bytes_per_s`, `download_bytes_per_s`, and
    `both_bytes_per_s` in each direction while the other runs; `host_memory`, "registered" or "pageable".
    """

    def seconds(call: Callable[[], object]) -> float:
        """Until the GPU has done what the call launches."""

        def launch_and_wait() -> None:
            call()
            device.mark().synchronize()

        return median_s(ROUNDS, launch_and_wait)

    target = device.torch_device
    matmul = {name: _product_flops(target, getattr(torch, name), seconds) for name in _DTYPES}
    if target.type == "cuda":
        with _tf32():
            matmul[_TF32] = _product_flops(target, torch.float32, seconds)
    training = {name: _training_flops(target, name, seconds) for name in _DTYPES}
    return {
        "matmul_flops": matmul,
        "training_flops": training,
        "memory_bytes_per_s": _memory_rate(target, nbytes, seconds),
        **_copy_rates(device, nbytes),
    }


def median_s(rounds: int, call: Callable[[], object]) -> float:
    """Of a few calls after a first one, which takes memory and starts threads."""
    call()
    times = []
    for _ in range(rounds):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


Seconds = Callable[[Callable[[], object]], float]


def block_flops(target: torch.device, dtype_name: str, width: int, sequences: int, length: int, s: Seconds) -> float:
    """Arithmetic of a transformer's block in a second, forward and backward; `s` times a call."""
    dtype = getattr(torch, dtype_name)
    heads = max(width // HEAD_WIDTH, 1)
    model = GPT(GPTConfig(num_layers=1, width=width, num_heads=heads, seq_max=length)).to(target, dtype)
    shape = (sequences, length, width)
    inputs = torch.randn(shape, dtype=torch.float32, device=target).to(dtype).requires_grad_()
    block, rotation = model.blocks[0], model.rotation
    taken = s(lambda: block(inputs, rotation).sum().backward())
    numel = sum(param.numel() for param in block.parameters())
    return 3 * (2.0 * numel + 2.0 * width * length) * sequences * length / taken


def _training_flops(target: torch.device, dtype_name: str, seconds: Seconds) -> float:
    """Of the first size whose call is long enough."""
    width, sequences, length, flops = 256, 1, 128, 0.0
    while True:
        flops = block_flops(target, dtype_name, width, sequences, length, seconds)
        call_s = 3 * 24.0 * width * width * sequences * length / flops
        if call_s >= CALL_S or (width, sequences) == (WIDTH_MAX, SEQUENCES_MAX):
            return flops
        width, sequences, length = min(2 * width, WIDTH_MAX), min(2 * sequences, SEQUENCES_MAX), SEQUENCE


def _product_flops(target: torch.device, dtype: torch.dtype, seconds: Seconds) -> float:
    size = 512
    while True:
        one, other = (torch.randn(size, size, dtype=torch.float32, device=target).to(dtype) for _ in range(2))
        taken = seconds(partial(torch.matmul, one, other))
        if taken >= CALL_S or size == PRODUCT_MAX:
            return 2.0 * size**3 / taken
        size *= 2


@contextmanager
def _tf32() -> Iterator[None]:
    """fp32 products as "tf32", inside."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _memory_rate(target: torch.device, nbytes: int, seconds: Seconds) -> float:
    """Read and written by a copy in the GPU's own memory."""
    source, copy = (torch.zeros(nbytes, dtype=torch.uint8, device=target) for _ in range(2))
    return 2 * nbytes / seconds(lambda: copy.copy_(source))


def _copy_rates(device: Device, nbytes: int) -> Table:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        region = Arena(0, pinner=device).allocate(2 * nbytes)
    out, back = region.tensor(torch.uint8, 2 * nbytes).split(nbytes)
    there, from_there = (torch.zeros(nbytes, dtype=torch.uint8, device=device.torch_device) for _ in range(2))

    def upload() -> None:
        device.upload(there, out).take_on_host()

    def download() -> None:
        device.download(back, from_there).take_on_host()

    def both() -> None:
        up, down = device.upload(there, out), device.download(back, from_there)
        up.take_on_host(), down.take_on_host()

    names = {"upload": upload, "download": download, "both": both}
    rates: Table = {f"{name}_bytes_per_s": nbytes / median_s(ROUNDS, call) for name, call in names.items()}
    return rates | {"host_memory": "pageable" if caught else "registered"}
