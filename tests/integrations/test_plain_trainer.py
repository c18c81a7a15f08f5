"""`transformers.Trainer` as it is, with an offloaded model and our optimizer handed over, against the plain model."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch._dynamo.utils import counters
from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments, T5Config, T5ForConditionalGeneration

import zero_offload as zo
from tests.helpers.launched import run_program
from tests.helpers.ranks import RankPools
from tests.helpers.tools import VOCAB, Tokens, config, distance, launched, llama, on_ranks, values_of

HYPER = {"lr": 1e-3, "weight_decay": 0.1}
CLIPPED = 2e-7
"""How far weights may be from the plain run's: clipping keeps a factor, where torch multiplies every gradient."""
EACH_REDUCED = 1e-5
"""The same where several ranks accumulate: the plain Trainer reduces our gradients with every micro-batch, and DDP's
with the last, so sums have another order."""


def t5() -> nn.Module:
    """An encoder and a decoder of one block each, with tied embeddings."""
    torch.manual_seed(0)
    sizes = {"d_model": 32, "d_ff": 64, "d_kv": 8, "num_heads": 4, "num_layers": 1, "num_decoder_layers": 1}
    return T5ForConditionalGeneration(T5Config(vocab_size=VOCAB, decoder_start_token_id=0, **sizes))


def one_block() -> nn.Module:
    """A model for which torch.compile takes least time."""
    return llama(num_hidden_layers=1)


@dataclass(frozen=True)
class Case:
    """A run of the Trainer, by its settings."""

    settings: dict[str, Any] = field(default_factory=dict)
    by_class: bool = False
    """True if the Trainer makes the optimizer of our class; else it gets one with its scheduler."""
    make: Callable[[], nn.Module] = llama
    best: bool = False
    """True if the last evaluation is of the best checkpoint."""
    tolerance: float = 0.0


@dataclass
class Trained:
    history: list[dict[str, float]]
    """Losses, of training and of evaluations, in order."""
    norms: list[float]
    values: dict[str, Tensor]
    texts: Any


def train(rank: int, world_size: int, case: Case, where: str, folder: Path) -> Trained:
    with launched(rank, world_size):
        model = case.make()
        if where:
            zo.offload(model, config(where, folder / "run"))
        settings: dict[str, Any] = {
            "output_dir": str(folder / f"out{where}"),
            "per_device_train_batch_size": 2,
            "max_steps": 4,
            "logging_steps": 1,
            "save_strategy": "no",
            "max_grad_norm": 0.0,
            "report_to": [],
            "use_cpu": True,
            "disable_tqdm": True,
            "ddp_backend": "gloo" if world_size > 1 else None,
        }
        if case.best:
            steps = {"eval_strategy": "steps", "save_strategy": "steps", "eval_steps": 1, "save_steps": 1}
            settings |= steps | {"load_best_model_at_end": True, "save_total_limit": 1}
        kind, arguments = transformers.Trainer, transformers.TrainingArguments
        if case.make is t5:
            kind, arguments = Seq2SeqTrainer, Seq2SeqTrainingArguments
            settings |= {"predict_with_generate": True, "generation_max_length": 8}
        handed: dict[str, Any] = {"optimizer_cls_and_kwargs": (zo.AdamW, dict(HYPER))}
        if not case.by_class:
            optimizer = zo.AdamW(model.parameters(), **HYPER)
            handed = {"optimizers": (optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9))}
        args = arguments(**(settings | case.settings))
        trainer = kind(model, args, train_dataset=Tokens(), eval_dataset=Tokens(8, seed=2), **handed)
        counters.clear()
        trainer.train()
        assert (counters["stats"]["unique_graphs"] > 0) == args.torch_compile
        last = trainer.evaluate()
        texts = trainer.predict(Tokens(4, seed=3)).predictions.tolist() if case.make is t5 else None
        history = [
            {name: value for name, value in each.items() if name in ("loss", "eval_loss", "epoch")}
            for each in (*trainer.state.log_history, last)
        ]
        norms = [each["grad_norm"] for each in trainer.state.log_history if "grad_norm" in each]
        return Trained(history, norms, values_of(model), texts)


