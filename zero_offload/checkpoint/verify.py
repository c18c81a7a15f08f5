"""Reads every block of a generation and compares it with its checksum.

Owns what is said of a block that is not what was written. Several reads are in flight, in memory of a few blocks,
whatever the generation's size. Changes nothing; never decides what a bad block means. The calls: `verify`, then read
the `Verdict`; `require_whole` where a caller cannot go on otherwise.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from zero_offload.base.errors import IntegrityError, ZeroOffloadError
from zero_offload.checkpoint.base_record import files_of
from zero_offload.checkpoint.format import Generation
from zero_offload.checkpoint.saved_generation import RankFiles, SavedGeneration
from zero_offload.storage.files.base_file import BLOCK_BYTES, BaseSpan, Stretch, missing_text
from zero_offload.storage.files.base_files import BaseFiles
from zero_offload.storage.files.swap_file import Transfer
from zero_offload.storage.memory.arena import Arena
from zero_offload.storage.shards.shard import Component

READS_IN_FLIGHT = 8

T = TypeVar("T")


@dataclass(frozen=True)
class BadBlock:
    """A block that cannot be read, or is not what was written."""

    rank: int
    file: str
    offset: int
    nbytes: int
    section: int
    component: str
    params: tuple[str, ...]
    """Parameters that lie in it, wholly or in part."""
    problem: str


@dataclass
class Verdict:
    """The findings about one generation."""

    generation: Generation
    ranks: list[int] = field(default_factory=list)
    """The ranks whose blocks were read."""
    num_blocks: int = 0
    verified_bytes: int = 0
    bad_blocks: list[BadBlock] = field(default_factory=list)
    problems: list[ZeroOffloadError] = field(default_factory=list)
    """Manifests and files that could not be opened; their blocks were not read."""
    errors: list[ZeroOffloadError] = field(default_factory=list)
    """The error of each bad block."""

    @property
    def is_whole(self) -> bool:
        return not self.bad_blocks and not self.problems

    @property
    def exit_code(self) -> int:
        """The exit code of a command that found this: damage goes before a drive that does not answer."""
        codes = {error.exit_code for error in (*self.problems, *self.errors)}
        return IntegrityError.exit_code if IntegrityError.exit_code in codes else max(codes, default=0)


def verify(saved: SavedGeneration, ranks: Iterable[int]) -> Verdict:
    """Read all blocks of these ranks."""
    verdict = Verdict(saved.generation)
    verdict.ranks = list(ranks)
    for rank in verdict.ranks:
        try:
            files = saved.rank(rank)
        except ZeroOffloadError as error:
            verdict.problems.append(error)
            continue
        _verify_rank(saved, rank, files, verdict)
        if rank == saved.ranks_here[0]:
            _verify_base(saved, verdict)
    return verdict


def require_whole(verdict: Verdict) -> None:
    """Raise IntegrityError unless every block is what was written."""
    if verdict.is_whole:
        return
    first = verdict.problems[0] if verdict.problems else verdict.errors[0]
    blocks = f"{len(verdict.bad_blocks)} of {verdict.num_blocks} blocks are not what it wrote, " * bool(verdict.errors)
    raise IntegrityError(
        f"{verdict.generation} is no longer whole: {blocks}the first trouble: {first}. Later steps may have written "
        "over it. Nothing was changed; load a checkpoint, or start over with existing='discard'"
    )


def _verify_rank(saved: SavedGeneration, rank: int, files: RankFiles, verdict: Verdict) -> None:
    largest = max((int(extent.blocks["nbytes"].max()) for extent in files.extents.values()), default=0)
    if largest == 0:
        return  # all of it rests in a base
    blocks = [(key, row) for key, extent in files.extents.items() for row in range(len(extent.blocks))]

    def launch(block: tuple[tuple[int, Component], int], address: int) -> tuple[Transfer, int]:
        extent, row = files.extents[block[0]], block[1]
        return files.swap.launch_read(extent, slice(row, row + 1), address), int(extent.blocks[row]["nbytes"])

    _verify_blocks(blocks, largest, launch, partial(_bad_block, saved, rank, files), verdict)


def _verify_base(saved: SavedGeneration, verdict: Verdict) -> None:
    """Read every block of the base that has a checksum."""
    with contextlib.closing(BaseFiles()) as base:
        try:
            places = saved.base_places(base)
        except ZeroOffloadError as error:
            verdict.problems.append(error)
            return
        files = files_of(places)
        if lost := [file for file in files if not file.is_open]:
            verdict.problems.append(IntegrityError(missing_text(lost)))
        known = ((file, int(block)) for file in files if file.is_open for block in file.known.nonzero()[0])
        spans = (BaseSpan(0, file.fds(block)[1], file, block * BLOCK_BYTES) for file, block in known)

        def launch(span: BaseSpan, address: int) -> tuple[Transfer, int]:
            return base.launch_read("base", [span], [Stretch(0, span.nbytes, address)]), span.nbytes

        _verify_blocks(spans, BLOCK_BYTES, launch, partial(_bad_base_block, saved, places), verdict)


def _verify_blocks(
    blocks: Iterable[T],
    nbytes_max: int,
    launch: Callable[[T, int], tuple[Transfer, int]],
    described: Callable[[T, Exception], BadBlock],
    verdict: Verdict,
) -> None:
    """Read blocks, some at once. `launch` reads a block to an address, and gives its bytes; `described` is of a block
    that cannot be read.
    """
    region = Arena(0).allocate(READS_IN_FLIGHT * nbytes_max)
    pending: deque[tuple[T, Transfer, int]] = deque()

    def finish() -> None:
        block, transfer, nbytes = pending.popleft()
        verdict.num_blocks += 1
        try:
            transfer.wait()
        except ZeroOffloadError as error:
            verdict.errors.append(error)
            verdict.bad_blocks.append(described(block, error))
        else:
            verdict.verified_bytes += nbytes

    try:
        for number, block in enumerate(blocks):
            if len(pending) == READS_IN_FLIGHT:
                finish()
            pending.append((block, *launch(block, region.address + number % READS_IN_FLIGHT * nbytes_max)))
    finally:
        # The memory must not go before the reads are done.
        while pending:
            finish()


def _bad_base_block(
    saved: SavedGeneration, places: Mapping[int, Iterable[BaseSpan]], bad: BaseSpan, error: Exception
) -> BadBlock:
    names, index = [], -1
    for place, spans in places.items():
        section = saved.sections[place]
        for span in spans:
            low = max(span.offset, bad.offset) - span.offset + span.begin
            high = min(span.offset + span.nbytes, bad.offset + bad.nbytes) - span.offset + span.begin
            if span.file is not bad.file or low >= high:
                continue
            index, itemsize = place, section.dtype.itemsize
            names += [p.spec.name for p in section.params if p.begin * itemsize < high and low < p.end * itemsize]
    params = tuple(dict.fromkeys(names))
    return BadBlock(0, str(bad.file.path), bad.offset, bad.nbytes, index, "base", params, str(error))


def _bad_block(
    saved: SavedGeneration, rank: int, files: RankFiles, block: tuple[tuple[int, Component], int], error: Exception
) -> BadBlock:
    key, row = block
    (index, component), extent, section = key, files.extents[key], files.sections[key[0]]
    low, high = section.chunks()[row]
    offset = rank % section.num_shards * section.shard_numel
    begin, end = offset + low, offset + high
    return BadBlock(
        rank=rank,
        file=str(saved.directories[int(extent.directories[row])].path / files.swap.name),
        offset=int(extent.blocks[row]["offset"]),
        nbytes=int(extent.blocks[row]["nbytes"]),
        section=index,
        component=component,
        params=tuple(piece.spec.name for piece in section.params if piece.begin < end and begin < piece.end),
        problem=str(error),
    )
