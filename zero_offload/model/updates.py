"""How an update is launched: on the update's thread, on the spot, or on the device, once nothing stands in its way.

Owns the passes over states and the number of their threads. Decides neither what is updated nor when. The calls:
`prepare`, which waits for whatever must be over; `launch`, inside of `failing`: from there on the step counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial

import torch
from torch import nn

from zero_offload.base.spans import Cause
from zero_offload.base.threads import FirstError
from zero_offload.base.types import UpdateOverlap
from zero_offload.hardware.device import Device
from zero_offload.hardware.kernels.arguments import STATES
from zero_offload.hardware.probe import kernel_threads
from zero_offload.model.commits import Commits
from zero_offload.model.optimizer_states import OptimizerStates
from zero_offload.optim.device_pass import DevicePass
from zero_offload.optim.pipeline import SectionUpdate, UpdatePipeline
from zero_offload.optim.worker import Worker
from zero_offload.runtime.grads.gradients import Gradients
from zero_offload.runtime.prefetcher import ParamPrefetcher
from zero_offload.runtime.units.unit import Unit
from zero_offload.storage.shards.store import ShardStore
from zero_offload.storage.shards.unit_update import UnitUpdate


class Updates:
    """Of one model; the control thread's."""

    def __init__(
        self,
        store: ShardStore,
        units: Sequence[Unit],
        prefetcher: ParamPrefetcher,
        device: Device,
        overlap: str,
        worker: Worker,
        errors: FirstError,
        grads: Gradients,
        states: OptimizerStates,
        commits: Commits,
    ) -> None:
        self._store = store
        self._units = units
        self._prefetcher = prefetcher
        self._device = device
        self._overlap = overlap
        self._worker = worker
        self._errors = errors
        self._grads = grads
        self.states = states
        self.commits = commits
        self._pipeline = UpdatePipeline(store)
        self._device_pass = DevicePass(store, device)

    def overlaps(self, sections: Sequence[SectionUpdate]) -> bool:
        """Whether the update runs beside compute: pointless where both are arithmetic on the same cores."""
        if self._overlap == UpdateOverlap.AUTO:
            return not self._device.is_host or any(each.shard.on_disk or each.grads.on_disk for each in sections)
        return self._overlap != UpdateOverlap.NONE

    def prepare(self, sections: Sequence[SectionUpdate], *, in_backward: bool = False) -> None:
        """Return when nothing else has to be waited for. A backward calls `await_worker` itself, once."""
        self._store.read_lazy()
        for unit in {section.unit for section in sections}:
            self._units[unit].wait_for_update()
        # Of rules that came by a changed hyperparameter: a momentum, amsgrad.
        self.states.ensure((section.shard, STATES[rule]) for section in sections for rule in section.segments)
        here = not self.overlaps(sections) or any(section.shard.on_device for section in sections)
        if here and not in_backward:
            self.await_worker()
        if not in_backward:
            # Gradients on drives, which the update reads: their pages are for the units that it makes new.
            self._prefetcher.pool.flush_grads()

    def await_worker(self) -> None:
        """Return when the update's thread is idle: a commit of the step before notes there what it is made of, and has
        to before this thread changes states."""
        with self._store.counters.waiting(Cause.COMMIT) if self._worker.busy else nullcontext():
            self._worker.drain()

    def launch(
        self, params: Iterable[nn.Parameter], sections: Sequence[SectionUpdate], *, in_backward: bool = False
    ) -> Mapping[int, UnitUpdate]:
        """Update the sections, all of a unit together, in order; the gradients of `params` are theirs from now on.

        `in_backward`: of a backward that goes on, and is done with these units. Returns the future of each unit.
        """
        units = list(dict.fromkeys(section.unit for section in sections))
        updates = {index: UnitUpdate(self._errors, self._store.counters) for index in units}
        for index, update in updates.items():
            self._units[index].update = update
        # The update takes what was launched until now, whatever is launched beside it.
        made = None if self._device.is_host else self._device.mark()
        for section in sections:
            section.grads.lend(made)
        self._prefetcher.begin_update(units, in_backward=in_backward)
        # A backward through weights that are about to change must fail as it does in plain torch.
        placed = (each for unit in units for each in self._units[unit].placed_params)
        torch.autograd.graph.increment_version([param for section, _, param in placed if section.layout.trainable])
        self._grads.forget(params)
        # Between here and the next record nothing says which step the states are of.
        self.commits.drop()
        self._run(sections, updates)
        if not in_backward:
            self._prefetcher.refresh_kept()
            for unit in (self._units[index] for index in units):
                if unit.updates_in_place and unit.is_viewed(unit.sections):  # nothing is in a view's way
                    unit.wait_for_update()
        return updates

    def _run(self, sections: Sequence[SectionUpdate], updates: Mapping[int, UnitUpdate]) -> None:
        beside = self.overlaps(sections)
        threads = update_threads(kernel_threads(), beside, self._device.is_host)
        on_host = [section for section in sections if not section.shard.on_device]
        if beside and on_host:
            self._worker.submit(partial(self._pipeline.run, on_host, updates, threads))
        elif not beside:
            with self._store.counters.waiting(Cause.UPDATE):
                self._pipeline.run(on_host, updates, threads)
            self._prefetcher.gatherer.end_update()
        if len(on_host) < len(sections):
            on_device = [section for section in sections if section.shard.on_device]
            with self._store.counters.waiting(Cause.UPDATE):
                self._device_pass.run(on_device, updates)


def update_threads(available: int, overlaps: bool, is_host: bool) -> int:
    """Threads of an update: on a CPU compute has the same cores meanwhile, and one core nearly saturates the update;
    beside a GPU the thread that drives it needs a core."""
    if not overlaps:
        return available
    return max(1, available // 2 if is_host else available - 1)


@contextmanager
def failing(errors: FirstError) -> Iterator[None]:
    """What ends this early is met by all that comes later."""
    try:
        yield
    except BaseException as error:
        errors.set(error)
        raise
