"""Training in a memory group: two processes, of which the first is killed in a backward and the second one resumes.

A worker prints JSON by `train_steps`: `{"begins": step}`, for each step `{"step", "loss"}` before the backward, and all
figures of the step behind it.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, Protocol

from harness import command
from harness.disks import Rates
from harness.processes import MemoryGroup, NoGroupError, disk_bytes, memory_group
from harness.rows import Row, missing, row, ungraded
from torch import Tensor, nn

import zero_offload as zo
from zero_offload.base.types import MIB, format_bytes
from zero_offload.hardware.probe import peak_resident_bytes

Step = dict[str, Any]
KILL_AFTER = 0.2
"""The time of the kill, as a share of a step, behind the loss of the broken step."""
STEPS_MIN = 3
"""A step before the kill, the broken step, and a step behind it."""
REACH_DISK = 1.10


class Job(Protocol):
    """The model and settings that a process trains with: a dataclass of plain values."""

    __dataclass_fields__: ClassVar[dict[str, Any]]
    num_steps: int

    @property
    def name(self) -> str: ...


# In the group


def train_steps(
    model: nn.Module,
    lr: float,
    num_steps: int,
    loss_of: Callable[[int], Tensor],
    figures: Callable[[], Step] = dict,
) -> None:
    """Resume and train to the last step; `loss_of` runs the forward of a step. Closes the model.

    `figures`: more of a step, when it is over.
    """
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer = zo.AdamW(trained, lr=lr)
    resumed = zo.resume(model, optimizer)
    first = 0 if resumed is None else resumed.step
    print(json.dumps({"begins": first, "trained": sum(param.numel() for param in trained)}), flush=True)
    for step in range(first, num_steps):
        start, moved = time.perf_counter(), disk_bytes()
        loss = loss_of(step)
        print(json.dumps({"step": step, "loss": loss.item()}), flush=True)
        loss.backward()
        zo.clip_grad_norm_(model, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        zo.commit(model, optimizer)
        stats, after = zo.stats(model), disk_bytes()
        made: Step = {"step": step, "step_s": time.perf_counter() - start}
        made |= {"read_bytes": stats.read_bytes["nvme"], "written_bytes": stats.written_bytes["nvme"]}
        made |= {"disk_read_bytes": after[0] - moved[0], "disk_written_bytes": after[1] - moved[1]}
        made |= {"resident_bytes": dict(stats.resident_bytes), "peak_rss_bytes": peak_resident_bytes()}
        print(json.dumps(made | figures()), flush=True)
    zo.close(model)


# Outside of it


@dataclass
class Life:
    """The output of a process until it ended or was killed."""

    begins: int = 0
    trained: int = 0
    """Elements of trained parameters."""
    losses: dict[int, float] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)

    def note(self, told: Step) -> None:
        if "begins" in told:
            self.begins, self.trained = told["begins"], told["trained"]
        elif "loss" in told:
            self.losses[told["step"]] = told["loss"]
        else:
            self.steps.append(told)
            print(f"  step {told['step']}: loss {self.losses[told['step']]:.4f}, {told['step_s']:.1f} s", flush=True)


@dataclass(frozen=True)
class Lives:
    """A process that was killed, and its successor, in one group."""

    before: Life
    after: Life
    peak_bytes: int
    limit_bytes: int

    @property
    def settled(self) -> list[Step]:
        """Steps behind the first one, which warms up."""
        return self.after.steps[1:] or self.after.steps

    def median(self, figure: str) -> float:
        """Of a settled step."""
        return statistics.median(step[figure] for step in self.settled)

    @property
    def peak_rss_bytes(self) -> int:
        return max(step["peak_rss_bytes"] for step in self.before.steps + self.after.steps)

    @property
    def losses_made_twice(self) -> list[tuple[float, float]]:
        return [
            (loss, self.after.losses[step]) for step, loss in self.before.losses.items() if step in self.after.losses
        ]

    def rows(self, name: str, rates: Rates, *others: Row) -> list[Row]:
        """With `others` between them."""
        changed = sum(first != second for first, second in self.losses_made_twice)
        limit, at_rates = (
            format_bytes(self.limit_bytes),
            rates.seconds(self.median("read_bytes"), self.median("written_bytes")),
        )
        return [
            row(
                f"{name}: peak in the group", self.peak_bytes / MIB, "MiB", f"its {limit}", self.limit_bytes / MIB, 1.0
            ),
            *others,
            row(f"{name}: losses that changed", changed, "", "one; none is wanted", 1, 0.0),
            ungraded(f"{name}: step", self.median("step_s"), "s", "bytes / disk rates, no bar", at_rates, REACH_DISK),
        ]


class EndedEarlyError(Exception):
    """A process in the group did not do its job."""


def killed_and_resumed(comparison: str, job: Job, limit_bytes: int) -> Lives:
    """Train in a group, kill the process in the middle, resume. NoGroupError where no group can be made."""
    with memory_group(limit_bytes) as group:
        before = _live(group, comparison, job, kill_in=job.num_steps // 2)
        print("  killed; resuming", flush=True)
        after = _live(group, comparison, job, kill_in=None)
        return Lives(before, after, group.group_peak_bytes, limit_bytes)


def _live(group: MemoryGroup, comparison: str, job: Job, kill_in: int | None) -> Life:
    """One process in the group; killed in the backward of step `kill_in`, when its loss is known."""
    worker = command.worker_command("memory.py", comparison, json.dumps(asdict(job)))
    child = subprocess.Popen(group.command(worker), stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    life = Life()
    for line in child.stdout:
        life.note(json.loads(line))
        if kill_in in life.losses:
            time.sleep(KILL_AFTER * life.steps[-1]["step_s"])
            child.kill()
            break
    child.stdout.close()
    status = child.wait()
    if status != 0 and kill_in not in life.losses:
        raise ended_early(group, job.name, f"exit code {status} after {len(life.steps)} steps")
    return life


def ended_early(group: MemoryGroup, name: str, how: str) -> EndedEarlyError:
    return EndedEarlyError(f"{name}: {how}{'; the kernel ended it for want of memory' * bool(group.num_killed)}")


def rows_or_failure(name: str, limit_bytes: int, measure: Callable[[], list[Row]]) -> list[Row]:
    """The measured rows; one row where no group can be made, or a process in it ended early."""
    try:
        return measure()
    except NoGroupError as error:
        print(error)
        return [missing(f"{name}: peak in the group", 0.0, "MiB", format_bytes(limit_bytes), 1.0)]
    except EndedEarlyError as error:
        print(error)
        return [row(f"{name}: ended early", 1, "", "one; none is wanted", 1, 0.0)]


def exit_code(rows: Sequence[Row]) -> int:
    """Of a comparison: 3 where a group is missing."""
    return command.PEER_MISSING_EXIT_CODE if any(each["theirs"] is None for each in rows) else 0
