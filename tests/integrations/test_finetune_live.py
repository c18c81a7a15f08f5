"""`finetune --live-blocks`: TRL's numbers over a plain model, stops at switches, the plan's number, and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import tests.helpers.tools as tools  # before transformers  # isort: skip
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, TrainerCallback
from trl import SFTConfig, SFTTrainer

import zero_offload as zo
from tests.helpers import folders
from tests.helpers.pairwise import full
from tests.helpers.tool_runs import in_processes
from zero_offload.cli.main import main
from zero_offload.finetune.data.prepare import prepare
from zero_offload.finetune.model.folder import open_folder
from zero_offload.plan.turns import BlockTurns

pytestmark = pytest.mark.tools

SIZES = ("--batch", "2", "--accumulate", "2", "--seq", "96", "--lr", "1e-3", "--warmup", "0", "--precision", "fp32")
SIZES += ("--clip", "1e9", "--commit-every", "1")
LAYERS, STEPS, EVERY = 4, 5, 2


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of four blocks, with data beside it."""
    path = folders.write_folder(tmp_path_factory.mktemp("live") / "model")
    config = LlamaConfig.from_pretrained(path, num_hidden_layers=LAYERS)
    LlamaForCausalLM(config).save_pretrained(path)
    folders.write_instructions(path.parent / "chat.jsonl", 60)
    folders.write_instructions(path.parent / "held_out.jsonl", 8)
    return path


def words(model: Path, out: Path, *flags: object) -> list[str]:
    given = ["finetune", model, "--data", model.parent / "chat.jsonl", "--out", out, *SIZES, "--live-every", EVERY]
    return list(map(str, (*given, *flags)))


def run(model: Path, out: Path, *flags: object, steps: int = STEPS) -> list[tuple[float, list[str]]]:
    """Each step's loss, and the blocks that lived."""
    tools.reset_accelerate()
    assert main(words(model, out, *flags, "--steps", steps)) == 0
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [(row["loss"], row["live"]) for row in rows]


class Switches(TrainerCallback):
    """Written out for a plain model: an optimizer over all, of which nothing is kept of blocks that rest."""

    def __init__(self, turns: BlockTurns) -> None:
        self.turns = turns

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any, optimizer: Any, **kwargs: Any) -> None:
        for index, block in enumerate(model.model.layers):
            lives = index in self.turns.at(state.global_step)
            block.requires_grad_(lives)
            for param in () if lives else block.parameters():
                optimizer.state.pop(param, None)


def plain(model: Path, turns: BlockTurns) -> tuple[list[float], Any]:
    """TRL's trainer, with the same kernel of AdamW."""
    tools.reset_accelerate()
    prepared = prepare([str(model.parent / "chat.jsonl")], open_folder(model), method="sft", seq=96)
    args = SFTConfig(
        output_dir=str(model.parent / "plain"),
        per_device_train_batch_size=2,
        gradient_accumulation_steps=2,
        max_steps=STEPS,
        learning_rate=1e-3,
        lr_scheduler_type="cosine",
        max_grad_norm=0.0,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        bf16=False,
        seed=0,
        **prepared.trainer_settings,
    )
    net = AutoModelForCausalLM.from_pretrained(model)
    made = SFTTrainer(
        model=net,
        args=args,
        train_dataset=prepared.train,
        processing_class=open_folder(model).tokenizer,
        data_collator=prepared.collator,
    )
    made.optimizer_cls_and_kwargs = zo.AdamW, {"lr": 1e-3}
    made.create_optimizer()  # over all parameters: later only those that live would be in it
    if turns.order != "random":
        net.requires_grad_(False)
    made.add_callback(Switches(turns))
    made.train()
    return [each["loss"] for each in made.state.log_history if "loss" in each], made.model


@pytest.mark.parametrize("order", ["random", "ascending"])
def test_losses_are_those_of_trl_without_offload(order: str, model: Path, tmp_path: Path) -> None:
    turns = BlockTurns(LAYERS, 2, order, EVERY)
    losses, trained = plain(model, turns)
    out = tmp_path / "out"
    ours = run(model, out, "--live-blocks", 2, "--live-order", order, "--optimizer-tier", "nvme")
    assert ours == [(loss, [f"model.layers.{index}" for index in turns.at(step)]) for step, loss in enumerate(losses)]
    values = {name: param.detach() for name, param in AutoModelForCausalLM.from_pretrained(out).named_parameters()}
    assert tools.distance(values, {name: param.detach() for name, param in trained.named_parameters()}) == 0


