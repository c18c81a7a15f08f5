"""The directories, engine, files and generations of one model, opened in the order that several ranks need.

Owns that order; what is opened is closed by the `ExitStack` it is given. The calls: `open`, and `create` once the store
has planned its extents.
"""

from __future__ import annotations

import contextlib
import json
import logging
import warnings
import zlib

from zero_offload.checkpoint.format import swap_file_name
from zero_offload.checkpoint.generation import GenerationKeeper, Ranks
from zero_offload.config import Durability, Existing, OffloadConfig
from zero_offload.errors import ConfigError
from zero_offload.memory.arena import Arena
from zero_offload.plan.layout import ShardLayout
from zero_offload.probe import file_system_problem
from zero_offload.shards.shard import component_dtype, components_of
from zero_offload.storage.directory import RunDirectory
from zero_offload.storage.engine import open_engine
from zero_offload.storage.swap_file import SwapFile
from zero_offload.storage.tuning import PROBE_BYTES, WORTH_BYTES, Scratch, Tuned, tune
from zero_offload.types import Tier

_log = logging.getLogger("zero_offload")


class RunFiles:
    """The directories, engine, swap file and generations of one model; all None without a directory."""

    def __init__(self) -> None:
        self.keeper: GenerationKeeper | None = None
        self.swap: SwapFile | None = None
        self.scratch: SwapFile | None = None
        """Activations: of no generation, and without a name."""

    @classmethod
    def open(
        cls,
        config: OffloadConfig,
        layout: ShardLayout,
        ranks: Ranks,
        cleanup: contextlib.ExitStack,
    ) -> RunFiles:
        files = cls()
        if not config.nvme_dirs:
            return files
        directories = _open_directories(config, ranks, cleanup)
        if ranks.rank == 0:
            _warn_of_file_systems(directories)
        durability = config.effective_durability
        keeper = GenerationKeeper(directories, layout, ranks, durability)
        if durability is not Durability.SCRATCH:
            with ranks.exchange.together():
                keeper.look(Existing(config.existing))
            keeper.run_id = ranks.exchange.agree(keeper.run_id)
            files.keeper = keeper
            with ranks.exchange.together():
                if keeper.found is None and ranks.rank == 0:
                    keeper.remove_old()
                    keeper.announce([swap_file_name(rank) for rank in range(ranks.world_size)])
        tuned = _tune(config, directories, _state_bytes(layout), ranks)
        engine = open_engine(tuned.settings, len(directories))
        keeper.weights = keeper.weights or tuned.weights
        seed = zlib.crc32(keeper.run_id.encode())
        # Files are closed after the engine, which waits: a forward without a backward, or an error, leaves transfers
        # under way, and the number of a closed descriptor soon stands for another file.
        if Tier.NVME in config.activation_fractions:
            files.scratch = SwapFile(directories, "activations", engine, seed, keeper.weights)
            cleanup.callback(files.scratch.close)
        files.swap = SwapFile(directories, swap_file_name(ranks.rank), engine, seed, keeper.weights)
        cleanup.callback(files.swap.close)
        cleanup.callback(engine.close)
        return files

    @property
    def found(self) -> object:
        return None if self.keeper is None else self.keeper.found

    def create(self, durability: Durability) -> None:
        """The store has planned its extents: make or open the files."""
        if self.swap is None:
            return
        if self.scratch is not None:
            self.scratch.create_scratch()
        if durability is Durability.SCRATCH:
            self.swap.create_scratch()
        elif self.found is not None:
            self.swap.open_existing()
        else:
            self.swap.create()


def _state_bytes(layout: ShardLayout) -> int:
    """Bytes of one rank's shards, with all that an update changes: about what a step writes at most."""
    return sum(
        section.shard_numel * sum(component_dtype(section, component).itemsize for component in components_of(section))
        for section in layout.sections
    )


def _tune(config: OffloadConfig, directories: list[RunDirectory], moved_bytes: int, ranks: Ranks) -> Tuned:
    """Measured by one rank while the others wait: all see the same drives."""
    with ranks.exchange.together():
        text = ""
        if ranks.rank == 0:
            region = Arena(0).allocate(PROBE_BYTES) if moved_bytes >= WORTH_BYTES else None
            scratch = None if region is None else Scratch(region.address, region.nbytes)
            text = tune(config.io_engine, directories, moved_bytes, scratch).to_json()
    tuned = Tuned.from_json(ranks.exchange.agree(text))
    if ranks.rank == 0:
        _log.info("%s: %s; %s", directories[0].path, tuned.settings, tuned.settings.reason)
    return tuned


def _open_directories(config: OffloadConfig, ranks: Ranks, cleanup: contextlib.ExitStack) -> list[RunDirectory]:
    """Rank 0 takes the locks; the others join once it has them."""
    directories = []
    for is_turn, take in ((ranks.rank == 0, RunDirectory.open), (ranks.rank != 0, RunDirectory.join)):
        with ranks.exchange.together():
            for path in config.nvme_dirs if is_turn else ():
                directories.append(take(path))
                cleanup.callback(directories[-1].close)
    _check_same(directories, ranks)
    return directories


def _warn_of_file_systems(directories: list[RunDirectory]) -> None:
    """They are used all the same: checksums, locks and the order of commits are kept there too."""
    for directory in directories:
        if problem := file_system_problem(directory.path):
            warnings.warn(f"{directory.path}: {'; '.join(problem)}", stacklevel=4)


def _check_same(directories: list[RunDirectory], ranks: Ranks) -> None:
    """Raise on all ranks when one has joined another run, or other directories of this one."""
    mine = [directory.holder.decode(errors="replace") for directory in directories]
    first = json.loads(ranks.exchange.agree(json.dumps([[str(each.path) for each in directories], mine])))
    with ranks.exchange.together():
        if mine != first[1]:
            raise ConfigError(
                f"nvme={[str(each.path) for each in directories]} are not the directories of rank 0, which has "
                f"{first[0]}; give all ranks the same ones in the same order"
            )
