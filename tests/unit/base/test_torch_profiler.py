"""torch.profiler shows what the library does, each thread's work on its thread, and changes no number."""

from __future__ import annotations

import json
import threading
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity

import zero_offload as zo
from tests.helpers.disk import runtime
from tests.helpers.models import NARROW, TinyLM, build, tokens_of
from tests.helpers.ranks import RankPool
from zero_offload.base.spans import Spans, Track

BLOCKS = ["blocks.0", "blocks.1", "blocks.2"]


def profiler(*, all_threads: bool) -> torch.profiler.profile:
    """As the guide writes it."""
    config = torch.profiler._ExperimentalConfig(profile_all_threads=all_threads)
    return torch.profiler.profile(activities=[ProfilerActivity.CPU], experimental_config=config)


def ranges(recorded: torch.profiler.profile, path: Path) -> dict[int, list[str]]:
    """Names of ours by thread."""
    recorded.export_chrome_trace(str(path))
    found: dict[int, list[str]] = defaultdict(list)
    for event in json.loads(path.read_text())["traceEvents"]:
        if event.get("cat") == "user_annotation" and event["name"].startswith("zo "):
            found[event["tid"]].append(event["name"])
    return found


def offloaded(nvme: Path) -> tuple[nn.Module, zo.AdamW]:
    """With room for some of its units: the others are fetched."""
    settings: dict[str, Any] = {"device_memory": "6MiB", "precision": "fp32", "overlap": "forward"}
    config = zo.OffloadConfig(params="nvme", optimizer="nvme", nvme=str(nvme), **settings)
    model = zo.offload(build(partial(TinyLM, NARROW)), config)
    return model, zo.AdamW(model.parameters(), lr=1e-2)


def train(model: nn.Module, optimizer: zo.AdamW, steps: range) -> list[float]:
    losses = []
    for step in steps:
        loss = model(tokens_of(step))
        losses.append(loss.item())
        loss.backward()
        zo.clip_grad_norm_(model, 1.0)
        optimizer.step()
        zo.commit(model, optimizer)
        optimizer.zero_grad()
    runtime(model).drain()
    return losses


def test_two_steps_by_thread_and_the_same_numbers(nvme: Path, tmp_path: Path) -> None:
    model, optimizer = offloaded(nvme / "profiled")
    losses = train(model, optimizer, range(2))
    threads = {each.name: each.native_id or 0 for each in threading.enumerate()}
    with profiler(all_threads=True) as recorded:
        losses += train(model, optimizer, range(2, 4))
    by_thread = ranges(recorded, tmp_path / "trace.json")
    main, update = by_thread[threading.get_native_id()], by_thread[threads["zero_offload-update"]]
    zo.close(model)

    for name in ("forward: forward", "forward: blocks.0", "clip: norm", "step()"):
        assert main.count(f"zo {name}") == 2, name
    assert any(name.startswith("zo fetch: ") for name in main)
    assert any(name.startswith("zo exposed wait: params: ") for name in main)
    assert main.count("zo gradients: blocks.0") == 2 * len(list(model.blocks[0].parameters()))
    for name in ("update", *BLOCKS):
        assert update.count(f"zo update: {name}") == 2, name
    for name in ("zo update: wait for reads", "zo update: compute", "zo update: write"):
        assert name in update, name
    assert by_thread[threads["zero_offload-commit"]].count("zo commit") == 2
    assert not any(name.startswith(("zo update", "zo commit")) for name in main)

    plain, its_optimizer = offloaded(nvme / "plain")
    assert train(plain, its_optimizer, range(4)) == losses
    assert all(torch.equal(a, b) for a, b in zip(plain.state_dict().values(), model_values(nvme), strict=True))
    zo.close(plain)


def model_values(nvme: Path) -> list[torch.Tensor]:
    """Of the run that was profiled, from its directory."""
    model = build(partial(TinyLM, NARROW))
    zo.offload(model, zo.OffloadConfig(nvme=str(nvme / "profiled"), existing="resume", precision="fp32"))
    optimizer = zo.AdamW(model.parameters(), lr=1e-2)
    zo.resume(model, optimizer)
    values = [value.clone() for value in model.state_dict().values()]
    zo.close(model)
    return values


def test_without_all_threads_only_the_programs_own_shows(nvme: Path, tmp_path: Path) -> None:
    model, optimizer = offloaded(nvme)
    train(model, optimizer, range(1))
    with profiler(all_threads=False) as recorded:
        train(model, optimizer, range(1, 2))
    by_thread = ranges(recorded, tmp_path / "trace.json")
    zo.close(model)
    assert "zo clip: norm" in by_thread[threading.get_native_id()]
    assert not any(name.startswith("zo update") for names in by_thread.values() for name in names)


def test_while_nothing_records_a_site_makes_nothing() -> None:
    spans = Spans()
    assert spans.open(Track.UPDATE, "compute") is None
    spans.close(None)
    with profiler(all_threads=False):
        assert spans.open(Track.UPDATE, "compute") is not None
    assert spans.taken() == []  # for torch alone


def profiled_rank(rank: int, world_size: int, directory: Path) -> list[str]:
    """Names of ranges of one rank of several."""
    model = zo.offload(build(partial(TinyLM, NARROW)), zo.OffloadConfig(precision="fp32", durability="scratch"))
    optimizer = zo.AdamW(model.parameters(), lr=1e-2)
    with profiler(all_threads=False) as recorded:
        model(tokens_of(rank)).backward()
        optimizer.step()
    by_thread = ranges(recorded, directory / f"{rank}.json")
    zo.close(model)
    return [name for names in by_thread.values() for name in names]


def test_gathers_and_reductions_of_several_ranks(tmp_path: Path, pool: RankPool) -> None:
    outcomes = pool.succeed(profiled_rank, tmp_path)
    for names in outcomes:
        assert "zo fetch: gather blocks.0" in names
        assert any(name.startswith("zo gradients: reduce ") for name in names)  # small sections cross together
