"""The `zero-offload` command: one parser, one module per subcommand, one place that turns errors into codes.

Never knows what a command does. parsers.py has the flags of each, and the module of its name `run(args) -> int`. That
module brings torch, which takes seconds, so it is imported when the arguments have been read.
"""

from __future__ import annotations

import argparse
import io
import os
import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import NoReturn

import zero_offload
from zero_offload.base.errors import StorageError, ZeroOffloadError
from zero_offload.base.problems import did_you_mean
from zero_offload.base.startup import interrupts_raise
from zero_offload.cli.flags import INTERRUPTED_EXIT_CODE
from zero_offload.cli.parsers import add_parsers

PIPE_CLOSED = 141  # 128 + SIGPIPE, as a shell reports it

_EPILOG = """exit codes: 0 ok, 2 configuration or usage, 3 environment or capacity, 4 storage, 5 integrity,
6 directory in use, 7 gradients not finite, 8 another rank failed, 130 interrupted, 141 output pipe closed"""


_OF_MODELS = ("--model", "--model-name-or-path", "--base-model", "--model-path", "--model-id")
_OF_A_FOLDER = ("finetune", "chat", "evaluate")
_RUNS = ("finetune", "train")
_GOES_ON = "; the same command goes on at the last commit, or begins if there is none"


class _Parser(argparse.ArgumentParser):
    """Says of a flag with a wrong value, or none, what it takes."""

    def error(self, message: str) -> NoReturn:
        found = re.match(r"argument (--[\w-]+).*: (expected|invalid)", message)
        action = self._option_string_actions.get(found[1]) if found else None
        if action is not None and action.help:
            takes = action.metavar if isinstance(action.metavar, str) else action.dest.upper()
            message += f"; {action.option_strings[-1]} {takes}: {action.help % vars(action)}"
        super().error(message)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    args, unknown = build_parser().parse_known_args(argv)
    if unknown:
        flags = re.findall(r"(?<![\w-])--[a-z][a-z-]*", args.parser.format_help())
        hint = did_you_mean(unknown[0], flags).strip()
        if unknown[0].partition("=")[0].replace("_", "-") in _OF_MODELS and args.command in _OF_A_FOLDER:
            hint = f"a model has no flag: zero-offload {args.command} FOLDER ..."
        if unknown[0].endswith(".toml") and args.command == "finetune":
            hint = f"settings are given by --config {unknown[0]}"
        args.parser.error(f"unrecognized arguments: {' '.join(unknown)}" + (f"; {hint}" if hint else ""))
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # not every terminal has every letter
    run = import_module(f"zero_offload.cli.{args.command}").run
    interrupts_raise()
    try:
        with _plain_warnings():
            code: int = run(args)
        sys.stdout.flush()
    except ZeroOffloadError as error:
        goes_on = isinstance(error, StorageError) and args.command in _RUNS
        print(f"error: {error}{_GOES_ON if goes_on else ''}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print(f"interrupted{_GOES_ON if args.command in _RUNS else ''}", file=sys.stderr)
        return INTERRUPTED_EXIT_CODE
    except BrokenPipeError:  # as of `report RUN | head`; what Python still flushes at its end goes nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE_CLOSED
    except OSError as error:  # a place that this user may not look at, wherever a command looks first
        if error.filename is None:
            raise
        print(f"error: {error.filename}: {error.strerror}; check its permissions, or name another", file=sys.stderr)
        return StorageError.exit_code
    return code


@contextmanager
def _plain_warnings() -> Iterator[None]:
    """A warning is one line: which line of which file led to it is of no use to who typed a command."""
    before = warnings.formatwarning
    warnings.formatwarning = lambda message, *_, **__: f"warning: {message}\n"
    try:
        yield
    finally:
        warnings.formatwarning = before


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands."""
    parser = _Parser(
        prog="zero-offload",
        description="Train models larger than the memory of this machine.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"zero_offload {zero_offload.__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    add_parsers(subparsers)
    for each in subparsers.choices.values():
        each.set_defaults(parser=each)
    return parser
