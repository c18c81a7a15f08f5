"""The parser of each command: its flags and help texts.

Owns what a user may type; the module of the command's name has `run(args) -> int`. Nothing here imports torch, so that
help and errors of usage answer at once. The call: `add_parsers`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from zero_offload.base.config import OffloadConfig
from zero_offload.base.errors import ConfigError
from zero_offload.base.precision import TORCH_NAMES
from zero_offload.base.types import ADAPTERS
from zero_offload.checkpoint.run_dir import RUN_HELP
from zero_offload.cli.flags import (
    add_finetune_flags,
    add_folder_argument,
    add_folder_flags,
    add_offload_flags,
    add_tier_flags,
    flag_values,
    steps_or_duration,
    tier_flag_of,
)
from zero_offload.finetune.gpt_config import PRESETS
from zero_offload.finetune.pretrain.settings import TrainConfig
from zero_offload.finetune.settings import TASKS, default_offload
from zero_offload.hardware.machines import GPUS, find_gpu
from zero_offload.plan.wear import TBW_USUAL
from zero_offload.runs.settings import PORT

_FINETUNE_TEXT = """\
Fine-tune a Hugging Face folder on conversations, prompts with completions, text or preferences, whole or by LoRA.
The plan is printed first. The same command again continues an interrupted run at its last commit; OUT gets the model,
its tokenizer and a model card. Flags override run.toml, whose tables are [finetune] (settings named as the flags here,
with _ for -) and [offload] (the fields of OffloadConfig); OUT/run.toml has all settings of the run."""

_TRAIN_TEXT = """\
Train a causal language model on text, its ZeRO shards on the tiers you choose.
With no arguments: a small GPT on the Python standard library's sources, parameters and optimizer states on
NVMe. The same command again continues an interrupted run at its last commit. Flags override run.toml, whose
tables are [train] (settings named as the flags here, with _ for -) and [offload] (the fields of OffloadConfig, with
fractions such as params = { cpu = 0.5, nvme = 0.5 })."""

_CHAT_TEXT = """\
Talk to a model in the terminal: a Hugging Face folder, or the folder of an adapter. Weights stream from memory and
drives, so it may be larger than both GPU and RAM. Nothing is written to DIR.
/reset forgets the conversation, /exit or Ctrl-D ends, Ctrl-C stops an answer. Of a pipe each line is a prompt."""

_CHAT_TOKENS = 512

_EVALUATE_TEXT = """\
Compute the loss and the perplexity of a model on data: a Hugging Face folder, or the folder of an adapter. Of
conversations only the assistant's words count, as in `finetune`. Weights stream from memory and drives. Works under
torchrun too."""

_EVALUATE_METHODS = tuple(method for method in TASKS if method != "dpo")

EVALUATE_SEQ = 1024

PLAN_SETTINGS = {
    "stage": "ZeRO stage: 0, 1, 2 or 3",
    "params": "tier of the parameters: device, cpu, nvme or auto; where --gpu is given and no tier, all three are auto",
    "grads": "tier of the gradients",
    "optimizer": "tier of the optimizer states",
    "activations": "tier of what forward keeps for backward",
    "precision": "bf16, fp16 or fp32",
    "states": "optimizer states: fp32, bf16 or compact",
    "device_memory": "plan for a GPU with this memory, such as 24GiB (default: the GPU that is here, else the CPU)",
    "cpu_memory": "CPU memory of one rank, for example 48GiB",
    "nvme_capacity": "disk space of one rank, for example 400GiB",
    "durability": "commit, process or scratch",
    "commit_every": "between generations: optimizer steps, a duration such as 2min, or auto; where not given, as many "
    "steps as spare the drives",
}

_PLAN_TYPES: dict[str, Callable[[str], object]] = {"stage": int, "commit_every": steps_or_duration}

_REPORT_TEXT = """\
Draw RUN/report.html, a page with plots to hover and zoom that needs no other file, and RUN/report.png; print a summary.
Works while RUN trains; with --watch the page follows it."""


def _add_finetune(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "finetune",
        usage="%(prog)s MODEL --data FILE [FILE ...] [flags]",
        help="fine-tune a Hugging Face folder, whole or by LoRA",
        description=_FINETUNE_TEXT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("finetune_model", nargs="?", metavar="MODEL", help="a Hugging Face folder, or an adapter's")
    parser.add_argument("--config", type=Path, metavar="run.toml", help="settings of the run")
    add_finetune_flags(parser.add_argument_group("the run"))
    add_offload_flags(parser.add_argument_group("where states rest"), default_offload(), "OUT")
    parser.add_argument("--discard", action="store_true", help="delete an earlier run in the same place first")
    parser.add_argument("--dry-run", action="store_true", help="print the plan and stop")
    parser.add_argument("--json", action="store_true", help="print the result as JSON; progress goes to stderr")


def _add_train(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "train",
        help="train a language model on text",
        description=_TRAIN_TEXT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", nargs="?", type=Path, metavar="run.toml", help="settings of the run")
    _add_train_flags(parser.add_argument_group("the run"))
    add_offload_flags(parser.add_argument_group("where states rest"), TrainConfig().offload, "RUNDIR")
    parser.add_argument("--discard", action="store_true", help="delete an earlier run in the same place first")
    parser.add_argument("--json", action="store_true", help="print the result as JSON; progress goes to stderr")


def _add_train_flags(group: argparse._ArgumentGroup) -> None:
    def add(flag: str, help: str, **options: Any) -> None:
        name = flag.removeprefix("--").replace("-", "_")
        default = getattr(TrainConfig, name)
        if default and "default" not in help:
            help = f"{help} (default {default})"
        group.add_argument(flag, dest=f"train_{name}", help=help, **{"metavar": name.upper()} | options)

    add("--model", f"preset: {', '.join(PRESETS)}", metavar="PRESET")
    add("--data", "text to train on (default: the Python standard library)", nargs="+", metavar="FILE_OR_DIR")
    add("--out", "run directory (default: runs/NAME_OF_THE_DATA)", metavar="RUNDIR")
    add("--steps", "optimizer steps", type=int)
    add("--seq", "bytes per sequence", type=int)
    add("--batch", "sequences per micro-batch and rank", type=int)
    add("--accumulate", "micro-batches per step", type=int)
    add("--lr", "peak learning rate", type=float)
    add("--warmup", "steps until the peak", type=int)
    add("--weight-decay", "decay of the matrices", type=float)
    add("--clip", "largest gradient norm", type=float)
    add("--seed", "of the weights and of the data's order", type=int)
    add("--eval-every", "steps between validation losses", type=int)
    add("--trace", "steps to trace, after the second: RUNDIR/trace.json", type=int, metavar="STEPS")
    add(
        "--recompute",
        "activations in backward: none (kept) or block (computed again from the block's inputs, as zo.checkpoint) "
        "(default: as the preset)",
    )


def _add_chat(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "chat",
        help="talk to a model of any size in the terminal",
        description=_CHAT_TEXT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_folder_argument(parser)
    parser.add_argument("--system", metavar="TEXT", help="instructions that the conversation begins with")
    parser.add_argument(
        "--max-new-tokens",
        type=int,
        default=_CHAT_TOKENS,
        metavar="N",
        help=f"of an answer (default {_CHAT_TOKENS})",
    )
    parser.add_argument(
        "--temperature", type=float, metavar="T", help="0 takes the likeliest token (default: as the folder says)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn (default 0)")
    add_tier_flags(parser)
    parser.add_argument("--json", action="store_true", help="print each answer as a JSON object in a line")


def _add_evaluate(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "evaluate",
        help="loss and perplexity of a model of any size on data",
        description=_EVALUATE_TEXT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_folder_argument(parser)
    parser.add_argument("--data", nargs="+", required=True, metavar="FILE_OR_DIR", help="as for finetune")
    parser.add_argument(
        "--method", choices=_EVALUATE_METHODS, default="sft", help="mlm and classify are for encoders (default sft)"
    )
    parser.add_argument("--seq", type=int, metavar="N", help=f"most tokens of a sample (default {EVALUATE_SEQ})")
    parser.add_argument("--batch", type=int, default=4, metavar="N", help="samples of a rank at once (default 4)")
    parser.add_argument("--eval-samples", type=int, default=0, metavar="N", help="print so many answers of the model")
    parser.add_argument("--seed", type=int, default=0, help="of the words that mlm masks (default 0)")
    add_tier_flags(parser)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def _gpu(name: str) -> str:
    """A name that a GPU has; checked before torch is imported and a folder is read."""
    try:
        find_gpu(name)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return name


def _add_plan(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "plan",
        help="will it fit, and how fast: bytes per tier, seconds and SSD bytes per step",
        description="Plan a run without starting it, on this machine or on another. Of a Hugging Face folder it is a "
        "run of `finetune`, with its flags and defaults, and the command is printed. Sizes that are given replace what "
        "this machine has. For a model by its name, tiers that are not given are cpu, those of zo.OffloadConfig. "
        "`train` puts parameters and optimizer states on nvme: give it the same flags. Exit code 3 when the plan does "
        "not fit.",
    )
    # The model, and where its states rest.
    parser.add_argument("folder", nargs="?", metavar="FOLDER", help="a Hugging Face folder, or an adapter's")
    parser.add_argument(
        "--model",
        help="preset, a known model such as llama-8b, a number of parameters such as 8B, or a folder (default small)",
    )
    parser.add_argument(
        "--nvme",
        nargs="+",
        metavar="DIR",
        help="directories of the NVMe tier; or drives that are not here, such as 2x7GB/s, or 7GB/s/5GB/s (read/write)",
    )
    defaults = flag_values(OffloadConfig())
    for name, text in PLAN_SETTINGS.items():
        if defaults[name] is not None and name != "commit_every":
            text = f"{text} (default {defaults[name]})"
        parser.add_argument(tier_flag_of(name), dest=name, help=text, type=_PLAN_TYPES.get(name, str))
    # The machine.
    parser.add_argument("--gpu", type=_gpu, help=f"plan for such GPUs, one for each rank: {', '.join(GPUS)}")
    parser.add_argument("--ram", metavar="SIZE", help="memory of each machine, for example 64GiB, for all of its ranks")
    parser.add_argument("--ranks", type=int, default=1, help="processes that share the model (default 1)")
    parser.add_argument("--nodes", type=int, default=1, help="machines that the ranks are on (default 1)")
    parser.add_argument(
        "--network",
        metavar="RATE",
        help="of each machine, per direction, such as 10Gbit/s (default: that of the GPU's host)",
    )
    parser.add_argument(
        "--hybrid",
        action="store_true",
        help="ranks of a machine divide the states, and all machines hold the same: a mesh of (replicate, shard)",
    )
    # The step.
    parser.add_argument("--tokens", type=int, help="tokens of one rank in a step (default 2048)")
    parser.add_argument("--sequence", type=int, help="tokens that attend to each other (default 4096, or all)")
    parser.add_argument("--accumulate", type=int, help="micro-batches per step (default 1; of a folder, as finetune)")
    parser.add_argument(
        "--loop",
        action="store_true",
        default=None,
        help="micro-batches one after the other; without it as zo.accumulate has them",
    )
    parser.add_argument(
        "--recompute", choices=("block", "none"), help="what backward runs again (default: as the model)"
    )
    parser.add_argument(
        "--measure",
        action="store_true",
        help="measure this machine, its GPU if it has one, and --nvme, and remember it",
    )
    parser.add_argument(
        "--step-time", type=float, metavar="S", help="seconds of a step, in place of the predicted ones"
    )
    parser.add_argument(
        "--tbw",
        type=float,
        default=TBW_USUAL,
        metavar="TB",
        help=f"terabytes that each drive is rated to be written (default {TBW_USUAL:g}: many consumer drives of 1 TB)",
    )
    # Flags of a run of `finetune`, and the form of the output.
    add_folder_flags(parser.add_argument_group("a folder, as finetune has them"))
    parser.add_argument("--json", action="store_true", help="print the plan as JSON")


def _add_doctor(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "doctor",
        help="what this machine has, and a fix per problem",
        description="Check this machine, and the model files that a run reads in place. Exit code 3 when something "
        "does not work.",
    )
    parser.add_argument("run_dir", nargs="?", type=Path, metavar="RUN", help=f"{RUN_HELP}, whose base to check")
    parser.add_argument("--nvme", nargs="+", type=Path, default=[], metavar="DIR", help="directories to check")
    parser.add_argument("--json", action="store_true", help="print the checks as JSON")


def _add_bench(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "bench",
        help="measure how fast a directory is read and written, or how fast the GPU is",
        description="With --io measure each file engine in a directory, checksums included, and print what "
        "io_engine='auto' would use there. Several directories: also the share of each in a stripe. With --device "
        "measure the GPU: products of matrices, training, copies from and to host memory. It is remembered, and plans "
        "for this GPU use it.",
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--io", nargs="+", type=Path, metavar="DIR", help="directories on the drives to measure")
    what.add_argument("--device", action="store_true", help="measure the GPU that a run would compute on")
    parser.add_argument("--size", default="1GiB", metavar="SIZE", help="bytes of the file or copy that is moved [1GiB]")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")


def _add_report(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "report",
        help="plots and summary of a run",
        description=_REPORT_TEXT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run_dir", type=Path, metavar="RUN", help="run directory of a command, or of zo.RunLog")
    parser.add_argument("--out", type=Path, metavar="DIR", help="where page and picture go (default: RUN)")
    parser.add_argument("--watch", action="store_true", help="serve the page on this machine until the run has ended")
    parser.add_argument("--port", type=int, metavar="PORT", help=f"of --watch (default: {PORT}, or any that is free)")
    parser.add_argument(
        "--tbw", type=float, default=TBW_USUAL, help="rating of one drive, TB written (default %(default)g)"
    )
    parser.add_argument("--json", action="store_true", help="print the summary as JSON")


def _add_verify(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "verify",
        help="check every checksum",
        description="Read every block of a run's generations, or of a checkpoint, and compare it with its checksum. "
        "Of a Hugging Face folder, as export and finetune write, say what from_pretrained would miss. "
        "Exit code 5 when something is not what was written, 6 when a run at work there writes over what is read.",
    )
    parser.add_argument("run_dir", type=Path, metavar="RUN", help=f"{RUN_HELP}, or a folder of a model")
    parser.add_argument("--generation", type=int, metavar="N", help="this one only (default: all that are there)")
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")


def _add_export(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "export",
        help="a Hugging Face folder of a run's model",
        description="Write the model of a run's newest generation, or of a checkpoint, as a folder that "
        "from_pretrained loads. It has weights as safetensors, config, generation config, tokenizer and card. Of a "
        "model with adapters of peft the adapters, or the base with them merged. Non-persistent buffers are in no "
        "generation.",
    )
    parser.add_argument("run_dir", type=Path, metavar="RUN", help=RUN_HELP)
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to make; it must not exist, or be empty")
    parser.add_argument("--generation", type=int, metavar="N", help="this one (default: the newest)")
    parser.add_argument(
        "--dtype",
        choices=tuple(TORCH_NAMES),
        help="round the fp32 masters to this (default: what forward computes with)",
    )
    parser.add_argument(
        "--adapters", choices=ADAPTERS, help="of a model with adapters: their folder, or the base with them (separate)"
    )
    parser.add_argument("--max-shard-size", default="5GB", metavar="SIZE", help="of one file (default 5GB)")
    parser.add_argument("--json", action="store_true", help="print what was written as JSON")


def _add_clean(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "clean",
        help="delete a run's files by manifest",
        description="Delete the files of a run: only those that its manifests name. Lists them and asks first; without "
        "a terminal it deletes with --yes only.",
    )
    parser.add_argument("run_dir", type=Path, metavar="RUNDIR", help="run directory, or directory of the NVMe tier")
    parser.add_argument("--dry-run", action="store_true", help="delete nothing; print what would be deleted")
    parser.add_argument("--yes", "-y", action="store_true", help="delete without asking, as scripts have to")
    parser.add_argument("--json", action="store_true", help="print what was deleted as JSON")


def add_parsers(subparsers: argparse._SubParsersAction[Any]) -> None:
    """The parsers of all commands, in the order in which help names them."""
    for add in (
        _add_finetune,
        _add_train,
        _add_chat,
        _add_evaluate,
        _add_plan,
        _add_doctor,
        _add_bench,
        _add_report,
        _add_verify,
        _add_export,
        _add_clean,
    ):
        add(subparsers)
