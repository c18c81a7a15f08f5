"""The sections of `gpu.py`: what each measures. Bars are in `rows.py`."""

from __future__ import annotations

import importlib.util
import math
import re
import shutil
import socket
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from harness.disks import Rates, disk_rates
from harness.gpu.machine import (
    Machine,
    copy_host_memory,
    device_update,
    pin_and_copy,
    this_machine,
    update_s_per_parameter,
)
from harness.gpu.model import SHAPES, Batch, Llama, Shape, TransformersLlama, TransformersMoe, batch_of
from harness.gpu.record import Figures, Skip
from harness.gpu.training import (
    Bench,
    Trainer,
    deepspeed,
    fsdp2,
    in_turn,
    measure,
    muon_of,
    ours,
    plain,
    profile,
    time_steps,
)

import zero_offload as zo
from zero_offload.base.types import GIB, MIB
from zero_offload.finetune.fit.measure import device_rates
from zero_offload.hardware.device import collectives_of, compute_device

REPOSITORY = Path(__file__).parents[3]
TESTS, KERNEL_TESTS = Path("tests/gpu"), "test_device_update.py"
"""The tests on a GPU, and the file of them that compiles some hundred kernels."""
TEST_WORKERS, TESTS_END_S, OUTPUT_MAX = 12, 15, 200_000
"""pytest stops itself so long before it would be killed, to say what has failed."""

SEQ, TOY_SEQ = 4096, 32
TOKENS = (4096, 32768, 16384, 8192)
"""Per step: the fewest and the most first, since they tell the most if time runs out."""
LONG = 32768
MOE_TOKENS = (8192, 4096)
MICRO_BATCHES = 4
LORA_RANK = 16
CAP_BYTES, CONTEXT_BYTES, CAPPED_HOST_BYTES = 24 * GIB, GIB, 100 * GIB
"""A card of 24 GB, what a driver takes of it, and the host memory that the 13B section keeps within."""
CAPPED_WEIGHTS_BYTES = 8 * GIB
"""Of such a card, for weights: activations, gradients and what is computed have the rest."""
DISK_SHARE = 0.9
"""Of what is free on the disk."""
STEPS_AT_LEAST, STEPS_SHARE = 8, 0.5
"""Steps whose bytes the disk moves in so much of a section's time; the rest is for the start."""
STATE_BYTES = {"fp32": 12.0, "compact": 5.03}
"""Per parameter, its value included."""
EXACT, COMPACT = (zo.Precision(compute="bf16", states=states) for states in ("fp32", "compact"))

STREAMED_BYTES, TOY_STREAMED_BYTES = {"fp32": 13 * MIB, "bf16": 7 * MIB}, 2 * MIB
"""Of device memory, for a model some units of which then come for each use."""
PLACEMENTS: dict[str, dict[str, Any]] = {
    "cpu": {},
    "cpu, kept on the device": {"device_memory": None},
    "params on the device": {"params": "device"},
    "grads on the device": {"grads": "device"},
    "all on the device": {"params": "device", "grads": "device", "optimizer": "device"},
    "all on nvme": {"params": "nvme", "grads": "nvme", "optimizer": "nvme"},
    "fractions": {"params": {"device": 0.5, "cpu": 0.5}, "optimizer": {"device": 0.3, "cpu": 0.3, "nvme": 0.4}},
    "activations on cpu": {"activations": "cpu"},
    "activations on nvme": {"activations": "nvme", "optimizer": "nvme"},
    "overlap backward": {"overlap": "backward"},
}


@dataclass(frozen=True)
class Section:
    limit_s: int
    what: str
    run: Callable[[Bench], None]


def smoke(bench: Bench) -> None:
    machine, record = bench.machine, bench.record
    record.attempt("update on the device", partial(device_update, machine))
    record.attempt("pin and copy", partial(pin_and_copy, machine))
    for name, placement in PLACEMENTS.items():
        record.attempt(f"one step: {name}", partial(_one_step, bench, name, placement))


def _one_step(bench: Bench, name: str, placement: dict[str, Any]) -> Figures:
    (loss,) = _losses(bench, "bf16", f"smoke {name}", placement, clip=None, num_steps=1)
    if not math.isfinite(loss):
        raise ArithmeticError(f"the loss is {loss}")
    return {"loss": loss}


