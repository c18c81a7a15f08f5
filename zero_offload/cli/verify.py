"""`zero-offload verify RUN`: reads every block of a run's generations or of a checkpoint, and says what is damaged; and
what a folder of a model lacks.

Owns what counts as bad: any damage in what a resume would take, or in the generation asked for. Blocks of an older
generation that later steps have written over are not damage. Changes nothing, needs no model. Beside a run that is
alive only the newest generation is read, or the one asked for; see [Note: reading beside a run].
"""

from __future__ import annotations

import argparse
import contextlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from zero_offload.base.alike import name_ranks
from zero_offload.base.errors import ConfigError, IntegrityError
from zero_offload.base.types import format_bytes, user_path
from zero_offload.checkpoint.format import Generation, History
from zero_offload.checkpoint.saved_generation import (
    Reading,
    SavedGeneration,
    is_immutable,
    other_directories,
    read_directories,
)
from zero_offload.checkpoint.verify import Verdict, verify
from zero_offload.integrations.folder_check import FolderVerdict, check_folder, is_model_folder
from zero_offload.runs.locate import alone, find_home
from zero_offload.storage.files.directory import RunDirectory
from zero_offload.storage.files.engines import open_engine


def run(args: argparse.Namespace) -> int:
    path = user_path(args.run_dir)
    is_folder = args.generation is None and is_model_folder(path)
    try:
        home = find_home(path)
    except ConfigError:
        if not is_folder:
            raise
        return _tell(args, {"directory": str(path.absolute())}, [], check_folder(path))
    with contextlib.ExitStack() as cleanup:
        locks = not is_immutable(home)
        [directory] = read_directories([home], alone(), cleanup, locks=locks)
        reading = Reading(home, args.generation)
        while True:
            history = History.read(directory)
            if args.generation is None:
                chosen = list(history.generations.values())[: 1 if directory.user else None]
                damaged = {name: str(error) for name, error in history.damaged.items()}
            else:
                one = history.choose(args.generation)
                chosen, damaged = [one] if one is not None else [], {}
            verdicts = [_verify(generation, directory, locks=locks) for generation in chosen]
            if not any(not verdict.is_whole and reading.goes_on(directory, verdict.generation) for verdict in verdicts):
                break
        user = directory.user
    facts = {
        "directory": str(home),
        "in_use": user,
        "generations": [_as_json(verdict, history) for verdict in verdicts],
        "damaged_manifests": damaged,
    }
    of_folder = _tell(args, facts, _lines(home, user, verdicts, damaged), check_folder(path) if is_folder else None)
    # A generation that is older than the first may have been written over, rightly.
    of_run = max([verdict.exit_code for verdict in verdicts[:1]], default=0)
    return IntegrityError.exit_code if damaged else of_run or of_folder


def _tell(args: argparse.Namespace, facts: dict[str, Any], lines: Iterable[str], folder: FolderVerdict | None) -> int:
    """Print what was found; the exit code of the model that from_pretrained would load here."""
    if args.json:
        print(json.dumps(facts | ({} if folder is None else {"model": asdict(folder)}), indent=2))
    else:
        print("\n".join([*lines, *([] if folder is None else _folder_lines(user_path(args.run_dir), folder))]))
    return IntegrityError.exit_code if folder is not None and folder.problems else 0


def _folder_lines(path: Path, folder: FolderVerdict) -> Iterator[str]:
    result = "INCOMPLETE" if folder.problems else "complete"
    yield f"{path}: a model of {folder.num_tensors} tensors, {format_bytes(folder.nbytes)}: {result}"
    yield from (f"  {problem}" for problem in folder.problems)
    yield from (f"  note: {note}" for note in folder.notes)


def _verify(generation: Generation, home: RunDirectory, *, locks: bool) -> Verdict:
    with contextlib.ExitStack() as files:
        try:
            others = read_directories(other_directories(generation, home.path), alone(), files, locks=locks)
            engine = open_engine(num_drives=1 + len(others))
            files.callback(engine.close)
            saved = SavedGeneration(generation, [home, *others], engine)
        except IntegrityError as error:
            return Verdict(generation, problems=[error])
        files.callback(saved.close)
        return verify(saved, saved.ranks_here)


def _as_json(verdict: Verdict, history: History) -> dict[str, Any]:
    generation = verdict.generation
    return {
        "number": generation.number,
        "step": generation.step,
        "committed_at": generation.committed_at,
        "ranks": generation.world_size,
        "ranks_here": verdict.ranks,
        "newest": generation is history.newest,
        "whole": verdict.is_whole,
        "blocks": verdict.num_blocks,
        "verified_bytes": verdict.verified_bytes,
        "problems": [str(error) for error in verdict.problems],
        "bad_blocks": [asdict(block) for block in verdict.bad_blocks],
    }


_WRITTEN_OVER = "no longer whole: later steps wrote over it, or, if the run had ended, it is damaged"


def _lines(home: Path, user: str, verdicts: list[Verdict], damaged: dict[str, str]) -> Iterator[str]:
    yield f"{home}:"
    if user:
        yield f"  in use by {user}: the run is alive, and the generation before its newest is being written over"
    for problem in damaged.values():
        yield f"  BAD manifest: {problem}"
    for place, verdict in enumerate(verdicts):
        result = "whole" if verdict.is_whole else "BAD" if place == 0 else _WRITTEN_OVER
        count = f"{verdict.generation.world_size} rank{'s' * (verdict.generation.world_size > 1)}"
        if verdict.generation.homes:
            count += f", of which {name_ranks(verdict.ranks)} here"
        yield f"  {verdict.generation}, {count}: {format_bytes(verdict.verified_bytes)} verified, {result}"
        if place > 0 and verdict.bad_blocks:
            yield f"    {len(verdict.bad_blocks)} of {verdict.num_blocks} blocks are not its own any more"
            continue
        for error in verdict.problems:
            yield f"    {error}"
        for block in verdict.bad_blocks:
            where = f"{format_bytes(block.nbytes)} at offset {block.offset} of {block.file}"
            yield f"    {where}: rank {block.rank}, section {block.section}, {block.component} of {_few(block.params)}"
            yield f"      {block.problem}"


def _few(names: tuple[str, ...]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return (", ".join(names[:3]) + more) if names else "padding"
