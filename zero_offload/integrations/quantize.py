"""Linear layers that are quantized while weights are loaded: bitsandbytes' nf4 and int8, torchao's fp8.

transformers' own quantizer chooses the layers, and puts the library's in their places. Their weights are deferred here.
Each tensor of a quantized weight is made from a tensor of the files, by the library's own functions, when `zo.offload`
asks for it. So one weight at a time is in memory unquantized, and bits are those of `from_pretrained`. The calls:
`need_library`; `quantize_layers`; then what knows the files puts them into each `PartRecipe`. Of a folder that
bitsandbytes has quantized already: `stored_quantization`; `stored_layers`, whose tensors are those of the files.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zero_offload.base.errors import CapacityError, ConfigError, IntegrityError
from zero_offload.base.host import host_zeros
from zero_offload.base.precision import FP8, INT8, NF4, NF4_DOUBLE, QUANTIZATIONS
from zero_offload.base.types import MIB
from zero_offload.checkpoint.hf_files import FileTensor, StoredTensor
from zero_offload.integrations.gate import read_object
from zero_offload.model.deferred.from_files import deferred, digest
from zero_offload.model.deferred.recipe import RecordedRecipe, Ref
from zero_offload.model.deferred.recorder import unrecorded
from zero_offload.plan.quantized import BoundTensor, is_wrapper, slots
from zero_offload.standins.owners import keep_recipe

_CONFIG, _MODELOPT = "config.json", "hf_quant_config.json"
"""Where folders say how they are quantized. transformers does not read ModelOpt's file, which may be there alone."""
_FOUR_BIT_KINDS = ("nf4", "fp4")
_NAME_SHOWN = 60
_WEIGHT = "weight"
_KEPT_BYTES = 64 * MIB
"""Scales that wait until their section is filled, at most."""
_ATTRIBUTES = ("is_quantized", "quantization_method", "hf_quantizer", "is_loaded_in_4bit", "is_loaded_in_8bit")
"""Attributes that transformers sets on a model that it quantizes, and that peft and Trainer read."""


def need_library(quantize: object) -> None:
    """Raise ConfigError for what is none of `QUANTIZATIONS`, CapacityError where its library is not installed."""
    if quantize not in QUANTIZATIONS:
        raise ConfigError(f"quantize={quantize!r} is unknown; use one of {', '.join(QUANTIZATIONS)}")
    if missing := find_missing(quantize):
        raise CapacityError(
            f"quantize={quantize!r} needs {', '.join(missing)}, which {'are' if missing[1:] else 'is'} not installed; "
            "pip install 'zero_offload[quantize]'"
        )


def find_missing(quantize: object) -> list[str]:
    """Packages that it needs and that are not installed."""
    needed = ("transformers", "accelerate", "torchao" if quantize == FP8 else "bitsandbytes")
    return [name for name in needed if importlib.util.find_spec(name) is None]


def stored_quantization(path: Path) -> dict[str, Any] | None:
    """How bitsandbytes has quantized the weights of a folder, in the words of its config; None where they are not.

    Raises ConfigError for another library's folder and for words that transformers refuses, CapacityError where
    bitsandbytes is not installed.
    """
    refuse_unknown_method(path)
    words, file = _quantization_words(path)
    if words is None:
        return None
    if not _is_bitsandbytes(words):
        raise ConfigError(
            f"{_read_alone(path, words)}. {_INSTEAD}. Or, in a program, where memory holds it: from_pretrained, then "
            "zo.offload"
        )
    need_library(NF4)
    _check_words(file, words)
    found: dict[str, Any] = words
    return found


def refuse_unknown_method(path: Path) -> None:
    """Raise ConfigError for a folder that is quantized in a way unknown to transformers. It would skip that with a line
    in its log: codes would become weights.
    """
    words, file = _quantization_words(path)
    if words is None or (file.name == _CONFIG and (_is_bitsandbytes(words) or _is_known(words))):
        return
    raise ConfigError(
        f"{_read_alone(path, words)}: transformers does not know the words in {file} either, and would take "
        f"codes for weights. {_INSTEAD}"
    )


_INSTEAD = (
    "Give the folder of the model that was quantized, which its model card names. Quantize it while it is loaded: "
    '--lora 16 --quantize nf4 for a command, zo.load_pretrained(model, folder, quantize="nf4") in a program'
)


