"""A model whose states do not fit: training stays inside `cpu_memory`, and takes nothing more after two steps."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zero_offload as zo
from tests.helpers.cgroups import memory_cgroup
from tests.helpers.models import TinyLM
from zero_offload.base.types import MIB, StateKind, Tier
from zero_offload.hardware.probe import peak_resident_bytes
from zero_offload.storage.memory import arena

DIM, NUM_BLOCKS, NUM_STEPS = 512, 14, 3
CPU_MEMORY = 128 * MIB
ALLOWANCE = 24 * MIB
"""Activations of one block, torch's own buffers and thread stacks, allocator slack."""


def _config(nvme: Path | str, **settings: Any) -> zo.OffloadConfig:
    choices: dict[str, Any] = {
        "params": "nvme",
        "optimizer": "nvme",
        "grads": "nvme",
        "cpu_memory": CPU_MEMORY,
    } | settings
    return zo.OffloadConfig(nvme=nvme, precision="bf16", **choices)


def _rss_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def _num_mappings() -> int:
    return len(Path("/proc/self/maps").read_text().splitlines())


def _empty_model() -> nn.Module:
    """Parameters that cost nothing until they are given a value."""
    with torch.device("meta"):
        return TinyLM(DIM, NUM_BLOCKS)


def _count_ranges() -> list[int]:
    """A list that grows with every address range that the package takes from now on."""
    taken, original = [], arena._map

    def counted(nbytes: int, protection: int) -> int:
        taken.append(nbytes)
        return original(nbytes, protection)

    arena._map = counted
    return taken


def _warm_up() -> None:
    """Take the memory that torch takes for its own once: modules that an optimizer imports, kernels, thread stacks."""
    model = TinyLM(DIM, 1).bfloat16()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.zeros(1, 33, dtype=torch.long)).backward()
    optimizer.step()


def measure(nvme: str, cgroup: str) -> None:
    """The subprocess: prints what it took, in bytes, as JSON."""
    torch.set_num_threads(2)
    _warm_up()
    model = TinyLM(DIM, NUM_BLOCKS)
    num_params = sum(param.numel() for param in model.parameters())
    if cgroup:
        Path(cgroup, "cgroup.procs").write_text(str(os.getpid()))
    values = _rss_bytes()
    zo.offload(model, _config(nvme))
    offloaded = _rss_bytes()
    optimizer = zo.AdamW(model.parameters(), lr=1e-3)
    taken = _count_ranges()
    _reset_peak()
    seen: list[dict[str, float]] = []
    for step in range(NUM_STEPS + 3):
        tokens = torch.randint(0, 61, (1, 33), generator=torch.Generator().manual_seed(step))
        loss = model(tokens)
        loss.backward()
        zo.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        zo.commit(model, optimizer)
        cpu_bytes = zo.stats(model).resident_bytes["cpu"]
        row = {"loss": loss.item(), "mappings": _num_mappings(), "cpu": cpu_bytes, "taken": len(taken)}
        seen.append(row)
    peak = peak_resident_bytes()
    zo.close(model)
    result = {"num_params": num_params, "before": values, "after": offloaded, "peak": peak, "seen": seen}
    print(json.dumps(result))