def test_masters_go_with_their_block(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A plan counts fewer bytes, a run has other numbers in 16 bits, and goes on as it began."""
    found, planned = [], []
    for master in ("keep", "drop"):
        flags = ["--live-blocks", "1", "--live-order", "ascending", "--live-master", master, "--precision", "bf16"]
        capsys.readouterr()
        assert main(words(model, tmp_path / master, *flags, "--steps", 2 * LAYERS, "--dry-run", "--json")) == 0
        rows = json.loads(capsys.readouterr().out)["plan"]["bytes"].values()
        planned.append(sum(row.get("nvme", 0) for row in rows))
        found.append(run(model, tmp_path / master, *flags, steps=2 * EVERY * LAYERS))
    block = sum(param.numel() for param in LlamaForCausalLM.from_pretrained(model).model.layers[0].parameters())
    # Two slots of 4 bytes, for 2 bytes of one and the gap of another where frozen values lay. Masters of the turn
    # before are there until the next generation.
    assert planned[0] - planned[1] == pytest.approx(((LAYERS - 1) * (8 - 2 + 2) - 8) * block, rel=0.1)
    (kept, blocks), (dropped, same) = (zip(*rows, strict=True) for rows in found)
    again = EVERY * LAYERS  # here the first block comes back
    assert blocks == same and kept[: again - EVERY] == dropped[: again - EVERY] and kept[again:] != dropped[again:]
    assert main(words(model, tmp_path / "drop", "--live-blocks", "1", "--steps", 2)) == zo.ConfigError.exit_code
    assert "live_master=" in capsys.readouterr().err


@pytest.mark.parametrize("at", [2, full(3)])
def test_a_run_goes_on_with_its_blocks(at: int, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It fails behind a switch, or within a turn; evaluations and their best weights are among its steps."""
    flags = ["--live-blocks", "auto", "--eval-data", model.parent / "held_out.jsonl", "--eval-every", 2]
    whole, begin = run(model, tmp_path / "whole", *flags), zo.LiveBlocks.begin_step
    assert len(whole[0][1]) == LAYERS - 1  # all that fit

    def fail(self: zo.LiveBlocks, step: int, optimizer: Any) -> Any:
        found = begin(self, step, optimizer)
        if step == at:
            raise zo.StorageError("injected")
        return found

    monkeypatch.setattr(zo.LiveBlocks, "begin_step", fail)
    tools.reset_accelerate()
    assert main(words(model, tmp_path / "parts", *flags, "--steps", STEPS)) == zo.StorageError.exit_code
    monkeypatch.undo()
    assert run(model, tmp_path / "parts", *flags) == whole
    assert (tmp_path / "parts" / "model.safetensors").read_bytes() == (
        tmp_path / "whole" / "model.safetensors"
    ).read_bytes()
    assert main(["verify", str(tmp_path / "parts")]) == 0


def _on_ranks(model: Path, out: Path) -> list[tuple[float, list[str]]]:
    return run(model, out, "--live-blocks", 1)


@pytest.mark.full
def test_on_two_ranks(model: Path, tmp_path: Path) -> None:
    whole = run(model, tmp_path / "one", "--live-blocks", 1, "--batch", 4)
    two = in_processes(2, _on_ranks, model, tmp_path / "two")[0]
    assert [loss for loss, _ in two] == pytest.approx([loss for loss, _ in whole], rel=1e-5)
    assert [names for _, names in two] == [names for _, names in whole]


def test_the_plan_says_what_lives(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plans = {}
    for flags in ([], ["--live-blocks", "1"], ["--live-blocks", "1", "--live-order", "descending"]):
        tools.reset_accelerate()
        command = words(model, tmp_path / "out", "--steps", 4, "--dry-run", "--json", "--optimizer-tier", "nvme")
        if not flags:
            at = command.index("--live-every")
            del command[at : at + 2]
        assert main([*command, *flags]) == 0
        plans[" ".join(flags)] = json.loads(capsys.readouterr().out)["plan"]
    whole, random, descending = plans.values()
    assert whole["live"] is None
    assert random["live"] == {"blocks": 1, "of": LAYERS, "order": "random", "every": EVERY, "most": LAYERS - 1}
    block = sum(param.numel() for param in LlamaForCausalLM.from_pretrained(model).model.layers[0].parameters())
    assert whole["trained_parameters"] - random["trained_parameters"] == (LAYERS - 1) * block
    assert descending["trained_parameters"] == block
    # 12 bytes for each parameter that lives; a commit writes none of them again.
    for plan in plans.values():
        written, needed = plan["nvme_written_bytes_per_step"], 12 * plan["trained_parameters"]
        assert 0.99 * needed <= written <= 1.05 * needed
    assert main(words(model, tmp_path / "out", "--live-blocks", "1", "--steps", 4, "--dry-run")) == 0
    text = capsys.readouterr().out
    assert f"1 of {LAYERS} blocks live at a time, drawn anew every {EVERY} steps; {LAYERS - 1} would fit" in text
    assert f"of {LAYERS} blocks are never trained" in text


def test_all_that_does_not_go_with_it_is_named(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--live-blocks", 1, "--lora", 4, "--quantize", "nf4", "--group-size", 2, "--live-order", "up")
    assert main(words(model, tmp_path / "out", *flags)) == zo.ConfigError.exit_code
    text = capsys.readouterr().err
    for problem in ("live_order='up'", "lora=4 freezes", "quantize=nf4 freezes", "group_size=2", "4 problems"):
        assert problem in text
    for more, problem in (
        (("--live-blocks", LAYERS), f"{LAYERS} of {LAYERS} blocks are to live"),
        (("--live-blocks", "most"), "invalid"),
        ((), "give --live-blocks N"),
    ):
        try:
            code = main(words(model, tmp_path / "out", *more))
        except SystemExit as error:
            code = int(str(error.code))
        assert code == zo.ConfigError.exit_code
        assert problem in capsys.readouterr().err
    assert not (tmp_path / "out" / "nvme").exists()