def _read_alone(path: Path, words: Any) -> str:
    method = words.get("quant_method") if isinstance(words, dict) else words
    named = "a quantization without quant_method" if method is None else f"{method}"[:_NAME_SHOWN]
    return f"{path} is quantized ({named}), and of such folders those of bitsandbytes are read"


def _is_bitsandbytes(words: Any) -> bool:
    """As transformers tells."""
    return isinstance(words, dict) and bool(
        words.get("quant_method") == "bitsandbytes" or words.get("load_in_4bit") or words.get("load_in_8bit")
    )


def _quantization_words(path: Path) -> tuple[Any, Path]:
    """A folder's words about its weights' quantization, or None, and the file that has them."""
    folder = path if path.is_dir() else path.parent
    file = folder / _CONFIG
    words = _settings_in(file)
    for each in (words, *(value for value in words.values() if isinstance(value, dict))):
        for key in ("quantization_config", "compression_config"):
            if each.get(key) is not None:
                # transformers looks for it at the top alone.
                is_read = each is words and key == "quantization_config"
                return each[key], file if is_read else Path(f"{file}, {key}")
    beside = folder / _MODELOPT
    said = _settings_in(beside).get("quantization", {})
    is_quantized = not isinstance(said, dict) or said.get("quant_algo") is not None
    return ({"quant_method": "modelopt"}, beside) if is_quantized else (None, file)


def _settings_in(file: Path) -> dict[str, Any]:
    """The object in a JSON file; an empty one where there is no file."""
    return read_object(file) if file.is_file() else {}


def _is_known(words: Any) -> bool:
    """True if transformers has a class for the method."""
    method = words.get("quant_method") if isinstance(words, dict) else None
    if not isinstance(method, str) or importlib.util.find_spec("transformers") is None:
        return False
    from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

    return method in AUTO_QUANTIZATION_CONFIG_MAPPING


def _check_words(file: Path, words: Mapping[str, Any]) -> None:
    """Raise ConfigError where transformers cannot use the words of bitsandbytes."""
    from transformers.quantizers.auto import AutoQuantizationConfig

    kind = words.get("bnb_4bit_quant_type", "fp4")
    try:
        AutoQuantizationConfig.from_dict(dict(words))
    except (ValueError, TypeError, AttributeError) as error:  # of its own checks of a setting
        raise ConfigError(f"{file}, quantization_config: {str(error).partition(' - ')[0]}; get it again") from error
    left = words.get("llm_int8_skip_modules") or []
    if not all(isinstance(name, str) for name in left):
        raise ConfigError(f"{file}, quantization_config: llm_int8_skip_modules is {left!r}, not names; get it again")
    if words.get("load_in_4bit") and kind not in _FOUR_BIT_KINDS:
        raise ConfigError(f"{file}, quantization_config: bnb_4bit_quant_type is {kind!r}, not nf4 or fp4; get it again")


def _unquantized_dtype(stored: Mapping[str, StoredTensor]) -> torch.dtype | None:
    """The dtype that a folder's 4-bit weights were quantized from, and become for a layer; else None."""
    for name, tensor in stored.items():
        if "quant_state.bitsandbytes__" in name:
            try:
                words = json.loads(bytes(tensor.read(0, tensor.numel).tolist()))
                found = getattr(torch, words["dtype"])
            except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
                raise IntegrityError(f"{tensor.path}: {name} does not say how it is quantized; get it again") from error
            if not isinstance(found, torch.dtype):
                raise IntegrityError(f"{tensor.path}: {name} has the dtype {words['dtype']!r}; get it again")
            return found
    return None


# Recipes of quantized weights


class _PartCache:
    """Tensors of weights that are asked for later; the oldest are dropped, and made again."""

    def __init__(self) -> None:
        self._parts: dict[tuple[int, str], Tensor] = {}

    def add(self, weight: Quantized, parts: dict[str, Tensor]) -> None:
        self._parts |= {(id(weight), name): part for name, part in parts.items() if name != _WEIGHT}
        surplus = sum(part.nbytes for part in self._parts.values()) - _KEPT_BYTES
        for key in list(self._parts):
            if surplus <= 0:
                break
            surplus -= self._parts.pop(key).nbytes

    def take(self, weight: Quantized, name: str) -> Tensor | None:
        return self._parts.pop((id(weight), name), None)


