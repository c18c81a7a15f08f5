"""Weights from and to Hugging Face folders: what a plain model would hold, wherever the states rest."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import zero_offload as zo
from tests.helpers.disk import close_broken, drain, engine_of, open_model, runtime, small_disk, train
from tests.helpers.models import WIDE, TinyLM, build, tokens_of
from tests.helpers.pretrained import OURS, THEIRS, Everything, read_folder, weights_of, write_weights
from tests.helpers.reference import param_groups, read_masters
from tests.helpers.twins import run_plain
from zero_offload.checkpoint.hf_files import StoredTensor
from zero_offload.hardware.abi import Fault

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
Model = partial(Everything, WIDE)


def _theirs(make: Any = Model) -> nn.Module:
    return build(make, THEIRS)


def _offloaded(config: zo.OffloadConfig, make: Any = Model) -> nn.Module:
    return zo.offload(build(make, OURS), config)


def _expected(weights: dict[str, torch.Tensor], config: zo.OffloadConfig) -> dict[str, torch.Tensor]:
    """fp32 masters of the trained parameters; frozen ones have the compute dtype."""
    compute = DTYPES[config.numerics.compute]
    found = {}
    for name, param in build(Model).named_parameters():
        values = weights[name]
        if param.is_floating_point():
            values = values.float() if param.requires_grad else values.to(compute)
        found[name] = values
    return found


def _same(mine: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert set(mine) == set(theirs)
    for name, tensor in theirs.items():
        assert mine[name].dtype == tensor.dtype and torch.equal(mine[name], tensor), name


# Load


@pytest.mark.parametrize("dtype", DTYPES)
def test_masters_and_buffers_are_the_files(dtype: str, config: zo.OffloadConfig, tmp_path: Path) -> None:
    theirs = _theirs()
    write_weights(tmp_path / "in", theirs, DTYPES[dtype])
    model = _offloaded(config)
    scratch = model.scratch.clone()
    zo.load_pretrained(model, tmp_path / "in")
    _same(read_masters(model), _expected(weights_of(theirs, DTYPES[dtype]), config))
    for name in ("mean", "calls", "mask"):
        buffer, read = getattr(model, name), getattr(theirs, name)
        assert torch.equal(buffer, read.to(buffer.dtype)), name
    assert model.mean.dtype == getattr(torch, config.compute_dtype_name)
    assert torch.equal(model.scratch, scratch)
    zo.close(model)


def test_an_index_and_shards(config: zo.OffloadConfig, tmp_path: Path) -> None:
    weights = weights_of(_theirs())
    names = sorted(weights)
    files = {name: f"model-{1 + i % 3:05d}-of-00003.safetensors" for i, name in enumerate(names)}
    (tmp_path / "in").mkdir()
    for file in set(files.values()):
        save_file({name: weights[name] for name in names if files[name] == file}, tmp_path / "in" / file)
    index = {"metadata": {"total_size": 0}, "weight_map": files}
    (tmp_path / "in" / "model.safetensors.index.json").write_text(json.dumps(index))
    model = _offloaded(config)
    zo.load_pretrained(model, tmp_path / "in")
    _same(read_masters(model), _expected(weights, config))
    zo.close(model)


@pytest.mark.door(
    "torch", load="`zo.load_pretrained`", between="a tied weight, under any of its names", outcome="right"
)
@pytest.mark.parametrize("names", [["embedding.weight"], ["head.weight"], ["embedding.weight", "head.weight"]])
def test_a_tie_under_any_name(names: list[str], fp32_config: zo.OffloadConfig, tmp_path: Path) -> None:
    weights = weights_of(_theirs())
    values = weights.pop("embedding.weight")
    save_file(weights | {name: values.clone() for name in names}, tmp_path / "in.safetensors")
    model = _offloaded(fp32_config)
    zo.load_pretrained(model, tmp_path / "in.safetensors")
    assert model.head.weight is model.embedding.weight
    assert torch.equal(read_masters(model)["embedding.weight"], values)
    zo.close(model)


def test_a_buffer_outside_of_state_dicts_is_loaded_when_it_is_there(tmp_path: Path) -> None:
    save_file(weights_of(_theirs()) | {"scratch": torch.tensor([1.0, 2, 3])}, tmp_path / "in.safetensors")
    model = _offloaded(zo.OffloadConfig())
    zo.load_pretrained(model, tmp_path / "in.safetensors")
    assert model.scratch.tolist() == [1, 2, 3]


def test_the_files_of_a_base_model(tmp_path: Path) -> None:
    class Headed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = TinyLM()

    theirs = build(TinyLM, THEIRS)
    write_weights(tmp_path / "in", theirs)
    model = zo.offload(build(Headed), zo.OffloadConfig())
    with pytest.raises(zo.CheckpointError, match='pass prefix="base."'):
        zo.load_pretrained(model, tmp_path / "in")
    zo.load_pretrained(model, tmp_path / "in", prefix="base.")
    _same(read_masters(model), {f"base.{name}": values for name, values in weights_of(theirs).items()})


def _script(model: nn.Module, optimizer: zo.AdamW) -> Any:
    for seed in range(6):
        loss = model(tokens_of(seed))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()


def _load_plain(path: Path) -> nn.Module:
    model = build(Model, OURS)
    model.load_state_dict(load_file(path / "model.safetensors"), strict=False)
    return model


@pytest.mark.parametrize("backward_before", ["no backward before", "a backward before"])
def test_training_goes_on_as_in_a_plain_model(
    backward_before: str, fp32_config: zo.OffloadConfig, tmp_path: Path
) -> None:
    """Also of a model that has computed already: units were on the device, gradients wait."""
    write_weights(tmp_path / "in", _theirs())
    plain = run_plain(_script, partial(_load_plain, tmp_path / "in"), "fp32")
    model = _offloaded(fp32_config)
    optimizer = zo.AdamW(param_groups(model), lr=1e-2, betas=(0.9, 0.95), eps=1e-8)
    if backward_before == "a backward before":
        model(tokens_of(50)).backward()
    zo.load_pretrained(model, tmp_path / "in")
    assert list(_script(model, optimizer)) == plain.losses
    _same(read_masters(model), plain.params)
    zo.close(model)


def test_what_is_loaded_is_what_the_same_model_offloaded_would_hold(config: zo.OffloadConfig, tmp_path: Path) -> None:
    """In bf16 too: masters, moments and the losses after."""
    write_weights(tmp_path / "in", _theirs())
    model = zo.offload(_theirs(), config)
    expected = list(_script(model, zo.AdamW(param_groups(model), lr=1e-2)))
    masters = read_masters(model)
    zo.close(model)
    model = _offloaded(config)
    zo.load_pretrained(model, tmp_path / "in")
    assert list(_script(model, zo.AdamW(param_groups(model), lr=1e-2))) == expected
    _same(read_masters(model), masters)
    zo.close(model)


def test_a_backward_through_replaced_weights_raises(config: zo.OffloadConfig, tmp_path: Path) -> None:
    """Without buffers, whose own change would raise."""
    make = partial(TinyLM, WIDE)
    write_weights(tmp_path / "in", build(make, THEIRS))
    model = _offloaded(config, make)
    loss = model(tokens_of(0))
    zo.load_pretrained(model, tmp_path / "in")
    with pytest.raises(RuntimeError, match="modified by an inplace"):
        loss.backward()
    zo.close(model)


def test_shards_of_several_chunks(config: zo.OffloadConfig, tmp_path: Path) -> None:
    make = partial(TinyLM, 400, 2)
    theirs = build(make, THEIRS)
    write_weights(tmp_path / "in", theirs)
    model = _offloaded(config, make)
    assert max(len(shard.layout.chunks()) for shard in runtime(model).store.shards) == 2
    zo.load_pretrained(model, tmp_path / "in")
    _same(read_masters(model), weights_of(theirs))
    zo.export_pretrained(model, tmp_path / "out", dtype="fp32")
    _same(read_folder(tmp_path / "out"), weights_of(theirs))
    zo.close(model)


# Folders that do not fit


def _unchanged(model: nn.Module, path: Path, kind: type[Exception], words: str, **arguments: Any) -> None:
    before = {name: values.clone() for name, values in (read_masters(model) | dict(model.named_buffers())).items()}
    with pytest.raises(kind, match=words):
        zo.load_pretrained(model, path, **arguments)
    _same(read_masters(model) | dict(model.named_buffers()), before)


@pytest.mark.door(
    "torch",
    load="`zo.load_pretrained`",
    between="files of another model",
    outcome="refused: each name, shape and dtype",
    instead="the model that the files belong to",
)
def test_all_problems_at_once_and_nothing_changed(config: zo.OffloadConfig, tmp_path: Path) -> None:
    weights = weights_of(_theirs())
    del weights["norm.weight"], weights["mean"]
    weights["norm.bias"] = torch.zeros(WIDE, 1)
    weights["positions"] = weights["positions"].to(torch.int32)
    save_file(weights | {"stranger": torch.ones(1)}, tmp_path / "in.safetensors")
    model = _offloaded(config)
    _unchanged(
        model,
        tmp_path / "in.safetensors",
        zo.CheckpointError,
        r"(?s)nothing was changed.*2 missing in the files: norm.weight, mean\n.*1 unknown to the model: stranger\n"
        r".*shape: norm.bias \[320, 1\] \(model: \[320\]\)\n.*convert: positions I32",
    )
    zo.close(model)


@pytest.mark.door(
    "torch",
    load="`zo.load_pretrained`",
    between="two values in the files for tied weights",
    outcome="refused: the tie",
    instead="the model built without the tie",
)
def test_ties_that_differ(tmp_path: Path) -> None:
    weights = weights_of(_theirs())
    save_file(weights | {"head.weight": weights["embedding.weight"] + 1}, tmp_path / "in.safetensors")
    model = _offloaded(zo.OffloadConfig())
    words = "different values in the files: embedding.weight and head.weight"
    _unchanged(model, tmp_path / "in.safetensors", zo.CheckpointError, words)


def test_a_damaged_file(tmp_path: Path) -> None:
    path = write_weights(tmp_path / "in", _theirs()) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-4])
    _unchanged(_offloaded(zo.OffloadConfig()), tmp_path / "in", zo.IntegrityError, "cut short")


def test_a_read_that_fails_half_way_says_what_is_left(
    config: zo.OffloadConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_weights(tmp_path / "in", _theirs())
    model, read, reads = _offloaded(config), StoredTensor.read, []

    def failing(tensor: StoredTensor, begin: int, end: int) -> torch.Tensor:
        reads.append(tensor)
        if len(reads) == 5:
            raise zo.StorageError("the drive is gone")
        return read(tensor, begin, end)

    with monkeypatch.context() as patched:
        patched.setattr(StoredTensor, "read", failing)
        with pytest.raises(
            zo.StorageError, match="the drive is gone. The weights are now part old.*load_pretrained again"
        ):
            zo.load_pretrained(model, tmp_path / "in")
    zo.load_pretrained(model, tmp_path / "in")
    _same(read_masters(model), _expected(weights_of(_theirs()), config))


@pytest.mark.parametrize("call", [zo.load_pretrained, zo.export_pretrained])
def test_a_model_that_is_not_offloaded_or_not_whole(call: Any, tmp_path: Path) -> None:
    with pytest.raises(zo.ConfigError, match=r"call zo.offload\(model, config\) first"):
        call(build(TinyLM), tmp_path)
    model = zo.offload(build(TinyLM), zo.OffloadConfig())
    with pytest.raises(zo.ConfigError, match="takes the whole model.*of its 21 parameters are not in this ModuleList"):
        call(model.blocks, tmp_path)
    model.extra = nn.Linear(2, 2)
    with pytest.raises(zo.ConfigError, match="2 here were never offloaded"):
        call(model, tmp_path)


# Moments belong to weights


def test_loading_after_a_step_is_refused(config: zo.OffloadConfig, tmp_path: Path) -> None:
    write_weights(tmp_path / "in", _theirs())
    model = _offloaded(config)
    train(model, zo.AdamW(param_groups(model), lr=1e-2), 0, 2)
    _unchanged(model, tmp_path / "in", zo.ConfigError, 'has made 2 steps.*zo.gathered.model, mode="write".')
    zo.close(model)


def test_loading_under_loaded_moments_is_refused(tmp_path: Path) -> None:
    write_weights(tmp_path / "in", _theirs())
    model = _offloaded(zo.OffloadConfig())
    optimizer = zo.AdamW(model.parameters())
    train(model, optimizer, 0, 3)
    state = optimizer.state_dict()
    model = _offloaded(zo.OffloadConfig())
    zo.AdamW(model.parameters()).load_state_dict(state)
    _unchanged(model, tmp_path / "in", zo.ConfigError, "has made 3 steps")


def test_a_generation_goes_before_the_folder(nvme: Path, tmp_path: Path) -> None:
    """A script that loads and resumes starts from the folder once, and then from its generations."""
    write_weights(tmp_path / "in", build(TinyLM, THEIRS))
    losses = []
    for begin, end in ((0, 2), (2, 4)):
        model, optimizer = open_model(nvme)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            zo.load_pretrained(model, tmp_path / "in")
        resumed = zo.resume(model, optimizer)
        assert (resumed is None) == (begin == 0)
        assert [str(w.message)[:37] for w in caught] == ["the generation of step 2 is resumed, "] * (begin > 0)
        losses += train(model, optimizer, begin, end)
        if begin:
            _unchanged(model, tmp_path / "in", zo.ConfigError, "has made 4 steps")
        zo.close(model)
    model = zo.offload(build(TinyLM, THEIRS), zo.OffloadConfig())
    assert train(model, zo.AdamW(param_groups(model), lr=1e-2), 0, 4) == losses


def test_loaded_weights_reach_the_first_generation(nvme: Path, tmp_path: Path) -> None:
    """Frozen ones too, which no step writes."""
    write_weights(tmp_path / "in", _theirs())
    model, optimizer = open_model(nvme, build(Model, OURS))
    zo.load_pretrained(model, tmp_path / "in")
    train(model, optimizer, 0, 1)
    drain(model)
    masters = read_masters(model)
    zo.close(model)
    model, _ = open_model(nvme, build(Model, OURS))
    _same(read_masters(model), masters)
    assert torch.equal(masters["blocks.1.up.weight"], _theirs().blocks[1].up.weight.bfloat16())
    zo.close(model)


# Export


def _trained(config: zo.OffloadConfig) -> nn.Module:
    model = _offloaded(config)
    train(model, zo.AdamW(param_groups(model), lr=1e-2), 0, 2)
    return model


def _round_up(masters: dict[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    return {name: value.to(dtype) if value.is_floating_point() else value for name, value in masters.items()}


@pytest.mark.parametrize("dtype", [None, *DTYPES])
def test_what_is_exported(dtype: str | None, config: zo.OffloadConfig, tmp_path: Path) -> None:
    model = _trained(config)
    zo.export_pretrained(model, tmp_path / "out", dtype=dtype)
    found = read_folder(tmp_path / "out")
    buffers = {name: getattr(model, name) for name in ("mean", "calls", "mask")}
    name = dtype or config.numerics.compute
    if name == config.numerics.compute:
        expected = {name: value.clone() for name, value in model.state_dict().items() if name != "head.weight"}
    else:
        expected = _round_up(read_masters(model), DTYPES[name]) | buffers
    _same(found, expected)
    assert sorted(os.listdir(tmp_path)) == sorted({"out", "nvme"} & set(os.listdir(tmp_path)))
    zo.close(model)


@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_with_fp16_compute_masters_come_and_go_whole(tier: str, tmp_path: Path) -> None:
    """Loaded in fp32, exported in fp32 and rounded."""
    theirs = _theirs()
    write_weights(tmp_path / "in", theirs)
    config = zo.OffloadConfig(params=tier, optimizer=tier, nvme=tmp_path / "nvme", precision="fp16")
    model = _offloaded(config)
    zo.load_pretrained(model, tmp_path / "in")
    masters, trained = read_masters(model), {n for n, p in model.named_parameters() if p.requires_grad}
    _same(masters, _expected(weights_of(theirs), config))
    for dtype in (None, "fp32", "bf16"):
        zo.export_pretrained(model, tmp_path / str(dtype), dtype=dtype)
        found = read_folder(tmp_path / str(dtype))
        expected = _round_up(masters, DTYPES[dtype or "fp16"])
        assert all(torch.equal(found[name], expected[name]) for name in trained)
    zo.close(model)


def test_there_and_back(config: zo.OffloadConfig, tmp_path: Path) -> None:
    """With fp32 nothing is lost, in shards smaller than a unit; the loaded one trains on like an untrained twin."""
    model = _trained(config)
    zo.export_pretrained(model, tmp_path / "out", max_shard_size="1MiB", dtype="fp32")
    masters, buffers = read_masters(model), {name: value.clone() for name, value in model.named_buffers()}
    zo.close(model)
    files = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert len(files) > 5 and files[-1] == "model.safetensors.index.json"
    assert all((tmp_path / "out" / name).stat().st_size < 2.2 * (1 << 20) for name in files)
    model = _offloaded(config)
    zo.load_pretrained(model, tmp_path / "out")
    _same(read_masters(model), masters)
    _same(
        {name: getattr(model, name) for name in ("mean", "calls", "mask")},
        {n: buffers[n] for n in ("mean", "calls", "mask")},
    )
    zo.close(model)


def test_training_is_not_disturbed_by_an_export(config: zo.OffloadConfig, tmp_path: Path) -> None:
    losses = []
    for exports in (0, 1):
        model = _offloaded(config)
        optimizer = zo.AdamW(param_groups(model), lr=1e-2)
        found = train(model, optimizer, 0, 2)
        for _ in range(exports):
            zo.export_pretrained(model, tmp_path / "out")
        losses.append(found + train(model, optimizer, 2, 5))
        zo.close(model)
    assert losses[0] == losses[1]


def test_a_plain_model_loads_it(fp32_config: zo.OffloadConfig, tmp_path: Path) -> None:
    model = _trained(fp32_config)
    zo.export_pretrained(model, tmp_path / "out")
    plain = build(Model, OURS)
    wrong = plain.load_state_dict(read_folder(tmp_path / "out"), strict=False)
    assert (wrong.missing_keys, wrong.unexpected_keys) == (["head.weight"], [])
    model.eval(), plain.eval()
    with torch.no_grad():
        assert torch.equal(plain(tokens_of(9)), model(tokens_of(9)))
    zo.close(model)


class _Config:
    def save_pretrained(self, folder: Path) -> None:
        (folder / "config.json").write_text("{}")


def test_the_config_is_saved_where_there_is_one(tmp_path: Path) -> None:
    model = zo.offload(build(TinyLM), zo.OffloadConfig())
    model.config = {"a": "plain dict"}
    model.generation_config = _Config()
    zo.export_pretrained(model, tmp_path / "one")
    assert sorted(os.listdir(tmp_path / "one")) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize("arguments", [{"dtype": "int8"}, {"max_shard_size": "many"}, {"max_shard_size": 0}])
def test_arguments_that_mean_nothing(arguments: dict[str, Any], tmp_path: Path) -> None:
    model = zo.offload(build(TinyLM), zo.OffloadConfig())
    with pytest.raises(zo.ConfigError, match="none of fp32, bf16, fp16|as a size|is positive"):
        zo.export_pretrained(model, tmp_path / "out", **arguments)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_not_empty(tmp_path: Path) -> None:
    model = zo.offload(build(TinyLM), zo.OffloadConfig())
    (tmp_path / "precious").write_text("x")
    with pytest.raises(zo.ConfigError, match="not empty: it holds precious"):
        zo.export_pretrained(model, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]


def test_a_full_disk(config: zo.OffloadConfig, tmp_path: Path) -> None:
    """Nothing is left, the model lives, and elsewhere there is room."""
    model = _trained(config)
    with small_disk(tmp_path / "disk", "3m") as disk:
        with pytest.raises(zo.StorageError, match="reserving .*No space left on device"):
            zo.export_pretrained(model, disk / "out", max_shard_size="1MiB")
        assert list(disk.iterdir()) == []
    zo.export_pretrained(model, tmp_path / "out")
    train(model, zo.AdamW(param_groups(model), lr=1e-2), 2, 3)
    zo.close(model)


def test_states_that_cannot_be_read(nvme: Path, tmp_path: Path) -> None:
    model, optimizer = open_model(nvme)
    train(model, optimizer, 0, 1)
    drain(model)
    engine_of(model).inject_fault(Fault.READ_EIO, 3)
    with pytest.raises(zo.StorageError, match="rank0.swap"):
        zo.export_pretrained(model, tmp_path / "out")
    close_broken(model)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["nvme"]


def test_killed_in_the_middle_leaves_nothing_under_the_name(tmp_path: Path) -> None:
    code = (
        "import os, signal, zero_offload as zo, tests.helpers.models as m\n"
        "from zero_offload.checkpoint.hf_export import FolderWriter\n"
        "model = zo.offload(m.build(m.TinyLM), zo.OffloadConfig())\n"
        "FolderWriter.finish = lambda self: os.kill(os.getpid(), signal.SIGKILL)\n"
        f"zo.export_pretrained(model, {str(tmp_path / 'out')!r})\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    result = subprocess.run([sys.executable, "-c", code], env=environment, check=False, capture_output=True)
    assert result.returncode == -9, result.stderr
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".out.partial-")
