"""`zero-offload finetune` of a folder of random weights inside a memory cgroup, from start to export.

A Llama of 3B parameters in bf16 (6 GB of files), in 4 GiB: by LoRA, then all parameters with compact states. The
command, its libraries and page cache count from the first instruction on. Then `zero-offload evaluate` reads what was
exported, in the same group. Needs root, for the cgroup, and 70 GB of disk.

The bars: the kernel ends nothing, and the peak is within the limit, of which page cache takes the rest. Each step has a
finite loss. The export is complete, and `evaluate` gives a finite loss.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import json
import math
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from harness import command
from harness.memory.folders import decoder_files, write_weights
from harness.memory.lives import ended_early, exit_code, rows_or_failure
from harness.processes import MemoryGroup, memory_group
from harness.rows import Row, row, show, ungraded, write
from safetensors import safe_open
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, PreTrainedTokenizerFast

from zero_offload.base.types import MIB, format_bytes, parse_bytes

SIZES = {"350m": (32, 1024, 2560, 16, 8192), "3b": (28, 3072, 8192, 24, 32000)}
"""Layers, width, width within, heads, vocabulary."""
HOW = ("lora", "full")
FLAGS = {"lora": ["--lora", "16"], "full": ["--states", "compact"]}
LIMIT, QUICK_LIMIT, STEPS = "4GiB", "1536MiB", 3

TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
MODULES = ("argparse", "base64", "bisect", "calendar", "copy", "difflib", "fnmatch", "inspect", "shutil", "textwrap")


@dataclass(frozen=True)
class Size:
    """A Llama's."""

    name: str

    @property
    def config(self) -> LlamaConfig:
        layers, width, inner, heads, vocab = SIZES[self.name]
        return LlamaConfig(
            num_hidden_layers=layers,
            hidden_size=width,
            intermediate_size=inner,
            num_attention_heads=heads,
            num_key_value_heads=8,
            vocab_size=vocab,
            max_position_embeddings=2048,
            eos_token_id=0,
            bos_token_id=None,
            dtype="bfloat16",
            architectures=["LlamaForCausalLM"],
        )


def descriptions() -> Iterator[tuple[str, str]]:
    """Functions of the standard library, and their docstrings."""
    for name in MODULES:
        for function, value in sorted(vars(importlib.import_module(name)).items()):
            if inspect.isfunction(value) and not function.startswith("_") and (said := inspect.getdoc(value)):
                yield f"{name}.{function}", said


