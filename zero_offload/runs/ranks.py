"""This process among the ranks of a run: who it is, and the few values that ranks tell each other beside training.

Never moves a tensor of the model. The calls: `joined_ranks()` around the whole run; its `Ranks` has the rest.
"""

from __future__ import annotations

import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from zero_offload.base.alike import name_ranks
from zero_offload.base.errors import ConfigError
from zero_offload.base.host import host_tensor
from zero_offload.runtime.ranks.join import join, launched_ranks
from zero_offload.runtime.ranks.watch import RankWatch


@dataclass(frozen=True)
class Ranks:
    """This process's place among the ranks."""

    rank: int
    size: int
    watch: RankWatch

    @property
    def is_first(self) -> bool:
        """True for the rank that prints and writes."""
        return self.rank == 0

    def mean(self, value: float) -> float:
        """The mean over all ranks; every rank calls it."""
        return self._sum(value) / self.size if self.size > 1 else value

    def any(self, wanted: object) -> bool:
        """True if one rank wants it; every rank calls this and gets the same answer."""
        return self._sum(float(bool(wanted))) > 0 if self.size > 1 else bool(wanted)

    def of_first(self, value: Any) -> Any:
        """The first rank's `value`; every rank calls it."""
        if self.size == 1:
            return value
        found = [value]
        with self.watch.waiting("what the first rank says to all"):
            dist.broadcast_object_list(found, src=0, device=torch.device("cpu"))
        return found[0]

    def wait(self) -> None:
        """Return once every rank has come here."""
        if self.size > 1:
            with self.watch.waiting("the start, at which all ranks meet"):
                dist.barrier()

    def check_shared(self, directory: Path) -> None:
        """Raise ConfigError on all ranks where one does not see what the first one writes into `directory`; every rank
        calls."""
        if self.size == 1:
            return
        mark = directory / self.of_first(f".seen-{secrets.token_hex(8)}")
        if self.is_first:
            mark.touch()
        try:
            self.wait()
            found = [("", False)] * self.size
            with self.watch.waiting("a look at the run's directory"):
                dist.all_gather_object(found, (socket.gethostname(), mark.exists()))
        finally:
            if self.is_first:
                mark.unlink(missing_ok=True)
        blind = [rank for rank, (_, sees) in enumerate(found) if not sees]
        if blind:
            hosts = ", ".join(dict.fromkeys(found[rank][0] for rank in blind))
            raise ConfigError(
                f"{directory} keeps the run, and what rank 0 on {found[0][0]} writes there is not seen by "
                f"{name_ranks(blind)} on {hosts}: give --out a directory that all machines see, such as one on NFS, by "
                "its whole path, and drives of each machine to --nvme"
            )

    def _sum(self, value: float) -> float:
        total = host_tensor(value, torch.float64)  # (): goes over gloo on every machine
        with self.watch.waiting("a sum of the training loop over all ranks"):
            dist.all_reduce(total)
        return total.item()


@contextmanager
def joined_ranks() -> Iterator[Ranks]:
    """Join the ranks that the launcher's environment names; without a launcher this process is alone.

    Whatever ends this rank, the others are told.
    """
    joins = join()
    rank, size = launched_ranks()
    ranks = Ranks(rank, size, RankWatch(range(size)))
    try:
        yield ranks
    except BaseException as error:
        ranks.watch.failed(error)
        raise
    finally:
        if joins:
            dist.destroy_process_group()
