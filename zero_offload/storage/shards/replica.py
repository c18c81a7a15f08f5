"""Whole values of a section that ranks have cut, on this rank and away from the compute device: stages 1 and 2.

The first use after an update gathers the shards and is kept here; every other use is served from here, without
communication. It belongs to no generation, since it can be made again. `fresh` says whether it has the newest values.
"""

from __future__ import annotations

import torch

from zero_offload.plan.layout import SectionLayout
from zero_offload.storage.files.engine import Urgency
from zero_offload.storage.files.extents import Extent
from zero_offload.storage.files.swap_file import Transfer
from zero_offload.storage.shards.disk import ALL_ROWS, DiskArrays


class Replica:
    """In host memory where `memory`, (numel,), is given; else on disk."""

    def __init__(self, layout: SectionLayout, disk: DiskArrays, memory: torch.Tensor | None) -> None:
        self._layout = layout.whole()
        self._disk = disk
        self._extent: Extent | None = None
        self.memory = memory
        self.fresh = False

    def launch_fetch(self, address: int, urgency: Urgency) -> Transfer:
        """Bring the values, `layout.nbytes`, from disk to host memory at `address`."""
        assert self._extent is not None and self.fresh
        return self._disk.launch_read(self._extent, ALL_ROWS, address, urgency)

    def launch_save(self, address: int) -> Transfer:
        """Write the values from host memory to disk."""
        if self._extent is None:
            # Now, not at the start: extents of generations must lie alike for every placement.
            sizes = self._layout.block_sizes(self._layout.dtype)
            self._extent = self._disk.allocate(f"section {self._layout.index} replica", sizes)
        return self._disk.launch_write(self._extent, ALL_ROWS, address)
