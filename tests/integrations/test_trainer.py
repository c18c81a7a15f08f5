"""`OffloadTrainer` against transformers' Trainer over the plain model; resumed, killed, and on other ranks."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tests.helpers.tool_runs as runs  # before transformers  # isort: skip
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.data import IterableDataset
from transformers import AutoModelForCausalLM, TrainerCallback
from transformers.trainer_utils import get_last_checkpoint

import zero_offload as zo
from tests.helpers import tools
from tests.helpers.resident import peak_bytes, reset_peak
from tests.helpers.tool_runs import Outcome, Spec, in_processes, on_ranks, train
from zero_offload.integrations import transformers as transformers_module
from zero_offload.integrations.transformers import OffloadTrainer, RunLogCallback, StatsCallback

UNCLIPPED = {"max_grad_norm": 0.0}
SAVES = {"save_strategy": "steps", "save_steps": 2, "max_steps": 6}
EPOCHS: dict[str, Any] = {"max_steps": -1, "num_train_epochs": 2, "logging_steps": 4, "eval_strategy": "epoch"}
"""Six steps an epoch on one rank: a log in the midst of one, and an evaluation at its end."""
FEATURES: dict[str, Any] = {
    "gradient_accumulation_steps": 2,
    "eval_strategy": "steps",
    "eval_steps": 2,
    "max_steps": 4,
    "label_smoothing_factor": 0.1,
    "neftune_noise_alpha": 5.0,
}


def without_norms(outcome: Outcome) -> Outcome:
    """torch and the library add up the squares of a norm in another order."""
    logs = [{key: value for key, value in each.items() if key != "grad_norm"} for each in outcome.logs]
    return Outcome(logs, outcome.values)


def spec(tmp_path: Path, where: str, **changes: Any) -> Spec:
    return Spec(tmp_path / "out", tmp_path / "nvme" if where == "nvme" else None, **changes)


# The plain model's numbers


@pytest.mark.parametrize(
    ("ranks", "where", "more"),
    [
        (1, "nvme", {}),
        (1, "cpu", {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"use_reentrant": False}}),
        (2, "nvme", {"activation_checkpointing": True, "activation_checkpointing_kwargs": {"use_reentrant": True}}),
        (2, "cpu", {}),
    ],
)
def test_trains_as_the_plain_model(tmp_path: Path, ranks: int, where: str, more: dict[str, Any]) -> None:
    args = FEATURES | UNCLIPPED | more
    plain = on_ranks(ranks, train, Spec(tmp_path / "plain", args=args, is_plain=True, model_init=ranks == 1))
    ours = on_ranks(ranks, train, spec(tmp_path, where, args=args, model_init=ranks == 1))
    assert [without_norms(each) for each in ours] == [without_norms(each) for each in plain]
    for mine, theirs in zip(ours, plain, strict=True):
        norms = [[each["grad_norm"] for each in outcome.logs if "grad_norm" in each] for outcome in (mine, theirs)]
        assert norms[0] == pytest.approx(norms[1], rel=1e-6)


def test_clips_as_the_plain_model(tmp_path: Path) -> None:
    plain, ours = (train(Spec(tmp_path, args={"max_grad_norm": 0.5}, is_plain=is_plain)) for is_plain in (True, False))
    assert tools.distance(ours.values, plain.values) < 2e-7


def test_evaluates_trains_twice_and_predicts_as_the_plain_model(tmp_path: Path) -> None:
    args = UNCLIPPED | {"max_steps": 3}
    seen = []
    for each in (Spec(tmp_path / "plain", args=args, is_plain=True), spec(tmp_path, "nvme", args=args)):
        trainer = runs.make(each)
        first = trainer.evaluate()["eval_loss"]
        trainer.train()
        trainer.train()
        predictions = torch.tensor(trainer.predict(tools.Tokens(8)).predictions)
        seen.append((first, without_norms(Outcome(runs.logs_of(trainer), {"": predictions}))))
    assert seen[0] == seen[1]
    zo.close(trainer.model)


def test_updates_in_backward(tmp_path: Path) -> None:
    args = UNCLIPPED | {"gradient_accumulation_steps": 2, "max_steps": 3}
    whole = train(Spec(tmp_path / "whole", args=args))
    config = tools.config("cpu", "", overlap="backward")
    trainer = OffloadTrainer(
        model=tools.llama(attention_dropout=0.1),
        args=runs.arguments(tmp_path, **args),
        train_dataset=tools.Tokens(24),
        offload=config,
    )
    trainer.train()
    assert tools.distance(tools.values_of(trainer.model), whole.values) == 0
    zo.close(trainer.model)


# Going on


@pytest.mark.parametrize(
    ("ranks", "death"), [(1, ("on_step_begin", 3)), (1, ("on_evaluate", 6)), (2, ("on_step_begin", 7))]
)
def test_goes_on_after_a_kill(tmp_path: Path, ranks: int, death: tuple[str, int]) -> None:
    args = EPOCHS | {"num_train_epochs": 2 * ranks}
    of = {"args": args, "model_init": death[0] == "on_evaluate"}
    whole = in_processes(ranks, train, Spec(tmp_path / "whole", tmp_path / "whole_nvme", **of))
    assert in_processes(ranks, train, spec(tmp_path, "nvme", **of, die_at=death))[0] is None
    resumed = in_processes(ranks, train, spec(tmp_path, "nvme", **of))
    assert resumed == whole
    assert [each.ends for each in resumed] == [each.ends for each in whole]
    assert len(resumed[0].rows) <= (12 - death[1] + 2) * 4
    # A run that is over has nothing left to do.
    again = in_processes(ranks, train, spec(tmp_path, "nvme", **of))
    assert again == whole
    assert again[0].rows == []


def asked(spec: Spec) -> tuple[int, str]:
    with pytest.raises(SystemExit) as ended:
        train(spec)
    return ended.value.code, ended.value.by  # type: ignore[attr-defined,return-value]


@pytest.mark.parametrize(("ranks", "event", "step"), [(1, "on_step_begin", 2), (2, "on_step_end", 3)])
def test_a_signal_to_one_rank_is_a_commit_on_all(tmp_path: Path, ranks: int, event: str, step: int) -> None:
    """Step 3 is the last of an epoch on two ranks, whose commit comes behind the epoch's evaluation."""
    whole = in_processes(ranks, train, Spec(tmp_path / "whole", tmp_path / "whole_nvme", args=EPOCHS))
    by = "SIGUSR1" if ranks == 1 else "SIGUSR1 on rank 1"
    ended = in_processes(ranks, asked, spec(tmp_path, "nvme", args=EPOCHS, asked_at=(event, step, ranks - 1)))
    assert ended == [(runs.EXIT_CODE, by)] * ranks
    resumed = in_processes(ranks, train, spec(tmp_path, "nvme", args=EPOCHS))
    assert resumed == whole
    done = step + (event == "on_step_begin")
    assert [each.rows for each in resumed] == [each.rows[done * 4 :] for each in whole]


