"""`zero-offload bench`: how fast a directory is read and written (`--io`), and how fast a GPU is (`--device`).

Owns the flags, the file engines beside those that a run tries, and the tables. In a directory it writes one file
without a name, which is gone with the command; a GPU's figures are remembered.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch

from zero_offload.base.errors import CapacityError, ConfigError
from zero_offload.base.types import KIB, MIB, format_bytes, parse_bytes, user_path
from zero_offload.finetune.fit.measure import measure_gpu, private_directory
from zero_offload.hardware import native
from zero_offload.hardware.device import compute_device, on_likely_gpu
from zero_offload.hardware.kernels.checksums import crc32c
from zero_offload.hardware.rates import cache_file
from zero_offload.storage.files.directory import RunDirectory
from zero_offload.storage.files.engine import EngineSettings
from zero_offload.storage.files.engines import (
    AIOFILES,
    IO_URING,
    THREADS,
    EngineRates,
    Pattern,
    io_uring_problem,
    measure,
    pick,
    stripe_weights,
)
from zero_offload.storage.memory.arena import Arena

ROUNDS, LIMIT_S = 5, 60.0
_SIZE_MIN_BYTES = 16 * MIB


def run(args: argparse.Namespace) -> int:
    nbytes = parse_bytes(args.size) // (4 * MIB) * 4 * MIB
    if nbytes < _SIZE_MIN_BYTES:
        raise ConfigError(f"--size {args.size} is too little to measure; give {format_bytes(_SIZE_MIN_BYTES)} or more")
    return _run_device(nbytes, as_json=args.json) if args.device else _run_io(args, nbytes)


def _run_device(nbytes: int, *, as_json: bool) -> int:
    with on_likely_gpu():
        device = compute_device()
        if device.is_host:
            raise CapacityError(
                f"torch {torch.__version__} sees no accelerator, so there is none to measure. Install a build of torch "
                "for this machine's GPU, or measure the CPU: zero-offload plan --measure"
            )
        table = measure_gpu(device, nbytes)
    if as_json:
        print(json.dumps({"device": device.name, **table}, indent=2))
        return 0
    print(f"{device.name}, measured {table['taken']}")
    for name, flops in table["matmul_flops"].items():
        trains = table["training_flops"].get(name)
        also = "" if trains is None else f"; a block trains at {trains / 1e12:.3g} TFLOPS, {trains / flops:.0%} of that"
        print(f"{name:<9} products of matrices {flops / 1e12:.3g} TFLOPS{also}")
    print(f"memory    {table['memory_bytes_per_s'] / 1e9:.3g} GB/s")
    print(f"upload    {table['upload_bytes_per_s'] / 1e9:.3g} GB/s from {table['host_memory']} host memory")
    print(f"download  {table['download_bytes_per_s'] / 1e9:.3g} GB/s")
    print(f"both      {table['both_bytes_per_s'] / 1e9:.3g} GB/s in each direction at once")
    print(
        f"remembered in {cache_file()}: plans for this GPU train at the block's rate and copy at both directions' rate"
    )
    return 0


def _run_io(args: argparse.Namespace, nbytes: int) -> int:
    candidates, missing = _candidates()
    results = {path: _measure(user_path(path), nbytes, candidates) for path in args.io}
    auto = pick("auto")
    speeds = [1 / each.seconds_per_byte for rates in results.values() for each in rates if each.settings == auto]
    weights = stripe_weights(speeds, [1 << 62] * len(speeds), 1)
    if args.json:
        directories = [
            {
                "path": str(path),
                "measured": [_as_json(each) for each in rates],
                "auto": asdict(auto),
                "weight": weight,
            }
            for (path, rates), weight in zip(results.items(), weights, strict=True)
        ]
        print(json.dumps({"directories": directories, "missing": missing}, indent=2))
        return 0
    for path, rates in results.items():
        _print_table(path, nbytes, rates)
        print(f"auto: {auto}\n")
    print(f"a checksum takes {_checksum_s_per_gb() * 1e3:.0f} ms of one core per GB; it is in the figures above")
    for kind, reason in missing.items():
        print(f"{kind} was not measured: {reason}")
    if len(results) > 1:
        shares = ", ".join(f"{weight:.0%} {path}" for path, weight in zip(results, weights, strict=True))
        print(f"striped over them: {shares}")
    return 0


def _candidates() -> tuple[list[EngineSettings], dict[str, str]]:
    """Settings to measure, and the reason why each other one is left out."""
    missing = {}
    found = [THREADS, replace(THREADS, num_threads=1), replace(THREADS, num_threads=2), AIOFILES]
    found += [IO_URING, replace(IO_URING, depth=8), replace(IO_URING, depth=8, num_threads=2)]
    shapes = ((32, 256 * KIB), (8, 2 * MIB), (2, 4 * MIB))
    found += [replace(IO_URING, depth=depth, request_bytes=size) for depth, size in shapes]
    if not native.available():
        missing["the native library"], found = "it is not built", [AIOFILES]
    elif problem := io_uring_problem():
        missing["io_uring"], found = problem, [each for each in found if each.kind is not IO_URING.kind]
    return found, missing


def _measure(path: Path, nbytes: int, candidates: Sequence[EngineSettings]) -> list[EngineRates]:
    region = Arena(0).allocate(nbytes)
    with private_directory(path) as place, RunDirectory.look(place) as directory:
        return measure(directory, candidates, region, ROUNDS, LIMIT_S)


def _print_table(path: Path, nbytes: int, rates: Sequence[EngineRates]) -> None:
    print(f"{path}: {format_bytes(nbytes)} per measurement, GB/s with checksums")
    print(f"{'engine':9} threads in flight request   read  write  mixed CPU ms/GB")
    for each in rates:
        settings = each.settings
        speeds = [each.bytes_per_s[pattern] / 1e9 for pattern in (Pattern.READ, Pattern.WRITE, Pattern.MIXED)]
        columns = " ".join(f"{speed:6.2f}" for speed in speeds)
        in_flight = settings.num_threads * settings.depth
        how = (
            f"{settings.kind.value:9} {settings.num_threads:7} {in_flight:9} {format_bytes(settings.request_bytes):>7}"
        )
        print(f"{how} {columns} {each.cpu_s_per_gb * 1e3:9.0f}")


def _checksum_s_per_gb() -> float:
    """Over memory that is in no cache."""
    region = Arena(0).allocate(128 * MIB)
    ctypes.memset(region.address, 1, region.nbytes)
    began = time.process_time()
    for offset in range(0, region.nbytes, 4 * MIB):
        crc32c(region.address + offset, 4 * MIB)
    return (time.process_time() - began) / region.nbytes * 1e9


def _as_json(rates: EngineRates) -> dict[str, Any]:
    speeds = {f"{pattern.value}_bytes_per_s": speed for pattern, speed in rates.bytes_per_s.items()}
    return asdict(rates.settings) | speeds | {"cpu_s_per_gb": rates.cpu_s_per_gb}