def _tokenizer() -> PreTrainedTokenizerFast:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special = ["<|end|>", "<|user|>", "<|assistant|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=2048, special_tokens=special, initial_alphabet=alphabet)
    made.train_from_iterator((text for _, text in descriptions()), trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, eos_token=special[0], pad_token=special[0])
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def write_data(path: Path) -> None:
    rows = [
        [{"role": "user", "content": f"What does {name} do?"}, {"role": "assistant", "content": text}]
        for name, text in descriptions()
    ]
    path.write_text("".join(json.dumps({"messages": row}) + "\n" for row in rows))


def run(group: MemoryGroup, *arguments: object) -> tuple[str, float]:
    """The output of a command in the group, and its seconds."""
    words = [sys.executable, "-m", "zero_offload", *map(str, arguments)]
    started = time.perf_counter()
    done = subprocess.run(group.command(words), stdout=subprocess.PIPE, text=True, check=False)
    if done.returncode != 0:
        raise ended_early(group, str(arguments[0]), f"exit code {done.returncode}")
    return done.stdout, time.perf_counter() - started


def measure(how: str, size: Size, root: Path, args: argparse.Namespace) -> list[Row]:
    """The rows of one way to train. NoGroupError where no group can be made."""
    limit, name, out = format_bytes(args.limit_bytes), f"{size.name} {how}", root / how
    print(f"{name} in {limit}", flush=True)
    shape = ["--seq", args.seq, "--batch", 1, "--accumulate", 1]
    with memory_group(args.limit_bytes) as group:
        command_line = ["finetune", root / "model", "--data", root / "chat.jsonl", "--out", out, *shape]
        _, seconds = run(group, *command_line, "--steps", args.steps, *FLAGS[how], "--json")
        peak = group.group_peak_bytes
        told, read_s = run(
            group, "evaluate", out, "--data", root / "one.jsonl", "--seq", args.seq, "--nvme", root / "read", "--json"
        )
        peak_read = group.group_peak_bytes
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    finite = [each for each in rows if math.isfinite(each["loss"])]
    step_s = statistics.median(each["step_s"] for each in rows[1:] or rows)
    resident = max(each["peak_rss_bytes"] for each in rows)
    evaluated = json.loads(told.splitlines()[-1])["loss"]
    print(f"  {seconds:.0f} s in all, {step_s:.1f} s a step; read again in {read_s:.0f} s, loss {evaluated:.4f}")
    return [
        row(f"{name}: peak in the group", peak / MIB, "MiB", f"its {limit}", args.limit_bytes / MIB, 1.0),
        row(f"{name}: largest resident set", resident / MIB, "MiB", f"its {limit}", args.limit_bytes / MIB, 1.0),
        row(f"{name}: steps without a finite loss", args.steps - len(finite), "", "one; none is wanted", 1, 0.0),
        row(f"{name}: tensors missing in the export", _num_missing(how, out, root), "", "one; none is wanted", 1, 0.0),
        row(
            f"{name}: evaluate, peak in the group", peak_read / MIB, "MiB", f"its {limit}", args.limit_bytes / MIB, 1.0
        ),
        row(f"{name}: evaluate without a finite loss", not math.isfinite(evaluated), "", "one; none is wanted", 1, 0.0),
        ungraded(f"{name}: in all", seconds, "s", "its steps, no bar", step_s * args.steps, 1.0),
    ]


def _num_missing(how: str, out: Path, root: Path) -> int:
    """Tensors that the export lacks: of the folder's, or of adapters with an end that is not zero."""
    found = set()
    for file in out.glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            found |= set(tensors.keys())
    if how == "full":
        index = json.loads((root / "model" / "model.safetensors.index.json").read_text())
        return len(index["weight_map"].keys() - found)
    layers = json.loads((root / "model" / "config.json").read_text())["num_hidden_layers"]
    return 7 * 2 * layers - len(found)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = command.parser(__name__, __doc__, f"350m in {QUICK_LIMIT}")
    command.add_nvme(parser)
    parser.add_argument("--model", choices=SIZES, help="default: 3b; quick: 350m")
    parser.add_argument("--how", choices=HOW, nargs="+", default=list(HOW))
    parser.add_argument("--limit", help=f"of the group (default: {LIMIT}; quick: {QUICK_LIMIT})")
    parser.add_argument("--seq", type=int, default=128, help="tokens (default: 128)")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"default: {STEPS}")
    args = parser.parse_args(arguments)
    args.limit_bytes = parse_bytes(args.limit or (QUICK_LIMIT if args.quick else LIMIT))
    args.model = args.model or ("350m" if args.quick else "3b")
    return args


def main(arguments: Sequence[str]) -> int:
    args = parse(arguments)
    rows: list[Row] = []
    with command.scratch_directory(args.nvme) as root:
        config = Size(args.model).config
        numel = write_weights(root / "model", decoder_files(config), config)
        _tokenizer().save_pretrained(root / "model")
        write_data(root / "chat.jsonl")
        (root / "one.jsonl").write_text("".join((root / "chat.jsonl").read_text().splitlines(keepends=True)[:2]))
        print(f"{numel / 1e6:.0f}M parameters", flush=True)
        for how in args.how:
            found = partial(measure, how, Size(args.model), root, args)
            rows += rows_or_failure(f"{args.model} {how}", args.limit_bytes, found)
            shutil.rmtree(root / how, ignore_errors=True)  # the next one needs the room
            write(rows, args.json)
    show(rows)
    return exit_code(rows)
