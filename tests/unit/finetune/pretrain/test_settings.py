from __future__ import annotations

from pathlib import Path

import pytest

from zero_offload.base.errors import ConfigError
from zero_offload.finetune.gpt_config import RecomputeMode
from zero_offload.finetune.pretrain.settings import TrainConfig
from zero_offload.runs.settings import read_tables


def test_defaults_put_parameters_and_optimizer_on_nvme() -> None:
    config = TrainConfig.from_tables({}, {})
    assert config == TrainConfig()
    assert (config.offload.params, config.offload.grads, config.offload.optimizer) == ("nvme", "cpu", "nvme")
    assert config.offload.stage == 3
    assert config.offload.nvme_dirs == (Path("runs/stdlib/nvme"),)


def test_own_text_gets_a_run_directory_of_its_own() -> None:
    config = TrainConfig.from_tables({"data": ["texts/book.txt"]}, {})
    assert config.data == (Path("texts/book.txt"),)
    assert config.out == Path("runs/book")
    assert config.offload.nvme_dirs == (Path("runs/book/nvme"),)
    assert TrainConfig.from_tables({"data": "texts/book.txt"}, {}).data == config.data


def test_toml_is_read_and_sizes_reach_the_model(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(
        '[train]\nmodel = "tiny"\nseq = 64\nrecompute = "block"\n[offload]\noptimizer = "cpu"\nparams = "cpu"\n'
    )
    config = TrainConfig.from_tables(*read_tables(file))
    assert config.gpt().seq_max == 64
    assert config.gpt().recompute is RecomputeMode.BLOCK
    assert config.offload.optimizer == "cpu"


def test_all_problems_of_both_tables_come_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        TrainConfig.from_tables(
            {"model": "smal", "steps": -1, "batch": 0, "lr": float("nan"), "sequence": 3, "warmup": True},
            {"params": "disk", "optimiser": "cpu"},
        )
    message = str(caught.value)
    for part in ("'small'", "steps=-1", "batch=0", "lr=nan", "unknown setting sequence", "warmup=True"):
        assert part in message
    assert "did you mean optimizer" in message and "params='disk'" in message


@pytest.mark.parametrize("name", ["steps", "seq", "batch", "accumulate", "eval_every"])
@pytest.mark.parametrize("value", [0, -3, 1.5, "7"])
def test_counts_are_positive_whole_numbers(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"{name}=.*not a positive whole number"):
        TrainConfig.from_tables({name: value}, {})


def test_a_directly_built_config_is_checked_too() -> None:
    with pytest.raises(ConfigError, match="clip"):
        TrainConfig(clip=-1.0)


def test_out_that_is_a_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "taken"
    file.touch()
    with pytest.raises(ConfigError, match="is a file"):
        TrainConfig.from_tables({"out": str(file)}, {})


def test_a_tier_in_the_run_directory_itself_is_refused(tmp_path: Path) -> None:
    for nvme in (tmp_path, [tmp_path / "other", tmp_path / "other" / ".."]):
        with pytest.raises(ConfigError, match=r"is the run directory too"):
            TrainConfig.from_tables({"out": str(tmp_path)}, {"nvme": nvme})


@pytest.mark.parametrize("text", ["[train", "[trian]\nsteps = 3", "train = 3"])
def test_bad_toml_is_one_message_with_the_file(tmp_path: Path, text: str) -> None:
    file = tmp_path / "run.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"run\.toml"):
        TrainConfig.from_tables(*read_tables(file))


def test_arguments_tell_runs_apart_but_not_how_they_start() -> None:
    one = TrainConfig.from_tables({}, {})
    with pytest.raises(ConfigError, match="existing is decided by train: .* --discard"):
        TrainConfig.from_tables({}, {"existing": "discard"})
    assert one.arguments() == TrainConfig.from_tables({"trace": 3}, {}).arguments()
    for train, offload in (({"lr": 1e-4}, {}), ({"steps": 3}, {}), ({}, {"params": "cpu"})):
        assert one.arguments() != TrainConfig.from_tables(train, offload).arguments()


def test_an_update_inside_of_backward_cannot_be_clipped() -> None:
    with pytest.raises(ConfigError, match=r"before gradients can be clipped \(clip=1\.0\); use overlap='forward'"):
        TrainConfig.from_tables({}, {"overlap": "backward"})


def test_a_folder_is_for_finetune(tmp_path: Path) -> None:
    for model in (str(tmp_path), "Qwen/Qwen3-8B"):
        with pytest.raises(ConfigError) as caught:
            TrainConfig.from_tables({"model": model}, {})
        assert f"zero-offload finetune {model} --data FILES" in str(caught.value)
        assert f"zero-offload plan {model}" in str(caught.value)
    with pytest.raises(ConfigError, match="did you mean 'small'"):
        TrainConfig.from_tables({"model": "smal"}, {})
