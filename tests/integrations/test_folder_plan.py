"""The figures of `plan` and `finetune` for a folder, against the bytes that the run takes."""

from __future__ import annotations

import copy
import json
import re
import shlex
import sys
import textwrap
import types
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import tests.helpers.tools as tools  # before transformers  # isort: skip
import torch
import transformers

import zero_offload as zo
from tests.helpers import folders
from tests.helpers.fresh import run_script
from zero_offload.base.config import OffloadConfig
from zero_offload.base.errors import ConfigError
from zero_offload.base.types import GIB, MIB, StateKind, Tier
from zero_offload.cli.main import build_parser, main
from zero_offload.finetune.choices import CAUSAL, MASKED, Lora
from zero_offload.finetune.classes import arguments_of, optimizer_class, planned_optimizer
from zero_offload.finetune.fit.figures import FolderPlan
from zero_offload.finetune.fit.job import FolderJob
from zero_offload.finetune.fit.plan import plan_job
from zero_offload.finetune.fit.rehearsal import Rehearsal, rehearse
from zero_offload.finetune.fit.text import as_json, as_text
from zero_offload.finetune.model import build
from zero_offload.finetune.model.build import build_model, meta_model
from zero_offload.finetune.model.folder import ModelFolder, open_folder
from zero_offload.finetune.settings import OUR_OPTIMIZERS, FinetuneConfig
from zero_offload.hardware.machines import default_machine, parse_drives
from zero_offload.integrations.transformers import OffloadTrainer
from zero_offload.model.api import need_runtime
from zero_offload.plan.memory import PLACED_KINDS, Budget, Placement
from zero_offload.plan.model_spec import ModelSpec
from zero_offload.plan.partition import ONE_RANK
from zero_offload.plan.shapes import SHAPES, UnitWork, work_of
from zero_offload.plan.step_time import StepBatch, StepWorkload, predict
from zero_offload.runs.number_format import format_duration

assert tools


@pytest.fixture(autouse=True)
def _nothing_is_remembered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folders.write_folder(tmp_path_factory.mktemp("folders") / "a model", num_hidden_layers=4)


@pytest.fixture(scope="module")
def folder(path: Path) -> ModelFolder:
    return open_folder(path)


# Parts of a model


def _llama(**settings: Any) -> Any:
    usual = {"num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": False}
    return transformers.LlamaConfig(**(usual | settings))


CONFIGS = {
    "llama-8b": _llama(intermediate_size=14336),
    "llama-1b": _llama(hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, tie_word_embeddings=True),
    "qwen-7b": transformers.Qwen2Config(
        hidden_size=3584,
        intermediate_size=18944,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
        vocab_size=152064,
        tie_word_embeddings=False,
    ),
    "mistral-7b": transformers.MistralConfig(),
    "mixtral-8x7b": transformers.MixtralConfig(),
    "gpt2-xl": transformers.GPT2Config(n_embd=1600, n_layer=48, n_head=25),
    "deepseek-v3": transformers.DeepseekV3Config(),
}


def _compute_s(work: tuple[UnitWork, ...], sequence: int) -> float:
    job = StepWorkload.of(work, OffloadConfig(), ONE_RANK, StepBatch(8192, 1, sequence))
    in_memory = dict.fromkeys(PLACED_KINDS, Tier.CPU)
    placement = Placement(tuple(in_memory for _ in work), Budget(24 * GIB, 1 << 50, 0, shared_memory=False))
    return predict(job, placement, default_machine("NVIDIA GeForce RTX 4090", 1)).compute_s


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_gives_the_numbers_of_the_table(name: str) -> None:
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(CONFIGS[name])
    spec, shape = ModelSpec.from_module(model), SHAPES[name]
    assert spec.numel == shape.numel
    for sequence in (512, 4096):
        found, expected = (_compute_s(work, sequence) for work in (work_of(model, spec).units, shape.units()))
        assert found == pytest.approx(expected, rel=0.01)


def test_adapters_are_trained_and_the_base_is_frozen(folder: ModelFolder) -> None:
    plain, model = meta_model(folder, None), meta_model(folder, Lora(4, 8.0))
    work = work_of(model, ModelSpec.from_module(model)).units
    adapters = sum(param.numel() for name, param in model.named_parameters() if "lora_" in name)
    assert sum(unit.numel.trained for unit in work) == adapters > 0
    assert sum(unit.numel.frozen for unit in work) == sum(param.numel() for param in plain.parameters())
    products = sum(p.numel() for name, p in plain.named_parameters() if p.dim() == 2 and "embed" not in name)
    assert sum(unit.frozen_matmul_numel for unit in work) == products
    assert sum(unit.matmul_numel for unit in work) == products + adapters