@pytest.mark.door(
    "transformers",
    load="checkpoint of `OffloadTrainer`, by itself",
    between="one and two ranks",
    save="`OffloadTrainer`",
    outcome="right",
)
@pytest.mark.parametrize(("ranks", "where"), [(1, "cpu"), (1, "nvme"), (2, "nvme")])
def test_resumes_from_a_checkpoint(tmp_path: Path, ranks: int, where: str) -> None:
    args = SAVES | {"logging_steps": 3}
    whole = on_ranks(ranks, train, Spec(tmp_path / "whole", args=args))
    out = tmp_path / "out"
    on_ranks(ranks, train, spec(tmp_path, where, args=args, stop_after=3))
    shutil.rmtree(tmp_path / "nvme", ignore_errors=True)
    assert on_ranks(ranks, train, spec(tmp_path, where, args=args), True) == whole
    assert sorted(each.name for each in out.iterdir()) == [f"checkpoint-{step}" for step in (2, 4, 6)]
    loaded = AutoModelForCausalLM.from_pretrained(out / "checkpoint-6")
    assert tools.distance(dict(loaded.named_parameters()), whole[0].values) == 0


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
@pytest.mark.parametrize("by", ["checkpoint", "generation"])
def test_goes_on_with_other_ranks_after_the_samples_seen(tmp_path: Path, before: int, after: int, by: str) -> None:
    args = SAVES | {"max_steps": 8}
    where = "nvme" if by == "generation" else "cpu"
    first = on_ranks(before, train, spec(tmp_path, where, args=args, stop_after=4))
    # Nothing is left to do but to load.
    loaded = on_ranks(after, train, spec(tmp_path, where, args=args | {"max_steps": 4}), True)
    assert tools.distance(loaded[0].values, first[0].values) == 0
    then = on_ranks(after, train, spec(tmp_path, where, args=args), True)
    trained_on = sorted(row for each in (*first, *then) for row in each.rows)
    assert trained_on == sorted(tools.Tokens(24).rows.sum(1).tolist() * 2)


