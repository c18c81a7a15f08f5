"""The use of a run's own list of files before the run is opened."""

from __future__ import annotations

from pathlib import Path

from tests.helpers.disk import SWAP, open_model, write_run
from zero_offload.base.types import MIB
from zero_offload.checkpoint.file_list import count_reusable, reusable_bytes
from zero_offload.hardware.probe import probe_hardware
from zero_offload.storage.files.directory import LOCK_NAME


def test_own_files_count_as_free_once_and_others_never(tmp_path: Path) -> None:
    write_run(tmp_path / "run", 2)
    own = [path for path in (tmp_path / "run").iterdir() if path.name != LOCK_NAME]
    held = sum(path.stat().st_blocks * 512 for path in own)
    assert SWAP in {path.name for path in own} and held > 0
    (tmp_path / "run" / "letter").write_bytes(b"x" * MIB)
    assert reusable_bytes([tmp_path / "run"]) == held
    found = probe_hardware([tmp_path / "run"])
    assert count_reusable(found, [tmp_path / "run"]).nvme_free_bytes == found.nvme_free_bytes + held


def test_files_of_a_run_that_is_training_may_be_counted(tmp_path: Path) -> None:
    """Its commits rename manifests all the time; a second run in its directory fails later, at the lock."""
    model, _ = open_model(tmp_path)
    (tmp_path / SWAP).rename(tmp_path / "moved")
    before = reusable_bytes([tmp_path])
    (tmp_path / "moved").rename(tmp_path / SWAP)
    assert 0 <= before < reusable_bytes([tmp_path])
    assert model is not None