def rates(bench: Bench) -> None:
    machine, record = bench.machine, bench.record
    record.attempt("device", lambda: device_rates(compute_device(), machine.size(GIB, MIB)))
    record.attempt("host memory", partial(copy_host_memory, machine))
    for states in STATE_BYTES:
        name = f"update on the host, {states}"
        record.attempt(name, lambda states=states: {"s_per_parameter": update_s_per_parameter(machine, states)})
    record.attempt("disk, bytes/s", lambda: _rates_of_disk(bench)._asdict())


def _rates_of_disk(bench: Bench) -> Rates:
    return disk_rates(bench.directory, bench.machine.size(2 * GIB, 16 * MIB))


def placements(bench: Bench) -> None:
    """Losses of a small model: of training without offload, again, and of every placement."""
    # Some backwards on a GPU add in any order unless they are asked not to.
    torch.use_deterministic_algorithms(True, warn_only=True)
    record, num_steps = bench.record, bench.machine.size(6, 2)
    for precision in ("bf16",) if bench.machine.rehearses else ("fp32", "bf16"):
        plainly = partial(_plain_losses, bench.machine, precision, num_steps)
        record.attempt(f"{precision}, plain", lambda plainly=plainly: {"losses": plainly()})
        record.attempt(f"{precision}, plain again", lambda plainly=plainly: {"losses": plainly()})
        for name, placement in PLACEMENTS.items():
            for clip in (None, 0.1) if placement.get("overlap") != "backward" else (None,):
                what = f"{precision}, {name}" + (", clipped" if clip else "")
                losses = partial(_losses, bench, precision, what, placement, clip, num_steps)
                record.attempt(what, lambda losses=losses: {"losses": losses()})


def _small(machine: Machine) -> Llama:
    """Its values are bf16's, so that masters begin alike in both precisions."""
    return Llama(SHAPES["toy" if machine.rehearses else "small"], TOY_SEQ).float()


def _small_batches(machine: Machine, num_steps: int) -> Iterator[Batch]:
    shape = SHAPES["toy" if machine.rehearses else "small"]
    return (batch_of(shape, 2 * TOY_SEQ, TOY_SEQ, machine.device, seed=step) for step in range(num_steps))


def _plain_losses(machine: Machine, precision: str, num_steps: int) -> list[float]:
    """Forward and backward on the device, the update on the host by the same optimizer."""
    model = _small(machine).to(machine.device, torch.bfloat16 if precision == "bf16" else torch.float32)
    params = list(model.parameters())
    copies = [param.detach().cpu().requires_grad_() for param in params]
    optimizer = zo.AdamW(copies, lr=1e-3)
    losses = []
    for batch in _small_batches(machine, num_steps):
        loss = model(*batch)
        loss.backward()
        for param, copy in zip(params, copies, strict=True):
            assert param.grad is not None
            copy.grad, param.grad = param.grad.cpu(), None
        optimizer.step()
        with torch.no_grad():
            torch._foreach_copy_(params, copies)
        losses.append(loss.item())
    return losses


def _losses(
    bench: Bench, precision: str, name: str, placement: dict[str, Any], clip: float | None, num_steps: int
) -> list[float]:
    """Where the placement says nothing of the device, most parameters come to it for their uses only."""
    model, directory = _small(bench.machine), bench.directory / re.sub(r"\W+", "-", name)
    if "device" not in str(placement):
        placement = placement | {"device_memory": bench.machine.size(STREAMED_BYTES[precision], TOY_STREAMED_BYTES)}
    zo.offload(model, zo.OffloadConfig(precision=precision, durability="scratch", nvme=directory, **placement))
    optimizer = zo.AdamW(model.parameters(), lr=1e-3)
    losses = []
    try:
        for batch in _small_batches(bench.machine, num_steps):
            loss = model(*batch)
            loss.backward()
            if clip is not None:
                zo.clip_grad_norm_(model, clip)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    finally:
        zo.close(model)
    return losses


def _sizes(machine: Machine, *tokens: int) -> tuple[list[int], int]:
    """Tokens per step, and the length of a sequence."""
    return ([2 * TOY_SEQ], TOY_SEQ) if machine.rehearses else (list(tokens), SEQ)


def _shape(machine: Machine, name: str) -> Shape:
    return SHAPES["toy" if machine.rehearses else name]


