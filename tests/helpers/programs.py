"""The programs of README, docs and examples: where they are, what their folders become, and which cannot run.

A page's blocks of Python run as they stand, in order, in one process: `run_page`. Blocks of most pages are parts of a
reader's program, which `GIVEN` stands in for. Loops over `range` are cut to `ROUNDS`, and folders are small ones of the
same class (`FOLDERS`). A line `...` is where the reader's own code stands. Commands of shell blocks: `commands`.
Everything that is not run has a reason in `NOT_RUN`; `tests/house/test_pages.py` holds that nothing else is left out.
"""

from __future__ import annotations

import builtins
import json
import os
import re
import runpy
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import zero_offload as zo

ROOT = Path(__file__).parents[2]
PAGES = (
    "README.md",
    *(
        str(path.relative_to(ROOT))
        for path in sorted((ROOT / "docs").rglob("*.md"))
        if path.parent.name not in ("decisions", "about")
    ),
)
EXAMPLES = tuple(sorted(path.name for path in (ROOT / "examples").glob("*.py")))
ROUNDS = 3

Names = dict[str, Any]


# Folders, each made where a program names it


def llama(path: Path) -> None:
    folders().write_folder(path, "llama")


def qwen3(path: Path) -> None:
    folders().write_folder(path, "qwen3")


def qwen3_moe(path: Path) -> None:
    import transformers

    sizes = {"hidden_size": 64, "moe_intermediate_size": 32, "vocab_size": 512, "num_attention_heads": 4}
    config = transformers.Qwen3MoeConfig(num_hidden_layers=2, num_experts=8, num_experts_per_tok=2, **sizes)
    transformers.Qwen3MoeForCausalLM(config).to(torch.bfloat16).save_pretrained(path)
    folders().tokenizer().save_pretrained(path)


def unet(path: Path) -> None:
    import diffusers

    types = {"down_block_types": ("DownBlock2D",) * 2, "up_block_types": ("UpBlock2D",) * 2}
    model = diffusers.UNet2DModel(sample_size=16, block_out_channels=(8, 16), norm_num_groups=4, **types)
    model.save_pretrained(path, variant="fp16" if path.name == "half" else None)


def flux(path: Path) -> None:
    from tests.helpers.diffusion import DENOISERS

    DENOISERS["flux"].build().save_pretrained(path)


def chats(path: Path) -> None:
    folders().write_instructions(path, 40)


def deepspeed(path: Path) -> None:
    stage = {
        "stage": 3,
        "offload_optimizer": {"device": "nvme", "nvme_path": "/mnt"},
        "offload_param": {"device": "cpu"},
    }
    path.write_text(json.dumps({"zero_optimization": stage, "bf16": {"enabled": True}}))


def texts(path: Path) -> None:
    path.mkdir()
    (path / "some.txt").write_text("The quick brown fox jumps over the lazy dog.\n" * 400)


def drive(path: Path) -> None:
    path.mkdir()


FOLDERS: dict[str, Callable[[Path], None]] = {
    "llama": llama,
    "qwen3-moe": qwen3_moe,
    "unet": unet,
    "half": unet,
    "flux": flux,
    "Qwen3-8B": qwen3,
    "Llama-70B": llama,
    "Qwen3-30B-A3B": qwen3_moe,
    "chat.jsonl": chats,
    "test.jsonl": chats,
    "ds_config.json": deepspeed,
    "my_text": texts,
    "nvme0": drive,
}
"""Folders that programs name, relative to where they run, with makers of small ones. `/mnt/nvme0` is `nvme0` here."""


def folders() -> Any:
    """Of tests that have transformers."""
    import tests.helpers.tools  # noqa: F401  # before transformers
    from tests.helpers import folders

    return folders


def make_folders(text: str) -> str:
    """Make the folders that a program names, in this directory; returns the program, which then finds them."""
    for name, make in FOLDERS.items():
        if re.search(rf"(?<![\w.-]){re.escape(name)}(?![\w-])", text) and not Path(name).exists():
            make(Path(name))
    return text.replace("/mnt/nvme0", "nvme0")


# Programs of pages


class Block(NamedTuple):
    """Some lines of a page."""

    page: str
    chapter: str
    line: int
    text: str

    @property
    def name(self) -> str:
        return f"{self.page}:{self.chapter}"