def test_the_newer_of_checkpoint_and_generation_goes_on(tmp_path: Path) -> None:
    args = SAVES | {"max_steps": 4}
    train(spec(tmp_path, "nvme", args=args, stop_after=3))
    newer = tmp_path / "out" / "checkpoint-4"
    shutil.copytree(tmp_path / "nvme", tmp_path / "nvme3")
    train(spec(tmp_path, "nvme", args=args))
    shutil.rmtree(tmp_path / "nvme")
    (tmp_path / "nvme3").rename(tmp_path / "nvme")
    assert get_last_checkpoint(str(tmp_path / "out")) == str(newer)
    assert train(spec(tmp_path, "nvme", args=args), True).rows == []  # step 4, of the checkpoint


class Stream(IterableDataset[dict[str, torch.Tensor]]):
    """Rows without a known number: six steps' worth."""

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        yield from map(tools.Tokens(24).__getitem__, range(24))


def streamed(spec: Spec) -> Any:
    trainer = runs.make(spec)
    trainer.train_dataset = Stream()
    return trainer


@pytest.mark.parametrize(
    ("more", "make"),
    [
        ({"train_sampling_strategy": "group_by_length"}, runs.make),
        ({"dataloader_num_workers": 2}, runs.make),
        ({}, streamed),
    ],
    ids=["grouped", "workers", "streamed"],
)
@pytest.mark.parametrize("by", ["checkpoint", "generation"])
def test_goes_on_in_the_order_of_the_data(tmp_path: Path, more: dict[str, Any], make: Any, by: str) -> None:
    """From the midst of the first pass over the data, and of the second."""
    args = SAVES | {"max_steps": 10, "save_steps": 1} | more
    whole = train(Spec(tmp_path / "whole", args=args | {"save_strategy": "no"}), None, make)
    assert len(whole.rows) == 40
    for stop in (2, 8):
        first = train(spec(tmp_path, "nvme", args=args, stop_after=stop), None, make)
        if by == "checkpoint":
            shutil.rmtree(tmp_path / "nvme")
        then = train(spec(tmp_path, "nvme", args=args), by == "checkpoint", make)
        assert first.rows + then.rows == whole.rows
        assert then == whole
        shutil.rmtree(tmp_path / "nvme")
        shutil.rmtree(tmp_path / "out")


def test_epochs_are_completed_with_other_batches(tmp_path: Path) -> None:
    """Twice as large, they take half as many steps for what is left."""
    args = EPOCHS | {"logging_steps": 1}
    first = train(spec(tmp_path, "nvme", args=args, stop_after=8))
    then = train(spec(tmp_path, "nvme", args=args | {"per_device_train_batch_size": 8}))
    assert sorted(first.rows + then.rows) == sorted(tools.Tokens(24).rows.sum(1).tolist() * 2)
    assert then.logs[-1]["epoch"] == 2
    rates = [each["learning_rate"] for each in then.logs if "learning_rate" in each]
    assert rates[-2:] == pytest.approx([1e-3 * (1 - 8 / 12), 1e-3 * (1 - 9 / 10)])  # the schedule of ten steps


def test_a_path_is_taken_though_a_generation_is_newer(tmp_path: Path) -> None:
    args = SAVES | {"max_steps": 4}
    train(spec(tmp_path, "nvme", args=args, stop_after=3))
    assert len(train(spec(tmp_path, "nvme", args=args), tmp_path / "out" / "checkpoint-2").rows) == 8


@pytest.mark.door(
    "transformers",
    load="checkpoint of `Trainer`, by `OffloadTrainer`",
    between="in shards and in one file",
    outcome="right",
)
@pytest.mark.parametrize("is_sharded", [False, True])
def test_goes_on_from_a_checkpoint_of_the_plain_trainer(tmp_path: Path, is_sharded: bool) -> None:
    args = SAVES | UNCLIPPED
    plain = Spec(tmp_path / "out", args=args, is_plain=True)
    whole = train(plain)
    folder = tmp_path / "out" / "checkpoint-4"
    if is_sharded:
        AutoModelForCausalLM.from_pretrained(folder).save_pretrained(folder, max_shard_size="100KB")
        (folder / "model.safetensors").unlink()
    ours = train(spec(tmp_path, "nvme", args=args), str(folder))
    assert without_norms(ours) == without_norms(whole)


# Checkpoints


def test_keeps_the_best_and_the_newest(tmp_path: Path) -> None:
    best = {
        "load_best_model_at_end": True,
        "metric_for_best_model": "loss",
        "learning_rate": 0.3,
        "save_total_limit": 1,
    }
    args = SAVES | UNCLIPPED | {"eval_strategy": "steps", "eval_steps": 2} | best
    plain = train(Spec(tmp_path / "plain", args=args, is_plain=True))
    with pytest.warns(UserWarning, match="a resume goes on from the generation committed last"):
        ours = train(spec(tmp_path, "nvme", args=args))
    assert without_norms(ours) == without_norms(plain)
    left = [sorted(os.listdir(tmp_path / name)) for name in ("out", "plain")]
    assert left[0] == left[1]


