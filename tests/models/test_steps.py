"""Arguments of `zo.steps`, and runs that it does not go on with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zero_offload as zo
from tests.helpers.models import TinyLM, build, tokens_of

Made = tuple[nn.Module, zo.AdamW]


def opened(nvme: Path | None = None) -> Made:
    settings: dict[str, Any] = {} if nvme is None else {"nvme": nvme, "existing": "resume"}
    model = zo.offload(build(TinyLM), zo.OffloadConfig(params="cpu", optimizer="cpu", **settings))
    return model, zo.AdamW(model.parameters(), lr=1e-2)


def step_of(model: nn.Module, *optimizers: zo.AdamW) -> None:
    model(tokens_of(1)).backward()
    for each in optimizers:
        each.step()
        each.zero_grad()


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"total": 2.0}, r"total=2.0: give a whole number from 0 up"),
        ({"accumulate": 0}, r"accumulate=0: give a whole number from 1 up"),
        ({"accumulate": 2}, r"accumulate=2\) needs loader="),
        ({"exit_code": 256}, r"exit_code=256: give a whole number from 0 to 255"),
        ({"grace": 0}, r"grace=0: give seconds above 0"),
        (
            {"accumulate": 0, "exit_code": 256, "grace": "soon"},
            r"3 problems:\n  - accumulate=0(.|\n)*exit_code=256(.|\n)*'soon'",
        ),
        ({"grace": "soon"}, "cannot read 'soon' as a duration"),
        ({"scheduler": 3}, "a int has not both"),
        ({"optimizer": []}, "takes the optimizer after the model, or a list of those that train it"),
        ({"optimizer": 3}, "takes the optimizer after the model"),
        ({"loader": 3}, "takes a DataLoader or a list of batches"),
    ],
)
def test_arguments_that_cannot_be_used(settings: dict[str, Any], text: str) -> None:
    model, optimizer = opened()
    total, given = settings.pop("total", 3), settings.pop("optimizer", optimizer)
    with pytest.raises(zo.ConfigError, match=text):
        zo.steps(model, given, total, **settings)
    zo.close(model)


def test_it_begins_with_the_first_step() -> None:
    model, optimizer = opened()
    step_of(model, optimizer)
    with pytest.raises(zo.ConfigError, match="begins with step 1, and this model is at step 1"):
        zo.steps(model, optimizer, 3)
    zo.close(model)


def test_without_a_loader_it_gives_numbers() -> None:
    model, optimizer = opened()
    found = []
    with pytest.warns(UserWarning, match="zo.commit keeps nothing"):
        for step in zo.steps(model, optimizer, 3):
            found.append(step)
            step_of(model, optimizer)
    assert found == [1, 2, 3]
    zo.close(model)


def test_a_run_of_zo_commit_goes_on_without_data_alone(tmp_path: Path) -> None:
    model, optimizer = opened(tmp_path)
    step_of(model, optimizer)
    zo.commit(model, optimizer, extra={"mine": 1})
    zo.close(model)
    model, optimizer = opened(tmp_path)
    with pytest.raises(zo.ConfigError, match="generation 1 of step 1 was not committed by zo.steps"):
        zo.steps(model, optimizer, 3, loader=[1, 2])
    zo.close(model)
    model, optimizer = opened(tmp_path)
    assert list(zip(zo.steps(model, optimizer, 5), range(1), strict=False)) == [(2, 0)]
    zo.close(model)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"loader": None}, "1 loader, and now there are 0 loader"),
        ({"scheduler": None}, "1 schedulers, and now there are 0 schedulers"),
        ({"optimizers": 2}, "0 further optimizers, and now there are 1 further optimizers"),
    ],
)
def test_a_run_goes_on_with_the_parts_that_it_had(changes: dict[str, Any], text: str, tmp_path: Path) -> None:
    def begin(loader: Any = (1, 2), scheduler: Any = True, optimizers: int = 1) -> Any:
        model = zo.offload(
            build(TinyLM), zo.OffloadConfig(params="cpu", optimizer="cpu", nvme=tmp_path, existing="resume")
        )
        params = list(model.parameters())
        given = [zo.AdamW(each, lr=1e-2) for each in (params[:5], params[5:])][:optimizers]
        rates = torch.optim.lr_scheduler.ExponentialLR(given[0], 0.5) if scheduler else None
        try:
            for _ in zo.steps(model, given, 2, loader=loader, scheduler=rates):
                step_of(model, *given)
        finally:
            zo.close(model)

    begin()
    with pytest.raises(zo.ConfigError, match=text):
        begin(**changes)


def test_an_exception_in_the_first_step_leaves_no_generation_without_the_loops_record(tmp_path: Path) -> None:
    model, optimizer = opened(tmp_path)
    with pytest.raises(KeyError):
        for _ in zo.steps(model, optimizer, 3, loader=[1, 2]):
            step_of(model, optimizer)
            raise KeyError
    zo.close(model)
    assert not list(tmp_path.glob("generation-*"))
    model, optimizer = opened(tmp_path)
    assert [batch for _, batch in zo.steps(model, optimizer, 3, loader=[1, 2])] == [1, 2, 1]
    zo.close(model)


def test_a_break_leaves_the_step_to_the_next_start(tmp_path: Path) -> None:
    for first, last in ((1, 3), (3, 4), (4, 4)):
        model, optimizer = opened(tmp_path)
        seen = []
        for step, batch in zo.steps(model, optimizer, 9, loader=range(5)):
            seen.append((step, batch))
            step_of(model, optimizer)
            if step == last:
                break
        zo.close(model)
        assert seen == [(step, (step - 1) % 5) for step in range(first, last + 1)]


def test_a_model_and_its_teacher_are_one_commit(tmp_path: Path) -> None:
    def begin(last: int) -> list[tuple[int, float]]:
        model, optimizer = opened(tmp_path / "model")
        frozen = build(TinyLM).requires_grad_(False)
        teacher = zo.offload(frozen, zo.OffloadConfig(precision="fp32", nvme=tmp_path / "teacher", existing="resume"))
        found = []
        for step in zo.steps(model, optimizer, last, also=[teacher]):
            step_of(model, optimizer)
            with zo.gathered(teacher, mode="write") as values:
                for each in values.values():
                    each.add_(1)
            found.append((step, next(iter(teacher.state_dict().values())).sum().item()))
        zo.close(model)
        zo.close(teacher)
        return found

    parts = begin(2) + begin(4)
    assert [step for step, _ in parts] == [1, 2, 3, 4]
    assert len({round(b[1] - a[1]) for a, b in zip(parts, parts[1:], strict=False)}) == 1