@pytest.mark.parametrize("name", ["llama-8b", "mixtral-8x7b", "deepseek-v3"])
def test_adapters_of_the_table_are_those_of_peft(name: str, tmp_path: Path) -> None:
    config = copy.deepcopy(CONFIGS[name])
    config.num_hidden_layers = layers = 4
    config.architectures = [transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__name__]
    config.save_pretrained(tmp_path)
    opened = open_folder(tmp_path, CAUSAL, needs_weights=False, needs_tokenizer=False)
    model = meta_model(opened, Lora(4, 8.0))
    units = replace(SHAPES[name], layers=layers).units(lora=4)
    trained = {name: param.numel() for name, param in model.named_parameters() if param.requires_grad}
    assert sum(unit.numel.trained for unit in units) == sum(trained.values())
    assert sum(unit.numel.frozen for unit in units) == replace(SHAPES[name], layers=layers).numel


# Tensors that a step keeps


class _Saved:
    """Adds up what a real forward saves, each storage once, without parameters."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._known = {param.untyped_storage()._cdata for param in (*model.parameters(), *model.buffers())}
        self._held: list[torch.Tensor] = []
        self.nbytes = 0

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in self._known:
            self._known.add(storage._cdata)
            self._held.append(tensor)
            self.nbytes += storage.nbytes()
        return tensor


@pytest.mark.parametrize("lora", [None, Lora(4, 8.0)])
@pytest.mark.parametrize("recompute", [False, True])
def test_a_rehearsal_keeps_what_a_step_keeps(folder: ModelFolder, lora: Lora | None, recompute: bool) -> None:
    from trl.trainer.utils import add_fused_lm_head

    rows, seq = 2, 64
    found = rehearse(folder, lora, OffloadConfig(), rows, seq, recompute=recompute)
    model: Any = folders.model("llama", num_hidden_layers=4, dtype="bfloat16")
    if lora is not None:
        model = build._with_lora(model, folder, lora, build._file_names(folder, model))
        model.to(torch.bfloat16)
    model.train()
    if recompute:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    add_fused_lm_head(model.get_base_model() if lora else model, outputs=("log_probs", "entropy", "is_top1"))
    ids, mask = torch.zeros((rows, seq), dtype=torch.int64), torch.ones((rows, 1, seq, seq), dtype=torch.bool)
    saved = _Saved(model)
    with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda tensor: tensor):
        model(input_ids=ids, attention_mask=mask, labels=ids, fused_lm_head=True)
    # The batch itself is there before the operations that are counted.
    assert 0 <= sum(found.saved_bytes.values()) - saved.nbytes <= ids.nbytes + mask.nbytes
    assert found.peak_bytes >= sum(found.saved_bytes.values()) > 0


_SMALL: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "vocab_size": 512}
_FEW_HEADS: dict[str, Any] = _SMALL | {"num_key_value_heads": 2, "head_dim": 16}
_EXPERTS: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
REPEATED = {
    "llama": (transformers.LlamaConfig(**_SMALL, num_hidden_layers=8), 5),
    "tied": (transformers.Qwen3Config(**_FEW_HEADS, num_hidden_layers=6, tie_word_embeddings=True), 3),
    "alternating": (
        transformers.Gemma3TextConfig(
            **_FEW_HEADS,
            num_hidden_layers=10,
            sliding_window=16,
            layer_types=[*["sliding_attention", "sliding_attention", "full_attention"] * 3, "sliding_attention"],
        ),
        4,
    ),
    "experts": (transformers.Qwen3MoeConfig(**_FEW_HEADS, **_EXPERTS, num_hidden_layers=7), 4),
    "encoder": (transformers.BertConfig(**_SMALL, num_hidden_layers=8), 5),
}
"""Configs, and how many blocks need not run."""


def _of_config(config: Any, path: Path) -> ModelFolder:
    is_encoder = isinstance(config, transformers.BertConfig)
    kinds = transformers.MODEL_FOR_MASKED_LM_MAPPING if is_encoder else transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    config = copy.deepcopy(config)
    config.architectures = [kinds[type(config)].__name__]
    config.save_pretrained(path)
    task = MASKED if is_encoder else CAUSAL
    return open_folder(path, task, needs_weights=False, needs_tokenizer=False)


def _both(opened: ModelFolder, lora: Lora | None, rows: int, *, recompute: bool) -> list[Rehearsal]:
    return [
        rehearse(opened, lora, OffloadConfig(), rows, 48, recompute=recompute, whole=whole) for whole in (True, False)
    ]


@pytest.mark.parametrize("name", REPEATED)
def test_blocks_that_are_left_out_count(name: str, tmp_path: Path) -> None:
    """Of a whole vocabulary's logits few tokens make the peak; of many it is the blocks'."""
    config, num_left_out = REPEATED[name]
    opened = _of_config(config, tmp_path)
    whole, found = _both(opened, None, 4, recompute=False)
    assert found == whole and (whole.left_out, found.left_out) == (0, num_left_out)
    whole, found = _both(opened, Lora(4, 8.0), 1, recompute=True)
    # The peak of an encoder is where blocks have ended that keep something: a guess is not made.
    assert found == whole and found.left_out == (0 if name == "encoder" else num_left_out)


def test_a_model_whose_blocks_share_keys_runs_whole(tmp_path: Path) -> None:
    config = transformers.Gemma3nTextConfig(
        **_FEW_HEADS | {"intermediate_size": [128] * 10},
        num_hidden_layers=10,
        sliding_window=16,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=512,
        layer_types=[*["sliding_attention"] * 4, "full_attention"] * 2,
        num_kv_shared_layers=5,
        laurel_rank=8,
        activation_sparsity_pattern=[0.0] * 10,
    )
    whole, found = _both(_of_config(config, tmp_path), None, 2, recompute=False)
    assert found == whole and found.left_out == 0


def test_packages_that_a_rehearsal_imports_have_their_tables(folder: ModelFolder) -> None:
    """Tables that they make as they are imported have values: what computes with them comes later."""
    script = """
    import sys
    from pathlib import Path
    from zero_offload.base.config import OffloadConfig
    from zero_offload.finetune.choices import CAUSAL
    from zero_offload.finetune.fit.rehearsal import rehearse
    from zero_offload.finetune.model.folder import open_folder
    rehearse(open_folder(Path(sys.argv[1]), CAUSAL), None, OffloadConfig(), 1, 8, recompute=False)
    from bitsandbytes.backends.utils import CODE
    print(len(CODE["nf4"].tolist()))
    """
    ended = run_script(textwrap.dedent(script), str(folder.path), timeout_s=240)
    assert ended.stdout.strip() == "16", ended.stderr


def test_recompute_and_fewer_rows_take_less(folder: ModelFolder) -> None:
    def peak(rows: int, seq: int, *, recompute: bool) -> int:
        return rehearse(folder, None, OffloadConfig(), rows, seq, recompute=recompute).peak_bytes

    assert peak(1, 64, recompute=True) < peak(4, 64, recompute=True) < peak(4, 64, recompute=False)
    assert peak(4, 64, recompute=True) < peak(4, 128, recompute=True)


def test_very_many_rows_are_told_by_few(folder: ModelFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = rehearse(folder, None, OffloadConfig(), 32, 64, recompute=True)
    found = rehearse(folder, None, OffloadConfig(), 8, 64, recompute=True).of_rows(32)
    assert (found.rows, found.seq, [*found.saved_bytes]) == (32, 64, [*whole.saved_bytes])
    sizes = [(whole.peak_bytes, found.peak_bytes)]
    sizes += [(nbytes, found.saved_bytes[name]) for name, nbytes in whole.saved_bytes.items()]
    assert all(of_all <= by_few <= 1.2 * of_all for of_all, by_few in sizes), sizes
    rows = []

    def rehearsed(*args: Any, **settings: Any) -> Any:
        rows.append(args[3])
        return rehearse(*args, **settings)

    monkeypatch.setattr("zero_offload.finetune.fit.work.rehearse", rehearsed)
    plan = plan_job(_job(folder, tmp_path, batch=10**9, steps=2**62), tmp_path, tries=False)
    assert rows == [2048] and not plan.fits
    assert "until" not in as_text(plan_job(_job(folder, tmp_path, steps=2**62), tmp_path, tries=False))


def test_a_model_that_cannot_be_rehearsed_is_estimated(
    folder: ModelFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = plan_job(_job(folder, tmp_path), tmp_path)
    monkeypatch.setattr("zero_offload.finetune.fit.work.rehearse", lambda *_, **__: torch.zeros(1)[2])
    for recompute in (True, False):
        plan = plan_job(_job(folder, tmp_path, recompute=recompute), tmp_path)
        assert plan.fits and "activations are estimated" in as_text(plan) and "(IndexError)" in as_text(plan)
        assert plan.activations[Tier.DEVICE] > 0
    assert "estimated" not in as_text(known)


def test_a_config_that_is_not_understood_is_one_line_of_the_plan(folder: ModelFolder, tmp_path: Path) -> None:
    assert plan_job(_job(folder, tmp_path), tmp_path).notes == ()
    config = copy.deepcopy(folder.config)
    config.moe_topk = "two"
    text = as_text(plan_job(_job(replace(folder, config=config), tmp_path), tmp_path))
    assert text.count("LlamaConfig.moe_topk is not understood") == 1 and "it is 'two'\n" in text


# The plan and its run


def _job(folder: ModelFolder, nvme: Path, lora: Lora | None = None, **settings: Any) -> FolderJob:
    tiers = dict.fromkeys(("params", "grads", "optimizer"), "auto")
    offload = OffloadConfig(**tiers, nvme=nvme, commit_every="auto")
    return replace(FolderJob(folder, offload, lora, batch=2, accumulate=2, seq=64, steps=10), **settings)


def _step(model: Any, num_micro_batches: int, optimizer: Any = None) -> None:
    trained = [param for param in model.parameters() if param.requires_grad]
    optimizer = optimizer or zo.AdamW(trained, lr=1e-3)
    for _ in range(num_micro_batches):
        ids = torch.arange(128).view(2, 64)
        model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    zo.commit(model, optimizer)


@pytest.mark.parametrize("lora", [None, Lora(4, 8.0)])
@pytest.mark.parametrize("budget", [None, "256KiB"])
def test_a_run_is_placed_as_planned(folder: ModelFolder, tmp_path: Path, lora: Lora | None, budget: str | None) -> None:
    """Tiers of every unit, and the swap file to the byte; with a small budget something is on NVMe."""
    job = _job(folder, tmp_path / "nvme", lora)
    if budget is not None:
        job = replace(job, offload=replace(job.offload, cpu_memory=budget))
    plan = plan_job(job, tmp_path, tries=False)
    placed = {tier for at in plan.planned.placement.tiers for tier in at.values()}
    assert (Tier.NVME in placed) is (budget is not None)
    model = build_model(folder, plan.offload if plan.fits else replace(plan.offload, cpu_memory=None), lora)
    try:
        assert need_runtime(model, "test").sizes.placement.tiers == plan.planned.placement.tiers
        _step(model, job.accumulate)
    finally:
        zo.close(model)
    swap = sum(each.stat().st_size for each in (tmp_path / "nvme").glob("*swap*"))
    planned = plan.planned.memory.used_bytes(Tier.NVME)
    numel = sum(unit.numel.trained + unit.numel.frozen for unit in plan.planned.workload.work)
    assert planned <= swap + MIB and swap <= planned + 40 * numel  # sections are padded to sectors


@pytest.mark.parametrize(
    "name", ["torch.optim.NAdam", "torch.optim.Adafactor", "torch.optim.SGD", "zo.Lion", "zo.Muon"]
)
def test_states_of_the_optimizer_are_planned(folder: ModelFolder, tmp_path: Path, name: str) -> None:
    """As `zo.plan` has them of the same model, and the swap file as a run takes it."""
    job = replace(_job(folder, tmp_path / "nvme"), optimizer=name, lr=1e-3)
    job = replace(job, offload=replace(job.offload, optimizer="nvme", params="nvme", grads="cpu"))
    plan = plan_job(job, tmp_path, tries=False)
    assert plan.fits
    model = meta_model(folder, None)
    alike = zo.plan(
        model, plan.offload, optimizer=planned_optimizer(name, model, 1e-3, 0.0), micro_batches=job.accumulate
    )
    memory = plan.planned.memory
    assert memory.rest_bytes == alike.rest_bytes
    assert memory.staging_bytes == alike.staging_bytes
    adamw = plan_job(replace(job, optimizer=""), tmp_path, tries=False).planned.memory
    at_rest = [each.rest_bytes[Tier.NVME, StateKind.OPTIMIZER] for each in (memory, adamw)]
    assert (at_rest[0] < at_rest[1]) is (name != "torch.optim.NAdam")
    shown = as_text(plan)
    assert f"stepped by {name}: " in shown
    assert ("sections in memory at once" in shown) is (name != "zo.Lion")
    model = build_model(folder, plan.offload, None)
    try:
        made = optimizer_class(name)(list(model.parameters()), **arguments_of(name, 1e-3))
        _step(model, job.accumulate, OffloadTrainer.taken(made))
    finally:
        zo.close(model)
    swap = sum(each.stat().st_size for each in (tmp_path / "nvme").glob("*swap*"))
    numel = sum(unit.numel.trained + unit.numel.frozen for unit in plan.planned.workload.work)
    assert memory.used_bytes(Tier.NVME) <= swap + MIB and swap <= memory.used_bytes(Tier.NVME) + 40 * numel


def test_a_plan_for_other_states_fits_where_two_states_fit(folder: ModelFolder, tmp_path: Path) -> None:
    job = replace(_job(folder, tmp_path / "nvme"), optimizer="torch.optim.SGD", lr=1e-3)
    job = replace(job, offload=replace(job.offload, optimizer="cpu", params="cpu", grads="cpu", durability="scratch"))
    needed = plan_job(replace(job, optimizer=""), tmp_path, tries=False).states_bytes
    plan = plan_job(replace(job, offload=replace(job.offload, cpu_memory=needed - MIB // 8)), tmp_path, tries=False)
    assert plan.states_bytes < needed - MIB // 8
    assert not plan.fits
    assert "zo.offload, with two states of each parameter: " in as_text(plan)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("torch.optim.Nadam", "torch.optim has no optimizer of that name; did you mean NAdam"),
        ("torch.optim.Optimizer", "cannot be built for this model"),
        ("torch.optim.Muon", "cannot be built for this model: Muon only supports 2D parameters"),
        ("torch.optim.LBFGS", "cannot step one section of a model after the other: coupled: its step needs closure"),
        ("torch.optim.Rprop", "has no weight decay; leave --weight-decay 0.1 out"),
        ("heavyball.None", "heavyball cannot be imported"),
        ("came_pytorch.Modes", "weights of training and of evaluation are two kinds there"),
        ("came_pytorch.GaLore", "is AdamW without a rank in its param groups"),
    ],
)
def test_classes_that_do_not_train_a_folder(
    folder: ModelFolder, monkeypatch: pytest.MonkeyPatch, name: str, says: str
) -> None:
    modes: Any = type("Modes", (torch.optim.SGD,), {"train": print, "eval": print})
    others: Any = types.SimpleNamespace(Modes=modes, GaLore=type("GaLore", (torch.optim.AdamW,), {}))
    monkeypatch.setitem(sys.modules, "came_pytorch", others)
    monkeypatch.setitem(sys.modules, "heavyball", None)
    with pytest.raises(ConfigError, match=re.escape(says)):
        planned_optimizer(name, meta_model(folder, None), 1e-3, 0.1 if "Rprop" in name else 0.0)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"optimizer": "nvme", "lr": 1e-3}, "optimizer='nvme' is a tier"),
        ({"optimizer": "os.path", "lr": 1e-3}, "optimizer='os.path' is unknown; name a class"),
        ({"optimizer": "zo.Adamw", "lr": 1e-3}, "There are zo.AdamW"),
        ({"optimizer": "zo.Lion"}, "give --lr"),
        ({"optimizer": "zo.Lion", "lr": 1e-3, "live_blocks": 2}, "leave one out"),
        ({"optimizer": 3, "lr": 1e-3}, "optimizer=3 is unknown"),
    ],
)
def test_names_of_optimizers_are_checked(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        FinetuneConfig.from_tables({"model": "m", "data": "d", **settings}, {})


def test_names_of_our_optimizers_are_those_of_the_package() -> None:
    public = [getattr(zo, name) for name in zo.__all__]
    kinds = {each.__name__ for each in public if isinstance(each, type) and issubclass(each, torch.optim.Optimizer)}
    assert kinds == {*OUR_OPTIMIZERS}


def test_what_the_run_gets_leaves_room_for_activations(folder: ModelFolder, tmp_path: Path) -> None:
    plan = plan_job(_job(folder, tmp_path), tmp_path)
    assert plan.fits
    limit = plan.offload.budget_bytes(Tier.CPU)
    assert limit is not None
    assert limit + sum(plan.activations.values()) + plan.program_bytes < plan.host_bytes
    assert plan.activations[Tier.DEVICE] == rehearse(folder, None, OffloadConfig(), 2, 64, recompute=True).peak_bytes


# Plans that do not fit


@pytest.fixture(scope="module")
def large(folder: ModelFolder) -> Iterator[ModelFolder]:
    """450M parameters, of which there is a config alone."""
    config = _llama(hidden_size=2048, intermediate_size=8192, num_hidden_layers=3, tie_word_embeddings=True)
    with pytest.MonkeyPatch.context() as patch:
        names = build._file_names(folder, folders.model())
        patch.setattr(build, "_file_names", lambda *_: replace(names, fresh=frozenset()))
        yield replace(folder, config=config)


@pytest.fixture(scope="module")
def too_large(large: ModelFolder, tmp_path_factory: pytest.TempPathFactory) -> FolderPlan:
    there = {"gpu": "rtx4090", "ram": "8GiB", "drives": parse_drives(["7GB/s"])}
    job = _job(large, tmp_path_factory.mktemp("nvme"), batch=64, accumulate=1, seq=4096, **there)
    return plan_job(job, None)


def test_ways_fit_and_are_planned_anew(too_large: FolderPlan) -> None:
    assert not too_large.fits and "GPU: needs" in too_large.shortages[0]
    assert too_large.alternatives
    for way in too_large.alternatives:
        assert way.plan.fits and way.plan.step_s > 0 and way.plan.run_s == 10 * way.plan.step_s
        job = way.plan.job
        expected = {"--batch": job.batch, "--accumulate": job.accumulate, "--seq": job.seq}
        for flag, value in zip(way.flags[::2], way.flags[1::2], strict=True):
            assert value == str(expected.get(flag, value))
        assert job.batch * job.accumulate == 64
    flags = [way.flags for way in too_large.alternatives]
    assert len(set(flags)) == len(flags)
    assert any("--lora" in each for each in flags) and any("--activations-tier" in each for each in flags)


def test_tiers_are_changed_where_that_alone_does_not_help(large: ModelFolder, tmp_path: Path) -> None:
    """Of ways with one aim the least change that fits is named."""
    there = {"gpu": "rtx4090", "ram": "5GiB", "drives": parse_drives(["7GB/s"])}
    job = _job(large, tmp_path, **there)
    plan = plan_job(replace(job, offload=replace(job.offload, optimizer="cpu")), None)
    assert [way.flags for way in plan.alternatives] == [
        ("--optimizer-tier", "auto"),
        ("--optimizer-tier", "auto", "--states", "compact"),
        ("--optimizer-tier", "auto", "--live-blocks", "1"),
        ("--lora", "16"),
    ]


@pytest.mark.parametrize("has_adapter", [False, True])
def test_the_base_is_quantized_where_adapters_alone_do_not_fit(
    has_adapter: bool, large: ModelFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("bitsandbytes")
    tried: list[tuple[Lora | None, str | None]] = []

    def looks(job: FolderJob, plan_of: Any) -> None:
        tried.append((job.lora, job.folder.quantize))

    lora = Lora(16, 32.0)
    job = _job(large, tmp_path, gpu="rtx4090", ram="1GiB", drives=parse_drives(["7GB/s"]))
    job = replace(job, lora=lora if has_adapter else None)
    monkeypatch.setattr("zero_offload.finetune.fit.alternatives._first_that_fits", looks)
    assert not plan_job(job, None).fits
    assert tried[-2:] == [(lora, "int8"), (lora, "nf4")] and tried[-3] == (lora, None)
    tried.clear()
    plan_job(replace(job, folder=replace(large, quantize="nf4"), lora=lora), None)
    assert tried and all(kind == "nf4" for _, kind in tried)


def test_it_says_what_would_fit(too_large: FolderPlan) -> None:
    lines = as_text(too_large).splitlines()
    head, *ways = lines[lines.index("what would fit:") + 1 :]
    assert re.split(" {2,}", head.strip()) == [
        "a step",
        "tokens/s",
        "in all",
        "written",
        "a 600 TB drive lasts",
        "with",
    ]
    assert len(ways) == len(too_large.alternatives)
    for line, way in zip(ways, too_large.alternatives, strict=True):
        step, speed, run, written, life, flags = re.split(" {2,}", line.strip())
        assert (step, run) == (format_duration(way.plan.step_s), format_duration(10 * way.plan.step_s))
        assert float(speed.replace(",", "")) > 0 and written.endswith("B") and "day" in life + "days" * ("year" in life)
        assert flags == " ".join(way.flags)
    assert as_json(too_large)["fits"] is False


def test_a_run_that_wears_drives_out_names_what_does_not(folder: ModelFolder, tmp_path: Path) -> None:
    """The same run is a small part of a large drive's life, and most of a small one's."""
    job = _job(folder, tmp_path / "nvme", steps=1000)
    job = replace(job, offload=replace(job.offload, params="nvme", optimizer="nvme"))
    quiet = plan_job(job, tmp_path)
    share = quiet.endured_share
    assert quiet.fits and quiet.written_bytes and share is not None
    assert not quiet.alternatives and "drives are written less:" not in as_text(quiet)
    loud = plan_job(replace(job, tbw=job.tbw * share / 0.5), tmp_path)
    assert loud.fits and ("--lora", "16") in [way.flags for way in loud.alternatives]
    assert all(2 * way.plan.written_per_step <= loud.written_per_step for way in loud.alternatives)
    assert "drives are written less:" in as_text(loud)


def test_a_full_disk_is_short(folder: ModelFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zero_offload.finetune.fit.plan.nvme_free_bytes", lambda _: 4 * MIB)
    plan = plan_job(_job(folder, tmp_path / "nvme"), tmp_path)
    (place,) = plan.places  # swap files and outputs are on one disk, whose free space counts once
    assert set(place.needed) == {"swap files", "activations", "model"} and place.free_bytes == 4 * MIB
    assert not plan.fits and f"{place.name}: needs" in plan.shortages[0]
    assert [way.flags for way in plan.alternatives][-1] == ("--lora", "16")


# Frozen bases


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> ModelFolder:
    """A config alone, of 8 experts of 0.8M parameters in each of 4 layers."""
    path = tmp_path_factory.mktemp("mixture")
    config = transformers.Qwen3MoeConfig(
        vocab_size=512,
        hidden_size=256,
        moe_intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        num_experts=8,
        num_experts_per_tok=2,
        architectures=["Qwen3MoeForCausalLM"],
        dtype="bfloat16",
    )
    config.save_pretrained(path)
    return open_folder(path, needs_weights=False, needs_tokenizer=False)


ELSEWHERE = {"gpu": "rtx4090", "ram": "64GiB"}


def test_a_frozen_base_is_read_from_its_files_and_a_step_writes_nothing(mixture: ModelFolder, tmp_path: Path) -> None:
    tiers = {"params": {"device": 0.2, "nvme": 0.8}, "grads": "device", "optimizer": "device"}
    offload = OffloadConfig(**tiers, nvme=tmp_path, precision="bf16", durability="scratch")
    job = FolderJob(mixture, offload, Lora(4, 8.0), drives=parse_drives(["1GB/s"]), **ELSEWHERE)
    plan = plan_job(job, None)
    assert plan.fits and plan.written_per_step == 0 == plan.planned.memory.used_bytes(Tier.NVME)
    lines = as_text(plan).splitlines()
    assert "a step writes nothing to drives" in lines
    # A drive this slow is what a step waits for: twice of it take half as long.
    assert plan.one_more_drive is not None and plan.one_more_drive.step_s < 0.6 * plan.step_s
    assert plan.hidden_tokens is not None and plan.hidden_tokens > job.tokens
    assert any(line.startswith("  with one more such drive") for line in lines)
    found = as_json(plan)
    assert found["one_more_drive_step_s"] == plan.one_more_drive.step_s
    assert found["hidden_from_tokens"] == plan.hidden_tokens
    # "auto" has the same of what is trained.
    auto = plan_job(replace(job, offload=replace(offload, params="auto", grads="auto", optimizer="auto")), None)
    assert auto.fits and auto.offload.grads == auto.offload.optimizer == "device"


def test_other_dtypes_are_copied(mixture: ModelFolder, tmp_path: Path) -> None:
    offload = OffloadConfig(params="nvme", nvme=tmp_path, precision="fp32", durability="scratch")
    job = FolderJob(mixture, offload, Lora(4, 8.0), drives=parse_drives(["1GB/s"]), **ELSEWHERE)
    plan = plan_job(job, None)
    assert plan.planned.memory.rest_bytes[Tier.NVME, PLACED_KINDS[0]] == sum(
        unit.params_bytes for unit in plan.planned.workload.units
    )


def test_scales_of_quantized_weights_are_in_no_file(folder: ModelFolder, tmp_path: Path) -> None:
    """They have the dtype of a folder in fp32."""
    pytest.importorskip("bitsandbytes")
    assert folder.config.dtype == torch.float32
    job = _job(replace(folder, quantize="nf4"), tmp_path / "nvme", Lora(1, 2.0))
    plan = plan_job(job, tmp_path)
    assert not any(unit.numel.base_bytes for unit in plan.planned.workload.work if unit.quantized_numel)


def test_groups_of_experts_take_less_of_a_gpu(mixture: ModelFolder, tmp_path: Path) -> None:
    offload = OffloadConfig(params="nvme", nvme=tmp_path, precision="bf16")
    job = FolderJob(mixture, offload, Lora(4, 8.0), batch=1, seq=64, drives=parse_drives(["1GB/s"]), **ELSEWHERE)

    def in_flight(job: FolderJob) -> int:
        return plan_job(job, None).planned.memory.staging_bytes[Tier.DEVICE]

    one, all_of_them = (in_flight(replace(job, folder=replace(mixture, group_size=size))) for size in (1, 8))
    expert = 3 * 256 * 1024 * 2
    assert 8 * expert < all_of_them - one < 2 * 8 * expert  # what is read of one is whole chunks


def test_a_token_meets_the_adapters_of_its_experts(mixture: ModelFolder, tmp_path: Path) -> None:
    plan = plan_job(_job(mixture, tmp_path, Lora(4, 8.0, targets=("experts",))), tmp_path, tries=False)
    works = plan.planned.workload.work
    trained = sum(work.numel.trained for work in works)
    assert trained == 4 * 4 * 8 * ((256 + 2 * 1024) + (1024 + 256))
    assert sum(work.matmul_numel - work.frozen_matmul_numel for work in works) == pytest.approx(trained * 2 / 8)
    assert plan.adapted == ("experts.gate_up_proj", "experts.down_proj")


def test_a_group_size_is_of_frozen_experts(folder: ModelFolder, mixture: ModelFolder, tmp_path: Path) -> None:
    for each, lora in ((folder, Lora(4, 8.0)), (mixture, None)):
        job = _job(replace(each, group_size=2), tmp_path, lora)
        with pytest.raises(ConfigError, match=r"--group-size 2 is of frozen experts"):
            plan_job(job, None)


def test_quantized_bases_are_counted_in_their_own_bytes(folder: ModelFolder, tmp_path: Path) -> None:
    """And parameters, compute and adapters as of the weights that are made of them."""
    pytest.importorskip("torchao")
    pytest.importorskip("bitsandbytes")
    job = _job(folder, tmp_path / "nvme", Lora(1, 2.0))
    plain = plan_job(job, tmp_path).planned.workload
    for kind, nbytes in (("int8", 1 + 4 / 64), ("nf4", 0.5 + 4 / 64), ("fp8", 1 + 4 / 64)):
        plan = plan_job(replace(job, folder=replace(folder, quantize=kind)), tmp_path)
        assert plan.fits
        works, units = plan.planned.workload.work, plan.planned.workload.units
        for name in ("trained", "frozen"):
            assert [getattr(each.numel, name) for each in works] == [getattr(each.numel, name) for each in plain.work]
        assert [each.matmul_numel for each in works] == [each.matmul_numel for each in plain.work]
        for work, unit, other in zip(works, units, plain.units, strict=True):
            assert (work.quantized_numel > 0) is (work.attention_width > 0)
            expected = other.frozen_bytes - (2 - nbytes) * work.quantized_numel
            assert unit.frozen_bytes == pytest.approx(expected, rel=0.06)
        assert sum(unit.frozen_bytes for unit in units) < sum(unit.frozen_bytes for unit in plain.units)


# The commands


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return folders.write_instructions(tmp_path_factory.mktemp("data") / "chat's.jsonl", 40)


def test_plan_and_dry_run_say_the_same(
    path: Path, chat: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [str(path), "--data", str(chat), "--lora", "4", "--batch", "2", "--accumulate", "2", "--seq", "128"]
    flags += ["--out", str(tmp_path / "out")]
    assert main(["plan", *flags]) == 0
    planned = capsys.readouterr().out.splitlines()
    assert main(["finetune", *flags, "--dry-run"]) == 0
    told = capsys.readouterr().out.splitlines()
    changing = ("sft: ", "learning rate ", "  total", "  program", "  available", "disk of")
    same = [line for line in told if not line.startswith(changing) and ", until " not in line]
    assert "it fits" in same and len(same) > 10
    assert [line for line in same if line not in planned] == []
    assert planned[-2] == "the run:"
    words = shlex.split(planned[-1])
    assert words[:2] == ["zero-offload", "finetune"]
    parsed, given = (vars(build_parser().parse_args(each)) for each in (words[1:], ["finetune", *flags]))
    assert parsed.pop("parser").prog == given.pop("parser").prog
    assert parsed == given


def test_tokens_per_step(path: Path, chat: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiers = ["--params-tier", "nvme", "--grads-tier", "cpu", "--optimizer-tier", "nvme"]
    assert main(["plan", str(path), "--data", str(chat), "--batch", "1", "--accumulate", "4", *tiers, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    rows = found["by_tokens"]
    assert [row["accumulate"] for row in rows] == [1, 2, 4, 8, 16, 32]
    assert {row["written_bytes_per_step"] for row in rows} == {found["written_bytes_per_step"]}
    assert rows[0]["drive_life_days"] < rows[2]["drive_life_days"] < rows[-1]["drive_life_days"]
    assert found["steps"] == -(-json.loads(_rows(chat, path)) // 4)
    assert found["written_bytes"] > found["steps"] * found["written_bytes_per_step"] > 0


def _rows(chat: Path, path: Path) -> str:
    from zero_offload.finetune.data.prepare import prepare

    return str(len(prepare([str(chat)], open_folder(path), seq=256).train))


def test_another_machine(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    there = ["--gpu", "rtx4090", "--ram", "64GiB", "--nvme", "2x7GB/s", "--ranks", "2"]
    assert main(["plan", "--model", str(path), *there]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.split() == ["of", "one", "rank:", "gpu", "memory", "nvme"] for line in lines)
    assert lines[-2] == "the run on that machine:"
    quoted = shlex.quote(str(path))
    assert lines[-1] == f"  torchrun --nproc-per-node 2 -m zero_offload finetune {quoted} --data chat.jsonl"
    assert not any(", until " in line for line in lines)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--tokens", "5"], "--tokens: of a folder give --batch, --seq and --accumulate"),
        (["--batch", "0"], "batch=0 is not a positive whole number"),
        (["--model", "small"], "both say what to plan; give one of them"),
    ],
)
def test_flags_that_do_not_go_with_a_folder(
    path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], words: str
) -> None:
    assert main(["plan", str(path), *flags]) == 2
    assert words in capsys.readouterr().err
