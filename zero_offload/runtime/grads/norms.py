"""Norms of the gradients that are held, and whether they are finite, from sums of squares that come with them.

No gradient moves for a norm of order 2. The calls: `know` at the end of a backward, `clear` when a gradient changes,
`end_total` when one goes; `squares`, `all_finite`, `finite`, `norm` and `is_finite`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Container, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from zero_offload.hardware.device import Device
from zero_offload.runtime.grads.ledger import GradLedger
from zero_offload.runtime.grads.section import GradSection
from zero_offload.runtime.ranks.collectives import Collectives
from zero_offload.storage.shards.grad_downloads import GradDownloads


@dataclass
class Norms:
    """Norms of one order of all gradients held, without factors and loss scale, by the parameter's id."""

    of: dict[int, float]
    at: dict[int, int]
    """Their places in `rows`."""
    rows: torch.Tensor | None = None
    """(norms,) fp32 on the compute device, once a handle is asked."""
    stream: Any = None
    """The one on which `rows` was made."""


class GradNorms:
    """The norms of what a ledger holds."""

    def __init__(
        self,
        ledger: GradLedger,
        collectives: Collectives,
        device: Device,
        downloads: GradDownloads | None,
        *,
        updates_in_backward: bool,
    ) -> None:
        """`updates_in_backward`: nothing is held when a backward ends."""
        self._ledger = ledger
        self._collectives = collectives
        self._device = device
        self._downloads = downloads
        self._updates_in_backward = updates_in_backward
        self._by_order: dict[float, Norms] = {}
        """By the order: of all gradients held. Known until one of them changes."""
        self._are_finite = False
        """True if all gradients held, without factors, are known to be finite on every rank."""
        self._whole: tuple[float, float] | None = None
        """The sums over ranks of `squares`, for all gradients held, if none of them had a factor then."""

    def clear(self) -> None:
        """A gradient has changed."""
        self._by_order.clear()
        self._are_finite, self._whole = False, None

    def end_total(self) -> None:
        """Fewer gradients are held. Norms of the others stay known."""
        self._whole = None

    def all_finite(self, params: Collection[nn.Parameter] | None) -> bool:
        """True if all gradients held of `params` (None: of all) are finite, on every rank. Collective."""
        self._ledger.read_factors()
        if self._are_finite and self._collectives.num_shards > 1:  # then no rank shows memory of gradients
            chosen = self._ledger.chosen(params)
            return all(math.isfinite(count) for section, indices in chosen for count in section.counts(indices))
        if (known := self._by_order.get(2.0)) is None or not self._collectives.divides:
            return self.squares(params)[1]
        return all(
            math.isfinite(known.of[id(section.params[index])] * count)
            for section, indices in self._ledger.chosen(params)
            for index, count in zip(indices, section.counts(indices), strict=True)
        )

    def squares(self, params: Collection[nn.Parameter] | None) -> tuple[float, bool]:
        """The sum of squares of the gradients held of `params` (None: of all), and whether all are finite, on every
        rank. Collective."""
        mine, is_all, has_factors = self._squares_here(params)
        total, bad = self._whole or (0.0, 0.0)
        if self._whole is None or has_factors or not is_all:
            total, bad = self._collectives.sum_over_shards(list(mine))
        self._are_finite = bad == 0 and is_all
        return total, bad == 0

    def _squares_here(self, params: Collection[nn.Parameter] | None) -> tuple[tuple[float, float], bool, bool]:
        """As `squares`, of this rank's parts, with how many are not finite; whether these are all that are held;
        whether they have factors."""
        total, bad, is_all, has_factors = 0.0, 0.0, True, self._ledger.loss_scale != 1.0
        self._ledger.read_factors()
        self._complete_sums(self._ledger.sections)
        for section, indices in self._ledger.chosen(params):
            sums, factors = section.sums(indices), section.store.factors  # here, not by a call: this runs in each step
            is_all = is_all and len(indices) == len(section.holding)
            has_factors = has_factors or bool(factors)
            squares = math.fsum(
                [
                    (factors.get(index, 1.0) / self._ledger.loss_scale) ** 2 * each.sumsq
                    for index, each in zip(indices, sums, strict=True)
                ]
            )
            # Tensor-parallel ranks that hold the same count it once between them.
            total += squares / section.layout.num_copies
            bad += sum(
                [
                    not (each.finite and math.isfinite(factors.get(index, 1.0)))
                    for index, each in zip(indices, sums, strict=True)
                ]
            )
        return (total, bad), is_all, has_factors

    def finite(self, units: Sequence[Sequence[GradSection]], params: Container[nn.Parameter]) -> list[bool]:
        """For each unit's sections, whether the gradients held of `params` are finite, on every rank. Collective."""
        for section in itertools.chain(*units):
            self._complete_sums([section])
        bad = [
            not all(
                each.finite
                for section in unit
                for each in section.sums(i for i in section.holding if section.params[i] in params)
            )
            for unit in units
        ]
        return [not each for each in self._collectives.any_rank(bad)]

    def non_finite(self, params: Collection[nn.Parameter] | None) -> list[str]:
        """Names of those of `params` whose gradient, or this rank's part of it, `all_finite` has found not to be."""
        return [
            section.layout.params[index].spec.name
            for section, indices in self._ledger.chosen(params)
            for index, each, count in zip(indices, section.sums(indices), section.counts(indices), strict=True)
            if not (each.finite and math.isfinite(count))
        ]

    def _complete_sums(self, sections: Sequence[GradSection]) -> None:
        """Complete the sums of these, those on their way too, and sums that may have changed since."""
        self._ledger.save_changed()
        for section in sections:
            section.land()
            if section.exposed:  # the user may have changed it through `.grad`
                section.follow_exposed()
                section.store.end_view(section.exposed.keys() & section.holding)
        if self._downloads is not None and sections:
            self._downloads.sums.read([each.store.sums for each in sections], sections[0].store.unit)

    def norm(self, param: nn.Parameter, order: float) -> torch.Tensor:
        """The norm of a gradient held, as the next update would use it; () fp32 on the compute device, not shared.

        Of order 2 it is known. The first of another order since a gradient has changed takes one pass over all
        gradients, where they rest, and is collective. So is that of order 2 where a GPU's ranks have sums under way.
        """
        if param in self._ledger.zeroed:
            return torch.zeros((), dtype=torch.float32, device=self._device.torch_device)
        section, index = self._ledger.place(param)
        if order not in self._by_order:
            if self._collectives.divides:
                self._collectives.agreement.same(f"a norm of order {order:g} of .grad: all ranks ask for it, or none")
            self._by_order[order], _ = self._find(order)
        found = self._by_order[order]
        if found.rows is None:
            values = torch.tensor([*found.of.values()], dtype=torch.float64, device="cpu")
            found.rows, found.stream = values.to(self._device.torch_device, torch.float32), self._ledger.stream()
        self._ledger.use(found.rows, found.stream)
        (count,) = section.counts([index])
        factor = 1.0 if order == 0 else abs(count) / self._ledger.loss_scale
        norm = found.rows[found.at[id(param)]] * factor
        for each in section.factors.get(index, ()) if order else ():
            self._ledger.use(each.value, each.stream)
            norm = norm / each.value.abs() if each.divides else norm * each.value.abs()
        return norm.float()

    def is_finite(self, param: nn.Parameter) -> bool:
        """True if a gradient held is finite, on every rank. Collective as `norm`."""
        if param in self._ledger.zeroed:
            return True
        self.norm(param, 2.0)
        section, index = self._ledger.place(param)
        (count,) = section.counts([index])
        return math.isfinite(self._by_order[2.0].of[id(param)] * count)

    def know(self) -> None:
        """At the end of a backward that has reduced: each rank finds norms of whole gradients. Collective.

        On a GPU the sums are still under way, and the host waits for nothing here.
        """
        if self._device.is_host and self._collectives.divides and not self._updates_in_backward:
            mine, _, has_factors = self._squares_here(None)
            self._by_order[2.0], (total, bad) = self._find(2.0, mine)
            self._whole = None if has_factors else (total, bad)

    def _find(self, order: float, beside: Sequence[float] = ()) -> tuple[Norms, list[float]]:
        """Norms of all gradients held, without factors and loss scale; with those of order 2 numbers `beside` them,
        added up over ranks. Collective.
        """
        if order == 2:
            self._complete_sums(self._ledger.sections)
        at, found = dict[int, int](), list[float]()
        for section, indices in self._ledger.chosen(None):
            at |= {id(section.params[index]): len(found) + row for row, index in enumerate(indices)}
            if order == 2:
                found += [each.sumsq / section.layout.num_copies for each in section.sums(indices)]
            elif indices:
                found += self._powers(section, indices, order)
        sums = list[float]()
        if order == math.inf:
            norms = self._collectives.most_over_shards(found)
        else:
            sums = self._collectives.sum_over_shards([*found, *beside])
            norms = [math.sqrt(each) if order == 2 else each ** (1 / (order or 1)) for each in sums[: len(found)]]
        return Norms(dict(zip(at, norms, strict=True)), at), sums[len(found) :]

    def _powers(self, section: GradSection, indices: Sequence[int], order: float) -> list[float]:
        """The sum of each gradient's absolute values to a power, of this rank's part; of order inf the largest one."""
        section.unit.wait_for_update()
        brought, store = section.store.on_disk, section.store
        views = [store.view(index) for index in indices]
        norms = [
            torch.linalg.vector_norm(view, order, dtype=torch.float64) if view.numel() else view.new_zeros(()).double()
            for view in views
        ]
        found = torch.stack(norms)
        powers = found if order == math.inf else found.pow(order or 1) / section.layout.num_copies
        values: list[float] = powers.tolist()
        if brought:
            store.end_view()
        else:
            store.complete()
        return values