def full_8b(bench: Bench) -> None:
    """Gradients stay on the device until their update where the host has no room for them."""
    shape, (tokens, seq) = _shape(bench.machine, "8b"), _sizes(bench.machine, *TOKENS)
    build = partial(Llama, shape, seq)
    try:
        trainer = ours(bench, build, zo.OffloadConfig(precision=EXACT))
    except Skip as reason:
        bench.record.put("grads on cpu", {"skipped": str(reason)})
        trainer = ours(bench, build, zo.OffloadConfig(precision=EXACT, grads="device"))
    measure(bench, trainer, shape, tokens, seq)
    batch = batch_of(shape, tokens[-1], seq, bench.machine.device)
    bench.record.attempt(f"profile, {tokens[-1]} tokens", partial(profile, trainer, bench.machine, batch), 15)
    _accumulate(bench, trainer, shape, seq)
    trainer.close()


def auto_8b(bench: Bench) -> None:
    """The same with tiers by prediction: some states are in the device's memory, and updated there."""
    shape, (tokens, seq) = _shape(bench.machine, "8b"), _sizes(bench.machine, 16384, 4096)
    config = zo.OffloadConfig(precision=EXACT, params="auto", grads="auto", optimizer="auto")
    trainer = ours(bench, partial(Llama, shape, seq), config)
    measure(bench, trainer, shape, tokens, seq)
    trainer.close()


