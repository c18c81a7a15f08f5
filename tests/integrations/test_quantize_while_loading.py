"""`zo.load_pretrained(quantize=)` before `zo.offload`: the tensors, layers and losses of `from_pretrained`."""

from __future__ import annotations

import importlib.util
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.tools import transformers  # first  # isort: skip
import torch
from peft import LNTuningConfig, LoraConfig, get_peft_model, prepare_model_for_kbit_training
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoConfig, AutoModelForCausalLM

import zero_offload as zo
from tests.helpers import folders
from tests.helpers.launched import run_program
from tests.helpers.ranks import RankPools
from tests.helpers.tools import WHERE, Tokens, on_ranks
from zero_offload.base.precision import QUANTIZATIONS
from zero_offload.integrations import quantize as quantize_module
from zero_offload.integrations.quantize import PartRecipe
from zero_offload.plan.quantized import offloaded_tensors
from zero_offload.standins.owners import recipe_of

pytestmark = pytest.mark.tools

DTYPE = torch.bfloat16


def library_config(kind: str, dtype: torch.dtype) -> Any:
    """The config that a user of the library writes."""
    if kind == "fp8":
        from torchao.quantization import Float8WeightOnlyConfig

        return transformers.TorchAoConfig(Float8WeightOnlyConfig())
    if kind == "int8":
        return transformers.BitsAndBytesConfig(load_in_8bit=True)
    return transformers.BitsAndBytesConfig(
        load_in_4bit=True,
        bnb_4bit_quant_type="nf4",
        bnb_4bit_use_double_quant=kind == "nf4-double",
        bnb_4bit_compute_dtype=dtype,
    )


def from_library(folder: Path, kind: str, dtype: torch.dtype = DTYPE) -> nn.Module:
    """The whole model in memory, quantized."""
    model: nn.Module = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, quantization_config=library_config(kind, dtype), device_map="cpu"
    )
    return model


def deferred(folder: Path, dtype: torch.dtype = DTYPE) -> Any:
    with zo.deferred_init(values="skip"):
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=dtype)


def quantized(folder: Path, kind: str, dtype: torch.dtype = DTYPE) -> Any:
    model = deferred(folder, dtype)
    zo.load_pretrained(model, folder, quantize=kind)
    return model


def bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def mixtral(path: Path) -> Path:
    config = transformers.MixtralConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=folders.VOCAB, num_local_experts=4,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.MixtralForCausalLM(config).to(DTYPE)
    model.save_pretrained(path, save_original_format=False)  # as the model has its experts
    return path


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folders of models, by kind; one of bf16, and of several files."""
    place = tmp_path_factory.mktemp("models")
    made: dict[str, Path] = {}

    def folder(kind: str) -> Path:
        if kind not in made:
            path = place / kind
            more: dict[str, Any] = {"attention_bias": True} if kind == "llama" else {}
            made[kind] = (
                mixtral(path)
                if kind == "mixtral"
                else folders.write_folder(path, kind, sharded=True, dtype="bfloat16", **more)
            )
        return made[kind]

    return folder


# The library's bits


CASES = [
    (kind, quantize)
    for kind in ("llama", "qwen3", "gpt2", "mixtral")
    for quantize in QUANTIZATIONS
    if (kind, quantize) != ("gpt2", "fp8")  # torchao knows linear layers alone
]


@pytest.mark.door(
    "bitsandbytes, torchao, transformers",
    load="`zo.load_pretrained(quantize=)`",
    between="nf4, nf4-double, int8, fp8",
    outcome="right",
)
@pytest.mark.parametrize("kind, quantize", CASES)
def test_tensors_are_those_of_the_library(models: Callable[[str], Path], kind: str, quantize: str) -> None:
    """Biases, a tied head, layers that hold their weights transposed, experts; each tensor is made, in any order."""
    ours, theirs = quantized(models(kind), quantize), from_library(models(kind), quantize)
    expected = dict(offloaded_tensors(theirs))
    found = dict(offloaded_tensors(ours))
    assert found.keys() == expected.keys()
    num_quantized = 0
    for name, tensor in reversed(found.items()):
        recipe = recipe_of(tensor)
        assert recipe is not None and not recipe.is_skipped, name
        assert (tensor.shape, tensor.dtype) == (expected[name].shape, expected[name].dtype), name
        made = recipe.make()
        assert made.shape == tensor.shape and torch.equal(bits(made.to(tensor.dtype)), bits(expected[name])), name
        num_quantized += tensor.dtype not in (torch.float32, DTYPE)
    assert num_quantized >= 8
    assert [type(layer) for layer in ours.modules()] == [type(layer) for layer in theirs.modules()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_weight_is_quantized_from_the_models_dtype(tmp_path: Path, dtype: torch.dtype) -> None:
    folder = folders.write_folder(tmp_path, dtype="bfloat16" if dtype is torch.float32 else "float32")
    ours, theirs = quantized(folder, "nf4", dtype), from_library(folder, "nf4", dtype)
    layers = [model.model.layers[0].mlp.up_proj for model in (ours, theirs)]
    assert layers[0].weight.quant_state.dtype == layers[1].weight.quant_state.dtype == dtype
    made = recipe_of(layers[0].weight)
    assert made is not None and torch.equal(made.make(), layers[1].weight.detach())


def test_what_does_not_fit_leaves_the_model_as_it_was(models: Callable[[str], Path]) -> None:
    model = deferred(models("llama"))
    before = [(type(module), dict(module._parameters)) for module in model.modules()]
    with pytest.raises(zo.CheckpointError, match="missing in the files.*\n.*unknown to the model"):
        zo.load_pretrained(model, models("gpt2"), quantize="nf4")
    after = [(type(module), dict(module._parameters)) for module in model.modules()]
    assert [kind for kind, _ in before] == [kind for kind, _ in after]
    for (_, old), (_, new) in zip(before, after, strict=True):
        assert old.keys() == new.keys() and all(old[name] is new[name] for name in old)
    assert not getattr(model, "is_quantized", False) and getattr(model, "hf_quantizer", None) is None
    assert all(param.requires_grad for param in model.parameters())
    zo.load_pretrained(model, models("llama"), quantize="nf4")


def test_what_cannot_be_is_one_error(models: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    folder = models("llama")
    with pytest.raises(zo.ConfigError, match="quantize='int3' is unknown; use one of nf4, nf4-double, int8, fp8"):
        quantized(folder, "int3")
    with pytest.raises(zo.ConfigError, match="quantized already"):
        zo.load_pretrained(quantized(folder, "nf4"), folder, quantize="nf4")
    with pytest.raises(zo.ConfigError, match=r"Float8Tensor of torch.bfloat16, and inputs are torch.float32"):
        zo.offload(quantized(folder, "fp8"), zo.OffloadConfig(precision="fp32"))
    with pytest.raises(zo.ConfigError, match="get_peft_model"):
        with zo.deferred_init(values="skip"):
            model = get_peft_model(folders.model(), LoraConfig(target_modules="all-linear"))
        zo.load_pretrained(model, folder, quantize="nf4")
    offloaded = zo.offload(deferred(folder), zo.OffloadConfig())
    with pytest.raises(zo.ConfigError, match="before zo.offload"):
        zo.load_pretrained(offloaded, folder, quantize="nf4")
    with pytest.raises(zo.ZeroOffloadError, match="comes before zo.offload, such as peft's prepare_model_for_kbit"):
        prepare_model_for_kbit_training(zo.offload(quantized(folder, "nf4"), zo.OffloadConfig()))
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "bitsandbytes" else find_spec(name, *more)
    )
    with pytest.raises(zo.CapacityError, match=r"bitsandbytes, which is not installed; pip install 'zero_offload\["):
        quantized(folder, "nf4")


@pytest.mark.parametrize("quantize", QUANTIZATIONS)
def test_peft_takes_the_layers(models: Callable[[str], Path], quantize: str) -> None:
    """Its classes for quantized layers; adapters are real, and as over the library's model."""
    settings: dict[str, Any] = {"r": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM"}
    found = []
    for base in (quantized(models("llama"), quantize), from_library(models("llama"), quantize)):
        torch.manual_seed(3)
        found.append(get_peft_model(base, LoraConfig(**settings)))
    assert [type(layer) for layer in found[0].modules()] == [type(layer) for layer in found[1].modules()]
    adapters = [
        {name: param.detach() for name, param in model.named_parameters() if param.requires_grad} for model in found
    ]
    assert adapters[0].keys() == adapters[1].keys() and len(adapters[0]) == 28
    assert all(not param.is_meta and param.dtype == torch.float32 for param in adapters[0].values())
    assert any(param.abs().sum() > 0 for param in adapters[0].values())


@pytest.mark.parametrize("kept, times", [(1 << 20, 1), (0, 2)])
def test_scales_wait_for_their_section(
    models: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, kept: int, times: int
) -> None:
    """A weight is quantized once, or again where nothing was kept, to the same bits."""
    made: list[Tensor] = []
    make = quantize_module._parts_of

    def counted(quantize: Any, values: Tensor) -> dict[str, Tensor]:
        made.append(values)
        return make(quantize, values)

    monkeypatch.setattr(quantize_module, "_KEPT_BYTES", kept)
    monkeypatch.setattr(quantize_module, "_parts_of", counted)
    model, theirs = quantized(models("llama"), "nf4"), dict(offloaded_tensors(from_library(models("llama"), "nf4")))
    for suffix in ("weight", "absmax"):
        for name, tensor in offloaded_tensors(model):
            if name.endswith(suffix) and f"{name.removesuffix('.absmax')}.absmax" in theirs:
                recipe = recipe_of(tensor)
                assert recipe is not None and torch.equal(bits(recipe.make()), bits(theirs[name]))
    assert len(made) == 14 * times


# Offloaded


def row_of(step: int, rank: int = 0) -> dict[str, Tensor]:
    ids = Tokens(8)[2 * step + rank]["input_ids"][None]
    return {"input_ids": ids, "labels": ids}


def losses(model: Any, steps: int = 3, rank: int = 0) -> list[float]:
    model.train()
    optimizer = zo.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-2)
    found = []
    for step in range(steps):
        loss = model(**row_of(step, rank)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def adapted(base: nn.Module, dtype: torch.dtype = DTYPE) -> Any:
    torch.manual_seed(3)
    config = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    model = get_peft_model(base, config, autocast_adapter_dtype=False)
    for param in model.parameters():
        if param.requires_grad:  # peft makes them fp32 beside integers, which precision="bf16" does not
            param.data = param.data.to(dtype)
    return model


def on_drives(folder: Path, **changes: Any) -> zo.OffloadConfig:
    settings: dict[str, Any] = {"params": "nvme", "optimizer": "nvme", "nvme": str(folder), "existing": "discard"}
    return zo.OffloadConfig(**({"precision": "bf16"} | settings | changes))


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("quantize", QUANTIZATIONS)
def test_losses_are_those_of_the_library(
    models: Callable[[str], Path], tmp_path: Path, quantize: str, where: str
) -> None:
    """Of its whole model, in memory."""
    ours, theirs = (adapted(make(models("llama"), quantize)) for make in (quantized, from_library))
    zo.offload(ours, on_drives(tmp_path) if where == "nvme" else zo.OffloadConfig(precision="bf16"))
    assert ours.to("cpu") is ours  # as trainers call it
    assert losses(ours) == losses(theirs)
    zo.close(ours)


@pytest.mark.parametrize(
    "config",
    [
        LoraConfig(target_modules="all-linear", init_lora_weights=False),
        LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head", "embed_tokens"]),
        LNTuningConfig(task_type="CAUSAL_LM"),
    ],
    ids=["lora", "saved modules", "norms"],
)
def test_what_peft_does_before_offload(models: Callable[[str], Path], tmp_path: Path, config: Any) -> None:
    """It makes what stays in 16 bits fp32, and copies modules that are trained. Their values are to be read still."""

    def prepared(base: nn.Module) -> Any:
        base = prepare_model_for_kbit_training(base, gradient_checkpointing_kwargs={"use_reentrant": False}).to("cpu")
        torch.manual_seed(3)
        return get_peft_model(base, config)

    ours, theirs = (prepared(make(models("llama"), "int8")) for make in (quantized, from_library))
    assert [param.dtype for param in ours.parameters()] == [param.dtype for param in theirs.parameters()]
    zo.offload(ours, on_drives(tmp_path, precision="fp32"))
    assert losses(ours) == losses(theirs)
    zo.close(ours)


def test_adapters_that_read_weights_come_after_offload(models: Callable[[str], Path], tmp_path: Path) -> None:
    """DoRA takes the norms of a copy of each layer."""
    config = LoraConfig(target_modules="all-linear", use_dora=True, init_lora_weights=False)
    base = quantized(models("llama"), "nf4", torch.float32)
    with pytest.raises(zo.ConfigError, match="DoRA.*come after it too: 'with zo.gathered"):
        get_peft_model(base, config)
    base = zo.offload(quantized(models("llama"), "nf4", torch.float32), on_drives(tmp_path, precision="fp32"))
    with zo.gathered(base):
        torch.manual_seed(3)
        ours = get_peft_model(base, config)
    zo.offload(ours)
    torch.manual_seed(3)
    theirs = get_peft_model(from_library(models("llama"), "nf4", torch.float32), config)
    assert losses(ours) == losses(theirs)
    zo.close(ours)


def on_a_rank(rank: int, world_size: int, folder: Path, quantize: str, nvme: Path) -> list[float]:
    model = adapted(quantized(folder, quantize, torch.float32), torch.float32)
    zo.offload(model, on_drives(nvme, precision="fp32"))
    found = losses(model, rank=rank)
    zo.close(model)
    return found


@pytest.mark.parametrize("quantize", ["nf4", "fp8"])
def test_two_ranks(models: Callable[[str], Path], tmp_path: Path, pools: RankPools, quantize: str) -> None:
    """The losses of both ranks' rows are those of the library's model, which sees all of them."""
    theirs = adapted(from_library(models("llama"), quantize, torch.float32), torch.float32).train()
    optimizer = zo.AdamW([param for param in theirs.parameters() if param.requires_grad], lr=1e-2)
    expected: list[list[float]] = [[], []]
    for step in range(3):
        for rank in range(2):
            loss = theirs(**row_of(step, rank)).loss
            (loss / 2).backward()
            expected[rank].append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    assert on_ranks(pools, 2, on_a_rank, models("llama"), quantize, tmp_path) == expected


@pytest.mark.parametrize("quantize", [None, "nf4"])
def test_adapters_that_are_added_later_begin_as_peft_says(
    models: Callable[[str], Path], tmp_path: Path, quantize: str | None
) -> None:
    """In zo.deferred_init(values="skip"), after the load was planned: they are in no file."""
    base = deferred(models("llama"))
    zo.load_pretrained(base, models("llama"), quantize=quantize)
    with zo.deferred_init(values="skip"):
        model = get_peft_model(base, LoraConfig(r=4, target_modules="all-linear"))
    zo.offload(model, on_drives(tmp_path))
    with zo.gathered(model) as values:
        adapters = {name: value for name, value in values.items() if "lora_" in name}
        assert len(adapters) == 28
        for name, value in adapters.items():
            assert bool(value.abs().sum() > 0) == ("lora_A" in name), name
    assert len(set(losses(model))) == 3
    zo.close(model)


def test_a_part_without_a_plan_still_lacks_its_weights(models: Callable[[str], Path]) -> None:
    model = nn.ModuleDict({"planned": deferred(models("llama")), "other": deferred(models("llama"))})
    zo.load_pretrained(model["planned"], models("llama"))
    zo.offload(model, zo.OffloadConfig())
    with pytest.raises(zo.ConfigError, match="has no weights yet"):
        model["other"](**row_of(0))


def test_a_resume_makes_nothing(models: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = zo.offload(adapted(quantized(models("llama"), "nf4")), on_drives(tmp_path))
    before = losses(first)
    zo.close(first)
    monkeypatch.setattr(PartRecipe, "make", lambda *_: pytest.fail("a weight was made"))
    second = zo.offload(adapted(quantized(models("llama"), "nf4")), on_drives(tmp_path, existing="resume"))
    assert losses(second, 1)[0] < before[0]
    zo.close(second)


def test_one_weight_at_a_time_is_unquantized(tmp_path: Path) -> None:
    """Moving in, what is made by operations is far below the model, which is larger than one weight by far."""
    folder = folders.write_folder(
        tmp_path / "large", dtype="bfloat16", hidden_size=512, intermediate_size=1024, num_hidden_layers=8
    )
    model = quantized(folder, "nf4")
    weight = 512 * 1024 * 2
    with LiveBytes() as live:
        zo.offload(model, on_drives(tmp_path / "drive"))
    assert live.peak < 16 * weight, live.peak / weight  # fp32 copies of one within the library, a chunk, what is kept
    assert sum(path.stat().st_size for path in folder.glob("*.safetensors")) > 30 * weight
    zo.close(model)


class LiveBytes(TorchDispatchMode):
    """Bytes of storages that operations make, while they are referred to."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor) and not tensor.is_meta:
                storage = tensor.untyped_storage()
                if storage._cdata not in self._known and storage.resizable():  # else it is an alias
                    self._known.add(storage._cdata)
                    self.now += storage.nbytes()
                    self.peak = max(self.peak, self.now)
                    weakref.finalize(storage, self._end, storage._cdata, storage.nbytes())
        return made

    def _end(self, key: int, nbytes: int) -> None:
        self._known.discard(key)
        self.now -= nbytes


def test_the_example_trains(models: Callable[[str], Path], tmp_path: Path) -> None:
    script = Path(__file__).parents[2] / "examples" / "qlora.py"
    printed = run_program(script, models("qwen3"), tmp_path, folder=tmp_path)
    found = [float(line.split()[-1]) for line in printed.splitlines() if line.startswith("step ")]
    assert len(found) == 8 and found[-1] < found[0]
    assert (tmp_path / "adapter" / "adapter_model.safetensors").is_file()
    assert len(script.read_text().splitlines()) <= 40
