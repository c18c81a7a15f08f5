"""Rates of this machine, measured shortly: `zero-offload plan` and `bench --device` remember them.

Owns how each figure is taken; the file is `hardware/rates.py`'s. A GPU's copies go the runtime's way: through the two
copy lanes, from host memory that it registers. Its sizes grow until a call takes `CALL_S`, so that launches do not
count, up to those of a large model. The calls: `measure` takes all figures of a plan anew, `measure_gpu` those of the
GPU. `remembered` makes a machine of the known figures of the CPU, with defaults for the rest.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import torch

from zero_offload.base.config import OffloadConfig
from zero_offload.base.errors import CapacityError, ConfigError
from zero_offload.base.host import host_empty
from zero_offload.base.types import MIB, format_bytes
from zero_offload.finetune.gpt import GPT
from zero_offload.finetune.gpt_config import GPTConfig
from zero_offload.hardware.abi import Rule
from zero_offload.hardware.device import Device, compute_device
from zero_offload.hardware.kernels.arguments import Segment, segment_array
from zero_offload.hardware.kernels.update import UpdateBuffers, fused_update
from zero_offload.hardware.machines import ONE_DRIVE, Cluster, Drives, Machine, default_machine
from zero_offload.hardware.probe import count_cores, existing_parent
from zero_offload.hardware.rates import Rates, Table, load, save
from zero_offload.model.updates import update_threads
from zero_offload.storage.files import engines
from zero_offload.storage.files.directory import RunDirectory
from zero_offload.storage.memory.arena import Arena

_WIDTH, _SEQUENCE = 256, 128
"""Sizes of the block that is timed: small, since some processors have no instructions for a bf16 product."""
_UPDATE_NUMEL = 1 << 26
"""0.9 GB: a server's caches hold up to 500 MB."""
_DRIVE_BYTES = 128 * MIB
_COPY_BYTES = 256 * MIB
_DRIVE_S = 2.0
_LOST_S = 0.25
"""Seconds of the products beside which bytes are moved."""
_APART = 0.75
"""Reads and writes that together take less than this share of one after the other do not take turns."""
ROUNDS = 5
CALL_S = 0.01
PRODUCT_MAX = 8192
"""Rows and columns of a GPU's matrices."""
WIDTH_MAX, HEAD_WIDTH = 4096, 64
SEQUENCE, SEQUENCES_MAX = 1024, 4
_DTYPES = ("bfloat16", "float16", "float32")


def measure(config: OffloadConfig, directories: Sequence[Path], width: int = _WIDTH) -> None:
    """Take the figures of this machine, in this precision, and of these directories' drives; remember them. A CPU's are
    those of a block of this width.

    Of what computes: a GPU where there is one, else the CPU.
    """
    drives = {_drive_of(directory): _taken() | drive_rates(directory) for directory in directories}
    device = compute_device()
    if not device.is_host:
        measure_gpu(device, _COPY_BYTES)
    rates = load()
    if device.is_host:
        precision, dtype_name = config.numerics.compute, config.compute_dtype_name
        rate = block_flops(device.torch_device, dtype_name, width, 1, _SEQUENCE, partial(median_s, ROUNDS))
        flops = rates.flops | {precision: _taken() | {"flops": rate}}
        rates = replace(rates, host=_taken() | update_rates(dtype_name), flops=flops)
    save(replace(rates, drives=rates.drives | drives))


def measure_gpu(device: Device, nbytes: int) -> Table:
    """Take a GPU's figures, with copies of so many bytes, and those of its host's update; remember them, and return
    the GPU's.

    Raises CapacityError where the GPU's memory is too little.
    """
    try:
        table = _taken() | device_rates(device, nbytes)
    except torch.OutOfMemoryError as error:
        free = format_bytes(device.free_bytes() or 0)
        raise CapacityError(
            f"measuring {device.name} with copies of {format_bytes(nbytes)} takes more than its free memory, {free}; "
            "end other programs that use it, or give bench a smaller --size"
        ) from error
    rates = load()
    host = _taken() | update_rates("bfloat16")
    save(replace(rates, host=host, devices=rates.devices | {device.name: table}))
    return table


