"""`OffloadStrategy` in Lightning's Trainer, compared with the same run of the plain module and our optimizer."""

from __future__ import annotations

import importlib
import logging
import os
import runpy
import signal
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.plugins import MixedPrecision, TorchCheckpointIO
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn
from torch.utils.data import DataLoader

import zero_offload as zo
from tests.helpers.ranks import RankPools
from tests.helpers.tools import config, distance, launched, values_of
from zero_offload.integrations.lightning import EndBySignal, OffloadStrategy

WIDTH, STEPS = 48, 4
CLIPPED = 2e-7
"""How far weights may be from the plain run's where torch's clipping has multiplied."""
ROWS = list(torch.randn(24, WIDTH, generator=torch.Generator().manual_seed(7)))


@pytest.fixture(autouse=True)
def _quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("lightning.pytorch", "lightning.fabric"):
        monkeypatch.setattr(logging.getLogger(name), "level", logging.ERROR)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="(pytorch_)?lightning")
        yield


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear, self.drop = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(torch.relu(self.linear(self.norm(x))))


class Net(L.LightningModule):
    """Blocks, statistics in buffers, and a parameter of the LightningModule itself."""

    def __init__(self, manual: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks, self.batch_norm = nn.Sequential(Block(), Block(), Block()), nn.BatchNorm1d(WIDTH)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.automatic_optimization = not manual
        self.losses: list[float] = []
        self.checks: list[float] = []
        self.norms: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.batch_norm(self.blocks(x)) * self.scale

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        # By hand only a forward has the parameters; otherwise the whole step is one.
        out = self.batch_norm(self.blocks(batch)) * self.scale if self.automatic_optimization else self(batch)
        loss = (out.float() - batch.float().sin()).square().mean()
        self.losses.append(loss.item())
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.lr_schedulers().step()
        return loss

    def validation_step(self, batch: Tensor, index: int) -> None:
        check = (self.blocks(batch) * self.scale).float().square().mean()
        self.checks.append(check.item())
        self.log("check", check, sync_dist=True)

    def test_step(self, batch: Tensor, index: int) -> None:
        self.validation_step(batch, index)

    def predict_step(self, batch: Tensor, index: int) -> Tensor:
        return self(batch)

    def configure_optimizers(self) -> Any:
        optimizer = zo.AdamW(self.parameters(), lr=1e-3)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Norms(Callback):
    """Reads the norm of all gradients as loggers do."""

    def on_before_optimizer_step(self, trainer: Any, module: Any, optimizer: Any) -> None:
        module.norms.append(grad_norm(module, 2)["grad_2.0_norm_total"].item())


def loader(shuffle: bool = False) -> DataLoader[Tensor]:
    return DataLoader(ROWS, batch_size=4, shuffle=shuffle)


def trainer(strategy: Any = "auto", devices: int = 1, **settings: Any) -> L.Trainer:
    quiet = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
    }
    settings = quiet | {"max_steps": STEPS, "accelerator": "cpu"} | settings
    return L.Trainer(strategy=strategy, devices=devices, **settings)


def fit(
    where: str | None,
    folder: Path,
    module: Net | None = None,
    ckpt_path: Path | None = None,
    changes: dict[str, Any] | None = None,
    **settings: Any,
) -> tuple[Net, L.Trainer]:
    """Train; `where` is a tier, or None for the plain module."""
    if where is not None:
        settings["strategy"] = OffloadStrategy(
            config(where, folder / "run", **({"durability": "scratch"} | (changes or {})))
        )
    fitted, runner = module or Net(), trainer(**settings)
    runner.fit(fitted, loader(), loader(), ckpt_path=ckpt_path)
    return fitted, runner


def assert_equal(ours: Net, plain: Net, limit: float = 0.0) -> None:
    assert len(ours.losses) == len(plain.losses) > 0
    assert max(abs(a - b) for a, b in zip(ours.losses, plain.losses, strict=True)) <= limit * 10
    assert max((abs(a - b) for a, b in zip(ours.checks, plain.checks, strict=True)), default=0.0) <= limit * 100
    assert distance(values_of(ours), values_of(plain)) <= limit
    assert all(torch.equal(a, b) or limit for a, b in zip(ours.buffers(), plain.buffers(), strict=True))


