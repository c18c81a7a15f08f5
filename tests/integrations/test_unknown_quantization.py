"""A folder that is quantized in a way that is not read here is refused by the name of that way, before its weights.

transformers takes the codes of a method that it does not know for weights, so no advice leads there.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers.quantizers.auto import AUTO_QUANTIZATION_CONFIG_MAPPING

import tests.helpers.tools  # before transformers  # noqa: F401
import zero_offload as zo
from tests.helpers.folders import write_folder
from zero_offload.cli.main import main
from zero_offload.integrations.quantize import stored_quantization

UNKNOWN: dict[str, Any] = {
    "modelopt": {"quant_method": "modelopt", "quant_algo": "FP8"},
    "exl3": {"quant_method": "exl3", "bits": 4},
    "FP8": {"quant_method": "FP8"},
    "['gptq']": {"quant_method": ["gptq"]},
    "without quant_method": {"bits": 4},
    "[]": [],
    "[1]": [1],
    "int4": "int4",
    "True": True,
    "7": 7,
}
BROKEN: dict[str, dict[str, Any]] = {
    "load_in_4bit must be a boolean": {"load_in_4bit": "yes"},
    "only one can be used": {"load_in_4bit": True, "load_in_8bit": True},
    "bfloat17": {"load_in_4bit": True, "bnb_4bit_compute_dtype": "bfloat17"},
    "bnb_4bit_compute_dtype": {"load_in_4bit": True, "bnb_4bit_compute_dtype": 5},
    "bnb_4bit_quant_type must be": {"load_in_4bit": True, "bnb_4bit_quant_type": 7},
    "bnb_4bit_quant_type is 'nf5'": {"load_in_4bit": True, "bnb_4bit_quant_type": "nf5"},
    "llm_int8_threshold": {"load_in_8bit": True, "llm_int8_threshold": "x"},
    "llm_int8_skip_modules": {"load_in_4bit": True, "llm_int8_skip_modules": 5},
    "llm_int8_skip_modules is [1], not names": {"load_in_4bit": True, "llm_int8_skip_modules": [1]},
    "Unknown quantization type, got bitsandbytes": {},
}


def _folder(path: Path, words: dict[str, Any], name: str = "config.json") -> Path:
    path.mkdir()
    (path / name).write_text(json.dumps(words))
    return path


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("folders") / "llama")


@pytest.mark.door(
    "transformers",
    load="`zo.load_pretrained`, `zero-offload plan`",
    between="a `quant_method` that transformers does not know",
    outcome="refused: the method",
    instead="the folder that was quantized, with `quantize=`",
)
@pytest.mark.parametrize("named", UNKNOWN)
def test_a_method_that_nobody_knows(named: str, tmp_path: Path) -> None:
    folder = _folder(tmp_path / "m", {"quantization_config": UNKNOWN[named]})
    with pytest.raises(zo.ConfigError) as raised:
        stored_quantization(folder)
    says = str(raised.value)
    assert named in says and "Quantize it while it is loaded" in says and "\n" not in says
    assert "from_pretrained" not in says


@pytest.mark.parametrize("method", sorted(AUTO_QUANTIZATION_CONFIG_MAPPING))
def test_a_method_that_transformers_reads(method: str, tmp_path: Path) -> None:
    folder = _folder(tmp_path / "m", {"quantization_config": {"quant_method": method}})
    with pytest.raises(zo.ConfigError, match=rf"is quantized \({method}\).*from_pretrained, then zo.offload"):
        stored_quantization(folder)


@pytest.mark.parametrize("place", ["text_config", "compression_config"])
def test_words_where_transformers_does_not_look(place: str, tmp_path: Path) -> None:
    words = {"quant_method": "compressed-tensors"}
    inside = {"quantization_config": words} if place == "text_config" else words
    with pytest.raises(zo.ConfigError, match=r"is quantized \(compressed-tensors\)") as raised:
        stored_quantization(_folder(tmp_path / "m", {"model_type": "llama", place: inside}))
    assert "from_pretrained" not in str(raised.value)


@pytest.mark.door(
    "transformers",
    load="`zo.load_pretrained`, `zero-offload plan`",
    between="ModelOpt's `hf_quant_config.json` alone",
    outcome="refused: the method",
    instead="the folder that was quantized, with `quantize=`",
)
def test_modelopt_beside_a_config_that_is_silent(llama: Path, tmp_path: Path, capsys: Any) -> None:
    for file in llama.iterdir():
        (tmp_path / file.name).hardlink_to(file)
    words: dict[str, Any] = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(words))
    assert main(["plan", str(tmp_path), "--lora", "4"]) == 2
    says = capsys.readouterr().err
    assert "is quantized (modelopt)" in says and "from_pretrained" not in says and says.count("\n") == 1
    with zo.deferred_init(values="skip"):
        model = _model_of(tmp_path)
    with pytest.raises(zo.ConfigError, match="modelopt"):
        zo.load_pretrained(model, tmp_path)
    model = zo.offload(_model_of(tmp_path), zo.OffloadConfig())
    with pytest.raises(zo.ConfigError, match="modelopt"):
        zo.load_pretrained(model, tmp_path)
    zo.close(model)
    words["quantization"] = {"quant_algo": None, "kv_cache_quant_algo": "FP8"}  # of values that are computed alone
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(words))
    assert stored_quantization(tmp_path) is None


def _model_of(folder: Path) -> Any:
    import transformers

    return transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(folder))


@pytest.mark.parametrize("named", BROKEN)
def test_words_of_bitsandbytes_that_transformers_refuses(named: str, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    words = {"quant_method": "bitsandbytes", **BROKEN[named]}
    with pytest.raises(zo.ConfigError, match="config.json, quantization_config") as raised:
        stored_quantization(_folder(tmp_path / "m", {"quantization_config": words}))
    assert named in str(raised.value) and "\n" not in str(raised.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "5", "[" * 3000 + "]" * 3000, '{"a": \udcff}'])
def test_a_config_that_says_nothing(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(zo.ConfigError, match="config.json (is not JSON|is not UTF-8|holds no settings).*get it again"):
        stored_quantization(tmp_path)


@pytest.mark.parametrize("words", [{}, {"quantization_config": None}])
def test_nothing_is_quantized(words: dict[str, Any], tmp_path: Path) -> None:
    assert stored_quantization(_folder(tmp_path / "m", words)) is None
    assert stored_quantization(tmp_path) is None
