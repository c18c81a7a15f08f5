"""LoRA over a base many times the memory, in a memory cgroup: what it reads and writes; killed and resumed.

Two folders of random bf16 weights: `moe` has the shape of Qwen3-30B-A3B (128 experts in each layer, 8 for a token).
`dense` has the shape of Llama-8B, quantized to nf4 as it is loaded. The base stays on the drive. Adapters of rank 8 on
attention are trained, with their states in memory and recomputed layers. Each process runs in a cgroup of 4 GiB, so
libraries and page cache count too. It is killed in a backward, and a second one resumes in the same group. Needs root,
for the cgroup, and disk: 1.2 GB for each layer of `moe`, 22 GB for `dense`.

The bars: the kernel ends nothing and the peak is within the limit. Bytes read in a step are at most 1.05 times the
counted ones. Counted are layers twice, for forward and backward, and the embedding and the head once. Layers have the
experts that tokens choose and those between them in a group. No file of the base changes. Bytes written in a step are
at most those of the adapters and their states. Losses go on bit for bit.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path

import torch
from harness import command
from harness.disks import Rates, disk_rates
from harness.memory.folders import decoder_files, write_weights
from harness.memory.lives import STEPS_MIN, exit_code, killed_and_resumed, rows_or_failure, train_steps
from harness.rows import Row, row, show, write
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen3MoeConfig

import zero_offload as zo
from zero_offload.base.types import MIB, format_bytes, parse_bytes

MODELS = ("moe", "dense")
QUANTIZE = {"moe": None, "dense": "nf4"}
LAYERS, QUICK_LAYERS = {"moe": 48, "dense": 32}, {"moe": 2, "dense": 4}
LIMIT, QUICK_LIMIT, STEPS = "4GiB", "2GiB", 4
REACH_BYTES = 1.05
GROUP_SIZE = 28
"""Experts that are fetched together: 252 MiB."""
RANK, STATES_BYTES = 8, 14
"""Of adapters; bytes of one of their elements: 12 with master and moments, and 2 of the value's copy on NVMe."""
CPU_MEMORY_SHARE = 0.6
"""Of the limit, for units: libraries, activations and page cache take the rest."""


def config_of(model: str, layers: int, vocab: int | None) -> PretrainedConfig:
    if model == "moe":
        return Qwen3MoeConfig(
            num_hidden_layers=layers,
            hidden_size=2048,
            intermediate_size=6144,
            moe_intermediate_size=768,
            num_experts=128,
            num_experts_per_tok=8,
            num_attention_heads=32,
            num_key_value_heads=4,
            head_dim=128,
            vocab_size=vocab or 151936,
            norm_topk_prob=True,
            tie_word_embeddings=False,
            dtype="bfloat16",
            architectures=["Qwen3MoeForCausalLM"],
        )
    return LlamaConfig(
        num_hidden_layers=layers,
        hidden_size=4096,
        intermediate_size=14336,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=vocab or 128256,
        tie_word_embeddings=False,
        dtype="bfloat16",
        architectures=["LlamaForCausalLM"],
    )


@dataclass(frozen=True)
class Job:
    """The model and settings that a process trains with."""

    model: str
    folder: str
    run: str
    seq: int
    num_steps: int
    cpu_memory: int
    num_threads: int

    @property
    def name(self) -> str:
        return {"moe": "MoE, bf16", "dense": "dense, nf4"}[self.model]


