"""Limits of the system: each ends a run with what it is called, before the first step if it can be known by then."""

from __future__ import annotations

import errno
import os
import resource
from pathlib import Path

import pytest

import zero_offload as zo
from tests.helpers.cgroups import memory_cgroup
from tests.helpers.child import run_in_child
from tests.helpers.disk import assert_finishes, drain, engine_of, open_model, reference, train, write_run
from tests.helpers.models import WIDE, TinyLM, build, tokens_of
from tests.helpers.pairwise import full
from tests.helpers.seccomp import forbid_io_uring
from tests.helpers.without_library import whole_run_without_library
from zero_offload.hardware.probe import memory_limits

STEPS = 5
MIB = 1 << 20


def _limit(kind: int, value: int) -> None:
    """The soft limit; back up with `_lift`."""
    resource.setrlimit(kind, (value, resource.getrlimit(kind)[1]))


def _lift(kind: int) -> None:
    hard = resource.getrlimit(kind)[1]
    resource.setrlimit(kind, (hard, hard))


# Sizes of files: ulimit -f


def _start_with_small_files(nvme: str) -> None:
    _limit(resource.RLIMIT_FSIZE, 100 << 10)
    open_model(nvme)


def test_a_file_that_may_not_get_so_large(nvme: Path) -> None:
    ended = run_in_child(_start_with_small_files, str(nvme))
    assert (ended.error, ended.exit_code) == ("CapacityError", 3)
    assert str(nvme / "rank0.swap") in ended.message and "ulimit -f" in ended.message
    assert not (nvme / "rank0.swap").exists()
    assert assert_finishes(nvme, STEPS) == 0


def _meet_the_limit_in_a_step(nvme: str, engine: str) -> None:
    model, optimizer = open_model(nvme, io_engine=engine)
    train(model, optimizer, 0, 2)
    drain(model)
    _limit(resource.RLIMIT_FSIZE, 100 << 10)
    try:
        train(model, optimizer, 2, STEPS)
        drain(model)
    finally:
        _lift(resource.RLIMIT_FSIZE)


@pytest.mark.parametrize("engine", ["threads", "io_uring", "aiofiles"])
def test_a_limit_on_files_that_comes_during_a_run(engine: str, nvme: Path) -> None:
    ended = run_in_child(_meet_the_limit_in_a_step, str(nvme), engine)
    assert (ended.error, ended.exit_code) == ("StorageError", 4)
    for words in (
        "write of ",
        "at offset ",
        f"of {nvme / 'rank0.swap'}",
        "EFBIG",
        "ulimit -f",
        "last commit is intact",
    ):
        assert words in ended.message
    assert assert_finishes(nvme, STEPS) == 2


# Open files: ulimit -n


def _train_with_few_files(nvme: str, spare: int, engine: str) -> list[float]:
    import numpy.ma  # noqa: F401 - by np.unique

    import zero_offload.storage.files.aiofiles_engine
    import zero_offload.storage.files.engines  # noqa: F401 - imports need descriptors too

    build(TinyLM)
    assert callable(zo.offload)  # all public names are imported with it
    in_use = {int(name) for name in os.listdir("/proc/self/fd")}
    # Numbers below the limit count, so holes do as well.
    holes = [os.open("/dev/null", os.O_RDONLY) for _ in range(max(in_use) + 1 - len(in_use))]
    _limit(resource.RLIMIT_NOFILE, max(in_use | set(holes)) + 1 + spare)
    try:
        model, optimizer = open_model(nvme, io_engine=engine)
        losses = train(model, optimizer, 0, STEPS)
        drain(model)
        zo.close(model)
    finally:
        _lift(resource.RLIMIT_NOFILE)
    return losses


@pytest.mark.parametrize("engine", ["threads", full("io_uring")])
def test_however_few_files_may_be_open(engine: str, tmp_path: Path) -> None:
    """It works, or says which limit it is; one more each time."""
    refusals, spare = 0, 0
    while True:
        nvme = tmp_path / str(spare)
        ended = run_in_child(_train_with_few_files, str(nvme), spare, engine)
        if not ended.error:
            break
        assert ended.exit_code in (2, 3, 4) and "ulimit -n" in ended.message, ended
        refusals, spare = refusals + 1, spare + 1
        if nvme.exists():
            assert_finishes(nvme, STEPS)
    assert 3 <= refusals <= 16


# Memory


def _offload_with_little_address_space(spare_bytes: int) -> None:
    model = build(lambda: TinyLM(WIDE))
    used_bytes = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    _limit(resource.RLIMIT_AS, used_bytes + spare_bytes)
    zo.offload(model, zo.OffloadConfig())
    zo.AdamW(model.parameters())