CHECKPOINTING = {
    reentrant: {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": reentrant}}
    for reentrant in (False, True)
}
CLIPS = {"max_grad_norm": 0.5, "gradient_accumulation_steps": 2}
CASES = {
    "compiled, by class": (
        "cpu",
        1,
        Case({"torch_compile": True, "torch_compile_backend": "eager"}, by_class=True, make=one_block),
    ),
    "bf16, reentrant, NEFTune": ("nvme", 1, Case({"bf16": True, "neftune_noise_alpha": 5.0} | CHECKPOINTING[True])),
    "clipped, best, smoothed": (
        "nvme",
        1,
        Case({"label_smoothing_factor": 0.1} | CLIPS | CHECKPOINTING[False], best=True, tolerance=CLIPPED),
    ),
    "generates": ("nvme", 1, Case(make=t5)),
    "two ranks, bf16": ("cpu", 2, Case({"bf16": True, "eval_strategy": "epoch"} | CHECKPOINTING[False])),
    "two ranks, clipped": ("nvme", 2, Case({"max_grad_norm": 0.5}, by_class=True, tolerance=CLIPPED)),
    "two ranks, accumulated": ("cpu", 2, Case({"gradient_accumulation_steps": 2}, tolerance=EACH_REDUCED)),
}


@pytest.mark.parametrize("name", CASES)
def test_trainer(pools: RankPools, tmp_path: Path, name: str) -> None:
    where, world_size, case = CASES[name]
    plain, ours = (on_ranks(pools, world_size, train, case, each, tmp_path) for each in ("", where))
    for theirs, mine in zip(plain, ours, strict=True):
        assert len(mine.norms) == 4 and mine.norms == pytest.approx(theirs.norms, rel=1e-6)
        assert distance(mine.values, theirs.values) <= case.tolerance
        assert mine.texts == theirs.texts
        if not case.tolerance:
            assert mine.history == theirs.history
        for one, other in zip(mine.history, theirs.history, strict=True):
            assert one == pytest.approx(other, rel=1e-6)


def save_alone(rank: int, world_size: int, folder: Path) -> list[str]:
    """The errors of a rank that saves while the other does not."""
    with launched(rank, world_size):
        model = zo.offload(llama(), config("cpu", folder))
        wrapper = nn.Sequential(model)
        settings: dict[str, Any] = {"report_to": [], "use_cpu": True, "ddp_backend": "gloo"}
        trainers = [
            transformers.Trainer(each, transformers.TrainingArguments(str(folder / "out"), **settings))
            for each in (model, wrapper)
        ]
        told = []
        for save in (model.save_pretrained, trainers[0]._save, trainers[1]._save) if rank == 0 else ():
            with pytest.raises(zo.ZeroOffloadError) as raised:
                save(str(folder / "saved"))
            told.append(str(raised.value))
        zo.close(model)
        return told


def test_a_rank_that_saves_alone_raises_at_once(pools: RankPools, tmp_path: Path) -> None:
    told, _ = on_ranks(pools, 2, save_alone, tmp_path)
    assert len(told) == 3
    assert all("zo.export_pretrained" in each and "save_strategy='no'" in each for each in told)


class Saves(transformers.TrainerCallback):
    """Every rank runs it."""

    def on_step_end(
        self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **kwargs: Any
    ) -> None:
        folder = f"{args.output_dir}/step-{state.global_step}"
        zo.save_checkpoint(model, optimizer, f"{folder}/states")
        zo.export_pretrained(model, f"{folder}/weights")


def save_in_a_callback(rank: int, world_size: int, folder: Path) -> dict[str, Tensor]:
    with launched(rank, world_size):
        settings: dict[str, Any] = {"report_to": [], "use_cpu": True, "ddp_backend": "gloo", "disable_tqdm": True}
        args = transformers.TrainingArguments(str(folder), max_steps=2, save_strategy="no", **settings)
        trainer = transformers.Trainer(
            zo.offload(llama(), config("cpu", "")),
            args,
            train_dataset=Tokens(),
            optimizer_cls_and_kwargs=(zo.AdamW, {"lr": 1e-2}),
            callbacks=[Saves()],
        )
        trainer.train()
        values = values_of(trainer.model)
        zo.load_checkpoint(trainer.model, trainer.optimizer, folder / "step-1" / "states")
        assert distance(values_of(trainer.model), values) > 0
        zo.close(trainer.model)
        return values


def test_a_callback_saves_on_several_ranks(pools: RankPools, tmp_path: Path) -> None:
    values = on_ranks(pools, 2, save_in_a_callback, tmp_path)[0]
    model = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "step-2" / "weights")
    assert distance(values_of(model), values) == 0


def test_its_own_optimizer_is_refused(tmp_path: Path) -> None:
    model = zo.offload(llama(), config("cpu", ""))
    args = transformers.TrainingArguments(str(tmp_path), max_steps=1, report_to=[], use_cpu=True, disable_tqdm=True)
    with pytest.raises(zo.ZeroOffloadError, match="zo.AdamW"):
        transformers.Trainer(model, args, train_dataset=Tokens()).train()


def test_the_example(tmp_path: Path) -> None:
    example = Path(__file__).parents[2] / "examples" / "trainer.py"
    printed = run_program(example, tmp_path, folder=tmp_path)
    losses = [float(found) for found in re.findall(r"'loss': '?([\d.]+)", printed)]
    assert len(losses) == 2 and losses[1] < losses[0]
    transformers.LlamaForCausalLM.from_pretrained(tmp_path / "model")