def _accumulate(bench: Bench, trainer: Trainer, shape: Shape, seq: int) -> None:
    """Micro-batches of one sequence each: a loop, then `zo.accumulate`. Sums of gradients are twice as wide."""
    model: Any = trainer.model
    optimizer: Any = trainer.optimizer
    needed, free = 2 * shape.numel, bench.machine.free_host_bytes()
    if needed > free:
        skipped = f"sums of gradients need {needed / GIB:.1f} GiB more of host memory, {free / GIB:.1f} GiB are free"
        bench.record.put("accumulate", {"skipped": skipped})
        return

    def loss_of(model: Any, batch: Batch) -> torch.Tensor:
        loss: torch.Tensor = model(*batch) / MICRO_BATCHES
        return loss

    def loop(batches: Sequence[Batch]) -> list[torch.Tensor]:
        losses = [loss_of(model, batch) for batch in batches[:0]]
        for batch in batches:
            loss = loss_of(model, batch)
            loss.backward()
            losses.append(loss.detach())
        return losses

    def at(accumulate: Callable[[Sequence[Batch]], list[torch.Tensor]]) -> Figures:
        def step(batch: Batch) -> torch.Tensor:
            losses = accumulate(list(zip(*(part.split(1) for part in batch), strict=True)))
            zo.clip_grad_norm_(model, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            return torch.stack([loss.detach() for loss in losses]).sum()

        batch = batch_of(shape, MICRO_BATCHES * seq, seq, bench.machine.device)
        return time_steps(step, bench.machine, batch) | trainer.tell()

    by_unit = partial(zo.accumulate, model, loss_fn=loss_of)
    for name, accumulate in (("loop", loop), ("accumulate", lambda batches: by_unit(batches))):
        what = f"{name}, {MICRO_BATCHES} x {seq} tokens"
        bench.record.attempt(what, partial(at, accumulate), 10)


def no_offload(bench: Bench) -> None:
    for name, has_masters in (("8b", False), ("2b", True)):
        shape, (tokens, seq) = _shape(bench.machine, name), _sizes(bench.machine, *sorted(TOKENS))
        make = partial(plain, bench, partial(Llama, shape, seq, recomputes=True), has_masters=has_masters)
        timed = partial(measure, bench, shape=shape, tokens=tokens, seq=seq, prefix=f"{name}: ")
        in_turn(bench, f"{name} in all", make, timed)


def modes_2b(bench: Bench) -> None:
    """The cost of settings: the same model in CPU memory, updated behind backward, and updated on the device."""
    shape, (tokens, seq) = _shape(bench.machine, "2b"), _sizes(bench.machine, 4096, 16384)
    variants: dict[str, dict[str, Any]] = {
        "cpu": {},
        "overlap backward": {"overlap": "backward"},
        "optimizer device": {"params": "device", "grads": "device", "optimizer": "device"},
    }
    for name, settings in variants.items():
        config = zo.OffloadConfig(precision=EXACT, **settings)
        make = partial(ours, bench, partial(Llama, shape, seq), config, clips="overlap" not in settings)

        def timed(trainer: Trainer, name: str = name) -> None:
            measure(bench, trainer, shape, tokens, seq, prefix=f"{name}: ")
            if name == "cpu":
                _accumulate(bench, trainer, shape, seq)

        in_turn(bench, f"{name} in all", make, timed, 10)


def muon_2b(bench: Bench) -> None:
    """zo.Muon with states in CPU memory, the same without offload, then with states on the device."""
    shape, (tokens, seq) = _shape(bench.machine, "2b"), _sizes(bench.machine, 4096, 16384)

    def offloaded(**settings: Any) -> Trainer:
        config = zo.OffloadConfig(precision=EXACT, **settings)
        return ours(bench, partial(Llama, shape, seq), config, optimizer_of=muon_of)

    makes: dict[str, Callable[[], Trainer]] = {
        "cpu": offloaded,
        "plain": partial(plain, bench, partial(Llama, shape, seq, recomputes=True), has_masters=True, has_muon=True),
        "optimizer device": partial(offloaded, params="device", grads="device", optimizer="device"),
    }
    for name, make in makes.items():
        timed = partial(measure, bench, shape=shape, tokens=tokens, seq=seq, prefix=f"{name}: ")
        in_turn(bench, f"{name} in all", make, timed, 10)


def peer_fsdp2(bench: Bench) -> None:
    shape, (tokens, seq) = _shape(bench.machine, "2b"), _sizes(bench.machine, 4096, 16384)
    make = partial(fsdp2, bench, partial(Llama, shape, seq, recomputes=True))
    in_turn(bench, "in all", make, partial(measure, bench, shape=shape, tokens=tokens, seq=seq))


def peer_deepspeed(bench: Bench) -> None:
    shape, (tokens, seq) = _shape(bench.machine, "2b"), _sizes(bench.machine, 4096, 16384)
    trainer = deepspeed(bench, partial(Llama, shape, seq, recomputes=True), seq)
    measure(bench, trainer, shape, tokens, seq)


def transformers_3b(bench: Bench) -> None:
    """Offloaded, then the same model in the device's memory with bf16 states."""
    if importlib.util.find_spec("transformers") is None:
        raise Skip("transformers is not installed here")
    shape, (tokens, seq) = _shape(bench.machine, "3b"), _sizes(bench.machine, 4096, 8192)
    build = partial(TransformersLlama, shape, seq)

    def without() -> Trainer:
        def marked() -> torch.nn.Module:
            model = build()
            zo.checkpoint(model.blocks)
            return model

        return plain(bench, marked, has_masters=False)

    makes = {"ours": partial(ours, bench, build, zo.OffloadConfig(precision=EXACT)), "plain": without}
    for name, make in makes.items():
        timed = partial(measure, bench, shape=shape, tokens=tokens, seq=seq, prefix=f"{name}: ")
        in_turn(bench, f"{name} in all", make, timed, 10)


def capped_13b(bench: Bench) -> None:
    """Compact states; tokens go up, since the largest number may not fit."""
    shape, (tokens, seq) = _shape(bench.machine, "13b"), _sizes(bench.machine, *sorted(TOKENS))
    config = _capped(bench.machine, precision=COMPACT, cpu_memory=CAPPED_HOST_BYTES)
    trainer = ours(bench, partial(Llama, shape, seq), config)
    measure(bench, trainer, shape, tokens, seq)
    trainer.close()


def lora_32b(bench: Bench) -> None:
    shape, (tokens, seq) = _shape(bench.machine, "32b"), _sizes(bench.machine, *sorted(TOKENS))
    trainer = ours(bench, partial(Llama, shape, seq, lora_rank=LORA_RANK), _capped(bench.machine, precision=EXACT))
    measure(bench, trainer, shape, tokens, seq, is_frozen=True)
    trainer.close()


def moe_lora(bench: Bench) -> None:
    """transformers' Qwen3-MoE; experts are fetched in groups."""
    if importlib.util.find_spec("transformers") is None or importlib.util.find_spec("peft") is None:
        raise Skip("transformers and peft are not installed here")
    shape, (tokens, seq) = (
        SHAPES["toy-moe" if bench.machine.rehearses else "30b-moe"],
        _sizes(bench.machine, *MOE_TOKENS),
    )
    build = partial(TransformersMoe, shape, seq, lora_rank=LORA_RANK)
    trainer = ours(bench, build, _capped(bench.machine, precision=EXACT))
    measure(bench, trainer, shape, tokens, seq, is_frozen=True)
    trainer.close()


def _capped(machine: Machine, **settings: Any) -> zo.OffloadConfig:
    """On a card of 24 GB: this process gets no more."""
    machine.cap(CAP_BYTES - CONTEXT_BYTES)
    return zo.OffloadConfig(device_memory=CAPPED_WEIGHTS_BYTES, **settings)


def long_sequence(bench: Bench) -> None:
    """8B in compact states, one sequence: the blocks' inputs on the device, then in CPU memory."""
    shape, seq = _shape(bench.machine, "8b"), bench.machine.size(LONG, 2 * TOY_SEQ)
    for tier in ("device", "cpu"):
        make = partial(ours, bench, partial(Llama, shape, seq), zo.OffloadConfig(precision=COMPACT, activations=tier))
        timed = partial(measure, bench, shape=shape, tokens=[seq], seq=seq, prefix=f"{tier}: ")
        in_turn(bench, f"{tier} in all", make, timed, 20)


def nvme_8b(bench: Bench) -> None:
    _on_nvme(bench, "8b", COMPACT, "scratch", 1)


def nvme_2b(bench: Bench) -> None:
    """With generations: two slots on disk."""
    _on_nvme(bench, "2b", EXACT, "process", 2)


def _on_nvme(bench: Bench, name: str, precision: zo.Precision, durability: str, num_slots: int) -> None:
    """Everything on disk; with fewer layers where it has too little room for all, or is too slow."""
    whole, (tokens, seq) = _shape(bench.machine, name), _sizes(bench.machine, 4096, 32768)
    disk = _rates_of_disk(bench)
    state_bytes, room = STATE_BYTES[str(precision.states)], shutil.disk_usage(bench.directory).free
    shape = that_fits(whole, state_bytes, num_slots, room, disk, bench.record.left_s)
    bench.record.put("model", {"numel": shape.numel, "layers": shape.num_layers, "of": whole.num_layers})
    config = zo.OffloadConfig(
        params="nvme", optimizer="nvme", nvme=bench.directory / "states", durability=durability, precision=precision
    )
    trainer = ours(bench, partial(Llama, shape, seq), config)
    measure(bench, trainer, shape, tokens, seq)
    trainer.close()
    bench.record.put("disk, bytes/s", disk._asdict())


def that_fits(shape: Shape, state_bytes: float, num_slots: int, room: float, disk: Rates, left_s: float) -> Shape:
    """With as many layers as the disk has room for, and moves `STEPS_AT_LEAST` times in time; at least one."""
    by_room = DISK_SHARE * room / (num_slots * state_bytes)
    # A step reads the states and, for forward and for backward, the values; it writes the states.
    step_s = disk.seconds(state_bytes + 2 * 2, state_bytes)
    by_time = STEPS_SHARE * left_s / STEPS_AT_LEAST / step_s
    ends = shape.numel - shape.num_layers * shape.layer_numel
    num_layers = int((min(by_room, by_time) - ends) / shape.layer_numel)
    return replace(shape, num_layers=max(1, min(shape.num_layers, num_layers)))


def tests_of_placements(bench: Bench) -> None:
    _pytest(bench, str(TESTS), f"--ignore={TESTS / KERNEL_TESTS}")


def tests_of_kernels(bench: Bench) -> None:
    _pytest(bench, str(TESTS / KERNEL_TESTS))


def _pytest(bench: Bench, *arguments: str) -> None:
    """In a process of its own; workers share the compilations."""
    seconds = bench.record.left_s
    command = [sys.executable, "-m", "pytest", "-q", "-rfE", "-p", "no:cacheprovider", *arguments]
    if importlib.util.find_spec("xdist") is not None and not bench.machine.rehearses:
        command += ["-n", str(TEST_WORKERS)]
    if importlib.util.find_spec("pytest_timeout") is not None:
        command.append(f"--session-timeout={seconds - TESTS_END_S:.0f}")
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=seconds, cwd=REPOSITORY)
        output, status = done.stdout + done.stderr, done.returncode
    except subprocess.TimeoutExpired as error:
        told = error.stdout.decode() if isinstance(error.stdout, bytes) else error.stdout or ""
        output, status = f"{told}\nkilled after {seconds:.0f} s", -1
    summary = next(reversed(output.strip().splitlines()), "")
    counts = {what: int(number) for number, what in re.findall(r"(\d+) (passed|failed|error|skipped)", summary)}
    failed = max(counts.get("failed", 0) + counts.get("error", 0), int(status != 0))
    found = {"failed": failed, "exit_code": status, "summary": summary, "counts": counts}
    bench.record.put("tests", found | {"output": output[-OUTPUT_MAX:]})