@pytest.mark.parametrize(
    ("spare_bytes", "words"),
    [(20 * MIB, ["MiB available", "would fit"]), (50 * MIB, ["mmap of ", "Cannot allocate memory", "ulimit -v"])],
)
def test_too_little_address_space(spare_bytes: int, words: list[str]) -> None:
    """By the plan, or when memory is taken: before the first step."""
    ended = run_in_child(_offload_with_little_address_space, spare_bytes)
    assert (ended.error, ended.exit_code) == ("CapacityError", 3), ended
    assert all(word in ended.message for word in words), ended.message


def test_a_container_of_two_gibibytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory that the group leaves counts, not the host's."""
    from zero_offload.hardware import probe

    group = tmp_path / "cgroup"
    group.mkdir()
    (group / "memory.max").write_text(f"{2 << 30}\n")
    (group / "memory.current").write_text(f"{(2 << 30) - 24 * MIB}\n")
    (tmp_path / "of_process").write_text("0::/\n")
    monkeypatch.setattr(probe, "memory_limits", lambda: memory_limits(tmp_path / "of_process", group))
    model = build(lambda: TinyLM(WIDE))
    with pytest.raises(zo.CapacityError, match="24 MiB available") as caught:
        zo.offload(model, zo.OffloadConfig())
    assert "would fit" in str(caught.value)
    assert not zo.plan(model, zo.OffloadConfig()).fits
    (group / "memory.current").write_text("0\n")
    (group / "memory.stat").write_text("inactive_file 0\nactive_file 0\n")
    assert zo.plan(model, zo.OffloadConfig()).fits


def _add_up_in_little_memory(nvme: str, group: str) -> None:
    """The group has 24 MiB more than two steps have taken, and sums of micro-batches take 64."""
    Path(group, "cgroup.procs").write_text(str(os.getpid()))
    model, optimizer = open_model(nvme, build(lambda: TinyLM(1024, 4)), optimizer="cpu", device_memory="64MiB")
    train(model, optimizer, 0, 2)
    drain(model)
    most = int(Path(group, "memory.max_usage_in_bytes").read_text())
    Path(group, "memory.limit_in_bytes").write_text(str(most + 24 * MIB))
    try:
        for step in range(2):
            model(tokens_of(step)).backward()
    finally:
        zo.close(model)


def test_a_container_that_has_no_memory_for_sums_of_micro_batches(nvme: Path) -> None:
    """The kernel would kill the process, and nothing would say why."""
    with memory_cgroup(4 << 30) as group:
        if group is None:
            pytest.skip("no memory cgroup can be made here")
        ended = run_in_child(_add_up_in_little_memory, str(nvme), str(group))
    assert (ended.error, ended.exit_code) == ("CapacityError", 3), ended
    for words in ("fp32 sums of the gradients of blocks.", "MiB are left (cgroup /", "micro_batches=2"):
        assert words in ended.message, ended.message
    model, optimizer = open_model(nvme, build(lambda: TinyLM(1024, 4)), optimizer="cpu", device_memory="64MiB")
    resumed = zo.resume(model, optimizer)
    assert resumed is not None and resumed.step == 2
    zo.close(model)


# io_uring in a sandbox


def _train_in_a_sandbox(nvme: str, engine: str) -> tuple[list[float], str]:
    forbid_io_uring()
    model, optimizer = open_model(nvme, io_engine=engine)
    losses = train(model, optimizer, 0, STEPS)
    settings = engine_of(model).settings
    zo.close(model)
    return losses, str(settings)


def test_without_io_uring_threads_serve(nvme: Path, tmp_path: Path) -> None:
    ended = run_in_child(_train_in_a_sandbox, str(nvme), "auto")
    losses, settings = ended.value
    assert losses == reference(STEPS)[0]
    assert settings.startswith("threads")
    asked = run_in_child(_train_in_a_sandbox, str(tmp_path / "asked"), "io_uring")
    assert (asked.error, asked.exit_code) == ("ConfigError", 2)
    assert os.strerror(errno.EPERM) in asked.message and "io_engine='auto'" in asked.message


# No native library


def test_with_and_without_the_native_library_a_run_goes_on(nvme: Path) -> None:
    """From what the other has written, to the same bits."""
    with whole_run_without_library():
        write_run(nvme, 2)
    assert assert_finishes(nvme, STEPS) == 2
    with whole_run_without_library():
        assert assert_finishes(nvme, STEPS) == STEPS


@pytest.mark.parametrize("engine", ["threads", "io_uring"])
def test_a_native_engine_that_is_asked_for_by_name(engine: str, nvme: Path) -> None:
    """One error that says how to build the library, and the model is as it was."""
    model = build(TinyLM)
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    with (
        whole_run_without_library(),
        pytest.raises(zo.CapacityError, match=r"does not load.*pip install -e \.") as caught,
    ):
        open_model(nvme, model, io_engine=engine)
    assert caught.value.exit_code == 3
    assert all(param.equal(before[name]) for name, param in model.named_parameters())
    assert assert_finishes(nvme, STEPS) == 0
