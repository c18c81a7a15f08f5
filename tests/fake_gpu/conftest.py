"""Tests on the fake GPU: they come last, in a process that has the device, each with a device as new."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.fake_gpu import build, device
from tests.fake_gpu.forward import FOLDER, DeviceProcess

_PROCESS = pytest.StashKey[DeviceProcess]()


_LONG = ("test_gpu_benchmark.py", "test_residency.py", "test_states.py", "test_tests_of_a_gpu.py")
"""Each takes a worker for a minute or so."""


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Last, since the device may still be in the making; of them long files first, so that none ends alone."""
    ours = [item for item in items if FOLDER in item.path.parents]
    ours.sort(key=lambda item: item.path.name not in _LONG)
    if build.compiler() is None and not build.library().exists():
        for item in ours:
            item.add_marker(pytest.mark.skip(reason="the fake GPU is built with g++ (or CXX), which is missing"))
    known = set(ours)
    items[:] = [item for item in items if item not in known] + ours


def pytest_collection_finish(session: pytest.Session) -> None:
    """Alone, these tests run here, where a debugger reaches them."""
    config = session.config
    is_alone = all(FOLDER in item.path.parents for item in session.items)
    is_worker = hasattr(config, "workerinput")
    if session.items and is_alone and not is_worker and not config.option.collectonly and build.compiler():
        device.load()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> bool | None:
    if FOLDER not in item.path.parents or device.is_loaded() or item.get_closest_marker("skip"):
        return None
    process = item.config.stash.setdefault(_PROCESS, DeviceProcess(item.config))
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    for report in process.run(item, nextitem):
        item.ihook.pytest_runtest_logreport(report=report)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def pytest_unconfigure(config: pytest.Config) -> None:
    if (process := config.stash.get(_PROCESS, None)) is not None:
        process.close()


@pytest.fixture(autouse=True)
def gpu() -> Iterator[None]:
    """A device as new; the test fails if it has left races, or operations that raised."""
    device.reset()
    yield
    device.synchronize()
    assert device.take_races() == []
    device.reset()


@pytest.fixture
def late(gpu: None) -> None:
    """Nothing runs before something waits for it."""
    device.policy(device.Policy.LATE)
