"""The ground of every test: a fixed seed, a number of threads, the quickest kernels, and a directory on a disk."""

from __future__ import annotations

import datetime
import gc
import importlib
import os
import signal
import subprocess
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

# Before torch loads OpenMP: waiting threads sleep, since tests often share their cores with others.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# Workers share the cores: with two threads each, one often waits for another whose core is away. In the environment, so
# that the processes that tests start, whose numbers are compared with those made here, have as many.
NUM_THREADS = 1 if "PYTEST_XDIST_WORKER" in os.environ else 2
os.environ["OMP_NUM_THREADS"] = str(NUM_THREADS)

# Invariants that are dear to check; in the environment, as above.
os.environ["ZERO_OFFLOAD_CHECK"] = "1"

# A shell's background job ignores Ctrl-C, and so would every process that a test starts.
signal.signal(signal.SIGINT, signal.default_int_handler)

import pytest  # noqa: E402
import torch  # noqa: E402
from hypothesis import settings  # noqa: E402

from tests.fake_gpu import build as fake_gpu_build  # noqa: E402
from zero_offload.hardware import native  # noqa: E402

if TYPE_CHECKING:
    from tests.helpers.ranks import RankPool, RankPools

# The same examples in every run, and none too slow: a core may be away for as long as it likes.
settings.register_profile("house", deadline=None, derandomize=True, database=None)
settings.load_profile("house")

_BUILD = pytest.StashKey[subprocess.Popen[bytes] | None]()
_ISA = native.isa() if native.available() else None


def pytest_sessionstart(session: pytest.Session) -> None:
    """The fake GPU is built while other tests run: by the process that starts the workers, if there are some."""
    config = session.config
    if hasattr(config, "workerinput") or "FAKE_GPU_SOCKET" in os.environ or config.option.collectonly:
        return
    folder = Path(__file__).parent / "fake_gpu"
    paths = [(config.invocation_params.dir / argument.split("::")[0]).resolve() for argument in config.args]
    if any(path in (folder, *folder.parents) or folder in path.parents for path in paths):
        config.stash[_BUILD] = fake_gpu_build.start()


def pytest_unconfigure(config: pytest.Config) -> None:
    """Tests that need the device have waited for it."""
    if (building := config.stash.get(_BUILD, None)) is not None:
        building.terminate()
        building.wait()


IN_TWO_DAYS = ("crash", "fake_gpu", "integrations", "machines", "parity", "zoo")
"""Folders whose tests take an hour together, on two cores without AVX-512."""


def pytest_addoption(parser: pytest.Parser) -> None:
    slow = ", ".join(IN_TWO_DAYS)
    parser.addoption("--half", action="store_true", help=f"of {slow} every second test, tomorrow the others")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """CI has an hour and a half, and takes two days for the tests of slow folders (`--half`)."""
    if not config.getoption("--half"):
        return
    slow = [item for item in items if item.nodeid.split("/")[1] in IN_TWO_DAYS]
    tomorrow = {*slow[1 - datetime.date.today().toordinal() % 2 :: 2]}
    config.hook.pytest_deselected(items=[*tomorrow])
    items[:] = [item for item in items if item not in tomorrow]


def pytest_collection_finish() -> None:
    """Objects of thousands of tests stay: each look of the garbage collector at them would take half a second."""
    importlib.import_module("torch._dynamo")  # as the first optimizer does: a million objects more

    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _same_start() -> None:
    torch.set_num_threads(NUM_THREADS)
    torch.manual_seed(0)
    if _ISA is not None and native.isa() is not _ISA:
        native.set_isa(_ISA)


@pytest.fixture(scope="session")
def pools() -> Iterator[RankPools]:
    """Ranks for all tests of this process."""
    from tests.helpers.ranks import RankPools

    made = RankPools()
    yield made
    made.close()


@pytest.fixture
def pool(pools: RankPools) -> RankPool:
    """Two ranks."""
    return pools.of(2)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Ranks that a failed test has left in the midst of a job do not serve the next one."""
    report = yield
    found = getattr(item, "funcargs", {}).get("pools")
    if report.failed and found is not None:
        found.renew()
    return report


@pytest.fixture
def nvme(tmp_path: Path) -> Path:
    """An empty directory for the NVMe tier."""
    path = tmp_path / "nvme"
    path.mkdir()
    return path
