"""`assemble`: the parts of one model's step, made of its `Foundation` in the order in which one needs the other."""

from __future__ import annotations

import weakref
from dataclasses import dataclass

from zero_offload.base.stats import StatsKeeper
from zero_offload.base.types import Existing
from zero_offload.hardware.probe import free_memory_bytes
from zero_offload.model.backward_updates import BackwardUpdates
from zero_offload.model.commits import Commits
from zero_offload.model.end import ModelEnd
from zero_offload.model.foundation import Foundation
from zero_offload.model.iterations import Iterations
from zero_offload.model.params import ModelParams, ModelPlaces, ModelStates
from zero_offload.model.parts import ModelParts
from zero_offload.model.updates import Updates
from zero_offload.runtime.experts import GroupedExperts
from zero_offload.runtime.grads.access import GradAccess
from zero_offload.runtime.grads.gradients import Gradients
from zero_offload.runtime.pass_tracker import PassTracker
from zero_offload.storage.memory.heap import HeapHole


@dataclass(frozen=True, eq=False, repr=False, kw_only=True)
class Assembly:
    """The value that `ModelRuntime` is made of: a foundation, and the parts of a step on it."""

    base: Foundation
    places: ModelPlaces
    grads: Gradients
    grad_access: GradAccess
    commits: Commits
    states: ModelStates
    updates: Updates
    in_backward: BackwardUpdates | None
    """With overlap="backward"."""
    tracker: PassTracker
    experts: GroupedExperts
    access: ModelParams
    parts: ModelParts
    stats: StatsKeeper
    end: ModelEnd


def assemble(base: Foundation) -> Assembly:
    """Make the parts. Nothing runs yet, and nothing here has to be undone."""
    store, prefetcher, device, collectives = base.store, base.prefetcher, base.device, base.collectives
    stays = base.stays_in_memory
    # Gradients first: their bytes say how large a hole the heap keeps.
    places = ModelPlaces(base.units)
    grads = Gradients(
        *(base.units, store, prefetcher.pool, collectives, device), ring=base.grad_ring, stay_in_memory=stays
    )
    grad_access = GradAccess(grads, collectives)
    grad_bytes = sum(section.layout.nbytes for section in grads.ledger.sections)
    hole = HeapHole(grad_bytes, free_memory_bytes) if stays else None
    # An error anywhere ends the waits of snapshots.
    base.errors.tell(store.snapshots.fail)
    commits = Commits(
        base.files.keeper,
        store.snapshots,
        (base.update_worker, base.commit_worker),
        prefetcher.step_order,
        base.config.commit_every,
        Iterations(),
        base.ranks,
        resumes=base.config.existing == Existing.RESUME,
    )
    told = weakref.WeakMethod(commits.fail)  # with a strong one a dropped model would wait for the garbage collector
    base.errors.tell(lambda error: fail(error) if (fail := told()) is not None else None)
    states = ModelStates(base, places, commits)
    updates = Updates(base, grads, states, commits)
    in_backward = None if base.grad_ring is None else BackwardUpdates(base, base.grad_ring, grads, places, updates)
    elsewhere = None if device.is_host else device.torch_device
    # The tracker drives gradients and prefetch, so it comes after all of them.
    tracker = PassTracker(base.units, prefetcher, grads, base.activations, hole, base.life, in_backward, elsewhere)
    return Assembly(
        base=base,
        places=places,
        grads=grads,
        grad_access=grad_access,
        commits=commits,
        states=states,
        updates=updates,
        in_backward=in_backward,
        tracker=tracker,
        experts=GroupedExperts(base.expert_groups, prefetcher, tracker, grads),
        access=ModelParams(base, places, states, grad_access, tracker),
        parts=ModelParts(base, places, states),
        stats=StatsKeeper(store.counters, lambda: store.arena.taken),
        end=ModelEnd(base.life, base.errors, grads, commits, store, base.ranks, base.files),
    )
