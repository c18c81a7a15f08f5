"""Arrays on disk: launches reads and writes of extents and counts their bytes. Knows no shard."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from zero_offload.base.events import Counters
from zero_offload.base.spans import Lane
from zero_offload.base.types import Tier
from zero_offload.storage.files.engine import Urgency
from zero_offload.storage.files.extents import Extent
from zero_offload.storage.files.swap_file import SwapFile, Transfer
from zero_offload.storage.memory.arena import Region

ALL_ROWS = slice(None)


class DiskArrays:
    """The swap file, with counters; unusable without one."""

    def __init__(self, swap: SwapFile | None, counters: Counters) -> None:
        self._swap = swap
        self.counters = counters

    def allocate(self, name: str, block_sizes: Sequence[int]) -> Extent:
        """Room for blocks of these sizes, in bytes."""
        assert self._swap is not None
        return self._swap.allocate(name, block_sizes)

    def allocate_copies(self, names: Sequence[str], block_sizes: Sequence[int]) -> tuple[Extent, ...]:
        """The same for several arrays of one shape."""
        assert self._swap is not None
        return self._swap.allocate_copies(names, block_sizes)

    def restore_copies(
        self, names: Sequence[str], block_sizes: Sequence[int], index: int, record: Any
    ) -> tuple[Extent, ...]:
        """The same where they were, by a manifest's record of number `index`."""
        assert self._swap is not None
        return self._swap.restore_copies(names, block_sizes, index, record)

    def add_memory(self, region: Region) -> None:
        """Memory through which arrays pass again and again, for as long as there are any on disk."""
        if self._swap is not None:
            self._swap.add_memory(region)

    def launch_read(
        self,
        extent: Extent,
        rows: slice,
        address: int,
        urgency: Urgency = Urgency.NORMAL,
    ) -> Transfer:
        assert self._swap is not None
        nbytes = int(extent.blocks[rows]["nbytes"].sum())
        self.counters.read(Tier.NVME, nbytes)
        transfer = self._swap.read(extent, rows, address, urgency)
        if self.counters.spans.on:
            transfer.tell(partial(self.counters.spans.put, Lane.READ, extent.name, nbytes=nbytes))
        return transfer

    def launch_write(self, extent: Extent, rows: slice, address: int) -> Transfer:
        assert self._swap is not None
        nbytes = int(extent.blocks[rows]["nbytes"].sum())
        self.counters.written(Tier.NVME, nbytes)
        transfer = self._swap.write(extent, rows, address)
        if self.counters.spans.on:
            transfer.tell(partial(self.counters.spans.put, Lane.WRITE, extent.name, nbytes=nbytes))
        return transfer

    def read_array(self, extent: Extent, out: torch.Tensor) -> None:
        """Fill `out`, sector-aligned host memory, and wait."""
        self.launch_read(extent, ALL_ROWS, out.data_ptr(), Urgency.URGENT).wait()

    def write_array(self, extent: Extent, values: torch.Tensor) -> None:
        """Write `values`, sector-aligned host memory, and wait."""
        self.launch_write(extent, ALL_ROWS, values.data_ptr()).wait()

    def read_block(self, extent: Extent, row: int, dtype: torch.dtype, staging: Region) -> torch.Tensor:
        """One block, host, verified: a view of `staging`, valid until that is used again."""
        self.launch_read(extent, slice(row, row + 1), staging.address).wait()
        return staging.tensor(dtype, int(extent.blocks[row]["nbytes"]) // dtype.itemsize)
