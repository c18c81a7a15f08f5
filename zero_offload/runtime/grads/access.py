"""The program's access to gradients that are held: clipping, loss scale, `.grad`, `zo.gathered(kind="grads")`.

`GradAccess` is above `Gradients`: it reduces what earlier backwards have left before it answers. Elements are read and
changed where they rest. A whole gradient that the program has changed goes there by `GradLedger.write`.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Collection, Iterable

import torch
from torch import nn

from zero_offload.base.alike import hash_of
from zero_offload.base.errors import ZeroOffloadError
from zero_offload.base.host import host_zeros
from zero_offload.base.types import Tier
from zero_offload.plan.tensor_parallel import is_dtensor
from zero_offload.runtime.grads.gradients import Gradients
from zero_offload.runtime.ranks.collectives import Collectives
from zero_offload.standins.sources import GradLife, GradSource
from zero_offload.storage.shards.grad_store import as_used

_NOWHERE = (None, 0)


class GradAccess(GradSource):
    """The gradients of one model, as its program sees them."""

    def __init__(self, grads: Gradients, collectives: Collectives) -> None:
        self.arriving, self.ledger, self.norms = grads, grads.ledger, grads.norms
        self._collectives = collectives

    def share(self, param: nn.Parameter) -> None:
        """Before `param` is asked for its gradient: reduce what earlier backwards have left. Collective where a
        reduction waits: then all ranks ask, or all raise."""
        if not self.arriving.has_deferred or self.arriving.num_ranks == 1 or _in_backward():
            return
        if self.arriving.num_deferring:
            raise ZeroOffloadError(
                f"the gradient of {self.ledger.name_of(param)} is not reduced inside of zo.no_sync, where "
                "each rank has a part of its own. Read it on all ranks after the backward that follows the block; in "
                "accelerate's accumulate clip and look under 'if accelerator.sync_gradients:'"
            )
        self._collectives.agreement.same("a look at .grad, which reduces gradients: all ranks look, or none")
        self.arriving.reduce_waiting()
        self.norms.know()

    def name_of(self, param: nn.Parameter) -> str:
        return self.ledger.name_of(param)

    def norm(self, param: nn.Parameter, order: float) -> torch.Tensor:
        return self.norms.norm(param, order)

    def is_finite(self, param: nn.Parameter) -> bool:
        return self.norms.is_finite(param)

    def is_zeroed(self, param: nn.Parameter) -> bool:
        return param in self.ledger.zeroed

    def scale(self, param: nn.Parameter, factor: float | torch.Tensor, *, divides: bool = False) -> None:
        self.ledger.scale(param, factor, divides=divides)

    def life_of(self, param: nn.Parameter) -> GradLife:
        """An object that stays the same until the gradient held of `param` ends."""
        section, index = self.ledger.place(param)
        if section.given:
            self.ledger.check_given(section)
        return section.live(index)

    def in_hand(self, params: Iterable[nn.Parameter]) -> list[nn.Parameter]:
        """Those with a gradient that rests elsewhere, and that the program has a handle of. One rank."""
        if self.arriving.num_ranks > 1 or _in_backward():
            return []
        found, places = [], self.ledger.places
        for param in params:
            section, index = places.get(id(param), _NOWHERE)
            if section is not None and section.lives and section.living(index) is not None and not is_dtensor(param):
                found.append(param)
        return found

    def keep(self, param: nn.Parameter) -> None:
        """The program drops a gradient of which it has a handle: the handle has the values from now on."""
        section, index = self.ledger.place(param)
        if (life := section.living(index)) is not None:
            life.kept = self.read(param).cpu()

    def note_given(self, param: nn.Parameter, values: torch.Tensor) -> None:
        self.ledger.note_given(param, values)

    def check_unshared(self, param: nn.Parameter, values: torch.Tensor) -> None:
        self.ledger.check_unshared(param, values)

    def check_held(self, param: nn.Parameter, life: GradLife) -> None:
        """Raise where this gradient is over, or is not complete."""
        section, index = self.ledger.place(param)
        name = self.ledger.name_of(param)
        is_there = index in section.holding or param in self.ledger.zeroed
        if section.living(index) is not life or not is_there:
            raise ZeroOffloadError(
                f"this gradient of {name} is over: a step has used it, or it was dropped. Read {name}.grad again; keep "
                f"values beyond that by {name}.grad.clone()"
            )
        if section.given:
            self.ledger.check_given(section)
        self.check_complete(param)

    def check_complete(self, param: nn.Parameter) -> None:
        """Raise inside of a backward."""
        if _in_backward():
            name = self.name_of(param)
            raise ZeroOffloadError(
                f"the gradient of {name} is not complete while backward runs. Read it after backward. A hook that "
                f"register_post_accumulate_grad_hook puts on {name} finds what its backward adds in .grad"
            )

    def refuse(self, param: nn.Parameter, what: str) -> ZeroOffloadError:
        name, where = self.ledger.name_of(param), self.ledger.place(param)[0].section.shard.placement.grads.value
        return ZeroOffloadError(
            f"{what} asks for the memory of the gradient of {name}, which rests on {where} until the optimizer's step. "
            "Read and change it by torch's operations, or give what needs its memory a copy: param.grad.clone()"
        )

    def view(self, param: nn.Parameter) -> torch.Tensor | None:
        """The gradient itself, in the parameter's shape, where it rests on the compute device; else None. Its storage
        has no other gradient."""
        section, index = self.ledger.place(param)
        if self.ledger.loss_scale != 1.0:  # in memory it still has it, unless the program had it in hand before
            return section.exposed[index].grad if index in section.exposed else None
        if not self.shows_memory(param):
            return None
        self.ledger.read_factors()
        return section.expose(index)

    def is_shown(self, param: nn.Parameter, grad: torch.Tensor) -> bool:
        """True if the program has this very tensor as the gradient."""
        section, index = self.ledger.places.get(id(param), (None, 0))
        return section is not None and index in section.exposed and section.exposed[index].grad is grad

    def shows_memory(self, param: nn.Parameter) -> bool:
        """True if the program gets the gradient itself, and not a stand-in. A ring's memory is others' soon."""
        store = self.ledger.place(param)[0].store
        is_in_ring = self.arriving.updates_in_backward and not store.on_device
        is_whole = self._collectives.world_size == 1 and not is_dtensor(param)
        return store.tier is Tier.DEVICE and is_whole and not is_in_ring

    def adopt(self, param: nn.Parameter, grad: torch.Tensor) -> bool:
        """True if an assigned tensor is the gradient from now on; False where a copy has to be."""
        if not self.shows_memory(param) or not self.ledger.place(param)[0].can_adopt(grad):
            return False
        self.ledger.adopt(param, grad.detach() if grad.requires_grad else grad)
        self.norms.clear()
        return True

    def copies(self, params: Collection[nn.Parameter]) -> dict[nn.Parameter, torch.Tensor]:
        """Copies of the gradients held of `params` as a step would use them, fp32, host. Collective."""
        for param in params:
            self.share(param)
        held = [section.params[index] for section, indices in self.ledger.chosen(params) for index in indices]
        found = {param: self.read(param).cpu() for param in held}
        self.ledger.save_changed()
        return found

    # Elements

    def span(self, param: nn.Parameter) -> slice | None:
        section, index = self.ledger.place(param)
        layout = section.layout
        if layout.num_shards == 1:
            return None
        part, ahead = section.store.parts[index], layout.params[index].begin
        origin = self._collectives.shard_index * layout.shard_numel - ahead
        return slice(part.start + origin, part.stop + origin) if part.start < part.stop else slice(0, 0)

    def read_part(self, param: nn.Parameter) -> torch.Tensor:
        self.share(param)
        section, index = self.ledger.place(param)
        if is_dtensor(param):
            raise ZeroOffloadError(
                f"elements of the gradient of {self.name_of(param)} are not read: it is a DTensor's, which "
                "tensor-parallel ranks divide. Its norm is known, and it is scaled and clipped"
            )
        device, part = self.arriving.device.torch_device, section.store.parts[index]
        if param in self.ledger.zeroed:
            return torch.zeros(part.stop - part.start, dtype=torch.float32, device=device)
        self.ledger.read_factors()
        section.land()
        self.ledger.change(section, ())
        found = section.store.view(index).to(device, torch.float32, copy=True)
        (count,) = section.counts([index])
        return as_used(found, count, self.ledger.loss_scale)

    def write_part(self, param: nn.Parameter, values: torch.Tensor, what: str) -> None:
        self.ledger.write(param, values, what)
        self.norms.clear()

    def read(self, param: nn.Parameter) -> torch.Tensor:
        section, index = self.ledger.place(param)
        piece, mine, what = (
            section.layout.params[index],
            self.read_part(param),
            f"the gradient of {self.name_of(param)}",
        )
        if section.layout.num_shards > 1:
            self._collectives.agreement.announce(f"the gather of {what}")
        return self._collectives.gather_param(section.layout, piece, mine, what).view(piece.spec.shape)

    def write(self, param: nn.Parameter, values: torch.Tensor) -> None:
        span, flat = self.span(param), values.detach().reshape(-1)
        what = "written" if self.arriving.num_ranks == 1 else f"written {hash_of(flat)}"
        self.write_part(param, flat if span is None else flat[span], what)

    def squares(self, params: Collection[nn.Parameter]) -> float:
        """The sum of squares of these gradients, as the next update would use them. Collective."""
        return self.norms.squares(params)[0]

    def unscale(self, loss_scale: float, overflowed: bool) -> bool:
        """Divide the loss scale out of all factors, once. True if the step must not be taken. Collective.

        `overflowed` is what this rank knows of gradients that are elsewhere.
        """
        finite = self.norms.all_finite(None)
        (bad,) = self._collectives.any_rank([overflowed or not finite])
        if self.ledger.any_held(None):
            self.ledger.loss_scale = loss_scale
            self.ledger.overflowed |= bad
            self.ledger.unscale_exposed()
        return bad or self.ledger.overflowed

    def clamp(self, params: Collection[nn.Parameter], low: float | None, high: float | None) -> None:
        """Clip the elements of the gradients held of `params` to [low, high], where they rest. None sets no limit on
        that side. Collective where a reduction waits.
        """
        self.arriving.reduce_waiting()
        self.ledger.read_factors()
        for section, indices in self.ledger.by_section(params):
            section.land()
            if section.exposed:
                section.follow_exposed()
            chosen = sorted(section.holding.intersection(indices))
            if not chosen:
                continue
            self.ledger.note_change(f"clamped to {low} and {high}", section, chosen)
            self.ledger.change(section, chosen)
            for index in chosen:
                factor, scale = section.store.factors.get(index, 1.0), self.ledger.loss_scale
                if index in section.exposed:
                    view, left = section.store.view(index), 1.0
                elif math.frexp(factor)[0] == 0.5:
                    # A power of two, such as a loss scaler's, divides the bounds: 16 bits may have no room for it.
                    view, left = section.store.view(index), factor / scale
                else:
                    if section.store.dtype != torch.float32:
                        section.store.widen()  # the product is not rounded before it is clamped
                    view, left = section.store.view(index, multiplied=True), 1.0 / scale
                most = torch.finfo(view.dtype).max
                view.clamp_(
                    None if low is None else max(-most, low / left), None if high is None else min(most, high / left)
                )
            if section.exposed:
                section.follow_exposed()
            self.norms.clear()

    def zero(self, params: Collection[nn.Parameter]) -> None:
        """Let gradients be zeros, to which the next backward adds. Those that the program has in hand are written."""
        self.ledger.read_factors()
        params = [param for param in params if not self.ledger.zero_exposed(param)]
        self.ledger.end_scale_of_zeros()
        places = [self.ledger.place(param) for param in params]
        lives = [section.living(index) for section, index in places]
        self.arriving.clear(params, by_program=True)
        for (section, index), life in zip(places, lives, strict=True):
            if life is not None:
                section.lives[index] = weakref.ref(life)
        self.ledger.zeroed.update(params)

    def hold_zeros(self, params: Iterable[nn.Parameter]) -> None:
        """A step takes these, which are zeros: write those where gradients rest."""
        for section, _ in self.ledger.by_section(self.ledger.zeroed):
            self.ledger.check_given(section)
        for param in self.ledger.zeroed.intersection(params):
            self.write_part(param, host_zeros(1, torch.float32), "zeros")


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1
