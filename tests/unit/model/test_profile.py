"""A tiny offloaded model, recorded: who is on which track, how often, and beside whom."""

from __future__ import annotations

import json
import threading
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import zero_offload as zo
from tests.helpers.disk import runtime
from tests.helpers.models import NARROW, TinyLM, build, tokens_of
from tests.helpers.ranks import RankPool
from zero_offload.base import spans as spans_module
from zero_offload.base.spans import Span, Track, now
from zero_offload.model import profile as profile_file
from zero_offload.model.profile import Profile
from zero_offload.storage.shards.store import OpenChunks, ShardStore

BLOCKS = ["blocks.0", "blocks.1", "blocks.2"]


def offloaded(nvme: Path, tier: str = "nvme", **settings: Any) -> tuple[nn.Module, zo.AdamW]:
    config = {"params": tier, "optimizer": tier, "nvme": str(nvme), "device_memory": "8MiB", "precision": "fp32"}
    model = zo.offload(build(partial(TinyLM, NARROW)), zo.OffloadConfig(**config | settings))
    return model, zo.AdamW(model.parameters(), lr=1e-2)


def train(model: nn.Module, optimizer: zo.AdamW, num_steps: int) -> None:
    for step in range(num_steps):
        model(tokens_of(step)).backward()
        zo.clip_grad_norm_(model, 1.0)
        optimizer.step()
        zo.commit(model, optimizer)
        optimizer.zero_grad()


def on(track: Track, recorded: Profile) -> list[Span]:
    return [span for span in recorded.spans() if span.track is track]


def inside(inner: Span, outer: Span) -> bool:
    return outer.begin_ns <= inner.begin_ns <= inner.end_ns <= outer.end_ns


def test_every_unit_appears_once_per_step(nvme: Path) -> None:
    model, optimizer = offloaded(nvme)
    train(model, optimizer, 2)
    runtime(model).drain()
    with zo.profile(model) as recorded:
        train(model, optimizer, 3)
        runtime(model).drain()
    zo.close(model)
    for track in (Track.FORWARD, Track.BACKWARD):
        found = on(track, recorded)
        counts = Counter(span.name for span in found)
        assert {name: counts[name] for name in (*BLOCKS, track.value)} == dict.fromkeys((*BLOCKS, track.value), 3)
        wholes = [span for span in found if span.name == track.value]
        assert all(sum(inside(span, whole) for whole in wholes) == 1 for span in found)
    order = [
        span.name
        for span in sorted(recorded.spans(), key=lambda s: s.begin_ns)
        if span.track in ("forward", "backward")
    ]
    assert [name for name in order if name in BLOCKS] == [*BLOCKS, *BLOCKS[::-1]] * 3
    assert [span.name for span in on(Track.STEP, recorded)] == ["3", "4", "5"]
    updates = Counter(span.name for span in on(Track.UPDATE, recorded))
    assert {name: updates[name] for name in ("update", *BLOCKS)} == dict.fromkeys(("update", *BLOCKS), 3)
    assert updates["compute"] == updates["write"] == 3 * 4  # a chunk per unit
    assert [span.name for span in on(Track.COMMIT, recorded)] == ["step 3", "step 4", "step 5"]


def test_frozen_units_have_their_turn_in_backward(nvme: Path) -> None:
    model, optimizer = offloaded(nvme)
    model.blocks[1].requires_grad_(False)
    train(model, optimizer, 1)
    with zo.profile(model) as recorded:
        train(model, optimizer, 1)
    zo.close(model)
    names = [span.name for span in on(Track.BACKWARD, recorded)]
    assert [name for name in names if name in BLOCKS] == BLOCKS[::-1]


class Between(torch.autograd.Function):
    """Notes when its backward runs."""

    times: ClassVar[list[int]] = []

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        Between.times.append(now())
        return grad


