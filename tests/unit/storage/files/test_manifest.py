from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from zero_offload.base.errors import CheckpointError, ConfigError, IntegrityError, StorageError
from zero_offload.base.types import Durability
from zero_offload.storage.files import manifest
from zero_offload.storage.files.directory import RunDirectory
from zero_offload.storage.files.manifest import read_manifest, write_manifest

PAYLOAD = {
    "step": 7,
    "files": ["rank-0.swap"],
    "loss": 0.1,
    "name": "é\ud800",
    "nested": {"b": [1, None, True]},
}
NAME = "generation.json"


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[RunDirectory]:
    with RunDirectory.open(tmp_path / "run") as opened:
        yield opened


@pytest.mark.parametrize("durability", list(Durability))
def test_round_trip(directory: RunDirectory, durability: Durability) -> None:
    digest = write_manifest(directory, NAME, PAYLOAD, durability)
    assert read_manifest(directory, NAME) == PAYLOAD
    assert read_manifest(directory, NAME, digest) == PAYLOAD
    assert directory.names() == [NAME]
    assert (directory.path / NAME).stat().st_mode & 0o777 == 0o600


def test_a_missing_manifest_is_none(directory: RunDirectory) -> None:
    assert read_manifest(directory, NAME) is None


def test_the_digest_is_the_payloads(directory: RunDirectory) -> None:
    first = write_manifest(directory, "a.json", {"x": 1, "y": 2}, Durability.PROCESS)
    assert first == write_manifest(directory, "b.json", {"y": 2, "x": 1}, Durability.COMMIT)
    assert first != write_manifest(directory, "c.json", {"x": 1, "y": 3}, Durability.PROCESS)
    assert json.loads((directory.path / "a.json").read_text())["sha256"] == first


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(payload=st.dictionaries(st.text(), json_values, max_size=4))
def test_every_json_value_survives(directory: RunDirectory, payload: dict[str, Any]) -> None:
    digest = write_manifest(directory, NAME, payload, Durability.PROCESS)
    assert read_manifest(directory, NAME, digest) == payload


@pytest.mark.parametrize("value", [float("nan"), float("inf"), {1, 2}, b"x", {1: "int key"}, {"1": 0, 1: 1}])
def test_what_is_not_json_is_refused_and_the_old_manifest_stays(directory: RunDirectory, value: Any) -> None:
    write_manifest(directory, NAME, {"step": 1}, Durability.PROCESS)
    with pytest.raises(ConfigError, match=r"generation\.json: a value is not JSON"):
        write_manifest(directory, NAME, {"extra": value}, Durability.PROCESS)
    assert read_manifest(directory, NAME) == {"step": 1}
    assert directory.names() == [NAME]


def document(**changes: Any) -> dict[str, Any]:
    envelope = {"magic": manifest.MAGIC, "version": manifest.VERSION, "sha256": "0" * 64, "payload": {"a": 1}}
    return envelope | changes


@pytest.mark.parametrize(
    ("text", "kind", "words"),
    [
        ("", IntegrityError, "is not what was written"),
        ("[1]", IntegrityError, "holds no object"),
        ("\xff", IntegrityError, "is not what was written"),
        ("[" * 100_000, IntegrityError, "is not what was written"),
        ('{"a": 1, "a": 2}', IntegrityError, "a key occurs twice"),
        ('{"a": NaN}', IntegrityError, "NaN is not a JSON number"),
        ('{"a": -Infinity}', IntegrityError, "-Infinity is not a JSON number"),
        ('{"a": ' + "9" * 5000 + "}", IntegrityError, "is not what was written"),
        ("{}", CheckpointError, "is not a zero_offload manifest"),
        (json.dumps(document(magic="other")), CheckpointError, "is not a zero_offload manifest"),
        (json.dumps(document(version=8)), CheckpointError, r"newer zero_offload \(format 8.*pip install"),
        (json.dumps(document(version="1")), IntegrityError, "envelope is incomplete"),
        (json.dumps(document(payload=[1])), IntegrityError, "envelope is incomplete"),
        (json.dumps(document()), IntegrityError, "it records 0000"),
        (json.dumps(document()).replace('{"a": 1}', '{"a": 1e400}'), IntegrityError, "value is not JSON"),
    ],
)
def test_damage_is_found(directory: RunDirectory, text: str, kind: type[Exception], words: str) -> None:
    (directory.path / NAME).write_bytes(text.encode("latin-1"))
    with pytest.raises(kind, match=words):
        read_manifest(directory, NAME)


def test_every_flipped_byte_and_every_truncation_is_found(directory: RunDirectory) -> None:
    digest = write_manifest(directory, NAME, {"step": 12, "files": ["f"]}, Durability.PROCESS)
    whole = (directory.path / NAME).read_bytes().rstrip(b"\n")
    for position in range(len(whole)):
        damaged = whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :]
        for content in (damaged, whole[:position]):
            (directory.path / NAME).write_bytes(content)
            with pytest.raises((IntegrityError, CheckpointError)):
                read_manifest(directory, NAME, digest)


def test_a_manifest_of_another_commit_is_found(directory: RunDirectory) -> None:
    write_manifest(directory, NAME, {"step": 1}, Durability.PROCESS)
    with pytest.raises(IntegrityError, match="the commit names ffff"):
        read_manifest(directory, NAME, "f" * 64)


def test_a_huge_file_is_not_read(directory: RunDirectory) -> None:
    with open(directory.path / NAME, "wb") as file:
        file.truncate(manifest.SIZE_MAX_BYTES + 1)
    with pytest.raises(IntegrityError, match="exceed 1 GiB"):
        read_manifest(directory, NAME)


def test_a_huge_payload_is_not_written(directory: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "SIZE_MAX_BYTES", 200)
    with pytest.raises(ConfigError, match="the limit is 200 B"):
        write_manifest(directory, NAME, {"x": "y" * 200}, Durability.PROCESS)
    assert directory.names() == []


def test_a_failed_write_keeps_the_old_manifest(directory: RunDirectory, monkeypatch: pytest.MonkeyPatch) -> None:
    write_manifest(directory, NAME, {"step": 1}, Durability.COMMIT)

    def broken(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    for call in ("fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(os, call, broken)
            with pytest.raises(StorageError, match=r"generation\.json: Input/output error"):
                write_manifest(directory, NAME, {"step": 2}, Durability.COMMIT)
        assert read_manifest(directory, NAME) == {"step": 1}
        assert directory.names() == [NAME]


@pytest.mark.parametrize(
    ("durability", "calls"),
    [
        (Durability.COMMIT, ["fsync", "replace", "fsync"]),
        (Durability.PROCESS, ["replace"]),
        (Durability.SCRATCH, ["replace"]),
    ],
)
def test_the_order_of_flush_and_rename(
    directory: RunDirectory, monkeypatch: pytest.MonkeyPatch, durability: Durability, calls: list[str]
) -> None:
    seen: list[str] = []

    def spy(name: str) -> None:
        real = getattr(os, name)

        def recorded(*args: Any, **kwargs: Any) -> Any:
            seen.append(name)
            return real(*args, **kwargs)

        monkeypatch.setattr(os, name, recorded)

    spy("fsync")
    spy("replace")
    write_manifest(directory, NAME, {"step": 1}, durability)
    assert seen == calls
