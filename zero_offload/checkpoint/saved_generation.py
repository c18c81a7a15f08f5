"""A generation opened for reading: any rank's blocks, from any number of directories.

Owns what can be known from the manifests alone: the sections (from the fingerprint), the places of every rank's blocks,
and their files. No model is needed. A model loads a generation on any number of ranks and with any placement, since
every array is addressed by element of its section. Reads what it is asked for, every block verified, and changes
nothing. The calls: `SavedGeneration.read_for` a model, or `read_generation` and the constructor; `rank`, `read`,
`source`, `close`.
"""

from __future__ import annotations

import contextlib
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from zero_offload.base.errors import CheckpointError, IntegrityError, LockError, ZeroOffloadError
from zero_offload.base.host import host_empty, host_reserved, host_zeros
from zero_offload.base.problems import warn_user
from zero_offload.checkpoint.base_record import base_sections, files_of, open_base
from zero_offload.checkpoint.format import (
    BASE,
    CHECKPOINT_KIND,
    RUN_NAME,
    Generation,
    History,
    check_fingerprint,
    check_found_by_name,
    lies_elsewhere,
    reading,
    sections_of,
    swap_file_name,
    tell_conversion,
)
from zero_offload.checkpoint.generation import read_rank_manifest
from zero_offload.checkpoint.homes import Homes
from zero_offload.checkpoint.pieces import Piece, PieceExchange
from zero_offload.checkpoint.values import master_of, master_parts
from zero_offload.plan.layout import CHUNK_NUMEL, SectionLayout, ShardLayout
from zero_offload.runtime.ranks.collectives import CommitGroup
from zero_offload.storage.files.base_file import BaseSpan, missing_text
from zero_offload.storage.files.base_files import BaseFiles
from zero_offload.storage.files.directory import LOCK_NAME, RunDirectory, hold_directory
from zero_offload.storage.files.engine import FileEngine
from zero_offload.storage.files.engines import open_engine
from zero_offload.storage.files.manifest import read_manifest
from zero_offload.storage.files.swap_file import Extent, SwapFile
from zero_offload.storage.memory.arena import Arena, Region
from zero_offload.storage.shards.rows import Row, Rows, lay, read_directory, room
from zero_offload.storage.shards.shard import (
    Component,
    array_range,
    block_sizes,
    component_dtype,
    decode_array,
    encode_array,
    in_order,
    is_state,
    master_components,
    shard_bytes,
)
from zero_offload.storage.shards.store import ChunkSource

T = TypeVar("T")
_TRIES_MIN, _AGAIN_S = 3, 20.0
"""So often, and so long, is another generation read where the one before was written over."""
_BLOCK_BYTES_MAX = CHUNK_NUMEL * 8  # no dtype that is laid out is wider; rows of states may have more


def is_immutable(path: Path) -> bool:
    """True if `path` is a checkpoint's directory, and no run's."""
    with RunDirectory.look(path) as directory:
        return (read_manifest(directory, RUN_NAME) or {}).get("kind") == CHECKPOINT_KIND


def take_directories(paths: Sequence[Path], homes: Homes, cleanup: contextlib.ExitStack) -> list[RunDirectory]:
    """Open existing directories whose files may be deleted; no run may have them: LockError. Collective."""
    return open_in_turn(paths, homes.ranks, cleanup, hold_directory, _join, is_first=homes.is_first)


def read_directories(
    paths: Sequence[Path], ranks: CommitGroup, cleanup: contextlib.ExitStack, *, locks: bool
) -> list[RunDirectory]:
    """Open existing directories to read. With `locks`, no run begins there meanwhile; see `Reading`. Collective."""
    first, then = (RunDirectory.read, RunDirectory.read_along) if locks else (RunDirectory.look, RunDirectory.look)
    return open_in_turn(paths, ranks, cleanup, first, then, is_first=ranks.rank == 0)