@dataclass(frozen=True, eq=False)
class Quantized:
    """A weight that becomes several tensors, each made where it is needed."""

    original: Tensor
    """The weight as the files have it, on meta, in the dtype that it is quantized from."""
    parts_of: Callable[[Tensor], dict[str, Tensor]]
    """Its tensors by their names, made of its values."""
    kept: _PartCache


@dataclass(frozen=True, eq=False)
class PartRecipe:
    """How one tensor of a quantized weight is made. Tensors that are made with it are kept for later."""

    weight: Quantized
    name: str
    """In the library's state dict, behind that of the layer."""
    values: FileTensor | None = None
    """The values that the weight is quantized from; None until the files are known."""
    files: object = None
    """Keeps them open."""
    is_skipped: bool = False
    source: None = None

    @property
    def value(self) -> object:
        return self.weight

    def drawn(self) -> bytes:
        return b"" if self.values is None else digest(self.values)

    def make(self) -> Tensor:
        weight = self.weight
        found = weight.kept.take(weight, self.name)
        if found is None:
            if self.values is None:
                raise ConfigError("a quantized weight has no values; call zo.load_pretrained before zo.offload")
            original = self.values.read(0, self.values.numel).view(weight.original.shape).to(weight.original.dtype)
            parts = weight.parts_of(original)
            found = parts.pop(self.name)
            weight.kept.add(weight, parts)
        return found


# Layers


def quantize_layers(
    model: nn.Module, quantize: str, undo: contextlib.ExitStack, dtype: torch.dtype | None = None
) -> None:
    """Put quantized layers into the places that transformers chooses. Their weights are deferred, without files yet.

    A weight is quantized from its values in `dtype`, by default that of the parameter. `undo` puts everything back.
    Raises ConfigError for a model that is not transformers', or has no layer to quantize.
    """
    base = _checked(model, f"quantize={quantize!r}")
    quantizer, kept = _quantizer(quantize, dtype or base.dtype), _PartCache()
    for layer, weight in _replaced(base, quantizer, undo, dtype or base.dtype, f"quantize={quantize!r}"):
        original = torch.empty(weight.shape, dtype=dtype or weight.dtype, device="meta")
        quantized = _way_of(layer, quantizer.quantization_config)
        whole = Quantized(original, partial(_parts_of, quantized), kept)
        _defer(layer, quantized(original), partial(_part, whole))
        if hasattr(layer, "quant_state"):
            layer.compute_dtype, layer.compute_type_is_set = None, False  # that of the first input


def stored_layers(
    model: nn.Module, config: Mapping[str, Any], stored: Mapping[str, StoredTensor], undo: contextlib.ExitStack
) -> None:
    """Put the layers that the files' quantized weights belong to into a deferred model. Their tensors lack values, as
    its other parameters do.

    `config` is what `stored_quantization` has found, `stored` the tensors of the files, or nothing, for a plan. Raises
    ConfigError for a model that is not transformers'.
    """
    from transformers.quantizers.auto import AutoHfQuantizer

    what = "a folder that is quantized already"
    base = _checked(model, what)
    quantizer = AutoHfQuantizer.from_config(dict(config), pre_quantized=True)
    quantizer.validate_environment()
    dtype = _unquantized_dtype(stored) or base.dtype
    for layer, weight in _replaced(base, quantizer, undo, dtype, what):
        original = torch.empty(weight.shape, dtype=dtype, device="meta")
        _defer(layer, _way_of(layer, quantizer.quantization_config)(original), _in_files)


def zero_point_words(model: nn.Module, words: Mapping[str, Any]) -> dict[str, Any]:
    """The words of a config about a quantization, with the form in which layers of gptqmodel have zero points.

    gptqmodel adds one to those of the first form when it loads them, and leaves the words as they were.
    """
    form = _zero_point_form(model)
    return {**words} if form is None else {**words, **dict.fromkeys(_FORM_KEYS, form)}


def check_zero_points(model: nn.Module, path: Path) -> None:
    """Raise ConfigError for a folder of GPTQ whose zero points have another form than those of the model."""
    form = _zero_point_form(model)
    words = _quantization_words(path)[0] if form is not None else None
    said = words if isinstance(words, dict) else {}
    found = next((said[key] for key in _FORM_KEYS if key in said), _FORMS[1])
    if form not in (None, found):
        raise ConfigError(
            f"{path} has zero points in the form {found}, and the layers of this model in the form {form}: one is one "
            "higher than the other. from_pretrained converts them, and frozen weights stay: leave this load out"
        )


