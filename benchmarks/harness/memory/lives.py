"""Processes that train inside a memory group and say, in JSON, what they do; and their end in a backward.

A worker prints `{"begins": step}`, then for each step `{"step", "loss"}` before the backward, and all figures of the
step behind it.
"""

from __future__ import annotations

import json
import subprocess
import time
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, Protocol

from harness import command
from harness.processes import MemoryGroup

Step = dict[str, Any]
KILL_AFTER = 0.2
"""Of a step, behind the loss of the one that is broken off."""


class Job(Protocol):
    """What a process trains: a dataclass of plain values."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def name(self) -> str: ...


@dataclass
class Life:
    """What a process told until it ended or was killed."""

    begins: int
    losses: dict[int, float]
    steps: list[Step]
    told: Step = field(default_factory=dict)
    """What it said as it began."""

    def note(self, told: Step) -> None:
        if "begins" in told:
            self.begins, self.told = told["begins"], told
        elif "loss" in told:
            self.losses[told["step"]] = told["loss"]
        else:
            self.steps.append(told)
            print(f"  step {told['step']}: loss {self.losses[told['step']]:.4f}, {told['step_s']:.1f} s", flush=True)


class EndedEarlyError(Exception):
    """A process in the group did not do its job."""


def live(group: MemoryGroup, comparison: str, job: Job, kill_in: int | None) -> Life:
    """One process in the group; killed in the backward of step `kill_in`, when its loss is known."""
    worker = command.worker_command("memory.py", comparison, json.dumps(asdict(job)))
    child = subprocess.Popen(group.command(worker), stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    life = Life(0, {}, [])
    for line in child.stdout:
        life.note(json.loads(line))
        if kill_in in life.losses:
            time.sleep(KILL_AFTER * life.steps[-1]["step_s"])
            child.kill()
            break
    child.stdout.close()
    status = child.wait()
    if status != 0 and kill_in not in life.losses:
        killed = "; the kernel ended it for want of memory" if group.num_killed else ""
        raise EndedEarlyError(f"{job.name}: exit code {status} after {len(life.steps)} steps{killed}")
    return life