class Reading:
    """Reads of a directory's generations, of which each is repeated if a run has written over it meanwhile.

    [Note: reading beside a run]
    A run that is alive keeps its lock, and a reader goes without. The slots of its newest generation stay as they are
    until the next one is committed; then updates write over them. Every block is verified, and so are the manifests,
    so what was written over is noticed, and never taken for values. If the directory has a newer generation by then,
    nothing is damaged: that one is read instead.
    """

    def __init__(self, where: Path, number: int | None) -> None:
        """`number`: the generation that was asked for by its number."""
        self._where, self._number = where, number
        self._tries, self._began_s = 0, time.monotonic()

    def goes_on(self, home: RunDirectory, generation: Generation) -> bool:
        """True if what could not be read was written over, and another generation is to be read. Rank 0 asks.

        Raises LockError where there is none, or where generations are written over faster than they are read.
        """
        if not home.user:
            return False
        newest = History.read(home).newest
        if newest is not None and (newest.run_id, newest.number) == (generation.run_id, generation.number):
            return False
        self._tries += 1
        if self._number is None and (self._tries < _TRIES_MIN or time.monotonic() < self._began_s + _AGAIN_S):
            return True
        many = "" if self._tries == 1 else f", as were {self._tries - 1} before it"
        raise LockError(
            f"{self._where} is in use by {home.user}: the run is alive, and wrote over {generation} while it was "
            f"read{many}. Nothing is known to be damaged. Wait for that run to end, or stop it; or let it call "
            "zo.save_checkpoint, and read that"
        )


def read_generation(
    path: Path,
    ranks: CommitGroup,
    number: int | None,
    use: Callable[[Generation, list[RunDirectory], contextlib.ExitStack], T],
) -> T:
    """The result of `use` for a generation, with its directories open; again for the next one, as `Reading` says.

    Collective. Files on the stack are closed before the directories.
    """
    reading_on = Reading(path, number)
    while True:
        with contextlib.ExitStack() as cleanup:
            generation, directories = open_generation(path, ranks, cleanup, number)
            try:
                return use(generation, directories, cleanup)
            except ZeroOffloadError:
                if not ranks.agree(directories[0].user):
                    raise
                goes_on = False
                with ranks.together():
                    if ranks.rank == 0:
                        goes_on = reading_on.goes_on(directories[0], generation)
                if not ranks.agree("again" * goes_on):
                    raise


def open_in_turn(
    paths: Sequence[Path],
    ranks: CommitGroup,
    cleanup: contextlib.ExitStack,
    first: Callable[[Path], RunDirectory],
    then: Callable[[Path], RunDirectory],
    *,
    is_first: bool,
) -> list[RunDirectory]:
    """The first rank opens directories by `first`, and once it has them the others do by `then`. Collective."""
    opened: list[RunDirectory] = []
    for is_turn, take in ((is_first, first), (not is_first, then)):
        with ranks.together():
            for path in paths if is_turn else ():
                opened.append(take(path))
                cleanup.callback(opened[-1].close)
    return opened


def _join(path: Path) -> RunDirectory:
    return RunDirectory.join(path) if (path / LOCK_NAME).is_file() else RunDirectory.look(path)


def open_generation(
    path: Path, ranks: CommitGroup, cleanup: contextlib.ExitStack, number: int | None = None
) -> tuple[Generation, list[RunDirectory]]:
    """The newest generation of a checkpoint's or a run's directory, or the one of this number. Collective."""
    with ranks.together():
        locks = not is_immutable(path)
    directories = read_directories([path], ranks, cleanup, locks=locks)
    with ranks.together():
        found = History.read(directories[0]).choose(number)
        if found is None:
            raise CheckpointError(
                f"{path} is not a checkpoint: it holds no generation. Name a directory that zo.save_checkpoint has "
                "written, or the NVMe directory of a run"
            )
        others = other_directories(found, path)
    return found, directories + read_directories(others, ranks, cleanup, locks=locks)


def other_directories(generation: Generation, home: Path) -> list[Path]:
    """Where the rest of a striped generation is, as it recorded it."""
    first, *rest = generation.directories or [""]
    paths = [Path(path) for path in rest]
    if rest and not (Path(first).is_dir() and home.samefile(first)):
        # Of a copy, the recorded directories are those of its original.
        raise CheckpointError(
            f"{generation} is striped over {len(paths) + 1} directories, of which the first was {first}, not {home}. "
            "Move or mount them to where they were, or resume it with all of them in nvme="
        )
    if missing := [str(path) for path in paths if not path.is_dir()]:
        raise CheckpointError(
            f"{generation} is striped over {len(paths) + 1} directories, of which {', '.join(missing)} cannot be "
            "found; mount or move them to where they were"
        )
    return paths