@pytest.mark.parametrize(
    ("where", "settings"),
    [
        ("cpu", {}),
        ("nvme", {"accumulate_grad_batches": 2}),
        ("nvme", {"enable_model_summary": True, "detect_anomaly": True}),
        ("cpu", {"precision": "bf16-mixed"}),
    ],
)
def test_a_fit_is_the_plain_one(where: str, settings: dict[str, Any], tmp_path: Path) -> None:
    plain, plain_runner = fit(None, tmp_path, **settings)
    ours, runner = fit(where, tmp_path, **settings)
    assert_equal(ours, plain)
    for task in ("validate", "test"):
        found = getattr(runner, task)(ours, loader(), verbose=False)
        assert found == getattr(plain_runner, task)(plain, loader(), verbose=False)
    for one, other in zip(runner.predict(ours, loader()), plain_runner.predict(plain, loader()), strict=True):
        assert torch.equal(one, other)
    zo.close(ours)


@pytest.mark.parametrize("where", ["cpu", "nvme"])
def test_manual_optimization(where: str, tmp_path: Path) -> None:
    plain, _ = fit(None, tmp_path, Net(manual=True))
    ours, _ = fit(where, tmp_path, Net(manual=True))
    assert_equal(ours, plain)
    zo.close(ours)


CLIPS: dict[str, dict[str, Any]] = {
    "norm": {"gradient_clip_val": 0.5},
    "value": {"gradient_clip_val": 0.002, "gradient_clip_algorithm": "value"},
    "accumulated": {"gradient_clip_val": 0.5, "accumulate_grad_batches": 2},
}


@pytest.mark.parametrize("clip", CLIPS.values(), ids=CLIPS)
def test_clipping_and_norms(clip: dict[str, Any], tmp_path: Path) -> None:
    """By torch's functions, on what `.grad` gives: the same bits wherever states rest."""
    plain, _ = fit(None, tmp_path, callbacks=[Norms()], **clip)
    found = {where: fit(where, tmp_path, callbacks=[Norms()], **clip)[0] for where in ("cpu", "nvme")}
    for ours in found.values():
        assert_equal(ours, plain, CLIPPED)
        assert ours.norms == pytest.approx(plain.norms, rel=1e-6)
    assert_equal(found["nvme"], found["cpu"])
    zo.close(found["nvme"])


def test_a_loss_scale(tmp_path: Path) -> None:
    """torch's scaler, as Lightning uses it for "16-mixed" on GPUs. The first scale overflows."""
    found = {}
    for where in (None, "cpu", "nvme"):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**20, growth_interval=2)
        plugin = MixedPrecision("16-mixed", "cpu", scaler)
        found[where], runner = fit(where, tmp_path, plugins=[plugin], gradient_clip_val=0.5)
        found[where].norms = [scaler.get_scale(), float(runner.global_step)]
        assert scaler.get_scale() < 2.0**20
    for where in ("cpu", "nvme"):
        assert found[where].norms == found[None].norms
        assert_equal(found[where], found[None], CLIPPED)
    zo.close(found["nvme"])


def test_a_second_fit_begins_with_new_states(tmp_path: Path) -> None:
    """As a plain one does, whose optimizer is made anew."""
    plain, runner = fit(None, tmp_path)
    runner.fit_loop.epoch_loop.max_steps = 2 * STEPS
    runner.fit(plain, loader(shuffle=True))
    ours, runner = fit("nvme", tmp_path)
    runner.fit_loop.epoch_loop.max_steps = 2 * STEPS
    runner.fit(ours, loader(shuffle=True))
    assert len(ours.losses) == 2 * STEPS
    assert_equal(ours, plain)
    zo.close(ours)


# Checkpoints


