"""A fault of a folder is one error that says what to do, before anything takes time."""

from __future__ import annotations

import inspect
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import tests.helpers.tools  # before transformers  # noqa: F401
import zero_offload as zo
from tests.helpers.folders import CHATML, CHATML_MARKED, write_folder
from zero_offload.cli.main import main
from zero_offload.finetune.choices import Lora
from zero_offload.finetune.data.rows import BadRow
from zero_offload.finetune.data.turns import ChatTemplate
from zero_offload.finetune.model import folder as folders
from zero_offload.finetune.model.build import build_model, meta_model
from zero_offload.finetune.model.folder import check_chat_template, open_folder
from zero_offload.hardware.probe import peak_resident_bytes

CONFIG, INDEX = "config.json", "model.safetensors.index.json"


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("folders") / "llama", sharded=True)


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory, llama: Path) -> Path:
    path = tmp_path_factory.mktemp("folders") / "adapter"
    model = build_model(open_folder(llama), zo.OffloadConfig(), Lora(4, 8.0))
    zo.export_pretrained(model, path)
    zo.close(model)
    return path


def _words(change: Callable[[dict[str, Any]], object], name: str = CONFIG) -> Callable[[Path], object]:
    """Changes a JSON file of a folder."""

    def spoil(folder: Path) -> None:
        words = json.loads((folder / name).read_text())
        change(words)
        (folder / name).write_text(json.dumps(words))

    return spoil


def _without(*patterns: str) -> Callable[[Path], object]:
    return lambda folder: [file.unlink() for pattern in patterns for file in folder.glob(pattern)]


def _renamed(old: str, new: str) -> Callable[[Path], object]:
    def spoil(folder: Path) -> None:
        _without("*.safetensors", "*.index.json")(folder)
        (folder / new).write_bytes(b"0")

    return spoil


def _cut(folder: Path) -> None:
    file = sorted(folder.glob("*.safetensors"))[1]
    file.write_bytes(file.read_bytes()[:-64])


WEIGHTS = {
    "a shard is missing": (
        lambda f: sorted(f.glob("*.safetensors"))[0].unlink(),
        "lacks 1 of the .* files",
        "get them",
    ),
    "a shard is cut": (_cut, "model-00002-of-.*the file is cut short", "get it again"),
    "another file in the index": (
        _words(lambda words: words["weight_map"].update({"model.norm.weight": "model-9.safetensors"}), INDEX),
        "model-9.safetensors",
        "copy the folder again",
    ),
    "no index": (_without(INDEX), "and neither model.safetensors nor model.safetensors.index.json", "get it"),
    "pickled": (_renamed("", "pytorch_model.bin"), "pytorch_model.bin, which is pickled", "python -c"),
    "GGUF": (_renamed("", "llama-q4.gguf"), "a GGUF file", "hf download"),
    "none": (_without("*.safetensors", INDEX), "no weights", "get them"),
}
CONFIGS = {
    "no config": (_without(CONFIG), "has no config.json", "get it from where the weights are from"),
    "no JSON": (lambda f: (f / CONFIG).write_text("{"), "is not JSON", "get it again"),
    "quantized": (
        _words(lambda words: words.update(quantization_config={"quant_method": "gptq"})),
        r"is quantized \(gptq\)",
        "Give the folder of the model that was quantized",
    ),
    "unknown": (_words(lambda words: words.update(model_type="lama")), "a 'lama' model", "pip install -U transformers"),
    "no type": (_words(lambda words: words.pop("model_type")), "has no model_type", "get the folder again"),
    "own code": (
        _words(lambda words: words.update(model_type="lama", auto_map={"AutoConfig": "configuration_lama.Lama"})),
        "brings its own code for 'lama' models",
        "pip install -U transformers",
    ),
    "of two halves": (_words(lambda words: words.update(model_type="t5")), "an encoder and a decoder", "trained here"),
    "no text": (_words(lambda words: words.update(model_type="vit")), "no causal model of 'vit'", "another folder"),
}
TOKENIZERS = {
    "none": (_without("tokenizer*"), "has no tokenizer", r"hf download ORG/NAME --include '\*token\*'"),
    "damaged": (lambda f: (f / "tokenizer.json").write_text("{}"), "tokenizer.json: ", "get its files again"),
    "endless": (
        _words(lambda words: [words.pop("pad_token"), words.pop("eos_token")], "tokenizer_config.json"),
        "names no token that ends a text",
        'Add "eos_token" to its tokenizer_config.json',
    ),
    "too large": (
        _words(lambda words: words.update(vocab_size=300)),
        "512 tokens.* 300 rows",
        "resize_token_embeddings",
    ),
}


