"""One training step of a 124M GPT: plain PyTorch in RAM, ours in CPU memory, ours with everything on disk.

The systems live in processes of their own and step in turns, so that all of them see the same moods of the
machine; disk rates are taken between the rounds, in the directory the states rest in. Medians are compared.
Sequence 128, micro-batch 1, bf16 with fp32 master, AdamW, clipping, activations recomputed in backward.

    python benchmarks/train_step.py [--quick] [--nvme DIR] [--json FILE] [--threads N]

The bars: everything on disk <= 1.5x max(plain step, bytes counted / disk rates); everything in CPU memory
<= 1.3x plain; peak RSS, less what plain forward and backward need beside weights and gradients, <= 1.15x the
byte table + 3 largest units + 64 MiB.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from _rows import row, show, write

from zero_offload.recipes.gpt import GPT, GPTConfig, Recompute, next_token_loss, num_parameters, unit_numels
from zero_offload.types import GIB, MIB, format_bytes

MODEL = GPTConfig(num_layers=12, width=768, num_heads=12, vocab_size=50257, seq_max=128, recompute=Recompute.BLOCK)
ADAMW: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
CLIP = 1.0
WARM_UP_STEPS = 3  # the first records the trace, the next ones fill pools
REACH_NVME, REACH_CPU, REACH_RSS = 1.5, 1.3, 1.15
PROBE_BYTES, PROBE_BLOCK_BYTES, PROBE_THREADS = GIB, 4 * MIB, 4


class Sample(NamedTuple):
    """What a worker tells after a turn."""

    step_s: list[float]
    read_bytes: int  # from NVMe, of the last step
    written_bytes: int
    peak_rss_bytes: int


# Workers: each is one process that steps when its standard input says so.


def build_plain() -> tuple[GPT, Callable[[], tuple[int, int]]]:
    """The reference: bf16 parameters, fp32 master, torch's fused AdamW; its update."""
    model = GPT(MODEL)
    masters = [weight.detach().clone().requires_grad_() for weight in model.parameters()]
    model.bfloat16()
    weights: list[torch.Tensor] = list(model.parameters())
    optimizer = torch.optim.AdamW(masters, fused=True, **ADAMW)

    @torch.no_grad()
    def update() -> tuple[int, int]:
        for master, weight in zip(masters, weights, strict=True):
            assert weight.grad is not None
            master.grad, weight.grad = weight.grad.float(), None
        torch.nn.utils.clip_grad_norm_(masters, CLIP)
        optimizer.step()
        optimizer.zero_grad()
        torch._foreach_copy_(weights, masters)
        return 0, 0

    return model, update


def build_forward_backward() -> tuple[GPT, Callable[[], tuple[int, int]]]:
    """No optimizer at all: tells the memory that forward and backward need by themselves."""
    model = GPT(MODEL).bfloat16()

    def update() -> tuple[int, int]:
        model.zero_grad()
        return 0, 0

    return model, update


def build_ours(tier: str, directory: Path) -> tuple[GPT, Callable[[], tuple[int, int]]]:
    import zero_offload as zo

    model = GPT(MODEL)
    # In memory there is no directory and so no generation; on disk a commit is of every step, as by default.
    nvme = directory if tier == "nvme" else None
    zo.offload(model, zo.OffloadConfig(params=tier, grads="cpu", optimizer=tier, nvme=nvme))
    optimizer = zo.AdamW(model.parameters(), **ADAMW)

    def update() -> tuple[int, int]:
        zo.clip_grad_norm_(model, CLIP)
        optimizer.step()
        optimizer.zero_grad()
        stats = zo.stats(model)
        return int(stats.read_bytes.get("nvme", 0)), int(stats.written_bytes.get("nvme", 0))

    return model, update


