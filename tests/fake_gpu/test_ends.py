"""A rank ends, or is stopped, while another waits for its device: that wait ends, and the error names the rank."""

from __future__ import annotations

import datetime
import json
import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import zero_offload as zo
from tests.fake_gpu import device
from tests.helpers.models import TinyLM, build, tokens_of
from tests.helpers.trainer import fork_server
from zero_offload.runtime.ranks import group

WORLD, VICTIM, STRIKE = 2, 1, 5
"""Steps are known by then, and nothing is announced in them."""
TIME_LIMIT_S, NAMED_S = 90, 30
"""Of the process group; beside other tests."""


def run_rank(rank: int, folder: Path, signum: int) -> None:
    """The victim gets a signal in forward. The other has launched all of it, and asks its device for the loss."""
    torch.set_num_threads(1)
    device.load()
    torch.accelerator.set_device_index(rank)
    limit = datetime.timedelta(seconds=TIME_LIMIT_S)
    backend = f"cpu:gloo,{device.TYPE}:{device.TYPE}"
    dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=rank, world_size=WORLD, timeout=limit)
    # As between machines: in pages, each rank hears the others within a forward.
    group.open_channel = lambda _, members: (None, [[each] for each in members])  # type: ignore[attr-defined]
    model = build(TinyLM)
    zo.offload(model, zo.OffloadConfig(stage=3, device_memory="6MiB"))
    optimizer = zo.AdamW(model.parameters(), lr=1e-2)
    looked_s = 0.0
    try:
        for step in range(STRIKE + 1):
            if step == STRIKE and rank == VICTIM:
                model.blocks[1].register_forward_pre_hook(lambda *_: os.kill(os.getpid(), signum))  # type: ignore[operator, union-attr]
            began = time.monotonic()
            loss = model(tokens_of(10 * step + rank))
            launched = time.monotonic()
            loss.item()
            looked_s = time.monotonic() - launched
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    except zo.ZeroOffloadError as error:
        found = [type(error).__name__, str(error), looked_s, time.monotonic() - began]
        Path(folder, "found.json").write_text(json.dumps(found))
    os._exit(0)


@pytest.mark.parametrize(
    ("signum", "says"), [(signal.SIGKILL, "died without a last word"), (signal.SIGSTOP, "(stopped)")]
)
def test_a_rank_that_waits_for_its_device_names_the_culprit(signum: int, says: str, tmp_path: Path) -> None:
    processes = [fork_server().Process(target=run_rank, args=(rank, tmp_path, signum)) for rank in range(WORLD)]
    for process in processes:
        process.start()
    processes[1 - VICTIM].join(TIME_LIMIT_S)
    is_hanging = processes[1 - VICTIM].is_alive()
    for process in processes:
        process.kill()
        process.join()
    assert not is_hanging
    error, text, looked_s, took_s = json.loads((tmp_path / "found.json").read_text())
    assert error == "RankError" and text.startswith(f"rank {VICTIM} (process {processes[VICTIM].pid} ") and says in text
    # The fake device learns at once of a connection that has ended, and a launch raises.
    assert signum == signal.SIGKILL or looked_s > 0.5, "it has waited for its device"
    assert took_s < NAMED_S
