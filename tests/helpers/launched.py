"""Programs as a launcher starts them, but forked from a server that has imported torch: a rank starts at once."""

from __future__ import annotations

import os
import runpy
import socket
import sys
from collections.abc import Mapping
from pathlib import Path

import torch

from tests.helpers.trainer import fork_server

DEADLINE_S = 600


def free_port() -> str:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return str(found.getsockname()[1])


def launched(rank: int, size: int, port: str) -> dict[str, str]:
    """The variables that torchrun sets."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return dict(zip(names, (str(rank), str(rank), str(size), str(size), "127.0.0.1", port), strict=True))


def run_program(program: Path | str, *arguments: object, folder: Path, num_ranks: int | None = None) -> str:
    """Run a script by its path, or a module by its name; returns what it printed, rank after rank.

    With `num_ranks` there are so many processes in torchrun's environment. `folder` gets what they print. Raises
    AssertionError where one fails or hangs.
    """
    port, processes, printed = free_port(), [], []
    for rank in range(num_ranks or 1):
        environment = launched(rank, num_ranks, port) if num_ranks else {}
        printed.append([folder / f"{kind}{rank}.txt" for kind in ("out", "err")])
        argv = [str(program), *map(str, arguments)]
        processes.append(fork_server().Process(target=_run, args=(program, argv, environment, *printed[-1])))
        processes[-1].start()
    try:
        for process, (_, errors) in zip(processes, printed, strict=True):
            process.join(DEADLINE_S)
            assert process.exitcode == 0, f"ended with {process.exitcode}\n{errors.read_text()}"
    finally:
        for process in processes:
            process.kill()
            process.join()
    return "".join(out.read_text() for out, _ in printed)


def _run(program: Path | str, argv: list[str], environment: Mapping[str, str], out: Path, errors: Path) -> None:
    for number, path in enumerate((out, errors), 1):
        with path.open("w") as file:
            os.dup2(file.fileno(), number)
    os.environ.update(environment)
    torch.set_num_threads(1)
    sys.argv = argv
    if isinstance(program, Path):
        runpy.run_path(str(program), run_name="__main__")
    else:
        runpy.run_module(program, run_name="__main__", alter_sys=True)
