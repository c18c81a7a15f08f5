"""`zero-offload verify`: every block of every rank, without a model; what is bad is named, and nothing is changed."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest

import zero_offload as zo
from tests.helpers import ranks
from tests.helpers.disk import SWAP, committed_blocks, drain, flip_bit, generation_file, open_model, train, write_run
from tests.helpers.ranks import Case, RankPool
from zero_offload.checkpoint import verify as verify_module
from zero_offload.cli.main import main
from zero_offload.storage.files.directory import RunDirectory
from zero_offload.storage.files.native_engine import NativeEngine

Capture = pytest.CaptureFixture[str]


def _verify(capsys: Capture, *arguments: object) -> tuple[int, dict[str, Any]]:
    capsys.readouterr()
    code = main(["verify", *map(str, arguments), "--json"])
    return code, json.loads(capsys.readouterr().out)


def _state(path: Path) -> dict[Path, tuple[bytes, int]]:
    return {file: (file.read_bytes(), file.stat().st_mtime_ns) for file in path.rglob("*") if file.is_file()}


def _state_bytes(nvme: Path, number: int) -> int:
    """Of the generation, counted from its manifests."""
    payload = json.loads(generation_file(nvme, number).read_text())["payload"]
    manifest = json.loads((nvme / payload["ranks"][0]["manifest"]).read_text())["payload"]
    sizes = {"value": 2, "residual": 2, "exp_avg": 4, "exp_avg_sq": 4}
    return sum(
        section["shard_numel"] * sizes[component]
        for section in manifest["sections"]
        for component in section["components"]
    )


def test_a_whole_run(nvme: Path, capsys: Capture) -> None:
    write_run(nvme, 4)
    before = _state(nvme)
    code, found = _verify(capsys, nvme)
    assert code == 0 and _state(nvme) == before
    newest, older = found["generations"]
    assert (newest["number"], newest["step"], newest["newest"], newest["ranks"]) == (4, 4, True, 1)
    assert (older["number"], older["step"], older["newest"]) == (3, 3, False)
    for each in (newest, older):
        assert each["whole"] and each["bad_blocks"] == each["problems"] == []
        assert each["verified_bytes"] == _state_bytes(nvme, each["number"]) > 0 < each["blocks"]
    assert main(["verify", str(nvme)]) == 0
    text = capsys.readouterr().out
    assert f"{nvme}:" in text and "generation 4 (step 4, committed 20" in text and text.count("verified, whole") == 2


@pytest.mark.parametrize("number", [3, 4])
def test_every_flipped_bit_is_listed(number: int, nvme: Path, capsys: Capture) -> None:
    write_run(nvme, 4)
    blocks = committed_blocks(nvme, number)
    for offset, _ in blocks:
        flip_bit(nvme / SWAP, offset + 9, bit=offset % 7)
    code, found = _verify(capsys, nvme)
    # Later steps may rightly have written over blocks of the older one: this cannot be told.
    assert code == (5 if number == 4 else 0)
    bad = {each["number"]: each["bad_blocks"] for each in found["generations"]}
    assert sorted((block["offset"], block["component"]) for block in bad[number]) == sorted(blocks)
    assert bad[7 - number] == []
    assert {block["file"] for block in bad[number]} == {str(nvme / SWAP)} and {b["rank"] for b in bad[number]} == {0}
    assert all("checksum" in block["problem"] for block in bad[number])
    named = {name for block in bad[number] for name in block["params"]}
    assert {"embedding.weight", "blocks.0.up.weight", "norm.weight"} <= named
    code, found = _verify(capsys, nvme, "--generation", number)
    assert code == 5 and [each["number"] for each in found["generations"]] == [number]
    code, found = _verify(capsys, nvme, "--generation", 7 - number)
    assert code == 0


def test_what_is_printed_of_a_bad_block(nvme: Path, capsys: Capture) -> None:
    write_run(nvme, 2)
    offset, component = committed_blocks(nvme)[-1]
    flip_bit(nvme / SWAP, offset)
    assert main(["verify", str(nvme)]) == 5
    text = capsys.readouterr().out
    assert "verified, BAD" in text and f"at offset {offset} of {nvme / SWAP}: rank 0, section " in text
    assert f", {component} of " in text


def test_a_generation_that_was_written_over(nvme: Path, tmp_path: Path, capsys: Capture) -> None:
    model, optimizer = open_model(nvme, commit_every=2)
    train(model, optimizer, 0, 5)
    drain(model)
    shutil.copytree(nvme, tmp_path / "copy")
    zo.close(model)
    assert main(["verify", str(tmp_path / "copy")]) == 0
    text = capsys.readouterr().out
    assert "generation 2 (step 4" in text and "no longer whole: later steps wrote over it" in text
    assert "blocks are not its own any more" in text
    assert main(["verify", str(tmp_path / "copy"), "--generation", "1"]) == 5


@pytest.mark.parametrize("which", ["newest", "rank", "run"])
def test_damaged_manifests(which: str, nvme: Path, capsys: Capture) -> None:
    write_run(nvme, 4)
    path = {"newest": generation_file(nvme), "rank": nvme / "rank0-0.json", "run": nvme / "run.json"}[which]
    flip_bit(path, 300 if which != "run" else 80)
    assert main(["verify", str(nvme)]) == 5
    captured = capsys.readouterr()
    assert str(path) in captured.out + captured.err
    if which != "run":
        assert ("generation 3 (step 3" in captured.out) and "whole" in captured.out
        assert main(["verify", str(nvme), "--generation", "3"]) == 0


@pytest.mark.parametrize("nbytes", [0, 4096, 100_000])
def test_a_truncated_file(nbytes: int, nvme: Path, capsys: Capture) -> None:
    write_run(nvme, 2)
    with (nvme / SWAP).open("r+b") as file:
        file.truncate(nbytes)
    code, found = _verify(capsys, nvme)
    assert code == 5 and "is truncated" in found["generations"][0]["problems"][0]


def test_a_missing_file(nvme: Path, capsys: Capture) -> None:
    write_run(nvme, 2)
    (nvme / SWAP).unlink()
    code, found = _verify(capsys, nvme)
    assert code == 4 and str(nvme / SWAP) in found["generations"][0]["problems"][0]


def test_striped_directories(tmp_path: Path, capsys: Capture) -> None:
    places = [tmp_path / "first", tmp_path / "second"]
    model, optimizer = open_model(places)
    train(model, optimizer, 0, 2)
    zo.close(model)
    code, found = _verify(capsys, places[0])
    assert code == 0 and found["generations"][0]["verified_bytes"] == _state_bytes(places[0], 2)
    with (places[1] / SWAP).open("r+b") as file:
        file.write(bytes(places[1].joinpath(SWAP).stat().st_size))
    code, found = _verify(capsys, places[0])
    assert code == 5
    assert {block["file"] for block in found["generations"][0]["bad_blocks"]} == {str(places[1] / SWAP)}
    places[1].rename(tmp_path / "elsewhere")
    assert main(["verify", str(places[0])]) == 2
    assert f"{places[1]} cannot be found" in capsys.readouterr().err


def test_two_ranks(pool: RankPool, nvme: Path, capsys: Capture) -> None:
    case = Case({"params": "nvme", "optimizer": "nvme", "nvme": nvme}, num_steps=2)
    pool.succeed(ranks.train, case)
    assert _verify(capsys, nvme)[0] == 0
    manifest = json.loads((nvme / "rank1-0.json").read_text())["payload"]
    offset = manifest["sections"][-1]["components"]["exp_avg"]["offset"][0]
    flip_bit(nvme / "rank1.swap", offset)
    code, found = _verify(capsys, nvme)
    [block] = found["generations"][0]["bad_blocks"]
    assert code == 5 and (block["rank"], block["component"], block["offset"]) == (1, "exp_avg", offset)
    assert block["file"] == str(nvme / "rank1.swap")
    # The borders of ranks cut parameters: this rank's block begins where its shard does.
    listed = json.loads(generation_file(nvme).read_text())["payload"]["params"]
    begin = manifest["sections"][-1]["shard_numel"]
    section = [each for each in listed if each["section"] == len(manifest["sections"]) - 1]
    after = [each["name"] for each in section if each["begin"] + math.prod(each["shape"]) > begin]
    assert block["params"] == after and 0 < len(after) < len(section)


def test_a_checkpoint_is_read_by_several_at_once(tmp_path: Path, capsys: Capture) -> None:
    model, optimizer = open_model(tmp_path / "run")
    train(model, optimizer, 0, 2)
    zo.save_checkpoint(model, optimizer, tmp_path / "saved")
    before = _state(tmp_path / "saved")
    with RunDirectory.open(tmp_path / "saved"):
        code, found = _verify(capsys, tmp_path / "saved")
    assert code == 0 and [each["step"] for each in found["generations"]] == [2]
    assert {path: content for path, (content, _) in before.items() if path.name != "LOCK"} == {
        path: content for path, (content, _) in _state(tmp_path / "saved").items() if path.name != "LOCK"
    }
    zo.close(model)


def test_several_reads_are_in_flight_and_never_more(
    nvme: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(nvme, 2)
    counts, flying = [], 0
    launch, wait = NativeEngine.submit, NativeEngine.wait

    def counting_submit(*args: Any, **kwargs: Any) -> Any:
        nonlocal flying
        flying += 1
        counts.append(flying)
        return launch(*args, **kwargs)

    def counting_wait(*args: Any, **kwargs: Any) -> None:
        nonlocal flying
        flying -= 1
        wait(*args, **kwargs)

    monkeypatch.setattr(NativeEngine, "submit", counting_submit)
    monkeypatch.setattr(NativeEngine, "wait", counting_wait)
    assert _verify(capsys, nvme)[0] == 0
    assert max(counts) == verify_module.READS_IN_FLIGHT and flying == 0


@pytest.mark.parametrize("make", ["nothing", "file", "empty", "foreign"])
def test_what_is_no_run(make: str, tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "run"
    if make == "file":
        path.write_text("")
    elif make != "nothing":
        path.mkdir()
    if make == "foreign":
        (path / "run.json").write_text("[1]")
    for command in (["verify", str(path)], ["export", str(path), str(tmp_path / "out")]):
        assert main(command) == 2
        assert "give a run directory of `train` or `finetune`, NVMe directory, or checkpoint" in capsys.readouterr().err
    assert not (path / "LOCK").exists()
