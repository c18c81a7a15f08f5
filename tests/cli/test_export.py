"""`zero-offload export`: what `zo.export_pretrained` writes, from files alone."""

from __future__ import annotations

import contextlib
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import zero_offload as zo
from tests.helpers import ranks
from tests.helpers.disk import SWAP, committed_blocks, flip_bit, open_model, train
from tests.helpers.models import TinyLM, build
from tests.helpers.pretrained import Everything, read_folder
from tests.helpers.ranks import Case, RankPool, RankPools
from zero_offload.checkpoint.hf_export import export_saved
from zero_offload.checkpoint.saved_generation import SavedGeneration, open_generation
from zero_offload.cli.main import main
from zero_offload.cli.recipes.gpt import GPT, GPTConfig  # as the card says
from zero_offload.runs.locate import alone
from zero_offload.storage.files.engines import open_engine

Capture = pytest.CaptureFixture[str]
DTYPES = [None, "fp32", "bf16", "fp16"]


def _export(run: Path, out: Path, *flags: object) -> int:
    return main(["export", str(run), str(out), *map(str, flags)])


def _flags(dtype: str | None) -> list[str]:
    return [] if dtype is None else ["--dtype", dtype]


def _equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return found.keys() == expected.keys() and all(
        found[name].dtype == value.dtype and torch.equal(found[name], value) for name, value in expected.items()
    )


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32"])
def test_every_tensor_is_that_of_export_pretrained(precision: str, tmp_path: Path) -> None:
    """Ties, frozen and integer parameters, buffers, several files."""
    model, optimizer = open_model(tmp_path / "run", build(Everything), precision=precision)
    train(model, optimizer, 0, 3)
    zo.save_checkpoint(model, optimizer, tmp_path / "saved")
    for dtype in DTYPES:
        zo.export_pretrained(model, tmp_path / f"expected {dtype}", dtype=dtype)
    zo.close(model)
    for dtype in DTYPES:
        expected = read_folder(tmp_path / f"expected {dtype}")
        for run in ("run", "saved"):
            out = tmp_path / f"{run} {dtype}"
            assert _export(tmp_path / run, out, *_flags(dtype), "--max-shard-size", "20KB") == 0
            assert _equal(read_folder(out), expected)
            index = json.loads((out / "model.safetensors.index.json").read_text())
            assert index["weight_map"].keys() == expected.keys()


def test_what_was_exported_loads(tmp_path: Path, capsys: Capture) -> None:
    model, optimizer = open_model([tmp_path / "first", tmp_path / "second"])
    train(model, optimizer, 0, 2)
    expected = model.state_dict()
    zo.close(model)
    assert _export(tmp_path / "first", tmp_path / "out", "--json") == 0
    words = json.loads(capsys.readouterr().out)
    assert (words["number"], words["step"], words["files"]) == (2, 2, ["README.md", "model.safetensors"])
    other = build(TinyLM, seed=5)
    zo.offload(other, zo.OffloadConfig())
    zo.load_pretrained(other, tmp_path / "out")
    found = other.state_dict()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    zo.close(other)


def test_an_older_generation(tmp_path: Path) -> None:
    run = tmp_path / "run"
    model, optimizer = open_model(run)
    train(model, optimizer, 0, 3)
    zo.export_pretrained(model, tmp_path / "expected")
    train(model, optimizer, 3, 4)
    zo.close(model)
    assert _export(run, tmp_path / "out", "--generation", 3) == 0
    assert _equal(read_folder(tmp_path / "out"), read_folder(tmp_path / "expected"))
    assert _export(run, tmp_path / "none", "--generation", 1) == 2


@pytest.fixture
def pool(pools: RankPools) -> RankPool:
    return pools.of(3)


def close_after(rank: int, world_size: int, case: Case, path: str) -> None:
    model, optimizer = ranks.start(case)
    ranks.steps(case, (rank, world_size), model, optimizer, range(2), ranks.Outcome())
    zo.export_pretrained(model, path, dtype="fp32")
    zo.close(model)


@pytest.mark.full
def test_three_ranks_whose_borders_cut_tensors(pool: RankPool, tmp_path: Path) -> None:
    case = Case({"params": "cpu", "optimizer": "nvme", "nvme": tmp_path / "run"})
    pool.succeed(close_after, case, str(tmp_path / "expected"))
    assert _export(tmp_path / "run", tmp_path / "out", "--dtype", "fp32") == 0
    assert _equal(read_folder(tmp_path / "out"), read_folder(tmp_path / "expected"))


def test_a_bad_block_leaves_nothing(nvme: Path, tmp_path: Path, capsys: Capture) -> None:
    model, optimizer = open_model(nvme)
    train(model, optimizer, 0, 2)
    zo.close(model)
    for offset, component in committed_blocks(nvme):
        if component == "residual":
            flip_bit(nvme / SWAP, offset)
    before = sorted(tmp_path.iterdir())
    assert _export(nvme, tmp_path / "masters", "--dtype", "fp32") == 5
    assert "checksum" in capsys.readouterr().err and sorted(tmp_path.iterdir()) == before
    assert _export(nvme, tmp_path / "values") == 0  # made of other blocks


def test_refusals(nvme: Path, tmp_path: Path, capsys: Capture) -> None:
    model, optimizer = open_model(nvme)
    train(model, optimizer, 0, 1)
    zo.close(model)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("precious")
    assert _export(nvme, tmp_path / "full") == 2
    assert "is not empty" in capsys.readouterr().err
    assert _export(nvme, tmp_path / "out", "--max-shard-size", "much") == 2
    assert not (tmp_path / "out").exists()


def test_tensor_parallel_parts_are_refused(nvme: Path, tmp_path: Path) -> None:
    model, optimizer = open_model(nvme)
    train(model, optimizer, 0, 1)
    zo.close(model)
    with contextlib.ExitStack() as cleanup:
        generation, directories = open_generation(nvme, alone(), cleanup)
        engine = open_engine()
        cleanup.callback(engine.close)
        params: list[dict[str, Any]] = [dict(entry) for entry in generation.payload["params"]]
        params[3]["division"] = "Shard(0) of 2"
        divided = replace(generation, payload={**generation.payload, "params": params})
        saved = SavedGeneration(divided, directories, engine)
        with pytest.raises(zo.ConfigError, match=f"tensor-parallel run.*{params[3]['name']}"):
            export_saved(saved, tmp_path / "out", None, 10**9)
    assert not (tmp_path / "out").exists()


def test_a_run_of_train_has_its_sizes_too(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "text.txt").write_text("some words and some more of them. " * 300)
    run, out = tmp_path / "run", tmp_path / "out"
    sizes = ["--model", "tiny", "--seq", "16", "--batch", "1", "--steps", "2", "--data", str(tmp_path / "text.txt")]
    assert main(["train", *sizes, "--out", str(run)]) == 0
    assert main(["verify", str(run)]) == 0
    shutil.move(run, tmp_path / "moved")
    assert main(["verify", str(tmp_path / "moved")]) == 0
    assert _export(tmp_path / "moved", out, "--dtype", "fp32") == 0
    assert "from zero_offload.cli.recipes.gpt import GPT, GPTConfig\n" in (out / "README.md").read_text()
    model = GPT(GPTConfig(**json.loads((out / "config.json").read_text())))
    missing = model.load_state_dict(read_folder(out), strict=False).missing_keys
    assert missing == ["head.weight"] and model.head.weight is model.embedding.weight
