"""The server of `zero-offload report --watch`, beside a run of this process."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable
from http.client import HTTPConnection
from pathlib import Path

import pytest
from torch import nn

import zero_offload as zo
from tests.unit.runs.report.test_page import data_in
from zero_offload.base.errors import ConfigError
from zero_offload.runs.reader import read_run
from zero_offload.runs.report import watch as watch_module
from zero_offload.runs.report.watch import watch


def get(port: int, path: str, **headers: str) -> tuple[int, str, str]:
    connection = HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("GET", path, headers=headers)
    answer = connection.getresponse()
    return answer.status, answer.read().decode(), answer.headers.get("ETag", "")


def wait_for(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture
def model() -> nn.Module:
    return zo.offload(nn.Linear(2, 2), zo.OffloadConfig())


def test_the_page_follows_a_run_until_it_ends(
    tmp_path: Path, model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch_module, "EVERY_S", 0.05)
    told: list[str] = []
    log = zo.RunLog(tmp_path / "run", model)
    thread = threading.Thread(target=watch, args=(tmp_path / "run", 600.0, None, told.append), daemon=True)
    thread.start()  # before the first row
    log.step(1, loss=3.0)
    wait_for(lambda: told)
    port = int(told[0].split("127.0.0.1:")[1].split()[0])
    status, text, _ = get(port, "/?theme=dark")
    assert status == 200 and 'data-follow="50"' in text and data_in(text)["state"] == "running"
    status, text, tag = get(port, "/data")
    assert status == 200 and json.loads(text)["steps"]["count"] == 1
    assert get(port, "/data", **{"If-None-Match": tag})[:2] == (304, "")
    log.step(2, loss=2.0)
    wait_for(lambda: get(port, "/data", **{"If-None-Match": tag})[0] == 200)
    assert json.loads(get(port, "/data")[1])["steps"]["count"] == 2
    assert get(port, "/data", Host="evil.example:80")[0] == 403
    assert get(port, "/run.json")[0] == get(port, "/../metrics.jsonl")[0] == 404
    assert thread.is_alive()
    log.close()
    thread.join(30)
    assert not thread.is_alive() and not read_run(tmp_path / "run").is_running
    zo.close(model)


def test_a_run_that_was_killed_has_ended(tmp_path: Path, model: nn.Module) -> None:
    with zo.RunLog(tmp_path / "run", model) as log:
        log.step(1)
        assert read_run(tmp_path / "run").is_running
        holder = json.loads((tmp_path / "run" / "LOCK").read_text())
    assert not read_run(tmp_path / "run").is_running
    for pid, is_running in ((2**22 + 1, False), (os.getpid(), True), (1, True)):
        (tmp_path / "run" / "LOCK").write_text(json.dumps(holder | {"pid": pid}))
        assert read_run(tmp_path / "run").is_running is is_running
    (tmp_path / "run" / "LOCK").write_text(json.dumps(holder | {"host": "another"}))
    assert read_run(tmp_path / "run").is_running
    zo.close(model)


def test_a_port_that_is_taken(tmp_path: Path, model: nn.Module) -> None:
    with zo.RunLog(tmp_path / "run", model) as log, socket.create_server(("127.0.0.1", 0)) as other:
        log.step(1)
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} is taken"):
            watch(tmp_path / "run", 600.0, port, print)
    zo.close(model)


def test_no_run_is_said_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"has no run\.json"):
        watch(tmp_path, 600.0, None, print)