def two_ranks(bench: Bench) -> None:
    """Two processes on one device, over gloo: every stage and two placements, each with its own losses per rank."""
    how = "fork" if bench.machine.rehearses else "spawn"
    torch.multiprocessing.start_processes(_rank, (bench.directory, bench.machine.rehearses), nprocs=2, start_method=how)
    for stage in (1, 2, 3):
        for tier in ("cpu", "device"):
            losses = [
                [float(each) for each in (bench.directory / f"{stage}-{tier}-{rank}").read_text().split()]
                for rank in range(2)
            ]
            bench.record.put(f"stage {stage}, {tier}", {"losses": losses})


def _rank(rank: int, directory: Path, rehearses: bool) -> None:
    # Two ranks of one machine may not share a device; two machines with one device each may.
    here = socket.gethostname()
    socket.gethostname = lambda: f"{here}-{rank}"
    machine = this_machine(rehearses)
    # NCCL refuses two ranks on one device.
    backend = collectives_of(machine.device) if rehearses else "gloo"
    dist.init_process_group(backend, init_method=f"file://{directory}/store", rank=rank, world_size=2)
    warnings.simplefilter("ignore")
    for stage in (1, 2, 3):
        for tier in ("cpu", "device"):
            model = _small(machine)
            zo.offload(model, zo.OffloadConfig(stage=stage, params=tier, grads=tier, optimizer=tier))
            optimizer = zo.AdamW(model.parameters(), lr=1e-3)
            losses = []
            for tokens, targets in _small_batches(machine, 3):
                loss = model(tokens[rank : rank + 1], targets[rank : rank + 1])
                loss.backward()
                zo.clip_grad_norm_(model, 1.0)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
            zo.close(model)
            (directory / f"{stage}-{tier}-{rank}").write_text(" ".join(map(repr, losses)))
    dist.destroy_process_group()


