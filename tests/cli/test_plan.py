from __future__ import annotations

import json
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from zero_offload.base.types import GIB
from zero_offload.cli import plan as plan_command
from zero_offload.cli.main import main
from zero_offload.finetune import gpt
from zero_offload.finetune.fit import measure
from zero_offload.finetune.fit.request import GpuHere
from zero_offload.hardware import rates

MEMORY = ["--cpu-memory", "64GiB"]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Nothing is remembered of this machine, and nothing of the user's is touched."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def plan(capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, dict[str, Any]]:
    code = main(["plan", "--json", *MEMORY, *flags])
    return code, json.loads(capsys.readouterr().out)


def test_a_preset_with_everything_on_nvme(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--params-tier", "nvme", "--optimizer-tier", "nvme", "--durability", "scratch"]
    code, result = plan(capsys, "--model", "gpt125m", "--nvme", str(tmp_path), *flags)
    count = result["parameters"]
    assert code == 0 and result["fits"] and result["reasons"] == []
    assert count > 80_000_000
    # The values are a part of the optimizer's extents, and shown as parameters.
    assert result["nvme_written_bytes_per_step"] == 12 * count
    assert (result["bytes"]["nvme"]["params"], result["bytes"]["nvme"]["optimizer"]) == (2 * count, 10 * count)
    assert result["bytes"]["cpu"]["grads"] == 2 * count


def test_sizes_and_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    code, result = plan(capsys, "--model", "8B", "--ranks", "4", "--device-memory", "24GiB")
    assert code == 0
    assert result["parameters"] == 8 * 10**9
    # The value is part of the optimizer's 12 bytes, and stored once.
    assert result["bytes"]["cpu"]["params"] == 2 * 2 * 10**9
    assert result["bytes"]["cpu"]["optimizer"] == (12 - 2) * 2 * 10**9
    assert result["bytes"]["cpu"]["grads"] == 4 * 2 * 10**9
    assert result["bytes"]["device"]["available"] == 24 * GIB
    assert result["bytes"]["cpu"]["available"] == 64 * GIB


def test_accumulation_and_precision(capsys: pytest.CaptureFixture[str]) -> None:
    _, result = plan(capsys, "--model", "320M", "--accumulate", "2")
    assert result["bytes"]["cpu"]["grads"] == 4 * 320_000_000
    _, result = plan(capsys, "--model", "320M", "--precision", "fp32")
    assert result["bytes"]["cpu"]["params"] == 4 * 320_000_000


@pytest.mark.parametrize(("states", "nbytes"), [("fp32", 12.0), ("bf16", 8.0), ("compact", 5.03125)])
def test_formats_of_states(states: str, nbytes: float, capsys: pytest.CaptureFixture[str]) -> None:
    """The value is 2 of these bytes, and stored once."""
    _, result = plan(capsys, "--model", "320M", "--states", states)
    assert result["bytes"]["cpu"]["optimizer"] == pytest.approx((nbytes - 2) * 320_000_000, abs=100)
    with pytest.raises(SystemExit) as ended:
        raise SystemExit(main(["plan", "--states", "fp8"]))
    assert ended.value.code == 2 and "use 'fp32', 'bf16' or 'compact'" in capsys.readouterr().err


NVME_ROOM = ["--nvme-capacity", "2000GiB", "--nvme", "never-made"]


def test_wear_of_a_drive(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--model", "3200M", *NVME_ROOM, "--params-tier", "nvme", "--optimizer-tier", "nvme"]
    _, result = plan(capsys, *flags, "--step-time", "38.4")
    written = 12 * 3_200_000_000
    assert result["wear"] == {
        "states_bytes_per_step": written,
        "activation_bytes_per_step": 0,
        "commit_bytes_per_step": 0,
        "is_upper_bound": False,
        "tbw": 600.0,
        "steps_to_tbw": 15625,
        "tb_per_day": 86.4,
        "days_to_tbw": 15625 * 38.4 / 86400,
    }
    _, result = plan(capsys, *flags, "--tbw", "1200")
    assert result["wear"]["steps_to_tbw"] == 31250
    # By the predicted seconds.
    assert result["wear"]["days_to_tbw"] == 31250 * result["step"]["predicted_s"] / 86400


def test_wear_of_commits_and_of_several_drives(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--model", "3200M", *NVME_ROOM, "--commit-every", "10"]
    _, result = plan(capsys, *flags)
    assert result["wear"]["states_bytes_per_step"] == 0
    assert result["wear"]["commit_bytes_per_step"] == 12 * 320_000_000
    _, result = plan(capsys, *flags, "--ranks", "4", "--nvme", "one", "another")
    assert result["wear"]["commit_bytes_per_step"] == 12 * 320_000_000 // 2
    _, result = plan(capsys, *flags[:-1], "auto")
    assert result["wear"]["commit_bytes_per_step"] == 12 * 3_200_000_000
    assert result["wear"]["is_upper_bound"]
    _, result = plan(capsys, *flags[:-1], "2 Min", "--step-time", "25")
    assert result["wear"]["commit_bytes_per_step"] == 12 * 3_200_000_000 // 5
    assert not result["wear"]["is_upper_bound"]


def test_the_default_interval_spares_the_drives(capsys: pytest.CaptureFixture[str]) -> None:
    """2 seconds a step: a generation in each would wear a drive out in a week."""
    flags = ["--model", "3200M", *NVME_ROOM, "--step-time", "2"]
    _, result = plan(capsys, *flags)
    steps, generation = result["commit_every"], 12 * 3_200_000_000
    assert steps == result["recommended_commit_every"] == 1010
    assert result["wear"]["commit_bytes_per_step"] == generation // steps
    assert 365 <= result["wear"]["days_to_tbw"] < 366
    _, better = plan(capsys, *flags, "--tbw", "1200")
    assert better["commit_every"] == 505
    _, each = plan(capsys, *flags, "--commit-every", "1")
    assert (each["commit_every"], each["recommended_commit_every"]) == (1, 1010)
    assert each["wear"]["days_to_tbw"] < 0.4
    _, scratch = plan(capsys, *flags, "--durability", "scratch")
    assert (scratch["commit_every"], scratch["recommended_commit_every"]) == (1, None)


def test_beside_states_that_wear_a_drive_generations_add_a_tenth(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--model", "3200M", *NVME_ROOM, "--step-time", "2", "--optimizer-tier"]
    _, result = plan(capsys, *flags[:-1], "--params-tier", "cpu", *flags[-1:], "nvme")
    assert result["recommended_commit_every"] is None  # what rests there is a generation already
    main(["plan", "--ram", "64GiB", "--nvme", "2x7GB/s", "--gpu", "rtx4090", "--model", "llama-8b", "--json"])
    wear = json.loads(capsys.readouterr().out)["wear"]
    assert 0.09 < wear["commit_bytes_per_step"] / wear["states_bytes_per_step"] <= 0.1


def test_how_often_to_commit_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["plan", "--model", "3200M", *MEMORY, *NVME_ROOM, "--step-time", "2"]
    main(flags)
    text = capsys.readouterr().out
    assert "give train --commit-every 1010, or zo.OffloadConfig commit_every=1010. " in text
    assert "With one in each step, the default, a drive rated for 600 TB lasts 8 h 41 min\n" in text
    for given in ("10", "auto"):
        main([*flags, "--commit-every", given])
        assert (
            "--commit-every 1010 spares the drives: a drive rated for 600 TB then lasts 365 days\n"
            in capsys.readouterr().out
        )
    main([*flags, "--commit-every", "2000"])
    assert "spares the drives" not in capsys.readouterr().out
    main([*flags, "--params-tier", "nvme", "--optimizer-tier", "nvme"])
    assert "  states that rest on drives are written in each step: --states compact writes" in capsys.readouterr().out


def test_wear_of_gradients_in_a_loop(capsys: pytest.CaptureFixture[str]) -> None:
    """A micro-batch by itself writes the fp32 sums of a unit; all of them at a unit write them once."""
    tiers = ["--params-tier", "nvme", "--grads-tier", "nvme", "--optimizer-tier", "nvme"]
    flags = ["--model", "llama-8b", *NVME_ROOM, *tiers, "--accumulate", "5"]
    _, result = plan(capsys, *flags)
    once = result["wear"]["states_bytes_per_step"]
    assert once == 16 * result["parameters"]
    _, result = plan(capsys, *flags, "--loop")
    assert result["wear"]["states_bytes_per_step"] == once + 4 * 4 * result["parameters"]
    _, result = plan(capsys, *flags, "--ranks", "2", "--nvme", "one", "another")
    assert result["wear"]["states_bytes_per_step"] == once / 2


def test_wear_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["plan", "--model", "3200M", *MEMORY, *NVME_ROOM]
    main([*flags, "--optimizer-tier", "nvme"])
    text = capsys.readouterr().out
    assert "each drive is written 35.8 GiB per step: 35.8 GiB of states that rest on it\n" in text
    assert (
        " s per step; a drive rated for 600 TB lasts " in text and ", 15,625 steps (--tbw says another rating)" in text
    )
    main([*flags, "--commit-every", "auto", "--step-time", "38.4", "--tbw", "300"])
    text = capsys.readouterr().out
    assert "35.8 GiB of commits (at most: commit_every=auto goes by time; each step is counted here)" in text
    assert "that is 86.4 TB per day at 38.4 s per step; a drive rated for 300 TB lasts 3 days 11 h, 7,812 steps" in text
    main([*flags, "--commit-every", "10"])
    assert "per step: 3.58 GiB of commits (of 35.8 GiB every 10 steps)\n" in capsys.readouterr().out
    main(["plan", "--model", "3200M", *MEMORY])
    assert "rated for" not in capsys.readouterr().out


def test_what_does_not_fit_exits_3_with_suggestions(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", "8B", *MEMORY]) == 3
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "8B: 8,000,000,000 parameters in 32 units on 1 rank"
    assert any("GiB missing" in line for line in lines)
    assert any(line.startswith("would fit: optimizer='nvme'") for line in lines)
    for way in ("optimizer='nvme', params='nvme'", "--states compact", "LoRA", "2 ranks"):
        assert any(line.startswith(f"would fit: {way}") for line in lines), way
    assert "it does not fit" in lines


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--model", "gpt9000"], "is not a known model; did you mean gpt"),
        (["--optimizer-tier", "nvme"], "optimizer='nvme' needs a directory"),
        (["--ranks", "0"], "error: --ranks 0: give 1 or more"),
        (["--commit-every", "often"], "commit_every='often' is neither a number of optimizer steps nor a duration"),
        (["--tbw", "0"], "both must be more than 0"),
        (["--step-time", "-1"], "both must be more than 0"),
        (["--stage", "5", "--precision", "fp8"], "has 2 problems"),
        (["--model", "llama8b"], "did you mean llama-8b"),
        (["--nvme", "2x7GB/s", "/mnt/nvme0"], "mixes drives and directories"),
        (["--nvme", "2x7GBs"], "2x7GBs is not a speed of drives; write 2x7GB/s"),
        (["--ranks", "3", "--nodes", "2"], "as many ranks as the others"),
        (["--network", "10Gbit/s"], "--network 10Gbit/s is for several machines: say how many by --nodes"),
        (["--ranks", "2", "--nodes", "2", "--network", "10"], "write the rate of a machine's network as 10Gbit/s"),
        (["--hybrid", "--ranks", "2", "--nodes", "2", "--stage", "0"], "every rank has all states at stage 0"),
        (["--tokens", "0"], "error: --tokens 0: give 1 or more"),
        (["--ram", "64"], "'64' has no unit: write '64GiB'"),
        (["--model", "0B"], "--model 0B: a model has parameters"),
        (["--ram", "64GiB", "--cpu-memory", "8GiB"], "give one of them"),
        (["--lora", "-1"], "--lora -1: give 1 or more"),
        (["--quantize", "nf4"], "--quantize: only of a Hugging Face folder, such as ./Qwen3-8B"),
        (["llama-8b", "--model", "small"], "both say what to plan; give one of them"),
        (["llama8b"], "did you mean llama-8b"),
    ],
)
def test_what_makes_no_sense_exits_2(capsys: pytest.CaptureFixture[str], flags: list[str], words: str) -> None:
    assert main(["plan", *flags]) == 2
    assert words in capsys.readouterr().err


ISSUE = "plan --model llama-8b --gpu rtx4090 --ram 64GiB --nvme 2x7GB/s --tokens 8192"


def test_a_machine_that_is_not_here(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(ISSUE.split()) == 0
    text = capsys.readouterr().out
    lines = text.splitlines()
    assert lines[0] == "llama-8b: 8,030,261,248 parameters in 34 units on 1 rank"
    assert lines[1].startswith("auto: params ") and "optimizer" in lines[1] and "% nvme" in lines[1]
    assert "it fits" in lines
    for words in (
        " for 8,192 tokens of a rank, ",
        "  busy: compute ",
        "  bound by drives: a tenth more of it saves ",
        "without offload, if it fitted: ",
        "GiB more RAM: ",
        "1 more drive: ",
        "1 more GPU: ",
        "rates: rtx4090 computes at 0.891 of its 165 TFLOPS (a published run: LLMQ, Qwen2.5-7B, 2,777 tokens/s); ",
        "reads and writes taking turns",
        "a drive rated for 600 TB lasts ",
    ):
        assert words in text, words


def test_micro_batches_by_unit_and_in_a_loop(capsys: pytest.CaptureFixture[str]) -> None:
    flags = [*ISSUE.split(), "--tokens", "16384", "--accumulate", "8"]
    seconds = []
    for order in ([], ["--loop"]):
        assert main([*flags, *order, "--json"]) == 0
        seconds.append(json.loads(capsys.readouterr().out)["step"]["predicted_s"])
    assert seconds[0] < seconds[1]
    assert main(flags) == 0
    assert "16,384 tokens of a rank in 8 micro-batches, all at a unit before the next" in capsys.readouterr().out


def test_its_figures_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    tiers = "--params-tier cpu --grads-tier cpu --optimizer-tier nvme"
    assert main([*ISSUE.split(), *tiers.split(), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    step = result["step"]
    # 8192 tokens: a forward, most of another in backward, and twice that for gradients.
    assert step["compute_s"] == pytest.approx(8192 * 7.5 * (8.03e9 - 0.525e9) / (0.891 * 165e12), rel=0.1)
    assert step["predicted_s"] >= step["no_offload_s"] >= step["compute_s"] > 0
    assert step["bottleneck"] == "drives" and step["bottleneck_saves_s"] > 0
    assert step["break_even_tokens"] > 8192
    # Where rests what is given: more RAM would not change it.
    assert [offer["what"] for offer in step["offers"]] == ["more drive", "more GPU"]
    assert step["offers"][0]["step_s"] < step["predicted_s"]
    assert step["offers"][1]["tokens_per_s"] > step["tokens_per_s"]
    assert result["fits"] and result["bytes"]["cpu"]["available"] < 64 * GIB
    assert result["placement"] == {"params": {"cpu": 1.0}, "grads": {"cpu": 1.0}, "optimizer": {"nvme": 1.0}}
    assert result["wear"]["days_to_tbw"] == result["wear"]["steps_to_tbw"] * step["predicted_s"] / 86400


def test_several_machines(capsys: pytest.CaptureFixture[str]) -> None:
    tiers = "--params-tier cpu --grads-tier cpu --optimizer-tier nvme"
    flags = "plan --json --model llama-8b --gpu h100 --ranks 64 --nodes 8 --ram 2TiB --nvme 4x7GB/s --tokens 2048"
    assert main([*flags.split(), *tiers.split()]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["step"]["busy"]["network"] > 0
    assert result["bytes"]["cpu"]["available"] == int(2048 * GIB * 0.9) // 8
    assert result["step"]["offers"][-1]["what"] == "more GPU in each machine"


def test_a_slow_network_between_machines(capsys: pytest.CaptureFixture[str]) -> None:
    flags = "plan --json --model llama-8b --gpu h100 --ranks 16 --nodes 2 --ram 2TiB --nvme 4x7GB/s --tokens 8192"
    found = {}
    for more in ("", "--network 100Gbit/s", "--network 100Gbit/s --hybrid"):
        assert main([*flags.split(), *more.split()]) == 0
        found[more] = json.loads(capsys.readouterr().out)["step"]
    slow, hybrid = found["--network 100Gbit/s"], found["--network 100Gbit/s --hybrid"]
    assert slow["predicted_s"] > 1.5 * found[""]["predicted_s"] and slow["bottleneck"] == "network"
    (offer,) = (each for each in slow["offers"] if "--hybrid" in each["what"])
    assert offer["amount"] is None and offer["step_s"] == pytest.approx(hybrid["predicted_s"])
    assert hybrid["predicted_s"] < slow["predicted_s"]
    assert not any("--hybrid" in each["what"] for each in hybrid["offers"])


def test_what_activations_leave_no_room_for(capsys: pytest.CaptureFixture[str]) -> None:
    tiers = "--params-tier cpu --grads-tier cpu --optimizer-tier nvme"
    flags = f"plan --model llama-8b --gpu rtx4090 --ram 256GiB --nvme 7GB/s --tokens 262144 {tiers}"
    assert main(flags.split()) == 3
    assert "make smaller micro-batches with --accumulate N --loop" in capsys.readouterr().err
    main([*flags.split(), "--accumulate", "32", "--loop", "--json"])
    assert json.loads(capsys.readouterr().out)["activation_bytes"] < 24 * GIB


def test_what_does_not_fit_is_not_predicted(capsys: pytest.CaptureFixture[str]) -> None:
    code, result = plan(capsys, "--model", "8B")
    assert code == 3 and result["step"] is None
    assert result["wear"]["tb_per_day"] is None


def test_this_machine_is_measured_once_and_remembered(
    cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    short = {"ROUNDS": 1, "_DRIVE_S": 0.1, "_LOST_S": 0.01, "_DRIVE_BYTES": 16 << 20, "_UPDATE_NUMEL": 1 << 20}
    for name, value in short.items():
        monkeypatch.setattr(measure, name, value)
    flags = ["--model", "tiny", "--precision", "fp32", "--nvme", str(tmp_path), "--optimizer-tier", "nvme"]
    _, result = plan(capsys, *flags)
    assert "not measured" in result["step"]["rates"] and not cache.exists()
    _, result = plan(capsys, *flags, "--measure")
    written = json.loads((cache / "zero_offload" / "rates.json").read_text())
    drive = next(iter(written["drives"].values()))
    assert drive["read_bytes_per_s"] > 0 and drive["lost_s_per_byte"] >= 0
    assert written["flops"]["fp32"]["flops"] > 0 and written["host"]["bytes_per_s"] > 0
    assert "this machine, measured 20" in result["step"]["rates"] and "not" not in result["step"]["rates"]
    before = plan(capsys, *flags)[1]["step"]
    assert before["rates"] == result["step"]["rates"] and before["predicted_s"] == result["step"]["predicted_s"]
    # Rates that were measured in one precision say nothing of another.
    _, other = plan(capsys, *flags, "--precision", "bf16")
    assert "not measured" in other["step"]["rates"]
    # A file that cannot be read is as if it were not there.
    (cache / "zero_offload" / "rates.json").write_text("{")
    _, result = plan(capsys, *flags)
    assert "not measured" in result["step"]["rates"]


@pytest.mark.parametrize("other", [["--gpu", "h100"], ["--device-memory", "24GiB"]])
def test_a_plan_for_a_gpu_measures_nothing(
    other: list[str], cache: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "measure", lambda *_: pytest.fail("this machine was measured"))
    assert main(["plan", "--model", "tiny", *other, "--measure"]) == 2
    assert f"and {' '.join(other)} plans for a GPU that is not measured" in capsys.readouterr().err
    assert not cache.exists()


GPU_HERE = GpuHere("NVIDIA GeForce RTX 4090", 22 * GIB)
MEASURED = {
    "taken": "2026-11-25 12:00 UTC",
    "matmul_flops": {"bfloat16": 160e12},
    "training_flops": {"bfloat16": 100e12},
    "memory_bytes_per_s": 900e9,
    "upload_bytes_per_s": 20e9,
    "download_bytes_per_s": 21e9,
    "both_bytes_per_s": 18e9,
}
HERE = ["--model", "llama-1b", "--tokens", "16384"]


def test_a_machine_with_a_gpu_is_planned_for_its_gpu(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, on_cpu = plan(capsys, *HERE)
    monkeypatch.setattr(plan_command, "find_gpu_here", lambda: GPU_HERE)
    code, result = plan(capsys, *HERE)
    assert code == 0 and result["step"]["predicted_s"] < on_cpu["step"]["predicted_s"] / 10
    assert "not measured" in result["step"]["rates"] and "rtx4090 computes at 0.891" in result["step"]["rates"]
    available = int(22 * GIB * 0.95) - result["activation_bytes"]
    assert result["bytes"]["device"]["available"] == available
    assert main(["plan", *MEMORY, *HERE]) == 0
    assert "(--measure takes some seconds, and is remembered)" in capsys.readouterr().out
    # A machine that is given is planned for, whatever is here.
    _, other = plan(capsys, *HERE, "--gpu", "h100")
    assert "h100 computes" in other["step"]["rates"]


def test_rates_of_a_gpu_that_were_measured_here_are_used(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_command, "find_gpu_here", lambda: GPU_HERE)
    _, before = plan(capsys, *HERE)
    rates.save(rates.Rates(host={"bytes_per_s": 50e9}, devices={GPU_HERE.name: MEASURED}))
    _, result = plan(capsys, *HERE)
    slower = 0.891 * 165 / 100
    assert result["step"]["compute_s"] == pytest.approx(before["step"]["compute_s"] * slower, rel=0.05)
    assert result["step"]["rates"].startswith(
        "NVIDIA GeForce RTX 4090, measured 2026-11-25 12:00 UTC: trains at 100 TFLOPS, copies 18 GB/s up and 18 GB/s "
        "down; its host updates 50 GB/s"
    )
    # By the name of the table too; another card, and a precision that was not measured, are as before.
    named = {each: plan(capsys, *HERE, "--gpu", each)[1]["step"]["rates"] for each in ("rtx4090", "rtx5090")}
    assert named["rtx4090"].startswith("rtx4090, measured 2026-11-25") and "measured 20" not in named["rtx5090"]
    _, fp32 = plan(capsys, *HERE, "--precision", "fp32")
    assert fp32["step"]["rates"].startswith("rtx4090 computes at 0.891 of its 82.6 TFLOPS, assumed from bf16")
    assert main(["plan", *HERE, "--ram", "64GiB", "--gpu", "rtx5090"]) == 0
    assert "(zero-offload bench --device measures such a GPU where it is" in capsys.readouterr().out


def test_the_block_that_is_timed_multiplies_as_training_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """By way of fp32 where a CPU has no instructions for bf16."""
    widened = []
    original = gpt._WideLinear.forward
    monkeypatch.setattr(gpt, "has_products", lambda dtype: False)
    monkeypatch.setattr(
        gpt._WideLinear, "forward", staticmethod(lambda *values: (widened.append(1), original(*values))[1])
    )
    seconds = partial(measure.median_s, 1)
    assert measure.block_flops(torch.device("cpu"), "bfloat16", 256, 1, 128, seconds) > 0
    assert len(widened) == 2 * 4


def test_help_says_what_is_not_given(capsys: pytest.CaptureFixture[str]) -> None:
    defaults = {"plan": {"params": "cpu", "optimizer": "cpu"}, "train": {"params": "nvme", "optimizer": "nvme"}}
    for command, tiers in defaults.items():
        with pytest.raises(SystemExit):
            main([command, "--help"])
        text = " ".join(capsys.readouterr().out.split())
        expected = {f"--{kind}-tier": tier for kind, tier in tiers.items()} | {
            "--grads-tier": "cpu",
            "--activations-tier": "device",
            "--stage": "3",
            "--precision": "bf16",
            "--states": "fp32",
            "--durability": "process",
            "--commit-every": "1",
            "--recompute": "as the ",
        }
        for flag, default in expected.items():
            after = text.rpartition(f" {flag} ")[2].partition("(default")[2]
            assert after.lstrip(": ").startswith(default), flag


def test_the_reader_of_its_output_is_gone() -> None:
    """As with `| head`: no traceback, and the exit code that a shell gives to a broken pipe."""
    command = [sys.executable, "-m", "zero_offload", "plan", "--model", "tiny"]
    child = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert child.stdout is not None and child.stderr is not None
    child.stdout.close()
    assert (child.stderr.read(), child.wait()) == ("", 141)


AUTO = ["--params-tier", "auto", "--grads-tier", "auto", "--optimizer-tier", "auto"]


def planned(capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[int, dict[str, Any]]:
    code = main(["plan", "--json", *flags])
    return code, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    "flags",
    [
        ["--model", "llama-70b", "--gpu", "h100", "--ranks", "8", "--ram", "1TiB", "--tokens", "4096"],
        ["--model", "8B", "--cpu-memory", "64GiB", *NVME_ROOM[2:], "--nvme-capacity", "80GiB", *AUTO]
        + ["--durability", "scratch"],
    ],
    ids=["of two memories", "of memory and a drive"],
)
def test_a_mixture_may_fit_where_no_tier_has_room_for_all(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    code, result = planned(capsys, *flags)
    assert code == 0 and result["fits"], result["reasons"]


def test_one_more_drive_beside_directories_is_the_same_machine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--device-memory", "24GiB", "--params-tier", "nvme", "--optimizer-tier", "nvme"]
    _, result = plan(capsys, "--model", "gpt350m", "--nvme", str(tmp_path), *flags)
    (offer,) = [each for each in result["step"]["offers"] if each["what"] == "more drive"]
    assert result["step"]["bottleneck"] == "drives"
    assert offer["step_s"] is not None and offer["step_s"] < 0.95 * result["step"]["predicted_s"]


def test_more_memory_is_compared_with_what_auto_may_use(capsys: pytest.CaptureFixture[str]) -> None:
    """Half of what has no budget; so the first more GiB does not bring the other half."""
    flags = [
        "--model",
        "llama-8b",
        "--gpu",
        "rtx4090",
        "--nvme",
        "2x7GB/s",
        "--tokens",
        "8192",
        "--durability",
        "scratch",
    ]
    _, result = planned(capsys, *flags)
    whole = result["bytes"]["cpu"]["available"]
    (offer,) = [each for each in result["step"]["offers"] if each["what"] == "GiB more RAM"]
    _, half = planned(capsys, *flags, "--cpu-memory", str(whole // 2 + offer["amount"] * GIB))
    assert offer["step_s"] == pytest.approx(half["step"]["predicted_s"], rel=0.02)


def test_a_large_size_has_blocks_as_large_models_have(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--gpu", "h100", "--ranks", "8", "--ram", "2TiB", "--nvme", "8x7GB/s"]
    code, result = planned(capsys, "--model", "175B", *flags)
    assert code == 0 and result["parameters"] == 175 * 10**9
    main(["plan", "--model", "175B", *flags])
    assert "in 96 units on 8 ranks" in capsys.readouterr().out


def test_activations_elsewhere_take_room_there(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--model", "llama-8b", "--gpu", "rtx4090", "--ram", "64GiB", "--nvme", "2x7GB/s", "--tokens", "131072"]
    _, on_cpu = planned(capsys, *flags, "--activations-tier", "cpu")
    # Inputs of 32 blocks of width 4096, and of what is before and after them, 16 bits each.
    kept = int(0.9 * 64 * GIB) - on_cpu["bytes"]["cpu"]["available"]
    assert 131072 * 2 * 32 * 4096 <= kept <= 131072 * 2 * 36 * 4096
    _, on_disk = planned(capsys, *flags, "--activations-tier", "nvme")
    assert on_disk["wear"]["activation_bytes_per_step"] == kept // 2  # of two drives each
    assert on_disk["bytes"]["nvme"]["available"] == 2 * 2 * 10**12 - kept
    assert main(["plan", *flags[:-1], "524288", "--activations-tier", "cpu"]) == 3
    assert "--activations-tier nvme" in capsys.readouterr().err


def test_fp32_computes_at_its_own_rate(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--model", "llama-1b", "--gpu", "h100", "--ram", "1TiB", "--tokens", "65536"]
    (_, bf16), (_, fp32) = (planned(capsys, *flags, "--precision", each) for each in ("bf16", "fp32"))
    assert fp32["step"]["compute_s"] == pytest.approx(bf16["step"]["compute_s"] * 989 / 67, rel=0.1)


def test_a_break_even_that_does_not_fit_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(
            [
                "plan",
                "--model",
                "llama-8b",
                "--gpu",
                "rtx4090",
                "--ram",
                "64GiB",
                "--nvme",
                "2x7GB/s",
                "--tokens",
                "8192",
            ]
        )
        == 0
    )
    assert "if their activations had room: see --tokens" in capsys.readouterr().out


def test_ranks_that_are_said_to_fit_do(capsys: pytest.CaptureFixture[str]) -> None:
    tiers = ["--params-tier", "nvme", "--grads-tier", "nvme", "--optimizer-tier", "nvme"]
    flags = ["--model", "8B", *NVME_ROOM[2:], "--nvme-capacity", "100GiB", "--cpu-memory", "64GiB", *tiers]
    code, result = planned(capsys, *flags)
    assert code == 3
    said = [way.split()[2] for way in result["suggestions"] if " ranks, each" in way]
    if said:
        assert planned(capsys, *flags, "--ranks", said[0])[0] == 0
    assert said != ["2"] and planned(capsys, *flags, "--ranks", "2")[0] == 3


def test_the_fastest_of_unequal_drives_wears_most(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--model", "8B", "--cpu-memory", "256GiB", "--optimizer-tier", "nvme", "--nvme"]
    _, equal = planned(capsys, *flags, "4.5GB/s", "4.5GB/s")
    _, unequal = planned(capsys, *flags, "7GB/s", "2GB/s")
    half, most = (each["wear"]["states_bytes_per_step"] for each in (equal, unequal))
    assert most == pytest.approx(2 * half * 7 / 9)


def test_bytes_written_are_those_that_wear(capsys: pytest.CaptureFixture[str]) -> None:
    tiers = ["--params-tier", "nvme", "--grads-tier", "nvme", "--optimizer-tier", "nvme"]
    flags = [
        "--model",
        "llama-8b",
        "--cpu-memory",
        "256GiB",
        "--nvme",
        "4x7GB/s",
        *tiers,
        "--accumulate",
        "5",
        "--loop",
    ]
    _, result = planned(capsys, *flags)
    assert result["nvme_written_bytes_per_step"] == 32 * result["parameters"]
    assert result["wear"]["states_bytes_per_step"] == 8 * result["parameters"]


def test_a_folder_needs_the_extra(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda *_: None)
    for given in ([str(tmp_path)], ["--model", str(tmp_path)]):
        assert main(["plan", *given]) == 3
        assert "pip install 'zero_offload[finetune]'" in capsys.readouterr().err


def test_a_model_may_be_named_without_its_flag(capsys: pytest.CaptureFixture[str]) -> None:
    found = []
    for given in (["llama-1b"], ["--model", "llama-1b"]):
        main(["plan", *given, *MEMORY])
        found.append(capsys.readouterr().out)
    assert found[0] == found[1] != ""


def test_lora_of_a_model_that_is_not_here(capsys: pytest.CaptureFixture[str]) -> None:
    code, result = plan(capsys, "--model", "llama-70b", "--lora", "16", "--gpu", "h100", "--optimizer-tier", "cpu")
    # 16 x (inputs + outputs) of the seven linear layers of 80 blocks.
    sums = (8192 + 8192) + 2 * (8192 + 1024) + (8192 + 8192) + 3 * (8192 + 28672)
    trained = 80 * 16 * sums
    assert (result["trained_parameters"], result["parameters"]) == (trained, 70_553_706_496 + trained)
    rows = result["planned"]["rows"]
    assert rows["gradients"]["memory"] == 2 * trained and rows["optimizer"]["memory"] == 10 * trained
    beside = rows["activations"].get("memory", 0) + rows["program"]["memory"]
    assert result["planned"]["available"]["memory"] == 64 * GIB + beside
    assert code == 3 and result["reasons"][0].startswith("cpu tier: needs 13")
    _, whole = plan(capsys, "--model", "llama-70b", "--gpu", "h100", "--optimizer-tier", "cpu")
    assert whole["trained_parameters"] == whole["parameters"] == 70_553_706_496
    assert plan(capsys, "--model", "8B", "--lora", "8")[1]["trained_parameters"] > 0
