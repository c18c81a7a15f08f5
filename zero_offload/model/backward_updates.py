"""overlap="backward": units are updated in the backward that makes their gradients, one by one, while it goes on.

It is there for host memory: gradients of five units instead of all. A transformer of 319M parameters in bf16 (128
tokens, no clipping, two cores) peaks at 4.17 instead of 4.77 GB with all states in memory. With the optimizer on NVMe
it peaks at 1.19 instead of 1.71 GB. Steps are as long as with overlap="forward". grads="nvme" saves as much, needs a
drive, and made the first of these steps 20% longer.

Owns which units a backward is done with, and the hyperparameters that it began with. Launches through `Updates`; moves
no bytes. The calls: `add_trainer` for each optimizer. In backward `arriving` before each gradient is taken,
`before_use` and `advance` at each sign of where backward is, and `end`. Then `confirm_step` by each optimizer's step.
`cancel` after a backward that broke off; `reset` when all states have been replaced.

[Note: when a backward is done with a unit]
Three things are true. All its gradients are there and reduced. Nothing uses it (`Unit.in_use`): its part of backward
has begun and ended. No node that has still to run has saved a view of it. Autograd makes a parameter's gradient once,
after all nodes that add to it. Only reentrant checkpoints make it in pieces, one per region. There a unit that forwards
have used more than once waits for the end of backward. So does any other unit that is not known to be done. A hook of
the user's on a gradient sees old values: a unit is updated when backward is elsewhere. A node that reads a unit all the
same, after its update, raises.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from zero_offload.base.errors import ConfigError, ZeroOffloadError
from zero_offload.base.problems import warn_user
from zero_offload.hardware.kernels.arguments import Hyper
from zero_offload.model.foundation import Foundation
from zero_offload.model.params import ModelPlaces
from zero_offload.model.updates import Updates, failing
from zero_offload.runtime.grads.gradients import Gradients, check_closed
from zero_offload.runtime.grads.section import GradSection, GradState
from zero_offload.runtime.units.unit import Unit
from zero_offload.standins.sources import Trainer
from zero_offload.storage.shards.ring_grads import GradRing

_INSTEAD = "overlap='forward' updates after backward"


class BackwardUpdates:
    """One model's updates in backward: implements `UpdatesInBackward` of `runtime.units.unit`. Runs on backward's
    thread."""

    def __init__(
        self, base: Foundation, ring: GradRing, grads: Gradients, places: ModelPlaces, updates: Updates
    ) -> None:
        """`ring`: that of `base`, which has one."""
        self._units = base.units
        self._collectives = base.collectives
        self._prefetcher = base.prefetcher
        self._errors = base.errors
        self._life = base.life
        self._ring = ring
        self._grads = grads
        self._places = places
        self._updates = updates
        self._sections: dict[int, list[GradSection]] = {}
        for each in grads.ledger.sections:
            self._sections.setdefault(each.unit.index, []).append(each)
        self._any_on_device = any(each.section.shard.on_device for each in grads.ledger.sections)
        # A GPU's sums and downloads are waited for a unit later: until then it has something to do.
        self._lag = 0 if base.device.is_host else 1
        self._params = {param for unit in base.units for param in unit.params}
        self._trainers: weakref.WeakKeyDictionary[Trainer, None] = weakref.WeakKeyDictionary()
        """The optimizers of these parameters in their order, as long as the program holds them."""
        self._hypers: Mapping[nn.Parameter, Hyper] = {}
        self._task = -1
        """Autograd's number of the backward; those of reentrant checkpoints inside of it have others."""
        self._runs = False
        """True if a backward is under way that updates."""
        self._arriving: dict[int, Unit] = {}
        """Units that have gradients of this backward and no update yet."""
        self._late: set[int] = set()
        """Those units that wait for the end."""
        self._launched: set[int] = set()
        self._skipped: list[str] = []
        """Parameters whose gradients were not finite, in units that were not updated, since the last step."""
        self._has_warned = False

    # Hyperparameters

    def add_trainer(self, optimizer: Trainer) -> None:
        self._trainers[optimizer] = None

    def _hypers_now(self) -> dict[nn.Parameter, Hyper]:
        """Hyperparameters of all parameters that an optimizer has. Raises ConfigError where two have the same one."""
        found, twice = self._collect_hypers()
        if twice is not None:
            gc.collect()  # a dropped optimizer may be in a cycle, as a scheduler leaves it
            found, twice = self._collect_hypers()
        if twice is not None:
            raise ConfigError(
                f"two optimizers have {self._places.name_of(twice)}, and with overlap='backward' it is updated before "
                f"either is stepped. Give each parameter to one optimizer; {_INSTEAD}"
            )
        return found

    def _collect_hypers(self) -> tuple[dict[nn.Parameter, Hyper], nn.Parameter | None]:
        """Hyperparameters, and a parameter that two optimizers have."""
        found: dict[nn.Parameter, Hyper] = {}
        for optimizer in list(self._trainers):
            mine = {param: hyper for param, hyper in optimizer.hypers().items() if param in self._params}
            if common := found.keys() & mine.keys():
                return found, next(iter(common))
            found |= mine
        return found, None

    # Where backward is

    def arriving(self, param: nn.Parameter, *, in_forward: bool) -> None:
        """Autograd has a gradient that is not stored yet; `in_forward`: while a forward of the model runs."""
        if not self._runs:
            check_closed(self._grads, "a backward")
            if in_forward and not self._grads.defers_reduction:
                raise ZeroOffloadError(
                    "a backward inside of a forward of this model would update what the forward uses; run it in "
                    f"'with zo.no_sync(model):', or {_INSTEAD}"
                )
            if not self._grads.defers_reduction:
                self._begin()
        unit = self._grads.ledger.place(param)[0].unit
        if self._runs:
            self.advance(unit)
        if unit.index in self._launched:
            raise ZeroOffloadError(
                f"a gradient of {self._places.name_of(param)} arrives after the update of its unit {unit.name} in this "
                f"backward, which ends here; {_INSTEAD}"
            )
        unit.wait_for_update()
        self._ring.collect()
        if self._runs and param in self._hypers:
            self._arriving[unit.index] = unit
            if torch._C._current_graph_task_id() != self._task and unit.num_uses > 1:
                self._late.add(unit.index)

    def _begin(self) -> None:
        """The first gradient of a backward; it has changed nothing yet."""
        hypers = self._hypers_now()
        self._life.check_usable()
        self._places.check_frozen(hypers)
        self._updates.commits.launch_due()
        if self._any_on_device:
            self._updates.wait_for_worker()
        for grads in self._grads.ledger.sections:
            grads.begin_backward()
        if self._task == -1:
            self._task = torch._C._current_graph_task_id()
        self._ring.begin_backward()
        self._hypers, self._runs = hypers, True
        # Before the first update, which the announcement of a reduction precedes; step() would be too late.
        for number, trainer in enumerate(list(self._trainers)):
            self._collectives.compare(f"optimizer {number}", trainer.compared)

    def before_use(self, unit: Unit) -> None:
        if self._task == -1:
            self._task = torch._C._current_graph_task_id()
        if unit.index in self._launched:
            raise ZeroOffloadError(
                f"backward reads parameters of {unit.name} after their update: something outside of the unit, such as "
                f"a hook, uses them; {_INSTEAD}"
            )
        self.advance(unit)

    def advance(self, beside: Unit | None = None) -> None:
        if len(self._arriving) <= self._lag:
            return
        done = [unit for unit in self._arriving.values() if unit is not beside and self._is_done(unit)]
        for unit in done[: len(done) - self._lag]:
            self._launch([unit.index], in_backward=True)

    def _is_done(self, unit: Unit) -> bool:
        """See [Note: when a backward is done with a unit]."""
        if unit.index in self._late or unit.in_use or unit.saved_views:
            return False
        if not all(each.state is GradState.HELD or _expects_none(each) for each in self._sections[unit.index]):
            return False
        # Other ranks do not know of a view that is held on this one; they refuse it, all alike, where it matters.
        return self._collectives.world_size > 1 or not unit.is_viewed(unit.sections)

    def end(self) -> None:
        if self._runs:
            held = {grads.unit.index for grads in self._grads.ledger.sections if self._taken(grads)}
            order = self._prefetcher.step_order()
            self._launch([index for index in order if index in held], in_backward=False)
        self._stop()

    def cancel(self) -> None:
        if not self._launched:
            self._stop()

    def _stop(self) -> None:
        self._runs, self._task = False, -1
        self._ring.end_backward()
        self._arriving.clear()
        self._late.clear()
        self._launched.clear()
        self._life.half_updated = ""

    # Updates

    def _taken(self, grads: GradSection) -> list[nn.Parameter]:
        """Parameters of a section that the step takes: an optimizer has them, and they have a gradient."""
        return [grads.params[index] for index in sorted(grads.holding) if grads.params[index] in self._hypers]

    def _launch(self, units: Sequence[int], *, in_backward: bool) -> None:
        """Update units with all gradients that they hold. A unit with a gradient that is not finite stays as it is."""
        if not units:
            return
        self._updates.states.readers.before_step()
        # Half of what follows is nothing to go on from.
        with failing(self._errors):
            self._launched.update(units)
            self._life.half_updated = (
                f"{len(self._launched)} of {len(self._units)} units were updated "
                f"({self._units[min(self._launched)].name}, ...)"
            )
            for index in units:
                self._arriving.pop(index, None)
                for grads in self._sections[index]:
                    grads.land()
            taken = {index: [p for grads in self._sections[index] for p in self._taken(grads)] for index in units}
            self._grads.updated.update(param for params in taken.values() for param in params)
            finite = self._grads.norms.finite([self._sections[index] for index in units], self._hypers)
            skipped = [index for index, each in zip(units, finite, strict=True) if not each]
            for index in skipped:
                self._skip(index, taken.pop(index))
            if taken:
                self._update(taken, in_backward=in_backward)

    def _update(self, taken: Mapping[int, Sequence[nn.Parameter]], *, in_backward: bool) -> None:
        sections = [grads for index in taken for grads in self._sections[index]]
        updates = self._updates.sections_of(self._hypers, sections, tuple(taken), self._updates.states.param_steps)
        self._updates.prepare(updates, in_backward=True)
        params = [param for params in taken.values() for param in params]
        launched = self._updates.launch(params, updates, in_backward=in_backward)
        for index in taken:
            self._ring.passing(launched[index], index)

    def _skip(self, index: int, params: Sequence[nn.Parameter]) -> None:
        self._skipped += self._grads.norms.non_finite(params) or [f"{self._units[index].name} on another rank"]
        self._grads.drop(params)
        self._ring.release_unit(index)

    # The step

    def confirm_step(self, hypers: Mapping[nn.Parameter, Hyper]) -> bool:
        """An optimizer steps with parameters `hypers`. True if backward has made that step."""
        mine = self._grads.updated & hypers.keys()
        if not self._has_warned and any(self._hypers[param] != hypers[param] for param in mine):
            self._has_warned = True
            warn_user(
                "hyperparameters have changed between backward and step(). With overlap='backward' an update uses the "
                "values from the beginning of backward. Change hyperparameters after step(), as schedulers do",
            )
        self._grads.updated -= mine
        return bool(mine)

    def take_skipped(self) -> list[str]:
        """Parameters whose gradients were not finite since the last call; their units were not updated."""
        names, self._skipped = self._skipped, []
        return names

    def reset(self) -> None:
        """All states were replaced: no step is half made any more."""
        self._grads.updated.clear()
        self._skipped.clear()
        self._launched.clear()
        self._stop()


def _expects_none(grads: GradSection) -> bool:
    """True if no parameter of the section wants a gradient now, and none is held from before."""
    return not grads.holding and not any(param.requires_grad for param in grads.params)