@pytest.mark.parametrize(("ranks", "where"), [(1, "cpu"), (2, "nvme")])
def test_saves_the_model_alone(tmp_path: Path, ranks: int, where: str) -> None:
    best = {"load_best_model_at_end": True, "metric_for_best_model": "loss", "learning_rate": 0.3}
    args = SAVES | UNCLIPPED | {"eval_strategy": "steps", "eval_steps": 2, "save_only_model": True} | best
    plain = on_ranks(ranks, train, Spec(tmp_path / "plain", args=args, is_plain=True))
    ours = on_ranks(ranks, train, spec(tmp_path, where, args=args))
    assert [without_norms(each) for each in ours] == [without_norms(each) for each in plain]
    assert not (tmp_path / "out" / "checkpoint-2" / "zero_offload").exists()


def _peaks(tmp_path: Path) -> tuple[int, list[int]]:
    """Bytes of all states, and by how much a save and a resume make the process larger."""
    args, grown = SAVES | {"max_steps": 2}, []
    for name in ("first", "second"):
        model = tools.llama(hidden_size=512, intermediate_size=1024, num_hidden_layers=8)
        nbytes = 12 * sum(param.numel() for param in model.parameters())
        trainer = runs.make(Spec(tmp_path / "out", tmp_path / name, args), model)
        if name == "first":
            trainer.train()
            before = reset_peak()
            trainer._save_checkpoint(trainer.model, None)
        else:
            before = reset_peak()
            trainer.train(resume_from_checkpoint=True)  # no step is left
        grown.append(peak_bytes() - before)
        zo.close(trainer.model)
    return nbytes, grown


def test_a_save_and_a_resume_take_little_memory(tmp_path: Path) -> None:
    [(nbytes, grown)] = in_processes(1, _peaks, tmp_path)
    assert nbytes > 200 << 20
    assert max(grown) < nbytes // 3, grown


def test_each_moment_of_a_save_leaves_whole_checkpoints(tmp_path: Path) -> None:
    """The directory is copied at each change of it: as a kill would leave it."""
    out, moments = tmp_path / "out", tmp_path / "moments"
    moments.mkdir()
    state = {"is_on": False, "number": 0}

    def copy() -> None:
        state["is_on"] = False
        shutil.copytree(out, moments / str(state["number"]))
        state["is_on"], state["number"] = True, state["number"] + 1

    def hook(event: str, given: tuple[Any, ...]) -> None:
        changes = event in ("os.rename", "os.remove", "os.mkdir", "os.rmdir", "shutil.rmtree", "os.truncate")
        if state["is_on"] and (changes or (event == "open" and given[2] & (os.O_WRONLY | os.O_RDWR))):
            copy()

    class Watch(TrainerCallback):
        def on_step_end(self, args: Any, status: Any, control: Any, **kwargs: Any) -> None:
            state["is_on"] = status.global_step == 2

        def on_save(self, args: Any, status: Any, control: Any, **kwargs: Any) -> None:
            state["is_on"] = False

    sys.addaudithook(hook)
    args = {"save_strategy": "steps", "save_steps": 1, "max_steps": 2, "save_total_limit": 1}
    trainer = runs.make(Spec(out, args=args))
    trainer.add_callback(Watch())
    trainer.train()
    whole = files_of(out / "checkpoint-2")
    assert state["number"] > 20
    newest = set()
    for moment in sorted(moments.iterdir(), key=lambda each: int(each.name)):
        last = get_last_checkpoint(str(moment))
        assert last is not None
        assert files_of(Path(last)) == whole
        newest.add(int(last.rpartition("-")[2]))
    assert newest == {1, 2}
    zo.close(trainer.model)
    shutil.rmtree(out)
    (moments / str(state["number"] // 2)).rename(out)
    left = [each.name for each in out.iterdir()]
    assert any(each.startswith("tmp-") for each in left)
    resumed = train(Spec(out, args=args), True)
    assert resumed == train(Spec(tmp_path / "whole", args=args | {"save_strategy": "no"}))
    assert [each.name for each in out.iterdir()] == ["checkpoint-2"]


def files_of(folder: Path) -> set[tuple[str, int]]:
    """Names and sizes of all files; those of JSON differ by what they say."""
    sized = (each for each in folder.rglob("*") if each.is_file())
    return {(str(each.relative_to(folder)), each.stat().st_size if each.suffix != ".json" else 0) for each in sized}


def test_a_checkpoint_that_does_not_fit_is_refused_before_it_is_begun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    args = SAVES | {"save_total_limit": 2}
    params = sum(each.numel() for each in tools.llama().parameters())

    def free(nbytes: int) -> None:
        monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=nbytes))

    free(16 * params - 1)
    with pytest.raises(zo.CapacityError, match="a checkpoint takes .* free"):
        train(Spec(tmp_path / "out", args=args))
    free(40 * params)
    with pytest.warns(UserWarning, match="too little for the 3 that will be there"):
        train(Spec(tmp_path / "out", args=args))