@pytest.mark.parametrize(
    "what",
    [
        *(("weights", each) for each in WEIGHTS),
        *(("config", each) for each in CONFIGS),
        *(("tokenizer", each) for each in TOKENIZERS),
    ],
    ids=": ".join,
)
def test_one_error(what: tuple[str, str], llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kind, name = what
    spoil, says, remedy = {"weights": WEIGHTS, "config": CONFIGS, "tokenizer": TOKENIZERS}[kind][name]
    folder = tmp_path / "folder"
    shutil.copytree(llama, folder)
    spoil(folder)
    with pytest.raises(zo.ZeroOffloadError, match=f"(?s){says}.*{remedy}") as caught:
        open_folder(folder)
    assert str(folder) in str(caught.value)
    assert main(["chat", str(folder)]) == caught.value.exit_code
    assert capsys.readouterr().err == f"error: {caught.value}\n"


def test_a_plan_needs_the_config_alone(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Weights come to nothing of it; a tokenizer only to data."""
    monkeypatch.chdir(tmp_path)
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in (CONFIG, INDEX):
        shutil.copy(llama / name, bare)
    data = tmp_path / "text.jsonl"
    data.write_text('{"text": "one two three"}\n' * 8)
    whole = main(["plan", str(llama), "--json"]), json.loads(capsys.readouterr().out)
    found = main(["plan", str(bare), "--json"]), json.loads(capsys.readouterr().out)
    for _, plan in (whole, found):
        del plan["bytes"]["program"]  # of the process itself, measured
    for name in ("parameters", "bytes", "step_s", "fits"):
        assert found[1][name] == whole[1][name]
    assert found[0] == whole[0] == 0
    assert main(["plan", str(bare), "--data", str(data)]) == zo.ConfigError.exit_code
    assert "has no tokenizer" in capsys.readouterr().err
    for file in llama.glob("token*"):
        shutil.copy(file, bare)
    assert main(["plan", str(bare), "--data", str(data), "--seq", "64"]) == 0
    assert "has no weights yet" in capsys.readouterr().out
    assert main(["finetune", str(bare), "--data", str(data), "--dry-run"]) == zo.ConfigError.exit_code
    assert "no weights; get them: hf download" in capsys.readouterr().err


def test_a_plan_of_an_adapter_needs_no_base(adapter: Path, llama: Path, tmp_path: Path) -> None:
    bare, moved = tmp_path / "bare", tmp_path / "adapter"
    bare.mkdir()
    shutil.copy(llama / CONFIG, bare)
    shutil.copytree(adapter, moved)
    _words(lambda words: words.update(base_model_name_or_path=str(bare)), "adapter_config.json")(moved)
    kept = [param.shape for param in meta_model(open_folder(adapter), None).parameters() if param.requires_grad]
    model = meta_model(open_folder(moved, needs_weights=False, needs_tokenizer=False), None)
    assert [param.shape for param in model.parameters() if param.requires_grad] == kept


@pytest.mark.parametrize("architecture", ["BertForMaskedLM", "BertModel"])
def test_a_head_that_no_file_has_is_trained_whole(architecture: str, tmp_path: Path) -> None:
    """By the files, or where there are none by what the config says that they are of."""
    bare = tmp_path / "bare"
    bare.mkdir()
    shutil.copy(write_folder(tmp_path / "bert", "bert") / CONFIG, bare)
    _words(lambda words: words.update(architectures=[architecture]))(bare)
    folder = open_folder(bare, "masked", needs_weights=False, needs_tokenizer=False)
    trained = [name for name, param in meta_model(folder, Lora(4, 8.0)).named_parameters() if param.requires_grad]
    assert any("cls." in name for name in trained if "lora_" not in name) == (architecture == "BertModel")


def test_an_empty_chat_template_is_none(llama: Path, tmp_path: Path) -> None:
    shutil.copytree(llama, tmp_path / "folder")
    (tmp_path / "folder" / "chat_template.jinja").write_text("\n")
    with pytest.raises(zo.ConfigError, match="has no chat template.* Copy chat_template.jinja"):
        check_chat_template(open_folder(tmp_path / "folder"))


@pytest.mark.parametrize("template", [[], {}])
def test_no_templates_are_none(template: Any, llama: Path, tmp_path: Path) -> None:
    shutil.copytree(llama, tmp_path / "folder")
    (tmp_path / "folder" / "chat_template.jinja").unlink()
    _words(lambda words: words.update(chat_template=template), "tokenizer_config.json")(tmp_path / "folder")
    assert open_folder(tmp_path / "folder").tokenizer.chat_template is None


def test_templates_by_names(llama: Path, tmp_path: Path) -> None:
    shutil.copytree(llama, tmp_path / "folder")
    (tmp_path / "folder" / "chat_template.jinja").unlink()
    marked, tools = CHATML_MARKED, [{"type": "function", "function": {"name": "f"}}]
    talk = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]

    def opened(**templates: str) -> ChatTemplate:
        said = [{"name": name, "template": text} for name, text in templates.items()]
        _words(lambda words: words.update(chat_template=said), "tokenizer_config.json")(tmp_path / "folder")
        return ChatTemplate(open_folder(tmp_path / "folder").tokenizer)

    found = opened(default=marked, tool_use=marked)
    assert found.samples(talk) == found.samples(talk, tools) != []
    found = opened(default=CHATML, tool_use=marked)
    assert found.samples(talk) and found.samples(talk, tools)
    found = opened(default=marked, tool_use=CHATML)
    assert found.samples(talk)
    with pytest.raises(BadRow, match="the chat template for tools lacks {% generation %}"):
        found.samples(talk, tools)
    with pytest.raises(zo.ConfigError, match='has the templates rag, and none of the name "default"'):
        opened(rag=marked)


def test_a_token_that_the_embedding_has_no_row_for(llama: Path, tmp_path: Path) -> None:
    """Numbers of a vocabulary may have holes: their count says nothing of the largest."""
    shutil.copytree(llama, tmp_path / "folder")

    def change(words: dict[str, Any]) -> None:
        words["model"]["vocab"]["!"] = 1000

    _words(change, "tokenizer.json")(tmp_path / "folder")
    with pytest.raises(zo.ConfigError, match="gives '!' the number 1,000, and the model's embedding has 512 rows"):
        open_folder(tmp_path / "folder")


@pytest.mark.parametrize("value", [0, -1, 1.5, True, float("nan")])
def test_a_length_that_no_text_has(value: Any, llama: Path, tmp_path: Path) -> None:
    shutil.copytree(llama, tmp_path / "folder")
    _words(lambda words: words.update(model_max_length=value), "tokenizer_config.json")(tmp_path / "folder")
    with pytest.raises(zo.ConfigError, match=f"tokenizer_config.json: model_max_length is {value}, not a whole number"):
        open_folder(tmp_path / "folder")


def test_a_name_that_is_empty_names_no_token(llama: Path, tmp_path: Path) -> None:
    shutil.copytree(llama, tmp_path / "folder")
    _words(lambda words: words.update(pad_token="", mask_token=""), "tokenizer_config.json")(tmp_path / "folder")
    tokenizer = open_folder(tmp_path / "folder").tokenizer
    assert (tokenizer.pad_token, tokenizer.mask_token) == (tokenizer.eos_token, None)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ({"id2label": {"0": "a", "2": "b"}}, "id2label=.* does not name classes by the numbers from 0 on"),
        ({"id2label": {"0": 1, "1": 2}}, "id2label=.* does not name classes by the numbers from 0 on"),
        ({"id2label": {"0": ["a"], "1": "b"}}, "id2label="),
        ({"id2label": {"0": "a"}}, "the model has 1 class, and a classifier has two or more"),
        ({"problem_type": "regression"}, "problem_type is 'regression', and a row has exactly one class here"),
        ({"problem_type": "x"}, "problem_type is 'x'"),
    ],
)
def test_classes_that_cannot_be_trained(words: dict[str, Any], message: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    transformers.BertConfig(**sizes, architectures=["BertForSequenceClassification"]).save_pretrained(tmp_path)
    _words(lambda given: given.update(words))(tmp_path)
    with pytest.raises(zo.ConfigError, match=f"config.json.*{message}"):
        open_folder(tmp_path, "classify", needs_weights=False, needs_tokenizer=False)


@pytest.mark.door(
    "transformers",
    load="`finetune`, `chat`, `evaluate` of a GGUF file",
    outcome="refused: the format",
    instead="the folder that it was made of",
)
def test_places_without_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("empty", "Qwen3-0.6B", "runs/chat-lora16"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "weights.gguf").write_bytes(b"GGUF")
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "models--a--b" / "snapshots" / "12ab").mkdir(parents=True)
    for given, says in {
        "Qwen/Qwen3-8B": "Qwen/Qwen3-8B does not exist here.* hf download Qwen/Qwen3-8B --local-dir ./Qwen3-8B",
        "Qwen/Qwen3-0.6B": "Qwen/Qwen3-0.6B does not exist here. Give ./Qwen3-0.6B",
        "gpt2": "gpt2 does not exist; give a folder with config.json",
        "./Qwen3-06B": r"Qwen3-06B does not exist; did you mean ./Qwen3-0.6B\?",
        "runs/chat-lora6": r"runs/chat-lora6 does not exist; did you mean runs/chat-lora16\?",
        "runs/other": "runs/other does not exist; give a folder",
        "": "the name of a model's folder is empty",
        "/nowhere/Qwen3-8B": "/nowhere/Qwen3-8B does not exist; give a folder",
        "config.json": "config.json is a file; give the folder",
        "weights.gguf": "a GGUF file",
        "empty": "empty is empty",
        "models--a--b": "is a cache of downloads; give .*/snapshots/12ab",
    }.items():
        with pytest.raises(zo.ConfigError, match=says):
            open_folder(given)


def test_an_encoder_writes_no_text(tmp_path: Path, llama: Path) -> None:
    bert = write_folder(tmp_path / "bert", "bert")
    with pytest.raises(zo.ConfigError, match=r"a 'bert' encoder \(BertForMaskedLM\).*--method mlm"):
        open_folder(bert)
    assert open_folder(bert, "masked").task == "masked"
    with pytest.raises(zo.ConfigError, match="no masked model of 'llama'.* sft or dpo"):
        open_folder(llama, "masked")


def test_a_loss_that_leaves_out_other_micro_batches_is_refused(tmp_path: Path, llama: Path) -> None:
    """All classes of transformers whose loss is not the common one, which divides by `num_items_in_batch`."""
    classes = {kind.model_type: found for kind, found in transformers.MODEL_FOR_CAUSAL_LM_MAPPING.items()}
    sources = {name: inspect.getsource(found.forward) for name, found in classes.items() if inspect.isclass(found)}
    own = {name for name, source in sources.items() if "labels" in source and "loss_function(" not in source}
    assert own == folders.OWN_LOSS
    shutil.copytree(llama, tmp_path / "xlnet")
    (tmp_path / "xlnet/config.json").write_text(
        json.dumps({"model_type": "xlnet", "architectures": ["XLNetLMHeadModel"]})
    )
    with pytest.raises(zo.ConfigError, match="micro-batches would add up to a wrong loss"):
        open_folder(tmp_path / "xlnet")


def test_conversations_need_a_template(tmp_path: Path, llama: Path) -> None:
    check_chat_template(open_folder(llama))
    with pytest.raises(zo.ConfigError, match="has no chat template.* Copy chat_template.jinja"):
        check_chat_template(open_folder(write_folder(tmp_path / "base", template=None)))


def test_an_adapter_without_its_base(tmp_path: Path, adapter: Path) -> None:
    moved = tmp_path / "adapter"
    shutil.copytree(adapter, moved)
    config, name = moved / "adapter_config.json", "base_model_name_or_path"
    for base, says in {
        "Qwen/Qwen3-8B": "is an adapter of Qwen/Qwen3-8B, .* hf download Qwen/Qwen3-8B --local-dir Qwen/Qwen3-8B",
        "/nowhere/base": "is an adapter of /nowhere/base, which is not a folder here; .*adapter_config.json",
        None: 'does not name the model.* write its folder there as "base_model_name_or_path"',
        "~no-such-user/base": "base_model_name_or_path, '~no-such-user/base', names the home of a user that this",
        "x" * 300: "base_model_name_or_path, 'xxx.* is longer than a file system takes",
    }.items():
        _words(lambda words, base=base: words.update({name: base}), config.name)(moved)
        with pytest.raises(zo.ConfigError, match=says):
            open_folder(moved)
    shutil.copy(adapter / config.name, config)
    (moved / "adapter_model.safetensors").unlink()
    with pytest.raises(zo.ConfigError, match="no adapter_model.safetensors"):
        open_folder(moved)


def test_adapters_that_do_not_go_with_it(llama: Path, adapter: Path) -> None:
    for make in (meta_model, lambda folder, lora: build_model(folder, zo.OffloadConfig(), lora)):
        with pytest.raises(
            zo.ConfigError, match="takes no adapter of rank 4 on wrong: .*down_proj, embed_tokens, gate_proj"
        ):
            make(open_folder(llama), Lora(4, 8.0, targets=("wrong",)))
        with pytest.raises(zo.ConfigError, match="q_proj lm_head has the output's layer among them"):
            make(open_folder(llama), Lora(4, 8.0, targets=("q_proj", "lm_head")))
        with pytest.raises(zo.ConfigError, match="is an adapter already"):
            make(open_folder(adapter), Lora(4, 8.0))


def test_another_models_weights(llama: Path, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    shutil.copytree(llama, folder)
    _words(lambda words: words.update(num_hidden_layers=3))(folder)
    with pytest.raises(zo.CheckpointError, match="9 missing in the files: model.layers.2"):
        build_model(open_folder(folder), zo.OffloadConfig(), None)


def test_packages_that_are_not_installed(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "_PACKAGES", ("torch", "no_such_package"))
    with pytest.raises(zo.CapacityError, match=r"needs no_such_package, .* pip install 'zero_offload\[finetune\]'"):
        open_folder(llama)


def test_no_code_of_a_folder_is_run(tmp_path: Path, llama: Path) -> None:
    """A class that transformers has is used, and the folder's own is not."""
    folder = tmp_path / "folder"
    shutil.copytree(llama, folder)
    _words(lambda words: words.update(auto_map={"AutoModelForCausalLM": "modeling.Model"}))(folder)
    (folder / "modeling.py").write_text("raise SystemExit('run')\n")
    model = build_model(open_folder(folder), zo.OffloadConfig(), None)
    assert type(model).__module__ == "transformers.models.llama.modeling_llama"
    assert all(torch.isfinite(value).all() for value in model.state_dict().values())
    zo.close(model)


@pytest.mark.parametrize(("field", "value"), [("num_attention_heads", 7), ("hidden_act", "sily")])
def test_a_value_that_a_large_model_cannot_have_is_named_and_takes_no_memory(
    field: str, value: Any, tmp_path: Path
) -> None:
    """As many experts as 60 GB hold in fp32."""
    config = transformers.MixtralConfig(hidden_size=4096, intermediate_size=14336, num_hidden_layers=10)
    config.architectures = ["MixtralForCausalLM"]
    config.save_pretrained(tmp_path)
    words = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(words | {field: value}))
    before = peak_resident_bytes()
    with pytest.raises(zo.ConfigError, match=f"config.json, {field} is {value!r}"):
        open_folder(tmp_path, needs_weights=False, needs_tokenizer=False)
    assert peak_resident_bytes() - before < 1 << 30


def test_a_model_that_asks_for_values_is_not_refused(tmp_path: Path) -> None:
    """GPT-2 looks for the padding token among the words, and torch on meta has none."""
    folder = write_folder(tmp_path / "gpt2", "gpt2", pad_token_id=0)
    assert open_folder(folder).config.pad_token_id == 0