def _zero_point_form(model: nn.Module) -> str | None:
    """None where no layer of gptqmodel is. Raises ConfigError where layers have several forms."""
    layers: list[Any] = [module for module in model.modules() if hasattr(module, "qzero_format")]
    forms = {layer.qzero_format() for layer in layers}
    if len(forms) > 1:
        raise ConfigError(
            "layers of this model have zero points in two forms, and a folder has one; load it with one backend, as by "
            'GPTQConfig(backend="gptq_torch")'
        )
    return _FORMS[forms.pop()] if forms else None


_FORMS = {1: "gptq", 2: "gptq_v2"}
_FORM_KEYS = ("checkpoint_format", "format")
"""Keys of a config that say the form; the first is read, where both are there."""


def _parts_of(quantized: Callable[[Tensor], nn.Parameter], values: Tensor) -> dict[str, Tensor]:
    """The tensors of a quantized weight by their names."""
    return {slot.name: slot.tensor.detach() for slot in slots(_holder(quantized(values)))}


def _part(whole: Quantized, slot: BoundTensor) -> PartRecipe:
    return PartRecipe(whole, slot.name)


def _in_files(slot: BoundTensor) -> RecordedRecipe:
    """Its values are in files that are not known yet."""
    return RecordedRecipe(None, Ref.of(slot.tensor, 0), is_skipped=True)


def _checked(model: nn.Module, what: str) -> Any:
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        raise ConfigError(
            f"{what} takes a model of transformers, which says what stays as it is; this is a "
            f"{type(model).__name__}. Load and quantize before peft.get_peft_model or another wrapper"
        )
    if getattr(model, "hf_quantizer", None) is not None:
        raise ConfigError(f"{what}: this {type(model).__name__} is quantized already; build it again")
    return model


def _replaced(
    model: Any, quantizer: Any, undo: contextlib.ExitStack, dtype: torch.dtype, what: str
) -> Iterator[tuple[Any, Tensor]]:
    """The library's layers, each in its place, with the weights that they are to get. `undo` puts everything back."""
    _restore(model, undo)
    before = dict(model.named_modules())
    with unrecorded():
        quantizer.preprocess_model(model=model, dtype=dtype, device_map=None, checkpoint_files=None)
    count = 0
    for path, old in before.items():
        weight = old._parameters.get(_WEIGHT)
        if weight is None or not quantizer.param_needs_quantization(model, f"{path}.{_WEIGHT}"):
            continue
        layer: Any = model.get_submodule(path)
        undo.callback(old._parameters.__setitem__, _WEIGHT, weight)
        if layer is not old:
            undo.callback(model.set_submodule, path, old)
            others = {name: param for name, param in old._parameters.items() if name != _WEIGHT and param is not None}
            for param in others.values():
                undo.callback(param.requires_grad_, param.requires_grad)
                param.requires_grad_(False)  # as transformers does
            layer._parameters.update(others)
            layer.train(old.training)
        yield layer, weight
        count += 1
    if not count:
        raise ConfigError(f"{what}: a {type(model).__name__} has no layer that is quantized")
    model.hf_quantizer = quantizer
    quantizer.postprocess_model(model)


def words_for(quantize: str, dtype: torch.dtype) -> tuple[list[str], str]:
    """The code that a user of the library writes for the same: imports, and the config, which computes in `dtype`."""
    if quantize == FP8:
        imports = ["from torchao.quantization import Float8WeightOnlyConfig", "from transformers import TorchAoConfig"]
        return imports, "TorchAoConfig(Float8WeightOnlyConfig())"
    words = ", ".join(f"{name}={value!r}" for name, value in _settings(quantize, dtype).items())
    return ["from transformers import BitsAndBytesConfig"], f"BitsAndBytesConfig({words})"


