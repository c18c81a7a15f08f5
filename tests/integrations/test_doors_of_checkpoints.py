"""Doors of checkpoints that other libraries write while they train: DeepSpeed, accelerate, FSDP."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import tests.helpers.tools as tools  # before transformers  # isort: skip
import accelerate
import torch
import torch.distributed.checkpoint as dcp
import transformers
from accelerate.utils import merge_fsdp_weights
from safetensors.torch import save_file
from torch import Tensor

import zero_offload as zo
from tests.helpers.reference import read_masters
from tests.integrations.test_doors import AUTO, IDS, is_same, offloaded, tensors

pytestmark = pytest.mark.tools
FP32 = zo.OffloadConfig(precision="fp32")
FROZEN = "model.layers.0."


def is_loaded(folder: Path, expected: dict[str, Tensor], **changes: Any) -> bool:
    """Whether `zo.load_pretrained` into a model without memory gives these values."""
    with zo.deferred_init(values="skip"):
        model = tools.llama(**changes)
    zo.load_pretrained(model, folder)
    zo.offload(model, FP32)
    try:
        return is_same(dict(model.state_dict()), expected)
    finally:
        zo.close(model)


# DeepSpeed

SCRIPT = """
import sys
import torch
import tests.helpers.tools as tools
import deepspeed
from deepspeed.utils import safe_get_full_fp32_param as master_of

sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None  # it would be compiled
place, stage, tied = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "tied"
deepspeed.init_distributed("gloo")
model = tools.llama(tie_word_embeddings=tied).bfloat16()
frozen = {name: param.detach().clone() for name, param in model.named_parameters() if sys.argv[4] in name}
for name, param in model.named_parameters():
    param.requires_grad_(name not in frozen)
optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-2)
config = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": stage}, "bf16": {"enabled": True}}
config |= {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False}
engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
ids = torch.arange(3, 19).view(1, 16)
engine.backward(engine(input_ids=ids, labels=ids).loss)
engine.step()
engine.save_checkpoint(place)
names = [name for name, param in model.named_parameters() if param.requires_grad]
torch.save(frozen | {name: master_of(dict(model.named_parameters())[name]) for name in names}, f"{place}/expected.pt")
"""


def ran(*words: object) -> subprocess.CompletedProcess[str]:
    """In a process of its own, as one rank: DeepSpeed changes torch where it is imported."""
    alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29591"}
    environment = os.environ | alone | {"DS_ACCELERATOR": "cpu"}
    return subprocess.run([sys.executable, *map(str, words)], env=environment, capture_output=True, text=True)


def trained(place: Path, stage: int, *, tied: bool = False) -> dict[str, Tensor]:
    """A checkpoint of DeepSpeed in `place`, and its weights."""
    pytest.importorskip("deepspeed.ops", reason="deepspeed is not installed")
    place.mkdir()
    made = ran("-c", SCRIPT, place, stage, "tied" if tied else "untied", FROZEN)
    assert made.returncode == 0, made.stderr[-2000:]
    found: dict[str, Tensor] = torch.load(place / "expected.pt")
    (place / "expected.pt").unlink()
    return found


@pytest.mark.door(
    "deepspeed",
    load="`zo.load_pretrained`",
    between="`zero_to_fp32 --safe_serialization` of ZeRO-2 and ZeRO-3 with frozen parameters",
    outcome="right",
)
@pytest.mark.door(
    "deepspeed",
    load="`zo.load_pretrained`",
    between="a checkpoint of ZeRO-2 and ZeRO-3, a universal one",
    outcome="refused: the format",
    instead="`zero_to_fp32 --safe_serialization`",
)
@pytest.mark.parametrize("stage", [2, 3])
def test_checkpoints_of_zero(stage: int, tmp_path: Path) -> None:
    expected = trained(tmp_path / "run", stage)
    made = ran(tmp_path / "run" / "zero_to_fp32.py", tmp_path / "run", tmp_path / "out", "--safe_serialization")
    assert made.returncode == 0, made.stderr[-2000:]
    model = tools.llama()
    for name, param in model.named_parameters():
        param.requires_grad_(FROZEN not in name)
    offloaded(model, tmp_path / "nvme")
    zo.load_pretrained(model, tmp_path / "out")
    found = read_masters(model)
    assert all(torch.equal(found[name].float(), value.float()) for name, value in expected.items())
    step = next((tmp_path / "run").glob("global_step*"))
    for folder in (tmp_path / "run", step, next(step.glob("*_model_states.pt"))):
        with pytest.raises(zo.CheckpointError, match=rf"DeepSpeed\. python {tmp_path}/run/zero_to_fp32.py {tmp_path}/"):
            zo.load_pretrained(model, folder)
    convert = "from deepspeed.checkpoint.ds_to_universal import *; main(parse_arguments())"
    made = ran("-c", convert, "--input_folder", step, "--output_folder", tmp_path / "all", "--inject_missing_state")
    assert made.returncode == 0, made.stderr[-2000:]
    with pytest.raises(zo.CheckpointError, match="universal checkpoint of DeepSpeed. Run zero_to_fp32.py of the"):
        zo.load_pretrained(model, tmp_path / "all")
    zo.close(model)


@pytest.mark.door(
    "deepspeed",
    load="a checkpoint of ZeRO-2",
    between="tied weights",
    save="`zero_to_fp32 --safe_serialization`",
    outcome="refused: a RuntimeError of safetensors",
    instead="`get_fp32_state_dict_from_zero_checkpoint`, and `save_file` without one of the names",
)
def test_tied_weights_of_zero(tmp_path: Path) -> None:
    expected = trained(tmp_path / "run", 2, tied=True)
    made = ran(tmp_path / "run" / "zero_to_fp32.py", tmp_path / "run", tmp_path / "out", "--safe_serialization")
    assert made.returncode != 0 and "share memory" in made.stderr
    zero: Any = pytest.importorskip("deepspeed.utils.zero_to_fp32")
    values = zero.get_fp32_state_dict_from_zero_checkpoint(str(tmp_path / "run"))
    del values["lm_head.weight"]
    (tmp_path / "ours").mkdir()
    save_file({name: value.contiguous() for name, value in values.items()}, tmp_path / "ours" / "model.safetensors")
    expected = {name: value.float() for name, value in expected.items()}
    expected["lm_head.weight"] = expected["model.embed_tokens.weight"]
    assert is_loaded(tmp_path / "ours", expected, tie_word_embeddings=True)


@pytest.mark.parametrize(
    ("names", "says"),
    [
        (["run/zero_to_fp32.py", "run/latest"], r"DeepSpeed\. python \S+/run/zero_to_fp32.py \S+/run OUT"),
        (["run/mp_rank_00_model_states.pt"], r"DeepSpeed\. python \S+/zero_to_fp32.py"),
        (["run/mp_rank_00_model_states.pt", "run/zero/x/fp32.pt"], "universal checkpoint of DeepSpeed"),
        (["run/.metadata", "run/__0_0.distcp"], r"torch.distributed.checkpoint.*dcp.load\("),
        (["run/pytorch_model.bin"], "but pytorch_model.bin .pickled weights"),
    ],
)
def test_folders_of_checkpoints_are_told_apart(names: list[str], says: str, tmp_path: Path) -> None:
    """By their files, where no library is installed too."""
    for name in names:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    model = zo.offload(tools.llama(), FP32)
    with pytest.raises(zo.CheckpointError, match=says):
        zo.load_pretrained(model, tmp_path / "run")
    if names[-1].endswith((".bin", "states.pt")):
        with pytest.raises(zo.CheckpointError, match="is pickled, and is not loaded"):
            zo.load_pretrained(model, tmp_path / names[-1])
    zo.close(model)


# accelerate

PARTS = ("model.embed_tokens", "model.layers.1", "model.layers.2", "model.norm", "model.rotary_emb", "lm_head")
MAP = dict.fromkeys(PARTS, "cpu") | {"model.layers.0": "disk"}


@pytest.mark.door(
    "accelerate, transformers",
    load="`from_pretrained(device_map=)`",
    between="blocks on disk; `cpu_offload`",
    save="`zo.offload`",
    outcome="refused: values that accelerate keeps elsewhere",
    instead="`from_pretrained` without them, or `zo.load_pretrained`",
)
@pytest.mark.door(
    "accelerate, transformers",
    load="`from_pretrained(device_map=)`, then `zo.offload`",
    between="all on the CPU",
    save="`zo.export_pretrained`",
    outcome="right",
)
def test_device_maps(tmp_path: Path) -> None:
    tools.llama().save_pretrained(tmp_path / "base")
    expected = tensors(tmp_path / "base")
    model = AUTO.from_pretrained(tmp_path / "base", device_map=MAP, offload_folder=str(tmp_path / "disk"))
    with pytest.raises(zo.ConfigError, match=r"the model has values that accelerate keeps elsewhere.*load_pretrained"):
        zo.offload(model, FP32)
    model = accelerate.cpu_offload(AUTO.from_pretrained(tmp_path / "base"), execution_device=torch.device("cpu"))
    with pytest.raises(zo.ConfigError, match="has values that accelerate keeps elsewhere"):
        zo.offload(model, FP32)
    for name, where in {"auto": "auto", "cpu": {"": "cpu"}}.items():
        model = zo.offload(AUTO.from_pretrained(tmp_path / "base", device_map=where), FP32)
        zo.export_pretrained(model, tmp_path / name)
        zo.close(model)
        assert is_same(tensors(tmp_path / name), expected)


@pytest.mark.door(
    "accelerate, transformers",
    load="`load_checkpoint_and_dispatch` of a folder by `zo.export_pretrained`",
    between="blocks on the CPU and on disk",
    outcome="right",
)
@pytest.mark.door(
    "accelerate, transformers",
    load="`zo.load_pretrained`",
    between="`Accelerator.save_model` of a plain model, and of an offloaded one",
    outcome="right",
)
@pytest.mark.parametrize("tied", [False, True])
def test_folders_of_accelerate(tied: bool, tmp_path: Path) -> None:
    model = tools.llama(tie_word_embeddings=tied)
    expected = {name: value.clone() for name, value in model.state_dict().items()}
    logits = model.eval()(IDS).logits
    accelerate.Accelerator(cpu=True).save_model(model, tmp_path / "plain")
    assert is_loaded(tmp_path / "plain", expected, tie_word_embeddings=tied)
    zo.offload(model, FP32)
    accelerate.Accelerator(cpu=True).save_model(model, tmp_path / "offloaded")
    zo.export_pretrained(model, tmp_path / "ours")
    zo.close(model)
    assert is_loaded(tmp_path / "offloaded", expected, tie_word_embeddings=tied)
    if not tied:
        with accelerate.init_empty_weights():
            empty = AUTO.from_config(transformers.AutoConfig.from_pretrained(tmp_path / "ours"))
        disk = str(tmp_path / "disk")
        empty = accelerate.load_checkpoint_and_dispatch(empty, tmp_path / "ours", device_map=MAP, offload_folder=disk)
        assert torch.equal(empty.eval()(IDS).logits, logits)


# FSDP


@pytest.mark.door(
    "accelerate, torch",
    load="`zo.load_pretrained` of what `merge_fsdp_weights` writes",
    between="a sharded checkpoint of FSDP, tied and untied",
    outcome="right",
)
@pytest.mark.door(
    "accelerate, torch",
    load="`dcp.load` of a sharded checkpoint of FSDP by accelerate",
    between="tied and untied",
    outcome="right",
)
@pytest.mark.parametrize("tied", [False, True])
def test_sharded_checkpoints_of_fsdp(tied: bool, tmp_path: Path) -> None:
    """As accelerate writes them: weights under "model"."""
    plain = tools.llama(tie_word_embeddings=tied)
    expected = {name: value.clone() for name, value in plain.state_dict().items()}
    folder = tmp_path / "pytorch_model_fsdp_0"
    dcp.save({"model": plain.state_dict()}, checkpoint_id=folder)
    merge_fsdp_weights(folder, tmp_path / "merged")
    assert is_loaded(tmp_path / "merged", expected, tie_word_embeddings=tied)
    model = zo.offload(tools.llama(tie_word_embeddings=tied), FP32)
    for param in model.parameters():
        param.data.zero_()
    with pytest.raises(zo.CheckpointError, match=r"checkpoint of torch.distributed.checkpoint.*dcp.load"):
        zo.load_pretrained(model, folder)
    dcp.load({"model": model.state_dict()}, checkpoint_id=folder)
    assert is_same(dict(model.state_dict()), expected)
    zo.close(model)
