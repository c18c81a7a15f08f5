"""Small JSON documents that say what the data files hold, replaced atomically and verified when read.

Owns the envelope (magic, format version, digest) and the order of write, flush and rename. Never knows
what a payload means, and loading executes nothing. The calls in order: `write_manifest` returns the
payload's digest, which a manifest above may record; `read_manifest` gives the payload back, or None.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zero_offload.base.errors import CheckpointError, ConfigError, IntegrityError
from zero_offload.base.types import GIB, Durability, format_bytes
from zero_offload.storage.files.directory import RunDirectory
from zero_offload.storage.files.system import naming_errors

MAGIC = "zero_offload manifest"
VERSION = 7
"""Since 2 a directory keeps two generations; what reads 1 only must not take it for an empty one. Since 4 a generation
lacks the states that no optimizer keeps, and may have them in other formats than fp32. Since 7 frozen sections may rest
in a base, which a generation only names. There is no 3, 5 and 6: a flipped bit would make them an earlier one."""
READABLE = (1, 2, 4, VERSION)
SIZE_MAX_BYTES = GIB
_DIGEST, _HEAD_BYTES = re.compile(rb'"sha256":"([0-9a-f]{64})"'), 256


def write_manifest(directory: RunDirectory, name: str, payload: Mapping[str, Any], durability: Durability) -> str:
    """Replace manifest `name`; readers see the old one or the new one. Returns the digest.

    With `Durability.COMMIT` both survive power loss in that order; otherwise the page cache holds them.
    """
    path = directory.path_of(name)
    text = _encode(payload, path)
    digest = hashlib.sha256(text).hexdigest()
    head = f'{{"magic":"{MAGIC}","version":{VERSION},"sha256":"{digest}","payload":'
    document = head.encode() + text + b"}\n"
    if len(document) > SIZE_MAX_BYTES:
        raise ConfigError(
            f"{path} would take {format_bytes(len(document))}, the limit is {format_bytes(SIZE_MAX_BYTES)}; "
            "keep large values out of extra="
        )
    temporary = f"{name}.tmp"
    try:
        with naming_errors("write", path):
            _write_file(directory, temporary, document, durability)
            directory.system.replace(temporary, name, directory.dir_fd)
    except BaseException:
        with contextlib.suppress(OSError):
            directory.system.unlink(temporary, directory.dir_fd)
        raise
    if durability is Durability.COMMIT:
        directory.sync()
    return digest


def read_manifest(directory: RunDirectory, name: str, expected_digest: str | None = None) -> dict[str, Any] | None:
    """The payload of manifest `name`, verified; None where the file is missing."""
    path = directory.path_of(name)
    if name not in directory.names():
        return None
    document = _decode(_read_file(directory, name), path)
    if document.get("magic") != MAGIC:
        raise CheckpointError(f"{path} is not a zero_offload manifest; choose another directory with nvme=")
    version = document.get("version")
    if isinstance(version, int) and version > VERSION:
        raise CheckpointError(
            f"{path} was written by a newer zero_offload (format {version}, this one reads up to {VERSION}); "
            "type: pip install --upgrade zero_offload"
        )
    payload = document.get("payload")
    if version not in READABLE or not isinstance(payload, dict):
        raise _damaged(path, "its envelope is incomplete")
    digest = _digest(payload, path)
    if digest != document.get("sha256"):
        raise _damaged(path, f"its payload has digest {digest[:16]}, it records {document.get('sha256')!s:.16}")
    if expected_digest not in (None, digest):
        raise _damaged(path, f"it has digest {digest[:16]}, the commit names {expected_digest:.16}")
    return payload


def recorded_digest(directory: RunDirectory, name: str) -> str:
    """The digest that manifest `name` says it has, which nothing verifies here; empty where it says none."""
    try:
        head = _read_file(directory, name)[:_HEAD_BYTES]
    except IntegrityError:
        return ""
    found = _DIGEST.search(head)
    return "" if found is None else found[1].decode()


def _digest(payload: Mapping[str, Any], path: Path) -> str:
    try:
        return hashlib.sha256(_encode(payload, path)).hexdigest()
    except ConfigError as error:  # 1e400 parses, as infinity
        raise _damaged(path, str(error)) from error


def _damaged(path: Path, reason: str) -> IntegrityError:
    return IntegrityError(
        f"{path} is not what was written: {reason}; load a checkpoint, or start over with existing='discard'"
    )


def _encode(payload: Mapping[str, Any], path: Path) -> bytes:
    """The one spelling of a payload, so that its digest can be recomputed from the parsed value."""
    try:
        _check_keys(payload)
        text = json.dumps(payload, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"{path.name}: a value is not JSON: {error}; pass plain numbers, text, lists and dicts"
        ) from error
    return text.encode()


def _check_keys(value: object) -> None:
    # json turns other keys into text silently: what comes back is not what was given.
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if not isinstance(key, str):
                raise TypeError(f"the key {key!r} is not text")
            _check_keys(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            _check_keys(inner)


def _decode(raw: bytes, path: Path) -> dict[str, Any]:
    try:
        document = json.loads(raw, object_pairs_hook=_unique, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise _damaged(path, str(error)) from error
    if not isinstance(document, dict):
        raise _damaged(path, "it holds no object")
    return document


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a key occurs twice")
    return result


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is not a JSON number")


def _write_file(directory: RunDirectory, name: str, content: bytes, durability: Durability) -> None:
    # Made anew: what a crash has left under the name goes, and a planted link is not followed.
    with contextlib.suppress(FileNotFoundError):
        directory.system.unlink(name, directory.dir_fd)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = directory.system.open(name, flags, directory.dir_fd)
    try:
        directory.system.write_whole(fd, content)
        if durability is Durability.COMMIT:
            directory.system.fsync(fd)
    finally:
        directory.system.close(fd)


def _read_file(directory: RunDirectory, name: str) -> bytes:
    source = directory.open_file(name, direct=False)
    try:
        if source.nbytes > SIZE_MAX_BYTES:
            raise _damaged(source.path, f"{format_bytes(source.nbytes)} exceed {format_bytes(SIZE_MAX_BYTES)}")
        with naming_errors("read", source.path):
            return directory.system.read_whole(source.fd)
    finally:
        source.close()