@pytest.mark.door(
    "lightning",
    load="checkpoint of a plain `Trainer`, and of `OffloadStrategy`, by the latter",
    between="in the midst of an epoch",
    save="`OffloadStrategy`",
    outcome="right",
)
@pytest.mark.parametrize(("where", "saved_by"), [("cpu", "ours"), ("nvme", "ours"), ("nvme", "plain")])
def test_a_fit_goes_on_from_a_checkpoint(where: str, saved_by: str, tmp_path: Path) -> None:
    """Of this strategy, or of a plain run, as a plain run goes on: in the midst of an epoch too."""
    at, paths = 3, {"plain": tmp_path / "plain.ckpt", "ours": tmp_path / "ours.ckpt"}
    for name in ("plain", saved_by):
        saved, runner = fit(None if name == "plain" else where, tmp_path, max_steps=at)
        runner.save_checkpoint(paths[name])
    if saved_by == "ours":
        zo.close(saved)
        assert {each.name for each in paths["ours"].iterdir()} == {"states", "lightning.ckpt"}
        assert (paths["ours"] / "lightning.ckpt").stat().st_size < 8192
    plain, _ = fit(None, tmp_path, max_steps=10, ckpt_path=paths["plain"])
    ours, _ = fit(where, tmp_path, max_steps=10, ckpt_path=paths[saved_by])
    assert len(ours.losses) == 10 - at and ours.lr_schedulers().last_epoch == 10
    assert_equal(ours, plain)
    zo.close(ours)


def test_an_evaluation_loads_a_checkpoint_and_leaves_the_next_fit_alone(tmp_path: Path) -> None:
    ours, runner = fit("nvme", tmp_path)
    runner.save_checkpoint(tmp_path / "a.ckpt")
    values, found = values_of(ours), runner.validate(ours, loader(), verbose=False)
    plain = Net()
    plain.load_state_dict(ours.state_dict())
    zo.close(ours)
    later = Net()
    runner = trainer(OffloadStrategy(config("nvme", tmp_path / "run", durability="scratch")))
    assert runner.validate(later, loader(), ckpt_path=tmp_path / "a.ckpt", verbose=False) == found
    assert distance(values_of(later), values) == 0
    torch.manual_seed(1)
    trainer(OffloadStrategy(config("nvme", tmp_path / "run", durability="scratch"))).fit(later, loader())
    torch.manual_seed(1)
    trainer().fit(plain, loader())
    later.checks.clear()
    assert_equal(later, plain)
    zo.close(later)


def test_callbacks_replace_and_remove_checkpoints(tmp_path: Path) -> None:
    keeper = ModelCheckpoint(tmp_path / "kept", monitor="check", save_top_k=2, save_last=True, every_n_epochs=1)
    settings = {"enable_checkpointing": True, "max_steps": -1, "max_epochs": 4, "limit_train_batches": 2}
    ours, runner = fit("cpu", tmp_path, callbacks=[keeper], **settings)
    kept = sorted(each.name for each in (tmp_path / "kept").iterdir())
    assert len(kept) == 3 and "last.ckpt" in kept and not any(name.endswith(".part") for name in kept)
    [found] = runner.test(ours, loader(), ckpt_path="best", verbose=False)
    assert found["check"] == pytest.approx(keeper.best_model_score.item(), abs=1e-6)
    zo.close(ours)


class Killed(TorchCheckpointIO):
    """Fails as a killed process would, at its second file."""

    num_files = 0

    def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        self.num_files += 1
        super().save_checkpoint(*args, **kwargs)
        if self.num_files == 2:
            raise KeyboardInterrupt


def test_what_breaks_off_leaves_the_last_checkpoint(tmp_path: Path) -> None:
    path, module = tmp_path / "last.ckpt", Net()
    strategy = OffloadStrategy(config("cpu", tmp_path), checkpoint_io=Killed())
    runner = trainer(strategy)
    runner.fit(module, loader())
    runner.save_checkpoint(path)
    values = values_of(module)
    with torch.no_grad(), zo.gathered(module, mode="write") as params:
        params["scale"].mul_(2)
    with pytest.raises(KeyboardInterrupt):
        runner.save_checkpoint(path)
    assert (tmp_path / "last.ckpt.part").is_dir()
    runner.validate(module, loader(), ckpt_path=path, verbose=False)
    assert distance(values_of(module), values) == 0
    runner.save_checkpoint(path)
    assert not (tmp_path / "last.ckpt.part").exists()
    zo.close(module)