SECTIONS = {
    "smoke": Section(60, "1 GiB pinned and copied, one step of each placement", smoke),
    "rates": Section(50, "matmul, device memory, update on the host, disk", rates),
    "placements": Section(90, "losses of every placement == those of plain training", placements),
    "8b": Section(210, "8B exact in CPU memory, 4k-32k tokens a step, one step profiled, zo.accumulate", full_8b),
    "8b-auto": Section(150, '8B exact, tiers "auto"', auto_8b),
    "plain": Section(90, "no offload: 8B in bf16, 2B with fp32 masters", no_offload),
    "two-ranks": Section(60, "two processes on one device over gloo", two_ranks),
    "tests": Section(150, "tests/gpu, without its kernel tests", tests_of_placements),
    "muon": Section(90, "2B by zo.Muon: in CPU memory, without offload, on the device", muon_2b),
    "2b": Section(130, '2B: in CPU memory, overlap="backward", optimizer="device", zo.accumulate', modes_2b),
    "fsdp2": Section(90, "2B with torch's FSDP2 and CPU offload", peer_fsdp2),
    "transformers": Section(110, "transformers' Llama, 3B, beside no offload", transformers_3b),
    "13b-24g": Section(200, "13B compact within 24 GB of device memory, 100 GiB of the host's", capped_13b),
    "32b-lora": Section(180, "32B, LoRA, within 24 GB of device memory", lora_32b),
    "30b-moe-lora": Section(180, "30B MoE, LoRA, experts in groups, within 24 GB of device memory", moe_lora),
    "long": Section(150, "8B compact, 1 x 32k tokens, activations in CPU memory", long_sequence),
    "8b-nvme": Section(200, "8B compact, all states on disk", nvme_8b),
    "kernel-tests": Section(240, "the kernel tests of tests/gpu, some hundred compilations", tests_of_kernels),
    "2b-nvme": Section(150, "2B exact on disk, with generations", nvme_2b),
    "deepspeed": Section(150, "2B with DeepSpeed ZeRO-3 and CPU offload, where it is installed", peer_deepspeed),
}
"""In order of worth."""