def blocks(page: str, language: str = "python") -> Iterator[Block]:
    text = (ROOT / page).read_text()
    for match in re.finditer(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        before = text[: match.start()]
        headings = re.findall(r"^##+ (.+)$", re.sub(r"^```.*?^```$", "", before, flags=re.M | re.S), re.MULTILINE)
        yield Block(page, headings[-1] if headings else "", before.count("\n") + 2, match[1])


def run_page(page: str, chapter: str | None = None) -> None:
    """Run the blocks of a page, or of one chapter of it, in this directory."""
    names: Names = {"__name__": page, "range": _few}
    seen: Counter[str] = Counter()
    for block in blocks(page):
        number = seen[block.chapter]
        seen[block.chapter] += 1
        if chapter not in (None, block.chapter):
            continue
        given = GIVEN.get(page, {}).get(block.chapter)
        if given is not None:
            names = {"__name__": page, "range": _few, **given[number]()}
        code = re.sub(r"^( *)\.\.\.$", r"\1own_code()", make_folders(block.text), flags=re.MULTILINE)
        names["own_code"] = lambda names=names: names["goes_on"](names)
        # Line numbers of errors are those of the page.
        with mock.patch.object(zo, "steps", partial(_few_steps, zo.steps)):
            exec(compile("\n" * (block.line - 1) + code, os.fspath(ROOT / page), "exec"), names)
        if given is not None:
            names.get("ends_with", lambda _: None)(names)
            if _is_open(names.get("model")):
                zo.close(names["model"])


def chapters(page: str) -> list[str]:
    return list(dict.fromkeys(block.chapter for block in blocks(page)))


def pages_of_tools() -> list[str]:
    """Pages whose programs use software of others."""
    return [page for page in PAGES if page not in GIVEN and any(blocks(page))]


def run_example(name: str) -> None:
    """As its first lines say, in this directory."""
    make_folders(" ".join(words := ARGUMENTS.get(name, ["run"])))
    with mock.patch.object(sys, "argv", [name, *words]):
        runpy.run_path(os.fspath(ROOT / "examples" / name), run_name="__main__")


def _few(*limits: int) -> Any:
    return builtins.range(*limits)[:ROUNDS]


def _few_steps(steps: Any, model: Any, optimizer: Any, total: int, **settings: Any) -> Any:
    return steps(model, optimizer, min(total, ROUNDS), **settings)


def _is_open(model: Any) -> bool:
    from zero_offload.model.api import runtime_of

    owner = runtime_of(model) if isinstance(model, nn.Module) else None
    return owner is not None and not owner.life.is_closed


# Values that parts of programs are given


class MyTransformer(nn.Module):
    """A reader's model: it never asks where its parameters are."""

    def __init__(self, *_: object) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 32)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32), nn.GELU()) for _ in range(3))
        self.head = nn.Linear(32, 64, bias=False)

    def forward(self, ids: Tensor) -> Any:
        x = self.embedding(ids)
        for block in self.blocks:
            x = x + block(x)
        return SimpleNamespace(loss=F.cross_entropy(self.head(x[:, :-1]).float().flatten(0, 1), ids[:, 1:].flatten()))


def batch(step: int) -> Tensor:
    return torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(step))


def plain() -> Names:
    """A model that is not offloaded yet, and settings."""
    made = {"model": MyTransformer(), "MyTransformer": MyTransformer, "config": zo.OffloadConfig()}
    return {"zo": zo, "torch": torch, "nn": nn, **made}