class Two(Net):
    """Two optimizers, in turns."""

    def __init__(self) -> None:
        super().__init__(manual=True)

    def training_step(self, batch: Tensor, index: int) -> None:
        for optimizer in self.optimizers():
            self.toggle_optimizer(optimizer)
            loss = (self(batch) - batch.sin()).square().mean()
            self.losses.append(loss.item())
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.untoggle_optimizer(optimizer)
        self.optimizers()[1].param_groups[0]["lr"] *= 0.5

    def configure_optimizers(self) -> Any:
        others = [param for name, param in self.named_parameters() if not name.startswith("blocks")]
        return zo.AdamW(self.blocks.parameters(), lr=1e-2), zo.AdamW(others, lr=1e-1)


def test_several_optimizers(tmp_path: Path) -> None:
    found, path = {}, tmp_path / "two.ckpt"
    for where in (None, "nvme"):
        first, runner = fit(where, tmp_path, Two(), max_steps=-1, max_epochs=1)
        runner.save_checkpoint(path)
        if where is not None:
            zo.close(first)
        found[where], _ = fit(where, tmp_path, Two(), max_steps=-1, max_epochs=2, ckpt_path=path)
        assert found[where].optimizers()[1].param_groups[0]["lr"] == 1e-1 * 0.5 ** (2 * len(loader()))
        runner.strategy.remove_checkpoint(path)
    assert_equal(found["nvme"], found[None])
    zo.close(found["nvme"])


def test_a_module_without_values_is_filled_by_a_checkpoint(tmp_path: Path) -> None:
    first, runner = fit("cpu", tmp_path)
    runner.save_checkpoint(tmp_path / "a.ckpt")
    second = trainer(OffloadStrategy(config("cpu", tmp_path)))
    with second.init_module(empty_init=True):
        module = Net()
    assert module.scale.is_meta
    second.validate(module, loader(), ckpt_path=tmp_path / "a.ckpt", verbose=False)
    assert distance(values_of(module), values_of(first)) == 0


# Precision, and what is refused


def test_half_precision_keeps_fp32_masters(tmp_path: Path) -> None:
    """Batches come in bf16, and parameters compute in it; the plain run rounds after each step, and is only near."""
    ours, _ = fit("cpu", tmp_path, precision="bf16-true", changes={"precision": "bf16"})
    plain, _ = fit(None, tmp_path)
    assert next(ours.parameters()).dtype == torch.bfloat16
    assert max(abs(a - b) for a, b in zip(ours.losses, plain.losses, strict=True)) < 0.05
    with zo.gathered(ours, kind="master") as masters:
        assert any((value != value.bfloat16()).any() for value in masters.values())
    alone, _ = fit("nvme", tmp_path, changes={"precision": "bf16"})  # the Trainer need not know
    assert distance(values_of(alone), values_of(ours)) == 0 or alone.losses == ours.losses