def test_save_model_deletes_weights_of_its_own_names(tmp_path: Path) -> None:
    others = [tmp_path / name for name in ("model_before.safetensors", "adapter_model_notes.txt")]
    for each in (*others, tmp_path / "model-00001-of-00002.safetensors"):
        each.write_text("")
    trainer = runs.make(Spec(tmp_path))
    trainer.save_model()
    assert all(each.exists() for each in others)
    assert not (tmp_path / "model-00001-of-00002.safetensors").exists()
    zo.close(trainer.model)


def adapted(spec: Spec) -> Any:
    """The Trainer of a run, whose model has adapters of PEFT."""
    base = tools.llama()
    torch.manual_seed(1)
    model = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"))
    return runs.make(spec, model)


@pytest.mark.door(
    "peft, transformers",
    load="checkpoint of `Trainer`, by `OffloadTrainer`",
    between="LoRA",
    save="`OffloadTrainer`",
    outcome="right",
)
def test_checkpoints_of_adapters_are_adapters(tmp_path: Path) -> None:
    args = SAVES | UNCLIPPED
    plain = train(Spec(tmp_path / "plain", args=args, is_plain=True), None, adapted)
    ours = train(spec(tmp_path, "nvme", args=args), None, adapted)
    assert without_norms(ours) == without_norms(plain)
    folder = tmp_path / "out" / "checkpoint-4"
    names = {each.name for each in folder.iterdir()}
    assert {"adapter_model.safetensors", "adapter_config.json"} <= names
    assert "model.safetensors" not in names
    theirs, mine = (load_file(tmp_path / part / "checkpoint-4/adapter_model.safetensors") for part in ("plain", "out"))
    assert tools.distance(mine, theirs) == 0
    shutil.rmtree(tmp_path / "nvme")
    assert train(spec(tmp_path, "nvme", args=args), str(folder), adapted) == ours
    again = spec(tmp_path, "cpu", args=args)
    assert without_norms(train(again, str(tmp_path / "plain" / "checkpoint-4"), adapted)) == without_norms(plain)


# Settings without a meaning, and numbers


def test_what_has_no_meaning_is_refused(tmp_path: Path) -> None:
    with pytest.raises(zo.ConfigError, match="pass offload=zo.OffloadConfig"):
        OffloadTrainer(model=tools.llama(), args=runs.arguments(tmp_path))
    with pytest.raises(zo.ConfigError, match="offloaded with another config"):
        runs.make(Spec(tmp_path), zo.offload(tools.llama(), tools.config("cpu", "", overlap="none")))
    with pytest.raises(zo.ConfigError, match="no reference model"):
        OffloadTrainer(
            model=tools.llama(),
            args=runs.arguments(tmp_path),
            offload=tools.config("cpu", ""),
            offload_reference=zo.OffloadConfig(),
        )
    with pytest.warns(UserWarning, match="the loss is not scaled"):
        OffloadTrainer(
            model=tools.llama(), args=runs.arguments(tmp_path), offload=tools.config("cpu", "", precision="fp16")
        )
    with pytest.raises(zo.ConfigError, match="bf16_full_eval"):
        runs.make(Spec(tmp_path, args={"bf16_full_eval": True}))
    with pytest.raises(zo.ConfigError, match="optim='adalomo' steps inside of backward"):
        train(Spec(tmp_path, args={"optim": "adalomo"}))
    pytest.importorskip("bitsandbytes")
    with pytest.raises(zo.ConfigError, match="optim='adamw_bnb_8bit' of Trainer keeps states of embeddings in 32 bits"):
        train(Spec(tmp_path, args={"optim": "adamw_bnb_8bit"}))


def test_an_optimizer_of_torchs_that_is_given_is_refused(tmp_path: Path) -> None:
    model = tools.llama()
    torchs = torch.optim.AdamW(model.parameters())
    given = {"args": runs.arguments(tmp_path), "train_dataset": tools.Tokens(8), "offload": zo.OffloadConfig()}
    with pytest.raises(zo.ZeroOffloadError, match=r"torch's AdamW cannot step .* Step with zo\.AdamW"):
        OffloadTrainer(model=model, optimizers=(torchs, None), **given).train()