def train(job: Job) -> None:
    """The process in the group."""
    torch.set_num_threads(job.num_threads)
    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(job.folder)
    with zo.deferred_init(values="skip"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    zo.load_pretrained(model, job.folder, quantize=QUANTIZE[job.model])
    if job.model == "moe":
        zo.group_experts(model, GROUP_SIZE)
    fetched = count_experts(model)
    zo.checkpoint(model.model.layers)
    model = get_peft_model(model, LoraConfig(r=RANK, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"]))
    zo.offload(
        model,
        zo.OffloadConfig(
            params="nvme",
            grads="cpu",
            optimizer="cpu",
            nvme=job.run,
            cpu_memory=job.cpu_memory,
            existing="resume",
        ),
    )

    def loss_of(step: int) -> torch.Tensor:
        tokens = torch.randint(config.vocab_size, (1, job.seq), generator=torch.Generator().manual_seed(step))
        loss: torch.Tensor = model(input_ids=tokens, labels=tokens, use_cache=False).loss
        return loss

    train_steps(model, 1e-3, job.num_steps, loss_of, lambda: {"experts": sum(fetched.values())})


def count_experts(model: nn.Module) -> dict[str, int]:
    """By layer, how many experts its last forward fetched, which a backward fetches again."""
    fetched = dict[str, int]()

    def count(name: str, args: tuple[torch.Tensor, ...]) -> None:
        chosen = args[1].unique().tolist()
        groups = groupby(chosen, lambda expert: expert // GROUP_SIZE)
        fetched[name] = sum(_num_fetched(list(group)) for _, group in groups)

    for name, module in model.named_modules():
        if hasattr(module, "num_experts") and name.endswith(".experts"):
            module.register_forward_pre_hook(lambda _, args, name=name: count(name, args))
    return fetched


def _num_fetched(chosen: list[int]) -> int:
    """Of a group, all from the first to the last one chosen; those chosen alone, where they are fewer than half."""
    span = chosen[-1] - chosen[0] + 1
    return span if 2 * len(chosen) >= span else len(chosen)


def counted_bytes(config: PretrainedConfig, quantize: str | None, num_experts: int) -> int:
    """Bytes that a step reads: layers in forward and in backward, with this many experts; the embedding and the head
    once.

    Weights that stay in host memory are counted too. Parts of blocks that were not asked for are not. nf4 has half a
    byte for each weight of a linear layer and an fp32 scale for 64 of them.
    """
    *layers, embedding, head = decoder_files(config)

    def nbytes(shapes: dict[str, tuple[int, ...]], per_weight: float) -> float:
        return sum(torch.Size(at).numel() * (per_weight if len(at) > 1 else 2) for at in shapes.values())

    per_weight = 0.5 + 4 / 64 if quantize == "nf4" else 2
    in_layers = sum(
        nbytes({name: at for name, at in each.items() if ".experts." not in name}, per_weight) for each in layers
    )
    expert = nbytes({name: at for name, at in layers[0].items() if ".experts.0." in name}, per_weight)
    return int(2 * (in_layers + num_experts * expert) + nbytes(dict(embedding), 2) + nbytes(dict(head), 2))


def _marks(folder: Path) -> dict[str, tuple[int, int, int]]:
    """Properties of files that a write changes."""
    found = ((path.name, path.stat()) for path in sorted(folder.iterdir()))
    return {name: (stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns) for name, stat in found}


def measure(job: Job, config: PretrainedConfig, limit_bytes: int, rates: Rates) -> list[Row]:
    """Train, kill, resume; the rows of one model. NoGroupError where no group can be made."""
    folder, name = Path(job.folder), job.name
    size = format_bytes(sum(path.stat().st_size for path in folder.iterdir()))
    print(f"{name}: {config.num_hidden_layers} layers, {size} of files, in {format_bytes(limit_bytes)}", flush=True)
    marks = _marks(folder)
    lives = killed_and_resumed("frozen", job, limit_bytes)
    now = _marks(folder)
    num_changed = sum(marks.get(file) != now.get(file) for file in marks.keys() | now.keys())
    read, disk_read, disk_written = map(lives.median, ("read_bytes", "disk_read_bytes", "disk_written_bytes"))
    counted = counted_bytes(config, QUANTIZE[job.model], int(lives.median("experts")))
    step_s, resident, rss = lives.median("step_s"), lives.settled[-1]["resident_bytes"], lives.peak_rss_bytes
    print(
        f"  {step_s:.1f} s a step of {job.seq} tokens; {format_bytes(int(read))} read, {format_bytes(counted)} counted"
    )
    print(f"  {format_bytes(int(disk_read))} read and {format_bytes(int(disk_written))} written by the kernel's count")
    print(f"  resident at the end of a step: {resident}; largest resident set {format_bytes(rss)}")
    print(f"  {len(lives.losses_made_twice)} losses made twice")
    written = max(lives.median("written_bytes"), disk_written)
    states = lives.after.trained * STATES_BYTES / MIB + 1
    return lives.rows(
        name,
        rates,
        row(f"{name}: read in a step", read / MIB, "MiB", "counted", counted / MIB, REACH_BYTES),
        row(f"{name}: written in a step", written / MIB, "MiB", "adapters and states, and 1 MiB", states, 1.0),
        row(f"{name}: files of the base that changed", num_changed, "", "one; none is wanted", 1, 0.0),
    )


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = command.parser(__name__, __doc__, f"two and four layers, 8192 words, in {QUICK_LIMIT}")
    command.add_workers(parser)
    parser.add_argument("--model", choices=MODELS, nargs="+", default=list(MODELS))
    parser.add_argument("--layers", type=int, help="default: 48 of moe, 32 of dense; quick: 2 and 4")
    parser.add_argument("--limit", help=f"of the group (default: {LIMIT}; quick: {QUICK_LIMIT})")
    parser.add_argument("--seq", type=int, default=128, help="tokens (default: 128)")
    parser.add_argument("--steps", type=int, default=STEPS, help=f"in all (default: {STEPS})")
    args = parser.parse_args(arguments)
    args.limit_bytes = parse_bytes(args.limit or (QUICK_LIMIT if args.quick else LIMIT))
    if args.steps < STEPS_MIN:
        parser.error(f"--steps {args.steps} leaves none before the kill or behind it; take {STEPS_MIN} or more")
    return args


def main(arguments: Sequence[str]) -> int:
    args = parse(arguments)
    if args.worker:
        train(Job(**json.loads(args.worker)))
        return 0
    rows: list[Row] = []
    for model in args.model:
        layers = args.layers or (QUICK_LAYERS if args.quick else LAYERS)[model]
        config = config_of(model, layers, 8192 if args.quick else None)
        with command.scratch_directory(args.nvme) as root:
            write_weights(root / "base", decoder_files(config), config)
            memory = int(args.limit_bytes * CPU_MEMORY_SHARE)
            job = Job(model, str(root / "base"), str(root / "run"), args.seq, args.steps, memory, args.threads)
            found = partial(measure, job, config, args.limit_bytes, disk_rates(root))
            rows += rows_or_failure(job.name, args.limit_bytes, found)
        write(rows, args.json)
    show(rows)
    return exit_code(rows)