@pytest.mark.parametrize(
    ("changes", "settings", "message"),
    [
        ({}, {"precision": "bf16-true"}, r"precision='bf16-true'\) does not go with .*precision='fp32'"),
        ({}, {"precision": "64-true"}, r"precision='64-true'\) does not go"),
        ({"existing": "resume", "nvme": "x"}, {}, "ckpt_path"),
    ],
)
def test_what_does_not_go_together(
    changes: dict[str, Any], settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(zo.ConfigError, match=message):
        fit("cpu", tmp_path, changes=changes, **settings)


def test_modules_that_cannot_be_trained(tmp_path: Path) -> None:
    module = zo.offload(Net(), config("cpu", tmp_path, cpu_memory="1GiB"))
    with pytest.raises(zo.ConfigError, match="offloaded with another config"):
        fit("cpu", tmp_path, module)
    empty = Net()
    del empty.blocks, empty.batch_norm, empty.scale
    with pytest.raises(zo.ConfigError, match="has no parameters"):
        fit("cpu", tmp_path, empty)
    runner = trainer(OffloadStrategy(config("cpu", tmp_path)))
    evaluated = Net()
    runner.validate(evaluated, loader(), verbose=False)
    with pytest.raises(zo.ConfigError, match="states of an optimizer"):
        runner.save_checkpoint(tmp_path / "a.ckpt")
    ours, runner = fit("cpu", tmp_path)
    with pytest.raises(zo.ConfigError, match="give one of a file system"):
        runner.save_checkpoint("s3://bucket/a.ckpt")


def test_a_module_that_is_offloaded_already(tmp_path: Path) -> None:
    plain, _ = fit(None, tmp_path)
    ours, _ = fit("cpu", tmp_path, zo.offload(Net(), config("cpu", tmp_path, durability="scratch")))
    assert_equal(ours, plain)


def test_the_other_name_of_the_package(tmp_path: Path) -> None:
    """A program that imports `pytorch_lightning` gets a strategy of that."""
    with mock.patch.dict(sys.modules):
        for name in [name for name in sys.modules if name.startswith("lightning.")]:
            del sys.modules[name]
        del sys.modules["zero_offload.integrations.lightning"]
        other = importlib.import_module("pytorch_lightning")
        strategy = importlib.import_module("zero_offload.integrations.lightning").OffloadStrategy(
            config("cpu", tmp_path)
        )
        assert "lightning.pytorch" not in sys.modules

        class Small(other.LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.layer = nn.Linear(WIDTH, 1)

            def training_step(self, batch: Tensor, index: int) -> Tensor:
                return self.layer(batch).square().mean()

            def configure_optimizers(self) -> zo.AdamW:
                return zo.AdamW(self.parameters(), lr=1e-2)

        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        runner = other.Trainer(
            strategy=strategy, accelerator="cpu", devices=1, max_steps=2, enable_checkpointing=False, **quiet
        )
        runner.fit(Small(), loader())
        assert runner.global_step == 2


def test_the_example_runs_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = Path(__file__).resolve().parents[2] / "examples" / "lightning_trainer.py"
    monkeypatch.setattr(sys, "argv", [str(script), str(tmp_path)])
    for _ in range(2):
        assert runpy.run_path(str(script))["trainer"].global_step == 4 * 256 // 32
    assert (tmp_path / "last.ckpt" / "states").is_dir()


# Ranks


def _go_on(rank: int, world_size: int, folder: str, where: str | None, manual: bool, settings: dict[str, Any]) -> Any:
    """Train two steps, save, and go on in another Trainer; what this rank has then. None is DDP."""
    from lightning.pytorch.utilities.rank_zero import rank_zero_only

    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    with launched(rank, world_size), warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="lightning")
        rank_zero_only.rank = rank
        path, settings = Path(folder) / f"{where}.ckpt", settings | {"devices": world_size}
        for max_steps, ckpt_path in ((2, None), (3, path)):
            if where is None:
                settings["strategy"] = DDPStrategy(process_group_backend="gloo")
            callbacks = [] if manual else [Norms()]
            module, runner = fit(
                where, Path(folder), Net(manual), ckpt_path, max_steps=max_steps, callbacks=callbacks, **settings
            )
            runner.save_checkpoint(path)
            runner.validate(module, loader(), verbose=False)
            values = values_of(module)
            runner.validate(module, loader(), ckpt_path=path, verbose=False)
            if where is not None:
                zo.close(module)
        return module.losses + module.checks, module.norms, values


@pytest.mark.door("lightning", load="checkpoint of two ranks, on one", save="`OffloadStrategy`", outcome="right")
@pytest.mark.parametrize(
    ("where", "manual", "settings", "limit"),
    [
        ("cpu", False, {"accumulate_grad_batches": 2}, 0.0),
        ("nvme", True, {}, 0.0),
        ("nvme", False, {"gradient_clip_val": 0.5}, CLIPPED),
    ],
)
def test_two_ranks(
    where: str, manual: bool, settings: dict[str, Any], limit: float, tmp_path: Path, pools: RankPools
) -> None:
    """As DistributedDataParallel, whose gradients are averaged alike; the checkpoint loads on one rank."""
    plain = pools.of(2).succeed(_go_on, str(tmp_path), None, manual, settings)
    ours = pools.of(2).succeed(_go_on, str(tmp_path), where, manual, settings)
    for one, other in zip(ours, plain, strict=True):
        assert one[0] == (pytest.approx(other[0], abs=10 * limit) if limit else other[0])
        assert one[1] == pytest.approx(other[1], rel=1e-6) and bool(one[1]) != manual
        assert distance(one[2], other[2]) <= limit
    alone = Net()
    trainer(OffloadStrategy(config("cpu", tmp_path))).validate(
        alone, loader(), ckpt_path=tmp_path / f"{where}.ckpt", verbose=False
    )
    assert distance(values_of(alone), ours[0][2]) == 0


class Signalled(Callback):
    """Gets a signal, on the last rank, in the second step."""

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 1 and trainer.global_rank == trainer.world_size - 1:
            os.kill(os.getpid(), signal.SIGUSR1)


class Saved(Callback):
    """Saves behind the second step, as ModelCheckpoint does."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 2:
            trainer.save_checkpoint(self._path)


def _end_and_go_on(rank: int, world_size: int, folder: str, accumulate: int, by_signal: bool) -> list[float]:
    """Losses of two steps, an end by a signal or by `max_steps`, and losses of a third step in another Trainer."""
    from lightning.pytorch.utilities.rank_zero import rank_zero_only

    path, before = Path(folder) / f"{by_signal}.ckpt", signal.getsignal(signal.SIGUSR1)
    settings: dict[str, Any] = {"devices": world_size, "accumulate_grad_batches": accumulate}
    with launched(rank, world_size), warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="lightning")
        rank_zero_only.rank = rank
        module = Net()
        if by_signal:
            end = [Signalled(), EndBySignal(path, exit_code=75)]
            with pytest.raises(SystemExit) as stopped:
                fit("cpu", Path(folder), module, callbacks=end, **settings)
            assert stopped.value.code == 75
        else:
            fit("cpu", Path(folder), module, callbacks=[Saved(path)], max_steps=2, **settings)
        zo.close(module)
        again, runner = fit("cpu", Path(folder), ckpt_path=path, callbacks=[EndBySignal(path)], max_steps=3, **settings)
        zo.close(again)
    assert runner.global_step == 3 and signal.getsignal(signal.SIGUSR1) == before
    return module.losses + again.losses


@pytest.mark.parametrize(("accumulate", "batches"), [(1, 3), (2, 5)])
def test_a_signal_to_one_rank_ends_the_fit_of_all_behind_one_step(
    accumulate: int, batches: int, tmp_path: Path, pools: RankPools
) -> None:
    ended, whole = (
        pools.of(2).succeed(_end_and_go_on, str(tmp_path), accumulate, by_signal) for by_signal in (True, False)
    )
    assert ended == whole and [len(each) for each in ended] == [batches] * 2


def test_a_signal_ends_a_fit_of_one_process(tmp_path: Path) -> None:
    path, module = tmp_path / "stopped.ckpt", Net()
    with pytest.raises(SystemExit) as stopped:
        fit("nvme", tmp_path, module, callbacks=[Signalled(), EndBySignal(path, exit_code=0, grace="1min")])
    assert stopped.value.code == 0 and len(module.losses) == 2 and (path / "states").is_dir()
    zo.close(module)
    with pytest.raises(zo.ConfigError, match="exit_code=300"):
        EndBySignal(path, exit_code=300)


def test_a_checkpoint_that_is_replaced_leaves_a_users_files(tmp_path: Path) -> None:
    """In it, and under the names that a replacement takes for a moment."""
    path, module = tmp_path / "last.ckpt", Net()
    runner = trainer(OffloadStrategy(config("cpu", tmp_path)))
    runner.fit(module, loader())
    runner.save_checkpoint(path)
    (path / "notes.txt").write_text("mine")
    for name in ("last.ckpt.part", "last.ckpt.old"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "notes.txt").write_text(name)
    with pytest.warns(UserWarning, match="1 file that no list names stays: notes.txt"):
        runner.save_checkpoint(path)
    found = {str(each.relative_to(tmp_path)): each.read_text() for each in tmp_path.rglob("notes.txt")}
    assert found == {
        "last.ckpt.part.kept/notes.txt": "last.ckpt.part",
        "last.ckpt.old.kept/notes.txt": "last.ckpt.old",
        "last.ckpt.old/notes.txt": "mine",
    }
    assert {each.name for each in path.iterdir()} == {"states", "lightning.ckpt"}
    zo.close(module)