def test_a_generation_of_another_program_is_refused(tmp_path: Path) -> None:
    model = zo.offload(tools.llama(), tools.config("nvme", tmp_path / "nvme"))
    optimizer = zo.AdamW(model.parameters())
    model(**{key: value[None] for key, value in tools.Tokens(1)[0].items()}).loss.backward()
    optimizer.step()
    zo.commit(model, optimizer, extra={"mine": 1})
    zo.close(model)
    with pytest.raises(zo.ConfigError, match="was not made by an OffloadTrainer"):
        train(spec(tmp_path, "nvme"))


def of_eps(eps: float) -> Any:
    def make(spec: Spec) -> Any:
        return runs.make(spec, tools.llama(attention_dropout=0.1, rms_norm_eps=eps))

    return make


def of_alpha(alpha: int) -> Any:
    def make(spec: Spec) -> Any:
        config = LoraConfig(r=4, lora_alpha=alpha, target_modules=["q_proj"], task_type="CAUSAL_LM")
        return runs.make(spec, get_peft_model(tools.llama(), config))

    return make


@pytest.mark.parametrize("by", ["checkpoint", "generation"])
@pytest.mark.parametrize(
    ("make", "was", "has", "name"),
    [(of_eps, 1e-6, 0.5, "config.rms_norm_eps"), (of_alpha, 8, 16, "default.lora_alpha")],
)
def test_another_model_of_the_same_shapes_is_refused(
    tmp_path: Path, by: str, make: Any, was: float, has: float, name: str
) -> None:
    args, is_file = SAVES | {"max_steps": 4}, by == "checkpoint"
    train(spec(tmp_path, "cpu" if is_file else "nvme", args=args, stop_after=2), None, make(was))
    again = spec(tmp_path, "cpu" if is_file else "nvme", args=args)
    with pytest.raises(
        zo.ConfigError, match=f"made by a model with [a-z.]*{name}={was:g}.*, and this one has .*={has:g}"
    ):
        train(again, is_file, make(has))
    assert len(train(again, is_file, make(was)).rows) == 8


def test_other_arguments_are_a_warning_that_names_the_first(tmp_path: Path) -> None:
    args = SAVES | {"max_steps": 4}
    train(spec(tmp_path, "nvme", args=args, stop_after=2))
    with pytest.warns(
        UserWarning, match=r"made with TrainingArguments\(weight_decay=0.1\).*goes on with weight_decay=0.2"
    ):
        train(spec(tmp_path, "nvme", args=args | {"weight_decay": 0.2, "logging_steps": 1, "eval_steps": 7}))


def test_a_generation_from_before_goes_on_with_one_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    args = SAVES | {"max_steps": 4}
    with monkeypatch.context() as patch:
        kept = transformers_module.keep

        def without(call: str, model: Any, optimizer: Any, extra: Any, **more: Any) -> None:
            said = {name: each for name, each in extra["zero_offload"].items() if name not in ("made_of", "args")}
            kept(call, model, optimizer, {"zero_offload": said}, **more)

        patch.setattr(transformers_module, "keep", without)
        train(spec(tmp_path, "nvme", args=args, stop_after=2))
    with pytest.warns(UserWarning, match="from before configs were kept with it: the model's is not compared"):
        assert len(train(spec(tmp_path, "nvme", args=args)).rows) == 8


@pytest.mark.parametrize(
    ("optim", "kind"), [("adamw_torch", zo.AdamW), ("sgd", zo.SGD), ("adagrad", zo.Adagrad), ("lion_32bit", zo.Lion)]
)
def test_optimizers_are_those_of_the_arguments(tmp_path: Path, optim: str, kind: type) -> None:
    given = {"optim": optim, "adam_beta1": 0.8, "adam_epsilon": 1e-6, "optim_args": None}
    trainer = runs.make(Spec(tmp_path, args=given | {"optim_args": "momentum=0.9"} if optim == "sgd" else given))
    optimizer = trainer.create_optimizer()
    assert type(optimizer) is kind
    decayed, kept = optimizer.param_groups
    assert (decayed["weight_decay"], kept["weight_decay"], decayed["lr"]) == (0.1, 0.0, 1e-3)
    expected = {"momentum": 0.9, "betas": (0.8, 0.999), "eps": 1e-6}
    names = {"adamw_torch": ("betas", "eps"), "sgd": ("momentum",), "lion_32bit": ("betas",)}.get(optim, ())
    assert all(decayed[name] == expected[name] for name in names)
    zo.close(trainer.model)


