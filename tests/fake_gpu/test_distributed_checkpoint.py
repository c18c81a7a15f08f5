"""torch.distributed.checkpoint of a model that two GPUs compute with: a run goes on from it, whatever the tier."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

import zero_offload as zo
from tests.helpers import ranks
from tests.helpers.ranks import Case, Outcome, RankPools

pytestmark = pytest.mark.tools


def _states(model: nn.Module, optimizer: zo.AdamW) -> dict[str, object]:
    return {"model": model.state_dict(), "optim": optimizer.state_dict()}


def save_and_load(rank: int, world_size: int, first: Case, second: Case, path: str) -> bool:
    """True if two models go on alike: a saved model, and a model that was loaded from that."""
    group = dist.new_group(backend="gloo")
    # The device has no streams that torch's writer could copy ahead on.
    writer = dcp.FileSystemWriter(path, per_thread_copy_ahead=0)
    outcomes = []
    for case, num_steps in ((first, 2), (second, 1)):
        model, optimizer = ranks.start(case)
        ranks.steps(case, (rank, world_size), model, optimizer, range(num_steps), Outcome())
        if case is first:
            dcp.save(_states(model, optimizer), storage_writer=writer, process_group=group)
        else:
            dcp.load(_states(model, optimizer), checkpoint_id=path, process_group=group)
        out = Outcome()
        ranks.steps(case, (rank, world_size), model, optimizer, range(2, 4), out)
        out.params = ranks.read_params(model)
        outcomes.append(out)
        zo.close(model)
    return outcomes[0] == outcomes[1]


@pytest.mark.parametrize("where", ["cpu", "device", "nvme"])
def test_a_run_goes_on_from_it(where: str, tmp_path: Path, pools: RankPools) -> None:
    cases = []
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        settings = {"params": where, "optimizer": where, "nvme": tmp_path / name if where == "nvme" else None}
        cases.append(Case({"precision": "bf16", "stage": 3, **settings}, num_frozen=1))
    assert pools.of(2, on_device=True).succeed(save_and_load, *cases, str(tmp_path / "saved")) == [True, True]