def _settings(quantize: str, dtype: torch.dtype) -> dict[str, Any]:
    """Of transformers' `BitsAndBytesConfig`."""
    if quantize == INT8:
        return {"load_in_8bit": True}
    more = {"bnb_4bit_use_double_quant": True} if quantize == NF4_DOUBLE else {}
    return {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": dtype} | more


def _quantizer(quantize: str, dtype: torch.dtype) -> Any:
    import transformers
    from transformers.quantizers.auto import AutoHfQuantizer

    config: Any
    if quantize == FP8:
        from torchao.quantization import Float8WeightOnlyConfig

        config = transformers.TorchAoConfig(Float8WeightOnlyConfig(set_inductor_config=False))
    else:
        bits_and_bytes: Any = transformers.BitsAndBytesConfig
        config = bits_and_bytes(**_settings(quantize, dtype))
    quantizer = AutoHfQuantizer.from_config(config, pre_quantized=False)
    quantizer.validate_environment()
    return quantizer


def _restore(model: Any, undo: contextlib.ExitStack) -> None:
    """Let `undo` put back what transformers sets on a model beside its layers."""
    places = ((vars(model), _ATTRIBUTES), (vars(model.config), ("quantization_config",)))
    had = [{name: place[name] for name in names if name in place} for place, names in places]

    def put_back() -> None:
        for (place, names), values in zip(places, had, strict=True):
            for name in names:
                place.pop(name, None)
            place.update(values)

    undo.callback(put_back)
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if hasattr(config, "_is_quantized"):
            undo.callback(setattr, config, "_is_quantized", config._is_quantized)


def _defer(layer: Any, like: nn.Parameter, recipe_for: Callable[[BoundTensor], Any]) -> None:
    """Give a layer of the library a quantized weight like this one, on meta, whose tensors are to be made."""
    with unrecorded():
        made: Any = like
        for slot in reversed(list(slots(_holder(made)))):  # the weight last: it gets attributes that have changed
            part = deferred(slot.tensor)
            keep_recipe(part, recipe_for(slot))
            slot.holder.put(part)
            made = part if slot.tensor is made else made
        if is_wrapper(made):
            made = _on_host(made)
    if hasattr(made, "quant_state"):
        layer.quant_state, made.module = made.quant_state, layer
    if getattr(made, "SCB", None) is not None:
        layer.state.SCB, made.SCB = made.SCB, None  # where the first forward puts them
    layer._parameters[_WEIGHT] = made


def _way_of(layer: Any, config: Any) -> Callable[[Tensor], nn.Parameter]:
    """How the library makes the layer's weight of values."""
    like, quantize = layer.weight, _QUANTIZE.get(type(layer).__name__, _float8)
    is_transposed = getattr(layer, "source_cls", nn.Linear).__name__ == "Conv1D"
    return lambda values: quantize(like, values.T.contiguous() if is_transposed else values, config)


def _on_host(wrapper: Any) -> nn.Parameter:
    """The same, said to be where its tensors will be: libraries put what belongs to it there."""
    made: Any = Tensor._make_wrapper_subclass(
        type(wrapper), wrapper.shape, dtype=wrapper.dtype, device=torch.device("cpu")
    )
    made.__dict__.update(wrapper.__dict__)
    param: nn.Parameter = made
    return param


def _holder(weight: nn.Parameter) -> nn.Module:
    """A module that has only this weight."""
    holder = nn.Module()
    holder._parameters[_WEIGHT] = weight
    return holder


# The library's own functions


def _four_bit(like: Any, values: Tensor, config: Any) -> nn.Parameter:
    from bitsandbytes.functional import quantize_4bit
    from bitsandbytes.nn import Params4bit

    settings = {
        name: getattr(like, name) for name in ("blocksize", "compress_statistics", "quant_type", "quant_storage")
    }
    if values.is_meta:
        # The library makes a table at the first call, and keeps it for all: not on meta.
        quantize_4bit(host_zeros(like.blocksize, torch.float32), **settings)
    data, state = quantize_4bit(values.contiguous(), **settings)
    weight: nn.Parameter = Params4bit(data, requires_grad=False, quant_state=state, bnb_quantized=True, **settings)
    return weight


def _eight_bit(like: Any, values: Tensor, config: Any) -> nn.Parameter:
    from bitsandbytes.functional import int8_vectorwise_quant
    from bitsandbytes.nn import Int8Params

    data, scales, _ = int8_vectorwise_quant(values.contiguous().to(torch.float16))
    weight: nn.Parameter = Int8Params(data, requires_grad=False, has_fp16_weights=False, SCB=scales)
    return weight


def _float8(like: Any, values: Tensor, config: Any) -> nn.Parameter:
    from torchao.quantization import quantize_

    layer = nn.Linear(1, 1, bias=False, device="meta")
    layer.weight = nn.Parameter(values, requires_grad=False)
    quantize_(layer, config.get_apply_tensor_subclass())
    return layer.weight


_QUANTIZE = {"Linear4bit": _four_bit, "Linear8bitLt": _eight_bit}