@pytest.mark.parametrize(("optim", "where"), [("adafactor", "nvme"), ("rmsprop", "cpu")])
def test_optimizers_of_others_train_as_the_plain_model_and_go_on(tmp_path: Path, optim: str, where: str) -> None:
    args = UNCLIPPED | {"optim": optim}
    plain = train(Spec(tmp_path / "plain", args=args, is_plain=True))
    assert without_norms(train(spec(tmp_path, where, args=args))) == without_norms(plain)
    of = {"args": args, "die_at": ("on_step_begin", 3)}
    assert in_processes(1, train, Spec(tmp_path / "killed", tmp_path / "killed_nvme", **of))[0] is None
    resumed = in_processes(1, train, Spec(tmp_path / "killed", tmp_path / "killed_nvme", args=args))[0]
    assert without_norms(resumed) == without_norms(plain)


def test_numbers_of_the_library_are_logged(tmp_path: Path) -> None:
    seen: list[dict[str, float]] = []

    class Report(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            seen.append(dict(logs))

    trainer = OffloadTrainer(
        model=tools.llama(),
        args=runs.arguments(tmp_path, max_steps=2, report_to=["tensorboard"]),
        train_dataset=tools.Tokens(8),
        callbacks=[Report(), StatsCallback()],
        offload=tools.config("nvme", tmp_path / "nvme"),
    )
    trainer.train()
    assert seen[1]["offload/step"] == 2
    assert seen[1]["offload/written_bytes/nvme"] > 0
    assert all(isinstance(value, int | float) for each in seen for value in each.values())
    json.dumps(seen)
    (events,) = tmp_path.rglob("events.out.tfevents.*")
    board = EventAccumulator(str(events)).Reload()
    assert [each.value for each in board.Scalars("train/offload/step")] == [1, 2, 2]
    zo.close(trainer.model)


def logged(folder: Path, steps: int, stop: int | None = None, **args: Any) -> list[dict[str, Any]]:
    """Rows of a run that stops after a step, or goes on."""
    trainer = runs.make(
        Spec(folder, folder / "nvme", args={"max_steps": steps, "learning_rate": 1e-3} | args, stop_after=stop)
    )
    trainer.add_callback(RunLogCallback(folder / "run"))
    trainer.train()
    zo.close(trainer.model)
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]


def test_rows_of_a_run_for_the_report(tmp_path: Path) -> None:
    evaluated = {"eval_strategy": "steps", "eval_steps": 2, "include_num_input_tokens_seen": "all"}
    rows = logged(tmp_path / "whole", 5, **evaluated)
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    assert [row["step"] for row in rows if "val_loss" in row] == [2, 4, 5]
    assert all(row["loss"] > 0 and row["lr"] > 0 and row["grad_norm"] > 0 for row in rows)
    assert [row["tokens"] for row in rows[1:]] == [4 * 16] * 4 and rows[1]["tokens_per_s"] > 0
    about = json.loads((tmp_path / "whole" / "run" / "run.json").read_text())
    assert about["identity"]["learning_rate"] == 1e-3 and about["identity"]["steps"] == 5
    assert about["starts"][0]["last_step"] == 5 and not any(name.endswith("_token") for name in about["identity"])
    logged(tmp_path / "two", 5, stop=3, **evaluated)
    resumed = logged(tmp_path / "two", 5, **evaluated)
    names = ("step", "loss", "val_loss", "grad_norm", "lr")
    assert [[row.get(name) for name in names] for row in resumed] == [[row.get(name) for name in names] for row in rows]
    assert [row["step"] for row in resumed if row.get("resumed")] == [4]


def test_rows_of_some_steps_and_of_a_second_train(tmp_path: Path) -> None:
    args = runs.arguments(tmp_path, max_steps=-1, num_train_epochs=1, logging_steps=3, eval_strategy="epoch")
    trainer = OffloadTrainer(
        model=tools.llama(),
        args=args,
        train_dataset=tools.Tokens(24),
        eval_dataset=tools.Tokens(8, seed=2),
        callbacks=[RunLogCallback(tmp_path / "run")],
        offload=tools.config("cpu", ""),
    )
    trainer.evaluate()
    trainer.train()
    trainer.train()
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [(row["step"], row["steps"], "val_loss" in row) for row in rows] == [
        (3, 3, False),
        (6, 3, True),
        (9, 3, False),
        (12, 3, True),
    ]
    zo.close(trainer.model)


