"""Signals and exceptions end a run soon, with a code, without what would outlive it, and the same command goes on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

import pytest

from tests.helpers.disk import assert_finishes, generation_file, reference
from tests.helpers.pairwise import full
from tests.helpers.ranks import wait_until
from tests.helpers.signals import interrupt
from tests.helpers.trainer import Run, Spec, finish, outcome

FULL = """
import sys, zero_offload as zo
from tests.helpers.disk import open_model, train
from zero_offload.checkpoint.generation import GenerationKeeper
def commit(*args): raise zo.StorageError("the disk is full")
GenerationKeeper.commit = commit
model, optimizer = open_model(sys.argv[1])
train(model, optimizer, 0, 1)
if "noticed" in sys.argv:
    try: train(model, optimizer, 1, 9)
    except zo.StorageError: print("caught")
"""
LIMIT_S = 30
"""Seconds that the promise allows; a container's runtime sends SIGKILL after 10 to 30 s."""
SCRIPT = """
import sys, torch, zero_offload as zo
from tests.helpers.disk import open_model, train
model, optimizer = open_model(sys.argv[1])
resumed = zo.resume(model, optimizer)
for step in range(resumed.step if resumed else 0, 10**6):
    train(model, optimizer, step, step + 1)
    print(step, flush=True)
    if step == 4 and "raise" in sys.argv:
        raise ValueError("the user's own")
"""


def _environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}


def _start(*command: object, stdout: int | IO[str] = subprocess.PIPE) -> subprocess.Popen[str]:
    """In a session of its own, so that what it leaves behind can be found."""
    return subprocess.Popen(
        [sys.executable, *map(str, command)],
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        env=_environment(),
        start_new_session=True,
    )


def _train_command(out: Path, *more: object) -> list[object]:
    sizes = ["--model", "tiny", "--seq", 16, "--batch", 1, "--steps", 100_000, "--eval-every", 100_000]
    return ["-m", "zero_offload", "train", "--out", out, *sizes, *more]


def _steps(out: Path) -> list[int]:
    path = out / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line)["step"] for line in lines if line.endswith("\n")]


def _ended(child: subprocess.Popen[str], began: float | None = None) -> tuple[int, str, str]:
    """Its code and what it printed; nothing of it is left, and its end took no longer than promised from `began` on.
    Without that its start counts too, which has no limit of its own."""
    out, err = child.communicate(timeout=4 * LIMIT_S)
    assert began is None or time.monotonic() - began < LIMIT_S
    with pytest.raises(ProcessLookupError):
        os.killpg(child.pid, 0)
    return child.returncode, out, err


def _committed(nvme: Path) -> int:
    return int(json.loads(generation_file(nvme).read_text())["payload"]["step"])


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(f"{number} and {number * 7 % 91} are numbers.\n" for number in range(3000)))
    return path


