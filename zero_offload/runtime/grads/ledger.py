"""Which gradients of one model are held, and what they count: factors, loss scale, what the program has changed.

`GradLedger` is asked by all of this folder and by the update. The calls: `add` per section; `hold` for the gradients
that a reduction brings. `multiply` and `scale` set factors, `read_factors` comes before their use. `change` and
`save_changed` stand around a write where gradients rest. `changes` when a step compares ranks; `clear` when gradients
go.

[Note: factors]
Clipping by norm moves no gradient: each gets a factor that the update multiplies by. Some code must see the product
before: a gradient added to it, clipping by value, a look at `.grad`. It multiplies where the gradient rests, and the
factor ends.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from zero_offload.base.errors import ZeroOffloadError
from zero_offload.hardware.device import Device
from zero_offload.plan.layout import ParamSlice
from zero_offload.runtime.grads.section import Factor, Given, GradSection
from zero_offload.runtime.units.unit import Section
from zero_offload.standins.owners import dropped_error


class GradLedger:
    """The gradients that are held."""

    def __init__(self, device: Device, *, is_alone: bool) -> None:
        """`is_alone`: one rank."""
        self._device = device
        self._is_alone = is_alone
        self.sections: list[GradSection] = []
        """The trainable ones."""
        self.places: dict[int, tuple[GradSection, int]] = {}
        """By a parameter's id: its section, and its index there."""
        self.zeroed: set[nn.Parameter] = set()
        """Parameters whose gradient the program has set to zeros, and that no backward has added to. A step that takes
        them has the zeros written."""
        self.loss_scale = 1.0
        """The factor by which the gradients held now are multiplied, and which the step divides out; it ends with them.
        """
        self.overflowed = False
        """True if a loss scaler has found that this step must not be taken; it ends with the gradients."""
        self._given: dict[int, dict[int, Given]] = {}
        """Tensors that the program has assigned and may hold still, by their storage and the parameter's id."""
        self._given_at: dict[int, int] = {}
        """The storage of the last one, by the parameter's id."""
        self._captured: Factor | None = None
        """The last factor in a device's memory; the next parameter mostly has the same."""
        self._changed: tuple[GradSection, set[int]] | None = None
        """A section in which these gradients were changed where they rest, and that has not left for its drive."""
        self._is_scaled = False
        """True if the program has scaled gradients held by their handles."""
        self._changes = 0
        """A word for what else the program has done to gradients that all ranks hold, in any order."""

    def add(
        self, sections: Iterable[GradSection], placed_params: Iterable[tuple[Section, ParamSlice, nn.Parameter]]
    ) -> None:
        """Sections of a unit, and its parameters in their order."""
        by_section = {id(each.section): each for each in sections}
        for section, _, param in placed_params:
            if (found := by_section.get(id(section))) is not None:
                self.places[id(param)] = (found, len(found.params))
                found.params.append(param)
        self.sections += [each for each in by_section.values() if each.layout.trainable]
        # Sums over sections are made in one order, whenever each of them came.
        self.sections.sort(key=lambda each: each.layout.index)

    def freeze(self, section: Section) -> GradSection:
        """None of its parameters is trained any more; no gradient of them is held."""
        frozen = next(each for each in self.sections if each.section is section)
        frozen.layout = section.shard.layout
        self.sections.remove(frozen)
        self.zeroed.difference_update(frozen.params)
        return frozen

    def replace(self, old: nn.Parameter, new: nn.Parameter) -> None:
        """Another parameter has the place of one without a gradient."""
        section, index = self.places[id(new)] = self.places.pop(id(old))
        section.params[index] = new
        section.taken.discard(index)
        self.zeroed.discard(old)

    def lay_out(self, empty: Collection[int]) -> None:
        """Sections have other layouts; those of these numbers have no parameter any more, and go."""
        self.places = {key: place for key, place in self.places.items() if place[0].layout.index not in empty}
        self.sections = [section for section in self.sections if section.layout.index not in empty]
        self.zeroed = {param for param in self.zeroed if id(param) in self.places}
        for section, _ in self.places.values():
            section.layout = section.section.shard.layout

    def place(self, param: nn.Parameter) -> tuple[GradSection, int]:
        """A parameter's section and its index there. Raises ZeroOffloadError for a parameter that is gone."""
        try:
            return self.places[id(param)]
        except KeyError:
            raise dropped_error(param) from None

    def name_of(self, param: nn.Parameter) -> str:
        section, index = self.places[id(param)]
        return section.layout.params[index].spec.name

    def held(self, param: nn.Parameter) -> bool:
        """True if a gradient waits for a step."""
        section, index = self.places[id(param)]
        return index in section.holding

    def is_kept(self, param: nn.Parameter) -> bool:
        """True if the parameter would have a gradient in torch, where a step keeps it."""
        section, index = self.places[id(param)]
        return index in section.holding or index in section.taken or param in self.zeroed

    def any_held(self, params: Collection[nn.Parameter] | None) -> bool:
        """True if a gradient of `params` (None: of any parameter) waits for a step."""
        return any(indices for _, indices in self.chosen(params))

    def chosen(self, params: Collection[nn.Parameter] | None) -> Iterator[tuple[GradSection, list[int]]]:
        """Sections, each with those of `params` (None: of all) in it whose gradients are held."""
        wanted = None if params is None else set(map(id, params))
        self.save_changed()
        for section in self.sections:
            if section.fresh is not None:
                section.fresh.land()
            if section.exposed:
                section.follow_exposed()
            if section.given:
                self.check_given(section)
            held = sorted(section.holding)
            yield section, [index for index in held if wanted is None or id(section.params[index]) in wanted]

    def by_section(self, params: Iterable[nn.Parameter]) -> Iterable[tuple[GradSection, list[int]]]:
        """The sections of these parameters, each with their indices in it."""
        found: dict[int, tuple[GradSection, list[int]]] = {}
        for param in params:
            section, index = self.places[id(param)]
            found.setdefault(id(section), (section, []))[1].append(index)
        return found.values()

    def hold(self, section: GradSection, indices: set[int]) -> None:
        """Some rank has a gradient of these parameters, so all ranks hold one."""
        section.holding |= indices
        self.zeroed.difference_update(section.params[index] for index in indices)

    def multiply(self, factor: float, params: Collection[nn.Parameter]) -> None:
        """Let the gradients held of `params` count `factor` times. See [Note: factors]."""
        for section, indices in self.chosen(params) if factor != 1.0 else ():
            section.multiply(indices, factor)

    def scale(self, param: nn.Parameter, factor: float | torch.Tensor, *, divides: bool = False) -> None:
        """Let a gradient held count `factor` times, or its inverse. A tensor, one element, in a device's memory, stays
        there until a step reads it. See [Note: factors]."""
        if param in self.zeroed:
            return
        section, index = self.places[id(param)]
        section.land()
        if index in section.exposed:
            grad = section.exposed[index].grad
            grad.div_(factor) if divides else grad.mul_(factor)
            return
        self._is_scaled = True
        if not self._device.is_host and isinstance(factor, torch.Tensor) and factor.device == self._device.torch_device:
            section.factors.setdefault(index, []).append(self._capture(factor, divides))
            return
        section.multiply([index], float(factor), divides=divides)

    def _capture(self, factor: torch.Tensor, divides: bool) -> Factor:
        """The factor as it is now: the program may change the tensor."""
        version = object() if factor.is_inference() else factor._version  # tensors of inference mode count no changes
        last = self._captured
        if last is None or last.given is not factor or (last.version, last.divides) != (version, divides):
            value = factor.detach().reshape(()).to(torch.float64, copy=True)
            last = Factor(value, self.stream(), factor, version, divides)
            self._captured = last
        return last

    def stream(self) -> Any:
        return None if self._device.is_host else self._device.stream()

    def use(self, tensor: torch.Tensor, stream: Any) -> None:
        """This thread's stream computes with a tensor of ours that was made on `stream`."""
        if stream != self.stream():
            self._device.join([stream])
            self._device.use_here(tensor)

    def read_factors(self) -> None:
        """Bring factors in a device's memory to where the step finds them; one wait for all."""
        if self._captured is None:
            return
        self._captured = None
        scaled = [(section, index, each) for section in self.sections for index, each in section.factors.items()]
        factors = {id(factor): factor.value for _, _, each in scaled for factor in each}
        for factor in (factor for _, _, each in scaled for factor in each):
            self.use(factor.value, factor.stream)
        values = dict(zip(factors, torch.stack([*factors.values()]).tolist(), strict=True)) if factors else {}
        for section, index, each in scaled:
            for factor in each:
                section.multiply([index], values[id(factor)], divides=factor.divides)
        for section in self.sections:
            section.factors.clear()

    def changes(self) -> str:
        """A digest of the program's changes of gradients since the last step, as a part of the step's name."""
        if not (self._is_scaled or self._changes):
            return ""
        self.read_factors()
        factors = [sorted(section.store.factors.items()) for section in self.sections] if self._is_scaled else []
        digest = zlib.crc32(repr((factors, self._changes)).encode())
        self._is_scaled, self._changes = False, 0
        return f" with gradients changed by .grad ({digest:08x})"

    def note_change(self, what: str, section: GradSection, indices: Collection[int]) -> None:
        """The program changes gradients. Gradients that are not reduced yet are each rank's own, and are not noted."""
        if self._is_alone:
            return
        for index in section.holding.intersection(indices) - section.waiting:
            word = zlib.crc32(f"{what} {section.layout.params[index].spec.name}".encode())
            self._changes = (self._changes + word) % (1 << 32)

    def write(self, param: nn.Parameter, values: torch.Tensor, what: str) -> None:
        """The program replaces this rank's part of a gradient by `values`, (numel,) or (1,): a step uses these from now
        on. Their sum of squares is made when they leave. `what`: as in `note_change`."""
        section, index = self.places[id(param)]
        self.change(section, [index])
        section.store.write(index, values)
        if section.exposed:
            section.follow_exposed()
        self._hold_written(param)
        self.note_change(what, section, [index])

    def adopt(self, param: nn.Parameter, grad: torch.Tensor) -> None:
        """The program replaces a gradient by a tensor of its own, which the section `can_adopt`: `param.grad` is this
        tensor. One rank."""
        section, index = self.places[id(param)]
        self.change(section, [index])
        if grad.dtype != section.store.dtype:
            section.store.widen()
            section.follow_exposed()
        section.adopt(index, grad)
        self._hold_written(param)

    def _hold_written(self, param: nn.Parameter) -> None:
        """A parameter's gradient is where it rests, as a step uses it."""
        section, index = self.places[id(param)]
        section.factors.pop(index, None)
        if self.loss_scale != 1.0:
            section.store.factors[index] = self.loss_scale  # which the step divides out
        section.hold(index)
        self.zeroed.discard(param)

    def note_given(self, param: nn.Parameter, grad: torch.Tensor) -> None:
        """A copy of `grad` was assigned: a change of the tensor itself would be missed."""
        if not grad.is_inference():
            section, index = self.places[id(param)]
            section.given[index] = given = Given.of(grad)
            self._given.get(self._given_at.pop(id(param), 0), {}).pop(id(param), None)
            if given.storage is not None:
                self._given_at[id(param)] = given.storage.cdata
                self._given.setdefault(given.storage.cdata, {})[id(param)] = given

    def check_unshared(self, param: nn.Parameter, grad: torch.Tensor) -> None:
        """Raise where the gradient of another parameter is a copy of a tensor that lies where this one does."""
        if not self._given or grad.is_inference() or (storage := (given := Given.of(grad)).storage) is None:
            return
        for key, other in self._given.get(storage.cdata, {}).items():
            section, index = self.places.get(key, (None, 0))
            is_there = section is not None and section.given.get(index) is other
            if section is not None and is_there and key != id(param) and given.overlaps(other):
                raise ZeroOffloadError(
                    f"the tensor that was assigned to the gradient of {self.name_of(param)} has memory of that of "
                    f"{section.layout.params[index].spec.name}. In plain torch both gradients are one tensor then, and "
                    "changes of one are those of the other; here each rests for itself. Assign a copy: "
                    "param.grad = tensor.clone()"
                )

    def check_given(self, section: GradSection) -> None:
        """Raise where an assigned tensor was changed since."""
        for index, (counter, version, *_) in section.given.items():
            if counter._version != version:
                name = section.layout.params[index].spec.name
                raise ZeroOffloadError(
                    f"the tensor that was assigned to the gradient of {name} was changed afterwards. In plain torch it "
                    "is the gradient; here .grad has a copy, since gradients rest elsewhere, and misses the change. "
                    "Assign after the last change, or change param.grad"
                )

    def zero_exposed(self, param: nn.Parameter) -> bool:
        """Write zeros to a gradient that the program has in hand, also after a step has used it. False for others."""
        section, index = self.places[id(param)]
        kept = section.kept.pop(index, _nothing)()
        if index in section.exposed:
            section.follow_exposed()
            section.exposed[index].grad.zero_()
        elif kept is not None and section.can_adopt(kept):
            self.adopt(param, kept.zero_())
        else:
            return False
        return True

    def end_scale_of_zeros(self) -> None:
        """The loss scale ends with the last gradient, except zeros that the program has in hand."""
        if self.loss_scale == 1.0:
            return
        for section in self.sections:
            if section.holding - section.exposed.keys() or any(each.grad.any() for each in section.exposed.values()):
                return
        for section in self.sections:
            section.store.factors.clear()
        self.loss_scale, self.overflowed = 1.0, False

    def unscale_exposed(self) -> None:
        """`loss_scale` was set: gradients that the program has in hand are divided by it at once, in fp32."""
        for section in self.sections:
            if not section.exposed:
                continue
            section.follow_exposed()
            if section.store.dtype != torch.float32:
                section.store.widen()
                section.follow_exposed()
            for index, (grad, _) in section.exposed.items():
                grad.mul_(1.0 / self.loss_scale)
                section.store.factors[index] = self.loss_scale

    def save_changed(self) -> None:
        """Sum up what was changed where it rests, and let it leave for where it was."""
        if self._changed is not None:
            (section, indices), self._changed = self._changed, None
            section.store.end_view(indices & section.holding)

    def change(self, section: GradSection, indices: Collection[int]) -> None:
        """The program looks at a section's gradients where they rest, or changes these of them, now and until
        `save_changed`."""
        if self._changed is not None and self._changed[0] is not section:
            self.save_changed()
        # Other parameters of the section may have had a step, whose update reads it still.
        section.unit.wait_for_update()
        self._changed = self._changed or (section, set())
        self._changed[1].update(indices)

    def reset(self) -> None:
        """A backward broke off: what was changed is not wanted."""
        self._changed, self._changes = None, 0

    def end_if_none(self) -> bool:
        """True if no gradient is held; the loss scale ends with the last one."""
        if any(section.holding for section in self.sections):
            return False
        self.loss_scale, self.overflowed, self._is_scaled = 1.0, False, False
        self._captured = None
        if self._given and not any(section.given for section in self.sections):
            self._given.clear()
            self._given_at.clear()
        return True


def _nothing() -> None:
    """The reference to a tensor that is not kept."""