def serve(system: str, directory: Path, num_threads: int) -> None:
    """A worker's life: read a number of steps, make them, answer with one line of JSON."""
    torch.set_num_threads(num_threads)
    if system in ("cpu", "nvme"):
        model, update = build_ours(system, directory)
    else:
        model, update = build_plain() if system == "plain" else build_forward_backward()
    tokens = torch.randint(MODEL.vocab_size, (1, MODEL.seq_max + 1), generator=torch.Generator().manual_seed(0))
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    # From here on the peak counts: building the model in fp32 is the same for everyone and no step.
    Path("/proc/self/clear_refs").write_text("5")
    for line in sys.stdin:
        times, moved = [], (0, 0)
        # A step pays for the update of the one before; the first of a turn has none to pay for, so it does not count.
        for _ in range(1 + int(line)):
            start = time.perf_counter()
            next_token_loss(model(inputs), targets).backward()
            moved = update()
            times.append(time.perf_counter() - start)
        with torch.no_grad():
            model(inputs)  # waits for the last update, which must not run in the next one's turn
        print(json.dumps(Sample(times[1:], *moved, peak_rss_bytes())), flush=True)


def peak_rss_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) * 1024


class Worker:
    """The other end of `serve`."""

    def __init__(self, system: str, directory: Path, num_threads: int) -> None:
        command = [sys.executable, __file__, "--worker", system, "--nvme", str(directory)]
        self._child = subprocess.Popen(
            [*command, "--threads", str(num_threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def step(self, num_steps: int) -> Sample:
        assert self._child.stdin is not None and self._child.stdout is not None
        self._child.stdin.write(f"{num_steps}\n")
        self._child.stdin.flush()
        answer = self._child.stdout.readline()
        if not answer:
            raise SystemExit(f"a worker ended early with exit code {self._child.wait()}; its error is above")
        return Sample(*json.loads(answer))

    def close(self) -> None:
        assert self._child.stdin is not None
        self._child.stdin.close()
        self._child.wait()


# The disk: the better of fio, where it is installed, and O_DIRECT transfers on huge pages, which fio has only where
# some are reserved and which read up to twice as fast. Training overwrites its files, so the first write, which takes
# fresh blocks, does not count.


class Rates(NamedTuple):
    read_bytes_per_s: float
    write_bytes_per_s: float


def disk_rates(directory: Path) -> Rates:
    file = directory / "probe"
    probes = [_direct_rate, _fio_rate] if shutil.which("fio") else [_direct_rate]
    try:
        _direct_rate(file, "write")
        write_rate = max(probe(file, "write") for probe in probes)
        return Rates(max(probe(file, "read") for probe in probes), write_rate)
    finally:
        file.unlink(missing_ok=True)


def _fio_rate(file: Path, direction: str) -> float:
    options = f"--name=probe --filename={file} --rw={direction} --size={PROBE_BYTES} --bs={PROBE_BLOCK_BYTES} "
    options += "--direct=1 --ioengine=libaio --iodepth=16 --iomem=mmaphuge --output-format=json"
    plain = options.replace(" --iomem=mmaphuge", "")  # without reserved huge pages fio refuses to start
    for arguments in (options, plain):
        done = subprocess.run(["fio", *arguments.split()], capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return float(json.loads(done.stdout)["jobs"][0][direction]["bw_bytes"])
    raise SystemExit(f"fio failed in {file.parent}: {done.stderr.strip()}")


def _direct_rate(file: Path, direction: str) -> float:
    descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
    blocks = mmap.mmap(-1, PROBE_THREADS * PROBE_BLOCK_BYTES)
    blocks.madvise(mmap.MADV_HUGEPAGE)
    blocks.write(os.urandom(len(blocks)))

    def transfer(thread: int) -> None:
        start = thread * PROBE_BLOCK_BYTES
        with memoryview(blocks)[start : start + PROBE_BLOCK_BYTES] as block:
            for offset in range(start, PROBE_BYTES, PROBE_THREADS * PROBE_BLOCK_BYTES):
                if direction == "write":
                    os.pwritev(descriptor, [block], offset)
                else:
                    os.preadv(descriptor, [block], offset)

    try:
        started = time.perf_counter()
        with ThreadPoolExecutor(PROBE_THREADS) as pool:
            list(pool.map(transfer, range(PROBE_THREADS)))
        return PROBE_BYTES / (time.perf_counter() - started)
    finally:
        os.close(descriptor)
        blocks.close()


# The comparison.


class Results(NamedTuple):
    samples: dict[str, list[Sample]]
    rates: list[Rates]
    plain_work_rss_bytes: int
    """Peak of plain forward and backward, less its weights and gradients."""


def measure(directory: Path, num_rounds: int, steps_per_round: int, num_threads: int) -> Results:
    numel = num_parameters(MODEL)
    lone = Worker("forward_backward", directory, num_threads)
    work_bytes = lone.step(WARM_UP_STEPS).peak_rss_bytes - 2 * 2 * numel
    lone.close()
    workers = {name: Worker(name, directory / "states", num_threads) for name in ("plain", "cpu", "nvme")}
    samples: dict[str, list[Sample]] = {name: [] for name in workers}
    rates = []
    try:
        for worker in workers.values():
            worker.step(WARM_UP_STEPS)
        for _ in range(num_rounds):
            rates.append(disk_rates(directory))
            for name, worker in workers.items():
                samples[name].append(worker.step(steps_per_round))
    finally:
        for worker in workers.values():
            worker.close()
    return Results(samples, rates, work_bytes)


def compare(results: Results) -> list[dict[str, Any]]:
    step_s = {
        name: statistics.median(s for sample in samples for s in sample.step_s)
        for name, samples in results.samples.items()
    }
    disk = results.samples["nvme"][-1]
    read_rate = statistics.median(rate.read_bytes_per_s for rate in results.rates)
    write_rate = statistics.median(rate.write_bytes_per_s for rate in results.rates)
    disk_s = disk.read_bytes / read_rate + disk.written_bytes / write_rate
    print(f"plain torch      {step_s['plain']:.3f} s/step")
    print(f"ours, CPU memory {step_s['cpu']:.3f} s/step")
    print(f"ours, on disk    {step_s['nvme']:.3f} s/step")
    read = f"{format_bytes(disk.read_bytes)} read at {read_rate / 1e9:.2f} GB/s"
    written = f"{format_bytes(disk.written_bytes)} written at {write_rate / 1e9:.2f} GB/s"
    print(f"disk             {disk_s:.3f} s/step for {read} and {written}")
    limit_s = max(step_s["plain"], disk_s)
    against = "max(plain torch, bytes / disk rates)"
    return [
        row("step, everything on disk", step_s["nvme"], "s", against, limit_s, REACH_NVME),
        row("step, everything in CPU memory", step_s["cpu"], "s", "plain torch", step_s["plain"], REACH_CPU),
        _rss_row("nvme", results, bytes_per_parameter=2),  # only bf16 gradients are held
        _rss_row("cpu", results, bytes_per_parameter=2 + 12),
    ]


def _rss_row(system: str, results: Results, bytes_per_parameter: int) -> dict[str, Any]:
    table = bytes_per_parameter * num_parameters(MODEL)
    in_flight = 2 * sum(sorted(numel for _, numel in unit_numels(MODEL))[-3:]) + 64 * MIB
    peak = max(sample.peak_rss_bytes for sample in results.samples[system])
    ours = peak - results.plain_work_rss_bytes - in_flight
    against = "byte table; ours is less plain's own work, 3 units and 64 MiB"
    return row(f"peak RSS, {system}", ours / MIB, "MiB", against, table / MIB, REACH_RSS)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds; ends within three minutes")
    parser.add_argument("--nvme", type=Path, help="directory on the disk to use (default: a new one here)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows here")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        serve(args.worker, args.nvme, args.threads)
        return 0
    parent = args.nvme or Path.cwd()
    with tempfile.TemporaryDirectory(prefix="train_step_", dir=parent) as directory:
        results = measure(Path(directory), 4 if args.quick else 10, 4, args.threads)
    rows = compare(results)
    show(rows)
    write(rows, args.json)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
