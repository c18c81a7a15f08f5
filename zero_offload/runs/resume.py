"""Whether a second start in a run's directory goes on with the run: what it must agree in, and what is to be there.

Never writes. The calls, before a run begins: `earlier_identity`, `find_existing`, `check_generation_asked`; once its
states are there, `check_last_step`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from zero_offload.base.config import OffloadConfig
from zero_offload.base.errors import ConfigError, IntegrityError
from zero_offload.base.types import Existing
from zero_offload.checkpoint.format import RUN_NAME, History
from zero_offload.checkpoint.metrics import is_count, read_lines, show
from zero_offload.checkpoint.published import PublishPlace, find_newest
from zero_offload.checkpoint.run_dir import METRICS_FILE, RUN_FILE, RunDir, read_json, refuse
from zero_offload.runs.locate import states_home
from zero_offload.runs.reader import is_positive
from zero_offload.storage.files.directory import RunDirectory

MAY_CHANGE = (
    *("ranks", "steps", "lr", "clip", "recompute"),
    *("eval_every", "eval_batches", "sample_bytes"),
    "out",  # a run directory may move
)
"""Settings that any run may go on with."""
_DECIDES_NUMBERS = ("offload.precision", "offload.grad_reduction")
"""Settings of tiers and storage that decide numbers. A run may go on with other values of the rest, as long as
generations are still kept, or still not kept."""
_HOME = "offload.nvme"
_CHANGEABLE = {
    **dict.fromkeys(("ranks", "steps", "eval_every", "eval_batches", "sample_bytes"), is_count),
    **dict.fromkeys(("lr", "clip"), is_positive),
}
"""Settings of an earlier start that are counted with, not only compared."""


def find_existing(run: RunDir, identity: Mapping[str, Any], may_change: Sequence[str] = ()) -> Existing:
    """How a start with this identity meets what lies here: resume the same run, refuse a stranger.

    Raises ConfigError naming the first setting in which an earlier run here differs. These may differ: the tiers of
    states, the number of ranks, the last step, the size of steps, the measuring of the run, and `may_change`. Raises
    IntegrityError where rows tell of a run whose description or whose states are gone: to start over would lose them.
    """
    earlier = earlier_identity(run)
    if earlier is None:
        if last_step := _last_step(run):
            raise IntegrityError(
                f"{run.path} has {METRICS_FILE} up to step {last_step} and no {RUN_FILE}, which says which run that "
                "is. Put it back, give another --out, or --discard to delete it and start over"
            )
        return Existing.REFUSE
    for name in sorted({*identity, *earlier}):
        if name == _HOME and _has_same_states(run, identity, earlier):
            continue
        if name not in may_change and _fixed_part(name, identity) != _fixed_part(name, earlier):
            raise ConfigError(
                f"{run.path} holds a run with {name}={show(earlier.get(name))}, this one has "
                f"{name}={show(identity.get(name))}. Give the same settings to resume it, "
                "another --out, or --discard to delete it and start over"
            )
    _check_states(run, earlier, identity)
    return Existing.RESUME


def check_generation_asked(run: Path, offload: OffloadConfig, existing: Existing) -> None:
    """Raise ConfigError where a start is to go on from a generation, and goes on with no run."""
    if offload.generation is not None and existing is not Existing.RESUME:
        why = "--discard deletes it" if existing is Existing.DISCARD else f"{run} holds none"
        raise ConfigError(f"--generation {offload.generation} goes on from an earlier run, but {why}")


def check_last_step(step: int, last_step: int) -> None:
    """Raise ConfigError for a run that is beyond the step at which it is to end."""
    if step > last_step:
        raise ConfigError(f"the run is at step {step} already, beyond --steps {last_step}; give more, or another --out")


def _has_same_states(run: RunDir, identity: Mapping[str, Any], earlier: Mapping[str, Any]) -> bool:
    """True if generations are where they were, have moved with the run directory, or are the run's at a new place."""
    before, now = (states_home(run.path.absolute(), each) for each in (earlier, identity))
    if before is None or now is None:
        return before == now
    if before.resolve() == now.resolve():
        return True
    run_id = read_json(run.path / RUN_FILE).get("run_id")
    if run_id is None or not now.is_dir():
        return False
    with RunDirectory.look(now) as directory:
        return any(each.run_id == run_id for each in History.read(directory).generations.values())


def _check_states(run: RunDir, earlier: Mapping[str, Any], identity: Mapping[str, Any]) -> None:
    """Raise IntegrityError when an earlier run has come to a step, and nothing is left of its states."""
    home = states_home(run.path.absolute(), identity)
    if home is None or earlier.get("offload.durability") == "scratch":
        return  # nothing was kept
    # It is there from the start of a run on, before its first commit.
    if not os.path.lexists(home := home / RUN_NAME) and (last_step := _last_step(run)):
        place = identity.get("offload.publish")
        if place is not None and find_newest(PublishPlace.of(str(place)))[0] is not None:
            return  # it goes on from there
        raise IntegrityError(
            f"the run in {run.path} came to step {last_step}, and {home} is missing, as are its states. Mount or "
            "put back the directory, or start over with --discard, or another --out"
        )


def _last_step(run: RunDir) -> int:
    """The last step of the rows; 0 where there are none."""
    rows = [line.row for line in read_lines(run.path / METRICS_FILE) if line.row is not None]
    return max((row["step"] for row in rows), default=0)


def earlier_identity(run: RunDir) -> dict[str, Any] | None:
    """The identity of an earlier run here; None when there was none."""
    file = run.path / RUN_FILE
    if not os.path.lexists(file):
        return None
    identity = read_json(file).get("identity")
    if not isinstance(identity, dict):
        refuse(file, f"its identity is {show(identity)}, not a table")
    for name, kind in _CHANGEABLE.items():
        if name in identity and not kind(identity[name]):
            refuse(file, f"{name} is {show(identity[name])}, not a number that `train` writes")
    return identity


def _fixed_part(name: str, identity: Mapping[str, Any]) -> object:
    """The part of a setting that must stay as it is."""
    value = identity.get(name)
    if name == _HOME and isinstance(value, list):
        return value[:1]  # where the generations are found
    if name == "offload.durability":
        return value == "scratch"
    may_change = name in MAY_CHANGE or name.startswith("offload.")
    return None if may_change and name not in _DECIDES_NUMBERS else value
