"""Every error this package raises on purpose, and the exit code a command line gives it.

Owns the names and the codes; never formats a message: the place that knows the numbers does that.
A message says what happened (with numbers), where (unit, rank, tier, path) and what to type.
"""

from __future__ import annotations


class ZeroOffloadError(Exception):
    """Base of all errors raised by zero_offload."""

    exit_code = 1


class ConfigError(ZeroOffloadError):
    """A setting, argument or call that cannot work. All problems found are listed at once."""

    exit_code = 2


class CapacityError(ZeroOffloadError):
    """This machine lacks the memory, disk space or facility that the plan needs."""

    exit_code = 3


class StorageError(ZeroOffloadError):
    """A file operation failed; the last commit is intact."""

    exit_code = 4


class CheckpointError(ZeroOffloadError):
    """A generation or checkpoint does not belong to this model, optimizer or world size."""

    exit_code = 2


class IntegrityError(ZeroOffloadError):
    """Bytes read back are not the bytes that were written."""

    exit_code = 5


class LockError(ZeroOffloadError):
    """Another run holds the directory."""

    exit_code = 6


class RankError(ZeroOffloadError):
    """Another rank died, failed or did not come; the message names it. Never the cause, always its consequence."""

    exit_code = 8


class NonFiniteError(ZeroOffloadError):
    """Gradients stayed NaN or infinite; training stops on the last good state."""

    exit_code = 7
