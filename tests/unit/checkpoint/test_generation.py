"""Commit and resume of frozen, tied and changed parameters; slots; hyperparameters."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zero_offload as zo
from tests.helpers.disk import SWAP, close_broken, drain, generation_file, open_model, runtime, train, write_run
from tests.helpers.models import TinyLM, build, tokens_of
from tests.helpers.reference import param_groups, read_masters
from zero_offload.runtime.ranks.collectives import CommitGroup

TIERS: list[dict[str, Any]] = [{}, {"params": "cpu", "optimizer": "cpu"}, {"params": "cpu"}, {"optimizer": "cpu"}]


def _frozen() -> nn.Module:
    model = build(TinyLM)
    for name, param in model.named_parameters():
        param.requires_grad_(not name.startswith(("blocks.0", "embedding")))
    return model


def _set(model: nn.Module, name: str, value: float) -> None:
    with zo.gathered(model.get_submodule(name), mode="write"), torch.no_grad():
        for param in model.get_submodule(name).parameters():
            param.fill_(value)


def _resumed(nvme: Path, model: nn.Module, **settings: Any) -> tuple[nn.Module, zo.AdamW]:
    model, optimizer = open_model(nvme, model, **settings)
    assert zo.resume(model, optimizer) is not None
    return model, optimizer


@pytest.mark.parametrize("before", TIERS, ids=str)
@pytest.mark.parametrize("after", TIERS[:2], ids=str)
def test_a_changed_frozen_parameter_is_in_the_next_generation(
    before: dict[str, Any], after: dict[str, Any], nvme: Path
) -> None:
    model, optimizer = open_model(nvme, _frozen(), **before)
    train(model, optimizer, 0, 2)
    drain(model)
    sizes = [(nvme / SWAP).stat().st_size]
    for step, value in enumerate((0.25, 0.5, 0.75), 2):
        _set(model, "blocks.0.up", value)
        train(model, optimizer, step, step + 1)
        expected = read_masters(model)
        sizes.append((nvme / SWAP).stat().st_size)
        zo.close(model)
        model, optimizer = _resumed(nvme, _frozen(), **after)
        found = read_masters(model)
        assert all(torch.equal(found[name], expected[name]) for name in expected)
        assert (found["blocks.0.up.weight"] == value).all()
    zo.close(model)
    # A second slot, once: it is not taken again by every start.
    assert sizes[0] < sizes[1] and len(set(sizes[1:])) <= 2


def test_a_change_that_no_generation_has_is_gone(nvme: Path) -> None:
    model, optimizer = open_model(nvme, _frozen())
    train(model, optimizer, 0, 1)
    before = read_masters(model)
    drain(model)
    _set(model, "blocks.0.up", 9.0)
    _set(model, "blocks.1.up", 9.0)
    zo.close(model)
    model, _ = _resumed(nvme, _frozen())
    found = read_masters(model)
    assert all(torch.equal(found[name], before[name]) for name in before)
    zo.close(model)


def test_frozen_shards_are_not_written_again(nvme: Path) -> None:
    model, optimizer = open_model(nvme, _frozen())
    train(model, optimizer, 0, 4)
    drain(model)
    for shard in runtime(model).store.shards:
        assert len(shard.slots) == (2 if shard.layout.trainable else 1)
    zo.close(model)


def test_the_committed_slot_is_never_the_one_that_is_written(nvme: Path) -> None:
    model, optimizer = open_model(nvme, commit_every=3)
    for step in range(7):
        train(model, optimizer, step, step + 1)
        drain(model)
        for shard in runtime(model).store.shards:
            assert shard.committed is None or shard.writable_slot() != shard.committed
            committed_now = (step + 1) % 3 == 0
            assert (shard.committed == shard.current) == committed_now or step < 2
    zo.close(model)


def test_ties_stay_ties(nvme: Path) -> None:
    model, optimizer = open_model(nvme)
    train(model, optimizer, 0, 2)
    zo.close(model)
    model, optimizer = _resumed(nvme, build(TinyLM))
    assert model.get_parameter("head.weight") is model.get_parameter("embedding.weight")
    assert torch.equal(model.state_dict()["head.weight"], model.state_dict()["embedding.weight"])
    zo.close(model)


def test_what_a_scheduler_did_after_the_step_is_in_the_generation(nvme: Path) -> None:
    model, optimizer = open_model(nvme)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    train(model, optimizer, 0, 1)
    scheduler.step()
    zo.commit(model, optimizer)  # nothing is due: the step has its generation
    train(model, optimizer, 1, 2)
    optimizer.param_groups[1]["weight_decay"] = 0.125
    zo.close(model)
    model, optimizer = _resumed(nvme, build(TinyLM))
    assert [group["lr"] for group in optimizer.param_groups] == [0.005, 0.005]
    assert optimizer.param_groups[1]["weight_decay"] == 0.0
    zo.close(model)


def test_every_step_between_two_generations_is_the_last_ones(nvme: Path) -> None:
    model, optimizer = open_model(nvme, commit_every=4)
    for step, committed in enumerate([None, None, None, 4, 4, 4, 4, 8], 1):
        train(model, optimizer, step - 1, step)
        drain(model)
        found = json.loads(generation_file(nvme).read_text())["payload"] if committed else {}
        assert (committed is None) == (not list(nvme.glob("generation-*")))
        assert found.get("step") == committed
        assert committed is None or found["extra"] == {"next": committed}
    zo.close(model)


def test_closing_commits_the_last_step(nvme: Path) -> None:
    model, optimizer = open_model(nvme, commit_every=100)
    train(model, optimizer, 0, 3)
    zo.close(model)
    zo.close(model)
    model, optimizer = open_model(nvme)
    resumed = zo.resume(model, optimizer)
    assert resumed is not None and (resumed.step, resumed.extra) == (3, {"next": 3})
    zo.close(model)


def test_a_step_without_commit_is_kept_without_extra(nvme: Path) -> None:
    _step_without_commit(nvme)
    model, optimizer = open_model(nvme)
    resumed = zo.resume(model, optimizer)
    assert resumed is not None and (resumed.step, resumed.extra) == (1, None)
    zo.close(model)


def test_a_step_that_its_script_did_not_commit_any_more_is_done_again(nvme: Path) -> None:
    model, optimizer = open_model(nvme)
    train(model, optimizer, 0, 1)
    zo.close(model)
    _step_without_commit(nvme, num_commits=1)
    model, optimizer = open_model(nvme)
    resumed = zo.resume(model, optimizer)
    assert resumed is not None and (resumed.step, resumed.extra) == (2, {"next": 2})
    zo.close(model)


def _step_without_commit(nvme: Path, num_commits: int = 0) -> None:
    """Some committed steps, and a step that is not committed."""
    model, optimizer = open_model(nvme)
    zo.resume(model, optimizer)
    train(model, optimizer, 1, 1 + num_commits)
    model(tokens_of(0)).backward()
    optimizer.step()
    zo.close(model)


def test_striped_directories_resume_with_a_changed_frozen_parameter(tmp_path: Path) -> None:
    directories = [tmp_path / "one", tmp_path / "two"]
    settings = {"params": "nvme", "optimizer": "nvme", "existing": "resume"}

    def start() -> tuple[nn.Module, zo.AdamW]:
        model = _frozen()
        zo.offload(model, zo.OffloadConfig(nvme=directories, **settings))  # type: ignore[arg-type]
        return model, zo.AdamW(param_groups(model), lr=1e-2)

    model, optimizer = start()
    train(model, optimizer, 0, 1)
    drain(model)
    _set(model, "blocks.0.down", 0.5)
    _set(model, "embedding", 0.25)
    train(model, optimizer, 1, 2)
    expected = read_masters(model)
    zo.close(model)
    model, optimizer = start()
    found = read_masters(model)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    zo.close(model)


def test_ranks_that_commit_different_steps_make_no_generation(nvme: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = open_model(nvme)
    train(model, optimizer, 0, 1)
    drain(model)
    alone = CommitGroup.gather_digests
    # The step is before the last digit of the word; another rank says 7.
    monkeypatch.setattr(
        CommitGroup, "gather_digests", lambda self, word: [*alone(self, word), f"{word[:-2]}7{word[-1]}"]
    )
    with pytest.raises(zo.CheckpointError, match=r"different steps: \[2, 7\]"):
        train(model, optimizer, 1, 2)
        drain(model)
    close_broken(model)
    assert json.loads(generation_file(nvme).read_text())["payload"]["step"] == 1


def test_ranks_that_find_other_manifests_do_not_start(nvme: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_run(nvme, 2)
    alone = CommitGroup.agree

    def agree(self: CommitGroup, text: str) -> str:
        answer = alone(self, text)
        said = json.loads(answer) if answer.startswith("[") else []
        if said[1:] == [2, 0, False, False]:
            said[-1] = True  # the first rank goes back, this one does not
            return json.dumps(said)
        return answer

    monkeypatch.setattr(CommitGroup, "agree", agree)
    with pytest.raises(zo.CheckpointError, match="in which they see the same manifests"):
        open_model(nvme)


@pytest.mark.parametrize(
    "extra", [{1, 2}, object(), {frozenset((1, 2)): 3}, {"a": torch.zeros(1)}], ids=["set", "object", "keys", "tensor"]
)
def test_extra_that_no_file_takes(extra: object, nvme: Path) -> None:
    model, optimizer = open_model(nvme)
    with pytest.raises(zo.ConfigError, match="cannot be kept"):
        zo.commit(model, optimizer, extra=extra)
    zo.close(model)