@dataclass(frozen=True)
class RankFiles:
    """One rank's shards in a generation."""

    swap: SwapFile
    sections: tuple[SectionLayout, ...]
    """The sections as this rank holds them."""
    extents: dict[tuple[int, Component], Extent]
    """Extents by section and component."""


class SavedRows(NamedTuple):
    """The rows of one shard in a generation."""

    component: Component
    directory: Mapping[int, Row]
    """By the parameter's first element in the section."""
    read: Callable[[int, int], torch.Tensor]
    """Bytes from one to another, (n,) uint8, host."""


class SavedGeneration:
    """The blocks of one generation."""

    def __init__(
        self,
        generation: Generation,
        directories: Sequence[RunDirectory],
        engine: FileEngine,
        on_error: Callable[[Exception], None] = lambda _: None,
        column: range | None = None,
        exchange: PieceExchange | None = None,
    ) -> None:
        """`directories` in the order in which the generation is striped over them. The ranks in `column` wrote the part
        of the model that is read, the first of them shard 0. `exchange` has what is on other machines."""
        self.generation = generation
        self._column = range(generation.num_shards) if column is None else column
        self._exchange = exchange
        self._ranks_here: list[int] | None = None
        self._told: dict[int, Any] = {}
        """Of ranks whose files are on other machines, what a reader of their manifests needs."""
        self._brought: dict[Piece, torch.Tensor] = {}
        self.directories = tuple(directories)
        self.sections = sections_of(generation)
        self._engine = engine
        self._on_error = on_error
        self._payloads: dict[int, dict[str, Any]] = {}
        self._ranks: dict[int, RankFiles] = {}
        self._staging: Region | None = None
        self._in_base = base_sections(generation)
        self._names: dict[str, tuple[int, int]] = {}
        """Where parameters are: section, and element of it. Empty where they are where the model has them."""
        self._base = BaseFiles()
        self._last_rows: tuple[int, Rows | None] = -1, None
        """The rows that were read last, by the section of the model."""

    @classmethod
    def read_for(cls, path: Path, layout: ShardLayout, ranks: CommitGroup, use: Callable[[SavedGeneration], T]) -> T:
        """Check that `path` belongs to this model, and open its files; what `use` returns. Collective.

        Beside a run that is alive `use` may be called again; see [Note: reading beside a run].
        """
        with ranks.together():
            if not path.is_dir():
                raise CheckpointError(f"{path} is not a directory; name one that zo.save_checkpoint has written")

        def read(generation: Generation, directories: list[RunDirectory], cleanup: contextlib.ExitStack) -> T:
            with ranks.together():
                with reading(str(path)):
                    if lies_elsewhere(generation, layout):
                        check_found_by_name(generation, layout, str(path))
                    else:
                        check_fingerprint(generation.payload.get("params"), layout, str(path), thaws=True)
                engine = open_engine(num_drives=len(directories))
                cleanup.callback(engine.close)
                saved = cls(generation, directories, engine, column=ranks.column_of(generation.world_size))
                saved.look_in(layout)
                cleanup.callback(saved.close)
            cleanup.callback(engine.close)  # before its files
            result = use(saved)
            if user := directories[0].user:
                warn_user(f"{path} is in use by {user}: the run is alive; {generation} was read beside it")
            return result

        return read_generation(path, ranks, None, read)

    def look_in(self, layout: ShardLayout) -> None:
        """Let `source` and `states` find parameters by name, where the layout has them in other places."""
        if lies_elsewhere(self.generation, layout):
            self._names = {p.spec.name: (section.index, p.begin) for section in self.sections for p in section.params}

    @property
    def lies_elsewhere(self) -> bool:
        return bool(self._names)

    def payload(self, rank: int) -> dict[str, Any]:
        """A rank's manifest. Raises IntegrityError."""
        if rank not in self._payloads and rank in self._told:
            self._payloads[rank] = self._told[rank]
        if rank not in self._payloads:
            payload = read_rank_manifest(self.directories[0], self.generation, rank)
            listed = payload.get("sections")
            if not isinstance(listed, list) or len(listed) != len(self.sections):
                raise IntegrityError(f"rank {rank}'s manifest in {self.directories[0].path} lists other sections")
            self._payloads[rank] = payload
        return self._payloads[rank]

    @property
    def ranks_here(self) -> list[int]:
        """All ranks, unless the generation is on drives of several machines."""
        # Not a cached_property: Python 3.11 holds a lock for all instances while it reads the directory.
        if self._ranks_here is None:
            if self._exchange is not None:
                ranks = range(self.generation.world_size)
                self._ranks_here = [rank for rank in ranks if self._exchange.is_here(rank)]
            else:
                self._ranks_here = self.generation.ranks_in(self.directories[0].names())
        return self._ranks_here

    def has(self, rank: int) -> bool:
        """True if a rank's files are here, or on a machine that this one hears from."""
        return rank in self.ranks_here or rank in self._told

    def tell(self, ranks: Sequence[int]) -> dict[int, Any]:
        """The words of the manifests of these ranks that other machines need: JSON values."""
        return {rank: self._summary(rank) for rank in ranks}

    def hear(self, told: Iterable[Mapping[int, Any]]) -> None:
        """Take over the words of all machines."""
        words = {rank: word for each in told for rank, word in each.items()}
        self._told = {rank: word for rank, word in words.items() if rank not in self.ranks_here}

    def _summary(self, rank: int) -> dict[str, Any]:
        payload = self.payload(rank)
        with reading(str(self.directories[0].path)):
            sections = [
                {"shard_numel": each["shard_numel"], "components": dict.fromkeys(each["components"])}
                for each in payload["sections"]
            ]
        return {"sections": sections, "rng": payload.get("rng"), BASE: payload.get(BASE)}

    def exchanging(self) -> AbstractContextManager[None]:
        """Inside, `source` reads what is on other machines, too. Collective, with each call of a source."""
        return nullcontext() if self._exchange is None else self._exchange.open(self._read_piece)

    def rank(self, rank: int) -> RankFiles:
        """A rank's files, opened with the first call. Raises IntegrityError when one is too short."""
        if rank not in self._ranks:
            name = swap_file_name(rank, self.generation.edition)
            seed = zlib.crc32(self.generation.run_id.encode())
            sections = tuple(self._shard_of(section, rank) for section in self.sections)
            swap = SwapFile(self.directories, name, self._engine, seed, on_error=self._on_error)
            swap.open_existing()
            try:
                extents = {key: each for section in sections for key, each in self._extents(swap, section, rank)}
            except BaseException:
                swap.close()
                raise
            self._ranks[rank] = RankFiles(swap, sections, extents)
        return self._ranks[rank]

    def _shard_of(self, section: SectionLayout, rank: int) -> SectionLayout:
        if not section.params:
            return section  # the model had none of it any more
        entry = self.payload(rank)["sections"][section.index]
        numel = entry.get("shard_numel") if isinstance(entry, dict) else None
        if type(numel) is not int or not 0 < numel <= 2**48:
            raise IntegrityError(f"{self.directories[0].path}: section {section.index} has shard_numel {numel!r}")
        return replace(section, shard_numel=numel, num_shards=self.generation.num_shards)

    def _extents(
        self, swap: SwapFile, section: SectionLayout, rank: int
    ) -> Iterator[tuple[tuple[int, Component], Extent]]:
        entry = self.payload(rank)["sections"][section.index]
        for component in self.kept(section, rank):
            name = f"section {section.index} {component}.{entry.get('slot')}"
            record = entry["components"].get(component)
            (extent,) = swap.restore_copies([name], block_sizes(section, component), 0, record)
            yield (section.index, component), extent

    def kept(self, section: SectionLayout, rank: int) -> list[Component]:
        """The arrays of a section in a rank's files."""
        with reading(str(self.directories[0].path)):
            kept = set(map(Component, self.payload(rank)["sections"][section.index]["components"]))
        if section.index in self._in_base or not section.params:
            return []
        return [*in_order({*kept, *master_components(section)})]

    @property
    def _any_rank(self) -> int:
        """A rank of which something is known: all have the same arrays, cut at the same elements."""
        return next(filter(self.has, self._column), self._column[0])

    def _rank_of(self, shard: int) -> int:
        """A rank that has a shard: the first here, or else the first anywhere."""
        twins = self._column[shard :: self.generation.num_shards]
        near = next((rank for rank in twins if rank in self.ranks_here), None)
        return next(filter(self.has, twins), twins[0]) if near is None else near

    def states(self, layout: SectionLayout, shard_index: int) -> list[Component]:
        """The states of a shard of a model that optimizers keep."""
        names = [piece.spec.name for piece in layout.params if not piece.is_gone]
        indices = {self._names[name][0] for name in names} if self._names else {layout.index}
        rank = self._any_rank
        kept = (each for index in sorted(indices) for each in self.kept(self.sections[index], rank))
        named = dict.fromkeys(each for each in kept if is_state(each) and not each.is_rows)
        rows = self._rows_of(layout, shard_index)
        return [*named, *([Component.rows(room(rows.sizes()), len(layout.chunks()))] if rows is not None else [])]

    def _rows_of(self, layout: SectionLayout, shard_index: int) -> Rows | None:
        """The rows of a shard of a model: those of the parameters that its rank steps."""
        if self._last_rows[0] == layout.index:
            return self._last_rows[1]
        places = {
            piece.begin: self._names[piece.spec.name] if self._names else (layout.index, piece.begin)
            for piece in layout.params
            if not piece.is_gone and layout.steppers[piece.begin] == shard_index
        }
        found = dict[int, tuple[SavedRows, int]]()
        for index in sorted({index for index, _ in places.values()}):
            for saved in self._saved_rows(self.sections[index]):
                found |= {
                    begin: (saved, first)
                    for begin, (at, first) in places.items()
                    if at == index and first in saved.directory
                }
        rows = None
        if found:
            sizes = {
                begin: (saved.directory[first].nbytes, saved.directory[first].kind)
                for begin, (saved, first) in found.items()
            }
            rows = lay(host_reserved([room(sizes)], torch.uint8), sizes)
            for begin, (saved, first) in found.items():
                row = saved.directory[first]
                rows[begin].copy_(saved.read(row.begin, row.begin + row.nbytes))
        self._last_rows = layout.index, rows
        return rows

    def _saved_rows(self, section: SectionLayout) -> Iterator[SavedRows]:
        """The rows of a saved section, shard by shard."""
        found = (self.rows_of_rank(section, self._rank_of(shard)) for shard in range(self.generation.num_shards))
        return filter(None, found)

    def rows_of_rank(self, section: SectionLayout, rank: int) -> SavedRows | None:
        """The rows of a saved section that a rank has."""
        component = next((each for each in self.kept(section, rank) if each.is_rows), None)
        if component is None:
            return None
        read = partial(self._read_row_bytes, section, rank, component)
        nbytes = shard_bytes(self._shard_of(section, rank), [component])
        directory = read_directory(read, nbytes, f"section {section.index} of {self.generation}")
        return SavedRows(component, directory, read)

    def _read_row_bytes(
        self, section: SectionLayout, rank: int, component: Component, begin: int, end: int
    ) -> torch.Tensor:
        """Bytes [begin, end) of a rank's rows of a section, host."""
        out, size = host_reserved([end - begin], torch.uint8), component.chunk_bytes
        for number in range(begin // size, -(-end // size)):
            first = number * size
            low, high = max(first, begin), min(first + size, end)
            piece = Piece(rank, section.index, component, number, low - first, high - first)
            is_here = self._exchange is None or rank in self.ranks_here
            brought = {} if is_here or self._exchange is None else self._exchange.fetch([(piece, torch.uint8)])
            out[low - begin : high - begin] = self._read_piece(piece) if is_here else brought[piece]
        return out

    def _rows_chunk(
        self, layout: SectionLayout, shard_index: int, component: Component, begin: int, end: int
    ) -> torch.Tensor:
        """A chunk's part of the rows of a shard of a model, in an array of as much room as `component` has."""
        part, rows = array_range(layout, component, begin, end), self._rows_of(layout, shard_index)
        chunk = host_zeros(part.stop - part.start, torch.uint8)
        if rows is not None:
            mine = rows.array[part.start : part.stop]
            chunk[: mine.numel()].copy_(mine)
        return chunk

    def read(self, index: int, component: Component, begin: int, out: torch.Tensor) -> None:
        """Fill `out` with elements of a section from `begin` on; what was never saved becomes zero: padding, and states
        that no optimizer kept.

        `out` is (numel,) of the component's dtype, or fp32 for a state.
        """
        if index in self._in_base and component is Component.VALUE:
            first = begin * out.itemsize
            self._base.read(self._places[index], first, first + out.nbytes, out.data_ptr())
            return
        for low, high, piece in self._pieces(index, component, begin, begin + out.numel()):
            part = out[low - begin : high - begin]
            if piece is None:
                part.zero_()
            else:
                part.copy_(self._brought[piece] if piece in self._brought else self._read_piece(piece))

    def values(self, index: int, state: Component | None, begin: int, end: int) -> torch.Tensor:
        """(end - begin,) of masters of a section, or frozen values; or of a state, fp32. Host."""
        section = self.sections[index]

        def read(component: Component) -> torch.Tensor:
            dtype = torch.float32 if is_state(component) else component_dtype(section, component)
            out = host_reserved([end - begin], dtype)
            self.read(index, component, begin, out)
            return out

        return master_of(section, read) if state is None else read(state)

    def _pieces(
        self, index: int, component: Component, begin: int, end: int
    ) -> Iterator[tuple[int, int, Piece | None]]:
        """Where elements of a section are: from, to, and the piece that has them; None where they were never saved."""
        while begin < end:
            shard_numel = self._shard_of(self.sections[index], self._any_rank).shard_numel
            shard, offset = divmod(begin, shard_numel)
            if shard >= self.generation.num_shards:
                yield begin, end, None
                return
            rank, row = self._rank_of(shard), offset // CHUNK_NUMEL
            first = row * CHUNK_NUMEL
            until = min(end, begin - offset + min(first + CHUNK_NUMEL, shard_numel))
            piece = Piece(rank, index, component, row, offset - first, offset - first + until - begin)
            is_kept = component in self.kept(self.sections[index], rank)
            yield begin, until, piece if is_kept else None
            begin = until

    def _read_piece(self, piece: Piece) -> torch.Tensor:
        """(end - begin,) elements of a piece that is here, host; valid until the next is read."""
        files, component = self.rank(piece.rank), Component(piece.component)
        section = files.sections[piece.section]
        begin, end = section.chunks()[piece.row]
        dtype, extent = component_dtype(section, component), files.extents[piece.section, component]
        staging = self._block(int(extent.blocks[piece.row]["nbytes"]))
        array = files.swap.read_block(extent, piece.row, dtype, staging)
        values = decode_array(section, component, array, end - begin) if is_state(component) else array
        return values[piece.begin : piece.end]

    def _block(self, nbytes: int) -> Region:
        if self._staging is None or nbytes > self._staging.nbytes:
            self._staging = Arena(0).allocate(max(nbytes, _BLOCK_BYTES_MAX))
        return self._staging

    def source(self, layout: SectionLayout, shard_index: int) -> ChunkSource:
        """Feeds `ShardStore.write_components` with elements of the shard `shard_index` of a section."""
        offset = shard_index * layout.shard_numel

        def source(component: Component, begin: int, end: int) -> torch.Tensor:
            if component.is_rows:
                return self._rows_chunk(layout, shard_index, component, begin, end)
            if self._exchange is not None:
                self._fetch_pieces(self._exchange, layout, component, offset + begin, offset + end)
            values = self._elements(layout, component, offset + begin, offset + end)
            return encode_array(layout, component, values) if is_state(component) else values

        return source

    def _fetch_pieces(
        self, exchange: PieceExchange, layout: SectionLayout, component: Component, begin: int, end: int
    ) -> None:
        """Have what `_elements` reads of other machines, in the place of what was brought before."""
        wanted = dict[Piece, torch.dtype]()
        for saved, part, low, high in self._reads(layout, component, begin, end):
            dtype = torch.float32 if is_state(part) else component_dtype(saved, part)
            pieces = (piece for _, _, piece in self._pieces(saved.index, part, low, high) if piece is not None)
            wanted |= {piece: dtype for piece in pieces if piece.rank not in self.ranks_here}
        self._brought = {}
        self._brought = exchange.fetch(list(wanted.items()))

    def _reads(
        self, layout: SectionLayout, component: Component, begin: int, end: int
    ) -> Iterator[tuple[SectionLayout, Component, int, int]]:
        """The elements of saved sections that `_elements` reads."""
        for piece in layout.params if self._names else ():
            low, high = max(piece.begin, begin), min(piece.end, end)
            if low < high and not piece.is_gone:
                index, first = self._names[piece.spec.name]
                ahead = first - piece.begin
                for part in self._parts(layout, self.sections[index], component):
                    yield self.sections[index], part, low + ahead, high + ahead
        if not self._names:
            saved = self.sections[layout.index]
            for part in self._parts(layout, saved, component):
                yield saved, part, begin, end

    def _parts(self, layout: SectionLayout, saved: SectionLayout, component: Component) -> Sequence[Component]:
        """The saved components that one of a section is made of, as `_converted` does it."""
        if saved.index in self._in_base:
            return ()
        if not is_state(component) and layout.trainable:
            if not saved.trainable:
                return (Component.VALUE,)
            if Component.RESIDUAL in master_components(layout) and saved.state_format is not layout.state_format:
                return master_components(saved)
        return (component,)

    def _elements(self, layout: SectionLayout, component: Component, begin: int, end: int) -> torch.Tensor:
        """(end - begin,) elements of a section of a model, host; states in fp32."""
        if not self._names:
            return self._converted(layout, self.sections[layout.index], component, begin, end)
        dtype = torch.float32 if is_state(component) else component_dtype(layout, component)
        out = host_zeros(end - begin, dtype)
        for piece in layout.params:
            low, high = max(piece.begin, begin), min(piece.end, end)
            if low < high and not piece.is_gone:
                index, first = self._names[piece.spec.name]
                at, ahead = self.sections[index], first - piece.begin
                out[low - begin : high - begin] = self._converted(layout, at, component, low + ahead, high + ahead)
        return out

    def _converted(
        self, layout: SectionLayout, saved: SectionLayout, component: Component, begin: int, end: int
    ) -> torch.Tensor:
        """Elements of a saved section, as one of `layout` has them."""

        def read(component: Component, begin: int, end: int) -> torch.Tensor:
            dtype = torch.float32 if is_state(component) else component_dtype(saved, component)
            out = host_empty(end - begin, dtype)
            self.read(saved.index, component, begin, out)
            return out

        if is_state(component):
            return read(component, begin, end)
        if not saved.trainable and layout.trainable:  # it has thawed since: its value is the master
            return master_parts(layout, read(Component.VALUE, begin, end).float())[component]
        if Component.RESIDUAL not in master_components(layout) or saved.state_format is layout.state_format:
            return read(component, begin, end)
        # The same master with a residual of another dtype.
        return master_parts(layout, master_of(saved, lambda each: read(each, begin, end)))[component]

    def tell_conversion(self, layout: ShardLayout) -> None:
        """Say so, if states do not rest as they did."""
        tell_conversion(self.generation, layout)

    def rng_of(self, rank: int) -> dict[str, Any] | None:
        """A rank's random number generators; None where its files are nowhere."""
        if not self.has(rank):
            return None
        rng: dict[str, Any] | None = self.payload(rank).get("rng")
        return rng

    def base_places(self, base: BaseFiles) -> dict[int, list[BaseSpan]]:
        """Where each section lies that rests in the base, which `base` opens; see `open_base`."""
        known = sorted({*self.ranks_here, *self._told})
        return open_base(base, self.generation, [self.payload(rank) for rank in known])

    @cached_property
    def _places(self) -> dict[int, list[BaseSpan]]:
        """The same, to be read here. Raises IntegrityError where a file is gone."""
        places = self.base_places(self._base)
        if missing := [file for file in files_of(places) if not file.is_open]:
            raise IntegrityError(missing_text(missing))
        return places

    def close(self) -> None:
        self._base.close()
        for files in self._ranks.values():
            files.swap.close()
        self._ranks.clear()