def _taken() -> Table:
    return {"taken": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")}


def remembered(config: OffloadConfig, directories: Sequence[Path], num_cores: int, cluster: Cluster) -> Machine:
    """One rank's share of this machine, by what was measured; `Machine.source` says what was not."""
    rates = load()
    usual = default_machine("cpu", num_cores, cluster=cluster)
    drives, io_source = remembered_drives(directories)
    here = cluster.ranks_per_node
    found = replace(
        usual,
        read_bytes=drives.read_bytes / here,
        write_bytes=drives.write_bytes / here,
        drive_takes_turns=drives.takes_turns,
        drive_lost_s=max((_known_drive(rates, each).get("lost_s_per_byte", 0.0) for each in directories), default=0.0),
    )
    sources = []
    precision = config.numerics.compute
    if precision in rates.flops and rates.host:
        share = num_cores / rates.host["num_cores"]
        host_bytes = rates.host["bytes_per_s"] * min(share, 1.0)
        beside = rates.host["bytes_per_s_beside"] * min(share, 1.0)
        found = replace(
            found,
            flops=rates.flops[precision]["flops"] * share,
            host_bytes=host_bytes,
            host_bytes_beside=beside,
            device_bytes=host_bytes,
        )
        sources.append(f"this machine, measured {rates.host['taken']}")
    else:
        sources.append(usual.source)
    return replace(found, source="; ".join([*sources, *([io_source] if directories else [])]))


def remembered_drives(directories: Sequence[Path]) -> tuple[Drives, str]:
    """All drives together, each once, and where their rates come from."""
    rates = load()
    known = {_drive_of(each): _known_drive(rates, each) for each in directories}
    if not known:
        return ONE_DRIVE, ""
    if missing := [name for name, table in known.items() if not table]:
        usual = ONE_DRIVE.times(len(known))
        return usual, f"drives by default, {len(missing)} of {len(known)} not measured"
    total = Drives(
        len(known),
        sum(table["read_bytes_per_s"] for table in known.values()),
        sum(table["write_bytes_per_s"] for table in known.values()),
        all(table["takes_turns"] for table in known.values()),
    )
    return total, f"drives measured {min(table['taken'] for table in known.values())}"


def _known_drive(rates: Rates, directory: Path) -> Table:
    return dict(rates.drives.get(_drive_of(directory), {}))


def _drive_of(directory: Path) -> str:
    return str(existing_parent(directory).stat().st_dev)


def update_rates(dtype_name: str) -> Table:
    """Bytes that AdamW reads and writes in a second: on all cores, and on those that it has beside forward."""
    dtype, numel = getattr(torch, dtype_name), _UPDATE_NUMEL
    residual_size, master_size = 2 * (dtype is torch.bfloat16), 4 * (dtype is torch.float16)
    sizes = (4, 4, dtype.itemsize, residual_size, master_size, dtype.itemsize)
    region = Arena(0).allocate(numel * sum(sizes))
    region.tensor(torch.uint8, region.nbytes).zero_()
    begins = itertools.accumulate((numel * size for size in sizes[:-1]), initial=region.address)
    m, v, value, residual, master, grad = (begin if size else 0 for begin, size in zip(begins, sizes, strict=True))
    buffers = UpdateBuffers(value, residual, master, (m, v), grad, 0, dtype, dtype)
    segments = segment_array([Segment(0, numel, 1e-3, 0.9, 0.999, 1e-8, 0.0, 1.0, 1)])
    num_cores = count_cores()
    rates = {}
    for name, beside in (("bytes_per_s", False), ("bytes_per_s_beside", True)):
        threads = update_threads(num_cores, beside, is_host=True)
        seconds = median_s(ROUNDS, partial(fused_update, Rule.ADAMW, buffers, segments, threads))
        # States and value are read and written, gradients read.
        rates[name] = numel * (2 * sum(sizes) - dtype.itemsize) / seconds
    return {"num_cores": num_cores, **rates}


@contextlib.contextmanager
def private_directory(path: Path) -> Iterator[Path]:
    """A new directory in `path`, which other users may share, such as /tmp."""
    if not path.is_dir():
        raise ConfigError(f"{path} is not a directory; name one on the drive to measure")
    try:
        holder = tempfile.TemporaryDirectory(prefix="zero-offload-bench-", dir=path)
    except OSError as error:
        raise ConfigError(f"cannot write in {path}: {error.strerror}; name a directory of yours") from error
    with holder as place:
        yield Path(place)


def drive_rates(directory: Path) -> Table:
    """The rates of the engine that a run would use."""
    region = Arena(0).allocate(_DRIVE_BYTES)
    with private_directory(existing_parent(directory)) as place, RunDirectory.look(place) as looked:
        settings = engines.pick("auto")
        (rates,) = engines.measure(looked, [settings], region, ROUNDS, _DRIVE_S)
        lost_s = engines.lost_beside(looked, settings, region, _products(), ROUNDS)
    read, write, mixed = (rates.bytes_per_s[engines.Pattern(name)] for name in ("read", "write", "mixed"))
    in_turn_s = (1 / read + 1 / write) / 2
    return {
        "read_bytes_per_s": read,
        "write_bytes_per_s": write,
        "takes_turns": 1 / mixed > _APART * in_turn_s,
        "lost_s_per_byte": lost_s,
    }


def _products() -> Callable[[], None]:
    """Products of matrices on all cores, as a block makes them, for some tenths of a second."""
    shapes = (_SEQUENCE, 4 * _WIDTH), (16 * _WIDTH, 4 * _WIDTH)
    inputs, weight = (host_empty(shape, torch.float32).normal_() for shape in shapes)
    once_s = median_s(ROUNDS, lambda: inputs @ weight.T)
    count = max(round(_LOST_S / once_s), 1)

    def work() -> None:
        for _ in range(count):
            inputs @ weight.T

    return work


# A GPU


def device_rates(device: Device, nbytes: int) -> Table:
    """The rates of a GPU, with copies of `nbytes` bytes.

    `matmul_flops` by dtype and "tf32". `training_flops` by the model's dtype: forward and backward of one block, with
    its attention, norms and launches. `memory_bytes_per_s`, `upload_bytes_per_s` and `download_bytes_per_s`.
    `both_bytes_per_s` in each direction while the other runs. `host_memory`, "registered" or "pageable".
    """

    def seconds(call: Callable[[], object]) -> float:
        """Seconds until the GPU has done what the call launches."""

        def launch_and_wait() -> None:
            call()
            device.mark().synchronize()

        return median_s(ROUNDS, launch_and_wait)

    target = device.torch_device
    matmul = {name: _product_flops(target, getattr(torch, name), seconds) for name in _DTYPES}
    if target.type == "cuda":
        before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high")
        try:
            matmul["tf32"] = _product_flops(target, torch.float32, seconds)
        finally:
            torch.set_float32_matmul_precision(before)
    training = {name: _training_flops(target, name, seconds) for name in _DTYPES}
    return {
        "matmul_flops": matmul,
        "training_flops": training,
        "memory_bytes_per_s": _memory_rate(target, nbytes, seconds),
        **_copy_rates(device, nbytes),
    }


def median_s(rounds: int, call: Callable[[], object]) -> float:
    """The median of a few calls after a first one, which takes memory and starts threads."""
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
    """FLOP/s of the first size whose call is long enough."""
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