@pytest.mark.parametrize("number", [signal.SIGTERM, full(signal.SIGINT)])
def test_the_first_signal_ends_train_with_its_step_committed(
    number: signal.Signals, text: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    child = _start(*_train_command(out, "--data", text))
    wait_until(lambda: len(_steps(out)) >= 3 or child.poll() is not None)
    began = time.monotonic()
    child.send_signal(number)
    code, printed, complaint = _ended(child, began)
    assert code == 130 and "Traceback" not in complaint, complaint
    assert "the same command continues from there" in printed
    assert _committed(out / "nvme") == _steps(out)[-1]


SLOW_START = """
import sys, time
from zero_offload.cli.main import main
from zero_offload.finetune.pretrain import train
def load_corpus(*_):
    print("loading", flush=True)
    time.sleep(600)
train.load_corpus = load_corpus
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, -signal.SIGTERM), (signal.SIGINT, 130)])
def test_a_signal_while_a_run_is_set_up_ends_it_at_once(number: signal.Signals, code: int, tmp_path: Path) -> None:
    """There is no step to finish, and reading text or moving a model in may take minutes."""
    child = _start("-c", SLOW_START, "train", "--out", tmp_path / "run")
    assert child.stdout is not None and child.stdout.readline() == "loading\n"
    began = time.monotonic()
    child.send_signal(number)
    ended, _, complaint = _ended(child, began)
    assert ended == code and complaint == (
        "interrupted; the same command goes on at the last commit, or begins if there is none\n" if code > 0 else ""
    )
    assert not (tmp_path / "run").exists()


IMPORTING = """
import os, runpy, signal, sys
from importlib.abc import MetaPathFinder
class Strike(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "zero_offload.model.api": os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Strike())
sys.orig_argv[1:] = ["-m", "zero_offload"]
sys.argv[1:] = ["chat", "no-such-folder"]
runpy.run_module("zero_offload", run_name="__main__")
"""


def test_ctrl_c_while_the_command_is_imported_leaves_no_traceback() -> None:
    code, _, complaint = _ended(_start("-c", IMPORTING))
    assert (code, complaint) == (-signal.SIGINT, "")


@pytest.mark.full
def test_the_second_ctrl_c_ends_it_at_once_and_it_resumes(text: Path, tmp_path: Path) -> None:
    """At the second one the step may be anywhere; what was committed counts."""
    out = tmp_path / "run"
    child = _start(*_train_command(out, "--data", text))
    wait_until(lambda: len(_steps(out)) >= 3 or child.poll() is not None)
    began = time.monotonic()
    # The first one has been seen when it says so; the second is then the user's impatience.
    child.send_signal(signal.SIGINT)
    assert child.stderr is not None
    while "once more to stop at once" not in child.stderr.readline():
        assert child.poll() is None
    child.send_signal(signal.SIGINT)
    code, _, complaint = _ended(child, began)
    assert code == 130 and "Traceback" not in complaint, complaint
    done = _committed(out / "nvme")
    again = _start(*_train_command(out, "--data", text))
    wait_until(lambda: _steps(out)[-1] > done or again.poll() is not None)
    again.send_signal(signal.SIGTERM)
    code, printed, _ = _ended(again)
    assert code == 130 and f"resuming from step {done} " in printed
    assert _steps(out) == list(range(1, _steps(out)[-1] + 1))


def _until_printed(child: subprocess.Popen[str], line: str) -> None:
    assert child.stdout is not None
    while child.stdout.readline() != line + "\n":
        assert child.poll() is None


def test_sigterm_ends_a_script_as_a_kill_would(tmp_path: Path) -> None:
    """A library takes no signal away from the program: the default is the end, and the last commit stays."""
    spec = Spec(nvme=str(tmp_path / "nvme"), out=str(tmp_path), num_steps=60)
    run = Run(spec)
    # Step 6 has used what update 5 wrote, which was after commit 4.
    assert run.wait_for_rows(6)
    began = time.monotonic()
    run.stop(signal.SIGTERM)
    assert run.wait() == -signal.SIGTERM and time.monotonic() - began < LIMIT_S
    assert _committed(tmp_path / "nvme") >= 4
    finish(spec)
    assert sorted(outcome(spec)[0]) == list(range(1, spec.num_steps + 1))


def _raise_twice(child: subprocess.Popen[str]) -> None:
    for _ in range(2):
        child.send_signal(signal.SIGINT)


def test_two_ctrl_c_at_a_script(tmp_path: Path) -> None:
    child = _start("-c", SCRIPT, tmp_path / "nvme")
    _until_printed(child, "4")
    _, complaint = interrupt(child, times=2, limit_s=LIMIT_S)
    code = child.returncode
    assert code in (-signal.SIGINT, 1, 130) and "KeyboardInterrupt" in complaint
    done = _committed(tmp_path / "nvme")
    assert done >= 4
    assert assert_finishes(tmp_path / "nvme", done + 2) == done


def test_an_exception_of_the_users_is_what_is_shown(tmp_path: Path) -> None:
    """Nothing of ours comes before it or after it, the last step is committed, and the directory is free."""
    child = _start("-c", SCRIPT, tmp_path / "nvme", "raise")
    code, printed, complaint = _ended(child)
    assert code == 1 and printed.split() == list("01234")
    assert complaint.startswith("Traceback") and complaint.count("Traceback") == 1
    assert complaint.strip().endswith("ValueError: the user's own")
    assert assert_finishes(tmp_path / "nvme", 7) == 5


@pytest.mark.full
def test_what_fails_at_the_end_is_one_line(tmp_path: Path) -> None:
    code, _, complaint = _ended(_start("-W", "ignore", "-c", FULL, tmp_path / "nvme"))
    assert code == 0
    assert complaint == "zero_offload: the last step is not made a generation: the disk is full\n"


def test_what_a_program_has_caught_is_not_said_again_at_the_end(tmp_path: Path) -> None:
    child = _start("-W", "ignore", "-c", FULL, tmp_path / "nvme", "noticed")
    assert _ended(child) == (0, "caught\n", "")


def _terminate(child: subprocess.Popen[str]) -> None:
    child.send_signal(signal.SIGTERM)


EVERY = range(20)


@pytest.mark.parametrize(
    ("send", "moments"),
    [
        (_terminate, EVERY[::8]),
        (_raise_twice, EVERY[4::8]),
        *(full(each, EVERY) for each in (_terminate, _raise_twice)),
    ],
)
def test_at_any_moment(send: Callable[[subprocess.Popen[str]], None], moments: range, tmp_path: Path) -> None:
    """While torch is imported, while the model moves in, in the first steps: many moments, one directory.

    C code of torch and numpy drops a Ctrl-C that strikes while they are imported, one in fifty on a loaded machine. The
    program trains on, and its user strikes again. A program that has trained ends at the first.
    """
    printed = tmp_path / "printed"
    for moment in moments:
        with printed.open("w") as file:
            child = _start("-c", SCRIPT, tmp_path / "nvme", stdout=file)
        time.sleep(0.15 * moment)
        trained = bool(printed.read_text())
        began = time.monotonic()
        send(child)
        wait_until(lambda: child.poll() is not None or len(printed.read_text().split()) > 3)  # noqa: B023
        if child.poll() is None and not trained:
            began = time.monotonic()
            send(child)
        _ended(child, began)
    reached = _committed(tmp_path / "nvme") if any((tmp_path / "nvme").glob("generation-*.json")) else 0
    assert assert_finishes(tmp_path / "nvme", reached + 2) == reached
    assert len(reference(reached + 2)[0]) == reached + 2


@pytest.mark.full
def test_torchrun_is_told_to_end(text: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    command = _train_command(out, "--data", text)
    launcher = _start("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", *command)
    wait_until(lambda: len(_steps(out)) >= 3 or launcher.poll() is not None)
    began = time.monotonic()
    launcher.send_signal(signal.SIGTERM)
    _ended(launcher, began)
    assert _committed(out / "nvme") == _steps(out)[-1]