def trained() -> Names:
    """A model that is offloaded, its optimizer, and a step of training."""
    names = plain()
    model = zo.offload(names["model"], names["config"])
    optimizer = zo.AdamW(model.parameters(), lr=1e-3)

    def train_step(step: int) -> float:
        loss = model(batch(step)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return float(loss)

    names |= {"train_step": train_step, "scheduler": torch.optim.lr_scheduler.ConstantLR(optimizer), "norm": 1.0}
    return {**names, "optimizer": optimizer, "loader": [[{"ids": batch(0)}, {"ids": batch(1)}]], "goes_on": step_of}


def step_of(names: Names) -> None:
    """A step, in the place of `...`."""
    model = names["model"]
    names["loss"] = model(**_inputs(model)).loss
    if "scaler" not in names:
        names["loss"].backward()
        names["optimizer"].step()


def _inputs(model: nn.Module) -> dict[str, Tensor]:
    ids = batch(0)
    return {"ids": ids} if isinstance(model, MyTransformer) else {"input_ids": ids, "labels": ids}


def scaled() -> Names:
    return {**plain(), "goes_on": step_of}


def precise() -> Names:
    return {**plain(), "model": folders().model("llama")}


def logits() -> Names:
    """Within a forward, and around a head."""
    model = MyTransformer()
    at = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    hidden, head = torch.randn(8, 32, device=at, requires_grad=True), nn.Linear(32, 64, device=at)
    targets = torch.arange(8, device=at)
    return {**plain(), "hidden": hidden, "self": SimpleNamespace(head=head), "targets": targets, "model": model}


def stepped() -> Names:
    """Before an optimizer is built; a step with it follows."""
    return {**plain(), "ends_with": step_of}


def offloaded() -> Names:
    names = stepped()
    return {**names, "model": zo.offload(names["model"], names["config"])}


def adapted() -> Names:
    """Before adapters come."""
    from peft import LoraConfig, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM

    base = folders().model("llama")
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    auto = {"AutoConfig": AutoConfig, "AutoModelForCausalLM": AutoModelForCausalLM}
    made = {"base": base, "lora": lora, "get_peft_model": get_peft_model, "config": zo.OffloadConfig()}
    return {**plain(), **auto, **made, "goes_on": step_of_adapters, "ends_with": step_of_adapters}


def step_of_adapters(names: Names) -> None:
    names["optimizer"] = zo.AdamW([param for param in names["model"].parameters() if param.requires_grad])
    step_of(names)


def ada_lora() -> Names:
    from peft import AdaLoraConfig, get_peft_model

    settings = {"init_r": 4, "target_r": 2, "total_step": 10, "tinit": 1, "tfinal": 1}
    lora = AdaLoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM", **settings)
    model = zo.offload(get_peft_model(folders().model("llama"), lora), zo.OffloadConfig())
    adapters = [param for param in model.parameters() if param.requires_grad]
    made = {"model": model, "adapters": adapters, "optimizer": zo.AdamW(adapters), "step": 2}
    return {**plain(), **made, "loss": model(**_inputs(model)).loss}


def in_trainer() -> Names:
    from transformers import TrainingArguments

    few = {"max_steps": ROUNDS, "save_steps": ROUNDS, "report_to": [], "disable_tqdm": True}
    data = [{"input_ids": row, "labels": row} for row in batch(0)]

    def arguments(folder: str, **settings: Any) -> Any:
        return TrainingArguments(folder, **(settings | few), dataloader_pin_memory=False)

    return {**plain(), "model": folders().model("llama"), "TrainingArguments": arguments, "dataset": data}


def in_accelerate() -> Names:
    from torch.utils.data import DataLoader

    model = folders().model("llama")
    scheduler = torch.optim.lr_scheduler.ConstantLR(torch.optim.SGD(nn.Linear(1, 1).parameters()))
    made = {"model": model, "config": zo.OffloadConfig(), "loader": DataLoader(batch(0)), "scheduler": scheduler}
    return {**plain(), **made, "ends_with": loop_of_accelerate}


def loop_of_accelerate(names: Names) -> None:
    for ids in names["loader"]:
        names["accelerator"].backward(names["model"](input_ids=ids, labels=ids).loss)


def in_lightning() -> Names:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.inner = MyTransformer()

        def training_step(self, ids: Tensor, index: int) -> Tensor:
            return self.inner(ids).loss  # type: ignore[no-any-return]

        def configure_optimizers(self) -> zo.AdamW:
            return zo.AdamW(self.parameters())

    few = {"devices": 1, "max_epochs": 1, "logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = SimpleNamespace(Trainer=lambda **settings: lightning.Trainer(**(settings | few)))
    return {**plain(), "L": trainer, "module": Module(), "loader": torch.utils.data.DataLoader(batch(0))}


def averaged() -> Names:
    names = trained()
    average = {name: torch.zeros(param.shape) for name, param in names["model"].named_parameters()}
    return {**names, "average": average}


def followed() -> Names:
    """A model with a scale, and a teacher of the same form."""
    student, teacher = MyTransformer(), MyTransformer().requires_grad_(False)
    student.logit_scale = nn.Parameter(torch.tensor(5.0))
    teacher.logit_scale = nn.Parameter(torch.tensor(5.0), requires_grad=False)
    config = zo.OffloadConfig(precision="fp32")
    student, teacher = zo.offload(student, config), zo.offload(teacher, config)
    return {**plain(), "model": student, "student": student, "teacher": teacher}


def changed() -> Names:
    """A model that has been trained, and a class for further blocks."""
    names = trained()

    def block(width: int) -> nn.Module:
        return nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.GELU())

    return {**names, "Block": block, "d": 32, "vocabulary": 70, "ends_with": step_of}


GIVEN: dict[str, dict[str, tuple[Callable[[], Names], ...]]] = {
    "README.md": {"In Python": (lambda: {"MyTransformer": MyTransformer, "batch": batch},)},
    "docs/start/own-loop.md": {"": (dict,)},
    "docs/start/first-gpu-loop.md": {"": (dict,)},
    "docs/use/precision.md": {"Parts of a model": (precise,), "fp16": (scaled,)},
    "docs/use/changing-models.md": {
        "Parameters added later": (adapted,),
        "Modules that are removed, moved or replaced": (changed,),
    },
    "docs/use/micro-batches.md": {"": (trained,)},
    "docs/use/optimizers.md": {"Muon": (stepped, offloaded), "Optimizers of others": (stepped,)},
    "docs/use/larger-than-ram.md": {
        "Models larger than memory": (plain,),
        "Activations": (plain,),
        "Large vocabularies": (logits,),
    },
    "docs/use/hugging-face.md": {"": (adapted,)},
    "docs/use/between-steps.md": {"": (followed,)},
    "docs/use/copies.md": {"": (trained,)},
    "docs/use/trainers.md": {"": (in_trainer,)},
    "docs/use/accelerate.md": {"": (in_accelerate,)},
    "docs/use/lightning.md": {"": (in_lightning,)},
    "docs/use/adapters.md": {"": (adapted, ada_lora)},
    "docs/use/state-dicts.md": {"": (averaged,)},
    "docs/use/distributed-checkpoint.md": {"": (trained,)},
    "docs/move/from-deepspeed.md": {"A whole script": (dict,), "The JSON config": (plain,)},
    "docs/move/from-fsdp2.md": {"": (dict,)},
    "docs/read/steps.md": {"": (trained, trained)},
    "docs/read/report.md": {"": (trained,)},
}
"""By page and chapter: what each block finds. Blocks of other pages find what the blocks before them have made."""
OF_TOOLS = {
    ("docs/use/precision.md", "Parts of a model"),
    ("docs/use/changing-models.md", "Parameters added later"),
    *((f"docs/use/{name}.md", "") for name in ("hugging-face", "trainers", "accelerate", "lightning", "adapters")),
}
"""Pages and chapters whose programs use software of others."""


# Examples


def words_of_texts(path: Path) -> None:
    path.mkdir()
    folders().write_rows(path / "train.jsonl", [{"text": "some words " * 30}] * 64)


FOLDERS["texts"] = words_of_texts
ARGUMENTS = {
    "generate.py": ["llama", "tiers", "some words"],
    "qlora.py": ["llama", "run"],
    "trl_sft.py": ["run", "llama", "texts"],
}
"""Of the examples that take more than a directory."""
PLAIN_EXAMPLES = (
    *("01_train_from_nvme.py", "02_adamw_drop_in.py", "03_frozen_base.py", "05_block_by_block.py"),
    "distributed_checkpoint.py",
)
"""Those that use torch alone."""
EXAMPLES_NOT_RUN = {
    "04_tensor_parallel.py": "four GPUs; tests/cli/test_examples.py runs it on four CPU ranks",
    "ray_train.py": "Ray starts processes, which lack the fake device; tests/machines/test_launchers.py runs it",
}
"""On a device, and why."""


# Commands


def commands(page: str) -> list[str]:
    """Lines of a page's shell blocks, without what is said about them."""
    found = [line for block in blocks(page, "sh") for line in block.text.splitlines()]
    return list(dict.fromkeys(line.partition(" #")[0].strip() for line in found if line.strip()))


INSTEAD = {"gpt125m": "tiny", "1000": "3"}
"""Words of commands for which smaller ones of their class stand."""


def words(command: str) -> list[str]:
    """Arguments of our command, with small things in the place of large ones."""
    found = [INSTEAD.get(word, word) for word in shlex.split(make_folders(command))[1:]]
    if found[0] == "finetune" and "--config" not in found and "--dry-run" not in found:
        found += ["--steps", "2", "--seq", "128", "--batch", "2", "--accumulate", "1", "--discard"]
    return [*found, *(["--max-new-tokens", "4"] if found[0] == "chat" else [])]


NOT_RUN: dict[str, str] = {
    r"(\S*pip|hf) ": "installs or downloads",
    r"python3?(\.12)? ": "a benchmark of hours, or an environment; tests/cli/test_benchmarks.py rehearses them",
    r"(ENV/bin/python|\.venv/bin/python|make|export) ": "the tests themselves",
    r"torchrun ": "a GPU for each rank; tests/cli and tests/integrations run them on CPUs",
    r".*\.\.\.": "the reader's own words stand for `...`",
    r"zero-offload \w+ (RUN|RUNDIR|CKPT)\b": "names a run of the reader's; tests/cli runs them",
    r"zero-offload train run\.toml": "a file of the reader's; tests/cli/test_train.py has one",
    r"zero-offload bench ": "measures for minutes; tests/cli/test_bench.py and tests/fake_gpu/test_commands.py do not",
    r".* \| ": "a pipe: the command itself is run above it",
    r"zero-offload plan .*--measure": "measures for minutes, likewise",
    r"zero-offload finetune --config runs": "needs the run of the command before; tests/integrations/test_finetune.py",
}
"""Commands that are not run, by a pattern of their begin, and why."""


def reason(command: str) -> str | None:
    """Why a command is not run; None where it is."""
    return next((why for pattern, why in NOT_RUN.items() if re.match(pattern, command)), None)