def _run(nvme: Path, cgroup: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, "-m", "tests.parity.test_budget", str(nvme), cgroup]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=240, check=False)


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Of a run in a memory cgroup of the budget's size, where one can be made: "used" is what it has counted.

    Bytes in memory before the process joined are not counted there: only what training takes is.
    """
    with memory_cgroup(CPU_MEMORY + ALLOWANCE) as cgroup:
        done = _run(tmp_path_factory.mktemp("budget") / "nvme", str(cgroup or ""))
        used = int((cgroup / "memory.max_usage_in_bytes").read_text()) if cgroup else None
        killed = int((cgroup / "memory.oom_control").read_text().split("oom_kill ")[1]) if cgroup else 0
    assert done.returncode != -signal.SIGKILL, f"out of memory, {killed} killed"
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout) | {"used": used}


def test_states_are_several_times_the_budget(measured: dict[str, Any]) -> None:
    assert measured["num_params"] * 12 > 2.5 * CPU_MEMORY


def test_resident_memory_stays_inside_the_budget(measured: dict[str, Any]) -> None:
    # The model's own fp32 values left for the disk; what is left of the process is torch and us.
    bare = measured["before"] - measured["num_params"] * 4
    assert measured["peak"] - bare < CPU_MEMORY + ALLOWANCE, measured


def test_the_model_leaves_memory_when_it_is_offloaded(measured: dict[str, Any]) -> None:
    assert measured["after"] < measured["before"] - measured["num_params"] * 4 + CPU_MEMORY


def test_what_we_count_as_ours_is_inside_too(measured: dict[str, Any]) -> None:
    assert all(step["cpu"] <= CPU_MEMORY for step in measured["seen"])


def test_nothing_grows_after_the_second_step(measured: dict[str, Any]) -> None:
    later = measured["seen"][2:]
    assert len({step["cpu"] for step in later}) == 1
    assert len({step["taken"] for step in later}) == 1 and later[0]["taken"] > 0
    # Neighbouring ranges merge and split as pages move; what was left behind per unit and step would add up.
    assert later[-1]["mappings"] - later[0]["mappings"] < NUM_BLOCKS
    assert len({step["loss"] for step in measured["seen"]}) == len(measured["seen"])


def test_it_trains_in_a_cgroup_of_that_size(measured: dict[str, Any]) -> None:
    if measured["used"] is None:
        pytest.skip("no memory cgroup can be made here")
    assert len(measured["seen"]) == NUM_STEPS + 3
    assert measured["used"] <= CPU_MEMORY + ALLOWANCE


def test_in_memory_it_would_not_have_fitted(tmp_path: Path) -> None:
    config = _config(tmp_path, optimizer="cpu", params="cpu", grads="cpu", cpu_memory=CPU_MEMORY)
    plan = zo.plan(_empty_model(), config)
    assert not plan.fits
    assert plan.used_bytes(Tier.CPU) > 2.5 * CPU_MEMORY
    assert zo.plan(_empty_model(), _config(tmp_path)).fits


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"optimizer": "cpu"}, ["memory", "needs", "128 MiB available", "missing", "would fit", "optimizer='nvme'"]),
        ({"cpu_memory": "8MiB"}, ["needs", "8 MiB available", "cpu_memory of at least"]),
        ({"nvme_capacity": "64MiB"}, ["nvme tier", "needs", "64 MiB available", "missing", "would fit"]),
    ],
    ids=str,
)
def test_a_budget_that_is_too_small(settings: dict[str, Any], words: list[str], tmp_path: Path) -> None:
    model = TinyLM(DIM, NUM_BLOCKS)
    with pytest.raises(zo.CapacityError) as caught:
        zo.offload(model, _config(tmp_path / "nvme", **settings))
    for word in words:
        assert word in str(caught.value)
    # Nothing was taken: neither the model's values nor disk space.
    assert model(torch.zeros(1, 5, dtype=torch.long)).isfinite()
    assert not list(tmp_path.rglob("*.swap"))


@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_states_that_no_plan_counts_are_compared_with_the_budget(tier: str, tmp_path: Path) -> None:
    """amsgrad has a third one."""
    settings: dict[str, Any] = {"params": tier, "optimizer": tier, "precision": "fp32"}
    if tier == "nvme":
        settings["nvme"] = tmp_path
    plan = zo.plan(TinyLM(128), zo.OffloadConfig(**settings))
    numel = sum(param.numel() for param in TinyLM(128).parameters())
    third = numel * 4 * (2 if tier == "nvme" else 1)  # slots
    limit = {"cpu": "cpu_memory", "nvme": "nvme_capacity"}[tier]
    used = {
        "cpu": plan.used_bytes(Tier.CPU) + plan.used_bytes(Tier.DEVICE),
        "nvme": plan.used_bytes(Tier.NVME),
    }[tier]
    for room, fits in ((0, False), (third - 2**16, False), (third + 2**18, True)):
        model = zo.offload(TinyLM(128), zo.OffloadConfig(**settings, **{limit: used + room}, existing="discard"))
        if not fits:
            with pytest.raises(zo.CapacityError, match=f"{tier} tier they take .* Raise {limit}=.*amsgrad=False"):
                zo.AdamW(model.parameters(), amsgrad=True)
        optimizer = zo.AdamW(model.parameters(), amsgrad=fits)
        model(torch.zeros(1, 4, dtype=torch.long)).square().mean().backward()
        optimizer.step()
        zo.close(model)


@pytest.mark.parametrize("accumulates", [True, False], ids=["accumulate", "loop"])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_sums_of_micro_batches_take_what_the_plan_says(micro_batches: int, accumulates: bool) -> None:
    """In fp32, where one micro-batch leaves bf16."""
    config = zo.OffloadConfig(precision="bf16")
    model = TinyLM(DIM, 4)
    plan = zo.plan(model, config, micro_batches=micro_batches)
    numel = sum(param.numel() for param in model.parameters())
    assert plan.rest_bytes[Tier.CPU, StateKind.GRADS] == numel * (2 if micro_batches == 1 else 4)
    zo.offload(model, config)
    optimizer = zo.AdamW(model.parameters())
    for _ in range(2):
        batches = [torch.full((1, 4), number) for number in range(micro_batches)]
        if accumulates:
            zo.accumulate(model, batches, lambda model, batch: model(batch).square().mean())
        else:
            for batch in batches:
                model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    planned, taken = plan.used_bytes(Tier.CPU) + plan.used_bytes(Tier.DEVICE), zo.stats(model).resident_bytes["cpu"]
    adopted = 2 * numel if micro_batches == 1 else 0  # autograd's tensors, which are not counted
    assert 0.9 * planned - adopted < taken <= planned, (planned, taken)


def test_a_plan_of_micro_batches_has_the_tiers_of_the_offload(tmp_path: Path) -> None:
    """An "auto" does not know how many there will be: the sums are beside what it has chosen."""
    config = _config(tmp_path, params="auto", grads="auto", optimizer="auto")
    one, four = (zo.plan(_empty_model(), config, micro_batches=count) for count in (1, 4))
    assert one.fits
    for kind in (StateKind.PARAMS, StateKind.OPTIMIZER):
        assert [one.rest_bytes[tier, kind] for tier in Tier] == [four.rest_bytes[tier, kind] for tier in Tier]
    grads = [(one.rest_bytes[tier, StateKind.GRADS], four.rest_bytes[tier, StateKind.GRADS]) for tier in Tier]
    assert all(2 * narrow == wide for narrow, wide in grads) and sum(map(sum, grads))
    assert (
        four.nvme_written_bytes_per_step
        >= one.nvme_written_bytes_per_step + 3 * four.rest_bytes[Tier.NVME, StateKind.GRADS]
    )


def test_small_units_take_what_the_plan_says() -> None:
    """No page of 2 MiB for each of their arrays."""
    config = zo.OffloadConfig(precision="bf16")
    model = nn.Sequential(*(nn.Sequential(nn.Linear(100, 100), nn.Linear(100, 100)) for _ in range(40)))
    plan = zo.plan(model, config)
    zo.offload(model, config)
    optimizer = zo.AdamW(model.parameters())
    model(torch.zeros(1, 100)).float().square().mean().backward()
    optimizer.step()
    planned, taken = plan.used_bytes(Tier.CPU), zo.stats(model).resident_bytes["cpu"]
    assert planned < 16 * MIB and taken < 1.3 * planned, (planned, taken)  # arrays are whole sectors


if __name__ == "__main__":
    measure(sys.argv[1], sys.argv[2])