class Separated(TinyLM):
    """An operation outside of all units lies between blocks."""

    def run_blocks(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = Between.apply(block(x))
        return x


def test_time_between_units_belongs_to_no_unit(nvme: Path) -> None:
    config = zo.OffloadConfig(params="nvme", optimizer="nvme", nvme=str(nvme), precision="fp32")
    model = zo.offload(build(partial(Separated, NARROW)), config)
    Between.times.clear()
    with zo.profile(model) as recorded:
        model(tokens_of(0)).backward()
    zo.close(model)
    blocks = [span for span in on(Track.BACKWARD, recorded) if span.name in BLOCKS]
    after, before = Between.times[1:], blocks[:-1]  # after a block, before the next one
    assert len(before) == len(after) == 2
    assert all(span.end_ns <= time for span, time in zip(before, after, strict=True))


def test_spans_of_a_track_lie_beside_or_inside_each_other(nvme: Path) -> None:
    model, optimizer = offloaded(nvme)
    with zo.profile(model) as recorded:
        train(model, optimizer, 3)
    zo.close(model)
    for track in (Track.FORWARD, Track.BACKWARD, Track.WAIT, Track.STEP, Track.UPDATE, Track.COMMIT, Track.STEPS):
        running: list[Span] = []
        for span in sorted(on(track, recorded), key=lambda s: (s.begin_ns, -s.end_ns)):
            while running and running[-1].end_ns <= span.begin_ns:
                running.pop()
            assert span.begin_ns <= span.end_ns
            assert not running or inside(span, running[-1]), (track, span, running[-1])
            running.append(span)


def test_drives_are_seen_with_their_bytes(nvme: Path) -> None:
    model, optimizer = offloaded(nvme)
    train(model, optimizer, 2)
    counters = runtime(model).store.counters
    runtime(model).drain()
    before = counters.snapshot()
    with zo.profile(model) as recorded:
        train(model, optimizer, 3)
        runtime(model).drain()
        with zo.gathered(model):  # what is read ahead is waited for
            pass
    after = counters.snapshot()
    zo.close(model)
    for track, name in ((Track.READ, "read.nvme"), (Track.WRITE, "written.nvme")):
        assert sum(span.nbytes for span in on(track, recorded)) == after[name] - before[name] > 0


def test_after_the_end_nothing_is_recorded(nvme: Path) -> None:
    model, optimizer = offloaded(nvme)
    with zo.profile(model) as recorded:
        train(model, optimizer, 1)
    spans = runtime(model).store.counters.spans
    before, ended_ns = recorded.spans(), now()
    train(model, optimizer, 2)
    # A span that was under way, or waited for a drive, is seen to end, and is not this recording's.
    assert all(span.begin_ns < ended_ns or span.track in (Track.READ, Track.WRITE) for span in spans.taken())
    with zo.profile(model):
        train(model, optimizer, 1)
    zo.close(model)
    assert recorded.spans() == before


def test_an_update_beside_forward_is_seen_there(nvme: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second block's update is held until the first one's forward runs, and that until the update does."""
    model, optimizer = offloaded(nvme)
    train(model, optimizer, 2)
    runtime(model).drain()
    meeting, close_chunks = threading.Barrier(2, timeout=30), ShardStore.close_chunks
    gates = [meeting]

    def held(store: ShardStore, opened: OpenChunks) -> Any:
        if "blocks.1.up.weight" in [piece.spec.name for piece in opened.shard.layout.params] and gates:
            gates.pop().wait()
        return close_chunks(store, opened)

    def meet(*_: Any) -> None:
        meeting.wait()

    monkeypatch.setattr(ShardStore, "close_chunks", held)
    with zo.profile(model) as recorded:
        train(model, optimizer, 1)
        handle = model.blocks[0].up.register_forward_hook(meet)
        model(tokens_of(3)).backward()
        handle.remove()
        optimizer.step()
    zo.close(model)
    forward = [span for span in on(Track.FORWARD, recorded) if span.name == "blocks.0"][-1]
    updates = [span for span in on(Track.UPDATE, recorded) if span.name == "blocks.1"]
    assert any(span.begin_ns < forward.end_ns and forward.begin_ns < span.end_ns for span in updates)
    first, second = recorded.steps()
    assert not first.update_overlap
    assert second.update_overlap is not None and 0 < second.update_overlap <= 1


def test_an_update_inside_of_step_is_exposed(nvme: Path) -> None:
    model, optimizer = offloaded(nvme, overlap="none")
    train(model, optimizer, 1)
    with zo.profile(model) as recorded:
        train(model, optimizer, 2)
        stats = zo.stats(model)
    zo.close(model)
    for step in recorded.steps():
        assert step.update_s > 0 and step.update_overlap == 0
        assert step.exposed_s["update"] + step.exposed_s["commit"] >= step.update_s
    assert stats.exposed_s["update"] + stats.exposed_s["commit"] >= stats.update_s > 0
    calls, updates = on(Track.STEP, recorded), [s for s in on(Track.UPDATE, recorded) if s.name == "update"]
    assert [sum(inside(update, call) for call in calls) for update in updates] == [1, 1]


def test_what_does_not_wait_has_no_exposed_time() -> None:
    model = zo.offload(build(partial(TinyLM, NARROW)), zo.OffloadConfig(params="cpu", optimizer="cpu"))
    optimizer = zo.AdamW(model.parameters(), lr=1e-2)
    with zo.profile(model) as recorded:
        train(model, optimizer, 2)
    counts = Counter(span.name for span in on(Track.BACKWARD, recorded))
    assert {name: counts[name] for name in BLOCKS} == dict.fromkeys(BLOCKS, 2)  # though none of them ever leaves
    exposed = zo.stats(model).exposed_s
    assert [cause for cause, wait_s in exposed.items() if wait_s] == ["update"]
    assert zo.stats(model).update_overlap == 0


def test_the_trace_has_what_viewers_need(nvme: Path, tmp_path: Path) -> None:
    model, optimizer = offloaded(nvme)
    train(model, optimizer, 2)
    path = tmp_path / "trace.json"
    with zo.profile(model, path) as recorded:
        train(model, optimizer, 2)
        runtime(model).drain()
    zo.close(model)
    trace = json.loads(path.read_text())
    assert [each.name for each in tmp_path.iterdir() if "trace" in each.name] == ["trace.json"]
    events = trace["traceEvents"]
    kinds = Counter(event["ph"] for event in events)
    assert kinds["X"] == len(recorded.spans())
    rows = {event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"}
    elsewhere = {"gather", "reduce", "exposed wait", "fetch", "upload", "download"}  # several ranks, a GPU, no luck
    assert {track.value for track in Track} - elsewhere <= set(rows.values())
    ends: dict[int, list[float]] = {}
    for event in sorted((e for e in events if e["ph"] == "X"), key=lambda e: (e["ts"], -e["dur"])):
        assert event["pid"] == 0 and event["dur"] >= 0 and event["name"]
        assert rows[event["tid"]].startswith(event["cat"])
        running = ends.setdefault(event["tid"], [])
        while running and running[-1] <= event["ts"] + 1e-3:
            running.pop()
        assert not running or event["ts"] + event["dur"] <= running[-1] + 1e-3, event
        running.append(event["ts"] + event["dur"])
    counters = [event for event in events if event["ph"] == "C"]
    assert {"bytes read so far from nvme", "bytes at rest on nvme"} <= {event["name"] for event in counters}
    read = [event["args"]["bytes"] for event in counters if event["name"] == "bytes read so far from nvme"]
    assert read == sorted(read) and read[0] < read[-1]
    assert [step["step"] for step in trace["steps"]] == [3, 4]


def test_a_trace_is_written_after_an_error_and_the_next_one_may_come(nvme: Path, tmp_path: Path) -> None:
    model, optimizer = offloaded(nvme)
    with pytest.raises(KeyError), zo.profile(model, tmp_path / "trace.json"):
        train(model, optimizer, 1)
        raise KeyError
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    with zo.profile(model), pytest.raises(zo.ConfigError, match="recorded already"), zo.profile(model):
        pass
    with pytest.raises(zo.StorageError, match="cannot write .*name another file"), zo.profile(model, tmp_path / "a/b"):
        pass
    with zo.profile(model) as recorded:
        train(model, optimizer, 1)
    zo.close(model)
    assert [step.step for step in recorded.steps()] == [2]


def test_a_plain_model_is_refused() -> None:
    with pytest.raises(zo.ConfigError, match="call zo.offload"), zo.profile(nn.Linear(1, 1)):
        pass


@pytest.mark.parametrize("name", ["nowhere/trace.json", "."])
def test_a_trace_that_cannot_be_written_is_refused_before_anything_runs(name: str, tmp_path: Path) -> None:
    model = zo.offload(nn.Linear(1, 1), zo.OffloadConfig())
    with pytest.raises(zo.StorageError, match="name another file"), zo.profile(model, tmp_path / name):
        raise AssertionError("ran")
    assert list(tmp_path.iterdir()) == []
    with zo.profile(model, tmp_path / "trace.json"):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["trace.json"]


def test_transfers_that_overlap_get_rows() -> None:
    spans = [Span(Track.READ, name, begin, end) for name, begin, end in (("a", 0, 5), ("b", 1, 3), ("c", 3, 9))]
    assert [(row, span.name) for row, span in profile_file.on_rows(spans)] == [(0, "a"), (1, "b"), (1, "c")]


def _recorded_on_a_rank(rank: int, world_size: int, folder: Path) -> tuple[set[str], dict[str, float]]:
    model = zo.offload(build(partial(TinyLM, NARROW)), zo.OffloadConfig(params="cpu", optimizer="cpu"))
    optimizer = zo.AdamW(model.parameters(), lr=1e-2)
    train(model, optimizer, 1)
    with zo.profile(model, folder / "trace.json") as recorded:
        train(model, optimizer, 2)
        exposed = zo.stats(model).exposed_s
    return {span.track.value for span in recorded.spans()}, exposed


def test_ranks_write_a_file_each(tmp_path: Path, pool: RankPool) -> None:
    outcomes = pool.succeed(_recorded_on_a_rank, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["trace.rank0.json", "trace.rank1.json"]
    for rank, (tracks, exposed) in enumerate(outcomes):
        assert {"gather", "reduce"} <= tracks and exposed["grads"] > 0
        events = json.loads((tmp_path / f"trace.rank{rank}.json").read_text())["traceEvents"]
        assert {event["pid"] for event in events} == {rank}


def test_forwards_that_take_turns_have_rows_of_their_own() -> None:
    """Two spans of a row that overlap in part make a viewer drop the second."""
    ends = {"whole": (0, 100), "a": (10, 40), "b": (20, 60), "inside b": (30, 50), "late": (60, 70)}
    spans = [Span(Track.FORWARD, name, *at) for name, at in ends.items()]
    placed = {span.name: row for row, span in profile_file.on_rows(spans)}
    assert placed == {"whole": 0, "a": 0, "b": 1, "inside b": 1, "late": 0}
    transfers = [span._replace(track=Track.READ) for span in spans]
    placed = {span.name: row for row, span in profile_file.on_rows(transfers)}
    assert placed == {"whole": 0, "a": 1, "b": 2, "inside b": 3, "late": 1}


def test_times_keep_their_nanoseconds_after_a_year(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    year_ns = 400 * 86400 * 10**9 + 12345
    recorded = spans_module.Spans()
    monkeypatch.setattr(profile_file, "now", lambda: year_ns)
    monkeypatch.setattr(spans_module, "now", lambda: year_ns)
    recorded.begin()
    made = Profile(recorded, 0, 1)
    for index in range(1000):
        recorded.put(Track.BACKWARD, str(index), year_ns + 333 * index, year_ns + 333 * (index + 1))
    events = json.loads(made.export_chrome_trace(tmp_path / "trace.json").read_text())["traceEvents"]
    found = [event for event in events if event["ph"] == "X"]
    begins = [round(event["ts"] * 1000) for event in found]
    ends = [round(event["ts"] * 1000) + round(event["dur"] * 1000) for event in found]
    assert len(found) == 1000 and begins[1:] == ends[:-1]