def test_rotation_leaves_what_a_user_has_put_there(tmp_path: Path) -> None:
    """Notes in a checkpoint, a copy of one, a folder like one, and what a kill has left."""
    out = tmp_path / "out"
    args = {"save_strategy": "steps", "save_steps": 1, "max_steps": 2, "save_total_limit": 1}
    train(Spec(out, args=args | {"max_steps": 1}))
    shutil.copytree(out / "checkpoint-1", out / "checkpoint-1-mine")
    (out / "checkpoint-mine").mkdir()
    staging = out / "tmp-checkpoint-7" / "checkpoint-7"
    (staging / "zero_offload").mkdir(parents=True)
    (staging / "zero_offload" / "rank0.swap").write_text("")
    (staging / "model.safetensors").write_text("")
    for folder in ("checkpoint-1", "checkpoint-1-mine", "checkpoint-mine", "tmp-checkpoint-7", "tmp-checkpoint-mine"):
        (out / folder).mkdir(exist_ok=True)
        (out / folder / "notes.txt").write_text("mine")
    copy = files_of(out / "checkpoint-1-mine")
    with pytest.warns(UserWarning, match="checkpoint-1: 1 file that no list names stays: notes.txt"):
        train(Spec(out, args=args), True)
    assert files_of(out / "checkpoint-1-mine") == copy
    left = {name: sorted(each.name for each in (out / name).iterdir()) for name in ("checkpoint-1", "tmp-checkpoint-7")}
    assert left == {"checkpoint-1": ["notes.txt"], "tmp-checkpoint-7": ["notes.txt"]}
    assert {"checkpoint-mine", "tmp-checkpoint-mine", "checkpoint-2"} < {each.name for each in out.iterdir()}


def test_a_checkpoint_that_is_written_anew_keeps_a_users_files(tmp_path: Path) -> None:
    out = tmp_path / "out"
    args = {"save_strategy": "steps", "save_steps": 2, "max_steps": 2}
    train(Spec(out, args=args))
    (out / "checkpoint-2" / "notes.txt").write_text("mine")
    before = files_of(out / "checkpoint-2")
    train(Spec(out, args=args))
    assert (out / "checkpoint-2" / "notes.txt").read_text() == "mine"
    assert {name for name, _ in files_of(out / "checkpoint-2")} == {name for name, _ in before}
    assert [each.name for each in out.iterdir()] == ["checkpoint-2"]


class Two(torch.optim.Optimizer):
    """torch's Muon for the matrices of layers, and AdamW for the rest, in one object for a plain Trainer."""

    def __init__(self, model: Any, lr: float) -> None:
        self.two: list[Any] = []
        named = dict(model.named_parameters())
        inside = [param for name, param in named.items() if ".layers." in name and param.dim() == 2]
        norms = [param for param in named.values() if param.dim() == 1]
        rest = [{"params": [model.get_input_embeddings().weight, model.get_output_embeddings().weight]}]
        rest.append({"params": norms, "weight_decay": 0.0})
        rest[0]["params"] = list(dict.fromkeys(rest[0]["params"]))
        self.two = [torch.optim.Muon(inside, lr, 0.1), zo.AdamW(rest, lr, weight_decay=0.1)]
        super().__init__([{"params": inside}, *rest], {"lr": lr, "weight_decay": 0.1})

    def step(self, closure: Any = None) -> None:
        for one, group in zip(
            (each for inner in self.two for each in inner.param_groups), self.param_groups, strict=True
        ):
            one["lr"] = group["lr"]
        for inner in self.two:
            inner.step()


def with_muon(spec: Spec) -> Any:
    trainer = runs.make(spec)
    if spec.is_plain:
        trainer.optimizer = Two(trainer.model, trainer.args.learning_rate)
    else:
        trainer.optimizer_cls_and_kwargs = (zo.Muon, {"lr": trainer.args.learning_rate})
    return trainer


def test_muon_trains_as_two_plain_optimizers_and_goes_on(tmp_path: Path) -> None:
    plain = train(Spec(tmp_path / "plain", args=UNCLIPPED, is_plain=True), make=with_muon)
    assert without_norms(train(spec(tmp_path, "nvme", args=UNCLIPPED), make=with_muon)) == without_norms(plain)
    of = {"args": UNCLIPPED, "die_at": ("on_step_begin", 3)}
    killed = Spec(tmp_path / "killed", tmp_path / "killed_nvme", **of)
    assert in_processes(1, train, killed, None, with_muon)[0] is None
    resumed = train(Spec(tmp_path / "killed", tmp_path / "killed_nvme", args=UNCLIPPED), make=with_muon)
    assert without_norms(resumed) == without_norms(plain)
